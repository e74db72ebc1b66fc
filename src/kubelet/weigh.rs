//! The content of a checkpoint against itself, the containers and the machine.
//!
//! Problem: which entries can be taken over as they stand.
//! Steps: lists and names of each entry; CPUs that two pods hold; each entry against pool, machine and reservation; the
//! whole against the machine's CPUs.
//! Invariants: containers of one pod may share (an init container's CPUs are used again, a pod's set has a shared
//! rest); pods may not. Without entries nothing here is a finding, but for lists that do not parse.

use super::envelope::Report;
use super::finding::Problem;
use super::inspect::{Content, Context, Entry, Inspection, RawEntry};
use super::load::Machine;
use super::ranges::CpuRanges;
use crate::owner::Owner;
use std::collections::BTreeMap;

/// Judges a content that something vouches for.
pub(super) fn weigh(said: Content, context: Context<'_>, mut report: Report) -> Inspection {
    let default = list("defaultCpuSet", &said.default, &mut report).unwrap_or_default();
    let mut pods = BTreeMap::new();
    for (pod, (key, text)) in &said.pods {
        if let Some(cpus) = list(key, text, &mut report) {
            let written = cpus.to_string();
            if written != *text {
                report.find(key, text, Problem::ListForm { written });
            }
            pods.insert(pod.clone(), cpus);
        }
    }
    let matter = !said.entries.is_empty() || !pods.is_empty();
    let policy = &said.policy;
    if matter && policy != "static" {
        report.find("policyName", policy, Problem::PolicyWithEntries);
    }
    if let Some(configured) = context.policy.filter(|p| *p != policy) {
        report.tell(matter, "policyName", policy, Problem::Policy { configured: configured.into() });
    }
    let mut entries: Vec<Weighed> =
        said.entries.into_iter().map(|raw| entry(raw, context, &mut report)).collect();
    same_containers(&mut entries, &mut report);
    sharing(&mut entries, &pods, &mut report);
    pod_sets(&mut entries, &said.pods, &pods, &mut report);
    pool(&entries, &default, &mut report);
    if let Some(machine) = context.machine {
        on_machine(&mut entries, machine, &mut report);
        whole(&entries, &default, &said.default, &pods, machine, matter, &mut report);
    }
    let mut entries: Vec<Entry> = entries.into_iter().map(|w| w.entry).collect();
    for entry in &mut entries {
        entry.usable &= policy == "static";
    }
    entries.sort_by(|a, b| (&a.pod, &a.container, &a.id).cmp(&(&b.pod, &b.container, &b.id)));
    Inspection {
        format: Some(said.format),
        importable: entries.is_empty() || entries.iter().any(|e| e.usable),
        policy: said.policy,
        default,
        entries,
        pods,
        findings: report.findings,
        notes: report.notes,
    }
}

/// An entry and where it stands.
struct Weighed {
    key: String,
    text: String,
    entry: Entry,
}

impl Weighed {
    fn refuse(&mut self, problem: Problem, report: &mut Report) {
        report.find(&self.key, &self.text, problem);
        self.entry.usable = false;
    }

    /// Its owner, for people: `pod/uid/container`.
    fn owner(&self) -> String {
        format!("pod/{}/{}", self.entry.pod, self.entry.container)
    }
}

fn list(key: &str, text: &str, report: &mut Report) -> Option<CpuRanges> {
    CpuRanges::parse(text).map_err(|error| report.find(key, text, Problem::List(error))).ok()
}

fn entry(raw: RawEntry, context: Context<'_>, report: &mut Report) -> Weighed {
    let RawEntry { key, id, mut pod, mut container, text } = raw;
    let mut usable = true;
    let known = id.as_ref().map(|id| context.containers.get(id));
    let unresolved = known == Some(None);
    if let Some(Some((uid, name))) = known {
        (pod, container) = (uid.clone(), name.clone());
    }
    let cpus = list(&key, &text, report);
    usable &= cpus.is_some();
    let entry = Entry { pod, container, id, cpus: cpus.unwrap_or_default(), usable };
    let mut weighed = Weighed { key, text, entry };
    if unresolved {
        weighed.refuse(Problem::Unresolved, report);
    } else if let Err(error) = weighed.owner().parse::<Owner>() {
        weighed.refuse(Problem::Owner { reason: error.reason }, report);
    }
    if usable && weighed.entry.cpus.is_empty() {
        weighed.refuse(Problem::EmptySet, report);
    }
    weighed
}

/// Two container ids may be one container: an old one and the one that took its place.
fn same_containers(entries: &mut [Weighed], report: &mut Report) {
    let mut first: BTreeMap<(String, String), (usize, CpuRanges)> = BTreeMap::new();
    let mut refused = Vec::new();
    for (i, weighed) in entries.iter_mut().enumerate().filter(|(_, w)| !w.entry.container.is_empty()) {
        let owner = (weighed.entry.pod.clone(), weighed.entry.container.clone());
        match first.get(&owner) {
            None => drop(first.insert(owner, (i, weighed.entry.cpus.clone()))),
            Some((other, cpus)) => {
                let differ = *cpus != weighed.entry.cpus;
                refused.push((i, *other, differ));
            }
        }
    }
    for (i, other, differ) in refused {
        let other_key = entries.get(other).map(|w| w.key.clone()).unwrap_or_default();
        if let Some(weighed) = entries.get_mut(i) {
            weighed.refuse(Problem::SameContainer { other: other_key }, report);
        }
        // With different sets nobody can say which of them is in force.
        if let Some(weighed) = entries.get_mut(other).filter(|_| differ) {
            weighed.entry.usable = false;
        }
    }
}

/// What the members have more than once.
fn twice<'a>(sets: impl IntoIterator<Item = &'a CpuRanges>) -> CpuRanges {
    let (mut seen, mut twice) = (CpuRanges::default(), CpuRanges::default());
    for set in sets {
        twice = twice.union(&seen.intersection(set));
        seen = seen.union(set);
    }
    twice
}

fn sharing(entries: &mut [Weighed], pods: &BTreeMap<String, CpuRanges>, report: &mut Report) {
    let mut by_pod: BTreeMap<String, CpuRanges> = pods.clone();
    let mut in_pod: BTreeMap<String, Vec<CpuRanges>> = BTreeMap::new();
    for Weighed { entry, key, .. } in entries.iter() {
        // A container that nobody knows is not known to be of any pod: it is one of its own.
        let pod = if entry.pod.is_empty() { key.clone() } else { entry.pod.clone() };
        let all = by_pod.entry(pod.clone()).or_default();
        *all = all.union(&entry.cpus);
        in_pod.entry(pod).or_default().push(entry.cpus.clone());
    }
    let between = twice(by_pod.values());
    let in_pod: BTreeMap<String, CpuRanges> = in_pod.into_iter().map(|(pod, s)| (pod, twice(&s))).collect();
    for weighed in entries {
        let pod = if weighed.entry.pod.is_empty() { weighed.key.clone() } else { weighed.entry.pod.clone() };
        let cpus = weighed.entry.cpus.intersection(&between);
        if !cpus.is_empty() {
            let holds = |(other, set): (&String, &CpuRanges)| {
                (*other != pod && !set.intersection(&cpus).is_empty()).then(|| format!("pod {other}"))
            };
            let others = by_pod.iter().filter_map(holds).collect();
            weighed.refuse(Problem::SharedBetweenPods { cpus, others }, report);
        }
        let cpus = in_pod.get(&pod).map(|s| s.intersection(&weighed.entry.cpus)).unwrap_or_default();
        if !cpus.is_empty() {
            report.note(&weighed.key, &weighed.text, Problem::SharedInPod { cpus });
        }
    }
}

fn pod_sets(
    entries: &mut [Weighed],
    keys: &BTreeMap<String, (String, String)>,
    pods: &BTreeMap<String, CpuRanges>,
    report: &mut Report,
) {
    for weighed in entries.iter_mut() {
        let Some(set) = pods.get(&weighed.entry.pod) else { continue };
        let cpus = weighed.entry.cpus.difference(set);
        if !cpus.is_empty() {
            weighed.refuse(Problem::OutsidePod { cpus }, report);
        }
    }
    for (pod, (key, text)) in keys {
        if !entries.iter().any(|w| w.entry.pod == *pod) {
            report.find(key, text, Problem::PodAlone);
        }
    }
}

/// The kubelet left an exclusive CPU in the pool, or somebody edited it in. The entry's claim is the narrower one and
/// stands.
fn pool(entries: &[Weighed], default: &CpuRanges, report: &mut Report) {
    for Weighed { key, text, entry } in entries {
        let cpus = entry.cpus.intersection(default);
        if !cpus.is_empty() {
            report.find(key, text, Problem::InPool { cpus });
        }
    }
}

fn on_machine(entries: &mut [Weighed], machine: &Machine, report: &mut Report) {
    for weighed in entries {
        let gone = weighed.entry.cpus.difference(&machine.online);
        if !gone.is_empty() {
            weighed.refuse(Problem::NotOnline { cpus: gone }, report);
        }
        let reserved = weighed.entry.cpus.intersection(&machine.reserved);
        if !reserved.is_empty() {
            weighed.refuse(Problem::Reserved { cpus: reserved }, report);
        }
    }
}

/// Pool and reservation; notes only where there is nothing to import.
fn whole(
    entries: &[Weighed],
    default: &CpuRanges,
    text: &str,
    pods: &BTreeMap<String, CpuRanges>,
    machine: &Machine,
    matter: bool,
    report: &mut Report,
) {
    let mut tell = |cpus: CpuRanges, problem: fn(CpuRanges) -> Problem| {
        if !cpus.is_empty() {
            report.tell(matter, "defaultCpuSet", text, problem(cpus));
        }
    };
    if default.is_empty() && !matter {
        return; // not initialised yet
    }
    let mut known = default.clone();
    for cpus in entries.iter().map(|w| &w.entry.cpus).chain(pods.values()) {
        known = known.union(cpus);
    }
    tell(default.difference(&machine.online), |cpus| Problem::NotOnline { cpus });
    if machine.strict {
        let usable = machine.online.difference(&machine.reserved);
        tell(usable.difference(&known), |cpus| Problem::Unaccounted { cpus });
        tell(default.intersection(&machine.reserved), |cpus| Problem::ReservedInPool { cpus });
    } else {
        let unreserved = machine.online.difference(&machine.reserved);
        tell(unreserved.difference(&known), |cpus| Problem::Unaccounted { cpus });
        tell(machine.reserved.difference(default), |cpus| Problem::ReservedNotInPool { cpus });
    }
}
