//! What is wrong although every file is as it should be.
//!
//! Problem: after hotplug the kernel may let others on the CPUs of a partition that reads as valid (7.3; 6.12 for
//! `isolated`), and an offline that it refused may leave an owner's task allowed everywhere (up to 6.12): nothing differs
//! from what is wanted, so no plan mends it. And while the kernel follows a CPU that goes, sets look wrong that are not.
//! Steps: sets that look wrong though nothing is left to write are read once more, [`DOUBT_NS`] later; what is still there is
//! a fault. A partition that leaks is ended and made again; for tasks with a wrong mask their list is written with
//! another value first, because the kernel drops a write that changes nothing, and so the partition stands meanwhile.
//! Invariant: without a new report of hotplug nobody is mended more than [`TRIES`] times a minute.

use super::{Effect, FindingKind, fights::MINUTE_NS, step::Turn};
use crate::{
    assignments::{Assignment, Mode},
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    owner::Owner,
    plan::{self, Phase, Plan},
    sweep::{self, SetFault, SetFinding, TaskSweep},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
};

const DOUBT_NS: u64 = 100_000_000;
const TRIES: u32 = 3;
/// Tasks of an owner that are told one by one in a sweep; a thousand would push everything else out of what is kept.
const ONE_BY_ONE: usize = 32;

/// How it is mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mend {
    /// `member`, then the whole sequence and the state again.
    Rebuild,
    /// `cpuset.cpus` with another value, then the right one.
    Rewrite,
}

impl fmt::Display for Mend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rebuild => "the partition is ended and made again (member, then its state)",
            Self::Rewrite => "its cpuset.cpus is written with another value and then as it was",
        })
    }
}

/// Of one cgroup.
#[derive(Debug, Clone, Copy, Default)]
struct Tries {
    count: u32,
    last_ns: u64,
    /// That there were too many.
    told: bool,
}

/// What is being mended.
#[derive(Debug, Clone, Default)]
pub(super) struct Mends {
    /// Partitions to be ended and made again.
    pub(super) rebuild: BTreeSet<CgroupPath>,
    /// Lists to be written with another value first.
    pub(super) rewrite: BTreeSet<CgroupPath>,
    tries: BTreeMap<CgroupPath, Tries>,
    /// When what was tried often enough is tried again.
    pub(super) retry_ns: Option<u64>,
    /// Findings that wait to be mended.
    open: Vec<(u64, Owner)>,
}

impl Mends {
    /// There is a new cause.
    pub(super) fn clear(&mut self) {
        self.tries.clear();
        self.retry_ns = None;
    }

    /// The cgroup has another purpose from now on.
    pub(super) fn forget(&mut self, path: &CgroupPath) {
        self.rebuild.remove(path);
        self.rewrite.remove(path);
        self.tries.remove(path);
    }

    /// A step was done, or given up.
    pub(super) fn done(&mut self, path: &CgroupPath, file: CpusetFile) {
        match file {
            CpusetFile::Partition => drop(self.rebuild.remove(path)),
            CpusetFile::Cpus => drop(self.rewrite.remove(path)),
            _ => {}
        }
    }
}

/// Faults that a reading can show though they are none, while the kernel follows CPUs that go and come.
pub(super) fn is_passing(found: &SetFinding) -> bool {
    matches!(found.fault, SetFault::Effective { .. } | SetFault::Overlap { .. })
}

impl Turn<'_> {
    /// Judges the sets as read. True when they are to be read once more first.
    pub(super) fn doubts(&mut self, plan: &Plan) -> bool {
        let s = &mut *self.s;
        let desired = s.desired();
        let found = if s.facts.cpuset { sweep::sets(&desired, &s.observed) } else { Vec::new() };
        let slice = plan::slice_leaks(&desired, &s.observed);
        let ready = plan.steps.first().is_none_or(|p| p.phase >= Phase::Enter);
        let (mut known, slice_known) = mem::take(&mut s.lasting);
        if !s.progress.rebuilt.is_empty() {
            known.clear(); // the kernel may not have followed yet
        }
        s.slice_leaks = false;
        s.wrong = match (s.hotplug.is_calm(), ready) {
            // Looked at when CPUs have come to rest.
            (false, _) => Vec::new(),
            // The kernel does not know yet of what was given to somebody just now.
            (true, false) => {
                let path = |o: &Owner| s.assignments.owners.get(o).map(|a| &a.cgroup);
                let steps = |p| plan.steps.iter().any(|s| Some(s.step.path()) == p);
                known.retain(|f| !steps(path(&f.owner)));
                s.lasting = (known, slice_known);
                let excused = |o: &Owner| s.progress.moved.contains(o) || s.unserved.contains(o);
                found.into_iter().filter(|f| !excused(&f.owner)).collect()
            }
            (true, true) => {
                let passing: BTreeSet<SetFinding> = found.iter().filter(|f| is_passing(f)).cloned().collect();
                let before = s.progress.doubted.take();
                if before.is_none() && (slice && !slice_known || !passing.is_subset(&known)) {
                    s.progress.doubted = Some((passing, slice));
                    self.out.push(Effect::Pause(DOUBT_NS));
                    return true;
                }
                let (before, slice_before) = before.unwrap_or((known, slice_known));
                s.slice_leaks = slice && slice_before;
                let lasting: Vec<SetFinding> =
                    found.into_iter().filter(|f| !is_passing(f) || before.contains(f)).collect();
                let passed = lasting.iter().filter(|f| is_passing(f)).cloned().collect();
                s.lasting = (passed, s.slice_leaks);
                lasting
            }
        };
        false
    }

    /// Partitions that leak, or do not have their CPUs, though they read as wanted. True when one is to be made again.
    pub(super) fn leaks(&mut self, plan: &Plan) -> bool {
        if !self.s.hotplug.is_calm() || plan.steps.first().is_some_and(|p| p.phase < Phase::Enter) {
            return false;
        }
        let mut by_owner: BTreeMap<Owner, Vec<String>> = BTreeMap::new();
        for f in self.s.wrong.iter().filter(|f| is_passing(f)) {
            let Some(a) = self.s.assignments.owners.get(&f.owner) else { continue };
            let may = self.s.in_force(a) == Mode::Partition && self.is_as_wanted(a);
            if may && !self.s.progress.rebuilt.contains(&a.cgroup) {
                by_owner.entry(f.owner.clone()).or_default().push(f.fault.to_string());
            }
        }
        let mut any = !by_owner.is_empty();
        let slice = self.s.settings.slice.clone();
        if self.s.slice_leaks && self.s.progress.rebuilt.insert(slice.clone()) {
            any = true;
            let below = self.s.assignments.owners.iter();
            let below = below.filter(|(_, a)| a.mode == Mode::Partition && a.cgroup.is_within(&slice));
            let seen = vec![format!("{slice} above it has not its CPUs for itself")];
            if let Some(first) = below.map(|(o, _)| o.clone()).next() {
                self.mend(&first, &slice, Mend::Rebuild, seen);
            }
        }
        for (owner, seen) in by_owner {
            if let Some(path) = self.s.assignments.owners.get(&owner).map(|a| a.cgroup.clone()) {
                self.s.progress.rebuilt.insert(path.clone());
                self.mend(&owner, &path, Mend::Rebuild, seen);
            }
        }
        any
    }

    pub(super) fn swept(&mut self, sweep: &TaskSweep) {
        let at = self.now;
        for (owner, why) in &sweep.unread {
            self.gap(owner, format!("the masks of its tasks could not be read: {why}"));
        }
        let owners = self.s.assignments.owners.clone();
        let triples = owners.iter().map(|(o, a)| (o, &a.cpus, self.s.in_force(a)));
        let found = sweep::masks(triples, &self.s.online, sweep);
        if !self.s.hotplug.is_calm() {
            // The kernel may be about to set them right; they are swept again when CPUs have come to rest.
            let of: BTreeSet<Owner> = found.into_iter().map(|f| f.owner).collect();
            for owner in of {
                self.gap(&owner, "masks of its tasks were read while CPUs went and came".into());
            }
            return;
        }
        let mut by_owner: BTreeMap<Owner, Vec<SetFault>> = BTreeMap::new();
        for f in found {
            let faults = by_owner.entry(f.owner.clone()).or_default();
            faults.push(f.fault.clone());
            if faults.len() <= ONE_BY_ONE {
                self.fault(f, None);
            }
        }
        let wrong: BTreeSet<Owner> = self.s.wrong.iter().map(|f| f.owner.clone()).collect();
        let open = mem::take(&mut self.s.mends.open);
        let (open, closed) =
            open.into_iter().partition(|(_, o)| by_owner.contains_key(o) || wrong.contains(o));
        self.s.mends.open = open;
        for (id, _) in closed {
            if let Some(f) = self.s.findings.iter_mut().find(|f| f.id == id) {
                f.mended = Some(at);
            }
        }
        for (owner, faults) in by_owner {
            // What is left alone, or is to be written anyhow, is not mended here.
            let Some(a) = owners.get(&owner).filter(|a| self.is_as_wanted(a)) else { continue };
            let outsider = faults.iter().any(|f| matches!(f, SetFault::Outsider { .. }));
            let exclusive = self.s.observed.cpuset(&a.cgroup).is_some_and(|f| f.exclusive.is_some());
            // With an explicit exclusive list `cpuset.cpus` decides nothing, so the partition stands.
            let listed = self.s.in_force(a) == Mode::Member || a.created && exclusive;
            let how = if listed && !outsider { Mend::Rewrite } else { Mend::Rebuild };
            self.mend(&owner, &a.cgroup, how, faults.iter().map(ToString::to_string).collect());
        }
    }

    /// Whether the files of its cgroup, as last read, hold what they should.
    fn is_as_wanted(&self, a: &Assignment) -> bool {
        self.s.observed.cpuset(&a.cgroup).is_some_and(|files| match self.s.in_force(a) {
            Mode::Partition => {
                files.is_partition() && *files.exclusive.as_ref().unwrap_or(&files.cpus) == a.cpus
            }
            Mode::Member => files.cpus == a.cpus,
            Mode::Audit => false,
        })
    }

    fn gap(&mut self, owner: &Owner, why: String) {
        let at = self.now;
        if let Some(r) = self.s.runtime.get_mut(owner) {
            r.gap(why, at);
        }
    }

    /// Orders it, and says so; or says that it was tried often enough.
    fn mend(&mut self, owner: &Owner, path: &CgroupPath, how: Mend, seen: Vec<String>) {
        let now = self.now.mono_ns;
        let file = match how {
            Mend::Rebuild => CpusetFile::Partition,
            Mend::Rewrite => CpusetFile::Cpus,
        };
        // Somebody fights for it (I8), or it could not be written: that was told.
        if self.s.desired().frozen.contains(&(path.clone(), file)) {
            return;
        }
        let tries = self.s.mends.tries.entry(path.clone()).or_default();
        if now.saturating_sub(tries.last_ns) >= MINUTE_NS {
            *tries = Tries::default();
        }
        if tries.count >= TRIES {
            let at = tries.last_ns.saturating_add(MINUTE_NS);
            let told = mem::replace(&mut tries.told, true);
            let retry = &mut self.s.mends.retry_ns;
            *retry = Some(retry.map_or(at, |other| other.min(at)));
            if !told {
                let seen = some(&seen);
                self.report(FindingKind::Stuck(format!(
                    "{owner}: {seen}, still so after {TRIES} attempts to mend it; tried again in a minute, or after a change"
                )));
            }
            return;
        }
        (tries.count, tries.last_ns) = (tries.count + 1, now);
        let mends = &mut self.s.mends;
        match how {
            Mend::Rebuild => drop(mends.rebuild.insert(path.clone())),
            Mend::Rewrite => drop(mends.rewrite.insert(path.clone())),
        }
        let cpus = self.s.assignments.cpus_of(owner).cloned().unwrap_or_default();
        let switched = self.s.hotplug.tried.intersection(&cpus);
        let id = self.report(FindingKind::Mending { owner: owner.clone(), seen, switched, how });
        self.s.mends.open.push((id, owner.clone()));
        self.s.hotplug.look_at(now);
    }
}

/// The first of them, and how many more.
fn some(seen: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = seen.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
    let more = seen.len().saturating_sub(SHOWN);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// The words of [`FindingKind::Mending`].
pub(super) fn words(
    f: &mut fmt::Formatter<'_>,
    owner: &Owner,
    seen: &[String],
    switched: &CpuSet,
    how: Mend,
) -> fmt::Result {
    write!(f, "{owner}: every file of its cgroup is right, and yet {}", some(seen))?;
    if !switched.is_empty() {
        write!(f, "; before that CPUs {switched} were switched off or on, or were to be")?;
    }
    write!(f, "; {how}")
}
