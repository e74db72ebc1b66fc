//! The machine: CPUs, cores, last-level caches, NUMA nodes, dies, packages.
//!
//! Problem: every placement depends on which CPUs share what, and real machines contradict the textbook: several
//! nodes in a socket and several sockets in a node, core numbers that repeat, CPUs in no node, nodes without CPUs.
//! Steps: a source fills [`RawTopology`]; [`CpuTopology::assemble`] validates it, mends what can be mended (each
//! time with an oddity in plain words) and refuses the rest; [`render`] prints it.
//! Invariants of a [`CpuTopology`]: groups of one level are disjoint, not empty, and hold online CPUs only; cores
//! partition the online CPUs; a CPU is in at most one node; everything is ordered by number. It never changes.
//!
//! A group is named by its lowest online CPU (its leader): the kernel's own numbers repeat across packages
//! and are -1 where firmware is silent, so no decision rests on them.

mod assemble;
pub mod devices;
pub mod hwloc;
pub mod machine_info;
mod raw;
pub mod render;
pub mod synthetic;
#[cfg(test)]
mod tests;
mod tree;

pub use assemble::TopologyError;
pub use devices::{Device, DeviceKind, RawDevice};
pub use raw::{Level, RawGroup, RawNode, RawTopology};

use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
};

/// The kernel's distance of a node to itself (`LOCAL_DISTANCE`, include/linux/topology.h).
pub const LOCAL_DISTANCE: u32 = 10;
/// The kernel's distance between nodes where firmware gives none (`REMOTE_DISTANCE`).
pub const REMOTE_DISTANCE: u32 = 20;

/// CPUs that share something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its lowest online CPU, which names it.
    pub leader: CpuId,
    /// Its online CPUs; never empty.
    pub cpus: CpuSet,
    /// The kernel's number, for people; not unique.
    pub kernel_id: Option<i64>,
}

/// A core: its CPUs are hardware threads of each other.
pub type Core = Group;
/// A last-level cache: L3, or L2 for CPUs without an L3 (the kubelet's uncore cache).
pub type Llc = Group;
/// A die of a package.
pub type Die = Group;
/// A package (socket).
pub type Package = Group;

/// An online CPU and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: CpuId,
    /// Its NUMA node: the first whose list holds it.
    pub node: Option<NodeId>,
    /// Index into [`CpuTopology::cores`].
    pub core: usize,
    /// Index into [`CpuTopology::llcs`]; `None` where no cache is known.
    pub llc: Option<usize>,
    /// By level, index into [`CpuTopology::groups`]; `None` where the level does not exist or is not known.
    groups: [Option<usize>; Level::ALL.len()],
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The kernel's number.
    pub id: NodeId,
    /// Its online CPUs; disjoint from every other node's; empty for memory alone.
    pub cpus: CpuSet,
    /// Its CPUs as the kernel lists them: offline ones included, overlaps not mended.
    pub listed: CpuSet,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The kernel's row of distances, as read.
    pub distance: Option<Vec<u32>>,
}

/// A validated machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuTopology {
    online: CpuSet,
    offline: CpuSet,
    present: Option<CpuSet>,
    possible: Option<CpuSet>,
    isolated: Option<CpuSet>,
    nohz_full: Option<CpuSet>,
    cpus: Vec<Cpu>,
    groups: [Vec<Group>; Level::ALL.len()],
    cores: Vec<Core>,
    llcs: Vec<Llc>,
    nodes: Vec<NumaNode>,
    /// Row-major over `nodes`.
    distances: Vec<u32>,
    oddities: Vec<String>,
}

impl CpuTopology {
    /// Online CPUs; never empty.
    #[must_use]
    pub fn online(&self) -> &CpuSet {
        &self.online
    }

    /// CPUs that are plugged in and not online.
    #[must_use]
    pub fn offline(&self) -> &CpuSet {
        &self.offline
    }

    /// CPUs that are plugged in; `None` where the kernel does not say.
    #[must_use]
    pub fn present(&self) -> Option<&CpuSet> {
        self.present.as_ref()
    }

    /// CPUs that the kernel has room for; `None` where it does not say.
    #[must_use]
    pub fn possible(&self) -> Option<&CpuSet> {
        self.possible.as_ref()
    }

    /// CPUs outside scheduling domains since boot; `None` where the kernel does not say.
    #[must_use]
    pub fn isolated(&self) -> Option<&CpuSet> {
        self.isolated.as_ref()
    }

    /// CPUs without a tick; `None` where the kernel does not say.
    #[must_use]
    pub fn nohz_full(&self) -> Option<&CpuSet> {
        self.nohz_full.as_ref()
    }

    /// Online CPUs, ascending.
    #[must_use]
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// This CPU, if it is online.
    #[must_use]
    pub fn cpu(&self, id: CpuId) -> Option<&Cpu> {
        self.cpus.binary_search_by_key(&id, |c| c.id).ok().map(|i| &self.cpus[i])
    }

    /// The groups of a level, by leader. Not every CPU need be in one.
    #[must_use]
    pub fn groups(&self, level: Level) -> &[Group] {
        &self.groups[level.index()]
    }

    /// The group of a CPU at a level.
    #[must_use]
    pub fn group_of(&self, level: Level, cpu: CpuId) -> Option<&Group> {
        self.cpu(cpu)?.groups[level.index()].map(|g| &self.groups[level.index()][g])
    }

    /// Packages, by leader.
    #[must_use]
    pub fn packages(&self) -> &[Package] {
        self.groups(Level::Package)
    }

    /// Dies, by leader.
    #[must_use]
    pub fn dies(&self) -> &[Die] {
        self.groups(Level::Die)
    }

    /// Cores, by leader. They partition the online CPUs: a CPU of which nothing is known is a core of its own
    /// here, and in no group of [`Level::Core`].
    #[must_use]
    pub fn cores(&self) -> &[Core] {
        &self.cores
    }

    /// Last-level caches, by leader: of each CPU its L3, else its L2.
    #[must_use]
    pub fn llcs(&self) -> &[Llc] {
        &self.llcs
    }

    /// The core of an online CPU.
    #[must_use]
    pub fn core_of(&self, cpu: CpuId) -> Option<&Core> {
        self.cpu(cpu).map(|c| &self.cores[c.core])
    }

    /// The online hardware threads of a CPU's core, itself included.
    #[must_use]
    pub fn siblings(&self, cpu: CpuId) -> Option<&CpuSet> {
        self.core_of(cpu).map(|c| &c.cpus)
    }

    /// The last-level cache of a CPU.
    #[must_use]
    pub fn llc_of(&self, cpu: CpuId) -> Option<&Llc> {
        self.cpu(cpu)?.llc.map(|l| &self.llcs[l])
    }

    /// The most online threads that a core has; 1 without SMT.
    #[must_use]
    pub fn threads_per_core(&self) -> usize {
        self.cores.iter().map(|c| c.cpus.len()).max().unwrap_or(1)
    }

    /// NUMA nodes, by number; empty where the kernel shows none.
    #[must_use]
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// This node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NumaNode> {
        self.node_index(id).map(|i| &self.nodes[i])
    }

    /// Place of a node in [`Self::nodes`].
    #[must_use]
    pub fn node_index(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |n| n.id).ok()
    }

    /// The NUMA node of a CPU; `None` if it is offline or in no node.
    #[must_use]
    pub fn node_of(&self, cpu: CpuId) -> Option<NodeId> {
        self.cpu(cpu)?.node
    }

    /// The nodes of some CPUs.
    #[must_use]
    pub fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        self.nodes.iter().filter(|n| !n.cpus.is_disjoint(cpus)).map(|n| n.id).collect()
    }

    /// The online CPUs of some nodes; unknown nodes have none.
    #[must_use]
    pub fn cpus_of_nodes(&self, nodes: &NodeSet) -> CpuSet {
        let mut all = CpuSet::new();
        for node in self.nodes.iter().filter(|n| nodes.contains(n.id)) {
            all |= &node.cpus;
        }
        all
    }

    /// Online CPUs that are in no node: all of them where the kernel shows no nodes.
    #[must_use]
    pub fn cpus_without_node(&self) -> CpuSet {
        self.cpus.iter().filter(|c| c.node.is_none()).map(|c| c.id).collect()
    }

    /// The kernel's distance from `a` to `b`; [`LOCAL_DISTANCE`] and [`REMOTE_DISTANCE`] where it gives none. It
    /// need not be symmetric.
    #[must_use]
    pub fn distance(&self, a: NodeId, b: NodeId) -> u32 {
        match (self.node_index(a), self.node_index(b)) {
            (Some(a), Some(b)) => self.distances[a * self.nodes.len() + b],
            _ if a == b => LOCAL_DISTANCE,
            _ => REMOTE_DISTANCE,
        }
    }

    /// What was mended or assumed, in plain words.
    #[must_use]
    pub fn oddities(&self) -> &[String] {
        &self.oddities
    }

    /// A text that changes when an assignment made on this machine may no longer mean the same: another set of
    /// online CPUs, other cores, caches, nodes or packages. Memory and boot parameters do not count.
    ///
    /// `1-<cpus>c-<cores>k-<nodes>n-<crc32>`, the checksum (`IEEE`, as crc32fast) over one line per online CPU:
    /// `cpu core llc node package`, groups by leader, `-` for none.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::with_capacity(self.cpus.len() * 20);
        let dash = |n: Option<u32>| n.map_or("-".into(), |n: u32| n.to_string());
        for cpu in &self.cpus {
            let package = self.group_of(Level::Package, cpu.id).map(|g| g.leader.0);
            let line = writeln!(
                text,
                "{} {} {} {} {}",
                cpu.id,
                self.cores[cpu.core].leader,
                dash(cpu.llc.map(|l| self.llcs[l].leader.0)),
                dash(cpu.node.map(|n| n.0)),
                dash(package),
            );
            debug_assert!(line.is_ok(), "writing to a String");
        }
        let crc = crc32fast::hash(text.as_bytes());
        format!("1-{}c-{}k-{}n-{crc:08x}", self.cpus.len(), self.cores.len(), self.nodes.len())
    }
}
