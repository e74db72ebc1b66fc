//! Histories on small machines, from the kubelet's rules.

use super::*;
use crate::{
    CpuId, CpuSet, NodeId,
    kubelet::StartError,
    placement::kubelet::{KubeletCounts, Label, Labels, StaticOptions},
    request::AlignmentPolicy,
};

/// Nodes of cores of two threads each, numbered as Linux does: all first threads, then all second ones; `per_socket`
/// nodes to a socket.
fn machine(nodes: u32, cores: u32, per_socket: u32) -> KubeletMachine {
    let all = nodes * cores;
    let label = |cpu: u32| {
        let core = cpu % all;
        let node = core / cores;
        Label {
            cpu: CpuId(cpu),
            core: core.into(),
            socket: (node / per_socket).into(),
            node: NodeId(node),
            uncore: node.into(),
        }
    };
    let labels = Labels::new((0..2 * all).map(label).collect());
    let counts: KubeletCounts = labels.counts();
    KubeletMachine::labelled(&labels, counts)
}

fn far() -> Distances {
    Distances::new([])
}

fn options(names: &[&str]) -> StaticOptions {
    StaticOptions::parse(names.iter().copied()).unwrap()
}

fn config() -> Config {
    Config::new(Reservation::Cpus(cpus("0")))
}

fn under(policy: AlignmentPolicy, scope: Scope) -> Config {
    Config { policy, scope, ..config() }
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// `i:` an init container, `s:` a sidecar, else an app; then its CPUs, where `-` is none and `~N` a request below its limit.
/// `/N` is the pod's own number of CPUs.
fn pod(uid: &str, words: &str) -> Pod {
    let mut pod = Pod { uid: uid.into(), init: Vec::new(), app: Vec::new(), pod_cpu: None };
    for word in words.split_whitespace() {
        if let Some(n) = word.strip_prefix('/') {
            pod.pod_cpu = Some(n.parse::<u64>().unwrap() * 1000);
            continue;
        }
        let (init, rest) = word.split_at(if word.contains(':') { 2 } else { 0 });
        let list = if init.is_empty() { &mut pod.app } else { &mut pod.init };
        let name = format!("{}{}", if init.is_empty() { 'c' } else { 'i' }, list.len());
        let (request, limit) = match rest.strip_prefix('~') {
            Some(n) => (n.parse().ok(), n.parse::<u64>().ok().map(|n| n * 1000 + 500)),
            None => (rest.parse::<u64>().ok(), rest.parse::<u64>().ok().map(|n| n * 1000)),
        };
        let memory = request.map(|_| 64);
        list.push(crate::pod::Container {
            name,
            cpu_request: request.map(|n: u64| n * 1000),
            cpu_limit: limit,
            memory_request: memory,
            memory_limit: memory,
            sidecar: init == "s:",
        });
    }
    pod
}

fn boot<'m>(machine: &'m KubeletMachine, distances: &'m Distances, config: Config) -> KubeletNode<'m> {
    KubeletNode::boot(machine, distances, config, None).unwrap()
}

/// `uid/name=list` of every entry, then `uid=list` of every pod's set.
fn held(node: &KubeletNode<'_>) -> String {
    let sets = node.sets();
    let entries = sets.entries.iter();
    let entries = entries.flat_map(|(pod, all)| all.iter().map(move |(name, c)| format!("{pod}/{name}={c}")));
    let pods = sets.pods.iter().map(|(pod, c)| format!("{pod}={c}"));
    entries.chain(pods).collect::<Vec<_>>().join(" ")
}

fn reason(admission: &Admission) -> &'static str {
    admission.outcome.as_ref().err().map_or("admitted", Rejection::reason)
}

fn let_in(node: &mut KubeletNode<'_>, uid: &str, words: &str) {
    let admission = node.admit(pod(uid, words));
    assert_eq!(admission.outcome, Ok(()), "{uid}: {words}");
}

fn ids(from: usize) -> impl FnMut() -> String {
    let mut n = from;
    move || {
        n += 1;
        format!("k{n}")
    }
}

fn names(list: &[Named]) -> Vec<String> {
    list.iter().map(|n| format!("{}/{}/{}", n.pod, n.container, n.id)).collect()
}

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

fn noted(admission: &Admission) -> String {
    let one = |(name, hint): &(String, TopologyHint)| {
        let nodes = hint.affinity.as_ref().map_or("any".into(), ToString::to_string);
        format!("{name}={nodes}{}", if hint.preferred { '+' } else { '-' })
    };
    admission.hints.iter().map(one).collect::<Vec<_>>().join(" ")
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
fn a_pod_with_cpus_of_its_own_without_the_gate() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for scope in [Scope::Container, Scope::Pod] {
        let mut node = boot(&machine, &distances, under(AlignmentPolicy::SingleNumaNode, scope));
        let admission = node.admit(pod("a", "/12 4 i:2 -"));
        assert_eq!((reason(&admission), noted(&admission).as_str()), ("admitted", "i0=any+ c0=any+ c1=any+"));
        assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")));
    }
}

fn gate(policy: AlignmentPolicy, scope: Scope) -> Config {
    Config { pod_level: true, ..under(policy, scope) }
}

#[test]
fn a_pods_own_set_is_divided_among_its_containers() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, gate(AlignmentPolicy::Restricted, Scope::Pod));
    let admission = node.admit(pod("a", "/8 i:- i:6 s:2 i:~1 2 ~1 -"));
    assert_eq!(reason(&admission), "admitted");
    assert_eq!(noted(&admission), "i0=1+ i1=1+ i2=1+ i3=1+ c0=1+ c1=1+ c2=1+");
    // Init containers have all that sidecars before them leave; who shares has what those that last leave.
    assert_eq!(
        held(&node),
        "a/c0=5,13 a/c1=6-7,14-15 a/c2=6-7,14-15 a/i0=4-7,12-15 a/i1=4-6,12-14 a/i2=4,12 a/i3=5-7,13-15 \
         a=4-7,12-15"
    );
    assert!(node.checkpoint().contains(r#""podEntries":{"a":{"cpuSet":"4-7,12-15"}}"#));
    node.remove("a").unwrap();
    node.reconcile();
    assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")));
}

#[test]
fn a_pods_own_set_that_leaves_nothing_to_share_is_refused() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for (policy, words, expected) in [
        (AlignmentPolicy::BestEffort, "/4 4 -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 s:4 i:- -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 s:2 i:3 -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 2 2", "admitted"),
        (AlignmentPolicy::BestEffort, "/4 3 -", "admitted"),
        (AlignmentPolicy::Restricted, "/4 4 -", "TopologyAffinityError"),
        (AlignmentPolicy::SingleNumaNode, "/4 4 s:-", "TopologyAffinityError"),
    ] {
        let mut node = boot(&machine, &distances, gate(policy, Scope::Pod));
        let admission = node.admit(pod("a", words));
        assert_eq!(reason(&admission), expected, "{policy:?} {words}");
        if expected != "admitted" {
            assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")), "{words}");
        }
    }
}

#[test]
fn containers_that_want_more_than_their_pod_leave_its_set_behind() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let best = gate(AlignmentPolicy::BestEffort, Scope::Pod);
    let mut node = boot(&machine, &distances, best.clone());
    let admission = node.admit(pod("a", "/4 3 3"));
    assert_eq!(admission.outcome, Err(Rejection::Take(TakeError::NotEnough { requested: 3, available: 1 })));
    // No container, so no pass ever finds it.
    node.reconcile();
    assert_eq!(held(&node), "a=1-2,9-10");
    node.restart(best).unwrap();
    node.reconcile();
    assert_eq!((held(&node).as_str(), node.sets().default.len()), ("a=1-2,9-10", 12));
}

#[test]
fn a_readmitted_pod_gets_another_set_and_nobody_the_first() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let best = gate(AlignmentPolicy::BestEffort, Scope::Pod);
    let mut node = boot(&machine, &distances, best.clone());
    let_in(&mut node, "a", "/4 2 -");
    assert_eq!(held(&node), "a/c0=1,9 a/c1=2,10 a=1-2,9-10");
    node.restart(best.clone()).unwrap();
    assert_eq!(noted(&node.readmit("a").unwrap()), "c0=0-1- c1=0-1-", "what shares has not what it asks for");
    assert_eq!(held(&node), "a/c0=3,11 a/c1=4,12 a=3-4,11-12");
    node.remove("a").unwrap();
    node.reconcile();
    assert_eq!(node.sets().default, cpus("0,3-8,11-15"));
    let lost = node.restart(best);
    assert!(matches!(lost, Err(BootError::Start(StartError::Machine { .. }))), "{lost:?}");
}

#[test]
fn by_container_a_pods_own_resources_only_say_who_gets_cpus() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for policy in [AlignmentPolicy::None, AlignmentPolicy::Restricted] {
        let mut node = boot(&machine, &distances, gate(policy, Scope::Container));
        let_in(&mut node, "a", "/8 i:4 2 ~2 -");
        assert_eq!(held(&node), "a/c0=1,9 a/i0=1-2,9-10", "{policy:?}");
        assert!(node.sets().pods.is_empty());
    }
    // Under `none` there is no scope.
    let mut node = boot(&machine, &distances, gate(AlignmentPolicy::None, Scope::Pod));
    let_in(&mut node, "a", "/8 4 -");
    assert_eq!(held(&node), "a/c0=1-2,9-10");
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

/// A small generator of numbers (splitmix64), so that histories are random and the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}

/// Cores of one to three threads on two nodes, where averages come to CPUs that are not free.
fn uneven(random: &mut Numbers) -> KubeletMachine {
    let mut labels = Vec::new();
    for core in 0..8_u32 {
        for _ in 0..=random.below(3) {
            let cpu = u32::try_from(labels.len()).unwrap();
            let node = core / 4;
            labels.push(Label {
                cpu: CpuId(cpu),
                core: core.into(),
                socket: node.into(),
                node: NodeId(node),
                uncore: node.into(),
            });
        }
    }
    let labels = Labels::new(labels);
    KubeletMachine::labelled(&labels, labels.counts())
}

/// Whatever happens: nobody's CPU is another pod's or in the pool, on even machines reserved CPUs are nobody's and a pod's
/// parts are in its set, and a kubelet that starts from the file knows the same.
#[test]
fn random_histories_keep_the_books() {
    let distances = far();
    let (mut let_in, mut refused, mut restarts) = (0, 0, 0);
    for seed in 0..600 {
        let mut random = Numbers(seed);
        let even = seed % 2 == 0;
        let machine = if even {
            machine(random.pick(&[1, 2, 3, 4]), random.pick(&[2, 3, 5]), random.pick(&[1, 2]))
        } else {
            uneven(&mut random)
        };
        let config = random_config(&mut random);
        let Ok(mut node) = KubeletNode::boot(&machine, &distances, config.clone(), None) else {
            // By averages another number of CPUs would be reserved.
            assert!(!even, "seed {seed}");
            continue;
        };
        for step in 0..40 {
            match random.below(10) {
                0..=5 => match node.admit(random_pod(&mut random, step)).outcome {
                    Ok(()) => let_in += 1,
                    Err(_) => refused += 1,
                },
                6 | 7 if !node.active().is_empty() => {
                    let at = random.below(node.active().len() as u64);
                    let uid = node.active()[usize::try_from(at).unwrap()].uid.clone();
                    node.run(&uid, ids(step)).unwrap();
                    if random.below(3) > 0 {
                        node.remove(&uid).unwrap();
                    }
                }
                8 => {
                    node.reconcile();
                }
                _ => {
                    // A pod that lost its set, or a pool that is empty, keeps the kubelet down.
                    let file = node.checkpoint();
                    let before = node.sets().clone();
                    if node.restart(config.clone()).is_err() {
                        break;
                    }
                    restarts += 1;
                    assert_eq!((node.sets(), node.checkpoint()), (&before, file));
                    let uids: Vec<String> = node.active().iter().map(|p| p.uid.clone()).collect();
                    for uid in uids {
                        node.readmit(&uid).unwrap();
                    }
                }
            }
            books(&node, &machine, even, seed);
        }
    }
    assert!(let_in > 4000 && refused > 1500 && restarts > 500, "{let_in} {refused} {restarts}");
}

fn random_config(random: &mut Numbers) -> Config {
    let policies = [
        AlignmentPolicy::None,
        AlignmentPolicy::BestEffort,
        AlignmentPolicy::Restricted,
        AlignmentPolicy::SingleNumaNode,
    ];
    let sets: [&[&str]; 6] = [
        &[],
        &["full-pcpus-only"],
        &["distribute-cpus-across-numa", "full-pcpus-only"],
        &["distribute-cpus-across-cores", "strict-cpu-reservation"],
        &["prefer-align-cpus-by-uncorecache"],
        &["distribute-cpus-across-numa"],
    ];
    Config {
        options: options(random.pick(&sets)),
        reserved: Reservation::Count(random.pick(&[1, 2])),
        policy: random.pick(&policies),
        scope: random.pick(&[Scope::Container, Scope::Pod]),
        prefer_closest: random.below(2) == 0,
        pod_level: random.below(3) == 0,
        ..config()
    }
}

fn random_pod(random: &mut Numbers, at: usize) -> Pod {
    let mut words = String::new();
    for _ in 0..=random.below(3) {
        words += random.pick(&["", "", "i:", "s:"]);
        words += random.pick(&["1", "2", "3", "4", "5", "6", "-", "~2"]);
        words += " ";
    }
    words += random.pick(&["2", "4", "1", "-"]);
    if random.below(3) == 0 {
        words += random.pick(&[" /2", " /4", " /5", " /8", " /10"]);
    }
    pod(&format!("p{at}"), &words)
}

fn books(node: &KubeletNode<'_>, machine: &KubeletMachine, even: bool, seed: u64) {
    let sets = node.sets();
    let mut taken = sets.default.clone();
    for (uid, containers) in &sets.entries {
        let mut all = CpuSet::new();
        for cpus in containers.values() {
            all |= cpus;
        }
        assert!(all.is_disjoint(&taken), "seed {seed}: {uid}");
        if even {
            assert!(all.is_disjoint(node.reserved()), "seed {seed}: {uid}");
            assert!(sets.pods.get(uid).is_none_or(|own| all.is_subset(own)), "seed {seed}: {uid}");
        }
        taken |= &all;
    }
    assert!(taken.is_subset(machine.cpus()), "seed {seed}");
}
