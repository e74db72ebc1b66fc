//! Random machines and random histories, equal for equal seeds.

use super::{Crashed, Foreign, Setup, Sim, Wish};
use crate::fake::{Behaviour, FakeKernel, INIT, TaskTraits};
use std::collections::BTreeSet;
use truepin::{
    CgroupPath, CpuSet, CpuTopology, CpusetFile, NodeSet, Owner,
    placement::{Scope, Strategy, kubelet::StaticOptions},
    reconcile::{Event, Home, PodAdmission},
    request::{AlignmentPolicy, Isolation, Request},
    topology::synthetic::{Numbering, Regular},
};

/// `SplitMix64`: small, and the same everywhere.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of 0 to `n - 1`; 0 for `n` = 0.
    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.draw() % (n.max(1) as u64)).unwrap_or(0)
    }

    /// True in `percent` of all cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }

    /// A part of `from`: mostly a run, sometimes with holes; never empty unless `from` is.
    pub fn part(&mut self, from: &CpuSet) -> CpuSet {
        let all: Vec<_> = from.iter().collect();
        let first = self.below(all.len());
        let count = 1 + self.below(all.len() - first.min(all.len()));
        let holes = self.chance(30);
        let run = all.iter().skip(first).take(count.min(6));
        let set: CpuSet = run.copied().filter(|_| !holes || self.chance(60)).collect();
        if set.is_empty() { all.get(first).copied().into_iter().collect() } else { set }
    }
}

/// Cgroups of a host: with whom they share what, and that only leaves have processes.
const TREE: [&str; 13] = [
    "init.scope",
    "system.slice",
    "system.slice/a.service",
    "system.slice/b.service",
    "user.slice",
    "kube.slice",
    "kube.slice/pod1",
    "kube.slice/pod1/c1",
    "kube.slice/pod1/c2",
    "kube.slice/pod2",
    "kube.slice/pod2/c1",
    "machine.slice",
    "machine.slice/vm.scope",
];

/// A machine and what lives on it.
#[must_use]
pub fn world(rng: &mut Rng) -> (Setup, FakeKernel) {
    let cores = [2, 3, 4][rng.below(3)];
    let numbering = if rng.chance(50) { Numbering::ThreadsLast } else { Numbering::ThreadsAdjacent };
    let behaviour = match rng.below(10) {
        0..=1 => Behaviour::strict(),
        2..=3 => Behaviour::amended(),
        4..=6 => Behaviour::lax(),
        _ => Behaviour::local_only(),
    };
    world_of(rng, cores, numbering, |online, nodes| FakeKernel::new(behaviour, online, nodes))
}

/// A machine of two packages with so many cores each, on the kernel that `boot` makes of its CPUs and nodes.
pub(super) fn world_of(
    rng: &mut Rng,
    cores: u32,
    numbering: Numbering,
    boot: impl FnOnce(CpuSet, NodeSet) -> FakeKernel,
) -> (Setup, FakeKernel) {
    let raw = Regular { packages: 2, nodes: 1, l3: 1, cores, threads: 2, numbering }.raw();
    let online = raw.listed.clone();
    let nodes: NodeSet = raw.nodes.iter().map(|n| n.id).collect();
    let mut kernel = boot(online.clone(), nodes);
    let exclusive_file = kernel.behaviour().exclusive_file;
    populate(rng, &mut kernel, &online);
    let reserved: CpuSet = online.iter().take([0, 1, 2][rng.below(3)]).collect();
    let topology = CpuTopology::assemble(&raw).unwrap_or_else(|e| unreachable!("a regular machine: {e}"));
    let mut setup = Setup::plain(topology, reserved, exclusive_file);
    setup.strict_reserved = rng.chance(25);
    if rng.chance(30) {
        let options = ["full-pcpus-only", "align-by-socket"].into_iter().filter(|_| rng.chance(20));
        let options = StaticOptions::parse(options).unwrap_or_default();
        setup.settings.strategy = Strategy::Kubelet { options, closest: false };
    }
    setup.settings.scope = if rng.chance(50) { Scope::Pod } else { Scope::Container };
    setup.settings.isolation = [Isolation::Auto, Isolation::Auto, Isolation::Member][rng.below(3)];
    (setup, kernel)
}

/// What is refused here is not there: nothing depends on any of it.
fn populate(rng: &mut Rng, kernel: &mut FakeKernel, online: &CpuSet) {
    let paths: Vec<CgroupPath> = TREE.iter().filter_map(|t| t.parse().ok()).collect();
    if rng.chance(75) {
        let _ = kernel.write_file(&CgroupPath::root(), "cgroup.subtree_control", "+cpuset");
    }
    for path in &paths {
        if rng.chance(20) || kernel.mkdir(path).is_err() {
            continue;
        }
        let inner = paths.iter().any(|p| p.parent().as_ref() == Some(path));
        if inner && rng.chance(55) {
            let _ = kernel.write_file(path, "cgroup.subtree_control", "+cpuset");
        }
        if rng.chance(40) {
            let set = rng.part(online);
            let _ = kernel.write_file(path, "cpuset.cpus", &format!("{set}\n"));
        }
    }
    let leaves: Vec<CgroupPath> = kernel
        .cgroups()
        .filter(|p| !p.is_root() && !kernel.cgroups().any(|c| c.parent().as_ref() == Some(p)))
        .cloned()
        .collect();
    for path in leaves {
        for _ in 0..[0, 1, 1, 2][rng.below(4)] {
            let threads = if rng.chance(20) { 3 } else { 1 };
            if let Ok(pid) = kernel.spawn(&path, threads, TaskTraits::default())
                && rng.chance(25)
            {
                let _ = kernel.setaffinity(pid, &rng.part(online));
            }
        }
    }
    if rng.chance(8) {
        foreign_partition(rng, kernel, online);
    }
}

/// Another manager's partition at the top.
fn foreign_partition(rng: &mut Rng, kernel: &mut FakeKernel, online: &CpuSet) {
    let Ok(path) = "other.slice".parse() else { return };
    if kernel.mkdir(&path).is_ok() {
        // Not those that `world` may reserve: it cannot keep what is gone before it starts.
        let set = format!("{}\n", rng.part(&online.iter().skip(2).collect()));
        for (file, text) in [("cpuset.cpus", set.as_str()), ("cpuset.cpus.partition", "root\n")] {
            let _ = kernel.write_file(&path, file, text);
        }
    }
}

/// One thing that happens.
#[derive(Debug, Clone)]
pub enum Op {
    /// A process is made in a cgroup and admitted into a new one.
    Run {
        /// What is asked for; the process is added.
        wish: Box<Wish>,
        /// Where it is before.
        from: CgroupPath,
    },
    /// An admission of what exists.
    Admit(Box<Wish>),
    /// A release.
    Release(Option<Owner>),
    /// Everything in a cgroup ends.
    End(CgroupPath),
    /// Everything in a cgroup ends and the cgroup goes.
    Vanish(CgroupPath),
    /// Somebody makes a cgroup with a process.
    Appear(CgroupPath),
    /// Somebody writes.
    Hostile(Vec<Foreign>),
    /// Somebody writes while truepin does.
    Ambush {
        /// Before which change.
        nth: u64,
        /// What.
        write: Foreign,
        /// What truepin does meanwhile.
        during: Box<Op>,
    },
    /// Pods are admitted together: uid, and the CPUs of each container.
    Pods(Vec<(String, Vec<u32>)>),
    /// A runtime tells of a pod's container in this cgroup.
    Made {
        /// The container.
        owner: Owner,
        /// Its cgroup.
        path: CgroupPath,
    },
    /// A pod is removed.
    RemovePod(String),
    /// The cgroup tree is read: these pods are in it.
    Tree(BTreeSet<String>),
    /// Everything is looked at.
    Inspect,
}

impl Op {
    /// Whether the event takes CPUs from `owner`, who has them in `home`.
    #[must_use]
    pub fn releases(&self, owner: &Owner, home: Option<&CgroupPath>) -> bool {
        let uid = match owner {
            Owner::Pod { uid, .. } => Some(uid),
            _ => None,
        };
        match self {
            Self::Release(who) => who.as_ref().is_none_or(|o| o == owner),
            // A pod's containers may come again.
            Self::End(path) | Self::Vanish(path) => home.is_some_and(|h| h.is_within(path)),
            Self::RemovePod(gone) => uid == Some(gone),
            Self::Tree(pods) => uid.is_some_and(|uid| !pods.contains(uid)),
            Self::Ambush { during, .. } => during.releases(owner, home),
            _ => false,
        }
    }

    /// Whether somebody else interferes.
    #[must_use]
    pub fn is_hostile(&self) -> bool {
        matches!(self, Self::Hostile(_) | Self::Ambush { .. })
    }

    /// Lets it happen, and everything that follows.
    pub fn happen(&self, sim: &mut Sim) -> Result<(), Crashed> {
        sim.eyes.note(|| format!("{self:?}"));
        match self {
            Self::Run { wish, from } => {
                let pid = sim.eyes.others(|k| k.spawn(from, 1, TaskTraits::default()));
                let mut wish = (**wish).clone();
                // Where it cannot live it is nobody's process.
                wish.pid = Some(pid.unwrap_or(INIT + 1_000_000));
                sim.admit(&wish).map(drop)
            }
            Self::Admit(wish) => sim.admit(wish).map(drop),
            Self::Release(owner) => sim.release(owner.as_ref()).map(drop),
            Self::End(path) => {
                end(sim, path);
                sim.tick()
            }
            Self::Vanish(path) => {
                end(sim, path);
                // What has children stays.
                let _ = sim.eyes.others(|k| k.rmdir(path));
                sim.tick()
            }
            Self::Appear(path) => {
                let _ =
                    sim.eyes.others(|k| k.mkdir(path).and_then(|()| k.spawn(path, 1, TaskTraits::default())));
                sim.tick()
            }
            Self::Hostile(writes) => {
                for write in writes {
                    let _ = sim.eyes.foreign(write);
                }
                sim.tick()
            }
            Self::Ambush { nth, write, during } => {
                sim.eyes.ambush(*nth, write.clone());
                during.happen(sim)?;
                sim.eyes.stand_down();
                // Its notification comes when the agent listens again.
                sim.tick()
            }
            Self::Pods(pods) => {
                let mut admissions = Vec::new();
                for (uid, containers) in pods {
                    let request = |(n, cpus): (usize, &u32)| Request {
                        owner: Owner::Pod { uid: uid.clone(), container: format!("c{n}") },
                        cpus: *cpus,
                        numa: AlignmentPolicy::BestEffort,
                        whole_cores: false,
                        near: NodeSet::new(),
                        isolation: Isolation::Auto,
                        memory: 0,
                    };
                    let requests = containers.iter().enumerate().map(request).collect();
                    admissions.push(PodAdmission { ticket: sim.ticket(), uid: uid.clone(), requests });
                }
                sim.happens(Event::AdmitPods(admissions))
            }
            Self::Made { owner, path } => {
                let home = sim.eyes.kernel().id(path).map(|id| (path.clone(), id));
                let name = format!("{owner}:{path}").replace('/', "-");
                let Ok(id) = name.parse() else { return Ok(()) };
                sim.ask(|ticket| Event::Container { ticket, id, owner: owner.clone(), home }).map(drop)
            }
            Self::RemovePod(uid) => sim.ask(|ticket| Event::RemovePod { ticket, uid: uid.clone() }).map(drop),
            Self::Tree(pods) => sim.happens(Event::Tree { pods: pods.clone(), containers: Vec::new() }),
            Self::Inspect => sim.ask(|ticket| Event::Inspect { ticket }).map(drop),
        }
    }
}

fn end(sim: &mut Sim, path: &CgroupPath) {
    sim.eyes.others(|k| {
        let inside: Vec<u32> =
            k.threads().filter(|t| k.cgroup_of(*t).is_some_and(|c| c.is_within(path))).collect();
        for tid in inside {
            // A thread of a process that has just ended.
            let _ = k.exit(tid);
        }
    });
}

/// The next thing to happen in `sim`.
pub fn next_op(rng: &mut Rng, sim: &Sim) -> Op {
    let owners: Vec<Owner> = sim.state.assignments.owners.keys().cloned().collect();
    let roll = rng.below(100);
    let op = match roll {
        0..=13 => pods(rng, sim),
        28..=51 => existing(rng, sim),
        52..=69 if !owners.is_empty() => Op::Release(rng.pick(&owners).cloned()),
        70..=73 => Op::Release(None),
        74..=78 if !owners.is_empty() => {
            let path = home_of_one(rng, sim);
            if rng.chance(50) { Op::End(path) } else { Op::Vanish(path) }
        }
        79..=82 => Op::Appear(format!("new{}.scope", rng.below(3)).parse().unwrap_or_default()),
        83..=95 => hostile(rng, sim),
        96..=97 => Op::Inspect,
        // 14..=27 and the rest.
        _ => run(rng, sim),
    };
    if !op.is_hostile() && rng.chance(10) && !sim.state.assignments.owners.is_empty() {
        let Op::Hostile(writes) = hostile(rng, sim) else { return op };
        if let Some(write) = writes.into_iter().find(|w| !helpless(sim, w)) {
            return Op::Ambush { nth: rng.below(8) as u64, write, during: Box::new(op) };
        }
    }
    op
}

/// Whoever empties the slice's list in the instant before a partition below it ends makes the kernel lose CPUs for good
/// (6.12, 7.3), and nobody can help that.
fn helpless(sim: &Sim, write: &Foreign) -> bool {
    write.file == "cpuset.cpus.exclusive" && sim.state.assignments.owner_of(&write.path).is_none()
}

/// Something about pods: what an orchestrator says, what a runtime says, what the tree shows.
fn pods(rng: &mut Rng, sim: &Sim) -> Op {
    let uid = |rng: &mut Rng| format!("p{}", rng.below(4));
    match rng.below(10) {
        0..=4 => {
            let one = |rng: &mut Rng| (uid(rng), (0..=rng.below(2)).map(|_| [1, 2][rng.below(2)]).collect());
            Op::Pods((0..=rng.below(2)).map(|_| one(rng)).collect())
        }
        5..=7 => {
            let all = cgroups(sim);
            let leaf = |p: &&CgroupPath| !all.iter().any(|c| c.parent().as_ref() == Some(*p));
            let homes: Vec<CgroupPath> = all.iter().filter(leaf).cloned().collect();
            let owner = Owner::Pod { uid: uid(rng), container: format!("c{}", rng.below(2)) };
            Op::Made { owner, path: rng.pick(&homes).cloned().unwrap_or_default() }
        }
        8 => Op::RemovePod(uid(rng)),
        _ => Op::Tree((0..4).filter(|_| rng.chance(60)).map(|n| format!("p{n}")).collect()),
    }
}

fn isolation(rng: &mut Rng) -> Isolation {
    let four = [Isolation::Auto, Isolation::Auto, Isolation::Partition, Isolation::Member];
    if rng.chance(15) { Isolation::Isolated } else { four[rng.below(4)] }
}

fn count(rng: &mut Rng) -> u32 {
    [1, 1, 2, 2, 3, 4][rng.below(6)]
}

fn exactly(rng: &mut Rng, sim: &Sim, mut wish: Wish) -> Wish {
    // Two nodes of 8 GiB.
    wish.request.memory = [0, 0, 0, 1, 5, 9][rng.below(6)] << 30;
    let free = sim.state.assignments.free(&sim.state.online);
    if rng.chance(50) || free.is_empty() {
        return wish;
    }
    let set: CpuSet = rng.part(&free).iter().take(4).collect();
    wish = wish.on(set.clone());
    wish.request.cpus = u32::try_from(set.len()).unwrap_or(1);
    wish
}

fn cgroups(sim: &Sim) -> Vec<CgroupPath> {
    let slice = &sim.setup.settings.slice;
    sim.eyes.kernel().cgroups().filter(|p| !p.is_root() && !p.is_within(slice)).cloned().collect()
}

fn run(rng: &mut Rng, sim: &Sim) -> Op {
    let owner = Owner::Run(format!("r{}", rng.below(6)));
    let cpus = count(rng);
    let isolation = isolation(rng);
    let wish = exactly(rng, sim, Wish::new(owner, cpus, isolation));
    // Processes in inner cgroups make the ones below threaded, which has tests of its own.
    let all = cgroups(sim);
    let leaf = |p: &&CgroupPath| !all.iter().any(|c| c.parent().as_ref() == Some(*p));
    let mut homes: Vec<CgroupPath> = all.iter().filter(leaf).cloned().collect();
    homes.push(CgroupPath::root());
    let from = rng.pick(&homes).cloned().unwrap_or_default();
    Op::Run { wish: Box::new(wish), from }
}

fn existing(rng: &mut Rng, sim: &Sim) -> Op {
    let Some(path) = rng.pick(&cgroups(sim)).cloned() else { return Op::Inspect };
    let owner = match rng.below(4) {
        0 => Owner::Unit(format!("{}.service", path.name())),
        1 => Owner::Pod { uid: "u".into(), container: path.name().into() },
        _ => Owner::Cgroup(path.clone()),
    };
    let cpus = count(rng);
    let isolation = isolation(rng);
    let mut wish = exactly(rng, sim, Wish::new(owner, cpus, isolation));
    wish.home = Home::Existing(path);
    Op::Admit(Box::new(wish))
}

fn home_of_one(rng: &mut Rng, sim: &Sim) -> CgroupPath {
    let homes: Vec<CgroupPath> = sim.state.assignments.owners.values().map(|a| a.cgroup.clone()).collect();
    rng.pick(&homes).cloned().unwrap_or_default()
}

/// One or two writes into files that concern truepin.
fn hostile(rng: &mut Rng, sim: &Sim) -> Op {
    let online = sim.eyes.kernel().online().clone();
    let mut targets: Vec<CgroupPath> =
        sim.state.assignments.owners.values().map(|a| a.cgroup.clone()).collect();
    let above: Vec<CgroupPath> =
        targets.iter().flat_map(CgroupPath::ancestors).filter(|p| !p.is_root()).collect();
    targets.extend(above);
    // Another manager's own partition is its own affair.
    let member = |p: &&CgroupPath| ["", "member"].contains(&sim.eyes.text(p, CpusetFile::Partition).as_str());
    let others: Vec<CgroupPath> = cgroups(sim).iter().filter(member).cloned().collect();
    targets.extend(rng.pick(&others).cloned());
    let mut writes = Vec::new();
    for _ in 0..=rng.below(2) {
        let Some(path) = rng.pick(&targets).cloned() else { break };
        let owned = sim.state.assignments.owner_of(&path).is_some();
        let in_slice = path.is_within(&sim.setup.settings.slice);
        let set = |rng: &mut Rng| if rng.chance(15) { String::new() } else { rng.part(&online).to_string() };
        let (path, file, text) = match rng.below(10) {
            5..=6 if owned || in_slice => (path, "cpuset.cpus.exclusive", set(rng)),
            7..=8 if owned || in_slice => {
                let word = ["member", "root", "isolated"][rng.below(3)];
                (path, "cpuset.cpus.partition", word.into())
            }
            4 if owned => (path, "cpuset.mems", ["", "0", "1", "0-1"][rng.below(4)].into()),
            9 => (path.parent().unwrap_or_default(), "cgroup.subtree_control", "-cpuset".into()),
            // 0..=3, and what belongs to nobody.
            _ => (path, "cpuset.cpus", set(rng)),
        };
        writes.push(Foreign { path, file: file.into(), text });
        // A second write, of the partition's own files, would end it before anybody could list its CPUs again.
        if writes.last().is_some_and(|w| helpless(sim, w)) {
            break;
        }
    }
    Op::Hostile(writes)
}
