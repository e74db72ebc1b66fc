use super::*;
use crate::cgroup::CgroupFile::{Procs, SubtreeControl};
use crate::cgroup::CpusetFile::{Cpus, Exclusive, Mems, Partition};

const OWNER: &str = "top/db";
const SECOND: u64 = 1_000_000_000;

/// A write of `file` of `path` from `begun` to `ended`, by a process with that number.
fn write(
    pid: u32,
    path: &str,
    file: impl Into<CgroupFile>,
    text: Option<&str>,
    span: [u64; 2],
) -> (CgroupPath, CgroupFile, Writer) {
    let writer = Writer {
        pid,
        comm: format!("w{pid}"),
        cgroup: None,
        cgroup_id: None,
        certain: true,
        wrote: text.map(Into::into),
        begun_ns: span[0],
        ended_ns: span[1],
    };
    (path.parse().unwrap(), file.into(), writer)
}

fn change(file: CpusetFile) -> Change {
    Change {
        path: OWNER.parse().unwrap(),
        file,
        gone: false,
        cpus: "2-3".parse().unwrap(),
        kernel: (file == Partition).then(|| "it gives no reason".into()),
        offline: false,
        unwatched: false,
    }
}

/// Readings were asked for at 100 and at 200; the second is judged at 210.
fn between_readings(sight: Sight, writes: Vec<(CgroupPath, CgroupFile, Writer)>) -> Causes {
    let mut causes = Causes::default();
    causes.asks(100);
    causes.reads();
    causes.asks(200);
    causes.sees(sight, 0);
    for (path, file, writer) in writes {
        assert!(causes.wrote(&path, file, writer).is_empty());
    }
    causes.reads();
    causes
}

fn pid_of(cause: &Cause) -> String {
    match cause {
        Cause::Wrote(w) => format!("{}", w.pid),
        Cause::Through { path, file, writer } => format!("{} through {file} of {path}", writer.pid),
        Cause::Kernel { why } => format!("kernel: {why}"),
        Cause::Unknown => "unknown".into(),
    }
}

/// Which of the writes between two readings made the change that the second shows, if any did.
#[test]
fn who_made_a_change() {
    let t = [150, 160];
    let gone = Change { gone: true, kernel: None, ..change(Partition) };
    let offline = Change { offline: true, kernel: Some("CPUs 2-3 went offline".into()), ..change(Partition) };
    let other_kind = Change { kernel: None, ..change(Partition) };
    let sibling = |text| write(9, "top/sib", Cpus, text, t);
    let none = "kernel: it gives no reason";
    for (n, (change, writes, expected)) in [
        // The file itself; the newest counts, whatever else was written.
        (change(Cpus), vec![write(7, OWNER, Cpus, Some("0"), t)], "7"),
        (change(Partition), vec![write(7, OWNER, Partition, Some("member"), t)], "7"),
        (
            change(Partition),
            vec![write(7, OWNER, Partition, None, t), write(8, OWNER, Partition, None, t)],
            "8",
        ),
        (change(Partition), vec![write(7, OWNER, Partition, None, t), sibling(Some("3-5"))], "7"),
        (offline.clone(), vec![write(7, OWNER, Partition, None, t)], "7"),
        // Another file of the same cgroup says nothing of a list; of a partition's end it may.
        (change(Cpus), vec![write(7, OWNER, Partition, None, t)], "unknown"),
        (change(Cpus), vec![write(7, OWNER, Exclusive, None, t)], "unknown"),
        (
            change(Partition),
            vec![write(7, OWNER, Exclusive, Some("4"), t)],
            "7 through cpuset.cpus.exclusive of /top/db",
        ),
        (change(Partition), vec![write(7, OWNER, Mems, Some("0"), t)], none),
        (change(Partition), vec![write(7, OWNER, Procs, Some("0"), t)], none),
        // A sibling that reaches over its CPUs, or may, as one does whose text is not known or is no list.
        (change(Partition), vec![sibling(Some("3-5"))], "9 through cpuset.cpus of /top/sib"),
        (change(Partition), vec![sibling(None)], "9 through cpuset.cpus of /top/sib"),
        (
            change(Partition),
            vec![write(9, "top/sib", Partition, Some("root"), t)],
            "9 through cpuset.cpus.partition of /top/sib",
        ),
        (change(Partition), vec![sibling(Some("4-5"))], none),
        (change(Partition), vec![sibling(Some(""))], none),
        (
            change(Partition),
            vec![sibling(Some("3-5")), write(8, "top/late", Cpus, Some("4"), t)],
            "9 through cpuset.cpus of /top/sib",
        ),
        // An ancestor, and what lies beside one; not what lies elsewhere, nor below.
        (
            change(Partition),
            vec![write(7, "top", Exclusive, Some(""), t)],
            "7 through cpuset.cpus.exclusive of /top",
        ),
        (change(Partition), vec![write(7, "", Cpus, Some(""), t)], "7 through cpuset.cpus of /"),
        (
            change(Partition),
            vec![write(7, "other", Exclusive, Some("2"), t)],
            "7 through cpuset.cpus.exclusive of /other",
        ),
        (change(Partition), vec![write(7, "other/x", Cpus, Some("2"), t)], none),
        (change(Partition), vec![write(7, "top/sib/x", Cpus, Some("2"), t)], none),
        (change(Partition), vec![write(7, "top/db/x", Cpus, Some("2"), t)], none),
        (change(Cpus), vec![sibling(Some("2-3"))], "unknown"),
        // All of its CPUs went away: nothing else has to have happened.
        (offline.clone(), vec![sibling(Some("2-3"))], "kernel: CPUs 2-3 went offline"),
        (offline, vec![], "kernel: CPUs 2-3 went offline"),
        // The files are gone: whoever took the controller away above.
        (
            gone.clone(),
            vec![write(7, "top", SubtreeControl, Some("-cpuset"), t)],
            "7 through cgroup.subtree_control of /top",
        ),
        (gone.clone(), vec![write(7, "", SubtreeControl, None, t)], "7 through cgroup.subtree_control of /"),
        (gone.clone(), vec![write(7, OWNER, SubtreeControl, None, t)], "unknown"),
        (gone, vec![sibling(Some("2-3"))], "unknown"),
        (change(Partition), vec![write(7, "top", SubtreeControl, Some("+cpu"), t)], none),
        // Nothing was written. The kernel turns a partition into an invalid one, into nothing else, and changes no list.
        (change(Partition), vec![], none),
        (other_kind, vec![], "unknown"),
        (change(Cpus), vec![], "unknown"),
        // Writes of another time: over before the file was last read, or begun after the change was.
        (change(Cpus), vec![write(7, OWNER, Cpus, None, [80, 99])], "unknown"),
        (change(Cpus), vec![write(7, OWNER, Cpus, None, [80, 100])], "7"),
        (change(Cpus), vec![write(7, OWNER, Cpus, None, [210, 250])], "7"),
        (change(Cpus), vec![write(7, OWNER, Cpus, None, [211, 250])], "unknown"),
        (change(Partition), vec![write(9, "top/sib", Cpus, Some("2"), [80, 99])], none),
    ]
    .into_iter()
    .enumerate()
    {
        let mut causes = between_readings(Sight::Whole, writes.clone());
        assert_eq!(pid_of(&causes.of(&change, 210)), expected, "case {n}: {change:?} {writes:?}");
    }
}

/// The kernel is named only by who has seen every writer, and where it does such a thing by itself.
#[test]
fn when_the_kernel_is_named() {
    let kernel = "kernel: it gives no reason";
    let unwatched = Change { unwatched: true, ..change(Partition) };
    for (n, (sight, change, lost, watched, at_once, in_a_second)) in [
        (Sight::Whole, change(Partition), 0, 0, kernel, None),
        // A write may be under way, or its event: not until a second has passed.
        (Sight::UnderWay, change(Partition), 0, 0, "unknown", Some(kernel)),
        (Sight::Trailing, change(Partition), 0, 0, "unknown", Some(kernel)),
        (Sight::Blind, change(Partition), 0, 0, "unknown", None),
        (Sight::Whole, change(Cpus), 0, 0, "unknown", None),
        (Sight::Trailing, change(Cpus), 0, 0, "unknown", None),
        // One was lost since the file was last read, or cgroups were not watched then.
        (Sight::Whole, change(Partition), 1, 0, "unknown", None),
        (Sight::Trailing, change(Partition), 1, 0, "unknown", None),
        (Sight::Whole, change(Partition), 0, 101, "unknown", None),
        (Sight::Whole, change(Partition), 0, 99, kernel, None),
        // A new cgroup: only a hook sees what was written there before it was watched.
        (Sight::Whole, unwatched.clone(), 0, 0, kernel, None),
        (Sight::UnderWay, unwatched.clone(), 0, 0, "unknown", Some(kernel)),
        (Sight::Trailing, unwatched, 0, 0, "unknown", None),
    ]
    .into_iter()
    .enumerate()
    {
        let mut causes = Causes::default();
        causes.watches(watched);
        causes.asks(100);
        causes.reads();
        causes.asks(200);
        causes.sees(sight, lost);
        causes.reads();
        let cause = causes.of(&change, 210);
        assert_eq!(pid_of(&cause), at_once, "case {n}");
        if cause != Cause::Unknown {
            continue;
        }
        causes.await_name(1, change, 210);
        assert_eq!(causes.next_deadline(), in_a_second.map(|_| 210 + SECOND), "case {n}");
        assert!(causes.expire(209 + SECOND).is_empty(), "case {n}");
        let settled = causes.expire(210 + SECOND);
        assert_eq!(settled.first().map(|s| pid_of(&s.cause)).as_deref(), in_a_second, "case {n}");
        assert!(causes.next_deadline().is_none() && causes.expire(9 * SECOND).is_empty(), "case {n}: once");
    }
}

/// The write that was under way is told a moment later, or is seen to have been refused.
#[test]
fn a_write_that_was_under_way() {
    let open = || {
        let mut causes = between_readings(Sight::UnderWay, vec![]);
        assert_eq!(causes.of(&change(Partition), 210), Cause::Unknown);
        causes.await_name(5, change(Partition), 210);
        causes
    };
    // It ended well: it is named, for its own file or through another, once.
    for (path, file, text, expected) in
        [(OWNER, Partition, "member", "7"), ("top/sib", Cpus, "3", "7 through cpuset.cpus of /top/sib")]
    {
        let mut causes = open();
        let (path, file, writer) = write(7, path, file, Some(text), [190, 400]);
        let named = causes.wrote(&path, file, writer.clone());
        assert_eq!(
            named.iter().map(|n| (n.finding, pid_of(&n.cause))).collect::<Vec<_>>(),
            [(5, expected.into())]
        );
        assert!(causes.wrote(&path, file, writer).is_empty() && causes.next_deadline().is_none());
    }
    // It began after the change was read: another's.
    let mut causes = open();
    let (path, file, writer) = write(7, OWNER, Partition, None, [211, 400]);
    assert!(causes.wrote(&path, file, writer).is_empty());
    // It was refused: nothing is under way any more and nothing was told.
    causes.sees(Sight::Whole, 0);
    assert_eq!(
        causes.expire(300).first().map(|s| pid_of(&s.cause)),
        Some("kernel: it gives no reason".into())
    );
    // It may have been the one that was lost meanwhile.
    let mut causes = open();
    causes.sees(Sight::Whole, 1);
    assert!(causes.expire(300).is_empty() && causes.next_deadline().is_none());
    assert!(causes.expire(2 * SECOND).is_empty());
}

/// A write that has named a change names no later one of the same file.
#[test]
fn a_writer_is_named_once() {
    let mut causes = between_readings(Sight::Whole, vec![write(7, OWNER, Partition, None, [150, 205])]);
    assert_eq!(pid_of(&causes.of(&change(Partition), 210)), "7");
    assert_eq!(
        pid_of(&causes.of(&change(Partition), 210)),
        "7",
        "the fault of the set and the drift are one change"
    );
    causes.asks(220);
    causes.reads();
    assert_eq!(pid_of(&causes.of(&change(Partition), 230)), "kernel: it gives no reason");
    // One that was told after its change was found has named that.
    let mut causes = between_readings(Sight::UnderWay, vec![]);
    causes.await_name(5, change(Partition), 210);
    let (path, file, writer) = write(7, OWNER, Partition, None, [190, 205]);
    assert_eq!(causes.wrote(&path, file, writer).len(), 1);
    causes.asks(206);
    causes.sees(Sight::Whole, 0);
    causes.reads();
    assert_eq!(pid_of(&causes.of(&change(Partition), 230)), "kernel: it gives no reason");
}

#[test]
fn what_the_kernel_does_by_itself() {
    let cpus: CpuSet = "2-3".parse().unwrap();
    for (was, now, online, expected) in [
        ("root", "root invalid", "0-1", Some("CPUs 2-3 went offline")),
        ("root", "root invalid", "0-2", Some("CPUs 3 went offline")),
        (
            "isolated",
            "isolated invalid (No cpu available due to hotplug)",
            "0-7",
            Some("No cpu available due to hotplug"),
        ),
        ("root", "root invalid", "0-7", Some("it gives no reason; a CPU that goes offline does this")),
        ("root invalid", "root invalid (x)", "0-7", Some("x")),
        ("root", "member", "0-1", None),
        ("root", "isolated", "0-1", None),
        ("member", "root invalid", "0-1", None),
        ("root invalid", "root", "0-7", Some("it is valid again")),
        ("root", "root", "0-7", None),
        ("isolated invalid", "root", "0-7", None),
    ] {
        let own = kernels_own(was, &now.parse().unwrap(), &cpus, &online.parse().unwrap());
        assert_eq!(own.as_deref(), expected, "{was:?} -> {now:?} with {online} online");
    }
}

/// A reading that was taken while somebody wrote is not judged.
#[test]
fn readings_that_may_be_torn() {
    for (sight, span, torn) in [
        (Sight::Whole, None, false),
        (Sight::Trailing, None, false),
        (Sight::Blind, None, false),
        (Sight::UnderWay, None, true),
        (Sight::Whole, Some([150, 199]), false),
        (Sight::Whole, Some([150, 200]), true),
        (Sight::Whole, Some([201, 205]), true),
    ] {
        let writes = span.map(|span| write(7, "top/sib", Cpus, Some("2"), span));
        let causes = between_readings(sight, writes.into_iter().collect());
        assert_eq!(causes.may_be_torn(), torn, "{sight:?} {span:?}");
    }
}
