//! Scripts: what is done to a kernel, one operation a line, so that a fake and a real one can do it in lockstep.
//!
//! | line | does |
//! | --- | --- |
//! | `== name` | starts a script; it finds cpuset enabled below the root and every CPU online |
//! | `mkdir a/b`, `rmdir a/b` | directories |
//! | `a/cpuset.cpus = 2-3` | one write, with a newline; nothing after the sign empties a list |
//! | `spawn db a`, `spawn db a 3`, `spawn db a busy` | a process (of so many threads, or one that never sleeps); EEXIST while one of this name lives |
//! | `move db b`, `thread db:1 a/t`, `exit db` | into `cgroup.procs`, into `cgroup.threads`, its end |
//! | `pin db 2-3`, `pin db:1 2`, `pin self 1` | `sched_setaffinity`; `self` is the process in the root cgroup |
//! | `cpu 3 off`, `cpu 3 on` | hotplug |
//! | `# …` | says why |

use super::{Activity, Errno, FakeKernel, INIT, TaskTraits};
use std::{collections::BTreeMap, fmt};
use truepin::{CgroupPath, CpuId, CpuSet};

/// A thread by its process's name in the script and its number in the process, from 0.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Thread {
    /// The name of the process; `self` for the one that is there from the start.
    pub process: String,
    /// 0 is the leader.
    pub nth: usize,
}

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.process)?;
        if self.nth > 0 { write!(f, ":{}", self.nth) } else { Ok(()) }
    }
}

/// The process that is there from the start.
pub const SELF: &str = "self";
/// The kernel thread that starts all others: an unbound one, in the root cgroup for good.
pub const KTHREAD: &str = "kthreadd";

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the table of the module says it")]
pub enum Op {
    Mkdir(CgroupPath),
    Rmdir(CgroupPath),
    Write { path: CgroupPath, file: String, text: String },
    Spawn { name: String, path: CgroupPath, threads: u32, busy: bool },
    Move { name: String, path: CgroupPath },
    Thread { thread: Thread, path: CgroupPath },
    Exit(String),
    Pin { thread: Thread, cpus: CpuSet },
    Cpu { cpu: CpuId, online: bool },
}

/// A named list of operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Unique among the scripts.
    pub name: String,
    /// Each operation with its line as written.
    pub ops: Vec<(String, Op)>,
}

/// A line that is no operation.
#[derive(Debug, thiserror::Error)]
#[error("{line:?} is not an operation: {reason}")]
pub struct ScriptError {
    /// The line.
    pub line: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Every value that both kernels show, by file or task.
pub type Snapshot = BTreeMap<String, String>;

/// The files that a snapshot holds of the root cgroup and of every other.
pub(super) const ROOT_FILES: [&str; 3] =
    ["cpuset.cpus.effective", "cpuset.cpus.isolated", "cpuset.mems.effective"];
pub(super) const FILES: [&str; 10] = [
    "cgroup.type",
    "cgroup.subtree_control",
    "cgroup.events",
    "cpuset.cpus",
    "cpuset.cpus.effective",
    "cpuset.cpus.exclusive",
    "cpuset.cpus.exclusive.effective",
    "cpuset.cpus.partition",
    "cpuset.mems",
    "cpuset.mems.effective",
];

const TEXTS: [&str; 10] = [
    include_str!("scripts/life.txt"),
    include_str!("scripts/executor.txt"),
    include_str!("scripts/ancestors.txt"),
    include_str!("scripts/offline.txt"),
    include_str!("scripts/writes.txt"),
    include_str!("scripts/local.txt"),
    include_str!("scripts/remote.txt"),
    include_str!("scripts/tree.txt"),
    include_str!("scripts/tasks.txt"),
    include_str!("scripts/hotplug.txt"),
];

/// The scripts that ship with the model.
pub fn all() -> Result<Vec<Script>, ScriptError> {
    let lists: Result<Vec<_>, _> = TEXTS.iter().map(|text| parse(text)).collect();
    Ok(lists?.into_iter().flatten().collect())
}

/// Parses scripts from text.
pub fn parse(text: &str) -> Result<Vec<Script>, ScriptError> {
    let mut scripts: Vec<Script> = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        if let Some(name) = line.strip_prefix("== ") {
            scripts.push(Script { name: name.trim().into(), ops: Vec::new() });
        } else {
            let op = operation(line).map_err(|reason| ScriptError { line: line.into(), reason })?;
            let script = scripts
                .last_mut()
                .ok_or_else(|| ScriptError { line: line.into(), reason: "before any script".into() })?;
            script.ops.push((line.into(), op));
        }
    }
    Ok(scripts)
}

pub(crate) fn operation(line: &str) -> Result<Op, String> {
    if let Some((file, text)) = line.split_once('=') {
        let (path, file) = file.trim().rsplit_once('/').unwrap_or(("", file.trim()));
        return Ok(Op::Write { path: read(path)?, file: file.into(), text: text.trim().into() });
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    Ok(match words[..] {
        ["mkdir", path] => Op::Mkdir(read(path)?),
        ["rmdir", path] => Op::Rmdir(read(path)?),
        ["spawn", name, path] => spawn(name, path, 1, false)?,
        ["spawn", name, path, "busy"] => spawn(name, path, 1, true)?,
        ["spawn", name, path, threads] => spawn(name, path, read(threads)?, false)?,
        ["move", name, path] => Op::Move { name: name.into(), path: read(path)? },
        ["thread", name, path] => Op::Thread { thread: thread(name)?, path: read(path)? },
        ["exit", name] => Op::Exit(name.into()),
        ["pin", name, cpus] => Op::Pin { thread: thread(name)?, cpus: read(cpus)? },
        ["cpu", cpu, state @ ("on" | "off")] => Op::Cpu { cpu: CpuId(read(cpu)?), online: state == "on" },
        _ => return Err("no such operation".into()),
    })
}

fn spawn(name: &str, path: &str, threads: u32, busy: bool) -> Result<Op, String> {
    Ok(Op::Spawn { name: name.into(), path: read(path)?, threads, busy })
}

fn read<T: std::str::FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|e: T::Err| e.to_string())
}

fn thread(text: &str) -> Result<Thread, String> {
    let (process, nth) = text.split_once(':').unwrap_or((text, "0"));
    Ok(Thread { process: process.into(), nth: read(nth)? })
}

/// The fake side of a script.
#[derive(Debug, Clone)]
pub struct FakeWorld {
    /// The kernel.
    pub kernel: FakeKernel,
    /// The threads of each process by its name, the leader first.
    threads: BTreeMap<String, Vec<u32>>,
}

impl FakeWorld {
    /// A world whose `self` is the first task. cpuset is enabled below the root.
    pub fn new(mut kernel: FakeKernel) -> Result<Self, Errno> {
        kernel.write_file(&CgroupPath::root(), "cgroup.subtree_control", "+cpuset\n")?;
        let kthread = kernel.spawn_kthread(None);
        let threads = BTreeMap::from([(SELF.into(), vec![INIT]), (KTHREAD.into(), vec![kthread])]);
        Ok(Self { kernel, threads })
    }

    fn id(&self, thread: &Thread) -> Result<u32, Errno> {
        self.threads.get(&thread.process).and_then(|t| t.get(thread.nth)).copied().ok_or(Errno::ESRCH)
    }

    fn leader(&self, name: &str) -> Result<u32, Errno> {
        self.id(&Thread { process: name.into(), nth: 0 })
    }

    /// Does one operation.
    pub fn run(&mut self, op: &Op) -> Result<(), Errno> {
        match op {
            Op::Mkdir(path) => self.kernel.mkdir(path),
            Op::Rmdir(path) => self.kernel.rmdir(path),
            Op::Write { path, file, text } => self.kernel.write_file(path, file, &format!("{text}\n")),
            Op::Spawn { name, path, threads, busy } => {
                if self.threads.contains_key(name) {
                    return Err(Errno::EEXIST);
                }
                let activity = if *busy { Activity::Runs } else { Activity::Asleep };
                let traits = TaskTraits { activity, ..TaskTraits::default() };
                let leader = self.kernel.spawn(path, *threads, traits)?;
                self.threads.insert(name.clone(), (leader..leader + threads).collect());
                Ok(())
            }
            Op::Move { name, path } => self.kernel.enter(path, self.leader(name)?, true),
            Op::Thread { thread, path } => self.kernel.enter(path, self.id(thread)?, false),
            Op::Exit(name) => {
                let leader = self.leader(name)?;
                self.threads.remove(name);
                self.kernel.exit(leader)
            }
            Op::Pin { thread, cpus } => self.kernel.setaffinity(self.id(thread)?, cpus),
            Op::Cpu { cpu, online } => self.kernel.set_online(*cpu, *online),
        }
    }

    /// Everything that shows.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut shot = Snapshot::from([("online".into(), self.kernel.online().to_string())]);
        for path in self.kernel.cgroups() {
            let files: &[&str] = if path.is_root() { &ROOT_FILES } else { &FILES };
            for file in files {
                let text = self.kernel.read_file(path, file);
                shot.insert(key(path, file), shown(file, text.as_deref().map_err(|e| *e)));
            }
        }
        for (name, threads) in &self.threads {
            for (nth, thread) in threads.iter().enumerate() {
                let label = Thread { process: name.clone(), nth };
                let mask = self.kernel.mask(*thread).map_or_else(String::new, ToString::to_string);
                shot.insert(format!("task {label}"), mask);
            }
        }
        shot
    }
}

/// What a kernel answered to a script so far, as one number: the CRC32 of every result and every value after each
/// operation, in order.
#[derive(Debug, Clone, Default)]
pub struct Digest(crc32fast::Hasher);

impl Digest {
    /// Adds the result of an operation (`ok` or an error's symbol) and what showed after it.
    pub fn add(&mut self, result: &str, shot: &Snapshot) {
        for text in shot.iter().flat_map(|(k, v)| [k.as_str(), v]).chain([result]) {
            self.0.update(text.as_bytes());
            self.0.update(b"\n");
        }
    }

    /// The number.
    #[must_use]
    pub fn value(&self) -> u32 {
        self.0.clone().finalize()
    }
}

/// The answer of the fake to a whole script.
pub fn answer(script: &Script, kernel: FakeKernel) -> Result<u32, Errno> {
    let mut world = FakeWorld::new(kernel)?;
    let mut digest = Digest::default();
    for (_, op) in &script.ops {
        digest.add(&outcome(world.run(op)), &world.snapshot());
    }
    Ok(digest.value())
}

/// `ok` or the error's symbol.
pub(super) fn outcome(result: Result<(), Errno>) -> String {
    result.map_or_else(|e| e.to_string(), |()| "ok".into())
}

pub(super) fn key(path: &CgroupPath, file: &str) -> String {
    if path.is_root() { file.into() } else { format!("{}/{file}", path.as_str()) }
}

/// How a file's text stands in a snapshot: without its newline, of `cgroup.events` the first line only, and
/// the refusal where there was one.
pub(super) fn shown(file: &str, text: Result<&str, Errno>) -> String {
    match text {
        Ok(text) if file == "cgroup.events" => text.lines().next().unwrap_or_default().into(),
        Ok(text) => text.trim_end().into(),
        Err(errno) => errno.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Behaviour;
    use std::collections::BTreeSet;

    #[test]
    fn every_shipped_script_parses_and_has_a_name_of_its_own() {
        let scripts = all().unwrap();
        let names: BTreeSet<_> = scripts.iter().map(|s| &s.name).collect();
        assert_eq!(names.len(), scripts.len());
        for script in &scripts {
            let kernel = FakeKernel::new(Behaviour::strict(), "0-7".parse().unwrap(), "0-1".parse().unwrap());
            let mut world = FakeWorld::new(kernel).unwrap();
            for (line, op) in &script.ops {
                // A name that does not exist is a slip of the writer, except where a line says so.
                let result = world.run(op);
                let slip = match result {
                    Err(Errno::ESRCH) => true,
                    Err(Errno::ENOENT) => !matches!(op, Op::Write { .. }),
                    _ => false,
                };
                assert!(!slip || line.contains("gone"), "{}: {line}: {result:?}", script.name);
            }
        }
    }

    #[test]
    fn lines_that_are_refused() {
        for text in ["mkdir a", "== x\nmkdr a", "== x\npin a 3-1", "== x\ncpu 1 maybe", "== x\nspawn a"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
