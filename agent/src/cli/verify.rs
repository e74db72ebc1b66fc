//! `truepin verify`

use super::{
    Format, Output,
    ask::ask,
    output::{Failure, json, print},
    table::{Cell, judgement, table},
};
use crate::{
    api::{
        calls::Call,
        documents::{VerdictDoc, VerdictsDoc},
    },
    paths::Paths,
    run::MAX_WINDOW_MS,
};
use clap::Args;
use std::{fmt::Write, time::Duration};
use truepin::{
    Owner,
    verdict::{Judgement, millis},
};

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Whose pinning; everybody's by default
    owner: Option<Owner>,
    /// Watch for so long from now, instead of judging since the assignment
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    window: Option<Duration>,
    #[command(flatten)]
    format: Format,
}

/// What the agent accepts.
const MAX_WINDOW: Duration = Duration::from_millis(MAX_WINDOW_MS);

pub(super) fn verify(args: &VerifyArgs, paths: &Paths) -> Result<u8, Failure> {
    if args.window.is_some_and(|w| w > MAX_WINDOW) {
        let text = format!("--for: at most {}", humantime::format_duration(MAX_WINDOW));
        return Err(Failure { code: 2, text, hint: None, is_audit: false });
    }
    let for_ms = args.window.map(|w| u64::try_from(w.as_millis()).unwrap_or(u64::MAX));
    if let (Some(window), Output::Table) = (args.window, args.format.output) {
        eprintln!("watching for {} ...", humantime::format_duration(window));
    }
    let asked = ask(paths, &Call::Verdicts { owner: args.owner.clone(), for_ms });
    // 1 would say Violated; of an owner that nobody knows nothing can be told.
    let document: VerdictsDoc =
        asked.map_err(|f| Failure { code: if f.code == 1 { 3 } else { f.code }, ..f })?;
    match (args.format.output, document.verdicts.as_slice()) {
        (Output::Json, [one]) if args.owner.is_some() => json(one)?,
        (Output::Json, _) => json(&document)?,
        (Output::Table, []) => print("no owner holds CPUs\n")?,
        (Output::Table, all) => print(&verdicts(all))?,
    }
    Ok(exit_code(&document.verdicts))
}

/// Any Violated gives 1, else any Inconclusive 3.
pub(super) fn exit_code(verdicts: &[VerdictDoc]) -> u8 {
    match verdicts.iter().map(|v| v.verdict).max() {
        Some(Judgement::Violated) => 1,
        Some(Judgement::Inconclusive) => 3,
        Some(Judgement::Held) | None => 0,
    }
}

/// A paragraph for each verdict.
pub(super) fn verdicts(verdicts: &[VerdictDoc]) -> String {
    let mut text = String::new();
    for v in verdicts {
        let head = vec![
            judgement(Some(v.verdict)),
            Cell::from(&v.owner),
            Cell::from(format!("CPUs {}", v.cpus)),
            Cell::from(format!("mode {}", v.mode.name())),
            Cell::from(format!("over {}", seconds(v.elapsed_ns))),
        ];
        // Without its empty header line.
        text.push_str(table(&["", "", "", "", ""], &[head]).split_once('\n').map_or("", |(_, rest)| rest));
        for reason in &v.reasons {
            let _ = writeln!(text, "  because {reason}");
        }
        for c in &v.cpu {
            let t = &c.times;
            let parts = [
                ("owner", t.owner_ns),
                ("foreign", t.foreign_ns),
                ("bound kthreads", t.kthread_bound_ns),
                ("unbound kthreads", t.kthread_unbound_ns),
                ("idle", t.idle_ns),
                ("straddle", t.straddle_ns),
                ("unknown", t.unknown_ns),
            ];
            let parts: Vec<String> = parts
                .iter()
                .filter(|(_, ns)| *ns > 0)
                .map(|(name, ns)| format!("{name} {}", millis(*ns)))
                .collect();
            let _ = writeln!(text, "  CPU {:<3} {}", c.cpu, parts.join(", "));
        }
        let _ = writeln!(
            text,
            "  moves   {} within its CPUs, {} departures{}",
            v.migrations.saturating_sub(v.departures),
            v.departures,
            if v.moved_out > 0 { format!(", {} out of its cgroup", v.moved_out) } else { String::new() }
        );
        for i in v.intruders.iter().take(10) {
            let _ = writeln!(
                text,
                "  intruder {} (pid {}, {}) in {} on CPU {} for {}, last {}",
                i.comm,
                i.pid,
                i.kind,
                i.cgroup,
                i.cpu,
                millis(i.ns),
                i.last
            );
        }
        if v.intruders.len() > 10 {
            let _ = writeln!(text, "  ... and {} more intruders (-o json has all)", v.intruders.len() - 10);
        }
    }
    text
}

fn seconds(ns: u64) -> String {
    let ms = ns / 1_000_000;
    format!("{}.{:03} s", ms / 1000, ms % 1000)
}
