//! `tests/vm/table` decides whether `make vm-test` passed, so it is tested itself: what is missing anywhere must show.

#![expect(clippy::unwrap_used, reason = "a test's helper: what cannot be set up fails the test")]

use std::{
    fs,
    io::Write,
    process::{Command, Stdio},
};

/// The table over these logs, each of the suite `s` on a kernel; and whether all is well.
fn table(known: &str, logs: &[(&str, Option<&str>)]) -> (String, bool) {
    table_of(MATRIX, "", known, logs)
}

fn table_of(matrix: &str, only: &str, known: &str, logs: &[(&str, Option<&str>)]) -> (String, bool) {
    let dir = tempfile::tempdir().unwrap();
    // The script reads what is known from beside itself.
    let script = dir.path().join("table");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/vm/table"), &script).unwrap();
    fs::write(dir.path().join("kernels.seen"), known).unwrap();
    fs::write(dir.path().join("matrix"), matrix).unwrap();
    fs::create_dir(dir.path().join("logs")).unwrap();
    let mut booted = String::new();
    for (series, log) in logs {
        booted += "s ";
        booted += series;
        booted += " eight 60\n";
        fs::write(dir.path().join(format!("kernel-{series}.info")), format!("version {series}.9-1~x\n"))
            .unwrap();
        fs::write(dir.path().join(format!("logs/s-{series}-eight.took")), "7\n").unwrap();
        if let Some(log) = log {
            fs::write(dir.path().join(format!("logs/s-{series}-eight.log")), log).unwrap();
        }
    }
    let run = Command::new(script)
        .arg(dir.path())
        .env("ONLY", only)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut run = run.unwrap();
    run.stdin.take().unwrap().write_all(booted.as_bytes()).unwrap();
    let out = run.wait_with_output().unwrap();
    (String::from_utf8(out.stdout).unwrap(), out.status.success())
}

/// `s` is all there is.
const MATRIX: &str = "# comment\ns eight 60 6.1 7\n";
const OLD: &str = "# s: about\nok 1 - a: b (0.1 s)\n# SEEN mode | member | no file\n# more\nok 2 - c (0.1 s)\n\
    ok 3 - d # SKIP a moon\nRESULT passed=2 failed=0 skipped=1\n";
const NEW: &str =
    "ok 1 - a: b (0.1 s)\nok 2 - c (2.1 s)\nok 3 - d (0.0 s)\r\nRESULT passed=3 failed=0 skipped=0\n";
const KNOWN: &str = "# comment\n6.1 | mode | member\n";

#[test]
fn a_row_for_each_scenario_and_a_column_for_each_kernel() {
    let (text, well) = table(KNOWN, &[("6.1", Some(OLD)), ("7", Some(NEW))]);
    // Its first line begins with spaces.
    let want = "                           6.1.9      7.9
s, machine eight           7 s        7 s
  a: b                     passed     passed
  c                        passed     passed
    mode                   member
  d                        skipped    passed
passed / skipped / failed  2 / 1 / 0  3 / 0 / 0

6.1: skipped: s: d: a moon

6.1: mode: member, as expected: no file
";
    assert_eq!(text, want);
    assert!(well);
}

#[test]
fn what_went_wrong_or_is_missing_fails() {
    let of = |log: &'static str| vec![("6.1", Some(OLD)), ("7", Some(log))];
    for (what, known, logs, said) in [
        (
            "a failure",
            KNOWN,
            of(
                "ok 1 - a: b (0.1 s)\nnot ok 2 - c # why: x # y\n#   and more\nok 3 - d (0.0 s)\nRESULT passed=2 failed=1 skipped=0\n",
            ),
            "FAILED: 7: s: c: why: x # y and more\n",
        ),
        (
            "a boot that did not end",
            KNOWN,
            of("ok 1 - a: b (0.1 s)\nok 2 - c (0.1 s)\nok 3 - d (0.0 s)\nRESULT none: s: late\n"),
            "FAILED: 7: s: RESULT none: s: late",
        ),
        ("a boot that broke off", KNOWN, of("ok 1 - a: b (0.1 s)\n"), "FAILED: 7: s: no result"),
        (
            "a scenario that is missing",
            KNOWN,
            of("ok 1 - a: b (0.1 s)\nRESULT passed=1 failed=0 skipped=0\n"),
            "7: s: c: not run",
        ),
        ("no log", KNOWN, vec![("6.1", Some(OLD)), ("7", None)], "FAILED: 7: s: no result"),
        ("a kernel that changed", "6.1 | mode | other\n", of(NEW), "6.1: mode: member; it was: other"),
        ("something new", "", of(NEW), "kernels.seen has no line \"6.1 | mode | member\""),
        ("nothing at all", KNOWN, vec![], "nothing was booted"),
    ] {
        let (text, well) = table(known, &logs);
        assert!(text.contains(said), "{what}: {said:?} in:\n{text}");
        assert!(!well, "{what}:\n{text}");
    }
}

/// A line of `kernels.seen` that nothing proves any longer.
#[test]
fn what_no_boot_of_a_whole_run_said_fails() {
    const MORE: &str = "6.1 | mode | member\n7 | mode | partition\n6.12 | mode | partition\n";
    const SAID: &str = "FAILED: nothing said \"7 | mode | partition\", which kernels.seen holds\n";
    let logs = [("6.1", Some(OLD)), ("7", Some(NEW))];
    let (text, well) = table(MORE, &logs);
    assert!(!well && text.contains(SAID) && text.matches("nothing said").count() == 1, "{text}");
    // Of 7 alone; of 6.1 the line is there.
    assert!(!table(MORE, &logs[1..]).1);
    let (text, well) = table(MORE, &logs[..1]);
    assert!(well, "{text}");
    // Another suite, another machine, or scenarios left out: somebody else may say it.
    for (matrix, only) in [
        ("s eight 60 6.1 7\nt eight 60 7\n", ""),
        ("s eight 60 6.1 7\ns standard 60 7\n", ""),
        (MATRIX, "a: b"),
    ] {
        let (text, well) = table_of(matrix, only, MORE, &logs);
        assert!(well, "{matrix:?} {only:?}:\n{text}");
    }
    // That another kernel has more suites is no excuse.
    assert!(!table_of("s eight 60 6.1 7\nt eight 60 6.1\n", "", MORE, &logs).1);
    let (text, well) = table_of("", "", KNOWN, &logs);
    assert!(!well && text.contains("matrix is missing or empty"), "{text}");
}
