//! Decisions, scenario by scenario: what is refused leaves nothing behind, what others change is repaired and named,
//! what cannot be had ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

use std::collections::{BTreeMap, BTreeSet};
use truepin::{
    CgroupPath, CpuId, CpuSet, CpuTopology, CpusetFile, Owner,
    assignments::Mode,
    assignments::ReserveError,
    ledger::{Departure, DepartureKind},
    observed::Step,
    plan::Problem,
    reconcile::{AdmitError, Answer, Event, FindingKind, ForeignWrite, Home, Writer},
    request::Isolation,
    sweep::{SetFault, TaskSweep},
    topology::synthetic::{Numbering, Regular},
    verdict::{Evidence, Judgement},
};
use truepin_tests::{
    fake::{Behaviour, Errno, FakeKernel, Fault, INIT, TaskTraits, mask_changes, masks},
    sim::{DiskFault, Foreign, Setup, Sim, Wish},
};

const SECOND: u64 = 1_000_000_000;
const MINUTE: u64 = 60 * SECOND;
/// The files that truepin writes, of every cgroup outside its slice.
type Files = BTreeMap<(CgroupPath, CpusetFile), String>;

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn owner(text: &str) -> Owner {
    text.parse().unwrap()
}

/// Eight CPUs in two packages, 0-1 reserved. `system.slice` with two services, `user.slice`, `machine.slice/vm.scope`,
/// all with a process, and cpuset enabled below the root and below `system.slice`.
fn host(behaviour: Behaviour) -> (Setup, FakeKernel) {
    let regular =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent };
    let raw = regular.raw();
    let mut kernel = FakeKernel::new(behaviour, cpus("0-7"), "0-1".parse().unwrap());
    kernel.write_file(&p(""), "cgroup.subtree_control", "+cpuset").unwrap();
    for path in [
        "system.slice",
        "system.slice/a",
        "system.slice/b",
        "user.slice",
        "machine.slice",
        "machine.slice/vm",
    ] {
        kernel.mkdir(&p(path)).unwrap();
    }
    kernel.write_file(&p("system.slice"), "cgroup.subtree_control", "+cpuset").unwrap();
    for path in ["system.slice/a", "system.slice/b", "user.slice", "machine.slice/vm"] {
        kernel.spawn(&p(path), 1, TaskTraits::default()).unwrap();
    }
    let exclusive = behaviour.exclusive_file;
    (Setup::plain(CpuTopology::assemble(&raw).unwrap(), cpus("0-1"), exclusive), kernel)
}

fn sim() -> Sim {
    logged(host(Behaviour::strict()))
}

fn logged((setup, kernel): (Setup, FakeKernel)) -> Sim {
    let mut sim = Sim::new(setup, kernel);
    sim.eyes.log = Some(Vec::new());
    sim
}

/// Nothing is wrong and nothing is left to do.
#[track_caller]
fn settled(sim: &mut Sim) {
    let wrong = sim.unsettled();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", log(sim));
}

/// The rules that hold always, though a problem may be left.
#[track_caller]
fn sound(sim: &mut Sim) {
    let faults = std::mem::take(&mut sim.faults);
    let breaches = std::mem::take(&mut sim.eyes.breaches);
    assert!(faults.is_empty() && breaches.is_empty(), "{faults:#?} {breaches:#?}\n{}", log(sim));
}

fn log(sim: &Sim) -> String {
    sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>().join("\n")
}

fn run(name: &str, set: &str, isolation: Isolation) -> Wish {
    let set = cpus(set);
    Wish::new(owner(&format!("run/{name}")), u32::try_from(set.len()).unwrap(), isolation).on(set)
}

fn existing(path: &str, set: &str, isolation: Isolation) -> Wish {
    let set = cpus(set);
    Wish::new(owner(&format!("cgroup/{path}")), u32::try_from(set.len()).unwrap(), isolation).on(set)
}

/// A process in `user.slice`, as a client's command is.
fn client(sim: &mut Sim) -> u32 {
    sim.eyes.others(|k| k.spawn(&p("user.slice"), 1, TaskTraits::default()).unwrap())
}

#[track_caller]
fn assigned(sim: &mut Sim, wish: &Wish) {
    let answer = sim.admit(wish).unwrap();
    assert!(matches!(answer, Answer::Assigned(..)), "{answer:?}\n{}", log(sim));
    settled(sim);
}

#[track_caller]
fn refused(sim: &mut Sim, wish: &Wish) -> AdmitError {
    match sim.admit(wish).unwrap() {
        Answer::Refused(error) => error,
        other => panic!("{other:?}\n{}", log(sim)),
    }
}

/// Somebody writes a file, and the kernel tells of it.
fn foreign(sim: &mut Sim, file: &str, text: &str, writer: Option<u32>) {
    let (path, name) = file.rsplit_once('/').unwrap_or(("", file));
    let write = Foreign { path: p(path), file: name.into(), text: text.into() };
    sim.eyes.foreign(&write).unwrap();
    told(sim, path, name, writer);
}

fn told(sim: &mut Sim, path: &str, name: &str, writer: Option<u32>) {
    let writer = writer.map(|pid| Writer { pid, comm: format!("w{pid}"), cgroup: Some(p("user.slice")) });
    let seen = vec![ForeignWrite { path: p(path), file: CpusetFile::of_name(name), writer }];
    sim.happens(Event::Disturbed { writes: seen, departures: Vec::new() }).unwrap();
}

fn text(sim: &Sim, path: &str, file: CpusetFile) -> String {
    sim.eyes.text(&p(path), file)
}

fn effective(sim: &Sim, path: &str) -> CpuSet {
    sim.eyes.set(&p(path), "cpuset.cpus.effective").unwrap()
}

fn files(sim: &Sim) -> Files {
    let kernel = sim.eyes.kernel();
    let all = kernel.cgroups().flat_map(|path| CpusetFile::ALL.map(|f| (path.clone(), f)));
    all.map(|(path, f)| ((path.clone(), f), sim.eyes.text(&path, f))).collect()
}

fn findings<'a, T>(sim: &'a Sim, pick: impl Fn(&'a FindingKind) -> Option<T>) -> Vec<T> {
    sim.reports.iter().filter_map(|f| pick(&f.kind)).collect()
}

/// Path, file, found, wanted and the writer's pid of every drift.
fn drifts(sim: &Sim) -> Vec<(String, String, String, String, Option<u32>)> {
    findings(sim, |k| match k {
        FindingKind::Drift { path, file, found, wanted, writer } => Some((
            path.as_str().to_owned(),
            file.name().to_owned(),
            found.clone(),
            wanted.clone(),
            writer.as_ref().map(|w| w.pid),
        )),
        _ => None,
    })
}

#[track_caller]
fn drifted(sim: &Sim, file: &str, found: &str, wanted: &str, writer: Option<u32>) {
    let (path, name) = file.rsplit_once('/').unwrap();
    let expected = (path.to_owned(), name.to_owned(), found.to_owned(), wanted.to_owned(), writer);
    let all = drifts(sim);
    assert!(all.contains(&expected), "{expected:?} is not among {all:#?}");
}

fn kinds(sim: &Sim) -> BTreeSet<&'static str> {
    sim.reports.iter().map(|f| f.kind.name()).collect()
}

// What is refused leaves nothing behind.

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
    let mut sim = logged(host(Behaviour::members_only()));
    assert_eq!(refused(&mut sim, &run("a", "2-3", Isolation::Partition)), AdmitError::NoPartitions);
    assigned(&mut sim, &run("a", "2-3", Isolation::Auto));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Member));
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

// What others change.

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
    drifted(&sim, "user.slice/cpuset.cpus.partition", "root invalid", "root", None);
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
        let fights = findings(&sim, |k| match k {
            FindingKind::Fight { path, file, writer, repairs } => {
                Some((path.as_str(), *file, writer.as_ref().map(|w| w.pid), *repairs))
            }
            _ => None,
        });
        assert_eq!(fights, [("truepin.slice/run-a", CpusetFile::Cpus, writer, 3)]);
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
    for _ in 0..20 {
        sim.wait(SECOND);
        sim.tick().unwrap();
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

#[track_caller]
fn assigned_though_unsettled(sim: &mut Sim, wish: &Wish) {
    let answer = sim.admit(wish).unwrap();
    assert!(matches!(answer, Answer::Assigned(..)), "{answer:?}\n{}", log(sim));
    sound(sim);
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
    // All CPUs of an owner: said, nothing is tried, and well again afterwards.
    for cpu in [2, 3] {
        sim.eyes.others(|k| k.set_online(CpuId(cpu), false).unwrap());
    }
    sim.tick().unwrap();
    sound(&mut sim);
    assert!(sim.state.problems().any(|p| matches!(p, Problem::Offline { .. })));
    for cpu in [2, 3] {
        sim.eyes.others(|k| k.set_online(CpuId(cpu), true).unwrap());
    }
    sim.tick().unwrap();
    settled(&mut sim);
}

// Owners that come and go.

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
        assert_eq!(gone, [("run/a".into(), "2-3".into(), "its last process has ended")]);
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
