//! Comparison with recorded answers: `cargo test --release --test conformance -- --nocapture`.
//!
//! The records are no part of the repository: `$TRUEPIN_SHARED` (default `../shared`, seen from the workspace) holds a
//! folder per kind. A kind is one line of output, counted in records; a folder that is absent is skipped by name.
//! The folders may hold other records of the same shape: nothing here knows a name or a count.

mod assign;
mod checkpoints;
mod hints;
mod machines;
mod merge;
mod topologies;

use serde_json::Value;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// One way of comparing.
struct Kind {
    name: &'static str,
    /// Below the shared folder.
    folder: &'static str,
    compare: fn(&Path) -> Result<Tally, String>,
}

/// In the order of the output.
const KINDS: &[Kind] = &[
    Kind { name: "assign", folder: "vectors", compare: assign::compare },
    Kind { name: "hints", folder: "vectors", compare: hints::compare },
    Kind { name: "merge", folder: "vectors", compare: merge::compare },
    Kind { name: "checkpoints", folder: "vectors", compare: checkpoints::compare },
    Kind { name: "topologies", folder: "topologies", compare: topologies::compare },
];

/// What came of a kind's records.
#[derive(Default)]
struct Tally {
    passed: usize,
    /// Equal in all that was compared, where the record itself frees some field.
    accepted: usize,
    failed: usize,
    /// Records whose input is not there.
    absent: usize,
    mismatches: Vec<Mismatch>,
}

/// One value that is not as recorded.
struct Mismatch {
    id: String,
    expected: String,
    got: String,
}

fn shared() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    workspace.join(env::var_os("TRUEPIN_SHARED").unwrap_or_else(|| "../shared".into()))
}

/// The records of a file of JSON lines.
fn records(path: &Path) -> Result<Vec<Value>, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| serde_json::from_str(line).map_err(|e| format!("{}:{}: {e}", path.display(), i + 1)))
        .collect()
}

fn main() -> ExitCode {
    let shared = shared();
    let mut sound = true;
    for kind in KINDS {
        let folder = shared.join(kind.folder);
        if !folder.is_dir() {
            println!("{}: skipped, no folder {}", kind.name, folder.display());
            continue;
        }
        let tally = match (kind.compare)(&folder) {
            Ok(tally) => tally,
            Err(why) => {
                println!("{}: {why}", kind.name);
                sound = false;
                continue;
            }
        };
        let absent = if tally.absent > 0 { format!(", {} absent", tally.absent) } else { String::new() };
        println!(
            "{}: {} passed, {} failed, {} accepted{absent}",
            kind.name, tally.passed, tally.failed, tally.accepted
        );
        for m in tally.mismatches.iter().take(10) {
            println!("  {}\n    expected {}\n    got      {}", m.id, m.expected, m.got);
        }
        sound &= tally.failed == 0;
    }
    if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
