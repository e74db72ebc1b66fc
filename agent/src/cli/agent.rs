//! `truepin agent`

use super::{
    ask::runtime,
    import,
    output::{Failure, print},
};
use crate::{
    api::server,
    config::{Config, RunMode},
    containers,
    fault::Faults,
    kubelet,
    notify::Notify,
    paths::Paths,
    rehearse::StartRehearsal,
    run::{Agent, Command, Mailbox},
    start,
};
use clap::{Args, ValueEnum};
use std::{io, path::PathBuf, thread, time::Duration};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, Args)]
pub(super) struct AgentArgs {
    /// What to do [default: as configured, else enforce]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Names of containers that already run, where they cannot be found out: a JSON array of [container id, pod uid, name]
    #[arg(long, value_name = "FILE")]
    containers: Option<PathBuf>,
    /// The kubelet's directory, for `--mode migrate`
    #[arg(long, value_name = "DIR", default_value = kubelet::DIR)]
    kubelet_dir: PathBuf,
    /// Print what it would write at its start as lines for a shell, and change nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Assign, write, repair, judge
    Enforce,
    /// Judge only; nothing is written and nobody is moved
    Audit,
    /// Take over what this node's kubelet has assigned, moving nobody, then enforce
    Migrate,
}

pub(super) fn agent(args: &AgentArgs, paths: &Paths) -> Result<u8, Failure> {
    let mut config = Config::read(&paths.config, paths.config_named)?;
    match args.mode {
        Some(Mode::Enforce) => config.mode = RunMode::Enforce,
        Some(Mode::Audit) => config.mode = RunMode::Audit,
        Some(Mode::Migrate) => config.mode = RunMode::Migrate,
        None => {}
    }
    config.check_mode(&paths.config)?;
    if args.dry_run {
        return dry_run(args, &config, paths);
    }
    let runtime = runtime()?;
    // The socket last of all: whoever connects finds an agent that works.
    let mut prepared = start::prepare(&config, paths, names(args)?)?;
    if config.mode == RunMode::Migrate {
        let running = prepared.engine.running().map_err(|e| Failure::new(3, &e, None))?;
        prepared.adopt = import::takeover(&args.kubelet_dir, args.containers.as_deref(), &running, paths)?;
    }
    let listener = {
        let _inside = runtime.enter();
        server::bind(&paths.socket).map_err(|e| Failure::new(3, &e, None))?
    };
    let (mut agent, mailbox) =
        Agent::new(prepared, config.tick).map_err(|e| Failure::from(io::Error::from(e)))?;
    agent.notify = Notify::from_env().map_err(|e| Failure::new(2, &e, None))?;
    let (alive, ended) = tokio::sync::oneshot::channel::<()>();
    let loop_thread = thread::Builder::new().name("truepin-loop".into()).spawn(move || {
        let _alive = alive; // dropped with the loop, however it ends
        agent.run();
    })?;
    tracing::info!("listening on {}", paths.socket.display());
    let local = tokio::task::LocalSet::new();
    let served = local.block_on(&runtime, async {
        tokio::select! {
            served = server::serve(listener, mailbox.clone()) => served,
            ended = signals(&mailbox) => ended,
            // A daemon without its loop would enforce nothing and look alive.
            _ = ended => Err(io::Error::other("the agent's loop has ended by itself")),
        }
    });
    drop(mailbox.send(Command::Stop));
    let panicked = loop_thread.join().is_err();
    // Only the name goes; pins stay (I9).
    if let Err(error) = std::fs::remove_file(&paths.socket) {
        tracing::warn!("removing {}: {error}", paths.socket.display());
    }
    served?;
    Ok(if panicked { 3 } else { 0 })
}

fn names(args: &AgentArgs) -> Result<containers::Names, Failure> {
    match &args.containers {
        Some(path) => containers::names(path).map_err(|e| Failure::new(2, &e, None)),
        None => Ok(containers::Names::new()),
    }
}

fn dry_run(args: &AgentArgs, config: &Config, paths: &Paths) -> Result<u8, Failure> {
    let mut start = StartRehearsal::new(config, paths, names(args)?)?;
    let mut adopt = Vec::new();
    if config.mode == RunMode::Migrate {
        let running = start.running().map_err(|e| Failure::new(3, &e, None))?;
        adopt = import::takeover(&args.kubelet_dir, args.containers.as_deref(), &running, paths)?;
    }
    print(&start.play(config, paths, adopt).script())?;
    Ok(0)
}

/// Until SIGTERM, SIGINT or SIGHUP. With `TRUEPIN_FAULT=detach-switch=500ms`, SIGUSR2 detaches the switch program for that
/// time: the suite shows with it that lost evidence is found out.
async fn signals(mailbox: &Mailbox) -> io::Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // The terminal went away; there is nothing to reload.
    let mut hangup = signal(SignalKind::hangup())?;
    let mut fault = signal(SignalKind::user_defined2())?;
    // An order that is not understood is said at the start.
    let detach = Faults::ordered().unwrap_or_default().detach_switch;
    if let Some(time) = detach {
        tracing::warn!("fault injection is armed: SIGUSR2 detaches the switch program for {time:?}");
    }
    loop {
        tokio::select! {
            _ = term.recv() => return Ok(()),
            _ = int.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            _ = fault.recv() => {
                let time: Option<Duration> = detach;
                if let Some(time) = time && mailbox.send(Command::DetachSwitch(time)).is_err() {
                    return Ok(());
                }
            }
        }
    }
}
