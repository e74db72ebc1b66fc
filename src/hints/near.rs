//! How near a set of nodes can be: sums of distances, and what they cannot be less than.
//!
//! Nodes are places; matrices are row-major over them. A sum is over all ordered pairs, each node with itself included.
//! [`Near::least`] bounds a set of which part is chosen, node by node. [`floor`] bounds every set of a size at once: it
//! lowers distances until they form a tree (by single linkage, so that two nodes are as far as the longest hop on the
//! path of shortest hops between them) and finds the smallest sum on the tree exactly. Where the machine is such a tree
//! (nodes in packages, packages alike) that *is* the least, and the first set that reaches it ends the search.

/// Distances of the chosen nodes, and a bound for those still to be chosen.
pub(super) struct Near<'a> {
    rows: &'a [u64],
    n: usize,
    /// Over ordered pairs of chosen nodes, each with itself included.
    pub(super) sum: u64,
    /// What each node would add to it.
    pub(super) cost: Vec<u64>,
    /// `[place * size + k]`: both ways to its k nearest others, summed.
    nearest: Vec<u64>,
    size: usize,
    /// Kept for its room.
    adds: Vec<u64>,
}

impl<'a> Near<'a> {
    pub(super) fn new(rows: &'a [u64], n: usize, size: usize) -> Self {
        let mut near = Self {
            rows,
            n,
            sum: 0,
            cost: (0..n).map(|p| rows[p * n + p]).collect(),
            nearest: Vec::new(),
            size,
            adds: Vec::with_capacity(n),
        };
        for place in 0..n {
            let mut others: Vec<u64> =
                (0..n).filter(|p| *p != place).map(|p| near.both_ways(place, p)).collect();
            others.sort_unstable();
            let sums = others.iter().scan(0_u64, |sum, d| {
                *sum = sum.saturating_add(*d);
                Some(*sum)
            });
            near.nearest.extend(std::iter::once(0).chain(sums).take(size));
        }
        near
    }

    fn both_ways(&self, a: usize, b: usize) -> u64 {
        self.rows[a * self.n + b].saturating_add(self.rows[b * self.n + a])
    }

    pub(super) fn choose(&mut self, place: usize) {
        self.sum += self.cost[place];
        for other in (0..self.n).filter(|p| *p != place) {
            self.cost[other] += self.both_ways(place, other);
        }
    }

    pub(super) fn unchoose(&mut self, place: usize) {
        for other in (0..self.n).filter(|p| *p != place) {
            self.cost[other] -= self.both_ways(place, other);
        }
        self.sum -= self.cost[place];
    }

    /// No choice of `left` among the first `r` makes a smaller sum: each adds its distance to those chosen, and half of
    /// what its nearest others make (each pair is half of either).
    pub(super) fn least(&mut self, r: usize, left: usize) -> u64 {
        if left == 0 {
            return self.sum;
        }
        let near = self.nearest.chunks_exact(self.size).map(|sums| sums[left - 1]);
        self.adds.clear();
        self.adds.extend(self.cost[..r].iter().zip(near).map(|(cost, near)| 2 * cost + near));
        if left < r {
            self.adds.select_nth_unstable(left - 1);
        }
        self.sum + self.adds[..left].iter().sum::<u64>().div_ceil(2)
    }
}

/// By place, the lowest place that is as far from all others: exchanging the two changes no sum of distances.
pub(super) fn twins(rows: &[u64], n: usize) -> Vec<usize> {
    let both = |a: usize, b: usize| u128::from(rows[a * n + b]) + u128::from(rows[b * n + a]);
    let alike = |a: usize, b: usize| {
        rows[a * n + a] == rows[b * n + b]
            && (0..n).filter(|x| *x != a && *x != b).all(|x| both(a, x) == both(b, x))
    };
    let mut twins: Vec<usize> = Vec::with_capacity(n);
    for place in 0..n {
        let lower = (0..place).find(|lower| twins[*lower] == *lower && alike(*lower, place));
        twins.push(lower.unwrap_or(place));
    }
    twins
}

/// No set of `size` nodes has a smaller sum.
pub(super) fn floor(rows: &[u64], n: usize, size: usize) -> u64 {
    let both = |a: usize, b: usize| rows[a * n + b].saturating_add(rows[b * n + a]);
    // Shortest hops that connect all (Prim).
    let mut hops: Vec<(u64, usize, usize)> = Vec::with_capacity(n);
    let mut nearest: Vec<(u64, usize)> = (0..n).map(|p| (if p == 0 { 0 } else { both(0, p) }, 0)).collect();
    let mut apart: Vec<usize> = (1..n).collect();
    while let Some(at) = (0..apart.len()).min_by_key(|at| nearest[apart[*at]].0) {
        let place = apart.swap_remove(at);
        hops.push((nearest[place].0, nearest[place].1, place));
        for other in &apart {
            let far = both(place, *other);
            if far < nearest[*other].0 {
                nearest[*other] = (far, place);
            }
        }
    }
    hops.sort_unstable();
    // By place, its part of the tree; by part, the least sum of k of its nodes.
    let mut part: Vec<usize> = (0..n).collect();
    let mut sums: Vec<Vec<u64>> = (0..n).map(|p| vec![0, rows[p * n + p]]).collect();
    for (far, a, b) in hops {
        let (a, b) = (part[a], part[b]);
        let (ours, theirs) = (std::mem::take(&mut sums[a]), std::mem::take(&mut sums[b]));
        let mut both = vec![u64::MAX; (ours.len() + theirs.len() - 1).min(size + 1)];
        for (i, here) in ours.iter().enumerate() {
            for (j, there) in theirs.iter().enumerate().take(size + 1 - i.min(size)) {
                let between = far.saturating_mul(i as u64).saturating_mul(j as u64);
                both[i + j] = both[i + j].min(here.saturating_add(*there).saturating_add(between));
            }
        }
        sums[a] = both;
        part.iter_mut().filter(|p| **p == b).for_each(|p| *p = a);
    }
    part.first().and_then(|p| sums[*p].get(size)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packages of four nodes: 10 within a node, 12 within a package, 32 beyond.
    fn packages(n: usize) -> Vec<u64> {
        let far = |a: usize, b: usize| match (a == b, a / 4 == b / 4) {
            (true, _) => 10,
            (_, true) => 12,
            _ => 32,
        };
        (0..n).flat_map(|a| (0..n).map(move |b| far(a, b))).collect()
    }

    fn least_of_all(rows: &[u64], n: usize, size: usize) -> u64 {
        let sum = |set: u32| {
            let members = || (0..n).filter(move |p| set >> p & 1 == 1);
            members().flat_map(|a| members().map(move |b| rows[a * n + b])).sum()
        };
        (0..1_u32 << n).filter(|s| s.count_ones() as usize == size).map(sum).min().unwrap()
    }

    #[test]
    fn on_a_tree_the_floor_is_the_least_sum() {
        for n in [1, 4, 8, 11] {
            let rows = packages(n);
            for size in 1..=n {
                assert_eq!(floor(&rows, n, size), least_of_all(&rows, n, size), "{size} of {n}");
            }
        }
    }

    #[test]
    fn no_sum_is_below_the_floor() {
        let mut x = 1_u64;
        for _ in 0..300 {
            let n = 1 + usize::try_from(x % 9).unwrap();
            let rows: Vec<u64> = (0..n * n)
                .map(|_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    10 + (x >> 33) % 30
                })
                .collect();
            for size in 1..=n {
                assert!(floor(&rows, n, size) <= least_of_all(&rows, n, size), "{size} of {rows:?}");
            }
        }
    }

    #[test]
    fn nodes_that_cannot_be_told_apart() {
        assert_eq!(twins(&packages(8), 8), [0, 0, 0, 0, 4, 4, 4, 4]);
        // Both ways count: 0 to 1 and back is 40 everywhere.
        let rows = [10, 15, 20, 25, 10, 12, 20, 28, 10];
        assert_eq!(twins(&rows, 3), [0, 0, 0]);
        let rows = [10, 15, 20, 25, 10, 12, 20, 27, 10];
        assert_eq!(twins(&rows, 3), [0, 1, 1]);
    }
}
