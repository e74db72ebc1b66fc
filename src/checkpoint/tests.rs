use super::*;
use crate::{
    assignments::{Assignment, FirstValue, Mode},
    cgroup::{CgroupId, CpusetFile},
    containers::ContainerEntry,
    partition::PartitionKind,
    request::Isolation,
};
use serde_json::{Value, json};

fn assignment(cpus: &str, cgroup: &str) -> Assignment {
    Assignment {
        cpus: cpus.parse().unwrap(),
        original: None,
        cgroup: cgroup.parse().unwrap(),
        created: true,
        mode: Mode::Partition,
        isolation: Isolation::Auto,
        generation: 7,
        reason: "2 CPUs on node 0".into(),
        memory: std::collections::BTreeMap::new(),
        extra: Extra::new(),
    }
}

fn record() -> Checkpoint {
    let mut assignments = Assignments { reserved: "0-1".parse().unwrap(), ..Default::default() };
    assignments.owners.insert("run/db".parse().unwrap(), assignment("2-3", "truepin.slice/run-db"));
    let pod = Assignment {
        original: Some("4-7".parse().unwrap()),
        created: false,
        mode: Mode::Member,
        isolation: Isolation::Member,
        ..assignment("4-5", "kubepods.slice/pod1/c1")
    };
    assignments.owners.insert("pod/1b4e28ba/app".parse().unwrap(), pod);
    let owner = "pod/1b4e28ba/app".parse().unwrap();
    let containers = [
        ("c1".parse().unwrap(), ContainerEntry { owner, cgroup: Some(CgroupId(77)), extra: Extra::new() }),
        (
            "c0".parse().unwrap(),
            ContainerEntry { owner: "pod/u/init".parse().unwrap(), cgroup: None, extra: Extra::new() },
        ),
    ];
    let files = [(CpusetFile::Cpus, "0-7".to_owned()), (CpusetFile::Exclusive, String::new())];
    let first = FirstValue { id: CgroupId(3), files: files.into(), ..FirstValue::default() };
    Checkpoint {
        version: VERSION,
        minor: 0,
        epoch: 3,
        boot_id: "5f1c3f0e-0000-4000-8000-000000000000".into(),
        topology: "t".into(),
        strategy: "best".into(),
        assignments,
        containers: containers.into(),
        first: [("system.slice".parse().unwrap(), first)].into(),
        extra: Extra::new(),
    }
}

/// Frozen: a change of these bytes breaks every file in the field.
const FROZEN_2: &str = concat!(
    r#"{"schema":"truepin.checkpoint/2","crc32":"853e3a73","payload":{"assignments":{"owners":{"#,
    r#""pod/1b4e28ba/app":{"cgroup":"kubepods.slice/pod1/c1","cpus":"4-5","created":false,"generation":7,"#,
    r#""isolation":"member","mode":"member","original":"4-7","reason":"2 CPUs on node 0"},"#,
    r#""run/db":{"cgroup":"truepin.slice/run-db","cpus":"2-3","created":true,"generation":7,"#,
    r#""isolation":"auto","mode":"partition","reason":"2 CPUs on node 0"}},"reserved":"0-1","strict_reserved":false},"#,
    r#""boot_id":"5f1c3f0e-0000-4000-8000-000000000000","#,
    r#""containers":{"c0":{"owner":"pod/u/init"},"c1":{"cgroup":77,"owner":"pod/1b4e28ba/app"}},"epoch":3,"#,
    r#""first":{"system.slice":{"files":{"cpuset.cpus":"0-7","cpuset.cpus.exclusive":""},"id":3}},"#,
    r#""minor":0,"strategy":"best","topology":"t","version":2}}"#,
    "\n"
);

/// With what minor version 1 added: memory by node.
const FROZEN_2_1: &str = concat!(
    r#"{"schema":"truepin.checkpoint/2","crc32":"f92dcee0","payload":{"assignments":{"owners":{"#,
    r#""run/db":{"cgroup":"truepin.slice/run-db","cpus":"2-3","created":true,"generation":7,"isolation":"auto","#,
    r#""memory":{"0":1073741824,"10":4096,"2":1},"mode":"partition","reason":"2 CPUs on node 0"}},"#,
    r#""reserved":"0-1","strict_reserved":false},"boot_id":"5f1c3f0e-0000-4000-8000-000000000000","#,
    r#""containers":{},"epoch":3,"first":{"a":{"files":{"cpuset.mems":"0-1"},"id":3}},"minor":1,"#,
    r#""strategy":"best","topology":"t","version":2}}"#,
    "\n"
);

/// With what minor version 2 added: isolated partitions.
const FROZEN_2_2: &str = concat!(
    r#"{"schema":"truepin.checkpoint/2","crc32":"41e6a02a","payload":{"assignments":{"owners":{"#,
    r#""run/db":{"cgroup":"truepin.slice/run-db","cpus":"2-3","created":true,"generation":7,"isolation":"isolated","#,
    r#""mode":"partition","reason":"2 CPUs on node 0"}},"reserved":"0-1","strict_reserved":false},"#,
    r#""boot_id":"5f1c3f0e-0000-4000-8000-000000000000","containers":{},"epoch":3,"first":{},"minor":2,"#,
    r#""strategy":"best","topology":"t","version":2}}"#,
    "\n"
);

/// With what minor version 3 added: cgroups that are fenced.
const FROZEN_2_3: &str = concat!(
    r#"{"schema":"truepin.checkpoint/2","crc32":"da94ce5b","payload":{"assignments":{"owners":{},"#,
    r#""reserved":"0-1","strict_reserved":false},"boot_id":"5f1c3f0e-0000-4000-8000-000000000000","#,
    r#""containers":{},"epoch":3,"first":{"machine.slice":{"fenced_for":["cgroup/a/b","run/db"],"#,
    r#""files":{"cpuset.cpus":"0-7"},"id":3}},"minor":3,"strategy":"best","topology":"t","version":2}}"#,
    "\n"
);

/// As the first truepin wrote it.
const FROZEN_1: &str = concat!(
    r#"{"schema":"truepin.checkpoint/1","crc32":"4fa7db59","payload":{"version":1,"epoch":3,"#,
    r#""boot_id":"5f1c3f0e-0000-4000-8000-000000000000","topology":"t","assignments":{"reserved":"0-1","#,
    r#""strict_reserved":false,"owners":{"run/db":{"cpus":"2-3","cgroup":"truepin.slice/run-db","created":true,"#,
    r#""mode":"partition","isolation":"auto","generation":7,"reason":"2 CPUs on node 0"}}},"first":{}}}"#,
    "\n"
);

/// Likewise, with all that version 1 can hold.
const FULL_1: &str = concat!(
    r#"{"version":1,"epoch":9,"boot_id":"b","topology":"t","assignments":{"reserved":"","strict_reserved":true,"#,
    // The owners in the order of their kinds: pods, units, cgroups, runs.
    r#""owners":{"unit/x.service":{"cpus":"6","cgroup":"x","created":false,"mode":"audit","#,
    r#""isolation":"partition","generation":1,"reason":"r"},"cgroup/a.slice/b":{"cpus":"4-5","cgroup":"a.slice/b","#,
    r#""created":false,"mode":"member","isolation":"member","generation":2,"reason":""}}},"#,
    r#""first":{"a.slice":{"id":5,"files":{"cpuset.cpus":"0-7","cpuset.cpus.exclusive":"","#,
    r#""cpuset.cpus.partition":"member"}}}}"#
);

#[test]
fn the_format_is_frozen() {
    let bytes = encode(&record()).unwrap();
    assert_eq!(String::from_utf8(bytes.clone()).unwrap(), FROZEN_2);
    let stored = read(&bytes).unwrap();
    assert_eq!((stored.version, stored.crc32.as_str(), stored.record), (2, "853e3a73", record()));

    let memory = decode(FROZEN_2_1.as_bytes()).unwrap();
    let run = &memory.assignments.owners[&"run/db".parse().unwrap()];
    assert_eq!((run.mems().to_string().as_str(), memory.minor), ("0,2,10", 1));
    assert_eq!(String::from_utf8(encode(&memory).unwrap()).unwrap(), FROZEN_2_1);

    let isolated = decode(FROZEN_2_2.as_bytes()).unwrap();
    let run = &isolated.assignments.owners[&"run/db".parse().unwrap()];
    assert_eq!(
        (run.kind(), run.isolation, isolated.minor),
        (PartitionKind::Isolated, Isolation::Isolated, 2)
    );
    assert_eq!(String::from_utf8(encode(&isolated).unwrap()).unwrap(), FROZEN_2_2);

    let fenced = decode(FROZEN_2_3.as_bytes()).unwrap();
    let first = &fenced.first[&"machine.slice".parse().unwrap()];
    assert_eq!(
        (&first.fenced_for, fenced.minor),
        (&["run/db".parse().unwrap(), "cgroup/a/b".parse().unwrap()].into(), MINOR)
    );
    assert_eq!(String::from_utf8(encode(&fenced).unwrap()).unwrap(), FROZEN_2_3);
}

#[test]
fn version_1_migrates() {
    let stored = read(FROZEN_1.as_bytes()).unwrap();
    assert_eq!(stored.version, 1);
    let mut expected = record();
    expected.assignments.owners.remove(&"pod/1b4e28ba/app".parse().unwrap());
    (expected.containers, expected.first) = Default::default();
    expected.minor = MINOR;
    assert_eq!(stored.record, expected);

    let full = decode(&with_payload(1, FULL_1)).unwrap();
    let value = serde_json::to_value(&full).unwrap();
    // Everything that was there is there, by the same names; the rest is what version 1 did not know.
    let mut old: Value = serde_json::from_str(FULL_1).unwrap();
    for (key, v) in [
        ("version", json!(2)),
        ("minor", json!(MINOR)),
        ("strategy", json!("best")),
        ("containers", json!({})),
    ] {
        old[key] = v;
    }
    assert_eq!(value, old);
    assert_eq!(decode(&encode(&full).unwrap()).unwrap(), full);
    // Its order is the one of its fields.
    let sorted = serde_json::to_string(&serde_json::from_str::<Value>(FULL_1).unwrap()).unwrap();
    assert!(matches!(decode(&with_payload(1, &sorted)), Err(DecodeError::NotCanonical)));
    let unknown = FULL_1.replace(r#""version":1,"#, r#""version":1,"more":0,"#);
    assert!(matches!(decode(&with_payload(1, &unknown)), Err(DecodeError::Payload(_))));
}

#[test]
fn every_bit_flip_and_every_truncation_is_found() {
    for bytes in [FROZEN_1.as_bytes(), FROZEN_2.as_bytes()] {
        assert!(decode(bytes).is_ok());
        for i in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.to_vec();
                bad[i] ^= 1 << bit;
                let error = decode(&bad).expect_err("a flipped bit");
                assert!(!error.is_newer(), "byte {i} bit {bit} stops the start-up: {error}");
            }
            let error = decode(&bytes[..i]).expect_err("cut");
            assert!(!error.is_newer(), "cut at {i}");
        }
    }
}

fn with_payload(version: u32, payload: &str) -> Vec<u8> {
    envelope(&format!("{KIND}{version}"), &crc(payload.as_bytes()), payload)
}

/// The payload of the fixture, as a tree.
fn tree() -> Value {
    serde_json::to_value(record()).unwrap()
}

#[test]
fn refusals_say_why() {
    let text = FROZEN_2;
    let start = text.find(r#"{"assignments""#).unwrap();
    let payload = &text[start..text.len() - 2];
    let p = |from: &str, to: &str| {
        assert!(payload.contains(from), "{from}");
        with_payload(2, &payload.replace(from, to))
    };
    assert!(decode(&with_payload(2, payload)).is_ok());
    let sum = crc(payload.as_bytes());
    for (bytes, needle) in [
        (p("\"version\":2", "\"version\":3"), "payload version is 3"),
        (p(",\"version\":2", ""), "does not decode"),
        (p("\"epoch\"", "\"epoch\" "), "canonical"),
        (p("\"4-5\"", "\"5,4\""), "canonical"),
        (p("\"4-5\"", "\"x\""), "does not decode"),
        (p("\"epoch\":3,", "\"epoch\":3,\"epoch\":3,"), "does not decode"),
        (p("\"original\":\"4-7\"", "\"original\":null"), "canonical"),
        (p("\"version\":2", "\"version\":2,\"w\":1,\"w\":1"), "canonical"),
        // What is not an integer has more than one text.
        (p("\"version\":2", "\"version\":2,\"w\":1.50"), "canonical"),
        (with_payload(1, payload), "or not that of its payload"),
        (
            text.replace("checkpoint/2", "checkpoint/3").into_bytes(),
            "schema is \"truepin.checkpoint/3\", not",
        ),
        (text.replace("checkpoint/2", "checkpoint/02").into_bytes(), ", not"),
        (text.replace("checkpoint/2", "checkpoint/0").into_bytes(), ", not"),
        (with_payload(3, "{\"version\":3}"), "use the truepin that wrote it"),
        (b"{\"schema\":\"truepin.checkpoint/3\",\"crc64\":\"\"}".to_vec(), "use the truepin that wrote it"),
        (text.replace("truepin.checkpoint", "truepin.chockpoint").into_bytes(), ", not"),
        (text.replace(&sum, "00000000").into_bytes(), "the envelope says 00000000"),
        (text.replace(&sum, "0000000G").into_bytes(), "hexadecimal"),
        (text.replace(&sum, &sum.to_uppercase()).into_bytes(), "hexadecimal"),
        (text.trim_end().as_bytes().to_vec(), "canonical"),
        (text.replacen(':', ": ", 1).into_bytes(), "canonical"),
        (b"".to_vec(), "not a checkpoint envelope"),
        (vec![0; 4096], "not a checkpoint envelope"),
    ] {
        let error = decode(&bytes).unwrap_err().to_string();
        assert!(error.contains(needle), "{needle}: {error}");
    }
}

fn encoded(tree: &Value) -> Vec<u8> {
    with_payload(2, &serde_json::to_string(tree).unwrap())
}

#[test]
fn fields_of_a_newer_minor_version_come_back() {
    let mut newer = tree();
    newer["minor"] = json!(4);
    let more = json!({"z": [1, {"b": null, "a": -2}], "a": "é\u{7f}\n", "big": u64::MAX, "yes": true});
    let owner = "pod/1b4e28ba/app";
    newer["more"] = more.clone();
    newer["assignments"]["more"] = more.clone();
    newer["assignments"]["owners"][owner]["more"] = more.clone();
    newer["containers"]["c1"]["more"] = more.clone();
    newer["first"]["system.slice"]["more"] = more.clone();
    let bytes = encoded(&newer);
    let mut record = decode(&bytes).unwrap();
    assert_eq!(encode(&record).unwrap(), bytes);
    // Also when this build has changed something else.
    record.epoch += 1;
    record.assignments.owners.insert("run/new".parse().unwrap(), assignment("6", "n"));
    let again: Value = serde_json::to_value(decode(&encode(&record).unwrap()).unwrap()).unwrap();
    for (path, here) in [
        ("/more", true),
        ("/assignments/more", true),
        ("/assignments/owners/pod~11b4e28ba~1app/more", true),
        ("/containers/c1/more", true),
        ("/first/system.slice/more", true),
        ("/assignments/owners/run~1new/more", false),
    ] {
        assert_eq!(again.pointer(path), here.then_some(&more), "{path}");
    }
    assert_eq!(again["minor"], json!(4));
}

#[test]
fn a_newer_minor_version_that_cannot_be_kept_is_left_alone() {
    let owner = "pod/1b4e28ba/app";
    for minor in [MINOR, MINOR + 1] {
        for (what, value) in [("mode", json!("virtual")), ("cpus", json!(["4-5"])), ("reason", json!(null))] {
            let mut other = tree();
            other["minor"] = json!(minor);
            other["assignments"]["owners"][owner][what] = value;
            let error = decode(&encoded(&other)).unwrap_err();
            assert_eq!(error.is_newer(), minor > MINOR, "{what}: {error}");
        }
        let mut other = tree();
        other["minor"] = json!(minor);
        other["x"] = json!(1);
        // Not the one text of this content.
        let text = serde_json::to_string(&other).unwrap().replace("\"x\":1", "\"x\":1.0e0");
        assert_eq!(decode(&with_payload(2, &text)).unwrap_err().is_newer(), minor > MINOR);
    }
}

#[test]
fn a_reboot_clears_what_names_cgroups() {
    let before = record();
    let (same, none) = for_boot(before.clone(), &before.boot_id);
    assert_eq!((same, none), (before.clone(), None));
    let (after, reboot) = for_boot(before.clone(), "another");
    assert_eq!(reboot, Some(Reboot { containers: 2, first: 1 }));
    assert!(after.first.is_empty() && after.containers.is_empty());
    assert_eq!(after.assignments, before.assignments);
    assert_eq!(after.boot_id, "another");
}

#[test]
fn differences_are_named() {
    let (a, mut b) = (record(), record());
    assert_eq!(diff(&a, &b).unwrap(), []);
    b.epoch = 4;
    b.assignments.owners.remove(&"run/db".parse().unwrap());
    b.assignments.owners.get_mut(&"pod/1b4e28ba/app".parse().unwrap()).unwrap().cpus = "6".parse().unwrap();
    let changes = diff(&a, &b).unwrap();
    let short: Vec<(String, bool, bool)> =
        changes.iter().map(|c| (c.path.join(" "), c.from.is_some(), c.to.is_some())).collect();
    assert_eq!(
        short,
        [
            ("assignments owners pod/1b4e28ba/app cpus".to_owned(), true, true),
            ("assignments owners run/db".to_owned(), true, false),
            ("epoch".to_owned(), true, true),
        ]
    );
}
