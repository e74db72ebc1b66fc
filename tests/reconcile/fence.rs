//! `on-intrusion = "fence"`: whoever was on an owner's CPUs, by the ledger, is kept off them, if that can be.

use crate::world::{
    MINUTE, SECOND, assigned, assigned_though_unsettled, client, drifts, effective, files, findings, foreign,
    host, kinds, log, logged, owner, p, run, settled, sound, text,
};
use truepin::{
    CgroupId, CgroupPath, CpuId, CpusetFile,
    ledger::{Intruder, IntruderKind},
    plan::{OnIntrusion, Role, Unfenced},
    reconcile::{Event, Finding, FindingKind, step},
    request::Isolation,
    verdict::Judgement,
};
use truepin_tests::{
    fake::{Behaviour, TaskTraits},
    sim::Sim,
};

const KERNELS: [fn() -> Behaviour; 2] = [Behaviour::strict, Behaviour::lax];

/// The host, whose `user.slice` lists every CPU, with fences; `ignored` may be fenced all the same.
fn fencing(behaviour: Behaviour, ignored: &[&str]) -> Sim {
    let (mut setup, mut kernel) = host(behaviour);
    setup.settings.on_intrusion = OnIntrusion::Fence;
    for path in ignored {
        setup.settings.roles.insert(p(path), Role::Ignore);
        setup.settings.on_intrusion_at.insert(p(path), OnIntrusion::Fence);
    }
    kernel.write_file(&p("user.slice"), "cpuset.cpus", "0-7\n").unwrap();
    logged((setup, kernel))
}

fn intruder(cgroup: CgroupId, cpu: u32, kind: IntruderKind, now_ns: u64) -> Intruder {
    Intruder {
        cpu: CpuId(cpu),
        pid: 78,
        tgid: 77,
        start_ns: 1,
        kind,
        comm: "burn".into(),
        cgroup,
        ns: SECOND / 10,
        first_ns: now_ns - SECOND / 10,
        last_ns: now_ns,
    }
}

/// A task of this cgroup is on the CPU, and the evidence of it is read.
fn intrudes(sim: &mut Sim, path: &str, cpu: u32) {
    sim.wait(SECOND);
    let id = sim.eyes.kernel().id(&p(path)).unwrap();
    sim.probe.intruders.push(intruder(id, cpu, IntruderKind::Foreign, sim.now.mono_ns));
    *sim.probe.foreign_ns.entry(CpuId(cpu)).or_default() += SECOND / 10;
    judge(sim);
}

fn judge(sim: &mut Sim) {
    let evidence = sim.evidence();
    sim.happens(Event::Collected(evidence)).unwrap();
}

fn not_fenced(sim: &Sim) -> Vec<(String, Unfenced)> {
    findings(sim, |k| match k {
        FindingKind::NotFenced { path, why, .. } => Some((path.as_str().to_owned(), why.clone())),
        _ => None,
    })
}

fn fenced(sim: &Sim) -> Vec<String> {
    sim.state.fenced().iter().map(|p| p.as_str().to_owned()).collect()
}

fn told(sim: &Sim, kind: &str) -> Vec<String> {
    sim.reports.iter().filter(|f| f.kind.name() == kind).map(ToString::to_string).collect()
}

/// A member beside a cgroup that configuration leaves out of the pool.
#[test]
fn an_ignored_cgroup_is_fenced_when_its_tasks_intrude_and_not_before() {
    for behaviour in KERNELS {
        let mut sim = fencing(behaviour(), &["user.slice"]);
        let before = files(&sim);
        let pid = client(&mut sim);
        assigned_though_unsettled(&mut sim, &run("a", "2-3", Isolation::Member).with(pid));
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-7", "ignored");
        intrudes(&mut sim, "user.slice", 2);
        settled(&mut sim);
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-1,4-7");
        assert_eq!(
            told(&sim, "fenced"),
            [
                "run/a: burn (pid 77) of /user.slice ran on CPUs 2; that cgroup is kept off exclusive CPUs: its cpuset.cpus, \"0-7\", is to be \"0-1,4-7\""
            ]
        );
        let finding = sim.state.findings().find(|f| f.kind.name() == "fenced").unwrap();
        assert!(finding.mended.is_some());
        let first = &sim.disk.record().unwrap().first[&p("user.slice")];
        assert_eq!(first.files[&CpusetFile::Cpus], "0-7");
        assert_eq!(first.fenced_for, [owner("run/a")].into());
        assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Violated);

        // Nothing new: nothing is read or written. A restart changes nothing.
        let steps = sim.eyes.steps.len();
        judge(&mut sim);
        sim.tick().unwrap();
        sim.restart().unwrap();
        settled(&mut sim);
        assert_eq!((sim.eyes.steps.len(), fenced(&sim)), (steps, vec!["user.slice".to_owned()]));
        assert!(!kinds(&sim).contains("fenced"), "{:?}", kinds(&sim));

        // Another owner: its CPUs too, though nobody intruded there.
        assigned(&mut sim, &run("b", "6", Isolation::Member));
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-1,4-5,7");
        sim.release(Some(&owner("run/b"))).unwrap();
        settled(&mut sim);
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-1,4-7");
        sim.release(None).unwrap();
        settled(&mut sim);
        assert_eq!(told(&sim, "fence-gone").len(), 1, "{}", log(&sim));
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-7");
        assert!(!sim.disk.record().unwrap().first.contains_key(&p("user.slice")));
        let left = sim.eyes.not_put_back(true);
        assert_eq!(left, Vec::<String>::new());
        assert_eq!(before.get(&(p("user.slice"), CpusetFile::Cpus)).map(String::as_str), Some("0-7"));
    }
}

#[test]
fn by_default_intruders_are_only_told() {
    for at in [None, Some(OnIntrusion::Report)] {
        let mut sim = fencing(Behaviour::strict(), &["user.slice"]);
        let settings = &mut sim.state.settings;
        if let Some(at) = at {
            settings.on_intrusion_at.insert(p("truepin.slice/run-a"), at);
        } else {
            settings.on_intrusion = OnIntrusion::default();
        }
        assigned_though_unsettled(&mut sim, &run("a", "2-3", Isolation::Member));
        let steps = sim.eyes.steps.len();
        intrudes(&mut sim, "user.slice", 2);
        sound(&mut sim);
        assert_eq!((sim.eyes.steps.len(), fenced(&sim)), (steps, vec![]));
        assert!(kinds(&sim).contains("violated") && told(&sim, "not-fenced").is_empty());
        // For one owner alone.
        sim.state.settings.on_intrusion_at.insert(p("truepin.slice/run-a"), OnIntrusion::Fence);
        intrudes(&mut sim, "user.slice", 2);
        settled(&mut sim);
        assert_eq!(fenced(&sim), ["user.slice"]);
    }
}

/// The state of a partition is in a fight and left alone: meanwhile nothing but a fence keeps others out.
#[test]
fn a_lost_partition_that_cannot_be_had_back() {
    for behaviour in KERNELS {
        let mut sim = fencing(behaviour(), &[]);
        sim.eyes.others(|k| k.write_file(&p("user.slice"), "cpuset.cpus", "\n").unwrap_or_default());
        let inherits = text(&sim, "user.slice", CpusetFile::Cpus);
        assigned(&mut sim, &run("a", "2-3", Isolation::Partition));
        // While it stands nobody is there who could be fenced, whatever the evidence of before.
        intrudes(&mut sim, "user.slice", 2);
        settled(&mut sim);
        assert_eq!((fenced(&sim), not_fenced(&sim)), (vec![], vec![]));
        for _ in 0..4 {
            foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus.partition", "member", Some(9));
            sim.wait(SECOND);
        }
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "member", "left alone");
        assert!(effective(&sim, "machine.slice").contains(CpuId(2)), "{}", log(&sim));
        let steps = sim.eyes.steps.len();
        intrudes(&mut sim, "machine.slice", 2);
        sound(&mut sim);
        assert_eq!(fenced(&sim), ["machine.slice"], "{}", log(&sim));
        assert_eq!(text(&sim, "machine.slice", CpusetFile::Cpus), "0-1,4-7");
        assert_eq!(sim.eyes.steps.len(), steps + 1, "and no other cgroup: {}", log(&sim));
        assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), inherits.replace("0-7", "0-1,4-7"));
        // The one below has no files of its own, and needs none now.
        intrudes(&mut sim, "machine.slice/vm", 3);
        sound(&mut sim);
        assert_eq!(not_fenced(&sim), []);
        // The fight is over: the partition keeps them out again.
        sim.wait(MINUTE);
        sim.tick().unwrap();
        settled(&mut sim);
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "root");
        assert_eq!((fenced(&sim), told(&sim, "fence-gone").len()), (vec![], 1), "{}", log(&sim));
        sim.release(None).unwrap();
        settled(&mut sim);
        assert_eq!(sim.eyes.not_put_back(true), Vec::<String>::new());
    }
}

/// Whoever widens a fenced cgroup again and again fights (I8): it is left alone, and the verdict says what comes of it.
#[test]
fn a_fence_that_is_fought() {
    let mut sim = fencing(Behaviour::strict(), &["user.slice"]);
    assigned_though_unsettled(&mut sim, &run("a", "2-3", Isolation::Member));
    intrudes(&mut sim, "user.slice", 2);
    settled(&mut sim);
    for n in 0..4 {
        foreign(&mut sim, "user.slice/cpuset.cpus", "0-7", Some(9));
        sound(&mut sim);
        assert_eq!(kinds(&sim).contains("fight"), n == 3, "{n}");
        sim.wait(SECOND);
    }
    assert_eq!(drifts(&sim).len(), 4);
    let fight = |f: &&Finding| matches!(f.kind, FindingKind::Fight { .. });
    let fight = sim.reports.iter().find(fight).unwrap().to_string();
    assert!(fight.ends_with("changed by w9 (pid 9, cgroup /user.slice)"), "{fight}");
    let steps = sim.eyes.steps.len();
    for _ in 0..10 {
        intrudes(&mut sim, "user.slice", 2);
        sound(&mut sim);
    }
    assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-7", "left alone");
    assert_eq!(sim.eyes.steps.len(), steps);
    assert_eq!(not_fenced(&sim), [("user.slice".to_owned(), Unfenced::LeftAlone)], "said once");
    assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Violated);
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-1,4-7");
    sim.release(None).unwrap();
    settled(&mut sim);
    // What was found there when it began to matter, not what the fighter wants: here they are the same.
    assert_eq!(text(&sim, "user.slice", CpusetFile::Cpus), "0-7");
}

#[test]
fn who_cannot_be_fenced_is_told_once() {
    let mut sim = fencing(Behaviour::strict(), &[]);
    for path in ["user.slice", "machine.slice"] {
        sim.state.settings.roles.insert(p(path), Role::Ignore);
    }
    sim.state.settings.on_intrusion_at.insert(p("machine.slice"), OnIntrusion::Fence);
    assigned_though_unsettled(&mut sim, &run("a", "2-3", Isolation::Member));
    let steps = sim.eyes.steps.len();
    for _ in 0..3 {
        intrudes(&mut sim, "", 2);
        intrudes(&mut sim, "user.slice", 2);
        intrudes(&mut sim, "machine.slice/vm", 3);
    }
    sound(&mut sim);
    let at = |path: &str, why| (path.to_owned(), why);
    assert_eq!(
        not_fenced(&sim),
        [
            at("", Unfenced::Root),
            at("user.slice", Unfenced::Ignored),
            at("machine.slice/vm", Unfenced::NoList(vec![p("machine.slice")]))
        ]
    );
    assert_eq!((fenced(&sim), sim.eyes.steps.len()), (vec![], steps));
    // Nothing is read for one of whom nothing new can be said.
    sim.wait(SECOND);
    let id = sim.eyes.kernel().id(&CgroupPath::root()).unwrap();
    sim.probe.intruders.push(intruder(id, 2, IntruderKind::Foreign, sim.now.mono_ns));
    let evidence = sim.evidence();
    let effects = step(&mut sim.state, Event::Collected(evidence), sim.now);
    assert!(effects.is_empty(), "{effects:?}");
    // Kernel threads are nobody's; the agent's own cgroup is its own.
    let id = sim.eyes.kernel().id(&p("machine.slice")).unwrap();
    sim.wait(SECOND);
    sim.probe.intruders.push(intruder(id, 2, IntruderKind::UnboundKthread, sim.now.mono_ns));
    judge(&mut sim);
    assert_eq!(fenced(&sim), Vec::<String>::new());
    sim.home = p("machine.slice");
    intrudes(&mut sim, "machine.slice", 2);
    assert_eq!(not_fenced(&sim).last().unwrap(), &at("machine.slice", Unfenced::Own));
    sim.home = CgroupPath::root();
    intrudes(&mut sim, "machine.slice", 2);
    assert_eq!(fenced(&sim), ["machine.slice"], "{}", log(&sim));
}

/// A cgroup that is made anew each time it is fenced, and one after the other of many.
#[test]
fn fences_are_bounded() {
    let mut sim = fencing(Behaviour::strict(), &["noise"]);
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    let made = |sim: &mut Sim, path: &str| {
        sim.eyes.others(|k| {
            k.mkdir(&p(path)).unwrap();
            k.spawn(&p(path), 1, TaskTraits::default()).unwrap()
        })
    };
    let rounds = |sim: &mut Sim| {
        let mut fences = 0;
        for _ in 0..6 {
            let pid = made(sim, "noise");
            intrudes(sim, "noise", 2);
            sound(sim);
            fences += fenced(sim).len();
            sim.eyes.others(|k| {
                k.exit(pid).unwrap();
                k.rmdir(&p("noise")).unwrap();
            });
            sim.tick().unwrap();
            assert_eq!(fenced(sim), Vec::<String>::new());
        }
        fences
    };
    assert_eq!(rounds(&mut sim), 3, "{}", log(&sim));
    assert_eq!(not_fenced(&sim), [("noise".to_owned(), Unfenced::TooOften(3))]);
    sim.wait(MINUTE);
    assert_eq!(rounds(&mut sim), 3, "{}", log(&sim));
    assert_eq!(not_fenced(&sim).len(), 2);

    let mut sim = fencing(Behaviour::strict(), &[]);
    let many: Vec<String> = (0..70).map(|n| format!("n{n}")).collect();
    for path in &many {
        made(&mut sim, path);
        sim.state.settings.roles.insert(p(path), Role::Ignore);
        sim.state.settings.on_intrusion_at.insert(p(path), OnIntrusion::Fence);
    }
    assigned_though_unsettled(&mut sim, &run("a", "2-3", Isolation::Member));
    for path in &many {
        intrudes(&mut sim, path, 2);
    }
    sound(&mut sim);
    assert_eq!((fenced(&sim).len(), not_fenced(&sim).len()), (64, 6));
    assert!(not_fenced(&sim).iter().all(|(_, why)| *why == Unfenced::TooMany(64)));
    sim.release(None).unwrap();
    settled(&mut sim);
    assert_eq!(sim.eyes.not_put_back(true), Vec::<String>::new());
}
