//! *Who* writes cgroup files.
//!
//! Problem: that a file changed is soon known (`watch`); who did it is known to the kernel alone, and only at that moment.
//! Means, the best that the kernel takes: a hook on the write itself (fexit, else kprobe: `bpf::WriteHook`), which names
//! the writer, its cgroup and what it wrote, also when it is gone at once; else fanotify, which tells the pid; else none.
//! Each is optional: what it lacks is said in the status, and nothing but names depends on it.
//! Invariant: what [`Writers::look`] says of writes that it did not tell is true: it looks for writes under way before it
//! takes the records of those that have ended, and while not every cgroup is watched it says that it is blind.

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
    /// The hook's table of cgroups is full.
    #[error("{left_out} cgroups are more than can be watched")]
    Room {
        /// These are not watched.
        left_out: usize,
    },
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
    /// Why not all of `watched` are; said once, until they are.
    unwatched: Option<String>,
    lost: u64,
    /// Reading failed; said once.
    failed: bool,
}

impl Writers {
    /// Nobody is named, because of `why`.
    #[must_use]
    pub fn none(why: String) -> Self {
        let (source, refused, watched) = (Source::None, vec![why], BTreeMap::new());
        Self { source, refused, ids: None, watched, unwatched: None, lost: 0, failed: false }
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
        Self { source, refused, ids, watched: BTreeMap::new(), unwatched: None, lost: 0, failed: false }
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

    /// Why no better means are, and why the one in force does not see everything.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        self.refused.iter().chain(&self.unwatched).cloned().collect()
    }

    /// Writes that could not be told, since the start.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The path of a cgroup that is there.
    #[must_use]
    pub fn path(&self, id: CgroupId) -> Option<CgroupPath> {
        path_of(self.ids.as_ref(), &self.watched, id)
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

    /// Makes these the watched cgroups, as far as possible. True if other writes are told now than before.
    pub fn watch(&mut self, cgroups: BTreeMap<CgroupPath, (CgroupId, Interest)>) -> bool {
        let done = match &mut self.source {
            Source::Hook(hook) => match hook.watch(&ranked(&cgroups)) {
                Ok(0) => Ok(()),
                Ok(left_out) => Err(WritersError::Room { left_out }),
                Err(error) => Err(error.into()),
            },
            Source::Fanotify(marks) => marks.set(cgroups.keys()).map_err(Into::into),
            Source::None => return false,
        };
        let before = self.unwatched.take();
        if let Err(error) = done {
            let why = chain(&error);
            if before.is_none() {
                tracing::warn!("{why}; writers of these files stay unknown");
            }
            self.unwatched = Some(why);
        }
        let changed = self.watched != cgroups || before.is_some() && self.unwatched.is_none();
        self.watched = cgroups;
        changed
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
        Ok(if self.unwatched.is_some() { Sight::Blind } else { sight })
    }
}

/// What the hook has to be told, what matters most first: owners and what lies above them, then what lies within those that
/// truepin made, then the rest. A cgroup of which no more is of interest than of any below its parent is left out: the
/// kernel half looks at the parent too.
fn ranked(cgroups: &BTreeMap<CgroupPath, (CgroupId, Interest)>) -> Vec<(CgroupId, Interest)> {
    let told_above = |path: &CgroupPath| {
        let above = path.parent().and_then(|up| cgroups.get(&up));
        above.is_some_and(|(_, interest)| interest.children)
    };
    let mut all: Vec<_> = cgroups
        .iter()
        .filter(|(path, (_, interest))| *interest != Interest::default() || !told_above(path))
        .map(|(_, watched)| *watched)
        .collect();
    all.sort_by_key(|(_, interest)| match interest {
        Interest { children: true, .. } => 0,
        Interest { tasks: true, .. } => 1,
        _ => 2,
    });
    all
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
    fn owners_come_first_and_what_their_parents_tell_is_left_out() {
        let of = |tasks, children| Interest { tasks, children };
        let cgroups = [
            ("", 1, of(false, true)),
            ("a", 2, of(false, false)),
            ("a/b", 3, of(false, false)),
            ("truepin.slice", 4, of(false, true)),
            ("truepin.slice/run-x", 9, of(true, true)),
            ("truepin.slice/run-x/inner", 10, of(true, false)),
            ("truepin.slice/y", 8, of(false, false)),
        ];
        let cgroups =
            cgroups.into_iter().map(|(path, id, i)| (path.parse().unwrap(), (CgroupId(id), i))).collect();
        let order: Vec<u64> = ranked(&cgroups).into_iter().map(|(id, _)| id.0).collect();
        assert_eq!(order, [1, 4, 9, 10, 3]);
    }

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
