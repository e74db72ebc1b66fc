//! What truepin says about a kubelet's file: typed, with the place and the value.
//!
//! Problem: the kubelet answers "drain this node and delete the file". Whoever has to decide needs every contradiction,
//! where it is, and what of the file still stands.
//! Invariant: a [`Problem`] is a finding or a note by where it is reported, never by its text: notes are what the
//! kubelet does in the ordinary course or what has no bearing on an import.

use super::json::{Oddity, OddityKind};
use super::ranges::{CpuRanges, RangeError};
use super::syntax::JsonError;
use serde::Serialize;
use std::fmt;

/// One statement about a place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Dotted, as spelled in the file; empty for the file as a whole.
    pub key: String,
    /// As found; empty where there is none. Long ones are cut.
    pub value: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What can be wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it; the fields are sets and names that they print")]
pub enum Problem {
    #[error("not JSON: {0}")]
    NotJson(JsonError),
    #[error("not a JSON object")]
    NotAnObject,
    #[error("of the wrong type: {0}")]
    Type(JsonError),
    #[error("the kubelet writes {expected:?}, and reads this as the same key")]
    KeyCase { expected: &'static str },
    #[error("stands there twice; the last one counts")]
    Duplicate,
    #[error("no version of the kubelet writes this key; what it holds is not imported")]
    UnknownKey,
    #[error("null, which the kubelet never writes")]
    Null,
    #[error("not there, and every version of the kubelet writes it")]
    Absent,
    #[error("not the checksum of the content, which has {computed}")]
    Checksum { computed: String },
    #[error("0, which the kubelet takes for right whatever the content")]
    ChecksumZero,
    #[error("not covered by the checksum, which is that of version 2")]
    NotCovered,
    #[error("not the same as in \"data\", which has {data}")]
    DataDiffers { data: String },
    #[error("made over the type's new name, as kubelet 1.36 did at first; older ones refuse the file")]
    EarlyName,
    #[error("the kubelet would have written the same content in other bytes: white space or order")]
    NotAsWritten,
    #[error("no CPU list: {0}")]
    List(RangeError),
    #[error("the kubelet writes this set as {written:?}, and its checksum covers the set, not the text")]
    ListForm { written: String },
    #[error("an empty set")]
    EmptySet,
    #[error("not an owner's name: {reason}")]
    Owner { reason: String },
    #[error("no such container is known; name it with --containers")]
    Unresolved,
    #[error("the same container as {other:?}")]
    SameContainer { other: String },
    #[error("CPUs {cpus} are held by {} too", others.join(", "))]
    SharedBetweenPods { cpus: CpuRanges, others: Vec<String> },
    #[error("CPUs {cpus} are held by other containers of the pod too")]
    SharedInPod { cpus: CpuRanges },
    #[error("CPUs {cpus} are in the shared pool too")]
    InPool { cpus: CpuRanges },
    #[error("CPUs {cpus} are not online on this machine")]
    NotOnline { cpus: CpuRanges },
    #[error("CPUs {cpus} are reserved")]
    Reserved { cpus: CpuRanges },
    #[error("online CPUs {cpus} are neither in the shared pool nor held by anybody")]
    Unaccounted { cpus: CpuRanges },
    #[error("the reserved CPUs {cpus} are missing")]
    ReservedNotInPool { cpus: CpuRanges },
    #[error("the strictly reserved CPUs {cpus} are in it")]
    ReservedInPool { cpus: CpuRanges },
    #[error("CPUs {cpus} are not in the pod's set")]
    OutsidePod { cpus: CpuRanges },
    #[error("a set for a pod of which no container is known")]
    PodAlone,
    #[error("configured is {configured:?}")]
    Policy { configured: String },
    #[error("nobody holds CPUs under this policy, and there are entries")]
    PolicyWithEntries,
    #[error("NUMA node {node} is not in the file's machine state")]
    NodeUnknown { node: i64 },
    #[error("NUMA node {node} is not on this machine")]
    NodeNotOnMachine { node: i64 },
    #[error("the counters do not add up ({what}); they are not used, the entries are")]
    Counters { what: String },
}

impl Problem {
    /// A word for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotJson(_) => "not-json",
            Self::NotAnObject => "not-an-object",
            Self::Type(_) => "type",
            Self::KeyCase { .. } => "key-case",
            Self::Duplicate => "duplicate-key",
            Self::UnknownKey => "unknown-key",
            Self::Null => "null",
            Self::Absent => "absent-key",
            Self::Checksum { .. } => "checksum",
            Self::ChecksumZero => "checksum-zero",
            Self::NotCovered => "not-covered",
            Self::DataDiffers { .. } => "data-differs",
            Self::EarlyName => "early-name",
            Self::NotAsWritten => "not-as-written",
            Self::List(_) => "list",
            Self::ListForm { .. } => "list-form",
            Self::EmptySet => "empty-set",
            Self::Owner { .. } => "owner",
            Self::Unresolved => "unresolved-container",
            Self::SameContainer { .. } => "same-container",
            Self::SharedBetweenPods { .. } => "shared-between-pods",
            Self::SharedInPod { .. } => "shared-in-pod",
            Self::InPool { .. } => "in-pool",
            Self::NotOnline { .. } => "not-online",
            Self::Reserved { .. } => "reserved",
            Self::Unaccounted { .. } => "unaccounted",
            Self::ReservedNotInPool { .. } => "reserved-not-in-pool",
            Self::ReservedInPool { .. } => "reserved-in-pool",
            Self::OutsidePod { .. } => "outside-pod",
            Self::PodAlone => "pod-alone",
            Self::Policy { .. } => "policy",
            Self::PolicyWithEntries => "policy-with-entries",
            Self::NodeUnknown { .. } => "node-unknown",
            Self::NodeNotOnMachine { .. } => "node-not-on-machine",
            Self::Counters { .. } => "counters",
        }
    }
}

/// Longer values are cut: a message is for reading.
const LONGEST: usize = 120;

impl Finding {
    /// A finding with its value cut to a readable length.
    pub(super) fn new(key: impl Into<String>, value: impl Into<String>, problem: Problem) -> Self {
        let mut value: String = value.into();
        if let Some((at, _)) = value.char_indices().nth(LONGEST) {
            value.truncate(at);
            value.push('…');
        }
        Self { key: key.into(), value, problem }
    }

    /// From what the reader noted; `prefix` goes before the key.
    pub(super) fn odd(oddity: &Oddity, prefix: &str) -> Self {
        let problem = match oddity.kind {
            OddityKind::Case(expected) => Problem::KeyCase { expected },
            OddityKind::Duplicate => Problem::Duplicate,
            OddityKind::Unknown => Problem::UnknownKey,
            OddityKind::Null => Problem::Null,
        };
        Self::new(format!("{prefix}{}", oddity.key), "", problem)
    }
}

/// `entries.uid.app: "3-1": no CPU list: …`
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        if !self.value.is_empty() {
            write!(f, "{:?}: ", self.value)?;
        }
        self.problem.fmt(f)
    }
}

/// A finding in a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FindingDoc {
    /// See [`Problem::code`].
    pub code: &'static str,
    /// The file.
    pub path: String,
    /// See [`Finding::key`].
    pub key: String,
    /// See [`Finding::value`].
    pub value: String,
    /// The whole of it for people, without the path.
    pub text: String,
}

impl FindingDoc {
    /// Of the file at `path`.
    #[must_use]
    pub fn new(finding: &Finding, path: &str) -> Self {
        Self {
            code: finding.problem.code(),
            path: path.into(),
            key: finding.key.clone(),
            value: finding.value.clone(),
            text: finding.to_string(),
        }
    }
}
