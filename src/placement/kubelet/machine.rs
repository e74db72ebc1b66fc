//! The machine as the kubelet's static policy sees it: four numbers per CPU, and averages.
//!
//! Problem: the kubelet decides by the numbers of groups (lowest first) and by integer averages over counters that need
//! not agree with the CPUs; [`CpuTopology`] is true and knows neither. Steps: [`Labels`] says which core, socket, node
//! and uncore cache each CPU is in, in the kubelet's numbers; [`KubeletCounts`] holds the averages' counters;
//! [`KubeletMachine`] indexes both, so that nothing is searched for when CPUs are chosen.
//! Invariants: places of groups ascend with their numbers; each CPU is in one group of each kind.

use super::mask::Mask;
use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
    topology::{CpuTopology, Group, Level},
};

/// Counters that the kubelet computes with (`CPUTopology` in its `pkg/kubelet/cm/cpumanager/topology`): by default how
/// many there are; a recorded machine may declare others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubeletCounts {
    /// CPUs.
    pub cpus: usize,
    /// Cores.
    pub cores: usize,
    /// Sockets.
    pub sockets: usize,
    /// NUMA nodes with CPUs.
    pub nodes: usize,
    /// Uncore (last-level) caches.
    pub uncores: usize,
}

impl KubeletCounts {
    /// What the machine itself says.
    #[must_use]
    pub fn of(topology: &CpuTopology) -> Self {
        Labels::of(topology).counts()
    }

    /// Threads per core, rounded down; 0 without cores.
    #[must_use]
    pub fn cpus_per_core(&self) -> usize {
        self.cpus.checked_div(self.cores).unwrap_or(0)
    }

    /// CPUs per socket, rounded down; 0 without sockets.
    #[must_use]
    pub fn cpus_per_socket(&self) -> usize {
        self.cpus.checked_div(self.sockets).unwrap_or(0)
    }

    /// CPUs per uncore cache, rounded down; 0 without caches.
    #[must_use]
    pub fn cpus_per_uncore(&self) -> usize {
        self.cpus.checked_div(self.uncores).unwrap_or(0)
    }
}

/// Where a CPU is, in the kubelet's numbers. They are compared and sorted, nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// The CPU.
    pub cpu: CpuId,
    /// Its core.
    pub core: i64,
    /// Its socket.
    pub socket: i64,
    /// Its NUMA node.
    pub node: NodeId,
    /// Its uncore cache.
    pub uncore: i64,
}

/// Where every CPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels(Vec<Label>);

impl Labels {
    /// Sorted by CPU; of a CPU that is named twice the first counts.
    #[must_use]
    pub fn new(mut labels: Vec<Label>) -> Self {
        labels.sort_by_key(|l| l.cpu);
        labels.dedup_by_key(|l| l.cpu);
        Self(labels)
    }

    /// The numbers that the kubelet would use on this machine: of a core its lowest thread; of sockets and caches the
    /// kernel's, where those tell all of them apart, else the lowest CPU. A CPU without a cache counts as in its
    /// socket's, one without a socket as in a socket of its own core. Where the kernel shows no nodes all is node 0;
    /// where it does, CPUs in none of them do not exist for the kubelet.
    #[must_use]
    pub fn of(topology: &CpuTopology) -> Self {
        let sockets = numbers(topology.packages());
        let caches = numbers(topology.llcs());
        let label = |cpu: &crate::topology::Cpu| {
            let core = i64::from(topology.cores()[cpu.core].leader.0);
            let package = topology.group_of(Level::Package, cpu.id);
            let socket = package.map_or(core, |p| number(topology.packages(), &sockets, p.leader));
            let uncore = cpu.llc.map_or(socket, |l| caches[l]);
            let node = match cpu.node {
                Some(node) => node,
                None if topology.nodes().is_empty() => NodeId(0),
                None => return None,
            };
            Some(Label { cpu: cpu.id, core, socket, node, uncore })
        };
        Self(topology.cpus().iter().filter_map(label).collect())
    }

    /// Of each CPU, ascending.
    #[must_use]
    pub fn as_slice(&self) -> &[Label] {
        &self.0
    }

    /// How many different ones there are.
    #[must_use]
    pub fn counts(&self) -> KubeletCounts {
        let distinct = |of: fn(&Label) -> i64| sorted(self.0.iter().map(of)).len();
        KubeletCounts {
            cpus: self.0.len(),
            cores: distinct(|l| l.core),
            sockets: distinct(|l| l.socket),
            nodes: distinct(|l| i64::from(l.node.0)),
            uncores: distinct(|l| l.uncore),
        }
    }
}

fn sorted(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut numbers: Vec<i64> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// By place: the kernel's numbers if all are there, not negative, and differ; else the leaders.
fn numbers(groups: &[Group]) -> Vec<i64> {
    let kernel: Vec<i64> = groups.iter().filter_map(|g| g.kernel_id.filter(|id| *id >= 0)).collect();
    if sorted(kernel.iter().copied()).len() == groups.len() {
        return kernel;
    }
    groups.iter().map(|g| i64::from(g.leader.0)).collect()
}

fn number(groups: &[Group], numbers: &[i64], leader: CpuId) -> i64 {
    groups.binary_search_by_key(&leader, |g| g.leader).map_or(i64::from(leader.0), |at| numbers[at])
}

/// CPUs with one number each, by it.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    ids: Vec<i64>,
    cpus: Vec<CpuSet>,
    /// The same as `cpus`.
    pub(super) masks: Vec<Mask>,
}

impl Groups {
    fn new(labels: &Labels, of: fn(&Label) -> i64) -> Self {
        let ids = sorted(labels.0.iter().map(of));
        let mut members: Vec<Vec<CpuId>> = vec![Vec::new(); ids.len()];
        for label in &labels.0 {
            if let Ok(at) = ids.binary_search(&of(label)) {
                members[at].push(label.cpu);
            }
        }
        let cpus: Vec<CpuSet> = members.into_iter().map(|cpus| cpus.into_iter().collect()).collect();
        let masks = cpus.iter().map(Mask::of).collect();
        Self { ids, cpus, masks }
    }

    /// By place in this, the places of `others` of which a CPU is in it, ascending.
    fn touching(&self, others: &Self) -> Vec<Vec<Part>> {
        let of = |cpus: &CpuSet| {
            let parts = others.cpus.iter().enumerate().map(|(at, other)| (at, other.intersection(cpus)));
            let parts = parts.filter(|(_, shared)| !shared.is_empty());
            parts.map(|(at, shared)| Part { at, shared: Mask::of(&shared) }).collect()
        };
        self.cpus.iter().map(of).collect()
    }
}

/// A group that lies at least in part in another.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Its place.
    pub(super) at: usize,
    /// The CPUs that are in both.
    pub(super) shared: Mask,
}

/// What is where: places of one kind by places of another.
#[derive(Debug, Clone)]
pub(super) struct Inside {
    pub(super) nodes_of_socket: Vec<Vec<Part>>,
    pub(super) sockets_of_node: Vec<Vec<Part>>,
    pub(super) uncores_of_node: Vec<Vec<Part>>,
    /// Places of cores, ascending.
    pub(super) cores_of_socket: Vec<Vec<u32>>,
    pub(super) cores_of_node: Vec<Vec<u32>>,
    pub(super) cores_of_uncore: Vec<Vec<u32>>,
}

/// The places of a CPU's groups.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) core: u32,
    pub(super) socket: u32,
    pub(super) node: u32,
    pub(super) uncore: u32,
}

/// The machine as the kubelet sees it. Built once, used for every choice.
#[derive(Debug, Clone)]
pub struct KubeletMachine {
    counts: KubeletCounts,
    cpus: CpuSet,
    pub(super) cores: Groups,
    pub(super) sockets: Groups,
    pub(super) nodes: Groups,
    pub(super) uncores: Groups,
    pub(super) inside: Inside,
    /// By CPU number; numbers that are no CPU hold nothing of use.
    pub(super) places: Vec<Place>,
    /// The CPUs of core `c` are `threads[first_thread[c]..first_thread[c + 1]]`, ascending.
    threads: Vec<u32>,
    first_thread: Vec<usize>,
    /// The most CPUs that a core has.
    pub(super) most_threads: usize,
    /// The fewest.
    pub(super) least_threads: usize,
}

impl KubeletMachine {
    /// As the kubelet would see this machine.
    #[must_use]
    pub fn new(topology: &CpuTopology) -> Self {
        let labels = Labels::of(topology);
        let counts = labels.counts();
        Self::labelled(&labels, counts)
    }

    /// The same with other counters.
    #[must_use]
    pub fn with_counts(topology: &CpuTopology, counts: KubeletCounts) -> Self {
        Self::labelled(&Labels::of(topology), counts)
    }

    /// With the numbers of every group given.
    #[must_use]
    pub fn labelled(labels: &Labels, counts: KubeletCounts) -> Self {
        let cores = Groups::new(labels, |l| l.core);
        let sockets = Groups::new(labels, |l| l.socket);
        let nodes = Groups::new(labels, |l| i64::from(l.node.0));
        let uncores = Groups::new(labels, |l| l.uncore);

        let cpus: CpuSet = labels.0.iter().map(|l| l.cpu).collect();
        let mut places = vec![Place::default(); cpus.last().map_or(0, |c| c.0 as usize + 1)];
        let mut cores_of = [&sockets, &nodes, &uncores].map(|g| vec![Vec::new(); g.ids.len()]);
        for (at, core) in (0_u32..).zip(&cores.cpus) {
            for cpu in core.iter() {
                places[cpu.0 as usize].core = at;
            }
        }
        for (of, groups) in [&sockets, &nodes, &uncores].into_iter().enumerate() {
            for (at, group) in (0_u32..).zip(&groups.cpus) {
                for cpu in group.iter() {
                    let place = &mut places[cpu.0 as usize];
                    *[&mut place.socket, &mut place.node, &mut place.uncore][of] = at;
                    cores_of[of][at as usize].push(place.core);
                }
            }
            for list in &mut cores_of[of] {
                list.sort_unstable();
                list.dedup();
            }
        }
        let [cores_of_socket, cores_of_node, cores_of_uncore] = cores_of;
        let inside = Inside {
            nodes_of_socket: sockets.touching(&nodes),
            sockets_of_node: nodes.touching(&sockets),
            uncores_of_node: nodes.touching(&uncores),
            cores_of_socket,
            cores_of_node,
            cores_of_uncore,
        };
        let mut threads = Vec::with_capacity(places.len());
        let mut first_thread = vec![0];
        for core in &cores.cpus {
            threads.extend(core.iter().map(|c| c.0));
            first_thread.push(threads.len());
        }
        let most_threads = cores.masks.iter().map(|m| m.len).max().unwrap_or(1);
        let least_threads = cores.masks.iter().map(|m| m.len).min().unwrap_or(1);
        Self {
            counts,
            cpus,
            cores,
            sockets,
            nodes,
            uncores,
            inside,
            places,
            threads,
            first_thread,
            most_threads,
            least_threads,
        }
    }

    /// The CPUs of the core at this place, ascending.
    pub(super) fn threads(&self, core: u32) -> &[u32] {
        let core = core as usize;
        &self.threads[self.first_thread[core]..self.first_thread[core + 1]]
    }

    /// The counters it computes with.
    #[must_use]
    pub fn counts(&self) -> KubeletCounts {
        self.counts
    }

    /// Every CPU.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        &self.cpus
    }

    /// Nodes with CPUs, ascending, each with its CPUs (never empty).
    #[must_use]
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &CpuSet)> {
        let id = |id: &i64| NodeId(u32::try_from(*id).unwrap_or(u32::MAX));
        self.nodes.ids.iter().map(id).zip(&self.nodes.cpus)
    }

    /// Sockets with CPUs, by the kubelet's number, each with its CPUs (never empty).
    #[must_use]
    pub fn sockets(&self) -> impl ExactSizeIterator<Item = (i64, &CpuSet)> {
        self.sockets.ids.iter().copied().zip(&self.sockets.cpus)
    }

    /// The CPUs of some nodes.
    #[must_use]
    pub fn cpus_of_nodes(&self, nodes: &NodeSet) -> CpuSet {
        let mut all = CpuSet::new();
        for (_, cpus) in self.nodes().filter(|(id, _)| nodes.contains(*id)) {
            all |= cpus;
        }
        all
    }

    /// The CPUs of every socket that one of the nodes touches.
    #[must_use]
    pub fn cpus_of_sockets_of(&self, nodes: &NodeSet) -> CpuSet {
        let touching = self.cpus_of_nodes(nodes);
        let mut all = CpuSet::new();
        for (_, cpus) in self.sockets().filter(|(_, cpus)| !cpus.is_disjoint(&touching)) {
            all |= cpus;
        }
        all
    }

    /// The CPUs of every core of which one is in `cpus`.
    #[must_use]
    pub fn with_siblings(&self, cpus: &CpuSet) -> CpuSet {
        let mut all = CpuSet::new();
        for core in self.cores.cpus.iter().filter(|c| !c.is_disjoint(cpus)) {
            all |= core;
        }
        all
    }
}
