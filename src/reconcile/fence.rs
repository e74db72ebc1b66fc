//! What is done about intruders where that is more than to tell of them.
//!
//! Problem: the ledger names who ran on exclusive CPUs by the id of its cgroup, after the fact; whether it still could, and
//! whether its cgroup may be written, only a reading says. And whoever makes cgroups must not make truepin write for ever.
//! Steps: (1) of new evidence, the cgroups of user tasks that ran on CPUs of owners who want it ([`OnIntrusion::Fence`]) and
//! whom no partition protects at present; (2) their paths are asked for; (3) the next convergence reads them too, and
//! [`plan::fence`] says of each whether it is in nobody's way by now, cannot be fenced, or what its list is to be; (4) a
//! fence is a mark beside the first value of the list: durable with it, planned from it, and gone with it.
//! Invariants: a fence is in force only as long as an owner whom it protects is there and has no partition that the kernel
//! honours; at most [`FENCES`] are, and no cgroup is fenced more often in a minute than a file is repaired (I8).

use super::{Effect, FindingKind, State, fights::Fights, step::Turn};
use crate::{
    assignments::{FirstValue, Mode},
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    ledger::IntruderKind,
    observed::CpusetObserved,
    owner::Owner,
    plan::{self, OnIntrusion, Unfenced},
    verdict::Evidence,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

/// Cgroups that are looked for at a time, those that took most first.
const SUSPECTS: usize = 64;
/// Each is one more cgroup to read, with all beside it.
pub(super) const FENCES: usize = 64;

/// Where somebody was who ran on exclusive CPUs.
#[derive(Debug, Clone)]
pub(super) struct Suspect {
    cgroup: CgroupId,
    /// On whose CPUs.
    owner: Owner,
    /// Name and process.
    who: String,
    /// Which of them.
    cpus: CpuSet,
}

/// What is known of intruders.
#[derive(Debug, Clone)]
pub(super) struct Fences {
    /// Whose paths are asked for.
    unplaced: Vec<Suspect>,
    /// To be looked at in the next reading.
    pub(super) suspects: BTreeMap<CgroupPath, Suspect>,
    /// Up to when evidence was looked through, `CLOCK_MONOTONIC`.
    seen_ns: u64,
    /// How often each was fenced.
    often: Fights,
    /// When kernel and table agreed for the last time.
    in_force: BTreeSet<CgroupPath>,
    /// Findings that wait for their cgroup to be off the CPUs.
    open: Vec<(u64, CgroupPath)>,
    /// What was said of cgroups that are not fenced.
    told: BTreeSet<(CgroupPath, Unfenced)>,
}

impl Fences {
    pub(super) fn new(per_minute: u32) -> Self {
        Self {
            unplaced: Vec::new(),
            suspects: BTreeMap::new(),
            seen_ns: 0,
            often: Fights::new(per_minute),
            in_force: BTreeSet::new(),
            open: Vec::new(),
            told: BTreeSet::new(),
        }
    }

    /// What was done too often may be done again after a quiet minute.
    pub(super) fn thaw(&mut self, now_ns: u64) {
        for (path, _) in self.often.thaw(now_ns) {
            self.told.retain(|(p, why)| *p != path || !matches!(why, Unfenced::TooOften(_)));
        }
    }
}

impl State {
    /// Whether intruders of this owner are to be fenced, and nothing else keeps them out.
    fn is_exposed(&self, owner: &Owner) -> bool {
        let Some(a) = self.assignments.owners.get(owner) else { return false };
        let at = self.settings.on_intrusion_at.get(&a.cgroup);
        if *at.unwrap_or(&self.settings.on_intrusion) == OnIntrusion::Report {
            return false;
        }
        match self.in_force(a) {
            Mode::Member => true,
            Mode::Partition => !self.observed.cpuset(&a.cgroup).is_some_and(CpusetObserved::is_partition),
            Mode::Audit => false,
        }
    }

    fn exposed(&self) -> CpuSet {
        let owners = self.assignments.owners.iter().filter(|(o, _)| self.is_exposed(o));
        owners.fold(CpuSet::new(), |all, (_, a)| all.union(&a.cpus))
    }

    /// Cgroups that are kept off exclusive CPUs because of what their tasks did.
    #[must_use]
    pub fn fenced(&self) -> BTreeSet<CgroupPath> {
        let needed = |f: &FirstValue| f.fenced_for.iter().any(|o| self.is_exposed(o));
        self.first.iter().filter(|(_, f)| needed(f)).map(|(path, _)| path.clone()).collect()
    }
}

impl Turn<'_> {
    /// New evidence: asks where intruders live who are to be fenced.
    pub(super) fn intruders(&mut self, evidence: &Evidence) {
        let Some(ledger) = evidence.ledger.as_ref().filter(|_| self.s.is_idle()) else { return };
        let since = mem::replace(&mut self.s.fences.seen_ns, evidence.at.mono_ns);
        let s = &*self.s;
        let watched = |o: &Owner| Some(s.runtime.get(o)?.base.as_ref()?.at.mono_ns);
        let exposed = s.assignments.owners.iter().filter(|(o, _)| s.is_exposed(o));
        let exposed: Vec<_> = exposed.filter_map(|(o, a)| Some((o, &a.cpus, watched(o)?))).collect();
        if exposed.is_empty() {
            return self.s.fences.told.clear();
        }
        let mut found: BTreeMap<CgroupId, (u64, u32, Suspect)> = BTreeMap::new();
        for i in ledger.intruders.iter().filter(|i| i.kind == IntruderKind::Foreign) {
            let new = |from: u64| i.last_ns > since.max(from);
            let on = exposed.iter().find(|(_, cpus, from)| cpus.contains(i.cpu) && new(*from));
            let Some((owner, ..)) = on else { continue };
            let who = format!("{} (pid {})", i.comm, i.tgid);
            let one = Suspect { cgroup: i.cgroup, owner: (*owner).clone(), who, cpus: CpuSet::single(i.cpu) };
            let (ns, _, known) = found.entry(i.cgroup).or_insert((0, i.tgid, one));
            *ns = ns.saturating_add(i.ns);
            if known.owner == **owner {
                known.cpus.insert(i.cpu);
            }
        }
        found.retain(|id, _| !self.is_told(*id));
        let mut found: Vec<_> = found.into_values().collect();
        found.sort_by_key(|(ns, ..)| std::cmp::Reverse(*ns));
        found.truncate(SUSPECTS);
        if found.is_empty() {
            return;
        }
        self.out.push(Effect::Locate(found.iter().map(|(_, tgid, s)| (s.cgroup, *tgid)).collect()));
        self.s.fences.unplaced = found.into_iter().map(|(.., suspect)| suspect).collect();
    }

    /// Whether, by the last reading, nothing is to be done about a cgroup and that was said: whoever intrudes for hours must
    /// not have everything read at every look.
    fn is_told(&self, id: CgroupId) -> bool {
        let Some(path) = self.s.path_of(id) else { return false };
        let told = self.s.fences.told.iter().any(|(p, _)| p == path);
        told && match plan::fence(&self.s.desired(), &self.s.observed, path, &self.s.exposed()) {
            Err(why) => self.s.fences.told.contains(&(path.clone(), why)),
            Ok(_) => false,
        }
    }

    /// Where they live, as far as their cgroups are there still. `own` is the agent's cgroup.
    pub(super) fn located(&mut self, found: &BTreeMap<CgroupId, CgroupPath>, own: Option<&CgroupPath>) {
        let unplaced = mem::take(&mut self.s.fences.unplaced);
        if !self.s.is_idle() {
            return;
        }
        for suspect in unplaced {
            let Some(path) = found.get(&suspect.cgroup) else { continue };
            if own.is_some_and(|own| !path.is_root() && path == own) {
                self.not_fenced(path.clone(), suspect, Unfenced::Own);
            } else {
                self.s.fences.suspects.insert(path.clone(), suspect);
            }
        }
        if !self.s.fences.suspects.is_empty() {
            self.look();
        }
    }

    /// Judges who was looked for, by the reading. True if one is to be fenced.
    pub(super) fn fence(&mut self) -> bool {
        let mut any = false;
        for (path, suspect) in mem::take(&mut self.s.fences.suspects) {
            let cgroup = self.s.observed.cgroups.get(&path).filter(|c| c.id == suspect.cgroup);
            let Some(cgroup) = cgroup else { continue };
            let from = cgroup.cpuset.as_ref().map(|f| f.cpus.to_string()).unwrap_or_default();
            let exposed = self.s.exposed();
            match plan::fence(&self.s.desired(), &self.s.observed, &path, &exposed) {
                Ok(None) => {}
                Ok(Some(to)) => any |= self.fence_one(path, suspect, from, to),
                Err(why) => self.not_fenced(path, suspect, why),
            }
        }
        any
    }

    fn fence_one(&mut self, path: CgroupPath, suspect: Suspect, from: String, to: CpuSet) -> bool {
        let fenced = self.s.fenced();
        if fenced.len() >= FENCES && !fenced.contains(&path) {
            self.not_fenced(path, suspect, Unfenced::TooMany(FENCES));
            return false;
        }
        let key = (path.clone(), CpusetFile::Cpus);
        let limit = self.s.settings.repairs_per_minute;
        if self.s.fences.often.changed(&key, None, self.now.mono_ns)
            || self.s.fences.often.frozen().contains(&key)
        {
            self.not_fenced(path, suspect, Unfenced::TooOften(limit));
            return false;
        }
        let owners = self.s.assignments.owners.keys().filter(|o| self.s.is_exposed(o));
        let owners: BTreeSet<Owner> = owners.cloned().collect();
        let fresh = || FirstValue { id: suspect.cgroup, ..FirstValue::default() };
        let first = self.s.first.entry(path.clone()).or_insert_with(fresh);
        if first.id != suspect.cgroup {
            *first = fresh();
        }
        first.fenced_for.extend(owners);
        let Suspect { owner, who, cpus, .. } = suspect;
        let id = self.report(FindingKind::Fenced { owner, who, path: path.clone(), cpus, from, to });
        self.s.fences.open.push((id, path));
        true
    }

    fn not_fenced(&mut self, path: CgroupPath, suspect: Suspect, why: Unfenced) {
        let told = &mut self.s.fences.told;
        if told.len() >= super::KEPT {
            told.clear();
        }
        if told.insert((path.clone(), why.clone())) {
            let Suspect { owner, who, cpus, .. } = suspect;
            self.report(FindingKind::NotFenced { owner, who, path, cpus, why });
        }
    }

    /// Nothing is left to do: who is off the CPUs by now, and which fences are no more.
    pub(super) fn fences_settled(&mut self) {
        let at = self.now;
        let held = self.s.assignments.exclusive();
        let open = mem::take(&mut self.s.fences.open);
        for (id, path) in open {
            let files = self.s.observed.cpuset(&path);
            let off = files.is_none_or(|f| f.effective.is_disjoint(&held));
            let finding = self.s.findings.iter_mut().find(|f| f.id == id);
            match (off, finding) {
                (true, Some(finding)) => finding.mended = Some(at),
                (false, Some(_)) => self.s.fences.open.push((id, path)),
                (_, None) => {} // pushed out by newer ones
            }
        }
        let now = self.s.fenced();
        for path in self.s.fences.in_force.difference(&now).cloned().collect::<Vec<_>>() {
            self.report(FindingKind::FenceGone { path });
        }
        self.s.fences.in_force = now;
    }

    /// Marks of owners who need no fence any more, where the first value stays on record for another reason.
    pub(super) fn forget_fences(&mut self) {
        let exposed: BTreeSet<Owner> =
            self.s.assignments.owners.keys().filter(|o| self.s.is_exposed(o)).cloned().collect();
        for first in self.s.first.values_mut() {
            first.fenced_for.retain(|o| exposed.contains(o));
        }
    }
}
