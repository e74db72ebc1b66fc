//! Audit mode on this host: nothing below /sys and /proc is opened for writing, nobody is moved (asserted under strace),
//! and the verdict is about what ran.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

mod support;

use serde_json::Value;
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};
use support::{cgroup2, missing, skip, wait_for};

const TRUEPIN: &str = env!("CARGO_BIN_EXE_truepin");

/// An owner's cgroup, removed when dropped.
struct Owner {
    dir: std::path::PathBuf,
    task: std::process::Child,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.task.kill();
        let _ = self.task.wait();
        let _ = fs::remove_dir(&self.dir);
    }
}

#[test]
fn writes_nothing_and_moves_nobody() {
    const TEST: &str = "writes_nothing_and_moves_nobody";
    if let Some(why) = missing() {
        return skip(TEST, &why);
    }
    if Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_err() {
        return skip(TEST, "strace is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let name = format!("truepin-audit-{}", std::process::id());
    let cgroup = cgroup2().unwrap().join(&name);
    fs::create_dir(&cgroup).unwrap();
    let task = Command::new("sleep").arg("1000").spawn().unwrap();
    let owner = Owner { dir: cgroup, task };
    fs::write(owner.dir.join("cgroup.procs"), owner.task.id().to_string()).unwrap();
    let config = dir.path().join("config.toml");
    fs::write(
        &config,
        format!("mode = \"audit\"\n[[cgroup]]\npath = \"{name}\"\nrole = \"owner\"\nowner = \"run/audited\"\ncpus = \"1\"\n"),
    )
    .unwrap();
    let (trace, socket) = (dir.path().join("trace"), dir.path().join("s"));
    let mut agent = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=open,openat,openat2,creat,sched_setaffinity,rename,renameat,renameat2,mkdir,mkdirat,rmdir,unlink,unlinkat,kill,tgkill,ptrace"])
        .arg("-o")
        .arg(&trace)
        .arg(TRUEPIN)
        .args(["agent", "--config"])
        .arg(&config)
        .arg("--socket")
        .arg(&socket)
        .env("TRUEPIN_STATE", dir.path().join("state/checkpoint.json"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let ask = |args: &[&str]| {
        let out =
            Command::new(TRUEPIN).args(args).args(["-o", "json", "--socket"]).arg(&socket).output().unwrap();
        (out.status.code(), serde_json::from_slice::<Value>(&out.stdout).unwrap_or(Value::Null))
    };
    wait_for("the agent's answer", || ask(&["status"]).0 == Some(0));
    let (_, verdict) = ask(&["verify", "run/audited", "--for", "500ms"]);
    assert_eq!(verdict["mode"], "audit", "{verdict}");
    assert_eq!(verdict["cpu"][0]["cpu"], 1, "{verdict}");
    assert!(verdict["cpu"][0]["owner_ns"].is_u64(), "{verdict}");
    // The owner sleeps and may run anywhere: that its mask is wider than declared is found.
    assert!(verdict["reasons"].to_string().contains("was allowed on CPUs"), "{verdict}");
    for refused in [&["assign", "run/x", "--cgroup", "/x", "--cpus", "1"][..], &["release", "--all"]] {
        assert_eq!(ask(refused).0, Some(2), "{refused:?}");
    }
    let pid = agent.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let truepin = children.trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(truepin), nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(agent.wait().unwrap().success());
    check(&trace, dir.path());
    assert!(!dir.path().join("state").exists(), "an audit has no record");
}

fn check(trace: &Path, own: &Path) {
    let text = fs::read_to_string(trace).unwrap();
    let own = own.to_str().unwrap();
    let threads: Vec<&str> = text.lines().filter_map(|l| l.split(' ').next()).collect();
    let (mut opened, mut pinned) = (0, 0);
    for line in text.lines() {
        let call = line.split_once(' ').unwrap().1.trim_start();
        let path = call.split('"').nth(1).unwrap_or_default();
        if call.starts_with("open") || call.starts_with("creat") {
            opened += 1;
            let writes =
                ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "creat("].iter().any(|w| call.contains(w));
            let forbidden = path.starts_with("/sys") || path.starts_with("/proc");
            assert!(!(writes && forbidden), "{line}");
        } else if call.starts_with("sched_setaffinity") {
            // Its own threads keep off the audited CPUs: an auditor that intrudes would be absurd.
            pinned += 1;
            let target = call.split(['(', ',']).nth(1).unwrap();
            assert!(target == "0" || threads.contains(&target), "{line}");
        } else if ["mkdir", "rmdir", "unlink", "rename"].iter().any(|c| call.starts_with(c)) {
            assert!(path.starts_with(own), "{line}");
        } else {
            assert!(["kill", "tgkill", "ptrace"].iter().all(|c| !call.starts_with(c)), "{line}");
        }
    }
    assert!(
        opened > 20 && pinned > 0,
        "the trace is of something else: {opened} opens, {pinned} affinity calls"
    );
}
