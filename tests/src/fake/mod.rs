//! The fake kernel: cgroup v2 with its cpuset controller, CPU hotplug and task affinity, in memory.
//!
//! Problem: plan and executor must hold I1 to I4 between any two writes, on kernels that refuse, that accept and
//! ignore, and that are wrong. Thousands of crashes cannot be tried in guests; so here is a model that answers a
//! write as the kernel does, in microseconds, held against real kernels by [`lockstep`].
//!
//! How it is laid out. Everything that happens is one of the operations of this type: [`FakeKernel::mkdir`],
//! [`FakeKernel::rmdir`], [`FakeKernel::write_file`], [`FakeKernel::read_file`], tasks that come, move, pin
//! themselves and go, CPUs that go and come. [`truepin::observed::Kernel`] is implemented on top of these same
//! operations, so truepin and a hostile third party go through one door.
//! `tree`: directories, controllers, threaded mode. `tasks`: affinity. `writes`: the two CPU lists and the memory
//! nodes; `lax`: the same on 7.3. `partition`, `remote`: who becomes one and who ceases to be one; `grants`: what of
//! a claim can be had. `flow`: effective sets, from a cgroup down to its last descendant. `hotplug`, `domains`: CPUs
//! that go and come, and why they may be kept. `files`: text in, text out.
//! Beside the model: `invariants` and [`Guarded`] look at it; [`script`], [`chance`] and [`lockstep`] hold it to the
//! truth.
//!
//! How a test uses it. Build a machine with [`FakeKernel::new`], enable cpuset below the root with
//! [`FakeKernel::write_file`], [`FakeKernel::spawn`] the tasks; hand it (or a [`Guarded`] around it) to what drives
//! [`truepin::observed::Kernel`]; put a [`Fault`] on the k-th `apply`. It is a value: `clone` is a snapshot.
//!
//! The model is *path dependent on purpose*: real kernels leave states behind that no rule about sets explains
//! (a set that is shared between two partitions after hotplug, a mask that outlives its cpuset). Where such a
//! state was seen, the model produces it in the same way, and a comment says so.
//!
//! Invariants of the model itself: the root cgroup is index 0 and always alive; `Group::tasks_below` counts
//! the threads in the subtree, itself included; `paths` names exactly the live cgroups.

mod behaviour;
pub mod chance;
mod domains;
mod errno;
mod files;
mod flow;
mod grants;
mod guarded;
mod hotplug;
mod invariants;
mod journal;
mod kernel;
mod lax;
mod list;
mod local;
mod lockstep;
mod partition;
mod real;
mod remote;
pub mod script;
mod tasks;
pub mod transcript;
mod tree;
mod writes;

pub use behaviour::{Behaviour, Model};
pub use errno::Errno;
pub use guarded::Guarded;
pub use invariants::{Enforced, Masks, Pool, invariants, leaks, mask_changes, masks, stale_masks};
pub use kernel::{CRASH, Fault};
pub use lockstep::{Difference, LockstepError, Report, lockstep, tell};
pub use real::child_entry;

use std::collections::BTreeMap;
use truepin::{CgroupId, CgroupPath, CpuSet, NodeSet, partition::PartitionKind};

/// Index of a cgroup in the model.
type Ix = usize;
/// The root cgroup.
const ROOT: Ix = 0;
/// The task that is there from the start, in the root cgroup; every spawned process is its child.
pub const INIT: u32 = 1;

/// Why a partition is invalid, in the words that `cpuset.cpus.partition` shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    ExclusiveList,
    ParentInvalid,
    ParentMember,
    NotExclusive,
    ParentStarves,
    Hotplug,
    NothingAsked,
    RemoteBelow,
    /// Linux 6.1
    ListInvalid,
    /// Linux 6.1
    ListEmpty,
}

impl Reason {
    fn words(self) -> &'static str {
        match self {
            Self::ExclusiveList => "Invalid cpu list in cpuset.cpus.exclusive",
            Self::ParentInvalid => "Parent is an invalid partition root",
            Self::ParentMember => "Parent is not a partition root",
            Self::NotExclusive => "Cpu list in cpuset.cpus not exclusive",
            Self::ParentStarves => "Parent unable to distribute cpu downstream",
            Self::Hotplug => "No cpu available due to hotplug",
            Self::NothingAsked => "cpuset.cpus and cpuset.cpus.exclusive are empty",
            Self::RemoteBelow => "Have remote partition underneath",
            Self::ListInvalid => "Invalid cpu list in cpuset.cpus",
            Self::ListEmpty => "cpuset.cpus is empty",
        }
    }
}

/// What `cpuset.cpus.partition` stands at. A member is neither valid nor invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Member,
    Valid(PartitionKind),
    Invalid(PartitionKind),
}

impl State {
    fn is_valid(self) -> bool {
        matches!(self, Self::Valid(_))
    }

    fn is_invalid(self) -> bool {
        matches!(self, Self::Invalid(_))
    }

    /// The kind asked for; member for a member.
    fn kind(self) -> PartitionKind {
        match self {
            Self::Member => PartitionKind::Member,
            Self::Valid(kind) | Self::Invalid(kind) => kind,
        }
    }

    /// Valid becomes invalid; everything else stays.
    fn invalidated(self) -> Self {
        if let Self::Valid(kind) = self { Self::Invalid(kind) } else { self }
    }

    /// A valid isolated partition.
    fn isolates(self) -> bool {
        self == Self::Valid(PartitionKind::Isolated)
    }
}

/// The cpuset part of a cgroup.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the kernel's own flags, every one independent of the others"
)]
struct Cpuset {
    /// `cpuset.cpus`
    cpus: CpuSet,
    /// `cpuset.cpus.exclusive`
    exclusive: CpuSet,
    /// `cpuset.cpus.exclusive.effective`
    granted: CpuSet,
    /// `cpuset.cpus.effective`
    effective: CpuSet,
    /// `cpuset.mems`
    mems: NodeSet,
    /// `cpuset.mems.effective`
    mems_effective: NodeSet,
    state: State,
    reason: Option<Reason>,
    /// Holds CPUs straight from the root. Can be true of an invalid partition (sibling overlap).
    remote: bool,
    /// Whether overlap with siblings is forbidden.
    guarded: bool,
    /// Whether the scheduler balances here; no file shows it, but it decides which subtrees a change walks.
    balanced: bool,
    /// Partitions that took CPUs from this one, as the kernel counts them.
    children_served: i32,
    /// The CPUs that they took, where a cgroup keeps them (6.1); those of the root are [`FakeKernel::handed_out`].
    given: CpuSet,
    /// It follows its parent's set, having none of its own (6.1).
    inherits: bool,
}

impl Cpuset {
    fn below(parent: &Self) -> Self {
        Self {
            cpus: CpuSet::new(),
            exclusive: CpuSet::new(),
            granted: CpuSet::new(),
            effective: parent.effective.clone(),
            mems: NodeSet::new(),
            mems_effective: parent.mems_effective.clone(),
            state: State::Member,
            reason: None,
            remote: false,
            guarded: false,
            balanced: parent.balanced,
            children_served: 0,
            given: CpuSet::new(),
            inherits: true,
        }
    }

    /// What it wants for itself alone: the explicit list, else `cpuset.cpus`.
    fn claim(&self) -> &CpuSet {
        if self.exclusive.is_empty() { &self.cpus } else { &self.exclusive }
    }
}

/// One cgroup.
#[derive(Debug, Clone)]
struct Group {
    path: CgroupPath,
    id: CgroupId,
    parent: Ix,
    /// In the order of creation.
    children: Vec<Ix>,
    /// `cgroup.subtree_control`, bits of [`tree::CONTROLLERS`].
    enabled: u8,
    /// `cgroup.type` is `threaded`.
    threaded: bool,
    /// Threads in this very cgroup.
    tasks_here: usize,
    /// Threads in this cgroup and below.
    tasks_below: usize,
    /// It has cpuset files.
    has_cpuset: bool,
    /// Its cpuset binds its tasks. False while `has_cpuset` is still true for the moment in which the
    /// controller is withdrawn: tasks leave before partitions end.
    binds: bool,
    cs: Cpuset,
}

/// One thread.
#[derive(Debug, Clone)]
struct Task {
    /// The process.
    process: u32,
    group: Ix,
    /// What `sched_setaffinity` asked for last, untrimmed.
    wanted: Option<CpuSet>,
    /// `Cpus_allowed_list`
    mask: CpuSet,
    traits: TaskTraits,
}

/// What a task does while a CPU leaves. A task that runs, or wakes, with no CPU of its mask left gets another mask,
/// and forgets what it asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activity {
    /// It sleeps on, and keeps its mask.
    #[default]
    Asleep,
    /// It wakes right after: the task that asked for the change, for one.
    Wakes,
    /// It runs, and is pushed away before cpusets follow, even where the change is refused then.
    Runs,
}

/// What kind of task to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TaskTraits {
    /// What it does while a CPU leaves.
    pub activity: Activity,
    /// A kernel thread.
    pub kthread: bool,
    /// A kernel thread bound to its CPU (`PF_NO_SETAFFINITY`): cannot be moved or pinned.
    pub bound: bool,
}

/// The fake kernel.
#[derive(Debug, Clone)]
pub struct FakeKernel {
    behaviour: Behaviour,
    possible: CpuSet,
    active: CpuSet,
    possible_nodes: NodeSet,
    groups: Vec<Group>,
    free: Vec<Ix>,
    paths: BTreeMap<CgroupPath, Ix>,
    tasks: BTreeMap<u32, Task>,
    /// CPUs that partitions took from the root.
    handed_out: CpuSet,
    /// `cpuset.cpus.isolated`
    isolated: CpuSet,
    /// Remote partitions, the youngest first.
    remotes: Vec<Ix>,
    /// Real kernels keep one scratch set per write and hand it down; a nested walk overwrites it. See `flow`.
    scratch: CpuSet,
    domains: Vec<domains::Domain>,
    /// Some change wants the domains rebuilt.
    rebuild: bool,
    next_id: u64,
    next_pid: u32,
    applies: u64,
    faults: BTreeMap<u64, Fault>,
    crashed: bool,
    journal: Option<journal::Journal>,
}

impl FakeKernel {
    /// A machine with these CPUs online (and no others possible), these NUMA nodes with memory, the root cgroup
    /// alone, no controller enabled, and one task, [`INIT`], in it.
    #[must_use]
    pub fn new(behaviour: Behaviour, online: CpuSet, nodes: NodeSet) -> Self {
        let root = Group {
            path: CgroupPath::root(),
            id: CgroupId(1),
            parent: ROOT,
            children: Vec::new(),
            enabled: 0,
            threaded: false,
            tasks_here: 0,
            tasks_below: 0,
            has_cpuset: true,
            binds: true,
            cs: Cpuset {
                cpus: online.clone(),
                exclusive: online.clone(),
                granted: online.clone(),
                effective: online.clone(),
                mems: nodes.clone(),
                mems_effective: nodes.clone(),
                state: State::Valid(PartitionKind::Root),
                reason: None,
                remote: false,
                guarded: true,
                balanced: true,
                children_served: 0,
                given: CpuSet::new(),
                inherits: false,
            },
        };
        let mut kernel = Self {
            behaviour,
            possible: online.clone(),
            domains: vec![domains::Domain::built(online.clone())],
            rebuild: false,
            active: online,
            possible_nodes: nodes,
            paths: BTreeMap::from([(CgroupPath::root(), ROOT)]),
            groups: vec![root],
            free: Vec::new(),
            tasks: BTreeMap::new(),
            handed_out: CpuSet::new(),
            isolated: CpuSet::new(),
            remotes: Vec::new(),
            scratch: CpuSet::new(),
            next_id: 2,
            next_pid: INIT,
            applies: 0,
            faults: BTreeMap::new(),
            crashed: false,
            journal: None,
        };
        let traits = TaskTraits { activity: Activity::Wakes, ..TaskTraits::default() };
        kernel.new_task(ROOT, None, kernel.possible.clone(), traits, None);
        kernel
    }

    /// The same machine with more CPUs possible than are online.
    #[must_use]
    pub fn with_possible(mut self, possible: &CpuSet) -> Self {
        self.possible = self.possible.union(possible);
        let cs = &mut self.groups[ROOT].cs;
        (cs.cpus, cs.granted) = (self.possible.clone(), self.possible.clone());
        for task in self.tasks.values_mut() {
            task.mask = self.possible.clone();
        }
        self
    }

    /// The behaviour in force.
    #[must_use]
    pub fn behaviour(&self) -> Behaviour {
        self.behaviour
    }

    /// `/sys/devices/system/cpu/online`
    #[must_use]
    pub fn online(&self) -> &CpuSet {
        &self.active
    }

    /// The live cgroups, in the order of their paths.
    pub fn cgroups(&self) -> impl Iterator<Item = &CgroupPath> {
        self.paths.keys()
    }

    /// The id of a cgroup.
    #[must_use]
    pub fn id(&self, path: &CgroupPath) -> Option<CgroupId> {
        self.paths.get(path).map(|i| self.groups[*i].id)
    }

    fn find(&self, path: &CgroupPath) -> Result<Ix, Errno> {
        self.paths.get(path).copied().ok_or(Errno::ENOENT)
    }

    fn cs(&self, i: Ix) -> &Cpuset {
        &self.groups[i].cs
    }

    fn cs_mut(&mut self, i: Ix) -> &mut Cpuset {
        &mut self.groups[i].cs
    }

    fn parent(&self, i: Ix) -> Ix {
        self.groups[i].parent
    }

    /// The children that have cpuset files, the oldest first.
    fn cpuset_children(&self, i: Ix) -> Vec<Ix> {
        self.groups[i].children.iter().copied().filter(|c| self.groups[*c].has_cpuset).collect()
    }
}
