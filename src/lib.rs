//! The pure core of truepin: values in, values out. No files, no clocks, no environment, no async.
//!
//! By stage of the pipeline: [`cpuset`] and [`nodeset`] (set algebra), [`topology`], [`request`], [`hints`],
//! [`placement`], [`assignments`], [`containers`], [`checkpoint`], [`observed`] and [`partition`] (the kernel's state as read), [`explain`], [`plan`], [`ledger`]
//! and [`sweep`] (evidence), [`verdict`], [`reconcile`] (decides).
#![forbid(unsafe_code)]

pub mod assignments;
pub mod cgroup;
pub mod checkpoint;
pub mod containers;
pub mod cpuset;
pub mod explain;
pub mod hints;
pub mod idset;
pub mod kubelet;
pub mod kubepods;
pub mod ledger;
pub mod nodeset;
pub mod observed;
pub mod owner;
pub mod partition;
pub mod placement;
pub mod plan;
pub mod pod;
pub mod reconcile;
pub mod refit;
pub mod rehearse;
pub mod request;
pub mod stale;
pub mod sweep;
pub mod topology;
pub mod units;
pub mod verdict;

pub use cgroup::{CgroupFile, CgroupId, CgroupPath, CpusetFile};
pub use cpuset::{CpuId, CpuSet};
pub use nodeset::{NodeId, NodeSet};
pub use owner::Owner;
pub use topology::CpuTopology;
