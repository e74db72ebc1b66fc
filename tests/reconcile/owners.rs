//! Owners that come and go.

use crate::world::{
    MINUTE, SECOND, assigned, assigned_though_unsettled, client, cpus, drifted, drifts, effective, existing,
    files, findings, foreign, host, kinds, log, logged, owner, p, refused, run, settled, sim, sound, text,
    told,
};
use std::collections::BTreeMap;
use truepin::assignments::Mode;
use truepin::ledger::{Departure, DepartureKind};
use truepin::reconcile::{AdmitError, Answer, Event, FindingKind, Home};
use truepin::request::Isolation;
use truepin::sweep::TaskSweep;
use truepin::topology::synthetic::{Numbering, Regular};
use truepin::verdict::{Evidence, Judgement};
use truepin::{CpuId, CpuSet, CpuTopology, CpusetFile};
use truepin_tests::fake::{Behaviour, Errno, FakeKernel, Fault, INIT, TaskTraits, mask_changes, masks};
use truepin_tests::sim::{Foreign, Sim, Wish};

#[test]
fn a_command_that_has_ended_is_released_with_its_verdict() {
    for behaviour in [Behaviour::strict(), Behaviour::lax()] {
        let mut sim = logged(host(behaviour));
        let pid = client(&mut sim);
        assigned(&mut sim, &run("a", "2-3", Isolation::Auto).with(pid));
        sim.wait(10 * SECOND);
        assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Held);
        sim.eyes.others(|k| k.exit(pid).unwrap());
        sim.tick().unwrap();
        settled(&mut sim);
        assert!(sim.state.assignments.owners.is_empty());
        let gone = findings(&sim, |k| match k {
            FindingKind::Gone { owner, cpus, why } => Some((owner.to_string(), cpus.to_string(), *why)),
            _ => None,
        });
        assert_eq!(gone, [("run/a".into(), "2-3".into(), "no process is left in its cgroup")]);
        let last = sim.verdict(&owner("run/a")).unwrap();
        assert_eq!((last.judgement, last.cpus), (Judgement::Held, cpus("2-3")));
        assert!(sim.eyes.kernel().id(&p("truepin.slice/run-a")).is_none());
        assigned(&mut sim, &run("b", "2-3", Isolation::Auto));
    }
}

#[test]
fn a_last_verdict_knows_what_happened() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    sim.wait(10 * SECOND);
    sim.probe.foreign_ns.insert(CpuId(3), SECOND);
    match sim.release(Some(&owner("run/a"))).unwrap() {
        Answer::Released(verdicts) => {
            let verdict = verdicts[0].1.as_ref().unwrap();
            assert_eq!(verdict.judgement, Judgement::Violated);
            assert!(
                verdict.reasons[0].contains("CPU 3: foreign tasks ran for 1000.000 ms"),
                "{:?}",
                verdict.reasons
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(kinds(&sim).contains("violated"));
    // Where the evidence cannot be read the release goes on without.
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    sim.probe.broken = true;
    assert_eq!(sim.release(Some(&owner("run/a"))).unwrap(), Answer::Released(vec![(owner("run/a"), None)]));
    settled(&mut sim);
    assert!(kinds(&sim).contains("probe"));
}

#[test]
fn an_owner_whose_cgroup_is_removed_is_released_whatever_else_goes_on() {
    type Ask = fn(&mut Sim);
    let asks: [Ask; 5] = [
        |sim| sim.tick().unwrap(),
        |sim| drop(sim.ask(|ticket| Event::Inspect { ticket }).unwrap()),
        |sim| drop(sim.admit(&run("b", "4-5", Isolation::Auto)).unwrap()),
        |sim| drop(sim.admit(&run("b", "4-5", Isolation::Member)).unwrap()),
        |sim| drop(sim.release(Some(&owner("cgroup/system.slice/b"))).unwrap()),
    ];
    for (n, ask) in asks.into_iter().enumerate() {
        for isolation in [Isolation::Partition, Isolation::Member] {
            let mut sim = sim();
            assigned(&mut sim, &run("a", "2-3", isolation));
            assigned(&mut sim, &existing("system.slice/b", "6", isolation));
            sim.eyes.others(|k| k.rmdir(&p("truepin.slice/run-a")).unwrap());
            ask(&mut sim);
            settled(&mut sim);
            assert!(!sim.state.assignments.owners.contains_key(&owner("run/a")), "{n}");
            assert!(sim.eyes.kernel().id(&p("truepin.slice/run-a")).is_none(), "{n}: made again");
            assert!(kinds(&sim).contains("gone"), "{n}");
            let served = n != 2 && n != 3 || sim.state.assignments.owners.contains_key(&owner("run/b"));
            assert!(served, "{n}");
        }
    }
}

#[test]
fn a_new_cgroup_joins_the_pool() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let task = sim.eyes.others(|k| {
        k.mkdir(&p("new.scope")).unwrap();
        k.mkdir(&p("system.slice/new")).unwrap();
        k.spawn(&p("new.scope"), 1, TaskTraits::default()).unwrap()
    });
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "new.scope", CpusetFile::Cpus), "0-1,4-7");
    assert_eq!(sim.eyes.kernel().mask(task), Some(&cpus("0-1,4-7")));
    assert!(sim.watching.contains(&p("new.scope")), "watched from now on");
    assert!(drifts(&sim).is_empty(), "a new cgroup is no change of an old one");
    // In partition mode the kernel does it, and nothing is written.
    let mut sim = self::sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Partition));
    let steps = sim.eyes.steps.len();
    sim.eyes.others(|k| k.mkdir(&p("new.scope")).unwrap());
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(steps, sim.eyes.steps.len());
}

#[test]
fn auto_falls_back_to_member_and_partition_insists() {
    // A list of somebody else, in the way of ours; not a partition, so nothing is held.
    let greedy = |k: &mut FakeKernel| {
        k.mkdir(&p("greedy")).unwrap();
        k.write_file(&p("greedy"), "cpuset.cpus.exclusive", "4-5").unwrap();
    };
    let mut sim = sim();
    sim.eyes.others(greedy);
    assigned(&mut sim, &run("other", "2-3", Isolation::Auto));
    let before = (files(&sim), sim.state.assignments.clone());
    let error = refused(&mut sim, &run("a", "4-5", Isolation::Partition));
    assert!(matches!(error, AdmitError::Kernel(_)), "{error}");
    settled(&mut sim);
    assert_eq!(before, (files(&sim), sim.state.assignments.clone()));
    assigned(&mut sim, &run("a", "4-5", Isolation::Auto));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Member));
    assert_eq!(sim.mode(&owner("run/other")), Some(Mode::Partition), "nobody else falls");
    assert_eq!(findings(&sim, |k| matches!(k, FindingKind::FellBack { .. }).then_some(())).len(), 1);
    assert_eq!(sim.disk.record().unwrap().assignments.owners[&owner("run/a")].mode, Mode::Member);
    assert_eq!(sim.verdict(&owner("run/a")).unwrap().mode, Mode::Member);
}

#[test]
fn a_verdict_since_the_assignment_knows_of_the_epoch_that_ended() {
    let mut sim = sim();
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Auto));
    sim.wait(10 * SECOND);
    assert_eq!(sim.verdict(&owner("cgroup/user.slice")).unwrap().judgement, Judgement::Held);
    let from = sim.evidence().unwrap();
    // The partition is ended, and the kernel refuses to make it one again.
    sim.eyes.others(|k| {
        for nth in 0..3 {
            k.fault(nth, Fault::Fail(Errno::EACCES));
        }
    });
    foreign(&mut sim, "user.slice/cpuset.cpus.partition", "member", None);
    assert_eq!(sim.mode(&owner("cgroup/user.slice")), Some(Mode::Member), "{}", log(&sim));
    sim.tick().unwrap();
    sim.wait(10 * SECOND);
    sim.tick().unwrap();
    let now = sim.evidence().unwrap();
    let verdict =
        |from: Option<&Evidence>| sim.state.verdict(&owner("cgroup/user.slice"), from, &now).unwrap();
    for v in [verdict(None), verdict(Some(&from))] {
        assert_ne!(v.judgement, Judgement::Held);
        assert!(v.reasons.iter().any(|r| r.contains("partition mode ended within")), "{:?}", v.reasons);
    }
}

#[test]
fn an_owner_of_the_same_name_has_no_past() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    sim.release(Some(&owner("run/a"))).unwrap();
    assert_eq!(sim.verdict(&owner("run/a")).unwrap().cpus, cpus("2-3"));
    assigned(&mut sim, &run("a", "4", Isolation::Auto));
    sim.probe.broken = true;
    sim.release(Some(&owner("run/a"))).unwrap();
    sim.probe.broken = false;
    assert_eq!(sim.verdict(&owner("run/a")), None, "the last verdict would be that of CPUs 2-3");
}

#[test]
fn masks_that_cannot_be_read_are_a_gap() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    sim.wait(10 * SECOND);
    let swept = TaskSweep { unread: vec![(owner("run/a"), "no such file".into())], ..TaskSweep::default() };
    sim.happens(Event::Swept(swept)).unwrap();
    let v = sim.verdict(&owner("run/a")).unwrap();
    assert_eq!(v.judgement, Judgement::Inconclusive);
    assert!(v.reasons[0].contains("masks of its tasks could not be read: no such file"), "{:?}", v.reasons);
}

#[test]
fn who_had_fewer_cpus_keeps_to_them() {
    let mut sim = sim();
    for (path, set) in [("user.slice", "0-3"), ("machine.slice", "2-3"), ("system.slice", "0-1,6")] {
        sim.eyes.others(|k| k.write_file(&p(path), "cpuset.cpus", set).unwrap());
    }
    let before = files(&sim);
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let now = |sim: &Sim| {
        ["user.slice", "machine.slice", "system.slice"].map(|path| text(sim, path, CpusetFile::Cpus))
    };
    // What has no CPU left gets the pool.
    assert_eq!(now(&sim), ["0-1", "0-1,4-7", "0-1,6"]);
    assigned(&mut sim, &run("b", "6-7", Isolation::Member));
    assert_eq!(now(&sim), ["0-1", "0-1,4-5", "0-1"]);
    sim.release(None).unwrap();
    settled(&mut sim);
    assert_eq!(files(&sim), before);
}

#[test]
fn a_cgroup_made_anew_is_watched_anew() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let watches = sim.watches;
    sim.tick().unwrap();
    assert_eq!(sim.watches, watches, "once is enough");
    sim.eyes.others(|k| {
        k.mkdir(&p("x")).unwrap();
    });
    sim.tick().unwrap();
    let watches = sim.watches;
    sim.eyes.others(|k| {
        k.rmdir(&p("x")).unwrap();
        k.mkdir(&p("x")).unwrap();
    });
    sim.tick().unwrap();
    assert!(sim.watches > watches);
}

#[test]
fn cpus_isolated_at_boot_are_handed_out_only_by_name() {
    let (mut setup, kernel) = host(Behaviour::strict());
    let mut raw =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent }
            .raw();
    raw.isolated = Some(cpus("4-7"));
    setup.topology = CpuTopology::assemble(&raw).unwrap();
    let mut sim = logged((setup, kernel));
    assigned(&mut sim, &Wish::new(owner("run/a"), 2, Isolation::Auto));
    assert_eq!(effective(&sim, "truepin.slice/run-a"), cpus("2-3"));
    let error = refused(&mut sim, &Wish::new(owner("run/b"), 2, Isolation::Auto));
    assert!(matches!(error, AdmitError::Placement(_)), "{error}");
    assigned(&mut sim, &run("c", "4-5", Isolation::Auto));
}

#[test]
fn a_partition_that_the_kernel_takes_and_does_not_honour() {
    // Whatever is done, the neighbour reaches over the partition just before the state is written.
    let spoil = |sim: &mut Sim| {
        for nth in 0..200 {
            let write = Foreign { path: p("machine.slice"), file: "cpuset.cpus".into(), text: "4-6".into() };
            sim.eyes.ambush(nth, write);
        }
    };
    let mut sim = sim();
    spoil(&mut sim);
    let error = refused(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    assert!(
        matches!(&error, AdmitError::PartitionRefused { state, .. } if state.contains("invalid")),
        "{error}"
    );
    sim.eyes.stand_down();
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert!(sim.state.assignments.owners.is_empty());
    assert_eq!(text(&sim, "user.slice", CpusetFile::Partition), "member");
    assert_eq!(text(&sim, "user.slice", CpusetFile::Exclusive), "");
    spoil(&mut sim);
    let answer = sim.admit(&existing("user.slice", "4-5", Isolation::Auto)).unwrap();
    // The neighbour is in a fight by now, so there is no exclusivity as a member either; it is not claimed.
    assert!(matches!(answer, Answer::Refused(AdmitError::Stuck(_))), "{answer:?}\n{}", log(&sim));
    assert!(kinds(&sim).contains("fell-back"));
}

#[test]
fn a_directory_that_cannot_be_removed_is_in_nobodys_way() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Partition));
    sim.eyes.others(|k| k.mkdir(&p("truepin.slice/run-a/left")).unwrap());
    assert!(matches!(sim.release(Some(&owner("run/a"))).unwrap(), Answer::Released(_)));
    sound(&mut sim);
    assert!(kinds(&sim).contains("step-failed"));
    assigned_though_unsettled(&mut sim, &run("b", "2-3", Isolation::Partition));
    assert_eq!(effective(&sim, "truepin.slice/run-b"), cpus("2-3"));
    let tried = sim.eyes.kernel().applies();
    for _ in 0..10 {
        sim.wait(SECOND);
        sim.tick().unwrap();
    }
    assert_eq!(tried, sim.eyes.kernel().applies(), "not tried at every look");
    sim.eyes.others(|k| k.rmdir(&p("truepin.slice/run-a/left")).unwrap());
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert!(sim.eyes.kernel().id(&p("truepin.slice/run-a")).is_none());
}

#[test]
fn a_departure_wakes_and_repairs() {
    let mut sim = sim();
    let pid = client(&mut sim);
    assigned(&mut sim, &run("a", "2-3", Isolation::Member).with(pid));
    let id = sim.eyes.kernel().id(&p("truepin.slice/run-a")).unwrap();
    let departure = |at_ns| Departure {
        owner: id,
        pid,
        tgid: pid,
        comm: "busy".into(),
        kind: DepartureKind::Migrated,
        from: CpuId(2),
        to: CpuId(4),
        at_ns,
        by: 1,
    };
    for n in 0..3 {
        // Nobody tells of the write.
        let write =
            Foreign { path: p("truepin.slice/run-a"), file: "cpuset.cpus".into(), text: "2-4".into() };
        sim.eyes.foreign(&write).unwrap();
        let departures = vec![departure(sim.now.mono_ns), departure(sim.now.mono_ns)];
        sim.happens(Event::Disturbed { writes: Vec::new(), departures }).unwrap();
        settled(&mut sim);
        drifted(&sim, "truepin.slice/run-a/cpuset.cpus", "2-4", "2-3", None);
        assert_eq!(sim.eyes.kernel().mask(pid), Some(&cpus("2-3")), "{n}");
    }
    let said = findings(&sim, |k| match k {
        FindingKind::Departed { owner, example } => Some((owner.to_string(), example.clone())),
        _ => None,
    });
    let example = format!("busy (tid {pid}) from CPU 2 to CPU 4");
    assert_eq!(said, [("run/a".to_owned(), example)], "one a second");
    assert_eq!(sim.state.departures().count(), 6);
}

#[test]
fn looking_again_writes_nothing() {
    for isolation in [Isolation::Partition, Isolation::Member] {
        let mut sim = sim();
        let pid = client(&mut sim);
        assigned(&mut sim, &run("a", "2-3", isolation).with(pid));
        assigned(&mut sim, &existing("system.slice/a", "4-5", isolation));
        let before = (sim.eyes.kernel().applies(), sim.disk.saves(), sim.reports.len());
        sim.tick().unwrap();
        drop(sim.ask(|ticket| Event::Inspect { ticket }).unwrap());
        sim.admit(&existing("system.slice/a", "4-5", isolation)).unwrap();
        told(&mut sim, "user.slice", "cpuset.cpus", Some(3));
        assert_eq!(before, (sim.eyes.kernel().applies(), sim.disk.saves(), sim.reports.len()));
        // Nor does a restart, but for an evidence that begins anew.
        let masks_before = masks(sim.eyes.kernel());
        sim.restart().unwrap();
        settled(&mut sim);
        assert_eq!(before.0, sim.eyes.kernel().applies());
        assert_eq!(mask_changes(&masks_before, &masks(sim.eyes.kernel())), BTreeMap::new());
    }
}

#[test]
fn everything_back() {
    for behaviour in [Behaviour::strict(), Behaviour::lax()] {
        let (mut setup, mut kernel) = host(behaviour);
        setup.strict_reserved = true;
        for (file, value) in [
            ("user.slice/cpuset.cpus", "2-5"),
            ("machine.slice/cpuset.cpus", "3"),
            ("system.slice/b/cpuset.cpus", "0-7"),
            ("system.slice/a/cpuset.cpus.exclusive", "7"),
        ] {
            let (path, name) = file.rsplit_once('/').unwrap();
            kernel.write_file(&p(path), name, value).unwrap();
        }
        let mut sim = logged((setup, kernel));
        let before = files(&sim);
        assigned(&mut sim, &run("a", "2-3", Isolation::Partition));
        assigned(&mut sim, &existing("system.slice/a", "4-5", Isolation::Partition));
        assigned(&mut sim, &existing("machine.slice/vm", "6", Isolation::Member));
        // Drift that is repaired is not what is put back.
        foreign(&mut sim, "machine.slice/vm/cpuset.cpus.partition", "root", Some(3));
        foreign(&mut sim, "user.slice/cpuset.cpus", "7", Some(3));
        settled(&mut sim);
        assert!(matches!(sim.release(None).unwrap(), Answer::Released(v) if v.len() == 3));
        settled(&mut sim);
        let mut after = files(&sim);
        // The controller was enabled for it, and its files are as they are born.
        after.retain(|(path, _), _| path.as_str() != "machine.slice/vm");
        for (key, now) in after {
            let (was, empty) = (&before[&key], key.1 == CpusetFile::Cpus && before[&key].is_empty());
            let inherits = effective(&sim, key.0.as_str()) == cpus("0-7");
            assert!(now == *was || empty && inherits, "{behaviour:?} {key:?}: {was:?}, now {now:?}");
        }
        assert!(sim.eyes.kernel().id(&p("truepin.slice")).is_none(), "the slice is gone");
        let steps = sim.eyes.steps.len();
        sim.restart().unwrap();
        settled(&mut sim);
        assert_eq!(steps, sim.eyes.steps.len(), "and stays so");
    }
}

#[test]
fn an_audited_owner_is_watched_and_nothing_is_written() {
    let (mut setup, kernel) = host(Behaviour::strict());
    setup.settings.audit = true;
    setup.reserved = CpuSet::new();
    let mut sim = logged((setup, kernel));
    let before = files(&sim);
    let wish = existing("user.slice", "2-3", Isolation::Auto);
    assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(_, a) if a.mode == Mode::Audit));
    assert!(matches!(refused(&mut sim, &Wish::new(owner("run/x"), 1, Isolation::Auto)), AdmitError::Audit));
    sim.wait(10 * SECOND);
    // It may use all CPUs, so the sets are not as declared.
    assert_eq!(sim.verdict(&owner("cgroup/user.slice")).unwrap().judgement, Judgement::Violated);
    assert_eq!((before, 0, 0), (files(&sim), sim.eyes.kernel().applies(), sim.disk.saves()));
    assert_eq!(sim.probe.watched().count(), 1);
    // Another allocator may move it, and the declaration with it.
    assert!(matches!(
        sim.admit(&existing("user.slice", "4-5", Isolation::Auto)).unwrap(),
        Answer::Assigned(_, a) if a.cpus == cpus("4-5")
    ));
}

#[test]
fn a_second_owner_for_the_same_place() {
    let mut sim = sim();
    assigned(&mut sim, &existing("system.slice/a", "2", Isolation::Auto));
    let mut wish = existing("system.slice/a", "3", Isolation::Auto);
    wish.request.owner = owner("unit/a.service");
    wish.home = Home::Existing(p("system.slice/a"));
    assert!(matches!(refused(&mut sim, &wish), AdmitError::Reserve(_)));
    assert!(sim.eyes.kernel().mask(INIT).is_some());
    settled(&mut sim);
}

#[test]
fn what_was_changed_while_no_agent_ran_is_told() {
    let mut sim = sim();
    assigned(&mut sim, &existing("user.slice", "2-3", Isolation::Member));
    sim.restart().unwrap();
    assert_eq!(kinds(&sim).into_iter().collect::<Vec<_>>(), [""; 0], "{}", log(&sim));
    sim.eyes.others(|k| k.write_file(&p("user.slice"), "cpuset.cpus", "2-5").unwrap());
    sim.restart().unwrap();
    settled(&mut sim);
    let told = findings(&sim, |k| match k {
        FindingKind::Note(text) => Some(text.as_str()),
        _ => None,
    });
    let [told] = told[..] else { panic!("{told:?}\n{}", log(&sim)) };
    assert!(told.ends_with("cpuset.cpus of /user.slice read \"2-5\" and is to be \"2-3\""), "{told}");
}
