//! One interval that held, and everything that makes it not hold, one thing at a time.

use super::*;
use crate::{
    ledger::{ProbeHealth, ProgramHealth},
    sweep::SetFault,
};

const S: u64 = 1_000_000_000;
const OWNER: CgroupId = CgroupId(42);
const OTHER: CgroupId = CgroupId(7);

fn cpus() -> CpuSet {
    "2-3".parse().unwrap()
}

fn subject() -> Subject {
    Subject {
        owner: "run/db".parse().unwrap(),
        cpus: cpus(),
        mode: Mode::Partition,
        cgroup: OWNER,
        sets_swept: true,
        beside: Beside::default(),
        kthread_budget_ns_per_s: 10_000_000,
    }
}

const TOLERANCE: Tolerance = Tolerance { tick_ns: 4_000_000, per_switch_ns: 10_000 };

/// After `t` seconds: each CPU 600 ms owner, 399 ms idle, 1 ms bound kernel threads a second; 100 switches.
fn evidence(t: u64) -> Evidence {
    let at = Instant { mono_ns: 100 * S + t * S, wall_ns: 1_700_000_000 * S + t * S };
    let times = ClassTimes {
        owner_ns: t * 600_000_000,
        idle_ns: t * 399_000_000,
        kthread_bound_ns: t * 1_000_000,
        ..ClassTimes::default()
    };
    let cpu = |cpu| CpuLedger {
        cpu,
        owner: OWNER,
        generation: 1,
        from_ns: 100 * S,
        to_ns: at.mono_ns,
        times,
        switches: t * 100,
        breaks: 0,
    };
    let program = |name: &str, link| ProgramHealth { name: name.into(), link: Some(link), misses: 3 };
    Evidence {
        at,
        ledger: Some(LedgerSample {
            begun_ns: at.mono_ns - 50_000,
            ended_ns: at.mono_ns,
            cpus: cpus().iter().map(cpu).collect(),
            missing: CpuSet::new(),
            owners: vec![OwnerCounters {
                owner: OWNER,
                generation: 1,
                migrations: 5 * t,
                departures: 0,
                moved_out: 0,
            }],
            intruders: vec![],
            health: ProbeHealth {
                programs: vec![program("switch", 10), program("migrate", 11)],
                ring_drops: 0,
                intruders_lost: 0,
                sees_moves: true,
                moves_unseen: 0,
            },
        }),
        usage: [(OWNER, 2 * t * 600_000_000)].into(),
        noise: cpus().iter().map(|c| (c, CpuNoise::default())).collect(),
        clock: ClockState { source: "tsc".into(), suspended_ns: 5 * S },
        online: "0-7".parse().unwrap(),
    }
}

fn verdict(change: impl FnOnce(&mut Subject, &mut Evidence, &mut Evidence)) -> Verdict {
    let (mut subject, mut from, mut to) = (subject(), evidence(1), evidence(11));
    change(&mut subject, &mut from, &mut to);
    judge(&subject, &from, &to, &[], TOLERANCE)
}

fn ledger(e: &mut Evidence) -> &mut LedgerSample {
    e.ledger.as_mut().unwrap()
}

fn intruder(pid: u32, kind: IntruderKind, ns: u64) -> Intruder {
    Intruder {
        cpu: CpuId(3),
        pid,
        tgid: pid,
        start_ns: 1,
        kind,
        comm: format!("task-{pid}"),
        cgroup: OTHER,
        ns,
        first_ns: 101 * S,
        last_ns: 110 * S,
    }
}

#[test]
fn held_needs_everything_and_here_is_everything() {
    let v = verdict(|_, _, _| {});
    assert_eq!((v.judgement, v.reasons.as_slice()), (Judgement::Held, &[] as &[String]));
    assert_eq!(v.accounts.len(), 2);
    assert_eq!((v.accounts[0].times.owner_ns, v.accounts[0].switches), (6 * S, 1000));
    assert_eq!((v.migrations, v.departures, v.lost), (50, 0, 0));
    assert_eq!((v.from, v.to), (evidence(1).at, evidence(11).at));
    assert!(v.means.iter().any(|m| m.contains("cpu.stat")) && !v.blind_spots.is_empty());
    // What is left out of tasks' clocks, and other owners' business, does not matter.
    let v = verdict(|_, _, to| {
        to.noise.insert(CpuId(2), CpuNoise { irq_ns: 300_000_000, ..CpuNoise::default() });
        *to.usage.get_mut(&OWNER).unwrap() -= 280_000_000;
        ledger(to).intruders.push(Intruder { cpu: CpuId(5), ..intruder(9, IntruderKind::Foreign, S) });
        ledger(to).health.ring_drops = 4;
    });
    assert_eq!((v.judgement, v.lost, v.intruders.len()), (Judgement::Held, 4, 0), "{:?}", v.reasons);
}

type Change = fn(&mut Subject, &mut Evidence, &mut Evidence);

#[test]
fn each_gap_alone_is_inconclusive() {
    let gaps: [(&str, Change); 21] = [
        ("eBPF programs are off", |_, _, to| to.ledger = None),
        ("eBPF programs are off", |_, from, _| from.ledger = None),
        ("CPU 3 was not watched", |_, _, to| {
            ledger(to).cpus.pop();
        }),
        ("CPU 2 was watched for another cgroup", |_, _, to| ledger(to).cpus[0].owner = OTHER),
        ("CPU 2: the assignment changed", |_, _, to| ledger(to).cpus[0].generation = 2),
        ("CPU 3: the assignment changed", |_, _, to| ledger(to).cpus[1].from_ns += 1),
        ("CPU 2: the ledger went backwards", |_, from, _| ledger(from).cpus[0].times.idle_ns += 100 * S),
        ("CPU 2: the classes sum to", |_, _, to| ledger(to).cpus[0].times.idle_ns += 1),
        ("CPU 3: 1 switches were not seen", |_, _, to| ledger(to).cpus[1].breaks = 1),
        ("straddle", |_, _, to| {
            let t = &mut ledger(to).cpus[0].times;
            (t.straddle_ns, t.idle_ns) = (1000, t.idle_ns - 1000);
        }),
        ("program switch is not attached", |_, _, to| ledger(to).health.programs[0].link = None),
        ("program migrate was detached and attached again", |_, _, to| {
            ledger(to).health.programs[1].link = Some(12);
        }),
        ("program switch was not there at the start", |_, from, _| {
            drop(ledger(from).health.programs.remove(0));
        }),
        ("skipped 2 runs of program switch", |_, _, to| ledger(to).health.programs[0].misses = 5),
        ("no program reports", |_, _, to| ledger(to).health.programs.clear()),
        ("departures were not counted", |_, _, to| ledger(to).owners.clear()),
        ("cpu.stat) could not be read", |_, _, to| to.usage.clear()),
        ("not stable", |_, from, to| (from.clock.source, to.clock.source) = ("hpet".into(), "hpet".into())),
        ("clocksource changed", |_, _, to| to.clock.source = "kvm-clock".into()),
        ("suspended", |_, _, to| to.clock.suspended_ns += S),
        ("CPUs 3 were offline", |_, _, to| to.online = "0-2,4-7".parse().unwrap()),
    ];
    for (needle, change) in gaps {
        let v = verdict(change);
        assert_eq!(v.judgement, Judgement::Inconclusive, "{needle}: {:?}", v.reasons);
        assert!(v.reasons.iter().any(|r| r.contains(needle)), "{needle}: {:?}", v.reasons);
    }
    let v = judge(&subject(), &evidence(1), &evidence(1), &[], TOLERANCE);
    assert_eq!(v.judgement, Judgement::Inconclusive, "an empty interval proves nothing");
}

/// Twice a tick, twice 50 µs of bracket on each of two CPUs, 2000 switches: 2 × 4 + 0.2 + 20 ms.
#[test]
fn the_owners_clock_may_differ_by_what_can_be_explained() {
    const ALLOWED: u64 = 28_200_000;
    for (off, judgement) in [(ALLOWED, Judgement::Held), (ALLOWED + 1, Judgement::Inconclusive)] {
        let less = verdict(|_, _, to| *to.usage.get_mut(&OWNER).unwrap() -= off);
        let more = verdict(|_, _, to| *to.usage.get_mut(&OWNER).unwrap() += off);
        assert_eq!((less.judgement, more.judgement), (judgement, judgement), "{off}: {:?}", less.reasons);
    }
}

#[test]
fn each_contradiction_alone_is_violated_also_when_the_evidence_has_gaps() {
    let foreign: Change = |_, _, to| {
        let t = &mut ledger(to).cpus[1].times;
        (t.foreign_ns, t.idle_ns) = (1, t.idle_ns - 1);
        ledger(to).intruders.push(intruder(99, IntruderKind::Foreign, 1));
    };
    let departure: Change = |_, _, to| ledger(to).owners[0].departures = 1;
    let kthread: Change = |_, _, to| {
        let t = &mut ledger(to).cpus[0].times;
        (t.kthread_unbound_ns, t.idle_ns) = (100_000_001, t.idle_ns - 100_000_001);
    };
    let gap: Change = |_, _, to| ledger(to).cpus[0].breaks = 1;
    for (needle, change) in [
        ("CPU 3: foreign tasks ran for 0.000 ms, longest task-99 (pid 99)", foreign),
        ("other CPUs 1 times", departure),
        ("CPU 2: kernel threads that could run elsewhere took 100.000 ms (budget 100.000 ms)", kthread),
    ] {
        for with_gap in [false, true] {
            let v = verdict(|s, from, to| {
                change(s, from, to);
                if with_gap {
                    gap(s, from, to);
                }
            });
            assert_eq!(v.judgement, Judgement::Violated, "{needle}");
            assert!(v.reasons[0].contains(needle), "contradictions come first: {:?}", v.reasons);
            assert_eq!(v.reasons.len(), 1 + usize::from(with_gap), "{:?}", v.reasons);
        }
    }
    let fault = |owner: &str| SetFinding {
        owner: owner.parse().unwrap(),
        fault: SetFault::Effective { effective: "0-7".parse().unwrap() },
    };
    let judged = |f| judge(&subject(), &evidence(1), &evidence(11), &[f], TOLERANCE).judgement;
    assert_eq!(judged(fault("run/db")), Judgement::Violated);
    assert_eq!(judged(fault("run/other")), Judgement::Held, "another owner's fault is not this one's");
}

#[test]
fn budgets_are_rates_over_at_least_a_second() {
    let with = |ns: u64, budget: u64, seconds: u64| {
        let (mut s, from, mut to) = (subject(), evidence(1), evidence(1 + seconds));
        s.kthread_budget_ns_per_s = budget;
        let t = &mut ledger(&mut to).cpus[0].times;
        (t.kthread_unbound_ns, t.idle_ns) = (ns, t.idle_ns - ns);
        judge(&s, &from, &to, &[], TOLERANCE).judgement
    };
    assert_eq!(with(50_000_000, 10_000_000, 5), Judgement::Held);
    assert_eq!(with(50_000_001, 10_000_000, 5), Judgement::Violated);
    assert_eq!(with(1, 0, 5), Judgement::Violated, "a budget of nothing");
    // Half a second: the budget of a whole one.
    let (from, mut to) = (evidence(1), evidence(2));
    to.at.mono_ns -= S / 2;
    for c in &mut ledger(&mut to).cpus {
        c.to_ns -= S / 2;
        c.times.idle_ns -= S / 2 - 210_000_000;
        c.times.owner_ns -= 200_000_000;
        (c.times.kthread_unbound_ns, c.times.idle_ns) = (10_000_000, c.times.idle_ns - 20_000_000);
    }
    *to.usage.get_mut(&OWNER).unwrap() -= 400_000_000;
    let v = judge(&subject(), &from, &to, &[], TOLERANCE);
    assert_eq!(v.judgement, Judgement::Held, "{:?}", v.reasons);
}

#[test]
fn intruders_are_differences_longest_first_and_pids_are_not_enough() {
    let v = verdict(|_, from, to| {
        ledger(from).intruders.push(intruder(5, IntruderKind::Foreign, 400));
        ledger(to).intruders.extend([
            intruder(5, IntruderKind::Foreign, 400),
            intruder(6, IntruderKind::UnboundKthread, 100),
            Intruder { start_ns: 2, ..intruder(5, IntruderKind::Foreign, 300) },
        ]);
    });
    let seen: Vec<_> = v.intruders.iter().map(|i| (i.pid, i.start_ns, i.ns)).collect();
    assert_eq!(
        seen,
        [(5, 2, 300), (6, 1, 100)],
        "a re-used pid is another task, and what was before is not counted"
    );
}

#[test]
fn members_say_what_nobody_keeps_out() {
    let blind = |mode| verdict(|s, _, _| s.mode = mode).blind_spots.len();
    assert_eq!(blind(Mode::Member), blind(Mode::Partition) + 1);
}

/// Whoever is moved to another cgroup is the owner's no more. That alone says nothing of where it ran; being seen on another
/// CPU does.
#[test]
fn a_task_that_was_taken_away_is_never_held() {
    let v = verdict(|_, from, to| {
        ledger(from).owners[0].moved_out = 2;
        ledger(to).owners[0].moved_out = 3;
    });
    assert_eq!((v.judgement, v.moved_out), (Judgement::Inconclusive, 1));
    assert!(v.reasons[0].starts_with("1 of its processes or threads left its cgroup"), "{:?}", v.reasons);
    let v = verdict(|_, _, to| {
        let owner = &mut ledger(to).owners[0];
        (owner.moved_out, owner.departures) = (1, 1);
    });
    assert_eq!((v.judgement, v.reasons.len()), (Judgement::Violated, 2), "{:?}", v.reasons);
    let v = verdict(|_, _, to| ledger(to).health.moves_unseen = 1);
    assert_eq!(v.judgement, Judgement::Inconclusive, "it may have been one of the owner's: {:?}", v.reasons);
    // Where nobody looks, that is said.
    let spots = |sees| verdict(|_, _, to| ledger(to).health.sees_moves = sees).blind_spots;
    assert!(!spots(true).contains(&BLIND_MOVES) && spots(false).contains(&BLIND_MOVES));
}
