//! Options of the kubelet's static policy.

use std::fmt;

/// Those that are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches, as the kubelet has them")]
pub struct StaticOptions {
    /// `full-pcpus-only`: only whole cores.
    pub full_pcpus_only: bool,
    /// `distribute-cpus-across-numa`: evenly over as few nodes as will do.
    pub distribute_across_numa: bool,
    /// `distribute-cpus-across-cores`: threads in the order of their numbers instead of whole cores.
    pub distribute_across_cores: bool,
    /// `align-by-socket`: an affinity to a node is one to its sockets.
    pub align_by_socket: bool,
    /// `prefer-align-cpus-by-uncorecache`: whole last-level caches before cores.
    pub prefer_align_by_uncorecache: bool,
    /// `strict-cpu-reservation`: reserved CPUs are not in the shared pool.
    pub strict_reservation: bool,
}

/// Why options are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// Not an option of the static policy.
    #[error("unknown option {name:?}; the static policy has {}, the topology manager prefer-closest-numa-nodes", StaticOptions::NAMES.join(", "))]
    Unknown {
        /// As given.
        name: String,
    },
    /// Two that exclude each other.
    #[error("options {a} and {b} exclude each other")]
    Excluded {
        /// One.
        a: &'static str,
        /// The other.
        b: &'static str,
    },
}

const FULL: &str = "full-pcpus-only";
const NUMA: &str = "distribute-cpus-across-numa";
const CORES: &str = "distribute-cpus-across-cores";
const SOCKET: &str = "align-by-socket";
const UNCORE: &str = "prefer-align-cpus-by-uncorecache";
const STRICT: &str = "strict-cpu-reservation";

impl StaticOptions {
    /// Every option's name.
    pub const NAMES: [&'static str; 6] = [FULL, NUMA, CORES, SOCKET, UNCORE, STRICT];

    /// Pairs that exclude each other (kubelet 1.36, `policy_options.go`).
    const EXCLUDED: [(&'static str, &'static str); 4] =
        [(FULL, CORES), (NUMA, CORES), (UNCORE, CORES), (UNCORE, NUMA)];

    /// From names, in any order.
    pub fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, OptionsError> {
        let mut options = Self::default();
        for name in names {
            let Some(at) = Self::NAMES.iter().position(|n| *n == name) else {
                return Err(OptionsError::Unknown { name: name.into() });
            };
            *options.switches()[at] = true;
        }
        match Self::EXCLUDED.iter().find(|(a, b)| options.has(a) && options.has(b)) {
            Some((a, b)) => Err(OptionsError::Excluded { a, b }),
            None => Ok(options),
        }
    }

    /// In the order of [`Self::NAMES`].
    fn switches(&mut self) -> [&mut bool; 6] {
        [
            &mut self.full_pcpus_only,
            &mut self.distribute_across_numa,
            &mut self.distribute_across_cores,
            &mut self.align_by_socket,
            &mut self.prefer_align_by_uncorecache,
            &mut self.strict_reservation,
        ]
    }

    fn has(mut self, name: &str) -> bool {
        Self::NAMES.iter().position(|n| *n == name).is_some_and(|at| *self.switches()[at])
    }

    /// The names of those that are on.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |name| self.has(name))
    }
}

impl fmt::Display for StaticOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().collect::<Vec<_>>().join(","))
    }
}
