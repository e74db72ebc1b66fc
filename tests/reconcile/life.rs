//! The life of a partition: whatever ends it, it is made anew by the whole sequence and the reason is told in plain words;
//! isolated on request.

use crate::world::{
    SECOND, assigned, client, cpus, effective, existing, findings, foreign, host, kinds, log, logged, owner,
    p, refused, run, settled, sim, text,
};
use std::fmt::Write as _;
use truepin::assignments::{ReserveError, STACKS};
use truepin::explain::Explanation;
use truepin::partition::PartitionKind;
use truepin::reconcile::{AdmitError, Event, FindingKind, ForeignWrite};
use truepin::request::Isolation;
use truepin::verdict::Judgement;
use truepin::{CgroupFile, CgroupPath, CpusetFile};
use truepin_tests::fake::{Behaviour, Errno, Fault, TaskTraits, mask_changes, masks};
use truepin_tests::sim::{Foreign, Sim, Wish};

/// What somebody does, in `{}` the owner's cgroup and in `{up}` the one above it, and how that is told: the cause's short
/// word and the cgroup to blame, on kernels that refuse and on those that accept; an empty word where nothing is lost there.
struct Deed {
    name: &'static str,
    writes: &'static [(&'static str, &'static str)],
    strict: &'static [(&'static str, &'static str)],
    amended: &'static [(&'static str, &'static str)],
    lax: &'static [(&'static str, &'static str)],
    /// What is above it is left to whoever made it, if that is not truepin.
    left: bool,
}

const NOTHING: &[(&str, &str)] = &[("", "")];

const DEEDS: [Deed; 12] = [
    Deed {
        name: "a sibling reaches over it",
        writes: &[("{up}/beside/cpuset.cpus", "3-4")],
        strict: &[("no-reason", "{up}/beside")],
        amended: &[("no-reason", "{up}/beside")],
        lax: NOTHING,
        left: false,
    },
    Deed {
        name: "a sibling reaches over it for a moment",
        writes: &[("{up}/beside/cpuset.cpus", "3-4"), ("{up}/beside/cpuset.cpus", "4")],
        strict: &[("no-reason", "")],
        amended: &[("no-reason", "")],
        lax: NOTHING,
        left: false,
    },
    Deed {
        name: "its exclusive list is emptied",
        writes: &[("{}/cpuset.cpus.exclusive", "")],
        strict: &[("parent-member", "")],
        amended: &[("parent-member", "")],
        // Where it has a `cpuset.cpus` that does as well; where not, it is refused or the partition is lost.
        lax: &[("", ""), ("parent-member", "")],
        left: false,
    },
    Deed {
        name: "its list is emptied",
        writes: &[("{}/cpuset.cpus", "")],
        strict: NOTHING,
        amended: NOTHING,
        lax: NOTHING,
        left: false,
    },
    Deed {
        name: "its lists are other ones",
        writes: &[("{}/cpuset.cpus", "6"), ("{}/cpuset.cpus.exclusive", "4,6")],
        strict: &[("parent-member", "")],
        amended: &[("parent-member", "")],
        lax: &[("parent-member", "")],
        left: false,
    },
    Deed {
        name: "the list above it shrinks",
        writes: &[("{up}/cpuset.cpus.exclusive", "2")],
        strict: &[("member", "{up}")],
        amended: NOTHING,
        lax: NOTHING,
        left: false,
    },
    Deed {
        name: "the list above it is emptied",
        writes: &[("{up}/cpuset.cpus.exclusive", "")],
        strict: NOTHING,
        amended: &[("parent-member", "{up}")],
        lax: &[("parent-member", "{up}")],
        left: false,
    },
    Deed {
        name: "the controller is withdrawn",
        writes: &[("{up}/cgroup.subtree_control", "-cpuset")],
        strict: &[("no-files", "{up}")],
        amended: &[("no-files", "{up}")],
        lax: &[("no-files", "{up}")],
        left: false,
    },
    Deed {
        name: "the controller is withdrawn and comes back",
        writes: &[("{up}/cgroup.subtree_control", "-cpuset"), ("{up}/cgroup.subtree_control", "+cpuset")],
        strict: &[("member", "")],
        amended: &[("member", "")],
        lax: &[("member", "")],
        left: false,
    },
    Deed {
        name: "what is above it becomes a partition",
        writes: &[("{up}/cpuset.cpus", "2-5"), ("{up}/cpuset.cpus.partition", "root")],
        strict: NOTHING,
        amended: NOTHING,
        lax: NOTHING,
        left: true,
    },
    Deed {
        name: "what is above it is a partition for a moment",
        writes: &[
            ("{up}/cpuset.cpus", "2-5"),
            ("{up}/cpuset.cpus.partition", "root"),
            ("{up}/cpuset.cpus.partition", "member"),
        ],
        strict: NOTHING,
        amended: NOTHING,
        lax: NOTHING,
        left: false,
    },
    Deed {
        name: "somebody writes member",
        writes: &[("{}/cpuset.cpus.partition", "member")],
        strict: &[("member", "")],
        amended: &[("member", "")],
        lax: &[("member", "")],
        left: false,
    },
];

fn explanations(sim: &Sim) -> Vec<&Explanation> {
    findings(sim, |k| match k {
        FindingKind::FellBack { .. } | FindingKind::PartitionRefused { .. } => panic!("given up: {k}"),
        k => k.explanation(),
    })
}

/// The partition is as it should be, by the kernel's files and the tasks' masks and not by what truepin thinks.
fn is_whole(sim: &Sim, home: &CgroupPath, kind: PartitionKind) -> Result<(), String> {
    let kernel = sim.eyes.kernel();
    let file = |name| kernel.read_file(home, name).map(|t| t.trim().to_owned()).unwrap_or_default();
    for (name, want) in [
        ("cpuset.cpus.partition", kind.to_string()),
        ("cpuset.cpus.exclusive", "2-3".into()),
        ("cpuset.cpus.exclusive.effective", "2-3".into()),
        ("cpuset.cpus.effective", "2-3".into()),
    ] {
        if file(name) != want {
            return Err(format!("{home}/{name} is {:?} and not {want:?}", file(name)));
        }
    }
    for tid in kernel.threads() {
        let at = kernel.cgroup_of(tid).unwrap();
        let mask = kernel.mask(tid).unwrap();
        let right = if at.is_within(home) { *mask == cpus("2-3") } else { mask.is_disjoint(&cpus("2-3")) };
        if !right {
            return Err(format!("task {tid} in {at} is allowed on {mask}"));
        }
    }
    Ok(())
}

#[test]
fn whatever_ends_it_it_is_made_anew_and_the_reason_is_told() {
    let mut wrong = String::new();
    for behaviour in behaviours() {
        for (isolation, kind) in
            [(Isolation::Partition, PartitionKind::Root), (Isolation::Isolated, PartitionKind::Isolated)]
        {
            for deed in &DEEDS {
                // One that truepin made, and somebody else's.
                for home in ["truepin.slice/run-a", "system.slice/a"] {
                    let (home, up) = (p(home), p(home).parent().unwrap());
                    let mut sim = logged(host(behaviour));
                    if up == p("truepin.slice") {
                        let pid = client(&mut sim);
                        assigned(&mut sim, &run("a", "2-3", isolation).with(pid));
                    } else {
                        assigned(&mut sim, &existing(home.as_str(), "2-3", isolation));
                    }
                    sim.eyes.others(|k| k.mkdir(&up.child("beside").unwrap()).unwrap());
                    sim.reports.clear();
                    let mut seen = Vec::new();
                    for (file, value) in deed.writes {
                        let file = file.replace("{up}", up.as_str()).replace("{}", home.as_str());
                        let (path, name) = file.rsplit_once('/').unwrap();
                        let write = Foreign { path: p(path), file: name.into(), text: (*value).into() };
                        // Where it is refused nothing has happened.
                        let _ = sim.eyes.foreign(&write);
                        seen.push(ForeignWrite {
                            path: p(path),
                            file: CgroupFile::of_name(name),
                            writer: None,
                        });
                    }
                    sim.happens(Event::Disturbed { writes: seen, departures: Vec::new() }).unwrap();
                    let mut faults = sim.unsettled();
                    faults.extend(is_whole(&sim, &home, kind).err());
                    let wants = match behaviour {
                        b if b == Behaviour::strict() => deed.strict,
                        b if b == Behaviour::amended() => deed.amended,
                        _ => deed.lax,
                    };
                    if deed.left && up != p("truepin.slice") {
                        let left = format!("a problem is left: cgroup {up}, above that of");
                        let before = faults.len();
                        faults.retain(|f| !f.starts_with(&left));
                        assert_eq!(before - faults.len(), 1, "{}", log(&sim));
                    }
                    let told: Vec<(&str, String)> = explanations(&sim)
                        .iter()
                        .map(|e| {
                            let paths = e.culprits.iter().filter_map(|c| c.path());
                            (e.cause.name(), paths.map(CgroupPath::as_str).collect::<Vec<_>>().join(" "))
                        })
                        .collect();
                    let want = |(cause, blamed): &(&'static str, &str)| {
                        let blamed = blamed.replace("{up}", up.as_str());
                        [(*cause, blamed)].into_iter().filter(|(c, _)| !c.is_empty()).collect::<Vec<_>>()
                    };
                    if !wants.iter().any(|w| want(w) == told) {
                        faults.push(format!("told {told:?}, not {wants:?}"));
                    }
                    if !faults.is_empty() {
                        let _ = writeln!(
                            wrong,
                            "{:?} {isolation:?} {home}, {}: {faults:#?}\n{}",
                            behaviour.model,
                            deed.name,
                            log(&sim)
                        );
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

fn behaviours() -> [Behaviour; 3] {
    [Behaviour::strict(), Behaviour::amended(), Behaviour::lax()]
}

/// `machine.slice` as an owner of 4-7 that has made a partition of 6-7 for a part of itself.
fn nested(behaviour: Behaviour) -> Sim {
    let mut sim = logged(host(behaviour));
    sim.eyes.others(|k| {
        k.mkdir(&p("machine.slice/rest")).unwrap();
        k.spawn(&p("machine.slice/rest"), 1, TaskTraits::default()).unwrap();
        k.write_file(&p("machine.slice"), "cgroup.subtree_control", "+cpuset").unwrap();
    });
    assigned(&mut sim, &existing("machine.slice", "4-7", Isolation::Partition));
    for (file, value) in [("cpuset.cpus", "6-7"), ("cpuset.cpus.partition", "root")] {
        foreign(&mut sim, &format!("machine.slice/vm/{file}"), value, Some(30));
    }
    assert_eq!(effective(&sim, "machine.slice"), cpus("4-5"), "{}", log(&sim));
    sim
}

#[test]
fn what_an_owner_makes_of_its_own_cpus_is_its_affair() {
    for behaviour in behaviours() {
        let mut sim = nested(behaviour);
        settled(&mut sim);
        assert!(kinds(&sim).is_empty(), "{:?}\n{}", kinds(&sim), log(&sim));
        assert_eq!(sim.verdict(&owner("cgroup/machine.slice")).unwrap().reasons, [""; 0]);
        // The outer one is lost, and with it the inner one: the outer is made anew. The inner comes back by itself, and with
        // its parent's effective set on these kernels: that is its maker's to mend.
        foreign(&mut sim, "machine.slice/cpuset.cpus.partition", "member", Some(31));
        settled(&mut sim);
        assert_eq!(text(&sim, "machine.slice", CpusetFile::Partition), "root");
        let inner = sim.eyes.set(&p("machine.slice/vm"), "cpuset.cpus.exclusive.effective").unwrap();
        assert_eq!((effective(&sim, "machine.slice"), inner), (cpus("4-5"), cpus("6-7")));
        assert!(effective(&sim, "").is_disjoint(&cpus("4-7")));
    }
}

#[test]
fn a_remote_partition_that_somebody_made_is_out_of_reach() {
    for behaviour in behaviours() {
        let mut sim = logged(host(behaviour));
        sim.eyes.others(|k| {
            k.write_file(&p("machine.slice"), "cgroup.subtree_control", "+cpuset").unwrap();
            for path in ["machine.slice", "machine.slice/vm"] {
                k.write_file(&p(path), "cpuset.cpus.exclusive", "6-7").unwrap();
            }
            k.write_file(&p("machine.slice/vm"), "cpuset.cpus.partition", "root").unwrap();
        });
        sim.tick().unwrap();
        assert_eq!(effective(&sim, ""), cpus("0-5"));
        // Nobody looks below machine.slice; the root has lost them all the same.
        let error = refused(&mut sim, &Wish::new(owner("run/a"), 5, Isolation::Auto));
        assert!(matches!(error, AdmitError::Placement(_)), "{error}");
        assert_eq!(sim.state.free(), cpus("2-5"));
        assigned(&mut sim, &Wish::new(owner("run/a"), 4, Isolation::Auto));
        assert_eq!(sim.state.assignments.exclusive(), cpus("2-5"));
        // Nor can they take ours: refused by the kernel, and nothing has changed.
        let mine = sim.eyes.steps.len();
        let theirs =
            Foreign { path: p("user.slice"), file: "cpuset.cpus.exclusive".into(), text: "5".into() };
        assert_eq!(sim.eyes.foreign(&theirs), Err(Errno::EINVAL), "{behaviour:?}");
        sim.tick().unwrap();
        settled(&mut sim);
        assert_eq!(sim.eyes.steps.len(), mine);
        // When it ends, its CPUs are anybody's.
        sim.eyes.others(|k| k.write_file(&p("machine.slice/vm"), "cpuset.cpus.partition", "member").unwrap());
        sim.tick().unwrap();
        assert_eq!(sim.state.free(), cpus("6-7"), "{}", log(&sim));
    }
}

#[test]
fn isolated_is_what_was_asked_for() {
    for behaviour in behaviours() {
        let mut sim = logged(host(behaviour));
        let pid = client(&mut sim);
        assigned(&mut sim, &run("a", "2-3", Isolation::Isolated).with(pid));
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "isolated");
        assert_eq!(sim.eyes.set(&p(""), "cpuset.cpus.isolated"), Some(cpus("2-3")));
        let held = &sim.state.assignments.owners[&owner("run/a")];
        assert_eq!((held.kind(), held.warning()), (PartitionKind::Isolated, Some(STACKS)));
        // Where there is one CPU there is nothing to balance.
        assigned(&mut sim, &run("b", "4", Isolation::Isolated));
        assert_eq!(sim.state.assignments.owners[&owner("run/b")].warning(), None);
        // Unbound kernel threads have no business there at all.
        sim.probe.kthread_ns.insert(truepin::CpuId(3), 1_000_000);
        sim.wait(10 * SECOND);
        let verdict = sim.verdict(&owner("run/a")).unwrap();
        assert_eq!(verdict.judgement, Judgement::Violated);
        assert!(verdict.reasons[0].contains("took 1.000 ms (budget 0.000 ms)"), "{:?}", verdict.reasons);
        sim.restart().unwrap();
        settled(&mut sim);
        assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "isolated");
    }
}

#[test]
fn a_partition_becomes_the_other_kind_when_asked_again() {
    for behaviour in behaviours() {
        let mut sim = logged(host(behaviour));
        assigned(&mut sim, &existing("system.slice/a", "2-3", Isolation::Auto));
        let before = masks(sim.eyes.kernel());
        let state = |sim: &Sim| text(sim, "system.slice/a", CpusetFile::Partition);
        for (isolation, kind) in [
            (Isolation::Isolated, "isolated"),
            (Isolation::Isolated, "isolated"),
            (Isolation::Auto, "isolated"),
            (Isolation::Partition, "root"),
            (Isolation::Isolated, "isolated"),
        ] {
            sim.wait(SECOND);
            let (steps, was) = (sim.eyes.steps.len(), state(&sim));
            assigned(&mut sim, &existing("system.slice/a", "2-3", isolation));
            assert_eq!(state(&sim), kind);
            let wrote: Vec<String> = sim.eyes.steps[steps..].iter().map(|s| s.shell("")).collect();
            let want = format!("echo {kind} > /system.slice/a/cpuset.cpus.partition");
            assert_eq!(wrote, Vec::from_iter((was != kind).then_some(want)), "{}", log(&sim));
        }
        assert!(mask_changes(&before, &masks(sim.eyes.kernel())).is_empty());
        // What ran before it became that is not judged by the rules of now.
        let verdict = sim.verdict(&owner("cgroup/system.slice/a")).unwrap();
        assert_eq!(verdict.judgement, Judgement::Inconclusive);
        assert!(
            verdict.reasons[0].contains("it became isolated within the interval"),
            "{:?}",
            verdict.reasons
        );
        let from = sim.evidence().unwrap();
        sim.wait(SECOND);
        let now = sim.evidence().unwrap();
        let verdict = sim.state.verdict(&owner("cgroup/system.slice/a"), Some(&from), &now).unwrap();
        assert_eq!(verdict.judgement, Judgement::Held, "{:?}", verdict.reasons);
        let error = refused(&mut sim, &existing("system.slice/a", "2-3", Isolation::Member));
        assert!(matches!(error, AdmitError::Reserve(ReserveError::Differs { .. })), "{error}");
        settled(&mut sim);
    }
}

#[test]
fn a_change_of_kind_that_fails_is_taken_back() {
    let mut sim = sim();
    assigned(&mut sim, &existing("system.slice/a", "2-3", Isolation::Partition));
    sim.wait(SECOND);
    let before = (sim.state.assignments.clone(), masks(sim.eyes.kernel()));
    for nth in 0..2 {
        sim.eyes.others(|k| k.fault(nth, Fault::Fail(Errno::EBUSY)));
    }
    let error = refused(&mut sim, &existing("system.slice/a", "2-3", Isolation::Isolated));
    assert!(matches!(error, AdmitError::Kernel(_)), "{error}");
    sim.wait(crate::world::MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(before, (sim.state.assignments.clone(), masks(sim.eyes.kernel())));
    assert_eq!(text(&sim, "system.slice/a", CpusetFile::Partition), "root");
    assert_eq!(sim.verdict(&owner("cgroup/system.slice/a")).unwrap().judgement, Judgement::Held);
}
