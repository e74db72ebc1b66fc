//! One thing at a time.

use super::{
    agent, degraded_of, fill, findings, free, has, held, isolations, not_held, nth, owner, set, settle,
    settled, sleepy, switch, text, told,
};
use crate::guest::{
    Agent, Cgroup, Guest, Outcome, Task, Workload, equal, http, machine, millis, secs, truepin, truepin_json,
    wait_until,
};
use anyhow::Context;
use std::thread::sleep;
use truepin::CpuSet;

pub(super) fn one_of_two(guest: &mut Guest) -> Outcome {
    let _agent = agent()?;
    let status = http("GET", "/v1/status", None)?.1;
    equal("what tells of hotplug", text(&status["kernel"], "hotplug"), "uevent+inotify")?;
    // What is left of the node with the reserved CPUs, so that the owner's node has others free.
    let _first = owner("first", 2, "member", &sleepy())?;
    for isolation in isolations()? {
        let name = format!("run/{isolation}");
        let o = owner(isolation, 2, isolation, &sleepy())?;
        let (before, gone) = (o.cpus().clone(), nth(o.cpus(), 1)?);
        let node = told(&name)?["nodes"].clone();
        anyhow::ensure!(switch(gone, false)?, "CPU {gone} is one of two, and was refused");
        settled()?;
        let now = has(&name)?;
        let kept = before.difference(&CpuSet::single(gone));
        anyhow::ensure!(
            now.len() == 2 && kept.is_subset(&now) && !now.contains(gone),
            "{before} became {now}"
        );
        equal("nodes", told(&name)?["nodes"].clone(), node)?;
        equal("the task's mask", o.task()?.allowed()?, now.clone())?;
        let said = not_held(&name)?;
        anyhow::ensure!(said.contains("INCONCLUSIVE") && said.contains("(hotplug)"), "{said}");
        held(&name)?;
        switch(gone, true)?;
        settled()?;
        equal("nobody is moved back", has(&name)?, now.clone())?;
        anyhow::ensure!(free()?.contains(gone), "CPU {gone} is not free");
        guest.say(format!("{isolation}: {before}, CPU {gone} off: {now}; on again: {now}"));
        // Away for a moment: too short to be moved for, and no Held all the same.
        let other = nth(&now, 0)?;
        held(&name)?;
        let window = std::thread::spawn(move || truepin(&["verify", &name, "--for", "3s"]));
        sleep(millis(800));
        switch(other, false)?;
        switch(other, true)?;
        let ran = window.join().map_err(|_| anyhow::anyhow!("the window panicked"))??;
        let moved = has(&format!("run/{isolation}"))? != now;
        anyhow::ensure!(ran.code() == 3, "CPU {other} was away for a moment (moved: {moved}): {ran}");
        settled()?;
        o.end()?;
    }
    Ok(())
}

pub(super) fn all_replaced(guest: &mut Guest) -> Outcome {
    let _agent = agent()?;
    for isolation in isolations()? {
        for cpus in [1, 2] {
            let o = owner("a", cpus, isolation, &Workload::burn(1))?;
            let before = o.cpus().clone();
            let mut refused = CpuSet::new();
            for cpu in before.iter() {
                if !switch(cpu, false)? {
                    refused.insert(cpu);
                }
            }
            settled()?;
            let now = has("run/a")?;
            let said = if refused.is_empty() { "taken".into() } else { format!("{refused} refused") };
            guest.say(format!("{isolation}: all of {before} off ({said}): {now}"));
            equal("as many as before", now.len(), before.len())?;
            anyhow::ensure!(now.is_subset(&machine::online()?), "{now} is not online");
            equal("the task's mask", o.task()?.allowed()?, now.clone())?;
            anyhow::ensure!(refused.is_subset(&now), "{refused} could have been kept");
            wait_until("the task on its CPUs", secs(10), || Ok(now.contains(o.task()?.last_cpu()?)))?;
            held("run/a")?;
            for cpu in before.iter() {
                switch(cpu, true)?;
            }
            settled()?;
            equal("nobody is moved back", has("run/a")?, now)?;
            o.end()?;
        }
    }
    Ok(())
}

pub(super) fn degraded(guest: &mut Guest) -> Outcome {
    let _agent = agent()?;
    for isolation in isolations()? {
        let o = owner("a", 2, isolation, &Workload::burn(1))?;
        let cpus = o.cpus().clone();
        let others = fill("member")?;
        let (first, second) = (nth(&cpus, 0)?, nth(&cpus, 1)?);
        switch(second, false)?;
        settled()?;
        equal("its CPUs", has("run/a")?, cpus.clone())?;
        equal("what it has", o.cgroup().cpus("cpuset.cpus.effective")?, CpuSet::single(first))?;
        let why = degraded_of("run/a")?.context("it is not degraded")?;
        guest.say(format!("{isolation}: {why}"));
        anyhow::ensure!(why.contains(&format!("CPUs {second} of its {cpus} are offline")), "{why}");
        let list = truepin(&["list"])?.ok()?;
        anyhow::ensure!(list.stdout.contains(&why), "{list}");
        let status = truepin(&["status"])?.ok()?;
        anyhow::ensure!(status.stdout.contains(&format!("problem    {why}")), "{status}");
        let refused = truepin(&["run", "--cpus", "1", "--", "true"])?;
        equal("a CPU that is away is nobody else's", refused.code(), 125)?;
        // Now all of them.
        let taken = switch(first, false)?;
        settled()?;
        if taken {
            let pool = set(text(&http("GET", "/v1/status", None)?.1["pools"], "shared"))?;
            wait_until("its task in the pool", secs(10), || Ok(o.task()?.allowed()?.is_subset(&pool)))?;
            guest.say(format!("{isolation}: without a CPU its task is allowed on {}", o.task()?.allowed()?));
            let why = degraded_of("run/a")?.context("it is not degraded")?;
            anyhow::ensure!(why.contains("runs in the shared pool"), "{why}");
        } else {
            guest.say(format!("{isolation}: the kernel refuses to take CPU {first} away"));
            equal("its task", o.task()?.allowed()?, CpuSet::single(first))?;
        }
        settled()?;
        let generation = findings("refitted")?.len();
        for cpu in [first, second] {
            switch(cpu, true)?;
        }
        settled()?;
        equal("served again", o.cgroup().cpus("cpuset.cpus.effective")?, cpus.clone())?;
        equal("degraded", degraded_of("run/a")?, None)?;
        equal("moves", findings("refitted")?.len(), generation)?;
        let problem =
            findings("problem")?.into_iter().rfind(|f| text(f, "text").contains("run/a is degraded"));
        let problem = problem.context("no finding says that it was degraded")?;
        anyhow::ensure!(problem["mended"].is_string(), "{problem:#}");
        not_held("run/a")?;
        held("run/a")?;
        // Somebody who gives CPUs up serves it, too.
        switch(second, false)?;
        settle()?;
        anyhow::ensure!(degraded_of("run/a")?.is_some(), "it is not degraded");
        for other in others {
            other.end()?;
        }
        settled()?;
        let now = has("run/a")?;
        anyhow::ensure!(
            now.contains(first) && !now.contains(second) && degraded_of("run/a")?.is_none(),
            "{now}"
        );
        switch(second, true)?;
        settled()?;
        o.end()?;
    }
    Ok(())
}

pub(super) fn reserved(guest: &mut Guest) -> Outcome {
    let _agent = agent()?;
    let others = fill("member")?;
    let reserved = nth(&set(super::RESERVED)?, 1)?;
    switch(reserved, false)?;
    let seen = settled()?;
    guest.say(format!("online {} without CPU {reserved}", seen.online()));
    anyhow::ensure!(free()?.is_empty(), "{} is free", free()?);
    switch(reserved, true)?;
    settled()?;
    let status = http("GET", "/v1/status", None)?.1;
    equal("reserved", text(&status["pools"], "reserved"), super::RESERVED)?;
    equal("shared", text(&status["pools"], "shared"), super::RESERVED)?;
    equal("moves", findings("refitted")?.len(), 0)?;
    for o in &others {
        held(&o.owner())?;
    }
    Ok(())
}

pub(super) fn agent_away(guest: &mut Guest) -> Outcome {
    let mut agent = agent()?;
    // A local partition, a remote one where there are any, and a member.
    Cgroup::create("top", "+cpuset")?;
    let top = Workload::burn(1).cgroup("top").spawn()?;
    truepin(&["assign", "cgroup/top", "--cgroup", "/top", "--cpus", "2"])?.ok()?;
    let mut runs = Vec::new();
    for isolation in isolations()? {
        runs.push(owner(isolation, 2, isolation, &sleepy())?);
    }
    let names: Vec<String> =
        std::iter::once("cgroup/top".to_owned()).chain(runs.iter().map(super::RunOwner::owner)).collect();
    let before: Vec<CpuSet> = names.iter().map(|n| has(n)).collect::<anyhow::Result<_>>()?;
    agent.kill()?;
    // All of each away and back.
    let mut refused = CpuSet::new();
    for online in [false, true] {
        for cpu in before.iter().flat_map(CpuSet::iter) {
            if !switch(cpu, online)? {
                refused.insert(cpu);
            }
        }
    }
    agent.start_again()?;
    settled()?;
    let after: Vec<CpuSet> = names.iter().map(|n| has(n)).collect::<anyhow::Result<_>>()?;
    guest.say(format!(
        "all of {before:?} away and back ({refused} refused) while the agent was dead: {after:?}"
    ));
    equal("nobody is moved", after, before.clone())?;
    equal("the task of /top", top.task().allowed()?, before[0].clone())?;
    // One of each stays away.
    agent.kill()?;
    let gone: CpuSet = before.iter().map(|set| nth(set, 0)).collect::<anyhow::Result<_>>()?;
    for cpu in gone.iter() {
        anyhow::ensure!(switch(cpu, false)?, "CPU {cpu} is one of two, and was refused");
    }
    agent.start_again()?;
    settled()?;
    for (name, before) in names.iter().zip(&before) {
        let now = has(name)?;
        guest.say(format!("{name}: {before}, {} away: {now}", before.intersection(&gone)));
        anyhow::ensure!(before.difference(&gone).is_subset(&now) && now.is_disjoint(&gone), "{now}");
        held(name)?;
    }
    Ok(())
}

pub(super) fn audit(guest: &mut Guest) -> Outcome {
    let watched = Cgroup::create("watched", "+cpuset")?;
    watched.write("cpuset.cpus", "6-7")?;
    let task = Workload::blink(1, millis(2), millis(40)).cgroup("watched").spawn()?;
    let config = format!(
        "tick = \"10min\"\nmode = \"audit\"\n{}[[cgroup]]\npath = \"/watched\"\nrole = \"owner\"\nowner = \"unit/w\"\ncpus = \"6-7\"\n",
        super::BUDGET
    );
    // Nothing keeps this very process off the CPUs of an audited cgroup.
    Task(0).set_affinity(&set("0")?)?;
    let _agent = Agent::start(&config)?;
    let status = http("GET", "/v1/status", None)?.1;
    equal("what tells of hotplug", text(&status["kernel"], "hotplug"), "uevent+inotify")?;
    held("unit/w")?;
    let cpus = set("6-7")?;
    for cpu in cpus.iter() {
        switch(cpu, false)?;
        sleep(millis(300));
    }
    for cpu in cpus.iter() {
        switch(cpu, true)?;
    }
    sleep(secs(2));
    let (code, verdict) = truepin_json(&["verify", "unit/w"])?;
    guest.say(format!("away and back: {}", verdict["reasons"]));
    // Its tasks had to run elsewhere; whether they did, the ledger knows.
    let text = verdict["reasons"].to_string();
    anyhow::ensure!(code != 0 && text.contains("CPUs 6-7 went offline within the interval"), "{verdict:#}");
    equal("the list", watched.read("cpuset.cpus")?, "6-7".to_owned())?;
    equal("the task", task.task().allowed()?, cpus)?;
    held("unit/w")
}
