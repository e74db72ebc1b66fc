//! A demand's hints, written down one by one in the kubelet's order.
//!
//! The order (fewer nodes first, then lexicographic by the list of nodes) is part of what a record compares. There are
//! up to 2^N - 1 hints, so they come from an iterator and nothing on the live path asks for them.

use super::{Demand, TopologyHint};
use crate::nodeset::NodeSet;

/// Every non-empty subset of places: by size, then lexicographic.
#[derive(Debug, Clone)]
pub(super) struct Subsets {
    n: usize,
    at: Vec<usize>,
}

impl Subsets {
    pub(super) fn new(n: usize) -> Self {
        Self { n, at: Vec::with_capacity(n) }
    }

    /// The next one, ascending.
    pub(super) fn next(&mut self) -> Option<&[usize]> {
        let (n, k) = (self.n, self.at.len());
        let Some(turn) = (0..k).rev().find(|i| self.at[*i] < n - k + i) else {
            if k == n {
                return None;
            }
            self.at.clear();
            self.at.extend(0..=k);
            return Some(&self.at);
        };
        self.at[turn] += 1;
        for i in turn + 1..k {
            self.at[i] = self.at[i - 1] + 1;
        }
        Some(&self.at)
    }
}

/// The hints of a [`Demand`]; see [`Demand::hints`].
#[derive(Debug, Clone)]
pub struct Hints<'a> {
    demand: &'a Demand,
    subsets: Subsets,
    preferred_size: usize,
    /// By place, the node as a bit, where all numbers are below 64.
    bits: Option<Vec<u64>>,
}

impl<'a> Hints<'a> {
    pub(super) fn new(demand: &'a Demand) -> Self {
        let bits = demand.nodes.iter().map(|n| 1_u64.checked_shl(n.0)).collect();
        Self {
            demand,
            subsets: Subsets::new(demand.nodes.len()),
            preferred_size: demand.preferred_size(),
            bits,
        }
    }
}

impl Iterator for Hints<'_> {
    type Item = TopologyHint;

    fn next(&mut self) -> Option<TopologyHint> {
        loop {
            let at = self.subsets.next()?;
            if !self.demand.will_do(at) {
                continue;
            }
            let affinity = match &self.bits {
                Some(bits) => NodeSet::from_words(&[at.iter().fold(0, |word, place| word | bits[*place])]),
                None => at.iter().map(|place| self.demand.nodes[*place]).collect(),
            };
            let preferred = self.demand.prefers(at, self.preferred_size);
            return Some(TopologyHint { affinity: Some(affinity), preferred });
        }
    }
}
