//! One life of a machine whose power is cut while owners come and go. `tests/vm/powercut.sh` boots it again and again on
//! one disk (ext4 on NVMe), kills QEMU in the middle, and passes on what was acknowledged: `truepin.acked=EPOCH` followed
//! by `/NAME=CPUS` for each owner. In the last life (`truepin.life=last`) nobody cuts, and the suite ends.
//!
//! What QEMU was given before its end is in the host's files, so lost is what the guest still held: dirty pages, and the
//! journal's running transaction. That is what an fsync is for.

use crate::guest::{Agent, Cgroup, Guest, Outcome, Scenario, Style, Suite, http, machine, secs, wait_until};
use anyhow::Context;
use nix::mount::{MsFlags, mount, umount};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};
use truepin::checkpoint::{
    Checkpoint,
    generations::{self, Found, Generation, Place},
};

/// The suite.
pub const SUITE: Suite = Suite {
    name: "powercut",
    about: "power is cut while owners come and go; what was acknowledged is there afterwards",
    style: Style::Tap,
    scenarios: &[Scenario::new("a life on a disk that loses power", life).limit(240)],
};

const DEVICE: &str = "/dev/nvme0n1";
const DISK: &str = "/disk";
const STATE: &str = "/disk/state/checkpoint.json";
/// Of one CPU each: the machine has 8, of which one is reserved and one has to stay in the pool.
const CGROUPS: usize = 6;
/// In the last life; in the others the end comes from outside.
const CHANGES: usize = 6;

type Table = BTreeMap<String, String>;

fn life(guest: &mut Guest) -> Outcome {
    if !Path::new(DEVICE).exists() {
        anyhow::bail!("{DEVICE} is missing: run tests/vm/powercut.sh");
    }
    let last = machine::argument("truepin.life")?.is_some_and(|l| l == "last");
    let acked = machine::argument("truepin.acked")?.filter(|a| !a.is_empty());
    fs::create_dir_all(DISK)?;
    mount(Some(DEVICE), DISK, Some("ext4"), MsFlags::empty(), None::<&str>).context("mounting the disk")?;
    let lived = live(guest, last, acked.as_deref());
    // Whatever came of it, the disk must be let go.
    let gone = umount(DISK).context("unmounting the disk");
    lived.and(gone)
}

fn live(guest: &Guest, last: bool, acked: Option<&str>) -> Outcome {
    let record = on_record()?;
    match (acked, &record) {
        (None, _) => guest.say("nothing was acknowledged yet"),
        (Some(acked), None) => anyhow::bail!("{acked} was acknowledged, and there is no record"),
        (Some(acked), Some((from, record))) => guest.say(compare(acked, *from, record)?),
    }
    // As whoever makes them would, before the agent starts.
    for n in 0..CGROUPS {
        Cgroup::create(&format!("load/c{n}"), "+cpuset")?;
    }
    let config = "reserved = \"0\"\n[sources]\nbpf = false\n";
    let agent = Agent::start_env(config, &[], &[("TRUEPIN_STATE", STATE)])?;
    let mut table = owners()?;
    let expected = record.map(|(_, r)| table_of(&r)).unwrap_or_default();
    anyhow::ensure!(table == expected, "on record were {expected:?}, the agent has {table:?}");
    for n in (0..).take_while(|n| !last || *n < CHANGES) {
        let name = format!("c{}", (n * 5 + table.len()) % CGROUPS);
        change(&mut table, &name)?;
        let owners: Vec<String> = table.iter().map(|(name, cpus)| format!("/{name}={cpus}")).collect();
        let owners = owners.concat();
        guest.say(format_args!("ACK {}{owners}", epoch()?));
        anyhow::ensure!(n < 100_000, "nobody cuts the power");
    }
    anyhow::ensure!(agent.is_running(), "the agent died: {}", agent.log());
    let status = agent.stop()?;
    anyhow::ensure!(status.success(), "the agent ended with {status}");
    let (_, record) = on_record()?.context("no record at the end")?;
    anyhow::ensure!(table_of(&record) == table, "{table:?} was acknowledged, {record:?} is on record");
    Ok(())
}

/// The record as a start would choose it.
fn on_record() -> anyhow::Result<Option<(Generation, Box<Checkpoint>)>> {
    let (dir, name) = STATE.rsplit_once('/').context("a directory")?;
    let read = |g| match fs::read(format!("{dir}/{}", Place::Of(g).name(name))) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("reading the {} generation", g.name())),
    };
    let (current, previous) = (read(Generation::Current)?, read(Generation::Previous)?);
    let found = |bytes: &Option<Vec<u8>>| bytes.as_ref().is_some_and(|_| true);
    let choice = generations::choose(
        current.as_deref().map_or(Found::Missing, Found::Bytes),
        previous.as_deref().map_or(Found::Missing, Found::Bytes),
    )?;
    // ext4 keeps what was synced: a power cut may lose names and never damages.
    anyhow::ensure!(
        choice.damaged.is_empty(),
        "damaged: {:?} (current there: {}, previous there: {})",
        choice.damaged,
        found(&current),
        found(&previous)
    );
    Ok(choice.record)
}

/// The acknowledged record or a later one; later ones differ by the one change that was under way.
fn compare(acked: &str, from: Generation, record: &Checkpoint) -> anyhow::Result<String> {
    let mut parts = acked.split('/');
    let epoch: u64 =
        parts.next().unwrap_or_default().parse().with_context(|| format!("truepin.acked={acked}"))?;
    let then: Table = parts
        .map(|p| p.split_once('=').map(|(n, c)| (n.to_owned(), c.to_owned())))
        .collect::<Option<_>>()
        .with_context(|| format!("truepin.acked={acked}"))?;
    let now = table_of(record);
    anyhow::ensure!(record.epoch >= epoch, "epoch {epoch} was acknowledged, {} is on record", record.epoch);
    let names: std::collections::BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    let changed = names.into_iter().filter(|n| then.get(*n) != now.get(*n)).count();
    anyhow::ensure!(
        changed <= usize::from(record.epoch > epoch),
        "acknowledged with epoch {epoch}: {then:?}; on record with epoch {}: {now:?}",
        record.epoch
    );
    Ok(format!(
        "epoch {epoch} with {} owners was acknowledged; epoch {} with {} is on record, in the {} generation",
        then.len(),
        record.epoch,
        now.len(),
        from.name()
    ))
}

fn table_of(record: &Checkpoint) -> Table {
    let owners = record.assignments.owners.values();
    owners.map(|a| (a.cgroup.name().to_owned(), a.cpus.to_string())).collect()
}

fn owners() -> anyhow::Result<Table> {
    let (status, answer) = http("GET", "/v1/owners", None)?;
    anyhow::ensure!(status == 200, "HTTP status {status}: {answer}");
    let owners = answer["owners"].as_array().context("no owners")?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let name = |o: &Value| text(&o["owner"]).trim_start_matches("unit/").to_owned();
    Ok(owners.iter().map(|o| (name(o), text(&o["cpus"]))).collect())
}

/// The epoch that the agent says is durable.
fn epoch() -> anyhow::Result<u64> {
    let (status, answer) = http("GET", "/v1/status", None)?;
    let epoch = answer["record"]["epoch"].as_u64();
    epoch.with_context(|| format!("no epoch: HTTP status {status}: {answer}"))
}

/// Takes a CPU for the cgroup, or gives it back.
fn change(table: &mut Table, name: &str) -> Outcome {
    if table.contains_key(name) {
        let (status, answer) = http("DELETE", &format!("/v1/owners/unit/{name}"), None)?;
        anyhow::ensure!(status == 200, "HTTP status {status}: {answer}");
        table.remove(name);
        return Ok(());
    }
    let request = json!({"owner": format!("unit/{name}"), "cpus": 1, "cgroup": format!("/load/{name}")});
    let (status, answer) = http("POST", "/v1/owners", Some(&request))?;
    anyhow::ensure!(status / 100 == 2, "HTTP status {status}: {answer}");
    let cpus = answer["cpus"].as_str().with_context(|| format!("no CPUs: {answer}"))?;
    table.insert(name.to_owned(), cpus.to_owned());
    wait_until("the CPU", secs(10), || {
        Ok(Cgroup::at(&format!("load/{name}")).read("cpuset.cpus.effective")? == cpus)
    })
}
