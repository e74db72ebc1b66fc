//! `truepin topology capture`: what the readers of this module may ask of a tree, as an archive.
//!
//! Problem: a machine is to be looked at elsewhere, without what identifies it.
//! Steps: by a list of names (below) every file that a reader could want of CPUs and nodes, for all CPUs and in both
//! forms, so that later readers and other tools find them too; of devices the folders on the way to them, without any name but
//! PCI addresses; an archive is made of that, read back, and must describe the same machine.
//! Invariants: nothing is recorded but the names below. Folders named by serial numbers or GUIDs on the way to
//! a device are left out, and so are interfaces whose name is a MAC address (`enx…`). Same tree, same bytes.

use super::{
    SysfsError, archive,
    archive::ArchiveError,
    devices::{Found, above, list, stated},
    groups::SETS,
    read_topology,
    tree::{Folder, Tree},
};
use flate2::{Compression, write::GzEncoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    path::Path,
};
use truepin::{
    CpuTopology,
    topology::{
        DeviceKind, TopologyError, devices::is_pci_address, devices::near, devices::place, render::document,
    },
};

/// Why a machine could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The tree could not be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The tree makes no machine.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The archive could not be made.
    #[error("cannot make the archive")]
    Write(#[from] io::Error),
    /// The archive could not be read back.
    #[error("the archive cannot be read back")]
    Archive(#[from] ArchiveError),
    /// What was recorded is another machine.
    #[error("what was recorded does not describe the same machine: CPUs or devices changed meanwhile")]
    Differs,
}

/// How to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// `.tar.gz`.
    Gzip,
    /// `.tar.zst`.
    Zstd,
}

/// A machine on record.
#[derive(Debug)]
pub struct Capture {
    /// The archive.
    pub bytes: Vec<u8>,
    /// Files in it.
    pub files: usize,
    /// Devices in it.
    pub devices: usize,
    /// Interfaces that were left out, because their name is a MAC address.
    pub left_out: usize,
}

/// What an archive holds at a path.
enum Entry {
    Folder,
    File(Vec<u8>),
    Link(String),
}

type Entries = BTreeMap<String, Entry>;

const CPU_LISTS: [&str; 5] = ["online", "present", "possible", "isolated", "nohz_full"];
const CACHE: [&str; 4] = ["level", "type", "shared_cpu_list", "shared_cpu_map"];
const NODE: [&str; 3] = ["cpulist", "cpumap", "distance"];

/// Records the machine of a tree.
pub fn capture(tree: &Tree, packing: Packing) -> Result<Capture, CaptureError> {
    let topology = CpuTopology::assemble(&read_topology(tree)?)?;
    let mut entries = Entries::new();
    cpus(tree, &mut entries)?;
    nodes(tree, &mut entries)?;
    let (devices, left_out) = devices(tree, &topology, &mut entries)?;

    let plain = tar(&entries)?;
    let bytes = match packing {
        Packing::Zstd => compress_to_vec(plain.as_slice(), CompressionLevel::Fastest),
        Packing::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(&plain)?;
            encoder.finish()?
        }
    };
    let back = Tree::archive(Path::new("archive"), archive::read(&bytes)?);
    if !same(tree, &topology, &back)? {
        return Err(CaptureError::Differs);
    }
    let files = entries.values().filter(|e| matches!(e, Entry::File(_))).count();
    Ok(Capture { bytes, files, devices, left_out })
}

/// Whether the record says of the machine what the tree says.
fn same(tree: &Tree, topology: &CpuTopology, back: &Tree) -> Result<bool, CaptureError> {
    let again = CpuTopology::assemble(&read_topology(back)?)?;
    let is_named = |name: &str| !is_mac(name);
    let placed = |tree, topology| -> Result<_, SysfsError> {
        let mut raw = super::devices(tree, topology)?;
        raw.retain(|d| is_named(&d.name));
        Ok(place(topology, &raw))
    };
    Ok(document(topology) == document(&again) && placed(tree, topology)? == placed(back, &again)?)
}

/// Copies these files of a folder, as far as they are there.
fn copy<'n>(
    folder: &Folder<'_>,
    path: &str,
    names: impl IntoIterator<Item = &'n str>,
    entries: &mut Entries,
) -> Result<(), SysfsError> {
    for name in names {
        if let Some(bytes) = folder.bytes(name)? {
            entries.insert(format!("{path}/{name}"), Entry::File(bytes));
        }
    }
    Ok(())
}

fn cpus(tree: &Tree, entries: &mut Entries) -> Result<(), SysfsError> {
    let path = format!("{}/cpu", super::SYSTEM);
    let Some(folder) = tree.folder(&path)? else { return Ok(()) };
    copy(&folder, &path, CPU_LISTS, entries)?;
    let sets = SETS.iter().flat_map(|(_, stems, id)| {
        let stems = stems.iter().flat_map(|stem| [(*stem).to_owned(), format!("{stem}_list")]);
        stems.chain(id.map(Into::into))
    });
    let topology: Vec<String> = sets.chain(["core_id".into(), "cluster_id".into()]).collect();
    for cpu in folder.numbered("cpu")? {
        let cpu_path = format!("{path}/cpu{cpu}");
        entries.insert(cpu_path.clone(), Entry::Folder);
        copy(&folder, &path, [format!("cpu{cpu}/online").as_str()], entries)?;
        if let Some(inner) = folder.folder(&format!("cpu{cpu}/topology"))? {
            // Listed first: most of the names are not there on any one kernel.
            let there = inner.names()?;
            let wanted = topology.iter().filter(|name| there.contains(name)).map(String::as_str);
            copy(&inner, &format!("{cpu_path}/topology"), wanted, entries)?;
        }
        if let Some(caches) = folder.folder(&format!("cpu{cpu}/cache"))? {
            for index in caches.numbered("index")? {
                let names = CACHE.map(|name| format!("index{index}/{name}"));
                copy(&caches, &format!("{cpu_path}/cache"), names.iter().map(String::as_str), entries)?;
            }
        }
    }
    Ok(())
}

fn nodes(tree: &Tree, entries: &mut Entries) -> Result<(), SysfsError> {
    let path = format!("{}/node", super::SYSTEM);
    let Some(folder) = tree.folder(&path)? else { return Ok(()) };
    entries.insert(path.clone(), Entry::Folder);
    copy(&folder, &path, ["online", "possible"], entries)?;
    for node in folder.numbered("node")? {
        let node_path = format!("{path}/node{node}");
        entries.insert(node_path.clone(), Entry::Folder);
        let Some(inner) = folder.folder(&format!("node{node}"))? else { continue };
        copy(&inner, &node_path, NODE, entries)?;
        // Of the memory its size alone: the rest is the moment's use of it.
        let total = inner.text("meminfo")?.unwrap_or_default();
        if let Some(line) = total.lines().find(|line| line.contains("MemTotal:")) {
            entries.insert(format!("{node_path}/meminfo"), Entry::File(format!("{line}\n").into()));
        }
        for cpu in inner.numbered("cpu")? {
            let to = format!("../../cpu/cpu{cpu}");
            entries.insert(format!("{node_path}/cpu{cpu}"), Entry::Link(to));
        }
    }
    Ok(())
}

/// Records devices; returns how many, and how many were left out.
fn devices(tree: &Tree, topology: &CpuTopology, entries: &mut Entries) -> Result<(usize, usize), SysfsError> {
    let (mut recorded, mut left_out) = (0, 0);
    for Found { kind, name, folder, path } in list(tree)? {
        if is_mac(&name) {
            left_out += 1;
            continue;
        }
        recorded += 1;
        let (class, depth) = match kind {
            DeviceKind::Pci => ("bus/pci/devices", "../../../"),
            DeviceKind::Net => ("class/net", "../../"),
            DeviceKind::Block => ("class/block", "../../"),
        };
        // The folder's name in the record: the PCI functions on the way to it, and its own.
        let mut at = record_of(&path);
        if kind != DeviceKind::Pci {
            at = format!("{at}/{kind}/{name}");
        } else if !at.ends_with(&name) {
            // A plain folder in `bus/pci/devices`, as some recorded trees have.
            at = format!("{at}/{name}");
        }
        entries.insert(format!("sys/{at}"), Entry::Folder);
        entries.insert(format!("sys/{class}/{name}"), Entry::Link(format!("{depth}{at}")));

        for path in folder.iter().flat_map(|f| above(f)) {
            let Some(source) = tree.folder(path)? else { continue };
            let last = path.rsplit('/').next().unwrap_or_default();
            let is_own = folder.as_deref() == Some(path);
            // What a folder without a place in the record says is written to the device's own.
            let to = if is_own || !is_pci_address(last) { at.clone() } else { record_of(path) };
            if kind == DeviceKind::Pci && is_own {
                copy(&source, &format!("sys/{to}"), ["class"], entries)?;
            }
            let (node, cpus) = stated(&source)?;
            if !matches!(near(topology, node, cpus.as_ref()), Ok(None)) {
                copy(&source, &format!("sys/{to}"), ["numa_node", "local_cpulist", "local_cpus"], entries)?;
                break;
            }
        }
    }
    Ok((recorded, left_out))
}

/// `devices/pci0000:17/0000:17:00.0`: of a folder's path the parts that name PCI functions and their root.
fn record_of(path: &str) -> String {
    let is_root = |part: &str| part.strip_prefix("pci").is_some_and(|d| is_pci_address(&format!("{d}:00.0")));
    let kept = path.split('/').filter(|part| is_pci_address(part) || is_root(part));
    std::iter::once("devices").chain(kept).collect::<Vec<_>>().join("/")
}

/// `enx` and twelve hexadecimal digits: how systemd names an interface without a better name.
fn is_mac(name: &str) -> bool {
    name.len() >= 12 && name.as_bytes().windows(12).any(|w| w.iter().all(u8::is_ascii_hexdigit))
}

/// Sorted, owned by nobody and of no time, so that the same tree gives the same bytes.
fn tar(entries: &Entries) -> io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, entry) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        let (kind, mode, bytes): (_, _, &[u8]) = match entry {
            Entry::Folder => (tar::EntryType::Directory, 0o755, &[]),
            Entry::File(bytes) => (tar::EntryType::Regular, 0o644, bytes),
            Entry::Link(_) => (tar::EntryType::Symlink, 0o777, &[]),
        };
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(bytes.len() as u64);
        match entry {
            Entry::Link(to) => builder.append_link(&mut header, path, to)?,
            _ => builder.append_data(&mut header, path, bytes)?,
        }
    }
    builder.into_inner()
}
