//! Tasks that are not as one thinks of them: verdict, findings and names stay right, and the observer finds nothing.

use super::enforce::{agent, held, sleepy, text};
use crate::guest::{
    Agent, Cgroup, Guest, Outcome, Program, Promise, RunOwner, Scenario, Style, Suite, Task, When, Workload,
    agent::wait_for_answer, equal, facts, http, machine, millis, observe, secs, truepin, truepin_json,
    wait_for, wait_until,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "odd",
    about: "odd tasks: threads in sets of their own, pinned, asleep, cloned, dead, reborn, short-lived, many",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("threads in child cgroups with sets of their own", threaded).limit(120),
        Scenario::new("tasks that pin themselves", pinned).limit(120),
        Scenario::new("sleeping tasks whose last CPU is another's", asleep).limit(120),
        Scenario::new("clone into an owner's cgroup and out of it", cloned).limit(120),
        Scenario::new("moved out of an owner's cgroup", moved_out).limit(120),
        Scenario::new("zombies, and a process whose first thread has ended", dead).limit(120),
        Scenario::new("a pid that was an intruder's is an owner's task", reborn).limit(180),
        Scenario::new("short-lived tasks arrive while sets change", arriving).limit(240),
        Scenario::new("a thousand threads", thousand).limit(240),
    ],
};

/// A service in a cgroup of its own, as others make it.
const SVC: &str = "svc";
const OWNER: &str = "unit/svc.service";

/// Two CPUs as the kernel gives them best, and as a member.
const ISOLATIONS: [&[&str]; 2] = [&["--cpus", "2"], &["--cpus", "2", "--isolation", "member"]];

/// `truepin assign` for [`SVC`]; the set.
fn assign(cpus: &str) -> anyhow::Result<CpuSet> {
    let (code, owner) = truepin_json(&["assign", OWNER, "--cgroup", "/svc", "--cpus", cpus])?;
    anyhow::ensure!(code == 0, "{owner:#}");
    Ok(text(&owner, "cpus").parse()?)
}

fn service(program: &Program) -> anyhow::Result<(Cgroup, Workload)> {
    let cgroup = Cgroup::create(SVC, "+cpuset")?;
    Ok((cgroup, program.clone().cgroup(SVC).spawn()?))
}

/// Nothing to find for the observer, neither before the agent is asked nor after it; held over `window`, and nothing found.
/// The verdict.
fn in_order(owner: &str, window: &str) -> anyhow::Result<Value> {
    observed()?;
    let (code, verdict) = truepin_json(&["verify", owner, "--for", window])?;
    held(code, &verdict)?;
    equal("departures", verdict["departures"].as_u64(), Some(0))?;
    equal("findings", findings()?, Vec::<String>::new())?;
    observed()?;
    Ok(verdict)
}

/// What was found, in words, except what is only told for information.
fn findings() -> anyhow::Result<Vec<String>> {
    let (_, answer) = http("GET", "/v1/findings", None)?;
    let all = answer["findings"].as_array().context("findings are a list")?;
    Ok(all.iter().filter(|f| text(f, "kind") != "note").map(|f| text(f, "text").to_owned()).collect())
}

fn observed() -> Outcome {
    let status = wait_for_answer("/v1/status", secs(20), |s| s["settled"] == true)?;
    let reserved: CpuSet = text(&status["pools"], "reserved").parse()?;
    observe(Promise::recorded, &reserved, When::Settled).map(drop)
}

fn owner_ns(verdict: &Value) -> u64 {
    verdict["cpu"].as_array().into_iter().flatten().filter_map(|c| c["owner_ns"].as_u64()).sum()
}

fn masks(task: Task) -> anyhow::Result<Vec<CpuSet>> {
    task.threads()?.into_iter().map(Task::allowed).collect()
}

fn threaded(_: &mut Guest) -> Outcome {
    let (svc, load) = service(&sleepy(3))?;
    let _agent = agent("")?;
    let cpus = assign("4")?;
    // One thread on the first CPU, one on the last two, one where all are.
    let all: Vec<_> = cpus.iter().collect();
    let threads = load.task().threads()?;
    let sets: [CpuSet; 2] = [all[..1].iter().copied().collect(), all[2..].iter().copied().collect()];
    for (n, set) in sets.iter().enumerate() {
        let child = Cgroup::create(&format!("{SVC}/t{n}"), "")?;
        child.write("cgroup.type", "threaded")?;
        svc.write("cgroup.subtree_control", "+cpuset")?;
        child.write("cpuset.cpus", &set.to_string())?;
        child.write("cgroup.threads", &threads[n + 1].0.to_string())?;
    }
    equal("the kind of the owner's cgroup", svc.read("cgroup.type")?, "domain threaded".to_owned())?;
    equal("masks", masks(load.task())?, vec![cpus.clone(), sets[0].clone(), sets[1].clone()])?;
    let verdict = in_order(OWNER, "3s")?;
    anyhow::ensure!(owner_ns(&verdict) > 50_000_000, "the threads hardly ran: {verdict:#}");
    // A threaded cgroup is no place for processes, and so none for an owner.
    let refused = truepin(&["assign", "unit/t", "--cgroup", "/svc/t0", "--cpus", "1"])?;
    anyhow::ensure!(refused.code() == 1, "{refused}");
    // Sets of children that lie outside of what the owner gets: they have all of it.
    truepin(&["release", OWNER])?.ok()?;
    let other = machine::online()?.difference(&cpus);
    Cgroup::at("svc/t0").write("cpuset.cpus", &other.to_string())?;
    equal("set", assign("4")?, cpus.clone())?;
    equal("masks", masks(load.task())?, vec![cpus.clone(), cpus, sets[1].clone()])?;
    in_order(OWNER, "2s").map(drop)
}

fn pinned(guest: &mut Guest) -> Outcome {
    let remembered = facts::remembers_pins()?;
    for isolation in ISOLATIONS {
        let agent = agent("tick = \"10min\"\n[limits]\nrepairs-per-minute = 1000")?;
        let db = RunOwner::start("db", isolation, &sleepy(2))?;
        let own: CpuSet = db.cpus().first().into_iter().collect();
        let threads =
            wait_for("both threads", secs(10), || Ok(Some(db.task()?.threads()?).filter(|t| t.len() == 2)))?;
        threads[1].set_affinity(&own)?;
        let verdict = in_order("run/db", "2s")?;
        equal("mask", threads[1].allowed()?, own.clone())?;
        anyhow::ensure!(owner_ns(&verdict) > 0, "{verdict:#}");
        // Its set is taken from below it, and comes back.
        let other = db.cpus().difference(&own);
        let cgroup = db.cgroup();
        let member = cgroup.read("cpuset.cpus.partition")? == "member";
        let (file, value) = if member {
            ("cpuset.cpus", other.to_string())
        } else {
            ("cpuset.cpus.partition", "member".into())
        };
        let good = cgroup.read(file)?;
        // Stopped, so that what the write alone leaves can be read.
        agent.task().signal(Signal::SIGSTOP)?;
        cgroup.write(file, &value)?;
        let left = cgroup.cpus("cpuset.cpus.effective")?;
        agent.task().signal(Signal::SIGCONT)?;
        wait_until("repair", secs(10), || Ok(cgroup.read(file)? == good))?;
        observed()?;
        // Masks are only touched where the set changes: 6.1 leaves a partition that ends the set it had.
        guest.say(format!("{value:?} to {file} left it {left}; masks are remembered: {remembered}"));
        let expected = if remembered || left == *db.cpus() { own } else { db.cpus().clone() };
        equal("the other thread's mask", threads[0].allowed()?, db.cpus().clone())?;
        equal("mask after the repair", threads[1].allowed()?, expected)?;
        let found = findings()?;
        guest.say(found.join("\n"));
        // Of its set and of the file that was written, and of no task.
        let known = |f: &String| f.starts_with("run/db: ") || f.starts_with("cpuset.cpus");
        anyhow::ensure!(found.iter().all(|f| known(f) && !f.contains("its task")), "{found:?}");
        let (code, verdict) = db.verify(&["--for", "2s"])?;
        held(code, &verdict)?;
        db.end()?;
    }
    Ok(())
}

fn asleep(guest: &mut Guest) -> Outcome {
    let online = machine::online()?;
    let far: CpuSet = online.last().into_iter().collect();
    let (_, load) = service(&sleepy(4).pin(&far))?;
    let task = load.task();
    wait_until("all on one CPU", secs(10), || {
        let on: CpuSet = task.threads()?.iter().map(|t| t.last_cpu()).collect::<Result<_, _>>()?;
        Ok(on == far)
    })?;
    task.signal(Signal::SIGSTOP)?;
    wait_until("all stopped", secs(10), || {
        task.threads()?.iter().try_fold(true, |all, t| Ok(all && t.state()? == 'T'))
    })?;
    for thread in task.threads()? {
        thread.set_affinity(&online)?;
    }
    let _agent = agent("")?;
    let cpus = assign("2")?;
    equal("CPUs that are the far one", cpus.intersection(&far), CpuSet::new())?;
    in_order(OWNER, "2s")?;
    for thread in task.threads()? {
        equal("mask", thread.allowed()?, cpus.clone())?;
        equal("last CPU of a stopped thread", far.contains(thread.last_cpu()?), true)?;
    }
    task.signal(Signal::SIGCONT)?;
    wait_until("all within the set", secs(10), || {
        let on: CpuSet = task.threads()?.iter().map(|t| t.last_cpu()).collect::<Result<_, _>>()?;
        Ok(on.is_subset(&cpus))
    })?;
    // From the start on, the way back to work included.
    let (code, verdict) = truepin_json(&["verify", OWNER])?;
    held(code, &verdict)?;
    guest.say(format!("{} migrations, 0 departures", verdict["migrations"]));
    anyhow::ensure!(verdict["migrations"].as_u64() >= Some(1), "they did not move: {verdict:#}");
    in_order(OWNER, "2s").map(drop)
}

fn cloned(_: &mut Guest) -> Outcome {
    for isolation in ISOLATIONS {
        let _agent = agent("")?;
        // Idle itself, so that what runs there is the child.
        let db = RunOwner::start("db", isolation, &Workload::idle())?;
        let into = db.cgroup().path().to_owned();
        let load = sleepy(2).comm("cloned").born_in(&into).spawn()?;
        let child = load.child()?;
        equal("cgroup", child.cgroup()?, into)?;
        equal("masks", masks(child)?, vec![db.cpus().clone(); 2])?;
        let verdict = in_order("run/db", "3s")?;
        anyhow::ensure!(owner_ns(&verdict) > 50_000_000, "the child hardly ran: {verdict:#}");
        equal("intruders", named(&verdict, "cloned"), 0)?;
        drop(load);

        // And the other way: born among the others, on none of the owner's CPUs, though its parent is there.
        let out = sleepy(2).comm("out").born_in("driver");
        let other = RunOwner::start("other", isolation, &out)?;
        let child = other.task()?.children()?.first().copied().context("no child")?;
        equal("cgroup", child.cgroup()?, "driver".to_owned())?;
        anyhow::ensure!(child.allowed()?.is_disjoint(other.cpus()), "it may use {}", child.allowed()?);
        let verdict = in_order("run/other", "3s")?;
        equal("intruders", named(&verdict, "out"), 0)?;
        other.end()?;
        db.end()?;
    }
    Ok(())
}

/// Whoever is moved out of its owner's cgroup is told, with who did it; asleep it leaves the verdict open, at work it is a
/// departure. Moves below the owner's cgroup are its own business.
fn moved_out(guest: &mut Guest) -> Outcome {
    let (svc, busy) = service(&Workload::burn(1).comm("busy"))?;
    let idle = Workload::idle().comm("idle").cgroup(SVC).spawn()?;
    let _agent = agent("")?;
    assign("2")?;
    let (inner, elsewhere) = (svc.child("inner"), Cgroup::create("elsewhere", "")?);
    Cgroup::create(inner.path(), "")?;
    for to in [&inner, &svc] {
        to.add(idle.pid())?;
    }
    // As long as the agent has not heard of it there is no finding; the counts are there at once.
    let judged = |means: &str, code: i32, moved: u64| -> anyhow::Result<Value> {
        let (found, verdict) = truepin_json(&["verify", OWNER])?;
        equal("exit code", found, code).with_context(|| format!("{means}: {verdict:#}"))?;
        equal("moved out", verdict["moved_out"].as_u64(), Some(moved))?;
        Ok(verdict)
    };
    let verdict = judged("moved below its cgroup", 0, 0)?;
    let means = verdict["means"].as_array().into_iter().flatten().filter_map(Value::as_str);
    anyhow::ensure!(means.clone().any(|m| m.contains("cgroup_attach_task")), "{verdict:#}");
    let told = |pid: i32| -> anyhow::Result<Value> {
        wait_for("a finding", secs(10), || {
            let (_, answer) = http("GET", "/v1/findings", None)?;
            let mut all = answer["findings"].as_array().into_iter().flatten();
            let its = format!("process {pid} (");
            Ok(all.find(|f| text(f, "kind") == "moved-out" && text(f, "text").contains(&its)).cloned())
        })
    };
    elsewhere.add(idle.pid())?;
    let verdict = judged("asleep", 3, 1)?;
    equal("departures", verdict["departures"].as_u64(), Some(0))?;
    let finding = told(idle.pid())?;
    equal("writer", finding["writer"]["pid"].as_u64(), Some(u64::from(std::process::id())))?;
    elsewhere.add(busy.pid())?;
    let verdict = judged("at work", 1, 2)?;
    anyhow::ensure!(verdict["departures"].as_u64() > Some(0), "{verdict:#}");
    for finding in [finding, told(busy.pid())?] {
        anyhow::ensure!(text(&finding, "text").contains("into /elsewhere"), "{finding:#}");
        guest.say(text(&finding, "text"));
    }
    truepin(&["release", OWNER])?.ok()?;
    Ok(())
}

/// Entries of that name among those who were there.
fn named(verdict: &Value, comm: &str) -> usize {
    verdict["intruders"].as_array().into_iter().flatten().filter(|i| text(i, "comm") == comm).count()
}

fn dead(_: &mut Guest) -> Outcome {
    let (svc, load) = service(&sleepy(3).zombies(5).leaderless())?;
    wait_until("dead children and a dead first thread", secs(10), || {
        let children = load.task().children()?;
        Ok(load.task().state()? == 'Z' && children.len() == 5 && children.iter().all(|c| !c.is_alive()))
    })?;
    equal("processes", svc.procs()?, vec![load.pid()])?;
    let _agent = agent("")?;
    let cpus = assign("2")?;
    let living = || -> anyhow::Result<Vec<Task>> {
        Ok(load.task().threads()?.into_iter().filter(|t| t.is_alive()).collect())
    };
    equal("threads that live", living()?.len(), 2)?;
    for thread in living()? {
        equal("mask", thread.allowed()?, cpus.clone())?;
    }
    let verdict = in_order(OWNER, "3s")?;
    anyhow::ensure!(owner_ns(&verdict) > 50_000_000, "the threads hardly ran: {verdict:#}");
    truepin(&["release", OWNER])?.ok()?;

    // A command that leaves its dead behind is gone with them.
    let run = RunOwner::start("db", &["--cpus", "2"], &sleepy(2).zombies(5))?;
    in_order("run/db", "2s")?;
    equal("exit code", run.end()?.code, 143)?;
    wait_until("the owner's end", secs(10), || {
        let (_, list) = truepin_json(&["list"])?;
        Ok(list["owners"].as_array().is_some_and(Vec::is_empty)
            && !Cgroup::at("truepin.slice/run-db").exists())
    })
}

fn reborn(guest: &mut Guest) -> Outcome {
    let _agent = agent("isolation = \"member\"")?;
    let db = RunOwner::start("db", &["--cpus", "2"], &Workload::idle())?;
    let into = db.cgroup().path().to_owned();
    let cpu: CpuSet = db.cpus().first().into_iter().collect();
    let intrude = |comm: &str| Workload::burn(1).comm(comm).cgroup("").pin(&cpu).cpu_time(millis(500));
    let entries = |pid: i32| -> anyhow::Result<Vec<(String, u64)>> {
        let all = db.verify(&[])?.1["intruders"].as_array().cloned().context("no intruders")?;
        let of_pid = all.iter().filter(|i| i["pid"] == pid);
        Ok(of_pid.map(|i| (text(i, "comm").to_owned(), i["ns"].as_u64().unwrap_or(0))).collect())
    };

    // First an intruder's.
    let first = intrude("first").spawn()?;
    let pid = first.pid();
    first.wait()?;
    let before = entries(pid)?;
    equal("who was there", before.iter().map(|(comm, _)| comm.as_str()).collect::<Vec<_>>(), vec!["first"])?;

    // Then an owner's task's.
    let second = sleepy(1).comm("second").born_in(&into).born_as(pid).pin(&cpu).spawn()?;
    equal("pid", second.child()?.0, pid)?;
    let (code, verdict) = db.verify(&["--for", "3s"])?;
    held(code, &verdict)?;
    anyhow::ensure!(owner_ns(&verdict) > 50_000_000, "the owner hardly ran: {verdict:#}");
    equal("entries of that pid", entries(pid)?, before.clone())?;
    second.child()?.signal(Signal::SIGKILL)?;
    second.wait()?;

    // Then another intruder's.
    let third = intrude("third").born_as(pid).spawn()?;
    third.wait()?;
    let after = entries(pid)?;
    guest.say(format!("entries of pid {pid}: {after:?}"));
    let names: Vec<&str> = after.iter().map(|(comm, _)| comm.as_str()).collect();
    anyhow::ensure!(names.len() == 2 && names.contains(&"first") && names.contains(&"third"), "{after:?}");
    anyhow::ensure!(after.contains(&before[0]), "the first one's time changed: {before:?}, {after:?}");
    for (_, ns) in after {
        anyhow::ensure!((490_000_000..700_000_000).contains(&ns), "{ns} ns of 500 ms");
    }
    observed()
}

fn arriving(guest: &mut Guest) -> Outcome {
    const ROUNDS: usize = 6;
    let (svc, bomb) = service(&Workload::bomb(millis(10)).comm("inside"))?;
    let _agent = agent("")?;
    let mover = Workload::bomb(millis(10)).comm("outside").moving_to(SVC).spawn()?;
    Cgroup::create("other", "+cpuset")?;
    for round in 0..ROUNDS {
        // Two sizes in turn, so that the set is not the one of the last time.
        let cpus = assign(if round % 2 == 0 { "2" } else { "4" })?;
        observed().with_context(|| format!("round {round}"))?;
        let (code, owner) = truepin_json(&["assign", "unit/other", "--cgroup", "/other", "--cpus", "1"])?;
        anyhow::ensure!(code == 0, "{owner:#}");
        observed().with_context(|| format!("round {round}, with another owner"))?;
        equal("the set", svc.cpus("cpuset.cpus.effective")?, cpus)?;
        if round + 1 < ROUNDS {
            truepin(&["release", if round % 3 == 0 { "--all" } else { OWNER }])?.ok()?;
            truepin(&["release", "--all"])?.ok()?;
        }
    }
    anyhow::ensure!(bomb.task().is_alive() && mover.task().is_alive(), "no task arrives any more");
    let verdict = in_order(OWNER, "3s")?;
    let (own, window) = (owner_ns(&verdict), verdict["elapsed_ns"].as_u64().unwrap_or(0));
    guest.say(format!(
        "{ROUNDS} rounds; then {} ms of the owner on 4 CPUs in {} ms",
        own / 1_000_000,
        window / 1_000_000
    ));
    anyhow::ensure!(owner_ns(&verdict) > 50_000_000, "the tasks hardly ran: {verdict:#}");
    Ok(())
}

fn thousand(guest: &mut Guest) -> Outcome {
    const THREADS: u32 = 1000;
    // Each wakes every 5 s: 200 wake-ups a second.
    let (svc, load) = service(&Workload::blink(THREADS, millis(0), secs(5)))?;
    let agent: Agent = agent("tick = \"10min\"")?;
    let before = agent.task().cpu_time()?;
    let cpus = assign("4")?;
    let all_there = || -> Outcome {
        let masks = masks(load.task())?;
        equal("threads", masks.len(), THREADS as usize)?;
        equal("threads with another mask", masks.iter().filter(|m| **m != cpus).count(), 0)
    };
    all_there()?;
    let verdict = in_order(OWNER, "5s")?;
    let used = agent.task().cpu_time()?.saturating_sub(before);
    guest.say(format!("{} migrations; the agent used {} ms", verdict["migrations"], used.as_millis()));
    anyhow::ensure!(verdict["migrations"].as_u64() > Some(0) || owner_ns(&verdict) > 0, "{verdict:#}");
    // Lost and given back, all of them.
    let member = svc.read("cpuset.cpus.partition")? == "member";
    let (file, value) = if member { ("cpuset.cpus", "0-7") } else { ("cpuset.cpus.partition", "member") };
    let good = svc.read(file)?;
    svc.write(file, value)?;
    wait_until("repair", secs(20), || Ok(svc.read(file)? == good))?;
    observed()?;
    all_there()?;
    truepin(&["release", OWNER])?.ok()?;
    let masks = masks(load.task())?;
    equal("threads with every CPU", masks.iter().filter(|m| **m == cpus).count(), 0)
}
