//! Why a file reads otherwise than it did.
//!
//! Problem: a partition's state is changed by whoever writes it, by the kernel upon a write to another file (a sibling
//! that reaches over its CPUs, an ancestor that lets go of them), or by the kernel alone (hotplug). The means that name
//! writers tell of writes, not of what came of them, and a write may be told before its consequence is read or after.
//! Steps: (1) remember the writes that others made since the last reading; (2) a change that a reading shows was made
//! between that reading and the one before, so only a write that overlaps this time can have made it; (3) the newest
//! write to the file itself made it, else the newest to a file that could have; (4) else it was the kernel, if the means
//! in force have seen every write of that time; (5) what stays open is settled by a write that is told within a second,
//! or by its absence.
//! Invariants: nobody is named for a write that was refused, that ended before the file was last seen well, or that began
//! after the change was read; the kernel is named only for what it does by itself, which is to make a partition invalid
//! or valid again, and only where nothing was lost.
//!
//! What the kernel does upon what: `update_cpumask`, `update_exclusive_cpumask`, `update_prstate` and
//! `update_parent_effective_cpumask` of `kernel/cgroup/cpuset.c` (6.12); below an ancestor whose `subtree_control` gives
//! cpuset up, the files are gone (`cgroup_apply_control_disable`).

use super::{Sight, Writer, findings::Cause};
use crate::{
    cgroup::{CgroupFile, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    partition::{InvalidReason, PartitionState},
};
use std::collections::VecDeque;

/// How long a finding waits for its writer: many times what lies between a write and its event (1 ms at the most on
/// hardware, tens under emulation), unless the writer is kept from its CPU in between.
const LATE_NS: u64 = 1_000_000_000;
/// Writes between two readings, far more than there are.
const KEPT: usize = 256;

/// A file that changed.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) path: CgroupPath,
    pub(super) file: CpusetFile,
    /// The cpuset files of this cgroup are gone.
    pub(super) gone: bool,
    /// The CPUs that are at stake: those of the partition.
    pub(super) cpus: CpuSet,
    /// What moved the kernel, in words, if it was the kernel by itself; `None` where it does no such thing.
    pub(super) kernel: Option<String>,
    /// All of its CPUs went offline: that makes it invalid, whatever else was written.
    pub(super) offline: bool,
    /// Writes to cgroups that are new since may have gone unseen.
    pub(super) unwatched: bool,
}

/// A write of another.
#[derive(Debug, Clone)]
struct Seen {
    path: CgroupPath,
    file: CgroupFile,
    writer: Writer,
    /// The reading at which it named a change of its own file ([`LATE`] if after it): the next change is another's.
    spent: Option<u64>,
}

const LATE: u64 = u64::MAX;

/// A finding without a name.
#[derive(Debug, Clone)]
struct Open {
    finding: u64,
    change: Change,
    span: Span,
    /// The kernel cannot be told from a writer who was not seen.
    blind: bool,
}

/// When a change was made: after the start of the reading before it, before the end of the one that shows it.
#[derive(Debug, Clone, Copy)]
struct Span {
    since_ns: u64,
    until_ns: u64,
}

impl Span {
    fn overlaps(self, writer: &Writer) -> bool {
        writer.ended_ns >= self.since_ns && writer.begun_ns <= self.until_ns
    }
}

/// What became of an open finding.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) finding: u64,
    /// The file that changed.
    pub(super) key: (CgroupPath, CpusetFile),
    pub(super) cause: Cause,
}

/// What is known of writes of others.
#[derive(Debug, Clone, Default)]
pub(super) struct Causes {
    /// Newest last.
    seen: VecDeque<Seen>,
    open: Vec<Open>,
    sight: Sight,
    /// When a reading was last asked for.
    asked_ns: u64,
    /// When the reading that is judged was asked for, and the one before it.
    read_ns: u64,
    before_ns: u64,
    /// Writes that were lost in the life of the agent; as known at the reading that is judged, and at the one before.
    lost: u64,
    lost_read: u64,
    lost_before: u64,
    /// When other cgroups were last watched than before.
    watched_ns: u64,
}

/// Which reading was judged last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    ns: (u64, u64),
    lost: (u64, u64),
}

impl Causes {
    /// A reading is asked for.
    pub(super) fn asks(&mut self, now_ns: u64) {
        self.asked_ns = now_ns;
    }

    /// It is here. What had ended before the one before it was judged then.
    pub(super) fn reads(&mut self) {
        (self.before_ns, self.read_ns) = (self.read_ns, self.asked_ns);
        (self.lost_before, self.lost_read) = (self.lost_read, self.lost);
        self.seen.retain(|s| s.writer.ended_ns >= self.before_ns);
    }

    /// What [`Causes::unreads`] goes back to.
    pub(super) fn mark(&self) -> Mark {
        Mark { ns: (self.before_ns, self.read_ns), lost: (self.lost_before, self.lost_read) }
    }

    /// The reading is put aside unjudged, and the next one stands for it: a change that it shows may have been made since
    /// the one before. What was forgotten with it had ended before that.
    pub(super) fn unreads(&mut self, mark: Mark) {
        (self.before_ns, self.read_ns) = mark.ns;
        (self.lost_before, self.lost_read) = mark.lost;
    }

    /// Somebody wrote, or writes, while the reading was taken: it may show one file as it was before and the next as it is
    /// after. What was repaired upon that would look like nobody's doing.
    pub(super) fn may_be_torn(&self) -> bool {
        self.sight == Sight::UnderWay || self.seen.iter().any(|s| s.writer.ended_ns >= self.asked_ns)
    }

    /// Other cgroups are watched from now on.
    pub(super) fn watches(&mut self, now_ns: u64) {
        self.watched_ns = now_ns;
    }

    /// How much can be seen, and how many writes were not.
    pub(super) fn sees(&mut self, sight: Sight, lost: u64) {
        let gap = sight == Sight::Blind || lost != self.lost;
        (self.sight, self.lost) = (sight, lost);
        for open in self.open.iter_mut().filter(|_| gap) {
            open.blind = true;
        }
    }

    /// A write of another. Returns the open findings that it explains.
    pub(super) fn wrote(&mut self, path: &CgroupPath, file: CgroupFile, writer: Writer) -> Vec<Settled> {
        if self.seen.len() == KEPT {
            self.seen.pop_front();
        }
        let mut seen = Seen { path: path.clone(), file, writer, spent: None };
        let mut named = Vec::new();
        self.open.retain(|o| {
            let Some(cause) = explains(&seen, &o.change).filter(|_| o.span.overlaps(&seen.writer)) else {
                return true;
            };
            if matches!(cause, Cause::Wrote(_)) {
                seen.spent = Some(LATE);
            }
            named.push(Settled { finding: o.finding, key: (o.change.path.clone(), o.change.file), cause });
            false
        });
        self.seen.push_back(seen);
        named
    }

    /// Who made a change that the reading shows.
    pub(super) fn of(&mut self, change: &Change, now_ns: u64) -> Cause {
        let span = Span { since_ns: self.before_ns, until_ns: now_ns };
        let read = self.read_ns;
        let mut through = None;
        for seen in self.seen.iter_mut().rev().filter(|s| span.overlaps(&s.writer)) {
            match explains(seen, change) {
                Some(cause @ Cause::Wrote(_)) if seen.spent.is_none_or(|at| at == read) => {
                    seen.spent = Some(read);
                    return cause;
                }
                Some(cause @ Cause::Through { .. }) => through = through.or(Some(cause)),
                _ => {}
            }
        }
        match (through, &change.kernel) {
            (Some(through), _) => through,
            (None, Some(why)) if self.sight == Sight::Whole && !self.is_blind_to(change) => {
                Cause::Kernel { why: why.clone() }
            }
            _ => Cause::Unknown,
        }
    }

    /// Waits a while for the name that a finding lacks.
    pub(super) fn await_name(&mut self, finding: u64, change: Change, now_ns: u64) {
        let span = Span { since_ns: self.before_ns, until_ns: now_ns };
        let blind = self.is_blind_to(&change);
        self.open.push(Open { finding, change, span, blind });
    }

    /// A write of the time since the reading before may have gone unseen.
    fn is_blind_to(&self, change: &Change) -> bool {
        let unwatched = change.unwatched && self.sight == Sight::Trailing;
        self.sight == Sight::Blind
            || self.lost != self.lost_before
            || self.watched_ns > self.before_ns
            || unwatched
    }

    /// Findings for which no writer has come in time: what can be said of them.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<Settled> {
        let whole = self.sight == Sight::Whole;
        let mut done = Vec::new();
        self.open.retain(|o| {
            let kernel = o.change.kernel.as_ref().filter(|_| !o.blind);
            // With nothing under way every write of that time has been told.
            if now_ns.saturating_sub(o.span.until_ns) < LATE_NS && !(whole && kernel.is_some()) {
                return true;
            }
            done.extend(kernel.map(|why| Settled {
                finding: o.finding,
                key: (o.change.path.clone(), o.change.file),
                cause: Cause::Kernel { why: why.clone() },
            }));
            false
        });
        done
    }

    /// When something can be said of an open finding by nothing but time, `CLOCK_MONOTONIC`.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        let open = self.open.iter().filter(|o| !o.blind && o.change.kernel.is_some());
        open.map(|o| o.span.until_ns.saturating_add(LATE_NS)).min()
    }
}

/// The change as this write's doing, if it can be that.
fn explains(write: &Seen, change: &Change) -> Option<Cause> {
    if write.path == change.path && write.file == CgroupFile::Cpuset(change.file) {
        return Some(Cause::Wrote(write.writer.clone()));
    }
    can_cause(write, change).then(|| Cause::Through {
        path: write.path.clone(),
        file: write.file,
        writer: write.writer.clone(),
    })
}

/// Whether the kernel may have drawn this consequence from a write to another file.
fn can_cause(write: &Seen, change: &Change) -> bool {
    let above = change.path != write.path && change.path.is_within(&write.path);
    match write.file {
        CgroupFile::SubtreeControl => above && change.gone,
        CgroupFile::Procs | CgroupFile::Threads | CgroupFile::Cpuset(CpusetFile::Mems) => false,
        CgroupFile::Cpuset(file) => {
            let by_a_set = !change.gone && !change.offline && change.file == CpusetFile::Partition;
            let beside =
                write.path.parent().is_some_and(|up| change.path != up && change.path.is_within(&up));
            by_a_set
                && (above
                    || write.path == change.path
                    || beside && reaches(file, write.writer.wrote.as_deref(), &change.cpus))
        }
    }
}

/// Whether a list that was written beside a partition holds CPUs of it; a state that was written, and a text that is not
/// known, may.
fn reaches(file: CpusetFile, wrote: Option<&str>, cpus: &CpuSet) -> bool {
    match (file, wrote) {
        (CpusetFile::Cpus | CpusetFile::Exclusive, Some(text)) => {
            text.parse::<CpuSet>().is_ok_and(|set| !set.is_disjoint(cpus))
        }
        _ => true,
    }
}

/// What moved the kernel to make a partition of `cpus` invalid by itself, or valid again; `None` if that is not what
/// became of it. `was` is what it read before.
pub(super) fn kernels_own(was: &str, now: &PartitionState, cpus: &CpuSet, online: &CpuSet) -> Option<String> {
    let was = was.parse::<PartitionState>().ok()?;
    // It never makes another kind of it.
    if was.kind != now.kind {
        return None;
    }
    let Some(said) = &now.invalid else {
        return was.invalid.is_some().then(|| "it is valid again".into());
    };
    let offline = cpus.difference(online);
    Some(match said {
        _ if !offline.is_empty() => format!("CPUs {offline} went offline"),
        InvalidReason::Said(words) => words.clone(),
        // One that is about to go is still online when its partition has ended.
        InvalidReason::Bare => "it gives no reason; a CPU that goes offline does this".into(),
    })
}

#[cfg(test)]
mod tests;
