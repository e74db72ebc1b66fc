//! CPUs that go and come while truepin runs.

use crate::world::{
    SECOND, assigned, cpus, effective, existing, findings, foreign, kinds, log, logged, owner, p, refused,
    run, settled, sound, text,
};
use truepin::{
    CpuId, CpuSet, CpusetFile,
    ledger::{Departure, DepartureKind},
    plan::Problem,
    reconcile::{AdmitError, Event, FindingKind, HotplugReport},
    request::Isolation,
    verdict::{Evidence, Judgement},
};
use truepin_tests::{
    fake::{Activity, Behaviour, FakeKernel, TaskTraits},
    sim::{Setup, Sim},
};

pub(crate) const KERNELS: [fn() -> Behaviour; 4] =
    [Behaviour::local_only, Behaviour::strict, Behaviour::amended, Behaviour::lax];

/// With whatever partitions this kernel has.
pub(crate) fn host(behaviour: Behaviour) -> (Setup, FakeKernel) {
    let (mut setup, kernel) = crate::world::host(behaviour);
    setup.facts.partition = true;
    (setup, kernel)
}

pub(crate) fn on(cpu: u32) -> (CpuId, bool) {
    (CpuId(cpu), true)
}

pub(crate) fn off(cpu: u32) -> (CpuId, bool) {
    (CpuId(cpu), false)
}

pub(crate) fn held(sim: &Sim, name: &str) -> String {
    sim.state.assignments.cpus_of(&owner(name)).unwrap().to_string()
}

pub(crate) fn saves(sim: &Sim) -> u64 {
    sim.disk.saves()
}

/// Of the interval since `from`, or since the assignment.
pub(crate) fn judged(sim: &mut Sim, name: &str, from: Option<&Evidence>) -> (Judgement, Vec<String>) {
    let now = sim.evidence().unwrap();
    let v = sim.state.verdict(&owner(name), from, &now).unwrap();
    (v.judgement, v.reasons)
}

pub(crate) fn is_held(sim: &mut Sim, name: &str) {
    let from = sim.evidence().unwrap();
    sim.wait(10 * SECOND);
    sim.tick().unwrap();
    let (judgement, reasons) = judged(sim, name, Some(&from));
    assert_eq!(judgement, Judgement::Held, "{name}: {reasons:?}\n{}", log(sim));
}

/// A process that the owner of this cgroup has running: one that sleeps is not pushed away from its CPU.
pub(crate) fn busy(sim: &mut Sim, path: &str) -> u32 {
    let runs = TaskTraits { activity: Activity::Runs, ..TaskTraits::default() };
    sim.eyes.others(|k| k.spawn(&p(path), 1, runs).unwrap())
}

fn degraded(sim: &Sim) -> Vec<String> {
    let told = |p: &Problem| match p {
        Problem::Degraded { owner, cpus, offline } => Some(format!("{owner} {cpus} {offline}")),
        _ => None,
    };
    sim.state.problems().filter_map(told).collect()
}

const BOTH: [Isolation; 2] = [Isolation::Partition, Isolation::Member];

#[test]
fn a_lost_cpu_is_replaced_near_what_is_left_and_nobody_is_moved_back() {
    for behaviour in KERNELS.map(|k| k()) {
        for isolation in BOTH {
            let mut sim = logged(host(behaviour));
            assigned(&mut sim, &run("a", "4-5", isolation));
            assigned(&mut sim, &run("b", "2", isolation));
            let task = busy(&mut sim, "truepin.slice/run-a");
            sim.wait(10 * SECOND);
            let from = sim.evidence().unwrap();
            sim.switch(&[off(5)]).unwrap();
            assert_eq!(held(&sim, "run/a"), "4-5", "not before CPUs have come to rest");
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!((held(&sim, "run/a"), held(&sim, "run/b")), ("4,6".into(), "2".into()));
            assert_eq!(sim.disk.record().unwrap().assignments.owners[&owner("run/a")].cpus, cpus("4,6"));
            let reason = &sim.state.assignments.owners[&owner("run/a")].reason;
            assert!(reason.ends_with("1 whole core, CPU 6 on a core shared with others"), "{reason}");
            assert_eq!(effective(&sim, "truepin.slice/run-a"), cpus("4,6"));
            assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("4,6")));
            let (judgement, reasons) = judged(&mut sim, "run/a", Some(&from));
            assert_eq!(judgement, Judgement::Inconclusive, "{reasons:?}");
            assert!(reasons.iter().any(|r| r.contains("given CPUs 4,6 instead of 4-5")), "{reasons:?}");
            assert_eq!(judged(&mut sim, "run/b", Some(&from)).0, Judgement::Held);
            is_held(&mut sim, "run/a");
            let saved = saves(&sim);
            sim.switch(&[on(5)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(held(&sim, "run/a"), "4,6");
            assert!(sim.state.free().contains(CpuId(5)));
            // The record says on what machine it was written.
            assert_eq!(saves(&sim), saved + 1);
            assert_eq!(degraded(&sim), [""; 0]);
            assert_eq!(kinds(&sim).into_iter().collect::<Vec<_>>(), ["refitted"], "{}", log(&sim));
        }
    }
}

#[test]
fn what_is_back_before_all_is_quiet_moves_nobody_and_is_not_forgotten() {
    for behaviour in KERNELS.map(|k| k()) {
        for isolation in BOTH {
            let mut sim = logged(host(behaviour));
            assigned(&mut sim, &run("a", "4-5", isolation));
            assigned(&mut sim, &run("b", "2-3", isolation));
            sim.wait(10 * SECOND);
            let (from, steps, saved) = (sim.evidence().unwrap(), sim.eyes.steps.len(), saves(&sim));
            for _ in 0..8 {
                sim.switch(&[off(5)]).unwrap();
                sim.wait(60_000_000);
                sim.switch(&[on(5)]).unwrap();
                sim.wait(60_000_000);
            }
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(
                (held(&sim, "run/a"), steps, saved),
                ("4-5".into(), sim.eyes.steps.len(), saves(&sim))
            );
            // Two samples show nothing of it.
            let (judgement, reasons) = judged(&mut sim, "run/a", Some(&from));
            assert_eq!(judgement, Judgement::Inconclusive);
            assert_eq!(reasons, ["CPUs 5 went offline within the interval"]);
            assert_eq!(judged(&mut sim, "run/a", None).0, Judgement::Inconclusive);
            assert_eq!(judged(&mut sim, "run/b", Some(&from)).0, Judgement::Held);
            is_held(&mut sim, "run/a");
        }
    }
}

#[test]
fn a_storm_is_answered_once_a_second_and_who_has_nothing_left_at_once() {
    let mut sim = logged(host(Behaviour::lax()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
    assigned(&mut sim, &run("b", "2", Isolation::Partition));
    let looks = |sim: &Sim| sim.eyes.log.iter().flatten().filter(|l| l.contains("instead of")).count();
    // CPU 7 goes and comes every 50 ms, and 5 is away.
    sim.switch(&[off(5)]).unwrap();
    for n in 0..19 {
        sim.wait(50_000_000);
        sim.switch(&[if n % 2 == 0 { off(7) } else { on(7) }]).unwrap();
        let due = sim.state.next_deadline().unwrap();
        assert!(due > sim.now.mono_ns, "{n}");
    }
    assert_eq!(looks(&sim), 0);
    let due = sim.state.next_deadline().unwrap();
    assert!(due <= sim.now.mono_ns + 50_000_000, "a second after the first report");
    // The only CPU of an owner.
    sim.switch(&[off(2)]).unwrap();
    assert_eq!((held(&sim, "run/b"), held(&sim, "run/a")), ("3".into(), "4-5".into()));
    assert_eq!(sim.eyes.set(&p("truepin.slice/run-b"), "cpuset.cpus.effective"), Some(cpus("3")));
    sim.rest().unwrap();
    settled(&mut sim);
    assert_eq!(held(&sim, "run/a"), "4,6");
}

#[test]
fn without_reports_the_next_look_finds_it() {
    for behaviour in KERNELS.map(|k| k()) {
        let mut sim = logged(host(behaviour));
        assigned(&mut sim, &run("a", "4-5", Isolation::Member));
        let from = sim.evidence().unwrap();
        sim.eyes.others(|k| k.set_online(CpuId(5), false).unwrap());
        sim.tick().unwrap();
        settled(&mut sim);
        assert_eq!(held(&sim, "run/a"), "4,6");
        assert_eq!(judged(&mut sim, "run/a", Some(&from)).0, Judgement::Inconclusive);
    }
}

#[test]
fn what_cannot_be_replaced_stays_its_owners_and_serves_it_again() {
    for behaviour in KERNELS.map(|k| k()) {
        for isolation in BOTH {
            let mut sim = logged(host(behaviour));
            assigned(&mut sim, &run("a", "2-4", isolation));
            assigned(&mut sim, &run("b", "5-7", isolation));
            let generation = sim.state.assignments.owners[&owner("run/b")].generation;
            sim.switch(&[off(6), off(7)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(degraded(&sim), ["run/b 5-7 6-7"]);
            let why = sim.state.degraded(&owner("run/b")).unwrap().to_string();
            assert!(why.starts_with("run/b is degraded: CPUs 6-7 of its 5-7 are offline"), "{why}");
            assert_eq!(effective(&sim, "truepin.slice/run-b"), cpus("5"));
            let told = sim.reports.iter().find(|f| matches!(f.kind, FindingKind::Problem(_))).unwrap().id;
            let mended = |sim: &Sim| sim.state.findings().find(|f| f.id == told).unwrap().mended.is_some();
            assert!(!mended(&sim));
            // They are nobody else's when they come back, whoever asks first.
            let error = refused(&mut sim, &run("c", "6", Isolation::Auto));
            assert!(matches!(error, AdmitError::Reserve(_)), "{error}");
            sim.switch(&[on(6), on(7)]).unwrap();
            let error = refused(&mut sim, &run("c", "6", Isolation::Auto));
            assert!(matches!(error, AdmitError::Reserve(_)), "{error}");
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(effective(&sim, "truepin.slice/run-b"), cpus("5-7"));
            assert_eq!(sim.state.assignments.owners[&owner("run/b")].generation, generation, "no move");
            assert!(degraded(&sim).is_empty() && mended(&sim) && !kinds(&sim).contains("refitted"));
            is_held(&mut sim, "run/b");
            // Somebody else gives up first.
            sim.switch(&[off(6), off(7)]).unwrap();
            sim.rest().unwrap();
            assert_eq!(degraded(&sim), ["run/b 5-7 6-7"]);
            sim.release(Some(&owner("run/a"))).unwrap();
            settled(&mut sim);
            assert_eq!((held(&sim, "run/b"), degraded(&sim)), ("2-3,5".into(), vec![]));
            sim.switch(&[on(6), on(7)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(held(&sim, "run/b"), "2-3,5");
        }
    }
}

#[test]
fn who_has_no_cpu_left_runs_in_the_pool_and_nowhere_else() {
    for behaviour in KERNELS.map(|k| k()) {
        for isolation in BOTH {
            // Without its domain's last CPU a partition cannot be on 6.12, so there it is left out.
            if behaviour.keeps_last_cpu && isolation == Isolation::Partition {
                continue;
            }
            let mut sim = logged(host(behaviour));
            assigned(&mut sim, &run("a", "2-4", Isolation::Member));
            assigned(&mut sim, &run("b", "5-7", isolation));
            let task = busy(&mut sim, "truepin.slice/run-b");
            sim.switch(&[off(5), off(6), off(7)]).unwrap();
            sim.rest().unwrap();
            sound(&mut sim);
            assert_eq!(degraded(&sim), ["run/b 5-7 5-7"]);
            assert_eq!(text(&sim, "truepin.slice/run-b", CpusetFile::Partition), "member");
            assert_eq!(
                sim.eyes.kernel().mask(task),
                Some(&cpus("0-1")),
                "and not on the member's\n{}",
                log(&sim)
            );
            assert_eq!(sim.plan().steps, []);
            sim.switch(&[on(6)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("6")));
            sim.switch(&[on(7), on(5)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(
                (held(&sim, "run/b"), sim.eyes.kernel().mask(task)),
                ("5-7".into(), Some(&cpus("5-7")))
            );
            assert!(degraded(&sim).is_empty());
            let (judgement, reasons) = judged(&mut sim, "run/b", None);
            assert_ne!(judgement, Judgement::Held, "{reasons:?}");
            is_held(&mut sim, "run/b");
            is_held(&mut sim, "run/a");
        }
    }
}

/// It moves about in the pool all the time; one that has CPUs, if only by everybody's lists, is told as ever.
#[test]
fn only_who_has_a_cpu_is_told_as_departing() {
    let mut sim = logged(host(Behaviour::local_only()));
    for (name, set) in [("a", "2-3"), ("b", "4-5"), ("c", "6")] {
        assigned(&mut sim, &run(name, set, Isolation::Partition));
        busy(&mut sim, &format!("truepin.slice/run-{name}"));
    }
    let told = |sim: &mut Sim, name: &str| {
        let owner = sim.eyes.kernel().id(&p(&format!("truepin.slice/run-{name}"))).unwrap();
        let (kind, at_ns, from, to) = (DepartureKind::Migrated, sim.now.mono_ns, CpuId(0), CpuId(1));
        let departure = Departure { owner, pid: 9, tgid: 9, comm: name.into(), kind, from, to, at_ns, by: 1 };
        sim.happens(Event::Disturbed { writes: Vec::new(), departures: vec![departure] }).unwrap();
        findings(sim, |k| matches!(k, FindingKind::Departed { .. }).then_some(())).len()
    };
    sim.switch(&[off(7), off(4), off(5)]).unwrap();
    sim.rest().unwrap();
    assert_eq!(degraded(&sim), ["run/b 4-5 4-5"], "{}", log(&sim));
    assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "member", "{}", log(&sim));
    assert_eq!(told(&mut sim, "b"), 0, "{}", log(&sim));
    assert_eq!(told(&mut sim, "a"), 1, "{}", log(&sim));
    assert_eq!(sim.state.departures().count(), 2, "both are kept");
}

#[test]
fn reserved_cpus_stay_reserved() {
    for behaviour in KERNELS.map(|k| k()) {
        let mut sim = logged(host(behaviour));
        assigned(&mut sim, &run("a", "2-7", Isolation::Auto));
        sim.switch(&[off(1)]).unwrap();
        sim.rest().unwrap();
        settled(&mut sim);
        assert_eq!(sim.state.assignments.reserved, cpus("0-1"));
        sim.switch(&[on(1)]).unwrap();
        sim.rest().unwrap();
        settled(&mut sim);
        assert_eq!((sim.state.free(), held(&sim, "run/a")), (CpuSet::new(), "2-7".into()));
        // Nothing is left for everybody else: said, with what to do, and the owner keeps what it has.
        let refused = sim.switch(&[off(0), off(1)]).unwrap();
        sim.rest().unwrap();
        sound(&mut sim);
        if behaviour.keeps_last_cpu {
            assert_eq!((refused, sim.state.problems().count()), (cpus("1"), 0), "the last of its domain");
            continue;
        }
        assert_eq!(refused, CpuSet::new());
        let problems: Vec<String> = sim.state.problems().map(ToString::to_string).collect();
        assert!(
            problems.iter().any(|p| p.contains("bring a CPU online that no owner holds")),
            "{problems:?}"
        );
        assert!(!kinds(&sim).contains("plan-broken"), "{}", log(&sim));
        sim.switch(&[on(1), on(0)]).unwrap();
        sim.rest().unwrap();
        settled(&mut sim);
        assert_eq!((held(&sim, "run/a"), sim.state.problems().count()), ("2-7".into(), 0));
        is_held(&mut sim, "run/a");
    }
}

#[test]
fn a_cpu_that_was_away_at_the_start_is_handed_out_when_it_comes() {
    let (setup, mut kernel) = host(Behaviour::lax());
    for cpu in [6, 7] {
        kernel.set_online(CpuId(cpu), false).unwrap();
    }
    let mut sim = logged((setup, kernel));
    sim.restart().unwrap();
    assigned(&mut sim, &run("a", "2-5", Isolation::Auto));
    let error = refused(&mut sim, &run("b", "6-7", Isolation::Auto));
    assert!(
        matches!(error, AdmitError::Stuck(_) | AdmitError::Problem(_) | AdmitError::Reserve(_)),
        "{error}"
    );
    sim.switch(&[on(6), on(7)]).unwrap();
    sim.rest().unwrap();
    settled(&mut sim);
    assert_eq!((sim.state.free(), sim.state.topology.online()), (cpus("6-7"), &cpus("0-7")));
    let mut wish = run("b", "6-7", Isolation::Auto);
    wish.exactly = None;
    assigned(&mut sim, &wish);
    assert_eq!(
        (held(&sim, "run/b"), sim.state.nodes_of(&cpus("6-7")).to_string()),
        ("6-7".into(), "1".into())
    );
}

#[test]
fn lost_reports_may_have_been_of_anybody() {
    let mut sim = logged(host(Behaviour::lax()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Auto));
    sim.wait(SECOND);
    let from = sim.evidence().unwrap();
    sim.happens(Event::Hotplug(HotplugReport { lost: true, ..HotplugReport::default() })).unwrap();
    settled(&mut sim);
    let (judgement, reasons) = judged(&mut sim, "run/a", Some(&from));
    assert_eq!(judgement, Judgement::Inconclusive);
    assert!(reasons[0].contains("reports of CPU hotplug were lost"), "{reasons:?}");
    is_held(&mut sim, "run/a");
}

#[test]
fn audited_owners_are_told_of_and_nothing_is_written() {
    let (mut setup, kernel) = host(Behaviour::lax());
    setup.settings.audit = true;
    let mut sim = logged((setup, kernel));
    sim.eyes.others(|k| k.write_file(&p("user.slice"), "cpuset.cpus", "4-5").unwrap());
    sim.admit(&existing("user.slice", "4-5", Isolation::Auto)).unwrap();
    let name = "cgroup/user.slice";
    is_held(&mut sim, name);
    let from = sim.evidence().unwrap();
    for changes in [&[off(5)][..], &[off(4)], &[on(4), on(5)]] {
        sim.switch(changes).unwrap();
        sim.rest().unwrap();
        let (judgement, reasons) = judged(&mut sim, name, Some(&from));
        assert_eq!(judgement, Judgement::Inconclusive, "{changes:?}: {reasons:?}");
    }
    assert!(sim.eyes.steps.is_empty() && saves(&sim) == 0 && held(&sim, name) == "4-5");
    is_held(&mut sim, name);
}

#[test]
fn a_partition_that_ends_before_its_cpu_is_reported_was_no_fault() {
    for (after, judgement) in [(SECOND / 2, Judgement::Inconclusive), (2 * SECOND, Judgement::Violated)] {
        for by in [None, Some(9)] {
            let mut sim = logged(host(Behaviour::strict()));
            assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
            sim.wait(10 * SECOND);
            let from = sim.evidence().unwrap();
            // As 6.10 and later end it: the state first, and CPU 5 is still online.
            foreign(&mut sim, "machine.slice/cpuset.cpus", "5-6", by);
            settled(&mut sim);
            assert_eq!(judged(&mut sim, "cgroup/user.slice", Some(&from)).0, Judgement::Violated);
            sim.wait(after);
            let went = HotplugReport { went: cpus("5"), ..HotplugReport::default() };
            sim.at_once(Event::Hotplug(went)).unwrap();
            let seen = judged(&mut sim, "cgroup/user.slice", Some(&from));
            // Somebody who is known did it.
            let expected = if by.is_some() { Judgement::Violated } else { judgement };
            assert_eq!(seen.0, expected, "{seen:?} after {after} by {by:?}\n{}", log(&sim));
        }
    }
}

/// It is told also while nothing is called wrong.
#[test]
fn what_ended_a_partition_is_told_while_cpus_go() {
    let mut sim = logged(host(Behaviour::lax()));
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    sim.switch(&[off(4), off(5)]).unwrap();
    let told = findings(&sim, |k| match k {
        FindingKind::Set(f) => Some(f.fault.to_string()),
        _ => None,
    });
    assert_eq!(told.len(), 1, "{told:?}\n{}", log(&sim));
    assert!(told[0].starts_with("the partition read \"root invalid\""), "{told:?}");
    let (judgement, reasons) = judged(&mut sim, "cgroup/user.slice", None);
    assert_eq!(judgement, Judgement::Inconclusive, "{reasons:?}");
}

/// Where partitions are local, nobody in the slice is one while somebody there has no CPU at all.
#[test]
fn a_partition_that_truepin_gave_up_for_a_time_is_nobodys_fault() {
    let mut sim = logged(host(Behaviour::local_only()));
    for (name, set) in [("a", "2-3"), ("b", "4-5"), ("c", "6")] {
        assigned(&mut sim, &run(name, set, Isolation::Partition));
        busy(&mut sim, &format!("truepin.slice/run-{name}"));
    }
    sim.wait(10 * SECOND);
    let from = sim.evidence().unwrap();
    sim.switch(&[off(7), off(4), off(5)]).unwrap();
    sim.rest().unwrap();
    assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "member", "{}", log(&sim));
    sim.wait(10 * SECOND);
    let between = sim.evidence().unwrap();
    // Nobody's: it is given to b when all is quiet.
    sim.switch(&[on(7)]).unwrap();
    sim.rest().unwrap();
    settled(&mut sim);
    assert_eq!(held(&sim, "run/b"), "4,7");
    assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "root", "{}", log(&sim));
    for from in [&from, &between] {
        let (judgement, reasons) = judged(&mut sim, "run/a", Some(from));
        assert_eq!(judgement, Judgement::Inconclusive, "{reasons:?}\n{}", log(&sim));
        assert!(reasons.iter().any(|r| r.contains("it was no partition for a time")), "{reasons:?}");
    }
    let lost = |k: &FindingKind| {
        matches!(k, FindingKind::Set(f) if f.fault.to_string().contains("\"member\"")).then_some(())
    };
    assert!(findings(&sim, lost).is_empty(), "{}", log(&sim));
}

#[test]
fn without_uevents_nobody_is_held() {
    let (mut setup, kernel) = host(Behaviour::strict());
    setup.facts.no_uevents = true;
    let mut sim = logged((setup, kernel));
    assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
    sim.wait(10 * SECOND);
    sim.tick().unwrap();
    let (judgement, reasons) = judged(&mut sim, "run/a", None);
    assert_eq!(judgement, Judgement::Inconclusive);
    assert!(reasons.iter().any(|r| r.starts_with("CPU hotplug is not heard")), "{reasons:?}");
}
