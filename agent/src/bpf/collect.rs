//! One sample: every watched CPU flushed, then every map read once.

use super::{BpfError, BpfProbe, events::comm, load};
use nix::time::ClockId;
use std::{fs, time::Duration};
use truepin::{
    cgroup::CgroupId,
    cpuset::{CpuId, CpuSet},
    ledger::{ClassTimes, CpuLedger, Intruder, IntruderKind, LedgerSample, OwnerCounters},
};
use truepin_abi::{IntruderKey, IntruderValue, MAX_INTRUDERS, Slot, class};

/// An entry of a task that is gone is removed only this long after its last slice: its last switch may still be under
/// way when it is no longer in /proc.
const SETTLED_NS: u64 = 1_000_000_000;
/// `task_struct.start_boottime` in /proc: `USER_HZ` is 100 on every architecture that runs BPF programs.
const NS_PER_TICK: u64 = 10_000_000;

impl BpfProbe {
    pub(super) fn read(&mut self, sample: &mut LedgerSample) -> Result<(), BpfError> {
        if self.dirty {
            return Err(BpfError::HalfConfigured);
        }
        sample.begun_ns = monotonic_ns()?;
        sample.missing = CpuSet::new();
        let mut done = Vec::new();
        for (cpu, state) in &mut self.cpus {
            let flush = || load::flush(&self.bpf, *cpu);
            // The first flush after an absence ends the old epoch and begins the new one.
            let online = flush()? && (state.started || flush()?);
            if online {
                state.started = true;
                if state.config.cgroup == 0 {
                    done.push(*cpu);
                }
                continue;
            }
            if state.config.cgroup != 0 {
                sample.missing.insert(*cpu);
            }
            if std::mem::take(&mut state.started) {
                self.serial += 1;
                state.config.serial = self.serial;
                self.maps.set_cpu(cpu.0, state.config)?;
            }
        }
        for cpu in done {
            self.cpus.remove(&cpu);
        }
        sample.ended_ns = monotonic_ns()?;
        self.read_cpus(sample)?;
        self.read_owners(sample)?;
        self.read_intruders(sample)?;
        self.health_into(&mut sample.health)
    }

    fn read_cpus(&self, sample: &mut LedgerSample) -> Result<(), BpfError> {
        let slots = self.maps.published()?;
        sample.cpus.clear();
        for (cpu, state) in self.cpus.iter().filter(|(_, s)| s.started) {
            let slot = slot_of(&self.possible, &slots, *cpu).copied().unwrap_or_default();
            expect_serial(*cpu, &slot, state.config.serial)?;
            sample.cpus.push(ledger(*cpu, &slot));
        }
        Ok(())
    }

    fn read_owners(&self, sample: &mut LedgerSample) -> Result<(), BpfError> {
        sample.owners.clear();
        for (owner, base) in self.owners.iter().zip(&self.bases) {
            let now = self.maps.counters(owner.index)?;
            sample.owners.push(OwnerCounters {
                owner: owner.watched.cgroup,
                generation: owner.watched.generation,
                migrations: now.migrations.saturating_sub(base.migrations),
                departures: now.departures.saturating_sub(base.departures),
                moved_out: now.moved_out.saturating_sub(base.moved_out),
            });
        }
        Ok(())
    }

    /// Entries of the running epochs go into the sample, those of others out of the table. Past half full, so do the
    /// entries of tasks that are gone, after this sample has shown them.
    fn read_intruders(&mut self, sample: &mut LedgerSample) -> Result<(), BpfError> {
        self.stale.clear();
        let (mut count, mut settled) = (0, Vec::new());
        for entry in self.maps.intruders() {
            let (key, value) = entry?;
            if self.cpus.get(&CpuId(key.cpu)).is_none_or(|s| s.config.serial != key.serial) {
                self.stale.push(key);
                continue;
            }
            if count == sample.intruders.len() {
                sample.intruders.push(blank());
            }
            fill(&mut sample.intruders[count], &key, &value);
            count += 1;
            if value.last_ns + SETTLED_NS < sample.begun_ns {
                settled.push((key, value.tgid));
            }
        }
        sample.intruders.truncate(count);
        if count > MAX_INTRUDERS as usize / 2 {
            let gone = settled.into_iter().filter(|(key, tgid)| !is_alive(*tgid, key.pid, key.start_ns));
            self.stale.extend(gone.map(|(key, _)| key));
        }
        for key in &self.stale {
            self.maps.remove_intruder(key)?;
        }
        Ok(())
    }
}

/// The slot of a CPU among the values of all possible CPUs.
pub(super) fn slot_of<'a>(possible: &[CpuId], slots: &'a [Slot], cpu: CpuId) -> Option<&'a Slot> {
    possible.binary_search(&cpu).ok().and_then(|at| slots.get(at))
}

/// Refuses a slot of another epoch than the one that was asked for.
pub(super) fn expect_serial(cpu: CpuId, slot: &Slot, expected: u64) -> Result<(), BpfError> {
    if slot.serial == expected { Ok(()) } else { Err(BpfError::Epoch { cpu, found: slot.serial, expected }) }
}

/// A slot in the core's words.
pub(super) fn ledger(cpu: CpuId, slot: &Slot) -> CpuLedger {
    let ns = |class: u32| slot.ns[class as usize];
    CpuLedger {
        cpu,
        owner: CgroupId(slot.cgroup),
        generation: slot.generation,
        from_ns: slot.from_ns,
        to_ns: slot.last_ns,
        times: ClassTimes {
            owner_ns: ns(class::OWNER),
            foreign_ns: ns(class::FOREIGN),
            kthread_bound_ns: ns(class::KTHREAD_BOUND),
            kthread_unbound_ns: ns(class::KTHREAD_UNBOUND),
            idle_ns: ns(class::IDLE),
            straddle_ns: ns(class::STRADDLE),
            unknown_ns: ns(class::UNKNOWN),
        },
        switches: slot.switches,
        breaks: slot.breaks,
    }
}

/// Writes an entry over an old one, re-using the memory of its name.
fn fill(into: &mut Intruder, key: &IntruderKey, value: &IntruderValue) {
    into.cpu = CpuId(key.cpu);
    into.pid = key.pid;
    into.tgid = value.tgid;
    into.start_ns = key.start_ns;
    into.kind = if value.class == class::KTHREAD_UNBOUND {
        IntruderKind::UnboundKthread
    } else {
        IntruderKind::Foreign
    };
    into.comm.clear();
    into.comm.push_str(&comm(&value.comm));
    into.cgroup = CgroupId(value.cgroup);
    into.ns = value.ns;
    into.first_ns = value.first_ns;
    into.last_ns = value.last_ns;
}

fn blank() -> Intruder {
    Intruder {
        cpu: CpuId(0),
        pid: 0,
        tgid: 0,
        start_ns: 0,
        kind: IntruderKind::Foreign,
        comm: String::new(),
        cgroup: CgroupId(0),
        ns: 0,
        first_ns: 0,
        last_ns: 0,
    }
}

/// Whether the very thread is still there, not another with its number. What cannot be read is taken as alive: its
/// entry stays.
fn is_alive(tgid: u32, pid: u32, start_ns: u64) -> bool {
    match fs::read_to_string(format!("/proc/{tgid}/task/{pid}/stat")) {
        Ok(stat) => started_at(&stat).is_none_or(|ticks| ticks == start_ns / NS_PER_TICK),
        Err(e) => e.kind() != std::io::ErrorKind::NotFound,
    }
}

/// Field 22 of `/proc/PID/stat`, counted from behind the name, which may hold anything.
fn started_at(stat: &str) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// `CLOCK_MONOTONIC`, the clock of `bpf_ktime_get_ns`, ns.
fn monotonic_ns() -> Result<u64, BpfError> {
    let now = ClockId::CLOCK_MONOTONIC.now().map_err(|e| BpfError::Clock(e.into()))?;
    // Never negative: it counts from the boot, and reaches 2^64 ns after 584 years.
    Ok(u64::try_from(Duration::from(now).as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_its_field() {
        let mut slot = Slot { cgroup: 7, generation: 3, from_ns: 100, last_ns: 128, ..Slot::default() };
        slot.ns = [1, 2, 3, 4, 5, 6, 7, 0];
        let l = ledger(CpuId(2), &slot);
        let expected = ClassTimes {
            owner_ns: 1,
            foreign_ns: 2,
            kthread_bound_ns: 3,
            kthread_unbound_ns: 4,
            idle_ns: 5,
            straddle_ns: 6,
            unknown_ns: 7,
        };
        assert_eq!((l.times, l.times.total(), l.to_ns - l.from_ns), (expected, 28, 28));
    }

    #[test]
    fn slots_are_found_by_position() {
        let possible = [CpuId(0), CpuId(2), CpuId(5)];
        let slots = [1, 2, 3].map(|serial| Slot { serial, ..Slot::default() });
        let serial = |cpu| slot_of(&possible, &slots, CpuId(cpu)).map(|s| s.serial);
        assert_eq!(
            [serial(0), serial(2), serial(5), serial(1), serial(6)],
            [Some(1), Some(2), Some(3), None, None]
        );
        assert!(expect_serial(CpuId(5), &slots[2], 4).is_err());
    }

    #[test]
    fn a_thread_is_told_from_another_with_its_number() {
        let own = std::process::id();
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let began = started_at(&stat).unwrap() * NS_PER_TICK + 5;
        assert!(is_alive(own, own, began));
        assert!(!is_alive(own, own, began + NS_PER_TICK));
        assert!(!is_alive(u32::MAX, u32::MAX, began));
        assert_eq!(started_at("1 (a) b) R 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"), Some(19));
        assert_eq!(started_at("1 (a"), None);
    }
}
