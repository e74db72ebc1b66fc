//! `truepin run`
//!
//! The command is started stopped (see `shim`), put into its cgroup, and let go. The agent behind the socket does the
//! work; where there is none, one is embedded for the command's lifetime. The verdict goes to stderr at the end, the
//! command's status is passed on, and so are signals, except those that the terminal sends to both of us anyway.

use super::{Wanted, ask::runtime, assign, output::Failure, verify};
use crate::{
    api::{
        calls::{Call, Outcome},
        client::{self, ClientError},
        documents::{OwnerDoc, ReleasedDoc, VerdictDoc},
    },
    config::Config,
    containers::Names,
    lock::LockError,
    paths::Paths,
    run::{self, Agent, Command as LoopCommand, Mailbox},
    start::{self, Prepared, StartError},
};
use clap::{Args, ValueEnum};
use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::{
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, pipe2},
};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use truepin::{Owner, verdict::Judgement};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    wanted: Wanted,
    /// The owner's name, as run/NAME [default: the command's name and a number]
    #[arg(long)]
    name: Option<String>,
    /// Exit with 1 or 3 when the command succeeded and the pinning did not hold
    #[arg(long, value_enum)]
    fail_on: Option<FailOn>,
    /// The command
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// 1 when violated
    Violated,
    /// 1 when violated, 3 when it cannot be told
    Inconclusive,
}

/// truepin failed before the command ran.
const FAILED: u8 = 125;

/// Signals that are passed on.
const PASSED_ON: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2];

pub(super) fn run(args: &RunArgs, paths: &Paths) -> u8 {
    match try_run(args, paths) {
        Ok(code) => code,
        Err(failure) => {
            failure.print();
            // The contract has one exception: an auditing agent refuses as wrong usage.
            if failure.is_audit { 2 } else { FAILED }
        }
    }
}

fn try_run(args: &RunArgs, paths: &Paths) -> Result<u8, Failure> {
    let owner = owner(args)?;
    // Before the agent, so that the command does not inherit the affinity of an embedded one.
    let mut child = Child::start(args)?;
    let mut admission = assign::admission(owner.clone(), &args.wanted);
    admission.pid = Some(child.pid.as_raw().cast_unsigned());
    let admit = Call::Admit(Box::new(admission));
    // Until here and while a remote agent is asked, a signal ends us as it would any program: the closing gate ends the
    // command, and the agent releases an owner whose cgroup is empty. An embedded agent must not be cut off, and its
    // threads inherit the mask: there signals wait in the descriptor.
    let (asker, outcome, signals) = match Asker::Socket(paths).ask(&admit) {
        Err(ClientError::Unreachable { .. }) => {
            let signals = take_signals()?;
            let asker = Asker::embed_or_wait(paths)?;
            let outcome = asker.ask(&admit)?;
            (asker, outcome, signals)
        }
        other => (Asker::Socket(paths), other?, take_signals()?),
    };
    // A refusal gave us nothing, and the name may be another command's: nothing is released.
    let assigned = match outcome {
        Ok(assigned) => assigned,
        Err(problem) => {
            drop(child);
            asker.end();
            return Err(problem.into());
        }
    };
    // Whatever happens from here on, the owner is released and an embedded agent is ended.
    let ran = serde_json::from_value::<OwnerDoc>(assigned).map_err(Failure::from).and_then(|assigned| {
        assign::warn(&assigned);
        tracing::info!(
            "{owner} has CPUs {} ({}), mode {}",
            assigned.cpus,
            assigned.reason,
            assigned.mode.name()
        );
        child.run(&signals)
    });
    let verdict = ran.is_ok().then(|| last_verdict(&asker, &owner));
    if ran.is_err() {
        drop(child);
        // The failure that is told is the first one.
        drop(asker.ask(&Call::Release(Some(owner))));
    }
    asker.end();
    let status = ran?;
    let code = verdict.map_or(3, |v| say(&v));
    Ok(match (status, args.fail_on) {
        (0, Some(FailOn::Violated)) if code == 1 => 1,
        (0, Some(FailOn::Inconclusive)) => code,
        (status, _) => status,
    })
}

/// From now on signals are read from the descriptor.
fn take_signals() -> Result<SignalFd, Failure> {
    let mut mask: SigSet = PASSED_ON.into_iter().collect();
    mask.add(Signal::SIGCHLD);
    mask.thread_block().map_err(io::Error::from)?;
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC).map_err(io::Error::from)?)
}

fn owner(args: &RunArgs) -> Result<Owner, Failure> {
    let name = args.name.clone().unwrap_or_else(|| {
        let program = args.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        let clean = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' };
        let program: String = program.to_string_lossy().chars().take(64).map(clean).collect();
        format!("{program}-{}", process::id())
    });
    format!("run/{name}").parse().map_err(|e: truepin::owner::OwnerError| Failure::new(2, &e, None))
}

fn last_verdict(asker: &Asker, owner: &Owner) -> Result<Option<VerdictDoc>, Failure> {
    let outcome = asker.ask(&Call::Release(Some(owner.clone())))?;
    let released: ReleasedDoc = serde_json::from_value(outcome?)?;
    Ok(released.verdicts.into_iter().find(|v| v.owner == *owner))
}

/// Prints the verdict on stderr; returns what it would exit with.
fn say(verdict: &Result<Option<VerdictDoc>, Failure>) -> u8 {
    let mut err = anstream::stderr().lock();
    match verdict {
        Ok(Some(v)) => {
            let _ = write!(err, "truepin: {}", verify::verdicts(std::slice::from_ref(v)));
            verify::exit_code(std::slice::from_ref(v))
        }
        Ok(None) => {
            let _ = writeln!(
                err,
                "truepin: {}: no verdict was kept",
                Judgement::Inconclusive.name().to_uppercase()
            );
            3
        }
        Err(failure) => {
            let _ =
                writeln!(err, "truepin: {}: {}", Judgement::Inconclusive.name().to_uppercase(), failure.text);
            3
        }
    }
}

/// Who does the work.
enum Asker<'a> {
    Socket(&'a Paths),
    Embedded { mailbox: Mailbox, thread: JoinHandle<()> },
}

/// How long an agent that holds the lock and does not answer may take to start.
const STARTING: Duration = Duration::from_secs(10);

impl<'a> Asker<'a> {
    /// An agent of our own, or the one that is just starting: it holds the lock before its socket is there.
    fn embed_or_wait(paths: &'a Paths) -> Result<Self, Failure> {
        let config = Config::read(&paths.config, paths.config_named)?;
        let until = Instant::now() + STARTING;
        loop {
            match start::prepare(&config, paths, Names::new()) {
                Err(StartError::Lock(LockError::Held { .. })) if Instant::now() < until => {
                    if Self::Socket(paths).ask(&Call::Status).is_ok() {
                        return Ok(Self::Socket(paths));
                    }
                    thread::sleep(Duration::from_millis(100));
                }
                prepared => return Self::embed(prepared?, &config),
            }
        }
    }

    fn embed(prepared: Prepared, config: &Config) -> Result<Self, Failure> {
        let (agent, mailbox) = Agent::new(prepared, config.tick).map_err(io::Error::from)?;
        let thread = thread::Builder::new().name("truepin-loop".into()).spawn(move || agent.run())?;
        Ok(Self::Embedded { mailbox, thread })
    }

    fn ask(&self, call: &Call) -> Result<Outcome, ClientError> {
        match self {
            Self::Embedded { mailbox, .. } => Ok(run::ask(mailbox, call.clone())),
            Self::Socket(paths) => {
                let broken = |source: io::Error| ClientError::Http {
                    path: paths.socket.clone(),
                    source: source.into(),
                };
                let runtime = runtime().map_err(|f| broken(io::Error::other(f.text)))?;
                runtime.block_on(client::ask(&paths.socket, call))
            }
        }
    }

    fn end(self) {
        if let Self::Embedded { mailbox, thread } = self {
            drop(mailbox.send(LoopCommand::Stop));
            if thread.join().is_err() {
                tracing::error!("the embedded agent ended with a panic");
            }
        }
    }
}

/// The command, stopped at first.
struct Child {
    pid: Pid,
    process: process::Child,
    /// One byte here lets it go; closing it ends it.
    gate: Option<OwnedFd>,
}

impl Child {
    fn start(args: &RunArgs) -> Result<Self, Failure> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(io::Error::from)?;
        fcntl(&read, FcntlArg::F_SETFD(FdFlag::empty())).map_err(io::Error::from)?;
        let process = process::Command::new("/proc/self/exe")
            .arg("__exec")
            .arg(format!("--fd={}", read.as_raw_fd()))
            .arg("--")
            .args(&args.command)
            .spawn()?;
        let pid = i32::try_from(process.id()).map(Pid::from_raw).map_err(io::Error::other)?;
        Ok(Self { pid, process, gate: Some(write) })
    }

    /// Lets it go and waits for its end; its status, 128 + signal when it was killed.
    fn run(&mut self, signals: &SignalFd) -> Result<u8, Failure> {
        if let Some(gate) = self.gate.take() {
            // A command that a signal has ended meanwhile reads nothing any more; its status tells.
            match File::from(gate).write_all(&[1]) {
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
                other => other?,
            }
        }
        self.wait(signals)
    }

    /// Passes signals on until the command ends; its status, 128 + signal when killed.
    fn wait(&mut self, signals: &SignalFd) -> Result<u8, Failure> {
        loop {
            match waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    return Ok(u8::try_from(128 + signal as i32).unwrap_or(u8::MAX));
                }
                Ok(_) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            let Some(info) = signals.read_signal().map_err(io::Error::from)? else { continue };
            let signal = i32::try_from(info.ssi_signo).ok().and_then(|n| Signal::try_from(n).ok());
            // A code above 0 is the kernel's: the terminal signals its whole foreground group, the command included.
            if let Some(signal) = signal.filter(|s| *s != Signal::SIGCHLD && info.ssi_code <= 0) {
                match kill(self.pid, signal) {
                    Ok(()) | Err(nix::Error::ESRCH) => {} // it has just ended: waitpid will say so
                    Err(error) => return Err(io::Error::from(error).into()),
                }
            }
        }
    }
}

impl Drop for Child {
    /// A command that was never let go ends by itself when the gate closes; it must not stay a zombie.
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            drop(gate);
            let _ = self.process.wait();
        }
    }
}
