//! `truepin doctor`

use super::{
    Format, Output,
    output::{Failure, json, print},
    table::severity,
};
use crate::{
    doctor::{self, Facts, Report, Severity},
    paths::Paths,
};
use std::fmt::Write as _;

pub(super) fn doctor(format: Format, paths: &Paths) -> Result<u8, Failure> {
    let report = doctor::judge(&Facts::read(&paths.sysfs, paths.cgroup_root.as_deref()));
    match format.output {
        Output::Json => json(&report)?,
        Output::Table => print(&text(&report))?,
    }
    Ok(report.exit_code())
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let width = report.findings.iter().map(|f| f.check.len()).max().unwrap_or(0);
    for f in &report.findings {
        let _ = writeln!(text, "{} {:width$}  {}", severity(f.severity), f.check, f.what);
        // What is as it should be needs no proof on a terminal.
        if f.severity == Severity::Ok {
            continue;
        }
        let under = 12 + width;
        for e in &f.evidence {
            let key = if e.key.is_empty() { String::new() } else { format!("{} = ", e.key) };
            let _ = writeln!(text, "{:under$}  {}: {key}{}", "", e.path, e.value);
        }
        if let Some(remedy) = &f.remedy {
            let _ = writeln!(text, "{:under$}  remedy: {remedy}", "");
        }
    }
    let count = |s: Severity| report.findings.iter().filter(|f| f.severity == s).count();
    let counts = [Severity::Problem, Severity::CannotTell, Severity::Warning, Severity::Note, Severity::Ok];
    let counts: Vec<String> = counts.into_iter().map(|s| format!("{} {}", count(s), s.name())).collect();
    let _ = writeln!(text, "{}", counts.join(", "));
    text
}
