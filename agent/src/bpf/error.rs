//! What can go wrong between the agent and its kernel half.

use crate::btf::BtfError;
use aya::{
    EbpfError,
    maps::MapError,
    programs::{ProgramError, links::LinkError},
};
use std::{error::Error, io, path::PathBuf};
use truepin::{
    cgroup::CgroupId,
    cpuset::{CpuId, CpuSet},
    idset::ListError,
    ledger::ProbeError,
};

/// Why the kernel half is not at work, or gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The kernel was built without BTF, or /sys is not mounted.
    #[error("read the kernel's type information {}", path.display())]
    NoBtf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The type information is malformed or lacks a member that the kernel half reads.
    #[error("find the kernel's structs in {}", path.display())]
    Btf {
        /// The file.
        path: PathBuf,
        /// Which member.
        source: BtfError,
    },
    /// A file of /sys or /proc.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file whose content is not as documented.
    #[error("{} holds {found:?}, expected {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What it should.
        expected: &'static str,
    },
    /// The list of possible CPUs.
    #[error("parse {}", path.display())]
    Cpus {
        /// The file.
        path: PathBuf,
        /// Which token.
        source: ListError,
    },
    /// The kernel refused the object; `EPERM` means that `CAP_BPF` or `CAP_PERFMON` is missing.
    #[error("create the BPF maps (needs CAP_BPF and CAP_PERFMON)")]
    Object(#[source] Box<EbpfError>),
    /// Part of the embedded object is missing.
    #[error("the embedded BPF object has no {what} {name}")]
    Missing {
        /// Program or map.
        what: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// The kernel refused a program, or to attach or run it.
    #[error("{action} BPF program {program}")]
    Program {
        /// load, attach, …
        action: &'static str,
        /// Its name.
        program: &'static str,
        /// Why.
        source: Box<ProgramError>,
    },
    /// The kernel does not say what a link is.
    #[error("read the BPF link of {program}")]
    Link {
        /// The program.
        program: &'static str,
        /// Why.
        source: Box<LinkError>,
    },
    /// A map could not be read or written.
    #[error("{action} BPF map {map}")]
    Map {
        /// read, write, …
        action: &'static str,
        /// Its name.
        map: &'static str,
        /// Why.
        source: Box<MapError>,
    },
    /// The flush could not be run on a CPU that is online.
    #[error("flush CPU {cpu}")]
    Flush {
        /// The CPU.
        cpu: CpuId,
        /// Why.
        source: Box<ProgramError>,
    },
    /// Kernel half and user space were built from different layouts.
    #[error("the BPF object has layout {found}, this program {expected}")]
    Version {
        /// Of the object.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// The flush ran, but the slot is not of the epoch that was asked for.
    #[error("CPU {cpu} is in epoch {found}, expected {expected}")]
    Epoch {
        /// The CPU.
        cpu: CpuId,
        /// As published.
        found: u64,
        /// As configured.
        expected: u64,
    },
    /// A sample now would mix two configurations.
    #[error("the last change of owners failed half-way, and none has been made since")]
    HalfConfigured,
    /// More owners than the maps hold.
    #[error("{count} owners, at most {max} can be watched")]
    TooManyOwners {
        /// Asked for.
        count: usize,
        /// Possible.
        max: u32,
    },
    /// A cgroup id or depth that cannot be an owner's.
    #[error("cgroup {cgroup} at depth {level} cannot be watched: {reason}")]
    Owner {
        /// The cgroup.
        cgroup: CgroupId,
        /// Its depth.
        level: u32,
        /// Why.
        reason: &'static str,
    },
    /// CPUs that two owners were given.
    #[error("CPUs {cpus} of cgroup {cgroup} have another owner too")]
    Shared {
        /// The second owner.
        cgroup: CgroupId,
        /// What both have.
        cpus: CpuSet,
    },
    /// The clock that all evidence is in.
    #[error("read CLOCK_MONOTONIC")]
    Clock(#[source] io::Error),
    /// A record of a ring that is not of its kind.
    #[error("a record of {len} bytes in the {ring} ring, expected {expected}")]
    Record {
        /// Which ring.
        ring: &'static str,
        /// Its length.
        len: usize,
        /// What it should be.
        expected: usize,
    },
}

impl BpfError {
    pub(super) fn map(map: &'static str, action: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { action, map, source: Box::new(source) }
    }

    pub(super) fn program(program: &'static str, action: &'static str) -> impl FnOnce(ProgramError) -> Self {
        move |source| Self::Program { action, program, source: Box::new(source) }
    }
}

/// The core's form: the operation, and the chain of causes in words.
impl From<BpfError> for ProbeError {
    fn from(e: BpfError) -> Self {
        let causes: Vec<String> =
            std::iter::successors(e.source(), |cause| (*cause).source()).map(ToString::to_string).collect();
        let (operation, cause) = (e.to_string(), causes.join(": "));
        if cause.is_empty() {
            return Self { operation: "BPF".into(), cause: operation };
        }
        Self { operation, cause }
    }
}
