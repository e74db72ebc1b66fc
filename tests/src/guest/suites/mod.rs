//! The suites, by name. A new one is a file here and a line in [`ALL`]; `tests/vm/matrix` says on which kernels and
//! machines it runs.

use super::scenario::Suite;

pub mod answers;
pub mod churn;
pub mod demo;
pub mod enforce;
pub mod fights;
pub mod hotplug;
pub mod kernel;
pub mod life;
pub mod lockstep;
pub mod odd;
pub mod powercut;
pub mod service;
pub mod smoke;
pub mod units;
pub mod writers;

/// Every suite.
pub const ALL: &[&Suite] = &[
    &answers::SUITE,
    &smoke::SUITE,
    &kernel::SUITE,
    &enforce::SUITE,
    &life::SUITE,
    &writers::SUITE,
    &odd::SUITE,
    &fights::SUITE,
    &churn::SUITE,
    &hotplug::SUITE,
    &demo::SUITE,
    &lockstep::SUITE,
    &powercut::SUITE,
    &service::SUITE,
    &units::SUITE,
];

/// The suite of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Suite> {
    ALL.iter().copied().find(|s| s.name == name)
}

/// All names, for messages.
#[must_use]
pub fn names() -> String {
    ALL.iter().map(|s| s.name).collect::<Vec<_>>().join(", ")
}
