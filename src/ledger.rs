//! Where the time of every exclusive CPU went: plain samples of the kernel half's counters, and their arithmetic.
//!
//! Problem: a claim "only the owner ran here" needs an account of *all* time, and an account is evidence only if
//! a loss shows. Conservation (the classes add up to the elapsed time) holds by construction and finds no loss:
//! a missed switch books time to the wrong class and the sum still fits. Losses show in the continuity of the
//! running pid (a broken chain is booked to `unknown`), in link ids and missed-run counts, and in the owner's own
//! CPU clock, which is kept by other code in the kernel.
//! Steps: the kernel half closes slices into classes per CPU; a flush on each CPU closes the open slice and copies
//! the slot; samples are cumulative within one epoch, so a window is the difference of two samples.
//! Invariant: two samples of a CPU may be subtracted only if they have the same generation and start.

use crate::{
    cgroup::{CgroupId, CgroupPath},
    cpuset::{CpuId, CpuSet},
};
use serde::{Deserialize, Serialize};

/// Nanoseconds by class of the task that was running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClassTimes {
    /// Tasks of the owner's cgroup or below it.
    pub owner_ns: u64,
    /// Any other user task.
    pub foreign_ns: u64,
    /// Kernel threads that may run on one CPU only.
    pub kthread_bound_ns: u64,
    /// Kernel threads that may run elsewhere.
    pub kthread_unbound_ns: u64,
    /// The idle task.
    pub idle_ns: u64,
    /// Slices during which the assignment changed, or the running task's class did without a switch (it was moved to
    /// another cgroup).
    pub straddle_ns: u64,
    /// Slices whose start was not seen: the pid that left was not the pid that came.
    pub unknown_ns: u64,
}

impl ClassTimes {
    /// Sum over the classes.
    #[must_use]
    pub fn total(&self) -> u64 {
        [
            self.owner_ns,
            self.foreign_ns,
            self.kthread_bound_ns,
            self.kthread_unbound_ns,
            self.idle_ns,
            self.straddle_ns,
            self.unknown_ns,
        ]
        .iter()
        .fold(0, |a, b| a.saturating_add(*b))
    }

    /// What was added since `earlier`; `None` if any class went backwards.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            owner_ns: self.owner_ns.checked_sub(earlier.owner_ns)?,
            foreign_ns: self.foreign_ns.checked_sub(earlier.foreign_ns)?,
            kthread_bound_ns: self.kthread_bound_ns.checked_sub(earlier.kthread_bound_ns)?,
            kthread_unbound_ns: self.kthread_unbound_ns.checked_sub(earlier.kthread_unbound_ns)?,
            idle_ns: self.idle_ns.checked_sub(earlier.idle_ns)?,
            straddle_ns: self.straddle_ns.checked_sub(earlier.straddle_ns)?,
            unknown_ns: self.unknown_ns.checked_sub(earlier.unknown_ns)?,
        })
    }
}

/// One watched CPU, cumulative since its epoch began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuLedger {
    /// The CPU.
    pub cpu: CpuId,
    /// The cgroup that owns it.
    pub owner: CgroupId,
    /// The assignment's generation; a change starts a new epoch.
    pub generation: u64,
    /// Start of the epoch, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// When the open slice was closed for this sample, same clock.
    pub to_ns: u64,
    /// Time by class from `from_ns` to `to_ns`.
    pub times: ClassTimes,
    /// Context switches seen.
    pub switches: u64,
    /// Broken chains: the task that left was not the one believed to run.
    pub breaks: u64,
}

/// Counters of one owner's tasks, cumulative since the owner was configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerCounters {
    /// The owner's cgroup.
    pub owner: CgroupId,
    /// The assignment's generation.
    pub generation: u64,
    /// Moves of the owner's tasks from one CPU to another, departures included.
    pub migrations: u64,
    /// Moves and first placements onto a CPU that is not the owner's.
    pub departures: u64,
    /// Processes and threads that left the owner's cgroup for another while they lived, truepin's own moves left out.
    pub moved_out: u64,
}

/// What kind of task held an owner's CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IntruderKind {
    /// A user task outside the owner.
    Foreign,
    /// A kernel thread that could run elsewhere.
    UnboundKthread,
}

/// One task on one CPU where it does not belong, cumulative.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Intruder {
    /// Where.
    pub cpu: CpuId,
    /// Thread id.
    pub pid: u32,
    /// Process id.
    pub tgid: u32,
    /// Start time of the thread (`task_struct.start_boottime`, ns): tells a re-used pid apart.
    pub start_ns: u64,
    /// Foreign task or kernel thread.
    pub kind: IntruderKind,
    /// Name when it was last switched in.
    pub comm: String,
    /// Its cgroup then.
    pub cgroup: CgroupId,
    /// Time on this CPU.
    pub ns: u64,
    /// Start of its first slice, `CLOCK_MONOTONIC`.
    pub first_ns: u64,
    /// End of its last closed slice.
    pub last_ns: u64,
}

/// One attached program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramHealth {
    /// The program's name.
    pub name: String,
    /// The kernel's id of the link; `None` when it is not attached.
    pub link: Option<u32>,
    /// Runs that the kernel skipped (`recursion_misses`).
    pub misses: u64,
}

/// What tells whether evidence was lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProbeHealth {
    /// The programs.
    pub programs: Vec<ProgramHealth>,
    /// Ring buffer records that could not be reserved. The counters that they explain are exact all the same.
    pub ring_drops: u64,
    /// Intruder slices that found no room in the table: their time is in the ledger, their name is lost.
    pub intruders_lost: u64,
    /// Whether moves out of owners' cgroups are seen.
    pub sees_moves: bool,
    /// Moves between cgroups of which the kernel half did not see whose tasks they took.
    pub moves_unseen: u64,
}

/// What the kernel half knows at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LedgerSample {
    /// `CLOCK_MONOTONIC` before the first CPU was flushed, ns.
    pub begun_ns: u64,
    /// `CLOCK_MONOTONIC` after the last CPU was flushed, ns.
    pub ended_ns: u64,
    /// One entry for each watched CPU that is online, ascending.
    pub cpus: Vec<CpuLedger>,
    /// Watched CPUs that could not be flushed (offline).
    pub missing: CpuSet,
    /// One entry for each configured owner.
    pub owners: Vec<OwnerCounters>,
    /// Tasks seen where they do not belong.
    pub intruders: Vec<Intruder>,
    /// Whether anything was lost.
    pub health: ProbeHealth,
}

/// How a task came to a CPU, or out of its owner's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DepartureKind {
    /// `sched_migrate_task`
    Migrated,
    /// `sched_wakeup_new`: first placement after fork.
    Forked,
    /// `cgroup_attach_task`: it was moved to another cgroup, and is the owner's no more.
    MovedOut(Box<MovedOut>),
}

/// Where an owner's task was moved to, and by whom. Not sampled: each has its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedOut {
    /// The cgroup that it is in now.
    pub into: CgroupId,
    /// Its path, where it was still there when the record was read.
    pub path: Option<CgroupPath>,
    /// With all threads of its process.
    pub whole: bool,
    /// Process id of the mover; its own, if it left by itself.
    pub by: u32,
    /// Name of the mover's thread.
    pub by_comm: String,
    /// The mover's cgroup before that.
    pub by_cgroup: CgroupId,
    /// Its path, as above.
    pub by_path: Option<CgroupPath>,
}

/// An owner's task that went to a CPU outside the owner's set. Events are rate-limited samples (one per owner and
/// CPU and millisecond); [`OwnerCounters::departures`] is the exact count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departure {
    /// The owner's cgroup.
    pub owner: CgroupId,
    /// Thread id.
    pub pid: u32,
    /// Process id.
    pub tgid: u32,
    /// Thread name.
    pub comm: String,
    /// How.
    pub kind: DepartureKind,
    /// CPU before; the same as `to` for a fork.
    pub from: CpuId,
    /// CPU after. Of one that was moved to another cgroup: still the same if it did not run at that moment.
    pub to: CpuId,
    /// `CLOCK_MONOTONIC`, ns.
    pub at_ns: u64,
    /// Pid of the task that was current when it happened (a stopper thread, a waker).
    pub by: u32,
}

/// One owner to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// The owner's cgroup.
    pub cgroup: CgroupId,
    /// Its depth below the hierarchy's root (children of the root: 1), for the ancestor test.
    pub level: u32,
    /// The CPUs that are the owner's alone.
    pub cpus: CpuSet,
    /// Changes whenever the assignment does; a new generation starts a new epoch on its CPUs.
    pub generation: u64,
}

/// The kernel half refused or could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {cause}")]
pub struct ProbeError {
    /// What was tried, with the program, map or field.
    pub operation: String,
    /// In words.
    pub cause: String,
}

/// Evidence about execution. Implementations: eBPF, none (sweep only), scripted.
pub trait Probe {
    /// Makes `watched` the set of owners. An owner with an unchanged cgroup, set and generation keeps its epoch and
    /// counters; the CPUs of every other one start a new epoch at once (the slice that is open then is booked as
    /// straddle to the epoch that ends).
    fn configure(&mut self, watched: &[Watched]) -> Result<(), ProbeError>;

    /// Closes the open slice on every watched CPU and reads everything into `sample`, re-using its memory.
    fn collect(&mut self, sample: &mut LedgerSample) -> Result<(), ProbeError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_never_wrap() {
        let a = ClassTimes { owner_ns: 5, idle_ns: 7, ..Default::default() };
        let b = ClassTimes { owner_ns: 9, idle_ns: 7, foreign_ns: 1, ..Default::default() };
        let d = b.since(&a).unwrap();
        assert_eq!((d.owner_ns, d.foreign_ns, d.total()), (4, 1, 5));
        assert_eq!(a.since(&b), None);
    }
}
