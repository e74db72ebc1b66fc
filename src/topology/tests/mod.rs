mod fuzz;
mod sources;

use super::{
    synthetic::{Numbering, Regular},
    *,
};

fn set(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// A statement by the lowest CPU of the set.
fn group(level: Level, id: i64, cpus: &str) -> RawGroup {
    told(level, id, cpus, set(cpus).first().unwrap().0)
}

fn told(level: Level, id: i64, cpus: &str, by: u32) -> RawGroup {
    RawGroup { level, id: Some(id), told_by: Some(CpuId(by)), cpus: set(cpus) }
}

fn node(id: u32, cpus: &str) -> RawNode {
    RawNode { id: NodeId(id), cpus: set(cpus), memory_bytes: None, distance: None }
}

fn raw(online: &str, groups: Vec<RawGroup>, nodes: Vec<RawNode>) -> RawTopology {
    RawTopology { source: "test".into(), online: Some(set(online)), groups, nodes, ..RawTopology::default() }
}

fn assembled(raw: &RawTopology) -> CpuTopology {
    CpuTopology::assemble(raw).unwrap()
}

fn lists(groups: &[Group]) -> Vec<String> {
    groups.iter().map(|g| g.cpus.to_string()).collect()
}

/// Package 0 is split into two nodes; packages 1 and 2 share one.
fn split_and_shared() -> RawTopology {
    raw(
        "0-15",
        vec![
            group(Level::Package, 0, "0-7"),
            group(Level::Package, 1, "8-11"),
            group(Level::Package, 2, "12-15"),
        ],
        vec![node(0, "0-3"), node(1, "4-7"), node(2, "8-15")],
    )
}

#[test]
fn nodes_are_not_sockets() {
    let t = assembled(&split_and_shared());
    let nodes: Vec<u32> = t.cpus().iter().map(|c| c.node.unwrap().0).collect();
    assert_eq!(nodes, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
    // What a reading by socket would have said is something else at both ends.
    let by_socket = |cpu: CpuId| t.packages().iter().position(|p| p.cpus.contains(cpu)).unwrap();
    assert_ne!(t.node_of(CpuId(4)), Some(NodeId(u32::try_from(by_socket(CpuId(4))).unwrap())));
    assert_ne!(by_socket(CpuId(8)), by_socket(CpuId(12)));
    assert_eq!(t.node_of(CpuId(8)), t.node_of(CpuId(12)));

    assert_eq!(t.cpus_of_nodes(&"1-2".parse().unwrap()), set("4-15"));
    assert_eq!(t.nodes_of(&set("3-4")).to_string(), "0-1");
    assert_eq!((t.node_of(CpuId(16)), t.cpus_without_node()), (None, CpuSet::new()));
}

#[test]
fn groups_are_cut_to_online_cpus_and_named_by_the_lowest() {
    let mut raw = raw(
        "1-3,6",
        vec![group(Level::Core, 0, "0-1"), told(Level::Core, 0, "0-1", 1), told(Level::Package, 5, "0-7", 1)],
        vec![node(0, "0-3"), node(4, "4-7")],
    );
    raw.present = Some(set("0-7"));
    let t = assembled(&raw);
    assert_eq!(t.offline().to_string(), "0,4-5,7");
    let package = &t.packages()[0];
    assert_eq!(
        (package.leader, package.cpus.to_string(), package.kernel_id),
        (CpuId(1), "1-3,6".into(), Some(5))
    );
    // CPU 1 alone in its core, and three of which nothing is said.
    assert_eq!(lists(t.cores()), ["1", "2", "3", "6"]);
    assert_eq!(lists(t.groups(Level::Core)), ["1"]);
    assert_eq!(t.group_of(Level::Core, CpuId(2)), None);
    assert_eq!(
        t.oddities(),
        ["nothing says which core CPUs 2-3,6 belong to: each taken as a core of its own"]
    );
    assert_eq!((t.nodes()[1].listed.to_string(), t.nodes()[1].cpus.to_string()), ("4-7".into(), "6".into()));
}

#[test]
fn one_word_counts_for_all_and_the_majority_overrules_it() {
    // Only the leaders speak.
    let t = assembled(&raw("0-3", vec![group(Level::Core, 0, "0,2"), group(Level::Core, 0, "1,3")], vec![]));
    assert_eq!(lists(t.cores()), ["0,2", "1,3"]);
    assert_eq!(t.siblings(CpuId(3)), Some(&set("1,3")));
    assert_eq!((t.threads_per_core(), t.oddities().len()), (2, 0));

    // Everybody speaks, CPU 2 nonsense.
    let words = ["0,2,4", "1,3,5", "0-3", "1,3,5", "0,2,4", "1,3,5"];
    let said = (0..).zip(words).map(|(cpu, word)| told(Level::L3, 0, word, cpu)).collect();
    let t = assembled(&raw("0-5", said, vec![]));
    assert_eq!(lists(t.llcs()), ["0,2,4", "1,3,5"]);
    assert!(t.oddities()[0].starts_with("L3 of CPUs 0-3 contradicts what other CPUs say: none of them kept"));

    // A tie: each CPU's own word.
    let said = vec![told(Level::L3, 0, "0-1", 0), told(Level::L3, 0, "1", 1)];
    assert_eq!(lists(assembled(&raw("0-1", said, vec![])).llcs()), ["0", "1"]);
}

#[test]
fn a_negative_die_is_no_die() {
    let mut said = vec![group(Level::Package, 36, "0-1"), group(Level::Package, 37, "2-3")];
    said.extend((0..4).map(|cpu| told(Level::Die, -1, &cpu.to_string(), cpu)));
    let t = assembled(&raw("0-3", said.clone(), vec![]));
    assert_eq!(lists(t.dies()), ["0-1", "2-3"]);
    // A negative package is one: only its number is unknown.
    said[0].id = Some(-1);
    said[1].id = Some(-1);
    assert_eq!(lists(assembled(&raw("0-3", said, vec![])).packages()), ["0-1", "2-3"]);
}

#[test]
fn the_last_level_cache_is_l3_else_l2() {
    let said = vec![
        group(Level::L3, 0, "0-3"),
        group(Level::L2, 0, "0-1"),
        group(Level::L2, 1, "2-3"),
        // Low-power cores without L3, one CPU without any cache.
        group(Level::L2, 2, "4-5"),
    ];
    let t = assembled(&raw("0-6", said, vec![]));
    assert_eq!(lists(t.llcs()), ["0-3", "4-5"]);
    let llc = |cpu| t.llc_of(CpuId(cpu)).map(|l| l.leader.0);
    assert_eq!([llc(1), llc(3), llc(5), llc(6)], [Some(0), Some(0), Some(4), None]);
}

#[test]
fn nodes_that_overlap_or_leave_cpus_out() {
    let t = assembled(&raw("0-5", vec![], vec![node(1, "0-3"), node(0, "2-3"), node(7, "")]));
    let cpus: Vec<String> = t.nodes().iter().map(|n| n.cpus.to_string()).collect();
    assert_eq!(cpus, ["2-3", "0-1", ""]);
    assert_eq!(t.cpus_without_node(), set("4-5"));
    assert_eq!(t.oddities().len(), 3, "{:?}", t.oddities());
    assert_eq!(
        CpuTopology::assemble(&raw("0", vec![], vec![node(3, "0"), node(3, "1")])),
        Err(TopologyError::NodeTwice { source_name: "test".into(), node: NodeId(3) })
    );
    assert_eq!(
        CpuTopology::assemble(&raw("", vec![], vec![])),
        Err(TopologyError::NoCpu { source_name: "test".into() })
    );
}

#[test]
fn distances_by_column() {
    let row = |id, cpus, row: &[u32]| RawNode { distance: Some(row.to_vec()), ..node(id, cpus) };
    // Sparse numbers, and not symmetric.
    let t = assembled(&raw("0-3", vec![], vec![row(0, "0-1", &[10, 21]), row(8, "2-3", &[31, 10])]));
    let d = |t: &CpuTopology, a, b| t.distance(NodeId(a), NodeId(b));
    assert_eq!((d(&t, 0, 8), d(&t, 8, 0), d(&t, 8, 8)), (21, 31, 10));
    assert_eq!((d(&t, 0, 5), d(&t, 5, 5)), (REMOTE_DISTANCE, LOCAL_DISTANCE));

    // Node 0 is gone from the tree, but still in the rows: the column of node 1 is the second.
    let mut cut = raw("0-1", vec![], vec![row(1, "0-1", &[21, 11])]);
    cut.nodes_possible = Some("0-1".parse().unwrap());
    let t = assembled(&cut);
    assert_eq!(d(&t, 1, 1), 11);
    let odd = |t: &CpuTopology| t.oddities().last().cloned().unwrap();
    assert_eq!(odd(&t), "NUMA node 1 gives 2 distances for 1 nodes: read as those to nodes 0-1");
    // A row that nothing explains, and none.
    let t = assembled(&raw("0-1", vec![], vec![row(0, "0", &[10, 20, 30]), node(1, "1")]));
    assert_eq!((d(&t, 0, 1), d(&t, 1, 0), d(&t, 1, 1)), (20, 20, 10));
    assert!(odd(&t).ends_with("ignored"), "{}", odd(&t));
}

#[test]
fn the_fingerprint_is_about_assignments() {
    let base = split_and_shared();
    let print = |raw: &RawTopology| assembled(raw).fingerprint();
    // Pinned: it is in checkpoints.
    assert_eq!(print(&base), "1-16c-16k-3n-293fb01a");
    let mut same = base.clone();
    same.nodes[0].memory_bytes = Some(1);
    same.isolated = Some(set("3"));
    same.possible = Some(set("0-63"));
    same.groups.reverse();
    assert_eq!(print(&same), print(&base));
    let change = |edit: fn(&mut RawTopology)| {
        let mut raw = base.clone();
        edit(&mut raw);
        print(&raw)
    };
    let others = [
        change(|r| r.online = Some(set("0-14"))),
        change(|r| r.groups.push(group(Level::Core, 0, "0-1"))),
        change(|r| r.groups.push(group(Level::L3, 0, "0-1"))),
        change(|r| r.groups[0].cpus = set("0-3")),
        change(|r| r.nodes[0].cpus = set("0-2")),
    ];
    for (i, other) in others.iter().enumerate() {
        assert_ne!(*other, print(&base), "{i}");
        assert_eq!(others.iter().filter(|o| *o == other).count(), 1, "{i}");
    }
}

#[test]
fn the_document() {
    let mut raw = raw("1,3", vec![group(Level::Package, 0, "0-3")], vec![node(2, "0-3")]);
    raw.present = Some(set("0-3"));
    raw.nohz_full = Some(set(""));
    let doc = serde_json::to_value(render::document(&assembled(&raw))).unwrap();
    assert_eq!(
        (&doc["schema"], &doc["online"], &doc["offline"], &doc["nohz_full"]),
        (&"truepin.topology/1".into(), &"1,3".into(), &"0,2".into(), &"".into())
    );
    assert!(doc["possible"].is_null() && doc["isolated"].is_null());
    assert_eq!(
        doc["cpus"][1],
        serde_json::json!({"cpu": 3, "package": 1, "die": null, "cluster": null, "core": null, "l2": null,
            "l3": null, "book": null, "drawer": null, "node": 2})
    );
    assert_eq!(
        doc["nodes"],
        serde_json::json!([{"id": 2, "cpus": "0-3", "memory_bytes": null, "distance": null}])
    );
}

#[test]
fn the_tree() {
    let two =
        Regular { packages: 2, nodes: 2, l3: 2, cores: 4, threads: 2, numbering: Numbering::ThreadsLast };
    let tree = render::tree(&assembled(&two.raw()));
    let expected = "\
64 CPUs, 32 cores, 8 last-level caches, 4 NUMA nodes, 2 packages
├─ package 0: 32 CPUs, 0-15,32-47
│  ├─ node 0, 8.0 GiB: 16 CPUs, 0-7,32-39
│  │  ├─ LLC of CPU 0: 4 cores of 2 threads 0-3 + 32-35
│  │  └─ LLC of CPU 4: 4 cores of 2 threads 4-7 + 36-39
│  └─ node 1, 8.0 GiB: 16 CPUs, 8-15,40-47
";
    assert!(tree.starts_with(expected), "{tree}");
    assert!(tree.ends_with("  node 3   32  32  12  10\n"), "{tree}");

    // The node that spans packages comes first; what is in none comes last; strides are shown as strides.
    let mut raw = split_and_shared();
    raw.nodes = vec![node(0, "0-11")];
    raw.groups[0].cpus = set("0-6:1/2");
    raw.groups.push(group(Level::Package, -1, "1-7:1/2"));
    let expected = "\
16 CPUs, 16 cores, 1 NUMA node, 4 packages
├─ node 0: 12 CPUs, 0-11
│  ├─ package 0: 4 cores 0-6:1/2
│  ├─ package of CPU 1: 4 cores 1-7:1/2
│  └─ package 1: 4 cores 8-11
└─ package 2: 4 cores 12-15
";
    let tree = render::tree(&assembled(&raw));
    assert!(tree.starts_with(expected), "{tree}");
    // 128 CPUs fit on a screen.
    let large = Regular { cores: 8, ..two };
    assert!(render::tree(&assembled(&large.raw())).lines().count() < 24);
}
