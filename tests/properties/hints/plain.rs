//! What the rules give, by walking everything.

use super::machine::World;
use std::cmp::Ordering;
use truepin::{CpuId, CpuSet, request::AlignmentPolicy};

/// Places as bits (`None` for any), and whether preferred.
pub(super) type Hint = (Option<u32>, bool);
pub(super) type List = Vec<Hint>;

fn places(mask: u32) -> Vec<u32> {
    (0..32).filter(|at| mask >> at & 1 == 1).collect()
}

/// Every non-empty set of some nodes, fewest nodes first, then by list.
fn sets(of: u32) -> Vec<u32> {
    let mut sets: Vec<u32> = (1..=of).filter(|mask| mask & !of == 0).collect();
    sets.sort_by_key(|mask| (mask.count_ones(), places(*mask)));
    sets
}

fn list(
    of: u32,
    would_do: impl Fn(u32) -> bool,
    does: impl Fn(u32) -> bool,
    also: impl Fn(u32, u32) -> bool,
) -> List {
    let all = sets(of);
    let size = all.iter().filter(|m| would_do(**m)).map(|m| m.count_ones()).min().unwrap_or(of.count_ones());
    let hint = |mask: &u32| (Some(*mask), mask.count_ones() == size || also(*mask, size));
    all.iter().filter(|m| does(**m)).map(hint).collect()
}

pub(super) fn cpus(world: &World, align: bool, available: &CpuSet, reusable: &CpuSet, n: usize) -> List {
    let within = |mask: u32, set: &CpuSet| {
        let cpus =
            (0..).zip(&world.cpus).filter(|(id, c)| mask >> c.node & 1 == 1 && set.contains(CpuId(*id)));
        cpus.count()
    };
    let total = |mask: u32| world.cpus.iter().filter(|c| mask >> c.node & 1 == 1).count();
    let with_cpus = world.nodes_with_cpus();
    let per_socket = with_cpus.count_ones() as usize / world.sockets_of(with_cpus);
    list(
        with_cpus,
        |mask| total(mask) >= n,
        |mask| within(mask, reusable) == reusable.len() && within(mask, available) + reusable.len() >= n,
        |mask, size| {
            align && per_socket > 0 && world.sockets_of(mask) == (size as usize).div_ceil(per_socket)
        },
    )
}

pub(super) fn memory(world: &World, kinds: &[(u64, Vec<(u64, u64)>)]) -> List {
    let enough = |mask: u32, of: fn(&(u64, u64)) -> u64| {
        kinds
            .iter()
            .all(|(need, nodes)| places(mask).iter().map(|at| of(&nodes[*at as usize])).sum::<u64>() >= *need)
    };
    list(world.every(), |mask| enough(mask, |n| n.1), |mask| enough(mask, |n| n.0), |_, _| false)
}

pub(super) fn devices(world: &World, n: usize, devices: &[(u32, bool, bool)]) -> List {
    let count = |mask: u32, which: &dyn Fn(&(u32, bool, bool)) -> bool| {
        devices.iter().filter(|d| d.0 & mask != 0 && which(d)).count()
    };
    let held = devices.iter().filter(|d| d.0 != 0 && d.2).count();
    list(
        world.every(),
        |mask| count(mask, &|_| true) >= n,
        |mask| count(mask, &|d| d.2) == held && held + count(mask, &|d| d.1 && !d.2) >= n,
        |_, _| false,
    )
}

/// The hint that the policy makes of lists (`None`: no opinion; empty: impossible): places, preferred, let in.
pub(super) fn merge(
    policy: AlignmentPolicy,
    world: &World,
    lists: &[Option<List>],
    closest: bool,
) -> (Option<u32>, bool, bool) {
    if policy == AlignmentPolicy::None {
        return (None, false, true);
    }
    let single = policy == AlignmentPolicy::SingleNumaNode;
    let lists: Vec<List> = lists
        .iter()
        .map(|list| match list {
            None => vec![(None, true)],
            Some(list) if list.is_empty() => vec![(None, false)],
            Some(list) => list.clone(),
        })
        .map(|mut list| {
            if single {
                list.retain(|(mask, preferred)| *preferred && mask.is_none_or(u32::is_power_of_two));
            }
            list
        })
        .collect();
    let least = |list: &List| list.iter().filter_map(|(mask, _)| *mask).map(u32::count_ones).min();
    let aim = lists.iter().filter_map(least).max().unwrap_or(0);

    let mut best: Option<(u32, bool)> = None;
    let mut turn = vec![0; lists.len()];
    let mut more = lists.iter().all(|list| !list.is_empty());
    while more {
        let hints: Vec<Hint> = turn.iter().zip(&lists).map(|(at, list)| list[*at]).collect();
        let named: Vec<u32> = hints.iter().filter_map(|(mask, _)| *mask).collect();
        let mask = named.iter().fold(world.every(), |all, mask| all & mask);
        let preferred =
            hints.iter().all(|(_, preferred)| *preferred) && named.windows(2).all(|w| w[0] == w[1]);
        if mask != 0 {
            best = Some(match best {
                Some(known) if !better(world, closest && !single, aim, known, (mask, preferred)) => known,
                _ => (mask, preferred),
            });
        }
        more = (0..lists.len()).rev().any(|at| {
            turn[at] = (turn[at] + 1) % lists[at].len();
            turn[at] != 0
        });
    }
    let (mask, preferred) = best.unwrap_or((world.every(), false));
    let mask = if single && mask == world.every() { None } else { Some(mask) };
    (mask, preferred, preferred || policy == AlignmentPolicy::BestEffort)
}

/// Whether a candidate replaces what is known, as it is decided pair by pair.
fn better(world: &World, closest: bool, aim: u32, known: (u32, bool), new: (u32, bool)) -> bool {
    match (known.1, new.1) {
        (false, true) => return true,
        (true, false) => return false,
        (true, true) => return fits(world, closest, known.0, new.0),
        (false, false) => {}
    }
    let (old, size) = (known.0.count_ones(), new.0.count_ones());
    match old.cmp(&aim) {
        Ordering::Greater => fits(world, closest, known.0, new.0),
        Ordering::Equal => size == aim && fits(world, closest, known.0, new.0),
        Ordering::Less if size > aim => false,
        Ordering::Less => size > old || (size == old && fits(world, closest, known.0, new.0)),
    }
}

#[allow(clippy::cast_precision_loss, reason = "distances of five nodes")]
fn fits(world: &World, closest: bool, known: u32, new: u32) -> bool {
    if known.count_ones() != new.count_ones() {
        return new.count_ones() < known.count_ones();
    }
    let mean = |mask: u32| {
        let places = places(mask);
        let pairs = || places.iter().flat_map(|a| places.iter().map(move |b| (*a as usize, *b as usize)));
        pairs().map(|(a, b)| f64::from(world.rows[a][b])).sum::<f64>() / pairs().count() as f64
    };
    match mean(new).partial_cmp(&mean(known)) {
        Some(Ordering::Less) if closest => true,
        Some(Ordering::Greater) if closest => false,
        _ => new < known,
    }
}
