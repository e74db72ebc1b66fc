//! From a reading to the steps of one phase.

use super::{
    AdmitError, Answer, Cause, Effect, FindingKind, ForeignWrite, Pending, Runtime, Work,
    step::{Turn, keep},
};
use crate::{
    assignments::{Assignment, FirstValue, Mode},
    cgroup::{CgroupPath, CpusetFile},
    checkpoint::Extra,
    cpuset::CpuSet,
    explain::{Explanation, explain},
    ledger::{Departure, DepartureKind},
    observed::{KernelError, Observed, Step, Value},
    owner::Owner,
    partition::PartitionKind,
    plan::{self, Phase, Plan, Planned, Problem},
    request::Isolation,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

/// More phases than any plan has, three times over: beyond that somebody else is writing too.
const MAX_ROUNDS: u32 = 32;

/// Somebody who writes all the time must not keep truepin from its repairs. A reading takes a millisecond or so, a write
/// that changes a partition up to ten.
const MAX_REREADS: u32 = 8;
/// How often, and for how long each, an admission waits for CPUs that go and come.
const MAX_WAITS: u32 = 10;
const WAIT_NS: u64 = 100_000_000;

const ESRCH: i32 = 3;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

impl Turn<'_> {
    pub(super) fn disturbed(&mut self, writes: Vec<ForeignWrite>, departures: Vec<Departure>) {
        for w in writes {
            self.written(w);
        }
        for d in departures {
            let mut owner = self.s.runtime.iter_mut().find(|(_, r)| r.id == d.owner);
            let now = self.now.mono_ns;
            if let Some((_, r)) = &mut owner {
                r.left |= r.base.as_ref().is_some_and(|b| d.at_ns >= b.at.mono_ns);
            }
            if let Some((owner, runtime)) = owner
                && runtime.departed_ns.is_none_or(|at| now.saturating_sub(at) > 1_000_000_000)
            {
                runtime.departed_ns = Some(now);
                let example = match d.kind {
                    DepartureKind::Forked => format!("{} (tid {}) began on CPU {}", d.comm, d.pid, d.to),
                    DepartureKind::Migrated => {
                        format!("{} (tid {}) from CPU {} to CPU {}", d.comm, d.pid, d.from, d.to)
                    }
                };
                let kind = FindingKind::Departed { owner: owner.clone(), example };
                self.report(kind);
            }
            keep(&mut self.s.departures, d);
        }
        self.look();
    }

    pub(super) fn persisted(&mut self, result: Result<(), String>) {
        let Err(error) = result else {
            self.s.doubtful = false;
            self.s.durable = Some(Box::new(self.s.checkpoint()));
            self.s.fallback = None;
            return self.converge();
        };
        if !mem::replace(&mut self.s.doubtful, true) {
            self.report(FindingKind::NotDurable(error.clone()));
        }
        if self.s.progress.settling {
            return self.settled();
        }
        // Nothing of the newer table has reached the kernel: back to the one that is durable.
        let (table, first) = match (&self.s.fallback, &self.s.durable) {
            (Some(fallback), _) => (**fallback).clone(),
            (None, Some(d)) => (d.assignments.clone(), d.first.clone()),
            (None, None) => Default::default(),
        };
        self.s.assignments.owners = table.owners;
        self.s.assignments.promised = table.promised;
        self.s.first = first;
        self.s.watched.clear();
        let Some(Pending::Releasing { ticket, removed, .. }) = self.s.pending.take_if(Pending::is_release)
        else {
            return self.finish(Err(AdmitError::NotDurable(error)));
        };
        for (owner, _, runtime) in removed {
            self.s.runtime.insert(owner, runtime);
        }
        self.s.teardown = false;
        self.s.work = Work::Idle;
        if let Some(ticket) = ticket {
            let text = format!("the release could not be made durable: {error}");
            self.out.push(Effect::Reply(ticket, Answer::Failed(text)));
        }
    }

    /// A refused admission leaves nothing in the table.
    pub(super) fn forget_admission(
        &mut self,
        owner: &Owner,
        fresh: bool,
        before: Option<Box<(Assignment, Runtime)>>,
    ) {
        let held = self.s.assignments.owners.get(owner).map(|a| a.cgroup.clone());
        self.s.entering.retain(|(path, _)| Some(path) != held.as_ref());
        if fresh {
            self.s.assignments.release(owner);
            self.s.runtime.remove(owner);
        }
        if let Some((assignment, runtime)) = before.map(|b| *b)
            && held.is_some()
        {
            self.s.assignments.owners.insert(owner.clone(), assignment);
            self.s.runtime.insert(owner.clone(), runtime);
        }
    }

    pub(super) fn observed(&mut self, observed: Observed) {
        if self.s.causes.may_be_torn() && self.s.progress.rereads < MAX_REREADS {
            self.s.progress.rereads += 1;
            return self.observe();
        }
        if self.online(&observed.online) {
            return;
        }
        let before = mem::replace(&mut self.s.observed, observed);
        let unread = self.s.causes.mark();
        self.s.causes.reads();
        self.settle_names();
        self.s.leaving = self.recognise();
        if self.s.settings.audit {
            if self.doubts(&Plan::default()) {
                return self.observe();
            }
            return self.settle();
        }
        self.fit();
        self.demote();
        let stale = self.s.stale().into_iter().map(|o| (o, super::pods::NOT_ACTIVE));
        self.s.leaving.extend(stale);
        if !self.s.leaving.is_empty() && self.s.pending.is_none() {
            return self.gone();
        }
        let was_settled = mem::take(&mut self.s.settled);
        let mut desired = self.s.desired();
        let mut plan = plan::diff(&desired, &self.s.observed);
        if self.doubts(&plan) {
            // As if nothing had been read yet.
            (self.s.settled, self.s.observed) = (was_settled, before);
            self.s.causes.unreads(unread);
            return self.observe();
        }
        if was_settled {
            self.sets(Some(&before));
            self.ended(&before);
            self.s.progress.agreed = Some(before);
        }
        if self.drift(&plan, was_settled) | self.leaks(&plan) {
            desired = self.s.desired();
            plan = plan::diff(&desired, &self.s.observed);
        }
        if let Some(problem) = self.problems(&plan) {
            if let (Problem::Crowded { .. }, Some(owner)) = (&problem, self.admitting())
                && self.fall_back(&owner, &problem.to_string(), None)
            {
                return self.observe();
            }
            return self.finish(Err(AdmitError::Problem(problem)));
        }
        for path in &plan.settled {
            self.s.first.remove(path);
        }
        self.record(&mut plan);
        if !self.s.is_covered() {
            return self.save();
        }
        // The files are as they can be: before anything enters, the sets must be the owner's alone.
        if plan.steps.first().is_none_or(|p| p.phase >= Phase::Enter)
            && let Some(fault) = self.not_had()
        {
            // While CPUs go and come it may be about to have them.
            if !self.s.hotplug.is_calm() && self.s.progress.waits < MAX_WAITS {
                self.s.progress.waits += 1;
                self.out.push(Effect::Pause(WAIT_NS));
                return self.observe();
            }
            return self.finish(Err(AdmitError::Stuck(fault)));
        }
        if plan.steps.is_empty() {
            return self.settle();
        }
        if let Some((path, state)) = self.refused_partition(&plan) {
            return self.partition_refused(&path, state);
        }
        // What comes after this phase is planned anew, from what is then there.
        if let Err(broken) = plan::check::check(&desired, &self.s.observed, plan.first_phase()) {
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

    /// Ties owners to the cgroups just read; returns those that are gone. One that is being admitted (again) is not.
    pub(super) fn recognise(&mut self) -> BTreeMap<Owner, &'static str> {
        let mut gone = BTreeMap::new();
        let admitting = self.admitting();
        for (owner, a) in &self.s.assignments.owners {
            let runtime = self.s.runtime.entry(owner.clone()).or_default();
            let mut leaves = |why| {
                if Some(owner) != admitting.as_ref() {
                    gone.insert(owner.clone(), why);
                }
            };
            if runtime.refused {
                leaves("its admission was refused");
                continue;
            }
            match self.s.observed.cgroups.get(&a.cgroup) {
                Some(cgroup) => {
                    if runtime.id != cgroup.id {
                        let entered = runtime.entered;
                        *runtime = Runtime { id: cgroup.id, entered, ..mem::take(runtime).anew(self.now) };
                    }
                    runtime.seen = true;
                    if matches!(owner, Owner::Run(_)) && a.created && runtime.entered && !cgroup.populated {
                        leaves("its last process has ended");
                    }
                }
                None if runtime.seen => leaves("its cgroup was removed"),
                None => {}
            }
        }
        gone
    }

    /// Those that are gone leave the table. A pod whose container is gone stays in it: only its epoch ends.
    pub(super) fn gone(&mut self) {
        let (mut owners, mut parting) = (Vec::new(), Vec::new());
        for (owner, why) in self.s.leaving.clone() {
            if why != super::pods::NOT_ACTIVE && super::pods::uid_of(&owner).is_some() {
                parting.push(owner);
                continue;
            }
            let cpus = self.s.assignments.cpus_of(&owner).cloned().unwrap_or_default();
            self.report(FindingKind::Gone { owner: owner.clone(), cpus, why });
            owners.push(owner);
        }
        self.s.pending = Some(Pending::Concluding { ticket: None, owners, parting, all: false });
        self.out.push(Effect::Collect);
    }

    /// Files that changed since kernel and table agreed, or since truepin wrote them in this convergence: that was somebody
    /// else. Not every change is in the first reading: a write may come while that is taken, or after it. What merely
    /// follows from a change of the machine or the table is no drift. True when a file is left alone from now on.
    /// `first`: nothing was written since kernel and table agreed.
    pub(super) fn drift(&mut self, plan: &Plan, first: bool) -> bool {
        let agreed = self.s.progress.agreed.take();
        let mut files: BTreeMap<(CgroupPath, CpusetFile), [String; 3]> = BTreeMap::new();
        for Planned { step, .. } in &plan.steps {
            let Step::Write { path, file, new, .. } = step else { continue };
            let key = (path.clone(), *file);
            let now = text_of(&self.s.observed, path, *file);
            let was = match self.s.progress.known.get(&key) {
                Some(known) => known.clone(),
                // Files that came with the controller are as the kernel makes them.
                None => agreed
                    .as_ref()
                    .filter(|a| same_cgroup(a, &self.s.observed, path) && a.cpuset(path).is_some())
                    .map(|a| text_of(a, path, *file)),
            };
            if let Some(was) =
                was.filter(|was| *was != now && !self.by_hotplug(agreed.as_ref(), *file, was, &now))
            {
                let wanted = new.to_string();
                files.entry(key).and_modify(|f| f[2].clone_from(&wanted)).or_insert([was, now, wanted]);
            }
        }
        let mut frozen = false;
        for ((path, file), [was, found, wanted]) in files {
            let key = (path.clone(), file);
            self.s.progress.known.insert(key.clone(), Some(found.clone()));
            let change = self.change(&path, file, &was, agreed.as_ref().filter(|_| first));
            let kind = FindingKind::Drift { path: path.clone(), file, found, wanted };
            let (id, cause) = self.report_change(kind, change);
            let writer = cause.writer().map(|w| w.pid);
            let kernel = matches!(cause, Cause::Kernel { .. });
            if !kernel && self.s.fights.changed(&key, writer, self.now.mono_ns) {
                let repairs = self.s.settings.repairs_per_minute;
                self.report_by(FindingKind::Fight { path, file, repairs }, Some(cause));
                frozen = true;
            } else {
                self.s.drifted.push(id);
            }
        }
        self.s.progress.agreed = agreed;
        frozen
    }

    /// Whether the kernel changed a partition's state because CPUs went or came: the word is the same, only whether it is valid
    /// differs. That is nobody's drift and no fight.
    fn by_hotplug(&self, agreed: Option<&Observed>, file: CpusetFile, was: &str, now: &str) -> bool {
        let word = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        let seen = agreed.is_some_and(|b| b.online != self.s.observed.online);
        let unrest = seen || self.s.progress.rested || !self.s.hotplug.is_calm();
        file == CpusetFile::Partition && unrest && word(was) == word(now)
    }

    /// Tells what is new among the problems; returns the one that concerns the pending admission.
    pub(super) fn problems(&mut self, plan: &Plan) -> Option<Problem> {
        let mut found: BTreeSet<Problem> = plan.problems.iter().cloned().collect();
        let reserved = &self.s.assignments.reserved;
        found.extend(self.s.assignments.sets().filter(|(_, s)| !s.is_disjoint(reserved)).map(
            |(owner, set)| Problem::Reserved { owner: owner.clone(), cpus: set.intersection(reserved) },
        ));
        found.extend(self.degraded());
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
        let gone = self.s.problems.difference(&found).cloned().collect::<Vec<_>>();
        self.s.problems = found;
        let at = self.now;
        let open = self.s.findings.iter_mut().filter(|f| f.mended.is_none());
        for f in open.filter(|f| matches!(&f.kind, FindingKind::Problem(p) if gone.contains(p))) {
            f.mended = Some(at);
        }
        mine
    }

    fn record(&mut self, plan: &mut Plan) {
        for u in mem::take(&mut plan.unrecorded) {
            let fresh = || FirstValue { id: u.id, files: BTreeMap::new(), extra: Extra::new() };
            let first = self.s.first.entry(u.path).or_insert_with(fresh);
            if first.id != u.id {
                *first = fresh();
            }
            first.files.insert(u.file, u.value);
        }
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

    /// The owner of the pending admission.
    pub(super) fn admitting(&self) -> Option<Owner> {
        match &self.s.pending {
            Some(Pending::Admission { owner, .. }) => Some(owner.clone()),
            _ => None,
        }
    }

    /// From partition to member mode, where that was left to truepin.
    fn fall_back(&mut self, owner: &Owner, reason: &str, why: Option<Explanation>) -> bool {
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

/// The file as it reads; empty where there is none.
pub(super) fn text_of(observed: &Observed, path: &CgroupPath, file: CpusetFile) -> String {
    let Some(files) = observed.cpuset(path) else { return String::new() };
    match file {
        CpusetFile::Cpus => files.cpus.to_string(),
        CpusetFile::Exclusive => files.exclusive.as_ref().map(ToString::to_string).unwrap_or_default(),
        CpusetFile::Partition => files.partition.as_ref().map(ToString::to_string).unwrap_or_default(),
        CpusetFile::Mems => files.mems.to_string(),
    }
}

fn is_empty_list(value: &Value) -> bool {
    match value {
        Value::Cpus(set) => set.is_empty(),
        Value::Mems(set) => set.is_empty(),
        Value::Partition(_) => false,
    }
}

/// Whether the directory is the same one in both readings.
pub(super) fn same_cgroup(a: &Observed, b: &Observed, path: &CgroupPath) -> bool {
    let id = |o: &Observed| o.cgroups.get(path).map(|c| c.id);
    id(a).is_some() && id(a) == id(b)
}

fn concerns(problem: &Problem, owner: &Owner, path: Option<&CgroupPath>) -> bool {
    match problem {
        Problem::Vanished { owner: o, .. }
        | Problem::Kind { owner: o, .. }
        | Problem::ForeignPartition { owner: o, .. }
        | Problem::InsidePartition { owner: o, .. }
        | Problem::Memory { owner: o, .. } => o == owner,
        Problem::Degraded { owner: o, cpus, offline } => o == owner && cpus == offline,
        // It stands as it is, whoever asks.
        Problem::Reserved { .. } => false,
        Problem::PoolEmpty => true,
        Problem::Crowded { path: p } => path.is_some_and(|mine| mine.parent() == p.parent()),
        Problem::Populated { path: p } => path.is_some_and(|mine| mine.is_within(p)),
    }
}
