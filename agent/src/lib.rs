//! Every effect of truepin lives here: one file per kernel or network interface.

pub mod api;
pub mod bpf;
pub mod btf;
pub mod cgroup_id;
pub mod cgroupfs;
pub mod cli;
pub mod config;
pub mod containers;
pub mod cri;
pub mod engine;
pub mod evidence;
pub mod executor;
pub mod fault;
pub mod hotplug;
pub mod kubelet;
pub mod lock;
pub mod machine;
pub mod paths;
pub mod procfs;
pub mod run;
pub mod start;
pub mod store;
pub mod sysfs;
pub mod systemd;
pub mod watch;
pub mod writers;
