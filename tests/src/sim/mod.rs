//! truepin without a machine: `reconcile::step` driven as the agent drives it, on the fake kernel, with a disk and a
//! probe that can fail on order.
//!
//! Steps: an outside event goes in; effects are carried out in order, and one that has a result feeds it back as an
//! event before the next outside event. A crash drops everything but the kernel and the disk; a restart begins with
//! the record that was durable.
//! Invariants watched on the way: nothing is written before the table in memory is durable (I5); every event ends
//! with an idle state; whatever [`Eyes`] sees.

mod disk;
mod eyes;
pub mod history;
mod machine;
pub mod played;
mod probe;

pub use disk::{Death, Disk, DiskFault, DiskTally, Loss, Saved};
pub use eyes::{Eyes, Foreign};
pub use probe::Script;

use crate::fake::FakeKernel;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use truepin::{
    CgroupPath, CpuId, CpuSet, CpuTopology, Owner,
    assignments::Mode,
    ledger::{LedgerSample, Probe},
    observed::{Kernel, Observed, Scope, Step},
    plan::{self, Plan, Planned},
    reconcile::{
        Answer, Effect, Event, Finding, ForeignWrite, Home, HotplugReport, KernelFacts, Settings, State,
        Ticket, step as reconcile_step,
    },
    request::{AlignmentPolicy, Isolation, Request},
    sweep::{self, SetFinding, TaskMask, TaskSweep},
    verdict::{ClockState, Evidence, Instant, Tolerance, Verdict},
};
use truepin_agent::executor::execute;

/// Threads of the root cgroup, besides pid 1, that a sweep looks at: the first so many by tid.
const OUTSIDE: usize = 64;

/// What stays the same over restarts.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Configuration.
    pub settings: Settings,
    /// The machine.
    pub topology: CpuTopology,
    /// What probing found.
    pub facts: KernelFacts,
    /// CPUs that no owner gets.
    pub reserved: CpuSet,
    /// The pool keeps off them.
    pub strict_reserved: bool,
}

impl Setup {
    /// A plain one: slice `truepin.slice`, three repairs a minute, no roles.
    #[must_use]
    pub fn plain(topology: CpuTopology, reserved: CpuSet, exclusive: bool) -> Self {
        let settings = Settings {
            audit: false,
            slice: "truepin.slice".parse().unwrap_or_default(),
            isolation: Isolation::Auto,
            repairs_per_minute: 3,
            strategy: truepin::placement::Strategy::Best,
            scope: truepin::placement::Scope::Container,
            sources: std::collections::BTreeSet::new(),
            roles: BTreeMap::new(),
            on_intrusion: plan::OnIntrusion::Report,
            on_intrusion_at: BTreeMap::new(),
            units: std::collections::BTreeSet::new(),
            kthread_budget_ns_per_s: 10_000_000,
            tolerance: Tolerance { tick_ns: 4_000_000, per_switch_ns: 10_000 },
        };
        let facts =
            KernelFacts { cpuset: true, exclusive, partition: true, bpf: true, ..KernelFacts::default() };
        Self { settings, topology, facts, reserved, strict_reserved: false }
    }
}

/// The agent is dead; [`Sim::restart`] brings a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crashed;

/// One agent on one machine.
#[derive(Debug, Clone)]
pub struct Sim {
    /// What stays the same.
    pub setup: Arc<Setup>,
    /// The kernel, observed.
    pub eyes: Eyes,
    /// The record.
    pub disk: Disk,
    /// The evidence.
    pub probe: Script,
    /// The agent's mind.
    pub state: State,
    /// Both clocks.
    pub now: Instant,
    /// What was answered since the last restart.
    pub answers: Vec<(Ticket, Answer)>,
    /// What was reported since the last restart.
    pub reports: Vec<Finding>,
    /// What the agent watches.
    pub watching: Vec<CgroupPath>,
    /// How often that was set.
    pub watches: usize,
    /// The agent's own cgroup.
    pub home: CgroupPath,
    /// Where the agent keeps itself.
    pub confined: CpuSet,
    /// How often that was set.
    pub confinements: usize,
    /// What the simulation itself found wrong.
    pub faults: Vec<String>,
    next_ticket: Ticket,
    boots: u64,
}

const MILLISECOND: u64 = 1_000_000;
/// Far more effects than any event has: beyond that it never ends.
const ENDLESS: usize = 2_000;
/// An echo finds nothing to do; a few may, when somebody else writes as well.
const ECHOES: usize = 8;

/// A storm of hotplug is answered, everything looked at again, and what that finds mended and looked at.
const TIMERS: usize = 32;

fn echo(step: &Step) -> Option<ForeignWrite> {
    let Step::Write { path, file, .. } = step else { return None };
    Some(ForeignWrite { path: path.clone(), file: Some((*file).into()), writer: None })
}

impl Sim {
    /// A first agent on `kernel`, after `Event::Started`.
    #[must_use]
    pub fn new(setup: Setup, kernel: FakeKernel) -> Self {
        let eyes = Eyes::new(kernel, setup.settings.slice.clone());
        let setup = Arc::new(setup);
        let mut sim = Self {
            state: fresh(&setup, None, 0),
            setup,
            eyes,
            disk: Disk::default(),
            probe: Script::default(),
            now: Instant { mono_ns: 1_000_000_000, wall_ns: 1_700_000_000_000_000_000 },
            answers: Vec::new(),
            reports: Vec::new(),
            watching: Vec::new(),
            watches: 0,
            home: CgroupPath::root(),
            confined: CpuSet::new(),
            confinements: 0,
            faults: Vec::new(),
            next_ticket: 1,
            boots: 0,
        };
        // No crash is on order yet.
        let _ = sim.happens(Event::Started);
        sim
    }

    /// A new agent after a crash.
    pub fn restart(&mut self) -> Result<(), Crashed> {
        self.eyes.restart();
        self.start()
    }

    /// A new agent after a boot of the machine, whose cgroups are those of `kernel`.
    pub fn reboot(&mut self, kernel: FakeKernel) -> Result<(), Crashed> {
        let log = self.eyes.log.take();
        self.eyes = Eyes::new(kernel, self.setup.settings.slice.clone());
        self.eyes.log = log;
        self.boots += 1;
        self.start()
    }

    fn start(&mut self) -> Result<(), Crashed> {
        let record = match self.disk.restart(self.now.wall_ns) {
            Ok(record) => record,
            Err(error) => {
                self.faults.push(format!("the agent does not start: {error}"));
                None
            }
        };
        self.eyes.note(|| "start".into());
        self.probe = Script::default();
        self.state = fresh(&self.setup, record, self.boots);
        (self.answers, self.reports) = (Vec::new(), Vec::new());
        (self.watching, self.confined) = (Vec::new(), CpuSet::new());
        self.happens(Event::Started)
    }

    /// Time passes.
    pub fn wait(&mut self, ns: u64) {
        self.now.mono_ns += ns;
        self.now.wall_ns += ns;
    }

    /// An outside event, and everything that follows from it: the notifications of truepin's own writes, which come back
    /// from the kernel like everybody's, and what is looked at a little later.
    pub fn happens(&mut self, event: Event) -> Result<(), Crashed> {
        self.at_once(event)?;
        self.rest()
    }

    /// An outside event, and what follows from it at once.
    pub fn at_once(&mut self, event: Event) -> Result<(), Crashed> {
        let mut from = self.eyes.steps.len();
        self.drive(event)?;
        for _ in 0..ECHOES {
            let writes: Vec<ForeignWrite> = self.eyes.steps[from..].iter().filter_map(echo).collect();
            if writes.is_empty() {
                return Ok(());
            }
            from = self.eyes.steps.len();
            self.wait(MILLISECOND);
            self.drive(Event::Disturbed { writes, departures: Vec::new() })?;
        }
        self.faults.push(format!("truepin answered to its own writes more than {ECHOES} times"));
        Ok(())
    }

    /// Time passes until nothing is to be looked at any more on account of CPUs that went and came.
    pub fn rest(&mut self) -> Result<(), Crashed> {
        for _ in 0..TIMERS {
            let Some(at) = self.state.hotplug_deadline() else { return Ok(()) };
            self.wait(at.saturating_sub(self.now.mono_ns));
            self.at_once(Event::Disturbed { writes: Vec::new(), departures: Vec::new() })?;
        }
        self.faults.push(format!("truepin looked again more than {TIMERS} times"));
        Ok(())
    }

    /// CPUs are switched off and on, and each attempt is reported as the kernel reports it. The refused ones.
    pub fn switch(&mut self, changes: &[(CpuId, bool)]) -> Result<CpuSet, Crashed> {
        let mut refused = CpuSet::new();
        for (cpu, online) in changes {
            let mut report = HotplugReport { tried: CpuSet::single(*cpu), ..HotplugReport::default() };
            let was = self.eyes.kernel().online().contains(*cpu);
            match self.eyes.others(|k| k.set_online(*cpu, *online)) {
                Ok(()) if was == *online => {}
                Ok(()) if *online => drop(report.came.insert(*cpu)),
                Ok(()) => drop(report.went.insert(*cpu)),
                Err(_) => drop(refused.insert(*cpu)),
            }
            self.eyes.note(|| format!("CPU {cpu} online={online}: {report:?}"));
            self.at_once(Event::Hotplug(report))?;
        }
        Ok(refused)
    }

    fn drive(&mut self, event: Event) -> Result<(), Crashed> {
        self.wait(MILLISECOND);
        let mut events = VecDeque::from([event]);
        let mut count = 0;
        while let Some(event) = events.pop_front() {
            for effect in self.step(event) {
                count += 1;
                events.extend(self.carry_out(effect)?);
            }
            if count > ENDLESS {
                self.faults.push(format!("an event had more than {ENDLESS} effects"));
                return Ok(());
            }
        }
        self.eyes.promised();
        if !self.state.is_idle() {
            self.faults.push("nothing is left to do and the state is not idle".into());
        }
        Ok(())
    }

    fn step(&mut self, event: Event) -> Vec<Effect> {
        self.probe.now_ns = self.now.mono_ns;
        let effects = reconcile_step(&mut self.state, event, self.now);
        self.eyes.learn(&self.state.assignments);
        effects
    }

    fn carry_out(&mut self, effect: Effect) -> Result<Option<Event>, Crashed> {
        Ok(match effect {
            Effect::Persist(record) => match self.disk.save(&record) {
                Saved::Durable => Some(Event::Persisted(Ok(()))),
                Saved::Failed(why) => Some(Event::Persisted(Err(why.into()))),
                Saved::Dead => return Err(Crashed),
            },
            Effect::Observe(scope) => Some(Event::Observed(self.eyes.observe(&scope))),
            Effect::ReadMachine => {
                Some(Event::Machine(machine::now(&self.setup.topology, self.eyes.kernel().online())))
            }
            Effect::Pause(ns) => {
                self.wait(ns);
                None
            }
            Effect::Apply(steps) => {
                self.intent_is_durable(&steps);
                let tried = execute(&mut self.eyes, steps);
                if self.eyes.kernel().crashed() {
                    return Err(Crashed);
                }
                Some(Event::Applied(tried))
            }
            Effect::Configure(watched) => {
                let done = self.probe.configure(&watched).map_err(|e| e.to_string());
                Some(Event::Configured(done.and_then(|()| self.evidence())))
            }
            Effect::SweepTasks(owners) => Some(Event::Swept(self.sweep(&owners))),
            Effect::Collect => Some(Event::Collected(self.evidence())),
            Effect::Locate(cgroups) => {
                let kernel = self.eyes.kernel();
                let path = |id| kernel.cgroups().find(|p| kernel.id(p) == Some(id)).cloned();
                let found = cgroups.into_iter().filter_map(|(id, _)| Some((id, path(id)?))).collect();
                Some(Event::Located { found, own: Some(self.home.clone()) })
            }
            Effect::Confine(cpus) => {
                self.confined = cpus;
                self.confinements += 1;
                None
            }
            Effect::Watch(paths) => {
                self.watching = paths;
                self.watches += 1;
                None
            }
            Effect::Reply(ticket, answer) => {
                self.answers.push((ticket, answer));
                None
            }
            Effect::Report(finding) => {
                self.eyes.note(|| format!("  says: {}", finding.kind));
                self.reports.push(*finding);
                None
            }
        })
    }

    /// I5, and first values before the first write.
    fn intent_is_durable(&mut self, steps: &[Planned]) {
        let record = self.disk.record();
        let table = &self.state.assignments;
        let durable = record.map(|r| (&r.assignments.owners, &r.assignments.promised));
        if durable.map_or(table.sets().next().is_some(), |d| d != (&table.owners, &table.promised)) {
            self.faults.push(format!(
                "I5: steps are applied for {:?} while {durable:?} is durable",
                self.state.assignments.owners
            ));
        }
        if record.is_some() && !self.disk.is_durable() {
            self.faults.push("I5: steps are applied while the record could still be lost".into());
        }
        for planned in steps {
            let Step::Write { path, file, .. } = &planned.step else { continue };
            let first = record.and_then(|r| r.first.get(path));
            let known = first
                .is_some_and(|f| self.eyes.kernel().id(path) == Some(f.id) && f.files.contains_key(file));
            if !known && !path.is_within(&self.setup.settings.slice) {
                self.faults.push(format!("I5: {} before its first value is durable", planned.step.shell("")));
            }
        }
    }

    /// Everything known now.
    pub fn evidence(&mut self) -> Result<Arc<Evidence>, String> {
        self.probe.now_ns = self.now.mono_ns;
        let mut sample = LedgerSample::default();
        self.probe.collect(&mut sample).map_err(|e| e.to_string())?;
        Ok(Arc::new(Evidence {
            at: self.now,
            ledger: Some(sample),
            usage: self.probe.usage(),
            noise: BTreeMap::new(),
            clock: ClockState { source: "tsc".into(), suspended_ns: 0 },
            online: self.eyes.kernel().online().clone(),
        }))
    }

    fn sweep(&self, owners: &[(Owner, CgroupPath)]) -> TaskSweep {
        let kernel = self.eyes.kernel();
        let task = |tid: u32| {
            let allowed = kernel.mask(tid)?.clone();
            let last_cpu = allowed.first().unwrap_or(CpuId(0));
            Some(TaskMask { tid, comm: format!("task{tid}"), allowed, last_cpu, runnable: true })
        };
        let inside = |path: &CgroupPath| {
            kernel
                .threads()
                .filter(|t| kernel.cgroup_of(*t).is_some_and(|c| c.is_within(path)))
                .collect::<Vec<_>>()
        };
        let owned = owners
            .iter()
            .flat_map(|(o, p)| inside(p).into_iter().filter_map(task).map(|t| (o.clone(), t)))
            .collect();
        // As many as an agent reads.
        let at_root = kernel.threads().filter(|t| kernel.cgroup_of(*t).is_some_and(CgroupPath::is_root));
        TaskSweep { owned, outside: at_root.take(OUTSIDE).filter_map(task).collect(), unread: Vec::new() }
    }

    /// A number for a question.
    pub fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// The answer to a ticket.
    #[must_use]
    pub fn answer(&self, ticket: Ticket) -> Option<&Answer> {
        self.answers.iter().find(|(t, _)| *t == ticket).map(|(_, a)| a)
    }

    /// Somebody asks; the answer. None at all is a fault of its own.
    pub fn ask(&mut self, event: impl FnOnce(Ticket) -> Event) -> Result<Answer, Crashed> {
        let ticket = self.ticket();
        self.happens(event(ticket))?;
        let answer = self.answer(ticket).cloned();
        Ok(answer.unwrap_or_else(|| {
            self.faults.push("a question was not answered".into());
            Answer::Failed("no answer".into())
        }))
    }

    /// An admission.
    pub fn admit(&mut self, wish: &Wish) -> Result<Answer, Crashed> {
        self.ask(|ticket| Event::Admit {
            ticket,
            request: wish.request.clone(),
            exactly: wish.exactly.clone(),
            home: wish.home.clone(),
            pid: wish.pid,
        })
    }

    /// A release, of one owner or of all.
    pub fn release(&mut self, owner: Option<&Owner>) -> Result<Answer, Crashed> {
        self.ask(|ticket| Event::Release { ticket, owner: owner.cloned() })
    }

    /// The safety net: nothing is known to have changed.
    pub fn tick(&mut self) -> Result<(), Crashed> {
        self.happens(Event::Disturbed { writes: Vec::new(), departures: Vec::new() })
    }

    /// What is read now of everything that a plan looks at.
    pub fn observe(&mut self) -> Observed {
        let scope: Scope = self.state.desired().scope();
        match self.eyes.observe(&scope) {
            Ok(observed) => observed,
            Err(e) => {
                self.faults.push(e.to_string());
                Observed::default()
            }
        }
    }

    /// The plan that would be made now.
    pub fn plan(&mut self) -> Plan {
        let observed = self.observe();
        plan::diff(&self.state.desired(), &observed)
    }

    /// The faults of the sets now.
    pub fn set_faults(&mut self) -> Vec<SetFinding> {
        let observed = self.observe();
        sweep::sets(&self.state.desired(), &observed)
    }

    /// The mode in which an owner is held.
    #[must_use]
    pub fn mode(&self, owner: &Owner) -> Option<Mode> {
        self.state.assignments.owners.get(owner).map(|a| a.mode)
    }

    /// The verdict on an owner since its epoch began.
    pub fn verdict(&mut self, owner: &Owner) -> Option<Verdict> {
        let now = self.evidence().ok()?;
        self.state.verdict(owner, None, &now)
    }

    /// Everything that must be true when nothing is left to do; what is not, in words.
    pub fn unsettled(&mut self) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.faults);
        wrong.append(&mut self.eyes.breaches);
        let plan = self.plan();
        wrong.extend(plan.steps.iter().map(|s| format!("a step is left: {}", s.step.shell(""))));
        wrong.extend(plan.problems.iter().map(|p| format!("a problem is left: {p}")));
        wrong.extend(self.set_faults().iter().map(|f| format!("{}: {}", f.owner, f.fault)));
        wrong.extend(self.eyes.look());
        let table = &self.state.assignments;
        let durable = self.disk.record().map(|r| (&r.assignments.owners, &r.assignments.promised));
        if durable.map_or(table.sets().next().is_some(), |d| d != (&table.owners, &table.promised)) {
            wrong.push("the table differs from the durable one".into());
        }
        let exclusive = self.state.assignments.exclusive();
        if !self.confined.is_disjoint(&exclusive) {
            wrong.push(format!("the agent runs on {} though {exclusive} are exclusive", self.confined));
        }
        wrong
    }
}

/// What is asked for in an admission.
#[derive(Debug, Clone)]
pub struct Wish {
    /// The request.
    pub request: Request,
    /// Exactly these CPUs.
    pub exactly: Option<CpuSet>,
    /// Where.
    pub home: Home,
    /// A process to put there.
    pub pid: Option<u32>,
}

impl Wish {
    /// `cpus` CPUs for `owner`, in its own cgroup when it is a cgroup, else in a new one.
    #[must_use]
    pub fn new(owner: Owner, cpus: u32, isolation: Isolation) -> Self {
        let home = match &owner {
            Owner::Cgroup(path) => Home::Existing(path.clone()),
            _ => Home::New,
        };
        let request = Request {
            owner,
            cpus,
            numa: AlignmentPolicy::BestEffort,
            whole_cores: false,
            near: truepin::NodeSet::new(),
            isolation,
            memory: 0,
        };
        Self { request, exactly: None, home, pid: None }
    }

    /// With exactly these CPUs.
    #[must_use]
    pub fn on(mut self, cpus: CpuSet) -> Self {
        self.exactly = Some(cpus);
        self
    }

    /// With a process.
    #[must_use]
    pub fn with(mut self, pid: u32) -> Self {
        self.pid = Some(pid);
        self
    }
}

fn fresh(setup: &Setup, record: Option<truepin::checkpoint::Checkpoint>, boots: u64) -> State {
    State::new(
        setup.settings.clone(),
        setup.topology.clone(),
        setup.facts,
        format!("00000000-0000-4000-8000-{boots:012}"),
        setup.reserved.clone(),
        setup.strict_reserved,
        record,
    )
}
