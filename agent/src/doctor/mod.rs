//! `truepin doctor`: what on this host helps truepin, what stands in its way, and what to do.
//!
//! Problem: a pinning fails for reasons that lie outside: a kernel without the files, a controller on the wrong hierarchy, a
//! boot parameter, a daemon that writes the same files. Each shows in some file before anything is assigned.
//! Steps: [`facts`] reads these files and judges nothing; [`kernel`], [`boot`] and [`others`] judge what was read and read
//! nothing; here findings are put in order, worst first.
//! Invariants: nothing is written, no daemon is asked, no program is loaded; what cannot be read is said, never taken for
//! absent; each finding names the file, the key and the value that it rests on.

mod boot;
mod facts;
mod kernel;
mod others;
#[cfg(test)]
mod tests;

pub use facts::Facts;

use serde::Serialize;
use std::path::Path;

/// How bad it is, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// To know; nothing is to be done.
    Note,
    /// It costs something, or may end in a fight.
    Warning,
    /// What would tell could not be read.
    CannotTell,
    /// truepin cannot do its work, or what it promises would not hold.
    Problem,
}

impl Severity {
    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::CannotTell => "cannot-tell",
            Self::Problem => "problem",
        }
    }
}

/// What a finding rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// The file or directory.
    pub path: String,
    /// What in it; empty for the whole.
    pub key: String,
    /// What it says there.
    pub value: String,
}

impl Evidence {
    fn new(path: &Path, key: &str, value: impl Into<String>) -> Self {
        Self { path: path.display().to_string(), key: key.into(), value: value.into() }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at, a short word.
    pub check: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// In words.
    pub what: String,
    /// What it rests on.
    pub evidence: Vec<Evidence>,
    /// What to do; none where nothing is to be done.
    pub remedy: Option<String>,
}

impl Finding {
    fn new(check: &'static str, severity: Severity, what: impl Into<String>) -> Self {
        Self { check, severity, what: what.into(), evidence: Vec::new(), remedy: None }
    }

    fn on(mut self, evidence: Evidence) -> Self {
        self.evidence.push(evidence);
        self
    }

    fn remedy(mut self, text: impl Into<String>) -> Self {
        self.remedy = Some(text.into());
        self
    }
}

/// `truepin.doctor/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `truepin.doctor/1`
    pub schema: &'static str,
    /// The worst of all.
    pub severity: Severity,
    /// Worst first, else in the order of the checks.
    pub findings: Vec<Finding>,
}

impl Report {
    /// 0 nothing is wrong, 1 a problem was found, 3 it cannot be told. A warning is nothing wrong.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self.severity {
            Severity::Problem => 1,
            Severity::CannotTell => 3,
            Severity::Ok | Severity::Note | Severity::Warning => 0,
        }
    }
}

/// Judges what was read.
#[must_use]
pub fn judge(facts: &Facts) -> Report {
    let checks = [kernel::judge, boot::judge, others::judge];
    let mut findings: Vec<Finding> = checks.iter().flat_map(|check| check(facts)).collect();
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    let severity = findings.iter().map(|f| f.severity).max().unwrap_or(Severity::Ok);
    Report { schema: "truepin.doctor/1", severity, findings }
}
