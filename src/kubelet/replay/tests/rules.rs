//! Histories of containers, from the kubelet's rules.

use super::*;

#[test]
fn cpus_of_init_containers_are_used_again_and_stay_held() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let_in(&mut node, "a", "i:4 i:6 2 1");
    // The second init container takes the first one's and two more, the first app takes its part of those; the second one
    // finds a thread beside the reserved one, and the rest of what was used before stays held by nobody that runs.
    assert_eq!(held(&node), "a/c0=1,9 a/c1=8 a/i0=1-2,9-10 a/i1=1-3,9-11");
    assert_eq!(node.sets().default, cpus("0,4-7,12-15"));
    node.run("a", ids(0)).unwrap();
    node.reconcile();
    assert_eq!(node.sets().default, cpus("0,4-7,12-15"), "ended, and still held");
    node.remove("a").unwrap();
    assert_eq!(node.sets().default, cpus("0,4-7,12-15"), "not before the next pass");
    node.reconcile();
    assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")));
}

#[test]
fn cpus_of_sidecars_are_not_used_again() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let_in(&mut node, "a", "i:2 s:2 i:4 2");
    // The sidecar takes over what the first init container had; the second one draws from nothing.
    assert_eq!(held(&node), "a/c0=2,10 a/i0=1,9 a/i1=1,9 a/i2=2-3,10-11");
}

#[test]
fn who_does_not_ask_for_whole_cpus_shares() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for (words, taken) in [("~2", 0), ("2 -", 0), ("2 ~2", 0), ("- -", 0), ("2 3", 5), ("i:~1 2", 0)] {
        let mut node = boot(&machine, &distances, config());
        let_in(&mut node, "a", words);
        assert_eq!(16 - node.sets().default.len(), taken, "{words}");
    }
    let mut fraction = pod("a", "2 2");
    (fraction.app[1].cpu_request, fraction.app[1].cpu_limit) = (Some(1500), Some(1500));
    let mut node = boot(&machine, &distances, config());
    assert_eq!(node.admit(fraction).outcome, Ok(()));
    assert_eq!(held(&node), "a/c0=1,9");
}

#[test]
fn a_refused_pod_keeps_what_it_had_taken_until_the_next_pass() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let admission = node.admit(pod("a", "4 4 8"));
    assert_eq!(reason(&admission), "UnexpectedAdmissionError");
    assert_eq!(admission.outcome, Err(Rejection::Take(TakeError::NotEnough { requested: 8, available: 7 })));
    assert_eq!(held(&node), "a/c0=1-2,9-10 a/c1=3-4,11-12");
    let_in(&mut node, "b", "-");
    assert_eq!(held(&node), "");
    assert_eq!(node.active().len(), 1);
}

#[test]
fn every_topology_policy_decides_by_container() {
    use AlignmentPolicy::{BestEffort, None as Nothing, Restricted, SingleNumaNode};
    let (machine, distances) = (machine(2, 4, 1), far());
    for (policy, words, expected, hints) in [
        (Nothing, "12", "admitted", ""),
        (BestEffort, "12", "admitted", "c0=0-1+"),
        (BestEffort, "8", "admitted", "c0=1+"),
        (BestEffort, "8 6", "admitted", "c0=1+ c1=0+"),
        (BestEffort, "5 6 4", "admitted", "c0=0+ c1=1+ c2=0-1-"),
        (Restricted, "8 6", "admitted", "c0=1+ c1=0+"),
        (Restricted, "5 6 4", "TopologyAffinityError", "c0=0+ c1=1+"),
        (Restricted, "12", "admitted", "c0=0-1+"),
        (SingleNumaNode, "8 6", "admitted", "c0=1+ c1=0+"),
        (SingleNumaNode, "12", "TopologyAffinityError", ""),
        (SingleNumaNode, "-", "admitted", "c0=any+"),
        (Restricted, "-", "admitted", "c0=0-1+"),
    ] {
        let mut node = boot(&machine, &distances, under(policy, Scope::Container));
        let admission = node.admit(pod("a", words));
        assert_eq!(reason(&admission), expected, "{policy:?} {words}");
        assert_eq!(noted(&admission), hints, "{policy:?} {words}");
    }
}

#[test]
fn a_pod_as_a_whole_is_aligned_once() {
    use AlignmentPolicy::{BestEffort, Restricted, SingleNumaNode};
    let (machine, distances) = (machine(2, 4, 1), far());
    for (policy, words, expected, hints) in [
        (SingleNumaNode, "4 4", "admitted", "c0=1+ c1=1+"),
        (SingleNumaNode, "i:8 3", "admitted", "i0=1+ c0=1+"),
        // Beside an init container only the sidecars before it run.
        (SingleNumaNode, "s:2 i:6 2", "admitted", "i0=1+ i1=1+ c0=1+"),
        (SingleNumaNode, "s:4 i:5 2", "TopologyAffinityError", ""),
        (SingleNumaNode, "i:5 s:4 2", "admitted", "i0=0+ i1=0+ c0=0+"),
        (Restricted, "5 6", "admitted", "c0=0-1+ c1=0-1+"),
        (BestEffort, "8 8", "UnexpectedAdmissionError", "c0=0-1- c1=0-1-"),
    ] {
        let mut node = boot(&machine, &distances, under(policy, Scope::Pod));
        let admission = node.admit(pod("a", words));
        assert_eq!(reason(&admission), expected, "{policy:?} {words}");
        assert_eq!(noted(&admission), hints, "{policy:?} {words}");
    }
}

#[test]
fn whole_cores_are_asked_for_before_what_is_held() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let whole = Config { options: options(&["full-pcpus-only"]), ..config() };
    let mut node = boot(&machine, &distances, whole.clone());
    let odd = node.admit(pod("odd", "3"));
    assert_eq!(odd.outcome, Err(Rejection::Take(TakeError::SmtAlignment { requested: 3, cpus_per_core: 2 })));
    // 16 CPUs without the reserved one and its sibling.
    let_in(&mut node, "a", "8");
    let many = node.admit(pod("many", "8"));
    let few = TakeError::NotEnoughPhysical { requested: 8, available: 6, cpus_per_core: 2 };
    assert_eq!((reason(&many), many.outcome), ("SMTAlignmentError", Err(Rejection::Take(few))));

    // It runs, and is refused after a restart: what it has is not free.
    node.restart(whole).unwrap();
    assert_eq!(reason(&node.readmit("a").unwrap()), "SMTAlignmentError");
    assert_eq!(held(&node).len(), "a/c0=4-7,12-15".len());
    assert!(node.readmit("a").is_err(), "no longer active");
    node.reconcile();
    assert_eq!(held(&node), "");
}

#[test]
fn an_option_that_a_restart_turns_on_refuses_whoever_runs_against_it() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let_in(&mut node, "odd", "3");
    let_in(&mut node, "even", "4");
    node.restart(Config { options: options(&["full-pcpus-only"]), ..config() }).unwrap();
    assert_eq!(reason(&node.readmit("odd").unwrap()), "SMTAlignmentError");
    assert_eq!(reason(&node.readmit("even").unwrap()), "admitted");
    assert_eq!(node.sets().entries.len(), 1, "readmission of the next one was a pass");
}

#[test]
fn a_readmitted_container_keeps_its_cpus_and_asks_for_hints_of_them_alone() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let restricted = under(AlignmentPolicy::Restricted, Scope::Container);
    let mut node = boot(&machine, &distances, restricted.clone());
    let_in(&mut node, "a", "4");
    let_in(&mut node, "b", "i:6 8");
    let before = node.sets().clone();
    assert_eq!(held(&node), "a/c0=1-2,9-10 b/c0=4-7,12-15 b/i0=4-6,12-14");
    node.restart(restricted.clone()).unwrap();
    assert_eq!(noted(&node.readmit("a").unwrap()), "c0=0+");
    assert_eq!(noted(&node.readmit("b").unwrap()), "i0=1+ c0=1+");
    assert_eq!(*node.sets(), before);

    // Asking for another number than it has: no set of nodes will do.
    let more = node.admit(pod("a", "6"));
    assert_eq!((reason(&more), noted(&more).as_str()), ("TopologyAffinityError", ""));
    node.restart(under(AlignmentPolicy::BestEffort, Scope::Container)).unwrap();
    let other = node.admit(pod("b", "i:6 2"));
    assert_eq!((reason(&other), noted(&other).as_str()), ("admitted", "i0=1+ c0=0-1-"));
    assert_eq!(held(&node), "b/c0=4-7,12-15 b/i0=4-6,12-14", "has its CPUs, so it keeps all of them");
}

#[test]
fn a_pod_scope_finds_its_pod_again() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let single = under(AlignmentPolicy::SingleNumaNode, Scope::Pod);
    let mut node = boot(&machine, &distances, single.clone());
    let_in(&mut node, "a", "i:6 2 2");
    let before = node.sets().clone();
    node.restart(single).unwrap();
    assert_eq!(noted(&node.readmit("a").unwrap()), "i0=0+ c0=0+ c1=0+");
    assert_eq!(*node.sets(), before);
}

#[test]
fn other_reserved_cpus_keep_a_restart_from_starting() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let_in(&mut node, "a", "4");
    let reserve = |list: &str| Config { reserved: Reservation::Cpus(cpus(list)), ..config() };
    assert_eq!(node.restart(reserve("0,4")), Ok(()), "in the pool");
    let gone = node.restart(reserve("0-1"));
    assert!(matches!(gone, Err(BootError::Start(StartError::ReservedNotInPool { .. }))), "{gone:?}");
    let strict = Config { options: options(&["strict-cpu-reservation"]), ..config() };
    let strict = node.restart(strict);
    assert!(matches!(strict, Err(BootError::Start(StartError::ReservedInPool { .. }))), "{strict:?}");
}

#[test]
fn strictly_reserved_cpus_are_nobodys() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let strict =
        Config { options: options(&["strict-cpu-reservation"]), reserved: Reservation::Count(2), ..config() };
    let mut node = boot(&machine, &distances, strict.clone());
    assert_eq!((node.reserved(), &node.sets().default), (&cpus("0,8"), &cpus("1-7,9-15")));
    let_in(&mut node, "shared", "-");
    node.run("shared", ids(0)).unwrap();
    let_in(&mut node, "a", "14");
    assert!(node.sets().default.is_empty());
    // Nothing to write: a set without CPUs is a failure with the container's id.
    let done = node.reconcile();
    assert_eq!((names(&done.failed), done.updates), (vec!["shared/c0/k1".into(), "a//".into()], vec![]));
    let restart = node.restart(strict);
    assert_eq!(restart, Err(BootError::Start(StartError::PoolEmpty)));
}

#[test]
fn what_is_written_when() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, config());
    let_in(&mut node, "shared", "- -");
    let_in(&mut node, "own", "i:2 s:2 4");
    let_in(&mut node, "waits", "-");
    let created = node.run("shared", ids(0)).unwrap();
    assert_eq!(created[1], Created { name: "c1".into(), id: "k2".into(), cpus: node.sets().default.clone() });
    node.run("own", ids(2)).unwrap();
    let shared = node.sets().default.clone();
    let done = node.reconcile();
    // Containers that share are written once more; those with CPUs of their own were noted at creation. The ordinary
    // init container has ended and is not spoken of.
    assert_eq!(done.updates, [("k1".into(), shared.clone()), ("k2".into(), shared)]);
    assert_eq!(names(&done.ok), ["shared/c0/k1", "shared/c1/k2", "own/i1/k4", "own/c0/k5"]);
    assert_eq!(names(&done.failed), ["waits//"]);
    assert_eq!(node.reconcile().updates, []);

    // The pool has grown: one of another pod is written, in the order of the list.
    node.remove("own").unwrap();
    let done = node.reconcile();
    assert_eq!(done.updates, [("k1".into(), cpus("0-15")), ("k2".into(), cpus("0-15"))]);

    // A new process assumes nothing.
    let_in(&mut node, "late", "2");
    node.run("late", ids(5)).unwrap();
    node.restart(config()).unwrap();
    for uid in ["shared", "waits", "late"] {
        assert_eq!(reason(&node.readmit(uid).unwrap()), "admitted");
    }
    let written: Vec<_> = node.reconcile().updates.into_iter().map(|(id, _)| id).collect();
    assert_eq!(written, ["k1", "k2", "k6"]);
}

#[test]
fn an_affinity_to_a_node_is_one_to_its_sockets() {
    let (machine, distances) = (machine(4, 2, 2), far());
    let socket = Config {
        options: options(&["align-by-socket"]),
        ..under(AlignmentPolicy::Restricted, Scope::Container)
    };
    let mut node = boot(&machine, &distances, socket.clone());
    // Six CPUs are two nodes, which need one socket; any nodes of one socket that have them are preferred.
    let admission = node.admit(pod("a", "6"));
    assert_eq!(noted(&admission), "c0=0-1+");
    assert!(node.sets().of("a", "c0").is_subset(&cpus("0-3,8-11")));
    let second = node.admit(pod("b", "7"));
    assert_eq!(noted(&second), "c0=2-3+");
    assert!(node.sets().of("b", "c0").is_subset(&cpus("4-7,12-15")));
    let single = Config { policy: AlignmentPolicy::SingleNumaNode, ..socket };
    assert_eq!(node.restart(single), Err(BootError::SocketPolicy));
}

#[test]
fn what_the_managers_refuse_before_they_look_at_a_checkpoint() {
    let distances = far();
    let (small, many) = (machine(2, 4, 1), machine(9, 1, 1));
    let refused = |machine: &KubeletMachine, config: Config| {
        KubeletNode::boot(machine, &distances, config, Some(b"not a checkpoint")).err()
    };
    let best = under(AlignmentPolicy::BestEffort, Scope::Container);
    assert_eq!(refused(&many, best.clone()), Some(BootError::Nodes { nodes: 9, max: 8 }));
    assert!(KubeletNode::boot(&many, &distances, Config { max_nodes: 9, ..best }, None).is_ok());
    assert!(KubeletNode::boot(&many, &distances, config(), None).is_ok(), "under none nobody counts");
    for (reserved, error) in [
        (Reservation::Count(0), BootError::NothingReserved),
        (Reservation::Cpus(CpuSet::new()), BootError::NothingReserved),
        (Reservation::Cpus(cpus("3,16")), BootError::ReservedUnknown { cpus: cpus("16") }),
    ] {
        assert_eq!(refused(&small, Config { reserved, ..config() }), Some(error));
    }
    let both =
        StaticOptions { full_pcpus_only: true, distribute_across_cores: true, ..StaticOptions::default() };
    assert!(matches!(refused(&small, Config { options: both, ..config() }), Some(BootError::Options(_))));
    let too_many = Config { reserved: Reservation::Count(17), ..config() };
    assert!(matches!(refused(&small, too_many), Some(BootError::Reserve { count: 17, .. })));
    // Two sockets in one node.
    let labels = (0..4_u32).map(|cpu| {
        let socket = i64::from(cpu / 2);
        Label { cpu: CpuId(cpu), core: cpu.into(), socket, node: NodeId(0), uncore: socket }
    });
    let labels = Labels::new(labels.collect());
    let wide = KubeletMachine::labelled(&labels, labels.counts());
    let socket = Config { options: options(&["align-by-socket"]), ..config() };
    assert_eq!(refused(&wide, socket), Some(BootError::SocketMachine { sockets: 2, nodes: 1 }));
    assert!(matches!(refused(&small, config()), Some(BootError::Load(_))));
}

#[test]
fn near_nodes_win_where_they_may() {
    let machine = machine(3, 2, 1);
    // Nodes 0 and 2 are neighbours.
    let rows = [vec![10, 40, 12], vec![40, 10, 40], vec![12, 40, 10]];
    let distances = Distances::new((0_u32..).map(NodeId).zip(rows));
    for (prefer_closest, hint) in [(false, "c0=0-1+"), (true, "c0=0,2+")] {
        let config = Config { prefer_closest, ..under(AlignmentPolicy::BestEffort, Scope::Container) };
        let mut node = boot(&machine, &distances, config);
        assert_eq!(noted(&node.admit(pod("a", "6"))), hint);
    }
}
