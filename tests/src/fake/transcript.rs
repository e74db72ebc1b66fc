//! What a real kernel showed while it did scripts, as text: written in a guest once, compared with the fake anywhere
//! and as often as the model changes.
//!
//! | line | means |
//! | --- | --- |
//! | `== name` | a script starts; the values after it stood before its first operation |
//! | `> a/cpuset.cpus = 2-3` | an operation |
//! | `= EINVAL` | its result, `ok` or the error |
//! | `+ KEY<tab>VALUE`, `- KEY` | a value that is new or another than before, and one that is gone |

use super::{
    Behaviour, FakeKernel,
    lockstep::{Difference, LockstepError, Report, differences},
    script::{self, Digest, FakeWorld, Op, Script, Snapshot},
};
use truepin::{CpuSet, NodeSet};

/// Writes the lines.
pub(super) struct Writer<'a> {
    line: &'a mut dyn FnMut(&str),
    last: Snapshot,
}

impl<'a> Writer<'a> {
    /// Gives every line to `line`.
    pub(super) fn new(line: &'a mut dyn FnMut(&str)) -> Self {
        Self { line, last: Snapshot::new() }
    }

    /// A script starts, with this to be seen.
    pub(super) fn begin(&mut self, name: &str, shot: &Snapshot) {
        (self.line)(&format!("== {name}"));
        self.last.clear();
        self.values(shot);
    }

    /// An operation, its result, and what shows then.
    pub(super) fn operation(&mut self, line: &str, result: &str, shot: &Snapshot) {
        (self.line)(&format!("> {line}"));
        (self.line)(&format!("= {result}"));
        self.values(shot);
    }

    fn values(&mut self, shot: &Snapshot) {
        for key in self.last.keys().filter(|key| !shot.contains_key(*key)) {
            (self.line)(&format!("- {key}"));
        }
        for (key, value) in shot.iter().filter(|(key, value)| self.last.get(*key) != Some(value)) {
            (self.line)(&format!("+ {key}\t{value}"));
        }
        self.last.clone_from(shot);
    }
}

/// One script of a transcript.
#[derive(Debug, Default)]
struct Told {
    name: String,
    start: Snapshot,
    /// The line, the operation, the result, and what showed.
    ops: Vec<(String, Op, String, Snapshot)>,
}

/// Holds the fake to a transcript from a machine with CPUs 0-7 and nodes 0-1. A script ends at the first operation
/// with a difference, as in [`super::lockstep()`].
pub fn compare(text: &str, behaviour: Behaviour) -> Result<Report, LockstepError> {
    let mut report = Report::default();
    for told in parse(text)? {
        let (online, nodes): (CpuSet, NodeSet) =
            ((0..8).map(truepin::CpuId).collect(), (0..2).map(truepin::NodeId).collect());
        let kernel = FakeKernel::new(behaviour, online, nodes);
        let mut fake = FakeWorld::new(kernel).map_err(LockstepError::Fake)?;
        report.scripts += 1;
        let found = report.differences.len();
        let mut digest = Digest::default();
        let same = |report: &mut Report,
                    op: (usize, &str),
                    results: (&str, &str),
                    fake: &FakeWorld,
                    real: &Snapshot| {
            let (mut expected, mut got) = (fake.snapshot(), real.clone());
            expected.insert("result".into(), results.0.into());
            got.insert("result".into(), results.1.into());
            let (values, differing) = differences(&told.name, op, &expected, &got);
            report.values += values;
            report.differences.extend::<Vec<Difference>>(differing);
        };
        same(&mut report, (0, "start"), ("", ""), &fake, &told.start);
        for (n, (line, op, result, shot)) in told.ops.iter().enumerate() {
            let expected = script::outcome(fake.run(op));
            report.ops += 1;
            same(&mut report, (n + 1, line), (&expected, result), &fake, shot);
            if report.differences.len() > found {
                break;
            }
            digest.add(result, shot);
        }
        if report.differences.len() == found {
            report.answers.push((told.name.clone(), digest.value()));
        }
    }
    Ok(report)
}

fn parse(text: &str) -> Result<Vec<Told>, LockstepError> {
    let mut all: Vec<Told> = Vec::new();
    let mut shot = Snapshot::new();
    for line in text.lines() {
        let wrong = |reason: &str| {
            LockstepError::Script(script::ScriptError { line: line.into(), reason: reason.into() })
        };
        let (sign, rest) = line.split_once(' ').unwrap_or((line, ""));
        if sign == "==" {
            shot = Snapshot::new();
            all.push(Told { name: rest.into(), ..Told::default() });
            continue;
        }
        let told = all.last_mut().ok_or_else(|| wrong("before any script"))?;
        match sign {
            ">" => {
                let op = script::operation(rest).map_err(|reason| wrong(&reason))?;
                told.ops.push((rest.into(), op, String::new(), Snapshot::new()));
            }
            "=" => told.ops.last_mut().ok_or_else(|| wrong("before any operation"))?.2 = rest.into(),
            "-" => {
                shot.remove(rest);
            }
            "+" => {
                let (key, value) = rest.split_once('\t').ok_or_else(|| wrong("no value"))?;
                shot.insert(key.into(), value.into());
            }
            _ => return Err(wrong("no such line")),
        }
        match told.ops.last_mut() {
            Some(op) => op.3.clone_from(&shot),
            None => told.start.clone_from(&shot),
        }
    }
    Ok(all)
}

/// The scripts of a transcript.
pub fn scripts(text: &str) -> Result<Vec<Script>, LockstepError> {
    let told = parse(text)?;
    Ok(told
        .into_iter()
        .map(|t| Script { name: t.name, ops: t.ops.into_iter().map(|(line, op, ..)| (line, op)).collect() })
        .collect())
}
