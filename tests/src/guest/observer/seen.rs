//! The machine as it is read: every cgroup's files and every thread's mask.
//!
//! What goes away meanwhile is left out. What is there and cannot be read or understood is an error: an observer to whom
//! nothing can be shown would find nothing wrong.

use super::Cpus;
use crate::guest::{Cgroup, cgroup::errno, machine};
use anyhow::Context;
use nix::libc;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// One cgroup's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Files {
    pub(super) listed: Cpus,
    pub(super) effective: Cpus,
    /// `cpuset.cpus.partition`; the root has none.
    pub(super) partition: String,
    pub(super) populated: bool,
}

impl Files {
    pub(super) fn is_partition(&self) -> bool {
        self.partition == "root" || self.partition == "isolated"
    }
}

/// One thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) tid: i32,
    pub(super) comm: String,
    pub(super) cgroup: String,
    pub(super) allowed: Cpus,
    pub(super) kernel: bool,
    /// The kernel lets nobody change its mask (`PF_NO_SETAFFINITY`).
    pub(super) bound: bool,
}

impl Thread {
    pub(super) fn name(&self) -> String {
        format!("thread {} ({})", self.tid, self.comm)
    }
}

/// The machine as it was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    pub(super) online: Cpus,
    /// Those with cpuset files, the root (`""`) among them.
    pub(super) cgroups: BTreeMap<String, Files>,
    /// Those without.
    pub(super) bare: BTreeSet<String>,
    /// Whether any has `cpuset.cpus.exclusive`: without it partitions are to be had below partitions only.
    pub(super) exclusive_file: bool,
    pub(super) threads: Vec<Thread>,
}

impl Seen {
    /// Reads it.
    pub fn now() -> anyhow::Result<Self> {
        let mut seen =
            Self { online: list(&machine::read("/sys/devices/system/cpu/online")?)?, ..Self::default() };
        let mut todo = vec![Cgroup::root()];
        while let Some(cgroup) = todo.pop() {
            let found = look(&cgroup)?;
            if found == Look::Gone {
                continue;
            }
            todo.extend(there(cgroup.children())?.unwrap_or_default());
            let path = cgroup.path().to_owned();
            match found {
                Look::Files(files) => {
                    seen.exclusive_file |= cgroup.dir().join("cpuset.cpus.exclusive").exists();
                    seen.cgroups.insert(path, files);
                }
                Look::Bare => drop(seen.bare.insert(path)),
                Look::Gone => {}
            }
        }
        for process in fs::read_dir("/proc").context("listing /proc")? {
            let process = process.context("listing /proc")?;
            if process.file_name().to_string_lossy().parse::<i32>().is_err() {
                continue;
            }
            let dir = process.path().join("task");
            let listing = || format!("listing {}", dir.display());
            let Some(tasks) = there(fs::read_dir(&dir).with_context(listing))? else { continue };
            for task in tasks {
                let Some(task) = there(task.with_context(listing))? else { continue };
                seen.threads.extend(thread_at(&task.path())?);
            }
        }
        Ok(seen)
    }

    /// How many cgroups and threads were read.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.cgroups.len(), self.threads.len())
    }

    /// The CPUs that were online.
    #[must_use]
    pub fn online(&self) -> &Cpus {
        &self.online
    }
}

/// A file's list. The kernel ends it with a newline.
fn list(text: &str) -> anyhow::Result<Cpus> {
    text.trim_end().parse()
}

/// `None` for what is gone: no such file, a file of a removed cgroup (ENODEV), of a task that has ended (ESRCH).
fn there<T>(read: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(e) if matches!(errno(&e), Some(libc::ENOENT | libc::ENODEV | libc::ESRCH)) => Ok(None),
        Err(e) => Err(e),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// Removed.
    Gone,
    /// It has no cpuset files: its parent does not enable the controller.
    Bare,
    Files(Files),
}

fn look(cgroup: &Cgroup) -> anyhow::Result<Look> {
    const TRIES: u32 = 5;
    let root = cgroup.path().is_empty();
    let named = |file: &str| format!("{}/{file}", cgroup.dir().display());
    let cpus =
        |file: &str| there(cgroup.read(file).and_then(|text| list(&text).with_context(|| named(file))));
    for _ in 0..TRIES {
        let effective = cpus("cpuset.cpus.effective")?;
        if root {
            let effective = effective.with_context(|| format!("no {}", named("cpuset.cpus.effective")))?;
            return Ok(Look::Files(Files { effective, populated: true, ..Files::default() }));
        }
        let (listed, partition) = (cpus("cpuset.cpus")?, there(cgroup.read("cpuset.cpus.partition"))?);
        let events = there(cgroup.read("cgroup.events"))?;
        if !cgroup.exists() {
            return Ok(Look::Gone);
        }
        match (effective, listed, partition, events) {
            (Some(effective), Some(listed), Some(partition), Some(events)) => {
                let populated = events.lines().find_map(|l| l.strip_prefix("populated "));
                let populated = match populated {
                    Some("0") => false,
                    Some("1") => true,
                    _ => anyhow::bail!("{}: {events:?}", named("cgroup.events")),
                };
                return Ok(Look::Files(Files { listed, effective, partition, populated }));
            }
            (None, None, None, Some(_)) => return Ok(Look::Bare),
            // The controller comes or goes, or the cgroup is another one of the same name.
            _ => {}
        }
    }
    anyhow::bail!("{}: in {TRIES} looks it had some of its files and not others", cgroup.dir().display())
}

/// `None` for a thread that is gone or a zombie, which has no say in anything any more.
pub(super) fn thread_at(dir: &Path) -> anyhow::Result<Option<Thread>> {
    let read = |file: &str| {
        let path = dir.join(file);
        there(fs::read_to_string(&path).with_context(|| format!("reading {}", path.display())))
    };
    let (Some(stat), Some(status), Some(cgroup)) = (read("stat")?, read("status")?, read("cgroup")?) else {
        return Ok(None);
    };
    let tid = dir.file_name().and_then(|n| n.to_str()?.parse().ok());
    let tid = tid.with_context(|| format!("{} is no thread's", dir.display()))?;
    parse(tid, &stat, &status, &cgroup).with_context(|| format!("{}: {stat:?}", dir.display()))
}

/// From `/proc/TID/{stat,status,cgroup}` (proc(5)); `None` for a zombie.
fn parse(tid: i32, stat: &str, status: &str, cgroup: &str) -> anyhow::Result<Option<Thread>> {
    const KTHREAD: u64 = 0x0020_0000;
    const NO_SETAFFINITY: u64 = 0x0400_0000;
    // A name may hold anything, parentheses and blanks too.
    let (head, rest) = stat.rsplit_once(')').context("stat without a name")?;
    let (_, comm) = head.split_once('(').context("stat without a name")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(*fields.first().context("stat without a state")?, "Z" | "X") {
        return Ok(None);
    }
    let flags: u64 = fields.get(6).and_then(|f| f.parse().ok()).context("stat without flags")?;
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    let allowed = list(allowed.context("status without Cpus_allowed_list")?.trim_start())?;
    let cgroup =
        cgroup.lines().find_map(|l| l.strip_prefix("0::/")).context("it is in no cgroup of version 2")?;
    Ok(Some(Thread {
        tid,
        comm: comm.to_owned(),
        cgroup: cgroup.to_owned(),
        allowed,
        kernel: flags & KTHREAD != 0,
        bound: flags & NO_SETAFFINITY != 0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "7 (a) b) S 1 1 1 0 -1 69238848 0 0\n";
    const STATUS: &str = "Name:\ta\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n";

    #[test]
    fn a_thread() {
        let thread = parse(7, STAT, STATUS, "1:cpu:/x\n0::/a/b\n").unwrap().unwrap();
        let expected = Thread {
            tid: 7,
            comm: "a) b".into(),
            cgroup: "a/b".into(),
            allowed: "0-3".parse().unwrap(),
            kernel: true,
            bound: true,
        };
        assert_eq!(thread, expected);
        assert_eq!(parse(7, &STAT.replace(" S ", " Z "), STATUS, "0::/").unwrap(), None);
    }

    #[test]
    fn what_is_not_understood_is_no_silence() {
        for (want, stat, status, cgroup) in [
            ("without a name", "7", STATUS, "0::/"),
            ("without a state", "7 (a)", STATUS, "0::/"),
            ("without flags", "7 (a) S 1", STATUS, "0::/"),
            ("without Cpus_allowed_list", STAT, "Name:\ta\n", "0::/"),
            ("no CPU's number", STAT, "Cpus_allowed_list:\tall\n", "0::/"),
            ("no cgroup of version 2", STAT, STATUS, "1:cpu:/x\n"),
        ] {
            let error = format!("{:#}", parse(7, stat, status, cgroup).unwrap_err());
            assert!(error.contains(want), "{want}: {error}");
        }
    }

    #[test]
    fn this_machine_is_read() {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        // Only where the host has a cgroup2 line.
        if !own.lines().any(|l| l.starts_with("0::/")) {
            return;
        }
        let me = std::process::id();
        let seen = thread_at(Path::new(&format!("/proc/{me}/task/{me}"))).unwrap().unwrap();
        assert!(!seen.kernel && !seen.bound && !seen.allowed.is_empty());
        assert_eq!(thread_at(Path::new("/proc/no/task/1")).unwrap(), None);
    }

    #[test]
    fn gone_is_not_broken() {
        let failed =
            |e: i32| Err::<(), _>(anyhow::Error::from(std::io::Error::from_raw_os_error(e)).context("x"));
        for gone in [libc::ENOENT, libc::ENODEV, libc::ESRCH] {
            assert_eq!(there(failed(gone)).unwrap(), None);
        }
        assert!(there(failed(libc::EACCES)).is_err());
        assert!(there(Err::<(), _>(anyhow::anyhow!("a list that is none"))).is_err());
        assert_eq!(look(&Cgroup::at("no/such/cgroup")).unwrap(), Look::Gone);
    }
}
