//! Linux 7.3 where it differs from every 6.12 in whole operations: the three lists.
//!
//! The difference in one sentence: a partition that names its CPUs only in `cpuset.cpus` is granted what its
//! siblings' partitions leave of them, instead of falling out with the siblings over the rest.

use super::{Errno, FakeKernel, Ix, Reason, State, list, writes::Trial};
use truepin::CpuSet;

impl FakeKernel {
    /// The structural rules of 7.3: exclusive lists do not meet, and a new one leaves every sibling something.
    pub(super) fn validate_lax(&self, i: Ix, trial: &Trial) -> Result<(), Errno> {
        let cs = self.cs(i);
        if cs.guarded && cs.balanced && !self.has_bandwidth(cs.effective.first(), trial.claim()) {
            return Err(Errno::EBUSY);
        }
        let renewed = cs.exclusive != trial.exclusive;
        for sibling in self.cpuset_children(self.parent(i)).into_iter().filter(|s| *s != i) {
            let other = self.cs(sibling);
            let covered = renewed && !other.cpus.is_empty() && other.cpus.is_subset(&trial.exclusive);
            if covered || !trial.exclusive.is_disjoint(&other.exclusive) {
                return Err(Errno::EINVAL);
            }
        }
        Ok(())
    }

    fn parse_lax(&self, text: &str) -> Result<CpuSet, Errno> {
        let set: CpuSet = list::parse(text, self.cpu_limit())?;
        if set.is_subset(&self.possible) { Ok(set) } else { Err(Errno::EINVAL) }
    }

    /// The `cpuset.cpus` file.
    pub(super) fn write_cpus_lax(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let mut trial = Trial::of(self.cs(i));
        trial.cpus = self.parse_lax(text)?;
        if trial.cpus == self.cs(i).cpus {
            return Ok(());
        }
        let (_, granted) = self.granted_then(i, &trial);
        self.validate_lax(i, &trial)?;
        self.commit_lax(i, trial, granted, true);
        Ok(())
    }

    /// The `cpuset.cpus.exclusive` file.
    pub(super) fn write_exclusive_lax(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let mut trial = Trial::of(self.cs(i));
        trial.exclusive = self.parse_lax(text)?;
        if trial.exclusive == self.cs(i).exclusive {
            return Ok(());
        }
        let (wanted, granted) = self.granted_then(i, &trial);
        if wanted != granted {
            return Err(Errno::EINVAL);
        }
        self.validate_lax(i, &trial)?;
        self.commit_lax(i, trial, granted, false);
        Ok(())
    }

    fn commit_lax(&mut self, i: Ix, trial: Trial, granted: CpuSet, always: bool) {
        let old = self.cs(i).state;
        let force = granted != self.cs(i).granted;
        if old != State::Member {
            let problem = if granted.is_empty() {
                Some(Reason::ExclusiveList)
            } else if self.starves(i, &granted) {
                Some(Reason::ParentStarves)
            } else {
                None
            };
            if problem.is_some() {
                self.cs_mut(i).reason = problem;
            }
            match (self.cs(i).remote, problem.is_some()) {
                (true, true) => self.disable_remote(i),
                (true, false) => self.change_remote(i, Some(&trial.exclusive), &granted),
                (false, true) => self.invalidate_local(i),
                (false, false) => self.change_local(i, &granted),
            }
        }
        let cs = self.cs_mut(i);
        (cs.cpus, cs.exclusive, cs.granted) = (trial.cpus, trial.exclusive, granted);
        if old.is_valid() && !self.cs(i).state.is_valid() {
            self.forget_grant(i);
        }
        if always || force || self.cs(i).state.is_valid() {
            self.refresh_down(i, force);
        }
        if self.cs(i).state != State::Member {
            self.follow_balance(i, old);
        }
        self.rebuild_domains();
    }

    /// Why `i` cannot become a remote partition on `cpus`, if it cannot.
    pub(super) fn refuses_remote_lax(&self, cpus: &CpuSet) -> Option<Reason> {
        let root = &self.cs(super::ROOT).effective;
        if cpus.is_disjoint(&self.active) || root.is_subset(cpus) {
            Some(Reason::ExclusiveList)
        } else if !cpus.is_disjoint(&self.handed_out) {
            Some(Reason::ParentStarves)
        } else {
            None
        }
    }
}
