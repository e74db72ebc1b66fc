//! Where devices are: the NUMA nodes that `--near` means, and `topology --devices`.
//!
//! A device is named as people name it: a PCI address (`0000:17:00.0`, `17:00.0`), a network interface (`eth0`) or a
//! block device (`nvme0n1`, `/dev/sda1`). Its folder is found through `bus/pci` and `class`, and the folder and those
//! above it are asked for `numa_node`, then for `local_cpulist`. Firmware often says -1 (no idea), and bridges say
//! that every CPU is local: neither is a place.

use super::{
    SysfsError,
    tree::{Folder, Tree},
};
use std::path::{Path, PathBuf};
use truepin::{
    CpuSet, CpuTopology, NodeSet,
    topology::{
        DeviceKind, RawDevice,
        devices::{is_pci_address, near},
    },
};

/// Where devices of each kind are listed.
pub(super) const LISTS: [(DeviceKind, &str); 3] = [
    (DeviceKind::Pci, "sys/bus/pci/devices"),
    (DeviceKind::Net, "sys/class/net"),
    (DeviceKind::Block, "sys/class/block"),
];

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
    let tree = Tree::directory(root);
    let short = name.strip_prefix("/dev/").unwrap_or(name);
    // Block devices with a slash in their name have a `!` in sysfs (`cciss!c0d0`).
    let short = short.replace('/', "!");
    if short.is_empty() || short == "." || short == ".." || short.contains('\0') {
        return Err(DeviceError::Name { name: name.into() });
    }
    let [(_, pci), (_, net), (_, block)] = LISTS;
    let tried = [
        format!("{pci}/{short}"),
        format!("{pci}/0000:{short}"),
        format!("{net}/{short}"),
        format!("{block}/{short}"),
    ];
    let mut found = None;
    for path in &tried {
        if let Some(folder) = tree.resolve(path)? {
            found = Some(folder);
            break;
        }
    }
    let Some(folder) = found else {
        let tried = tried.iter().map(|p| tree.shown(p)).collect();
        return Err(DeviceError::Unknown { name: name.into(), tried });
    };
    // Of the folder and those above it, the first that tells a place.
    for path in above(&folder) {
        let Some(at) = tree.folder(path)? else { continue };
        let (node, cpus) = stated(&at)?;
        let place = near(topology, node, cpus.as_ref());
        let Some((nodes, cpus)) =
            place.map_err(|node| DeviceError::Node { path: at.shown("numa_node"), node })?
        else {
            continue;
        };
        let evidence = if node.is_some_and(|n| n >= 0) {
            Evidence::NumaNode(at.shown("numa_node"))
        } else {
            Evidence::LocalCpus(tree.shown(path), cpus)
        };
        return Ok(DevicePlace { folder: tree.shown(&folder), nodes, evidence });
    }
    Ok(DevicePlace { folder: tree.shown(&folder), nodes: NodeSet::new(), evidence: Evidence::Nothing })
}

/// A device's folder and those above it, up to where folders are no devices.
pub(super) fn above(folder: &str) -> impl Iterator<Item = &str> {
    let parents = |path: &&'_ str| path.rsplit_once('/').map(|(parent, _)| parent.len());
    std::iter::successors(Some(folder), move |path| parents(path).map(|len| &folder[..len])).take_while(
        |path| {
            let is_list = LISTS.iter().any(|(_, list)| list == path);
            path.starts_with("sys/") && *path != "sys/devices" && !is_list
        },
    )
}

/// What one folder says: `numa_node`, and `local_cpulist` or `local_cpus`.
pub(super) fn stated(folder: &Folder<'_>) -> Result<(Option<i64>, Option<CpuSet>), SysfsError> {
    Ok((folder.number("numa_node")?, folder.list_or_mask("local_cpulist", "local_cpus")?))
}

/// A device as it is listed, and the folders that may tell its place.
pub(super) struct Found {
    pub(super) kind: DeviceKind,
    pub(super) name: String,
    /// Its folder; `None` for a link that leads nowhere, as in trees that were cut.
    pub(super) folder: Option<String>,
    /// That path, or where a link that leads nowhere points.
    pub(super) path: String,
}

impl Found {
    /// The PCI function that it is, or belongs to.
    fn pci(&self) -> Option<String> {
        self.path.split('/').rev().find(|p| is_pci_address(p)).map(Into::into)
    }
}

/// Every device that hardware stands behind: no loopback, bridge, tunnel, loop or device-mapper device, and no partition.
pub(super) fn list(tree: &Tree) -> Result<Vec<Found>, SysfsError> {
    let mut all = Vec::new();
    for (kind, path) in LISTS {
        let Some(folder) = tree.folder(path)? else { continue };
        let mut names = folder.names()?;
        names.sort();
        for name in &names {
            let to = tree.resolve(&format!("{path}/{name}"))?;
            let shown = to.clone().or_else(|| folder.link(name)).unwrap_or_default();
            // `bonding_masters` is a file in the list of interfaces.
            let is_file = to.as_ref().is_some_and(|to| matches!(tree.folder(to), Ok(None)));
            let is_partition = kind == DeviceKind::Block
                && shown.split('/').rev().nth(1).is_some_and(|parent| names.iter().any(|n| n == parent));
            if shown.contains("devices/virtual/") || is_partition || is_file || name == "bonding_masters" {
                continue;
            }
            all.push(Found { kind, name: name.clone(), folder: to, path: shown });
        }
    }
    Ok(all)
}

/// Every device of a tree with what the kernel says of its place on this machine.
pub fn devices(tree: &Tree, topology: &CpuTopology) -> Result<Vec<RawDevice>, SysfsError> {
    let mut raw = Vec::new();
    for found in list(tree)? {
        let pci = found.pci();
        let Found { kind, name, folder, .. } = found;
        let mut device = RawDevice { kind, name, pci, class: None, node: None, local_cpus: None };
        for path in folder.iter().flat_map(|f| above(f)) {
            let Some(at) = tree.folder(path)? else { continue };
            if Some(path) == folder.as_deref() && kind == DeviceKind::Pci {
                device.class = class(&at)?;
            }
            let (node, cpus) = stated(&at)?;
            // A node that does not exist is a statement too; who places the device complains.
            if !matches!(near(topology, node, cpus.as_ref()), Ok(None)) {
                (device.node, device.local_cpus) = (node, cpus);
                break;
            }
        }
        raw.push(device);
    }
    Ok(raw)
}

/// `0x020000`.
fn class(folder: &Folder<'_>) -> Result<Option<u32>, SysfsError> {
    let Some(text) = folder.text("class")?.filter(|t| !t.is_empty()) else { return Ok(None) };
    let class = text.strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok());
    let refuse = || SysfsError::Value {
        path: folder.shown("class"),
        value: text.clone(),
        expected: "a PCI class (0x…)",
    };
    class.filter(|class| *class < 1 << 24).ok_or_else(refuse).map(Some)
}
