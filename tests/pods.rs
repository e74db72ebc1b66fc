//! Pods, as they come, go, and end while nobody looks.
//!
//! One machine: eight CPUs in two packages, 0-1 reserved, a `kubepods` tree with cpuset enabled down to the pods.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

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

// The seed's own scenarios.

#[test]
fn a_pod_ends_while_the_agent_is_down_and_no_pod_is_active_afterwards() {
    for sources in [&[] as &[&str], &["api"]] {
        for with_container in [true, false] {
            let mut sim = node(sources);
            admitted(&mut sim, &pod("a", &[("c", 4)]));
            if with_container {
                make(&mut sim, "a", 1);
                created(&mut sim, "a", "c", 1);
                assert_eq!(effective(&sim, &home("a", 1)), cpus("4-7"));
                unmake(&mut sim, "a", 1);
                unmake_pod(&mut sim, "a");
            }
            sim.restart().unwrap();
            assert_eq!(exclusive(&sim), "4-7", "nothing was said yet");
            tree(&mut sim, &[], &[]);
            if !sources.is_empty() {
                assert_eq!(exclusive(&sim), "4-7", "the source has not reported");
                report(&mut sim, "api", true, &[]);
            }
            // Without a source a pod of which nothing was ever made is only waited for.
            let freed = with_container || !sources.is_empty();
            assert_eq!(exclusive(&sim), if freed { "" } else { "4-7" }, "{sources:?} {with_container}");
            let told: &[&str] = if freed { &["pod/a/c 4-7 its pod is not active any more"] } else { &[] };
            assert_eq!(gone(&sim), told, "exactly once");
            tree(&mut sim, &[], &[]);
            sim.tick().unwrap();
            assert_eq!(gone(&sim), told, "exactly once");
            settled(&mut sim);
            assert_eq!(sim.disk.record().unwrap().assignments.exclusive().is_empty(), freed);
        }
    }
}

#[test]
fn hints_would_have_seen_stale_cpus_as_taken() {
    let mut sim = node(&["api"]);
    admitted(&mut sim, &pod("a", &[("c", 4)]));
    // The report comes, and the table that follows from it cannot be made durable: the pod stays in it.
    sim.disk.full = true;
    report(&mut sim, "api", true, &[]);
    assert_eq!(exclusive(&sim), "4-7");
    sim.disk.full = false;
    // Four CPUs of one node are free only without it.
    assert_eq!(admitted(&mut sim, &pod("b", &[("c", 4)])), ["pod/b/c 4-7"]);
    settled(&mut sim);
}

#[test]
fn a_source_that_is_not_ready_frees_nobody() {
    let mut sim = node(&["api", "file"]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    sim.restart().unwrap();
    for (source, complete, pods) in
        [("api", true, &["b"] as &[&str]), ("file", false, &[]), ("api", false, &[]), ("api", true, &["b"])]
    {
        report(&mut sim, source, complete, pods);
        assert_eq!(gone(&sim), [""; 0], "{source} {complete}");
    }
    report(&mut sim, "file", true, &[]);
    assert_eq!(gone(&sim), ["pod/a/c 2-3 its pod is not active any more"]);
    // One that comes after the reports is not concerned by them.
    admitted(&mut sim, &pod("new", &[("c", 2)]));
    sim.tick().unwrap();
    assert_eq!(gone(&sim).len(), 1);
    report(&mut sim, "api", true, &["b"]);
    assert_eq!(gone(&sim).len(), 1, "the other report is older");
    report(&mut sim, "file", true, &[]);
    assert_eq!(gone(&sim).len(), 2);
    let report = SourceReport { source: "x".into(), complete: true, pods: names(&[]), position: None };
    let answer = sim.ask(|ticket| Event::Source { ticket, report }).unwrap();
    assert!(matches!(&answer, Answer::Failed(why) if why.contains("api, file")), "{answer:?}");
}

#[test]
fn initial_containers_after_a_restart() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)]));
    make(&mut sim, "a", 1);
    make(&mut sim, "a", 2);
    make(&mut sim, "a", 3);
    // Every message is lost; one name cannot be found out.
    sim.restart().unwrap();
    assert!(sim.state.containers.is_empty());
    tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("d"), 2), ("a", None, 3)]);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 1)), cpus("2-3"));
    assert_eq!(effective(&sim, &home("a", 2)), cpus("4-5"));
    assert_eq!(effective(&sim, &home("a", 3)), cpus("0-1,6-7"));
    let ties: Vec<String> = sim.state.containers.iter().map(|(id, e)| format!("{id} {}", e.owner)).collect();
    assert_eq!(ties, [format!("{} pod/a/c", id(1)), format!("{} pod/a/d", id(2))]);
    let unresolved = |sim: &Sim| {
        sim.reports
            .iter()
            .filter(|f| matches!(&f.kind, FindingKind::Unresolved { id: i, .. } if *i == id(3)))
            .count()
    };
    assert_eq!(unresolved(&sim), 1);
    tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("d"), 2), ("a", None, 3)]);
    assert_eq!(unresolved(&sim), 1, "told once");
    assert_eq!(gone(&sim), [""; 0]);
}

// Order, repetition, loss.

#[test]
fn the_order_of_messages_does_not_matter() {
    // 0 admit, 1 made, 2 created, 3 tree: every order in which a container is made before it is told of.
    let orders =
        [[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3], [1, 2, 3, 0], [1, 3, 2, 0], [1, 3, 0, 2], [0, 1, 3, 2]];
    for order in orders {
        let mut sim = node(&[]);
        for op in order {
            for _ in 0..2 {
                match op {
                    0 => drop(admitted(&mut sim, &pod("a", &[("c", 2)]))),
                    1 if sim.eyes.kernel().id(&home("a", 1)).is_none() => make(&mut sim, "a", 1),
                    2 => drop(created(&mut sim, "a", "c", 1)),
                    3 => tree(&mut sim, &["a"], &[("a", Some("c"), 1)]),
                    _ => {}
                }
            }
        }
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", 1)), cpus("2-3"), "{order:?}\n{}", log(&sim));
        assert_eq!(sim.state.assignments.owners[&owner("pod/a/c")].cgroup, home("a", 1), "{order:?}");
        assert_eq!(remove(&mut sim, "a"), ["pod/a/c"]);
        assert_eq!(remove(&mut sim, "a"), [""; 0]);
        settled(&mut sim);
        assert_eq!((exclusive(&sim), sim.state.containers.len()), (String::new(), 0));
        assert_eq!(effective(&sim, &home("a", 1)), cpus("0-7"), "{order:?}");
    }
}

/// A scan that tells of a newer container may come before the loop itself has read that cgroup, and scans are in the order of
/// paths.
#[test]
fn a_newer_container_has_the_cpus_whatever_its_id() {
    for (old, new) in [(1, 2), (2, 1)] {
        let mut sim = node(&[]);
        admitted(&mut sim, &pod("a", &[("c", 2)]));
        make(&mut sim, "a", old);
        tree(&mut sim, &["a"], &[("a", Some("c"), old)]);
        settled(&mut sim);
        make(&mut sim, "a", new);
        for _ in 0..2 {
            tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("c"), 2)]);
            settled(&mut sim);
            assert_eq!(
                sim.state.assignments.owners[&owner("pod/a/c")].cgroup,
                home("a", new),
                "{}",
                log(&sim)
            );
        }
        assert_eq!(effective(&sim, &home("a", new)), cpus("2-3"));
        // The newer one ends first: the older one has them again, though the loop has not read that either.
        unmake(&mut sim, "a", new);
        tree(&mut sim, &["a"], &[("a", Some("c"), old)]);
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", old)), cpus("2-3"));
    }
}

#[test]
fn a_container_made_anew_keeps_its_owners_set() {
    for told in [true, false] {
        let mut sim = node(&[]);
        admitted(&mut sim, &pod("a", &[("c", 2)]));
        make(&mut sim, "a", 1);
        created(&mut sim, "a", "c", 1);
        unmake(&mut sim, "a", 1);
        sim.tick().unwrap();
        tree(&mut sim, &["a"], &[]);
        settled(&mut sim);
        assert!(sim.state.assignments.promised.contains_key(&owner("pod/a/c")), "{}", log(&sim));
        // Somebody else does not get them meanwhile.
        assert_eq!(admitted(&mut sim, &pod("b", &[("c", 2)])), ["pod/b/c 4-5"]);
        make(&mut sim, "a", 2);
        if told {
            created(&mut sim, "a", "c", 2);
        } else {
            tree(&mut sim, &["a"], &[("a", Some("c"), 2)]);
        }
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", 2)), cpus("2-3"));
        // The new one before the old one has gone, over a restart of the agent too.
        make(&mut sim, "a", 3);
        created(&mut sim, "a", "c", 3);
        sim.restart().unwrap();
        tree(&mut sim, &["a"], &[("a", Some("c"), 2), ("a", Some("c"), 3)]);
        settled(&mut sim);
        assert_eq!(exclusive(&sim), "2-5");
        assert_eq!(gone(&sim), [""; 0]);
        let lives = |sim: &Sim| sim.state.assignments.owners[&owner("pod/a/c")].cgroup.clone();
        assert_eq!(
            (lives(&sim), effective(&sim, &home("a", 3))),
            (home("a", 3), cpus("2-3")),
            "the newer one"
        );
        // What is said again of the old one changes nothing.
        created(&mut sim, "a", "c", 2);
        settled(&mut sim);
        assert_eq!(
            (lives(&sim), effective(&sim, &home("a", 3))),
            (home("a", 3), cpus("2-3")),
            "the newer one"
        );
    }
}

#[test]
fn after_a_reboot_pods_wait_for_their_containers() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    // Of b there was a container once.
    make(&mut sim, "b", 2);
    created(&mut sim, "b", "c", 2);
    unmake(&mut sim, "b", 2);
    sim.tick().unwrap();
    assert!(sim.state.assignments.promised[&owner("pod/b/c")].made);
    sim.reboot(booted("0-7")).unwrap();
    assert!(sim.state.containers.is_empty(), "no runtime starts a container of the boot before again");
    // The agent is up before the kubelet: the tree has no pods yet.
    for _ in 0..2 {
        tree(&mut sim, &[], &[]);
        sim.tick().unwrap();
        assert_eq!((exclusive(&sim).as_str(), gone(&sim)), ("2-5", vec![]), "{}", log(&sim));
    }
    settled(&mut sim);
    make(&mut sim, "a", 3);
    tree(&mut sim, &["a"], &[("a", Some("c"), 3)]);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 3)), cpus("2-3"));
    assert_eq!(remove(&mut sim, "b"), ["pod/b/c"]);
    assert_eq!(exclusive(&sim), "2-3");
}

#[test]
fn a_table_that_was_fitted_after_a_reboot_is_what_a_full_disk_leaves() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    let slice = sim.state.first.clone();
    sim.disk.full = true;
    // CPU 3 did not come back.
    let setup = std::sync::Arc::make_mut(&mut sim.setup);
    let mut raw =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent }
            .raw();
    raw.online = Some(cpus("0-2,4-7"));
    setup.topology = CpuTopology::assemble(&raw).unwrap();
    sim.reboot(booted("0-2,4-7")).unwrap();
    sim.tick().unwrap();
    let set = |sim: &Sim| sim.state.assignments.cpus_of(&owner("pod/a/c")).unwrap().clone();
    let fitted = set(&sim);
    assert!(fitted.len() == 2 && !fitted.contains(truepin::CpuId(3)), "{fitted}\n{}", log(&sim));
    // Somebody asks, and that cannot be saved: back to what this boot may use, not to what the boot before had.
    let answer = admit(&mut sim, &pod("b", &[("c", 2)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::NotDurable(_))), "{answer:?}");
    assert_eq!((set(&sim), sim.state.first.is_empty() || slice.is_empty()), (fitted.clone(), true));
    sim.disk.full = false;
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(sim.disk.record().unwrap().assignments.cpus_of(&owner("pod/a/c")), Some(&fitted));
}

#[test]
fn a_container_that_ends_has_a_last_verdict() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    sim.probe.foreign_ns.insert(truepin::CpuId(2), 5_000_000);
    sim.wait(1_000_000_000);
    unmake(&mut sim, "a", 1);
    sim.tick().unwrap();
    let last = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(last.judgement, truepin::verdict::Judgement::Violated, "{last:?}");
    // Its successor does not make that undone: since the assignment it is violated, by itself it is not.
    sim.probe.foreign_ns.clear();
    make(&mut sim, "a", 2);
    created(&mut sim, "a", "c", 2);
    sim.wait(1_000_000_000);
    let next = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(next.judgement, truepin::verdict::Judgement::Violated, "{next:?}");
    assert!(next.reasons[0].starts_with("in an earlier container: CPU 2"), "{next:?}");
    let from = sim.evidence().unwrap();
    sim.wait(1_000_000_000);
    let now = sim.evidence().unwrap();
    let window = sim.state.verdict(&owner("pod/a/c"), Some(&from), &now).unwrap();
    assert_eq!(window.judgement, truepin::verdict::Judgement::Held, "{window:?}");
    // Replaced before anybody looked: the verdict since the assignment says that a part was not judged.
    make(&mut sim, "a", 3);
    created(&mut sim, "a", "c", 3);
    sim.wait(1_000_000_000);
    let both = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(both.judgement, truepin::verdict::Judgement::Violated, "{both:?}");
    assert!(both.reasons.iter().any(|r| r.contains("made anew")), "{both:?}");
    settled(&mut sim);
}

#[test]
fn containers_that_end_well_leave_nothing_behind() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    for n in 1..4 {
        make(&mut sim, "a", n);
        created(&mut sim, "a", "c", n);
        sim.wait(1_000_000_000);
        let now = sim.verdict(&owner("pod/a/c")).unwrap();
        assert_eq!(now.judgement, truepin::verdict::Judgement::Held, "{n}: {now:?}");
        unmake(&mut sim, "a", n);
        sim.tick().unwrap();
    }
    // One whose end could not be judged does.
    make(&mut sim, "a", 4);
    created(&mut sim, "a", "c", 4);
    sim.wait(1_000_000_000);
    sim.probe.broken = true;
    unmake(&mut sim, "a", 4);
    sim.tick().unwrap();
    sim.probe.broken = false;
    make(&mut sim, "a", 5);
    created(&mut sim, "a", "c", 5);
    sim.wait(1_000_000_000);
    let now = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(now.judgement, truepin::verdict::Judgement::Inconclusive, "{now:?}");
    // A pod of the same name that comes later has no past.
    remove(&mut sim, "a");
    unmake(&mut sim, "a", 5);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 6);
    created(&mut sim, "a", "c", 6);
    sim.wait(1_000_000_000);
    assert_eq!(sim.verdict(&owner("pod/a/c")).unwrap().judgement, truepin::verdict::Judgement::Held);
}

#[test]
fn the_pod_as_a_whole() {
    for strategy in [Strategy::Best, Strategy::Kubelet { options: StaticOptions::default(), closest: false }]
    {
        let of = |scope| {
            let mut sim = node(&[]);
            let mut setup = (*sim.setup).clone();
            (setup.settings.strategy, setup.settings.scope) = (strategy, scope);
            sim = Sim::new(setup, booted("0-7"));
            sim.eyes.log = Some(Vec::new());
            sim
        };
        // CPUs 2-3 of one node are free, 4-7 of the other.
        let mut sim = of(Scope::Container);
        assert_eq!(admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])), ["pod/a/c 2-3", "pod/a/d 4-5"]);
        let mut sim = of(Scope::Pod);
        assert_eq!(
            admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])),
            ["pod/a/c 4-5", "pod/a/d 6-7"],
            "{strategy}"
        );
        // What does not fit together leaves nothing behind.
        let before = sim.state.assignments.clone();
        let answer = admit(&mut sim, &pod("b", &[("c", 1), ("d", 2)]));
        assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{answer:?}");
        assert_eq!(sim.state.assignments, before);
        // One that comes again without a container of it stays on its node, or is refused.
        sim.release(Some(&owner("pod/a/d"))).unwrap();
        assert_eq!(
            admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])),
            ["pod/a/c 4-5", "pod/a/d 6-7"],
            "{strategy}"
        );
        sim.release(Some(&owner("pod/a/d"))).unwrap();
        let wish = Wish::new(owner("run/x"), 1, Isolation::Auto).on(cpus("6"));
        assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
        let answer = admit(&mut sim, &pod("a", &[("c", 2), ("d", 2)]));
        assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{strategy}: {answer:?}");
        settled(&mut sim);
    }
}

#[test]
fn memory_of_a_pods_owner_outlives_its_container() {
    let mut sim = node(&[]);
    make(&mut sim, "a", 1);
    let mut wish = Wish::new(owner("pod/a/c"), 2, Isolation::Auto);
    wish.home = truepin::reconcile::Home::Existing(home("a", 1));
    wish.request.memory = 6 << 30;
    assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
    let mems = |sim: &Sim, n| sim.eyes.text(&home("a", n), CpusetFile::Mems);
    assert_eq!(mems(&sim, 1), "0");
    unmake(&mut sim, "a", 1);
    sim.tick().unwrap();
    assert_eq!(sim.state.assignments.claimed_memory().values().sum::<u64>(), 6 << 30);
    make(&mut sim, "a", 2);
    created(&mut sim, "a", "c", 2);
    settled(&mut sim);
    assert_eq!(mems(&sim, 2), "0");
}

#[test]
fn reserved_cpus_that_cannot_be_replaced_are_a_problem() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 4)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    std::sync::Arc::make_mut(&mut sim.setup).reserved = cpus("0-1,4-7");
    sim.restart().unwrap();
    sim.tick().unwrap();
    let problems: Vec<String> = sim.state.problems().map(ToString::to_string).collect();
    assert!(problems.iter().any(|p| p.contains("4-7 of pod/a/c are reserved")), "{problems:?}");
    assert_eq!(exclusive(&sim), "2-7");
}

#[test]
fn a_pod_is_admitted_as_a_whole_or_not_at_all() {
    let mut sim = node(&[]);
    let before = (sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.kernel().applies());
    // The second container does not fit on one node.
    let answer = admit(&mut sim, &pod("a", &[("c", 4), ("d", 4)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{answer:?}");
    assert_eq!(before, (sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.kernel().applies()));
    // The disk is full.
    sim.disk.full = true;
    let answer = admit(&mut sim, &pod("a", &[("c", 2)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::NotDurable(_))), "{answer:?}");
    assert_eq!(sim.state.assignments, before.0);
    sim.disk.full = false;
    // Fractions and other qualities of service share.
    let shared = r#"{"uid":"s","app":[{"n":"c","req":500,"lim":2000}]}"#;
    assert_eq!(admitted(&mut sim, &Pod::parse(shared.as_bytes()).unwrap()), [""; 0]);
    // The same pod with other numbers is another request.
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    let answer = admit(&mut sim, &pod("a", &[("c", 4)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::Reserve(_))), "{answer:?}");
    settled(&mut sim);
}

#[test]
fn a_promise_that_was_durable_is_answered_as_one() {
    let mut sim = node(&[]);
    // The first save has the promise. Member mode then writes the pool, whose first values are to be saved before.
    sim.disk.fault(1, DiskFault::Full);
    let requests = pod("a", &[("c", 2)]).requests(AlignmentPolicy::BestEffort, Isolation::Member).unwrap();
    let ask = |ticket| Event::AdmitPods(vec![PodAdmission { ticket, uid: "a".into(), requests }]);
    let answer = sim.ask(ask).unwrap();
    assert!(matches!(&answer, Answer::Pod(sets) if sets.len() == 1), "{answer:?}\n{}", log(&sim));
    let promised = sim.state.assignments.promised.clone();
    assert_eq!((promised.len(), &sim.disk.record().unwrap().assignments.promised), (1, &promised));
    sim.tick().unwrap();
    settled(&mut sim);
}

#[test]
fn a_pod_that_the_machine_made_smaller_is_the_same_pod() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    let promise = sim.state.assignments.promised.get_mut(&owner("pod/a/c")).unwrap();
    (promise.original, promise.cpus) = (Some(promise.cpus.clone()), cpus("2"));
    assert_eq!(admitted(&mut sim, &pod("a", &[("c", 2)])), ["pod/a/c 2"]);
    assert!(matches!(admit(&mut sim, &pod("a", &[("c", 3)])), Answer::Refused(AdmitError::Reserve(_))));
}

#[test]
fn what_was_taken_over_and_is_dead_leaves() {
    let mut sim = node(&[]);
    make(&mut sim, "b", 1);
    let owners = vec![(owner("pod/a/c"), cpus("4-5")), (owner("pod/b/c"), cpus("6-7"))];
    tree(&mut sim, &["b"], &[("b", Some("c"), 1)]);
    let answer = sim.ask(|ticket| Event::Adopt { ticket, owners }).unwrap();
    assert!(matches!(answer, Answer::Pod(_)), "{answer:?}");
    assert_eq!((exclusive(&sim).as_str(), effective(&sim, &home("b", 1))), ("4-7", cpus("6-7")));
    tree(&mut sim, &["b"], &[("b", Some("c"), 1)]);
    assert_eq!(gone(&sim), ["pod/a/c 4-5 its pod is not active any more"]);
    settled(&mut sim);
}

#[test]
fn the_tree_says_nothing_of_pods_outside_the_kubelets_places() {
    let mut sim = node(&[]);
    let wish = Wish::new(owner("pod/x/c"), 2, Isolation::Auto).on(cpus("4-5"));
    assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
    tree(&mut sim, &[], &[]);
    sim.tick().unwrap();
    assert_eq!((exclusive(&sim).as_str(), gone(&sim).len()), ("4-5", 0));
}

#[test]
fn pods_that_come_together_cost_one_save() {
    let mut sim = node(&[]);
    let saves = sim.disk.saves();
    let pods: Vec<PodAdmission> = ["a", "b", "c", "d"]
        .iter()
        .zip(900..)
        .map(|(uid, ticket)| admission(ticket, &pod(uid, &[("c", 2)])))
        .collect();
    sim.happens(Event::AdmitPods(pods)).unwrap();
    let answers: Vec<&Answer> = (900..904).map(|t| sim.answer(t).unwrap()).collect();
    assert!(answers[..3].iter().all(|a| matches!(a, Answer::Pod(s) if s.len() == 1)), "{answers:?}");
    assert!(
        matches!(answers[3], Answer::Refused(AdmitError::Placement(_))),
        "6 CPUs are 3 pods: {answers:?}"
    );
    assert_eq!(sim.disk.saves() - saves, 1);
    settled(&mut sim);
}

#[test]
fn promised_cpus_leave_the_pool_in_member_mode() {
    let mut sim = node(&[]);
    let requests = pod("a", &[("c", 2)]).requests(AlignmentPolicy::BestEffort, Isolation::Member).unwrap();
    let ask = |ticket| Event::AdmitPods(vec![PodAdmission { ticket, uid: "a".into(), requests }]);
    assert!(matches!(sim.ask(ask).unwrap(), Answer::Pod(_)));
    settled(&mut sim);
    let set = sim.state.assignments.exclusive();
    assert_eq!(effective(&sim, &p("system.slice")), cpus("0-7").difference(&set));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 1)), set);
    let files = |sim: &Sim| sim.eyes.text(&p("system.slice"), CpusetFile::Cpus);
    assert_ne!(files(&sim), "");
    remove(&mut sim, "a");
    settled(&mut sim);
    assert_eq!(effective(&sim, &p("system.slice")), cpus("0-7"));
}
