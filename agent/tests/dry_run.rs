//! What `--dry-run` prints is what is then done, and printing it changes nothing: on a copied cgroup tree, where lines that
//! a shell carries out can be compared byte by byte with what the agent writes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::{Machine, is_root};
use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Every file and directory below `dir`, with the text of files.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Option<String>> {
    fn add(all: &mut BTreeMap<PathBuf, Option<String>>, top: &Path, dir: &Path) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let name = path.strip_prefix(top).unwrap().to_owned();
            if kind.is_dir() {
                all.insert(name, None);
                add(all, top, &path);
            } else {
                all.insert(name, kind.is_file().then(|| fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut all = BTreeMap::new();
    if dir.exists() {
        add(&mut all, dir, dir);
    }
    all
}

/// The tree and the record: what a dry run must leave alone.
fn all(m: &Machine) -> [BTreeMap<PathBuf, Option<String>>; 2] {
    [tree(&m.path("cgroup")), tree(&m.path("state"))]
}

/// The script of a dry run, after which everything is as before.
fn script(m: &Machine, args: &[&str]) -> String {
    let before = all(m);
    let out = m.run(&[args, &["--dry-run"]].concat());
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(all(m), before, "{args:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// A copy of the tree after `sh` has carried out the script there.
fn carried_out(m: &Machine, script: &str) -> BTreeMap<PathBuf, Option<String>> {
    let (cgroup, copy) = (m.path("cgroup"), m.path("copy"));
    let copied = Command::new("cp").arg("-r").args([&cgroup, &copy]).status().unwrap();
    assert!(copied.success());
    let script = script.replace(cgroup.to_str().unwrap(), copy.to_str().unwrap());
    let mut sh = Command::new("sh").arg("-e").stdin(Stdio::piped()).spawn().unwrap();
    sh.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(sh.wait().unwrap().success(), "{script}");
    let after = tree(&copy);
    fs::remove_dir_all(&copy).unwrap();
    after
}

fn lines(script: &str) -> usize {
    script.lines().filter(|l| !l.starts_with('#')).count()
}

#[test]
fn a_shell_that_runs_the_lines_does_what_the_agent_does() {
    if !is_root("a_shell_that_runs_the_lines_does_what_the_agent_does") {
        return;
    }
    let m = Machine::new();
    let _agent = m.agent("reserved = \"0-1\"");
    let first = tree(&m.path("cgroup"));
    for args in [
        vec!["assign", "unit/db.service", "--cgroup", "system.slice/db", "--cpus", "2"],
        vec![
            "assign",
            "cgroup/system.slice/web",
            "--cgroup",
            "system.slice/web",
            "--cpus",
            "2",
            "--isolation",
            "member",
        ],
        vec!["release", "unit/db.service"],
        vec![
            "assign",
            "unit/db.service",
            "--cgroup",
            "system.slice/db",
            "--cpus",
            "4",
            "--isolation",
            "isolated",
        ],
        vec!["release", "--all"],
    ] {
        let script = script(&m, &args);
        let foreseen = carried_out(&m, &script);
        let out = m.run(&args);
        assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(tree(&m.path("cgroup")), foreseen, "{args:?}\n{script}");
        assert!(lines(&script) > 0, "{args:?}: {script}");
        println!("{}: {} lines, files as the agent makes them", args.join(" "), lines(&script));
    }
    assert_eq!(tree(&m.path("cgroup")), first, "all is released");
    let again = script(&m, &["release", "--all"]);
    assert_eq!(lines(&again), 0, "{again}");
}

#[test]
fn the_document_and_the_refusal() {
    if !is_root("the_document_and_the_refusal") {
        return;
    }
    let m = Machine::new();
    let _agent = m.agent("reserved = \"0-1\"");
    let assign = ["assign", "unit/db.service", "--cgroup", "system.slice/db", "--dry-run", "--cpus"];
    let (code, plan) = m.json(&[&assign[..], &["2"]].concat());
    assert_eq!((code, plan["schema"].as_str()), (0, Some("truepin.plan/1")), "{plan}");
    assert_eq!(plan["owner"]["owner"], "unit/db.service");
    let last = plan["steps"].as_array().unwrap().last().unwrap();
    let file = m.path("cgroup/system.slice/db/cpuset.cpus.partition");
    let [old, new] = ["old", "new"].map(|k| last[k].as_str());
    assert_eq!(
        (last["path"].as_str(), last["phase"].as_str()),
        (file.to_str(), Some("set-partition")),
        "{plan}"
    );
    assert_eq!((old, new), (Some("member"), Some("root")), "{plan}");
    let (code, why) = m.json(&[&assign[..], &["7"]].concat());
    assert!(code == 1 && why.to_string().contains("7 CPUs"), "{why}");
    assert_eq!(m.json(&["list"]).1["owners"], serde_json::json!([]));
}

#[test]
fn an_agent_that_only_says_what_it_would_do() {
    if !is_root("an_agent_that_only_says_what_it_would_do") {
        return;
    }
    let m = Machine::new();
    let config = "reserved = \"0-1\"\n[[cgroup]]\npath = \"system.slice/db\"\nrole = \"owner\"\n\
                  owner = \"unit/db.service\"\ncpus = \"4-5\"\n[[cgroup]]\npath = \"not/there\"\nrole = \"owner\"\ncpus = 2\n";
    fs::write(m.path("config.toml"), config).unwrap();
    let script_before = script(&m, &["agent"]);
    assert!(!m.path("state").exists() && !m.path("run").exists(), "nothing is made");
    assert!(script_before.contains("unit/db.service gets CPUs 4-5"), "{script_before}");
    assert!(script_before.contains("cgroup/not/there waits"), "{script_before}");
    let foreseen = carried_out(&m, &script_before);
    let agent = m.agent(config);
    machine::wait("the declared owner", || m.json(&["list"]).1.to_string().contains("\"4-5\""));
    assert_eq!(tree(&m.path("cgroup")), foreseen, "{script_before}");
    // Beside an agent that runs: nothing is left to do, and whose the host is.
    let beside = script(&m, &["agent"]);
    let holder = format!("another truepin (pid {})", agent.0.id());
    assert!(lines(&beside) == 0 && beside.contains(&holder), "{beside}");
    // What was changed while no agent ran is put right at the start.
    drop(agent);
    fs::write(m.path("cgroup/system.slice/db/cpuset.cpus.partition"), "member\n").unwrap();
    let mended = script(&m, &["agent"]);
    let file = m.path("cgroup/system.slice/db/cpuset.cpus.partition");
    assert!(mended.contains(&format!("echo root > {}", file.display())), "{mended}");
    assert!(!m.path("run/truepin.sock").exists() || m.run(&["status"]).status.code() == Some(3));
}

#[test]
fn where_no_cgroup_has_cpuset_files_yet() {
    if !is_root("where_no_cgroup_has_cpuset_files_yet") {
        return;
    }
    let m = Machine::new();
    fs::write(m.path("config.toml"), "reserved = \"0-1\"").unwrap();
    for (path, text) in tree(&m.path("cgroup")) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("cpuset.") {
            fs::remove_file(m.path("cgroup").join(&path)).unwrap();
        } else if name == "cgroup.subtree_control" && text.is_some() {
            fs::write(m.path("cgroup").join(&path), "").unwrap();
        }
    }
    let script = script(&m, &["agent"]);
    let root = m.path("cgroup");
    let enable = format!("echo +cpuset > {}/cgroup.subtree_control", root.display());
    let make = format!("mkdir {}/truepin.slice", root.display());
    assert!(script.contains(&enable) && script.contains(&make), "{script}");
    assert_eq!(lines(&script), 2, "{script}");
}
