//! From what is desired and what was just observed to ordered steps.
//!
//! Problem: moving CPUs between cgroups takes many writes, a crash can fall between any two of them, and the kernel
//! answers some orders with an error and others by silently destroying a partition.
//! Steps: each cgroup gets a [`Target`]; its difference from what is observed becomes steps in fixed phases across
//! *all* cgroups. The caller applies one phase, observes, and plans again, until nothing is left. No undo log is
//! needed: every prefix keeps the invariants, and the next plan starts from what it reads.
//!
//! | phase | what | why there |
//! | --- | --- | --- |
//! | prepare | mkdir, `+cpuset`, `member` on the slice, from the root down; owners draw back from others' CPUs | the files do not exist before; below a partition everything is different; what reaches too far must not be let further |
//! | grow-pool | shared cgroups gain CPUs that no partition beside them holds | tasks that lose CPUs have somewhere to go (I4) |
//! | shrink-exclusive | owners give CPUs away, leaves before ancestors; never to nothing: to `member` and the pool | the kernel refuses a set that a sibling still holds (I1) |
//! | shrink-pool | shared cgroups drop the CPUs about to be taken | until 6.18 an overlapping sibling invalidates a partition |
//! | grow-exclusive | owners take CPUs, ancestors before leaves | an exclusive set must be inside its parent's |
//! | set-partition | `root` or `isolated` where it is missing | needs all of the above; only reading it back tells |
//! | enter | processes into a cgroup whose files are as desired | a task never runs in a half-made set |
//! | remove | empty cgroups that truepin made | last, their CPUs are back by then |
//!
//! Where the kernel has no `cpuset.cpus.exclusive`, partitions are those of [`local`].
//!
//! Invariants: I1 to I4 hold after every prefix of the steps ([`check`] simulates them). Nothing that is not ours
//! is written before its first value is recorded ([`Plan::unrecorded`]).

pub mod check;
mod diff;
mod fence;
mod local;
mod targets;
#[cfg(test)]
mod tests;
mod widen;

pub use diff::diff;
pub(crate) use diff::{overlapping, own_set};
pub(crate) use fence::fence;
pub use fence::{OnIntrusion, Unfenced};
pub(crate) use local::slice_leaks;
pub(crate) use targets::foreign;
pub(crate) use widen::may_keep_flag;

use diff::Diff;

use crate::{
    assignments::{Assignments, FirstValues, Mode},
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    nodeset::NodeSet,
    observed::{Scope, Step},
    owner::Owner,
    partition::PartitionKind,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What configuration says of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Part of the shared pool.
    Pool,
    /// Holds CPUs of its own.
    Owner,
    /// Never written.
    Ignore,
}

/// One owner's cgroup as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerCgroup {
    /// Who.
    pub owner: Owner,
    /// The exclusive set.
    pub cpus: CpuSet,
    /// The nodes that its memory is to come from; empty: as it is.
    pub mems: NodeSet,
    /// Partition or member.
    pub mode: Mode,
    /// What its `cpuset.cpus.partition` is to read.
    pub kind: PartitionKind,
    /// Whether truepin makes and removes the cgroup. Others' cgroups keep their own `cpuset.cpus` in partition mode,
    /// because an explicit `cpuset.cpus.exclusive` decides there and their manager may rewrite `cpuset.cpus`.
    pub created: bool,
}

/// Everything that a plan works towards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is decided independently of the others")]
pub struct Desired {
    /// The cgroup under which truepin makes its own.
    pub slice: CgroupPath,
    /// By cgroup.
    pub owners: BTreeMap<CgroupPath, OwnerCgroup>,
    /// CPUs of owners that have no cgroup: nobody else's.
    pub promised: CpuSet,
    /// Where those are to come whose place is known: to be read as well.
    pub expected: BTreeSet<CgroupPath>,
    /// Owners' cgroups of others whose `cpuset.cpus` is truepin's in every mode: systemd has it from a property of the unit,
    /// which outlives the cgroup, and the next one is born with it.
    pub units: BTreeSet<CgroupPath>,
    /// CPUs of everybody else.
    pub pool: CpuSet,
    /// CPUs that no owner gets.
    pub reserved: CpuSet,
    /// Whether the pool's cgroups are written: with a member-mode owner, or with any under strict reservation. With none
    /// nothing of anybody is written, so that a release of all leaves everything as it was found, over restarts too.
    pub pool_written: bool,
    /// Configured roles.
    pub roles: BTreeMap<CgroupPath, Role>,
    /// What files of others held first.
    pub first: FirstValues,
    /// Of those, cgroups whose tasks were met on exclusive CPUs, and that are kept off them: see [`fence`].
    pub fences: BTreeSet<CgroupPath>,
    /// Cgroups that are ignored and may be fenced all the same.
    pub fenceable: BTreeSet<CgroupPath>,
    /// Files that are in a fight and are left alone (I8).
    pub frozen: BTreeSet<(CgroupPath, CpusetFile)>,
    /// Owners' cgroups on which nothing is tried at present (about to leave the table, or not to be made), and cgroups
    /// of ours that cannot be removed.
    pub blocked: BTreeSet<CgroupPath>,
    /// Processes to put into owners' cgroups, once.
    pub entering: Vec<(CgroupPath, u32)>,
    /// Whether this kernel was seen to refuse an empty `cpuset.cpus` on a populated cgroup (`ENOSPC`, up to 6.18).
    pub empty_refused: bool,
    /// Remove the slice when it is empty.
    pub teardown: bool,
    /// The kernel has no `cpuset.cpus.exclusive`: partitions are local, and the slice is one for those below it.
    pub local: bool,
    /// Cgroups in such a slice that need CPUs there and have none of an owner's, and which: see [`Desired::house_leftovers`].
    pub leftovers: BTreeMap<CgroupPath, CpuSet>,
    /// Owners' partitions that are to be ended and made again, though their files are right.
    pub rebuild: BTreeSet<CgroupPath>,
    /// Owners' cgroups whose `cpuset.cpus` is to be written with another value first, so that the kernel looks at the
    /// tasks: it drops a write that changes nothing.
    pub rewrite: BTreeSet<CgroupPath>,
    /// Owners whose exclusive list the kernel does not let reach over the pool for the time of one step: where it compares
    /// that list with what is beside it (6.12), a partition without CPUs ends well without.
    pub narrow: BTreeSet<CgroupPath>,
    /// Owners that are members now and whose lists the kernel does not let be written: see [`widen`].
    pub stuck: BTreeSet<CgroupPath>,
}

impl Desired {
    /// The desired state that follows from `assignments`; the other fields are as in `Default`.
    #[must_use]
    pub fn of(slice: &CgroupPath, assignments: &Assignments, online: &CpuSet) -> Self {
        let owners: BTreeMap<_, _> = assignments
            .owners
            .iter()
            .map(|(owner, a)| {
                let o = OwnerCgroup {
                    owner: owner.clone(),
                    cpus: a.cpus.clone(),
                    mems: a.mems(),
                    mode: a.mode,
                    kind: a.kind(),
                    created: a.created,
                };
                (a.cgroup.clone(), o)
            })
            .collect();
        let promised = assignments.promised.values();
        let member = owners.values().any(|o| o.mode == Mode::Member)
            || promised.clone().any(|p| p.mode == Mode::Member);
        let any = !owners.is_empty() || !assignments.promised.is_empty();
        Self {
            promised: promised.fold(CpuSet::new(), |all, p| all.union(&p.cpus)),
            slice: slice.clone(),
            pool: assignments.shared_pool(online),
            reserved: assignments.reserved.clone(),
            pool_written: member || any && assignments.strict_reserved && !assignments.reserved.is_empty(),
            owners,
            ..Self::default()
        }
    }

    /// What must be read for a plan.
    #[must_use]
    pub fn scope(&self) -> Scope {
        let mut paths = vec![self.slice.clone()];
        paths.extend(self.owners.keys().cloned());
        paths.extend(self.first.keys().cloned());
        paths.extend(self.expected.iter().cloned());
        Scope::Around(paths)
    }
}

/// The phases, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Make cgroups and enable the controller.
    Prepare,
    /// Shared cgroups gain CPUs.
    GrowPool,
    /// Owners give CPUs away.
    ShrinkExclusive,
    /// Shared cgroups drop CPUs.
    ShrinkPool,
    /// Owners take CPUs.
    GrowExclusive,
    /// Partition states.
    SetPartition,
    /// Processes enter.
    Enter,
    /// Empty cgroups go.
    Remove,
}

/// A step in its phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// When.
    pub phase: Phase,
    /// What.
    pub step: Step,
}

/// Something that no step can mend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Problem {
    /// An owner's cgroup is not there and is not ours to make.
    #[error("cgroup {path} of {owner} does not exist")]
    Vanished {
        /// The owner.
        owner: Owner,
        /// Its cgroup.
        path: CgroupPath,
    },
    /// Processes live in a cgroup whose children need the controller: enabling it would make the subtree threaded.
    #[error(
        "cgroup {path} holds processes itself, so cpuset cannot be enabled below it; move them to a leaf"
    )]
    Populated {
        /// The inner cgroup.
        path: CgroupPath,
    },
    /// A cgroup whose type takes no processes or only threads.
    #[error("cgroup {path} of {owner} is of type {kind}, which cannot be an owner's")]
    Kind {
        /// The owner.
        owner: Owner,
        /// Its cgroup.
        path: CgroupPath,
        /// `cgroup.type`
        kind: &'static str,
    },
    /// Another manager's partition holds CPUs of an owner.
    #[error("cgroup {path} is a partition of another manager and holds CPUs {cpus}, assigned to {owner}")]
    ForeignPartition {
        /// The other partition.
        path: CgroupPath,
        /// The contested CPUs.
        cpus: CpuSet,
        /// Our owner.
        owner: Owner,
    },
    /// An ancestor of an owner's cgroup is a partition of another manager, valid or not: what it holds and what may
    /// be had below it is that manager's to say.
    #[error("cgroup {path}, above that of {owner}, is a partition of another manager")]
    InsidePartition {
        /// The owner.
        owner: Owner,
        /// The partition above.
        path: CgroupPath,
    },
    /// Processes that no owner has share the slice with partitions, and no CPU is left that they could have there.
    #[error(
        "processes in {path}, which no owner has, need a CPU inside {}, which is a partition there, and none is left; end them",
        path.parent().unwrap_or_default()
    )]
    Crowded {
        /// Where they are.
        path: CgroupPath,
    },
    /// The owners hold every CPU that is online.
    #[error(
        "no CPU that is online is left for the shared pool; its cgroups are left as they are: bring a CPU online that no owner holds, or release an owner"
    )]
    PoolEmpty,
    /// The owner's CPUs are reserved by now, and it has no others.
    #[error("CPUs {cpus} of {owner} are reserved, and nothing is free to replace them; it keeps them")]
    Reserved {
        /// The owner.
        owner: Owner,
        /// Those of its CPUs that are reserved.
        cpus: CpuSet,
    },
    /// The kernel gives an owner's cgroup memory from other nodes than its `cpuset.mems` says: the cgroup above has not
    /// all of them.
    #[error(
        "memory of {owner} is to come from nodes {wanted}, and the kernel takes it from {effective}: the cgroup above {path} allows no more"
    )]
    Memory {
        /// The owner.
        owner: Owner,
        /// Its cgroup.
        path: CgroupPath,
        /// `cpuset.mems`
        wanted: NodeSet,
        /// `cpuset.mems.effective`
        effective: NodeSet,
    },
    /// CPUs of the owner are offline, and nothing is free in their place. They stay its own.
    #[error(
        "{owner} is degraded: CPUs {offline} of its {cpus} are offline and nothing is free to replace them{}; it is served again when CPUs come online or others are released",
        if cpus == offline { ", so that it runs in the shared pool" } else { "" }
    )]
    Degraded {
        /// The owner.
        owner: Owner,
        /// Its set.
        cpus: CpuSet,
        /// Those of it that are away.
        offline: CpuSet,
    },
}

/// A value that must be recorded before it is overwritten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unrecorded {
    /// Whose.
    pub path: CgroupPath,
    /// The cgroup's id now.
    pub id: CgroupId,
    /// Which file.
    pub file: CpusetFile,
    /// What it holds.
    pub value: String,
}

/// The difference.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// In order of phase.
    pub steps: Vec<Planned>,
    /// Record these durably before the first step.
    pub unrecorded: Vec<Unrecorded>,
    /// First values that are back in place or whose cgroup is gone: forget them.
    pub settled: Vec<CgroupPath>,
    /// What steps cannot mend.
    pub problems: Vec<Problem>,
    /// Cgroups whose files owners need as they are to be; all others are as they were, or on their way.
    pub governed: BTreeSet<CgroupPath>,
}

impl Plan {
    /// The steps of the first phase that has any.
    #[must_use]
    pub fn first_phase(&self) -> &[Planned] {
        let Some(first) = self.steps.first() else { return &[] };
        let end = self.steps.iter().position(|s| s.phase != first.phase).unwrap_or(self.steps.len());
        &self.steps[..end]
    }
}

/// What one cgroup's files should hold; `None` leaves a file alone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Target {
    cpus: Option<CpuSet>,
    exclusive: Option<CpuSet>,
    partition: Option<PartitionKind>,
    mems: Option<NodeSet>,
    kind: TargetKind,
    /// Made by truepin: no first values.
    ours: bool,
    /// Files that owners need as they are here; the others are only to be put back.
    governed: Vec<CpusetFile>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum TargetKind {
    Owner,
    /// Between the root and an owner.
    Chain,
    /// Shared, or to be put back as it was.
    #[default]
    Pool,
    /// Ours, of an owner that was released, and still populated.
    Retired,
    /// Ours and empty.
    Remove,
}
