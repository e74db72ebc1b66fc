//! What goes into a decision and what comes out of it, as data.
//!
//! Between core and agent only these cross: [`Event`]s in, [`Effect`]s out, [`Answer`]s to whoever asked.

use super::{Finding, FindingKind, MAX_LEVEL, PodAdmission, Sighting};
use crate::{
    assignments::Assignment,
    cgroup::{CgroupFile, CgroupId, CgroupPath},
    checkpoint::Checkpoint,
    containers::ContainerId,
    cpuset::CpuSet,
    explain::Explanation,
    ledger::{Departure, Watched},
    observed::{KernelError, Observed, Scope},
    owner::Owner,
    placement::Refusal,
    plan::{Planned, Problem},
    request::Request,
    stale::SourceReport,
    sweep::TaskSweep,
    topology::CpuTopology,
    verdict::{Evidence, Verdict},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Ties an answer to its question.
pub type Ticket = u64;

/// Where an owner is to live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Home {
    /// A cgroup that truepin makes in its slice.
    New,
    /// A scope that systemd makes there, with the process that is to be put into it.
    Scope,
    /// Somebody else's.
    Existing(CgroupPath),
}

impl Home {
    /// Whether it is in truepin's slice, and truepin's to make and to remove.
    #[must_use]
    pub fn is_own(&self) -> bool {
        matches!(self, Self::New | Self::Scope)
    }
}

/// Who wrote a file, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writer {
    /// Process id.
    pub pid: u32,
    /// The name of the thread that wrote; without `certain`, of the process when the event was read.
    pub comm: String,
    /// Its cgroup before the write, or when the event was read; `None` where that is not known any more.
    pub cgroup: Option<CgroupPath>,
    /// The id of that cgroup, where the kernel told it: all that is left of one that was removed.
    pub cgroup_id: Option<CgroupId>,
    /// Told by the kernel at the time of the write. If not, name and cgroup are hints: the process may have gone on to
    /// another program, or its number to another process.
    pub certain: bool,
    /// What was written, without blanks around it, where the means in force tell.
    pub wrote: Option<String>,
    /// The write did not begin before this, `CLOCK_MONOTONIC`.
    pub begun_ns: u64,
    /// It had ended by then.
    pub ended_ns: u64,
}

/// A write that was not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignWrite {
    /// The cgroup.
    pub path: CgroupPath,
    /// The file; `None` when the event does not tell, or for the directory itself.
    pub file: Option<CgroupFile>,
    /// Who, where the means in force tell.
    pub writer: Option<Writer>,
}

/// What is known of the writes of others up to now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sight {
    /// Not all of them: nothing in force tells who writes.
    #[default]
    Blind,
    /// All that had ended a second ago; newer ones may still be on their way.
    Trailing,
    /// All that have ended; one is under way.
    UnderWay,
    /// All, and none is under way.
    Whole,
}

/// Which writes to a cgroup's files matter, beside those to its cpuset files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interest {
    /// Those that bring tasks.
    pub tasks: bool,
    /// Those to cpuset files of cgroups directly below, so that one is seen that was made a moment ago.
    pub children: bool,
}

/// What the kernel reported of CPUs that go and come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HotplugReport {
    /// Went offline, or were taken out.
    pub went: CpuSet,
    /// Came online, or were put in.
    pub came: CpuSet,
    /// Were told to; an offline that the kernel refused is reported by nothing else.
    pub tried: CpuSet,
    /// Reports were dropped: anything may have happened.
    pub lost: bool,
}

/// What happens.
#[derive(Debug)]
pub enum Event {
    /// The agent is up; the table holds what the checkpoint held.
    Started,
    /// Somebody wants CPUs.
    Admit {
        /// For the answer.
        ticket: Ticket,
        /// What is wanted.
        request: Request,
        /// Exactly these CPUs, where configuration declares them.
        exactly: Option<CpuSet>,
        /// Where.
        home: Home,
        /// A process to put there.
        pid: Option<u32>,
    },
    /// Configuration declares a unit: it has CPUs from now on, whether it runs or not.
    Expect {
        /// For the answer.
        ticket: Ticket,
        /// What it is to have.
        request: Request,
        /// Exactly these CPUs, where configuration names them.
        exactly: Option<CpuSet>,
        /// Where its cgroup is, or will be.
        home: CgroupPath,
    },
    /// Somebody gives CPUs back.
    Release {
        /// For the answer.
        ticket: Ticket,
        /// `None` for all, and everything back as it was found.
        owner: Option<Owner>,
    },
    /// Pods want to run.
    AdmitPods(Vec<PodAdmission>),
    /// Take over sets that somebody else has given out: all of them, or none.
    Adopt {
        /// For the answer.
        ticket: Ticket,
        /// Disjoint sets by owner.
        owners: Vec<(Owner, CpuSet)>,
    },
    /// A pod is gone.
    RemovePod {
        /// For the answer.
        ticket: Ticket,
        /// Its uid.
        uid: String,
    },
    /// A container was made.
    Container {
        /// For the answer.
        ticket: Ticket,
        /// Its id.
        id: ContainerId,
        /// Whose it is.
        owner: Owner,
        /// Its cgroup, if that is there.
        home: Option<(CgroupPath, CgroupId)>,
    },
    /// The pods and containers that the cgroup tree has.
    Tree {
        /// Uids of pods.
        pods: BTreeSet<String>,
        /// Their containers.
        containers: Vec<Sighting>,
    },
    /// A source says which pods are active.
    Source {
        /// For the answer.
        ticket: Ticket,
        /// What it says.
        report: SourceReport,
    },
    /// Look at everything now.
    Inspect {
        /// For the answer.
        ticket: Ticket,
    },
    /// The kernel reports.
    Disturbed {
        /// Writes of others.
        writes: Vec<ForeignWrite>,
        /// Owners' tasks on foreign CPUs.
        departures: Vec<Departure>,
    },
    /// Writes of others that were read beside something else: to be remembered, not acted upon.
    Wrote {
        /// Those since the last word of any.
        writes: Vec<ForeignWrite>,
        /// What can be said of those that are not here.
        sight: Sight,
        /// How many were lost in the life of the agent.
        lost: u64,
    },
    /// CPUs go and come, or were to.
    Hotplug(HotplugReport),
    /// The agent has found something that it only has to tell.
    Found(FindingKind),
    /// [`Effect::ReadMachine`] ended.
    Machine(Result<Box<CpuTopology>, String>),
    /// [`Effect::Persist`] ended.
    Persisted(Result<(), String>),
    /// [`Effect::Observe`] ended.
    Observed(Result<Observed, KernelError>),
    /// [`Effect::Apply`] ended: the steps that were tried, in order. The executor stops at the first error and when
    /// a file reads back otherwise than written.
    Applied(Vec<(Planned, Result<(), KernelError>)>),
    /// [`Effect::Configure`] ended, with the evidence from which the new epochs start.
    Configured(Result<Arc<Evidence>, String>),
    /// [`Effect::SweepTasks`] ended.
    Swept(TaskSweep),
    /// [`Effect::Collect`] ended.
    Collected(Result<Arc<Evidence>, String>),
    /// [`Effect::Locate`] ended.
    Located {
        /// The paths of those that are there still.
        found: BTreeMap<CgroupId, CgroupPath>,
        /// The agent's own cgroup, where that is known.
        own: Option<CgroupPath>,
    },
}

/// What to do about it.
#[derive(Debug)]
pub enum Effect {
    /// Make this record durable.
    Persist(Box<Checkpoint>),
    /// Read these cgroups.
    Observe(Scope),
    /// Read the machine: other CPUs are online than before.
    ReadMachine,
    /// Do nothing for so many nanoseconds: what looks wrong may be on its way.
    Pause(u64),
    /// Apply these steps of one phase.
    Apply(Vec<Planned>),
    /// Watch these owners.
    Configure(Vec<Watched>),
    /// Read the masks of the tasks in these cgroups, and of some outside.
    SweepTasks(Vec<(Owner, CgroupPath)>),
    /// Close slices and read all evidence.
    Collect,
    /// Find the paths of these cgroups, each with a process that was in it.
    Locate(Vec<(CgroupId, u32)>),
    /// Keep the agent's own threads on these CPUs.
    Confine(CpuSet),
    /// Watch the files of these cgroups for writes of others.
    Watch(Vec<CgroupPath>),
    /// Answer.
    Reply(Ticket, Answer),
    /// Tell the operator.
    Report(Box<Finding>),
}

/// Answers to tickets.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The owner has its CPUs, the kernel shows it, and the evidence runs.
    Assigned(Owner, Box<Assignment>),
    /// These CPUs are the pod's containers', durably; none: it runs in the shared pool.
    Pod(Vec<(Owner, CpuSet)>),
    /// Taken notice of; nothing had to be done.
    Noted,
    /// It does not, and nothing was left behind.
    Refused(AdmitError),
    /// These owners' CPUs were given back, with their last verdicts.
    Released(Vec<(Owner, Option<Verdict>)>),
    /// The release failed half-way; the table is as it says, the rest is retried.
    Failed(String),
    /// Everything was looked at.
    Inspected(Arc<Evidence>),
}

/// Why an owner did not get CPUs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AdmitError {
    /// Wrong mode.
    #[error("the agent runs in audit mode: it assigns and releases nothing")]
    Audit,
    /// Nothing fits.
    #[error(transparent)]
    Placement(#[from] Box<Refusal>),
    /// The table says no.
    #[error(transparent)]
    Reserve(#[from] crate::assignments::ReserveError),
    /// The owner's name cannot be a cgroup's.
    #[error(transparent)]
    Path(#[from] crate::cgroup::PathError),
    /// Asked for partitions on a kernel without them.
    #[error(
        "this kernel has no cpuset.cpus.exclusive, so a partition cannot be had here; use --isolation member"
    )]
    NoPartitions,
    /// Asked for a partition of somebody else's cgroup where those can only be had below one.
    #[error(
        "this kernel has no cpuset.cpus.exclusive: a partition can be had for what `truepin run` starts, and not for {owner}, because the cgroup above that would have to be one; use --isolation member"
    )]
    OnlyOwn {
        /// The owner.
        owner: Owner,
    },
    /// The kernel took the writes and made no partition of it.
    #[error("the kernel did not make {path} a partition: it reads {state:?}{}", why.as_ref().map(|w| format!(": {w}")).unwrap_or_default())]
    PartitionRefused {
        /// The cgroup.
        path: CgroupPath,
        /// `cpuset.cpus.partition`
        state: String,
        /// What that means.
        why: Option<Box<Explanation>>,
    },
    /// A command runs there already, and would share the CPUs with a second one.
    #[error("{owner} is held by another command; choose another name, or release it")]
    InUse {
        /// The owner.
        owner: Owner,
    },
    /// Truepin's own place.
    #[error("cgroup {path} is, contains or lies inside {slice}, where truepin makes its own cgroups")]
    OwnSlice {
        /// As asked for.
        path: CgroupPath,
        /// The slice.
        slice: CgroupPath,
    },
    /// CPUs that this machine does not have.
    #[error("{owner}: this machine has no CPUs {cpus}")]
    NoSuchCpus {
        /// The owner.
        owner: Owner,
        /// Those that do not exist.
        cpus: CpuSet,
    },
    /// The cgroup lies deeper than the programs can tell apart.
    #[error("cgroup {path} lies {} levels below the root, and {MAX_LEVEL} can be watched", path.level())]
    TooDeep {
        /// The cgroup.
        path: CgroupPath,
    },
    /// Something that steps cannot mend.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The record could not be made durable.
    #[error("the assignment could not be made durable: {0}")]
    NotDurable(String),
    /// The kernel refused a step.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The plan did not come to an end.
    #[error("the cgroups did not become as wanted: {0}")]
    Stuck(String),
}

impl AdmitError {
    /// Why the kernel made no partition of it.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        match self {
            Self::PartitionRefused { why, .. } => why.as_deref(),
            _ => None,
        }
    }
}
