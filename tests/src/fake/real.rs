//! The real side of a script: cgroupfs, processes of this very binary, CPU hotplug through sysfs.

use super::{
    Errno,
    lockstep::LockstepError,
    script::{FILES, KTHREAD, Op, ROOT_FILES, SELF, Snapshot, Thread, key, shown},
};
use nix::{
    sched::{CpuSet as NixSet, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use truepin::{CgroupPath, CpuSet};

const CPUS: &str = "/sys/devices/system/cpu";
/// Tells the binary that it is one of the processes: `sleep N` or `busy`.
const CHILD: &str = "TRUEPIN_SCRIPT_PROCESS";
/// A removed cgroup counts as a sibling until its grace period ends: some 10 ms, in an emulated guest on a busy
/// machine many times that.
const GONE_WITHIN: Duration = Duration::from_mins(1);

/// To be called first in the `main` of a binary that runs [`super::lockstep`]: in the processes that it starts,
/// this does not return.
pub fn child_entry() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let threads = what.strip_prefix("sleep ").and_then(|n| n.parse().ok()).unwrap_or(1);
    for _ in 1..threads {
        thread::spawn(|| {
            loop {
                thread::park();
            }
        });
    }
    // The parent waits for this byte, and its end of the pipe is the lease on life.
    let ready = io::stdout().write_all(b"+").and_then(|()| io::stdout().flush());
    if ready.is_ok() && what == "busy" {
        loop {
            std::hint::spin_loop();
        }
    }
    let _ = io::stdin().read(&mut [0]);
    std::process::exit(0);
}

struct Process {
    child: Child,
    threads: Vec<u32>,
}

/// A real kernel.
pub(super) struct RealWorld {
    mount: PathBuf,
    /// Whether cpuset was enabled below the root before.
    enabled_before: bool,
    /// CPUs that were online before.
    online_before: CpuSet,
    made: BTreeSet<CgroupPath>,
    processes: BTreeMap<String, Process>,
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> LockstepError {
    let what = what.into();
    move |cause| LockstepError::Io { what, cause }
}

fn read(path: &Path) -> Result<String, LockstepError> {
    fs::read_to_string(path).map_err(io_error(format!("read {}", path.display())))
}

/// One `write(2)`.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    let written = file.write(text.as_bytes())?;
    if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// The kernel's refusal is an answer; anything without an error number is a failure of the run.
fn answer(what: &str, result: io::Result<()>) -> Result<Result<(), Errno>, LockstepError> {
    match result {
        Ok(()) => Ok(Ok(())),
        Err(cause) => match cause.raw_os_error() {
            Some(number) => Ok(Err(Errno(number))),
            None => Err(LockstepError::Io { what: what.into(), cause }),
        },
    }
}

impl RealWorld {
    pub(super) fn new(mount: &Path) -> Result<Self, LockstepError> {
        let control = read(&mount.join("cgroup.subtree_control"))?;
        let own = read(Path::new("/proc/thread-self/cgroup"))?;
        if !own.lines().any(|l| l == "0::/") {
            let need = "to be run from the root cgroup";
            return Err(LockstepError::Machine { need, found: own });
        }
        let online = read(&Path::new(CPUS).join("online"))?;
        let online_before = online.parse().map_err(|e: truepin::idset::ListError| {
            LockstepError::Machine { need: "a list of online CPUs", found: e.to_string() }
        })?;
        Ok(Self {
            mount: mount.into(),
            enabled_before: control.split_whitespace().any(|c| c == "cpuset"),
            online_before,
            made: BTreeSet::new(),
            processes: BTreeMap::new(),
        })
    }

    pub(super) fn online() -> Result<String, LockstepError> {
        read(&Path::new(CPUS).join("online"))
    }

    pub(super) fn possible() -> Result<String, LockstepError> {
        read(&Path::new(CPUS).join("possible"))
    }

    pub(super) fn nodes(&self) -> Result<String, LockstepError> {
        read(&self.mount.join("cpuset.mems.effective"))
    }

    fn dir(&self, path: &CgroupPath) -> PathBuf {
        self.mount.join(path.as_str())
    }

    /// Before a script: cpuset enabled, nothing left of the last one, no mask of our own.
    pub(super) fn begin(&mut self) -> Result<(), LockstepError> {
        let control = self.mount.join("cgroup.subtree_control");
        write(&control, "+cpuset").map_err(io_error("enable cpuset below the root"))?;
        self.settle()?;
        self.scrub()?;
        // With the saved mask wide open, only cpusets narrow ours and that of our children.
        pin(own_thread(), &self.online_before)
            .map_err(|e| LockstepError::Io { what: "reset the own mask".into(), cause: e.into() })
    }

    /// Real kernels lose track of CPUs: some stay marked isolated, or taken from the root, after the last
    /// partition has gone. A partition on just these (and on one CPU more, so that the scheduler's domains are
    /// built anew), and its end, books them back.
    fn scrub(&self) -> Result<(), LockstepError> {
        let list = |file: &str| -> Result<CpuSet, LockstepError> {
            let file = self.mount.join(file);
            // Before 6.7 nothing tells which CPUs are isolated.
            let text = if file.exists() { read(&file)? } else { String::new() };
            text.parse().map_err(|_| LockstepError::Machine { need: "a CPU list", found: text })
        };
        let stray = list("cpuset.cpus.isolated")?
            .union(&self.online_before.difference(&list("cpuset.cpus.effective")?));
        let stray: CpuSet = stray.iter().chain(self.online_before.last()).collect();
        let dir = self.mount.join("scrub");
        fs::create_dir(&dir).map_err(io_error("mkdir scrub"))?;
        for (file, text) in [
            ("cpuset.cpus", stray.to_string()),
            ("cpuset.cpus.partition", "isolated".into()),
            ("cpuset.cpus.partition", "root".into()),
            ("cpuset.cpus.partition", "member".into()),
        ] {
            write(&dir.join(file), &text).map_err(io_error(format!("write scrub/{file}")))?;
        }
        fs::remove_dir(&dir).map_err(io_error("rmdir scrub"))?;
        self.settle()
    }

    /// After a script: processes ended, CPUs back, partitions ended, directories removed.
    pub(super) fn end(&mut self) -> Result<(), LockstepError> {
        for name in self.processes.keys().cloned().collect::<Vec<_>>() {
            self.exit(&name)?;
        }
        for cpu in self.online_before.iter().skip(1) {
            let file = format!("{CPUS}/cpu{cpu}/online");
            write(Path::new(&file), "1").map_err(io_error(format!("write {file}")))?;
        }
        for path in std::mem::take(&mut self.made).iter().rev() {
            // An invalid remote partition keeps its CPUs from the root for ever unless it ends as a member.
            let state = self.dir(path).join("cpuset.cpus.partition");
            if state.exists() {
                write(&state, "member").map_err(io_error(format!("write {}", state.display())))?;
            }
            fs::remove_dir(self.dir(path)).map_err(io_error(format!("rmdir {path}")))?;
        }
        self.settle()
    }

    /// Leaves the root's controllers as they were found.
    pub(super) fn restore(&mut self) -> Result<(), LockstepError> {
        if self.enabled_before {
            return Ok(());
        }
        let control = self.mount.join("cgroup.subtree_control");
        write(&control, "-cpuset").map_err(io_error("disable cpuset below the root"))
    }

    /// Waits until removed cgroups and withdrawn controllers are really gone.
    fn settle(&self) -> Result<(), LockstepError> {
        let start = Instant::now();
        loop {
            let counts = read(&self.mount.join("cgroup.stat"))?;
            let dying = counts.lines().any(|l| {
                let (name, count) = l.split_once(' ').unwrap_or((l, "0"));
                (name == "nr_dying_descendants" || name == "nr_dying_subsys_cpuset") && count != "0"
            });
            if !dying {
                return Ok(());
            }
            if start.elapsed() > GONE_WITHIN {
                return Err(LockstepError::Machine { need: "removed cgroups to go", found: counts });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn id(&self, thread: &Thread) -> Result<u32, Errno> {
        if thread.process == SELF {
            return Ok(own_thread());
        }
        let process = self.processes.get(&thread.process);
        process.and_then(|p| p.threads.get(thread.nth)).copied().ok_or(Errno::ESRCH)
    }

    /// Does one operation; the outer error is a failure of the run, the inner one the kernel's answer.
    pub(super) fn run(&mut self, op: &Op) -> Result<Result<(), Errno>, LockstepError> {
        match op {
            Op::Mkdir(path) => {
                let result = answer("mkdir", fs::create_dir(self.dir(path)))?;
                if result.is_ok() {
                    self.made.insert(path.clone());
                }
                Ok(result)
            }
            Op::Rmdir(path) => {
                let result = answer("rmdir", fs::remove_dir(self.dir(path)))?;
                if result.is_ok() {
                    self.made.remove(path);
                }
                self.settle()?;
                Ok(result)
            }
            Op::Write { path, file, text } => {
                let result = answer("write", write(&self.dir(path).join(file), &format!("{text}\n")))?;
                self.settle()?;
                Ok(result)
            }
            Op::Spawn { name, .. } if self.processes.contains_key(name) => Ok(Err(Errno::EEXIST)),
            Op::Spawn { name, path, threads, busy } => self.spawn(name, path, *threads, *busy),
            Op::Move { name, path } => {
                let leader = Thread { process: name.clone(), nth: 0 };
                self.enter(&leader, path, "cgroup.procs")
            }
            Op::Thread { thread, path } => self.enter(thread, path, "cgroup.threads"),
            Op::Exit(name) if self.processes.contains_key(name) => self.exit(name).map(Ok),
            Op::Exit(_) => Ok(Err(Errno::ESRCH)),
            Op::Pin { thread, cpus } => {
                Ok(self.id(thread).and_then(|id| pin(id, cpus).map_err(|e| Errno(e as i32))))
            }
            Op::Cpu { cpu, online } => {
                let file = format!("{CPUS}/cpu{cpu}/online");
                let result = answer(&file, write(Path::new(&file), if *online { "1" } else { "0" }))?;
                // Tasks that were running there are moved by a stopper thread.
                thread::sleep(Duration::from_millis(100));
                Ok(result)
            }
        }
    }

    fn enter(
        &self,
        thread: &Thread,
        path: &CgroupPath,
        file: &str,
    ) -> Result<Result<(), Errno>, LockstepError> {
        match self.id(thread) {
            Ok(id) => answer(file, write(&self.dir(path).join(file), &id.to_string())),
            Err(errno) => Ok(Err(errno)),
        }
    }

    fn spawn(
        &mut self,
        name: &str,
        path: &CgroupPath,
        threads: u32,
        busy: bool,
    ) -> Result<Result<(), Errno>, LockstepError> {
        let what = if busy { "busy".to_owned() } else { format!("sleep {threads}") };
        let mut child = Command::new("/proc/self/exe")
            .env(CHILD, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io_error("start a process"))?;
        let mut ready = [0];
        let pipe = child.stdout.as_mut();
        let heard = pipe.map_or(Ok(()), |p| p.read_exact(&mut ready));
        heard.map_err(io_error("a process that says it is ready"))?;
        let tasks = format!("/proc/{}/task", child.id());
        let mut ids: Vec<u32> = fs::read_dir(&tasks)
            .map_err(io_error(tasks.as_str()))?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        ids.sort_unstable();
        let pid = child.id().to_string();
        self.processes.insert(name.into(), Process { child, threads: ids });
        let result = answer("cgroup.procs", write(&self.dir(path).join("cgroup.procs"), &pid))?;
        if result.is_err() {
            self.exit(name)?;
        }
        Ok(result)
    }

    fn exit(&mut self, name: &str) -> Result<(), LockstepError> {
        if let Some(mut process) = self.processes.remove(name) {
            process.child.kill().map_err(io_error(format!("end process {name}")))?;
            process.child.wait().map_err(io_error(format!("wait for process {name}")))?;
        }
        Ok(())
    }

    /// Everything that shows.
    pub(super) fn snapshot(&self) -> Result<Snapshot, LockstepError> {
        let mut shot = Snapshot::from([("online".into(), Self::online()?.trim_end().into())]);
        for path in self.made.iter().chain([&CgroupPath::root()]) {
            let files: &[&str] = if path.is_root() { &ROOT_FILES } else { &FILES };
            for file in files {
                let text = match fs::read_to_string(self.dir(path).join(file)) {
                    Ok(text) => Ok(text),
                    Err(e) => Err(e.raw_os_error().map_or(Errno::EIO, Errno)),
                };
                shot.insert(key(path, file), shown(file, text.as_deref().map_err(|e| *e)));
            }
        }
        let (own, kthread) = ([own_thread()], [2]);
        let others = self.processes.iter().map(|(name, p)| (name.as_str(), &p.threads[..]));
        for (name, threads) in others.chain([(SELF, &own[..]), (KTHREAD, &kthread[..])]) {
            for (nth, thread) in threads.iter().enumerate() {
                let label = Thread { process: name.into(), nth };
                shot.insert(format!("task {label}"), mask(*thread)?);
            }
        }
        Ok(shot)
    }
}

fn mask(thread: u32) -> Result<String, LockstepError> {
    let status = read(Path::new(&format!("/proc/{thread}/status")))?;
    let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    Ok(line.unwrap_or("no such line").trim().into())
}

/// The calling thread, from which processes are forked.
fn own_thread() -> u32 {
    gettid().as_raw().unsigned_abs()
}

fn pin(thread: u32, cpus: &CpuSet) -> nix::Result<()> {
    let mut set = NixSet::new();
    for cpu in cpus.iter() {
        set.set(cpu.0 as usize)?;
    }
    let pid = i32::try_from(thread).map_err(|_| nix::errno::Errno::ESRCH)?;
    sched_setaffinity(Pid::from_raw(pid), &set)
}

impl Drop for RealWorld {
    fn drop(&mut self) {
        // Only where a run broke off: `end` has reported its own failures.
        for process in self.processes.values_mut() {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}
