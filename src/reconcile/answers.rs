//! What is told of the state, without changing it.

use super::{Finding, State};
use crate::{
    assignments::Assignment,
    assignments::Mode,
    cgroup::{CgroupId, CgroupPath},
    cpuset::CpuSet,
    explain::{Explanation, explain},
    ledger::Departure,
    nodeset::NodeSet,
    owner::Owner,
    partition::{PartitionKind, PartitionState},
    plan::{self, Problem},
    sweep::SetFinding,
    verdict::{Beside, Evidence, Subject, Verdict, judge},
};

impl State {
    /// CPUs that could be handed out now: other managers' partitions are not among them.
    #[must_use]
    pub fn free(&self) -> CpuSet {
        let foreign = plan::foreign(&self.desired(), &self.observed, None);
        self.assignments.free(&self.online).difference(&foreign)
    }

    /// What was found, oldest first.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter()
    }

    /// Examples of departures, oldest first.
    pub fn departures(&self) -> impl Iterator<Item = &Departure> {
        self.departures.iter()
    }

    /// Problems in force.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.iter()
    }

    /// Why an owner has fewer CPUs than are its own; none when it has all of them.
    #[must_use]
    pub fn degraded(&self, owner: &Owner) -> Option<&Problem> {
        self.problems.iter().find(|p| matches!(p, Problem::Degraded { owner: o, .. } if o == owner))
    }

    /// The NUMA nodes of CPUs, offline ones included as far as they were seen online before.
    #[must_use]
    pub fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        cpus.iter().filter_map(|c| self.hotplug.places.get(&c).copied()).collect()
    }

    /// The verdict on `owner` at `now`, since `from` or since its epoch began; for one that is gone, its last verdict.
    #[must_use]
    pub fn verdict(&self, owner: &Owner, from: Option<&Evidence>, now: &Evidence) -> Option<Verdict> {
        let Some(a) = self.assignments.owners.get(owner) else {
            return self.concluded.iter().rev().find(|(o, _)| o == owner).map(|(_, v)| v.clone());
        };
        let runtime = self.runtime.get(owner)?;
        // Without a base nothing was watched: the empty evidence says so.
        let nothing = Evidence {
            at: now.at,
            clock: now.clock.clone(),
            online: now.online.clone(),
            ..Evidence::default()
        };
        let base = from.or(runtime.base.as_deref()).unwrap_or(&nothing);
        // Since the assignment: all of its epochs.
        let ended = || runtime.ended.iter().filter(|e| from.is_none_or(|f| e.at >= f.at));
        let gaps = runtime.gaps.iter().filter(|(_, at)| *at >= base.at).map(|(why, _)| why.clone());
        let away = runtime.away.iter().filter(|(_, at)| *at >= base.at);
        let away = away.fold(CpuSet::new(), |all, (cpus, _)| all.union(cpus));
        let away = (!away.is_empty()).then(|| format!("CPUs {away} went offline within the interval"));
        let unheard = self.facts.no_uevents.then(|| {
            "CPU hotplug is not heard (no uevents): a CPU that went and came within the interval was not seen".to_owned()
        });
        let subject = Subject {
            owner: owner.clone(),
            cpus: a.cpus.clone(),
            mode: self.in_force(a),
            cgroup: runtime.id,
            sets_swept: self.facts.cpuset && self.observed.cpuset(&a.cgroup).is_some(),
            beside: Beside {
                faults: ended().flat_map(|e| e.faults.iter().cloned()).collect(),
                gaps: ended().map(|e| e.why.clone()).chain(away).chain(gaps).chain(unheard).collect(),
            },
            // The kernel moves them off an isolated partition's CPUs, so none has business there.
            kthread_budget_ns_per_s: match a.kind() {
                PartitionKind::Isolated => 0,
                PartitionKind::Root | PartitionKind::Member => self.settings.kthread_budget_ns_per_s,
            },
        };
        let faults: Vec<SetFinding> = runtime
            .faults
            .iter()
            .filter(|(_, _, last)| *last >= base.at)
            .map(|(f, _, _)| f.clone())
            .collect();
        Some(judge(&subject, base, now, &faults, self.settings.tolerance))
    }

    /// The path of a cgroup id among those last read.
    #[must_use]
    pub fn path_of(&self, id: CgroupId) -> Option<&CgroupPath> {
        self.observed.cgroups.iter().find(|(_, c)| c.id == id).map(|(p, _)| p)
    }

    /// Owners that should have a partition and have none, as last read, and why.
    #[must_use]
    pub fn broken_partitions(&self) -> Vec<(Owner, PartitionState, Explanation)> {
        let one = |(owner, a): (&Owner, &Assignment)| {
            let state = self.observed.cpuset(&a.cgroup)?.partition.clone()?;
            let why = explain(&self.observed, &a.cgroup, &a.cpus)?;
            // Without a CPU it cannot be one, and runs in the pool meanwhile: it is degraded, and that is told.
            let may = self.in_force(a) == Mode::Partition && !a.cpus.is_disjoint(&self.online);
            may.then(|| (owner.clone(), state, why))
        };
        self.assignments.owners.iter().filter_map(one).collect()
    }
}
