//! The strategy on a request: the kubelet's choice as a [`Placement`], its refusals as a [`Refusal`].

use super::{KubeletMachine, StaticOptions, TakeError, allocate, check_smt};
use crate::{
    cpuset::CpuSet,
    nodeset::NodeSet,
    placement::{Placement, Refusal, RefusalKind, aligned},
    request::Request,
    topology::CpuTopology,
};

/// Chooses CPUs for a request as the kubelet would.
///
/// `machine` is that of `topology`; `allocatable` and `free` as for [`crate::placement::place`]. `affinity` is the winning
/// hint's nodes: those come first, anything else after them; `None` for any node. Whether the policy lets the request
/// in at all is decided with the hints, not here. `whole_cores` of the request is `full-pcpus-only` for it alone.
pub fn place(
    topology: &CpuTopology,
    machine: &KubeletMachine,
    options: StaticOptions,
    (allocatable, free): (&CpuSet, &CpuSet),
    request: &Request,
    affinity: Option<&NodeSet>,
) -> Result<Placement, Box<Refusal>> {
    let allocatable = allocatable.intersection(machine.cpus());
    let free = free.intersection(&allocatable);
    let options =
        StaticOptions { full_pcpus_only: options.full_pcpus_only || request.whole_cores, ..options };
    let asked = Request { whole_cores: options.full_pcpus_only, ..request.clone() };
    let refuse = |kind| Err(Box::new(aligned::refusal(topology, &allocatable, &free, &asked, kind)));
    let unknown: NodeSet = request.near.iter().filter(|n| topology.node(*n).is_none()).collect();
    let n = request.cpus as usize;
    if n == 0 {
        return refuse(RefusalKind::Nothing);
    }
    if !unknown.is_empty() {
        return refuse(RefusalKind::UnknownNodes { nodes: unknown });
    }
    let (none, reserved) = (CpuSet::new(), machine.cpus().difference(&allocatable));
    let result = check_smt(machine, options, &reserved, &free, n)
        .and_then(|()| allocate(machine, options, &none, &free, &none, affinity, n));
    match result {
        Ok(cpus) => Ok(Placement::of(topology, cpus, &request.near)),
        Err(TakeError::SmtAlignment { cpus_per_core, .. }) => {
            let below = n / cpus_per_core.max(1) * cpus_per_core;
            let above = Some(below + cpus_per_core).filter(|above| *above <= allocatable.len());
            refuse(RefusalKind::NotWholeCores { below: Some(below).filter(|n| *n > 0), above })
        }
        Err(_) if n > free.len() => refuse(RefusalKind::NotEnough),
        // Enough CPUs are free, so that it is for whole cores (or a rule's sum over them) that they do not do.
        Err(_) => refuse(RefusalKind::NotEnoughWholeCores),
    }
}
