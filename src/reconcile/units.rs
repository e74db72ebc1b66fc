//! Declared systemd units: CPUs that are a unit's whether it runs or not.
//!
//! Problem: a unit's cgroup comes with its start and goes with its stop, nobody announces either, and its main process runs
//! within a millisecond. So its CPUs are its own from the declaration on, systemd is told them before the unit starts (its
//! cgroup is born with them), and whatever reading shows the cgroup takes it for the owner's.
//!
//! ```text
//!             expect               its cgroup is there
//!   nothing ─────────► promised ◄───────────────────────► in its cgroup
//!      ▲                   │        it was removed             │
//!      └───────────────────┴──── release; not declared any more (promised) or gone (in its cgroup)
//! ```
//!
//! Invariant: as long as it is promised, the place where its cgroup will be is read and watched with all above it.

use super::{AdmitError, Answer, Effect, MAX_LEVEL, Pending, State, Ticket, step::Turn};
use crate::{
    assignments::{Promise, ReserveError},
    cgroup::CgroupPath,
    checkpoint::Extra,
    cpuset::CpuSet,
    owner::Owner,
    placement::Within,
    request::Request,
};
use std::collections::{BTreeMap, BTreeSet};

pub(super) const UNDECLARED: &str = "its unit is not declared any more";

impl Turn<'_> {
    pub(super) fn expect(
        &mut self,
        ticket: Ticket,
        request: &Request,
        exactly: Option<CpuSet>,
        home: CgroupPath,
    ) {
        let owner = &request.owner;
        let fresh = match self.promise_unit(request, exactly, &home) {
            Ok(fresh) => fresh,
            Err(error) => return self.out.push(Effect::Reply(ticket, Answer::Refused(error))),
        };
        let moved = self.s.homes.insert(owner.clone(), home.clone()) != Some(home);
        let cpus = self.s.assignments.cpus_of(owner).cloned().unwrap_or_default();
        let answer = Answer::Pod(vec![(owner.clone(), cpus)]);
        if !fresh && !moved {
            return self.out.push(Effect::Reply(ticket, answer));
        }
        let new = fresh.then(|| owner.clone()).into_iter().collect();
        self.s.pending =
            Some(Pending::Promising { answers: vec![(ticket, answer)], fresh: new, dropped: Vec::new() });
        self.afresh();
        if fresh {
            self.s.teardown = false;
            self.save();
        } else {
            self.look();
        }
    }

    /// True when it had no CPUs before.
    fn promise_unit(
        &mut self,
        request: &Request,
        exactly: Option<CpuSet>,
        home: &CgroupPath,
    ) -> Result<bool, AdmitError> {
        let owner = &request.owner;
        let slice = &self.s.settings.slice;
        if self.s.settings.audit {
            return Err(AdmitError::Audit);
        }
        if home.is_within(slice) || slice.is_within(home) {
            return Err(AdmitError::OwnSlice { path: home.clone(), slice: slice.clone() });
        }
        if home.level() > MAX_LEVEL {
            return Err(AdmitError::TooDeep { path: home.clone() });
        }
        if let Some(held) = self.s.assignments.cpus_of(owner) {
            // Where the machine has changed, what it was admitted with counts too.
            let first = self.s.assignments.original_of(owner);
            let as_asked = |set: &CpuSet| match &exactly {
                Some(exactly) => set == exactly,
                None => set.len() == request.cpus as usize,
            };
            if as_asked(held) || first.is_some_and(as_asked) {
                return Ok(false);
            }
            return Err(ReserveError::Differs { owner: owner.clone(), held: held.clone() }.into());
        }
        let (isolation, mode) = self.s.resolve(owner, request.isolation, false)?;
        let (cpus, reason, memory) = match exactly {
            Some(cpus) => {
                let strange = cpus.difference(self.s.topology.present().unwrap_or(&self.s.online));
                if !strange.is_empty() {
                    return Err(AdmitError::NoSuchCpus { owner: owner.clone(), cpus: strange });
                }
                (cpus, "declared in the configuration".to_owned(), BTreeMap::new())
            }
            None => self.place(request, Some(home), &Within::Anywhere)?,
        };
        let generation = self.next_generation();
        let promise = Promise {
            cpus,
            mode,
            isolation,
            generation,
            reason,
            made: false,
            memory,
            original: None,
            extra: Extra::new(),
        };
        let online = self.s.ours();
        self.s.assignments.promise(owner, promise, &online)?;
        Ok(true)
    }

    /// Units whose cgroup was read live there from now on.
    pub(super) fn arrived(&mut self) {
        if self.s.settings.audit {
            return;
        }
        let there = |path: &CgroupPath| self.s.observed.cgroups.contains_key(path);
        let came: Vec<_> = self.s.awaited().filter(|(_, path)| there(path)).collect();
        let came: Vec<(Owner, CgroupPath)> = came.into_iter().map(|(o, p)| (o.clone(), p.clone())).collect();
        for (owner, path) in came {
            if !self.house(&owner, &path) {
                // Another owner lives there. That is told, and tried again when the unit is declared again.
                self.s.homes.remove(&owner);
            }
        }
    }
}

impl State {
    /// Units that are promised CPUs, and where their cgroups will be.
    fn awaited(&self) -> impl Iterator<Item = (&Owner, &CgroupPath)> {
        let promised = self.assignments.promised.keys().filter(|o| self.settings.units.contains(o));
        promised.filter_map(|o| Some((o, self.homes.get(o)?)))
    }

    pub(super) fn expected(&self) -> BTreeSet<CgroupPath> {
        self.awaited().map(|(_, path)| path.clone()).collect()
    }

    /// Cgroups of declared units.
    pub(super) fn units(&self) -> BTreeSet<CgroupPath> {
        let housed = self.assignments.owners.iter().filter(|(o, _)| self.settings.units.contains(o));
        housed.map(|(_, a)| a.cgroup.clone()).collect()
    }

    /// Units that are promised CPUs, where their cgroups will be, and the CPUs: what systemd is to be told.
    pub fn promised_units(&self) -> impl Iterator<Item = (&Owner, &CgroupPath, &CpuSet)> {
        self.awaited().filter_map(|(o, path)| Some((o, path, self.assignments.cpus_of(o)?)))
    }

    /// Where a declared unit is known to live.
    #[must_use]
    pub fn home_of(&self, owner: &Owner) -> Option<&CgroupPath> {
        self.homes.get(owner)
    }

    /// Units that were promised CPUs by a configuration which declared them.
    pub(super) fn undeclared(&self) -> Vec<Owner> {
        let promised = self.assignments.promised.keys();
        let unit = |o: &&Owner| matches!(o, Owner::Unit(_)) && !self.settings.units.contains(*o);
        if self.settings.audit { Vec::new() } else { promised.filter(unit).cloned().collect() }
    }
}
