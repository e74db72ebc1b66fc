//! The memory manager's checkpoint: the kubelet's verdict, and truepin's.
//!
//! Problem: the memory manager keeps counters for each NUMA node beside the assignments that they follow from, and does
//! not start when the two differ by a kibibyte, which a reboot can bring about.
//! Steps: [`load_memory`] is kubelet 1.36; [`inspect_memory`] checks keys, checksums and the nodes that the assignments
//! name. The counters are not used: what a node has left follows from the assignments, so counters that do not add up
//! are a note.
//! Invariant: as for the CPUs, content that nothing vouches for is not importable.
//!
//! Source: `memorymanager/state/{checkpoint,state_checkpoint,state_mem}.go` of 1.36; version 3 from 1.37.

use super::envelope::{Candidate, Format, Present, Report, absent, open, open_data, vouched};
use super::finding::{Finding, Problem};
use super::layout::{
    BLOCK, Key, Layout, MEMORY_ANY, MEMORY_DATA, MEMORY_NAME, MEMORY_NAME_V1, MEMORY_V1, MEMORY_V2, Value,
};
use super::load::{LoadError, get, or_zero};
use crate::nodeset::{NodeId, NodeSet};

/// Memory that a container holds on NUMA nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Pod UID.
    pub pod: String,
    /// Container name.
    pub container: String,
    /// NUMA nodes, by the kernel's number.
    pub nodes: NodeSet,
    /// `memory` or `hugepages-…`.
    pub resource: String,
    /// Bytes.
    pub bytes: u64,
    /// Whether its nodes are known.
    pub usable: bool,
}

/// The verdict, and what was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryInspection {
    /// `v1` to `v3`, the memory manager's own numbers; `None` for a missing file and one that cannot be told.
    pub format: Option<&'static str>,
    /// The policy in the file.
    pub policy: String,
    /// In the order of pod, container and file.
    pub blocks: Vec<Block>,
    /// Whether the content can be believed.
    pub importable: bool,
    /// What contradicts.
    pub findings: Vec<Finding>,
    /// What is worth saying and contradicts nothing.
    pub notes: Vec<Finding>,
}

/// Whether kubelet 1.36 loads a file; `None` for one that is not there.
pub fn load_memory(file: Option<&[u8]>, policy: &str, pod_level: bool) -> Result<(), LoadError> {
    let Some(bytes) = file else { return Ok(()) };
    let v1 = |names: &[&str]| or_zero(get(bytes, &MEMORY_V1, names));
    let (value, layout) = if pod_level {
        match get(bytes, &MEMORY_V2, &[MEMORY_NAME]) {
            (value, Ok(())) => (value, &MEMORY_V2),
            (left, Err(_)) => {
                let (mut value, result) = v1(&[MEMORY_NAME]);
                result?;
                // Copied over what the failed reading left behind; only the policy matters here.
                if value.text(&MEMORY_V1, "PolicyName").is_empty()
                    && let Some(policy) = value.field_mut(&MEMORY_V1, "PolicyName")
                {
                    *policy = Value::Text(left.text(&MEMORY_V2, "PolicyName").into());
                }
                (value, &MEMORY_V1)
            }
        }
    } else {
        let (value, result) = v1(&[MEMORY_NAME_V1, MEMORY_NAME]);
        result?;
        (value, &MEMORY_V1)
    };
    let found = value.text(layout, "PolicyName");
    if found != policy {
        return Err(LoadError::Policy { found: found.into(), configured: policy.into() });
    }
    // The state is cloned, and the clone follows every table's pointer.
    for (node, tables) in nodes(&value, layout) {
        if let Some((resource, _)) = tables.iter().find(|(_, table)| **table == Value::Pointer(None)) {
            return Err(LoadError::Panic { key: format!("machineState.{node}.memoryMap.{resource}") });
        }
    }
    Ok(())
}

/// The nodes of the machine state, each with its tables by resource.
fn nodes<'a>(value: &'a Value, layout: &Layout) -> Vec<(i64, Vec<(&'a str, &'a Value)>)> {
    let Some(Value::Map(Some(map))) = value.field(layout, "MachineState") else { return Vec::new() };
    let mut nodes = Vec::new();
    for (key, node) in map {
        let (Key::Int(id), Value::Pointer(Some(node))) = (key, node) else { continue };
        // {NumberOfAssignments, MemoryMap, Cells}
        let Value::Struct(fields) = node.as_ref() else { continue };
        nodes.push((*id, fields.get(1).map(Value::members).unwrap_or_default()));
    }
    nodes
}

static CANDIDATES: [Candidate; 3] = [
    Candidate { format: Format::V2, layout: &MEMORY_V1, name: MEMORY_NAME, early: false },
    Candidate { format: Format::V2, layout: &MEMORY_V1, name: MEMORY_NAME_V1, early: true },
    Candidate { format: Format::V3, layout: &MEMORY_V2, name: MEMORY_NAME, early: false },
];

/// Looks at a file's bytes; `None` for a file that is not there. `machine` are the NUMA nodes of this machine, if known.
#[must_use]
pub fn inspect_memory(
    file: Option<&[u8]>,
    policy: Option<&str>,
    machine: Option<&NodeSet>,
) -> MemoryInspection {
    let Some(bytes) = file else { return MemoryInspection { importable: true, ..Default::default() } };
    let mut report = Report::default();
    let mut found = content(bytes, &mut report).unwrap_or_default();
    if let Some(configured) = policy.filter(|p| found.importable && *p != found.policy) {
        let matter = !found.blocks.is_empty();
        report.tell(matter, "policyName", &found.policy, Problem::Policy { configured: configured.into() });
    }
    for block in &mut found.blocks {
        let key = format!("entries.{}.{}", block.pod, block.container);
        for node in machine.map(|m| block.nodes.difference(m)).unwrap_or_default().iter() {
            let problem = Problem::NodeNotOnMachine { node: i64::from(node.0) };
            report.find(&key, block.nodes.to_string(), problem);
            block.usable = false;
        }
    }
    found.findings = report.findings;
    found.notes = report.notes;
    found
}

/// The content that something vouches for; findings and notes are in the report.
fn content(bytes: &[u8], report: &mut Report) -> Option<MemoryInspection> {
    let (value, decoded) = open(bytes, &MEMORY_ANY, report)?;
    if let Err(error) = decoded.result {
        report.find("", "", Problem::Type(error));
        return None;
    }
    absent(&MEMORY_ANY, &decoded, report);
    let there = |key| decoded.present.contains(key);
    let has_data = there("data") || there("dataChecksum");
    let has_pods = !value.map(&MEMORY_ANY, "PodEntries").is_empty();
    let stored = value.uint(&MEMORY_ANY, "Checksum");
    let present = Present { checksum: there("checksum"), pods: has_pods };
    // The memory manager's second version has pods as the CPU manager's third does.
    let by_shape = if has_pods { Format::V3 } else { Format::V1 };
    let format = vouched(bytes, &CANDIDATES, stored, by_shape, present, report);
    let format = format.map(|f| if f == Format::V3 { "v2" } else { "v1" });
    let data = has_data.then(|| open_data(&value, &MEMORY_ANY, &MEMORY_DATA, report)).flatten();
    let (value, layout, format): (_, &'static Layout, _) = match data {
        Some(data) => (data, &MEMORY_DATA, "v3"),
        None => (value, &MEMORY_ANY, format.filter(|_| !has_data || stored != 0)?),
    };
    counters(&value, layout, report);
    Some(MemoryInspection {
        format: Some(format),
        policy: value.text(layout, "PolicyName").into(),
        blocks: blocks(&value, layout, report),
        importable: true,
        ..MemoryInspection::default()
    })
}

fn blocks(value: &Value, layout: &'static Layout, report: &mut Report) -> Vec<Block> {
    let known: Vec<i64> = nodes(value, layout).into_iter().map(|(id, _)| id).collect();
    let mut blocks = Vec::new();
    for (pod, containers) in value.map(layout, "Entries") {
        for (container, list) in containers.members() {
            let Value::List(Some(list)) = list else { continue };
            for block in list {
                let mut usable = true;
                let mut set = NodeSet::new();
                let affinity = match block.field(&BLOCK, "NUMAAffinity") {
                    Some(Value::List(Some(ids))) => ids.as_slice(),
                    _ => &[],
                };
                for id in
                    affinity.iter().filter_map(|v| if let Value::Int(id) = v { Some(*id) } else { None })
                {
                    if !known.contains(&id) {
                        let key = format!("entries.{pod}.{container}");
                        report.find(key, id.to_string(), Problem::NodeUnknown { node: id });
                        usable = false;
                    }
                    usable &= u32::try_from(id).is_ok_and(|id| {
                        set.insert(NodeId(id));
                        set.contains(NodeId(id))
                    });
                }
                blocks.push(Block {
                    pod: pod.into(),
                    container: container.into(),
                    nodes: set,
                    resource: block.text(&BLOCK, "Type").into(),
                    bytes: block.uint(&BLOCK, "Size"),
                    usable,
                });
            }
        }
    }
    blocks
}

/// `free + reserved = allocatable = total - systemReserved` on every node for every resource.
fn counters(value: &Value, layout: &'static Layout, report: &mut Report) {
    for (node, tables) in nodes(value, layout) {
        for (resource, table) in tables {
            let Value::Pointer(Some(table)) = table else { continue };
            let Value::Struct(fields) = table.as_ref() else { continue };
            let numbers: Vec<u64> =
                fields.iter().map(|v| if let Value::Uint(n) = v { *n } else { 0 }).collect();
            let [total, system, allocatable, reserved, free] = numbers.as_slice() else { continue };
            let sums = total.checked_sub(*system) == Some(*allocatable)
                && free.checked_add(*reserved) == Some(*allocatable);
            if !sums {
                let what = format!(
                    "total {total}, systemReserved {system}, allocatable {allocatable}, reserved {reserved}, free {free}"
                );
                let key = format!("machineState.{node}.memoryMap.{resource}");
                report.note(key, "", Problem::Counters { what });
            }
        }
    }
}
