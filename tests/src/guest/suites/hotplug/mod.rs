//! CPUs that go and come, with owners on them.
//!
//! Before the observer looks nothing wakes the agent but what it is subscribed to: its tick is ten minutes away, the
//! promises are read from its record, and it is asked for nothing but its status, which it answers from what it knows.
//! (To a question for an owner or a verdict it looks at everything first: those come after the observer.) What is
//! expected follows from what the kernel answered (an offline that it refused changes nothing) and from what it was seen
//! to do, never from its version.

mod defects;
mod one;
mod reasons;
mod storm;

use crate::guest::{
    Agent, Guest, Outcome, Program, RunOwner, Scenario, Style, Suite, Workload,
    agent::wait_for_answer,
    cgroup, http, machine, millis,
    observer::{Promise, Seen, When, observe},
    secs, truepin, wait_until,
};
use anyhow::Context;
use nix::errno::Errno;
use serde_json::Value;
use std::thread::sleep;
use truepin::{CpuId, CpuSet};

/// The suite.
pub const SUITE: Suite = Suite {
    name: "hotplug",
    about: "CPUs that go and come: owners moved, degraded, served again; both kernel defects; a storm",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("one CPU of an owner, partition and member", one::one_of_two).limit(240),
        Scenario::new("all CPUs of an owner, others are free", one::all_replaced).limit(240).allow(DOMAINS),
        Scenario::new("degraded, and served again", one::degraded).limit(300).allow(DOMAINS),
        Scenario::new("a reserved CPU", one::reserved).limit(180),
        Scenario::new("the agent is away meanwhile", one::agent_away).limit(300).allow(DOMAINS),
        Scenario::new("audit mode tells and writes nothing", one::audit).limit(180),
        Scenario::new("what the kernel does to partitions by hand", defects::by_hand)
            .limit(240)
            .allow(DOMAINS),
        Scenario::new("CPUs that leak are seen and the partition made again", defects::leak)
            .limit(240)
            .allow(DOMAINS),
        Scenario::new("a task that a refused offline let out is called back", defects::refused)
            .limit(240)
            .allow(DOMAINS),
        Scenario::new("a storm of 300 events, ten owners", storm::storm).limit(3000).allow(DOMAINS),
    ],
};

/// What kernels warn of when a partition's CPUs go and come (`kernel/cgroup/cpuset.c`, 6.12 and 7.3).
const DOMAINS: &[&str] = &["rebuild_sched_domains", "partition_xcpus_del", "update_parent_effective_cpumask"];

/// Emulation stretches a kernel worker's burst of 0.5 ms to 10 ms and more.
const BUDGET: &str = "[budgets]\nunbound-kthread = \"200ms/s\"\n";
const RESERVED: &str = "0-1";

fn agent() -> anyhow::Result<Agent> {
    Agent::start(&format!("tick = \"10min\"\nreserved = \"{RESERVED}\"\n{BUDGET}"))
}

/// Mostly asleep: under TCG at most two CPUs should be busy at once.
fn sleepy() -> Program {
    Workload::blink(1, millis(2), millis(40))
}

fn set(text: &str) -> anyhow::Result<CpuSet> {
    text.parse().with_context(|| format!("CPU list {text:?}"))
}

fn text<'a>(document: &'a Value, key: &str) -> &'a str {
    document[key].as_str().unwrap_or_default()
}

/// Whether this kernel has partitions for truepin, for others' cgroups too or for those that it makes alone.
fn has_partitions() -> anyhow::Result<bool> {
    let kernel = &http("GET", "/v1/status", None)?.1["kernel"];
    Ok(kernel["partitions"] == true || kernel["local_partitions"] == true)
}

/// The ways to be exclusive that this kernel has.
fn isolations() -> anyhow::Result<Vec<&'static str>> {
    Ok(if has_partitions()? { vec!["partition", "member"] } else { vec!["member"] })
}

fn owner(name: &str, cpus: u32, isolation: &str, program: &Program) -> anyhow::Result<RunOwner> {
    RunOwner::start(name, &["--cpus", &cpus.to_string(), "--isolation", isolation], program)
}

/// What the agent says of an owner.
fn told(owner: &str) -> anyhow::Result<Value> {
    let (status, answer) = http("GET", &format!("/v1/owners/{owner}"), None)?;
    anyhow::ensure!(status == 200, "GET {owner}: {status} {answer}");
    Ok(answer)
}

/// The CPUs that are an owner's now.
fn has(owner: &str) -> anyhow::Result<CpuSet> {
    set(text(&told(owner)?, "cpus"))
}

/// Why an owner is degraded; `None` when it has all of its CPUs.
fn degraded_of(owner: &str) -> anyhow::Result<Option<String>> {
    Ok(told(owner)?["degraded"].as_str().map(str::to_owned))
}

fn free() -> anyhow::Result<CpuSet> {
    set(text(&http("GET", "/v1/status", None)?.1["pools"], "free"))
}

/// Switches a CPU; false when the kernel refuses (EBUSY). Anything else is an error.
fn switch(cpu: CpuId, online: bool) -> anyhow::Result<bool> {
    match machine::set_online(cpu, online) {
        Ok(()) => Ok(true),
        Err(e) if cgroup::errno(&e) == Some(Errno::EBUSY as i32) => Ok(false),
        Err(e) => Err(e),
    }
}

fn nth(cpus: &CpuSet, n: usize) -> anyhow::Result<CpuId> {
    cpus.iter().nth(n).with_context(|| format!("CPUs {cpus} have no number {n}"))
}

/// Waits until the agent has answered all that was reported to it.
fn settle() -> Outcome {
    // What was reported before this question is read after it at the latest.
    http("GET", "/v1/status", None)?;
    sleep(millis(50));
    wait_for_answer("/v1/status", secs(60), |s| s["settled"] == true).map(drop)
}

/// Settled without a question that would have it look, and nothing is wrong for an observer who knows the promises alone.
fn settled() -> anyhow::Result<Seen> {
    settle()?;
    observe(Promise::recorded, &set(RESERVED)?, When::Settled)
}

/// Findings of a kind, oldest first.
fn findings(kind: &str) -> anyhow::Result<Vec<Value>> {
    let (_, all) = http("GET", "/v1/findings", None)?;
    let all = all["findings"].as_array().context("findings are a list")?;
    Ok(all.iter().filter(|f| text(f, "kind") == kind).cloned().collect())
}

/// The verdict over a fresh window is Held.
fn held(owner: &str) -> Outcome {
    let ran = truepin(&["verify", owner, "--for", "2s"])?;
    anyhow::ensure!(ran.code() == 0, "{owner} is not held: {ran}");
    Ok(())
}

/// The verdict since the assignment is not Held; its words.
fn not_held(owner: &str) -> anyhow::Result<String> {
    let ran = truepin(&["verify", owner])?;
    anyhow::ensure!(ran.code() == 1 || ran.code() == 3, "{owner} is held though CPUs of it were away: {ran}");
    Ok(ran.stdout)
}

/// Owners on every CPU that is free, one each.
fn fill(isolation: &str) -> anyhow::Result<Vec<RunOwner>> {
    let mut all = Vec::new();
    while !free()?.is_empty() {
        all.push(owner(&format!("fill{}", all.len()), 1, isolation, &Workload::idle())?);
    }
    Ok(all)
}

/// Waits until a finding of this kind is mended; its text.
fn mended(guest: &Guest, kind: &str, about: &str) -> anyhow::Result<String> {
    let mut last = Vec::new();
    let waited = wait_until(&format!("a finding {kind} that is mended"), secs(20), || {
        last = findings(kind)?;
        Ok(last.iter().any(|f| text(f, "text").contains(about) && f["mended"].is_string()))
    });
    waited.with_context(|| format!("findings {last:?}"))?;
    let found = last.iter().rev().find(|f| text(f, "text").contains(about) && f["mended"].is_string());
    let found = found.context("a finding that has just been there")?;
    guest.say(format!("finding {}: {} [mended]", text(found, "id"), text(found, "text")));
    Ok(text(found, "text").to_owned())
}
