//! The steps from what is observed to the targets.

use super::{
    Desired, Phase, Plan, Planned, Problem, Target, TargetKind, Unrecorded, held_beside,
    targets::{Targets, targets},
};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CgroupKind, CgroupObserved, CpusetObserved, Observed, Step, Value},
    partition::{PartitionKind, PartitionState},
};
use std::collections::BTreeSet;

/// Compares `desired` with `observed`, which must have been read with [`Desired::scope`].
#[must_use]
pub fn diff(desired: &Desired, observed: &Observed) -> Plan {
    let Targets { by_path, problems, stale_first } = targets(desired, observed);
    let mut d =
        Diff { desired, observed, plan: Plan { problems, ..Plan::default() }, unready: BTreeSet::new() };
    for (path, target) in &by_path {
        d.prepare(path, target);
    }
    for (path, target) in &by_path {
        if d.skip(path) {
            continue;
        }
        let files = d.files(path);
        match target.kind {
            TargetKind::Owner => d.owner(path, target, &files),
            TargetKind::Chain => d.chain(path, target, &files),
            TargetKind::Pool | TargetKind::Retired | TargetKind::Remove => d.shared(path, target, &files),
        }
    }
    d.enter();
    d.settle(&by_path, stale_first);
    let mut plan = d.plan;
    plan.steps.sort_by_key(rank);
    plan
}

/// Order inside a phase. Ancestors' `exclusive` shrinks after the leaves' and grows before; a partition that ends
/// goes first, because its CPUs come back with it; `cpuset.cpus` is written before `exclusive` when growing and
/// after it when shrinking.
fn rank(p: &Planned) -> (Phase, i64, u8, CgroupPath) {
    let depth = i64::from(p.step.path().level());
    let file = match &p.step {
        Step::Write { file: CpusetFile::Partition, .. } => 0,
        Step::Write { file: CpusetFile::Exclusive, .. } if p.phase == Phase::ShrinkExclusive => 1,
        Step::Write { file: CpusetFile::Cpus, .. } => 2,
        Step::Write { file: CpusetFile::Exclusive, .. } => 3,
        _ => 4,
    };
    let (depth, file) = match p.phase {
        Phase::ShrinkExclusive | Phase::Remove => (-depth, file),
        _ => (depth, file),
    };
    (p.phase, depth, file, p.step.path().clone())
}

struct Diff<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    plan: Plan,
    /// Owners' cgroups that cannot be worked on; the others go on.
    unready: BTreeSet<CgroupPath>,
}

impl Diff<'_> {
    fn push(&mut self, phase: Phase, step: Step) {
        self.plan.steps.push(Planned { phase, step });
    }

    fn observed(&self, path: &CgroupPath) -> Option<&CgroupObserved> {
        self.observed.cgroups.get(path)
    }

    /// The files as observed, or as they will be when the cgroup has just been made.
    fn files(&self, path: &CgroupPath) -> CpusetObserved {
        self.observed.cpuset(path).cloned().unwrap_or_else(|| CpusetObserved {
            exclusive: Some(CpuSet::new()),
            exclusive_effective: Some(CpuSet::new()),
            partition: Some(PartitionState::valid(PartitionKind::Member)),
            ..CpusetObserved::default()
        })
    }

    fn skip(&self, path: &CgroupPath) -> bool {
        self.unready.contains(path)
    }

    fn write(
        &mut self,
        phase: Phase,
        path: &CgroupPath,
        target: &Target,
        file: CpusetFile,
        old: String,
        new: Value,
    ) {
        if self.desired.frozen.contains(&(path.clone(), file)) {
            return;
        }
        if !target.ours
            && let Some(cgroup) = self.observed(path)
        {
            let first = self.desired.first.get(path).filter(|f| f.id == cgroup.id);
            let known = first.is_some_and(|f| f.files.contains_key(&file))
                || self.plan.unrecorded.iter().any(|u| u.path == *path && u.file == file);
            if !known {
                let id = cgroup.id;
                let value = match (file, old.split_once(' ')) {
                    // An invalid state cannot be written back; the kind can.
                    (CpusetFile::Partition, Some((kind, _))) => kind.to_owned(),
                    _ => old.clone(),
                };
                self.plan.unrecorded.push(Unrecorded { path: path.clone(), id, file, value });
            }
        }
        self.push(phase, Step::Write { path: path.clone(), file, old, new });
    }

    fn write_cpus(&mut self, phase: Phase, path: &CgroupPath, target: &Target, old: &CpuSet, new: CpuSet) {
        if *old != new {
            self.write(phase, path, target, CpusetFile::Cpus, old.to_string(), Value::Cpus(new));
        }
    }

    fn write_exclusive(
        &mut self,
        phase: Phase,
        path: &CgroupPath,
        target: &Target,
        old: &CpuSet,
        new: CpuSet,
    ) {
        if *old != new {
            self.write(phase, path, target, CpusetFile::Exclusive, old.to_string(), Value::Cpus(new));
        }
    }

    fn write_partition(
        &mut self,
        phase: Phase,
        path: &CgroupPath,
        target: &Target,
        old: &PartitionState,
        new: PartitionKind,
    ) {
        self.write(phase, path, target, CpusetFile::Partition, old.to_string(), Value::Partition(new));
    }

    /// mkdir and `+cpuset`; reports what cannot be prepared.
    fn prepare(&mut self, path: &CgroupPath, target: &Target) {
        if target.kind == TargetKind::Owner {
            self.prepare_owner(path);
        }
        let needed = target.kind == TargetKind::Chain || target.kind == TargetKind::Owner;
        if !needed || self.skip(path) {
            return;
        }
        // The slice outlives its owners; without any it needs nothing.
        if target.kind == TargetKind::Chain && !self.desired.owners.keys().any(|o| o.is_within(path)) {
            return;
        }
        match self.observed(path) {
            None if target.ours => self.push(Phase::Prepare, Step::Create(path.clone())),
            _ => {}
        }
        if let Some(parent) = path.parent() {
            let enabled = self.observed(&parent).is_some_and(|p| p.enables_cpuset);
            let step = Step::Enable(parent.clone());
            if !enabled && !self.plan.steps.iter().any(|s| s.step == step) {
                self.push(Phase::Prepare, step);
            }
        }
    }

    fn prepare_owner(&mut self, path: &CgroupPath) {
        let Some(owner) = self.desired.owners.get(path) else { return };
        let mut problems = Vec::new();
        match self.observed(path) {
            None if !owner.created => {
                problems.push(Problem::Vanished { owner: owner.owner.clone(), path: path.clone() });
            }
            Some(c) if c.kind == CgroupKind::DomainInvalid || c.kind == CgroupKind::Threaded => {
                let kind = if c.kind == CgroupKind::Threaded { "threaded" } else { "domain invalid" };
                problems.push(Problem::Kind { owner: owner.owner.clone(), path: path.clone(), kind });
            }
            _ => {}
        }
        for up in path.ancestors().iter().filter(|p| !p.is_root()) {
            if let Some(c) = self.observed(up)
                && c.has_processes
                && !c.enables_cpuset
            {
                problems.push(Problem::Populated { path: up.clone() });
            }
        }
        if owner.cpus.is_disjoint(&self.observed.online) {
            problems.push(Problem::Offline { owner: owner.owner.clone(), cpus: owner.cpus.clone() });
        }
        if !problems.is_empty() {
            self.unready.insert(path.clone());
            self.plan.problems.extend(problems);
        }
    }

    fn owner(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let Some(owner) = self.desired.owners.get(path) else { return };
        let others = self
            .desired
            .owners
            .iter()
            .filter(|(p, _)| *p != path)
            .fold(CpuSet::new(), |all, (_, o)| all.union(&o.cpus));
        let want = t.partition.unwrap_or(PartitionKind::Member);
        let now = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        let exclusive = files.exclusive.clone();
        let mut cpus_now = files.cpus.clone();
        let mut exclusive_now = exclusive.clone().unwrap_or_default();
        let mut state = now.clone();

        // Giving away. A partition that must end, is invalid, or would shrink to nothing becomes a member first.
        let keep = exclusive_now.intersection(&owner.cpus);
        let vanishes = want != PartitionKind::Member && keep.is_empty();
        let wrong = owner.mode == Mode::Partition && self.sets_wrong(path, &owner.cpus, files);
        let reset = now.kind != PartitionKind::Member
            && (want == PartitionKind::Member || now.invalid.is_some() || vanishes || wrong);
        if reset {
            self.write_partition(Phase::ShrinkExclusive, path, t, &now, PartitionKind::Member);
            state = PartitionState::valid(PartitionKind::Member);
        }
        if t.exclusive.is_some() && exclusive.is_some() && keep != exclusive_now {
            let keep =
                if want == PartitionKind::Member { t.exclusive.clone().unwrap_or_default() } else { keep };
            self.write_exclusive(Phase::ShrinkExclusive, path, t, &exclusive_now, keep.clone());
            exclusive_now = keep;
        }
        if let Some(target) = &t.cpus {
            let lost = cpus_now.difference(target);
            let keep = cpus_now.intersection(target);
            let next = if lost.is_empty() {
                cpus_now.clone()
            } else if !keep.is_empty() {
                keep
            } else if !lost.is_disjoint(&others) {
                // Everything goes to others before anything is taken: wait in the pool.
                self.desired.pool.clone()
            } else {
                cpus_now.clone()
            };
            self.write_cpus(Phase::ShrinkExclusive, path, t, &cpus_now, next.clone());
            cpus_now = next;
            self.write_cpus(Phase::GrowExclusive, path, t, &cpus_now, target.clone());
        }
        if exclusive.is_some()
            && let Some(target) = &t.exclusive
        {
            self.write_exclusive(Phase::GrowExclusive, path, t, &exclusive_now, target.clone());
        }
        if want != PartitionKind::Member && (state.kind != want || state.invalid.is_some()) {
            self.write_partition(Phase::SetPartition, path, t, &state, want);
        }
    }

    /// The state line can lie (after hotplug; a nested child of an invalid parent). Judged only when our own files
    /// are as they should be, so that a plan in progress is not mistaken for a defect.
    fn sets_wrong(&self, path: &CgroupPath, cpus: &CpuSet, files: &CpusetObserved) -> bool {
        if self.observed.copied || !files.is_partition() || files.exclusive.as_ref() != Some(cpus) {
            return false;
        }
        let mine = cpus.intersection(&self.observed.online);
        files.effective != mine || !overlapping(self.observed, path, &mine).is_empty()
    }

    fn chain(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        if let (Some(target), Some(now)) = (&t.exclusive, &files.exclusive) {
            let keep = now.intersection(target);
            self.write_exclusive(Phase::ShrinkExclusive, path, t, now, keep.clone());
            self.write_exclusive(Phase::GrowExclusive, path, t, &keep, target.clone());
        }
        self.pool_cpus(path, t, files);
    }

    fn shared(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let now = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        if let Some(want) = t.partition
            && (now.kind != want || now.invalid.is_some())
        {
            self.write_partition(Phase::ShrinkExclusive, path, t, &now, want);
        }
        if let (Some(target), Some(now)) = (&t.exclusive, &files.exclusive) {
            self.write_exclusive(Phase::ShrinkExclusive, path, t, now, target.clone());
        }
        if t.kind == TargetKind::Remove {
            self.push(Phase::Remove, Step::Remove(path.clone()));
        } else {
            self.pool_cpus(path, t, files);
        }
    }

    /// Grows early what may grow, and shrinks late what must shrink.
    fn pool_cpus(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let Some(target) = &t.cpus else { return };
        let now = &files.cpus;
        if target == now {
            return;
        }
        if target.is_empty() {
            return self.write_cpus(Phase::GrowPool, path, t, now, target.clone());
        }
        let held = held_beside(path, self.observed);
        let grown = if now.is_empty() { now.clone() } else { now.union(&target.difference(&held)) };
        self.write_cpus(Phase::GrowPool, path, t, now, grown.clone());
        // What a partition still holds comes with the next plan, when the partition has let go.
        let rest = target.difference(&held);
        if !grown.is_subset(target) || grown.is_empty() {
            let next = if rest.is_empty() { target.clone() } else { rest };
            self.write_cpus(Phase::ShrinkPool, path, t, &grown, next);
        }
    }

    fn enter(&mut self) {
        let desired = self.desired;
        for (path, pid) in &desired.entering {
            if self.skip(path) || !desired.owners.contains_key(path) {
                continue;
            }
            self.push(Phase::Enter, Step::Enter { path: path.clone(), pid: *pid });
        }
    }

    fn settle(&mut self, targets: &std::collections::BTreeMap<CgroupPath, Target>, stale: Vec<CgroupPath>) {
        self.plan.settled = stale;
        for (path, first) in &self.desired.first {
            let Some(files) =
                self.observed.cgroups.get(path).filter(|c| c.id == first.id).and_then(|c| c.cpuset.as_ref())
            else {
                continue;
            };
            let pending = self.plan.steps.iter().any(|s| s.step.path() == path);
            let needed = targets.get(path).is_some_and(|t| t.kind != TargetKind::Pool);
            let back = first.files.iter().all(|(file, text)| match file {
                CpusetFile::Cpus => text.parse::<CpuSet>().is_ok_and(|s| s == files.cpus),
                CpusetFile::Exclusive => text.parse::<CpuSet>().ok() == files.exclusive,
                CpusetFile::Partition => files.partition.as_ref().is_some_and(|p| p.to_string() == *text),
            });
            if back && !pending && !needed {
                self.plan.settled.push(path.clone());
            }
        }
    }
}

/// Cgroups, the root and the ancestors included, whose tasks may run on some of `cpus` though they belong to the
/// partition `path`; those below `path` are its own.
pub(crate) fn overlapping(
    observed: &Observed,
    path: &CgroupPath,
    cpus: &CpuSet,
) -> Vec<(CgroupPath, CpuSet)> {
    observed
        .cgroups
        .iter()
        .filter(|(p, _)| !p.is_within(path))
        .filter_map(|(p, c)| {
            let over = c.cpuset.as_ref()?.effective.intersection(cpus);
            (!over.is_empty()).then(|| (p.clone(), over))
        })
        .collect()
}
