//! What an event would come to, with nothing changed.
//!
//! Problem: before a host is changed its operator wants to see the writes, in their order. The reconciler alone knows them,
//! and it plans one phase at a time from what it has just read.
//! Steps: it runs on a copy of the state. What it reads is what the kernel shows now, with every step so far taken to have
//! been done; what it would apply is kept; what it would save, watch or collect is answered as if it had gone well.
//! Derived files follow by the plain rules of a kernel that takes every step, and only where the steps change what these
//! rules give: whatever is odd in the real reading stays as it was read.
//! Invariants: the state that was copied stays as it is, and the kernel is only read.
//! A kernel that refuses a step, or makes something else of it, is answered with another plan, which nobody can foresee.

use crate::{
    cgroup::CgroupPath,
    cpuset::CpuSet,
    nodeset::NodeSet,
    observed::{CpusetObserved, KernelError, Observed, Scope},
    plan::{Planned, check},
    reconcile::{Answer, Effect, Event, Finding, FindingKind, State, Ticket, step},
    sweep::TaskSweep,
    topology::CpuTopology,
    verdict::{Evidence, Instant},
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// What a rehearsal reads: the kernel and the machine, as they are.
pub trait Scenery {
    /// As [`crate::observed::Kernel::observe`].
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError>;

    /// The machine, or why it cannot be read.
    fn machine(&mut self) -> Result<Box<CpuTopology>, String>;
}

/// A life of the state in which nothing real happens.
#[derive(Debug)]
pub struct Rehearsal {
    /// As it would be.
    pub state: State,
    /// Would have been applied so far, in order.
    pub steps: Vec<Planned>,
    /// Would have been told.
    pub findings: Vec<Finding>,
    answers: BTreeMap<Ticket, Answer>,
}

impl Rehearsal {
    /// From `state` on.
    #[must_use]
    pub fn new(state: State) -> Self {
        Self { state, steps: Vec::new(), findings: Vec::new(), answers: BTreeMap::new() }
    }

    /// Takes an event to its end, at `now`.
    pub fn drive(&mut self, scenery: &mut impl Scenery, event: Event, now: Instant) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for effect in step(&mut self.state, event, now) {
                events.extend(self.play(scenery, effect, now));
            }
        }
    }

    /// The answer to a ticket; each is given once.
    pub fn answer(&mut self, ticket: Ticket) -> Option<Answer> {
        self.answers.remove(&ticket)
    }

    fn play(&mut self, scenery: &mut impl Scenery, effect: Effect, now: Instant) -> Option<Event> {
        /// Of evidence nobody asks in a rehearsal.
        const NONE: &str = "no evidence is collected in a rehearsal";
        Some(match effect {
            Effect::Persist(_) => Event::Persisted(Ok(())),
            Effect::Observe(scope) => Event::Observed(scenery.observe(&scope).map(|real| self.after(real))),
            Effect::ReadMachine => Event::Machine(scenery.machine()),
            Effect::Apply(steps) => {
                self.steps.extend(steps.iter().cloned());
                Event::Applied(steps.into_iter().map(|s| (s, Ok(()))).collect())
            }
            Effect::Configure(_) => {
                Event::Configured(Ok(Arc::new(Evidence { at: now, ..Evidence::default() })))
            }
            Effect::SweepTasks(_) => Event::Swept(TaskSweep::default()),
            Effect::Locate(_) => Event::Located { found: BTreeMap::new(), own: None },
            Effect::Collect => Event::Collected(Err(NONE.into())),
            Effect::Reply(ticket, answer) => {
                self.answers.insert(ticket, answer);
                return None;
            }
            Effect::Report(finding) => {
                if !matches!(&finding.kind, FindingKind::Probe(why) if why == NONE) {
                    self.findings.push(*finding);
                }
                return None;
            }
            Effect::Pause(_) | Effect::Confine(_) | Effect::Watch(_) => return None,
        })
    }

    /// What would be read if the steps so far had been done.
    fn after(&self, real: Observed) -> Observed {
        if self.steps.is_empty() {
            return real;
        }
        let mut model = real.clone();
        for Planned { step, .. } in &self.steps {
            check::apply(&mut model, step);
        }
        // Files of a copied tree are what was written into them.
        if !model.copied {
            follow(&mut model, &real);
        }
        model
    }
}

/// The derived sets of one cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Derived {
    effective: CpuSet,
    exclusive: Option<CpuSet>,
    mems: NodeSet,
}

fn follow(model: &mut Observed, real: &Observed) {
    let (before, after) = (derive(real, real), derive(model, real));
    for (path, cgroup) in &mut model.cgroups {
        let Some(files) = cgroup.cpuset.as_mut() else { continue };
        let Some(now) = after.get(path).filter(|now| before.get(path) != Some(now)) else { continue };
        files.effective.clone_from(&now.effective);
        files.exclusive_effective.clone_from(&now.exclusive);
        files.mems_effective.clone_from(&now.mems);
    }
}

/// By the plain rules: a partition has what it claims, less what partitions below it took; anybody else has of its list what
/// the cgroup above has, or all of that. What the root lacks in `real` for no reason that was read, it lacks here too.
fn derive(observed: &Observed, real: &Observed) -> BTreeMap<CgroupPath, Derived> {
    let root = CgroupPath::root();
    let mut all: BTreeMap<CgroupPath, Derived> = BTreeMap::new();
    // Parents come before their children: their paths are prefixes.
    for (path, cgroup) in &observed.cgroups {
        let Some(files) = &cgroup.cpuset else { continue };
        let below = taken(observed, path);
        let above = path.ancestors().into_iter().rev().find_map(|up| all.get(&up).cloned());
        let (own, mems) = match above {
            None => {
                let given = real.cpuset(&root).map(|r| r.effective.union(&taken(real, &root)));
                (given.unwrap_or_else(|| observed.online.clone()), files.mems_effective.clone())
            }
            Some(up) => {
                let own = if files.is_partition() {
                    check::claimed(observed, path, files)
                } else {
                    within(&files.cpus, &up.effective)
                };
                let mems = files.mems.intersection(&up.mems);
                (own, if mems.is_empty() { up.mems } else { mems })
            }
        };
        let own = own.intersection(&observed.online);
        let exclusive = files.exclusive.as_ref();
        let exclusive = exclusive.map(|list| {
            if files.is_partition() { check::claimed(observed, path, files) } else { list.clone() }
        });
        all.insert(path.clone(), Derived { effective: own.difference(&below), exclusive, mems });
    }
    all
}

/// Of a list what is there, or everything where that is nothing.
fn within(list: &CpuSet, there: &CpuSet) -> CpuSet {
    let both = list.intersection(there);
    if both.is_empty() { there.clone() } else { both }
}

/// What the partitions below `path` took from it: those with no other partition between.
fn taken(observed: &Observed, path: &CgroupPath) -> CpuSet {
    let is_partition = |p: &CgroupPath| observed.cpuset(p).is_some_and(CpusetObserved::is_partition);
    let mut all = CpuSet::new();
    for (p, c) in &observed.cgroups {
        let Some(files) = c.cpuset.as_ref().filter(|f| p != path && p.is_within(path) && f.is_partition())
        else {
            continue;
        };
        let between =
            p.ancestors().into_iter().any(|up| up != *path && up.is_within(path) && is_partition(&up));
        if !between {
            all |= &check::claimed(observed, p, files);
        }
    }
    all
}
