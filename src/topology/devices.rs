//! Where PCI devices, network interfaces and block devices are.
//!
//! Problem: a queue that is served on another node than its card costs a crossing of the interconnect for each packet,
//! and only firmware knows where a card is; often it does not (-1), and bridges claim to be near every CPU.
//! Steps: a source fills [`RawDevice`]s; [`place`] makes [`Device`]s of them for one machine.
//! Invariant: [`Device::nodes`] are nodes of the machine; empty means that nothing is known, never "everywhere".

use super::CpuTopology;
use crate::{
    cpuset::CpuSet,
    nodeset::{NodeId, NodeSet},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A PCI function, named by its address (`0000:17:00.0`).
    Pci,
    /// A network interface.
    Net,
    /// A disk.
    Block,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pci => "pci",
            Self::Net => "net",
            Self::Block => "block",
        })
    }
}

/// A device as a source describes it. `None` is "the source does not say".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawDevice {
    /// What it is.
    pub kind: DeviceKind,
    /// Its name within its kind.
    pub name: String,
    /// The PCI function that it is, or belongs to.
    pub pci: Option<String>,
    /// The PCI class, 24 bits (`0x020000`: Ethernet).
    pub class: Option<u32>,
    /// The node that the kernel states; negative is "no idea".
    pub node: Option<i64>,
    /// The CPUs that are local to it, as stated.
    pub local_cpus: Option<CpuSet>,
}

/// A device of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// Its name within its kind.
    pub name: String,
    /// The PCI function that it is, or belongs to.
    pub pci: Option<String>,
    /// The PCI class in the kernel's form, `0x020000`.
    pub class: Option<String>,
    /// The nodes that it is near; empty where nothing says so.
    pub nodes: NodeSet,
    /// The CPUs that are local to it; `None` where nothing says so.
    pub local_cpus: Option<CpuSet>,
}

impl RawDevice {
    /// Whether this is a bridge, which nobody pins to (PCI base class 6).
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.class.is_some_and(|class| class >> 16 == 6)
    }
}

/// What such a node number and such local CPUs mean on this machine: the node, else the nodes of the CPUs, unless
/// those are all CPUs of a machine with several nodes. `Err` is a node that the machine does not have.
pub fn near(
    topology: &CpuTopology,
    node: Option<i64>,
    local_cpus: Option<&CpuSet>,
) -> Result<Option<(NodeSet, CpuSet)>, i64> {
    if let Some(node) = node.filter(|node| *node >= 0) {
        let id = u32::try_from(node).map(NodeId).map_err(|_| node)?;
        let known = topology.node(id).ok_or(node)?;
        // A list of every CPU is firmware's "no idea" here too, when the node is only a part.
        let stated = local_cpus.filter(|cpus| !cpus.is_empty() && !topology.online().is_subset(cpus));
        return Ok(Some((NodeSet::single(id), stated.unwrap_or(&known.cpus).clone())));
    }
    let Some(cpus) = local_cpus else { return Ok(None) };
    let nodes = topology.nodes_of(cpus);
    let is_a_place = !nodes.is_empty() && !topology.online().is_subset(cpus);
    Ok(is_a_place.then(|| (nodes, cpus.clone())))
}

/// The devices of a machine in order of kind and name (PCI addresses ascend), each once; and what is odd about them.
#[must_use]
pub fn place(topology: &CpuTopology, raw: &[RawDevice]) -> (Vec<Device>, Vec<String>) {
    let mut oddities = Vec::new();
    let mut devices: Vec<Device> = Vec::with_capacity(raw.len());
    for device in raw {
        let place = near(topology, device.node, device.local_cpus.as_ref()).unwrap_or_else(|node| {
            let (kind, name) = (device.kind, &device.name);
            oddities
                .push(format!("{kind} {name} is on NUMA node {node}, which does not exist: place unknown"));
            None
        });
        let (nodes, local_cpus) = place.map_or((NodeSet::new(), None), |(n, c)| (n, Some(c)));
        devices.push(Device {
            kind: device.kind,
            name: device.name.clone(),
            pci: device.pci.clone(),
            class: device.class.map(|class| format!("{class:#08x}")),
            nodes,
            local_cpus,
        });
    }
    devices.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    devices.dedup_by(|a, b| a.kind == b.kind && a.name == b.name);
    oddities.sort();
    (devices, oddities)
}

/// `0000:17:00.0`: domain (four digits or more), bus, device, function.
#[must_use]
pub fn is_pci_address(text: &str) -> bool {
    let hex = |text: &str, least: usize, most: usize| {
        (least..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = text.split(':').collect();
    let [domain, bus, rest] = parts[..] else { return false };
    let Some((device, function)) = rest.split_once('.') else { return false };
    hex(domain, 4, 8) && hex(bus, 2, 2) && hex(device, 2, 2) && hex(function, 1, 1)
}
