//! Plans where partitions are local: the slice is one, and so are the owners in it.

use super::*;

/// As [`host`], on a kernel without `cpuset.cpus.exclusive`.
fn host(paths: &[&str]) -> Observed {
    let mut observed = super::host(paths);
    for cgroup in observed.cgroups.values_mut() {
        let files = cgroup.cpuset.as_mut().unwrap();
        (files.exclusive, files.exclusive_effective) = (None, None);
    }
    observed
}

fn desired(owners: &[(&str, &str, Mode, bool)], observed: &Observed) -> Desired {
    let mut d = Desired { local: true, ..super::desired(owners) };
    d.pool = d.pool.difference(&foreign(&d, observed, None));
    d.house_leftovers(observed);
    d
}

/// What 6.1 shows of a partition of `set`, from whose own set partitions below it took `given`.
fn partition(observed: &mut Observed, path: &str, set: &str, given: &str) {
    let f = files(observed, path);
    (f.cpus, f.effective) = (cpus(set), cpus(set).difference(&cpus(given)));
    f.partition = Some(PartitionState::valid(PartitionKind::Root));
}

fn invalid(observed: &mut Observed, path: &str, said: &str) {
    let invalid = Some(InvalidReason::Said(said.into()));
    files(observed, path).partition = Some(PartitionState { kind: PartitionKind::Root, invalid });
}

/// The slice `t` with two partitions and a member: 2-3, 4-5, 6.
fn settled() -> Observed {
    let mut observed = host(&["a", "t", "t/x", "t/y", "t/m"]);
    for path in ["", "a"] {
        files(&mut observed, path).effective = cpus("0-1,7");
    }
    files(&mut observed, "a").cpus = cpus("0-1,7");
    partition(&mut observed, "t", "2-6", "2-5");
    partition(&mut observed, "t/x", "2-3", "");
    partition(&mut observed, "t/y", "4-5", "");
    (files(&mut observed, "t/m").cpus, files(&mut observed, "t/m").effective) = (cpus("6"), cpus("6"));
    observed
}

const X: (&str, &str, Mode, bool) = ("t/x", "2-3", Mode::Partition, true);
const Y: (&str, &str, Mode, bool) = ("t/y", "4-5", Mode::Partition, true);
const N: (&str, &str, Mode, bool) = ("t/n", "7", Mode::Member, true);
const M: (&str, &str, Mode, bool) = ("t/m", "6", Mode::Member, true);

#[track_caller]
fn plans(owners: &[(&str, &str, Mode, bool)], observed: &Observed, expected: &[&str]) {
    super::plans(&desired(owners, observed), observed, expected);
}

#[test]
fn the_first_one_makes_the_slice_a_partition() {
    let mut observed = host(&["a"]);
    files(&mut observed, "a").cpus = cpus("1-3");
    observed.cgroups.get_mut(&p("")).unwrap().enables_cpuset = false;
    let mut d = desired(&[X], &observed);
    d.entering = vec![(p("t/x"), 7)];
    super::plans(
        &d,
        &observed,
        &[
            "prepare: echo +cpuset > /control",
            "prepare: mkdir /t",
            "prepare: echo +cpuset > /t/control",
            "prepare: mkdir /t/x",
            "shrink-pool: echo 1 > /a/cpus",
            "grow-exclusive: echo 2-3 > /t/cpus",
            "grow-exclusive: echo 2-3 > /t/x/cpus",
            "set-partition: echo root > /t/cpus.partition",
            "set-partition: echo root > /t/x/cpus.partition",
            "enter: echo 7 > /t/x/cgroup.procs",
        ],
    );
    // Isolated is the owner's affair: the slice balances.
    d.owners.get_mut(&p("t/x")).unwrap().kind = PartitionKind::Isolated;
    let shell = lines(&diff(&d, &observed));
    assert!(shell.contains(&"set-partition: echo root > /t/cpus.partition".into()), "{shell:#?}");
    assert!(shell.contains(&"set-partition: echo isolated > /t/x/cpus.partition".into()), "{shell:#?}");
}

#[test]
fn what_stands_is_left_alone_and_grows_from_the_top() {
    plans(&[X, Y, M], &settled(), &[]);
    // One more: those beside the slice draw back, then it grows, then the owner does.
    let mut observed = settled();
    let new = ("t/z", "7", Mode::Partition, true);
    plans(
        &[X, Y, M, new],
        &observed,
        &[
            "prepare: mkdir /t/z",
            "shrink-pool: echo 0-1 > /a/cpus",
            "grow-exclusive: echo 2-7 > /t/cpus",
            "grow-exclusive: echo 7 > /t/z/cpus",
            "set-partition: echo root > /t/z/cpus.partition",
        ],
    );
    // A part of one's CPUs for another one: neither ends.
    let moved = [("t/x", "2", Mode::Partition, true), ("t/y", "3-5", Mode::Partition, true), M];
    plans(&moved, &observed, &["prepare: echo 2 > /t/x/cpus", "grow-exclusive: echo 3-5 > /t/y/cpus"]);
    // All of one's: it has nowhere to go before the slice has grown, and who takes them ends as well.
    let moved = [("t/x", "7", Mode::Partition, true), ("t/y", "2-5", Mode::Partition, true), M];
    plans(
        &moved,
        &observed,
        &[
            "shrink-exclusive: echo member > /t/x/cpus.partition",
            "shrink-exclusive: echo member > /t/y/cpus.partition",
            "shrink-pool: echo 0-1 > /a/cpus",
            "grow-exclusive: echo 2-7 > /t/cpus",
            "grow-exclusive: echo 7 > /t/x/cpus",
            "grow-exclusive: echo 2-5 > /t/y/cpus",
            "set-partition: echo root > /t/x/cpus.partition",
            "set-partition: echo root > /t/y/cpus.partition",
        ],
    );
    // What somebody has widened.
    files(&mut observed, "t").cpus = cpus("1-7");
    plans(&[X, Y, M], &observed, &["shrink-exclusive: echo 2-6 > /t/cpus"]);
}

#[test]
fn one_that_is_lost_begins_anew_with_what_it_stands_on() {
    let not = "Parent is not a partition root";
    // The owner's alone.
    let mut observed = settled();
    invalid(&mut observed, "t/x", "Cpu list in cpuset.cpus not exclusive");
    files(&mut observed, "t").effective = cpus("2-3,6");
    plans(
        &[X, Y, M],
        &observed,
        &[
            "shrink-exclusive: echo member > /t/x/cpus.partition",
            "set-partition: echo root > /t/x/cpus.partition",
        ],
    );
    let all = [
        "shrink-exclusive: echo member > /t/x/cpus.partition",
        "shrink-exclusive: echo member > /t/y/cpus.partition",
        "shrink-exclusive: echo member > /t/cpus.partition",
        "set-partition: echo root > /t/cpus.partition",
        "set-partition: echo root > /t/x/cpus.partition",
        "set-partition: echo root > /t/y/cpus.partition",
    ];
    // The slice's: those below read as if nothing had happened, on 6.1.
    let mut observed = settled();
    invalid(&mut observed, "t", "Cpu list in cpuset.cpus not exclusive");
    files(&mut observed, "").effective = cpus("0-7");
    plans(&[X, Y, M], &observed, &all);
    // The state reads well and the sets do not.
    let mut observed = settled();
    files(&mut observed, "").effective = cpus("0-3,7");
    let d = desired(&[X, Y, M], &observed);
    assert!(crate::plan::slice_leaks(&d, &observed));
    super::plans(&Desired { rebuild: [p("t")].into(), ..d }, &observed, &all);
    let mut observed = settled();
    files(&mut observed, "t").effective = cpus("3,6");
    let d = desired(&[X, Y, M], &observed);
    super::plans(
        &Desired { rebuild: [p("t/x")].into(), ..d },
        &observed,
        &[
            "shrink-exclusive: echo member > /t/x/cpus.partition",
            "set-partition: echo root > /t/x/cpus.partition",
        ],
    );
    // Somebody wrote member into the slice's.
    let mut observed = settled();
    files(&mut observed, "t").partition = Some(PartitionState::valid(PartitionKind::Member));
    for path in ["t/x", "t/y"] {
        invalid(&mut observed, path, not);
    }
    let without = [all[0], all[1], all[3], all[4], all[5]];
    plans(&[X, Y, M], &observed, &without);
    // And is in a fight over it: the owners are members until that is over.
    let mut d = desired(&[X, Y, M], &observed);
    d.frozen.insert((p("t"), CpusetFile::Partition));
    super::plans(&d, &observed, &all[..2]);
    // Another kind of slice is none of ours.
    let mut observed = settled();
    files(&mut observed, "t").partition = Some(PartitionState::valid(PartitionKind::Isolated));
    plans(&[X, Y, M], &observed, &["set-partition: echo root > /t/cpus.partition"]);
}

#[test]
fn the_last_one_takes_the_slice_with_it() {
    // One of two, gone: its CPUs stay in the slice's list until it has ended.
    let mut observed = settled();
    observed.cgroups.get_mut(&p("t/y")).unwrap().populated = false;
    plans(&[X, M], &observed, &["shrink-exclusive: echo member > /t/y/cpus.partition", "remove: rmdir /t/y"]);
    observed.cgroups.remove(&p("t/y"));
    files(&mut observed, "t").effective = cpus("4-6");
    plans(&[X, M], &observed, &["shrink-exclusive: echo 2-3,6 > /t/cpus"]);
    // The last: a member stays, and the slice is one as well.
    observed.cgroups.get_mut(&p("t/x")).unwrap().populated = false;
    plans(&[M], &observed, &["shrink-exclusive: echo member > /t/x/cpus.partition", "remove: rmdir /t/x"]);
    observed.cgroups.remove(&p("t/x"));
    plans(&[M], &observed, &["shrink-exclusive: echo member > /t/cpus.partition"]);
    files(&mut observed, "t").partition = Some(PartitionState::valid(PartitionKind::Member));
    let d = desired(&[M], &observed);
    let plan = diff(&d, &observed);
    let shell = lines(&plan);
    assert!(shell.contains(&"grow-pool: echo '' > /t/cpus".into()), "{shell:#?}");
    check(&d, &observed, &plan.steps).unwrap();
    // A member of two modes: the pool is kept off before its partition ends, and the slice ends after that.
    let observed = settled();
    plans(
        &[("t/x", "2-3", Mode::Member, true), Y, M],
        &observed,
        &["set-partition: echo member > /t/x/cpus.partition"],
    );
}

#[test]
fn processes_that_no_owner_has_get_cpus_inside() {
    // Released while it runs: it keeps what it has, and nobody else gets that.
    let observed = settled();
    let d = desired(&[X, M], &observed);
    assert_eq!(d.leftovers, [(p("t/y"), cpus("4-5"))].into());
    assert_eq!((d.pool.clone(), foreign(&d, &observed, None)), (cpus("0-1,7"), cpus("4-5")));
    super::plans(&d, &observed, &["shrink-exclusive: echo member > /t/y/cpus.partition"]);
    let mut ended = observed.clone();
    files(&mut ended, "t/y").partition = Some(PartitionState::valid(PartitionKind::Member));
    files(&mut ended, "t").effective = cpus("4-6");
    plans(&[X, M], &ended, &[]);
    // From elsewhere, into an empty list: one CPU for all of them, none that is reserved, and the same one again.
    let mut observed = host(&["t", "t/x", "t/f", "t/g"]);
    let mut d = desired(&[X], &observed);
    assert_eq!(d.leftovers, [(p("t/f"), cpus("1")), (p("t/g"), cpus("1"))].into());
    super::plans(
        &d,
        &observed,
        &[
            "shrink-pool: echo 1 > /t/f/cpus",
            "shrink-pool: echo 1 > /t/g/cpus",
            "grow-exclusive: echo 1-3 > /t/cpus",
            "grow-exclusive: echo 2-3 > /t/x/cpus",
            "set-partition: echo root > /t/cpus.partition",
            "set-partition: echo root > /t/x/cpus.partition",
        ],
    );
    partition(&mut observed, "t", "2-3,5", "2-3");
    d.house_leftovers(&observed);
    assert_eq!(d.leftovers.values().collect::<Vec<_>>(), [&cpus("5"), &cpus("5")], "what is there already");
    // An owner all of whose CPUs are offline.
    let mut observed = settled();
    observed.online = cpus("0-3,6-7");
    let d = desired(&[X, Y, M], &observed);
    assert_eq!(d.leftovers, [(p("t/y"), cpus("1"))].into());
    assert_eq!(foreign(&d, &observed, None), cpus(""), "what it is lent may be given to others");
    let plan = diff(&d, &observed);
    assert_eq!(
        lines(&plan),
        [
            "shrink-exclusive: echo member > /t/y/cpus.partition",
            "shrink-pool: echo 0,7 > /a/cpus",
            "grow-exclusive: echo 1-6 > /t/cpus",
            "grow-exclusive: echo 1,4-5 > /t/y/cpus",
        ]
    );
    // Nothing is left to give: said.
    let observed = host(&["t", "t/x", "t/f"]);
    let d = desired(&[("t/x", "1-7", Mode::Partition, true)], &observed);
    assert_eq!(diff(&d, &observed).problems, [Problem::Crowded { path: p("t/f") }]);
    // No slice becomes a partition that leaves nothing to the root; one that is stays.
    let mut observed = host(&["t", "t/x"]);
    let d = Desired { pool: CpuSet::new(), ..desired(&[X], &observed) };
    assert!(
        !lines(&diff(&d, &observed)).iter().any(|l| l.contains("partition")),
        "{:?}",
        diff(&d, &observed)
    );
    partition(&mut observed, "t", "2-3", "");
    assert!(!lines(&diff(&d, &observed)).iter().any(|l| l.contains("> /t/cpus.partition")));
}

#[test]
fn the_checker_knows_what_a_local_partition_stands_on() {
    let observed = settled();
    let d = desired(&[X, Y, M], &observed);
    let write = |path: &str, file, new| Planned {
        phase: Phase::GrowPool,
        step: Step::Write { path: p(path), file, old: String::new(), new },
    };
    let list = |path: &str, set: &str| write(path, CpusetFile::Cpus, Value::Cpus(cpus(set)));
    let state = |path: &str, kind| write(path, CpusetFile::Partition, Value::Partition(kind));
    let member = PartitionKind::Member;
    for (steps, index, invariant, needle) in [
        (vec![list("a", "1-2")], 0, "I1", "/a would reach over partition /t on CPUs 2"),
        (vec![list("t", "2-7")], 0, "I1", "/a would reach over partition /t on CPUs 7"),
        (vec![list("t/m", "5-6")], 0, "I1", "/t/m and /t/y would both have CPUs 5"),
        (
            vec![state("t/x", member), state("t", member)],
            1,
            "I1",
            "/t/y would be a partition below a cgroup that is none",
        ),
        (vec![list("t", "4-6")], 0, "I4", "none of the CPUs of /t/x would be left above it"),
        (vec![list("t/x", "")], 0, "I2", "partition /t/x would be left without CPUs"),
        (
            vec![list("a", "0"), list("t", "1-7"), list("a", ""), list("t", "0-7")],
            3,
            "I3",
            "every online CPU",
        ),
    ] {
        let broken = check(&d, &observed, &steps).unwrap_err();
        assert_eq!((broken.index, broken.invariant), (index, invariant), "{broken}");
        assert!(broken.what.contains(needle), "{broken}");
    }
    // Two owners without a CPU are lent the same one; what is their own is not lent.
    let mut lent = host(&["t", "t/x", "t/m", "t/n"]);
    lent.online = cpus("0-5");
    let d = desired(&[X, M, N], &lent);
    assert_eq!(d.leftovers, [(p("t/m"), cpus("1")), (p("t/n"), cpus("1"))].into());
    assert_eq!(check(&d, &lent, &[list("t/m", "1,6"), list("t/n", "1,7")]), Ok(()));
    let broken = check(&d, &lent, &[list("t/m", "1,6"), list("t/n", "1,6-7")]).unwrap_err();
    assert!(broken.what.contains("/t/m and /t/n would both have CPUs 6"), "{broken}");
    let d = desired(&[X, Y, M], &observed);
    // What others have broken is mended in more than one step.
    let mut observed = observed;
    files(&mut observed, "t").partition = Some(PartitionState::valid(member));
    let steps = [state("t/x", member), state("t/y", member), state("t", PartitionKind::Root)];
    assert_eq!(check(&d, &observed, &steps), Ok(()));
}
