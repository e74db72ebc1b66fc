use super::*;
use crate::{
    nodeset::NodeId,
    owner::Owner,
    request::{AlignmentPolicy, Isolation, Request},
    topology::{
        Level, RawGroup, RawNode, RawTopology,
        synthetic::{Numbering, Regular},
    },
};
use AlignmentPolicy::{BestEffort, Restricted, SingleNumaNode};

fn set(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// Two packages, two nodes in each; a node is one L3 over four cores of two threads: node 0 has 0-3 and 16-19.
fn machine() -> CpuTopology {
    regular(Regular { packages: 2, nodes: 2, l3: 1, cores: 4, threads: 2, numbering: Numbering::ThreadsLast })
}

fn regular(shape: Regular) -> CpuTopology {
    CpuTopology::assemble(&shape.raw()).unwrap()
}

fn ask(cpus: u32, numa: AlignmentPolicy) -> Request {
    Request {
        owner: Owner::Run("test".into()),
        cpus,
        numa,
        whole_cores: false,
        near: NodeSet::new(),
        isolation: Isolation::Auto,
        memory: 0,
    }
}

/// Places with everything online allocatable.
fn on(topology: &CpuTopology, free: &str, request: &Request) -> Result<Placement, Box<Refusal>> {
    place(topology, topology.online(), &set(free), request)
}

fn cpus(topology: &CpuTopology, free: &str, request: &Request) -> String {
    on(topology, free, request).unwrap().cpus.to_string()
}

fn refusal(topology: &CpuTopology, free: &str, request: &Request) -> String {
    on(topology, free, request).unwrap_err().to_string()
}

#[test]
fn one_node_whole_cores_best_fit() {
    let m = machine();
    assert_eq!(cpus(&m, "0-31", &ask(8, BestEffort)), "0-3,16-19");
    assert_eq!(cpus(&m, "0-31", &ask(4, BestEffort)), "0-1,16-17");
    // Node 1 has a hole of the right size.
    assert_eq!(cpus(&m, "0-3,16-19,4-5,20-21", &ask(4, BestEffort)), "4-5,20-21");
    // Node 0 has enough threads, but not on whole cores.
    assert_eq!(cpus(&m, "0-3,4-5,20-21", &ask(4, BestEffort)), "4-5,20-21");
    // An odd thread comes from a core that is broken already, though a whole one has a lower number.
    assert_eq!(cpus(&m, "0,16,3", &ask(1, BestEffort)), "3");
    assert_eq!(cpus(&m, "0-1,16-17,3", &ask(3, BestEffort)), "0,3,16");
    // A whole core before two odd threads.
    assert_eq!(cpus(&m, "0-1,2,18", &ask(2, BestEffort)), "2,18");
    let placed = on(&m, "4-7,20-23", &ask(7, BestEffort)).unwrap();
    assert_eq!(
        placed.reason.to_string(),
        "7 CPUs on node 1, LLC of CPU 4, 3 whole cores, CPU 7 on a core shared with others"
    );
}

#[test]
fn fewest_nodes_then_the_nearest_then_the_fewest_caches() {
    let m = machine();
    // 0 and 1, 2 and 3 are 12 apart, else 32.
    assert_eq!(
        on(&m, "2-3,18-19,8-11,24-27,12-15,28-31", &ask(12, BestEffort)).unwrap().nodes.to_string(),
        "2-3"
    );
    assert_eq!(on(&m, "0-31", &ask(17, BestEffort)).unwrap().nodes.len(), 3);
    // One node of three caches, 2 cores each: the cache with the smallest hole that is large enough.
    let ccx = regular(Regular {
        packages: 1,
        nodes: 1,
        l3: 3,
        cores: 2,
        threads: 2,
        numbering: Numbering::ThreadsAdjacent,
    });
    assert_eq!(cpus(&ccx, "0-11", &ask(2, BestEffort)), "0-1");
    assert_eq!(cpus(&ccx, "0-3,6-7,8-11", &ask(2, BestEffort)), "6-7");
    assert_eq!(cpus(&ccx, "0-1,6-7,8-11", &ask(4, BestEffort)), "8-11");
    let two = on(&ccx, "0-11", &ask(6, BestEffort)).unwrap();
    assert_eq!(two.reason.to_string(), "6 CPUs on node 0, LLCs of CPUs 0,4, 3 whole cores");
}

#[test]
fn policies() {
    let m = machine();
    let holes = "1-3,17-19,4-5,20-21,12,28";
    assert_eq!(on(&m, holes, &ask(8, BestEffort)).unwrap().nodes.to_string(), "0-1");
    assert_eq!(
        refusal(&m, holes, &ask(8, SingleNumaNode)),
        "8 CPUs asked for on one node: 2 needed now instead of 1; free are 6 on node 0 (3 whole cores), \
         4 on node 1 (2 whole cores), 0 on node 2, 2 on node 3 (1 whole core); the largest that fits one node is 6; \
         best-effort would fit 8 on nodes 0-1"
    );
    assert!(refusal(&m, holes, &ask(8, Restricted)).contains("2 needed now instead of 1"));
    // Ten never fit one node: two are the fewest.
    assert_eq!(on(&m, holes, &ask(10, Restricted)).unwrap().nodes.to_string(), "0-1");
    assert!(
        refusal(&m, holes, &ask(10, SingleNumaNode))
            .contains("on one node: 2 needed even with nothing taken")
    );
    // What the empty machine can do is counted without reserved CPUs.
    let allocatable = set("1-3,17-19,4-7,20-23,9-11,25-27,13-15,29-31");
    let free = set("1-3,17-19,4-5,20-21");
    assert!(place(&m, &allocatable, &free, &ask(8, Restricted)).is_err());
    assert!(place(&m, &allocatable.difference(&set("4,20")), &free, &ask(8, Restricted)).is_ok());
    assert_eq!(
        refusal(&m, holes, &ask(15, BestEffort)),
        "15 CPUs asked for, 12 free: 6 on node 0 (3 whole cores), 4 on node 1 (2 whole cores), 0 on node 2, \
         2 on node 3 (1 whole core)"
    );
    assert_eq!(refusal(&m, holes, &ask(0, BestEffort)), "no CPU asked for: ask for at least 1");
    let all = place(&m, &set("2-31"), &set("0-31"), &ask(31, BestEffort)).unwrap_err();
    assert!(all.to_string().ends_with("; with nothing taken the machine has 30"), "{all}");
}

#[test]
fn whole_cores_only() {
    let m = machine();
    let whole = |n| Request { whole_cores: true, ..ask(n, BestEffort) };
    assert_eq!(cpus(&m, "0,1-2,17-18,3", &whole(4)), "1-2,17-18");
    assert_eq!(
        refusal(&m, "0-31", &whole(3)),
        "3 CPUs on whole cores asked for: 3 do not fill whole cores, 2 or 4 would"
    );
    assert_eq!(
        refusal(&m, "0-3,5-6,21-22", &whole(6)),
        "6 CPUs on whole cores asked for; free are 4 on node 0 (0 whole cores), 4 on node 1 (2 whole cores), \
         0 on each of nodes 2-3; the largest that fits is 4"
    );
    // 2 CPUs on one node and 4 on another are 6 on whole cores; single-numa-node has 4.
    let single = Request { whole_cores: true, ..ask(6, SingleNumaNode) };
    assert!(refusal(&m, "0,16,5-6,21-22", &single).contains("the largest that fits one node is 4"));
    assert_eq!(cpus(&m, "0,16,5-6,21-22", &whole(6)), "0,5-6,16,21-22");
}

#[test]
fn near() {
    let m = machine();
    let near = |n, numa, nodes: &str| Request { near: nodes.parse().unwrap(), ..ask(n, numa) };
    assert_eq!(cpus(&m, "0-31", &near(4, BestEffort, "2")), "8-9,24-25");
    // Soft: the node next to it when it is full; said so.
    let far = on(&m, "0-7,16-23,12-15,28-31", &near(4, BestEffort, "2")).unwrap();
    assert_eq!(
        far.reason.to_string(),
        "4 CPUs on node 3, LLC of CPU 12, 2 whole cores, node 3 not near as asked"
    );
    // Hard: refused.
    let full = refusal(&m, "0-7,16-23,12-15,28-31", &near(4, SingleNumaNode, "2"));
    assert!(
        full.starts_with(
            "4 CPUs asked for near node 2 (single-numa-node); free are 8 on each of nodes 0-1,3"
        )
    );
    assert!(full.ends_with("; best-effort would fit 4 on node 3"), "{full}");
    assert_eq!(on(&m, "0-31", &near(12, Restricted, "2-3")).unwrap().nodes.to_string(), "2-3");
    // One node does it on the empty machine, and one must now.
    assert!(on(&m, "8-9,24-25,12-13,28-29", &near(8, Restricted, "2-3")).is_err());
    assert_eq!(
        refusal(&m, "0-31", &near(1, BestEffort, "3-4")),
        "1 CPU asked for near node 4, which this machine does not have"
    );
}

/// A machine from sets: `(level, list)`, and nodes.
fn odd(online: &str, groups: &[(Level, &str)], nodes: &[(u32, &str, Option<Vec<u32>>)]) -> CpuTopology {
    let raw = RawTopology {
        online: Some(set(online)),
        groups: groups
            .iter()
            .map(|(level, cpus)| RawGroup { level: *level, id: None, told_by: None, cpus: set(cpus) })
            .collect(),
        nodes: nodes
            .iter()
            .map(|(id, cpus, distance)| RawNode {
                id: NodeId(*id),
                cpus: set(cpus),
                memory_bytes: None,
                distance: distance.clone(),
            })
            .collect(),
        ..RawTopology::default()
    };
    CpuTopology::assemble(&raw).unwrap()
}

#[test]
fn memory_on_the_nodes_of_the_cpus() {
    let m = machine(); // nodes of 8 GiB
    let with = |cpus, numa, gib: u64| Request { memory: gib << 30, ..ask(cpus, numa) };
    let claimed = |sets: &[(u32, u64)]| sets.iter().map(|(n, gib)| (NodeId(*n), gib << 30)).collect();
    let beside = |claimed: &std::collections::BTreeMap<NodeId, u64>, request: &Request| {
        place_beside(&m, m.online(), m.online(), claimed, request)
    };
    let gib = |p: &Placement| p.memory.iter().map(|(n, b)| (n.0, b >> 30)).collect::<Vec<_>>();
    let none = claimed(&[]);
    let placed = beside(&none, &with(2, BestEffort, 8)).unwrap();
    assert_eq!((placed.nodes.to_string(), gib(&placed)), ("0".into(), vec![(0, 8)]));
    assert_eq!(beside(&none, &ask(2, BestEffort)).unwrap().memory, none, "none asked for");
    // Node 0 has its memory taken, though its CPUs are free.
    let placed = beside(&claimed(&[(0, 5)]), &with(2, SingleNumaNode, 4)).unwrap();
    assert_eq!((placed.nodes.to_string(), gib(&placed)), ("1".into(), vec![(1, 4)]));
    // More than one node has.
    let placed = beside(&none, &with(2, BestEffort, 9)).unwrap();
    assert_eq!(placed.memory.values().sum::<u64>(), 9 << 30);
    assert_eq!(gib(&placed).len(), 2, "{:?}", placed.memory);
    let refused = |claimed: &std::collections::BTreeMap<NodeId, u64>, request: &Request| {
        beside(claimed, request).unwrap_err().to_string()
    };
    let text = refused(&none, &with(2, SingleNumaNode, 9));
    assert!(
        text.starts_with("2 CPUs asked for with 9.0 GiB of memory on the same nodes (single-numa-node)"),
        "{text}"
    );
    // Restricted: as few nodes as an empty machine needs, and that is two.
    assert!(beside(&none, &with(2, Restricted, 9)).is_ok());
    let text = refused(&claimed(&[(0, 6), (1, 6), (2, 6), (3, 6)]), &with(2, Restricted, 4));
    assert!(text.contains("2.0 GiB on node 0"), "{text}");
    assert!(refused(&none, &with(2, BestEffort, 1000)).contains("8.0 GiB on node 1"));
    // CPUs that are not there are the first reason.
    assert!(refused(&none, &with(1000, BestEffort, 1)).contains("free"));
}

/// However nodes, CPUs and claims lie: what is given is what was asked for, and nobody else's.
#[test]
fn memory_is_split_within_what_is_there() {
    let m = machine();
    let mut cases = 0;
    for cpus in [1, 3, 8, 12, 20] {
        for mib in [1, 1000, 4096, 8192, 12_000, 20_001, 32_768] {
            for claims in 0..81_u64 {
                let claimed: std::collections::BTreeMap<NodeId, u64> =
                    (0..4).map(|n| (NodeId(n), (claims / 3_u64.pow(n) % 3 * 4) << 30)).collect();
                let request = Request { memory: mib << 20, ..ask(cpus, BestEffort) };
                let free: u64 = claimed.values().map(|c| (8 << 30) - c).sum();
                let Ok(placed) = place_beside(&m, m.online(), m.online(), &claimed, &request) else {
                    assert!(free < mib << 20, "{cpus} {mib} {claimed:?}");
                    continue;
                };
                cases += 1;
                assert_eq!(placed.memory.values().sum::<u64>(), mib << 20, "{claimed:?}");
                assert!(placed.nodes.iter().all(|n| placed.memory.contains_key(&n)), "{placed:?}");
                for (node, bytes) in &placed.memory {
                    assert!(bytes + claimed[node] <= 8 << 30, "{node} {bytes} {claimed:?}");
                }
            }
        }
    }
    assert!(cases > 2000, "{cases}");
}

#[test]
fn odd_machines() {
    // No nodes at all: the machine is one group, whatever the policy.
    let phone = odd("0-7", &[(Level::L2, "0-3"), (Level::L2, "4-7")], &[]);
    let placed = on(&phone, "1-7", &ask(4, SingleNumaNode)).unwrap();
    assert_eq!((placed.cpus.to_string(), placed.nodes.len()), ("4-7".into(), 0));
    assert_eq!(placed.reason.to_string(), "4 CPUs, LLC of CPU 4, 4 whole cores");
    assert_eq!(refusal(&phone, "1-3", &ask(4, BestEffort)), "4 CPUs asked for, 3 free");

    // CPUs 4-7 are in no node: a group of their own, on one node for nobody.
    let half = odd("0-7", &[], &[(1, "0-3", None)]);
    assert_eq!(cpus(&half, "2-7", &ask(4, BestEffort)), "4-7");
    assert!(refusal(&half, "2-7", &ask(4, SingleNumaNode)).ends_with("best-effort would fit 4"));
    assert_eq!(cpus(&half, "0-7", &ask(4, SingleNumaNode)), "0-3");
    assert_eq!(on(&half, "0-7", &ask(8, Restricted)).unwrap().nodes.to_string(), "1");

    // Node 7 is memory next to node 1: near it is near node 1.
    let far = vec![10, 40, 40];
    let memory = odd(
        "0-7",
        &[],
        &[(0, "0-3", Some(far)), (1, "4-7", Some(vec![40, 10, 20])), (7, "", Some(vec![40, 20, 10]))],
    );
    let near = Request { near: "7".parse().unwrap(), ..ask(2, SingleNumaNode) };
    assert_eq!(cpus(&memory, "0-7", &near), "4-5");

    // A core of CPUs 3 and 4 that a broken table spreads over two nodes is whole only if both are used.
    let broken = odd(
        "0-7",
        &[(Level::Core, "0-1"), (Level::Core, "3-4"), (Level::Core, "6-7")],
        &[(0, "0-3", None), (1, "4-7", None)],
    );
    let whole = |n, numa| Request { whole_cores: true, ..ask(n, numa) };
    assert_eq!(cpus(&broken, "0,3-4,7", &whole(2, BestEffort)), "3-4");
    assert!(refusal(&broken, "0,3-4,7", &whole(2, SingleNumaNode)).contains("2 needed now instead of 1"));

    // One core has lost a thread of four: 3 and 4 make 7, largest first would not make 6.
    let hotplug = odd("0-9", &[(Level::Core, "0-3"), (Level::Core, "4-6"), (Level::Core, "7-9")], &[]);
    assert_eq!(cpus(&hotplug, "0-9", &whole(6, BestEffort)), "4-9");
    assert_eq!(cpus(&hotplug, "0-9", &whole(7, BestEffort)), "0-6");
    assert!(
        refusal(&hotplug, "0-9", &whole(5, BestEffort)).ends_with("5 do not fill whole cores, 4 or 6 would")
    );
}

#[test]
fn large_machines_do_not_walk_everything() {
    let shape = |packages, nodes, l3, cores| {
        regular(Regular { packages, nodes, l3, cores, threads: 2, numbering: Numbering::ThreadsLast })
    };
    // 64 nodes; 20 of them needed: C(64, 20) is 2e16. Distance keeps them in as few packages as hold them.
    let wide = shape(16, 4, 2, 8);
    assert_eq!(wide.cpus().len(), 2048);
    let placed = place(&wide, wide.online(), wide.online(), &ask(640, BestEffort)).unwrap();
    assert_eq!((placed.nodes.to_string(), placed.cpus.len()), ("0-19".into(), 640));
    // 64 caches in one node with 25 or 26 free CPUs each, 31 of them needed.
    let deep = shape(1, 1, 64, 16);
    let odd_free = deep.online().difference(&(0..2048).step_by(5).map(CpuId).collect());
    let placed = place(&deep, deep.online(), &odd_free, &ask(801, BestEffort)).unwrap();
    assert_eq!((placed.cpus.len(), placed.reason.llcs.len()), (801, 31));
}

#[test]
fn documents() {
    let m = machine();
    let refused = on(&m, "0-2,16", &ask(6, SingleNumaNode)).unwrap_err();
    let doc = serde_json::to_value(&refused).unwrap();
    assert_eq!(doc["kind"], serde_json::json!({"why": "not-enough"}));
    assert_eq!((&doc["asked"], &doc["policy"]), (&6.into(), &"single-numa-node".into()));
    assert_eq!(doc["free"][0], serde_json::json!({"node": 0, "cpus": "0-2,16", "whole_cores": 1}));
    assert_eq!(doc["fits"], serde_json::json!({"one_node": 4, "any_nodes": 4, "best_effort": null}));
    let placed = serde_json::to_value(on(&m, "0-2,16", &ask(3, BestEffort)).unwrap()).unwrap();
    assert_eq!((&placed["cpus"], &placed["reason"]["whole_cores"]), (&"0-1,16".into(), &1.into()));
}
