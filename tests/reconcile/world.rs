//! The host of the scenarios, and what every scenario asks of it.

use std::collections::{BTreeMap, BTreeSet};
use truepin::reconcile::{AdmitError, Answer, Cause, Event, Finding, FindingKind, ForeignWrite, Writer};
use truepin::request::Isolation;
use truepin::topology::synthetic::{Numbering, Regular};
use truepin::{CgroupFile, CgroupPath, CpuSet, CpuTopology, CpusetFile, Owner};
use truepin_tests::fake::{Behaviour, FakeKernel, TaskTraits};
use truepin_tests::sim::{Foreign, Setup, Sim, Wish};

pub(crate) const SECOND: u64 = 1_000_000_000;
pub(crate) const MINUTE: u64 = 60 * SECOND;
/// The files that truepin writes, of every cgroup outside its slice.
pub(crate) type Files = BTreeMap<(CgroupPath, CpusetFile), String>;

pub(crate) fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

pub(crate) fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

pub(crate) fn owner(text: &str) -> Owner {
    text.parse().unwrap()
}

/// Eight CPUs in two packages, 0-1 reserved. `system.slice` with two services, `user.slice`, `machine.slice/vm.scope`,
/// all with a process, and cpuset enabled below the root and below `system.slice`.
pub(crate) fn host(behaviour: Behaviour) -> (Setup, FakeKernel) {
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

pub(crate) fn sim() -> Sim {
    logged(host(Behaviour::strict()))
}

pub(crate) fn logged((setup, kernel): (Setup, FakeKernel)) -> Sim {
    let mut sim = Sim::new(setup, kernel);
    sim.eyes.log = Some(Vec::new());
    sim
}

/// Nothing is wrong and nothing is left to do.
#[track_caller]
pub(crate) fn settled(sim: &mut Sim) {
    let wrong = sim.unsettled();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", log(sim));
}

/// The rules that hold always, though a problem may be left.
#[track_caller]
pub(crate) fn sound(sim: &mut Sim) {
    let faults = std::mem::take(&mut sim.faults);
    let breaches = std::mem::take(&mut sim.eyes.breaches);
    assert!(faults.is_empty() && breaches.is_empty(), "{faults:#?} {breaches:#?}\n{}", log(sim));
}

pub(crate) fn log(sim: &Sim) -> String {
    sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>().join("\n")
}

pub(crate) fn run(name: &str, set: &str, isolation: Isolation) -> Wish {
    let set = cpus(set);
    Wish::new(owner(&format!("run/{name}")), u32::try_from(set.len()).unwrap(), isolation).on(set)
}

pub(crate) fn existing(path: &str, set: &str, isolation: Isolation) -> Wish {
    let set = cpus(set);
    Wish::new(owner(&format!("cgroup/{path}")), u32::try_from(set.len()).unwrap(), isolation).on(set)
}

/// A process in `user.slice`, as a client's command is.
pub(crate) fn client(sim: &mut Sim) -> u32 {
    sim.eyes.others(|k| k.spawn(&p("user.slice"), 1, TaskTraits::default()).unwrap())
}

#[track_caller]
pub(crate) fn assigned(sim: &mut Sim, wish: &Wish) {
    let answer = sim.admit(wish).unwrap();
    assert!(matches!(answer, Answer::Assigned(..)), "{answer:?}\n{}", log(sim));
    settled(sim);
}

#[track_caller]
pub(crate) fn refused(sim: &mut Sim, wish: &Wish) -> AdmitError {
    match sim.admit(wish).unwrap() {
        Answer::Refused(error) => error,
        other => panic!("{other:?}\n{}", log(sim)),
    }
}

/// Somebody writes a file, and the kernel tells of it.
pub(crate) fn foreign(sim: &mut Sim, file: &str, text: &str, writer: Option<u32>) {
    let (path, name) = file.rsplit_once('/').unwrap_or(("", file));
    let write = Foreign { path: p(path), file: name.into(), text: text.into() };
    sim.eyes.foreign(&write).unwrap();
    told(sim, path, name, writer);
}

pub(crate) fn told(sim: &mut Sim, path: &str, name: &str, writer: Option<u32>) {
    let writer = writer.map(|pid| by(pid, sim.now.mono_ns));
    let seen = vec![ForeignWrite { path: p(path), file: CgroupFile::of_name(name), writer }];
    sim.happens(Event::Disturbed { writes: seen, departures: Vec::new() }).unwrap();
}

/// A process of `user.slice` that wrote something at this time.
pub(crate) fn by(pid: u32, at_ns: u64) -> Writer {
    Writer {
        pid,
        comm: format!("w{pid}"),
        cgroup: Some(p("user.slice")),
        cgroup_id: None,
        certain: true,
        wrote: None,
        begun_ns: at_ns,
        ended_ns: at_ns,
    }
}

pub(crate) fn text(sim: &Sim, path: &str, file: CpusetFile) -> String {
    sim.eyes.text(&p(path), file)
}

pub(crate) fn effective(sim: &Sim, path: &str) -> CpuSet {
    sim.eyes.set(&p(path), "cpuset.cpus.effective").unwrap()
}

pub(crate) fn files(sim: &Sim) -> Files {
    let kernel = sim.eyes.kernel();
    let all = kernel.cgroups().flat_map(|path| CpusetFile::ALL.map(|f| (path.clone(), f)));
    all.map(|(path, f)| ((path.clone(), f), sim.eyes.text(&path, f))).collect()
}

pub(crate) fn findings<'a, T>(sim: &'a Sim, pick: impl Fn(&'a FindingKind) -> Option<T>) -> Vec<T> {
    sim.reports.iter().filter_map(|f| pick(&f.kind)).collect()
}

/// Path, file, found, wanted and the writer's pid of every drift.
pub(crate) fn drifts(sim: &Sim) -> Vec<(String, String, String, String, Option<u32>)> {
    let of = |f: &Finding| match &f.kind {
        FindingKind::Drift { path, file, found, wanted } => Some((
            path.as_str().to_owned(),
            file.name().to_owned(),
            found.clone(),
            wanted.clone(),
            f.cause.as_ref().and_then(Cause::writer).map(|w| w.pid),
        )),
        _ => None,
    };
    sim.reports.iter().filter_map(of).collect()
}

#[track_caller]
pub(crate) fn drifted(sim: &Sim, file: &str, found: &str, wanted: &str, writer: Option<u32>) {
    let (path, name) = file.rsplit_once('/').unwrap();
    let expected = (path.to_owned(), name.to_owned(), found.to_owned(), wanted.to_owned(), writer);
    let all = drifts(sim);
    assert!(all.contains(&expected), "{expected:?} is not among {all:#?}");
}

pub(crate) fn kinds(sim: &Sim) -> BTreeSet<&'static str> {
    sim.reports.iter().map(|f| f.kind.name()).collect()
}

#[track_caller]
pub(crate) fn assigned_though_unsettled(sim: &mut Sim, wish: &Wish) {
    let answer = sim.admit(wish).unwrap();
    assert!(matches!(answer, Answer::Assigned(..)), "{answer:?}\n{}", log(sim));
    sound(sim);
}
