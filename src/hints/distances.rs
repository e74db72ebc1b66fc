//! How far NUMA nodes are from each other, and which of two sets fits better.
//!
//! Problem: the kubelet looks a distance up by node *number* in a row that has one column per node *that exists*, so
//! that sparse numbers read a wrong column or none. Here a column is the place of its node.
//! Invariant: the order of [`Fit`] is total, so that the best of several sets does not depend on the order of asking.

use crate::{
    nodeset::{NodeId, NodeSet},
    topology::{CpuTopology, LOCAL_DISTANCE, REMOTE_DISTANCE},
};
use std::cmp::Ordering;

/// Distances between NUMA nodes, as the kernel gives them (10 is local). They need not be symmetric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distances {
    /// Ascending.
    nodes: Vec<NodeId>,
    /// Row-major over `nodes`.
    rows: Vec<u32>,
}

impl Distances {
    /// From rows, one per node, each with one column per node by ascending number. A column that is missing is
    /// [`LOCAL_DISTANCE`] or [`REMOTE_DISTANCE`]; of a node that comes twice the first row counts.
    #[must_use]
    pub fn new(rows: impl IntoIterator<Item = (NodeId, Vec<u32>)>) -> Self {
        let mut given: Vec<(NodeId, Vec<u32>)> = rows.into_iter().collect();
        given.sort_by_key(|(node, _)| *node);
        given.dedup_by_key(|(node, _)| *node);
        let nodes: Vec<NodeId> = given.iter().map(|(node, _)| *node).collect();
        let cell = |(at, row): (usize, &Vec<u32>), column: usize| {
            row.get(column).copied().unwrap_or(plain(at == column))
        };
        let rows = given.iter().map(|(_, row)| row).enumerate();
        let rows = rows.flat_map(|row| (0..nodes.len()).map(move |column| cell(row, column))).collect();
        Self { nodes, rows }
    }

    /// The machine's own.
    #[must_use]
    pub fn of(topology: &CpuTopology) -> Self {
        let nodes: Vec<NodeId> = topology.nodes().iter().map(|n| n.id).collect();
        let rows = nodes.iter().flat_map(|a| nodes.iter().map(|b| topology.distance(*a, *b))).collect();
        Self { nodes, rows }
    }

    /// From `a` to `b`; a node that is not known is remote to all others.
    #[must_use]
    pub fn get(&self, a: NodeId, b: NodeId) -> u32 {
        match (self.nodes.binary_search(&a), self.nodes.binary_search(&b)) {
            (Ok(a), Ok(b)) => self.rows[a * self.nodes.len() + b],
            _ => plain(a == b),
        }
    }

    /// Row-major over some nodes.
    pub(super) fn among(&self, nodes: &[NodeId]) -> Vec<u64> {
        let places: Vec<Option<usize>> = nodes.iter().map(|n| self.nodes.binary_search(n).ok()).collect();
        let cell = |a: usize, b: usize| match (places[a], places[b]) {
            (Some(a), Some(b)) => self.rows[a * self.nodes.len() + b],
            _ => plain(a == b),
        };
        let places = 0..nodes.len();
        places
            .clone()
            .flat_map(|a| places.clone().map(move |b| (a, b)))
            .map(|(a, b)| cell(a, b).into())
            .collect()
    }

    /// Over all ordered pairs, each node with itself included. Of two sets of one size the one with the smaller sum has
    /// the smaller mean, which is what the kubelet compares.
    fn sum(&self, nodes: &NodeSet) -> u64 {
        nodes.iter().flat_map(|a| nodes.iter().map(move |b| u64::from(self.get(a, b)))).sum()
    }
}

fn plain(local: bool) -> u32 {
    if local { LOCAL_DISTANCE } else { REMOTE_DISTANCE }
}

/// Which of two sets of nodes is the better one: fewer nodes, then (with distances) nearer ones, then the smaller value
/// as a bitmap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fit<'a>(pub(super) Option<&'a Distances>);

impl Fit<'_> {
    /// `Less` is better.
    pub(super) fn cmp(self, a: &NodeSet, b: &NodeSet) -> Ordering {
        a.len().cmp(&b.len()).then_with(|| self.cmp_equal_sized(a, b))
    }

    /// The same for sets of one size.
    pub(super) fn cmp_equal_sized(self, a: &NodeSet, b: &NodeSet) -> Ordering {
        let near = self.0.map_or(Ordering::Equal, |d| d.sum(a).cmp(&d.sum(b)));
        near.then_with(|| a.cmp_value(b))
    }
}

/// How far a number of nodes is from the one that hints which are not preferred aim at, better first: exactly `aim`,
/// then the most below it, then the fewest above it.
pub(super) fn aim_rank(len: usize, aim: usize) -> (bool, usize) {
    (len > aim, len.abs_diff(aim))
}
