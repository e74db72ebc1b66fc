//! The pure core of truepin: values in, values out. No files, no clocks, no environment, no async.
//!
//! By stage of the pipeline: [`cpuset`] and [`nodeset`] (set algebra), [`topology`], [`request`], [`placement`],
//! assignments, checkpoint, [`observed`] and [`partition`] (the kernel's state as read), plan, [`ledger`], verdict,
//! reconcile. `README.md` draws it.
#![forbid(unsafe_code)]

pub mod cgroup;
pub mod cpuset;
pub mod idset;
pub mod ledger;
pub mod nodeset;
pub mod observed;
pub mod owner;
pub mod partition;

pub mod placement;
pub mod request;
pub mod topology;

pub use cgroup::{CgroupId, CgroupPath, CpusetFile};
pub use cpuset::{CpuId, CpuSet};
pub use nodeset::{NodeId, NodeSet};
pub use owner::Owner;
pub use topology::CpuTopology;
