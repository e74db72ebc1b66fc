//! Scheduler domains, as far as they decide anything: the bandwidth of the deadline servers.
//!
//! Each CPU has a server that holds 5 % of it. A domain whose CPUs would be too few for its servers refuses to
//! lose one: EBUSY when the last CPU goes offline, or when the list of a partition is emptied. But a domain is
//! charged only when it is *built*; a rebuild that finds it unchanged clears its account and does not fill it
//! again (6.12; 7.3 does). So the same offline attempt is refused or taken depending on what else happened before.

use super::{FakeKernel, Ix, ROOT, State};
use truepin::{CpuId, CpuSet, partition::PartitionKind};

/// The share of a CPU that its server holds, and the most that may be promised, in percent.
const SERVER_PERCENT: usize = 5;
const MOST_PERCENT: usize = 95;

/// CPUs that the scheduler balances among themselves.
#[derive(Debug, Clone)]
pub(super) struct Domain {
    cpus: CpuSet,
    /// Whether the servers of its CPUs are on its account.
    charged: bool,
}

impl Domain {
    pub(super) fn built(cpus: CpuSet) -> Self {
        Self { cpus, charged: true }
    }
}

impl FakeKernel {
    /// Whether the account of the domain that `cpu` is in can be met by the CPUs of `left`. CPUs outside of
    /// every domain (isolated or offline) have an empty account.
    pub(super) fn has_bandwidth(&self, cpu: Option<CpuId>, left: &CpuSet) -> bool {
        if self.behaviour.is_local_only() {
            // No servers yet.
            return true;
        }
        let domain = cpu.and_then(|cpu| self.domains.iter().rfind(|d| d.charged && d.cpus.contains(cpu)));
        let account = domain.map_or(0, |d| d.cpus.len());
        MOST_PERCENT * left.intersection(&self.active).len() >= SERVER_PERCENT * account
    }

    /// The CPUs of the domain that `cpu` is in; empty on an isolated CPU.
    pub(super) fn domain_with(&self, cpu: CpuId) -> CpuSet {
        let domain = self.domains.iter().rfind(|d| d.cpus.contains(cpu));
        domain.map_or_else(CpuSet::new, |d| d.cpus.clone())
    }

    /// At the end of a change: rebuilds where something asked for it.
    pub(super) fn rebuild_domains(&mut self) {
        let lax = self.behaviour.is_lax();
        if lax {
            self.keep_house();
        }
        if !std::mem::take(&mut self.rebuild) || !lax && self.races_with_hotplug() {
            return;
        }
        let domains = self.wanted_domains();
        let kept = |cpus: &CpuSet| !lax && self.domains.iter().any(|d| d.cpus == *cpus);
        self.domains = domains.into_iter().map(|cpus| Domain { charged: !kept(&cpus), cpus }).collect();
    }

    /// From 7.x on, unbound kernel threads keep off isolated CPUs, and stay on those of `root` partitions.
    fn keep_house(&mut self) {
        let home = self.possible.difference(&self.isolated);
        let unbound = |t: &&mut super::Task| t.traits.kthread && !t.traits.bound;
        for task in self.tasks.values_mut().filter(unbound) {
            task.mask = home.clone();
        }
    }

    /// A partition that still counts a CPU that has just left.
    fn races_with_hotplug(&self) -> bool {
        if self.handed_out.is_empty() {
            return self.cs(ROOT).effective != self.active;
        }
        self.counts_the_gone(ROOT)
    }

    fn counts_the_gone(&self, i: Ix) -> bool {
        self.cs(i).state.is_valid()
            && (!self.cs(i).effective.is_subset(&self.active)
                || self.cpuset_children(i).into_iter().any(|c| self.counts_the_gone(c)))
    }

    /// The root's set and that of every `root` partition. Where hotplug has left a CPU to two of them, 6.12 counts
    /// those as one and drops as many sets from the end of the list.
    fn wanted_domains(&self) -> Vec<CpuSet> {
        let mut domains = vec![self.cs(ROOT).effective.clone()];
        if !self.handed_out.is_empty() {
            for child in self.cpuset_children(ROOT) {
                self.domains_below(child, &mut domains);
            }
        }
        if !self.behaviour.is_lax() {
            domains.truncate(apart(&domains));
        }
        domains
    }

    fn domains_below(&self, i: Ix, domains: &mut Vec<CpuSet>) {
        let cs = self.cs(i);
        if cs.state == State::Valid(PartitionKind::Root) && !cs.effective.is_empty() {
            domains.push(cs.effective.clone());
        }
        if cs.state.is_valid() || !cs.exclusive.is_empty() {
            for child in self.cpuset_children(i) {
                self.domains_below(child, domains);
            }
        }
    }
}

/// How many sets remain once those that overlap are merged.
fn apart(sets: &[CpuSet]) -> usize {
    let mut merged: Vec<CpuSet> = Vec::new();
    for set in sets {
        let mut set = set.clone();
        merged.retain(|other| {
            let apart = other.is_disjoint(&set);
            if !apart {
                set |= other;
            }
            apart
        });
        merged.push(set);
    }
    merged.len()
}
