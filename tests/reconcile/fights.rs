//! Others who want a file otherwise, for minutes and hours: how often truepin writes, what it says, and who else notices.

use crate::world::{
    Files, MINUTE, SECOND, assigned, by, drifts, effective, existing, files, findings, host, kinds, log,
    logged, owner, p, run, settled, sound, text,
};
use truepin::{
    CgroupPath, CpusetFile,
    observed::Step,
    reconcile::{Cause, Event, Finding, FindingKind, ForeignWrite, Writer},
    request::Isolation,
    verdict::Judgement,
};
use truepin_tests::{
    fake::{Behaviour, FakeKernel, TaskTraits},
    sim::{Foreign, Sim, Wish},
};

/// Truepin's writes of others' making: when, and to which file.
#[derive(Default)]
struct Tally {
    writes: Vec<(u64, CgroupPath, CpusetFile)>,
    counted: usize,
}

impl Tally {
    fn from(sim: &Sim) -> Self {
        Self { writes: Vec::new(), counted: sim.eyes.steps.len() }
    }

    fn count(&mut self, sim: &Sim) {
        let new = sim.eyes.steps[self.counted..].iter().filter_map(|s| match s {
            Step::Write { path, file, .. } => Some((sim.now.mono_ns, path.clone(), *file)),
            _ => None,
        });
        self.writes.extend(new);
        self.counted = sim.eyes.steps.len();
    }

    /// The most in any minute, of one file.
    fn most_in_a_minute(&self, path: &str, file: CpusetFile) -> usize {
        let of: Vec<u64> =
            self.writes.iter().filter(|(_, p, f)| p.as_str() == path && *f == file).map(|w| w.0).collect();
        let within = |from: &u64| of.iter().filter(|at| (*from..from + MINUTE).contains(at)).count();
        of.iter().map(within).max().unwrap_or(0)
    }
}

/// Somebody writes, and the kernel tells who.
fn writes(sim: &mut Sim, path: &str, text: &str, writer: Writer) {
    let file = CpusetFile::Cpus;
    let write = Foreign { path: p(path), file: file.name().into(), text: text.into() };
    sim.eyes.foreign(&write).unwrap();
    let told = ForeignWrite { path: p(path), file: Some(file.into()), writer: Some(writer) };
    sim.happens(Event::Disturbed { writes: vec![told], departures: Vec::new() }).unwrap();
}

fn named(comm: &str, pid: u32, sim: &Sim) -> Writer {
    Writer { comm: comm.into(), ..by(pid, sim.now.mono_ns) }
}

/// Path and writer's name of every fight.
fn fights(sim: &Sim) -> Vec<(String, String)> {
    let of = |f: &Finding| match &f.kind {
        FindingKind::Fight { path, .. } => {
            let name = f.cause.as_ref().and_then(Cause::writer).map(|w| w.comm.clone());
            Some((path.as_str().to_owned(), name.unwrap_or_default()))
        }
        _ => None,
    };
    sim.reports.iter().filter_map(of).collect()
}

fn told(sim: &Sim, kind: &str) -> usize {
    sim.reports.iter().filter(|f| f.kind.name() == kind).count()
}

/// `run/b` has what it had, nothing of its was written, and its verdict is what it would be without all that.
#[track_caller]
fn unaffected(sim: &mut Sim, before: &Files, tally: &Tally) {
    let b = p("truepin.slice/run-b");
    for file in CpusetFile::ALL {
        assert_eq!(Some(&sim.eyes.text(&b, file)), before.get(&(b.clone(), file)), "{file}");
    }
    let own = tally.writes.iter().filter(|(_, path, _)| *path == b).count();
    assert_eq!(own, 0, "{}", log(sim));
    assert_eq!(sim.verdict(&owner("run/b")).unwrap().judgement, Judgement::Held);
}

/// An orchestrator that writes a container's list anew every 300 ms, each time by another process.
#[test]
fn a_rewriter_that_is_another_process_each_time() {
    for behaviour in [Behaviour::strict(), Behaviour::lax()] {
        let mut sim = logged(host(behaviour));
        assigned(&mut sim, &run("b", "6-7", Isolation::Partition));
        assigned(&mut sim, &existing("system.slice/a", "2-3", Isolation::Member));
        let before = files(&sim);
        sim.reports.clear();
        let mut tally = Tally::from(&sim);
        for round in 0..1000 {
            let runc = named("runc", 1000 + round, &sim);
            writes(&mut sim, "system.slice/a", "0-5", runc);
            tally.count(&sim);
            sound(&mut sim);
            sim.wait(300 * SECOND / 1000);
        }
        assert_eq!(text(&sim, "system.slice/a", CpusetFile::Cpus), "0-5", "left alone");
        assert_eq!(fights(&sim), [("system.slice/a".to_owned(), "runc".to_owned())]);
        assert_eq!((drifts(&sim).len(), told(&sim, "fight-over")), (4, 0));
        // In five minutes.
        assert_eq!(tally.writes.len(), 3, "{}", log(&sim));
        let verdict = sim.verdict(&owner("cgroup/system.slice/a")).unwrap();
        assert_eq!(verdict.judgement, Judgement::Violated);
        assert!(verdict.reasons.iter().any(|r| r.contains("the kernel gave it CPUs 0-5")), "{verdict:#?}");
        unaffected(&mut sim, &before, &tally);
        // It ends, and a minute later all is as it was.
        sim.now.mono_ns = sim.state.next_deadline().unwrap();
        sim.tick().unwrap();
        settled(&mut sim);
        assert_eq!(text(&sim, "system.slice/a", CpusetFile::Cpus), "2-3");
        assert_eq!((told(&sim, "fight-over"), sim.state.is_settled()), (1, true));
    }
}

/// Once an hour is nobody's fight, however long it goes on.
#[test]
fn a_cron_job_that_widens_once_an_hour() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    sim.reports.clear();
    let mut tally = Tally::from(&sim);
    for hour in 0..72 {
        // Two files, twice each.
        for n in 0..2 {
            for path in ["truepin.slice/run-a", "user.slice"] {
                let cron = named("cron", 5000 + 10 * hour + n, &sim);
                writes(&mut sim, path, "0-7", cron);
                tally.count(&sim);
                settled(&mut sim);
            }
        }
        assert!(sim.state.is_settled(), "{hour}");
        for _ in 0..60 {
            sim.wait(MINUTE);
            sim.tick().unwrap();
        }
    }
    settled(&mut sim);
    assert_eq!((fights(&sim), drifts(&sim).len()), (vec![], 72 * 4));
    assert_eq!(tally.writes.len(), 72 * 4);
    let open = sim.state.findings().filter(|f| f.mended.is_none());
    assert_eq!(open.map(ToString::to_string).collect::<Vec<_>>(), Vec::<String>::new());
}

/// Two who want a file otherwise, and each other's value neither.
#[test]
fn two_writers_of_one_file() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("b", "6-7", Isolation::Partition));
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let before = files(&sim);
    sim.reports.clear();
    let mut tally = Tally::from(&sim);
    for round in 0..300 {
        let (name, value) = if round % 2 == 0 { ("left", "2") } else { ("right", "2-5") };
        let writer = named(name, 10 + round % 2, &sim);
        writes(&mut sim, "truepin.slice/run-a", value, writer);
        tally.count(&sim);
        sound(&mut sim);
        sim.wait(SECOND);
    }
    // The first of the two to do it a fourth time.
    assert_eq!(fights(&sim), [("truepin.slice/run-a".to_owned(), "left".to_owned())]);
    assert_eq!(tally.writes.len(), 6, "{}", log(&sim));
    unaffected(&mut sim, &before, &tally);
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
}

/// Each has its own idea of the same cgroup, and repairs what the other does, as soon as it is told.
struct Two {
    agents: [Sim; 2],
    tallies: [Tally; 2],
}

impl Two {
    fn new() -> Self {
        let agent = |set: &str, kernel: Option<FakeKernel>| {
            let (setup, mut fresh) = host(Behaviour::strict());
            if let Some(kernel) = kernel {
                fresh = kernel;
            }
            let mut sim = logged((setup, fresh));
            let wish: Wish = existing("user.slice", set, Isolation::Member);
            assigned(&mut sim, &wish);
            sim.reports.clear();
            sim
        };
        let one = agent("2-3", None);
        let other = agent("4-5", Some(one.eyes.kernel().clone()));
        let tallies = [Tally::from(&one), Tally::from(&other)];
        Self { agents: [one, other], tallies }
    }

    /// What one of them wrote since it was last asked is told to the other, which acts. False if there was nothing.
    fn answers(&mut self, n: usize) -> bool {
        let from = self.tallies[1 - n].counted;
        let kernel = self.agents[1 - n].eyes.kernel().clone();
        let (pid, at) = (u32::try_from(2 - n).unwrap(), self.agents[n].now.mono_ns);
        let writer = Writer { comm: "truepin".into(), ..by(pid, at) };
        let told = |s: &Step| match s {
            Step::Write { path, file, .. } => {
                let (path, file) = (path.clone(), Some((*file).into()));
                Some(ForeignWrite { path, file, writer: Some(writer.clone()) })
            }
            _ => None,
        };
        let seen: Vec<_> = self.agents[1 - n].eyes.steps[from..].iter().filter_map(told).collect();
        let other = &self.agents[1 - n];
        self.tallies[1 - n].count(other);
        if seen.is_empty() {
            return false;
        }
        let sim = &mut self.agents[n];
        sim.eyes.others(|k| *k = kernel);
        sim.happens(Event::Disturbed { writes: seen, departures: Vec::new() }).unwrap();
        true
    }

    fn pass(&mut self, ns: u64) {
        for sim in &mut self.agents {
            sim.wait(ns);
        }
    }
}

#[test]
fn two_agents_that_repair_each_other() {
    let mut two = Two::new();
    let mut exchanged = 0;
    for second in 0..600 {
        // As long as one has something to say to the other, within a moment.
        for _ in 0..100 {
            let any = two.answers(0) | two.answers(1);
            if !any {
                break;
            }
            exchanged += 1;
        }
        two.pass(SECOND);
        if second % 30 == 29 {
            for n in 0..2 {
                // The tick of each, which may thaw what was left alone.
                let kernel = two.agents[1 - n].eyes.kernel().clone();
                two.agents[n].eyes.others(|k| *k = kernel);
                two.agents[n].tick().unwrap();
                two.answers(1 - n);
            }
        }
    }
    for n in 0..2 {
        let (sim, tally) = (&two.agents[n], &two.tallies[n]);
        for path in ["user.slice", "system.slice", "machine.slice"] {
            let most = tally.most_in_a_minute(path, CpusetFile::Cpus);
            // Three repairs, and what was repaired when the last fight was over.
            assert!(most <= 4, "agent {n}: {most} writes of {path} in a minute\n{}", log(sim));
        }
        let fights = fights(sim);
        assert!(!fights.is_empty() && fights.iter().all(|(_, who)| who == "truepin"), "{fights:?}");
    }
    assert!(exchanged < 600, "{exchanged}");
}

/// Forty lists of the pool's cgroups, all of them widened again and again by one who walks over them.
#[test]
fn a_storm_over_many_files() {
    const FILES: usize = 40;
    let (setup, mut kernel) = host(Behaviour::strict());
    let paths: Vec<String> = (0..FILES).map(|n| format!("c{n}")).collect();
    for path in &paths {
        kernel.mkdir(&p(path)).unwrap();
        kernel.spawn(&p(path), 1, TaskTraits::default()).unwrap();
    }
    let mut sim = logged((setup, kernel));
    sim.eyes.log = None; // it would hold everything
    assigned(&mut sim, &run("b", "6-7", Isolation::Partition));
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let before = files(&sim);
    sim.reports.clear();
    let mut tally = Tally::from(&sim);
    for _ in 0..10 {
        for path in &paths {
            let storm = named("storm", 7, &sim);
            writes(&mut sim, path, "0-5", storm);
            tally.count(&sim);
        }
        sound(&mut sim);
        sim.wait(SECOND);
    }
    let mut fought: Vec<String> = fights(&sim).into_iter().map(|(path, _)| path).collect();
    fought.sort();
    let mut all = paths.clone();
    all.sort();
    assert_eq!(fought, all, "one each");
    assert_eq!(tally.writes.len(), 3 * FILES);
    for path in &paths {
        assert_eq!(tally.most_in_a_minute(path, CpusetFile::Cpus), 3, "{path}");
        assert_eq!(text(&sim, path, CpusetFile::Cpus), "0-5", "{path}");
    }
    unaffected(&mut sim, &before, &tally);
    // Whoever else changes something else is answered at once.
    let other = named("other", 8, &sim);
    writes(&mut sim, "user.slice", "3-4", other);
    sound(&mut sim);
    assert!(effective(&sim, "user.slice").is_disjoint(&"2-3,6-7".parse().unwrap()));
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(told(&sim, "fight-over"), FILES);
    assert!(!kinds(&sim).contains("stuck"));
    let drifted = findings(&sim, |k| matches!(k, FindingKind::Drift { .. }).then_some(())).len();
    assert_eq!(drifted, 4 * FILES + 1);
}
