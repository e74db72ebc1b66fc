//! What is free, counted once per request.
//!
//! A *group* is a NUMA node, or the CPUs of no node together. A *piece* is what is free under one last-level cache in
//! one group. A *shape* is all that decides between pieces: how many wholly free cores of which size, and how many
//! loose threads of cores that are in part taken. Shapes add up, except for *straddlers*: cores that some broken
//! table spreads over several pieces. In each piece alone their threads are loose; together they are a core.

use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::NodeId,
    topology::CpuTopology,
};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Sizes and how many there are of each, by ascending size.
pub(super) type Sizes = SmallVec<[(usize, usize); 4]>;

/// The free threads of one core in one piece.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) core: usize,
    pub(super) cpus: SmallVec<[CpuId; 8]>,
}

/// What is free under one last-level cache in one group.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    /// Index of the cache; `None` where none is known.
    pub(super) llc: Option<usize>,
    /// Ascending by core.
    pub(super) parts: Vec<Part>,
    shape: Shape,
    /// An upper bound that adds up: free CPUs, and those of them on cores that are free as a whole somewhere.
    free: usize,
    free_whole: usize,
}

/// What is free, as far as it decides anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Wholly free cores.
    pub(super) whole: Sizes,
    /// Free CPUs on other cores.
    pub(super) loose: usize,
}

/// A NUMA node, or the CPUs without one.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) node: Option<NodeId>,
    /// Indices of its pieces.
    pub(super) pieces: Vec<usize>,
}

/// A core in several pieces, all of it free.
struct Straddler {
    size: usize,
    pieces: Vec<usize>,
}

/// Everything that is free.
pub(super) struct Inventory {
    pub(super) groups: Vec<Group>,
    pub(super) pieces: Vec<Piece>,
    straddlers: Vec<Straddler>,
}

pub(super) fn add(sizes: &mut Sizes, size: usize, count: usize) {
    match sizes.binary_search_by_key(&size, |s| s.0) {
        Ok(at) => sizes[at].1 += count,
        Err(at) => sizes.insert(at, (size, count)),
    }
}

impl Shape {
    /// Free CPUs.
    pub(super) fn free(&self) -> usize {
        self.loose + self.in_whole()
    }

    /// CPUs on wholly free cores.
    pub(super) fn in_whole(&self) -> usize {
        self.whole.iter().map(|(size, count)| size * count).sum()
    }

    /// Wholly free cores.
    pub(super) fn cores(&self) -> usize {
        self.whole.iter().map(|(_, count)| count).sum()
    }

    /// Whether `n` CPUs can be taken, on request as whole cores without a thread to spare.
    pub(super) fn serves(&self, n: usize, whole_cores: bool) -> bool {
        if whole_cores { fill_cores(&self.whole, n).0 == n } else { self.free() >= n }
    }

    fn merge(&mut self, other: &Self) {
        self.loose += other.loose;
        for (size, count) in &other.whole {
            add(&mut self.whole, *size, *count);
        }
    }
}

impl Inventory {
    /// Counts `free`; groups without a free CPU are left out.
    pub(super) fn new(topology: &CpuTopology, free: &CpuSet) -> Self {
        // By (group, cache, core), so that no order of reading shows.
        let mut found: BTreeMap<(Option<NodeId>, Option<usize>), BTreeMap<usize, Part>> = BTreeMap::new();
        let mut free_of_core = vec![0; topology.cores().len()];
        for cpu in topology.cpus().iter().filter(|c| free.contains(c.id)) {
            free_of_core[cpu.core] += 1;
            let parts = found.entry((cpu.node, cpu.llc)).or_default();
            let part = parts.entry(cpu.core);
            part.or_insert_with(|| Part { core: cpu.core, cpus: SmallVec::new() }).cpus.push(cpu.id);
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut pieces = Vec::new();
        let mut spread: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for ((node, llc), parts) in found {
            let mut piece = Piece {
                llc,
                parts: parts.into_values().collect(),
                shape: Shape::default(),
                free: 0,
                free_whole: 0,
            };
            for part in &piece.parts {
                let (here, size) = (part.cpus.len(), topology.cores()[part.core].cpus.len());
                let all_free = free_of_core[part.core] == size;
                if here == size {
                    add(&mut piece.shape.whole, size, 1);
                } else {
                    piece.shape.loose += here;
                    if all_free {
                        spread.entry(part.core).or_default().push(pieces.len());
                    }
                }
                piece.free += here;
                piece.free_whole += if all_free { here } else { 0 };
            }
            match groups.last_mut() {
                Some(group) if group.node == node => group.pieces.push(pieces.len()),
                _ => groups.push(Group { node, pieces: vec![pieces.len()] }),
            }
            pieces.push(piece);
        }
        let straddlers = spread
            .into_iter()
            .map(|(core, pieces)| Straddler { size: topology.cores()[core].cpus.len(), pieces })
            .collect();
        Self { groups, pieces, straddlers }
    }

    /// The shape of some pieces together.
    pub(super) fn shape(&self, pieces: &[usize]) -> Shape {
        let mut shape = Shape::default();
        for &piece in pieces {
            shape.merge(&self.pieces[piece].shape);
        }
        for core in &self.straddlers {
            if core.pieces.iter().all(|p| pieces.contains(p)) {
                shape.loose -= core.size;
                add(&mut shape.whole, core.size, 1);
            }
        }
        shape
    }

    /// The pieces of some groups.
    pub(super) fn pieces_of(&self, groups: &[usize]) -> Vec<usize> {
        groups.iter().flat_map(|g| self.groups[*g].pieces.iter().copied()).collect()
    }

    /// An upper bound of what some pieces can give; bounds of disjoint pieces add up to that of all.
    pub(super) fn bound(&self, pieces: &[usize], whole_cores: bool) -> usize {
        let one = |p: &usize| if whole_cores { self.pieces[*p].free_whole } else { self.pieces[*p].free };
        pieces.iter().map(one).sum()
    }
}

/// The most CPUs, up to `n`, that whole cores of these sizes add up to, and how many cores of each size (in the order
/// of `sizes`) make it.
pub(super) fn fill_cores(sizes: &Sizes, n: usize) -> (usize, SmallVec<[usize; 4]>) {
    let mut used: SmallVec<[usize; 4]> = SmallVec::from_elem(0, sizes.len());
    // Where each size divides the next (1, 2, 4, 8), largest first is exact: whatever smaller cores would make up for
    // a large one can be exchanged for it.
    if sizes.windows(2).all(|w| w[1].0 % w[0].0 == 0) {
        let mut left = n;
        for (at, (size, count)) in sizes.iter().enumerate().rev() {
            used[at] = (*count).min(left / size);
            left -= used[at] * size;
        }
        return (n - left, used);
    }
    // Cores that lost a thread to hotplug can have 3: the bounded knapsack, a layer per size. `layers[i][s]` is how
    // many cores of size i make s together with smaller ones.
    let mut reached: Vec<bool> = vec![false; n + 1];
    reached[0] = true;
    let mut layers: Vec<Vec<Option<usize>>> = Vec::with_capacity(sizes.len());
    for (size, count) in sizes {
        let mut layer: Vec<Option<usize>> = vec![None; n + 1];
        for sum in 0..=n {
            layer[sum] = if reached[sum] {
                Some(0)
            } else {
                let before = sum.checked_sub(*size).and_then(|s| layer[s]);
                before.map(|used| used + 1).filter(|used| used <= count)
            };
        }
        for (sum, used) in layer.iter().enumerate() {
            reached[sum] |= used.is_some();
        }
        layers.push(layer);
    }
    let best = (0..=n).rev().find(|s| reached[*s]).unwrap_or(0);
    let mut sum = best;
    for (at, (size, _)) in sizes.iter().enumerate().rev() {
        used[at] = layers[at][sum].unwrap_or(0);
        sum -= used[at] * size;
    }
    (best, used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_cores_fill_up() {
        let fill = |sizes: &[(usize, usize)], n| {
            let (sum, used) = fill_cores(&sizes.iter().copied().collect(), n);
            assert_eq!(sum, sizes.iter().zip(&used).map(|((size, _), used)| size * used).sum::<usize>());
            assert!(sizes.iter().zip(&used).all(|((_, count), used)| used <= count));
            sum
        };
        assert_eq!((fill(&[], 4), fill(&[(2, 8)], 7), fill(&[(2, 2)], 7)), (0, 6, 4));
        assert_eq!((fill(&[(1, 1), (2, 8)], 7), fill(&[(2, 1), (4, 2)], 6)), (7, 6));
        // Largest first would take 3 and then nothing.
        assert_eq!(
            (fill(&[(2, 2), (3, 1)], 4), fill(&[(2, 1), (3, 2)], 7), fill(&[(3, 2), (8, 1)], 9)),
            (4, 6, 8)
        );
    }
}
