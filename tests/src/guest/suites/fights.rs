//! Others on exclusive CPUs, and others who want a file otherwise: what truepin does about it, and where it stops.

use super::enforce::{agent, held, sleepy, text};
use crate::guest::{
    Cgroup, Guest, Outcome, RunOwner, Scenario, Style, Suite, Workload, agent::wait_for_answer, equal, facts,
    http, machine, millis, secs, truepin, truepin_json, wait_for, wait_until,
};
use anyhow::Context;
use serde_json::Value;
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "fights",
    about: "intruders are fenced where nothing else keeps them out; files that others insist on are left alone",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("an intruder beside a member is fenced", beside_a_member).limit(180),
        Scenario::new("a fence while a partition is in a fight", lost_partition).limit(180),
        Scenario::new("a rewriter that is another process each time", rewriter).limit(180),
        Scenario::new("a storm over many files", storm).limit(180),
    ],
};

/// Where intruders live.
const NOISY: &str = "noisy";

/// Those of this kind, in words.
fn findings(kind: &str) -> anyhow::Result<Vec<Value>> {
    let (_, answer) = http("GET", "/v1/findings", None)?;
    let all = answer["findings"].as_array().context("findings are a list")?;
    Ok(all.iter().filter(|f| text(f, "kind") == kind).cloned().collect())
}

/// A cgroup of somebody else's that lists all CPUs but the last, so that what it held is to be told from what it inherits.
fn noisy() -> anyhow::Result<(Cgroup, CpuSet)> {
    let noisy = Cgroup::create(NOISY, "+cpuset")?;
    let left_out = machine::online()?.last().context("no CPU")?;
    let list = machine::online()?.difference(&CpuSet::single(left_out));
    noisy.write("cpuset.cpus", &list.to_string())?;
    Ok((noisy, list))
}

fn beside_a_member(guest: &mut Guest) -> Outcome {
    let (noisy, list) = noisy()?;
    let mut agent = agent(&format!(
        "isolation = \"member\"\non-intrusion = \"fence\"\ntick = \"10min\"\n\
         [[cgroup]]\npath = \"/{NOISY}\"\nrole = \"ignore\"\non-intrusion = \"fence\"\n"
    ))?;
    let db = RunOwner::start("db", &["--cpus", "2"], &sleepy(2))?;
    equal("an ignored cgroup's list", noisy.cpus("cpuset.cpus")?, list.clone())?;
    let cpu: CpuSet = db.cpus().first().into_iter().collect();
    let intruder = Workload::burn(1).comm("intruder").cgroup(NOISY).pin(&cpu).spawn()?;
    std::thread::sleep(millis(500));
    let (code, verdict) = db.verify(&[])?;
    anyhow::ensure!(code == 1 && text(&verdict, "verdict") == "violated", "{code}: {verdict:#}");
    // That look has found it.
    let off = list.difference(db.cpus());
    wait_until("the fence", secs(10), || Ok(noisy.cpus("cpuset.cpus")? == off))?;
    let told = findings("fenced")?;
    equal("findings", told.len(), 1)?;
    guest.say(text(&told[0], "text"));
    anyhow::ensure!(
        text(&told[0], "text")
            .contains(&format!("intruder (pid {}) of /{NOISY} ran on CPUs {cpu}", intruder.pid())),
        "{told:#?}"
    );
    anyhow::ensure!(intruder.task().allowed()?.is_disjoint(db.cpus()), "{}", intruder.task().allowed()?);
    let (code, clean) = db.verify(&["--for", "3s"])?;
    held(code, &clean)?;
    // A restart keeps it, and what it is to be.
    agent.kill()?;
    agent.start_again()?;
    let status = wait_for_answer("/v1/status", secs(20), |s| s["settled"] == true)?;
    let fence = status["fences"][0].clone();
    guest.say(fence.to_string());
    equal("fenced", (text(&fence, "cgroup"), text(&fence, "cpus")), ("/noisy", off.to_string().as_str()))?;
    equal("first value", text(&fence, "first"), list.to_string().as_str())?;
    equal("list", noisy.cpus("cpuset.cpus")?, off)?;
    truepin(&["release", "--all"])?.ok()?;
    equal("list after the release", noisy.cpus("cpuset.cpus")?, list)?;
    let (_, status) = http("GET", "/v1/status", None)?;
    equal("fences", status["fences"].as_array().map(Vec::len), Some(0))
}

/// Partitions keep everybody out, and so nothing of the pool is written; one that is lost keeps out nobody.
fn lost_partition(guest: &mut Guest) -> Outcome {
    let noisy = Cgroup::create(NOISY, "+cpuset")?;
    let _agent = agent("on-intrusion = \"fence\"\ntick = \"10min\"")?;
    let db = RunOwner::start("db", &["--cpus", "2", "--isolation", "partition"], &sleepy(2))?;
    let cpu: CpuSet = db.cpus().first().into_iter().collect();
    let state = db.cgroup().dir().join("cpuset.cpus.partition");
    for round in 1..=4 {
        let meddler =
            Workload::writing(&state, "member").comm("meddler").cgroup("driver").linger(millis(300));
        equal("the write", meddler.answer()?, Ok(()))?;
        if round < 4 {
            wait_until(&format!("repair {round}"), secs(10), || {
                Ok(db.cgroup().read("cpuset.cpus.partition")? == "root")
            })?;
        }
    }
    wait_for("a fight", secs(10), || Ok(findings("fight")?.first().cloned()))?;
    if !facts::exclusive_file()? {
        // The slice is a partition still, and it is that which keeps them out.
        anyhow::ensure!(noisy.cpus("cpuset.cpus.effective")?.is_disjoint(db.cpus()), "they are let in");
        truepin(&["release", "--all"])?.ok()?;
        return Ok(());
    }
    let intruder = Workload::burn(1).comm("intruder").cgroup(NOISY).pin(&cpu).spawn()?;
    std::thread::sleep(millis(500));
    equal("exit code", db.verify(&[])?.0, 1)?;
    wait_until("the fence", secs(10), || {
        Ok(noisy.cpus("cpuset.cpus.effective")?.is_disjoint(db.cpus())
            && !noisy.read("cpuset.cpus")?.is_empty())
    })?;
    anyhow::ensure!(intruder.task().allowed()?.is_disjoint(db.cpus()), "{}", intruder.task().allowed()?);
    for finding in findings("fight")?.iter().chain(&findings("fenced")?) {
        guest.say(text(finding, "text"));
    }
    equal("the partition", db.cgroup().read("cpuset.cpus.partition")?, "member".to_owned())?;
    // Not held, because it is no partition; but nobody else is there.
    let (_, verdict) = db.verify(&["--for", "2s"])?;
    let foreign = verdict["cpu"].as_array().into_iter().flatten().filter_map(|c| c["foreign_ns"].as_u64());
    equal("foreign time", foreign.sum::<u64>(), 0)?;
    drop(intruder);
    truepin(&["release", "--all"])?.ok()?;
    equal("its list", noisy.read("cpuset.cpus")?, String::new())
}

/// As an orchestrator that has its own idea of a container's CPUs: another process every 300 ms.
fn rewriter(guest: &mut Guest) -> Outcome {
    let container = Cgroup::create("pods/c1", "+cpuset")?;
    let _load = sleepy(1).cgroup("pods/c1").spawn()?;
    let _agent = agent("tick = \"10min\"")?;
    let (code, owner) =
        truepin_json(&["assign", "unit/c1", "--cgroup", "/pods/c1", "--cpus", "2", "--isolation", "member"])?;
    equal("exit code", code, 0)?;
    let cpus: CpuSet = text(&owner, "cpus").parse()?;
    let other = RunOwner::start("other", &["--cpus", "2"], &sleepy(1))?;
    let everything = machine::online()?.to_string();
    let file = container.dir().join("cpuset.cpus");
    let (mut rounds, mut repaired) = (0, 0);
    for _ in 0..30 {
        let runc = Workload::writing(&file, &everything).comm("runc").cgroup("driver");
        equal("the write", runc.answer()?, Ok(()))?;
        std::thread::sleep(millis(300));
        rounds += 1;
        repaired += u32::from(container.cpus("cpuset.cpus")? == cpus);
    }
    let (fights, drifts) = (findings("fight")?, findings("drift")?);
    let of_file: Vec<&Value> =
        drifts.iter().filter(|f| text(f, "text").starts_with("cpuset.cpus of /pods/c1 ")).collect();
    guest.say(format!("{rounds} writes, {repaired} found repaired, {} drifts told", of_file.len()));
    equal("fights", fights.len(), 1)?;
    guest.say(text(&fights[0], "text"));
    equal("its writer", text(&fights[0]["writer"], "comm"), "runc")?;
    equal("drifts", of_file.len(), 4)?;
    anyhow::ensure!(repaired <= 3, "{repaired} repairs");
    equal("the file", container.read("cpuset.cpus")?, everything)?;
    let (code, verdict) = truepin_json(&["verify", "unit/c1"])?;
    anyhow::ensure!(code == 1 && text(&verdict, "verdict") == "violated", "{code}: {verdict:#}");
    let (code, verdict) = other.verify(&["--for", "2s"])?;
    held(code, &verdict)?;
    // The quiet minute, and it is repaired.
    wait_until("the end of the fight", secs(90), || Ok(container.cpus("cpuset.cpus")? == cpus))?;
    equal("fights that are over", findings("fight-over")?.len(), 1)
}

fn storm(guest: &mut Guest) -> Outcome {
    const FILES: usize = 12;
    let all: Vec<Cgroup> =
        (0..FILES).map(|n| Cgroup::create(&format!("c{n}"), "+cpuset")).collect::<anyhow::Result<_>>()?;
    let _agent = agent("tick = \"10min\"")?;
    let db = RunOwner::start("db", &["--cpus", "2", "--isolation", "member"], &sleepy(1))?;
    let other = RunOwner::start("other", &["--cpus", "2"], &sleepy(1))?;
    let pool = all[0].cpus("cpuset.cpus")?;
    let everything = pool.union(db.cpus());
    let mut repaired = 0;
    for _ in 0..6 {
        for cgroup in &all {
            cgroup.write("cpuset.cpus", &everything.to_string())?;
        }
        std::thread::sleep(secs(1));
        for cgroup in &all {
            repaired += usize::from(cgroup.cpus("cpuset.cpus")? == pool);
        }
    }
    let (fights, drifts) = (findings("fight")?.len(), findings("drift")?.len());
    guest
        .say(format!("{FILES} files, 6 rounds: {repaired} found repaired, {drifts} drifts, {fights} fights"));
    equal("fights", fights, FILES)?;
    anyhow::ensure!(repaired <= 3 * FILES && drifts == 4 * FILES, "it goes on");
    let (code, verdict) = other.verify(&["--for", "2s"])?;
    held(code, &verdict)?;
    equal("an owner's set", other.cgroup().cpus("cpuset.cpus.effective")?, other.cpus().clone())?;
    wait_until("the end of the fights", secs(90), || {
        all.iter().try_fold(true, |ok, c| Ok(ok && c.cpus("cpuset.cpus")? == pool))
    })?;
    wait_for_answer("/v1/status", secs(20), |s| s["settled"] == true)?;
    Ok(())
}
