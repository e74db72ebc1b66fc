//! Plans for one machine, by hand: which steps, in which order, and why none.
//!
//! Eight CPUs, 0 reserved. The crash tests of the fake kernel hold plans to the invariants; these hold them to the
//! words of the module comments.

mod fence;
mod local;
mod restore;

use super::{check::check, *};
use crate::{
    assignments::FirstValue,
    observed::{CgroupKind, CgroupObserved, CpusetObserved, Observed, Value},
    partition::{InvalidReason, PartitionState},
};

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// A cgroup that inherits everything, with a process and cpuset enabled below it.
fn cgroup(id: u64) -> CgroupObserved {
    CgroupObserved {
        id: CgroupId(id),
        cpuset: Some(CpusetObserved {
            effective: cpus("0-7"),
            exclusive: Some(CpuSet::new()),
            exclusive_effective: Some(CpuSet::new()),
            partition: Some(PartitionState::valid(PartitionKind::Member)),
            ..CpusetObserved::default()
        }),
        enables_cpuset: true,
        populated: true,
        has_processes: false,
        kind: CgroupKind::Domain,
    }
}

/// The root and these cgroups.
fn host(paths: &[&str]) -> Observed {
    let mut observed = Observed { online: cpus("0-7"), ..Observed::default() };
    for (n, path) in [""].iter().chain(paths).enumerate() {
        observed.cgroups.insert(p(path), cgroup(n as u64 + 1));
    }
    observed
}

fn files<'a>(observed: &'a mut Observed, path: &str) -> &'a mut CpusetObserved {
    observed.cgroups.get_mut(&p(path)).unwrap().cpuset.as_mut().unwrap()
}

/// What the kernel shows of a valid partition.
fn partition(observed: &mut Observed, path: &str, set: &str) {
    let f = files(observed, path);
    (f.exclusive, f.exclusive_effective, f.effective) = (Some(cpus(set)), Some(cpus(set)), cpus(set));
    f.partition = Some(PartitionState::valid(PartitionKind::Root));
    let others: Vec<CgroupPath> =
        observed.cgroups.keys().filter(|c| !c.is_within(&p(path))).cloned().collect();
    for other in others {
        let f = observed.cgroups.get_mut(&other).unwrap().cpuset.as_mut().unwrap();
        f.effective = f.effective.difference(&cpus(set));
    }
}

/// These owners (cgroup, set, mode, made by truepin), and what follows for the pool.
fn desired(owners: &[(&str, &str, Mode, bool)]) -> Desired {
    let mut table = Assignments { reserved: cpus("0"), ..Assignments::default() };
    for (n, (path, set, mode, created)) in owners.iter().enumerate() {
        let assignment = crate::assignments::Assignment {
            cpus: cpus(set),
            cgroup: p(path),
            created: *created,
            mode: *mode,
            isolation: crate::request::Isolation::Auto,
            generation: 1,
            reason: String::new(),
            memory: std::collections::BTreeMap::new(),
            original: None,
            extra: crate::checkpoint::Extra::new(),
        };
        table.owners.insert(format!("run/o{n}").parse().unwrap(), assignment);
    }
    Desired::of(&p("t"), &table, &cpus("0-7"))
}

fn lines(plan: &Plan) -> Vec<String> {
    let phase = |p: Phase| serde_json::to_value(p).unwrap().as_str().unwrap().to_owned();
    let shell =
        |s: &Step| s.shell("").replace("cpuset.cpus", "cpus").replace("cgroup.subtree_control", "control");
    plan.steps.iter().map(|s| format!("{}: {}", phase(s.phase), shell(&s.step))).collect()
}

#[track_caller]
fn plans(desired: &Desired, observed: &Observed, expected: &[&str]) -> Plan {
    let plan = diff(desired, observed);
    assert_eq!(lines(&plan), expected);
    check(desired, observed, &plan.steps).unwrap();
    plan
}

fn recorded(desired: &mut Desired, path: &str, id: u64, values: &[(CpusetFile, &str)]) {
    let files = values.iter().map(|(f, v)| (*f, (*v).to_owned())).collect();
    desired.first.insert(p(path), FirstValue { id: CgroupId(id), files, ..FirstValue::default() });
}

#[test]
fn a_first_partition_in_a_bare_slice() {
    let mut observed = host(&["a"]);
    files(&mut observed, "a").cpus = cpus("1-3");
    observed.cgroups.get_mut(&p("")).unwrap().enables_cpuset = false;
    let mut d = desired(&[("t/x", "2-3", Mode::Partition, true)]);
    d.entering = vec![(p("t/x"), 7)];
    let plan = plans(
        &d,
        &observed,
        &[
            "prepare: echo +cpuset > /control",
            "prepare: mkdir /t",
            "prepare: echo +cpuset > /t/control",
            "prepare: mkdir /t/x",
            "shrink-pool: echo 1 > /a/cpus",
            "grow-exclusive: echo 2-3 > /t/cpus.exclusive",
            "grow-exclusive: echo 2-3 > /t/x/cpus.exclusive",
            "grow-exclusive: echo 2-3 > /t/x/cpus",
            "set-partition: echo root > /t/x/cpus.partition",
            "enter: echo 7 > /t/x/cgroup.procs",
        ],
    );
    assert_eq!(plan.first_phase().len(), 4);
    let value = |u: &Unrecorded| (u.path.as_str().to_owned(), u.file, u.value.clone());
    let all: Vec<_> = plan.unrecorded.iter().map(value).collect();
    assert_eq!(all, [("a".to_owned(), CpusetFile::Cpus, "1-3".to_owned())], "nothing of ours, all of others");
}

#[test]
fn a_member_takes_its_cpus_out_of_every_pool_cgroup() {
    let mut observed = host(&["a", "b", "b/c", "b/d"]);
    files(&mut observed, "a").cpus = cpus("2");
    let d = desired(&[("b/c", "2-3", Mode::Member, false)]);
    let plan = plans(
        &d,
        &observed,
        &[
            "grow-pool: echo 0-2,4-7 > /a/cpus",
            "shrink-pool: echo 0-1,4-7 > /a/cpus",
            "shrink-pool: echo 0-7 > /b/cpus",
            "shrink-pool: echo 0-1,4-7 > /b/d/cpus",
            "grow-exclusive: echo 2-3 > /b/c/cpus",
        ],
    );
    // Also what is to be written only when somebody changes it.
    assert!(plan.unrecorded.iter().any(|u| u.path == p("b/c") && u.file == CpusetFile::Partition));
    assert!(plan.unrecorded.iter().any(|u| u.path == p("b") && u.file == CpusetFile::Exclusive));
    // An agreed state plans nothing and records nothing anew.
    for (path, set) in [("a", "0-1,4-7"), ("b", "0-7"), ("b/d", "0-1,4-7"), ("b/c", "2-3")] {
        let f = files(&mut observed, path);
        (f.cpus, f.effective) = (cpus(set), cpus(set));
    }
    let mut d = d;
    for u in plan.unrecorded {
        let id = u.id.0;
        let first = d.first.entry(u.path).or_insert(FirstValue { id: CgroupId(id), ..FirstValue::default() });
        first.files.insert(u.file, u.value);
    }
    let governed = ["a", "b", "b/c", "b/d"].map(p).into();
    assert_eq!(diff(&d, &observed), Plan { governed, ..Plan::default() });
    // Without an owner nobody needs anything of it.
    let free = Desired { owners: BTreeMap::new(), pool_written: false, ..d };
    assert!(diff(&free, &observed).governed.is_empty());
}

#[test]
fn a_swap_gives_before_it_takes() {
    let mut observed = host(&["t", "t/x", "t/y"]);
    files(&mut observed, "t").exclusive = Some(cpus("2-5"));
    for (path, set) in [("t/x", "2-3"), ("t/y", "4-5")] {
        files(&mut observed, path).cpus = cpus(set);
        partition(&mut observed, path, set);
    }
    let d = desired(&[("t/x", "2,4", Mode::Partition, true), ("t/y", "3,5", Mode::Partition, true)]);
    plans(
        &d,
        &observed,
        &[
            "prepare: echo 2 > /t/x/cpus",
            "prepare: echo 5 > /t/y/cpus",
            "shrink-exclusive: echo 2 > /t/x/cpus.exclusive",
            "shrink-exclusive: echo 5 > /t/y/cpus.exclusive",
            "grow-exclusive: echo 2,4 > /t/x/cpus.exclusive",
            "grow-exclusive: echo 3,5 > /t/y/cpus.exclusive",
            "grow-exclusive: echo 2,4 > /t/x/cpus",
            "grow-exclusive: echo 3,5 > /t/y/cpus",
        ],
    );
    // Nothing in common: no partition shrinks to nothing, it ends first.
    let d = desired(&[("t/x", "4-5", Mode::Partition, true), ("t/y", "2-3", Mode::Partition, true)]);
    let plan = diff(&d, &observed);
    check(&d, &observed, &plan.steps).unwrap();
    let shell = lines(&plan);
    assert!(shell.contains(&"shrink-exclusive: echo member > /t/x/cpus.partition".into()), "{shell:#?}");
    assert!(shell.contains(&"prepare: echo 0-1,6-7 > /t/x/cpus".into()), "waits in the pool: {shell:#?}");
    assert!(shell.contains(&"set-partition: echo root > /t/y/cpus.partition".into()), "{shell:#?}");
}

#[test]
fn a_partition_that_is_not_one_begins_anew() {
    let settled = |state: PartitionState| {
        let mut observed = host(&["t", "t/x"]);
        files(&mut observed, "t").exclusive = Some(cpus("2-3"));
        files(&mut observed, "t/x").cpus = cpus("2-3");
        partition(&mut observed, "t/x", "2-3");
        files(&mut observed, "t/x").partition = Some(state);
        observed
    };
    let d = desired(&[("t/x", "2-3", Mode::Partition, true)]);
    let valid = || PartitionState::valid(PartitionKind::Root);
    plans(&d, &settled(valid()), &[]);
    let again = [
        "shrink-exclusive: echo member > /t/x/cpus.partition",
        "set-partition: echo root > /t/x/cpus.partition",
    ];
    let invalid = PartitionState { kind: PartitionKind::Root, invalid: Some(InvalidReason::Bare) };
    plans(&d, &settled(invalid.clone()), &again);
    // The state reads well and the sets do not: the root has one of the CPUs, or the owner lacks it. Whoever has seen that
    // orders the rest.
    let rebuilt = Desired { rebuild: [p("t/x")].into(), ..d.clone() };
    for (path, effective) in [("", "0-1,3-7"), ("t", "0-7"), ("t/x", "2")] {
        let mut observed = settled(valid());
        files(&mut observed, path).effective = cpus(effective);
        assert_eq!(crate::sweep::sets(&d, &observed).len(), 1, "{path}");
        plans(&d, &observed, &[]);
        plans(&rebuilt, &observed, &again);
        observed.copied = true;
        assert_eq!(crate::sweep::sets(&d, &observed), []);
    }
    // What the owner's own children took is still the owner's.
    let mut observed = settled(valid());
    observed.cgroups.insert(p("t/x/in"), cgroup(9));
    partition(&mut observed, "t/x/in", "3");
    files(&mut observed, "t/x").effective = cpus("2");
    assert_eq!(crate::sweep::sets(&d, &observed), []);
    // The other kind keeps its CPUs on the way.
    plans(
        &d,
        &settled(PartitionState::valid(PartitionKind::Isolated)),
        &["set-partition: echo root > /t/x/cpus.partition"],
    );
    // An invalid one may still hold CPUs of the root. They return as far as the cgroups above list them, so those
    // come first, and `member` comes with the next plan.
    let mut observed = settled(invalid);
    files(&mut observed, "t").exclusive = Some(cpus("2"));
    plans(&d, &observed, &["grow-exclusive: echo 2-3 > /t/cpus.exclusive"]);
}

#[test]
fn a_slice_that_somebody_made_a_partition_comes_first() {
    let mut observed = host(&["t", "t/x"]);
    for (path, set) in [("t", "2-5"), ("t/x", "2-3")] {
        files(&mut observed, path).cpus = cpus(set);
        partition(&mut observed, path, set);
    }
    files(&mut observed, "t").exclusive = Some(cpus("2-3"));
    let d = desired(&[("t/x", "2-3", Mode::Partition, true)]);
    let plan = diff(&d, &observed);
    assert_eq!(lines(&plan)[0], "prepare: echo member > /t/cpus.partition");
    assert_eq!(plan.first_phase().len(), 1);
}

#[test]
fn problems() {
    let mut observed = host(&["a", "a/x", "b", "b/y"]);
    observed.cgroups.get_mut(&p("a")).unwrap().has_processes = true;
    observed.cgroups.get_mut(&p("a")).unwrap().enables_cpuset = false;
    observed.cgroups.get_mut(&p("a/x")).unwrap().kind = CgroupKind::DomainInvalid;
    partition(&mut observed, "b", "4-5");
    let told = |owners: &[(&str, &str, Mode, bool)], observed: &Observed| {
        let d = desired(owners);
        let plan = diff(&d, observed);
        let touched = |s: &Planned| d.owners.keys().any(|o| s.step.path() == o);
        assert!(!plan.steps.iter().any(touched), "{:?}", lines(&plan));
        plan.problems.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let member = Mode::Member;
    assert_eq!(
        told(&[("gone/x", "2", member, false)], &observed)[0],
        "cgroup /gone/x of run/o0 does not exist"
    );
    let a = told(&[("a/x", "2", member, false)], &observed);
    assert!(
        a[0].contains("is of type domain invalid") && a[1].contains("/a holds processes itself"),
        "{a:?}"
    );
    let b = told(&[("b/y", "2", member, false)], &observed);
    assert_eq!(b, ["cgroup /b, above that of run/o0, is a partition of another manager"]);
    // Somebody's partition beside us: what it holds, or would hold if it were valid.
    let mut observed = host(&["a", "b"]);
    partition(&mut observed, "b", "4-5");
    let held = diff(&desired(&[("a", "5-6", Mode::Partition, false)]), &observed).problems;
    assert!(matches!(&held[..], [Problem::ForeignPartition { cpus: c, .. }] if *c == cpus("5")), "{held:?}");
    files(&mut observed, "b").partition =
        Some(PartitionState { kind: PartitionKind::Root, invalid: Some(InvalidReason::Bare) });
    files(&mut observed, "b").cpus = cpus("6");
    let asked = diff(&desired(&[("a", "6", Mode::Partition, false)]), &observed);
    assert!(matches!(&asked.problems[..], [Problem::ForeignPartition { cpus: c, .. }] if *c == cpus("6")));
    assert!(asked.steps.iter().all(|s| s.step.path() != &p("b")), "never written");
    // Nothing is left for anybody: said, and nobody's list is emptied.
    let mut d = desired(&[("a", "2-3", Mode::Member, false)]);
    d.pool = CpuSet::new();
    let plan = diff(&d, &host(&["a", "b"]));
    assert_eq!(plan.problems, [Problem::PoolEmpty]);
    assert!(plan.steps.iter().all(|s| s.step.path() == &p("a")), "{:?}", lines(&plan));
}

#[test]
fn what_is_in_a_fight_or_blocked_is_left_alone_and_the_rest_goes_on() {
    let mut observed = host(&["a", "b", "t", "t/x"]);
    let mut d = desired(&[("t/x", "2-3", Mode::Member, true)]);
    d.frozen.insert((p("a"), CpusetFile::Cpus));
    plans(&d, &observed, &["shrink-pool: echo 0-1,4-7 > /b/cpus", "grow-exclusive: echo 2-3 > /t/x/cpus"]);
    d.blocked.insert(p("t/x"));
    plans(&d, &observed, &["shrink-pool: echo 0-1,4-7 > /b/cpus"]);
    // A partition whose state is fought over keeps its set: it can neither end nor become empty.
    partition(&mut observed, "t/x", "2-3");
    let mut d = desired(&[]);
    d.frozen.insert((p("t/x"), CpusetFile::Partition));
    files(&mut observed, "t").exclusive = Some(cpus("2-3"));
    let plan = diff(&d, &observed);
    check(&d, &observed, &plan.steps).unwrap();
    assert!(!lines(&plan).iter().any(|l| l.contains("exclusive")), "{:?}", lines(&plan));
    // Nor does its cgroup go while it is an invalid one, empty or not.
    for (state, removed) in [("root", true), ("root invalid", false), ("member", true)] {
        files(&mut observed, "t/x").partition = Some(state.parse().unwrap());
        observed.cgroups.get_mut(&p("t/x")).unwrap().populated = false;
        let planned = lines(&diff(&d, &observed)).contains(&"remove: rmdir /t/x".into());
        assert_eq!(planned, removed, "{state}");
    }
    // What cannot be removed keeps out of the way instead.
    let mut observed = host(&["t", "t/x"]);
    observed.cgroups.get_mut(&p("t/x")).unwrap().populated = false;
    files(&mut observed, "t/x").cpus = cpus("2-3");
    let mut d = desired(&[]);
    plans(&d, &observed, &["remove: rmdir /t/x"]);
    d.blocked.insert(p("t/x"));
    plans(&d, &observed, &["grow-pool: echo 0-7 > /t/x/cpus"]);
}

#[test]
fn the_checker_finds_each_invariant_broken() {
    let mut observed = host(&["a", "b", "c", "e"]);
    files(&mut observed, "e").cpus = cpus("0-1");
    for (path, set) in [("a", "2-3"), ("b", "4-5")] {
        files(&mut observed, path).cpus = cpus(set);
        partition(&mut observed, path, set);
    }
    files(&mut observed, "c").cpus = cpus("6-7");
    let d = desired(&[
        ("a", "2-3", Mode::Partition, false),
        ("b", "4-5", Mode::Partition, false),
        ("c", "6-7", Mode::Member, false),
    ]);
    let write = |path: &str, file, new| Planned {
        phase: Phase::GrowPool,
        step: Step::Write { path: p(path), file, old: String::new(), new },
    };
    let list = |path: &str, set: &str| write(path, CpusetFile::Cpus, Value::Cpus(cpus(set)));
    let exclusive = |path: &str, set: &str| write(path, CpusetFile::Exclusive, Value::Cpus(cpus(set)));
    let fine = [list("c", "6"), exclusive("a", "2"), exclusive("b", "3-5"), list("c", "6-7")];
    assert_eq!(check(&d, &observed, &fine), Ok(()));
    for (steps, index, invariant, needle) in [
        (vec![exclusive("a", "2-4")], 0, "I1", "/a and /b would both have CPUs 4"),
        (vec![exclusive("a", "2"), exclusive("b", "3-6")], 1, "I1", "both have CPUs 6"),
        (vec![list("c", "5-6")], 0, "I1", "/b and /c would both have CPUs 5"),
        (vec![list("e", "1,5")], 0, "I1", "/e would reach over partition /b on CPUs 5"),
        (vec![exclusive("a", "")], 0, "I2", "partition /a would be left without CPUs"),
        (vec![list("c", "")], 0, "I2", "owner /c would inherit every CPU"),
        (vec![list("c", "9")], 0, "I2", "no online CPU of its own"),
        (vec![list("c", "7"), exclusive("b", "0-1,4-7")], 1, "I1", "both have CPUs 7"),
    ] {
        let broken = check(&d, &observed, &steps).unwrap_err();
        assert_eq!((broken.index, broken.invariant), (index, invariant), "{broken}");
        assert!(broken.what.contains(needle), "{broken}");
    }
    let two = desired(&[("a", "2-3", Mode::Partition, false), ("b", "4-5", Mode::Partition, false)]);
    let mut only = observed.clone();
    for path in ["c", "e"] {
        only.cgroups.remove(&p(path));
    }
    let all = check(&two, &only, &[exclusive("b", "0-1,4-7")]).unwrap_err();
    assert_eq!(all.invariant, "I3", "{all}");
    // Of an exclusive list counts what the members above list too.
    let mut wide = host(&["t", "t/x", "t/y"]);
    partition(&mut wide, "t/x", "2-5");
    let one = desired(&[("t/x", "2-3", Mode::Partition, true), ("t/y", "4-5", Mode::Member, true)]);
    for (above, fine) in [("2-3", true), ("2-4", false), ("2-5", false)] {
        files(&mut wide, "t").exclusive = Some(cpus(above));
        assert_eq!(check(&one, &wide, &[list("t/y", "4-5")]).is_ok(), fine, "with {above} above");
    }
    // What was broken before is mended in more than one step.
    files(&mut observed, "c").cpus = cpus("5-7");
    assert_eq!(check(&d, &observed, &[exclusive("a", "2"), list("c", "5-6"), list("c", "6")]), Ok(()));
    let worse = check(&d, &observed, &[list("c", "4-7")]).unwrap_err();
    assert!(worse.what.contains("CPUs 4"), "{worse}");
}

#[test]
fn who_has_no_cpu_left_runs_in_the_pool() {
    let owners = [("t/x", "6-7", Mode::Partition, true), ("t/y", "4-5", Mode::Member, true)];
    let d = |online: &str| Desired { pool: cpus("0-3").intersection(&cpus(online)), ..desired(&owners) };
    let mut observed = host(&["t", "t/x", "t/y"]);
    files(&mut observed, "t").exclusive = Some(cpus("6-7"));
    files(&mut observed, "t/x").cpus = cpus("6-7");
    partition(&mut observed, "t/x", "6-7");
    (files(&mut observed, "t/y").cpus, files(&mut observed, "t/y").effective) = (cpus("4-5"), cpus("4-5"));
    plans(&d("0-7"), &observed, &[]);
    // As 7.3 leaves it: allowed on what the cgroup above has, the member's CPUs among that.
    observed.online = cpus("0-5");
    files(&mut observed, "t/x").partition =
        Some(PartitionState { kind: PartitionKind::Root, invalid: Some(InvalidReason::Bare) });
    files(&mut observed, "t/x").effective = cpus("0-5");
    let steps = [
        "prepare: echo 0-3,6-7 > /t/x/cpus.exclusive",
        "shrink-exclusive: echo member > /t/x/cpus.partition",
        "grow-exclusive: echo 6-7 > /t/x/cpus.exclusive",
        "grow-exclusive: echo 0-3,6-7 > /t/x/cpus",
    ];
    plans(&d("0-5"), &observed, &steps);
    // Read before the kernel has told, and where it never does: it is valid still.
    let mut early = observed.clone();
    files(&mut early, "t/x").partition = Some(PartitionState::valid(PartitionKind::Root));
    plans(&d("0-5"), &early, &steps);
    // Somebody's wide list above: with the pool it would have the pool's CPUs. It is written as it is to be.
    let mut wide = observed.clone();
    files(&mut wide, "t").exclusive = Some(cpus("0-2,6-7"));
    let mut steps = steps;
    steps[0] = "prepare: echo 3,6-7 > /t/x/cpus.exclusive";
    let plan = diff(&d("0-5"), &wide);
    assert!(lines(&plan).contains(&steps[0].to_owned()), "{:?}", lines(&plan));
    // One is back: only its own again, and then a partition.
    files(&mut observed, "t/x").partition = Some(PartitionState::valid(PartitionKind::Member));
    files(&mut observed, "t/x").cpus = cpus("0-3,6-7");
    plans(&d("0-5"), &observed, &[]);
    observed.online = cpus("0-6");
    let steps = ["shrink-exclusive: echo 6-7 > /t/x/cpus", "set-partition: echo root > /t/x/cpus.partition"];
    plans(&d("0-6"), &observed, &steps);
    // No partition is made that leaves nothing to the root.
    observed.online = cpus("4-7");
    let plan = diff(&d("4-7"), &observed);
    assert!(plan.problems.contains(&Problem::PoolEmpty), "{:?}", plan.problems);
    assert!(!lines(&plan).iter().any(|l| l.contains("set-partition")), "{:?}", lines(&plan));
}

#[test]
fn all_cpus_of_a_partition_are_replaced_in_one_write() {
    let mut observed = host(&["t", "t/x"]);
    files(&mut observed, "t").exclusive = Some(cpus("6-7"));
    files(&mut observed, "t/x").cpus = cpus("6-7");
    partition(&mut observed, "t/x", "6-7");
    let d = desired(&[("t/x", "2-3", Mode::Partition, true)]);
    // The owner's own list is never empty on the way: 7.3 refuses that where the old CPUs are offline.
    let steps = [
        "shrink-exclusive: echo member > /t/x/cpus.partition",
        "shrink-exclusive: echo '' > /t/cpus.exclusive",
        "grow-exclusive: echo 2-3 > /t/cpus.exclusive",
        "grow-exclusive: echo 2-3 > /t/x/cpus.exclusive",
        "grow-exclusive: echo 2-3 > /t/x/cpus",
        "set-partition: echo root > /t/x/cpus.partition",
    ];
    plans(&d, &observed, &steps);
}

#[test]
fn a_list_is_written_with_another_value_first() {
    let mut observed = host(&["t", "t/x", "t/y"]);
    files(&mut observed, "t").exclusive = Some(cpus("2-3"));
    files(&mut observed, "t/x").cpus = cpus("2-3");
    partition(&mut observed, "t/x", "2-3");
    (files(&mut observed, "t/y").cpus, files(&mut observed, "t/y").effective) = (cpus("5"), cpus("5"));
    let mut d = desired(&[("t/x", "2-3", Mode::Partition, true), ("t/y", "5", Mode::Member, true)]);
    d.rewrite = [p("t/x"), p("t/y")].into();
    let steps = ["shrink-exclusive: echo 2 > /t/x/cpus", "shrink-exclusive: echo 0,5 > /t/y/cpus"];
    plans(&d, &observed, &steps);
    // What then is there is put right, whether it is still ordered or not.
    files(&mut observed, "t/x").cpus = cpus("2");
    files(&mut observed, "t/y").cpus = cpus("0,5");
    for rewrite in [d.rewrite.clone(), BTreeSet::new()] {
        d.rewrite = rewrite;
        let steps = ["shrink-exclusive: echo 5 > /t/y/cpus", "grow-exclusive: echo 2-3 > /t/x/cpus"];
        plans(&d, &observed, &steps);
    }
}
