//! Effective sets, from a cgroup down to its last descendant.
//!
//! A child may use its list within what its parent has *or has handed out*, and everything that the parent has where
//! that is nothing. Only children of the second kind look again when the parent's set changes: they are its heirs.

use super::Ask;
use crate::fake::{FakeKernel, Ix, Reason, State};
use truepin::CpuSet;

impl FakeKernel {
    /// What `i` might use with this list; empty where it is to inherit.
    pub(super) fn effective_within(&self, i: Ix, list: &CpuSet) -> CpuSet {
        let parent = self.parent(i);
        let (above, given) = (&self.cs(parent).effective, self.given(parent));
        if given.is_empty() {
            list.intersection(above)
        } else {
            list.intersection(&above.union(given)).intersection(&self.active)
        }
    }

    /// Recomputes `i` and everything below. `force` walks on where a member's set stays the same.
    pub(super) fn walk_local(&mut self, i: Ix, force: bool) {
        self.walk_one(i, i, force);
    }

    /// The children of `parent` that inherit its set, all but `except`.
    pub(super) fn walk_heirs(&mut self, parent: Ix, except: Ix) {
        for sibling in self.cpuset_children(parent) {
            if sibling != except && self.cs(sibling).inherits {
                self.walk_local(sibling, false);
            }
        }
    }

    fn walk_one(&mut self, i: Ix, start: Ix, force: bool) {
        let parent = self.parent(i);
        let mut effective = self.effective_within(i, &self.cs(i).cpus);
        let state = self.cs(i).state;
        // It has handed out all of its list, and lives on with nothing.
        let bare = effective.is_empty() && state.is_valid() && self.cs(i).cpus == *self.given(i);
        if !bare {
            self.cs_mut(i).inherits = effective.is_empty();
            if effective.is_empty() {
                effective = self.cs(parent).effective.clone();
            }
            if state == State::Member && !force && effective == self.cs(i).effective {
                return;
            }
        }
        let mut after = state;
        if i != start && state != State::Member {
            match self.cs(parent).state {
                State::Valid(_) => {
                    // Its verdict is read back from the state.
                    let _ = self.ask(i, &Ask::Verdict);
                    after = self.cs(i).state;
                }
                above => {
                    after = state.invalidated();
                    let reason =
                        if above.is_invalid() { Reason::ParentInvalid } else { Reason::ParentMember };
                    self.cs_mut(i).reason = Some(reason);
                }
            }
        }
        // Judged by the state before this walk: what an inner partition had handed out when its parent ended is
        // forgotten by the next walk only.
        if !self.cs(i).state.is_valid() && !self.given(i).is_empty() {
            effective = effective.union(self.given(i)).intersection(&self.active);
            self.set_given(i, CpuSet::new());
        }
        effective -= &self.given(i).clone();
        let cs = self.cs_mut(i);
        cs.effective = effective;
        cs.state = after;
        self.state_changed(i, state);
        self.refresh_tasks(i);
        for child in self.cpuset_children(i) {
            self.walk_one(child, start, force);
        }
    }
}
