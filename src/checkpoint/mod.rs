//! The durable record.
//!
//! Problem: assignments must survive crashes, reboots and upgrades. A checksum over anything but the bytes that are
//! stored breaks with the next compiler or field; a record without a version cannot be migrated.
//! Steps: the payload is encoded once, canonically; the envelope carries a CRC32 of exactly those bytes. Reading
//! goes the other way: envelope, checksum over the bytes as found, version, payload, and the payload must encode
//! to the same bytes again.
//!
//! ```text
//! {"schema":"truepin.checkpoint/1","crc32":"1c291ca3","payload":{"version":1,…}}
//! ```
//!
//! Invariants: every file has a version; a file that does not decode is never overwritten, it is quarantined by the
//! caller with the reason given here; nothing derived is stored (the shared pool is not).

use crate::assignments::{Assignments, FirstValues};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The envelope's schema.
pub const SCHEMA: &str = "truepin.checkpoint/1";

/// The payload version that this build writes.
pub const VERSION: u32 = 1;

/// Everything that survives a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// [`VERSION`]
    pub version: u32,
    /// Grows by one with every record.
    pub epoch: u64,
    /// `/proc/sys/kernel/random/boot_id` when it was written: after a reboot every cgroup is gone.
    pub boot_id: String,
    /// The machine it was written on, as `CpuTopology` fingerprints it.
    pub topology: String,
    /// Owners, reserved CPUs.
    pub assignments: Assignments,
    /// What files of others held before truepin wrote them.
    pub first: FirstValues,
}

/// Why bytes are not a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not an envelope.
    #[error("not a checkpoint envelope")]
    Envelope(#[source] serde_json::Error),
    /// A newer major version.
    #[error(
        "schema is {found:?}, this build reads {SCHEMA:?}; use the truepin that wrote it, or move the file away"
    )]
    Newer {
        /// As found.
        found: String,
    },
    /// Another kind of document, or a damaged name of this one.
    #[error("schema is {found:?}, not {SCHEMA:?}")]
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
    /// The checksum is right and the content is not: written by something else.
    #[error("payload does not decode")]
    Payload(#[source] serde_json::Error),
    /// The bytes are not the ones that this content encodes to.
    #[error("payload is not in canonical form")]
    NotCanonical,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    schema: String,
    crc32: String,
    #[serde(borrow)]
    payload: &'a RawValue,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u64,
}

fn crc(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

fn is_newer(schema: &str) -> bool {
    let (ours, theirs) = (SCHEMA.rsplit_once('/'), schema.rsplit_once('/'));
    let number = |s: Option<(&str, &str)>| s.and_then(|(_, n)| n.parse::<u32>().ok());
    ours.map(|o| o.0) == theirs.map(|t| t.0) && number(theirs) > number(ours)
}

/// The bytes to store. The payload's maps are ordered by key, so equal records have equal bytes.
pub fn encode(checkpoint: &Checkpoint) -> Result<Vec<u8>, serde_json::Error> {
    let payload = serde_json::value::to_raw_value(checkpoint)?;
    let crc32 = crc(payload.get().as_bytes());
    let mut bytes = serde_json::to_vec(&Envelope { schema: SCHEMA.into(), crc32, payload: &payload })?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The record in `bytes`.
pub fn decode(bytes: &[u8]) -> Result<Checkpoint, DecodeError> {
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(DecodeError::Envelope)?;
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if envelope.crc32.len() != 8 || !envelope.crc32.bytes().all(hex) {
        return Err(DecodeError::ChecksumForm { found: envelope.crc32 });
    }
    let payload = envelope.payload.get();
    let computed = crc(payload.as_bytes());
    if envelope.schema != SCHEMA {
        // A flipped bit in the name must not pass for a version of the future and stop the start-up: around a payload
        // of ours it is damage.
        let ours = computed == envelope.crc32
            && serde_json::from_str::<VersionOnly>(payload).is_ok_and(|v| v.version <= u64::from(VERSION));
        let found = envelope.schema;
        return Err(if !ours && is_newer(&found) {
            DecodeError::Newer { found }
        } else {
            DecodeError::Schema { found }
        });
    }
    if computed != envelope.crc32 {
        return Err(DecodeError::Checksum { computed, stored: envelope.crc32 });
    }
    let VersionOnly { version } = serde_json::from_str(payload).map_err(DecodeError::Payload)?;
    if version > u64::from(VERSION) {
        return Err(DecodeError::Version { found: version });
    }
    let checkpoint: Checkpoint = serde_json::from_str(payload).map_err(DecodeError::Payload)?;
    let again = serde_json::to_string(&checkpoint).map_err(DecodeError::Payload)?;
    if again != payload {
        return Err(DecodeError::NotCanonical);
    }
    Ok(checkpoint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assignments::{Assignment, Mode};
    use crate::request::Isolation;

    fn record() -> Checkpoint {
        let mut assignments = Assignments { reserved: "0-1".parse().unwrap(), ..Default::default() };
        assignments.owners.insert(
            "run/db".parse().unwrap(),
            Assignment {
                cpus: "2-3".parse().unwrap(),
                cgroup: "truepin.slice/run-db".parse().unwrap(),
                created: true,
                mode: Mode::Partition,
                isolation: Isolation::Auto,
                generation: 7,
                reason: "2 CPUs on node 0".into(),
            },
        );
        Checkpoint {
            version: VERSION,
            epoch: 3,
            boot_id: "5f1c3f0e-0000-4000-8000-000000000000".into(),
            topology: "t".into(),
            assignments,
            first: FirstValues::default(),
        }
    }

    /// Frozen: a change of these bytes breaks every file in the field.
    const FROZEN: &str = concat!(
        r#"{"schema":"truepin.checkpoint/1","crc32":"4fa7db59","payload":{"version":1,"epoch":3,"#,
        r#""boot_id":"5f1c3f0e-0000-4000-8000-000000000000","topology":"t","assignments":{"reserved":"0-1","#,
        r#""strict_reserved":false,"owners":{"run/db":{"cpus":"2-3","cgroup":"truepin.slice/run-db","created":true,"#,
        r#""mode":"partition","isolation":"auto","generation":7,"reason":"2 CPUs on node 0"}}},"first":{}}}"#,
        "\n"
    );

    #[test]
    fn the_format_is_frozen() {
        let bytes = encode(&record()).unwrap();
        assert_eq!(String::from_utf8(bytes.clone()).unwrap(), FROZEN);
        assert_eq!(decode(&bytes).unwrap(), record());
    }

    #[test]
    fn every_bit_flip_and_every_truncation_is_found() {
        let bytes = encode(&record()).unwrap();
        for i in 0..bytes.len() - 1 {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[i] ^= 1 << bit;
                assert!(decode(&bad).is_err(), "byte {i} bit {bit}: {:?}", String::from_utf8_lossy(&bad));
            }
            assert!(decode(&bytes[..i]).is_err(), "cut at {i}");
        }
    }

    fn with_payload(payload: &str) -> Vec<u8> {
        format!(r#"{{"schema":"{SCHEMA}","crc32":"{}","payload":{payload}}}"#, crc(payload.as_bytes()))
            .into_bytes()
    }

    /// As a later major version may write it.
    fn newer() -> Vec<u8> {
        String::from_utf8(with_payload("{\"version\":2}"))
            .unwrap()
            .replace("checkpoint/1", "checkpoint/2")
            .into_bytes()
    }

    #[test]
    fn refusals_say_why() {
        let text = String::from_utf8(encode(&record()).unwrap()).unwrap();
        let start = text.find(r#"{"version""#).unwrap();
        let payload = &text[start..text.len() - 2];
        assert!(decode(&with_payload(payload)).is_ok());
        for (bytes, needle) in [
            (with_payload(&payload.replace("\"version\":1", "\"version\":2")), "payload version is 2"),
            (with_payload(&payload.replace("\"version\":1,", "")), "does not decode"),
            (with_payload(&payload.replace("\"epoch\"", "\"epoch\" ")), "canonical"),
            (with_payload(&payload.replace("\"2-3\"", "\"3,2\"")), "canonical"),
            (with_payload(&payload.replace("\"2-3\"", "\"x\"")), "does not decode"),
            (
                text.replace("checkpoint/1", "checkpoint/3").into_bytes(),
                "schema is \"truepin.checkpoint/3\", not",
            ),
            (with_payload("{\"version\":2}"), "payload version is 2"),
            (newer(), "use the truepin that wrote it"),
            (text.replace("truepin.checkpoint", "truepin.chockpoint").into_bytes(), ", not"),
            (text.replace(&crc(payload.as_bytes()), "00000000").into_bytes(), "the envelope says 00000000"),
            (text.replace(&crc(payload.as_bytes()), "0000000G").into_bytes(), "hexadecimal"),
            (b"".to_vec(), "not a checkpoint envelope"),
            (vec![0; 4096], "not a checkpoint envelope"),
        ] {
            let error = decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }
}
