//! What the committed object carries: everything the loader needs, nothing of the machine that built it. And what the
//! record beside it notices.
#![allow(clippy::unwrap_used, reason = "test code: a panic is a failure")]

#[path = "../../ebpf/hash.rs"]
mod hash;

use std::{fs, path::Path};
use truepin_agent::bpf::OBJECT;

/// Runs of printable characters, four or more, as strings(1) has them.
fn strings(bytes: &[u8]) -> Vec<String> {
    bytes
        .split(|b| !(b' '..=b'~').contains(b))
        .filter(|run| run.len() >= 4)
        .map(|run| String::from_utf8_lossy(run).into_owned())
        .collect()
}

/// A word after a slash that nothing precedes, or a name with dots that ends like a host's.
fn betrays_a_machine(text: &str) -> bool {
    let absolute = text.starts_with('/') && text[1..].starts_with(|c: char| c.is_ascii_alphanumeric());
    let host = text.split(['/', ' ', '-']).any(|word| {
        word.split('.').count() >= 2
            && [".io", ".com", ".org", ".net", ".internal", ".local"].iter().any(|end| word.ends_with(end))
    });
    absolute || host
}

#[test]
fn no_path_and_no_host_of_the_builder() {
    let all = strings(OBJECT);
    assert!(
        all.iter().any(|s| s == "truepin/ebpf/src/ledger.rs"),
        "the names of sources are there, shortened"
    );
    let bad: Vec<_> = all.iter().filter(|s| betrays_a_machine(s)).collect();
    assert!(bad.is_empty(), "{bad:?}");
    for (text, expected) in [
        ("/home/me/truepin/ebpf/src/main.rs", true),
        ("cargo-home/registry/src/index.crates.io-1949cf8c6b5b557f/aya-ebpf", true),
        ("mirror.example.com", true),
        ("truepin/ebpf/src/main.rs", false),
        ("crates/aya-ebpf-0.2.1/src/lib.rs", false),
        ("tp_btf/sched_switch", false),
    ] {
        assert_eq!(betrays_a_machine(text), expected, "{text}");
    }
}

#[test]
fn sections() {
    let all = strings(OBJECT);
    let has = |name: &str| all.iter().any(|s| s == name);
    for name in [
        "Dual MIT/GPL",
        ".BTF",
        ".BTF.ext",
        "tp_btf/sched_switch",
        "tp_btf/sched_migrate_task",
        "tp_btf/sched_wakeup_new",
    ] {
        assert!(has(name) || all.iter().any(|s| s.ends_with(name)), "{name}");
    }
    assert!(!all.iter().any(|s| s.contains(".debug_")), "debug sections only make every agent larger");
    assert!(OBJECT.len() < 200_000, "{} bytes", OBJECT.len());
}

/// A copy of what the record is made from.
fn copy_of_tree() -> tempfile::TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let copy = tempfile::tempdir().unwrap();
    let mut paths: Vec<String> = hash::files(&root).unwrap().into_iter().collect();
    paths.extend(["Cargo.lock".into(), hash::OBJECT.into(), hash::RECORD.into()]);
    for path in paths {
        let to = copy.path().join(&path);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(root.join(&path), to).unwrap();
    }
    copy
}

/// Appends to a file of the tree, or replaces a text in it.
fn change(root: &Path, path: &str, from: &str, to: &str) {
    let file = root.join(path);
    let mut bytes = fs::read(&file).unwrap();
    if from.is_empty() {
        bytes.extend(to.as_bytes());
    } else {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from), "{path} has no {from}");
        bytes = text.replacen(from, to, 1).into_bytes();
    }
    fs::write(file, bytes).unwrap();
}

#[test]
fn the_record_notices_what_matters() {
    let record = fs::read_to_string(copy_of_tree().path().join(hash::RECORD)).unwrap();
    assert_eq!(hash::describe(copy_of_tree().path()).unwrap(), record, "the same on every machine and path");
    let lock = fs::read_to_string(copy_of_tree().path().join("Cargo.lock")).unwrap();
    let entry = |name: &str| {
        let start = lock.find(&format!("name = \"{name}\"\n")).unwrap();
        lock[start..].split_inclusive('\n').take(2).collect::<String>()
    };
    let (kernel_side, user_side) = (entry("aya-ebpf"), entry("crc32fast"));
    let newer = |e: &str| e.replace("version = \"", "version = \"9");
    for (path, from, to, noticed) in [
        ("ebpf/src/ledger.rs", "", "// a comment\n", true),
        ("ebpf/abi/Cargo.toml", "", "# a comment\n", true),
        ("ebpf/build.sh", "", "# a comment\n", true),
        ("ebpf/prebuilt/truepin.bpf.o", "", "x", true),
        ("Cargo.lock", kernel_side.as_str(), newer(&kernel_side).as_str(), true),
        ("Cargo.lock", user_side.as_str(), newer(&user_side).as_str(), false),
    ] {
        let tree = copy_of_tree();
        change(tree.path(), path, from, to);
        assert_eq!(hash::describe(tree.path()).unwrap() != record, noticed, "{path}: {to}");
    }
    let tree = copy_of_tree();
    fs::write(tree.path().join("ebpf/src/new.rs"), "").unwrap();
    assert_ne!(hash::describe(tree.path()).unwrap(), record);
    fs::remove_file(tree.path().join(hash::OBJECT)).unwrap();
    assert!(hash::describe(tree.path()).unwrap_err().contains(hash::OBJECT));
}
