//! Memory: the nodes of the CPUs, before anything enters, and back.

use super::world::*;
use truepin::{
    CpusetFile, Owner,
    observed::Step,
    reconcile::{AdmitError, Home},
    request::Isolation,
};
use truepin_tests::{
    fake::Behaviour,
    sim::{Sim, Wish},
};

const GIB: u64 = 1 << 30;

/// The machine has two nodes of 8 GiB; CPUs 2-3 and 4-7 are to be had.
fn wish(name: &str, cpus: u32, memory: u64) -> Wish {
    let mut wish = Wish::new(owner(name), cpus, Isolation::Auto);
    wish.request.memory = memory;
    wish
}

fn mems(sim: &Sim, path: &str) -> String {
    text(sim, path, CpusetFile::Mems)
}

fn nodes(sim: &Sim, name: &str) -> Vec<(u32, u64)> {
    let owner: Owner = owner(name);
    sim.state.assignments.owners[&owner].memory.iter().map(|(n, b)| (n.0, b / GIB)).collect()
}

#[test]
fn the_nodes_are_set_before_the_command_enters() {
    let mut sim = sim();
    let pid = client(&mut sim);
    sim.eyes.steps.clear();
    assigned(&mut sim, &wish("run/a", 2, 6 * GIB).with(pid));
    let at = |want: fn(&Step) -> bool| sim.eyes.steps.iter().position(want).unwrap();
    let set = at(|s| matches!(s, Step::Write { file: CpusetFile::Mems, .. }));
    assert!(set < at(|s| matches!(s, Step::Enter { .. })), "{:?}", sim.eyes.steps);
    assert_eq!((mems(&sim, "truepin.slice/run-a"), nodes(&sim, "run/a")), ("0".into(), vec![(0, 6)]));
    // What one owner has claimed another cannot have, though CPUs are free there.
    assigned(&mut sim, &wish("run/b", 2, 6 * GIB));
    assert_eq!((mems(&sim, "truepin.slice/run-b"), nodes(&sim, "run/b")), ("1".into(), vec![(1, 6)]));
    let refusal = refused(&mut sim, &wish("run/c", 2, 6 * GIB)).to_string();
    assert!(refusal.contains("2.0 GiB on node 0, 2.0 GiB on node 1"), "{refusal}");
    settled(&mut sim);
    // Given back, it is free again; over a restart, too.
    sim.release(Some(&owner("run/b"))).unwrap();
    sim.restart().unwrap();
    assert!(
        matches!(refused(&mut sim, &wish("run/c", 3, 12 * GIB)), AdmitError::Placement(_)),
        "run/a has 6 of 16"
    );
    assigned(&mut sim, &wish("run/c", 2, 6 * GIB));
    assert_eq!(nodes(&sim, "run/a"), [(0, 6)]);
    // The same request again is the same owner; another amount is not.
    let mut again = wish("cgroup/user.slice", 1, GIB);
    assigned(&mut sim, &again);
    assigned(&mut sim, &again);
    again.request.memory = 2 * GIB;
    assert!(matches!(refused(&mut sim, &again), AdmitError::Reserve(_)));
    sim.release(None).unwrap();
    settled(&mut sim);
}

#[test]
fn somebody_elses_cgroup_gets_its_nodes_back() {
    for behaviour in [Behaviour::strict(), Behaviour::lax()] {
        for first in ["", "0-1", "1"] {
            let mut sim = logged(host(behaviour));
            let path = "system.slice/a";
            sim.eyes.others(|k| k.write_file(&p(path), "cpuset.mems", &format!("{first}\n"))).unwrap();
            let mut wish = wish("unit/a.service", 2, 4 * GIB);
            wish.home = Home::Existing(p(path));
            assigned(&mut sim, &wish);
            assert_eq!(mems(&sim, path), "0");
            // Another writes it, as systemd does.
            foreign(&mut sim, &format!("{path}/cpuset.mems"), "1", Some(77));
            settled(&mut sim);
            assert_eq!(mems(&sim, path), "0", "{}", log(&sim));
            drifted(&sim, &format!("{path}/cpuset.mems"), "1", "0", Some(77));
            sim.release(Some(&owner("unit/a.service"))).unwrap();
            settled(&mut sim);
            // Where the kernel refuses the empty list, all nodes are the same to the tasks.
            let back = if first.is_empty() && !mems(&sim, path).is_empty() { "0-1" } else { first };
            assert_eq!(mems(&sim, path), back, "{}", log(&sim));
            // What could not be put back word by word is remembered until it can be.
            assert_eq!(sim.state.first.is_empty(), back == first, "{:?}", sim.state.first);
        }
    }
}

#[test]
fn memory_that_the_cgroup_above_does_not_allow() {
    let mut sim = sim();
    sim.eyes.others(|k| k.write_file(&p("system.slice"), "cpuset.mems", "1\n")).unwrap();
    let mut wish = wish("unit/a.service", 2, 4 * GIB);
    wish.home = Home::Existing(p("system.slice/a"));
    let before = files(&sim);
    // Node 0 is chosen, and the kernel would go on taking memory from node 1.
    let error = refused(&mut sim, &wish).to_string();
    assert!(error.contains("is to come from nodes 0, and the kernel takes it from 1"), "{error}");
    assert!(sim.state.assignments.owners.is_empty());
    let left: Vec<_> = files(&sim).into_iter().filter(|(k, v)| before.get(k) != Some(v)).collect();
    assert!(left.iter().all(|(_, v)| v == "1"), "an empty list is refused there, its like is not: {left:?}");
}

#[test]
fn a_cgroup_that_outlives_its_owner_has_all_memory_again() {
    let mut sim = sim();
    let pid = client(&mut sim);
    assigned(&mut sim, &wish("run/a", 2, 6 * GIB).with(pid));
    // Its process is still there.
    sim.release(Some(&owner("run/a"))).unwrap();
    assert_eq!(mems(&sim, "truepin.slice/run-a"), "0-1", "{}", log(&sim));
}
