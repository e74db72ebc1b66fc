//! Installed, used for all that it is for, and gone: no file of any cgroup tells that truepin was there.
//!
//! Two hosts. On one nobody used cpusets: systemd enables the controller for truepin and ends it after it, and what
//! member mode wrote goes with it. On the other there are lists of others before, so the controller stays; there owners
//! are partitions, for which only lists that overlap are written. (Member mode writes an empty list of the pool, and up
//! to 6.18 the kernel refuses to empty it again over tasks: it lists every CPU then, until the controller ends.)

use super::{all_files, byte_equal, installed_agent, main_process, make, systemctl, truepin};
use crate::{
    guest::{Cgroup, Guest, Outcome, Task, Workload, equal, machine, secs, wait_until},
    sim::history::Rng,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use std::{collections::BTreeMap, fs};

/// Assigns and releases that were carried out.
const CHANGES: u32 = 30;
/// Units, and where their cgroups are. The second has a set of its own in its file; the third is two slices deep.
const UNITS: [(&str, &str, &str); 4] = [
    ("plain.service", "/system.slice/plain.service", ""),
    ("set.service", "/system.slice/set.service", "AllowedCPUs=0-5\n"),
    ("deep.service", "/jobs.slice/jobs-batch.slice/deep.service", "Slice=jobs-batch.slice\n"),
    ("own.service", "/system.slice/own.service", "Delegate=yes\n"),
];
/// Cgroups that nobody's unit is; the first has a list of its own.
const BY_HAND: [&str; 2] = ["/byhand/one", "/byhand/two"];

/// Where nobody uses cpusets.
pub(super) fn unused(guest: &mut Guest) -> Outcome {
    storm(guest, false)
}

/// Where others have lists.
pub(super) fn used(guest: &mut Guest) -> Outcome {
    storm(guest, true)
}

fn storm(guest: &mut Guest, used: bool) -> Outcome {
    for (unit, _, more) in UNITS {
        let more = if used { more } else { more.trim_start_matches("AllowedCPUs=0-5\n") };
        let text = format!(
            "[Service]\nExecStart=/rig/bin/truepin-guest blink --threads 2 --on-ms 1 --off-ms 90\n{more}"
        );
        fs::write(format!("/etc/systemd/system/{unit}"), text).with_context(|| format!("writing {unit}"))?;
    }
    systemctl(&["daemon-reload"])?;
    for (unit, ..) in UNITS {
        systemctl(&["start", unit])?;
    }
    let [one, two] = BY_HAND.map(|path| Cgroup::create(path, if used { "+cpuset" } else { "" }));
    let (one, two) = (one?, two?);
    if used {
        one.write("cpuset.cpus", "0-3")?;
    }
    let hand: Vec<Workload> = [&one, &two, &two]
        .into_iter()
        .map(|c| Workload::idle().comm("byhand").cgroup(c.path()).spawn())
        .collect::<Result<_, _>>()?;
    let before = all_files()?;
    let masks = masks(&hand)?;

    installed_agent()?;
    let seed = machine::argument("truepin.seed")?.map_or(Ok(7), |s| s.parse()).context("truepin.seed")?;
    let mut storm =
        Storm { rng: Rng::new(seed), members: !used, held: BTreeMap::new(), did: BTreeMap::new() };
    while storm.count("assigned") + storm.count("released") < CHANGES {
        storm.blow(&hand, [&one, &two])?;
    }
    while storm.held.len() < 3 {
        storm.assign()?;
    }
    guest.say(format!("seed {seed}: {:?}; {} owners are left", storm.did, storm.held.len()));
    let now = all_files()?;
    let touched = now.iter().filter(|(k, v)| before.get(*k) != Some(v)).count();
    guest.say(format!("of {} files {touched} read otherwise or are new", now.len()));
    anyhow::ensure!(touched > 0, "nothing was written, so nothing is shown");

    guest.say(make("uninstall")?.stdout);
    byte_equal(guest, &before)?;
    wait_until("the masks as they were", secs(10), || Ok(self::masks(&hand)? == masks))?;
    for (unit, ..) in UNITS {
        anyhow::ensure!(main_process(unit)?.is_alive(), "{unit} died");
    }
    Ok(())
}

fn masks(hand: &[Workload]) -> anyhow::Result<Vec<(Task, truepin::CpuSet)>> {
    hand.iter().map(|w| Ok((w.task(), w.task().allowed()?))).collect()
}

struct Storm {
    rng: Rng,
    /// Whether some owners are members.
    members: bool,
    /// Owner to path.
    held: BTreeMap<String, String>,
    did: BTreeMap<&'static str, u32>,
}

impl Storm {
    fn count(&self, what: &str) -> u32 {
        self.did.get(what).copied().unwrap_or(0)
    }

    fn done(&mut self, what: &'static str) {
        *self.did.entry(what).or_default() += 1;
    }

    /// One thing that happens on a host.
    fn blow(&mut self, hand: &[Workload], [one, two]: [&Cgroup; 2]) -> Outcome {
        match self.rng.below(12) {
            0..=3 => self.assign()?,
            4..=6 => {
                let owners: Vec<String> = self.held.keys().cloned().collect();
                if let Some(owner) = self.rng.pick(&owners) {
                    truepin(&["release", owner])?.ok()?;
                    self.held.remove(owner);
                    self.done("released");
                }
            }
            7 => {
                systemctl(&["daemon-reload"])?;
                self.done("daemon-reload");
            }
            8 => {
                let (unit, ..) = UNITS[self.rng.below(UNITS.len())];
                systemctl(&["restart", unit])?;
                self.done("unit restarted");
            }
            9 => {
                let (unit, ..) = UNITS[self.rng.below(UNITS.len())];
                let weight = format!("CPUWeight={}", 100 + self.rng.below(100));
                systemctl(&["set-property", "--runtime", unit, &weight])?;
                self.done("set-property");
            }
            10 => {
                // In and out of cgroups that may be an owner's.
                let to = if self.rng.chance(50) { one } else { two };
                if let Some(workload) = self.rng.pick(hand) {
                    to.add(workload.task().0)?;
                    self.done("task moved");
                }
                let to = truepin(&["run", "--cpus", "1", "--", "true"])?;
                anyhow::ensure!([0, 125].contains(&to.code()), "{to}");
                self.done(if to.code() == 0 { "command run" } else { "command refused" });
            }
            _ => {
                if self.rng.chance(50) {
                    systemctl(&["restart", "truepin"])?;
                    self.done("agent restarted");
                } else {
                    let agent = main_process("truepin.service")?;
                    agent.signal(Signal::SIGKILL)?;
                    super::life::another(agent)?;
                    self.done("agent killed");
                }
            }
        }
        Ok(())
    }

    fn assign(&mut self) -> Outcome {
        let units = UNITS.iter().map(|(unit, path, _)| (format!("unit/{unit}"), *path));
        let all: Vec<_> = units.chain(BY_HAND.iter().map(|path| (format!("cgroup{path}"), *path))).collect();
        let Some((owner, path)) = self.rng.pick(&all).cloned() else { return Ok(()) };
        if self.held.contains_key(&owner) {
            return Ok(());
        }
        let cpus = (1 + self.rng.below(2)).to_string();
        let mut args = vec!["assign", &owner, "--cgroup", path, "--cpus", &cpus];
        if self.members && self.rng.chance(40) {
            args.extend(["--isolation", "member"]);
        }
        let ran = truepin(&args)?;
        if ran.code() == 0 {
            self.held.insert(owner, path.to_owned());
            self.done("assigned");
        } else {
            // Six CPUs can be given out.
            equal("exit status of a refusal", ran.code(), 1).with_context(|| ran.to_string())?;
            self.done("refused");
        }
        Ok(())
    }
}
