//! *That* something changed: inotify on cgroup directories.
//!
//! The kernel notifies for every `write(2)` to a cgroup file and for its own changes of `cpuset.cpus.partition` and
//! `cgroup.events` (`kernfs_notify`, fs/kernfs/file.c); a watch on the directory gives the file's name. It does not
//! say who: that is `writers`. Nothing tells of changes of `cpuset.cpus.effective`.

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};
use truepin::{CgroupFile, CgroupPath, reconcile::ForeignWrite};

/// inotify refused.
#[derive(Debug, thiserror::Error)]
#[error("inotify: {operation} {target}")]
pub struct WatchError {
    operation: &'static str,
    target: String,
    source: nix::Error,
}

/// Directories of cgroups under watch.
#[derive(Debug)]
pub struct Watch {
    inotify: Inotify,
    descriptors: BTreeMap<CgroupPath, WatchDescriptor>,
    paths: HashMap<WatchDescriptor, CgroupPath>,
}

/// What concerns us in a directory.
const MASK: AddWatchFlags = AddWatchFlags::IN_MODIFY
    .union(AddWatchFlags::IN_CREATE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_ONLYDIR);

impl Watch {
    /// Watches nothing yet.
    pub fn new() -> Result<Self, WatchError> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(|source| WatchError { operation: "init", target: String::new(), source })?;
        Ok(Self { inotify, descriptors: BTreeMap::new(), paths: HashMap::new() })
    }

    /// Makes `wanted` the watched cgroups. One that is gone meanwhile is left out: its parent's watch told.
    pub fn set(&mut self, root: &Path, wanted: &[CgroupPath]) -> Result<(), WatchError> {
        let gone: Vec<CgroupPath> =
            self.descriptors.keys().filter(|p| !wanted.contains(p)).cloned().collect();
        for path in gone {
            if let Some(wd) = self.descriptors.remove(&path) {
                self.paths.remove(&wd);
                // The kernel removed it already when the directory went.
                let _ = self.inotify.rm_watch(wd);
            }
        }
        for path in wanted {
            let dir = root.join(path.as_str());
            match self.inotify.add_watch(&dir, MASK) {
                // The same directory gives the same descriptor; a recreated one a new one.
                Ok(wd) => {
                    if let Some(old) = self.descriptors.insert(path.clone(), wd)
                        && old != wd
                    {
                        self.paths.remove(&old);
                    }
                    self.paths.insert(wd, path.clone());
                }
                Err(nix::Error::ENOENT | nix::Error::ENODEV) => {}
                Err(source) => {
                    return Err(WatchError { operation: "watch", target: dir.display().to_string(), source });
                }
            }
        }
        Ok(())
    }

    /// Adds what happened since the last call; true if anything did that concerns us.
    pub fn drain(&mut self, into: &mut Vec<ForeignWrite>) -> Result<bool, WatchError> {
        let mut any = false;
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => return Ok(any),
                Err(source) => {
                    return Err(WatchError { operation: "read", target: String::new(), source });
                }
            };
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    any = true; // something was lost: look at everything
                    continue;
                }
                let Some(path) = self.paths.get(&event.wd) else { continue };
                let name = event.name.as_deref().and_then(|n| n.to_str()).unwrap_or_default();
                // Whoever comes into a cgroup or leaves it changes no set.
                let file = CgroupFile::of_name(name)
                    .filter(|f| !matches!(f, CgroupFile::Procs | CgroupFile::Threads));
                let of_directory = event.mask.intersects(
                    AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_DELETE_SELF,
                );
                if file.is_some() || of_directory || name == "cgroup.events" {
                    any = true;
                    into.push(ForeignWrite { path: path.clone(), file, writer: None });
                }
                if event.mask.contains(AddWatchFlags::IN_IGNORED)
                    && let Some(path) = self.paths.remove(&event.wd)
                    && self.descriptors.get(&path) == Some(&event.wd)
                {
                    self.descriptors.remove(&path);
                }
            }
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use truepin::CpusetFile;

    #[test]
    fn names_the_file_and_forgets_what_is_gone() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        fs::write(root.path().join("a/cpuset.cpus"), "1").unwrap();
        let paths: Vec<CgroupPath> = ["", "a", "missing"].iter().map(|p| p.parse().unwrap()).collect();
        let mut watch = Watch::new().unwrap();
        watch.set(root.path(), &paths).unwrap();
        let mut seen = Vec::new();
        assert!(!watch.drain(&mut seen).unwrap() && seen.is_empty());

        fs::write(root.path().join("a/cpuset.cpus"), "2").unwrap();
        fs::write(root.path().join("a/other"), "2").unwrap();
        assert!(watch.drain(&mut seen).unwrap());
        assert!(
            seen.iter().any(|w| w.path.as_str() == "a" && w.file == Some(CpusetFile::Cpus.into())),
            "{seen:?}"
        );

        seen.clear();
        fs::remove_dir_all(root.path().join("a")).unwrap();
        assert!(watch.drain(&mut seen).unwrap());
        assert!(seen.iter().any(|w| w.path.is_root() && w.file.is_none()), "{seen:?}");
        fs::create_dir(root.path().join("a")).unwrap();
        watch.set(root.path(), &paths).unwrap();
        seen.clear();
        watch.drain(&mut seen).unwrap();
        seen.clear();
        fs::write(root.path().join("a/cpuset.cpus"), "3").unwrap();
        assert!(watch.drain(&mut seen).unwrap(), "a recreated directory is watched again");

        watch.set(root.path(), &[]).unwrap();
        seen.clear();
        fs::write(root.path().join("a/cpuset.cpus"), "4").unwrap();
        assert!(!watch.drain(&mut seen).unwrap());
    }
}
