//! What one resource needs of the NUMA nodes, and what they have.
//!
//! Problem: CPUs, memory and devices have one shape: nodes that have some of the resource, a number that is wanted, and
//! things that are held already and have to stay reachable. A set of nodes *will do* when it has enough that is free;
//! it is *preferred* when no smaller set would have enough of the total, free or not.
//! A [`Demand`] is that shape as plain data, by place of a node in its list; everything else follows from it.
//! Invariant: whatever will do also does with more nodes of the list; [`super::search`] rests on it.

use super::{
    Hints, Opinion,
    limits::{Limits, Outside},
    search::{self, Problem},
};
use crate::nodeset::{NodeId, NodeSet};

/// What one resource needs, and what each node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// The nodes that the provider looks at, ascending.
    pub(super) nodes: Vec<NodeId>,
    /// Kinds that have to be there together; memory and huge pages, else one.
    pub(super) rows: Vec<Row>,
    /// Of each of these (places, ascending) one node has to be in a set.
    pub(super) must: Vec<Vec<usize>>,
    /// Where a set that touches few sockets is preferred, too.
    pub(super) sockets: Option<Sockets>,
}

/// One kind of a resource. Vectors are by place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Row {
    pub(super) need: u64,
    /// Held already: counts as free wherever the set is.
    pub(super) held: u64,
    pub(super) free: Vec<u64>,
    pub(super) total: Vec<u64>,
    /// What is near several nodes at once, and counts when one of them is in the set.
    pub(super) spread: Vec<Spread>,
}

/// What is near several nodes at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spread {
    /// At least two places, ascending.
    pub(super) at: Vec<usize>,
    pub(super) free: u64,
    pub(super) total: u64,
}

/// The rule of `align-by-socket`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sockets {
    /// Nodes per socket, rounded down; at least 1.
    pub(super) nodes_per_socket: usize,
    /// By place of the node: places of the sockets that it has CPUs of.
    pub(super) of_node: Vec<Vec<usize>>,
    /// How many there are.
    pub(super) count: usize,
}

impl Sockets {
    /// How many sockets a preferred set touches when the smallest set has `size` nodes.
    pub(super) fn fewest(&self, size: usize) -> usize {
        size.div_ceil(self.nodes_per_socket)
    }

    fn touched(&self, at: &[usize]) -> usize {
        let mut touched = vec![false; self.count];
        for socket in at.iter().flat_map(|node| &self.of_node[*node]) {
            touched[*socket] = true;
        }
        touched.into_iter().filter(|t| *t).count()
    }
}

impl Demand {
    /// Every hint, in the kubelet's order: by number of nodes, then by the list of nodes. There may be 2^N - 1.
    #[must_use]
    pub fn hints(&self) -> Hints<'_> {
        Hints::new(self)
    }

    /// The same as an opinion.
    #[must_use]
    pub fn opinion(&self) -> Opinion {
        let hints: Vec<_> = self.hints().collect();
        if hints.is_empty() { Opinion::Impossible } else { Opinion::Hints(hints) }
    }

    /// How many resources have these hints: the kubelet lists them once per kind.
    #[must_use]
    pub fn lists(&self) -> usize {
        self.rows.len().max(1)
    }

    /// The nodes that are looked at.
    #[must_use]
    pub fn nodes(&self) -> NodeSet {
        self.nodes.iter().copied().collect()
    }

    /// Whether the nodes at these places (ascending) have enough that is free.
    pub(super) fn will_do(&self, at: &[usize]) -> bool {
        let touches = |places: &[usize]| places.iter().any(|p| at.binary_search(p).is_ok());
        let enough = |row: &Row| {
            let spread = row.spread.iter().filter(|s| touches(&s.at)).map(|s| s.free);
            let sum = at.iter().map(|p| row.free[*p]).chain(spread).fold(row.held, u64::saturating_add);
            sum >= row.need
        };
        !at.is_empty() && self.rows.iter().all(enough) && self.must.iter().all(|m| touches(m))
    }

    /// Whether a set that will do is preferred; `size` is [`Self::preferred_size`].
    pub(super) fn prefers(&self, at: &[usize], size: usize) -> bool {
        at.len() == size || self.sockets.as_ref().is_some_and(|s| s.touched(at) == s.fewest(size))
    }

    /// One that nothing can satisfy: what was allocated is not what is asked for.
    #[must_use]
    pub fn impossible() -> Self {
        let row = Row { need: 1, ..Row::default() };
        Self { nodes: Vec::new(), rows: vec![row], must: Vec::new(), sockets: None }
    }

    /// The fewest nodes that would have enough if all were free; all of them where none have.
    pub(super) fn preferred_size(&self) -> usize {
        let empty = |row: &Row| Row {
            need: row.need,
            held: 0,
            free: row.total.clone(),
            total: Vec::new(),
            spread: row.spread.iter().map(|s| Spread { free: s.total, ..s.clone() }).collect(),
        };
        let machine = Self {
            nodes: self.nodes.clone(),
            rows: self.rows.iter().map(empty).collect(),
            must: Vec::new(),
            sockets: None,
        };
        machine.fewest().unwrap_or(self.nodes.len())
    }

    /// The fewest nodes that will do; `None` if none do.
    pub(super) fn fewest(&self) -> Option<usize> {
        let n = self.nodes.len();
        let places: Vec<usize> = (0..n).collect();
        if !self.will_do(&places) {
            return None;
        }
        let least = self.rows.iter().map(|row| self.fewest_of(row)).max().unwrap_or(1);
        let plain = |row: &Row| row.spread.is_empty();
        if self.rows.len() == 1 && self.rows.iter().all(plain) && self.must.iter().all(|m| m.len() == 1) {
            return Some(least);
        }
        let limits = Limits::new(&[self], &self.nodes, Outside::Every)?;
        let one = |size| Problem { n, size, limits: &limits, sockets: Vec::new(), distances: None };
        (least..=n).find(|size| search::best(&one(*size)).set.is_some())
    }

    /// The fewest nodes that will do for one kind, if everything that is near several nodes were near all: exact where
    /// nothing is. Nodes that must be in are; of the rest those with most.
    fn fewest_of(&self, row: &Row) -> usize {
        let mut must = vec![false; row.free.len()];
        for m in &self.must {
            if let [one] = m.as_slice() {
                must[*one] = true;
            }
        }
        let (mut size, mut sum) = (0, row.held);
        let mut rest = Vec::with_capacity(row.free.len());
        for (place, free) in row.free.iter().enumerate() {
            if must[place] {
                size += 1;
                sum = sum.saturating_add(*free);
            } else {
                rest.push(*free);
            }
        }
        sum = row.spread.iter().fold(sum, |sum, s| sum.saturating_add(s.free));
        rest.sort_unstable_by(|a, b| b.cmp(a));
        let mut rest = rest.into_iter();
        while sum < row.need {
            let Some(free) = rest.next() else { break };
            size += 1;
            sum = sum.saturating_add(free);
        }
        size.max(1)
    }
}
