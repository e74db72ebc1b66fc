//! The kernel's cgroup2 file system: the real [`Kernel`].
//!
//! Problem: half a reading makes a wrong plan, and a cgroup may vanish between two reads. So a cgroup that is gone
//! (`ENOENT`, `ENODEV`) is left out as a whole, and every other failure is an error that names the file.
//! Steps: read one file at a time, whole; write one value in one `write(2)`. Creation, attachment and deletion go through
//! cgroups-rs where it can be used: it looks for the literal `/sys/fs/cgroup/cgroup.controllers`, so elsewhere (hybrid
//! hosts, copied trees) the same three are done here.
//! `cpuset.cpus` and `cpuset.mems` of systemd's own cgroups are written by systemd, where it is the init (`by_owner`).

mod by_owner;

use crate::{mount::Mount, procfs, store::chain, sysfs::OnlineCpus, systemd::Systemd};
use cgroups_rs::{
    CgroupPid,
    fs::{Cgroup, hierarchies},
};
use nix::fcntl::OFlag;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    str::FromStr,
};
use truepin::{
    CgroupId, CgroupPath, CpuSet, CpusetFile,
    observed::{CgroupKind, CgroupObserved, CpusetObserved, Kernel, KernelError, Observed, Scope, Step},
};

const ENOENT: i32 = 2;
const ESRCH: i32 = 3;
const ENODEV: i32 = 19;
const EOPNOTSUPP: i32 = 95;

/// The real kernel.
#[derive(Debug)]
pub struct CgroupFs {
    mount: Mount,
    online: OnlineCpus,
    /// Whether cgroups-rs can be used here.
    literal: bool,
    /// The owner of units' cgroups.
    pub systemd: Option<Systemd>,
    /// What systemd did not do, and not told yet.
    untold: Vec<String>,
    /// Told before: the same files, not written by systemd yet.
    told: BTreeSet<(CgroupPath, CpusetFile)>,
    /// Processes that are to enter a cgroup, by pid, and when they started: a pid that ends is given out again.
    entering: BTreeMap<u32, u64>,
    /// Where they are to enter: a scope is made with its process.
    entrants: BTreeMap<CgroupPath, u32>,
}

/// What a read gives.
enum Found<T> {
    Here(T),
    Gone,
}

impl CgroupFs {
    /// The tree at `mount` of the machine whose CPUs `online` reads.
    #[must_use]
    pub fn new(mount: Mount, online: OnlineCpus) -> Self {
        let literal = !mount.copied && mount.root == Path::new("/sys/fs/cgroup");
        let (entering, entrants) = (BTreeMap::new(), BTreeMap::new());
        let (untold, told) = (Vec::new(), BTreeSet::new());
        Self { mount, online, literal, systemd: None, untold, told, entering, entrants }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn mount(&self) -> &Mount {
        &self.mount
    }

    /// The directory of a cgroup.
    #[must_use]
    pub fn dir(&self, path: &CgroupPath) -> PathBuf {
        self.mount.root.join(path.as_str())
    }

    /// Whether `cpuset.cpus.exclusive` and `cpuset.cpus.partition` exist: looked for in the first cgroup that has cpuset
    /// files. `None` where none has, so that it cannot be told yet.
    pub fn partition_files(&self) -> Result<Option<(bool, bool)>, KernelError> {
        for child in self.children(&CgroupPath::root())? {
            let dir = self.dir(&child);
            if dir.join("cpuset.cpus").exists() {
                let there = |file: CpusetFile| dir.join(file.name()).exists();
                return Ok(Some((there(CpusetFile::Exclusive), there(CpusetFile::Partition))));
            }
        }
        Ok(None)
    }

    fn children(&self, path: &CgroupPath) -> Result<Vec<CgroupPath>, KernelError> {
        let dir = self.dir(path);
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(e) if is_gone(&e) => return Ok(Vec::new()),
            Err(e) => return Err(failed("list", &dir, None, &e)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| failed("list", &dir, None, &e))?;
            let is_dir = entry.file_type().map_err(|e| failed("list", &entry.path(), None, &e))?.is_dir();
            if !is_dir {
                continue;
            }
            // A name that is not UTF-8 or holds a newline is legal and is nobody's of ours.
            if let Some(child) = entry.file_name().to_str().and_then(|n| path.child(n).ok()) {
                found.push(child);
            }
        }
        Ok(found)
    }

    fn scope(&self, scope: &Scope) -> Result<Vec<CgroupPath>, KernelError> {
        let mut wanted = std::collections::BTreeSet::from([CgroupPath::root()]);
        match scope {
            Scope::Named(paths) => wanted.extend(paths.iter().cloned()),
            Scope::Around(paths) => {
                let mut listed = std::collections::BTreeSet::from([CgroupPath::root()]);
                for path in paths {
                    listed.extend(path.ancestors());
                    listed.insert(path.clone());
                }
                for path in &listed {
                    wanted.extend(self.children(path)?);
                }
                wanted.extend(listed);
            }
        }
        Ok(wanted.into_iter().collect())
    }

    /// `None` when the cgroup is gone.
    fn observe_one(&self, path: &CgroupPath) -> Result<Option<CgroupObserved>, KernelError> {
        let dir = self.dir(path);
        if self.mount.copied && self.is_linked(path) {
            return Ok(None);
        }
        let id = match fs::metadata(&dir) {
            Ok(m) => CgroupId(m.ino()),
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(failed("stat", &dir, None, &e)),
        };
        let Found::Here(control) = read(&dir, "cgroup.subtree_control")? else { return Ok(None) };
        let enables_cpuset = control.split_whitespace().any(|c| c == "cpuset");
        let (kind, populated) = if path.is_root() {
            (CgroupKind::Domain, true)
        } else {
            let Found::Here(kind) = read(&dir, "cgroup.type")? else { return Ok(None) };
            let Found::Here(events) = read(&dir, "cgroup.events")? else { return Ok(None) };
            (parse_kind(&dir, &kind)?, events.lines().any(|l| l == "populated 1"))
        };
        let Some(has_processes) = has_line(&dir, kind)? else { return Ok(None) };
        let Found::Here(cpuset) = observe_cpuset(path, &dir)? else { return Ok(None) };
        Ok(Some(CgroupObserved { id, cpuset, enables_cpuset, populated, has_processes, kind }))
    }

    /// Whether a part of the path is a symbolic link: cgroup2 has none, and through one of a copied tree files elsewhere
    /// would be written.
    fn is_linked(&self, path: &CgroupPath) -> bool {
        let mut above = path.ancestors();
        above.push(path.clone());
        let parts = above.iter().filter(|p| !p.is_root());
        parts.map(|p| self.dir(p)).any(|dir| fs::symlink_metadata(dir).is_ok_and(|m| m.is_symlink()))
    }

    fn read_online(&self) -> Result<CpuSet, KernelError> {
        self.online.read().map_err(|e| KernelError {
            operation: "read",
            target: self.online.path().display().to_string(),
            value: None,
            errno: None,
            cause: chain(&e),
        })
    }

    fn read_all(&self, scope: &Scope) -> Result<Observed, KernelError> {
        let (online, copied) = (self.read_online()?, self.mount.copied);
        let before = self.systemd.as_ref().map(Systemd::before).unwrap_or_default();
        let mut observed = Observed { online, copied, before, ..Observed::default() };
        for path in self.scope(scope)? {
            if let Some(cgroup) = self.observe_one(&path)? {
                observed.cgroups.insert(path, cgroup);
            }
        }
        Ok(observed)
    }

    /// From now on `pid` is the process that started then, and no later one of the same number enters anything.
    pub fn means(&mut self, pid: u32, started: u64) {
        self.entering.insert(pid, started);
    }

    /// Ends [`CgroupFs::means`].
    pub fn meant(&mut self, pid: u32) {
        self.entering.remove(&pid);
    }

    /// Processes that the next steps put into cgroups.
    pub fn enters(&mut self, entering: &[(CgroupPath, u32)]) {
        self.entrants = entering.iter().cloned().collect();
    }

    /// What systemd was to write and did not, since the last call.
    pub fn untold(&mut self) -> Vec<String> {
        std::mem::take(&mut self.untold)
    }

    fn create(&mut self, path: &CgroupPath) -> Result<(), KernelError> {
        let dir = self.dir(path);
        if self.make_scope(path)? {
            return Ok(());
        }
        if !self.literal {
            return fs::create_dir(&dir).map_err(|e| failed("mkdir", &dir, None, &e));
        }
        // The controllers are named, because by default it would enable every one; errors of those writes are
        // dropped there, so the plan enables cpuset itself before, and the next observation tells.
        let controllers = Some(vec!["cpuset".to_owned()]);
        Cgroup::new_with_specified_controllers(hierarchies::auto(), path.as_str(), controllers)
            .map(drop)
            .map_err(|e| through_crate("mkdir", &dir, None, &e))
    }

    fn remove(&self, path: &CgroupPath) -> Result<(), KernelError> {
        let dir = self.dir(path);
        // What the owner's processes made below goes first; the kernel refuses whatever is still in use.
        for child in self.children(path)? {
            self.remove(&child)?;
        }
        if self.literal {
            let cgroup = Cgroup::load(hierarchies::auto(), path.as_str());
            return cgroup.delete().map_err(|e| through_crate("rmdir", &dir, None, &e));
        }
        let removed = if self.mount.copied { fs::remove_dir_all(&dir) } else { fs::remove_dir(&dir) };
        removed.map_err(|e| failed("rmdir", &dir, None, &e))
    }

    /// The file takes a number, so a pid that is given out again within this call is found out only afterwards.
    fn enter(&self, path: &CgroupPath, pid: u32) -> Result<(), KernelError> {
        self.is_meant(path, pid)?;
        self.put(path, pid)?;
        self.is_meant(path, pid)
    }

    fn is_meant(&self, path: &CgroupPath, pid: u32) -> Result<(), KernelError> {
        match self.entering.get(&pid) {
            Some(started) if procfs::started(pid) != Some(*started) => Err(KernelError {
                operation: "write",
                target: self.dir(path).join("cgroup.procs").display().to_string(),
                value: Some(pid.to_string()),
                errno: Some(ESRCH),
                cause: "the process that was named has ended".into(),
            }),
            _ => Ok(()),
        }
    }

    fn put(&self, path: &CgroupPath, pid: u32) -> Result<(), KernelError> {
        let file = self.dir(path).join("cgroup.procs");
        if !self.literal {
            return write(&file, &pid.to_string());
        }
        let cgroup = Cgroup::load(hierarchies::auto(), path.as_str());
        cgroup
            .add_task_by_tgid(CgroupPid::from(u64::from(pid)))
            .map_err(|e| through_crate("write", &file, Some(pid.to_string()), &e))
    }
}

impl Kernel for CgroupFs {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        // Sets of before and after a CPU went or came would not fit each other.
        const ATTEMPTS: usize = 3;
        let mut observed = self.read_all(scope)?;
        for _ in 1..ATTEMPTS {
            if self.read_online()? == observed.online {
                break;
            }
            observed = self.read_all(scope)?;
        }
        Ok(observed)
    }

    fn apply(&mut self, step: &Step) -> Result<(), KernelError> {
        match step {
            Step::Create(path) => self.create(path),
            Step::Remove(path) => {
                self.stop_unit(path);
                if self.dir(path).exists() { self.remove(path) } else { Ok(()) }
            }
            Step::Enable(path) => write(&self.dir(path).join("cgroup.subtree_control"), "+cpuset"),
            Step::Write { path, file, new, .. } => self.write_value(path, *file, &new.to_string()),
            Step::Enter { path, pid } => self.enter(path, *pid),
        }
    }
}

fn read(dir: &Path, file: &str) -> Result<Found<String>, KernelError> {
    let path = dir.join(file);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Found::Here(text)),
        Err(e) if is_gone(&e) => Ok(Found::Gone),
        Err(e) => Err(failed("read", &path, None, &e)),
    }
}

fn parsed<T: FromStr + Default>(dir: &Path, file: &str) -> Result<Found<T>, KernelError>
where
    T::Err: std::fmt::Display,
{
    match read(dir, file)? {
        Found::Gone => Ok(Found::Gone),
        Found::Here(text) => text.trim().parse().map(Found::Here).map_err(|e: T::Err| KernelError {
            operation: "read",
            target: dir.join(file).display().to_string(),
            value: Some(text.trim().into()),
            errno: None,
            cause: e.to_string(),
        }),
    }
}

/// A file that older kernels lack.
fn optional(dir: &Path, file: &str) -> Result<Option<CpuSet>, KernelError> {
    Ok(match parsed(dir, file)? {
        Found::Here(set) => Some(set),
        Found::Gone => None,
    })
}

/// `None` where the cgroup has no cpuset files.
fn observe_cpuset(path: &CgroupPath, dir: &Path) -> Result<Found<Option<CpusetObserved>>, KernelError> {
    let Found::Here(effective) = parsed(dir, "cpuset.cpus.effective")? else {
        return Ok(without(dir));
    };
    let Found::Here(mems_effective) = parsed(dir, "cpuset.mems.effective")? else { return Ok(without(dir)) };
    let mut files = CpusetObserved { effective, mems_effective, ..CpusetObserved::default() };
    if path.is_root() {
        return Ok(Found::Here(Some(files)));
    }
    let (Found::Here(cpus), Found::Here(mems)) = (parsed(dir, "cpuset.cpus")?, parsed(dir, "cpuset.mems")?)
    else {
        return Ok(without(dir));
    };
    (files.cpus, files.mems) = (cpus, mems);
    files.exclusive = optional(dir, CpusetFile::Exclusive.name())?;
    files.exclusive_effective = optional(dir, "cpuset.cpus.exclusive.effective")?;
    let Found::Here(state) = read(dir, CpusetFile::Partition.name())? else { return Ok(without(dir)) };
    files.partition = Some(state.parse().map_err(|e| KernelError {
        operation: "read",
        target: dir.join(CpusetFile::Partition.name()).display().to_string(),
        value: Some(state.trim().into()),
        errno: None,
        cause: format!("{e}"),
    })?);
    Ok(Found::Here(Some(files)))
}

/// The controller is being switched off or on around us, or the cgroup is gone: only its directory tells.
fn without(dir: &Path) -> Found<Option<CpusetObserved>> {
    if dir.exists() { Found::Here(None) } else { Found::Gone }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(ENOENT | ENODEV))
}

fn failed(operation: &'static str, target: &Path, value: Option<&str>, error: &io::Error) -> KernelError {
    KernelError {
        operation,
        target: target.display().to_string(),
        value: value.map(|v| v.trim().to_owned()),
        errno: error.raw_os_error(),
        cause: error.to_string(),
    }
}

/// cgroups-rs wraps the system's error one or more levels deep.
fn through_crate(
    operation: &'static str,
    target: &Path,
    value: Option<String>,
    error: &(dyn std::error::Error + 'static),
) -> KernelError {
    let chain = std::iter::successors(Some(error), |e| e.source());
    let io = chain.filter_map(|e| e.downcast_ref::<io::Error>()).find_map(io::Error::raw_os_error);
    let cause = io.map_or_else(|| error.to_string(), |n| io::Error::from_raw_os_error(n).to_string());
    KernelError { operation, target: target.display().to_string(), value, errno: io, cause }
}

/// One value, one `write(2)`, never creating a file.
fn write(path: &Path, value: &str) -> Result<(), KernelError> {
    let refuse = |e: &io::Error| failed("write", path, Some(value), e);
    // Truncation only means something on a copied tree; cgroup files ignore it.
    let mut options = OpenOptions::new();
    options.write(true).truncate(true).custom_flags(OFlag::O_NOFOLLOW.bits());
    let mut file = options.open(path).map_err(|e| refuse(&e))?;
    let written = file.write(value.as_bytes()).map_err(|e| refuse(&e))?;
    if written == value.len() {
        Ok(())
    } else {
        Err(refuse(&io::Error::new(io::ErrorKind::WriteZero, format!("only {written} bytes were taken"))))
    }
}

fn parse_kind(dir: &Path, text: &str) -> Result<CgroupKind, KernelError> {
    match text.trim() {
        "domain" => Ok(CgroupKind::Domain),
        "domain threaded" => Ok(CgroupKind::DomainThreaded),
        "domain invalid" => Ok(CgroupKind::DomainInvalid),
        "threaded" => Ok(CgroupKind::Threaded),
        other => Err(KernelError {
            operation: "read",
            target: dir.join("cgroup.type").display().to_string(),
            value: Some(other.into()),
            errno: None,
            cause: "not a type that cgroup2 documents".into(),
        }),
    }
}

/// Whether a process (a thread, in a threaded cgroup) is in this very cgroup. `None` when it is gone. A few bytes are
/// asked for, because a list of a hundred thousand pids is not needed to know that there is one.
fn has_line(dir: &Path, kind: CgroupKind) -> Result<Option<bool>, KernelError> {
    let path = dir.join(if kind == CgroupKind::Threaded { "cgroup.threads" } else { "cgroup.procs" });
    let mut buffer = [0; 16];
    match fs::File::open(&path).and_then(|mut f| f.read(&mut buffer)) {
        Ok(n) => Ok(Some(n > 0)),
        Err(e) if is_gone(&e) => Ok(None),
        // `domain invalid`, or it turned threaded since its type was read.
        Err(e) if e.raw_os_error() == Some(EOPNOTSUPP) => Ok(Some(true)),
        Err(e) => Err(failed("read", &path, None, &e)),
    }
}
