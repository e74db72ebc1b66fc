//! What truepin makes of a CPU manager checkpoint: its own verdict.
//!
//! Problem: the kubelet takes files that contradict themselves (two pods on one CPU, a checksum of 0) and refuses files
//! that are sound (a gate turned off, one CPU added). An import wants neither: it wants everything that stands, and a
//! finding for everything that does not.
//! Steps: the envelope (`envelope`): keys, version, checksums; then the content (`weigh`): lists, owners, the
//! entries against each other, the pool and the machine. Every version is read, whatever the gate.
//! Invariants: what nothing vouches for is not importable; an entry is usable only if no finding contradicts that its
//! container holds these CPUs alone on this machine; a missing file, and a sound one without entries, has no findings,
//! because truepin derives the pool and takes nothing else from the file.

use super::dump::encode;
use super::envelope::{Candidate, Format, Present, Report, absent, open, open_data, vouched};
use super::finding::{Finding, Problem};
use super::json::{Decoded, decode};
use super::layout::{
    CPU_ANY, CPU_NAME, CPU_NAME_V2, CPU_V1, CPU_V2, CPU_V3, CPU_V4, DATA_ANY, Layout, POD_ENTRY, Type, Value,
};
use super::load::{Containers, Machine, State};
use super::ranges::CpuRanges;
use super::syntax::JsonError;
use super::weigh::weigh;
use std::collections::BTreeMap;

/// What a file is compared with.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The configured policy; `None` for whatever the file says.
    pub policy: Option<&'a str>,
    /// Containers that run, for files by container id.
    pub containers: &'a Containers,
    /// The machine; `None` if it is not known.
    pub machine: Option<&'a Machine>,
}

/// A container's set in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Pod UID; empty where the container id is not known.
    pub pod: String,
    /// Container name; empty where the container id is not known.
    pub container: String,
    /// Container id, in version 1.
    pub id: Option<String>,
    /// Its CPUs; empty where the list does not parse.
    pub cpus: CpuRanges,
    /// Whether nothing contradicts it.
    pub usable: bool,
}

/// The verdict, and what was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inspection {
    /// The version; `None` for a missing file and one that cannot be told.
    pub format: Option<Format>,
    /// The policy in the file.
    pub policy: String,
    /// The shared pool in the file, for people: truepin derives its own.
    pub default: CpuRanges,
    /// By pod and container.
    pub entries: Vec<Entry>,
    /// Pods' sets.
    pub pods: BTreeMap<String, CpuRanges>,
    /// Whether the content can be believed, and some of it be imported if there is any.
    pub importable: bool,
    /// What contradicts.
    pub findings: Vec<Finding>,
    /// What is worth saying and contradicts nothing.
    pub notes: Vec<Finding>,
}

impl Inspection {
    /// What was read, usable or not, as a state of the kubelet's.
    #[must_use]
    pub fn state(&self) -> State {
        let mut state = State { default: self.default.clone(), pods: self.pods.clone(), ..State::default() };
        for entry in self.entries.iter().filter(|e| !e.container.is_empty()) {
            let containers = state.entries.entry(entry.pod.clone()).or_default();
            containers.insert(entry.container.clone(), entry.cpus.clone());
        }
        state
    }
}

/// An entry as read.
pub(super) struct RawEntry {
    /// Dotted.
    pub(super) key: String,
    pub(super) id: Option<String>,
    pub(super) pod: String,
    pub(super) container: String,
    pub(super) text: String,
}

/// What a file says, once something vouches for it.
pub(super) struct Content {
    pub(super) format: Format,
    pub(super) policy: String,
    pub(super) default: String,
    pub(super) entries: Vec<RawEntry>,
    /// Dotted key and text by pod.
    pub(super) pods: BTreeMap<String, (String, String)>,
}

static CANDIDATES: [Candidate; 4] = [
    Candidate { format: Format::V2, layout: &CPU_V2, name: CPU_NAME, early: false },
    Candidate { format: Format::V2, layout: &CPU_V2, name: CPU_NAME_V2, early: true },
    Candidate { format: Format::V3, layout: &CPU_V3, name: CPU_NAME, early: false },
    Candidate { format: Format::V1, layout: &CPU_V1, name: CPU_NAME, early: false },
];

/// Looks at a file's bytes; `None` for a file that is not there.
#[must_use]
pub fn inspect(file: Option<&[u8]>, context: Context<'_>) -> Inspection {
    let Some(bytes) = file else { return Inspection { importable: true, ..Inspection::default() } };
    let mut report = Report::default();
    match content(bytes, &mut report) {
        Some(said) => weigh(said, context, report),
        None => Inspection { findings: report.findings, notes: report.notes, ..Inspection::default() },
    }
}

/// The content that something vouches for.
fn content(bytes: &[u8], report: &mut Report) -> Option<Content> {
    let (any, decoded) = open(bytes, &CPU_ANY, report)?;
    let (value, layout) = shape(bytes, any, &decoded, report)?;
    absent(&CPU_ANY, &decoded, report);
    let by_id = std::ptr::eq(layout, &raw const CPU_V1);
    let there = |key| decoded.present.contains(key);
    let has_data = !by_id && (there("data") || there("dataChecksum"));
    for key in ["data", "dataChecksum", "podEntries"].into_iter().filter(|key| by_id && there(key)) {
        report.find(key, "", Problem::UnknownKey);
    }

    let stored = value.uint(layout, "Checksum");
    let has_pods = !value.map(layout, "PodEntries").is_empty();
    let by_shape = match (by_id, has_pods) {
        (true, _) => Format::V1,
        (_, true) => Format::V3,
        _ => Format::V2,
    };
    let present = Present { checksum: there("checksum"), pods: has_pods };
    let outer = vouched(bytes, &CANDIDATES, stored, by_shape, present, report);
    let data = has_data.then(|| open_data(&value, layout, &DATA_ANY, report)).flatten();
    if let Some(data) = data {
        differences(&value, layout, &data, report);
        as_written(bytes, if has_pods { None } else { Some(&CPU_V4) }, report);
        return Some(read(&data, &DATA_ANY, Format::V4, "data."));
    }
    // A damaged `data` was reported; the outer part stands only on a checksum of its own.
    let format = outer.filter(|_| !has_data || stored != 0)?;
    as_written(bytes, Some(layout_of(format)), report);
    let mut content = read(&value, layout, format, "");
    if format == Format::V2 && stored != 0 {
        content.pods.clear();
    }
    Some(content)
}

/// The value in the layout that its entries have: by container id, else the widest.
fn shape(
    bytes: &[u8],
    any: Value,
    decoded: &Decoded,
    report: &mut Report,
) -> Option<(Value, &'static Layout)> {
    let Err(error) = &decoded.result else { return Some((any, &CPU_ANY)) };
    let mut v1 = Value::fresh(&CPU_V1);
    let as_v1 = decode(bytes, &CPU_V1, &mut v1);
    let Err(v1_error) = as_v1.result else { return Some((v1, &CPU_V1)) };
    // Of the two errors the one that is not about the shape of the entries says more.
    let about_entries = matches!(error, JsonError::Type { key, .. } if key.starts_with("entries."));
    report.find("", "", Problem::Type(if about_entries { v1_error } else { error.clone() }));
    None
}

fn layout_of(format: Format) -> &'static Layout {
    match format {
        Format::V1 => &CPU_V1,
        Format::V2 => &CPU_V2,
        Format::V3 => &CPU_V3,
        Format::V4 => &CPU_V4,
    }
}

/// Notes a file whose content is right in bytes that no kubelet writes.
fn as_written(bytes: &[u8], layout: Option<&'static Layout>, report: &mut Report) {
    let Some(layout) = layout.filter(|_| report.findings.is_empty()) else { return };
    let mut value = Value::fresh(layout);
    let decoded = decode(bytes, layout, &mut value);
    if decoded.result.is_ok() && encode(&Type::Struct(layout), &value).as_bytes() != bytes {
        report.note("", "", Problem::NotAsWritten);
    }
}

fn text(value: &Value) -> &str {
    if let Value::Text(text) = value { text } else { "" }
}

/// The fields of a value in one of the wide layouts.
fn read(value: &Value, layout: &'static Layout, format: Format, prefix: &str) -> Content {
    let mut entries = Vec::new();
    for (outer, inner) in value.map(layout, "Entries") {
        if format == Format::V1 {
            entries.push(RawEntry {
                key: format!("{prefix}entries.{outer}"),
                id: Some(outer.to_owned()),
                pod: String::new(),
                container: String::new(),
                text: text(inner).to_owned(),
            });
            continue;
        }
        for (container, cpus) in inner.members() {
            entries.push(RawEntry {
                key: format!("{prefix}entries.{outer}.{container}"),
                id: None,
                pod: outer.to_owned(),
                container: container.to_owned(),
                text: text(cpus).to_owned(),
            });
        }
    }
    let pod = |(pod, value): (&str, &Value)| {
        let key = format!("{prefix}podEntries.{pod}.cpuSet");
        (pod.to_owned(), (key, value.text(&POD_ENTRY, "CPUSet").to_owned()))
    };
    Content {
        format,
        policy: value.text(layout, "PolicyName").to_owned(),
        default: value.text(layout, "DefaultCPUSet").to_owned(),
        entries,
        pods: value.map(layout, "PodEntries").into_iter().map(pod).collect(),
    }
}

/// 1.37 writes its state twice; the older half must not say something else.
fn differences(outer: &Value, layout: &'static Layout, data: &Value, report: &mut Report) {
    for field in DATA_ANY.fields {
        let (Some(a), Some(b)) = (outer.field(layout, field.name), data.field(&DATA_ANY, field.name)) else {
            continue;
        };
        // Pods' sets are in `data` alone, or in both.
        let only_inside = field.name == "PodEntries" && outer.map(layout, field.name).is_empty();
        if a != b && !only_inside {
            let (a, b) = (encode(&field.ty, a), encode(&field.ty, b));
            report.find(field.key, a, Problem::DataDiffers { data: b });
        }
    }
}
