//! *Who* writes cgroup files.
//!
//! Problem: that a file changed is soon known (`watch`); who did it is known to the kernel alone, and only at that moment.
//! Means, the best that the kernel takes: a hook on the write itself (fexit, else kprobe: `bpf::WriteHook`), which names
//! the writer, its cgroup and what it wrote, also when it is gone at once; else fanotify, which tells the pid; else none.
//! Each is optional: what it lacks is said in the status, and nothing but names depends on it.
//! Invariant: what [`Writers::look`] says of writes that it did not tell is true: it looks for writes under way before it
//! takes the records of those that have ended.

mod fanotify;

use crate::{
    bpf::{BpfError, Hook, WriteHook, Written},
    cgroup_id::Ids,
    store::chain,
};
use fanotify::{FanotifyError, Marks};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};
use truepin::{
    CgroupFile, CgroupId, CgroupPath,
    reconcile::{ForeignWrite, Interest, Sight, Writer},
};

/// How writers are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// By programs at the kernel's function.
    Hook(Hook),
    /// By events, and what `/proc` says when they are read.
    Fanotify,
}

impl Means {
    /// The best first.
    pub const ALL: [Self; 3] = [Self::Hook(Hook::Fexit), Self::Hook(Hook::Kprobe), Self::Fanotify];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hook(hook) => hook.name(),
            Self::Fanotify => "fanotify",
        }
    }
}

/// Means that stopped working.
#[derive(Debug, thiserror::Error)]
pub enum WritersError {
    /// The hook.
    #[error(transparent)]
    Hook(#[from] BpfError),
    /// fanotify.
    #[error(transparent)]
    Fanotify(#[from] FanotifyError),
}

#[derive(Debug)]
enum Source {
    Hook(Box<WriteHook>),
    Fanotify(Marks),
    None,
}

/// The means in force.
#[derive(Debug)]
pub struct Writers {
    source: Source,
    refused: Vec<String>,
    /// `None` where the mount could not be opened: then only cgroups that were just read have paths.
    ids: Option<Ids>,
    watched: BTreeMap<CgroupPath, (CgroupId, Interest)>,
    lost: u64,
    /// Reading failed; said once.
    failed: bool,
}

impl Writers {
    /// Nobody is named, because of `why`.
    #[must_use]
    pub fn none(why: String) -> Self {
        let (source, refused, watched) = (Source::None, vec![why], BTreeMap::new());
        Self { source, refused, ids: None, watched, lost: 0, failed: false }
    }

    /// `hook` if there is one, else fanotify if it is `allowed`. `refused`: why better means are not in force.
    #[must_use]
    pub fn new(root: &Path, hook: Option<WriteHook>, allowed: bool, mut refused: Vec<String>) -> Self {
        let source = match hook {
            Some(hook) => Source::Hook(Box::new(hook)),
            None if allowed => match Marks::new(root) {
                Ok(marks) => Source::Fanotify(marks),
                Err(error) => {
                    refused.push(chain(&error));
                    Source::None
                }
            },
            None => Source::None,
        };
        let ids = Ids::new(root).ok();
        Self { source, refused, ids, watched: BTreeMap::new(), lost: 0, failed: false }
    }

    /// What is in force.
    #[must_use]
    pub fn means(&self) -> Option<Means> {
        match &self.source {
            Source::Hook(hook) => Some(Means::Hook(hook.hook())),
            Source::Fanotify(_) => Some(Means::Fanotify),
            Source::None => None,
        }
    }

    /// Why no better means are.
    #[must_use]
    pub fn refused(&self) -> &[String] {
        &self.refused
    }

    /// Writes that could not be told, since the start.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Readable when somebody wrote.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::Hook(hook) => Some(hook.as_fd()),
            Source::Fanotify(marks) => Some(marks.as_fd()),
            Source::None => None,
        }
    }

    /// Makes these the watched cgroups. True if other writes are told now than before.
    pub fn watch(
        &mut self,
        cgroups: BTreeMap<CgroupPath, (CgroupId, Interest)>,
    ) -> Result<bool, WritersError> {
        let changed = self.watched != cgroups;
        match &mut self.source {
            Source::Hook(hook) => hook.watch(cgroups.values().copied())?,
            Source::Fanotify(marks) => marks.set(cgroups.keys())?,
            Source::None => return Ok(false),
        }
        self.watched = cgroups;
        Ok(changed)
    }

    /// Adds the writes of others that have ended since the last call; `now_ns` is `CLOCK_MONOTONIC`.
    pub fn drain(&mut self, now_ns: u64, into: &mut Vec<ForeignWrite>) -> Result<(), WritersError> {
        let from = into.len();
        match &mut self.source {
            Source::Hook(hook) => {
                let (ids, watched) = (self.ids.as_ref(), &self.watched);
                hook.drain(|written| into.extend(foreign(written, &|id| path_of(ids, watched, id))))?;
            }
            Source::Fanotify(marks) => {
                let drained = marks.drain(now_ns, into);
                self.lost = marks.lost;
                drained?;
            }
            Source::None => {}
        }
        // fanotify tells everything in a directory, and the kernel half what its names' first letters let through.
        let wanted = |w: &ForeignWrite| match w.file {
            Some(CgroupFile::Procs | CgroupFile::Threads) => {
                self.watched.get(&w.path).is_some_and(|(_, interest)| interest.tasks)
            }
            _ => true,
        };
        let told = into.split_off(from).into_iter().filter(wanted).collect::<Vec<_>>();
        into.extend(told);
        Ok(())
    }

    /// The same, and what can be said of the writes that are not among them.
    pub fn look(&mut self, now_ns: u64, into: &mut Vec<ForeignWrite>) -> Sight {
        let looked = self.try_look(now_ns, into);
        let failed = looked.is_err();
        if let Err(error) = &looked
            && !self.failed
        {
            tracing::warn!("{}; writers of files stay unknown", chain(error));
        }
        self.failed = failed;
        looked.unwrap_or_default()
    }

    fn try_look(&mut self, now_ns: u64, into: &mut Vec<ForeignWrite>) -> Result<Sight, WritersError> {
        let sight = match &mut self.source {
            Source::Hook(hook) => {
                if hook.is_writing(now_ns)? {
                    Sight::UnderWay
                } else {
                    Sight::Whole
                }
            }
            Source::Fanotify(_) => Sight::Trailing,
            Source::None => return Ok(Sight::Blind),
        };
        self.drain(now_ns, into)?;
        if let Source::Hook(hook) = &mut self.source {
            self.lost = hook.lost()?;
        }
        Ok(sight)
    }
}

/// The path of a cgroup: of one that is watched, or of any that is there.
fn path_of(
    ids: Option<&Ids>,
    watched: &BTreeMap<CgroupPath, (CgroupId, Interest)>,
    id: CgroupId,
) -> Option<CgroupPath> {
    let known = watched.iter().find(|(_, (known, _))| *known == id).map(|(path, _)| path.clone());
    known.or_else(|| match ids?.path(id) {
        Ok(path) => path,
        Err(error) => {
            tracing::debug!("cgroup {id}: {error}");
            None
        }
    })
}

/// A record in the core's words; `None` if the file's cgroup is gone, and with it whatever was written.
fn foreign(w: Written, path_of: &dyn Fn(CgroupId) -> Option<CgroupPath>) -> Option<ForeignWrite> {
    let path = path_of(w.cgroup)?;
    let writer = Writer {
        pid: w.pid,
        comm: w.comm,
        cgroup: path_of(w.by),
        cgroup_id: Some(w.by),
        certain: true,
        wrote: w.text,
        begun_ns: w.begun_ns,
        ended_ns: w.ended_ns,
    };
    Some(ForeignWrite { path, file: Some(w.file), writer: Some(writer) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use truepin::CpusetFile;

    #[test]
    fn a_writer_whose_cgroup_is_gone_keeps_its_id() {
        let written = |cgroup| Written {
            cgroup: CgroupId(cgroup),
            file: CpusetFile::Cpus.into(),
            text: Some("0-3".into()),
            pid: 7,
            comm: "meddler".into(),
            by: CgroupId(2),
            begun_ns: 10,
            ended_ns: 20,
        };
        let paths = |id: CgroupId| (id.0 == 1).then(|| "a".parse().unwrap());
        let write = foreign(written(1), &paths).unwrap();
        let writer = write.writer.unwrap();
        assert_eq!((write.path.as_str(), write.file), ("a", Some(CpusetFile::Cpus.into())));
        assert_eq!(writer.to_string(), "meddler (pid 7, cgroup #2, removed since)");
        assert_eq!((writer.begun_ns, writer.ended_ns, writer.certain), (10, 20, true));
        assert_eq!(foreign(written(3), &paths), None, "nothing is left of the file");
    }
}
