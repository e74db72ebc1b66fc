//! What kernels get wrong when CPUs of a partition go and come, seen first without truepin or with the agent stopped, and
//! then found and mended by it.

use super::{agent, fill, findings, free, has, held, mended, nth, owner, set, settle, settled, switch, text};
use crate::guest::{
    Agent, Cgroup, Guest, Outcome, Task, Workload, equal, http, machine, millis, secs, skip, truepin,
    wait_until,
};
use anyhow::Context;
use nix::{errno::Errno, sys::signal::Signal};
use std::thread::sleep;
use truepin::{CpuId, CpuSet};

/// Who may use what, by the kernel's files and `/proc` alone.
struct View {
    root: CpuSet,
    sibling: CpuSet,
    partition: CpuSet,
    state: String,
    init: CpuSet,
    outsider: CpuSet,
    owner: CpuSet,
}

impl View {
    fn of(partition: &Cgroup, sibling: &Cgroup, outsider: Task, owner: Task) -> anyhow::Result<Self> {
        Ok(Self {
            root: Cgroup::root().cpus("cpuset.cpus.effective")?,
            sibling: sibling.cpus("cpuset.cpus.effective")?,
            partition: partition.cpus("cpuset.cpus.effective")?,
            state: partition.read("cpuset.cpus.partition")?,
            init: Task(1).allowed()?,
            outsider: outsider.allowed()?,
            owner: owner.allowed()?,
        })
    }

    /// CPUs of `cpus` that somebody else may use, while the partition reads as valid.
    fn leak(&self, cpus: &CpuSet) -> CpuSet {
        let valid = self.state == "root" || self.state == "isolated";
        let all = self.root.union(&self.sibling).union(&self.init).union(&self.outsider);
        if valid { all.intersection(cpus) } else { CpuSet::new() }
    }

    fn words(&self) -> String {
        let Self { root, sibling, partition, state, init, outsider, owner } = self;
        format!(
            "partition {state:?} has {partition}; root {root}, sibling {sibling}; tasks: init {init}, one in the sibling \
             {outsider}, one in the partition {owner}"
        )
    }
}

/// All of `cpus` off and on again, in order; those that were refused.
fn away_and_back(cpus: &CpuSet) -> anyhow::Result<CpuSet> {
    let mut refused = CpuSet::new();
    for online in [false, true] {
        for cpu in cpus.iter() {
            if !switch(cpu, online)? {
                refused.insert(cpu);
            }
            sleep(millis(300));
        }
    }
    Ok(refused)
}

fn can_pin(cpu: CpuId, cgroup: &str) -> anyhow::Result<bool> {
    let answer = Workload::pinning(&CpuSet::single(cpu)).comm("intruder").cgroup(cgroup).answer()?;
    anyhow::ensure!(matches!(answer, Ok(()) | Err(Errno::EINVAL)), "{answer:?}");
    Ok(answer.is_ok())
}

/// Without truepin: what this kernel does.
pub(super) fn by_hand(guest: &mut Guest) -> Outcome {
    let partition = Cgroup::create("bare", "+cpuset")?;
    let sibling = Cgroup::create("sibling", "+cpuset")?;
    let (inside, outside) =
        (Workload::burn(1).cgroup("bare").spawn()?, Workload::idle().cgroup("sibling").spawn()?);
    let look = || View::of(&partition, &sibling, outside.task(), inside.task());
    let cpus = set("5-7")?;
    for kind in ["root", "isolated"] {
        partition.write("cpuset.cpus", &cpus.to_string())?;
        if partition.read("cpuset.cpus.exclusive").is_ok() {
            partition.write("cpuset.cpus.exclusive", &cpus.to_string())?;
        }
        partition.write("cpuset.cpus.partition", kind)?;
        equal("state", partition.read("cpuset.cpus.partition")?, kind.to_owned())?;
        equal("before: a leak", look()?.leak(&cpus), CpuSet::new())?;
        let refused = away_and_back(&cpus)?;
        let (after, leak) = (look()?, look()?.leak(&cpus));
        let outcome = match (refused.is_empty(), leak.is_empty()) {
            (false, _) => {
                format!("CPU {refused} is refused (EBUSY), its task is then allowed on {}", after.owner)
            }
            (true, true) => "clean".to_owned(),
            (true, false) => format!("CPUs {leak} leak"),
        };
        guest.say(format!("{kind}, local, all of {cpus} away and back: {outcome}: {}", after.words()));
        if let Some(cpu) = leak.first() {
            equal("an intruder on a CPU that leaks", can_pin(cpu, "sibling")?, true)?;
            // The same again changes nothing; ended and made again, it is whole.
            partition.write("cpuset.cpus", &cpus.to_string())?;
            partition.write("cpuset.cpus.partition", kind)?;
            equal("the same again", look()?.leak(&cpus), leak)?;
        }
        partition.write("cpuset.cpus.partition", "member")?;
        partition.write("cpuset.cpus.partition", kind)?;
        let made_again = look()?;
        equal("made again: a leak", made_again.leak(&cpus), CpuSet::new())?;
        equal("made again: its task", made_again.owner, cpus.clone())?;
        partition.write("cpuset.cpus.partition", "member")?;
    }
    Ok(())
}

pub(super) fn leak(guest: &mut Guest) -> Outcome {
    let agent = agent()?;
    if http("GET", "/v1/status", None)?.1["kernel"]["partitions"] != true {
        return skip("partitions of others' cgroups on this kernel");
    }
    let sibling = Cgroup::create("sibling", "+cpuset")?;
    let outside = Workload::idle().cgroup("sibling").spawn()?;
    // 7.3 lets others on the CPUs of both kinds, 6.12 on those of the second.
    for (kind, isolation) in [("root", "partition"), ("isolated", "isolated")] {
        guest.say(format!("{kind}:"));
        leak_of(guest, &agent, &sibling, outside.task(), kind, isolation)?;
    }
    Ok(())
}

fn leak_of(
    guest: &Guest,
    agent: &Agent,
    sibling: &Cgroup,
    outside: Task,
    kind: &str,
    isolation: &str,
) -> Outcome {
    let partition = Cgroup::create(&format!("leaky-{kind}"), "+cpuset")?;
    let (name, path) = (format!("cgroup/leaky-{kind}"), format!("/leaky-{kind}"));
    let inside = Workload::burn(1).cgroup(path.trim_start_matches('/')).spawn()?;
    truepin(&["assign", &name, "--cgroup", &path, "--cpus", "2", "--isolation", isolation])?.ok()?;
    let earlier = findings("mending")?.len();
    let cpus = has(&name)?;
    let look = || View::of(&partition, sibling, outside, inside.task());
    guest.say(format!("1. assigned {cpus}: {}", look()?.words()));
    equal("a leak", look()?.leak(&cpus), CpuSet::new())?;
    settled()?;
    agent.task().signal(Signal::SIGSTOP)?;
    let refused = away_and_back(&cpus)?;
    let (before, leak) = (look()?, look()?.leak(&cpus));
    guest.say(format!(
        "2. agent stopped; all of {cpus} away and back ({refused} refused): {}",
        before.words()
    ));
    if let Some(cpu) = leak.first() {
        equal("an intruder on a CPU that leaks", can_pin(cpu, "sibling")?, true)?;
        guest.say(format!(
            "3. the partition reads {:?}, and CPUs {leak} leak: an intruder pins itself there",
            before.state
        ));
    } else {
        guest.say("3. nothing leaks on this kernel".to_owned());
    }
    agent.task().signal(Signal::SIGCONT)?;
    settled().with_context(|| agent.log())?;
    let after = look()?;
    if leak.is_empty() {
        let again = findings("mending")?;
        let again = again.iter().skip(earlier).any(|f| text(f, "text").contains("ended and made again"));
        equal("made again for nothing", again, false)?;
    } else {
        let said = mended(guest, "mending", &name)?;
        anyhow::ensure!(
            said.contains("was allowed on CPUs") && said.contains("ended and made again"),
            "{said}"
        );
    }
    guest.say(format!("4. agent goes on: {}", after.words()));
    equal("a leak", after.leak(&cpus), CpuSet::new())?;
    equal("the partition", (after.partition, after.state), (cpus.clone(), kind.to_owned()))?;
    equal("its task", after.owner, cpus.clone())?;
    for cpu in cpus.iter() {
        for from in ["sibling", ""] {
            equal(&format!("an intruder from /{from} on CPU {cpu}"), can_pin(cpu, from)?, false)?;
        }
    }
    super::not_held(&name)?;
    held(&name)?;
    truepin(&["release", &name])?.ok().map(drop)
}

pub(super) fn refused(guest: &mut Guest) -> Outcome {
    let agent = agent()?;
    if !super::has_partitions()? {
        return skip("partitions for truepin on this kernel");
    }
    let o = owner("db", 2, "partition", &Workload::burn(1))?;
    let (cpus, task) = (o.cpus().clone(), o.task()?);
    let _others = fill("partition")?;
    anyhow::ensure!(free()?.is_empty(), "CPUs are free");
    let (first, second) = (nth(&cpus, 0)?, nth(&cpus, 1)?);
    anyhow::ensure!(switch(first, false)?, "CPU {first} is one of two, and was refused");
    settled()?;
    guest.say(format!(
        "1. run/db has {cpus}, CPU {first} is away: its task {} is allowed on {}",
        task.0,
        task.allowed()?
    ));
    agent.task().signal(Signal::SIGSTOP)?;
    let taken = switch(second, false)?;
    sleep(millis(300));
    let files = |file: &str| o.cgroup().read(file);
    let (state, effective) = (files("cpuset.cpus.partition")?, files("cpuset.cpus.effective")?);
    let let_out = !task.allowed()?.is_subset(&cpus);
    guest.say(format!(
        "2. agent stopped; CPU {second}, its last, is to go: {}; the task is allowed on {}, and ran on CPU {}; files: {state:?}, \
         effective {effective}",
        if taken { "taken" } else { "refused (EBUSY)" },
        task.allowed()?,
        task.last_cpu()?.0
    ));
    if taken {
        agent.task().signal(Signal::SIGCONT)?;
        settle()?;
        switch(second, true)?;
        switch(first, true)?;
        settled()?;
        equal("its task", task.allowed()?, cpus)?;
        held("run/db")?;
        return skip("a kernel that refuses to take a partition's last CPU");
    }
    equal(
        "files after the refusal",
        (state.as_str(), effective.as_str()),
        ("root", second.to_string().as_str()),
    )?;
    anyhow::ensure!(let_out, "the task was not let out: {}", task.allowed()?);
    agent.task().signal(Signal::SIGCONT)?;
    wait_until("the task on its own CPU alone", secs(20), || Ok(task.allowed()? == CpuSet::single(second)))
        .with_context(|| agent.log())?;
    settled()?;
    let said = mended(guest, "mending", "run/db")?;
    anyhow::ensure!(said.contains(&format!("its task {} ", task.0)), "{said}");
    anyhow::ensure!(said.contains("written with another value"), "{said}");
    wait_until("the task on its CPU", secs(10), || Ok(task.last_cpu()? == second))?;
    guest.say(format!("3. agent goes on: the task is allowed on {} and runs there", task.allowed()?));
    // As long as a CPU of its is away nobody vouches for that.
    super::not_held("run/db")?;
    switch(first, true)?;
    settled()?;
    held("run/db")?;
    // The same with the agent awake: seen by the attempt alone, since nothing else tells of it. (6.12 refuses only where it
    // has just built the domain.)
    anyhow::ensure!(switch(first, false)?, "CPU {first} is one of two, and was refused");
    settled()?;
    let before = findings("mending")?.len();
    anyhow::ensure!(!switch(second, false)?, "taken this time");
    wait_until("a new finding", secs(20), || Ok(findings("mending")?.len() > before))?;
    settled()?;
    equal("the task", task.allowed()?, CpuSet::single(second))?;
    let newest = findings("mending")?.pop().context("a finding")?;
    guest.say(format!(
        "4. once more, agent awake: finding {}: {}",
        text(&newest, "id"),
        text(&newest, "text")
    ));
    switch(first, true)?;
    settled()?;
    equal("its task", task.allowed()?, cpus)?;
    equal("CPUs online", machine::online()?, machine::present()?)?;
    held("run/db")
}
