//! `truepin import kubelet` and `truepin export kubelet` as a person runs them: files, exit codes, the way back.

#![expect(clippy::unwrap_used, reason = "a test's helpers: what cannot be set up fails the test")]

use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path, process::Command};
use tempfile::TempDir;
use truepin::{
    assignments::{Assignment, Assignments, FirstValues, Mode},
    checkpoint::{self, Checkpoint},
    containers::ContainerMap,
    kubelet::{self, Exported},
    request::Isolation,
};

const UID: &str = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";

/// A machine of eight CPUs without any grouping, and the kubelet's directory.
struct Node {
    dir: TempDir,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cpus = dir.path().join("machine/sys/devices/system/cpu");
        for cpu in 0..8 {
            fs::create_dir_all(cpus.join(format!("cpu{cpu}"))).unwrap();
        }
        fs::write(cpus.join("online"), "0-7\n").unwrap();
        fs::create_dir(dir.path().join("kubelet")).unwrap();
        Self { dir }
    }

    fn file(&self, name: &str, text: &str) {
        fs::write(self.dir.path().join(name), text).unwrap();
    }

    /// Standard output, standard error and exit code.
    fn run(&self, args: &[&str]) -> (String, String, i32) {
        let out =
            Command::new(env!("CARGO_BIN_EXE_truepin")).args(args).current_dir(self.dir.path()).output();
        let out = out.unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(out.stdout), text(out.stderr), out.status.code().unwrap())
    }

    fn import(&self, more: &[&str]) -> (Value, String, i32) {
        let args = ["import", "kubelet", "--dir", "kubelet", "--root", "machine", "--dry-run", "-o", "json"];
        let (out, err, code) = self.run(&[&args, more].concat());
        (serde_json::from_str(&out).unwrap_or(Value::Null), err, code)
    }
}

fn names(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let named = |e: fs::DirEntry| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap());
    entries.map(named).collect()
}

fn sound() -> String {
    let entries = BTreeMap::from([(
        UID.to_owned(),
        BTreeMap::from([("app".to_owned(), kubelet::CpuRanges::parse("2-4").unwrap())]),
    )]);
    let default = kubelet::CpuRanges::parse("0-1,5-7").unwrap();
    let state = kubelet::State { default, entries, ..kubelet::State::default() };
    kubelet::export(&state, "static", Exported::V2)
}

#[test]
fn a_sound_file_is_importable_and_nothing_is_written() {
    let node = Node::new();
    node.file("kubelet/cpu_manager_state", &sound());
    let before = names(&node.dir.path().join("kubelet"));
    let (doc, err, code) = node.import(&["--reserved", "0-1", "--policy", "static"]);
    assert_eq!(code, 0, "{err}{doc}");
    assert_eq!(doc["schema"], "truepin.import/1");
    assert_eq!((&doc["kubelet"]["load"], &doc["kubelet"]["start"]), (&"ok".into(), &"ok".into()));
    assert_eq!(doc["kubelet"]["as"][UID]["app"], "2-4");
    assert_eq!(doc["kubelet"]["def"], "0-1,5-7");
    assert_eq!(doc["truepin"]["importable"], true);
    assert_eq!(doc["truepin"]["owners"][0]["owner"], format!("pod/{UID}/app"));
    assert_eq!(names(&node.dir.path().join("kubelet")), before);

    // Nobody can tell whether it starts without the reservation.
    let (doc, _, code) = node.import(&[]);
    assert_eq!((code, &doc["kubelet"]["start"]), (0, &Value::Null));
    // A recorded machine's sets are judged, not taken over; taking over is the agent's.
    let (out, _, code) = node.run(&["import", "kubelet", "--dir", "kubelet", "--root", "machine"]);
    assert!(code == 0 && out.contains("importable"), "{code} {out}");
    let args = ["--socket", "none.sock", "import", "kubelet", "--dir", "kubelet"];
    let out = Command::new(env!("CARGO_BIN_EXE_truepin"))
        .args(args)
        .current_dir(node.dir.path())
        .env("TRUEPIN_SYSFS_ROOT", node.dir.path().join("machine"))
        .output()
        .unwrap();
    let err = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(3) && err.contains("no agent answers"), "{err}");
    // And for people.
    let args = ["import", "kubelet", "--dir", "kubelet", "--root", "machine", "--dry-run"];
    let (out, _, code) = node.run(&args);
    assert!(code == 0 && out.contains("truepin: importable, without findings"), "{out}");
}

#[test]
fn nothing_there_is_no_finding() {
    let node = Node::new();
    let (doc, _, code) = node.import(&["--reserved", "0"]);
    assert_eq!((code, &doc["truepin"]["importable"]), (0, &true.into()));
    assert_eq!((&doc["kubelet"]["def"], &doc["kubelet"]["def_started"]), (&"".into(), &"0-7".into()));
}

#[test]
fn findings_are_1_with_place_and_value() {
    let node = Node::new();
    node.file("kubelet/cpu_manager_state", &sound().replace("\"2-4\"", "\"2-5\""));
    let (doc, _, code) = node.import(&["--reserved", "0-1"]);
    assert_eq!((code, &doc["kubelet"]["load"]), (1, &"err".into()));
    let finding = &doc["truepin"]["findings"][0];
    assert_eq!((&finding["code"], &finding["key"]), (&"checksum".into(), &"checksum".into()));
    assert_eq!(finding["path"], "kubelet/cpu_manager_state");
    assert_eq!(doc["truepin"]["importable"], false);
    // The kubelet minds the policy, an import says so.
    node.file("kubelet/cpu_manager_state", &sound());
    let (doc, _, code) = node.import(&["--reserved", "0-1", "--policy", "none"]);
    assert_eq!((code, &doc["truepin"]["importable"]), (1, &true.into()));
    // Strict reservation, and the pool holds what is reserved.
    let (doc, _, code) =
        node.import(&["--reserved", "0-1", "--options", "full-pcpus-only,strict-cpu-reservation"]);
    assert_eq!((code, &doc["kubelet"]["start"]), (1, &"err".into()));
}

#[test]
fn a_memory_file_that_the_kubelet_refuses_keeps_it_from_loading() {
    let node = Node::new();
    node.file("kubelet/cpu_manager_state", &sound());
    node.file("kubelet/memory_manager_state", r#"{"policyName":"Static","machineState":{},"checksum":7}"#);
    let (doc, _, code) = node.import(&["--policy", "static", "--policy", "Static"]);
    assert_eq!((code, &doc["kubelet"]["load"], &doc["files"][0]["load"]), (1, &"err".into(), &"ok".into()));
    assert_eq!(doc["truepin"]["findings"][0]["path"], "kubelet/memory_manager_state");
}

#[test]
fn old_files_need_the_containers() {
    let node = Node::new();
    // Version 1 with a checksum of 0, as its first writer left it.
    let id = "a".repeat(64);
    let file = format!(
        r#"{{"policyName":"static","defaultCpuSet":"0-1,5-7","entries":{{"{id}":"2-4"}},"checksum":0}}"#
    );
    node.file("kubelet/cpu_manager_state", &file);
    let (doc, _, code) = node.import(&[]);
    assert_eq!((code, &doc["truepin"]["findings"][0]["code"]), (1, &"unresolved-container".into()));
    node.file("containers.json", &format!(r#"[["{id}","{UID}","app"]]"#));
    let (doc, _, code) = node.import(&["--containers", "containers.json"]);
    assert_eq!((code, &doc["truepin"]["notes"][0]["code"]), (0, &"checksum-zero".into()));
    assert_eq!(doc["truepin"]["owners"][0]["owner"], format!("pod/{UID}/app"));
}

#[test]
fn unreadable_is_3_and_usage_is_2() {
    let node = Node::new();
    fs::create_dir(node.dir.path().join("kubelet/cpu_manager_state")).unwrap();
    assert_eq!(node.import(&[]).2, 3);
    fs::remove_dir(node.dir.path().join("kubelet/cpu_manager_state")).unwrap();
    node.file("containers.json", "{}");
    for (code, args) in [
        (2, ["--containers", "containers.json"]),
        (3, ["--containers", "gone.json"]),
        (2, ["--reserved", "3-1"]),
        (2, ["--options", "strict"]),
        (2, ["--policy", "statik"]),
    ] {
        let (_, err, got) = node.import(&args);
        assert_eq!(got, code, "{args:?}: {err}");
        assert!(!err.is_empty(), "{args:?}");
    }
    let at = |dir, root| node.run(&["import", "kubelet", "--dry-run", "--dir", dir, "--root", root]).2;
    assert_eq!((at("gone", "machine"), at("kubelet", "gone")), (3, 3));
}

#[test]
fn an_export_is_what_the_kubelet_starts_from() {
    let node = Node::new();
    let mut assignments = Assignments { reserved: "0-1".parse().unwrap(), ..Assignments::default() };
    for (owner, cpus) in [(format!("pod/{UID}/app"), "2-4"), ("run/batch".into(), "5")] {
        let assignment = Assignment {
            cpus: cpus.parse().unwrap(),
            cgroup: format!("truepin.slice/{}", cpus.len()).parse().unwrap(),
            created: true,
            mode: Mode::Partition,
            isolation: Isolation::Auto,
            generation: 1,
            reason: String::new(),
            memory: std::collections::BTreeMap::new(),
            original: None,
            extra: checkpoint::Extra::new(),
        };
        assignments.owners.insert(owner.parse().unwrap(), assignment);
    }
    let record = Checkpoint {
        version: checkpoint::VERSION,
        minor: checkpoint::MINOR,
        strategy: "best".into(),
        containers: ContainerMap::new(),
        extra: checkpoint::Extra::new(),
        epoch: 1,
        boot_id: "5f1c3f0e-0000-4000-8000-000000000000".into(),
        topology: "t".into(),
        assignments,
        first: FirstValues::default(),
    };
    fs::write(node.dir.path().join("record.json"), checkpoint::encode(&record).unwrap()).unwrap();
    let export = ["export", "kubelet", "--state", "record.json", "--root", "machine"];
    let (out, err, code) = node.run(&export);
    assert_eq!((out, code), (sound(), 0), "{err}");
    assert!(err.contains("CPUs 5 are held by owners that are no containers"), "{err}");
    for (version, gate) in [("v2", false), ("v3", true), ("v4", false)] {
        let to = ["--version", version, "--to", "kubelet/cpu_manager_state"];
        let (_, err, code) = node.run(&[&export[..], &to[..]].concat());
        assert_eq!(code, 0, "{version}: {err}");
        let gate: &[&str] = if gate { &["--pod-level-gate"] } else { &[] };
        let (doc, _, code) = node.import(&[&["--reserved", "0-1", "--policy", "static"], gate].concat());
        assert_eq!((code, &doc["kubelet"]["start"]), (0, &"ok".into()), "{version}: {doc}");
        assert_eq!(doc["files"][0]["format"], version);
        // Never over a file that is there.
        assert_eq!(node.run(&[&export[..], &to[..]].concat()).2, 3);
        fs::remove_file(node.dir.path().join("kubelet/cpu_manager_state")).unwrap();
    }
    fs::write(node.dir.path().join("machine/sys/devices/system/cpu/online"), "0-3\n").unwrap();
    let (_, err, code) = node.run(&export);
    assert!(code == 1 && err.contains("would not start"), "{code} {err}");
    assert_eq!(node.run(&["export", "kubelet", "--state", "gone.json", "--root", "machine"]).2, 3);
}
