//! Rows of hints: the kubelet's lists, their merge, and the way from a request to the winning hint.

use crate::{Call, machines::Machine};
use serde_json::Value;
use std::{collections::BTreeMap, error::Error, hint::black_box};
use truepin::{
    CpuSet, CpuTopology, NodeId, NodeSet,
    hints::{Demand, Device, Distances, NodeMemory, Opinion, cpu_hints, merge, winner},
    placement::kubelet::KubeletMachine,
    request::AlignmentPolicy,
    topology::synthetic::{Numbering, Regular},
};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Free CPUs and the number asked for.
fn request(row: &Value) -> Fallible<(CpuSet, usize)> {
    let available = row["avail"].as_str().ok_or("no avail")?.parse()?;
    Ok((available, usize::try_from(row["n"].as_u64().ok_or("no n")?)?))
}

/// A list of hints.
pub(crate) fn list<'a>(row: &Value, machine: &'a Machine) -> Fallible<Call<'a>> {
    let (available, n) = request(row)?;
    let align = row["opt"].as_array().is_some_and(|o| o.iter().any(|o| o == "align-by-socket"));
    let reusable: CpuSet = row["reusable"].as_str().unwrap_or_default().parse()?;
    Ok(Box::new(move || {
        drop(black_box(cpu_hints(&machine.kubelet, align, black_box(&available), &reusable, n)));
    }))
}

fn policy(row: &Value) -> Fallible<AlignmentPolicy> {
    Ok(serde_json::from_value(row["policy"].clone())?)
}

/// The requests whose lists a row merges.
fn requests(row: &Value) -> Fallible<Vec<(CpuSet, usize)>> {
    row["providers_hints_from"].as_array().ok_or("no providers_hints_from")?.iter().map(request).collect()
}

fn nodes(machine: &Machine) -> NodeSet {
    machine.topology.nodes().iter().map(|n| n.id).collect()
}

/// A merge of lists that are there already.
pub(crate) fn merge_of_lists<'a>(row: &Value, machine: &'a Machine) -> Fallible<Call<'a>> {
    let (policy, nodes) = (policy(row)?, nodes(machine));
    let mut opinions = Vec::new();
    for ((available, n), from) in
        requests(row)?.into_iter().zip(row["providers_hints_from"].as_array().into_iter().flatten())
    {
        let list = cpu_hints(&machine.kubelet, false, &available, &CpuSet::new(), n);
        if from["hints"].as_u64() != Some(list.len() as u64) {
            return Err(format!("{} hints, {} recorded", list.len(), from["hints"]).into());
        }
        opinions.push(Opinion::Hints(list));
    }
    Ok(Box::new(move || drop(black_box(merge(policy, &nodes, black_box(&opinions), None)))))
}

/// A line, what the kubelet took for it if that is known, and what to do here.
type WinnerRow<'a> = (String, Option<f64>, Call<'a>);

/// From the requests of each row `merge`, and of each row `hints` by itself, to the winning hint. Recorded for a merge is
/// its time and that of the first request's list.
pub(crate) fn winners_of_rows<'a>(
    rows: &[Value],
    machines: &'a BTreeMap<String, Machine>,
    part: &str,
) -> Fallible<Vec<WinnerRow<'a>>> {
    let mut all = Vec::new();
    for row in rows {
        let id = row["id"].as_str().ok_or("a row without id")?;
        let name = row["t"].as_str().unwrap_or_default();
        let machine = machines.get(name).ok_or_else(|| format!("{id}: no machine {name}"))?;
        if !id.contains(part) {
            continue;
        }
        match row["op"].as_str() {
            Some("hints") => {
                let request = request(row)?;
                let ns = row["cpu_ns_op"].as_f64().or(row["timeout_s"].as_f64().map(|s| s * 1e9));
                for policy in [AlignmentPolicy::BestEffort, AlignmentPolicy::SingleNumaNode] {
                    let call = winner_call(machine, policy, vec![request.clone()]);
                    all.push((format!("winner/{id}/{}", policy.name()), ns, call));
                }
            }
            Some("merge") => {
                let list = rows.iter().find(|other| {
                    let asks = |key: &str| other[key] == row["providers_hints_from"][0][key];
                    other["op"] == "hints" && other["t"] == row["t"] && asks("avail") && asks("n")
                });
                let lists = list.and_then(|l| l["cpu_ns_op"].as_f64());
                let ns = row["cpu_ns_op"].as_f64().map(|ns| ns + lists.unwrap_or(0.0));
                all.push((format!("winner/{id}"), ns, winner_call(machine, policy(row)?, requests(row)?)));
            }
            _ => {}
        }
    }
    Ok(all)
}

fn winner_call(machine: &Machine, policy: AlignmentPolicy, asked: Vec<(CpuSet, usize)>) -> Call<'_> {
    let nodes = nodes(machine);
    Box::new(move || {
        let demands: Vec<Demand> = asked
            .iter()
            .map(|(free, n)| Demand::cpus(&machine.kubelet, false, black_box(free), &CpuSet::new(), *n))
            .collect();
        let demands: Vec<&Demand> = demands.iter().collect();
        drop(black_box(winner(policy, &nodes, &demands, None)));
    })
}

/// A request for CPUs, memory and devices on a large machine whose nodes have lost different amounts of each.
struct Large {
    machine: KubeletMachine,
    nodes: NodeSet,
    distances: Distances,
    available: CpuSet,
    memory: Vec<NodeMemory>,
    devices: Vec<Device>,
}

impl Large {
    /// `packages * per_package` nodes of 16 CPUs, then `bare` nodes without CPUs. Of a node up to `taken` CPUs (and
    /// sixteenths of its memory) are taken.
    fn new(packages: u32, per_package: u32, bare: u32, taken: u32) -> Fallible<Self> {
        let numbering = Numbering::ThreadsLast;
        let mut raw = Regular { packages, nodes: per_package, l3: 1, cores: 8, threads: 2, numbering }.raw();
        let with_cpus = packages * per_package;
        for id in with_cpus..with_cpus + bare {
            raw.nodes.push(truepin::topology::RawNode {
                id: NodeId(id),
                cpus: CpuSet::new(),
                memory_bytes: Some(8 << 30),
                distance: None,
            });
        }
        let topology = CpuTopology::assemble(&raw)?;
        let mix = |node: u32, by: u32| {
            node.wrapping_mul(2_654_435_761).wrapping_add(by).rotate_right(by) % (taken + 1)
        };
        let mut available = topology.online().clone();
        for node in topology.nodes() {
            let gone = usize::try_from(mix(node.id.0, 7))?;
            available -= &node.cpus.iter().take(gone).collect();
        }
        let memory = topology.nodes().iter().map(|node| NodeMemory {
            node: node.id,
            free: (8 << 30) - u64::from(mix(node.id.0, 13)) * (512 << 20) - u64::from(node.id.0),
            total: 8 << 30,
        });
        let memory = memory.collect();
        let devices = (0..with_cpus).flat_map(|node| {
            (0..2).map(move |at| Device {
                nodes: NodeSet::single(NodeId(node)),
                free: (node + at) % 3 != 0,
                reusable: false,
            })
        });
        Ok(Self {
            machine: KubeletMachine::new(&topology),
            nodes: topology.nodes().iter().map(|n| n.id).collect(),
            distances: Distances::of(&topology),
            devices: devices.collect(),
            available,
            memory,
        })
    }

    /// Of all nodes' CPUs, memory and devices so many hundredths are asked for.
    fn ask(&self, hundredths: [usize; 3]) -> Vec<Demand> {
        let [cpus, memory, devices] = hundredths;
        let n = (self.machine.cpus().len() * cpus / 100).max(1);
        let bytes: u64 = self.memory.iter().map(|m| m.total).sum::<u64>() / 100 * memory as u64;
        let cpus = Demand::cpus(&self.machine, false, &self.available, &CpuSet::new(), n);
        let devices = (self.devices.len() * devices / 100).max(1);
        let devices = Demand::devices(&self.nodes, &self.devices, devices);
        [Some(cpus), Demand::memory(&[(bytes.max(1), &self.memory)]), devices].into_iter().flatten().collect()
    }
}

/// Machines of up to 64 nodes with CPUs, and of many nodes without: free, crowded, and so tight that little is left.
pub(crate) fn large(part: &str) -> Fallible<Vec<(String, Call<'static>)>> {
    use AlignmentPolicy::{BestEffort, SingleNumaNode};
    let mut all: Vec<(String, Call<'static>)> = Vec::new();
    let shapes =
        [(2, 1, 0), (2, 1, 32), (2, 4, 0), (4, 4, 0), (16, 1, 0), (8, 4, 0), (16, 4, 0), (8, 8, 960)];
    for (packages, per_package, bare) in shapes {
        let name = format!("{} nodes with CPUs, {bare} without", packages * per_package);
        for (load, taken) in [("free", 0), ("crowded", 15)] {
            for (share, hundredths) in
                [("a few", [1, 1, 1]), ("a fifth", [20, 20, 20]), ("much", [45, 30, 45])]
            {
                for (policy, closest) in [(BestEffort, false), (BestEffort, true), (SingleNumaNode, false)] {
                    let near = if closest { " closest" } else { "" };
                    let id = format!("winner/{name}/{load}/{share}/{}{near}", policy.name());
                    if !id.contains(part) {
                        continue;
                    }
                    let machine = Large::new(packages, per_package, bare, taken)?;
                    let distances = closest.then(|| machine.distances.clone());
                    let found = {
                        let demands = machine.ask(hundredths);
                        let demands: Vec<&Demand> = demands.iter().collect();
                        winner(policy, &machine.nodes, &demands, distances.as_ref())
                    };
                    let how = match (found.merged.preferred, found.exact) {
                        (_, false) => " (cut short)",
                        (true, _) => "",
                        (false, _) => " (not preferred)",
                    };
                    let call: Call<'static> = Box::new(move || {
                        let demands = machine.ask(black_box(hundredths));
                        let demands: Vec<&Demand> = demands.iter().collect();
                        drop(black_box(winner(policy, &machine.nodes, &demands, distances.as_ref())));
                    });
                    all.push((format!("{id}{how}"), call));
                }
            }
        }
    }
    Ok(all)
}
