//! Which CPUs share a core, a cache, a die, a package: `cpuN/topology` and `cpuN/cache`.

use super::{
    SysfsError,
    files::{list_or_mask, names, number, numbered, parse_mask, text},
};
use std::path::{Path, PathBuf};
use truepin::{
    CpuId, CpuSet,
    topology::{Level, RawGroup},
};

/// The statements of these CPUs, by the cheapest reading that does not contradict itself.
pub(super) fn read_groups(
    system: &Path,
    cpus: &CpuSet,
    notes: &mut Vec<String>,
) -> Result<Vec<RawGroup>, SysfsError> {
    for file in [SetFile::List, SetFile::Mask] {
        let mut groups = Groups::new(system, file, false);
        groups.read(cpus)?;
        if !groups.contradiction {
            return Ok(groups.found);
        }
        notes.push(format!("sets read from {file:?} files contradict each other").to_lowercase());
    }
    let mut groups = Groups::new(system, SetFile::List, true);
    groups.read(cpus)?;
    Ok(groups.found)
}

/// A set comes in two forms. They differ only in trees that were edited after they were recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SetFile {
    List,
    Mask,
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
    /// Which form to read where there are both.
    file: SetFile,
    /// Ask every CPU, trusting no set to speak for its members.
    everyone: bool,
    found: Vec<RawGroup>,
    /// By level, the CPUs for which a set has been read.
    covered: [CpuSet; Level::ALL.len()],
    /// CPUs whose caches are known.
    cached: CpuSet,
    /// Whether sets contradict each other.
    contradiction: bool,
}

impl Groups {
    fn new(system: &Path, file: SetFile, everyone: bool) -> Self {
        Self {
            cpu_dir: system.join("cpu"),
            file,
            everyone,
            found: Vec::new(),
            covered: Default::default(),
            cached: CpuSet::new(),
            contradiction: false,
        }
    }

    /// The set that a folder holds under these names.
    fn set(&self, dir: &Path, list: &str, mask: &str) -> Result<Option<CpuSet>, SysfsError> {
        if self.file == SetFile::Mask {
            let path = dir.join(mask);
            if let Some(text) = text(&path)? {
                return parse_mask(&path, &text).map(Some);
            }
        }
        list_or_mask(dir, list, mask)
    }

    /// Reads the statements of these CPUs.
    fn read(&mut self, online: &CpuSet) -> Result<(), SysfsError> {
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
        Ok(())
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
            let Some(cpus) = self.set(dir, &format!("{stem}_list"), stem)? else { continue };
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
                let Some(cpus) = self.set(&dir, "shared_cpu_list", "shared_cpu_map")? else { continue };
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
