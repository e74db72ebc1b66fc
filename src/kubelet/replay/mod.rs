//! The kubelet's CPU and topology managers, replayed: what a node of kubelet 1.36 would have done, faults included.
//!
//! Problem: an operator who moves a node must see the same sets, and only a whole history shows it: a set depends on
//! what init containers left, on whom the last pass found gone, on what a restart remembers. And the faults decide, too.
//! Steps: [`KubeletNode::boot`], then [`admit`](KubeletNode::admit), [`run`](KubeletNode::run),
//! [`remove`](KubeletNode::remove), [`reconcile`](KubeletNode::reconcile), and [`restart`](KubeletNode::restart) with
//! [`readmit`](KubeletNode::readmit) of every pod, through the bytes of the checkpoint.
//! Invariants: no list of hints is ever written down; the result is a function of machine, configuration and events.
//!
//! Faults that are replayed: CPUs of init containers stay held until the pod goes; a refused pod keeps what it had taken
//! until the next pass over stale state; a pod with resources of its own gets another set when it is readmitted, and
//! nobody the first; the check of whole cores comes before "has its CPUs already"; what a container runs on is assumed
//! and never read; averages take uneven cores for even ones and hand out reserved CPUs, or one CPU to two containers of a
//! pod. Not replayed: CPUs of *another* pod are never handed out (the choice is then made again by what is true), and no
//! choice takes forever.
//! Nothing here decides for a live node.

mod claim;
mod config;
mod process;
mod sets;
#[cfg(test)]
mod tests;

pub use config::{BootError, Config, DEFAULT_MAX_NODES, Reservation, Scope};
pub use sets::{ByContainer, Sets};

use crate::{
    cpuset::CpuSet,
    hints::{Distances, TopologyHint, pods::DivisionError},
    kubelet::Containers,
    placement::kubelet::{KubeletMachine, TakeError},
    pod::Pod,
};
use claim::{Kind, in_order};
use process::Process;
use std::collections::BTreeMap;

/// Why a pod is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The topology policy.
    #[error("the resources cannot be had on the NUMA nodes that the policy asks for")]
    Affinity,
    /// The CPUs are not there, or do not fill cores.
    #[error(transparent)]
    Take(#[from] TakeError),
    /// A pod's own set is used up.
    #[error(transparent)]
    EmptyPool(#[from] DivisionError),
}

impl Rejection {
    /// The kubelet's word for it, in the pod's status.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Affinity => "TopologyAffinityError",
            Self::Take(TakeError::SmtAlignment { .. } | TakeError::NotEnoughPhysical { .. }) => {
                "SMTAlignmentError"
            }
            Self::Take(_) => "UnexpectedAdmissionError",
            Self::EmptyPool(_) => "EmptyPodSharedPoolError",
        }
    }
}

/// What came of asking for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// The affinity noted for each container, as far as it came; none under the policy `none`.
    pub hints: Vec<(String, TopologyHint)>,
    /// Whether the pod is let in.
    pub outcome: Result<(), Rejection>,
    /// False if the search for an affinity was cut short ([`crate::hints::Winner::exact`]): the kubelet's may be another.
    pub exact: bool,
}

/// A container that was created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    /// Its name.
    pub name: String,
    /// Its id.
    pub id: String,
    /// The set in its configuration.
    pub cpus: CpuSet,
}

/// A container, as a reconciliation names it: what is not known is empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Named {
    /// Pod UID.
    pub pod: String,
    /// Container name.
    pub container: String,
    /// Container id.
    pub id: String,
}

/// What a reconciliation did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reconciled {
    /// Sets written, by container id, in order.
    pub updates: Vec<(String, CpuSet)>,
    /// Containers that run on the set that they should.
    pub ok: Vec<Named>,
    /// Pods and containers that could not be looked at.
    pub failed: Vec<Named>,
}

/// A pod that is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod {uid} is not active")]
pub struct NotActive {
    /// Its UID.
    pub uid: String,
}

/// What the runtime says of a container.
#[derive(Debug, Clone)]
struct Status {
    id: String,
    running: bool,
}

/// A node under the kubelet. See the module's text for the order of events.
#[derive(Debug, Clone)]
pub struct KubeletNode<'m> {
    machine: &'m KubeletMachine,
    distances: &'m Distances,
    process: Process<'m>,
    /// In order of admission.
    active: Vec<Pod>,
    /// By pod UID and container name: containers that were created.
    statuses: BTreeMap<String, BTreeMap<String, Status>>,
    /// Whether somebody may have entries who is not active: otherwise a pass over stale state finds nothing.
    stale: bool,
}

impl<'m> KubeletNode<'m> {
    /// First start on this checkpoint; `None` for an empty directory.
    pub fn boot(
        machine: &'m KubeletMachine,
        distances: &'m Distances,
        config: Config,
        checkpoint: Option<&[u8]>,
    ) -> Result<Self, BootError> {
        let process = Process::boot(machine, distances, config, checkpoint, &Containers::new())?;
        Ok(Self { machine, distances, process, active: Vec::new(), statuses: BTreeMap::new(), stale: true })
    }

    /// Who has which CPUs.
    #[must_use]
    pub fn sets(&self) -> &Sets {
        &self.process.sets
    }

    /// The reserved CPUs.
    #[must_use]
    pub fn reserved(&self) -> &CpuSet {
        &self.process.reserved
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.process.config
    }

    /// Pods that were let in, in that order.
    #[must_use]
    pub fn active(&self) -> &[Pod] {
        &self.active
    }

    /// The bytes of the checkpoint as they are on disk now.
    #[must_use]
    pub fn checkpoint(&self) -> String {
        self.process.checkpoint()
    }

    /// A pod arrives. If it is refused it leaves again; what it has taken stays until the next pass.
    pub fn admit(&mut self, pod: Pod) -> Admission {
        let at = self.active.iter().position(|p| p.uid == pod.uid);
        let at = if let Some(at) = at {
            self.active[at] = pod;
            self.stale = true;
            at
        } else {
            self.active.push(pod);
            self.active.len() - 1
        };
        self.ask(at)
    }

    /// A pod that was active before the restart is asked for again.
    pub fn readmit(&mut self, uid: &str) -> Result<Admission, NotActive> {
        let at = self.find(uid)?;
        Ok(self.ask(at))
    }

    fn ask(&mut self, at: usize) -> Admission {
        self.remove_stale();
        let admission = self.process.admit(&self.active[at]);
        if admission.outcome.is_err() {
            self.leave(at);
        }
        admission
    }

    fn find(&self, uid: &str) -> Result<usize, NotActive> {
        self.active.iter().position(|p| p.uid == uid).ok_or_else(|| NotActive { uid: uid.into() })
    }

    /// All containers of a pod are created, in order, with ids from `id`. Ordinary init containers have then ended.
    pub fn run(&mut self, uid: &str, mut id: impl FnMut() -> String) -> Result<Vec<Created>, NotActive> {
        let pod = &self.active[self.find(uid)?];
        let statuses = self.statuses.entry(uid.into()).or_default();
        let mut created = Vec::new();
        for (container, kind) in in_order(pod) {
            let id = id();
            let cpus = self.process.sets.of(uid, &container.name).clone();
            // Only a set of its own is noted as applied, so that one in the shared pool is written once more.
            if self.process.sets.get(uid, &container.name).is_some() {
                self.process.note(uid, &container.name, cpus.clone());
            }
            statuses.insert(container.name.clone(), Status { id: id.clone(), running: kind != Kind::Init });
            created.push(Created { name: container.name.clone(), id, cpus });
        }
        Ok(created)
    }

    /// A pod leaves. Nothing is freed yet.
    pub fn remove(&mut self, uid: &str) -> Result<(), NotActive> {
        let at = self.find(uid)?;
        self.leave(at);
        Ok(())
    }

    fn leave(&mut self, at: usize) {
        let pod = self.active.remove(at);
        self.statuses.remove(&pod.uid);
        self.stale = true;
    }

    /// The pass that frees what belongs to nobody active.
    fn remove_stale(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let active: BTreeMap<&str, &Pod> = self.active.iter().map(|p| (p.uid.as_str(), p)).collect();
        let gone = |pod: &str, container: &str| {
            active.get(pod).is_none_or(|p| in_order(p).all(|(c, _)| c.name != container))
        };
        let process = &self.process;
        let known = process.sets.entries.iter().chain(&process.applied);
        let all = known.flat_map(|(pod, names)| names.keys().map(move |name| (pod, name)));
        let gone: Vec<(String, String)> = all
            .filter(|(pod, name)| gone(pod, name))
            .map(|(pod, name)| (pod.clone(), name.clone()))
            .collect();
        for (pod, name) in gone {
            self.process.remove(&pod, &name);
        }
    }

    /// One round of the loop that writes changed sets.
    pub fn reconcile(&mut self) -> Reconciled {
        self.remove_stale();
        let mut done = Reconciled::default();
        for pod in &self.active {
            let named = |container: &str, id: &str| Named {
                pod: pod.uid.clone(),
                container: container.into(),
                id: id.into(),
            };
            let Some(statuses) = self.statuses.get(&pod.uid) else {
                done.failed.push(named("", ""));
                continue;
            };
            for (container, _) in in_order(pod) {
                let Some(status) = statuses.get(&container.name) else {
                    done.failed.push(named(&container.name, ""));
                    continue;
                };
                if !status.running {
                    continue; // may be about to run again, so it keeps its CPUs
                }
                let name = named(&container.name, &status.id);
                let wanted = self.process.sets.of(&pod.uid, &container.name);
                if wanted.is_empty() {
                    done.failed.push(name);
                    continue;
                }
                let applied = self.process.applied.get(&pod.uid).and_then(|a| a.get(&container.name));
                if applied != Some(wanted) {
                    let wanted = wanted.clone();
                    done.updates.push((status.id.clone(), wanted.clone()));
                    self.process.note(&pod.uid, &container.name, wanted);
                }
                done.ok.push(name);
            }
        }
        done
    }

    /// Another process with this configuration on the same directory. Pods and containers go on; every pod is then to be
    /// readmitted, in order. After an error the kubelet is down, and of this node only the checkpoint is still true.
    pub fn restart(&mut self, config: Config) -> Result<(), BootError> {
        let file = self.checkpoint();
        let containers = self.statuses.iter().flat_map(|(pod, names)| {
            names.iter().map(|(name, status)| (status.id.clone(), (pod.clone(), name.clone())))
        });
        let containers: Containers = containers.collect();
        self.process =
            Process::boot(self.machine, self.distances, config, Some(file.as_bytes()), &containers)?;
        self.stale = true;
        Ok(())
    }
}
