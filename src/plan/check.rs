//! Simulates a plan and finds the first prefix that would break an invariant.
//!
//! Problem: a fault in the planner must never reach the kernel, because the kernel obeys.
//! Steps: the steps run on a copy of what was observed that knows only the values of the files, not what the kernel
//! makes of them; after each one the configured sets are compared. It is a second opinion, not a model of the
//! kernel: the fake kernel of the tests is that.
//! Invariants checked: I1 (configured exclusive sets of owners are disjoint, no sibling's own set reaches over a
//! partition), I2 and I4 (no owner's cgroup loses its last CPU), I3 (partitions never cover every online CPU).

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
    let before = overlaps(&model);
    for (index, Planned { step, .. }) in steps.iter().enumerate() {
        apply(&mut model, step);
        let broken = |invariant, what| Broken { index, step: step.clone(), invariant, what };
        if let Some(what) = owners_overlap(desired, &model) {
            return Err(broken("I1", what));
        }
        let known = |(p, s, c): &(CgroupPath, CgroupPath, CpuSet)| {
            before.iter().any(|(bp, bs, bc)| p == bp && s == bs && c.is_subset(bc))
        };
        if let Some((path, sibling, cpus)) = overlaps(&model).into_iter().find(|o| !known(o)) {
            return Err(broken("I1", format!("{sibling} would reach over partition {path} on CPUs {cpus}")));
        }
        if let Some(what) = last_cpu(desired, &model, step) {
            return Err(broken("I2", what));
        }
        let held = partitions(&model).fold(CpuSet::new(), |all, (_, s)| all.union(&claimed(s)));
        if !model.online.is_empty() && model.online.is_subset(&held) {
            return Err(broken("I3", format!("partitions would hold every online CPU ({held})")));
        }
    }
    Ok(())
}

/// Applies a step to the values of the files.
pub fn apply(model: &mut Observed, step: &Step) {
    match step {
        Step::Create(path) => {
            let enabled = path.parent().and_then(|p| model.cgroups.get(&p)).is_some_and(|p| p.enables_cpuset);
            model.cgroups.insert(
                path.clone(),
                CgroupObserved {
                    id: CgroupId(0),
                    cpuset: enabled.then(fresh),
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
            for (p, c) in &mut model.cgroups {
                if p.parent().as_ref() == Some(path) && c.cpuset.is_none() {
                    c.cpuset = Some(fresh());
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

fn fresh() -> CpusetObserved {
    CpusetObserved {
        exclusive: Some(CpuSet::new()),
        exclusive_effective: Some(CpuSet::new()),
        partition: Some(PartitionState::valid(PartitionKind::Member)),
        ..CpusetObserved::default()
    }
}

fn partitions(model: &Observed) -> impl Iterator<Item = (&CgroupPath, &CpusetObserved)> {
    model.cgroups.iter().filter_map(|(p, c)| Some((p, c.cpuset.as_ref().filter(|s| s.is_partition())?)))
}

/// What a partition asks for: `exclusive`, else `cpus`.
fn claimed(files: &CpusetObserved) -> CpuSet {
    match &files.exclusive {
        Some(e) if !e.is_empty() => e.clone(),
        _ => files.cpus.clone(),
    }
}

fn owners_overlap(desired: &Desired, model: &Observed) -> Option<String> {
    let mut seen: Vec<(&CgroupPath, CpuSet)> = Vec::new();
    for (path, owner) in &desired.owners {
        let Some(files) = model.cpuset(path) else { continue };
        let claim = if files.is_partition() {
            claimed(files)
        } else if owner.mode == Mode::Member && files.cpus.is_disjoint(&desired.pool) {
            files.cpus.clone()
        } else {
            continue; // not exclusive yet
        };
        if let Some((other, cpus)) = seen.iter().find(|(_, c)| !c.is_disjoint(&claim)) {
            return Some(format!("{other} ({cpus}) and {path} ({claim}) overlap"));
        }
        seen.push((path, claim));
    }
    None
}

/// Siblings whose own `cpuset.cpus` reaches over a partition.
fn overlaps(model: &Observed) -> Vec<(CgroupPath, CgroupPath, CpuSet)> {
    let mut found = Vec::new();
    for (path, files) in partitions(model) {
        let Some(parent) = path.parent() else { continue };
        let claim = claimed(files);
        for (sibling, c) in model.children(&parent) {
            let Some(s) = c.cpuset.as_ref().filter(|_| sibling != path) else { continue };
            let over = s.cpus.intersection(&claim);
            // Between two partitions the explicit exclusive sets decide, and `owners_overlap` looks at those.
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
    match file {
        CpusetFile::Exclusive if new.is_empty() && files.is_partition() => {
            Some(format!("partition {path} would be left without CPUs"))
        }
        CpusetFile::Cpus if new.is_empty() && owner => Some(format!("owner {path} would inherit every CPU")),
        CpusetFile::Cpus if !new.is_empty() && new.is_disjoint(&model.online) => {
            Some(format!("{path} would have no online CPU of its own ({new})"))
        }
        _ => None,
    }
}
