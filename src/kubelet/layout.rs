//! What the kubelet's checkpoints are made of: Go types as data, frozen.
//!
//! Problem: a checkpoint's checksum covers a *dump* of a Go value, with the names of its types and fields in it. An
//! upgrade that renamed a type broke every file in the field (1.18). Here the names are text of this table, so no
//! rename in this program can change a checksum.
//! Steps: a [`Layout`] says name, JSON key and type of each field; reading ([`super::json`]), writing and dumping
//! ([`super::dump`]) are one function each over these tables.
//! Invariant: the tables are history and never change; a new version of the kubelet is a new table.
//!
//! Source: `pkg/kubelet/cm/{cpumanager,memorymanager}/state/{checkpoint,state}.go` of Kubernetes 1.12 to 1.37.

use super::ranges::CpuRanges;
use std::collections::BTreeMap;

/// A Go type. The first text is its name as `reflect` prints it.
#[derive(Debug)]
pub(super) enum Type {
    Text(&'static str),
    /// 64 bits.
    Uint(&'static str),
    /// 64 bits.
    Int(&'static str),
    List(&'static str, &'static Type),
    Map(&'static str, Keys, &'static Type),
    Pointer(&'static Type),
    Struct(&'static Layout),
    /// `state.PodEntry` of the CPU manager: a struct around a `cpuset.CPUSet` that has its own JSON form.
    PodCpus,
}

/// The keys of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keys {
    Text,
    Int,
}

/// A Go struct.
#[derive(Debug)]
pub(super) struct Layout {
    /// As `reflect` prints it, package included.
    pub(super) name: &'static str,
    pub(super) fields: &'static [Field],
}

/// A field of a struct.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) key: &'static str,
    pub(super) omit_empty: bool,
    pub(super) ty: Type,
}

/// A key of a map.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Text(String),
    Int(i64),
}

/// A Go value. `None` is nil, which is not the same as empty: the dump shows it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Text(String),
    Uint(u64),
    Int(i64),
    List(Option<Vec<Value>>),
    Map(Option<BTreeMap<Key, Value>>),
    Pointer(Option<Box<Value>>),
    /// In the order of the layout.
    Struct(Vec<Value>),
    Cpus(CpuRanges),
}

impl Value {
    /// Go's zero value.
    pub(super) fn zero(ty: &Type) -> Self {
        match ty {
            Type::Text(_) => Self::Text(String::new()),
            Type::Uint(_) => Self::Uint(0),
            Type::Int(_) => Self::Int(0),
            Type::List(..) => Self::List(None),
            Type::Map(..) => Self::Map(None),
            Type::Pointer(_) => Self::Pointer(None),
            Type::Struct(layout) => Self::Struct(layout.fields.iter().map(|f| Self::zero(&f.ty)).collect()),
            Type::PodCpus => Self::Cpus(CpuRanges::default()),
        }
    }

    /// What the kubelet's constructors make: maps of the checkpoint itself are there and empty, so a file without
    /// `entries` has an empty map and one with `"entries":null` has nil, and another checksum.
    pub(super) fn fresh(layout: &Layout) -> Self {
        let made = |f: &Field| match f.ty {
            Type::Map(..) => Self::Map(Some(BTreeMap::new())),
            _ => Self::zero(&f.ty),
        };
        Self::Struct(layout.fields.iter().map(made).collect())
    }

    /// A field by its Go name.
    pub(super) fn field(&self, layout: &Layout, name: &str) -> Option<&Self> {
        let Self::Struct(values) = self else { return None };
        values.get(layout.fields.iter().position(|f| f.name == name)?)
    }

    /// A field by its Go name, to be changed.
    pub(super) fn field_mut(&mut self, layout: &Layout, name: &str) -> Option<&mut Self> {
        let Self::Struct(values) = self else { return None };
        values.get_mut(layout.fields.iter().position(|f| f.name == name)?)
    }

    /// The text of a text field; empty for anything else.
    pub(super) fn text(&self, layout: &Layout, name: &str) -> &str {
        match self.field(layout, name) {
            Some(Self::Text(text)) => text,
            _ => "",
        }
    }

    /// The number of a field of type `uint64`; 0 for anything else.
    pub(super) fn uint(&self, layout: &Layout, name: &str) -> u64 {
        match self.field(layout, name) {
            Some(Self::Uint(n)) => *n,
            _ => 0,
        }
    }

    /// The members of a map field, keys as text; none for nil.
    pub(super) fn map<'a>(&'a self, layout: &Layout, name: &str) -> Vec<(&'a str, &'a Self)> {
        self.field(layout, name).map(Self::members).unwrap_or_default()
    }

    /// The members of a map with text keys.
    pub(super) fn members<'a>(&'a self) -> Vec<(&'a str, &'a Self)> {
        let Self::Map(Some(map)) = self else { return Vec::new() };
        let text = |(key, value): (&'a Key, &'a Self)| match key {
            Key::Text(key) => Some((key.as_str(), value)),
            Key::Int(_) => None,
        };
        map.iter().filter_map(text).collect()
    }
}

const TEXT: Type = Type::Text("string");
const CHECKSUM: Field = field("Checksum", "checksum", Type::Uint("checksum.Checksum"));
const POLICY: Field = field("PolicyName", "policyName", TEXT);
const DEFAULT: Field = field("DefaultCPUSet", "defaultCpuSet", TEXT);
const ENTRIES_BY_ID: Field =
    optional("Entries", "entries", Type::Map("map[string]string", Keys::Text, &TEXT));
const ENTRIES: Field = optional(
    "Entries",
    "entries",
    Type::Map("map[string]map[string]string", Keys::Text, &Type::Map("map[string]string", Keys::Text, &TEXT)),
);
const POD_ENTRIES: Field =
    optional("PodEntries", "podEntries", Type::Map("state.PodCPUAssignments", Keys::Text, &Type::PodCpus));
const DATA: Field = field("Data", "data", TEXT);
const DATA_CHECKSUM: Field = field("DataChecksum", "dataChecksum", Type::Uint("checksum.Checksum"));

const fn field(name: &'static str, key: &'static str, ty: Type) -> Field {
    Field { name, key, omit_empty: false, ty }
}

const fn optional(name: &'static str, key: &'static str, ty: Type) -> Field {
    Field { name, key, omit_empty: true, ty }
}

/// The name that was hashed for the CPU manager in every version (later types are renamed back before hashing).
pub(super) const CPU_NAME: &str = "state.CPUManagerCheckpoint";
/// The name that 1.36 hashed for version 2 before it was renamed back: written with the gate off, accepted with the
/// gate off.
pub(super) const CPU_NAME_V2: &str = "state.CPUManagerCheckpointV2";
/// The name that was hashed for the memory manager.
pub(super) const MEMORY_NAME: &str = "state.MemoryManagerCheckpoint";
/// The same slip for the memory manager's version 1.
pub(super) const MEMORY_NAME_V1: &str = "state.MemoryManagerCheckpointV1";

/// Before 1.18: by container id.
pub(super) static CPU_V1: Layout =
    Layout { name: CPU_NAME, fields: &[POLICY, DEFAULT, ENTRIES_BY_ID, CHECKSUM] };
/// 1.18 to 1.36.
pub(super) static CPU_V2: Layout = Layout { name: CPU_NAME, fields: &[POLICY, DEFAULT, ENTRIES, CHECKSUM] };
/// 1.36 with the gate `PodLevelResourceManagers`.
pub(super) static CPU_V3: Layout =
    Layout { name: CPU_NAME, fields: &[POLICY, DEFAULT, ENTRIES, POD_ENTRIES, CHECKSUM] };
/// 1.37: the outer part; never hashed as a whole.
pub(super) static CPU_V4: Layout =
    Layout { name: CPU_NAME, fields: &[POLICY, DEFAULT, ENTRIES, CHECKSUM, DATA, DATA_CHECKSUM] };
/// 1.37: what the text `data` holds; never hashed as a value.
pub(super) static CPU_DATA: Layout =
    Layout { name: "state.CPUManagerCheckpointData", fields: &[POLICY, DEFAULT, ENTRIES, POD_ENTRIES] };

/// `podEntryJSON`: what the pod's own reader takes.
pub(super) static POD_ENTRY: Layout =
    Layout { name: "state.podEntryJSON", fields: &[optional("CPUSet", "cpuSet", TEXT)] };

/// For looking rather than judging: all fields of all versions, pods' sets left as text.
pub(super) static CPU_ANY: Layout =
    Layout { name: CPU_NAME, fields: &[POLICY, DEFAULT, ENTRIES, POD_TEXTS, CHECKSUM, DATA, DATA_CHECKSUM] };
/// The same for `data`.
pub(super) static DATA_ANY: Layout =
    Layout { name: "state.CPUManagerCheckpointData", fields: &[POLICY, DEFAULT, ENTRIES, POD_TEXTS] };
const POD_TEXTS: Field =
    optional("PodEntries", "podEntries", Type::Map("state.PodCPUAssignments", Keys::Text, &POD_TEXT));
static POD_TEXT: Type = Type::Struct(&POD_ENTRY);

static MEMORY_TABLE: Layout = Layout {
    name: "state.MemoryTable",
    fields: &[
        field("TotalMemSize", "total", Type::Uint("uint64")),
        field("SystemReserved", "systemReserved", Type::Uint("uint64")),
        field("Allocatable", "allocatable", Type::Uint("uint64")),
        field("Reserved", "reserved", Type::Uint("uint64")),
        field("Free", "free", Type::Uint("uint64")),
    ],
};
static NODE_STATE: Layout = Layout {
    name: "state.NUMANodeState",
    fields: &[
        field("NumberOfAssignments", "numberOfAssignments", Type::Int("int")),
        field(
            "MemoryMap",
            "memoryMap",
            Type::Map(
                "map[v1.ResourceName]*state.MemoryTable",
                Keys::Text,
                &Type::Pointer(&Type::Struct(&MEMORY_TABLE)),
            ),
        ),
        field("Cells", "cells", Type::List("[]int", &Type::Int("int"))),
    ],
};
pub(super) static BLOCK: Layout = Layout {
    name: "state.Block",
    fields: &[
        field("NUMAAffinity", "numaAffinity", Type::List("[]int", &Type::Int("int"))),
        field("Type", "type", Type::Text("v1.ResourceName")),
        field("Size", "size", Type::Uint("uint64")),
    ],
};
const BLOCKS: Type = Type::List("[]state.Block", &Type::Struct(&BLOCK));
static MEMORY_POD: Layout =
    Layout { name: "state.PodEntry", fields: &[optional("MemoryBlocks", "memoryBlocks", BLOCKS)] };

const MACHINE_STATE: Field =
    field("MachineState", "machineState", Type::Map("state.NUMANodeMap", Keys::Int, &NODE));
static NODE: Type = Type::Pointer(&Type::Struct(&NODE_STATE));
const MEMORY_ENTRIES: Field = optional(
    "Entries",
    "entries",
    Type::Map(
        "state.ContainerMemoryAssignments",
        Keys::Text,
        &Type::Map("map[string][]state.Block", Keys::Text, &BLOCKS),
    ),
);
const MEMORY_PODS: Field = optional(
    "PodEntries",
    "podEntries",
    Type::Map("state.PodMemoryAssignments", Keys::Text, &MEMORY_POD_ENTRY),
);
static MEMORY_POD_ENTRY: Type = Type::Struct(&MEMORY_POD);

/// The memory manager's first version, 1.21 to 1.36.
pub(super) static MEMORY_V1: Layout =
    Layout { name: MEMORY_NAME, fields: &[POLICY, MACHINE_STATE, MEMORY_ENTRIES, CHECKSUM] };
/// 1.36 with the gate.
pub(super) static MEMORY_V2: Layout =
    Layout { name: MEMORY_NAME, fields: &[POLICY, MACHINE_STATE, MEMORY_ENTRIES, MEMORY_PODS, CHECKSUM] };
/// All fields of all versions, 1.37's `data` included.
pub(super) static MEMORY_ANY: Layout = Layout {
    name: MEMORY_NAME,
    fields: &[POLICY, MACHINE_STATE, MEMORY_ENTRIES, MEMORY_PODS, CHECKSUM, DATA, DATA_CHECKSUM],
};
/// What the text `data` holds in 1.37.
pub(super) static MEMORY_DATA: Layout = Layout {
    name: "state.MemoryManagerCheckpointData",
    fields: &[POLICY, MACHINE_STATE, MEMORY_ENTRIES, MEMORY_PODS],
};
