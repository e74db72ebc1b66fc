//! What is refused leaves nothing behind.

use crate::world::{
    MINUTE, assigned, client, cpus, effective, existing, files, findings, foreign, host, logged, owner, p,
    refused, run, settled, sim, sound, text, told,
};
use std::collections::BTreeMap;
use truepin::CpusetFile;
use truepin::assignments::{Mode, ReserveError};
use truepin::observed::Step;
use truepin::plan::Problem;
use truepin::reconcile::{AdmitError, Answer, FindingKind};
use truepin::request::Isolation;
use truepin_tests::fake::{Behaviour, Errno, FakeKernel, Fault, mask_changes, masks};
use truepin_tests::sim::{DiskFault, Wish};

#[test]
fn a_refusal_by_the_table_or_the_machine_touches_nothing() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    let before = (files(&sim), sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.steps.len());
    for (wish, needle) in [
        (run("b", "3-4", Isolation::Auto), "belong to run/a"),
        (run("b", "1,4", Isolation::Auto), "are reserved"),
        (run("a", "4-5", Isolation::Auto), "already holds CPUs 2-3"),
        (run("a", "2-4", Isolation::Auto), "already holds CPUs 2-3"),
        (Wish::new(owner("run/b"), 5, Isolation::Auto), "4"),
        (existing("truepin.slice/run-a", "4", Isolation::Auto), "where truepin makes its own cgroups"),
        (existing("truepin.slice", "4", Isolation::Auto), "where truepin makes its own cgroups"),
        (existing("user.slice", "6-9", Isolation::Auto), "this machine has no CPUs 8-9"),
    ] {
        let error = refused(&mut sim, &wish).to_string();
        assert!(error.contains(needle), "{error}");
    }
    let after = (files(&sim), sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.steps.len());
    assert_eq!(before, after);
    settled(&mut sim);
}

#[test]
fn partitions_are_refused_where_the_kernel_has_none() {
    let (mut setup, kernel) = host(Behaviour::local_only());
    setup.facts.partition = false;
    let mut sim = logged((setup, kernel));
    for isolation in [Isolation::Partition, Isolation::Isolated] {
        assert_eq!(refused(&mut sim, &run("a", "2-3", isolation)), AdmitError::NoPartitions);
    }
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Member));
    let wrote = |s: &Step| matches!(s, Step::Write { file: CpusetFile::Partition, .. });
    assert!(!sim.eyes.steps.iter().any(wrote));
    // Those of a kernel without explicit lists are for what truepin makes.
    let mut sim = logged(host(Behaviour::local_only()));
    for isolation in [Isolation::Partition, Isolation::Isolated] {
        let error = refused(&mut sim, &existing("system.slice/a", "4-5", isolation));
        assert_eq!(error, AdmitError::OnlyOwn { owner: owner("cgroup/system.slice/a") });
    }
    assigned(&mut sim, &existing("system.slice/a", "4-5", Isolation::Auto));
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    assert_eq!(sim.mode(&owner("cgroup/system.slice/a")), Some(Mode::Member));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Partition));
}

#[test]
fn what_steps_cannot_mend_is_refused_before_anything_is_written() {
    let mut sim = sim();
    sim.eyes.others(|k| {
        k.mkdir(&p("user.slice/x")).unwrap();
        k.mkdir(&p("mixed")).unwrap();
        k.mkdir(&p("mixed/t")).unwrap();
        k.write_file(&p("mixed/t"), "cgroup.type", "threaded").unwrap();
        // Another manager's partition at the top, with something inside.
        k.mkdir(&p("other")).unwrap();
        k.mkdir(&p("other/in")).unwrap();
        k.write_file(&p("other"), "cpuset.cpus", "6-7").unwrap();
        k.write_file(&p("other"), "cpuset.cpus.partition", "root").unwrap();
    });
    let before = (files(&sim), sim.disk.saves());
    let problem = |error: AdmitError| match error {
        AdmitError::Problem(problem) => problem,
        other => panic!("{other}"),
    };
    for (wish, expected) in [
        (existing("gone", "4", Isolation::Auto), "does not exist"),
        (existing("user.slice/x", "4", Isolation::Auto), "holds processes itself"),
        (existing("mixed/t", "4", Isolation::Auto), "of type threaded"),
        (existing("other/in", "6", Isolation::Auto), "is a partition of another manager"),
        (run("a", "5-6", Isolation::Auto), "holds CPUs 6, assigned to run/a"),
        (run("a", "5-6", Isolation::Member), "holds CPUs 6, assigned to run/a"),
    ] {
        let error = problem(refused(&mut sim, &wish)).to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(before, (files(&sim), sim.disk.saves()));
    assert!(sim.state.assignments.owners.is_empty());
    // Placement keeps off what others hold: all that is left of 2-7 is 2-5.
    assert!(matches!(
        refused(&mut sim, &Wish::new(owner("run/a"), 5, Isolation::Auto)),
        AdmitError::Placement(_)
    ));
    assigned(&mut sim, &Wish::new(owner("run/a"), 4, Isolation::Auto));
    assert_eq!(sim.state.assignments.exclusive(), cpus("2-5"));
}

#[test]
fn a_refusal_by_the_kernel_is_taken_back() {
    // Every step of a plain admission fails twice in turn: the same step is tried once more, then it is over.
    for mode in [Isolation::Partition, Isolation::Member] {
        let mut probe = sim();
        let pid = client(&mut probe);
        let wish = run("a", "2-3", mode).with(pid);
        let first = probe.eyes.kernel().applies();
        assigned(&mut probe, &wish);
        let steps = probe.eyes.kernel().applies() - first;
        assert!(steps > 5);
        for n in 0..steps {
            let mut sim = sim();
            client(&mut sim);
            let before = (files(&sim), masks(sim.eyes.kernel()));
            for nth in n..n + 40 {
                sim.eyes.others(|k| k.fault(nth, Fault::Fail(Errno::EBUSY)));
            }
            let tried = sim.eyes.kernel().applies();
            let error = refused(&mut sim, &wish);
            assert!(matches!(error, AdmitError::Kernel(_)), "step {n}: {error}");
            assert!(sim.state.assignments.owners.is_empty());
            assert!(sim.eyes.kernel().applies() - tried < n + 40, "step {n} was tried without end");
            assert!(sim.disk.record().is_none_or(|r| r.assignments.owners.is_empty()), "step {n}");
            // The kernel refuses everything for now; when it does not any more, all is put back.
            sim.eyes.others(FakeKernel::restart);
            sim.wait(MINUTE);
            sim.tick().unwrap();
            settled(&mut sim);
            let mut after = files(&sim);
            after.retain(|(path, _), _| !path.is_within(&p("truepin.slice")));
            assert_eq!(sim.eyes.not_put_back(true), [""; 0], "step {n}");
            after.retain(|(path, file), _| {
                !(*file == CpusetFile::Cpus && before.0[&(path.clone(), *file)].is_empty())
            });
            assert!(after.iter().all(|(k, v)| before.0[k] == *v), "step {n}: {after:?}");
            assert_eq!(mask_changes(&before.1, &masks(sim.eyes.kernel())), BTreeMap::new(), "step {n}");
            assert!(
                !sim.eyes.kernel().cgroups().any(|c| c.as_str() == "truepin.slice/run-a"),
                "step {n}: its cgroup is left"
            );
        }
    }
}

#[test]
fn an_admission_that_cannot_be_made_durable_is_none() {
    let fails = (0..5).map(DiskFault::Fails);
    for fault in [DiskFault::Full, DiskFault::Doubtful].into_iter().chain(fails) {
        let mut sim = sim();
        let pid = client(&mut sim);
        assigned(&mut sim, &run("a", "2-3", Isolation::Auto).with(pid));
        let before = (files(&sim), sim.state.assignments.clone(), sim.eyes.steps.len());
        sim.disk.fault(0, fault);
        let error = refused(&mut sim, &run("b", "4-5", Isolation::Auto));
        assert!(matches!(error, AdmitError::NotDurable(_)), "{error}");
        assert_eq!(before, (files(&sim), sim.state.assignments.clone(), sim.eyes.steps.len()), "{fault:?}");
        // What may have become durable all the same is not any more when the answer is given.
        settled(&mut sim);
        sim.restart().unwrap();
        settled(&mut sim);
        assert_eq!(sim.state.assignments.owners.keys().cloned().collect::<Vec<_>>(), [owner("run/a")]);
        assigned(&mut sim, &run("b", "4-5", Isolation::Auto));
    }
}

#[test]
fn a_full_disk_stops_admissions_and_not_repairs() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    assigned(&mut sim, &existing("machine.slice/vm", "6-7", Isolation::Auto));
    sim.disk.full = true;
    assert!(matches!(refused(&mut sim, &run("b", "4", Isolation::Auto)), AdmitError::NotDurable(_)));
    foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus.partition", "member", Some(7));
    settled(&mut sim);
    let answer = sim.release(Some(&owner("run/a"))).unwrap();
    assert!(matches!(&answer, Answer::Failed(why) if why.contains("no space")), "{answer:?}");
    settled(&mut sim);
    assert_eq!(sim.state.assignments.owners.len(), 2);
    assert_eq!(
        findings(&sim, |k| matches!(k, FindingKind::NotDurable(_)).then_some(())).len(),
        1,
        "said once"
    );
    // A cgroup that must be written for the first time is not, while its first value cannot be recorded.
    sim.eyes.others(|k| {
        k.mkdir(&p("late")).unwrap();
        k.write_file(&p("late"), "cpuset.cpus", "3-4").unwrap();
    });
    told(&mut sim, "late", "cpuset.cpus", Some(8));
    sound(&mut sim);
    assert_eq!(text(&sim, "late", CpusetFile::Cpus), "3-4");
    sim.disk.full = false;
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "late", CpusetFile::Cpus), "4");
    assert!(matches!(sim.release(Some(&owner("run/a"))).unwrap(), Answer::Released(_)));
    settled(&mut sim);
    assert_eq!(text(&sim, "late", CpusetFile::Cpus), "3-4", "the first value is back");
}

#[test]
fn a_refusal_that_cannot_be_made_durable_is_owed() {
    let mut sim = sim();
    // The first save is durable, then the kernel refuses, and then the disk is full.
    for nth in 0..100 {
        sim.eyes.others(|k| k.fault(nth, Fault::Fail(Errno::EACCES)));
        sim.disk.fault(nth + 1, DiskFault::Full);
    }
    refused(&mut sim, &existing("machine.slice/vm", "6-7", Isolation::Partition));
    sound(&mut sim);
    assert!(sim.disk.record().unwrap().assignments.owners.contains_key(&owner("cgroup/machine.slice/vm")));
    for _ in 0..3 {
        sim.tick().unwrap();
        sound(&mut sim);
    }
    sim.eyes.others(FakeKernel::restart);
    sim.disk = {
        let mut d = sim.disk.clone();
        d.full = false;
        d
    };
    sim.wait(2 * MINUTE);
    for _ in 0..100 {
        sim.tick().unwrap();
    }
    settled(&mut sim);
    assert!(sim.state.assignments.owners.is_empty());
    assert!(sim.disk.record().unwrap().assignments.owners.is_empty());
}

#[test]
fn asking_again_changes_nothing_and_failing_to_does_not_evict() {
    let mut sim = sim();
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    let before = (sim.eyes.kernel().applies(), sim.disk.saves(), sim.state.assignments.clone());
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    assert_eq!(before, (sim.eyes.kernel().applies(), sim.disk.saves(), sim.state.assignments.clone()));
    // A second command would share the CPUs with the first, and another isolation is another request.
    let error = refused(&mut sim, &run("a", "2-3", Isolation::Auto).with(4_000_000));
    assert!(matches!(error, AdmitError::InUse { .. }), "{error}");
    let error = refused(&mut sim, &run("a", "2-3", Isolation::Member));
    assert!(matches!(error, AdmitError::Reserve(ReserveError::Differs { .. })), "{error}");
    assert_eq!(before, (sim.eyes.kernel().applies(), sim.disk.saves(), sim.state.assignments.clone()));
    assert_eq!(effective(&sim, "truepin.slice/run-a"), cpus("2-3"));
    // Now the kernel refuses the process that comes with the second request.
    assigned(&mut sim, &existing("machine.slice/vm", "6", Isolation::Auto));
    let before = sim.state.assignments.clone();
    let error = refused(&mut sim, &existing("machine.slice/vm", "6", Isolation::Auto).with(4_000_000));
    assert!(matches!(error, AdmitError::Kernel(_)), "{error}");
    settled(&mut sim);
    assert_eq!(before, sim.state.assignments);
    // And an existing cgroup that somebody has removed meanwhile is gone, not refused and kept.
    sim.eyes.others(|k| {
        let pid = k.threads().find(|t| k.cgroup_of(*t) == Some(&p("machine.slice/vm"))).unwrap();
        k.exit(pid).unwrap();
        k.rmdir(&p("machine.slice/vm")).unwrap();
    });
    let error = refused(&mut sim, &existing("machine.slice/vm", "6", Isolation::Auto));
    assert!(matches!(error, AdmitError::Problem(Problem::Vanished { .. })), "{error}");
    settled(&mut sim);
    assert!(!sim.state.assignments.owners.contains_key(&owner("cgroup/machine.slice/vm")));
}
