//! A crash at every step of random plans, and what a restart makes of it.
//!
//! A history is a random machine and some things that happen on it. Each of them runs once undisturbed; then, for
//! every `Kernel::apply` in it (before and after) and every operation of every save (write, fsync, renames, fsync of the
//! directory; before and after), once more from the same beginning with a crash there. A new agent then starts from
//! what was durable and must bring everything in order, with I1 to I4 after every single write on the way.
//!
//! Within a save the agent dies alone, and also with the power of the disk: then every rename that was not synced is
//! there or not, independently of the others, and content that was not synced is torn. After that the agent starts
//! once on the cgroups as they were (stricter than any machine: there, nothing may rest on what was lost), and once
//! after a boot, on those that the machine began with.
//!
//! `TRUEPIN_CRASH_HISTORIES` (default 700) and `TRUEPIN_CRASH_SEED` (default 1, of the first history) choose others;
//! a failure prints its seed, and `TRUEPIN_CRASH_HISTORIES=1 TRUEPIN_CRASH_SEED=n` runs that one alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use truepin::{
    CgroupPath, CpusetFile, Owner,
    assignments::{Assignment, Assignments},
    observed::Step,
    reconcile::Answer,
};
use truepin_tests::{
    fake::{FakeKernel, Fault, Model, mask_changes, masks},
    sim::{
        Crashed, Death as DiskDeath, DiskFault, DiskTally, Loss, Setup, Sim,
        history::{Op, Rng, next_op, world},
    },
};

const MINUTE: u64 = 60_000_000_000;

/// Where the agent dies.
#[derive(Debug, Clone, Copy)]
enum Death {
    BeforeStep(u64),
    AfterStep(u64),
    InSave(u64, DiskDeath),
}

#[derive(Debug, Default, Clone)]
struct Tally {
    histories: u64,
    events: u64,
    /// Events with at least one kernel step.
    plans: u64,
    steps: u64,
    saves: u64,
    crashes: u64,
    /// Those within a save.
    disk_crashes: u64,
    /// Starts after a boot.
    boots: u64,
    disk: DiskTally,
    /// Steps that the restarted agents made.
    recovery_steps: u64,
    hostile: u64,
    /// Events after which the slice is a partition, for local ones below it.
    local: u64,
    /// And crashes after which a new agent had to bring it in order.
    local_crashes: u64,
    /// Events after which somebody has an isolated partition.
    isolated: u64,
    admitted: u64,
    refused: u64,
    released: u64,
}

impl Tally {
    fn add(&mut self, o: &Self) {
        self.histories += o.histories;
        self.events += o.events;
        self.plans += o.plans;
        self.steps += o.steps;
        self.saves += o.saves;
        self.crashes += o.crashes;
        self.disk_crashes += o.disk_crashes;
        self.boots += o.boots;
        self.disk.losses += o.disk.losses;
        self.disk.names_lost += o.disk.names_lost;
        self.disk.torn += o.disk.torn;
        self.disk.previous_used += o.disk.previous_used;
        self.recovery_steps += o.recovery_steps;
        self.hostile += o.hostile;
        self.local += o.local;
        self.local_crashes += o.local_crashes;
        self.isolated += o.isolated;
        self.admitted += o.admitted;
        self.refused += o.refused;
        self.released += o.released;
    }
}

struct History {
    seed: u64,
    tally: Tally,
    /// The machine as it is after a boot.
    booted: Option<FakeKernel>,
    /// For losses of power, so that the history itself does not depend on them.
    losses: Rng,
    /// Whether to keep a log: only of a history that has failed, in a second run.
    logged: bool,
}

impl History {
    fn new(seed: u64, logged: bool) -> Self {
        Self { seed, tally: Tally::default(), booted: None, losses: Rng::new(!seed), logged }
    }

    fn fail(&self, sim: &Sim, where_: &str, wrong: &[String]) -> ! {
        let mut text = format!("seed {}, {where_}:\n", self.seed);
        for w in wrong {
            let _ = writeln!(text, "  {w}");
        }
        for line in sim.eyes.log.iter().flatten() {
            let _ = writeln!(text, "{line}");
        }
        panic!("{text}");
    }

    fn run(&mut self) {
        let mut rng = Rng::new(self.seed);
        let (setup, kernel): (Setup, FakeKernel) = world(&mut rng);
        self.booted = Some(kernel.clone());
        let mut sim = Sim::new(setup, kernel);
        sim.eyes.log = self.logged.then(Vec::new);
        self.check(&mut sim, "at the start");
        for _ in 0..3 + rng.below(4) {
            // Past the minute of the fight rule: fights have tests of their own.
            sim.wait(MINUTE + 1);
            let op = next_op(&mut rng, &sim);
            self.event(&mut sim, &op);
        }
        self.everything_back(&sim, "at the end");
        self.tally.histories += 1;
    }

    fn event(&mut self, sim: &mut Sim, op: &Op) {
        let before = sim.clone();
        let bystanders = self.undisturbed(sim, op);
        let steps = sim.eyes.kernel().applies() - before.eyes.kernel().applies();
        let ops = sim.disk.ops(before.disk.saves()).to_vec();
        let saves = sim.disk.saves() - before.disk.saves();
        self.tally.events += 1;
        self.tally.plans += u64::from(steps > 0);
        self.tally.steps += steps;
        self.tally.saves += saves;
        self.tally.hostile += u64::from(op.is_hostile());
        let (local, isolated) = partitions(sim);
        self.tally.local += u64::from(local);
        self.tally.isolated += u64::from(isolated);
        let mut deaths: Vec<Death> =
            (0..steps).flat_map(|n| [Death::BeforeStep(n), Death::AfterStep(n)]).collect();
        for (nth, ops) in ops.into_iter().enumerate() {
            // After one operation is before the next.
            let before = (0..ops).map(|op| (op, false));
            for (op, after) in before.chain(ops.checked_sub(1).map(|last| (last, true))) {
                for loss in [Loss::Nothing, Loss::Power(self.losses.draw())] {
                    deaths.push(Death::InSave(nth as u64, DiskDeath { op, after, loss }));
                }
            }
        }
        for death in deaths {
            self.crash(&before, op, &bystanders, death);
        }
    }

    /// The event without a crash. Cgroups of owners whom it does not concern.
    fn undisturbed(&mut self, sim: &mut Sim, op: &Op) -> Vec<CgroupPath> {
        let before = sim.clone();
        // Without knowing yet who is concerned: once to find out, once to watch those who are not.
        let mut trial = sim.clone();
        if op.happen(&mut trial).is_err() {
            self.fail(&trial, "without a crash on order", &["crashed".into()]);
        }
        let same = |(o, a): &(&Owner, &Assignment)| trial.state.assignments.owners.get(*o) == Some(*a);
        let bystanders: Vec<CgroupPath> = if op.is_hostile() || matches!(op, Op::End(_) | Op::Vanish(_)) {
            Vec::new()
        } else {
            before.state.assignments.owners.iter().filter(same).map(|(_, a)| a.cgroup.clone()).collect()
        };
        sim.eyes.hold_still(&bystanders);
        let _ = op.happen(sim);
        self.check(sim, &format!("after {op:?}"));
        sim.eyes.hold_still(&[]);
        match sim.answers.last() {
            Some((_, Answer::Assigned(..))) => self.tally.admitted += 1,
            Some((_, Answer::Refused(_))) => self.tally.refused += 1,
            Some((_, Answer::Released(_))) => self.tally.released += 1,
            _ => {}
        }
        sim.answers.clear();
        self.restart_moves_nothing(sim);
        bystanders
    }

    /// I9: a restart alone.
    fn restart_moves_nothing(&self, sim: &Sim) {
        let mut sim = sim.clone();
        // A file that was left alone for a minute is tried again, by a new agent at once.
        let left_alone = !sim.state.is_settled();
        let before = (masks(sim.eyes.kernel()), sim.eyes.steps.len(), sim.disk.saves());
        let table = sim.state.assignments.clone();
        let _ = sim.restart();
        let mut wrong = sim.unsettled();
        wrong.extend(mask_changes(&before.0, &masks(sim.eyes.kernel())).iter().map(|c| format!("I9: {c:?}")));
        if !left_alone {
            let wrote = sim.eyes.steps[before.1..].iter();
            wrong.extend(wrote.map(|s| format!("a restart wrote {}", s.shell(""))));
        }
        if !left_alone && sim.disk.saves() != before.2 {
            wrong.push("a restart saved".into());
        }
        if sim.state.assignments != table {
            wrong.push("a restart changed the table".into());
        }
        if !wrong.is_empty() {
            self.fail(&sim, "a restart when nothing had changed", &wrong);
        }
    }

    fn crash(&mut self, before: &Sim, op: &Op, bystanders: &[CgroupPath], death: Death) {
        let mut sim = before.clone();
        sim.eyes.hold_still(bystanders);
        match death {
            Death::BeforeStep(n) => sim.eyes.others(|k| k.fault(n, Fault::CrashBefore)),
            Death::AfterStep(n) => sim.eyes.others(|k| k.fault(n, Fault::CrashAfter)),
            Death::InSave(n, death) => sim.disk.fault(n, DiskFault::Dies(death)),
        }
        let disk = sim.disk.tally;
        if op.happen(&mut sim).is_ok() {
            self.fail(&sim, &format!("{op:?} with {death:?}"), &["did not crash".into()]);
        }
        self.tally.crashes += 1;
        self.tally.local_crashes += u64::from(partitions(&sim).0);
        self.tally.disk_crashes += u64::from(matches!(death, Death::InSave(..)));
        let mut wrong = Vec::new();
        let (epoch, acknowledged) = (sim.disk.record().map(|r| r.epoch), sim.disk.acknowledged());
        if epoch < acknowledged {
            wrong.push(format!("epoch {epoch:?} is on record, and {acknowledged:?} was acknowledged"));
        }
        let durable = sim.disk.record().map(|r| r.assignments.clone()).unwrap_or_default();
        // What the event does not release is still on record.
        for (owner, promise) in &before.state.assignments.promised {
            if !op.releases(owner, None) && durable.cpus_of(owner) != Some(&promise.cpus) {
                wrong.push(format!("lost from the record: {owner}, promised"));
            }
        }
        for (owner, held) in &before.state.assignments.owners {
            let released = op.releases(owner, Some(&held.cgroup));
            let moves = matches!(op, Op::Made { owner: o, .. } if o == owner);
            let kept = |d: &Assignment| d.cpus == held.cpus && (moves || d.cgroup == held.cgroup);
            if !released && !durable.owners.get(owner).is_some_and(kept) {
                wrong.push(format!("lost from the record: {owner}"));
            }
        }
        let what = format!("{op:?} with {death:?}");
        if let (Death::InSave(_, DiskDeath { loss: Loss::Power(_), .. }), Some(kernel)) =
            (death, &self.booted)
        {
            let mut booted = sim.clone();
            booted.eyes.others(|k| *k = kernel.clone());
            booted.eyes.steps.clear();
            self.tally.boots += 1;
            let kernel = kernel.clone();
            self.recover(&mut booted, &durable, wrong.clone(), &format!("{what}, booted"), |s| {
                s.reboot(kernel)
            });
        }
        self.recover(&mut sim, &durable, wrong, &what, Sim::restart);
        let now = sim.disk.tally;
        self.tally.disk.losses += now.losses - disk.losses;
        self.tally.disk.names_lost += now.names_lost - disk.names_lost;
        self.tally.disk.torn += now.torn - disk.torn;
        self.tally.disk.previous_used += now.previous_used - disk.previous_used;
    }

    /// A new agent starts, with `durable` on record.
    fn recover(
        &mut self,
        sim: &mut Sim,
        durable: &Assignments,
        mut wrong: Vec<String>,
        what: &str,
        start: impl FnOnce(&mut Sim) -> Result<(), Crashed>,
    ) {
        // A process that an admission was to bring dies with its command; one that had entered lives on.
        let gone: BTreeSet<&Owner> = durable
            .owners
            .iter()
            .filter(|(o, a)| {
                let k = sim.eyes.kernel();
                let lives = k.threads().any(|t| k.cgroup_of(t).is_some_and(|c| c.is_within(&a.cgroup)));
                k.id(&a.cgroup).is_none() || matches!(o, Owner::Run(_)) && !lives
            })
            .map(|(o, _)| o)
            .collect();
        let at = sim.eyes.steps.len();
        if start(sim).is_err() {
            wrong.push("crashed again".into());
        }
        wrong.extend(sim.unsettled());
        for (owner, promise) in &durable.promised {
            if sim.state.assignments.cpus_of(owner) != Some(&promise.cpus) {
                wrong.push(format!("{owner}: promised {}, and lost", promise.cpus));
            }
        }
        for (owner, held) in &durable.owners {
            let now = sim.state.assignments.owners.get(owner);
            let kept = now.is_some_and(|n| n.cpus == held.cpus && n.cgroup == held.cgroup);
            if kept == gone.contains(owner) {
                wrong.push(format!("{owner}: durable {held:?}, now {now:?}"));
            }
        }
        if sim.state.assignments.sets().any(|(o, _)| durable.cpus_of(o).is_none()) {
            wrong.push("an owner came from nowhere".into());
        }
        self.tally.recovery_steps += sim.eyes.steps.len().saturating_sub(at) as u64;
        if !wrong.is_empty() {
            self.fail(sim, what, &wrong);
        }
        sim.eyes.hold_still(&[]);
        self.quiet(sim, what);
        if self.tally.crashes.is_multiple_of(3) {
            self.everything_back(sim, &format!("{what}, then all released"));
        }
    }

    fn check(&self, sim: &mut Sim, where_: &str) {
        let wrong = sim.unsettled();
        if !wrong.is_empty() {
            self.fail(sim, where_, &wrong);
        }
        self.quiet(sim, where_);
    }

    /// Looking again changes nothing.
    fn quiet(&self, sim: &mut Sim, where_: &str) {
        let before = (sim.eyes.steps.len(), sim.disk.saves(), sim.reports.len());
        let _ = sim.tick();
        let mut wrong: Vec<String> =
            sim.eyes.steps[before.0..].iter().map(|s: &Step| format!("wrote {}", s.shell(""))).collect();
        wrong.extend(sim.reports[before.2..].iter().map(|f| format!("reported {}", f.kind)));
        if sim.disk.saves() != before.1 {
            wrong.push("saved".into());
        }
        wrong.append(&mut sim.faults);
        if !wrong.is_empty() {
            self.fail(sim, &format!("{where_}: a look at nothing new"), &wrong);
        }
    }

    /// `release --all`.
    fn everything_back(&self, sim: &Sim, where_: &str) {
        let mut sim = sim.clone();
        let answer = sim.release(None);
        let mut wrong = sim.unsettled();
        if !matches!(answer, Ok(Answer::Released(_))) {
            wrong.push(format!("answered {answer:?}"));
        }
        if !sim.state.assignments.owners.is_empty() {
            wrong.push("somebody still holds CPUs".into());
        }
        wrong.extend(sim.eyes.not_put_back(sim.eyes.kernel().behaviour().model != Model::Lax));
        if !wrong.is_empty() {
            self.fail(&sim, where_, &wrong);
        }
    }
}

/// Whether the slice is a partition, and whether any is isolated.
fn partitions(sim: &Sim) -> (bool, bool) {
    let kernel = sim.eyes.kernel();
    let state = |p: &CgroupPath| sim.eyes.text(p, CpusetFile::Partition);
    let slice = &sim.setup.settings.slice;
    (state(slice) == "root", kernel.cgroups().any(|p| state(p) == "isolated"))
}

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{name}={text:?}: {e}")),
        Err(_) => default,
    }
}

#[test]
fn a_crash_at_every_step() {
    let (count, first) = (number("TRUEPIN_CRASH_HISTORIES", 700), number("TRUEPIN_CRASH_SEED", 1));
    let (next, failed) = (AtomicU64::new(first), AtomicBool::new(false));
    let total = Mutex::new(Tally::default());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    let mut history = History::new(seed, false);
                    let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| history.run()));
                    if run.is_err() {
                        failed.store(true, Ordering::Relaxed);
                        History::new(seed, true).run();
                    }
                    total.lock().unwrap().add(&history.tally);
                }
            });
        }
    });
    let t = total.into_inner().unwrap();
    println!(
        "seeds {first} to {}: {} histories, {} events ({} hostile; {} with local partitions and {} with isolated ones; {} \
         admitted, {} refused, {} released), {} plans, {} kernel steps, {} saves, {} crash points ({} within a save, {} with local partitions), {} starts after a boot, {} steps of recovery; \
         {} losses of power with something unsynced: {} names lost, {} files torn, {} starts from the previous generation",
        first + count - 1,
        t.histories,
        t.events,
        t.hostile,
        t.local,
        t.isolated,
        t.admitted,
        t.refused,
        t.released,
        t.plans,
        t.steps,
        t.saves,
        t.crashes,
        t.disk_crashes,
        t.local_crashes,
        t.boots,
        t.recovery_steps,
        t.disk.losses,
        t.disk.names_lost,
        t.disk.torn,
        t.disk.previous_used
    );
    assert_eq!(t.histories, count);
    assert!(count < 700 || t.plans >= 1000 && t.crashes > t.plans, "too little was tried: {t:?}");
    assert!(
        count < 700 || t.local >= 100 && t.local_crashes >= 1000 && t.isolated >= 100,
        "too little: {t:?}"
    );
    assert!(count < 700 || t.steps >= 10_000 && t.disk.names_lost >= 3_000, "too little was tried: {t:?}");
}
