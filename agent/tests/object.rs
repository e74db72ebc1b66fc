//! What the committed object carries: everything the loader needs, nothing of the machine that built it.

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
