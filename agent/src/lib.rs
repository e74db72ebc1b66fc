//! Every effect of truepin lives here: one file per kernel or network interface.

pub mod bpf;
pub mod btf;
