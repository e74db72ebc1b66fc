//! What is asked of the table.

use super::{AdmitError, Answer, Effect, Home, MAX_LEVEL, Pending, Progress, Runtime, Ticket, step::Turn};
use crate::{
    assignments::{Assignment, Mode, ReserveError, Reserved},
    cgroup::CgroupPath,
    checkpoint::Extra,
    cpuset::CpuSet,
    nodeset::NodeId,
    owner::Owner,
    placement::{Chooser, Refusal, Room, Within},
    plan,
    request::{Isolation, Request},
    topology::CpuTopology,
    units,
    verdict::Evidence,
};
use std::collections::BTreeMap;

impl Turn<'_> {
    pub(super) fn admit(
        &mut self,
        ticket: Ticket,
        request: &Request,
        exactly: Option<CpuSet>,
        home: &Home,
        pid: Option<u32>,
    ) {
        // Truepin's own cgroups are one command's each: a second one would share the CPUs with the first.
        let taken = pid.is_some() && home.is_own() && self.s.assignments.owners.contains_key(&request.owner);
        let admitted = if taken {
            Err(AdmitError::InUse { owner: request.owner.clone() })
        } else {
            self.try_admit(request, exactly, home)
        };
        match admitted {
            Ok((cgroup, reserved)) => {
                let owner = request.owner.clone();
                let turned = reserved == Reserved::Unchanged && !self.s.settings.audit;
                let before = turned.then(|| self.turn(&owner, request.isolation)).flatten();
                let fresh = Runtime { seen: !home.is_own() && !self.s.settings.audit, ..Runtime::default() };
                self.s.runtime.entry(owner.clone()).or_insert(fresh);
                self.s.fights.forget(&cgroup);
                self.s.mends.forget(&cgroup);
                self.s.entering.extend(pid.map(|pid| (cgroup, pid)));
                let fresh = reserved == Reserved::New;
                if fresh {
                    // What an owner of the same name came to is not this one's.
                    self.s.concluded.retain(|(o, _)| *o != owner);
                }
                self.s.pending = Some(Pending::Admission { ticket, owner, fresh, before });
                self.afresh();
                self.s.teardown &= !fresh;
                self.look();
            }
            Err(error) => self.out.push(Effect::Reply(ticket, Answer::Refused(error))),
        }
    }

    pub(super) fn try_admit(
        &mut self,
        request: &Request,
        exactly: Option<CpuSet>,
        home: &Home,
    ) -> Result<(CgroupPath, Reserved), AdmitError> {
        let audit = self.s.settings.audit;
        if audit && exactly.is_none() {
            return Err(AdmitError::Audit);
        }
        let cgroup = match home {
            Home::New => self.s.settings.slice.child(&dir_name(&request.owner))?,
            // Names of units are one host's, so they begin with ours.
            Home::Scope => {
                let name = format!("{}{}.scope", units::OWN, dir_name(&request.owner));
                self.s.settings.slice.child(&name)?
            }
            Home::Existing(path) => path.clone(),
        };
        let slice = &self.s.settings.slice;
        if !home.is_own() && (cgroup.is_within(slice) || slice.is_within(&cgroup)) {
            return Err(AdmitError::OwnSlice { path: cgroup, slice: slice.clone() });
        }
        if let Some(set) = &exactly {
            let cpus = set.difference(self.s.topology.present().unwrap_or(&self.s.online));
            if !cpus.is_empty() {
                return Err(AdmitError::NoSuchCpus { owner: request.owner.clone(), cpus });
            }
        }
        if cgroup.level() > MAX_LEVEL {
            return Err(AdmitError::TooDeep { path: cgroup });
        }
        if let Some(held) = self.s.assignments.owners.get(&request.owner) {
            let fits = exactly.as_ref().map_or(held.cpus.len() == request.cpus as usize, |e| *e == held.cpus);
            let memory = exactly.is_some() || held.memory.values().sum::<u64>() == request.memory;
            let as_asked = audit
                || matches!(request.isolation, Isolation::Auto)
                || request.isolation == held.isolation
                || held.mode == Mode::Partition && request.isolation != Isolation::Member;
            if held.cgroup == cgroup && fits && memory && as_asked {
                return Ok((cgroup, Reserved::Unchanged));
            }
            if !audit {
                let (owner, held) = (request.owner.clone(), held.cpus.clone());
                return Err(ReserveError::Differs { owner, held }.into());
            }
        }
        let (isolation, mode) = if audit {
            (request.isolation, Mode::Audit)
        } else {
            self.s.resolve(&request.owner, request.isolation, home.is_own())?
        };
        // Other managers' partitions are neither free nor pool.
        let foreign = plan::foreign(&self.s.desired(), &self.s.observed, Some(&cgroup));
        let (cpus, reason, memory) = if let Some(cpus) = exactly {
            (cpus, "declared in the configuration".to_owned(), BTreeMap::new())
        } else {
            self.place(request, Some(&cgroup), &Within::Anywhere)?
        };
        let created = home.is_own();
        let generation = self.next_generation();
        let assignment = Assignment {
            cpus,
            original: None,
            cgroup: cgroup.clone(),
            created,
            mode,
            isolation,
            generation,
            reason,
            memory,
            extra: Extra::new(),
        };
        // Declared CPUs of an audited owner are another allocator's choice: ours to check, not to refuse.
        let reserved = if audit {
            self.s.assignments.owners.insert(request.owner.clone(), assignment);
            Reserved::New
        } else {
            let online = self.s.online.difference(&foreign);
            self.s.assignments.reserve(&request.owner, assignment, &online)?
        };
        Ok((cgroup, reserved))
    }

    /// A partition becomes one of the other kind: its CPUs and its tasks stay. Returns what it was, when it was something
    /// else.
    fn turn(&mut self, owner: &Owner, isolation: Isolation) -> Option<Box<(Assignment, Runtime)>> {
        let held = self.s.assignments.owners.get(owner)?.clone();
        if isolation == Isolation::Auto || isolation == held.isolation {
            return None;
        }
        let runtime = self.s.runtime.get(owner).cloned().unwrap_or_default();
        let generation = self.next_generation();
        let a = self.s.assignments.owners.get_mut(owner)?;
        a.isolation = isolation;
        if a.kind() != held.kind() {
            a.generation = generation;
            let at = self.now;
            let why =
                format!("it became {} within the interval: what ran until then is not judged", a.kind());
            if let Some(r) = self.s.runtime.get_mut(owner) {
                r.end(at, why);
            }
        }
        Some(Box::new((held, runtime)))
    }

    /// CPUs for `request`, and why these. `adopted`: the cgroup that is to be the owner's.
    pub(super) fn place(
        &self,
        request: &Request,
        adopted: Option<&CgroupPath>,
        within: &Within,
    ) -> Result<(CpuSet, String, BTreeMap<NodeId, u64>), AdmitError> {
        let placed = self
            .with_room(adopted, |chooser, topology, room| chooser.place(topology, room, request, within))?;
        Ok((placed.cpus, placed.reason.to_string(), placed.memory))
    }

    /// What the containers of a pod have in common.
    pub(super) fn together(&self, held: &CpuSet, requests: &[&Request]) -> Result<Within, AdmitError> {
        Ok(self.with_room(None, |chooser, topology, room| chooser.together(topology, room, held, requests))?)
    }

    fn with_room<T>(
        &self,
        adopted: Option<&CgroupPath>,
        choose: impl FnOnce(&Chooser, &CpuTopology, Room<'_>) -> Result<T, Box<Refusal>>,
    ) -> Result<T, Box<Refusal>> {
        let table = &self.s.assignments;
        let foreign = plan::foreign(&self.s.desired(), &self.s.observed, adopted);
        // CPUs isolated at boot belong to no scheduler domain: nothing would balance the owner's threads over them, and
        // the kernel refuses a partition that has them (`prstate_housekeeping_conflict`, cpuset.c of 6.12).
        let nothing = CpuSet::new();
        let isolated = self.s.topology.isolated().unwrap_or(&nothing);
        let allocatable = table.allocatable(&self.s.online).difference(isolated);
        let free = table.free(&self.s.online).difference(&foreign).difference(isolated);
        let claimed = table.claimed_memory();
        let room = Room { allocatable: &allocatable, free: &free, claimed: &claimed };
        choose(&self.s.chooser, &self.s.topology, room)
    }

    pub(super) fn release(&mut self, ticket: Ticket, owner: Option<Owner>) {
        if self.s.settings.audit {
            return self.out.push(Effect::Reply(ticket, Answer::Refused(AdmitError::Audit)));
        }
        let all = owner.is_none();
        let held = |o: &Owner| self.s.assignments.cpus_of(o).is_some();
        let owners: Vec<Owner> = match owner {
            Some(o) => Some(o).into_iter().filter(held).collect(),
            None => self.s.assignments.sets().map(|(o, _)| o.clone()).collect(),
        };
        if owners.is_empty() && !all {
            return self.out.push(Effect::Reply(ticket, Answer::Released(Vec::new())));
        }
        self.s.pending = Some(Pending::Concluding { ticket: Some(ticket), owners, parting: Vec::new(), all });
        self.afresh();
        self.look();
    }

    /// Somebody asks: what was given up is tried again.
    pub(super) fn afresh(&mut self) {
        self.s.progress = Progress::default();
        self.s.held_off.clear();
        self.s.blocked.clear();
    }

    /// Takes the owners out of the table, with their last verdicts.
    pub(super) fn conclude(
        &mut self,
        ticket: Option<Ticket>,
        owners: Vec<Owner>,
        parting: Vec<Owner>,
        all: bool,
        evidence: Option<&Evidence>,
    ) {
        let mut verdicts = Vec::new();
        // Of a container that ended while nobody watched there is nothing to judge.
        let watched = |o: &&Owner| self.s.runtime.get(*o).is_some_and(|r| r.base.is_some());
        let judged: Vec<Owner> = owners.iter().chain(parting.iter().filter(watched)).cloned().collect();
        for owner in &judged {
            let housed = self.s.assignments.owners.contains_key(owner);
            let verdict = evidence.filter(|_| housed).and_then(|e| self.s.verdict(owner, None, e));
            verdicts.push((owner.clone(), verdict));
        }
        let mut removed = self.unhouse(parting, &verdicts);
        for owner in owners {
            if let Some(a) = self.s.assignments.release(&owner) {
                self.s.entering.retain(|(path, _)| *path != a.cgroup);
                self.s.fights.forget(&a.cgroup);
                self.s.mends.forget(&a.cgroup);
                removed.push((owner.clone(), a, self.s.runtime.remove(&owner).unwrap_or_default()));
            }
        }
        self.s.leaving.clear();
        self.s.teardown = all;
        self.s.pending = Some(Pending::Releasing { ticket, removed, verdicts });
        self.s.progress = Progress::default();
        self.save();
    }
}

/// A cgroup's name for an owner. Owners have no slash inside their parts, so the names are as distinct as the owners.
fn dir_name(owner: &Owner) -> String {
    match owner {
        Owner::Run(name) => format!("run-{name}"),
        Owner::Unit(name) => format!("unit-{name}"),
        Owner::Pod { uid, container } => format!("pod-{uid}:{container}"),
        Owner::Cgroup(path) => format!("cgroup-{}", path.as_str().replace('/', ":")),
    }
}
