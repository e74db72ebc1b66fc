//! Becoming a partition and ceasing to be one.
//!
//! A partition below a valid one (the root cgroup is valid) is *local* and takes its CPUs from its parent; any
//! other is *remote* and takes them from the root, provided that every cgroup above lists them as exclusive.

use super::{FakeKernel, Ix, ROOT, Reason, State, writes::Trial};
use truepin::{CpuSet, partition::PartitionKind};

/// What a local change does to the parent: CPUs that return, CPUs that leave, partitions more or less.
#[derive(Default)]
struct Exchange {
    returns: CpuSet,
    leaves: CpuSet,
    served: i32,
    /// The siblings are looked at again even if no CPU changes hands.
    always: bool,
}

impl FakeKernel {
    /// A write of member, root or isolated; always accepted, and what came of it stands in the state.
    pub(super) fn set_partition(&mut self, i: Ix, kind: PartitionKind) {
        if self.behaviour.is_local_only() {
            self.set_partition_local(i, kind);
            return;
        }
        let old = self.cs(i).state;
        let wanted = if kind == PartitionKind::Member { State::Member } else { State::Valid(kind) };
        if old == wanted {
            return;
        }
        let becomes = wanted.is_valid();
        if becomes && self.cs(i).exclusive.is_empty() && !self.behaviour.heeds_siblings() {
            self.cs_mut(i).granted = self.grantable(i, &self.cs(i).cpus);
        }
        let mut result = self.guard(i, becomes);
        let mut rebrand = false;
        if result.is_ok() {
            if !becomes {
                if self.cs(i).remote {
                    self.disable_remote(i);
                } else {
                    self.disable_local(i);
                }
            } else if old.is_valid() {
                rebrand = true;
            } else {
                result = self.enable(i, kind);
            }
        }
        if result.is_err() {
            let _ = self.guard(i, false);
        }
        let cs = self.cs_mut(i);
        cs.reason = result.err();
        cs.state = if result.is_ok() { wanted } else { wanted.invalidated() };
        if !self.cs(i).state.is_valid() {
            self.forget_grant(i);
        } else if rebrand {
            let granted = self.cs(i).granted.clone();
            self.mark_isolated(self.cs(i).state.isolates(), &granted);
        }
        self.refresh_down(i, !becomes);
        // An invalid partition that is written again starts like a member.
        self.follow_balance(i, if becomes && old.is_invalid() { State::Member } else { old });
        self.state_changed(i, old);
        self.rebuild_domains();
    }

    /// Forbids (or again allows) overlap with siblings.
    fn guard(&mut self, i: Ix, on: bool) -> Result<(), Reason> {
        if self.cs(i).guarded == on {
            return Ok(());
        }
        let trial = Trial { guarded: on, ..Trial::of(self.cs(i)) };
        match self.validate(i, &trial) {
            Ok(()) => {
                self.cs_mut(i).guarded = on;
                Ok(())
            }
            Err(_) if on => Err(Reason::NotExclusive),
            Err(_) => Ok(()),
        }
    }

    fn enable(&mut self, i: Ix, kind: PartitionKind) -> Result<(), Reason> {
        let cs = self.cs(i);
        if cs.claim().is_empty() {
            return Err(Reason::NothingAsked);
        }
        if self.parent(i) == ROOT && !cs.exclusive.is_disjoint(&self.handed_out) {
            return Err(Reason::RemoteBelow);
        }
        if self.cs(self.parent(i)).state.is_valid() {
            self.enable_local(i, kind)
        } else {
            self.enable_remote(i, kind)
        }
    }

    /// The CPUs that a partition is taken to hold: 6.12 goes by its claim, 7.3 by what it was granted.
    fn booked(&self, i: Ix) -> &CpuSet {
        if self.behaviour.is_lax() { &self.cs(i).granted } else { self.cs(i).claim() }
    }

    fn enable_local(&mut self, i: Ix, kind: PartitionKind) -> Result<(), Reason> {
        let leaves = self.grant_for_partition(i);
        if leaves.is_empty() {
            return Err(Reason::ExclusiveList);
        }
        if self.starves(i, if self.behaviour.heeds_siblings() { &leaves } else { self.cs(i).claim() }) {
            return Err(Reason::ParentStarves);
        }
        self.exchange(i, State::Valid(kind), Exchange { leaves, served: 1, ..Exchange::default() });
        Ok(())
    }

    fn disable_local(&mut self, i: Ix) {
        let cs = self.cs(i);
        if !self.cs(self.parent(i)).state.is_valid() || cs.claim().is_empty() {
            return;
        }
        let returns = match cs.state {
            State::Invalid(_) => CpuSet::new(),
            _ if self.behaviour.heeds_siblings() => cs.granted.clone(),
            _ => self.grantable(i, cs.claim()),
        };
        // A valid partition may hold nothing, while nothing runs in it. Newer kernels count that one as well.
        let always = cs.state.is_valid() && self.behaviour.heeds_siblings();
        let served = if returns.is_empty() && !always { 0 } else { -1 };
        self.exchange(i, State::Member, Exchange { returns, served, always, ..Exchange::default() });
    }

    /// A valid partition becomes invalid; its CPUs return to a parent that is valid itself.
    pub(super) fn invalidate_local(&mut self, i: Ix) {
        let cs = self.cs(i);
        if cs.state.is_invalid() {
            return;
        }
        let returns = if self.cs(self.parent(i)).state.is_valid() {
            self.grantable(i, self.booked(i))
        } else {
            CpuSet::new()
        };
        let served = if cs.state.is_valid() { -1 } else { 0 };
        let after = cs.state.invalidated();
        if returns.is_empty() && after == cs.state {
            return;
        }
        self.exchange(i, after, Exchange { returns, served, ..Exchange::default() });
    }

    /// The partition is to hold `new` instead of its claim. Valid or invalid, it may turn into the other.
    pub(super) fn change_local(&mut self, i: Ix, new: &CpuSet) {
        let parent = self.parent(i);
        if !self.cs(parent).state.is_valid() {
            return;
        }
        let claim = self.cs(i).claim().clone();
        let mut exchange = Exchange::default();
        let mut problem = None;
        if new.is_empty() {
            problem = Some(Reason::NothingAsked);
        } else {
            let starves = self.starves(i, &claim) || self.starves(i, new);
            if self.cs(i).state.is_invalid() {
                exchange.leaves = self.grantable(i, new);
            } else {
                exchange.returns = self.grantable(i, &self.booked(i).difference(new));
                exchange.leaves = self.grantable(i, &new.difference(self.booked(i)));
            }
            if starves && exchange.returns.is_disjoint(&self.active) {
                problem = Some(Reason::ParentStarves);
                exchange.leaves = CpuSet::new();
                exchange.returns = self.grantable(i, self.booked(i));
            }
        }
        self.judge(i, exchange, problem);
    }

    /// Valid or invalid, with the sets as they are: used by walks and by hotplug.
    pub(super) fn reconsider(&mut self, i: Ix) -> Result<(), Reason> {
        let parent = self.parent(i);
        match self.cs(parent).state {
            State::Member => return Err(Reason::ParentMember),
            State::Invalid(_) => return Err(Reason::ParentInvalid),
            State::Valid(_) => {}
        }
        let claim = self.cs(i).claim().clone();
        if claim.is_empty() {
            return Err(Reason::NothingAsked);
        }
        let mut exchange = Exchange::default();
        let mut problem = None;
        let state = self.cs(i).state;
        if self.starves(i, &claim) {
            problem = Some(Reason::ParentStarves);
            if state.is_valid() {
                exchange.returns = self.grantable(i, self.booked(i));
            }
        } else if state.is_invalid() && claim.is_subset(&self.cs(parent).granted) {
            let free = self
                .cpuset_children(parent)
                .into_iter()
                .all(|s| s == i || self.cs(s).claim().is_disjoint(&claim));
            if free {
                // Only what the parent can spare *now* is booked as taken. CPUs that come online later go to
                // the parent as well: this is how two sides come to share a CPU after hotplug.
                exchange.leaves = claim.intersection(&self.cs(parent).effective);
            } else {
                problem = Some(Reason::NotExclusive);
            }
        }
        if self.judge(i, exchange, problem) {
            self.follow_balance(i, state);
        }
        Ok(())
    }

    /// Turns the state over if there is (or no longer is) a problem, and settles the exchange. Whether anything
    /// changed.
    fn judge(&mut self, i: Ix, mut exchange: Exchange, problem: Option<Reason>) -> bool {
        let old = self.cs(i).state;
        if problem.is_some() {
            self.cs_mut(i).reason = problem;
        }
        let new = match (old, problem) {
            (State::Valid(kind), Some(_)) => {
                exchange.served -= 1;
                State::Invalid(kind)
            }
            (State::Invalid(kind), None) => {
                exchange.served += 1;
                State::Valid(kind)
            }
            _ => old,
        };
        if exchange.returns.is_empty() && exchange.leaves.is_empty() && new == old {
            return false;
        }
        self.exchange(i, new, exchange);
        true
    }

    fn exchange(&mut self, i: Ix, new: State, exchange: Exchange) {
        let parent = self.parent(i);
        let old = self.cs(i).state;
        let Exchange { returns, leaves, served, always } = exchange;
        self.cs_mut(i).state = new;
        if old != new && !new.is_valid() {
            self.cs_mut(i).children_served = 0;
        }
        if !returns.is_empty() {
            self.take_back(parent, old, &returns);
        }
        if !leaves.is_empty() {
            self.hand_out(parent, new, &leaves);
        }
        if self.cs(parent).state.is_valid() {
            self.cs_mut(parent).children_served += served;
        }
        if old != new {
            let _ = self.guard(i, new.is_valid());
        }
        if always || !returns.is_empty() || !leaves.is_empty() {
            self.refresh_tasks(parent);
            self.refresh_siblings(parent, Some(i));
        }
        self.state_changed(i, old);
    }
}
