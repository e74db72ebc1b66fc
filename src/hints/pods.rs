//! How many CPUs of its own each container of a pod, and the pod as a whole, asks for.
//!
//! Problem: with scope `container` each container is aligned by itself, with scope `pod` all of them are together, and
//! containers of one pod do not all run at the same time: ordinary init containers run one after the other, before the
//! rest, while sidecars started before them run on.
//! The pod asks for the larger of what runs for its whole life (containers and sidecars) and, for each ordinary init
//! container, it and the sidecars before it. A pod with resources of its own asks for exactly those, if the kubelet
//! knows of them (gate `PodLevelResourceManagers`); if not, none of its containers gets CPUs of its own.
//! Source: kubelet 1.36, `cm/cpumanager/policy_static.go` (`guaranteedCPUs`, `podGuaranteedCPUs`,
//! `validatePodScopeResources`), `cm/qos`, KEP-753 (sidecars), KEP-2837 (pod-level resources).
//!
//! This is the kubelet's arithmetic, for the strategy of that name; the live path asks [`Pod::requests`].

use crate::pod::{Container, Pod};

/// Whether the kubelet takes a pod as Guaranteed. One with CPUs of its own (which come with memory) is.
#[must_use]
pub fn is_guaranteed(pod: &Pod) -> bool {
    pod.pod_cpu.is_some() || pod.is_guaranteed()
}

/// CPUs of its own that a container gets: 0 if it runs in the shared pool (or in its pod's). `pod_level` is the gate
/// `PodLevelResourceManagers`.
#[must_use]
pub fn container_cpus(pod: &Pod, container: &Container, pod_level: bool) -> u64 {
    if !is_guaranteed(pod) || (pod.pod_cpu.is_some() && !(pod_level && has_fixed_resources(container))) {
        return 0;
    }
    whole(request(container.cpu_request, container.cpu_limit))
}

/// CPUs of its own that a pod gets as a whole.
#[must_use]
pub fn pod_cpus(pod: &Pod, pod_level: bool) -> u64 {
    if let Some(milli) = pod.pod_cpu {
        return if pod_level { whole(milli) } else { 0 };
    }
    let (mut sidecars, mut most) = (0_u64, 0);
    for init in &pod.init {
        let cpus = container_cpus(pod, init, pod_level);
        if init.sidecar {
            sidecars = sidecars.saturating_add(cpus);
        } else {
            most = most.max(sidecars.saturating_add(cpus));
        }
    }
    let apps = pod.app.iter().map(|c| container_cpus(pod, c, pod_level));
    most.max(apps.fold(sidecars, u64::saturating_add))
}

/// Why the CPUs of a pod cannot be divided among its containers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DivisionError {
    /// An ordinary init container asks for more than sidecars before it leave.
    #[error("init container {name:?} asks for {cpus} CPUs, the pod has {left} left")]
    Init {
        /// The container.
        name: String,
        /// What it asks for.
        cpus: u64,
        /// What is left.
        left: u64,
    },
    /// Containers without CPUs of their own would have none to share.
    #[error("no CPU of the pod is left for its containers without CPUs of their own")]
    NothingShared,
}

/// Whether CPUs that a pod has as a whole (pod-level resources) can be divided among its containers, so that those
/// without CPUs of their own have some to share.
pub fn check_division(pod: &Pod, pod_level: bool) -> Result<(), DivisionError> {
    let whole = pod_cpus(pod, pod_level);
    let (mut taken, mut shares) = (0_u64, false);
    for init in &pod.init {
        let cpus = container_cpus(pod, init, pod_level);
        if init.sidecar {
            shares |= cpus == 0;
            taken = taken.saturating_add(cpus);
            continue;
        }
        let left = whole.saturating_sub(taken);
        if cpus == 0 && left == 0 {
            return Err(DivisionError::NothingShared);
        }
        if cpus > left {
            return Err(DivisionError::Init { name: init.name.clone(), cpus, left });
        }
    }
    for app in &pod.app {
        let cpus = container_cpus(pod, app, pod_level);
        shares |= cpus == 0;
        taken = taken.saturating_add(cpus);
    }
    if shares && taken >= whole { Err(DivisionError::NothingShared) } else { Ok(()) }
}

/// The API server sets a request that is absent to the limit.
fn request(request: Option<u64>, limit: Option<u64>) -> u64 {
    request.or(limit).unwrap_or(0)
}

fn whole(milli: u64) -> u64 {
    if milli.is_multiple_of(1000) { milli / 1000 } else { 0 }
}

/// CPU and memory are set, and requests equal limits.
fn has_fixed_resources(container: &Container) -> bool {
    let fixed = |asked: Option<u64>, limit: Option<u64>| {
        limit.is_some_and(|l| l > 0) && request(asked, limit) == limit.unwrap_or(0)
    };
    fixed(container.cpu_request, container.cpu_limit)
        && fixed(container.memory_request, container.memory_limit)
}
