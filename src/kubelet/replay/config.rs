//! How the replayed kubelet is configured, and why it refuses to start.

use crate::{
    cpuset::CpuSet,
    kubelet::{LoadError, StartError},
    placement::kubelet::{OptionsError, StaticOptions, TakeError},
    request::AlignmentPolicy,
};

/// More NUMA nodes than this are refused under every policy but `none`, unless `max-allowable-numa-nodes` says more
/// (kubelet 1.36, `cm/topologymanager/topology_manager.go`).
pub const DEFAULT_MAX_NODES: usize = 8;

/// What the kubelet aligns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// Each container by itself.
    #[default]
    Container,
    /// One set of nodes for all containers of a pod.
    Pod,
}

/// What is kept from exclusive use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// So many CPUs (system and kube reserved, rounded up); the kubelet chooses which.
    Count(usize),
    /// `reservedSystemCPUs`.
    Cpus(CpuSet),
}

/// The kubelet's configuration, as far as its CPU and topology managers read it. The CPU manager's policy is `static`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `cpuManagerPolicyOptions`.
    pub options: StaticOptions,
    /// Reserved CPUs.
    pub reserved: Reservation,
    /// `topologyManagerPolicy`.
    pub policy: AlignmentPolicy,
    /// `topologyManagerScope`; without meaning under the policy `none`.
    pub scope: Scope,
    /// `prefer-closest-numa-nodes`.
    pub prefer_closest: bool,
    /// `max-allowable-numa-nodes`.
    pub max_nodes: usize,
    /// The gate `PodLevelResourceManagers`.
    pub pod_level: bool,
}

impl Config {
    /// Defaults, with a reservation, which the static policy needs.
    #[must_use]
    pub fn new(reserved: Reservation) -> Self {
        Self {
            options: StaticOptions::default(),
            reserved,
            policy: AlignmentPolicy::None,
            scope: Scope::default(),
            prefer_closest: false,
            max_nodes: DEFAULT_MAX_NODES,
            pod_level: false,
        }
    }
}

/// Why the kubelet does not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BootError {
    /// Options that are none, or exclude each other.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// `align-by-socket` under `single-numa-node`.
    #[error("align-by-socket excludes the topology policy single-numa-node")]
    SocketPolicy,
    /// `align-by-socket` where a node has several sockets.
    #[error("align-by-socket on a machine of {sockets} sockets and {nodes} NUMA nodes")]
    SocketMachine {
        /// Sockets, as counted by the kubelet.
        sockets: usize,
        /// NUMA nodes, as counted by the kubelet.
        nodes: usize,
    },
    /// The topology manager enumerates no more.
    #[error("{nodes} NUMA nodes, at most {max} are allowed")]
    Nodes {
        /// NUMA nodes with CPUs.
        nodes: usize,
        /// `max-allowable-numa-nodes`.
        max: usize,
    },
    /// The static policy needs a reservation.
    #[error("no CPU is reserved")]
    NothingReserved,
    /// Reserved CPUs that do not exist.
    #[error("the reserved CPUs {cpus} are not on this machine")]
    ReservedUnknown {
        /// Those.
        cpus: CpuSet,
    },
    /// So many CPUs cannot be reserved.
    #[error("cannot reserve {count} CPUs")]
    Reserve {
        /// As configured.
        count: usize,
        /// Why not.
        source: TakeError,
    },
    /// The checkpoint cannot be loaded.
    #[error("the checkpoint cannot be loaded")]
    Load(#[from] LoadError),
    /// Its state does not fit the machine.
    #[error("the checkpoint does not fit")]
    Start(#[from] StartError),
    /// A list that no Linux machine can have.
    #[error("{key}: {list} names CPUs that no machine has")]
    List {
        /// Where.
        key: String,
        /// The list.
        list: String,
    },
}
