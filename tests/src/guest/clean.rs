//! A clean machine between scenarios, so that none depends on the order.

use super::{
    agent,
    cgroup::Cgroup,
    machine,
    task::{self, Task},
    wait::{secs, wait_until},
};
use anyhow::Context;
use nix::sys::{signal::Signal, wait};
use std::{fs, io, path::Path};

/// Where PID 1 lives.
pub const DRIVER: &str = "driver";

/// Files of truepin that a scenario may leave behind.
const TRACES: [&str; 4] = ["/run/truepin", "/var/lib/truepin", "/var/log/truepin", agent::CONFIG];

/// Brings CPUs online, ends every process but PID 1, removes every cgroup but `/driver` with the controllers that were
/// enabled for them, and removes truepin's files. What cannot be undone is an error: it would spoil what follows.
pub fn up() -> anyhow::Result<()> {
    end_processes()?;
    for cpu in machine::present()?.difference(&machine::online()?).iter() {
        machine::set_online(cpu, true)?;
    }
    remove_cgroups()?;
    for path in TRACES {
        let path = Path::new(path);
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("removing {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn end_processes() -> anyhow::Result<()> {
    wait_until("the end of every process of the scenario", secs(20), || {
        let others: Vec<Task> = task::user_processes()?.into_iter().filter(|t| t.0 != 1).collect();
        for task in &others {
            // It may end by itself between the look and the signal; the next look tells.
            if let Err(e) = task.signal(Signal::SIGKILL)
                && task.is_alive()
            {
                return Err(e);
            }
        }
        reap();
        Ok(others.is_empty())
    })
}

/// Takes the exit status of every dead child, orphans that PID 1 inherited among them. Only for moments when no
/// command is being waited for.
fn reap() {
    while let Ok(status) = wait::waitpid(None, Some(wait::WaitPidFlag::WNOHANG)) {
        if status == wait::WaitStatus::StillAlive {
            break;
        }
    }
}

fn remove_cgroups() -> anyhow::Result<()> {
    let root = Cgroup::root();
    for cgroup in root.children()? {
        if cgroup.path() == DRIVER {
            for below in cgroup.children()? {
                remove(&below)?;
            }
        } else {
            remove(&cgroup)?;
        }
    }
    for cgroup in [Cgroup::at(DRIVER), root] {
        let enabled = cgroup.read("cgroup.subtree_control")?;
        let off = enabled.split_whitespace().map(|c| format!("-{c}")).collect::<Vec<_>>().join(" ");
        if !off.is_empty() {
            cgroup.write("cgroup.subtree_control", &off)?;
        }
    }
    Ok(())
}

/// Partitions end before their cgroups go: 6.12.117 keeps an invalid remote one on a list when it is removed, and panics
/// over that list later (`list_del` corruption in `remote_partition_disable`).
fn end_partitions(cgroup: &Cgroup) -> anyhow::Result<()> {
    for child in cgroup.children()? {
        end_partitions(&child)?;
    }
    // Without the controller there is no such file.
    if cgroup.read("cpuset.cpus.partition").is_ok_and(|state| state != "member") {
        cgroup.write("cpuset.cpus.partition", "member")?;
    }
    Ok(())
}

/// A killed task leaves its cgroup a moment after its status can be taken, so the first tries may find it busy.
fn remove(cgroup: &Cgroup) -> anyhow::Result<()> {
    end_partitions(cgroup)?;
    let mut last = None;
    let gone = wait_until("an empty cgroup", secs(10), || {
        last = cgroup.remove().err();
        Ok(last.is_none())
    });
    match (gone, last) {
        (Err(_), Some(why)) => Err(why),
        (gone, _) => gone,
    }
}
