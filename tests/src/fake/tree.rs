//! Directories, controllers and threaded mode (`kernel/cgroup/cgroup.c`).
//!
//! cpuset is a threaded controller: enabling it below a cgroup that has tasks succeeds and makes that cgroup the
//! root of a threaded domain, in which ordinary children take no process. A domain controller refuses instead.

use super::{Cpuset, Errno, FakeKernel, Group, Ix, ROOT};
use truepin::{CgroupId, CgroupPath, observed::CgroupKind, partition::PartitionKind};

/// The controllers that the model knows, by bit, and whether they work inside a threaded domain.
pub(super) const CONTROLLERS: [(&str, bool); 5] =
    [("cpuset", true), ("cpu", true), ("io", false), ("memory", false), ("pids", true)];
pub(super) const CPUSET: u8 = 1;
const THREADED: u8 = 0b1_0011;

impl FakeKernel {
    /// `mkdir`
    pub fn mkdir(&mut self, path: &CgroupPath) -> Result<(), Errno> {
        self.note_directory("mkdir", path);
        let Some(parent) = path.parent() else { return Err(Errno::EEXIST) };
        let up = self.find(&parent)?;
        if self.paths.contains_key(path) || super::files::exists(self, up, path.name()) {
            return Err(Errno::EEXIST);
        }
        let group = Group {
            path: path.clone(),
            id: CgroupId(self.next_id),
            parent: up,
            children: Vec::new(),
            enabled: 0,
            threaded: false,
            tasks_here: 0,
            tasks_below: 0,
            has_cpuset: self.groups[up].enabled & CPUSET != 0,
            binds: self.groups[up].enabled & CPUSET != 0,
            cs: Cpuset::below(self.cs(up)),
        };
        self.next_id += 1;
        let i = if let Some(i) = self.free.pop() {
            self.groups[i] = group;
            i
        } else {
            self.groups.push(group);
            self.groups.len() - 1
        };
        self.groups[up].children.push(i);
        self.paths.insert(path.clone(), i);
        Ok(())
    }

    /// `rmdir`
    pub fn rmdir(&mut self, path: &CgroupPath) -> Result<(), Errno> {
        self.note_directory("rmdir", path);
        let i = self.find(path)?;
        if i == ROOT || self.groups[i].tasks_below > 0 || !self.groups[i].children.is_empty() {
            return Err(Errno::EBUSY);
        }
        self.kill_cpuset(i);
        self.paths.remove(path);
        let up = self.parent(i);
        self.groups[up].children.retain(|c| *c != i);
        self.free.push(i);
        Ok(())
    }

    /// The cpuset part goes: a partition becomes a member first, so that its CPUs return.
    fn kill_cpuset(&mut self, i: Ix) {
        if self.groups[i].has_cpuset && self.cs(i).state.is_valid() {
            self.set_partition(i, PartitionKind::Member);
        }
        // An invalid partition that still holds CPUs of the root keeps them for ever: the root does not get
        // them back when such a cgroup is removed. Write `member` first.
        self.remotes.retain(|r| *r != i);
        (self.groups[i].has_cpuset, self.groups[i].binds) = (false, false);
    }

    /// Whether a process lives in `i` or below.
    pub(super) fn populated(&self, i: Ix) -> bool {
        self.groups[i].tasks_below > 0
    }

    fn populated_domain_children(&self, i: Ix) -> bool {
        self.groups[i].children.iter().any(|c| !self.groups[*c].threaded && self.populated(*c))
    }

    /// The cgroup whose resources the threads of `i` share.
    pub(super) fn domain_of(&self, mut i: Ix) -> Ix {
        while self.groups[i].threaded {
            i = self.parent(i);
        }
        i
    }

    fn can_be_thread_root(&self, i: Ix) -> bool {
        i == ROOT
            || !self.groups[i].threaded
                && !self.populated_domain_children(i)
                && self.groups[i].enabled & !THREADED == 0
    }

    fn is_thread_root(&self, i: Ix) -> bool {
        let group = &self.groups[i];
        !group.threaded
            && (group.children.iter().any(|c| self.groups[*c].threaded)
                || group.tasks_here > 0 && group.enabled & THREADED != 0)
    }

    /// A domain whose ancestors are all domains that may have domain children.
    fn is_valid_domain(&self, i: Ix) -> bool {
        let mut up = i;
        if self.groups[i].threaded {
            return false;
        }
        while up != ROOT {
            up = self.parent(up);
            if self.groups[up].threaded || up != ROOT && self.is_thread_root(up) {
                return false;
            }
        }
        true
    }

    /// `cgroup.type`
    pub(super) fn kind(&self, i: Ix) -> CgroupKind {
        if i == ROOT {
            CgroupKind::Domain
        } else if self.groups[i].threaded {
            CgroupKind::Threaded
        } else if !self.is_valid_domain(i) {
            CgroupKind::DomainInvalid
        } else if self.is_thread_root(i) {
            CgroupKind::DomainThreaded
        } else {
            CgroupKind::Domain
        }
    }

    /// Whether a process may be written into `i`.
    pub(super) fn may_host(&self, i: Ix) -> Result<(), Errno> {
        if !self.is_valid_domain(self.domain_of(i)) {
            return Err(Errno::EOPNOTSUPP);
        }
        if self.can_be_thread_root(i) || self.groups[i].threaded || self.groups[i].enabled == 0 {
            return Ok(());
        }
        Err(Errno::EBUSY)
    }

    /// `threaded` into `cgroup.type`
    pub(super) fn make_threaded(&mut self, i: Ix) -> Result<(), Errno> {
        if self.groups[i].threaded {
            return Ok(());
        }
        let domain = self.domain_of(self.parent(i));
        let switchable = !self.populated(i)
            && self.groups[i].enabled & !THREADED == 0
            && self.is_valid_domain(domain)
            && self.can_be_thread_root(domain);
        if !switchable {
            return Err(Errno::EOPNOTSUPP);
        }
        self.groups[i].threaded = true;
        Ok(())
    }

    /// The controllers that may be enabled in `i`.
    pub(super) fn available(&self, i: Ix) -> u8 {
        if i == ROOT {
            return (1 << CONTROLLERS.len()) - 1;
        }
        let given = self.groups[self.parent(i)].enabled;
        if self.groups[i].threaded { given & THREADED } else { given }
    }

    /// A write to `cgroup.subtree_control`.
    pub(super) fn control(&mut self, i: Ix, text: &str) -> Result<(), Errno> {
        let (mut enable, mut disable) = (0_u8, 0_u8);
        for token in text.split(' ').filter(|t| !t.is_empty()) {
            let (sign, name) = token.split_at_checked(1).ok_or(Errno::EINVAL)?;
            let bit = CONTROLLERS.iter().position(|(n, _)| *n == name).ok_or(Errno::EINVAL)?;
            let (on, off) = match sign {
                "+" => (&mut enable, &mut disable),
                "-" => (&mut disable, &mut enable),
                _ => return Err(Errno::EINVAL),
            };
            *on |= 1 << bit;
            *off &= !(1 << bit);
        }
        let now = self.groups[i].enabled;
        for bit in (0..CONTROLLERS.len()).map(|b| 1_u8 << b) {
            if enable & !now & bit != 0 && self.available(i) & bit == 0 {
                return Err(Errno::ENOENT);
            }
            let in_use = || self.groups[i].children.iter().any(|c| self.groups[*c].enabled & bit != 0);
            if disable & now & bit != 0 && in_use() {
                return Err(Errno::EBUSY);
            }
        }
        let (enable, disable) = (enable & !now, disable & now);
        if enable != 0 {
            self.may_enable(i, enable)?;
        }
        // The tasks below change their cpuset, and cannot move into one that has handed out all its CPUs.
        let moves =
            (enable | disable) & CPUSET != 0 && self.groups[i].children.iter().any(|c| self.populated(*c));
        if moves && self.cs(self.cpuset_of(i)).effective.is_empty() {
            return Err(Errno::ENOSPC);
        }
        self.groups[i].enabled = now & !disable | enable;
        if enable & CPUSET != 0 {
            self.give_cpusets(i);
        }
        if disable & CPUSET != 0 {
            self.withdraw_cpusets(i);
        }
        Ok(())
    }

    fn may_enable(&self, i: Ix, enable: u8) -> Result<(), Errno> {
        if !self.is_valid_domain(self.domain_of(i)) {
            return Err(Errno::EOPNOTSUPP);
        }
        if i == ROOT {
            return Ok(());
        }
        if enable & !THREADED != 0 {
            if self.is_thread_root(i) || self.groups[i].threaded {
                return Err(Errno::EOPNOTSUPP);
            }
        } else if self.can_be_thread_root(i) || self.groups[i].threaded {
            return Ok(());
        }
        if self.groups[i].tasks_here > 0 { Err(Errno::EBUSY) } else { Ok(()) }
    }

    /// The children get empty cpusets. That is a migration in which nothing differs: for the tasks nothing changes,
    /// but on 6.1 every migration forgets what they had asked for.
    fn give_cpusets(&mut self, i: Ix) {
        for child in self.groups[i].children.clone() {
            self.groups[child].cs = Cpuset::below(self.cs(i));
            (self.groups[child].has_cpuset, self.groups[child].binds) = (true, true);
            if !self.behaviour.remembers_pins {
                for thread in self.threads_below(child) {
                    self.confine(thread);
                }
            }
        }
    }

    /// The tasks of all children move to the cpuset above in *one* migration, and only then do the children's
    /// partitions end. In 6.12 the migration looks at the first task alone to decide whether masks need a change.
    fn withdraw_cpusets(&mut self, i: Ix) {
        let children = self.cpuset_children(i);
        let mut populated = children.iter().filter(|c| self.populated(**c));
        let moved = if self.behaviour.is_lax() {
            populated.any(|c| self.differs(*c, i))
        } else {
            let always = !self.behaviour.remembers_pins;
            populated.next().is_some_and(|first| self.differs(*first, i) || always)
        };
        for child in &children {
            self.groups[*child].binds = false;
        }
        if moved {
            let threads: Vec<u32> = children.iter().flat_map(|c| self.threads_below(*c)).collect();
            for thread in threads {
                self.confine(thread);
            }
        }
        for child in &children {
            if self.cs(*child).state.is_valid() {
                self.set_partition(*child, PartitionKind::Member);
            }
        }
        for child in children {
            self.groups[child].has_cpuset = false;
        }
    }

    /// Whether moving from the cpuset of `from` to that of `to` changes what a task may use.
    pub(super) fn differs(&self, from: Ix, to: Ix) -> bool {
        let (from, to) = (self.cs(self.cpuset_of(from)), self.cs(self.cpuset_of(to)));
        from.effective != to.effective || from.mems_effective != to.mems_effective
    }

    /// The cgroup whose cpuset binds the tasks of `i`: itself, or the nearest above that has one.
    pub(super) fn cpuset_of(&self, mut i: Ix) -> Ix {
        while !self.groups[i].binds {
            i = self.parent(i);
        }
        i
    }
}
