//! The configured strategy on requests, one by one or a pod's together.
//!
//! Problem: which NUMA nodes a request is to be on and which CPUs of them it gets are one decision for the strategy `best`
//! and two for the kubelet (a hint for the policy first, then CPUs along it); and with scope `pod` the containers of a pod
//! are decided on together. Callers should see neither.
//! Steps: a [`Chooser`] is made once for a machine. [`Chooser::together`] decides what a pod's containers have in common,
//! [`Chooser::place`] gives one request its CPUs within that.
//! Invariant: what is placed is free, whatever the strategy; a request that the policy refuses is refused by both.

use super::{
    Placement, Refusal, RefusalKind, aligned,
    kubelet::{self, KubeletMachine, StaticOptions},
};
use crate::{
    cpuset::CpuSet,
    hints::{Demand, Device, Distances, NodeMemory, winner},
    nodeset::{NodeId, NodeSet},
    request::{AlignmentPolicy, Request},
    topology::CpuTopology,
};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// How CPUs are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// truepin's own.
    #[default]
    Best,
    /// As the kubelet's static policy does.
    Kubelet {
        /// Of the static policy.
        options: StaticOptions,
        /// The topology manager's `prefer-closest-numa-nodes`.
        closest: bool,
    },
}

/// The topology manager's option, which stands among those of the static policy here.
pub const CLOSEST: &str = "prefer-closest-numa-nodes";

/// Why a strategy cannot be had here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// By the kubelet's rule.
    #[error("option align-by-socket cannot be had with the policy single-numa-node")]
    SocketAndNode,
    /// By the kubelet's rule.
    #[error(
        "option align-by-socket needs as many NUMA nodes as sockets: this machine has {sockets} sockets and {nodes} nodes"
    )]
    MoreSockets {
        /// Sockets.
        sockets: usize,
        /// NUMA nodes.
        nodes: usize,
    },
}

impl Strategy {
    /// Whether the kubelet would start with it on this machine.
    pub fn check(self, policy: AlignmentPolicy, topology: &CpuTopology) -> Result<(), StrategyError> {
        let Self::Kubelet { options, .. } = self else { return Ok(()) };
        if !options.align_by_socket {
            return Ok(());
        }
        if policy == AlignmentPolicy::SingleNumaNode {
            return Err(StrategyError::SocketAndNode);
        }
        let counts = kubelet::KubeletCounts::of(topology);
        if counts.sockets > counts.nodes {
            return Err(StrategyError::MoreSockets { sockets: counts.sockets, nodes: counts.nodes });
        }
        Ok(())
    }
}

/// `best`, or `kubelet` with the options that are on: `kubelet:full-pcpus-only,align-by-socket`.
impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Kubelet { options, closest } = self else { return f.write_str("best") };
        let names: Vec<&str> = options.names().chain(closest.then_some(CLOSEST)).collect();
        f.write_str("kubelet")?;
        if names.is_empty() { Ok(()) } else { write!(f, ":{}", names.join(",")) }
    }
}

/// What requests are decided over together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// Each container by itself.
    #[default]
    Container,
    /// All containers of a pod.
    Pod,
}

/// What there is to choose from.
#[derive(Debug, Clone, Copy)]
pub struct Room<'a> {
    /// What may be given when nothing is taken.
    pub allocatable: &'a CpuSet,
    /// What is not taken.
    pub free: &'a CpuSet,
    /// Bytes of each node's memory that are others'.
    pub claimed: &'a BTreeMap<NodeId, u64>,
}

/// What is settled before a request is placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Within {
    /// Nothing.
    Anywhere,
    /// The pod's CPUs.
    Cpus(CpuSet),
    /// The nodes that come first for the pod; `None` for any.
    Nodes(Option<NodeSet>),
}

/// A strategy on a machine.
#[derive(Debug, Clone)]
pub struct Chooser {
    strategy: Strategy,
    scope: Scope,
    kubelet: Option<Arc<Kubelet>>,
}

#[derive(Debug)]
struct Kubelet {
    options: StaticOptions,
    machine: KubeletMachine,
    distances: Option<Distances>,
}

impl Chooser {
    /// Counts the machine, where the strategy needs it.
    #[must_use]
    pub fn new(strategy: Strategy, scope: Scope, topology: &CpuTopology) -> Self {
        let kubelet = match strategy {
            Strategy::Best => None,
            Strategy::Kubelet { options, closest } => Some(Arc::new(Kubelet {
                options,
                machine: KubeletMachine::new(topology),
                distances: closest.then(|| Distances::of(topology)),
            })),
        };
        Self { strategy, scope, kubelet }
    }

    /// The strategy.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// What the containers of a pod have in common; they share one policy. `held`: CPUs that other containers of the pod
    /// have already; those that come later go to the same nodes.
    pub fn together(
        &self,
        topology: &CpuTopology,
        room: Room<'_>,
        held: &CpuSet,
        requests: &[&Request],
    ) -> Result<Within, Box<Refusal>> {
        let (Scope::Pod, Some(first)) = (self.scope, requests.first()) else { return Ok(Within::Anywhere) };
        if requests.len() == 1 && held.is_empty() {
            return Ok(Within::Anywhere);
        }
        let sum = Request {
            cpus: requests.iter().map(|r| r.cpus).fold(0, u32::saturating_add),
            memory: requests.iter().map(|r| r.memory).fold(0, u64::saturating_add),
            whole_cores: requests.iter().any(|r| r.whole_cores),
            near: requests.iter().fold(NodeSet::new(), |all, r| all.union(&r.near)),
            ..(*first).clone()
        };
        if !held.is_empty() {
            return self.beside(topology, room, held, &sum);
        }
        match &self.kubelet {
            None => {
                let placed =
                    aligned::place_beside(topology, room.allocatable, room.free, room.claimed, &sum)?;
                Ok(Within::Cpus(placed.cpus))
            }
            Some(kubelet) => Ok(Within::Nodes(kubelet.affinity(topology, room, &sum)?)),
        }
    }

    /// On the nodes that the pod has CPUs of.
    fn beside(
        &self,
        topology: &CpuTopology,
        room: Room<'_>,
        held: &CpuSet,
        sum: &Request,
    ) -> Result<Within, Box<Refusal>> {
        let nodes = topology.nodes_of(held);
        let free = room.free.intersection(room.allocatable);
        let near = free.intersection(&topology.cpus_of_nodes(&nodes));
        if nodes.is_empty() {
            Ok(Within::Anywhere)
        } else if near.len() >= sum.cpus as usize {
            Ok(if self.kubelet.is_some() { Within::Nodes(Some(nodes)) } else { Within::Cpus(near) })
        } else if matches!(sum.numa, AlignmentPolicy::Restricted | AlignmentPolicy::SingleNumaNode) {
            let kind = RefusalKind::Unaligned { needs: nodes.len() + 1, when_empty: None };
            Err(Box::new(aligned::refusal(topology, room.allocatable, &free, sum, kind)))
        } else {
            Ok(Within::Anywhere)
        }
    }

    /// CPUs for one request.
    pub fn place(
        &self,
        topology: &CpuTopology,
        room: Room<'_>,
        request: &Request,
        within: &Within,
    ) -> Result<Placement, Box<Refusal>> {
        let Some(kubelet) = &self.kubelet else {
            let Within::Cpus(pods) = within else {
                return aligned::place_beside(topology, room.allocatable, room.free, room.claimed, request);
            };
            // The policy was obeyed by the pod as a whole.
            let request = Request { numa: AlignmentPolicy::BestEffort, ..request.clone() };
            let free = room.free.intersection(pods);
            return aligned::place_beside(topology, room.allocatable, &free, room.claimed, &request);
        };
        let affinity = match within {
            Within::Nodes(nodes) => nodes.clone(),
            Within::Anywhere | Within::Cpus(_) => kubelet.affinity(topology, room, request)?,
        };
        let sets = (room.allocatable, room.free);
        let placed = kubelet::place(
            topology,
            &kubelet.machine,
            kubelet.options(request),
            sets,
            request,
            affinity.as_ref(),
        )?;
        let memory = aligned::split_memory(
            topology,
            room.claimed,
            request.memory,
            affinity.as_ref().unwrap_or(&NodeSet::new()),
            &placed.cpus,
        );
        Ok(Placement { memory, ..placed })
    }
}

impl Kubelet {
    /// The kubelet does not start with `align-by-socket` and `single-numa-node` together; a request may bring that policy.
    fn options(&self, request: &Request) -> StaticOptions {
        let single = request.numa == AlignmentPolicy::SingleNumaNode;
        StaticOptions { align_by_socket: self.options.align_by_socket && !single, ..self.options }
    }

    /// The nodes of the winning hint, if the policy lets the request in.
    fn affinity(
        &self,
        topology: &CpuTopology,
        room: Room<'_>,
        request: &Request,
    ) -> Result<Option<NodeSet>, Box<Refusal>> {
        let n = request.cpus as usize;
        let nodes: NodeSet = topology.nodes().iter().map(|n| n.id).collect();
        let free = room.free.intersection(room.allocatable).intersection(self.machine.cpus());
        let refuse = |kind| Err(Box::new(aligned::refusal(topology, room.allocatable, &free, request, kind)));
        if n == 0 {
            return refuse(RefusalKind::Nothing);
        }
        let unknown: NodeSet = request.near.iter().filter(|n| topology.node(*n).is_none()).collect();
        if !unknown.is_empty() {
            return refuse(RefusalKind::UnknownNodes { nodes: unknown });
        }
        if request.memory > 0 && nodes.is_empty() {
            return refuse(RefusalKind::MemoryWithoutNodes);
        }
        if n > free.len() {
            return refuse(RefusalKind::NotEnough);
        }
        let cpus =
            Demand::cpus(&self.machine, self.options(request).align_by_socket, &free, &CpuSet::new(), n);
        let all: Vec<NodeMemory> = topology
            .nodes()
            .iter()
            .filter(|n| !n.cpus.is_empty())
            .map(|node| {
                let total = node.memory_bytes.unwrap_or(0);
                let claimed = room.claimed.get(&node.id).copied().unwrap_or(0);
                NodeMemory { node: node.id, free: total.saturating_sub(claimed), total }
            })
            .collect();
        let kinds = [(request.memory, all.as_slice())];
        let memory = if request.memory > 0 && !nodes.is_empty() { Demand::memory(&kinds) } else { None };
        if memory.is_some() && all.iter().fold(0_u64, |sum, m| sum.saturating_add(m.free)) < request.memory {
            let free = all.iter().map(|m| (m.node, m.free)).collect();
            return refuse(RefusalKind::NotEnoughMemory { memory: request.memory, free });
        }
        let device =
            [Device { nodes: aligned::with_cpus(topology, &request.near), free: true, reusable: false }];
        let near = Demand::devices(&nodes, &device, 1);
        let demands: Vec<&Demand> =
            [Some(&cpus), memory.as_ref(), near.as_ref()].into_iter().flatten().collect();
        let merged = winner(request.numa, &nodes, &demands, self.distances.as_ref()).merged;
        if merged.admit {
            return Ok(merged.affinity);
        }
        let needs = winner(AlignmentPolicy::BestEffort, &nodes, &demands, None).merged.affinity;
        let empty = Demand::cpus(&self.machine, false, room.allocatable, &CpuSet::new(), n);
        let when_empty = winner(AlignmentPolicy::BestEffort, &nodes, &[&empty], None).merged.affinity;
        refuse(RefusalKind::Unaligned {
            needs: needs.map_or(nodes.len(), |n| n.len()),
            when_empty: when_empty.map(|n| n.len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        owner::Owner,
        request::Isolation,
        topology::synthetic::{Numbering, Regular},
    };
    use AlignmentPolicy::{BestEffort, None as Any, Restricted, SingleNumaNode};

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    /// Two packages, two nodes in each, four cores of two threads: node 0 has 0-7.
    fn machine() -> CpuTopology {
        let shape = Regular {
            packages: 2,
            nodes: 2,
            l3: 1,
            cores: 4,
            threads: 2,
            numbering: Numbering::ThreadsAdjacent,
        };
        CpuTopology::assemble(&shape.raw()).unwrap()
    }

    fn request(cpus: u32, numa: AlignmentPolicy) -> Request {
        Request {
            owner: Owner::Run("r".into()),
            cpus,
            numa,
            whole_cores: false,
            near: NodeSet::new(),
            isolation: Isolation::Auto,
            memory: 0,
        }
    }

    const KUBELET: Strategy = Strategy::Kubelet {
        options: StaticOptions {
            full_pcpus_only: false,
            distribute_across_numa: false,
            distribute_across_cores: false,
            align_by_socket: false,
            prefer_align_by_uncorecache: false,
            strict_reservation: false,
        },
        closest: false,
    };

    fn placed(strategy: Strategy, free: &str, request: &Request) -> Result<Placement, String> {
        let m = machine();
        let chooser = Chooser::new(strategy, Scope::Container, &m);
        let room = Room { allocatable: m.online(), free: &set(free), claimed: &BTreeMap::new() };
        chooser.place(&m, room, request, &Within::Anywhere).map_err(|r| r.to_string())
    }

    /// A pod's containers one after the other, as the reconciler places them.
    fn pod(
        strategy: Strategy,
        scope: Scope,
        free: &str,
        sizes: &[u32],
        numa: AlignmentPolicy,
    ) -> Result<Vec<String>, String> {
        let m = machine();
        let chooser = Chooser::new(strategy, scope, &m);
        let (mut free, claimed) = (set(free), BTreeMap::new());
        let requests: Vec<Request> = sizes.iter().map(|n| request(*n, numa)).collect();
        let all: Vec<&Request> = requests.iter().collect();
        let room = Room { allocatable: m.online(), free: &free, claimed: &claimed };
        let within = chooser.together(&m, room, &CpuSet::new(), &all).map_err(|r| r.to_string())?;
        let mut sets = Vec::new();
        for request in &requests {
            let room = Room { allocatable: m.online(), free: &free, claimed: &claimed };
            let placed = chooser.place(&m, room, request, &within).map_err(|r| r.to_string())?;
            assert!(placed.cpus.is_subset(&free) && placed.cpus.len() == request.cpus as usize);
            free -= &placed.cpus;
            sets.push(placed.cpus.to_string());
        }
        Ok(sets)
    }

    #[test]
    fn a_hint_first_and_then_cpus_along_it() {
        // Node 0 has three CPUs left, node 1 four: the kubelet fills up cores from the lowest number without a hint.
        let free = "0-2,10-13,16-31";
        assert_eq!(placed(KUBELET, free, &request(4, SingleNumaNode)).unwrap().cpus, set("10-13"));
        let any = placed(KUBELET, free, &request(4, Any)).unwrap().cpus;
        assert_ne!(any, set("10-13"), "no policy, no hint: {any}");
        let refused = placed(KUBELET, "0-2,10-13,20-22", &request(5, SingleNumaNode)).unwrap_err();
        assert!(
            refused.contains("5 CPUs asked for on one node") && refused.contains("one node is 4"),
            "{refused}"
        );
        let refused = placed(KUBELET, "0-2,10-13,20-22", &request(5, Restricted)).unwrap_err();
        assert!(refused.contains("2 needed now instead of 1"), "{refused}");
        assert_eq!(placed(KUBELET, "0-2,10-13,20-22", &request(5, BestEffort)).unwrap().cpus.len(), 5);
        assert!(placed(KUBELET, "0-2", &request(5, Any)).unwrap_err().contains("3 free"));
        assert!(placed(KUBELET, "0-2", &request(0, Any)).is_err());
        // Near a device.
        let near = Request { near: "2".parse().unwrap(), ..request(2, SingleNumaNode) };
        assert_eq!(placed(KUBELET, "0-31", &near).unwrap().cpus, set("16-17"));
        // Memory decides, too, and is split as the CPUs are.
        let m = machine();
        let claimed = BTreeMap::from([(NodeId(0), 6 << 30), (NodeId(1), 6 << 30)]);
        let chooser = Chooser::new(KUBELET, Scope::Container, &m);
        let room = Room { allocatable: m.online(), free: m.online(), claimed: &claimed };
        let with = |gib: u64, numa| Request { memory: gib << 30, ..request(2, numa) };
        let placed = chooser.place(&m, room, &with(4, SingleNumaNode), &Within::Anywhere).unwrap();
        assert_eq!((placed.cpus, placed.memory), (set("16-17"), BTreeMap::from([(NodeId(2), 4 << 30)])));
        let refused =
            chooser.place(&m, room, &with(40, BestEffort), &Within::Anywhere).unwrap_err().to_string();
        assert!(refused.contains("2.0 GiB on node 0"), "{refused}");
        assert!(chooser.place(&m, room, &with(12, SingleNumaNode), &Within::Anywhere).is_err());
        assert_eq!(
            chooser
                .place(&m, room, &with(12, BestEffort), &Within::Anywhere)
                .unwrap()
                .memory
                .values()
                .sum::<u64>(),
            12 << 30
        );
    }

    #[test]
    fn a_pod_together_or_container_by_container() {
        for strategy in [Strategy::Best, KUBELET] {
            // Node 0 has two CPUs, node 1 four: apart, the first container takes the tight fit and the pod is split.
            let free = "0-1,8-11";
            let apart = pod(strategy, Scope::Container, free, &[2, 2], SingleNumaNode).unwrap();
            assert_eq!(apart, ["0-1", "8-9"], "{strategy}");
            let together = pod(strategy, Scope::Pod, free, &[2, 2], SingleNumaNode).unwrap();
            assert_eq!(together, ["8-9", "10-11"], "{strategy}");
            // All of it on one node, or not at all.
            assert!(pod(strategy, Scope::Container, "0-3,8-11", &[3, 3], SingleNumaNode).is_ok());
            let refused = pod(strategy, Scope::Pod, "0-3,8-11", &[3, 3], SingleNumaNode).unwrap_err();
            assert!(refused.contains("6 CPUs asked for on one node"), "{strategy}: {refused}");
            assert!(pod(strategy, Scope::Pod, "0-3,8-11", &[3, 3], BestEffort).is_ok());
            assert!(pod(strategy, Scope::Pod, "0-3,8-11", &[5, 4], BestEffort).is_err());
        }
    }

    #[test]
    fn a_container_that_comes_later_goes_to_its_pods_nodes() {
        let m = machine();
        let (free, claimed) = (set("0-1,10-15"), BTreeMap::new());
        let room = Room { allocatable: m.online(), free: &free, claimed: &claimed };
        for strategy in [Strategy::Best, KUBELET] {
            let chooser = Chooser::new(strategy, Scope::Pod, &m);
            let later = |cpus, numa| {
                let request = request(cpus, numa);
                let within = chooser.together(&m, room, &set("8-9"), &[&request])?;
                chooser.place(&m, room, &request, &within)
            };
            assert_eq!(later(2, SingleNumaNode).unwrap().cpus, set("10-11"), "{strategy}");
            let refused = later(7, SingleNumaNode).unwrap_err().to_string();
            assert!(refused.contains("on one node"), "{strategy}: {refused}");
            assert_eq!(later(7, BestEffort).unwrap().cpus.len(), 7, "{strategy}");
        }
    }

    #[test]
    fn one_node_is_one_node_whatever_the_options() {
        let m = machine();
        let Strategy::Kubelet { options, .. } = KUBELET else { unreachable!() };
        let socket =
            Strategy::Kubelet { options: StaticOptions { align_by_socket: true, ..options }, closest: false };
        let chooser = Chooser::new(socket, Scope::Container, &m);
        let (free, claimed) = (set("6-13"), BTreeMap::new());
        let room = Room { allocatable: m.online(), free: &free, claimed: &claimed };
        let place = |numa| chooser.place(&m, room, &request(4, numa), &Within::Anywhere).unwrap().cpus;
        assert_eq!(place(SingleNumaNode), set("8-11"));
        assert_eq!(place(BestEffort), set("6-9"), "its socket, in the order of the numbers");
    }

    #[test]
    fn nearness_and_memory_that_nodes_do_not_have() {
        let mut raw = crate::topology::RawTopology { online: Some(set("0-3")), ..Default::default() };
        let without = CpuTopology::assemble(&raw).unwrap();
        let node = |id: u32, cpus: &str, distance: [u32; 3]| crate::topology::RawNode {
            id: NodeId(id),
            cpus: set(cpus),
            memory_bytes: Some(1 << 30),
            distance: Some(distance.to_vec()),
        };
        raw.nodes =
            vec![node(0, "0-1", [10, 20, 40]), node(1, "2-3", [20, 10, 15]), node(2, "", [40, 15, 10])];
        let far = CpuTopology::assemble(&raw).unwrap();
        let claimed = BTreeMap::new();
        for strategy in [Strategy::Best, KUBELET] {
            let place = |m: &CpuTopology, request: &Request| {
                let room = Room { allocatable: m.online(), free: m.online(), claimed: &claimed };
                let chooser = Chooser::new(strategy, Scope::Container, m);
                chooser.place(m, room, request, &Within::Anywhere).map_err(|r| r.to_string())
            };
            let near = |node: &str| Request { near: node.parse().unwrap(), ..request(1, SingleNumaNode) };
            // Node 2 has memory or an accelerator and no CPUs; node 1 is next to it.
            assert_eq!(place(&far, &near("2")).unwrap().cpus, set("2"), "{strategy}");
            assert!(
                place(&far, &near("7"))
                    .unwrap_err()
                    .contains("near node 7, which this machine does not have")
            );
            let memory = Request { memory: 1, ..request(1, BestEffort) };
            assert!(place(&without, &memory).unwrap_err().contains("shows no NUMA nodes"), "{strategy}");
        }
    }

    #[test]
    fn what_the_kubelet_would_not_start_with() {
        let m = machine();
        let Strategy::Kubelet { options, .. } = KUBELET else { unreachable!() };
        let socket =
            Strategy::Kubelet { options: StaticOptions { align_by_socket: true, ..options }, closest: true };
        assert_eq!(socket.to_string(), "kubelet:align-by-socket,prefer-closest-numa-nodes");
        assert_eq!(socket.check(BestEffort, &m), Ok(()));
        assert_eq!(socket.check(SingleNumaNode, &m), Err(StrategyError::SocketAndNode));
        let mut raw = Regular {
            packages: 2,
            nodes: 1,
            l3: 1,
            cores: 2,
            threads: 1,
            numbering: Numbering::ThreadsAdjacent,
        }
        .raw();
        raw.nodes.truncate(1);
        raw.nodes[0].cpus = set("0-3");
        let one = CpuTopology::assemble(&raw).unwrap();
        assert_eq!(socket.check(BestEffort, &one), Err(StrategyError::MoreSockets { sockets: 2, nodes: 1 }));
        assert_eq!(Strategy::Best.check(SingleNumaNode, &one), Ok(()));
        assert_eq!(KUBELET.check(SingleNumaNode, &one), Ok(()));
    }
}
