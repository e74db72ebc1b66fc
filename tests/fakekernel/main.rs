//! The rules that the fake kernel keeps, row by row: the table of results of writes, and what follows from them.
//! Truth is `fake::lockstep` on real kernels; these tests are the readable form.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod defects;
mod truth;

use truepin::{
    CgroupPath, CpuId, CpuSet, CpusetFile,
    observed::{CgroupKind, Kernel, Scope, Step, Value},
    partition::PartitionKind,
};
use truepin_tests::fake::{
    Activity, Behaviour, CRASH, Enforced, Errno, FakeKernel, Fault, Guarded, INIT, Pool, TaskTraits,
    invariants, leaks, stale_masks,
};

fn p(text: &str) -> CgroupPath {
    text.parse().unwrap()
}

fn cpus(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// Eight CPUs, two nodes, cpuset enabled below the root.
fn machine(behaviour: Behaviour) -> FakeKernel {
    let mut kernel = FakeKernel::new(behaviour, cpus("0-7"), "0-1".parse().unwrap());
    kernel.write_file(&p(""), "cgroup.subtree_control", "+cpuset").unwrap();
    kernel
}

fn strict() -> FakeKernel {
    machine(Behaviour::strict())
}

fn write(kernel: &mut FakeKernel, file: &str, text: &str) -> Result<(), Errno> {
    let (path, name) = file.rsplit_once('/').unwrap_or(("", file));
    kernel.write_file(&p(path), name, &format!("{text}\n"))
}

fn read(kernel: &FakeKernel, file: &str) -> String {
    let (path, name) = file.rsplit_once('/').unwrap_or(("", file));
    kernel.read_file(&p(path), name).unwrap().trim_end().into()
}

/// A partition `path` on `set`, whose parent is the root.
fn partition(kernel: &mut FakeKernel, path: &str, set: &str, kind: &str) {
    kernel.mkdir(&p(path)).unwrap();
    write(kernel, &format!("{path}/cpuset.cpus"), set).unwrap();
    write(kernel, &format!("{path}/cpuset.cpus.exclusive"), set).unwrap();
    write(kernel, &format!("{path}/cpuset.cpus.partition"), kind).unwrap();
    assert_eq!(read(kernel, &format!("{path}/cpuset.cpus.partition")), kind);
}

#[test]
fn a_partition_takes_its_cpus_from_everybody() {
    let mut k = strict();
    k.mkdir(&p("b")).unwrap();
    let other = k.spawn(&p("b"), 1, TaskTraits::default()).unwrap();
    partition(&mut k, "a", "2-3", "root");
    for (file, text) in [
        ("cpuset.cpus.effective", "0-1,4-7"),
        ("a/cpuset.cpus.effective", "2-3"),
        ("a/cpuset.cpus.exclusive.effective", "2-3"),
        ("b/cpuset.cpus.effective", "0-1,4-7"),
        ("cpuset.cpus.isolated", ""),
    ] {
        assert_eq!(read(&k, file), text, "{file}");
    }
    assert_eq!(k.mask(other), Some(&cpus("0-1,4-7")));
    assert_eq!(k.mask(INIT), Some(&cpus("0-1,4-7")));
    write(&mut k, "a/cpuset.cpus.partition", "isolated").unwrap();
    assert_eq!(read(&k, "cpuset.cpus.isolated"), "2-3");
    k.rmdir(&p("a")).unwrap();
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-7");
    assert_eq!(k.mask(other), Some(&cpus("0-7")));
}

#[test]
fn lists_that_are_refused() {
    let mut k = strict();
    k.mkdir(&p("a")).unwrap();
    for (text, errno) in [
        ("x", Errno::EINVAL),
        ("3-1", Errno::EINVAL),
        ("0-7:1/0", Errno::EINVAL),
        ("8", Errno::ERANGE),
        ("0-4294967296", Errno::EOVERFLOW),
    ] {
        for file in ["a/cpuset.cpus", "a/cpuset.cpus.exclusive"] {
            assert_eq!(write(&mut k, file, text), Err(errno), "{file} {text:?}");
        }
    }
    write(&mut k, "a/cpuset.cpus", " 4-7:1/2 ").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus"), "4,6");
    assert_eq!(write(&mut k, "a/cpuset.mems", "2"), Err(Errno::EINVAL));
    assert_eq!(write(&mut k, "a/cpuset.cpus.partition", "rooted"), Err(Errno::EINVAL));
    assert_eq!(write(&mut k, "cpuset.cpus", "0"), Err(Errno::ENOENT));
    assert_eq!(write(&mut k, "a/cpuset.cpus.effective", "0"), Err(Errno::EINVAL));
    k.mkdir(&p("a/b")).unwrap();
    assert_eq!(write(&mut k, "a/b/cpuset.cpus", "0"), Err(Errno::ENOENT), "not enabled in a");
}

#[test]
fn possible_is_more_than_online() {
    let mut k =
        FakeKernel::new(Behaviour::strict(), cpus("0-3"), "0".parse().unwrap()).with_possible(&cpus("0-4,7"));
    write(&mut k, "cgroup.subtree_control", "+cpuset").unwrap();
    k.mkdir(&p("a")).unwrap();
    assert_eq!(write(&mut k, "a/cpuset.cpus", "5"), Err(Errno::EINVAL), "not possible");
    assert_eq!(write(&mut k, "a/cpuset.cpus", "8"), Err(Errno::ERANGE), "beyond the last possible");
    write(&mut k, "a/cpuset.cpus", "3-4").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "3");
}

#[test]
fn exclusive_lists_of_siblings_do_not_meet() {
    let mut k = strict();
    for path in ["a", "b", "c"] {
        k.mkdir(&p(path)).unwrap();
    }
    write(&mut k, "a/cpuset.cpus.exclusive", "2-3").unwrap();
    assert_eq!(write(&mut k, "b/cpuset.cpus.exclusive", "3-4"), Err(Errno::EINVAL));
    assert_eq!(read(&k, "b/cpuset.cpus.exclusive"), "");
    write(&mut k, "c/cpuset.cpus", "6-7").unwrap();
    assert_eq!(write(&mut k, "b/cpuset.cpus.exclusive", "5-7"), Err(Errno::EINVAL), "nothing left to c");
    write(&mut k, "b/cpuset.cpus.exclusive", "5-6").unwrap();
}

#[test]
fn a_swap_shrinks_before_it_grows() {
    let mut k = strict();
    partition(&mut k, "a", "2-3", "root");
    partition(&mut k, "b", "4", "root");
    assert_eq!(write(&mut k, "a/cpuset.cpus.exclusive", "2,4"), Err(Errno::EINVAL));
    k.mkdir(&p("c")).unwrap();
    write(&mut k, "b/cpuset.cpus.exclusive", "5").unwrap();
    write(&mut k, "b/cpuset.cpus", "5").unwrap();
    write(&mut k, "a/cpuset.cpus.exclusive", "2,4").unwrap();
    write(&mut k, "a/cpuset.cpus", "2,4").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "2,4");
    assert_eq!(read(&k, "b/cpuset.cpus.effective"), "5");
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-1,3,6-7");
}

#[test]
fn an_overlapping_sibling_breaks_a_partition_for_good() {
    let mut k = strict();
    partition(&mut k, "a", "2-3", "root");
    k.mkdir(&p("b")).unwrap();
    write(&mut k, "b/cpuset.cpus", "3-4").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root invalid");
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-7");
    write(&mut k, "b/cpuset.cpus", "4").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root invalid");
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
    write(&mut k, "a/cpuset.cpus.partition", "member").unwrap();
    write(&mut k, "b/cpuset.cpus", "3-4").unwrap();
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root invalid (Cpu list in cpuset.cpus not exclusive)");
}

#[test]
fn an_empty_write_to_a_populated_cgroup() {
    let mut k = strict();
    k.mkdir(&p("a")).unwrap();
    write(&mut k, "a/cpuset.cpus", "2-3").unwrap();
    write(&mut k, "a/cpuset.mems", "1").unwrap();
    write(&mut k, "a/cpuset.cpus", "").unwrap();
    write(&mut k, "a/cpuset.cpus", "2-3").unwrap();
    let task = k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    assert_eq!(write(&mut k, "a/cpuset.cpus", ""), Err(Errno::ENOSPC));
    assert_eq!(write(&mut k, "a/cpuset.mems", ""), Err(Errno::ENOSPC));
    assert_eq!(k.write_file(&p("a"), "cpuset.cpus", ""), Ok(()), "no byte, no write");
    assert_eq!(k.mask(task), Some(&cpus("2-3")));
}

#[test]
fn a_partition_lives_by_its_explicit_list() {
    let mut k = strict();
    partition(&mut k, "a", "2-3", "root");
    k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    write(&mut k, "a/cpuset.cpus", "6-7").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "2-3");
    write(&mut k, "a/cpuset.cpus.exclusive", "").unwrap();
    assert_eq!(
        read(&k, "a/cpuset.cpus.partition"),
        "root invalid (Invalid cpu list in cpuset.cpus.exclusive)"
    );
}

#[test]
fn remote_partitions_need_the_list_all_the_way() {
    let mut k = strict();
    k.mkdir(&p("s")).unwrap();
    k.mkdir(&p("s/x")).unwrap();
    write(&mut k, "s/cgroup.subtree_control", "+cpuset").unwrap();
    write(&mut k, "s/x/cpuset.cpus.exclusive", "2-3").unwrap();
    write(&mut k, "s/x/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(
        read(&k, "s/x/cpuset.cpus.partition"),
        "root invalid (Invalid cpu list in cpuset.cpus.exclusive)"
    );
    write(&mut k, "s/cpuset.cpus.exclusive", "2-3").unwrap();
    write(&mut k, "s/x/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "s/x/cpuset.cpus.partition"), "root");
    assert_eq!(read(&k, "s/x/cpuset.cpus.effective"), "2-3");
    assert_eq!(read(&k, "s/cpuset.cpus.effective"), "0-1,4-7");
    write(&mut k, "s/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "s/cpuset.cpus.partition"), "root invalid (Have remote partition underneath)");
}

#[test]
fn the_parent_keeps_a_cpu_for_its_tasks() {
    let mut k = strict();
    k.mkdir(&p("a")).unwrap();
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(
        read(&k, "a/cpuset.cpus.partition"),
        "root invalid (cpuset.cpus and cpuset.cpus.exclusive are empty)"
    );
    write(&mut k, "a/cpuset.cpus", "0-7").unwrap();
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(
        read(&k, "a/cpuset.cpus.partition"),
        "root invalid (Parent unable to distribute cpu downstream)"
    );
}

#[test]
fn a_removed_invalid_remote_partition_keeps_its_cpus() {
    // Seen in a guest with 6.12.95 by hand; no script does it, because the kernel then uses freed memory.
    let mut k = strict();
    for path in ["s", "s/x", "s/y"] {
        k.mkdir(&p(path)).unwrap();
        if path == "s" {
            write(&mut k, "s/cgroup.subtree_control", "+cpuset").unwrap();
        }
    }
    write(&mut k, "s/cpuset.cpus.exclusive", "2-3").unwrap();
    write(&mut k, "s/x/cpuset.cpus.exclusive", "2-3").unwrap();
    write(&mut k, "s/x/cpuset.cpus.partition", "root").unwrap();
    write(&mut k, "s/y/cpuset.cpus", "3-4").unwrap();
    assert_eq!(read(&k, "s/x/cpuset.cpus.partition"), "root invalid");
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-1,4-7", "nobody has 2-3");
    let mut healed = k.clone();
    for path in ["s/x", "s/y", "s"] {
        k.rmdir(&p(path)).unwrap();
    }
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-1,4-7", "and nobody gets them back");
    write(&mut healed, "s/x/cpuset.cpus.partition", "member").unwrap();
    assert_eq!(read(&healed, "cpuset.cpus.effective"), "0-7", "unless `member` is written first");
}

#[test]
fn withdrawing_the_controller_ends_partitions() {
    let mut k = strict();
    partition(&mut k, "a", "2-3", "root");
    write(&mut k, "cgroup.subtree_control", "-cpuset").unwrap();
    assert_eq!(k.read_file(&p("a"), "cpuset.cpus"), Err(Errno::ENOENT));
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-7");
    write(&mut k, "cgroup.subtree_control", "+cpuset").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus"), "");
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "member");
}

#[test]
fn enabling_under_tasks_makes_a_threaded_domain() {
    let mut k = strict();
    for path in ["a", "a/b"] {
        k.mkdir(&p(path)).unwrap();
    }
    let task = k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    assert_eq!(write(&mut k, "a/cgroup.subtree_control", "+memory"), Err(Errno::ENOENT));
    write(&mut k, "cgroup.subtree_control", "+memory").unwrap();
    assert_eq!(write(&mut k, "a/cgroup.subtree_control", "+memory"), Err(Errno::EBUSY));
    write(&mut k, "a/cgroup.subtree_control", "+cpuset").unwrap();
    assert_eq!(read(&k, "a/cgroup.type"), "domain threaded");
    assert_eq!(read(&k, "a/b/cgroup.type"), "domain invalid");
    assert_eq!(write(&mut k, "a/b/cgroup.procs", &task.to_string()), Err(Errno::EOPNOTSUPP));
    write(&mut k, "a/b/cgroup.type", "threaded").unwrap();
    write(&mut k, "a/b/cgroup.threads", &task.to_string()).unwrap();
    assert_eq!(k.rmdir(&p("a/b")), Err(Errno::EBUSY));
}

#[test]
fn affinity_is_trimmed_remembered_and_refused() {
    let mut k = strict();
    k.mkdir(&p("a")).unwrap();
    write(&mut k, "a/cpuset.cpus", "2-3").unwrap();
    let task = k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    assert_eq!(k.setaffinity(task, &cpus("4")), Err(Errno::EINVAL));
    k.setaffinity(task, &cpus("2,6")).unwrap();
    for (set, mask) in [("2-3", "2"), ("3", "3"), ("2-3", "2"), ("6-7", "6")] {
        write(&mut k, "a/cpuset.cpus", set).unwrap();
        assert_eq!(k.mask(task), Some(&cpus(mask)), "{set}");
    }
    let bound = k.spawn_kthread(Some(cpus("5")));
    assert_eq!(k.setaffinity(bound, &cpus("0-7")), Err(Errno::EINVAL));
    assert_eq!(write(&mut k, "a/cgroup.procs", &bound.to_string()), Err(Errno::EINVAL));
    assert_eq!(write(&mut k, "a/cgroup.procs", "99"), Err(Errno::ESRCH));
}

#[test]
fn an_intruder_is_turned_away_from_a_partition() {
    let mut k = strict();
    partition(&mut k, "a", "2-3", "root");
    assert_eq!(k.setaffinity(INIT, &cpus("2")), Err(Errno::EINVAL));
    k.setaffinity(INIT, &cpus("1-2")).unwrap();
    assert_eq!(k.mask(INIT), Some(&cpus("1")));
}

#[test]
fn the_last_cpu_of_a_root_partition_stays_online() {
    let mut k = strict();
    partition(&mut k, "a", "6-7", "root");
    let busy = TaskTraits { activity: Activity::Runs, ..TaskTraits::default() };
    let task = k.spawn(&p("a"), 1, busy).unwrap();
    k.set_online(CpuId(6), false).unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "7");
    assert_eq!(k.set_online(CpuId(7), false), Err(Errno::EBUSY));
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
    // The refused attempt has pushed the task out, and no file tells.
    assert_eq!(k.mask(task), Some(&cpus("0-7")));
    assert_eq!(stale_masks(&k).len(), 1);
}

#[test]
fn an_isolated_partition_comes_back_with_a_leak() {
    let mut k = strict();
    partition(&mut k, "a", "6-7", "isolated");
    k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    let owners = [(p("a"), Enforced::Partition)];
    for (cpu, online) in [(6, false), (7, false)] {
        k.set_online(CpuId(cpu), online).unwrap();
    }
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "isolated invalid");
    assert_eq!(leaks(&k, &owners), [""; 0]);
    for (cpu, online) in [(6, true), (7, true)] {
        k.set_online(CpuId(cpu), online).unwrap();
    }
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "isolated");
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "6-7");
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-5,7");
    assert!(leaks(&k, &owners).iter().any(|l| l.contains("may use 7")), "{:?}", leaks(&k, &owners));
}

#[test]
fn scopes() {
    let mut k = strict();
    for path in ["a", "a/b", "a/c", "a/b/d", "e", "e/f"] {
        k.mkdir(&p(path)).unwrap();
    }
    let mut names = |scope| -> Vec<String> {
        k.observe(&scope).unwrap().cgroups.keys().map(|p| p.as_str().to_owned()).collect()
    };
    assert_eq!(names(Scope::Around(vec![p("a/b")])), ["", "a", "a/b", "a/b/d", "a/c", "e"]);
    assert_eq!(names(Scope::Around(vec![p("a/gone")])), ["", "a", "a/b", "a/c", "e"]);
    assert_eq!(names(Scope::Named(vec![p("a/b"), p("gone")])), ["", "a/b"]);
    let seen = k.observe(&Scope::Named(vec![p("a")])).unwrap();
    let (root, a) = (&seen.cgroups[&p("")], &seen.cgroups[&p("a")]);
    assert!(root.enables_cpuset && root.populated && root.has_processes && root.kind == CgroupKind::Domain);
    let files = root.cpuset.as_ref().unwrap();
    assert_eq!((&files.effective, &files.partition, &files.exclusive), (&cpus("0-7"), &None, &None));
    assert!(!a.enables_cpuset && !a.populated && !a.has_processes);
    assert!(!a.cpuset.as_ref().unwrap().is_partition());
}

#[test]
fn steps_faults_and_crashes() {
    let mut k = strict();
    let write = |text: &str| Step::Write {
        path: p("a"),
        file: CpusetFile::Cpus,
        old: String::new(),
        new: Value::Cpus(cpus(text)),
    };
    k.apply(&Step::Create(p("a"))).unwrap();
    k.fault(0, Fault::Fail(Errno::EBUSY));
    let refused = k.apply(&write("1")).unwrap_err();
    assert_eq!((refused.errno, refused.target.as_str()), (Some(16), "/a/cpuset.cpus"));
    k.apply(&write("1")).unwrap();
    k.apply(&write("")).unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus"), "", "an empty list is a write too");
    for (fault, after) in [(Fault::CrashBefore, ""), (Fault::CrashAfter, "2")] {
        k.fault(0, fault);
        assert_eq!(k.apply(&write("2")).unwrap_err().operation, CRASH);
        assert!(k.observe(&Scope::Named(vec![])).is_err() && k.apply(&write("3")).is_err());
        k.restart();
        assert_eq!(read(&k, "a/cpuset.cpus"), after);
    }
    k.fault(1, Fault::Foreign { path: p("a"), file: "cpuset.cpus".into(), text: "7\n".into() });
    k.apply(&Step::Create(p("b"))).unwrap();
    k.apply(&Step::Enter { path: p("b"), pid: INIT }).unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus"), "7");
    k.apply(&Step::Enable(p("a"))).unwrap();
    k.apply(&Step::Remove(p("a"))).unwrap();
    let gone = k.apply(&Step::Remove(p("a"))).unwrap_err();
    assert_eq!((gone.errno, gone.operation), (Some(2), "rmdir"));
    assert_eq!(k.applies(), 11);
}

#[test]
fn a_new_directory_has_a_new_id() {
    let mut k = strict();
    k.mkdir(&p("a")).unwrap();
    let first = k.id(&p("a")).unwrap();
    k.rmdir(&p("a")).unwrap();
    k.mkdir(&p("a")).unwrap();
    assert_ne!(k.id(&p("a")), Some(first));
}

#[test]
fn the_observer_sees_each_invariant_broken() {
    let mut k = strict();
    for path in ["a", "b"] {
        k.mkdir(&p(path)).unwrap();
        write(&mut k, &format!("{path}/cpuset.cpus"), "2-3").unwrap();
    }
    let owners = vec![(p("a"), Enforced::Member), (p("b"), Enforced::Member)];
    let pool = Pool { cgroups: vec![], reserved: cpus("0-1"), strict: false };
    assert_eq!(invariants(&k, &owners, &pool), ["I1: /b and /a both have 2-3"]);
    let mut guarded = Guarded::new(k, owners.clone(), pool.clone());
    let step = |path: &str, set: &str| Step::Write {
        path: p(path),
        file: CpusetFile::Cpus,
        old: String::new(),
        new: Value::Cpus(cpus(set)),
    };
    guarded.apply(&step("b", "1,4")).unwrap();
    assert_eq!(guarded.breaches.len(), 1, "{:?}", guarded.breaches);
    assert!(guarded.breaches[0].contains("I3: /b has the reserved 1"), "{:?}", guarded.breaches);
    let mut k = guarded.kernel;
    write(&mut k, "b/cpuset.cpus.partition", "root").unwrap();
    let shrunk = invariants(&k, &owners, &pool);
    assert!(shrunk.iter().any(|b| b.contains("the pool / has 0,2-3,5-7 without")), "{shrunk:?}");
    let strict_pool = Pool { cgroups: vec![p("a")], reserved: cpus("2"), strict: true };
    let kept = invariants(&k, &owners[1..], &strict_pool);
    assert_eq!(kept, ["I3: the pool /a has the strictly reserved 2"]);
    write(&mut k, "b/cpuset.cpus.partition", "member").unwrap();
    assert_eq!(PartitionKind::Member.to_string(), read(&k, "b/cpuset.cpus.partition"));
}

fn lax() -> FakeKernel {
    machine(Behaviour::lax())
}

#[test]
fn lax_an_empty_write_lets_the_tasks_out() {
    let mut k = lax();
    k.mkdir(&p("a")).unwrap();
    write(&mut k, "a/cpuset.cpus", "2-3").unwrap();
    let task = k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    write(&mut k, "a/cpuset.cpus", "").unwrap();
    assert_eq!(k.mask(task), Some(&cpus("0-7")));
    write(&mut k, "a/cpuset.mems", "1").unwrap();
    write(&mut k, "a/cpuset.mems", "").unwrap();
}

/// `s/x`, a remote partition on 2-4 of the list 2-5 of `s`, with a task in it; the task.
fn remote_below_a_list(kernel: &mut FakeKernel) -> u32 {
    kernel.mkdir(&p("s")).unwrap();
    kernel.mkdir(&p("s/x")).unwrap();
    for (file, text) in [
        ("s/cgroup.subtree_control", "+cpuset"),
        ("s/cpuset.cpus.exclusive", "2-5"),
        ("s/x/cpuset.cpus.exclusive", "2-4"),
        ("s/x/cpuset.cpus.partition", "root"),
    ] {
        write(kernel, file, text).unwrap();
    }
    kernel.spawn(&p("s/x"), 1, TaskTraits::default()).unwrap()
}

#[test]
fn a_list_that_shrinks_above_a_remote_partition() {
    for (behaviour, state, effective) in [
        (Behaviour::strict(), "member", "0-7"),
        (Behaviour::amended(), "root", "2-3"),
        (Behaviour::lax(), "root", "2-3"),
    ] {
        let mut k = machine(behaviour);
        let task = remote_below_a_list(&mut k);
        write(&mut k, "s/cpuset.cpus.exclusive", "2-3").unwrap();
        assert_eq!(read(&k, "s/x/cpuset.cpus.partition"), state, "{behaviour:?}");
        assert_eq!(read(&k, "s/x/cpuset.cpus.effective"), effective, "{behaviour:?}");
        assert_eq!(k.mask(task), Some(&cpus(effective)), "{behaviour:?}");
    }
}

#[test]
fn an_exclusive_list_that_meets_what_a_sibling_was_granted() {
    for (behaviour, result) in [
        (Behaviour::strict(), Ok(())),
        (Behaviour::amended(), Err(Errno::EINVAL)),
        (Behaviour::lax(), Err(Errno::EINVAL)),
    ] {
        let mut k = machine(behaviour);
        for path in ["s", "t"] {
            k.mkdir(&p(path)).unwrap();
        }
        // `t` comes to hold 4-5 by a change of its list, which sets no guard against overlap.
        write(&mut k, "s/cpuset.cpus.exclusive", "2-3").unwrap();
        write(&mut k, "t/cpuset.cpus", "3-4").unwrap();
        write(&mut k, "t/cpuset.cpus.partition", "root").unwrap();
        write(&mut k, "t/cpuset.cpus", "4-5").unwrap();
        assert_eq!(read(&k, "t/cpuset.cpus.partition"), "root", "{behaviour:?}");
        assert_eq!(write(&mut k, "s/cpuset.cpus.exclusive", "2-4"), result, "{behaviour:?}");
    }
}

#[test]
fn lax_overlap_trims_the_sibling() {
    let mut k = lax();
    partition(&mut k, "a", "2-3", "root");
    k.mkdir(&p("b")).unwrap();
    write(&mut k, "b/cpuset.cpus", "3-4").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
    assert_eq!(read(&k, "b/cpuset.cpus.effective"), "4");
}

#[test]
fn lax_a_partition_lives_on_from_cpus() {
    let mut k = lax();
    partition(&mut k, "a", "2-3", "root");
    k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    write(&mut k, "a/cpuset.cpus.exclusive", "").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
    assert_eq!(write(&mut k, "a/cpuset.cpus", ""), Err(Errno::EBUSY));
    write(&mut k, "a/cpuset.cpus.exclusive", "2-3").unwrap();
    write(&mut k, "a/cpuset.cpus", "").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.effective"), "2-3");
}

#[test]
fn lax_a_root_partition_comes_back_with_a_leak() {
    let mut k = lax();
    partition(&mut k, "a", "6-7", "root");
    k.spawn(&p("a"), 1, TaskTraits::default()).unwrap();
    for (cpu, online) in [(6, false), (7, false), (6, true), (7, true)] {
        k.set_online(CpuId(cpu), online).unwrap();
    }
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-5,7");
    assert!(!leaks(&k, &[(p("a"), Enforced::Partition)]).is_empty());
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "cpuset.cpus.effective"), "0-5,7", "the same word repairs nothing");
    for word in ["member", "root"] {
        write(&mut k, "a/cpuset.cpus.partition", word).unwrap();
    }
    assert_eq!(leaks(&k, &[(p("a"), Enforced::Partition)]), [""; 0]);
}
