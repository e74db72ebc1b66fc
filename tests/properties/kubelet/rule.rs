//! The rule of the kubelet's static policy, written down as plainly as it can be: every list is made anew from the CPUs,
//! every subset is walked.

use super::machines::Drawn;
use std::collections::{BTreeMap, BTreeSet};
use truepin::{
    CpuId, CpuSet, NodeSet,
    placement::kubelet::{Label, StaticOptions},
};

pub(super) enum Outcome {
    /// Perhaps other ones than are free, or another number.
    Cpus {
        cpus: CpuSet,
    },
    NotEnough {
        requested: usize,
        available: usize,
    },
    Accounting(i64),
    Endless,
}

type Key = fn(&Label) -> i64;
const CORE: Key = |l| l.core;
const SOCKET: Key = |l| l.socket;
const NODE: Key = |l| i64::from(l.node.0);
const UNCORE: Key = |l| l.uncore;

/// Labels of CPUs that are free.
#[derive(Clone)]
struct Free(Vec<Label>);

impl Free {
    fn with(&self, key: Key, id: i64) -> Vec<Label> {
        self.0.iter().copied().filter(|l| key(l) == id).collect()
    }

    /// Ids of groups of one kind, of CPUs in one of another kind (or anywhere), fewest free first.
    fn sorted(&self, key: Key, within: Option<(Key, i64)>) -> Vec<i64> {
        let inside = self.0.iter().filter(|l| within.is_none_or(|(outer, id)| outer(l) == id));
        let mut ids: Vec<i64> = inside.map(key).collect::<BTreeSet<_>>().into_iter().collect();
        ids.sort_by_key(|id| self.with(key, *id).len());
        ids
    }

    fn without(&self, cpus: &CpuSet) -> Self {
        Self(self.0.iter().copied().filter(|l| !cpus.contains(l.cpu)).collect())
    }
}

struct Rule<'a> {
    all: Free,
    drawn: &'a Drawn,
    options: StaticOptions,
}

struct Taking {
    free: Free,
    taken: CpuSet,
    needed: i64,
}

impl Taking {
    fn take(&mut self, cpus: &[Label]) {
        for label in cpus {
            self.taken.insert(label.cpu);
        }
        self.free = self.free.without(&self.taken);
        self.needed -= signed(cpus.len());
    }

    /// Takes each of some sets that is not larger than what is needed.
    fn take_needed(&mut self, sets: Vec<Vec<Label>>) {
        for set in sets {
            if self.needed >= signed(set.len()) {
                self.take(&set);
            }
        }
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

impl Rule<'_> {
    fn average(&self, groups: usize) -> usize {
        self.drawn.counts.cpus.checked_div(groups).unwrap_or(0)
    }

    fn nodes_first(&self) -> bool {
        self.drawn.counts.sockets >= self.drawn.counts.nodes
    }

    fn nodes(&self, free: &Free) -> Vec<i64> {
        if self.nodes_first() {
            return free.sorted(NODE, None);
        }
        self.sockets(free).into_iter().flat_map(|id| free.sorted(NODE, Some((SOCKET, id)))).collect()
    }

    fn sockets(&self, free: &Free) -> Vec<i64> {
        if !self.nodes_first() {
            return free.sorted(SOCKET, None);
        }
        self.nodes(free).into_iter().flat_map(|id| free.sorted(SOCKET, Some((NODE, id)))).collect()
    }

    fn cores(&self, free: &Free) -> Vec<i64> {
        let (outer, key) =
            if self.nodes_first() { (self.sockets(free), SOCKET) } else { (self.nodes(free), NODE) };
        outer.into_iter().flat_map(|id| free.sorted(CORE, Some((key, id)))).collect()
    }

    fn uncores(&self, free: &Free) -> Vec<i64> {
        self.nodes(free).into_iter().flat_map(|id| free.sorted(UNCORE, Some((NODE, id)))).collect()
    }

    /// The whole groups of those ids of which as many CPUs are free as `size` says.
    fn whole(&self, free: &Free, key: Key, ids: Vec<i64>, size: impl Fn(i64) -> usize) -> Vec<Vec<Label>> {
        let of_size = ids.into_iter().filter(|id| free.with(key, *id).len() == size(*id));
        of_size.map(|id| self.all.with(key, id)).collect()
    }

    fn full_nodes(&self, taking: &mut Taking) {
        let free = taking.free.clone();
        let true_size = |id| self.all.with(NODE, id).len();
        taking.take_needed(self.whole(&free, NODE, self.nodes(&free), true_size));
    }

    fn full_sockets(&self, taking: &mut Taking) {
        let free = taking.free.clone();
        let average = self.average(self.drawn.counts.sockets);
        taking.take_needed(self.whole(&free, SOCKET, self.sockets(&free), |_| average));
    }

    fn caches(&self, taking: &mut Taking) {
        for uncore in self.uncores(&taking.free) {
            if taking.needed >= signed(self.average(self.drawn.counts.uncores)) {
                let free = taking.free.clone();
                let true_size = |id| self.all.with(UNCORE, id).len();
                taking.take_needed(self.whole(&free, UNCORE, self.uncores(&free), true_size));
            }
            if taking.needed < 1 {
                return;
            }
            let per_core = self.average(self.drawn.counts.cores).max(1);
            let needed = usize::try_from(taking.needed).unwrap();
            let cores: BTreeSet<i64> = taking.free.with(UNCORE, uncore).iter().map(CORE).collect();
            let cores: BTreeSet<i64> = cores.into_iter().take(needed.div_ceil(per_core)).collect();
            let mut cpus: Vec<Label> =
                taking.free.0.iter().copied().filter(|l| cores.contains(&l.core)).collect();
            if needed % 2 == 1 && per_core > 1 && cpus.len() > needed {
                cpus.pop();
            }
            if cpus.len() == needed {
                taking.take(&cpus);
                return;
            }
        }
    }

    fn packed(&self, free: &Free, n: usize, caches: bool, available: usize) -> Outcome {
        let spread = self.options.distribute_across_cores;
        if n > free.0.len() {
            return Outcome::NotEnough { requested: n, available };
        }
        let mut taking = Taking { free: free.clone(), taken: CpuSet::new(), needed: signed(n) };
        for step in 0..5 {
            if taking.needed < 1 {
                break;
            }
            match (step, self.nodes_first()) {
                (0, true) | (1, false) => self.full_nodes(&mut taking),
                (0 | 1, _) => self.full_sockets(&mut taking),
                (2, _) if caches => self.caches(&mut taking),
                (3, _) if !spread => {
                    let free = taking.free.clone();
                    let average = self.average(self.drawn.counts.cores);
                    taking.take_needed(self.whole(&free, CORE, self.cores(&free), |_| average));
                }
                (4, _) => {
                    let free = taking.free.clone();
                    let (ids, key) =
                        if spread { (self.sockets(&free), SOCKET) } else { (self.cores(&free), CORE) };
                    for cpu in ids.into_iter().flat_map(|id| free.with(key, id)) {
                        if taking.needed > 0 {
                            taking.take(&[cpu]);
                        }
                    }
                }
                _ => {}
            }
        }
        Outcome::Cpus { cpus: taking.taken }
    }

    fn distributed(&self, free: &Free, n: usize, group: usize, available: usize) -> Outcome {
        if !n.is_multiple_of(group) || n == 0 || n > free.0.len() {
            return self.packed(free, n, false, available);
        }
        // The kubelet lists a node once for each socket that it is in; once is meant.
        let mut nodes: Vec<i64> = Vec::new();
        for node in self.nodes(free) {
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        let count = |node: i64| free.with(NODE, node).len();
        let all_nodes = self.all.0.iter().map(NODE).collect::<BTreeSet<_>>().len();
        let per_node = (self.all.0.len().div_ceil(group)).div_ceil(all_nodes);
        for k in (n / group).div_ceil(per_node)..=(n / group).min(nodes.len()) {
            let share = n / k / group * group;
            let mut best: Option<(f64, Vec<i64>, Vec<i64>)> = None;
            for chosen in subsets(&nodes, k) {
                if best.as_ref().is_some_and(|(deviation, ..)| *deviation == 0.0) {
                    break;
                }
                let groups: usize = chosen.iter().map(|node| count(*node) / group).sum();
                if groups * group < n || chosen.iter().any(|node| count(*node) < share) {
                    continue;
                }
                let left: BTreeMap<i64, usize> = nodes
                    .iter()
                    .map(|node| (*node, count(*node) - if chosen.contains(node) { share } else { 0 }))
                    .collect();
                match remainder(&left, &chosen, n - share * k, group) {
                    None => return Outcome::Endless,
                    Some((deviation, extra))
                        if best.as_ref().is_none_or(|(least, ..)| deviation < *least) =>
                    {
                        best = Some((deviation, chosen, extra));
                    }
                    Some(_) => {}
                }
            }
            if let Some((_, chosen, extra)) = best {
                return self.hand_out(free, n, group, share, &chosen, &extra);
            }
        }
        self.packed(free, n, false, available)
    }

    fn hand_out(
        &self,
        free: &Free,
        n: usize,
        group: usize,
        share: usize,
        chosen: &[i64],
        extra: &[i64],
    ) -> Outcome {
        let mut taking = Taking { free: free.clone(), taken: CpuSet::new(), needed: signed(n) };
        let give = |taking: &mut Taking, node: i64, n: usize| {
            let here = Free(taking.free.with(NODE, node));
            if let Outcome::Cpus { cpus } = self.packed(&here, n, false, 0) {
                let labels: Vec<Label> =
                    self.all.0.iter().copied().filter(|l| cpus.contains(l.cpu)).collect();
                taking.take(&labels);
            }
        };
        for node in chosen {
            give(&mut taking, *node, share);
        }
        let mut remainder = n - share * chosen.len();
        while remainder > 0 {
            let before = remainder;
            for node in extra {
                if remainder > 0 && taking.free.with(NODE, *node).len() >= group {
                    give(&mut taking, *node, group);
                    remainder -= group;
                }
            }
            if remainder == before {
                return Outcome::Endless;
            }
        }
        if taking.needed != 0 {
            return Outcome::Accounting(taking.needed);
        }
        Outcome::Cpus { cpus: taking.taken }
    }

    fn take(&self, cpus: &CpuSet, n: usize) -> Outcome {
        let free = Free(self.all.0.iter().copied().filter(|l| cpus.contains(l.cpu)).collect());
        if !self.options.distribute_across_numa {
            return self.packed(&free, n, self.options.prefer_align_by_uncorecache, cpus.len());
        }
        let per_core = self.average(self.drawn.counts.cores).max(1);
        self.distributed(&free, n, if self.options.full_pcpus_only { per_core } else { 1 }, cpus.len())
    }
}

/// The best way of handing out the remainder; `None` if it never ends.
fn remainder(
    left: &BTreeMap<i64, usize>,
    chosen: &[i64],
    remainder: usize,
    group: usize,
) -> Option<(f64, Vec<i64>)> {
    if remainder == 0 {
        return Some((deviation(left), Vec::new()));
    }
    let may: Vec<i64> = chosen.iter().copied().filter(|node| left[node] >= group).collect();
    let mut best = (f64::INFINITY, Vec::new());
    for subset in (1..=may.len()).rev().flat_map(|size| subsets(&may, size)) {
        if subset.iter().map(|node| left[node]).sum::<usize>() < remainder {
            continue;
        }
        let (mut left, mut remainder) = (left.clone(), remainder);
        while remainder > 0 {
            let before = remainder;
            for node in &subset {
                let free = left.get_mut(node)?;
                if remainder > 0 && *free >= group {
                    *free -= group;
                    remainder -= group;
                }
            }
            if remainder == before {
                return None;
            }
        }
        if deviation(&left) < best.0 {
            best = (deviation(&left), subset);
        }
    }
    Some(best)
}

fn deviation(left: &BTreeMap<i64, usize>) -> f64 {
    let thousandths = |x: f64| (x * 1000.0).round() / 1000.0;
    let float = |n: usize| f64::from(u32::try_from(n).unwrap());
    let mean = thousandths(left.values().map(|n| float(*n)).sum::<f64>() / float(left.len()));
    let squares: f64 = left.values().map(|n| (float(*n) - mean).powi(2)).sum();
    thousandths((squares / float(left.len())).sqrt())
}

/// All `k` of a list, in order.
fn subsets(list: &[i64], k: usize) -> Vec<Vec<i64>> {
    if k == 0 {
        return vec![Vec::new()];
    }
    let Some((first, rest)) = list.split_first() else { return Vec::new() };
    let with = subsets(rest, k - 1).into_iter().map(|tail| [vec![*first], tail].concat());
    with.chain(subsets(rest, k)).collect()
}

pub(super) fn take(drawn: &Drawn, options: StaticOptions, available: &CpuSet, n: usize) -> Outcome {
    Rule { all: Free(drawn.labels.as_slice().to_vec()), drawn, options }.take(available, n)
}

pub(super) fn allocate(
    drawn: &Drawn,
    options: StaticOptions,
    available: &CpuSet,
    affinity: Option<&NodeSet>,
    n: usize,
) -> Outcome {
    let rule = Rule { all: Free(drawn.labels.as_slice().to_vec()), drawn, options };
    let Some(affinity) = affinity else { return rule.take(available, n) };
    let touched = rule.all.0.iter().filter(|l| affinity.contains(l.node));
    let sockets: BTreeSet<i64> = touched.map(SOCKET).collect();
    let near = |l: &&Label| {
        if options.align_by_socket { sockets.contains(&l.socket) } else { affinity.contains(l.node) }
    };
    let aligned: BTreeSet<CpuId> = rule.all.0.iter().filter(near).map(|l| l.cpu).collect();
    let aligned: CpuSet = available.iter().filter(|cpu| aligned.contains(cpu)).collect();
    let first = match rule.take(&aligned, aligned.len().min(n)) {
        Outcome::Cpus { cpus } => cpus,
        other => return other,
    };
    match rule.take(&available.difference(&first), n.saturating_sub(first.len())) {
        Outcome::Cpus { cpus } => Outcome::Cpus { cpus: cpus.union(&first) },
        other => other,
    }
}
