//! An intruder's own cgroup, kept off exclusive CPUs.
//!
//! Problem: no cgroup of the pool is written as long as partitions keep everybody out, and never one that configuration
//! says to ignore. Where a partition is lost and cannot be had back at present, or an ignored cgroup lives beside a member,
//! tasks get in that nothing of what is planned keeps out.
//! Steps: whoever was there, by the ledger, is looked for in a reading. If its cgroup has a list of its own, belongs to nobody
//! whom truepin serves and lies above none of them, that list becomes what it was, or what the cgroup above gives it where
//! it was empty, less everything that is exclusive.
//! Invariants: a list never becomes empty, nor one of which the cgroup above has nothing: the kernel gives the tasks everything
//! then. Masks of tasks are not touched, so what lives in the root cgroup is not fenced.

use super::{
    Desired, Role,
    targets::{first_cpus, is_member, targets},
};
use crate::{
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CgroupObserved, CpusetObserved, Observed},
    owner::Owner,
};
use serde::{Deserialize, Serialize};

/// What is done about tasks on CPUs that are an owner's alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnIntrusion {
    /// They are reported.
    #[default]
    Report,
    /// And their cgroup is kept off exclusive CPUs.
    Fence,
}

/// Why an intruder's cgroup is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Unfenced {
    /// The root cgroup has no `cpuset.cpus`.
    #[error("it lives in the root cgroup, which has no list of its own")]
    Root,
    /// Truepin's.
    #[error("its cgroup is truepin's own")]
    Own,
    /// What an owner's tasks may use is decided by its assignment.
    #[error("its cgroup is that of {0}")]
    Owned(Owner),
    /// Its list has to hold the owner's CPUs.
    #[error("the cgroup of {0} lies below its own, and would lose its CPUs too")]
    Above(Owner),
    /// Configuration says so.
    #[error("its cgroup is to be ignored; on-intrusion = \"fence\" in its [[cgroup]] would allow it")]
    Ignored,
    /// What it has is between its manager and the kernel.
    #[error("its cgroup is a partition of another manager")]
    Partition,
    /// The controller is not enabled for it.
    #[error(
        "its cgroup has no list of its own: that would need +cpuset in cgroup.subtree_control of {}",
        list(.0)
    )]
    NoList(Vec<CgroupPath>),
    /// Empty is everything.
    #[error("no CPU would be left to it")]
    NothingLeft,
    /// Its list is in a fight (I8), or could not be written.
    #[error("its cpuset.cpus is left alone at present")]
    LeftAlone,
    /// As many as may be are fenced.
    #[error("{0} cgroups are fenced already, and more are not")]
    TooMany(usize),
    /// It was made anew, or let go, again and again.
    #[error("it was fenced {0} times within a minute; again when that has been quiet for a minute")]
    TooOften(u32),
}

fn list(paths: &[CgroupPath]) -> String {
    paths.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// What `cpuset.cpus` of `path`, where an intruder lives, is to be; `None` if it is off the CPUs that are `exposed`, or will be
/// by what is planned anyhow. It has just been observed.
pub(crate) fn fence(
    desired: &Desired,
    observed: &Observed,
    path: &CgroupPath,
    exposed: &CpuSet,
) -> Result<Option<CpuSet>, Unfenced> {
    if reach(observed, path).is_disjoint(exposed) {
        return Ok(None);
    }
    if path.is_root() {
        return Err(Unfenced::Root);
    }
    if path.is_within(&desired.slice) || desired.slice.is_within(path) {
        return Err(Unfenced::Own);
    }
    for (home, owner) in &desired.owners {
        if path.is_within(home) {
            return Err(Unfenced::Owned(owner.owner.clone()));
        }
        if home.is_within(path) {
            return Err(Unfenced::Above(owner.owner.clone()));
        }
    }
    let mut way = path.ancestors();
    way.push(path.clone());
    let ignored = way.iter().rev().find(|p| desired.roles.get(*p) == Some(&Role::Ignore));
    if ignored.is_some_and(|p| !desired.fenceable.contains(p)) {
        return Err(Unfenced::Ignored);
    }
    let cgroup = observed.cgroups.get(path);
    let Some((cgroup, files)) = cgroup.and_then(|c| Some((c, c.cpuset.as_ref()?))) else {
        let lacks = |p: &&CgroupPath| observed.cgroups.get(*p).is_some_and(|c| !c.enables_cpuset);
        return Err(Unfenced::NoList(path.ancestors().iter().filter(lacks).cloned().collect()));
    };
    if !is_member(files) {
        return Err(Unfenced::Partition);
    }
    let frozen = |p: &CgroupPath| desired.frozen.contains(&(p.clone(), CpusetFile::Cpus));
    let planned = targets(desired, observed).by_path;
    let kept = |p: &CgroupPath| {
        let cpus = planned.get(p).filter(|t| t.governed.contains(&CpusetFile::Cpus));
        let cpus = cpus.and_then(|t| t.cpus.as_ref()).filter(|c| !c.is_empty());
        cpus.is_some_and(|c| c.is_disjoint(exposed)) && !frozen(p)
    };
    if way.iter().any(kept) {
        return Ok(None);
    }
    if frozen(path) {
        return Err(Unfenced::LeftAlone);
    }
    off(desired, observed, path, cgroup, files).map(Some).ok_or(Unfenced::NothingLeft)
}

/// Where tasks of a cgroup may run: without files of its own, on what the next one above has.
fn reach(observed: &Observed, path: &CgroupPath) -> CpuSet {
    let mut up = std::iter::successors(Some(path.clone()), CgroupPath::parent);
    up.find_map(|p| observed.cpuset(&p).map(|f| f.effective.clone())).unwrap_or_default()
}

/// The list of a cgroup that is fenced; `None` if it would have nothing.
pub(super) fn off(
    desired: &Desired,
    observed: &Observed,
    path: &CgroupPath,
    cgroup: &CgroupObserved,
    files: &CpusetObserved,
) -> Option<CpuSet> {
    let above = reach(observed, &path.parent()?);
    let first = first_cpus(desired, path, cgroup, CpusetFile::Cpus, &files.cpus);
    let base = if first.is_empty() { above.clone() } else { first };
    let some = |set: &CpuSet| !set.intersection(&above).is_disjoint(&observed.online);
    let rest = Some(base.difference(&desired.held())).filter(some);
    rest.or_else(|| Some(desired.pool.clone()).filter(some))
}
