//! CPUs that leave and come back: effective sets follow, from the root down.

use super::Ask;
use crate::fake::{FakeKernel, Ix, ROOT, Reason, State};
use truepin::CpuSet;

impl FakeKernel {
    /// All cpusets after a change of the CPUs that are online.
    pub(in crate::fake) fn follow_online_local(&mut self) {
        let mut left = self.active.clone();
        if left == self.cs(ROOT).effective && self.handed_out.is_empty() {
            return;
        }
        if left.is_subset(&self.handed_out) {
            // Nothing left for the root: partitions have to fight for the CPUs again.
            self.handed_out = CpuSet::new();
        }
        left -= &self.handed_out;
        self.cs_mut(ROOT).effective = left;
        for child in self.cpuset_children(ROOT) {
            self.follow_below_local(child);
        }
    }

    fn follow_below_local(&mut self, i: Ix) {
        let effective = self.after_hotplug_local(i);
        let changed = effective != self.cs(i).effective;
        // The file follows in any case, the tasks only where the set as computed is another.
        let inherits = effective.is_empty() && !self.cs(i).state.is_valid();
        let above = self.cs(self.parent(i)).effective.clone();
        self.cs_mut(i).effective = if inherits { above } else { effective };
        if changed {
            self.refresh_tasks(i);
        }
        for child in self.cpuset_children(i) {
            self.follow_below_local(child);
        }
    }

    fn after_hotplug_local(&mut self, i: Ix) -> CpuSet {
        let parent = self.parent(i);
        let within = self.effective_within(i, &self.cs(i).cpus);
        let mut effective = within.difference(self.given(i));
        let state = self.cs(i).state;
        if state == State::Member {
            return effective;
        }
        if state.is_valid() && effective.is_empty() && !self.given(i).is_empty() && self.depended_on(i, None)
        {
            // The partitions below fight for what is left.
            self.set_given(i, CpuSet::new());
            effective = self.effective_within(i, &self.cs(i).cpus);
        }
        let starved = || effective.is_empty() && self.depended_on(i, None);
        if state.is_valid() && (self.given(parent).is_empty() || starved()) {
            let _ = self.ask(i, &Ask::End);
            if !self.given(i).is_empty() {
                self.set_given(i, CpuSet::new());
                effective = self.effective_within(i, &self.cs(i).cpus);
            }
            let reason = match self.cs(parent).state {
                State::Valid(_) => Reason::Hotplug,
                State::Invalid(_) => Reason::ParentInvalid,
                State::Member => Reason::ParentMember,
            };
            let cs = self.cs_mut(i);
            (cs.state, cs.reason) = (state.invalidated(), Some(reason));
        } else if self.cs(parent).state.is_valid() && state.is_invalid() {
            // The verdict is in the state.
            let _ = self.ask(i, &Ask::Verdict);
        }
        effective
    }
}
