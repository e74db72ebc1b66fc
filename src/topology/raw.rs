//! What a source says about a machine, before anything is believed.
//!
//! Problem: sysfs, hwloc XML and cAdvisor's machine-info describe the same machine in different shapes, and each
//! leaves things out: no NUMA folder on phones, no package ids on a PS3, no `cpu/online` before Linux 2.6.26.
//! Steps: a parser fills this one shape with what it read and nothing else; [`super::assemble`] decides what it means.
//! Invariant: nothing here is derived. `None` is "the source does not say", an empty set is "it says: none".

use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A level of the machine at which CPUs are grouped, outermost first. NUMA nodes are no level: they cut across.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Drawer (s390).
    Drawer,
    /// Book (s390).
    Book,
    /// Package, socket.
    Package,
    /// Die within a package.
    Die,
    /// Third-level cache.
    L3,
    /// Cluster of cores (arm64, x86 with a shared L2).
    Cluster,
    /// Second-level cache.
    L2,
    /// Core: the CPUs of one are hardware threads.
    Core,
}

impl Level {
    /// All levels, outermost first.
    pub const ALL: [Self; 8] =
        [Self::Drawer, Self::Book, Self::Package, Self::Die, Self::L3, Self::Cluster, Self::L2, Self::Core];

    /// Place in [`Self::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// The field's own word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Drawer => "drawer",
            Self::Book => "book",
            Self::Package => "package",
            Self::Die => "die",
            Self::L3 => "L3",
            Self::Cluster => "cluster",
            Self::L2 => "L2",
            Self::Core => "core",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One statement that some CPUs belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawGroup {
    /// At which level.
    pub level: Level,
    /// The source's number for it, where it gives one. Not unique: core numbers repeat in every package. A
    /// negative number is the kernel's "there is no such level here".
    pub id: Option<i64>,
    /// The CPU that says so (sysfs: whose folder holds the file); `None` when the source lists groups as such.
    pub told_by: Option<CpuId>,
    /// The CPUs, offline ones included.
    pub cpus: CpuSet,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawNode {
    /// The kernel's number.
    pub id: NodeId,
    /// Its CPUs, offline ones included; empty for memory alone.
    pub cpus: CpuSet,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The kernel's row of distances (10 is local), one for each node that was online, by ascending number.
    pub distance: Option<Vec<u32>>,
}

/// A machine as one source describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RawTopology {
    /// Where this was read, for messages: a directory, a file.
    pub source: String,
    /// CPUs for which the source has an entry of its own (sysfs: a `cpuN` folder).
    pub listed: CpuSet,
    /// Of those, the ones whose entry says that they are offline.
    pub listed_offline: CpuSet,
    /// Online CPUs, as a list.
    pub online: Option<CpuSet>,
    /// CPUs that are plugged in.
    pub present: Option<CpuSet>,
    /// CPUs that the kernel has room for.
    pub possible: Option<CpuSet>,
    /// CPUs taken out of scheduling domains at boot (`isolcpus=`, and since 6.11 isolated partitions).
    pub isolated: Option<CpuSet>,
    /// CPUs without a tick (`nohz_full=`).
    pub nohz_full: Option<CpuSet>,
    /// Every statement about groups, in the order read.
    pub groups: Vec<RawGroup>,
    /// NUMA nodes, in the order read.
    pub nodes: Vec<RawNode>,
    /// Nodes that are online, by the source's own list.
    pub nodes_online: Option<NodeSet>,
    /// Nodes that the kernel has room for.
    pub nodes_possible: Option<NodeSet>,
    /// What the reader noticed, in plain words; becomes oddities.
    pub notes: Vec<String>,
}
