//! Departure records: from the ring's bytes to the core's words.

use super::error::BpfError;
use aya::maps::{MapData, RingBuf};
use truepin::{
    cgroup::CgroupId,
    cpuset::CpuId,
    ledger::{Departure, DepartureKind},
};
use truepin_abi::{Departure as Record, arrival};

/// Takes every record that is there into `into`; returns how many.
pub(super) fn drain(ring: &mut RingBuf<MapData>, into: &mut Vec<Departure>) -> Result<usize, BpfError> {
    let before = into.len();
    while let Some(item) = ring.next() {
        into.push(departure(&item)?);
    }
    Ok(into.len() - before)
}

/// One record.
fn departure(bytes: &[u8]) -> Result<Departure, BpfError> {
    let expected = size_of::<Record>();
    if bytes.len() != expected {
        return Err(BpfError::Record { ring: "departure", len: bytes.len(), expected });
    }
    #[allow(unsafe_code, reason = "the length is checked, and every bit pattern is a valid record")]
    // SAFETY: as the reason says; unaligned, since the ring aligns to 8 but a slice promises 1.
    let r: Record = unsafe { bytes.as_ptr().cast::<Record>().read_unaligned() };
    Ok(Departure {
        owner: CgroupId(r.cgroup),
        pid: r.pid,
        tgid: r.tgid,
        comm: comm(&r.comm).into_owned(),
        kind: if r.kind == arrival::FORKED { DepartureKind::Forked } else { DepartureKind::Migrated },
        from: CpuId(r.from),
        to: CpuId(r.to),
        at_ns: r.at_ns,
        by: r.by,
    })
}

/// A NUL-padded name; a thread may give itself any bytes.
pub(super) fn comm(bytes: &[u8; 16]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_56_bytes() {
        let mut bytes = Vec::new();
        bytes.extend(77u64.to_ne_bytes()); // cgroup
        bytes.extend(123_456u64.to_ne_bytes()); // at
        for word in [10u32, 9, 1, 3, 42, arrival::FORKED] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(*b"worker\xff\0stale!!!");
        assert_eq!(
            departure(&bytes).unwrap(),
            Departure {
                owner: CgroupId(77),
                pid: 10,
                tgid: 9,
                comm: "worker\u{fffd}".into(),
                kind: DepartureKind::Forked,
                from: CpuId(1),
                to: CpuId(3),
                at_ns: 123_456,
                by: 42,
            }
        );
        assert!(matches!(departure(&bytes[1..]), Err(BpfError::Record { len: 55, expected: 56, .. })));
        assert_eq!(comm(b"exactly-16-bytes"), "exactly-16-bytes");
    }
}
