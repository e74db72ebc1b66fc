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
    scenarios: &[Scenario::new("no value differs", no_value_differs).limit(600).allow(&[
        // Hotplug of a partition's CPUs (`hotplug.txt`), on 6.12 and from 7.0 on.
        "rebuild_sched_domains",
        // CPUs taken from a partition that is invalid already. 6.12: "a sibling of a remote partition overlaps it",
        // "the root keeps a CPU", "a nested partition with tasks beside it".
        "partition_xcpus_del",
        // A remote partition treated as a local one, since 6.12.110: "a sibling of a remote partition overlaps it".
        "update_parent_effective_cpumask",
    ])],
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
