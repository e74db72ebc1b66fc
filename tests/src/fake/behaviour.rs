//! What differs between kernels, and which of them were compared.
//!
//! Compared, value by value and with 0 differences, were 6.1.176, 6.12.95, 6.12.117 and 7.3.4; their
//! answers are in `truth/`. Every other release is taken for one of these by [`Behaviour::of`], on the grounds
//! given there. The model is of the cpuset code: a distribution that carries patches of its own may differ.

/// Whose cpuset code is followed. They differ in dozens of places that only make sense together, so it is one
/// choice and no list of switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// Linux 6.1: no explicit list, hence no remote partitions; a partition takes what its `cpuset.cpus` says from a
    /// parent that is one.
    LocalOnly,
    /// Linux 6.12 before 6.12.110: an empty write to a populated cgroup is refused, a `cpuset.cpus` that overlaps a
    /// sibling partition invalidates that partition for good, and a list that shrinks above a remote partition
    /// ends it as a member.
    Strict,
    /// Linux 6.12 since 6.12.110: the same rules, but grants as on 7.3. A remote partition follows the lists above
    /// it, and an exclusive list that meets what a sibling holds is refused (EINVAL).
    Amended,
    /// Linux 7.3: an empty write succeeds and the tasks get the parent's CPUs; overlap trims the sibling and leaves
    /// the partition alone.
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
    /// Linux 6.12 before 6.12.110, as compared with 6.12.95.
    #[must_use]
    pub fn strict() -> Self {
        Self { model: Model::Strict, exclusive_file: true, remembers_pins: true, keeps_last_cpu: true }
    }

    /// Linux 6.12 since 6.12.110, as compared with 6.12.117.
    #[must_use]
    pub fn amended() -> Self {
        Self { model: Model::Amended, ..Self::strict() }
    }

    /// Linux 7.3, as compared with 7.3.4.
    #[must_use]
    pub fn lax() -> Self {
        Self { model: Model::Lax, exclusive_file: true, remembers_pins: true, keeps_last_cpu: false }
    }

    /// Linux 6.1, as compared with 6.1.176: no explicit list, and partitions with rules of their own.
    #[must_use]
    pub fn local_only() -> Self {
        let (exclusive_file, remembers_pins, keeps_last_cpu) = (false, false, false);
        Self { model: Model::LocalOnly, exclusive_file, remembers_pins, keeps_last_cpu }
    }

    /// The behaviour for a release as `uname -r` gives it (`6.12.117+deb13-cloud-amd64`); nothing where that begins
    /// with no version.
    ///
    /// Where nothing was compared: below 6.7 there is no explicit list, as on 6.1; 6.7 to 6.11 are taken for the first
    /// 6.12. Within 6.12 the line is drawn at 6.12.110: its change log names the rework of remote partitions ("Remove
    /// `remote_partition_check`"), those up to 6.12.117 name nothing else that would show, and the cpuset code of
    /// 6.12.107 is that of 6.12.95 but for memory policies. 6.13 to 6.19 are taken for the newest 6.12, 7.0 and later
    /// for 7.3.
    #[must_use]
    pub fn of(release: &str) -> Option<Self> {
        let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return None };
        let patch = numbers.next().and_then(Result::ok).unwrap_or(0);
        Some(match (major, minor, patch) {
            (..6, ..) | (6, ..7, _) => Self::local_only(),
            (6, ..12, _) | (6, 12, ..110) => Self::strict(),
            (6, ..) => Self::amended(),
            _ => Self::lax(),
        })
    }

    pub(super) fn is_local_only(self) -> bool {
        self.model == Model::LocalOnly
    }

    pub(super) fn is_lax(self) -> bool {
        self.model == Model::Lax
    }

    /// Grants leave out what siblings hold, and remote partitions follow the lists above them.
    pub(super) fn heeds_siblings(self) -> bool {
        matches!(self.model, Model::Amended | Model::Lax)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_behaviour_of_a_release() {
        for (release, behaviour) in [
            ("5.15.0-91-generic", Behaviour::local_only()),
            ("6.1.176", Behaviour::local_only()),
            ("6.8.0-45-generic\n", Behaviour::strict()),
            ("6.12+unreleased", Behaviour::strict()),
            ("6.12.95+deb13-cloud-amd64", Behaviour::strict()),
            ("6.12.109", Behaviour::strict()),
            ("6.12.110", Behaviour::amended()),
            ("6.12.117+deb13-cloud-amd64", Behaviour::amended()),
            ("6.18.15", Behaviour::amended()),
            ("7.3.4", Behaviour::lax()),
        ] {
            assert_eq!(Behaviour::of(release), Some(behaviour), "{release}");
        }
        for text in ["", "linux", "6", "6.x"] {
            assert_eq!(Behaviour::of(text), None, "{text:?}");
        }
    }
}
