//! Who wrote a cgroup file: by each means that a kernel may leave, on a real kernel.
//!
//! A writer here is gone before anybody could look at it. The means are forced with `TRUEPIN_FAULT`; that the best one is
//! taken by itself is a scenario of its own.

mod unseen;

use crate::guest::{
    Agent, Cgroup, Guest, Outcome, RunOwner, Scenario, Style, Suite, Task, Workload, agent::wait_for_answer,
    equal, facts, http, machine, millis, run, secs, truepin, wait_for, wait_until,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "writers",
    about: "who wrote a file, and what the kernel did by itself, by each means",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("the best means is taken, and said", best),
        Scenario::new("fexit names who is gone at once, 20 of 20 each", |g| gone_at_once(g, "fexit"))
            .limit(240),
        Scenario::new("kprobe names who is gone at once, 20 of 20 each", |g| gone_at_once(g, "kprobe"))
            .limit(240),
        Scenario::new("fanotify has the pid of who is gone at once, 20 of 20 each", |g| {
            gone_at_once(g, "fanotify")
        })
        .limit(240),
        Scenario::new("without means all is repaired and nobody named", |g| gone_at_once(g, "none"))
            .limit(240),
        Scenario::new("fexit: a refused write names nobody", |g| refused(g, "fexit")).limit(120),
        Scenario::new("kprobe: a refused write names nobody", |g| refused(g, "kprobe")).limit(120),
        Scenario::new("fanotify: a refused write names nobody", |g| refused(g, "fanotify")).limit(120),
        Scenario::new("fexit: who reaches over a partition from a new cgroup", |g| overlap(g, "fexit"))
            .limit(120),
        Scenario::new("kprobe: who reaches over a partition from a new cgroup", |g| overlap(g, "kprobe"))
            .limit(120),
        Scenario::new("fanotify: who reaches over a partition", |g| overlap(g, "fanotify")).limit(120),
        Scenario::new("fexit: what the kernel does by itself", |g| kernels_own(g, "fexit"))
            .limit(120)
            .allow(&[LEAK]),
        Scenario::new("kprobe: what the kernel does by itself", |g| kernels_own(g, "kprobe"))
            .limit(120)
            .allow(&[LEAK]),
        Scenario::new("fanotify: what the kernel does by itself", |g| kernels_own(g, "fanotify"))
            .limit(120)
            .allow(&[LEAK]),
        Scenario::new("without means the kernel is not told from a writer", |g| kernels_own(g, "none"))
            .limit(120)
            .allow(&[LEAK]),
        Scenario::new("lost writes are counted, and nothing is concluded from them", unseen::lost)
            .limit(180)
            .allow(&[LEAK]),
        Scenario::new("kprobe: a write whose end was missed is not told as the next one", unseen::missed)
            .limit(180),
        Scenario::new(
            "more cgroups than can be watched: owners are, and the kernel is not blamed",
            unseen::crowd,
        )
        .limit(300)
        .allow(&[LEAK]),
        Scenario::new("an owner's own moves are its own business", own_moves).limit(120),
    ],
};

/// On 7.x the kernel says this when the CPUs of a root partition are back (`guest::suites` of hotplug judge it).
const LEAK: &str = "rebuild_sched_domains_locked";
const CONFIG: &str = "tick = \"10min\"\nreserved = \"0\"\n[limits]\nrepairs-per-minute = 1000\n";
/// Where writers are while they write.
const MEDDLERS: &str = "meddlers";

fn text<'a>(document: &'a Value, key: &str) -> &'a str {
    document[key].as_str().unwrap_or_default()
}

fn agent(means: &str) -> anyhow::Result<Agent> {
    let agent = Agent::start_env(CONFIG, &[], &[("TRUEPIN_FAULT", &format!("writers={means}"))])?;
    let (_, status) = http("GET", "/v1/status", None)?;
    let said = text(&status["kernel"], "writers_means").to_owned();
    let means = means.split(',').next().unwrap_or_default();
    let expected = match means {
        "fexit" | "kprobe" => format!("{means} cgroup_file_write"),
        other => other.to_owned(),
    };
    anyhow::ensure!(
        said.starts_with(&expected),
        "means {said:?}, expected {expected:?}: {}",
        status["kernel"]
    );
    Cgroup::create(MEDDLERS, "")?;
    Ok(agent)
}

fn findings() -> anyhow::Result<Vec<Value>> {
    let (_, answer) = http("GET", "/v1/findings", None)?;
    Ok(answer["findings"].as_array().context("findings are a list")?.clone())
}

fn newest_id() -> anyhow::Result<u64> {
    id_of(findings()?.last())
}

fn id_of(finding: Option<&Value>) -> anyhow::Result<u64> {
    finding.map_or(Ok(0), |f| text(f, "id").parse().with_context(|| format!("the id of {f}")))
}

/// The first finding after `id` for which `good` holds.
fn next(id: u64, what: &str, good: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    wait_for(what, secs(10), || {
        for finding in findings()? {
            if id_of(Some(&finding))? > id && good(&finding) {
                return Ok(Some(finding));
            }
        }
        Ok(None)
    })
    .with_context(|| format!("findings: {:#?}", findings().unwrap_or_default()))
}

/// A process that writes `value` to `file` and is gone: the workload that can do nothing else, or a shell in its usual
/// way. Its pid, its name, and whether the kernel took the value.
fn meddle(shell: bool, file: &Path, value: &str) -> anyhow::Result<(u32, &'static str, bool)> {
    let line = if shell {
        let to = Cgroup::at(MEDDLERS).dir().join("cgroup.procs");
        let script = format!("echo 0 > {} && echo '{value}' > {}", to.display(), file.display());
        vec!["sh".to_owned(), "-c".into(), script]
    } else {
        Workload::writing(file, value).comm("meddler").cgroup(MEDDLERS).line()?
    };
    let mut child = Command::new(&line[0])
        .args(&line[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {line:?}"))?;
    let pid = child.id();
    let status = child.wait().context("waiting for a writer")?;
    Ok((pid, if shell { "sh" } else { "meddler" }, status.success()))
}

/// `finding` names this writer, as well as `means` can.
fn names(finding: &Value, means: &str, (pid, comm): (u32, &str), value: &str) -> Outcome {
    let (writer, cause) = (&finding["writer"], &finding["cause"]);
    if means == "none" {
        equal("a writer", writer, &Value::Null)?;
        return equal("the cause", text(cause, "by"), "unknown");
    }
    equal("pid", writer["pid"].as_u64(), Some(u64::from(pid)))?;
    if means == "fanotify" {
        return equal("certain", writer["certain"].as_bool(), Some(false));
    }
    equal("certain", writer["certain"].as_bool(), Some(true))?;
    equal("name", text(writer, "comm"), comm)?;
    equal("cgroup", text(writer, "cgroup"), &*format!("/{MEDDLERS}"))?;
    equal("what it wrote", text(writer, "wrote"), value)
}

fn best(guest: &mut Guest) -> Outcome {
    let _agent = Agent::start(CONFIG)?;
    let (_, status) = http("GET", "/v1/status", None)?;
    let kernel = &status["kernel"];
    equal("means", text(kernel, "writers_means"), "fexit cgroup_file_write")?;
    guest.saw("how truepin knows who wrote a file", "fexit");
    equal("lost", kernel["writers_lost"].as_u64(), Some(0))?;
    let table = truepin(&["status"])?.ok()?.stdout;
    let line = table.lines().find(|l| l.starts_with("writers")).context("no line `writers`")?;
    guest.say(line);
    anyhow::ensure!(line.contains("fexit cgroup_file_write"), "{table}");
    Ok(())
}

/// An owner, and whether it is a partition: not every kernel gives one.
fn owner() -> anyhow::Result<(RunOwner, bool)> {
    let db = RunOwner::start("db", &["--cpus", "2"], &Workload::blink(1, millis(2), millis(100)))?;
    let partition = text(&http("GET", "/v1/owners/run/db", None)?.1, "mode") == "partition";
    Ok((db, partition))
}

fn gone_at_once(guest: &mut Guest, means: &str) -> Outcome {
    let _agent = agent(means)?;
    let (db, partition) = owner()?;
    let state = if partition { ("member", "root") } else { ("root", "member") };
    for (file, value, wanted) in [
        ("cpuset.cpus", "0-7", db.cpus().to_string()),
        ("cpuset.cpus.partition", state.0, state.1.to_owned()),
    ] {
        let path = db.cgroup().dir().join(file);
        let mut comms = Vec::new();
        for round in 1..=20 {
            let before = newest_id()?;
            let (pid, comm, taken) = meddle(round % 2 == 0, &path, value)?;
            anyhow::ensure!(taken, "round {round}: {value:?} to {file} was refused");
            let of_file =
                |f: &Value| text(f, "kind") == "drift" && text(f, "text").starts_with(&format!("{file} of"));
            // The kernel's own notice can come before the write has ended: then the name follows.
            let named = |f: &Value| of_file(f) && (means == "none" || f["writer"]["pid"].is_u64());
            let finding = next(before, &format!("round {round}: a named drift of {file}"), named)?;
            names(&finding, means, (pid, comm), value)
                .with_context(|| format!("round {round}: {finding:#}"))?;
            comms.push(text(&finding["writer"], "comm").to_owned());
            wait_until("the repair", secs(10), || Ok(db.cgroup().read(file)? == wanted))?;
            settled()?;
        }
        guest.say(format!("{means}: {file}: 20 of 20; names {}", tally(&comms)));
    }
    joined(guest, means, &db)?;
    let (_, status) = http("GET", "/v1/status", None)?;
    equal("lost", status["kernel"]["writers_lost"].as_u64(), Some(0))
}

/// Somebody puts a process into an owner's cgroup.
fn joined(guest: &Guest, means: &str, db: &RunOwner) -> Outcome {
    let victim = Workload::idle().spawn()?;
    let path = db.cgroup().dir().join("cgroup.procs");
    let mut comms = Vec::new();
    for round in 1..=20 {
        let before = newest_id()?;
        let value = victim.pid().to_string();
        let (pid, comm, taken) = meddle(round % 2 == 0, &path, &value)?;
        anyhow::ensure!(taken, "round {round}: the move was refused");
        equal("its cgroup", victim.task().cgroup()?, db.cgroup().path().to_owned())?;
        if means == "none" {
            sleep(millis(50));
        } else {
            let finding =
                next(before, &format!("round {round}: a finding `joined`"), |f| text(f, "kind") == "joined")?;
            names(&finding, means, (pid, comm), &value)
                .with_context(|| format!("round {round}: {finding:#}"))?;
            if means != "fanotify" {
                anyhow::ensure!(
                    text(&finding, "text").contains(&format!("process {value} was moved into")),
                    "{finding}"
                );
            }
            comms.push(text(&finding["writer"], "comm").to_owned());
        }
        Cgroup::at("driver").add(victim.pid())?;
    }
    if means == "none" {
        let said = findings()?.iter().filter(|f| text(f, "kind") == "joined").count();
        return equal("findings `joined` without means", said, 0);
    }
    guest.say(format!("{means}: cgroup.procs: 20 of 20; names {}", tally(&comms)));
    Ok(())
}

fn tally(names: &[String]) -> String {
    let mut all = names.to_vec();
    all.sort();
    let mut counts: Vec<(String, usize)> = Vec::new();
    for name in all {
        match counts.last_mut() {
            Some((last, n)) if *last == name => *n += 1,
            _ => counts.push((name, 1)),
        }
    }
    counts.iter().map(|(name, n)| format!("{name} x {n}")).collect::<Vec<_>>().join(", ")
}

/// Kernel and table agree again.
fn settled() -> Outcome {
    wait_for_answer("/v1/status", secs(10), |s| s["settled"] == true).map(drop)
}

/// What the kernel refuses changes nothing, and whoever tried is not named for what another does right after.
fn refused(guest: &mut Guest, means: &str) -> Outcome {
    let _agent = agent(means)?;
    let (db, partition) = owner()?;
    let dir = db.cgroup().dir().to_owned();
    settled()?;
    let before = findings()?;
    for (file, value) in
        [("cpuset.cpus", "0-9999"), ("cpuset.cpus.partition", "nonsense"), ("cgroup.procs", "999999")]
    {
        for shell in [false, true] {
            let (_, _, taken) = meddle(shell, &dir.join(file), value)?;
            anyhow::ensure!(!taken, "{value:?} to {file} was taken");
        }
    }
    sleep(secs(2));
    equal("findings after refused writes", findings()?, before)?;
    let state = if partition { "member" } else { "root" };
    for (file, value, bad) in [("cpuset.cpus", "0-7", "0-9999"), ("cpuset.cpus.partition", state, "nonsense")]
    {
        for round in 1..=5 {
            let before = newest_id()?;
            let (liar, _, taken) = meddle(false, &dir.join(file), bad)?;
            anyhow::ensure!(!taken, "{bad:?} to {file} was taken");
            let (pid, comm, taken) = meddle(true, &dir.join(file), value)?;
            anyhow::ensure!(taken, "{value:?} to {file} was refused");
            let (again, _, taken) = meddle(false, &dir.join(file), bad)?;
            anyhow::ensure!(!taken, "{bad:?} to {file} was taken");
            let finding =
                next(before, "a named drift", |f| text(f, "kind") == "drift" && f["writer"]["pid"].is_u64())?;
            names(&finding, means, (pid, comm), value)
                .with_context(|| format!("round {round}, refused were {liar} and {again}: {finding:#}"))?;
            settled()?;
        }
    }
    guest.say(format!(
        "{means}: 6 refused writes led to nothing, 10 of 10 changes between refused ones are named"
    ));
    Ok(())
}

/// What lives in a partition.
enum Inside {
    Assigned(#[expect(dead_code, reason = "only held")] Workload),
    Run(#[expect(dead_code, reason = "only held")] RunOwner),
}

/// A partition with a task: a child of the root, so that its siblings matter; where only what truepin starts is one, a
/// command's.
fn partition(how: &[&str]) -> anyhow::Result<(Cgroup, Inside, CpuSet)> {
    let cgroup = Cgroup::create("svc", "+cpuset")?;
    let blink = Workload::blink(1, millis(2), millis(100));
    let load = blink.clone().cgroup("svc").spawn()?;
    let cpus = ["--cpus", "2"];
    let args = [&["assign", "cgroup/svc", "--cgroup", "/svc"], &cpus[..], how].concat();
    let assigned = run("truepin", &args)?;
    let (status, owner) = http("GET", "/v1/owners/cgroup/svc", None)?;
    if assigned.code() == 0 && status == 200 && text(&owner, "mode") == "partition" {
        settled()?;
        return Ok((cgroup, Inside::Assigned(load), text(&owner, "cpus").parse()?));
    }
    if status == 200 {
        truepin(&["release", "cgroup/svc"])?.ok()?;
    }
    drop(load);
    let owner = RunOwner::start("svc", &[&cpus[..], how].concat(), &blink)?;
    let mode = text(&http("GET", "/v1/owners/run/svc", None)?.1, "mode").to_owned();
    anyhow::ensure!(mode == "partition", "mode {mode}; assigned: {assigned}");
    settled()?;
    let (cgroup, cpus) = (owner.cgroup(), owner.cpus().clone());
    Ok((cgroup, Inside::Run(owner), cpus))
}

/// A cgroup that was made a moment ago, and then one that is known, is written by somebody who is gone at once: on a strict
/// kernel the partition beside it ends, and the writer is named for that too.
fn overlap(guest: &mut Guest, means: &str) -> Outcome {
    let strict = facts::overlap_ends()?;
    let agent = agent(means)?;
    let (svc, _inside, cpus) = partition(&[])?;
    let mut ended = 0;
    for round in 1..=6 {
        let name = format!("sib{round}");
        let file = Cgroup::at(&name).dir().join("cpuset.cpus");
        let before = newest_id()?;
        // fanotify marks what is there: a new cgroup first has to be seen.
        let known = means == "fanotify" || round % 2 == 0;
        if known {
            Cgroup::create(&name, "")?;
            settled()?;
            sleep(millis(500));
        }
        let script = format!(
            "echo 0 > {}/cgroup.procs; mkdir -p {}; echo {cpus} > {}",
            Cgroup::at(MEDDLERS).dir().display(),
            Cgroup::at(&name).dir().display(),
            file.display()
        );
        // Stopped, so that it cannot read a new one before that has been written: then it would be known.
        if !known {
            agent.task().signal(Signal::SIGSTOP)?;
        }
        let ran =
            Command::new("sh").args(["-c", &script]).spawn().and_then(|mut sh| Ok((sh.id(), sh.wait()?)));
        agent.task().signal(Signal::SIGCONT)?;
        let (pid, end) = ran.context("starting sh")?;
        anyhow::ensure!(end.success(), "round {round}: {script:?} failed");
        wait_until("the sibling's CPUs are taken back", secs(10), || {
            Ok(Cgroup::at(&name).cpus("cpuset.cpus")?.is_disjoint(&cpus))
        })?;
        settled()?;
        sleep(millis(1500));
        let all: Vec<Value> =
            findings()?.into_iter().filter(|f| id_of(Some(f)).is_ok_and(|id| id > before)).collect();
        let of = |file: &str| {
            all.iter()
                .filter(|f| text(f, "kind") == "drift" && text(f, "text").starts_with(file))
                .collect::<Vec<_>>()
        };
        // A list of a cgroup that was not there before is no drift; one of a cgroup that was read before is.
        let lists = of(&format!("cpuset.cpus of /{name}"));
        equal(
            &format!("round {round}: drifts of the sibling's list in {all:#?}"),
            lists.len(),
            usize::from(known),
        )?;
        let states = of("cpuset.cpus.partition of ");
        for finding in lists.iter().chain(&states) {
            names(finding, means, (pid, "sh"), &cpus.to_string()).with_context(|| format!("{finding:#}"))?;
        }
        for finding in &states {
            equal("how", text(&finding["cause"], "by"), "through")?;
            equal("through", text(&finding["cause"], "file"), &*format!("/{name}/cpuset.cpus"))?;
            if round < 3 {
                guest.say(text(finding, "text"));
            }
        }
        ended += u32::from(!states.is_empty());
        equal("the partition", svc.read("cpuset.cpus.partition")?, "root".to_owned())?;
    }
    // Kernels up to 6.18 end a partition whose sibling reaches over it, newer ones trim the sibling.
    guest.say(format!("{means}: {ended} of 6 overlaps ended the partition, and each was named for it"));
    equal("partitions that ended", ended, if strict { 6 } else { 0 })
}

/// All CPUs of a partition go offline; what the kernel makes of that nobody wrote.
fn kernels_own(guest: &mut Guest, means: &str) -> Outcome {
    let agent = agent(means)?;
    // 6.12 does not let the last CPU of a root partition go, but that of an isolated one.
    let (svc, _inside, cpus) = partition(&["--isolation", "isolated"])?;
    let before = newest_id()?;
    // Stopped, so that it cannot begin to mend before this has been read.
    agent.task().signal(Signal::SIGSTOP)?;
    let off: anyhow::Result<Vec<()>> = cpus.iter().map(|cpu| machine::set_online(cpu, false)).collect();
    let state = svc.read("cpuset.cpus.partition");
    agent.task().signal(Signal::SIGCONT)?;
    off?;
    let state = state?;
    guest.say(format!("with CPUs {cpus} offline the partition reads {state:?}"));
    anyhow::ensure!(state.starts_with("isolated invalid"), "the partition reads {state:?}");
    let invalid = "the partition read \"isolated invalid";
    let lost = |f: &Value| text(f, "kind") == "set" && text(f, "text").contains(invalid);
    let by = if means == "none" { "unknown" } else { "kernel" };
    let finding =
        next(before, &format!("a lost partition by {by}"), |f| lost(f) && text(&f["cause"], "by") == by)?;
    guest.say(text(&finding, "text"));
    equal("a writer", &finding["writer"], &Value::Null)?;
    if by == "kernel" {
        // The partition ends a moment before its last CPU is offline to all the world.
        let why = text(&finding["cause"], "why");
        anyhow::ensure!(why.contains("offline"), "why: {why:?}");
    }
    for cpu in cpus.iter() {
        machine::set_online(cpu, true)?;
    }
    Ok(())
}

/// A command that makes cgroups below its own and moves tasks there is nobody's concern.
fn own_moves(_: &mut Guest) -> Outcome {
    let _agent = agent("fexit")?;
    let script = "cg=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup); mkdir $cg/inner; \
                  sleep 60 & pid=$!; i=0; while [ $i -lt 3 ]; do echo $pid > $cg/inner/cgroup.procs; \
                  echo $pid > $cg/cgroup.procs; sleep 0.3; i=$((i+1)); done; echo $$ > $cg/inner/cgroup.procs; wait";
    let mut run = Command::new("truepin")
        .args(["run", "--name", "shell", "--cpus", "1", "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("starting truepin run")?;
    let inner = Cgroup::at("truepin.slice/run-shell/inner");
    let moved = wait_until("the shell below its own cgroup", secs(20), || {
        if !inner.exists() {
            return Ok(false);
        }
        Ok(matches!(inner.procs()?[..], [pid] if Task(pid).comm()? == "sh"))
    });
    sleep(millis(500));
    let said = findings();
    let _ = run.kill();
    run.wait()?;
    moved?;
    let joined: Vec<Value> = said?.into_iter().filter(|f| text(f, "kind") == "joined").collect();
    anyhow::ensure!(joined.is_empty(), "{joined:#?}");
    Ok(())
}
