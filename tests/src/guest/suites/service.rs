//! The agent as a service of a host with systemd. Each scenario has a machine of its own (`tests/vm/systemd.sh`).

use crate::guest::{
    Cgroup, Guest, Outcome, Ran, Scenario, Style, Suite, Task, command::run_for, equal, run, secs,
    truepin_json, wait_until,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use std::{collections::BTreeMap, fs, process::Command};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "service",
    about: "the agent as a service, on a host with systemd",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("the host runs systemd", systemd),
        Scenario::new("from a clean host to a unit that is held and back", there_and_back).limit(240),
        Scenario::new("stop kill and restart leave pins alone", lives).limit(240),
        Scenario::new("a loop that hangs is started anew", watchdog).limit(240),
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

/// The service, with the steps of the README; and the CPUs of db.service.
fn installed() -> anyhow::Result<CpuSet> {
    make("install")?;
    systemctl(&["enable", "--now", "truepin"])?;
    truepin(&["assign", "unit/db.service", "--cgroup", DB, "--cpus", "2"])?.ok()?;
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

fn there_and_back(guest: &mut Guest) -> Outcome {
    let task = db()?;
    let before = all_files()?;
    let cpus = installed()?;
    equal("the service", property("truepin.service", "SubState")?, "running".to_owned())?;
    guest.say(property("truepin.service", "StatusText")?);
    pinned(task, &cpus)?;
    // Emulation stretches the bursts of kernel threads beyond their budget: the answer shows that they are all there was.
    let verdict = truepin(&["verify", "--for", "2s"])?;
    guest.say(&verdict.stdout);
    anyhow::ensure!([0, 1].contains(&verdict.code()), "{verdict}");
    let reasons = truepin_json(&["verify"])?.1;
    anyhow::ensure!(!reasons.to_string().contains("foreign tasks ran"), "{reasons:#}");
    let second = truepin(&["agent"])?.expect(3)?;
    let holder = main_process("truepin.service")?;
    anyhow::ensure!(second.stderr.contains(&format!("(pid {})", holder.0)), "{second}");
    guest.say(second.stderr.lines().next().unwrap_or_default());
    let said = make("uninstall")?;
    guest.say(said.stdout);
    anyhow::ensure!(task.is_alive(), "db.service died");
    let mut differ = Vec::new();
    let same = wait_until("the files as they were", secs(20), || {
        let after = all_files()?;
        differ = before
            .iter()
            .filter(|(k, v)| after.get(*k) != Some(v))
            .map(|(k, v)| format!("{k}: {v:?}, now {:?}", after.get(k)))
            .collect();
        differ.extend(
            after.iter().filter(|(k, _)| !before.contains_key(*k)).map(|(k, v)| format!("{k}: new, {v:?}")),
        );
        Ok(differ.is_empty())
    });
    same.with_context(|| format!("different are {}: {differ:#?}", differ.len()))?;
    guest.say(format!("{} files are equal", before.len()));
    anyhow::ensure!(fs::exists("/usr/local/sbin/truepin").is_ok_and(|e| !e), "the binary is still there");
    Ok(())
}

fn lives(guest: &mut Guest) -> Outcome {
    let task = db()?;
    let cpus = installed()?;
    pinned(task, &cpus)?;
    systemctl(&["stop", "truepin"])?;
    pinned(task, &cpus).context("stopped")?;
    systemctl(&["daemon-reload"])?;
    pinned(task, &cpus).context("stopped, and systemd looked at its units again")?;
    systemctl(&["start", "truepin"])?;
    pinned(task, &cpus).context("started again")?;
    let first = main_process("truepin.service")?;
    first.signal(Signal::SIGKILL)?;
    restarted(first, 1)?;
    pinned(task, &cpus).context("killed")?;
    let second = main_process("truepin.service")?;
    // Not SIGSEGV: the first one that comes from outside goes to Rust's guard against stack overflow, and is lost.
    second.signal(Signal::SIGABRT)?;
    restarted(second, 2)?;
    pinned(task, &cpus).context("crashed")?;
    guest.say(format!("NRestarts={}, CPUs {cpus}", property("truepin.service", "NRestarts")?));
    Ok(())
}

/// Ready again, as another process.
fn restarted(old: Task, times: u32) -> Outcome {
    let waited = wait_until("the agent's restart", secs(60), || {
        Ok(property("truepin.service", "NRestarts")? == times.to_string()
            && property("truepin.service", "SubState")? == "running"
            && main_process("truepin.service")? != old)
    });
    waited.with_context(|| {
        let told = ["status", "--no-pager", "-l", "-n", "40", "truepin.service"];
        run("systemctl", &told).map_or_else(|e| format!("{e:#}"), |ran| ran.to_string())
    })
}

fn watchdog(guest: &mut Guest) -> Outcome {
    use nix::{
        sys::{
            ptrace,
            wait::{WaitPidFlag, waitpid},
        },
        unistd::Pid,
    };
    fs::create_dir_all("/etc/systemd/system/truepin.service.d")?;
    fs::write("/etc/systemd/system/truepin.service.d/short.conf", "[Service]\nWatchdogSec=4\n")?;
    let task = db()?;
    let cpus = installed()?;
    // With nothing to do, and a tick of 30 s, the loop lives: three times the limit.
    std::thread::sleep(secs(12));
    equal("restarts of an idle agent", property("truepin.service", "NRestarts")?, "0".to_owned())?;
    let agent = main_process("truepin.service")?;
    let mut hangs = None;
    for thread in agent.threads()? {
        if thread.comm()? == "truepin-loop" {
            hangs = Some(Pid::from_raw(thread.0));
        }
    }
    let hangs = hangs.context("no thread truepin-loop")?;
    // That thread alone: the ones of the socket live on.
    ptrace::seize(hangs, ptrace::Options::empty()).context("seizing the loop")?;
    ptrace::interrupt(hangs).context("stopping the loop")?;
    waitpid(hangs, Some(WaitPidFlag::__WALL)).context("waiting for the stopped loop")?;
    std::os::unix::net::UnixStream::connect("/run/truepin/truepin.sock")
        .context("the socket's threads live")?;
    // A traced thread that has ended holds its process up until its tracer has seen it.
    wait_until("the end of the agent that hangs", secs(60), || {
        let seen = waitpid(hangs, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG));
        Ok(seen.is_err() || !agent.is_alive())
    })?;
    restarted(agent, 1)?;
    pinned(task, &cpus)?;
    let log = run("journalctl", &["-q", "--no-pager", "-u", "truepin.service", "-g", "atchdog"])?;
    guest.say(log.stdout.lines().next().unwrap_or_default());
    anyhow::ensure!(log.stdout.contains("atchdog timeout"), "{log}");
    Ok(())
}
