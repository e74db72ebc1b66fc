//! What the tests share: the fake kernel first of all, and the guest side of the suite on real kernels.

pub mod guest;
