//! What a verdict over a storm may be about.
//!
//! Problem: after a storm nobody whose CPUs were away is Held, and a fault of the sets that has nothing to do with CPUs
//! that went would hide among the reasons. So each of them must follow from what this file knows by itself: which CPUs
//! were switched between which two moments of rest, who had which then, and who was moved.
//! Steps: [`Story::rest`] takes down one time between two rests, and there judges what was found of the sets;
//! [`Story::kind`] names what a reason is about, or nothing.

use super::{set, text};
use crate::guest::facts;
use anyhow::Context;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use truepin::{CpuId, CpuSet};

/// One time between two rests.
#[derive(Debug)]
struct Time {
    /// Were offline in it: when it began, or from a switch on.
    off: CpuSet,
    /// Whose CPUs may all have been offline at once.
    stranded: BTreeSet<String>,
    /// Who was given what instead of what.
    moves: Vec<(String, CpuSet, CpuSet)>,
}

/// All of them, oldest first.
#[derive(Debug, Default)]
pub(super) struct Story {
    times: Vec<Time>,
    /// Faults of the sets that a switch explains, by owner.
    faults: BTreeMap<String, Vec<String>>,
    /// Faults of the sets that none explains, in words.
    pub(super) unexplained: Vec<String>,
    /// Whose processes are.
    pub(super) pids: BTreeMap<i32, String>,
}

impl Story {
    /// `table`: who had what when the time began; `offline`: the CPUs that were it then; `switched`: those that were switched, and how;
    /// `moves`: owner, from, to.
    pub(super) fn rest(
        &mut self,
        table: &BTreeMap<String, CpuSet>,
        offline: &CpuSet,
        switched: &[(CpuId, bool)],
        moves: Vec<(String, CpuSet, CpuSet)>,
        findings: &[Value],
    ) -> anyhow::Result<()> {
        let off = switched.iter().filter(|(_, online)| !online).map(|(cpu, _)| *cpu);
        let off: CpuSet = offline.iter().chain(off).collect();
        let stirred = switched.iter().fold(off.clone(), |all, (cpu, _)| all.union(&CpuSet::single(*cpu)));
        let had = |owner: &str| {
            let of = moves.iter().filter(|(o, _, _)| o == owner);
            let first = table.get(owner).cloned().unwrap_or_default();
            of.fold(first, |all, (_, from, to)| all.union(from).union(to))
        };
        let touched = |owner: &str| !had(owner).is_disjoint(&stirred);
        for f in findings.iter().filter(|f| text(f, "kind") == "set") {
            let (owner, fault) = text(f, "text").split_once(": ").with_context(|| format!("whose? {f}"))?;
            // Another owner that has no CPU left runs where it can.
            let other = fault.strip_prefix("cgroup /truepin.slice/run-").and_then(|f| f.split(' ').next());
            let explained = touched(owner) || other.is_some_and(|name| touched(&format!("run/{name}")));
            if !explained || !f["writer"].is_null() {
                let at = self.times.len() + 1;
                self.unexplained.push(format!(
                    "before rest {at}, finding {}: {owner}: {fault}; writer {}; it had {}, CPUs {stirred} were switched or offline",
                    text(f, "id"),
                    f["writer"],
                    had(owner)
                ));
                continue;
            }
            self.faults.entry(owner.to_owned()).or_default().push(fault.to_owned());
        }
        let sets = table.iter().chain(moves.iter().flat_map(|(o, from, to)| [(o, from), (o, to)]));
        let stranded = sets.filter(|(_, set)| set.is_subset(&off)).map(|(owner, _)| owner.clone()).collect();
        self.times.push(Time { off, stranded, moves });
        Ok(())
    }

    /// What a reason in the verdict on `owner`, who has `cpus` now, is about; an error when it is about nothing that
    /// happened.
    pub(super) fn kind(&self, owner: &str, cpus: &CpuSet, reason: &str) -> anyhow::Result<&'static str> {
        let moves = || self.times.iter().flat_map(|t| &t.moves).filter(|(o, _, _)| o == owner);
        // Its newest epoch began in this time.
        let newest = self.times.iter().rposition(|t| t.moves.iter().any(|(o, _, _)| o == owner));
        let since = &self.times[newest.unwrap_or(0)..];
        let off = since.iter().fold(CpuSet::new(), |all, t| all.union(&t.off)).intersection(cpus);
        let all_off = |list: &str| Ok::<_, anyhow::Error>(!list.is_empty() && set(list)?.is_subset(&off));
        let between = |before: &str, after: &str| reason.strip_prefix(before)?.strip_suffix(after);

        let explained = if let Some(list) = between("CPUs ", " went offline within the interval") {
            all_off(list)?.then_some("its CPUs went offline")
        } else if let Some(list) = between("CPUs ", " were offline") {
            all_off(list)?.then_some("its CPUs were offline at an end of the interval")
        } else if let Some(lists) = between("it was given CPUs ", " within the interval (hotplug)") {
            let (to, from) = lists.split_once(" instead of ").with_context(|| reason.to_owned())?;
            let (to, from) = (set(to)?, set(from)?);
            moves().any(|(_, f, t)| (f, t) == (&from, &to)).then_some("it was given others")
        } else if let Some(to) = reason.strip_prefix("its tasks went to other CPUs before it was given ") {
            let to = set(to)?;
            moves().any(|(_, _, t)| *t == to).then_some("its tasks left CPUs that it lost")
        } else if between("its tasks went to other CPUs ", " times").is_some() {
            (!off.is_empty()).then_some("its tasks left CPUs that went")
        } else if let Some(cpu) = between("CPU ", ": the assignment changed within the interval")
            .or_else(|| between("CPU ", " was not watched over the whole interval"))
        {
            all_off(cpu)?.then_some("the account of a CPU began anew")
        } else if let Some((cpu, _)) = between("CPU ", " are of unknown class")
            .and_then(|r| r.split_once(": "))
            .filter(|(_, r)| r.contains(" switches were not seen; "))
        {
            all_off(cpu)?.then_some("the account of a CPU has a hole")
        } else if let Some((cpu, who)) =
            reason.strip_prefix("CPU ").and_then(|r| r.split_once(": foreign tasks ran for "))
        {
            // A task of an owner that has no CPU left runs where it may until it is served or in the pool; a partition keeps it
            // out, a member's CPUs are open to it for that time.
            let pid = who.rsplit_once("(pid ").and_then(|(_, p)| p.strip_suffix(')')?.parse().ok());
            let other = pid.and_then(|pid: i32| self.pids.get(&pid)).filter(|other| *other != owner);
            let stray = other.is_some_and(|other| since.iter().any(|t| t.stranded.contains(other)));
            let why = if stray {
                "another ran there that had no CPU left"
            } else {
                "others ran on a CPU that went"
            };
            (stray || all_off(cpu)?).then_some(why)
        } else if reason.starts_with("ledger (") && reason.contains(" and the owner's CPU clock (") {
            (!off.is_empty()).then_some("the ledger lacks what ran elsewhere")
        } else if reason == "it was no partition for a time, because an owner beside it had no CPU left" {
            // Where partitions are local.
            let another = since.iter().any(|t| t.stranded.iter().any(|other| other != owner));
            (another && !facts::exclusive_file()?)
                .then_some("another had no CPU left, so it was no partition")
        } else if reason == "masks of its tasks were read while CPUs went and came" {
            self.times.iter().any(|t| !t.off.is_empty()).then_some("its masks were read in between")
        } else {
            let known = self.faults.get(owner).into_iter().flatten();
            let mut known = known.filter(|f| {
                f.strip_prefix(reason).is_some_and(|rest| rest.is_empty() || rest.starts_with("; "))
            });
            known.next().map(|_| "a fault of its set, found when its CPUs were switched")
        };
        explained.with_context(|| {
            let all: BTreeSet<String> = moves().map(|(_, from, to)| format!("{from} -> {to}")).collect();
            format!(
                "{owner}, which has {cpus}: {reason:?} is about nothing that happened; of its CPUs {off} were offline since it \
                 has them, its moves were {all:?}, faults of its set {:?}",
                self.faults.get(owner)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn cpus(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn table() -> BTreeMap<String, CpuSet> {
        [("run/a".to_owned(), cpus("2-3")), ("run/b".to_owned(), cpus("5"))].into()
    }

    fn fault(text: &str) -> Value {
        json!({"kind": "set", "text": text, "writer": null})
    }

    #[test]
    fn reasons_follow_from_what_happened() {
        let mut story = Story::default();
        let findings = [
            fault("run/a: the kernel gave it CPUs 0-1,3; the kernel did that"),
            fault("run/b: cgroup /truepin.slice/run-a was allowed on CPUs 5"),
        ];
        let moves = vec![("run/a".to_owned(), cpus("2-3"), cpus("3-4"))];
        story.rest(&table(), &cpus(""), &[(CpuId(2), false)], moves, &findings).unwrap();
        story.rest(&table(), &cpus("2"), &[(CpuId(3), false), (CpuId(3), true)], vec![], &[]).unwrap();
        let now = cpus("3-4");
        for known in [
            "CPUs 3 went offline within the interval",
            "it was given CPUs 3-4 instead of 2-3 within the interval (hotplug)",
            "its tasks went to other CPUs before it was given 3-4",
            "its tasks went to other CPUs 12 times",
            "CPU 3: the assignment changed within the interval",
            "CPU 3: 1 switches were not seen; 718.014 ms are of unknown class",
            "the kernel gave it CPUs 0-1,3",
        ] {
            story.kind("run/a", &now, known).unwrap();
        }
        for unknown in [
            "CPUs 3-4 went offline within the interval",
            "CPUs 2 went offline within the interval",
            "it was given CPUs 3-4 instead of 2 within the interval (hotplug)",
            "its tasks went to other CPUs before it was given 5",
            "CPU 4: the assignment changed within the interval",
            "CPU 4: 1 switches were not seen; 718.014 ms are of unknown class",
            "CPU 4: foreign tasks ran for 1.000 ms",
            "the kernel gave it CPUs 0-1",
            "cgroup /truepin.slice/run-a was allowed on CPUs 5",
        ] {
            let error = story.kind("run/a", &now, unknown).unwrap_err().to_string();
            assert!(error.contains("about nothing that happened"), "{error}");
        }
        // Of run/a all CPUs may have been away at once.
        let foreign = "CPU 5: foreign tasks ran for 818.031 ms, longest truepin-guest (pid 583)";
        story.kind("run/b", &cpus("5"), foreign).unwrap_err();
        story.pids.insert(583, "run/a".into());
        story.kind("run/b", &cpus("5"), foreign).unwrap();
        story.pids.insert(583, "run/c".into());
        story.kind("run/b", &cpus("5"), foreign).unwrap_err();
        // Nothing of run/b's went.
        story.kind("run/b", &cpus("5"), "its tasks went to other CPUs 1 times").unwrap_err();
        story.kind("run/b", &cpus("5"), "cgroup /truepin.slice/run-a was allowed on CPUs 5").unwrap();
    }

    #[test]
    fn a_fault_that_nothing_explains() {
        let switched = [(CpuId(2), false)];
        let told = |f: Value| {
            let mut story = Story::default();
            story.rest(&table(), &cpus(""), &switched, vec![], &[f]).unwrap();
            story.unexplained.join("; ")
        };
        assert_eq!(told(fault("run/a: the kernel gave it CPUs 0-1")), "");
        assert_eq!(told(json!({"kind": "refitted", "text": "run/b: …"})), "");
        for f in [
            fault("run/b: the kernel gave it CPUs 0-1"),
            fault("run/b: cgroup /driver was allowed on CPUs 5"),
            json!({"kind": "set", "text": "run/a: the kernel gave it CPUs 0-1", "writer": {"pid": 7}}),
        ] {
            assert!(told(f).starts_with("before rest 1"));
        }
    }
}
