//! From what stands in a file to what truepin would hold.
//!
//! Problem: truepin's exclusive sets are disjoint (I1), the kubelet's are only so between pods: an init container's CPUs
//! are used again by the app, containers of a pod with a set of its own share its rest.
//! Steps: the usable entries, pod by pod: containers that run first, then larger sets, then by name; each gets what
//! no sibling has got. What a container shares is listed beside, so that nobody is forgotten.
//! Invariants: sets are disjoint and not empty; their union is that of the usable entries; no entry is changed unless a
//! sibling holds some of its CPUs, and then `sharing` says so.

use super::inspect::Inspection;
use super::load::Containers;
use crate::{cpuset::CpuSet, owner::Owner};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What an import would make.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Adoption {
    /// Exclusive sets by owner, ready to be reserved.
    pub owners: Vec<(Owner, CpuSet)>,
    /// Owners that the file gives CPUs which a sibling gets, those CPUs, and the siblings. An owner that is in no
    /// other list ran (or runs) wholly inside its siblings' sets.
    pub sharing: Vec<(Owner, CpuSet, Vec<Owner>)>,
}

/// The usable part of a file. `running` are the containers known to run; with none known, size decides alone.
#[must_use]
pub fn adoptions(inspection: &Inspection, running: &Containers) -> Adoption {
    let alive: std::collections::BTreeSet<(&str, &str)> =
        running.values().map(|(pod, name)| (pod.as_str(), name.as_str())).collect();
    let mut by_pod: BTreeMap<&str, Vec<(Owner, CpuSet, bool)>> = BTreeMap::new();
    for entry in inspection.entries.iter().filter(|e| e.usable) {
        let owner = Owner::Pod { uid: entry.pod.clone(), container: entry.container.clone() };
        // Usable entries have a machine's CPUs, or at least numbers that a machine can have.
        let Some(cpus) = entry.cpus.to_cpus() else { continue };
        let runs = alive.contains(&(entry.pod.as_str(), entry.container.as_str()));
        by_pod.entry(&entry.pod).or_default().push((owner, cpus, runs));
    }
    let mut adoption = Adoption::default();
    for mut containers in by_pod.into_values() {
        containers.sort_by(|a, b| (!a.2, Reverse(a.1.len()), &a.0).cmp(&(!b.2, Reverse(b.1.len()), &b.0)));
        let mut given: Vec<(Owner, CpuSet)> = Vec::new();
        for (owner, cpus, _) in containers {
            let mut rest = cpus.clone();
            let mut with = Vec::new();
            for (sibling, set) in given.iter().filter(|(_, set)| !set.is_disjoint(&cpus)) {
                rest -= set;
                with.push(sibling.clone());
            }
            if !with.is_empty() {
                adoption.sharing.push((owner.clone(), cpus.difference(&rest), with));
            }
            if !rest.is_empty() {
                given.push((owner, rest));
            }
        }
        adoption.owners.extend(given);
    }
    adoption.owners.sort();
    adoption.sharing.sort();
    adoption
}
