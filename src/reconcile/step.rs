//! One event in, effects out.

use super::{Cause, Effect, Event, Finding, FindingKind, Pending, Progress, State, Work, fights::MINUTE_NS};
use crate::{observed::Scope, verdict::Instant};
use std::collections::VecDeque;

/// Takes one event. The effects are to be carried out in order; results come back as events, before the next outside
/// event is taken. Deterministic: equal states, events and times give equal effects.
pub fn step(state: &mut State, event: Event, now: Instant) -> Vec<Effect> {
    let mut t = Turn { s: state, now, out: Vec::new() };
    match event {
        Event::Started => t.look(),
        Event::Found(kind) => {
            t.report(kind);
        }
        Event::Admit { ticket, request, exactly, home, pid } => {
            t.admit(ticket, &request, exactly, &home, pid);
        }
        Event::Expect { ticket, request, exactly, home } => t.expect(ticket, &request, exactly, home),
        Event::Release { ticket, owner } => t.release(ticket, owner),
        Event::AdmitPods(pods) => t.admit_pods(pods),
        Event::Adopt { ticket, owners } => t.adopt(ticket, owners),
        Event::RemovePod { ticket, uid } => t.remove_pod(ticket, &uid),
        Event::Container { ticket, id, owner, home } => t.container(ticket, id, owner, home),
        Event::Tree { pods, containers } => t.tree(pods, containers),
        Event::Source { ticket, report } => t.sources(ticket, report),
        Event::Inspect { ticket } => {
            t.s.pending = Some(Pending::Inspection { ticket });
            t.look();
        }
        Event::Disturbed { writes, departures } => t.disturbed(writes, departures),
        Event::Wrote { writes, sight, lost } => t.wrote(writes, sight, lost),
        Event::Hotplug(report) => t.hotplugged(&report),
        Event::Machine(result) => t.machine(result),
        Event::Persisted(result) => t.persisted(result),
        Event::Observed(Ok(observed)) => t.observed(observed),
        Event::Observed(Err(error)) => t.finish(Err(super::AdmitError::Kernel(error))),
        Event::Applied(results) => t.applied(results),
        Event::Configured(result) => t.configured(result),
        Event::Swept(sweep) => t.swept(&sweep),
        Event::Collected(result) => t.collected(result),
        Event::Located { found, own } => t.located(&found, own.as_ref()),
    }
    t.out
}

pub(super) struct Turn<'a> {
    pub(super) s: &'a mut State,
    pub(super) now: Instant,
    pub(super) out: Vec<Effect>,
}

impl Turn<'_> {
    pub(super) fn report(&mut self, kind: FindingKind) -> u64 {
        self.report_by(kind, None)
    }

    pub(super) fn report_by(&mut self, kind: FindingKind, cause: Option<Cause>) -> u64 {
        self.s.finding_count += 1;
        let finding = Finding { id: self.s.finding_count, at: self.now, kind, cause, mended: None };
        keep(&mut self.s.findings, finding.clone());
        self.out.push(Effect::Report(Box::new(finding)));
        self.s.finding_count
    }

    /// Begins a convergence from a fresh reading.
    pub(super) fn look(&mut self) {
        self.s.progress = Progress::default();
        let now = self.now.mono_ns;
        let young = |at: &mut u64| now.saturating_sub(*at) < MINUTE_NS;
        self.s.held_off.retain(|_, at| young(at));
        self.s.blocked.retain(|_, at| young(at));
        for (path, file) in self.s.fights.thaw(now) {
            self.report(FindingKind::FightOver { path, file });
        }
        self.s.fences.thaw(now);
        self.attend();
        self.converge();
    }

    /// Goes on with the kernel.
    pub(super) fn converge(&mut self) {
        self.s.work = Work::Converging;
        self.observe();
    }

    pub(super) fn observe(&mut self) {
        self.s.causes.asks(self.now.mono_ns);
        let mut scope = self.s.desired().scope();
        if let Scope::Around(paths) = &mut scope {
            paths.extend(self.s.fences.suspects.keys().cloned());
        }
        self.out.push(Effect::Observe(scope));
    }

    /// Makes the table durable.
    pub(super) fn save(&mut self) {
        self.s.epoch += 1;
        self.s.work = Work::Saving;
        self.out.push(Effect::Persist(Box::new(self.s.checkpoint())));
    }

    pub(super) fn next_generation(&mut self) -> u64 {
        self.s.generation += 1;
        self.s.generation
    }
}

/// The newest [`super::KEPT`] items.
pub(super) fn keep<T>(ring: &mut VecDeque<T>, item: T) {
    if ring.len() == super::KEPT {
        ring.pop_front();
    }
    ring.push_back(item);
}
