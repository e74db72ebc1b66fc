//! What is released, and what others' files held first.

use super::*;

#[test]
fn what_is_released_goes_back() {
    // A cgroup of ours that is empty goes, with its CPUs; one with processes joins the pool.
    let mut observed = host(&["a", "t", "t/x", "t/y"]);
    files(&mut observed, "t").exclusive = Some(cpus("2-5"));
    for (path, set) in [("t/x", "2-3"), ("t/y", "4-5")] {
        files(&mut observed, path).cpus = cpus(set);
        partition(&mut observed, path, set);
    }
    observed.cgroups.get_mut(&p("t/x")).unwrap().populated = false;
    files(&mut observed, "a").cpus = cpus("1");
    let mut d = desired(&[]);
    recorded(&mut d, "a", 2, &[(CpusetFile::Cpus, "1-3")]);
    d.teardown = true;
    plans(
        &d,
        &observed,
        &[
            // Not 2-3 yet: a partition beside it... is not beside it, but below the slice.
            "grow-pool: echo 1-3 > /a/cpus",
            "shrink-exclusive: echo member > /t/x/cpus.partition",
            "shrink-exclusive: echo member > /t/y/cpus.partition",
            "shrink-exclusive: echo '' > /t/x/cpus.exclusive",
            "shrink-exclusive: echo '' > /t/y/cpus.exclusive",
            "remove: rmdir /t/x",
        ],
    );
    // The slice lists their CPUs until they have ended, and goes when it is empty.
    for path in ["t/x", "t/y"] {
        *files(&mut observed, path) = cgroup(0).cpuset.unwrap();
    }
    files(&mut observed, "t/y").cpus = cpus("4-5");
    files(&mut observed, "a").cpus = cpus("1-3");
    let plan = plans(
        &d,
        &observed,
        &[
            "grow-pool: echo 0-7 > /t/y/cpus",
            "shrink-exclusive: echo '' > /t/cpus.exclusive",
            "remove: rmdir /t/x",
        ],
    );
    assert_eq!(plan.settled, [p("a")], "and is forgotten");
    let mut observed = host(&["t"]);
    observed.cgroups.get_mut(&p("t")).unwrap().populated = false;
    d.first.clear();
    plans(&d, &observed, &["remove: rmdir /t"]);
    d.teardown = false;
    plans(&d, &observed, &[]);
}

#[test]
fn first_values_come_back_as_far_as_they_are_free() {
    let mut observed = host(&["a", "b"]);
    files(&mut observed, "a").cpus = cpus("1");
    files(&mut observed, "b").cpus = cpus("4-5");
    partition(&mut observed, "b", "4-5");
    let mut d = desired(&[("b", "4-5", Mode::Partition, false)]);
    recorded(&mut d, "a", 2, &[(CpusetFile::Cpus, "1-4")]);
    let of_b = [(CpusetFile::Partition, "member"), (CpusetFile::Exclusive, "")];
    recorded(&mut d, "b", 3, &of_b);
    plans(&d, &observed, &["grow-pool: echo 1-3 > /a/cpus"]);
    // The owner goes: its partition ends, its files are as they were, and then there is room for the rest.
    let mut d = desired(&[]);
    recorded(&mut d, "a", 2, &[(CpusetFile::Cpus, "1-4")]);
    recorded(&mut d, "b", 3, &of_b);
    plans(
        &d,
        &observed,
        &[
            "grow-pool: echo 1-3 > /a/cpus",
            "shrink-exclusive: echo member > /b/cpus.partition",
            "shrink-exclusive: echo '' > /b/cpus.exclusive",
        ],
    );
    // A cgroup that was made anew starts from nothing, and its record goes.
    recorded(&mut d, "b", 77, &of_b);
    assert_eq!(diff(&d, &observed).settled, [p("b")]);
    // Without its files there is nothing to put back yet, and nothing is forgotten.
    recorded(&mut d, "b", 3, &of_b);
    observed.cgroups.get_mut(&p("b")).unwrap().cpuset = None;
    let plan = diff(&d, &observed);
    assert_eq!(plan.settled, []);
    assert!(plan.steps.iter().all(|s| s.step.path() != &p("b")));
}

#[test]
fn a_partition_of_before_is_one_again_when_its_cpus_are_free() {
    let mut observed = host(&["a", "b"]);
    files(&mut observed, "a").cpus = cpus("2-3");
    let first = [(CpusetFile::Partition, "root"), (CpusetFile::Cpus, "2-3"), (CpusetFile::Exclusive, "")];
    let mut d = desired(&[]);
    recorded(&mut d, "a", 2, &first);
    plans(&d, &observed, &["set-partition: echo root > /a/cpus.partition"]);
    let mut d = desired(&[("b", "3-4", Mode::Partition, false)]);
    recorded(&mut d, "a", 2, &first);
    let plan = diff(&d, &observed);
    assert!(lines(&plan).contains(&"shrink-pool: echo 2 > /a/cpus".into()), "{:#?}", lines(&plan));
    assert!(!lines(&plan).iter().any(|l| l.contains("/a/cpus.partition")), "{:#?}", lines(&plan));
}

#[test]
fn where_an_empty_list_is_refused_everything_is_the_same() {
    let mut observed = host(&["a", "b"]);
    files(&mut observed, "a").cpus = cpus("1");
    let mut d = desired(&[]);
    recorded(&mut d, "a", 2, &[(CpusetFile::Cpus, "")]);
    plans(&d, &observed, &["grow-pool: echo '' > /a/cpus"]);
    d.empty_refused = true;
    plans(&d, &observed, &["grow-pool: echo 0-7 > /a/cpus"]);
    // Not while somebody holds some of it, and not where nothing runs.
    let mut held = desired(&[("b", "6-7", Mode::Partition, false)]);
    (held.first, held.empty_refused) = (d.first.clone(), true);
    assert_eq!(lines(&diff(&held, &observed))[0], "grow-pool: echo 0-5 > /a/cpus");
    observed.cgroups.get_mut(&p("a")).unwrap().populated = false;
    plans(&d, &observed, &["grow-pool: echo '' > /a/cpus"]);
}
