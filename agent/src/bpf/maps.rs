//! The maps that both halves share, typed. `ebpf/src/maps.rs` declares them.

use super::error::BpfError;
use aya::{
    Ebpf, Pod,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues, RingBuf},
};
use truepin_abi::{COPY, Config, Counters, CpuConfig, IntruderKey, IntruderValue, Losses, Slot};

/// Written by user space: `cpus`, `owners`, `config`; the rest by the kernel half.
pub(super) struct Maps {
    slots: PerCpuArray<MapData, Slot>,
    cpus: Array<MapData, CpuConfig>,
    owners: HashMap<MapData, u64, u32>,
    config: Array<MapData, Config>,
    counters: PerCpuArray<MapData, Counters>,
    losses: PerCpuArray<MapData, Losses>,
    intruders: HashMap<MapData, IntruderKey, IntruderValue>,
    /// Departure records.
    pub(super) ring: RingBuf<MapData>,
}

/// Counters of one owner, over all CPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) migrations: u64,
    pub(super) departures: u64,
    pub(super) moved_out: u64,
}

/// Takes a map out of the object; aya checks the sizes of key and value.
pub(super) fn take<M: TryFrom<Map, Error = MapError>>(
    bpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, BpfError> {
    let map = bpf.take_map(name).ok_or(BpfError::Missing { what: "map", name })?;
    M::try_from(map).map_err(BpfError::map(name, "open"))
}

/// One value for each possible CPU.
pub(super) fn of_cpus<T: Pod>(
    map: &PerCpuArray<MapData, T>,
    name: &'static str,
    index: u32,
) -> Result<PerCpuValues<T>, BpfError> {
    map.get(&index, 0).map_err(BpfError::map(name, "read"))
}

impl Maps {
    pub(super) fn take(bpf: &mut Ebpf) -> Result<Self, BpfError> {
        Ok(Self {
            slots: take(bpf, "SLOTS")?,
            cpus: take(bpf, "CPUS")?,
            owners: take(bpf, "OWNERS")?,
            config: take(bpf, "CONFIG")?,
            counters: take(bpf, "COUNTERS")?,
            losses: take(bpf, "LOSSES")?,
            intruders: take(bpf, "INTRUDERS")?,
            ring: take(bpf, "DEPARTURES")?,
        })
    }

    /// What the last flush of each CPU published.
    pub(super) fn published(&self) -> Result<PerCpuValues<Slot>, BpfError> {
        of_cpus(&self.slots, "SLOTS", COPY)
    }

    /// How many CPU numbers there are.
    pub(super) fn cpu_count(&self) -> u32 {
        self.cpus.len()
    }

    pub(super) fn set_cpu(&mut self, cpu: u32, value: CpuConfig) -> Result<(), BpfError> {
        self.cpus.set(cpu, value, 0).map_err(BpfError::map("CPUS", "write"))
    }

    pub(super) fn set_config(&mut self, config: Config) -> Result<(), BpfError> {
        self.config.set(0, config, 0).map_err(BpfError::map("CONFIG", "write"))
    }

    pub(super) fn set_owner(&mut self, cgroup: u64, index: u32) -> Result<(), BpfError> {
        self.owners.insert(cgroup, index, 0).map_err(BpfError::map("OWNERS", "write"))
    }

    /// Forgets an owner; one that is not there is forgotten already.
    pub(super) fn remove_owner(&mut self, cgroup: u64) -> Result<(), BpfError> {
        gone_is_fine(self.owners.remove(&cgroup)).map_err(BpfError::map("OWNERS", "remove from"))
    }

    /// The owners that the kernel half knows, in no order.
    pub(super) fn owner_ids(&self) -> Result<Vec<u64>, BpfError> {
        self.owners.keys().collect::<Result<_, _>>().map_err(BpfError::map("OWNERS", "read"))
    }

    /// Forgets every owner, known here or not.
    pub(super) fn clear_owners(&mut self) -> Result<(), BpfError> {
        self.owner_ids()?.into_iter().try_for_each(|id| self.remove_owner(id))
    }

    /// What an owner's tasks did since the object was loaded.
    pub(super) fn counters(&self, index: u32) -> Result<Counts, BpfError> {
        let mut sum = Counts::default();
        for c in of_cpus(&self.counters, "COUNTERS", index)?.iter() {
            sum.migrations += c.migrations;
            sum.departures += c.departures;
            sum.moved_out += c.moved_out;
        }
        Ok(sum)
    }

    /// What was lost since the object was loaded.
    pub(super) fn losses(&self) -> Result<Losses, BpfError> {
        let mut sum = Losses::default();
        for l in of_cpus(&self.losses, "LOSSES", 0)?.iter() {
            sum.ring_drops += l.ring_drops;
            sum.intruders_lost += l.intruders_lost;
            sum.moves_unseen += l.moves_unseen;
        }
        Ok(sum)
    }

    /// Every entry of the table of intruders, in no order.
    pub(super) fn intruders(
        &self,
    ) -> impl Iterator<Item = Result<(IntruderKey, IntruderValue), BpfError>> + '_ {
        self.intruders.iter().map(|entry| entry.map_err(BpfError::map("INTRUDERS", "read")))
    }

    pub(super) fn remove_intruder(&mut self, key: &IntruderKey) -> Result<(), BpfError> {
        gone_is_fine(self.intruders.remove(key)).map_err(BpfError::map("INTRUDERS", "remove from"))
    }
}

/// aya reports a key that is not there as the system call's `ENOENT`.
pub(super) fn gone_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
