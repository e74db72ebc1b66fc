//! What a pod asks for, settled once per admission.
//!
//! The arithmetic is [`crate::hints::pods`]; here is the order in which it is asked for, and when each container runs.

use crate::{
    hints::pods,
    pod::{Container, Pod},
};

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Before all that follow it; then it ends.
    Init,
    /// From its turn among the init containers to the pod's end.
    Sidecar,
    /// Beside the other ones, to the pod's end.
    App,
}

/// A container's part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want<'p> {
    pub(super) name: &'p str,
    pub(super) kind: Kind,
    /// Exclusive CPUs; 0: it shares.
    pub(super) cpus: usize,
}

/// A pod, as the static policy sees it.
#[derive(Debug)]
pub(super) struct Claim<'p> {
    pub(super) uid: &'p str,
    /// Init containers, then the others, each in order.
    pub(super) containers: Vec<Want<'p>>,
    /// CPUs of the whole pod.
    pub(super) total: usize,
    /// Whether the pod has resources of its own and the gate is on.
    pub(super) pod_level: bool,
    /// Of such a pod: whether those that share have something left to share.
    pub(super) division: Result<(), pods::DivisionError>,
}

/// Containers in the order in which they are admitted and created, each with its kind.
pub(super) fn in_order(pod: &Pod) -> impl Iterator<Item = (&Container, Kind)> {
    let init = pod.init.iter().map(|c| (c, if c.sidecar { Kind::Sidecar } else { Kind::Init }));
    init.chain(pod.app.iter().map(|c| (c, Kind::App)))
}

impl<'p> Claim<'p> {
    /// With the gate `PodLevelResourceManagers` on or off.
    pub(super) fn of(pod: &'p Pod, gate: bool) -> Self {
        // More CPUs than a number can say are more than any machine has.
        let count = |cpus: u64| usize::try_from(cpus).unwrap_or(usize::MAX);
        let want = |(c, kind): (&'p Container, Kind)| Want {
            name: &c.name,
            kind,
            cpus: count(pods::container_cpus(pod, c, gate)),
        };
        let pod_level = gate && pod.pod_cpu.is_some();
        Self {
            uid: &pod.uid,
            containers: in_order(pod).map(want).collect(),
            total: count(pods::pod_cpus(pod, gate)),
            pod_level,
            division: if pod_level { pods::check_division(pod, gate) } else { Ok(()) },
        }
    }
}
