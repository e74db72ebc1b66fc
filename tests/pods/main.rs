//! Pods, as they come, go, and end while nobody looks.
//!
//! One machine: eight CPUs in two packages, 0-1 reserved, a `kubepods` tree with cpuset enabled down to the pods.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

mod admission;
mod containers;

use std::collections::BTreeSet;
use truepin::{
    CgroupPath, CpuSet, CpuTopology, CpusetFile, Owner,
    containers::ContainerId,
    placement::{Scope, Strategy, kubelet::StaticOptions},
    pod::Pod,
    reconcile::{AdmitError, Answer, Event, FindingKind, PodAdmission, Sighting},
    request::{AlignmentPolicy, Isolation},
    stale::SourceReport,
    topology::synthetic::{Numbering, Regular},
};
use truepin_tests::{
    fake::{Behaviour, FakeKernel, TaskTraits},
    sim::{DiskFault, Setup, Sim, Wish},
};

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn owner(text: &str) -> Owner {
    text.parse().unwrap()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

/// As it is after a boot.
fn booted(online: &str) -> FakeKernel {
    let mut kernel = FakeKernel::new(Behaviour::strict(), cpus("0-7"), "0-1".parse().unwrap());
    for cpu in cpus("0-7").difference(&cpus(online)).iter() {
        kernel.set_online(cpu, false).unwrap();
    }
    kernel.write_file(&p(""), "cgroup.subtree_control", "+cpuset").unwrap();
    for path in ["kubepods", "system.slice"] {
        kernel.mkdir(&p(path)).unwrap();
    }
    kernel.write_file(&p("kubepods"), "cgroup.subtree_control", "+cpuset").unwrap();
    kernel.spawn(&p("system.slice"), 1, TaskTraits::default()).unwrap();
    kernel
}

/// A node; `sources` say which pods are active.
fn node(sources: &[&str]) -> Sim {
    let regular =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent };
    let topology = CpuTopology::assemble(&regular.raw()).unwrap();
    let mut setup = Setup::plain(topology, cpus("0-1"), Behaviour::strict().exclusive_file);
    setup.settings.sources = names(sources);
    let mut sim = Sim::new(setup, booted("0-7"));
    sim.eyes.log = Some(Vec::new());
    sim
}

fn log(sim: &Sim) -> String {
    sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn settled(sim: &mut Sim) {
    let wrong = sim.unsettled();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", log(sim));
}

/// A Guaranteed pod whose containers ask for so many CPUs.
fn pod(uid: &str, containers: &[(&str, u32)]) -> Pod {
    let app: Vec<String> = containers
        .iter()
        .map(|(n, cpus)| {
            format!(r#"{{"n":"{n}","req":{0},"lim":{0},"mreq":64,"mlim":64}}"#, u64::from(*cpus) * 1000)
        })
        .collect();
    Pod::parse(format!(r#"{{"uid":"{uid}","app":[{}]}}"#, app.join(",")).as_bytes()).unwrap()
}

fn admission(ticket: u64, pod: &Pod) -> PodAdmission {
    let requests = pod.requests(AlignmentPolicy::SingleNumaNode, Isolation::Auto).unwrap();
    PodAdmission { ticket, uid: pod.uid.clone(), requests }
}

fn admit(sim: &mut Sim, pod: &Pod) -> Answer {
    sim.ask(|ticket| Event::AdmitPods(vec![admission(ticket, pod)])).unwrap()
}

#[track_caller]
fn admitted(sim: &mut Sim, pod: &Pod) -> Vec<String> {
    match admit(sim, pod) {
        Answer::Pod(sets) => sets.into_iter().map(|(o, c)| format!("{o} {c}")).collect(),
        other => panic!("{other:?}\n{}", log(sim)),
    }
}

fn remove(sim: &mut Sim, uid: &str) -> Vec<String> {
    match sim.ask(|ticket| Event::RemovePod { ticket, uid: uid.into() }).unwrap() {
        Answer::Released(owners) => owners.into_iter().map(|(o, _)| o.to_string()).collect(),
        other => panic!("{other:?}"),
    }
}

fn id(n: u32) -> ContainerId {
    format!("{n:064x}").parse().unwrap()
}

fn home(uid: &str, n: u32) -> CgroupPath {
    p(&format!("kubepods/pod{uid}/{}", id(n)))
}

/// The runtime makes a container with a process; nobody is told.
fn make(sim: &mut Sim, uid: &str, n: u32) {
    sim.eyes.others(|k| {
        let dir = p(&format!("kubepods/pod{uid}"));
        if k.id(&dir).is_none() {
            k.mkdir(&dir).unwrap();
            k.write_file(&dir, "cgroup.subtree_control", "+cpuset").unwrap();
        }
        k.mkdir(&home(uid, n)).unwrap();
        k.spawn(&home(uid, n), 1, TaskTraits::default()).unwrap();
    });
}

/// The runtime removes a container; nobody is told.
fn unmake(sim: &mut Sim, uid: &str, n: u32) {
    sim.eyes.others(|k| {
        let inside: Vec<u32> = k.threads().filter(|t| k.cgroup_of(*t) == Some(&home(uid, n))).collect();
        for task in inside {
            k.exit(task).unwrap();
        }
        k.rmdir(&home(uid, n)).unwrap();
    });
}

fn unmake_pod(sim: &mut Sim, uid: &str) {
    sim.eyes.others(|k| k.rmdir(&p(&format!("kubepods/pod{uid}"))).unwrap());
}

/// The runtime tells of a container.
fn created(sim: &mut Sim, uid: &str, container: &str, n: u32) -> Answer {
    let cgroup = sim.eyes.kernel().id(&home(uid, n));
    let home = cgroup.map(|c| (home(uid, n), c));
    let owner = owner(&format!("pod/{uid}/{container}"));
    sim.ask(|ticket| Event::Container { ticket, id: id(n), owner, home }).unwrap()
}

/// The agent reads the tree: pods, and containers with their names as far as they can be found out.
fn tree(sim: &mut Sim, pods: &[&str], containers: &[(&str, Option<&str>, u32)]) {
    let sighting = |(uid, name, n): &(&str, Option<&str>, u32)| Sighting {
        id: id(*n),
        uid: (*uid).into(),
        name: name.map(Into::into),
        path: home(uid, *n),
        cgroup: sim.eyes.kernel().id(&home(uid, *n)).unwrap(),
    };
    let containers = containers.iter().map(sighting).collect();
    sim.happens(Event::Tree { pods: names(pods), containers }).unwrap();
}

fn report(sim: &mut Sim, source: &str, complete: bool, pods: &[&str]) {
    let report = SourceReport { source: source.into(), complete, pods: names(pods), position: None };
    assert_eq!(sim.ask(|ticket| Event::Source { ticket, report }).unwrap(), Answer::Noted);
}

fn effective(sim: &Sim, path: &CgroupPath) -> CpuSet {
    sim.eyes.set(path, "cpuset.cpus.effective").unwrap()
}

fn exclusive(sim: &Sim) -> String {
    sim.state.assignments.exclusive().to_string()
}

fn gone(sim: &Sim) -> Vec<String> {
    let of = |k: &FindingKind| match k {
        FindingKind::Gone { owner, cpus, why } => Some(format!("{owner} {cpus} {why}")),
        _ => None,
    };
    sim.reports.iter().filter_map(|f| of(&f.kind)).collect()
}
