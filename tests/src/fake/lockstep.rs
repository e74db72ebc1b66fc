//! The fake kernel and a real one do the same scripts, and every value is compared after every operation.

use super::{
    Behaviour, Errno, FakeKernel,
    real::RealWorld,
    script::{self, FakeWorld, Script, ScriptError, Snapshot},
    transcript,
};
use std::{collections::BTreeSet, fmt, path::Path, thread, time::Duration};
use truepin::{CpuSet, NodeSet};

/// The kernel does some things later (a process that has ended still populates its cgroup for a moment on 7.3), so
/// a difference counts when it is still there after so many looks, so long apart.
const SETTLES: u32 = 4;
const SETTLE: Duration = Duration::from_millis(50);

/// One value in which the two kernels differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The script.
    pub script: String,
    /// Number of the operation in it, from 1, and its line; 0 for the state before the first.
    pub op: (usize, String),
    /// The file, `task NAME`, or `result` for the error number.
    pub key: String,
    /// What the fake says.
    pub fake: String,
    /// What the real kernel says.
    pub real: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { script, op: (n, line), key, fake, real } = self;
        write!(f, "{script}, {n} ({line}), {key}, fake {fake:?}, real {real:?}")
    }
}

/// What was compared and what differed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Scripts run.
    pub scripts: usize,
    /// Operations done, those after a difference excluded.
    pub ops: usize,
    /// Values compared.
    pub values: usize,
    /// A script ends at the first operation with a difference.
    pub differences: Vec<Difference>,
    /// What the real kernel answered to each script that has no difference, as [`script::Digest`]. Recorded in
    /// `truth/`, this lets any machine hold the fake to the real kernel's word.
    pub answers: Vec<(String, u32)>,
}

impl Report {
    /// The lines of a recording: eight hexadecimal digits and the script's name.
    #[must_use]
    pub fn recording(&self) -> String {
        self.answers
            .iter()
            .fold(String::new(), |text, (name, answer)| text + &format!("{answer:08x} {name}\n"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for difference in &self.differences {
            writeln!(f, "{difference}")?;
        }
        let Self { scripts, ops, values, differences, .. } = self;
        write!(f, "{scripts} scripts, {ops} operations, {values} values, {} differences", differences.len())
    }
}

/// Why the comparison could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LockstepError {
    /// A shipped script is wrong.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// The machine is too small for the scripts, or in use.
    #[error("lockstep needs {need}, found {found:?}")]
    Machine {
        /// What is needed.
        need: &'static str,
        /// What is there.
        found: String,
    },
    /// Something around the scripts failed.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        cause: std::io::Error,
    },
    /// A script could not be run to its end.
    #[error("{script}, {line}: {cause}")]
    At {
        /// The script.
        script: String,
        /// The operation, `before` or `after`.
        line: String,
        /// Why.
        cause: Box<LockstepError>,
    },
    /// The fake refused its own set-up.
    #[error("the fake refuses its set-up: {0}")]
    Fake(Errno),
}

/// Runs scripts on the kernel of this machine, whose cgroup2 is mounted at `mount`, and on a fake of this behaviour
/// ([`Behaviour::of`] the running release).
///
/// Needs root, 8 CPUs and 2 NUMA nodes with memory, no partition and no other user of cpusets: a guest. CPUs go
/// offline and online, top-level cgroups come and go. The binary's `main` must begin with
/// [`super::child_entry`], because the processes of the scripts are started from the same binary.
pub fn lockstep(mount: &Path, behaviour: Behaviour, scripts: &[Script]) -> Result<Report, LockstepError> {
    let mut real = RealWorld::new(mount)?;
    let mut report = Report::default();
    for script in scripts {
        report.scripts += 1;
        let at = |line: &str| {
            let (script, line) = (script.name.clone(), line.to_owned());
            move |cause| LockstepError::At { script, line, cause: Box::new(cause) }
        };
        real.begin().map_err(at("before"))?;
        let fake = machine(&real, behaviour)?;
        let run = side_by_side(script, fake, &mut real, &mut report);
        // The machine is put back even where the run broke off.
        let end = real.end().map_err(at("after"));
        run?;
        end?;
    }
    real.restore()?;
    Ok(report)
}

fn machine(real: &RealWorld, behaviour: Behaviour) -> Result<FakeWorld, LockstepError> {
    let set = |what, text: &str| {
        text.parse::<CpuSet>().map_err(|e| LockstepError::Machine { need: what, found: e.to_string() })
    };
    let online = set("a list of online CPUs", &RealWorld::online()?)?;
    let possible = set("a list of possible CPUs", &RealWorld::possible()?)?;
    let nodes: NodeSet = real.nodes()?.parse().map_err(|e: truepin::idset::ListError| {
        LockstepError::Machine { need: "a list of memory nodes", found: e.to_string() }
    })?;
    if online.to_string() != "0-7" || nodes.to_string() != "0-1" {
        let found = format!("CPUs {online}, nodes {nodes}");
        return Err(LockstepError::Machine { need: "CPUs 0-7 online and nodes 0-1", found });
    }
    let kernel = FakeKernel::new(behaviour, online, nodes).with_possible(&possible);
    FakeWorld::new(kernel).map_err(LockstepError::Fake)
}

fn side_by_side(
    script: &Script,
    mut fake: FakeWorld,
    real: &mut RealWorld,
    report: &mut Report,
) -> Result<(), LockstepError> {
    let found = report.differences.len();
    let mut digest = script::Digest::default();
    compare(script, (0, "start"), ("", ""), &fake, real, report)?;
    for (n, (line, op)) in script.ops.iter().enumerate() {
        let result = real.run(op).map_err(|cause| {
            let (script, line) = (script.name.clone(), line.clone());
            LockstepError::At { script, line, cause: Box::new(cause) }
        })?;
        let (expected, got) = (script::outcome(fake.run(op)), script::outcome(result));
        report.ops += 1;
        let shot = compare(script, (n + 1, line), (&expected, &got), &fake, real, report)?;
        if report.differences.len() > found {
            return Ok(());
        }
        digest.add(&got, &shot);
    }
    report.answers.push((script.name.clone(), digest.value()));
    Ok(())
}

fn compare(
    script: &Script,
    op: (usize, &str),
    results: (&str, &str),
    fake: &FakeWorld,
    real: &mut RealWorld,
    report: &mut Report,
) -> Result<Snapshot, LockstepError> {
    let mut expected = fake.snapshot();
    expected.insert("result".into(), results.0.into());
    let look = || -> Result<Snapshot, LockstepError> {
        let mut got = real.snapshot()?;
        got.insert("result".into(), results.1.into());
        Ok(got)
    };
    let mut got = look()?;
    for _ in 0..SETTLES {
        if got == expected {
            break;
        }
        thread::sleep(SETTLE);
        got = look()?;
    }
    let (values, found) = differences(&script.name, op, &expected, &got);
    report.values += values;
    report.differences.extend(found);
    got.remove("result");
    Ok(got)
}

/// How many values there are, and those that differ.
pub(super) fn differences(
    script: &str,
    op: (usize, &str),
    expected: &Snapshot,
    got: &Snapshot,
) -> (usize, Vec<Difference>) {
    let keys: BTreeSet<_> = expected.keys().chain(got.keys()).collect();
    let differing = keys.iter().filter(|key| expected.get(**key) != got.get(**key)).map(|key| {
        let value = |shot: &Snapshot| shot.get(*key).cloned().unwrap_or_else(|| "nothing".into());
        let (op, key) = ((op.0, op.1.to_owned()), (*key).clone());
        Difference { script: script.into(), op, fake: value(expected), real: value(got), key }
    });
    (keys.len(), differing.collect())
}

/// Does scripts on the real kernel and gives what shows to `line`, as [`super::transcript`] has it. The fake only says
/// when to stop waiting: what shows is taken at once while it is what a kernel of this behaviour is thought to show.
pub fn tell(
    mount: &Path,
    behaviour: Behaviour,
    scripts: &[Script],
    line: &mut dyn FnMut(&str),
) -> Result<(), LockstepError> {
    let mut real = RealWorld::new(mount)?;
    let mut told = transcript::Writer::new(line);
    for script in scripts {
        let at = |line: &str| {
            let (script, line) = (script.name.clone(), line.to_owned());
            move |cause| LockstepError::At { script, line, cause: Box::new(cause) }
        };
        real.begin().map_err(at("before"))?;
        let mut fake = machine(&real, behaviour)?;
        let mut agrees = true;
        told.begin(&script.name, &settled(&real).map_err(at("start"))?);
        for (line, op) in &script.ops {
            let result = script::outcome(real.run(op).map_err(at(line))?);
            agrees &= script::outcome(fake.run(op)) == result;
            let mut shot = real.snapshot().map_err(at(line))?;
            agrees &= shot == fake.snapshot();
            if !agrees {
                shot = settled(&real).map_err(at(line))?;
                agrees = shot == fake.snapshot();
            }
            told.operation(line, &result, &shot);
        }
        real.end().map_err(at("after"))?;
    }
    real.restore()
}

/// What shows once it shows the same so often, so long apart.
fn settled(real: &RealWorld) -> Result<Snapshot, LockstepError> {
    let mut last = real.snapshot()?;
    let mut same = 0;
    while same < SETTLES {
        thread::sleep(SETTLE / 4);
        let now = real.snapshot()?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}
