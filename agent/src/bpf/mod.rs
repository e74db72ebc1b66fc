//! The eBPF probe: loads the kernel half, tells it who owns what, and reads what it saw.
//!
//! Problem: evidence must be complete or say that it is not, cheap to take, and exact across changes of owners.
//! Steps of [`BpfProbe::load`]: offsets from the running kernel's BTF into the object's read-only words, maps,
//! verifier, links, and one run of the flush to see that both halves have the same layouts.
//! Steps of `configure`: `plan` decides; owners that end are forgotten, CPUs get their new entry with a new serial,
//! new owners are entered, then a flush on each changed CPU ends its epoch and starts the next.
//! Steps of `collect`: a flush on each watched CPU, then one read of each map.
//! Invariants: only the flush writes what is read of a slot, so a read is never torn; a CPU that was away starts a new
//! epoch when it is back (its serial changes), so no window spans the gap; counters are never reset in the kernel,
//! an owner's start value is subtracted here; after a `configure` that failed half-way there are no samples until the
//! next one, which writes everything anew.
//!
//! Not seen: a CPU that goes offline and comes back between two samples. Its idle task is what left and what returned,
//! so that time is idle time, which it was.

mod collect;
mod configure;
mod error;
mod events;
mod load;
mod maps;
mod moves;
mod plan;
mod writes;

pub use error::BpfError;
pub use load::{OBJECT, offsets};
pub use writes::{Hook, WriteHook, Written};

use aya::{Ebpf, programs::links::FdLink};
use maps::{Counts, Maps};
use moves::Moves;
use plan::Indexed;
use std::{
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    time::Duration,
};
use truepin::{
    cpuset::CpuId,
    ledger::{CpuLedger, Departure, LedgerSample, Probe, ProbeError, ProbeHealth, ProgramHealth, Watched},
};
use truepin_abi::{CpuConfig, IntruderKey, VERSION};

/// The attached programs that are needed; each has the name of its tracepoint.
const PROGRAMS: [&str; 3] = [SWITCH, "sched_migrate_task", "sched_wakeup_new"];
const SWITCH: &str = "sched_switch";

/// The kernel half at work. Dropping it detaches everything.
pub struct BpfProbe {
    bpf: Ebpf,
    maps: Maps,
    links: [Option<FdLink>; PROGRAMS.len()],
    moves: Option<Moves>,
    no_moves: Vec<String>,
    possible: Vec<CpuId>,
    owners: Vec<Indexed>,
    /// When the owner's counting began; same order as `owners`.
    bases: Vec<Counts>,
    cpus: BTreeMap<CpuId, CpuState>,
    /// The last serial given out.
    serial: u64,
    /// The last index given out.
    index: u32,
    /// A `configure` failed half-way.
    dirty: bool,
    ended: Vec<CpuLedger>,
    stale: Vec<IntruderKey>,
    text: String,
}

#[derive(Debug, Clone, Copy)]
struct CpuState {
    config: CpuConfig,
    /// Whether the epoch of this serial has begun; not yet when the CPU is offline.
    started: bool,
}

/// What a program cost so far, by the kernel's statistics (off unless `kernel.bpf_stats_enabled`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunCost {
    /// The program.
    pub name: &'static str,
    /// How often it ran.
    pub runs: u64,
    /// Time in it, the statistics' own clock reads included.
    pub time: Duration,
}

impl std::fmt::Debug for BpfProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let links: Vec<bool> = self.links.iter().map(Option::is_some).collect();
        f.debug_struct("BpfProbe")
            .field("attached", &links)
            .field("owners", &self.owners)
            .finish_non_exhaustive()
    }
}

impl BpfProbe {
    /// Loads and attaches the kernel half. Needs a kernel with BTF, `CAP_BPF` and `CAP_PERFMON`. Nothing is watched
    /// until [`Probe::configure`].
    pub fn load() -> Result<Self, BpfError> {
        Ok(Self::load_with(&[])?.0)
    }

    /// The same with the first of `hooks` that this kernel takes, and why it did not take those before.
    pub fn load_with(hooks: &[Hook]) -> Result<(Self, Option<WriteHook>, Vec<String>), BpfError> {
        let possible = load::possible_cpus()?;
        let (mut bpf, maps, no_writes) = load::object(&possible, !hooks.is_empty())?;
        let (mut refused, mut no_moves) = (Vec::new(), Vec::new());
        let (hook, moves) = {
            let types = load::kernel_types()?;
            for program in PROGRAMS {
                load::load(&mut bpf, &types, program, program)?;
            }
            load::introduce(&mut bpf)?;
            let moves = Moves::first(&mut bpf, &types, &mut no_moves);
            let hook = match no_writes {
                Some(error) if !hooks.is_empty() => {
                    refused.push(error.to_string());
                    None
                }
                _ => WriteHook::first(&mut bpf, &types, hooks, &mut refused),
            };
            (hook, moves)
        };
        load::load_flush(&mut bpf)?;
        let mut probe = Self {
            bpf,
            maps,
            links: [const { None }; PROGRAMS.len()],
            moves,
            no_moves,
            possible,
            owners: Vec::new(),
            bases: Vec::new(),
            cpus: BTreeMap::new(),
            serial: 0,
            index: truepin_abi::MAX_OWNERS - 1,
            dirty: false,
            ended: Vec::new(),
            stale: Vec::new(),
            text: String::new(),
        };
        probe.check_layout()?;
        for (link, name) in probe.links.iter_mut().zip(PROGRAMS) {
            *link = Some(load::attach(&mut probe.bpf, name)?);
        }
        load::release_memory();
        Ok((probe, hook, refused))
    }

    /// Epochs that the last [`Probe::configure`] ended, as they were then, ascending by CPU.
    #[must_use]
    pub fn ended(&self) -> &[CpuLedger] {
        &self.ended
    }

    /// Appends the departures that were recorded since the last call; returns how many. The probe's file descriptor
    /// (`AsFd`) is readable when there are some.
    pub fn drain(&mut self, into: &mut Vec<Departure>) -> Result<usize, BpfError> {
        events::drain(&mut self.maps.ring, into)
    }

    /// Why tasks that are moved out of an owner's cgroup are not seen; empty when they are.
    #[must_use]
    pub fn no_moves(&self) -> &[String] {
        if self.moves.is_some() { &[] } else { &self.no_moves }
    }

    /// What the kernel says about the attached programs, and what was lost since they were loaded.
    pub fn health(&mut self) -> Result<ProbeHealth, BpfError> {
        let mut health = ProbeHealth::default();
        self.health_into(&mut health)?;
        Ok(health)
    }

    /// Run counts and times of the attached programs.
    pub fn cost(&mut self) -> Result<[RunCost; PROGRAMS.len()], BpfError> {
        let mut costs = PROGRAMS.map(|name| RunCost { name, runs: 0, time: Duration::ZERO });
        for cost in &mut costs {
            let info = load::tracing(&mut self.bpf, cost.name)?
                .info()
                .map_err(BpfError::program(cost.name, "read statistics of"))?;
            (cost.runs, cost.time) = (info.run_count(), info.run_time());
        }
        Ok(costs)
    }

    /// Detaches the switch program: what a crashed or hostile tool would do. For fault injection.
    pub fn detach_switch(&mut self) {
        self.links[0] = None;
    }

    /// Attaches the switch program again, as a new link.
    pub fn attach_switch(&mut self) -> Result<(), BpfError> {
        self.links[0] = Some(load::attach(&mut self.bpf, SWITCH)?);
        Ok(())
    }

    /// Runs the flush on the first CPU that is online and looks at what it wrote.
    fn check_layout(&mut self) -> Result<(), BpfError> {
        for (at, cpu) in self.possible.iter().copied().enumerate() {
            self.serial += 1;
            self.maps.set_cpu(cpu.0, CpuConfig { serial: self.serial, ..CpuConfig::default() })?;
            // The first run starts the epoch, the second publishes it.
            if !load::flush(&self.bpf, cpu)? || !load::flush(&self.bpf, cpu)? {
                continue;
            }
            let slot = self.maps.published()?.get(at).copied().unwrap_or_default();
            if slot.version != VERSION {
                return Err(BpfError::Version { found: slot.version, expected: VERSION });
            }
            return collect::expect_serial(cpu, &slot, self.serial);
        }
        Ok(())
    }

    fn health_into(&mut self, health: &mut ProbeHealth) -> Result<(), BpfError> {
        let of_moves: &[&str] = if self.moves.is_some() { &moves::PROGRAMS } else { &[] };
        let names = PROGRAMS.iter().chain(of_moves);
        if health.programs.len() != names.clone().count() {
            let blank = |name: &&str| ProgramHealth { name: (*name).into(), link: None, misses: 0 };
            health.programs = names.map(blank).collect();
        }
        for ((program, name), link) in health.programs.iter_mut().zip(PROGRAMS).zip(&self.links) {
            let id = |link: &FdLink| link.info().map(|info| info.id());
            program.link = link
                .as_ref()
                .map(id)
                .transpose()
                .map_err(|e| BpfError::Link { program: name, source: Box::new(e) })?;
            program.misses = load::misses(&self.bpf, name, &mut self.text)?;
        }
        if let Some(moves) = &self.moves {
            moves.health_into(&mut health.programs[PROGRAMS.len()..], &mut self.text)?;
        }
        let lost = self.maps.losses()?;
        (health.ring_drops, health.intruders_lost) = (lost.ring_drops, lost.intruders_lost);
        (health.sees_moves, health.moves_unseen) = (self.moves.is_some(), lost.moves_unseen);
        Ok(())
    }
}

impl Probe for BpfProbe {
    fn configure(&mut self, watched: &[Watched]) -> Result<(), ProbeError> {
        Ok(self.apply(watched)?)
    }

    fn collect(&mut self, sample: &mut LedgerSample) -> Result<(), ProbeError> {
        Ok(self.read(sample)?)
    }
}

/// The departure ring's.
impl AsFd for BpfProbe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.maps.ring.as_fd()
    }
}

impl AsRawFd for BpfProbe {
    fn as_raw_fd(&self) -> RawFd {
        self.maps.ring.as_raw_fd()
    }
}

/// The agent's loop may live on any thread.
const _: fn() = || {
    fn sendable<T: Send>() {}
    sendable::<BpfProbe>();
};
