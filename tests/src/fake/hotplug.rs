//! CPUs that leave and come back.
//!
//! The asked-for sets never change. Effective sets follow, from the root down; a partition that loses its last
//! CPU while something runs there becomes invalid, and a valid one again when a CPU returns.

use super::{Errno, FakeKernel, Ix, ROOT, Reason, State};
use truepin::{CpuId, CpuSet, partition::PartitionKind};

impl FakeKernel {
    /// 0 or 1 into `/sys/devices/system/cpu/cpuN/online`.
    pub fn set_online(&mut self, cpu: CpuId, online: bool) -> Result<(), Errno> {
        if !self.possible.contains(cpu) {
            return Err(Errno::ENOENT);
        }
        if self.active.contains(cpu) == online {
            return Ok(());
        }
        if online {
            self.active.insert(cpu);
        } else {
            let last = self.behaviour.keeps_last_cpu && self.domain_with(cpu).len() == 1;
            if self.active.len() == 1 || last {
                // Refused, and yet what was running there has been pushed away.
                self.active.remove(cpu);
                self.push_away();
                self.active.insert(cpu);
                return Err(Errno::EBUSY);
            }
            self.active.remove(cpu);
            self.push_away();
        }
        self.follow_online();
        Ok(())
    }

    /// The scheduler domain that balances over `cpu`; empty on an isolated CPU.
    pub(super) fn domain_with(&self, cpu: CpuId) -> CpuSet {
        let balances =
            |cs: &super::Cpuset| cs.state == State::Valid(PartitionKind::Root) && cs.effective.contains(cpu);
        let live = self.paths.values().filter(|i| self.groups[**i].has_cpuset);
        let found = live.map(|i| self.cs(*i)).find(|cs| balances(cs));
        found.map_or_else(CpuSet::new, |cs| cs.effective.clone())
    }

    /// A busy task none of whose CPUs is left falls back to its cpuset's asked-for set, else to every CPU, and
    /// forgets what it asked for.
    fn push_away(&mut self) {
        let stranded: Vec<u32> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.traits.busy && t.mask.is_disjoint(&self.active))
            .map(|(id, _)| *id)
            .collect();
        for thread in stranded {
            let Some(group) = self.tasks.get(&thread).map(|t| t.group) else { continue };
            let asked = &self.cs(self.cpuset_of(group)).cpus;
            let mask = if asked.is_disjoint(&self.active) { &self.possible } else { asked }.clone();
            if let Some(task) = self.tasks.get_mut(&thread) {
                task.mask = mask;
                task.wanted = None;
            }
        }
    }

    fn follow_online(&mut self) {
        let mut left = self.active.clone();
        if left == self.cs(ROOT).effective && self.handed_out.is_empty() {
            return;
        }
        if left.is_subset(&self.handed_out) {
            // Nothing left for the root: partitions have to fight for the CPUs again.
            self.handed_out = CpuSet::new();
            self.cs_mut(ROOT).children_served = 0;
        }
        left -= &self.handed_out;
        self.cs_mut(ROOT).effective = left;
        for child in self.cpuset_children(ROOT) {
            self.follow_below(child);
        }
    }

    fn follow_below(&mut self, i: Ix) {
        let effective = self.after_hotplug(i);
        if effective != self.cs(i).effective {
            let inherits = effective.is_empty() && !self.cs(i).state.is_valid();
            let above = self.parent(i);
            self.cs_mut(i).effective = if inherits { self.cs(above).effective.clone() } else { effective };
            self.refresh_tasks(i);
        }
        for child in self.cpuset_children(i) {
            self.follow_below(child);
        }
    }

    fn after_hotplug(&mut self, i: Ix) -> CpuSet {
        let parent = self.parent(i);
        let mut effective = self.within_parent(i);
        if self.cs(i).state == State::Member {
            return effective;
        }
        let serves = self.cs(parent).state.is_valid();
        if self.cs(i).remote || self.cs(i).state.is_valid() && serves {
            effective = self.partition_effective(i);
        }
        if self.cs(i).remote && effective.is_empty() && self.has_dependants(i, None) {
            self.cs_mut(i).reason = Some(Reason::Hotplug);
            self.disable_remote(i);
            effective = self.within_parent(i);
        }
        let state = self.cs(i).state;
        if state.is_valid() && !self.cs(i).remote && (!serves || self.starves(i, &effective)) {
            self.invalidate_local(i);
            return self.partition_effective(i);
        }
        if serves && state.is_invalid() && !self.cs(i).granted.is_empty() {
            // The verdict is in the state.
            let _ = self.reconsider(i);
            if self.cs(i).state.is_valid() {
                return self.partition_effective(i);
            }
        }
        effective
    }
}
