//! What this kernel does where kernels differ, seen without truepin's help: the table in README.md, and the ground on
//! which the other suites' expectations stand. What is seen may be anything that a known kernel does; anything else is
//! a failure, and so is what differs from the last time (`tests/vm/kernels.seen`).

use crate::guest::{
    Agent, Cgroup, Guest, Outcome, Program, Scenario, Style, Suite, Task, Workload, cgroup::errno, equal,
    facts, http, machine, secs, wait_until,
};
use anyhow::Context;
use truepin::{
    CpuId, CpuSet,
    partition::{InvalidReason, PartitionKind, PartitionState},
};

/// The suite. Written for the machine `eight`: CPUs 0-7.
pub const SUITE: Suite = Suite {
    name: "kernel",
    about: "what this kernel does where kernels differ",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("which partitions there are", partitions),
        Scenario::new("an empty list where tasks are", emptied),
        Scenario::new("a sibling's list over a partition", overlap),
        Scenario::new("a mask of its own outlives a change of the set", pins),
        Scenario::new("who leaves a partition's CPUs", kernel_threads),
        Scenario::new("the last CPU of a partition goes", last_cpu),
        // A partition that is valid again while the domains are built from the old list (7.x).
        Scenario::new("CPUs of a partition go and come back", came_back).allow(&["rebuild_sched_domains"]),
        Scenario::new("what truepin finds of it", found),
    ],
};

/// A top-level cgroup with these CPUs (or none of its own) and a process in it.
fn housed(name: &str, cpus: &str, program: &Program) -> anyhow::Result<(Cgroup, Workload)> {
    let cgroup = Cgroup::create(name, "+cpuset")?;
    if !cpus.is_empty() {
        cgroup.write("cpuset.cpus", cpus)?;
    }
    let task = program.clone().cgroup(name).spawn()?;
    Ok((cgroup, task))
}

/// Both go, before another takes the CPUs. A killed task leaves its cgroup a moment after its status can be taken.
fn gone((cgroup, task): (Cgroup, Workload)) -> Outcome {
    drop(task);
    wait_until("an empty cgroup", secs(10), || Ok(cgroup.remove().is_ok()))
}

fn make(cgroup: &Cgroup, kind: &str) -> Outcome {
    cgroup.write("cpuset.cpus.partition", kind)?;
    equal("partition", cgroup.read("cpuset.cpus.partition")?, kind.to_owned())
}

fn state(cgroup: &Cgroup) -> anyhow::Result<PartitionState> {
    Ok(cgroup.read("cpuset.cpus.partition")?.parse()?)
}

fn yes(there: bool) -> &'static str {
    if there { "yes" } else { "no" }
}

fn partitions(guest: &mut Guest) -> Outcome {
    let exclusive = facts::exclusive_file()?;
    guest.saw("cpuset.cpus.exclusive", yes(exclusive));

    let outer = Cgroup::create("outer", "+cpuset")?;
    outer.write("cpuset.cpus", "4-7")?;
    outer.write("cpuset.cpus.partition", "root")?;
    guest.saw("a partition below the root", yes(state(&outer)?.is_partition()));
    let inner = Cgroup::create("outer/inner", "+cpuset")?;
    inner.write("cpuset.cpus", "6-7")?;
    inner.write("cpuset.cpus.partition", "root")?;
    guest.saw("a partition in a partition", yes(state(&inner)?.is_partition()));
    inner.remove()?;
    outer.remove()?;

    let member = Cgroup::create("member", "+cpuset")?;
    let inner = Cgroup::create("member/inner", "+cpuset")?;
    inner.write("cpuset.cpus", "6-7")?;
    if exclusive {
        member.write("cpuset.cpus.exclusive", "6-7")?;
        inner.write("cpuset.cpus.exclusive", "6-7")?;
    }
    inner.write("cpuset.cpus.partition", "root")?;
    let remote = state(&inner)?.is_partition();
    guest.expect("a partition below a member", yes(remote), yes(exclusive), "it takes cpuset.cpus.exclusive")
}

fn emptied(guest: &mut Guest) -> Outcome {
    let refused = facts::empty_refused()?;
    guest.saw("an empty cpuset.cpus where tasks are", if refused { "refused" } else { "accepted" });
    let (cgroup, owner) = housed("full", "2-3", &Workload::idle())?;
    let wrote = cgroup.write("cpuset.cpus", "");
    equal("refused again", wrote.is_err(), refused)?;
    let then = if refused { "2-3".parse()? } else { machine::online()? };
    equal("the task's CPUs", owner.task().allowed()?, then)
}

fn overlap(guest: &mut Guest) -> Outcome {
    const WHAT: &str = "a sibling's cpuset.cpus over a partition";
    let (part, owner) = housed("part", "4-5", &Workload::idle())?;
    let (sibling, other) = housed("sib", "2-3", &Workload::idle())?;
    make(&part, "root")?;
    let wrote = sibling.write("cpuset.cpus", "2-4");
    if let Err(e) = wrote {
        equal("the refusal", errno(&e), Some(nix::libc::EINVAL))?;
        guest.saw(WHAT, "refused");
        return equal("partition", state(&part)?.is_partition(), true);
    }
    let now = state(&part)?;
    let (ours, theirs) = (owner.task().allowed()?, other.task().allowed()?);
    if now.is_partition() {
        guest.saw(WHAT, "is trimmed");
        return equal(
            "CPUs of the owner and the sibling",
            (ours.to_string(), theirs.to_string()),
            ("4-5".into(), "2-3".into()),
        );
    }
    guest.saw(WHAT, "ends the partition");
    equal("the sibling's CPUs", theirs, "2-4".parse::<CpuSet>()?)?;
    sibling.write("cpuset.cpus", "2-3")?;
    equal("a partition of its own accord, the overlap gone", state(&part)?.is_partition(), false)?;
    part.write("cpuset.cpus.partition", "root")?;
    let again = state(&part)?.is_partition();
    guest.saw("root written over root invalid", if again { "is tried again" } else { "does nothing" });
    part.write("cpuset.cpus.partition", "member")?;
    make(&part, "root")
}

fn pins(guest: &mut Guest) -> Outcome {
    let kept = facts::remembers_pins()?;
    guest.saw("a task's own mask after the set changed", if kept { "comes back" } else { "is forgotten" });
    Ok(())
}

fn kernel_threads(guest: &mut Guest) -> Outcome {
    // `kthreadd`, which is bound to nothing.
    let unbound = Task(2);
    equal("name", unbound.comm()?, "kthreadd".to_owned())?;
    let all = unbound.allowed()?;
    for kind in ["root", "isolated"] {
        let (part, owner) = housed(kind, "6-7", &Workload::idle())?;
        make(&part, kind)?;
        let left = unbound.allowed()?.is_disjoint(&"6-7".parse()?);
        let what = format!("unbound kernel threads leave {kind} partitions");
        guest.saw(&what, yes(left));
        gone((part, owner))?;
    }
    guest.say(format!("kthreadd had {all}, has {}", unbound.allowed()?));
    Ok(())
}

/// Takes a CPU away; true when the kernel keeps it.
fn refused_offline(cpu: CpuId) -> anyhow::Result<bool> {
    match machine::set_online(cpu, false) {
        Ok(()) => Ok(false),
        Err(e) if errno(&e) == Some(nix::libc::EBUSY) => Ok(true),
        Err(e) => Err(e),
    }
}

fn last_cpu(guest: &mut Guest) -> Outcome {
    for kind in [PartitionKind::Root, PartitionKind::Isolated] {
        let name = kind.to_string();
        let (part, owner) = housed(&name, "7", &Workload::idle())?;
        make(&part, &name)?;
        let what = format!("the last CPU of populated {kind} partitions goes");
        if refused_offline(CpuId(7))? {
            guest.saw(&what, "refused");
        } else {
            let now = state(&part)?;
            equal("valid without a CPU", now.is_partition(), false)?;
            let bare = now.invalid == Some(InvalidReason::Bare);
            guest.saw(&what, if bare { "invalid" } else { "invalid (reason)" });
            machine::set_online(CpuId(7), true)?;
        }
        equal("state in the end", state(&part)?, PartitionState::valid(kind))?;
        equal("CPUs in the end", part.cpus("cpuset.cpus.effective")?, "7".parse::<CpuSet>()?)?;
        equal("the task's", owner.task().allowed()?, "7".parse::<CpuSet>()?)?;
        gone((part, owner))?;
    }
    Ok(())
}

/// Both CPUs of a partition go and come back; whoever else may use one of them then, has got what leaked.
fn came_back(guest: &mut Guest) -> Outcome {
    let cpus: CpuSet = "6-7".parse()?;
    for kind in ["root", "isolated"] {
        // Busy, so that it is on the CPU that goes: a sleeping task is left alone until it wakes.
        let (part, owner) = housed(kind, "6-7", &Workload::burn(1))?;
        let (sibling, other) = housed("beside", "", &Workload::idle())?;
        make(&part, kind)?;
        let what = format!("both CPUs of {kind} partitions went and came");
        machine::set_online(CpuId(6), false)?;
        if refused_offline(CpuId(7))? {
            guest.saw(&what, "refused");
            // No file shows it: the state is valid, the set is right.
            equal("state", part.read("cpuset.cpus.partition")?, kind.to_owned())?;
            equal("CPUs", part.cpus("cpuset.cpus.effective")?, "7".parse::<CpuSet>()?)?;
            // The attempt had pushed the task off already, to wherever.
            let own: CpuSet = "7".parse()?;
            let out = wait_until("another mask", secs(2), || Ok(owner.task().allowed()? != own)).is_ok();
            let now = owner.task().allowed()?;
            anyhow::ensure!(!out || now == machine::present()?, "the task may use {now}");
            guest.saw(
                "a busy task's mask after a refused offline",
                if out { "is every CPU" } else { "is its set" },
            );
            machine::set_online(CpuId(6), true)?;
        } else {
            machine::set_online(CpuId(6), true)?;
            machine::set_online(CpuId(7), true)?;
            equal("state", part.read("cpuset.cpus.partition")?, kind.to_owned())?;
            let root = Cgroup::root().cpus("cpuset.cpus.effective")?;
            equal("what a sibling has of it", sibling.cpus("cpuset.cpus.effective")?, root.clone())?;
            let leaked = root.intersection(&cpus);
            guest.saw(&what, if leaked.is_empty() { "all its own" } else { "one leaks" });
            if !leaked.is_empty() {
                equal("CPUs that leak", leaked.len(), 1)?;
                let intruder = Workload::pinning(&leaked).comm("intruder").cgroup("").answer()?;
                equal("an intruder's call", intruder, Ok(()))?;
            }
        }
        // Whatever became of it, this is the repair.
        part.write("cpuset.cpus.partition", "member")?;
        make(&part, kind)?;
        equal("CPUs after the repair", part.cpus("cpuset.cpus.effective")?, cpus.clone())?;
        equal("the owner's", owner.task().allowed()?, cpus.clone())?;
        equal("all others'", other.task().allowed()?, machine::online()?.difference(&cpus))?;
        gone((part, owner))?;
        gone((sibling, other))?;
    }
    Ok(())
}

/// What truepin found out by itself.
fn found(guest: &mut Guest) -> Outcome {
    let exclusive = facts::exclusive_file()?;
    let _agent = Agent::start("")?;
    let status = http("GET", "/v1/status", None)?.1;
    let kernel = status["kernel"].as_object().context("no kernel in the status")?;
    equal("partitions", kernel["partitions"].as_bool(), Some(exclusive))?;
    equal("eBPF", kernel["bpf"].as_bool(), Some(true))?;
    guest.saw("truepin knows who wrote a file", yes(kernel["writers"].as_bool().context("no writers")?));
    Ok(())
}
