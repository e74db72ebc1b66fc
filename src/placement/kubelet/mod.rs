//! The choice that the kubelet's static CPU policy makes (1.36), with each of its options.
//!
//! Problem: who moves a node from the kubelet wants to see the same sets; and the kubelet's rule, on machines whose cores
//! or sockets differ, hands out CPUs that are not free, or never returns. Steps: [`KubeletMachine`] is built once;
//! [`take`] runs the rule as it is ([`packed`], [`distributed`]), and where that leaves the available set, has another
//! size or has no end, once more with each core and socket taken for what it is. Invariant: a set that is returned has
//! as many CPUs as were asked for, all of them available.

mod balance;
mod distributed;
mod error;
mod machine;
mod mask;
mod options;
mod packed;
mod place;
#[cfg(test)]
mod tests;

pub use error::TakeError;
pub use machine::{KubeletCounts, KubeletMachine, Label, Labels};
pub use options::{OptionsError, StaticOptions};
pub use place::place;

use crate::{cpuset::CpuSet, nodeset::NodeSet};
use distributed::Fault;
use mask::Pool;
use packed::{Manner, Rule};

/// `n` CPUs of those `available`, of which the ones that the machine does not have are left out (`takeByTopology`).
///
/// Whether `full-pcpus-only` allows the number at all is not asked here: see [`check_smt`].
pub fn take(
    machine: &KubeletMachine,
    options: StaticOptions,
    available: &CpuSet,
    n: usize,
) -> Result<CpuSet, TakeError> {
    let pool = Pool::new(machine.cpus(), available);
    let result = as_it_is_or_right(options, &pool, n, |rule| choose(machine, options, rule, &pool, n));
    result.map_err(|error| error.with_available(available.len()))
}

/// `n` CPUs for a container (`allocateCPUs`): of the shared pool without the reserved ones, and of those that its pod may
/// use again; those of the affinity's nodes first (with `align-by-socket`, of the sockets that they touch), then from
/// anywhere. The shared pool is afterwards what it was without the result.
pub fn allocate(
    machine: &KubeletMachine,
    options: StaticOptions,
    reserved: &CpuSet,
    shared: &CpuSet,
    reusable: &CpuSet,
    affinity: Option<&NodeSet>,
    n: usize,
) -> Result<CpuSet, TakeError> {
    let available = shared.difference(reserved).union(reusable);
    let pool = Pool::new(machine.cpus(), &available);
    let aligned = affinity.map(|nodes| {
        let near = if options.align_by_socket {
            machine.cpus_of_sockets_of(nodes)
        } else {
            machine.cpus_of_nodes(nodes)
        };
        Pool::new(machine.cpus(), &available.intersection(&near))
    });
    as_it_is_or_right(options, &pool, n, |rule| match &aligned {
        None => choose(machine, options, rule, &pool, n),
        Some(aligned) => aligned_first(machine, options, rule, (&pool, aligned), n),
    })
}

/// The CPUs that the kubelet reserves when it is told a number (by `NewStaticPolicy`): chosen of all, by the same options.
pub fn reserved(machine: &KubeletMachine, options: StaticOptions, count: usize) -> Result<CpuSet, TakeError> {
    take(machine, options, machine.cpus(), count)
}

/// What `full-pcpus-only` refuses before CPUs are chosen: a number that does not fill cores (of average size), or more
/// than there are in the shared pool beside reserved CPUs and their siblings. Without the option nothing is refused.
pub fn check_smt(
    machine: &KubeletMachine,
    options: StaticOptions,
    reserved: &CpuSet,
    shared: &CpuSet,
    n: usize,
) -> Result<(), TakeError> {
    if !options.full_pcpus_only {
        return Ok(());
    }
    let cpus_per_core = machine.counts().cpus_per_core();
    if cpus_per_core > 0 && !n.is_multiple_of(cpus_per_core) {
        return Err(TakeError::SmtAlignment { requested: n, cpus_per_core });
    }
    let available = shared.difference(&machine.with_siblings(reserved)).len();
    if n > available {
        return Err(TakeError::NotEnoughPhysical { requested: n, available, cpus_per_core });
    }
    Ok(())
}

/// By averages, and if that is no choice, by what is true.
fn as_it_is_or_right(
    options: StaticOptions,
    pool: &Pool,
    n: usize,
    choose: impl Fn(Rule) -> Result<Pool, Fault>,
) -> Result<CpuSet, TakeError> {
    match choose(Rule::Averages) {
        Ok(cpus) if cpus.is_subset(pool) && cpus.len() == n => return Ok(cpus.set()),
        Err(Fault::Refused(error)) => return Err(error),
        Ok(_) | Err(Fault::Endless) => {}
    }
    match choose(Rule::True { whole: options.full_pcpus_only }) {
        Ok(cpus) if cpus.is_subset(pool) && cpus.len() == n => Ok(cpus.set()),
        Err(Fault::Refused(error)) => Err(error),
        Ok(_) | Err(Fault::Endless) => Err(TakeError::Unaccounted { requested: n, available: pool.len() }),
    }
}

fn choose(
    machine: &KubeletMachine,
    options: StaticOptions,
    rule: Rule,
    free: &Pool,
    n: usize,
) -> Result<Pool, Fault> {
    let manner = Manner::new(rule, options);
    if !options.distribute_across_numa {
        return packed::packed(machine, manner, free, n).map_err(Fault::Refused);
    }
    if rule != (Rule::True { whole: true }) {
        let group = if options.full_pcpus_only { machine.counts().cpus_per_core().max(1) } else { 1 };
        return distributed::distributed(machine, manner, free, n, group);
    }
    // Cores of one size can be handed out in groups of it; of several sizes they are packed.
    let whole = packed::whole_cores(machine, free);
    let mut sizes = machine.cores.masks.iter().filter(|core| whole.touches(core)).map(|core| core.len);
    match sizes.next() {
        Some(size) if sizes.all(|other| other == size) => {
            distributed::distributed(machine, manner, &whole, n, size)
        }
        _ => packed::packed(machine, manner, &whole, n).map_err(Fault::Refused),
    }
}

fn aligned_first(
    machine: &KubeletMachine,
    options: StaticOptions,
    rule: Rule,
    (free, aligned): (&Pool, &Pool),
    n: usize,
) -> Result<Pool, Fault> {
    let from = |first: usize| {
        let mut taken = choose(machine, options, rule, aligned, first)?;
        let mut left = free.clone();
        left.remove_all(&taken);
        // A choice by averages may be too large already.
        let rest = choose(machine, options, rule, &left, n.saturating_sub(taken.len()))?;
        taken.add_all(&rest);
        Ok(taken)
    };
    if rule != (Rule::True { whole: true }) {
        return from(aligned.len().min(n));
    }
    // Whole cores of the aligned part need not add up to it: as much as they do.
    let aligned_cores = packed::whole_cores(machine, aligned).len().min(n);
    let mut last = from(aligned_cores);
    for first in (0..aligned_cores).rev() {
        if last.is_ok() {
            break;
        }
        last = from(first);
    }
    last
}
