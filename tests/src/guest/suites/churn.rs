//! The agent is killed with -9 at random instants while two clients assign and release; whatever it was doing, the
//! kernel's state is fit to live on, and the next agent has everything that was acknowledged.
//!
//! Steps of one life: the agent starts; the clients send requests, each its own cgroups', one at a time; after a random
//! time the agent is killed, in some lives while it starts; the clients stop. Then, with everything frozen: the observer
//! looks for breaches of I1 to I4, and those of whom no request was under way have all that they were promised. The next life begins with a look at what the agent has: every owner whose assignment
//! was answered, on those very CPUs, and none whose release was answered. A request that had no answer may have been
//! done or not.
//!
//! `truepin.seed=N` on the kernel command line repeats the choices (`APPEND=truepin.seed=N`), though not the instants:
//! those depend on the host's load.

use crate::{
    guest::{
        Agent, Cgroup, Guest, Outcome, Promise, Scenario, Style, Suite, When, Workload,
        agent::wait_for_answer, equal, facts, http, machine, millis, observe, secs, truepin,
    },
    sim::history::Rng,
};
use anyhow::Context;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "churn",
    about: "the agent is killed again and again while owners come and go",
    style: Style::Tap,
    scenarios: &[Scenario::new("30 times kill -9, and nothing is lost", churn).limit(900)],
};

const KILLS: u32 = 30;
/// Every so many lives the kill comes while the agent starts.
const AT_START: u32 = 5;
/// Of cgroups, half of them each client's. With up to 3 CPUs each they cannot all be served on 16 CPUs.
const CGROUPS: usize = 8;
const CLIENTS: usize = 2;

fn path_of(name: &str) -> String {
    format!("load/{name}")
}

/// What a client knows of one of its cgroups.
#[derive(Debug, Clone, PartialEq)]
enum Known {
    /// Released, or never assigned, and that was acknowledged.
    Free,
    /// Assigned, as the answer said.
    Held(Promise),
    /// A request had no answer.
    Unknown,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    assigned: u32,
    released: u32,
    refused: u32,
    /// Kills with a request under way.
    unfinished: u32,
    kills: u32,
    /// Of these, before the agent answered for the first time.
    at_start: u32,
    /// Looks of the observer without a breach, at what a killed agent left, ...
    frozen: u32,
    /// ... and at what the next one has settled.
    settled: u32,
    /// Promises that were held against what was seen.
    promises: usize,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { assigned, released, refused, unfinished, kills, at_start, frozen, settled, promises } =
            self;
        write!(
            f,
            "{kills} kills ({at_start} while it started, {unfinished} into an unfinished request), {assigned} assigns \
             and {released} releases acknowledged, {refused} assigns refused; the observer looked {frozen} times at what \
             a kill left and {settled} times at what was settled, {promises} promises in all, and found no breach"
        )
    }
}

#[derive(Debug, Default)]
struct Table {
    known: BTreeMap<String, Known>,
    count: Count,
    /// Answers that no client should get.
    wrong: Vec<String>,
    /// Requests without an answer in this life.
    open: u32,
    /// Clients that wait for the next life.
    idle: usize,
    /// Whether they may send.
    go: bool,
}

/// What the clients and the one who kills share.
#[derive(Default)]
struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
    over: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the clients go, or waits until both stand still.
    fn set(&self, go: bool) {
        let mut table = self.lock();
        table.go = go;
        self.changed.notify_all();
        while !go && table.idle < CLIENTS {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One client: requests for its own cgroups until it is over.
fn client(shared: &Shared, names: &[String], rng: &mut Rng, isolations: &[&str]) {
    loop {
        {
            let mut table = shared.lock();
            table.idle += 1;
            shared.changed.notify_all();
            while !table.go {
                if shared.over.load(Ordering::Relaxed) {
                    return;
                }
                table = shared.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
            }
            table.idle -= 1;
        }
        let Some(name) = rng.pick(names) else { return };
        let before = shared.lock().known.insert(name.clone(), Known::Unknown);
        // Where it is not known whether it is held, a release makes it certain.
        let release = before.as_ref().is_some_and(|known| *known != Known::Free);
        let answer = if release {
            http("DELETE", &format!("/v1/owners/unit/{name}"), None)
        } else {
            let isolation = rng.pick(isolations).copied().unwrap_or("auto");
            let request = json!({"owner": format!("unit/{name}"), "cgroup": format!("/{}", path_of(name)),
                "cpus": 1 + rng.below(3), "isolation": isolation});
            http("POST", "/v1/owners", Some(&request))
        };
        let mut table = shared.lock();
        let known = match judge(release, answer, &mut table) {
            Some(known) => known,
            // It was never sent.
            None => before.unwrap_or(Known::Free),
        };
        table.known.insert(name.clone(), known);
    }
}

/// What an answer says of the cgroup; nothing where no request was sent.
fn judge(release: bool, answer: anyhow::Result<(u16, Value)>, table: &mut Table) -> Option<Known> {
    match answer {
        Ok((200, _)) if release => {
            table.count.released += 1;
            Some(Known::Free)
        }
        Ok((200 | 201, owner)) if !release => {
            table.count.assigned += 1;
            match Promise::of(&owner) {
                Ok(promise) => Some(Known::Held(promise)),
                Err(e) => {
                    table.wrong.push(format!("{e:#}"));
                    Some(Known::Unknown)
                }
            }
        }
        // Not enough CPUs.
        Ok((409, _)) if !release => {
            table.count.refused += 1;
            Some(Known::Free)
        }
        Ok((status, body)) => {
            table.wrong.push(format!("HTTP status {status}: {body}"));
            Some(Known::Unknown)
        }
        Err(e) if e.to_string().starts_with("connecting to") => None,
        Err(e) => {
            let slow = e.chain().any(|c| {
                c.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::WouldBlock)
            });
            table.open += u32::from(!slow);
            Some(Known::Unknown)
        }
    }
}

fn churn(guest: &mut Guest) -> Outcome {
    let seed = match machine::argument("truepin.seed")? {
        Some(seed) => seed.parse().with_context(|| format!("truepin.seed={seed}"))?,
        None => u64::from_str_radix(&machine::read("/proc/sys/kernel/random/uuid")?[..8], 16)?,
    };
    guest.say(format!("truepin.seed={seed}"));
    let mut rng = Rng::new(seed);
    let shared = Arc::new(Shared::default());
    let mut loads = Vec::new();
    for n in 0..CGROUPS {
        let name = format!("c{n}");
        Cgroup::create(&path_of(&name), "+cpuset")?;
        loads.push(Workload::idle().cgroup(&path_of(&name)).spawn()?);
        shared.lock().known.insert(name, Known::Free);
    }
    let isolations: &[&str] =
        if facts::exclusive_file()? { &["auto", "partition", "member"] } else { &["auto", "member"] };
    let clients: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let (shared, mut rng) = (Arc::clone(&shared), Rng::new(rng.draw()));
            let names: Vec<_> = (n..CGROUPS).step_by(CLIENTS).map(|i| format!("c{i}")).collect();
            thread::spawn(move || client(&shared, &names, &mut rng, isolations))
        })
        .collect();
    let lived = lives(&shared, &mut rng);
    shared.over.store(true, Ordering::Relaxed);
    shared.set(false);
    for client in clients {
        client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
    }
    guest.say(shared.lock().count);
    lived.with_context(|| format!("truepin.seed={seed}, {}", shared.lock().count))
}

fn lives(shared: &Shared, rng: &mut Rng) -> Outcome {
    // The whole first core.
    let reserved: CpuSet = "0-1".parse()?;
    let mut agent = Agent::start("reserved = \"0-1\"\n")?;
    for kill in 1..=KILLS {
        let at_start = kill % AT_START == 0;
        let life = format!("in the life before kill {kill}, {}", shared.lock().count);
        if at_start {
            agent.spawn_again()?;
        } else {
            if kill > 1 {
                agent.start_again().context(life.clone())?;
            }
            looked_after(shared, &reserved).context(life.clone())?;
        }
        shared.set(true);
        thread::sleep(random(rng, if at_start { 1500 } else { 2500 }));
        anyhow::ensure!(agent.is_running(), "{life}: the agent died: {}", agent.log());
        agent.kill()?;
        shared.set(false);
        let promises = {
            let mut table = shared.lock();
            table.count.kills += 1;
            table.count.at_start += u32::from(at_start);
            table.count.unfinished += u32::from(table.open > 0);
            table.open = 0;
            anyhow::ensure!(table.wrong.is_empty(), "{life}: {:?}", table.wrong);
            held(&table)
        };
        // Whatever was under way, those of whom it was not have what they were promised.
        observe(|| Ok(promises.clone()), &reserved, When::Settled)
            .with_context(|| format!("frozen after kill {kill}, {}", shared.lock().count))?;
        let count = &mut shared.lock().count;
        count.frozen += 1;
        count.promises += promises.len();
    }
    agent.start_again()?;
    looked_after(shared, &reserved).context("in the last life")?;
    let count = shared.lock().count;
    anyhow::ensure!(count.assigned > KILLS && count.released > KILLS / 2, "hardly anything happened");
    anyhow::ensure!(count.unfinished > KILLS / 4, "hardly any kill fell into a request");
    truepin(&["release", "--all"])?.ok()?;
    settled(shared, &reserved)?;
    equal("owners in the end", Promise::asked()?, vec![])?;
    equal("owners on record in the end", Promise::recorded()?, vec![])?;
    for n in 0..CGROUPS {
        let cgroup = Cgroup::at(&path_of(&format!("c{n}")));
        equal("CPUs in the end", cgroup.cpus("cpuset.cpus.effective")?, machine::online()?)?;
    }
    Ok(())
}

fn random(rng: &mut Rng, below_ms: usize) -> Duration {
    millis(u64::try_from(rng.below(below_ms)).unwrap_or(0))
}

/// What was promised for certain.
fn held(table: &Table) -> Vec<Promise> {
    let held = |known: &Known| match known {
        Known::Held(promise) => Some(promise.clone()),
        _ => None,
    };
    table.known.values().filter_map(held).collect()
}

/// The agent of the next life has what was acknowledged. Of what was not, its word is taken from here on.
fn compare(table: &mut Table, now: &[Promise]) -> Outcome {
    let mut wrong = Vec::new();
    for (name, known) in &mut table.known {
        let owner = format!("unit/{name}");
        let has = now.iter().find(|p| p.owner == owner);
        match (&known, has) {
            (Known::Held(promise), has) if has != Some(promise) => {
                wrong.push(format!("{owner} was acknowledged as {promise:?}, the agent has {has:?}"));
            }
            (Known::Free, Some(promise)) => {
                wrong.push(format!("{owner} was acknowledged as released, the agent has {promise:?}"));
            }
            (Known::Unknown, has) => *known = has.map_or(Known::Free, |p| Known::Held(p.clone())),
            _ => {}
        }
    }
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The agent has made true what it has on record, and that is what was acknowledged.
fn looked_after(shared: &Shared, reserved: &CpuSet) -> Outcome {
    // The observer first: the question is one that makes the agent look at everything.
    settled(shared, reserved)?;
    let (recorded, asked) = (Promise::recorded()?, Promise::asked()?);
    compare(&mut shared.lock(), &asked)?;
    equal("what is on record, and what the agent says", recorded, asked)
}

/// The agent says that kernel and table agree, and the observer finds nothing.
fn settled(shared: &Shared, reserved: &CpuSet) -> Outcome {
    let status = wait_for_answer("/v1/status", secs(30), |s| s["settled"] == true)?;
    equal("problems", &status["problems"], &json!([]))?;
    let mut promises = 0;
    let ask = || {
        let all = Promise::recorded()?;
        promises = all.len();
        Ok(all)
    };
    observe(ask, reserved, When::Settled)?;
    let count = &mut shared.lock().count;
    count.settled += 1;
    count.promises += promises;
    Ok(())
}
