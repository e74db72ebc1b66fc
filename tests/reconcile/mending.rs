//! What the kernel leaves wrong after CPUs went and came, and what ends that.

use crate::{
    hotplug::{KERNELS, busy, host, is_held, judged, off, on},
    world::{
        SECOND, assigned, cpus, existing, findings, foreign, kinds, log, logged, owner, p, run, settled,
        sound, text,
    },
};
use truepin::{
    CgroupPath, CpuId, CpusetFile,
    assignments::Mode,
    observed::{Step, Value},
    partition::PartitionKind,
    reconcile::{Event, FindingKind, Mend},
    request::Isolation,
    sweep::SetFault,
    verdict::Judgement,
};
use truepin_tests::{fake::Behaviour, sim::Sim};

fn mendings(sim: &Sim) -> Vec<(String, Vec<String>, String, Mend)> {
    findings(sim, |k| match k {
        FindingKind::Mending { owner, seen, switched, how } => {
            Some((owner.to_string(), seen.clone(), switched.to_string(), *how))
        }
        _ => None,
    })
}

fn all_mended(sim: &Sim) -> bool {
    let of: Vec<_> = sim.state.findings().filter(|f| matches!(f.kind, FindingKind::Mending { .. })).collect();
    !of.is_empty() && of.iter().all(|f| f.mended.is_some())
}

fn ended(sim: &Sim, path: &CgroupPath) -> usize {
    let member = |s: &&Step| matches!(s, Step::Write { path: p, new: Value::Partition(PartitionKind::Member), .. } if p == path);
    sim.eyes.steps.iter().filter(member).count()
}

/// 7.3: all CPUs of a local partition leave and return, and the kernel books only the first of them as taken.
#[test]
fn a_partition_that_leaks_is_ended_and_made_again() {
    let mut sim = logged(host(Behaviour::lax()));
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    sim.wait(10 * SECOND);
    assert_eq!(judged(&mut sim, "cgroup/user.slice", None).0, Judgement::Held);
    // Nobody looks meanwhile.
    let path = p("user.slice");
    let before = ended(&sim, &path);
    sim.eyes.others(|k| {
        for (cpu, online) in [(4, false), (5, false), (4, true), (5, true)] {
            k.set_online(CpuId(cpu), online).unwrap();
        }
    });
    assert_eq!(text(&sim, "user.slice", CpusetFile::Partition), "root");
    let leaked = sim.eyes.set(&CgroupPath::root(), "cpuset.cpus.effective").unwrap();
    assert!(leaked.contains(CpuId(5)), "the defect is not there: {leaked}");
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(sim.eyes.set(&CgroupPath::root(), "cpuset.cpus.effective"), Some(cpus("0-3,6-7")));
    let mendings = mendings(&sim);
    let [(owner, seen, _, Mend::Rebuild)] = &mendings[..] else { panic!("{mendings:?}\n{}", log(&sim)) };
    assert!(
        owner == "cgroup/user.slice" && seen.contains(&"cgroup / was allowed on CPUs 5".into()),
        "{seen:?}"
    );
    assert!(all_mended(&sim), "{}", log(&sim));
    assert_eq!(ended(&sim, &path), before + 1);
    // Others were allowed there: that is no gap.
    assert_eq!(judged(&mut sim, "cgroup/user.slice", None).0, Judgement::Violated);
    is_held(&mut sim, "cgroup/user.slice");
}

/// Up to 6.12: what the kernel refuses to take offline it has half taken offline before.
#[test]
fn a_task_that_a_refused_offline_let_out_is_called_back() {
    for behaviour in [Behaviour::strict(), Behaviour::amended()] {
        for (home, how) in [("truepin.slice/run-a", Mend::Rewrite), ("user.slice", Mend::Rebuild)] {
            let mut sim = logged(host(behaviour));
            let (name, wish) = if home == "user.slice" {
                ("cgroup/user.slice", existing(home, "4-5", Isolation::Partition))
            } else {
                ("run/a", run("a", "4-5", Isolation::Partition))
            };
            assigned(&mut sim, &wish);
            // Nothing is free in place of what goes.
            assigned(&mut sim, &run("b", "2-3,6-7", Isolation::Partition));
            let task = busy(&mut sim, home);
            sim.switch(&[off(4)]).unwrap();
            sim.rest().unwrap();
            settled(&mut sim);
            let before = ended(&sim, &p(home));
            let refused = sim.switch(&[off(5)]).unwrap();
            assert_eq!(refused, cpus("5"));
            assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("0-7")), "the defect is not there");
            assert_eq!(text(&sim, home, CpusetFile::Partition), "root");
            sim.rest().unwrap();
            settled(&mut sim);
            assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("5")), "{}", log(&sim));
            let told = mendings(&sim);
            let [(owner, seen, switched, done)] = &told[..] else { panic!("{told:?}\n{}", log(&sim)) };
            assert_eq!((owner.as_str(), switched.as_str(), *done), (name, "5", how));
            assert!(seen[0].contains("was allowed on CPUs 0-7"), "{seen:?}");
            assert!(all_mended(&sim), "{}", log(&sim));
            // Where the list can be written, nobody else is let in on the way.
            assert_eq!(ended(&sim, &p(home)) - before, usize::from(how == Mend::Rebuild));
            assert_eq!(judged(&mut sim, name, None).0, Judgement::Violated);
        }
    }
}

#[test]
fn of_many_tasks_that_were_let_out_some_are_told() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
    assigned(&mut sim, &run("b", "2-3,6-7", Isolation::Partition));
    let tasks: Vec<u32> = (0..50).map(|_| busy(&mut sim, "truepin.slice/run-a")).collect();
    sim.switch(&[off(4)]).unwrap();
    sim.rest().unwrap();
    sim.switch(&[off(5)]).unwrap();
    sim.rest().unwrap();
    settled(&mut sim);
    let masks: Vec<_> = findings(&sim, |k| match k {
        FindingKind::Set(f) if matches!(f.fault, SetFault::Mask { .. }) => Some(()),
        _ => None,
    });
    assert_eq!(masks.len(), 32, "{}", log(&sim));
    let mendings = mendings(&sim);
    let [(_, seen, ..)] = &mendings[..] else { panic!("{mendings:?}") };
    assert_eq!(seen.len(), 50);
    let back = |t: &u32| sim.eyes.kernel().mask(*t) == Some(&cpus("5"));
    assert!(tasks.iter().all(back), "{}", log(&sim));
}

#[test]
fn an_offline_that_was_refused_is_found_at_the_tick_where_attempts_are_not_heard() {
    for no_attempts in [false, true] {
        let (mut setup, kernel) = host(Behaviour::strict());
        setup.facts.no_attempts = no_attempts;
        let mut sim = logged((setup, kernel));
        assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
        assigned(&mut sim, &run("b", "2-3,6-7", Isolation::Partition));
        let task = busy(&mut sim, "truepin.slice/run-a");
        sim.switch(&[off(4)]).unwrap();
        sim.rest().unwrap();
        let refused = sim.eyes.others(|k| k.set_online(CpuId(5), false));
        assert!(refused.is_err());
        assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("0-7")), "the defect is not there");
        sim.wait(30 * SECOND);
        sim.tick().unwrap();
        sim.rest().unwrap();
        let expected = if no_attempts { "5" } else { "0-7" };
        assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus(expected)), "{no_attempts}\n{}", log(&sim));
    }
}

/// On 6.1 a task forgets its own mask whenever its cpuset changes, truepin's threads among them.
#[test]
fn the_agent_keeps_to_the_pool_anew_after_every_change() {
    let mut sim = logged(host(Behaviour::local_only()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
    let confined = sim.confinements;
    foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus.partition", "member", Some(9));
    settled(&mut sim);
    assert!(sim.confinements > confined);
    let confined = sim.confinements;
    sim.wait(SECOND);
    sim.tick().unwrap();
    assert_eq!(sim.confinements, confined);
}

#[test]
fn what_cannot_be_mended_is_not_tried_for_ever() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Partition));
    assigned(&mut sim, &run("b", "2-3,6-7", Isolation::Partition));
    let task = busy(&mut sim, "truepin.slice/run-a");
    sim.switch(&[off(4)]).unwrap();
    sim.rest().unwrap();
    let (mut tried, mut stuck) = (0, 0);
    for _ in 0..10 {
        // Nothing reports it. 6.12 refuses only where it has just built the domain, so CPU 4 is back for a moment.
        let refused = sim.eyes.others(|k| {
            k.set_online(CpuId(4), true)?;
            k.set_online(CpuId(4), false)?;
            k.set_online(CpuId(5), false)
        });
        assert!(refused.is_err(), "{}", log(&sim));
        assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("0-7")), "{}", log(&sim));
        sim.ask(|ticket| Event::Inspect { ticket }).unwrap();
        sim.rest().unwrap();
        tried = mendings(&sim).len();
        stuck = findings(&sim, |k| matches!(k, FindingKind::Stuck(_)).then_some(())).len();
    }
    sound(&mut sim);
    assert_eq!((tried, stuck), (3, 1), "{}", log(&sim));
    // Looking does not put it off.
    for _ in 0..4 {
        sim.wait(12 * SECOND);
        sim.ask(|ticket| Event::Inspect { ticket }).unwrap();
        sim.rest().unwrap();
    }
    assert_eq!(mendings(&sim).len(), 3, "{}", log(&sim));
    assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("0-7")));
    let due = sim.state.next_deadline().unwrap();
    sim.wait(due - sim.now.mono_ns);
    sim.happens(Event::Disturbed { writes: Vec::new(), departures: Vec::new() }).unwrap();
    assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("5")), "{}", log(&sim));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Partition));
}

/// The CPU goes once more between the reading and the write of `member`: the list is out of bandwidth by then, so that the
/// kernel keeps its flag, and no list of that member may be written any more (7.3).
#[test]
fn a_member_that_kept_its_flag_is_freed() {
    for behaviour in KERNELS.map(|k| k()) {
        let mut sim = logged(host(behaviour));
        assigned(&mut sim, &run("a", "5", Isolation::Partition));
        assigned(&mut sim, &run("b", "2-4", Isolation::Partition));
        assigned(&mut sim, &run("c", "6-7", Isolation::Member));
        busy(&mut sim, "truepin.slice/run-a");
        sim.eyes.others(|k| {
            k.set_online(CpuId(5), false).unwrap();
            k.write_file(&p("truepin.slice/run-a"), "cpuset.cpus.partition", "member").unwrap();
        });
        sim.eyes.steps.clear();
        sim.switch(&[off(5)]).unwrap();
        sim.rest().unwrap();
        sim.wait(SECOND);
        sim.tick().unwrap();
        sound(&mut sim);
        assert_eq!(
            log(&sim).contains("device or resource busy"),
            behaviour == Behaviour::lax(),
            "{}",
            log(&sim)
        );
        assert!(kinds(&sim).is_disjoint(&["step-failed", "stuck"].into()), "{}", log(&sim));
        let root = |s: &&Step| matches!(s, Step::Write { path, new: Value::Partition(PartitionKind::Root), .. } if *path == p("truepin.slice/run-a"));
        let made = sim.eyes.steps.iter().filter(root).count();
        assert_eq!(made, usize::from(behaviour == Behaviour::lax()), "{}", log(&sim));
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Cpus), "0-1,5", "{}", log(&sim));
        sim.switch(&[on(5)]).unwrap();
        sim.rest().unwrap();
        settled(&mut sim);
        is_held(&mut sim, "run/a");
    }
}
