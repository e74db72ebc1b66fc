//! The distributed choice: evenly over as few NUMA nodes as will do, so that what stays free is as even as can be.
//!
//! Steps: the fewest nodes that could hold the request by the machine's averages; for each number of nodes from there on
//! the most even choice ([`super::balance`]); in each of its nodes the share, then the remainder group by group, by
//! the packed rule. Where no number of nodes works, or the request is no multiple of the group: packed.

use super::{
    KubeletMachine, TakeError,
    balance::{self, Balanced, Outcome},
    mask::Pool,
    packed::{Levels, Manner, Order, packed},
};

/// Why there is no choice.
pub(super) enum Fault {
    /// The kubelet says so too.
    Refused(TakeError),
    /// The kubelet never returns.
    Endless,
}

/// `n` of the CPUs in `free`, handed out in groups of `group` CPUs (at least 1).
pub(super) fn distributed(
    machine: &KubeletMachine,
    manner: Manner,
    free: &Pool,
    n: usize,
    group: usize,
) -> Result<Pool, Fault> {
    let available = free.len();
    if n.is_multiple_of(group) && n > 0 && n <= available {
        // A node that lies in several sockets is listed for each of them; it counts once.
        let mut nodes = Order::new();
        for node in Levels::new(machine, free).nodes() {
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        let frees: Vec<usize> = nodes.iter().map(|at| free.count(&machine.nodes.masks[*at])).collect();
        for k in fewest(machine, n, group)..=(n / group).min(nodes.len()) {
            match balance::balanced(&frees, k, n, group) {
                Outcome::None => {}
                Outcome::Endless => return Err(Fault::Endless),
                Outcome::Found(balanced) => {
                    return hand_out(machine, manner, free, &nodes, &balanced, n, group);
                }
            }
        }
    }
    packed(machine, manner, free, n).map_err(Fault::Refused)
}

/// Nodes that the request needs at least, if all were alike.
fn fewest(machine: &KubeletMachine, n: usize, group: usize) -> usize {
    let groups = machine.cpus().len().div_ceil(group);
    let per_node = groups.div_ceil(machine.nodes().len().max(1)).max(1);
    (n / group).div_ceil(per_node).max(1)
}

fn hand_out(
    machine: &KubeletMachine,
    manner: Manner,
    free: &Pool,
    nodes: &[usize],
    balanced: &Balanced,
    n: usize,
    group: usize,
) -> Result<Pool, Fault> {
    let mut free = free.clone();
    let mut taken = free.none();
    let mut needed = signed(n);
    let mut give = |free: &mut Pool, node: usize, n: usize| {
        // The kubelet goes on when a node cannot give its part, and then finds that the sum is wrong.
        if let Ok(part) = packed(machine, manner, &free.within(&machine.nodes.masks[node]), n) {
            needed -= signed(part.len());
            taken.add_all(&part);
            free.remove_all(&part);
        }
    };
    for at in &balanced.nodes {
        give(&mut free, nodes[*at], balanced.share);
    }
    let mut remainder = n - balanced.share * balanced.nodes.len();
    while remainder > 0 {
        let before = remainder;
        for at in &balanced.extra {
            if remainder > 0 && free.count(&machine.nodes.masks[nodes[*at]]) >= group {
                give(&mut free, nodes[*at], group);
                remainder -= group;
            }
        }
        if remainder == before {
            return Err(Fault::Endless);
        }
    }
    if needed == 0 { Ok(taken) } else { Err(Fault::Refused(TakeError::Accounting { missing: needed })) }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
