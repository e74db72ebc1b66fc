//! Storms of hotplug on the fake kernel, on every behaviour, with ten owners of mixed sizes and modes on sixteen CPUs.
//!
//! CPUs go and come one by one and in bursts, faster than they are answered and slower; reports are lost or never sent;
//! the agent looks at other things in between, is killed and started again. After every single write I1 to I4 hold
//! ([`truepin_tests::sim::Eyes`]); whenever all is quiet nothing is left to do, no mask is wrong, and an owner lacks a
//! CPU only if none is free. Every move replaces a CPU that is lost at that moment, one for one: fewer are not possible.
//! For some of the storms' changes the agent dies at every write and every save, before and after.
//!
//! `TRUEPIN_STORM_EVENTS` (default 1000, for each behaviour and seed) and `TRUEPIN_STORM_SEED` choose others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

use std::collections::BTreeMap;
use truepin::{
    CgroupPath, CpuId, CpuSet, CpuTopology, NodeSet, Owner,
    assignments::{Assignments, Mode},
    plan::Problem,
    reconcile::{Answer, Event, FindingKind, HotplugReport},
    request::Isolation,
    topology::synthetic::{Numbering, Regular},
    verdict::Judgement,
};
use truepin_tests::{
    fake::{Activity, Behaviour, Enforced, FakeKernel, Fault, TaskTraits, leaks, stale_masks},
    sim::{Death, DiskFault, Loss, Setup, Sim, Wish, history::Rng},
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

/// Two packages of two nodes of two cores of two threads; 0-1 reserved.
fn machine(behaviour: Behaviour) -> (Setup, FakeKernel) {
    let regular =
        Regular { packages: 2, nodes: 2, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent };
    let topology = CpuTopology::assemble(&regular.raw()).unwrap();
    let nodes: NodeSet = topology.nodes().iter().map(|n| n.id).collect();
    let mut kernel = FakeKernel::new(behaviour, cpus("0-15"), nodes);
    kernel.write_file(&CgroupPath::root(), "cgroup.subtree_control", "+cpuset").unwrap();
    for path in ["system.slice", "system.slice/a", "system.slice/b", "user.slice", "top"] {
        kernel.mkdir(&p(path)).unwrap();
        if path == "system.slice" {
            kernel.write_file(&p(path), "cgroup.subtree_control", "+cpuset").unwrap();
        } else {
            kernel.spawn(&p(path), 2, TaskTraits::default()).unwrap();
        }
    }
    let mut setup = Setup::plain(topology, cpus("0-1"), behaviour.exclusive_file);
    setup.facts.partition = true;
    (setup, kernel)
}

#[derive(Debug, Default)]
struct Tally {
    events: u64,
    refused: u64,
    rests: u64,
    moves: usize,
    degraded: u64,
    rebuilt: u64,
    rewritten: u64,
    crashes: u64,
    steps: usize,
}

struct Storm {
    sim: Sim,
    rng: Rng,
    sizes: BTreeMap<Owner, usize>,
    /// Who had a CPU offline since its last fresh assignment, or may have had.
    touched: BTreeMap<Owner, bool>,
    tally: Tally,
    what: String,
}

impl Storm {
    fn new(behaviour: Behaviour, seed: u64, logged: bool) -> Self {
        let mut rng = Rng::new(seed);
        let (setup, kernel) = machine(behaviour);
        let mut sim = Sim::new(setup, kernel);
        sim.eyes.log = logged.then(Vec::new);
        let mut storm = Self {
            sizes: BTreeMap::new(),
            touched: BTreeMap::new(),
            tally: Tally::default(),
            what: format!("{:?}, seed {seed}", behaviour.model),
            sim,
            rng: Rng::new(!seed),
        };
        // Twelve of fourteen CPUs.
        let mut sizes = vec![1, 1, 1, 1, 1, 1, 1, 1, 2, 2];
        for n in (1..sizes.len()).rev() {
            sizes.swap(n, rng.below(n + 1));
        }
        for (n, size) in sizes.into_iter().enumerate() {
            // One at the top is a local partition, one deep down a remote one of somebody else's cgroup.
            let owner: Owner = match n {
                0 => "cgroup/top".parse().unwrap(),
                1 => "cgroup/system.slice/a".parse().unwrap(),
                _ => format!("run/o{n}").parse().unwrap(),
            };
            let isolation = match n % 3 {
                2 => Isolation::Member,
                // Others' cgroups cannot be partitions where there is no explicit list.
                _ if behaviour.exclusive_file || n > 1 => Isolation::Partition,
                _ => Isolation::Auto,
            };
            let wish = Wish::new(owner.clone(), size, isolation);
            let answer = storm.sim.admit(&wish).unwrap();
            assert!(matches!(answer, Answer::Assigned(..)), "{}: {answer:?}", storm.what);
            storm.sizes.insert(owner, size as usize);
        }
        for a in storm.sim.state.assignments.owners.clone().into_values() {
            for activity in [Activity::Runs, Activity::Wakes, Activity::Asleep] {
                let traits = TaskTraits { activity, ..TaskTraits::default() };
                storm.sim.eyes.others(|k| k.spawn(&a.cgroup, 1, traits).unwrap());
            }
        }
        storm.quiet();
        storm
    }

    fn fail(&self, wrong: &[String]) -> ! {
        let log = self.sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>();
        let newest = log[log.len().saturating_sub(150)..].join("\n");
        panic!("{}: event {}: {wrong:#?}\n{newest}", self.what, self.tally.events);
    }

    fn table(&self) -> Assignments {
        self.sim.state.assignments.clone()
    }

    /// What happens, watched: every change of the table replaces what is lost, and nothing else.
    fn watched(&mut self, act: impl FnOnce(&mut Sim)) {
        let (before, reports) = (self.table(), self.sim.reports.len());
        act(&mut self.sim);
        let wrong = std::mem::take(&mut self.sim.eyes.breaches);
        if !wrong.is_empty() {
            self.fail(&wrong);
        }
        // One look can move an owner, the next one again.
        let mut sets: BTreeMap<Owner, CpuSet> = before.sets().map(|(o, s)| (o.clone(), s.clone())).collect();
        for f in &self.sim.reports[reports..] {
            match &f.kind {
                FindingKind::Refitted(r) => {
                    let (lost, got) = (r.from.difference(&r.to), r.to.difference(&r.from));
                    let set = sets.insert(r.owner.clone(), r.to.clone());
                    let sound = set.as_ref() == Some(&r.from)
                        && lost.len() == got.len()
                        && lost.is_subset(&r.lost)
                        && got.is_disjoint(&before.reserved);
                    if !sound {
                        self.fail(&[format!("{set:?}: {r:?}")]);
                    }
                    self.tally.moves += got.len();
                }
                FindingKind::Mending { how: truepin::reconcile::Mend::Rebuild, .. } => {
                    self.tally.rebuilt += 1;
                }
                FindingKind::Mending { .. } => self.tally.rewritten += 1,
                FindingKind::Problem(Problem::Degraded { .. }) => self.tally.degraded += 1,
                FindingKind::Broken(_) => self.fail(&[f.kind.to_string()]),
                _ => {}
            }
        }
        if !sets.iter().eq(self.table().sets()) {
            self.fail(&["a set changed and nobody was told".into()]);
        }
    }

    fn switch(&mut self, cpu: CpuId, online: bool) {
        self.tally.events += 1;
        let roll = self.rng.below(100);
        if !online {
            for (owner, set) in self.table().sets() {
                if set.contains(cpu) || roll < 3 {
                    self.touched.insert(owner.clone(), true);
                }
            }
        }
        let mut refused = 0;
        self.watched(|sim| match roll {
            // The kernel had to drop it, or nobody listens.
            0..3 => {
                refused += u64::from(sim.eyes.others(|k| k.set_online(cpu, online)).is_err());
                sim.at_once(Event::Hotplug(HotplugReport { lost: true, ..HotplugReport::default() }))
                    .unwrap();
            }
            _ => refused += sim.switch(&[(cpu, online)]).unwrap().len() as u64,
        });
        self.tally.refused += refused;
    }

    /// Everything that must be true when all is quiet.
    fn quiet(&mut self) {
        self.tally.rests += 1;
        self.watched(|sim| sim.rest().unwrap());
        let mut wrong = self.sim.unsettled();
        let state = &self.sim.state;
        let table = self.table();
        let online = self.sim.eyes.kernel().online().clone();
        let mut all = CpuSet::new();
        for (owner, set) in table.sets() {
            if Some(&set.len()) != self.sizes.get(owner) || !set.is_disjoint(&all) {
                wrong.push(format!("{owner} has {set}"));
            }
            all |= set;
        }
        // Whoever lacks a CPU is told so, and nothing is free for it.
        let free = online.difference(&all).difference(&table.reserved);
        for (owner, set) in table.sets() {
            let lacks = !set.is_subset(&online);
            if lacks != state.degraded(owner).is_some() {
                wrong.push(format!("{owner} has {set}: degraded is {:?}", state.degraded(owner)));
            }
            if lacks && !free.is_empty() {
                wrong.push(format!("{owner} lacks {} and {free} are free", set.difference(&online)));
            }
        }
        let enforced = |mode| if mode == Mode::Member { Enforced::Member } else { Enforced::Partition };
        let served = table.owners.values().filter(|a| !a.cpus.is_disjoint(&online));
        let owners: Vec<_> = served.map(|a| (a.cgroup.clone(), enforced(a.mode))).collect();
        let kernel = self.sim.eyes.kernel();
        wrong.extend(leaks(kernel, &owners));
        wrong.extend(
            stale_masks(kernel)
                .iter()
                .map(|(t, set)| format!("task {t} is allowed on {set} beyond its cpuset")),
        );
        let open = |f: &&truepin::reconcile::Finding| {
            matches!(f.kind, FindingKind::Mending { .. }) && f.mended.is_none()
        };
        wrong.extend(state.findings().filter(open).map(|f| format!("not mended: {}", f.kind)));
        if !wrong.is_empty() {
            self.fail(&wrong);
        }
    }

    /// The agent dies at every write and every save of what follows from a burst, and starts again.
    fn crashes(&mut self, burst: &[(CpuId, bool)]) {
        let play = |sim: &mut Sim| sim.switch(burst).and_then(|_| sim.rest());
        let mut whole = self.sim.clone();
        let before = (whole.eyes.kernel().applies(), whole.disk.saves());
        play(&mut whole).unwrap();
        let steps = whole.eyes.kernel().applies() - before.0;
        let saves = whole.disk.ops(before.1).to_vec();
        let mut deaths: Vec<(Option<Fault>, u64, usize)> = Vec::new();
        for n in 0..steps {
            deaths.extend([(Some(Fault::CrashBefore), n, 0), (Some(Fault::CrashAfter), n, 0)]);
        }
        for (n, ops) in saves.into_iter().enumerate() {
            deaths.extend((0..ops).map(|op| (None, n as u64, op)));
        }
        for (fault, n, op) in deaths {
            let mut sim = self.sim.clone();
            match &fault {
                Some(fault) => sim.eyes.others(|k| k.fault(n, fault.clone())),
                None => sim.disk.fault(n, DiskFault::Dies(Death { op, after: false, loss: Loss::Nothing })),
            }
            let what = format!("{burst:?} with {fault:?} at {n} ({op})");
            if play(&mut sim).is_ok() {
                self.fail(&[format!("{what}: did not crash")]);
            }
            self.tally.crashes += 1;
            // What of the burst is still to come happens while nobody is there.
            for (cpu, online) in burst {
                let _ = sim.eyes.others(|k| k.set_online(*cpu, *online));
            }
            sim.restart().unwrap();
            let mut wrong = sim.unsettled();
            for (owner, size) in &self.sizes {
                if sim.state.assignments.cpus_of(owner).map(CpuSet::len) != Some(*size) {
                    wrong.push(format!("{owner} has {:?}", sim.state.assignments.cpus_of(owner)));
                }
            }
            if !wrong.is_empty() {
                std::mem::swap(&mut self.sim, &mut sim);
                wrong.insert(0, what);
                self.fail(&wrong);
            }
        }
    }

    fn burst(&mut self) -> Vec<(CpuId, bool)> {
        let online = self.sim.eyes.kernel().online().clone();
        let count = [1, 1, 2, 3, 4, 6][self.rng.below(6)];
        let mut now = online;
        (0..count)
            .map(|_| {
                let cpu = CpuId(u32::try_from(1 + self.rng.below(15)).unwrap());
                // Rather on than off when few are left.
                let online = !now.contains(cpu) || now.len() < 6 || self.rng.chance(15);
                if online {
                    now.insert(cpu)
                } else {
                    now.remove(cpu)
                };
                (cpu, online)
            })
            .collect()
    }

    fn run(mut self, events: u64) -> Tally {
        while self.tally.events < events {
            let burst = self.burst();
            if self.rng.chance(6) {
                self.quiet();
                self.crashes(&burst);
            }
            for (cpu, online) in burst {
                self.switch(cpu, online);
                let pause = [0, 5, 60, 140][self.rng.below(4)] * MS;
                self.watched(|sim| {
                    sim.wait(pause);
                    if sim.state.hotplug_deadline().is_some_and(|at| at <= sim.now.mono_ns) {
                        sim.at_once(Event::Disturbed { writes: Vec::new(), departures: Vec::new() }).unwrap();
                    }
                });
            }
            match self.rng.below(20) {
                0..12 => self.quiet(),
                12 => self.watched(|sim| drop(sim.ask(|ticket| Event::Inspect { ticket }).unwrap())),
                13 => {
                    // A new agent knows nothing of what was.
                    self.sim.restart().unwrap();
                    self.touched.clear();
                    self.quiet();
                }
                _ => {}
            }
        }
        self.end();
        self.tally
    }

    /// All CPUs are there again, and everybody has as many as he asked for.
    fn end(&mut self) {
        self.quiet();
        let off = cpus("0-15").difference(self.sim.eyes.kernel().online());
        for cpu in off.iter() {
            self.switch(cpu, true);
        }
        self.quiet();
        let evidence = self.sim.evidence().unwrap();
        for owner in self.sizes.keys() {
            let v = self.sim.state.verdict(owner, None, &evidence).unwrap();
            if self.touched.contains_key(owner) && v.judgement == Judgement::Held {
                self.fail(&[format!("{owner} is Held, though a CPU of it was away")]);
            }
        }
        self.sim.wait(10 * SECOND);
        self.sim.tick().unwrap();
        let later = self.sim.evidence().unwrap();
        for owner in self.sizes.keys() {
            let v = self.sim.state.verdict(owner, Some(&evidence), &later).unwrap();
            if v.judgement != Judgement::Held {
                self.fail(&[format!("{owner} afterwards: {:?}", v.reasons)]);
            }
        }
        self.tally.steps = self.sim.eyes.steps.len();
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{name}={text:?}: {e}")))
}

/// Of the storms that are always run. Each but the first has shown a fault that the others do not: a slice that did not
/// list what its owners were given (7), masks that nobody swept after a start and two lists that stuck at once (10).
const SEEDS: [u64; 3] = [1, 7, 10];

fn storm(behaviour: Behaviour) {
    let events = number("TRUEPIN_STORM_EVENTS").unwrap_or(1000);
    let seeds = number("TRUEPIN_STORM_SEED").map_or(SEEDS.to_vec(), |seed| vec![seed]);
    let (mut moves, mut degraded, mut crashes) = (0, 0, 0);
    for seed in &seeds {
        let run = std::panic::catch_unwind(|| Storm::new(behaviour, *seed, false).run(events));
        let tally = run.unwrap_or_else(|panic| {
            // Once more, with a log; however that goes, what failed has failed.
            if std::panic::catch_unwind(|| Storm::new(behaviour, *seed, true).run(events)).is_ok() {
                eprintln!("seed {seed} passes the second time: it depends on more than the seed");
            }
            std::panic::resume_unwind(panic)
        });
        println!(
            "{:?} (exclusive file: {}), seed {seed}: {tally:?}",
            behaviour.model, behaviour.exclusive_file
        );
        (moves, degraded, crashes) =
            (moves + tally.moves, degraded + tally.degraded, crashes + tally.crashes);
    }
    if events >= 1000 && seeds == SEEDS {
        let enough = moves > 50 * SEEDS.len() && degraded > 60 && crashes > 600;
        assert!(enough, "too little was tried: {moves} moves, degraded {degraded} times, {crashes} crashes");
    }
}

#[test]
fn local_only() {
    storm(Behaviour::local_only());
}

#[test]
fn strict() {
    storm(Behaviour::strict());
}

#[test]
fn amended() {
    storm(Behaviour::amended());
}

#[test]
fn lax() {
    storm(Behaviour::lax());
}
