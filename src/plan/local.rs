//! Partitions where the kernel has no `cpuset.cpus.exclusive`.
//!
//! Problem: without that file a partition takes its CPUs from the cgroup above it, which has to be a valid partition
//! itself, and consists of what its `cpuset.cpus` says. truepin owns one cgroup at the top, its slice; so what it makes
//! below can be partitions, and what others made cannot (they are members there).
//! Steps: as long as an owner below it is in partition mode, the slice is a partition whose `cpuset.cpus` are the CPUs of
//! all owners in it, members among them. It holds no process of its own, so all of them may be handed down (6.1 refuses
//! a parent without CPUs only where tasks would be left in it). Processes below it that no owner has, and owners all of
//! whose CPUs are offline, get CPUs there too ([`Desired::leftovers`]): the pool's are outside.
//!
//! | to do | order |
//! | --- | --- |
//! | the first owner, or more CPUs | shared cgroups at the top drop them, the slice's list grows, the slice becomes `root`, then the owner |
//! | fewer CPUs | the owner's partition ends, with the next plan the slice's list shrinks |
//! | anew | the owners' partitions end, then the slice's; then the slice, then the owners |
//! | all CPUs of an owner for others | its partition ends, the slice's list grows, then the owner's changes at once; who takes them is no partition either meanwhile |
//! | the last owner | its partition ends, with the next plan the slice's does, then its list is what it was |
//!
//! On 6.1 an invalid slice leaves the partitions below it as they are: they read valid and keep nobody out; and it is not
//! made valid by writing `root` over it: `member` comes first. Both were seen (`root invalid (Cpu list in cpuset.cpus not
//! exclusive)` above children that read `root`, with the root's effective set over all of them).
//! Invariants: the slice never lists a CPU that a cgroup beside it lists; it never loses a CPU that a partition below it
//! has; while it is a partition every process below it has a CPU of its own or of the leftovers': where an owner can have
//! neither, none is a partition until it can ([`Desired::strands`]).

use super::{Desired, Diff, Phase, Target, overlapping};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CgroupObserved, CpusetObserved, Observed},
    partition::{PartitionKind, PartitionState},
};

/// What becomes of the slice as a partition.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slice {
    /// It becomes a member in this plan: what is below ends before.
    pub(super) ends: bool,
    /// It is a partition when this plan comes to the owners' states.
    pub(super) serves: bool,
}

impl Desired {
    /// Whether the slice is to be a partition, for those below it.
    pub(super) fn partitions_slice(&self) -> bool {
        let local = |(path, o): (&CgroupPath, &super::OwnerCgroup)| {
            o.mode == Mode::Partition && path.parent().as_ref() == Some(&self.slice)
        };
        self.local && self.owners.iter().any(local)
    }

    /// CPUs that are somebody's: owners', promised ones, and those of processes that no owner has in a slice that is a
    /// partition.
    pub(super) fn held(&self) -> CpuSet {
        let owners = self.owners.values().fold(self.promised.clone(), |all, o| all.union(&o.cpus));
        self.leftovers.values().fold(owners, |all, set| all.union(set))
    }

    /// Finds CPUs in the slice for those who need some there, and takes them out of the pool: what they have there and
    /// nobody else has, else one CPU for all of them, which no owner has and which is not reserved.
    pub(crate) fn house_leftovers(&mut self, observed: &Observed) {
        self.leftovers.clear();
        if !self.partitions_slice() {
            return;
        }
        let held = self.held();
        let standing = observed.cpuset(&self.slice).filter(|f| f.is_partition()).map(|f| &f.cpus);
        let mut without = Vec::new();
        for (path, cgroup) in observed.children(&self.slice).filter(|(_, c)| c.populated) {
            let own = match self.owners.get(path) {
                Some(o) if !o.cpus.is_disjoint(&observed.online) => continue,
                Some(_) => CpuSet::new(),
                None => cgroup.cpuset.as_ref().map(|f| f.cpus.difference(&held)).unwrap_or_default(),
            };
            let own = standing.map(|s| own.intersection(s)).unwrap_or_default();
            if own.is_disjoint(&observed.online) {
                without.push(path.clone());
            } else {
                self.leftovers.insert(path.clone(), own);
            }
        }
        let kept = self.leftovers.values().fold(CpuSet::new(), |all, set| all.union(set));
        self.pool = self.pool.difference(&kept);
        if without.is_empty() {
            return;
        }
        let spare = self.pool.difference(&self.reserved);
        // The same one every time: what the slice has already, else the lowest.
        let there = standing.map(|s| spare.intersection(s)).unwrap_or_default();
        let one: CpuSet = there.first().or(spare.first()).into_iter().collect();
        if one.is_empty() || self.pool.is_subset(&one) {
            return;
        }
        self.pool = self.pool.difference(&one);
        self.leftovers.extend(without.into_iter().map(|path| (path, one.clone())));
    }
}

impl Desired {
    /// Whether an owner in a slice that is a partition has no CPU there, its own or of the leftovers': all that the slice has
    /// is then others', and as long as it is a partition the tasks run on that.
    pub(crate) fn strands(&self, observed: &Observed) -> bool {
        let without = |(path, o): (&CgroupPath, &super::OwnerCgroup)| {
            let populated = observed.cgroups.get(path).is_some_and(|c| c.populated);
            let served = !o.cpus.is_disjoint(&observed.online) || self.leftovers.contains_key(path);
            path.is_within(&self.slice) && populated && !served
        };
        self.partitions_slice() && self.owners.iter().any(without)
    }
}

/// Of a cgroup below the slice: it is a partition, valid or not.
fn stands(cgroup: &CgroupObserved) -> Option<&CpusetObserved> {
    let kind = |f: &&CpusetObserved| f.partition.as_ref().is_some_and(|s| s.kind != PartitionKind::Member);
    cgroup.cpuset.as_ref().filter(kind)
}

/// What the slice's `cpuset.cpus` are to be while it is a partition.
pub(super) fn slice_cpus(desired: &Desired, observed: &Observed) -> CpuSet {
    let owners = desired.owners.iter().filter(|(path, _)| path.is_within(&desired.slice));
    let mut cpus = owners.fold(CpuSet::new(), |all, (_, o)| all.union(&o.cpus));
    for set in desired.leftovers.values() {
        cpus |= set;
    }
    // What somebody below it still has, it keeps until that is over.
    if let Some(now) = observed.cpuset(&desired.slice).filter(|f| f.is_partition()) {
        for (path, below) in observed.children(&desired.slice) {
            let owned = below.populated && desired.owners.contains_key(path);
            if let Some(files) = below.cpuset.as_ref().filter(|_| owned || stands(below).is_some()) {
                cpus |= &files.cpus.intersection(&now.cpus);
            }
        }
    }
    cpus
}

/// Whether the slice, though its files are as they should be, has not its CPUs or not for itself: what it has and what
/// those below it have is its list, and nobody else's.
pub(crate) fn slice_leaks(desired: &Desired, observed: &Observed) -> bool {
    let path = &desired.slice;
    let Some(files) = observed.cpuset(path).filter(|f| f.is_partition() && !observed.copied) else {
        return false;
    };
    if !desired.partitions_slice() || files.cpus != slice_cpus(desired, observed) {
        return false;
    }
    let mine = files.cpus.intersection(&observed.online);
    let below = observed.children(path).filter_map(|(_, c)| stands(c)).filter(|f| f.is_partition());
    let below = below.fold(CpuSet::new(), |all, f| all.union(&f.cpus.intersection(&mine)));
    files.effective.union(&below).intersection(&observed.online) != mine
        || !overlapping(observed, path, &mine).is_empty()
}

impl Diff<'_> {
    /// Whether the slice is that of local partitions.
    pub(super) fn is_local_slice(&self, path: &CgroupPath) -> bool {
        self.desired.local && *path == self.desired.slice
    }

    fn frozen(&self, path: &CgroupPath, file: CpusetFile) -> bool {
        self.desired.frozen.contains(&(path.clone(), file))
    }

    /// What this plan makes of the slice; for the owners below, before any of them is planned.
    pub(super) fn judge_slice(&self, target: Option<&Target>) -> Slice {
        let path = &self.desired.slice;
        let target = target.filter(|t| t.partition == Some(PartitionKind::Root));
        let Some(cpus) = target.and_then(|t| t.cpus.as_ref()).filter(|_| self.desired.local) else {
            return Slice::default();
        };
        let files = self.files(path);
        let state = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        let stands = state.is_partition();
        if self.frozen(path, CpusetFile::Partition) {
            return Slice { ends: false, serves: stands };
        }
        let wrong = stands && (cpus.is_disjoint(&files.cpus) || self.desired.rebuild.contains(path));
        let listed = files.cpus == *cpus || !self.frozen(path, CpusetFile::Cpus);
        let ends = state.kind != PartitionKind::Member && (!stands || wrong);
        let ready = listed && (stands && !ends || self.elsewhere(cpus).is_empty());
        Slice { ends, serves: ready || stands && !ends }
    }

    /// CPUs of owners in a slice that is none yet, of which none is among those that it is to be a partition of: the
    /// pool's, lent while theirs were offline. It lists them until those have drawn back, because without any of theirs
    /// they would have all of its.
    fn elsewhere(&self, cpus: &CpuSet) -> CpuSet {
        let (online, mut all) = (&self.observed.online, CpuSet::new());
        let below = self.desired.owners.keys().filter(|p| p.is_within(&self.desired.slice));
        for path in below.filter(|p| !self.frozen(p, CpusetFile::Cpus)) {
            let has = self.observed.cpuset(path).map(|f| f.cpus.intersection(online)).unwrap_or_default();
            if has.is_disjoint(cpus) {
                all |= &has;
            }
        }
        all
    }

    /// Whether `path` is in a slice that is a partition, or is to be.
    pub(super) fn is_in_slice(&self, path: &CgroupPath) -> bool {
        path.is_within(&self.desired.slice) && self.desired.partitions_slice()
    }

    /// Whether the slice is to be no partition, and has not yet all CPUs of those below: it is one still, or lists what was
    /// online when it became a member. Until then nobody's list below changes: a CPU that the slice does not have serves
    /// nobody, and whoever gives one up may have no other.
    pub(super) fn slice_opens(&self, path: &CgroupPath) -> bool {
        let slice = &self.desired.slice;
        let (inside, member) =
            (path.is_within(slice), self.desired.local && !self.desired.partitions_slice());
        let Some(files) = self.observed.cpuset(slice).filter(|f| inside && member && !f.cpus.is_empty())
        else {
            return false;
        };
        if self.frozen(slice, if files.is_partition() { CpusetFile::Partition } else { CpusetFile::Cpus }) {
            return false;
        }
        let online = &self.observed.online;
        let lacks = |o: &super::OwnerCgroup| {
            let served = !o.cpus.is_disjoint(online);
            let list = if served { o.cpus.clone() } else { self.desired.pool.clone() };
            !list.intersection(online).is_subset(&files.cpus)
        };
        let below = self.desired.owners.iter().filter(|(p, _)| p.is_within(slice));
        files.is_partition() || below.into_iter().any(|(_, o)| lacks(o))
    }

    /// Whether somebody beside `path` has to leave all that he has to it. Until the slice has his new CPUs he has nowhere
    /// to go, so `path` is no partition when it takes those (6.1: a valid one whose list meets another's becomes invalid).
    pub(super) fn takes_all_of_one(&self, path: &CgroupPath, cpus: &CpuSet) -> bool {
        let gives = |(other, o): (&CgroupPath, &super::OwnerCgroup)| {
            let Some(has) = self.observed.cpuset(other).map(|f| &f.cpus) else { return false };
            other != path && self.is_in_slice(other) && has.is_disjoint(&o.cpus) && !has.is_disjoint(cpus)
        };
        self.desired.owners.iter().any(gives)
    }

    /// The slice's list and state.
    pub(super) fn local_slice(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let now = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        if t.partition != Some(PartitionKind::Root) {
            if now.kind == PartitionKind::Member {
                return self.pool_cpus(path, t, files);
            }
            // After those below it, and its list after itself.
            if !self.observed.children(path).any(|(_, c)| stands(c).is_some()) {
                self.write_partition(Phase::ShrinkExclusive, path, &now, PartitionKind::Member);
            }
            return;
        }
        let Some(cpus) = t.cpus.clone() else { return };
        let slice = self.slice;
        let mut state = now;
        let mut list = files.cpus.clone();
        if slice.ends {
            self.write_partition(Phase::ShrinkExclusive, path, &state, PartitionKind::Member);
            state = PartitionState::valid(PartitionKind::Member);
        } else if state.is_partition() {
            let keep = list.intersection(&cpus);
            if !keep.is_empty() {
                self.write_cpus(Phase::ShrinkExclusive, path, &list, keep.clone());
                list = keep;
            }
        }
        // Of a member in one write, when everybody else has drawn back: what is below inherits from it until then.
        let kept = if state.is_partition() { CpuSet::new() } else { self.elsewhere(&cpus) };
        self.write_cpus(Phase::GrowExclusive, path, &list, cpus.union(&kept));
        if slice.serves && (state.kind != PartitionKind::Root || state.invalid.is_some()) {
            self.write_partition(Phase::SetPartition, path, &state, PartitionKind::Root);
        }
    }
}
