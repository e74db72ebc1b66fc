//! The best set of a given number of nodes that a number of demands allow.
//!
//! Problem: of all sets of k common nodes find the one that fits best (nearest, then lowest value as a bitmap) such that
//! what is outside of it can be paid for ([`Limits`]). Steps: decide nodes from the highest number down, "out" first:
//! the first set that is found has the lowest value. Give up a branch when sums say that it cannot end well: too much
//! would be out, too many sockets touched, or (with distances) everything in it is farther than what is known.
//! When nothing can go wrong any more the lowest nodes are taken at once, which is what happens on a machine with room.
//! A branch that failed leaves a note: with as little slack at the same point it fails again.
//! Invariant: the answer is exact unless `exact` says that [`MOST_STEPS`] ran out, or that there were too many
//! different ways to divide the nodes that are out.

use super::{
    limits::{Limits, States, covers},
    near::{Near, floor, twins},
};
use std::collections::HashMap;

/// Decisions before a search ends with the best that is known. One takes 0.1 to 0.5 us, so 20 to 100 ms in all.
const MOST_STEPS: usize = 200_000;
/// States of one branch, and notes of one point.
const MOST_STATES: usize = 64;

/// A set may touch so many sockets, no more and no less.
#[derive(Debug)]
pub(super) struct SocketRule {
    /// By place: the sockets that the node has CPUs of.
    pub(super) of_place: Vec<Vec<usize>>,
    /// How many sockets there are.
    pub(super) count: usize,
    /// How many are to be touched.
    pub(super) exactly: usize,
}

/// What is asked.
#[derive(Debug)]
pub(super) struct Problem<'a> {
    /// Common nodes.
    pub(super) n: usize,
    /// How many of them are in the set; 1 to `n`.
    pub(super) size: usize,
    pub(super) limits: &'a Limits,
    pub(super) sockets: Vec<SocketRule>,
    /// Row-major over the common nodes.
    pub(super) distances: Option<&'a [u64]>,
}

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Places, ascending.
    pub(super) set: Option<Vec<usize>>,
    pub(super) exact: bool,
}

/// The search's answer.
pub(super) fn best(problem: &Problem<'_>) -> Found {
    let limits = problem.limits;
    let near = problem.distances.map(|rows| Near::new(rows, problem.n, problem.size));
    let mut search = Search {
        problem,
        near,
        chosen: Vec::with_capacity(problem.size),
        touched: problem.sockets.iter().map(|s| vec![0; s.count]).collect(),
        best: None,
        at_most: u64::MAX,
        floor: problem.distances.map_or(0, |rows| floor(rows, problem.n, problem.size)),
        failed: HashMap::new(),
        twins: problem.distances.filter(|_| problem.sockets.is_empty()).map(|rows| twins(rows, problem.n)),
        forced: vec![0; problem.n],
        cuts: 0,
        drops: 0,
        steps: 0,
        exact: true,
    };
    let grown = search.greedy();
    if let Some((sum, _)) = &grown {
        search.at_most = *sum;
    }
    search.decide(problem.n, problem.size, Some(limits.start()), false);
    let nearest = search.best.as_ref().is_some_and(|(sum, _)| *sum <= search.floor);
    search.exact &= search.steps <= MOST_STEPS || nearest;
    let set = search.best.or(grown).map(|(_, mut set)| {
        set.sort_unstable();
        set
    });
    Found { set, exact: search.exact }
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    near: Option<Near<'a>>,
    /// Descending.
    chosen: Vec<usize>,
    /// Per rule and socket: chosen nodes that touch it.
    touched: Vec<Vec<usize>>,
    /// Its sum of distances (0 without), and it.
    best: Option<(u64, Vec<usize>)>,
    /// Nothing farther can be the best.
    at_most: u64,
    /// Nothing is nearer.
    floor: u64,
    /// Places left, nodes left to choose: states that come to nothing.
    failed: HashMap<(usize, usize), Vec<States>>,
    /// With distances: by place, the lowest node that it could be exchanged for.
    twins: Option<Vec<usize>>,
    /// By that node: how many of its kind were chosen freely, so that the lower ones have to be in, too.
    forced: Vec<usize>,
    /// Branches given up for their distance.
    cuts: usize,
    /// Branches with too many states.
    drops: usize,
    steps: usize,
    exact: bool,
}

impl Search<'_> {
    /// Decides the first `r` places, of which `left` are to be in. `None`: whatever is out can be paid for. `lossy`:
    /// there were more states.
    fn decide(&mut self, r: usize, left: usize, mut states: Option<States>, lossy: bool) {
        self.steps += 1;
        // What comes later has a greater value.
        if self.steps > MOST_STEPS || self.best.as_ref().is_some_and(|(sum, _)| *sum <= self.floor) {
            return;
        }
        let limits = self.problem.limits;
        if let Some(now) = &mut states {
            self.prune(r, left, now);
            if now.is_empty() {
                self.exact &= !lossy;
                return;
            }
            let any = now.chunks_exact(limits.width()).any(|state| limits.may_leave_any(state, r, r - left));
            if any {
                states = None;
            }
        }
        if !self.sockets_allow(r, left) {
            return;
        }
        if let Some(near) = &mut self.near {
            let least = near.least(r, left);
            if least > self.at_most || self.best.as_ref().is_some_and(|(sum, _)| least >= *sum) {
                self.cuts += 1;
                return;
            }
        }
        if left == 0 && (states.is_none() || r == 0) {
            self.found();
            return;
        }
        if states.is_none() && self.near.is_none() && self.problem.sockets.is_empty() {
            self.chosen.extend((0..left).rev());
            self.found();
            return;
        }
        let (cuts, drops, known) = (self.cuts, self.drops, self.best.is_some());
        let place = r - 1;
        let kind = self.twins.as_ref().map(|twins| twins[place]);
        if left < r && kind.is_none_or(|kind| self.forced[kind] == 0) {
            match &states {
                None => self.decide(place, left, None, lossy),
                Some(now) => {
                    let (next, dropped) = limits.leave_out(now, place, MOST_STATES);
                    self.drops += usize::from(dropped);
                    if next.is_empty() {
                        self.exact &= !lossy;
                    } else {
                        self.decide(place, left, Some(next), lossy || dropped);
                    }
                }
            }
        }
        if left > 0 {
            let next = states.as_deref().map(|now| limits.keep(now, place));
            // Free to exchange the node for a lower one of its kind, a set that leaves that out is not the best.
            let free = kind.filter(|_| states.is_none());
            if let Some(kind) = free {
                self.forced[kind] += 1;
            }
            self.choose(place);
            self.decide(place, left - 1, next, lossy);
            self.unchoose(place);
            if let Some(kind) = free {
                self.forced[kind] -= 1;
            }
        }
        if let Some(now) = states
            && !known
            && self.best.is_none()
            && (self.cuts, self.drops) == (cuts, drops)
            && self.problem.sockets.is_empty()
        {
            self.note(r, left, &now);
        }
    }

    /// Drops states that cannot end well.
    fn prune(&self, r: usize, left: usize, states: &mut States) {
        let limits = self.problem.limits;
        let width = limits.width();
        let failed = self.failed.get(&(r, left));
        let hopeless = |state: &[u64]| {
            !limits.may_leave(state, r, r - left)
                || failed.is_some_and(|notes| {
                    notes.iter().flat_map(|n| n.chunks_exact(width)).any(|note| covers(note, state))
                })
        };
        let mut at = 0;
        while at < states.len() {
            if hopeless(&states[at..at + width]) {
                let last = states.len() - width;
                states.copy_within(last.., at);
                states.truncate(last);
            } else {
                at += width;
            }
        }
    }

    fn note(&mut self, r: usize, left: usize, states: &States) {
        let notes = self.failed.entry((r, left)).or_default();
        if notes.len() < MOST_STATES {
            notes.push(states.clone());
        }
    }

    fn found(&mut self) {
        let sum = self.near.as_ref().map_or(0, |near| near.sum);
        // Equal ones come in ascending order of value.
        if self.best.as_ref().is_none_or(|(known, _)| sum < *known) {
            self.best = Some((sum, self.chosen.clone()));
        }
    }

    fn choose(&mut self, place: usize) {
        self.chosen.push(place);
        for (rule, touched) in self.problem.sockets.iter().zip(&mut self.touched) {
            rule.of_place[place].iter().for_each(|socket| touched[*socket] += 1);
        }
        if let Some(near) = &mut self.near {
            near.choose(place);
        }
    }

    fn unchoose(&mut self, place: usize) {
        self.chosen.pop();
        for (rule, touched) in self.problem.sockets.iter().zip(&mut self.touched) {
            rule.of_place[place].iter().for_each(|socket| touched[*socket] -= 1);
        }
        if let Some(near) = &mut self.near {
            near.unchoose(place);
        }
    }

    /// Whether `left` of the first `r` places could make every rule's number of sockets. A node counts for its first
    /// socket, which is an upper bound where it has several.
    fn sockets_allow(&self, r: usize, left: usize) -> bool {
        self.problem.sockets.iter().zip(&self.touched).all(|(rule, touched)| {
            let now = touched.iter().filter(|t| **t > 0).count();
            let Some(more) = rule.exactly.checked_sub(now) else { return false };
            if left == 0 {
                return more == 0;
            }
            let mut nodes = vec![0_usize; rule.count];
            let mut reach = vec![false; rule.count];
            let mut anywhere = 0;
            for sockets in &rule.of_place[..r] {
                match sockets.first() {
                    Some(first) => nodes[*first] += 1,
                    None => anywhere += 1,
                }
                for socket in sockets {
                    reach[*socket] = true;
                }
            }
            let open = (0..rule.count).filter(|s| touched[*s] == 0 && reach[*s]).count();
            let inside: usize = (0..rule.count).filter(|s| touched[*s] > 0).map(|s| nodes[s]).sum();
            let mut others: Vec<usize> =
                (0..rule.count).filter(|s| touched[*s] == 0).map(|s| nodes[s]).collect();
            others.sort_unstable_by(|a, b| b.cmp(a));
            open >= more && anywhere + inside + others.iter().take(more).sum::<usize>() >= left
        })
    }

    /// Some allowed set that is likely near, and its sum of distances: grown from each node by whichever is nearest.
    fn greedy(&mut self) -> Option<(u64, Vec<usize>)> {
        let (n, size) = (self.problem.n, self.problem.size);
        let mut near = self.near.take()?;
        let mut least: Option<(u64, Vec<usize>)> = None;
        for seed in 0..n {
            let mut set = vec![seed];
            near.choose(seed);
            while set.len() < size {
                let outside = (0..n).filter(|p| !set.contains(p));
                let Some(next) = outside.min_by_key(|p| near.cost[*p]) else { break };
                near.choose(next);
                set.push(next);
            }
            if least.as_ref().is_none_or(|(sum, _)| near.sum < *sum) && self.allows(&set) {
                least = Some((near.sum, set.clone()));
            }
            while let Some(place) = set.pop() {
                near.unchoose(place);
            }
        }
        self.near = Some(near);
        least
    }

    fn allows(&self, set: &[usize]) -> bool {
        let limits = self.problem.limits;
        let sockets = self.problem.sockets.iter().all(|rule| {
            let mut touched = vec![false; rule.count];
            set.iter().flat_map(|p| &rule.of_place[*p]).for_each(|s| touched[*s] = true);
            touched.iter().filter(|t| **t).count() == rule.exactly
        });
        let (mut states, mut left) = (limits.start(), set.len());
        for place in (0..self.problem.n).rev() {
            let (r, mut now) = (place + 1, states.chunks_exact(limits.width()));
            if now.any(|state| limits.may_leave_any(state, r, r - left)) {
                return sockets;
            }
            if set.contains(&place) {
                left -= 1;
                states = limits.keep(&states, place);
            } else {
                states = limits.leave_out(&states, place, MOST_STATES).0;
            }
        }
        sockets && !states.is_empty()
    }
}
