//! The loop.
//!
//! One thread owns the engine and waits in poll(2) for calls, for the kernel's reports (inotify, fanotify, the
//! departure ring) and for time. Reports wake it at once; what follows within a millisecond is taken together. The tick
//! is only a safety net.

use crate::{
    api::calls::{self, About, Call, Outcome, Unmet, problem},
    config::Reserve,
    cri::Cri,
    engine::{Engine, Gathered, now_ns},
    hotplug::Hotplug,
    kubelet::Lookout,
    notify::Notify,
    start::{Declared, Prepared},
    store::chain,
};
use nix::{
    fcntl::Flock,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    fs::File,
    mem,
    os::fd::AsFd,
    sync::{Arc, mpsc},
    time::Duration,
};
use tokio::sync::oneshot;
use truepin::{
    CpuSet, Owner,
    pod::Pod,
    reconcile::{Answer, Event, FindingKind},
    verdict::Evidence,
};

/// Reports within this time of the last are taken together.
const COALESCE_NS: u64 = 1_000_000;
/// Open windows hold a sample each, and whoever may read may ask.
pub(crate) const MAX_WAITING: usize = 64;
/// An hour.
pub const MAX_WINDOW_MS: u64 = 3_600_000;

/// What other threads send.
#[derive(Debug)]
pub enum Command {
    /// A question.
    Call(Call, oneshot::Sender<Outcome>),
    /// Fault injection: detach the switch program for so long.
    DetachSwitch(Duration),
    /// End the loop.
    Stop,
}

/// Where they send it.
#[derive(Debug, Clone)]
pub struct Mailbox {
    sender: mpsc::Sender<Command>,
    wake: Arc<EventFd>,
}

/// The loop has ended.
#[derive(Debug, thiserror::Error)]
#[error("the agent's loop has ended")]
pub struct Ended;

impl Mailbox {
    /// Sends and wakes the loop.
    pub fn send(&self, command: Command) -> Result<(), Ended> {
        self.sender.send(command).map_err(|_| Ended)?;
        // The counter can only be full when nobody reads it, and then it is readable all the same.
        let _ = self.wake.write(1);
        Ok(())
    }
}

/// A verdict over a window that is still open.
#[derive(Debug)]
struct Waiting {
    due_ns: u64,
    owner: Option<Owner>,
    from: Arc<Evidence>,
    reply: oneshot::Sender<Outcome>,
}

/// An agent, ready to run.
#[derive(Debug)]
pub struct Agent {
    engine: Engine,
    /// From before the first event.
    findings: Vec<FindingKind>,
    /// Only held.
    _host: Option<Flock<File>>,
    about: About,
    lookout: Option<Lookout>,
    /// Of a service alone: what `truepin run` embeds speaks for nobody.
    pub notify: Notify,
    declared: Vec<Declared>,
    adopt: Vec<(Owner, CpuSet)>,
    inbox: mpsc::Receiver<Command>,
    wake: Arc<EventFd>,
    waiting: Vec<Waiting>,
    attach_at_ns: Option<u64>,
    tick_ns: u64,
    next_tick_ns: u64,
    quiet_until_ns: u64,
    /// Departures that led to nothing are looked at more and more rarely: an audited owner may depart for hours.
    ring_quiet: Quiet,
}

/// A pause that doubles from 100 ms to 1 s while nothing comes of it.
#[derive(Debug, Default)]
struct Quiet {
    pause_ns: u64,
    until_ns: u64,
}

impl Quiet {
    fn after(&mut self, idle: bool, now: u64) {
        const FIRST_NS: u64 = 100_000_000;
        self.pause_ns = if idle { (self.pause_ns * 2).clamp(FIRST_NS, 10 * FIRST_NS) } else { 0 };
        self.until_ns = now.saturating_add(self.pause_ns);
    }
}

impl Agent {
    /// The agent and the way to talk to it.
    pub fn new(prepared: Prepared, tick: Duration) -> Result<(Self, Mailbox), nix::Error> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_value_and_flags(0, flags)?);
        let (sender, inbox) = mpsc::channel();
        for note in &prepared.notes {
            tracing::warn!("{note}");
        }
        let agent = Self {
            engine: prepared.engine,
            findings: prepared.findings,
            _host: prepared.host,
            about: prepared.about,
            lookout: prepared.lookout,
            notify: Notify::default(),
            declared: prepared.declared,
            adopt: prepared.adopt,
            inbox,
            wake: wake.clone(),
            waiting: Vec::new(),
            attach_at_ns: None,
            tick_ns: u64::try_from(tick.as_nanos()).unwrap_or(u64::MAX),
            next_tick_ns: 0,
            quiet_until_ns: 0,
            ring_quiet: Quiet::default(),
        };
        Ok((agent, Mailbox { sender, wake }))
    }

    /// Runs until [`Command::Stop`] or until every mailbox is gone. Pins stay as they are (I9).
    pub fn run(mut self) {
        for found in std::mem::take(&mut self.findings) {
            self.engine.drive(Event::Found(found));
        }
        self.engine.drive(Event::Started);
        self.engine.look_at_tree();
        if !self.take_over() {
            return; // an empty table would give away CPUs that pods run on
        }
        self.declare();
        self.next_tick_ns = now_ns().saturating_add(self.tick_ns);
        // Every event above was taken to its end: what could be made as it should be is.
        self.notify.say(&format!("READY=1\n{}", self.status_line()));
        loop {
            self.notify.alive(now_ns());
            self.wait();
            let mut pods = Vec::new();
            loop {
                match self.inbox.try_recv() {
                    Ok(Command::Stop) | Err(mpsc::TryRecvError::Disconnected) => {
                        return self.notify.say("STOPPING=1\nSTATUS=stopping; every pin stays");
                    }
                    // Pods that came together share a save.
                    Ok(Command::Call(Call::AdmitPod(pod), reply)) => pods.push((*pod, reply)),
                    Ok(command) => {
                        self.admit_pods(mem::take(&mut pods));
                        self.command(command);
                    }
                    Err(mpsc::TryRecvError::Empty) => break,
                }
            }
            self.admit_pods(pods);
            self.engine.hear_names();
            self.gather();
            self.due();
        }
    }

    fn admit_pods(&mut self, pods: Vec<(Pod, oneshot::Sender<Outcome>)>) {
        if pods.is_empty() {
            return;
        }
        let (pods, replies): (Vec<_>, Vec<_>) = pods.into_iter().unzip();
        for (outcome, reply) in
            calls::admit_pods(&mut self.engine, &self.about, pods).into_iter().zip(replies)
        {
            drop(reply.send(outcome)); // a client that went away needs no answer
        }
    }

    fn gather(&mut self) {
        let now = now_ns();
        if now < self.quiet_until_ns {
            return;
        }
        let gathered = self.engine.gather(now >= self.ring_quiet.until_ns);
        let now = now_ns();
        if gathered != Gathered::Nothing {
            self.quiet_until_ns = now.saturating_add(COALESCE_NS);
            self.ring_quiet.after(gathered == Gathered::IdleDepartures, now);
        }
    }

    /// Until something is to do.
    fn wait(&mut self) {
        let now = now_ns();
        let coalescing = now < self.quiet_until_ns;
        let deadlines = [
            Some(self.next_tick_ns),
            self.engine.state.next_deadline(),
            self.waiting.iter().map(|w| w.due_ns).min(),
            self.attach_at_ns,
            self.notify.due_ns(),
            self.engine.cri().and_then(Cri::due_ns),
            coalescing.then_some(self.quiet_until_ns),
            (now < self.ring_quiet.until_ns).then_some(self.ring_quiet.until_ns),
            self.engine.has_news().then_some(self.quiet_until_ns),
        ];
        let next = deadlines.into_iter().flatten().min().unwrap_or(u64::MAX);
        let millis = next.saturating_sub(now).div_ceil(1_000_000).min(60_000);
        let timeout =
            PollTimeout::try_from(i32::try_from(millis).unwrap_or(60_000)).unwrap_or(PollTimeout::ZERO);
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.engine.cri().map(|c| PollFd::new(c.as_fd(), PollFlags::POLLIN)));
        if !coalescing {
            fds.extend(
                self.engine
                    .hotplug
                    .iter()
                    .flat_map(Hotplug::fds)
                    .map(|fd| PollFd::new(fd, PollFlags::POLLIN)),
            );
            let reports = [
                self.engine.watch.as_ref().map(AsFd::as_fd),
                self.engine.writers.fd(),
                self.engine
                    .collector
                    .probe
                    .as_ref()
                    .filter(|_| now >= self.ring_quiet.until_ns)
                    .map(AsFd::as_fd),
            ];
            fds.extend(reports.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => {
                tracing::error!("poll: {error}");
                std::thread::sleep(Duration::from_millis(100)); // not a busy loop, whatever it is
            }
        }
        let _ = self.wake.read();
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Call(Call::Verdicts { owner, for_ms: Some(ms) }, reply) => {
                self.waiting.retain(|w| !w.reply.is_closed());
                if ms > MAX_WINDOW_MS || self.waiting.len() >= MAX_WAITING {
                    let what =
                        format!("at most {MAX_WAITING} windows at a time, of at most {MAX_WINDOW_MS} ms");
                    return drop(reply.send(Err(problem(429, "too-much", what, None))));
                }
                match calls::base(&mut self.engine) {
                    Ok(from) => {
                        let due_ns = now_ns().saturating_add(ms.saturating_mul(1_000_000));
                        self.waiting.push(Waiting { due_ns, owner, from, reply });
                    }
                    Err(problem) => drop(reply.send(Err(problem))),
                }
            }
            // A client that went away needs no answer.
            Command::Call(call, reply) => {
                let released = match &call {
                    Call::Release(owner) => Some(owner.clone()),
                    _ => None,
                };
                drop(reply.send(calls::answer(&mut self.engine, &self.about, call)));
                // What somebody took from a declared owner stays taken until the agent starts anew.
                if let Some(owner) = released {
                    let of = |d: &&mut Declared| owner.as_ref().is_none_or(|o| *o == d.owner);
                    self.declared.iter_mut().filter(of).for_each(|d| d.released = true);
                }
            }
            Command::DetachSwitch(time) => {
                if let Some(probe) = &mut self.engine.collector.probe {
                    tracing::warn!("fault injection: the switch program is detached for {time:?}");
                    probe.detach_switch();
                    let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                    self.attach_at_ns = Some(now_ns().saturating_add(ns));
                }
            }
            Command::Stop => {}
        }
    }

    /// What time has come for.
    fn due(&mut self) {
        let now = now_ns();
        if self.attach_at_ns.is_some_and(|at| now >= at) {
            self.attach_at_ns = None;
            if let Some(probe) = &mut self.engine.collector.probe
                && let Err(error) = probe.attach_switch()
            {
                tracing::error!("{}", chain(&error));
            }
        }
        for waiting in self.waiting.extract_if(.., |w| now >= w.due_ns).collect::<Vec<_>>() {
            let outcome =
                calls::verdicts(&mut self.engine, &self.about, waiting.owner.as_ref(), Some(&waiting.from));
            drop(waiting.reply.send(outcome));
        }
        if self.engine.state.next_deadline().is_some_and(|at| now >= at) {
            self.engine.drive(Event::Disturbed { writes: Vec::new(), departures: Vec::new() });
        }
        if self.engine.cri().and_then(Cri::due_ns).is_some_and(|at| now >= at) {
            self.engine.look_at_tree();
        }
        if now >= self.next_tick_ns {
            self.next_tick_ns = now.saturating_add(self.tick_ns);
            self.engine.drive(Event::Disturbed { writes: Vec::new(), departures: Vec::new() });
            self.engine.look_at_tree();
            if let Some(rival) = self.lookout.as_mut().and_then(Lookout::look) {
                let text = format!(
                    "a kubelet with the static policy (pid {}) gives out this node's CPUs too: {}; set cpuManagerPolicy: none, or stop this agent and start it with --mode migrate or audit",
                    rival.pid, rival.says
                );
                self.engine.drive(Event::Found(FindingKind::Rival(text)));
            }
            self.engine.tick();
            self.declare();
            self.notify.say(&self.status_line());
        }
    }

    /// For `systemctl status`.
    fn status_line(&self) -> String {
        let (state, waiting) = (&self.engine.state, self.about.unmet.len());
        let held = state.assignments.owners.len();
        let settled = if state.is_settled() { "all as wanted" } else { "not all as wanted: truepin status" };
        let waiting = if waiting == 0 { String::new() } else { format!(", {waiting} declared without CPUs") };
        format!("STATUS={held} owners, {settled}{waiting}")
    }

    /// What another manager has given out, before anybody else gets CPUs; false when it could not be had. Its containers were just found in the tree.
    fn take_over(&mut self) -> bool {
        let owners = mem::take(&mut self.adopt);
        if owners.is_empty() {
            return true;
        }
        let count = owners.len();
        match self.engine.ask(|ticket| Event::Adopt { ticket, owners }) {
            Answer::Pod(_) => {
                tracing::info!("{count} assignments are taken over; no task was moved");
                return true;
            }
            Answer::Refused(error) => tracing::error!("nothing was taken over: {}", chain(&error)),
            other => tracing::error!("nothing was taken over: {other:?}"),
        }
        false
    }

    /// Admits declared owners that are not there yet and whose cgroup is.
    fn declare(&mut self) {
        for d in &mut self.declared {
            let held = self.engine.state.assignments.owners.contains_key(&d.owner);
            if held || d.released {
                d.refused = None;
                continue;
            }
            let dir = self.engine.kernel.dir(&d.path);
            if !dir.exists() {
                let why = format!("{} does not exist", dir.display());
                if d.refused.as_ref() != Some(&why) {
                    tracing::warn!("{} waits: {why}", d.owner);
                }
                d.refused = Some(why);
                continue;
            }
            let numa = self.about.numa;
            let why = match self.engine.ask(|ticket| d.admission(ticket, numa)) {
                Answer::Assigned(..) => None,
                Answer::Refused(error) => Some(chain(&error)),
                other => Some(format!("{other:?}")),
            };
            // Tried at every tick, said when it changes.
            if let Some(why) = &why
                && d.refused.as_ref() != Some(why)
            {
                tracing::warn!("{} was not admitted: {why}", d.owner);
            }
            d.refused = why;
        }
        let unmet = |d: &Declared| {
            let cpus = match &d.cpus {
                Reserve::Cpus(cpus) => cpus.clone(),
                Reserve::Count(_) => CpuSet::new(),
            };
            Some(Unmet { owner: d.owner.clone(), path: d.path.clone(), cpus, why: d.refused.clone()? })
        };
        self.about.unmet = self.declared.iter().filter_map(unmet).collect();
    }
}

/// Asks the agent behind `mailbox` and waits.
pub fn ask(mailbox: &Mailbox, call: Call) -> Outcome {
    let (reply, answer) = oneshot::channel();
    let gone = || problem(503, "unavailable", Ended.to_string(), None);
    mailbox.send(Command::Call(call, reply)).map_err(|_| gone())?;
    answer.blocking_recv().unwrap_or_else(|_| Err(gone()))
}
