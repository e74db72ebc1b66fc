//! Pods, and a kubelet that was here before, on a copied cgroup tree.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::{Agent, Machine, is_root, wait};
use std::{fs, process::Stdio};

#[test]
fn pods_before_and_after_their_containers() {
    if !is_root("pods_before_and_after_their_containers") {
        return;
    }
    let m = Machine::new();
    let agent = m.agent("reserved = \"0-1\"\ntick = \"200ms\"");
    let c = |name: &str| format!(r#"{{"n":"{name}","req":2000,"lim":2000,"mreq":64,"mlim":64}}"#);
    fs::write(m.path("pod.json"), format!(r#"{{"uid":"u-1","app":[{},{}]}}"#, c("db"), c("web"))).unwrap();
    let pod = m.path("pod.json");
    let pod = pod.to_str().unwrap();
    for _ in 0..2 {
        let (code, doc) = m.json(&["admit", pod]);
        assert_eq!((code, doc["schema"].as_str()), (0, Some("truepin.pod/1")), "{doc}");
        let sets: Vec<_> =
            doc["owners"].as_array().unwrap().iter().map(|o| o["cpus"].as_str().unwrap()).collect();
        assert_eq!(sets, ["2-3", "4-5"]);
    }
    let (_, list) = m.json(&["list"]);
    assert!(
        list["owners"][0]["verdict_reason"].as_str().unwrap().contains("waits for its container"),
        "{list}"
    );
    // The runtime makes one container and tells; of the other the agent finds out.
    let make = |id: &str, name: Option<&str>| {
        m.container("u-1", id);
        if let Some(name) = name {
            let (code, noted) = m.json(&["container-created", id, "u-1", name]);
            assert_eq!((code, noted["cpus"].as_str()), (0, Some("2-3")), "{noted}");
        }
    };
    let (db, web) = ("a".repeat(64), "b".repeat(64));
    make(&db, Some("db"));
    let partition = |id: &str| m.file(&format!("kubepods/podu-1/{id}"), "cpuset.cpus.partition");
    assert_eq!(partition(&db), "root");
    // Nobody can say whose the second is, until somebody does.
    make(&web, None);
    wait("the finding", || m.json(&["status"]).1["findings"].to_string().contains(&web));
    drop(agent);
    fs::write(m.path("names.json"), format!(r#"[["{web}","u-1","web"]]"#)).unwrap();
    fs::write(m.path("config.toml"), "reserved = \"0-1\"\ntick = \"200ms\"").unwrap();
    let names = m.path("names.json");
    let log = fs::File::options().append(true).open(m.path("log")).unwrap();
    let args = ["agent", "--containers", names.to_str().unwrap()];
    let child = m.command(&args).stdin(Stdio::null()).stderr(log).spawn().unwrap();
    let _agent = Agent(child);
    wait("the second container's partition", || partition(&web) == "root");
    let (code, released) = m.json(&["remove", "u-1"]);
    assert_eq!((code, released["owners"].as_array().map(Vec::len)), (0, Some(2)), "{released}");
    assert_eq!((partition(&db), partition(&web)), ("member".into(), "member".into()));
    assert_eq!(m.json(&["remove", "u-1"]).1["owners"].as_array().map(Vec::len), Some(0));
    let bad = m.run(&["admit", "/nonexistent"]);
    assert_eq!(bad.status.code(), Some(3));
    fs::write(m.path("pod.json"), "{}").unwrap();
    assert_eq!(m.run(&["admit", pod]).status.code(), Some(2));
}

#[test]
fn a_kubelets_assignments_are_taken_over() {
    if !is_root("a_kubelets_assignments_are_taken_over") {
        return;
    }
    let m = Machine::new();
    let kubelet = m.path("kubelet");
    fs::create_dir(&kubelet).unwrap();
    let state = |entries: &str| {
        // A checksum of 0 vouches for nothing and is accepted, with a note.
        format!(
            r#"{{"policyName":"static","defaultCpuSet":"0-1,6-7","entries":{{"u-1":{entries}}},"checksum":0}}"#
        )
    };
    fs::write(kubelet.join("cpu_manager_state"), state(r#"{"a":"2-3","b":"4-5"}"#)).unwrap();
    let _agent = m.agent("reserved = \"0-1\"");
    let dir = kubelet.to_str().unwrap();
    for _ in 0..2 {
        let (code, doc) = m.json(&["import", "kubelet", "--dir", dir]);
        assert_eq!((code, doc["owners"].as_array().map(Vec::len)), (0, Some(2)), "{doc}");
    }
    let (_, list) = m.json(&["list"]);
    let sets: Vec<_> =
        list["owners"].as_array().unwrap().iter().map(|o| format!("{} {}", o["owner"], o["cpus"])).collect();
    assert_eq!(sets, ["\"pod/u-1/a\" \"2-3\"", "\"pod/u-1/b\" \"4-5\""]);
    // And back.
    let back = m.run(&["export", "kubelet"]);
    let text = String::from_utf8(back.stdout).unwrap();
    assert!(back.status.success() && text.contains(r#""u-1":{"a":"2-3","b":"4-5"}"#), "{text}");
    assert_eq!(m.run(&["remove", "u-1"]).status.code(), Some(0));
    // Two containers on one CPU: nothing without asking, then what stands.
    fs::write(
        kubelet.join("cpu_manager_state"),
        r#"{"policyName":"static","defaultCpuSet":"0-1,6-7","entries":{"u-1":{"a":"2-3"},"u-2":{"b":"4"},"u-3":{"c":"4"}},"checksum":0}"#,
    )
    .unwrap();
    let (code, doc) = m.json(&["import", "kubelet", "--dir", dir]);
    assert_eq!(code, 1, "{doc}");
    assert_eq!(m.json(&["list"]).1["owners"].as_array().map(Vec::len), Some(0));
    let (code, doc) = m.json(&["import", "kubelet", "--dir", dir, "--good-part"]);
    assert_eq!((code, doc["owners"].as_array().map(Vec::len)), (1, Some(1)), "{doc}");
}

#[test]
fn the_kubelets_choices_and_pods_together() {
    if !is_root("the_kubelets_choices_and_pods_together") {
        return;
    }
    let sets = |m: &Machine, uid: &str, n: u32| -> Vec<String> {
        let c = |name: &str| format!(r#"{{"n":"{name}","req":{n}000,"lim":{n}000,"mreq":64,"mlim":64}}"#);
        let pod = format!(r#"{{"uid":"{uid}","app":[{},{}]}}"#, c("db"), c("web"));
        fs::write(m.path("pod.json"), pod).unwrap();
        let (_, doc) = m.json(&["admit", m.path("pod.json").to_str().unwrap()]);
        let owners = doc["owners"].as_array().cloned().unwrap_or_default();
        owners.iter().map(|o| o["cpus"].as_str().unwrap().to_owned()).collect()
    };
    for (config, apart) in [
        ("scope = \"container\"", true),
        ("scope = \"pod\"", false),
        ("strategy = \"kubelet\"", true),
        ("strategy = \"kubelet\"\nscope = \"pod\"", false),
    ] {
        // Node 0 has two CPUs to give, node 1 four.
        let m = Machine::new();
        let _agent = m.agent(&format!("reserved = \"0-1\"\nnuma = \"single-numa-node\"\n{config}"));
        let expected: &[&str] = if apart { &["2-3", "4-5"] } else { &["4-5", "6-7"] };
        assert_eq!(sets(&m, "u-1", 2), expected, "{config}");
        let strategy = m.json(&["checkpoint", "show"]).1["record"]["strategy"].clone();
        assert_eq!(strategy == "best", !config.contains("kubelet"), "{strategy}");
    }
    // A number of reserved CPUs is chosen by the kubelet's rule, and its options are obeyed.
    let m = Machine::new();
    let agent = m.agent("reserved = 3\nstrategy = \"kubelet\"\noptions = [\"full-pcpus-only\"]");
    let refused = m.run(&["assign", "run/x", "--cgroup", "/system.slice/db", "--cpus", "3"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(
        refused.status.code() == Some(1) && text.contains("do not fill whole cores, 2 or 4 would"),
        "{text}"
    );
    let (code, owner) = m.json(&["assign", "run/x", "--cgroup", "/system.slice/db", "--cpus", "2"]);
    assert_eq!((code, owner["cpus"].as_str()), (0, Some("4-5")), "{owner}");
    drop(agent);
    fs::write(
        m.path("config.toml"),
        "numa = \"single-numa-node\"\nstrategy = \"kubelet\"\noptions = [\"align-by-socket\"]",
    )
    .unwrap();
    let out = m.run(&["agent"]);
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(2) && text.contains("align-by-socket cannot be had"), "{text}");
}

/// `agent --mode migrate` on a kubelet's state; its exit code if it ends by itself, and what it said.
fn migrate(m: &Machine, state: &str, names: &str) -> (Option<Agent>, Option<i32>, String) {
    let dir = m.path("kubelet");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("cpu_manager_state"), state).unwrap();
    fs::write(m.path("config.toml"), "reserved = \"0-1\"").unwrap();
    let said = m.path("migrate.log");
    let log = fs::File::create(&said).unwrap();
    let file = m.path("names.json");
    fs::write(&file, names).unwrap();
    let (dir, file) = (dir.to_str().unwrap(), file.to_str().unwrap());
    let args = ["agent", "--mode", "migrate", "--kubelet-dir", dir, "--containers", file];
    let mut child = m.command(&args).stdin(Stdio::null()).stderr(log).spawn().unwrap();
    let mut ended = None;
    wait("the agent's answer or end", || {
        ended = child.try_wait().unwrap();
        ended.is_some() || m.run(&["list"]).status.success()
    });
    let said = fs::read_to_string(said).unwrap();
    match ended {
        Some(status) => (None, status.code(), said),
        None => (Some(Agent(child)), None, said),
    }
}

#[test]
fn migrate_takes_over_or_ends() {
    if !is_root("migrate_takes_over_or_ends") {
        return;
    }
    let state = |entries: &str| {
        format!(
            r#"{{"policyName":"static","defaultCpuSet":"6-7","entries":{{"u-1":{{{entries}}}}},"checksum":0}}"#
        )
    };
    let m = Machine::new();
    let (agent, code, said) = migrate(&m, &state(r#""a":"2-3","b":"4-5""#), "[]");
    assert!(agent.is_some(), "{code:?} {said}");
    assert!(said.contains("cpuManagerPolicy: none"), "{said}");
    let (_, list) = m.json(&["list"]);
    let sets: Vec<_> =
        list["owners"].as_array().unwrap().iter().map(|o| o["cpus"].as_str().unwrap()).collect();
    assert_eq!(sets, ["2-3", "4-5"]);
    drop(agent);
    // The init container had more CPUs than the app that runs on some of them: those that it runs on are the app's.
    let m = Machine::new();
    let id = "a".repeat(64);
    m.container("u-1", &id);
    let names = format!(r#"[["{id}","u-1","app"],["{}","u-1","init"]]"#, "b".repeat(64));
    let (agent, code, said) = migrate(&m, &state(r#""app":"2-3","init":"2-5""#), &names);
    assert!(agent.is_some(), "{code:?} {said}");
    assert!(said.contains("pod/u-1/init: its CPUs 2-3 are those of pod/u-1/app"), "{said}");
    assert_eq!(m.json(&["list"]).1["owners"][0]["cpus"], "2-3");
    drop(agent);
    // What is reserved here cannot be taken over, and an empty table would give away CPUs that pods run on.
    let m = Machine::new();
    let (agent, code, said) = migrate(&m, &state(r#""a":"1-2""#), "[]");
    assert!(agent.is_none() && code == Some(3) && said.contains("are reserved"), "{code:?} {said}");
    assert!(!m.path("state/checkpoint.json").exists(), "nothing was saved");
    let (agent, code, said) = migrate(&m, "{", "[]");
    assert!(agent.is_none() && code == Some(3) && said.contains("cannot be taken over"), "{code:?} {said}");
}

#[test]
fn a_machine_that_does_not_say_what_is_online_is_served() {
    if !is_root("a_machine_that_does_not_say_what_is_online_is_served") {
        return;
    }
    let m = Machine::new();
    fs::remove_file(m.path("sys/devices/system/cpu/online")).unwrap();
    let _agent = m.agent("reserved = \"0-1\"");
    let (code, owner) = m.json(&["assign", "unit/db.service", "--cgroup", "system.slice/db", "--cpus", "4"]);
    assert_eq!((code, owner["cpus"].as_str()), (0, Some("4-7")), "{owner}");
    // Its evidence can be read: nothing is known without the programs, and that is what is said.
    let (code, verdict) = m.json(&["verify", "unit/db.service"]);
    assert_eq!((code, verdict["verdict"].as_str()), (3, Some("inconclusive")), "{verdict}");
}
