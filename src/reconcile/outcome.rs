//! What comes of steps that were applied, and of partitions that were asked for.
//!
//! Problem: the kernel refuses some writes at once and takes others without doing what they ask.
//! Steps: a step that was done is known as our own, whatever it changes below; from one that failed is learnt what can
//! be; one that fails twice, and a partition that was written twice and is not there, are given up: an owner that left
//! the choice to truepin falls back to member mode, an admission that is pending is refused, the rest is left alone for
//! a minute and reported.
//! Invariant: nothing is tried a third time within one convergence.

use super::{AdmitError, FindingKind, Pending, step::Turn};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    explain::{Explanation, explain},
    observed::{KernelError, Step, Value},
    owner::Owner,
    partition::PartitionKind,
    plan::{self, Plan, Planned},
    request::Isolation,
};
use std::mem;

const ESRCH: i32 = 3;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

impl Turn<'_> {
    /// A partition that was written twice in this convergence and is to be written again.
    pub(super) fn refused_partition(&self, plan: &Plan) -> Option<(CgroupPath, String)> {
        plan.steps.iter().find_map(|p| match &p.step {
            Step::Write { path, file: CpusetFile::Partition, new: Value::Partition(kind), .. }
                if *kind != PartitionKind::Member
                    && self.s.progress.written.get(path).is_some_and(|n| *n >= 2) =>
            {
                let state = self.s.observed.cpuset(path).and_then(|c| c.partition.as_ref());
                Some((path.clone(), state.map(ToString::to_string).unwrap_or_default()))
            }
            _ => None,
        })
    }

    pub(super) fn partition_refused(&mut self, path: &CgroupPath, state: String) {
        if *path == self.s.settings.slice {
            return self.slice_refused(&state);
        }
        let Some(owner) = self.s.assignments.owner_of(path).map(|(o, _)| o.clone()) else {
            // Somebody else's, to be put back as it was: the rest goes on without it.
            self.report(FindingKind::Stuck(format!(
                "{path} was a partition and cannot be one again, it reads {state:?}"
            )));
            self.hold_off(path, CpusetFile::Partition);
            return self.observe();
        };
        let cpus = self.s.assignments.cpus_of(&owner).cloned().unwrap_or_default();
        let why = explain(&self.s.observed, path, &cpus);
        if self.fall_back(&owner, &state, why.clone()) {
            return self.observe();
        }
        if self.admitting().as_ref() == Some(&owner) {
            let (path, why) = (path.clone(), why.map(Box::new));
            return self.finish(Err(AdmitError::PartitionRefused { path, state, why }));
        }
        self.hold_off(path, CpusetFile::Partition);
        self.report(FindingKind::PartitionRefused { owner, reason: state, why });
        self.observe();
    }

    /// The slice cannot be the partition that those below it need (see `plan::local`).
    fn slice_refused(&mut self, state: &str) {
        let path = self.s.settings.slice.clone();
        let below = self.s.assignments.owners.iter();
        let below = below.filter(|(_, a)| a.mode == Mode::Partition && a.cgroup.is_within(&path));
        let below: Vec<Owner> = below.map(|(o, _)| o.clone()).collect();
        let cpus = self.s.observed.cpuset(&path).map(|f| f.cpus.clone()).unwrap_or_default();
        let why = explain(&self.s.observed, &path, &cpus);
        let fell = below.iter().filter(|o| self.fall_back(o, state, why.clone())).count();
        if fell > 0 {
            self.s.progress.written.remove(&path);
            return self.observe();
        }
        if self.admitting().is_some_and(|o| below.contains(&o)) {
            let (state, why) = (state.to_owned(), why.map(Box::new));
            return self.finish(Err(AdmitError::PartitionRefused { path, state, why }));
        }
        self.hold_off(&path, CpusetFile::Partition);
        for owner in below {
            let reason = format!("{path} above it reads {state:?}");
            self.report(FindingKind::PartitionRefused { owner, reason, why: why.clone() });
        }
        self.observe();
    }

    fn hold_off(&mut self, path: &CgroupPath, file: CpusetFile) {
        self.s.mends.done(path, file);
        self.s.held_off.insert((path.clone(), file), self.now.mono_ns);
    }

    pub(super) fn applied(&mut self, results: Vec<(Planned, Result<(), KernelError>)>) {
        for (planned, result) in results {
            match result {
                Ok(()) => self.step_done(planned.step),
                Err(error) => {
                    if let Some(fatal) = self.step_failed(&planned.step, error) {
                        return self.finish(Err(AdmitError::Kernel(fatal)));
                    }
                }
            }
        }
        self.observe();
    }

    pub(super) fn step_done(&mut self, step: Step) {
        match step {
            Step::Write { path, file: file @ CpusetFile::Partition, new, .. } => {
                self.s.progress.known.insert((path.clone(), file), None);
                if new == Value::Partition(PartitionKind::Member) {
                    self.s.mends.done(&path, file);
                } else if let Some(stuck) = self.s.progress.stuck.get_mut(&path).filter(|s| **s) {
                    *stuck = false; // it was to fail
                } else {
                    *self.s.progress.written.entry(path).or_default() += 1;
                }
            }
            Step::Write { path, file, new, .. } => {
                self.s.mends.done(&path, file);
                // What becomes of partitions with this list, and below it, is our doing.
                let below = self.s.observed.cgroups.keys().filter(|p| p.is_within(&path));
                let states = below.map(|p| ((p.clone(), CpusetFile::Partition), None));
                self.s.progress.known.extend(states);
                self.s.progress.known.insert((path, file), Some(new.to_string()));
            }
            Step::Enter { path, pid } => {
                self.s.entering.retain(|e| *e != (path.clone(), pid));
                if let Some(owner) = self.s.assignments.owner_of(&path).map(|(o, _)| o.clone())
                    && let Some(runtime) = self.s.runtime.get_mut(&owner)
                {
                    runtime.entered = true;
                }
            }
            _ => {}
        }
    }

    /// Learns from a refusal; returns the error when it ends the pending admission.
    pub(super) fn step_failed(&mut self, step: &Step, error: KernelError) -> Option<KernelError> {
        match (step, error.errno) {
            (Step::Write { new, .. }, Some(ENOSPC))
                if is_empty_list(new) && !mem::replace(&mut self.s.facts.empty_refused, true) =>
            {
                return None;
            }
            (Step::Write { path, file: CpusetFile::Exclusive, new: Value::Cpus(list), .. }, Some(EINVAL))
                if self.reaches_over_the_pool(path, list) && self.s.progress.narrow.insert(path.clone()) =>
            {
                return None;
            }
            (Step::Write { path, new: Value::Cpus(_), .. }, Some(EBUSY))
                if !self.s.progress.stuck.contains_key(path)
                    && self.s.assignments.owner_of(path).is_some()
                    && plan::may_keep_flag(&self.s.observed, path) =>
            {
                self.s.progress.stuck.insert(path.clone(), true);
                return None;
            }
            (Step::Enter { path, pid }, _) => {
                self.s.entering.retain(|e| *e != (path.clone(), *pid));
                if error.errno == Some(ESRCH) || matches!(self.s.pending, Some(Pending::Admission { .. })) {
                    return Some(error);
                }
            }
            _ => {}
        }
        // What has vanished since it was read fails once, and is not planned again.
        let count = self.s.progress.failed.entry(step.shell("")).or_default();
        *count += 1;
        if *count < 2 {
            return None;
        }
        self.report(FindingKind::StepFailed(error.clone()));
        let path = step.path();
        let admitting = self
            .admitting()
            .filter(|o| self.s.assignments.owners.get(o).is_some_and(|a| a.cgroup.is_within(path)));
        // Without explicit lists `cpuset.cpus` is what a partition consists of.
        let listed = |f: &CpusetFile| *f == CpusetFile::Cpus && self.s.facts.local_partitions();
        let of_partition =
            |f: &CpusetFile| matches!(f, CpusetFile::Exclusive | CpusetFile::Partition) || listed(f);
        if let Step::Write { file, .. } = step
            && of_partition(file)
        {
            // Without the admission the lists above were as they should be, so it alone is concerned.
            let below = self.s.assignments.owners.iter().filter(|(_, a)| a.cgroup.is_within(path));
            let below: Vec<Owner> = match &admitting {
                Some(owner) => vec![owner.clone()],
                None => below.map(|(o, _)| o.clone()).collect(),
            };
            if below.into_iter().filter(|o| self.fall_back(o, &error.to_string(), None)).count() > 0 {
                return None;
            }
        }
        let now = self.now.mono_ns;
        match step {
            Step::Write { file, .. } => self.hold_off(path, *file),
            Step::Remove(_) => drop(self.s.blocked.insert(path.clone(), now)),
            // Whoever lives below has to wait; the others go on.
            Step::Create(_) | Step::Enable(_) | Step::Enter { .. } => {
                let below = self.s.assignments.owners.values().filter(|a| a.cgroup.is_within(path));
                self.s.blocked.extend(below.map(|a| (a.cgroup.clone(), now)));
            }
        }
        admitting.map(|_| error)
    }

    fn reaches_over_the_pool(&self, path: &CgroupPath, list: &CpuSet) -> bool {
        self.s.assignments.owner_of(path).is_some_and(|(_, a)| !list.is_subset(&a.cpus))
    }

    /// From partition to member mode, where that was left to truepin.
    pub(super) fn fall_back(&mut self, owner: &Owner, reason: &str, why: Option<Explanation>) -> bool {
        let generation = self.next_generation();
        let Some(a) = self.s.assignments.owners.get_mut(owner) else { return false };
        if a.isolation != Isolation::Auto || a.mode != Mode::Partition {
            return false;
        }
        (a.mode, a.generation) = (Mode::Member, generation);
        self.s.progress.written.remove(&a.cgroup);
        let at = self.now;
        if let Some(r) = self.s.runtime.get_mut(owner) {
            r.end(
                at,
                format!(
                    "partition mode ended within the interval ({reason}): what ran until then is not judged"
                ),
            );
        }
        self.report(FindingKind::FellBack { owner: owner.clone(), reason: reason.into(), why });
        true
    }
}

fn is_empty_list(value: &Value) -> bool {
    match value {
        Value::Cpus(set) => set.is_empty(),
        Value::Mems(set) => set.is_empty(),
        Value::Partition(_) => false,
    }
}
