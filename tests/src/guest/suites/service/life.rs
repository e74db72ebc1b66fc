//! The agent's own life: stopped, killed, hanging, a second one, and the machine booted anew.

use super::{db, installed, main_process, pinned, property, systemctl, truepin};
use crate::guest::{Guest, Outcome, Task, equal, run, secs, wait_until};
use anyhow::Context;
use nix::sys::signal::Signal;
use std::fs;

pub(super) fn lives(guest: &mut Guest) -> Outcome {
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

/// The one agent that there may be is asked for by name.
pub(super) fn second(guest: &mut Guest) -> Outcome {
    let task = db()?;
    let cpus = installed()?;
    let holder = main_process("truepin.service")?;
    let second = truepin(&["agent"])?.expect(3)?;
    guest.say(&second.stderr);
    anyhow::ensure!(second.stderr.contains(&format!("(pid {})", holder.0)), "{second}");
    // Nor one with a record and a socket of its own: the host is one.
    let other = [
        "TRUEPIN_STATE=/tmp/other.json",
        "TRUEPIN_SOCKET=/tmp/other.sock",
        "/usr/local/sbin/truepin",
        "agent",
    ];
    let second = run("env", &other)?.expect(3)?;
    anyhow::ensure!(second.stderr.contains(&format!("(pid {})", holder.0)), "{second}");
    equal("the first", main_process("truepin.service")?, holder)?;
    pinned(task, &cpus)
}

/// Ready again, as another process.
fn restarted(old: Task, times: u32) -> Outcome {
    another(old)?;
    equal("restarts", property("truepin.service", "NRestarts")?, times.to_string())
}

/// Waits for systemd's next agent.
pub(super) fn another(old: Task) -> Outcome {
    let waited = wait_until("the agent's restart", secs(120), || {
        // At one instant: a state of the old one and the process of the new one are no agent.
        let told = systemctl(&["show", "-p", "MainPID,SubState", "truepin.service"])?;
        let (running, pid) = (told.contains("SubState=running"), format!("MainPID={}\n", old.0));
        Ok(running && !format!("{told}\n").contains(&pid) && !told.contains("MainPID=0\n"))
    });
    waited.with_context(|| {
        let told = ["status", "--no-pager", "-l", "-n", "40", "truepin.service"];
        run("systemctl", &told).map_or_else(|e| format!("{e:#}"), |ran| ran.to_string())
    })
}

pub(super) fn watchdog(guest: &mut Guest) -> Outcome {
    use nix::{
        sys::{
            ptrace,
            wait::{WaitPidFlag, WaitStatus, waitpid},
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
        Ok(matches!(seen.context("waiting for the loop")?, WaitStatus::Exited(..) | WaitStatus::Signaled(..)))
    })?;
    restarted(agent, 1)?;
    pinned(task, &cpus)?;
    let log = run("journalctl", &["-q", "--no-pager", "-u", "truepin.service", "-g", "atchdog"])?;
    guest.say(log.stdout.lines().next().unwrap_or_default());
    anyhow::ensure!(log.stdout.contains("atchdog timeout"), "{log}");
    Ok(())
}
