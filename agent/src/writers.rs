//! *Who* wrote a cgroup file: fanotify.
//!
//! One mark on each watched directory, in the mode in which events carry a file descriptor: it works on every kernel
//! from 6.1 on and tells the writer's pid also when the writer is gone at once. Name and cgroup are read from `/proc` when
//! the event is read: hints, not evidence, because a shell has often become the next program by then. Changes that
//! the kernel makes itself are not reported here. `FAN_MODIFY` alone: a refused value raises only `FAN_CLOSE_WRITE`.

use crate::procfs;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};
use truepin::{
    CgroupPath, CpusetFile,
    reconcile::{ForeignWrite, Writer},
};

/// fanotify refused.
#[derive(Debug, thiserror::Error)]
#[error("fanotify: {operation} {target}")]
pub struct WritersError {
    operation: &'static str,
    target: String,
    source: nix::Error,
}

/// Marks on cgroup directories.
#[derive(Debug)]
pub struct Writers {
    fanotify: Fanotify,
    marked: BTreeSet<CgroupPath>,
    root: PathBuf,
}

const MASK: MaskFlags = MaskFlags::FAN_MODIFY.union(MaskFlags::FAN_EVENT_ON_CHILD);

impl Writers {
    /// Needs `CAP_SYS_ADMIN`.
    pub fn new(root: &Path) -> Result<Self, WritersError> {
        let fanotify = Fanotify::init(
            InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_NONBLOCK | InitFlags::FAN_CLOEXEC,
            EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC,
        )
        .map_err(|source| WritersError { operation: "init", target: String::new(), source })?;
        Ok(Self { fanotify, marked: BTreeSet::new(), root: root.into() })
    }

    /// Makes `paths` the marked cgroups.
    pub fn set(&mut self, paths: &[CgroupPath]) -> Result<(), WritersError> {
        let wanted: BTreeSet<CgroupPath> = paths.iter().cloned().collect();
        for path in self.marked.difference(&wanted) {
            // A directory that is gone took its mark along.
            let _ = self.mark(MarkFlags::FAN_MARK_REMOVE, path);
        }
        // Marked again also when it was: the directory may have been made anew. Repeating a mark changes nothing.
        for path in &wanted {
            match self.mark(MarkFlags::FAN_MARK_ADD, path) {
                Ok(()) | Err(nix::Error::ENOENT | nix::Error::ENODEV) => {}
                Err(source) => {
                    let target = path.to_string();
                    return Err(WritersError { operation: "mark", target, source });
                }
            }
        }
        self.marked = wanted;
        Ok(())
    }

    fn mark(&self, flags: MarkFlags, path: &CgroupPath) -> nix::Result<()> {
        let dir = self.root.join(path.as_str());
        self.fanotify.mark(flags | MarkFlags::FAN_MARK_ONLYDIR, MASK, nix::fcntl::AT_FDCWD, Some(&dir))
    }

    /// Adds the writes of others since the last call.
    pub fn drain(&mut self, into: &mut Vec<ForeignWrite>) -> Result<(), WritersError> {
        let me = std::process::id();
        loop {
            let events = match self.fanotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => return Ok(()),
                // An event of a file that is gone meanwhile; the next ones may be of others.
                Err(nix::Error::ENODEV | nix::Error::ENOENT) => continue,
                Err(source) => return Err(WritersError { operation: "read", target: String::new(), source }),
            };
            if events.is_empty() {
                return Ok(());
            }
            for event in events {
                let pid = event.pid().cast_unsigned();
                let Some(fd) = event.fd().filter(|_| pid != me) else { continue };
                // The descriptor's path at this time; a file that is gone reads as "… (deleted)" and matches nothing.
                let Ok(path) = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) else { continue };
                let Some((path, file)) = self.place(&path) else { continue };
                let (comm, cgroup) = procfs::who(pid);
                let comm = comm.unwrap_or_else(|| "gone".into());
                into.push(ForeignWrite {
                    path,
                    file: Some(file),
                    writer: Some(Writer { pid, comm, cgroup }),
                });
            }
        }
    }

    fn place(&self, path: &Path) -> Option<(CgroupPath, CpusetFile)> {
        let file = CpusetFile::of_name(path.file_name()?.to_str()?)?;
        let dir = path.parent()?.strip_prefix(&self.root).ok()?;
        Some((dir.to_str()?.parse().ok()?, file))
    }
}

impl AsFd for Writers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fanotify.as_fd()
    }
}
