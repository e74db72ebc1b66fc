//! `/sys/devices/system/{cpu,node}` under a root directory, read into a [`RawTopology`].
//!
//! Problem: hwloc opens about 19 files per CPU and lscpu 29, and both are bound by that number; and on real machines
//! most files are missing somewhere.
//! Steps: the CPU lists; then CPU by CPU, but only those that no earlier CPU's sets have covered: of a core its
//! first thread is read, of a package its first CPU, of a cache the first that shares it. Names in a
//! folder are listed before they are opened, so that a missing file costs nothing. Nodes are read from `node*/`, never
//! derived from sockets. At the end `cpu/online` is read again: if it changed, so did everything, and all is read anew.
//!
//! When one reader per set is safe: the kernel builds each set symmetrically. Where sets contradict each other (two
//! of one level overlap, a CPU is not in its own, a core sticks out of its package) the whole
//! tree is read again with every CPU asked, and the core's vote decides.
//!
//! A file that is not there is "not said". A file that cannot be read or parsed is an error that names it.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};
use truepin::{
    CpuId, CpuSet, CpuTopology, NodeId,
    idset::{IdSet, ListError, MAX_ID},
    topology::{Level, RawGroup, RawNode, RawTopology, TopologyError},
};

/// No file of sysfs is longer than this; what is, is no sysfs.
const LONGEST: usize = 1 << 20;
/// Linux before 5.16 cuts a list at one page; from this length on the mask, which fits always, is read instead.
const LIST_MAY_BE_CUT: usize = 4095;
/// How often `cpu/online` may change under the reader.
const ATTEMPTS: usize = 4;

/// Why a tree could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// Opening, reading or listing failed.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A list of CPUs or nodes that is none.
    #[error("{}: {value:?} is no list", path.display())]
    List {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
        /// What is wrong.
        source: ListError,
    },
    /// Any other value that is not what the file should hold.
    #[error("{}: {value:?} is not {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// CPUs went online or offline in every attempt.
    #[error("{} changed during each of {ATTEMPTS} readings", path.display())]
    Unsteady {
        /// `cpu/online`.
        path: PathBuf,
    },
    /// The tree was read and makes no machine.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// Reads and assembles the machine below `root` (`/` for this one).
pub fn topology(root: &Path) -> Result<CpuTopology, SysfsError> {
    Ok(CpuTopology::assemble(&raw_topology(root)?)?)
}

/// Reads what the tree below `root` says.
pub fn raw_topology(root: &Path) -> Result<RawTopology, SysfsError> {
    let system = root.join("sys/devices/system");
    let online = system.join("cpu/online");
    for _ in 0..ATTEMPTS {
        let mut raw = read_lists(&system)?;
        raw.source = system.display().to_string();
        let cpus = raw.online.clone().unwrap_or_else(|| raw.listed.difference(&raw.listed_offline));
        let mut groups = Groups::new(&system, false);
        if groups.read(&cpus)? {
            groups = Groups::new(&system, true);
            groups.read(&cpus)?;
        }
        raw.groups = groups.found;
        read_nodes(&system, &mut raw)?;
        if list(&online)? == raw.online {
            return Ok(raw);
        }
    }
    Err(SysfsError::Unsteady { path: online })
}

/// The text of a file without surrounding white space; `None` if there is none. A CPU that goes away while it is
/// read gives ENODEV or ENXIO: not there either.
pub(crate) fn text(path: &Path) -> Result<Option<String>, SysfsError> {
    let failed = |source: io::Error| match (source.kind(), source.raw_os_error()) {
        (io::ErrorKind::NotFound, _) | (_, Some(6 | 19)) => Ok(None),
        _ => Err(SysfsError::Read { path: path.into(), source }),
    };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) => return failed(e),
    };
    // By hand, since `read_to_end` first asks for the size, which sysfs does not know. A page is nearly always enough.
    let mut page = [0; 4096];
    let mut bytes = Vec::new();
    loop {
        match file.read(&mut page) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&page[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return failed(e),
        }
        if bytes.len() > LONGEST {
            let source = io::Error::new(io::ErrorKind::FileTooLarge, "longer than any file of sysfs");
            return Err(SysfsError::Read { path: path.into(), source });
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned()))
}

/// A list file.
pub(crate) fn list<T>(path: &Path) -> Result<Option<IdSet<T>>, SysfsError> {
    match text(path)? {
        None => Ok(None),
        Some(text) => parse_list(path, text).map(Some),
    }
}

/// `(null)` is how the kernel prints a mask that it never allocated (`nohz_full`): no member.
fn parse_list<T>(path: &Path, text: String) -> Result<IdSet<T>, SysfsError> {
    if text == "(null)" {
        return Ok(IdSet::default());
    }
    text.parse().map_err(|source| SysfsError::List { path: path.into(), value: text, source })
}

/// A mask file: hexadecimal words of 32 bits, the highest first, separated by commas.
fn parse_mask(path: &Path, text: &str) -> Result<CpuSet, SysfsError> {
    let refuse = || SysfsError::Value {
        path: path.into(),
        value: text.into(),
        expected: "a mask of hexadecimal words",
    };
    let mut set = CpuSet::new();
    if text.is_empty() {
        return Ok(set);
    }
    for (word, base) in text.rsplit(',').zip((0..).step_by(32)) {
        if word.is_empty() || word.len() > 8 || base > MAX_ID {
            return Err(refuse());
        }
        let bits = u32::from_str_radix(word, 16).map_err(|_| refuse())?;
        for bit in (0..32).filter(|b| bits >> b & 1 == 1) {
            set.insert(CpuId(base + bit));
        }
    }
    Ok(set)
}

/// The set in `dir/list_name`, or where there is none, or perhaps only its beginning, in `dir/mask_name`.
pub(crate) fn list_or_mask(
    dir: &Path,
    list_name: &str,
    mask_name: &str,
) -> Result<Option<CpuSet>, SysfsError> {
    let path = dir.join(list_name);
    let listed = text(&path)?;
    if let Some(text) = &listed
        && text.len() < LIST_MAY_BE_CUT
    {
        return parse_list(&path, text.clone()).map(Some);
    }
    let mask = dir.join(mask_name);
    match (text(&mask)?, listed) {
        (Some(text), _) => parse_mask(&mask, &text).map(Some),
        (None, Some(list)) => parse_list(&path, list).map(Some),
        (None, None) => Ok(None),
    }
}

/// A decimal number, negative ones included. An empty file (a recording of one that could not be read) says nothing.
pub(crate) fn number(path: &Path) -> Result<Option<i64>, SysfsError> {
    let Some(text) = text(path)?.filter(|t| !t.is_empty()) else { return Ok(None) };
    let value =
        text.parse().map_err(|_| SysfsError::Value { path: path.into(), value: text, expected: "a number" });
    value.map(Some)
}

/// Names in a folder; empty if there is no such folder.
fn names(dir: &Path) -> Result<Vec<String>, SysfsError> {
    let failed = |source| SysfsError::Read { path: dir.into(), source };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// The numbers N of `<prefix>N` in a folder, ascending.
fn numbered(dir: &Path, prefix: &str) -> Result<Vec<u32>, SysfsError> {
    let mut ids = Vec::new();
    for name in names(dir)? {
        let Some(digits) = name.strip_prefix(prefix) else { continue };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        match digits.parse() {
            Ok(id) if id <= MAX_ID => ids.push(id),
            _ => {
                let expected = "a number that a CPU or node can have";
                return Err(SysfsError::Value { path: dir.join(&name), value: name, expected });
            }
        }
    }
    ids.sort_unstable();
    Ok(ids)
}

fn read_lists(system: &Path) -> Result<RawTopology, SysfsError> {
    let dir = system.join("cpu");
    if let Err(source) = fs::metadata(&dir) {
        return Err(SysfsError::Read { path: dir, source });
    }
    let listed: CpuSet = numbered(&dir, "cpu")?.into_iter().map(CpuId).collect();
    let online = list(&dir.join("online"))?;
    let mut listed_offline = CpuSet::new();
    if online.is_none() {
        for cpu in listed.iter() {
            // The boot CPU often has no such file.
            if number(&dir.join(format!("cpu{cpu}/online")))? == Some(0) {
                listed_offline.insert(cpu);
            }
        }
    }
    Ok(RawTopology {
        listed,
        listed_offline,
        online,
        present: list(&dir.join("present"))?,
        possible: list(&dir.join("possible"))?,
        isolated: list(&dir.join("isolated"))?,
        nohz_full: list(&dir.join("nohz_full"))?,
        nodes_online: list(&system.join("node/online"))?,
        nodes_possible: list(&system.join("node/possible"))?,
        ..RawTopology::default()
    })
}

fn read_nodes(system: &Path, raw: &mut RawTopology) -> Result<(), SysfsError> {
    let dir = system.join("node");
    for id in numbered(&dir, "node")? {
        let node = dir.join(format!("node{id}"));
        let cpus = match list_or_mask(&node, "cpulist", "cpumap")? {
            Some(cpus) => cpus,
            // Neither file in trees that keep only the links `cpuN`.
            None => numbered(&node, "cpu")?.into_iter().map(CpuId).collect(),
        };
        raw.nodes.push(RawNode {
            id: NodeId(id),
            cpus,
            memory_bytes: memory(&node.join("meminfo"))?,
            distance: distances(&node.join("distance"))?,
        });
    }
    Ok(())
}

/// `Node 0 MemTotal:  65536 kB`.
fn memory(path: &Path) -> Result<Option<u64>, SysfsError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let Some((_, rest)) = text.split_once("MemTotal:") else { return Ok(None) };
    let value = rest.lines().next().unwrap_or_default().trim();
    let bytes = value.strip_suffix("kB").and_then(|kib| kib.trim().parse::<u64>().ok()?.checked_mul(1024));
    let refuse = || SysfsError::Value { path: path.into(), value: value.into(), expected: "a size in kB" };
    bytes.ok_or_else(refuse).map(Some)
}

fn distances(path: &Path) -> Result<Option<Vec<u32>>, SysfsError> {
    let Some(text) = text(path)?.filter(|t| !t.is_empty()) else { return Ok(None) };
    let row: Result<Vec<u32>, _> = text.split_ascii_whitespace().map(str::parse).collect();
    let refuse =
        |_| SysfsError::Value { path: path.into(), value: text.clone(), expected: "a row of distances" };
    row.map_err(refuse).map(Some)
}

/// Where a level's sets are in `cpuN/topology`: the names since Linux 5.3, then those before.
const SETS: [(Level, [&str; 2], Option<&str>); 6] = [
    (Level::Core, ["core_cpus", "thread_siblings"], None),
    (Level::Package, ["package_cpus", "core_siblings"], Some("physical_package_id")),
    (Level::Die, ["die_cpus", "die_cpus"], Some("die_id")),
    (Level::Cluster, ["cluster_cpus", "cluster_cpus"], None),
    (Level::Book, ["book_siblings", "book_siblings"], Some("book_id")),
    (Level::Drawer, ["drawer_siblings", "drawer_siblings"], Some("drawer_id")),
];

/// The reader of group statements.
struct Groups {
    cpu_dir: PathBuf,
    /// Ask every CPU, trusting no set to speak for its members.
    everyone: bool,
    found: Vec<RawGroup>,
    /// By level, the CPUs for which a set has been read.
    covered: [CpuSet; Level::ALL.len()],
    /// CPUs whose caches are known.
    cached: CpuSet,
    contradiction: bool,
}

impl Groups {
    fn new(system: &Path, everyone: bool) -> Self {
        Self {
            cpu_dir: system.join("cpu"),
            everyone,
            found: Vec::new(),
            covered: Default::default(),
            cached: CpuSet::new(),
            contradiction: false,
        }
    }

    /// Reads the statements of these CPUs; true if sets contradict each other.
    fn read(&mut self, online: &CpuSet) -> Result<bool, SysfsError> {
        for cpu in online.iter() {
            let dir = self.cpu_dir.join(format!("cpu{cpu}"));
            let core = if self.everyone || !self.covered[Level::Core.index()].contains(cpu) {
                self.read_sets(cpu, &dir.join("topology"))?
            } else {
                CpuSet::single(cpu)
            };
            if self.everyone || !self.cached.contains(cpu) {
                self.read_caches(cpu, &dir.join("cache"), &core)?;
            }
        }
        Ok(self.contradiction)
    }

    /// Notes a statement, and whether it contradicts an earlier one.
    fn note(&mut self, level: Level, id: Option<i64>, told_by: CpuId, cpus: &CpuSet) {
        let covered = &mut self.covered[level.index()];
        self.contradiction |= !cpus.contains(told_by) || !covered.is_disjoint(cpus);
        *covered |= cpus;
        self.found.push(RawGroup { level, id, told_by: Some(told_by), cpus: cpus.clone() });
    }

    /// The sets in `cpuN/topology`; returns the CPU's core.
    fn read_sets(&mut self, cpu: CpuId, dir: &Path) -> Result<CpuSet, SysfsError> {
        let names = names(dir)?;
        let has = |name: &str| names.iter().any(|n| n == name);
        let mut core = CpuSet::single(cpu);
        for (level, stems, id_name) in SETS {
            if !self.everyone && self.covered[level.index()].contains(cpu) {
                continue;
            }
            let there = |stem: &&&str| has(&format!("{stem}_list")) || has(stem);
            let Some(stem) = stems.iter().find(there) else { continue };
            let id = match id_name {
                Some(name) if has(name) => number(&dir.join(name))?,
                _ => None,
            };
            if level == Level::Die && id.is_some_and(|id| id < 0) {
                // "No die level": the set would hold the CPU alone, and says nothing about others.
                let cpus = CpuSet::single(cpu);
                self.found.push(RawGroup { level, id, told_by: Some(cpu), cpus });
                continue;
            }
            let Some(cpus) = list_or_mask(dir, &format!("{stem}_list"), stem)? else { continue };
            if level == Level::Core {
                core.clone_from(&cpus);
            } else {
                self.contradiction |= !core.is_subset(&cpus);
            }
            self.note(level, id, cpu, &cpus);
        }
        Ok(core)
    }

    /// L2 and L3 in `cpuN/cache`. The CPUs for which this speaks too: those that share the L2 (and then the L3),
    /// or without an L2 the threads of the core, as far as a set of each level that was found holds them.
    fn read_caches(&mut self, cpu: CpuId, dir: &Path, core: &CpuSet) -> Result<(), SysfsError> {
        let mut speaks_for = core.clone();
        let mut found = [false; Level::ALL.len()];
        for index in numbered(dir, "index")? {
            let dir = dir.join(format!("index{index}"));
            let level = match number(&dir.join("level"))? {
                Some(2) => Level::L2,
                Some(3) => Level::L3,
                _ => continue,
            };
            let covered = !self.everyone && self.covered[level.index()].contains(cpu);
            if !covered && !found[level.index()] && text(&dir.join("type"))?.as_deref() != Some("Instruction")
            {
                let Some(cpus) = list_or_mask(&dir, "shared_cpu_list", "shared_cpu_map")? else { continue };
                self.note(level, None, cpu, &cpus);
                if level == Level::L2 {
                    speaks_for = cpus;
                }
            }
            found[level.index()] |= self.covered[level.index()].contains(cpu);
            // Indexes ascend by level, and no file of a known L3 is needed.
            if found[Level::L2.index()] && !self.everyone && self.covered[Level::L3.index()].contains(cpu) {
                found[Level::L3.index()] = true;
                break;
            }
        }
        for level in [Level::L2, Level::L3] {
            if found[level.index()] {
                speaks_for = speaks_for.intersection(&self.covered[level.index()]);
            }
        }
        self.cached |= &speaks_for;
        Ok(())
    }
}
