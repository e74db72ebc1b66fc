//! Carries out what the reconciler decides.
//!
//! Problem: an effect's result is an event, and the next outside event must find the state idle. Steps: outside events
//! come in through [`Engine::drive`], which carries out effects in order and feeds results back until there are none.
//! Everything that touches the kernel or the disk happens on the one thread that owns the engine; the executor is
//! called nowhere else.

use crate::{
    cgroupfs::CgroupFs,
    containers::{Scanner, TreeError},
    cri,
    evidence::{Collector, EvidenceError},
    executor,
    hotplug::Hotplug,
    procfs,
    store::{Store, chain},
    sysfs,
    watch::Watch,
    writers::Writers,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fs, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::oneshot;
use truepin::{
    CgroupId, CgroupPath, CpuSet, CpuTopology, Owner,
    containers::ContainerId,
    ledger::{Departure, DepartureKind, Watched},
    observed::{CgroupObserved, Kernel, KernelError, Observed, Scope},
    reconcile::{
        Answer, Effect, Event, Finding, FindingKind, ForeignWrite, PodAdmission, State, Ticket, step,
    },
    rehearse::{Rehearsal, Scenery},
    request::Request,
    sweep::TaskSweep,
    units::UnitName,
    verdict::{Evidence, Instant},
};

/// What a look at the kernel's reports gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gathered {
    /// No report.
    Nothing,
    /// Departures only, and nothing had to be done about them.
    IdleDepartures,
    /// Anything else.
    Something,
}

/// Everything with effects, behind the reconciler.
#[derive(Debug)]
pub struct Engine {
    /// What decides.
    pub state: State,
    /// The cgroup tree.
    pub kernel: CgroupFs,
    /// Evidence.
    pub collector: Collector,
    /// The record; `None` in audit mode, which has none.
    pub store: Option<Store>,
    /// That files changed.
    pub watch: Option<Watch>,
    /// Who changed them.
    pub writers: Writers,
    /// Something was told beside a reading, and may not be in it: to be looked at.
    news: bool,
    /// That CPUs go and come.
    pub hotplug: Option<Hotplug>,
    /// Where the machine is read, from the root.
    sysfs: PathBuf,
    /// Finds containers.
    scanner: Scanner,
    pods_seen: BTreeSet<String>,
    /// Phases applied so far: tells whether an event led to anything.
    applied: u64,
    replies: HashMap<Ticket, oneshot::Sender<Answer>>,
    tickets: Ticket,
}

impl Engine {
    /// Nothing happens before [`Engine::drive`]. `sysfs` is the root of the machine's description; who wants to be woken
    /// sets `watch`, `writers` and `hotplug`.
    #[must_use]
    pub fn new(
        state: State,
        kernel: CgroupFs,
        collector: Collector,
        store: Option<Store>,
        writers: Writers,
        scanner: Scanner,
        sysfs: PathBuf,
    ) -> Self {
        Self {
            scanner,
            pods_seen: BTreeSet::new(),
            state,
            kernel,
            collector,
            store,
            sysfs,
            watch: None,
            writers,
            news: false,
            hotplug: None,
            applied: 0,
            replies: HashMap::new(),
            tickets: 0,
        }
    }

    /// Asks something that takes a ticket; the answer has arrived when this returns.
    pub fn ask(&mut self, event: impl FnOnce(Ticket) -> Event) -> Answer {
        self.tickets += 1;
        let (sender, mut receiver) = oneshot::channel();
        self.replies.insert(self.tickets, sender);
        self.drive(event(self.tickets));
        self.replies.remove(&self.tickets);
        receiver.try_recv().unwrap_or_else(|_| Answer::Failed("the question got no answer".into()))
    }

    /// What an event would come to, with nothing changed.
    pub fn rehearse(&mut self, event: Event) -> Rehearsal {
        let mut rehearsal = Rehearsal::new(self.state.clone());
        let mut stage = Stage { kernel: &mut self.kernel, sysfs: &self.sysfs };
        rehearsal.drive(&mut stage, event, procfs::now().unwrap_or_default());
        rehearsal
    }

    /// Asks for several pods at once; the answers are in their order.
    pub fn ask_pods(&mut self, pods: Vec<(String, Vec<Request>)>) -> Vec<Answer> {
        let mut receivers = Vec::with_capacity(pods.len());
        let mut admissions = Vec::with_capacity(pods.len());
        for (uid, requests) in pods {
            self.tickets += 1;
            let (sender, receiver) = oneshot::channel();
            self.replies.insert(self.tickets, sender);
            receivers.push((self.tickets, receiver));
            admissions.push(PodAdmission { ticket: self.tickets, uid, requests });
        }
        self.drive(Event::AdmitPods(admissions));
        let answer = |(ticket, mut receiver): (Ticket, oneshot::Receiver<Answer>)| {
            self.replies.remove(&ticket);
            receiver.try_recv().unwrap_or_else(|_| Answer::Failed("the question got no answer".into()))
        };
        receivers.into_iter().map(answer).collect()
    }

    /// Reads which pods and containers there are, and acts on it.
    pub fn look_at_tree(&mut self) {
        let looked = self.scanner.look(&self.state.containers, now_ns());
        for found in self.scanner.cri.as_mut().map(cri::Cri::reports).unwrap_or_default() {
            self.drive(Event::Found(found));
        }
        match looked {
            Ok(tree) => {
                // Most hosts have no pods.
                if !(tree.pods.is_empty() && self.pods_seen.is_empty() && self.state.has_no_pods()) {
                    self.drive(Event::Tree { pods: tree.pods.clone(), containers: tree.containers });
                }
                self.pods_seen = tree.pods;
            }
            Err(error) => tracing::warn!("pods: {}", chain(&error)),
        }
    }

    /// At start: asks the runtime about containers that have no name, if there are any, and waits for it so long.
    pub fn first_names(&mut self, time: Duration) {
        // A tree that cannot be read is said by the look that acts on it.
        if self.scanner.look(&self.state.containers, now_ns()).is_ok()
            && let Some(cri) = &mut self.scanner.cri
        {
            cri.wait(time, now_ns);
        }
    }

    /// Takes what the runtime has answered, if it has.
    pub fn hear_names(&mut self) {
        if self.scanner.cri.as_mut().is_some_and(|c| c.hear(now_ns())) {
            self.look_at_tree();
        }
    }

    /// The runtime that is asked for names, readable when it has answered.
    #[must_use]
    pub fn cri(&self) -> Option<&cri::Cri> {
        self.scanner.cri.as_ref()
    }

    /// The containers that the cgroup tree has now, as far as their names can be found out: id to pod uid and name.
    pub fn running(&mut self) -> Result<BTreeMap<String, (String, String)>, TreeError> {
        self.scanner.running(&self.state.containers)
    }

    /// Where a container is, if its cgroup is there.
    pub fn home_of(&mut self, id: &ContainerId) -> Result<Option<(CgroupPath, CgroupId)>, String> {
        let found = self.scanner.find(id, &self.state.containers).map_err(|e| chain(&e))?;
        Ok(found.map(|c| (c.path, c.cgroup)))
    }

    /// Takes an outside event to its end.
    pub fn drive(&mut self, event: Event) {
        self.carry_through(VecDeque::from([event]));
        let mut untold = self.put_back_units();
        untold.extend(self.promise_units());
        self.carry_through(untold.into_iter().map(|text| Event::Found(FindingKind::Systemd(text))).collect());
    }

    /// Units that no owner needs otherwise than they were are as they were.
    fn put_back_units(&mut self) -> Vec<String> {
        let state = &self.state;
        match &mut self.kernel.systemd {
            Some(systemd) => systemd.undo(|unit, path| state.needs(unit, path)),
            None => Vec::new(),
        }
    }

    /// Looks for units that name CPUs which cannot be had; `done` says that there may be something to hear.
    pub fn survey_units(&mut self, done: impl FnOnce() + Send + 'static) {
        if let Some(systemd) = &mut self.kernel.systemd {
            systemd.survey(done);
        }
    }

    /// Tells of those that were found.
    pub fn hear_units(&mut self) {
        let Some(systemd) = &mut self.kernel.systemd else { return };
        let present = self.state.topology.present().unwrap_or(&self.state.online);
        for found in systemd.misnamed(present, &self.state.online) {
            self.drive(Event::Found(FindingKind::Systemd(found.to_string())));
        }
    }

    /// Units that are promised CPUs are born with them.
    fn promise_units(&mut self) -> Vec<String> {
        let Some(systemd) = &mut self.kernel.systemd else { return Vec::new() };
        let promised = self.state.promised_units();
        systemd.promise(promised.filter_map(|(o, path, cpus)| Some((UnitName::of(o)?, path, cpus))))
    }

    fn carry_through(&mut self, mut events: VecDeque<Event>) {
        while let Some(event) = events.pop_front() {
            let now = match procfs::now() {
                Ok(now) => now,
                Err(error) => {
                    // Without a clock nothing can be decided; the tick tries again.
                    tracing::error!("{}", chain(&error));
                    Instant::default()
                }
            };
            for effect in step(&mut self.state, event, now) {
                self.carry_out(effect, &mut events);
            }
        }
    }

    /// What others have written up to now: whatever a reading shows that was taken before, was made by one of these, by
    /// one that was told earlier, or by nobody who could be seen.
    fn written(&mut self) -> Option<Event> {
        self.writers.means()?;
        let mut writes = Vec::new();
        let sight = self.writers.look(now_ns(), &mut writes);
        self.news |= !writes.is_empty();
        Some(Event::Wrote { writes, sight, lost: self.writers.lost() })
    }

    fn carry_out(&mut self, effect: Effect, results: &mut VecDeque<Event>) {
        let result = match effect {
            Effect::Persist(record) => {
                let saved = match &mut self.store {
                    Some(store) => store.save(&record).map_err(|e| chain(&e)),
                    None => Err("this agent keeps no record".into()),
                };
                Some(Event::Persisted(saved))
            }
            Effect::Observe(scope) => {
                let read = self.kernel.observe(&scope);
                results.extend(self.written());
                Some(Event::Observed(read))
            }
            Effect::ReadMachine => {
                let read = sysfs::topology(&self.sysfs).map(Box::new);
                Some(Event::Machine(read.map_err(|e| chain(&e))))
            }
            Effect::Pause(ns) => {
                std::thread::sleep(Duration::from_nanos(ns));
                None
            }
            Effect::Apply(steps) => {
                self.applied += 1;
                let mount = self.kernel.mount().root.display().to_string();
                for planned in &steps {
                    tracing::debug!("{:?}: {}", planned.phase, planned.step.shell(&mount));
                }
                self.kernel.enters(self.state.entering());
                let applied = executor::execute(&mut self.kernel, steps);
                let untold = self.kernel.untold();
                results.extend(untold.into_iter().map(|text| Event::Found(FindingKind::Systemd(text))));
                Some(Event::Applied(applied))
            }
            Effect::Configure(watched) => {
                // Other owners: other writes are of interest.
                self.watch_writers();
                Some(Event::Configured(self.configure(&watched)))
            }
            Effect::Collect => {
                let evidence = self.collect();
                // A CPU that was away within the interval and is back shows in no sample; it was reported before it came.
                results.extend(self.heard_hotplug());
                Some(Event::Collected(evidence))
            }
            Effect::Locate(cgroups) => {
                let path = |(id, pid): (CgroupId, u32)| {
                    let path = self.writers.path(id).or_else(|| procfs::who(pid).1)?;
                    Some((id, path))
                };
                let found = cgroups.into_iter().filter_map(path).collect();
                Some(Event::Located { found, own: procfs::who(std::process::id()).1 })
            }
            Effect::SweepTasks(owners) => Some(Event::Swept(self.sweep(owners))),
            Effect::Confine(cpus) => {
                self.confine(&cpus);
                None
            }
            Effect::Watch(paths) => {
                self.set_watches(&paths);
                None
            }
            Effect::Reply(ticket, answer) => {
                if let Some(sender) = self.replies.remove(&ticket) {
                    // A client that went away needs no answer.
                    let _ = sender.send(answer);
                }
                None
            }
            Effect::Report(finding) => {
                log(&finding);
                None
            }
        };
        results.extend(result);
    }

    fn owners(&self) -> Vec<(CgroupId, CgroupPath)> {
        let of = |path: &CgroupPath| self.state.observed.cgroups.get(path).map(|c| (c.id, path.clone()));
        self.state.assignments.owners.values().filter_map(|a| of(&a.cgroup)).collect()
    }

    fn configure(&mut self, watched: &[Watched]) -> Result<Arc<Evidence>, String> {
        self.collector.configure(watched).map_err(|e| chain(&e))?;
        self.collect()
    }

    /// Reads all evidence; also used outside the reconciler, for the tick.
    pub fn collect(&mut self) -> Result<Arc<Evidence>, String> {
        let owners = self.owners();
        self.collector.collect(&owners).map(Arc::new).map_err(|e: EvidenceError| chain(&e))
    }

    fn sweep(&self, owners: Vec<(Owner, CgroupPath)>) -> TaskSweep {
        let mut sweep = TaskSweep::default();
        for (owner, path) in owners {
            let cpus = self.state.assignments.cpus_of(&owner).cloned().unwrap_or_default();
            match procfs::tasks_in(&self.kernel.dir(&path)).and_then(|t| procfs::still_in(&path, &cpus, t)) {
                Ok(tasks) => sweep.owned.extend(tasks.into_iter().map(|t| (owner.clone(), t))),
                Err(error) => {
                    let why = chain(&error);
                    tracing::warn!("sweep of {owner}: {why}");
                    sweep.unread.push((owner, why));
                }
            }
        }
        if !self.kernel.mount().copied {
            match procfs::outside(&self.kernel.mount().root) {
                Ok(tasks) => sweep.outside = tasks,
                Err(error) => tracing::warn!("sweep of the root cgroup: {}", chain(&error)),
            }
        }
        sweep
    }

    /// truepin is an intruder like any other: its own threads keep to the shared pool.
    fn confine(&self, cpus: &CpuSet) {
        if self.kernel.mount().copied {
            return;
        }
        if let Err(error) = confine(cpus) {
            tracing::warn!("truepin's own threads could not be kept on CPUs {cpus}: {error}");
        }
    }

    fn set_watches(&mut self, paths: &[CgroupPath]) {
        let root = self.kernel.mount().root.clone();
        if let Some(watch) = &mut self.watch
            && let Err(error) = watch.set(&root, paths)
        {
            tracing::warn!("{}; changes there are found at the next tick", chain(&error));
        }
        self.watch_writers();
    }

    fn watch_writers(&mut self) {
        let state = &self.state;
        let of = |(path, c): (&CgroupPath, &CgroupObserved)| (path.clone(), (c.id, state.interest(path)));
        // What was written just before went unseen. From a reading that follows on, nothing does.
        self.news |= self.writers.watch(state.observed.cgroups.iter().map(of).collect());
    }

    /// Whether there is something to look at that nothing will wake the loop for.
    #[must_use]
    pub fn has_news(&self) -> bool {
        self.news
    }

    /// What was reported of CPUs that go and come since the last call.
    fn heard_hotplug(&mut self) -> Option<Event> {
        let (report, failed) = self.hotplug.as_mut()?.drain();
        for error in failed {
            tracing::warn!("{}", chain(&error));
        }
        let report = report?;
        tracing::debug!("CPUs went: {}, came: {}, were told to: {}", report.went, report.came, report.tried);
        Some(Event::Hotplug(report))
    }

    /// Takes that down; the state says when it is acted on.
    fn hear_hotplug(&mut self) -> bool {
        let heard = self.heard_hotplug();
        heard.map(|event| self.drive(event)).is_some()
    }

    /// Evidence of everything, for the tick.
    pub fn tick(&mut self) {
        let evidence = self.collect();
        self.hear_hotplug();
        self.drive(Event::Collected(evidence));
    }

    /// Reads what the kernel reported since the last call and acts on it; of departures only with `ring`.
    pub fn gather(&mut self, ring: bool) -> Gathered {
        let mut writes: Vec<ForeignWrite> = Vec::new();
        let mut departures: Vec<Departure> = Vec::new();
        let hotplug = self.hear_hotplug();
        let mut any = mem::take(&mut self.news);
        if let Some(watch) = &mut self.watch {
            match watch.drain(&mut writes) {
                Ok(something) => any |= something,
                Err(error) => tracing::warn!("{}", chain(&error)),
            }
        }
        let before = writes.len();
        if let Err(error) = self.writers.drain(now_ns(), &mut writes) {
            tracing::warn!("{}", chain(&error));
        }
        any |= writes.len() > before;
        let files = any;
        if let Some(probe) = self.collector.probe.as_mut().filter(|_| ring) {
            match probe.drain(&mut departures) {
                Ok(n) => any |= n > 0,
                Err(error) => tracing::warn!("{}", chain(&error)),
            }
        }
        for d in &mut departures {
            if let DepartureKind::MovedOut(moved) = &mut d.kind {
                (moved.path, moved.by_path) =
                    (self.writers.path(moved.into), self.writers.path(moved.by_cgroup));
            }
        }
        if !any {
            return if hotplug { Gathered::Something } else { Gathered::Nothing };
        }
        let before = self.applied;
        self.drive(Event::Disturbed { writes, departures });
        if files || self.applied > before { Gathered::Something } else { Gathered::IdleDepartures }
    }
}

/// What a rehearsal reads: the host.
#[derive(Debug)]
pub struct Stage<'a> {
    /// Its cgroups.
    pub kernel: &'a mut CgroupFs,
    /// Its machine, from the root.
    pub sysfs: &'a Path,
}

impl Scenery for Stage<'_> {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        self.kernel.observe(scope)
    }

    fn machine(&mut self) -> Result<Box<CpuTopology>, String> {
        sysfs::topology(self.sysfs).map(Box::new).map_err(|e| chain(&e))
    }
}

/// `CLOCK_MONOTONIC`; 0 when it cannot be read, which has never been seen.
pub(crate) fn now_ns() -> u64 {
    procfs::now().map_or(0, |n| n.mono_ns)
}

fn log(finding: &Finding) {
    use FindingKind as K;
    let id = finding.id;
    match &finding.kind {
        K::Note(_) | K::FightOver { .. } | K::FenceGone { .. } | K::Gone { .. } => {
            tracing::info!(id, "{finding}");
        }
        K::Broken(_) | K::NotDurable(_) | K::Stuck(_) | K::StepFailed(_) => tracing::error!(id, "{finding}"),
        _ => tracing::warn!(id, "{finding}"),
    }
}

/// Puts every thread of this process on `cpus`.
fn confine(cpus: &CpuSet) -> Result<(), String> {
    let mut set = nix::sched::CpuSet::new();
    let mut any = false;
    for cpu in cpus.iter().map(|c| c.0 as usize).filter(|c| *c < nix::sched::CpuSet::count()) {
        set.set(cpu).map_err(|e| e.to_string())?;
        any = true;
    }
    if !any {
        return Err(format!("none of them is below {}", nix::sched::CpuSet::count()));
    }
    for entry in fs::read_dir("/proc/self/task").map_err(|e| e.to_string())? {
        let name = entry.map_err(|e| e.to_string())?.file_name();
        let Some(tid) = name.to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        match nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(tid), &set) {
            Ok(()) | Err(nix::Error::ESRCH) => {} // a thread that has just ended
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}
