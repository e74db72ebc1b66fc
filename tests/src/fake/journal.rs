//! What was done to a fake kernel, by whomever, as the lines of a script: so that a real kernel can do it as well.
//!
//! A journal begins on a kernel that nobody but its maker has touched. Processes are `p1`, `p2`, … in the order in
//! which they came; what came before the journal has no name, and what is done to it is left out.

use super::{Errno, FakeKernel, INIT, script::SELF};
use std::collections::BTreeMap;
use truepin::{CgroupPath, CpuId, CpuSet};

/// The lines so far, and the names of threads by their ids.
#[derive(Debug, Clone, Default)]
pub(super) struct Journal {
    lines: Vec<String>,
    names: BTreeMap<u32, String>,
    processes: usize,
}

impl FakeKernel {
    /// Writes down from here on what is done.
    #[must_use]
    pub fn with_journal(mut self) -> Self {
        let names = BTreeMap::from([(INIT, SELF.into())]);
        self.journal = Some(Journal { names, ..Journal::default() });
        self
    }

    /// What was done since, one line each; empty without a journal.
    #[must_use]
    pub fn journal(&self) -> &[String] {
        self.journal.as_ref().map_or(&[], |j| &j.lines)
    }

    pub(super) fn note_directory(&mut self, what: &str, path: &CgroupPath) {
        self.write_down(|_| Some(format!("{what} {}", path.as_str())));
    }

    pub(super) fn note_write(&mut self, path: &CgroupPath, file: &str, text: &str) {
        let pid = text.trim().parse::<u32>().ok();
        let dir = if path.is_root() { String::new() } else { format!("{}/", path.as_str()) };
        self.write_down(|names| match (file, pid) {
            ("cgroup.procs", Some(pid)) => Some(format!("move {} {}", names.get(&pid)?, shown(path))),
            ("cgroup.threads", Some(pid)) => Some(format!("thread {} {}", names.get(&pid)?, shown(path))),
            // A write of no bytes; a script's writes have a newline.
            _ if text.is_empty() => None,
            _ => Some(format!("{dir}{file} = {}", text.trim())),
        });
    }

    /// A process has come, or was refused and is gone again.
    pub(super) fn note_spawn(&mut self, path: &CgroupPath, threads: u32, leader: Result<u32, Errno>) {
        let Some(journal) = &mut self.journal else { return };
        journal.processes += 1;
        let name = format!("p{}", journal.processes);
        let count = if threads > 1 { format!(" {threads}") } else { String::new() };
        journal.lines.push(format!("spawn {name} {}{count}", shown(path)));
        for (nth, thread) in leader.into_iter().flat_map(|leader| leader..leader + threads.max(1)).enumerate()
        {
            let label = if nth == 0 { name.clone() } else { format!("{name}:{nth}") };
            journal.names.insert(thread, label);
        }
    }

    pub(super) fn note_exit(&mut self, process: u32) {
        self.write_down(|names| names.get(&process).map(|name| format!("exit {name}")));
    }

    pub(super) fn note_pin(&mut self, thread: u32, cpus: &CpuSet) {
        self.write_down(|names| names.get(&thread).map(|name| format!("pin {name} {cpus}")));
    }

    pub(super) fn note_cpu(&mut self, cpu: CpuId, online: bool) {
        self.write_down(|_| Some(format!("cpu {cpu} {}", if online { "on" } else { "off" })));
    }

    fn write_down(&mut self, line: impl FnOnce(&BTreeMap<u32, String>) -> Option<String>) {
        if let Some(journal) = &mut self.journal {
            journal.lines.extend(line(&journal.names));
        }
    }
}

fn shown(path: &CgroupPath) -> &str {
    if path.is_root() { "/" } else { path.as_str() }
}
