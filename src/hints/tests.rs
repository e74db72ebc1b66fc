use super::*;
use crate::{
    CpuSet, CpuTopology, NodeId,
    placement::kubelet::KubeletMachine,
    pod::{Container, Pod},
    request::AlignmentPolicy,
    topology::{
        RawNode, RawTopology,
        synthetic::{Numbering, Regular},
    },
};

fn set(text: &str) -> NodeSet {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn regular(packages: u32, nodes: u32, cores: u32) -> RawTopology {
    Regular { packages, nodes, l3: 1, cores, threads: 1, numbering: Numbering::ThreadsAdjacent }.raw()
}

fn kubelet(raw: &RawTopology) -> (CpuTopology, KubeletMachine) {
    let topology = CpuTopology::assemble(raw).unwrap();
    let machine = KubeletMachine::new(&topology);
    (topology, machine)
}

fn lines(hints: &[TopologyHint]) -> Vec<String> {
    let line =
        |h: &TopologyHint| format!("{}{}", h.affinity.as_ref().unwrap(), if h.preferred { "!" } else { "" });
    hints.iter().map(line).collect()
}

/// Two nodes in each of two sockets, two CPUs in each node: three CPUs are a node and a half, not half a socket.
#[test]
fn hints_are_by_node_and_not_by_socket() {
    let (topology, machine) = kubelet(&regular(2, 2, 2));
    let hints = cpu_hints(&machine, false, topology.online(), &CpuSet::new(), 3);
    assert_eq!(lines(&hints[..6]), ["0-1!", "0,2!", "0,3!", "1-2!", "1,3!", "2-3!"]);
    // Two nodes, one socket.
    let hints = cpu_hints(&machine, true, topology.online(), &CpuSet::new(), 1);
    assert_eq!(lines(&hints[..6]), ["0!", "1!", "2!", "3!", "0-1!", "0,2"]);
}

/// Two sockets in one node (cluster-on-die off, or a fake node): by socket the request would be split, by node it is not.
#[test]
fn several_sockets_in_a_node() {
    let mut raw = regular(4, 0, 2);
    let node = |id, cpus: CpuSet| RawNode { id: NodeId(id), cpus, memory_bytes: None, distance: None };
    raw.nodes = vec![node(0, cpus("0-3")), node(1, cpus("4-7"))];
    let (topology, machine) = kubelet(&raw);
    let hints = cpu_hints(&machine, false, topology.online(), &CpuSet::new(), 4);
    assert_eq!(lines(&hints), ["0!", "1!", "0-1"]);
    // More sockets than nodes: less than one node per socket, and the rule never holds.
    assert_eq!(cpu_hints(&machine, true, topology.online(), &CpuSet::new(), 4), hints);
}

#[test]
fn what_is_held_has_to_stay() {
    let (_, machine) = kubelet(&regular(1, 3, 4));
    let hints = cpu_hints(&machine, false, &cpus("0-3,6-11"), &cpus("4-5"), 4);
    assert_eq!(lines(&hints), ["1!", "0-1", "1-2", "0-2"]);
    assert_eq!(lines(&allocated_hints(&machine, false, &cpus("3-6"), 4)), ["0-1", "0-2"]);
    assert_eq!(allocated_hints(&machine, false, &cpus("3-6"), 3), []);
    assert_eq!(cpu_hints(&machine, false, &cpus("0-2"), &CpuSet::new(), 4), []);
}

/// 34 nodes, of which 32 have memory alone (GPU memory on ARM): 2^34 sets for memory, none of which is looked at.
#[test]
fn nodes_without_cpus() {
    let mut raw = regular(2, 1, 8);
    for id in 2..34 {
        let memory_bytes = Some(1 << 30);
        raw.nodes.push(RawNode { id: NodeId(id), cpus: CpuSet::new(), memory_bytes, distance: None });
    }
    let (topology, machine) = kubelet(&raw);
    let memory: Vec<NodeMemory> = topology
        .nodes()
        .iter()
        .map(|n| {
            let total = n.memory_bytes.unwrap();
            NodeMemory { node: n.id, free: total, total }
        })
        .collect();
    let all = topology.nodes().iter().map(|n| n.id).collect();
    let ask = |cpus: usize, bytes: u64, policy| {
        let cpus = Demand::cpus(&machine, false, topology.online(), &CpuSet::new(), cpus);
        let memory = Demand::memory(&[(bytes, &memory)]).unwrap();
        let winner = winner(policy, &all, &[&cpus, &memory], Some(&Distances::of(&topology)));
        assert!(winner.exact);
        (winner.merged.affinity.map(|a| a.to_string()), winner.merged.preferred, winner.merged.admit)
    };
    use AlignmentPolicy::{BestEffort, Restricted, SingleNumaNode};
    assert_eq!(ask(4, 4 << 30, Restricted), (Some("0".into()), true, true));
    assert_eq!(ask(4, 4 << 30, SingleNumaNode), (Some("0".into()), true, true));
    assert_eq!(ask(12, 12 << 30, Restricted), (Some("0-1".into()), true, true));
    // More memory than the two have: memory takes three nodes, CPUs are on two of them.
    assert_eq!(ask(12, 17 << 30, BestEffort), (Some("0-1".into()), false, true));
    assert_eq!(ask(12, 17 << 30, Restricted), (Some("0-1".into()), false, false));
    assert_eq!(ask(12, 12 << 30, SingleNumaNode), (None, false, false));
}

/// Numbers far apart, beyond the 64 that the kubelet's masks have; distances by place, not by number.
#[test]
fn sparse_numbers_and_their_distances() {
    let hint = |nodes, preferred| TopologyHint { affinity: Some(set(nodes)), preferred };
    let lists = [Opinion::Hints(vec![hint("0,300", true), hint("0,900", true), hint("300,900", true)])];
    let all = set("0,300,900");
    let distances = Distances::new([
        (NodeId(900), vec![40, 11, 10]),
        (NodeId(0), vec![10, 30, 20]),
        (NodeId(300), vec![30, 10, 11]),
    ]);
    let best =
        |closest| merge(AlignmentPolicy::Restricted, &all, &lists, closest).affinity.unwrap().to_string();
    assert_eq!(best(None), "0,300");
    assert_eq!(best(Some(&distances)), "300,900");
    assert_eq!(distances.get(NodeId(900), NodeId(0)), 40);
    assert_eq!((distances.get(NodeId(7), NodeId(7)), distances.get(NodeId(7), NodeId(0))), (10, 20));
}

#[test]
fn the_edges_of_a_merge() {
    use AlignmentPolicy::{BestEffort, None, Restricted, SingleNumaNode};
    let all = set("0-1");
    let say = |policy, opinions: &[Opinion]| {
        let m = merge(policy, &all, opinions, Option::None);
        (m.affinity.map(|a| a.to_string()), m.preferred, m.admit)
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(say(None, &[Opinion::Impossible]), (Option::None, false, true));
    assert_eq!(say(Restricted, &[]), (some("0-1"), true, true));
    assert_eq!(say(SingleNumaNode, &[Opinion::Any]), (Option::None, true, true));
    assert_eq!(say(BestEffort, &[Opinion::Impossible, Opinion::Any]), (some("0-1"), false, true));
    assert_eq!(say(SingleNumaNode, &[Opinion::Impossible]), (Option::None, false, false));
    // An empty list is no list.
    assert_eq!(say(Restricted, &[Opinion::Hints(vec![])]), say(Restricted, &[Opinion::Impossible]));
    let hint = |nodes, preferred| TopologyHint { affinity: Some(set(nodes)), preferred };
    let apart = [Opinion::Hints(vec![hint("0", true)]), Opinion::Hints(vec![hint("1", true)])];
    assert_eq!(say(BestEffort, &apart), (some("0-1"), false, true));
    let nothing = winner(Restricted, &all, &[&Demand::impossible()], Option::None);
    assert_eq!((nothing.merged.affinity, nothing.merged.admit, nothing.exact), (Some(all), false, true));
}

/// Lists over more nodes than a table of outcomes has are combined pair by pair, with the same answer.
#[test]
fn a_table_and_pairs_agree() {
    let sets = |n: u32, shift: u32| -> Vec<TopologyHint> {
        let pairs = (0..n).flat_map(|a| (0..a).map(move |b| (a, b)));
        let pairs = pairs.filter(|(a, b)| (a * 7 + b * 3 + shift) % 4 > 0);
        let everything = (0..n).map(NodeId).collect();
        let hints = pairs.map(|(a, b)| [NodeId(a), NodeId(b)].into_iter().collect()).chain([everything]);
        hints.map(|nodes| TopologyHint { affinity: Some(nodes), preferred: false }).collect()
    };
    // 12 nodes are combined in a table; the same with 12 more that no list names is not.
    for shift in 0..4 {
        let lists = [sets(12, 0), sets(12, shift), sets(12, 2)].map(Opinion::Hints);
        let small = merge(AlignmentPolicy::BestEffort, &set("0-11"), &lists, None);
        let wide = [sets(24, 0), sets(24, shift), sets(24, 2)].map(Opinion::Hints);
        let large = merge(AlignmentPolicy::BestEffort, &set("0-23"), &wide, None);
        assert_eq!(small, large);
    }
}

fn container(name: &str, cpus: u64, sidecar: bool) -> Container {
    let (cpu, memory) = (Some(cpus * 1000).filter(|c| *c > 0), Some(64).filter(|_| cpus > 0));
    Container {
        name: name.into(),
        cpu_request: cpu,
        cpu_limit: cpu,
        memory_request: memory,
        memory_limit: memory,
        sidecar,
    }
}

#[test]
fn what_a_pod_asks_for() {
    let pod = |init: &[(u64, bool)], app: &[u64], pod_cpu| Pod {
        uid: "u".into(),
        init: init.iter().zip(0..).map(|((c, s), at)| container(&format!("i{at}"), *c, *s)).collect(),
        app: app.iter().zip(0..).map(|(c, at)| container(&format!("a{at}"), *c, false)).collect(),
        pod_cpu,
    };
    for (init, app, cpus) in [
        (&[][..], &[2, 3][..], 5),
        (&[(7, false)], &[2, 3], 7),
        (&[(4, false)], &[2, 3], 5),
        // The sidecar before an init container runs beside it, the one after it does not.
        (&[(1, true), (4, false), (2, true)], &[1], 5),
        (&[(4, false), (1, true)], &[2], 4),
        (&[(1, true), (2, true)], &[3], 6),
    ] {
        assert_eq!(pods::pod_cpus(&pod(init, app, None), true), cpus, "{init:?} {app:?}");
    }
    // A container without limits makes the pod burstable.
    assert_eq!(pods::pod_cpus(&pod(&[], &[2, 0], None), true), 0);
    // Resources of the pod's own: those, with the gate; containers without theirs share what is left.
    let whole = pod(&[(1, true)], &[2, 0], Some(4000));
    assert_eq!((pods::pod_cpus(&whole, true), pods::pod_cpus(&whole, false)), (4, 0));
    let each = |gate| whole.app.iter().map(|c| pods::container_cpus(&whole, c, gate)).collect::<Vec<_>>();
    assert_eq!((each(true), each(false)), (vec![2, 0], vec![0, 0]));
    assert_eq!(pods::check_division(&whole, true), Ok(()));
    assert_eq!(pods::pod_cpus(&pod(&[], &[2], Some(3500)), true), 0);
    let nothing = Err(pods::DivisionError::NothingShared);
    assert_eq!(pods::check_division(&pod(&[], &[2, 2, 0], Some(4000)), true), nothing);
    assert_eq!(pods::check_division(&pod(&[(4, true), (0, false)], &[], Some(4000)), true), nothing);
    let init = pods::DivisionError::Init { name: "i1".into(), cpus: 3, left: 2 };
    assert_eq!(pods::check_division(&pod(&[(2, true), (3, false)], &[1], Some(4000)), true), Err(init));
    assert_eq!(pods::check_division(&pod(&[], &[2, 2], Some(4000)), true), Ok(()));
}
