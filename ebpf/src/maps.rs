//! What both halves see. Sizes that depend on the machine are set by the loader.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use truepin_abi::{
    Config, Counters, CpuConfig, IntruderKey, IntruderValue, Losses, MAX_INTRUDERS, MAX_OWNERS, RING_BYTES,
    Slot,
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

/// `Departure` records.
#[map]
pub static DEPARTURES: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);
