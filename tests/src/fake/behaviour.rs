//! What differs between kernels.

/// Whose cpuset code is followed. The two differ in dozens of places that only make sense together, so it is one
/// choice and no list of switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// Linux 6.12 (and, in what truepin meets, 6.18): an empty write to a populated cgroup is refused, and a
    /// `cpuset.cpus` that overlaps a sibling partition invalidates that partition for good.
    Strict,
    /// Linux 7.3: such an empty write succeeds and the tasks get the parent's CPUs; overlap trims the sibling and
    /// leaves the partition alone.
    Lax,
}

/// How a kernel behaves where kernels differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behaviour {
    /// Whose cpuset code.
    pub model: Model,
    /// `cpuset.cpus.exclusive` exists (since 6.7). Without it there are no remote partitions.
    pub exclusive_file: bool,
    /// What `sched_setaffinity` asked for comes back after a change of the cpuset (since 6.2). Before, any change
    /// gives the task the whole set, and every move applies it.
    pub remembers_pins: bool,
    /// A domain refuses to lose its last CPU to hotplug when its servers are on its account (6.12).
    pub keeps_last_cpu: bool,
}

impl Behaviour {
    /// Linux 6.12, as compared with 6.12.95.
    #[must_use]
    pub fn strict() -> Self {
        Self { model: Model::Strict, exclusive_file: true, remembers_pins: true, keeps_last_cpu: true }
    }

    /// Linux 7.3, as compared with 7.3.4.
    #[must_use]
    pub fn lax() -> Self {
        Self { model: Model::Lax, exclusive_file: true, remembers_pins: true, keeps_last_cpu: false }
    }

    /// Linux 6.1 as far as members go, as compared with 6.1.176. Its partitions are *not* followed: they have no
    /// explicit list and rules of their own, and truepin makes none there.
    #[must_use]
    pub fn members_only() -> Self {
        let (exclusive_file, remembers_pins, keeps_last_cpu) = (false, false, false);
        Self { model: Model::Strict, exclusive_file, remembers_pins, keeps_last_cpu }
    }

    pub(super) fn is_lax(self) -> bool {
        self.model == Model::Lax
    }
}
