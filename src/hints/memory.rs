//! Memory as a demand.
//!
//! The kubelet's rule (`calculateHints` in `cm/memorymanager/policy_static.go`, 1.36), over all nodes, those without CPUs
//! included: a set will do when what is free there suffices for every kind (ordinary memory, huge pages of each size);
//! it is preferred when no smaller set has as much in total. The list is the same for every kind, and merged once for
//! each. Left out is its bookkeeping of groups (a node that serves one-node requests is closed to others): it only keeps
//! its own counters right, and no kernel interface needs it.
//! Where no set will do the kubelet says nothing at all, so that the request is let in and fails later; here that
//! is no hint, hence [`super::Opinion::Impossible`].

use super::{Demand, demand::Row};
use crate::nodeset::NodeId;

/// What a node has of one kind of memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMemory {
    /// The node.
    pub node: NodeId,
    /// Not promised to anybody.
    pub free: u64,
    /// What could be promised if nobody had any: its memory less what is reserved.
    pub total: u64,
}

impl Demand {
    /// So many bytes of each kind. Each kind comes with the nodes that have some of it; a node that is named for one kind
    /// and not for another has none of the other. `None` if no kind is asked for.
    #[must_use]
    pub fn memory(kinds: &[(u64, &[NodeMemory])]) -> Option<Self> {
        if kinds.is_empty() {
            return None;
        }
        let mut nodes: Vec<NodeId> = kinds.iter().flat_map(|(_, list)| list.iter().map(|m| m.node)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let row = |(need, list): &(u64, &[NodeMemory])| {
            let (mut free, mut total) = (vec![0_u64; nodes.len()], vec![0_u64; nodes.len()]);
            for memory in *list {
                if let Ok(at) = nodes.binary_search(&memory.node) {
                    free[at] = free[at].saturating_add(memory.free);
                    total[at] = total[at].saturating_add(memory.total);
                }
            }
            Row { need: *need, free, total, ..Row::default() }
        };
        let rows = kinds.iter().map(row).collect();
        Some(Self { nodes, rows, must: Vec::new(), sockets: None })
    }
}
