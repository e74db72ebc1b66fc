//! From a reading to the steps of one phase.

use super::{
    AdmitError, Answer, Effect, FindingKind, ForeignWrite, Pending, Runtime, Work,
    step::{Turn, keep},
};
use crate::{
    assignments::{FirstValue, Mode},
    cgroup::{CgroupPath, CpusetFile},
    ledger::Departure,
    observed::{KernelError, Observed, Step, Value},
    owner::Owner,
    partition::PartitionKind,
    plan::{self, Plan, Planned, Problem},
    request::Isolation,
};
use std::collections::{BTreeMap, BTreeSet};

/// More phases than any plan has, three times over: beyond that somebody else is writing too.
const MAX_ROUNDS: u32 = 32;

const ENOENT: i32 = 2;
const ESRCH: i32 = 3;
const ENODEV: i32 = 19;
const ENOSPC: i32 = 28;

impl Turn<'_> {
    pub(super) fn disturbed(&mut self, writes: Vec<ForeignWrite>, departures: Vec<Departure>) {
        for w in writes {
            if let Some(file) = w.file {
                self.s.fights.touched(&(w.path.clone(), file), self.now.mono_ns);
            }
            if let Some(writer) = w.writer {
                self.s.writers.insert((w.path, w.file), writer);
            }
        }
        for d in departures {
            let owner = self.s.runtime.iter_mut().find(|(_, r)| r.id == d.owner);
            let now = self.now.mono_ns;
            if let Some((owner, runtime)) = owner
                && runtime.departed_ns.is_none_or(|at| now.saturating_sub(at) > 1_000_000_000)
            {
                runtime.departed_ns = Some(now);
                let example = format!("{} (tid {}) from CPU {} to CPU {}", d.comm, d.pid, d.from, d.to);
                let kind = FindingKind::Departed { owner: owner.clone(), example };
                self.report(kind);
            }
            keep(&mut self.s.departures, d);
        }
        self.look();
    }

    pub(super) fn persisted(&mut self, result: Result<(), String>) {
        let Err(error) = result else {
            self.s.work = Work::Converging;
            return self.observe();
        };
        self.s.work = Work::Idle;
        match self.s.pending.take() {
            Some(Pending::Admission { ticket, owner }) => {
                if let Some(a) = self.s.assignments.release(&owner) {
                    self.s.entering.retain(|(path, _)| *path != a.cgroup);
                }
                self.s.runtime.remove(&owner);
                self.out.push(Effect::Reply(ticket, Answer::Refused(AdmitError::NotDurable(error.clone()))));
            }
            Some(Pending::Releasing { ticket, removed, .. }) => {
                for (owner, assignment, runtime) in removed {
                    self.s.assignments.owners.insert(owner.clone(), assignment);
                    self.s.runtime.insert(owner, runtime);
                }
                self.s.teardown = false;
                if let Some(ticket) = ticket {
                    let text = format!("the release could not be made durable: {error}");
                    self.out.push(Effect::Reply(ticket, Answer::Failed(text)));
                }
            }
            Some(Pending::Concluding { ticket: Some(ticket), .. } | Pending::Inspection { ticket }) => {
                self.out.push(Effect::Reply(ticket, Answer::Failed(error.clone())));
            }
            Some(Pending::Concluding { ticket: None, .. }) | None => {}
        }
        self.report(FindingKind::NotDurable(error));
    }

    pub(super) fn observed(&mut self, observed: Observed) {
        self.s.online = observed.online.clone();
        self.s.observed = observed;
        let gone = self.recognise();
        if self.s.settings.audit {
            return self.settle();
        }
        if !gone.is_empty() && self.s.pending.is_none() {
            return self.gone(gone);
        }
        let was_settled = self.s.settled.take();
        if let Some(before) = &was_settled {
            self.sets(false);
            self.drift(before);
        }
        let desired = self.s.desired();
        let plan = plan::diff(&desired, &self.s.observed);
        if let Some(problem) = self.problems(&plan) {
            return self.finish(Err(AdmitError::Problem(problem)));
        }
        for path in &plan.settled {
            self.s.progress.dirty |= self.s.first.remove(path).is_some();
        }
        if !plan.unrecorded.is_empty() {
            return self.record(plan);
        }
        if plan.steps.is_empty() {
            return self.settle();
        }
        if let Some((path, state)) = self.refused_partition(&plan) {
            return self.partition_refused(&path, state);
        }
        if let Err(broken) = plan::check::check(&desired, &self.s.observed, &plan.steps) {
            let text = broken.to_string();
            self.report(FindingKind::Broken(Box::new(broken)));
            return self.finish(Err(AdmitError::Stuck(text)));
        }
        self.s.progress.rounds += 1;
        if self.s.progress.rounds > MAX_ROUNDS {
            let left: Vec<String> = plan.steps.iter().map(|p| p.step.shell("")).collect();
            let text =
                format!("{MAX_ROUNDS} phases were applied and these steps are left: {}", left.join("; "));
            self.report(FindingKind::Stuck(text.clone()));
            return self.finish(Err(AdmitError::Stuck(text)));
        }
        self.out.push(Effect::Apply(plan.first_phase().to_vec()));
    }

    /// Ties owners to the cgroups just read; returns those that are gone.
    pub(super) fn recognise(&mut self) -> Vec<(Owner, &'static str)> {
        let mut gone = Vec::new();
        for (owner, a) in &self.s.assignments.owners {
            let runtime = self.s.runtime.entry(owner.clone()).or_default();
            match self.s.observed.cgroups.get(&a.cgroup) {
                Some(cgroup) => {
                    if runtime.id != cgroup.id {
                        *runtime = Runtime { id: cgroup.id, entered: runtime.entered, ..Runtime::default() };
                    }
                    runtime.seen = true;
                    if matches!(owner, Owner::Run(_)) && a.created && runtime.entered && !cgroup.populated {
                        gone.push((owner.clone(), "its last process has ended"));
                    }
                }
                None if runtime.seen => gone.push((owner.clone(), "its cgroup was removed")),
                None => {}
            }
        }
        gone
    }

    pub(super) fn gone(&mut self, gone: Vec<(Owner, &'static str)>) {
        let mut owners = Vec::new();
        for (owner, why) in gone {
            let cpus = self.s.assignments.owners.get(&owner).map(|a| a.cpus.clone()).unwrap_or_default();
            self.report(FindingKind::Gone { owner: owner.clone(), cpus, why });
            owners.push(owner);
        }
        self.s.pending = Some(Pending::Concluding { ticket: None, owners, all: false });
        self.out.push(Effect::Collect);
    }

    /// Kernel and table agreed, nobody asked for a change, and now they differ: that was somebody else.
    pub(super) fn drift(&mut self, before: &BTreeSet<CgroupPath>) {
        let plan = plan::diff(&self.s.desired(), &self.s.observed);
        let mut files: BTreeMap<(CgroupPath, CpusetFile), (String, String)> = BTreeMap::new();
        for Planned { step, .. } in &plan.steps {
            if let Step::Write { path, file, old, new } = step
                && before.contains(path)
            {
                let entry = files.entry((path.clone(), *file));
                entry.or_insert_with(|| (old.clone(), String::new())).1 = new.to_string();
            }
        }
        for ((path, file), (found, wanted)) in files {
            let writer = |file| self.s.writers.get(&(path.clone(), file)).cloned();
            let writer = writer(Some(file)).or_else(|| writer(None));
            let pid = writer.as_ref().map(|w| w.pid);
            let key = (path.clone(), file);
            let kind = FindingKind::Drift { path: path.clone(), file, found, wanted, writer: writer.clone() };
            let id = self.report(kind);
            if self.s.fights.changed(&key, pid, self.now.mono_ns) {
                let repairs = self.s.settings.repairs_per_minute;
                self.report(FindingKind::Fight { path, file, writer, repairs });
            } else {
                self.s.drifted.push(id);
            }
        }
        self.s.writers.clear();
    }

    /// Tells what is new among the problems; returns the one that concerns the pending admission.
    pub(super) fn problems(&mut self, plan: &Plan) -> Option<Problem> {
        let found: BTreeSet<Problem> = plan.problems.iter().cloned().collect();
        let mine = match &self.s.pending {
            Some(Pending::Admission { owner, .. }) => {
                let path = self.s.assignments.owners.get(owner).map(|a| a.cgroup.clone());
                found.iter().find(|p| concerns(p, owner, path.as_ref())).cloned()
            }
            _ => None,
        };
        for problem in found.difference(&self.s.problems).cloned().collect::<Vec<_>>() {
            if Some(&problem) != mine.as_ref() {
                self.report(FindingKind::Problem(problem));
            }
        }
        self.s.problems = found;
        mine
    }

    pub(super) fn record(&mut self, plan: Plan) {
        for u in plan.unrecorded {
            let fresh = || FirstValue { id: u.id, files: BTreeMap::new() };
            let first = self.s.first.entry(u.path).or_insert_with(fresh);
            if first.id != u.id {
                *first = fresh();
            }
            first.files.insert(u.file, u.value);
        }
        self.save();
    }

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
        let Some(owner) = self.s.assignments.owner_of(path).map(|(o, _)| o.clone()) else {
            return self.finish(Err(AdmitError::PartitionRefused { path: path.clone(), state }));
        };
        let generation = self.next_generation();
        if let Some(a) = self.s.assignments.owners.get_mut(&owner)
            && a.isolation == Isolation::Auto
        {
            a.mode = Mode::Member;
            a.generation = generation;
            if let Some(r) = self.s.runtime.get_mut(&owner) {
                r.base = None;
            }
            self.s.progress.written.remove(path);
            self.report(FindingKind::FellBack { owner, reason: state });
            return self.save();
        }
        if matches!(&self.s.pending, Some(Pending::Admission { owner: o, .. }) if *o == owner) {
            return self.finish(Err(AdmitError::PartitionRefused { path: path.clone(), state }));
        }
        self.s.held_off.insert((path.clone(), CpusetFile::Partition));
        self.report(FindingKind::PartitionRefused { owner, reason: state });
        self.observe();
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
            Step::Write { path, file: CpusetFile::Partition, new: Value::Partition(kind), .. }
                if kind != PartitionKind::Member =>
            {
                *self.s.progress.written.entry(path).or_default() += 1;
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
            (Step::Write { file: CpusetFile::Cpus, new: Value::Cpus(set), .. }, Some(ENOSPC))
                if set.is_empty() =>
            {
                self.s.facts.empty_refused = true;
                return None;
            }
            // Gone since it was observed: the next reading tells.
            (_, Some(ENODEV)) | (Step::Write { .. } | Step::Remove(_), Some(ENOENT)) => return None,
            (Step::Enter { path, pid }, _) => {
                self.s.entering.retain(|e| *e != (path.clone(), *pid));
                if error.errno == Some(ESRCH) || matches!(self.s.pending, Some(Pending::Admission { .. })) {
                    return Some(error);
                }
            }
            _ => {}
        }
        let count = self.s.progress.failed.entry(step.shell("")).or_default();
        *count += 1;
        if *count < 2 {
            return None;
        }
        self.report(FindingKind::StepFailed(error.clone()));
        if let Step::Write { path, file, .. } = step {
            self.s.held_off.insert((path.clone(), *file));
        }
        let admission = match &self.s.pending {
            Some(Pending::Admission { owner, .. }) => self.s.assignments.owners.get(owner),
            _ => None,
        };
        // A step that cannot be held off would come back for ever.
        let endless = !matches!(step, Step::Write { .. });
        (endless || admission.is_some_and(|a| a.cgroup.is_within(step.path()))).then_some(error)
    }
}

fn concerns(problem: &Problem, owner: &Owner, path: Option<&CgroupPath>) -> bool {
    match problem {
        Problem::Vanished { owner: o, .. }
        | Problem::Kind { owner: o, .. }
        | Problem::ForeignPartition { owner: o, .. }
        | Problem::Offline { owner: o, .. } => o == owner,
        Problem::Populated { path: p } => path.is_some_and(|mine| mine.is_within(p)),
    }
}
