//! Devices as a demand.
//!
//! The kubelet's rule (`generateDeviceTopologyHints` in `cm/devicemanager/topology_hints.go`, 1.36), over all nodes: a
//! device counts for a set when one of its nodes is in it, so one that is near several nodes counts once; a device
//! without nodes counts for no set. A set will do when enough devices are free there and it reaches every device that
//! can be reused; it is preferred when no smaller set reaches as many devices in total.

use super::{
    Demand,
    demand::{Row, Spread},
};
use crate::nodeset::{NodeId, NodeSet};

/// A device of the resource that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The nodes that it is near; empty where nothing is known.
    pub nodes: NodeSet,
    /// Healthy and nobody's.
    pub free: bool,
    /// Held by a finished init container of the same pod.
    pub reusable: bool,
}

impl Demand {
    /// `n` of these devices, on a machine with these nodes. `None` if no device has any node: then it does not matter
    /// which is taken.
    #[must_use]
    pub fn devices(nodes: &NodeSet, devices: &[Device], n: usize) -> Option<Self> {
        if devices.iter().all(|d| d.nodes.is_empty()) {
            return None;
        }
        let nodes: Vec<NodeId> = nodes.iter().collect();
        let mut row = Row {
            need: u64::try_from(n).unwrap_or(u64::MAX),
            free: vec![0; nodes.len()],
            total: vec![0; nodes.len()],
            ..Row::default()
        };
        let mut must: Vec<Vec<usize>> = Vec::new();
        for device in devices.iter().filter(|d| !d.nodes.is_empty()) {
            let at: Vec<usize> = device.nodes.iter().filter_map(|n| nodes.binary_search(&n).ok()).collect();
            let free = u64::from(device.free && !device.reusable);
            row.held += u64::from(device.reusable);
            match at.as_slice() {
                [] => {}
                [one] => {
                    row.free[*one] += free;
                    row.total[*one] += 1;
                }
                several => match row.spread.iter_mut().find(|s| s.at == several) {
                    Some(spread) => {
                        spread.free += free;
                        spread.total += 1;
                    }
                    None => row.spread.push(Spread { at: at.clone(), free, total: 1 }),
                },
            }
            if device.reusable && !must.contains(&at) {
                must.push(at);
            }
        }
        Some(Self { nodes, rows: vec![row], must, sockets: None })
    }
}
