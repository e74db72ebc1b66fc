//! Tasks that left an owner's CPUs, or its cgroup.

use super::{Cause, FindingKind, Writer, step::Turn};
use crate::{
    cgroup::CgroupPath,
    ledger::{Departure, DepartureKind, MovedOut},
    owner::Owner,
};

/// One finding about departures of an owner in this time, and at most [`MOVES`] about moves out of its cgroup: whoever empties
/// it process by process must not push everything else out of what is kept.
const PERIOD_NS: u64 = 1_000_000_000;
const MOVES: u32 = 8;

impl Turn<'_> {
    pub(super) fn departed(&mut self, d: &Departure) {
        let now = self.now.mono_ns;
        let Some((owner, runtime)) = self.s.runtime.iter_mut().find(|(_, r)| r.id == d.owner) else { return };
        let owner = owner.clone();
        if let DepartureKind::MovedOut(moved) = &d.kind {
            if now.saturating_sub(runtime.moves.0) > PERIOD_NS {
                runtime.moves = (now, 0);
            }
            runtime.moves.1 += 1;
            if runtime.moves.1 <= MOVES {
                self.moved_out(owner, d, moved);
            }
            return;
        }
        runtime.left |= runtime.base.as_ref().is_some_and(|b| d.at_ns >= b.at.mono_ns);
        // One that runs in the pool for want of a CPU departs all the time; that it does was told.
        let has_cpus = self.s.assignments.cpus_of(&owner).is_none_or(|c| !c.is_disjoint(&self.s.online));
        if !has_cpus || runtime.departed_ns.is_some_and(|at| now.saturating_sub(at) <= PERIOD_NS) {
            return;
        }
        runtime.departed_ns = Some(now);
        let example = match d.kind {
            DepartureKind::Forked => format!("{} (tid {}) began on CPU {}", d.comm, d.pid, d.to),
            _ => format!("{} (tid {}) from CPU {} to CPU {}", d.comm, d.pid, d.from, d.to),
        };
        self.report(FindingKind::Departed { owner, example });
    }

    fn moved_out(&mut self, owner: Owner, d: &Departure, moved: &MovedOut) {
        let named = |path: &Option<CgroupPath>, id| path.clone().or_else(|| self.s.path_of(id).cloned());
        let into = named(&moved.path, moved.into);
        let into = into.map_or_else(|| format!("#{}, removed since", moved.into), |path| path.to_string());
        let who = if moved.whole {
            format!("process {} ({})", d.tgid, d.comm)
        } else {
            format!("thread {} ({})", d.pid, d.comm)
        };
        let writer = Writer {
            pid: moved.by,
            comm: moved.by_comm.clone(),
            cgroup: named(&moved.by_path, moved.by_cgroup),
            cgroup_id: Some(moved.by_cgroup),
            certain: true,
            wrote: None,
            begun_ns: d.at_ns,
            ended_ns: d.at_ns,
        };
        let ran_on = (d.from != d.to).then_some(d.to);
        self.report_by(FindingKind::MovedOut { owner, who, into, ran_on }, Some(Cause::Wrote(writer)));
    }
}
