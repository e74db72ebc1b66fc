//! CPUs that go and come.
//!
//! Problem: CPUs go and come in bursts, the kernel follows with some delay, and what is read in between fits nothing; yet
//! an owner whose last CPU has gone must not wait. A CPU that was away and is back leaves no trace in two samples.
//! Steps: a report (or a reading that shows other CPUs online) opens a time of unrest, which ends when nothing was
//! reported for [`QUIET_NS`], [`LONGEST_NS`] after its first report at the latest. Then everybody's set is fitted to what is
//! online, all sets are compared and all masks swept, and once more [`AGAIN_NS`] later. Meanwhile only owners of which
//! no CPU was left are served, at once, and nothing is called wrong.
//! Invariants: whoever had a CPU offline, or may have had, is not Held over that time; nobody is moved back when CPUs
//! return.

use super::{Effect, Ended, FindingKind, HotplugReport, mend::is_passing, step::Turn};
use crate::{
    assignments::{Assignment, Mode},
    cgroup::CpusetFile,
    cpuset::{CpuId, CpuSet},
    nodeset::NodeId,
    owner::Owner,
    placement::Chooser,
    plan::{self, Problem},
    refit,
    sweep::{SetFault, SetFinding},
    topology::CpuTopology,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

/// Without a report for so long, CPUs have come to rest.
const QUIET_NS: u64 = 100_000_000;
/// A storm is answered at least so often.
const LONGEST_NS: u64 = 1_000_000_000;
/// Up to 6.9 cpusets follow in a workqueue, and masks of tasks when they next run.
const AGAIN_NS: u64 = 500_000_000;
/// From the end of a partition to the report of the CPU that went: a stop of all CPUs lies between, a few ms on a busy host.
const FOREBODING_NS: u64 = 1_000_000_000;
/// Where attempts are not heard, masks are swept at every tick, which by default comes every 30 s.
const UNHEARD_NS: u64 = 10_000_000_000;

/// What is known of CPUs that go and come.
#[derive(Debug, Clone, Default)]
pub(super) struct Hotplug {
    /// The first and the newest report that are not answered.
    unrest: Option<(u64, u64)>,
    /// When everything is looked at once more.
    again_ns: Option<u64>,
    /// All masks are to be swept when this convergence ends.
    pub(super) sweep: bool,
    /// What is online by the reports since the last reading.
    reported: Option<CpuSet>,
    /// Were told to go or come, in the newest time of unrest.
    pub(super) tried: CpuSet,
    /// When that last was.
    swept_ns: u64,
    /// The node of every CPU that was ever seen.
    pub(super) places: BTreeMap<CpuId, NodeId>,
}

impl Hotplug {
    /// On this machine.
    pub(super) fn new(topology: &CpuTopology) -> Self {
        let mut hotplug = Self::default();
        hotplug.learn(topology);
        hotplug
    }

    fn learn(&mut self, topology: &CpuTopology) {
        self.places.extend(topology.cpus().iter().filter_map(|c| Some((c.id, c.node?))));
    }

    fn stir(&mut self, now_ns: u64) {
        let first = self.unrest.map_or(now_ns, |(first, _)| first);
        self.unrest = Some((first, now_ns));
    }

    /// Whether CPUs have come to rest, as far as is known.
    pub(super) fn is_calm(&self) -> bool {
        self.unrest.is_none()
    }

    /// When to look, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) fn deadline(&self) -> Option<u64> {
        [self.rests_at(), self.again_ns].into_iter().flatten().min()
    }

    fn rests_at(&self) -> Option<u64> {
        let (first, last) = self.unrest?;
        Some(first.saturating_add(LONGEST_NS).min(last.saturating_add(QUIET_NS)))
    }

    /// Everything is looked at again then, or before.
    pub(super) fn look_at(&mut self, ns: u64) {
        self.again_ns = Some(self.again_ns.map_or(ns, |at| at.min(ns)));
    }
}

impl Turn<'_> {
    pub(super) fn hotplugged(&mut self, report: &HotplugReport) {
        self.went(&report.went);
        if report.lost {
            let at = self.now;
            for r in self.s.runtime.values_mut() {
                r.gap("reports of CPU hotplug were lost: its CPUs may have been offline".into(), at);
            }
        }
        let h = &mut self.s.hotplug;
        if h.is_calm() {
            h.tried = CpuSet::new();
        }
        h.tried |= &report.tried;
        h.stir(self.now.mono_ns);
        self.s.mends.clear();
        // Who has nothing left is served at once, and who had nothing before.
        let online = h.reported.take().unwrap_or_else(|| self.s.online.clone());
        let online = online.difference(&report.went).union(&report.came);
        h.reported = Some(online.clone());
        let stranded = |s: &CpuSet| !s.is_disjoint(&report.went) && s.is_disjoint(&online);
        let returned = |s: &CpuSet| !s.is_disjoint(&report.came) && s.is_disjoint(&self.s.online);
        if self.s.assignments.sets().any(|(_, s)| stranded(s) || returned(s)) {
            if self.s.is_idle() {
                self.look();
            } else {
                self.s.hotplug.look_at(self.now.mono_ns);
            }
        }
    }

    /// Owners of these CPUs have a gap.
    ///
    /// Since 6.10 the kernel ends a partition before its last CPU has gone and long before that is reported, so what then
    /// was read looked like a fault of the sets: where nobody is known to have written, it was none, and nobody's change.
    fn went(&mut self, cpus: &CpuSet) {
        let at = self.now;
        let since = at.mono_ns.saturating_sub(FOREBODING_NS);
        for (owner, a) in &self.s.assignments.owners {
            let theirs = a.cpus.intersection(cpus);
            if theirs.is_empty() {
                continue;
            }
            let told = self.s.findings.iter().rev().take_while(|f| f.at.mono_ns >= since);
            let told: Vec<_> = told
                .filter_map(|f| match &f.kind {
                    FindingKind::Set(set) if f.cause.as_ref().is_none_or(|c| c.writer().is_none()) => {
                        Some(set)
                    }
                    _ => None,
                })
                .collect();
            // The kernel never makes another kind of it.
            let lost = |f: &SetFault| matches!(f, SetFault::PartitionLost { state, .. } if state.contains("invalid"));
            let ends = |f: &SetFinding| is_passing(f) || lost(&f.fault);
            self.s.fights.pardoned_since(&(a.cgroup.clone(), CpusetFile::Partition), since);
            if let Some(r) = self.s.runtime.get_mut(owner) {
                r.faults.retain(|(f, first, _)| first.mono_ns < since || !ends(f) || !told.contains(&f));
            }
            if let Some(r) = self.s.runtime.get_mut(owner).filter(|_| !theirs.is_empty()) {
                r.went(theirs, at);
            }
        }
    }

    /// At the beginning of every convergence: what time has come for.
    pub(super) fn attend(&mut self) {
        let now = self.now.mono_ns;
        let h = &mut self.s.hotplug;
        if h.rests_at().is_some_and(|at| now >= at) {
            h.unrest = None;
            h.again_ns = Some(now.saturating_add(AGAIN_NS));
            h.sweep = true;
            self.s.progress.rested = true;
        }
        if h.again_ns.is_some_and(|at| now >= at) {
            h.again_ns = None;
            h.sweep = true;
        }
        h.sweep |= self.s.mends.retry_ns.take_if(|at| now >= *at).is_some();
        // Nobody tells of an offline that was refused: masks are looked at, though not at every event.
        let unheard = self.s.facts.no_attempts && now.saturating_sub(h.swept_ns) >= UNHEARD_NS;
        h.sweep |= unheard;
        if h.sweep {
            h.swept_ns = now;
        }
    }

    /// A reading shows these CPUs online. True when the machine is to be read first.
    pub(super) fn online(&mut self, online: &CpuSet) -> bool {
        if online != self.s.topology.online() && !mem::replace(&mut self.s.progress.machine_read, true) {
            self.out.push(Effect::ReadMachine);
            return true;
        }
        self.s.hotplug.reported = None;
        let before = mem::replace(&mut self.s.online, online.clone());
        // What was away before the first reading concerns nobody's evidence.
        if before != *online && self.s.fitted {
            self.went(&before.difference(online));
            if !self.s.progress.rested && self.s.hotplug.is_calm() {
                self.s.hotplug.stir(self.now.mono_ns);
            }
        }
        false
    }

    /// The machine was read anew.
    pub(super) fn machine(&mut self, result: Result<Box<CpuTopology>, String>) {
        match result {
            Ok(topology) => {
                let s = &mut *self.s;
                s.chooser = Chooser::new(s.settings.strategy, s.settings.scope, &topology);
                s.fingerprint = topology.fingerprint();
                s.hotplug.learn(&topology);
                s.topology = *topology;
            }
            Err(why) => drop(self.report(FindingKind::Machine(why))),
        }
        self.observe();
    }

    /// Fits the sets to what is online and not reserved. While CPUs go and come only those of which nothing is left.
    pub(super) fn fit(&mut self) {
        let first = !mem::replace(&mut self.s.fitted, true);
        // An offline that was refused while no agent was there leaves wrong masks and nothing else.
        self.s.hotplug.sweep |= first;
        let stranded = !first && !self.s.progress.rested && !self.s.hotplug.is_calm();
        let foreign = plan::foreign(&self.s.desired(), &self.s.observed, None);
        let mut generation = self.s.generation;
        let next = || {
            generation += 1;
            generation
        };
        let s = &mut *self.s;
        let (topology, online, places) = (&s.topology, &s.online, &s.hotplug.places);
        let now = refit::Now { topology, online, foreign: &foreign, places, stranded };
        let done = refit::refit(&mut s.assignments, now, next);
        self.s.generation = generation;
        if first && let Some(fallback) = &mut self.s.fallback {
            fallback.0.clone_from(&self.s.assignments);
        }
        for changed in done {
            if changed.from != changed.to {
                self.moved(&changed.owner, &changed.from, &changed.to);
            }
            self.report(FindingKind::Refitted(changed));
        }
    }

    /// Whether partitions in the slice are to be members for the time being: what they have is all that somebody among them
    /// who has no CPU left would run on.
    pub(super) fn demote(&mut self) {
        let s = &mut *self.s;
        let before = mem::take(&mut s.demoted);
        if !s.facts.exclusive {
            let desired = s.desired();
            s.demoted = desired.strands(&s.observed);
        }
        if s.demoted == before {
            return;
        }
        let why = "it was no partition for a time, because an owner beside it had no CPU left";
        for (owner, a) in &s.assignments.owners {
            let local = a.mode == Mode::Partition && a.cgroup.is_within(&s.settings.slice);
            if let Some(r) = s.runtime.get_mut(owner).filter(|_| local) {
                r.gap(why.into(), self.now);
            }
        }
    }

    /// Owners that had no partition of their own when kernel and table agreed last, and were to have none then: they had no
    /// CPU, or another had none. That it reads `member` before they have it back is truepin's own doing.
    pub(super) fn unserved(&self) -> BTreeSet<Owner> {
        let s = &*self.s;
        let without = |a: &Assignment| a.cpus.is_disjoint(&s.online) || s.in_force(a) != a.mode;
        s.assignments.owners.iter().filter(|(_, a)| without(a)).map(|(o, _)| o.clone()).collect()
    }

    /// An epoch ends: what was seen in it stays, what was not judged in it is a gap.
    fn moved(&mut self, owner: &Owner, from: &CpuSet, to: &CpuSet) {
        let at = self.now;
        self.s.progress.moved.insert(owner.clone());
        let Some(r) = self.s.runtime.get_mut(owner).filter(|r| r.base.is_some()) else { return };
        let left = mem::take(&mut r.left);
        r.end(at, format!("it was given CPUs {to} instead of {from} within the interval (hotplug)"));
        if let (true, Some(Ended { faults, .. })) = (left, r.ended.last_mut()) {
            faults.push(format!("its tasks went to other CPUs before it was given {to}"));
        }
    }

    /// Owners that have fewer CPUs than are theirs. While CPUs go and come only those that have none: the others may be
    /// about to get them back, or others.
    pub(super) fn degraded(&self) -> BTreeSet<Problem> {
        let online = &self.s.online;
        let calm = self.s.hotplug.is_calm();
        let told = |set: &CpuSet| !set.is_subset(online) && (calm || set.is_disjoint(online));
        let problem = |(owner, set): (&Owner, &CpuSet)| Problem::Degraded {
            owner: owner.clone(),
            cpus: set.clone(),
            offline: set.difference(online),
        };
        self.s.assignments.sets().filter(|(_, set)| told(set)).map(problem).collect()
    }
}
