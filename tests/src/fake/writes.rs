//! Writes to `cpuset.cpus`, `cpuset.cpus.exclusive` and `cpuset.mems`.

use super::{Cpuset, Errno, FakeKernel, Ix, Model, ROOT, Reason, State, list};
use truepin::{CpuSet, NodeSet, partition::PartitionKind};

/// Highest number of nodes of the distribution kernels that the model is held against.
const NODE_LIMIT: u32 = 1024;

/// What a cpuset would be after a write.
pub(super) struct Trial {
    pub(super) cpus: CpuSet,
    pub(super) exclusive: CpuSet,
    pub(super) mems: NodeSet,
    pub(super) guarded: bool,
}

impl Trial {
    pub(super) fn of(cs: &Cpuset) -> Self {
        Self {
            cpus: cs.cpus.clone(),
            exclusive: cs.exclusive.clone(),
            mems: cs.mems.clone(),
            guarded: cs.guarded,
        }
    }

    pub(super) fn claim(&self) -> &CpuSet {
        if self.exclusive.is_empty() { &self.cpus } else { &self.exclusive }
    }
}

impl FakeKernel {
    pub(super) fn cpu_limit(&self) -> u32 {
        self.possible.last().map_or(1, |c| c.0 + 1)
    }

    /// The structural rules that a cpuset keeps with its tasks and its siblings.
    pub(super) fn validate(&self, i: Ix, trial: &Trial) -> Result<(), Errno> {
        if self.behaviour.is_lax() {
            return self.validate_lax(i, trial);
        }
        let cs = self.cs(i);
        if self.populated(i) {
            let emptied = !cs.cpus.is_empty() && trial.cpus.is_empty();
            if emptied || !cs.mems.is_empty() && trial.mems.is_empty() {
                return Err(Errno::ENOSPC);
            }
        }
        if cs.guarded && !self.has_bandwidth(cs.cpus.first(), &trial.cpus) {
            return Err(Errno::EBUSY);
        }
        for sibling in self.cpuset_children(self.parent(i)) {
            if sibling == i {
                continue;
            }
            let other = self.cs(sibling);
            let (mine, theirs) = (!trial.exclusive.is_empty(), !other.exclusive.is_empty());
            if trial.guarded || other.guarded || mine && theirs {
                if !trial.claim().is_disjoint(other.claim()) {
                    return Err(Errno::EINVAL);
                }
            } else if mine || theirs {
                // An explicit list must leave a sibling something of its cpuset.cpus.
                let (taken, asked) =
                    if mine { (&trial.exclusive, &other.cpus) } else { (&other.exclusive, &trial.cpus) };
                if !asked.is_empty() && asked.is_subset(taken) {
                    return Err(Errno::EINVAL);
                }
            }
        }
        Ok(())
    }

    /// The `cpuset.cpus` file.
    pub(super) fn write_cpus(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        match self.behaviour.model {
            Model::LocalOnly => return self.write_cpus_local(i, text),
            Model::Lax => return self.write_cpus_lax(i, text),
            Model::Strict | Model::Amended => {}
        }
        let old = self.cs(i).state;
        let mut trial = Trial::of(self.cs(i));
        let mut granted = self.cs(i).granted.clone();
        if text.is_empty() {
            trial.cpus = CpuSet::new();
            if trial.exclusive.is_empty() {
                granted = CpuSet::new();
            }
        } else {
            trial.cpus = list::parse(text, self.cpu_limit())?;
            if !trial.cpus.is_subset(&self.possible) {
                return Err(Errno::EINVAL);
            }
            if !trial.exclusive.is_empty() || old.is_valid() {
                granted = self.granted_then(i, &trial).1;
            }
        }
        if trial.cpus == self.cs(i).cpus {
            return Ok(());
        }
        let mut spoiled = false;
        if old.is_valid() && granted.is_empty() {
            spoiled = self.note(i, Reason::ExclusiveList);
        } else if old != State::Member && self.starves(i, &granted) {
            spoiled = self.note(i, Reason::ParentStarves);
        }
        let force = granted != self.cs(i).granted;
        match self.validate(i, &trial) {
            // Overlap is taken, at the price of every partition that it meets.
            Err(Errno::EINVAL) => {
                spoiled = true;
                for sibling in self.cpuset_children(self.parent(i)) {
                    let cs = self.cs(sibling);
                    if cs.state.is_valid() && !trial.claim().is_disjoint(&cs.granted) {
                        self.invalidate_local(sibling);
                    }
                }
            }
            other => other?,
        }
        let now = self.cs(i).state;
        if now.is_valid() || now.is_invalid() && !spoiled {
            let hold = if granted.is_empty() && now.is_invalid() { &trial.cpus } else { &granted };
            if self.cs(i).remote {
                self.change_remote(i, None, hold);
            } else if spoiled {
                self.invalidate_local(i);
            } else {
                self.change_local(i, hold);
            }
        } else if !self.cs(i).exclusive.is_empty() {
            self.end_remotes_beyond(i, &granted);
        }
        self.cs_mut(i).cpus = trial.cpus;
        self.cs_mut(i).granted = granted;
        if old.is_valid() && !self.cs(i).state.is_valid() {
            self.forget_grant(i);
        }
        self.refresh_down(i, force);
        if self.cs(i).state != State::Member {
            self.follow_balance(i, old);
        }
        self.rebuild_domains();
        Ok(())
    }

    fn note(&mut self, i: Ix, reason: Reason) -> bool {
        self.cs_mut(i).reason = Some(reason);
        true
    }

    /// The `cpuset.cpus.exclusive` file.
    pub(super) fn write_exclusive(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        if self.behaviour.is_lax() {
            return self.write_exclusive_lax(i, text);
        }
        let old = self.cs(i).state;
        let mut trial = Trial::of(self.cs(i));
        trial.exclusive = if text.is_empty() { CpuSet::new() } else { list::parse(text, self.cpu_limit())? };
        if trial.exclusive == self.cs(i).exclusive {
            return Ok(());
        }
        let (wanted, granted) =
            if text.is_empty() { Default::default() } else { self.granted_then(i, &trial) };
        if granted != wanted {
            return Err(Errno::EINVAL);
        }
        let force = granted != self.cs(i).granted;
        self.validate(i, &trial)?;
        if old == State::Member {
            if !trial.exclusive.is_empty() {
                self.end_remotes_beyond(i, &granted);
            }
        } else {
            let spoiled = if granted.is_empty() {
                self.note(i, Reason::ExclusiveList)
            } else {
                self.starves(i, &granted) && self.note(i, Reason::ParentStarves)
            };
            match (self.cs(i).remote, spoiled) {
                (true, true) => self.disable_remote(i),
                (true, false) => self.change_remote(i, Some(&trial.exclusive), &granted),
                (false, true) => self.invalidate_local(i),
                (false, false) => self.change_local(i, &granted),
            }
        }
        self.cs_mut(i).exclusive = trial.exclusive;
        self.cs_mut(i).granted = granted;
        if old.is_valid() && !self.cs(i).state.is_valid() {
            self.forget_grant(i);
        }
        if force || self.cs(i).state.is_valid() {
            self.refresh_down(i, force);
        }
        if self.cs(i).state != State::Member {
            self.follow_balance(i, old);
        }
        self.rebuild_domains();
        Ok(())
    }

    /// The `cpuset.mems` file.
    pub(super) fn write_mems(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let mut trial = Trial::of(self.cs(i));
        trial.mems = if text.is_empty() { NodeSet::new() } else { list::parse(text, NODE_LIMIT)? };
        if !trial.mems.is_subset(&self.possible_nodes) {
            return Err(Errno::EINVAL);
        }
        if trial.mems == self.cs(i).mems {
            return Ok(());
        }
        self.validate(i, &trial)?;
        self.cs_mut(i).mems = trial.mems;
        self.refresh_mems(i);
        Ok(())
    }

    fn refresh_mems(&mut self, i: Ix) {
        let above = self.cs(self.parent(i)).mems_effective.clone();
        let within = self.cs(i).mems.intersection(&above);
        let effective = if within.is_empty() { above } else { within };
        if effective != self.cs(i).mems_effective {
            self.cs_mut(i).mems_effective = effective;
            for child in self.cpuset_children(i) {
                self.refresh_mems(child);
            }
        }
    }

    /// The `cpuset.cpus.partition` file.
    pub(super) fn write_partition(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let kind = match text {
            "member" => PartitionKind::Member,
            "root" => PartitionKind::Root,
            "isolated" => PartitionKind::Isolated,
            _ => return Err(Errno::EINVAL),
        };
        debug_assert_ne!(i, ROOT, "the root cgroup has no such file");
        self.set_partition(i, kind);
        Ok(())
    }
}
