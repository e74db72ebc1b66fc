//! Writes that are not seen: what is said then, and that nothing false is.

use super::{
    MEDDLERS, agent, findings, id_of, meddle, names, newest_id, next, owner, partition, settled, text,
};
use crate::guest::{
    Cgroup, Guest, Outcome, RunOwner, Workload, agent::wait_for_answer, equal, http, machine, millis,
    run_for, secs, truepin,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{fs, process::Command, thread::sleep};

/// The agent is stopped while more is written than the ring holds.
pub(super) fn lost(guest: &mut Guest) -> Outcome {
    let agent = agent("fexit")?;
    let (db, _) = owner()?;
    settled()?;
    let before = newest_id()?;
    agent.task().signal(Signal::SIGSTOP)?;
    let file = db.cgroup().dir().join("cpuset.cpus");
    let script = format!(
        "i=0; while [ $i -lt 600 ]; do echo {} > {}; i=$((i+1)); done; echo 0-7 > {1}",
        db.cpus(),
        file.display()
    );
    let flood = run_for(secs(60), Command::new("sh").args(["-c", &script]));
    agent.task().signal(Signal::SIGCONT)?;
    flood?.ok()?;
    let status = wait_for_answer("/v1/status", secs(20), |s| s["kernel"]["writers_lost"].as_u64() > Some(0))?;
    let lost = status["kernel"]["writers_lost"].as_u64().unwrap_or(0);
    let finding = next(before, "a drift", |f| text(f, "kind") == "drift")?;
    guest.say(format!("601 writes while the agent stood still: {lost} lost; {}", text(&finding, "text")));
    anyhow::ensure!((200..601).contains(&lost), "{lost} lost of 601");
    let table = truepin(&["status"])?.ok()?.stdout;
    anyhow::ensure!(table.contains(&format!("{lost} writes lost")), "{table}");
    // The kernel's own change in a time of which writes were lost is nobody's for certain.
    let (_svc, _inside, cpus) = partition(&["--isolation", "isolated"])?;
    let before = newest_id()?;
    agent.task().signal(Signal::SIGSTOP)?;
    let flood = run_for(secs(60), Command::new("sh").args(["-c", &script]));
    let off: anyhow::Result<Vec<()>> = cpus.iter().map(|cpu| machine::set_online(cpu, false)).collect();
    agent.task().signal(Signal::SIGCONT)?;
    flood?.ok()?;
    off?;
    let finding = next(before, "a lost partition", |f| text(f, "text").contains("svc: the partition read"))?;
    guest.say(text(&finding, "text"));
    sleep(secs(2));
    let id = id_of(Some(&finding))?;
    let later = findings()?.into_iter().find(|f| id_of(Some(f)).is_ok_and(|i| i == id));
    equal("the cause", later.map(|f| text(&f["cause"], "by").to_owned()), Some("unknown".to_owned()))
}

/// A return probe has room for 16 threads on eight CPUs (twice the CPUs: `register_kretprobe`, kernel/kprobes.c), and the
/// end of whoever comes then is missed: here of 64 who are refused and then write elsewhere, which is taken, over and
/// over. Each write to `cgroup.procs` waits while a CPU goes or comes (`cgroup_attach_lock`).
pub(super) fn missed(guest: &mut Guest) -> Outcome {
    let _agent = agent("kprobe")?;
    let (db, _) = owner()?;
    settled()?;
    let spare = machine::online()?.difference(db.cpus()).last().context("no CPU is free")?;
    let go = Cgroup::create("go", "")?;
    let script = format!(
        "i=0; while [ $i -lt 64 ]; do i=$((i+1)); (echo 0 > {own}; while [ -d {go} ]; do \
         echo 999999 > {file}; echo 0 > {own}; done) 2>/dev/null & done; wait",
        own = Cgroup::at(MEDDLERS).dir().join("cgroup.procs").display(),
        go = go.dir().display(),
        file = db.cgroup().dir().join("cgroup.procs").display(),
    );
    let mut writers = Command::new("sh").args(["-c", &script]).spawn().context("starting sh")?;
    sleep(secs(1));
    let toggled = (0..5).try_for_each(|_| {
        machine::set_online(spare, false)?;
        machine::set_online(spare, true)
    });
    go.remove()?;
    anyhow::ensure!(writers.wait()?.success(), "{script:?} failed");
    toggled?;
    // The next one is seen and named.
    let before = newest_id()?;
    let (pid, comm, taken) = meddle(false, &db.cgroup().dir().join("cpuset.cpus"), "0-7")?;
    anyhow::ensure!(taken, "0-7 was refused");
    let named = |f: &Value| text(f, "kind") == "drift" && f["writer"]["pid"].is_u64();
    let finding = next(before, "a named drift", named)?;
    names(&finding, "kprobe", (pid, comm), "0-7").with_context(|| format!("{finding:#}"))?;
    let (_, status) = http("GET", "/v1/status", None)?;
    let lost = status["kernel"]["writers_lost"].as_u64().unwrap_or(0);
    guest.say(format!("64 processes: the end of {lost} refused writes was missed"));
    let joined = findings()?.into_iter().filter(|f| text(f, "kind") == "joined").collect::<Vec<_>>();
    anyhow::ensure!(
        joined.is_empty(),
        "{} findings of moves that were refused: {:#?}",
        joined.len(),
        joined.first()
    );
    anyhow::ensure!(lost > 20, "hardly an end was missed: this shows nothing");
    Ok(())
}

/// More cgroups of interest than the hook has room for (on order, not 4096 but 16): those within an owner that truepin made.
pub(super) fn crowd(guest: &mut Guest) -> Outcome {
    const MANY: u32 = 40;
    let agent = agent("fexit,watched=16")?;
    let (db, _) = owner()?;
    let refused = |s: &Value| s["kernel"]["writers_refused"].as_array().map(Vec::len);
    let each = || (0..MANY).map(|n| db.cgroup().dir().join(format!("c{n}")));
    each().try_for_each(fs::create_dir).context("making a crowd")?;
    let status = wait_for_answer("/v1/status", secs(60), |s| refused(s) == Some(1))?;
    let why = status["kernel"]["writers_refused"][0].as_str().unwrap_or_default();
    guest.say(why);
    anyhow::ensure!(why.contains("more than can be watched"), "{why:?}");
    wait_for_answer("/v1/status", secs(60), |s| s["settled"] == true)?;
    // An owner that comes after all these is watched: who brings tasks there is told of no cgroup's parent.
    let last = RunOwner::start("zz", &["--cpus", "2"], &Workload::blink(1, millis(2), millis(100)))?;
    settled()?;
    let victim = Workload::idle().spawn()?;
    let (before, value) = (newest_id()?, victim.pid().to_string());
    let (pid, comm, taken) = meddle(false, &last.cgroup().dir().join("cgroup.procs"), &value)?;
    anyhow::ensure!(taken, "the move was refused");
    let finding = next(before, "a finding `joined`", |f| text(f, "kind") == "joined")?;
    names(&finding, "fexit", (pid, comm), &value).with_context(|| format!("{finding:#}"))?;
    drop((victim, last));
    let (svc, _inside, _) = partition(&["--isolation", "isolated"])?;
    equal("by whom, with too many", lost_partition(guest, &svc)?, "unknown".to_owned())?;
    each().try_for_each(fs::remove_dir).context("sending the crowd away")?;
    wait_for_answer("/v1/status", secs(60), |s| refused(s) == Some(0))?;
    settled()?;
    equal("by whom, with few", lost_partition(guest, &svc)?, "kernel".to_owned())?;
    let warned = agent.log().matches("more than can be watched").count();
    equal("warnings", warned, 1)
}

/// All CPUs of the isolated partition go, and come again: by whom it was lost, as said two seconds later.
fn lost_partition(guest: &Guest, svc: &Cgroup) -> anyhow::Result<String> {
    let before = newest_id()?;
    let cpus = svc.cpus("cpuset.cpus.effective")?;
    cpus.iter().try_for_each(|cpu| machine::set_online(cpu, false))?;
    let lost = |f: &Value| text(f, "text").contains("the partition read \"isolated invalid");
    let found = id_of(Some(&next(before, "a lost partition", lost)?))?;
    sleep(secs(2));
    let all = findings()?;
    let finding = all.iter().find(|f| id_of(Some(f)).is_ok_and(|id| id == found)).context("it is gone")?;
    guest.say(text(finding, "text"));
    cpus.iter().try_for_each(|cpu| machine::set_online(cpu, true))?;
    settled()?;
    Ok(text(&finding["cause"], "by").to_owned())
}
