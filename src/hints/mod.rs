//! Which NUMA nodes a request should be on: the hints of each resource, and the one that all agree on.
//!
//! Problem: CPUs, memory and devices each can be had on many sets of nodes, of which a few are as small as the machine
//! allows (*preferred*). The kubelet writes all of them down (2^N per resource) and then tries every combination, which
//! is minutes on 8 nodes and four resources. Its answer is well defined, though, and can be had without the lists.
//! Steps: a [`Demand`] says what one resource needs and what each node has ([`Demand::cpus`], [`Demand::memory`],
//! [`Demand::devices`]); [`winner`] goes from demands to the merged hint. The lists exist for comparison and for hints
//! that come from outside: [`Demand::hints`] writes one down in the kubelet's order, [`merge`] merges [`Opinion`]s.
//! [`pods`] says how many CPUs the containers of a pod ask for.
//! Invariants: hints are by NUMA node, never by socket; [`winner`] equals [`merge`] over the lists of its demands;
//! the order of providers decides nothing.
//! Source: kubelet 1.36, `cm/topologymanager`, and the hint providers in `cm/{cpu,memory,device}manager`.

mod achievable;
mod cpu;
mod demand;
mod devices;
mod distances;
mod limits;
mod list;
mod memory;
mod merge;
mod near;
pub mod pods;
mod search;
#[cfg(test)]
mod tests;
mod winner;

pub use cpu::{allocated_hints, cpu_hints};
pub use demand::Demand;
pub use devices::Device;
pub use distances::Distances;
pub use list::Hints;
pub use memory::NodeMemory;
pub use merge::merge;
pub use winner::{Winner, winner};

use crate::nodeset::NodeSet;
use serde::Serialize;

/// One set of NUMA nodes that would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyHint {
    /// The nodes; `None` for any.
    pub affinity: Option<NodeSet>,
    /// Whether it is as good as the machine could give.
    pub preferred: bool,
}

/// What a provider says about one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opinion {
    /// It does not care.
    Any,
    /// No set of nodes will do.
    Impossible,
    /// One of these will do; none of them is [`Opinion::Impossible`].
    Hints(Vec<TopologyHint>),
}

/// What all providers together come to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Merged {
    /// The nodes to allocate from first; `None` for any.
    pub affinity: Option<NodeSet>,
    /// Whether every provider prefers them.
    pub preferred: bool,
    /// Whether the policy lets the request in.
    pub admit: bool,
}
