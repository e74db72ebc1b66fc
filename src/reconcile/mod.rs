//! The only place that decides.
//!
//! Problem: requests, foreign writes, departures, vanished cgroups and crashes arrive in any order, and every answer
//! must keep the invariants. So one function turns an event and the state into effects, and nothing else decides.
//!
//! ```text
//!            Admit, Release, Inspect, Disturbed          Observed: steps left
//!   Idle ───────────────────────────────► Converging ◄───────────────────────────┐
//!    ▲                                     │  ▲ │ └─────────► Apply ──► Applied ──┘
//!    │                  table not durable  ▼  │ │
//!    │                                  Saving ┘ │
//!    └───────── settled: Configure, Reply ◄─────┘
//! ```
//!
//! - *Idle*: kernel and table agreed when last looked.
//! - *Converging*: the kernel is read; one phase is applied at a time, and what comes of it is observed. Before a step is
//!   applied the table that it rests on must be durable.
//! - *Saving*: a record is on its way to disk; nothing is written to the kernel.
//!
//! Effects are carried out in order, and an effect that has a result feeds it back as an event before the next outside
//! event is taken: [`State::is_idle`] says when that is.
//! Invariants: intent is durable before the first write (I5), and a table that could not be made durable is given up
//! for the last one that was; a refused or failed admission leaves nothing behind, and its answer comes when that is
//! true; a file in a fight is left alone (I8); a plan that the checker refuses is never applied.
//!
//! Nothing is tried for ever. A file that somebody changes while truepin works counts for I8 like any other; a step
//! that fails twice, and a partition that does not come about, are left alone for a minute ([`outcome`]); [`converge`] ends after a
//! number of phases that no plan has. So events that truepin itself causes cannot keep it busy.

mod answers;
mod causes;
mod converge;
mod departed;
mod fence;
mod fights;
mod findings;
mod hotplug;
mod mend;
mod messages;
mod outcome;
mod pods;
mod record;
mod requests;
mod runtime;
mod settle;
mod step;
mod units;
mod writes;

pub use findings::{Cause, Finding, FindingKind};
pub use mend::Mend;
pub use messages::{
    AdmitError, Answer, Effect, Event, ForeignWrite, Home, HotplugReport, Interest, Sight, Ticket, Writer,
};
pub use pods::{PodAdmission, Sighting};
pub use step::step;

use crate::{
    assignments::{Assignment, Assignments, FirstValues, Mode},
    cgroup::{CgroupId, CgroupPath, CpusetFile},
    checkpoint::{self, Checkpoint, Extra},
    containers::{ContainerId, ContainerMap},
    cpuset::CpuSet,
    ledger::{Departure, Watched},
    observed::Observed,
    owner::Owner,
    placement::{Chooser, Scope, Strategy},
    plan::{self, Desired, OnIntrusion, Problem, Role},
    request::Isolation,
    stale::Sources,
    sweep::SetFinding,
    topology::CpuTopology,
    units::UnitName,
    verdict::{Tolerance, Verdict},
};
use causes::Causes;
use fence::Fences;
use fights::Fights;
use hotplug::Hotplug;
use mend::Mends;
use runtime::{Ended, Runtime};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What configuration decides.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Watch only: nothing is ever written.
    pub audit: bool,
    /// Where truepin makes cgroups.
    pub slice: CgroupPath,
    /// For requests that do not say.
    pub isolation: Isolation,
    /// I8.
    pub repairs_per_minute: u32,
    /// How CPUs are chosen.
    pub strategy: Strategy,
    /// What is decided on together.
    pub scope: Scope,
    /// Who says which pods are active; none: the cgroup tree does.
    pub sources: BTreeSet<String>,
    /// Of cgroups.
    pub roles: BTreeMap<CgroupPath, Role>,
    /// What is done about intruders.
    pub on_intrusion: OnIntrusion,
    /// At these owners' cgroups instead; and ignored cgroups that may be fenced all the same.
    pub on_intrusion_at: BTreeMap<CgroupPath, OnIntrusion>,
    /// systemd units that keep their CPUs, whether they run or not.
    pub units: BTreeSet<Owner>,
    /// For unbound kernel threads, nanoseconds a second and CPU.
    pub kthread_budget_ns_per_s: u64,
    /// Of the cross-check.
    pub tolerance: Tolerance,
}

impl KernelFacts {
    /// Whether partitions exist, and only below other partitions.
    #[must_use]
    pub fn local_partitions(&self) -> bool {
        self.partition && !self.exclusive
    }
}

impl Settings {
    /// The mode of an owner that is not served yet.
    #[must_use]
    pub fn mode(&self) -> Mode {
        match (self.audit, self.isolation) {
            (true, _) => Mode::Audit,
            (false, Isolation::Member) => Mode::Member,
            (false, _) => Mode::Partition,
        }
    }
}

/// What this kernel was found to do. Probed, never looked up by version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts, each its own question to the kernel")]
pub struct KernelFacts {
    /// cpuset is on cgroup v2.
    pub cpuset: bool,
    /// `cpuset.cpus.exclusive` exists, so remote partitions do.
    pub exclusive: bool,
    /// `cpuset.cpus.partition` exists. Without `exclusive` partitions are local: a cgroup takes its CPUs from the one
    /// above, which has to be a partition itself.
    pub partition: bool,
    /// An empty `cpuset.cpus` on a populated cgroup was refused.
    pub empty_refused: bool,
    /// The eBPF programs are loaded.
    pub bpf: bool,
    /// The kernel's uevents are not heard: a CPU that went and came back between two looks leaves no trace.
    pub no_uevents: bool,
    /// Attempts to switch a CPU off or on are not heard: one that was refused leaves no trace but tasks' masks.
    pub no_attempts: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Work {
    #[default]
    Idle,
    Saving,
    Converging,
}

/// A question that waits for the end of the work.
#[derive(Debug, Clone)]
enum Pending {
    Admission {
        ticket: Ticket,
        owner: Owner,
        /// It was not in the table before: if this fails it goes again.
        fresh: bool,
        /// What it was before it became another kind of partition: if this fails it is that again.
        before: Option<Box<(Assignment, Runtime)>>,
    },
    /// The owner is out of the table again; answered when the kernel shows nothing of it any more.
    Refusing {
        ticket: Ticket,
        owner: Owner,
        error: Box<AdmitError>,
    },
    /// Evidence is collected before the owners go, for their last verdicts.
    Concluding {
        ticket: Option<Ticket>,
        owners: Vec<Owner>,
        /// Pods' owners whose container is gone: an epoch ends, the CPUs stay theirs.
        parting: Vec<Owner>,
        all: bool,
    },
    /// The owners are out of the table; kept until that is durable, to be put back if it cannot be.
    Releasing {
        ticket: Option<Ticket>,
        removed: Vec<(Owner, Assignment, Runtime)>,
        verdicts: Vec<(Owner, Option<Verdict>)>,
    },
    Inspection {
        ticket: Ticket,
    },
    /// Answers that are true once the table is durable.
    Promising {
        answers: Vec<(Ticket, Answer)>,
        /// Owners that are new with it: what earlier ones of their names came to is forgotten then.
        fresh: Vec<Owner>,
        /// Of owners that left the table with it.
        dropped: Vec<(Owner, Runtime)>,
    },
}

impl Pending {
    fn is_release(&mut self) -> bool {
        matches!(self, Self::Releasing { .. })
    }
}

/// Progress of one convergence.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// Phases applied.
    rounds: u32,
    /// Steps that failed, with how often.
    failed: BTreeMap<String, u32>,
    /// Partition states that were written, with how often.
    written: BTreeMap<CgroupPath, u32>,
    /// What was read when kernel and table agreed for the last time, at the begin of this convergence.
    agreed: Option<Observed>,
    /// What files hold by our last write, or held when they were last found changed: where something else is read, somebody
    /// writes at the same time. A partition's state that we wrote is `None`: what it reads is for the kernel to say.
    known: BTreeMap<(CgroupPath, CpusetFile), Option<String>>,
    /// Readings that were taken anew, because somebody wrote meanwhile.
    rereads: u32,
    /// CPUs have come to rest: everybody is fitted to what is online.
    rested: bool,
    /// The machine was read anew.
    machine_read: bool,
    /// Faults that count when they are still there, and whether the slice itself looked wrong.
    doubted: Option<(BTreeSet<SetFinding>, bool)>,
    /// Owners that were given other CPUs: the kernel does not know yet.
    moved: BTreeSet<Owner>,
    /// Partitions that were ended to be made again.
    rebuilt: BTreeSet<CgroupPath>,
    /// See [`Desired::narrow`].
    narrow: BTreeSet<CgroupPath>,
    /// See [`Desired::stuck`]; false once it was tried.
    stuck: BTreeMap<CgroupPath, bool>,
    /// How often a reading was waited for.
    waits: u32,
    /// All is done but the record, which lags behind in what no step depends on.
    settling: bool,
}

/// Everything that decisions depend on.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each was learnt or done independently of the others")]
pub struct State {
    /// From configuration.
    pub settings: Settings,
    /// The machine.
    pub topology: CpuTopology,
    /// What the kernel does.
    pub facts: KernelFacts,
    /// How CPUs are chosen on it.
    chooser: Chooser,
    /// The strategy's name.
    strategy: String,
    /// The table.
    pub assignments: Assignments,
    /// What others' files held.
    pub first: FirstValues,
    /// Whose containers are.
    pub containers: ContainerMap,
    /// Where an owner's newest container is, or a declared unit's cgroup is or will be.
    homes: BTreeMap<Owner, CgroupPath>,
    sources: Sources,
    /// Containers of which nobody knows whose they are, told once.
    unresolved: BTreeSet<ContainerId>,
    /// CPUs online now.
    pub online: CpuSet,
    /// What was last read.
    pub observed: Observed,
    boot_id: String,
    /// The record is of another boot.
    rebooted: bool,
    /// The record's sets were fitted to the machine as it is.
    fitted: bool,
    epoch: u64,
    /// The minor version of the record and its fields that only a newer truepin knows: they go back as they came.
    kept: (u32, Extra),
    /// Of `topology`.
    fingerprint: String,
    generation: u64,
    runtime: BTreeMap<Owner, Runtime>,
    /// Of pods' owners: epochs in earlier containers that are no part of a Held.
    past: BTreeMap<Owner, Vec<Ended>>,
    entering: Vec<(CgroupPath, u32)>,
    teardown: bool,
    work: Work,
    pending: Option<Pending>,
    progress: Progress,
    /// Whether kernel and table agreed after the last convergence; `observed` is then what they agreed on.
    settled: bool,
    /// What is durable, as far as that is known; `None` for no record.
    durable: Option<Box<Checkpoint>>,
    /// The table to go back to while `durable` is of before: as this boot and this machine let it be used.
    fallback: Option<Box<(Assignments, FirstValues)>>,
    /// The last save failed: its record may be durable all the same.
    doubtful: bool,
    /// Owners whose cgroups are gone; they leave the table when nothing is pending.
    leaving: BTreeMap<Owner, &'static str>,
    causes: Causes,
    fights: Fights,
    fences: Fences,
    /// Files on which a convergence gave up, and since when; left alone for a minute, because our own attempts cause
    /// events too.
    held_off: BTreeMap<(CgroupPath, CpusetFile), u64>,
    /// Cgroups that could not be made or removed; likewise.
    blocked: BTreeMap<CgroupPath, u64>,
    problems: BTreeSet<Problem>,
    /// Of the sets, at the last reading.
    wrong: Vec<SetFinding>,
    /// Those of them that were read twice and that no step ends, and whether the slice leaked likewise.
    lasting: (BTreeSet<SetFinding>, bool),
    /// The slice, a partition for those below it, has not its CPUs or not for itself.
    slice_leaks: bool,
    /// Of the last plan.
    governed: BTreeSet<CgroupPath>,
    /// Partitions are local, and cannot be had at present: see [`State::in_force`].
    demoted: bool,
    /// See [`step::Turn::unserved`].
    unserved: BTreeSet<Owner>,
    mends: Mends,
    hotplug: Hotplug,
    watched: Vec<Watched>,
    watching: Vec<(CgroupPath, CgroupId)>,
    confined: CpuSet,
    findings: VecDeque<Finding>,
    finding_count: u64,
    drifted: Vec<u64>,
    departures: VecDeque<Departure>,
    concluded: VecDeque<(Owner, Verdict)>,
}

/// The kernel half compares ancestors down to this depth (children of the root: 1).
pub const MAX_LEVEL: u32 = 31;

/// How many findings, departures and last verdicts are kept.
const KEPT: usize = 256;

impl State {
    /// The state of an agent that holds what `checkpoint` held; `Event::Started` begins its life.
    #[must_use]
    pub fn new(
        settings: Settings,
        topology: CpuTopology,
        facts: KernelFacts,
        boot_id: String,
        reserved: CpuSet,
        strict_reserved: bool,
        checkpoint: Option<Checkpoint>,
    ) -> Self {
        let durable = checkpoint.map(Box::new);
        let rebooted = durable.as_deref().is_some_and(|c| c.boot_id != boot_id);
        let record = durable.as_deref().map(|c| checkpoint::for_boot(c.clone(), &boot_id).0);
        let (mut assignments, first, containers, epoch, kept) = match record {
            Some(c) => {
                (c.assignments, c.first, c.containers, c.epoch, (c.minor.max(checkpoint::MINOR), c.extra))
            }
            None => (
                Assignments::default(),
                FirstValues::new(),
                ContainerMap::new(),
                0,
                (checkpoint::MINOR, Extra::new()),
            ),
        };
        let fingerprint = topology.fingerprint();
        assignments.reserved = reserved;
        assignments.strict_reserved = strict_reserved;
        let promised = assignments.promised.values().map(|p| p.generation);
        let generation = assignments.owners.values().map(|a| a.generation).chain(promised).max().unwrap_or(0);
        // What a record names existed; `entered`, because a command may have ended while nobody looked.
        let known = Runtime { seen: true, entered: true, ..Runtime::default() };
        let runtime = assignments.owners.keys().map(|o| (o.clone(), known.clone())).collect();
        // As the record has it: where an old container of an owner is still there too, this one has the CPUs.
        let follows = |o: &Owner| matches!(o, Owner::Pod { .. }) || settings.units.contains(o);
        let followed = assignments.owners.iter().filter(|(o, _)| follows(o));
        let homes = followed.map(|(o, a)| (o.clone(), a.cgroup.clone())).collect();
        let fallback = durable.is_some().then(|| Box::new((assignments.clone(), first.clone())));
        let online = topology.online().clone();
        let fights = Fights::new(settings.repairs_per_minute);
        let fences = Fences::new(settings.repairs_per_minute);
        let sources = Sources::new(&settings.sources);
        let chooser = Chooser::new(settings.strategy, settings.scope, &topology);
        let hotplug = Hotplug::new(&topology);
        Self {
            settings,
            topology,
            strategy: chooser.strategy().to_string(),
            chooser,
            facts,
            assignments,
            first,
            containers,
            homes,
            fitted: false,
            sources,
            unresolved: BTreeSet::new(),
            online,
            observed: Observed::default(),
            boot_id,
            rebooted,
            epoch,
            kept,
            fingerprint,
            generation,
            runtime,
            past: BTreeMap::new(),
            entering: Vec::new(),
            teardown: false,
            work: Work::Idle,
            pending: None,
            progress: Progress::default(),
            settled: false,
            fallback,
            durable,
            doubtful: false,
            leaving: BTreeMap::new(),
            causes: Causes::default(),
            fights,
            fences,
            held_off: BTreeMap::new(),
            blocked: BTreeMap::new(),
            problems: BTreeSet::new(),
            wrong: Vec::new(),
            lasting: (BTreeSet::new(), false),
            slice_leaks: false,
            governed: BTreeSet::new(),
            demoted: false,
            unserved: BTreeSet::new(),
            mends: Mends::default(),
            hotplug,
            watched: Vec::new(),
            watching: Vec::new(),
            confined: CpuSet::new(),
            findings: VecDeque::new(),
            finding_count: 0,
            drifted: Vec::new(),
            departures: VecDeque::new(),
            concluded: VecDeque::new(),
        }
    }

    /// Processes that are to be put into cgroups.
    #[must_use]
    pub fn entering(&self) -> &[(CgroupPath, u32)] {
        &self.entering
    }

    /// Whether the next outside event may be taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.work == Work::Idle && self.pending.is_none()
    }

    /// What the kernel should show.
    #[must_use]
    pub fn desired(&self) -> Desired {
        let mut frozen = self.fights.frozen();
        frozen.extend(self.held_off.keys().cloned());
        let mut blocked: BTreeSet<CgroupPath> = self.blocked.keys().cloned().collect();
        let leaving = self.leaving.keys().filter_map(|o| self.assignments.owners.get(o));
        blocked.extend(leaving.map(|a| a.cgroup.clone()));
        let members = self.demoted.then(|| self.as_members());
        let table = members.as_ref().unwrap_or(&self.assignments);
        let fenceable = self.settings.on_intrusion_at.iter().filter(|(_, how)| **how == OnIntrusion::Fence);
        let mut desired = Desired {
            roles: self.settings.roles.clone(),
            fences: self.fenced(),
            fenceable: fenceable.map(|(path, _)| path.clone()).collect(),
            first: self.first.clone(),
            frozen,
            entering: self.entering.clone(),
            empty_refused: self.facts.empty_refused,
            teardown: self.teardown,
            rebuild: self.mends.rebuild.clone(),
            rewrite: self.mends.rewrite.clone(),
            narrow: self.progress.narrow.clone(),
            stuck: self.progress.stuck.iter().filter(|(_, s)| **s).map(|(p, _)| p.clone()).collect(),
            blocked,
            expected: self.expected(),
            units: self.units(),
            local: !self.facts.exclusive,
            ..Desired::of(&self.settings.slice, table, &self.online)
        };
        desired.pool = desired.pool.difference(&plan::foreign(&desired, &self.observed, None));
        desired.house_leftovers(&self.observed);
        desired
    }

    /// The table without partitions in the slice.
    fn as_members(&self) -> Assignments {
        let mut table = self.assignments.clone();
        for a in table.owners.values_mut() {
            a.mode = self.in_force(a);
        }
        table
    }

    /// How an owner's exclusivity is enforced at present: where partitions are local, and an owner in the slice has no CPU
    /// that is online and none can be had for it there, by everybody's lists.
    #[must_use]
    pub fn in_force(&self, a: &Assignment) -> Mode {
        let local = a.mode == Mode::Partition && a.cgroup.is_within(&self.settings.slice);
        if self.demoted && local { Mode::Member } else { a.mode }
    }

    /// Whether some owner needs the files of this cgroup to be other than they were, or may: while kernel and table differ
    /// nothing is known.
    #[must_use]
    pub fn governs(&self, path: &CgroupPath) -> bool {
        !self.settled || self.governed.contains(path)
    }

    /// Whether some owner is this unit, or needs the files of its cgroup `path` to be other than they were, or may.
    #[must_use]
    pub fn needs(&self, unit: &UnitName, path: &CgroupPath) -> bool {
        self.governs(path) || self.assignments.sets().any(|(o, _)| UnitName::of(o).as_ref() == Some(unit))
    }

    /// Whether kernel and table agreed when last looked; if not, the next tick should look again.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let left_alone =
            !self.held_off.is_empty() || !self.blocked.is_empty() || self.fights.next_thaw().is_some();
        self.settled && !left_alone && !self.is_unsaved() && self.hotplug.deadline().is_none()
    }

    /// When something is to be looked at again: a file that was left alone, CPUs that went and came, a finding that has
    /// waited long enough for its writer;
    /// `CLOCK_MONOTONIC` nanoseconds.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let since = self.held_off.values().chain(self.blocked.values()).min();
        let again = since.map(|at| at.saturating_add(fights::MINUTE_NS));
        [
            self.fights.next_thaw(),
            again,
            self.causes.next_deadline(),
            self.hotplug.deadline(),
            self.mends.retry_ns,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Of [`State::next_deadline`], what comes of CPUs that went and came.
    #[must_use]
    pub fn hotplug_deadline(&self) -> Option<u64> {
        self.hotplug.deadline()
    }

    /// The mode that a request gets on this kernel, in a cgroup that truepin makes (`own`) or in somebody else's.
    fn resolve(
        &self,
        owner: &Owner,
        isolation: Isolation,
        own: bool,
    ) -> Result<(Isolation, Mode), AdmitError> {
        let asked = if isolation == Isolation::Auto { self.settings.isolation } else { isolation };
        // A local partition needs one above it, and truepin makes one of its own slice only, at the top.
        let local = self.facts.local_partitions() && self.settings.slice.level() == 1;
        let can = self.facts.exclusive || local && own;
        match asked {
            Isolation::Member => Ok((asked, Mode::Member)),
            Isolation::Auto if !can => Ok((asked, Mode::Member)),
            _ if can => Ok((asked, Mode::Partition)),
            _ if local => Err(AdmitError::OnlyOwn { owner: owner.clone() }),
            _ => Err(AdmitError::NoPartitions),
        }
    }
}
