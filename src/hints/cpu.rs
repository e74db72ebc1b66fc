//! CPUs as a demand.
//!
//! The kubelet's rule (`generateCPUTopologyHints` in `cm/cpumanager/policy_static.go`, 1.36): of the nodes that have CPUs
//! a set will do when it has all CPUs that can be reused and, with those, enough free ones; it is preferred when no
//! smaller set has as many CPUs in total, with `align-by-socket` also when it touches no more sockets than so many nodes
//! need.

use super::{
    Demand, TopologyHint,
    demand::{Row, Sockets},
};
use crate::{cpuset::CpuSet, placement::kubelet::KubeletMachine};

impl Demand {
    /// `n` CPUs out of those that are free (`available`) and those of the pod's own finished init containers
    /// (`reusable`, disjoint from `available`).
    #[must_use]
    pub fn cpus(
        machine: &KubeletMachine,
        align_by_socket: bool,
        available: &CpuSet,
        reusable: &CpuSet,
        n: usize,
    ) -> Self {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let row = Row {
            need: count(n),
            held: count(reusable.common(machine.cpus())),
            free: machine.nodes().map(|(_, cpus)| count(cpus.common(available))).collect(),
            total: machine.nodes().map(|(_, cpus)| count(cpus.len())).collect(),
            spread: Vec::new(),
        };
        let reused = machine.nodes().enumerate().filter(|(_, (_, cpus))| !cpus.is_disjoint(reusable));
        Self {
            nodes: machine.nodes().map(|(id, _)| id).collect(),
            rows: vec![row],
            must: reused.map(|(at, _)| vec![at]).collect(),
            sockets: if align_by_socket { sockets(machine) } else { None },
        }
    }
}

/// `None` where the declared counters make less than one node per socket: the rule then never holds.
fn sockets(machine: &KubeletMachine) -> Option<Sockets> {
    let counts = machine.counts();
    let nodes_per_socket = counts.nodes.checked_div(counts.sockets).filter(|n| *n > 0)?;
    let of_node = |cpus: &CpuSet| {
        let touched = machine.sockets().enumerate().filter(|(_, (_, socket))| !socket.is_disjoint(cpus));
        touched.map(|(at, _)| at).collect()
    };
    Some(Sockets {
        nodes_per_socket,
        of_node: machine.nodes().map(|(_, cpus)| of_node(cpus)).collect(),
        count: machine.sockets().len(),
    })
}

/// The hints for `n` CPUs, in the kubelet's order: by number of nodes, then by the list of nodes. Empty if no set of
/// nodes will do.
#[must_use]
pub fn cpu_hints(
    machine: &KubeletMachine,
    align_by_socket: bool,
    available: &CpuSet,
    reusable: &CpuSet,
    n: usize,
) -> Vec<TopologyHint> {
    Demand::cpus(machine, align_by_socket, available, reusable, n).hints().collect()
}

/// The hints of a container that has its CPUs already: those on which they lie. Empty if it now asks for another
/// number.
#[must_use]
pub fn allocated_hints(
    machine: &KubeletMachine,
    align_by_socket: bool,
    allocated: &CpuSet,
    n: usize,
) -> Vec<TopologyHint> {
    if allocated.len() == n {
        cpu_hints(machine, align_by_socket, allocated, &CpuSet::new(), n)
    } else {
        Vec::new()
    }
}
