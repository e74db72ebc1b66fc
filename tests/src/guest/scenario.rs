//! Scenarios, suites, and the runner.
//!
//! Steps for each scenario: clean up, run it on a thread of its own under its limit, clean up again, read the kernel
//! log, report. A panic is a failure of that scenario. A scenario that does not come back leaves the machine in an
//! unknown state, so every later one counts as failed ("not run"): nothing is silently left out.

use super::{
    clean,
    kmsg::KernelLog,
    report::{Count, Report, Style},
    wait::secs,
};
use std::{
    fmt::{Debug, Display},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

/// What a scenario gives back. Any error can be thrown with `?`; [`skip`] makes the one that means "left out".
pub type Outcome = anyhow::Result<()>;

/// A named check.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    name: &'static str,
    run: fn(&mut Guest) -> Outcome,
    limit: Duration,
    allowed: &'static [&'static str],
}

impl Scenario {
    /// A scenario with a limit of 60 s of the guest's clock.
    #[must_use]
    pub const fn new(name: &'static str, run: fn(&mut Guest) -> Outcome) -> Self {
        Self { name, run, limit: secs(60), allowed: &[] }
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Another limit, in seconds.
    #[must_use]
    pub const fn limit(self, seconds: u64) -> Self {
        Self { limit: secs(seconds), ..self }
    }

    /// Kernel log lines that hold one of these texts do not fail it, though they speak of a defect. Say why beside it.
    #[must_use]
    pub const fn allow(self, texts: &'static [&'static str]) -> Self {
        Self { allowed: texts, ..self }
    }
}

/// Scenarios that share one boot.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    /// As on the kernel command line: `truepin.suite=NAME`.
    pub name: &'static str,
    /// One line on what it shows.
    pub about: &'static str,
    /// How it is read.
    pub style: Style,
    /// In this order.
    pub scenarios: &'static [Scenario],
}

/// What a scenario is given.
pub struct Guest {
    report: Report,
    /// The machine's name as the host calls it (`tests/vm/machines/`).
    pub machine: String,
    /// Whether what is said ends on a terminal that shows colour.
    pub colour: bool,
}

impl Guest {
    /// A guest that reports to `report`.
    #[must_use]
    pub fn new(report: Report, machine: String, colour: bool) -> Self {
        Self { report, machine, colour }
    }

    /// Says something to whoever reads along: a remark (`# …`), in a story the story itself.
    pub fn say(&self, text: impl Display) {
        self.report.say(text);
    }

    /// Says what this kernel does where kernels differ: a row of the table that `make vm-test` prints, held there
    /// against what was seen before (`tests/vm/kernels.seen`). Few words, without `|`, the same in every run.
    pub fn saw(&self, what: &str, seen: impl Display) {
        self.report.seen(what, seen, "");
    }

    /// As [`Self::saw`], and an error unless it is what was to be expected here `because` of a fact that was probed.
    pub fn expect(&self, what: &str, seen: &str, expected: &str, because: &str) -> Outcome {
        self.report.seen(what, seen, because);
        anyhow::ensure!(seen == expected, "{what}: expected {expected:?}, since {because}; got {seen:?}");
        Ok(())
    }
}

/// The error that leaves a scenario out: `return skip("no cpuset.cpus.exclusive on this kernel")`.
pub fn skip(missing: impl Into<String>) -> Outcome {
    Err(Skip(missing.into()).into())
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Skip(String);

/// An error naming both sides unless they are equal.
#[expect(
    clippy::needless_pass_by_value,
    reason = "callers compare what they have just read; no borrows to write"
)]
pub fn equal<A: Debug + PartialEq<B>, B: Debug>(what: &str, got: A, want: B) -> Outcome {
    anyhow::ensure!(got == want, "{what}: expected {want:?}, got {got:?}");
    Ok(())
}

/// What the runner does around every scenario; a value, so that the runner itself is tested without a machine.
pub struct Around {
    /// Makes the machine clean.
    pub clean: fn() -> anyhow::Result<()>,
    /// Lines of the kernel log since the last call that speak of a defect.
    pub defects: Box<dyn FnMut() -> anyhow::Result<Vec<String>>>,
}

impl Around {
    /// The real thing.
    pub fn machine() -> anyhow::Result<Self> {
        let mut log = KernelLog::open()?;
        Ok(Self { clean: clean::up, defects: Box::new(move || log.defects()) })
    }
}

enum End {
    Passed,
    Skipped(String),
    Failed(String),
    /// It did not come back: nothing after it can be run.
    Hangs(String),
}

/// Runs a suite's scenarios whose name contains `only` (all if empty; `_` there stands for a space, which a kernel
/// command line cannot hold), counted from `first` on.
#[must_use]
pub fn run_suite(suite: &Suite, only: &str, first: usize, guest: Guest, mut around: Around) -> Count {
    let report = guest.report.clone();
    let mut count = Count::default();
    let booted = judge(End::Passed, &[], &report, &mut around);
    if let End::Failed(why) = booted {
        report.failed(0, "boot", &why);
        count.failed += 1;
    }
    let mut guest = Some(guest);
    let wanted = suite.scenarios.iter().filter(|s| s.name.replace(' ', "_").contains(only));
    for (n, scenario) in wanted.enumerate() {
        let n = first + n;
        let start = Instant::now();
        let end = match guest.take() {
            None => End::Failed("not run: an earlier scenario hangs".into()),
            Some(ready) => {
                let (end, ready) = run_one(scenario, ready, &around);
                guest = ready;
                judge(end, scenario.allowed, &report, &mut around)
            }
        };
        match end {
            End::Passed => {
                report.passed(n, scenario.name, start.elapsed());
                count.passed += 1;
            }
            End::Skipped(missing) => {
                report.skipped(n, scenario.name, &missing);
                count.skipped += 1;
            }
            End::Failed(why) | End::Hangs(why) => {
                report.failed(n, scenario.name, &why);
                count.failed += 1;
            }
        }
    }
    count
}

fn run_one(scenario: &Scenario, mut guest: Guest, around: &Around) -> (End, Option<Guest>) {
    if let Err(e) = (around.clean)() {
        return (End::Failed(format!("cleaning up before it: {e:#}")), Some(guest));
    }
    let (tell, told) = channel();
    let run = scenario.run;
    let thread = thread::Builder::new().name("scenario".into()).spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&mut guest)));
        // Nobody listens any more once the limit has passed.
        let _ = tell.send((outcome, guest));
    });
    if let Err(e) = thread {
        return (End::Hangs(format!("no thread to run it: {e}")), None);
    }
    let (outcome, guest) = match told.recv_timeout(scenario.limit) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => {
            let limit = scenario.limit.as_secs();
            return (End::Hangs(format!("not done after its limit of {limit} s")), None);
        }
        Err(RecvTimeoutError::Disconnected) => return (End::Hangs("its thread died".into()), None),
    };
    let end = match outcome {
        Ok(Ok(())) => End::Passed,
        Ok(Err(e)) => match e.downcast_ref::<Skip>() {
            Some(Skip(missing)) => End::Skipped(missing.clone()),
            None => End::Failed(format!("{e:#}")),
        },
        Err(panic) => End::Failed(format!("panicked: {}", panic_text(&*panic))),
    };
    match ((around.clean)(), end) {
        (Ok(()), end) => (end, Some(guest)),
        (Err(e), End::Failed(why)) => (End::Failed(format!("{why}\ncleaning up: {e:#}")), Some(guest)),
        (Err(e), _) => (End::Failed(format!("cleaning up after it: {e:#}")), Some(guest)),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)").to_owned()
}

/// Adds what the kernel has to say.
fn judge(end: End, allowed: &[&str], report: &Report, around: &mut Around) -> End {
    let defects = match (around.defects)() {
        Ok(defects) => defects,
        Err(e) => vec![format!("unknown, the log cannot be read: {e:#}")],
    };
    let (fine, bad): (Vec<_>, Vec<_>) =
        defects.into_iter().partition(|l| allowed.iter().any(|a| l.contains(a)));
    for line in fine {
        report.comment(format_args!("kernel (expected here): {line}"));
    }
    if bad.is_empty() {
        return end;
    }
    let bad = format!("kernel log: {}", bad.join("\nkernel log: "));
    match end {
        End::Failed(why) => End::Failed(format!("{why}\n{bad}")),
        End::Hangs(why) => End::Hangs(format!("{why}\n{bad}")),
        End::Passed | End::Skipped(_) => End::Failed(bad),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::report::tests::Sink;

    fn quiet() -> Around {
        Around { clean: || Ok(()), defects: Box::new(|| Ok(vec![])) }
    }

    fn play(scenarios: &'static [Scenario], only: &str, around: Around) -> (Count, String) {
        let sink = Sink::default();
        let report = Report::new(Box::new(sink.clone()), Style::Tap);
        let guest = Guest::new(report, "standard".into(), false);
        let suite = Suite { name: "t", about: "", style: Style::Tap, scenarios };
        let count = run_suite(&suite, only, 1, guest, around);
        (count, sink.text())
    }

    const MIXED: &[Scenario] = &[
        Scenario::new("is well", |g| {
            g.say("hello");
            Ok(())
        }),
        Scenario::new("is not", |_| equal("answer", 41, 42)),
        Scenario::new("cannot be", |_| skip("a moon")),
        Scenario::new("panics", |_| panic!("at the {}", "disco")),
        Scenario::new("is well again", |_| Ok(())),
    ];

    #[test]
    fn every_end_is_counted_and_said() {
        let (count, text) = play(MIXED, "", quiet());
        assert_eq!(count, Count { passed: 2, failed: 2, skipped: 1 });
        for line in [
            "# hello\nok 1 - is well (",
            "not ok 2 - is not # answer: expected 42, got 41\n",
            "ok 3 - cannot be # SKIP a moon\n",
            "not ok 4 - panics # panicked: at the disco\n",
            "ok 5 - is well again (",
        ] {
            assert!(text.contains(line), "{line:?} in:\n{text}");
        }
        assert_eq!(play(MIXED, "is_well", quiet()).0, Count { passed: 2, failed: 0, skipped: 0 });
    }

    #[test]
    fn what_hangs_fails_with_all_that_follow() {
        const HANGS: &[Scenario] = &[
            Scenario::new("a", |_| Ok(())),
            Scenario::new("b", |_| {
                thread::sleep(secs(3));
                Ok(())
            })
            .limit(0),
            Scenario::new("c", |_| Ok(())),
        ];
        let (count, text) = play(HANGS, "", quiet());
        assert_eq!(count, Count { passed: 1, failed: 2, skipped: 0 });
        assert!(text.contains("b # not done after its limit") && text.contains("c # not run"), "{text}");
    }

    #[test]
    fn the_kernels_complaints_fail_a_scenario_unless_expected() {
        const TWO: &[Scenario] = &[
            Scenario::new("a", |_| Ok(())).allow(&["cpuset.c:927"]),
            Scenario::new("b", |_| skip("x")).allow(&["cpuset.c:927"]),
        ];
        let log = |lines: &'static [&'static str]| {
            let mut n = 0;
            Around {
                clean: || Ok(()),
                defects: Box::new(move || {
                    n += 1;
                    Ok(lines.get(n - 1).iter().filter(|l| !l.is_empty()).map(|l| (**l).to_owned()).collect())
                }),
            }
        };
        let (count, text) = play(TWO, "", log(&["", "WARNING: cpuset.c:927", "BUG: other"]));
        assert_eq!(count, Count { passed: 1, failed: 1, skipped: 0 });
        assert!(text.contains("# kernel (expected here): WARNING"), "{text}");
        assert!(text.contains("not ok 2 - b # kernel log: BUG: other"), "{text}");
        let (count, text) = play(TWO, "", log(&["WARNING: at boot"]));
        assert_eq!(count, Count { passed: 1, failed: 1, skipped: 1 });
        assert!(text.contains("not ok 0 - boot # kernel log: WARNING: at boot"), "{text}");
    }

    #[test]
    fn a_machine_that_cannot_be_cleaned_fails_the_scenario() {
        let around = Around { clean: || anyhow::bail!("stuck"), ..quiet() };
        let (count, text) = play(MIXED, "is_well_again", around);
        assert_eq!(count, Count { passed: 0, failed: 1, skipped: 0 });
        assert!(text.contains("cleaning up before it: stuck"), "{text}");
    }
}
