//! The means where the kernel takes no hook: fanotify.
//!
//! One mark on each watched directory, in the mode in which events carry a file descriptor. It works on every kernel from
//! 6.1 on, tells the writer's pid also when the writer is gone at once, and says nothing of what the kernel changes by
//! itself: a change of which inotify tells and this does not is the kernel's. The newer mode, with file handles
//! (`FAN_REPORT_DFID_NAME | FAN_REPORT_PIDFD`), is refused on 6.1, tells the kernel's own changes too, as some kworker's,
//! and gives no name of a writer that is gone before 7.x: nothing that is wanted here.
//! Name and cgroup are read from `/proc` when the event is read: hints, because a shell has often become the next program
//! by then. `FAN_MODIFY` alone: a refused value raises only `FAN_CLOSE_WRITE`. An event comes after its write has ended,
//! so there is no telling that none is under way.

use crate::procfs;
use nix::sys::fanotify::{EventFFlags, Fanotify, FanotifyEvent, InitFlags, MarkFlags, MaskFlags};
use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};
use truepin::{
    CgroupFile, CgroupPath,
    reconcile::{ForeignWrite, Writer},
};

/// A write may have begun so long before it was known to be not over. On hardware it takes a millisecond at most.
const LONG_WRITE_NS: u64 = 250_000_000;

/// fanotify refused.
#[derive(Debug, thiserror::Error)]
#[error("fanotify: {operation} {target}")]
pub struct FanotifyError {
    operation: &'static str,
    target: String,
    source: nix::Error,
}

/// Marks on cgroup directories.
#[derive(Debug)]
pub(super) struct Marks {
    fanotify: Fanotify,
    marked: BTreeSet<CgroupPath>,
    root: PathBuf,
    /// When there were no more events.
    empty_ns: u64,
    /// Overflows of the queue.
    pub(super) lost: u64,
}

const MASK: MaskFlags = MaskFlags::FAN_MODIFY.union(MaskFlags::FAN_EVENT_ON_CHILD);

impl Marks {
    /// Needs `CAP_SYS_ADMIN`.
    pub(super) fn new(root: &Path) -> Result<Self, FanotifyError> {
        let fanotify = Fanotify::init(
            InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_NONBLOCK | InitFlags::FAN_CLOEXEC,
            EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC,
        )
        .map_err(|source| FanotifyError { operation: "init", target: String::new(), source })?;
        Ok(Self { fanotify, marked: BTreeSet::new(), root: root.into(), empty_ns: 0, lost: 0 })
    }

    /// Makes `paths` the marked cgroups.
    pub(super) fn set<'a>(
        &mut self,
        paths: impl Iterator<Item = &'a CgroupPath>,
    ) -> Result<(), FanotifyError> {
        let wanted: BTreeSet<CgroupPath> = paths.cloned().collect();
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
                    return Err(FanotifyError { operation: "mark", target, source });
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

    /// Adds the writes of others since the last call; `now_ns` is `CLOCK_MONOTONIC`.
    pub(super) fn drain(&mut self, now_ns: u64, into: &mut Vec<ForeignWrite>) -> Result<(), FanotifyError> {
        let begun_ns = self.empty_ns.saturating_sub(LONG_WRITE_NS);
        loop {
            let events = match self.fanotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => break,
                // An event of a file that is gone meanwhile; the next ones may be of others.
                Err(nix::Error::ENODEV | nix::Error::ENOENT) => continue,
                Err(source) => {
                    return Err(FanotifyError { operation: "read", target: String::new(), source });
                }
            };
            if events.is_empty() {
                break;
            }
            for event in events {
                if event.mask().contains(MaskFlags::FAN_Q_OVERFLOW) {
                    self.lost += 1;
                }
                into.extend(self.write(&event, begun_ns, now_ns));
            }
        }
        self.empty_ns = now_ns;
        Ok(())
    }

    fn write(&self, event: &FanotifyEvent, begun_ns: u64, ended_ns: u64) -> Option<ForeignWrite> {
        let pid = event.pid().cast_unsigned();
        let fd = event.fd().filter(|_| pid != std::process::id())?;
        // The descriptor's path at this time; a file that is gone reads as "… (deleted)" and matches nothing.
        let path = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        let (path, file) = self.place(&path)?;
        let (comm, cgroup) = procfs::who(pid);
        let comm = comm.unwrap_or_else(|| "gone".into());
        let writer =
            Writer { pid, comm, cgroup, cgroup_id: None, certain: false, wrote: None, begun_ns, ended_ns };
        Some(ForeignWrite { path, file: Some(file), writer: Some(writer) })
    }

    fn place(&self, path: &Path) -> Option<(CgroupPath, CgroupFile)> {
        let file = CgroupFile::of_name(path.file_name()?.to_str()?)?;
        let dir = path.parent()?.strip_prefix(&self.root).ok()?;
        Some((dir.to_str()?.parse().ok()?, file))
    }
}

impl AsFd for Marks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fanotify.as_fd()
    }
}
