//! From a reading to the steps of one phase.

use super::{
    AdmitError, Answer, Cause, Effect, FindingKind, ForeignWrite, Pending, Runtime, Work,
    fights::Who,
    step::{Turn, keep},
};
use crate::{
    assignments::{Assignment, FirstValue},
    cgroup::{CgroupPath, CpusetFile},
    ledger::Departure,
    observed::{Observed, Step},
    owner::Owner,
    plan::{self, Phase, Plan, Planned, Problem},
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

impl Turn<'_> {
    pub(super) fn disturbed(&mut self, writes: Vec<ForeignWrite>, departures: Vec<Departure>) {
        for w in writes {
            self.written(w);
        }
        for d in departures {
            self.departed(&d);
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
        self.arrived();
        self.s.leaving = self.recognise();
        if self.s.settings.audit {
            self.s.fitted = true; // nothing is fitted to it, and what goes from now on is of interest
            if self.doubts(&Plan::default()) {
                return self.observe();
            }
            return self.settle();
        }
        let first = !self.s.fitted;
        self.fit();
        self.demote();
        let stale = self.s.stale().into_iter().map(|o| (o, super::pods::NOT_ACTIVE));
        self.s.leaving.extend(stale);
        let undeclared = self.s.undeclared().into_iter().map(|o| (o, super::units::UNDECLARED));
        self.s.leaving.extend(undeclared);
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
        if first {
            self.found_at_start(&plan);
        }
        if was_settled {
            self.sets(Some(&before));
            self.ended(&before);
            self.s.progress.agreed = Some(before);
        }
        if self.drift(&plan, was_settled) | self.leaks(&plan) | self.fence() {
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
        self.s.governed = mem::take(&mut plan.governed);
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
                        leaves("no process is left in its cgroup");
                    }
                }
                None if runtime.seen => leaves("its cgroup was removed"),
                None => {}
            }
        }
        gone
    }

    /// Those that are gone leave the table. A pod whose container is gone stays in it, and a declared unit that has stopped:
    /// only its epoch ends.
    pub(super) fn gone(&mut self) {
        let (mut owners, mut parting) = (Vec::new(), Vec::new());
        for (owner, why) in self.s.leaving.clone() {
            let stays = super::pods::uid_of(&owner).is_some() || self.s.settings.units.contains(&owner);
            if why != super::pods::NOT_ACTIVE && stays {
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
            let writer = cause.writer().map(Who::from);
            let kernel = matches!(cause, Cause::Kernel { .. });
            if !kernel && self.s.fights.changed(&key, writer.as_ref(), self.now.mono_ns) {
                let repairs = self.s.fights.repairs(&key);
                self.report_by(FindingKind::Fight { path, file, repairs }, Some(cause));
                frozen = true;
            } else {
                self.s.drifted.push(id);
            }
        }
        self.s.progress.agreed = agreed;
        frozen
    }

    /// What the record wants otherwise of its owners' cgroups than they were found: changed while no agent ran, or left half
    /// done by one that died. Who did it nobody saw; that it was so is told.
    fn found_at_start(&mut self, plan: &Plan) {
        let new = self.s.rebooted || self.s.durable.is_none();
        let owned = |path: &CgroupPath| self.s.assignments.owner_of(path).is_some();
        let one = |p: &Planned| match &p.step {
            Step::Write { path, file, new, .. } if owned(path) => {
                let found = text_of(&self.s.observed, path, *file);
                Some(format!("{} of {path} read {found:?} and is to be {:?}", file.name(), new.to_string()))
            }
            _ => None,
        };
        let found: Vec<String> = plan.steps.iter().filter(|_| !new).filter_map(one).collect();
        if !found.is_empty() {
            self.report(FindingKind::Note(format!(
                "found at the start, changed while no agent ran or left half done by one that died: {}",
                found.join("; ")
            )));
        }
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
            let fresh = || FirstValue { id: u.id, ..FirstValue::default() };
            let first = self.s.first.entry(u.path).or_insert_with(fresh);
            if first.id != u.id {
                *first = fresh();
            }
            first.files.insert(u.file, u.value);
        }
    }

    /// The owner of the pending admission.
    pub(super) fn admitting(&self) -> Option<Owner> {
        match &self.s.pending {
            Some(Pending::Admission { owner, .. }) => Some(owner.clone()),
            _ => None,
        }
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
