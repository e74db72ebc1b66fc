//! What was found, and who did it.

use super::{ExplanationDoc, rfc3339};
use serde::{Deserialize, Serialize};
use truepin::reconcile::{Cause, Finding, Writer};

/// A writer of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterDoc {
    /// Process id.
    pub pid: u32,
    /// Name of the thread at the write if `certain`, else of the process when the event was read.
    pub comm: String,
    /// Its cgroup; `#id` when that was removed since.
    pub cgroup: Option<String>,
    /// Whether the kernel told name and cgroup at the time of the write.
    #[serde(default)]
    pub certain: bool,
    /// What was written, where that is known.
    #[serde(default)]
    pub wrote: Option<String>,
}

impl From<&Writer> for WriterDoc {
    fn from(w: &Writer) -> Self {
        let id = || w.cgroup_id.map(|id| format!("#{id}"));
        Self {
            pid: w.pid,
            comm: w.comm.clone(),
            cgroup: w.cgroup.as_ref().map(ToString::to_string).or_else(id),
            certain: w.certain,
            wrote: w.wrote.clone(),
        }
    }
}

/// Who changed a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CauseDoc {
    /// `writer`; `through`, a writer of another file upon which the kernel changed this one; `kernel`, by itself;
    /// `unknown`.
    pub by: String,
    /// Of `through`: the file that was written, with its cgroup's path.
    pub file: Option<String>,
    /// Of `kernel`: what moved it.
    pub why: Option<String>,
}

impl From<&Cause> for CauseDoc {
    fn from(cause: &Cause) -> Self {
        let (by, file, why) = match cause {
            Cause::Wrote(_) => ("writer", None, None),
            Cause::Through { path, file, .. } => {
                let dir = if path.is_root() { String::new() } else { path.to_string() };
                ("through", Some(format!("{dir}/{file}")), None)
            }
            Cause::Kernel { why } => ("kernel", None, Some(why.clone())),
            Cause::Unknown => ("unknown", None, None),
        };
        Self { by: by.into(), file, why }
    }
}

/// `truepin.finding/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingDoc {
    /// `truepin.finding/1`
    pub schema: String,
    /// Counts from 1 in the life of an agent.
    pub id: String,
    /// When.
    pub at: String,
    /// A short word.
    pub kind: String,
    /// A sentence.
    pub text: String,
    /// Why, for a partition that was lost or cannot be had.
    #[serde(default)]
    pub explanation: Option<ExplanationDoc>,
    /// Who did it, where that is known.
    pub writer: Option<WriterDoc>,
    /// How it came about, for what somebody or the kernel does.
    #[serde(default)]
    pub cause: Option<CauseDoc>,
    /// When it was mended.
    pub mended: Option<String>,
}

impl From<&Finding> for FindingDoc {
    fn from(f: &Finding) -> Self {
        Self {
            schema: "truepin.finding/1".into(),
            id: f.id.to_string(),
            at: rfc3339(f.at.wall_ns),
            kind: f.kind.name().into(),
            text: f.to_string(),
            explanation: f.kind.explanation().map(ExplanationDoc::from),
            writer: f.cause.as_ref().and_then(Cause::writer).map(WriterDoc::from),
            cause: f.cause.as_ref().map(CauseDoc::from),
            mended: f.mended.map(|m| rfc3339(m.wall_ns)),
        }
    }
}

/// `truepin.findings/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingsDoc {
    /// `truepin.findings/1`
    pub schema: String,
    /// Oldest first; the newest 256 are kept.
    pub findings: Vec<FindingDoc>,
}
