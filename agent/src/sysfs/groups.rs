//! Which CPUs share a core, a cache, a die, a package: `cpuN/topology` and `cpuN/cache`.

use super::{SysfsError, files::SetFile, tree::Folder};
use truepin::{
    CpuId, CpuSet,
    topology::{Level, RawGroup},
};

/// The statements of these CPUs, by the cheapest reading that does not contradict itself.
pub(super) fn read_groups(
    cpu_folder: &Folder<'_>,
    cpus: &CpuSet,
    notes: &mut Vec<String>,
) -> Result<Vec<RawGroup>, SysfsError> {
    for file in [SetFile::List, SetFile::Mask] {
        let mut groups = Groups::new(cpu_folder, file, false);
        groups.read(cpus)?;
        if !groups.contradiction {
            return Ok(groups.found);
        }
        notes.push(format!("sets read from {file:?} files contradict each other").to_lowercase());
    }
    let mut groups = Groups::new(cpu_folder, SetFile::List, true);
    groups.read(cpus)?;
    Ok(groups.found)
}

/// Where a level's sets are in `cpuN/topology`: the names since Linux 5.3, then those before.
pub(super) const SETS: [(Level, [&str; 2], Option<&str>); 6] = [
    (Level::Core, ["core_cpus", "thread_siblings"], None),
    (Level::Package, ["package_cpus", "core_siblings"], Some("physical_package_id")),
    (Level::Die, ["die_cpus", "die_cpus"], Some("die_id")),
    (Level::Cluster, ["cluster_cpus", "cluster_cpus"], None),
    (Level::Book, ["book_siblings", "book_siblings"], Some("book_id")),
    (Level::Drawer, ["drawer_siblings", "drawer_siblings"], Some("drawer_id")),
];

/// The reader of group statements.
struct Groups<'t> {
    /// `devices/system/cpu`.
    cpu_folder: &'t Folder<'t>,
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
    /// Names in the `topology` folder that was listed last.
    names: Vec<String>,
    /// Caches had no list on the CPU read last, but a mask (before Linux 2.6.28).
    lists_missing: bool,
    /// At which index the CPU read last had its L2 and its L3, as far as it was asked.
    layout: Vec<(u32, Level)>,
}

impl<'t> Groups<'t> {
    fn new(cpu_folder: &'t Folder<'t>, file: SetFile, everyone: bool) -> Self {
        Self {
            cpu_folder,
            file,
            everyone,
            found: Vec::new(),
            covered: Default::default(),
            cached: CpuSet::new(),
            contradiction: false,
            names: Vec::new(),
            lists_missing: false,
            layout: Vec::new(),
        }
    }

    /// Reads the statements of these CPUs.
    fn read(&mut self, online: &CpuSet) -> Result<(), SysfsError> {
        for cpu in online.iter() {
            let core = if self.everyone || !self.covered[Level::Core.index()].contains(cpu) {
                self.read_sets(cpu)?
            } else {
                CpuSet::single(cpu)
            };
            if self.everyone || !self.cached.contains(cpu) {
                self.read_caches(cpu, &core)?;
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
    ///
    /// The kernel gives every CPU the same files, so the folder is listed for the first CPU of each package; for the
    /// others only where a file is missing that the one before had.
    fn read_sets(&mut self, cpu: CpuId) -> Result<CpuSet, SysfsError> {
        let alike = !self.everyone && self.covered[Level::Package.index()].contains(cpu);
        if alike
            && !self.names.is_empty()
            && let Some(core) = self.read_named_sets(cpu, false)?
        {
            return Ok(core);
        }
        let folder = self.cpu_folder.folder(&format!("cpu{cpu}/topology"))?;
        self.names = folder.map_or(Ok(Vec::new()), |f| f.names())?;
        Ok(self.read_named_sets(cpu, true)?.unwrap_or_else(|| CpuSet::single(cpu)))
    }

    /// The sets in `cpuN/topology`, under the names found last, which were this CPU's own if `listed`. If they were not
    /// and a file is missing: `None`, and nothing was noted.
    fn read_named_sets(&mut self, cpu: CpuId, listed: bool) -> Result<Option<CpuSet>, SysfsError> {
        let has = |name: &str| self.names.iter().any(|n| n == name);
        let file = |name: &str| format!("cpu{cpu}/topology/{name}");
        let mut core = CpuSet::single(cpu);
        let mut package = CpuSet::new();
        let mut sets = Vec::new();
        for (level, stems, id_name) in SETS {
            if !self.everyone && self.covered[level.index()].contains(cpu) {
                continue;
            }
            let there = |stem: &&&str| has(&format!("{stem}_list")) || has(stem);
            let Some(stem) = stems.iter().find(there) else { continue };
            let id = match id_name {
                Some(name) if has(name) => self.cpu_folder.number(&file(name))?,
                _ => None,
            };
            if level == Level::Die && id.is_some_and(|id| id < 0) {
                // "No die level": the set would hold the CPU alone, and says nothing about others. That is so in the
                // whole package, which was read before.
                sets.push((level, id, CpuSet::single(cpu)));
                continue;
            }
            let (list, mask) = (file(&format!("{stem}_list")), file(stem));
            let Some((cpus, _)) = self.cpu_folder.set(&list, &mask, self.file)? else {
                if listed {
                    continue;
                }
                return Ok(None);
            };
            match level {
                Level::Core => core.clone_from(&cpus),
                Level::Package => package.clone_from(&cpus),
                _ => {}
            }
            sets.push((level, id, cpus));
        }
        for (level, id, cpus) in sets {
            if level == Level::Die && id.is_some_and(|id| id < 0) {
                self.covered[level.index()] |= &package;
                self.found.push(RawGroup { level, id, told_by: Some(cpu), cpus });
            } else {
                self.contradiction |= !core.is_subset(&cpus);
                self.note(level, id, cpu, &cpus);
            }
        }
        Ok(Some(core))
    }

    /// L2 and L3 in `cpuN/cache`. The CPUs for which this speaks too: those that share the L2 (and then the L3),
    /// or without an L2 the threads of the core, as far as a set of each level that was found holds them.
    fn read_caches(&mut self, cpu: CpuId, core: &CpuSet) -> Result<(), SysfsError> {
        let mut speaks_for = core.clone();
        let mut found = [false; Level::ALL.len()];
        if !self.read_caches_like_last(cpu, &mut speaks_for, &mut found)? {
            self.read_all_caches(cpu, &mut speaks_for, &mut found)?;
        }
        for level in [Level::L2, Level::L3] {
            if found[level.index()] {
                speaks_for = speaks_for.intersection(&self.covered[level.index()]);
            }
        }
        self.cached |= &speaks_for;
        Ok(())
    }

    /// The caches of a CPU whose indexes mean what they meant on the CPU before: neither the folder nor the files of
    /// first-level caches are opened. False if something is not as it was there; then nothing was noted.
    fn read_caches_like_last(
        &mut self,
        cpu: CpuId,
        speaks_for: &mut CpuSet,
        found: &mut [bool; Level::ALL.len()],
    ) -> Result<bool, SysfsError> {
        if self.everyone || self.layout.iter().all(|(_, level)| *level != Level::L2) {
            return Ok(false);
        }
        let mut sets = Vec::new();
        for (index, level) in &self.layout {
            if !self.covered[level.index()].contains(cpu) {
                let file = |name: &str| format!("cpu{cpu}/cache/index{index}/{name}");
                if self.cpu_folder.number(&file("level"))?.and_then(cache_level) != Some(*level) {
                    return Ok(false);
                }
                let (list, mask) = (file("shared_cpu_list"), file("shared_cpu_map"));
                let first = if self.lists_missing { SetFile::Mask } else { self.file };
                let Some((cpus, _)) = self.cpu_folder.set(&list, &mask, first)? else { return Ok(false) };
                sets.push((*level, cpus));
            }
        }
        // A cache more than last time would come after the last index, unless it is an L3 that another CPU has told of.
        let knows_l3 = self.covered[Level::L3.index()].contains(cpu) || sets.iter().any(|s| s.0 == Level::L3);
        let next = self.layout.iter().map(|(index, _)| index + 1).max().unwrap_or(0);
        if !knows_l3 && self.cpu_folder.number(&format!("cpu{cpu}/cache/index{next}/level"))?.is_some() {
            return Ok(false);
        }
        for (level, cpus) in sets {
            self.note(level, None, cpu, &cpus);
            if level == Level::L2 {
                *speaks_for = cpus;
            }
        }
        for level in [Level::L2, Level::L3] {
            found[level.index()] = self.covered[level.index()].contains(cpu);
        }
        Ok(true)
    }

    /// The caches of a CPU, index by index.
    fn read_all_caches(
        &mut self,
        cpu: CpuId,
        speaks_for: &mut CpuSet,
        found: &mut [bool; Level::ALL.len()],
    ) -> Result<(), SysfsError> {
        self.layout.clear();
        let Some(caches) = self.cpu_folder.folder(&format!("cpu{cpu}/cache"))? else { return Ok(()) };
        for index in caches.numbered("index")? {
            let file = |name: &str| format!("index{index}/{name}");
            let Some(level) = caches.number(&file("level"))?.and_then(cache_level) else { continue };
            let covered = !self.everyone && self.covered[level.index()].contains(cpu);
            if !covered
                && !found[level.index()]
                && caches.text(&file("type"))?.as_deref() != Some("Instruction")
            {
                self.layout.push((index, level));
                let (list, mask) = (file("shared_cpu_list"), file("shared_cpu_map"));
                let Some((cpus, form)) = caches.set(&list, &mask, self.file)? else { continue };
                self.lists_missing = form == SetFile::Mask;
                self.note(level, None, cpu, &cpus);
                if level == Level::L2 {
                    *speaks_for = cpus;
                }
            }
            found[level.index()] |= self.covered[level.index()].contains(cpu);
            // Indexes ascend by level, and no file of a known L3 is needed.
            if found[Level::L2.index()] && !self.everyone && self.covered[Level::L3.index()].contains(cpu) {
                found[Level::L3.index()] = true;
                break;
            }
        }
        Ok(())
    }
}

fn cache_level(number: i64) -> Option<Level> {
    match number {
        2 => Some(Level::L2),
        3 => Some(Level::L3),
        _ => None,
    }
}
