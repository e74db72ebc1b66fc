//! Assignments on a machine that has changed.
//!
//! Problem: between two runs CPUs go (offline, SMT switched off, taken out) and others become reserved. Refusing to start,
//! or dropping what does not fit, would punish owners that have nothing to do with it.
//! Steps: an owner whose CPUs are all there keeps them. The others keep what is left of theirs, and get as many others as
//! they lost, near what they kept: the fewest moves that are possible, because only what is lost is replaced. What cannot
//! be replaced stays missing and is said. The first set is remembered ([`Assignment::original`]).
//! Invariants: nobody is dropped, and nobody's set becomes empty: one of which nothing is left and nothing can be had
//! keeps its set and is a problem of the plan; sets stay disjoint and the shared pool is never emptied.
//!
//! [`Assignment::original`]: crate::assignments::Assignment::original

use crate::{
    assignments::Assignments,
    cpuset::CpuSet,
    nodeset::NodeSet,
    owner::Owner,
    placement,
    request::{AlignmentPolicy, Isolation, Request},
    topology::CpuTopology,
};
use std::{collections::BTreeMap, fmt};

/// What became of one owner's set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refit {
    /// Whose.
    pub owner: Owner,
    /// Before.
    pub from: CpuSet,
    /// After; the same when nothing could be done.
    pub to: CpuSet,
    /// CPUs that are not there, or reserved now.
    pub lost: CpuSet,
    /// How many of them could not be replaced.
    pub missing: usize,
    /// Where its memory comes from now, if that is not where it came from; empty: from anywhere, because no nodes had room.
    pub memory: Option<NodeSet>,
}

impl fmt::Display for Refit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, from, to, lost, missing, memory } = self;
        write!(f, "{owner}: ")?;
        if from != to {
            write!(f, "CPUs {lost} are gone or reserved now; it has {to} instead of {from}")?;
            if *missing > 0 {
                write!(f, ", {missing} could not be replaced")?;
            }
        } else if !lost.is_empty() {
            write!(f, "CPUs {lost} are gone or reserved now, and nothing is free to replace them")?;
        }
        let and = if from != to || !lost.is_empty() { "; " } else { "" };
        match memory {
            Some(nodes) if nodes.is_empty() => {
                write!(f, "{and}its memory comes from any node now: none near it has room")
            }
            Some(nodes) => write!(f, "{and}its memory comes from nodes {nodes} now"),
            None => Ok(()),
        }
    }
}

/// Fits the sets of `table` to the CPUs that are `online` and not reserved. Replacements are never among the `foreign`
/// CPUs, which are in other managers' partitions. `generation` gives a new number.
pub fn refit(
    table: &mut Assignments,
    topology: &CpuTopology,
    online: &CpuSet,
    foreign: &CpuSet,
    mut generation: impl FnMut() -> u64,
) -> Vec<Refit> {
    let nothing = CpuSet::new();
    let isolated = topology.isolated().unwrap_or(&nothing);
    let allocatable = table.allocatable(online);
    let broken: Vec<(Owner, CpuSet)> = table
        .sets()
        .filter(|(_, s)| !s.is_subset(&allocatable))
        .map(|(o, s)| (o.clone(), s.clone()))
        .collect();
    let mut done = Vec::new();
    for (owner, from) in broken {
        let kept = from.intersection(&allocatable);
        let lost = from.difference(&allocatable);
        let free = table.free(online).difference(isolated).difference(foreign);
        let placed =
            most(topology, &allocatable.difference(isolated), &free, &owner, &kept, lost.len(), |set| {
                !table.shared_pool(online).difference(foreign).difference(set).is_empty()
            });
        let to = kept.union(&placed);
        let missing = lost.len() - placed.len();
        let to = if to.is_empty() { from.clone() } else { to };
        if to != from {
            let generation = generation();
            if let Some(a) = table.owners.get_mut(&owner) {
                a.original.get_or_insert_with(|| from.clone());
                (a.cpus, a.generation) = (to.clone(), generation);
            } else if let Some(p) = table.promised.get_mut(&owner) {
                p.original.get_or_insert_with(|| from.clone());
                (p.cpus, p.generation) = (to.clone(), generation);
            }
        }
        done.push(Refit { owner, from, to, lost, missing, memory: None });
    }
    memory(table, topology, &mut done);
    done
}

/// Memory follows CPUs that were moved, and leaves nodes that are gone.
fn memory(table: &mut Assignments, topology: &CpuTopology, done: &mut Vec<Refit>) {
    let with: Vec<(Owner, CpuSet)> = table.sets().map(|(o, s)| (o.clone(), s.clone())).collect();
    for (owner, cpus) in with {
        let moved = done.iter().any(|r| r.owner == owner && r.from != r.to);
        let Some(held) = table.memory_of_mut(&owner).filter(|m| !m.is_empty()) else { continue };
        if !moved && held.keys().all(|n| topology.node(*n).is_some()) {
            continue;
        }
        let before = std::mem::take(held);
        let bytes = before.values().fold(0_u64, |sum, b| sum.saturating_add(*b));
        let near = topology.nodes_of(&cpus);
        let now = placement::split_memory(topology, &table.claimed_memory(), bytes, &near, &cpus);
        let now = if now.values().sum::<u64>() == bytes { now } else { BTreeMap::new() };
        if now.keys().eq(before.keys()) {
            if let Some(held) = table.memory_of_mut(&owner) {
                *held = now;
            }
            continue;
        }
        let nodes: NodeSet = now.keys().copied().collect();
        if let Some(held) = table.memory_of_mut(&owner) {
            *held = now;
        }
        match done.iter_mut().find(|r| r.owner == owner) {
            Some(r) => r.memory = Some(nodes),
            None => done.push(Refit {
                owner,
                from: cpus.clone(),
                to: cpus,
                lost: CpuSet::new(),
                missing: 0,
                memory: Some(nodes),
            }),
        }
    }
}

/// As many CPUs as can be had, up to `wanted`, near `kept`.
fn most(
    topology: &CpuTopology,
    allocatable: &CpuSet,
    free: &CpuSet,
    owner: &Owner,
    kept: &CpuSet,
    wanted: usize,
    allowed: impl Fn(&CpuSet) -> bool,
) -> CpuSet {
    for cpus in (1..=wanted.min(free.len())).rev() {
        let Ok(count) = u32::try_from(cpus) else { continue };
        let request = Request {
            owner: owner.clone(),
            cpus: count,
            numa: AlignmentPolicy::BestEffort,
            whole_cores: false,
            near: topology.nodes_of(kept),
            isolation: Isolation::Auto,
            memory: 0,
        };
        if let Ok(placed) = placement::place(topology, allocatable, free, &request)
            && allowed(&placed.cpus)
        {
            return placed.cpus;
        }
    }
    CpuSet::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        assignments::{Assignment, Mode},
        checkpoint::Extra,
        topology::synthetic::{Numbering, Regular},
    };

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    /// Two nodes of four CPUs in two cores each.
    fn machine(online: &str) -> CpuTopology {
        let mut raw = Regular {
            packages: 2,
            nodes: 1,
            l3: 1,
            cores: 2,
            threads: 2,
            numbering: Numbering::ThreadsAdjacent,
        }
        .raw();
        raw.online = Some(set(online));
        CpuTopology::assemble(&raw).unwrap()
    }

    fn table(sets: &[(&str, &str)], reserved: &str) -> Assignments {
        let owners = sets.iter().map(|(name, cpus)| {
            let a = Assignment {
                cpus: set(cpus),
                original: None,
                cgroup: format!("s/{name}").parse().unwrap(),
                created: false,
                mode: Mode::Partition,
                isolation: Isolation::Auto,
                generation: 1,
                reason: String::new(),
                memory: std::collections::BTreeMap::new(),
                extra: Extra::new(),
            };
            (format!("run/{name}").parse().unwrap(), a)
        });
        Assignments { reserved: set(reserved), owners: owners.collect(), ..Assignments::default() }
    }

    /// After the change: the sets, and "owner from to missing".
    fn after(sets: &[(&str, &str)], reserved: &str, online: &str) -> (Vec<String>, Vec<String>) {
        let mut t = table(sets, reserved);
        let mut n = 1;
        let done = refit(&mut t, &machine(online), &set(online), &CpuSet::new(), || {
            n += 1;
            n
        });
        let sets = t.sets().map(|(o, s)| format!("{o} {s}")).collect();
        (sets, done.iter().map(|r| format!("{} {} {} {}", r.owner, r.from, r.to, r.missing)).collect())
    }

    #[test]
    fn what_stands_is_kept_and_only_what_is_lost_is_replaced() {
        let two = [("a", "2-3"), ("b", "4-5")];
        assert_eq!(after(&two, "0", "0-7"), (vec!["run/a 2-3".into(), "run/b 4-5".into()], vec![]));
        // One CPU is gone: its neighbour in the node takes its place.
        let (sets, told) = after(&two, "0", "0-4,6-7");
        assert_eq!(sets, ["run/a 2-3", "run/b 4,6"]);
        assert_eq!(told, ["run/b 4-5 4,6 0"]);
        // SMT off: every second thread.
        let (sets, _) = after(&[("a", "2-3"), ("b", "4-5")], "0", "0,2,4,6");
        assert_eq!(sets, ["run/a 2,6", "run/b 4"], "one is left for the pool");
        // Reserved now.
        let (sets, told) = after(&two, "0-2", "0-7");
        assert_eq!(
            (sets, told),
            (vec!["run/a 3,6".into(), "run/b 4-5".into()], vec!["run/a 2-3 3,6 0".into()])
        );
        // Nothing left and nothing to be had: the set stays, and the plan has a problem.
        let (sets, told) = after(&[("a", "6-7"), ("b", "2-5")], "0-1", "0-5");
        assert_eq!(
            (sets, told),
            (vec!["run/a 6-7".into(), "run/b 2-5".into()], vec!["run/a 6-7 6-7 2".into()])
        );
    }

    #[test]
    fn the_first_set_is_remembered_over_several_changes() {
        let mut t = table(&[("a", "2-3")], "0");
        let owner: Owner = "run/a".parse().unwrap();
        for (online, now) in [("0-2,4-7", "2,4"), ("0-1,4-7", "1,4")] {
            refit(&mut t, &machine(online), &set(online), &CpuSet::new(), || 9);
            let a = &t.owners[&owner];
            assert_eq!((a.original.as_ref(), a.generation), (Some(&set("2-3")), 9));
            assert_eq!(a.cpus.len(), 2, "{} after {online}, e.g. {now}", a.cpus);
            assert!(a.cpus.is_subset(&set(online)));
        }
    }

    #[test]
    fn memory_follows_the_cpus() {
        let owner: Owner = "run/a".parse().unwrap();
        let node = |n: u32| crate::nodeset::NodeId(n);
        // The node's CPUs but one are reserved by now; the other has 8 GiB, of which somebody has 4.
        let mut t = table(&[("a", "2-3"), ("b", "4")], "0");
        t.owners.get_mut(&owner).unwrap().memory = [(node(0), 3 << 30)].into();
        t.owners.get_mut(&"run/b".parse().unwrap()).unwrap().memory = [(node(1), 4 << 30)].into();
        t.reserved = set("0-3");
        let done = refit(&mut t, &machine("0-7"), &set("0-7"), &CpuSet::new(), || 2);
        assert_eq!(t.owners[&owner].mems().to_string(), "1", "{done:?}");
        assert!(done[0].to_string().ends_with("; its memory comes from nodes 1 now"), "{}", done[0]);
        // More than it has: from anywhere, and that is said.
        t.owners.get_mut(&owner).unwrap().memory = [(node(7), 15 << 30)].into();
        let done = refit(&mut t, &machine("0-7"), &set("0-7"), &CpuSet::new(), || 2);
        assert_eq!((t.owners[&owner].mems().len(), done.len()), (0, 1), "{done:?}");
        assert!(done[0].to_string().contains("from any node now"), "{}", done[0]);
        assert!(refit(&mut t, &machine("0-7"), &set("0-7"), &CpuSet::new(), || 2).is_empty());
    }

    #[test]
    fn replacements_are_nobody_elses_and_balanced() {
        let mut raw = Regular {
            packages: 2,
            nodes: 1,
            l3: 1,
            cores: 2,
            threads: 2,
            numbering: Numbering::ThreadsAdjacent,
        }
        .raw();
        raw.online = Some(set("0-2,4-7"));
        raw.isolated = Some(set("4"));
        let topology = CpuTopology::assemble(&raw).unwrap();
        let mut t = table(&[("a", "2-3")], "0");
        let done = refit(&mut t, &topology, &set("0-2,4-7"), &set("1,5"), || 2);
        let to = done[0].to.clone();
        assert!(to == set("2,6") || to == set("2,7"), "1 and 5 are a partition's, 4 is isolated: {to}");
        // With nothing else left.
        raw.isolated = Some(set("4-7"));
        let topology = CpuTopology::assemble(&raw).unwrap();
        let mut t = table(&[("a", "2-3")], "0");
        let done = refit(&mut t, &topology, &set("0-2,4-7"), &set("1"), || 2);
        assert_eq!((done[0].to.clone(), done[0].missing), (set("2"), 1));
    }

    /// Every machine state over eight CPUs and three owners: disjoint, never empty, never fewer than possible.
    #[test]
    fn every_subset_of_online_cpus() {
        let sets = [("a", "1-2"), ("b", "3"), ("c", "4-6")];
        let mut cases = 0;
        for mask in 1u32..256 {
            let online: CpuSet = (0..8).filter(|n| mask & (1 << n) != 0).map(crate::cpuset::CpuId).collect();
            let Ok(topology) = std::panic::catch_unwind(|| machine(&online.to_string())) else { continue };
            let mut t = table(&sets, "0");
            let before = t.clone();
            let done = refit(&mut t, &topology, &online, &CpuSet::new(), || 2);
            cases += 1;
            let mut all = CpuSet::new();
            for (owner, cpus) in t.sets() {
                assert!(!cpus.is_empty() && cpus.is_disjoint(&all), "{online}: {owner} {cpus}");
                all |= cpus;
                let was = before.cpus_of(owner).unwrap();
                let r = done.iter().find(|r| r.owner == *owner);
                match r {
                    None => assert_eq!(cpus, was, "{online}: what stands is kept"),
                    Some(r) => {
                        assert!(
                            was.intersection(&online).is_subset(cpus),
                            "{online}: {owner} lost what it had"
                        );
                        assert!(r.to.len() <= was.len());
                    }
                }
            }
        }
        assert!(cases > 200, "{cases}");
    }
}
