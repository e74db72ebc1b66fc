//! [`CpuTopology`] for machines (`truepin.topology/1`) and for people (a tree).

pub use super::tree::tree;

use super::{CpuTopology, Device, Level};
use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::NodeId,
};
use serde::Serialize;

/// The document `truepin.topology/1`: sets as kernel lists, groups by their lowest online CPU, `null` for a level
/// that does not exist or a file that is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopologyDoc {
    /// `truepin.topology/1`.
    pub schema: &'static str,
    /// Online CPUs.
    pub online: CpuSet,
    /// CPUs that are plugged in.
    pub present: Option<CpuSet>,
    /// CPUs that the kernel has room for.
    pub possible: Option<CpuSet>,
    /// Plugged in, not online.
    pub offline: CpuSet,
    /// `isolcpus=` and isolated partitions.
    pub isolated: Option<CpuSet>,
    /// `nohz_full=`.
    pub nohz_full: Option<CpuSet>,
    /// Online CPUs, ascending.
    pub cpus: Vec<CpuDoc>,
    /// NUMA nodes, ascending.
    pub nodes: Vec<NodeDoc>,
    /// See [`CpuTopology::fingerprint`].
    pub fingerprint: String,
    /// See [`CpuTopology::oddities`].
    pub oddities: Vec<String>,
    /// Where devices are, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<Device>>,
}

/// One online CPU; every group by its leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "the levels are documented in `Level`")]
pub struct CpuDoc {
    pub cpu: CpuId,
    pub package: Option<CpuId>,
    pub die: Option<CpuId>,
    pub cluster: Option<CpuId>,
    pub core: Option<CpuId>,
    pub l2: Option<CpuId>,
    pub l3: Option<CpuId>,
    pub book: Option<CpuId>,
    pub drawer: Option<CpuId>,
    pub node: Option<NodeId>,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeDoc {
    /// The kernel's number.
    pub id: NodeId,
    /// The kernel's list, offline CPUs included.
    pub cpus: CpuSet,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The kernel's row.
    pub distance: Option<Vec<u32>>,
}

/// The document for a machine.
#[must_use]
pub fn document(topology: &CpuTopology) -> TopologyDoc {
    let cpu = |id: CpuId, node| {
        let leader = |level| topology.group_of(level, id).map(|g| g.leader);
        CpuDoc {
            cpu: id,
            package: leader(Level::Package),
            die: leader(Level::Die),
            cluster: leader(Level::Cluster),
            core: leader(Level::Core),
            l2: leader(Level::L2),
            l3: leader(Level::L3),
            book: leader(Level::Book),
            drawer: leader(Level::Drawer),
            node,
        }
    };
    TopologyDoc {
        schema: "truepin.topology/1",
        online: topology.online().clone(),
        present: topology.present().cloned(),
        possible: topology.possible().cloned(),
        offline: topology.offline().clone(),
        isolated: topology.isolated().cloned(),
        nohz_full: topology.nohz_full().cloned(),
        cpus: topology.cpus().iter().map(|c| cpu(c.id, c.node)).collect(),
        nodes: topology
            .nodes()
            .iter()
            .map(|n| NodeDoc {
                id: n.id,
                cpus: n.listed.clone(),
                memory_bytes: n.memory_bytes,
                distance: n.distance.clone(),
            })
            .collect(),
        fingerprint: topology.fingerprint(),
        oddities: topology.oddities().to_vec(),
        devices: None,
    }
}
