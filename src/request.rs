//! What an owner asks for.

use crate::{nodeset::NodeSet, owner::Owner};
use serde::{Deserialize, Serialize};

/// How strictly CPUs must be near each other (the kubelet's topology manager policies).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlignmentPolicy {
    /// Any node.
    None,
    /// The fewest nodes that are possible now.
    #[default]
    BestEffort,
    /// The fewest nodes that the machine could give when empty, else refused.
    Restricted,
    /// One node, else refused.
    SingleNumaNode,
}

impl AlignmentPolicy {
    /// The policy's name, as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        }
    }
}

/// How exclusivity is to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// Partition where the kernel can make one of the cgroup, else member.
    #[default]
    Auto,
    /// A cpuset partition: the kernel keeps everybody else out.
    Partition,
    /// A cpuset partition without load balancing inside (since minor version 2 of the record).
    Isolated,
    /// Disjoint `cpuset.cpus` everywhere: nothing keeps a new cgroup or the root's own tasks out.
    Member,
}

/// A request for exclusive CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Who asks.
    pub owner: Owner,
    /// How many CPUs; at least 1.
    pub cpus: u32,
    /// How near.
    #[serde(default)]
    pub numa: AlignmentPolicy,
    /// Only whole cores, so that no other owner runs on a sibling thread.
    #[serde(default)]
    pub whole_cores: bool,
    /// Nodes to prefer, from a device's place; empty for none.
    #[serde(default)]
    pub near: NodeSet,
    /// How exclusivity is to be had.
    #[serde(default)]
    pub isolation: Isolation,
    /// Bytes of memory that are to be on the nodes of the CPUs; 0: memory comes from wherever the kernel takes it.
    #[serde(default)]
    pub memory: u64,
}
