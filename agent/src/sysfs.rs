//! `/sys/devices/system/{cpu,node}` under a root directory, read into a [`RawTopology`].
//!
//! Problem: hwloc opens about 19 files per CPU and lscpu 29, and both are bound by that number; and on real machines
//! most files are missing somewhere.
//! Steps: the CPU lists; then CPU by CPU, but only those that no earlier CPU's sets have covered: of a core its
//! first thread is read, of a package its first CPU, of a cache the first that shares it. Names in a
//! folder are listed before they are opened, so that a missing file costs nothing, and files are opened relative to it.
//! Caches are looked for at the indexes that they had on the CPU before. Nodes are read from `node*/`, never
//! derived from sockets. At the end `cpu/online` is read again: if it changed, so did everything, and all is read anew.
//!
//! When one reader per set is safe: the kernel builds each set symmetrically. Where sets contradict each other (two
//! of one level overlap, a CPU is not in its own, a core sticks out of its package) the masks are read instead of the
//! lists; where they do so too, every CPU is asked and the core's vote decides.
//!
//! A file that is not there is "not said". A file that cannot be read or parsed is an error that names it.

pub mod archive;
pub mod capture;
mod devices;
mod files;
mod groups;
#[cfg(test)]
mod tests;
mod tree;

pub use devices::{DeviceError, DevicePlace, Evidence, device, devices};
pub use tree::Tree;

use files::list;
use std::{
    io,
    path::{Path, PathBuf},
};
use tree::Folder;
use truepin::{
    CpuId, CpuSet, CpuTopology, NodeId,
    idset::ListError,
    topology::{RawNode, RawTopology, TopologyError},
};

/// Where CPUs and nodes are, from the root.
const SYSTEM: &str = "sys/devices/system";
/// How often `cpu/online` may change under the reader.
const ATTEMPTS: usize = 4;

/// Why a tree could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// Opening, reading or listing failed.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A list of CPUs or nodes that is none.
    #[error("{}: {value:?} is no list", path.display())]
    List {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
        /// What is wrong.
        source: ListError,
    },
    /// Any other value that is not what the file should hold.
    #[error("{}: {value:?} is not {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// CPUs went online or offline in every attempt.
    #[error("{} changed during each of {ATTEMPTS} readings", path.display())]
    Unsteady {
        /// `cpu/online`.
        path: PathBuf,
    },
    /// The tree was read and makes no machine.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// Which CPUs are online, asked again and again.
#[derive(Debug, Clone)]
pub struct OnlineCpus {
    path: PathBuf,
    /// Where there is no such list (before Linux 2.6.26, and on some recorded machines).
    otherwise: CpuSet,
}

impl OnlineCpus {
    /// Of the machine below `root`; `otherwise` where it has no list.
    #[must_use]
    pub fn new(root: &Path, otherwise: CpuSet) -> Self {
        Self { path: root.join("sys/devices/system/cpu/online"), otherwise }
    }

    /// The list.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Now.
    pub fn read(&self) -> Result<CpuSet, SysfsError> {
        Ok(list(&self.path)?.unwrap_or_else(|| self.otherwise.clone()))
    }
}

/// Reads and assembles the machine below `root` (`/` for this one).
pub fn topology(root: &Path) -> Result<CpuTopology, SysfsError> {
    Ok(CpuTopology::assemble(&raw_topology(root)?)?)
}

/// Reads what the tree below `root` says.
pub fn raw_topology(root: &Path) -> Result<RawTopology, SysfsError> {
    read_topology(&Tree::directory(root))
}

/// Reads what a tree says.
pub fn read_topology(tree: &Tree) -> Result<RawTopology, SysfsError> {
    let cpu_path = format!("{SYSTEM}/cpu");
    for _ in 0..ATTEMPTS {
        let Some(cpu_folder) = tree.folder(&cpu_path)? else {
            return Err(SysfsError::Read {
                path: tree.shown(&cpu_path),
                source: io::ErrorKind::NotFound.into(),
            });
        };
        let mut raw = read_lists(&cpu_folder)?;
        raw.source = tree.shown(SYSTEM).display().to_string();
        let cpus = raw.online.clone().unwrap_or_else(|| raw.listed.difference(&raw.listed_offline));
        raw.groups = groups::read_groups(&cpu_folder, &cpus, &mut raw.notes)?;
        if let Some(node_folder) = tree.folder(&format!("{SYSTEM}/node"))? {
            read_nodes(&node_folder, &mut raw)?;
        }
        if cpu_folder.list("online")? == raw.online {
            return Ok(raw);
        }
    }
    Err(SysfsError::Unsteady { path: tree.shown(&cpu_path).join("online") })
}

fn read_lists(cpu_folder: &Folder<'_>) -> Result<RawTopology, SysfsError> {
    let listed: CpuSet = cpu_folder.numbered("cpu")?.into_iter().map(CpuId).collect();
    let online = cpu_folder.list("online")?;
    let mut listed_offline = CpuSet::new();
    if online.is_none() {
        for cpu in listed.iter() {
            // The boot CPU often has no such file.
            if cpu_folder.number(&format!("cpu{cpu}/online"))? == Some(0) {
                listed_offline.insert(cpu);
            }
        }
    }
    Ok(RawTopology {
        listed,
        listed_offline,
        online,
        present: cpu_folder.list("present")?,
        possible: cpu_folder.list("possible")?,
        isolated: cpu_folder.list("isolated")?,
        nohz_full: cpu_folder.list("nohz_full")?,
        ..RawTopology::default()
    })
}

fn read_nodes(node_folder: &Folder<'_>, raw: &mut RawTopology) -> Result<(), SysfsError> {
    raw.nodes_online = node_folder.list("online")?;
    raw.nodes_possible = node_folder.list("possible")?;
    for id in node_folder.numbered("node")? {
        let file = |name: &str| format!("node{id}/{name}");
        let cpus = match node_folder.list_or_mask(&file("cpulist"), &file("cpumap"))? {
            Some(cpus) => cpus,
            // Neither file in trees that keep only the links `cpuN`.
            None => match node_folder.folder(&format!("node{id}"))? {
                Some(node) => node.numbered("cpu")?.into_iter().map(CpuId).collect(),
                None => CpuSet::new(),
            },
        };
        raw.nodes.push(RawNode {
            id: NodeId(id),
            cpus,
            memory_bytes: memory(node_folder, &file("meminfo"))?,
            distance: distances(node_folder, &file("distance"))?,
        });
    }
    Ok(())
}

/// `Node 0 MemTotal:  65536 kB`.
fn memory(folder: &Folder<'_>, name: &str) -> Result<Option<u64>, SysfsError> {
    let Some(text) = folder.text(name)? else { return Ok(None) };
    let Some((_, rest)) = text.split_once("MemTotal:") else { return Ok(None) };
    let value = rest.lines().next().unwrap_or_default().trim();
    let bytes = value.strip_suffix("kB").and_then(|kib| kib.trim().parse::<u64>().ok()?.checked_mul(1024));
    let refuse =
        || SysfsError::Value { path: folder.shown(name), value: value.into(), expected: "a size in kB" };
    bytes.ok_or_else(refuse).map(Some)
}

fn distances(folder: &Folder<'_>, name: &str) -> Result<Option<Vec<u32>>, SysfsError> {
    let Some(text) = folder.text(name)?.filter(|t| !t.is_empty()) else { return Ok(None) };
    let row: Result<Vec<u32>, _> = text.split_ascii_whitespace().map(str::parse).collect();
    let refuse = |_| SysfsError::Value {
        path: folder.shown(name),
        value: text.clone(),
        expected: "a row of distances",
    };
    row.map_err(refuse).map(Some)
}
