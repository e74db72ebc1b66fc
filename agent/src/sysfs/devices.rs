//! Where a device is: the NUMA nodes that `--near` means.
//!
//! A device is named as people name it: a PCI address (`0000:17:00.0`, `17:00.0`), a network interface (`eth0`) or a
//! block device (`nvme0n1`, `/dev/sda1`). Its folder is found through `bus/pci` and `class`, and the folder and those
//! above it are asked for `numa_node`, then for `local_cpulist`. Firmware often says -1 (no idea), and bridges say
//! that every CPU is local: neither is a place.

use super::{
    SysfsError,
    files::{list_or_mask, number},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use truepin::{CpuSet, CpuTopology, NodeId, NodeSet};

/// Where a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlace {
    /// The device's folder.
    pub folder: PathBuf,
    /// The nodes it is near; empty when the kernel does not know.
    pub nodes: NodeSet,
    /// What says so.
    pub evidence: Evidence,
}

/// What tells a device's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evidence {
    /// A file `numa_node`.
    NumaNode(PathBuf),
    /// A file `local_cpulist` or `local_cpus`, which does not name every CPU.
    LocalCpus(PathBuf, CpuSet),
    /// Nothing: every NUMA node is as near.
    Nothing,
}

/// Why a device has no place.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No folder of that name.
    #[error("no device {name:?}: looked for {}", tried.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    Unknown {
        /// The name as given.
        name: String,
        /// The folders tried.
        tried: Vec<PathBuf>,
    },
    /// A name that cannot be one.
    #[error("{name:?} is no device: expected a PCI address, a network interface or a block device")]
    Name {
        /// The name as given.
        name: String,
    },
    /// A file says a node that the machine does not have.
    #[error("{}: NUMA node {node} does not exist", path.display())]
    Node {
        /// The file.
        path: PathBuf,
        /// The node.
        node: i64,
    },
    /// A file could not be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
}

/// Finds the place of the device `name` below `root`.
pub fn device(root: &Path, topology: &CpuTopology, name: &str) -> Result<DevicePlace, DeviceError> {
    let short = name.strip_prefix("/dev/").unwrap_or(name);
    // Block devices with a slash in their name have a `!` in sysfs (`cciss!c0d0`).
    let short = short.replace('/', "!");
    if short.is_empty() || short == "." || short == ".." || short.contains('\0') {
        return Err(DeviceError::Name { name: name.into() });
    }
    let sys = root.join("sys");
    let tried = [
        sys.join("bus/pci/devices").join(&short),
        sys.join("bus/pci/devices").join(format!("0000:{short}")),
        sys.join("class/net").join(&short),
        sys.join("class/block").join(&short),
    ];
    let resolve = |path: &Path| match fs::canonicalize(path) {
        Ok(folder) => Ok(Some(folder)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(SysfsError::Read { path: path.into(), source }),
    };
    let mut found = None;
    for path in &tried {
        if let Some(folder) = resolve(path)? {
            found = Some(folder);
            break;
        }
    }
    let Some(folder) = found else {
        return Err(DeviceError::Unknown { name: name.into(), tried: tried.into() });
    };
    let Some(top) = resolve(&sys.join("devices"))? else {
        return Ok(DevicePlace { folder, nodes: NodeSet::new(), evidence: Evidence::Nothing });
    };

    let (nodes, evidence) = near(&folder, &top, topology)?;
    Ok(DevicePlace { folder, nodes, evidence })
}

/// What the device's folder and those above it say, up to `top`.
fn near(folder: &Path, top: &Path, topology: &CpuTopology) -> Result<(NodeSet, Evidence), DeviceError> {
    for dir in folder.ancestors().take_while(|dir| dir.starts_with(top) && *dir != top) {
        let path = dir.join("numa_node");
        if let Some(node) = number(&path)?.filter(|node| *node >= 0) {
            let id = u32::try_from(node).ok().map(NodeId).filter(|id| topology.node(*id).is_some());
            let id = id.ok_or_else(|| DeviceError::Node { path: path.clone(), node })?;
            return Ok((NodeSet::single(id), Evidence::NumaNode(path)));
        }
        if let Some(cpus) = list_or_mask(dir, "local_cpulist", "local_cpus")? {
            let nodes = topology.nodes_of(&cpus);
            if !nodes.is_empty() && !topology.online().is_subset(&cpus) {
                return Ok((nodes, Evidence::LocalCpus(dir.into(), cpus)));
            }
        }
    }
    Ok((NodeSet::new(), Evidence::Nothing))
}
