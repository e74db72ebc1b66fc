//! The observer: I1 to I4 as they can be seen from outside, knowing nothing of how plans are made.
//!
//! I1 no CPU is in two owners' exclusive sets; I2 no tasks with an empty effective set; I3 the shared pool has
//! CPUs, the reserved ones among them; I4 no task without an online CPU in its mask.
//! Beside them [`leaks`], which is about the kernel's word rather than the plan: a partition that reads as valid
//! and whose CPUs others may use all the same.

use super::{FakeKernel, Ix, ROOT};
use std::collections::BTreeMap;
use truepin::{CgroupPath, CpuSet};

/// How an owner's CPUs are kept from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforced {
    /// By a partition: its set counts as long as the kernel honours the partition.
    Partition,
    /// By everybody's `cpuset.cpus`: its set counts once it has asked for one.
    Member,
}

/// What is left to everybody else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pool {
    /// Cgroups of the shared pool, beside the root itself.
    pub cgroups: Vec<CgroupPath>,
    /// CPUs that no owner gets.
    pub reserved: CpuSet,
    /// The pool's cgroups keep off the reserved CPUs (`strict-reserved`) instead of keeping them.
    pub strict: bool,
}

/// What a partition holds, of it and of those below, CPUs that are away included.
fn held(kernel: &FakeKernel, i: Ix) -> CpuSet {
    if kernel.behaviour.is_local_only() {
        let from = kernel.given(kernel.parent(i));
        return kernel.cs(i).cpus.intersection(from);
    }
    kernel.cs(i).granted.clone()
}

/// What an owner has for itself at this moment.
fn exclusive(kernel: &FakeKernel, i: Ix, how: Enforced) -> CpuSet {
    let cs = kernel.cs(i);
    match how {
        Enforced::Partition if cs.state.is_valid() => cs.effective.union(&held(kernel, i)),
        Enforced::Member if !cs.cpus.is_empty() => cs.effective.intersection(&cs.cpus),
        Enforced::Partition | Enforced::Member => CpuSet::new(),
    }
}

fn holders<'a>(
    kernel: &'a FakeKernel,
    owners: &'a [(CgroupPath, Enforced)],
) -> impl Iterator<Item = (&'a CgroupPath, Ix, CpuSet)> {
    owners.iter().filter_map(|(path, how)| {
        let i = kernel.find(path).ok().filter(|i| kernel.groups[*i].has_cpuset)?;
        Some((path, i, exclusive(kernel, i, *how)))
    })
}

/// Every breach of I1 to I4, in words; none when all hold. Owners whose cgroup does not exist hold nothing.
#[must_use]
pub fn invariants(kernel: &FakeKernel, owners: &[(CgroupPath, Enforced)], pool: &Pool) -> Vec<String> {
    let mut broken = Vec::new();
    let held: Vec<_> = holders(kernel, owners).collect();
    for (n, (path, _, set)) in held.iter().enumerate() {
        for (other, _, theirs) in &held[..n] {
            let both = set.intersection(theirs);
            if !both.is_empty() {
                broken.push(format!("I1: {path} and {other} both have {both}"));
            }
        }
        let taken = set.intersection(&pool.reserved);
        if !taken.is_empty() {
            broken.push(format!("I3: {path} has the reserved {taken}"));
        }
    }
    let reserved = pool.reserved.intersection(&kernel.active);
    let shared = pool.cgroups.iter().filter_map(|p| kernel.find(p).ok());
    for i in shared.chain([ROOT]) {
        let (path, set) = (&kernel.groups[i].path, &kernel.cs(kernel.cpuset_of(i)).effective);
        if set.is_empty() {
            broken.push(format!("I3: the pool {path} is empty"));
        } else if pool.strict && i != ROOT {
            let kept = set.intersection(&reserved);
            if !kept.is_empty() {
                broken.push(format!("I3: the pool {path} has the strictly reserved {kept}"));
            }
        } else if !reserved.is_subset(set) {
            broken.push(format!("I3: the pool {path} has {set} without the reserved {reserved}"));
        }
    }
    for (thread, task) in &kernel.tasks {
        let (path, i) = (&kernel.groups[task.group].path, kernel.cpuset_of(task.group));
        if kernel.cs(i).effective.is_empty() {
            broken.push(format!("I2: {path} has task {thread} and no effective CPU"));
        }
        if task.mask.is_disjoint(&kernel.active) {
            broken.push(format!("I4: task {thread} in {path} is allowed on {} alone", task.mask));
        }
    }
    broken
}

/// CPUs of owners' valid partitions that a cgroup outside may use as well, or a task outside whose mask has them.
#[must_use]
pub fn leaks(kernel: &FakeKernel, owners: &[(CgroupPath, Enforced)]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, i, set) in holders(kernel, owners).filter(|(_, i, _)| kernel.cs(*i).state.is_valid()) {
        let set = set.intersection(&kernel.active);
        if kernel.cs(i).effective != held(kernel, i).intersection(&kernel.active)
            && kernel.cs(i).children_served == 0
            && kernel.given(i).is_empty()
        {
            found.push(format!("{path} may use {} of its {set}", kernel.cs(i).effective));
        }
        for (other, j) in kernel.paths.iter().filter(|(p, _)| !p.is_within(path)) {
            let both = kernel.cs(*j).effective.intersection(&set);
            if kernel.groups[*j].has_cpuset && !both.is_empty() {
                found.push(format!("{other} may use {both} of {path}"));
            }
        }
        for (thread, task) in kernel.tasks.iter().filter(|(_, t)| !t.traits.bound) {
            let home = &kernel.groups[task.group].path;
            let both = task.mask.intersection(&set);
            if !home.is_within(path) && !both.is_empty() {
                found.push(format!("task {thread} in {home} is allowed on {both} of {path}"));
            }
        }
    }
    found
}

/// Tasks whose mask has CPUs beyond the cpuset that they are in: stale masks, which no cgroup file shows.
#[must_use]
pub fn stale_masks(kernel: &FakeKernel) -> BTreeMap<u32, CpuSet> {
    let beyond = |(thread, task): (&u32, &super::Task)| {
        let i = kernel.cpuset_of(task.group);
        let beyond = task.mask.difference(&kernel.cs(i).effective);
        (i != ROOT && !task.traits.bound && !beyond.is_empty()).then_some((*thread, beyond))
    };
    kernel.tasks.iter().filter_map(beyond).collect()
}

/// The mask of every task.
pub type Masks = BTreeMap<u32, CpuSet>;

/// The masks as they are now.
#[must_use]
pub fn masks(kernel: &FakeKernel) -> Masks {
    kernel.tasks.iter().map(|(thread, task)| (*thread, task.mask.clone())).collect()
}

/// Tasks present both times whose mask is another, with the masks before and after.
#[must_use]
pub fn mask_changes(before: &Masks, after: &Masks) -> BTreeMap<u32, (CpuSet, CpuSet)> {
    let changed = |(thread, old): (&u32, &CpuSet)| {
        let new = after.get(thread).filter(|new| *new != old)?;
        Some((*thread, (old.clone(), new.clone())))
    };
    before.iter().filter_map(changed).collect()
}
