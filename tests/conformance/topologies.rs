//! Recorded machines: `NAME.tar.gz` (a tree `NAME/sys/…`) against `NAME.json` (what hwloc, lscpu and a plain reading
//! made of it). Every field of `truepin.topology/1` is compared exactly, except those that the record's
//! `disagreements` free, because its own sources contradict each other there.
//!
//! With `TRUEPIN_ACCEPTED=1` each machine that is only accepted gets a line for each field: which disagreement frees it, and
//! whether the value is as recorded all the same.

use crate::{Mismatch, Tally};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    path::Path,
};
use truepin::topology::render;
use truepin_agent::sysfs;

const LISTS: [&str; 6] = ["online", "present", "possible", "offline", "isolated", "nohz_full"];
const CPU: [&str; 10] = ["cpu", "package", "die", "cluster", "core", "l2", "l3", "book", "drawer", "node"];
const NODE: [&str; 4] = ["id", "cpus", "memory_bytes", "distance"];

/// Compares every machine in the folder.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("cannot list {}: {e}", folder.display()))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let file = entry.map_err(|e| format!("cannot list {}: {e}", folder.display()))?.file_name();
        if let Some(name) = file.to_string_lossy().strip_suffix(".json") {
            names.insert(name.to_owned());
        }
    }
    if names.is_empty() {
        return Err(format!("no machine in {}", folder.display()));
    }
    let mut tally = Tally::default();
    for name in &names {
        if !folder.join(format!("{name}.tar.gz")).exists() {
            tally.absent += 1;
            continue;
        }
        match machine(folder, name) {
            Ok((mismatches, freed)) if mismatches.is_empty() => {
                if freed.is_empty() {
                    tally.passed += 1;
                } else {
                    tally.accepted += 1;
                    if env::var_os("TRUEPIN_ACCEPTED").is_some() {
                        for line in freed {
                            println!("  accepted | {name} | {line}");
                        }
                    }
                }
            }
            Ok((mismatches, _)) => {
                tally.failed += 1;
                tally.mismatches.extend(mismatches);
            }
            Err(got) => {
                tally.failed += 1;
                tally.mismatches.push(Mismatch { id: name.clone(), expected: "a machine".into(), got });
            }
        }
    }
    Ok(tally)
}

/// What differs, and a line for each field that counts for nothing.
fn machine(folder: &Path, name: &str) -> Result<(Vec<Mismatch>, Vec<String>), String> {
    let text = fs::read_to_string(folder.join(format!("{name}.json"))).map_err(|e| e.to_string())?;
    let expected: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;

    let dir = scratch().map_err(|e| e.to_string())?;
    let archive = File::open(folder.join(format!("{name}.tar.gz"))).map_err(|e| e.to_string())?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    archive.set_preserve_mtime(false);
    archive.unpack(dir.path()).map_err(|e| format!("cannot unpack: {e}"))?;
    let topology = sysfs::topology(&dir.path().join(name)).map_err(|e| chain(&e))?;
    let got = serde_json::to_value(render::document(&topology)).map_err(|e| e.to_string())?;

    let freed = Freed::of(&expected);
    let mut diff = Diff { name, mismatches: Vec::new() };
    for field in LISTS.into_iter().filter(|f| !freed.fields.contains(*f)) {
        diff.value(field, &expected[field], &got[field]);
    }
    if !freed.fields.contains("cpus") {
        for (path, e, g) in diff.rows("cpus", &expected, &got) {
            for field in CPU.into_iter().filter(|f| !freed.fields.contains(*f)) {
                diff.value(&format!("{path}.{field}"), &e[field], &g[field]);
            }
        }
    }
    if !freed.fields.contains("nodes") {
        for (path, e, g) in diff.rows("nodes", &expected, &got) {
            for field in NODE {
                if field != "cpus" || !e["id"].as_u64().is_some_and(|id| freed.cpus_of_node.contains(&id)) {
                    diff.value(&format!("{path}.{field}"), &e[field], &g[field]);
                }
            }
        }
    }
    Ok((diff.mismatches, freed.lines(&expected, &got)))
}

/// In memory where that is offered: a machine of 2048 CPUs has 75,000 files, 26 s on a disk and 2 s there.
fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// The fields that a record's disagreements free.
#[derive(Default)]
struct Freed {
    fields: BTreeSet<&'static str>,
    cpus_of_node: BTreeSet<u64>,
}

/// The values of a field: of the machine, of each CPU, or of each node; of a list its rows, as far as they are compared.
fn values(document: &Value, field: &str) -> Vec<Value> {
    let rows = |list: &str| document[list].as_array().cloned().unwrap_or_default();
    let cut = |row: &Value, fields: &[&str]| fields.iter().map(|f| row[f].clone()).collect::<Vec<_>>().into();
    match field {
        "cpus" => rows("cpus").iter().map(|row| cut(row, &CPU)).collect(),
        "nodes" => rows("nodes").iter().map(|row| cut(row, &NODE)).collect(),
        _ if CPU.contains(&field) => rows("cpus").iter().map(|row| row[field].clone()).collect(),
        _ => vec![document[field].clone()],
    }
}

impl Freed {
    /// `field | why | as recorded?` for each of them.
    fn lines(&self, record: &Value, got: &Value) -> Vec<String> {
        let why = |name: &str| {
            let all = record["disagreements"].as_array().into_iter().flatten();
            let one = all.filter(|d| Self::fields(d["field"].as_str().unwrap_or_default()).contains(&name));
            let texts = one.map(|d| {
                let said = if d["groups"].is_null() { d } else { &d["groups"] };
                let said: Vec<String> = ["hwloc", "lscpu", "raw"]
                    .into_iter()
                    .filter(|source| !said[source].is_null())
                    .map(|source| format!("{source} {}", said[source]))
                    .collect();
                format!("{}: {}", d["field"].as_str().unwrap_or_default(), said.join(", "))
            });
            texts.collect::<Vec<_>>().join("; ")
        };
        let mut lines = Vec::new();
        for field in &self.fields {
            let (expected, got) = (values(record, field), values(got, field));
            let equal = expected.iter().zip(&got).filter(|(e, g)| e == g).count();
            let all = expected.len().max(got.len());
            let same = match equal {
                _ if equal == all => "as recorded all the same".to_owned(),
                _ => format!("as recorded in {equal} of {all} values"),
            };
            lines.push(format!("{field} | {} | {same}", why(field)));
        }
        let cpus = |document: &Value, id: u64| {
            let all = document["nodes"].as_array();
            all.and_then(|nodes| nodes.iter().find(|n| n["id"] == id).map(|n| n["cpus"].clone()))
        };
        for id in &self.cpus_of_node {
            let same = if cpus(record, *id) == cpus(got, *id) {
                "as recorded all the same"
            } else {
                "not as recorded"
            };
            let field = format!("node {id} cpus");
            let one = record["disagreements"].as_array().into_iter().flatten().find(|d| d["field"] == field);
            let why = one.map_or(String::new(), |d| format!("hwloc {}, raw {}", d["hwloc"], d["raw"]));
            lines.push(format!("{field} | {why} | {same}"));
        }
        lines
    }

    /// The fields that a disagreement frees.
    fn fields(disagreement: &str) -> &'static [&'static str] {
        match disagreement {
            "cache L2" => &["l2"],
            "cache L3" => &["l3"],
            "numa nodes" => &["nodes", "node"],
            "package" => &["package"],
            "core" => &["core"],
            "die" => &["die"],
            "node" => &["node"],
            "online" => &["online", "cpus"],
            _ => &[],
        }
    }

    fn of(record: &Value) -> Self {
        let mut freed = Self::default();
        for disagreement in record["disagreements"].as_array().into_iter().flatten() {
            let field = disagreement["field"].as_str().unwrap_or_default();
            freed.fields.extend(Self::fields(field));
            let node = field.strip_prefix("node ").and_then(|f| f.strip_suffix(" cpus"));
            freed.cpus_of_node.extend(node.and_then(|n| n.parse::<u64>().ok()));
        }
        freed
    }
}

struct Diff<'a> {
    name: &'a str,
    mismatches: Vec<Mismatch>,
}

impl Diff<'_> {
    /// A key that is absent in the record is `null`.
    fn value(&mut self, path: &str, expected: &Value, got: &Value) {
        if expected != got {
            let id = format!("{} {path}", self.name);
            self.mismatches.push(Mismatch { id, expected: expected.to_string(), got: got.to_string() });
        }
    }

    /// The rows of two arrays side by side; another number of rows is a mismatch of its own.
    fn rows(&mut self, field: &str, expected: &Value, got: &Value) -> Vec<(String, Value, Value)> {
        let rows = |v: &Value| v[field].as_array().cloned().unwrap_or_default();
        let (expected, got) = (rows(expected), rows(got));
        self.value(&format!("{field}.length"), &expected.len().into(), &got.len().into());
        let pairs = expected.into_iter().zip(got).enumerate();
        pairs.map(|(i, (e, g))| (format!("{field}[{i}]"), e, g)).collect()
    }
}
