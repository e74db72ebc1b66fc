//! Machines of `topologies.jsonl`, by name.

use serde_json::Value;
use std::collections::BTreeMap;
use truepin::{
    CpuId, CpuSet, CpuTopology, NodeId,
    placement::kubelet::{KubeletCounts, KubeletMachine, Label, Labels},
    topology::{Level, RawGroup, RawNode, RawTopology},
};

/// A recorded machine.
#[derive(Debug)]
pub(crate) struct Machine {
    /// The true one.
    #[allow(dead_code, reason = "for kinds that look at the machine itself")]
    pub(crate) topology: CpuTopology,
    /// The counters that the record declares, which need not be true.
    #[allow(dead_code, reason = "for kinds that look at the counters themselves")]
    pub(crate) counts: KubeletCounts,
    /// As the recorded kubelet saw it: with the record's numbers of cores, sockets and caches.
    pub(crate) kubelet: KubeletMachine,
}

/// Every machine of a file's records.
pub(crate) fn machines(records: &[Value]) -> Result<BTreeMap<String, Machine>, String> {
    let named = |record: &Value| {
        let name = record["t"].as_str().ok_or("a machine without a name")?;
        Ok((name.to_owned(), machine(record).map_err(|e| format!("machine {name}: {e}"))?))
    };
    records.iter().map(named).collect()
}

fn machine(record: &Value) -> Result<Machine, String> {
    let count =
        |key: &str| record[key].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or(format!("no {key}"));
    let counts = KubeletCounts {
        cpus: count("num_cpus")?,
        cores: count("num_cores")?,
        sockets: count("num_sockets")?,
        nodes: count("num_numa")?,
        uncores: count("num_uncore")?,
    };
    let online: CpuSet =
        record["cpu"].as_str().ok_or("no field cpu")?.parse().map_err(|e| format!("cpu: {e}"))?;
    let numbers = |key: &str| {
        let list: Option<Vec<i64>> =
            record[key].as_array().and_then(|list| list.iter().map(Value::as_i64).collect());
        list.filter(|l| l.len() == online.len()).ok_or(format!("{key}: not a number for each CPU"))
    };
    let (cores, sockets, uncores) = (numbers("core")?, numbers("sock")?, numbers("uncore")?);
    let nodes: Result<Vec<u32>, _> = numbers("numa")?.into_iter().map(u32::try_from).collect();
    let nodes = nodes.map_err(|e| format!("numa: {e}"))?;

    let mut raw = RawTopology {
        source: record["t"].to_string(),
        listed: online.clone(),
        online: Some(online.clone()),
        ..RawTopology::default()
    };
    for (level, numbers) in [(Level::Package, &sockets), (Level::L3, &uncores), (Level::Core, &cores)] {
        let groups = grouped(&online, numbers).into_iter();
        raw.groups.extend(groups.map(|(id, cpus)| RawGroup { level, id: Some(id), told_by: None, cpus }));
    }
    for (id, cpus) in grouped(&online, &nodes) {
        let row = record["dist"][id.to_string()].as_array();
        let distance = row.and_then(|row| row.iter().map(|d| d.as_u64()?.try_into().ok()).collect());
        raw.nodes.push(RawNode { id: NodeId(id), cpus, memory_bytes: None, distance });
    }
    let topology = CpuTopology::assemble(&raw).map_err(|e| e.to_string())?;

    let label = |(at, cpu)| Label {
        cpu,
        core: cores[at],
        socket: sockets[at],
        node: NodeId(nodes[at]),
        uncore: uncores[at],
    };
    let labels = Labels::new(online.iter().enumerate().map(label).collect());
    Ok(Machine { topology, counts, kubelet: KubeletMachine::labelled(&labels, counts) })
}

fn grouped<T: Ord + Copy>(cpus: &CpuSet, numbers: &[T]) -> BTreeMap<T, CpuSet> {
    let mut groups: BTreeMap<T, CpuSet> = BTreeMap::new();
    for (cpu, number) in cpus.iter().zip(numbers) {
        let _: bool = groups.entry(*number).or_default().insert(CpuId(cpu.0));
    }
    groups
}

/// The online CPUs of the machine that a record names.
pub(crate) fn online_of(topologies: &[Value], name: &Value) -> Result<CpuSet, String> {
    let machine = topologies.iter().find(|t| t["t"] == *name).ok_or_else(|| format!("no machine {name}"))?;
    let cpus = machine["cpu"].as_str().ok_or_else(|| format!("machine {name} has no field cpu"))?;
    cpus.parse().map_err(|e| format!("machine {name}: {e}"))
}
