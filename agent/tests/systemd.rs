//! systemd as the owner of units' cgroups. What the real one does with it is the guests' to show.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

#[path = "support/systemd.rs"]
mod systemd;

use machine::{Machine, is_root, wait};
use std::fs;
use systemd::{Fault, Played};

const MEMBER: &[&str] = &[
    "assign",
    "unit/db.service",
    "--cgroup",
    "system.slice/db.service",
    "--cpus",
    "2",
    "--isolation",
    "member",
];

/// A machine whose `system.slice/db.service` is a unit, and `system.slice/web` none.
fn machine() -> Machine {
    let m = Machine::new();
    fs::rename(m.path("cgroup/system.slice/db"), m.path("cgroup/system.slice/db.service")).unwrap();
    m
}

fn dry_run(m: &Machine, args: &[&str]) -> String {
    let out = m.run(&[args, &["--dry-run"]].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn db(m: &Machine) -> String {
    m.file("system.slice/db.service", "cpuset.cpus")
}

#[test]
fn a_units_list_is_written_by_systemd_and_put_back_with_its_drop_in() {
    if !is_root("a_units_list_is_written_by_systemd_and_put_back_with_its_drop_in") {
        return;
    }
    for earlier in [None, Some("[Service]\nAllowedCPUs=0-6\n")] {
        let m = machine();
        let systemd = Played::new(&m, &[("db.service", "system.slice/db.service")]);
        let drop_in = m.path("systemd/system.control/db.service.d/50-AllowedCPUs.conf");
        if let Some(text) = earlier {
            fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
            fs::write(&drop_in, text).unwrap();
            systemd.world.lock().unwrap().allowed.insert("db.service".into(), "0-6".parse().unwrap());
            fs::write(m.path("cgroup/system.slice/db.service/cpuset.cpus"), "0-6\n").unwrap();
        }
        let first = db(&m);
        let agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let foreseen = dry_run(&m, MEMBER);
        assert!(systemd.calls().is_empty() && db(&m) == first);
        let (code, owner) = m.json(MEMBER);
        assert_eq!((code, owner["mode"].as_str()), (0, Some("member")), "{owner}");
        let line = format!("systemctl set-property --runtime db.service AllowedCPUs={}\n", db(&m));
        assert!(foreseen.contains(&line), "{foreseen}");
        let cpus = owner["cpus"].as_str().unwrap().to_owned();
        assert_eq!((db(&m), systemd.allowed("db.service")), (cpus.clone(), cpus.clone()));
        assert_eq!(systemd.calls(), [format!("db.service AllowedCPUs={cpus}")]);
        assert!(drop_in.exists());
        let line = format!("/system.slice/db.service: {cpus:?} through systemd (AllowedCPUs of db.service)");
        assert!(m.log().contains(&line), "{}", m.log());

        // What was is known to the next agent, too.
        drop(agent);
        let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let foreseen = dry_run(&m, &["release", "--all"]);
        assert!(foreseen.contains("properties and drop-ins of db.service as they were"), "{foreseen}");
        assert!(systemd.calls().is_empty() && systemd.allowed("db.service") == cpus);
        let (code, released) = m.json(&["release", "--all"]);
        assert_eq!(code, 0, "{released}");
        wait("the drop-in", || fs::read_to_string(&drop_in).ok().as_deref() == earlier);
        assert_eq!((db(&m), systemd.allowed("db.service")), (first.clone(), first.clone()));
        let calls = systemd.calls();
        assert_eq!(calls.first(), Some(&format!("db.service AllowedCPUs={first}")), "{calls:?}");
        // Only where the drop-ins on disk are others than systemd knows.
        assert_eq!(calls.iter().any(|c| c == "reload"), earlier.is_none(), "{calls:?}");
        assert!(fs::read_to_string(m.path("state/systemd.json")).unwrap().contains("\"units\": {}"));
    }
}

#[test]
fn what_systemd_does_not_write_is_written_directly_and_told() {
    if !is_root("what_systemd_does_not_write_is_written_directly_and_told") {
        return;
    }
    for (fault, words) in [
        (Fault::Refuses, "not today"),
        (Fault::DoesNotWrite, "still reads"),
        (Fault::Hangs, "no answer within 5s"),
    ] {
        let m = machine();
        let systemd = Played::new(&m, &[("db.service", "system.slice/db.service")]);
        systemd.world.lock().unwrap().fault = fault;
        let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let (code, owner) = m.json(MEMBER);
        assert_eq!((code, owner["cpus"].as_str()), (0, Some(db(&m).as_str())), "{fault:?} {owner}");
        let (_, status) = m.json(&["status"]);
        let told: Vec<&str> = status["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|f| f["kind"] == "systemd")
            .map(|f| f["text"].as_str().unwrap())
            .collect();
        assert_eq!(told.len(), 1, "{fault:?} {status}");
        let list = db(&m);
        for part in [words, "db.service", &format!("AllowedCPUs={list}"), "was written directly instead"] {
            assert!(told[0].contains(part), "{fault:?} {part} {told:?}");
        }
        // A cgroup that is no unit's is nobody's concern.
        assert!(!told[0].contains("web"), "{told:?}");
    }
}

#[test]
fn nobody_there_is_told_and_the_file_written() {
    if !is_root("nobody_there_is_told_and_the_file_written") {
        return;
    }
    let m = machine();
    let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
    let (code, owner) = m.json(MEMBER);
    assert_eq!((code, owner["cpus"].as_str()), (0, Some(db(&m).as_str())), "{owner}");
    let (_, status) = m.json(&["status"]);
    assert!(status["findings"].to_string().contains("connecting to"), "{status}");
}

#[test]
fn a_command_runs_in_a_scope_that_systemd_makes() {
    if !is_root("a_command_runs_in_a_scope_that_systemd_makes") {
        return;
    }
    let m = machine();
    let systemd = Played::new(&m, &[]);
    m.cgroup("truepin.slice", "");
    let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
    let home = "truepin.slice/truepin-run-x.scope";
    let dir = m.path(&format!("cgroup/{home}")).display().to_string();
    // A copied tree's files do not follow by themselves.
    let work = format!(
        "cat {dir}/cgroup.procs && echo && cat {dir}/cpuset.cpus && printf 'populated 0\\n' >{dir}/cgroup.events"
    );
    let out = m.run(&["run", "--cpus", "2", "--name", "x", "--", "/bin/sh", "-c", &work]);
    let said = String::from_utf8(out.stdout).unwrap();
    let errors = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(0), "{errors} {}", m.log());
    let (pid, cpus) = said.trim().split_once('\n').unwrap();
    assert!(pid.parse::<u32>().is_ok() && !cpus.is_empty(), "{said}");
    assert_eq!(
        systemd.calls(),
        [
            "fail truepin-run-x.scope of 1 with [\"cpuset\"]".to_owned(),
            format!("truepin-run-x.scope AllowedCPUs={cpus}"),
            "replace truepin-run-x.scope by nothing".to_owned(),
        ],
        "{}",
        m.log()
    );
    assert!(!fs::exists(&dir).unwrap());
    // Nothing of it was there before, and nothing is to be put back.
    let journal = m.path("state/systemd.json");
    assert!(!journal.exists() || !fs::read_to_string(journal).unwrap().contains("truepin-run-x"));

    systemd.world.lock().unwrap().fault = Fault::Refuses;
    m.run(&["run", "--cpus", "2", "--name", "y", "--", "true"]);
    let (_, status) = m.json(&["status"]);
    let told = status["findings"].to_string();
    for part in ["starting truepin-run-y.scope", "not today", "made directly instead"] {
        assert!(told.contains(part), "{part}: {told}");
    }
}
