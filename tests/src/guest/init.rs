//! PID 1: from the kernel's first user process to power-off.
//!
//! Steps: mount, open the second serial port, install busybox's names, move to `/driver`, check the clock, run the
//! suite of the command line, report the result, power off. Whatever goes wrong on the way is reported as a failure;
//! without a report the host sees a run that did not end, which is a failure as well.
//!
//! Kernel command line: `truepin.suite=NAME`, `truepin.machine=NAME`, `truepin.only=TEXT` (scenarios whose name
//! contains it, `_` for a space), `truepin.colour=1`, `truepin.clocksource=NAME` (what it must be; default `tsc`).

use super::{
    cgroup::{Cgroup, MOUNT},
    clean::DRIVER,
    command::run,
    machine,
    report::{self, Count, Report, Style},
    scenario::{Around, Guest, Suite, run_suite},
    suites,
    wait::{secs, wait_until},
};
use anyhow::Context;
use nix::{
    mount::{MsFlags, mount},
    sys::reboot::{RebootMode, reboot},
    unistd::sync,
};
use std::fs;

/// Results; the first port is the kernel's console.
pub(super) const PORT: &str = "/dev/ttyS1";

/// What is mounted, in this order: type, where, options.
const MOUNTS: [(&str, &str, &str); 10] = [
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", ""),
    ("cgroup2", MOUNT, ""),
    ("tmpfs", "/run", ""),
    ("tmpfs", "/tmp", ""),
    ("tmpfs", "/var", ""),
    ("tmpfs", "/etc", ""),
    ("bpf", "/sys/fs/bpf", ""),
    ("tracefs", "/sys/kernel/tracing", ""),
];

/// Does everything, and powers off. Comes back only when the machine cannot be powered off.
#[must_use]
pub fn main() -> anyhow::Error {
    let ran = mounts().and_then(|()| report::serial(PORT).with_context(|| format!("opening {PORT}")));
    match ran {
        // There is only the console; the host shows it when a run does not end.
        Err(e) => eprintln!("truepin-guest: {e:#}"),
        Ok(port) => {
            let style = suite().map_or(Style::Tap, |s| s.style);
            let report = Report::to_file(port, style);
            let count = prepare_and_run(&report).unwrap_or_else(|e| {
                report.failed(0, "the guest's start", &format!("{e:#}"));
                Count { failed: 1, ..Count::default() }
            });
            report.result(count);
        }
    }
    sync();
    match reboot(RebootMode::RB_POWER_OFF) {
        Ok(never) => match never {},
        Err(e) => anyhow::Error::from(e).context("powering off"),
    }
}

fn mounts() -> anyhow::Result<()> {
    for (kind, at, options) in MOUNTS {
        fs::create_dir_all(at).with_context(|| format!("mkdir {at}"))?;
        let mounted = mount(Some(kind), at, Some(kind), MsFlags::empty(), Some(options));
        match mounted {
            // A kernel built without tracefs tests everything but what needs it.
            Err(e) if kind == "tracefs" => eprintln!("truepin-guest: no tracefs: {e}"),
            mounted => mounted.with_context(|| format!("mounting {kind} on {at}"))?,
        }
    }
    Ok(())
}

fn suite() -> anyhow::Result<&'static Suite> {
    let name = machine::argument("truepin.suite")?.context("no truepin.suite= on the kernel command line")?;
    suites::find(&name).with_context(|| format!("no suite {name:?}; there are {}", suites::names()))
}

fn prepare_and_run(report: &Report) -> anyhow::Result<Count> {
    let suite = suite()?;
    run("/bin/busybox", &["--install", "-s", "/bin"])?.ok().context("busybox's names")?;
    Cgroup::create(DRIVER, "")?.add(1).context("leaving the root cgroup")?;
    let machine_name = machine::argument("truepin.machine")?.unwrap_or_else(|| "unknown".into());
    if suite.style == Style::Tap {
        report.comment(format_args!(
            "{}: {} (kernel {}, machine {machine_name}, CPUs {}, up {} s)",
            suite.name,
            suite.about,
            machine::release()?,
            machine::online()?,
            machine::uptime()?
        ));
    }
    // The kernel measures the TSC for a second or more before it trusts it (`tsc_refine_calibration_work`,
    // arch/x86/kernel/tsc.c), and a machine on an idle host boots faster than that.
    wait_until(
        "another clocksource than tsc-early",
        secs(10),
        || Ok(machine::clocksource()? != "tsc-early"),
    )?;
    let clock = machine::clocksource()?;
    let wanted = machine::argument("truepin.clocksource")?.unwrap_or_else(|| "tsc".into());
    anyhow::ensure!(clock == wanted, "the clocksource is {clock}, expected {wanted}");
    let only = machine::argument("truepin.only")?.unwrap_or_default();
    let colour = machine::argument("truepin.colour")?.is_some_and(|c| c == "1");
    let guest = Guest::new(report.clone(), machine_name, colour);
    Ok(run_suite(suite, &only, 1, guest, Around::machine()?))
}
