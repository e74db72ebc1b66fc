//! The whole agent, from the command line to the files and back, on a copied cgroup tree: no privilege over the real
//! cgroups is needed. Derived files do not follow there, so what the kernel makes of the values is the guests' to
//! test; here it is that the right values arrive, survive a crash, are repaired and put back.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::{Machine, TRUEPIN, is_root, wait};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

#[test]
fn assigned_crashed_repaired_and_put_back() {
    if !is_root("assigned_crashed_repaired_and_put_back") {
        return;
    }
    let m = Machine::new();
    let agent = m.agent("reserved = \"0-1\"");
    let (code, owner) = m.json(&["assign", "unit/db.service", "--cgroup", "system.slice/db", "--cpus", "4"]);
    assert_eq!(
        (code, owner["cpus"].as_str(), owner["mode"].as_str()),
        (0, Some("4-7"), Some("partition")),
        "{owner}"
    );
    assert_eq!(owner["schema"], "truepin.owner/1");
    let db = |file: &str| m.file("system.slice/db", file);
    assert_eq!(db("cpuset.cpus.exclusive"), "4-7");
    assert_eq!(db("cpuset.cpus.partition"), "root");
    assert_eq!(db("cpuset.cpus"), "", "theirs to choose in partition mode");
    assert_eq!(m.file("system.slice", "cpuset.cpus.exclusive"), "4-7");
    assert_eq!(m.file("system.slice/web", "cpuset.cpus"), "2-3", "a sibling may not reach over a partition");

    // Everything is durable: kill -9, and a new agent knows.
    drop(agent);
    let _agent = m.agent("reserved = \"0-1\"");
    let (code, list) = m.json(&["list"]);
    assert_eq!((code, list["owners"][0]["cpus"].as_str()), (0, Some("4-7")), "{list}");

    let file = m.path("cgroup/system.slice/db/cpuset.cpus.partition");
    fs::write(&file, "member\n").unwrap();
    wait("the repair", || db("cpuset.cpus.partition") == "root");
    let (_, status) = m.json(&["status"]);
    assert!(status["findings"].to_string().contains("cpuset.cpus.partition of /system.slice/db"), "{status}");

    let (code, released) = m.json(&["release", "--all"]);
    assert_eq!((code, released["owners"][0].as_str()), (0, Some("unit/db.service")), "{released}");
    for (file, text) in
        [("cpuset.cpus.exclusive", ""), ("cpuset.cpus.partition", "member"), ("cpuset.cpus", "")]
    {
        assert_eq!(db(file), text);
    }
    assert_eq!(m.file("system.slice", "cpuset.cpus.exclusive"), "");
    assert_eq!(m.file("system.slice/web", "cpuset.cpus"), "2-7", "first values come back");
}

#[test]
fn a_declared_owner_that_is_released_stays_so_until_the_next_start() {
    if !is_root("a_declared_owner_that_is_released_stays_so_until_the_next_start") {
        return;
    }
    let m = Machine::new();
    let config = "tick = \"100ms\"\nreserved = \"0-1\"\n[[cgroup]]\npath = \"system.slice/db\"\nrole = \"owner\"\n\
                  owner = \"unit/db.service\"\ncpus = \"4-5\"\n";
    let owners = || m.json(&["list"]).1["owners"].as_array().map(Vec::len);
    let agent = m.agent(config);
    wait("the declared owner", || owners() == Some(1));
    assert_eq!(m.run(&["release", "unit/db.service"]).status.code(), Some(0));
    std::thread::sleep(Duration::from_millis(500)); // five ticks
    assert_eq!((owners(), m.file("system.slice/db", "cpuset.cpus.partition")), (Some(0), "member".into()));
    drop(agent);
    let _agent = m.agent(config);
    wait("the declared owner", || owners() == Some(1));
}

#[test]
fn a_declared_owner_that_is_not_there_is_no_success() {
    if !is_root("a_declared_owner_that_is_not_there_is_no_success") {
        return;
    }
    let m = Machine::new();
    let declared = |path: &str, cpus: &str| {
        format!(
            "reserved = \"0-1\"\n[[cgroup]]\npath = \"{path}\"\nrole = \"owner\"\nowner = \"unit/x\"\ncpus = {cpus}\n"
        )
    };
    for (path, cpus, why) in [
        ("system.slice/nope", "2", "does not exist"),
        ("system.slice/db", "200", "200 CPUs asked for"),
        ("system.slice/db", "\"1-2\"", "are reserved"),
        ("system.slice/db", "\"7-9\"", "this machine has no CPUs 8-9"),
    ] {
        let _agent = m.agent(&declared(path, cpus));
        let (code, verdicts) = m.json(&["verify"]);
        assert_eq!(
            (code, verdicts["verdicts"][0]["verdict"].as_str()),
            (3, Some("inconclusive")),
            "{verdicts}"
        );
        assert!(verdicts["verdicts"][0]["reasons"][0].as_str().unwrap().contains(why), "{verdicts}");
        let (_, list) = m.json(&["list"]);
        assert_eq!(list["owners"][0]["owner"], "unit/x", "{list}");
        let (_, status) = m.json(&["status"]);
        assert!(status["problems"].to_string().contains(why), "{status}");
    }
}

#[test]
fn an_agent_outlives_its_log_and_ends_with_its_terminal() {
    let m = Machine::new();
    fs::write(m.path("config.toml"), "").unwrap();
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let mut child = m.command(&["agent"]).stdin(Stdio::null()).stdout(full()).stderr(full()).spawn().unwrap();
    let answers = || m.run(&["status"]).status.success();
    wait("the agent's answer", || {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        answers() || !nix::unistd::geteuid().is_root()
    });
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(child.id().try_into().unwrap()),
        nix::sys::signal::Signal::SIGHUP,
    )
    .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!m.path("run/truepin.sock").exists());
}

#[test]
fn refusals_and_exit_codes() {
    if !is_root("refusals_and_exit_codes") {
        return;
    }
    let m = Machine::new();
    assert_eq!(m.run(&["list"]).status.code(), Some(3), "no agent");
    let agent = m.agent("reserved = 2");
    let assign = |n: &str, more: &[&str]| {
        let out = m.run(&[&["assign", "run/x", "--cgroup", "/system.slice/db", "--cpus", n], more].concat());
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, text) = assign("7", &[]);
    assert!(code == Some(1) && text.contains("2 on node 0 (1 whole core)"), "{text}");
    let (code, text) = assign("5", &["--numa", "single-numa-node"]);
    assert!(code == Some(1) && text.contains("largest that fits one node is 4"), "{text}");
    let (code, text) = assign("2", &["--near", "eth0"]);
    assert!(code == Some(2) && text.contains("eth0"), "{text}");
    let gone = m.run(&["assign", "run/x", "--cgroup", "/nowhere", "--cpus", "1"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("/nowhere"));
    assert_eq!(m.json(&["list"]).1["owners"].as_array().map(Vec::len), Some(0), "nothing was left behind");
    assert_eq!(m.run(&["verify", "run/nobody"]).status.code(), Some(3), "1 would say violated");
    assert_eq!(m.run(&["release", "run/nobody"]).status.code(), Some(0), "releasing twice is fine");

    let own = m.run(&["assign", "unit/x", "--cgroup", "/truepin.slice", "--cpus", "1"]);
    assert_eq!(own.status.code(), Some(2), "{own:?}");
    for args in [
        &["run", "--cpus", "1", "--near", "nosuch", "--", "true"] as &[&str],
        &["run", "--cpus", "1", "--name", "../x", "--", "true"],
        &["run", "--cpus", "1", "--name", "", "--", "true"],
        &["run", "--cpus", "99", "--", "true"],
        &["run", "--cpus"],
    ] {
        assert_eq!(m.run(args).status.code(), Some(125), "{args:?}");
    }
    let odd = std::os::unix::ffi::OsStrExt::from_bytes(b"\xff\xfe");
    assert_eq!(m.command(&[]).arg::<&std::ffi::OsStr>(odd).output().unwrap().status.code(), Some(2));
    assert_eq!(m.command(&["run"]).arg::<&std::ffi::OsStr>(odd).output().unwrap().status.code(), Some(125));
    assert_eq!(m.run(&["verify", "--for", "1y"]).status.code(), Some(2));

    let second = m.command(&["agent", "--socket", "/dev/null/x"]).output().unwrap();
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(second.status.code() == Some(3) && text.contains(&format!("pid {}", agent.0.id())), "{text}");
    assert!(text.contains("hint: "), "{text}");
}

#[test]
fn a_damaged_record_is_quarantined_and_start_up_goes_on() {
    let m = Machine::new();
    fs::create_dir(m.path("state")).unwrap();
    fs::write(m.path("state/checkpoint.json"), "{\"schema\":\"truepin.checkpoint/1\"").unwrap();
    let _agent = m.agent("");
    let kept: Vec<_> = fs::read_dir(m.path("state/quarantine")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(kept.len(), 2, "the record and the reason: {kept:?}");
    assert!(fs::read_to_string(m.path("log")).unwrap().contains("of the record was damaged"));
    let (_, status) = m.json(&["status"]);
    assert_eq!(status["record"]["quarantined"], 1, "{status}");
    assert_eq!(status["findings"][0]["kind"], "record", "{status}");
    let text = String::from_utf8(m.run(&["status"]).stdout).unwrap();
    assert!(text.contains("1 damaged in ") && text.contains("starting from nothing"), "{text}");
}

/// `checkpoint` is for the operator in front of a state directory, with an agent or without.
#[test]
fn the_record_shown_verified_compared_and_exported() {
    if !is_root("the_record_shown_verified_compared_and_exported") {
        return;
    }
    let m = Machine::new();
    let agent = m.agent("reserved = \"0-1\"");
    assert_eq!(m.run(&["checkpoint", "verify"]).status.code(), Some(3), "nothing is saved yet");
    let assign = |owner: &str, cgroup: &str, cpus: &str| {
        let out = m.run(&["assign", owner, "--cgroup", cgroup, "--cpus", cpus]);
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    };
    assign("unit/db.service", "system.slice/db", "2");
    let (code, show) = m.json(&["checkpoint", "show"]);
    assert_eq!((code, show["schema"].as_str()), (0, Some("truepin.record/1")), "{show}");
    assert_eq!(show["record"]["assignments"]["owners"]["unit/db.service"]["cpus"], "2-3", "{show}");
    assert_eq!((&show["stored_version"], &show["record"]["strategy"]), (&2.into(), &"best".into()));
    let epoch = show["record"]["epoch"].as_u64();
    let (_, status) = m.json(&["status"]);
    assert_eq!(status["record"]["epoch"].as_u64(), epoch, "{status}");
    let text = String::from_utf8(m.run(&["checkpoint", "show"]).stdout).unwrap();
    assert!(text.contains("unit/db.service  2-3") && text.contains("cpuset.cpus.exclusive"), "{text}");

    assign("unit/web.service", "system.slice/web", "1");
    let (code, verify) = m.json(&["checkpoint", "verify"]);
    let found: Vec<_> = verify["files"].as_array().unwrap().iter().map(|f| f["state"].clone()).collect();
    assert_eq!((code, found), (0, vec!["fine".into(), "fine".into()]), "{verify}");
    assert_eq!(verify["schema"], "truepin.checkpoint-verify/1");
    let (code, diff) = m.json(&["checkpoint", "diff"]);
    assert_eq!((code, diff["schema"].as_str()), (1, Some("truepin.checkpoint-diff/1")), "{diff}");
    let exported = m.run(&["checkpoint", "export"]);
    let state = m.path("state/checkpoint.json");
    assert_eq!(exported.stdout, fs::read(&state).unwrap(), "a file of the present version is itself");
    let file = |name: &str, bytes: &[u8]| {
        let path = m.path(name).display().to_string();
        fs::write(&path, bytes).unwrap();
        path
    };
    let copy = file("copy.json", &exported.stdout);
    let own = state.display().to_string();
    assert_eq!(m.json(&["checkpoint", "diff", &copy, &own]).1["changes"], serde_json::json!([]));
    assert_eq!(m.run(&["checkpoint", "diff", &copy, &own]).status.code(), Some(0));

    let mut bad = exported.stdout;
    let middle = bad.len() / 2;
    bad[middle] ^= 4;
    let bad = file("bad.json", &bad);
    let newer = file("newer.json", br#"{"schema":"truepin.checkpoint/3","crc32":"","payload":{}}"#);
    // verify: 1 damaged, 3 newer or unreadable, 1 before 3; show likewise; diff: 3 for whatever cannot be compared.
    for (args, expected) in [
        (&["verify", &copy][..], 0),
        (&["verify", &bad], 1),
        (&["verify", &newer], 3),
        (&["verify", "/nonexistent"], 3),
        (&["verify", &copy, &newer, &bad], 1),
        (&["show", &bad], 1),
        (&["show", &newer], 3),
        (&["export", &bad], 1),
        (&["diff", &copy, &bad], 3),
        (&["diff", &copy, "/nonexistent"], 3),
    ] {
        let out = m.run(&[&["checkpoint"], args].concat());
        assert_eq!(out.status.code(), Some(expected), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    let text = String::from_utf8(m.run(&["checkpoint", "show", &newer]).stderr).unwrap();
    assert!(text.contains("use the truepin that wrote it"), "{text}");

    // Nobody but an agent that starts moves anything; one that starts uses the previous generation.
    drop(agent);
    fs::copy(&bad, &state).unwrap();
    assert_eq!(m.run(&["checkpoint", "verify"]).status.code(), Some(1));
    assert!(state.exists());
    let _agent = m.agent("reserved = \"0-1\"");
    assert_eq!(m.json(&["list"]).1["owners"][0]["owner"], "unit/db.service");
    let (_, status) = m.json(&["status"]);
    assert!(status["findings"].to_string().contains("the previous generation"), "{status}");
}

/// What only a newer truepin knows comes through the agent as it was.
#[test]
fn fields_of_a_newer_minor_version_outlive_this_agent() {
    if !is_root("fields_of_a_newer_minor_version_outlive_this_agent") {
        return;
    }
    let m = Machine::new();
    let assign = |owner: &str, cgroup: &str| {
        assert_eq!(m.run(&["assign", owner, "--cgroup", cgroup, "--cpus", "2"]).status.code(), Some(0));
    };
    let agent = m.agent("reserved = \"0-1\"");
    assign("unit/db.service", "system.slice/db");
    drop(agent);
    let state = m.path("state/checkpoint.json");
    let mut record = truepin::checkpoint::decode(&fs::read(&state).unwrap()).unwrap();
    let more = serde_json::json!({"b": [1, null], "a": "x"});
    record.minor = 9;
    record.extra.insert("more".into(), more.clone());
    let db = record.assignments.owners.values_mut().next().unwrap();
    db.extra.insert("more".into(), more.clone());
    record.first.values_mut().for_each(|f| drop(f.extra.insert("more".into(), more.clone())));
    assert!(!record.first.is_empty());
    fs::write(&state, truepin::checkpoint::encode(&record).unwrap()).unwrap();
    let _agent = m.agent("reserved = \"0-1\"");
    assign("unit/web.service", "system.slice/web");
    let now = m.json(&["checkpoint", "show"]).1;
    let now = &now["record"];
    assert_eq!((&now["minor"], &now["more"]), (&9.into(), &more), "{now}");
    assert_eq!(now["assignments"]["owners"]["unit/db.service"]["more"], more, "{now}");
    assert_eq!(now["assignments"]["owners"]["unit/web.service"].get("more"), None, "{now}");
    assert_eq!(now["first"]["system.slice"]["more"], more, "{now}");
}

#[test]
fn configuration_errors_are_usage() {
    let m = Machine::new();
    fs::write(m.path("config.toml"), "resrved = 1").unwrap();
    let out = m.run(&["agent"]);
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(2) && text.contains("did you mean `reserved`?"), "{text}");
    let two = "[[cgroup]]\npath = \"a\"\nrole = \"owner\"\nowner = \"unit/x\"\ncpus = 1\n";
    for (text, needle) in [
        ("reserved = 99".to_owned(), "99 CPUs are to be reserved, and 8 are there"),
        ("reserved = \"6-20\"".into(), "this machine has no CPUs 8-20"),
        ("reserved = -1".into(), "-1"),
        ("reserved = \"a\"".into(), "\"a\""),
        ("reserved = true".into(), "expected a count such as 2"),
        ("tick = \"100y\"".into(), "longer than a day"),
        (format!("{two}{}", two.replace("\"a\"", "\"b\"")), "has the same owner as"),
    ] {
        fs::write(m.path("config.toml"), &text).unwrap();
        let out = m.run(&["agent"]);
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(2) && said.contains(needle), "{text}: {said}");
    }
    let out = m.run(&["status", "--frobnicate"]);
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn the_machine_as_json_and_as_a_tree() {
    let m = Machine::new();
    let (code, t) = m.json(&["topology"]);
    assert_eq!(
        (code, t["schema"].as_str(), t["online"].as_str()),
        (0, Some("truepin.topology/1"), Some("0-7"))
    );
    assert_eq!(t["nodes"][1]["cpus"], "4-7");
    let tree = m.run(&["topology"]);
    assert!(String::from_utf8(tree.stdout).unwrap().contains("node 1"));
    let missing = m.run(&["topology", "--root", "/nonexistent"]);
    assert_eq!(missing.status.code(), Some(3));
}

/// Every subcommand's help has an example.
#[test]
fn help_has_an_example() {
    let commands =
        ["agent", "run", "assign", "release", "list", "status", "topology", "verify", "checkpoint"];
    let below = ["show", "verify", "diff", "export"].map(|c| vec!["checkpoint", c]);
    for command in commands.map(|c| vec![c]).into_iter().chain(below) {
        let out = Command::new(TRUEPIN).args(&command).arg("--help").output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success() && text.contains("Example:\n  truepin "), "{command:?}: {text}");
    }
}

/// A v1 host: one clear error, 3, and what to do.
#[test]
fn without_cpuset_on_v2_enforcing_is_refused() {
    let m = Machine::new();
    fs::write(m.path("cgroup/cgroup.controllers"), "cpu memory\n").unwrap();
    fs::write(m.path("config.toml"), "").unwrap();
    for args in [&["agent"][..], &["run", "--cpus", "1", "--", "true"]] {
        let out = m.run(args);
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(if args[0] == "run" { 125 } else { 3 }), "{text}");
        assert!(text.contains("not on cgroup v2") && text.contains("--mode audit"), "{text}");
        assert_eq!(text.matches("error:").count(), 1, "{text}");
    }
    assert!(!Path::new(&m.path("state/checkpoint.json")).exists());
}
