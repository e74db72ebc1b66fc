//! `truepin doctor` from the command line: what it says of a host in a directory, and with what it ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::Machine;
use std::{collections::BTreeSet, fs, os::unix::fs::symlink, path::Path};

/// The usual machine with what else is looked at, all sound; the kernel's types are this host's.
fn host() -> Option<Machine> {
    let btf = Path::new("/sys/kernel/btf/vmlinux");
    if !btf.exists() {
        eprintln!("skipped: doctor: needs {}", btf.display());
        return None;
    }
    let m = Machine::new();
    for (path, text) in [
        ("proc/cmdline", "quiet"),
        ("proc/kallsyms", "0 T register_ftrace_direct\n0 t cgroup_file_write"),
        ("proc/1/comm", "systemd"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
    ] {
        let path = m.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }
    fs::create_dir_all(m.path("sys/kernel/btf")).unwrap();
    symlink(btf, m.path("sys/kernel/btf/vmlinux")).unwrap();
    Some(m)
}

#[test]
fn what_it_says_and_with_what_it_ends() {
    let Some(m) = host() else { return };
    let (code, report) = m.json(&["doctor"]);
    assert_eq!((code, report["schema"].as_str()), (0, Some("truepin.doctor/1")), "{report}");
    // The machine's `web` lists CPUs 2-7.
    assert_eq!(report["severity"], "note", "{report}");
    let checks: BTreeSet<&str> =
        report["findings"].as_array().unwrap().iter().map(|f| f["check"].as_str().unwrap()).collect();
    let known = ["btf", "cgroup-v2", "clock", "kubelet", "layout", "partitions", "writers"];
    assert_eq!(checks, known.into(), "{report}");

    fs::write(m.path("proc/cmdline"), "isolcpus=2-3 cgroup_disable=cpuset\n").unwrap();
    let out = m.run(&["doctor"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.starts_with("problem "), "the worst comes first: {text}");
    assert!(!text.contains('\u{1b}'), "colour is for a terminal: {text}");
    let evidence = format!("{}: cgroup_disable = cpuset", m.path("proc/cmdline").display());
    assert!(text.contains(&evidence) && text.contains("remedy: boot without"), "{text}");

    fs::remove_file(m.path("proc/cmdline")).unwrap();
    let (code, report) = m.json(&["doctor"]);
    assert_eq!((code, report["severity"].as_str()), (3, Some("cannot-tell")), "{report}");
}

#[test]
fn on_this_host_it_ends_with_an_answer() {
    let out = std::process::Command::new(machine::TRUEPIN).args(["doctor", "-o", "json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let code = match report["severity"].as_str().unwrap() {
        "problem" => 1,
        "cannot-tell" => 3,
        _ => 0,
    };
    assert_eq!(out.status.code(), Some(code), "{report}");
    assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}
