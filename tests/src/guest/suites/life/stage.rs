//! An agent with owners, and somebody who does to them what must not be done.

use crate::guest::{
    Agent, Cgroup, Guest, Outcome, Program, Ran, RunOwner, Task, Workload, equal, facts, http, millis,
    observer::{Promise, When, observe},
    secs, truepin, wait_until,
};
use anyhow::Context;
use nix::errno::Errno;
use serde_json::Value;
use truepin::CpuSet;

/// The cgroups that a deed is about.
pub(super) struct Trio {
    /// The partition.
    pub(super) home: Cgroup,
    /// Above it.
    pub(super) up: Cgroup,
    /// Beside the one that must not be overlapped: the partition, or the one that it takes its CPUs from.
    pub(super) beside: Cgroup,
    /// The partition's CPUs.
    pub(super) cpus: CpuSet,
    /// One more that is nobody's.
    pub(super) free: CpuSet,
}

/// Who writes what into which file.
pub(super) type Deed = fn(&Trio) -> (Cgroup, &'static str, String);

pub(super) fn idle() -> Program {
    Workload::idle()
}

/// What the kernel makes of a deed when nobody mends it.
pub(super) struct Tried {
    pub(super) deed: Deed,
    /// `cpuset.cpus.partition` of the partition; empty where there is no file.
    pub(super) state: String,
    /// And of the cgroup above it.
    pub(super) above: String,
}

/// On a clean machine, which it is again afterwards.
pub(super) fn by_hand(deed: Deed) -> anyhow::Result<Tried> {
    let local = !facts::exclusive_file()?;
    let up = Cgroup::create("hand", "+cpuset")?;
    let home = Cgroup::create("hand/x", "+cpuset")?;
    let beside = Cgroup::create(if local { "handsib" } else { "hand/beside" }, "+cpuset")?;
    let cpus: CpuSet = "4-5".parse()?;
    let loads = [idle().cgroup(home.path()).spawn()?, idle().cgroup(beside.path()).spawn()?];
    for cgroup in [&up, &home] {
        let list = if local { "cpuset.cpus" } else { "cpuset.cpus.exclusive" };
        cgroup.write(list, "4-5")?;
    }
    home.write("cpuset.cpus", "4-5")?;
    if local {
        up.write("cpuset.cpus.partition", "root")?;
        equal("the slice by hand", up.read("cpuset.cpus.partition")?, "root".to_owned())?;
    }
    home.write("cpuset.cpus.partition", "root")?;
    equal("the partition by hand", home.read("cpuset.cpus.partition")?, "root".to_owned())?;
    let trio = Trio { home, up, beside, cpus, free: "6".parse()? };
    let (cgroup, file, value) = deed(&trio);
    // Where it is refused nothing has happened.
    let _ = cgroup.write(file, &value);
    let state = |c: &Cgroup| c.read("cpuset.cpus.partition").unwrap_or_default();
    let tried = Tried { deed, state: state(&trio.home), above: state(&trio.up) };
    // An invalid one must not be removed: see `clean`.
    for cgroup in [&trio.home, &trio.up] {
        if cgroup.dir().join("cpuset.cpus.partition").exists() {
            cgroup.write("cpuset.cpus.partition", "member")?;
        }
    }
    drop(loads);
    wait_until("empty cgroups", secs(10), || Ok(trio.beside.remove().is_ok() && trio.up.remove().is_ok()))?;
    Ok(tried)
}

/// An agent with an owner, another one beside it, and somebody else.
pub(super) struct Stage {
    pub(super) agent: Agent,
    pub(super) trio: Trio,
    pub(super) owner: String,
    pub(super) kind: &'static str,
    pub(super) task: Task,
    pub(super) local: bool,
    pub(super) bystander: RunOwner,
    /// What keeps the owner's process and the sibling's alive.
    pub(super) _run: Option<RunOwner>,
    pub(super) _loads: Vec<Workload>,
}

/// Where the owner lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// In a cgroup that truepin makes.
    Own,
    /// In one of somebody else's.
    Theirs,
}

/// Two CPUs for what is somebody else's: `work.slice/svc`.
pub(super) fn assign_svc(isolation: &str) -> anyhow::Result<Ran> {
    let to = ["assign", "unit/svc.service", "--cgroup", "/work.slice/svc", "--cpus", "2"];
    truepin(&[&to[..], &["--isolation", isolation]].concat())
}

impl Stage {
    /// Somebody else's cgroup can be a partition only where there is `cpuset.cpus.exclusive`.
    pub(super) fn homes() -> anyhow::Result<&'static [Home]> {
        Ok(if facts::exclusive_file()? { &[Home::Own, Home::Theirs] } else { &[Home::Own] })
    }

    pub(super) fn new(home: Home, isolation: &'static str) -> anyhow::Result<Self> {
        let local = !facts::exclusive_file()?;
        let agent = Agent::start("tick = \"10min\"\n[limits]\nrepairs-per-minute = 1000\n")?;
        let bystander = RunOwner::start("by", &["--cpus", "1", "--isolation", "partition"], &idle())?;
        let mut loads = Vec::new();
        let (home, owner, run) = if home == Home::Own {
            let run = RunOwner::start("db", &["--cpus", "2", "--isolation", isolation], &idle())?;
            (run.cgroup(), run.owner(), Some(run))
        } else {
            let home = Cgroup::create("work.slice/svc", "+cpuset")?;
            loads.push(idle().cgroup(home.path()).spawn()?);
            assign_svc(isolation)?.ok()?;
            (home, "unit/svc.service".to_owned(), None)
        };
        let up = Cgroup::at(home.path().rsplit_once('/').context("a cgroup below another")?.0);
        let beside = if local || run.is_some() { "sib".to_owned() } else { format!("{}/beside", up.path()) };
        let beside = Cgroup::create(&beside, "+cpuset")?;
        loads.push(idle().cgroup(beside.path()).spawn()?);
        let shown = http("GET", &format!("/v1/owners/{owner}"), None)?.1;
        equal("mode", shown["mode"].as_str(), Some("partition"))?;
        let cpus: CpuSet = shown["cpus"].as_str().context("no cpus")?.parse()?;
        let free = http("GET", "/v1/status", None)?.1["pools"]["free"]
            .as_str()
            .context("no free")?
            .parse::<CpuSet>()?;
        let free = free.iter().take(1).collect();
        let task = Task(*home.procs()?.first().context("an owner without a process")?);
        let kind = if isolation == "isolated" { "isolated" } else { "root" };
        let trio = Trio { home, up, beside, cpus, free };
        let stage = Self { agent, trio, owner, kind, task, local, bystander, _run: run, _loads: loads };
        stage.is_whole()?;
        Ok(stage)
    }

    /// Everything is as it should be, by what the kernel shows.
    pub(super) fn is_whole(&self) -> Outcome {
        let Trio { home, up, cpus, .. } = &self.trio;
        equal("partition", home.read("cpuset.cpus.partition")?, self.kind.to_owned())?;
        equal("effective", home.cpus("cpuset.cpus.effective")?, cpus.clone())?;
        equal("mask", self.task.allowed()?, cpus.clone())?;
        equal("another owner's mask", self.bystander.task()?.allowed()?, self.bystander.cpus().clone())?;
        equal("another owner's", self.bystander.cgroup().read("cpuset.cpus.partition")?, "root".to_owned())?;
        let list = if self.local {
            equal("above it", up.read("cpuset.cpus.partition")?, "root".to_owned())?;
            "cpuset.cpus"
        } else {
            equal("its list", home.cpus("cpuset.cpus.exclusive")?, cpus.clone())?;
            "cpuset.cpus.exclusive"
        };
        anyhow::ensure!(cpus.is_subset(&up.cpus(list)?), "{list} above it is {}", up.cpus(list)?);
        Ok(())
    }

    /// It is whole again, nobody gets in, and the independent observer agrees.
    pub(super) fn is_mended(&self) -> Outcome {
        let mut last = String::new();
        let mended = wait_until("the repair", secs(20), || match self.is_whole() {
            Ok(()) => Ok(true),
            Err(e) => {
                last = format!("{e:#}");
                Ok(false)
            }
        });
        mended.with_context(|| format!("last: {last}; its log:\n{}", self.agent.log()))?;
        wait_until("a settled agent", secs(10), || {
            Ok(http("GET", "/v1/status", None)?.1["settled"] == Value::Bool(true))
        })?;
        for (from, cpus) in [
            ("driver", &self.trio.cpus),
            ("", &self.trio.cpus),
            (self.trio.beside.path(), self.bystander.cpus()),
        ] {
            let intruder = Workload::pinning(cpus).comm("intruder").cgroup(from).answer()?;
            equal(&format!("an intruder's call from /{from}"), intruder, Err(Errno::EINVAL))?;
        }
        observe(Promise::recorded, &reserved()?, When::Settled)?;
        Ok(())
    }

    /// A foreign process does the deed; what it led to is mended, and explained if the partition was lost. `blamed`: the
    /// cgroup that must be named then.
    pub(super) fn suffers(
        &self,
        guest: &Guest,
        Tried { deed, state, above }: &Tried,
        blamed: Option<&Cgroup>,
    ) -> Outcome {
        let lost = state != "root" || self.local && !["root", "isolated"].contains(&above.as_str());
        let before = findings()?.len();
        let (cgroup, file, value) = deed(&self.trio);
        let meddler = Workload::writing(&cgroup.dir().join(file), &value).comm("meddler").cgroup("driver");
        let answer = meddler.linger(millis(300)).answer()?;
        let what = format!("{value:?} into {file} of /{} ({answer:?})", cgroup.path());
        self.is_mended().with_context(|| what.clone())?;
        let told = |f: &&Value| {
            let mine = f["text"].as_str().is_some_and(|t| t.starts_with(&self.owner));
            mine && f["kind"] == "set" && f["explanation"].is_object()
        };
        let new = findings()?.split_off(before);
        let Some(told) = new.iter().rev().find(told) else {
            anyhow::ensure!(
                !lost,
                "{what}: by hand it reads {state:?} below {above:?}, and nothing is told: {new:#?}"
            );
            guest.say(format!("{what}: nothing is lost"));
            return Ok(());
        };
        anyhow::ensure!(lost, "{what}: by hand nothing is lost, and here: {told:#}");
        let text = told["text"].as_str().unwrap_or_default();
        // The owner is of another kind than the one by hand.
        let words = format!("{:?}", state.replacen("root", self.kind, 1));
        let named =
            if state.is_empty() { told["explanation"]["cause"] == "no-files" } else { text.contains(&words) };
        anyhow::ensure!(named, "{what}: by hand it reads {words} below {above:?}; told: {told:#}");
        let why = &told["explanation"];
        anyhow::ensure!(why["remedy"].as_str().is_some_and(|r| !r.is_empty()), "no remedy: {told:#}");
        if let Some(blamed) = blamed {
            let name = Value::from(format!("/{}", blamed.path()));
            let named = why["cgroups"].as_array().is_some_and(|all| all.contains(&name));
            anyhow::ensure!(named, "{what}: {name} is not named: {told:#}");
        }
        anyhow::ensure!(told["mended"].is_null() || told["mended"].is_string());
        guest.say(format!("{what}: {text}; remedy: {}", why["remedy"].as_str().unwrap_or_default()));
        Ok(())
    }
}

pub(super) fn findings() -> anyhow::Result<Vec<Value>> {
    let (status, answer) = http("GET", "/v1/findings", None)?;
    anyhow::ensure!(status == 200, "GET /v1/findings: {status} {answer}");
    Ok(answer["findings"].as_array().context("findings are a list")?.clone())
}

pub(super) fn reserved() -> anyhow::Result<CpuSet> {
    let status = http("GET", "/v1/status", None)?.1;
    status["pools"]["reserved"].as_str().context("no reserved")?.parse().context("reserved")
}
