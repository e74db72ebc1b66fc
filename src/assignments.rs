//! Who holds which CPUs.
//!
//! Problem: one table decides, and everything else (the shared pool, what is free, what the kernel should show)
//! follows from it; nothing derived is stored, so nothing can disagree.
//! Steps: `reserve` and `release` are idempotent and the only ways to change it.
//! Invariants: exclusive sets are disjoint (I1); the shared pool is never empty, keeps the reserved CPUs, or under
//! strict reservation none of them (I3).

use crate::{
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    checkpoint::Extra,
    cpuset::CpuSet,
    nodeset::{NodeId, NodeSet},
    owner::Owner,
    partition::PartitionKind,
    request::Isolation,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How an owner's exclusivity is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// A cpuset partition.
    Partition,
    /// Disjoint `cpuset.cpus`.
    Member,
    /// Nothing is written: declared and observed only.
    Audit,
}

impl Mode {
    /// The mode's name, as in every status and verdict.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Partition => "partition",
            Self::Member => "member",
            Self::Audit => "audit",
        }
    }
}

/// What one owner holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The exclusive set; never empty.
    pub cpus: CpuSet,
    /// The set it was admitted with, where that was resized or repacked since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<CpuSet>,
    /// The owner's cgroup.
    pub cgroup: CgroupPath,
    /// Whether truepin made the cgroup (and removes it).
    pub created: bool,
    /// How it is enforced.
    pub mode: Mode,
    /// What was asked for; `Auto` may fall back to member mode.
    pub isolation: Isolation,
    /// Changes whenever set, cgroup or mode do; starts a new epoch of evidence.
    pub generation: u64,
    /// Why this set, in words.
    pub reason: String,
    /// Memory that it asked for, bytes by NUMA node: its cgroup's memory comes from these nodes (since minor version 1).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory: BTreeMap<NodeId, u64>,
    /// Fields of newer minor versions of the record.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What `isolated` costs, in the words of every place that says it.
pub const STACKS: &str = "isolated: the kernel balances no load inside, so all threads of the workload stay on the CPU where they begin unless each pins itself; for one thread a CPU only";

impl Assignment {
    /// What `cpuset.cpus.partition` is to read.
    #[must_use]
    pub fn kind(&self) -> PartitionKind {
        match (self.mode, self.isolation) {
            (Mode::Partition, Isolation::Isolated) => PartitionKind::Isolated,
            (Mode::Partition, _) => PartitionKind::Root,
            (Mode::Member | Mode::Audit, _) => PartitionKind::Member,
        }
    }

    /// What its user should know, if anything. Of one CPU there is nothing to balance.
    #[must_use]
    pub fn warning(&self) -> Option<&'static str> {
        (self.kind() == PartitionKind::Isolated && self.cpus.len() > 1).then_some(STACKS)
    }

    /// What `cpuset.mems` is to hold; empty: it is left alone.
    #[must_use]
    pub fn mems(&self) -> NodeSet {
        self.memory.keys().copied().collect()
    }
}

/// CPUs that are an owner's before it has a cgroup, and again while its container is made anew: a pod's are decided when
/// it is admitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promise {
    /// The exclusive set; never empty.
    pub cpus: CpuSet,
    /// How it is to be enforced.
    pub mode: Mode,
    /// What was asked for.
    pub isolation: Isolation,
    /// As [`Assignment::generation`].
    pub generation: u64,
    /// Why this set, in words.
    pub reason: String,
    /// It had a cgroup before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub made: bool,
    /// As [`Assignment::memory`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory: BTreeMap<NodeId, u64>,
    /// As [`Assignment::original`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<CpuSet>,
    /// Fields of newer minor versions of the record.
    #[serde(flatten)]
    pub extra: Extra,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The table.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Assignments {
    /// CPUs that no owner gets.
    pub reserved: CpuSet,
    /// Whether the shared pool leaves the reserved CPUs out.
    pub strict_reserved: bool,
    /// The owners.
    pub owners: BTreeMap<Owner, Assignment>,
    /// Owners that have no cgroup (yet). None is in `owners` too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub promised: BTreeMap<Owner, Promise>,
    /// Fields of newer minor versions of the record.
    #[serde(flatten)]
    pub extra: Extra,
}

/// What `reserve` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserved {
    /// The owner was not there.
    New,
    /// The owner held exactly this already.
    Unchanged,
}

/// Why a reservation was refused. The table is as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// No CPUs.
    #[error("{owner}: an assignment needs at least one CPU")]
    Empty {
        /// The owner.
        owner: Owner,
    },
    /// The owner holds something else.
    #[error("{owner} already holds CPUs {held}; release it first")]
    Differs {
        /// The owner.
        owner: Owner,
        /// What it holds.
        held: CpuSet,
    },
    /// Another owner holds some of the CPUs.
    #[error("{owner}: CPUs {cpus} belong to {holder}")]
    Taken {
        /// The owner.
        owner: Owner,
        /// The contested CPUs.
        cpus: CpuSet,
        /// Who holds them.
        holder: Owner,
    },
    /// Some of the CPUs are reserved.
    #[error("{owner}: CPUs {cpus} are reserved")]
    Reserved {
        /// The owner.
        owner: Owner,
        /// The reserved ones.
        cpus: CpuSet,
    },
    /// Nothing would be left for everybody else.
    #[error("{owner}: taking CPUs {cpus} would leave the shared pool empty")]
    PoolEmpty {
        /// The owner.
        owner: Owner,
        /// What was asked for.
        cpus: CpuSet,
    },
    /// Another owner lives in the same cgroup, above or below it.
    #[error("{owner}: cgroup {cgroup} is, contains or lies inside the cgroup of {holder}")]
    SameCgroup {
        /// The owner.
        owner: Owner,
        /// Its cgroup.
        cgroup: CgroupPath,
        /// Who is there.
        holder: Owner,
    },
}

impl Assignments {
    /// CPUs held by owners, promised ones included.
    #[must_use]
    pub fn exclusive(&self) -> CpuSet {
        self.sets().fold(CpuSet::new(), |all, (_, cpus)| all.union(cpus))
    }

    /// Every owner's set.
    pub fn sets(&self) -> impl Iterator<Item = (&Owner, &CpuSet)> {
        let held = self.owners.iter().map(|(o, a)| (o, &a.cpus));
        held.chain(self.promised.iter().map(|(o, p)| (o, &p.cpus)))
    }

    /// The owner's set.
    #[must_use]
    pub fn cpus_of(&self, owner: &Owner) -> Option<&CpuSet> {
        let held = self.owners.get(owner).map(|a| &a.cpus);
        held.or_else(|| self.promised.get(owner).map(|p| &p.cpus))
    }

    /// What the owner was admitted with, where that is not what it has now.
    #[must_use]
    pub fn original_of(&self, owner: &Owner) -> Option<&CpuSet> {
        let held = self.owners.get(owner).and_then(|a| a.original.as_ref());
        held.or_else(|| self.promised.get(owner).and_then(|p| p.original.as_ref()))
    }

    /// What is left of `online` for everybody else.
    #[must_use]
    pub fn shared_pool(&self, online: &CpuSet) -> CpuSet {
        let pool = online.difference(&self.exclusive());
        if self.strict_reserved { pool.difference(&self.reserved) } else { pool }
    }

    /// What may be handed out of `online`, held or not.
    #[must_use]
    pub fn allocatable(&self, online: &CpuSet) -> CpuSet {
        online.difference(&self.reserved)
    }

    /// What may be handed out now.
    #[must_use]
    pub fn free(&self, online: &CpuSet) -> CpuSet {
        self.allocatable(online).difference(&self.exclusive())
    }

    /// The memory that the owner asked for.
    pub(crate) fn memory_of_mut(&mut self, owner: &Owner) -> Option<&mut BTreeMap<NodeId, u64>> {
        match self.owners.get_mut(owner) {
            Some(a) => Some(&mut a.memory),
            None => self.promised.get_mut(owner).map(|p| &mut p.memory),
        }
    }

    /// Memory that owners have asked for, bytes by node.
    #[must_use]
    pub fn claimed_memory(&self) -> BTreeMap<NodeId, u64> {
        let mut claimed = BTreeMap::new();
        let promised = self.promised.values().flat_map(|p| &p.memory);
        for (node, bytes) in self.owners.values().flat_map(|a| &a.memory).chain(promised) {
            let sum: &mut u64 = claimed.entry(*node).or_default();
            *sum = sum.saturating_add(*bytes);
        }
        claimed
    }

    /// The owner whose cgroup is `path`.
    #[must_use]
    pub fn owner_of(&self, path: &CgroupPath) -> Option<(&Owner, &Assignment)> {
        self.owners.iter().find(|(_, a)| a.cgroup == *path)
    }

    /// Takes the CPUs of `assignment` for `owner`. Repeating it changes nothing.
    pub fn reserve(
        &mut self,
        owner: &Owner,
        assignment: Assignment,
        online: &CpuSet,
    ) -> Result<Reserved, ReserveError> {
        let owner_named = || owner.clone();
        if assignment.cpus.is_empty() {
            return Err(ReserveError::Empty { owner: owner_named() });
        }
        if let Some(held) = self.owners.get(owner) {
            return if held.cpus == assignment.cpus && held.cgroup == assignment.cgroup {
                Ok(Reserved::Unchanged)
            } else {
                Err(ReserveError::Differs { owner: owner_named(), held: held.cpus.clone() })
            };
        }
        self.takes(owner, &assignment.cpus, online)?;
        for (holder, held) in &self.owners {
            if assignment.cgroup.is_within(&held.cgroup) || held.cgroup.is_within(&assignment.cgroup) {
                let cgroup = assignment.cgroup.clone();
                return Err(ReserveError::SameCgroup {
                    owner: owner_named(),
                    cgroup,
                    holder: holder.clone(),
                });
            }
        }
        self.promised.remove(owner);
        self.owners.insert(owner.clone(), assignment);
        Ok(Reserved::New)
    }

    /// Takes CPUs for an owner that has no cgroup yet. Repeating it changes nothing; one that has its cgroup keeps it.
    pub fn promise(
        &mut self,
        owner: &Owner,
        promise: Promise,
        online: &CpuSet,
    ) -> Result<Reserved, ReserveError> {
        if promise.cpus.is_empty() {
            return Err(ReserveError::Empty { owner: owner.clone() });
        }
        if let Some(held) = self.cpus_of(owner) {
            return if *held == promise.cpus {
                Ok(Reserved::Unchanged)
            } else {
                Err(ReserveError::Differs { owner: owner.clone(), held: held.clone() })
            };
        }
        self.takes(owner, &promise.cpus, online)?;
        self.promised.insert(owner.clone(), promise);
        Ok(Reserved::New)
    }

    /// Whether `owner` may take `cpus` beside what it has.
    fn takes(&self, owner: &Owner, cpus: &CpuSet, online: &CpuSet) -> Result<(), ReserveError> {
        let owner_named = || owner.clone();
        let reserved = cpus.intersection(&self.reserved);
        if !reserved.is_empty() {
            return Err(ReserveError::Reserved { owner: owner_named(), cpus: reserved });
        }
        for (holder, held) in self.sets().filter(|(o, _)| *o != owner) {
            let both = cpus.intersection(held);
            if !both.is_empty() {
                return Err(ReserveError::Taken { owner: owner_named(), cpus: both, holder: holder.clone() });
            }
        }
        if self.shared_pool(online).is_subset(cpus) {
            return Err(ReserveError::PoolEmpty { owner: owner_named(), cpus: cpus.clone() });
        }
        Ok(())
    }

    /// The owner's container has a cgroup now, or another one than before. False if the owner has no CPUs, or lives
    /// there already.
    pub fn house(
        &mut self,
        owner: &Owner,
        cgroup: &CgroupPath,
        generation: u64,
    ) -> Result<bool, ReserveError> {
        let holder = self
            .owners
            .iter()
            .find(|(o, a)| *o != owner && (a.cgroup.is_within(cgroup) || cgroup.is_within(&a.cgroup)));
        if let Some((holder, _)) = holder {
            let (owner, cgroup, holder) = (owner.clone(), cgroup.clone(), holder.clone());
            return Err(ReserveError::SameCgroup { owner, cgroup, holder });
        }
        if let Some(a) = self.owners.get_mut(owner) {
            if a.cgroup == *cgroup {
                return Ok(false);
            }
            (a.cgroup, a.generation, a.created) = (cgroup.clone(), generation, false);
            return Ok(true);
        }
        let Some(p) = self.promised.remove(owner) else { return Ok(false) };
        let assignment = Assignment {
            cpus: p.cpus,
            cgroup: cgroup.clone(),
            created: false,
            mode: p.mode,
            isolation: p.isolation,
            generation,
            reason: p.reason,
            memory: p.memory,
            original: p.original,
            extra: p.extra,
        };
        self.owners.insert(owner.clone(), assignment);
        Ok(true)
    }

    /// The owner's cgroup is gone and the owner is not: its CPUs stay promised.
    pub fn unhouse(&mut self, owner: &Owner, generation: u64) -> bool {
        let Some(a) = self.owners.remove(owner) else { return false };
        let promise = Promise {
            cpus: a.cpus,
            mode: a.mode,
            isolation: a.isolation,
            generation,
            reason: a.reason,
            made: true,
            memory: a.memory,
            original: a.original,
            extra: a.extra,
        };
        self.promised.insert(owner.clone(), promise);
        true
    }

    /// Gives the owner's CPUs back; `None` if it held none in a cgroup (also the second time).
    pub fn release(&mut self, owner: &Owner) -> Option<Assignment> {
        self.promised.remove(owner);
        self.owners.remove(owner)
    }
}

/// What a file of somebody else's cgroup held before truepin first wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FirstValue {
    /// The cgroup's id then: a recreated cgroup starts from nothing.
    pub id: CgroupId,
    /// The text of each file.
    pub files: BTreeMap<CpusetFile, String>,
    /// Owners on whose CPUs its tasks were met, so that it is kept off them (since minor version 3).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub fenced_for: BTreeSet<Owner>,
    /// Fields of newer minor versions of the record.
    #[serde(flatten)]
    pub extra: Extra,
}

/// First values by cgroup, put back when no owner needs the change any more.
pub type FirstValues = BTreeMap<CgroupPath, FirstValue>;

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn owner(name: &str) -> Owner {
        format!("run/{name}").parse().unwrap()
    }

    fn held(cpus: &str, cgroup: &str) -> Assignment {
        Assignment {
            cpus: set(cpus),
            cgroup: cgroup.parse().unwrap(),
            created: true,
            mode: Mode::Partition,
            isolation: Isolation::Auto,
            generation: 1,
            reason: String::new(),
            memory: BTreeMap::new(),
            original: None,
            extra: Extra::new(),
        }
    }

    fn table() -> Assignments {
        let mut t = Assignments { reserved: set("0-1"), ..Default::default() };
        assert_eq!(t.reserve(&owner("a"), held("2-3", "s/a"), &set("0-7")), Ok(Reserved::New));
        t
    }

    #[test]
    fn pools_follow_from_the_table() {
        let mut t = table();
        let online = set("0-7");
        assert_eq!(t.shared_pool(&online), set("0-1,4-7"));
        assert_eq!((t.free(&online), t.allocatable(&online)), (set("4-7"), set("2-7")));
        t.strict_reserved = true;
        assert_eq!(t.shared_pool(&online), set("4-7"));
    }

    #[test]
    fn repeating_changes_nothing() {
        let mut t = table();
        let before = t.clone();
        assert_eq!(t.reserve(&owner("a"), held("2-3", "s/a"), &set("0-7")), Ok(Reserved::Unchanged));
        assert_eq!(t, before);
        assert!(t.release(&owner("a")).is_some());
        assert!(t.release(&owner("a")).is_none());
        assert!(t.exclusive().is_empty());
    }

    #[test]
    fn refusals_leave_the_table_as_it_was() {
        let online = set("0-7");
        for (name, a, strict, needle) in [
            ("b", held("3-4", "s/b"), false, "belong to run/a"),
            ("b", held("1,4", "s/b"), false, "are reserved"),
            ("b", held("", "s/b"), false, "at least one CPU"),
            ("b", held("4-7", "s/b"), true, "shared pool empty"),
            ("b", held("4", "s/a/x"), false, "lies inside the cgroup of run/a"),
            ("b", held("4", "s"), false, "lies inside the cgroup of run/a"),
            ("a", held("4", "s/a"), false, "already holds CPUs 2-3"),
        ] {
            let mut t = table();
            t.strict_reserved = strict;
            let before = t.clone();
            let error = t.reserve(&owner(name), a, &online).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
            assert_eq!(t, before);
        }
    }

    fn promise(cpus: &str) -> Promise {
        Promise {
            cpus: set(cpus),
            mode: Mode::Partition,
            isolation: Isolation::Auto,
            generation: 1,
            reason: String::new(),
            made: false,
            memory: BTreeMap::new(),
            original: None,
            extra: Extra::new(),
        }
    }

    #[test]
    fn promised_housed_and_back() {
        let online = set("0-7");
        let mut t = table();
        let b = owner("b");
        assert!(t.promise(&b, promise("3-4"), &online).unwrap_err().to_string().contains("belong to run/a"));
        assert!(
            t.promise(&b, promise(""), &online).is_err() && t.promise(&b, promise("1"), &online).is_err()
        );
        assert_eq!(t.promise(&b, promise("4-5"), &online), Ok(Reserved::New));
        assert_eq!(t.promise(&b, promise("4-5"), &online), Ok(Reserved::Unchanged));
        assert!(matches!(t.promise(&b, promise("4"), &online), Err(ReserveError::Differs { .. })));
        assert_eq!((t.exclusive(), t.free(&online)), (set("2-5"), set("6-7")));
        assert!(matches!(t.reserve(&owner("c"), held("5", "s/c"), &online), Err(ReserveError::Taken { .. })));
        assert!(t.house(&b, &"s/a/x".parse().unwrap(), 2).is_err());
        let (home, other) = ("k/b".parse().unwrap(), "k/b2".parse().unwrap());
        assert_eq!(
            [t.house(&b, &home, 2), t.house(&b, &home, 3), t.house(&b, &other, 4)],
            [Ok(true), Ok(false), Ok(true)]
        );
        assert_eq!((&t.owners[&b].cgroup, t.owners[&b].generation), (&other, 4));
        assert!(t.promised.is_empty() && t.exclusive() == set("2-5"));
        assert!(t.unhouse(&b, 5) && !t.unhouse(&b, 6) && t.promised[&b].made);
        assert_eq!(t.promise(&b, promise("4-5"), &online), Ok(Reserved::Unchanged));
        assert_eq!(t.release(&b), None);
        assert_eq!((t.exclusive(), t.house(&b, &home, 7)), (set("2-3"), Ok(false)));
    }

    #[test]
    fn the_pool_keeps_the_reserved_cpus() {
        let mut t = table();
        assert_eq!(t.reserve(&owner("b"), held("4-7", "s/b"), &set("0-7")), Ok(Reserved::New));
        assert_eq!(t.shared_pool(&set("0-7")), set("0-1"));
    }
}
