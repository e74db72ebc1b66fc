//! How much each demand can do without, and what that says of the nodes still to be looked at.
//!
//! A demand over nodes with free amounts w and a need is a *limit*: the nodes outside of its set may hold at most
//! `slack` = all that is free - need. Things near several nodes (*shared*) are lost when the last of those nodes is out.
//! Steps: cut demands to the nodes that all of them look at (places 0..n, ascending by node); per limit, a table of the
//! sums of the q smallest weights of the first r places, which bounds what leaving out q more of them costs at least.
//! A *state* is a vector: what is left of each limit's slack, then a flag per shared thing that is safe already. Bigger
//! is never worse, in every component.

use super::Demand;
use crate::nodeset::NodeId;
use smallvec::SmallVec;

/// A weight that no slack pays for: the node has to stay.
const NEVER: u64 = u64::MAX;

/// Which sets a node that is not in the common part is outside of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outside {
    /// All demands have the same set: outside of every one.
    Every,
    /// The common part of different sets: outside of at least one.
    One,
}

/// States, one after the other.
pub(super) type States = SmallVec<[u64; 16]>;

#[derive(Debug)]
struct Limit {
    family: usize,
    slack: u64,
    /// By place.
    weight: Vec<u64>,
    /// `[r * (n + 1) + q]`: the q smallest weights of the first r places, summed.
    least: Vec<u64>,
}

#[derive(Debug)]
struct Shared {
    family: usize,
    /// Column of the limit that pays.
    limit: usize,
    /// Descending: the order in which places are decided.
    places: Vec<usize>,
    weight: u64,
}

/// The limits of several demands over common places.
#[derive(Debug)]
pub(super) struct Limits {
    n: usize,
    outside: Outside,
    families: usize,
    each: Vec<Limit>,
    shared: Vec<Shared>,
    /// For [`Outside::One`]: the same table for the cheapest family of each place, in shares of the slack.
    least_share: Vec<f64>,
}

impl Limits {
    /// `None` if even all common nodes will not do. Each demand counts as often as it is listed.
    pub(super) fn new(demands: &[&Demand], common: &[NodeId], outside: Outside) -> Option<Self> {
        let n = common.len();
        let mut all =
            Self { n, outside, families: 0, each: Vec::new(), shared: Vec::new(), least_share: Vec::new() };
        for demand in demands {
            // One set for every demand: to count one twice changes nothing.
            let times = if outside == Outside::Every { 1 } else { demand.lists() };
            for _ in 0..times {
                all.add(demand, common)?;
            }
        }
        if outside == Outside::One {
            all.least_share = all.shares();
        }
        Some(all)
    }

    fn add(&mut self, demand: &Demand, common: &[NodeId]) -> Option<()> {
        let family = self.families;
        self.families += 1;
        let place: Vec<Option<usize>> =
            demand.nodes.iter().map(|node| common.binary_search(node).ok()).collect();
        // Nodes that are not common are outside of every common set, but stay in the demand's own one.
        let stays = self.outside == Outside::One;
        let first = self.each.len();
        for row in &demand.rows {
            let mut weight = vec![0; self.n];
            let mut sum = row.held;
            for (free, place) in row.free.iter().zip(&place) {
                match place {
                    Some(place) => weight[*place] = *free,
                    None if stays => {}
                    None => continue,
                }
                sum = sum.saturating_add(*free);
            }
            for spread in row.spread.iter().filter(|s| s.free > 0) {
                let at: Vec<usize> = spread.at.iter().filter_map(|p| place[*p]).collect();
                if at.is_empty() && !stays {
                    continue;
                }
                sum = sum.saturating_add(spread.free);
                if !(stays && at.len() < spread.at.len()) {
                    self.share(family, &mut weight, at, spread.free);
                }
            }
            let slack = sum.checked_sub(row.need)?;
            self.each.push(Limit { family, slack, weight, least: Vec::new() });
        }
        let mut kept = vec![0; self.n];
        for must in &demand.must {
            let at: Vec<usize> = must.iter().filter_map(|p| place[*p]).collect();
            if stays && at.len() < must.len() {
                continue;
            }
            if at.is_empty() {
                return None;
            }
            self.share_of(first, family, &mut kept, at, NEVER);
        }
        for limit in &mut self.each[first..] {
            limit.weight.iter_mut().zip(&kept).filter(|(_, kept)| **kept > 0).for_each(|(w, _)| *w = NEVER);
            limit.least = least_sums(&limit.weight, 0, u64::saturating_add);
        }
        Some(())
    }

    fn share(&mut self, family: usize, weight: &mut [u64], at: Vec<usize>, amount: u64) {
        self.share_of(self.each.len(), family, weight, at, amount);
    }

    /// Something near these places: of one place it is that place's own.
    fn share_of(&mut self, limit: usize, family: usize, own: &mut [u64], mut at: Vec<usize>, amount: u64) {
        if let [one] = at.as_slice() {
            own[*one] = own[*one].saturating_add(amount);
            return;
        }
        at.sort_unstable_by(|a, b| b.cmp(a));
        self.shared.push(Shared { family, limit, places: at, weight: amount });
    }

    /// Numbers per state; at least 1.
    pub(super) fn width(&self) -> usize {
        self.each.len() + self.shared.len()
    }

    /// Nothing is out yet.
    pub(super) fn start(&self) -> States {
        self.each.iter().map(|l| l.slack).chain(self.shared.iter().map(|_| 0)).collect()
    }

    /// The states after `place` is out: none if that cannot be paid. True if some were dropped for being too many.
    pub(super) fn leave_out(&self, states: &[u64], place: usize, most: usize) -> (States, bool) {
        let mut next = States::new();
        for state in states.chunks_exact(self.width()) {
            match self.outside {
                Outside::Every => {
                    let mut state = States::from_slice(state);
                    if (0..self.families).all(|family| self.pay(&mut state, place, family)) {
                        self.admit(&mut next, &state);
                    }
                }
                Outside::One => {
                    for family in 0..self.families {
                        let mut state = States::from_slice(state);
                        if self.pay(&mut state, place, family) {
                            self.secure(&mut state, place, Some(family));
                            self.admit(&mut next, &state);
                        }
                    }
                }
            }
        }
        let dropped = next.len() > most * self.width();
        if dropped {
            let mut all: Vec<&[u64]> = next.chunks_exact(self.width()).collect();
            all.sort_by(|a, b| self.share_left(b).total_cmp(&self.share_left(a)));
            next = all[..most].iter().flat_map(|state| state.iter().copied()).collect();
        }
        (next, dropped)
    }

    /// The states after `place` is in.
    pub(super) fn keep(&self, states: &[u64], place: usize) -> States {
        let mut next = States::from_slice(states);
        if !self.shared.is_empty() {
            next.chunks_exact_mut(self.width()).for_each(|state| self.secure(state, place, None));
        }
        next
    }

    fn pay(&self, state: &mut [u64], place: usize, family: usize) -> bool {
        for (at, limit) in self.each.iter().enumerate().filter(|(_, l)| l.family == family) {
            match state[at].checked_sub(limit.weight[place]).filter(|_| limit.weight[place] != NEVER) {
                Some(left) => state[at] = left,
                None => return false,
            }
        }
        for (at, shared) in self.shared.iter().enumerate().filter(|(_, s)| s.family == family) {
            if shared.places.last() == Some(&place) && state[self.each.len() + at] == 0 {
                match state[shared.limit].checked_sub(shared.weight).filter(|_| shared.weight != NEVER) {
                    Some(left) => state[shared.limit] = left,
                    None => return false,
                }
            }
        }
        true
    }

    /// Things near a place that stays in are safe, except those of the family that leaves it out.
    fn secure(&self, state: &mut [u64], place: usize, except: Option<usize>) {
        for (at, shared) in self.shared.iter().enumerate() {
            if Some(shared.family) != except && shared.places.contains(&place) {
                state[self.each.len() + at] = 1;
            }
        }
    }

    /// Adds a state unless one is there that is as good, and drops those that are not better than it.
    fn admit(&self, states: &mut States, new: &[u64]) {
        let width = self.width();
        let mut at = 0;
        while at < states.len() {
            let known = &states[at..at + width];
            if covers(known, new) {
                return;
            }
            if covers(new, known) {
                let last = states.len() - width;
                states.copy_within(last.., at);
                states.truncate(last);
            } else {
                at += width;
            }
        }
        states.extend_from_slice(new);
    }

    /// Whether `q` of the first `r` places could be left out, as far as sums tell.
    pub(super) fn may_leave(&self, state: &[u64], r: usize, q: usize) -> bool {
        let cell = r * (self.n + 1) + q;
        match self.outside {
            Outside::Every => self.each.iter().zip(state).all(|(l, left)| l.least[cell] <= *left),
            // Rounding is a thousand times smaller than the margin.
            Outside::One => self.share_left(state) * (1.0 + 1e-9) + 1e-9 >= self.least_share[cell],
        }
    }

    /// Whether any `q` of the first `r` places can be left out: nothing needs to be counted any more.
    pub(super) fn may_leave_any(&self, state: &[u64], r: usize, q: usize) -> bool {
        let cell = |q: usize| r * (self.n + 1) + q;
        let ample = |family: usize| {
            let shared = self.shared.iter().filter(|s| s.family == family).map(|s| s.weight);
            let shared = shared.fold(0, u64::saturating_add);
            let limits = self.each.iter().zip(state).filter(|(l, _)| l.family == family);
            limits.into_iter().all(|(limit, left)| {
                let all = limit.least[cell(r)];
                let most = all - limit.least[cell(r - q)];
                all != NEVER && most.saturating_add(shared) <= *left
            })
        };
        match self.outside {
            Outside::Every => (0..self.families).all(ample),
            Outside::One => (0..self.families).any(ample) || self.may_leave_all(state, r),
        }
    }

    /// Whether all of the first `r` places can be left out at once, each by the family that has the most room for it:
    /// then any of them can.
    fn may_leave_all(&self, state: &[u64], r: usize) -> bool {
        let mut state = States::from_slice(state);
        for place in (0..r).rev() {
            let cost = |family: &usize| {
                let limits = self.each.iter().zip(&state).filter(|(l, _)| l.family == *family);
                limits.map(|(l, left)| share(l.weight[place], *left)).fold(0.0, f64::max)
            };
            let cheapest = (0..self.families).min_by(|a, b| cost(a).total_cmp(&cost(b)));
            let Some(family) = cheapest else { return false };
            if !self.pay(&mut state, place, family) {
                return false;
            }
            self.secure(&mut state, place, Some(family));
        }
        true
    }

    fn share_left(&self, state: &[u64]) -> f64 {
        let mut sum = 0.0;
        for (limit, left) in self.each.iter().zip(state) {
            sum += share(*left, limit.slack) / self.rows_of(limit.family);
        }
        sum
    }

    #[allow(clippy::cast_precision_loss, reason = "kinds of memory: a handful")]
    fn rows_of(&self, family: usize) -> f64 {
        self.each.iter().filter(|l| l.family == family).count() as f64
    }

    /// Every family's own slack is worth 1 in all; a place costs at least the cheapest family's share.
    fn shares(&self) -> Vec<f64> {
        let cost = |place: usize, family: usize| -> f64 {
            let limits = self.each.iter().filter(|l| l.family == family);
            let shares = limits.map(|l| match l.weight[place] {
                NEVER => f64::INFINITY,
                weight => share(weight, l.slack),
            });
            shares.sum::<f64>() / self.rows_of(family)
        };
        let cheapest = |place| (0..self.families).map(|f| cost(place, f)).fold(f64::INFINITY, f64::min);
        let weights: Vec<f64> = (0..self.n).map(cheapest).collect();
        least_sums(&weights, 0.0, |a, b| a + b)
    }
}

/// In shares of a slack; of no slack, in absolute numbers.
#[allow(clippy::cast_precision_loss, reason = "bounds are compared with a margin far above 2^-53")]
fn share(amount: u64, slack: u64) -> f64 {
    amount as f64 / slack.max(1) as f64
}

/// Whether a state is as good as another.
pub(super) fn covers(a: &[u64], b: &[u64]) -> bool {
    a.iter().zip(b).all(|(a, b)| a >= b)
}

/// `[r * (n + 1) + q]`: the sum of the q smallest of the first r.
fn least_sums<T: Copy + PartialOrd>(weights: &[T], zero: T, add: impl Fn(T, T) -> T) -> Vec<T> {
    let side = weights.len() + 1;
    let mut table = vec![zero; side * side];
    let mut sorted: Vec<T> = Vec::with_capacity(side);
    for (at, weight) in weights.iter().enumerate() {
        let place = sorted.partition_point(|w| w <= weight);
        sorted.insert(place, *weight);
        let row = &mut table[(at + 1) * side..(at + 2) * side];
        let mut sum = zero;
        for (cell, weight) in row[1..].iter_mut().zip(&sorted) {
            sum = add(sum, *weight);
            *cell = sum;
        }
    }
    table
}
