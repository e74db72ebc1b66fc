//! The life of a partition on a real kernel: somebody ends it in every way that there is, and it is made anew; the reason
//! is told with the cgroup whose file did it. Isolated on request. Partitions where there is no `cpuset.cpus.exclusive`.
//!
//! What a deed comes to differs between kernels. So each is first done by hand, on cgroups that are gone afterwards: what
//! the kernel shows there is what the finding must speak of ([`stage::by_hand`]).

mod stage;

use crate::guest::{
    Agent, Cgroup, Guest, Outcome, RunOwner, Scenario, Style, Suite, Workload, equal, facts, http, machine,
    millis,
    observer::{Promise, When, observe},
    secs, truepin, truepin_json, wait_for, wait_until,
};
use anyhow::Context;
use nix::errno::Errno;
use serde_json::Value;
use stage::{Deed, Home, Stage, Tried, Trio, assign_svc, by_hand, idle, reserved};
use truepin::CpuSet;

/// The suite. Written for the machine `eight`: CPUs 0-7, of which truepin reserves the first core.
pub const SUITE: Suite = Suite {
    name: "life",
    about: "partitions that others end are made anew, with the reason told; isolated; local ones",
    style: Style::Tap,
    scenarios: &[
        // 6.12 warns of it itself, at the overlap and when the partition then ends.
        Scenario::new("a cgroup beside it lists its CPUs", overlap)
            .limit(120)
            .allow(&["update_parent_effective_cpumask", "partition_xcpus_del"]),
        Scenario::new("its own lists are changed and emptied", own_lists).limit(180),
        Scenario::new("lists above it shrink and are emptied", lists_above).limit(180),
        Scenario::new("the controller is withdrawn above it", withdrawn).limit(180),
        Scenario::new("what is above it becomes a partition, or none", state_above).limit(180),
        Scenario::new("its own state is changed", own_state).limit(180),
        Scenario::new("an owner makes partitions of its own CPUs", nested).limit(120),
        Scenario::new("somebody else's partition", theirs).limit(120),
        Scenario::new("isolated on request", isolated).limit(180),
        Scenario::new("a command's partition from its start to its end", command).limit(240),
    ],
};
fn overlap(guest: &mut Guest) -> Outcome {
    // Of what truepin makes the siblings are its own, so there it is the slice that others can reach over, where it is a
    // partition.
    let home = if facts::exclusive_file()? { Home::Theirs } else { Home::Own };
    let tried = by_hand(|t| (t.beside.clone(), "cpuset.cpus", t.cpus.union(&t.free).to_string()))?;
    for isolation in ["partition", "isolated"] {
        let stage = Stage::new(home, isolation)?;
        let beside = stage.trio.beside.clone();
        stage.suffers(guest, &tried, Some(&beside))?;
        // It keeps what it may have.
        equal("the list beside it", beside.cpus("cpuset.cpus")?, stage.trio.free.clone())?;
        drop(stage);
        crate::guest::clean::up()?;
    }
    Ok(())
}

/// Each deed on an owner of each home.
fn each(guest: &Guest, deeds: &[(Deed, Blame)]) -> Outcome {
    let tried: Vec<(Tried, Blame)> =
        deeds.iter().map(|(deed, blame)| Ok((by_hand(*deed)?, *blame))).collect::<anyhow::Result<_>>()?;
    for home in Stage::homes()? {
        let stage = Stage::new(*home, "partition")?;
        for (tried, blame) in &tried {
            let blamed = match blame {
                Blame::Nobody => None,
                Blame::Above => Some(&stage.trio.up),
            };
            stage.suffers(guest, tried, blamed)?;
        }
        drop(stage);
        crate::guest::clean::up()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Blame {
    Nobody,
    Above,
}

fn own_lists(guest: &mut Guest) -> Outcome {
    let mut deeds: Vec<(Deed, Blame)> = vec![
        (|t| (t.home.clone(), "cpuset.cpus", String::new()), Blame::Nobody),
        (|t| (t.home.clone(), "cpuset.cpus", t.free.to_string()), Blame::Nobody),
        (
            |t| (t.home.clone(), "cpuset.cpus", t.cpus.iter().take(1).collect::<CpuSet>().to_string()),
            Blame::Nobody,
        ),
    ];
    if facts::exclusive_file()? {
        deeds.push((|t| (t.home.clone(), "cpuset.cpus.exclusive", String::new()), Blame::Nobody));
        deeds.push((
            |t| {
                (
                    t.home.clone(),
                    "cpuset.cpus.exclusive",
                    t.cpus.iter().take(1).collect::<CpuSet>().to_string(),
                )
            },
            Blame::Nobody,
        ));
    }
    each(guest, &deeds)
}

fn lists_above(guest: &mut Guest) -> Outcome {
    let one: Deed = |t| {
        let list = if t.up.dir().join("cpuset.cpus.exclusive").exists() {
            "cpuset.cpus.exclusive"
        } else {
            "cpuset.cpus"
        };
        (t.up.clone(), list, t.cpus.iter().take(1).collect::<CpuSet>().to_string())
    };
    let none: Deed = |t| {
        let list = if t.up.dir().join("cpuset.cpus.exclusive").exists() {
            "cpuset.cpus.exclusive"
        } else {
            "cpuset.cpus"
        };
        (t.up.clone(), list, String::new())
    };
    each(guest, &[(one, Blame::Above), (none, Blame::Above)])
}

fn withdrawn(guest: &mut Guest) -> Outcome {
    let taken: Deed = |t| (t.up.clone(), "cgroup.subtree_control", "-cpuset".into());
    each(guest, &[(taken, Blame::Above)])
}

fn state_above(guest: &mut Guest) -> Outcome {
    let words: &[Deed] = &[
        |t| (t.up.clone(), "cpuset.cpus.partition", "root".into()),
        |t| (t.up.clone(), "cpuset.cpus.partition", "isolated".into()),
        |t| (t.up.clone(), "cpuset.cpus.partition", "member".into()),
    ];
    let tried: Vec<Tried> = words.iter().map(|deed| by_hand(*deed)).collect::<anyhow::Result<_>>()?;
    let stage = Stage::new(Home::Own, "partition")?;
    for tried in &tried {
        stage.suffers(guest, tried, None)?;
    }
    drop(stage);
    crate::guest::clean::up()?;
    if !facts::exclusive_file()? {
        return Ok(());
    }
    // Of somebody else's it is said, and neither touched nor followed: the owner keeps what it has.
    let stage = Stage::new(Home::Theirs, "partition")?;
    stage.trio.up.write("cpuset.cpus.partition", "root")?;
    let problem = || -> anyhow::Result<Option<String>> {
        let status = http("GET", "/v1/status", None)?.1;
        let all = status["problems"].as_array().cloned().unwrap_or_default();
        Ok(all
            .iter()
            .filter_map(Value::as_str)
            .find(|p| p.contains("is a partition of another manager"))
            .map(Into::into))
    };
    let said = wait_for("the problem", secs(10), problem)?;
    guest.say(format!(
        "/{} reads {:?}: {said}",
        stage.trio.up.path(),
        stage.trio.up.read("cpuset.cpus.partition")?
    ));
    stage.is_whole()?;
    stage.trio.up.write("cpuset.cpus.partition", "member")?;
    wait_until("its end", secs(10), || Ok(problem()?.is_none()))?;
    stage.is_mended()
}

fn own_state(guest: &mut Guest) -> Outcome {
    let member: Deed = |t| (t.home.clone(), "cpuset.cpus.partition", "member".into());
    each(guest, &[(member, Blame::Nobody)])?;
    // The other kind is no loss of the partition, and is taken back all the same.
    for (isolation, other) in [("partition", "isolated"), ("isolated", "root")] {
        let stage = Stage::new(Home::Own, isolation)?;
        stage.trio.home.write("cpuset.cpus.partition", other)?;
        stage.is_mended()?;
        drop(stage);
        crate::guest::clean::up()?;
    }
    Ok(())
}

fn nested(guest: &mut Guest) -> Outcome {
    let stage = Stage::new(Home::Own, "partition")?;
    let Trio { home, cpus, .. } = &stage.trio;
    let inner = home.child("inner");
    let (first, last) = (cpus.first(), cpus.iter().next_back());
    let [first, last]: [CpuSet; 2] = [first, last].map(|c| c.into_iter().collect());
    home.write("cgroup.subtree_control", "+cpuset")?;
    std::fs::create_dir(inner.dir())?;
    inner.write("cpuset.cpus", &last.to_string())?;
    inner.write("cpuset.cpus.partition", "root")?;
    equal("the inner one", inner.read("cpuset.cpus.partition")?, "root".to_owned())?;
    let settled = || -> Outcome {
        equal("the outer one", home.read("cpuset.cpus.partition")?, "root".to_owned())?;
        equal("what is left to it", home.cpus("cpuset.cpus.effective")?, first.clone())?;
        equal("mask", stage.task.allowed()?, first.clone())
    };
    settled()?;
    // Nothing is wrong with that, and nothing is done about it.
    let (_, verdict) = truepin_json(&["verify", &stage.owner, "--for", "1s"])?;
    let said = verdict["reasons"].to_string();
    anyhow::ensure!(!said.contains("gave it CPUs") && !said.contains("partition"), "{verdict:#}");
    settled()?;
    observe(Promise::recorded, &reserved()?, When::Settled)?;
    // The outer one is lost, and made anew; the inner comes back with it, or is its maker's to mend.
    Workload::writing(&home.dir().join("cpuset.cpus.partition"), "member").cgroup("driver").answer()??;
    wait_until("the outer partition", secs(20), || Ok(home.read("cpuset.cpus.partition")? == "root"))?;
    let granted = if stage.local { "cpuset.cpus" } else { "cpuset.cpus.exclusive.effective" };
    guest.say(format!(
        "the inner one reads {:?} with {}, effective {}, and the outer has {}",
        inner.read("cpuset.cpus.partition")?,
        inner.cpus(granted)?,
        inner.cpus("cpuset.cpus.effective")?,
        home.cpus("cpuset.cpus.effective")?
    ));
    anyhow::ensure!(stage.task.allowed()?.is_subset(cpus), "{}", stage.task.allowed()?);
    inner.remove()?;
    stage.is_mended()
}

fn theirs(guest: &mut Guest) -> Outcome {
    // Somebody's partition, further down than truepin looks where the kernel can do that.
    let exclusive = facts::exclusive_file()?;
    let mine = Cgroup::create(if exclusive { "other.slice/deep" } else { "other" }, "+cpuset")?;
    let _load = idle().cgroup(mine.path()).spawn()?;
    let list = if exclusive { "cpuset.cpus.exclusive" } else { "cpuset.cpus" };
    if exclusive {
        Cgroup::at("other.slice").write(list, "6-7")?;
    }
    mine.write(list, "6-7")?;
    mine.write("cpuset.cpus.partition", "root")?;
    equal("somebody's partition", mine.read("cpuset.cpus.partition")?, "root".to_owned())?;
    let stage = Stage::new(Home::Own, "partition")?;
    let pools = http("GET", "/v1/status", None)?.1["pools"].clone();
    guest.say(format!("free beside somebody's 6-7: {}", pools["free"]));
    let held = stage.trio.cpus.union(stage.bystander.cpus());
    equal(
        "free",
        pools["free"].as_str().map(str::parse::<CpuSet>).transpose()?,
        Some("2-5".parse::<CpuSet>()?.difference(&held)),
    )?;
    let refused = truepin(&["run", "--cpus", "2", "--", "true"])?;
    anyhow::ensure!(refused.code() == 125, "6-7 were given away: {refused}");
    equal("still theirs", mine.cpus("cpuset.cpus.effective")?, "6-7".parse()?)?;
    // They ask for ours: the kernel says no, or takes it at the price of theirs; ours stands.
    let greedy = stage.trio.cpus.union(&"6-7".parse()?).to_string();
    let answer =
        Workload::writing(&mine.dir().join(list), &greedy).comm("meddler").cgroup("driver").answer()?;
    guest.say(format!(
        "{greedy} into their {list}: {answer:?}; theirs reads {:?}",
        mine.read("cpuset.cpus.partition")?
    ));
    mine.write(list, "6-7")?;
    stage.is_mended()
}

fn isolated(guest: &mut Guest) -> Outcome {
    let _agent = Agent::start("tick = \"10min\"\n")?;
    let db = RunOwner::start(
        "db",
        &["--cpus", "2", "--isolation", "isolated"],
        &Workload::blink(2, millis(2), millis(40)),
    )?;
    equal("partition", db.cgroup().read("cpuset.cpus.partition")?, "isolated".to_owned())?;
    equal("mask", db.task()?.allowed()?, db.cpus().clone())?;
    let root = Cgroup::root();
    if root.dir().join("cpuset.cpus.isolated").exists() {
        equal("the root's isolated CPUs", root.cpus("cpuset.cpus.isolated")?, db.cpus().clone())?;
    }
    for from in ["driver", ""] {
        let intruder = Workload::pinning(db.cpus()).comm("intruder").cgroup(from).answer()?;
        equal(&format!("an intruder's call from /{from}"), intruder, Err(Errno::EINVAL))?;
    }
    let status = http("GET", "/v1/status", None)?.1;
    let warned = status["warnings"][0].as_str().unwrap_or_default();
    anyhow::ensure!(warned.starts_with("run/db: isolated") && warned.contains("pins itself"), "{status:#}");
    let (_, verdict) = db.verify(&["--for", "3s"])?;
    guest.say(format!("3 s: {} {}", verdict["verdict"], verdict["reasons"]));
    let foreign =
        verdict["cpu"].as_array().into_iter().flatten().filter_map(|c| c["foreign_ns"].as_u64()).sum::<u64>();
    equal("foreign time", foreign, 0)?;
    // Somebody else's cgroup, where that can be one: changed in place when asked again.
    let svc = Cgroup::create("work.slice/svc", "+cpuset")?;
    let load = idle().cgroup(svc.path()).spawn()?;
    if facts::exclusive_file()? {
        for (isolation, word) in [("partition", "root"), ("isolated", "isolated"), ("partition", "root")] {
            let asked = assign_svc(isolation)?.ok()?;
            equal("partition", svc.read("cpuset.cpus.partition")?, word.to_owned())?;
            equal(
                "a warning",
                asked.stderr.contains("warning: unit/svc.service: isolated"),
                isolation == "isolated",
            )?;
            equal("mask", load.task().allowed()?, svc.cpus("cpuset.cpus.exclusive")?)?;
        }
    } else {
        let refused = assign_svc("isolated")?;
        anyhow::ensure!(refused.code() == 1 && refused.stderr.contains("cpuset.cpus.exclusive"), "{refused}");
        let (_, owner) =
            truepin_json(&["assign", "unit/svc.service", "--cgroup", "/work.slice/svc", "--cpus", "2"])?;
        equal("mode", owner["mode"].as_str(), Some("member"))?;
    }
    observe(Promise::recorded, &reserved()?, When::Settled)?;
    let cpus = db.cpus().clone();
    let ended = db.end()?;
    anyhow::ensure!(ended.stderr.contains("warning: run/db: isolated"), "{ended:?}");
    wait_until("its CPUs' return", secs(10), || Ok(cpus.is_subset(&root.cpus("cpuset.cpus.effective")?)))
}

fn command(guest: &mut Guest) -> Outcome {
    let local = !facts::exclusive_file()?;
    let slice = Cgroup::at("truepin.slice");
    // Somebody whose own list is in the way.
    let sib = Cgroup::create("sib", "+cpuset")?;
    sib.write("cpuset.cpus", "1-7")?;
    let load = idle().cgroup("sib").spawn()?;
    let mut agent = Agent::start("tick = \"10min\"\n")?;
    let one = RunOwner::start("one", &["--cpus", "1"], &idle())?;
    let two = RunOwner::start("two", &["--cpus", "2", "--isolation", "isolated"], &idle())?;
    let third = RunOwner::start("third", &["--cpus", "1", "--isolation", "member"], &idle())?;
    let all = [(&one, "root"), (&two, "isolated"), (&third, "member")];
    let whole = || -> Outcome {
        let mut held = CpuSet::new();
        for (owner, state) in all {
            equal(&owner.owner(), owner.cgroup().read("cpuset.cpus.partition")?, state.to_owned())?;
            equal("mask", owner.task()?.allowed()?, owner.cpus().clone())?;
            held |= owner.cpus();
        }
        if local {
            equal("the slice", slice.read("cpuset.cpus.partition")?, "root".to_owned())?;
            equal("the slice's list", slice.cpus("cpuset.cpus")?, held.clone())?;
            // In a slice that is a partition a member's CPUs are closed as well.
            anyhow::ensure!(held.is_disjoint(&Cgroup::root().cpus("cpuset.cpus.effective")?));
        }
        anyhow::ensure!(load.task().allowed()?.is_disjoint(&held), "/sib may use {}", load.task().allowed()?);
        observe(Promise::recorded, &reserved()?, When::Settled).map(drop)
    };
    whole()?;
    guest.say(format!(
        "the slice reads {:?}, cpuset.cpus {:?}, effective {:?}; /sib has {}",
        slice.read("cpuset.cpus.partition")?,
        slice.read("cpuset.cpus")?,
        slice.read("cpuset.cpus.effective")?,
        sib.read("cpuset.cpus")?
    ));
    for from in ["driver", ""] {
        for owner in [&one, &two] {
            let intruder = Workload::pinning(owner.cpus()).comm("intruder").cgroup(from).answer()?;
            equal(
                &format!("an intruder's call from /{from} to {}", owner.owner()),
                intruder,
                Err(Errno::EINVAL),
            )?;
        }
    }
    // Death and return of the agent move nobody.
    agent.kill()?;
    whole_files(&all)?;
    agent.start_again()?;
    whole()?;
    // Released while it runs: where the slice is a partition it keeps its CPUs, and nobody else gets them.
    let cpus = one.cpus().clone();
    truepin(&["release", "run/one"])?.ok()?;
    equal("its state", one.cgroup().read("cpuset.cpus.partition")?, "member".to_owned())?;
    let mask = one.task()?.allowed()?;
    let pools = http("GET", "/v1/status", None)?.1["pools"].clone();
    guest.say(format!("run/one, released, is allowed on {mask}; free are {}", pools["free"]));
    if local {
        equal("the mask of what was released", mask, cpus.clone())?;
        let free: CpuSet = pools["free"].as_str().context("no free")?.parse()?;
        anyhow::ensure!(free.is_disjoint(&cpus), "{free} are free");
    } else {
        anyhow::ensure!(mask.is_disjoint(&two.cpus().union(third.cpus())), "{mask}");
    }
    observe(Promise::recorded, &reserved()?, When::Settled)?;
    one.end()?;
    wait_until("its CPUs' return", secs(20), || {
        let free: CpuSet =
            http("GET", "/v1/status", None)?.1["pools"]["free"].as_str().context("no free")?.parse()?;
        // Nothing but a request wakes the loop when a cgroup of nobody's empties.
        truepin(&["verify", "run/two"])?;
        Ok(cpus.is_subset(&free) && !Cgroup::at("truepin.slice/run-one").exists())
    })?;
    observe(Promise::recorded, &reserved()?, When::Settled)?;
    // Everything back, with the commands still running.
    let tasks = [two.task()?, third.task()?];
    truepin(&["release", "--all"])?.ok()?;
    let online = machine::online()?;
    wait_until("everybody everywhere", secs(10), || {
        Ok(tasks.iter().all(|t| t.allowed().is_ok_and(|a| a == online)))
    })?;
    equal("the slice", slice.read("cpuset.cpus.partition")?, "member".to_owned())?;
    equal("the root's CPUs", Cgroup::root().cpus("cpuset.cpus.effective")?, online)?;
    equal("/sib as it was", sib.read("cpuset.cpus")?, "1-7".to_owned())?;
    two.end()?;
    third.end()?;
    truepin(&["release", "--all"])?.ok()?;
    anyhow::ensure!(!slice.exists(), "the slice is still there");
    Ok(())
}

/// States and masks, by the kernel alone.
fn whole_files(all: &[(&RunOwner, &str)]) -> Outcome {
    for (owner, state) in all {
        equal(&owner.owner(), owner.cgroup().read("cpuset.cpus.partition")?, (*state).to_owned())?;
        equal("mask", owner.task()?.allowed()?, owner.cpus().clone())?;
    }
    Ok(())
}
