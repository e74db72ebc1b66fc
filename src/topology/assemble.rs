//! [`RawTopology`] to [`CpuTopology`]: what the statements mean, and what to do when they contradict each other.
//!
//! Steps: the online set; per level one vote (below); cores for CPUs that nobody mentions; last-level caches;
//! nodes (the first that lists a CPU has it); the distance matrix.
//!
//! The vote: a CPU belongs to the set, cut to online CPUs, that the most CPUs state for it; its own word wins a tie,
//! then the lowest leader. CPUs that chose the same set are a group. On a sound machine every member states the
//! same set, or only the leader was read, and the vote changes nothing; on a damaged one (firmware that lists a
//! foreign CPU) the result is still a partition, and an oddity says what was overruled.

use super::{
    Cpu, CpuTopology, Group, LOCAL_DISTANCE, Level, NumaNode, REMOTE_DISTANCE, RawGroup, RawNode, RawTopology,
};
use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::{NodeId, NodeSet},
};
use std::collections::BTreeMap;

/// Why no topology can be made of what was read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Nothing says that any CPU is online.
    #[error("{source_name}: no CPU is online")]
    NoCpu {
        /// Where the topology was read.
        source_name: String,
    },
    /// A node number came twice.
    #[error("{source_name}: NUMA node {node} is described twice")]
    NodeTwice {
        /// Where the topology was read.
        source_name: String,
        /// The node.
        node: NodeId,
    },
}

/// The groups of one level, and for each online CPU (by place) the index of its group.
struct Partition {
    groups: Vec<Group>,
    of_cpu: Vec<Option<usize>>,
}

impl CpuTopology {
    /// Validates what a source says; see the module for the rules.
    pub fn assemble(raw: &RawTopology) -> Result<Self, TopologyError> {
        let mut oddities = raw.notes.clone();
        let online = online(raw, &mut oddities);
        if online.is_empty() {
            return Err(TopologyError::NoCpu { source_name: raw.source.clone() });
        }
        let offline = raw.present.as_ref().unwrap_or(&raw.listed).difference(&online);
        let ids: Vec<CpuId> = online.iter().collect();

        let mut parts: Vec<Partition> = Vec::with_capacity(Level::ALL.len());
        for level in Level::ALL {
            let stated: Vec<&RawGroup> = raw.groups.iter().filter(|g| g.level == level).collect();
            // Package comes before die in `ALL`.
            let package = (level == Level::Die).then(|| &parts[Level::Package.index()]);
            parts.push(vote(level, &stated, &online, &ids, package, &mut oddities));
        }
        let (cores, core_of) = cores(&parts[Level::Core.index()], &ids, &mut oddities);
        let (llcs, llc_of) = llcs(&parts[Level::L3.index()], &parts[Level::L2.index()]);
        let (nodes, node_of) = nodes(raw, &online, &ids, &mut oddities)?;
        let distances = distances(raw, &nodes, &mut oddities);

        let cpus = ids
            .iter()
            .enumerate()
            .map(|(i, &id)| Cpu {
                id,
                node: node_of[i],
                core: core_of[i],
                llc: llc_of[i],
                groups: std::array::from_fn(|level| parts[level].of_cpu[i]),
            })
            .collect();
        let mut parts = parts.into_iter();
        let groups = std::array::from_fn(|_| parts.next().map(|p| p.groups).unwrap_or_default());
        Ok(Self {
            online,
            offline,
            present: raw.present.clone(),
            possible: raw.possible.clone(),
            isolated: raw.isolated.clone(),
            nohz_full: raw.nohz_full.clone(),
            cpus,
            groups,
            cores,
            llcs,
            nodes,
            distances,
            oddities,
        })
    }
}

fn online(raw: &RawTopology, oddities: &mut Vec<String>) -> CpuSet {
    let Some(online) = &raw.online else {
        let online = raw.listed.difference(&raw.listed_offline);
        oddities.push(format!("no list of online CPUs: {online} taken from each CPU's own entry"));
        return online;
    };
    for (name, set) in [("present", &raw.present), ("possible", &raw.possible)] {
        if let Some(set) = set
            && !online.is_subset(set)
        {
            oddities.push(format!("CPUs {} are online and not {name}", online.difference(set)));
        }
    }
    online.clone()
}

/// See the module comment. `package` is given for dies: a die with a negative number is the kernel's "no die level
/// here" (its set then holds the CPU alone), and the package is the die.
fn vote(
    level: Level,
    stated: &[&RawGroup],
    online: &CpuSet,
    ids: &[CpuId],
    package: Option<&Partition>,
    oddities: &mut Vec<String>,
) -> Partition {
    let place = |cpu: CpuId| ids.binary_search(&cpu).ok();
    // Every distinct set once: its votes, and the number that came with the first of them.
    let mut index: BTreeMap<CpuSet, usize> = BTreeMap::new();
    let mut sets: Vec<(CpuSet, usize, Option<i64>)> = Vec::new();
    let mut own: Vec<Option<usize>> = vec![None; ids.len()];
    for group in stated {
        let teller = group.told_by.and_then(place);
        let mut cut = group.cpus.intersection(online);
        if let Some(package) = package
            && group.id.is_some_and(|id| id < 0)
        {
            let of = teller.or_else(|| cut.first().and_then(place)).and_then(|at| package.of_cpu[at]);
            let Some(of) = of else { continue };
            cut.clone_from(&package.groups[of].cpus);
        }
        if cut.is_empty() {
            continue;
        }
        let at = *index.entry(cut.clone()).or_insert_with(|| {
            sets.push((cut, 0, group.id));
            sets.len() - 1
        });
        sets[at].1 += 1;
        if let Some(teller) = teller {
            own[teller] = Some(at);
        }
    }

    let mut choice: Vec<Option<usize>> = vec![None; ids.len()];
    for (cpus, at) in &index {
        for cpu in cpus.iter() {
            let Some(i) = place(cpu) else { continue };
            let weight =
                |set: usize| (sets[set].1, own[i] == Some(set), std::cmp::Reverse(sets[set].0.first()));
            if choice[i].is_none_or(|old| weight(*at) > weight(old)) {
                choice[i] = Some(*at);
            }
        }
    }

    let mut members: BTreeMap<usize, CpuSet> = BTreeMap::new();
    for (i, set) in choice.iter().enumerate() {
        if let Some(set) = set {
            members.entry(*set).or_default().insert(ids[i]);
        }
    }
    for (at, (cpus, ..)) in sets.iter().enumerate() {
        let kept = members.get(&at).cloned().unwrap_or_default();
        if kept != *cpus {
            let kept = if kept.is_empty() { "none of them".into() } else { format!("only {kept}") };
            oddities.push(format!(
                "{level} of CPUs {cpus} contradicts what other CPUs say: {kept} kept together"
            ));
        }
    }
    let mut groups: Vec<Group> = members
        .into_iter()
        .filter_map(|(set, cpus)| Some(Group { leader: cpus.first()?, cpus, kernel_id: sets[set].2 }))
        .collect();
    groups.sort_by_key(|g| g.leader);
    let mut of_cpu = vec![None; ids.len()];
    for (g, group) in groups.iter().enumerate() {
        for at in group.cpus.iter().filter_map(place) {
            of_cpu[at] = Some(g);
        }
    }
    Partition { groups, of_cpu }
}

/// Cores that cover every online CPU: one that is in no core is taken as a core of its own, since nothing is known
/// to share with it.
fn cores(stated: &Partition, ids: &[CpuId], oddities: &mut Vec<String>) -> (Vec<Group>, Vec<usize>) {
    let mut lone = CpuSet::new();
    let mut cores = stated.groups.clone();
    for (i, &id) in ids.iter().enumerate() {
        if stated.of_cpu[i].is_none() {
            lone.insert(id);
            cores.push(Group { leader: id, cpus: CpuSet::single(id), kernel_id: None });
        }
    }
    if !lone.is_empty() {
        oddities
            .push(format!("nothing says which core CPUs {lone} belong to: each taken as a core of its own"));
    }
    cores.sort_by_key(|c| c.leader);
    let mut of_cpu = vec![0; ids.len()];
    for (c, core) in cores.iter().enumerate() {
        for at in core.cpus.iter().filter_map(|cpu| ids.binary_search(&cpu).ok()) {
            of_cpu[at] = c;
        }
    }
    (cores, of_cpu)
}

/// Of each CPU the L3, else the L2 (Intel's low-power island and most phones have no L3 there). An L2 that some of
/// its CPUs see below an L3 is cut to the others.
fn llcs(l3: &Partition, l2: &Partition) -> (Vec<Group>, Vec<Option<usize>>) {
    let mut llcs = l3.groups.clone();
    let mut of_cpu = l3.of_cpu.clone();
    let covered: CpuSet = l3.groups.iter().fold(CpuSet::new(), |all, g| all.union(&g.cpus));
    for group in &l2.groups {
        let cpus = group.cpus.difference(&covered);
        if let Some(leader) = cpus.first() {
            llcs.push(Group { leader, cpus, kernel_id: group.kernel_id });
        }
    }
    llcs.sort_by_key(|g| g.leader);
    let by_leader: BTreeMap<CpuId, usize> = llcs.iter().enumerate().map(|(i, g)| (g.leader, i)).collect();
    let mut l2_of: Vec<Option<usize>> = vec![None; l2.groups.len()];
    for (i, group) in l2.groups.iter().enumerate() {
        l2_of[i] = group.cpus.difference(&covered).first().and_then(|leader| by_leader.get(&leader).copied());
    }
    for (at, of) in of_cpu.iter_mut().enumerate() {
        *of = match *of {
            Some(g) => by_leader.get(&l3.groups[g].leader).copied(),
            None => l2.of_cpu[at].and_then(|g| l2_of[g]),
        };
    }
    (llcs, of_cpu)
}

type Nodes = (Vec<NumaNode>, Vec<Option<NodeId>>);

fn nodes(
    raw: &RawTopology,
    online: &CpuSet,
    ids: &[CpuId],
    oddities: &mut Vec<String>,
) -> Result<Nodes, TopologyError> {
    let mut sorted: Vec<&RawNode> = raw.nodes.iter().collect();
    sorted.sort_by_key(|n| n.id);
    if let Some(twice) = sorted.windows(2).find(|w| w[0].id == w[1].id) {
        return Err(TopologyError::NodeTwice { source_name: raw.source.clone(), node: twice[0].id });
    }
    let mut taken = CpuSet::new();
    let mut overlaps: BTreeMap<CpuSet, NodeSet> = BTreeMap::new();
    let mut of_cpu = vec![None; ids.len()];
    let mut nodes = Vec::with_capacity(sorted.len());
    for node in sorted {
        let mine = node.cpus.intersection(online);
        let cpus = mine.difference(&taken);
        if cpus != mine {
            overlaps.entry(mine.intersection(&taken)).or_default().insert(node.id);
        }
        for at in cpus.iter().filter_map(|cpu| ids.binary_search(&cpu).ok()) {
            of_cpu[at] = Some(node.id);
        }
        taken |= &cpus;
        nodes.push(NumaNode {
            id: node.id,
            cpus,
            listed: node.cpus.clone(),
            memory_bytes: node.memory_bytes,
            distance: node.distance.clone(),
        });
    }
    for (cpus, nodes) in overlaps {
        let list = if nodes.len() == 1 { "NUMA node lists" } else { "NUMA nodes list" };
        oddities.push(format!("{list} CPUs {cpus} of a lower node ({nodes}): left there"));
    }
    let homeless = online.difference(&taken);
    if !nodes.is_empty() && !homeless.is_empty() {
        oddities.push(format!("CPUs {homeless} are in no NUMA node: taken as a group of their own"));
    }
    Ok((nodes, of_cpu))
}

/// The matrix over `nodes`. The kernel prints one column per node that is online; in trees that were cut after
/// they were recorded a row has more columns than nodes are left, and is then read by the source's own list of
/// nodes of that length (`node/online`, `node/possible`, or all numbers up to the highest).
fn distances(raw: &RawTopology, nodes: &[NumaNode], oddities: &mut Vec<String>) -> Vec<u32> {
    let ids: NodeSet = nodes.iter().map(|n| n.id).collect();
    let up_to_highest: NodeSet = (0..=ids.last().map_or(0, |n| n.0)).map(NodeId).collect();
    let mut matrix = Vec::with_capacity(nodes.len() * nodes.len());
    for node in nodes {
        let columns = |row: &Vec<u32>| {
            [Some(&ids), raw.nodes_online.as_ref(), raw.nodes_possible.as_ref(), Some(&up_to_highest)]
                .into_iter()
                .flatten()
                .find(|set| set.len() == row.len())
        };
        let row: BTreeMap<NodeId, u32> = match node.distance.as_ref().map(|row| (row, columns(row))) {
            None => BTreeMap::new(),
            Some((row, Some(columns))) => {
                if *columns != ids {
                    oddities.push(format!(
                        "NUMA node {} gives {} distances for {} nodes: read as those to nodes {columns}",
                        node.id,
                        row.len(),
                        nodes.len(),
                    ));
                }
                columns.iter().zip(row.iter().copied()).collect()
            }
            Some((row, None)) => {
                oddities.push(format!(
                    "NUMA node {} gives {} distances for {} nodes: ignored",
                    node.id,
                    row.len(),
                    nodes.len(),
                ));
                BTreeMap::new()
            }
        };
        for other in nodes {
            let plain = if other.id == node.id { LOCAL_DISTANCE } else { REMOTE_DISTANCE };
            matrix.push(row.get(&other.id).copied().unwrap_or(plain));
        }
    }
    matrix
}
