//! Declared units, as they start, stop and start again; nobody tells of either.
//!
//! One machine: eight CPUs in two packages, 0-1 reserved. What systemd does is done by hand: a unit's cgroup is born with
//! the list of its property.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

use truepin::{
    CgroupPath, CpuSet, CpuTopology, NodeSet, Owner,
    assignments::Mode,
    reconcile::{AdmitError, Answer, Event, FindingKind, Home},
    request::{AlignmentPolicy, Isolation, Request},
    topology::synthetic::{Numbering, Regular},
};
use truepin_tests::{
    fake::{Behaviour, FakeKernel, TaskTraits},
    sim::{Setup, Sim},
};

const DB: &str = "system.slice/db.service";

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn db() -> Owner {
    "unit/db.service".parse().unwrap()
}

fn booted() -> FakeKernel {
    let mut kernel = FakeKernel::new(Behaviour::strict(), cpus("0-7"), "0-1".parse().unwrap());
    kernel.write_file(&p(""), "cgroup.subtree_control", "+cpuset").unwrap();
    kernel.mkdir(&p("system.slice")).unwrap();
    kernel.write_file(&p("system.slice"), "cgroup.subtree_control", "+cpuset").unwrap();
    kernel.mkdir(&p("system.slice/other.service")).unwrap();
    kernel.spawn(&p("system.slice/other.service"), 1, TaskTraits::default()).unwrap();
    kernel
}

/// A host that declares `db.service`, or nothing.
fn host(declared: bool, isolation: Isolation) -> Sim {
    let regular =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent };
    let topology = CpuTopology::assemble(&regular.raw()).unwrap();
    let mut setup = Setup::plain(topology, cpus("0-1"), Behaviour::strict().exclusive_file);
    setup.settings.units = declared.then(db).into_iter().collect();
    setup.settings.isolation = isolation;
    let mut sim = Sim::new(setup, booted());
    sim.eyes.log = Some(Vec::new());
    sim
}

fn log(sim: &Sim) -> String {
    sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn settled(sim: &mut Sim) {
    let wrong = sim.unsettled();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", log(sim));
}

fn request(count: u32) -> Request {
    Request {
        owner: db(),
        cpus: count,
        numa: AlignmentPolicy::SingleNumaNode,
        whole_cores: false,
        near: NodeSet::new(),
        isolation: Isolation::Auto,
        memory: 0,
    }
}

fn expect(sim: &mut Sim, count: u32, exactly: Option<&str>) -> Answer {
    let exactly = exactly.map(cpus);
    sim.ask(|ticket| Event::Expect { ticket, request: request(count), exactly, home: p(DB) }).unwrap()
}

#[track_caller]
fn has(answer: &Answer, set: &str) {
    assert_eq!(*answer, Answer::Pod(vec![(db(), cpus(set))]));
}

/// What the agent would have systemd set.
fn told(sim: &Sim) -> Vec<String> {
    sim.state.promised_units().map(|(o, path, cpus)| format!("{o} {path} {cpus}")).collect()
}

/// systemd starts it.
fn start(sim: &mut Sim, list: &str) {
    sim.eyes.others(|k| {
        k.mkdir(&p(DB)).unwrap();
        k.write_file(&p(DB), "cpuset.cpus", list).unwrap();
        k.spawn(&p(DB), 1, TaskTraits::default()).unwrap();
    });
}

fn stop(sim: &mut Sim) {
    sim.eyes.others(|k| {
        let inside: Vec<u32> = k.threads().filter(|t| k.cgroup_of(*t) == Some(&p(DB))).collect();
        for task in inside {
            k.exit(task).unwrap();
        }
        k.rmdir(&p(DB)).unwrap();
    });
}

/// The watch of a directory tells that something came or went in it.
fn stirs(sim: &mut Sim) {
    sim.happens(Event::Disturbed { writes: Vec::new(), departures: Vec::new() }).unwrap();
}

fn effective(sim: &Sim) -> CpuSet {
    sim.eyes.set(&p(DB), "cpuset.cpus.effective").unwrap()
}

fn partition(sim: &Sim) -> String {
    sim.eyes.kernel().read_file(&p(DB), "cpuset.cpus.partition").unwrap().trim().to_owned()
}

#[test]
fn a_unit_has_its_cpus_before_it_runs_and_over_every_start() {
    for isolation in [Isolation::Auto, Isolation::Member] {
        let mut sim = host(true, isolation);
        has(&expect(&mut sim, 2, None), "2-3");
        assert_eq!(told(&sim), [format!("unit/db.service /{DB} 2-3")]);
        let watched = |sim: &Sim| sim.watching.contains(&p("system.slice"));
        assert!(watched(&sim), "{:?}", sim.watching);
        settled(&mut sim);
        for round in 0..3 {
            start(&mut sim, "2-3");
            stirs(&mut sim);
            settled(&mut sim);
            let state = if isolation == Isolation::Member { "member" } else { "root" };
            assert_eq!((effective(&sim), partition(&sim).as_str()), (cpus("2-3"), state), "{round}");
            assert_eq!(told(&sim), [""; 0], "its cgroup has the list, which is written like any other");
            // Asked again at every tick.
            has(&expect(&mut sim, 2, None), "2-3");
            stop(&mut sim);
            stirs(&mut sim);
            settled(&mut sim);
            assert_eq!(told(&sim).len(), 1, "{round}\n{}", log(&sim));
            assert!(watched(&sim));
        }
        let gone = sim.reports.iter().filter(|f| matches!(f.kind, FindingKind::Gone { .. })).count();
        assert_eq!(gone, 0, "{}", log(&sim));
        // A restart between two looks: another cgroup of the same name.
        start(&mut sim, "2-3");
        stirs(&mut sim);
        stop(&mut sim);
        start(&mut sim, "2-3");
        stirs(&mut sim);
        settled(&mut sim);
        assert_eq!(effective(&sim), cpus("2-3"));
        let released = sim.ask(|ticket| Event::Release { ticket, owner: Some(db()) }).unwrap();
        assert!(matches!(&released, Answer::Released(all) if all.len() == 1), "{released:?}");
        assert_eq!((told(&sim).len(), partition(&sim)), (0, "member".to_owned()));
        settled(&mut sim);
    }
}

#[test]
fn one_that_runs_already_is_pinned_at_once() {
    // This kernel lets no populated cgroup's list be emptied: all that nobody holds is the same then.
    for (list, back) in [("", "0-7"), ("0-7", "0-7"), ("2-3", "2-3")] {
        let mut sim = host(true, Isolation::Auto);
        start(&mut sim, list);
        has(&expect(&mut sim, 2, None), "2-3");
        settled(&mut sim);
        assert_eq!((effective(&sim), partition(&sim)), (cpus("2-3"), "root".into()));
        // The list itself, too: the next cgroup is born with it.
        assert_eq!(sim.eyes.set(&p(DB), "cpuset.cpus").unwrap(), cpus("2-3"));
        sim.ask(|ticket| Event::Release { ticket, owner: None }).unwrap();
        settled(&mut sim);
        assert_eq!(sim.eyes.kernel().read_file(&p(DB), "cpuset.cpus").unwrap().trim(), back);
    }
}

#[test]
fn the_promise_outlives_agent_and_machine_and_ends_with_the_declaration() {
    let mut sim = host(true, Isolation::Auto);
    has(&expect(&mut sim, 2, Some("4-5")), "4-5");
    start(&mut sim, "4-5");
    stirs(&mut sim);
    sim.restart().unwrap();
    settled(&mut sim);
    assert_eq!(partition(&sim), "root");
    // The agent is up before the unit.
    sim.reboot(booted()).unwrap();
    assert_eq!(sim.state.assignments.cpus_of(&db()), Some(&cpus("4-5")));
    has(&expect(&mut sim, 2, Some("4-5")), "4-5");
    assert_eq!(told(&sim), [format!("unit/db.service /{DB} 4-5")]);
    start(&mut sim, "4-5");
    stirs(&mut sim);
    settled(&mut sim);
    assert_eq!(partition(&sim), "root");
    // Stopped while no agent runs, and not declared to the next one.
    stop(&mut sim);
    sim.restart().unwrap();
    assert_eq!(sim.state.assignments.promised.len(), 1);
    let mut setup = (*sim.setup).clone();
    setup.settings.units.clear();
    sim.setup = setup.into();
    sim.restart().unwrap();
    settled(&mut sim);
    assert!(sim.state.assignments.exclusive().is_empty(), "{}", log(&sim));
    let why = sim.reports.iter().find_map(|f| match &f.kind {
        FindingKind::Gone { why, .. } => Some(*why),
        _ => None,
    });
    assert_eq!(why, Some("its unit is not declared any more"));
}

#[test]
fn what_cannot_be_promised_is_refused() {
    let mut sim = host(true, Isolation::Auto);
    let refused = |answer: Answer| match answer {
        Answer::Refused(error) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(expect(&mut sim, 2, Some("8-9"))).contains("has no CPUs 8-9"));
    assert!(refused(expect(&mut sim, 2, Some("1-2"))).contains("are reserved"));
    assert!(refused(expect(&mut sim, 5, None)).contains("5 CPUs"));
    has(&expect(&mut sim, 2, None), "2-3");
    assert!(refused(expect(&mut sim, 3, None)).contains("already holds CPUs 2-3"));
    let home = p("truepin.slice/db.service");
    let inside =
        sim.ask(|ticket| Event::Expect { ticket, request: request(2), exactly: None, home }).unwrap();
    assert!(matches!(inside, Answer::Refused(AdmitError::OwnSlice { .. })), "{inside:?}");
    settled(&mut sim);
    // Nothing is promised that is not durable.
    let mut sim = host(true, Isolation::Auto);
    sim.disk.full = true;
    assert!(refused(expect(&mut sim, 2, None)).contains("durable"));
    assert_eq!(told(&sim), [""; 0]);
    sim.disk.full = false;
    has(&expect(&mut sim, 2, None), "2-3");
    settled(&mut sim);
}

#[test]
fn one_that_is_assigned_and_not_declared_goes_with_its_cgroup() {
    let mut sim = host(false, Isolation::Auto);
    start(&mut sim, "");
    let admit = |ticket| Event::Admit {
        ticket,
        request: request(2),
        exactly: None,
        home: Home::Existing(p(DB)),
        pid: None,
    };
    let answer = sim.ask(admit).unwrap();
    assert!(matches!(&answer, Answer::Assigned(_, a) if a.mode == Mode::Partition), "{answer:?}");
    stop(&mut sim);
    stirs(&mut sim);
    settled(&mut sim);
    assert!(sim.state.assignments.exclusive().is_empty());
}
