//! The durable record.
//!
//! Problem: assignments must survive crashes, reboots, upgrades and downgrades. A checksum over anything but the bytes
//! that are stored breaks with the next compiler or field; a record without a version cannot be migrated; a field that
//! an older build drops when it saves is lost for the newer one.
//! Steps: the payload is encoded once, canonically; the envelope carries a CRC32 of exactly those bytes. Reading
//! goes the other way: envelope, checksum over the bytes as found, version, payload, and the payload must encode
//! to the same bytes again. Older versions are read by structs of their own and migrate by a pure function.
//!
//! ```text
//! {"schema":"truepin.checkpoint/2","crc32":"1c291ca3","payload":{…,"minor":0,…,"version":2}}
//! ```
//!
//! The number in the schema is the payload's `version`, the major one: another number, another meaning. `minor` grows
//! when fields are added: a build that does not know them keeps them in [`Extra`] maps, at every level, and writes them
//! back as they came, with the minor number it found. So canonical means ordered by key, everywhere, and numbers are
//! integers. Where a newer minor version does not decode all the same, the file is left alone like one of a newer
//! major version.
//!
//! Invariants: every file has a version; a file that does not decode is never overwritten, it is quarantined by the
//! caller with the reason given here; nothing derived is stored (the shared pool is not).

mod diff;
pub mod generations;
#[cfg(test)]
mod tests;
mod v1;

pub use diff::{Change, diff};

use crate::{
    assignments::{Assignments, FirstValues},
    containers::ContainerMap,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The schema of the envelope that this build writes. Those with lower numbers are read.
pub const SCHEMA: &str = "truepin.checkpoint/2";
const KIND: &str = "truepin.checkpoint/";

/// The payload version that this build writes.
pub const VERSION: u32 = 2;

/// The minor version that this build writes, unless it keeps fields of a newer one.
pub const MINOR: u32 = 3;

/// Fields that this build does not know, by name.
pub type Extra = serde_json::Map<String, serde_json::Value>;

/// Everything that survives a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// [`VERSION`]
    pub version: u32,
    /// [`MINOR`], or that of a newer truepin whose fields are kept.
    pub minor: u32,
    /// Grows by one with every record.
    pub epoch: u64,
    /// `/proc/sys/kernel/random/boot_id` when it was written: after a reboot every cgroup is gone.
    pub boot_id: String,
    /// The machine it was written on, as `CpuTopology` fingerprints it.
    pub topology: String,
    /// By which the assignments were chosen.
    pub strategy: String,
    /// Owners, reserved CPUs.
    pub assignments: Assignments,
    /// Whose containers are.
    pub containers: ContainerMap,
    /// What files of others held before truepin wrote them.
    pub first: FirstValues,
    /// Fields of newer minor versions.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Why bytes are not a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not an envelope.
    #[error("not a checkpoint envelope")]
    Envelope(#[source] serde_json::Error),
    /// A newer major version.
    #[error(
        "schema is {found:?}, this build reads up to {SCHEMA:?}; use the truepin that wrote it, or move the file away"
    )]
    Newer {
        /// As found.
        found: String,
    },
    /// Another kind of document, a damaged name of this one, or not the one of its payload.
    #[error("schema is {found:?}, not {SCHEMA:?} or an older one, or not that of its payload")]
    Schema {
        /// As found.
        found: String,
    },
    /// The checksum has another form than eight lower-case hexadecimal digits.
    #[error("crc32 is {found:?}, not eight lower-case hexadecimal digits")]
    ChecksumForm {
        /// As found.
        found: String,
    },
    /// The payload is damaged.
    #[error("payload has CRC32 {computed}, the envelope says {stored}")]
    Checksum {
        /// Of the bytes as found.
        computed: String,
        /// In the envelope.
        stored: String,
    },
    /// The payload was written by a newer version.
    #[error(
        "payload version is {found}, this build reads up to {VERSION}; use the truepin that wrote it, or move the file away"
    )]
    Version {
        /// As found.
        found: u64,
    },
    /// The payload was written by a newer minor version, in a way that this build cannot keep.
    #[error(
        "payload version is {VERSION}.{found}, this build knows {VERSION}.{MINOR} and cannot keep what is new in it; use the truepin that wrote it, or move the file away"
    )]
    Minor {
        /// As found.
        found: u64,
        /// What this build cannot keep.
        #[source]
        source: Box<DecodeError>,
    },
    /// The checksum is right and the content is not: written by something else.
    #[error("payload does not decode")]
    Payload(#[source] serde_json::Error),
    /// The bytes are not the ones that this content encodes to.
    #[error("it is not in canonical form")]
    NotCanonical,
}

impl DecodeError {
    /// Whether a newer truepin wrote it: nobody's damage, to be left alone.
    #[must_use]
    pub fn is_newer(&self) -> bool {
        matches!(self, Self::Newer { .. } | Self::Version { .. } | Self::Minor { .. })
    }
}

/// A record and the form in which it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The payload's version in the file; the record is migrated.
    pub version: u32,
    /// The checksum in the file.
    pub crc32: String,
    /// The content.
    pub record: Checkpoint,
}

#[derive(Deserialize)]
struct SchemaOnly {
    schema: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    schema: String,
    crc32: String,
    #[serde(borrow)]
    payload: &'a RawValue,
}

#[derive(Deserialize)]
struct Head {
    version: u64,
    #[serde(default)]
    minor: u64,
}

fn crc(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

/// The number in a schema of ours, without leading zeros or signs.
fn major(schema: &str) -> Option<u32> {
    let number = schema.strip_prefix(KIND)?;
    let parsed: u32 = number.parse().ok()?;
    (parsed.to_string() == number).then_some(parsed)
}

fn envelope(schema: &str, crc32: &str, payload: &str) -> Vec<u8> {
    format!("{{\"schema\":\"{schema}\",\"crc32\":\"{crc32}\",\"payload\":{payload}}}\n").into_bytes()
}

/// A payload's only text: keys in order at every level, whatever order the maps of this build have.
fn canonical(record: &Checkpoint) -> Result<String, serde_json::Error> {
    let mut value = serde_json::to_value(record)?;
    value.sort_all_objects();
    serde_json::to_string(&value)
}

/// The bytes to store: equal records have equal bytes.
pub fn encode(record: &Checkpoint) -> Result<Vec<u8>, serde_json::Error> {
    let payload = canonical(record)?;
    Ok(envelope(SCHEMA, &crc(payload.as_bytes()), &payload))
}

/// The record in `bytes`, migrated from whatever version it has.
pub fn decode(bytes: &[u8]) -> Result<Checkpoint, DecodeError> {
    read(bytes).map(|stored| stored.record)
}

/// As [`decode`], with the form in which it was stored.
pub fn read(bytes: &[u8]) -> Result<Stored, DecodeError> {
    // The schema first and alone: what else a later envelope has is not ours to judge.
    let SchemaOnly { schema } = serde_json::from_slice(bytes).map_err(DecodeError::Envelope)?;
    let major = major(&schema);
    let parsed: Result<Envelope<'_>, _> = serde_json::from_slice(bytes);
    if major.is_none_or(|n| n == 0 || n > VERSION) {
        // A flipped bit in the name must not pass for a version of the future and stop the start-up: around a payload
        // of ours it is damage.
        let ours = parsed.is_ok_and(|e| {
            let payload = e.payload.get();
            let known = |h: Head| h.version <= u64::from(VERSION);
            crc(payload.as_bytes()) == e.crc32 && serde_json::from_str(payload).is_ok_and(known)
        });
        let newer = major.is_some_and(|n| n > VERSION) && !ours;
        return Err(if newer {
            DecodeError::Newer { found: schema }
        } else {
            DecodeError::Schema { found: schema }
        });
    }
    let Envelope { schema, crc32, payload } = parsed.map_err(DecodeError::Envelope)?;
    let payload = payload.get();
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if crc32.len() != 8 || !crc32.bytes().all(hex) {
        return Err(DecodeError::ChecksumForm { found: crc32 });
    }
    let computed = crc(payload.as_bytes());
    if computed != crc32 {
        return Err(DecodeError::Checksum { computed, stored: crc32 });
    }
    let Head { version, minor } = serde_json::from_str(payload).map_err(DecodeError::Payload)?;
    if version > u64::from(VERSION) {
        return Err(DecodeError::Version { found: version });
    }
    if major.map(u64::from) != Some(version) {
        return Err(DecodeError::Schema { found: schema });
    }
    if envelope(&schema, &crc32, payload) != bytes {
        return Err(DecodeError::NotCanonical);
    }
    let (version, record) = match version {
        1 => (1, v1::decode(payload)),
        _ => (VERSION, present(payload)),
    };
    match record {
        Ok(record) => Ok(Stored { version, crc32, record }),
        Err(source) if version == VERSION && minor > u64::from(MINOR) => {
            Err(DecodeError::Minor { found: minor, source: Box::new(source) })
        }
        Err(error) => Err(error),
    }
}

fn present(payload: &str) -> Result<Checkpoint, DecodeError> {
    let record: Checkpoint = serde_json::from_str(payload).map_err(DecodeError::Payload)?;
    if canonical(&record).map_err(DecodeError::Payload)? != payload {
        return Err(DecodeError::NotCanonical);
    }
    Ok(record)
}

/// What a reboot made void.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reboot {
    /// Containers that were known.
    pub containers: usize,
    /// Cgroups of others whose first values were known.
    pub first: usize,
}

/// The record as the agent of boot `boot_id` may use it. After a reboot every cgroup is gone: ids name nothing, or
/// worse, something else, and whoever made the cgroups anew gave them values of their own. Assignments stay.
#[must_use]
pub fn for_boot(mut record: Checkpoint, boot_id: &str) -> (Checkpoint, Option<Reboot>) {
    if record.boot_id == boot_id {
        return (record, None);
    }
    boot_id.clone_into(&mut record.boot_id);
    let mut reboot = Reboot { containers: 0, first: record.first.len() };
    record.first.clear();
    // Pods come again with their uids, and the agent may be up before them: that the cgroup tree does not have them yet
    // says nothing.
    for promise in record.assignments.promised.values_mut() {
        promise.made = false;
    }
    // A runtime never starts a container of the boot before again: it makes others, with other ids.
    reboot.containers = record.containers.len();
    record.containers.clear();
    (record, Some(reboot))
}
