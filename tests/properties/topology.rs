//! Whatever a source says, a [`CpuTopology`] keeps its invariants.

use crate::machines::{CPUS, broken, most_cpus, sound};
use proptest::{collection::vec, option, prelude::*};
use truepin::{
    CpuId, CpuSet, CpuTopology,
    topology::{Level, RawGroup, RawTopology},
};

/// Statements of all kinds: told by somebody or by nobody, of offline CPUs, overlapping, empty.
fn statements() -> impl Strategy<Value = Vec<RawGroup>> {
    let statement = (0..Level::ALL.len(), option::of(0..CPUS + 2), option::of(-1..3_i64), most_cpus());
    let statement = statement.prop_map(|(level, teller, id, cpus)| RawGroup {
        level: Level::ALL[level],
        id,
        told_by: teller.map(CpuId),
        cpus,
    });
    vec(statement, 0..24)
}

fn disjoint<'a>(sets: impl Iterator<Item = &'a CpuSet>) -> Result<CpuSet, TestCaseError> {
    let mut all = CpuSet::new();
    for set in sets {
        prop_assert!(all.is_disjoint(set), "{set} overlaps {all}");
        all |= set;
    }
    Ok(all)
}

fn sane(topology: &CpuTopology) -> Result<(), TestCaseError> {
    for level in Level::ALL {
        let groups = topology.groups(level);
        let all = disjoint(groups.iter().map(|g| &g.cpus))?;
        prop_assert!(all.is_subset(topology.online()));
        prop_assert!(groups.windows(2).all(|w| w[0].leader < w[1].leader));
        for group in groups {
            prop_assert_eq!(group.cpus.first(), Some(group.leader));
            for cpu in group.cpus.iter() {
                prop_assert_eq!(topology.group_of(level, cpu), Some(group));
            }
        }
        for cpu in topology.online().difference(&all).iter() {
            prop_assert_eq!(topology.group_of(level, cpu), None);
        }
    }
    prop_assert_eq!(&disjoint(topology.cores().iter().map(|c| &c.cpus))?, topology.online());
    disjoint(topology.llcs().iter().map(|l| &l.cpus))?;
    disjoint(topology.nodes().iter().map(|n| &n.cpus))?;
    for cpu in topology.cpus() {
        prop_assert!(topology.siblings(cpu.id).is_some_and(|s| s.contains(cpu.id)));
        prop_assert!(topology.llc_of(cpu.id).is_none_or(|l| l.cpus.contains(cpu.id)));
        let nodes: Vec<_> =
            topology.nodes().iter().filter(|n| n.cpus.contains(cpu.id)).map(|n| n.id).collect();
        prop_assert_eq!(nodes, cpu.node.into_iter().collect::<Vec<_>>());
        let l3 = topology.group_of(Level::L3, cpu.id);
        prop_assert_eq!(
            l3.map(|g| &g.cpus),
            topology.llc_of(cpu.id).filter(|_| l3.is_some()).map(|g| &g.cpus)
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn invariants(raw in prop_oneof![sound(), broken()], groups in statements(), online in most_cpus(),
        overlapping in vec(most_cpus(), 0..4)) {
        let mut raw = RawTopology { groups, online: Some(online.clone()), ..raw };
        for (node, cpus) in raw.nodes.iter_mut().zip(overlapping) {
            node.cpus = cpus;
        }
        match CpuTopology::assemble(&raw) {
            Ok(topology) => sane(&topology)?,
            Err(_) => prop_assert!(online.is_empty()),
        }
    }

    #[test]
    fn order_of_reading_does_not_show(raw in prop_oneof![sound(), broken()]) {
        let mut reversed = raw.clone();
        reversed.groups.reverse();
        reversed.nodes.reverse();
        let (a, b) = (CpuTopology::assemble(&raw), CpuTopology::assemble(&reversed));
        prop_assert_eq!(a.as_ref().map(CpuTopology::fingerprint), b.as_ref().map(CpuTopology::fingerprint));
        prop_assert_eq!(a, b);
    }
}
