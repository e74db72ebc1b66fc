//! The machine is what was asked for, and the kernel can do what everything else is built on.

use crate::guest::{
    Cgroup, Guest, Outcome, Scenario, Style, Suite, Task, Workload, equal,
    kmsg::KernelLog,
    machine::{self, read},
    millis, secs, skip, truepin, wait_until,
};
use nix::errno::Errno;
use truepin::CpuSet;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "smoke",
    about: "the machine and the kernel are as expected",
    style: Style::Tap,
    scenarios: &[
        Scenario::new("topology is as asked", topology),
        Scenario::new("BTF is there", btf),
        Scenario::new("cpusets restrict tasks", cpusets),
        Scenario::new("a partition takes its CPUs from all others", partition),
        Scenario::new("workloads do what they say", workloads),
        // It writes that line itself.
        Scenario::new("complaints of the kernel are seen", complaints).allow(&[COMPLAINT]),
        Scenario::new("truepin runs", truepin_runs),
    ],
};

/// The machine `standard`: 2 packages x 2 dies (each a node with an LLC of its own) x 2 cores x 2 threads.
fn topology(guest: &mut Guest) -> Outcome {
    if guest.machine != "standard" {
        return skip(format!("expectations for the machine {:?}", guest.machine));
    }
    equal("online CPUs", machine::online()?.to_string(), "0-15".to_owned())?;
    for cpu in 0..16 {
        let dir = format!("/sys/devices/system/cpu/cpu{cpu}");
        let file = |name: &str| read(&format!("{dir}/{name}"));
        equal("package", file("topology/physical_package_id")?, (cpu / 8).to_string())?;
        let (die, core) = (cpu / 4 * 4, cpu / 2 * 2);
        equal("threads of the core", file("topology/thread_siblings_list")?, format!("{core}-{}", core + 1))?;
        equal("CPUs of the die", file("topology/die_cpus_list")?, format!("{die}-{}", die + 3))?;
        equal("CPUs of the LLC", file("cache/index3/shared_cpu_list")?, format!("{die}-{}", die + 3))?;
    }
    for (node, cpus, distance) in [
        (0, "0-3", "10 12 21 21"),
        (1, "4-7", "12 10 21 21"),
        (2, "8-11", "21 21 10 12"),
        (3, "12-15", "21 21 12 10"),
    ] {
        let dir = format!("/sys/devices/system/node/node{node}");
        equal("CPUs of the node", read(&format!("{dir}/cpulist"))?, cpus.to_owned())?;
        equal("distances", read(&format!("{dir}/distance"))?, distance.to_owned())?;
    }
    Ok(())
}

fn btf(_: &mut Guest) -> Outcome {
    let size = std::fs::metadata("/sys/kernel/btf/vmlinux")?.len();
    anyhow::ensure!(size > 1 << 20, "/sys/kernel/btf/vmlinux has {size} bytes");
    Ok(())
}

fn cpusets(_: &mut Guest) -> Outcome {
    let cgroup = Cgroup::create("pin", "+cpuset")?;
    cgroup.write("cpuset.cpus", "4-5")?;
    cgroup.write("cpuset.mems", "1")?;
    let load = Workload::burn(2).cgroup("pin").spawn()?;
    let cpus: CpuSet = "4-5".parse()?;
    for thread in load.task().threads()? {
        equal("allowed CPUs", thread.allowed()?, cpus.clone())?;
        equal("allowed nodes", thread.mems_allowed()?, "1".parse()?)?;
    }
    equal("cgroup", load.task().cgroup()?, "pin".to_owned())?;
    wait_until("both threads on 4-5", secs(10), || {
        let threads = load.task().threads()?;
        let on: CpuSet = threads.iter().map(|t| t.last_cpu()).collect::<Result<_, _>>()?;
        Ok(threads.len() == 2 && on.is_subset(&cpus))
    })
}

fn partition(_: &mut Guest) -> Outcome {
    let taken: CpuSet = "6-7".parse()?;
    let cgroup = Cgroup::create("part", "+cpuset")?;
    cgroup.write("cpuset.cpus", "6-7")?;
    let owner = Workload::idle().cgroup("part").spawn()?;
    let other = Workload::idle().spawn()?;
    cgroup.write("cpuset.cpus.partition", "root")?;
    equal("partition", cgroup.read("cpuset.cpus.partition")?, "root".to_owned())?;
    equal("owner's CPUs", owner.task().allowed()?, taken.clone())?;
    let rest = machine::online()?.difference(&taken);
    equal("the root's CPUs", Cgroup::root().cpus("cpuset.cpus.effective")?, rest.clone())?;
    equal("another's CPUs", other.task().allowed()?, rest)?;
    equal("an intruder's call", Workload::pinning(&taken).comm("intruder").answer()?, Err(Errno::EINVAL))?;
    let file = cgroup.dir().join("cpuset.cpus.partition");
    equal("a write", Workload::writing(&file, "nonsense").answer()?, Err(Errno::EINVAL))?;
    equal("a write", Workload::writing(&file, "member").answer()?, Ok(()))?;
    equal("partition", cgroup.read("cpuset.cpus.partition")?, "member".to_owned())
}

fn workloads(_: &mut Guest) -> Outcome {
    let cpu: CpuSet = "9".parse()?;
    let load = Workload::burn(1).comm("named").pin(&cpu).cpu_time(millis(300)).spawn()?;
    let task = load.task();
    equal("name", task.comm()?, "named".to_owned())?;
    equal("CPUs", task.allowed()?, cpu)?;
    equal("cgroup", task.cgroup()?, "driver".to_owned())?;
    let done = load.wait()?;
    anyhow::ensure!(done.status.success(), "{}", done.status);
    let used = done.cpu.unwrap_or_default();
    anyhow::ensure!(used >= millis(300) && used < millis(600), "it used {used:?}");
    anyhow::ensure!(!task.is_alive(), "{task:?} still lives");

    let blink = Workload::blink(3, millis(1), millis(50)).spawn()?;
    equal("threads", blink.task().threads()?.len(), 3)?;
    anyhow::ensure!(Task(1).cgroup()? == "driver", "PID 1 is not in /driver");
    Ok(())
}

const COMPLAINT: &str = "WARNING: written by the smoke suite";

fn complaints(_: &mut Guest) -> Outcome {
    let mut log = KernelLog::open()?;
    let before = log.defects()?;
    for line in [COMPLAINT, "not a complaint"] {
        std::fs::write("/dev/kmsg", format!("<4>{line}"))?;
    }
    equal("new defects in the kernel log", log.defects()?, vec![COMPLAINT.to_owned()])?;
    anyhow::ensure!(!before.iter().any(|l| l.contains(COMPLAINT)), "it was there before: {before:?}");
    Ok(())
}

fn truepin_runs(_: &mut Guest) -> Outcome {
    let ran = truepin(&["--version"])?.ok()?;
    anyhow::ensure!(ran.stdout.starts_with("truepin "), "{ran}");
    Ok(())
}
