//! What the tests share: the fake kernel, and the guest side of the suite on real kernels.

pub mod fake;
pub mod guest;
pub mod sim;
