//! Which CPUs of some pieces: the last-level caches first, then the cores.
//!
//! Steps: the fewest caches that serve the request; among those, the most CPUs on whole cores, then no new broken
//! core, then the least left over (best fit: larger holes stay whole for others), then the lowest numbers. In the
//! chosen caches whole cores first, the caches with the least free before those with more so that what is left
//! over is left in one; then odd threads, of cores that are in part taken already; a whole core is broken only if
//! these do not suffice, and then it gives all of them, so that an owner shares with nobody new.

use super::{
    inventory::{Inventory, fill_cores},
    subsets,
};
use crate::{
    cpuset::{CpuId, CpuSet},
    topology::CpuTopology,
};
use std::{cmp::Reverse, collections::BTreeMap};

/// Pieces chosen for a request, and how good they are: less is better, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Choice {
    /// Last-level caches.
    llcs: usize,
    /// CPUs that are not on whole cores.
    apart: usize,
    /// Cores that were wholly free and are not wholly taken.
    broken: usize,
    /// Free CPUs left in the pieces.
    left: usize,
    /// The pieces, ascending.
    pieces: Vec<usize>,
}

/// The best pieces among `pieces` for `n` CPUs; `None` if all together do not serve.
pub(super) fn choose(inventory: &Inventory, pieces: &[usize], n: usize, whole_cores: bool) -> Option<Choice> {
    if !inventory.shape(pieces).serves(n, whole_cores) {
        return None;
    }
    // A cache that reaches into several groups is one cache.
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut unit_of: BTreeMap<usize, usize> = BTreeMap::new();
    for &piece in pieces {
        match inventory.pieces[piece].llc.map(|llc| *unit_of.entry(llc).or_insert(units.len())) {
            Some(unit) if unit < units.len() => units[unit].push(piece),
            _ => units.push(vec![piece]),
        }
    }
    let bounds: Vec<usize> = units.iter().map(|u| inventory.bound(u, whole_cores)).collect();
    let fewest = subsets::fewest(&bounds, n)?;
    (fewest..=units.len()).find_map(|k| {
        let mut best: Option<Choice> = None;
        subsets::visit(&bounds, (k, subsets::MOST_CACHE_SETS), n, || likely(&bounds, k), &mut |subset| {
            let mut pieces: Vec<usize> = subset.iter().flat_map(|u| units[*u].iter().copied()).collect();
            pieces.sort_unstable();
            let shape = inventory.shape(&pieces);
            if !shape.serves(n, whole_cores) {
                return;
            }
            let apart = n - fill_cores(&shape.whole, n).0;
            let broken = usize::from(apart > shape.loose);
            let choice = Choice { llcs: k, apart, broken, left: shape.free() - n, pieces };
            if best.as_ref().is_none_or(|old| choice < *old) {
                best = Some(choice);
            }
        });
        best
    })
}

/// The `k - 1` largest and any other.
fn likely(bounds: &[usize], k: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by_key(|u| (Reverse(bounds[*u]), *u));
    (k - 1..order.len()).map(|last| order[..k - 1].iter().chain([&order[last]]).copied().collect()).collect()
}

/// A core's free threads in the chosen pieces.
struct Free {
    /// Place of its first piece in the order of filling.
    order: usize,
    cpus: Vec<CpuId>,
    whole: bool,
}

/// `n` CPUs of the chosen pieces.
pub(super) fn take(topology: &CpuTopology, inventory: &Inventory, choice: &Choice, n: usize) -> CpuSet {
    let mut order = choice.pieces.clone();
    order.sort_by_key(|p| (inventory.bound(&[*p], false), *p));
    let mut cores: BTreeMap<usize, Free> = BTreeMap::new();
    for (order, piece) in order.iter().enumerate() {
        for part in &inventory.pieces[*piece].parts {
            let core = cores.entry(part.core).or_insert(Free { order, cpus: Vec::new(), whole: false });
            core.cpus.extend(&part.cpus);
            core.cpus.sort_unstable();
            core.whole = core.cpus.len() == topology.cores()[part.core].cpus.len();
        }
    }
    let mut cores: Vec<Free> = cores.into_values().collect();
    // Stable: by number within a piece.
    cores.sort_by_key(|c| c.order);

    let sizes = inventory.shape(&choice.pieces).whole;
    let (_, mut wanted) = fill_cores(&sizes, n);
    let mut taken = CpuSet::new();
    let mut rest = n;
    let mut others = Vec::new();
    for core in cores {
        let at = sizes.iter().position(|(size, _)| core.whole && *size == core.cpus.len());
        match at.filter(|at| wanted[*at] > 0) {
            Some(at) => {
                wanted[at] -= 1;
                rest -= core.cpus.len();
                taken |= &core.cpus.into_iter().collect();
            }
            None => others.push(core),
        }
    }
    let (mut whole, mut loose): (Vec<Free>, Vec<Free>) = others.into_iter().partition(|c| c.whole);
    let pool =
        if loose.iter().map(|c| c.cpus.len()).sum::<usize>() >= rest { &mut loose } else { &mut whole };
    while rest > 0 {
        // The core that it fits best, else the one that gives the most.
        let best = pool.iter().enumerate().min_by_key(|(at, core)| match core.cpus.len() {
            len if len >= rest => (0, len, *at),
            len => (1, usize::MAX - len, *at),
        });
        let Some((at, _)) = best else { break };
        let core = pool.remove(at);
        let take = rest.min(core.cpus.len());
        taken |= &core.cpus.into_iter().take(take).collect();
        rest -= take;
    }
    taken
}
