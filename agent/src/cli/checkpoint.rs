//! `truepin checkpoint show|verify|diff|export`: the durable record, with or without an agent.
//!
//! Files are only read, never moved or mended: that is the agent's when it starts.

use super::{
    Format, Output,
    output::{Failure, json, print},
    table::{Cell, table},
};
use crate::{
    paths::Paths,
    store::{chain, parent},
};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;
use std::{
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use truepin::checkpoint::{
    self, Change, Checkpoint, DecodeError, Stored,
    generations::{Generation, Place},
};

/// Contract: 1 the answer is no, 3 it cannot be told.
const DAMAGED: u8 = 1;
const CANNOT_TELL: u8 = 3;

#[derive(Debug, Args)]
pub(super) struct CheckpointArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// What is on record: owners, first values, containers
    #[command(
        after_help = "Example:\n  truepin checkpoint show\n  truepin checkpoint show ./checkpoint.json -o json"
    )]
    Show(One),
    /// Is it whole? 0 yes, 1 damaged, 3 unreadable or of a newer truepin
    #[command(
        after_help = "Example:\n  truepin checkpoint verify\n  truepin checkpoint verify /var/lib/truepin/quarantine/*.json"
    )]
    Verify(Several),
    /// What differs between two of them? 0 nothing, 1 something
    #[command(
        after_help = "Example:\n  truepin checkpoint diff                     # since the previous generation\n  truepin checkpoint diff before.json after.json"
    )]
    Diff(Two),
    /// The record in the present version, on stdout: a file that an agent can start from
    #[command(
        after_help = "Example:\n  truepin checkpoint export >backup.json && truepin checkpoint verify backup.json"
    )]
    Export {
        /// The record [default: the agent's]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct One {
    /// The record [default: the agent's]
    file: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
struct Several {
    /// Records [default: both generations of the agent's]
    files: Vec<PathBuf>,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
struct Two {
    /// The first record; alone, it is compared with its previous generation [default: the agent's]
    file: Option<PathBuf>,
    /// The second record
    other: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

/// Why there is no record to work with.
#[derive(Debug, thiserror::Error)]
enum CheckpointError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}", path.display())]
    Decode { path: PathBuf, source: DecodeError },
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let code = match &error {
            CheckpointError::Decode { source, .. } if !source.is_newer() => DAMAGED,
            _ => CANNOT_TELL,
        };
        let hint = (code == DAMAGED).then_some(
            "an agent that starts moves a damaged record into quarantine/ and uses the previous generation",
        );
        Self::new(code, &error, hint)
    }
}

pub(super) fn checkpoint(args: CheckpointArgs, paths: &Paths) -> Result<u8, Failure> {
    let or_own = |file: Option<PathBuf>| file.unwrap_or_else(|| paths.state.clone());
    match args.what {
        What::Show(One { file, format }) => show(&or_own(file), format),
        What::Verify(Several { files, format }) => {
            let previous = previous(&paths.state);
            let own = || {
                let second = previous.exists().then(|| previous.clone());
                [paths.state.clone()].into_iter().chain(second).collect()
            };
            verify(&if files.is_empty() { own() } else { files }, format)
        }
        What::Diff(Two { file, other, format }) => {
            let file = or_own(file);
            match other {
                Some(other) => difference(&file, &other, format),
                None => difference(&previous(&file), &file, format),
            }
        }
        What::Export { file } => {
            let (_, stored) = read(&or_own(file))?;
            let bytes = checkpoint::encode(&stored.record)?;
            print(&String::from_utf8_lossy(&bytes))?;
            Ok(0)
        }
    }
}

fn previous(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    parent(file).join(Place::Of(Generation::Previous).name(&name))
}

/// The agent replaces its file by two renames: in the instant between them there is none.
fn bytes(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut tries = 0;
    loop {
        match fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries < 5 && previous(path).exists() => {
                tries += 1;
                thread::sleep(Duration::from_millis(20));
            }
            other => {
                return other.map_err(|source| CheckpointError::Read { path: path.into(), source });
            }
        }
    }
}

fn read(path: &Path) -> Result<(usize, Stored), CheckpointError> {
    let bytes = bytes(path)?;
    let stored = checkpoint::read(&bytes);
    Ok((bytes.len(), stored.map_err(|source| CheckpointError::Decode { path: path.into(), source })?))
}

/// `truepin.record/1`
#[derive(Serialize)]
struct ShowDoc<'a> {
    schema: &'static str,
    file: String,
    bytes: usize,
    crc32: &'a str,
    /// The payload's version in the file.
    stored_version: u32,
    /// In the present version.
    record: &'a Checkpoint,
}

fn show(path: &Path, format: Format) -> Result<u8, Failure> {
    let (bytes, stored) = read(path)?;
    match format.output {
        Output::Json => json(&ShowDoc {
            schema: "truepin.record/1",
            file: path.display().to_string(),
            bytes,
            crc32: &stored.crc32,
            stored_version: stored.version,
            record: &stored.record,
        })?,
        Output::Table => print(&text(&stored, bytes))?,
    }
    Ok(0)
}

fn text(stored: &Stored, bytes: usize) -> String {
    let r = &stored.record;
    let table_of = &r.assignments;
    let strict = if table_of.strict_reserved { ", strictly" } else { "" };
    let none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let migrated = if stored.version == r.version {
        String::new()
    } else {
        format!(", read as {}.{}", r.version, r.minor)
    };
    let version = if stored.version == r.version {
        format!("{}.{}", r.version, r.minor)
    } else {
        stored.version.to_string()
    };
    let mut text = String::new();
    for (name, value) in [
        ("version", format!("{version}{migrated}")),
        ("epoch", r.epoch.to_string()),
        ("size", format!("{bytes} bytes, CRC32 {}", stored.crc32)),
        ("boot", none(r.boot_id.clone())),
        ("topology", none(r.topology.clone())),
        ("strategy", none(r.strategy.clone())),
        ("reserved", format!("{}{strict}", none(table_of.reserved.to_string()))),
        ("exclusive", none(table_of.exclusive().to_string())),
    ] {
        let _ = writeln!(text, "{name:<10} {value}");
    }
    let rows: Vec<Vec<Cell>> = table_of
        .owners
        .iter()
        .map(|(owner, a)| {
            let original = a.original.as_ref().map(ToString::to_string);
            vec![
                Cell::from(owner),
                Cell::from(&a.cpus),
                Cell::from(original.unwrap_or_else(|| "-".into())),
                Cell::from(a.mode.name()),
                Cell::from(&a.cgroup),
                Cell::from(none(a.reason.clone())),
            ]
        })
        .collect();
    section(&mut text, &["OWNER", "CPUS", "ORIGINAL", "MODE", "CGROUP", "WHY"], &rows);
    let rows: Vec<Vec<Cell>> = r
        .containers
        .iter()
        .map(|(id, c)| {
            let cgroup = c.cgroup.map_or("-".into(), |id| id.to_string());
            vec![Cell::from(id), Cell::from(&c.owner), Cell::from(cgroup)]
        })
        .collect();
    section(&mut text, &["CONTAINER", "OWNER", "CGROUP ID"], &rows);
    let rows: Vec<Vec<Cell>> = r
        .first
        .iter()
        .flat_map(|(path, first)| first.files.iter().map(move |(file, value)| (path, file, value)))
        .map(|(path, file, value)| vec![Cell::from(path), Cell::from(file), Cell::from(format!("{value:?}"))])
        .collect();
    section(&mut text, &["CGROUP", "FILE", "FIRST VALUE"], &rows);
    text
}

fn section(text: &mut String, header: &[&str], rows: &[Vec<Cell>]) {
    if !rows.is_empty() {
        let _ = write!(text, "\n{}", table(header, rows));
    }
}

/// `truepin.checkpoint-verify/1`
#[derive(Serialize)]
struct VerifyDoc {
    schema: &'static str,
    files: Vec<FileDoc>,
}

#[derive(Serialize)]
struct FileDoc {
    file: String,
    #[serde(flatten)]
    state: State,
}

#[derive(Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
enum State {
    Fine { version: u32, minor: u32, epoch: u64, owners: usize, bytes: usize, crc32: String },
    Damaged { reason: String },
    Newer { reason: String },
    Unreadable { reason: String },
}

impl State {
    fn of(path: &Path) -> Self {
        match read(path) {
            Ok((bytes, Stored { version, crc32, record: r })) => {
                // What an older version has no number for.
                let minor = if version == r.version { r.minor } else { 0 };
                Self::Fine {
                    version,
                    minor,
                    epoch: r.epoch,
                    owners: r.assignments.owners.len(),
                    bytes,
                    crc32,
                }
            }
            Err(CheckpointError::Decode { source, .. }) if source.is_newer() => {
                Self::Newer { reason: chain(&source) }
            }
            Err(CheckpointError::Decode { source, .. }) => Self::Damaged { reason: chain(&source) },
            Err(CheckpointError::Read { source, .. }) => Self::Unreadable { reason: chain(&source) },
        }
    }

    fn code(&self) -> u8 {
        match self {
            Self::Fine { .. } => 0,
            Self::Damaged { .. } => DAMAGED,
            Self::Newer { .. } | Self::Unreadable { .. } => CANNOT_TELL,
        }
    }
}

fn verify(files: &[PathBuf], format: Format) -> Result<u8, Failure> {
    let files: Vec<FileDoc> =
        files.iter().map(|f| FileDoc { file: f.display().to_string(), state: State::of(f) }).collect();
    let codes: Vec<u8> = files.iter().map(|f| f.state.code()).collect();
    match format.output {
        Output::Json => json(&VerifyDoc { schema: "truepin.checkpoint-verify/1", files })?,
        Output::Table => {
            let row = |f: &FileDoc| {
                let (state, why) = match &f.state {
                    State::Fine { version, minor, epoch, owners, bytes, .. } => (
                        "fine",
                        format!("version {version}.{minor}, epoch {epoch}, {owners} owners, {bytes} bytes"),
                    ),
                    State::Damaged { reason } => ("DAMAGED", reason.clone()),
                    State::Newer { reason } => ("NEWER", reason.clone()),
                    State::Unreadable { reason } => ("UNREADABLE", reason.clone()),
                };
                vec![Cell::from(&f.file), Cell::from(state), Cell::from(why)]
            };
            print(&table(&["FILE", "STATE", "WHAT"], &files.iter().map(row).collect::<Vec<_>>()))?;
        }
    }
    // As several verdicts at once: any no gives 1, else any doubt 3.
    Ok(if codes.contains(&DAMAGED) { DAMAGED } else { codes.into_iter().max().unwrap_or(0) })
}

/// `truepin.checkpoint-diff/1`
#[derive(Serialize)]
struct DiffDoc {
    schema: &'static str,
    from: String,
    to: String,
    changes: Vec<Change>,
}

fn difference(from: &Path, to: &Path, format: Format) -> Result<u8, Failure> {
    // 1 says that they differ, so what cannot be compared is 3.
    let record = |path: &Path| match read(path) {
        Ok((_, stored)) => Ok(stored.record),
        Err(error) => Err(Failure { code: CANNOT_TELL, ..error.into() }),
    };
    let changes = checkpoint::diff(&record(from)?, &record(to)?)?;
    let code = u8::from(!changes.is_empty());
    match format.output {
        Output::Json => json(&DiffDoc {
            schema: "truepin.checkpoint-diff/1",
            from: from.display().to_string(),
            to: to.display().to_string(),
            changes,
        })?,
        Output::Table if changes.is_empty() => print("no difference\n")?,
        Output::Table => {
            let value = |v: &Option<Value>| v.as_ref().map_or("-".into(), ToString::to_string);
            let row = |c: &Change| {
                vec![Cell::from(c.path.join(" ")), Cell::from(value(&c.from)), Cell::from(value(&c.to))]
            };
            print(&table(&["WHAT", "FROM", "TO"], &changes.iter().map(row).collect::<Vec<_>>()))?;
        }
    }
    Ok(code)
}
