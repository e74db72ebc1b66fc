//! Why a cgroup is not the partition that it should be, and who made it so.
//!
//! Problem: the kernel says little (up to 6.18 an overlap gives no reason at all), and never whose file it is. An operator
//! needs the cgroup, the file and the CPUs, and what to do.
//! Steps: the kernel's words are classified ([`Cause`]); then the reading of the tree is searched for what can have that
//! cause. What is there no more cannot be found: then only the cause is told, and that it does not heal by itself.
//! Nothing is decided by any of this: a partition that is not one is made anew, whatever the reason.

#[cfg(test)]
mod tests;

use crate::{
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    observed::{CpusetObserved, Observed},
    partition::{Cause, PartitionKind, PartitionState},
};
use std::fmt;

/// What is seen to be the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Culprit {
    /// A cgroup beside it lists the CPUs.
    Lists {
        /// Which.
        path: CgroupPath,
        /// `cpuset.cpus` or `cpuset.cpus.exclusive`
        file: CpusetFile,
        /// Those that both list.
        cpus: CpuSet,
    },
    /// A partition beside it has the CPUs.
    Holds {
        /// Which.
        path: CgroupPath,
        /// Those that both want.
        cpus: CpuSet,
    },
    /// A cgroup above it does not list the CPUs.
    Lacks {
        /// Which.
        path: CgroupPath,
        /// `cpuset.cpus.exclusive`; where there is none, `cpuset.cpus`.
        file: CpusetFile,
        /// Those that are missing.
        cpus: CpuSet,
    },
    /// A cgroup above it stands as it must not.
    Above {
        /// Which.
        path: CgroupPath,
        /// `cpuset.cpus.partition`
        state: PartitionState,
    },
    /// A cgroup above it does not enable the controller for its children.
    Withdrawn {
        /// Which.
        path: CgroupPath,
    },
    /// One of its own lists lacks the CPUs.
    Own {
        /// Which.
        file: CpusetFile,
        /// What it holds.
        lists: CpuSet,
    },
    /// None of its CPUs is online.
    Offline {
        /// Its CPUs.
        cpus: CpuSet,
    },
    /// A partition below it.
    Below {
        /// Which.
        path: CgroupPath,
    },
}

/// Why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Explanation {
    /// As the kernel has it.
    pub cause: Cause,
    /// What is seen to have caused it, nearest to the root first; none where nothing shows any more.
    pub culprits: Vec<Culprit>,
}

impl Culprit {
    /// The cgroup whose files it is about; `None` for the partition's own.
    #[must_use]
    pub fn path(&self) -> Option<&CgroupPath> {
        match self {
            Self::Lists { path, .. }
            | Self::Holds { path, .. }
            | Self::Lacks { path, .. }
            | Self::Above { path, .. }
            | Self::Withdrawn { path }
            | Self::Below { path } => Some(path),
            Self::Own { .. } | Self::Offline { .. } => None,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::Lists { path, file, cpus } => format!("take CPUs {cpus} out of {file} of {path}"),
            Self::Holds { path, cpus } => {
                format!(
                    "write member into {} of {path}, or give it other CPUs than {cpus}",
                    CpusetFile::Partition
                )
            }
            Self::Lacks { path, file, cpus } => format!("add CPUs {cpus} to {file} of {path} again"),
            Self::Above { path, state } if state.is_partition() => {
                format!("write member into {} of {path}", CpusetFile::Partition)
            }
            Self::Above { path, .. } => format!("make {path} a partition again"),
            Self::Withdrawn { path } => {
                let path = if path.is_root() { "the root cgroup".into() } else { path.to_string() };
                format!(
                    "write +cpuset into cgroup.subtree_control of {path}; under systemd keep a unit with AllowedCPUs= or Delegate=cpuset there"
                )
            }
            Self::Own { file, .. } => format!("write its {file} again"),
            Self::Offline { cpus } => format!("bring CPUs {cpus} online"),
            Self::Below { path } => format!("write member into {} of {path}", CpusetFile::Partition),
        }
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lists { path, file, cpus } => write!(f, "cgroup {path} lists CPUs {cpus} in {file}"),
            Self::Holds { path, cpus } => write!(f, "cgroup {path} is a partition that has CPUs {cpus}"),
            Self::Lacks { path, file, cpus } => {
                write!(f, "cgroup {path} above it does not list CPUs {cpus} in {file}")
            }
            Self::Above { path, state } => write!(f, "cgroup {path} above it reads {:?}", state.to_string()),
            Self::Withdrawn { path } => {
                write!(f, "cgroup {path} above it does not enable cpuset in cgroup.subtree_control")
            }
            Self::Own { file, lists } if lists.is_empty() => write!(f, "its own {file} is empty"),
            Self::Own { file, lists } => write!(f, "its own {file} lists CPUs {lists}"),
            Self::Offline { cpus } => write!(f, "all of its CPUs ({cpus}) are offline"),
            Self::Below { path } => write!(f, "cgroup {path} below it is a partition"),
        }
    }
}

impl Explanation {
    /// What to do. Truepin makes the partition anew by itself; this is for when that does not help, or it happens again.
    #[must_use]
    pub fn remedy(&self) -> String {
        let named: Vec<String> = self.culprits.iter().map(Culprit::remedy).collect();
        if named.is_empty() { self.cause.remedy().into() } else { named.join("; ") }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)?;
        for (n, culprit) in self.culprits.iter().enumerate() {
            write!(f, "{}{culprit}", if n == 0 { ": " } else { ", and " })?;
        }
        Ok(())
    }
}

/// Why `path`, which is to be a partition of `cpus`, is none. `None` when it is one, or was not read. One that reads valid
/// below a cgroup that is no partition is none either, where that is what it has its CPUs from (6.1). `observed` must have
/// been read with the cgroups above `path` and their children.
#[must_use]
pub fn explain(observed: &Observed, path: &CgroupPath, cpus: &CpuSet) -> Option<Explanation> {
    let cgroup = observed.cgroups.get(path)?;
    let Some(files) = &cgroup.cpuset else {
        let withdrawn = path.ancestors().into_iter().find(|up| {
            // The topmost one: what is below it has no files to enable anything with.
            observed.cgroups.get(up).is_some_and(|c| !c.enables_cpuset)
        });
        let culprits = withdrawn.map(|path| Culprit::Withdrawn { path }).into_iter().collect();
        return Some(Explanation { cause: Cause::NoFiles, culprits });
    };
    let Some(cause) = files.partition.as_ref()?.cause() else {
        return stands_on_nothing(observed, path, files);
    };
    let search = Search { observed, path, cpus, files };
    let culprits = match &cause {
        Cause::Bare => search.first(&[Search::beside, Search::offline, Search::above]),
        Cause::BadList => search.first(&[Search::own, Search::above, Search::beside, Search::offline]),
        // Said of one that has its CPUs from the root, too, when a list that it needs for that is gone.
        Cause::ParentMember | Cause::ParentInvalid if files.exclusive.is_some() => {
            search.first(&[Search::own, Search::above, Search::partition_above])
        }
        Cause::ParentInvalid | Cause::ParentMember => search.partition_above(),
        Cause::NotExclusive => search.first(&[Search::beside, Search::own]),
        // 7.2 says so of an overlap as well.
        Cause::ParentStarves => search.first(&[Search::beside, Search::above]),
        Cause::Hotplug => search.offline(),
        Cause::NothingAsked => search.own(),
        Cause::RemoteBelow => search.below(),
        // A list above that shrinks ends a remote partition as a member (6.12 before 6.12.110).
        Cause::Member => search.above(),
        Cause::Housekeeping | Cause::NotPermitted | Cause::NoFiles => Vec::new(),
        Cause::Unknown(_) => search.first(&[Search::beside, Search::above, Search::own, Search::offline]),
    };
    Some(Explanation { cause, culprits })
}

/// Why a partition that reads valid is none.
fn stands_on_nothing(observed: &Observed, path: &CgroupPath, files: &CpusetObserved) -> Option<Explanation> {
    let above = path.parent().filter(|up| !up.is_root() && files.exclusive.is_none())?;
    let cause = match observed.cpuset(&above)?.partition.as_ref()?.cause()? {
        Cause::Member => Cause::ParentMember,
        _ => Cause::ParentInvalid,
    };
    let culprits = Search { observed, path, cpus: &files.cpus, files }.partition_above();
    Some(Explanation { cause, culprits })
}

struct Search<'a> {
    observed: &'a Observed,
    path: &'a CgroupPath,
    cpus: &'a CpuSet,
    files: &'a CpusetObserved,
}

impl Search<'_> {
    /// What the first of these searches finds that finds anything.
    fn first(&self, searches: &[fn(&Self) -> Vec<Culprit>]) -> Vec<Culprit> {
        searches.iter().map(|s| s(self)).find(|found| !found.is_empty()).unwrap_or_default()
    }

    /// Cgroups beside it that want the same CPUs.
    fn beside(&self) -> Vec<Culprit> {
        let Some(up) = self.path.parent() else { return Vec::new() };
        let mut found = Vec::new();
        for (path, cgroup) in self.observed.children(&up).filter(|(p, _)| *p != self.path) {
            let Some(files) = &cgroup.cpuset else { continue };
            let both = |set: &CpuSet| Some(set.intersection(self.cpus)).filter(|b| !b.is_empty());
            let path = || path.clone();
            if files.is_partition() {
                let has = files.exclusive_effective.as_ref().unwrap_or(&files.cpus);
                found.extend(both(has).map(|cpus| Culprit::Holds { path: path(), cpus }));
                continue;
            }
            for (file, set) in
                [(CpusetFile::Cpus, Some(&files.cpus)), (CpusetFile::Exclusive, files.exclusive.as_ref())]
            {
                found.extend(set.and_then(both).map(|cpus| Culprit::Lists { path: path(), file, cpus }));
            }
        }
        found
    }

    /// Cgroups above it, the root aside, that keep the CPUs from it.
    fn above(&self) -> Vec<Culprit> {
        let mut found = Vec::new();
        for path in self.path.ancestors().into_iter().filter(|p| !p.is_root()) {
            let Some(files) = self.observed.cpuset(&path) else { continue };
            // A partition on the way stands against one that takes its CPUs from the root.
            let state = files.partition.as_ref().filter(|s| s.kind != PartitionKind::Member);
            if let Some(state) = state.filter(|_| self.files.exclusive.is_some()) {
                found.push(Culprit::Above { path: path.clone(), state: state.clone() });
            }
            // Without explicit lists the one above hands down what is in its own, and is a partition for that.
            let (file, list) = match &files.exclusive {
                Some(list) => (CpusetFile::Exclusive, list),
                None => (CpusetFile::Cpus, &files.cpus),
            };
            let lacks = self.cpus.difference(list);
            if !lacks.is_empty() && state.is_none() == files.exclusive.is_some() {
                found.push(Culprit::Lacks { path, file, cpus: lacks });
            }
        }
        found
    }

    /// The cgroup above that is to hand CPUs down and does not, with what keeps it from that.
    fn partition_above(&self) -> Vec<Culprit> {
        for path in self.path.ancestors().into_iter().rev().filter(|p| !p.is_root()) {
            let Some(files) = self.observed.cpuset(&path) else { continue };
            let Some(state) = files.partition.clone().filter(|s| !s.is_partition()) else { continue };
            // What it should list is what those below it do: its own list may be what is wrong.
            let below = self.observed.children(&path).filter_map(|(_, c)| c.cpuset.as_ref());
            let below = below.fold(CpuSet::new(), |all, f| all.union(&f.cpus));
            let wanted = below.intersection(&files.cpus);
            let mut why = match state.kind {
                PartitionKind::Member => Vec::new(),
                _ => explain(self.observed, &path, &wanted).map_or(Vec::new(), |e| e.culprits),
            };
            let cpus = below.difference(&files.cpus);
            if why.is_empty() && !cpus.is_empty() && self.files.exclusive.is_none() {
                why.push(Culprit::Lacks { path: path.clone(), file: CpusetFile::Cpus, cpus });
            }
            return [Culprit::Above { path, state }].into_iter().chain(why).collect();
        }
        Vec::new()
    }

    /// Its own lists that lack the CPUs: the explicit one decides, and the other where that is empty.
    fn own(&self) -> Vec<Culprit> {
        let lacks = |set: &CpuSet| !self.cpus.is_subset(set);
        let own = |file, lists: &CpuSet| Culprit::Own { file, lists: lists.clone() };
        let explicit = self.files.exclusive.as_ref();
        let mut found = Vec::new();
        if explicit.is_none_or(CpuSet::is_empty) && lacks(&self.files.cpus) {
            found.push(own(CpusetFile::Cpus, &self.files.cpus));
        }
        found.extend(explicit.filter(|e| lacks(e)).map(|e| own(CpusetFile::Exclusive, e)));
        found
    }

    fn offline(&self) -> Vec<Culprit> {
        let all = self.cpus.is_disjoint(&self.observed.online);
        all.then(|| Culprit::Offline { cpus: self.cpus.clone() }).into_iter().collect()
    }

    fn below(&self) -> Vec<Culprit> {
        let inside = self.observed.cgroups.iter().filter(|(p, _)| *p != self.path && p.is_within(self.path));
        let partitions = inside.filter(|(_, c)| c.cpuset.as_ref().is_some_and(CpusetObserved::is_partition));
        partitions.map(|(path, _)| Culprit::Below { path: path.clone() }).collect()
    }
}
