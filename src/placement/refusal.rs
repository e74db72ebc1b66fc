//! Why there are no CPUs for a request, what was free where, and what would fit: data, and a sentence for an operator.

use super::{counted, nodes_text};
use crate::{
    cpuset::CpuSet,
    nodeset::{NodeId, NodeSet},
    request::AlignmentPolicy,
};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// A request that cannot be served, and what could.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
pub struct Refusal {
    /// Why.
    pub kind: RefusalKind,
    /// CPUs asked for.
    pub asked: u32,
    /// How near they had to be.
    pub policy: AlignmentPolicy,
    /// Whether only whole cores would do.
    pub whole_cores: bool,
    /// The nodes that they had to be near; empty for any.
    pub near: NodeSet,
    /// CPUs that the machine has to give when nothing is taken.
    pub allocatable: usize,
    /// What is free, by node: every node with online CPUs, then the CPUs without a node.
    pub free: Vec<NodeFree>,
    /// What would fit now.
    pub fits: Fits,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "why")]
pub enum RefusalKind {
    /// No CPU was asked for.
    Nothing,
    /// `near` names nodes that the machine does not have.
    UnknownNodes {
        /// Those nodes.
        nodes: NodeSet,
    },
    /// Fewer CPUs are free.
    NotEnough,
    /// Whole cores of this machine never add up to this number.
    NotWholeCores {
        /// The next smaller number that they add up to.
        below: Option<usize>,
        /// The next larger one.
        above: Option<usize>,
    },
    /// Enough CPUs are free, but not on wholly free cores.
    NotEnoughWholeCores,
    /// The CPUs would be on more nodes than the policy allows.
    Unaligned {
        /// Nodes that it would take now.
        needs: usize,
        /// Nodes that it would take if nothing were taken; `None` if even that is not possible.
        when_empty: Option<usize>,
    },
    /// The nodes that are near do not have them.
    NotNear,
    /// Memory was asked for, and the kernel shows no NUMA nodes on which it could be.
    MemoryWithoutNodes,
    /// The CPUs are there, the memory is not free on their nodes (or on as many nodes as the policy allows).
    NotEnoughMemory {
        /// Bytes asked for.
        memory: u64,
        /// Bytes that are free, by node with CPUs.
        free: BTreeMap<NodeId, u64>,
    },
}

/// What is free on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeFree {
    /// The node; `None` for the CPUs that are in none.
    pub node: Option<NodeId>,
    /// Free CPUs.
    pub cpus: CpuSet,
    /// Cores of which every online thread is free.
    pub whole_cores: usize,
}

/// What would fit now, on the same terms otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fits {
    /// The most CPUs on one node (or among those without).
    pub one_node: usize,
    /// The most CPUs on any nodes.
    pub any_nodes: usize,
    /// Where best-effort would put the CPUs asked for.
    pub best_effort: Option<NodeSet>,
}

impl Refusal {
    /// `4 on node 0 (2 whole cores), 8 on each of nodes 1-3 (4 whole cores)`.
    fn free_text(&self) -> String {
        let mut alike: Vec<(usize, usize, NodeSet, bool)> = Vec::new();
        for free in &self.free {
            let (cpus, cores) = (free.cpus.len(), free.whole_cores);
            let homeless = free.node.is_none();
            let nodes: NodeSet = free.node.into_iter().collect();
            match alike.iter_mut().find(|a| (a.0, a.1) == (cpus, cores) && !a.3 && !homeless) {
                Some(same) => same.2 |= &nodes,
                None => alike.push((cpus, cores, nodes, homeless)),
            }
        }
        let text = |(cpus, cores, nodes, homeless): &(usize, usize, NodeSet, bool)| {
            let place = match (homeless, nodes.len()) {
                (true, _) if self.free.len() == 1 => String::new(),
                (true, _) => " on no node".into(),
                (_, 1) => format!(" on node {nodes}"),
                _ => format!(" on each of nodes {nodes}"),
            };
            let cores =
                if *cpus > 0 { format!(" ({})", counted(*cores, "whole core")) } else { String::new() };
            format!("{cpus}{place}{cores}")
        };
        let parts: Vec<String> = alike.iter().map(text).collect();
        parts.join(", ")
    }

    /// What was asked for, as far as it matters for the refusal.
    fn asked_text(&self) -> String {
        let cores = if self.whole_cores { " on whole cores" } else { "" };
        format!("{}{cores} asked for", counted(self.asked as usize, "CPU"))
    }

    fn best_effort_text(&self) -> String {
        match &self.fits.best_effort {
            Some(nodes) if !nodes.is_empty() => {
                format!("; best-effort would fit {} on {}", self.asked, nodes_text(nodes))
            }
            Some(_) => format!("; best-effort would fit {}", self.asked),
            None => format!("; the largest that fits at all is {}", self.fits.any_nodes),
        }
    }
}

/// `512 MiB`, `1.5 GiB`; rounded down.
fn bytes_text(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes {
        0 => "nothing".into(),
        b if b < MIB => format!("{b} bytes"),
        b if b < 1024 * MIB => format!("{} MiB", b / MIB),
        b => format!("{}.{} GiB", b / MIB / 1024, b / MIB % 1024 * 10 / 1024),
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, free) = (self.asked_text(), self.free_text());
        match &self.kind {
            RefusalKind::Nothing => f.write_str("no CPU asked for: ask for at least 1"),
            RefusalKind::UnknownNodes { nodes } => {
                write!(f, "{asked} near {}, which this machine does not have", nodes_text(nodes))
            }
            RefusalKind::NotEnough => {
                let total: usize = self.free.iter().map(|n| n.cpus.len()).sum();
                write!(f, "{asked}, {total} free")?;
                if total > 0 && self.free.iter().any(|n| n.node.is_some()) {
                    write!(f, ": {free}")?;
                }
                if self.whole_cores && self.fits.any_nodes < total {
                    write!(f, "; the largest that fits is {}", self.fits.any_nodes)?;
                }
                if self.asked as usize > self.allocatable {
                    write!(f, "; with nothing taken the machine has {}", self.allocatable)?;
                }
                Ok(())
            }
            RefusalKind::NotWholeCores { below, above } => {
                let would: Vec<String> = below.iter().chain(above).map(ToString::to_string).collect();
                if would.is_empty() {
                    return write!(f, "{asked}, and no core can be given as a whole");
                }
                write!(f, "{asked}: {} do not fill whole cores, {} would", self.asked, would.join(" or "))
            }
            RefusalKind::NotEnoughWholeCores => {
                write!(f, "{asked}; free are {free}; the largest that fits is {}", self.fits.any_nodes)
            }
            RefusalKind::Unaligned { needs, when_empty } => {
                match self.policy {
                    AlignmentPolicy::SingleNumaNode => write!(f, "{asked} on one node")?,
                    _ => write!(f, "{asked} on as few nodes as an empty machine needs")?,
                }
                if !self.near.is_empty() {
                    write!(f, " near {}", nodes_text(&self.near))?;
                }
                match when_empty {
                    Some(empty) if empty < needs => write!(f, ": {needs} needed now instead of {empty}")?,
                    Some(empty) => write!(f, ": {empty} needed even with nothing taken")?,
                    None => {}
                }
                write!(f, "; free are {free}; the largest that fits one node is {}", self.fits.one_node)?;
                f.write_str(&self.best_effort_text())
            }
            RefusalKind::MemoryWithoutNodes => write!(
                f,
                "{asked} with memory on their nodes, and this machine shows no NUMA nodes; ask without memory"
            ),
            RefusalKind::NotEnoughMemory { memory, free } => {
                let free: Vec<String> = free
                    .iter()
                    .map(|(node, bytes)| format!("{} on node {node}", bytes_text(*bytes)))
                    .collect();
                write!(
                    f,
                    "{asked} with {} of memory on the same nodes ({}); free are {}",
                    bytes_text(*memory),
                    self.policy.name(),
                    free.join(", ")
                )
            }
            RefusalKind::NotNear => {
                write!(
                    f,
                    "{asked} near {} ({}); free are {free}",
                    nodes_text(&self.near),
                    self.policy.name()
                )?;
                f.write_str(&self.best_effort_text())
            }
        }
    }
}
