//! Remote partitions: CPUs straight from the root, past parents that are members.
//!
//! They need the CPUs in the exclusive list of every cgroup above, and the root must keep one. The first 6.12
//! kernels end them when a list above shrinks below them; newer ones let them follow.

use super::{FakeKernel, Ix, ROOT, Reason, State};
use truepin::{CpuSet, partition::PartitionKind};

impl FakeKernel {
    pub(super) fn enable_remote(&mut self, i: Ix, kind: PartitionKind) -> Result<(), Reason> {
        if !self.behaviour.exclusive_file {
            return Err(Reason::ParentMember);
        }
        let cpus = self.grant_for_partition(i);
        let refusal =
            if self.behaviour.is_lax() { self.refuses_remote_lax(&cpus) } else { self.refuses_remote(&cpus) };
        if let Some(reason) = refusal {
            return Err(reason);
        }
        self.hand_out(ROOT, State::Valid(kind), &cpus);
        self.cs_mut(i).remote = true;
        self.remotes.insert(0, i);
        if self.behaviour.heeds_siblings() {
            self.cs_mut(i).granted = cpus;
            self.rebuild = true;
        }
        self.cs_mut(i).reason = None;
        self.root_changed();
        Ok(())
    }

    fn refuses_remote(&self, cpus: &CpuSet) -> Option<Reason> {
        let refused =
            cpus.is_empty() || !cpus.is_disjoint(&self.handed_out) || self.cs(ROOT).effective.is_subset(cpus);
        refused.then_some(Reason::ExclusiveList)
    }

    /// The CPUs of a remote partition return to the root. Without a reason it ends as a member.
    pub(super) fn disable_remote(&mut self, i: Ix) {
        let heeds = self.behaviour.heeds_siblings();
        let cpus = if heeds { self.cs(i).granted.clone() } else { self.grantable(i, self.cs(i).claim()) };
        self.remotes.retain(|r| *r != i);
        self.cs_mut(i).remote = false;
        let state = self.cs(i).state;
        self.take_back(ROOT, state, &cpus);
        let cs = self.cs_mut(i);
        cs.state = match (cs.reason, state) {
            (None, _) | (_, State::Member) => State::Member,
            (Some(_), State::Valid(kind)) => State::Invalid(kind),
            // The sign is turned, whatever it was.
            (Some(_), State::Invalid(kind)) => State::Valid(kind),
        };
        if heeds {
            self.cs_mut(i).granted = self.granted_now(i);
            self.rebuild = true;
        }
        self.forget_grant(i);
        self.root_changed();
    }

    /// A remote partition is to hold `new`; `exclusive` is its list where that is what changes.
    pub(super) fn change_remote(&mut self, i: Ix, exclusive: Option<&CpuSet>, new: &CpuSet) {
        if new.is_empty() {
            self.cs_mut(i).reason = Some(Reason::NothingAsked);
            self.disable_remote(i);
            return;
        }
        let more = new.difference(&self.cs(i).granted);
        let less = self.cs(i).granted.difference(new);
        if !more.is_empty() {
            if !more.is_disjoint(&self.handed_out) || self.cs(ROOT).effective.is_subset(&more) {
                self.cs_mut(i).reason = Some(Reason::ParentStarves);
            }
            if self.cs(i).reason.is_some() {
                self.disable_remote(i);
                return;
            }
        }
        let state = self.cs(i).state;
        if !more.is_empty() {
            self.hand_out(ROOT, state, &more);
        }
        if !less.is_empty() {
            self.take_back(ROOT, state, &less);
        }
        if self.behaviour.heeds_siblings() {
            // The walk below may come back to this very cgroup.
            self.cs_mut(i).granted = new.clone();
            if let Some(exclusive) = exclusive {
                self.cs_mut(i).exclusive = exclusive.clone();
            }
            self.rebuild |= !more.is_empty() || !less.is_empty();
        }
        self.root_changed();
    }

    /// A cgroup that is about to be granted only `new` ends the remote partitions that use the rest. On newer
    /// kernels they follow in the walk.
    pub(super) fn end_remotes_beyond(&mut self, i: Ix, new: &CpuSet) {
        if self.behaviour.heeds_siblings() {
            return;
        }
        let lost = self.cs(i).granted.difference(new);
        if lost.is_disjoint(&self.handed_out) {
            return;
        }
        for remote in self.remotes.clone() {
            if !self.cs(remote).effective.is_disjoint(&lost) {
                self.disable_remote(remote);
                self.rebuild = true;
            }
        }
    }

    fn root_changed(&mut self) {
        self.refresh_tasks(ROOT);
        self.refresh_siblings(ROOT, None);
    }
}
