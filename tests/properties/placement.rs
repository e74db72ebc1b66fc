//! The strategy `aligned` against a walk over every set of free CPUs.

use crate::machines::{broken, most_cpus, sound};
use proptest::prelude::*;
use std::collections::BTreeSet;
use truepin::{
    CpuSet, CpuTopology, NodeId, NodeSet, Owner,
    placement::{self, RefusalKind},
    request::{AlignmentPolicy, Isolation, Request},
};

fn requests() -> impl Strategy<Value = Request> {
    use AlignmentPolicy::{BestEffort, None, Restricted, SingleNumaNode};
    let numa = prop_oneof![Just(None), Just(BestEffort), Just(Restricted), Just(SingleNumaNode)];
    let near = prop_oneof![3 => Just(0_u32), 2 => 1..16_u32];
    (1..=9_u32, numa, any::<bool>(), near).prop_map(|(cpus, numa, whole_cores, near)| Request {
        owner: Owner::Run("x".into()),
        cpus,
        numa,
        whole_cores,
        near: (0..4).filter(|n| near >> n & 1 == 1).map(NodeId).collect(),
        isolation: Isolation::Auto,
        memory: 0,
    })
}

/// How good a set of CPUs is, less is better: groups, groups that are not near, distance to near, distance among
/// them, caches, CPUs apart from whole cores, newly broken cores.
type Cost = (usize, usize, u32, u32, usize, usize, usize);

struct Walk<'a> {
    topology: &'a CpuTopology,
    request: &'a Request,
    near: NodeSet,
}

impl<'a> Walk<'a> {
    fn new(topology: &'a CpuTopology, request: &'a Request) -> Self {
        let mut near = NodeSet::new();
        for node in request.near.iter() {
            let with_cpus = || topology.nodes().iter().filter(|n| !n.cpus.is_empty()).map(|n| n.id);
            let least = with_cpus().map(|n| topology.distance(node, n)).min();
            let itself = topology.node(node).is_some_and(|n| !n.cpus.is_empty());
            let stand_in =
                |n: NodeId| if itself { n == node } else { Some(topology.distance(node, n)) == least };
            for n in with_cpus().filter(|n| stand_in(*n)) {
                near.insert(n);
            }
        }
        Self { topology, request, near }
    }

    fn groups(&self, cpus: &CpuSet) -> BTreeSet<Option<NodeId>> {
        cpus.iter().map(|c| self.topology.node_of(c)).collect()
    }

    /// Every set of as many CPUs as were asked for, on whole cores if need be, that alignment allows except for the
    /// number of groups.
    fn sets(&self, from: &CpuSet, aligned: bool) -> Vec<CpuSet> {
        let from: Vec<_> = from.iter().collect();
        let masks = 0..1_u32 << from.len();
        let sized = masks.filter(|m| m.count_ones() == self.request.cpus);
        let sets =
            sized.map(|m| (0..from.len()).filter(|i| m >> i & 1 == 1).map(|i| from[i]).collect::<CpuSet>());
        sets.filter(|set| !self.request.whole_cores || self.apart(set) == 0)
            .filter(|set| {
                let near = |g: &Option<NodeId>| match g {
                    Some(node) => self.near.is_empty() || self.near.contains(*node),
                    None => {
                        self.near.is_empty()
                            && (self.request.numa != AlignmentPolicy::SingleNumaNode
                                || self.topology.nodes().is_empty())
                    }
                };
                !aligned || self.groups(set).iter().all(near)
            })
            .collect()
    }

    fn apart(&self, set: &CpuSet) -> usize {
        let whole = self.topology.cores().iter().filter(|c| c.cpus.is_subset(set));
        set.len() - whole.map(|c| c.cpus.len()).sum::<usize>()
    }

    fn cost(&self, free: &CpuSet, set: &CpuSet) -> Cost {
        let both = |a: Option<NodeId>, b: Option<NodeId>| match (a, b) {
            (Some(a), Some(b)) => self.topology.distance(a, b) + self.topology.distance(b, a),
            _ => 400,
        };
        let groups: Vec<_> = self.groups(set).into_iter().collect();
        let (mut far, mut to_near, mut among) = (0, 0, 0);
        for (i, a) in groups.iter().enumerate() {
            if !self.near.is_empty() && !a.is_some_and(|a| self.near.contains(a)) {
                far += 1;
                to_near += self.near.iter().map(|n| both(*a, Some(n))).min().unwrap_or(0);
            }
            among += groups[i + 1..].iter().map(|b| both(*a, *b)).sum::<u32>();
        }
        // Where no cache is known, the CPUs of a group count as one.
        let llc = |c| (self.topology.llc_of(c).map(|l| l.leader), self.topology.node_of(c));
        let llcs: BTreeSet<_> = set.iter().map(llc).map(|(l, n)| (l, n.filter(|_| l.is_none()))).collect();
        let cores = self.topology.cores().iter();
        let broken =
            cores.filter(|c| c.cpus.is_subset(free) && !c.cpus.is_subset(set) && !c.cpus.is_disjoint(set));
        (groups.len(), far, to_near, among, llcs.len(), self.apart(set), broken.count())
    }
}

/// Everything that must hold; `sound` machines are held to the whole cost, broken ones to what is above the caches
/// (a core of several caches has no right place there).
fn check(
    topology: &CpuTopology,
    allocatable: &CpuSet,
    free: &CpuSet,
    request: &Request,
    sound: bool,
) -> Result<(), TestCaseError> {
    let result = placement::place(topology, allocatable, free, request);
    prop_assert_eq!(&result, &placement::place(topology, allocatable, free, request));

    let unknown = request.near.iter().any(|n| topology.node(n).is_none());
    if unknown {
        let kind = result.map_err(|r| r.kind);
        prop_assert!(matches!(kind, Err(RefusalKind::UnknownNodes { .. })), "{kind:?}");
        return Ok(());
    }
    let walk = Walk::new(topology, request);
    let allocatable = allocatable.intersection(topology.online());
    let free = free.intersection(&allocatable);
    let hard = matches!(request.numa, AlignmentPolicy::Restricted | AlignmentPolicy::SingleNumaNode);
    let most_groups = match request.numa {
        AlignmentPolicy::None | AlignmentPolicy::BestEffort => usize::MAX,
        AlignmentPolicy::SingleNumaNode => 1,
        AlignmentPolicy::Restricted => {
            let sets = walk.sets(&allocatable, true);
            sets.iter().map(|s| walk.groups(s).len()).min().unwrap_or(0)
        }
    };
    let sets = walk.sets(&free, hard);
    let best = sets.iter().map(|s| walk.cost(&free, s)).min().filter(|cost| cost.0 <= most_groups);
    match (result, best) {
        (Ok(placed), Some(best)) => {
            prop_assert_eq!(placed.cpus.len(), request.cpus as usize);
            prop_assert!(placed.cpus.is_subset(&free), "{} are not all free", placed.cpus);
            prop_assert_eq!(&placed.nodes, &topology.nodes_of(&placed.cpus));
            let cost = walk.cost(&free, &placed.cpus);
            if sound {
                prop_assert_eq!(cost, best, "{}", placed.reason);
            } else {
                prop_assert_eq!((cost.0, cost.1, cost.2, cost.3), (best.0, best.1, best.2, best.3));
            }
            prop_assert_eq!(placed.reason.shared.len(), walk.apart(&placed.cpus));
        }
        (Err(refusal), None) => {
            prop_assert!(!refusal.to_string().is_empty());
            let any = walk.sets(&free, false);
            let fewest = any.iter().map(|s| walk.groups(s).len()).min();
            prop_assert_eq!(refusal.fits.best_effort.is_some(), fewest.is_some(), "{}", refusal);
            let total: usize = refusal.free.iter().map(|n| n.cpus.len()).sum();
            prop_assert_eq!(total, free.len());
            prop_assert_eq!(
                refusal.kind == RefusalKind::NotEnough,
                free.len() < request.cpus as usize
                    && !matches!(refusal.kind, RefusalKind::NotWholeCores { .. })
            );
        }
        (Ok(placed), None) => prop_assert!(false, "{} should have been refused", placed.reason),
        (Err(refusal), Some(best)) => prop_assert!(false, "refused, though {best:?} is possible: {refusal}"),
    }
    Ok(())
}

proptest! {
    #[test]
    fn best_on_sound_machines(raw in sound(), free in most_cpus(), reserved in most_cpus(), request in requests()) {
        let topology = CpuTopology::assemble(&raw).unwrap();
        let allocatable = topology.online().difference(&reserved.difference(&free));
        check(&topology, &allocatable, &free, &request, true)?;
    }

    #[test]
    fn obedient_on_broken_machines(raw in broken(), free in most_cpus(), request in requests()) {
        let topology = CpuTopology::assemble(&raw).unwrap();
        check(&topology, topology.online(), &free, &request, false)?;
    }
}
