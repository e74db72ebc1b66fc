//! What this kernel has, where an expectation depends on it: found out here by trying, on a cgroup that is gone
//! afterwards, never from a version and never from what truepin says.

use super::{
    cgroup::{Cgroup, errno},
    machine,
    wait::{secs, wait_until},
    workload::Workload,
};
use truepin::CpuSet;

/// What is tried on.
const SCRATCH: &str = "scratch";

/// Whether a cgroup may be given CPUs to hand on to partitions below it: `cpuset.cpus.exclusive` (since Linux 6.7), and
/// with it partitions below a member.
pub fn exclusive_file() -> anyhow::Result<bool> {
    with_scratch(|scratch| Ok(scratch.dir().join("cpuset.cpus.exclusive").exists()))
}

/// Whether `cpuset.cpus` cannot be emptied while tasks are in the cgroup (ENOSPC, up to Linux 6.18).
pub fn empty_refused() -> anyhow::Result<bool> {
    with_scratch(|scratch| {
        scratch.write("cpuset.cpus", &machine::online()?.to_string())?;
        let _inside = Workload::idle().cgroup(SCRATCH).spawn()?;
        match scratch.write("cpuset.cpus", "") {
            Ok(()) => Ok(false),
            Err(e) if errno(&e) == Some(nix::libc::ENOSPC) => Ok(true),
            Err(e) => Err(e),
        }
    })
}

/// Whether a cgroup whose `cpuset.cpus` reaches over a partition beside it ends that (up to Linux 6.18); if not, it has
/// those CPUs in its list and not in its set.
pub fn overlap_ends() -> anyhow::Result<bool> {
    with_scratch(|scratch| {
        let last: CpuSet =
            Cgroup::root().cpus("cpuset.cpus.effective")?.iter().next_back().into_iter().collect();
        scratch.write("cpuset.cpus", &last.to_string())?;
        scratch.write("cpuset.cpus.partition", "root")?;
        let state = || scratch.read("cpuset.cpus.partition");
        anyhow::ensure!(state()? == "root", "a partition by hand reads {:?}", state()?);
        let sibling = Cgroup::create(&format!("{SCRATCH}-sibling"), "")?;
        sibling.write("cpuset.cpus", &last.to_string())?;
        let ended = state()? != "root";
        sibling.remove()?;
        scratch.write("cpuset.cpus.partition", "member")?;
        Ok(ended)
    })
}

/// Whether what a task asked for itself comes back after its set was another (since Linux 6.2).
pub fn remembers_pins() -> anyhow::Result<bool> {
    with_scratch(|scratch| {
        let online = machine::online()?;
        let pin: CpuSet = online.first().into_iter().collect();
        scratch.write("cpuset.cpus", &online.to_string())?;
        let inside = Workload::idle().cgroup(SCRATCH).pin(&pin).spawn()?;
        scratch.write("cpuset.cpus", &online.difference(&pin).to_string())?;
        scratch.write("cpuset.cpus", &online.to_string())?;
        let now = inside.task().allowed()?;
        anyhow::ensure!(now == pin || now == online, "a task pinned to {pin} may use {now}");
        Ok(now == pin)
    })
}

/// Hands `look` a cgroup with cpuset files; afterwards all is as it was.
fn with_scratch<T>(look: impl FnOnce(&Cgroup) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let root = Cgroup::root();
    let enabled = root.read("cgroup.subtree_control")?.split(' ').any(|c| c == "cpuset");
    let scratch = Cgroup::create(SCRATCH, "+cpuset")?;
    let seen = look(&scratch);
    // A killed task leaves its cgroup a moment after its status can be taken.
    wait_until("an empty cgroup", secs(10), || Ok(scratch.remove().is_ok()))?;
    if !enabled {
        root.write("cgroup.subtree_control", "-cpuset")?;
    }
    seen
}
