//! Tasks: where they live and where they may run (`kernel/sched/syscalls.c`, `cpuset_attach`).
//!
//! A task's mask is what some change of its cpuset last applied, narrowed by what the task itself asked for as
//! long as the two intersect. Nothing re-applies it when nothing changes: a mask can be stale, and a test that
//! reads only cgroup files will not see it.

use super::{Errno, FakeKernel, INIT, Ix, ROOT, Task, TaskTraits};
use truepin::{CgroupPath, CpuSet};

impl FakeKernel {
    pub(super) fn new_task(
        &mut self,
        group: Ix,
        process: Option<u32>,
        mask: CpuSet,
        traits: TaskTraits,
        wanted: Option<CpuSet>,
    ) -> u32 {
        let id = self.next_pid;
        self.next_pid += 1;
        let task = Task { process: process.unwrap_or(id), group, wanted, mask, traits };
        self.tasks.insert(id, task);
        self.count(group, 1);
        id
    }

    fn count(&mut self, group: Ix, by: isize) {
        self.groups[group].tasks_here = self.groups[group].tasks_here.saturating_add_signed(by);
        let mut up = group;
        loop {
            self.groups[up].tasks_below = self.groups[up].tasks_below.saturating_add_signed(by);
            if up == ROOT {
                break;
            }
            up = self.parent(up);
        }
    }

    /// A process of `threads` threads: forked from [`INIT`], with its mask, and then written into
    /// `cgroup.procs`. Where that is refused the process is gone again. Its id; its threads' are the next ones.
    pub fn spawn(&mut self, path: &CgroupPath, threads: u32, traits: TaskTraits) -> Result<u32, Errno> {
        self.find(path)?;
        let parent = self.tasks.get(&INIT).cloned().ok_or(Errno::ESRCH)?;
        let leader = self.new_task(parent.group, None, parent.mask.clone(), traits, parent.wanted.clone());
        for _ in 1..threads.max(1) {
            let (mask, wanted) = (parent.mask.clone(), parent.wanted.clone());
            self.new_task(parent.group, Some(leader), mask, traits, wanted);
        }
        let entered = self.move_in(path, leader, true);
        if entered.is_err() {
            self.end(leader)?;
        }
        let spawned = entered.map(|()| leader);
        self.note_spawn(path, threads, spawned);
        spawned
    }

    /// A kernel thread in the root cgroup; `bound` ones sit on one CPU.
    pub fn spawn_kthread(&mut self, bound_to: Option<CpuSet>) -> u32 {
        let traits = TaskTraits { kthread: true, bound: bound_to.is_some(), ..TaskTraits::default() };
        let mask = bound_to.unwrap_or_else(|| self.possible.difference(&self.handed_out));
        self.new_task(ROOT, None, mask, traits, None)
    }

    /// The process ends, with all its threads.
    pub fn exit(&mut self, process: u32) -> Result<(), Errno> {
        self.note_exit(process);
        self.end(process)
    }

    fn end(&mut self, process: u32) -> Result<(), Errno> {
        let threads = self.threads_of(process);
        if threads.is_empty() {
            return Err(Errno::ESRCH);
        }
        for thread in threads {
            if let Some(task) = self.tasks.remove(&thread) {
                self.count(task.group, -1);
            }
        }
        Ok(())
    }

    pub(super) fn threads_of(&self, process: u32) -> Vec<u32> {
        self.tasks.iter().filter(|(_, t)| t.process == process).map(|(id, _)| *id).collect()
    }

    /// The threads in `i` and below, a cgroup's own before its children's.
    pub(super) fn threads_below(&self, i: Ix) -> Vec<u32> {
        let mut found: Vec<u32> =
            self.tasks.iter().filter(|(_, t)| t.group == i).map(|(id, _)| *id).collect();
        found.extend(self.groups[i].children.iter().flat_map(|c| self.threads_below(*c)));
        found
    }

    /// `pid` into `cgroup.procs` (`whole`), or a thread into `cgroup.threads`.
    pub fn enter(&mut self, path: &CgroupPath, pid: u32, whole: bool) -> Result<(), Errno> {
        self.note_write(path, if whole { "cgroup.procs" } else { "cgroup.threads" }, &pid.to_string());
        self.move_in(path, pid, whole)
    }

    pub(super) fn move_in(&mut self, path: &CgroupPath, pid: u32, whole: bool) -> Result<(), Errno> {
        let to = self.find(path)?;
        let task = self.tasks.get(&pid).ok_or(Errno::ESRCH)?;
        let leader = if whole { task.process } else { pid };
        let leading = self.tasks.get(&leader).ok_or(Errno::ESRCH)?;
        if leading.traits.bound {
            return Err(Errno::EINVAL);
        }
        self.may_host(to)?;
        let from = leading.group;
        if !whole && self.domain_of(from) != self.domain_of(to) {
            return Err(Errno::EOPNOTSUPP);
        }
        let mut threads = if whole { self.threads_of(leader) } else { vec![leader] };
        threads.retain(|t| self.tasks.get(t).is_some_and(|t| t.group != to));
        let Some(first) = threads.first().and_then(|t| self.tasks.get(t)) else { return Ok(()) };
        let (first, new) = (first.group, self.cpuset_of(to));
        let crosses =
            threads.iter().any(|t| self.tasks.get(t).is_some_and(|t| self.cpuset_of(t.group) != new));
        if crosses && self.cs(new).effective.is_empty() {
            return Err(Errno::ENOSPC);
        }
        // 6.12 decides for all threads by the first; 7.3 looks at each.
        let differs = |t: &u32| self.tasks.get(t).is_some_and(|t| self.differs(t.group, to));
        let changes = if self.behaviour.is_lax() {
            threads.iter().any(differs)
        } else {
            crosses && (self.differs(first, to) || !self.behaviour.remembers_pins)
        };
        for thread in threads {
            let Some(task) = self.tasks.get_mut(&thread) else { continue };
            let from = std::mem::replace(&mut task.group, to);
            self.count(from, -1);
            self.count(to, 1);
            if changes {
                self.confine(thread);
            }
        }
        Ok(())
    }

    /// What a task that arrives in the cpuset of `i` may use: CPUs of the nearest one that has any online.
    fn allowance(&self, i: Ix) -> CpuSet {
        let mut up = self.cpuset_of(i);
        while up != ROOT && self.cs(up).effective.is_disjoint(&self.active) {
            up = self.parent(up);
        }
        self.cs(up).effective.intersection(&self.active)
    }

    /// Applies the cpuset of the cgroup that the task is in, as an attach does.
    pub(super) fn confine(&mut self, thread: u32) {
        let Some(task) = self.tasks.get(&thread) else { return };
        let allowed = if self.cpuset_of(task.group) != ROOT {
            self.allowance(task.group)
        } else if self.behaviour.is_local_only() {
            // Those of partitions as well, until the next change of the root's set.
            self.possible.clone()
        } else {
            self.possible.difference(&self.handed_out)
        };
        self.set_mask(thread, &allowed);
    }

    /// One change of a mask from the kernel's side; refused silently where nothing of it is usable.
    pub(super) fn set_mask(&mut self, thread: u32, allowed: &CpuSet) {
        let Some(task) = self.tasks.get_mut(&thread) else { return };
        let mut mask = allowed.clone();
        if let Some(wanted) = task.wanted.as_ref().filter(|_| self.behaviour.remembers_pins) {
            let both = mask.intersection(wanted);
            if !both.is_empty() {
                mask = both;
            }
        }
        if task.mask != mask && !mask.is_disjoint(&self.active) {
            task.mask = mask;
        }
    }

    /// Applies a cpuset's effective set to every task that it binds. In the root cgroup masks keep offline CPUs
    /// and lose those that partitions hold.
    pub(super) fn refresh_tasks(&mut self, i: Ix) {
        if self.groups[i].tasks_below == 0 {
            return;
        }
        let bound: Vec<(u32, TaskTraits)> = self
            .tasks
            .iter()
            .filter(|(_, t)| self.cpuset_of(t.group) == i)
            .map(|(id, t)| (*id, t.traits))
            .collect();
        let allowed = if i == ROOT && !self.behaviour.is_local_only() {
            self.possible.difference(&self.handed_out)
        } else {
            self.possible.intersection(&self.cs(i).effective)
        };
        for (thread, traits) in bound {
            let exempt = traits.bound || traits.kthread && self.behaviour.is_lax();
            if i != ROOT || !exempt {
                self.set_mask(thread, &allowed);
            }
        }
    }

    /// `sched_setaffinity` on one thread.
    pub fn setaffinity(&mut self, thread: u32, asked: &CpuSet) -> Result<(), Errno> {
        self.note_pin(thread, asked);
        let task = self.tasks.get(&thread).ok_or(Errno::ESRCH)?;
        if task.traits.bound {
            return Err(Errno::EINVAL);
        }
        // 6.1 allows only what is online in the root cgroup as well.
        let allowed = if self.cpuset_of(task.group) == ROOT && self.behaviour.remembers_pins {
            let free = self.possible.difference(&self.handed_out);
            if free.is_disjoint(&self.active) { self.possible.clone() } else { free }
        } else {
            self.allowance(task.group)
        };
        let mask = asked.intersection(&allowed);
        if mask != task.mask && mask.is_disjoint(&self.active) {
            return Err(Errno::EINVAL);
        }
        if let Some(task) = self.tasks.get_mut(&thread) {
            task.mask = mask;
            task.wanted = Some(asked.intersection(&self.possible));
        }
        Ok(())
    }

    /// `Cpus_allowed_list` of a thread.
    #[must_use]
    pub fn mask(&self, thread: u32) -> Option<&CpuSet> {
        self.tasks.get(&thread).map(|t| &t.mask)
    }

    /// The cgroup of a thread.
    #[must_use]
    pub fn cgroup_of(&self, thread: u32) -> Option<&CgroupPath> {
        self.tasks.get(&thread).map(|t| &self.groups[t.group].path)
    }

    /// All threads.
    pub fn threads(&self) -> impl Iterator<Item = u32> {
        self.tasks.keys().copied()
    }
}
