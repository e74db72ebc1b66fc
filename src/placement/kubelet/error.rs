//! Why the kubelet's strategy gives no CPUs.

/// A refusal, with the kubelet's numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// Fewer CPUs are available (its "not enough cpus available to satisfy request").
    #[error("not enough CPUs: {requested} requested, {available} available")]
    NotEnough {
        /// CPUs asked for.
        requested: usize,
        /// CPUs that could be taken.
        available: usize,
    },
    /// `full-pcpus-only`, and the request does not fill whole cores (its `SMTAlignmentError`).
    #[error("{requested} CPUs do not fill cores of {cpus_per_core} CPUs")]
    SmtAlignment {
        /// CPUs asked for.
        requested: usize,
        /// CPUs of a core, on average.
        cpus_per_core: usize,
    },
    /// `full-pcpus-only`, and fewer CPUs are on cores without a reserved CPU (its `SMTAlignmentError` with "not enough
    /// free physical CPUs").
    #[error("not enough CPUs on whole cores: {requested} requested, {available} available")]
    NotEnoughPhysical {
        /// CPUs asked for.
        requested: usize,
        /// CPUs of the shared pool without the siblings of reserved ones.
        available: usize,
        /// CPUs of a core, on average.
        cpus_per_core: usize,
    },
    /// What the chosen nodes gave is not what was asked for (its "accounting error").
    #[error("the CPUs of the chosen nodes do not add up: {missing} missing")]
    Accounting {
        /// CPUs that are missing; below 0 when too many were given.
        missing: i64,
    },
    /// Enough CPUs are available, but no choice of the rule adds up to the number asked for (where the
    /// kubelet would never return, or hand out CPUs that are not available).
    #[error("{requested} CPUs requested, {available} available, and they do not add up")]
    Unaccounted {
        /// CPUs asked for.
        requested: usize,
        /// CPUs that could be taken.
        available: usize,
    },
}

impl TakeError {
    /// The kubelet counts CPUs as available that the machine does not have.
    pub(super) fn with_available(self, all: usize) -> Self {
        match self {
            Self::NotEnough { requested, .. } => Self::NotEnough { requested, available: all },
            other => other,
        }
    }
}
