//! The fake kernel under the eyes of an observer who knows the table and nothing of plans.
//!
//! After every single change that truepin makes, the observer looks for breaches that were not there before it:
//! what a hostile writer broke is not truepin's doing, what truepin's repair breaks on the way is.
//! Beside I1 to I4 ([`invariants`]) it sees: a populated cgroup that gains CPUs of a member-mode owner (M1), a mask
//! of a bystander's task that moves (I9), and files of others that were written and not put back.

use crate::fake::{Enforced, Errno, FakeKernel, Masks, Pool, invariants, mask_changes, masks};
use std::collections::{BTreeMap, BTreeSet};
use truepin::{
    CgroupId, CgroupPath, CpuSet, CpusetFile,
    assignments::{Assignments, Mode},
    observed::{Kernel, KernelError, Observed, Scope, Step},
};

/// A write of somebody else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// The cgroup.
    pub path: CgroupPath,
    /// The file's name.
    pub file: String,
    /// What is written; a newline is added.
    pub text: String,
}

/// The observed kernel.
#[derive(Debug, Clone)]
pub struct Eyes {
    kernel: FakeKernel,
    /// What truepin has in mind, in memory.
    table: Assignments,
    slice: CgroupPath,
    /// Cgroups that ever had an owner: one that is released stays a holder as long as it is a partition.
    ever: BTreeSet<CgroupPath>,
    /// Whether anybody ever had CPUs, promised ones included: before that nothing of others is remembered.
    begun: bool,
    /// Cgroups of owners that have been told that the CPUs are theirs.
    promised: BTreeSet<CgroupPath>,
    /// What stood when last looked; `None` when somebody else has changed something since.
    standing: Option<BTreeSet<String>>,
    /// Masks that must not move.
    steady: Masks,
    /// Others have written since truepin last looked.
    surprised: bool,
    /// Writes of others just before the numbered `apply`.
    ambush: BTreeMap<u64, Vec<Foreign>>,
    /// What files of others held before truepin wrote them, as long as they hold something else.
    originals: BTreeMap<(CgroupPath, CpusetFile), (CgroupId, String)>,
    /// What files held before others wrote them, since there were owners, and after. Which of the two is to be put back
    /// depends on whether truepin had an eye on the file by then.
    contested: BTreeMap<(CgroupPath, CpusetFile), BTreeSet<String>>,
    /// Every breach, with the step that made it.
    pub breaches: Vec<String>,
    /// Every step that the kernel took, and the one at which the agent died.
    pub steps: Vec<Step>,
    /// One line for each step, write of others and finding, if it is kept at all: it costs more than the rest.
    pub log: Option<Vec<String>>,
}

impl Eyes {
    /// Watches `kernel` from here on.
    #[must_use]
    pub fn new(kernel: FakeKernel, slice: CgroupPath) -> Self {
        Self {
            kernel,
            table: Assignments::default(),
            slice,
            ever: BTreeSet::new(),
            begun: false,
            promised: BTreeSet::new(),
            standing: None,
            steady: Masks::new(),
            surprised: false,
            ambush: BTreeMap::new(),
            originals: BTreeMap::new(),
            contested: BTreeMap::new(),
            breaches: Vec::new(),
            steps: Vec::new(),
            log: None,
        }
    }

    /// The kernel.
    #[must_use]
    pub fn kernel(&self) -> &FakeKernel {
        &self.kernel
    }

    /// A line for the log.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(line());
        }
    }

    /// Somebody else acts.
    pub fn others<T>(&mut self, act: impl FnOnce(&mut FakeKernel) -> T) -> T {
        self.standing = None;
        act(&mut self.kernel)
    }

    /// Somebody else writes a file.
    pub fn foreign(&mut self, write: &Foreign) -> Result<(), Errno> {
        let Foreign { path, file, text } = write;
        let takes_away = file == "cgroup.subtree_control" && text.contains("-cpuset");
        let below = |p: &&CgroupPath| takes_away && *p != path && p.is_within(path);
        let mut touched: Vec<_> = self.kernel.cgroups().filter(below).cloned().collect();
        touched.extend(CpusetFile::of_name(file).map(|_| path.clone()));
        for (path, file) in touched.into_iter().flat_map(|p| CpusetFile::ALL.map(|f| (p.clone(), f))) {
            if self.begun && (takes_away || file.name() == write.file) {
                let before = self.text(&path, file).split(' ').next().unwrap_or_default().to_owned();
                let first = self.originals.get(&(path.clone(), file)).map(|(_, first)| first.clone());
                let either = self.contested.entry((path, file)).or_default();
                either.extend([before, text.clone()].into_iter().chain(first));
            }
        }
        let result = self.others(|k| k.write_file(path, file, &format!("{text}\n")));
        if takes_away && result.is_ok() {
            // The kernel forgets what is below.
            self.originals.retain(|(p, _), _| p == path || !p.is_within(path));
        }
        self.note(|| format!("  others: {text:?} > {path}/{file}: {result:?}"));
        result
    }

    /// Somebody else writes a file just before the `nth` change from now, counted from 0.
    pub fn ambush(&mut self, nth: u64, write: Foreign) {
        self.ambush.entry(self.kernel.applies() + nth).or_default().push(write);
    }

    /// What others had in mind does not happen.
    pub fn stand_down(&mut self) {
        self.ambush.clear();
    }

    pub(super) fn restart(&mut self) {
        self.kernel.restart();
        self.ambush.clear();
    }

    /// The table has changed.
    pub(super) fn learn(&mut self, table: &Assignments) {
        if self.table != *table {
            self.ever.extend(table.owners.values().map(|a| a.cgroup.clone()));
            self.begun |= table.sets().next().is_some();
            self.table = table.clone();
            self.standing = None;
        }
    }

    /// From here on the masks of the tasks in these cgroups must not move.
    pub fn hold_still(&mut self, paths: &[CgroupPath]) {
        let inside =
            |tid: &u32| self.kernel.cgroup_of(*tid).is_some_and(|c| paths.iter().any(|p| c.is_within(p)));
        self.steady = masks(&self.kernel).into_iter().filter(|(tid, _)| inside(tid)).collect();
        self.standing = None;
    }

    /// The set in a file of a cgroup; `None` where there is no such file.
    #[must_use]
    pub fn set(&self, path: &CgroupPath, file: &str) -> Option<CpuSet> {
        self.kernel.read_file(path, file).ok()?.trim().parse().ok()
    }

    /// The text of a file of a cgroup without its newline; empty where there is no such file.
    #[must_use]
    pub fn text(&self, path: &CgroupPath, file: CpusetFile) -> String {
        self.kernel.read_file(path, file.name()).map(|t| t.trim().to_owned()).unwrap_or_default()
    }

    /// Everything that is wrong now.
    #[must_use]
    pub fn look(&self) -> BTreeSet<String> {
        let owners: Vec<_> = self
            .ever
            .iter()
            .map(|path| {
                let asked = || self.set(path, "cpuset.cpus").unwrap_or_default();
                let member = self.table.owner_of(path).filter(|(_, a)| a.mode == Mode::Member);
                // A member's set is its own from the moment when it asks for nothing else.
                let own = member.is_some_and(|(_, a)| asked().is_subset(&a.cpus));
                (path.clone(), if own { Enforced::Member } else { Enforced::Partition })
            })
            .collect();
        // When all is released everything is as it was found, the reserved CPUs included.
        let strict = self.table.strict_reserved && !self.table.owners.is_empty();
        let pool = Pool {
            cgroups: if strict { self.pool() } else { Vec::new() },
            reserved: self.table.reserved.clone(),
            strict,
        };
        let mut found: BTreeSet<String> = invariants(&self.kernel, &owners, &pool).into_iter().collect();
        found.extend(self.members_intruded());
        let moved = mask_changes(&self.steady, &masks(&self.kernel));
        found.extend(moved.into_iter().map(|(t, (old, new))| {
            let home = self.kernel.cgroup_of(t).map(ToString::to_string).unwrap_or_default();
            format!("I9: task {t} of bystander {home} went from {old} to {new}")
        }));
        found
    }

    /// Top-level cgroups of everybody else that have tasks.
    fn pool(&self) -> Vec<CgroupPath> {
        let populated = |p: &CgroupPath| {
            self.kernel.threads().any(|t| self.kernel.cgroup_of(t).is_some_and(|c| c.is_within(p)))
        };
        let pool = |p: &&CgroupPath| {
            p.level() == 1
                && !p.is_within(&self.slice)
                && !self.ever.iter().any(|o| o.is_within(p))
                && ["", "member"].contains(&self.text(p, CpusetFile::Partition).as_str())
                && populated(p)
        };
        self.kernel.cgroups().filter(pool).cloned().collect()
    }

    /// Nothing is left to do: from here on what the table says is promised.
    pub(super) fn promised(&mut self) {
        self.promised = self.table.owners.values().map(|a| a.cgroup.clone()).collect();
    }

    /// Member-mode owners that have been promised their set and ask for exactly that.
    fn settled_members(&self) -> Vec<String> {
        let members = self.table.owners.values().filter(|a| a.mode == Mode::Member);
        let members = members.filter(|a| self.promised.contains(&a.cgroup));
        let own = members.filter(|a| self.set(&a.cgroup, "cpuset.cpus").as_ref() == Some(&a.cpus));
        own.map(|a| format!("member {}", a.cgroup)).collect()
    }

    fn members_intruded(&self) -> Vec<String> {
        let mut found = Vec::new();
        let members: Vec<_> = self.table.owners.values().filter(|a| a.mode == Mode::Member).collect();
        if members.is_empty() {
            return found;
        }
        let homes: BTreeSet<&CgroupPath> =
            self.kernel.threads().filter_map(|t| self.kernel.cgroup_of(t)).filter(|p| !p.is_root()).collect();
        for home in homes {
            // Without files of its own it has what the next above has, and without a CPU too: 6.1 calls a partition valid
            // again that has none, at the next hotplug after the one that made it invalid.
            let mut up = std::iter::successors(Some(home.clone()), CgroupPath::parent);
            let own = |p| self.set(&p, "cpuset.cpus.effective").filter(|s| !s.is_empty());
            let Some(set) = up.find_map(own) else { continue };
            for a in &members {
                let both = set.intersection(&a.cpus);
                if !both.is_empty() && !home.is_within(&a.cgroup) {
                    found.push(format!("M1: {home} may use {both} of member {}", a.cgroup));
                }
            }
        }
        found
    }

    /// Files of others that truepin wrote and that hold something else than before. `empty_refused`: an empty list
    /// could not be put back while something runs there; the set that the tasks get must then be the same.
    #[must_use]
    pub fn not_put_back(&self, empty_refused: bool) -> Vec<String> {
        let mut found = Vec::new();
        for (key @ (path, file), (id, old)) in &self.originals {
            if self.kernel.id(path) != Some(*id) {
                continue;
            }
            let now = self.text(path, *file).split(' ').next().unwrap_or_default().to_owned();
            let up = path.parent().unwrap_or_default();
            let effective = match file {
                CpusetFile::Mems => "cpuset.mems.effective",
                _ => "cpuset.cpus.effective",
            };
            let inherits = self.set(path, effective) == self.set(&up, effective);
            // What another manager's partition beside it holds cannot be listed without breaking that on older kernels.
            let beside = self.partitions_beside(path);
            let same = |then: &String| {
                let free = then.parse::<CpuSet>().map(|t| t.difference(&beside).to_string());
                let left = *file != CpusetFile::Mems
                    && !beside.is_empty()
                    && free.is_ok_and(|f| f == now || f.is_empty());
                let list = matches!(file, CpusetFile::Cpus | CpusetFile::Mems);
                let refused = empty_refused && list && then.is_empty();
                now == *then || left || refused && inherits
            };
            if !same(old) && !self.contested.get(key).is_some_and(|c| c.iter().any(same)) {
                found.push(format!("{path}/{file} holds {now:?} instead of {old:?}"));
            }
        }
        found
    }

    fn partitions_beside(&self, path: &CgroupPath) -> CpuSet {
        let up = path.parent();
        let beside = |p: &&CgroupPath| *p != path && p.parent() == up && !p.is_root();
        let valid =
            |p: &&CgroupPath| ["root", "isolated"].contains(&self.text(p, CpusetFile::Partition).as_str());
        let sets = self.kernel.cgroups().filter(beside).filter(valid);
        sets.filter_map(|p| self.set(p, "cpuset.cpus.effective")).fold(CpuSet::new(), |all, s| all.union(&s))
    }

    /// What the file of a step holds; an invalid partition is a partition of that kind.
    fn value(&self, step: &Step) -> String {
        let Step::Write { path, file, .. } = step else { return String::new() };
        self.text(path, *file).split(' ').next().unwrap_or_default().to_owned()
    }

    fn remember(&mut self, step: &Step, old: String) {
        let Step::Write { path, file, new, .. } = step else { return };
        let Some(id) = self.kernel.id(path).filter(|_| !path.is_within(&self.slice)) else { return };
        let key = (path.clone(), *file);
        if self.originals.get(&key).is_some_and(|(i, _)| *i != id) {
            self.originals.remove(&key);
        }
        let (_, first) = self.originals.entry(key.clone()).or_insert((id, old));
        if *first == new.to_string() {
            self.originals.remove(&key);
        }
    }
}

impl Kernel for Eyes {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        self.surprised &= !matches!(scope, Scope::Around(_));
        self.kernel.observe(scope)
    }

    fn apply(&mut self, step: &Step) -> Result<(), KernelError> {
        for write in self.ambush.remove(&self.kernel.applies()).unwrap_or_default() {
            // What comes of their write is theirs, and truepin cannot know of it before it looks again.
            let _ = self.foreign(&write);
            self.surprised = true;
        }
        let before = self.standing.take().unwrap_or_else(|| self.look());
        let old = self.value(step);
        let own = self.settled_members();
        let result = self.kernel.apply(step);
        self.note(|| match &result {
            Ok(()) => format!("  {}", step.shell("")),
            Err(e) => format!("  {}: {e}", step.shell("")),
        });
        if result.is_ok() || self.kernel.crashed() {
            self.steps.push(step.clone());
        }
        let taken = self.value(step) != old;
        if result.is_ok() || self.kernel.crashed() && taken {
            self.remember(step, old);
        }
        let after = self.look();
        // A member's set is its own when everybody else has left it, which comes before it asks for nothing else.
        let not_yet =
            |b: &str| b.starts_with("M1") && (self.surprised || !own.iter().any(|o| b.ends_with(o)));
        for breach in after.difference(&before).filter(|b| !not_yet(b)) {
            self.breaches.push(format!("after {}: {breach}", step.shell("")));
        }
        self.standing = Some(after);
        result
    }
}
