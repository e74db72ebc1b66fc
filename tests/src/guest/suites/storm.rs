//! A storm of CPUs that go and come, over ten owners; watched by an observer that is not truepin.
//!
//! Steps: a burst of events, with observations while the agent works, then one when it has settled. The sets are sampled
//! around every event: a CPU that entered a set is a move. Where sets have changed between two samples, the fewest moves that
//! could have served everybody from the sets before are counted as well, from sets and CPUs alone: what owners lacked, as
//! far as there were CPUs that nobody had.
//! Kernels may refuse (6.12 keeps a partition's last CPU): that is an event too, and truepin has to look after it.

use crate::guest::{
    Agent, Guest, Outcome, Promise, RunOwner, Scenario, Style, Suite, When, Workload, cgroup::errno,
    clean::DRIVER, equal, machine, millis, observe, secs, truepin, truepin_json, wait_until,
};
use anyhow::Context;
use nix::errno::Errno;
use std::{collections::BTreeMap, thread};
use truepin::{CpuId, CpuSet};

/// The suite. Written for the machine `standard`: CPUs 0-15, of which truepin reserves the first core.
pub const SUITE: Suite = Suite {
    name: "storm",
    about: "ten owners keep what they were promised while CPUs go and come",
    style: Style::Tap,
    // A partition's CPUs go and come on 6.12 and from 7.0 on; `lockstep` names each place.
    scenarios: &[Scenario::new("300 events over ten owners", storm).limit(1500).allow(&[
        "rebuild_sched_domains",
        "partition_xcpus_del",
        "update_parent_effective_cpumask",
    ])],
};

/// CPUs that are asked for, and how: 12 of the 14 that are not reserved, so that a few losses can be replaced and more
/// cannot.
const OWNERS: [(&str, &str); 10] = [
    ("2", "auto"),
    ("1", "auto"),
    ("1", "member"),
    ("2", "member"),
    ("1", "auto"),
    ("1", "auto"),
    ("1", "member"),
    ("1", "auto"),
    ("1", "member"),
    ("1", "auto"),
];
const EVENTS: u32 = 300;
/// So many CPUs are away at once at most: six leave the pool, its reserved core and half of the owners.
const AWAY: usize = 6;
/// Changed, the storm is another one.
const SEED: u64 = 0x5eed;

/// `splitmix64`: the same storm in every run of a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> anyhow::Result<usize> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Ok(usize::try_from((z ^ (z >> 31)) % u64::try_from(n.max(1))?)?)
    }

    fn pick(&mut self, from: &CpuSet) -> anyhow::Result<CpuId> {
        let n = self.below(from.len())?;
        from.iter().nth(n).context("a CPU out of none")
    }
}

/// What was done and seen.
#[derive(Default)]
struct Counts {
    /// As last sampled, with what was online then.
    sets: BTreeMap<String, CpuSet>,
    online: CpuSet,
    off: u32,
    on: u32,
    refused: u32,
    moves: usize,
    fewest: usize,
    settled: u32,
    anytime: u32,
    degraded: usize,
}

fn sets() -> anyhow::Result<BTreeMap<String, CpuSet>> {
    Ok(Promise::all()?.into_iter().map(|p| (p.owner, p.cpus)).collect())
}

fn storm(guest: &mut Guest) -> Outcome {
    let reserved: CpuSet = "0-1".parse()?;
    // Repairs are counted by file and minute, and a storm takes minutes.
    let _agent = Agent::start(
        "tick = \"10min\"\n[limits]\nrepairs-per-minute = 1000\n[budgets]\nunbound-kthread = \"200ms/s\"\n",
    )?;
    let owners: Vec<RunOwner> = OWNERS
        .iter()
        .enumerate()
        .map(|(i, (cpus, isolation))| {
            let load = Workload::blink(2, millis(1), millis(150));
            RunOwner::start(&format!("o{i}"), &["--cpus", cpus, "--isolation", isolation], &load)
        })
        .collect::<anyhow::Result<_>>()?;
    let wanted: BTreeMap<String, usize> = owners.iter().map(|o| (o.owner(), o.cpus().len())).collect();
    observe(Promise::all, &reserved, When::Settled)?;

    let mut chance = Chance(SEED);
    let mut counts = Counts { sets: sets()?, online: machine::online()?, ..Counts::default() };
    let present = machine::present()?;
    let may_go: CpuSet = present.iter().filter(|c| c.0 != 0).collect();
    let mut events = 0;
    while events < EVENTS {
        let burst = u32::try_from(1 + chance.below(8)?)?.min(EVENTS - events);
        for _ in 0..burst {
            events += 1;
            sample(&wanted, &reserved, &mut counts)?;
            event(&mut chance, &may_go, &mut counts)?;
            sample(&wanted, &reserved, &mut counts)?;
            if chance.below(3)? == 0 {
                observe(Promise::all, &reserved, When::Anytime)
                    .with_context(|| format!("after event {events}"))?;
                counts.anytime += 1;
            }
        }
        settled(&reserved, &wanted, &mut counts).with_context(|| format!("after event {events}"))?;
    }

    for cpu in present.difference(&machine::online()?).iter() {
        machine::set_online(cpu, true)?;
    }
    settled(&reserved, &wanted, &mut counts)?;
    for (owner, cpus) in &counts.sets {
        equal(&format!("CPUs of {owner} with all online"), Some(&cpus.len()), wanted.get(owner))?;
    }
    let Counts { off, on, refused, moves, fewest, settled, anytime, degraded, .. } = counts;
    guest.say(format!(
        "{events} events (seed {SEED:#x}): {off} off, {on} on, {refused} refused; I1 to I4 observed {anytime} times in \
         between and {settled} times settled; {moves} moves, fewest possible {fewest}; {degraded} times an owner lacked a CPU"
    ));
    anyhow::ensure!(moves <= fewest, "{moves} moves, {fewest} would have done");
    anyhow::ensure!(off > 100 && degraded > 0 && moves > 0, "the storm was no storm");

    let whole = verdicts(&[])?;
    let fresh = verdicts(&["--for", "5s"])?;
    guest.say(format!("over their epochs: {whole:?}; over 5 s afterwards: {fresh:?}"));
    equal("held afterwards", fresh.get("held").copied(), Some(owners.len()))?;
    let tasks: Vec<_> = owners.iter().map(RunOwner::task).collect::<anyhow::Result<_>>()?;
    anyhow::ensure!(tasks.iter().all(|t| t.is_alive()), "a workload died");
    truepin(&["release", "--all"])?.ok()?;
    equal("the root's CPUs", crate::guest::Cgroup::root().cpus("cpuset.cpus.effective")?, present.clone())?;
    equal(
        "the driver's CPUs",
        crate::guest::Cgroup::at(DRIVER).cpus("cpuset.cpus.effective").unwrap_or(present.clone()),
        present,
    )
}

/// One CPU goes or comes; the kernel may say no.
fn event(chance: &mut Chance, may_go: &CpuSet, counts: &mut Counts) -> Outcome {
    let online = machine::online()?;
    let (up, away) = (may_go.intersection(&online), may_go.difference(&online));
    let comes = !away.is_empty() && (away.len() >= AWAY || chance.below(2)? == 0);
    let cpu = chance.pick(if comes { &away } else { &up })?;
    match machine::set_online(cpu, comes) {
        Ok(()) if comes => counts.on += 1,
        Ok(()) => counts.off += 1,
        Err(e) if errno(&e) == Some(Errno::EBUSY as i32) => counts.refused += 1,
        Err(e) => return Err(e),
    }
    Ok(())
}

/// Waits until the agent has done what can be done, and the kernel shows it.
fn settled(reserved: &CpuSet, wanted: &BTreeMap<String, usize>, counts: &mut Counts) -> Outcome {
    let (mut calm, mut last) = (None, None);
    let waited = wait_until("a settled machine", secs(40), || {
        // The agent looks once more half a second after CPUs have come to rest.
        thread::sleep(millis(700));
        sample(wanted, reserved, counts)?;
        match observe(Promise::all, reserved, When::Settled)
            .and_then(|_| served(&counts.sets, wanted, reserved))
        {
            Ok(()) if calm.as_ref() == Some(&counts.sets) => return Ok(true),
            Ok(()) => calm = Some(counts.sets.clone()),
            Err(e) => (calm, last) = (None, Some(e)),
        }
        Ok(false)
    });
    if let Err(e) = waited {
        return Err(last.unwrap_or(e));
    }
    counts.settled += 1;
    let lack = |(o, n): &(&String, &usize)| {
        counts.sets.get(*o).is_none_or(|s| s.intersection(&counts.online).len() < **n)
    };
    counts.degraded += wanted.iter().filter(lack).count();
    Ok(())
}

/// Nobody lacks a CPU while there is one that nobody has: but for the last, which the pool keeps.
fn served(
    sets: &BTreeMap<String, CpuSet>,
    wanted: &BTreeMap<String, usize>,
    reserved: &CpuSet,
) -> anyhow::Result<()> {
    equal("owners", sets.len(), wanted.len())?;
    let online = machine::online()?;
    let lacking = lacking(sets, wanted, &online);
    let free = free(sets, &online, reserved);
    anyhow::ensure!(
        lacking == 0 || free.is_empty(),
        "{lacking} CPUs are lacking and {free} are free: {sets:?}"
    );
    Ok(())
}

fn lacking(sets: &BTreeMap<String, CpuSet>, wanted: &BTreeMap<String, usize>, online: &CpuSet) -> usize {
    let of = |(owner, n): (&String, &usize)| {
        n.saturating_sub(sets.get(owner).map_or(0, |s| s.intersection(online).len()))
    };
    wanted.iter().map(of).sum()
}

fn free(sets: &BTreeMap<String, CpuSet>, online: &CpuSet, reserved: &CpuSet) -> CpuSet {
    sets.values().fold(online.difference(reserved), |rest, s| rest.difference(s))
}

/// Moves since the last sample, and the fewest that could have served everybody from there. A plan may have been made
/// before or after the event between the two samples; what had more to do counts.
fn sample(wanted: &BTreeMap<String, usize>, reserved: &CpuSet, counts: &mut Counts) -> Outcome {
    let (now, online) = (sets()?, machine::online()?);
    if now != counts.sets {
        for (owner, set) in &now {
            let was = counts.sets.get(owner).context("an owner that was not there")?;
            counts.moves += set.difference(was).len();
        }
        let fewest =
            |on: &CpuSet| lacking(&counts.sets, wanted, on).min(free(&counts.sets, on, reserved).len());
        counts.fewest += fewest(&counts.online).max(fewest(&online));
    }
    (counts.sets, counts.online) = (now, online);
    Ok(())
}

/// How many owners have which verdict.
fn verdicts(args: &[&str]) -> anyhow::Result<BTreeMap<String, usize>> {
    let all: Vec<&str> = ["verify"].into_iter().chain(args.iter().copied()).collect();
    let (_, answer) = truepin_json(&all)?;
    let mut counted = BTreeMap::new();
    for v in answer["verdicts"].as_array().context("verdicts are a list")? {
        *counted.entry(v["verdict"].as_str().unwrap_or("?").to_owned()).or_default() += 1;
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_moves_are_those_that_nothing_else_can_serve() {
        let set = |t: &str| t.parse::<CpuSet>().unwrap();
        let sets: BTreeMap<String, CpuSet> = [("a".into(), set("2-3")), ("b".into(), set("4"))].into();
        let wanted = [("a".to_owned(), 2), ("b".to_owned(), 1)].into();
        let reserved = set("0-1");
        for (online, lack, unused) in
            [("0-7", 0, "5-7"), ("0-2,4-7", 1, "5-7"), ("0-2,4", 1, ""), ("0-1,5-6", 3, "5-6")]
        {
            assert_eq!(lacking(&sets, &wanted, &set(online)), lack, "{online}");
            assert_eq!(free(&sets, &set(online), &reserved), set(unused), "{online}");
        }
    }

    #[test]
    fn chance_is_the_same_again() {
        let draw = |seed| {
            let mut c = Chance(seed);
            (0..20).map(|_| c.below(7).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(3).iter().all(|n| *n < 7));
    }
}
