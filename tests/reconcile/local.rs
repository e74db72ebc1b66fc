//! Partitions where the kernel has no `cpuset.cpus.exclusive`: the slice is one, and so are the owners in it.

use crate::world::{
    MINUTE, SECOND, assigned, client, cpus, effective, existing, files, findings, foreign, host, kinds, log,
    logged, owner, p, refused, run, settled, sound, text,
};
use truepin::assignments::Mode;
use truepin::plan::Problem;
use truepin::reconcile::{AdmitError, Answer, FindingKind};
use truepin::request::Isolation;
use truepin::verdict::Judgement;
use truepin::{CpuId, CpusetFile};
use truepin_tests::fake::{Behaviour, TaskTraits, mask_changes, masks};
use truepin_tests::sim::{Foreign, Sim, Wish};

fn bare() -> Sim {
    logged(host(Behaviour::local_only()))
}

/// `run/a` on 2-3, isolated `run/b` on 4, member `run/m` on 5, each with a process.
fn three() -> (Sim, [u32; 3]) {
    let mut sim = bare();
    let wishes = [
        run("a", "2-3", Isolation::Auto),
        run("b", "4", Isolation::Isolated),
        run("m", "5", Isolation::Member),
    ];
    let pids = wishes.map(|wish| {
        let pid = client(&mut sim);
        assigned(&mut sim, &wish.with(pid));
        pid
    });
    (sim, pids)
}

const SLICE: &str = "truepin.slice";

/// By the kernel's files and the tasks' masks.
#[track_caller]
fn is_whole(sim: &Sim, pids: [u32; 3]) {
    for (path, state, list) in [
        (SLICE, "root", "2-5"),
        ("truepin.slice/run-a", "root", "2-3"),
        ("truepin.slice/run-b", "isolated", "4"),
        ("truepin.slice/run-m", "member", "5"),
    ] {
        assert_eq!(text(sim, path, CpusetFile::Partition), state, "{path}\n{}", log(sim));
        assert_eq!(text(sim, path, CpusetFile::Cpus), list, "{path}\n{}", log(sim));
    }
    assert_eq!((effective(sim, ""), effective(sim, SLICE)), (cpus("0-1,6-7"), cpus("5")));
    for (pid, mask) in pids.into_iter().zip(["2-3", "4", "5"]) {
        assert_eq!(sim.eyes.kernel().mask(pid), Some(&cpus(mask)), "{}", log(sim));
    }
    for tid in sim.eyes.kernel().threads().filter(|t| !pids.contains(t)) {
        let mask = sim.eyes.kernel().mask(tid).unwrap();
        assert!(mask.is_disjoint(&cpus("2-5")), "task {tid} is allowed on {mask}\n{}", log(sim));
    }
}

#[test]
fn what_truepin_makes_are_partitions_and_what_others_made_are_members() {
    let (mut sim, pids) = three();
    is_whole(&sim, pids);
    assigned(&mut sim, &existing("system.slice/a", "6", Isolation::Auto));
    assert_eq!(sim.mode(&owner("cgroup/system.slice/a")), Some(Mode::Member));
    assert_eq!(effective(&sim, "user.slice"), cpus("0-1,7"));
    assert!(kinds(&sim).is_empty(), "{:?}", kinds(&sim));
    sim.wait(10 * SECOND);
    assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Held);
    // A new agent moves nothing.
    let before = (masks(sim.eyes.kernel()), sim.eyes.steps.len());
    sim.restart().unwrap();
    settled(&mut sim);
    assert!(mask_changes(&before.0, &masks(sim.eyes.kernel())).is_empty());
    assert_eq!(before.1, sim.eyes.steps.len());
    // Everything back.
    sim.eyes.others(|k| pids.iter().for_each(|pid| k.exit(*pid).unwrap()));
    assert!(matches!(sim.release(None).unwrap(), Answer::Released(_)));
    settled(&mut sim);
    assert!(sim.eyes.kernel().id(&p(SLICE)).is_none());
    assert_eq!(effective(&sim, ""), cpus("0-7"));
    assert_eq!(sim.eyes.not_put_back(true), [""; 0]);
}

#[test]
fn whatever_ends_one_it_is_made_anew_with_what_it_stands_on() {
    let (slice, a) = ("truepin.slice", "truepin.slice/run-a");
    for (file, value, told) in [
        // The slice's lists and states.
        ("user.slice/cpuset.cpus".into(), "3-6", &["parent-invalid truepin.slice user.slice"; 2][..]),
        (format!("{slice}/cpuset.cpus.partition"), "member", &["parent-member truepin.slice"; 2]),
        (format!("{slice}/cpuset.cpus.partition"), "isolated", &[]),
        (format!("{slice}/cpuset.cpus"), "2", &["parent-starves truepin.slice"; 2]),
        (format!("{slice}/cpuset.cpus"), "4-7", &["parent-invalid truepin.slice truepin.slice"; 2]),
        (format!("{slice}/cpuset.cpus"), "1-7", &["parent-invalid truepin.slice"; 2]),
        (format!("{slice}/cpuset.cpus"), "", &[]),
        (format!("{slice}/cgroup.subtree_control"), "-cpuset", &["no-files truepin.slice"; 3]),
        // The owner's.
        (format!("{a}/cpuset.cpus"), "2", &[]),
        (format!("{a}/cpuset.cpus"), "3-4", &["not-exclusive", "not-exclusive truepin.slice/run-a"]),
        (format!("{a}/cpuset.cpus"), "5", &["not-exclusive"]),
        (format!("{a}/cpuset.cpus"), "6-7", &[]),
        (format!("{a}/cpuset.cpus.partition"), "member", &["member"]),
        (format!("{a}/cpuset.cpus.partition"), "isolated", &[]),
        // A member's list over a partition.
        ("truepin.slice/run-m/cpuset.cpus".into(), "3,5", &["not-exclusive truepin.slice/run-m"]),
    ] {
        let (mut sim, pids) = three();
        sim.reports.clear();
        let (path, name) = file.rsplit_once('/').unwrap();
        let write = Foreign { path: p(path), file: name.into(), text: value.into() };
        // Where the kernel refuses it nothing has happened.
        let _ = sim.eyes.foreign(&write);
        crate::world::told(&mut sim, path, name, Some(7));
        settled(&mut sim);
        is_whole(&sim, pids);
        let explained: Vec<String> = findings(&sim, FindingKind::explanation)
            .into_iter()
            .map(|e| {
                let paths = e.culprits.iter().filter_map(|c| c.path()).map(truepin::CgroupPath::as_str);
                std::iter::once(e.cause.name()).chain(paths).collect::<Vec<_>>().join(" ")
            })
            .collect();
        assert_eq!(explained, told, "{value:?} into {file}\n{}", log(&sim));
        assert!(!kinds(&sim).contains("fell-back"), "{}", log(&sim));
    }
}

#[test]
fn a_command_that_goes_on_after_its_release_keeps_its_cpus_in_the_slice() {
    let (mut sim, [a, b, m]) = three();
    sim.release(Some(&owner("run/a"))).unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "member");
    assert_eq!(sim.eyes.kernel().mask(a), Some(&cpus("2-3")), "{}", log(&sim));
    // They are nobody's to have.
    assert_eq!(sim.state.free(), cpus("6-7"));
    assigned(&mut sim, &Wish::new(owner("run/c"), 1, Isolation::Auto));
    assert!(sim.state.assignments.exclusive().is_disjoint(&cpus("2-3")));
    sim.release(Some(&owner("run/c"))).unwrap();
    // When it has ended they are free, and the slice gives them back.
    sim.eyes.others(|k| k.exit(a).unwrap());
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!((sim.state.free(), text(&sim, SLICE, CpusetFile::Cpus)), (cpus("2-3,6-7"), "4-5".into()));
    // The last partition goes while its command runs: the slice is a member like any other, and so is the command.
    sim.release(Some(&owner("run/b"))).unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, SLICE, CpusetFile::Partition), "member");
    assert_eq!(sim.eyes.kernel().mask(b), Some(&cpus("0-4,6-7")), "{}", log(&sim));
    assert_eq!(sim.eyes.kernel().mask(m), Some(&cpus("5")));
}

#[test]
fn processes_in_the_slice_that_are_nobodys_get_a_cpu_there() {
    let mut sim = bare();
    let stranger = sim.eyes.others(|k| {
        k.mkdir(&p(SLICE)).unwrap();
        k.write_file(&p(SLICE), "cgroup.subtree_control", "+cpuset").unwrap();
        k.mkdir(&p("truepin.slice/x")).unwrap();
        k.spawn(&p("truepin.slice/x"), 1, TaskTraits::default()).unwrap()
    });
    let pid = client(&mut sim);
    assigned(&mut sim, &run("a", "3-4", Isolation::Partition).with(pid));
    let mask = sim.eyes.kernel().mask(stranger).unwrap().clone();
    assert_eq!(mask, cpus("2"), "{}", log(&sim));
    assert_eq!(text(&sim, SLICE, CpusetFile::Cpus), "2-4");
    assert_eq!(sim.state.free(), cpus("5-7"));
    // And when everything else is given away, that one stays theirs.
    assigned(&mut sim, &Wish::new(owner("run/b"), 3, Isolation::Partition));
    assert_eq!(sim.eyes.kernel().mask(stranger), Some(&mask));
    // Nothing left for them: said, and whoever leaves it open is a member.
    let mut sim = bare();
    sim.eyes.others(|k| {
        k.mkdir(&p(SLICE)).unwrap();
        k.mkdir(&p("truepin.slice/x")).unwrap();
        k.spawn(&p("truepin.slice/x"), 1, TaskTraits::default()).unwrap();
    });
    let before = files(&sim);
    let error = refused(&mut sim, &run("a", "2-7", Isolation::Partition));
    assert!(matches!(error, AdmitError::Problem(Problem::Crowded { .. })), "{error}");
    settled(&mut sim);
    let held = |(path, _): &(&(truepin::CgroupPath, CpusetFile), &String)| !path.0.is_within(&p(SLICE));
    assert_eq!(
        before.iter().filter(held).collect::<Vec<_>>(),
        files(&sim).iter().filter(held).collect::<Vec<_>>()
    );
    assigned(&mut sim, &run("a", "2-7", Isolation::Auto));
    assert_eq!(sim.mode(&owner("run/a")), Some(Mode::Member));
    let fell = findings(&sim, |k| matches!(k, FindingKind::FellBack { .. }).then(|| k.to_string()));
    assert!(fell.len() == 1 && fell[0].contains("truepin.slice/x, which no owner has"), "{fell:?}");
}

#[test]
fn a_slice_that_cannot_be_a_partition() {
    // Somebody reaches over it just before every write.
    let hostile = |sim: &mut Sim| {
        for nth in 0..400 {
            let write = Foreign { path: p("user.slice"), file: "cpuset.cpus".into(), text: "3".into() };
            sim.eyes.ambush(nth, write);
        }
    };
    let patient = || {
        let (mut setup, kernel) = host(Behaviour::local_only());
        setup.settings.repairs_per_minute = 1000;
        logged((setup, kernel))
    };
    // Who leaves it open becomes a member, and says why; who insists is refused, and nothing is left of it.
    let mut sim = patient();
    hostile(&mut sim);
    let error = refused(&mut sim, &run("a", "2-3", Isolation::Partition));
    assert!(matches!(&error, AdmitError::PartitionRefused { path, .. } if *path == p(SLICE)), "{error}");
    assert!(error.to_string().contains("cgroup /user.slice lists CPUs 3 in cpuset.cpus"), "{error}");
    sim.eyes.stand_down();
    sim.tick().unwrap();
    settled(&mut sim);
    assert!(sim.state.assignments.owners.is_empty());
    let mut sim = patient();
    hostile(&mut sim);
    drop(sim.admit(&run("a", "2-3", Isolation::Auto)).unwrap());
    sound(&mut sim);
    let why = findings(&sim, |k| match k {
        FindingKind::FellBack { why, .. } => Some(why.clone().unwrap().to_string()),
        _ => None,
    });
    assert!(why[0].contains("cgroup /user.slice lists CPUs 3"), "{why:?}");
    // One that stands already and insists is left alone for a minute, and comes back.
    let mut sim = patient();
    let pid = client(&mut sim);
    assigned(&mut sim, &run("a", "2-3", Isolation::Partition).with(pid));
    hostile(&mut sim);
    foreign(&mut sim, "user.slice/cpuset.cpus", "3", Some(9));
    sound(&mut sim);
    let said = findings(&sim, |k| matches!(k, FindingKind::PartitionRefused { .. }).then(|| k.to_string()));
    assert!(said.iter().any(|s| s.contains("/truepin.slice above it reads")), "{said:?}\n{}", log(&sim));
    assert_eq!(sim.verdict(&owner("run/a")).unwrap().judgement, Judgement::Violated);
    assert_eq!(sim.eyes.kernel().mask(pid), Some(&cpus("2-3")), "its own list holds");
    sim.eyes.stand_down();
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, "truepin.slice/run-a", CpusetFile::Partition), "root");
}

#[test]
fn a_fight_over_the_slice_leaves_the_owners_their_lists() {
    let (mut sim, pids) = three();
    for _ in 0..4 {
        foreign(&mut sim, "truepin.slice/cpuset.cpus.partition", "member", Some(9));
    }
    sound(&mut sim);
    assert!(kinds(&sim).contains("fight"), "{:?}", kinds(&sim));
    assert_eq!(text(&sim, SLICE, CpusetFile::Partition), "member", "{}", log(&sim));
    for (pid, mask) in pids.into_iter().zip(["2-3", "4", "5"]) {
        assert_eq!(sim.eyes.kernel().mask(pid), Some(&cpus(mask)), "their lists hold");
    }
    let steps = sim.eyes.steps.len();
    for _ in 0..5 {
        sim.wait(SECOND);
        sim.tick().unwrap();
    }
    assert_eq!(steps, sim.eyes.steps.len(), "{}", log(&sim));
    sim.wait(MINUTE);
    sim.tick().unwrap();
    settled(&mut sim);
    is_whole(&sim, pids);
}

#[test]
fn an_owner_whose_cpus_are_all_offline_has_a_cpu_of_the_slice() {
    let mut sim = bare();
    // Nothing is free to replace what goes.
    let [a, b, c] = [("a", "2-3"), ("b", "4"), ("c", "5-7")].map(|(name, set)| {
        let pid = client(&mut sim);
        assigned(&mut sim, &run(name, set, Isolation::Partition).with(pid));
        pid
    });
    sim.eyes.others(|k| k.set_online(CpuId(4), false).unwrap());
    sim.tick().unwrap();
    sim.rest().unwrap();
    sound(&mut sim);
    assert!(sim.state.problems().any(|p| matches!(p, Problem::Degraded { .. })), "{}", log(&sim));
    let spare = effective(&sim, "truepin.slice/run-b");
    assert!(!spare.is_empty() && spare.is_disjoint(&cpus("2-7")), "{spare}: {}", log(&sim));
    assert_eq!(sim.eyes.kernel().mask(a), Some(&cpus("2-3")));
    assert_eq!(sim.eyes.kernel().mask(c), Some(&cpus("5-7")));
    sim.eyes.others(|k| k.set_online(CpuId(4), true).unwrap());
    sim.tick().unwrap();
    sim.rest().unwrap();
    settled(&mut sim);
    assert_eq!(text(&sim, SLICE, CpusetFile::Cpus), "2-7");
    assert_eq!(sim.eyes.kernel().mask(b), Some(&cpus("4")));
}
