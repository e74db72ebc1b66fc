//! A machine from wherever it is described: this host, a recorded directory, an archive, hwloc's XML, cAdvisor's JSON.
//!
//! Steps: a directory is a tree of sysfs; a file is read whole and known by its first bytes, not by its name.

use crate::sysfs::{
    self, SysfsError, Tree,
    archive::{self, ArchiveError},
};
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};
use truepin::{
    CpuTopology,
    topology::{
        Device, RawDevice, RawTopology, TopologyError, devices, hwloc,
        machine_info::{self, MachineInfoError},
    },
};

/// Bytes of a file at most. A recorded machine of 2048 CPUs takes 2 MB.
const LONGEST: u64 = 128 << 20;

/// Why no machine could be made of what was given.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Of no kind that is known.
    #[error("{} is neither a tar archive nor hwloc XML nor cAdvisor's JSON", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// An archive.
    #[error("{}", path.display())]
    Archive {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ArchiveError,
    },
    /// hwloc's XML.
    #[error(transparent)]
    Hwloc(#[from] hwloc::HwlocError),
    /// cAdvisor's JSON.
    #[error(transparent)]
    MachineInfo(#[from] MachineInfoError),
    /// A tree of sysfs.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The description was read and makes no machine.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// A machine's description.
#[derive(Debug)]
pub enum Machine {
    /// Files of sysfs.
    Tree(Tree),
    /// What a single file says, with its devices.
    Stated(Box<RawTopology>, Vec<RawDevice>),
}

/// Opens a description: a directory that holds `sys`, or a file.
pub fn open(path: &Path) -> Result<Machine, MachineError> {
    let failed = |source| MachineError::Read { path: path.into(), source };
    if fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(Machine::Tree(Tree::directory(path)));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > LONGEST {
        return Err(failed(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("longer than {LONGEST} bytes"),
        )));
    }
    described(path, &bytes)
}

/// What a file's bytes describe; `path` is for messages.
pub fn described(path: &Path, bytes: &[u8]) -> Result<Machine, MachineError> {
    if archive::is_archive(bytes) {
        let read =
            archive::read(bytes).map_err(|source| MachineError::Archive { path: path.into(), source })?;
        return Ok(Machine::Tree(Tree::archive(path, read)));
    }
    let shown = path.display().to_string();
    let text = str::from_utf8(bytes).map_err(|_| MachineError::Kind { path: path.into() })?;
    match text.trim_start_matches('\u{feff}').trim_start().chars().next() {
        Some('<') => {
            let (raw, devices) = hwloc::parse(text, &shown)?;
            Ok(Machine::Stated(Box::new(raw), devices))
        }
        Some('{') => Ok(Machine::Stated(Box::new(machine_info::parse(text, &shown)?), Vec::new())),
        _ => Err(MachineError::Kind { path: path.into() }),
    }
}

/// Opens a description and assembles the machine.
pub fn topology(path: &Path) -> Result<CpuTopology, MachineError> {
    open(path)?.topology()
}

impl Machine {
    /// Assembles the machine.
    pub fn topology(&self) -> Result<CpuTopology, MachineError> {
        match self {
            Self::Tree(tree) => Ok(CpuTopology::assemble(&sysfs::read_topology(tree)?)?),
            Self::Stated(raw, _) => Ok(CpuTopology::assemble(raw)?),
        }
    }

    /// Its devices, and what is odd about them.
    pub fn devices(&self, topology: &CpuTopology) -> Result<(Vec<Device>, Vec<String>), MachineError> {
        match self {
            Self::Tree(tree) => Ok(devices::place(topology, &sysfs::devices(tree, topology)?)),
            Self::Stated(_, raw) => Ok(devices::place(topology, raw)),
        }
    }
}
