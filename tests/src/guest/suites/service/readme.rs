//! What the README says of a host, done as it stands there: its own lines are the script.

use super::{DB, TREE, db, main_process, pinned, systemctl};
use crate::guest::{Guest, Outcome, command::run_for, equal, host, secs, wait_for};
use anyhow::Context;
use std::{fs, process::Command, time::Instant};
use truepin::CpuSet;

/// The first block of lines below this heading is what an operator types.
const HEADING: &str = "## Install on a host";
/// The one thing that is not in the README: all CPUs of this machine are emulated by one, which stretches what kernel
/// threads take beyond what they are granted by default.
const BUDGET: &str = "[budgets]\nunbound-kthread = \"200ms/s\"\n";
/// Where the unit's first program notes which CPUs it was given.
const NOTE: &str = "/run/db.first";
/// What it had before the machine was booted.
const BEFORE: &str = "/var/lib/db.before";

/// The commands of the first block of indented lines below [`HEADING`], without their remarks.
fn commands(readme: &str) -> anyhow::Result<Vec<String>> {
    let (_, below) =
        readme.split_once(&format!("\n{HEADING}\n")).with_context(|| format!("no {HEADING:?}"))?;
    let block = below.lines().skip_while(|l| !l.starts_with("    ")).take_while(|l| l.starts_with("    "));
    let bare = |line: &str| line.split("  #").next().unwrap_or_default().trim().to_owned();
    let commands: Vec<String> = block.map(bare).filter(|l| !l.is_empty()).collect();
    anyhow::ensure!(commands.len() > 2, "{HEADING:?} has no commands: {commands:?}");
    Ok(commands)
}

pub(super) fn readme(guest: &mut Guest) -> Outcome {
    let task = db()?;
    fs::create_dir_all("/etc/truepin")?;
    fs::write("/etc/truepin/config.toml", BUDGET)?;
    let start = Instant::now();
    let mut held = false;
    for line in commands(&fs::read_to_string(format!("{TREE}/README.md"))?)? {
        let begun = Instant::now();
        // What was compiled elsewhere is not compiled here.
        let mut shell = Command::new("sh");
        let ran = run_for(secs(120), shell.args(["-ec", &line]).current_dir(TREE).env("BUILT", "/rig/bin"))?;
        guest.say(format!("$ {line}    # {:.1} s", begun.elapsed().as_secs_f64()));
        guest.say(ran.stdout.trim_end());
        let ran = ran.ok()?;
        held |= line.starts_with("truepin verify") && ran.stdout.starts_with("HELD");
    }
    guest.say(format!("from a clean host to HELD: {:.1} s", start.elapsed().as_secs_f64()));
    anyhow::ensure!(held, "no command of {HEADING:?} said HELD");
    pinned(task, &super::owned()?)
}

/// The machine is booted anew; the unit's first program says which CPUs it may use when it begins.
pub(super) fn reboot(guest: &mut Guest) -> Outcome {
    if host::life()? == 1 {
        super::installed_agent()?;
        before_start()?;
        systemctl(&["enable", "--now", "db.service"])?;
        let cpus = super::owned()?;
        fs::write(BEFORE, cpus.to_string()).with_context(|| format!("writing {BEFORE}"))?;
        guest.say(format!("db.service has CPUs {cpus}; rebooting"));
        match host::reboot()? {}
    }
    // The driver is a unit like others, and may be started before them.
    let first =
        wait_for("db.service", secs(60), || Ok(fs::read_to_string(NOTE).ok().filter(|t| t.ends_with('\n'))))?;
    let cpus: CpuSet = fs::read_to_string(BEFORE)?.parse()?;
    equal("the CPUs after the boot", super::owned()?, cpus.clone())?;
    guest.say(format!("after the boot its first program found: {first}"));
    equal("those that its first program found", first.trim().parse::<CpuSet>()?, cpus.clone())?;
    pinned(main_process("db.service")?, &cpus)?;
    let order = systemctl(&["show", "-p", "ActiveEnterTimestampMonotonic", "truepin.service", "db.service"])?;
    guest.say(order.replace('\n', " "));
    Ok(())
}

/// db.service asks for its pin before its main process starts: a control process of a unit is in the unit's cgroup, and an
/// owner that is on record already is answered when its cgroup is as it should be. (With `[[unit]]` nobody has to ask.)
fn before_start() -> Outcome {
    let unit = format!(
        "[Unit]\nAfter=truepin.service\n[Service]\n\
         ExecStartPre=+/usr/local/sbin/truepin assign unit/db.service --cgroup {DB} --cpus 2\n\
         ExecStart=/bin/sh -c 'sed -n \"s/^Cpus_allowed_list:.//p\" /proc/self/status >{NOTE}; \
         exec /rig/bin/truepin-guest blink --threads 2 --on-ms 1 --off-ms 50'\n\
         [Install]\nWantedBy=multi-user.target\n"
    );
    fs::write("/etc/systemd/system/db.service", unit).context("writing db.service")?;
    systemctl(&["daemon-reload"])?;
    Ok(())
}
