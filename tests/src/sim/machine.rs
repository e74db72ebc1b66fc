//! A machine of which some CPUs are online: what the agent would read of it.

use truepin::{
    CpuSet, CpuTopology,
    topology::{Level, RawGroup, RawNode, RawTopology},
};

/// `whole` with these CPUs online.
pub(super) fn now(whole: &CpuTopology, online: &CpuSet) -> Result<Box<CpuTopology>, String> {
    let all = whole.online().union(whole.offline());
    let group = |level: Level| {
        let groups = whole.groups(level).iter();
        groups.map(move |g| RawGroup { level, id: g.kernel_id, told_by: None, cpus: g.cpus.clone() })
    };
    let node = |n: &truepin::topology::NumaNode| RawNode {
        id: n.id,
        cpus: n.listed.clone(),
        memory_bytes: n.memory_bytes,
        distance: n.distance.clone(),
    };
    let raw = RawTopology {
        source: "the simulated machine".into(),
        listed_offline: all.difference(online),
        listed: all,
        online: Some(online.clone()),
        present: whole.present().cloned(),
        possible: whole.possible().cloned(),
        isolated: whole.isolated().cloned(),
        nohz_full: whole.nohz_full().cloned(),
        groups: Level::ALL.into_iter().flat_map(group).collect(),
        nodes: whole.nodes().iter().map(node).collect(),
        ..RawTopology::default()
    };
    CpuTopology::assemble(&raw).map(Box::new).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use truepin::topology::synthetic::{Numbering, Regular};

    #[test]
    fn as_if_it_had_been_read() {
        for numbering in [Numbering::ThreadsAdjacent, Numbering::ThreadsLast] {
            let regular = Regular { packages: 2, nodes: 2, l3: 1, cores: 2, threads: 2, numbering };
            let mut raw = regular.raw();
            let whole = CpuTopology::assemble(&raw).unwrap();
            for online in ["0-15", "0,2-9", "1-15", "0,4,8,12"] {
                let online: CpuSet = online.parse().unwrap();
                raw.online = Some(online.clone());
                let read = CpuTopology::assemble(&raw).unwrap();
                assert_eq!(now(&whole, &online).unwrap().fingerprint(), read.fingerprint(), "{online}");
            }
        }
    }
}
