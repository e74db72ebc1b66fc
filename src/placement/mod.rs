//! Request + topology + what is free -> CPUs, with the reason; or a refusal that says what would fit.
//!
//! [`aligned`] is the strategy `best`, over one way of counting what is free (`inventory`); [`kubelet`] decides as the
//! kubelet does. A strategy is a pure function: the same sets give the same CPUs, whatever order anything was read in.

pub mod aligned;
mod chooser;
mod fill;
mod inventory;
pub mod kubelet;
mod refusal;
mod subsets;
#[cfg(test)]
mod tests;

pub(crate) use aligned::split_memory;
pub use aligned::{place, place_beside};
pub use chooser::{CLOSEST, Chooser, Room, Scope, Strategy, StrategyError, Within};
pub use refusal::{Fits, NodeFree, Refusal, RefusalKind};

use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
    topology::CpuTopology,
};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// CPUs for a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// As many as were asked for, all of them free.
    pub cpus: CpuSet,
    /// The NUMA nodes they are on; empty where the kernel shows none.
    pub nodes: NodeSet,
    /// What they share.
    pub reason: Reason,
    /// Memory, if any was asked for: bytes by node.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub memory: BTreeMap<NodeId, u64>,
}

/// What a placement's CPUs share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// How many CPUs.
    pub cpus: usize,
    /// The NUMA nodes.
    pub nodes: NodeSet,
    /// The last-level caches, by leader.
    pub llcs: Vec<CpuId>,
    /// Cores of which every online thread is in the placement.
    pub whole_cores: usize,
    /// CPUs on other cores: somebody else may run on their siblings.
    pub shared: CpuSet,
    /// Of the nodes, those that are not near as asked.
    pub far: NodeSet,
}

impl Placement {
    /// Describes CPUs on a machine. `near` is what was asked for; empty for nothing.
    #[must_use]
    pub fn of(topology: &CpuTopology, cpus: CpuSet, near: &NodeSet) -> Self {
        let nodes = topology.nodes_of(&cpus);
        let llcs = topology.llcs().iter().filter(|l| !l.cpus.is_disjoint(&cpus)).map(|l| l.leader).collect();
        let mut shared = cpus.clone();
        let mut whole_cores = 0;
        for core in topology.cores().iter().filter(|c| c.cpus.is_subset(&cpus)) {
            whole_cores += 1;
            shared -= &core.cpus;
        }
        let far = if near.is_empty() { NodeSet::new() } else { nodes.difference(near) };
        let reason = Reason { cpus: cpus.len(), nodes: nodes.clone(), llcs, whole_cores, shared, far };
        Self { cpus, nodes, reason, memory: BTreeMap::new() }
    }
}

/// `1 node`, `2 nodes`.
fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// `node 1`, `nodes 0-1`.
fn nodes_text(nodes: &NodeSet) -> String {
    format!("{} {nodes}", if nodes.len() == 1 { "node" } else { "nodes" })
}

/// `8 CPUs on node 1, LLC of CPU 8, 4 whole cores`.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&counted(self.cpus, "CPU"))?;
        if !self.nodes.is_empty() {
            write!(f, " on {}", nodes_text(&self.nodes))?;
        }
        match self.llcs.as_slice() {
            [] => {}
            [one] => write!(f, ", LLC of CPU {one}")?,
            several => {
                let leaders: CpuSet = several.iter().copied().collect();
                write!(f, ", LLCs of CPUs {leaders}")?;
            }
        }
        if self.whole_cores > 0 {
            write!(f, ", {}", counted(self.whole_cores, "whole core"))?;
        }
        match self.shared.len() {
            0 => {}
            1 => write!(f, ", CPU {} on a core shared with others", self.shared)?,
            _ => write!(f, ", CPUs {} on cores shared with others", self.shared)?,
        }
        if !self.far.is_empty() {
            write!(f, ", {} not near as asked", nodes_text(&self.far))?;
        }
        Ok(())
    }
}
