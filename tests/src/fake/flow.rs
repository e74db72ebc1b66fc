//! Effective sets, from the top down, and the CPUs that partitions take from what is above them
//! (`kernel/cgroup/cpuset.c`).
//!
//! Rules: a member may use its `cpuset.cpus` within its parent's effective set, or all of that set if they do
//! not meet; a valid partition may use what it was granted, as far as it is active, less what its own partitions
//! took. A walk stops at remote partitions (they hold CPUs of the root) and at members whose set stays.
//!
//! The scratch set: a real kernel computes the new effective set of a cgroup into a scratch set, may then settle
//! the cgroup's partition with its parent, which walks the *siblings* with that same scratch set, and then
//! copies it into the cgroup. So a partition that is re-validated during a walk ends with the set of the last
//! sibling looked at. Seen on 6.12, 6.18 and 7.2: an `isolated` child with its parent's set.

use super::{FakeKernel, Ix, Model, ROOT, Reason, State};
use truepin::{CpuSet, partition::PartitionKind};

impl FakeKernel {
    /// A member's effective set; in 6.12 before inheritance, so that it may be empty.
    pub(super) fn within_parent(&self, i: Ix) -> CpuSet {
        let above = &self.cs(self.parent(i)).effective;
        let within = self.cs(i).cpus.intersection(above);
        if within.is_empty() && self.behaviour.is_lax() { above.clone() } else { within }
    }

    /// Whether tasks depend on this cgroup's own CPUs, that is: on none of the partitions below. `except` is a
    /// child about to become a partition.
    pub(super) fn has_dependants(&self, i: Ix, except: Option<Ix>) -> bool {
        if self.groups[i].tasks_here > 0 {
            return true;
        }
        if except.is_none() && self.cs(i).children_served == 0 && !self.behaviour.is_lax() {
            return self.populated(i);
        }
        self.dependants_below(i, except)
    }

    pub(super) fn dependants_below(&self, i: Ix, except: Option<Ix>) -> bool {
        self.cpuset_children(i).into_iter().any(|child| {
            let exempt = Some(child) == except;
            if self.cs(child).state.is_valid() && !exempt || exempt && self.behaviour.is_lax() {
                return false;
            }
            !exempt && self.populated(child) || self.dependants_below(child, except)
        })
    }

    /// Whether somebody would be left with tasks and without CPU if `i` held exactly `cpus`.
    pub(super) fn starves(&self, i: Ix, cpus: &CpuSet) -> bool {
        let parent = self.parent(i);
        self.cs(parent).effective.is_subset(cpus) && self.has_dependants(parent, Some(i))
            || cpus.is_disjoint(&self.active) && self.has_dependants(i, None)
    }

    /// `from` (the root, for remote partitions) hands CPUs to a partition of this state.
    pub(super) fn hand_out(&mut self, from: Ix, state: State, cpus: &CpuSet) {
        if from == ROOT {
            self.handed_out |= cpus;
        }
        if state != self.cs(from).state {
            self.mark_isolated(state.isolates(), cpus);
        }
        self.cs_mut(from).effective -= cpus;
    }

    /// `to` gets back CPUs that a partition of this state held.
    pub(super) fn take_back(&mut self, to: Ix, state: State, cpus: &CpuSet) {
        if to == ROOT {
            self.handed_out -= cpus;
        }
        if state != self.cs(to).state {
            self.mark_isolated(self.cs(to).state.isolates(), cpus);
        }
        let usable = cpus.intersection(&self.active);
        self.cs_mut(to).effective |= &usable;
        if self.behaviour.is_lax() {
            self.cs_mut(to).effective = self.cs(to).effective.intersection(&self.active);
        }
    }

    pub(super) fn mark_isolated(&mut self, isolated: bool, cpus: &CpuSet) {
        if isolated {
            self.isolated |= cpus;
        } else {
            self.isolated -= cpus;
        }
    }

    /// The effective set of a valid partition. Its own partitions that no longer fit become invalid.
    pub(super) fn partition_effective(&mut self, i: Ix) -> CpuSet {
        let dependants = self.has_dependants(i, None);
        let mut left = self.grant_for_partition(i).intersection(&self.active);
        for child in self.cpuset_children(i) {
            if !self.cs(child).state.is_valid() {
                continue;
            }
            let granted = self.cs(child).granted.clone();
            let reason = if !granted.is_subset(&self.cs(i).granted) {
                Some(Reason::ExclusiveList)
            } else if dependants && left.is_subset(&granted) {
                Some(Reason::ParentStarves)
            } else {
                None
            };
            let cs = self.cs_mut(child);
            cs.reason = reason;
            if reason.is_some() {
                cs.state = cs.state.invalidated();
                cs.children_served = 0;
                self.cs_mut(i).children_served -= 1;
            } else {
                left -= &granted;
            }
        }
        left
    }

    /// Recomputes `i` and everything below. `force` walks on where a member's set stays the same.
    pub(super) fn refresh_down(&mut self, i: Ix, force: bool) {
        self.refresh_one(i, i, force);
    }

    fn refresh_one(&mut self, i: Ix, start: Ix, force: bool) {
        if self.settle(i, i == start, force) {
            for child in self.cpuset_children(i) {
                self.refresh_one(child, start, force);
            }
        }
    }

    /// One cgroup of a walk; whether to walk on below it.
    fn settle(&mut self, i: Ix, is_start: bool, force: bool) -> bool {
        let heeds = self.behaviour.heeds_siblings();
        let before = self.cs(i).state;
        let mut remote = self.cs(i).remote;
        if remote && !is_start {
            // On the first 6.12 kernels a remote partition does not follow what is above it.
            let granted = if heeds { self.granted_now(i) } else { return false };
            if granted == self.cs(i).granted {
                return false;
            }
            self.change_remote(i, None, &granted);
            remote = self.cs(i).state == before;
        }
        if !is_start && !heeds && !self.cs(i).exclusive.is_empty() {
            self.cs_mut(i).granted = self.grantable(i, &self.cs(i).exclusive);
        }
        let parent = self.parent(i);
        let now = self.cs(i).state;
        let serves = self.cs(parent).state.is_valid();
        self.scratch = if remote || serves && now.is_valid() {
            self.partition_effective(i)
        } else {
            self.within_parent(i)
        };
        // A partition without CPUs is allowed as long as nothing runs there: its parent judges.
        let bare = now.is_valid() && self.scratch.is_empty() && !(remote && heeds);
        let mut ask_parent = bare;
        if !bare && !remote {
            if self.scratch.is_empty() {
                self.scratch = self.cs(parent).effective.clone();
            }
            let same =
                self.scratch == self.cs(i).effective && self.cs(parent).balanced == self.cs(i).balanced;
            if now == State::Member && !force && same {
                return false;
            }
        }
        let mut after = now;
        if (bare || !remote) && !is_start && before != State::Member {
            if serves {
                ask_parent = true;
            } else {
                after = now.invalidated();
                let orphaned = self.cs(parent).state.is_invalid();
                self.cs_mut(i).reason =
                    Some(if orphaned { Reason::ParentInvalid } else { Reason::ParentMember });
            }
        }
        if ask_parent {
            // Its verdict is read back from the state.
            let _ = self.reconsider(i);
            after = self.cs(i).state;
        }
        self.conclude(i, is_start, before, after);
        true
    }

    fn conclude(&mut self, i: Ix, is_start: bool, before: State, after: State) {
        let parent = self.parent(i);
        self.cs_mut(i).effective = self.scratch.clone();
        self.cs_mut(i).state = after;
        let explicit = !self.cs(i).exclusive.is_empty();
        if self.behaviour.is_lax() {
            if after.is_valid() || explicit {
                self.cs_mut(i).granted = self.granted_now(i);
            }
            if !after.is_valid() {
                self.forget_grant(i);
            }
        } else {
            // The first 6.12 kernels have done this before they looked at the partitions below.
            if self.behaviour.heeds_siblings() && explicit && !is_start {
                self.cs_mut(i).granted = self.grantable(i, &self.cs(i).exclusive);
            }
            if after.is_valid() && !explicit {
                self.cs_mut(i).granted = self.grantable(i, &self.cs(i).cpus);
            } else if after.is_invalid() {
                self.forget_grant(i);
            }
        }
        self.state_changed(i, before);
        self.refresh_tasks(i);
        if !after.is_valid() {
            self.cs_mut(i).balanced = self.cs(parent).balanced;
        } else if !self.cs(i).cpus.is_empty() && self.cs(i).balanced {
            self.rebuild = true;
        }
    }

    /// What a cgroup holds once it is no valid partition.
    pub(super) fn forget_grant(&mut self, i: Ix) {
        let cs = self.cs_mut(i);
        cs.children_served = 0;
        if cs.exclusive.is_empty() {
            cs.granted = CpuSet::new();
            cs.guarded = false;
        }
        let within = self.within_parent(i);
        let effective = if within.is_empty() { self.cs(self.parent(i)).effective.clone() } else { within };
        self.cs_mut(i).effective = effective;
    }

    /// A valid partition has no reason to be invalid, once its state has changed.
    pub(super) fn state_changed(&mut self, i: Ix, before: State) {
        let cs = self.cs_mut(i);
        if cs.state != before && cs.state.is_valid() {
            cs.reason = None;
        }
    }

    /// Scheduler balancing follows the partition, or the parent where there is none; `before` is the state that
    /// the change found.
    pub(super) fn follow_balance(&mut self, i: Ix, before: State) {
        let state = self.cs(i).state;
        let balanced = match state {
            State::Valid(kind) => kind != PartitionKind::Isolated,
            _ => self.cs(self.parent(i)).balanced,
        };
        if state.is_valid() || before.is_valid() || balanced != self.cs(i).balanced {
            self.rebuild = true;
        }
        self.cs_mut(i).balanced = balanced;
    }

    /// The children of `parent` (but not `except`) after its effective set changed.
    pub(super) fn refresh_siblings(&mut self, parent: Ix, except: Option<Ix>) {
        for sibling in self.cpuset_children(parent) {
            let valid = self.cs(sibling).state.is_valid();
            let skipped = match self.behaviour.model {
                Model::Strict | Model::LocalOnly => false,
                Model::Amended => self.cs(sibling).remote,
                Model::Lax => true,
            };
            if Some(sibling) == except || valid && skipped {
                continue;
            }
            if !valid {
                self.scratch = self.within_parent(sibling);
                if self.scratch == self.cs(sibling).effective {
                    continue;
                }
            }
            self.refresh_down(sibling, false);
        }
    }
}
