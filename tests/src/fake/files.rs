//! Text in, text out: every file of a cgroup directory that the model has.

use super::{Errno, FakeKernel, Ix, ROOT, State, tree};
use std::fmt::Write as _;
use truepin::{CgroupPath, observed::CgroupKind};

/// Files of every cgroup; the last two are absent on the root.
const CORE: [&str; 6] = [
    "cgroup.controllers",
    "cgroup.procs",
    "cgroup.subtree_control",
    "cgroup.threads",
    "cgroup.events",
    "cgroup.type",
];
/// Files of a cgroup with a cpuset, and whether the root has them.
const CPUSET: [(&str, bool); 7] = [
    ("cpuset.cpus", false),
    ("cpuset.cpus.effective", true),
    ("cpuset.cpus.exclusive", false),
    ("cpuset.cpus.exclusive.effective", false),
    ("cpuset.cpus.partition", false),
    ("cpuset.mems", false),
    ("cpuset.mems.effective", true),
];

/// Whether the directory has such a file.
pub(super) fn exists(kernel: &FakeKernel, i: Ix, name: &str) -> bool {
    if i == ROOT {
        let core = CORE[..4].contains(&name);
        let isolated = name == "cpuset.cpus.isolated" && kernel.behaviour.exclusive_file;
        return core || isolated || CPUSET.contains(&(name, true));
    }
    if CORE.contains(&name) {
        return true;
    }
    let known = CPUSET.iter().any(|(n, _)| *n == name);
    let newer = name.starts_with("cpuset.cpus.exclusive");
    known && kernel.groups[i].has_cpuset && (kernel.behaviour.exclusive_file || !newer)
}

impl FakeKernel {
    /// One `write(2)` of `text` to a file. An empty `text` is a write of no bytes, which succeeds and changes
    /// nothing: what empties a list is a newline.
    pub fn write_file(&mut self, path: &CgroupPath, name: &str, text: &str) -> Result<(), Errno> {
        self.note_write(path, name, text);
        let i = self.find(path)?;
        if !exists(self, i, name) {
            return Err(Errno::ENOENT);
        }
        if text.is_empty() {
            return Ok(());
        }
        let text = text.trim();
        match name {
            "cpuset.cpus" => self.write_cpus(i, text),
            "cpuset.cpus.exclusive" => self.write_exclusive(i, text),
            "cpuset.cpus.partition" => self.write_partition(i, text),
            "cpuset.mems" => self.write_mems(i, text),
            "cgroup.subtree_control" => self.control(i, text),
            "cgroup.procs" | "cgroup.threads" => {
                let pid = text.parse().map_err(|_| Errno::EINVAL)?;
                self.move_in(path, pid, name == "cgroup.procs")
            }
            "cgroup.type" if text == "threaded" => self.make_threaded(i),
            // The files without a write handler have no write permission; root gets EINVAL from the core.
            _ => Err(Errno::EINVAL),
        }
    }

    /// A file's text, with its last newline.
    pub fn read_file(&self, path: &CgroupPath, name: &str) -> Result<String, Errno> {
        let i = self.find(path)?;
        if !exists(self, i, name) {
            return Err(Errno::ENOENT);
        }
        let (group, cs) = (&self.groups[i], self.cs(i));
        let mut text = match name {
            "cpuset.cpus" => cs.cpus.to_string(),
            "cpuset.cpus.effective" => cs.effective.to_string(),
            "cpuset.cpus.exclusive" => cs.exclusive.to_string(),
            "cpuset.cpus.exclusive.effective" => cs.granted.to_string(),
            "cpuset.cpus.partition" => self.partition_line(i),
            "cpuset.cpus.isolated" => self.isolated.to_string(),
            "cpuset.mems" => cs.mems.to_string(),
            "cpuset.mems.effective" => cs.mems_effective.to_string(),
            "cgroup.controllers" => controllers(self.available(i)),
            "cgroup.subtree_control" => controllers(group.enabled),
            "cgroup.events" => format!("populated {}\nfrozen 0", u8::from(self.populated(i))),
            "cgroup.threads" => lines(self.tasks.iter().filter(|(_, t)| t.group == i).map(|(id, _)| id)),
            "cgroup.procs" if group.threaded => return Err(Errno::EOPNOTSUPP),
            "cgroup.procs" => lines(&self.processes(i)),
            "cgroup.type" => match self.kind(i) {
                CgroupKind::Domain => "domain",
                CgroupKind::DomainThreaded => "domain threaded",
                CgroupKind::DomainInvalid => "domain invalid",
                CgroupKind::Threaded => "threaded",
            }
            .into(),
            _ => return Err(Errno::EIO),
        };
        if !(text.is_empty() && name.starts_with("cgroup.") && name != "cgroup.subtree_control") {
            text.push('\n');
        }
        Ok(text)
    }

    fn partition_line(&self, i: Ix) -> String {
        let cs = self.cs(i);
        let kind = cs.state.kind();
        match (cs.state, cs.reason) {
            (State::Invalid(_), Some(reason)) => format!("{kind} invalid ({})", reason.words()),
            (State::Invalid(_), None) => format!("{kind} invalid"),
            _ => kind.to_string(),
        }
    }

    /// The processes of a domain: those whose leader is in it or in a threaded cgroup of it.
    pub(super) fn processes(&self, i: Ix) -> Vec<u32> {
        let leads = |(id, t): &(&u32, &super::Task)| **id == t.process && self.domain_of(t.group) == i;
        self.tasks.iter().filter(leads).map(|(id, _)| *id).collect()
    }
}

fn lines<'a>(ids: impl IntoIterator<Item = &'a u32>) -> String {
    let mut text = String::new();
    for id in ids {
        let separator = if text.is_empty() { "" } else { "\n" };
        // Writing to a string does not fail.
        let _ = write!(text, "{separator}{id}");
    }
    text
}

fn controllers(bits: u8) -> String {
    let on = tree::CONTROLLERS.iter().enumerate().filter(|(b, _)| bits >> b & 1 == 1);
    on.map(|(_, (name, _))| *name).collect::<Vec<_>>().join(" ")
}
