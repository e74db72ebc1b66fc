//! The CPU manager's state as sets that are computed with.

use super::BootError;
use crate::{
    cpuset::CpuSet,
    kubelet::{CpuRanges, State},
};
use std::collections::BTreeMap;

/// Sets by container name.
pub type ByContainer = BTreeMap<String, CpuSet>;

/// Who has which CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sets {
    /// The shared pool.
    pub default: CpuSet,
    /// By pod UID.
    pub entries: BTreeMap<String, ByContainer>,
    /// Sets of whole pods, by UID.
    pub pods: BTreeMap<String, CpuSet>,
}

impl Sets {
    /// A container's own set.
    #[must_use]
    pub fn get(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.entries.get(pod)?.get(container)
    }

    /// The set that a container runs on: its own or the shared pool.
    #[must_use]
    pub fn of(&self, pod: &str, container: &str) -> &CpuSet {
        self.get(pod, container).unwrap_or(&self.default)
    }

    pub(super) fn set(&mut self, pod: &str, container: &str, cpus: CpuSet) {
        self.entries.entry(pod.into()).or_default().insert(container.into(), cpus);
    }

    /// Gives a container's CPUs back. Those that another container of its pod has too stay with that one; of a pod with
    /// a set of its own all return with the last container (`RemoveContainer` of the static policy).
    pub(super) fn remove(&mut self, pod: &str, container: &str) {
        let Some(siblings) = self.entries.get_mut(pod) else { return };
        let Some(mut released) = siblings.remove(container) else { return };
        if siblings.is_empty() {
            self.entries.remove(pod);
            if let Some(all) = self.pods.remove(pod) {
                released = all;
            }
        } else if self.pods.contains_key(pod) {
            return;
        } else {
            for kept in siblings.values() {
                released -= kept;
            }
        }
        self.default |= &released;
    }

    /// As it is written down.
    pub(super) fn to_state(&self) -> State {
        let containers = |sets: &ByContainer| {
            sets.iter().map(|(name, cpus)| (name.clone(), CpuRanges::from(cpus))).collect()
        };
        State {
            default: (&self.default).into(),
            entries: self.entries.iter().map(|(pod, sets)| (pod.clone(), containers(sets))).collect(),
            pods: self.pods.iter().map(|(pod, cpus)| (pod.clone(), CpuRanges::from(cpus))).collect(),
        }
    }

    /// From what was read.
    pub(super) fn of_state(state: &State) -> Result<Self, BootError> {
        let cpus = |key: &dyn Fn() -> String, list: &CpuRanges| {
            list.to_cpus().ok_or_else(|| BootError::List { key: key(), list: list.to_string() })
        };
        let mut sets = Self { default: cpus(&|| "defaultCpuSet".into(), &state.default)?, ..Self::default() };
        for (pod, containers) in &state.entries {
            for (name, list) in containers {
                sets.set(pod, name, cpus(&|| format!("entries.{pod}.{name}"), list)?);
            }
        }
        for (pod, list) in &state.pods {
            sets.pods.insert(pod.clone(), cpus(&|| format!("podEntries.{pod}"), list)?);
        }
        Ok(sets)
    }
}
