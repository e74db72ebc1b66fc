//! What each cgroup's files should hold.

use super::{
    Desired, OwnerCgroup, Problem, Role, Target, TargetKind, diff::lost_to, fence, local::slice_cpus,
};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    nodeset::NodeSet,
    observed::{CgroupObserved, CpusetObserved, Observed},
    partition::PartitionKind,
};
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Targets {
    pub(super) by_path: BTreeMap<CgroupPath, Target>,
    pub(super) problems: Vec<Problem>,
    /// First values whose cgroup is gone or was made anew.
    pub(super) stale_first: Vec<CgroupPath>,
}

pub(super) fn targets(desired: &Desired, observed: &Observed) -> Targets {
    let held = desired.held();
    let mut partitions = union(desired.owners.values().filter(|o| o.mode == Mode::Partition));
    if desired.partitions_slice() {
        partitions |= &slice_cpus(desired, observed);
    }
    let aim = Aim { desired, observed, held, partitions };
    let chain: BTreeSet<CgroupPath> =
        desired.owners.keys().flat_map(CgroupPath::ancestors).filter(|p| !p.is_root()).collect();
    let mut all = Targets { by_path: BTreeMap::new(), problems: Vec::new(), stale_first: Vec::new() };
    for (path, owner) in &desired.owners {
        if !desired.blocked.contains(path) {
            all.by_path.insert(path.clone(), aim.owner(path, owner));
        }
    }
    if desired.pool.is_empty() && !(desired.owners.is_empty() && desired.promised.is_empty()) {
        all.problems.push(Problem::PoolEmpty);
    }
    for path in &chain {
        all.by_path.insert(path.clone(), aim.chain(path));
    }
    for (path, cgroup) in &observed.cgroups {
        let ignored = desired.roles.get(path) == Some(&Role::Ignore);
        let fenced = desired.fences.contains(path);
        if path.is_root() || ignored && !fenced || all.by_path.contains_key(path) || is_owned(desired, path) {
            continue;
        }
        let target = if path.is_within(&desired.slice) {
            aim.in_slice(path, cgroup, &mut all.problems)
        } else if !ignored && path.parent().is_some_and(|up| up.is_root() || chain.contains(&up)) {
            aim.pool(path, cgroup, &mut all.problems)
        } else {
            None
        };
        let target = if fenced { aim.fenced(path, cgroup, target) } else { target };
        if let Some(t) = target {
            all.by_path.insert(path.clone(), t);
        }
    }
    for t in all.by_path.values_mut() {
        let some = [t.cpus.is_some(), t.exclusive.is_some(), t.partition.is_some(), t.mems.is_some()];
        t.governed = CpusetFile::ALL.into_iter().zip(some).filter(|(_, s)| *s).map(|(f, _)| f).collect();
    }
    aim.restore(&mut all);
    list_standing(observed, &mut all);
    all
}

/// Whether the cgroup is an owner's or inside one.
fn is_owned(desired: &Desired, path: &CgroupPath) -> bool {
    desired.owners.contains_key(path) || path.ancestors().iter().any(|up| desired.owners.contains_key(up))
}

/// What a target follows from.
struct Aim<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    /// CPUs of all owners.
    held: CpuSet,
    /// CPUs of those in partition mode.
    partitions: CpuSet,
}

/// As long as a partition that is to end stands, the cgroups above it list its CPUs: `member` gives back to the root
/// what they list at that moment (6.12, `remote_partition_disable`), and the rest is lost to everybody until the next
/// boot.
fn list_standing(observed: &Observed, all: &mut Targets) {
    let ending = |(path, t): (&CgroupPath, &Target)| {
        let files =
            observed.cpuset(path).filter(|f| !is_member(f) && t.partition == Some(PartitionKind::Member))?;
        Some((path.clone(), lost_to(observed, files.exclusive.as_ref()?)))
    };
    let ending: Vec<(CgroupPath, CpuSet)> = all.by_path.iter().filter_map(ending).collect();
    for (path, t) in &mut all.by_path {
        let below = ending.iter().filter(|(p, _)| p != path && p.is_within(path));
        for (_, cpus) in below {
            t.exclusive = t.exclusive.as_ref().map(|e| e.union(cpus));
        }
    }
}

fn union<'a>(owners: impl Iterator<Item = &'a OwnerCgroup>) -> CpuSet {
    owners.fold(CpuSet::new(), |all, o| all.union(&o.cpus))
}

fn below<'a>(desired: &'a Desired, path: &'a CgroupPath) -> impl Iterator<Item = &'a OwnerCgroup> {
    desired.owners.iter().filter(move |(p, _)| p.is_within(path)).map(|(_, o)| o)
}

/// The recorded first value of a list file, if it belongs to this very cgroup; else what is there.
pub(super) fn first_cpus(
    desired: &Desired,
    path: &CgroupPath,
    cgroup: &CgroupObserved,
    file: CpusetFile,
    now: &CpuSet,
) -> CpuSet {
    let first = desired.first.get(path).filter(|f| f.id == cgroup.id).and_then(|f| f.files.get(&file));
    // An unreadable record is as good as none: the present value is kept.
    first.and_then(|text| text.parse().ok()).unwrap_or_else(|| now.clone())
}

fn recorded(desired: &Desired, path: &CgroupPath, cgroup: &CgroupObserved, file: CpusetFile) -> bool {
    desired.first.get(path).is_some_and(|f| f.id == cgroup.id && f.files.contains_key(&file))
}

pub(super) fn is_member(files: &CpusetObserved) -> bool {
    files.partition.as_ref().is_none_or(|p| p.kind == PartitionKind::Member)
}

/// What another manager's partition has or would have. One that is invalid counts too: given fewer CPUs it could
/// become valid, and it stands in the way of a partition beside it.
fn claim_of(files: &CpusetObserved) -> CpuSet {
    match &files.exclusive_effective {
        Some(granted) if files.is_partition() => granted.clone(),
        _ => files.effective.union(&files.cpus),
    }
}

/// CPUs of other managers' partitions, except at `adopted`, and of processes that no owner has in a slice that is a
/// partition: not to be handed out.
pub(crate) fn foreign(desired: &Desired, observed: &Observed, adopted: Option<&CgroupPath>) -> CpuSet {
    let theirs = |(path, c): (&CgroupPath, &CgroupObserved)| {
        let ours = path.is_within(&desired.slice)
            || adopted.is_some_and(|a| path.is_within(a))
            || is_owned(desired, path)
            || recorded(desired, path, c, CpusetFile::Partition);
        c.cpuset.as_ref().filter(|s| !ours && !is_member(s)).map(claim_of)
    };
    // One of whose CPUs none is online may have for good what it was lent.
    let lent = |(path, _): &(&CgroupPath, &CpuSet)| desired.owners.contains_key(*path);
    let leftovers = desired.leftovers.iter().filter(|l| !lent(l)).map(|(_, cpus)| cpus.clone());
    let theirs = observed.cgroups.iter().filter_map(theirs).chain(leftovers);
    theirs.fold(unaccounted(desired, observed), |all, s| all.union(&s))
}

/// CPUs that the root has lost to somebody who was not read: a remote partition further down, or one that ended in a way
/// that the kernel lost count.
fn unaccounted(desired: &Desired, observed: &Observed) -> CpuSet {
    let Some(root) = observed.cpuset(&CgroupPath::root()).filter(|_| !observed.copied) else {
        return CpuSet::new();
    };
    let mut missing = observed.online.difference(&root.effective);
    for (path, cgroup) in &observed.cgroups {
        let Some(files) = cgroup.cpuset.as_ref().filter(|f| !is_member(f)) else { continue };
        missing = missing.difference(&claim_of(files));
        for list in [&files.exclusive, &files.exclusive_effective].into_iter().flatten() {
            missing = missing.difference(list);
        }
        if let Some(owner) = desired.owners.get(path) {
            missing = missing.difference(&owner.cpus);
        }
    }
    missing
}

impl Aim<'_> {
    fn owner(&self, path: &CgroupPath, owner: &OwnerCgroup) -> Target {
        let mut t = Target { kind: TargetKind::Owner, ours: owner.created, ..Target::default() };
        let cgroup = self.observed.cgroups.get(path);
        let served = !owner.cpus.is_disjoint(&self.observed.online);
        // Without a CPU of its own it runs in the pool (in a slice that is a partition, on what is left to it there), and not
        // on what the cgroup above has: others' CPUs are among that.
        let list = match self.desired.leftovers.get(path) {
            _ if served => owner.cpus.clone(),
            Some(left) => owner.cpus.union(left),
            None if self.desired.partitions_slice() && path.is_within(&self.desired.slice) => {
                owner.cpus.clone()
            }
            None => owner.cpus.union(&self.desired.pool),
        };
        match owner.mode {
            Mode::Partition => {
                t.exclusive = (!self.desired.local).then(|| owner.cpus.clone());
                // One without CPUs ends: the kernel leaves its tasks allowed anywhere (7.3), and books only the first CPU
                // that returns as its own when it makes it valid again by itself. The kernel ends partitions that
                // leave nothing to the root, too, and nothing is won by making them again.
                let stands = cgroup.and_then(|c| c.cpuset.as_ref()).is_some_and(CpusetObserved::is_partition);
                let may = served && (stands || !self.desired.pool.is_empty());
                t.partition = Some(if may { owner.kind } else { PartitionKind::Member });
                if owner.created || self.desired.local || self.desired.units.contains(path) {
                    // With remote partitions alone, the cgroups above have what is left of them.
                    let all = self.desired.pool_written || self.desired.local;
                    t.cpus = Some(if all { list } else { owner.cpus.clone() });
                } else if let Some((cgroup, files)) = cgroup.and_then(|c| Some((c, c.cpuset.as_ref()?))) {
                    t.cpus = self.beside_partition(path, owner, cgroup, files);
                }
            }
            Mode::Member => {
                t.cpus = Some(list);
                t.partition = Some(PartitionKind::Member);
                t.exclusive = (!self.desired.local).then(CpuSet::new);
            }
            Mode::Audit => return t,
        }
        t.mems = Some(owner.mems.clone()).filter(|m| !m.is_empty());
        t
    }

    /// The `cpuset.cpus` of an owner's partition in a cgroup that somebody else made. Theirs to choose while the
    /// partition stands, because `cpuset.cpus.exclusive` decides; but it counts before, and whenever the partition is
    /// lost. So it never reaches over another owner's CPUs, and where the pool is written it says something: an empty
    /// list inherits everything, members' CPUs included.
    fn beside_partition(
        &self,
        path: &CgroupPath,
        owner: &OwnerCgroup,
        cgroup: &CgroupObserved,
        files: &CpusetObserved,
    ) -> Option<CpuSet> {
        let others = self.held.difference(&owner.cpus);
        let now = &files.cpus;
        let reaches = if now.is_empty() { self.desired.pool_written } else { !now.is_disjoint(&others) };
        if !reaches {
            // Written once, it stays as it is until the owner goes.
            return recorded(self.desired, path, cgroup, CpusetFile::Cpus).then(|| now.clone());
        }
        let base = first_cpus(self.desired, path, cgroup, CpusetFile::Cpus, now);
        let rest = base.difference(&others);
        Some(match (base.is_empty(), rest.is_empty()) {
            (true, _) => self.desired.pool.union(&owner.cpus),
            (false, true) => owner.cpus.clone(),
            (false, false) => rest,
        })
    }

    fn chain(&self, path: &CgroupPath) -> Target {
        let ours = path.is_within(&self.desired.slice);
        let mut t = Target { kind: TargetKind::Chain, ours, ..Target::default() };
        if *path == self.desired.slice && self.desired.partitions_slice() {
            // As with owners': none is made that leaves nothing to the root.
            let stands = self.observed.cpuset(path).is_some_and(CpusetObserved::is_partition);
            let may = stands || !self.desired.pool.is_empty();
            t.partition = Some(if may { PartitionKind::Root } else { PartitionKind::Member });
            t.cpus = Some(slice_cpus(self.desired, self.observed));
            return t;
        }
        let all_below = union(below(self.desired, path));
        let partitions = union(below(self.desired, path).filter(|o| o.mode == Mode::Partition));
        let Some((cgroup, files)) =
            self.observed.cgroups.get(path).and_then(|c| Some((c, c.cpuset.as_ref()?)))
        else {
            t.exclusive = (!self.desired.local).then_some(partitions);
            return t;
        };
        if ours {
            t.partition = Some(PartitionKind::Member);
        } else if !is_member(files) {
            return t; // another manager's partition: a problem, and not ours to touch
        }
        if let Some(now) = &files.exclusive {
            let base = if ours {
                CpuSet::new()
            } else {
                first_cpus(self.desired, path, cgroup, CpusetFile::Exclusive, now)
            };
            t.exclusive = Some(base.union(&partitions));
        }
        let now = &files.cpus;
        if ours {
            // Inheriting is best. Where the kernel refuses that, everything but what others beside have is the same.
            let refused = self.desired.empty_refused && cgroup.populated;
            let all = self.observed.online.difference(&self.held).union(&all_below);
            t.cpus = (!now.is_empty()).then(|| if refused { all } else { CpuSet::new() });
        } else if self.desired.pool_written {
            t.cpus = self.pool_at(path).map(|p| p.union(&all_below));
        } else {
            let base = first_cpus(self.desired, path, cgroup, CpusetFile::Cpus, now);
            t.cpus = self.trimmed(&base, now, &self.partitions.difference(&partitions));
        }
        t
    }

    /// A cgroup in truepin's slice that no owner has.
    fn in_slice(
        &self,
        path: &CgroupPath,
        cgroup: &CgroupObserved,
        problems: &mut Vec<Problem>,
    ) -> Option<Target> {
        if *path == self.desired.slice {
            let mut t = self.chain(path);
            if self.desired.teardown && !cgroup.populated {
                t.kind = TargetKind::Remove;
            }
            return Some(t);
        }
        // Only direct children are made by truepin; what an owner's processes made below them is theirs.
        if path.parent().as_ref() != Some(&self.desired.slice) {
            return None;
        }
        let mut t = Target {
            kind: TargetKind::Remove,
            ours: true,
            exclusive: (!self.desired.local).then(CpuSet::new),
            partition: Some(PartitionKind::Member),
            ..Target::default()
        };
        // One that cannot be removed is in nobody's way all the same.
        if cgroup.populated || self.desired.blocked.contains(path) {
            t.kind = TargetKind::Retired;
            // The pool is outside a slice that is a partition.
            t.cpus = match self.desired.leftovers.get(path) {
                Some(own) => Some(own.clone()),
                None if !self.desired.partitions_slice() => self.pool_set(),
                None if cgroup.populated => {
                    problems.push(Problem::Crowded { path: path.clone() });
                    None
                }
                None => None,
            };
            if let Some(files) = cgroup.cpuset.as_ref().filter(|f| !f.mems.is_empty()) {
                t.mems = Some(self.possible_mems(path, cgroup, files, NodeSet::new()));
            }
        } else if cgroup.cpuset.as_ref().is_some_and(|f| !f.cpus.is_disjoint(&self.held)) {
            // Its CPUs have gone to others, and it goes last.
            t.cpus = Some(CpuSet::new());
        }
        Some(t)
    }

    fn pool(
        &self,
        path: &CgroupPath,
        cgroup: &CgroupObserved,
        problems: &mut Vec<Problem>,
    ) -> Option<Target> {
        let files = cgroup.cpuset.as_ref()?;
        if recorded(self.desired, path, cgroup, CpusetFile::Partition) {
            if self.first_kind(path, cgroup, files) != Some(PartitionKind::Member) {
                return None; // it was a partition and becomes one again: `restore` does all of it
            }
        } else if !is_member(files) {
            self.foreign_partition(path, files, problems);
            return None;
        }
        let cpus = if self.desired.pool_written {
            self.pool_at(path)
        } else {
            let base = first_cpus(self.desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
            self.trimmed(&base, &files.cpus, &self.partitions)
        };
        Some(Target { kind: TargetKind::Pool, cpus: Some(cpus?), ..Target::default() })
    }

    /// A cgroup that is to be kept off exclusive CPUs, whatever the pool's cgroups are.
    fn fenced(&self, path: &CgroupPath, cgroup: &CgroupObserved, target: Option<Target>) -> Option<Target> {
        let off = |t: &Target| t.cpus.as_ref().is_some_and(|c| !c.is_empty() && c.is_disjoint(&self.held));
        let files = cgroup.cpuset.as_ref().filter(|f| is_member(f) && !target.as_ref().is_some_and(off));
        let cpus = files.and_then(|files| fence::off(self.desired, self.observed, path, cgroup, files));
        let Some(cpus) = cpus else { return target };
        Some(Target { cpus: Some(cpus), ..target.unwrap_or_default() })
    }

    /// The shared pool; `None` if nothing is left for it, and then nothing is written.
    fn pool_set(&self) -> Option<CpuSet> {
        Some(self.desired.pool.clone()).filter(|p| !p.is_empty())
    }

    /// The shared pool as a cgroup of somebody else's has it: who was given fewer CPUs than all keeps to them, as far as
    /// they are in the pool still and the cgroup above has them. A list that shares nothing with the one above would
    /// inherit all of it, owners' CPUs included.
    fn pool_at(&self, path: &CgroupPath) -> Option<CpuSet> {
        let Some(up) = path.parent() else { return self.pool_set() };
        let above = self.pool_at(&up)?;
        let own = self.observed.cgroups.get(path).and_then(|c| Some((c, c.cpuset.as_ref()?)));
        let Some((cgroup, files)) = own else { return Some(above) };
        let base = first_cpus(self.desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
        let kept = base.intersection(&self.desired.pool);
        let served = kept.intersection(&above).intersection(&self.observed.online);
        Some(if served.is_empty() { above } else { kept })
    }

    /// A list of somebody else's that must not reach over partitions beside it. `None` when neither what it was nor
    /// what it is does: then it is as it was, or `restore` brings it back.
    fn trimmed(&self, base: &CpuSet, now: &CpuSet, partitions: &CpuSet) -> Option<CpuSet> {
        if base.is_empty() || base.is_disjoint(partitions) && now.is_disjoint(partitions) {
            return None;
        }
        let rest = base.difference(partitions);
        if rest.is_disjoint(&self.observed.online) { self.pool_set() } else { Some(rest) }
    }

    fn foreign_partition(&self, path: &CgroupPath, files: &CpusetObserved, problems: &mut Vec<Problem>) {
        for (home, owner) in &self.desired.owners {
            // What it only asks for is in the way of a partition that is still to be made.
            let stands = self.observed.cpuset(home).is_some_and(CpusetObserved::is_partition);
            let theirs =
                if stands && !files.is_partition() { files.effective.clone() } else { claim_of(files) };
            let cpus = owner.cpus.intersection(&theirs);
            if !cpus.is_empty() {
                problems.push(Problem::ForeignPartition {
                    path: path.clone(),
                    cpus,
                    owner: owner.owner.clone(),
                });
            }
        }
    }

    /// The kind of partition that the cgroup was, if its claim of then is free now; else member for the time being.
    fn first_kind(
        &self,
        path: &CgroupPath,
        cgroup: &CgroupObserved,
        files: &CpusetObserved,
    ) -> Option<PartitionKind> {
        let first = self.desired.first.get(path).filter(|f| f.id == cgroup.id)?;
        let text = first.files.get(&CpusetFile::Partition)?;
        let kind = text.parse::<crate::partition::PartitionState>().ok()?.kind;
        let now = files.exclusive.clone().unwrap_or_default();
        let exclusive = first_cpus(self.desired, path, cgroup, CpusetFile::Exclusive, &now);
        let claim = if exclusive.is_empty() {
            first_cpus(self.desired, path, cgroup, CpusetFile::Cpus, &files.cpus)
        } else {
            exclusive
        };
        let free = claim.is_disjoint(&self.held);
        Some(if free { kind } else { PartitionKind::Member })
    }

    /// Recorded files that no target needs any more go back to what they held, as far as no owner has it now.
    fn restore(&self, all: &mut Targets) {
        for (path, first) in &self.desired.first {
            if self.desired.blocked.contains(path) && self.desired.owners.contains_key(path) {
                continue;
            }
            let cgroup = self.observed.cgroups.get(path).filter(|c| c.id == first.id);
            let Some(cgroup) = cgroup else {
                all.stale_first.push(path.clone());
                continue;
            };
            // Without the controller there is nothing to put back yet.
            let Some(files) = cgroup.cpuset.as_ref() else { continue };
            let theirs = !is_member(files) && !first.files.contains_key(&CpusetFile::Partition);
            // Somebody made a partition of it meanwhile. What stands below one on the way of an owner stands by the lists
            // above it (6.12 since 6.12.110 ends a partition whose CPUs are taken off them).
            if theirs && all.by_path.get(path).is_none_or(|t| t.kind == TargetKind::Chain) {
                continue;
            }
            let t = all.by_path.entry(path.clone()).or_default();
            for (file, text) in &first.files {
                match file {
                    // An empty pool is a problem, and its cgroups stay as they are until it is none.
                    CpusetFile::Cpus
                        if t.cpus.is_none() && self.desired.pool_written && self.desired.pool.is_empty() => {}
                    CpusetFile::Cpus if t.cpus.is_none() => {
                        if let Ok(cpus) = text.parse::<CpuSet>() {
                            t.cpus = Some(self.possible(cgroup, files, cpus));
                        }
                    }
                    CpusetFile::Exclusive if t.exclusive.is_none() => {
                        t.exclusive = text.parse().ok().map(|e: CpuSet| e.difference(&self.held));
                    }
                    CpusetFile::Mems if t.mems.is_none() => {
                        let mems = text.parse::<NodeSet>().ok();
                        t.mems = mems.map(|m| self.possible_mems(path, cgroup, files, m));
                    }
                    CpusetFile::Partition if t.partition.is_none() => {
                        t.partition = self.first_kind(path, cgroup, files);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Where the kernel refuses an empty list of nodes, the nodes of the cgroup above are the same to the tasks.
    fn possible_mems(
        &self,
        path: &CgroupPath,
        cgroup: &CgroupObserved,
        files: &CpusetObserved,
        mems: NodeSet,
    ) -> NodeSet {
        if mems.is_empty() && self.desired.empty_refused && cgroup.populated && !files.mems.is_empty() {
            let above = path.parent().and_then(|up| Some(self.observed.cpuset(&up)?.mems_effective.clone()));
            return above.unwrap_or_else(|| files.mems.clone());
        }
        mems
    }

    /// Where the kernel refuses an empty value, everything that no owner holds is the same to the tasks.
    fn possible(&self, cgroup: &CgroupObserved, files: &CpusetObserved, cpus: CpuSet) -> CpuSet {
        if cpus.is_empty() && self.desired.empty_refused && cgroup.populated && !files.cpus.is_empty() {
            self.observed.online.difference(&self.held)
        } else {
            cpus
        }
    }
}
