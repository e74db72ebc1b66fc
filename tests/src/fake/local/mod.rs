//! Linux 6.1: partitions that know `cpuset.cpus` alone, below a valid partition (the root cgroup is one).
//!
//! The difference to every later kernel in one sentence: there are no grants; a cgroup keeps the CPUs that it has
//! handed to partitions below beside its effective ones, and a partition asks its parent for what its list says.
//!
//! This file: who becomes one and who ceases to be one, and the list. [`ask`]: the exchange with the parent. `flow`:
//! effective sets from the top down. `hotplug`: CPUs that go and come.

mod ask;
mod flow;
mod hotplug;

use super::{Errno, FakeKernel, Ix, ROOT, Reason, State, list, writes::Trial};
use ask::Ask;
use truepin::{CpuSet, partition::PartitionKind};

impl FakeKernel {
    /// The CPUs that partitions below have taken from `i`.
    pub(super) fn given(&self, i: Ix) -> &CpuSet {
        if i == ROOT { &self.handed_out } else { &self.cs(i).given }
    }

    fn set_given(&mut self, i: Ix, cpus: CpuSet) {
        if i == ROOT {
            self.handed_out = cpus;
        } else {
            self.cs_mut(i).given = cpus;
        }
    }

    /// Whether tasks depend on the CPUs that `i` keeps for itself. `except` is a child about to take some.
    fn depended_on(&self, i: Ix, except: Option<Ix>) -> bool {
        if self.groups[i].tasks_here > 0 {
            return true;
        }
        if except.is_none() && self.given(i).is_empty() {
            return self.populated(i);
        }
        self.dependants_below(i, except)
    }

    /// The `cpuset.cpus` file.
    pub(super) fn write_cpus_local(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let mut trial = Trial::of(self.cs(i));
        trial.cpus = if text.is_empty() { CpuSet::new() } else { list::parse(text, self.cpu_limit())? };
        if !trial.cpus.is_subset(&self.possible) {
            return Err(Errno::EINVAL);
        }
        if trial.cpus == self.cs(i).cpus {
            return Ok(());
        }
        let overlaps = match self.validate(i, &trial) {
            Err(Errno::EINVAL) => true,
            other => other.map(|()| false)?,
        };
        if overlaps {
            // It is taken, at the price of every partition that it meets, its own included.
            for sibling in self.cpuset_children(self.parent(i)) {
                let cs = self.cs(sibling);
                if cs.state.is_valid() && !trial.cpus.is_disjoint(&cs.cpus) {
                    let _ = self.ask(sibling, &Ask::Break);
                }
            }
        }
        if self.cs(i).state != State::Member {
            let _ = self.ask(i, &if overlaps { Ask::Break } else { Ask::List(&trial.cpus) });
        }
        let effective = self.effective_within(i, &trial.cpus);
        self.cs_mut(i).cpus = trial.cpus;
        let starved = effective.is_subset(self.given(i)) && self.depended_on(i, None);
        let kept = if starved || !self.cs(i).state.is_valid() {
            CpuSet::new()
        } else {
            self.given(i).intersection(&self.cs(i).cpus)
        };
        self.set_given(i, kept);
        self.walk_local(i, false);
        if self.cs(i).state != State::Member {
            self.walk_heirs(self.parent(i), i);
        }
        Ok(())
    }

    /// A write of member, root or isolated; always accepted, and what came of it stands in the state. An invalid
    /// partition stays invalid until `member` was written.
    pub(super) fn set_partition_local(&mut self, i: Ix, kind: PartitionKind) {
        let old = self.cs(i).state;
        let wanted = if kind == PartitionKind::Member { State::Member } else { State::Valid(kind) };
        if old == wanted {
            return;
        }
        let result = match (old, wanted) {
            (State::Invalid(_), State::Valid(_)) => {
                self.cs_mut(i).state = wanted.invalidated();
                return;
            }
            (State::Valid(_), State::Valid(_)) => Ok(()),
            (_, State::Valid(_)) => self.enable_here(i),
            _ => {
                let _ = self.ask(i, &Ask::End);
                if !self.given(i).is_empty() {
                    self.set_given(i, CpuSet::new());
                    self.cs_mut(i).effective = self.effective_within(i, &self.cs(i).cpus);
                }
                self.cs_mut(i).guarded = false;
                Ok(())
            }
        };
        if result.is_ok() && !(old.is_valid() && wanted.is_valid()) {
            let parent = self.parent(i);
            self.refresh_tasks(parent);
            self.walk_heirs(parent, i);
        }
        let cs = self.cs_mut(i);
        cs.reason = result.err();
        cs.state = if result.is_ok() { wanted } else { wanted.invalidated() };
        if !self.cpuset_children(i).is_empty() {
            self.walk_local(i, wanted == State::Member);
        }
    }

    fn enable_here(&mut self, i: Ix) -> Result<(), Reason> {
        if self.cs(i).cpus.is_empty() {
            return Err(Reason::ListEmpty);
        }
        self.guard_local(i)?;
        let asked = self.ask(i, &Ask::Start);
        if asked.is_err() {
            self.cs_mut(i).guarded = false;
        }
        asked
    }

    /// Forbids overlap with siblings from here on, if there is none.
    fn guard_local(&mut self, i: Ix) -> Result<(), Reason> {
        let trial = Trial { guarded: true, ..Trial::of(self.cs(i)) };
        if self.validate(i, &trial).is_err() {
            return Err(Reason::NotExclusive);
        }
        self.cs_mut(i).guarded = true;
        Ok(())
    }
}
