//! What an intruder's cgroup is to be, and why it is left as it is.

use super::{super::fence::fence, *};

/// A member at `t/x` on 2-3, `b` ignored, `b/c` below it.
fn scene() -> (Desired, Observed) {
    let mut observed = host(&["a", "b", "b/c", "t", "t/x"]);
    for (path, set) in [("a", "0-1,4-7"), ("t/x", "2-3")] {
        let f = files(&mut observed, path);
        (f.cpus, f.effective) = (cpus(set), cpus(set));
    }
    let mut d = desired(&[("t/x", "2-3", Mode::Member, true)]);
    d.roles.insert(p("b"), Role::Ignore);
    d.fenceable.insert(p("b"));
    recorded(&mut d, "a", 2, &[(CpusetFile::Cpus, "")]);
    (d, observed)
}

fn judged(d: &Desired, observed: &Observed, path: &str) -> Result<Option<CpuSet>, Unfenced> {
    fence(d, observed, &p(path), &cpus("2-3"))
}

#[test]
fn its_list_is_what_it_had_less_what_is_exclusive() {
    let (mut d, mut observed) = scene();
    assert_eq!(judged(&d, &observed, "b"), Ok(Some(cpus("0-1,4-7"))), "it inherits");
    assert_eq!(judged(&d, &observed, "b/c"), Ok(Some(cpus("0-1,4-7"))), "one below it");
    assert_eq!(judged(&d, &observed, "a"), Ok(None), "it is off them");
    files(&mut observed, "b").cpus = cpus("1-4");
    files(&mut observed, "b").effective = cpus("1-4");
    assert_eq!(judged(&d, &observed, "b"), Ok(Some(cpus("1,4"))), "its own list");
    // All of its list is exclusive: the pool, as far as the cgroup above has it.
    (files(&mut observed, "b").cpus, files(&mut observed, "b").effective) = (cpus("2-3"), cpus("2-3"));
    assert_eq!(judged(&d, &observed, "b"), Ok(Some(cpus("0-1,4-7"))));
    assert_eq!(judged(&d, &observed, "b/c"), Err(Unfenced::NothingLeft), "above it there is nothing else");
    // Once it is fenced the plan says so, from its first value, and puts that back when it is not.
    d.fences.insert(p("b"));
    recorded(&mut d, "b", 3, &[(CpusetFile::Cpus, "1-4")]);
    plans(&d, &observed, &["grow-pool: echo 1,4 > /b/cpus"]);
    assert_eq!(judged(&d, &observed, "b"), Ok(None), "planned");
    d.frozen.insert((p("b"), CpusetFile::Cpus));
    assert_eq!(judged(&d, &observed, "b"), Err(Unfenced::LeftAlone));
    d.frozen.clear();
    d.fences.clear();
    plans(&d, &observed, &["grow-pool: echo 1,4 > /b/cpus"]);
    let free = Desired { first: d.first, roles: d.roles, ..desired(&[]) };
    assert!(lines(&diff(&free, &observed)).contains(&"grow-pool: echo 1-4 > /b/cpus".to_owned()));
}

#[test]
fn what_is_never_fenced() {
    let (d, observed) = scene();
    for (path, why) in [("", Unfenced::Root), ("t", Unfenced::Own), ("t/x", Unfenced::Own)] {
        let mut observed = observed.clone();
        files(&mut observed, path).effective = cpus("0-7");
        assert_eq!(judged(&d, &observed, path), Err(why), "{path:?}");
    }
    let mut ignored = d.clone();
    ignored.fenceable.clear();
    for path in ["b", "b/c"] {
        assert_eq!(judged(&ignored, &observed, path), Err(Unfenced::Ignored), "{path}");
    }
    let mut other = observed.clone();
    let invalid = Some(InvalidReason::Said("Cpu list in cpuset.cpus not exclusive".into()));
    files(&mut other, "b").partition = Some(PartitionState { kind: PartitionKind::Root, invalid });
    assert_eq!(judged(&d, &other, "b"), Err(Unfenced::Partition));
    // An owner, and what lies above one: its list has the owner's CPUs.
    let owners = desired(&[("t/x", "2-3", Mode::Partition, true), ("b/c", "6", Mode::Partition, false)]);
    assert_eq!(judged(&owners, &observed, "b/c"), Err(Unfenced::Owned("run/o1".parse().unwrap())));
    assert_eq!(judged(&owners, &observed, "b"), Err(Unfenced::Above("run/o1".parse().unwrap())));
}

/// A cgroup without files has what the next one above has.
#[test]
fn without_the_controller_it_is_said_where_it_would_be_needed() {
    let (d, mut observed) = scene();
    observed.cgroups.get_mut(&p("b")).unwrap().enables_cpuset = false;
    let c = observed.cgroups.get_mut(&p("b/c")).unwrap();
    (c.cpuset, c.enables_cpuset) = (None, false);
    let mut deeper = c.clone();
    deeper.id = CgroupId(77);
    observed.cgroups.insert(p("b/c/d"), deeper);
    let why = judged(&d, &observed, "b/c/d").unwrap_err();
    assert_eq!(why, Unfenced::NoList(vec![p("b"), p("b/c")]));
    assert_eq!(
        why.to_string(),
        "its cgroup has no list of its own: that would need +cpuset in cgroup.subtree_control of /b and /b/c"
    );
    files(&mut observed, "b").effective = cpus("0-1,4-7");
    assert_eq!(judged(&d, &observed, "b/c/d"), Ok(None), "kept off by what is above it");
}

/// As long as a partition stands, nobody else has its CPUs; when it is lost the pool is not written.
#[test]
fn beside_partitions() {
    let mut observed = host(&["a", "a/b", "t", "t/x"]);
    let d = desired(&[("t/x", "2-3", Mode::Partition, true)]);
    assert_eq!(judged(&d, &observed, "a"), Ok(Some(cpus("0-1,4-7"))));
    partition(&mut observed, "t/x", "2-3");
    for path in ["", "a", "a/b"] {
        assert_eq!(judged(&d, &observed, path), Ok(None), "{path:?}");
    }
}
