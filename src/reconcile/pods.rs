//! Pods: CPUs before there is a container, containers that come, go and come again, pods that are gone.
//!
//! Problem: messages about pods and containers are repeated, overtake each other and are lost, and the agent may be down
//! when any of them is sent. So none of them is needed: what is said and what is seen in the cgroup tree lead to the same
//! table, in any order and however often.
//!
//! ```text
//!            admit                 container, tree
//!   nothing ──────► promised ◄──────────────────────► in its cgroup
//!      ▲               │        its cgroup is removed        │
//!      └───────────────┴──── remove, or no source has it ────┘
//! ```
//!
//! Invariants: a pod is admitted as a whole or not at all; stale pods leave the table before CPUs are counted; several
//! pods that are admitted together cost one save; an owner whose container is made anew keeps its set.

use super::{AdmitError, Answer, Effect, Ended, FindingKind, Pending, Runtime, Ticket, step::Turn};
use crate::{
    assignments::{Assignment, Promise, Reserved},
    cgroup::{CgroupId, CgroupPath},
    checkpoint::Extra,
    containers::{ContainerEntry, ContainerId},
    cpuset::CpuSet,
    owner::Owner,
    request::{Isolation, Request},
    stale::SourceReport,
    verdict::{Judgement, Verdict},
};
use std::collections::{BTreeMap, BTreeSet};

/// Sets by owner.
type Sets = Vec<(Owner, CpuSet)>;

/// A pod that wants to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAdmission {
    /// For the answer.
    pub ticket: Ticket,
    /// The pod.
    pub uid: String,
    /// Of its containers with exclusive CPUs, in the order in which they start.
    pub requests: Vec<Request>,
}

/// A container in the cgroup tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Its id.
    pub id: ContainerId,
    /// Its pod.
    pub uid: String,
    /// Its name, where it could be found out.
    pub name: Option<String>,
    /// Where it is.
    pub path: CgroupPath,
    /// The cgroup's id.
    pub cgroup: CgroupId,
}

pub(super) const NOT_ACTIVE: &str = "its pod is not active any more";

pub(super) fn uid_of(owner: &Owner) -> Option<&str> {
    match owner {
        Owner::Pod { uid, .. } => Some(uid),
        _ => None,
    }
}

impl Turn<'_> {
    pub(super) fn admit_pods(&mut self, pods: Vec<PodAdmission>) {
        if self.s.settings.audit {
            for pod in pods {
                self.out.push(Effect::Reply(pod.ticket, Answer::Refused(AdmitError::Audit)));
            }
            return;
        }
        let dropped = self.drop_stale();
        let mut changed = !dropped.is_empty();
        let (mut answers, mut fresh) = (Vec::new(), Vec::new());
        for PodAdmission { ticket, uid, requests } in pods {
            self.s.sources.admitted(&uid);
            let before = self.s.assignments.clone();
            match self.promise_all(&requests) {
                Ok((sets, new)) => {
                    changed |= !new.is_empty();
                    fresh.extend(new);
                    answers.push((ticket, Answer::Pod(sets)));
                }
                Err(error) => {
                    self.s.assignments = before;
                    answers.push((ticket, Answer::Refused(error)));
                }
            }
        }
        if !changed {
            return self.out.extend(answers.into_iter().map(|(t, a)| Effect::Reply(t, a)));
        }
        // The container may have been seen before its pod was heard of.
        for owner in self.s.assignments.promised.keys().cloned().collect::<Vec<_>>() {
            if let Some(path) = self.s.homes.get(&owner).cloned() {
                self.house(&owner, &path);
            }
        }
        self.s.pending = Some(Pending::Promising { answers, fresh, dropped });
        self.afresh();
        self.s.teardown = false;
        self.save();
    }

    /// Sets of another manager, as they are: its pods run on them already.
    pub(super) fn adopt(&mut self, ticket: Ticket, owners: Vec<(Owner, CpuSet)>) {
        if self.s.settings.audit {
            return self.out.push(Effect::Reply(ticket, Answer::Refused(AdmitError::Audit)));
        }
        let before = self.s.assignments.clone();
        let mut new = false;
        for (owner, cpus) in &owners {
            match self.adopt_one(owner, cpus) {
                Ok(reserved) => new |= reserved == Reserved::New,
                Err(error) => {
                    self.s.assignments = before;
                    return self.out.push(Effect::Reply(ticket, Answer::Refused(error)));
                }
            }
        }
        let answer = Answer::Pod(owners.clone());
        if !new {
            return self.out.push(Effect::Reply(ticket, answer));
        }
        for (owner, _) in owners {
            if let Some(path) = self.s.homes.get(&owner).cloned() {
                self.house(&owner, &path);
            }
        }
        self.s.pending = Some(Pending::Promising {
            answers: vec![(ticket, answer)],
            fresh: Vec::new(),
            dropped: Vec::new(),
        });
        self.afresh();
        self.s.teardown = false;
        self.save();
    }

    fn adopt_one(&mut self, owner: &Owner, cpus: &CpuSet) -> Result<Reserved, AdmitError> {
        let strange = cpus.difference(self.s.topology.present().unwrap_or(&self.s.online));
        if !strange.is_empty() {
            return Err(AdmitError::NoSuchCpus { owner: owner.clone(), cpus: strange });
        }
        if let Some(uid) = uid_of(owner) {
            self.s.sources.admitted(uid);
        }
        let (isolation, mode) = self.s.resolve(owner, Isolation::Auto, false)?;
        let promise = Promise {
            cpus: cpus.clone(),
            mode,
            isolation,
            generation: self.next_generation(),
            reason: "taken over".into(),
            // Its container ran under the other manager: where the tree does not have it any more, the pod is gone.
            made: true,
            memory: BTreeMap::new(),
            original: None,
            extra: Extra::new(),
        };
        let online = self.s.ours();
        Ok(self.s.assignments.promise(owner, promise, &online)?)
    }

    /// All sets, and the owners that are new; with an error whatever came before: the caller takes that back.
    fn promise_all(&mut self, requests: &[Request]) -> Result<(Sets, Vec<Owner>), AdmitError> {
        let fresh = requests.iter().filter(|r| self.s.assignments.cpus_of(&r.owner).is_none());
        let held = requests.iter().filter_map(|r| self.s.assignments.cpus_of(&r.owner));
        let held = held.fold(CpuSet::new(), |all, set| all.union(set));
        let within = self.together(&held, &fresh.collect::<Vec<_>>())?;
        let mut sets = Vec::new();
        let mut new = Vec::new();
        for request in requests {
            let owner = &request.owner;
            if let Some(held) = self.s.assignments.cpus_of(owner).cloned() {
                // Where the machine has changed, what it was admitted with counts too.
                let first = self.s.assignments.original_of(owner).map(CpuSet::len);
                let asked = request.cpus as usize;
                if held.len() != asked && first != Some(asked) {
                    let owner = owner.clone();
                    return Err(crate::assignments::ReserveError::Differs { owner, held }.into());
                }
                sets.push((owner.clone(), held));
                continue;
            }
            let (isolation, mode) = self.s.resolve(owner, request.isolation, false)?;
            let (cpus, reason, memory) = self.place(request, None, &within)?;
            let generation = self.next_generation();
            let promise = Promise {
                cpus: cpus.clone(),
                mode,
                isolation,
                generation,
                reason,
                made: false,
                memory,
                original: None,
                extra: Extra::new(),
            };
            let online = self.s.ours();
            if self.s.assignments.promise(owner, promise, &online)? == Reserved::New {
                new.push(owner.clone());
            }
            sets.push((owner.clone(), cpus));
        }
        Ok((sets, new))
    }

    /// Owners of pods that are gone leave the table; returns what was known of them. Their last verdicts are without evidence: nobody
    /// watched while they ended.
    fn drop_stale(&mut self) -> Vec<(Owner, Runtime)> {
        let stale = self.s.stale();
        let mut dropped = Vec::new();
        for owner in &stale {
            let cpus = self.s.assignments.cpus_of(owner).cloned().unwrap_or_default();
            self.report(FindingKind::Gone { owner: owner.clone(), cpus, why: NOT_ACTIVE });
            if let Some(a) = self.s.assignments.release(owner) {
                self.s.fights.forget(&a.cgroup);
                self.s.mends.forget(&a.cgroup);
            }
            dropped.push((owner.clone(), self.s.runtime.remove(owner).unwrap_or_default()));
            self.s.leaving.remove(owner);
        }
        self.s.forget_pods();
        dropped
    }

    pub(super) fn remove_pod(&mut self, ticket: Ticket, uid: &str) {
        if self.s.settings.audit {
            return self.out.push(Effect::Reply(ticket, Answer::Refused(AdmitError::Audit)));
        }
        self.s.containers.retain(|_, c| uid_of(&c.owner) != Some(uid));
        self.s.homes.retain(|o, _| uid_of(o) != Some(uid));
        self.s.sources.forget(uid);
        let owners = self.s.assignments.sets().map(|(o, _)| o.clone());
        let owners: Vec<Owner> = owners.filter(|o| uid_of(o) == Some(uid)).collect();
        if owners.is_empty() {
            self.out.push(Effect::Reply(ticket, Answer::Released(Vec::new())));
            return self.save_what_is_known();
        }
        self.s.pending =
            Some(Pending::Concluding { ticket: Some(ticket), owners, parting: Vec::new(), all: false });
        self.afresh();
        self.look();
    }

    /// A runtime made a container. Its cgroup may not be there yet, and its pod may not be known.
    pub(super) fn container(
        &mut self,
        ticket: Ticket,
        id: ContainerId,
        owner: Owner,
        home: Option<(CgroupPath, CgroupId)>,
    ) {
        let cgroup = home.as_ref().map(|(_, id)| *id);
        let known = self.s.containers.get(&id).is_some_and(|e| e.cgroup.is_some() && e.cgroup == cgroup);
        self.note_container(id, &owner, cgroup);
        // Said again, or late: meanwhile a newer container of the same name has the CPUs.
        let lives = self.s.homes.get(&owner).filter(|p| self.s.observed.cgroups.contains_key(*p));
        let superseded = known && home.as_ref().is_some_and(|(path, _)| lives.is_some_and(|p| p != path));
        let housed = home.filter(|_| !superseded).is_some_and(|(path, _)| {
            self.s.homes.insert(owner.clone(), path.clone());
            !self.s.settings.audit && self.house(&owner, &path)
        });
        if !housed {
            self.out.push(Effect::Reply(ticket, Answer::Noted));
            return self.save_what_is_known();
        }
        self.s.pending = Some(Pending::Admission { ticket, owner, fresh: false, before: None });
        self.afresh();
        self.look();
    }

    /// All pods and containers that the cgroup tree has now.
    pub(super) fn tree(&mut self, pods: BTreeSet<String>, containers: Vec<Sighting>) {
        let seen: BTreeSet<&ContainerId> = containers.iter().map(|c| &c.id).collect();
        self.s.unresolved.retain(|id| seen.contains(id));
        // One that was announced and has no cgroup yet stays.
        self.s.containers.retain(|id, c| seen.contains(id) || c.cgroup.is_none());
        // What this look found lives, also where the loop itself has not read it yet.
        let there: BTreeSet<CgroupPath> = containers.iter().map(|c| c.path.clone()).collect();
        let mut moved = false;
        for c in containers {
            let named = c.name.as_ref().and_then(|n| format!("pod/{}/{n}", c.uid).parse::<Owner>().ok());
            let known = self.s.containers.get(&c.id).map(|e| e.owner.clone());
            let Some(owner) = named.or(known) else {
                if self.s.unresolved.insert(c.id.clone()) {
                    self.report(FindingKind::Unresolved { id: c.id, path: c.path });
                }
                continue;
            };
            let newer = self.s.containers.get(&c.id).is_none_or(|e| e.cgroup != Some(c.cgroup));
            self.note_container(c.id, &owner, Some(c.cgroup));
            // While an old container of the same name is still there, the one that was seen last has the CPUs.
            let current = self.s.homes.get(&owner);
            if newer || current.is_none_or(|p| !there.contains(p)) {
                self.s.homes.insert(owner.clone(), c.path.clone());
                if !self.s.settings.audit {
                    moved |= self.house(&owner, &c.path);
                }
            }
        }
        self.hear(SourceReport { source: crate::stale::TREE.into(), complete: true, pods, position: None });
        if moved || !self.s.stale().is_empty() || self.s.is_unsaved() {
            self.afresh();
            self.look();
        }
    }

    pub(super) fn sources(&mut self, ticket: Ticket, report: SourceReport) {
        match self.s.sources.hear(report) {
            Ok(()) => self.out.push(Effect::Reply(ticket, Answer::Noted)),
            Err(error) => return self.out.push(Effect::Reply(ticket, Answer::Failed(error.to_string()))),
        }
        if !self.s.stale().is_empty() {
            self.look();
        }
    }

    fn hear(&mut self, report: SourceReport) {
        // The tree is known to every configuration.
        let heard = self.s.sources.hear(report);
        debug_assert!(heard.is_ok(), "{heard:?}");
    }

    fn note_container(&mut self, id: ContainerId, owner: &Owner, cgroup: Option<CgroupId>) {
        let known = self.s.containers.get(&id).and_then(|e| e.cgroup);
        let fresh = || ContainerEntry { owner: owner.clone(), cgroup: None, extra: Extra::new() };
        let entry = self.s.containers.entry(id).or_insert_with(fresh);
        entry.owner.clone_from(owner);
        entry.cgroup = cgroup.or(known);
    }

    /// Containers became known or were forgotten, and nothing follows from it.
    fn save_what_is_known(&mut self) {
        if self.s.is_unsaved() && !self.s.settings.audit {
            self.look();
        }
    }

    /// True when the owner lives there from now on.
    pub(super) fn house(&mut self, owner: &Owner, path: &CgroupPath) -> bool {
        let generation = self.next_generation();
        match self.s.assignments.house(owner, path, generation) {
            Ok(moved) => {
                if moved {
                    let before = self.s.runtime.remove(owner).unwrap_or_default();
                    let mut runtime = before.anew(self.now);
                    runtime.ended.extend(self.s.past.remove(owner).unwrap_or_default());
                    self.s.runtime.insert(owner.clone(), runtime);
                    self.s.fights.forget(path);
                    self.s.mends.forget(path);
                }
                moved
            }
            Err(error) => {
                let error = Box::new(AdmitError::Reserve(error));
                self.report(FindingKind::NotAdmitted { owner: owner.clone(), error });
                false
            }
        }
    }

    /// Containers of pods whose cgroups were removed: the CPUs stay theirs until the pod is gone, and an epoch that was not
    /// Held stays with the owner. Returns what stood.
    pub(super) fn unhouse(
        &mut self,
        owners: Vec<Owner>,
        verdicts: &[(Owner, Option<Verdict>)],
    ) -> Vec<(Owner, Assignment, Runtime)> {
        let mut stood = Vec::new();
        for owner in owners {
            let generation = self.next_generation();
            let Some(before) = self.s.assignments.owners.get(&owner).cloned() else { continue };
            self.s.assignments.unhouse(&owner, generation);
            self.s.fights.forget(&before.cgroup);
            self.s.mends.forget(&before.cgroup);
            let runtime = self.s.runtime.remove(&owner).unwrap_or_default();
            let verdict = verdicts.iter().find(|(o, _)| *o == owner).and_then(|(_, v)| v.as_ref());
            self.remember(&owner, &runtime, verdict);
            // A container of the boot before says nothing about this one.
            if self.s.rebooted
                && runtime.id.0 == 0
                && let Some(p) = self.s.assignments.promised.get_mut(&owner)
            {
                p.made = false;
            }
            // A unit's next cgroup is where the last one was.
            let pod = uid_of(&owner).is_some();
            if pod && self.s.homes.get(&owner) == Some(&before.cgroup) {
                self.s.homes.remove(&owner);
            }
            stood.push((owner, before, runtime));
        }
        stood
    }

    /// What the next container of the owner has to answer for since the assignment.
    fn remember(&mut self, owner: &Owner, runtime: &Runtime, verdict: Option<&Verdict>) {
        let mut ended = runtime.ended.clone();
        let at = self.now;
        let earlier = if uid_of(owner).is_some() { "an earlier container" } else { "an earlier start" };
        if runtime.base.is_some() {
            // What the epochs before it came to is in the verdict, too.
            ended.clear();
            match verdict.map(|v| (v.judgement, v.reasons.clone())) {
                Some((Judgement::Held, _)) => {}
                Some((Judgement::Violated, reasons)) => {
                    let faults = reasons.into_iter().map(|r| format!("in {earlier}: {r}")).collect();
                    ended.push(Ended { at, why: format!("{earlier} was violated"), faults });
                }
                Some((Judgement::Inconclusive, reasons)) => {
                    let why = reasons.first().cloned().unwrap_or_default();
                    ended.push(Ended { at, why: format!("of {earlier}: {why}"), faults: Vec::new() });
                }
                None => {
                    let why = format!("{earlier} ended without being judged");
                    ended.push(Ended { at, why, faults: Vec::new() });
                }
            }
        }
        if ended.is_empty() {
            self.s.past.remove(owner);
        } else {
            self.s.past.insert(owner.clone(), ended);
        }
    }

    /// What was promised, or why not.
    pub(super) fn answer_pods(
        &mut self,
        answers: Vec<(Ticket, Answer)>,
        fresh: &[Owner],
        dropped: Vec<(Owner, Runtime)>,
        outcome: Result<(), AdmitError>,
    ) {
        let lost = match outcome {
            Err(AdmitError::NotDurable(why)) => Some(why),
            Err(error) => {
                // The promise stands; what could not be written for it is tried again.
                self.failed(error);
                None
            }
            Ok(()) => None,
        };
        if lost.is_some() {
            // They are in the table again.
            for (owner, runtime) in
                dropped.into_iter().filter(|(o, _)| self.s.assignments.owners.contains_key(o))
            {
                self.s.runtime.insert(owner, runtime);
            }
        } else {
            self.s.concluded.retain(|(o, _)| !fresh.contains(o));
            self.s.past.retain(|o, _| !fresh.contains(o));
        }
        for (ticket, answer) in answers {
            let answer = match (&lost, answer) {
                // The promise was durable before what could not be saved any more.
                (Some(_), Answer::Pod(sets)) if self.s.holds(&sets) => Answer::Pod(sets),
                (Some(why), Answer::Pod(_)) => Answer::Refused(AdmitError::NotDurable(why.clone())),
                (_, answer) => answer,
            };
            self.out.push(Effect::Reply(ticket, answer));
        }
    }
}

impl super::State {
    /// Owners of pods that no source has any more.
    pub(super) fn stale(&self) -> Vec<Owner> {
        if self.settings.audit || !self.sources.is_ready() {
            return Vec::new();
        }
        // The cgroup tree knows pods where the kubelet's drivers put them, and nowhere else.
        let known = |path: &CgroupPath| crate::kubepods::place(path).is_some();
        let held = self.assignments.owners.iter().map(|(o, a)| (o, known(&a.cgroup)));
        let promised = self.assignments.promised.iter().map(|(o, p)| (o, p.made));
        let gone =
            |(o, made): &(&Owner, bool)| uid_of(o).is_some_and(|uid| self.sources.is_stale(uid, *made));
        held.chain(promised).filter(gone).map(|(o, _)| o.clone()).collect()
    }

    /// CPUs that are online and in no other manager's partition.
    pub(super) fn ours(&self) -> CpuSet {
        self.online.difference(&crate::plan::foreign(&self.desired(), &self.observed, None))
    }

    /// Whether these sets are in the table.
    fn holds(&self, sets: &[(Owner, CpuSet)]) -> bool {
        sets.iter().all(|(o, set)| self.assignments.cpus_of(o) == Some(set))
    }

    /// How many admissions of pods there were: what a source's report is dated by.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.sources.position()
    }

    /// Whether nothing is known of any pod.
    #[must_use]
    pub fn has_no_pods(&self) -> bool {
        self.containers.is_empty() && !self.assignments.sets().any(|(o, _)| uid_of(o).is_some())
    }

    /// Nothing is remembered of pods that have no owner in the table and no container.
    pub(super) fn forget_pods(&mut self) {
        let table = &self.assignments;
        let containers = &self.containers;
        self.past.retain(|o, _| table.cpus_of(o).is_some());
        self.homes.retain(|o, _| table.cpus_of(o).is_some() || containers.values().any(|c| c.owner == *o));
    }
}
