//! Whose pods are gone.
//!
//! Problem: owners end while nobody looks (the agent was down, a message was lost), and their CPUs must not stay taken;
//! but a source that has not finished starting reports few pods or none, and believing it would take CPUs from pods that
//! run.
//! Steps: every source that is configured says which pods are active, as often as it likes. Once each of them has
//! reported completely since this agent started, a pod that none of them names, and that was admitted before the oldest
//! of their newest reports, is stale.
//! Invariants: an incomplete report frees nobody, and neither does a complete one as long as another source is silent; no
//! pod that is being admitted is stale; it does not matter whether any pod is active at all.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The source that is always there: the cgroup tree. It knows pods of which a container was made, and only where no
/// other source is configured does its silence mean anything.
pub const TREE: &str = "cgroups";

/// What a source says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceReport {
    /// Who says it: a name from the configuration.
    pub source: String,
    /// Whether these are all: false while the source is starting.
    pub complete: bool,
    /// Uids of the active pods.
    pub pods: BTreeSet<String>,
    /// What the source had heard of before it listed its pods: the `position` of an earlier answer. Without it the report
    /// is dated by its arrival, and a pod that is admitted between the listing and the arrival would be taken for gone.
    #[serde(default)]
    pub position: Option<u64>,
}

/// A report and how much had been admitted when it came.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Heard {
    pods: BTreeSet<String>,
    admitted: u64,
}

/// What was heard since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sources {
    heard: BTreeMap<String, Option<Heard>>,
    admitted: BTreeMap<String, u64>,
    count: u64,
}

/// A source that is not configured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("source {source_name:?} is not configured (sources.pods names {known})")]
pub struct UnknownSource {
    /// As given.
    pub source_name: String,
    /// Those that are.
    pub known: String,
}

impl Sources {
    /// These sources have to report before anybody is stale; the cgroup tree where there are none.
    #[must_use]
    pub fn new(configured: &BTreeSet<String>) -> Self {
        let tree = BTreeSet::from([TREE.to_owned()]);
        let names = if configured.is_empty() { &tree } else { configured };
        Self { heard: names.iter().map(|n| (n.clone(), None)).collect(), ..Self::default() }
    }

    /// Takes a report. Those of the tree are of no account beside configured sources.
    pub fn hear(&mut self, report: SourceReport) -> Result<(), UnknownSource> {
        let Some(heard) = self.heard.get_mut(&report.source) else {
            if report.source == TREE {
                return Ok(());
            }
            let known: Vec<&str> = self.heard.keys().map(String::as_str).collect();
            return Err(UnknownSource { source_name: report.source, known: known.join(", ") });
        };
        if report.complete {
            // A position of an agent before this one may be anything.
            let admitted = report.position.map_or(self.count, |p| p.min(self.count));
            // One that was overtaken knows less than what was heard since.
            if heard.as_ref().is_some_and(|h| admitted < h.admitted) {
                return Ok(());
            }
            *heard = Some(Heard { pods: report.pods, admitted });
            // What every report knows of needs no date any more.
            let oldest = self.heard.values().map(|h| h.as_ref().map_or(0, |h| h.admitted)).min();
            self.admitted.retain(|_, at| Some(*at) > oldest);
        }
        Ok(())
    }

    /// The pod is being admitted: what was reported before does not concern it.
    pub fn admitted(&mut self, uid: &str) {
        self.count += 1;
        self.admitted.insert(uid.to_owned(), self.count);
    }

    /// How many admissions there were in the life of this agent: what an answer's `position` says.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.count
    }

    /// The pod has left the table.
    pub fn forget(&mut self, uid: &str) {
        self.admitted.remove(uid);
    }

    /// Whether every source has reported completely.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.heard.values().all(Option::is_some)
    }

    /// Whether the pod is gone. `made`: a container of it was made at some time, so that the cgroup tree knows it.
    #[must_use]
    pub fn is_stale(&self, uid: &str, made: bool) -> bool {
        let at = self.admitted.get(uid).copied().unwrap_or(0);
        self.heard.iter().all(|(name, heard)| {
            let knows = made || name != TREE;
            heard.as_ref().is_some_and(|h| knows && !h.pods.contains(uid) && at <= h.admitted)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    fn report(source: &str, complete: bool, pods: &[&str]) -> SourceReport {
        SourceReport { source: source.into(), complete, pods: set(pods), position: None }
    }

    #[test]
    fn nobody_is_stale_before_every_source_has_reported() {
        let mut s = Sources::new(&set(&["api", "file"]));
        s.hear(report("api", true, &["a"])).unwrap();
        assert!(!s.is_ready() && !s.is_stale("b", true));
        s.hear(report("file", false, &[])).unwrap();
        assert!(!s.is_stale("b", true), "not complete");
        s.hear(report(TREE, true, &[])).unwrap();
        s.hear(report("file", true, &["f"])).unwrap();
        assert!(s.is_ready() && s.is_stale("b", true) && s.is_stale("b", false));
        assert!(!s.is_stale("a", true) && !s.is_stale("f", true));
        // Not one active pod.
        s.hear(report("api", true, &[])).unwrap();
        s.hear(report("file", true, &[])).unwrap();
        assert!(s.is_stale("a", true));
        // An incomplete report takes nothing back.
        s.hear(report("api", false, &["a"])).unwrap();
        assert!(s.is_stale("a", true));
        assert!(s.hear(report("x", true, &[])).unwrap_err().to_string().contains("api, file"));
    }

    #[test]
    fn a_report_from_before_the_admission_says_nothing() {
        let mut s = Sources::new(&set(&["api"]));
        s.hear(report("api", true, &[])).unwrap();
        s.admitted("a");
        assert!(!s.is_stale("a", false));
        s.hear(report("api", true, &[])).unwrap();
        assert!(s.is_stale("a", false));
        s.forget("a");
    }

    #[test]
    fn a_report_that_was_listed_before_the_admission_says_nothing_whenever_it_comes() {
        let mut s = Sources::new(&set(&["api"]));
        let listed = s.position();
        s.admitted("a");
        let late = SourceReport { position: Some(listed), ..report("api", true, &[]) };
        s.hear(late).unwrap();
        assert!(s.is_ready() && !s.is_stale("a", false) && s.is_stale("b", false));
        s.hear(SourceReport { position: Some(s.position()), ..report("api", true, &[]) }).unwrap();
        assert!(s.is_stale("a", false));
        // Of another life.
        s.admitted("c");
        s.hear(SourceReport { position: Some(u64::MAX), ..report("api", true, &["c"]) }).unwrap();
        assert!(!s.is_stale("c", false));
    }

    #[test]
    fn a_report_that_was_overtaken_frees_nobody() {
        let mut s = Sources::new(&set(&["api"]));
        s.admitted("a");
        let early = s.position();
        s.admitted("p");
        let late = SourceReport { position: Some(s.position()), ..report("api", true, &["a", "p"]) };
        s.hear(late).unwrap();
        s.hear(SourceReport { position: Some(early), ..report("api", true, &["a"]) }).unwrap();
        assert!(!s.is_stale("p", true) && !s.is_stale("a", true));
    }

    #[test]
    fn nothing_grows_with_the_pods_that_were() {
        let mut s = Sources::new(&set(&["api", "file"]));
        for n in 0..100 {
            s.admitted(&format!("p{n}"));
            s.hear(report("api", true, &["p99"])).unwrap();
        }
        assert_eq!(s.admitted.len(), 100, "the other source has said nothing yet");
        s.hear(report("file", true, &[])).unwrap();
        assert!(s.admitted.is_empty());
        assert!(s.is_stale("p0", false) && !s.is_stale("p99", false));
    }

    #[test]
    fn the_tree_knows_only_what_was_made() {
        let mut s = Sources::new(&set(&[]));
        assert!(!s.is_stale("a", true));
        s.hear(report(TREE, true, &["b"])).unwrap();
        assert!(s.is_stale("a", true) && !s.is_stale("a", false) && !s.is_stale("b", true));
    }
}
