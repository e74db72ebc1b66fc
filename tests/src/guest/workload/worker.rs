//! The workloads' own side: `truepin-guest burn|blink|bomb|pin|write …`.

use super::odd;
use crate::guest::{cgroup::Cgroup, cgroup::errno, task::Task, wait::millis};
use anyhow::Context;
use lexopt::prelude::*;
use nix::errno::Errno;
use std::{
    fs,
    hint::spin_loop,
    io::Write,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};
use truepin::CpuSet;

/// Turns between two looks at a clock: some 10 µs on hardware, below a millisecond under TCG.
const SPINS: u32 = 10_000;

/// What was asked for on the command line.
#[derive(Debug, Default)]
struct Asked {
    threads: u32,
    comm: Option<String>,
    cgroup: Option<String>,
    pin: Option<CpuSet>,
    cpu_time: Option<Duration>,
    on: Duration,
    off: Duration,
    linger: Duration,
    cpus: Option<CpuSet>,
    pid: Option<i32>,
    file: Option<String>,
    value: Option<String>,
    into: Option<String>,
    tid: Option<i32>,
    zombies: u32,
    leaderless: bool,
    move_to: Option<String>,
}

/// Carries a sub-command out. `None` when `args` (without the program's name) name none.
pub fn main(args: Vec<std::ffi::OsString>) -> anyhow::Result<Option<ExitCode>> {
    let mut parser = lexopt::Parser::from_args(args);
    let Some(Value(command)) = parser.next()? else { return Ok(None) };
    let command = command.string()?;
    let asked = parse(parser).with_context(|| format!("truepin-guest {command}"))?;
    match command.as_str() {
        "burn" | "blink" => {
            prepare(&asked)?;
            work(&asked)?;
            Ok(Some(ExitCode::SUCCESS))
        }
        "bomb" => {
            prepare(&asked)?;
            say("ready")?;
            odd::bomb(asked.move_to.as_deref(), asked.on, asked.off, |on| turn(on, Duration::ZERO))?;
            Ok(Some(ExitCode::FAILURE))
        }
        "pin" => {
            prepare(&asked)?;
            let cpus = asked.cpus.as_ref().context("pin needs --cpus")?;
            deed(&asked, asked.pid.map_or_else(Task::me, Task).set_affinity(cpus)).map(Some)
        }
        "write" => {
            prepare(&asked)?;
            let file = asked.file.as_deref().context("write needs --file")?;
            let value = asked.value.as_deref().context("write needs --value")?;
            let wrote = fs::OpenOptions::new().write(true).open(file);
            let wrote = wrote.and_then(|mut f| f.write_all(format!("{value}\n").as_bytes()));
            deed(&asked, wrote.with_context(|| format!("writing {value:?} to {file}"))).map(Some)
        }
        _ => Ok(None),
    }
}

fn parse(mut parser: lexopt::Parser) -> anyhow::Result<Asked> {
    let mut asked = Asked { threads: 1, ..Asked::default() };
    while let Some(arg) = parser.next()? {
        let Long(option) = arg else { return Err(arg.unexpected().into()) };
        let option = option.to_owned();
        let value = parser.value()?;
        let ms = || anyhow::Ok(millis(value.parse()?));
        match option.as_str() {
            "threads" => asked.threads = value.parse()?,
            "comm" => asked.comm = Some(value.string()?),
            "cgroup" => asked.cgroup = Some(value.string()?),
            "pin" => asked.pin = Some(value.parse()?),
            "cpu-ms" => asked.cpu_time = Some(ms()?),
            "on-ms" => asked.on = ms()?,
            "off-ms" => asked.off = ms()?,
            "linger-ms" => asked.linger = ms()?,
            "cpus" => asked.cpus = Some(value.parse()?),
            "pid" => asked.pid = Some(value.parse()?),
            "file" => asked.file = Some(value.string()?),
            "into" => asked.into = Some(value.string()?),
            "tid" => asked.tid = Some(value.parse()?),
            "zombies" => asked.zombies = value.parse()?,
            "leaderless" => asked.leaderless = value.parse()?,
            "move-to" => asked.move_to = Some(value.string()?),
            "value" => asked.value = Some(value.string()?),
            _ => anyhow::bail!("unknown option --{option}"),
        }
    }
    Ok(asked)
}

/// Birth, name, cgroup, CPUs: in this order, since a cgroup may forbid the CPUs.
fn prepare(asked: &Asked) -> anyhow::Result<()> {
    odd::born(asked.into.as_deref(), asked.tid)?;
    if let Some(comm) = &asked.comm {
        fs::write("/proc/self/comm", comm).with_context(|| format!("taking the name {comm:?}"))?;
    }
    if let Some(cgroup) = &asked.cgroup {
        Cgroup::at(cgroup).write("cgroup.procs", "0")?;
    }
    if let Some(cpus) = &asked.pin {
        Task::me().set_affinity(cpus)?;
    }
    Ok(())
}

/// One deed: says how it went, lives on for a while if asked to, exit status 1 if it was refused.
fn deed(asked: &Asked, done: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    let code = match done {
        Ok(()) => {
            say("ok")?;
            ExitCode::SUCCESS
        }
        Err(e) => {
            let number = errno(&e).with_context(|| format!("no error number in: {e:#}"))?;
            say(&format!("errno {number} {:?}", Errno::from_raw(number)))?;
            ExitCode::FAILURE
        }
    };
    thread::sleep(asked.linger);
    Ok(code)
}

/// Busy (and idle) threads, until the CPU time is used up, or for ever.
fn work(asked: &Asked) -> anyhow::Result<()> {
    let myself = Task(nix::unistd::getpid().as_raw());
    let from = myself.cpu_time()?;
    for _ in 1..asked.threads {
        let (on, off) = (asked.on, asked.off);
        thread::Builder::new()
            .spawn(move || {
                loop {
                    turn(on, off);
                }
            })
            .context("starting a thread")?;
    }
    odd::zombies(asked.zombies)?;
    say("ready")?;
    if asked.leaderless {
        odd::leave_to_threads();
    }
    loop {
        turn(asked.on, asked.off);
        let Some(enough) = asked.cpu_time else { continue };
        let used = myself.cpu_time()?.saturating_sub(from);
        if used >= enough {
            return say(&format!("cpu_ns={}", used.as_nanos()));
        }
    }
}

/// Busy for `on` (at least a few loops unless there is an `off`), asleep for `off`.
fn turn(on: Duration, off: Duration) {
    let start = Instant::now();
    loop {
        if on.is_zero() && !off.is_zero() {
            break;
        }
        for _ in 0..SPINS {
            spin_loop();
        }
        if start.elapsed() >= on {
            break;
        }
    }
    if !off.is_zero() {
        thread::sleep(off);
    }
}

/// A line, at once: whoever waits for it reads a pipe.
fn say(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("writing to standard output")
}
