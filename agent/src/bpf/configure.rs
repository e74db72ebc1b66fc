//! Who owns what, from `plan` into the maps.
//!
//! Order: owners that go away are forgotten first, so that their tasks on CPUs of a successor are not departures;
//! then the CPUs get their entries, then new owners are entered, so that no task of theirs departs from a set that is
//! not written yet. Last a flush on each changed CPU.

use super::{BpfError, BpfProbe, CpuState, collect, load, maps::Counts, plan, plan::Indexed};
use std::collections::BTreeMap;
use truepin::{cpuset::CpuId, ledger::Watched};

impl BpfProbe {
    pub(super) fn apply(&mut self, watched: &[Watched]) -> Result<(), BpfError> {
        plan::check(watched)?;
        if self.dirty {
            self.maps.clear_owners()?;
            self.owners.clear();
        }
        let next = plan::compare(&self.owners, watched, self.index);
        self.dirty = true;
        for old in &self.owners {
            if !next.iter().any(|o| o.watched.cgroup == old.watched.cgroup) {
                self.maps.remove_owner(old.watched.cgroup.0)?;
            }
        }
        let changed = self.write_cpus(&next)?;
        let kept: BTreeMap<u32, Counts> =
            self.owners.iter().zip(&self.bases).map(|(o, base)| (o.index, *base)).collect();
        let mut bases = Vec::with_capacity(next.len());
        for o in &next {
            match kept.get(&o.index) {
                Some(base) if o.kept => bases.push(*base),
                before => {
                    if before.is_none() {
                        self.index = o.index;
                    }
                    bases.push(self.maps.counters(o.index)?);
                    self.maps.set_owner(o.watched.cgroup.0, o.index)?;
                }
            }
        }
        self.maps.set_config(plan::levels(&next))?;
        (self.owners, self.bases) = (next, bases);
        self.restart(&changed)?;
        self.dirty = false;
        Ok(())
    }

    /// Gives every CPU whose owner changes its new entry. Returns them with the serial of the epoch that ends there,
    /// 0 if none had begun.
    fn write_cpus(&mut self, next: &[Indexed]) -> Result<Vec<(CpuId, u64)>, BpfError> {
        let mut wanted = plan::cpus(next);
        for cpu in self.cpus.keys() {
            wanted.entry(*cpu).or_default();
        }
        let mut changed = Vec::new();
        for (cpu, (mut config, kept)) in wanted {
            if kept {
                continue;
            }
            self.serial += 1;
            config.serial = self.serial;
            let old = self.cpus.insert(cpu, CpuState { config, started: false });
            changed.push((cpu, old.filter(|s| s.started).map_or(0, |s| s.config.serial)));
            if cpu.0 < self.maps.cpu_count() {
                self.maps.set_cpu(cpu.0, config)?;
            }
        }
        Ok(changed)
    }

    /// Ends the epochs of changed CPUs and starts the new ones. CPUs without an owner are done with then.
    fn restart(&mut self, changed: &[(CpuId, u64)]) -> Result<(), BpfError> {
        self.ended.clear();
        for (cpu, _) in changed {
            let started = load::flush(&self.bpf, *cpu)?;
            if let Some(state) = self.cpus.get_mut(cpu) {
                state.started = started;
            }
        }
        let slots = self.maps.published()?;
        for (cpu, serial) in changed {
            let Some(state) = self.cpus.get(cpu).copied().filter(|s| s.started) else { continue };
            if let Some(slot) = collect::slot_of(&self.possible, &slots, *cpu)
                && slot.serial == *serial
                && slot.cgroup != 0
            {
                self.ended.push(collect::ledger(*cpu, slot));
            }
            if state.config.cgroup == 0 {
                self.cpus.remove(cpu);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use truepin::{
        cgroup::CgroupId,
        ledger::{LedgerSample, Probe as _},
    };

    /// Needs no cgroup: any number is an owner that has no tasks.
    #[test]
    fn after_a_failure_everything_is_written_anew() {
        let mut probe = match BpfProbe::load() {
            Ok(probe) => probe,
            Err(e) if !nix::unistd::Uid::effective().is_root() || matches!(e, BpfError::NoBtf { .. }) => {
                let test = "bpf::configure::after_a_failure_everything_is_written_anew";
                // Past the harness's capture, so that a skip is never silent.
                writeln!(std::io::stderr(), "skipped: {test}: {e}").unwrap();
                return;
            }
            Err(e) => panic!("{e}"),
        };
        let one = |cgroup| Watched {
            cgroup: CgroupId(cgroup),
            level: 1,
            cpus: "0".parse().unwrap(),
            generation: 1,
        };
        let mut sample = LedgerSample::default();
        probe.configure(&[one(u64::MAX)]).unwrap();
        probe.collect(&mut sample).unwrap();
        let before = sample.cpus[0];

        // What a failed write leaves behind.
        probe.dirty = true;
        let e = probe.collect(&mut sample).unwrap_err();
        assert!(e.cause.contains("half-way"), "{e}");
        probe.configure(&[one(u64::MAX)]).unwrap();
        probe.collect(&mut sample).unwrap();
        assert!(sample.cpus[0].from_ns > before.to_ns, "a new epoch, though nothing changed");
        assert_eq!(sample.owners.len(), 1);

        // Another owner in the same state: the first one is not in the map any more.
        probe.dirty = true;
        probe.configure(&[one(u64::MAX - 1)]).unwrap();
        assert_eq!(probe.maps.owner_ids().unwrap(), [u64::MAX - 1]);
    }
}
