//! Containers come, are made anew and end, also while no agent runs; whose CPUs are freed then, and whose are not.

use super::*;

#[test]
fn a_pod_ends_while_the_agent_is_down_and_no_pod_is_active_afterwards() {
    for sources in [&[] as &[&str], &["api"]] {
        for with_container in [true, false] {
            let mut sim = node(sources);
            admitted(&mut sim, &pod("a", &[("c", 4)]));
            if with_container {
                make(&mut sim, "a", 1);
                created(&mut sim, "a", "c", 1);
                assert_eq!(effective(&sim, &home("a", 1)), cpus("4-7"));
                unmake(&mut sim, "a", 1);
                unmake_pod(&mut sim, "a");
            }
            sim.restart().unwrap();
            assert_eq!(exclusive(&sim), "4-7", "nothing was said yet");
            tree(&mut sim, &[], &[]);
            if !sources.is_empty() {
                assert_eq!(exclusive(&sim), "4-7", "the source has not reported");
                report(&mut sim, "api", true, &[]);
            }
            // Without a source a pod of which nothing was ever made is only waited for.
            let freed = with_container || !sources.is_empty();
            assert_eq!(exclusive(&sim), if freed { "" } else { "4-7" }, "{sources:?} {with_container}");
            let told: &[&str] = if freed { &["pod/a/c 4-7 its pod is not active any more"] } else { &[] };
            assert_eq!(gone(&sim), told, "exactly once");
            tree(&mut sim, &[], &[]);
            sim.tick().unwrap();
            assert_eq!(gone(&sim), told, "exactly once");
            settled(&mut sim);
            assert_eq!(sim.disk.record().unwrap().assignments.exclusive().is_empty(), freed);
        }
    }
}

#[test]
fn hints_would_have_seen_stale_cpus_as_taken() {
    let mut sim = node(&["api"]);
    admitted(&mut sim, &pod("a", &[("c", 4)]));
    // The report comes, and the table that follows from it cannot be made durable: the pod stays in it.
    sim.disk.full = true;
    report(&mut sim, "api", true, &[]);
    assert_eq!(exclusive(&sim), "4-7");
    sim.disk.full = false;
    // Four CPUs of one node are free only without it.
    assert_eq!(admitted(&mut sim, &pod("b", &[("c", 4)])), ["pod/b/c 4-7"]);
    settled(&mut sim);
}

#[test]
fn a_source_that_is_not_ready_frees_nobody() {
    let mut sim = node(&["api", "file"]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    sim.restart().unwrap();
    for (source, complete, pods) in
        [("api", true, &["b"] as &[&str]), ("file", false, &[]), ("api", false, &[]), ("api", true, &["b"])]
    {
        report(&mut sim, source, complete, pods);
        assert_eq!(gone(&sim), [""; 0], "{source} {complete}");
    }
    report(&mut sim, "file", true, &[]);
    assert_eq!(gone(&sim), ["pod/a/c 2-3 its pod is not active any more"]);
    // One that comes after the reports is not concerned by them.
    admitted(&mut sim, &pod("new", &[("c", 2)]));
    sim.tick().unwrap();
    assert_eq!(gone(&sim).len(), 1);
    report(&mut sim, "api", true, &["b"]);
    assert_eq!(gone(&sim).len(), 1, "the other report is older");
    report(&mut sim, "file", true, &[]);
    assert_eq!(gone(&sim).len(), 2);
    let report = SourceReport { source: "x".into(), complete: true, pods: names(&[]), position: None };
    let answer = sim.ask(|ticket| Event::Source { ticket, report }).unwrap();
    assert!(matches!(&answer, Answer::Failed(why) if why.contains("api, file")), "{answer:?}");
}

#[test]
fn initial_containers_after_a_restart() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)]));
    make(&mut sim, "a", 1);
    make(&mut sim, "a", 2);
    make(&mut sim, "a", 3);
    // Every message is lost; one name cannot be found out.
    sim.restart().unwrap();
    assert!(sim.state.containers.is_empty());
    tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("d"), 2), ("a", None, 3)]);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 1)), cpus("2-3"));
    assert_eq!(effective(&sim, &home("a", 2)), cpus("4-5"));
    assert_eq!(effective(&sim, &home("a", 3)), cpus("0-1,6-7"));
    let ties: Vec<String> = sim.state.containers.iter().map(|(id, e)| format!("{id} {}", e.owner)).collect();
    assert_eq!(ties, [format!("{} pod/a/c", id(1)), format!("{} pod/a/d", id(2))]);
    let unresolved = |sim: &Sim| {
        sim.reports
            .iter()
            .filter(|f| matches!(&f.kind, FindingKind::Unresolved { id: i, .. } if *i == id(3)))
            .count()
    };
    assert_eq!(unresolved(&sim), 1);
    tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("d"), 2), ("a", None, 3)]);
    assert_eq!(unresolved(&sim), 1, "told once");
    assert_eq!(gone(&sim), [""; 0]);
}

// Order, repetition, loss.

#[test]
fn the_order_of_messages_does_not_matter() {
    // 0 admit, 1 made, 2 created, 3 tree: every order in which a container is made before it is told of.
    let orders =
        [[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3], [1, 2, 3, 0], [1, 3, 2, 0], [1, 3, 0, 2], [0, 1, 3, 2]];
    for order in orders {
        let mut sim = node(&[]);
        for op in order {
            for _ in 0..2 {
                match op {
                    0 => drop(admitted(&mut sim, &pod("a", &[("c", 2)]))),
                    1 if sim.eyes.kernel().id(&home("a", 1)).is_none() => make(&mut sim, "a", 1),
                    2 => drop(created(&mut sim, "a", "c", 1)),
                    3 => tree(&mut sim, &["a"], &[("a", Some("c"), 1)]),
                    _ => {}
                }
            }
        }
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", 1)), cpus("2-3"), "{order:?}\n{}", log(&sim));
        assert_eq!(sim.state.assignments.owners[&owner("pod/a/c")].cgroup, home("a", 1), "{order:?}");
        assert_eq!(remove(&mut sim, "a"), ["pod/a/c"]);
        assert_eq!(remove(&mut sim, "a"), [""; 0]);
        settled(&mut sim);
        assert_eq!((exclusive(&sim), sim.state.containers.len()), (String::new(), 0));
        assert_eq!(effective(&sim, &home("a", 1)), cpus("0-7"), "{order:?}");
    }
}

/// A scan that tells of a newer container may come before the loop itself has read that cgroup, and scans are in the order of
/// paths.
#[test]
fn a_newer_container_has_the_cpus_whatever_its_id() {
    for (old, new) in [(1, 2), (2, 1)] {
        let mut sim = node(&[]);
        admitted(&mut sim, &pod("a", &[("c", 2)]));
        make(&mut sim, "a", old);
        tree(&mut sim, &["a"], &[("a", Some("c"), old)]);
        settled(&mut sim);
        make(&mut sim, "a", new);
        for _ in 0..2 {
            tree(&mut sim, &["a"], &[("a", Some("c"), 1), ("a", Some("c"), 2)]);
            settled(&mut sim);
            assert_eq!(
                sim.state.assignments.owners[&owner("pod/a/c")].cgroup,
                home("a", new),
                "{}",
                log(&sim)
            );
        }
        assert_eq!(effective(&sim, &home("a", new)), cpus("2-3"));
        // The newer one ends first: the older one has them again, though the loop has not read that either.
        unmake(&mut sim, "a", new);
        tree(&mut sim, &["a"], &[("a", Some("c"), old)]);
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", old)), cpus("2-3"));
    }
}

#[test]
fn a_container_made_anew_keeps_its_owners_set() {
    for told in [true, false] {
        let mut sim = node(&[]);
        admitted(&mut sim, &pod("a", &[("c", 2)]));
        make(&mut sim, "a", 1);
        created(&mut sim, "a", "c", 1);
        unmake(&mut sim, "a", 1);
        sim.tick().unwrap();
        tree(&mut sim, &["a"], &[]);
        settled(&mut sim);
        assert!(sim.state.assignments.promised.contains_key(&owner("pod/a/c")), "{}", log(&sim));
        // Somebody else does not get them meanwhile.
        assert_eq!(admitted(&mut sim, &pod("b", &[("c", 2)])), ["pod/b/c 4-5"]);
        make(&mut sim, "a", 2);
        if told {
            created(&mut sim, "a", "c", 2);
        } else {
            tree(&mut sim, &["a"], &[("a", Some("c"), 2)]);
        }
        settled(&mut sim);
        assert_eq!(effective(&sim, &home("a", 2)), cpus("2-3"));
        // The new one before the old one has gone, over a restart of the agent too.
        make(&mut sim, "a", 3);
        created(&mut sim, "a", "c", 3);
        sim.restart().unwrap();
        tree(&mut sim, &["a"], &[("a", Some("c"), 2), ("a", Some("c"), 3)]);
        settled(&mut sim);
        assert_eq!(exclusive(&sim), "2-5");
        assert_eq!(gone(&sim), [""; 0]);
        let lives = |sim: &Sim| sim.state.assignments.owners[&owner("pod/a/c")].cgroup.clone();
        assert_eq!(
            (lives(&sim), effective(&sim, &home("a", 3))),
            (home("a", 3), cpus("2-3")),
            "the newer one"
        );
        // What is said again of the old one changes nothing.
        created(&mut sim, "a", "c", 2);
        settled(&mut sim);
        assert_eq!(
            (lives(&sim), effective(&sim, &home("a", 3))),
            (home("a", 3), cpus("2-3")),
            "the newer one"
        );
    }
}

#[test]
fn after_a_reboot_pods_wait_for_their_containers() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    // Of b there was a container once.
    make(&mut sim, "b", 2);
    created(&mut sim, "b", "c", 2);
    unmake(&mut sim, "b", 2);
    sim.tick().unwrap();
    assert!(sim.state.assignments.promised[&owner("pod/b/c")].made);
    sim.reboot(booted("0-7")).unwrap();
    assert!(sim.state.containers.is_empty(), "no runtime starts a container of the boot before again");
    // The agent is up before the kubelet: the tree has no pods yet.
    for _ in 0..2 {
        tree(&mut sim, &[], &[]);
        sim.tick().unwrap();
        assert_eq!((exclusive(&sim).as_str(), gone(&sim)), ("2-5", vec![]), "{}", log(&sim));
    }
    settled(&mut sim);
    make(&mut sim, "a", 3);
    tree(&mut sim, &["a"], &[("a", Some("c"), 3)]);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 3)), cpus("2-3"));
    assert_eq!(remove(&mut sim, "b"), ["pod/b/c"]);
    assert_eq!(exclusive(&sim), "2-3");
}

#[test]
fn a_table_that_was_fitted_after_a_reboot_is_what_a_full_disk_leaves() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    let slice = sim.state.first.clone();
    sim.disk.full = true;
    // CPU 3 did not come back.
    let setup = std::sync::Arc::make_mut(&mut sim.setup);
    let mut raw =
        Regular { packages: 2, nodes: 1, l3: 1, cores: 2, threads: 2, numbering: Numbering::ThreadsAdjacent }
            .raw();
    raw.online = Some(cpus("0-2,4-7"));
    setup.topology = CpuTopology::assemble(&raw).unwrap();
    sim.reboot(booted("0-2,4-7")).unwrap();
    sim.tick().unwrap();
    let set = |sim: &Sim| sim.state.assignments.cpus_of(&owner("pod/a/c")).unwrap().clone();
    let fitted = set(&sim);
    assert!(fitted.len() == 2 && !fitted.contains(truepin::CpuId(3)), "{fitted}\n{}", log(&sim));
    // Somebody asks, and that cannot be saved: back to what this boot may use, not to what the boot before had.
    let answer = admit(&mut sim, &pod("b", &[("c", 2)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::NotDurable(_))), "{answer:?}");
    assert_eq!((set(&sim), sim.state.first.is_empty() || slice.is_empty()), (fitted.clone(), true));
    sim.disk.full = false;
    sim.tick().unwrap();
    settled(&mut sim);
    assert_eq!(sim.disk.record().unwrap().assignments.cpus_of(&owner("pod/a/c")), Some(&fitted));
}

#[test]
fn a_container_that_ends_has_a_last_verdict() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    sim.probe.foreign_ns.insert(truepin::CpuId(2), 5_000_000);
    sim.wait(1_000_000_000);
    unmake(&mut sim, "a", 1);
    sim.tick().unwrap();
    let last = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(last.judgement, truepin::verdict::Judgement::Violated, "{last:?}");
    // Its successor does not make that undone: since the assignment it is violated, by itself it is not.
    sim.probe.foreign_ns.clear();
    make(&mut sim, "a", 2);
    created(&mut sim, "a", "c", 2);
    sim.wait(1_000_000_000);
    let next = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(next.judgement, truepin::verdict::Judgement::Violated, "{next:?}");
    assert!(next.reasons[0].starts_with("in an earlier container: CPU 2"), "{next:?}");
    let from = sim.evidence().unwrap();
    sim.wait(1_000_000_000);
    let now = sim.evidence().unwrap();
    let window = sim.state.verdict(&owner("pod/a/c"), Some(&from), &now).unwrap();
    assert_eq!(window.judgement, truepin::verdict::Judgement::Held, "{window:?}");
    // Replaced before anybody looked: the verdict since the assignment says that a part was not judged.
    make(&mut sim, "a", 3);
    created(&mut sim, "a", "c", 3);
    sim.wait(1_000_000_000);
    let both = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(both.judgement, truepin::verdict::Judgement::Violated, "{both:?}");
    assert!(both.reasons.iter().any(|r| r.contains("made anew")), "{both:?}");
    settled(&mut sim);
}

#[test]
fn containers_that_end_well_leave_nothing_behind() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    for n in 1..4 {
        make(&mut sim, "a", n);
        created(&mut sim, "a", "c", n);
        sim.wait(1_000_000_000);
        let now = sim.verdict(&owner("pod/a/c")).unwrap();
        assert_eq!(now.judgement, truepin::verdict::Judgement::Held, "{n}: {now:?}");
        unmake(&mut sim, "a", n);
        sim.tick().unwrap();
    }
    // One whose end could not be judged does.
    make(&mut sim, "a", 4);
    created(&mut sim, "a", "c", 4);
    sim.wait(1_000_000_000);
    sim.probe.broken = true;
    unmake(&mut sim, "a", 4);
    sim.tick().unwrap();
    sim.probe.broken = false;
    make(&mut sim, "a", 5);
    created(&mut sim, "a", "c", 5);
    sim.wait(1_000_000_000);
    let now = sim.verdict(&owner("pod/a/c")).unwrap();
    assert_eq!(now.judgement, truepin::verdict::Judgement::Inconclusive, "{now:?}");
    // A pod of the same name that comes later has no past.
    remove(&mut sim, "a");
    unmake(&mut sim, "a", 5);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    make(&mut sim, "a", 6);
    created(&mut sim, "a", "c", 6);
    sim.wait(1_000_000_000);
    assert_eq!(sim.verdict(&owner("pod/a/c")).unwrap().judgement, truepin::verdict::Judgement::Held);
}
