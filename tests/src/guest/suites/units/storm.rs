//! Administrators' tools against truepin: 200 rounds of `daemon-reload`, `set-property` on an owner's unit and on a unit
//! beside the owners, and restarts, with a service that would run everywhere.
//!
//! Ten owners on twelve CPUs: seven declared units and a command under `truepin run`, which are partitions, and two units in
//! member mode. Two of the declared ones are restarted, three have their property set to all CPUs.

use super::{cgroup, command, cpus_of, installed, log, partitioned, row, service, systemctl};
use crate::guest::{Guest, Outcome, equal, secs, truepin_json, wait_until};
use anyhow::Context;
use std::{
    collections::BTreeMap,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Instant,
};
use truepin::CpuSet;

const ROUNDS: usize = 200;
const UNITS: usize = 7;

pub(super) fn default_limit(guest: &mut Guest) -> Outcome {
    storm(guest, 3)
}

pub(super) fn high_limit(guest: &mut Guest) -> Outcome {
    storm(guest, 1000)
}

/// What the ledger has of an owner: since when, and for how long others ran on its CPUs.
#[derive(Clone, Default)]
struct Ledger {
    from: String,
    foreign_ns: u64,
    departures: u64,
}

fn ledger() -> anyhow::Result<BTreeMap<String, Ledger>> {
    let (_, document) = truepin_json(&["verify"])?;
    let verdicts = document["verdicts"].as_array().with_context(|| format!("no verdicts in {document:#}"))?;
    let one = |v: &serde_json::Value| {
        let cpus = v["cpu"].as_array().into_iter().flatten();
        let foreign_ns = cpus.map(|c| c["foreign_ns"].as_u64().unwrap_or_default()).sum();
        let departures = v["departures"].as_u64().unwrap_or_default();
        let from = v["from"].as_str().unwrap_or_default().to_owned();
        (v["owner"].as_str().unwrap_or_default().to_owned(), Ledger { from, foreign_ns, departures })
    };
    Ok(verdicts.iter().map(one).collect())
}

/// Steps that the agent has applied so far, as its log has them.
fn writes() -> anyhow::Result<usize> {
    Ok(log()?.lines().filter(|l| l.contains(": echo ") && l.contains(" > /sys/fs/cgroup")).count())
}

fn fights() -> anyhow::Result<usize> {
    let (_, status) = truepin_json(&["status"])?;
    Ok(status["findings"].as_array().into_iter().flatten().filter(|f| f["kind"] == "fight").count())
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The machine is thrown away.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[expect(clippy::too_many_lines, reason = "one course of events, told in its order")]
fn storm(guest: &mut Guest, limit: u32) -> Outcome {
    let units: Vec<String> = (0..UNITS).map(|n| format!("u{n}.service")).collect();
    let members = ["m0.service", "m1.service"];
    let mut config =
        format!("reserved = \"0-1\"\nisolation = \"partition\"\n[limits]\nrepairs-per-minute = {limit}\n");
    for unit in &units {
        config.extend(["[[unit]]\nname = \"", unit, "\"\ncpus = 1\n"]);
    }
    for name in units.iter().map(String::as_str).chain(members) {
        service(name.trim_end_matches(".service"), "")?;
    }
    let noise = "[Service]\nExecStart=/rig/bin/truepin-guest blink --threads 12 --on-ms 1 --off-ms 100\n";
    std::fs::write("/etc/systemd/system/noise.service", noise)?;
    installed(&config)?;
    for unit in units.iter().map(String::as_str).chain(members).chain(["noise.service"]) {
        systemctl(&["start", unit])?;
    }
    for unit in members {
        let (owner, home) = (format!("unit/{unit}"), format!("/system.slice/{unit}"));
        command("truepin", &["assign", &owner, "--cgroup", &home, "--cpus", "1", "--isolation", "member"])?;
    }
    let work = ["--", "/rig/bin/truepin-guest", "blink", "--threads", "1", "--on-ms", "1", "--off-ms", "100"];
    let run = Command::new("truepin")
        .args(["run", "--cpus", "1", "--name", "r0"])
        .args(work)
        .stdin(Stdio::null())
        .spawn();
    let _run = Running(run.context("starting truepin run")?);
    wait_until("the command's CPUs", secs(30), || Ok(row("run/r0").is_ok()))?;
    let mut sets = BTreeMap::new();
    for owner in
        units.iter().map(String::as_str).chain(members).map(|u| format!("unit/{u}")).chain(["run/r0".into()])
    {
        let cpus = cpus_of(&owner)?;
        sets.insert(owner, cpus);
    }
    equal("owners", sets.len(), 10)?;
    for unit in &units {
        partitioned(unit, &sets[&format!("unit/{unit}")])?;
    }

    let (before, written) = (ledger()?, writes()?);
    // What the ledger had of epochs that are over, by owner.
    let mut over: BTreeMap<String, Ledger> = BTreeMap::new();
    let began = Instant::now();
    let mut counts = [0_usize; 4];
    for round in 0..ROUNDS {
        let nth = round / 4;
        counts[round % 4] += 1;
        match round % 4 {
            0 => drop(systemctl(&["daemon-reload"])?),
            1 => drop(systemctl(&["set-property", "--runtime", &units[nth % 3], "AllowedCPUs=0-11"])?),
            2 => drop(systemctl(&["set-property", "--runtime", "noise.service", "AllowedCPUs=0-11"])?),
            _ => {
                let unit = &units[5 + nth % 2];
                let owner = format!("unit/{unit}");
                let now = ledger()?.get(&owner).cloned().unwrap_or_default();
                let sum = over.entry(owner).or_default();
                (sum.foreign_ns, sum.departures) =
                    (sum.foreign_ns + now.foreign_ns, sum.departures + now.departures);
                systemctl(&["restart", unit])?;
            }
        }
    }
    let took = began.elapsed().as_secs();
    let after = ledger()?;
    let (stormed, fought) = (writes()? - written, fights()?);

    // Nothing goes on by itself; what was left alone is mended when it has been quiet for a minute.
    let mut settled = String::new();
    wait_until("the end of all fights", secs(150), || {
        settled = truepin_json(&["status"])?.1["problems"].to_string();
        let all = units.iter().all(|u| partition_stands(u, &sets[&format!("unit/{u}")]));
        sleep(secs(2));
        Ok(all && fights_are_over()?)
    })
    .with_context(|| format!("problems: {settled}; {}", log().unwrap_or_default()))?;
    let quiet = writes()?;
    sleep(secs(35));
    equal("writes in 35 s of quiet, with a tick in them", writes()? - quiet, 0)?;

    let mut lost: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for owner in sets.keys() {
        let (old, new) =
            (before.get(owner).cloned().unwrap_or_default(), after.get(owner).cloned().unwrap_or_default());
        let ended = over.get(owner).cloned().unwrap_or_default();
        // An epoch that began before the storm had its time then, too.
        let same = !over.contains_key(owner) && old.from == new.from;
        if !over.contains_key(owner) && old.from != new.from {
            guest.say(format!("{owner}: its epoch ended within the storm; what was before is not counted"));
        }
        let base = if same || over.contains_key(owner) { (old.foreign_ns, old.departures) } else { (0, 0) };
        let ns = (ended.foreign_ns + new.foreign_ns).saturating_sub(base.0);
        lost.insert(owner, (ns, (ended.departures + new.departures).saturating_sub(base.1)));
    }
    let ms = |ns: u64| ns / 1_000_000;
    for (owner, (ns, departures)) in &lost {
        guest.say(format!(
            "{owner}: CPUs {}, others ran there for {} ms, {departures} departures",
            sets[*owner],
            ms(*ns)
        ));
    }
    let total: u64 = lost.values().map(|(ns, _)| ns).sum();
    guest.say(format!(
        "limit {limit}: {ROUNDS} rounds in {took} s ({} daemon-reload, {} set-property of owners, {} of a unit beside \
         them, {} restarts); exclusivity lost for {} ms of {} CPU-seconds; {stormed} steps written, {fought} fights; \
         then none in 35 s",
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        ms(total),
        took * 10
    ));
    for unit in &units {
        partitioned(unit, &sets[&format!("unit/{unit}")])?;
    }
    for unit in members {
        let cpus = cgroup(unit).cpus("cpuset.cpus.effective")?;
        equal("a member's CPUs", cpus, sets[&format!("unit/{unit}")].clone())?;
    }
    Ok(())
}

fn partition_stands(unit: &str, cpus: &CpuSet) -> bool {
    let home = cgroup(unit);
    home.read("cpuset.cpus.partition").is_ok_and(|s| s == "root")
        && home.cpus("cpuset.cpus.effective").is_ok_and(|c| c == *cpus)
}

/// Every fight that was told of has an end that was told of.
fn fights_are_over() -> anyhow::Result<bool> {
    let (_, status) = truepin_json(&["status"])?;
    let count = |kind: &str| {
        status["findings"].as_array().into_iter().flatten().filter(|f| f["kind"] == kind).count()
    };
    Ok(count("fight") == count("fight-over"))
}
