//! `truepin.import/1`: both verdicts on a kubelet's directory, and what there is to take over.
//!
//! Problem: one answer for people, programs and tests: what the kubelet would do with its files, what truepin makes of
//! them, and the owners that an import would bring.
//! Steps: [`judge`] puts [`load`](fn@load), [`start`] and [`inspect`](fn@inspect) of the CPU manager's file beside those of the
//! memory manager's.
//! Invariants: the kubelet's `load` is that of the directory: one file that it refuses keeps it from starting. Equal
//! inputs give equal documents.

use super::adopt::{Adoption, adoptions};
use super::finding::FindingDoc;
use super::inspect::{Context, Inspection, inspect};
use super::load::{Containers, LoadError, Machine, Setup, State, load, start};
use super::memory::{MemoryInspection, inspect_memory, load_memory};
use super::ranges::CpuRanges;
use crate::{cpuset::CpuSet, nodeset::NodeSet, owner::Owner};
use serde::Serialize;
use std::collections::BTreeMap;

/// The CPU manager's file below the kubelet's directory.
pub const CPU_FILE: &str = "cpu_manager_state";
/// The memory manager's.
pub const MEMORY_FILE: &str = "memory_manager_state";

/// What is judged, and how the kubelet is configured.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The kubelet's directory, for the paths in the document.
    pub dir: &'a str,
    /// The CPU manager's file; `None` if there is none.
    pub cpu: Option<&'a [u8]>,
    /// The memory manager's.
    pub memory: Option<&'a [u8]>,
    /// `cpuManagerPolicy`; `None` for what the file says, where it is a policy.
    pub policy: Option<&'a str>,
    /// `memoryManagerPolicy`, likewise.
    pub memory_policy: Option<&'a str>,
    /// The gate `PodLevelResourceManagers`.
    pub pod_level: bool,
    /// Containers that run.
    pub containers: &'a Containers,
    /// Online CPUs, if known.
    pub online: Option<&'a CpuSet>,
    /// NUMA nodes, if known.
    pub nodes: Option<&'a NodeSet>,
    /// The kubelet's reserved CPUs; without them nobody can tell whether it starts.
    pub reserved: Option<&'a CpuSet>,
    /// The option `strict-cpu-reservation`.
    pub strict: bool,
}

/// The document, and what it is made of.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// `truepin.import/1`
    pub document: ImportDoc,
    /// Of the CPU manager's file.
    pub cpu: Inspection,
    /// Of the memory manager's file.
    pub memory: MemoryInspection,
    /// What an import would make.
    pub adoption: Adoption,
}

/// The kubelet's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It goes on.
    Ok,
    /// It refuses.
    Err,
}

impl<T, E> From<&Result<T, E>> for Answer {
    fn from(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Ok } else { Self::Err }
    }
}

/// `truepin.import/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportDoc {
    /// `truepin.import/1`
    pub schema: &'static str,
    /// The kubelet's directory.
    pub dir: String,
    /// What is there.
    pub files: Vec<FileDoc>,
    /// What kubelet 1.36 would do.
    pub kubelet: KubeletDoc,
    /// What truepin makes of it.
    pub truepin: TruepinDoc,
}

/// A state file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileDoc {
    /// Where.
    pub path: String,
    /// `v1` to `v4` (memory: `v1` to `v3`); `null` if it cannot be told.
    pub format: Option<String>,
    /// The policy in the file; empty if it cannot be told.
    pub policy: String,
    /// Whether the kubelet loads it.
    pub load: Answer,
    /// Why not.
    pub reason: Option<String>,
}

/// The kubelet's verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KubeletDoc {
    /// Whether it loads what is there.
    pub load: Answer,
    /// Whether its static policy then starts; `null` if it does not come so far, or machine or reservation are not known.
    pub start: Option<Answer>,
    /// The shared pool as loaded; `null` if nothing is.
    pub def: Option<String>,
    /// Sets by pod UID and container as loaded.
    #[serde(rename = "as")]
    pub entries: Option<BTreeMap<String, BTreeMap<String, String>>>,
    /// Pods' sets as loaded.
    pub pods: Option<BTreeMap<String, String>>,
    /// The shared pool after the start.
    pub def_started: Option<String>,
    /// Why it refuses.
    pub reason: Option<String>,
}

/// truepin's verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TruepinDoc {
    /// Whether the content can be believed, and some of it be imported if there is any.
    pub importable: bool,
    /// What contradicts.
    pub findings: Vec<FindingDoc>,
    /// What is worth saying and contradicts nothing.
    pub notes: Vec<FindingDoc>,
    /// What an import would make.
    pub owners: Vec<ImportedDoc>,
    /// Containers whose CPUs a container of the same pod gets.
    pub sharing: Vec<SharingDoc>,
}

/// An owner to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportedDoc {
    /// `pod/uid/container`
    pub owner: Owner,
    /// Its exclusive set.
    pub cpus: CpuSet,
}

/// A container inside its siblings' sets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SharingDoc {
    /// `pod/uid/container`
    pub owner: Owner,
    /// What it shares.
    pub cpus: CpuSet,
    /// Who gets it.
    pub with: Vec<Owner>,
}

/// An error with its sources, on one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let sources = std::iter::successors(error.source(), |e| e.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}

/// The configured policy, or the file's where that is one; else the first, which has something to check.
fn policy<'a>(configured: Option<&'a str>, found: &'a str, known: &[&'static str]) -> &'a str {
    configured
        .unwrap_or_else(|| if known.contains(&found) { found } else { known.first().copied().unwrap_or("") })
}

/// Both verdicts.
#[must_use]
pub fn judge(input: &Input<'_>) -> Judgement {
    let ranges = |set: Option<&CpuSet>| set.map(CpuRanges::from).unwrap_or_default();
    let machine = input.online.map(|online| Machine {
        online: online.into(),
        reserved: ranges(input.reserved),
        strict: input.strict,
    });
    let context = Context { policy: input.policy, containers: input.containers, machine: machine.as_ref() };
    let cpu = inspect(input.cpu, context);
    let memory = inspect_memory(input.memory, input.memory_policy, input.nodes);

    let setup = Setup {
        policy: policy(input.policy, &cpu.policy, &["static", "none"]),
        pod_level: input.pod_level,
        containers: input.containers,
    };
    let loaded = load(input.cpu, setup);
    let memory_policy = policy(input.memory_policy, &memory.policy, &["Static", "None", "BestEffort"]);
    let memory_loaded = load_memory(input.memory, memory_policy, input.pod_level);

    let path = |file: &str| format!("{}/{file}", input.dir.trim_end_matches('/'));
    let (cpu_path, memory_path) = (path(CPU_FILE), path(MEMORY_FILE));
    let mut files = Vec::new();
    if input.cpu.is_some() {
        let format = cpu.format.map(|f| f.to_string());
        files.push(file_doc(&cpu_path, format, &cpu.policy, loaded.as_ref().err()));
    }
    if input.memory.is_some() {
        let format = memory.format.map(Into::into);
        files.push(file_doc(&memory_path, format, &memory.policy, memory_loaded.as_ref().err()));
    }

    let docs = |cpu: &[_], memory: &[_]| {
        let cpu = cpu.iter().map(|f| FindingDoc::new(f, &cpu_path));
        cpu.chain(memory.iter().map(|f| FindingDoc::new(f, &memory_path))).collect()
    };
    let adoption = adoptions(&cpu, input.containers);
    let imported = |(owner, cpus): &(Owner, CpuSet)| ImportedDoc { owner: owner.clone(), cpus: cpus.clone() };
    let sharing = |(owner, cpus, with): &(Owner, CpuSet, Vec<Owner>)| SharingDoc {
        owner: owner.clone(),
        cpus: cpus.clone(),
        with: with.clone(),
    };
    let document = ImportDoc {
        schema: "truepin.import/1",
        dir: input.dir.into(),
        files,
        kubelet: kubelet_doc(
            &loaded,
            &memory_loaded,
            setup,
            machine.as_ref().filter(|_| input.reserved.is_some()),
        ),
        truepin: TruepinDoc {
            importable: cpu.importable && memory.importable,
            findings: docs(&cpu.findings, &memory.findings),
            notes: docs(&cpu.notes, &memory.notes),
            owners: adoption.owners.iter().map(imported).collect(),
            sharing: adoption.sharing.iter().map(sharing).collect(),
        },
    };
    Judgement { document, cpu, memory, adoption }
}

fn file_doc(path: &str, format: Option<String>, policy: &str, error: Option<&LoadError>) -> FileDoc {
    FileDoc {
        path: path.into(),
        format,
        policy: policy.into(),
        load: if error.is_none() { Answer::Ok } else { Answer::Err },
        reason: error.map(|e| chain(e)),
    }
}

fn kubelet_doc(
    cpu: &Result<State, LoadError>,
    memory: &Result<(), LoadError>,
    setup: Setup<'_>,
    machine: Option<&Machine>,
) -> KubeletDoc {
    let refused = cpu.as_ref().err().or(memory.as_ref().err());
    let mut doc = KubeletDoc {
        load: if refused.is_none() { Answer::Ok } else { Answer::Err },
        start: None,
        def: None,
        entries: None,
        pods: None,
        def_started: None,
        reason: refused.map(|e| chain(e)),
    };
    let (Ok(state), None) = (cpu, refused) else { return doc };
    let text = |sets: &BTreeMap<String, CpuRanges>| -> BTreeMap<String, String> {
        sets.iter().map(|(name, cpus)| (name.clone(), cpus.to_string())).collect()
    };
    doc.def = Some(state.default.to_string());
    doc.entries = Some(state.entries.iter().map(|(pod, sets)| (pod.clone(), text(sets))).collect());
    doc.pods = Some(text(&state.pods));
    if let Some(machine) = machine {
        let started = start(state, setup, machine);
        doc.start = Some(Answer::from(&started));
        match started {
            Ok(state) => doc.def_started = Some(state.default.to_string()),
            Err(error) => doc.reason = Some(chain(&error)),
        }
    }
    doc
}

/// Why a list of containers was refused.
#[derive(Debug, thiserror::Error)]
pub enum ContainersError {
    /// Not the shape.
    #[error("expected a JSON array of [container id, pod uid, name]")]
    Json(#[from] serde_json::Error),
    /// One id, two containers.
    #[error("container {id:?} is given twice, as {} and as {}", name(first), name(second))]
    Twice {
        /// The id.
        id: String,
        /// Pod UID and name.
        first: (String, String),
        /// Pod UID and name.
        second: (String, String),
    },
}

fn name((pod, container): &(String, String)) -> String {
    format!("pod/{pod}/{container}")
}

/// Containers from a JSON array of `[container id, pod uid, name]`.
pub fn parse_containers(text: &str) -> Result<Containers, ContainersError> {
    let list: Vec<(String, String, String)> = serde_json::from_str(text)?;
    let mut containers = Containers::new();
    for (id, pod, name) in list {
        let second = (pod, name);
        if let Some(first) = containers.insert(id.clone(), second.clone()).filter(|first| *first != second) {
            return Err(ContainersError::Twice { id, first, second });
        }
    }
    Ok(containers)
}
