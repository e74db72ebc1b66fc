//! A storm: 300 seeded events, one by one and in bursts, ten owners of mixed sizes and modes.
//!
//! What is counted: the moves that the agent made (CPUs that an owner was given in place of others), against two bounds that
//! this file computes by itself from the events' times and from who had what. *At rest*: between two moments of rest, the
//! CPUs that owners lack at the second of them and for which others are free; nobody who waits for the end of a
//! burst can do with fewer. *At once*: moves of owners of which no CPU was left at that very moment, who are not to
//! wait. The moves must not exceed the sum, and each must replace a CPU that was away, by one that was nobody's.

use super::{RESERVED, agent, has_partitions, owner, reasons::Story, set, settled, sleepy, switch, text};
use crate::{
    guest::{
        Guest, Outcome, RunOwner, equal, http, machine, millis,
        observer::{Promise, When, observe},
        truepin, truepin_json,
    },
    sim::history::Rng,
};
use anyhow::Context;
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;
use std::{collections::BTreeMap, thread::sleep, time::Duration};
use truepin::{CpuId, CpuSet};

const EVENTS: u32 = 300;
const SEED: u64 = 20_241_202;

/// One write to `cpuN/online` that was taken, with its time.
struct Event {
    begun: u64,
    done: u64,
    cpu: CpuId,
    online: bool,
}

/// One owner's set that was changed.
struct Move {
    at: u64,
    owner: String,
    from: CpuSet,
    to: CpuSet,
}

fn now() -> anyhow::Result<u64> {
    Ok(u64::try_from(Duration::from(clock_gettime(ClockId::CLOCK_REALTIME)?).as_nanos())?)
}

/// What was found since finding number `seen`, which becomes that of the newest.
fn news(seen: &mut u64) -> anyhow::Result<Vec<Value>> {
    let (_, all) = http("GET", "/v1/findings", None)?;
    let all = all["findings"].as_array().context("findings are a list")?;
    let number = |f: &Value| text(f, "id").parse::<u64>().with_context(|| format!("the id of {f}"));
    let mut new = Vec::new();
    for f in all {
        let id = number(f)?;
        if id > *seen {
            anyhow::ensure!(
                id == *seen + 1 || !new.is_empty() || *seen == 0,
                "findings before {id} are lost"
            );
            new.push(f.clone());
        }
    }
    if let Some(f) = new.last() {
        *seen = number(f)?;
    }
    Ok(new)
}

/// "run/a: CPU 4 is offline or reserved now; it has 5 instead of 4[, …] (1 CPU on node 0, …)"
fn moved(f: &Value) -> anyhow::Result<Option<Move>> {
    if text(f, "kind") != "refitted" {
        return Ok(None);
    }
    let said = text(f, "text");
    let parts = || {
        let (owner, rest) = said.split_once(": CPU")?;
        let (to, rest) = rest.split_once("; it has ")?.1.split_once(" instead of ")?;
        Some((owner, to, rest.split([' ', ',', ';']).next()?))
    };
    // A list may hold commas.
    let list =
        |rest: &str| rest.chars().take_while(|c| c.is_ascii_digit() || "-,".contains(*c)).collect::<String>();
    let (owner, to, _) = parts().with_context(|| format!("no move in {said:?}"))?;
    let from = said.split_once(" instead of ").map(|(_, rest)| list(rest)).unwrap_or_default();
    let at = humantime::parse_rfc3339(text(f, "at"))?.duration_since(std::time::UNIX_EPOCH)?;
    Ok(Some(Move {
        at: u64::try_from(at.as_nanos())?,
        owner: owner.to_owned(),
        from: set(from.trim_end_matches(','))?,
        to: set(to)?,
    }))
}

/// The table as it is told step by step, and the sums.
struct Account {
    reserved: CpuSet,
    table: BTreeMap<String, CpuSet>,
    online: CpuSet,
    made: usize,
    at_rest: usize,
    at_once: usize,
    story: Story,
}

impl Account {
    fn held(&self) -> CpuSet {
        self.table.values().fold(CpuSet::new(), |all, s| all.union(s))
    }

    /// Takes the events and moves since the last moment of rest in the order of their times.
    fn rest(&mut self, events: &[Event], moves: &[Move]) -> Outcome {
        let lacking = |table: &BTreeMap<String, CpuSet>, online: &CpuSet| -> usize {
            table.values().map(|s| s.difference(online).len()).sum()
        };
        let (table, held, began) = (self.table.clone(), self.held(), self.online.clone());
        let mut end = began;
        for e in events {
            if e.online {
                end.insert(e.cpu)
            } else {
                end.remove(e.cpu)
            };
        }
        let free = end.difference(&held).difference(&self.reserved).len();
        let needed = lacking(&table, &end).min(free);
        let (mut made, mut at_once) = (0, 0);
        let mut events = events.iter().peekable();
        for m in moves {
            while let Some(e) = events.next_if(|e| e.done <= m.at) {
                if e.online {
                    self.online.insert(e.cpu)
                } else {
                    self.online.remove(e.cpu)
                };
            }
            // What is under way may count already.
            let under_way = events.clone().take_while(|e| e.begun <= m.at);
            let under_way: CpuSet = under_way.map(|e| e.cpu).collect();
            let sure = self.online.difference(&under_way);
            let set = self.table.get(&m.owner).with_context(|| format!("{} is nobody", m.owner))?;
            equal(&format!("{} before its move", m.owner), set.clone(), m.from.clone())?;
            let (lost, got) = (m.from.difference(&m.to), m.to.difference(&m.from));
            equal(&format!("{}: CPUs lost and given", m.owner), lost.len(), got.len())?;
            anyhow::ensure!(lost.is_disjoint(&sure), "{} lost {lost}, and {sure} are online", m.owner);
            let others = self.held().union(&self.reserved);
            anyhow::ensure!(got.is_disjoint(&others), "{} was given {got} of {others}", m.owner);
            made += got.len();
            if m.from.is_disjoint(&sure) {
                at_once += got.len();
            }
            self.table.insert(m.owner.clone(), m.to.clone());
        }
        self.online = end;
        anyhow::ensure!(
            made <= needed + at_once,
            "{made} moves, {needed} were needed and {at_once} made at once"
        );
        // Nobody lacks a CPU while one is free.
        let free = self.online.difference(&self.held()).difference(&self.reserved);
        let lacks = lacking(&self.table, &self.online);
        anyhow::ensure!(lacks == 0 || free.is_empty(), "{lacks} CPUs are lacking, and {free} are free");
        self.made += made;
        self.at_rest += needed;
        self.at_once += at_once;
        Ok(())
    }
}

#[derive(Default)]
struct Count {
    refused: u32,
    /// Which, since the last rest: the kernel takes such a CPU away and brings it back.
    tried: Vec<CpuId>,
    rests: u32,
    instants: u32,
    degraded: u32,
    mending: BTreeMap<&'static str, u32>,
}

fn owners(partitions: bool) -> anyhow::Result<Vec<RunOwner>> {
    [1, 2, 1, 1, 2, 1, 1, 1, 1, 1]
        .into_iter()
        .enumerate()
        .map(|(n, cpus)| {
            let isolation = if partitions && n % 3 != 2 { "partition" } else { "member" };
            owner(&format!("o{n}"), cpus, isolation, &sleepy())
        })
        .collect()
}

pub(super) fn storm(guest: &mut Guest) -> Outcome {
    let agent = agent()?;
    let owners = owners(has_partitions()?)?;
    let reserved = set(RESERVED)?;
    let seen = settled()?;
    let mut last = 0;
    news(&mut last)?;
    let table = Promise::recorded()?
        .into_iter()
        .map(|p| Ok((p.owner, set(&p.cpus.to_string())?)))
        .collect::<anyhow::Result<_>>()?;
    let online = set(&seen.online().to_string())?;
    let mut story = Story::default();
    for o in &owners {
        story.pids.extend(o.cgroup().procs()?.into_iter().map(|pid| (pid, o.owner())));
    }
    let mut account =
        Account { reserved: reserved.clone(), table, online, made: 0, at_rest: 0, at_once: 0, story };
    let mut rng = Rng::new(SEED);
    let mut count = Count::default();
    let (mut done, mut events) = (0, Vec::new());
    let able: Vec<CpuId> = machine::present()?.iter().filter(|c| c.0 > 0).collect();
    while done < EVENTS {
        for _ in 0..[1, 1, 2, 3, 5, 8][rng.below(6)] {
            let online = machine::online()?;
            let cpu = *rng.pick(&able).context("no CPU")?;
            let on = !online.contains(cpu) || online.len() < 7;
            let begun = now()?;
            if switch(cpu, on)? {
                if online.contains(cpu) != on {
                    events.push(Event { begun, done: now()?, cpu, online: on });
                }
            } else {
                count.refused += 1;
                count.tried.push(cpu);
            }
            done += 1;
        }
        if rng.chance(40) {
            sleep(millis(rng.draw() % 400));
            observe(Promise::recorded, &reserved, When::Anytime)
                .with_context(|| format!("event {done}, at an instant; {}", agent.log()))?;
            count.instants += 1;
        } else {
            settled().with_context(|| format!("event {done}, at rest; {}", agent.log()))?;
            count.rests += 1;
            rest(&mut account, &mut events, &mut last, &mut count)
                .with_context(|| format!("event {done}; {}", agent.log()))?;
        }
    }
    for cpu in machine::present()?.difference(&machine::online()?).iter() {
        let begun = now()?;
        anyhow::ensure!(switch(cpu, true)?, "CPU {cpu} does not come back");
        events.push(Event { begun, done: now()?, cpu, online: true });
    }
    settled().with_context(|| agent.log())?;
    rest(&mut account, &mut events, &mut last, &mut count).with_context(|| agent.log())?;
    let Account { made, at_rest, at_once, story, .. } = account;
    let Count { refused, rests, instants, degraded, mending, .. } = count;
    guest.say(format!(
        "{done} events ({refused} refused by the kernel), seed {SEED}; I1 to I4 observed {rests} times at rest and {instants} \
         times at an instant: no breach"
    ));
    guest.say(format!(
        "{made} moves; {at_rest} are the minimum for who acts at rest only, {at_once} were of owners with no CPU left, at once; \
         degraded {degraded} times; mended {mending:?}"
    ));
    verdicts(guest, &owners, &story)?;
    equal("CPUs online", machine::online()?, machine::present()?)?;
    anyhow::ensure!(agent.is_running(), "the agent died: {}", agent.log());
    Ok(())
}

fn rest(account: &mut Account, events: &mut Vec<Event>, last: &mut u64, count: &mut Count) -> Outcome {
    let mut moves = Vec::new();
    let news = news(last)?;
    for f in &news {
        let said = text(f, "text");
        match text(f, "kind") {
            "problem" if said.contains("is degraded") => count.degraded += 1,
            "mending" if said.contains("made again") => *count.mending.entry("partition").or_default() += 1,
            "mending" => *count.mending.entry("list").or_default() += 1,
            "plan-broken" | "stuck" => anyhow::bail!("{said}"),
            _ => {}
        }
        moves.extend(moved(f)?);
    }
    let offline = machine::present()?.difference(&account.online);
    let tried = count.tried.drain(..).map(|cpu| (cpu, false));
    let switched: Vec<_> = events.iter().map(|e| (e.cpu, e.online)).chain(tried).collect();
    let given = moves.iter().map(|m| (m.owner.clone(), m.from.clone(), m.to.clone())).collect();
    account.story.rest(&account.table, &offline, &switched, given, &news)?;
    account.rest(events, &moves)?;
    events.clear();
    let recorded = Promise::recorded()?;
    equal("owners on record", recorded.len(), account.table.len())?;
    for p in recorded {
        let (told, has) = (account.table.get(&p.owner), set(&p.cpus.to_string())?);
        anyhow::ensure!(told == Some(&has), "{} has {has}, and what was found adds up to {told:?}", p.owner);
    }
    Ok(())
}

/// Over the storm nobody whose CPUs were away is Held, for reasons that follow from that; over a fresh window everybody is.
fn verdicts(guest: &Guest, owners: &[RunOwner], story: &Story) -> Outcome {
    let (_, over) = truepin_json(&["verify"])?;
    let mut by: BTreeMap<&str, u32> = BTreeMap::new();
    let mut whys: BTreeMap<&str, u32> = BTreeMap::new();
    let mut unknown = Vec::new();
    for v in over["verdicts"].as_array().context("verdicts are a list")? {
        let (judgement, reasons) = (text(v, "verdict"), v["reasons"].to_string());
        *by.entry(judgement).or_default() += 1;
        for reason in v["reasons"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            match story.kind(text(v, "owner"), &set(text(v, "cpus"))?, reason) {
                Ok(kind) => *whys.entry(kind).or_default() += 1,
                Err(e) => unknown.push(format!("{e:#}")),
            }
        }
        let away = reasons.contains("went offline within") || reasons.contains("(hotplug)");
        anyhow::ensure!(away == (judgement != "held"), "{v:#}");
    }
    guest.say(format!("verdicts over the storm: {by:?}"));
    guest.say(format!("their reasons: {whys:?}"));
    unknown.extend(story.unexplained.iter().cloned());
    anyhow::ensure!(unknown.is_empty(), "what no CPU that was switched explains:\n{}", unknown.join("\n"));
    // Two at a time: each window is two looks at everything.
    let ran = truepin(&["verify", "--for", "3s"])?;
    guest.say(format!("verdicts of the three seconds after it: exit code {}", ran.code()));
    anyhow::ensure!(ran.code() == 0, "{ran}");
    for o in owners {
        let mask = o.task()?.allowed()?;
        equal(&format!("mask of {}", o.owner()), mask, super::has(&o.owner())?)?;
    }
    Ok(())
}
