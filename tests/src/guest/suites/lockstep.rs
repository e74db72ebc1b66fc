//! The fake kernel is held to the truth: it and this kernel do the same scripts, every value compared after every
//! operation.

use crate::{
    fake,
    guest::{Cgroup, Guest, Outcome, Scenario, Style, Suite, clean::DRIVER},
};
use std::path::Path;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "lockstep",
    about: "the fake kernel answers as this one does",
    style: Style::Tap,
    // Hotplug of a partition's CPUs makes kernels from 7.0 on warn; the scripts do that.
    scenarios: &[Scenario::new("no value differs", no_value_differs)
        .limit(600)
        .allow(&["rebuild_sched_domains"])],
};

fn no_value_differs(guest: &mut Guest) -> Outcome {
    // The scripts have the tree to themselves: PID 1 leaves its cgroup, and goes back whatever comes of them.
    let driver = Cgroup::at(DRIVER);
    Cgroup::root().add(1)?;
    driver.remove()?;
    let report = fake::lockstep_here(Path::new("/sys/fs/cgroup"));
    Cgroup::create(DRIVER, "")?.add(1)?;
    let report = report?;
    guest.say(&report);
    anyhow::ensure!(report.differences.is_empty(), "{} differences", report.differences.len());
    anyhow::ensure!(report.values > 1000, "hardly anything was compared");
    Ok(())
}
