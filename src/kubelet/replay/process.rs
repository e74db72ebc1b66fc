//! One kubelet process: the static policy, the topology manager, and what they keep in memory.
//!
//! Steps: [`Process::boot`] settles configuration and reservation and loads the checkpoint; [`Process::admit`] asks for
//! hints, merges, and allocates, container by container or for the pod as a whole.
//! Invariants: the shared pool and the entries change together; what is not in the checkpoint (CPUs to reuse, CPUs
//! applied) starts empty with the process. Faults are the kubelet's: see the module above.
//! Source: kubelet 1.36, `cm/cpumanager/policy_static.go`, `cm/topologymanager/scope_{none,container,pod}.go`.

use super::{
    Admission, BootError, Config, Rejection, Reservation, Scope, Sets,
    claim::{Claim, Kind, Want},
};
use crate::{
    cpuset::CpuSet,
    hints::{self, Distances, TopologyHint},
    kubelet::{self, Containers, Exported, Machine, Setup},
    nodeset::NodeSet,
    placement::kubelet::{
        KubeletMachine, StaticOptions, TakeError, allocate, allocate_as_it_is, check_smt, take, take_as_it_is,
    },
    pod::Pod,
    request::AlignmentPolicy,
};
use std::collections::BTreeMap;

const POLICY: &str = "static";

/// What the CPU manager, the only provider here, has to say; nothing if it does not care.
type Ask = Option<hints::Demand>;

#[derive(Debug, Clone)]
pub(super) struct Process<'m> {
    machine: &'m KubeletMachine,
    distances: &'m Distances,
    pub(super) config: Config,
    pub(super) reserved: CpuSet,
    pub(super) sets: Sets,
    /// CPUs of ended init containers that later containers of the pod may have, by its UID. At most one pod has some:
    /// whoever takes CPUs drops those of the others.
    reuse: Option<(String, CpuSet)>,
    /// What each container is assumed to run on, by pod and name.
    pub(super) applied: BTreeMap<String, super::sets::ByContainer>,
}

impl<'m> Process<'m> {
    pub(super) fn boot(
        machine: &'m KubeletMachine,
        distances: &'m Distances,
        config: Config,
        file: Option<&[u8]>,
        containers: &Containers,
    ) -> Result<Self, BootError> {
        check(machine, &config)?;
        let kept = reserve(machine, &config)?;
        let setup = Setup { policy: POLICY, pod_level: config.pod_level, containers };
        let against = Machine {
            online: machine.cpus().into(),
            reserved: (&kept).into(),
            strict: config.options.strict_reservation,
        };
        let state = kubelet::start(&kubelet::load(file, setup)?, setup, &against)?;
        Ok(Self {
            machine,
            distances,
            config,
            reserved: kept,
            sets: Sets::of_state(&state)?,
            reuse: None,
            applied: BTreeMap::new(),
        })
    }

    /// The file that is on disk now.
    pub(super) fn checkpoint(&self) -> String {
        let version = if self.config.pod_level { Exported::V3 } else { Exported::V2 };
        kubelet::export(&self.sets.to_state(), POLICY, version)
    }

    /// Asks for a pod's place.
    pub(super) fn admit(&mut self, pod: &Pod) -> Admission {
        let claim = Claim::of(pod, self.config.pod_level);
        let (mut hints, mut exact) = (Vec::new(), true);
        let outcome = match (self.config.policy, self.config.scope) {
            (AlignmentPolicy::None, _) => {
                claim.containers.iter().try_for_each(|c| self.give(&claim, c, None))
            }
            (_, Scope::Container) => self.by_container(&claim, &mut hints, &mut exact),
            (_, Scope::Pod) => self.by_pod(&claim, &mut hints, &mut exact),
        };
        Admission { hints, outcome, exact }
    }

    fn by_container(
        &mut self,
        claim: &Claim<'_>,
        hints: &mut Hints,
        exact: &mut bool,
    ) -> Result<(), Rejection> {
        for want in &claim.containers {
            let hint = self.merge(self.container_ask(claim, want).as_ref(), exact)?;
            hints.push((want.name.into(), hint.clone()));
            self.give(claim, want, hint.affinity.as_ref())?;
        }
        Ok(())
    }

    fn by_pod(&mut self, claim: &Claim<'_>, hints: &mut Hints, exact: &mut bool) -> Result<(), Rejection> {
        let hint = self.merge(self.pod_ask(claim).as_ref(), exact)?;
        if claim.pod_level {
            hints.extend(claim.containers.iter().map(|c| (c.name.into(), hint.clone())));
            return self.give_pod(claim, hint.affinity.as_ref());
        }
        for want in &claim.containers {
            hints.push((want.name.into(), hint.clone()));
            self.give(claim, want, hint.affinity.as_ref())?;
        }
        Ok(())
    }

    fn merge(&self, ask: Option<&hints::Demand>, exact: &mut bool) -> Result<TopologyHint, Rejection> {
        let closest = self.config.prefer_closest.then_some(self.distances);
        let nodes: NodeSet = self.machine.nodes().map(|(id, _)| id).collect();
        let hints::Winner { merged, exact: found } =
            hints::winner(self.config.policy, &nodes, ask.as_slice(), closest);
        *exact &= found;
        if !merged.admit {
            return Err(Rejection::Affinity);
        }
        Ok(TopologyHint { affinity: merged.affinity, preferred: merged.preferred })
    }

    /// Free CPUs that pods may have.
    fn available(&self) -> CpuSet {
        self.sets.default.difference(&self.reserved)
    }

    fn reusable(&self, uid: &str) -> CpuSet {
        match &self.reuse {
            Some((pod, cpus)) if pod == uid => cpus.clone(),
            _ => CpuSet::new(),
        }
    }

    /// A container's hints: of what it holds, if it holds as many as it asks for, else of what is free.
    fn container_ask(&self, claim: &Claim<'_>, want: &Want<'_>) -> Ask {
        if want.cpus == 0 {
            return None;
        }
        match self.sets.get(claim.uid, want.name) {
            Some(held) if held.len() != want.cpus => Some(self.impossible()),
            Some(held) => Some(self.among(held, &CpuSet::new(), want.cpus)),
            None => Some(self.among(&self.available(), &self.reusable(claim.uid), want.cpus)),
        }
    }

    /// What no nodes will do for: a CPU, and none is free.
    fn impossible(&self) -> hints::Demand {
        self.among(&CpuSet::new(), &CpuSet::new(), 1)
    }

    fn among(&self, available: &CpuSet, reusable: &CpuSet, n: usize) -> hints::Demand {
        hints::Demand::cpus(self.machine, self.config.options.align_by_socket, available, reusable, n)
    }

    /// The same for all containers of a pod together.
    fn pod_ask(&self, claim: &Claim<'_>) -> Ask {
        if claim.total == 0 {
            return None;
        }
        if claim.pod_level && claim.division.is_err() {
            return Some(self.impossible());
        }
        let mut held = CpuSet::new();
        for want in &claim.containers {
            let Some(cpus) = self.sets.get(claim.uid, want.name) else { continue };
            if cpus.len() != want.cpus {
                return Some(self.impossible());
            }
            held |= cpus;
        }
        if held.len() == claim.total {
            return Some(self.among(&held, &CpuSet::new(), claim.total));
        }
        let reusable = self.reusable(claim.uid).union(&held);
        Some(self.among(&self.available(), &reusable, claim.total))
    }

    fn check_cores(&self, n: usize) -> Result<(), TakeError> {
        check_smt(self.machine, self.config.options, &self.reserved, &self.sets.default, n)
    }

    /// A container's CPUs. What it holds already is looked at after the check of cores, so that a running container
    /// can be refused.
    fn give(
        &mut self,
        claim: &Claim<'_>,
        want: &Want<'_>,
        affinity: Option<&NodeSet>,
    ) -> Result<(), Rejection> {
        if want.cpus == 0 {
            return Ok(());
        }
        self.check_cores(want.cpus)?;
        let cpus = if let Some(held) = self.sets.get(claim.uid, want.name) {
            held.clone()
        } else {
            let reusable = self.reusable(claim.uid);
            let cpus = self.allocate(claim.uid, &reusable, affinity, want.cpus)?;
            self.sets.set(claim.uid, want.name, cpus.clone());
            cpus
        };
        let mut reusable = self.reusable(claim.uid);
        match want.kind {
            Kind::Init => reusable |= &cpus,
            Kind::Sidecar | Kind::App => reusable -= &cpus,
        }
        self.reuse = Some((claim.uid.into(), reusable));
        Ok(())
    }

    /// CPUs out of the shared pool, and those to be reused. Where cores or sockets differ the kubelet's averages come to
    /// CPUs that are not free. It is followed as long as no other pod has them (reserved ones, or of the same pod), since
    /// what comes after rests on it; another pod's CPUs are never given away.
    fn allocate(
        &mut self,
        uid: &str,
        reusable: &CpuSet,
        affinity: Option<&NodeSet>,
        n: usize,
    ) -> Result<CpuSet, TakeError> {
        let (machine, options, kept, pool) =
            (self.machine, self.config.options, &self.reserved, &self.sets.default);
        let cpus = match allocate_as_it_is(machine, options, kept, pool, reusable, affinity, n)? {
            Some(cpus) if cpus.is_subset(pool) || !self.is_anothers(uid, &cpus) => cpus,
            _ => allocate(machine, options, kept, pool, reusable, affinity, n)?,
        };
        self.sets.default -= &cpus;
        Ok(cpus)
    }

    /// Whether another pod has one of these.
    fn is_anothers(&self, uid: &str, cpus: &CpuSet) -> bool {
        let entries = self.sets.entries.iter().filter(|(pod, _)| *pod != uid);
        let pods = self.sets.pods.iter().filter(|(pod, _)| *pod != uid);
        let mut sets = entries.flat_map(|(_, sets)| sets.values()).chain(pods.map(|(_, set)| set));
        sets.any(|set| !set.is_disjoint(cpus))
    }

    /// One set for the pod, and a part of it for each container. That the pod has one already is not looked at: a
    /// readmitted pod gets another, and the first is lost to everybody.
    fn give_pod(&mut self, claim: &Claim<'_>, affinity: Option<&NodeSet>) -> Result<(), Rejection> {
        if claim.total == 0 {
            return Ok(());
        }
        claim.division.clone()?;
        self.check_cores(claim.total)?;
        let all = self.allocate(claim.uid, &CpuSet::new(), affinity, claim.total)?;
        self.sets.pods.insert(claim.uid.into(), all.clone());
        // A failure from here on leaves the pod's set behind without a container.
        let parts = self.split(claim, &all)?;
        for (want, cpus) in claim.containers.iter().zip(parts) {
            self.sets.set(claim.uid, want.name, cpus);
        }
        Ok(())
    }

    /// Each container's part of its pod's set, in order.
    fn split(&self, claim: &Claim<'_>, all: &CpuSet) -> Result<Vec<CpuSet>, TakeError> {
        // As above; and what is in the shared pool stays there.
        let fits = |cpus: &CpuSet| {
            let outside = cpus.difference(all);
            outside.is_disjoint(&self.sets.default) && !self.is_anothers(claim.uid, &outside)
        };
        let part = |from: &CpuSet, n| match take_as_it_is(self.machine, self.config.options, from, n)? {
            Some(cpus) if fits(&cpus) => Ok(cpus),
            _ => take(self.machine, self.config.options, from, n),
        };
        let mut parts: Vec<Option<CpuSet>> = Vec::with_capacity(claim.containers.len());
        // What is left by all that last; init containers end, so theirs is free again.
        let mut rest = all.clone();
        for want in &claim.containers {
            parts.push(match (want.kind, want.cpus) {
                (Kind::Init, 0) => Some(rest.clone()),
                (Kind::Sidecar | Kind::App, 0) => None,
                (Kind::Init, n) => Some(part(&rest, n)?),
                (Kind::Sidecar | Kind::App, n) => {
                    let cpus = part(&rest, n)?;
                    rest -= &cpus;
                    Some(cpus)
                }
            });
        }
        Ok(parts.into_iter().map(|p| p.unwrap_or_else(|| rest.clone())).collect())
    }

    /// Assumes that a container runs on these CPUs.
    pub(super) fn note(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.applied.entry(pod.into()).or_default().insert(container.into(), cpus);
    }

    /// Takes what a container has, and what is known of it.
    pub(super) fn remove(&mut self, pod: &str, container: &str) {
        self.sets.remove(pod, container);
        if let Some(applied) = self.applied.get_mut(pod) {
            applied.remove(container);
            if applied.is_empty() {
                self.applied.remove(pod);
            }
        }
    }
}

type Hints = Vec<(String, TopologyHint)>;

/// What the managers refuse before they look at a checkpoint.
fn check(machine: &KubeletMachine, config: &Config) -> Result<(), BootError> {
    // The topology manager is made first. Under `none` it looks at nothing.
    let nodes = machine.nodes().len();
    if config.policy != AlignmentPolicy::None && nodes > config.max_nodes {
        return Err(BootError::Nodes { nodes, max: config.max_nodes });
    }
    StaticOptions::parse(config.options.names())?;
    if config.options.align_by_socket {
        if config.policy == AlignmentPolicy::SingleNumaNode {
            return Err(BootError::SocketPolicy);
        }
        let counts = machine.counts();
        if counts.sockets > counts.nodes {
            return Err(BootError::SocketMachine { sockets: counts.sockets, nodes: counts.nodes });
        }
    }
    Ok(())
}

fn reserve(machine: &KubeletMachine, config: &Config) -> Result<CpuSet, BootError> {
    match &config.reserved {
        Reservation::Count(0) => Err(BootError::NothingReserved),
        Reservation::Count(count) => {
            let (requested, available) = (*count, machine.cpus().len());
            match take_as_it_is(machine, config.options, machine.cpus(), *count) {
                Ok(Some(cpus)) if cpus.len() == *count => Ok(cpus),
                // The kubelet counts, and refuses another number.
                Ok(_) => Err(TakeError::Unaccounted { requested, available }),
                Err(source) => Err(source),
            }
            .map_err(|source| BootError::Reserve { count: *count, source })
        }
        Reservation::Cpus(cpus) if cpus.is_empty() => Err(BootError::NothingReserved),
        Reservation::Cpus(cpus) => {
            let unknown = cpus.difference(machine.cpus());
            if unknown.is_empty() {
                Ok(cpus.clone())
            } else {
                Err(BootError::ReservedUnknown { cpus: unknown })
            }
        }
    }
}
