//! What a cgroup can be granted: of its claim, what the parent can pass down and, on newer kernels, what its
//! siblings leave.

use super::{FakeKernel, Ix, State, writes::Trial};
use truepin::CpuSet;

impl FakeKernel {
    /// What of its claim the parent can pass down.
    pub(super) fn grantable(&self, i: Ix, claim: &CpuSet) -> CpuSet {
        claim.intersection(&self.cs(self.parent(i)).granted)
    }

    /// `cpus` less what siblings hold or reserve for themselves.
    fn less_siblings(&self, i: Ix, cpus: &CpuSet) -> CpuSet {
        let mut left = cpus.clone();
        for sibling in self.cpuset_children(self.parent(i)).into_iter().filter(|s| *s != i) {
            let cs = self.cs(sibling);
            left -= if cs.exclusive.is_empty() { &cs.granted } else { &cs.exclusive };
        }
        left
    }

    /// What `i` can be granted now, where siblings count.
    pub(super) fn granted_now(&self, i: Ix) -> CpuSet {
        let wanted = self.grantable(i, self.cs(i).claim());
        if self.cs(i).exclusive.is_empty() { self.less_siblings(i, &wanted) } else { wanted }
    }

    /// What a valid partition may hold. The first 6.12 kernels do not look at siblings here.
    pub(super) fn grant_for_partition(&self, i: Ix) -> CpuSet {
        if self.behaviour.heeds_siblings() {
            self.granted_now(i)
        } else {
            self.grantable(i, self.cs(i).claim())
        }
    }

    /// What `i` would be granted after a write, before and after its siblings are looked at; the same twice where
    /// the kernel does not look.
    pub(super) fn granted_then(&self, i: Ix, trial: &Trial) -> (CpuSet, CpuSet) {
        let listed_only = self.behaviour.is_lax() && self.cs(i).state == State::Member;
        let wanted = self.grantable(i, if listed_only { &trial.exclusive } else { trial.claim() });
        let left =
            if self.behaviour.heeds_siblings() { self.less_siblings(i, &wanted) } else { wanted.clone() };
        (wanted, left)
    }
}
