//! Files as kubelets wrote them, and what becomes of them.

mod damage;
mod table;

use super::dump::{checksum, encode};
use super::layout::{CPU_NAME, CPU_V1, Key, MEMORY_NAME, MEMORY_V1, MEMORY_V2, Type, Value};
use super::*;
use crate::{CpuSet, Owner};
use std::collections::BTreeMap;

/// A machine of 16 CPUs, two of them reserved.
pub(super) fn machine() -> Machine {
    Machine { online: list("0-15"), reserved: list("0-1"), strict: false }
}

pub(super) fn list(text: &str) -> CpuRanges {
    CpuRanges::parse(text).unwrap()
}

pub(super) const DB: &str = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";
pub(super) const WEB: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";

/// Two pods with three containers; the web pod has a set of its own.
pub(super) fn state() -> State {
    let containers = |c: &[(&str, &str)]| c.iter().map(|(n, l)| ((*n).to_owned(), list(l))).collect();
    State {
        default: list("0-1,9-15"),
        entries: BTreeMap::from([
            (DB.into(), containers(&[("db", "2-5"), ("log", "6")])),
            (WEB.into(), containers(&[("web", "7-8")])),
        ]),
        pods: BTreeMap::from([(WEB.into(), list("7-8"))]),
    }
}

/// Container ids of [`state`], as a runtime gives them.
pub(super) fn running() -> Containers {
    let id = |n: char| n.to_string().repeat(64);
    let container = |n, pod: &str, name: &str| (id(n), (pod.to_owned(), name.to_owned()));
    Containers::from([container('a', DB, "db"), container('b', DB, "log"), container('c', WEB, "web")])
}

/// A file by container id, with the checksum that kubelets before 1.18 made.
pub(super) fn v1(policy: &str, default: &str, entries: &[(&str, &str)]) -> String {
    let entry = |(id, cpus): &(&str, &str)| (Key::Text((*id).into()), Value::Text((*cpus).into()));
    let mut value = Value::fresh(&CPU_V1);
    *value.field_mut(&CPU_V1, "PolicyName").unwrap() = Value::Text(policy.into());
    *value.field_mut(&CPU_V1, "DefaultCPUSet").unwrap() = Value::Text(default.into());
    *value.field_mut(&CPU_V1, "Entries").unwrap() = Value::Map(Some(entries.iter().map(entry).collect()));
    let sum = checksum(&CPU_V1, CPU_NAME, &value);
    *value.field_mut(&CPU_V1, "Checksum").unwrap() = Value::Uint(sum.into());
    encode(&Type::Struct(&CPU_V1), &value)
}

pub(super) fn v1_of_state() -> String {
    let ids: Vec<String> = running().into_keys().collect();
    v1("static", "0-1,9-15", &[(&ids[0], "2-5"), (&ids[1], "6"), (&ids[2], "7-8")])
}

/// A memory manager's file without checksum, to be summed.
const MEMORY: &str = concat!(
    r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":1,"memoryMap":{"memory":{"total":8589934592,"#,
    r#""systemReserved":536870912,"allocatable":8053063680,"reserved":1073741824,"free":6979321856}},"cells":[0]},"1":"#,
    r#"{"numberOfAssignments":0,"memoryMap":{"memory":{"total":8589934592,"systemReserved":0,"allocatable":8589934592,"#,
    r#""reserved":0,"free":8589934592}},"cells":[1]}},"entries":{"1b4e28ba-2fa1-11d2-883f-0016d3cca427":{"db":[{"#,
    r#""numaAffinity":[0],"type":"memory","size":1073741824}]}},"checksum":0}"#
);

/// The memory manager's file as 1.21 to 1.36 write it, or with the gate.
pub(super) fn memory(pod_level: bool) -> String {
    let layout = if pod_level { &MEMORY_V2 } else { &MEMORY_V1 };
    let mut value = Value::fresh(layout);
    super::json::decode(MEMORY.as_bytes(), layout, &mut value).result.unwrap();
    let sum = checksum(layout, MEMORY_NAME, &value);
    *value.field_mut(layout, "Checksum").unwrap() = Value::Uint(sum.into());
    encode(&Type::Struct(layout), &value)
}

pub(super) fn inspected(file: &str) -> Inspection {
    let (machine, containers) = (machine(), running());
    let context = Context { policy: Some("static"), containers: &containers, machine: Some(&machine) };
    inspect(Some(file.as_bytes()), context)
}

pub(super) fn codes(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().map(|f| f.problem.code()).collect()
}

/// Files that people have quoted in public documentation and reports, of kubelets from before 1.18 to 1.34, byte for
/// byte. No change here may alter what becomes of one of them.
const QUOTED: [(&str, &str); 12] = [
    ("v1", r#"{"policyName":"none","defaultCpuSet":"","checksum":3242152201}"#),
    ("v2", r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#),
    ("v2", r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":611748604}"#),
    ("v2", r#"{"policyName":"static","defaultCpuSet":"0-1","checksum":1636926438}"#),
    ("v2", r#"{"policyName":"static","defaultCpuSet":"0-19","checksum":31209605}"#),
    ("v2", r#"{"policyName":"static","defaultCpuSet":"0-79","checksum":1241370203}"#),
    ("v2", r#"{"policyName":"static","defaultCpuSet":"2-15,17-31,34-47,49-63","checksum":4141502832}"#),
    (
        "v2",
        r#"{"policyName":"static","defaultCpuSet":"0,4-27","entries":{"39b37746-7f5e-4064-b8e1-eebd2bfaa003":{"app":"1-3"}},"checksum":3300516549}"#,
    ),
    (
        "v2",
        r#"{"policyName":"static","defaultCpuSet":"0,2-12,14-23","entries":{"235148fe-393f-47a8-a17d-bd55bc1a836b":{"cgroup1-0":"1,13"}},"checksum":1552716370}"#,
    ),
    (
        "v2",
        r#"{"policyName":"static","defaultCpuSet":"0,10-15,25-31","entries":{"777870b5-c64f-42f5-9296-688b9dc212ba":{"container-1":"16-24"},"fb15e10a-b6a5-4aaa-8fcd-76c1aa64e6fd":{"container-1":"1-9"}},"checksum":318470969}"#,
    ),
    (
        "v2",
        r#"{"policyName":"static","defaultCpuSet":"0-1,6-13,18-23","entries":{"28c11c89-3493-4972-bb67-7090b9d75e0d":{"mytestclient":"2-3,14-15","mytestclient2":"4-5,16-17"}},"checksum":1684933537}"#,
    ),
    (
        "v2",
        r#"{"policyName":"static","defaultCpuSet":"0-1,6-11","entries":{"4aec46af-22b7-4e26-babb-d15383ac9151":{"mysqld":"2-3"},"60008d73-6f6f-4467-96c5-cd0a1eeadf23":{"mysqld2":"4-5"}},"checksum":2764424633}"#,
    ),
];

#[test]
fn files_in_the_field_are_sound_and_their_bytes_are_ours() {
    let none = Containers::new();
    for (version, file) in QUOTED {
        let context = Context { policy: None, containers: &none, machine: None };
        let found = inspect(Some(file.as_bytes()), context);
        assert_eq!(found.format.map(|f| f.to_string()).as_deref(), Some(version), "{file}");
        assert!(found.importable && found.findings.is_empty() && found.notes.is_empty(), "{found:?}");
        for pod_level in [false, true] {
            let setup = Setup { policy: &found.policy, pod_level, containers: &none };
            let state = load(Some(file.as_bytes()), setup).unwrap();
            if version == "v2" {
                assert_eq!(export(&state, &found.policy, Exported::V2), file);
            }
        }
    }
}

/// Frozen, one for each layout, with checksums worked out apart from this program: a change of these bytes, or of what is read from them, is
/// a change of history.
#[test]
fn the_formats_are_frozen() {
    let state = state();
    assert_eq!(
        v1_of_state(),
        concat!(
            r#"{"policyName":"static","defaultCpuSet":"0-1,9-15","entries":{"#,
            r#""aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":"2-5","#,
            r#""bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb":"6","#,
            r#""cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc":"7-8"},"checksum":864275863}"#,
        )
    );
    let entries = concat!(
        r#"{"policyName":"static","defaultCpuSet":"0-1,9-15","entries":{"1b4e28ba-2fa1-11d2-883f-0016d3cca427":"#,
        r#"{"db":"2-5","log":"6"},"6ba7b810-9dad-11d1-80b4-00c04fd430c8":{"web":"7-8"}}"#,
    );
    let pods = r#","podEntries":{"6ba7b810-9dad-11d1-80b4-00c04fd430c8":{"cpuSet":"7-8"}}"#;
    assert_eq!(export(&state, "static", Exported::V2), format!(r#"{entries},"checksum":2126662439}}"#));
    assert_eq!(export(&state, "static", Exported::V3), format!(r#"{entries}{pods},"checksum":2286532135}}"#));
    let data = format!("{entries}{pods}}}").replace('"', "\\\"");
    assert_eq!(
        export(&state, "static", Exported::V4),
        format!(r#"{entries},"checksum":2126662439,"data":"{data}","dataChecksum":1310037712}}"#)
    );
    let sum = |file: String| file.rsplit_once(':').unwrap().1.to_owned();
    assert_eq!((sum(memory(false)), sum(memory(true))), ("2784678231}".into(), "3613883966}".into()));
}

/// What broke every upgrade to 1.18: version 1 was read by it as version 2, under another type's name, and "the checkpoint is
/// corrupted".
#[test]
fn a_v1_file_whose_checksum_was_made_by_a_pre_1_18_kubelet() {
    let file = v1_of_state();
    let sum: u32 = file.rsplit_once(':').unwrap().1.trim_end_matches('}').parse().unwrap();
    // The name that 1.18's reader of old files had; nobody ever wrote a checksum over it.
    let (_, renamed) = super::load::get(file.as_bytes(), &CPU_V1, &["state.CPUManagerCheckpointV1"]);
    assert!(matches!(renamed, Err(LoadError::Checksum { stored, .. }) if stored == u64::from(sum)));
    let containers = running();
    for pod_level in [false, true] {
        let setup = Setup { policy: "static", pod_level, containers: &containers };
        let loaded = load(Some(file.as_bytes()), setup).unwrap();
        assert_eq!((loaded.default, loaded.entries), (state().default, state().entries));
    }
    let found = inspected(&file);
    assert_eq!((found.format, found.importable), (Some(Format::V1), true));
    assert!(found.findings.is_empty() && found.notes.is_empty(), "{found:?}");
    // One CPU more in the file, and the checksum no longer vouches for it.
    let edited = file.replace("\"2-5\"", "\"2-6\"");
    assert_eq!(codes(&inspected(&edited).findings), ["checksum"]);
}

/// After a restart, names come from the containers that already run; one that is gone is a finding, not the end.
#[test]
fn a_v1_file_with_initial_containers_from_the_map() {
    let mut containers = running();
    let file = v1_of_state();
    let look = |containers: &Containers| {
        let machine = machine();
        let context = Context { policy: Some("static"), containers, machine: Some(&machine) };
        let found = inspect(Some(file.as_bytes()), context);
        let adoption = adoptions(&found, containers);
        let owners: Vec<String> = adoption.owners.iter().map(|(o, c)| format!("{o} {c}")).collect();
        (codes(&found.findings), found.importable, owners)
    };
    let (db, log, web) =
        (format!("pod/{DB}/db 2-5"), format!("pod/{DB}/log 6"), format!("pod/{WEB}/web 7-8"));
    assert_eq!(look(&containers), (vec![], true, vec![db, log.clone(), web.clone()]));
    containers.remove(&"a".repeat(64));
    assert_eq!(look(&containers), (vec!["unresolved-container"], true, vec![log, web]));
    let setup = Setup { policy: "static", pod_level: false, containers: &containers };
    assert_eq!(load(Some(file.as_bytes()), setup), Err(LoadError::Container { id: "a".repeat(64) }));
}

#[test]
fn there_and_back_again() {
    let (machine, containers) = (machine(), running());
    for (version, pod_level) in [(Exported::V2, false), (Exported::V3, true), (Exported::V4, false)] {
        let mut before = state();
        if version == Exported::V2 {
            before.pods.clear();
        }
        let file = export(&before, "static", version);
        let found = inspected(&file);
        assert!(found.importable && found.findings.is_empty() && found.notes.is_empty(), "{found:?}");
        // By the inspection: all of it.
        assert_eq!(export(&found.state(), "static", version), file);
        // By the record: owners alone; the pool is derived, pods' sets are not kept.
        let adoption = adoptions(&found, &containers);
        let (again, others) = State::of(adoption.owners.iter().map(|(o, c)| (o, c)), &machine);
        assert!(others.is_empty() && adoption.sharing.is_empty());
        before.pods.clear();
        assert_eq!(again, before);
        let back = export(&again, "static", version);
        assert_eq!(back == file, version == Exported::V2, "only pods' sets are lost");
        // And the kubelet starts from it.
        let setup = Setup { policy: "static", pod_level, containers: &containers };
        let loaded = load(Some(back.as_bytes()), setup).unwrap();
        assert_eq!(start(&loaded, setup, &machine), Ok(again));
    }
}

#[test]
fn an_export_starts_under_strict_reservation_too_and_gives_others_cpus_back() {
    let strict = Machine { strict: true, ..machine() };
    let owner = |text: &str| text.parse::<Owner>().unwrap();
    let set = |text: &str| text.parse::<CpuSet>().unwrap();
    let held = [(owner(&format!("pod/{DB}/db")), set("2-5")), (owner("run/batch"), set("6-7"))];
    let (state, others) = State::of(held.iter().map(|(o, c)| (o, c)), &strict);
    assert_eq!((state.default.to_string(), others), ("6-15".into(), set("6-7")));
    let none = Containers::new();
    let setup = Setup { policy: "static", pod_level: false, containers: &none };
    let file = export(&state, "static", Exported::V2);
    assert_eq!(start(&load(Some(file.as_bytes()), setup).unwrap(), setup, &strict), Ok(state));
}

#[test]
fn containers_of_a_pod_may_share_and_pods_may_not() {
    let entry = |n: &str, l: &str| (n.to_owned(), list(l));
    let mut shared = State { default: list("0-1,6-15"), ..State::default() };
    // An init container whose CPUs the app uses again, and one whose CPUs leaked.
    let pod = BTreeMap::from([entry("app", "2-4"), entry("init", "2-3"), entry("leaky", "4-5")]);
    shared.entries.insert(DB.into(), pod);
    let found = inspected(&export(&shared, "static", Exported::V2));
    assert_eq!((codes(&found.findings), found.importable), (vec![], true));
    assert_eq!(codes(&found.notes), ["shared-in-pod"; 3]);
    let adoption = adoptions(&found, &Containers::new());
    let show = |o: &Owner, c: &CpuSet| format!("{o} {c}").replace(DB, "u");
    let owners: Vec<_> = adoption.owners.iter().map(|(o, c)| show(o, c)).collect();
    assert_eq!(owners, ["pod/u/app 2-4", "pod/u/leaky 5"]);
    let sharing: Vec<_> = adoption.sharing.iter().map(|(o, c, _)| show(o, c)).collect();
    assert_eq!(sharing, ["pod/u/init 2-3", "pod/u/leaky 4"]);
    // What runs comes first.
    let runs = Containers::from([("x".into(), (DB.into(), "leaky".into()))]);
    let owners: Vec<_> = adoptions(&found, &runs).owners.iter().map(|(o, c)| show(o, c)).collect();
    assert_eq!(owners, ["pod/u/app 2-3", "pod/u/leaky 4-5"]);

    shared.entries.insert(WEB.into(), BTreeMap::from([entry("web", "5-6"), entry("other", "7")]));
    shared.default = list("0-1,8-15");
    let found = inspected(&export(&shared, "static", Exported::V2));
    assert_eq!(codes(&found.findings), ["shared-between-pods", "shared-between-pods"]);
    assert_eq!(
        found.findings[1].to_string(),
        format!("entries.{WEB}.web: \"5-6\": CPUs 5 are held by pod {DB} too")
    );
    let usable: Vec<_> = found.entries.iter().filter(|e| e.usable).map(|e| e.container.as_str()).collect();
    assert_eq!(usable, ["app", "init", "other"]);
}

#[test]
fn v4_is_read_in_both_shapes_and_its_halves_are_compared() {
    let file = export(&state(), "static", Exported::V4);
    let found = inspected(&file);
    assert_eq!((found.format, &found.pods), (Some(Format::V4), &state().pods));
    // The other shape that was proposed: no checksum outside, pods' sets in both.
    let sum = file.split("\"checksum\":").nth(1).unwrap().split(',').next().unwrap();
    let pods = format!("\"podEntries\":{{\"{WEB}\":{{\"cpuSet\":\"7-8\"}}}},\"checksum\":0");
    let embedded = file.replacen(&format!("\"checksum\":{sum}"), &pods, 1);
    let found = inspected(&embedded);
    assert_eq!((found.format, codes(&found.findings)), (Some(Format::V4), vec![]));
    assert_eq!(codes(&found.notes), ["checksum-zero"]);
    // The halves differ: 1.37 believes the inner one.
    let differs = embedded.replacen("\"db\":\"2-5\"", "\"db\":\"2-4\"", 1);
    let found = inspected(&differs);
    assert_eq!((codes(&found.findings), found.importable), (vec!["data-differs"], true));
    assert_eq!(found.entries[0].cpus, list("2-5"));
    // The inner one is damaged: the outer one stands if something vouches for it.
    let damage = |file: &str| file.replacen("\\\"2-5\\\"", "\\\"2-4\\\"", 1);
    let found = inspected(&damage(&file));
    assert_eq!((codes(&found.findings), found.format), (vec!["checksum"], Some(Format::V2)));
    assert!(!inspected(&damage(&embedded)).importable);
    // One of the two keys alone.
    let half = file.replacen("\"dataChecksum\"", "\"dataChecksun\"", 1);
    assert_eq!(codes(&inspected(&half).findings), ["unknown-key", "absent-key", "checksum"]);
}

#[test]
fn memory_files() {
    let nodes: crate::NodeSet = "0-1".parse().unwrap();
    for (pod_level, version) in [(false, "v1"), (true, "v2")] {
        let file = memory(pod_level);
        let found = inspect_memory(Some(file.as_bytes()), Some("Static"), Some(&nodes));
        assert_eq!((found.format, found.importable), (Some(version), true));
        assert!(found.findings.is_empty() && found.notes.is_empty(), "{found:?}");
        assert_eq!(found.blocks[0].nodes.to_string(), "0");
        assert_eq!(load_memory(Some(file.as_bytes()), "Static", pod_level), Ok(()));
        assert!(load_memory(Some(file.as_bytes()), "None", pod_level).is_err());
        let wrong = file.replace("\"size\":1073741824", "\"size\":1073741825");
        assert!(load_memory(Some(wrong.as_bytes()), "Static", pod_level).is_err());
        let found = inspect_memory(Some(wrong.as_bytes()), Some("Static"), Some(&nodes));
        assert_eq!((codes(&found.findings), found.importable), (vec!["checksum"], false));
    }
    // Written with the gate, read without it.
    assert!(load_memory(Some(memory(true).as_bytes()), "Static", false).is_err());
    assert!(load_memory(Some(memory(false).as_bytes()), "Static", true).is_ok());
    let one: crate::NodeSet = "1".parse().unwrap();
    let found = inspect_memory(Some(memory(false).as_bytes()), None, Some(&one));
    assert_eq!(codes(&found.findings), ["node-not-on-machine"]);
    assert_eq!(load_memory(None, "Static", false), Ok(()));
    let null = br#"{"policyName":"Static","machineState":{"0":{"memoryMap":{"memory":null}}},"checksum":0}"#;
    assert!(matches!(load_memory(Some(null), "Static", false), Err(LoadError::Panic { .. })));
}

#[test]
fn lists_of_containers() {
    let good = parse_containers(r#"[["id","uid","app"],["id","uid","app"],["i2","uid","b"]]"#).unwrap();
    assert_eq!(good.len(), 2);
    for bad in ["", "{}", r#"[["id","uid"]]"#, r#"[["id","uid","a"],["id","uid","b"]]"#, r#"[["id",1,"a"]]"#]
    {
        assert!(parse_containers(bad).is_err(), "{bad}");
    }
}
