//! The strategy `aligned`: as few NUMA nodes as possible, then near ones, then as few caches, then whole cores.
//!
//! Memory that is asked for has to be free on the nodes that are chosen, together: where the fewest that have the CPUs do
//! not have it, more are taken.
//!
//! Problem: among all sets of `n` free CPUs find the one that is best by, in this order: fewest groups (a group is a
//! NUMA node, or the CPUs of no node), fewest of them outside `near`, least distance to `near`, least distance among
//! themselves, and then what `fill` says: fewest caches, whole cores, best fit, lowest numbers.
//! Steps: the fewest groups follow from the counts alone, unless whole cores of odd sizes must add up exactly; groups
//! of that number are walked, at most 20,000 subsets of one size; of those that are equal up to distance, the 64 with
//! the least left over are filled in and compared.
//! Beyond 20,000 (three of 64 nodes, four of 28) only likely subsets are looked at: the largest groups, and around
//! each group its nearest. The number of groups is then still the fewest, unless whole cores of odd sizes must add up
//! exactly; the distance may not be the least. Nodes without free CPUs cost nothing.
//! Invariants: the result has `n` CPUs, all free and allocatable; a policy that refuses refuses only when no set of
//! CPUs obeys it, with the exception just named.

use super::{
    Fits, NodeFree, Placement, Refusal, RefusalKind,
    fill::{self, Choice},
    inventory::{Inventory, fill_cores},
    subsets,
};
use crate::{
    cpuset::CpuSet,
    nodeset::{NodeId, NodeSet},
    owner::Owner,
    request::{AlignmentPolicy, Isolation, Request},
    topology::{CpuTopology, REMOTE_DISTANCE},
};
use std::{cmp::Reverse, collections::BTreeMap};

/// No memory is claimed.
const NOTHING: &BTreeMap<NodeId, u64> = &BTreeMap::new();

/// How many equal node sets are filled in and compared: all single nodes of 64.
const FILLED: usize = 64;

/// Chooses CPUs for a request.
///
/// `allocatable`: what may be given when nothing is taken (online without reserved); `free`: what is not taken. CPUs
/// that are not online, or free and not allocatable, are never given. The policies none and best-effort are alike
/// here: neither refuses for alignment.
pub fn place(
    topology: &CpuTopology,
    allocatable: &CpuSet,
    free: &CpuSet,
    request: &Request,
) -> Result<Placement, Box<Refusal>> {
    place_beside(topology, allocatable, free, NOTHING, request)
}

/// Like [`place`], where `claimed` bytes of each node's memory are others' already.
pub fn place_beside(
    topology: &CpuTopology,
    allocatable: &CpuSet,
    free: &CpuSet,
    claimed: &BTreeMap<NodeId, u64>,
    request: &Request,
) -> Result<Placement, Box<Refusal>> {
    let allocatable = allocatable.intersection(topology.online());
    let free = free.intersection(&allocatable);
    let search = Search::new(topology, &allocatable, &free, claimed, request);
    let n = request.cpus as usize;
    let now = Inventory::new(topology, &free);

    let unknown: NodeSet = request.near.iter().filter(|n| topology.node(*n).is_none()).collect();
    let kind = if n == 0 {
        RefusalKind::Nothing
    } else if !unknown.is_empty() {
        RefusalKind::UnknownNodes { nodes: unknown }
    } else if request.memory > 0 && topology.nodes().is_empty() {
        RefusalKind::MemoryWithoutNodes
    } else {
        match search.fewest_best(&now, search.hard) {
            Some((groups, choice)) if search.allows(groups.len()) => {
                let cpus = fill::take(topology, &now, &choice, n);
                let nodes: Vec<NodeId> = groups.iter().filter_map(|g| now.groups[*g].node).collect();
                let memory = search.split(&nodes, &cpus);
                return Ok(Placement { memory, ..Placement::of(topology, cpus, &search.near) });
            }
            found => search.why(&now, found.map(|(groups, _)| groups.len())),
        }
    };
    Err(Box::new(search.refusal(kind, &now)))
}

/// Why a request is refused, by a strategy that found that out for itself; `free` is allocatable and online.
pub(super) fn refusal(
    topology: &CpuTopology,
    allocatable: &CpuSet,
    free: &CpuSet,
    request: &Request,
    kind: RefusalKind,
) -> Refusal {
    Search::new(topology, allocatable, free, NOTHING, request).refusal(kind, &Inventory::new(topology, free))
}

/// The memory of a request whose CPUs another strategy has chosen, by node: on `nodes` and those of the CPUs, and on others
/// only where those do not have it.
pub(crate) fn split_memory(
    topology: &CpuTopology,
    claimed: &BTreeMap<NodeId, u64>,
    bytes: u64,
    nodes: &NodeSet,
    cpus: &CpuSet,
) -> BTreeMap<NodeId, u64> {
    let request = Request {
        owner: Owner::Run(String::new()),
        cpus: 0,
        numa: AlignmentPolicy::BestEffort,
        whole_cores: false,
        near: NodeSet::new(),
        isolation: Isolation::Auto,
        memory: bytes,
    };
    let search = Search::new(topology, cpus, cpus, claimed, &request);
    let near = topology.nodes_of(cpus).union(nodes);
    let all = topology.nodes().iter().filter(|n| !n.cpus.is_empty()).map(|n| n.id);
    let nodes = if search.has_memory(near.iter()) { near.iter().collect() } else { all.collect::<Vec<_>>() };
    search.split(&nodes, cpus)
}

/// A request on a machine.
struct Search<'a> {
    topology: &'a CpuTopology,
    request: &'a Request,
    n: usize,
    free: &'a CpuSet,
    allocatable: &'a CpuSet,
    claimed: &'a BTreeMap<NodeId, u64>,
    /// Bytes to be had on the nodes; 0 also where the kernel shows none.
    memory: u64,
    /// `request.near` with nodes that have CPUs.
    near: NodeSet,
    /// Whether the policy may refuse for alignment.
    hard: bool,
}

impl<'a> Search<'a> {
    fn new(
        topology: &'a CpuTopology,
        allocatable: &'a CpuSet,
        free: &'a CpuSet,
        claimed: &'a BTreeMap<NodeId, u64>,
        request: &'a Request,
    ) -> Self {
        Self {
            topology,
            request,
            claimed,
            memory: if topology.nodes().is_empty() { 0 } else { request.memory },
            n: request.cpus as usize,
            free,
            allocatable,
            near: with_cpus(topology, &request.near),
            hard: matches!(request.numa, AlignmentPolicy::Restricted | AlignmentPolicy::SingleNumaNode),
        }
    }

    /// The groups that may be used. Under a policy that may refuse (`hard`), only near ones; CPUs of no node are on
    /// one node only where the kernel shows no nodes at all.
    fn groups(&self, inventory: &Inventory, hard: bool) -> Vec<usize> {
        let single = self.request.numa == AlignmentPolicy::SingleNumaNode && hard;
        let allowed = |node: Option<NodeId>| match node {
            Some(node) => !hard || self.near.is_empty() || self.near.contains(node),
            None if single => self.topology.nodes().is_empty(),
            None => !hard || self.near.is_empty(),
        };
        (0..inventory.groups.len()).filter(|g| allowed(inventory.groups[*g].node)).collect()
    }

    /// Whether the policy allows this many groups.
    fn allows(&self, groups: usize) -> bool {
        match self.request.numa {
            AlignmentPolicy::None | AlignmentPolicy::BestEffort => true,
            AlignmentPolicy::SingleNumaNode => groups == 1,
            AlignmentPolicy::Restricted => self.fewest_when_empty().is_some_and(|fewest| groups <= fewest),
        }
    }

    fn fewest_when_empty(&self) -> Option<usize> {
        let empty = Inventory::new(self.topology, self.allocatable);
        if self.request.whole_cores || self.memory > 0 {
            let empty_machine = Self { claimed: NOTHING, near: self.near.clone(), ..*self };
            return empty_machine.fewest(&empty, self.hard, &mut |_| {});
        }
        subsets::fewest(&self.bounds(&empty, &self.groups(&empty, self.hard)), self.n)
    }

    fn bounds(&self, inventory: &Inventory, groups: &[usize]) -> Vec<usize> {
        let bound = |g: &usize| inventory.bound(&inventory.groups[*g].pieces, self.request.whole_cores);
        groups.iter().map(bound).collect()
    }

    /// The fewest groups that serve the request; `visit` sees every set of that number that does (or, beyond
    /// [`subsets::MOST_NODE_SETS`], every likely one).
    fn fewest(&self, inventory: &Inventory, hard: bool, visit: &mut dyn FnMut(&[usize])) -> Option<usize> {
        let (n, whole_cores) = (self.n, self.request.whole_cores);
        let groups = self.groups(inventory, hard);
        if !inventory.shape(&inventory.pieces_of(&groups)).serves(n, whole_cores) {
            return None;
        }
        let bounds = self.bounds(inventory, &groups);
        (subsets::fewest(&bounds, n)?..=groups.len()).find(|k| {
            let mut any = false;
            let likely = || self.likely(inventory, &self.distances(inventory), &groups, &bounds, *k);
            subsets::visit(&bounds, (*k, subsets::MOST_NODE_SETS), n, likely, &mut |subset| {
                let subset: Vec<usize> = subset.iter().map(|i| groups[*i]).collect();
                // The bound is the truth unless cores must add up exactly.
                let cores = || inventory.shape(&inventory.pieces_of(&subset)).serves(n, true);
                let nodes = subset.iter().filter_map(|g| inventory.groups[*g].node);
                if self.has_memory(nodes) && (!whole_cores || cores()) {
                    any = true;
                    visit(&subset);
                }
            });
            any
        })
    }

    /// The best set of groups, and the pieces in it.
    fn fewest_best(&self, inventory: &Inventory, hard: bool) -> Option<(Vec<usize>, Choice)> {
        let distances = self.distances(inventory);
        let frees: Vec<usize> = inventory.groups.iter().map(|g| inventory.bound(&g.pieces, false)).collect();
        let mut best_cost = None;
        let mut equal: Vec<(usize, Vec<usize>)> = Vec::new();
        self.fewest(inventory, hard, &mut |groups| {
            let cost = distances.cost(groups);
            if best_cost.is_none_or(|best| cost < best) {
                best_cost = Some(cost);
                equal.clear();
            }
            if best_cost == Some(cost) {
                equal.push((groups.iter().map(|g| frees[*g]).sum(), groups.to_vec()));
            }
        })?;
        // Best fit first: the sets with the least free.
        equal.sort();
        let filled = equal.into_iter().take(FILLED).filter_map(|(_, groups)| {
            let pieces = inventory.pieces_of(&groups);
            Some((fill::choose(inventory, &pieces, self.n, self.request.whole_cores)?, groups))
        });
        filled.min().map(|(choice, groups)| (groups, choice))
    }

    /// Between all groups; both ways, since it need not be symmetric. CPUs of no node are far from all.
    fn distances(&self, inventory: &Inventory) -> Distances {
        let between = |a: Option<NodeId>, b: Option<NodeId>| match (a, b) {
            (Some(a), Some(b)) => self.topology.distance(a, b) + self.topology.distance(b, a),
            _ => 20 * REMOTE_DISTANCE,
        };
        let nodes: Vec<Option<NodeId>> = inventory.groups.iter().map(|g| g.node).collect();
        let to_near = |node: Option<NodeId>| {
            let far = !self.near.is_empty() && node.is_none_or(|n| !self.near.contains(n));
            far.then(|| self.near.iter().map(|near| between(node, Some(near))).min().unwrap_or(0))
        };
        Distances {
            to_near: nodes.iter().map(|n| to_near(*n)).collect(),
            among: nodes.iter().map(|a| nodes.iter().map(|b| between(*a, *b)).collect()).collect(),
        }
    }

    /// Likely sets of `k` of `groups` (places in `groups`): the largest; and from each group on, always the next that
    /// costs least, as long as the rest can still be made up.
    fn likely(
        &self,
        inventory: &Inventory,
        distances: &Distances,
        groups: &[usize],
        bounds: &[usize],
        k: usize,
    ) -> Vec<Vec<usize>> {
        let mut largest: Vec<usize> = (0..groups.len()).collect();
        largest.sort_by_key(|i| (Reverse(bounds[*i]), *i));
        let mut sets = vec![largest[..k].to_vec()];
        if self.memory > 0 {
            let mut richest = largest.clone();
            richest
                .sort_by_key(|i| Reverse(inventory.groups[groups[*i]].node.map_or(0, |n| self.memory_of(n))));
            sets.push(richest[..k].to_vec());
        }
        for seed in 0..groups.len() {
            let mut set = vec![seed];
            let mut left: Vec<usize> = largest.iter().copied().filter(|i| *i != seed).collect();
            let mut have = bounds[seed];
            // What each would add to the distance among the set.
            let mut among: Vec<u32> = groups.iter().map(|g| distances.among[groups[seed]][*g]).collect();
            while set.len() < k {
                // With one more chosen, the largest others that fill up to `k`.
                let others = k - set.len() - 1;
                let sum = |count: usize| left.iter().take(count).map(|i| bounds[*i]).sum::<usize>();
                let (without, with) = (sum(others), sum(others + 1));
                let enough = |(at, i): &(usize, &usize)| {
                    let reach = if *at <= others { with } else { without + bounds[**i] };
                    have + reach >= self.n
                };
                let cost = |(_, i): &(usize, &usize)| {
                    let near = distances.to_near[groups[**i]];
                    (near.is_some(), near, among[**i], Reverse(bounds[**i]), **i)
                };
                let Some((at, _)) = left.iter().enumerate().filter(enough).min_by_key(cost) else { break };
                let next = left.remove(at);
                for (sum, g) in among.iter_mut().zip(groups) {
                    *sum += distances.among[groups[next]][*g];
                }
                have += bounds[next];
                set.push(next);
            }
            if set.len() == k {
                sets.push(set);
            }
        }
        sets
    }

    /// Bytes of a node that nobody has claimed.
    fn memory_of(&self, node: NodeId) -> u64 {
        let all = self.topology.node(node).and_then(|n| n.memory_bytes).unwrap_or(0);
        all.saturating_sub(self.claimed.get(&node).copied().unwrap_or(0))
    }

    fn has_memory(&self, nodes: impl Iterator<Item = NodeId>) -> bool {
        self.memory == 0 || nodes.fold(0_u64, |sum, n| sum.saturating_add(self.memory_of(n))) >= self.memory
    }

    /// The memory asked for, by node: in the ratio of the CPUs, as far as each has it. A node with some of the CPUs is
    /// among them even with nothing claimed on it, so that what runs there may use it.
    fn split(&self, nodes: &[NodeId], cpus: &CpuSet) -> BTreeMap<NodeId, u64> {
        let mut split = self.claims(nodes, cpus);
        if !split.is_empty() {
            for node in self.topology.nodes_of(cpus).iter() {
                split.entry(node).or_insert(0);
            }
        }
        split
    }

    fn claims(&self, nodes: &[NodeId], cpus: &CpuSet) -> BTreeMap<NodeId, u64> {
        let mut split = BTreeMap::new();
        let mut left = self.memory;
        let mut open: Vec<(NodeId, u64, usize)> = nodes
            .iter()
            .map(|n| {
                let here = self.topology.node(*n).map_or(0, |n| n.cpus.intersection(cpus).len());
                (*n, self.memory_of(*n), here)
            })
            .collect();
        while left > 0 && !open.is_empty() {
            // Those without CPUs only get what is left over.
            let weight: u128 = open.iter().map(|o| o.2 as u128).sum();
            let share = |o: &(NodeId, u64, usize)| match (weight, o.2) {
                (0, _) => left,
                (_, here) => u64::try_from(u128::from(left) * here as u128 / weight).unwrap_or(left),
            };
            let full = open.iter().position(|o| o.1 <= share(o) && (weight == 0 || o.2 > 0));
            let Some(at) = full else {
                // All have room: the first also gets what the division left.
                let shares: Vec<(NodeId, u64)> = open.iter().map(|o| (o.0, share(o))).collect();
                let rest = left - if weight == 0 { left } else { shares.iter().map(|s| s.1).sum() };
                let first = shares.iter().position(|s| s.1 > 0).unwrap_or(0);
                for (i, (node, bytes)) in shares.into_iter().enumerate() {
                    let extra = if i == first { rest } else { 0 };
                    if bytes + extra > 0 {
                        split.insert(node, bytes + extra);
                    }
                    if weight == 0 {
                        break;
                    }
                }
                return split;
            };
            let (node, bytes, _) = open.remove(at);
            let bytes = bytes.min(left);
            if bytes > 0 {
                split.insert(node, bytes);
            }
            left -= bytes;
        }
        split
    }

    /// Why nothing fits, or only on `needs` groups.
    fn why(&self, now: &Inventory, needs: Option<usize>) -> RefusalKind {
        if self.memory > 0 {
            let request = Request { memory: 0, ..self.request.clone() };
            let without = Search::new(self.topology, self.allocatable, self.free, self.claimed, &request);
            if without.fewest_best(now, self.hard).is_some_and(|(groups, _)| without.allows(groups.len())) {
                let nodes = self.topology.nodes().iter().filter(|n| !n.cpus.is_empty());
                let free = nodes.map(|n| (n.id, self.memory_of(n.id))).collect();
                return RefusalKind::NotEnoughMemory { memory: self.memory, free };
            }
        }
        if let Some(needs) = needs {
            return RefusalKind::Unaligned { needs, when_empty: self.fewest_when_empty() };
        }
        let whole_cores = self.request.whole_cores;
        if whole_cores {
            let empty = Inventory::new(self.topology, self.allocatable);
            let all = empty.shape(&empty.pieces_of(&self.groups(&empty, false)));
            let fills = |n: usize| fill_cores(&all.whole, n).0 == n;
            if self.n <= all.in_whole() && !fills(self.n) {
                let below = (1..self.n).rev().find(|n| fills(*n));
                let above = (self.n + 1..=all.in_whole()).find(|n| fills(*n));
                return RefusalKind::NotWholeCores { below, above };
            }
        }
        if self.free.len() < self.n {
            RefusalKind::NotEnough
        } else if self.fewest_best(now, false).is_none() {
            RefusalKind::NotEnoughWholeCores
        } else if self.hard && !self.near.is_empty() {
            RefusalKind::NotNear
        } else {
            // Only single-numa-node leaves groups out otherwise: those of no node.
            RefusalKind::Unaligned { needs: 2, when_empty: self.fewest_when_empty() }
        }
    }

    fn refusal(&self, kind: RefusalKind, now: &Inventory) -> Refusal {
        let homeless = self.topology.cpus_without_node();
        let nodes = self.topology.nodes().iter().filter(|n| !n.cpus.is_empty());
        let nodes = nodes.map(|n| (Some(n.id), n.cpus.clone()));
        let homeless = (!homeless.is_empty()).then_some((None, homeless));
        let free = nodes.chain(homeless).map(|(node, cpus)| {
            let pieces = now.groups.iter().find(|g| g.node == node).map(|g| now.shape(&g.pieces));
            NodeFree {
                node,
                cpus: cpus.intersection(self.free),
                whole_cores: pieces.map_or(0, |shape| shape.cores()),
            }
        });
        let most = |groups: &[usize]| {
            let shape = now.shape(&now.pieces_of(groups));
            if self.request.whole_cores { shape.in_whole() } else { shape.free() }
        };
        let best_effort = self.fewest_best(now, false).filter(|_| self.n > 0);
        Refusal {
            kind,
            asked: self.request.cpus,
            policy: self.request.numa,
            whole_cores: self.request.whole_cores,
            near: self.request.near.clone(),
            allocatable: self.allocatable.len(),
            free: free.collect(),
            fits: Fits {
                one_node: self.groups(now, self.hard).iter().map(|g| most(&[*g])).max().unwrap_or(0),
                any_nodes: most(&self.groups(now, false)),
                best_effort: best_effort
                    .map(|(groups, _)| groups.iter().filter_map(|g| now.groups[*g].node).collect()),
            },
        }
    }
}

/// Distances of groups.
struct Distances {
    /// To the nearest node that is near; `None` for what is near itself, or where nothing was asked for.
    to_near: Vec<Option<u32>>,
    /// Among each other.
    among: Vec<Vec<u32>>,
}

impl Distances {
    /// Groups that are not near, their distance to what is, the distance among all.
    fn cost(&self, groups: &[usize]) -> (usize, u32, u32) {
        let far = groups.iter().filter_map(|g| self.to_near[*g]);
        let pairs =
            groups.iter().enumerate().flat_map(|(i, a)| groups[i + 1..].iter().map(|b| self.among[*a][*b]));
        (far.clone().count(), far.sum(), pairs.sum())
    }
}

/// The nodes themselves, and for one without CPUs (memory, an accelerator) those with CPUs that are nearest to it.
pub(super) fn with_cpus(topology: &CpuTopology, nodes: &NodeSet) -> NodeSet {
    let mut near = NodeSet::new();
    for node in nodes.iter().filter_map(|id| topology.node(id)) {
        if !node.cpus.is_empty() {
            near.insert(node.id);
            continue;
        }
        let others = || topology.nodes().iter().filter(|o| !o.cpus.is_empty());
        let least = others().map(|o| topology.distance(node.id, o.id)).min();
        near |= &others().filter(|o| Some(topology.distance(node.id, o.id)) == least).map(|o| o.id).collect();
    }
    near
}
