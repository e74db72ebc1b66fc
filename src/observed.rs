//! The cgroup tree as read, and the one interface through which it is read and changed.
//!
//! Facts are re-read, never remembered (I5): a plan compares what is desired with an [`Observed`] that was just
//! taken, and a partition is judged by its sets, because its state line can be wrong.

use crate::{
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    nodeset::NodeSet,
    partition::{PartitionKind, PartitionState},
};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// What to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// The root, each named cgroup with everything between, the children of all cgroups on those ways, and the
    /// children of the named ones. Names that do not exist are left out of the answer.
    Around(Vec<CgroupPath>),
    /// These cgroups alone, and the root's sets. Names that do not exist are left out of the answer.
    Named(Vec<CgroupPath>),
}

/// The first word of `cgroup.type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CgroupKind {
    /// `domain`; the root counts as one.
    Domain,
    /// `domain threaded`
    DomainThreaded,
    /// `domain invalid`: takes no process.
    DomainInvalid,
    /// `threaded`
    Threaded,
}

/// One cgroup's cpuset files as read. On the root only the two effective sets exist; the others are empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpusetObserved {
    /// `cpuset.cpus`
    pub cpus: CpuSet,
    /// `cpuset.cpus.effective`
    pub effective: CpuSet,
    /// `cpuset.cpus.exclusive`; `None` where the kernel has no such file (before 6.7) and on the root.
    pub exclusive: Option<CpuSet>,
    /// `cpuset.cpus.exclusive.effective`; `None` as above.
    pub exclusive_effective: Option<CpuSet>,
    /// `cpuset.cpus.partition`; `None` on the root.
    pub partition: Option<PartitionState>,
    /// `cpuset.mems`
    pub mems: NodeSet,
    /// `cpuset.mems.effective`
    pub mems_effective: NodeSet,
}

impl CpusetObserved {
    /// Whether this is a partition that the kernel honours.
    #[must_use]
    pub fn is_partition(&self) -> bool {
        self.partition.as_ref().is_some_and(PartitionState::is_partition)
    }
}

/// One cgroup as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupObserved {
    /// Inode number of the directory.
    pub id: CgroupId,
    /// `None` where the parent does not enable the controller, so that the files are absent.
    pub cpuset: Option<CpusetObserved>,
    /// Whether `cgroup.subtree_control` enables cpuset for the children.
    pub enables_cpuset: bool,
    /// Whether a process lives here or below (`cgroup.events`); true for the root.
    pub populated: bool,
    /// Whether a process lives in this very cgroup (`cgroup.procs`).
    pub has_processes: bool,
    /// `cgroup.type`
    pub kind: CgroupKind,
}

/// A reading of (a part of) the tree.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// The cgroups in scope; the root is always there where cpuset is on cgroup v2.
    pub cgroups: BTreeMap<CgroupPath, CgroupObserved>,
    /// `/sys/devices/system/cpu/online`
    pub online: CpuSet,
    /// Read from a copied tree: files hold what was written, and derived files do not follow, so sets that the kernel
    /// would have computed are not judged.
    pub copied: bool,
    /// See [`Before`].
    pub before: Arc<Before>,
}

/// What files of systemd's units held before truepin had systemd write them, by its properties of then. A unit's cgroup that
/// is made anew is born with what truepin set: that is not what is to be put back one day.
pub type Before = BTreeMap<CgroupPath, BTreeMap<CpusetFile, String>>;

impl Observed {
    /// The cpuset files of `path`, if it was read and has them.
    #[must_use]
    pub fn cpuset(&self, path: &CgroupPath) -> Option<&CpusetObserved> {
        self.cgroups.get(path)?.cpuset.as_ref()
    }

    /// The children of `path` that were read.
    pub fn children<'a>(
        &'a self,
        path: &'a CgroupPath,
    ) -> impl Iterator<Item = (&'a CgroupPath, &'a CgroupObserved)> {
        self.cgroups.iter().filter(move |(p, _)| p.parent().as_ref() == Some(path))
    }

    /// Replaces what was read again: `newer` came from the scope of named cgroups `asked`.
    pub fn merge(&mut self, asked: &[CgroupPath], newer: Self) {
        for path in asked {
            self.cgroups.remove(path);
        }
        self.cgroups.extend(newer.cgroups);
        (self.online, self.copied, self.before) = (newer.online, newer.copied, newer.before);
    }
}

/// What is written into a cpuset file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A CPU list; empty means inherit.
    Cpus(CpuSet),
    /// A partition state.
    Partition(PartitionKind),
    /// A node list; empty means inherit.
    Mems(NodeSet),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpus(set) => set.fmt(f),
            Self::Partition(kind) => kind.fmt(f),
            Self::Mems(set) => set.fmt(f),
        }
    }
}

/// One change of the kernel's state. Plain data: it can be printed, simulated and refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// `mkdir`
    Create(CgroupPath),
    /// `+cpuset` into `cgroup.subtree_control`
    Enable(CgroupPath),
    /// One value into one cpuset file, in one `write(2)`.
    Write {
        /// The cgroup.
        path: CgroupPath,
        /// The file.
        file: CpusetFile,
        /// What it holds now, as printed.
        old: String,
        /// What it is to hold.
        new: Value,
    },
    /// A process (all its threads) into `cgroup.procs`.
    Enter {
        /// The cgroup.
        path: CgroupPath,
        /// Process id in the agent's pid namespace.
        pid: u32,
    },
    /// `rmdir`
    Remove(CgroupPath),
}

impl Step {
    /// The cgroup that is changed.
    #[must_use]
    pub fn path(&self) -> &CgroupPath {
        match self {
            Self::Create(path)
            | Self::Enable(path)
            | Self::Remove(path)
            | Self::Write { path, .. }
            | Self::Enter { path, .. } => path,
        }
    }

    /// The shell line that an operator would type; `mount` is where cgroup2 is mounted.
    #[must_use]
    pub fn shell(&self, mount: &str) -> String {
        let dir = |p: &CgroupPath| {
            quote(&if p.is_root() { mount.to_owned() } else { format!("{mount}/{}", p.as_str()) })
        };
        match self {
            Self::Create(p) => format!("mkdir {}", dir(p)),
            Self::Enable(p) => format!("echo +cpuset > {}/cgroup.subtree_control", dir(p)),
            Self::Write { path, file, new, .. } => {
                let text = new.to_string();
                let text = if text.is_empty() { "''" } else { &text };
                format!("echo {text} > {}/{file}", dir(path))
            }
            Self::Enter { path, pid } => format!("echo {pid} > {}/cgroup.procs", dir(path)),
            Self::Remove(p) => format!("rmdir {}", dir(p)),
        }
    }
}

/// Quotes for a POSIX shell where needed.
#[must_use]
pub fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:@+=,".contains(c);
    if text.chars().all(plain) { text.into() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// A read or a write that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation} {target}{}: {cause}", value.as_ref().map(|v| format!(" (value {v:?})")).unwrap_or_default())]
pub struct KernelError {
    /// What was tried: `read`, `write`, `mkdir`, …
    pub operation: &'static str,
    /// The file or directory.
    pub target: String,
    /// The value that was written or could not be parsed.
    pub value: Option<String>,
    /// The error number, where the kernel gave one.
    pub errno: Option<i32>,
    /// In words.
    pub cause: String,
}

/// The kernel's cgroup interface. Two implementations: cgroupfs, and the fake that the tests hold against it.
pub trait Kernel {
    /// Reads the cgroups in scope. A cgroup that vanishes while it is read is left out; any other failure is an
    /// error, because a plan from half a reading would be wrong.
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError>;

    /// Makes one change. Success means that the kernel took it, not that it honours it: observe again.
    fn apply(&mut self, step: &Step) -> Result<(), KernelError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_print_as_shell_lines() {
        let path: CgroupPath = "truepin.slice/run-a b".parse().unwrap();
        let mount = "/sys/fs/cgroup";
        let write = |new| Step::Write { path: path.clone(), file: CpusetFile::Cpus, old: String::new(), new };
        for (step, line) in [
            (Step::Create("a".parse().unwrap()), "mkdir /sys/fs/cgroup/a"),
            (Step::Enable(CgroupPath::root()), "echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control"),
            (
                write(Value::Cpus("2-3".parse().unwrap())),
                "echo 2-3 > '/sys/fs/cgroup/truepin.slice/run-a b'/cpuset.cpus",
            ),
            (
                write(Value::Cpus(CpuSet::new())),
                "echo '' > '/sys/fs/cgroup/truepin.slice/run-a b'/cpuset.cpus",
            ),
            (Step::Enter { path: "a".parse().unwrap(), pid: 7 }, "echo 7 > /sys/fs/cgroup/a/cgroup.procs"),
            (Step::Remove("a".parse().unwrap()), "rmdir /sys/fs/cgroup/a"),
        ] {
            assert_eq!(step.shell(mount), line);
        }
    }
}
