//! A probe that follows a script: complete evidence in which every owner runs on its CPUs and nobody else does,
//! unless a test says otherwise.

use std::collections::BTreeMap;
use truepin::{
    CgroupId, CpuId,
    ledger::{
        ClassTimes, CpuLedger, Intruder, LedgerSample, OwnerCounters, Probe, ProbeError, ProbeHealth,
        ProgramHealth, Watched,
    },
};

/// A watched owner, with the start of its epoch.
#[derive(Debug, Clone)]
struct Epoch {
    watched: Watched,
    from_ns: u64,
}

/// The probe. Its clock is set by the simulation.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub now_ns: u64,
    /// Foreign time to book on a CPU, cumulative.
    pub foreign_ns: BTreeMap<CpuId, u64>,
    /// Time of kernel threads that could run elsewhere to book on a CPU, cumulative.
    pub kthread_ns: BTreeMap<CpuId, u64>,
    /// Departures to count for a cgroup, cumulative.
    pub departures: BTreeMap<CgroupId, u64>,
    /// Tasks that were moved out of a cgroup, cumulative.
    pub moved_out: BTreeMap<CgroupId, u64>,
    /// Who was where they do not belong.
    pub intruders: Vec<Intruder>,
    /// Every call fails.
    pub broken: bool,
    epochs: Vec<Epoch>,
}

impl Script {
    /// What is watched now.
    pub fn watched(&self) -> impl Iterator<Item = &Watched> {
        self.epochs.iter().map(|e| &e.watched)
    }

    /// The time that each owner's own CPU clock shows.
    #[must_use]
    pub fn usage(&self) -> BTreeMap<CgroupId, u64> {
        let used = |e: &Epoch| e.watched.cpus.iter().map(|c| self.times(e, c).owner_ns).sum();
        self.epochs.iter().map(|e| (e.watched.cgroup, used(e))).collect()
    }

    fn times(&self, epoch: &Epoch, cpu: CpuId) -> ClassTimes {
        let elapsed = self.now_ns.saturating_sub(epoch.from_ns);
        let foreign_ns = self.foreign_ns.get(&cpu).copied().unwrap_or(0).min(elapsed);
        let kthread_unbound_ns = self.kthread_ns.get(&cpu).copied().unwrap_or(0).min(elapsed - foreign_ns);
        let owner_ns = elapsed - foreign_ns - kthread_unbound_ns;
        ClassTimes { owner_ns, foreign_ns, kthread_unbound_ns, ..ClassTimes::default() }
    }

    fn refuse(&self, operation: &str) -> Result<(), ProbeError> {
        let error = || ProbeError { operation: operation.into(), cause: "as the script says".into() };
        if self.broken { Err(error()) } else { Ok(()) }
    }
}

impl Probe for Script {
    fn configure(&mut self, watched: &[Watched]) -> Result<(), ProbeError> {
        self.refuse("configure")?;
        let kept = |w: &Watched| self.epochs.iter().find(|e| e.watched == *w).map(|e| e.from_ns);
        self.epochs = watched
            .iter()
            .map(|w| Epoch { watched: w.clone(), from_ns: kept(w).unwrap_or(self.now_ns) })
            .collect();
        Ok(())
    }

    fn collect(&mut self, sample: &mut LedgerSample) -> Result<(), ProbeError> {
        self.refuse("collect")?;
        *sample = LedgerSample { begun_ns: self.now_ns, ended_ns: self.now_ns, ..LedgerSample::default() };
        for epoch in &self.epochs {
            let w = &epoch.watched;
            sample.cpus.extend(w.cpus.iter().map(|cpu| CpuLedger {
                cpu,
                owner: w.cgroup,
                generation: w.generation,
                from_ns: epoch.from_ns,
                to_ns: self.now_ns,
                times: self.times(epoch, cpu),
                switches: 0,
                breaks: 0,
            }));
            sample.owners.push(OwnerCounters {
                owner: w.cgroup,
                generation: w.generation,
                migrations: 0,
                departures: self.departures.get(&w.cgroup).copied().unwrap_or(0),
                moved_out: self.moved_out.get(&w.cgroup).copied().unwrap_or(0),
            });
        }
        sample.cpus.sort_by_key(|c| c.cpu);
        sample.intruders.clone_from(&self.intruders);
        sample.health = ProbeHealth {
            programs: vec![ProgramHealth { name: "sched_switch".into(), link: Some(1), misses: 0 }],
            sees_moves: true,
            ..ProbeHealth::default()
        };
        Ok(())
    }
}
