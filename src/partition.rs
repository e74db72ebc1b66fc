//! The line of `cpuset.cpus.partition`.
//!
//! Writing it always succeeds; only reading it back tells what came of it (`kernel/cgroup/cpuset.c`,
//! `cpuset_partition_show`). A state may be followed by ` invalid`, and that by a reason in parentheses or by
//! nothing: sibling overlap up to 6.18 and hotplug give the bare form. [`Cause`] says what the reasons mean.

mod cause;

pub use cause::Cause;

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// What may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartitionKind {
    /// Not a partition.
    Member,
    /// A partition with load balancing.
    Root,
    /// A partition without load balancing.
    Isolated,
}

impl fmt::Display for PartitionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Member => "member",
            Self::Root => "root",
            Self::Isolated => "isolated",
        })
    }
}

/// Why the kernel calls a partition invalid.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InvalidReason {
    /// ` invalid` without parentheses.
    Bare,
    /// The kernel's words, without the parentheses.
    Said(String),
}

/// What is read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PartitionState {
    /// The state that was asked for.
    pub kind: PartitionKind,
    /// Set when the kernel does not honour it.
    pub invalid: Option<InvalidReason>,
}

/// A line that is no partition state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line:?} is not a partition state")]
pub struct PartitionError {
    /// The line as read.
    pub line: String,
}

impl PartitionState {
    /// The state without `invalid`.
    #[must_use]
    pub fn valid(kind: PartitionKind) -> Self {
        Self { kind, invalid: None }
    }

    /// What keeps it from being a partition; `None` for one that the kernel honours.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match &self.invalid {
            Some(reason) => Some(reason.cause()),
            None => (self.kind == PartitionKind::Member).then_some(Cause::Member),
        }
    }

    /// A root or isolated partition that the kernel honours.
    #[must_use]
    pub fn is_partition(&self) -> bool {
        self.kind != PartitionKind::Member && self.invalid.is_none()
    }
}

impl FromStr for PartitionState {
    type Err = PartitionError;

    fn from_str(line: &str) -> Result<Self, PartitionError> {
        let text = line.trim();
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        let refuse = || PartitionError { line: line.into() };
        let kind = match word {
            "member" => PartitionKind::Member,
            "root" => PartitionKind::Root,
            "isolated" => PartitionKind::Isolated,
            _ => return Err(refuse()),
        };
        let invalid = match rest.trim() {
            "" => None,
            "invalid" => Some(InvalidReason::Bare),
            said => {
                let said = said.strip_prefix("invalid").ok_or_else(refuse)?.trim();
                let said = said.strip_prefix('(').and_then(|s| s.strip_suffix(')')).ok_or_else(refuse)?;
                Some(InvalidReason::Said(said.into()))
            }
        };
        Ok(Self { kind, invalid })
    }
}

impl fmt::Display for PartitionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        match &self.invalid {
            None => Ok(()),
            Some(InvalidReason::Bare) => f.write_str(" invalid"),
            Some(InvalidReason::Said(said)) => write!(f, " invalid ({said})"),
        }
    }
}

impl TryFrom<String> for PartitionState {
    type Error = PartitionError;

    fn try_from(line: String) -> Result<Self, PartitionError> {
        line.parse()
    }
}

impl From<PartitionState> for String {
    fn from(state: PartitionState) -> Self {
        state.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_both_ways() {
        for line in [
            "member",
            "root",
            "isolated",
            "root invalid",
            "isolated invalid (No cpu available due to hotplug)",
            "root invalid (Cpu list in cpuset.cpus not exclusive)",
        ] {
            let state: PartitionState = line.parse().unwrap();
            assert_eq!(state.to_string(), line);
            assert_eq!(state.is_partition(), line == "root" || line == "isolated");
            assert_eq!(format!("{line}\n").parse::<PartitionState>().unwrap(), state);
        }
        for bad in ["", "roots", "root valid", "root invalid reason", "root invalid (x"] {
            assert!(bad.parse::<PartitionState>().is_err(), "{bad:?}");
        }
    }
}
