//! Assignments on a machine that has changed.
//!
//! Problem: CPUs go (offline, SMT switched off, taken out) and others become reserved, between two runs or while truepin
//! runs. Refusing to go on, or dropping what does not fit, would punish owners that have nothing to do with it.
//! Steps: an owner whose CPUs are all there keeps them. The others keep what is left of theirs, and get as many others as
//! they lost, near what they had: the fewest moves that are possible, because only what is lost is replaced. Who has
//! nothing left comes first. What cannot be replaced and is offline stays in the set: it is nobody else's, and serves
//! its owner again when it comes back, without a move. The first set is remembered ([`Assignment::original`]).
//! Invariants: nobody is dropped, and nobody's set becomes empty: where all of it is reserved by now and nothing can be
//! had, it stays as it is; sets stay disjoint and the shared pool is never emptied; nobody is moved back.
//!
//! [`Assignment::original`]: crate::assignments::Assignment::original

use crate::{
    assignments::Assignments,
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
    owner::Owner,
    placement,
    request::{AlignmentPolicy, Isolation, Request},
    topology::CpuTopology,
};
use std::{collections::BTreeMap, fmt};

/// The machine as it is now.
#[derive(Debug, Clone, Copy)]
pub struct Now<'a> {
    /// Its CPUs that are online.
    pub topology: &'a CpuTopology,
    /// What may be used.
    pub online: &'a CpuSet,
    /// In other managers' partitions: never a replacement.
    pub foreign: &'a CpuSet,
    /// The node of every CPU that was ever seen: near what an owner had is known also when all of it is offline.
    pub places: &'a BTreeMap<CpuId, NodeId>,
    /// Only owners of which no CPU is left: the others wait until CPUs have come to rest.
    pub stranded: bool,
}

/// What became of one owner's set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refit {
    /// Whose.
    pub owner: Owner,
    /// Before.
    pub from: CpuSet,
    /// After.
    pub to: CpuSet,
    /// CPUs that are not there, or reserved now.
    pub lost: CpuSet,
    /// How many of them could not be replaced.
    pub missing: usize,
    /// What its CPUs shared, as far as that is known, and what those that are online share now. Neither the policy for nodes
    /// nor whole cores can be asked for again, because replacements must not move what is there.
    pub shares: Option<(String, String)>,
    /// Where its memory comes from now, if that is not where it came from; empty: from anywhere, because no nodes had room.
    pub memory: Option<NodeSet>,
}

impl fmt::Display for Refit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, from, to, lost, missing, shares, memory } = self;
        write!(f, "{owner}: ")?;
        if from != to {
            let cpus = if lost.len() == 1 { format!("CPU {lost} is") } else { format!("CPUs {lost} are") };
            write!(f, "{cpus} offline or reserved now; it has {to} instead of {from}")?;
            if *missing > 0 {
                write!(f, ", {missing} could not be replaced")?;
            }
            if let Some((was, is)) = shares {
                write!(f, " ({is}")?;
                if was.is_empty() { f.write_str(")")? } else { write!(f, "; before: {was})")? }
            }
        }
        let and = if from == to { "" } else { "; " };
        match memory {
            Some(nodes) if nodes.is_empty() => {
                write!(f, "{and}its memory comes from any node now: none near it has room")
            }
            Some(nodes) => write!(f, "{and}its memory comes from nodes {nodes} now"),
            None => Ok(()),
        }
    }
}

/// Fits the sets of `table` to the machine; what was changed. `generation` gives a new number.
pub fn refit(table: &mut Assignments, now: Now<'_>, mut generation: impl FnMut() -> u64) -> Vec<Refit> {
    let nothing = CpuSet::new();
    let isolated = now.topology.isolated().unwrap_or(&nothing);
    let allocatable = table.allocatable(now.online);
    let broken = table.sets().filter(|(_, s)| !s.is_subset(&allocatable));
    let broken = broken.filter(|(_, s)| !now.stranded || s.is_disjoint(now.online));
    let mut broken: Vec<(Owner, CpuSet)> = broken.map(|(o, s)| (o.clone(), s.clone())).collect();
    broken.sort_by_key(|(_, s)| !s.is_disjoint(&allocatable));
    let mut done = Vec::new();
    for (owner, from) in broken {
        let kept = from.intersection(&allocatable);
        let lost = from.difference(&allocatable);
        let free = table.free(now.online).difference(isolated).difference(now.foreign);
        // What it keeps decides; who keeps nothing goes near where it was.
        let here = if kept.is_empty() { &from } else { &kept };
        let near = here.iter().filter_map(|c| now.places.get(&c).copied());
        let near = near.filter(|n| now.topology.node(*n).is_some()).collect();
        let wish = Wish { owner: &owner, near, wanted: lost.len() };
        let placed = wish.most(now.topology, &allocatable.difference(isolated), &free, |set| {
            !table.shared_pool(now.online).difference(now.foreign).difference(set).is_empty()
        });
        let missing = lost.len() - placed.len();
        let stays: CpuSet = lost.difference(now.online).iter().take(missing).collect();
        let to = kept.union(&placed).union(&stays);
        if to.is_empty() || to == from {
            continue;
        }
        let generation = generation();
        let (original, cpus, number, reason) = if let Some(a) = table.owners.get_mut(&owner) {
            (&mut a.original, &mut a.cpus, &mut a.generation, &mut a.reason)
        } else if let Some(p) = table.promised.get_mut(&owner) {
            (&mut p.original, &mut p.cpus, &mut p.generation, &mut p.reason)
        } else {
            continue;
        };
        original.get_or_insert_with(|| from.clone());
        (*cpus, *number) = (to.clone(), generation);
        let there = to.intersection(now.topology.online());
        let shares = (!there.is_empty()).then(|| {
            let is = placement::Placement::of(now.topology, there, &NodeSet::new()).reason.to_string();
            (std::mem::replace(reason, is.clone()), is)
        });
        done.push(Refit { owner, from, to, lost, missing, shares, memory: None });
    }
    memory(table, now.topology, &mut done);
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
                shares: None,
                memory: Some(nodes),
            }),
        }
    }
}

/// Replacements.
struct Wish<'a> {
    owner: &'a Owner,
    near: NodeSet,
    wanted: usize,
}

impl Wish<'_> {
    /// As many CPUs as can be had.
    fn most(
        &self,
        topology: &CpuTopology,
        allocatable: &CpuSet,
        free: &CpuSet,
        allowed: impl Fn(&CpuSet) -> bool,
    ) -> CpuSet {
        for cpus in (1..=self.wanted.min(free.len())).rev() {
            let Ok(count) = u32::try_from(cpus) else { continue };
            let request = Request {
                owner: self.owner.clone(),
                cpus: count,
                numa: AlignmentPolicy::BestEffort,
                whole_cores: false,
                near: self.near.clone(),
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

    /// Where the CPUs of [`machine`] are.
    fn places() -> BTreeMap<CpuId, NodeId> {
        (0..8).map(|n| (CpuId(n), NodeId(n / 4))).collect()
    }

    fn fit(t: &mut Assignments, topology: &CpuTopology, foreign: &CpuSet, stranded: bool) -> Vec<Refit> {
        let places = places();
        let online = topology.online();
        let mut n = 1;
        refit(t, Now { topology, online, foreign, places: &places, stranded }, || {
            n += 1;
            n
        })
    }

    /// After the change: the sets, and "owner from to missing".
    fn after(sets: &[(&str, &str)], reserved: &str, online: &str) -> (Vec<String>, Vec<String>) {
        let mut t = table(sets, reserved);
        let done = fit(&mut t, &machine(online), &CpuSet::new(), false);
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
        // SMT off: every second thread. What cannot be replaced stays.
        let (sets, told) = after(&[("a", "2-3"), ("b", "4-5")], "0", "0,2,4,6");
        assert_eq!(sets, ["run/a 2,6", "run/b 4-5"]);
        assert_eq!(told, ["run/a 2-3 2,6 0"]);
        let (sets, told) = after(&[("a", "4-7")], "0-1", "0-4");
        assert_eq!(sets, ["run/a 2-5"]);
        assert_eq!(told, ["run/a 4-7 2-5 1"], "as many as can be had, and one that is away");
        // Reserved now.
        let (sets, told) = after(&two, "0-2", "0-7");
        assert_eq!(
            (sets, told),
            (vec!["run/a 3,6".into(), "run/b 4-5".into()], vec!["run/a 2-3 3,6 0".into()])
        );
        // Nothing left and nothing to be had: the set stays.
        let (sets, told) = after(&[("a", "6-7"), ("b", "2-5")], "0-1", "0-5");
        assert_eq!((sets, told), (vec!["run/a 6-7".into(), "run/b 2-5".into()], vec![]));
        let (sets, told) = after(&[("a", "2-3"), ("b", "4-7")], "0-3", "0-7");
        assert_eq!((sets, told), (vec!["run/a 2-3".into(), "run/b 4-7".into()], vec![]));
        // Reserved and in use again: what is left of the set is all there is.
        let (sets, told) = after(&[("a", "2-4"), ("b", "5-7")], "0-3", "0-7");
        assert_eq!((sets, told), (vec!["run/a 4".into(), "run/b 5-7".into()], vec!["run/a 2-4 4 2".into()]));
    }

    #[test]
    fn who_has_nothing_left_comes_first_and_is_served_near_where_it_was() {
        // 1 and 3 are free; both lost a CPU in node 0.
        let (sets, _) = after(&[("a", "4-5"), ("b", "2")], "0", "0-1,4,6");
        assert_eq!(sets, ["run/a 4,6", "run/b 1"]);
        let (sets, _) = after(&[("a", "5-6"), ("b", "7")], "", "2,5");
        assert_eq!(sets, ["run/a 5-6", "run/b 7"], "the last CPU of the pool is nobody's");
        let (sets, _) = after(&[("a", "5-6"), ("b", "7")], "0", "0-1,5");
        assert_eq!(sets, ["run/a 5-6", "run/b 1"]);
        let (sets, _) = after(&[("a", "6-7")], "0", "0-5");
        assert_eq!(sets, ["run/a 4-5"], "the node of those that are gone");
    }

    #[test]
    fn what_comes_back_serves_its_owner_and_nobody_is_moved_back() {
        let mut t = table(&[("a", "4-7"), ("b", "2-3")], "0-1");
        let nobody = CpuSet::new();
        assert_eq!(fit(&mut t, &machine("0-3,6-7"), &nobody, false), []);
        assert_eq!(t.free(&set("0-7")), set(""), "claimed, though away");
        assert_eq!(fit(&mut t, &machine("0-7"), &nobody, false), [], "its own again, without a move");
        let mut t = table(&[("a", "4-5")], "0");
        let owner: Owner = "run/a".parse().unwrap();
        let moved = fit(&mut t, &machine("0-3,6-7"), &nobody, false);
        assert_eq!((moved.len(), &t.owners[&owner].cpus), (1, &set("6-7")));
        assert_eq!(fit(&mut t, &machine("0-7"), &nobody, false), []);
        // While CPUs go and come only who has none left is looked at.
        let mut t = table(&[("a", "4-5"), ("b", "2-3")], "0");
        let moved = fit(&mut t, &machine("0-2,6-7"), &nobody, true);
        assert_eq!(moved.iter().map(|r| r.owner.to_string()).collect::<Vec<_>>(), ["run/a"]);
    }

    #[test]
    fn the_first_set_is_remembered_over_several_changes() {
        let mut t = table(&[("a", "2-3")], "0");
        let owner: Owner = "run/a".parse().unwrap();
        for (online, now) in [("0-2,4-7", "2,4"), ("0-1,4-7", "1,4")] {
            fit(&mut t, &machine(online), &CpuSet::new(), false);
            let a = &t.owners[&owner];
            assert_eq!((a.original.as_ref(), a.generation), (Some(&set("2-3")), 2));
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
        let done = fit(&mut t, &machine("0-7"), &CpuSet::new(), false);
        assert_eq!(t.owners[&owner].mems().to_string(), "1", "{done:?}");
        assert!(done[0].to_string().ends_with("; its memory comes from nodes 1 now"), "{}", done[0]);
        // More than it has: from anywhere, and that is said.
        t.owners.get_mut(&owner).unwrap().memory = [(node(7), 15 << 30)].into();
        let done = fit(&mut t, &machine("0-7"), &CpuSet::new(), false);
        assert_eq!((t.owners[&owner].mems().len(), done.len()), (0, 1), "{done:?}");
        assert!(done[0].to_string().contains("from any node now"), "{}", done[0]);
        assert!(fit(&mut t, &machine("0-7"), &CpuSet::new(), false).is_empty());
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
        let done = fit(&mut t, &topology, &set("1,5"), false);
        let to = done[0].to.clone();
        assert!(to == set("2,6") || to == set("2,7"), "1 and 5 are a partition's, 4 is isolated: {to}");
        // With nothing else left.
        raw.isolated = Some(set("4-7"));
        let topology = CpuTopology::assemble(&raw).unwrap();
        let mut t = table(&[("a", "2-3")], "0");
        assert_eq!(fit(&mut t, &topology, &set("1"), false), []);
    }

    /// Every machine state over eight CPUs and three owners: disjoint, never smaller, never fewer than possible.
    #[test]
    fn every_subset_of_online_cpus() {
        let sets = [("a", "1-2"), ("b", "3"), ("c", "4-6")];
        let mut cases = 0;
        for mask in 1u32..256 {
            let online: CpuSet = (0..8).filter(|n| mask & (1 << n) != 0).map(crate::cpuset::CpuId).collect();
            let Ok(topology) = std::panic::catch_unwind(|| machine(&online.to_string())) else { continue };
            let mut t = table(&sets, "0");
            let before = t.clone();
            let done = fit(&mut t, &topology, &CpuSet::new(), false);
            cases += 1;
            let mut all = CpuSet::new();
            for (owner, cpus) in t.sets() {
                let was = before.cpus_of(owner).unwrap();
                assert!(cpus.len() == was.len() && cpus.is_disjoint(&all), "{online}: {owner} {cpus}");
                all |= cpus;
                assert!(was.intersection(&online).is_subset(cpus), "{online}: {owner} lost what it had");
                let changed = done.iter().any(|r| r.owner == *owner);
                assert_eq!(cpus != was, changed, "{online}: {owner}");
                // The fewest moves: a CPU that is away is only claimed when nothing is free for it.
                let away = !cpus.is_subset(&online);
                let reserved = set("0");
                let free = online.difference(&reserved).difference(&t.exclusive());
                let pool = online.difference(&t.exclusive());
                assert!(!away || free.is_empty() || pool.len() == 1, "{online}: {owner} {cpus}, {free} free");
            }
        }
        assert!(cases > 200, "{cases}");
    }
}
