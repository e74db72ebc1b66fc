//! What `/proc` says about a task: the reference that truepin's statements are held against.

use anyhow::Context;
use nix::{sched, sys::signal, time, unistd::Pid};
use std::{fs, time::Duration};
use truepin::{CpuId, CpuSet, NodeSet};

/// A thread by its id; a process by that of its main thread. It may be gone: then the calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Task(pub i32);

impl Task {
    /// The calling thread.
    #[must_use]
    pub fn me() -> Self {
        Self(nix::unistd::gettid().as_raw())
    }

    fn file(self, name: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/{name}", self.0);
        fs::read_to_string(&path).with_context(|| format!("reading {path}"))
    }

    fn status(self, key: &str) -> anyhow::Result<String> {
        let text = self.file("status")?;
        let found = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
        Ok(found.with_context(|| format!("no {key} in /proc/{}/status", self.0))?.trim().to_owned())
    }

    /// Fields of `/proc/PID/stat` from the third on (`state` is index 0): a comm may hold spaces and parentheses.
    fn stat(self) -> anyhow::Result<Vec<String>> {
        let text = self.file("stat")?;
        let (_, rest) = text.rsplit_once(')').with_context(|| format!("/proc/{}/stat: {text:?}", self.0))?;
        Ok(rest.split_whitespace().map(str::to_owned).collect())
    }

    /// `Cpus_allowed_list`: the CPUs that the kernel lets it use.
    pub fn allowed(self) -> anyhow::Result<CpuSet> {
        let text = self.status("Cpus_allowed_list")?;
        text.parse().with_context(|| format!("Cpus_allowed_list of {}: {text:?}", self.0))
    }

    /// `Mems_allowed_list`.
    pub fn mems_allowed(self) -> anyhow::Result<NodeSet> {
        let text = self.status("Mems_allowed_list")?;
        text.parse().with_context(|| format!("Mems_allowed_list of {}: {text:?}", self.0))
    }

    /// The CPU on which it runs or ran last (field 39 of `stat`).
    pub fn last_cpu(self) -> anyhow::Result<CpuId> {
        let stat = self.stat()?;
        let text = stat.get(36).with_context(|| format!("/proc/{}/stat has no field 39", self.0))?;
        Ok(CpuId(text.parse().with_context(|| format!("last CPU of {}: {text:?}", self.0))?))
    }

    /// The state letter: `R`, `S`, `Z`, …
    pub fn state(self) -> anyhow::Result<char> {
        self.stat()?.first().and_then(|s| s.chars().next()).context("a stat line without a state")
    }

    /// Whether it exists and is no zombie.
    #[must_use]
    pub fn is_alive(self) -> bool {
        self.state().is_ok_and(|s| s != 'Z' && s != 'X')
    }

    /// The name, at most 15 bytes.
    pub fn comm(self) -> anyhow::Result<String> {
        Ok(self.file("comm")?.trim_end().to_owned())
    }

    /// The cgroup's path below the cgroup2 mount, without leading slash; empty for the root cgroup.
    pub fn cgroup(self) -> anyhow::Result<String> {
        let text = self.file("cgroup")?;
        let line = text.lines().find_map(|l| l.strip_prefix("0::/"));
        Ok(line.with_context(|| format!("no cgroup2 line in /proc/{}/cgroup", self.0))?.to_owned())
    }

    /// The threads of the process, itself among them, by id.
    pub fn threads(self) -> anyhow::Result<Vec<Self>> {
        let path = format!("/proc/{}/task", self.0);
        let mut found = Vec::new();
        for entry in fs::read_dir(&path).with_context(|| format!("listing {path}"))? {
            let name = entry.with_context(|| format!("listing {path}"))?.file_name();
            let id = name.to_string_lossy();
            found.push(Self(id.parse().with_context(|| format!("thread {id:?} in {path}"))?));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// How often the scheduler has moved this thread between CPUs (`nr_migrations` of `/proc/PID/sched`).
    pub fn migrations(self) -> anyhow::Result<u64> {
        let text = self.file("sched")?;
        let line = text.lines().find_map(|l| l.strip_prefix("se.nr_migrations")?.split_once(':'));
        let (_, count) = line.with_context(|| format!("no nr_migrations in /proc/{}/sched", self.0))?;
        count.trim().parse().with_context(|| format!("nr_migrations {count:?}"))
    }

    /// The children of the process, whichever of its threads has them, dead ones among them.
    pub fn children(self) -> anyhow::Result<Vec<Self>> {
        let mut found = Vec::new();
        for thread in self.threads()? {
            let text = self.file(&format!("task/{}/children", thread.0))?;
            for pid in text.split_whitespace() {
                found.push(Self(pid.parse().with_context(|| format!("child {pid:?} of {}", self.0))?));
            }
        }
        Ok(found)
    }

    /// CPU time of the whole process so far, by its CPU clock (`clock_getcpuclockid(3)`): not rounded to ticks, and
    /// without stolen time.
    pub fn cpu_time(self) -> anyhow::Result<Duration> {
        let clock = time::clock_getcpuclockid(Pid::from_raw(self.0))
            .with_context(|| format!("the CPU clock of {}", self.0))?;
        let now = time::clock_gettime(clock).with_context(|| format!("the CPU clock of {}", self.0))?;
        Ok(Duration::from(now))
    }

    /// `sched_setaffinity(2)` from outside, on this thread alone. The kernel's answer is in the error.
    pub fn set_affinity(self, cpus: &CpuSet) -> anyhow::Result<()> {
        let mut mask = sched::CpuSet::new();
        for cpu in cpus.iter() {
            mask.set(usize::try_from(cpu.0)?).with_context(|| format!("CPU {} in a mask", cpu.0))?;
        }
        sched::sched_setaffinity(Pid::from_raw(self.0), &mask)
            .with_context(|| format!("sched_setaffinity({}, {cpus})", self.0))
    }

    /// Sends a signal.
    pub fn signal(self, signal: signal::Signal) -> anyhow::Result<()> {
        signal::kill(Pid::from_raw(self.0), signal).with_context(|| format!("{signal} to {}", self.0))
    }
}

/// Every process with memory of its own, PID 1 among them: no kernel threads, no zombies.
pub fn user_processes() -> anyhow::Result<Vec<Task>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("listing /proc")? {
        let name = entry.context("listing /proc")?.file_name();
        let Ok(pid) = name.to_string_lossy().parse::<i32>() else { continue };
        // One that ends while we look is not there.
        let kernel_or_dead = Task(pid).status("VmSize").is_err();
        if !kernel_or_dead {
            found.push(Task(pid));
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_itself() {
        let me = Task::me();
        let allowed = me.allowed().unwrap();
        assert!(allowed.contains(me.last_cpu().unwrap()));
        assert!(me.is_alive() && !Task(i32::MAX).is_alive());
        assert!(me.threads().unwrap().contains(&me));
        me.set_affinity(&allowed).unwrap();
        assert_eq!(me.allowed().unwrap(), allowed);
        let process = Task(nix::unistd::getpid().as_raw());
        assert!(process.cpu_time().unwrap() > Duration::ZERO);
        assert!(user_processes().unwrap().contains(&process));
    }
}
