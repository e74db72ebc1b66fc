//! `truepin status`

use super::{
    Format, Output,
    ask::ask,
    output::{Failure, json, print},
};
use crate::{
    api::{
        calls::Call,
        documents::{KernelDoc, RecordDoc, StatusDoc},
    },
    paths::Paths,
    store::parent,
};
use std::{fmt::Write, path::Path, time::Duration};
use truepin::verdict::millis;

pub(super) fn status(format: Format, paths: &Paths) -> Result<u8, Failure> {
    let document: StatusDoc = ask(paths, &Call::Status)?;
    match format.output {
        Output::Json => json(&document)?,
        Output::Table => print(&text(&document))?,
    }
    Ok(0)
}

fn record(r: &RecordDoc) -> String {
    let epoch = r.epoch.map_or("nothing saved yet".into(), |e| format!("epoch {e}"));
    let damaged = match r.quarantined {
        0 => String::new(),
        n => format!("; {n} damaged in {}/quarantine", parent(Path::new(&r.path)).display()),
    };
    format!("{epoch}, {}{damaged}", r.path)
}

/// Who wrote a file: by what means that is told, why by no better ones, and what they missed.
fn writers(k: &KernelDoc) -> String {
    let mut text = k.writers_means.clone();
    if k.writers && !k.writers_refused.is_empty() {
        let _ = write!(text, " ({})", k.writers_refused.join("; "));
    }
    if k.writers_lost > 0 {
        let _ = write!(text, "; {} writes lost", k.writers_lost);
    }
    text
}

fn text(s: &StatusDoc) -> String {
    let k = &s.kernel;
    let has = |there: bool, yes: &str, no: &str| if there { yes.to_owned() } else { no.to_owned() };
    let owners: Vec<String> = s.owners.iter().map(|(mode, n)| format!("{n} {mode}")).collect();
    let uptime = Duration::from_secs(s.cost.uptime_ns / 1_000_000_000);
    let rows = [
        (
            "agent",
            format!(
                "truepin {}, pid {}, mode {}, up {}",
                s.version,
                s.pid,
                s.mode,
                humantime::format_duration(uptime)
            ),
        ),
        ("kernel", format!("{}, cgroup2 at {}", k.release, k.cgroup_root)),
        ("cpusets", has(k.cpuset, "on cgroup v2", "not on cgroup v2: sets are not swept")),
        (
            "isolation",
            match (k.cpuset, k.partitions, k.local_partitions) {
                (true, true, _) => "partitions (cpuset.cpus.exclusive); the kernel keeps others out".into(),
                (true, false, true) => "no cpuset.cpus.exclusive: partitions for what truepin starts, members elsewhere (others are seen, not kept out)".into(),
                (true, false, false) => "members only: others are seen, not kept out".into(),
                (false, ..) => "none".into(),
            },
        ),
        ("evidence", has(k.bpf, "eBPF ledger and departures", "none: verdicts are inconclusive")),
        (
            "wake-ups",
            format!(
                "{}; {}",
                has(k.notify, "file changes at once (inotify)", "file changes at the tick only"),
                match k.hotplug.as_str() {
                    "" => "hotplug is not heard: no HELD".to_owned(),
                    "inotify" => "hotplug by inotify alone: no HELD".to_owned(),
                    means => format!("hotplug at once ({means})"),
                }
            ),
        ),
        ("writers", writers(k)),
        (
            "clock",
            format!(
                "{}, {}",
                k.clocksource,
                has(k.clock_stable, "stable across CPUs", "NOT stable: verdicts are inconclusive")
            ),
        ),
        (
            "state",
            match (s.mode.as_str(), s.settled) {
                ("audit", _) => "watching only: nothing is written".into(),
                (_, true) => "kernel and table agree".into(),
                (_, false) => "kernel and table differ; see the findings".into(),
            },
        ),
        ("online", s.pools.online.to_string()),
        ("reserved", s.pools.reserved.to_string()),
        ("exclusive", s.pools.exclusive.to_string()),
        ("shared", s.pools.shared.to_string()),
        ("free", s.pools.free.to_string()),
        ("owners", if owners.is_empty() { "none".into() } else { owners.join(", ") }),
        ("record", s.record.as_ref().map_or("none: this agent keeps no record".into(), record)),
        ("cost", format!("{} KiB resident, {} CPU", s.cost.rss_bytes / 1024, millis(s.cost.cpu_ns))),
    ];
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:<10} {}", if value.is_empty() { "-" } else { &value });
    }
    for problem in &s.problems {
        let _ = writeln!(text, "problem    {problem}");
    }
    for warning in &s.warnings {
        let _ = writeln!(text, "warning    {warning}");
    }
    for f in &s.fences {
        let owners: Vec<String> = f.owners.iter().map(ToString::to_string).collect();
        let _ = writeln!(
            text,
            "fence      {} on CPUs {} (its cpuset.cpus was {:?}), because of {}",
            f.cgroup,
            f.cpus,
            f.first,
            owners.join(", ")
        );
    }
    for f in &s.findings {
        let mended = if f.mended.is_some() { " [mended]" } else { "" };
        let _ = writeln!(text, "finding {:>2} {} {}: {}{mended}", f.id, f.at, f.kind, f.text);
        if let Some(why) = &f.explanation {
            let _ = writeln!(text, "  remedy   {}", why.remedy);
        }
    }
    text
}
