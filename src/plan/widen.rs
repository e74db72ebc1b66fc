//! Lists of partitions that have ended for want of a CPU, on a kernel that refuses to change them.
//!
//! Problem: 7.3 takes the tasks of a remote partition whose last CPU went, and leaves its flag "exclusive"
//! (`remote_partition_disable`). When it becomes a member the flag goes only if its list has enough deadline bandwidth
//! online, and as long as it is there no list may be written that has not (`validate_change`, EBUSY).
//! Steps: the list is written with the pool's CPUs added, which gives it the bandwidth; then it becomes a member and the
//! flag goes; the next plan writes the list that is wanted. One list at a time. A member whose flag stayed all the same,
//! because its last CPU went between the reading and that write, shows it only by the refusal: it is made a partition again,
//! an invalid one for want of a CPU, and from there it goes the same way.
//! Invariants: only CPUs are added that the cgroups above do not list, so nothing is taken from the pool; a list never meets
//! that of a cgroup beside it, nor holds all of that one's CPUs (EINVAL).

use super::Diff;
use crate::{
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CgroupObserved, Observed},
    partition::PartitionKind,
};

/// Whether the kernel may refuse this member's lists for a flag that it kept: none of its exclusive CPUs is online.
pub(crate) fn may_keep_flag(observed: &Observed, path: &CgroupPath) -> bool {
    let Some(files) = observed.cpuset(path) else { return false };
    let member = files.partition.as_ref().is_some_and(|s| s.kind == PartitionKind::Member);
    let exclusive = files.exclusive.as_ref().filter(|e| !e.is_empty());
    member && exclusive.is_some_and(|e| e.is_disjoint(&observed.online))
}

impl Diff<'_> {
    /// The exclusive list of an owner's remote partition of which no CPU is left. It has ended or is about to: it may read
    /// valid still.
    pub(super) fn sticks(&self, path: &CgroupPath) -> Option<&CpuSet> {
        let up = path.parent().filter(|up| !up.is_root())?;
        let files = self.observed.cpuset(path)?;
        let state = files.partition.as_ref()?;
        let exclusive = files.exclusive.as_ref().filter(|e| !e.is_empty())?;
        let remote = !self.observed.cpuset(&up)?.is_partition();
        let ended = state.kind != PartitionKind::Member;
        let frozen = self.desired.frozen.contains(&(path.clone(), CpusetFile::Exclusive));
        let may = remote && ended && !frozen && !self.desired.narrow.contains(path);
        (may && exclusive.is_disjoint(&self.observed.online)).then_some(exclusive)
    }

    /// Whether this is a member that kept the flag: see the module.
    pub(super) fn kept_flag(&self, path: &CgroupPath) -> bool {
        let frozen = self.desired.frozen.contains(&(path.clone(), CpusetFile::Partition));
        self.desired.stuck.contains(path) && !frozen && may_keep_flag(self.observed, path)
    }

    /// The first owner whose list sticks and can be had with the pool, and that list.
    pub(super) fn widen(&self) -> Option<(CgroupPath, CpuSet)> {
        self.desired.owners.keys().find_map(|path| Some((path.clone(), self.widened(path)?)))
    }

    fn widened(&self, path: &CgroupPath) -> Option<CpuSet> {
        let exclusive = self.sticks(path)?;
        let up = path.parent()?;
        let mut pool = self.desired.pool.intersection(&self.observed.online);
        // Above somebody else's cgroup the lists may be wide: what all of them hold it would really get.
        let above = path.ancestors().into_iter().filter(|up| !up.is_root());
        let mut lists = above.filter_map(|up| self.observed.cpuset(&up)?.exclusive.clone());
        if let Some(first) = lists.next() {
            pool = pool.difference(&lists.fold(first, |all, list| all.intersection(&list)));
        }
        for (_, sibling) in self.observed.children(&up).filter(|(p, _)| *p != path) {
            let Some(files) = sibling.cpuset.as_ref() else { continue };
            if files.exclusive.as_ref().is_some_and(|e| !e.is_disjoint(&pool)) {
                pool = pool.difference(files.exclusive.as_ref()?);
            }
            let cpus = Some(&files.cpus).filter(|c| !c.is_empty() && c.is_subset(&exclusive.union(&pool)));
            if let Some(one) = cpus.and_then(|c| c.intersection(&pool).first()) {
                pool -= &CpuSet::single(one);
            }
        }
        (!pool.is_empty()).then(|| exclusive.union(&pool))
    }

    /// Whether an owner beside this one has the pool in its exclusive list still: it gives it back with its next plan.
    pub(super) fn widened_beside(&self, path: &CgroupPath) -> bool {
        let Some(up) = path.parent() else { return false };
        let wide = |(other, c): (&CgroupPath, &CgroupObserved)| {
            let exclusive = c.cpuset.as_ref().and_then(|f| f.exclusive.as_ref());
            let ours = other != path && self.desired.owners.contains_key(other) && !self.skip(other);
            ours && exclusive.is_some_and(|e| !e.is_disjoint(&self.desired.pool))
        };
        self.observed.children(&up).any(wide)
    }
}
