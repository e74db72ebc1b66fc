//! CPUs that leave and come back.
//!
//! The asked-for sets never change. Effective sets follow, from the root down; a partition that loses its last
//! CPU while something runs there becomes invalid, and a valid one again when a CPU returns.

use super::{Activity, Errno, FakeKernel, Ix, ROOT, Reason, State};
use truepin::{CpuId, CpuSet};

impl FakeKernel {
    /// 0 or 1 into `/sys/devices/system/cpu/cpuN/online`.
    pub fn set_online(&mut self, cpu: CpuId, online: bool) -> Result<(), Errno> {
        self.note_cpu(cpu, online);
        if !self.possible.contains(cpu) {
            return Err(Errno::ENOENT);
        }
        if self.active.contains(cpu) == online {
            return Ok(());
        }
        if online {
            self.active.insert(cpu);
        } else {
            if self.active.len() == 1 {
                return Err(Errno::EBUSY);
            }
            self.active.remove(cpu);
            self.push_away(Activity::Runs);
            if self.behaviour.keeps_last_cpu && !self.has_bandwidth(Some(cpu), &self.domain_with(cpu)) {
                // Refused, and yet what was running there has been pushed away.
                self.active.insert(cpu);
                return Err(Errno::EBUSY);
            }
        }
        self.follow_online();
        self.rebuild_domains();
        self.push_away(Activity::Wakes);
        Ok(())
    }

    /// A task none of whose CPUs is left falls back to its cpuset's asked-for set, else to every CPU, and
    /// forgets what it asked for.
    fn push_away(&mut self, activity: Activity) {
        let stranded: Vec<u32> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.traits.activity == activity && t.mask.is_disjoint(&self.active))
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
        if self.behaviour.is_local_only() {
            self.follow_online_local();
            return;
        }
        let mut left = self.active.clone();
        if left == self.cs(ROOT).effective && self.handed_out.is_empty() {
            return;
        }
        self.rebuild = true;
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
        let (cs, above) = (self.cs(i), self.cs(self.parent(i)));
        let changed = effective != cs.effective;
        // To 6.12 nodes that are inherited always look changed, and then the CPUs are set without the tasks.
        let renewed = cs.mems.intersection(&above.mems_effective) != cs.mems_effective;
        if changed || renewed && !self.behaviour.is_lax() {
            let inherits = effective.is_empty() && !cs.state.is_valid();
            self.cs_mut(i).effective = if inherits { above.effective.clone() } else { effective };
        }
        if changed {
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
        // Newer kernels know that the root has taken everything back.
        let revoked = self.behaviour.heeds_siblings() && self.handed_out.is_empty();
        if self.cs(i).remote && (revoked || effective.is_empty() && self.has_dependants(i, None)) {
            self.cs_mut(i).reason = Some(Reason::Hotplug);
            self.disable_remote(i);
            effective = self.within_parent(i);
            self.rebuild = true;
        }
        let revoked = self.behaviour.heeds_siblings() && self.handed_out.is_empty();
        let state = self.cs(i).state;
        if state.is_valid() && !self.cs(i).remote && (!serves || revoked || self.starves(i, &effective)) {
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
