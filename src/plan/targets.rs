//! What each cgroup's files should hold.

use super::{Desired, OwnerCgroup, Problem, Role, Target, TargetKind};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
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
    let chain: BTreeSet<CgroupPath> =
        desired.owners.keys().flat_map(CgroupPath::ancestors).filter(|p| !p.is_root()).collect();
    let mut all = Targets { by_path: BTreeMap::new(), problems: Vec::new(), stale_first: Vec::new() };
    for (path, owner) in &desired.owners {
        if !desired.blocked.contains(path) {
            all.by_path.insert(path.clone(), owner_target(desired, observed, path, owner));
        }
    }
    if desired.pool.is_empty() && !desired.owners.is_empty() {
        all.problems.push(Problem::PoolEmpty);
    }
    for path in &chain {
        all.by_path.insert(path.clone(), chain_target(desired, observed, path));
    }
    for (path, cgroup) in &observed.cgroups {
        if path.is_root() || all.by_path.contains_key(path) {
            continue;
        }
        let beside_owner = path.parent().is_some_and(|up| up.is_root() || chain.contains(&up));
        let in_slice = path.is_within(&desired.slice);
        let inside_owner = desired.owners.keys().any(|o| path.is_within(o));
        let blocked = desired.blocked.contains(path);
        if inside_owner || blocked || desired.roles.get(path) == Some(&Role::Ignore) {
            continue;
        }
        let target = if in_slice {
            slice_target(desired, observed, path, cgroup)
        } else if beside_owner {
            pool_target(desired, observed, path, cgroup, &mut all.problems)
        } else {
            None
        };
        if let Some(t) = target {
            all.by_path.insert(path.clone(), t);
        }
    }
    for t in all.by_path.values_mut() {
        let some = [t.cpus.is_some(), t.exclusive.is_some(), t.partition.is_some()];
        t.governed = CpusetFile::ALL.into_iter().zip(some).filter(|(_, s)| *s).map(|(f, _)| f).collect();
    }
    restore(desired, observed, &mut all);
    list_standing(observed, &mut all);
    all
}

/// As long as a partition that is to end stands, the cgroups above it list its CPUs: `member` gives back to the root
/// what they list at that moment (6.12, `remote_partition_disable`), and the rest is lost to everybody until the next
/// boot.
fn list_standing(observed: &Observed, all: &mut Targets) {
    let ending = |(path, t): (&CgroupPath, &Target)| {
        let files =
            observed.cpuset(path).filter(|f| !is_member(f) && t.partition == Some(PartitionKind::Member))?;
        Some((path.clone(), files.exclusive.clone()?))
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

fn outside<'a>(desired: &'a Desired, path: &'a CgroupPath) -> impl Iterator<Item = &'a OwnerCgroup> {
    desired.owners.iter().filter(move |(p, _)| !p.is_within(path)).map(|(_, o)| o)
}

fn partition_cpus(desired: &Desired) -> CpuSet {
    union(desired.owners.values().filter(|o| o.mode == Mode::Partition))
}

/// The recorded first value of a list file, if it belongs to this very cgroup; else what is there.
fn first_cpus(
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

fn owner_target(desired: &Desired, observed: &Observed, path: &CgroupPath, owner: &OwnerCgroup) -> Target {
    let mut t = Target { kind: TargetKind::Owner, ours: owner.created, ..Target::default() };
    let cgroup = observed.cgroups.get(path);
    match owner.mode {
        Mode::Partition => {
            t.exclusive = Some(owner.cpus.clone());
            t.partition = Some(PartitionKind::Root);
            if owner.created {
                t.cpus = Some(owner.cpus.clone());
            } else if let Some((cgroup, files)) = cgroup.and_then(|c| Some((c, c.cpuset.as_ref()?))) {
                t.cpus = beside_partition(desired, path, owner, cgroup, files);
            }
        }
        Mode::Member => {
            t.cpus = Some(owner.cpus.clone());
            t.partition = Some(PartitionKind::Member);
            t.exclusive = Some(CpuSet::new());
        }
        Mode::Audit => {}
    }
    t
}

/// The `cpuset.cpus` of an owner's partition in a cgroup that somebody else made. Theirs to choose while the partition
/// stands, because `cpuset.cpus.exclusive` decides; but it counts before, and whenever the partition is lost. So it
/// never reaches over another owner's CPUs, and where the pool is written it says something: an empty list inherits
/// everything, members' CPUs included.
fn beside_partition(
    desired: &Desired,
    path: &CgroupPath,
    owner: &OwnerCgroup,
    cgroup: &CgroupObserved,
    files: &CpusetObserved,
) -> Option<CpuSet> {
    let others = union(desired.owners.values()).difference(&owner.cpus);
    let now = &files.cpus;
    let reaches = if now.is_empty() { desired.pool_written } else { !now.is_disjoint(&others) };
    if !reaches {
        // Written once, it stays as it is until the owner goes.
        return recorded(desired, path, cgroup, CpusetFile::Cpus).then(|| now.clone());
    }
    let base = first_cpus(desired, path, cgroup, CpusetFile::Cpus, now);
    let rest = base.difference(&others);
    Some(match (base.is_empty(), rest.is_empty()) {
        (true, _) => desired.pool.union(&owner.cpus),
        (false, true) => owner.cpus.clone(),
        (false, false) => rest,
    })
}

fn chain_target(desired: &Desired, observed: &Observed, path: &CgroupPath) -> Target {
    let ours = path.is_within(&desired.slice);
    let mut t = Target { kind: TargetKind::Chain, ours, ..Target::default() };
    let all_below = union(below(desired, path));
    let partitions = union(below(desired, path).filter(|o| o.mode == Mode::Partition));
    let Some((cgroup, files)) = observed.cgroups.get(path).and_then(|c| Some((c, c.cpuset.as_ref()?))) else {
        t.exclusive = Some(partitions);
        return t;
    };
    if ours {
        t.partition = Some(PartitionKind::Member);
    } else if !is_member(files) {
        return t; // another manager's partition: a problem, and not ours to touch
    }
    if let Some(now) = &files.exclusive {
        let base =
            if ours { CpuSet::new() } else { first_cpus(desired, path, cgroup, CpusetFile::Exclusive, now) };
        t.exclusive = Some(base.union(&partitions));
    }
    // What lies beside a partition must not reach over it.
    let beside = union(outside(desired, path).filter(|o| o.mode == Mode::Partition));
    let now = &files.cpus;
    if ours {
        // Inheriting is best. Where the kernel refuses that, everything but what others beside have is the same.
        let refused = desired.empty_refused && cgroup.populated;
        let all = observed.online.difference(&union(outside(desired, path)));
        t.cpus = (!now.is_empty()).then(|| if refused { all } else { CpuSet::new() });
    } else if desired.pool_written {
        t.cpus = Some(desired.pool.union(&all_below)).filter(|_| !desired.pool.is_empty());
    } else {
        let base = first_cpus(desired, path, cgroup, CpusetFile::Cpus, now);
        if !base.is_empty() && !(base.is_disjoint(&beside) && now.is_disjoint(&beside)) {
            let rest = base.difference(&beside);
            t.cpus = Some(if rest.is_disjoint(&observed.online) { desired.pool.clone() } else { rest })
                .filter(|p| !p.is_empty());
        }
    }
    t
}

fn is_member(files: &CpusetObserved) -> bool {
    files.partition.as_ref().is_none_or(|p| p.kind == PartitionKind::Member)
}

/// A cgroup in truepin's slice that no owner has.
fn slice_target(
    desired: &Desired,
    observed: &Observed,
    path: &CgroupPath,
    cgroup: &CgroupObserved,
) -> Option<Target> {
    if *path == desired.slice {
        let mut t = chain_target(desired, observed, path);
        if desired.teardown && !cgroup.populated {
            t.kind = TargetKind::Remove;
        }
        return Some(t);
    }
    // Only direct children are made by truepin; what an owner's processes made below them is theirs.
    if path.parent().as_ref() != Some(&desired.slice) {
        return None;
    }
    let mut t = Target {
        kind: TargetKind::Remove,
        ours: true,
        exclusive: Some(CpuSet::new()),
        partition: Some(PartitionKind::Member),
        ..Target::default()
    };
    if cgroup.populated {
        t.kind = TargetKind::Retired;
        t.cpus = Some(desired.pool.clone()).filter(|p| !p.is_empty());
    }
    Some(t)
}

fn pool_target(
    desired: &Desired,
    observed: &Observed,
    path: &CgroupPath,
    cgroup: &CgroupObserved,
    problems: &mut Vec<Problem>,
) -> Option<Target> {
    let files = cgroup.cpuset.as_ref()?;
    let mut t = Target { kind: TargetKind::Pool, ..Target::default() };
    let base = first_cpus(desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
    let taken = partition_cpus(desired);
    if recorded(desired, path, cgroup, CpusetFile::Partition) {
        if first_kind(desired, path, cgroup, files) != Some(PartitionKind::Member) {
            return None; // it was a partition and becomes one again: `restore` does all of it
        }
    } else if !is_member(files) {
        foreign_partition(desired, observed, path, files, problems);
        return None;
    }
    if desired.pool_written {
        t.cpus = Some(desired.pool.clone()).filter(|p| !p.is_empty());
        return Some(t);
    }
    if base.is_empty() {
        return None;
    }
    let rest = base.difference(&taken);
    if base.is_disjoint(&taken) && files.cpus.is_disjoint(&taken) {
        return None; // as it was, or `restore` brings it back
    }
    t.cpus = Some(if rest.is_disjoint(&observed.online) { desired.pool.clone() } else { rest })
        .filter(|p| !p.is_empty());
    Some(t)
}

/// What another manager's partition has or would have. One that is invalid counts too: given fewer CPUs it could
/// become valid, and it stands in the way of a partition beside it.
fn claim_of(files: &CpusetObserved) -> CpuSet {
    match &files.exclusive_effective {
        Some(granted) if files.is_partition() => granted.clone(),
        _ => files.effective.union(&files.cpus),
    }
}

/// CPUs of other managers' partitions among what was read, except at `adopted`: not to be handed out.
pub(crate) fn foreign(desired: &Desired, observed: &Observed, adopted: Option<&CgroupPath>) -> CpuSet {
    let theirs = |(path, c): (&CgroupPath, &CgroupObserved)| {
        let ours = path.is_within(&desired.slice)
            || adopted.is_some_and(|a| path.is_within(a))
            || desired.owners.keys().any(|o| path.is_within(o))
            || recorded(desired, path, c, CpusetFile::Partition);
        c.cpuset.as_ref().filter(|s| !ours && !is_member(s)).map(claim_of)
    };
    observed.cgroups.iter().filter_map(theirs).fold(CpuSet::new(), |all, s| all.union(&s))
}

fn foreign_partition(
    desired: &Desired,
    observed: &Observed,
    path: &CgroupPath,
    files: &CpusetObserved,
    problems: &mut Vec<Problem>,
) {
    for (home, owner) in &desired.owners {
        // What it only asks for is in the way of a partition that is still to be made.
        let stands = observed.cpuset(home).is_some_and(CpusetObserved::is_partition);
        let theirs = if stands && !files.is_partition() { files.effective.clone() } else { claim_of(files) };
        let cpus = owner.cpus.intersection(&theirs);
        if !cpus.is_empty() {
            problems.push(Problem::ForeignPartition { path: path.clone(), cpus, owner: owner.owner.clone() });
        }
    }
}

/// The kind of partition that the cgroup was, if its claim of then is free now; else member for the time being.
fn first_kind(
    desired: &Desired,
    path: &CgroupPath,
    cgroup: &CgroupObserved,
    files: &CpusetObserved,
) -> Option<PartitionKind> {
    let first = desired.first.get(path).filter(|f| f.id == cgroup.id)?;
    let text = first.files.get(&CpusetFile::Partition)?;
    let kind = text.parse::<crate::partition::PartitionState>().ok()?.kind;
    let now = files.exclusive.clone().unwrap_or_default();
    let exclusive = first_cpus(desired, path, cgroup, CpusetFile::Exclusive, &now);
    let claim = if exclusive.is_empty() {
        first_cpus(desired, path, cgroup, CpusetFile::Cpus, &files.cpus)
    } else {
        exclusive
    };
    let free = claim.is_disjoint(&union(desired.owners.values()));
    Some(if free { kind } else { PartitionKind::Member })
}

/// Recorded files that no target needs any more go back to what they held, as far as no owner has it now.
fn restore(desired: &Desired, observed: &Observed, all: &mut Targets) {
    let held = union(desired.owners.values());
    for (path, first) in &desired.first {
        let cgroup = observed.cgroups.get(path).filter(|c| c.id == first.id);
        let Some(cgroup) = cgroup else {
            all.stale_first.push(path.clone());
            continue;
        };
        // Without the controller there is nothing to put back yet.
        let Some(files) = cgroup.cpuset.as_ref() else { continue };
        let theirs = !is_member(files) && !first.files.contains_key(&CpusetFile::Partition);
        if theirs && !all.by_path.contains_key(path) {
            continue; // somebody made a partition of it meanwhile
        }
        let t = all.by_path.entry(path.clone()).or_default();
        for (file, text) in &first.files {
            match file {
                CpusetFile::Cpus if t.cpus.is_none() => {
                    if let Ok(cpus) = text.parse::<CpuSet>() {
                        t.cpus = Some(possible(desired, observed, cgroup, files, cpus));
                    }
                }
                CpusetFile::Exclusive if t.exclusive.is_none() => {
                    t.exclusive = text.parse().ok().map(|e: CpuSet| e.difference(&held));
                }
                CpusetFile::Partition if t.partition.is_none() => {
                    t.partition = first_kind(desired, path, cgroup, files);
                }
                _ => {}
            }
        }
    }
}

/// Where the kernel refuses an empty value, everything that no owner holds is the same to the tasks.
fn possible(
    desired: &Desired,
    observed: &Observed,
    cgroup: &CgroupObserved,
    files: &CpusetObserved,
    cpus: CpuSet,
) -> CpuSet {
    if cpus.is_empty() && desired.empty_refused && cgroup.populated && !files.cpus.is_empty() {
        observed.online.difference(&union(desired.owners.values()))
    } else {
        cpus
    }
}
