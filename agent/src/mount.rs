//! Where cgroup2 is mounted.
//!
//! Steps: find the mount in `/proc/self/mountinfo` and check its magic. A *copied tree* outside cgroup2 is accepted only
//! where it was set explicitly; derived files do not follow there.

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where cgroup2 is, and what can be done there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The root cgroup's directory.
    pub root: PathBuf,
    /// Whether the root offers the cpuset controller.
    pub cpuset: bool,
    /// A directory that only looks like cgroup2.
    pub copied: bool,
}

/// No cgroup2 to work with.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Nothing is mounted.
    #[error("no cgroup2 file system is mounted (looked in /proc/self/mountinfo)")]
    Absent,
    /// A file could not be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Mount {
    /// The host's cgroup2 mount, `/sys/fs/cgroup` if there are several; or `set`, which may be a copied tree.
    pub fn find(set: Option<&Path>) -> Result<Self, MountError> {
        let root = match set {
            Some(path) => path.to_owned(),
            None => Self::mounted()?,
        };
        let copied = statfs(&root).map_or(true, |s| s.filesystem_type() != CGROUP2_SUPER_MAGIC);
        let controllers = root.join("cgroup.controllers");
        let text = fs::read_to_string(&controllers)
            .map_err(|source| MountError::Read { path: controllers, source })?;
        Ok(Self { cpuset: text.split_whitespace().any(|c| c == "cpuset"), root, copied })
    }

    fn mounted() -> Result<PathBuf, MountError> {
        let path = PathBuf::from("/proc/self/mountinfo");
        let text = fs::read_to_string(&path).map_err(|source| MountError::Read { path, source })?;
        let mut found: Vec<PathBuf> = text.lines().filter_map(cgroup2_mount).collect();
        found.sort_by_key(|p| (p != Path::new("/sys/fs/cgroup"), p.clone()));
        found.into_iter().next().ok_or(MountError::Absent)
    }
}

/// The mount point of a mountinfo line of type cgroup2 that shows the hierarchy's root (proc(5)). Octal escapes are
/// not decoded: a cgroup2 mount with a blank in its path is set explicitly.
fn cgroup2_mount(line: &str) -> Option<PathBuf> {
    let (left, right) = line.split_once(" - ")?;
    let mut fields = left.split(' ').skip(3);
    let (shown, point) = (fields.next()?, fields.next()?);
    (right.split(' ').next() == Some("cgroup2") && shown == "/").then(|| point.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines() {
        let v2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(cgroup2_mount(v2), Some("/sys/fs/cgroup".into()));
        let hybrid = "36 25 0:31 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup rw";
        assert_eq!(cgroup2_mount(hybrid), Some("/sys/fs/cgroup/unified".into()));
        // A bind mount of a sub-cgroup does not show the root.
        assert_eq!(cgroup2_mount("37 25 0:31 /a /mnt/a rw - cgroup2 cgroup rw"), None);
        assert_eq!(cgroup2_mount("29 26 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"), None);
        assert_eq!(cgroup2_mount("garbage"), None);
    }
}
