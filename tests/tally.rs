//! `tests/tally` decides whether a test run passed, so it is tested itself: every way in which a run can go wrong must
//! end in a failure.

#![expect(clippy::unwrap_used, reason = "a test's helper: what cannot be set up fails the test")]

use std::{fs, process::Command};

/// Output lines and exit status of the tally over a log, with the parts `cargo` and `guests` expected.
fn tally(log: &str) -> (Vec<String>, i32) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("log");
    fs::write(&file, log).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tally");
    let out = Command::new(script).arg(&file).args(["cargo", "guests"]).output().unwrap();
    assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
    let lines = String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect();
    (lines, out.status.code().unwrap())
}

const CARGO: &str =
    "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
const GUESTS: &str = "[smoke 6.12 standard] RESULT passed=6 failed=0 skipped=0\n";

fn log(cargo: &str, cargo_status: u8, guests: &str, guests_status: u8) -> String {
    format!(
        "PART cargo\n{cargo}PART cargo ended with status {cargo_status}\n\
         PART guests\n{guests}PART guests ended with status {guests_status}\n"
    )
}

#[test]
fn sums_what_every_runner_prints() {
    let cargo = format!(
        "{CARGO}assign: 1934 passed, 0 failed, 66 accepted\ntopologies: 40 passed, 0 failed, 4 accepted, 2 absent\n\
         traces: skipped, no folder shared/traces\n{CARGO}skipped: a_ledger: not root\n"
    );
    let guests = format!("{GUESTS}[b 6.12 x] ok 3 - c # SKIP a moon\nRESULT passed=2 failed=0 skipped=1\r\n");
    let (lines, status) = tally(&log(&cargo, 0, &guests, 0));
    // 2 x 5 of cargo less the one that could not run, 2000 + 44 records, 6 + 2 in guests;
    // 2 ignored, 2 absent, 1 folder, 1 in a guest, 1 that could not run.
    assert_eq!(lines.last().unwrap(), "2061 passed, 0 failed, 7 skipped");
    assert!(lines.contains(&"skipped: a_ledger: not root".into()), "{lines:?}");
    assert!(lines.contains(&"skipped: traces: skipped, no folder shared/traces".into()), "{lines:?}");
    assert!(lines.contains(&"skipped: [b 6.12 x] ok 3 - c # SKIP a moon".into()), "{lines:?}");
    assert_eq!(status, 0);
}

#[test]
fn nothing_that_went_wrong_passes() {
    let red_cargo = "test a::b ... FAILED\n\
        test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
    let red_guests = "[s 6.12 x] not ok 2 - b: why\n[s 6.12 x] RESULT passed=1 failed=1 skipped=0\n";
    let no_result = format!("{GUESTS}[s 6.12 x] RESULT none: s-6.12-x: not done after 9 s\n");
    let cases = [
        ("a failed test", log(red_cargo, 101, GUESTS, 0), "10 passed, 1 failed, 0 skipped", "test a::b"),
        (
            "a failed record",
            log("assign: 3 passed, 2 failed, 1 accepted\n", 101, GUESTS, 0),
            "10 passed, 2 failed",
            "",
        ),
        (
            "a failed scenario",
            log(CARGO, 0, red_guests, 123),
            "6 passed, 1 failed, 1 skipped",
            "not ok 2 - b: why",
        ),
        ("a guest without result", log(CARGO, 0, &no_result, 123), "11 passed, 1 failed", "RESULT none"),
        (
            "a compile error",
            log("error: could not compile\n", 101, GUESTS, 0),
            "6 passed, 1 failed",
            "part cargo: ended",
        ),
        (
            "no test at all",
            log("", 0, GUESTS, 0),
            "6 passed, 1 failed, 0 skipped",
            "part cargo: no test passed",
        ),
        ("no guest", log(CARGO, 0, "==> booting\n", 0), "5 passed, 1 failed", "part guests: no test passed"),
        (
            "a guest that ran nothing",
            log(CARGO, 0, "RESULT passed=0 failed=0 skipped=1\n", 1),
            "5 passed, 1 failed",
            "",
        ),
        (
            "a part that broke off",
            format!("PART cargo\n{CARGO}"),
            "5 passed, 2 failed",
            "part cargo: did not end",
        ),
        (
            "a part that is missing",
            log(CARGO, 0, "", 0).split("PART guests").next().unwrap().into(),
            "5 passed, 1 failed",
            "part guests: did not run",
        ),
        ("an empty log", String::new(), "0 passed, 2 failed, 0 skipped", ""),
    ];
    for (what, log, closing, reason) in cases {
        let (lines, status) = tally(&log);
        assert!(lines.last().unwrap().starts_with(closing), "{what}: {lines:?}");
        assert!(lines.iter().any(|l| l.contains(reason)), "{what}: {lines:?}");
        assert_eq!(status, 1, "{what}");
    }
}
