//! The only writer.
//!
//! Problem: success of a write proves nothing (a partition may be invalid, a list may be trimmed, somebody else may
//! write in between), and a plan is right only for what was observed.
//! Steps: each step is applied and what it can affect is read back; the phase ends at the first refusal and at the
//! first surprise, and the caller plans again from a fresh reading.
//! Invariant: steps are applied in order, and none after a refusal or a surprise.

use truepin::{
    cgroup::CpusetFile,
    observed::{Kernel, KernelError, Scope, Step, Value},
    plan::Planned,
};

/// Applies the steps of one phase. The answer holds the steps that were tried, in order.
pub fn execute(kernel: &mut impl Kernel, steps: Vec<Planned>) -> Vec<(Planned, Result<(), KernelError>)> {
    let mut tried = Vec::with_capacity(steps.len());
    for planned in steps {
        let result = kernel.apply(&planned.step).and_then(|()| reads_back(kernel, &planned.step));
        let (result, go_on) = match result {
            Ok(as_written) => (Ok(()), as_written),
            Err(error) => (Err(error), false),
        };
        tried.push((planned, result));
        if !go_on {
            break;
        }
    }
    tried
}

/// Whether the file holds what was written. A cgroup that is gone is a surprise, not an error.
fn reads_back(kernel: &mut impl Kernel, step: &Step) -> Result<bool, KernelError> {
    let Step::Write { path, file, new, .. } = step else { return Ok(true) };
    let observed = kernel.observe(&Scope::Named(vec![path.clone()]))?;
    let Some(files) = observed.cpuset(path) else { return Ok(false) };
    Ok(match (file, new) {
        (CpusetFile::Cpus, Value::Cpus(set)) => files.cpus == *set,
        (CpusetFile::Exclusive, Value::Cpus(set)) => files.exclusive.as_ref() == Some(set),
        (CpusetFile::Partition, Value::Partition(kind)) => {
            files.partition.as_ref().is_some_and(|p| p.kind == *kind && p.invalid.is_none())
        }
        (CpusetFile::Mems, Value::Mems(set)) => files.mems == *set,
        _ => false,
    })
}
