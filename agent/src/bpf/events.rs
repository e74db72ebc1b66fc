//! Records of departures and of moves out of owners' cgroups: from the ring's bytes to the core's words.

use super::error::BpfError;
use aya::maps::{MapData, RingBuf};
use truepin::{
    cgroup::CgroupId,
    cpuset::CpuId,
    ledger::{Departure, DepartureKind, MovedOut},
};
use truepin_abi::{Departure as Record, MovedOut as Move, arrival};

/// Takes every record that is there into `into`; returns how many.
pub(super) fn drain(ring: &mut RingBuf<MapData>, into: &mut Vec<Departure>) -> Result<usize, BpfError> {
    let before = into.len();
    while let Some(item) = ring.next() {
        into.push(if item.len() == size_of::<Move>() { moved_out(&item)? } else { departure(&item)? });
    }
    Ok(into.len() - before)
}

/// One record.
fn departure(bytes: &[u8]) -> Result<Departure, BpfError> {
    let r: Record = record(bytes)?;
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

/// One of a move; paths are found by whoever knows them.
fn moved_out(bytes: &[u8]) -> Result<Departure, BpfError> {
    let r: Move = record(bytes)?;
    let moved = MovedOut {
        into: CgroupId(r.into),
        path: None,
        whole: r.whole != 0,
        by: r.by,
        by_comm: comm(&r.by_comm).into_owned(),
        by_cgroup: CgroupId(r.by_cgroup),
        by_path: None,
    };
    Ok(Departure {
        owner: CgroupId(r.cgroup),
        pid: r.pid,
        tgid: r.tgid,
        comm: comm(&r.comm).into_owned(),
        kind: DepartureKind::MovedOut(Box::new(moved)),
        from: CpuId(r.from),
        to: CpuId(r.to),
        at_ns: r.at_ns,
        by: r.by,
    })
}

fn record<T: aya::Pod>(bytes: &[u8]) -> Result<T, BpfError> {
    let expected = size_of::<T>();
    if bytes.len() != expected {
        return Err(BpfError::Record { ring: "departure", len: bytes.len(), expected });
    }
    #[allow(unsafe_code, reason = "the length is checked, and of a Pod every bit pattern is valid")]
    // SAFETY: as the reason says; unaligned, since the ring aligns to 8 but a slice promises 1.
    Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
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
