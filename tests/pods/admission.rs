//! What a pod is promised: as a whole or not at all, once, and for as long as it lives.

use super::*;

#[test]
fn the_pod_as_a_whole() {
    for strategy in [Strategy::Best, Strategy::Kubelet { options: StaticOptions::default(), closest: false }]
    {
        let of = |scope| {
            let mut sim = node(&[]);
            let mut setup = (*sim.setup).clone();
            (setup.settings.strategy, setup.settings.scope) = (strategy, scope);
            sim = Sim::new(setup, booted("0-7"));
            sim.eyes.log = Some(Vec::new());
            sim
        };
        // CPUs 2-3 of one node are free, 4-7 of the other.
        let mut sim = of(Scope::Container);
        assert_eq!(admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])), ["pod/a/c 2-3", "pod/a/d 4-5"]);
        let mut sim = of(Scope::Pod);
        assert_eq!(
            admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])),
            ["pod/a/c 4-5", "pod/a/d 6-7"],
            "{strategy}"
        );
        // What does not fit together leaves nothing behind.
        let before = sim.state.assignments.clone();
        let answer = admit(&mut sim, &pod("b", &[("c", 1), ("d", 2)]));
        assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{answer:?}");
        assert_eq!(sim.state.assignments, before);
        // One that comes again without a container of it stays on its node, or is refused.
        sim.release(Some(&owner("pod/a/d"))).unwrap();
        assert_eq!(
            admitted(&mut sim, &pod("a", &[("c", 2), ("d", 2)])),
            ["pod/a/c 4-5", "pod/a/d 6-7"],
            "{strategy}"
        );
        sim.release(Some(&owner("pod/a/d"))).unwrap();
        let wish = Wish::new(owner("run/x"), 1, Isolation::Auto).on(cpus("6"));
        assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
        let answer = admit(&mut sim, &pod("a", &[("c", 2), ("d", 2)]));
        assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{strategy}: {answer:?}");
        settled(&mut sim);
    }
}

#[test]
fn memory_of_a_pods_owner_outlives_its_container() {
    let mut sim = node(&[]);
    make(&mut sim, "a", 1);
    let mut wish = Wish::new(owner("pod/a/c"), 2, Isolation::Auto);
    wish.home = truepin::reconcile::Home::Existing(home("a", 1));
    wish.request.memory = 6 << 30;
    assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
    let mems = |sim: &Sim, n| sim.eyes.text(&home("a", n), CpusetFile::Mems);
    assert_eq!(mems(&sim, 1), "0");
    unmake(&mut sim, "a", 1);
    sim.tick().unwrap();
    assert_eq!(sim.state.assignments.claimed_memory().values().sum::<u64>(), 6 << 30);
    make(&mut sim, "a", 2);
    created(&mut sim, "a", "c", 2);
    settled(&mut sim);
    assert_eq!(mems(&sim, 2), "0");
}

#[test]
fn reserved_cpus_that_cannot_be_replaced_are_a_problem() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 4)]));
    admitted(&mut sim, &pod("b", &[("c", 2)]));
    std::sync::Arc::make_mut(&mut sim.setup).reserved = cpus("0-1,4-7");
    sim.restart().unwrap();
    sim.tick().unwrap();
    let problems: Vec<String> = sim.state.problems().map(ToString::to_string).collect();
    assert!(problems.iter().any(|p| p.contains("4-7 of pod/a/c are reserved")), "{problems:?}");
    assert_eq!(exclusive(&sim), "2-7");
}

#[test]
fn a_pod_is_admitted_as_a_whole_or_not_at_all() {
    let mut sim = node(&[]);
    let before = (sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.kernel().applies());
    // The second container does not fit on one node.
    let answer = admit(&mut sim, &pod("a", &[("c", 4), ("d", 4)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::Placement(_))), "{answer:?}");
    assert_eq!(before, (sim.state.assignments.clone(), sim.disk.saves(), sim.eyes.kernel().applies()));
    // The disk is full.
    sim.disk.full = true;
    let answer = admit(&mut sim, &pod("a", &[("c", 2)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::NotDurable(_))), "{answer:?}");
    assert_eq!(sim.state.assignments, before.0);
    sim.disk.full = false;
    // Fractions and other qualities of service share.
    let shared = r#"{"uid":"s","app":[{"n":"c","req":500,"lim":2000}]}"#;
    assert_eq!(admitted(&mut sim, &Pod::parse(shared.as_bytes()).unwrap()), [""; 0]);
    // The same pod with other numbers is another request.
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    let answer = admit(&mut sim, &pod("a", &[("c", 4)]));
    assert!(matches!(answer, Answer::Refused(AdmitError::Reserve(_))), "{answer:?}");
    settled(&mut sim);
}

#[test]
fn a_promise_that_was_durable_is_answered_as_one() {
    let mut sim = node(&[]);
    // The first save has the promise. Member mode then writes the pool, whose first values are to be saved before.
    sim.disk.fault(1, DiskFault::Full);
    let requests = pod("a", &[("c", 2)]).requests(AlignmentPolicy::BestEffort, Isolation::Member).unwrap();
    let ask = |ticket| Event::AdmitPods(vec![PodAdmission { ticket, uid: "a".into(), requests }]);
    let answer = sim.ask(ask).unwrap();
    assert!(matches!(&answer, Answer::Pod(sets) if sets.len() == 1), "{answer:?}\n{}", log(&sim));
    let promised = sim.state.assignments.promised.clone();
    assert_eq!((promised.len(), &sim.disk.record().unwrap().assignments.promised), (1, &promised));
    sim.tick().unwrap();
    settled(&mut sim);
}

#[test]
fn a_pod_that_the_machine_made_smaller_is_the_same_pod() {
    let mut sim = node(&[]);
    admitted(&mut sim, &pod("a", &[("c", 2)]));
    let promise = sim.state.assignments.promised.get_mut(&owner("pod/a/c")).unwrap();
    (promise.original, promise.cpus) = (Some(promise.cpus.clone()), cpus("2"));
    assert_eq!(admitted(&mut sim, &pod("a", &[("c", 2)])), ["pod/a/c 2"]);
    assert!(matches!(admit(&mut sim, &pod("a", &[("c", 3)])), Answer::Refused(AdmitError::Reserve(_))));
}

#[test]
fn what_was_taken_over_and_is_dead_leaves() {
    let mut sim = node(&[]);
    make(&mut sim, "b", 1);
    let owners = vec![(owner("pod/a/c"), cpus("4-5")), (owner("pod/b/c"), cpus("6-7"))];
    tree(&mut sim, &["b"], &[("b", Some("c"), 1)]);
    let answer = sim.ask(|ticket| Event::Adopt { ticket, owners }).unwrap();
    assert!(matches!(answer, Answer::Pod(_)), "{answer:?}");
    assert_eq!((exclusive(&sim).as_str(), effective(&sim, &home("b", 1))), ("4-7", cpus("6-7")));
    tree(&mut sim, &["b"], &[("b", Some("c"), 1)]);
    assert_eq!(gone(&sim), ["pod/a/c 4-5 its pod is not active any more"]);
    settled(&mut sim);
}

#[test]
fn the_tree_says_nothing_of_pods_outside_the_kubelets_places() {
    let mut sim = node(&[]);
    let wish = Wish::new(owner("pod/x/c"), 2, Isolation::Auto).on(cpus("4-5"));
    assert!(matches!(sim.admit(&wish).unwrap(), Answer::Assigned(..)));
    tree(&mut sim, &[], &[]);
    sim.tick().unwrap();
    assert_eq!((exclusive(&sim).as_str(), gone(&sim).len()), ("4-5", 0));
}

#[test]
fn pods_that_come_together_cost_one_save() {
    let mut sim = node(&[]);
    let saves = sim.disk.saves();
    let pods: Vec<PodAdmission> = ["a", "b", "c", "d"]
        .iter()
        .zip(900..)
        .map(|(uid, ticket)| admission(ticket, &pod(uid, &[("c", 2)])))
        .collect();
    sim.happens(Event::AdmitPods(pods)).unwrap();
    let answers: Vec<&Answer> = (900..904).map(|t| sim.answer(t).unwrap()).collect();
    assert!(answers[..3].iter().all(|a| matches!(a, Answer::Pod(s) if s.len() == 1)), "{answers:?}");
    assert!(
        matches!(answers[3], Answer::Refused(AdmitError::Placement(_))),
        "6 CPUs are 3 pods: {answers:?}"
    );
    assert_eq!(sim.disk.saves() - saves, 1);
    settled(&mut sim);
}

#[test]
fn promised_cpus_leave_the_pool_in_member_mode() {
    let mut sim = node(&[]);
    let requests = pod("a", &[("c", 2)]).requests(AlignmentPolicy::BestEffort, Isolation::Member).unwrap();
    let ask = |ticket| Event::AdmitPods(vec![PodAdmission { ticket, uid: "a".into(), requests }]);
    assert!(matches!(sim.ask(ask).unwrap(), Answer::Pod(_)));
    settled(&mut sim);
    let set = sim.state.assignments.exclusive();
    assert_eq!(effective(&sim, &p("system.slice")), cpus("0-7").difference(&set));
    make(&mut sim, "a", 1);
    created(&mut sim, "a", "c", 1);
    settled(&mut sim);
    assert_eq!(effective(&sim, &home("a", 1)), set);
    let files = |sim: &Sim| sim.eyes.text(&p("system.slice"), CpusetFile::Cpus);
    assert_ne!(files(&sim), "");
    remove(&mut sim, "a");
    settled(&mut sim);
    assert_eq!(effective(&sim, &p("system.slice")), cpus("0-7"));
}
