//! The agent as a service of a host with systemd. Each scenario has a machine of its own (`tests/vm/systemd.sh`).

mod life;
mod readme;
mod rights;
mod storm;

use crate::guest::{
    Cgroup, Guest, Outcome, Ran, Scenario, Style, Suite, Task, command::run_for, equal, run, secs,
    truepin_json, wait_until,
};
use anyhow::Context;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "service",
    about: "the agent as a service, on a host with systemd",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("the host runs systemd", systemd),
        Scenario::new("from a clean host to a unit that is held by the README alone", readme::readme)
            .limit(240),
        Scenario::new("after a reboot it is pinned before its program starts", readme::reboot).limit(400),
        Scenario::new("stop kill and restart leave pins alone", life::lives).limit(400),
        Scenario::new("a second agent is told who holds the host", life::second).limit(120),
        Scenario::new("a loop that hangs is started anew", life::watchdog).limit(400),
        Scenario::new("every capability is there for a reason", rights::capabilities).limit(900),
        Scenario::new("what the agent may not do it cannot", rights::hardened).limit(240),
        Scenario::new("installed then a storm then gone where nobody used cpusets", storm::unused).limit(900),
        // 6.12 warns of what systemd does to it: a list of a unit (`AllowedCPUs=`) that is written over a remote partition
        // beside it, and the CPUs of what is invalid by that given back (the suite lockstep has both).
        Scenario::new("installed then a storm then gone where others have lists", storm::used)
            .limit(900)
            .allow(&["update_parent_effective_cpumask", "partition_xcpus_del"]),
    ],
};

/// Where systemd.sh puts what it brings.
const TREE: &str = "/rig/truepin";
const BUILT: &str = "BUILT=/rig/bin";
const DB: &str = "/system.slice/db.service";

fn systemd(guest: &mut Guest) -> Outcome {
    equal("PID 1", Task(1).comm()?, "systemd".to_owned())?;
    let version = run("systemctl", &["--version"])?.ok()?.stdout;
    let failed = run("systemctl", &["--failed", "--no-legend", "--plain"])?.ok()?.stdout;
    guest.say(format!("{}; failed units: {failed:?}", version.lines().next().unwrap_or_default()));
    let controllers = Cgroup::root().read("cgroup.controllers")?;
    anyhow::ensure!(controllers.split(' ').any(|c| c == "cpuset"), "{controllers}");
    run("busctl", &["status", "org.freedesktop.systemd1"])?.ok()?;
    Ok(())
}

/// Every file about cpusets of every cgroup that is not a unit's which came and went: path to content.
fn cpuset_files(of: &Cgroup, into: &mut BTreeMap<String, String>) -> Outcome {
    let entries = fs::read_dir(of.dir()).with_context(|| format!("listing {}", of.dir().display()))?;
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("cpuset.") || name == "cgroup.subtree_control" {
            into.insert(format!("/{}/{name}", of.path()), of.read(&name)?);
        }
    }
    for child in of.children()? {
        cpuset_files(&child, into)?;
    }
    Ok(())
}

fn all_files() -> anyhow::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    cpuset_files(&Cgroup::root(), &mut files)?;
    Ok(files)
}

fn make(target: &str) -> anyhow::Result<Ran> {
    run_for(secs(120), Command::new("make").args(["-C", TREE, target, BUILT]))?.ok()
}

fn systemctl(args: &[&str]) -> anyhow::Result<String> {
    Ok(run_for(secs(120), Command::new("systemctl").args(args))?.ok()?.stdout.trim().to_owned())
}

fn property(unit: &str, name: &str) -> anyhow::Result<String> {
    systemctl(&["show", "--value", "-p", name, unit])
}

fn truepin(args: &[&str]) -> anyhow::Result<Ran> {
    run_for(secs(60), Command::new("/usr/local/sbin/truepin").args(args))
}

/// A unit that somebody has on this host.
fn db() -> anyhow::Result<Task> {
    let unit = "[Service]\nExecStart=/rig/bin/truepin-guest blink --threads 2 --on-ms 1 --off-ms 50\n";
    fs::write("/etc/systemd/system/db.service", unit).context("writing db.service")?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["start", "db.service"])?;
    main_process("db.service")
}

fn main_process(unit: &str) -> anyhow::Result<Task> {
    let pid = property(unit, "MainPID")?;
    Ok(Task(pid.parse().with_context(|| format!("MainPID of {unit}: {pid:?}"))?))
}

/// The service, with the steps of the README.
fn installed_agent() -> Outcome {
    make("install")?;
    systemctl(&["enable", "--now", "truepin"])?;
    Ok(())
}

/// As [`installed_agent`]; and the CPUs of db.service.
fn installed() -> anyhow::Result<CpuSet> {
    installed_agent()?;
    truepin(&["assign", "unit/db.service", "--cgroup", DB, "--cpus", "2"])?.ok()?;
    owned()
}

/// The CPUs of the one owner.
fn owned() -> anyhow::Result<CpuSet> {
    let (code, owner) = truepin_json(&["list"])?;
    equal("exit status of list", code, 0)?;
    owner["owners"][0]["cpus"].as_str().context("no CPUs")?.parse().context("CPUs")
}

fn pinned(task: Task, cpus: &CpuSet) -> Outcome {
    for thread in task.threads()? {
        equal("the mask of a thread of db.service", thread.allowed()?, cpus.clone())?;
    }
    equal("its cgroup's", Cgroup::at(DB).cpus("cpuset.cpus.effective")?, cpus.clone())
}

/// Waits until every file is what it was: no byte differs, none is new, none is gone.
fn byte_equal(guest: &Guest, before: &BTreeMap<String, String>) -> Outcome {
    let mut differ = Vec::new();
    let same = wait_until("the files as they were", secs(20), || {
        let after = all_files()?;
        let of = |files: &BTreeMap<String, String>, name: &str| files.get(name).cloned();
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        differ = names
            .into_iter()
            .filter(|name| before.get(*name) != after.get(*name))
            .map(|name| format!("{name}: {:?}, now {:?}", of(before, name), of(&after, name)))
            .collect();
        Ok(differ.is_empty())
    });
    same.with_context(|| format!("different are {}: {differ:#?}", differ.len()))?;
    guest.say(format!("{} files are byte-equal to before", before.len()));
    Ok(())
}
