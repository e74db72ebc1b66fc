//! The fake kernel is held to the truth: it and this kernel do the same scripts, every value compared after every
//! operation.

use crate::{
    fake::{self, Behaviour, script::Script},
    guest::{Cgroup, Guest, Outcome, Scenario, Style, Suite, clean::DRIVER, machine},
    sim::played,
};
use anyhow::Context;
use std::path::Path;

/// Lines of the kernel log that scripts bring about.
const DEFECTS: &[&str] = &[
    // Hotplug of a partition's CPUs (`hotplug.txt`), on 6.12 and from 7.0 on.
    "rebuild_sched_domains",
    // CPUs taken from a partition that is invalid already. 6.12: "a sibling of a remote partition overlaps it",
    // "the root keeps a CPU", "a nested partition with tasks beside it".
    "partition_xcpus_del",
    // A remote partition treated as a local one, since 6.12.110: "a sibling of a remote partition overlaps it".
    "update_parent_effective_cpumask",
];

/// Histories that truepin plays, in one boot.
const PLAYED: u64 = 12;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "lockstep",
    about: "the fake kernel answers as this one does",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("no value differs", no_value_differs).limit(600).allow(DEFECTS),
        Scenario::new("no value differs in what truepin does", nor_in_what_truepin_does)
            .limit(600)
            .allow(DEFECTS),
    ],
};

fn no_value_differs(guest: &mut Guest) -> Outcome {
    in_lockstep(guest, &fake::script::all()?)
}

fn nor_in_what_truepin_does(guest: &mut Guest) -> Outcome {
    let behaviour = behaviour()?;
    let played: Result<Vec<_>, _> = (1..=PLAYED).map(|seed| played::script(seed, behaviour)).collect();
    in_lockstep(guest, &played?)
}

pub(super) fn behaviour() -> anyhow::Result<Behaviour> {
    let release = machine::release()?;
    Behaviour::of(&release).with_context(|| format!("{release:?} begins with no version"))
}

fn in_lockstep(guest: &mut Guest, scripts: &[Script]) -> Outcome {
    let report = with_the_tree(|mount| Ok(fake::lockstep(mount, behaviour()?, scripts)?))?;
    guest.say(&report);
    anyhow::ensure!(report.differences.is_empty(), "{} differences", report.differences.len());
    anyhow::ensure!(report.values > 1000, "hardly anything was compared");
    Ok(())
}

/// The scripts have the tree to themselves: PID 1 leaves its cgroup, and goes back whatever comes of them.
pub(super) fn with_the_tree<T>(act: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let driver = Cgroup::at(DRIVER);
    Cgroup::root().add(1)?;
    driver.remove()?;
    let result = act(Path::new("/sys/fs/cgroup"));
    Cgroup::create(DRIVER, "")?.add(1)?;
    result
}
