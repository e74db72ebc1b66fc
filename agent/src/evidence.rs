//! All evidence of one instant, from the kernel half and from what it is checked against.
//!
//! The owner's CPU clock is read right after the slices are closed; the time between the two is part of the bracket
//! that the verdict allows for.

use crate::{
    bpf::BpfProbe,
    procfs::{self, ProcError},
    sysfs::{OnlineCpus, SysfsError},
};
use std::path::{Path, PathBuf};
use truepin::{
    CgroupId, CgroupPath,
    ledger::{LedgerSample, Probe, Watched},
    verdict::{Evidence, Tolerance},
};

/// Evidence could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EvidenceError {
    /// The kernel half.
    #[error(transparent)]
    Probe(#[from] truepin::ledger::ProbeError),
    /// `/proc`, sysfs or a clock.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// Which CPUs are online.
    #[error(transparent)]
    Online(#[from] SysfsError),
}

/// Where evidence comes from.
#[derive(Debug)]
pub struct Collector {
    /// `None` when it is off: verdicts are inconclusive then.
    pub probe: Option<BpfProbe>,
    online: OnlineCpus,
    cgroups: PathBuf,
    /// Re-used: reading the kernel half's maps then allocates nothing.
    sample: LedgerSample,
}

impl Collector {
    /// `cgroups` is the root cgroup's directory.
    #[must_use]
    pub fn new(probe: Option<BpfProbe>, online: OnlineCpus, cgroups: &Path) -> Self {
        Self { probe, online, cgroups: cgroups.into(), sample: LedgerSample::default() }
    }

    /// Watches these owners from now on.
    pub fn configure(&mut self, watched: &[Watched]) -> Result<(), EvidenceError> {
        match &mut self.probe {
            Some(probe) => Ok(probe.configure(watched)?),
            None => Ok(()),
        }
    }

    /// Everything, now.
    pub fn collect(&mut self, owners: &[(CgroupId, CgroupPath)]) -> Result<Evidence, EvidenceError> {
        let mut evidence = Evidence::default();
        if let Some(probe) = &mut self.probe {
            probe.collect(&mut self.sample)?;
        }
        for (id, path) in owners {
            if let Some(ns) = procfs::usage_ns(&self.cgroups.join(path.as_str()))? {
                evidence.usage.insert(*id, ns);
            }
        }
        evidence.at = procfs::now()?;
        if self.probe.is_some() {
            self.sample.ended_ns = self.sample.ended_ns.max(evidence.at.mono_ns);
            evidence.ledger = Some(self.sample.clone());
        }
        procfs::noise(|cpu, noise| {
            evidence.noise.insert(cpu, noise);
        })?;
        // The clock is this machine's, whatever tree describes the CPUs.
        evidence.clock = procfs::clock_state(Path::new("/"))?;
        evidence.online = self.online.read()?;
        Ok(evidence)
    }
}

/// The allowances for this machine. A switch costs 2 to 8 µs; under software emulation 20 to 57, and 285 where the
/// emulator had a third of its host (7.3.4, 354 switches, 101 ms): all measured.
pub fn tolerance() -> Result<Tolerance, ProcError> {
    let per_switch_ns = if is_emulated() { 400_000 } else { 10_000 };
    Ok(Tolerance { tick_ns: procfs::tick_ns()?, per_switch_ns })
}

/// Whether QEMU's TCG interprets this machine: it says so where hypervisors sign (CPUID leaf `0x4000_0000`).
#[cfg(target_arch = "x86_64")]
fn is_emulated() -> bool {
    use std::arch::x86_64::__cpuid;
    // Bit 31 of ECX of leaf 1: there is a hypervisor.
    if __cpuid(1).ecx >> 31 == 0 {
        return false;
    }
    let leaf = __cpuid(0x4000_0000);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat() == *b"TCGTCGTCGTCG"
}

/// Other architectures have no such signature; the stricter allowance errs towards Inconclusive.
#[cfg(not(target_arch = "x86_64"))]
fn is_emulated() -> bool {
    false
}
