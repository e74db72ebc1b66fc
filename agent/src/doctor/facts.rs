//! What is read, and from where: everything below one root, the cgroup tree perhaps elsewhere.

use crate::{
    btf::{Btf, BtfError},
    kubelet,
};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
};

/// Of one file; a configuration or a list of the kernel's is some KiB.
const LONGEST: u64 = 1 << 20;
/// Deeper ones are delegated, and a host of five thousand has them below its pods.
const DEEP: usize = 4;
const MOST_CGROUPS: usize = 20_000;

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Its text.
    Text(String),
    /// It is not there.
    Absent,
    /// It is there, or may be.
    Unreadable(String),
}

/// A file and what it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saying {
    /// Which.
    pub path: PathBuf,
    /// What.
    pub said: Said,
}

impl Saying {
    /// Its text, where it has one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.said {
            Said::Text(text) => Some(text),
            Said::Absent | Said::Unreadable(_) => None,
        }
    }
}

/// A running process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// `/proc/PID/comm`
    pub comm: String,
    /// That file.
    pub path: PathBuf,
}

/// A cgroup with cpuset files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Below the root cgroup.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// `cpuset.cpus`
    pub cpus: String,
    /// `cpuset.cpus.exclusive`, where the kernel has it.
    pub exclusive: Option<String>,
    /// `cpuset.cpus.partition`
    pub partition: Option<String>,
}

/// A line `key = value` of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The file.
    pub path: PathBuf,
    /// Before the sign.
    pub key: String,
    /// After it.
    pub value: String,
}

/// Everything that is judged.
#[derive(Debug, Clone)]
pub struct Facts {
    /// `/proc/cmdline`
    pub cmdline: Saying,
    /// `/sys/kernel/btf/vmlinux`: whether `struct cpuset` has `exclusive_cpus`; `None` without BTF.
    pub btf: (PathBuf, Result<Option<bool>, String>),
    /// `/proc/kallsyms`: which of the functions of interest the kernel has.
    pub symbols: (PathBuf, Result<BTreeSet<&'static str>, String>),
    /// The type of kprobe events, there when the kernel has them.
    pub kprobe: Saying,
    /// A limit of fanotify's, there when the kernel has it (5.13).
    pub fanotify: Saying,
    /// `/proc/self/mountinfo`
    pub mountinfo: Saying,
    /// The root cgroup's directory.
    pub cgroups_at: Option<PathBuf>,
    /// Its `cgroup.controllers`.
    pub controllers: Option<Saying>,
    /// Those with cpuset files, and why some could not be read.
    pub cgroups: Result<Vec<Cgroup>, String>,
    /// `present` of the CPUs.
    pub present: Saying,
    /// All processes.
    pub processes: Result<Vec<Process>, String>,
    /// A live kubelet with the static policy.
    pub kubelet: Option<kubelet::Static>,
    /// What a kubelet keeps.
    pub kubelet_state: Saying,
    /// Of irqbalance, in the distributions' places.
    pub irqbalance: Vec<Saying>,
    /// `/etc/tuned/active_profile`
    pub tuned: Saying,
    /// Of Nomad's agents.
    pub nomad: Vec<Saying>,
    /// `/etc/libvirt/qemu.conf`
    pub qemu: Saying,
    /// Lines of unit files that bind CPUs.
    pub units: Vec<Setting>,
    /// The clock source in use.
    pub clocksource: Saying,
    /// Those to choose from.
    pub clocksources: Saying,
}

/// Of the kernel's names: what shows that programs can be attached to functions, the function, and fanotify.
pub(super) const SYMBOLS: [&str; 3] =
    ["register_ftrace_direct", "cgroup_file_write", "fanotify_handle_event"];

/// Keys of unit files that say where a unit's tasks may run.
const BINDING: [&str; 4] = ["AllowedCPUs", "StartupAllowedCPUs", "AllowedMemoryNodes", "CPUAffinity"];
/// Where unit files are, those that an administrator or `set-property` made, and the manager's own settings.
const UNITS: [&str; 8] = [
    "etc/systemd/system.conf",
    "etc/systemd/system.conf.d",
    "etc/systemd/system",
    "etc/systemd/system.control",
    "run/systemd/system",
    "run/systemd/system.control",
    "run/systemd/transient",
    "usr/lib/systemd/system",
];

impl Facts {
    /// Reads below `root` (`/`); `cgroups` is where the cgroup tree is, else its mount is looked for.
    #[must_use]
    pub fn read(root: &Path, cgroups: Option<&Path>) -> Self {
        let at = |name: &str| saying(root.join(name));
        let proc = root.join("proc");
        let mountinfo = at("proc/self/mountinfo");
        let found = || {
            let point = super::kernel::cgroup2(mountinfo.text().unwrap_or_default())?;
            Some(root.join(point.trim_start_matches('/')))
        };
        let cgroups_at = cgroups.map(Path::to_owned).or_else(found);
        let btf = root.join("sys/kernel/btf/vmlinux");
        let symbols = proc.join("kallsyms");
        Self {
            cmdline: at("proc/cmdline"),
            btf: (btf.clone(), exclusive_in(&btf)),
            symbols: (symbols.clone(), symbols_in(&symbols).map_err(|e| e.to_string())),
            kprobe: at("sys/bus/event_source/devices/kprobe/type"),
            fanotify: at("proc/sys/fs/fanotify/max_user_groups"),
            controllers: cgroups_at.as_ref().map(|dir| saying(dir.join("cgroup.controllers"))),
            cgroups: cgroups_at.as_ref().map_or(Ok(Vec::new()), |dir| cgroups_in(dir)),
            cgroups_at,
            mountinfo,
            present: at("sys/devices/system/cpu/present"),
            processes: processes_in(&proc),
            kubelet: kubelet::static_policy(&proc, root),
            kubelet_state: at("var/lib/kubelet/cpu_manager_state"),
            irqbalance: vec![at("etc/default/irqbalance"), at("etc/sysconfig/irqbalance")],
            tuned: at("etc/tuned/active_profile"),
            nomad: below(&root.join("etc/nomad.d"), 1).into_iter().map(saying).collect(),
            qemu: at("etc/libvirt/qemu.conf"),
            units: UNITS.iter().flat_map(|dir| settings_in(&root.join(dir))).collect(),
            clocksource: at("sys/devices/system/clocksource/clocksource0/current_clocksource"),
            clocksources: at("sys/devices/system/clocksource/clocksource0/available_clocksource"),
        }
    }

    /// The processes of these names.
    #[must_use]
    pub fn running(&self, names: &[&str]) -> Vec<&Process> {
        self.processes.iter().flatten().filter(|p| names.contains(&p.comm.as_str())).collect()
    }
}

fn saying(path: PathBuf) -> Saying {
    let mut text = String::new();
    let said = match File::open(&path).and_then(|f| f.take(LONGEST).read_to_string(&mut text)) {
        Ok(_) => Said::Text(text),
        Err(e) if is_absent(&e) => Said::Absent,
        Err(e) => Said::Unreadable(e.to_string()),
    };
    Saying { path, said }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn exclusive_in(path: &Path) -> Result<Option<bool>, String> {
    let blob = match fs::read(path) {
        Ok(blob) => blob,
        Err(e) if is_absent(&e) => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    match Btf::parse(&blob).and_then(|btf| btf.offset("cpuset", "exclusive_cpus")) {
        Ok(_) => Ok(Some(true)),
        Err(BtfError::NoMember { .. } | BtfError::NoStruct { .. }) => Ok(Some(false)),
        Err(error) => Err(error.to_string()),
    }
}

/// `ffffffff81456d20 t cgroup_file_write`
fn symbols_in(path: &Path) -> io::Result<BTreeSet<&'static str>> {
    let mut found = BTreeSet::new();
    for line in BufReader::new(File::open(path)?).lines() {
        let line = line?;
        let name = line.split(' ').nth(2).unwrap_or_default();
        found.extend(SYMBOLS.into_iter().find(|s| *s == name));
    }
    Ok(found)
}

fn processes_in(proc: &Path) -> Result<Vec<Process>, String> {
    let entries = fs::read_dir(proc).map_err(|e| format!("{}: {e}", proc.display()))?;
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let one = |pid: u32| {
        let path = proc.join(pid.to_string()).join("comm");
        // What has ended meanwhile writes nothing.
        let comm = String::from_utf8_lossy(&fs::read(&path).ok()?).trim().to_owned();
        Some(Process { pid, comm, path })
    };
    let mut found: Vec<Process> = pids.filter_map(one).collect();
    found.sort_by_key(|p| p.pid);
    Ok(found)
}

fn cgroups_in(root: &Path) -> Result<Vec<Cgroup>, String> {
    let mut found = Vec::new();
    let mut dirs = vec![(root.to_owned(), 0)];
    while let Some((dir, depth)) = dirs.pop() {
        if found.len() == MOST_CGROUPS {
            return Err(format!("{}: more than {MOST_CGROUPS} cgroups", root.display()));
        }
        let read = |name: &str| fs::read_to_string(dir.join(name)).ok().map(|t| t.trim().to_owned());
        if let Some(cpus) = read("cpuset.cpus").filter(|_| depth > 0) {
            let name = dir.strip_prefix(root).unwrap_or(&dir).display().to_string();
            let (exclusive, partition) = (read("cpuset.cpus.exclusive"), read("cpuset.cpus.partition"));
            found.push(Cgroup { name, path: dir.clone(), cpus, exclusive, partition });
        }
        if depth == DEEP {
            continue;
        }
        match fs::read_dir(&dir) {
            Ok(entries) => {
                let is_dir = |e: &fs::DirEntry| e.file_type().is_ok_and(|t| t.is_dir());
                dirs.extend(entries.flatten().filter(is_dir).map(|e| (e.path(), depth + 1)));
            }
            Err(e) if is_absent(&e) => {}
            Err(e) => return Err(format!("{}: {e}", dir.display())),
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// A file, or those in a directory and so many levels below it; what cannot be listed has none.
fn below(dir: &Path, levels: usize) -> Vec<PathBuf> {
    if dir.is_file() {
        return vec![dir.to_owned()];
    }
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && levels > 0 => found.extend(below(&entry.path(), levels - 1)),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found.sort();
    found
}

fn settings_in(dir: &Path) -> Vec<Setting> {
    let mut found = Vec::new();
    for path in below(dir, 1) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let lines = text.lines().filter_map(|l| l.trim().split_once('='));
        let binding = lines.filter(|(key, value)| BINDING.contains(&key.trim()) && !value.trim().is_empty());
        found.extend(binding.map(|(key, value)| Setting {
            path: path.clone(),
            key: key.trim().into(),
            value: value.trim().into(),
        }));
    }
    found
}
