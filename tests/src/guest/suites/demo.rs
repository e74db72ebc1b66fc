//! The demonstration: what truepin does, as a story that checks itself.

use crate::guest::agent::{TRUEPIN, http, wait_for_answer};
use crate::guest::{
    Agent, Guest, Outcome, Program, Ran, RunOwner, Scenario, Style, Suite, Workload, equal, machine, millis,
    run_for, secs, truepin_json, wait_until,
};
use anyhow::Context;
use nix::errno::Errno;
use serde_json::Value;
use std::process::Command;
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "demo",
    about: "workloads get exclusive CPUs; intruders, meddlers and a crash of the agent",
    style: Style::Story,
    scenarios: &[Scenario::new("the demonstration", story).limit(180)],
};

/// Shows a command line as it would be typed, runs it, shows what it says.
fn show(guest: &Guest, args: &[&str]) -> anyhow::Result<Ran> {
    let shown: Vec<String> =
        args.iter().map(|a| if a.contains(' ') { format!("'{a}'") } else { (*a).to_owned() }).collect();
    guest.say(format!("\n  $ truepin {}", shown.join(" ")));
    let mut command = Command::new(TRUEPIN);
    command.args(args);
    if guest.colour {
        command.env("CLICOLOR_FORCE", "1").env("TERM", "xterm");
    }
    let ran = run_for(secs(60), &mut command)?;
    for line in ran.stdout.lines().chain(ran.stderr.lines()) {
        guest.say(format!("  {line}"));
    }
    Ok(ran)
}

fn say(guest: &Guest, title: &str) {
    let (bold, plain) = if guest.colour { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    guest.say(format!("\n{bold}{title}{plain}"));
}

/// Mostly asleep, because all CPUs here share one core of the host.
fn load(threads: u32) -> Program {
    Workload::blink(threads, millis(2), millis(30))
}

fn start(guest: &Guest, name: &str, args: &[&str], threads: u32) -> anyhow::Result<RunOwner> {
    guest.say(format!("  $ truepin run --name {name} {} -- ./{name} &", args.join(" ")));
    RunOwner::start(name, args, &load(threads).comm(name))
}

fn text<'a>(document: &'a Value, key: &str) -> &'a str {
    document[key].as_str().unwrap_or_default()
}

fn story(guest: &mut Guest) -> Outcome {
    say(
        guest,
        &format!(
            "1. A machine with {} CPUs: two packages, two NUMA nodes in each, two threads a core; Linux {}.",
            machine::online()?.len(),
            machine::release()?
        ),
    );
    show(guest, &["topology"])?.ok()?;

    say(guest, "2. The agent starts; three workloads ask for CPUs of their own.");
    // Emulation stretches time: a kernel worker's burst of 0.5 ms takes 10 ms and more.
    let mut agent = Agent::start("[budgets]\nunbound-kthread = \"200ms/s\"\n")?;
    guest
        .say("\n  $ truepin agent &   # with unbound-kthread = \"200ms/s\": all 16 CPUs are emulated by one");
    let db = start(guest, "db", &["--cpus", "4", "--numa", "single-numa-node"], 4)?;
    let web = start(guest, "web", &["--cpus", "2"], 2)?;
    let batch = start(guest, "batch", &["--cpus", "2", "--isolation", "member"], 1)?;
    show(guest, &["list"])?.ok()?;
    equal("CPUs of db", db.cpus().len(), 4)?;

    say(guest, "3. A fourth one asks for more than one node has left. It is refused, with the reason.");
    let refused = show(guest, &["run", "--cpus", "6", "--numa", "single-numa-node", "--", "./hpc"])?;
    equal("exit code of the refused one", refused.code(), 125)?;

    say(guest, "4. The agent is killed with -9. Nothing moves; a new one takes over.");
    crash(guest, &mut agent, [&db, &web, &batch])?;

    say(guest, "5. An intruder wants a CPU of db, which has a partition. The kernel turns it away.");
    turned_away(guest, &db)?;

    say(
        guest,
        "6. batch is a member only: nothing keeps the root cgroup's tasks out. The intruder gets in, and is named.",
    );
    let before = intrude(guest, &batch)?;

    say(
        guest,
        "7. Somebody widens db's cpuset behind the agent's back. It is repaired, and the writer named.",
    );
    widen(guest, &db)?;

    say(guest, "8. The verdicts, from the kernel's own evidence.");
    let verdicts = show(guest, &["verify"])?;
    equal("exit code: one is violated", verdicts.code(), 1)?;
    for (owner, expected) in [("run/db", "held"), ("run/web", "held"), ("run/batch", "violated")] {
        let (_, v) = truepin_json(&["verify", owner])?;
        equal(owner, text(&v, "verdict"), expected).with_context(|| format!("{v:#}"))?;
    }

    say(guest, "9. The workloads end; each gets its last verdict, and every CPU comes back.");
    for owner in [db, web, batch] {
        let name = owner.owner();
        let ended = owner.end()?;
        let line = ended.stderr.lines().find(|l| l.starts_with("truepin: ")).unwrap_or_default();
        guest.say(format!("  {line}"));
        anyhow::ensure!(ended.code == 143 && line.contains(&name), "{ended:?}");
    }
    wait_until("all CPUs back", secs(10), || {
        Ok(crate::guest::Cgroup::root().cpus("cpuset.cpus.effective")? == machine::online()?)
    })?;
    let (_, list) = truepin_json(&["list"])?;
    equal("owners left", list["owners"].as_array().map(Vec::len), Some(0))?;
    guest.say(format!(
        "\nAll of it was checked while it ran. (The intruder in 6 had {before} on the CPU by its own clock.)"
    ));
    Ok(())
}

fn crash(guest: &Guest, agent: &mut Agent, owners: [&RunOwner; 3]) -> Outcome {
    let look = || -> anyhow::Result<Vec<String>> {
        owners.iter().map(|o| Ok(format!("{} on {}", o.owner(), o.task()?.allowed()?))).collect()
    };
    let before = look()?;
    guest.say("\n  $ kill -9 $(pidof truepin)");
    agent.kill()?;
    std::thread::sleep(secs(1));
    equal("masks without an agent", look()?, before.clone())?;
    guest.say(format!("  without an agent: {}", before.join(", ")));
    agent.start_again()?;
    equal("masks with the new agent", look()?, before.clone())?;
    guest.say(format!("  with the new one: {}", before.join(", ")));
    Ok(())
}

fn turned_away(guest: &Guest, db: &RunOwner) -> Outcome {
    let cpu: CpuSet = db.cpus().first().into_iter().collect();
    let answer = Workload::pinning(&cpu).comm("intruder").cgroup("").answer()?;
    equal("the intruder's sched_setaffinity", answer, Err(Errno::EINVAL))?;
    guest.say(format!("\n  intruder$ taskset -c {cpu} true\n  sched_setaffinity: {}", Errno::EINVAL.desc()));
    Ok(())
}

fn intrude(guest: &Guest, batch: &RunOwner) -> anyhow::Result<String> {
    let cpu: CpuSet = batch.cpus().first().into_iter().collect();
    let intruder = Workload::burn(1).comm("intruder").cgroup("").pin(&cpu).cpu_time(secs(2)).spawn()?;
    let pid = intruder.pid();
    guest.say(format!("\n  intruder$ taskset -c {cpu} ./burn-two-seconds   # pid {pid}, in the root cgroup"));
    let clock = intruder.wait()?.cpu.context("the intruder was killed")?;
    let ran = show(guest, &["verify", "run/batch"])?;
    equal("exit code: violated", ran.code(), 1)?;
    let (_, v) = truepin_json(&["verify", "run/batch"])?;
    let named = v["intruders"].as_array().into_iter().flatten().find(|i| i["pid"] == pid);
    let named = named.with_context(|| format!("pid {pid} is not named: {v:#}"))?;
    anyhow::ensure!(text(named, "comm") == "intruder" && text(named, "cgroup") == "/", "{named}");
    Ok(format!("{} ms", clock.as_millis()))
}

fn widen(guest: &Guest, db: &RunOwner) -> Outcome {
    let file = db.cgroup().dir().join("cpuset.cpus");
    guest.say(format!("\n  meddler$ echo 0-15 > {}", file.display()));
    let meddler = Workload::writing(&file, "0-15").comm("meddler").cgroup("driver").linger(millis(500));
    equal("the write", meddler.answer()?, Ok(()))?;
    let mended = |s: &Value| {
        let findings = s["findings"].as_array().cloned().unwrap_or_default();
        findings.into_iter().rev().find(|f| text(f, "kind") == "drift" && f["mended"].is_string())
    };
    let status = wait_for_answer("/v1/status", secs(10), |s| mended(s).is_some())?;
    let finding = mended(&status).context("no finding")?;
    guest.say(format!(
        "  finding {}: {}\n  mended; cpuset.cpus reads {}",
        text(&finding, "id"),
        text(&finding, "text"),
        db.cgroup().read("cpuset.cpus")?
    ));
    equal("the writer", text(&finding["writer"], "comm"), "meddler")?;
    equal("cpuset.cpus", db.cgroup().cpus("cpuset.cpus")?, db.cpus().clone())?;
    let (_, owner) = http("GET", "/v1/owners/run/db", None)?;
    equal("db", text(&owner, "cpus"), db.cpus().to_string())
}
