//! Workloads: processes that keep CPUs busy, try to get onto one, or write a file, under a name of choice.
//!
//! They are sub-commands of the guest's own binary (a static one is all that the initramfs holds), described here as
//! [`Program`]s and carried out in [`worker`]. A workload first takes its name, its cgroup and its CPUs, then says
//! `ready` on its standard output; so after [`Program::spawn`] everything that was asked for is in force.

use super::{
    cgroup::Cgroup,
    command::{Ran, run_for},
    task::Task,
    wait::secs,
};
use anyhow::Context;
use nix::errno::Errno;
use std::{
    env,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};
use truepin::CpuSet;

mod odd;
pub mod worker;

/// What to start, and how.
#[derive(Debug, Clone)]
pub struct Program {
    binary: Option<PathBuf>,
    args: Vec<String>,
}

impl Program {
    fn new(args: &[&str]) -> Self {
        Self { binary: None, args: args.iter().map(|a| (*a).to_owned()).collect() }
    }

    fn with(mut self, option: &str, value: &(impl ToString + ?Sized)) -> Self {
        self.args.extend([option.to_owned(), value.to_string()]);
        self
    }

    /// The name that `ps` and truepin see (at most 15 bytes are kept).
    #[must_use]
    pub fn comm(self, name: &str) -> Self {
        self.with("--comm", name)
    }

    /// It moves itself into this cgroup (path below the mount) first; without it, it stays where PID 1 is.
    #[must_use]
    pub fn cgroup(self, path: &str) -> Self {
        self.with("--cgroup", path)
    }

    /// It pins itself to these CPUs first (`sched_setaffinity(2)`); that the kernel refuses is an error of
    /// [`Self::spawn`].
    #[must_use]
    pub fn pin(self, cpus: &CpuSet) -> Self {
        self.with("--pin", cpus)
    }

    /// It ends by itself when it has used this much CPU time since it was ready.
    #[must_use]
    pub fn cpu_time(self, time: Duration) -> Self {
        self.with("--cpu-ms", &time.as_millis())
    }

    /// It lives on for this long after its one deed, so that others can look at it.
    #[must_use]
    pub fn linger(self, time: Duration) -> Self {
        self.with("--linger-ms", &time.as_millis())
    }

    /// It is born in this cgroup (`CLONE_INTO_CGROUP`), as the [`Workload::child`] of a process that waits for it where it
    /// was started.
    #[must_use]
    pub fn born_in(self, path: &str) -> Self {
        self.with("--into", path)
    }

    /// It has this pid (`set_tid` of clone3(2)), which must be free; a child as with [`Self::born_in`].
    #[must_use]
    pub fn born_as(self, pid: i32) -> Self {
        self.with("--tid", &pid)
    }

    /// It has so many children that have ended and that it never waits for.
    #[must_use]
    pub fn zombies(self, count: u32) -> Self {
        self.with("--zombies", &count)
    }

    /// Its main thread ends when it is ready; the others go on.
    #[must_use]
    pub fn leaderless(self) -> Self {
        self.with("--leaderless", &true)
    }

    /// For [`Workload::bomb`]: each child is moved into this cgroup.
    #[must_use]
    pub fn moving_to(self, path: &str) -> Self {
        self.with("--move-to", path)
    }

    /// Another binary than the running one (for tests on the host).
    #[must_use]
    pub fn binary(mut self, path: &Path) -> Self {
        self.binary = Some(path.to_owned());
        self
    }

    fn command(&self) -> anyhow::Result<Command> {
        let binary = match &self.binary {
            Some(path) => path.clone(),
            None => env::current_exe().context("the guest's own binary")?,
        };
        let mut command = Command::new(binary);
        command.args(&self.args);
        Ok(command)
    }

    /// The command line for `truepin run -- …`: the binary, then its arguments.
    pub fn line(&self) -> anyhow::Result<Vec<String>> {
        let command = self.command()?;
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        Ok(words.map(|w| w.to_string_lossy().into_owned()).collect())
    }

    /// Starts it and waits until it is ready.
    pub fn spawn(&self) -> anyhow::Result<Workload> {
        let mut child = self
            .command()?
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", self.args))?;
        let stdout = child.stdout.take().context("a workload without output")?;
        let mut workload = Workload { child, stdout: BufReader::new(stdout) };
        let mut line = String::new();
        workload.stdout.read_line(&mut line).context("reading from a workload")?;
        anyhow::ensure!(line == "ready\n", "{:?} is not ready: {line:?}", self.args);
        Ok(workload)
    }

    /// Runs it to its end, with a limit of 60 s.
    pub fn run(&self) -> anyhow::Result<Ran> {
        run_for(secs(60), &mut self.command()?)
    }

    /// For [`Workload::pinning`] and [`Workload::writing`]: what the kernel said to it.
    pub fn answer(&self) -> anyhow::Result<Result<(), Errno>> {
        let ran = self.run()?;
        for line in ran.stdout.lines() {
            if line == "ok" {
                return Ok(Ok(()));
            }
            if let Some(number) = line.strip_prefix("errno ").and_then(|n| n.split(' ').next()?.parse().ok())
            {
                return Ok(Err(Errno::from_raw(number)));
            }
        }
        anyhow::bail!("no answer from {ran}")
    }
}

/// A running workload; killed when dropped.
pub struct Workload {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

/// A workload that has ended.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    /// How.
    pub status: ExitStatus,
    /// CPU time that it used from `ready` to its end, by its own CPU clock; `None` if it was killed.
    pub cpu: Option<Duration>,
}

impl Workload {
    /// A process of `threads` threads that never sleep.
    #[must_use]
    pub fn burn(threads: u32) -> Program {
        Program::new(&["burn"]).with("--threads", &threads)
    }

    /// A process of `threads` threads, each busy for `on`, asleep for `off`, in turn.
    #[must_use]
    pub fn blink(threads: u32, on: Duration, off: Duration) -> Program {
        let blink = Program::new(&["blink"]).with("--threads", &threads);
        blink.with("--on-ms", &on.as_millis()).with("--off-ms", &off.as_millis())
    }

    /// A process that starts children without end, each of them busy for 1 ms, asleep for `off`, busy for 1 ms.
    #[must_use]
    pub fn bomb(off: Duration) -> Program {
        Program::new(&["bomb"]).with("--on-ms", &1).with("--off-ms", &off.as_millis())
    }

    /// A process that sleeps.
    #[must_use]
    pub fn idle() -> Program {
        Self::blink(1, Duration::ZERO, secs(3600))
    }

    /// A process that calls `sched_setaffinity(2)` for itself and ends; see [`Program::answer`].
    #[must_use]
    pub fn pinning(cpus: &CpuSet) -> Program {
        Program::new(&["pin"]).with("--cpus", cpus)
    }

    /// A process that writes `value` to `file` in one `write(2)` and ends; see [`Program::answer`].
    #[must_use]
    pub fn writing(file: &Path, value: &str) -> Program {
        Program::new(&["write"]).with("--file", &file.display()).with("--value", value)
    }

    /// Its process.
    #[must_use]
    pub fn task(&self) -> Task {
        Task(self.child.id().cast_signed())
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.task().0
    }

    /// The one child of its process.
    pub fn child(&self) -> anyhow::Result<Task> {
        let children = self.task().children()?;
        anyhow::ensure!(children.len() == 1, "{:?} has the children {children:?}", self.task());
        Ok(children[0])
    }

    /// Moves it into a cgroup.
    pub fn enter(&self, cgroup: &Cgroup) -> anyhow::Result<()> {
        cgroup.add(self.pid())
    }

    /// Waits for its end (a [`Program::cpu_time`] makes it come).
    pub fn wait(mut self) -> anyhow::Result<Done> {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).context("reading from a workload")?;
        let status = self.child.wait().context("waiting for a workload")?;
        let cpu = rest.lines().find_map(|l| l.strip_prefix("cpu_ns="));
        let cpu = cpu.map(|n| n.parse().with_context(|| format!("CPU time {n:?}"))).transpose()?;
        Ok(Done { status, cpu: cpu.map(Duration::from_nanos) })
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // It may have ended; and nothing in a scenario's end depends on this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
