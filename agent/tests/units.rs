//! `[[unit]]`, with a manager that is played.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;
#[path = "support/systemd.rs"]
mod systemd;

use machine::{Agent, Machine, is_root, wait};
use serde_json::Value;
use std::fs;
use systemd::{Fault, Played};

const DB: &str = "system.slice/db.service";
/// A tick that none of these tests lives to see.
const CONFIG: &str = "reserved = \"0-1\"\ntick = \"1h\"\n[[unit]]\nname = \"db.service\"\ncpus = 2\n";

fn agent(m: &Machine, config: &str) -> Agent {
    m.agent_with(config, &[("TRUEPIN_SYSTEMD", "systemd")])
}

fn row(m: &Machine) -> Value {
    let (code, list) = m.json(&["list"]);
    assert_eq!(code, 0, "{list}");
    let rows = list["owners"].as_array().unwrap();
    rows.iter().find(|o| o["owner"] == "unit/db.service").cloned().unwrap_or_default()
}

fn drop_in(m: &Machine) -> std::path::PathBuf {
    m.path("systemd/system.control/db.service.d/50-AllowedCPUs.conf")
}

#[test]
fn a_unit_is_born_with_its_cpus_and_followed() {
    if !is_root("a_unit_is_born_with_its_cpus_and_followed") {
        return;
    }
    for isolation in ["auto", "member"] {
        let m = Machine::new();
        let systemd = Played::new(&m, &[("db.service", DB)]);
        let config = format!("isolation = \"{isolation}\"\n{CONFIG}");
        let first = agent(&m, &config);
        // Before it runs.
        let cpus = row(&m)["cpus"].as_str().unwrap().to_owned();
        assert_eq!(row(&m)["cgroup"], "");
        assert_eq!(systemd.calls(), [format!("db.service AllowedCPUs={cpus}")]);
        assert!(drop_in(&m).exists() && m.log().contains(&format!("is to be born with CPUs {cpus}")));
        let state = if isolation == "auto" { "root" } else { "member" };
        for round in 0..3 {
            systemd.start(&m, "db.service");
            assert_eq!(m.file(DB, "cpuset.cpus"), cpus, "{round}");
            wait("its partition", || {
                m.file(DB, "cpuset.cpus.partition") == state && row(&m)["cgroup"] == format!("/{DB}")
            });
            // Its list is systemd's already: nothing is to be written.
            assert_eq!(systemd.calls(), [""; 0], "{round}");
            systemd.stop(&m, "db.service");
            wait("its end", || row(&m)["cgroup"] == "");
            assert_eq!(row(&m)["cpus"], cpus.as_str());
            assert!(
                row(&m)["verdict_reason"].as_str().unwrap().starts_with("waits for the unit to start again")
            );
        }
        // Another agent knows what was before.
        drop(first);
        let second = agent(&m, &config);
        assert_eq!((row(&m)["cpus"].as_str(), systemd.calls().len()), (Some(cpus.as_str()), 0));
        systemd.start(&m, "db.service");
        wait("its partition", || m.file(DB, "cpuset.cpus.partition") == state && row(&m)["cgroup"] != "");
        let (code, released) = m.json(&["release", "--all"]);
        assert_eq!(code, 0, "{released}");
        wait("the drop-in", || !drop_in(&m).exists());
        assert_eq!((m.file(DB, "cpuset.cpus").as_str(), systemd.allowed("db.service").as_str()), ("", ""));
        assert_eq!(m.file(DB, "cpuset.cpus.partition"), "member");
        // Released, it is not declared again in the life of this agent.
        assert_eq!(row(&m), Value::Null);
        drop(second);
    }
}

#[test]
fn a_unit_that_is_none_is_told_with_what_to_do() {
    if !is_root("a_unit_that_is_none_is_told_with_what_to_do") {
        return;
    }
    for (state, remedy) in [
        ("not-found", "take [[unit]] db.service out of the configuration"),
        ("masked", "`systemctl unmask db.service`"),
        ("bad-setting", "`systemctl status db.service` says what is wrong"),
    ] {
        let m = Machine::new();
        let systemd = Played::new(&m, &[("db.service", DB)]);
        systemd.world.lock().unwrap().states.insert("db.service", state);
        let _agent = agent(&m, &CONFIG.replace("1h", "200ms"));
        let (_, status) = m.json(&["status"]);
        let problems = status["problems"].to_string();
        for part in [state, remedy, "looking for the unit db.service"] {
            assert!(problems.contains(part), "{part}: {problems}");
        }
        assert_eq!(m.run(&["verify"]).status.code(), Some(3));
        assert_eq!((row(&m)["cpus"].as_str(), systemd.calls().len()), (Some(""), 0));
        // Mended: at the next tick.
        systemd.world.lock().unwrap().states.clear();
        wait("its CPUs", || row(&m)["cpus"] != "");
        let (_, status) = m.json(&["status"]);
        assert_eq!(status["problems"].as_array().unwrap().len(), 0, "{status}");
    }
}

#[test]
fn what_systemd_does_not_take_is_told_once_and_the_unit_pinned_when_it_runs() {
    if !is_root("what_systemd_does_not_take_is_told_once_and_the_unit_pinned_when_it_runs") {
        return;
    }
    let m = Machine::new();
    let systemd = Played::new(&m, &[("db.service", DB)]);
    systemd.world.lock().unwrap().fault = Fault::Refuses;
    let _agent = agent(&m, CONFIG);
    let cpus = row(&m)["cpus"].as_str().unwrap().to_owned();
    let told = || {
        let (_, status) = m.json(&["status"]);
        let findings = status["findings"].as_array().unwrap().iter().filter(|f| f["kind"] == "systemd");
        findings.map(|f| f["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let first = told();
    assert_eq!(first.len(), 1, "{first:?}");
    for part in ["not today", "db.service", &format!("AllowedCPUs={cpus}"), "before it runs"] {
        assert!(first[0].contains(part), "{part}: {first:?}");
    }
    row(&m);
    assert_eq!(told().len(), 1);
    systemd.start(&m, "db.service");
    wait("its CPUs", || m.file(DB, "cpuset.cpus") == cpus);
    wait("its partition", || m.file(DB, "cpuset.cpus.partition") == "root");
    assert!(!fs::exists(drop_in(&m)).unwrap());
}

#[test]
fn without_systemd_it_waits_and_says_so() {
    if !is_root("without_systemd_it_waits_and_says_so") {
        return;
    }
    let m = Machine::new();
    let _agent = m.agent(CONFIG);
    let (_, status) = m.json(&["status"]);
    let problems = status["problems"].to_string();
    assert!(problems.contains("no systemd that could be told is the init here"), "{problems}");
}

#[test]
fn a_unit_that_names_cpus_which_are_not_there_is_told_once() {
    if !is_root("a_unit_that_names_cpus_which_are_not_there_is_told_once") {
        return;
    }
    let m = Machine::new();
    let systemd = Played::new(&m, &[("db.service", DB), ("web.service", "system.slice/web.service")]);
    {
        let mut world = systemd.world.lock().unwrap();
        world.allowed.insert("web.service".into(), "2,8-9".parse().unwrap());
        world.affinity.insert("web.service".into(), "0-7".parse().unwrap());
        world.affinity.insert("db.service".into(), "8".parse().unwrap());
    }
    let _agent = agent(&m, &CONFIG.replace("1h", "200ms"));
    let told = || {
        let (_, status) = m.json(&["status"]);
        let findings = status["findings"].as_array().unwrap().iter().filter(|f| f["kind"] == "systemd");
        findings.map(|f| f["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    wait("what was found", || told().len() >= 2);
    // Some ticks later it is not told again; nor is what truepin has set itself.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let found = told();
    assert_eq!(found.len(), 2, "{found:?}");
    for part in [
        "CPUAffinity=8 of db.service names CPUs 8, which this machine does not have",
        "AllowedCPUs=2,8-9 of web.service names CPUs 8-9, which this machine does not have",
        "`systemctl edit web.service`",
    ] {
        assert!(found.iter().any(|f| f.contains(part)), "{part}: {found:?}");
    }
}
