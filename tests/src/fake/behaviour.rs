//! What differs between kernels, as switches.

/// How a kernel behaves where kernels differ. [`Behaviour::strict`] and [`Behaviour::lax`] are the two that are
/// held against real kernels; single switches may be turned for a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches, each a fact about a kernel")]
pub struct Behaviour {
    /// `cpuset.cpus.exclusive` exists (6.7). Without it there are no remote partitions.
    pub exclusive_file: bool,
    /// An empty write to `cpuset.cpus` or `cpuset.mems` of a populated cgroup succeeds (7.x) instead of ENOSPC.
    pub empty_writes: bool,
    /// A `cpuset.cpus` that overlaps a sibling partition leaves the partition alone (7.x) instead of
    /// invalidating it.
    pub overlap_trims: bool,
    /// The last CPU of a `root` partition cannot be taken offline (6.12: EBUSY).
    pub keeps_last_cpu: bool,
}

impl Behaviour {
    /// Linux 6.12.
    #[must_use]
    pub fn strict() -> Self {
        Self { exclusive_file: true, empty_writes: false, overlap_trims: false, keeps_last_cpu: true }
    }
}
