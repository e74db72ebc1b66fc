//! The trait that truepin drives, on top of the same operations that everybody else uses; and failures on order.

use super::{Errno, FakeKernel, Ix, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use truepin::{
    CgroupPath,
    observed::{CgroupObserved, CpusetObserved, Kernel, KernelError, Observed, Scope, Step},
    partition::{InvalidReason, PartitionState},
};

/// What happens at a chosen call of [`Kernel::apply`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The call fails and changes nothing.
    Fail(Errno),
    /// The agent dies before the change.
    CrashBefore,
    /// The agent dies after the change.
    CrashAfter,
    /// Somebody else writes a file just before the change. What comes of that write is theirs.
    Foreign {
        /// The cgroup.
        path: CgroupPath,
        /// The file's name.
        file: String,
        /// What they write.
        text: String,
    },
}

/// [`KernelError::operation`] of a crash.
pub const CRASH: &str = "crash";

impl FakeKernel {
    /// Puts a fault on the `nth` call of `apply` from now, counted from 0.
    pub fn fault(&mut self, nth: u64, fault: Fault) {
        self.faults.insert(self.applies + nth, fault);
    }

    /// How often `apply` was called, refused calls included.
    #[must_use]
    pub fn applies(&self) -> u64 {
        self.applies
    }

    /// Whether a crash has happened; every call of the trait fails until [`FakeKernel::restart`].
    #[must_use]
    pub fn crashed(&self) -> bool {
        self.crashed
    }

    /// A new agent starts. The kernel's state is as it was left.
    pub fn restart(&mut self) {
        self.crashed = false;
        self.faults.clear();
    }

    fn crash(&mut self, target: String) -> KernelError {
        self.crashed = true;
        dead(target)
    }

    fn perform(&mut self, step: &Step) -> Result<(), KernelError> {
        let (value, result) = match step {
            Step::Create(path) => (None, self.mkdir(path)),
            Step::Remove(path) => (None, self.rmdir(path)),
            Step::Enable(path) => {
                let text = "+cpuset";
                (Some(text.into()), self.write_file(path, "cgroup.subtree_control", text))
            }
            Step::Write { path, file, new, .. } => {
                let text = new.to_string();
                // With the newline that makes an empty list a write at all.
                let result = self.write_file(path, file.name(), &format!("{text}\n"));
                (Some(text), result)
            }
            Step::Enter { path, pid } => {
                let text = pid.to_string();
                let result = self.write_file(path, "cgroup.procs", &text);
                (Some(text), result)
            }
        };
        result.map_err(|e| error(step, value, e))
    }

    fn observe_one(&self, i: Ix) -> CgroupObserved {
        let group = &self.groups[i];
        CgroupObserved {
            id: group.id,
            cpuset: group.has_cpuset.then(|| self.observe_cpuset(i)),
            enables_cpuset: group.enabled & super::tree::CPUSET != 0,
            populated: self.populated(i),
            has_processes: if group.threaded { group.tasks_here > 0 } else { self.holds_process(i) },
            kind: self.kind(i),
        }
    }

    fn holds_process(&self, i: Ix) -> bool {
        // Threads of a process elsewhere in a threaded domain are listed at its root only.
        self.groups[i].tasks_here > 0 || self.groups[i].tasks_below > 0 && !self.processes(i).is_empty()
    }

    fn observe_cpuset(&self, i: Ix) -> CpusetObserved {
        let cs = self.cs(i);
        let (effective, mems_effective) = (cs.effective.clone(), cs.mems_effective.clone());
        if i == ROOT {
            return CpusetObserved { effective, mems_effective, ..CpusetObserved::default() };
        }
        let lists = self.behaviour.exclusive_file;
        CpusetObserved {
            cpus: cs.cpus.clone(),
            effective,
            exclusive: lists.then(|| cs.exclusive.clone()),
            exclusive_effective: lists.then(|| cs.granted.clone()),
            partition: Some(PartitionState {
                kind: cs.state.kind(),
                invalid: cs.state.is_invalid().then(|| {
                    cs.reason.map_or(InvalidReason::Bare, |r| InvalidReason::Said(r.words().into()))
                }),
            }),
            mems: cs.mems.clone(),
            mems_effective,
        }
    }

    fn in_scope(&self, scope: &Scope) -> BTreeSet<Ix> {
        let mut found = BTreeSet::from([ROOT]);
        match scope {
            Scope::Named(paths) => found.extend(paths.iter().filter_map(|p| self.find(p).ok())),
            Scope::Around(paths) => {
                for path in paths {
                    let way = path.ancestors().into_iter().chain([path.clone()]);
                    for i in way.filter_map(|p| self.find(&p).ok()) {
                        found.insert(i);
                        found.extend(&self.groups[i].children);
                    }
                }
                found.extend(&self.groups[ROOT].children);
            }
        }
        found
    }
}

impl Kernel for FakeKernel {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        if self.crashed {
            return Err(dead("observe".into()));
        }
        let cgroups: BTreeMap<_, _> = self
            .in_scope(scope)
            .into_iter()
            .map(|i| (self.groups[i].path.clone(), self.observe_one(i)))
            .collect();
        Ok(Observed { cgroups, online: self.active.clone(), ..Observed::default() })
    }

    fn apply(&mut self, step: &Step) -> Result<(), KernelError> {
        if self.crashed {
            return Err(dead(target(step)));
        }
        let fault = self.faults.remove(&self.applies);
        self.applies += 1;
        match fault {
            None => self.perform(step),
            Some(Fault::Fail(errno)) => Err(error(step, None, errno)),
            Some(Fault::CrashBefore) => Err(self.crash(target(step))),
            Some(Fault::CrashAfter) => {
                // Dead before it could learn the result.
                let _ = self.perform(step);
                Err(self.crash(target(step)))
            }
            Some(Fault::Foreign { path, file, text }) => {
                let _ = self.write_file(&path, &file, &text);
                self.perform(step)
            }
        }
    }
}

fn target(step: &Step) -> String {
    match step {
        Step::Create(path) | Step::Remove(path) => path.to_string(),
        Step::Enable(path) => format!("{path}/cgroup.subtree_control"),
        Step::Write { path, file, .. } => format!("{path}/{file}"),
        Step::Enter { path, .. } => format!("{path}/cgroup.procs"),
    }
}

fn dead(target: String) -> KernelError {
    let cause = "the agent is dead".into();
    KernelError { operation: CRASH, target, value: None, errno: None, cause }
}

fn error(step: &Step, value: Option<String>, errno: Errno) -> KernelError {
    let operation = match step {
        Step::Create(_) => "mkdir",
        Step::Remove(_) => "rmdir",
        Step::Enable(_) | Step::Write { .. } | Step::Enter { .. } => "write",
    };
    let (target, cause) = (target(step), errno.words().into());
    KernelError { operation, target, value, errno: Some(errno.0), cause }
}
