//! Merges lists of hints as the kubelet's topology manager does.
//!
//! Its rule: of every combination of one hint per resource take the nodes that all of them have; the combination is
//! preferred if all its hints are and name the same nodes. Preferred beats the rest; among preferred ones the better
//! [`Fit`] wins. The others aim at as many nodes as the most demanding resource needs at least: exactly that many, else
//! the most below, else the fewest above; then the better fit. No combination at all is "all nodes, not preferred".
//! That order is total, so only *which* node sets can come about matters, not in what order:
//! preferred ones are those on which all lists agree (an intersection), the others are computed in `achievable`.
//! `single-numa-node` looks at preferred hints of one node only; its "all nodes" means any.
//! Source: kubelet 1.36, `cm/topologymanager/policy*.go`, `numa_info.go`.

use super::{
    Merged, Opinion, TopologyHint, achievable,
    distances::{Distances, Fit},
};
use crate::{nodeset::NodeSet, request::AlignmentPolicy};

/// The hint that the policy makes of all resources' opinions on a machine with these nodes. `closest` gives the
/// distances where `prefer-closest-numa-nodes` is on.
#[must_use]
pub fn merge(
    policy: AlignmentPolicy,
    nodes: &NodeSet,
    opinions: &[Opinion],
    closest: Option<&Distances>,
) -> Merged {
    match policy {
        AlignmentPolicy::None => Merged { affinity: None, preferred: false, admit: true },
        AlignmentPolicy::SingleNumaNode => single(nodes, opinions),
        AlignmentPolicy::BestEffort | AlignmentPolicy::Restricted => {
            let fit = Fit(closest);
            let (affinity, preferred) = match preferred(nodes, opinions, fit) {
                Some(affinity) => (affinity, true),
                None => (not_preferred(nodes, opinions, fit), false),
            };
            let admit = preferred || policy == AlignmentPolicy::BestEffort;
            Merged { affinity: Some(affinity), preferred, admit }
        }
    }
}

/// An opinion's hints that count for a preferred merge.
struct Wanted<'a> {
    /// Whether "any node" is among them.
    any: bool,
    /// Sorted, each once.
    sets: Vec<&'a NodeSet>,
}

impl<'a> Wanted<'a> {
    fn of(opinion: &'a Opinion, counts: impl Fn(&NodeSet) -> bool) -> Self {
        let Opinion::Hints(hints) = opinion else {
            return Self { any: *opinion == Opinion::Any, sets: Vec::new() };
        };
        let preferred = || hints.iter().filter(|h| h.preferred);
        let mut sets: Vec<&NodeSet> =
            preferred().filter_map(|h| h.affinity.as_ref()).filter(|s| counts(s)).collect();
        sets.sort_unstable();
        sets.dedup();
        Self { any: preferred().any(|h| h.affinity.is_none()), sets }
    }

    fn allows(&self, set: &NodeSet) -> bool {
        self.any || self.sets.binary_search(&set).is_ok()
    }
}

/// The best set on which all can agree, cut to the machine's nodes; `None` if they cannot.
fn agreed(nodes: &NodeSet, wanted: &[Wanted<'_>], fit: Fit<'_>) -> Option<NodeSet> {
    // Whoever takes no "any" has to have the set; the shortest such list is all that needs to be tried.
    let shortest = wanted.iter().filter(|w| !w.any).min_by_key(|w| w.sets.len());
    let tried: Vec<&NodeSet> = match shortest {
        Some(w) => w.sets.clone(),
        None => wanted.iter().flat_map(|w| w.sets.iter().copied()).collect(),
    };
    let agreed = tried.into_iter().filter(|set| wanted.iter().all(|w| w.allows(set)));
    let all = shortest.is_none().then(|| nodes.clone());
    let cut = agreed.map(|set| set.intersection(nodes)).chain(all).filter(|set| !set.is_empty());
    cut.min_by(|a, b| fit.cmp(a, b))
}

fn single(nodes: &NodeSet, opinions: &[Opinion]) -> Merged {
    let wanted: Vec<_> = opinions.iter().map(|o| Wanted::of(o, |set| set.len() == 1)).collect();
    // Distances play no part: all candidates are single nodes.
    match agreed(nodes, &wanted, Fit(None)) {
        Some(set) => Merged { affinity: (set != *nodes).then_some(set), preferred: true, admit: true },
        None => Merged { affinity: None, preferred: false, admit: false },
    }
}

fn preferred(nodes: &NodeSet, opinions: &[Opinion], fit: Fit<'_>) -> Option<NodeSet> {
    let wanted: Vec<_> = opinions.iter().map(|o| Wanted::of(o, |_| true)).collect();
    agreed(nodes, &wanted, fit)
}

fn not_preferred(nodes: &NodeSet, opinions: &[Opinion], fit: Fit<'_>) -> NodeSet {
    let lists: Vec<&[TopologyHint]> = opinions
        .iter()
        .filter_map(|o| match o {
            Opinion::Hints(hints) if !hints.is_empty() => Some(hints.as_slice()),
            _ => None,
        })
        .collect();
    let fewest =
        |hints: &&[TopologyHint]| hints.iter().filter_map(|h| h.affinity.as_ref()).map(NodeSet::len).min();
    let aim = lists.iter().filter_map(fewest).max().unwrap_or(0);
    achievable::best(nodes, &lists, aim, fit).unwrap_or_else(|| nodes.clone())
}
