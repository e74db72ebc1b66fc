//! What an agent that started now would write: `truepin agent --dry-run`.
//!
//! Problem: before an agent is let loose on a host its operator wants to see what it would do there, and another agent may be
//! at work. Steps: configuration, machine, record and kernel are read as for a start ([`crate::start`]), without locks,
//! programs, watches and the runtime's socket; the reconciler is played through from its start over the tree's containers
//! and what migration takes over to the declared owners.
//! Invariant: nothing is made, moved, locked, loaded or written.

use crate::{
    api::plan::PlanDoc,
    cgroupfs::CgroupFs,
    config::{Config, RunMode},
    containers::Scanner,
    engine::Stage,
    lock,
    mount::Mount,
    paths::Paths,
    procfs,
    start::{self, StartError},
    store::{Store, chain, parent},
    sysfs::{self, OnlineCpus},
};
use std::path::Path;
use truepin::{
    CgroupPath, CpuSet, Owner,
    containers::ContainerMap,
    observed::Step,
    plan::{Phase, Planned},
    reconcile::{Answer, Event, Home, KernelFacts, State},
    rehearse::Rehearsal,
};

/// An agent that does not start.
#[derive(Debug)]
pub struct StartRehearsal {
    kernel: CgroupFs,
    rehearsal: Rehearsal,
    scanner: Scanner,
    notes: Vec<String>,
    /// What has to be done before the rest can be planned.
    first: Vec<Planned>,
}

impl StartRehearsal {
    /// Reads what a start reads.
    pub fn new(config: &Config, paths: &Paths, names: crate::containers::Names) -> Result<Self, StartError> {
        let audit = config.mode == RunMode::Audit;
        let mount = Mount::find(paths.cgroup_root.as_deref())?;
        if !audit && !mount.cpuset {
            return Err(StartError::NoCpuset { root: mount.root });
        }
        let mut notes = Vec::new();
        if !audit && !mount.copied {
            start::lookout(config)?;
        }
        let topology = sysfs::topology(&paths.sysfs)?;
        config.strategy.check(config.numa, &topology)?;
        let online = OnlineCpus::new(&paths.sysfs, topology.online().clone());
        let mut kernel = CgroupFs::new(mount.clone(), online);
        let boot_id = procfs::boot_id()?;
        let (record, slice) = (if audit { None } else { record(paths, &mut notes)? }, start::slice()?);
        let mut first = Vec::new();
        let mut facts = KernelFacts { cpuset: mount.cpuset, ..KernelFacts::default() };
        if audit {
            notes.push("mode audit: nothing is ever written".into());
        } else {
            notes.extend(holder(&[&mount.root, &parent(&paths.state).join("lock")]));
            let mut findings = Vec::new();
            kernel.systemd = start::systemd(paths, &mount, &boot_id, &mut findings);
            notes.extend(findings.iter().map(ToString::to_string));
            match kernel.partition_files()? {
                Some((exclusive, partition)) => (facts.exclusive, facts.partition) = (exclusive, partition),
                None => first = unprobed(&kernel, &slice),
            }
        }
        if config.sources.cri.is_some() {
            notes.push("the runtime is not asked for names of containers in a dry run".into());
        }
        let reserved = if audit { CpuSet::new() } else { start::reserved(config, &topology)? };
        let settings = start::settings(config, slice)?;
        let strict = config.strict_reserved;
        let state = State::new(settings, topology, facts, boot_id, reserved, strict, record);
        let scanner = Scanner::new(&mount.root, Path::new("/"), names);
        Ok(Self { kernel, rehearsal: Rehearsal::new(state), scanner, notes, first })
    }

    /// The containers that run now, by id: pod uid and name.
    pub fn running(&mut self) -> Result<crate::containers::Names, crate::containers::TreeError> {
        self.scanner.running(&ContainerMap::new())
    }

    /// Plays the start through, with `adopt` taken over first.
    #[must_use]
    pub fn play(mut self, config: &Config, paths: &Paths, adopt: Vec<(Owner, CpuSet)>) -> PlanDoc {
        if !self.first.is_empty() {
            self.rehearsal.steps = std::mem::take(&mut self.first);
            self.notes.push(
                "what comes then cannot be told before: no cgroup has cpuset files yet, by which a kernel with \
                 partitions is known"
                    .into(),
            );
            return self.document();
        }
        self.drive(paths, Event::Started);
        match self.scanner.scan(&self.rehearsal.state.containers) {
            Ok(tree) if tree.pods.is_empty() && self.rehearsal.state.has_no_pods() => {}
            Ok(tree) => self.drive(paths, Event::Tree { pods: tree.pods, containers: tree.containers }),
            Err(error) => self.notes.push(format!("pods: {}", chain(&error))),
        }
        let mut ticket = 0;
        if !adopt.is_empty() {
            ticket += 1;
            self.drive(paths, Event::Adopt { ticket, owners: adopt });
            match self.rehearsal.answer(ticket) {
                Some(Answer::Pod(_)) => {}
                Some(Answer::Refused(error)) => {
                    self.notes.push(format!("nothing is taken over, and the agent ends: {}", chain(&error)));
                    return self.document();
                }
                other => {
                    self.notes.push(format!("nothing is taken over, and the agent ends: {other:?}"));
                    return self.document();
                }
            }
        }
        for declared in start::declared(config) {
            let owner = &declared.owner;
            let Some(path) = declared.path.clone() else {
                self.notes.push(format!(
                    "{owner} has its CPUs before it runs: which, and by what property, is decided then"
                ));
                continue;
            };
            let dir = self.kernel.dir(&path);
            if self.rehearsal.state.assignments.owners.contains_key(owner) {
                continue;
            }
            if !dir.exists() {
                self.notes.push(format!("{owner} waits: {} does not exist", dir.display()));
                continue;
            }
            ticket += 1;
            let (request, exactly) = declared.request(config.numa);
            let home = Home::Existing(path);
            self.drive(paths, Event::Admit { ticket, request, exactly, home, pid: None });
            self.notes.push(match self.rehearsal.answer(ticket) {
                Some(Answer::Assigned(owner, a)) => {
                    format!("{owner} gets CPUs {} ({}): {}", a.cpus, a.mode.name(), a.reason)
                }
                Some(Answer::Refused(error)) => format!("{owner} is not admitted: {}", chain(&error)),
                other => format!("{owner} is not admitted: {other:?}"),
            });
        }
        self.document()
    }

    fn drive(&mut self, paths: &Paths, event: Event) {
        let mut stage = Stage { kernel: &mut self.kernel, sysfs: &paths.sysfs };
        self.rehearsal.drive(&mut stage, event, procfs::now().unwrap_or_default());
    }

    fn document(mut self) -> PlanDoc {
        let mut document = PlanDoc::new(&mut self.kernel, &self.rehearsal);
        document.notes.splice(..0, self.notes);
        document
    }
}

/// The record as a start would find it.
fn record(
    paths: &Paths,
    notes: &mut Vec<String>,
) -> Result<Option<truepin::checkpoint::Checkpoint>, StartError> {
    let found = Store::peek(&paths.state)?;
    notes.extend(found.damaged.into_iter().map(|(path, why)| {
        format!("{} is damaged ({why}) and would be moved to quarantine", path.display())
    }));
    notes.push(match &found.record {
        Some(record) => format!("the record {} is of epoch {}", paths.state.display(), record.epoch),
        None => format!("there is no record {}: it would be made", paths.state.display()),
    });
    Ok(found.record.map(|record| *record))
}

/// Another agent that is at work.
fn holder(places: &[&Path]) -> Option<String> {
    let (place, pid) = places.iter().find_map(|place| Some((place, lock::held_by(place)?)))?;
    Some(format!(
        "another truepin (pid {pid}) holds {}: this is what an agent would write that started in its place",
        place.display()
    ))
}

/// The steps that show whether partitions exist.
fn unprobed(kernel: &CgroupFs, slice: &CgroupPath) -> Vec<Planned> {
    let phase = Phase::Prepare;
    let create = (!kernel.dir(slice).exists()).then(|| Step::Create(slice.clone()));
    let steps = [Step::Enable(CgroupPath::root())].into_iter().chain(create);
    steps.map(|step| Planned { phase, step }).collect()
}
