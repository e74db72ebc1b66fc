//! What has to be written for a set of owners: plain data, decided before anything is touched.
//!
//! Problem: owners come and go while others must keep their epoch and counters, and a half-checked request must not
//! leave half of it in the kernel.
//! Steps: [`check`] refuses what cannot be watched; [`compare`] keeps owners that did not change and gives each other
//! one a free index.
//! Invariants: no two owners have one index; a kept owner's index and CPUs are untouched; an index that was just
//! given up is taken last, so a program that still holds it counts into nothing that is in use.

use super::error::BpfError;
use std::collections::{BTreeMap, BTreeSet};
use truepin::{
    cgroup::CgroupId,
    cpuset::{CpuId, CpuSet},
    ledger::Watched,
};
use truepin_abi::{Config, CpuConfig, MAX_LEVEL, MAX_OWNERS};

// What the reconciler refuses is what the programs cannot compare.
const _: () = assert!(MAX_LEVEL == truepin::reconcile::MAX_LEVEL);

/// An owner with its index in the maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Indexed {
    pub(super) watched: Watched,
    pub(super) index: u32,
    /// Whether it goes on unchanged.
    pub(super) kept: bool,
}

/// Refuses owners that the kernel half cannot tell apart.
pub(super) fn check(watched: &[Watched]) -> Result<(), BpfError> {
    if watched.len() > MAX_OWNERS as usize {
        return Err(BpfError::TooManyOwners { count: watched.len(), max: MAX_OWNERS });
    }
    let (mut ids, mut taken) = (BTreeSet::new(), CpuSet::new());
    for w in watched {
        let refuse = |reason| Err(BpfError::Owner { cgroup: w.cgroup, level: w.level, reason });
        if w.cgroup == CgroupId(0) {
            return refuse("0 is no cgroup's id");
        }
        if w.level == 0 {
            return refuse("the root cgroup cannot be an owner");
        }
        if w.level > MAX_LEVEL {
            return refuse("too deep, at most 31");
        }
        if !ids.insert(w.cgroup) {
            return refuse("it is there twice");
        }
        let both = taken.intersection(&w.cpus);
        if !both.is_empty() {
            return Err(BpfError::Shared { cgroup: w.cgroup, cpus: both });
        }
        taken |= &w.cpus;
    }
    Ok(())
}

/// The owners to be, by the owners that are. `after` is the index that was given out last.
pub(super) fn compare(now: &[Indexed], watched: &[Watched], after: u32) -> Vec<Indexed> {
    let known: BTreeMap<CgroupId, &Indexed> = now.iter().map(|o| (o.watched.cgroup, o)).collect();
    let used: BTreeSet<u32> = now.iter().map(|o| o.index).collect();
    // From the one after the last on, then from the start: an index rests as long as there are others. When all
    // rest or are used, what the owners that go away give up is taken too.
    let turn = (1..=MAX_OWNERS).map(|n| (after + n) % MAX_OWNERS);
    let staying: BTreeSet<u32> =
        watched.iter().filter_map(|w| known.get(&w.cgroup)).map(|o| o.index).collect();
    let mut free = turn
        .clone()
        .filter(|i| !used.contains(i))
        .chain(turn.filter(|i| used.contains(i) && !staying.contains(i)));
    watched
        .iter()
        .filter_map(|w| {
            let (index, kept) = match known.get(&w.cgroup) {
                Some(o) => (o.index, o.watched == *w),
                // `check` saw that there are enough.
                None => (free.next()?, false),
            };
            Some(Indexed { watched: w.clone(), index, kept })
        })
        .collect()
}

/// What each CPU should be told; serials are 0 here.
pub(super) fn cpus(owners: &[Indexed]) -> BTreeMap<CpuId, (CpuConfig, bool)> {
    let one = |o: &Indexed| {
        let config = CpuConfig {
            cgroup: o.watched.cgroup.0,
            generation: o.watched.generation,
            serial: 0,
            level: o.watched.level,
            owner: o.index + 1,
        };
        let kept = o.kept;
        o.watched.cpus.iter().map(move |cpu| (cpu, (config, kept))).collect::<Vec<_>>()
    };
    owners.iter().flat_map(one).collect()
}

/// The depths at which owners live.
pub(super) fn levels(owners: &[Indexed]) -> Config {
    Config { levels: owners.iter().fold(0, |bits, o| bits | 1 << o.watched.level), pad: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn w(cgroup: u64, level: u32, cpus: &str, generation: u64) -> Watched {
        Watched { cgroup: CgroupId(cgroup), level, cpus: cpus.parse().unwrap(), generation }
    }

    #[test]
    fn what_cannot_be_watched() {
        assert!(check(&[w(1, 1, "0-3", 1), w(2, 31, "4", 1), w(3, 2, "", 1)]).is_ok());
        for (bad, says) in [
            (vec![w(0, 1, "0", 1)], "cgroup 0 at depth 1 cannot be watched: 0 is no cgroup's id"),
            (
                vec![w(5, 0, "0", 1)],
                "cgroup 5 at depth 0 cannot be watched: the root cgroup cannot be an owner",
            ),
            (vec![w(5, 32, "0", 1)], "cgroup 5 at depth 32 cannot be watched: too deep, at most 31"),
            (
                vec![w(5, 1, "0", 1), w(5, 1, "1", 1)],
                "cgroup 5 at depth 1 cannot be watched: it is there twice",
            ),
            (vec![w(5, 1, "0-2", 1), w(6, 1, "2-3", 1)], "CPUs 2 of cgroup 6 have another owner too"),
        ] {
            assert_eq!(check(&bad).unwrap_err().to_string(), says);
        }
        let many: Vec<_> = (1..=1025).map(|i| w(i, 1, "", 0)).collect();
        assert!(check(&many[..1024]).is_ok());
        assert!(matches!(check(&many), Err(BpfError::TooManyOwners { count: 1025, max: 1024 })));
    }

    #[test]
    fn kept_changed_new_and_gone() {
        let first = compare(&[], &[w(1, 1, "0", 1), w(2, 1, "1", 1), w(3, 1, "2", 1)], 1023);
        let view =
            |o: &[Indexed]| o.iter().map(|o| (o.watched.cgroup.0, o.index, o.kept)).collect::<Vec<_>>();
        assert_eq!(view(&first), [(1, 0, false), (2, 1, false), (3, 2, false)]);
        // 1 stays, 2 has a new generation, 3 is gone, 4 is new: its index is not the one of 3.
        let second = compare(&first, &[w(4, 1, "2", 1), w(1, 1, "0", 1), w(2, 1, "1", 2)], 2);
        assert_eq!(view(&second), [(4, 3, false), (1, 0, true), (2, 1, false)]);
    }

    #[test]
    fn a_full_table_takes_the_indices_of_those_who_leave() {
        let full: Vec<_> = (1..=1024).map(|i| w(i, 1, "", 0)).collect();
        let now = compare(&[], &full, 1023);
        assert_eq!(now.len(), 1024);
        let mut next = full.clone();
        next[5] = w(5000, 1, "", 0);
        let after = compare(&now, &next, 1023);
        assert_eq!((after.len(), after[5].index, after[5].kept), (1024, 5, false));
        let indices: BTreeSet<u32> = after.iter().map(|o| o.index).collect();
        assert_eq!(indices.len(), 1024);
    }

    #[test]
    fn what_the_kernel_half_is_told() {
        let owners = compare(&[], &[w(7, 2, "1,3", 9), w(8, 5, "2", 4)], 1023);
        assert_eq!(levels(&owners).levels, 0b10_0100);
        let told = cpus(&owners);
        assert_eq!(told.keys().map(|c| c.0).collect::<Vec<_>>(), [1, 2, 3]);
        let expected = CpuConfig { cgroup: 8, generation: 4, serial: 0, level: 5, owner: 2 };
        assert_eq!(told[&CpuId(2)], (expected, false));
    }
}
