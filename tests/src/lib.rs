//! What the tests share: the fake kernel first of all.

pub mod fake;
