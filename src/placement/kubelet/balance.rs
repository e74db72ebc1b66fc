//! Which NUMA nodes share a request, and which of them give one group more: the most even rest, exactly.
//!
//! Problem: the kubelet walks every k-subset of the nodes, and for each every subset of those that may give the
//! remainder, and keeps the first whose free CPUs afterwards have the least standard deviation (in thousandths): 22 s on
//! 16 nodes. The same pair is found here without walking subsets.
//!
//! With `n` CPUs from `k` nodes in groups of `g`, each gives `share = n / k / g * g`, and `extra = n / g - k * share / g`
//! groups (fewer than k) are handed round among some subset, one each per round, in order, past those that have none
//! left. All ways leave the same sum, so that the deviation depends on the integer sum of squares alone, and ascends
//! with it. A node that gives `share` and `e` groups more adds `share² - 2·share·a - 2·g·b·e + g²·e²` to it (`a` free
//! before, `b = a - share`). After `t` full rounds each has given `min(q, t)` (`q = b / g`), and the first few with more
//! one extra: so for each `t` the least sum is a shortest path over the nodes in order, the state being how many
//! are still to be chosen, how many groups to be given, and whether extras are still given.
//!
//! Steps: the least sum over all `t`; the largest sum that rounds to the same deviation; the first k-subset that stays
//! within it, chosen node by node with the tables of what the rest can reach; then, within it, the largest and
//! first subset for the remainder in the same way.
//!
//! Cost: `extra` tables of nodes × k × extra × 2 entries: on 16 nodes at most 29,000 in all, on 64 nodes 10 million.

use std::cmp::Ordering;

/// Nodes to take from, as places in the list given, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Balanced {
    /// Each gives [`Balanced::share`] CPUs.
    pub(super) nodes: Vec<usize>,
    /// CPUs.
    pub(super) share: usize,
    /// Of those, the ones that give the remainder, one group each per round.
    pub(super) extra: Vec<usize>,
}

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// No `k` nodes have enough.
    None,
    /// These.
    Found(Balanced),
    /// The kubelet would never return: on the way it meets a subset with CPUs enough for the remainder, but not in whole
    /// groups, and goes round for ever.
    Endless,
}

/// More than any sum of squares (65,536 nodes of 65,536 CPUs).
const NEVER: i64 = i64::MAX / 4;

/// Chooses `k` of the nodes with `free` CPUs each (none of them 0) for `n` CPUs in groups of `group`; `n` is a positive
/// multiple of `group`, and `1 <= k <= n / group`.
pub(super) fn balanced(free: &[usize], k: usize, n: usize, group: usize) -> Outcome {
    let share = n / k / group * group;
    let extra = (n - share * k) / group;
    let able: Vec<bool> = free.iter().map(|a| *a >= share).collect();
    let mut groups: Vec<usize> =
        able.iter().zip(free).filter(|(able, _)| **able).map(|(_, a)| a / group).collect();
    groups.sort_unstable_by(|a, b| b.cmp(a));
    if k > groups.len() || groups[..k].iter().sum::<usize>() * group < n {
        return Outcome::None;
    }

    let deviation = Deviation::new(free, n);
    let nodes: Vec<Node> = free.iter().map(|a| Node::new(*a, share, extra, group)).collect();
    let rounds = 0..extra.max(1);
    let mut table = Table::default();
    let sums: Vec<i64> = rounds
        .clone()
        .map(|t| {
            table.fill(&nodes, (k, extra), t, true);
            table.least(k, extra)
        })
        .collect();
    let least = sums.iter().copied().min().unwrap_or(NEVER);
    if least >= NEVER {
        return Outcome::None;
    }
    let limit = deviation.largest_alike(least);
    let first = rounds.clone().filter(|t| sums[*t] <= limit).map(|t| {
        table.fill(&nodes, (k, extra), t, true);
        table.first(&nodes, (k, extra), limit)
    });
    let Some(chosen) = first.min_by(|a, b| in_order(a, b)) else { return Outcome::None };
    if endless(free, k, (share, extra, group), (deviation.rounded(least) == 0).then_some(&chosen)) {
        return Outcome::Endless;
    }

    let base: i64 = chosen.iter().map(|at| nodes[*at].gives).sum();
    let within: Vec<Node> = chosen.iter().map(|at| Node { gives: 0, ..nodes[*at] }).collect();
    let extra_of = if extra == 0 { Vec::new() } else { remainder(&within, extra, limit - base, &mut table) };
    let extra = extra_of.into_iter().map(|at| chosen[at]).collect();
    Outcome::Found(Balanced { nodes: chosen, share, extra })
}

/// The largest subset, of those the first, that gives `extra` groups within `limit`.
fn remainder(nodes: &[Node], extra: usize, limit: i64, table: &mut Table) -> Vec<usize> {
    let most = nodes.iter().filter(|node| node.left > 0).count();
    // Without a full round at least `extra` give one each; with one, at most `extra` do.
    for rounds in [0..1, 1..extra] {
        let reached: Vec<Vec<i64>> = rounds
            .clone()
            .map(|t| {
                table.fill(nodes, (most, extra), t, false);
                (0..=most).map(|size| table.least(size, extra)).collect()
            })
            .collect();
        let within = |size: &usize| reached.iter().any(|sums| sums[*size] <= limit);
        let Some(size) = (1..=most).rev().find(within) else { continue };
        let start = rounds.start;
        let first = rounds.filter(|t| reached[*t - start][size] <= limit).map(|t| {
            table.fill(nodes, (most, extra), t, false);
            table.first(nodes, (size, extra), limit)
        });
        return first.min_by(|a, b| in_order(a, b)).unwrap_or_default();
    }
    Vec::new()
}

/// Subsets of one size, as they are walked.
fn in_order(a: &[usize], b: &[usize]) -> Ordering {
    a.cmp(b)
}

/// Free CPUs afterwards: their standard deviation in thousandths, from the sum of squares relative to what it was
/// before.
struct Deviation {
    /// Sum of squares before.
    before: i128,
    /// Free CPUs afterwards.
    sum: i128,
    nodes: i128,
    /// The mean afterwards in thousandths, rounded as the kubelet does before it goes on.
    mean: i128,
}

impl Deviation {
    fn new(free: &[usize], n: usize) -> Self {
        let wide = |n: usize| i128::try_from(n).unwrap_or(i128::MAX);
        let (sum, nodes) = (wide(free.iter().sum::<usize>().saturating_sub(n)), wide(free.len().max(1)));
        Self {
            before: free.iter().map(|a| wide(*a) * wide(*a)).sum(),
            sum,
            nodes,
            mean: (2000 * sum + nodes) / (2 * nodes),
        }
    }

    /// `nodes` × variance, in millionths, as `4 ×` that: half a thousandth is then a whole number.
    fn scaled(&self, change: i64) -> i128 {
        4 * (1_000_000 * (self.before + i128::from(change)) + self.constant())
    }

    fn constant(&self) -> i128 {
        self.nodes * self.mean * self.mean - 2000 * self.mean * self.sum
    }

    /// In thousandths, half up: the largest r with `(2r - 1)² nodes <= scaled`.
    fn rounded(&self, change: i64) -> i128 {
        let scaled = self.scaled(change).max(0);
        let root = (scaled / self.nodes).isqrt();
        root.midpoint(1)
    }

    /// The largest change with the same rounded deviation.
    fn largest_alike(&self, change: i64) -> i64 {
        let next = 2 * self.rounded(change) + 1;
        // 4 (10^6 (before + change) + constant) < next² nodes
        let bound = next * next * self.nodes - 4 * self.constant() - 4_000_000 * self.before;
        i64::try_from((bound - 1).div_euclid(4_000_000)).unwrap_or(NEVER - 1)
    }
}

/// A node, or one that may give the remainder.
#[derive(Debug, Clone, Copy)]
struct Node {
    able: bool,
    /// What its share adds to the sum of squares.
    gives: i64,
    /// Groups left after its share, at most as many as are to be given.
    left: usize,
    /// What one group more adds: `once + square · e²` for `e` groups is `linear · e + square · e²`.
    linear: i64,
    square: i64,
}

impl Node {
    fn new(free: usize, share: usize, extra: usize, group: usize) -> Self {
        let wide = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let Some(rest) = free.checked_sub(share) else {
            return Self { able: false, gives: 0, left: 0, linear: 0, square: 0 };
        };
        Self {
            able: true,
            gives: wide(share) * wide(share) - 2 * wide(share) * wide(free),
            left: (rest / group).min(extra),
            linear: -2 * wide(group) * wide(rest),
            square: wide(group) * wide(group),
        }
    }

    fn adds(&self, groups: usize) -> i64 {
        let e = i64::try_from(groups).unwrap_or(i64::MAX);
        self.gives + self.linear * e + self.square * e * e
    }
}

/// The least sums that the nodes from some place on can reach.
#[derive(Default)]
struct Table {
    sums: Vec<i64>,
    /// Most to choose, most to give.
    size: (usize, usize),
    rounds: usize,
    /// Whether a chosen node may give nothing more.
    idle: bool,
}

/// What is left to do: nodes to choose, groups to give, extras still given.
type State = (usize, usize, bool);

impl Table {
    fn at(&self, node: usize, (choose, give, extras): State) -> usize {
        ((node * (self.size.0 + 1) + choose) * (self.size.1 + 1) + give) * 2 + usize::from(extras)
    }

    /// Ways of choosing a node when `give` groups are left: the sum it adds, and what is left then.
    fn ways(&self, node: &Node, (choose, give, extras): State) -> impl Iterator<Item = (i64, State)> + use<> {
        let full = node.left.min(self.rounds);
        let groups = full + usize::from(extras && node.left > self.rounds);
        let gives = (node.able && choose > 0 && node.left > 0 && groups <= give)
            .then(|| (node.adds(groups), (choose - 1, give - groups, extras)));
        let idle = (self.idle && node.able && choose > 0).then(|| (node.gives, (choose - 1, give, extras)));
        gives.into_iter().chain(idle)
    }

    fn fill(&mut self, nodes: &[Node], size: (usize, usize), rounds: usize, idle: bool) {
        self.size = size;
        self.rounds = rounds;
        self.idle = idle;
        self.sums.clear();
        self.sums.resize((nodes.len() + 1) * (size.0 + 1) * (size.1 + 1) * 2, NEVER);
        for extras in [false, true] {
            let end = self.at(nodes.len(), (0, 0, extras));
            self.sums[end] = 0;
        }
        for (at, node) in nodes.iter().enumerate().rev() {
            for choose in 0..=size.0.min(nodes.len() - at) {
                for give in 0..=size.1 {
                    for extras in [false, true] {
                        let state = (choose, give, extras);
                        let mut least = self.sums[self.at(at + 1, state)];
                        for (adds, then) in self.ways(node, state) {
                            least = least.min(adds + self.sums[self.at(at + 1, then)]);
                        }
                        if extras {
                            least = least.min(self.sums[self.at(at, (choose, give, false))]);
                        }
                        let here = self.at(at, state);
                        self.sums[here] = least.min(NEVER);
                    }
                }
            }
        }
    }

    /// The least sum with so many chosen and given; [`NEVER`] if that cannot be.
    fn least(&self, choose: usize, give: usize) -> i64 {
        // Sums below 0 are added to `NEVER` on the way.
        let sum = self.sums[self.at(0, (choose, give, true))];
        if sum > NEVER / 2 { NEVER } else { sum }
    }

    /// The first subset whose least sum is within the limit; there is one.
    fn first(&self, nodes: &[Node], (choose, give): (usize, usize), limit: i64) -> Vec<usize> {
        let mut chosen = Vec::with_capacity(choose);
        // What the nodes chosen so far can have come to.
        let mut reached: Vec<(State, i64)> = vec![((choose, give, true), 0)];
        for (at, node) in nodes.iter().enumerate() {
            if chosen.len() == choose {
                break;
            }
            let ended: Vec<(State, i64)> =
                reached.iter().filter(|(s, _)| s.2).map(|((c, g, _), sum)| ((*c, *g, false), *sum)).collect();
            let with: Vec<(State, i64)> = reached
                .iter()
                .chain(&ended)
                .flat_map(|(state, sum)| self.ways(node, *state).map(move |(adds, then)| (then, sum + adds)))
                .collect();
            if with.iter().any(|(state, sum)| sum + self.sums[self.at(at + 1, *state)] <= limit) {
                chosen.push(at);
                reached = best_of_each(with);
            }
        }
        chosen
    }
}

fn best_of_each(mut states: Vec<(State, i64)>) -> Vec<(State, i64)> {
    states.sort_unstable();
    states.dedup_by_key(|(state, _)| *state);
    states
}

/// Beyond this many nodes the kubelet's own walk over subsets (2^25) does not end in any useful time either.
const MOST_NODES: usize = 24;

/// Whether the kubelet's search meets a subset of some k nodes with at least `extra` groups' worth of CPUs left, but
/// fewer whole groups. It walks k-subsets in order, and stops after `last` if that leaves all nodes equally free.
fn endless(
    free: &[usize],
    k: usize,
    (share, extra, group): (usize, usize, usize),
    last: Option<&Vec<usize>>,
) -> bool {
    // At least two nodes must have something that is no whole group, and a whole group too.
    let ragged = |a: &&usize| **a >= share + group && !(**a).is_multiple_of(group);
    if group < 2 || extra < 3 || free.iter().filter(ragged).count() < 2 {
        return false;
    }
    if free.len() > MOST_NODES {
        return true;
    }
    let rests: Vec<Option<usize>> = free.iter().map(|a| a.checked_sub(share)).collect();
    let walk = Endless { rests: &rests, extra, group };
    let Some(last) = last else { return walk.exists(&[], 0, k) };
    // Up to `last`: itself, or the same up to some place and there an earlier node.
    let ids = |at: usize, next: usize| -> Vec<usize> { last[..at].iter().copied().chain([next]).collect() };
    let earlier = (0..k).any(|at| {
        let from = if at == 0 { 0 } else { last[at - 1] + 1 };
        (from..last[at]).any(|next| walk.exists(&ids(at, next), next + 1, k))
    });
    earlier || walk.exists(last, free.len(), k)
}

struct Endless<'a> {
    /// CPUs left after the share; `None` for too few.
    rests: &'a [Option<usize>],
    extra: usize,
    group: usize,
}

impl Endless<'_> {
    /// Whether there are k nodes, `given` and others from place `from` on, with such a subset.
    fn exists(&self, given: &[usize], from: usize, k: usize) -> bool {
        let extra = self.extra;
        // By nodes chosen, groups of the subset (fewer than `extra`), groups of all (capped): the most CPUs of the subset
        // that are no whole group.
        let size = (k + 1) * extra * (extra + 1);
        let at = |chosen: usize, sub: usize, all: usize| (chosen * extra + sub) * (extra + 1) + all;
        let mut most: Vec<Option<usize>> = vec![None; size];
        most[at(0, 0, 0)] = Some(0);
        let candidates = given.iter().map(|n| (*n, true)).chain((from..self.rests.len()).map(|n| (n, false)));
        for (node, must) in candidates {
            let Some(rest) = self.rests[node] else {
                if must {
                    return false;
                }
                continue;
            };
            let (groups, odd) = (rest / self.group, rest % self.group);
            for chosen in (0..=k).rev() {
                for sub in (0..extra).rev() {
                    for all in (0..=extra).rev() {
                        let Some(so_far) = most[at(chosen, sub, all)] else { continue };
                        if must {
                            most[at(chosen, sub, all)] = None;
                        }
                        if chosen == k {
                            continue;
                        }
                        let all = (all + groups).min(extra);
                        let mut reach = |sub: usize, odd: usize| {
                            let then = &mut most[at(chosen + 1, sub, all)];
                            *then = Some(then.map_or(odd, |old| old.max(odd)));
                        };
                        reach(sub, so_far);
                        if groups > 0 && sub + groups < extra {
                            reach(sub + groups, so_far + odd);
                        }
                    }
                }
            }
        }
        (0..extra).any(|sub| most[at(k, sub, extra)].is_some_and(|odd| odd >= (extra - sub) * self.group))
    }
}
