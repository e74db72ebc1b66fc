//! Payload version 1, frozen: these structs read and write what the first truepin wrote, whatever becomes of the live
//! ones. Only the text forms that the command line has too (CPU lists, owners, cgroup paths) are shared.
//!
//! Version 1 is canonical in the order of its fields; unknown ones are refused, since it had no minor versions.

use super::{Checkpoint, DecodeError, Extra, MINOR, VERSION};
use crate::{
    assignments, cgroup,
    cgroup::{CgroupId, CgroupPath},
    containers::ContainerMap,
    cpuset::CpuSet,
    owner::Owner,
    request,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    epoch: u64,
    boot_id: String,
    topology: String,
    assignments: Assignments,
    first: BTreeMap<CgroupPath, FirstValue>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Assignments {
    reserved: CpuSet,
    strict_reserved: bool,
    owners: BTreeMap<Owner, Assignment>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Assignment {
    cpus: CpuSet,
    cgroup: CgroupPath,
    created: bool,
    mode: Mode,
    isolation: Isolation,
    generation: u64,
    reason: String,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    Partition,
    Member,
    Audit,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Isolation {
    Auto,
    Partition,
    Member,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstValue {
    id: u64,
    files: BTreeMap<File, String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum File {
    #[serde(rename = "cpuset.cpus")]
    Cpus,
    #[serde(rename = "cpuset.cpus.exclusive")]
    Exclusive,
    #[serde(rename = "cpuset.cpus.partition")]
    Partition,
}

/// A payload of version 1, as the present version.
pub(super) fn decode(payload: &str) -> Result<Checkpoint, DecodeError> {
    let record: Record = serde_json::from_str(payload).map_err(DecodeError::Payload)?;
    if serde_json::to_string(&record).map_err(DecodeError::Payload)? != payload {
        return Err(DecodeError::NotCanonical);
    }
    Ok(migrate(record))
}

fn migrate(old: Record) -> Checkpoint {
    let owners = old.assignments.owners.into_iter().map(|(owner, a)| (owner, assignment(a))).collect();
    Checkpoint {
        version: VERSION,
        minor: MINOR,
        epoch: old.epoch,
        boot_id: old.boot_id,
        topology: old.topology,
        // The only one that there was.
        strategy: "best".into(),
        assignments: assignments::Assignments {
            promised: std::collections::BTreeMap::new(),
            reserved: old.assignments.reserved,
            strict_reserved: old.assignments.strict_reserved,
            owners,
            extra: Extra::new(),
        },
        containers: ContainerMap::new(),
        first: old.first.into_iter().map(|(path, f)| (path, first(f))).collect(),
        extra: Extra::new(),
    }
}

fn assignment(old: Assignment) -> assignments::Assignment {
    assignments::Assignment {
        cpus: old.cpus,
        original: None,
        cgroup: old.cgroup,
        created: old.created,
        mode: match old.mode {
            Mode::Partition => assignments::Mode::Partition,
            Mode::Member => assignments::Mode::Member,
            Mode::Audit => assignments::Mode::Audit,
        },
        isolation: match old.isolation {
            Isolation::Auto => request::Isolation::Auto,
            Isolation::Partition => request::Isolation::Partition,
            Isolation::Member => request::Isolation::Member,
        },
        generation: old.generation,
        reason: old.reason,
        memory: std::collections::BTreeMap::new(),
        extra: Extra::new(),
    }
}

fn first(old: FirstValue) -> assignments::FirstValue {
    let file = |f| match f {
        File::Cpus => cgroup::CpusetFile::Cpus,
        File::Exclusive => cgroup::CpusetFile::Exclusive,
        File::Partition => cgroup::CpusetFile::Partition,
    };
    let files = old.files.into_iter().map(|(f, text)| (file(f), text)).collect();
    assignments::FirstValue { id: CgroupId(old.id), files, ..assignments::FirstValue::default() }
}
