//! The steps from what is observed to the targets.

use super::{
    Desired, Phase, Plan, Planned, Problem, Target, TargetKind, Unrecorded,
    local::Slice,
    targets::{Targets, targets},
};
use crate::{
    assignments::Mode,
    cgroup::{CgroupPath, CpusetFile},
    cpuset::CpuSet,
    nodeset::NodeSet,
    observed::{CgroupKind, CgroupObserved, CpusetObserved, Observed, Step, Value},
    partition::{PartitionKind, PartitionState},
};
use std::collections::BTreeSet;

/// Compares `desired` with `observed`, which must have been read with [`Desired::scope`].
#[must_use]
pub fn diff(desired: &Desired, observed: &Observed) -> Plan {
    let Targets { by_path, problems, stale_first } = targets(desired, observed);
    let plan = Plan { problems, ..Plan::default() };
    let (held, holders, slice) = (desired.held(), holders(desired, observed), Slice::default());
    let widening = None;
    let mut d = Diff { desired, observed, held, holders, slice, widening, plan, unready: BTreeSet::new() };
    d.widening = d.widen();
    for path in by_path.keys() {
        d.judge_owner(path);
    }
    d.slice = d.judge_slice(by_path.get(&desired.slice));
    for (path, target) in &by_path {
        d.prepare(path, target);
    }
    for (path, target) in &by_path {
        if target.kind == TargetKind::Remove && !d.stays_listed(path) {
            d.push(Phase::Remove, Step::Remove(path.clone()));
        }
        if d.skip(path) || !d.will_have_files(path) {
            continue;
        }
        d.record(path, target);
        let files = d.files(path);
        match target.kind {
            TargetKind::Owner => d.owner(path, target, &files),
            TargetKind::Chain if d.is_local_slice(path) => d.local_slice(path, target, &files),
            TargetKind::Chain => d.chain(path, target, &files),
            TargetKind::Pool | TargetKind::Retired | TargetKind::Remove => d.shared(path, target, &files),
        }
        // Before anything enters: memory that is there already would be moved, page by page.
        if let Some(mems) = target.mems.as_ref().filter(|m| **m != files.mems) {
            let (old, new) = (files.mems.to_string(), Value::Mems(mems.clone()));
            d.write(Phase::GrowExclusive, path, CpusetFile::Mems, old, new);
        }
        d.judge_memory(path, &files);
    }
    d.enter();
    d.settle(&by_path, stale_first);
    let mut plan = d.plan;
    let needed = by_path.iter().filter(|(_, t)| !t.governed.is_empty());
    plan.governed = needed.map(|(path, _)| path.clone()).collect();
    plan.steps.sort_by_key(rank);
    plan
}

/// Order inside a phase. Shared cgroups grow from the leaves up: while a list above is too small the ones below take no
/// effect, and when it grows nothing wrong is left below. Ancestors' `exclusive` shrinks after the leaves' and grows before; a partition that ends
/// goes first, because its CPUs come back with it; `cpuset.cpus` is written after `exclusive`, which decides what 7.3 lets
/// it hold where all CPUs of a partition went offline.
fn rank(p: &Planned) -> (Phase, i64, u8, CgroupPath) {
    let depth = i64::from(p.step.path().level());
    let file = match &p.step {
        Step::Write { file: CpusetFile::Partition, .. } => 0,
        Step::Write { file: CpusetFile::Exclusive, .. } => 1,
        Step::Write { file: CpusetFile::Cpus, .. } => 2,
        _ => 3,
    };
    let (depth, file) = match p.phase {
        Phase::ShrinkExclusive | Phase::Remove | Phase::GrowPool => (-depth, file),
        _ => (depth, file),
    };
    (p.phase, depth, file, p.step.path().clone())
}

/// Somebody who has CPUs for himself at this moment.
struct Holder {
    path: CgroupPath,
    up: Option<CgroupPath>,
    /// What the kernel gives.
    has: CpuSet,
    /// What is asked for: the kernel compares siblings by it.
    asks: CpuSet,
    owner: bool,
}

/// The partitions that the kernel honours, and the member-mode owners that keep out of the pool.
fn holders(desired: &Desired, observed: &Observed) -> Vec<Holder> {
    let holder = |(path, c): (&CgroupPath, &CgroupObserved)| {
        let files = c.cpuset.as_ref().filter(|_| !path.is_root())?;
        let owner = desired.owners.get(path);
        let member = owner.is_some_and(|o| o.mode == Mode::Member && files.cpus.is_disjoint(&desired.pool));
        let (has, asks) = if files.is_partition() {
            let has = files.exclusive_effective.as_ref().unwrap_or(&files.effective);
            (has, files.exclusive.as_ref().unwrap_or(&files.cpus))
        } else if member {
            (&files.cpus, &files.cpus)
        } else {
            return None;
        };
        let (path, has, asks) = (path.clone(), has.clone(), asks.clone());
        Some(Holder { up: path.parent(), path, has, asks, owner: owner.is_some() })
    };
    observed.cgroups.iter().filter_map(holder).collect()
}

pub(super) struct Diff<'a> {
    pub(super) desired: &'a Desired,
    pub(super) observed: &'a Observed,
    /// CPUs that are somebody's.
    held: CpuSet,
    holders: Vec<Holder>,
    /// Where partitions are local.
    pub(super) slice: Slice,
    /// See [`Diff::widen`].
    widening: Option<(CgroupPath, CpuSet)>,
    plan: Plan,
    /// Owners' cgroups that cannot be worked on; the others go on.
    unready: BTreeSet<CgroupPath>,
}

impl Diff<'_> {
    fn push(&mut self, phase: Phase, step: Step) {
        self.plan.steps.push(Planned { phase, step });
    }

    fn observed(&self, path: &CgroupPath) -> Option<&CgroupObserved> {
        self.observed.cgroups.get(path)
    }

    /// Whether there are files to write when the plan comes to it. A cgroup of somebody else that is not there is not
    /// ours to make, and for the shared pool alone no controller is enabled.
    fn will_have_files(&self, path: &CgroupPath) -> bool {
        let planned = |step: &Step| self.plan.steps.iter().any(|p| p.step == *step);
        let enabled = || path.parent().is_some_and(|up| planned(&Step::Enable(up)));
        match self.observed(path) {
            Some(cgroup) => cgroup.cpuset.is_some() || enabled(),
            None => planned(&Step::Create(path.clone())),
        }
    }

    /// The files as observed, or as they will be when the cgroup has just been made.
    pub(super) fn files(&self, path: &CgroupPath) -> CpusetObserved {
        let list = (!self.desired.local).then(CpuSet::new);
        self.observed.cpuset(path).cloned().unwrap_or_else(|| CpusetObserved {
            exclusive: list.clone(),
            exclusive_effective: list,
            partition: Some(PartitionState::valid(PartitionKind::Member)),
            ..CpusetObserved::default()
        })
    }

    pub(super) fn skip(&self, path: &CgroupPath) -> bool {
        self.unready.contains(path)
    }

    fn write(&mut self, phase: Phase, path: &CgroupPath, file: CpusetFile, old: String, new: Value) {
        if self.desired.frozen.contains(&(path.clone(), file)) {
            return;
        }
        self.push(phase, Step::Write { path: path.clone(), file, old, new });
    }

    /// What the files of somebody else's cgroup hold when they begin to matter, whether they are to be written now or
    /// only when a third party has changed them: that change is not what is to be put back one day.
    fn record(&mut self, path: &CgroupPath, target: &Target) {
        let Some(cgroup) = self.observed(path).filter(|_| !target.ours) else { return };
        let (id, files) = (cgroup.id, self.files(path));
        let known = self.desired.first.get(path).filter(|f| f.id == id);
        for file in &target.governed {
            if known.is_some_and(|f| f.files.contains_key(file)) {
                continue;
            }
            let before = self.observed.before.get(path).and_then(|files| files.get(file));
            let value = match file {
                _ if before.is_some() => before.cloned(),
                CpusetFile::Cpus => Some(files.cpus.to_string()),
                CpusetFile::Exclusive => files.exclusive.as_ref().map(ToString::to_string),
                // An invalid state cannot be written back; the kind can.
                CpusetFile::Partition => files.partition.as_ref().map(|p| p.kind.to_string()),
                CpusetFile::Mems => Some(files.mems.to_string()),
            };
            let Some(value) = value else { continue }; // older kernels lack the file
            self.plan.unrecorded.push(Unrecorded { path: path.clone(), id, file: *file, value });
        }
    }

    pub(super) fn write_cpus(&mut self, phase: Phase, path: &CgroupPath, old: &CpuSet, new: CpuSet) {
        if *old != new {
            self.write(phase, path, CpusetFile::Cpus, old.to_string(), Value::Cpus(new));
        }
    }

    fn write_exclusive(&mut self, phase: Phase, path: &CgroupPath, old: &CpuSet, new: CpuSet) {
        if *old != new {
            self.write(phase, path, CpusetFile::Exclusive, old.to_string(), Value::Cpus(new));
        }
    }

    pub(super) fn write_partition(
        &mut self,
        phase: Phase,
        path: &CgroupPath,
        old: &PartitionState,
        new: PartitionKind,
    ) {
        self.write(phase, path, CpusetFile::Partition, old.to_string(), Value::Partition(new));
    }

    /// mkdir and `+cpuset`.
    fn prepare(&mut self, path: &CgroupPath, target: &Target) {
        // What is left of a released owner keeps to the pool by files of its own, too.
        let needed = matches!(target.kind, TargetKind::Chain | TargetKind::Owner | TargetKind::Retired);
        if !needed || self.skip(path) {
            return;
        }
        // The slice outlives its owners; without any, or with none that can be worked on, it needs nothing.
        let served = |o: &CgroupPath| o.is_within(path) && !self.skip(o) && !self.desired.blocked.contains(o);
        if target.kind == TargetKind::Chain && !self.desired.owners.keys().any(served) {
            return;
        }
        match self.observed(path) {
            None if target.ours => self.push(Phase::Prepare, Step::Create(path.clone())),
            _ => {}
        }
        if let Some(parent) = path.parent() {
            let enabled = self.observed(&parent).is_some_and(|p| p.enables_cpuset);
            let step = Step::Enable(parent.clone());
            if !enabled && !self.plan.steps.iter().any(|s| s.step == step) {
                self.push(Phase::Prepare, step);
            }
        }
    }

    /// The list is an owner's as it should be, and not what the kernel makes of it.
    fn judge_memory(&mut self, path: &CgroupPath, files: &CpusetObserved) {
        let Some(owner) = self.desired.owners.get(path) else { return };
        let wanted = &owner.mems;
        let there = !wanted.is_empty() && files.mems == *wanted && !self.observed.copied;
        if there && files.mems_effective != *wanted {
            self.plan.problems.push(Problem::Memory {
                owner: owner.owner.clone(),
                path: path.clone(),
                wanted: wanted.clone(),
                effective: files.mems_effective.clone(),
            });
        }
    }

    /// Reports what keeps an owner's cgroup from being worked on.
    fn judge_owner(&mut self, path: &CgroupPath) {
        let Some(owner) = self.desired.owners.get(path) else { return };
        let mut problems = Vec::new();
        match self.observed(path) {
            None if !owner.created => {
                problems.push(Problem::Vanished { owner: owner.owner.clone(), path: path.clone() });
            }
            Some(c) if c.kind == CgroupKind::DomainInvalid || c.kind == CgroupKind::Threaded => {
                let kind = if c.kind == CgroupKind::Threaded { "threaded" } else { "domain invalid" };
                problems.push(Problem::Kind { owner: owner.owner.clone(), path: path.clone(), kind });
            }
            _ => {}
        }
        for up in path.ancestors().iter().filter(|p| !p.is_root()) {
            if let Some(c) = self.observed(up)
                && c.has_processes
                && !c.enables_cpuset
            {
                problems.push(Problem::Populated { path: up.clone() });
            }
            let state = self.observed.cpuset(up).and_then(|c| c.partition.as_ref());
            if !up.is_within(&self.desired.slice) && state.is_some_and(|s| s.kind != PartitionKind::Member) {
                problems.push(Problem::InsidePartition { owner: owner.owner.clone(), path: up.clone() });
            }
        }
        if !problems.is_empty() {
            self.unready.insert(path.clone());
            self.plan.problems.extend(problems);
        }
    }

    fn owner(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let Some(owner) = self.desired.owners.get(path) else { return };
        let others = self.held.difference(&owner.cpus);
        let want = t.partition.unwrap_or(PartitionKind::Member);
        let now = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        let exclusive = files.exclusive.clone();
        let mut cpus_now = files.cpus.clone();
        let mut exclusive_now = exclusive.clone().unwrap_or_default();
        let mut state = now.clone();

        if self.kept_flag(path) {
            return self.write_partition(Phase::Prepare, path, &now, PartitionKind::Root);
        }
        if self.sticks(path).is_some() {
            // One after the other: two lists that reach over the pool would meet.
            if self.widening.as_ref().is_some_and(|(first, _)| first == path)
                && let Some((_, wide)) = self.widening.clone()
            {
                self.write_exclusive(Phase::Prepare, path, &exclusive_now, wide.clone());
                exclusive_now = wide;
            } else if self.widening.is_some() || self.widened_beside(path) {
                return;
            }
        }
        // Giving away. A partition that must end, is invalid, or would shrink to nothing becomes a member first.
        let keep = exclusive_now.intersection(t.exclusive.as_ref().unwrap_or(&exclusive_now));
        // Without an explicit list it consists of `cpuset.cpus`.
        let vanishes = match &exclusive {
            Some(_) => keep.is_disjoint(&self.observed.online),
            None => t.cpus.as_ref().is_some_and(|c| c.is_disjoint(&cpus_now)),
        };
        let vanishes = want != PartitionKind::Member && vanishes;
        let wrong = owner.mode == Mode::Partition && self.desired.rebuild.contains(path);
        let in_slice = self.is_in_slice(path);
        let falls = in_slice && (self.slice.ends || self.takes_all_of_one(path, &owner.cpus));
        let must_end = now.kind != PartitionKind::Member
            && (want == PartitionKind::Member || now.invalid.is_some() || vanishes || wrong || falls);
        let listed = if want == PartitionKind::Member { &exclusive_now } else { &keep };
        let waits = must_end && !self.chain_lists(path, listed);
        let reset = must_end && !waits;
        // One that gives nothing away ends when everybody else has left its CPUs: until then it keeps them out. From
        // what is offline there is nobody to keep out, and what it gets for that may be others' as well.
        let has = files.exclusive_effective.as_ref().unwrap_or(&files.effective);
        let late = want == PartitionKind::Member
            && now.is_partition()
            && has.is_subset(&owner.cpus)
            && !has.is_disjoint(&self.observed.online);
        if reset {
            let phase = if late { Phase::SetPartition } else { Phase::ShrinkExclusive };
            self.write_partition(phase, path, &now, PartitionKind::Member);
            state = PartitionState::valid(PartitionKind::Member);
        }
        let stands = late || self.stays_partition(path, &now);
        // A list that gives nothing to anybody changes in one write: one without a CPU may be refused (see `sticks`).
        let nobody_waits = keep.is_disjoint(&self.observed.online)
            && t.exclusive.as_ref().is_some_and(|e| !e.is_empty())
            && exclusive_now.is_disjoint(&others);
        let empties = keep.is_empty() && stands;
        if exclusive.is_some() && !(waits || nobody_waits || empties) {
            self.write_exclusive(Phase::ShrinkExclusive, path, &exclusive_now, keep.clone());
            exclusive_now = keep;
        }
        if let Some(target) = t.cpus.as_ref().filter(|_| !self.slice_opens(path)) {
            let lost = cpus_now.difference(target);
            let keep = cpus_now.intersection(target);
            let next = if lost.is_empty() {
                cpus_now.clone()
            } else if !keep.is_disjoint(&self.observed.online) {
                keep
            } else if in_slice {
                // What it is to have comes into the slice later, and the pool is outside.
                cpus_now.clone()
            } else if !lost.is_disjoint(&others) {
                // Everything goes to others before anything is taken: on what nobody has yet, else in the pool.
                let held = self.held_by_others(path);
                let free = |set: &CpuSet| Some(set.difference(&held)).filter(|s| !s.is_empty());
                free(target).or_else(|| free(&self.desired.pool)).unwrap_or_else(|| self.desired.pool.clone())
            } else {
                cpus_now.clone()
            };
            // What reaches over other owners' CPUs draws back before anything grows, its own parent for one.
            // A partition that has its CPUs by this list alone ends first: with another it would be one of other CPUs.
            let by_list = reset && exclusive.as_ref().is_none_or(CpuSet::is_empty);
            let early = !lost.is_disjoint(&others) && !by_list;
            let phase = if early { Phase::Prepare } else { Phase::ShrinkExclusive };
            self.write_cpus(phase, path, &cpus_now, next.clone());
            cpus_now = next;
            self.write_cpus(Phase::GrowExclusive, path, &cpus_now, target.clone());
            if self.desired.rewrite.contains(path)
                && files.cpus == *target
                && let Some(other) = self.other_list(target)
            {
                self.write_cpus(Phase::ShrinkExclusive, path, target, other);
            }
        }
        if exclusive.is_some()
            && let Some(target) = &t.exclusive
            && !waits
            && !(target.is_empty() && stands)
        {
            self.write_exclusive(Phase::GrowExclusive, path, &exclusive_now, target.clone());
        }
        let may = !waits && (!in_slice || self.slice.serves);
        if want != PartitionKind::Member && may && (state.kind != want || state.invalid.is_some()) {
            self.write_partition(Phase::SetPartition, path, &state, want);
        }
    }

    /// A list that is not this one, with which nobody loses his last CPU and nobody is in another's way: one CPU fewer,
    /// or where there is only one, one of the pool.
    fn other_list(&self, list: &CpuSet) -> Option<CpuSet> {
        let online = list.intersection(&self.observed.online);
        if online.len() > 1 {
            return online.iter().last().map(|last| list.difference(&CpuSet::single(last)));
        }
        let pool = self.desired.pool.intersection(&self.observed.online);
        pool.first().map(|one| list.union(&CpuSet::single(one)))
    }

    /// Whether everything above lists these CPUs as exclusive, so that nothing is lost when a partition on them ends
    /// (see `list_standing`). What cannot be listed at present is not waited for.
    fn chain_lists(&self, path: &CgroupPath, cpus: &CpuSet) -> bool {
        let cpus = &lost_to(self.observed, cpus);
        let lists = |up: &CgroupPath| {
            let exclusive = self.observed.cpuset(up).and_then(|c| c.exclusive.as_ref());
            exclusive.is_none_or(|e| cpus.is_subset(e))
                || self.desired.frozen.contains(&(up.clone(), CpusetFile::Exclusive))
        };
        path.ancestors().iter().filter(|p| !p.is_root()).all(lists)
    }

    /// What owners elsewhere, and partitions beside this cgroup, have at this moment.
    fn held_by_others(&self, path: &CgroupPath) -> CpuSet {
        let up = path.parent();
        let mut held = CpuSet::new();
        for h in self.holders.iter().filter(|h| !h.path.is_within(path)) {
            if h.up == up {
                held |= &h.has.union(&h.asks);
            } else if h.owner {
                held |= &h.has;
            }
        }
        held
    }

    /// Whether this is a partition and must stay one, because its state is in a fight (I8): then its set cannot become
    /// empty either.
    fn stays_partition(&self, path: &CgroupPath, now: &PartitionState) -> bool {
        now.is_partition() && self.desired.frozen.contains(&(path.clone(), CpusetFile::Partition))
    }

    /// Whether this is an invalid partition that cannot be ended, because its state is in a fight. 6.12.117 keeps one that
    /// had its CPUs from the root on a list when its cgroup is removed, and panics over that list later.
    fn stays_listed(&self, path: &CgroupPath) -> bool {
        let state = self.observed.cpuset(path).and_then(|f| f.partition.as_ref());
        let frozen = self.desired.frozen.contains(&(path.clone(), CpusetFile::Partition));
        frozen && state.is_some_and(|s| s.kind != PartitionKind::Member && s.invalid.is_some())
    }

    fn chain(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        if let (Some(want), Some(now)) = (t.partition, &files.partition)
            && now.kind != want
        {
            // Before anything below: a child that ends as a partition below one may be left without CPUs.
            self.write_partition(Phase::Prepare, path, now, want);
        }
        if let (Some(target), Some(now)) = (&t.exclusive, &files.exclusive) {
            let keep = now.intersection(target);
            self.write_exclusive(Phase::ShrinkExclusive, path, now, keep.clone());
            self.write_exclusive(Phase::GrowExclusive, path, &keep, target.clone());
        }
        self.pool_cpus(path, t, files);
    }

    fn shared(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let now = files.partition.clone().unwrap_or_else(|| PartitionState::valid(PartitionKind::Member));
        let differs = t.cpus.as_ref().is_some_and(|c| *c != files.cpus)
            || t.exclusive.is_some() && files.exclusive.is_some() && t.exclusive != files.exclusive;
        let exclusive_now = files.exclusive.clone().unwrap_or_default();
        let waits = now.kind != PartitionKind::Member && !self.chain_lists(path, &exclusive_now);
        if let Some(want) = t.partition.filter(|_| !waits) {
            // One that becomes again what it was ends first, so that its sets change while nothing depends on them.
            // Whether it then is valid is between its manager and the kernel.
            let ends = now.kind != PartitionKind::Member && (now.kind != want || differs);
            if ends {
                self.write_partition(Phase::ShrinkExclusive, path, &now, PartitionKind::Member);
            }
            if want != PartitionKind::Member && (ends || now.kind != want) {
                let old = PartitionState::valid(PartitionKind::Member);
                self.write_partition(Phase::SetPartition, path, &old, want);
            }
        }
        if let (Some(target), Some(exclusive)) = (&t.exclusive, &files.exclusive)
            && !waits
            && !(target.is_empty() && self.stays_partition(path, &now))
        {
            let keep = exclusive.intersection(target);
            self.write_exclusive(Phase::ShrinkExclusive, path, exclusive, keep.clone());
            self.write_exclusive(Phase::GrowExclusive, path, &keep, target.clone());
        }
        // The kernel reserves deadline bandwidth for a partition on its `cpuset.cpus` and may refuse to shrink it
        // (EBUSY): the list waits until the partition has ended, and its last CPUs are its tasks' until then. Unless it
        // reaches over somebody else's: as a member it would break those.
        let ending = now.is_partition()
            && t.partition == Some(PartitionKind::Member)
            && !self.stays_partition(path, &now)
            && files.cpus.is_disjoint(&self.held_by_others(path));
        if !ending {
            self.pool_cpus(path, t, files);
        }
    }

    /// Grows early what may grow, and shrinks late what must shrink.
    pub(super) fn pool_cpus(&mut self, path: &CgroupPath, t: &Target, files: &CpusetObserved) {
        let Some(target) = &t.cpus else { return };
        let now = &files.cpus;
        if target == now {
            return;
        }
        if target.is_empty() {
            return self.write_cpus(Phase::GrowPool, path, now, target.clone());
        }
        // What somebody has is not listed here even for a moment: a partition would be lost, and whoever inherits from
        // here would be let in. What is to be let go comes with the next plan.
        let held = self.held_by_others(path);
        let free = |set: &CpuSet| Some(set.difference(&held)).filter(|s| !s.is_empty());
        let grown = if now.is_empty() { None } else { free(&now.union(target)) };
        let grown = grown.unwrap_or_else(|| now.clone());
        self.write_cpus(Phase::GrowPool, path, now, grown.clone());
        if (!grown.is_subset(target) || grown.is_empty())
            && let Some(rest) = free(target).or_else(|| free(&self.desired.pool))
        {
            self.write_cpus(Phase::ShrinkPool, path, &grown, rest);
        }
    }

    fn enter(&mut self) {
        let desired = self.desired;
        for (path, pid) in &desired.entering {
            if self.skip(path) || desired.blocked.contains(path) || !desired.owners.contains_key(path) {
                continue;
            }
            self.push(Phase::Enter, Step::Enter { path: path.clone(), pid: *pid });
        }
    }

    fn settle(&mut self, targets: &std::collections::BTreeMap<CgroupPath, Target>, stale: Vec<CgroupPath>) {
        self.plan.settled = stale;
        for (path, first) in &self.desired.first {
            let Some(files) =
                self.observed.cgroups.get(path).filter(|c| c.id == first.id).and_then(|c| c.cpuset.as_ref())
            else {
                continue;
            };
            let pending = self.plan.steps.iter().any(|s| s.step.path() == path);
            let needed = targets.get(path).is_some_and(|t| !t.governed.is_empty());
            let back = first.files.iter().all(|(file, text)| match file {
                CpusetFile::Cpus => text.parse::<CpuSet>().is_ok_and(|s| s == files.cpus),
                CpusetFile::Exclusive => text.parse::<CpuSet>().ok() == files.exclusive,
                CpusetFile::Mems => text.parse::<NodeSet>().is_ok_and(|s| s == files.mems),
                CpusetFile::Partition => {
                    files.partition.as_ref().is_some_and(|p| p.kind.to_string() == *text)
                }
            });
            if back && !pending && !needed {
                self.plan.settled.push(path.clone());
            }
        }
    }
}

/// What the kernel gives a cgroup, with what partitions that were made of its own children took from it. That is by what
/// they were granted: one that came back with its parent can have the parent's effective set (6.12, 6.18, 7.2), which is
/// its maker's affair.
pub(crate) fn own_set(observed: &Observed, path: &CgroupPath, files: &CpusetObserved) -> CpuSet {
    let inside = observed.children(path).filter_map(|(_, c)| c.cpuset.as_ref()).filter(|s| s.is_partition());
    let took =
        |s: &CpusetObserved| s.exclusive_effective.as_ref().unwrap_or(&s.cpus).intersection(&observed.online);
    inside.fold(files.effective.clone(), |all, s| all.union(&took(s)))
}

/// Those of `cpus` that the root has not: a partition that lists others holds nothing of them (see `widened`).
pub(super) fn lost_to(observed: &Observed, cpus: &CpuSet) -> CpuSet {
    let root = observed.cpuset(&CgroupPath::root());
    root.map_or_else(|| cpus.clone(), |r| cpus.difference(&r.effective))
}

/// Cgroups, the root and the ancestors included, whose tasks may run on some of `cpus` though they belong to the
/// partition `path`; those below `path` are its own.
pub(crate) fn overlapping(
    observed: &Observed,
    path: &CgroupPath,
    cpus: &CpuSet,
) -> Vec<(CgroupPath, CpuSet)> {
    observed
        .cgroups
        .iter()
        .filter(|(p, _)| !p.is_within(path))
        .filter_map(|(p, c)| {
            let over = c.cpuset.as_ref()?.effective.intersection(cpus);
            (!over.is_empty()).then(|| (p.clone(), over))
        })
        .collect()
}
