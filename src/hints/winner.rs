//! From demands to the merged hint, without the lists.
//!
//! [`super::merge`] over the lists of these demands would give the same; this is how it is found without them:
//! - Impossible demands aside, a set of nodes that will do also does with more nodes. So a *preferred* merge is one set
//!   that will do for every demand and has the size that each prefers: one search for one size (for each size, where
//!   sockets count).
//! - If there is none, the merge is what different sets have in common, and aims at `aim` nodes, the fewest that the
//!   most demanding resource can do with. Any k common nodes can come about that a sensible choice of "who leaves what
//!   out" allows, and at k = min(aim, common nodes) one always does: a smallest set of the most demanding resource,
//!   filled up, with all other resources taking everything. So no other size needs to be searched.
//! - `single-numa-node` tries each node by itself.
//!
//! Nodes that some demand does not look at (those without CPUs) are in no merge, and are gone before anything is counted.

use super::{
    Demand, Distances, Merged,
    limits::{Limits, Outside},
    search::{Found, Problem, SocketRule, best},
};
use crate::{
    nodeset::{NodeId, NodeSet},
    request::AlignmentPolicy,
};

/// Most nodes with all resources that are searched; Linux has no more (`MAX_NUMNODES`).
const MOST_NODES: usize = 1024;

/// A merged hint, and whether it is certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Winner {
    /// The hint.
    pub merged: Merged,
    /// False if the search was cut short: then a better one may exist, or a preferred one may have been missed.
    pub exact: bool,
}

/// The hint that the policy makes of these demands on a machine with these nodes; resources that do not matter are left
/// out of the demands. `closest` gives the distances where `prefer-closest-numa-nodes` is on.
#[must_use]
pub fn winner(
    policy: AlignmentPolicy,
    nodes: &NodeSet,
    demands: &[&Demand],
    closest: Option<&Distances>,
) -> Winner {
    match policy {
        AlignmentPolicy::None => {
            Winner { merged: Merged { affinity: None, preferred: false, admit: true }, exact: true }
        }
        AlignmentPolicy::SingleNumaNode => single(nodes, demands),
        AlignmentPolicy::BestEffort | AlignmentPolicy::Restricted => {
            let (affinity, preferred, exact) = narrow(nodes, demands, closest);
            let admit = preferred || policy == AlignmentPolicy::BestEffort;
            Winner { merged: Merged { affinity: Some(affinity), preferred, admit }, exact }
        }
    }
}

/// The nodes that all of them look at, ascending.
fn common(nodes: &NodeSet, demands: &[&Demand]) -> Vec<NodeId> {
    let looked_at = |node: &NodeId| demands.iter().all(|d| d.nodes.binary_search(node).is_ok());
    nodes.iter().filter(looked_at).collect()
}

fn single(nodes: &NodeSet, demands: &[&Demand]) -> Winner {
    let sizes: Vec<usize> = demands.iter().map(|d| d.preferred_size()).collect();
    let suits = |node: &NodeId| {
        demands.iter().zip(&sizes).all(|(demand, size)| {
            demand
                .nodes
                .binary_search(node)
                .is_ok_and(|at| demand.will_do(&[at]) && demand.prefers(&[at], *size))
        })
    };
    let set = if demands.is_empty() {
        (!nodes.is_empty()).then(|| nodes.clone())
    } else {
        nodes.iter().find(suits).map(NodeSet::single)
    };
    let merged =
        Merged { preferred: set.is_some(), admit: set.is_some(), affinity: set.filter(|set| set != nodes) };
    Winner { merged, exact: true }
}

/// Nodes, whether preferred, whether certain.
fn narrow(nodes: &NodeSet, demands: &[&Demand], closest: Option<&Distances>) -> (NodeSet, bool, bool) {
    let fewest: Vec<Option<usize>> = demands.iter().map(|d| d.fewest()).collect();
    let possible: Vec<&Demand> =
        demands.iter().zip(&fewest).filter(|(_, fewest)| fewest.is_some()).map(|(d, _)| *d).collect();
    let all_possible = possible.len() == demands.len();
    if possible.is_empty() {
        return (nodes.clone(), all_possible && !nodes.is_empty(), true);
    }
    let places = common(nodes, &possible);
    if places.is_empty() {
        return (nodes.clone(), false, true);
    }
    if places.len() > MOST_NODES {
        return (nodes.clone(), false, false);
    }
    let rows = closest.map(|d| d.among(&places));
    let chosen = |set: &[usize]| set.iter().map(|at| places[*at]).collect();
    let mut certain = true;
    if all_possible {
        let found = preferred(&places, &possible, rows.as_deref());
        if let Some(set) = found.set {
            return (chosen(&set), true, found.exact);
        }
        certain = found.exact;
    }
    let aim = fewest.iter().flatten().copied().max().unwrap_or(0);
    let found = shared(&places, &possible, aim.min(places.len()), rows.as_deref());
    certain &= found.exact;
    match found.set {
        Some(set) => (chosen(&set), false, certain),
        // Only if the search was cut short.
        None => (nodes.clone(), false, false),
    }
}

/// The best set that every demand prefers.
fn preferred(places: &[NodeId], demands: &[&Demand], distances: Option<&[u64]>) -> Found {
    let none = |exact| Found { set: None, exact };
    let sizes: Vec<usize> = demands.iter().map(|d| d.preferred_size()).collect();
    let Some(limits) = Limits::new(demands, places, Outside::Every) else { return none(true) };
    let fixed: Vec<usize> =
        demands.iter().zip(&sizes).filter(|(d, _)| d.sockets.is_none()).map(|(_, size)| *size).collect();
    let mut exact = true;
    for size in 1..=places.len() {
        if fixed.iter().any(|f| *f != size) {
            continue;
        }
        // Of another size than it prefers a demand takes sets of few sockets.
        let rules = demands.iter().zip(&sizes).filter(|(_, preferred)| **preferred != size);
        let sockets = rules.filter_map(|(demand, preferred)| rule(demand, *preferred, places)).collect();
        let found = best(&Problem { n: places.len(), size, limits: &limits, sockets, distances });
        exact &= found.exact;
        if found.set.is_some() {
            return Found { exact, ..found };
        }
    }
    none(exact)
}

fn rule(demand: &Demand, preferred: usize, places: &[NodeId]) -> Option<SocketRule> {
    let sockets = demand.sockets.as_ref()?;
    let of = |node: &NodeId| demand.nodes.binary_search(node).ok().map(|at| sockets.of_node[at].clone());
    Some(SocketRule {
        of_place: places.iter().map(|node| of(node).unwrap_or_default()).collect(),
        count: sockets.count,
        exactly: sockets.fewest(preferred),
    })
}

/// The best `size` nodes that different sets can have in common.
fn shared(places: &[NodeId], demands: &[&Demand], size: usize, distances: Option<&[u64]>) -> Found {
    let Some(limits) = Limits::new(demands, places, Outside::One) else {
        return Found { set: None, exact: true };
    };
    best(&Problem { n: places.len(), size, limits: &limits, sockets: Vec::new(), distances })
}
