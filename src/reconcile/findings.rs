//! What the operator should know.

use super::{AdmitError, Mend, Writer, mend};
use crate::{
    cgroup::{CgroupFile, CgroupPath, CpusetFile},
    containers::ContainerId,
    cpuset::{CpuId, CpuSet},
    explain::Explanation,
    observed::KernelError,
    owner::Owner,
    plan::{Problem, Unfenced, check::Broken},
    refit::Refit,
    sweep::SetFinding,
    verdict::Instant,
};
use std::fmt;

/// One finding.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Counts from 1 in the life of an agent.
    pub id: u64,
    /// When.
    pub at: Instant,
    /// What.
    pub kind: FindingKind,
    /// Who did it, for what somebody or the kernel does.
    pub cause: Option<Cause>,
    /// When it was mended, for what can be.
    pub mended: Option<Instant>,
}

/// Who changed a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Somebody wrote it.
    Wrote(Writer),
    /// Somebody wrote another file, and the kernel changed this one upon that.
    Through {
        /// The cgroup of the other file.
        path: CgroupPath,
        /// The other file.
        file: CgroupFile,
        /// Who.
        writer: Writer,
    },
    /// The kernel, and no write came before that could have made it.
    Kernel {
        /// What moved it, in words.
        why: String,
    },
    /// It cannot be told.
    Unknown,
}

impl Cause {
    /// The writer, where there is one.
    #[must_use]
    pub fn writer(&self) -> Option<&Writer> {
        match self {
            Self::Wrote(writer) | Self::Through { writer, .. } => Some(writer),
            Self::Kernel { .. } | Self::Unknown => None,
        }
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub enum FindingKind {
    /// A file was changed by somebody else.
    Drift {
        /// The cgroup.
        path: CgroupPath,
        /// The file.
        file: CpusetFile,
        /// What it holds.
        found: String,
        /// What it should hold.
        wanted: String,
    },
    /// A file is changed again and again; it is left alone.
    Fight {
        /// The cgroup.
        path: CgroupPath,
        /// The file.
        file: CpusetFile,
        /// Changes that were repaired within a minute.
        repairs: u32,
    },
    /// The fight is over; the file is repaired again.
    FightOver {
        /// The cgroup.
        path: CgroupPath,
        /// The file.
        file: CpusetFile,
    },
    /// A fault of an owner's set.
    Set(SetFinding),
    /// Somebody who is no task of the owner's put one into its cgroup, which is truepin's own.
    Joined {
        /// The owner.
        owner: Owner,
        /// The cgroup.
        path: CgroupPath,
        /// Process or thread, with its id where that is known.
        who: String,
    },
    /// An owner's tasks went to other CPUs.
    Departed {
        /// The owner.
        owner: Owner,
        /// An example: thread, name, from, to.
        example: String,
    },
    /// A task was moved out of an owner's cgroup, and is the owner's no more.
    MovedOut {
        /// The owner.
        owner: Owner,
        /// Process or thread, with its id and name.
        who: String,
        /// The cgroup that it is in now.
        into: String,
        /// The CPU on which it went on at once, if it ran at that moment and had to leave the one that it was on.
        ran_on: Option<CpuId>,
    },
    /// Tasks of a cgroup ran on an owner's CPUs, and it is kept off them from now on.
    Fenced {
        /// The owner.
        owner: Owner,
        /// One of those who ran there.
        who: String,
        /// Their cgroup.
        path: CgroupPath,
        /// On which of the owner's CPUs they ran.
        cpus: CpuSet,
        /// Its `cpuset.cpus`.
        from: String,
        /// What that is to be.
        to: CpuSet,
    },
    /// The same, and it cannot be kept off them.
    NotFenced {
        /// The owner.
        owner: Owner,
        /// One of those who ran there.
        who: String,
        /// Their cgroup.
        path: CgroupPath,
        /// On which of the owner's CPUs they ran.
        cpus: CpuSet,
        /// Why not.
        why: Unfenced,
    },
    /// A cgroup is not kept off exclusive CPUs any more.
    FenceGone {
        /// The cgroup.
        path: CgroupPath,
    },
    /// An owner's cgroup is gone, or its command has ended while nobody waited for it.
    Gone {
        /// The owner.
        owner: Owner,
        /// The CPUs that came free.
        cpus: CpuSet,
        /// In words.
        why: &'static str,
    },
    /// The machine has changed, and an owner's set with it.
    Refitted(Refit),
    /// Every file is right, and the kernel lets others on an owner's CPUs, or its tasks off them.
    Mending {
        /// The owner.
        owner: Owner,
        /// What was seen.
        seen: Vec<String>,
        /// Its CPUs that were switched off or on before, or were to be.
        switched: CpuSet,
        /// What is done about it.
        how: Mend,
    },
    /// The machine could not be read anew when other CPUs were online.
    Machine(String),
    /// A container of which nobody knows whose it is.
    Unresolved {
        /// The container.
        id: ContainerId,
        /// Its cgroup.
        path: CgroupPath,
    },
    /// A partition could not be had; the owner is a member now.
    FellBack {
        /// The owner.
        owner: Owner,
        /// What the kernel said.
        reason: String,
        /// What that means.
        why: Option<Explanation>,
    },
    /// The kernel does not make a partition of it and the owner insists.
    PartitionRefused {
        /// The owner.
        owner: Owner,
        /// What the kernel said.
        reason: String,
        /// What that means.
        why: Option<Explanation>,
    },
    /// Something that steps cannot mend.
    Problem(Problem),
    /// A step failed twice.
    StepFailed(KernelError),
    /// The checker refused a plan: a fault in truepin.
    Broken(Box<Broken>),
    /// The cgroups did not become as wanted.
    Stuck(String),
    /// The record could not be written.
    NotDurable(String),
    /// The programs could not be configured or read.
    Probe(String),
    /// A declared owner could not be admitted.
    NotAdmitted {
        /// The owner.
        owner: Owner,
        /// Why.
        error: Box<AdmitError>,
    },
    /// The claim of an owner is false.
    Violated {
        /// The owner.
        owner: Owner,
        /// The first reason.
        reason: String,
    },
    /// The durable record, or a generation of it, was not as it should be.
    Record(String),
    /// Another manager of CPUs has begun on this host.
    Rival(String),
    /// A container runtime that was asked did not answer, or not as it should.
    Runtime(String),
    /// systemd did not do what it was asked, and what was done instead.
    Systemd(String),
    /// Said by the agent itself.
    Note(String),
}

impl FindingKind {
    /// A short word for tables and JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Drift { .. } => "drift",
            Self::Fight { .. } => "fight",
            Self::FightOver { .. } => "fight-over",
            Self::Set(_) => "set",
            Self::Joined { .. } => "joined",
            Self::Departed { .. } => "departure",
            Self::MovedOut { .. } => "moved-out",
            Self::Fenced { .. } => "fenced",
            Self::NotFenced { .. } => "not-fenced",
            Self::FenceGone { .. } => "fence-gone",
            Self::Gone { .. } => "gone",
            Self::Refitted(_) => "refitted",
            Self::Mending { .. } => "mending",
            Self::Machine(_) => "machine",
            Self::Unresolved { .. } => "unresolved-container",
            Self::FellBack { .. } => "fell-back",
            Self::PartitionRefused { .. } => "partition-refused",
            Self::Problem(_) => "problem",
            Self::StepFailed(_) => "step-failed",
            Self::Broken(_) => "plan-broken",
            Self::Stuck(_) => "stuck",
            Self::NotDurable(_) => "not-durable",
            Self::Probe(_) => "probe",
            Self::NotAdmitted { .. } => "not-admitted",
            Self::Violated { .. } => "violated",
            Self::Record(_) => "record",
            Self::Rival(_) => "rival",
            Self::Runtime(_) => "runtime",
            Self::Systemd(_) => "systemd",
            Self::Note(_) => "note",
        }
    }

    /// Why an owner's partition is none, where that is what was found.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        match self {
            Self::Set(found) => found.fault.explanation(),
            Self::FellBack { why, .. } | Self::PartitionRefused { why, .. } => why.as_ref(),
            Self::NotAdmitted { error, .. } => error.explanation(),
            _ => None,
        }
    }

    /// What stands between a finding and its cause.
    fn conjunction(&self) -> &'static str {
        match self {
            Self::Joined { .. } | Self::MovedOut { .. } => "by",
            _ => "changed by",
        }
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {}", self.comm, self.pid)?;
        match (&self.cgroup, self.cgroup_id) {
            (Some(cgroup), _) => write!(f, ", cgroup {cgroup}")?,
            (None, Some(id)) => write!(f, ", cgroup #{id}, removed since")?,
            (None, None) => {}
        }
        f.write_str(if self.certain { ")" } else { "; name read later)" })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrote(writer) => writer.fmt(f),
            Self::Through { path, file, writer } => {
                write!(f, "the kernel, after {writer} wrote ")?;
                if let Some(text) = &writer.wrote {
                    write!(f, "{text:?} to ")?;
                }
                write!(f, "{file} of {path}")
            }
            Self::Kernel { why } => write!(f, "the kernel itself ({why})"),
            Self::Unknown => f.write_str("an unknown writer or the kernel"),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        match &self.cause {
            Some(cause) => write!(f, "; {} {cause}", self.kind.conjunction()),
            None => Ok(()),
        }
    }
}

fn because(why: Option<&Explanation>) -> String {
    why.map(|w| format!(": {w}")).unwrap_or_default()
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drift { path, file, found, wanted } => {
                write!(f, "{file} of {path} reads {found:?}, wanted {wanted:?}")
            }
            Self::Fight { path, file, repairs } => write!(
                f,
                "{file} of {path} was changed again after {repairs} repairs within a minute, and is left alone until it has been quiet for a minute"
            ),
            Self::FightOver { path, file } => {
                write!(f, "{file} of {path} is repaired again: quiet for a minute, or no fight after all")
            }
            Self::Set(found) => write!(f, "{}: {}", found.owner, found.fault),
            Self::Joined { owner, path, who } => write!(f, "{owner}: {who} was moved into {path}"),
            Self::Departed { owner, example } => write!(f, "{owner}: a task left its CPUs: {example}"),
            Self::MovedOut { owner, who, into, ran_on } => {
                write!(f, "{owner}: {who} was moved out of its cgroup into {into}")?;
                ran_on.map_or(Ok(()), |cpu| write!(f, " and goes on on CPU {cpu}"))
            }
            Self::Fenced { owner, who, path, cpus, from, to } => write!(
                f,
                "{owner}: {who} of {path} ran on CPUs {cpus}; that cgroup is kept off exclusive CPUs: its cpuset.cpus, {from:?}, is to be {:?}",
                to.to_string()
            ),
            Self::NotFenced { owner, who, path, cpus, why } => {
                write!(f, "{owner}: {who} of {path} ran on CPUs {cpus}, and is not fenced: {why}")
            }
            Self::FenceGone { path } => {
                write!(f, "{path} is not fenced any more: nobody needs it, or it is gone")
            }
            Self::Gone { owner, cpus, why } => write!(f, "{owner} is gone ({why}); CPUs {cpus} are free"),
            Self::Refitted(refit) => refit.fmt(f),
            Self::Mending { owner, seen, switched, how } => mend::words(f, owner, seen, switched, *how),
            Self::Machine(why) => {
                write!(f, "other CPUs are online, and the machine could not be read anew: {why}")
            }
            Self::Unresolved { id, path } => {
                write!(f, "container {id} in {path}: its name could not be found out, so it is nobody's")
            }
            Self::FellBack { owner, reason, why } => {
                write!(f, "{owner}: no partition could be had ({reason}{}); ", because(why.as_ref()))?;
                f.write_str("enforced as member instead")
            }
            Self::PartitionRefused { owner, reason, why } => {
                let because = because(why.as_ref());
                write!(f, "{owner}: the kernel does not honour the partition ({reason}{because})")
            }
            Self::Problem(problem) => problem.fmt(f),
            Self::StepFailed(error) => error.fmt(f),
            Self::Broken(broken) => write!(f, "plan refused by its checker: {broken}"),
            Self::Stuck(what) => write!(f, "the cgroups did not become as wanted: {what}"),
            Self::NotDurable(what) => write!(f, "the record could not be written: {what}"),
            Self::Probe(what) => write!(f, "kernel evidence: {what}"),
            Self::NotAdmitted { owner, error } => write!(f, "{owner} was not admitted: {error}"),
            Self::Violated { owner, reason } => write!(f, "{owner}: violated: {reason}"),
            Self::Record(text)
            | Self::Rival(text)
            | Self::Runtime(text)
            | Self::Systemd(text)
            | Self::Note(text) => f.write_str(text),
        }
    }
}
