//! The defects of kernels that hotplug brings out, always shown: in guests a kernel may be mended at any time, here
//! each is as it was seen. Every time truepin's own sweep must see it, what looks like a repair must be known not to be
//! one, and `member` followed by the state must repair it.
//!
//! | defect | where |
//! | --- | --- |
//! | all CPUs of a partition below the root went and came: those that return after the first are everybody's | 6.12 `isolated`, 7.3 both kinds |
//! | the same for a remote partition: it stays invalid | 6.12 `isolated`, 7.3 both kinds |
//! | the last CPU may not go (EBUSY), and the attempt has pushed the tasks out of a `root` partition | 6.12 |
//! | a task that is moved to the root cgroup may run everywhere | 6.1 |

use crate::{cpus, machine, p, read, write};
use truepin::{
    CpuId, CpuSet, CpuTopology, Owner,
    assignments::Mode,
    reconcile::{Answer, Home},
    request::Isolation,
    sweep::{self, SetFault, TaskMask, TaskSweep},
    topology::synthetic::{Numbering, Regular},
};
use truepin_tests::{
    fake::{Activity, Behaviour, Enforced, Errno, FakeKernel, INIT, TaskTraits, leaks, stale_masks},
    sim::{Setup, Sim, Wish},
};

const REPAIRS_NOTHING: [&str; 3] = ["cpuset.cpus", "cpuset.cpus.exclusive", "cpuset.cpus.partition"];

/// An owner of CPUs 5-7, with one task in it, as truepin makes it: a command's cgroup below `truepin.slice`, or somebody's top-level cgroup.
#[derive(Clone)]
struct Owned {
    sim: Sim,
    owner: Owner,
    /// Its cgroup.
    at: String,
    /// The task in it.
    task: u32,
    /// A task in the pool.
    other: u32,
}

const OWNED: &str = "5-7";

impl Owned {
    fn new(behaviour: Behaviour, top_level: bool, kind: &str, activity: Activity) -> Self {
        let regular = Regular {
            packages: 2,
            nodes: 1,
            l3: 1,
            cores: 2,
            threads: 2,
            numbering: Numbering::ThreadsAdjacent,
        };
        let topology = CpuTopology::assemble(&regular.raw()).unwrap();
        let mut kernel = machine(behaviour);
        kernel.mkdir(&p("user.slice")).unwrap();
        let other = kernel.spawn(&p("user.slice"), 1, TaskTraits::default()).unwrap();
        kernel.mkdir(&p("own.slice")).unwrap();
        let mut sim = Sim::new(Setup::plain(topology, cpus("0"), behaviour.exclusive_file), kernel);
        let name = if top_level { "cgroup/own.slice" } else { "run/db" };
        let owner: Owner = name.parse().unwrap();
        let mut wish = Wish::new(owner.clone(), 3, Isolation::Partition).on(cpus(OWNED));
        let traits = TaskTraits { activity, ..TaskTraits::default() };
        let from = if top_level { "own.slice" } else { "user.slice" };
        let task = sim.eyes.others(|k| k.spawn(&p(from), 1, traits)).unwrap();
        if top_level {
            wish.home = Home::Existing(p("own.slice"));
        } else {
            wish.pid = Some(task);
        }
        let answer = sim.admit(&wish).unwrap();
        assert!(matches!(answer, Answer::Assigned(..)), "{answer:?}");
        assert_eq!(sim.mode(&owner), Some(Mode::Partition));
        let at = sim.state.assignments.owners[&owner].cgroup.as_str().to_owned();
        let mut made = Self { sim, owner, at, task, other };
        // A person's choice; the sweep takes either kind.
        made.put("cpuset.cpus.partition", kind);
        assert_eq!(made.get("cpuset.cpus.partition"), kind);
        assert_eq!(made.faults(), [], "{behaviour:?} {kind}");
        made
    }

    fn put(&mut self, file: &str, text: &str) {
        let file = format!("{}/{file}", self.at);
        self.sim.eyes.others(|k| write(k, &file, text)).unwrap();
    }

    fn get(&self, file: &str) -> String {
        read(self.sim.eyes.kernel(), &format!("{}/{file}", self.at))
    }

    fn switch(&mut self, cpu: u32, online: bool) -> Result<(), Errno> {
        self.sim.eyes.others(|k| k.set_online(CpuId(cpu), online))
    }

    fn all_go_and_come(&mut self) {
        for cpu in [6, 5, 7] {
            self.switch(cpu, false).unwrap();
        }
        for cpu in [5, 7, 6] {
            self.switch(cpu, true).unwrap();
        }
    }

    /// What the sweep of sets and masks finds, with nothing done about it.
    fn faults(&mut self) -> Vec<SetFault> {
        let mut found = self.sim.set_faults();
        let kernel = self.sim.eyes.kernel();
        let task = |tid: u32| TaskMask {
            tid,
            comm: "task".into(),
            allowed: kernel.mask(tid).unwrap().clone(),
            last_cpu: CpuId(0),
            runnable: true,
        };
        let swept = TaskSweep {
            owned: vec![(self.owner.clone(), task(self.task))],
            outside: vec![task(INIT)],
            unread: Vec::new(),
        };
        let owners = self.sim.state.assignments.owners.iter();
        found.extend(sweep::masks(owners.map(|(o, a)| (o, &a.cpus, a.mode)), &swept));
        found.into_iter().map(|f| f.fault).collect()
    }

    /// What a person tries first, and a manager does all the time.
    fn repairs_that_do_nothing(&mut self) {
        for file in REPAIRS_NOTHING {
            let text = self.get(file);
            self.put(file, &text);
        }
        let (at, task) = (p(&self.at), self.task);
        self.sim.eyes.others(|k| k.enter(&at, task, true)).unwrap();
    }

    fn member_and_again(&mut self, kind: &str) {
        for word in ["member", kind] {
            self.put("cpuset.cpus.partition", word);
        }
        assert_eq!(self.get("cpuset.cpus.partition"), kind);
        assert_eq!(self.get("cpuset.cpus.effective"), OWNED);
        assert_eq!(self.faults(), []);
        let kernel = self.sim.eyes.kernel();
        assert_eq!(kernel.mask(self.task), Some(&cpus(OWNED)));
        assert!(kernel.mask(self.other).unwrap().is_disjoint(&cpus(OWNED)));
    }
}

type Make = fn() -> Behaviour;

/// Where all CPUs can go at all.
const ALL_GO: [(Make, &str); 4] = [
    (Behaviour::strict, "isolated"),
    (Behaviour::amended, "isolated"),
    (Behaviour::lax, "isolated"),
    (Behaviour::lax, "root"),
];

#[test]
fn cpus_that_all_went_come_back_to_everybody() {
    for (behaviour, kind) in ALL_GO {
        let mut owned = Owned::new(behaviour(), true, kind, Activity::Asleep);
        owned.all_go_and_come();
        // The files of the partition are perfect, and CPU 5, the first that came back, is its own.
        for file in ["cpuset.cpus.effective", "cpuset.cpus.exclusive", "cpuset.cpus.exclusive.effective"] {
            assert_eq!(owned.get(file), OWNED, "{kind} {file}");
        }
        assert_eq!(owned.get("cpuset.cpus.partition"), kind);
        let leaked = cpus("6-7");
        let reaches = |path: &str| SetFault::Overlap { with: p(path), cpus: leaked.clone() };
        let faults = owned.faults();
        for path in ["", "user.slice"] {
            assert!(faults.contains(&reaches(path)), "{:?} {kind}: {faults:?}", behaviour());
        }
        let outsider =
            |f: &SetFault| matches!(f, SetFault::Outsider { tid: INIT, cpus, .. } if *cpus == leaked);
        assert!(faults.iter().any(outsider), "{faults:?}");
        let intruder = owned.other;
        owned.sim.eyes.others(|k| k.setaffinity(intruder, &leaked)).unwrap();
        assert_eq!(owned.sim.eyes.kernel().mask(intruder), Some(&leaked), "the intruder is there");

        owned.repairs_that_do_nothing();
        assert_eq!(owned.faults(), faults, "{:?} {kind}", behaviour());
        owned.member_and_again(kind);
    }
}

#[test]
fn a_remote_partition_whose_cpus_all_went_stays_invalid() {
    for (behaviour, kind) in ALL_GO {
        let mut owned = Owned::new(behaviour(), false, kind, Activity::Asleep);
        owned.all_go_and_come();
        let state = format!("{kind} invalid (No cpu available due to hotplug)");
        assert_eq!(owned.get("cpuset.cpus.partition"), state, "{:?}", behaviour());
        assert_eq!(owned.get("cpuset.cpus.effective"), OWNED);
        let faults = owned.faults();
        let lost = |f: &SetFault| matches!(f, SetFault::PartitionLost { state: s, .. } if *s == state);
        assert!(faults.iter().any(lost), "{faults:?}");
        let everybody = SetFault::Overlap { with: p(""), cpus: cpus(OWNED) };
        assert!(faults.contains(&everybody), "{faults:?}");
        owned.member_and_again(kind);
    }
}

#[test]
fn the_refused_offline_leaves_a_task_outside_and_every_file_perfect() {
    for (behaviour, top_level) in [
        (Behaviour::strict(), true),
        (Behaviour::strict(), false),
        (Behaviour::amended(), true),
        (Behaviour::amended(), false),
    ] {
        let mut owned = Owned::new(behaviour, top_level, "root", Activity::Runs);
        owned.switch(5, false).unwrap();
        owned.switch(6, false).unwrap();
        assert_eq!(owned.faults(), []);
        assert_eq!(owned.switch(7, false), Err(Errno::EBUSY), "{behaviour:?}");
        assert_eq!(owned.get("cpuset.cpus.partition"), "root");
        assert_eq!(owned.get("cpuset.cpus.effective"), "7");
        assert_eq!(owned.sim.set_faults(), [], "no file tells");
        let faults = owned.faults();
        let outside = |f: &SetFault| matches!(f, SetFault::Mask { allowed, .. } if *allowed == cpus("0-7"));
        assert!(faults.len() == 1 && outside(&faults[0]), "{faults:?}");
        owned.repairs_that_do_nothing();
        assert_eq!(owned.faults(), faults, "{behaviour:?}");

        // Each of these repairs it; another CPU that comes back does as well.
        let mut back = owned.clone();
        back.switch(6, true).unwrap();
        assert_eq!(back.faults(), []);
        let (task, seven) = (owned.task, cpus("7"));
        let mut pinned = owned.clone();
        pinned.sim.eyes.others(|k| k.setaffinity(task, &seven)).unwrap();
        assert_eq!(pinned.faults(), []);
        for word in ["member", "root"] {
            owned.put("cpuset.cpus.partition", word);
        }
        assert_eq!(owned.faults(), []);
        for cpu in [5, 6] {
            owned.switch(cpu, true).unwrap();
        }
        assert_eq!(owned.faults(), []);
    }
}

/// `a` is a partition of this kind on 5-7, with a task that runs, and `b` a sibling with one.
fn local(behaviour: Behaviour, kind: &str) -> (FakeKernel, u32) {
    let mut k = machine(behaviour);
    for path in ["a", "b"] {
        k.mkdir(&p(path)).unwrap();
    }
    write(&mut k, "a/cpuset.cpus", OWNED).unwrap();
    write(&mut k, "a/cpuset.cpus.partition", kind).unwrap();
    let runs = TaskTraits { activity: Activity::Runs, ..TaskTraits::default() };
    let task = k.spawn(&p("a"), 1, runs).unwrap();
    k.spawn(&p("b"), 1, TaskTraits::default()).unwrap();
    (k, task)
}

#[test]
fn linux_6_1_has_neither_defect() {
    for kind in ["root", "isolated"] {
        let (mut k, task) = local(Behaviour::local_only(), kind);
        for cpu in [5, 6, 7] {
            k.set_online(CpuId(cpu), false).unwrap();
        }
        let state = format!("{kind} invalid (No cpu available due to hotplug)");
        assert_eq!(read(&k, "a/cpuset.cpus.partition"), state);
        for cpu in [6, 7, 5] {
            k.set_online(CpuId(cpu), true).unwrap();
        }
        assert_eq!(read(&k, "a/cpuset.cpus.partition"), kind, "it comes back by itself");
        assert_eq!(read(&k, "cpuset.cpus.effective"), "0-4");
        assert_eq!(k.mask(task), Some(&cpus(OWNED)));
        let owners = [(p("a"), Enforced::Partition)];
        assert_eq!(leaks(&k, &owners), [""; 0]);
        assert!(stale_masks(&k).is_empty());
    }
}

#[test]
fn linux_6_1_lets_a_task_that_moves_to_the_root_run_everywhere() {
    let (mut k, task) = local(Behaviour::local_only(), "root");
    k.enter(&p(""), task, true).unwrap();
    let everywhere: CpuSet = cpus("0-7");
    assert_eq!(k.mask(task), Some(&everywhere), "the partition's CPUs included");
    let owners = [(p("a"), Enforced::Partition)];
    assert!(
        leaks(&k, &owners).iter().any(|l| l.contains(&format!("task {task} "))),
        "{:?}",
        leaks(&k, &owners)
    );
    // Any change of the root's own set puts it right.
    for word in ["member", "root"] {
        write(&mut k, "a/cpuset.cpus.partition", word).unwrap();
    }
    assert_eq!(k.mask(task), Some(&cpus("0-4")));
    assert_eq!(leaks(&k, &owners), [""; 0]);
}

#[test]
fn linux_6_1_does_not_try_an_invalid_partition_again() {
    let (mut k, _) = local(Behaviour::local_only(), "root");
    write(&mut k, "b/cpuset.cpus", "4-5").unwrap();
    let broken = "root invalid (Cpu list in cpuset.cpus not exclusive)";
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), broken);
    write(&mut k, "b/cpuset.cpus", "4").unwrap();
    write(&mut k, "a/cpuset.cpus.partition", "root").unwrap();
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), broken, "the word alone is no attempt");
    for word in ["member", "root"] {
        write(&mut k, "a/cpuset.cpus.partition", word).unwrap();
    }
    assert_eq!(read(&k, "a/cpuset.cpus.partition"), "root");
}
