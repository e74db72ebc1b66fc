//! cAdvisor's machine-info JSON (`/api/v1.3/machine`), from which the kubelet makes its picture of the machine.
//!
//! Problem: a cluster's monitoring has this for every node, long after anybody could log in.
//! Steps: serde reads nodes, cores and caches; cores become statements about threads, equal `socket_id`s packages,
//! equal cache ids shared caches.
//! Source: cAdvisor `info/v1/machine.go` (the fields) and `utils/sysinfo/sysinfo.go` (how they are filled).
//!
//! What the format does not say stays unknown: everything but online CPUs, dies, clusters, an L2 shared by several cores.
//! Where the kernel shows no NUMA nodes cAdvisor lists packages in their place, without memory and distances: those are
//! no nodes here, because a package is not a node. A core id that repeats within a package makes one core of several there.

use super::{Level, RawGroup, RawNode, RawTopology};
use crate::{
    cpuset::{CpuId, CpuSet},
    idset::MAX_ID,
    nodeset::NodeId,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Bytes of a file at most. 2048 CPUs are 1 MB.
pub const LONGEST: usize = 16 << 20;
/// Cores at most, twice what Linux can have CPUs: a core named 65535 takes 8 KiB, however short its text.
const MOST_CORES: usize = 16_384;
/// NUMA nodes at most: the kernel's `MAX_NUMNODES`.
const MOST_NODES: usize = 1024;

/// Why a text is no machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineInfoError {
    /// Not the JSON of a machine.
    #[error("{source_name}: no machine-info")]
    Json {
        /// Where the text was read.
        source_name: String,
        /// What is wrong, with line and column.
        source: serde_json::Error,
    },
    /// JSON of something else.
    #[error("{source_name}: no machine-info: the key \"topology\" is missing or holds no nodes")]
    Other {
        /// Where the text was read.
        source_name: String,
    },
    /// More than any machine has.
    #[error("{source_name}: more than {most} {what}")]
    Bounds {
        /// Where the text was read.
        source_name: String,
        /// Of what.
        what: &'static str,
        /// How many may be.
        most: usize,
    },
    /// A number that is not what it should be.
    #[error("{source_name}: node {node}: {key} {value} is not {expected}")]
    Value {
        /// Where the text was read.
        source_name: String,
        /// The node in whose entry it is.
        node: i64,
        /// The key.
        key: &'static str,
        /// What it holds.
        value: i128,
        /// What it should hold.
        expected: &'static str,
    },
}

/// Go writes `null` for a list that it never made.
#[derive(Deserialize)]
struct Machine {
    topology: Option<Vec<Node>>,
    num_cores: Option<i64>,
}

#[derive(Deserialize)]
struct Node {
    #[serde(rename = "node_id")]
    id: i64,
    memory: Option<u64>,
    distances: Option<Vec<u64>>,
    cores: Option<Vec<Core>>,
    caches: Option<Vec<Cache>>,
}

#[derive(Deserialize)]
struct Core {
    #[serde(rename = "core_id")]
    id: i64,
    thread_ids: Option<Vec<i64>>,
    caches: Option<Vec<Cache>>,
    /// Caches that several cores share, and that do not cover the node (since 0.46).
    uncore_caches: Option<Vec<Cache>>,
    /// Since 0.36.
    socket_id: Option<i64>,
    book_id: Option<String>,
    drawer_id: Option<String>,
}

#[derive(Deserialize)]
struct Cache {
    /// Since 0.46.
    id: Option<i64>,
    level: i64,
    #[serde(default, rename = "type")]
    kind: String,
}

/// A group of which parts are met one after the other: level, and what is equal in all parts.
type Key<'a> = (Level, &'a str, &'a str, i64);

/// Reads a file's text; `source_name` is for messages.
pub fn parse(text: &str, source_name: &str) -> Result<RawTopology, MachineInfoError> {
    let bounds = |what, most| MachineInfoError::Bounds { source_name: source_name.into(), what, most };
    if text.len() > LONGEST {
        return Err(bounds("bytes", LONGEST));
    }
    let machine: Machine = serde_json::from_str(text.trim_start_matches('\u{feff}'))
        .map_err(|source| MachineInfoError::Json { source_name: source_name.into(), source })?;
    let nodes = machine.topology.unwrap_or_default();
    if nodes.is_empty() {
        return Err(MachineInfoError::Other { source_name: source_name.into() });
    }
    if nodes.len() > MOST_NODES {
        return Err(bounds("NUMA nodes", MOST_NODES));
    }
    if nodes.iter().map(|n| n.cores.as_ref().map_or(0, Vec::len)).sum::<usize>() > MOST_CORES {
        return Err(bounds("cores", MOST_CORES));
    }

    let mut raw = RawTopology { source: source_name.into(), ..RawTopology::default() };
    let mut groups: BTreeMap<Key<'_>, CpuSet> = BTreeMap::new();
    let packages_only = nodes.iter().all(stands_for_package);
    for node in &nodes {
        let value = |key, value: i128, expected| MachineInfoError::Value {
            source_name: source_name.into(),
            node: node.id,
            key,
            value,
            expected,
        };
        let mut cpus = CpuSet::new();
        for core in node.cores.iter().flatten() {
            let threads =
                threads(core).map_err(|id| value("thread_ids", id.into(), "the number of a CPU"))?;
            cpus |= &threads;
            state_core(core, &threads, &mut raw, &mut groups);
        }
        node_caches(node, &cpus, &mut raw);
        raw.listed |= &cpus;
        if packages_only {
            continue;
        }
        let id = u32::try_from(node.id).ok().filter(|id| *id <= MAX_ID);
        let id = id.ok_or_else(|| value("node_id", node.id.into(), "the number of a NUMA node"))?;
        let distance = node.distances.as_ref().filter(|row| !row.is_empty());
        let distance = distance.map(|row| row.iter().map(|d| u32::try_from(*d).map_err(|_| *d)).collect());
        raw.nodes.push(RawNode {
            id: NodeId(id),
            cpus,
            // 0 is what it writes when it could not read the size.
            memory_bytes: node.memory.filter(|bytes| *bytes > 0),
            distance: distance.transpose().map_err(|d| value("distances", d.into(), "a distance"))?,
        });
    }
    raw.online = Some(raw.listed.clone());
    for ((level, .., id), cpus) in groups {
        raw.groups.push(RawGroup { level, id: Some(id), told_by: None, cpus });
    }
    if packages_only {
        raw.notes
            .push("its nodes are packages, as cAdvisor writes where the kernel shows no NUMA nodes".into());
    }
    if let Some(n) = machine.num_cores
        && usize::try_from(n) != Ok(raw.listed.len())
    {
        raw.notes.push(format!("num_cores is {n}, and {} CPUs are described", raw.listed.len()));
    }
    Ok(raw)
}

/// Neither memory nor distances, and each core's socket is the node: a real node has both files.
fn stands_for_package(node: &Node) -> bool {
    let is_silent = node.memory.unwrap_or(0) == 0 && node.distances.as_ref().is_none_or(Vec::is_empty);
    is_silent && node.cores.iter().flatten().all(|core| core.socket_id == Some(node.id))
}

fn threads(core: &Core) -> Result<CpuSet, i64> {
    let id = |id: &i64| u32::try_from(*id).ok().filter(|id| *id <= MAX_ID).map(CpuId).ok_or(*id);
    core.thread_ids.iter().flatten().map(id).collect()
}

/// What a core says of itself and of what it shares with others.
fn state_core<'a>(
    core: &'a Core,
    threads: &CpuSet,
    raw: &mut RawTopology,
    groups: &mut BTreeMap<Key<'a>, CpuSet>,
) {
    if threads.is_empty() {
        return;
    }
    let state = |level, id| RawGroup { level, id, told_by: None, cpus: threads.clone() };
    raw.groups.push(state(Level::Core, Some(core.id)));
    for level in core.caches.iter().flatten().filter_map(level) {
        raw.groups.push(state(level, None));
    }
    let mut share = |key| *groups.entry(key).or_default() |= threads;
    let (drawer, book) = (core.drawer_id.as_deref().unwrap_or(""), core.book_id.as_deref().unwrap_or(""));
    // -1 is "no idea", and not the same package for all who say it.
    if let Some(socket) = core.socket_id.filter(|id| *id >= 0) {
        share((Level::Package, drawer, book, socket));
    }
    for (level, outer, own) in [(Level::Book, drawer, book), (Level::Drawer, "", drawer)] {
        if let Ok(id) = own.trim().parse::<i64>() {
            share((level, outer, "", id));
        }
    }
    for cache in core.uncore_caches.iter().flatten() {
        if let (Some(level), Some(id)) = (level(cache), cache.id) {
            share((level, "", "", id));
        }
    }
}

/// Caches that cover as many CPUs as the node has: its own, if there is but one of that level.
fn node_caches(node: &Node, cpus: &CpuSet, raw: &mut RawTopology) {
    let levels: Vec<Level> = node.caches.iter().flatten().filter_map(level).collect();
    for level in [Level::L2, Level::L3] {
        match levels.iter().filter(|l| **l == level).count() {
            0 => {}
            1 if !cpus.is_empty() => {
                raw.groups.push(RawGroup { level, id: None, told_by: None, cpus: cpus.clone() });
            }
            _ => {
                let id = node.id;
                raw.notes
                    .push(format!("node {id} has several {level} of its own: who shares them is unknown"));
            }
        }
    }
}

fn level(cache: &Cache) -> Option<Level> {
    match cache.level {
        _ if cache.kind.eq_ignore_ascii_case("instruction") => None,
        2 => Some(Level::L2),
        3 => Some(Level::L3),
        _ => None,
    }
}
