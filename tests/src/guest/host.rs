//! A scenario on a host with systemd, which is PID 1 there: the driver is a service (`tests/vm/systemd.sh`).
//!
//! `truepin-guest host SUITE NUMBER SCENARIO` runs one scenario of a machine that was just taken up from its saved state,
//! reports on the second serial port, and powers off. Nothing is cleaned up: the machine is thrown away. A scenario that
//! reboots the machine ([`reboot`]) is run again from its beginning in the next life, and asks [`life`].

use super::{
    report::{self, Count, Report},
    scenario::{Around, Guest, Scenario, Suite, run_suite},
    suites,
    wait::{secs, wait_until},
};
use crate::guest::{command::run, init::PORT, kmsg::KernelLog, machine};
use anyhow::Context;
use nix::{
    sys::reboot::{RebootMode, reboot as power},
    unistd::sync,
};
use std::{ffi::OsString, fs, io, process::ExitCode};

/// How many lives have begun.
const LIVES: &str = "/rig/lives";

/// The sub-commands `scenarios SUITE` and `host SUITE NUMBER SCENARIO`; `None` for others.
pub fn main(args: &[OsString]) -> anyhow::Result<Option<ExitCode>> {
    let args: Vec<_> = args.iter().map(|a| a.to_string_lossy()).collect();
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    match args[..] {
        ["scenarios", suite] => {
            for name in find(suite)?.scenarios.iter().map(Scenario::name) {
                println!("{}", name.replace(' ', "_"));
            }
            Ok(Some(ExitCode::SUCCESS))
        }
        ["host", suite, number, scenario] => {
            host(suite, number.parse().with_context(|| format!("number {number:?}"))?, scenario)?;
            Ok(Some(ExitCode::SUCCESS))
        }
        _ => Ok(None),
    }
}

fn find(name: &str) -> anyhow::Result<&'static Suite> {
    suites::find(name).with_context(|| format!("no suite {name:?}; there are {}", suites::names()))
}

fn host(suite: &str, number: usize, scenario: &str) -> anyhow::Result<()> {
    let report =
        Report::to_file(report::serial(PORT).with_context(|| format!("opening {PORT}"))?, find(suite)?.style);
    let count = scenarios(&report, suite, number, scenario).unwrap_or_else(|e| {
        report.failed(number, scenario, &format!("{e:#}"));
        Count { failed: 1, ..Count::default() }
    });
    report.result(count);
    sync();
    match power(RebootMode::RB_POWER_OFF) {
        Ok(never) => match never {},
        Err(e) => Err(e).context("powering off"),
    }
}

fn scenarios(report: &Report, suite: &str, number: usize, scenario: &str) -> anyhow::Result<Count> {
    let suite = find(suite)?;
    let lives = match fs::read_to_string(LIVES) {
        Ok(text) => text.parse::<u32>().with_context(|| format!("{LIVES}: {text:?}"))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
        Err(e) => return Err(e).with_context(|| format!("reading {LIVES}")),
    };
    fs::write(LIVES, (lives + 1).to_string()).with_context(|| format!("writing {LIVES}"))?;
    let mut log = KernelLog::open()?;
    let at = suite.scenarios.iter().position(|s| s.name().replace(' ', "_") == scenario);
    let at = at.with_context(|| format!("no scenario {scenario:?} in {}", suite.name))?;
    let one = Suite { scenarios: &suite.scenarios[at..=at], ..*suite };
    let around = Around { clean: || Ok(()), defects: Box::new(move || log.defects()) };
    let machine = machine::argument("truepin.machine")?.unwrap_or_else(|| "unknown".into());
    Ok(run_suite(&one, "", number, Guest::new(report.clone(), machine, false), around))
}

/// 1 before the scenario has rebooted the machine, 2 after it did for the first time, and so on.
pub fn life() -> anyhow::Result<u32> {
    let text = fs::read_to_string(LIVES).with_context(|| format!("reading {LIVES}"))?;
    text.parse().with_context(|| format!("{LIVES}: {text:?}"))
}

/// `systemctl reboot`, in order; does not come back but with an error.
pub fn reboot() -> anyhow::Result<std::convert::Infallible> {
    sync();
    run("systemctl", &["reboot"])?.ok()?;
    wait_until("the end of this life", secs(90), || Ok(false))?;
    anyhow::bail!("the machine did not reboot")
}
