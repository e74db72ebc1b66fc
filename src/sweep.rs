//! What the files and the tasks' masks say, independent of BPF.
//!
//! Problem: a partition's state line proves nothing. After hotplug it can read `root` while the root cgroup may run
//! on its CPUs; when a controller was switched off and on, masks keep the old value. So sets are compared, in both
//! directions, and masks with sets.
//! Steps: for each owner: the set the kernel gives it is the assigned one; nobody who is not inside it may use any
//! of its CPUs; no task of its is allowed outside.
//! Invariant: a narrower mask is the application's own choice and no finding; a wider or disjoint one is.

use crate::{
    assignments::Mode,
    cgroup::CgroupPath,
    cpuset::{CpuId, CpuSet},
    explain::{Explanation, explain},
    observed::Observed,
    owner::Owner,
    plan::{Desired, OwnerCgroup, Role},
};
use std::fmt;

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetFault {
    /// The kernel gives the owner another set.
    Effective {
        /// `cpuset.cpus.effective`
        effective: CpuSet,
    },
    /// Its cgroup has no cpuset files: somebody took the controller away above it, and the tasks may run anywhere.
    NoFiles {
        /// Where.
        why: Option<Explanation>,
    },
    /// A partition is not one any more.
    PartitionLost {
        /// `cpuset.cpus.partition` as read.
        state: String,
        /// What that means, and who did it.
        why: Option<Explanation>,
    },
    /// Somebody else may use the owner's CPUs.
    Overlap {
        /// Who.
        with: CgroupPath,
        /// Which of the CPUs.
        cpus: CpuSet,
    },
    /// A task of the owner may run elsewhere.
    Mask {
        /// Thread id.
        tid: u32,
        /// Its name.
        comm: String,
        /// `Cpus_allowed_list`
        allowed: CpuSet,
    },
    /// A task outside may run on the owner's CPUs although a partition forbids it.
    Outsider {
        /// Thread id.
        tid: u32,
        /// Its name.
        comm: String,
        /// Which of the owner's CPUs.
        cpus: CpuSet,
    },
}

impl SetFault {
    /// Why, where the kernel or the tree says it.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        match self {
            Self::NoFiles { why } | Self::PartitionLost { why, .. } => why.as_ref(),
            _ => None,
        }
    }
}

impl fmt::Display for SetFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Effective { effective } => write!(f, "the kernel gave it CPUs {effective}"),
            Self::NoFiles { why: Some(why) } => why.fmt(f),
            Self::NoFiles { why: None } => f.write_str("it has no cpuset files"),
            Self::PartitionLost { state, why: Some(why) } => write!(f, "the partition read {state:?}: {why}"),
            Self::PartitionLost { state, why: None } => write!(f, "the partition read {state:?}"),
            Self::Overlap { with, cpus } => write!(f, "cgroup {with} was allowed on CPUs {cpus}"),
            Self::Mask { tid, comm, allowed } => {
                write!(f, "its task {tid} ({comm}) was allowed on CPUs {allowed}")
            }
            Self::Outsider { tid, comm, cpus } => write!(f, "task {tid} ({comm}) was allowed on CPUs {cpus}"),
        }
    }
}

/// A fault of one owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SetFinding {
    /// Whose set.
    pub owner: Owner,
    /// What is wrong.
    pub fault: SetFault,
}

/// One thread as read from `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskMask {
    /// Thread id.
    pub tid: u32,
    /// Name.
    pub comm: String,
    /// `Cpus_allowed_list`
    pub allowed: CpuSet,
    /// `processor`, field 39 of `stat`. Stale for a sleeping task.
    pub last_cpu: CpuId,
    /// Whether it was runnable.
    pub runnable: bool,
}

/// The threads that a task sweep read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaskSweep {
    /// By owner, those in the owner's cgroup.
    pub owned: Vec<(Owner, TaskMask)>,
    /// Some of the root cgroup, pid 1 first of all: that is where a leaked CPU shows.
    pub outside: Vec<TaskMask>,
    /// Owners whose tasks could not be read, and why.
    pub unread: Vec<(Owner, String)>,
}

/// Judges the sets. `observed` must have been read with [`Desired::scope`].
#[must_use]
pub fn sets(desired: &Desired, observed: &Observed) -> Vec<SetFinding> {
    let mut found = Vec::new();
    if observed.copied {
        return found;
    }
    for (path, owner) in &desired.owners {
        let Some(files) = observed.cpuset(path) else {
            if owner.mode != Mode::Audit && observed.cgroups.contains_key(path) {
                let why = explain(observed, path, &owner.cpus);
                found.push(SetFinding { owner: owner.owner.clone(), fault: SetFault::NoFiles { why } });
            }
            continue;
        };
        let mine = owner.cpus.intersection(&observed.online);
        if mine.is_empty() {
            continue; // it has nothing that could be shared, and where it runs the ledger tells
        }
        let mut add = |fault| found.push(SetFinding { owner: owner.owner.clone(), fault });
        if owner.mode == Mode::Partition {
            let why = explain(observed, path, &owner.cpus);
            if why.is_some() || !files.is_partition() {
                let state = files.partition.as_ref().map(ToString::to_string).unwrap_or_default();
                add(SetFault::PartitionLost { state, why });
            }
        }
        // An audited set may be narrower: another allocator chose it, and the ledger judges what ran.
        // A CPU that has just gone may still be listed; nobody runs there.
        let has = crate::plan::own_set(observed, path, files).intersection(&observed.online);
        let other = if owner.mode == Mode::Audit { !has.is_subset(&mine) } else { has != mine };
        if other {
            add(SetFault::Effective { effective: files.effective.clone() });
        }
        if owner.mode == Mode::Audit {
            continue;
        }
        for (with, cpus) in crate::plan::overlapping(observed, path, &mine) {
            if is_outsider(desired, path, owner, &with) {
                add(SetFault::Overlap { with, cpus });
            }
        }
    }
    found
}

/// Whether `with` has no business on the CPUs of the owner at `path`. In member mode the root and the ancestors
/// always reach over the owner's CPUs, and ignored cgroups are declared not to matter.
fn is_outsider(desired: &Desired, path: &CgroupPath, owner: &OwnerCgroup, with: &CgroupPath) -> bool {
    if owner.mode == Mode::Partition {
        return true;
    }
    let ignored = desired.roles.iter().any(|(p, r)| *r == Role::Ignore && with.is_within(p));
    !path.is_within(with)
        && !ignored
        && !desired.slice.is_within(with)
        && !desired.owners.keys().any(|o| o.is_within(with) && o != with)
}

/// Judges the tasks' masks. An owner none of whose CPUs is `online` runs elsewhere, which is said by other means.
#[must_use]
pub fn masks<'a>(
    owners: impl Iterator<Item = (&'a Owner, &'a CpuSet, Mode)> + Clone,
    online: &CpuSet,
    sweep: &TaskSweep,
) -> Vec<SetFinding> {
    let mut found = Vec::new();
    let owners = owners.filter(|(_, cpus, _)| !cpus.is_disjoint(online));
    for (owner, task) in &sweep.owned {
        let Some((_, cpus, _)) = owners.clone().find(|(o, _, _)| *o == owner) else { continue };
        if !task.allowed.is_subset(cpus) {
            let fault =
                SetFault::Mask { tid: task.tid, comm: task.comm.clone(), allowed: task.allowed.clone() };
            found.push(SetFinding { owner: owner.clone(), fault });
        }
    }
    for (owner, cpus, _) in owners.filter(|(_, _, mode)| *mode == Mode::Partition) {
        for task in &sweep.outside {
            // Tasks of the root cgroup keep CPUs that are offline in their masks, whoever those belong to.
            let over = task.allowed.intersection(cpus).intersection(online);
            if !over.is_empty() {
                let fault = SetFault::Outsider { tid: task.tid, comm: task.comm.clone(), cpus: over };
                found.push(SetFinding { owner: owner.clone(), fault });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn task(tid: u32, allowed: &str) -> TaskMask {
        TaskMask { tid, comm: "t".into(), allowed: set(allowed), last_cpu: CpuId(0), runnable: true }
    }

    #[test]
    fn narrower_is_fine_wider_and_disjoint_are_not() {
        let owner: Owner = "run/a".parse().unwrap();
        let cpus = set("2-3");
        let sweep = TaskSweep {
            owned: [task(1, "2"), task(2, "2-3"), task(3, "2-4"), task(4, "5")]
                .map(|t| (owner.clone(), t))
                .into(),
            outside: vec![task(5, "0-1"), task(6, "0-2")],
            unread: Vec::new(),
        };
        let tids = |mode| {
            let found = masks([(&owner, &cpus, mode)].into_iter(), &set("0-7"), &sweep);
            found
                .into_iter()
                .map(|f| match f.fault {
                    SetFault::Mask { tid, .. } | SetFault::Outsider { tid, .. } => tid,
                    other => panic!("{other}"),
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(tids(Mode::Partition), [3, 4, 6]);
        // Nothing keeps the root cgroup's tasks out of a member's CPUs: said as a blind spot, not found as a fault.
        assert_eq!(tids(Mode::Member), [3, 4]);
    }

    #[test]
    fn a_cgroup_without_files_is_a_fault_of_who_is_enforced() {
        use crate::observed::{CgroupKind, CgroupObserved};
        let path: CgroupPath = "a".parse().unwrap();
        let cgroup = CgroupObserved {
            id: crate::cgroup::CgroupId(1),
            cpuset: None,
            enables_cpuset: false,
            populated: true,
            has_processes: true,
            kind: CgroupKind::Domain,
        };
        let observed =
            Observed { cgroups: [(path.clone(), cgroup)].into(), online: set("0-7"), ..Observed::default() };
        for (mode, faults) in [(Mode::Partition, 1), (Mode::Member, 1), (Mode::Audit, 0)] {
            let owner: Owner = "cgroup/a".parse().unwrap();
            let kind = crate::partition::PartitionKind::Root;
            let owner = OwnerCgroup {
                owner,
                cpus: set("2-3"),
                mems: "".parse().unwrap(),
                mode,
                kind,
                created: false,
            };
            let desired = Desired { owners: [(path.clone(), owner)].into(), ..Desired::default() };
            let found = sets(&desired, &observed);
            assert_eq!(
                found.iter().filter(|f| matches!(f.fault, SetFault::NoFiles { .. })).count(),
                faults,
                "{mode:?}"
            );
            // One that is not there has no files either, and is not this fault.
            assert_eq!(sets(&desired, &Observed { cgroups: [].into(), ..observed.clone() }), []);
        }
    }
}
