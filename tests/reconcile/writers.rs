//! Who wrote, as far as the means in force tell; what the kernel did by itself.

use crate::world::{
    SECOND, assigned, by, drifts, existing, findings, foreign, host, log, logged, owner, p, run, settled,
    sound, told,
};
use truepin::reconcile::{Cause, Event, Finding, FindingKind, ForeignWrite, Sight, Writer};
use truepin::request::Isolation;
use truepin::sweep::SetFault;
use truepin::{CgroupFile, CpuId, CpusetFile};
use truepin_tests::fake::Behaviour;
use truepin_tests::sim::{Foreign, Sim};

fn sees(sim: &mut Sim, sight: Sight, lost: u64) {
    sim.happens(Event::Wrote { writes: Vec::new(), sight, lost }).unwrap();
}

/// A partition at `user.slice`, on CPUs 4-5, that has been looked at since its neighbours are watched.
fn partition(sight: Sight) -> Sim {
    let mut sim = logged(host(Behaviour::lax()));
    sees(&mut sim, sight, 0);
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    sim.tick().unwrap();
    sim.reports.clear();
    sim
}

fn offline(sim: &mut Sim) {
    for cpu in [4, 5] {
        sim.eyes.others(|k| k.set_online(CpuId(cpu), false).unwrap());
    }
}

/// That a partition has ended.
fn lost(finding: &Finding) -> bool {
    matches!(&finding.kind, FindingKind::Set(s) if matches!(s.fault, SetFault::PartitionLost { .. }))
}

/// How the end of the partition was told, in order.
fn ends(sim: &Sim) -> Vec<String> {
    sim.reports
        .iter()
        .filter(|f| lost(f))
        .map(|f| f.cause.as_ref().map_or("none".into(), ToString::to_string))
        .collect()
}

const UNKNOWN: &str = "an unknown writer or the kernel";
const KERNEL: &str = "the kernel itself (CPUs 4-5 went offline)";

#[test]
fn the_kernel_is_named_when_every_writer_is_seen() {
    for (sight, at_once, in_a_second) in [
        (Sight::Whole, KERNEL, None),
        (Sight::Trailing, UNKNOWN, Some(KERNEL)),
        (Sight::Blind, UNKNOWN, None),
    ] {
        let mut sim = partition(sight);
        offline(&mut sim);
        sim.tick().unwrap();
        sound(&mut sim);
        assert_eq!(ends(&sim), [at_once], "{sight:?}: {}", log(&sim));
        let due = sim.state.next_deadline();
        assert_eq!(due.is_some(), in_a_second.is_some(), "{sight:?}: {due:?}");
        sim.wait(due.map_or(SECOND, |due| due - sim.now.mono_ns));
        sim.tick().unwrap();
        let told: Vec<&str> = [at_once].into_iter().chain(in_a_second).collect();
        assert_eq!(ends(&sim), told, "{sight:?}: {}", log(&sim));
        assert_eq!(sim.state.next_deadline(), None, "{sight:?}");
        // One finding, told anew; not two.
        let ids: std::collections::BTreeSet<u64> =
            sim.reports.iter().filter(|f| lost(f)).map(|f| f.id).collect();
        assert_eq!(ids.len(), 1, "{sight:?}");
    }
}

#[test]
fn where_a_write_was_lost_nobody_is_named() {
    let mut sim = partition(Sight::Whole);
    offline(&mut sim);
    sees(&mut sim, Sight::Whole, 1);
    sim.tick().unwrap();
    sim.wait(2 * SECOND);
    sim.tick().unwrap();
    assert_eq!(ends(&sim), [UNKNOWN], "{}", log(&sim));
}

/// The kernel's notice comes first, the write that caused it is told when it has ended.
#[test]
fn a_name_that_comes_late() {
    let mut sim = logged(host(Behaviour::strict()));
    sees(&mut sim, Sight::Trailing, 0);
    assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
    sim.tick().unwrap();
    sim.reports.clear();
    let begun_ns = sim.now.mono_ns;
    let write = Foreign { path: p("machine.slice"), file: "cpuset.cpus".into(), text: "5-6".into() };
    sim.eyes.foreign(&write).unwrap();
    told(&mut sim, "user.slice", "cpuset.cpus.partition", None);
    settled(&mut sim);
    assert_eq!(ends(&sim), [UNKNOWN], "{}", log(&sim));
    let writer = Writer { wrote: Some("5-6".into()), begun_ns, ..by(9, sim.now.mono_ns) };
    let write =
        ForeignWrite { path: p("machine.slice"), file: Some(CpusetFile::Cpus.into()), writer: Some(writer) };
    sim.happens(Event::Disturbed { writes: vec![write], departures: Vec::new() }).unwrap();
    settled(&mut sim);
    let name =
        "the kernel, after w9 (pid 9, cgroup /user.slice) wrote \"5-6\" to cpuset.cpus of /machine.slice";
    assert_eq!(ends(&sim), [UNKNOWN, name], "{}", log(&sim));
    // The sibling's own list and the partition's state are named too, each once.
    let named = |f: &&Finding| {
        matches!(f.kind, FindingKind::Drift { .. }) && f.cause.as_ref().and_then(Cause::writer).is_some()
    };
    let named: Vec<_> = sim.state.findings().filter(named).map(ToString::to_string).collect();
    assert_eq!(named.len(), 2, "{named:#?}");
    assert_eq!(sim.state.next_deadline(), None);
}

/// Its partition ends six times, as far as truepin can see by nobody's write: the kernel's doing where every writer is
/// seen, and perhaps one and the same writer's where not.
#[test]
fn what_the_kernel_does_is_no_fight() {
    for (sight, fights) in [(Sight::Whole, false), (Sight::Blind, true)] {
        let mut sim = logged(host(Behaviour::strict()));
        sees(&mut sim, sight, 0);
        assigned(&mut sim, &existing("user.slice", "4-5", Isolation::Partition));
        sim.tick().unwrap();
        sim.reports.clear();
        // Two siblings in turn: neither list is in a fight.
        for sibling in ["machine.slice", "system.slice"].into_iter().cycle().take(6) {
            let write = Foreign { path: p(sibling), file: "cpuset.cpus".into(), text: "5-6".into() };
            sim.eyes.foreign(&write).unwrap();
            told(&mut sim, "user.slice", "cpuset.cpus.partition", None);
            sound(&mut sim);
        }
        let over: Vec<_> = findings(&sim, |k| match k {
            FindingKind::Fight { path, file, .. } => Some((path.as_str(), *file)),
            _ => None,
        });
        let expected: &[_] = if fights { &[("user.slice", CpusetFile::Partition)] } else { &[] };
        assert_eq!(over, expected, "{sight:?}: {}", log(&sim));
    }
}

#[test]
fn who_brings_tasks_into_an_owners_cgroup() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("a", "2-3", Isolation::Partition));
    assigned(&mut sim, &existing("system.slice/a", "4-5", Isolation::Member));
    let a = "truepin.slice/run-a";
    assert_eq!(
        [a, "truepin.slice", "system.slice/a", "user.slice", ""].map(|path| {
            let interest = sim.state.interest(&p(path));
            (interest.tasks, interest.children)
        }),
        [(true, true), (false, true), (false, true), (false, false), (false, true)]
    );
    let mut joins = |path: &str, file, wrote: Option<&str>, writer: Writer| {
        sim.reports.clear();
        let writer = Writer { wrote: wrote.map(Into::into), ..writer };
        let write = ForeignWrite { path: p(path), file: Some(file), writer: Some(writer) };
        sim.happens(Event::Disturbed { writes: vec![write], departures: Vec::new() }).unwrap();
        settled(&mut sim);
        sim.wait(SECOND / 4);
        sim.reports.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let from = |pid: u32, cgroup: &str| Writer { cgroup: Some(p(cgroup)), ..by(pid, 0) };
    let (procs, threads) = (CgroupFile::Procs, CgroupFile::Threads);
    for (path, file, wrote, writer, expected) in [
        (
            a,
            procs,
            Some("77"),
            from(9, "user.slice"),
            Some("process 77 was moved into /truepin.slice/run-a; by w9 (pid 9, cgroup /user.slice)"),
        ),
        // The same again within a second; another; after a second.
        (a, procs, Some("78"), from(9, "user.slice"), None),
        (
            a,
            procs,
            Some("79"),
            from(10, "user.slice"),
            Some("process 79 was moved into /truepin.slice/run-a; by w10 (pid 10, cgroup /user.slice)"),
        ),
        (a, procs, Some("80"), from(9, "user.slice"), None),
        (
            a,
            procs,
            Some("81"),
            from(9, "user.slice"),
            Some("process 81 was moved into /truepin.slice/run-a; by w9 (pid 9, cgroup /user.slice)"),
        ),
        // Itself; a thread; below; by means that do not tell what was written.
        (
            a,
            procs,
            Some("0"),
            from(11, "user.slice"),
            Some("process 11 was moved into /truepin.slice/run-a; by w11 (pid 11, cgroup /user.slice)"),
        ),
        (
            a,
            threads,
            Some("82"),
            from(12, "user.slice"),
            Some("thread 82 was moved into /truepin.slice/run-a; by w12 (pid 12, cgroup /user.slice)"),
        ),
        (
            "truepin.slice/run-a/x",
            procs,
            None,
            from(13, "user.slice"),
            Some("a process was moved into /truepin.slice/run-a/x; by w13 (pid 13, cgroup /user.slice)"),
        ),
        // The owner's own tasks; a cgroup that is not truepin's.
        (a, procs, Some("83"), from(14, "truepin.slice/run-a"), None),
        (a, procs, Some("84"), from(15, "truepin.slice/run-a/x"), None),
        ("system.slice/a", procs, Some("85"), from(16, "user.slice"), None),
        ("user.slice", procs, Some("86"), from(17, "user.slice"), None),
    ] {
        let told = joins(path, file, wrote, writer);
        let expected: Vec<String> =
            expected.map(|e| format!("{}: {e}", owner("run/a"))).into_iter().collect();
        assert_eq!(told, expected, "{path} {wrote:?}");
    }
}

/// What was told beside a reading names what that reading shows; nothing is looked at for it alone.
#[test]
fn a_write_that_is_told_beside_a_reading() {
    let mut sim = logged(host(Behaviour::strict()));
    assigned(&mut sim, &run("a", "2-3", Isolation::Member));
    sim.reports.clear();
    let write = Foreign { path: p("truepin.slice/run-a"), file: "cpuset.cpus".into(), text: "0".into() };
    sim.eyes.foreign(&write).unwrap();
    let told = ForeignWrite {
        path: p("truepin.slice/run-a"),
        file: Some(CpusetFile::Cpus.into()),
        writer: Some(by(7, sim.now.mono_ns)),
    };
    let steps = sim.eyes.steps.len();
    sim.happens(Event::Wrote { writes: vec![told], sight: Sight::Whole, lost: 0 }).unwrap();
    assert_eq!((sim.eyes.steps.len(), sim.reports.len()), (steps, 0));
    sim.tick().unwrap();
    settled(&mut sim);
    let said: Vec<_> = sim.reports.iter().map(ToString::to_string).collect();
    let drift = "cpuset.cpus of /truepin.slice/run-a reads \"0\", wanted \"2-3\"; changed by w7 (pid 7, cgroup /user.slice)";
    assert!(said.iter().any(|s| s == drift), "{said:?}");
    // It is past then.
    foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus", "1", None);
    assert!(sim.reports.iter().any(|f| f.to_string().ends_with(UNKNOWN)), "{}", log(&sim));
}

/// Somebody changes one file, and while truepin mends that, another changes one that truepin has not written.
#[test]
fn a_change_in_mid_convergence_is_told_too() {
    for (path, file, value, found) in [
        ("user.slice", "cpuset.cpus", "3-4", "3-4"),
        ("system.slice/a", "cpuset.cpus.partition", "member", "member"),
    ] {
        let mut sim = logged(host(Behaviour::strict()));
        assigned(&mut sim, &run("a", "2-3", Isolation::Member));
        assigned(&mut sim, &existing("system.slice/a", "6-7", Isolation::Partition));
        sim.reports.clear();
        let late = Foreign { path: p(path), file: file.into(), text: value.into() };
        sim.eyes.ambush(0, late);
        foreign(&mut sim, "truepin.slice/run-a/cpuset.cpus", "2-4", Some(9));
        settled(&mut sim);
        let told: Vec<_> = drifts(&sim).into_iter().map(|d| (d.0, d.1, d.2)).collect();
        let drift =
            |path: &str, file: &str, found: &str| (path.to_owned(), file.to_owned(), found.to_owned());
        let expected = [drift("truepin.slice/run-a", "cpuset.cpus", "2-4"), drift(path, file, found)];
        assert_eq!(told, expected, "{}", log(&sim));
    }
}
