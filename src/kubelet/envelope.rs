//! The outer shape of a checkpoint, looked at rather than judged: keys, checksums, 1.37's `data`.
//!
//! Problem: the kubelet's versions are told apart only by which checksum fits, a checksum of 0 fits always, and 1.37
//! keeps the state twice. What vouches for a file's content has to be found out before anything in it is believed.
//! Steps: [`open`] refuses what is not a JSON object; every oddity of its keys is a finding; [`vouch`] finds the
//! version whose checksum fits; [`open_data`] does the same for `data`.
//! Invariant: a content that nothing vouches for, when it has a checksum other than 0, is never trusted.

use super::dump::{checksum, data_checksum};
use super::finding::{Finding, Problem};
use super::json::{Decoded, decode};
use super::layout::{Layout, Value};
use super::syntax::check;
use serde::Serialize;
use std::fmt;

/// Which kubelet wrote a checkpoint. Numbers of the CPU manager's; the memory manager's 1, 2, 3 are `V2`, `V3`, `V4`
/// of the same releases and said as `v1`, `v2`, `v3` in its own document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Before 1.18, by container id.
    V1,
    /// 1.18 to 1.36.
    V2,
    /// 1.36 with the gate `PodLevelResourceManagers`.
    V3,
    /// 1.37.
    V4,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::V3 => "v3",
            Self::V4 => "v4",
        })
    }
}

/// Findings and notes as they are collected.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) findings: Vec<Finding>,
    pub(super) notes: Vec<Finding>,
}

impl Report {
    pub(super) fn find(&mut self, key: impl Into<String>, value: impl Into<String>, problem: Problem) {
        self.findings.push(Finding::new(key, value, problem));
    }

    pub(super) fn note(&mut self, key: impl Into<String>, value: impl Into<String>, problem: Problem) {
        self.notes.push(Finding::new(key, value, problem));
    }

    /// A finding, or a note where nothing depends on it.
    pub(super) fn tell(&mut self, finding: bool, key: &str, value: &str, problem: Problem) {
        let list = if finding { &mut self.findings } else { &mut self.notes };
        list.push(Finding::new(key, value, problem));
    }
}

/// A way to read a file, with the names under which its checksum may have been made.
pub(super) struct Candidate {
    pub(super) format: Format,
    pub(super) layout: &'static Layout,
    pub(super) name: &'static str,
    /// Whether it was made under the name that only early 1.36 used.
    pub(super) early: bool,
}

/// Reads the file in its widest layout and reports its keys; `None` if nothing can be read.
pub(super) fn open(bytes: &[u8], any: &'static Layout, report: &mut Report) -> Option<(Value, Decoded)> {
    if let Err(error) = check(bytes) {
        report.find("", String::from_utf8_lossy(bytes), Problem::NotJson(error));
        return None;
    }
    let first = bytes.iter().find(|b| !b.is_ascii_whitespace());
    if first != Some(&b'{') {
        report.find("", String::from_utf8_lossy(bytes), Problem::NotAnObject);
        return None;
    }
    let mut value = Value::fresh(any);
    let decoded = decode(bytes, any, &mut value);
    report.findings.extend(decoded.oddities.iter().map(|o| Finding::odd(o, "")));
    Some((value, decoded))
}

/// Keys that every version writes. The two of 1.37 come together.
pub(super) fn absent(any: &'static Layout, decoded: &Decoded, report: &mut Report) {
    let there = |key| decoded.present.contains(key);
    for field in any.fields {
        let expected = match field.key {
            "data" => there("dataChecksum"),
            "dataChecksum" => there("data"),
            _ => !field.omit_empty,
        };
        if expected && !there(field.key) {
            report.find(field.key, "", Problem::Absent);
        }
    }
}

/// The candidate whose checksum is the one in the file, and what the others have. A file that does not read as a
/// candidate is not one.
fn vouch(bytes: &[u8], candidates: &'static [Candidate], stored: u64) -> Result<&'static Candidate, String> {
    let mut computed = Vec::new();
    for candidate in candidates {
        let mut value = Value::fresh(candidate.layout);
        if decode(bytes, candidate.layout, &mut value).result.is_err() {
            continue;
        }
        let sum = checksum(candidate.layout, candidate.name, &value);
        if u64::from(sum) == stored {
            return Ok(candidate);
        }
        if !candidate.early {
            computed.push(format!("{sum} as {}", candidate.format));
        }
    }
    Err(computed.join(", "))
}

/// The format for which the file's own checksum speaks: `by_shape` for one of 0, which vouches for nothing; `None` when
/// it is that of no candidate.
pub(super) fn vouched(
    bytes: &[u8],
    candidates: &'static [Candidate],
    stored: u64,
    by_shape: Format,
    present: Present,
    report: &mut Report,
) -> Option<Format> {
    if stored == 0 {
        if present.checksum {
            report.note("checksum", "0", Problem::ChecksumZero);
        }
        return Some(by_shape);
    }
    match vouch(bytes, candidates, stored) {
        Ok(candidate) => {
            if candidate.early {
                report.note("checksum", stored.to_string(), Problem::EarlyName);
            }
            if candidate.format != Format::V3 && present.pods {
                report.find("podEntries", "", Problem::NotCovered);
            }
            Some(candidate.format)
        }
        Err(computed) => {
            report.find("checksum", stored.to_string(), Problem::Checksum { computed });
            None
        }
    }
}

/// What of a file bears on what its checksum covers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Present {
    /// The key `checksum` is there.
    pub(super) checksum: bool,
    /// There are entries of whole pods.
    pub(super) pods: bool,
}

/// 1.37's `data`, read in its widest layout, if its own checksum vouches for it.
pub(super) fn open_data(
    outer: &Value,
    outer_layout: &'static Layout,
    any: &'static Layout,
    report: &mut Report,
) -> Option<Value> {
    let text = outer.text(outer_layout, "Data");
    let (stored, computed) = (outer.uint(outer_layout, "DataChecksum"), data_checksum(text));
    if stored != u64::from(computed) {
        let computed = computed.to_string();
        report.find("dataChecksum", stored.to_string(), Problem::Checksum { computed });
        return None;
    }
    if let Err(error) = check(text.as_bytes()) {
        report.find("data", text, Problem::NotJson(error));
        return None;
    }
    let mut value = Value::fresh(any);
    let decoded = decode(text.as_bytes(), any, &mut value);
    report.findings.extend(decoded.oddities.iter().map(|o| Finding::odd(o, "data.")));
    if let Err(error) = decoded.result {
        report.find("data", "", Problem::Type(error));
        return None;
    }
    for field in any.fields.iter().filter(|f| !f.omit_empty && !decoded.present.contains(f.key)) {
        report.find(format!("data.{}", field.key), "", Problem::Absent);
    }
    Some(value)
}
