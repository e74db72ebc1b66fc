//! Simulates a plan and finds the first prefix that would break an invariant.
//!
//! Problem: a fault in the planner must never reach the kernel, because the kernel obeys.
//! Steps: the steps run on a copy of what was observed that knows only the values of the files, not what the kernel
//! makes of them; after each one the configured sets are compared. It is a second opinion, not a model of the
//! kernel: the fake kernel of the tests is that.
//! Invariants checked: I1 (configured exclusive sets of owners are disjoint, no sibling's own set reaches over a
//! partition, and a local partition stands below one), I2 and I4 (no owner's cgroup loses its last CPU, nor what it has
//! of those above), I3 (partitions never cover every online CPU). What others had broken before the first step is not
//! held against the plan.

use super::{Desired, Planned};
use crate::{
    assignments::Mode,
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CgroupKind, CgroupObserved, CpusetObserved, Observed, Step, Value},
    partition::{PartitionKind, PartitionState},
};

/// The step after which an invariant would be broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("step {index} of the plan ({step:?}) would break {invariant}: {what}")]
pub struct Broken {
    /// Position in the plan.
    pub index: usize,
    /// The step.
    pub step: Step,
    /// `I1` … `I4`
    pub invariant: &'static str,
    /// In words.
    pub what: String,
}

/// Runs `steps` on a copy of `observed`.
pub fn check(desired: &Desired, observed: &Observed, steps: &[Planned]) -> Result<(), Broken> {
    let mut model = observed.clone();
    // What is broken already was broken by others; the plan is there to mend it, and may take more than one step.
    let before = (
        shared(desired, &model),
        overlaps(desired, &model),
        starved(desired, &model),
        unsupported(desired, &model),
        stranded(desired, &model),
    );
    for (index, Planned { step, .. }) in steps.iter().enumerate() {
        apply(&mut model, step);
        let broken = |invariant, what| Broken { index, step: step.clone(), invariant, what };
        if let Some((a, b, cpus)) = new(shared(desired, &model), &before.0) {
            return Err(broken("I1", format!("{a} and {b} would both have CPUs {cpus}")));
        }
        if let Some((path, sibling, cpus)) = new(overlaps(desired, &model), &before.1) {
            return Err(broken("I1", format!("{sibling} would reach over partition {path} on CPUs {cpus}")));
        }
        if let Some(path) = unsupported(desired, &model).into_iter().find(|p| !before.3.contains(p)) {
            return Err(broken("I1", format!("{path} would be a partition below a cgroup that is none")));
        }
        if let Some(path) = stranded(desired, &model).into_iter().find(|p| !before.4.contains(p)) {
            return Err(broken("I4", format!("none of the CPUs of {path} would be left above it")));
        }
        if let Some(what) = last_cpu(desired, &model, step) {
            return Err(broken("I2", what));
        }
        if starved(desired, &model) && !before.2 {
            return Err(broken("I3", "partitions would hold every online CPU".into()));
        }
    }
    Ok(())
}

/// Two cgroups and CPUs that both have.
type Both = (CgroupPath, CgroupPath, CpuSet);

/// One of `found` that is not (part of) one `before`.
fn new(found: Vec<Both>, before: &[Both]) -> Option<Both> {
    let known = |(a, b, c): &Both| before.iter().any(|(x, y, z)| a == x && b == y && c.is_subset(z));
    found.into_iter().find(|f| !known(f))
}

/// Whether owners' partitions hold every CPU that is online.
fn starved(desired: &Desired, model: &Observed) -> bool {
    let held = partitions(model).filter(|(p, _)| is_ours(desired, p));
    let held = held.fold(CpuSet::new(), |all, (p, s)| all.union(&claimed(model, p, s)));
    !model.online.is_empty() && model.online.is_subset(&held)
}

/// An owner's cgroup, or the slice where that is a partition itself.
fn is_ours(desired: &Desired, path: &CgroupPath) -> bool {
    desired.owners.contains_key(path) || desired.local && *path == desired.slice
}

/// Owners that are partitions below a cgroup that is none, where partitions are local.
fn unsupported(desired: &Desired, model: &Observed) -> Vec<CgroupPath> {
    let owners = partitions(model).filter(|(p, _)| desired.local && desired.owners.contains_key(*p));
    let none = |up: CgroupPath| !up.is_root() && model.cpuset(&up).is_none_or(|f| !f.is_partition());
    owners.filter(|(p, _)| p.parent().is_some_and(none)).map(|(p, _)| p.clone()).collect()
}

/// Populated owners that share no CPU with the list of the slice above them, where that is a partition.
fn stranded(desired: &Desired, model: &Observed) -> Vec<CgroupPath> {
    let Some(slice) = model.cpuset(&desired.slice).filter(|f| desired.local && f.is_partition()) else {
        return Vec::new();
    };
    let inside =
        model.children(&desired.slice).filter(|(p, c)| c.populated && desired.owners.contains_key(*p));
    let lost = inside.filter(|(_, c)| {
        c.cpuset.as_ref().is_some_and(|f| !f.cpus.is_empty() && f.cpus.is_disjoint(&slice.cpus))
    });
    lost.map(|(p, _)| p.clone()).collect()
}

/// Applies a step to the values of the files.
pub fn apply(model: &mut Observed, step: &Step) {
    match step {
        Step::Create(path) => {
            let enabled = path.parent().and_then(|p| model.cgroups.get(&p)).is_some_and(|p| p.enables_cpuset);
            let fresh = fresh(model);
            model.cgroups.insert(
                path.clone(),
                CgroupObserved {
                    id: CgroupId(0),
                    cpuset: enabled.then_some(fresh),
                    enables_cpuset: false,
                    populated: false,
                    has_processes: false,
                    kind: CgroupKind::Domain,
                },
            );
        }
        Step::Enable(path) => {
            if let Some(c) = model.cgroups.get_mut(path) {
                c.enables_cpuset = true;
            }
            let fresh = fresh(model);
            for (p, c) in &mut model.cgroups {
                if p.parent().as_ref() == Some(path) && c.cpuset.is_none() {
                    c.cpuset = Some(fresh.clone());
                }
            }
        }
        Step::Write { path, file, new, .. } => {
            if let Some(s) = model.cgroups.get_mut(path).and_then(|c| c.cpuset.as_mut()) {
                match (file, new) {
                    (CpusetFile::Cpus, Value::Cpus(v)) => s.cpus = v.clone(),
                    (CpusetFile::Exclusive, Value::Cpus(v)) => s.exclusive = Some(v.clone()),
                    (CpusetFile::Partition, Value::Partition(k)) => {
                        s.partition = Some(PartitionState::valid(*k));
                    }
                    (CpusetFile::Mems, Value::Mems(v)) => s.mems = v.clone(),
                    // A list in the partition file or the reverse is never planned.
                    _ => {}
                }
            }
        }
        Step::Enter { path, .. } => {
            if let Some(c) = model.cgroups.get_mut(path) {
                (c.populated, c.has_processes) = (true, true);
            }
        }
        Step::Remove(path) => {
            model.cgroups.remove(path);
        }
    }
}

fn fresh(model: &Observed) -> CpusetObserved {
    let known = model.cgroups.iter().filter(|(p, _)| !p.is_root()).find_map(|(_, c)| c.cpuset.as_ref());
    let list = known.is_none_or(|f| f.exclusive.is_some()).then(CpuSet::new);
    CpusetObserved {
        exclusive: list.clone(),
        exclusive_effective: list,
        partition: Some(PartitionState::valid(PartitionKind::Member)),
        ..CpusetObserved::default()
    }
}

fn partitions(model: &Observed) -> impl Iterator<Item = (&CgroupPath, &CpusetObserved)> {
    model.cgroups.iter().filter_map(|(p, c)| Some((p, c.cpuset.as_ref().filter(|s| s.is_partition())?)))
}

/// What a partition asks for and can have: of `exclusive` what the members above it list too, else `cpus`
/// (`compute_effective_exclusive_cpumask`, 6.12).
pub(crate) fn claimed(model: &Observed, path: &CgroupPath, files: &CpusetObserved) -> CpuSet {
    let Some(exclusive) = files.exclusive.as_ref().filter(|e| !e.is_empty()) else {
        return files.cpus.clone();
    };
    let above = path.ancestors().into_iter().filter(|up| !up.is_root());
    let members = above.filter_map(|up| model.cpuset(&up).filter(|f| !f.is_partition())?.exclusive.clone());
    members.fold(exclusive.clone(), |all, list| all.intersection(&list))
}

/// Owners that have CPUs in common.
fn shared(desired: &Desired, model: &Observed) -> Vec<Both> {
    let mut seen: Vec<(&CgroupPath, CpuSet)> = Vec::new();
    let mut found = Vec::new();
    for (path, owner) in &desired.owners {
        let Some(files) = model.cpuset(path) else { continue };
        let claim = if files.is_partition() {
            claimed(model, path, files)
        } else if owner.mode == Mode::Member && files.cpus.is_disjoint(&desired.pool) {
            // What it is lent while it has none may be lent to others too.
            desired.leftovers.get(path).map_or_else(|| files.cpus.clone(), |lent| files.cpus.difference(lent))
        } else {
            continue; // not exclusive yet
        };
        for (other, theirs) in &seen {
            let both = theirs.intersection(&claim);
            if !both.is_empty() {
                found.push(((*other).clone(), path.clone(), both));
            }
        }
        seen.push((path, claim));
    }
    found
}

/// Siblings whose own `cpuset.cpus` reaches over an owner's partition. One that is in a fight is left as it is, and the kernel
/// says what comes of it.
fn overlaps(desired: &Desired, model: &Observed) -> Vec<Both> {
    let mut found = Vec::new();
    for (path, files) in partitions(model).filter(|(p, _)| is_ours(desired, p)) {
        let Some(parent) = path.parent() else { continue };
        let claim = claimed(model, path, files);
        for (sibling, c) in model.children(&parent) {
            let Some(s) = c.cpuset.as_ref().filter(|_| sibling != path) else { continue };
            if desired.frozen.contains(&(sibling.clone(), CpusetFile::Cpus)) {
                continue;
            }
            let over = s.cpus.intersection(&claim);
            // Between two partitions the explicit exclusive sets decide, and `shared` looks at those.
            if !over.is_empty() && !s.is_partition() {
                found.push((path.clone(), sibling.clone(), over));
            }
        }
    }
    found
}

fn last_cpu(desired: &Desired, model: &Observed, step: &Step) -> Option<String> {
    let Step::Write { path, file, new: Value::Cpus(new), .. } = step else { return None };
    let files = model.cpuset(path)?;
    let owner = desired.owners.contains_key(path);
    let member = desired.owners.get(path).is_some_and(|o| o.mode == Mode::Member);
    match file {
        CpusetFile::Exclusive if new.is_empty() && files.is_partition() => {
            Some(format!("partition {path} would be left without CPUs"))
        }
        CpusetFile::Cpus if new.is_empty() && files.is_partition() && files.exclusive.is_none() => {
            Some(format!("partition {path} would be left without CPUs"))
        }
        CpusetFile::Cpus if new.is_empty() && member => Some(format!("owner {path} would inherit every CPU")),
        // Anybody else may have listed CPUs that are offline now; the kernel gives them what their parent has.
        CpusetFile::Cpus if owner && !new.is_empty() && new.is_disjoint(&model.online) => {
            Some(format!("owner {path} would have no online CPU of its own ({new})"))
        }
        _ => None,
    }
}
