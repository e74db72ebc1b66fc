//! Topology hints against plain enumeration on small machines by chance.
//!
//! [`machine`] makes machines and requests, [`plain`] says what the rules give, by walking every set of nodes and every
//! combination of hints; nothing of it is shared with what is tested. Counts are asserted, so that a generator that no
//! longer makes what it should make fails the test.

mod machine;
mod plain;

use machine::{Chance, Wish, World};
use plain::{Hint, List};
use std::collections::BTreeMap;
use truepin::{
    NodeSet,
    hints::{Demand, Distances, Opinion, TopologyHint, merge, winner},
    request::AlignmentPolicy,
};

const POLICIES: [AlignmentPolicy; 4] = [
    AlignmentPolicy::None,
    AlignmentPolicy::BestEffort,
    AlignmentPolicy::Restricted,
    AlignmentPolicy::SingleNumaNode,
];

fn list_of(world: &World, demand: &Demand) -> List {
    demand.hints().map(|h| (h.affinity.map(|set| world.mask(&set)), h.preferred)).collect()
}

fn opinion_of(world: &World, list: &[Hint]) -> Opinion {
    let hint = |(mask, preferred): &Hint| TopologyHint {
        affinity: mask.map(|mask| world.set(mask)),
        preferred: *preferred,
    };
    if list.is_empty() { Opinion::Impossible } else { Opinion::Hints(list.iter().map(hint).collect()) }
}

/// How often something came up.
#[derive(Debug, Default)]
struct Counts(BTreeMap<&'static str, usize>);

impl Counts {
    fn add(&mut self, what: &'static str, is: bool) {
        *self.0.entry(what).or_default() += usize::from(is);
    }

    fn at_least(&self, wanted: &[(&str, usize)]) {
        println!("{self:?}");
        for (what, n) in wanted {
            let seen = self.0.get(what).copied().unwrap_or(0);
            assert!(seen >= *n, "{what}: {seen} cases, {n} wanted");
        }
    }
}

#[test]
fn lists_are_those_of_enumeration() {
    let mut counts = Counts::default();
    for seed in 0..30_000 {
        let mut chance = Chance::new(seed);
        let world = World::random(&mut chance, 6);
        let wish = Wish::random(&mut chance, &world);
        let Some(demand) = wish.demand(&world) else {
            counts.add("no demand", true);
            continue;
        };
        let plain = wish.plain(&world);
        assert_eq!(list_of(&world, &demand), plain, "seed {seed}: {wish:?} on {world:?}");
        counts.add("lists", true);
        counts.add("hints", !plain.is_empty());
        counts.add("some preferred, some not", plain.iter().any(|h| h.1) && plain.iter().any(|h| !h.1));
        counts.add("nothing preferred", !plain.is_empty() && !plain.iter().any(|h| h.1));
        counts.add("sockets", matches!(wish, Wish::Cpus { align: true, .. }));
        counts.add("reused", matches!(&wish, Wish::Cpus { reusable, .. } if !reusable.is_empty()));
        counts.add("several sockets per node", world.most_sockets_of_a_node() > 1);
        counts.add("several nodes per socket", world.most_nodes_of_a_socket() > 1);
        counts.add("nodes without CPUs", world.has_node_without_cpus());
        counts.add("sparse", world.is_sparse());
        counts.add("far numbers", world.nodes.last().is_some_and(|n| *n > 63));
    }
    counts.at_least(&[
        ("lists", 25_000),
        ("hints", 15_000),
        ("some preferred, some not", 8_000),
        ("nothing preferred", 1_000),
        ("sockets", 4_000),
        ("reused", 2_000),
        ("several sockets per node", 5_000),
        ("several nodes per socket", 5_000),
        ("nodes without CPUs", 5_000),
        ("sparse", 5_000),
        ("far numbers", 2_000),
    ]);
}

#[test]
fn merges_are_those_of_the_full_product() {
    let mut counts = Counts::default();
    for seed in 0..30_000 {
        let mut chance = Chance::new(seed);
        let world = World::random(&mut chance, 5);
        let providers = 1 + chance.below(4);
        let longest = [0, 31, 31, 12, 6][providers];
        let lists: Vec<Option<List>> =
            (0..providers).map(|_| machine::any_list(&mut chance, &world, longest)).collect();
        let opinions: Vec<Opinion> =
            lists.iter().map(|list| list.as_ref().map_or(Opinion::Any, |l| opinion_of(&world, l))).collect();
        for closest in [false, true] {
            let distances = closest.then(|| world.distances());
            for policy in POLICIES {
                let got = merge(policy, &world.all(), &opinions, distances.as_ref());
                let got = (got.affinity.map(|set| world.mask(&set)), got.preferred, got.admit);
                let plain = plain::merge(policy, &world, &lists, closest);
                assert_eq!(got, plain, "seed {seed}: {policy:?} closest {closest} {lists:?} on {world:?}");
                counts.add("merges", true);
                counts.add("preferred", got.1);
                counts.add("not preferred, some nodes", !got.1 && got.0.is_some_and(|m| m != world.every()));
                counts.add("all nodes for want of any", !got.1 && got.0 == Some(world.every()));
            }
        }
        counts.add("sparse", world.is_sparse());
        counts.add("asymmetric", world.is_asymmetric());
    }
    counts.at_least(&[
        ("merges", 240_000),
        ("preferred", 40_000),
        ("not preferred, some nodes", 30_000),
        ("all nodes for want of any", 1_000),
        ("sparse", 10_000),
        ("asymmetric", 7_000),
    ]);
}

#[test]
fn winners_are_the_merges_of_the_lists() {
    let mut counts = Counts::default();
    for seed in 0..40_000 {
        let mut chance = Chance::new(seed);
        let world = World::random(&mut chance, 5);
        let wishes: Vec<Wish> = (0..=chance.below(3)).map(|_| Wish::random(&mut chance, &world)).collect();
        let demands: Vec<Demand> = wishes.iter().filter_map(|w| w.demand(&world)).collect();
        // A demand of two kinds of memory is two lists.
        let lists: Vec<Option<List>> = wishes
            .iter()
            .filter_map(|w| w.demand(&world).map(|d| (w.plain(&world), d.lists())))
            .flat_map(|(list, times)| std::iter::repeat_n(Some(list), times))
            .collect();
        let product: usize = lists.iter().flatten().map(Vec::len).product();
        if product > 200_000 {
            continue;
        }
        check(&world, &demands, &lists, &mut counts, &format!("seed {seed}: {wishes:?} on {world:?}"));
        counts.add("worlds", true);
        counts.add("several demands", demands.len() > 1);
        counts.add("no demand", demands.is_empty());
        counts.add("an impossible one", lists.iter().flatten().any(Vec::is_empty));
        counts.add("nodes without CPUs", world.has_node_without_cpus());
        counts.add("several sockets per node", world.most_sockets_of_a_node() > 1);
        counts.add("several nodes per socket", world.most_nodes_of_a_socket() > 1);
        counts.add("sparse", world.is_sparse());
        counts.add("asymmetric", world.is_asymmetric());
    }
    counts.at_least(&[
        ("worlds", 30_000),
        ("winners", 240_000),
        ("preferred", 50_000),
        ("not preferred, some nodes", 25_000),
        ("several demands", 15_000),
        ("an impossible one", 4_000),
        ("nodes without CPUs", 8_000),
        ("several sockets per node", 8_000),
        ("several nodes per socket", 8_000),
        ("sparse", 10_000),
        ("asymmetric", 7_000),
    ]);
}

fn check(world: &World, demands: &[Demand], lists: &[Option<List>], counts: &mut Counts, what: &str) {
    let demands: Vec<&Demand> = demands.iter().collect();
    for closest in [false, true] {
        let distances = closest.then(|| world.distances());
        for policy in POLICIES {
            let got = winner(policy, &world.all(), &demands, distances.as_ref());
            assert!(got.exact, "{what}");
            let got = (got.merged.affinity.map(|s| world.mask(&s)), got.merged.preferred, got.merged.admit);
            let plain = plain::merge(policy, world, lists, closest);
            assert_eq!(got, plain, "{policy:?} closest {closest} {what}");
            counts.add("winners", true);
            counts.add("preferred", got.1);
            counts.add("not preferred, some nodes", !got.1 && got.0.is_some_and(|m| m != world.every()));
        }
    }
}

/// Up to 11 nodes, where the merge (itself compared above) stands for the full product: tight requests, so that many
/// sets have to be given up before one holds.
#[test]
fn winners_are_the_merges_of_longer_lists() {
    let mut counts = Counts::default();
    for seed in 0..4_000 {
        let mut chance = Chance::new(seed);
        let world = World::random(&mut chance, 11);
        let wishes: Vec<Wish> = (0..=chance.below(4)).map(|_| Wish::random(&mut chance, &world)).collect();
        let demands: Vec<Demand> = wishes.iter().filter_map(|w| w.demand(&world)).collect();
        let opinions: Vec<Opinion> =
            demands.iter().flat_map(|d| std::iter::repeat_n(d.opinion(), d.lists())).collect();
        let demands: Vec<&Demand> = demands.iter().collect();
        for closest in [None, Some(world.distances())] {
            for policy in [AlignmentPolicy::Restricted, AlignmentPolicy::SingleNumaNode] {
                let got = winner(policy, &world.all(), &demands, closest.as_ref());
                let merged = merge(policy, &world.all(), &opinions, closest.as_ref());
                let what =
                    || format!("seed {seed}: {policy:?} {} {wishes:?} on {world:?}", closest.is_some());
                assert!(got.exact, "{}", what());
                assert_eq!(got.merged, merged, "{}", what());
                counts.add("winners", true);
                counts.add("preferred", merged.preferred);
                let some = merged.affinity.as_ref().is_some_and(|set| *set != world.all());
                counts.add("not preferred, some nodes", !merged.preferred && some);
                counts.add("of more than 6 nodes", world.nodes.len() > 6);
            }
        }
    }
    counts.at_least(&[
        ("winners", 16_000),
        ("preferred", 1_000),
        ("not preferred, some nodes", 3_000),
        ("of more than 6 nodes", 6_000),
    ]);
}

/// The order of providers decides nothing.
#[test]
fn order_of_opinions_is_nothing() {
    for seed in 0..5_000 {
        let mut chance = Chance::new(seed);
        let world = World::random(&mut chance, 6);
        let mut opinions: Vec<Opinion> = (0..3)
            .map(|_| machine::any_list(&mut chance, &world, 30))
            .map(|list| list.map_or(Opinion::Any, |l| opinion_of(&world, &l)))
            .collect();
        let distances: Distances = world.distances();
        let all: NodeSet = world.all();
        let first = merge(AlignmentPolicy::BestEffort, &all, &opinions, Some(&distances));
        opinions.reverse();
        assert_eq!(
            first,
            merge(AlignmentPolicy::BestEffort, &all, &opinions, Some(&distances)),
            "seed {seed}"
        );
    }
}
