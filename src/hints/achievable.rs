//! The best set of nodes that some combination of hints has in common.
//!
//! Problem: four lists of 255 hints have 4.2 billion combinations, but over 8 nodes at most 255 different outcomes.
//! Steps: nodes that some list never names are in no outcome, so they go first. Over the n nodes left, count how many
//! combinations come to each set: the number of hints that *contain* a set is a superset sum (n * 2^n additions), of a
//! combination it is the product over the lists, and undoing the sum gives the number that come to exactly that set.
//! Short lists are combined pair by pair instead, and so are lists over more nodes than a table should have; duplicates
//! go after each step, and what can no longer win does, too.
//! Invariant: counts are exact. k lists of distinct sets have at most (2^k - 1)^n combinations for one outcome, below
//! 2^64 while k * n <= 64; sums wrap modulo 2^64 on the way, and with more lists counts are cut to 0 or 1 between.

use super::{
    TopologyHint,
    distances::{Fit, aim_rank},
};
use crate::nodeset::{NodeId, NodeSet};
use std::collections::HashSet;

/// Most nodes that a table of outcomes has: 2^20 counts are 8 MiB.
const MOST_TABLE_NODES: usize = 20;

/// The best outcome by [`aim_rank`] and fit; `None` if every combination comes to no node. `lists` are not empty.
pub(super) fn best(nodes: &NodeSet, lists: &[&[TopologyHint]], aim: usize, fit: Fit<'_>) -> Option<NodeSet> {
    let mut common = nodes.clone();
    for list in lists {
        let mut named = NodeSet::new();
        for hint in *list {
            match &hint.affinity {
                Some(set) => named |= set,
                None => named = nodes.clone(),
            }
            if common.is_subset(&named) {
                break;
            }
        }
        common = common.intersection(&named);
    }
    if common.is_empty() {
        return None;
    }
    let places: Vec<NodeId> = common.iter().collect();
    let table = (lists.len() + 1).saturating_mul(places.len()) << places.len().min(MOST_TABLE_NODES + 1);
    // A pair costs about 16 additions of a table: two allocations less, but a hash.
    let pairs = lists.iter().fold((0_usize, 1_usize), |(cost, len), list| {
        let product = len.saturating_mul(list.len());
        (cost.saturating_add(product), product)
    });
    if places.len() <= MOST_TABLE_NODES && table / 16 < pairs.0 {
        let table = outcomes(&places, &common, lists);
        return best_of_table(&table, &places, aim, fit);
    }
    best_of_pairs(&common, lists, aim, fit)
}

/// How many combinations come to each set, as a bitmap over `places`; only whether it is 0 is kept exact beyond
/// what the module comment allows.
fn outcomes(places: &[NodeId], common: &NodeSet, lists: &[&[TopologyHint]]) -> Vec<u64> {
    let n = places.len();
    let all = (1_usize << n) - 1;
    // The usual numbering, where a node's place is its number: the bitmap is the index.
    let plain = places.iter().enumerate().all(|(at, node)| node.0 as usize == at);
    let index = |set: &NodeSet| -> usize {
        if plain {
            return set.words().first().map_or(0, |w| usize::try_from(w & all as u64).unwrap_or(all));
        }
        let cut = set.intersection(common);
        cut.iter().filter_map(|node| places.binary_search(&node).ok()).fold(0, |bits, at| bits | 1 << at)
    };
    let mut product: Vec<u64> = Vec::new();
    let mut factors = 0;
    for list in lists {
        let mut table = vec![0_u64; 1 << n];
        for hint in *list {
            table[hint.affinity.as_ref().map_or(all, index)] = 1;
        }
        superset_sums(&mut table);
        if factors == 0 {
            product = table;
            factors = 1;
            continue;
        }
        if n * (factors + 1) > 64 {
            exact_counts(&mut product);
            for count in &mut product {
                *count = u64::from(*count != 0);
            }
            superset_sums(&mut product);
            factors = 1;
        }
        factors += 1;
        for (count, contain) in product.iter_mut().zip(&table) {
            *count = count.wrapping_mul(*contain);
        }
    }
    exact_counts(&mut product);
    product
}

/// Each entry becomes the sum over its supersets.
fn superset_sums(table: &mut [u64]) {
    halves(table, |without, with| *without = without.wrapping_add(*with));
}

/// The inverse.
fn exact_counts(table: &mut [u64]) {
    halves(table, |without, with| *without = without.wrapping_sub(*with));
}

/// For every bit, every pair of entries that differ in it.
fn halves(table: &mut [u64], op: impl Fn(&mut u64, &u64)) {
    let mut bit = 1;
    while bit < table.len() {
        for block in table.chunks_exact_mut(2 * bit) {
            let (without, with) = block.split_at_mut(bit);
            without.iter_mut().zip(&*with).for_each(|(without, with)| op(without, with));
        }
        bit *= 2;
    }
}

fn best_of_table(table: &[u64], places: &[NodeId], aim: usize, fit: Fit<'_>) -> Option<NodeSet> {
    let n = places.len();
    let distances = fit.0.map(|d| d.among(places));
    let sum = |set: usize| -> u64 {
        let Some(rows) = &distances else { return 0 };
        let members = || (0..n).filter(|at| set >> at & 1 == 1);
        members().flat_map(|a| members().map(move |b| rows[a * n + b])).sum()
    };
    // Ascending value: of equals the first stays.
    let mut best: Option<((bool, usize), u64, usize)> = None;
    for (set, _) in table.iter().enumerate().skip(1).filter(|(_, count)| **count != 0) {
        let rank = aim_rank(set.count_ones() as usize, aim);
        match best {
            Some((known, ..)) if known < rank => {}
            Some((known, near, _)) if known == rank => {
                let sum = sum(set);
                if sum < near {
                    best = Some((rank, sum, set));
                }
            }
            _ => best = Some((rank, sum(set), set)),
        }
    }
    best.map(|(.., set)| (0..n).filter(|at| set >> at & 1 == 1).map(|at| places[at]).collect())
}

fn best_of_pairs(common: &NodeSet, lists: &[&[TopologyHint]], aim: usize, fit: Fit<'_>) -> Option<NodeSet> {
    let cut =
        |hint: &TopologyHint| hint.affinity.as_ref().map_or(common.clone(), |set| set.intersection(common));
    let mut sets: Vec<HashSet<NodeSet>> = lists.iter().map(|list| list.iter().map(cut).collect()).collect();
    sets.sort_by_key(HashSet::len);
    // An outcome of exactly `aim` nodes that is easy to see: a hint of that size whose partners can have all nodes. Then
    // nothing smaller can win, and combinations only shrink.
    let has_all: Vec<bool> = sets.iter().map(|list| list.contains(common)).collect();
    let others_have_all = |at: usize| has_all.iter().enumerate().all(|(other, all)| *all || other == at);
    let aimed = sets
        .iter()
        .enumerate()
        .any(|(at, list)| others_have_all(at) && list.iter().any(|set| set.len() == aim));
    let least = if aimed { aim } else { 1 };
    let mut sets = sets.into_iter();
    let mut outcomes = sets.next()?;
    outcomes.retain(|set| set.len() >= least);
    for list in sets {
        let mut next = HashSet::with_capacity(outcomes.len());
        for a in &outcomes {
            next.extend(list.iter().map(|b| a.intersection(b)).filter(|set| set.len() >= least));
        }
        outcomes = next;
    }
    outcomes.into_iter().min_by(|a, b| {
        let rank = |set: &NodeSet| aim_rank(set.len(), aim);
        rank(a).cmp(&rank(b)).then_with(|| fit.cmp_equal_sized(a, b))
    })
}
