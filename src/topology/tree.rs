//! The machine as a tree on a terminal: package, node, last-level cache, cores.
//!
//! Levels that hold the same CPUs share a line, cores alike share a line, so that 128 CPUs fit on a screen. Where a
//! node spans packages and no package spans nodes, the node comes first.

use super::{CpuTopology, Group, NumaNode};
use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::NodeSet,
};
use std::{collections::BTreeMap, fmt::Write as _};

/// Nodes up to which the matrix of distances is shown.
const MATRIX: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Branch {
    Package,
    Node,
    Llc,
}

/// The tree, with a newline at the end of each line.
#[must_use]
pub fn tree(topology: &CpuTopology) -> String {
    let mut lines = vec![summary(topology)];
    let spans_packages =
        |n: &NumaNode| topology.packages().iter().filter(|p| !p.cpus.is_disjoint(&n.cpus)).count() > 1;
    let spans_nodes = |p: &Group| topology.nodes_of(&p.cpus).len() > 1;
    let node_first =
        topology.nodes().iter().any(spans_packages) && !topology.packages().iter().any(spans_nodes);
    let mut branches =
        if node_first { vec![Branch::Node, Branch::Package] } else { vec![Branch::Package, Branch::Node] };
    // A cache for each core is no news.
    if topology.llcs().iter().any(|l| topology.siblings(l.leader).is_none_or(|core| !l.cpus.is_subset(core)))
    {
        branches.push(Branch::Llc);
    }
    grow(topology, topology.online(), &branches, "", &mut lines);
    let mut memories: BTreeMap<String, NodeSet> = BTreeMap::new();
    for node in topology.nodes().iter().filter(|n| n.cpus.is_empty()) {
        memories.entry(memory(node)).or_default().insert(node.id);
    }
    for (memory, nodes) in memories {
        let (name, each) = if nodes.len() == 1 { ("node", "") } else { ("nodes", " each") };
        let each = if memory.is_empty() { "" } else { each };
        lines.push(format!("{name} {nodes} without online CPUs{memory}{each}"));
    }
    for (name, set) in [
        ("offline", Some(topology.offline())),
        ("isolated", topology.isolated()),
        ("without tick (nohz_full)", topology.nohz_full()),
    ] {
        if let Some(set) = set.filter(|s| !s.is_empty()) {
            lines.push(format!("{name}: {set}"));
        }
    }
    distances(topology, &mut lines);
    lines.extend(topology.oddities().iter().map(|o| format!("note: {o}")));
    lines.push(String::new());
    lines.join("\n")
}

/// `12 cores`.
fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn summary(topology: &CpuTopology) -> String {
    let mut text =
        format!("{}, {}", counted(topology.cpus().len(), "CPU"), counted(topology.cores().len(), "core"));
    for (n, what) in [
        (topology.llcs().len(), "last-level cache"),
        (topology.nodes().len(), "NUMA node"),
        (topology.dies().len(), "die"),
        (topology.packages().len(), "package"),
    ] {
        // Dies that are the packages are no news.
        if n > 0 && (what != "die" || n != topology.packages().len()) {
            let _ = write!(text, ", {}", counted(n, what));
        }
    }
    text
}

/// ` 31.2 GiB`, down to a tenth.
fn memory(node: &NumaNode) -> String {
    let tenths = |bytes: u64| (bytes >> 20) * 10 / 1024;
    node.memory_bytes.map_or(String::new(), |b| format!(", {}.{} GiB", tenths(b) / 10, tenths(b) % 10))
}

/// The parts of `cpus` at a branch with their names; what is in no group comes last and has none.
fn parts(topology: &CpuTopology, cpus: &CpuSet, branch: Branch) -> Vec<(Option<String>, CpuSet)> {
    let part = |name: String, all: &CpuSet| {
        let mine = all.intersection(cpus);
        let name = if mine == *all { name } else { format!("{name} (part)") };
        (!mine.is_empty()).then_some((Some(name), mine))
    };
    let mut found: Vec<(Option<String>, CpuSet)> = match branch {
        Branch::Package => {
            topology.packages().iter().filter_map(|p| part(package(topology, p), &p.cpus)).collect()
        }
        Branch::Node => {
            let nodes = topology.nodes().iter().filter(|n| !n.cpus.is_empty());
            nodes.filter_map(|n| part(format!("node {}{}", n.id, memory(n)), &n.cpus)).collect()
        }
        Branch::Llc => {
            topology.llcs().iter().filter_map(|l| part(format!("LLC of CPU {}", l.leader), &l.cpus)).collect()
        }
    };
    let rest = found.iter().fold(cpus.clone(), |rest, (_, part)| rest.difference(part));
    if !rest.is_empty() {
        found.push((None, rest));
    }
    found
}

/// By the kernel's number if that is one and unique.
fn package(topology: &CpuTopology, package: &Group) -> String {
    let same = |p: &&Group| p.kernel_id == package.kernel_id;
    match package.kernel_id {
        Some(id) if id >= 0 && topology.packages().iter().filter(same).count() == 1 => {
            format!("package {id}")
        }
        _ => format!("package of CPU {}", package.leader),
    }
}

/// Adds a line for every part of `cpus`, and below it those of its parts.
fn grow(topology: &CpuTopology, cpus: &CpuSet, branches: &[Branch], indent: &str, lines: &mut Vec<String>) {
    let Some((branch, below)) = branches.split_first() else { return };
    let parts = parts(topology, cpus, *branch);
    if let [(None, all)] = parts.as_slice() {
        return grow(topology, all, below, indent, lines);
    }
    let last = parts.len() - 1;
    for (at, (name, part)) in parts.iter().enumerate() {
        let mut names: Vec<String> = name.iter().cloned().collect();
        // Lower levels with the same CPUs go on this line.
        let mut below = below;
        while let Some((next, rest)) = below.split_first() {
            let mut same = self::parts(topology, part, *next);
            if same.len() > 1 {
                break;
            }
            names.extend(same.pop().and_then(|(name, _)| name));
            below = rest;
        }
        let name = if names.is_empty() { "elsewhere".into() } else { names.join(", ") };
        let (fork, deeper) = if at == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let leaf =
            below.iter().all(|b| self::parts(topology, part, *b).iter().all(|(name, _)| name.is_none()));
        if leaf {
            lines.push(format!("{indent}{fork}{name}: {}", cores(topology, part)));
        } else {
            lines.push(format!("{indent}{fork}{name}: {}, {}", counted(part.len(), "CPU"), list(part)));
            grow(topology, part, below, &format!("{indent}{deeper}"), lines);
        }
    }
}

/// `4 cores of 2 threads 0-3 + 64-67, 8 cores 12-19`.
fn cores(topology: &CpuTopology, cpus: &CpuSet) -> String {
    let mut by_size: BTreeMap<usize, Vec<Vec<CpuId>>> = BTreeMap::new();
    for core in topology.cores() {
        let threads: Vec<CpuId> = core.cpus.intersection(cpus).iter().collect();
        if !threads.is_empty() {
            by_size.entry(threads.len()).or_default().push(threads);
        }
    }
    let alike = by_size.iter().rev().map(|(size, cores)| {
        let all: CpuSet = cores.iter().flatten().copied().collect();
        let count = counted(cores.len(), "core");
        if *size == 1 {
            return format!("{count} {}", list(&all));
        }
        // Threads one after the other need no pairing; else all first threads, all second ones, …
        let in_a_row = cores.iter().all(|c| c.windows(2).all(|w| w[1].0 == w[0].0 + 1));
        let threads = |t: usize| list(&cores.iter().map(|c| c[t]).collect());
        let list =
            if in_a_row { all.to_string() } else { (0..*size).map(threads).collect::<Vec<_>>().join(" + ") };
        format!("{count} of {size} threads {list}")
    });
    alike.collect::<Vec<_>>().join(", ")
}

/// The kernel's list grammar with its strides: `0-108:1/4` for every fourth, as firmware numbers sockets.
fn list(cpus: &CpuSet) -> String {
    let ids: Vec<u32> = cpus.iter().map(|c| c.0).collect();
    if let [first, second, .., last] = ids[..]
        && ids.len() > 3
        && second - first > 1
        && ids.windows(2).all(|w| w[1] - w[0] == second - first)
    {
        return format!("{first}-{last}:1/{}", second - first);
    }
    cpus.to_string()
}

fn distances(topology: &CpuTopology, lines: &mut Vec<String>) {
    let nodes = topology.nodes();
    if nodes.len() < 2 || nodes.len() > MATRIX || nodes.iter().all(|n| n.distance.is_none()) {
        return;
    }
    let row = |head: String, cells: Vec<String>| {
        cells.iter().fold(format!("{head:<9}"), |row, cell| format!("{row}{cell:>4}"))
    };
    lines.push(row("distance".into(), nodes.iter().map(|n| n.id.to_string()).collect()));
    for a in nodes {
        let cells = nodes.iter().map(|b| topology.distance(a.id, b.id).to_string()).collect();
        lines.push(row(format!("  node {}", a.id), cells));
    }
}
