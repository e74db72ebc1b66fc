//! systemd's units as owners, on a host with systemd. Each scenario has a machine of its own (`tests/vm/systemd.sh`).

mod storm;

use crate::guest::{
    Cgroup, Guest, Outcome, Scenario, Style, Suite, command::run_for, equal, host, secs, truepin_json,
    wait_until,
};
use anyhow::Context;
use serde_json::Value;
use std::{
    fs,
    process::{Command, Stdio},
};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "units",
    about: "systemd's units as owners, on a host with systemd",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("a unit is pinned before its main process runs and after a reboot", born).limit(400),
        Scenario::new("a unit that names CPUs which are not there", misnamed).limit(240),
        Scenario::new("a command runs in a scope", scope).limit(240),
        Scenario::new("200 rounds against 10 owners with the default limit", storm::default_limit)
            .limit(1700),
        Scenario::new("200 rounds against 10 owners with a high limit", storm::high_limit).limit(1700),
    ],
};

/// Where systemd.sh puts what it brings.
const TREE: &str = "/rig/truepin";

fn command(program: &str, args: &[&str]) -> anyhow::Result<String> {
    Ok(run_for(secs(180), Command::new(program).args(args))?.ok()?.stdout.trim().to_owned())
}

fn systemctl(args: &[&str]) -> anyhow::Result<String> {
    command("systemctl", args)
}

fn property(unit: &str, name: &str) -> anyhow::Result<String> {
    systemctl(&["show", "--value", "-p", name, unit])
}

/// A service whose main process writes down, before anything else, where it may run, and then works a little.
fn service(name: &str, more: &str) -> Outcome {
    let text = format!(
        "[Service]\n{more}\nExecStart=/bin/sh -c 'grep Cpus_allowed_list /proc/self/status >>/rig/born-{name}; \
         exec /rig/bin/truepin-guest blink --threads 1 --on-ms 1 --off-ms 100'\n[Install]\nWantedBy=multi-user.target\n"
    );
    fs::write(format!("/etc/systemd/system/{name}.service"), text)
        .with_context(|| format!("writing {name}.service"))
}

/// Where main processes of the service were allowed when they began, in order.
fn born_on(name: &str) -> anyhow::Result<Vec<CpuSet>> {
    let path = format!("/rig/born-{name}");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let list =
        |line: &str| line.split_whitespace().last().unwrap_or_default().parse().map_err(anyhow::Error::from);
    text.lines().map(|line| list(line).with_context(|| format!("{path}: {line:?}"))).collect()
}

/// The agent as a service, with this configuration, and with every step in its log.
fn installed(config: &str) -> Outcome {
    command("make", &["-C", TREE, "install", "BUILT=/rig/bin"])?;
    fs::write("/etc/truepin/config.toml", config).context("writing the configuration")?;
    fs::create_dir_all("/etc/systemd/system/truepin.service.d")?;
    let verbose = "[Service]\nExecStart=\nExecStart=/usr/local/sbin/truepin -v agent\n";
    fs::write("/etc/systemd/system/truepin.service.d/verbose.conf", verbose)?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", "--now", "truepin"]).map(drop)
}

fn log() -> anyhow::Result<String> {
    command("journalctl", &["-q", "--no-pager", "-o", "cat", "-u", "truepin.service"])
}

fn cgroup(unit: &str) -> Cgroup {
    Cgroup::at(&format!("/system.slice/{unit}"))
}

/// The owner's row in `truepin list`.
fn row(owner: &str) -> anyhow::Result<Value> {
    let (_, list) = truepin_json(&["list"])?;
    let found = list["owners"].as_array().and_then(|all| all.iter().find(|o| o["owner"] == owner));
    found.cloned().with_context(|| format!("no {owner} in {list:#}"))
}

fn cpus_of(owner: &str) -> anyhow::Result<CpuSet> {
    let row = row(owner)?;
    row["cpus"].as_str().context("no CPUs")?.parse().with_context(|| format!("CPUs of {row:#}"))
}

/// The unit's cgroup is a partition of these CPUs. The agent is not asked, which would make it look.
fn partitioned(unit: &str, cpus: &CpuSet) -> Outcome {
    let home = cgroup(unit);
    let read = || -> anyhow::Result<(String, CpuSet)> {
        Ok((home.read("cpuset.cpus.partition")?, home.cpus("cpuset.cpus.effective")?))
    };
    let mut last = None;
    let waited = wait_until("the unit's partition", secs(20), || {
        // Between a stop and a start there is none.
        last = read().ok();
        Ok(last.as_ref().is_some_and(|(state, effective)| state == "root" && effective == cpus))
    });
    waited.with_context(|| format!("{unit} last read {last:?}, wanted {cpus}\n{}", log().unwrap_or_default()))
}

/// What a promise of CPUs is worth, in every life of unit, agent and machine.
fn born(guest: &mut Guest) -> Outcome {
    const STARTS: usize = 6;
    if host::life()? > 1 {
        return reborn(guest);
    }
    service("db", "")?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", "db.service"])?;
    // A tick that does not come: what is seen is seen through the watches.
    installed(
        "reserved = \"0-1\"\nisolation = \"partition\"\ntick = \"1h\"\n[[unit]]\nname = \"db.service\"\ncpus = 2\n",
    )?;
    equal("its cgroup before it runs", row("unit/db.service")?["cgroup"].as_str(), Some(""))?;
    let cpus = cpus_of("unit/db.service")?;
    equal("db.service", property("db.service", "ActiveState")?, "inactive".to_owned())?;
    systemctl(&["start", "db.service"])?;
    partitioned("db.service", &cpus)?;
    for _ in 2..STARTS {
        systemctl(&["restart", "db.service"])?;
        partitioned("db.service", &cpus)?;
    }
    systemctl(&["stop", "db.service"])?;
    wait_until("the end of its cgroup", secs(10), || Ok(!cgroup("db.service").exists()))?;
    equal("its CPUs while it is stopped", cpus_of("unit/db.service")?, cpus.clone())?;
    // While no agent runs, systemd gives it what it was told.
    systemctl(&["stop", "truepin.service"])?;
    systemctl(&["start", "db.service"])?;
    equal("its CPUs without an agent", cgroup("db.service").cpus("cpuset.cpus.effective")?, cpus.clone())?;
    systemctl(&["start", "truepin.service"])?;
    partitioned("db.service", &cpus)?;
    let born = born_on("db")?;
    equal("main processes began on", born.clone(), vec![cpus.clone(); STARTS])?;
    let wide =
        log()?.lines().filter(|l| l.contains("> /sys/fs/cgroup/system.slice/db.service/cpuset.cpus")).count();
    guest.say(format!(
        "{} of {STARTS} main processes began on {cpus} alone; {wide} writes to its files",
        born.len()
    ));
    // A unit that is none, beside it.
    fs::write(
        "/etc/truepin/config.toml",
        format!(
            "{}[[unit]]\nname = \"nosuch.service\"\ncpus = 1\n",
            fs::read_to_string("/etc/truepin/config.toml")?
        ),
    )?;
    systemctl(&["restart", "truepin.service"])?;
    let problems = truepin_json(&["status"])?.1["problems"].to_string();
    anyhow::ensure!(problems.contains("take [[unit]] nosuch.service out of the configuration"), "{problems}");
    guest.say(problems);
    partitioned("db.service", &cpus)?;
    match host::reboot()? {}
}

fn reborn(guest: &mut Guest) -> Outcome {
    wait_until("both services", secs(90), || {
        Ok(property("truepin.service", "ActiveState")? == "active"
            && property("db.service", "ActiveState")? == "active")
    })?;
    let cpus = cpus_of("unit/db.service")?;
    partitioned("db.service", &cpus)?;
    let born = born_on("db")?;
    equal("the main process after the reboot began on", born.last(), Some(&cpus))?;
    let micros = |unit: &str, name: &str| -> anyhow::Result<u64> { Ok(property(unit, name)?.parse()?) };
    let ready = micros("truepin.service", "ActiveEnterTimestampMonotonic")?;
    let began = micros("db.service", "ExecMainStartTimestampMonotonic")?;
    guest.say(format!(
        "after the reboot: the agent ready at {} ms of the boot, the unit's main process begun {} ms later, on {cpus}",
        ready / 1000,
        began.saturating_sub(ready) / 1000
    ));
    anyhow::ensure!(ready <= began, "db.service began before the agent was ready");
    // Everything back: as it was before the first start.
    command("truepin", &["release", "--all"])?;
    let home = cgroup("db.service");
    // Up to 6.18 the list of a populated cgroup cannot be emptied.
    let list = home.read("cpuset.cpus")?;
    anyhow::ensure!(list.is_empty() || list == "0-11", "its list reads {list:?}");
    equal(
        "what it may use",
        home.cpus("cpuset.cpus.effective")?,
        Cgroup::root().cpus("cpuset.cpus.effective")?,
    )?;
    equal("its partition", home.read("cpuset.cpus.partition")?, "member".to_owned())?;
    equal("AllowedCPUs", property("db.service", "AllowedCPUs")?, String::new())?;
    anyhow::ensure!(!fs::exists("/run/systemd/system.control/db.service.d")?, "its drop-in is still there");
    Ok(())
}

fn misnamed(guest: &mut Guest) -> Outcome {
    service("web", "AllowedCPUs=2 40-41")?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["start", "web.service"])?;
    // What systemd makes of it.
    let list = cgroup("web.service").read("cpuset.cpus")?;
    guest.say(format!(
        "AllowedCPUs=2 40-41: the unit is {}, its cpuset.cpus reads {list:?}, its main process began on {}",
        property("web.service", "ActiveState")?,
        born_on("web")?.first().map(ToString::to_string).unwrap_or_default()
    ));
    installed("reserved = \"0-1\"\n")?;
    let mut told = String::new();
    let waited = wait_until("the finding", secs(40), || {
        let findings = truepin_json(&["status"])?.1["findings"].clone();
        let of = |f: &&Value| f["kind"] == "systemd";
        told = findings.as_array().into_iter().flatten().filter(of).map(|f| f["text"].to_string()).collect();
        Ok(!told.is_empty())
    });
    waited.with_context(|| log().unwrap_or_default())?;
    guest.say(&told);
    for part in [
        "AllowedCPUs=2,40-41 of web.service",
        "CPUs 40-41, which this machine does not have",
        "systemctl edit",
    ] {
        anyhow::ensure!(told.contains(part), "{part}: {told}");
    }
    Ok(())
}

/// What `truepin run` starts is a unit of systemd's, and stays as it is whatever systemd does.
fn scope(guest: &mut Guest) -> Outcome {
    const UNIT: &str = "truepin-run-x.scope";
    installed("reserved = \"0-1\"\n")?;
    let home = Cgroup::at(&format!("/truepin.slice/{UNIT}"));
    let shown = "grep Cpus_allowed_list /proc/self/status; cat /proc/self/cgroup; exec sleep 600";
    let mut run = Command::new("truepin");
    run.args(["run", "--cpus", "2", "--name", "x", "--", "/bin/sh", "-c", shown]);
    let out = fs::File::create("/rig/x").context("creating /rig/x")?;
    let mut run = run.stdin(Stdio::null()).stdout(out).spawn().context("starting truepin run")?;
    let mut said = String::new();
    wait_until("the command", secs(60), || {
        said = fs::read_to_string("/rig/x")?;
        Ok(said.lines().count() == 2)
    })
    .with_context(|| log().unwrap_or_default())?;
    let cpus = cpus_of("run/x")?;
    let stands = || -> Outcome {
        equal("its partition", home.read("cpuset.cpus.partition")?, "root".to_owned())?;
        equal("its CPUs", home.cpus("cpuset.cpus.effective")?, cpus.clone())
    };
    equal("what it said", said, format!("Cpus_allowed_list:\t{cpus}\n0::/truepin.slice/{UNIT}\n"))?;
    stands()?;
    for (name, value) in [
        ("ActiveState", "active"),
        ("Slice", "truepin.slice"),
        ("Delegate", "yes"),
        ("DelegateControllers", "cpuset"),
    ] {
        equal(name, property(UNIT, name)?, value.to_owned())?;
    }
    let written = log()?.lines().filter(|l| l.contains(": echo ")).count();
    systemctl(&["daemon-reload"])?;
    stands().context("after daemon-reload")?;
    systemctl(&["daemon-reexec"])?;
    stands().context("after daemon-reexec")?;
    systemctl(&["restart", "truepin.service"])?;
    stands().context("after a restart of the agent")?;
    let again = log()?.lines().filter(|l| l.contains(": echo ")).count();
    guest.say(format!(
        "{UNIT} has {cpus}; {} steps by daemon-reload, daemon-reexec and a restart",
        again - written
    ));
    // As an administrator ends it.
    systemctl(&["stop", UNIT])?;
    let code = wait_until("the end of truepin run", secs(30), || Ok(run.try_wait()?.is_some()));
    code.with_context(|| log().unwrap_or_default())?;
    wait_until("the end of its cgroup", secs(10), || Ok(!home.exists()))?;
    wait_until("the end of the owner", secs(10), || Ok(row("run/x").is_err()))?;
    // One that ends by itself, while nobody but truepin empties its cgroup.
    for round in 0..5 {
        command("truepin", &["run", "--cpus", "1", "--name", "x", "--", "true"])
            .with_context(|| format!("round {round}"))?;
        equal(
            "units left",
            systemctl(&["list-units", "--all", "--no-legend", "truepin-run-*"])?,
            String::new(),
        )?;
    }
    command("truepin", &["release", "--all"])?;
    anyhow::ensure!(!Cgroup::at("/truepin.slice").exists(), "truepin.slice is still there");
    equal("the slice", property("truepin.slice", "ActiveState")?, "inactive".to_owned())
        .with_context(|| log().unwrap_or_default())?;
    let findings = truepin_json(&["status"])?.1["findings"].to_string();
    anyhow::ensure!(!findings.contains("directly"), "{findings}");
    Ok(())
}
