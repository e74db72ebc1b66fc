//! What others change is repaired and named.

use crate::world::{
    MINUTE, SECOND, assigned, assigned_though_unsettled, client, cpus, drifted, drifts, effective, existing,
    findings, foreign, host, kinds, log, logged, owner, p, refused, run, settled, sim, sound, text,
};
use std::collections::BTreeSet;
use truepin::observed::Step;
use truepin::reconcile::{Cause, Finding, FindingKind};
use truepin::request::Isolation;
use truepin::sweep::SetFault;
use truepin::verdict::Judgement;
use truepin::{CpuId, CpusetFile};
use truepin_tests::fake::Behaviour;
use truepin_tests::sim::{Foreign, Sim};

#[test]
fn foreign_writes_are_repaired_and_named() {
    let partition = |sim: &mut Sim| assigned(sim, &run("a", "2-3", Isolation::Partition));
    let member = |sim: &mut Sim| assigned(sim, &run("a", "2-3", Isolation::Member));
    let cgroup = |sim: &mut Sim| assigned(sim, &existing("system.slice/a", "2-3", Isolation::Partition));
    let a = "truepin.slice/run-a";
    for (n, (start, file, value, wanted)) in [
        (&partition as &dyn Fn(&mut Sim), format!("{a}/cpuset.cpus"), "4-5", "2-3"),
        (&partition, format!("{a}/cpuset.cpus.exclusive"), "3", "2-3"),
        (&partition, format!("{a}/cpuset.cpus.partition"), "member", "root"),
        (&partition, format!("{a}/cpuset.cpus.partition"), "isolated", "root"),
        (&partition, "truepin.slice/cpuset.cpus.exclusive".into(), "2", "2-3"),
        (&partition, "truepin.slice/cpuset.cpus".into(), "4-5", ""),
        (&member, format!("{a}/cpuset.cpus"), "2-5", "2-3"),
        (&member, format!("{a}/cpuset.cpus"), "0", "2-3"),
        (&member, format!("{a}/cpuset.cpus.partition"), "root", "member"),
        (&member, "user.slice/cpuset.cpus".into(), "3-4", "0-1,4-7"),
        (&cgroup, "system.slice/a/cpuset.cpus.partition".into(), "member", "root"),
        (&cgroup, "system.slice/a/cpuset.cpus.exclusive".into(), "6", "2-3"),
        (&cgroup, "system.slice/cpuset.cpus.exclusive".into(), "", "2-3"),
    ]
    .into_iter()
    .enumerate()
    {
        for behaviour in [Behaviour::strict(), Behaviour::lax()] {
            let mut sim = logged(host(behaviour));
            start(&mut sim);
            sim.reports.clear();
            foreign(&mut sim, &file, value, Some(77));
            settled(&mut sim);
            let (path, name) = file.rsplit_once('/').unwrap();
            let mine: Vec<_> = drifts(&sim).into_iter().filter(|d| d.0 == path && d.1 == name).collect();
            assert_eq!(mine.len(), 1, "{n} {behaviour:?}: {:?}", drifts(&sim));
            let (_, _, found, want, writer) = &mine[0];
            assert!(found.starts_with(value), "{n}: {found}");
            assert_eq!((want.as_str(), *writer), (wanted, Some(77)), "{n} {behaviour:?}");
            let mended = sim.state.findings().filter(|f| matches!(f.kind, FindingKind::Drift { .. }));
            assert!(mended.into_iter().all(|f| f.mended.is_some()), "{n}");
            // Looking again finds nothing.
            let (steps, said) = (sim.eyes.steps.len(), sim.reports.len());
            sim.tick().unwrap();
            assert_eq!((steps, said), (sim.eyes.steps.len(), sim.reports.len()), "{n}");
        }
    }
}

#[test]
fn a_sibling_that_reaches_over_a_partition() {
    let mut sim = sim();
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    foreign(&mut sim, "machine.slice/cpuset.cpus", "5-6", Some(9));
    settled(&mut sim);
    // The partition's end is the doing of whoever wrote the sibling's list.
    drifted(&sim, "user.slice/cpuset.cpus.partition", "root invalid", "root", Some(9));
    assert_eq!(text(&sim, "machine.slice", CpusetFile::Cpus), "6");
    assert_eq!(text(&sim, "user.slice", CpusetFile::Partition), "root");
    let lost = findings(&sim, |k| match k {
        FindingKind::Set(f) => Some(matches!(f.fault, SetFault::PartitionLost { .. })),
        _ => None,
    });
    assert!(lost.contains(&true), "{lost:?}");
    // Its own value comes back with the release.
    sim.release(Some(&owner("cgroup/user.slice"))).unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "machine.slice", CpusetFile::Cpus), "5-6");
}

#[test]
fn a_controller_that_is_withdrawn() {
    for (isolation, up) in [
        (Isolation::Partition, "truepin.slice"),
        (Isolation::Member, "truepin.slice"),
        (Isolation::Member, ""),
    ] {
        let mut sim = sim();
        sim.eyes.others(|k| k.write_file(&p("system.slice"), "cgroup.subtree_control", "-cpuset").unwrap());
        let pid = client(&mut sim);
        assigned(&mut sim, &run("a", "2-3", isolation).with(pid));
        if up.is_empty() {
            sim.eyes
                .others(|k| k.write_file(&p("truepin.slice"), "cgroup.subtree_control", "-cpuset").unwrap());
        }
        let file = if up.is_empty() {
            "cgroup.subtree_control".into()
        } else {
            format!("{up}/cgroup.subtree_control")
        };
        foreign(&mut sim, &file, "-cpuset", Some(5));
        settled(&mut sim);
        drifted(&sim, "truepin.slice/run-a/cpuset.cpus", "", "2-3", Some(5));
        assert_eq!(effective(&sim, "truepin.slice/run-a"), cpus("2-3"));
        assert_eq!(sim.eyes.kernel().mask(pid), Some(&cpus("2-3")));
    }
}

#[test]
fn the_fourth_change_in_a_minute_is_a_fight() {
    for writer in [Some(5), None] {
        let mut sim = sim();
        assigned(&mut sim, &run("a", "2-3", Isolation::Member));
        let file = "truepin.slice/run-a/cpuset.cpus";
        for n in 0..3 {
            foreign(&mut sim, file, "2-4", writer);
            settled(&mut sim);
            assert!(!kinds(&sim).contains("fight"), "{n}");
            sim.wait(SECOND);
        }
        foreign(&mut sim, file, "2-4", writer);
        sound(&mut sim);
        let fight = |f: &Finding| match &f.kind {
            FindingKind::Fight { path, file, repairs } => {
                let pid = f.cause.as_ref().and_then(Cause::writer).map(|w| w.pid);
                Some((path.as_str().to_owned(), *file, pid, *repairs))
            }
            _ => None,
        };
        let fights: Vec<_> = sim.reports.iter().filter_map(fight).collect();
        assert_eq!(fights, [("truepin.slice/run-a".to_owned(), CpusetFile::Cpus, writer, 3)]);
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Cpus), "2-4", "left alone");
        // Other files are repaired, by whomever they are changed.
        foreign(&mut sim, "user.slice/cpuset.cpus", "2", writer);
        sound(&mut sim);
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-1,4-7");
        // The verdict does not wait for the fight to end.
        assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Violated);
        // A change within the minute starts it anew.
        sim.wait(50 * SECOND);
        foreign(&mut sim, file, "2-5", writer);
        sim.wait(50 * SECOND);
        sim.tick().unwrap();
        sound(&mut sim);
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Cpus), "2-5");
        let due = sim.state.next_deadline().unwrap();
        assert!(due > sim.now.mono_ns && due <= sim.now.mono_ns + 11 * SECOND, "{due} {:?}", sim.now);
        sim.now.mono_ns = due;
        sim.tick().unwrap();
        settled(&mut sim);
        assert!(kinds(&sim).contains("fight-over"));
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Cpus), "2-3");
        assert_eq!(sim.state.next_deadline(), None);
    }
}

#[test]
fn different_writers_do_not_fight() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    for pid in 100..120 {
        foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus", "2-4", Some(pid));
        settled(&mut sim);
    }
    assert_eq!(drifts(&sim).len(), 20);
    assert!(!kinds(&sim).contains("fight"));
}

/// Somebody who answers every write of ours at once, so that no convergence ever ends by itself.
#[test]
fn a_fight_in_mid_convergence_is_one_too() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    for nth in 0..200 {
        let path = p("truepin.slice/run-a");
        sim.eyes.ambush(nth, Foreign { path, file: "cpuset.cpus".into(), text: "2-4".into() });
        let path = p("user.slice");
        sim.eyes.ambush(nth, Foreign { path, file: "cpuset.cpus".into(), text: "3-4".into() });
    }
    let before = sim.eyes.kernel().applies();
    foreign(&mut sim, "user.slice/cpuset.cpus", "3-4", None);
    sound(&mut sim);
    assert!(sim.eyes.kernel().applies() - before < 20, "{}", log(&sim));
    assert!(kinds(&sim).contains("fight") && !kinds(&sim).contains("stuck"), "{:?}", kinds(&sim));
    sim.eyes.stand_down();
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
}

#[test]
fn without_a_limit_the_rounds_end_it() {
    let (mut setup, kernel) = host(Behaviour::strict());
    setup.settings.repairs_per_minute = 1_000_000;
    let mut sim = logged((setup, kernel));
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    for nth in 0..10_000 {
        for path in ["truepin.slice/run-a", "user.slice"] {
            sim.eyes.ambush(nth, Foreign { path: p(path), file: "cpuset.cpus".into(), text: "2-4".into() });
        }
    }
    let before = sim.eyes.kernel().applies();
    sim.eyes
        .foreign(&Foreign { path: p("user.slice"), file: "cpuset.cpus".into(), text: "2-4".into() })
        .unwrap();
    let echoes = sim.tick();
    assert!(echoes.is_ok());
    assert!(kinds(&sim).contains("stuck"), "{:?}", kinds(&sim));
    assert!(sim.eyes.kernel().applies() - before < 9 * 3 * 32);
    sim.faults.clear(); // it answered to its own writes, because there was always something to repair
    sim.eyes.stand_down();
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
}

#[test]
fn a_partition_that_does_not_come_back_is_left_alone_for_a_minute() {
    let (mut setup, kernel) = host(Behaviour::strict());
    setup.settings.repairs_per_minute = 1000;
    let mut sim = logged((setup, kernel));
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    // Whatever is written, a neighbour reaches over the partition just before.
    for nth in 0..1000 {
        let write = Foreign { path: p("machine.slice"), file: "cpuset.cpus".into(), text: "5-6".into() };
        sim.eyes.ambush(nth, write);
    }
    foreign(&mut sim, "machine.slice/cpuset.cpus", "5-6", Some(9));
    sound(&mut sim);
    assert!(kinds(&sim).contains("partition-refused") && !kinds(&sim).contains("stuck"), "{:?}", kinds(&sim));
    assert!(!sim.state.is_settled());
    assert_eq!(sim.verdict(&owner("cgroup/user.slice")).unwrap().judgement, Judgement::Violated);
    sim.eyes.stand_down();
    let tried = |sim: &Sim| {
        let partition = |s: &&Step| matches!(s, Step::Write { file: CpusetFile::Partition, .. });
        sim.eyes.steps.iter().filter(partition).count()
    };
    let before = tried(&sim);
    for _ in 0..20 {
        sim.wait(SECOND);
        sim.tick().unwrap();
    }
    assert_eq!(before, tried(&sim), "{}", log(&sim));
    let due = sim.state.next_deadline().unwrap();
    assert!(due <= sim.now.mono_ns + MINUTE);
    sim.now.mono_ns = due;
    sim.tick().unwrap();
    settled(&mut sim);
    assert!(sim.state.is_settled());
}

/// Both sides of an overlap are in a fight: the list, and the state that the kernel takes back each time.
#[test]
fn a_fight_over_an_overlap() {
    let mut sim = sim();
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    for _ in 0..4 {
        foreign(&mut sim, "machine.slice/cpuset.cpus", "5-6", Some(9));
    }
    sound(&mut sim);
    let fights = findings(&sim, |k| match k {
        FindingKind::Fight { path, file, .. } => Some((path.as_str(), *file)),
        _ => None,
    });
    assert_eq!(fights, [("machine.slice", CpusetFile::Cpus), ("user.slice", CpusetFile::Partition)]);
    assert!(!sim.state.is_settled());
    let (steps, said) = (sim.eyes.steps.len(), sim.reports.len());
    for round in 0..20 {
        sim.wait(SECOND);
        let at = sim.now.mono_ns;
        sim.tick().unwrap();
        // What is known to be wrong is not doubted again: others' repairs would wait for that.
        assert!(round == 0 || sim.now.mono_ns - at < 50_000_000, "{} ns", sim.now.mono_ns - at);
    }
    assert_eq!((steps, said), (sim.eyes.steps.len(), sim.reports.len()), "{}", log(&sim));
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert!(sim.state.is_settled());
}

#[test]
fn a_neighbour_in_a_fight_keeps_an_admission_from_its_cpus() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    for _ in 0..4 {
        foreign(&mut sim, "user.slice/cpuset.cpus", "3-5", Some(9));
    }
    let error = refused(&mut sim, &run("b", "4-5", Isolation::Member));
    assert!(error.to_string().contains("cgroup /user.slice was allowed on CPUs 4-5"), "{error}");
    sound(&mut sim);
    assert_eq!(sim.state.assignments.owners.len(), 1);
    assigned_though_unsettled(&mut sim, &run("b", "6-7", Isolation::Member));
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
}

#[test]
fn hotplug_is_nobodys_drift() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    sim.reports.clear();
    for _ in 0..6 {
        for online in [false, true] {
            sim.eyes.others(|k| k.set_online(CpuId(6), online).unwrap());
            sim.tick().unwrap();
            settled(&mut sim);
            let pool = if online { "0-1,4-7" } else { "0-1,4-5,7" };
            assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), pool);
        }
    }
    assert_eq!(kinds(&sim), BTreeSet::new());
}
