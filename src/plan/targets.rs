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
        all.by_path.insert(path.clone(), owner_target(desired, observed, path, owner));
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
        if inside_owner || desired.roles.get(path) == Some(&Role::Ignore) {
            continue;
        }
        let target = if in_slice {
            slice_target(desired, path, cgroup)
        } else if beside_owner {
            pool_target(desired, observed, path, cgroup, &mut all.problems)
        } else {
            None
        };
        if let Some(t) = target {
            all.by_path.insert(path.clone(), t);
        }
    }
    restore(desired, observed, &mut all);
    all
}

fn union<'a>(owners: impl Iterator<Item = &'a OwnerCgroup>) -> CpuSet {
    owners.fold(CpuSet::new(), |all, o| all.union(&o.cpus))
}

fn below<'a>(desired: &'a Desired, path: &'a CgroupPath) -> impl Iterator<Item = &'a OwnerCgroup> {
    desired.owners.iter().filter(move |(p, _)| p.is_within(path)).map(|(_, o)| o)
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
                // Theirs to choose, unless it reaches over another owner's CPUs: that would invalidate a sibling.
                let others = union(desired.owners.values()).difference(&owner.cpus);
                let base = first_cpus(desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
                if !base.is_disjoint(&others) {
                    let rest = base.difference(&others);
                    t.cpus = Some(if rest.is_empty() { owner.cpus.clone() } else { rest });
                }
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

fn chain_target(desired: &Desired, observed: &Observed, path: &CgroupPath) -> Target {
    let ours = path.is_within(&desired.slice);
    let mut t = Target { kind: TargetKind::Chain, ours, ..Target::default() };
    let all_below = union(below(desired, path));
    let partitions = union(below(desired, path).filter(|o| o.mode == Mode::Partition));
    let Some((cgroup, files)) = observed.cgroups.get(path).and_then(|c| Some((c, c.cpuset.as_ref()?))) else {
        t.exclusive = Some(partitions);
        return t;
    };
    if let Some(now) = &files.exclusive {
        let base =
            if ours { CpuSet::new() } else { first_cpus(desired, path, cgroup, CpusetFile::Exclusive, now) };
        t.exclusive = Some(base.union(&partitions));
    }
    if desired.pool_written && !ours {
        t.cpus = Some(desired.pool.union(&all_below));
    } else if ours {
        // Inheriting is best; if somebody narrowed it, it must at least hold what lies below.
        let needed = all_below.union(&desired.pool);
        if !files.cpus.is_empty() && !all_below.is_subset(&files.cpus) {
            t.cpus = Some(files.cpus.union(&needed));
        }
    }
    t
}

/// A cgroup in truepin's slice that no owner has.
fn slice_target(desired: &Desired, path: &CgroupPath, cgroup: &CgroupObserved) -> Option<Target> {
    if *path == desired.slice {
        let mut t = Target {
            kind: TargetKind::Chain,
            ours: true,
            exclusive: Some(CpuSet::new()),
            ..Target::default()
        };
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
        cpus: None,
    };
    if cgroup.populated {
        t.kind = TargetKind::Retired;
        t.cpus = Some(desired.pool.clone());
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
    if files.is_partition() {
        // A released owner's partition is put back by `restore`; another manager's is not ours to touch.
        if !recorded(desired, path, cgroup, CpusetFile::Partition) {
            foreign_partition(desired, path, files, problems);
        }
        return None;
    }
    if desired.pool_written {
        t.cpus = Some(desired.pool.clone());
        return Some(t);
    }
    let partitions = partition_cpus(desired);
    let base = first_cpus(desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
    if base.is_empty() {
        return None;
    }
    let rest = base.difference(&partitions);
    let overlaps = !base.is_disjoint(&partitions);
    if !overlaps && files.cpus.is_disjoint(&partitions) {
        return None; // as it was, or `restore` brings it back
    }
    t.cpus = Some(if rest.is_disjoint(&observed.online) { desired.pool.clone() } else { rest });
    Some(t)
}

fn foreign_partition(
    desired: &Desired,
    path: &CgroupPath,
    files: &CpusetObserved,
    problems: &mut Vec<Problem>,
) {
    let theirs = files.exclusive_effective.as_ref().unwrap_or(&files.effective);
    for owner in desired.owners.values() {
        let cpus = owner.cpus.intersection(theirs);
        if !cpus.is_empty() {
            problems.push(Problem::ForeignPartition { path: path.clone(), cpus, owner: owner.owner.clone() });
        }
    }
}

/// Recorded files that no target needs any more go back to what they held.
fn restore(desired: &Desired, observed: &Observed, all: &mut Targets) {
    for (path, first) in &desired.first {
        let cgroup = observed.cgroups.get(path).filter(|c| c.id == first.id);
        let Some((cgroup, files)) = cgroup.and_then(|c| Some((c, c.cpuset.as_ref()?))) else {
            all.stale_first.push(path.clone());
            continue;
        };
        let t = all.by_path.entry(path.clone()).or_default();
        for (file, text) in &first.files {
            match file {
                CpusetFile::Cpus if t.cpus.is_none() => {
                    if let Ok(cpus) = text.parse::<CpuSet>() {
                        t.cpus = Some(possible(desired, observed, cgroup, files, cpus));
                    }
                }
                CpusetFile::Exclusive if t.exclusive.is_none() => t.exclusive = text.parse().ok(),
                CpusetFile::Partition if t.partition.is_none() => {
                    t.partition = text.parse::<crate::partition::PartitionState>().ok().map(|s| s.kind);
                }
                _ => {}
            }
        }
    }
}

/// Where the kernel refuses an empty value, everything that no partition holds is the same to the tasks.
fn possible(
    desired: &Desired,
    observed: &Observed,
    cgroup: &CgroupObserved,
    files: &CpusetObserved,
    cpus: CpuSet,
) -> CpuSet {
    if cpus.is_empty() && desired.empty_refused && cgroup.populated && !files.cpus.is_empty() {
        observed.online.difference(&partition_cpus(desired))
    } else {
        cpus
    }
}
