//! Refuses to embed a kernel half that was not built from this tree.

#[path = "../ebpf/hash.rs"]
mod hash;

use std::{fs, path::Path, process::ExitCode};

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match check(&root) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}: run `make bpf`");
            ExitCode::FAILURE
        }
    }
}

fn check(root: &Path) -> Result<(), String> {
    // A folder means all files in it; Cargo.lock changes for other reasons too, but the hash is a matter of 1 ms.
    for path in ["ebpf", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    let record = root.join(hash::RECORD);
    let recorded = fs::read_to_string(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    let found = hash::describe(root)?;
    for (was, is) in recorded.lines().zip(found.lines()) {
        if was != is {
            return Err(format!(
                "{} is not what this tree builds (recorded {was}, found {is})",
                hash::OBJECT
            ));
        }
    }
    if recorded.lines().count() == found.lines().count() {
        Ok(())
    } else {
        Err(format!("{}: not two lines", record.display()))
    }
}
