//! hwloc's XML and cAdvisor's JSON, written by hand and made from regular machines.

use super::*;
use crate::topology::{
    devices::{Device, is_pci_address, near, place},
    hwloc, machine_info,
};
use std::fmt::Write as _;

/// A mask as hwloc writes it: words that are 0 are empty, but for the last.
pub(super) fn mask(cpus: &CpuSet) -> String {
    let top = cpus.last().map_or(0, |c| c.0 / 32);
    let word = |w: u32| (0..32).filter(|b| cpus.contains(CpuId(w * 32 + b))).fold(0_u32, |v, b| v | 1 << b);
    let words = (0..=top).rev().map(|w| match word(w) {
        0 if w > 0 => String::new(),
        0 => "0x0".into(),
        v => format!("{v:#010x}"),
    });
    words.collect::<Vec<_>>().join(",")
}

/// A file of version 2 in which every object lies directly in the machine: their sets say who holds whom.
pub(super) fn xml(raw: &RawTopology) -> String {
    let online = raw.online.clone().unwrap_or_default();
    let all = mask(&online);
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n\
         <topology version=\"2.0\">\n<object type=\"Machine\" os_index=\"0\" cpuset=\"{all}\" complete_cpuset=\"{all}\">\n"
    );
    for group in &raw.groups {
        let kind = match group.level {
            Level::Package => "Package\"",
            Level::Die => "Die\"",
            Level::Core => "Core\"",
            Level::L2 => "L2Cache\"",
            Level::L3 => "L3Cache\"",
            Level::Cluster => "Group\" subtype=\"Cluster\"",
            Level::Book => "Group\" subtype=\"Book\"",
            Level::Drawer => "Group\" subtype=\"Drawer\"",
        };
        let id = group.id.map_or(String::new(), |id| format!(" os_index=\"{id}\""));
        let _ = writeln!(text, "<object type=\"{kind}{id} cpuset=\"{}\"/>", mask(&group.cpus));
    }
    for node in &raw.nodes {
        let memory = node.memory_bytes.map_or(String::new(), |bytes| format!(" local_memory=\"{bytes}\""));
        let (id, cpus) = (node.id, mask(&node.cpus));
        let _ = writeln!(text, "<object type=\"NUMANode\" os_index=\"{id}\" cpuset=\"{cpus}\"{memory}/>");
    }
    for cpu in online.iter() {
        let _ = writeln!(text, "<object type=\"PU\" os_index=\"{cpu}\"/>");
    }
    text.push_str("</object>\n");
    if raw.nodes.iter().all(|n| n.distance.is_some()) && !raw.nodes.is_empty() {
        let ids: Vec<String> = raw.nodes.iter().map(|n| n.id.to_string()).collect();
        let values: Vec<u32> =
            raw.nodes.iter().flat_map(|n| n.distance.clone().unwrap_or_default()).collect();
        let _ = writeln!(
            text,
            "<distances2 type=\"NUMANode\" nbobjs=\"{}\" kind=\"5\" name=\"NUMALatency\" indexing=\"os\">\n<indexes>{} </indexes>",
            ids.len(),
            ids.join(" ")
        );
        for ten in values.chunks(10) {
            let _ = writeln!(
                text,
                "<u64values>{} </u64values>",
                ten.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
            );
        }
        text.push_str("</distances2>\n");
    }
    text + "</topology>\n"
}

/// The same machine as cAdvisor writes it: by node, L3s in `uncore_caches` unless they cover the node.
pub(super) fn json(raw: &RawTopology) -> String {
    let of = |level, cpus: &CpuSet| raw.groups.iter().find(|g| g.level == level && cpus.is_subset(&g.cpus));
    let ids = |cpus: &CpuSet| cpus.iter().map(|c| c.0).collect::<Vec<_>>();
    let nodes: Vec<serde_json::Value> = raw
        .nodes
        .iter()
        .map(|node| {
            let cores = raw.groups.iter().filter(|g| g.level == Level::Core && g.cpus.is_subset(&node.cpus));
            let l3 = |g: &RawGroup| serde_json::json!({"id": g.id, "size": 1, "type": "Unified", "level": 3});
            let mut own = None;
            let cores: Vec<_> = cores
                .map(|core| {
                    let shared = of(Level::L3, &core.cpus);
                    own = shared.filter(|g| g.cpus == node.cpus).map(l3);
                    serde_json::json!({
                        "core_id": core.id, "thread_ids": ids(&core.cpus), "socket_id": of(Level::Package, &core.cpus).and_then(|g| g.id),
                        "caches": [{"id": 0, "size": 1, "type": "Instruction", "level": 1}, {"id": 0, "size": 1, "type": "Unified", "level": 2}],
                        "uncore_caches": shared.filter(|g| g.cpus != node.cpus).map(|g| vec![l3(g)]), "book_id": "", "drawer_id": "",
                    })
                })
                .collect();
            serde_json::json!({"node_id": node.id.0, "memory": node.memory_bytes, "hugepages": [], "cores": cores,
                "caches": own.map(|c| vec![c]), "distances": node.distance})
        })
        .collect();
    let cpus = raw.online.as_ref().map_or(0, CpuSet::len);
    serde_json::json!({"num_cores": cpus, "machine_id": "", "topology": nodes}).to_string()
}

/// Regular machines of many shapes.
pub(super) fn machines() -> Vec<Regular> {
    let mut all = Vec::new();
    for numbering in [Numbering::ThreadsLast, Numbering::ThreadsAdjacent] {
        for (packages, nodes, l3, cores, threads) in [
            (1, 1, 1, 1, 1),
            (1, 1, 1, 4, 2),
            (2, 2, 2, 3, 2),
            (4, 1, 1, 2, 8),
            (2, 4, 1, 20, 1),
            (1, 3, 0, 7, 1),
        ] {
            all.push(Regular { packages, nodes, l3, cores, threads, numbering });
        }
    }
    all
}

/// What both files can say.
fn stated(t: &CpuTopology) -> (Vec<Vec<String>>, Vec<NumaNode>, String) {
    let levels = [Level::Package, Level::L3, Level::Core];
    (levels.map(|l| lists(t.groups(l))).into(), t.nodes().to_vec(), t.online().to_string())
}

#[test]
fn the_same_machine_from_every_source() {
    for machine in machines() {
        let raw = machine.raw();
        let expected = assembled(&raw);
        let (from_xml, devices) = hwloc::parse(&xml(&raw), "a.xml").unwrap();
        assert_eq!((from_xml.notes.as_slice(), devices.as_slice()), (&[][..], &[][..]));
        let t = assembled(&from_xml);
        assert_eq!(stated(&t), stated(&expected), "{machine:?}");
        assert_eq!(t.fingerprint(), expected.fingerprint(), "{machine:?}");
        // What it cannot say.
        assert_eq!((t.present(), t.possible(), t.isolated(), t.nohz_full()), (None, None, None, None));

        let from_json = machine_info::parse(&json(&raw), "a.json").unwrap();
        assert_eq!(from_json.notes, [""; 0]);
        let t = assembled(&from_json);
        assert_eq!(stated(&t), stated(&expected), "{machine:?}");
        assert_eq!((t.present(), t.isolated(), t.dies().len()), (None, None, 0));
    }
}

/// A machine with what is awkward: offline CPUs, an instruction cache, a group that is nothing here, a node whose matrix is not
/// in its order, devices below bridges.
pub(super) const AWKWARD: &str = r#"<?xml version="1.0"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd" [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>
<topology version="2.0">
  <object type="Machine" cpuset="0x0000000f" complete_cpuset="0x0000003f">
    <info name="HostName" value="h&amp;h &#x6e;"/>
    <object type="Package" os_index="4294967295" cpuset="0xf">
      <object type="NUMANode" os_index="7" cpuset="0x3" local_memory="1024"><page_type size="4096" count="1"/></object>
      <object type="NUMANode" os_index="2" cpuset="0xc" complete_cpuset="0x3c"/>
      <object type="L2iCache" cpuset="0x3" depth="2" cache_type="2"/>
      <object type="L2Cache" cpuset="0x3" depth="2" cache_type="0"/>
      <object type="Group" cpuset="0xf" kind="1001"/>
      <object type="Group" subtype="Cluster" os_index="9" cpuset="0x3"/>
      <object type="Core" os_index="0" cpuset="0x3">
        <object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/>
        <object type="Bridge" bridge_type="0-1">
          <object type="Bridge" bridge_type="1-1">
            <object type="PCIDev" pci_busid="0000:17:00.0" pci_type="0200 [8086:1521]">
              <object type="OSDev" name="eth0" osdev_type="2"/><object type="OSDev" name="card0" osdev_type="1"/>
            </object>
          </object>
        </object>
      </object>
      <object type="PU" os_index="2"/><object type="PU" os_index="3"/>
    </object>
    <object type="OSDev" name="sda" osdev_type="0"/>
    <object type="Misc" name="x"/>
  </object>
  <distances2 type="NUMANode" nbobjs="2" kind="6" name="Measured" indexing="os"><indexes>7 2</indexes><u64values>1 2 3 4</u64values></distances2>
  <distances2 type="NUMANode" nbobjs="2" kind="5" indexing="os"><indexes length="4">7 2 </indexes><u64values>10 21</u64values><u64values>31 11</u64values></distances2>
</topology>"#;

#[test]
fn hwloc_2() {
    let (raw, devices) = hwloc::parse(AWKWARD, "a.xml").unwrap();
    assert_eq!(
        raw.notes,
        ["CPUs 4-5 are named and not described: offline, or not allowed to whoever wrote the file"]
    );
    let t = assembled(&raw);
    assert_eq!((t.online().to_string(), t.offline().to_string()), ("0-3".into(), String::new()));
    assert_eq!((t.packages()[0].kernel_id, lists(t.groups(Level::L2))), (None, vec!["0-1".to_owned()]));
    assert_eq!(
        (lists(t.groups(Level::Cluster)), lists(t.groups(Level::Core))),
        (vec!["0-1".into()], vec!["0-1".into()])
    );
    assert_eq!(t.nodes().iter().map(|n| n.listed.to_string()).collect::<Vec<_>>(), ["2-5", "0-1"]);
    assert_eq!((t.nodes()[1].memory_bytes, t.nodes()[0].memory_bytes), (Some(1024), None));
    // From 7 to 2 it is 21, and the row is in ascending order.
    assert_eq!((t.distance(NodeId(7), NodeId(2)), t.distance(NodeId(2), NodeId(7))), (21, 31));
    assert_eq!(t.nodes()[1].distance, Some(vec![21, 10]));

    let (devices, oddities) = place(&t, &devices);
    assert_eq!(oddities, [""; 0]);
    let shown: Vec<_> = devices
        .iter()
        .map(|d| (d.kind.to_string(), d.name.as_str(), d.pci.as_deref(), d.nodes.to_string()))
        .collect();
    let pci = Some("0000:17:00.0");
    assert_eq!(
        shown,
        [
            ("pci".into(), "0000:17:00.0", pci, "7".into()),
            ("net".into(), "eth0", pci, "7".into()),
            ("block".into(), "sda", None, String::new()),
        ]
    );
    assert_eq!((devices[0].class.as_deref(), devices[2].local_cpus.clone()), (Some("0x020000"), None));
}

#[test]
fn hwloc_1() {
    let text = r#"<topology>
      <object type="Machine" cpuset="0x00000007" complete_cpuset="0x0000001f" online_cpuset="0x0000000f" allowed_cpuset="0x00000007">
        <distances nbobjs="2" relative_depth="1" latency_base="10.000000">
          <latency value="1.000000"/><latency value="2.100000"/><latency value="2.100000"/><latency value="1.000000"/>
        </distances>
        <object type="NUMANode" os_index="0" cpuset="0x3" complete_cpuset="0x13" local_memory="5">
          <object type="Socket" os_index="1" cpuset="0x3">
            <object type="Cache" cpuset="0x3" cache_size="1" depth="3" cache_type="0"/>
            <object type="Cache" cpuset="0x3" cache_size="1" depth="2" cache_type="2"/>
            <object type="Core" os_index="0" cpuset="0x3"><object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/></object>
          </object>
        </object>
        <object type="Group" os_index="4" cpuset="0x7"><info name="Type" value="Book"/><info name="Type" value="Drawer"/></object>
        <object type="Group" cpuset="0x7"><info name="Backend" value="Book"/><object type="Misc" name="Type" value="Book"/></object>
        <object type="NUMANode" os_index="1" cpuset="0xc"><object type="PU" os_index="2" cpuset="0x4"/></object>
      </object>
    </topology>"#;
    let t = assembled(&hwloc::parse(text, "a.xml").unwrap().0);
    // 3 is online and not described: not allowed. 4 is offline.
    assert_eq!((t.online().to_string(), t.offline().to_string()), ("0-2".into(), "4".into()));
    assert_eq!(
        (lists(t.packages()), lists(t.llcs()), t.groups(Level::L2).len()),
        (vec!["0-1".into()], vec!["0-1".into()], 0)
    );
    assert_eq!((t.nodes()[0].listed.to_string(), t.distance(NodeId(0), NodeId(1))), ("0-1,4".into(), 21));
    let books = t.groups(Level::Book);
    assert_eq!(
        (lists(books), books[0].kernel_id, t.groups(Level::Drawer).len()),
        (vec!["0-2".into()], Some(4), 0)
    );
    assert!(t.oddities()[0].starts_with("CPUs 3 are named and not described"), "{:?}", t.oddities());
}

#[test]
fn hwloc_refusals() {
    let machine = |inner: &str| {
        format!("<topology version=\"2.0\"><object type=\"Machine\">{inner}</object></topology>")
    };
    let deep = "<object>".repeat(500) + &"</object>".repeat(500);
    let nodes: String = (0..1025)
        .fold(String::new(), |text, n| text + &format!("<object type=\"NUMANode\" os_index=\"{n}\"/>"));
    for (text, part) in [
        (String::new(), "it has no element"),
        ("<root/>".into(), "its root element is \"root\""),
        ("<topology version=\"3.0\"/>".into(), "its version is \"3.0\""),
        ("<topology/><topology/>".into(), "a second root element"),
        ("<topology><object type=\"Machine\">".into(), "ends inside of 2 open elements"),
        ("<topology></object>".into(), "not well-formed"),
        ("<topology><object type=\"PU\" os_index=\"&b;\"/></topology>".into(), "not well-formed"),
        (machine(&deep), "nest deeper than 200"),
        (machine(&nodes), "more than 1024 NUMA nodes"),
        (machine("<object type=\"PU\"/>"), "PU: os_index \"\" is not the number of a CPU"),
        (machine("<object type=\"PU\" os_index=\"65536\"/>"), "\"65536\" is not the number of a CPU"),
        (machine("<object type=\"PU\" os_index=\"1\" os_index=\"2\"/>"), "os_index \"2\" is not given once"),
        (machine("<object type=\"Core\" cpuset=\"0xf...f,0x1\"/>"), "Core: cpuset \"0xf...f,0x1\" is not a finite mask"),
        (machine("<object type=\"Core\" cpuset=\"0x+1\"/>"), "is not a finite mask"),
        (machine(&format!("<object type=\"Core\" cpuset=\"0x1{}\"/>", ",".repeat(2048))), "is not a finite mask"),
        (machine("<object type=\"NUMANode\" os_index=\"0\" local_memory=\"-1\"/>"), "\"-1\" is not a size in bytes"),
        (
            "<topology><distances2 type=\"NUMANode\" kind=\"5\" indexing=\"os\"><u64values>1 99999999999</u64values></distances2></topology>".into(),
            "\"99999999999\" is not a 32-bit number",
        ),
        (
            "<topology><distances2 type=\"NUMANode\" kind=\"5\" indexing=\"os\"><u64values>1&#48;</u64values></distances2></topology>".into(),
            "\"&\" is not a 32-bit number",
        ),
    ] {
        let error = hwloc::parse(&text, "a.xml").unwrap_err();
        let shown = error.to_string();
        assert!(shown.starts_with("a.xml: ") && shown.contains(part), "{part}: {shown}");
    }
    // Longer than any machine, without reading it.
    let long = " ".repeat(hwloc::LONGEST + 1);
    assert!(hwloc::parse(&long, "a.xml").unwrap_err().to_string().contains("longer than"));
    // A matrix over other objects is left out, and said.
    let (raw, _) = hwloc::parse(
        "<topology><object type=\"NUMANode\" os_index=\"0\"/><distances2 type=\"NUMANode\" kind=\"5\" indexing=\"os\"><indexes>0 1</indexes><u64values>1 2 3 4</u64values></distances2></topology>",
        "a.xml",
    )
    .unwrap();
    assert_eq!((raw.nodes[0].distance.clone(), raw.notes.len()), (None, 1));
}

#[test]
fn machine_info_as_cadvisor_writes_it() {
    // Two nodes in package 0 that share an L3 (sub-NUMA clusters), one node over packages 1 and 2 with an L3 of its own.
    let text = r#"{"timestamp":"2026-01-01T00:00:00Z","num_cores":9,"machine_id":"x","disk_map":{"8:0":{"name":"sda"}},"topology":[
      {"node_id":0,"memory":1024,"hugepages":null,"distances":[10,12,21],"caches":null,"cores":[
        {"core_id":0,"thread_ids":[0,8],"caches":[{"id":0,"size":1,"type":"Data","level":1},{"id":0,"size":1,"type":"Unified","level":2}],"uncore_caches":[{"id":5,"size":9,"type":"Unified","level":3}],"socket_id":0,"book_id":"","drawer_id":""}]},
      {"node_id":1,"memory":0,"distances":[12,10,21],"cores":[
        {"core_id":0,"thread_ids":[1],"caches":null,"uncore_caches":[{"id":5,"size":9,"type":"Unified","level":3}],"socket_id":0}]},
      {"node_id":4,"memory":4096,"distances":[21,21,10],"caches":[{"id":7,"size":9,"type":"Unified","level":3}],"cores":[
        {"core_id":0,"thread_ids":[2],"socket_id":1},{"core_id":0,"thread_ids":[3],"socket_id":2},{"core_id":1,"thread_ids":[],"socket_id":2}]},
      {"node_id":9,"memory":512,"distances":null,"cores":null}]}"#;
    let raw = machine_info::parse(text, "a.json").unwrap();
    assert_eq!(raw.notes, ["num_cores is 9, and 5 CPUs are described"]);
    let t = assembled(&raw);
    assert_eq!(
        (lists(t.packages()), lists(t.groups(Level::Core))),
        (
            vec!["0-1,8".into(), "2".into(), "3".into()],
            vec!["0,8".into(), "1".into(), "2".into(), "3".into()]
        )
    );
    assert_eq!(
        (lists(t.groups(Level::L3)), lists(t.groups(Level::L2))),
        (vec!["0-1,8".into(), "2-3".into()], vec!["0,8".to_owned()])
    );
    let nodes: Vec<_> = t.nodes().iter().map(|n| (n.id.0, n.cpus.to_string(), n.memory_bytes)).collect();
    assert_eq!(
        nodes,
        [
            (0, "0,8".into(), Some(1024)),
            (1, "1".into(), None),
            (4, "2-3".into(), Some(4096)),
            (9, String::new(), Some(512))
        ]
    );
    // By node, never by socket: package 0 is in two nodes, node 4 in two packages.
    assert_eq!(
        (t.node_of(CpuId(0)), t.node_of(CpuId(1)), t.node_of(CpuId(3))),
        (Some(NodeId(0)), Some(NodeId(1)), Some(NodeId(4)))
    );
}

#[test]
fn packages_in_the_place_of_nodes_are_no_nodes() {
    let node = |id: u32, memory: u32| {
        format!(
            r#"{{"node_id":{id},"memory":{memory},"distances":null,"cores":[{{"core_id":0,"thread_ids":[{id}],"socket_id":{id}}}]}}"#
        )
    };
    let parse =
        |a: String, b: String| machine_info::parse(&format!(r#"{{"topology":[{a},{b}]}}"#), "a").unwrap();
    let t = assembled(&parse(node(0, 0), node(1, 0)));
    assert_eq!((t.nodes().len(), t.packages().len()), (0, 2));
    assert!(t.oddities()[0].starts_with("its nodes are packages"), "{:?}", t.oddities());
    assert_eq!(assembled(&parse(node(0, 0), node(1, 8))).nodes().len(), 2);

    // s390: a socket's number is its own within a book, and the book's within a drawer.
    let core = |cpu, socket, book, drawer| {
        format!(
            r#"{{"core_id":{cpu},"thread_ids":[{cpu}],"socket_id":{socket},"book_id":"{book}","drawer_id":"{drawer}"}}"#
        )
    };
    let cores =
        [core(0, 0, 0, 0), core(1, 0, 1, 0), core(2, 0, 1, 0), core(3, 0, 1, 1), core(4, -1, 1, 1)].join(",");
    let t = assembled(
        &machine_info::parse(
            &format!(r#"{{"topology":[{{"node_id":0,"memory":1,"cores":[{cores}]}}]}}"#),
            "a",
        )
        .unwrap(),
    );
    assert_eq!(lists(t.packages()), ["0", "1-2", "3"]);
    assert_eq!(
        (lists(t.groups(Level::Book)), lists(t.groups(Level::Drawer))),
        (vec!["0".into(), "1-2".into(), "3-4".into()], vec!["0-2".into(), "3-4".into()])
    );
}

#[test]
fn machine_info_refusals() {
    let node = |inner: &str| format!(r#"{{"topology":[{{"node_id":3,{inner}}}]}}"#);
    let cores = vec![r#"{"core_id":0,"thread_ids":[65535]}"#; 16_385].join(",");
    let nodes = vec![r#"{"node_id":0}"#; 1025].join(",");
    for (text, part) in [
        ("[]".to_owned(), "no machine-info"),
        ("{}".into(), "the key \"topology\" is missing or holds no nodes"),
        (r#"{"topology":null}"#.into(), "the key \"topology\" is missing"),
        ("[".repeat(100_000), "no machine-info"),
        (node(r#""memory":-1"#), "no machine-info"),
        (
            node(r#""cores":[{"core_id":0,"thread_ids":[65536]}]"#),
            "node 3: thread_ids 65536 is not the number of a CPU",
        ),
        (
            node(r#""cores":[{"core_id":0,"thread_ids":[-1]}]"#),
            "node 3: thread_ids -1 is not the number of a CPU",
        ),
        (node(r#""memory":1,"distances":[4294967296]"#), "node 3: distances 4294967296 is not a distance"),
        (r#"{"topology":[{"node_id":-1,"memory":1}]}"#.into(), "node_id -1 is not the number of a NUMA node"),
        (node(&format!(r#""cores":[{cores}]"#)), "more than 16384 cores"),
        (format!(r#"{{"topology":[{nodes}]}}"#), "more than 1024 NUMA nodes"),
        (" ".repeat(machine_info::LONGEST + 1), "more than 16777216 bytes"),
    ] {
        let error = machine_info::parse(&text, "a.json").unwrap_err().to_string();
        assert!(error.starts_with("a.json: ") && error.contains(part), "{part}: {error}");
    }
}

#[test]
fn the_place_of_a_device() {
    let t = assembled(&split_and_shared());
    let at = |node, cpus: Option<&str>| {
        let near = near(&t, node, cpus.map(set).as_ref());
        near.map(|place| place.map(|(nodes, cpus)| (nodes.to_string(), cpus.to_string())))
    };
    let place_of = |nodes: &str, cpus: &str| Ok(Some((nodes.to_owned(), cpus.to_owned())));
    assert_eq!(at(Some(1), None), place_of("1", "4-7"));
    assert_eq!(at(Some(1), Some("4-5")), place_of("1", "4-5"));
    assert_eq!(at(Some(1), Some("0-15")), place_of("1", "4-7"), "a list of all CPUs says nothing");
    assert_eq!(at(Some(-1), Some("0-7")), place_of("0-1", "0-7"));
    assert_eq!(
        (at(Some(-1), Some("0-15")), at(None, None), at(None, Some("99"))),
        (Ok(None), Ok(None), Ok(None))
    );
    assert_eq!((at(Some(3), None), at(Some(i64::MAX), None)), (Err(3), Err(i64::MAX)));

    let device = |kind, name: &str, node| RawDevice {
        kind,
        name: name.into(),
        pci: None,
        class: Some(0x02_0000),
        node,
        local_cpus: None,
    };
    let raw = [
        device(DeviceKind::Net, "eth1", Some(9)),
        device(DeviceKind::Net, "eth0", Some(2)),
        device(DeviceKind::Net, "eth0", Some(2)),
    ];
    let (devices, oddities) = place(&t, &raw);
    let names: Vec<&str> = devices.iter().map(|d: &Device| d.name.as_str()).collect();
    assert_eq!((names, devices[0].nodes.to_string()), (vec!["eth0", "eth1"], "2".into()));
    assert_eq!(oddities, ["net eth1 is on NUMA node 9, which does not exist: place unknown"]);
    for (text, is) in [
        ("0000:17:00.0", true),
        ("10000:e1:00.0", true),
        ("17:00.0", false),
        ("0000:17:00.00", false),
        ("pci0000:17", false),
        ("0000:1g:00.0", false),
    ] {
        assert_eq!(is_pci_address(text), is, "{text}");
    }
}
