//! What both halves see. Sizes that depend on the machine are set by the loader.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use truepin_abi::{
    Config, Counters, CpuConfig, IntruderKey, IntruderValue, Losses, MAX_INTRUDERS, MAX_OWNERS, MAX_WATCHED,
    MAX_WRITING, Moving, RING_BYTES, Slot, WRITE_RING_BYTES, Write,
};

/// Entry `LIVE` is the ledger, entry `COPY` what the last flush published.
#[map]
pub static SLOTS: PerCpuArray<Slot> = PerCpuArray::with_max_entries(2, 0);

/// By CPU number; the loader makes it as large as the machine. A CPU without an entry has no owner.
#[map]
pub static CPUS: Array<CpuConfig> = Array::with_max_entries(1, 0);

/// Cgroup id to index of the owner in `COUNTERS`.
#[map]
pub static OWNERS: HashMap<u64, u32> = HashMap::with_max_entries(MAX_OWNERS, 0);

/// One entry.
#[map]
pub static CONFIG: Array<Config> = Array::with_max_entries(1, 0);

/// By index of the owner.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(MAX_OWNERS, 0);

/// One entry.
#[map]
pub static LOSSES: PerCpuArray<Losses> = PerCpuArray::with_max_entries(1, 0);

/// Who was where it does not belong.
#[map]
pub static INTRUDERS: HashMap<IntruderKey, IntruderValue> = HashMap::with_max_entries(MAX_INTRUDERS, 0);

/// The move to another cgroup that is under way; one entry.
#[map]
pub static MOVING: Array<Moving> = Array::with_max_entries(1, 0);

/// `Departure` and `MovedOut` records.
#[map]
pub static DEPARTURES: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);

/// Process id of user space, whose own writes and moves are not told; one entry.
#[map]
pub static OWN_TGID: Array<u32> = Array::with_max_entries(1, 0);

/// Cgroup id to what of `truepin_abi::watch` is told. The loader makes it small where no hook is wanted.
#[map]
pub static WATCHED: HashMap<u64, u32> = HashMap::with_max_entries(MAX_WATCHED, 0);

/// Writes under way, by process and thread id (`bpf_get_current_pid_tgid`).
#[map]
pub static WRITING: HashMap<u64, Write> = HashMap::with_max_entries(MAX_WRITING, 0);

/// `Write` records.
#[map]
pub static WRITES: RingBuf = RingBuf::with_byte_size(WRITE_RING_BYTES, 0);

/// Writes of which no record was made, for want of room or because their end was missed: the first entry is of the
/// program at a write's start, the second of the one at its end. A program does not interrupt itself on a CPU, so each has words of its own.
#[map]
pub static WRITES_LOST: PerCpuArray<u64> = PerCpuArray::with_max_entries(2, 0);
