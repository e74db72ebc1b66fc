//! Pods with resources of their own.

use super::*;

#[test]
fn a_pod_with_cpus_of_its_own_without_the_gate() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for scope in [Scope::Container, Scope::Pod] {
        let mut node = boot(&machine, &distances, under(AlignmentPolicy::SingleNumaNode, scope));
        let admission = node.admit(pod("a", "/12 4 i:2 -"));
        assert_eq!((reason(&admission), noted(&admission).as_str()), ("admitted", "i0=any+ c0=any+ c1=any+"));
        assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")));
    }
}

fn gate(policy: AlignmentPolicy, scope: Scope) -> Config {
    Config { pod_level: true, ..under(policy, scope) }
}

#[test]
fn a_pods_own_set_is_divided_among_its_containers() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let mut node = boot(&machine, &distances, gate(AlignmentPolicy::Restricted, Scope::Pod));
    let admission = node.admit(pod("a", "/8 i:- i:6 s:2 i:~1 2 ~1 -"));
    assert_eq!(reason(&admission), "admitted");
    assert_eq!(noted(&admission), "i0=1+ i1=1+ i2=1+ i3=1+ c0=1+ c1=1+ c2=1+");
    // Init containers have all that sidecars before them leave; who shares has what those that last leave.
    assert_eq!(
        held(&node),
        "a/c0=5,13 a/c1=6-7,14-15 a/c2=6-7,14-15 a/i0=4-7,12-15 a/i1=4-6,12-14 a/i2=4,12 a/i3=5-7,13-15 \
         a=4-7,12-15"
    );
    assert!(node.checkpoint().contains(r#""podEntries":{"a":{"cpuSet":"4-7,12-15"}}"#));
    node.remove("a").unwrap();
    node.reconcile();
    assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")));
}

#[test]
fn a_pods_own_set_that_leaves_nothing_to_share_is_refused() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for (policy, words, expected) in [
        (AlignmentPolicy::BestEffort, "/4 4 -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 s:4 i:- -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 s:2 i:3 -", "EmptyPodSharedPoolError"),
        (AlignmentPolicy::BestEffort, "/4 2 2", "admitted"),
        (AlignmentPolicy::BestEffort, "/4 3 -", "admitted"),
        (AlignmentPolicy::Restricted, "/4 4 -", "TopologyAffinityError"),
        (AlignmentPolicy::SingleNumaNode, "/4 4 s:-", "TopologyAffinityError"),
    ] {
        let mut node = boot(&machine, &distances, gate(policy, Scope::Pod));
        let admission = node.admit(pod("a", words));
        assert_eq!(reason(&admission), expected, "{policy:?} {words}");
        if expected != "admitted" {
            assert_eq!((held(&node).as_str(), &node.sets().default), ("", &cpus("0-15")), "{words}");
        }
    }
}

#[test]
fn containers_that_want_more_than_their_pod_leave_its_set_behind() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let best = gate(AlignmentPolicy::BestEffort, Scope::Pod);
    let mut node = boot(&machine, &distances, best.clone());
    let admission = node.admit(pod("a", "/4 3 3"));
    assert_eq!(admission.outcome, Err(Rejection::Take(TakeError::NotEnough { requested: 3, available: 1 })));
    // No container, so no pass ever finds it.
    node.reconcile();
    assert_eq!(held(&node), "a=1-2,9-10");
    node.restart(best).unwrap();
    node.reconcile();
    assert_eq!((held(&node).as_str(), node.sets().default.len()), ("a=1-2,9-10", 12));
}

#[test]
fn a_readmitted_pod_gets_another_set_and_nobody_the_first() {
    let (machine, distances) = (machine(2, 4, 1), far());
    let best = gate(AlignmentPolicy::BestEffort, Scope::Pod);
    let mut node = boot(&machine, &distances, best.clone());
    let_in(&mut node, "a", "/4 2 -");
    assert_eq!(held(&node), "a/c0=1,9 a/c1=2,10 a=1-2,9-10");
    node.restart(best.clone()).unwrap();
    assert_eq!(noted(&node.readmit("a").unwrap()), "c0=0-1- c1=0-1-", "what shares has not what it asks for");
    assert_eq!(held(&node), "a/c0=3,11 a/c1=4,12 a=3-4,11-12");
    node.remove("a").unwrap();
    node.reconcile();
    assert_eq!(node.sets().default, cpus("0,3-8,11-15"));
    let lost = node.restart(best);
    assert!(matches!(lost, Err(BootError::Start(StartError::Machine { .. }))), "{lost:?}");
}

#[test]
fn by_container_a_pods_own_resources_only_say_who_gets_cpus() {
    let (machine, distances) = (machine(2, 4, 1), far());
    for policy in [AlignmentPolicy::None, AlignmentPolicy::Restricted] {
        let mut node = boot(&machine, &distances, gate(policy, Scope::Container));
        let_in(&mut node, "a", "/8 i:4 2 ~2 -");
        assert_eq!(held(&node), "a/c0=1,9 a/i0=1-2,9-10", "{policy:?}");
        assert!(node.sets().pods.is_empty());
    }
    // Under `none` there is no scope.
    let mut node = boot(&machine, &distances, gate(AlignmentPolicy::None, Scope::Pod));
    let_in(&mut node, "a", "/8 4 -");
    assert_eq!(held(&node), "a/c0=1-2,9-10");
}
