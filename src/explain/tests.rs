//! Every reason, and whom the tree shows to be behind it.

use super::*;
use crate::{cgroup::CgroupId, observed::CgroupKind, observed::CgroupObserved};

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// A cgroup: path, `cpuset.cpus`, `cpuset.cpus.exclusive` (`None`: no such file), `cpuset.cpus.partition`.
type Line<'a> = (&'a str, &'a str, Option<&'a str>, &'a str);

fn tree(lines: &[Line<'_>]) -> Observed {
    let mut observed = Observed { online: cpus("0-7"), ..Observed::default() };
    for (n, (path, list, exclusive, state)) in [("", "", Some(""), "member")].iter().chain(lines).enumerate()
    {
        let files = CpusetObserved {
            cpus: cpus(list),
            effective: cpus("0-7"),
            exclusive: exclusive.map(cpus),
            exclusive_effective: exclusive.map(cpus),
            partition: (!path.is_empty()).then(|| state.parse().unwrap()),
            ..CpusetObserved::default()
        };
        let cgroup = CgroupObserved {
            id: CgroupId(n as u64 + 1),
            cpuset: Some(files),
            enables_cpuset: true,
            populated: true,
            has_processes: false,
            kind: CgroupKind::Domain,
        };
        observed.cgroups.insert(p(path), cgroup);
    }
    observed
}

#[track_caller]
fn told(observed: &Observed, path: &str, set: &str) -> (Cause, String, String) {
    let e = explain(observed, &p(path), &cpus(set)).unwrap();
    assert!(e.to_string().starts_with(e.cause.explain()), "{e}");
    (e.cause.clone(), e.culprits.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "), e.remedy())
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn every_reason_with_who_it_was() {
    let slice: Line<'_> = ("t", "", Some("2-3"), "member");
    let owner = |state| ("t/x", "2-3", Some("2-3"), state);
    let bare = "root invalid";
    let bad = "root invalid (Invalid cpu list in cpuset.cpus.exclusive)";
    let empty = "root invalid (cpuset.cpus and cpuset.cpus.exclusive are empty)";
    let starves = "isolated invalid (Parent unable to distribute cpu downstream)";
    let not_exclusive = "root invalid (Cpu list in cpuset.cpus not exclusive)";
    for (lines, cause, who, remedy) in [
        (
            vec![slice, owner(bare), ("t/y", "3-4", Some(""), "member"), ("a", "2-3", Some(""), "member")],
            Cause::Bare,
            "cgroup /t/y lists CPUs 3 in cpuset.cpus",
            "take CPUs 3 out of cpuset.cpus of /t/y",
        ),
        // The overlap is gone again: only the cause is known.
        (vec![slice, owner(bare)], Cause::Bare, "", "removing the overlap alone brings no partition back"),
        (
            vec![("t", "", Some("2"), "member"), owner(bad)],
            Cause::BadList,
            "cgroup /t above it does not list CPUs 3 in cpuset.cpus.exclusive",
            "add CPUs 3 to cpuset.cpus.exclusive of /t again",
        ),
        (
            vec![slice, ("t/x", "2-3", Some(""), bad)],
            Cause::BadList,
            "its own cpuset.cpus.exclusive is empty",
            "write its cpuset.cpus.exclusive again",
        ),
        (
            vec![slice, owner(bad), ("t/y", "", Some("3,5"), "isolated")],
            Cause::BadList,
            "cgroup /t/y is a partition that has CPUs 3",
            "write member into cpuset.cpus.partition of /t/y, or give it other CPUs than 3",
        ),
        (
            vec![slice, owner(bad), ("t/y", "", Some("3,5"), "member")],
            Cause::BadList,
            "cgroup /t/y lists CPUs 3 in cpuset.cpus.exclusive",
            "take CPUs 3 out of cpuset.cpus.exclusive of /t/y",
        ),
        // Somebody made a partition of what is above one that takes its CPUs from the root.
        (
            vec![("t", "2-5", Some("2-3"), "root"), owner(bad)],
            Cause::BadList,
            "cgroup /t above it reads \"root\"",
            "write member into cpuset.cpus.partition of /t",
        ),
        (
            vec![slice, owner(not_exclusive), ("t/y", "3", Some(""), "member")],
            Cause::NotExclusive,
            "cgroup /t/y lists CPUs 3 in cpuset.cpus",
            "take CPUs 3 out of cpuset.cpus of /t/y",
        ),
        (
            vec![slice, owner(starves), ("t/y", "2-3", Some(""), "member")],
            Cause::ParentStarves,
            "cgroup /t/y lists CPUs 2-3 in cpuset.cpus",
            "take CPUs 2-3 out of cpuset.cpus of /t/y",
        ),
        (vec![slice, owner(starves)], Cause::ParentStarves, "", "leave the cgroup above a CPU"),
        (
            vec![slice, ("t/x", "", Some(""), empty)],
            Cause::NothingAsked,
            "its own cpuset.cpus is empty, its own cpuset.cpus.exclusive is empty",
            "write its cpuset.cpus again; write its cpuset.cpus.exclusive again",
        ),
        (
            vec![slice, owner("root invalid (partition config conflicts with housekeeping setup)")],
            Cause::Housekeeping,
            "",
            "--isolation isolated",
        ),
        (
            vec![slice, owner("root invalid (Enable partition not permitted)")],
            Cause::NotPermitted,
            "",
            "CAP_SYS_ADMIN",
        ),
        (
            vec![
                slice,
                owner("root invalid (Have remote partition underneath)"),
                ("t/x/in", "", Some("3"), "root"),
            ],
            Cause::RemoteBelow,
            "cgroup /t/x/in below it is a partition",
            "write member into cpuset.cpus.partition of /t/x/in",
        ),
        (vec![slice, owner("member")], Cause::Member, "", "who writes cpuset.cpus.partition"),
        (
            vec![("t", "", Some(""), "member"), owner("member")],
            Cause::Member,
            "cgroup /t above it does not list CPUs 2-3 in cpuset.cpus.exclusive",
            "add CPUs 2-3 to cpuset.cpus.exclusive of /t again",
        ),
        (
            vec![slice, owner("root invalid (No such luck)"), ("t/y", "3", Some(""), "member")],
            Cause::Unknown("No such luck".into()),
            "cgroup /t/y lists CPUs 3 in cpuset.cpus",
            "take CPUs 3 out of cpuset.cpus of /t/y",
        ),
    ] {
        let (got, named, what) = told(&tree(&lines), "t/x", "2-3");
        assert_eq!((&got, named.as_str()), (&cause, who), "{lines:?}");
        assert!(what.contains(remedy), "{what:?} lacks {remedy:?}");
    }
}

#[test]
fn a_list_that_is_gone_sounds_like_a_parent_that_is_none() {
    let said = "root invalid (Parent is not a partition root)";
    let slice = |list| ("t", "", Some(list), "member");
    for (lines, who) in [
        ([slice("2-3"), ("t/x", "2-3", Some(""), said)], "its own cpuset.cpus.exclusive is empty"),
        ([slice("2-3"), ("t/x", "2-3", Some("4,6"), said)], "its own cpuset.cpus.exclusive lists CPUs 4,6"),
        (
            [slice(""), ("t/x", "2-3", Some("2-3"), said)],
            "cgroup /t above it does not list CPUs 2-3 in cpuset.cpus.exclusive",
        ),
        ([slice("2-3"), ("t/x", "2-3", Some("2-3"), said)], "cgroup /t above it reads \"member\""),
    ] {
        let (cause, named, _) = told(&tree(&lines), "t/x", "2-3");
        assert_eq!((cause, named.as_str()), (Cause::ParentMember, who));
    }
}

#[test]
fn where_the_cgroup_above_has_to_be_one() {
    let parent = |state| ("t", "2-5", None, state);
    let child = |reason| vec![("t/x", "2-3", None, reason)];
    let not = "root invalid (Parent is not a partition root)";
    let invalid = "root invalid (Parent is an invalid partition root)";
    let broken = "root invalid (Cpu list in cpuset.cpus not exclusive)";
    let lines = [vec![parent("member")], child(not)].concat();
    let (cause, who, remedy) = told(&tree(&lines), "t/x", "2-3");
    assert_eq!(
        (cause, who.as_str(), remedy.as_str()),
        (Cause::ParentMember, "cgroup /t above it reads \"member\"", "make /t a partition again")
    );
    // And what is wrong with the one above.
    let all = |state| {
        [vec![parent(broken), ("a", "5-6", None, "member"), ("t/y", "4-5", None, "root")], child(state)]
            .concat()
    };
    let (cause, who, remedy) = told(&tree(&all(invalid)), "t/x", "2-3");
    assert_eq!(cause, Cause::ParentInvalid);
    assert_eq!(who, format!("cgroup /t above it reads {broken:?}, cgroup /a lists CPUs 5 in cpuset.cpus"));
    assert_eq!(remedy, "make /t a partition again; take CPUs 5 out of cpuset.cpus of /a");
    // Its own list may be what is wrong, and not that of a cgroup whose CPUs it came to have.
    let wide = ("t", "3-6", None, broken);
    let lines = [vec![wide, ("a", "5-6", None, "member")], child(invalid)].concat();
    let (_, named, _) = told(&tree(&lines), "t/x", "2-3");
    assert_eq!(
        named,
        format!(
            "cgroup /t above it reads {broken:?}, cgroup /t above it does not list CPUs 2 in cpuset.cpus"
        )
    );
    // On 6.1 the one below goes on reading valid.
    assert_eq!(told(&tree(&all("isolated")), "t/x", "2-3"), (cause, who, remedy));
    let lines = [vec![parent("member")], child("root")].concat();
    assert_eq!(told(&tree(&lines), "t/x", "2-3").0, Cause::ParentMember);
    let lines = [vec![parent("root")], child("root")].concat();
    assert_eq!(explain(&tree(&lines), &p("t/x"), &cpus("2-3")), None);
}

#[test]
fn what_goes_offline_or_loses_its_files() {
    let lines = [("t", "", Some("2-3"), "member"), ("t/x", "2-3", Some("2-3"), "isolated invalid")];
    let mut observed = tree(&lines);
    observed.online = cpus("0-1,4-7");
    let (cause, who, remedy) = told(&observed, "t/x", "2-3");
    assert_eq!(
        (cause, who.as_str(), remedy.as_str()),
        (Cause::Bare, "all of its CPUs (2-3) are offline", "bring CPUs 2-3 online")
    );
    let lines =
        [("t", "2-3", None, "root"), ("t/x", "2-3", None, "root invalid (No cpu available due to hotplug)")];
    let mut observed = tree(&lines);
    observed.online = cpus("0-1");
    assert_eq!(told(&observed, "t/x", "2-3").0, Cause::Hotplug);
    // The topmost cgroup that does not enable the controller is the one to name.
    let mut observed = tree(&[("t", "", Some(""), "member"), ("t/x", "", Some(""), "member")]);
    for path in ["t", "t/x"] {
        observed.cgroups.get_mut(&p(path)).unwrap().cpuset = None;
        observed.cgroups.get_mut(&p(path)).unwrap().enables_cpuset = false;
    }
    for (root, who) in [(true, "/t"), (false, "/")] {
        observed.cgroups.get_mut(&p("")).unwrap().enables_cpuset = root;
        let (cause, named, remedy) = told(&observed, "t/x", "2-3");
        assert_eq!(cause, Cause::NoFiles);
        assert_eq!(named, format!("cgroup {who} above it does not enable cpuset in cgroup.subtree_control"));
        assert!(remedy.contains("+cpuset"), "{remedy}");
    }
}

#[test]
fn one_that_stands_needs_no_reason() {
    let observed = tree(&[("t", "", Some("2-3"), "member"), ("t/x", "2-3", Some("2-3"), "isolated")]);
    assert_eq!(explain(&observed, &p("t/x"), &cpus("2-3")), None);
    assert_eq!(explain(&observed, &p("gone"), &cpus("2-3")), None);
    assert_eq!(explain(&observed, &p(""), &cpus("2-3")), None, "the root has no such file");
}
