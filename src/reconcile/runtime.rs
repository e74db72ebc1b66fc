//! What is known of an owner beyond the record, for its verdicts.
//!
//! Invariant: the lists are bounded, and what gives way changes no judgement over any interval.

use super::KEPT;
use crate::{
    cgroup::CgroupId,
    cpuset::CpuSet,
    sweep::SetFinding,
    verdict::{Evidence, Instant},
};
use std::{mem, sync::Arc};

/// What is known of an owner beyond the record; rebuilt after a restart.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each was learnt or done independently of the others")]
pub(super) struct Runtime {
    /// Its cgroup was there once: if it is gone, the owner is.
    pub(super) seen: bool,
    /// Its admission was refused and that could not be made durable yet.
    pub(super) refused: bool,
    /// A process was put into it: when it is empty again, a `run` owner is gone.
    pub(super) entered: bool,
    /// The cgroup's id.
    pub(super) id: CgroupId,
    /// Evidence at the start of the epoch.
    pub(super) base: Option<Arc<Evidence>>,
    /// Faults of its sets since then, with the first and the last time they were seen.
    pub(super) faults: Vec<(SetFinding, Instant, Instant)>,
    /// Epochs that ended although the owner stayed: nothing judged them to their end.
    pub(super) ended: Vec<Ended>,
    /// What could not be seen, and when.
    pub(super) gaps: Vec<(String, Instant)>,
    /// CPUs of its that went offline, and when it was heard.
    pub(super) away: Vec<(CpuSet, Instant)>,
    /// Whether a contradiction was reported.
    pub(super) violated: bool,
    /// When a departure was last reported, `CLOCK_MONOTONIC`.
    pub(super) departed_ns: Option<u64>,
    /// Since when moves out of its cgroup are counted, `CLOCK_MONOTONIC`, and how many were reported since.
    pub(super) moves: (u64, u32),
    /// A departure within the epoch was reported.
    pub(super) left: bool,
}

/// An epoch that ended before its owner did.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub(super) at: Instant,
    pub(super) why: String,
    pub(super) faults: Vec<String>,
}

impl Runtime {
    /// The epoch ends here and nothing judges it; the owner stays.
    pub(super) fn end(&mut self, at: Instant, why: String) {
        if self.base.take().is_some() && self.ended.len() < KEPT {
            let faults = mem::take(&mut self.faults).into_iter().map(|(f, _, _)| f.fault.to_string());
            self.ended.push(Ended { at, why, faults: faults.collect() });
        }
    }

    /// The same owner in another cgroup, of which nothing is known yet.
    pub(super) fn anew(mut self, at: Instant) -> Self {
        self.end(
            at,
            "its cgroup was made anew within the interval: what ran in the one before is not judged".into(),
        );
        Self { ended: self.ended, ..Self::default() }
    }

    /// An epoch begins with this evidence.
    pub(super) fn begin(&mut self, evidence: Arc<Evidence>) {
        self.base = Some(evidence);
        self.faults.clear();
        self.gaps.clear();
        self.away.clear();
        self.violated = false;
        self.left = false;
    }

    /// Takes a fault down; false when it is known and was only seen again.
    ///
    /// The one seen longest ago gives way: every interval that it lies in has the newer ones in it as well, so no
    /// judgement changes, only the list of reasons.
    pub(super) fn fault(&mut self, found: SetFinding, at: Instant) -> bool {
        if let Some((_, _, last)) = self.faults.iter_mut().find(|(f, _, _)| *f == found) {
            *last = at;
            return false;
        }
        if self.faults.len() == KEPT
            && let Some(oldest) = (0..KEPT).min_by_key(|n| self.faults[*n].2.mono_ns)
        {
            self.faults.remove(oldest);
        }
        self.faults.push((found, at, at));
        true
    }

    /// Something could not be seen; the oldest such gives way, as with faults. What was said before is said once: every
    /// interval that holds the earlier time holds the later one.
    pub(super) fn gap(&mut self, why: String, at: Instant) {
        self.gaps.retain(|(known, _)| *known != why);
        if self.gaps.len() == KEPT {
            self.gaps.remove(0);
        }
        self.gaps.push((why, at));
    }

    /// These CPUs of its went offline.
    pub(super) fn went(&mut self, cpus: CpuSet, at: Instant) {
        if self.away.len() == KEPT {
            // The sum of all is told, from the newest time on.
            let (oldest, _) = self.away.remove(0);
            self.away[0].0 |= &oldest;
        }
        self.away.push((cpus, at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::SetFault;

    fn at(mono_ns: u64) -> Instant {
        Instant { mono_ns, ..Instant::default() }
    }

    #[test]
    fn what_gives_way_is_what_was_seen_longest_ago() {
        let finding = |fault| SetFinding { owner: "run/a".parse().unwrap(), fault };
        let mask = |tid| {
            let (comm, allowed) = (String::new(), "0-7".parse().unwrap());
            finding(SetFault::Mask { tid, comm, allowed })
        };
        let mut r = Runtime::default();
        for n in 0..1000 {
            assert!(r.fault(mask(n), at(n.into())), "{n} is new");
            assert!(!r.fault(mask(0), at(n.into())), "seen again and again");
            r.gap(format!("gap {n}"), at(n.into()));
            r.gap("again and again".into(), at(n.into()));
        }
        let lost = finding(SetFault::PartitionLost { state: "root invalid".into(), why: None });
        assert!(r.fault(lost.clone(), at(1000)));
        assert_eq!((r.faults.len(), r.gaps.len()), (KEPT, KEPT));
        let has = |f: &SetFinding| r.faults.iter().any(|(g, ..)| g == f);
        assert!(has(&lost) && has(&mask(0)) && has(&mask(999)) && !has(&mask(1)));
        let newest: Vec<_> = r.gaps[KEPT - 2..].iter().map(|(why, _)| why.as_str()).collect();
        assert_eq!(newest, ["gap 999", "again and again"]);
        assert_eq!(r.gaps.iter().filter(|(why, _)| why == "again and again").count(), 1);
    }
}
