//! `truepin import kubelet` and `truepin export kubelet`: the kubelet's state files, in and out.
//!
//! Problem: before a node changes hands its owner wants to know what its files are worth; afterwards, how to go back.
//! Steps: the files, the machine and the containers are read, the core judges (`truepin.import/1`), the answer is printed;
//! an export derives the pool from truepin's record and writes a file that the kubelet starts from.
//! Invariants: nothing of the kubelet's is ever written; a file that is not there is no error, one that cannot be read is.

use super::{
    Format, Output,
    ask::ask,
    output::{Failure, json, print},
    table::{Cell, table},
};
use crate::{
    api::{
        calls::{Adoption, Call},
        documents::{AdoptedDoc, SetDoc},
    },
    paths::Paths,
    sysfs,
};
use clap::{Args, Subcommand, ValueEnum};
use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read, Write as _},
    path::{Path, PathBuf},
};
use truepin::{
    CpuSet, CpuTopology, NodeSet, Owner, checkpoint,
    kubelet::{
        self, Answer, CPU_FILE, Containers, Exported, FindingDoc, ImportDoc, Input, Judgement, MEMORY_FILE,
        State,
    },
};

/// The largest state file that is read: 2,000 pods make 0.3 MB.
const LARGEST: u64 = 64 << 20;

/// The static policy's options in 1.36. Only `strict-cpu-reservation` changes what a file may hold.
const OPTIONS: [&str; 6] = [
    "full-pcpus-only",
    "strict-cpu-reservation",
    "prefer-align-cpus-by-uncorecache",
    "distribute-cpus-across-numa",
    "align-by-socket",
    "distribute-cpus-across-cores",
];

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    #[command(subcommand)]
    from: ImportFrom,
}

#[derive(Debug, Subcommand)]
enum ImportFrom {
    /// The kubelet's CPU and memory manager: what their files say, what the kubelet would do, what can be taken over
    #[command(
        after_help = "Example:\n  truepin import kubelet --dry-run\n  truepin import kubelet\n  truepin import kubelet --dir ./kubelet --root ./recorded-machine --reserved 0-1 --dry-run -o json\n\nExit status: 0 importable without findings, 1 findings, 2 usage, 3 unreadable."
    )]
    Kubelet(KubeletArgs),
}

#[derive(Debug, Args)]
struct KubeletArgs {
    /// The kubelet's directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    dir: PathBuf,
    /// Running containers: a JSON array of [container id, pod uid, name]. Files of before 1.18 need it
    #[arg(long, value_name = "FILE")]
    containers: Option<PathBuf>,
    /// A recorded machine: the directory that holds its `sys` [default: this machine]; judges only
    #[arg(long, value_name = "MACHINE")]
    root: Option<PathBuf>,
    /// The configured policies: static or none for CPUs, Static, None or `BestEffort` for memory [default: as in the files]
    #[arg(long = "policy", value_name = "P", value_enum)]
    policies: Vec<Policy>,
    /// The kubelet's reserved CPUs; without them nobody can tell whether it would start
    #[arg(long, value_name = "LIST")]
    reserved: Option<CpuSet>,
    /// The static policy's options that are on
    #[arg(long, value_name = "a,b", value_delimiter = ',', value_parser = OPTIONS)]
    options: Vec<String>,
    /// The kubelet's feature gate `PodLevelResourceManagers` is on
    #[arg(long)]
    pod_level_gate: bool,
    /// Judge only, adopt nothing
    #[arg(long)]
    dry_run: bool,
    /// Take over what stands, though there are findings about the rest
    #[arg(long, conflicts_with = "dry_run")]
    good_part: bool,
    #[command(flatten)]
    format: Format,
}

/// Policies by the kubelet's own names; those of the memory manager start with a capital.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Policy {
    #[value(name = "static")]
    Static,
    #[value(name = "none")]
    None,
    #[value(name = "Static")]
    MemoryStatic,
    #[value(name = "None")]
    MemoryNone,
    #[value(name = "BestEffort")]
    MemoryBestEffort,
}

impl Policy {
    /// The name, and whether it is one of memory.
    fn name(self) -> (&'static str, bool) {
        match self {
            Self::Static => ("static", false),
            Self::None => ("none", false),
            Self::MemoryStatic => ("Static", true),
            Self::MemoryNone => ("None", true),
            Self::MemoryBestEffort => ("BestEffort", true),
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    #[command(subcommand)]
    to: ExportTo,
}

#[derive(Debug, Subcommand)]
enum ExportTo {
    /// A CPU manager state file from which the kubelet starts with truepin's assignments
    #[command(
        after_help = "Example:\n  truepin export kubelet --to ./cpu_manager_state\n\nWith the kubelet stopped, put the file into its directory as cpu_manager_state, owned by root and of mode 0600."
    )]
    Kubelet(KubeletExportArgs),
}

#[derive(Debug, Args)]
struct KubeletExportArgs {
    /// The version: v2 is read by 1.18 and later, v4 is that of 1.37, v3 that of 1.36 with `PodLevelResourceManagers`
    #[arg(long, value_enum, default_value_t = Version::V2)]
    version: Version,
    /// truepin's record [default: /var/lib/truepin/checkpoint.json]
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// A recorded machine: the directory that holds its `sys` [default: this machine]
    #[arg(long, value_name = "MACHINE")]
    root: Option<PathBuf>,
    /// Where to write; must not exist [default: standard output]
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Version {
    V2,
    V3,
    V4,
}

impl From<Version> for Exported {
    fn from(version: Version) -> Self {
        match version {
            Version::V2 => Self::V2,
            Version::V3 => Self::V3,
            Version::V4 => Self::V4,
        }
    }
}

/// Why a file could not be used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is larger than {LARGEST} bytes, which no state file is", path.display())]
    Large { path: PathBuf },
    #[error("{} is no list of containers", path.display())]
    Containers { path: PathBuf, source: kubelet::ContainersError },
    #[error("{} is no record of truepin", path.display())]
    Record { path: PathBuf, source: checkpoint::DecodeError },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// The bytes of a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    let failed = |source| FileError::Read { path: path.into(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let mut bytes = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LARGEST {
        return Err(FileError::Large { path: path.into() });
    }
    Ok(Some(bytes))
}

/// A file that must be there.
fn read_named(path: &Path) -> Result<Vec<u8>, FileError> {
    let missing = || FileError::Read { path: path.into(), source: io::ErrorKind::NotFound.into() };
    read(path)?.ok_or_else(missing)
}

fn containers(path: Option<&Path>) -> Result<Containers, Failure> {
    let Some(path) = path else { return Ok(Containers::new()) };
    let bytes = read_named(path).map_err(|e| Failure::new(3, &e, None))?;
    let text = String::from_utf8_lossy(&bytes);
    kubelet::parse_containers(&text)
        .map_err(|source| Failure::new(2, &FileError::Containers { path: path.into(), source }, None))
}

fn machine(root: Option<&PathBuf>, paths: &Paths) -> Result<CpuTopology, Failure> {
    let hint = "--root expects the directory that holds sys/devices/system/cpu";
    sysfs::topology(root.unwrap_or(&paths.sysfs)).map_err(|e| Failure::new(3, &e, Some(hint)))
}

pub(super) fn import(args: &ImportArgs, paths: &Paths) -> Result<u8, Failure> {
    let ImportFrom::Kubelet(args) = &args.from;
    let containers = containers(args.containers.as_deref())?;
    let topology = machine(args.root.as_ref(), paths)?;
    let nodes: NodeSet = topology.nodes().iter().map(|n| n.id).collect();
    // A directory that is not there is a mistyped one; without files in it there is nothing to import.
    fs::read_dir(&args.dir).map_err(|source| {
        let error = FileError::Read { path: args.dir.clone(), source };
        Failure::new(3, &error, Some("--dir expects the kubelet's directory, /var/lib/kubelet as a rule"))
    })?;
    let file = |name| read(&args.dir.join(name)).map_err(|e| Failure::new(3, &e, None));
    let (cpu, memory) = (file(CPU_FILE)?, file(MEMORY_FILE)?);
    let policy = |of_memory| {
        let names = args.policies.iter().map(|p| p.name());
        names.filter(|(_, memory)| *memory == of_memory).map(|(name, _)| name).next_back()
    };
    let judgement = kubelet::judge(&Input {
        dir: &args.dir.to_string_lossy(),
        cpu: cpu.as_deref(),
        memory: memory.as_deref(),
        policy: policy(false),
        memory_policy: policy(true),
        pod_level: args.pod_level_gate,
        containers: &containers,
        online: Some(topology.online()),
        nodes: Some(&nodes).filter(|n| !n.is_empty()),
        reserved: args.reserved.as_ref(),
        strict: args.options.iter().any(|o| o == "strict-cpu-reservation"),
    });
    let document = &judgement.document;
    let clean = document.truepin.importable && document.truepin.findings.is_empty();
    // Sets of a recorded machine are nothing for this one.
    let judge_only = args.dry_run || args.root.is_some();
    if !judge_only && (clean || args.good_part) {
        adopt(&judgement, args.format, paths)?;
        return Ok(u8::from(!clean));
    }
    match args.format.output {
        Output::Json => json(document)?,
        Output::Table => print(&report(document))?,
    }
    Ok(u8::from(!document.truepin.importable || !document.truepin.findings.is_empty()))
}

/// What stands of the state of this node's kubelet, for an agent that starts; findings about the rest are logged.
/// `running` are the containers that the cgroup tree has: where a pod's containers share CPUs, one that runs gets them.
pub(super) fn takeover(
    dir: &Path,
    names: Option<&Path>,
    running: &Containers,
    paths: &Paths,
) -> Result<Vec<(Owner, CpuSet)>, Failure> {
    let mut containers = containers(names)?;
    let topology = machine(None, paths)?;
    let nodes: NodeSet = topology.nodes().iter().map(|n| n.id).collect();
    let cpu = read(&dir.join(CPU_FILE)).map_err(|e| Failure::new(3, &e, None))?;
    if cpu.is_none() {
        tracing::warn!("{} does not exist: there is nothing to take over", dir.join(CPU_FILE).display());
    }
    // A file of before 1.18 has ids only; the tree resolves those of what still runs.
    containers.extend(running.clone());
    let judgement = kubelet::judge(&Input {
        dir: &dir.to_string_lossy(),
        cpu: cpu.as_deref(),
        memory: None,
        policy: None,
        memory_policy: None,
        pod_level: true,
        containers: &containers,
        online: Some(topology.online()),
        nodes: Some(&nodes).filter(|n| !n.is_empty()),
        reserved: None,
        strict: false,
    });
    let ours = &judgement.document.truepin;
    for said in ours.findings.iter().chain(&ours.notes) {
        tracing::warn!("{}: {}", said.path, said.text);
    }
    if !judgement.document.truepin.importable {
        let text = format!("the kubelet's state in {} cannot be taken over", dir.display());
        let hint = Some("`truepin import kubelet --dry-run` says why".into());
        return Err(Failure { code: 3, text, hint, is_audit: false });
    }
    let adoption = kubelet::adoptions(&judgement.cpu, running);
    for (owner, cpus, with) in &adoption.sharing {
        let with: Vec<String> = with.iter().map(ToString::to_string).collect();
        tracing::info!("{owner}: its CPUs {cpus} are those of {} from now on", with.join(", "));
    }
    tracing::warn!("{}", kubelet_advice().trim());
    Ok(adoption.owners)
}

/// Takes over what stands: `judgement.adoption.owners` are disjoint sets by owner. The agent takes all of them or none,
/// and a second time changes nothing.
fn adopt(judgement: &Judgement, format: Format, paths: &Paths) -> Result<(), Failure> {
    let owners = judgement.adoption.owners.iter();
    let owners = owners.map(|(owner, cpus)| SetDoc { owner: owner.clone(), cpus: cpus.clone() }).collect();
    let adopted: AdoptedDoc = ask(paths, &Call::Adopt(Box::new(Adoption { owners })))?;
    match format.output {
        Output::Json => json(&adopted),
        Output::Table if adopted.owners.is_empty() => print("there was nothing to take over\n"),
        Output::Table => {
            let row = |o: &SetDoc| vec![Cell::from(&o.owner), Cell::from(&o.cpus)];
            let rows: Vec<_> = adopted.owners.iter().map(row).collect();
            print(&(table(&["TAKEN OVER", "CPUS"], &rows) + kubelet_advice()))
        }
    }
}

/// What the operator changes so that the two do not undo each other.
fn kubelet_advice() -> &'static str {
    "next: set cpuManagerPolicy: none in the kubelet's configuration, remove its cpu_manager_state, restart it;\n\
     pods keep running on their CPUs. The way back: truepin export kubelet\n"
}

/// The answer for people.
fn report(document: &ImportDoc) -> String {
    let mut text = String::new();
    let kubelet = &document.kubelet;
    let said = |answer: Option<Answer>| match answer {
        Some(Answer::Ok) => "ok",
        Some(Answer::Err) => "refused",
        None => "not known",
    };
    if document.files.is_empty() {
        let _ = writeln!(text, "no state file in {}", document.dir);
    } else {
        let row = |f: &kubelet::FileDoc| {
            vec![
                Cell::from(&f.path),
                Cell::from(f.format.as_deref().unwrap_or("-")),
                Cell::from(&f.policy),
                Cell::from(said(Some(f.load))),
                Cell::from(f.reason.as_deref().unwrap_or("")),
            ]
        };
        let rows: Vec<_> = document.files.iter().map(row).collect();
        text += &table(&["FILE", "VERSION", "POLICY", "KUBELET LOADS IT", "WHY NOT"], &rows);
    }
    let _ = write!(text, "kubelet: load {}", said(Some(kubelet.load)));
    if kubelet.load == Answer::Ok {
        let _ = write!(text, ", start {}", said(kubelet.start));
    }
    if let Some(reason) = &kubelet.reason {
        let _ = write!(text, " ({reason})");
    }
    let importable = if document.truepin.importable { "importable" } else { "not importable" };
    let count = match document.truepin.findings.len() {
        0 => "without findings".into(),
        1 => "1 finding".into(),
        n => format!("{n} findings"),
    };
    let _ = writeln!(text, "\ntruepin: {importable}, {count}");
    let said = |text: &mut String, what: &str, list: &[FindingDoc]| {
        for finding in list {
            let _ = writeln!(text, "{what}: {}: {}", finding.path, finding.text);
        }
    };
    said(&mut text, "finding", &document.truepin.findings);
    said(&mut text, "note", &document.truepin.notes);
    if !document.truepin.owners.is_empty() {
        let row = |o: &kubelet::ImportedDoc| vec![Cell::from(&o.owner), Cell::from(&o.cpus)];
        text += &table(&["OWNER", "CPUS"], &document.truepin.owners.iter().map(row).collect::<Vec<_>>());
    }
    text
}

pub(super) fn export(args: &ExportArgs, paths: &Paths) -> Result<u8, Failure> {
    let ExportTo::Kubelet(args) = &args.to;
    let path = args.state.as_ref().unwrap_or(&paths.state);
    let bytes = read_named(path).map_err(|e| Failure::new(3, &e, None))?;
    let record = checkpoint::decode(&bytes)
        .map_err(|source| Failure::new(3, &FileError::Record { path: path.clone(), source }, None))?;
    let topology = machine(args.root.as_ref(), paths)?;
    let machine = kubelet::Machine {
        online: topology.online().into(),
        reserved: (&record.assignments.reserved).into(),
        strict: record.assignments.strict_reserved,
    };
    let (state, others) = State::of(record.assignments.sets(), &machine);
    // What the kubelet would refuse is not worth writing: CPUs that are gone, nothing reserved.
    let containers = Containers::new();
    let setup =
        kubelet::Setup { policy: "static", pod_level: args.version == Version::V3, containers: &containers };
    kubelet::start(&state, setup, &machine).map_err(|e| {
        let hint = "the record and the machine differ; with the agent running on this machine, export again";
        let mut failure = Failure::new(1, &e, Some(hint));
        failure.text = format!("the kubelet would not start from this state: {}", failure.text);
        failure
    })?;
    if !others.is_empty() {
        tracing::warn!(
            "CPUs {others} are held by owners that are no containers; in the file they are shared"
        );
    }
    let text = kubelet::export(&state, "static", args.version.into());
    match &args.to {
        None => print(&text)?,
        Some(to) => write_new(to, &text).map_err(|e| Failure::new(3, &e, None))?,
    }
    Ok(0)
}

/// A file that is whole or not there under its name.
fn write_new(path: &Path, text: &str) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: path.into(), source };
    let mut file = File::create_new(path).map_err(failed)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        // The first error says more than a failure to clean up after it.
        let _ = fs::remove_file(path);
    }
    written.map_err(failed)
}
