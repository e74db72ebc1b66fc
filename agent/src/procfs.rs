//! What `/proc` and the clocks tell: tasks' masks, time that task clocks leave out, the clock source.

use nix::{
    time::{ClockId, clock_getres, clock_gettime},
    unistd::{SysconfVar, sysconf},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};
use truepin::{
    CgroupPath, CpuId, CpuSet,
    sweep::TaskMask,
    verdict::{ClockState, CpuNoise, Instant},
};

/// A file of `/proc` or a clock that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// Reading failed.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The content is not as documented.
    #[error("{}: {what}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong, with the value.
        what: String,
    },
    /// A clock.
    #[error("reading clock {clock}")]
    Clock {
        /// Which.
        clock: &'static str,
        /// Why.
        source: nix::Error,
    },
}

fn read(path: &Path) -> Result<String, ProcError> {
    fs::read_to_string(path).map_err(|source| ProcError::Read { path: path.into(), source })
}

fn clock_ns(id: ClockId, clock: &'static str) -> Result<u64, ProcError> {
    let t = clock_gettime(id).map_err(|source| ProcError::Clock { clock, source })?;
    Ok(to_ns(t.tv_sec(), t.tv_nsec()))
}

fn to_ns(seconds: i64, nanoseconds: i64) -> u64 {
    let s = u64::try_from(seconds).unwrap_or(0);
    s.saturating_mul(1_000_000_000).saturating_add(u64::try_from(nanoseconds).unwrap_or(0))
}

/// Now, on both clocks.
pub fn now() -> Result<Instant, ProcError> {
    Ok(Instant {
        mono_ns: clock_ns(ClockId::CLOCK_MONOTONIC, "CLOCK_MONOTONIC")?,
        wall_ns: clock_ns(ClockId::CLOCK_REALTIME, "CLOCK_REALTIME")?,
    })
}

/// The scheduler tick: the resolution of the coarse clock, which the tick advances (time(7)).
pub fn tick_ns() -> Result<u64, ProcError> {
    let clock = "CLOCK_MONOTONIC_COARSE";
    let t =
        clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_err(|source| ProcError::Clock { clock, source })?;
    Ok(to_ns(t.tv_sec(), t.tv_nsec()))
}

/// The clock source, and how long the machine has slept since boot.
pub fn clock_state(sysfs: &Path) -> Result<ClockState, ProcError> {
    let source = read(&sysfs.join("sys/devices/system/clocksource/clocksource0/current_clocksource"))?;
    let boot = clock_ns(ClockId::CLOCK_BOOTTIME, "CLOCK_BOOTTIME")?;
    let mono = clock_ns(ClockId::CLOCK_MONOTONIC, "CLOCK_MONOTONIC")?;
    Ok(ClockState { source: source.trim().into(), suspended_ns: boot.saturating_sub(mono) })
}

/// `/proc/sys/kernel/random/boot_id`
pub fn boot_id() -> Result<String, ProcError> {
    Ok(read(Path::new("/proc/sys/kernel/random/boot_id"))?.trim().to_owned())
}

/// Calls `each` with what `/proc/stat` says of every CPU. Its unit is `USER_HZ` (proc(5)): 10 ms on all that we know.
pub fn noise(mut each: impl FnMut(CpuId, CpuNoise)) -> Result<(), ProcError> {
    let path = Path::new("/proc/stat");
    let hz =
        sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|n| u64::try_from(n).ok()).unwrap_or(100).max(1);
    for line in read(path)?.lines() {
        let Some(rest) = line.strip_prefix("cpu") else { continue };
        let mut fields = rest.split_ascii_whitespace();
        // The first line, without a number, is the sum.
        let Some(cpu) = fields.next().filter(|_| !rest.starts_with(' ')).and_then(|n| n.parse().ok()) else {
            continue;
        };
        // user nice system idle iowait irq softirq steal
        let mut column = |n: usize| fields.nth(n).and_then(|v| v.parse::<u64>().ok());
        let (Some(irq), Some(softirq)) = (column(5), column(0)) else {
            return Err(ProcError::Content {
                path: path.into(),
                what: format!("line {line:?} has too few columns"),
            });
        };
        let steal = column(0).unwrap_or(0);
        let ns = |ticks: u64| ticks.saturating_mul(1_000_000_000 / hz);
        each(CpuId(cpu), CpuNoise { irq_ns: ns(irq), softirq_ns: ns(softirq), steal_ns: ns(steal) });
    }
    Ok(())
}

/// `usage_usec` of a cgroup's `cpu.stat`, in nanoseconds; `None` when the cgroup is gone.
pub fn usage_ns(dir: &Path) -> Result<Option<u64>, ProcError> {
    let path = dir.join("cpu.stat");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(19) => return Ok(None),
        Err(source) => return Err(ProcError::Read { path, source }),
    };
    let value = text.lines().find_map(|l| l.strip_prefix("usage_usec ")).and_then(|v| v.parse::<u64>().ok());
    match value {
        Some(us) => Ok(Some(us.saturating_mul(1000))),
        None => Err(ProcError::Content { path, what: "has no usage_usec".into() }),
    }
}

/// The threads in a cgroup's subtree, as they are now; those that end meanwhile are left out.
pub fn tasks_in(dir: &Path) -> Result<Vec<TaskMask>, ProcError> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        let path = dir.join("cgroup.threads");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(19) => continue,
            Err(source) => return Err(ProcError::Read { path, source }),
        };
        for tid in text.lines().filter_map(|l| l.parse::<u32>().ok()) {
            found.extend(task(tid)?);
        }
        let Ok(entries) = fs::read_dir(&dir) else { continue }; // gone since
        dirs.extend(entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
    }
    Ok(found)
}

/// A CPU that leaks shows in the mask of any of them.
const OUTSIDE: usize = 64;
/// A big host has a few kernel threads a CPU, all of them in the root cgroup; reading one takes some 10 us.
const LOOKED_AT: usize = 4096;

/// Threads of the root cgroup at `mount` that are no kernel threads, pid 1 first: at most 64, of the first 4,096 there. Pid 1 may be elsewhere (systemd: `init.scope`) and is read all the same.
pub fn outside(mount: &Path) -> Result<Vec<TaskMask>, ProcError> {
    let mut found: Vec<TaskMask> = task(1)?.into_iter().collect();
    let path = mount.join("cgroup.threads");
    let text = fs::read_to_string(&path).map_err(|source| ProcError::Read { path, source })?;
    let tids = text.lines().filter_map(|l| l.parse::<u32>().ok()).filter(|t| *t > 2).take(LOOKED_AT);
    for tid in tids {
        if found.len() == OUTSIDE {
            break;
        }
        if !is_kernel_thread(tid) {
            found.extend(task(tid)?);
        }
    }
    Ok(found)
}

/// Whether its flags say so (`PF_KTHREAD`, include/linux/sched.h; field 9 of `stat`). What is gone is none.
fn is_kernel_thread(tid: u32) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    let Ok(stat) = fs::read(format!("/proc/{tid}/stat")) else { return false };
    let stat = String::from_utf8_lossy(&stat);
    let rest = stat.rfind(')').and_then(|close| stat.get(close + 1..)).unwrap_or_default();
    rest.split_ascii_whitespace()
        .nth(6)
        .and_then(|f| f.parse::<u32>().ok())
        .is_some_and(|f| f & PF_KTHREAD != 0)
}

/// Looks again at threads that are allowed outside `cpus`: one that has left the cgroup at `path` meanwhile was never a
/// fault of it, and a mask may be on its way.
pub fn still_in(path: &CgroupPath, cpus: &CpuSet, tasks: Vec<TaskMask>) -> Result<Vec<TaskMask>, ProcError> {
    const AGAIN: Duration = Duration::from_millis(20);
    let (mut fine, odd): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|t| t.allowed.is_subset(cpus));
    if odd.is_empty() || cpus.is_empty() {
        fine.extend(odd);
        return Ok(fine);
    }
    std::thread::sleep(AGAIN);
    for t in odd {
        // What cannot be read is gone, or in a cgroup namespace that is not ours: then what was seen first counts.
        let elsewhere = who(t.tid).1.is_some_and(|now| !now.is_within(path));
        if !elsewhere {
            fine.extend(task(t.tid)?);
        }
    }
    Ok(fine)
}

/// One thread; `None` when it is gone or a zombie, which runs nowhere.
pub fn task(tid: u32) -> Result<Option<TaskMask>, ProcError> {
    let gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(3);
    let mut texts = [String::new(), String::new()];
    for (text, name) in texts.iter_mut().zip(["stat", "status"]) {
        // /proc/TID is reachable for every thread though only leaders are listed.
        let path = PathBuf::from(format!("/proc/{tid}/{name}"));
        // A thread's name may be cut in the middle of a character, or be no text at all.
        match fs::read(&path) {
            Ok(bytes) => *text = String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if gone(&e) => return Ok(None),
            Err(source) => return Err(ProcError::Read { path, source }),
        }
    }
    let [stat, status] = texts;
    let bad = |what: String| ProcError::Content { path: format!("/proc/{tid}").into(), what };
    // The name is in parentheses and may hold anything, parentheses too.
    let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else {
        return Err(bad(format!("stat {stat:?} has no name")));
    };
    let comm = stat.get(open + 1..close).unwrap_or_default().to_owned();
    let rest: Vec<&str> = stat.get(close + 1..).unwrap_or_default().split_ascii_whitespace().collect();
    // Field 3 is the state, field 39 the processor (proc(5)).
    let (Some(state), Some(cpu)) = (rest.first(), rest.get(36)) else {
        return Err(bad(format!("stat {stat:?} is too short")));
    };
    if matches!(*state, "Z" | "X") {
        return Ok(None);
    }
    let last_cpu = CpuId(cpu.parse().map_err(|e| bad(format!("processor {cpu:?}: {e}")))?);
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    let list = list.ok_or_else(|| bad("status has no Cpus_allowed_list".into()))?;
    let allowed: CpuSet = list.trim().parse().map_err(|e| bad(format!("Cpus_allowed_list: {e}")))?;
    Ok(Some(TaskMask { tid, comm, allowed, last_cpu, runnable: *state == "R" }))
}

/// A process's name and cgroup as far as they can still be read.
#[must_use]
pub fn who(pid: u32) -> (Option<String>, Option<CgroupPath>) {
    let comm = fs::read(format!("/proc/{pid}/comm")).ok();
    let comm = comm.map(|c| String::from_utf8_lossy(&c).trim().to_owned());
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok();
    let cgroup = cgroup.and_then(|text| text.lines().find_map(|l| l.strip_prefix("0::"))?.parse().ok());
    (comm, cgroup)
}

/// A field of `/proc/PID/stat` by its number in proc(5), of those after the name; `None` when the process is gone.
fn stat_field(pid: u32, number: usize) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name is in parentheses and may hold anything, parentheses too.
    let rest = stat.get(stat.rfind(')')? + 1..)?;
    rest.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

/// When a process started, in clock ticks since boot: with its pid what tells it from a later one of the same number.
#[must_use]
pub fn started(pid: u32) -> Option<u64> {
    stat_field(pid, 22)
}

/// Whether a process is `ancestor` or descends from it, as far as their parents still live.
#[must_use]
pub fn descends(pid: u32, ancestor: u32) -> bool {
    // Deeper trees exist; nobody starts a command from so far above.
    const FAR: usize = 64;
    let parent = |pid: &u32| stat_field(*pid, 4).and_then(|p| u32::try_from(p).ok());
    std::iter::successors(Some(pid), parent).take_while(|p| *p != 0).take(FAR).any(|p| p == ancestor)
}

/// Resident memory in bytes and CPU time in nanoseconds of this process.
pub fn own_cost() -> Result<(u64, u64), ProcError> {
    let path = Path::new("/proc/self/status");
    let kib = read(path)?
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| ProcError::Content { path: path.into(), what: "has no VmRSS".into() })?;
    Ok((kib.saturating_mul(1024), clock_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID, "CLOCK_PROCESS_CPUTIME_ID")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_very_thread() {
        let tid = nix::unistd::gettid().as_raw().cast_unsigned();
        let me = task(tid).unwrap().unwrap();
        assert!(me.runnable && me.allowed.contains(me.last_cpu), "{me:?}");
        assert_eq!(task(u32::MAX / 2).unwrap(), None);
        let (comm, cgroup) = who(std::process::id());
        assert!(comm.is_some_and(|c| !c.is_empty()) && cgroup.is_some());
    }

    #[test]
    fn a_process_its_parent_and_a_stranger() {
        let me = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert!(descends(me, me) && descends(me, parent) && descends(me, 1) && !descends(parent, me));
        assert!(!descends(u32::MAX / 2, me) && !descends(1, me) && !descends(0, me));
        assert!(started(me) >= started(parent) && started(parent).is_some());
        assert_eq!(started(u32::MAX / 2), None);
    }

    #[test]
    fn clocks_and_noise() {
        let (a, b) = (now().unwrap(), now().unwrap());
        assert!(b.mono_ns >= a.mono_ns && a.wall_ns > 1_600_000_000_000_000_000);
        assert!((100_000..=10_000_000).contains(&tick_ns().unwrap()));
        let mut cpus = CpuSet::new();
        noise(|cpu, _| {
            cpus.insert(cpu);
        })
        .unwrap();
        assert!(cpus.contains(task(1).unwrap().unwrap().last_cpu));
    }
}
