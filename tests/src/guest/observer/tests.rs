use super::{
    Cpus, Kept, Promise, Seen, When,
    seen::{Files, Thread},
};

fn set(text: &str) -> Cpus {
    text.parse().unwrap()
}

fn files(listed: &str, effective: &str, partition: &str) -> Files {
    let (listed, effective) = (set(listed), set(effective));
    Files { listed, effective, partition: partition.into(), populated: true }
}

fn thread(tid: i32, cgroup: &str, allowed: &str) -> Thread {
    let allowed = set(allowed);
    Thread { tid, comm: "t".into(), cgroup: cgroup.into(), allowed, kernel: false, bound: false }
}

/// A partition `s/p` on 4-5, a member `s/m` on 6, the rest shared, CPU 0 reserved.
fn machine() -> (Seen, Vec<Promise>) {
    let seen = Seen {
        online: set("0-7"),
        bare: [].into(),
        exclusive_file: true,
        cgroups: [
            ("", files("", "0-3,6-7", "")),
            ("s", files("", "0-3,6-7", "member")),
            ("s/p", files("4-5", "4-5", "root")),
            ("s/m", files("6", "6", "member")),
            ("pool", files("0-3,7", "0-3,7", "member")),
        ]
        .map(|(p, f)| (p.to_owned(), f))
        .into(),
        threads: vec![thread(1, "", "0-3,6-7"), thread(2, "s/p", "5"), thread(3, "s/m", "6")],
    };
    let promise = |name: &str, cgroup: &str, cpus: &str, kept| Promise {
        owner: name.into(),
        cgroup: cgroup.into(),
        cpus: set(cpus),
        kept,
    };
    (seen, vec![promise("p", "s/p", "4-5", Kept::Partition), promise("m", "s/m", "6", Kept::Member)])
}

fn broken(seen: &Seen, promises: &[Promise], when: When) -> String {
    seen.breaches(promises, &set("0"), when).into_iter().collect::<Vec<_>>().join("; ")
}

#[test]
fn a_machine_in_order() {
    let (seen, promises) = machine();
    for when in [When::Anytime, When::Settled] {
        assert_eq!(broken(&seen, &promises, when), "");
    }
}

#[test]
fn each_breach_is_found() {
    type Damage = fn(&mut Seen, &mut Vec<Promise>);
    let cases: [(&str, Damage, When); 14] = [
        ("both were promised 5", |_, p| p[1].cpus = "5-6".parse().unwrap(), When::Anytime),
        (
            "I1: m and p both have 5",
            |s, _| {
                *s.cgroups.get_mut("s/m").unwrap() = files("5-6", "5-6", "member");
            },
            When::Anytime,
        ),
        ("I2: /pool", |s, _| s.cgroups.get_mut("pool").unwrap().effective = Cpus::default(), When::Anytime),
        (
            "I3: nothing",
            |s, _| s.cgroups.get_mut("").unwrap().effective = "6".parse().unwrap(),
            When::Anytime,
        ),
        (
            "I3: the reserved 0",
            |s, _| {
                s.cgroups.get_mut("").unwrap().effective = "1-3".parse().unwrap();
            },
            When::Anytime,
        ),
        ("I4: thread 1", |s, _| s.threads[0].allowed = "9".parse().unwrap(), When::Anytime),
        (
            "reads \"root invalid\"",
            |s, _| {
                s.cgroups.get_mut("s/p").unwrap().partition = "root invalid".into();
            },
            When::Settled,
        ),
        (
            "p has 4, promised",
            |s, _| s.cgroups.get_mut("s/p").unwrap().effective = "4".parse().unwrap(),
            When::Settled,
        ),
        // The controller is gone from its parent: nothing there says anything any more.
        (
            "I1: the cgroup of p has no cpuset files",
            |s, _| {
                s.cgroups.remove("s/p");
                s.bare.insert("s/p".into());
            },
            When::Settled,
        ),
        ("I3: nothing of the root's  is left", |s, _| drop(s.cgroups.remove("")), When::Anytime),
        // Nobody is without a CPU, so nobody excuses it.
        (
            "I1: the partition of p reads \"member\"",
            |s, p| {
                p[0].cgroup = "truepin.slice/p".into();
                s.exclusive_file = false;
                s.cgroups.insert("truepin.slice/p".into(), files("4-5", "4-5", "member"));
            },
            When::Settled,
        ),
        // The leak after hotplug: every file of the partition is perfect.
        (
            "I1: / may use 5 of p",
            |s, _| {
                s.cgroups.get_mut("").unwrap().effective = "0-3,5-7".parse().unwrap();
            },
            When::Settled,
        ),
        ("I4: thread 2 (t) of p", |s, _| s.threads[1].allowed = "0-7".parse().unwrap(), When::Settled),
        (
            "thread 1 (t) in / is allowed on 5 of p",
            |s, _| {
                s.threads[0].allowed = "0-3,5".parse().unwrap();
            },
            When::Settled,
        ),
    ];
    for (want, damage, when) in cases {
        let (mut seen, mut promises) = machine();
        damage(&mut seen, &mut promises);
        let found = broken(&seen, &promises, when);
        assert!(found.contains(want), "{want}: {found}");
    }
}

#[test]
fn what_is_allowed() {
    let (mut seen, promises) = machine();
    // Offline CPUs of a promise, bound and unbound kernel threads, a member's ancestors, a partition below.
    seen.online = set("0-4,6-7");
    *seen.cgroups.get_mut("s/p").unwrap() = files("4-5", "", "root");
    seen.cgroups.insert("s/p/inner".into(), files("4", "4", "root"));
    seen.threads[1] = thread(2, "s/p/inner", "4-5");
    seen.threads.push(Thread { bound: true, kernel: true, ..thread(9, "", "5") });
    seen.threads.push(Thread { kernel: true, ..thread(10, "", "0-7") });
    assert_eq!(broken(&seen, &promises, When::Settled), "");
    // All handed down: who has processes has CPUs.
    *seen.cgroups.get_mut("s").unwrap() = files("4-6", "", "root");
    *seen.cgroups.get_mut("s/m").unwrap() = files("6", "6", "root");
    assert_eq!(broken(&seen, &promises, When::Settled), "");
    seen.cgroups.insert("s/left".into(), files("6", "6", "member"));
    assert!(broken(&seen, &promises, When::Anytime).contains("I2: /s is populated"));
    seen.cgroups.remove("s/left");
    // Its cgroup is not there yet.
    seen.cgroups.remove("s/m");
    seen.threads.retain(|t| t.cgroup != "s/m");
    assert_eq!(broken(&seen, &promises, When::Settled), "");
}

/// Partitions below one that is a partition itself, `m` without a CPU that is online: the others may all be members, and
/// are then judged as such.
#[test]
fn members_for_the_time_being() {
    let (mut seen, mut promises) = machine();
    seen.online = set("0-5,7");
    seen.exclusive_file = false;
    for p in &mut promises {
        p.cgroup = p.cgroup.replace("s/", "truepin.slice/");
        p.kept = Kept::Partition;
    }
    seen.cgroups = [
        ("", files("", "0-5,7", "")),
        ("pool", files("0-3,7", "0-3,7", "member")),
        ("truepin.slice", files("", "0-5,7", "member")),
        ("truepin.slice/p", files("4-5", "4-5", "member")),
        ("truepin.slice/m", files("0-3,7", "0-3,7", "member")),
    ]
    .map(|(p, f)| (p.to_owned(), f))
    .into();
    seen.threads =
        vec![thread(1, "", "0-5,7"), thread(2, "truepin.slice/p", "5"), thread(3, "truepin.slice/m", "0-3")];
    assert_eq!(broken(&seen, &promises, When::Settled), "");
    let with = |damage: fn(&mut Seen)| {
        let mut seen = seen.clone();
        damage(&mut seen);
        broken(&seen, &promises, When::Settled)
    };
    let leak = with(|s| s.cgroups.get_mut("pool").unwrap().effective = set("0-4,7"));
    assert_eq!(leak, "I1: /pool may use 4 of p");
    // Nobody needs it: nothing runs there.
    let empty = with(|s| s.cgroups.get_mut("truepin.slice/m").unwrap().populated = false);
    assert!(empty.contains("the partition of p reads \"member\""), "{empty}");
    // A kernel on which the owner without a CPU runs beside them.
    let remote = with(|s| s.exclusive_file = true);
    assert!(remote.contains("the partition of p reads \"member\""), "{remote}");
    let invalid = with(|s| s.cgroups.get_mut("truepin.slice/p").unwrap().partition = "root invalid".into());
    assert!(invalid.contains("the partition of p reads \"root invalid\""), "{invalid}");
}
