//! What the BPF tests and the benchmark share: owner cgroups of their own and processes in them.
#![allow(dead_code, reason = "each user takes the part that it needs")]
#![allow(clippy::unwrap_used, reason = "test code: a panic is a failure")]

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use truepin::{cgroup::CgroupId, ledger::Watched};

/// Says on the terminal, past the harness's capture, what a test could not do.
pub(crate) fn skip(test: &str, why: &str) {
    // In one write: tests run side by side, and the tally counts these lines.
    let _ = io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}

/// What is missing to run BPF programs here.
pub(crate) fn missing() -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("not root".into());
    }
    let btf = "/sys/kernel/btf/vmlinux";
    if !Path::new(btf).exists() {
        return Some(format!("no {btf}: a kernel without BTF"));
    }
    cgroup2().is_none().then(|| "no cgroup2 file system is mounted".into())
}

/// Where cgroup2 is mounted.
pub(crate) fn cgroup2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Asks until the answer is yes; a minute, for machines that others use too.
pub(crate) fn wait_for(what: &str, mut yes: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_mins(1);
    while !yes() {
        assert!(Instant::now() < until, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A cgroup2 directory, removed when dropped.
pub(crate) struct Cgroup {
    pub(crate) path: PathBuf,
    level: u32,
}

impl Cgroup {
    /// A child of the root, with a name of this process's own.
    pub(crate) fn new(name: &str) -> Self {
        let path = cgroup2().unwrap().join(format!("truepin-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self { path, level: 1 }
    }

    pub(crate) fn child(&self, name: &str) -> Self {
        let path = self.path.join(name);
        fs::create_dir(&path).unwrap();
        Self { path, level: self.level + 1 }
    }

    pub(crate) fn id(&self) -> CgroupId {
        CgroupId(fs::metadata(&self.path).unwrap().ino())
    }

    pub(crate) fn watched(&self, cpus: &str, generation: u64) -> Watched {
        Watched { cgroup: self.id(), level: self.level, cpus: cpus.parse().unwrap(), generation }
    }

    /// Moves a running process here.
    pub(crate) fn take(&self, pid: u32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A killed process leaves its cgroup a little after it was waited for.
        let until = Instant::now() + Duration::from_secs(2);
        while fs::remove_dir(&self.path).is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process that is killed and waited for when dropped.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.id().try_into().unwrap())
    }

    /// Stops it, and returns when every thread has stopped: then two clocks can be read one after the other.
    pub(crate) fn stop(&self) {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        self.await_stop();
    }

    /// Returns when every thread has stopped.
    pub(crate) fn await_stop(&self) {
        let stopped = |task: io::Result<fs::DirEntry>| {
            let stat = fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        wait_for("a process to stop", || {
            fs::read_dir(format!("/proc/{}/task", self.id())).unwrap().all(stopped)
        });
    }

    /// Lets it go on.
    pub(crate) fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    /// Time that it ran on any CPU, by the scheduler's own account.
    pub(crate) fn cpu_ns(&self) -> u64 {
        let clock = nix::time::clock_getcpuclockid(self.pid()).unwrap();
        Duration::from(clock.now().unwrap()).as_nanos().try_into().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `role` of this program (a command line of its own) on `cpus`, in `cgroup` from its first instruction.
pub(crate) fn start(program: &mut Command, cgroup: Option<&Cgroup>, cpus: &str) -> Process {
    let args: Vec<_> = program.get_args().map(ToOwned::to_owned).collect();
    let envs: Vec<_> = program.get_envs().filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned()))).collect();
    let join = cgroup.map_or(String::new(), |c| format!("echo $$ > {}/cgroup.procs && ", c.path.display()));
    let child = Command::new("sh")
        .args(["-c", &format!("{join} exec taskset -c {cpus} \"$@\""), "sh"])
        .arg(program.get_program())
        .args(args)
        .envs(envs)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    Process(child)
}
