//! Writes of others: remembered until a reading shows what came of them, and tied to findings by [`super::causes`].

use super::{
    Cause, Effect, FindingKind, ForeignWrite, Interest, Sight, State, Writer,
    causes::{Change, Settled, kernels_own},
    converge::{same_cgroup, text_of},
    step::Turn,
};
use crate::{
    assignments::Assignment,
    cgroup::{CgroupFile, CgroupPath, CpusetFile},
    cpuset::CpuSet,
    explain::explain,
    observed::Observed,
    owner::Owner,
    sweep::{SetFault, SetFinding},
};

/// One finding about a process that brings others into an owner's cgroup is enough for this time.
const JOINED_NS: u64 = 1_000_000_000;

impl State {
    /// Which writes to the files of a cgroup matter, beside those to its own cpuset files. Cpuset files are written from
    /// the root down to each owner's, and in what lies beside that way; a cgroup can be made there and written before
    /// anybody has seen it. Who brings tasks is of interest where nobody but truepin should: in the cgroups that it made.
    #[must_use]
    pub fn interest(&self, path: &CgroupPath) -> Interest {
        let owners = self.assignments.owners.values();
        let of = |f: &dyn Fn(&Assignment) -> bool| owners.clone().any(f);
        Interest {
            tasks: of(&|a| a.created && path.is_within(&a.cgroup)),
            children: of(&|a| a.cgroup.is_within(path)),
        }
    }
}

impl Turn<'_> {
    /// What was told beside a reading.
    pub(super) fn wrote(&mut self, writes: Vec<ForeignWrite>, sight: Sight, lost: u64) {
        self.s.causes.sees(sight, lost);
        for write in writes {
            self.written(write);
        }
    }

    pub(super) fn written(&mut self, write: ForeignWrite) {
        let (path, file) = (write.path, write.file);
        let Some(writer) = write.writer else {
            if let Some(CgroupFile::Cpuset(file)) = file {
                self.s.fights.touched(&(path, file), self.now.mono_ns);
            }
            return;
        };
        let Some(file) = file else { return };
        if matches!(file, CgroupFile::Procs | CgroupFile::Threads) {
            return self.joined(&path, file, writer);
        }
        let named = self.s.causes.wrote(&path, file, writer);
        // The write of a change that was found without its writer is no further change.
        let late = named.iter().any(|n| matches!(n.cause, Cause::Wrote(_)));
        self.name(named);
        if let (CgroupFile::Cpuset(file), false) = (file, late) {
            self.s.fights.touched(&(path, file), self.now.mono_ns);
        }
    }

    /// Somebody put a task into a cgroup.
    fn joined(&mut self, path: &CgroupPath, file: CgroupFile, writer: Writer) {
        let mut owners = self.s.assignments.owners.iter();
        let Some((owner, a)) = owners.find(|(_, a)| a.created && path.is_within(&a.cgroup)) else { return };
        // What an owner's tasks do below their cgroup is their own business.
        if writer.cgroup.as_ref().is_some_and(|c| c.is_within(&a.cgroup)) {
            return;
        }
        let owner = owner.clone();
        let now = self.now.mono_ns;
        let again = self.s.findings.iter().rev().any(|f| {
            matches!(&f.kind, FindingKind::Joined { owner: o, .. } if *o == owner)
                && f.cause.as_ref().and_then(Cause::writer).is_some_and(|w| w.pid == writer.pid)
                && now.saturating_sub(f.at.mono_ns) < JOINED_NS
        });
        if again {
            return;
        }
        let what = if file == CgroupFile::Threads { "thread" } else { "process" };
        let who = match writer.wrote.as_deref() {
            // It moved itself.
            Some("0") => format!("{what} {}", writer.pid),
            Some(id) => format!("{what} {id}"),
            None => format!("a {what}"),
        };
        let kind = FindingKind::Joined { owner, path: path.clone(), who };
        self.report_by(kind, Some(Cause::Wrote(writer)));
    }

    /// A change that the reading shows, for [`super::causes`]. `was` is what the file read; `before` is the reading of
    /// when kernel and table agreed, without which it was truepin that wrote `was` a moment ago.
    pub(super) fn change(
        &self,
        path: &CgroupPath,
        file: CpusetFile,
        was: &str,
        before: Option<&Observed>,
    ) -> Change {
        self.change_at(path, file, was, before, self.at_stake(path))
    }

    fn change_at(
        &self,
        path: &CgroupPath,
        file: CpusetFile,
        was: &str,
        before: Option<&Observed>,
        cpus: CpuSet,
    ) -> Change {
        let now = &self.s.observed;
        let files = now.cpuset(path);
        let state = files.and_then(|c| c.partition.as_ref()).filter(|_| file == CpusetFile::Partition);
        Change {
            path: path.clone(),
            file,
            gone: files.is_none(),
            // While truepin converges, what is watched may lag behind.
            kernel: before.and(state).and_then(|state| kernels_own(was, state, &cpus, &now.online)),
            offline: !cpus.is_empty() && cpus.is_disjoint(&now.online),
            cpus,
            unwatched: before.is_some_and(|b| now.cgroups.keys().any(|p| !b.cgroups.contains_key(p))),
        }
    }

    /// The change that a fault of an owner's sets comes from, if it is one of the owner's own partition or files.
    pub(super) fn change_behind(&self, found: &SetFinding, before: &Observed) -> Option<Change> {
        if !matches!(found.fault, SetFault::PartitionLost { .. } | SetFault::NoFiles { .. }) {
            return None;
        }
        let path = self.s.assignments.owners.get(&found.owner).map(|a| a.cgroup.clone())?;
        let file = CpusetFile::Partition;
        let was = text_of(before, &path, file);
        (same_cgroup(before, &self.s.observed, &path) && was != text_of(&self.s.observed, &path, file))
            .then(|| self.change(&path, file, &was, Some(before)))
    }

    /// Owners' partitions that ended since kernel and table agreed, while CPUs go and come. It is no fault of the sets then:
    /// whoever has lost a CPU has a gap for it. Who or what ended them is told all the same.
    pub(super) fn ended(&mut self, before: &Observed) {
        if self.s.hotplug.is_calm() {
            return;
        }
        let (file, now, admitting) = (CpusetFile::Partition, &self.s.observed, self.admitting());
        let mut ended = Vec::new();
        for (owner, a) in self.s.assignments.owners.iter().filter(|(o, _)| Some(*o) != admitting.as_ref()) {
            let path = &a.cgroup;
            let Some(was) = before.cpuset(path).filter(|f| f.is_partition()) else { continue };
            let state = now.cpuset(path).and_then(|f| f.partition.as_ref()).filter(|s| s.invalid.is_some());
            let Some(state) = state.filter(|_| same_cgroup(before, now, path)) else { continue };
            // It may have been given others by now.
            let cpus = was.exclusive.clone().filter(|e| !e.is_empty()).unwrap_or_else(|| was.cpus.clone());
            let fault = SetFault::PartitionLost { state: state.to_string(), why: explain(now, path, &cpus) };
            let change = self.change_at(path, file, &text_of(before, path, file), Some(before), cpus);
            ended.push((SetFinding { owner: owner.clone(), fault }, change));
        }
        for (found, change) in ended {
            self.report_change(FindingKind::Set(found), change);
        }
    }

    /// The CPUs of the partition at `path`.
    fn at_stake(&self, path: &CgroupPath) -> CpuSet {
        let files = || {
            let c = self.s.observed.cpuset(path)?;
            Some(c.exclusive.as_ref().unwrap_or(&c.cpus).union(&c.cpus))
        };
        let owned = self.s.assignments.owner_of(path).map(|(_, a): (&Owner, &Assignment)| a.cpus.clone());
        owned.or_else(files).unwrap_or_default()
    }

    /// Reports a change with whoever made it; where that cannot be told yet, it is told when it can.
    pub(super) fn report_change(&mut self, kind: FindingKind, change: Change) -> (u64, Cause) {
        let now = self.now.mono_ns;
        let cause = self.s.causes.of(&change, now);
        let id = self.report_by(kind, Some(cause.clone()));
        if cause == Cause::Unknown {
            self.s.causes.await_name(id, change, now);
        }
        (id, cause)
    }

    /// Findings whose writer has not come in time are the kernel's doing, where that can be said.
    pub(super) fn settle_names(&mut self) {
        let settled = self.s.causes.expire(self.now.mono_ns);
        self.name(settled);
    }

    /// What was found without a name has one now.
    fn name(&mut self, settled: Vec<Settled>) {
        for Settled { finding, key, cause } in settled {
            let Some(f) = self.s.findings.iter_mut().find(|f| f.id == finding) else { continue };
            let drift = matches!(f.kind, FindingKind::Drift { .. });
            f.cause = Some(cause.clone());
            self.out.push(Effect::Report(Box::new(f.clone())));
            let over = drift
                && match cause.writer() {
                    Some(writer) => self.s.fights.named(&key, &writer.into()),
                    None => self.s.fights.pardoned(&key),
                };
            if over {
                let (path, file) = key;
                self.report(FindingKind::FightOver { path, file });
            }
        }
    }
}
