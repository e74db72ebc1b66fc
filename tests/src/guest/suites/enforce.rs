//! Exclusive CPUs on a real kernel: enforced, proved, repaired.

use crate::guest::agent::{CONFIG, wait_for_answer};
use crate::guest::{
    Agent, Cgroup, Guest, Outcome, RunOwner, Scenario, Style, Suite, Task, Workload, equal, facts, http,
    machine, millis, run, secs, truepin, truepin_json, wait_until,
};
use anyhow::Context;
use nix::{errno::Errno, sys::signal::Signal};
use serde_json::Value;
use std::{fs, time::Duration};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "enforce",
    about: "exclusive CPUs: enforced by the kernel, proved by the programs, repaired by the loop",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("intruders are turned away, ten seconds are Held", partition_held).limit(120),
        Scenario::new("member: the intruder is named with its time", member_intruder).limit(120),
        Scenario::new("a detached program makes it Inconclusive", detached).limit(120),
        Scenario::new("another clock source makes it Inconclusive", clock).limit(120),
        Scenario::new("departures feed reconcile, 20 of 20", departures).limit(240),
        Scenario::new("without departures nothing wakes the loop", no_departures).limit(120),
        Scenario::new("the loop does not fight", fight).limit(120),
        Scenario::new("foreign writes are repaired and named, 20 of 20 each", foreign_writes).limit(240),
        Scenario::new("kill -9 and restart move nothing", kill_agent).limit(120),
        Scenario::new("a command's status, signals and refusals", run_command).limit(120),
        Scenario::new("run without an agent", embedded).limit(120),
        Scenario::new("an existing cgroup is assigned and put back", assign_existing).limit(120),
        Scenario::new("memory comes from the nodes of the CPUs", memory).limit(120),
        Scenario::new("one agent at a time", second_agent).limit(60),
        Scenario::new("ten owners and what the agent costs", ten_owners).limit(180),
    ],
};

/// Emulation stretches time: a kernel worker's burst of 0.5 ms takes 10 ms and more. The budget is stretched with it.
const BUDGET: &str = "[budgets]\nunbound-kthread = \"200ms/s\"\n";

/// An agent with this configuration, which must not have tables of its own behind `[budgets]`.
pub(super) fn agent(config: &str) -> anyhow::Result<Agent> {
    Agent::start(&format!("{config}\n{BUDGET}"))
}

/// Mostly asleep: under TCG at most two CPUs should be busy at once.
pub(super) fn sleepy(threads: u32) -> crate::guest::Program {
    Workload::blink(threads, millis(2), millis(40))
}

pub(super) fn text<'a>(document: &'a Value, key: &str) -> &'a str {
    document[key].as_str().unwrap_or_default()
}

pub(super) fn held(code: i32, verdict: &Value) -> Outcome {
    anyhow::ensure!(text(verdict, "verdict") == "held" && code == 0, "exit code {code}: {verdict:#}");
    equal("reasons", verdict["reasons"].as_array().map(Vec::len), Some(0))?;
    equal("lost", verdict["lost"].as_u64(), Some(0))?;
    for cpu in verdict["cpu"].as_array().context("no CPUs")? {
        for class in ["foreign_ns", "unknown_ns", "straddle_ns"] {
            equal(class, cpu[class].as_u64(), Some(0))?;
        }
    }
    Ok(())
}

/// What `isolation = "auto"` comes to on this kernel for a cgroup of somebody else's, and why.
fn auto() -> anyhow::Result<(&'static str, &'static str)> {
    if facts::exclusive_file()? {
        return Ok(("partition", "there is cpuset.cpus.exclusive"));
    }
    Ok(("member", "there is no cpuset.cpus.exclusive"))
}

/// And for a command, whose cgroup truepin makes in a slice of its own.
const COMMAND: (&str, &str) = ("partition", "the slice can be a partition");

/// The owner has the mode that it has to have on this kernel.
fn has_mode(guest: &Guest, what: &str, owner: &Value, (mode, because): (&str, &str)) -> Outcome {
    guest.expect(&format!("mode of {what}"), text(owner, "mode"), mode, because)
}

fn partition_held(guest: &mut Guest) -> Outcome {
    let _agent = agent("")?;
    let db = RunOwner::start("db", &["--cpus", "2", "--isolation", "partition"], &sleepy(2))?;
    has_mode(guest, "a command", &http("GET", "/v1/owners/run/db", None)?.1, COMMAND)?;
    equal("partition", db.cgroup().read("cpuset.cpus.partition")?, "root".to_owned())?;
    equal("owner's mask", db.task()?.allowed()?, db.cpus().clone())?;
    for cgroup in ["driver", ""] {
        let intruder = Workload::pinning(db.cpus()).comm("intruder").cgroup(cgroup).answer()?;
        equal(&format!("an intruder's call from /{cgroup}"), intruder, Err(Errno::EINVAL))?;
    }
    let (code, verdict) = db.verify(&["--for", "10s"])?;
    guest.say(format!("10 s window: {}", serde_json::to_string(&verdict["cpu"])?));
    held(code, &verdict)?;
    anyhow::ensure!(verdict["elapsed_ns"].as_u64() >= Some(10_000_000_000), "{verdict:#}");
    let owner_ns: u64 =
        verdict["cpu"].as_array().into_iter().flatten().filter_map(|c| c["owner_ns"].as_u64()).sum();
    anyhow::ensure!(owner_ns > 50_000_000, "the owner hardly ran: {verdict:#}");
    let ended = db.end()?;
    anyhow::ensure!(ended.code == 143 && ended.stderr.contains("HELD"), "{ended:?}");
    wait_until("the cgroup's removal", secs(10), || Ok(!Cgroup::at("truepin.slice/run-db").exists()))?;
    equal("the root's CPUs", Cgroup::root().cpus("cpuset.cpus.effective")?, machine::online()?)
}

fn member_intruder(guest: &mut Guest) -> Outcome {
    let _agent = agent("isolation = \"member\"")?;
    let db = RunOwner::start("db", &["--cpus", "2"], &Workload::idle())?;
    equal("mode", text(&http("GET", "/v1/owners/run/db", None)?.1, "mode"), "member")?;
    let cpu: CpuSet = db.cpus().first().into_iter().collect();
    // The pool keeps what lives in cgroups out; the root cgroup's own tasks nobody keeps out.
    equal("a pooled intruder", Workload::pinning(&cpu).cgroup("driver").answer()?, Err(Errno::EINVAL))?;
    let intruder = Workload::burn(1).comm("intruder").cgroup("").pin(&cpu).cpu_time(millis(3000)).spawn()?;
    let pid = intruder.pid();
    let done = intruder.wait()?;
    let clock = done.cpu.context("the intruder was killed")?;
    let (code, verdict) = db.verify(&[])?;
    equal("exit code", code, 1)?;
    equal("verdict", text(&verdict, "verdict"), "violated")?;
    let named = verdict["intruders"].as_array().into_iter().flatten().find(|i| i["pid"] == pid);
    let named = named.with_context(|| format!("pid {pid} is not named: {verdict:#}"))?;
    equal("comm", text(named, "comm"), "intruder")?;
    equal("cgroup", text(named, "cgroup"), "/")?;
    equal("cpu", named["cpu"].as_u64(), cpu.first().map(|c| u64::from(c.0)))?;
    let ns = named["ns"].as_u64().context("no time")?;
    let clock_ns = u64::try_from(clock.as_nanos())?;
    let off = ns.abs_diff(clock_ns);
    guest.say(format!(
        "ledger {ns} ns, the intruder's CPU clock {clock_ns} ns: off by {:.2} %",
        percent(off, clock_ns)
    ));
    anyhow::ensure!(off * 50 <= clock_ns, "off by more than 2 %: {named}");
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "for a remark")]
fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}

fn detached(_: &mut Guest) -> Outcome {
    let agent = Agent::start_env(BUDGET, &[], &[("TRUEPIN_FAULT", "detach-switch=500ms")])?;
    let db = RunOwner::start("db", &["--cpus", "2"], &sleepy(2))?;
    let (code, before) = db.verify(&["--for", "2s"])?;
    held(code, &before)?;
    let fault = agent.task();
    let signaller = std::thread::spawn(move || {
        std::thread::sleep(secs(2));
        fault.signal(Signal::SIGUSR2)
    });
    let (code, verdict) = db.verify(&["--for", "5s"])?;
    signaller.join().map_err(|_| anyhow::anyhow!("the signaller panicked"))??;
    anyhow::ensure!(
        text(&verdict, "verdict") == "inconclusive" && code == 3,
        "exit code {code}: {verdict:#}"
    );
    let reasons = verdict["reasons"].to_string();
    anyhow::ensure!(reasons.contains("detached and attached again"), "{reasons}");
    Ok(())
}

fn clock(_: &mut Guest) -> Outcome {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let _agent = agent("")?;
    let db = RunOwner::start("db", &["--cpus", "2"], &sleepy(1))?;
    let other = machine::read(&SOURCE.replace("current", "available"))?;
    let other = other.split(' ').find(|s| *s != "tsc").context("no other clock source")?.to_owned();
    fs::write(SOURCE, &other)?;
    let verdict = db.verify(&["--for", "2s"]);
    fs::write(SOURCE, "tsc")?;
    let (code, verdict) = verdict?;
    anyhow::ensure!(
        text(&verdict, "verdict") == "inconclusive" && code == 3,
        "exit code {code}: {verdict:#}"
    );
    anyhow::ensure!(verdict["reasons"].to_string().contains(&other), "{verdict:#}");
    Ok(())
}

/// Member mode, three runnable threads on two CPUs, nothing but the programs to wake the loop.
fn crowded(bpf: bool, limit: u32) -> anyhow::Result<(Agent, RunOwner)> {
    let agent = agent(&format!(
        "isolation = \"member\"\ntick = \"10min\"\n[limits]\nrepairs-per-minute = {limit}\n\
         [sources]\nbpf = {bpf}\nnotify = false\nwriters = false\n"
    ))?;
    let crowd = RunOwner::start("crowd", &["--cpus", "2"], &Workload::burn(3))?;
    Ok((agent, crowd))
}

fn widen(owner: &RunOwner) -> Outcome {
    owner.cgroup().write("cpuset.cpus", "0-15")
}

fn is_repaired(owner: &RunOwner) -> anyhow::Result<bool> {
    Ok(owner.cgroup().cpus("cpuset.cpus")? == *owner.cpus())
}

fn departures(guest: &mut Guest) -> Outcome {
    let (_agent, crowd) = crowded(true, 1000)?;
    let count = || -> anyhow::Result<u64> { Ok(crowd.verify(&[])?.1["departures"].as_u64().unwrap_or(0)) };
    let mut before = 0;
    for round in 1..=20 {
        widen(&crowd)?;
        wait_until(&format!("repair {round}"), secs(10), || is_repaired(&crowd))?;
        let after = count()?;
        anyhow::ensure!(after > before, "repair {round} came without a departure");
        before = after;
        // Departures of this round that are still to be read must not wake the loop in the next.
        std::thread::sleep(millis(300));
    }
    let (_, verdict) = crowd.verify(&[])?;
    equal("verdict", text(&verdict, "verdict"), "violated")?;
    let departures = verdict["departures"].as_u64().unwrap_or(0);
    guest.say(format!("20 of 20 repaired; {departures} departures seen"));
    anyhow::ensure!(departures >= 20, "{verdict:#}");
    Ok(())
}

fn no_departures(_: &mut Guest) -> Outcome {
    let (_agent, crowd) = crowded(false, 1000)?;
    widen(&crowd)?;
    let repaired = wait_until("a repair that must not come", secs(10), || is_repaired(&crowd));
    anyhow::ensure!(repaired.is_err(), "something else woke the loop");
    Ok(())
}

fn fight(guest: &mut Guest) -> Outcome {
    let (_agent, crowd) = crowded(true, 3)?;
    for round in 1..=3 {
        widen(&crowd)?;
        wait_until(&format!("repair {round}"), secs(10), || is_repaired(&crowd))?;
        std::thread::sleep(millis(300));
    }
    widen(&crowd)?;
    let fought = |answer: &Value| {
        let all = answer["findings"].as_array().into_iter().flatten();
        all.filter(|f| text(f, "kind") == "fight").map(|f| text(f, "text").to_owned()).next()
    };
    let status = wait_for_answer("/v1/status", secs(10), |s| fought(s).is_some())?;
    guest.say(fought(&status).unwrap_or_default());
    std::thread::sleep(secs(3));
    anyhow::ensure!(!is_repaired(&crowd)?, "it was repaired a fourth time");
    Ok(())
}

fn foreign_writes(guest: &mut Guest) -> Outcome {
    let _agent = agent("tick = \"10min\"\n[limits]\nrepairs-per-minute = 1000")?;
    let db = RunOwner::start("db", &["--cpus", "2"], &sleepy(1))?;
    for (file, value, wanted) in
        [("cpuset.cpus", "0-15", db.cpus().to_string()), ("cpuset.cpus.partition", "member", "root".into())]
    {
        let path = db.cgroup().dir().join(file);
        let mut named = 0;
        for round in 1..=20 {
            let meddler =
                Workload::writing(&path, value).comm("meddler").cgroup("driver").linger(millis(500));
            equal("the write", meddler.answer()?, Ok(()))?;
            wait_until(&format!("repair {round} of {file}"), secs(10), || {
                Ok(db.cgroup().read(file)? == wanted)
            })?;
            // The kernel's own notice of a partition's end can come before the writer's: the name may follow the repair.
            let is_named = wait_until("the writer's name", secs(5), || {
                let newest = newest_drift(file)?.with_context(|| format!("no drift of {file} was found"))?;
                Ok(text(&newest["writer"], "comm") == "meddler"
                    && text(&newest["writer"], "cgroup") == "/driver")
            });
            named += u32::from(is_named.is_ok());
        }
        guest.say(format!("{file}: 20 of 20 repaired, {named} of 20 writers named with name and cgroup"));
        equal(&format!("writers of {file} named"), named, 20)?;
    }
    let (code, verdict) = db.verify(&["--for", "2s"])?;
    held(code, &verdict)
}

fn newest_drift(file: &str) -> anyhow::Result<Option<Value>> {
    let (_, findings) = http("GET", "/v1/findings", None)?;
    let all = findings["findings"].as_array().context("findings are a list")?;
    let of_file =
        |f: &&Value| text(f, "kind") == "drift" && text(f, "text").starts_with(&format!("{file} of"));
    Ok(all.iter().rev().find(of_file).cloned())
}

fn kill_agent(guest: &mut Guest) -> Outcome {
    let mut agent = agent("")?;
    // One CPU each: the scheduler has nothing to move, so every migration is somebody's doing. The first is a partition.
    let owners = [
        RunOwner::start("part", &["--cpus", "1"], &Workload::burn(1))?,
        RunOwner::start("member", &["--cpus", "1", "--isolation", "member"], &sleepy(1))?,
    ];
    let look = || -> anyhow::Result<Vec<(String, CpuSet, u64, String)>> {
        owners
            .iter()
            .map(|o| {
                let task: Task = o.task()?;
                let state = o.cgroup().read("cpuset.cpus.partition")?;
                Ok((
                    o.owner(),
                    task.allowed()?,
                    task.migrations()?,
                    format!("{state} {}", o.cgroup().read("cpuset.cpus")?),
                ))
            })
            .collect()
    };
    let before = look()?;
    let table = |a: Value| -> Vec<(String, String)> {
        let owners = a["owners"].as_array().cloned().unwrap_or_default();
        owners.iter().map(|o| (text(o, "owner").to_owned(), text(o, "cpus").to_owned())).collect()
    };
    let listed = table(truepin_json(&["list"])?.1);
    equal("owners", listed.len(), 2)?;
    agent.kill()?;
    std::thread::sleep(secs(2));
    equal("after kill -9", look()?, before.clone())?;
    agent.start_again()?;
    std::thread::sleep(secs(2));
    equal("after the restart", look()?, before.clone())?;
    equal("the list", table(truepin_json(&["list"])?.1), listed)?;
    for owner in &owners {
        let (code, verdict) = owner.verify(&["--for", "2s"])?;
        // The member's CPU may see unbound kernel threads within the budget; nobody else.
        held(code, &verdict)?;
    }
    guest.say(format!("before, after kill -9 and after the restart: {before:?}"));
    Ok(())
}

fn run_command(_: &mut Guest) -> Outcome {
    let _agent = agent("")?;
    let code = |args: &[&str]| anyhow::Ok(run("truepin", args)?.code());
    let go = ["run", "--cpus", "1", "--"];
    let with = |rest: &[&'static str]| [&go[..], rest].concat();
    equal("true", code(&with(&["true"]))?, 0)?;
    equal("exit 7", code(&with(&["sh", "-c", "exit 7"]))?, 7)?;
    equal("killed", code(&with(&["sh", "-c", "kill -9 $$"]))?, 137)?;
    equal("not found", code(&with(&["/nonexistent"]))?, 127)?;
    equal("not executable", code(&with(&["/etc"]))?, 126)?;
    let refused = run("truepin", &["run", "--cpus", "64", "--", "true"])?;
    anyhow::ensure!(refused.code() == 125 && refused.stderr.contains("free"), "{refused}");
    let single = run("truepin", &["run", "--cpus", "5", "--numa", "single-numa-node", "--", "true"])?;
    anyhow::ensure!(single.code() == 125, "{single}");
    let (_, list) = truepin_json(&["list"])?;
    equal("owners left", list["owners"].as_array().map(Vec::len), Some(0))?;
    // The mask inside is the exclusive set, from the first instruction on.
    let inside = run(
        "truepin",
        &["run", "--cpus", "2", "--name", "m", "--", "grep", "Cpus_allowed_list", "/proc/self/status"],
    )?;
    let mask: CpuSet = inside.stdout.rsplit('\t').next().unwrap_or_default().trim().parse()?;
    equal("CPUs inside", mask.len(), 2)?;
    anyhow::ensure!(inside.stderr.contains("run/m"), "no verdict: {inside}");
    equal("usage", code(&["run", "--", "true"])?, 125)?;
    equal("usage", code(&["verify", "nonsense"])?, 2)?;
    equal("unknown owner", code(&["verify", "run/nobody"])?, 3)?;
    // A name that is in use is refused, and who has it keeps its CPUs.
    let first = RunOwner::start("twice", &["--cpus", "2"], &sleepy(1))?;
    let before = first.task()?.allowed()?;
    let second = run("truepin", &["run", "--name", "twice", "--cpus", "1", "--", "true"])?;
    anyhow::ensure!(second.code() == 125 && second.stderr.contains("another command"), "{second}");
    equal("CPUs of the first", first.task()?.allowed()?, before)?;
    equal("mask", first.task()?.allowed()?, first.cpus().clone())?;
    first.end()?;
    Ok(())
}

fn embedded(_: &mut Guest) -> Outcome {
    let nobody = run("truepin", &["list"])?;
    anyhow::ensure!(nobody.code() == 3 && nobody.stderr.contains("truepin agent"), "{nobody}");
    // Configured as an agent would be, budget and all.
    fs::create_dir_all("/etc/truepin")?;
    fs::write(CONFIG, BUDGET)?;
    let ran = run(
        "truepin",
        &["run", "--cpus", "2", "--name", "e", "--fail-on", "inconclusive", "--", "sleep", "1"],
    )?;
    anyhow::ensure!(ran.code() == 0 && ran.stderr.contains("HELD"), "{ran}");
    equal("the root's CPUs", Cgroup::root().cpus("cpuset.cpus.effective")?, machine::online()?)?;
    anyhow::ensure!(!Cgroup::at("truepin.slice/run-e").exists(), "the cgroup is still there");
    Ok(())
}

fn assign_existing(guest: &mut Guest) -> Outcome {
    let service = Cgroup::create("svc", "+cpuset")?;
    let sibling = Cgroup::create("sib", "+cpuset")?;
    sibling.write("cpuset.cpus", "0-9")?;
    let load = sleepy(1).cgroup("svc").spawn()?;
    let files = ["cpuset.cpus", "cpuset.cpus.partition", "cpuset.cpus.exclusive"];
    let files = if facts::exclusive_file()? { &files[..] } else { &files[..2] };
    let snapshot = || -> anyhow::Result<Vec<String>> {
        files.iter().flat_map(|f| [service.read(f), sibling.read(f)]).collect()
    };
    let before = snapshot()?;
    let _agent = agent("")?;
    let (code, owner) = truepin_json(&["assign", "unit/svc.service", "--cgroup", "/svc", "--cpus", "4"])?;
    equal("exit code", code, 0)?;
    has_mode(guest, "an assigned cgroup", &owner, auto()?)?;
    let cpus: CpuSet = text(&owner, "cpus").parse()?;
    equal("mask", load.task().allowed()?, cpus.clone())?;
    anyhow::ensure!(sibling.cpus("cpuset.cpus")?.is_disjoint(&cpus), "the sibling still reaches over");
    let again = truepin_json(&["assign", "unit/svc.service", "--cgroup", "/svc", "--cpus", "4"])?;
    equal("repeated", (again.0, text(&again.1, "cpus").to_owned()), (0, cpus.to_string()))?;
    let (code, verdict) = truepin_json(&["verify", "unit/svc.service", "--for", "3s"])?;
    held(code, &verdict)?;
    truepin(&["release", "--all"])?.ok()?;
    let mut after = snapshot()?;
    equal("its list at first", before[0].as_str(), "")?;
    let (list, because) = match auto()?.0 {
        "partition" => ("empty", "a partition's cpuset.cpus is not written"),
        // To the task in it that is the same.
        _ if facts::empty_refused()? => ("every CPU", "an empty list is refused where tasks are"),
        _ => ("empty", "an empty list is accepted"),
    };
    if after[0] == machine::online()?.to_string() {
        after[0] = "every CPU".into();
    }
    let seen = if after[0].is_empty() { "empty" } else { &after[0] };
    guest.expect("an empty cpuset.cpus after a release", seen, list, because)?;
    equal("the other files", &after[1..], &before[1..])?;
    equal("mask", load.task().allowed()?, machine::online()?)
}

/// What the command's own threads are allowed, from their first moment on.
fn memory(_: &mut Guest) -> Outcome {
    let _agent = agent("")?;
    let near = |nodes: &str| nodes.parse::<truepin::NodeSet>();
    let first = RunOwner::start("m1", &["--cpus", "1", "--memory", "64M"], &sleepy(1))?;
    let nodes = http("GET", "/v1/owners/run/m1", None)?.1;
    let home = near(text(&nodes, "nodes"))?;
    equal("nodes", home.len(), 1)?;
    equal("bytes by node", nodes["memory"][&home.to_string()].as_u64(), Some(64 << 20))?;
    equal("cpuset.mems", first.cgroup().read("cpuset.mems")?, home.to_string())?;
    for thread in first.task()?.threads()? {
        equal("allowed nodes", thread.mems_allowed()?, home.clone())?;
    }
    let second = ["run", "--name", "m2", "--cpus", "1", "--memory", "1T", "--", "true"];
    let refused = truepin(&second)?;
    equal("status of a refused run", refused.code(), 125)?;
    anyhow::ensure!(refused.stderr.contains("of memory on the same nodes"), "{refused}");
    // An existing cgroup's file is put back.
    let cgroup = Cgroup::create("legacy-memory", "+cpuset")?;
    let args =
        ["assign", "cgroup/legacy-memory", "--cgroup", "/legacy-memory", "--cpus", "1", "--memory", "8M"];
    truepin(&args)?.ok()?;
    equal("one node", near(&cgroup.read("cpuset.mems")?)?.len(), 1)?;
    truepin(&["release", "cgroup/legacy-memory"])?.ok()?;
    equal("as it was", cgroup.read("cpuset.mems")?, String::new())
}

fn second_agent(_: &mut Guest) -> Outcome {
    let agent = agent("")?;
    let second = run("truepin", &["agent", "--socket", "/run/truepin/second.sock"])?;
    equal("exit code", second.code(), 3)?;
    anyhow::ensure!(second.stderr.contains(&format!("pid {}", agent.task().0)), "{second}");
    Ok(())
}

fn ten_owners(guest: &mut Guest) -> Outcome {
    let _agent = agent("")?;
    let empty = http("GET", "/v1/status", None)?.1;
    let owners: Vec<RunOwner> = (0..10)
        .map(|i| {
            RunOwner::start(&format!("o{i}"), &["--cpus", "1"], &Workload::blink(1, millis(1), millis(200)))
        })
        .collect::<anyhow::Result<_>>()?;
    let all = owners.iter().fold(CpuSet::new(), |all, o| all.union(o.cpus()));
    equal("CPUs held", all.len(), 10)?;
    std::thread::sleep(Duration::from_secs(3));
    let full = http("GET", "/v1/status", None)?.1;
    let rss = |s: &Value| s["cost"]["rss_bytes"].as_u64().unwrap_or(0) / 1024;
    guest.say(format!("agent: {} KiB resident without owners, {} KiB with 10", rss(&empty), rss(&full)));
    let (code, list) = truepin_json(&["verify"])?;
    anyhow::ensure!(code == 0, "{list:#}");
    Ok(())
}
