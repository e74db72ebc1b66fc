//! Every effect of truepin lives here: one file per kernel or network interface.

pub mod bpf;
pub mod btf;
pub mod cgroupfs;
pub mod config;
pub mod executor;
pub mod procfs;
pub mod store;
pub mod sysfs;
pub mod watch;
pub mod writers;
