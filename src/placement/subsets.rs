//! Subsets by size, without the exponential walk.

/// How many sets of NUMA nodes of one size are looked at before only likely ones are: all pairs of 64 nodes (2,016),
/// all triples of 32 (4,960), all halves of 16 (12,870); no triples of 64 (41,664).
pub(super) const MOST_NODE_SETS: usize = 20_000;
/// The same for last-level caches, in each of up to 64 sets of nodes: all halves of 12 (924), all pairs of 45 (990).
pub(super) const MOST_CACHE_SETS: usize = 1_000;

/// Whether there are more than `most` `k`-subsets of `m` things.
fn more_than(most: usize, m: usize, k: usize) -> bool {
    let mut n: usize = 1;
    for i in 0..k.min(m - k.min(m)) {
        n = n * (m - i) / (i + 1);
        if n > most {
            return true;
        }
    }
    false
}

/// The least `k` for which the `k` largest bounds reach `need`.
pub(super) fn fewest(bounds: &[usize], need: usize) -> Option<usize> {
    let mut sorted = bounds.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0;
    sorted
        .iter()
        .position(|b| {
            sum += b;
            sum >= need
        })
        .map(|at| at + 1)
}

/// Calls `visit` with every `k`-subset (ascending indices, in lexical order) whose bounds reach `need`; with only those
/// of `likely` if there are more than `most` subsets.
pub(super) fn visit(
    bounds: &[usize],
    (k, most): (usize, usize),
    need: usize,
    likely: impl FnOnce() -> Vec<Vec<usize>>,
    visit: &mut dyn FnMut(&[usize]),
) {
    let reaches = |subset: &[usize]| subset.iter().map(|i| bounds[*i]).sum::<usize>() >= need;
    let m = bounds.len();
    if k == 0 || k > m {
        return;
    }
    if more_than(most, m, k) {
        let mut likely = likely();
        for subset in &mut likely {
            subset.sort_unstable();
        }
        likely.sort();
        likely.dedup();
        likely.iter().filter(|s| reaches(s)).for_each(|s| visit(s));
        return;
    }
    let mut subset: Vec<usize> = (0..k).collect();
    loop {
        if reaches(&subset) {
            visit(&subset);
        }
        let Some(at) = (0..k).rev().find(|at| subset[*at] < m - k + at) else { return };
        subset[at] += 1;
        for next in at + 1..k {
            subset[next] = subset[next - 1] + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_subsets() {
        assert!(!more_than(2016, 64, 2) && more_than(2015, 64, 2) && !more_than(1, 5, 5));
        assert!(!more_than(12_870, 16, 8) && more_than(MOST_NODE_SETS, 64, 32));
        let mut seen = Vec::new();
        visit(&[3, 1, 2, 2], (2, 6), 4, || unreachable!("six subsets"), &mut |s| seen.push(s.to_vec()));
        assert_eq!(seen, [[0, 1], [0, 2], [0, 3], [2, 3]]);
        assert_eq!(
            (fewest(&[3, 1, 2], 5), fewest(&[3, 1, 2], 6), fewest(&[3, 1, 2], 7)),
            (Some(2), Some(3), None)
        );

        let mut seen = Vec::new();
        let likely = || vec![vec![5, 1, 9], vec![9, 5, 1], vec![0, 1, 2]];
        visit(&[1; 64], (3, 6), 3, likely, &mut |s| seen.push(s.to_vec()));
        assert_eq!(seen, [[0, 1, 2], [1, 5, 9]]);
    }
}
