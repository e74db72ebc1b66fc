//! Stand-in until the branch with placement is merged.
use crate::{CpuSet, NodeSet, request::Request, topology::CpuTopology};
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("does not fit")]
pub struct Refusal;
#[derive(Debug, Clone, PartialEq)]
pub struct Reason;
impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("")
    }
}
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    pub cpus: CpuSet,
    pub nodes: NodeSet,
    pub reason: Reason,
}
pub fn place(
    _t: &CpuTopology,
    _allocatable: &CpuSet,
    free: &CpuSet,
    r: &Request,
) -> Result<Placement, Refusal> {
    let cpus: CpuSet = free.iter().take(r.cpus as usize).collect();
    if cpus.len() < r.cpus as usize {
        return Err(Refusal);
    }
    Ok(Placement { cpus, nodes: NodeSet::new(), reason: Reason })
}
