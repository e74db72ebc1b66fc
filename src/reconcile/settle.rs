//! The end of a convergence: faults, evidence, answers.

use super::{
    AdmitError, Answer, Effect, FindingKind, Pending, Runtime, Work,
    converge::same_cgroup,
    step::{Turn, keep},
};
use crate::{
    assignments::Mode,
    ledger::Watched,
    observed::Observed,
    owner::Owner,
    sweep::{self, SetFault, SetFinding},
    verdict::{Evidence, Judgement},
};
use std::{mem, sync::Arc};

impl Turn<'_> {
    pub(super) fn settle(&mut self) {
        self.forget_fences();
        let lags = self.s.is_unsaved() || self.s.doubtful;
        if lags && !self.s.settings.audit {
            self.s.progress.settling = true;
            return self.save();
        }
        self.settled();
    }

    /// Nothing is left to do.
    pub(super) fn settled(&mut self) {
        let applied = self.s.progress.rounds > 0;
        self.s.settled = true;
        self.s.unserved = self.unserved();
        for id in mem::take(&mut self.s.drifted) {
            if let Some(f) = self.s.findings.iter_mut().find(|f| f.id == id) {
                f.mended = Some(self.now);
            }
        }
        self.fences_settled();
        if !self.watch() {
            self.sets(None);
        }
        if mem::take(&mut self.s.hotplug.sweep) | applied {
            self.sweep_tasks();
        }
        self.finish(Ok(()));
    }

    /// Why the owner that is being admitted does not have its CPUs for itself, though no step is left: somebody's file is
    /// left alone, or could not be written.
    pub(super) fn not_had(&self) -> Option<String> {
        if self.s.settings.audit {
            return None;
        }
        let Some(Pending::Admission { owner, fresh: true, .. }) = &self.s.pending else { return None };
        let mut faults = sweep::sets(&self.s.desired(), &self.s.observed).into_iter();
        faults.find(|f| f.owner == *owner).map(|f| f.fault.to_string())
    }

    /// Records the faults of the sets: those that have come since kernel and table agreed (`before`) and that a repair
    /// will end, or without that those that stayed.
    pub(super) fn sets(&mut self, before: Option<&Observed>) {
        let lasting = before.is_none();
        let admitting = self.admitting().filter(|_| !lasting);
        for found in self.s.wrong.clone() {
            if Some(&found.owner) == admitting.as_ref() {
                continue;
            }
            let owner = self.s.assignments.owners.get(&found.owner);
            // One that was made anew is not as it is to be yet, and its epoch has not begun.
            let anew = |b: &Observed| owner.is_some_and(|a| !same_cgroup(b, &self.s.observed, &a.cgroup));
            if before.is_some_and(anew) {
                continue;
            }
            let mode = owner.map(|a| self.s.in_force(a));
            // In member mode a new cgroup is allowed everywhere until it is caught; whether it ran is the ledger's to
            // say. Only what stays is a fault of the sets.
            let passing =
                matches!(found.fault, SetFault::Overlap { .. }) && mode == Some(Mode::Member) && !lasting;
            if !passing {
                self.fault(found, before);
            }
        }
    }

    pub(super) fn fault(&mut self, found: SetFinding, before: Option<&Observed>) {
        let now = self.now;
        let Some(runtime) = self.s.runtime.get_mut(&found.owner) else { return };
        if !runtime.fault(found.clone(), now) {
            return;
        }
        match before.and_then(|b| self.change_behind(&found, b)) {
            Some(change) => drop(self.report_change(FindingKind::Set(found), change)),
            None => drop(self.report(FindingKind::Set(found))),
        }
    }

    /// Points the programs, the watches and the agent itself at the present table. True when epochs begin with that, and
    /// the sets are judged when they have.
    pub(super) fn watch(&mut self) -> bool {
        let mut watched = Vec::new();
        for (owner, a) in &self.s.assignments.owners {
            let Some(runtime) = self.s.runtime.get(owner).filter(|r| r.id.0 != 0) else { continue };
            watched.push(Watched {
                cgroup: runtime.id,
                level: a.cgroup.level(),
                cpus: a.cpus.clone(),
                generation: a.generation,
            });
        }
        // By id: one that was made anew under the same path has to be watched anew.
        let cgroups = self.s.observed.cgroups.iter();
        if !self.s.watching.iter().map(|(p, id)| (p, id)).eq(cgroups.clone().map(|(p, c)| (p, &c.id))) {
            self.s.watching = cgroups.map(|(p, c)| (p.clone(), c.id)).collect();
            self.s.causes.watches(self.now.mono_ns);
            self.out.push(Effect::Watch(self.s.observed.cgroups.keys().cloned().collect()));
        }
        let pool = self.s.online.difference(&self.s.assignments.exclusive());
        // On 6.1 every change of its cpuset makes a task forget its own mask.
        let anew = self.s.progress.rounds > 0 || self.s.progress.rested;
        if (pool != self.s.confined || anew) && !pool.is_empty() {
            self.s.confined = pool.clone();
            self.out.push(Effect::Confine(pool));
        }
        if watched == self.s.watched {
            return false;
        }
        self.s.watched.clone_from(&watched);
        // Whose tasks' ways in are watched is decided by whose cgroups these are.
        self.s.causes.watches(self.now.mono_ns);
        self.out.push(Effect::Configure(watched));
        true
    }

    pub(super) fn sweep_tasks(&mut self) {
        let cgroups = self.s.assignments.owners.iter().map(|(o, a)| (o.clone(), a.cgroup.clone())).collect();
        self.out.push(Effect::SweepTasks(cgroups));
    }

    /// Answers what is pending; then those leave whose cgroups are gone.
    pub(super) fn finish(&mut self, outcome: Result<(), AdmitError>) {
        self.s.work = Work::Idle;
        match (self.s.pending.take(), outcome) {
            (None, Ok(())) => {}
            (None, Err(error)) => self.failed(error),
            (Some(Pending::Admission { ticket, owner, .. }), Ok(())) => {
                let answer = match self.s.assignments.owners.get(&owner) {
                    Some(a) => Answer::Assigned(owner, Box::new(a.clone())),
                    None => Answer::Failed(format!("{owner} vanished while it was admitted")),
                };
                self.out.push(Effect::Reply(ticket, answer));
            }
            (Some(Pending::Admission { ticket, owner, fresh, before }), Err(error)) => {
                self.forget_admission(&owner, fresh, before);
                let error = Box::new(error);
                self.s.pending = Some(Pending::Refusing { ticket, owner, error });
                return self.look();
            }
            (Some(Pending::Refusing { ticket, owner, error }), outcome) => {
                if let Err(more) = outcome {
                    self.failed(more);
                }
                // Its removal could not be made durable; it is owed.
                if self.s.assignments.owners.contains_key(&owner) && !self.s.runtime.contains_key(&owner) {
                    let owed = Runtime { refused: true, ..Runtime::default() };
                    self.s.runtime.insert(owner, owed);
                }
                self.out.push(Effect::Reply(ticket, Answer::Refused(*error)));
            }
            // However the convergence went, the owners go.
            (Some(p @ Pending::Concluding { .. }), _) => {
                self.s.pending = Some(p);
                return self.out.push(Effect::Collect);
            }
            (Some(Pending::Releasing { ticket, verdicts, .. }), outcome) => {
                for (owner, verdict) in &verdicts {
                    if let Some(v) = verdict {
                        keep(&mut self.s.concluded, (owner.clone(), v.clone()));
                    }
                }
                let answer = match outcome {
                    Ok(()) => Answer::Released(verdicts),
                    Err(error) => Answer::Failed(format!("released, but {error}")),
                };
                self.out.extend(ticket.map(|ticket| Effect::Reply(ticket, answer)));
            }
            (Some(Pending::Promising { answers, fresh, dropped }), outcome) => {
                self.answer_pods(answers, &fresh, dropped, outcome);
            }
            (Some(p @ Pending::Inspection { .. }), _) => {
                self.s.pending = Some(p);
                self.sweep_tasks();
                return self.out.push(Effect::Collect);
            }
        }
        self.see_off();
    }

    fn see_off(&mut self) {
        if self.s.pending.is_none() && !self.s.leaving.is_empty() && !self.s.settings.audit {
            self.gone();
        }
    }

    /// An error that is nobody's answer. What has a finding of its own was reported.
    pub(super) fn failed(&mut self, error: AdmitError) {
        if let AdmitError::Kernel(error) = error {
            self.report(FindingKind::StepFailed(error));
        }
    }

    pub(super) fn configured(&mut self, result: Result<Arc<Evidence>, String>) {
        match result {
            Ok(evidence) => {
                for runtime in self.s.runtime.values_mut().filter(|r| r.base.is_none() && r.id.0 != 0) {
                    runtime.begin(evidence.clone());
                }
            }
            Err(error) => {
                // Tried again at the next settlement.
                self.s.watched.clear();
                self.report(FindingKind::Probe(error));
            }
        }
        // What is wrong with the sets from the start is wrong within the new epochs too.
        self.sets(None);
    }

    pub(super) fn collected(&mut self, result: Result<Arc<Evidence>, String>) {
        let evidence = match result {
            Ok(evidence) => Some(evidence),
            Err(error) => {
                self.report(FindingKind::Probe(error));
                None
            }
        };
        if let Some(evidence) = &evidence {
            self.contradictions(evidence);
        }
        match self.s.pending.take() {
            Some(Pending::Concluding { ticket, owners, parting, all }) => {
                self.conclude(ticket, owners, parting, all, evidence.as_deref());
            }
            Some(Pending::Inspection { ticket }) => {
                let failed = || Answer::Failed("the evidence could not be read".into());
                self.out.push(Effect::Reply(ticket, evidence.clone().map_or_else(failed, Answer::Inspected)));
                self.see_off();
            }
            other => self.s.pending = other,
        }
        if let Some(evidence) = &evidence {
            self.intruders(evidence);
        }
    }

    /// Reports an owner whose claim has become false.
    pub(super) fn contradictions(&mut self, evidence: &Evidence) {
        let owners: Vec<Owner> = self.s.assignments.owners.keys().cloned().collect();
        for owner in owners {
            if self.s.runtime.get(&owner).is_none_or(|r| r.violated) {
                continue;
            }
            let Some(v) = self.s.verdict(&owner, None, evidence) else { continue };
            if v.judgement == Judgement::Violated {
                if let Some(r) = self.s.runtime.get_mut(&owner) {
                    r.violated = true;
                }
                let reason = v.reasons.first().cloned().unwrap_or_default();
                self.report(FindingKind::Violated { owner, reason });
            }
        }
    }
}
