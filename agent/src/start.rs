//! From configuration to a running engine: finds the mount, reads the machine and the record, probes the kernel.
//!
//! What cannot be had is decided here and nowhere later: enforcing without cpuset on cgroup v2 is refused with what to
//! do; auditing without BPF is refused, because it would prove nothing; enforcing without BPF goes on and says so in
//! every status and verdict.

use crate::{
    api::calls::About,
    bpf::{BpfProbe, Hook, WriteHook},
    cgroupfs::CgroupFs,
    config::{CgroupRule, Config, Reserve, RunMode, UnitRule},
    containers::{Names, Scanner},
    cri::{self, Cri},
    engine::Engine,
    evidence::{self, Collector},
    fault::Faults,
    hotplug::{Hotplug, HotplugError},
    kubelet,
    lock::{self, LockError},
    mount::{Mount, MountError},
    paths::Paths,
    procfs::{self, ProcError},
    store::{Store, StoreError, chain},
    sysfs::{self, OnlineCpus, SysfsError},
    systemd::{Journal, Places, Systemd},
    watch::Watch,
    writers::{Means, Writers},
};
use nix::fcntl::Flock;
use std::{
    fs::File,
    path::{Path, PathBuf},
};
use truepin::{
    CgroupPath, CpuSet, CpuTopology, NodeSet, Owner,
    checkpoint::{self, Checkpoint},
    observed::{Kernel, KernelError, Step},
    placement::{
        self, Strategy, StrategyError,
        kubelet::{KubeletMachine, TakeError},
    },
    plan::Role,
    reconcile::{FindingKind, KernelFacts, Settings, State},
    request::{AlignmentPolicy, Isolation, Request},
};

/// The slice under which truepin makes cgroups.
const SLICE: &str = "truepin.slice";

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No cgroup2.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// cpuset is not on cgroup v2.
    #[error("the cpuset controller is not on cgroup v2: {}/cgroup.controllers does not list it", root.display())]
    NoCpuset {
        /// The root cgroup.
        root: PathBuf,
    },
    /// The machine could not be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The record.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another truepin writes on this host.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// `reserved` does not fit the machine.
    #[error("reserved = {reserved:?}: {why} (online are {online})")]
    Reserved {
        /// As configured.
        reserved: String,
        /// What does not fit.
        why: String,
        /// What there is.
        online: CpuSet,
    },
    /// The strategy.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// `reserved` as a number, by the strategy `kubelet`.
    #[error("reserved CPUs cannot be chosen")]
    Choose(#[from] TakeError),
    /// `/proc` or a clock.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// A probe of the kernel.
    #[error("probing the kernel")]
    Kernel(#[from] KernelError),
    /// The slice's name, which is fixed and right.
    #[error(transparent)]
    Path(#[from] truepin::cgroup::PathError),
    /// A kubelet gives out CPUs too.
    #[error("a kubelet with the static policy (pid {}) gives out this node's CPUs: {}", found.pid, found.says)]
    Kubelet {
        /// Which.
        found: kubelet::Static,
    },
    /// Auditing needs the programs.
    #[error("auditing needs the eBPF programs")]
    NoBpf(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Auditing with `bpf = false`.
    #[error("auditing needs the eBPF programs, and sources.bpf is false")]
    BpfOff,
}

impl StartError {
    /// What to do next.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoCpuset { .. } => Some(
                "a v1 hierarchy holds it: boot with systemd.unified_cgroup_hierarchy=1 (or cgroup_no_v1=cpuset); \
                 `truepin agent --mode audit` works without",
            ),
            Self::Mount(MountError::Absent) => Some("mount -t cgroup2 none /sys/fs/cgroup"),
            Self::Store(StoreError::Lock(LockError::Held { .. })) | Self::Lock(LockError::Held { .. }) => {
                Some("one agent at a time writes; ask that one, or stop it")
            }
            Self::Kubelet { .. } => Some(
                "`truepin agent --mode migrate` takes its assignments over and says what to change; \
                 `--mode audit` watches beside it",
            ),
            Self::NoBpf(_) => Some("run as root on a kernel with BTF (/sys/kernel/btf/vmlinux)"),
            _ => None,
        }
    }
}

/// An owner that configuration declares.
#[derive(Debug, Clone)]
pub struct Declared {
    /// Who.
    pub owner: Owner,
    /// Its cgroup; none: the unit's, wherever systemd has it.
    pub path: Option<CgroupPath>,
    /// How many CPUs, or which.
    pub cpus: Reserve,
    /// Why it was last refused.
    pub refused: Option<String>,
    /// Somebody released it; it is not admitted again in the life of this agent.
    pub released: bool,
}

impl Declared {
    /// What it asks for, and exactly which CPUs.
    #[must_use]
    pub fn request(&self, numa: AlignmentPolicy) -> (Request, Option<CpuSet>) {
        let (cpus, exactly) = match &self.cpus {
            Reserve::Count(n) => (*n, None),
            Reserve::Cpus(set) => (u32::try_from(set.len()).unwrap_or(u32::MAX), Some(set.clone())),
        };
        let request = Request {
            owner: self.owner.clone(),
            cpus,
            numa,
            whole_cores: false,
            near: NodeSet::new(),
            isolation: Isolation::Auto,
            memory: 0,
        };
        (request, exactly)
    }
}

/// A machine ready to work, at rest.
#[derive(Debug)]
pub struct Prepared {
    /// Held for as long as this agent writes.
    pub host: Option<Flock<File>>,
    /// The engine.
    pub engine: Engine,
    /// What calls need beside it.
    pub about: About,
    /// Owners to admit.
    pub declared: Vec<Declared>,
    /// What was found on the way; kept, unlike the notes.
    pub findings: Vec<FindingKind>,
    /// For a kubelet that begins to give out CPUs later.
    pub lookout: Option<kubelet::Lookout>,
    /// Sets of another manager, to be taken over first.
    pub adopt: Vec<(Owner, CpuSet)>,
    /// Things the operator should know.
    pub notes: Vec<String>,
}

/// Prepares an agent.
pub fn prepare(config: &Config, paths: &Paths, names: Names) -> Result<Prepared, StartError> {
    let started_ns = procfs::now()?.mono_ns;
    let audit = config.mode == RunMode::Audit;
    let mut notes = Vec::new();
    let mount = Mount::find(paths.cgroup_root.as_deref())?;
    if !audit && !mount.cpuset {
        return Err(StartError::NoCpuset { root: mount.root });
    }
    // A copied tree is not this host's.
    let lookout = if audit || mount.copied { None } else { Some(lookout(config)?) };
    let topology = sysfs::topology(&paths.sysfs)?;
    config.strategy.check(config.numa, &topology)?;
    notes.extend(topology.oddities().iter().map(|o| format!("topology: {o}")));
    let online = OnlineCpus::new(&paths.sysfs, topology.online().clone());
    let mut kernel = CgroupFs::new(mount.clone(), online.clone());
    let slice = slice()?;
    let boot_id = procfs::boot_id()?;
    // The record's lock belongs to the record; two agents with different records on one host would fight all the same.
    let host = if audit { None } else { Some(host_lock(&mount.root)?) };
    let mut findings = Vec::new();
    let (store, record) = if audit { (None, None) } else { open(paths, &mut findings)? };
    if !audit {
        kernel.systemd = systemd(paths, &mount, &boot_id, &mut findings);
    }
    let (exclusive, partition) = if audit { (false, false) } else { probe_partitions(&mut kernel, &slice)? };
    let faults = Faults::ordered().unwrap_or_else(|error| {
        notes.push(error.to_string());
        Faults::default()
    });
    let hotplug = hotplug(config, paths, &mut notes);
    // A recorded machine's CPUs do not go and come.
    let recorded = paths.sysfs != Path::new("/");
    let (uevents, attempts) = hotplug.as_ref().map_or((recorded, recorded), Hotplug::hears);
    let (probe, writers) = programs(config, &mount, faults, &mut notes)?;
    let facts = KernelFacts {
        cpuset: mount.cpuset,
        exclusive,
        partition,
        empty_refused: false,
        bpf: probe.is_some(),
        no_uevents: !uevents,
        no_attempts: !attempts,
    };
    let settings = settings(config, slice)?;
    let reserved = if audit { CpuSet::new() } else { reserved(config, &topology)? };
    if let Some(isolated) = topology.isolated().filter(|i| !i.is_empty()) {
        notes.push(format!(
            "CPUs {isolated} are isolated at boot (isolcpus), so no thread is balanced over them: handed out only where \
             a list names them"
        ));
    }
    if let Some(record) = &record {
        findings.extend(moved(record, &boot_id, &topology));
    }
    let state = State::new(settings, topology, facts, boot_id, reserved, config.strict_reserved, record);
    let watch = optional(
        config.sources.notify,
        Watch::new,
        "changes of files are found at the tick only",
        &mut notes,
    );
    let mut scanner = Scanner::new(&mount.root, Path::new("/"), names);
    if let Some(socket) = &config.sources.cri {
        scanner.cri = optional(true, || Cri::new(socket), "runtimes are not asked for names", &mut notes);
    }
    let collector = Collector::new(probe, online, &mount.root);
    give_memory_back();
    let mut engine = Engine::new(state, kernel, collector, store, writers, scanner, paths.sysfs.clone());
    (engine.watch, engine.hotplug) = (watch, hotplug);
    // What is taken over depends on who runs; everything else can be named later.
    engine.first_names(if config.mode == RunMode::Migrate { cri::ASK } else { cri::AT_START });
    Ok(Prepared {
        declared: declared(config),
        adopt: Vec::new(),
        engine,
        host,
        lookout,
        findings,
        about: About { numa: config.numa, sysfs: paths.sysfs.clone(), started_ns, unmet: Vec::new() },
        notes,
    })
}

/// Where truepin makes its own cgroups.
pub(crate) fn slice() -> Result<CgroupPath, StartError> {
    Ok(SLICE.parse()?)
}

pub(crate) fn settings(config: &Config, slice: CgroupPath) -> Result<Settings, StartError> {
    let roles = config.cgroups.iter().filter(|c| c.role != Role::Owner).map(|c| (c.path.clone(), c.role));
    Ok(Settings {
        audit: config.mode == RunMode::Audit,
        slice,
        isolation: config.isolation,
        repairs_per_minute: config.repairs_per_minute,
        strategy: config.strategy,
        scope: config.scope,
        sources: config.sources.pods.clone(),
        roles: roles.collect(),
        on_intrusion: config.on_intrusion,
        on_intrusion_at: config
            .cgroups
            .iter()
            .filter_map(|c| Some((c.path.clone(), c.on_intrusion?)))
            .collect(),
        units: config.units.iter().map(UnitRule::owner).collect(),
        kthread_budget_ns_per_s: config.kthread_budget_ns_per_s,
        tolerance: evidence::tolerance()?,
    })
}

pub(crate) fn declared(config: &Config) -> Vec<Declared> {
    let one = |c: &CgroupRule| {
        let cpus = c.cpus.clone().filter(|_| c.role == Role::Owner)?;
        let owner = c.owner.clone().unwrap_or_else(|| Owner::Cgroup(c.path.clone()));
        Some(Declared { owner, path: Some(c.path.clone()), cpus, refused: None, released: false })
    };
    let unit = |u: &UnitRule| {
        let cpus = u.cpus.clone();
        Declared { owner: u.owner(), path: None, cpus, refused: None, released: false }
    };
    // Those first that are to be there before others start.
    config.units.iter().map(unit).chain(config.cgroups.iter().filter_map(one)).collect()
}

/// The owner of units' cgroups, where systemd is the init. The journal is beside the record, whose lock is held.
pub(crate) fn systemd(
    paths: &Paths,
    mount: &Mount,
    boot_id: &str,
    findings: &mut Vec<FindingKind>,
) -> Option<Systemd> {
    let places = match &paths.systemd {
        Some(run) => Places {
            private: run.join("private"),
            bus: run.join("bus"),
            controls: run.join("system.control"),
        },
        None if Systemd::is_init() && !mount.copied && mount.root == Path::new("/sys/fs/cgroup") => {
            Places::default()
        }
        None => return None,
    };
    match Journal::open(&paths.state.with_file_name("systemd.json"), boot_id) {
        Ok(journal) => Some(Systemd::new(places, journal)),
        Err(error) => {
            findings.push(FindingKind::Systemd(format!(
                "units' cgroups are written directly, which lasts until systemd writes them: {}; move the file away",
                chain(&error)
            )));
            None
        }
    }
}

/// Of the running kernel only: a recorded machine's CPUs do not go and come.
fn hotplug(config: &Config, paths: &Paths, notes: &mut Vec<String>) -> Option<Hotplug> {
    if !config.sources.notify || paths.sysfs != Path::new("/") {
        return None;
    }
    let (hotplug, missing) = Hotplug::new();
    for error in missing {
        let without = match error {
            HotplugError::Netlink { .. } => "a CPU that goes and comes back may go unseen, so nobody is HELD",
            _ => "what an offline that the kernel refused leaves behind is found at the tick only",
        };
        notes.push(format!("{}; {without}", chain(&error)));
    }
    hotplug.means().is_some().then_some(hotplug)
}

fn optional<T, E: std::error::Error + 'static>(
    wanted: bool,
    open: impl FnOnce() -> Result<T, E>,
    without: &str,
    notes: &mut Vec<String>,
) -> Option<T> {
    if !wanted {
        return None;
    }
    match open() {
        Ok(source) => Some(source),
        Err(error) => {
            notes.push(format!("{}; {without}", chain(&error)));
            None
        }
    }
}

/// No kubelet with the static policy is there, or its assignments are to be taken over.
pub(crate) fn lookout(config: &Config) -> Result<kubelet::Lookout, StartError> {
    let (proc, root) = (Path::new("/proc"), Path::new("/"));
    match kubelet::static_policy(proc, root) {
        Some(found) if config.mode == RunMode::Enforce => Err(StartError::Kubelet { found }),
        known => Ok(kubelet::Lookout::new(proc, root, known.as_ref())),
    }
}

fn host_lock(root: &Path) -> Result<Flock<File>, LockError> {
    let failed = |source| LockError::Io { operation: "open", path: root.into(), source };
    lock::exclusive(File::open(root).map_err(failed)?, root)
}

fn open(
    paths: &Paths,
    findings: &mut Vec<FindingKind>,
) -> Result<(Option<Store>, Option<Checkpoint>), StartError> {
    let mut store = Store::open(&paths.state)?;
    let loaded = store.load(procfs::now()?.wall_ns)?;
    for d in &loaded.damaged {
        findings.push(FindingKind::Record(format!(
            "the {} generation of the record was damaged ({}) and is now {}",
            d.generation.name(),
            d.reason,
            d.path.display()
        )));
    }
    findings.extend(loaded.notes.into_iter().map(FindingKind::Record));
    if loaded.record.is_none() && !loaded.damaged.is_empty() {
        findings.push(FindingKind::Record("no valid record is left; starting from nothing".into()));
    }
    Ok((Some(store), loaded.record.map(|(_, record)| *record)))
}

/// What has changed around the record since it was written.
fn moved(record: &Checkpoint, boot_id: &str, topology: &CpuTopology) -> Vec<FindingKind> {
    let mut moved = Vec::new();
    if let (_, Some(gone)) = checkpoint::for_boot(record.clone(), boot_id) {
        moved.push(FindingKind::Note(format!(
            "the machine was booted since the record was written: forgotten are {} containers and the \
             first values of {} cgroups; assignments stay",
            gone.containers, gone.first
        )));
    }
    let now = topology.fingerprint();
    if record.topology != now {
        moved.push(FindingKind::Record(format!(
            "the record was written on another machine or before this one changed: its topology was {}, now it is {now}",
            record.topology
        )));
    }
    moved
}

/// Whether `cpuset.cpus.exclusive` and `cpuset.cpus.partition` exist. Where no cgroup has cpuset files yet, the controller
/// is enabled and the slice made: the one place that is truepin's own.
fn probe_partitions(kernel: &mut CgroupFs, slice: &CgroupPath) -> Result<(bool, bool), KernelError> {
    if let Some(found) = kernel.partition_files()? {
        return Ok(found);
    }
    kernel.apply(&Step::Enable(CgroupPath::root()))?;
    if !kernel.dir(slice).exists() {
        kernel.apply(&Step::Create(slice.clone()))?;
    }
    Ok(kernel.partition_files()?.unwrap_or((false, false)))
}

/// The eBPF programs, and the means by which writers are named, of which a hook is one of them.
fn programs(
    config: &Config,
    mount: &Mount,
    faults: Faults,
    notes: &mut Vec<String>,
) -> Result<(Option<BpfProbe>, Writers), StartError> {
    let allowed =
        |means: Means| config.sources.writers && faults.writers.is_none_or(|only| only == Some(means));
    let hooks: Vec<Hook> = Hook::ALL.into_iter().filter(|hook| allowed(Means::Hook(*hook))).collect();
    let loaded = load_bpf(config, mount, &hooks, notes)?;
    let (probe, mut hook, refused) = match loaded {
        Some((probe, hook, refused)) => (Some(probe), hook, refused),
        None => (None, None, vec!["eBPF is off".into()]),
    };
    if let (Some(hook), Some(room)) = (&mut hook, faults.watched) {
        hook.limit(room);
    }
    let writers = if config.sources.writers {
        Writers::new(&mount.root, hook, allowed(Means::Fanotify), refused)
    } else {
        Writers::none("sources.writers is false".into())
    };
    if config.sources.writers && writers.means().is_none() {
        notes.push(format!("writers of files stay unknown: {}", writers.refused().join("; ")));
    }
    Ok((probe, writers))
}

/// The programs with the first of `hooks` that the kernel takes, and why it did not take the ones before.
type Loaded = (BpfProbe, Option<WriteHook>, Vec<String>);

fn load_bpf(
    config: &Config,
    mount: &Mount,
    hooks: &[Hook],
    notes: &mut Vec<String>,
) -> Result<Option<Loaded>, StartError> {
    let audit = config.mode == RunMode::Audit;
    if !config.sources.bpf {
        return if audit { Err(StartError::BpfOff) } else { Ok(None) };
    }
    if mount.copied {
        notes.push(
            "the cgroup root is a copied tree: no kernel evidence about it exists, eBPF stays off".into(),
        );
        return Ok(None);
    }
    match BpfProbe::load_with(hooks) {
        Ok(loaded) => {
            let (probe, ..) = &loaded;
            if !probe.no_moves().is_empty() {
                let why = probe.no_moves().join("; ");
                notes.push(format!("tasks that are moved out of an owner's cgroup are not seen: {why}"));
            }
            Ok(Some(loaded))
        }
        Err(error) if audit => Err(StartError::NoBpf(Box::new(error))),
        Err(error) => {
            notes.push(format!("no kernel evidence, verdicts will be inconclusive: {}", chain(&error)));
            Ok(None)
        }
    }
}

/// Whole cores from the lowest on, until there are that many CPUs.
pub(crate) fn reserved(config: &Config, topology: &CpuTopology) -> Result<CpuSet, StartError> {
    let online = topology.online();
    match &config.reserved {
        Reserve::Cpus(cpus) => {
            let strange = cpus.difference(topology.present().unwrap_or(online));
            let why = if !strange.is_empty() {
                format!("this machine has no CPUs {strange}")
            } else if !cpus.is_empty() && cpus.is_disjoint(online) {
                "none of these CPUs is online".to_owned()
            } else {
                return Ok(cpus.clone());
            };
            Err(StartError::Reserved { reserved: cpus.to_string(), why, online: online.clone() })
        }
        Reserve::Count(count) if *count as usize > online.len() => {
            let why = format!("{count} CPUs are to be reserved, and {} are there", online.len());
            Err(StartError::Reserved { reserved: count.to_string(), why, online: online.clone() })
        }
        Reserve::Count(count) => {
            if let Strategy::Kubelet { options, .. } = config.strategy {
                let machine = KubeletMachine::new(topology);
                return Ok(placement::kubelet::reserved(&machine, options, *count as usize)?);
            }
            let mut taken = CpuSet::new();
            for core in topology.cores() {
                if taken.len() >= *count as usize {
                    break;
                }
                taken |= &core.cpus;
            }
            Ok(taken)
        }
    }
}

/// Parsing the kernel's BTF leaves some 20 MB of free heap behind, a runtime's list of 5,000 containers 5 MB, which glibc would keep for as long as the agent runs.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "malloc_trim(3) has no safe wrapper; it takes no pointer and is thread-safe")]
pub(crate) fn give_memory_back() {
    // SAFETY: see above.
    unsafe { nix::libc::malloc_trim(0) };
}

/// Other C libraries return memory by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_memory_back() {}
