//! The strategy `kubelet` on random small machines: against the rule written down plainly, and what must hold where that
//! rule is wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod machines;
mod rule;

use machines::{Drawn, drawn, many_nodes};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use rule::Outcome;
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};
use truepin::{
    CpuSet, NodeId, NodeSet,
    placement::kubelet::{KubeletMachine, StaticOptions, TakeError, allocate, take},
};

fn options() -> impl Strategy<Value = StaticOptions> {
    proptest::sample::subsequence(StaticOptions::NAMES.to_vec(), 0..=4)
        .prop_filter_map("exclude each other", |names| StaticOptions::parse(names).ok())
}

/// A subset of the machine's CPUs, most of them; sometimes with one that it does not have.
fn available() -> impl Strategy<Value = (Vec<bool>, bool)> {
    let some = prop_oneof![Just(0.5), Just(0.8), Just(0.95), Just(1.0)];
    let bits = some.prop_flat_map(|p| proptest::collection::vec(prop::bool::weighted(p), 64));
    (bits, prop::bool::weighted(0.05))
}

fn subset(machine: &KubeletMachine, (bits, foreign): &(Vec<bool>, bool)) -> CpuSet {
    let mut cpus: CpuSet =
        machine.cpus().iter().zip(bits.iter().cycle()).filter(|(_, bit)| **bit).map(|(cpu, _)| cpu).collect();
    if *foreign {
        cpus |= &CpuSet::single(truepin::CpuId(2000));
    }
    cpus
}

fn whole(drawn: &Drawn, cpus: &CpuSet) -> bool {
    let cores: BTreeSet<i64> =
        drawn.labels.as_slice().iter().filter(|l| cpus.contains(l.cpu)).map(|l| l.core).collect();
    drawn.labels.as_slice().iter().filter(|l| cores.contains(&l.core)).all(|l| cpus.contains(l.cpu))
}

/// Whether some whole cores of what is available have `n` CPUs together.
fn whole_cores_make(drawn: &Drawn, available: &CpuSet, n: usize) -> bool {
    let mut cores: BTreeMap<i64, (usize, bool)> = BTreeMap::new();
    for label in drawn.labels.as_slice() {
        let core = cores.entry(label.core).or_insert((0, true));
        *core = (core.0 + 1, core.1 && available.contains(label.cpu));
    }
    let mut sums = BTreeSet::from([0]);
    for (size, _) in cores.into_values().filter(|(_, whole)| *whole) {
        sums = sums.iter().flat_map(|sum| [*sum, sum + size]).collect();
    }
    sums.contains(&n)
}

/// What must hold of an answer where the kubelet's is no choice.
fn sane(
    drawn: &Drawn,
    options: StaticOptions,
    available: &CpuSet,
    n: usize,
    got: &Result<CpuSet, TakeError>,
) -> Result<(), TestCaseError> {
    let here = drawn.labels.as_slice().iter().filter(|l| available.contains(l.cpu)).count();
    if !options.full_pcpus_only && n <= here {
        prop_assert!(got.is_ok(), "{n} of {available} refused");
    }
    if let Ok(cpus) = got {
        prop_assert!(cpus.len() == n, "{cpus} is not {n}");
        prop_assert!(cpus.is_subset(available), "{cpus} is not in {available}");
        prop_assert!(!options.full_pcpus_only || whole(drawn, cpus), "{cpus} breaks a core");
    }
    Ok(())
}

const CASES: u32 = 20_000;

/// Runs cases, counts them by kind, and prints the counts.
fn counted<S: Strategy>(
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value) -> Result<&'static str, TestCaseError>,
) -> BTreeMap<&'static str, u32> {
    let counts = RefCell::new(BTreeMap::new());
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let result = runner.run(strategy, |value| {
        let kind = test(value)?;
        *counts.borrow_mut().entry(kind).or_insert(0) += 1;
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let counts = counts.into_inner();
    println!("{counts:?}");
    counts
}

#[test]
fn takes_what_the_rule_says() {
    let strategy = (drawn(), options(), available(), 0.0..1.1_f64);
    let counts = counted(CASES, &strategy, |(drawn, options, bits, share)| {
        let machine = KubeletMachine::labelled(&drawn.labels, drawn.counts);
        let available = subset(&machine, &bits);
        let n = portion(available.len(), share);
        let got = take(&machine, options, &available, n);
        let expected = rule::take(&drawn, options, &available, n);
        Ok(match expected {
            Outcome::Cpus { cpus } if cpus.len() == n && cpus.is_subset(&available) => {
                prop_assert_eq!(&got, &Ok(cpus), "{}", options);
                if options.distribute_across_numa { "distributed" } else { "packed" }
            }
            Outcome::NotEnough { requested, available } => {
                prop_assert_eq!(got, Err(TakeError::NotEnough { requested, available }));
                "not enough"
            }
            Outcome::Accounting(missing) => {
                prop_assert_eq!(got, Err(TakeError::Accounting { missing }));
                "accounting"
            }
            Outcome::Cpus { cpus } => {
                sane(&drawn, options, &available, n, &got)?;
                let adds_up = !options.full_pcpus_only || whole_cores_make(&drawn, &available, n);
                prop_assert_eq!(got.is_ok(), adds_up, "{} of {}", n, available);
                match (cpus.is_subset(&available), got) {
                    (false, Ok(_)) => "unavailable CPUs, put right",
                    (false, Err(_)) => "unavailable CPUs, refused",
                    (true, _) => "another number",
                }
            }
            Outcome::Endless => {
                sane(&drawn, options, &available, n, &got)?;
                if got.is_ok() { "endless, put right" } else { "endless, refused" }
            }
        })
    });
    for kind in ["packed", "distributed"] {
        assert!(counts.get(kind).is_some_and(|n| *n > CASES / 10), "few cases of {kind}");
    }
    for kind in ["not enough", "unavailable CPUs, put right", "another number"] {
        assert!(counts.contains_key(kind), "no case of {kind}");
    }
}

/// Five or six nodes, cores with two or three threads, some of them taken: CPUs are left over that are no core.
#[test]
fn ends_where_the_kubelet_does_not() {
    let options = StaticOptions { full_pcpus_only: true, distribute_across_numa: true, ..Default::default() };
    let strategy = (many_nodes(), available(), 0.3..1.0_f64);
    let counts = counted(CASES, &strategy, |(drawn, bits, share)| {
        let machine = KubeletMachine::labelled(&drawn.labels, drawn.counts);
        let available = subset(&machine, &bits);
        let per_core = machine.counts().cpus_per_core();
        let n = portion(available.len(), share) / per_core * per_core;
        let got = take(&machine, options, &available, n);
        Ok(match rule::take(&drawn, options, &available, n) {
            Outcome::Endless => {
                sane(&drawn, options, &available, n, &got)?;
                prop_assert_eq!(got.is_ok(), whole_cores_make(&drawn, &available, n));
                if got.is_ok() { "put right" } else { "refused" }
            }
            Outcome::Cpus { cpus } if cpus.len() == n && cpus.is_subset(&available) => {
                prop_assert_eq!(&got, &Ok(cpus));
                "equal"
            }
            _ => "other",
        })
    });
    for kind in ["equal", "put right", "refused"] {
        assert!(counts.get(kind).is_some_and(|n| *n > 10), "few cases of {kind}");
    }
}

#[test]
fn allocates_what_the_rule_says() {
    let sets = (available(), available(), available());
    let affinity = proptest::option::of(0..64_u32);
    let strategy = (drawn(), options(), sets, affinity, 0.0..1.1_f64);
    let counts = counted(CASES / 2, &strategy, |(drawn, options, sets, affinity, share)| {
        let machine = KubeletMachine::labelled(&drawn.labels, drawn.counts);
        let (shared, most, reusable) =
            (subset(&machine, &sets.0), subset(&machine, &sets.1), subset(&machine, &sets.2));
        let reserved = machine.cpus().difference(&most);
        let reusable = reusable.intersection(&reserved).difference(&shared);
        let affinity: Option<NodeSet> =
            affinity.map(|mask| (0..6).filter(|node| mask >> node & 1 == 1).map(NodeId).collect());
        let available = shared.difference(&reserved).union(&reusable);
        let n = portion(available.len(), share);
        let got = allocate(&machine, options, &reserved, &shared, &reusable, affinity.as_ref(), n);
        let expected = rule::allocate(&drawn, options, &available, affinity.as_ref(), n);
        Ok(match expected {
            Outcome::Cpus { cpus } if cpus.len() == n && cpus.is_subset(&available) => {
                prop_assert_eq!(&got, &Ok(cpus), "{}", options);
                if affinity.is_some() { "near" } else { "anywhere" }
            }
            Outcome::NotEnough { .. } => {
                prop_assert!(matches!(got, Err(TakeError::NotEnough { .. })), "{got:?}");
                "not enough"
            }
            Outcome::Accounting(missing) => {
                prop_assert_eq!(got, Err(TakeError::Accounting { missing }));
                "accounting"
            }
            Outcome::Cpus { .. } | Outcome::Endless => {
                sane(&drawn, options, &available, n, &got)?;
                if got.is_ok() { "put right" } else { "refused" }
            }
        })
    });
    for kind in ["near", "anywhere", "put right"] {
        assert!(counts.get(kind).is_some_and(|n| *n > 100), "few cases of {kind}");
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of at most 64")]
fn portion(all: usize, share: f64) -> usize {
    (f64::from(u32::try_from(all).unwrap()) * share).round() as usize
}
