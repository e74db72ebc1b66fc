//! Recorded machines: `NAME.tar.gz` (a tree `NAME/sys/…`) against `NAME.json` (what hwloc, lscpu and a plain reading
//! made of it). Every field of `truepin.topology/1` is compared exactly, except those that the record's
//! `disagreements` free, because its own sources contradict each other there.

use crate::{Mismatch, Tally};
use serde_json::Value;
use std::{
    collections::BTreeSet,
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
                if freed {
                    tally.accepted += 1;
                } else {
                    tally.passed += 1;
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

/// What differs, and whether some field was not compared.
fn machine(folder: &Path, name: &str) -> Result<(Vec<Mismatch>, bool), String> {
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
    Ok((diff.mismatches, !freed.fields.is_empty() || !freed.cpus_of_node.is_empty()))
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

impl Freed {
    fn of(record: &Value) -> Self {
        let mut freed = Self::default();
        for disagreement in record["disagreements"].as_array().into_iter().flatten() {
            let field = disagreement["field"].as_str().unwrap_or_default();
            let fields: &[&'static str] = match field {
                "cache L2" => &["l2"],
                "cache L3" => &["l3"],
                "numa nodes" => &["nodes", "node"],
                "package" => &["package"],
                "core" => &["core"],
                "die" => &["die"],
                "node" => &["node"],
                "online" => &["online", "cpus"],
                _ => &[],
            };
            freed.fields.extend(fields);
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
