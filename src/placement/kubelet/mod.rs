//! The choice that the kubelet's static CPU policy makes (1.36).

mod error;
mod machine;
mod options;

pub use error::TakeError;
pub use machine::{KubeletCounts, KubeletMachine, Label, Labels};
pub use options::{OptionsError, StaticOptions};
