//! The kernel's reasons for an invalid partition, classified.
//!
//! The words are those of `perr_strings` in `kernel/cgroup/cpuset.c`, from 6.1 (which began to give reasons) to 7.3;
//! older kernels have the bare form alone. What is not among them is kept as it reads: the text decides nothing, it only
//! explains.

use super::InvalidReason;
use std::fmt;

/// Why a cgroup is not the partition that it should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// `invalid` without words.
    Bare,
    /// `Invalid cpu list in cpuset.cpus.exclusive`; on older kernels `… in cpuset.cpus`.
    BadList,
    /// `Parent is an invalid partition root`
    ParentInvalid,
    /// `Parent is not a partition root`
    ParentMember,
    /// `Cpu list in cpuset.cpus not exclusive`
    NotExclusive,
    /// `Parent unable to distribute cpu downstream`
    ParentStarves,
    /// `No cpu available due to hotplug`
    Hotplug,
    /// `cpuset.cpus and cpuset.cpus.exclusive are empty`; on older kernels `cpuset.cpus is empty`.
    NothingAsked,
    /// `partition config conflicts with housekeeping setup`
    Housekeeping,
    /// `Enable partition not permitted`
    NotPermitted,
    /// `Have remote partition underneath`
    RemoteBelow,
    /// It reads `member`.
    Member,
    /// It has no cpuset files.
    NoFiles,
    /// Words that are not known here.
    Unknown(String),
}

/// The kernel's words and what they mean, older spellings behind the present one.
const WORDS: [(&str, Cause); 12] = [
    ("Invalid cpu list in cpuset.cpus.exclusive", Cause::BadList),
    ("Invalid cpu list in cpuset.cpus", Cause::BadList),
    ("Parent is an invalid partition root", Cause::ParentInvalid),
    ("Parent is not a partition root", Cause::ParentMember),
    ("Cpu list in cpuset.cpus not exclusive", Cause::NotExclusive),
    ("Parent unable to distribute cpu downstream", Cause::ParentStarves),
    ("No cpu available due to hotplug", Cause::Hotplug),
    ("cpuset.cpus and cpuset.cpus.exclusive are empty", Cause::NothingAsked),
    ("cpuset.cpus is empty", Cause::NothingAsked),
    ("partition config conflicts with housekeeping setup", Cause::Housekeeping),
    ("Enable partition not permitted", Cause::NotPermitted),
    ("Have remote partition underneath", Cause::RemoteBelow),
];

impl InvalidReason {
    /// What the words stand for.
    #[must_use]
    pub fn cause(&self) -> Cause {
        let Self::Said(said) = self else { return Cause::Bare };
        let known = WORDS.iter().find(|(words, _)| words == said);
        known.map_or_else(|| Cause::Unknown(said.clone()), |(_, cause)| cause.clone())
    }
}

impl Cause {
    /// A short word for JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Bare => "no-reason",
            Self::BadList => "bad-list",
            Self::ParentInvalid => "parent-invalid",
            Self::ParentMember => "parent-member",
            Self::NotExclusive => "not-exclusive",
            Self::ParentStarves => "parent-starves",
            Self::Hotplug => "hotplug",
            Self::NothingAsked => "nothing-asked",
            Self::Housekeeping => "housekeeping",
            Self::NotPermitted => "not-permitted",
            Self::RemoteBelow => "remote-below",
            Self::Member => "member",
            Self::NoFiles => "no-files",
            Self::Unknown(_) => "unknown",
        }
    }

    /// What it means, in plain words.
    #[must_use]
    pub fn explain(&self) -> &'static str {
        match self {
            Self::Bare => {
                "the kernel ended the partition and gives no reason: a cgroup beside it listed its CPUs (6.12 to 6.18), or its last CPU went offline"
            }
            Self::BadList => {
                "none of the CPUs asked for can be had: they are held beside it, are not listed above it, or no list names them any more"
            }
            Self::ParentInvalid => {
                "the cgroup above is a partition that is not valid itself, so it hands no CPUs down"
            }
            Self::ParentMember => {
                "its CPUs come neither from the root, for which every list above it and its own have to name them, nor from the cgroup above, which is no partition"
            }
            Self::NotExclusive => "a cgroup beside it lists some of the same CPUs in its cpuset.cpus",
            Self::ParentStarves => {
                "taking the CPUs would leave tasks without any: those of the cgroup above or its other children, or this cgroup's own"
            }
            Self::Hotplug => "all of its CPUs are offline",
            Self::NothingAsked => "its own lists are empty, so there is nothing to make a partition of",
            Self::Housekeeping => {
                "the CPUs are not what the kernel was booted for: a partition that is not isolated has CPUs of isolcpus=, or an isolated one would leave no CPU for housekeeping under nohz_full="
            }
            Self::NotPermitted => {
                "whoever wrote it lacks CAP_SYS_ADMIN, which a partition below a cgroup that is none needs"
            }
            Self::RemoteBelow => "a cgroup somewhere below is a partition already and has CPUs of this one",
            Self::Member => {
                "it is no partition any more: somebody wrote member, or the kernel ended it when a list above it shrank"
            }
            Self::NoFiles => {
                "it has no cpuset files: the controller was taken away above it, and with it every partition below"
            }
            Self::Unknown(_) => "the kernel gives a reason that this truepin does not know",
        }
    }

    /// What to do about it, where nothing more is known. Truepin makes the partition anew by itself; this is for when that
    /// does not help, or it happens again.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Bare => {
                "take the CPUs out of cpuset.cpus of every cgroup beside it and bring its CPUs online; removing the overlap alone brings no partition back, it has to be made anew"
            }
            Self::BadList => {
                "list the CPUs in cpuset.cpus.exclusive of every cgroup above it, and nowhere beside it"
            }
            Self::ParentInvalid => "mend the partition above first: its own line has a reason",
            Self::ParentMember => "make the cgroup above a partition first, or use --isolation member",
            Self::NotExclusive => "take the CPUs out of cpuset.cpus of the cgroups beside it",
            Self::ParentStarves => {
                "leave the cgroup above a CPU for the tasks in it, move those tasks elsewhere, or ask for fewer CPUs"
            }
            Self::Hotplug => "bring its CPUs online",
            Self::NothingAsked => "write its lists again: cpuset.cpus, then cpuset.cpus.exclusive",
            Self::Housekeeping => {
                "leave out the CPUs of isolcpus=, or take --isolation isolated for them; leave a CPU that is outside nohz_full="
            }
            Self::NotPermitted => "run the agent as root, with CAP_SYS_ADMIN in the first user namespace",
            Self::RemoteBelow => "end the partition below first (member)",
            Self::Member => "find out who writes cpuset.cpus.partition there, and stop it",
            Self::NoFiles => {
                "write +cpuset into cgroup.subtree_control above it; under systemd keep a unit with AllowedCPUs= or Delegate=cpuset in every slice on the way"
            }
            Self::Unknown(_) => "look the words up in cpuset.c of this kernel, and report them",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.explain())?;
        if let Self::Unknown(said) = self { write!(f, ": {said}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_of_every_kernel() {
        // As `strings` finds them in the images of 6.1, 6.12 and 7.3.
        let of = |text: &str| InvalidReason::Said(text.into()).cause();
        for (cause, texts) in [
            (
                Cause::BadList,
                &["Invalid cpu list in cpuset.cpus", "Invalid cpu list in cpuset.cpus.exclusive"][..],
            ),
            (Cause::ParentInvalid, &["Parent is an invalid partition root"]),
            (Cause::ParentMember, &["Parent is not a partition root"]),
            (Cause::NotExclusive, &["Cpu list in cpuset.cpus not exclusive"]),
            (Cause::ParentStarves, &["Parent unable to distribute cpu downstream"]),
            (Cause::Hotplug, &["No cpu available due to hotplug"]),
            (
                Cause::NothingAsked,
                &["cpuset.cpus is empty", "cpuset.cpus and cpuset.cpus.exclusive are empty"],
            ),
            (Cause::Housekeeping, &["partition config conflicts with housekeeping setup"]),
            (Cause::NotPermitted, &["Enable partition not permitted"]),
            (Cause::RemoteBelow, &["Have remote partition underneath"]),
        ] {
            for text in texts {
                assert_eq!(of(text), cause, "{text}");
            }
        }
        assert_eq!(InvalidReason::Bare.cause(), Cause::Bare);
        let strange = of("Moon in the wrong house");
        assert_eq!(strange, Cause::Unknown("Moon in the wrong house".into()));
        assert!(strange.to_string().ends_with(": Moon in the wrong house"), "{strange}");
        // Part of a known reason is not that reason.
        assert!(matches!(of("Parent is not a partition"), Cause::Unknown(_)));
    }

    #[test]
    fn no_two_alike() {
        let all: Vec<Cause> = WORDS.iter().map(|(_, c)| c.clone()).collect();
        let others = [Cause::Bare, Cause::Member, Cause::NoFiles, Cause::Unknown(String::new())];
        let mut all: Vec<Cause> = all.into_iter().chain(others).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 14);
        let distinct = |text: fn(&Cause) -> &'static str| {
            all.iter().map(text).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!([distinct(Cause::name), distinct(Cause::explain), distinct(Cause::remedy)], [14; 3]);
    }
}
