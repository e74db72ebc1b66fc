//! Names of cgroups and of the cpuset files in them.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A cgroup's id: the kernfs node id, equal to the inode number of its directory and to what
/// `bpf_get_current_cgroup_id()` returns. A recreated path has a new id. 0, the default, is never a cgroup.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CgroupId(pub u64);

impl fmt::Display for CgroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A cgroup's path relative to the cgroup2 mount, without leading or trailing slash; empty for the root.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CgroupPath(String);

/// Why a text is not a cgroup path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path:?} is not a cgroup path: {reason}")]
pub struct PathError {
    /// The text as given.
    pub path: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl CgroupPath {
    /// The root cgroup.
    #[must_use]
    pub fn root() -> Self {
        Self(String::new())
    }

    /// Whether this is the root cgroup.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The path without leading slash; empty for the root.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The child of this name.
    pub fn child(&self, name: &str) -> Result<Self, PathError> {
        if name.contains('/') {
            return Err(PathError { path: name.into(), reason: "a name has no slash" });
        }
        if self.is_root() { name.parse() } else { format!("{}/{name}", self.0).parse() }
    }

    /// The last component; empty for the root.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The cgroup above; `None` for the root.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        if self.is_root() {
            return None;
        }
        Some(Self(self.0.rsplit_once('/').map_or(String::new(), |(up, _)| up.into())))
    }

    /// Every cgroup above, the root first, the parent last.
    #[must_use]
    pub fn ancestors(&self) -> Vec<Self> {
        let mut up: Vec<Self> = std::iter::successors(self.parent(), Self::parent).collect();
        up.reverse();
        up
    }

    /// Distance from the root: 0 for the root, 1 for its children. Equal to the kernel's `cgroup.level`
    /// where the cgroup2 mount shows the hierarchy's root.
    #[must_use]
    pub fn level(&self) -> u32 {
        if self.is_root() {
            return 0;
        }
        u32::try_from(self.0.split('/').count()).unwrap_or(u32::MAX)
    }

    /// Whether `self` is `other` or lies below it.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        other.is_root()
            || self.0.strip_prefix(&other.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl FromStr for CgroupPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        let refuse = |reason| Err(PathError { path: text.into(), reason });
        let path = text.strip_prefix('/').unwrap_or(text);
        let path = path.strip_suffix('/').unwrap_or(path);
        if path.is_empty() {
            return Ok(Self::root());
        }
        if path.len() > 4096 {
            return refuse("longer than 4096 bytes");
        }
        if path.bytes().any(|b| b == 0 || b == b'\n') {
            return refuse("contains a NUL byte or a newline");
        }
        for part in path.split('/') {
            match part {
                "" => return refuse("has an empty component"),
                "." | ".." => return refuse("has a component . or .."),
                p if p.len() > 255 => return refuse("has a component longer than 255 bytes"),
                _ => {}
            }
        }
        Ok(Self(path.into()))
    }
}

impl TryFrom<String> for CgroupPath {
    type Error = PathError;

    fn try_from(text: String) -> Result<Self, PathError> {
        text.parse()
    }
}

impl From<CgroupPath> for String {
    fn from(path: CgroupPath) -> Self {
        path.0
    }
}

/// With a leading slash, as `/proc/PID/cgroup` prints it.
impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0)
    }
}

/// The cpuset files that truepin writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CpusetFile {
    /// `cpuset.cpus`: what is asked for.
    #[serde(rename = "cpuset.cpus")]
    Cpus,
    /// `cpuset.cpus.exclusive` (since Linux 6.7): what the subtree may turn into partitions.
    #[serde(rename = "cpuset.cpus.exclusive")]
    Exclusive,
    /// `cpuset.cpus.partition`: member, root or isolated.
    #[serde(rename = "cpuset.cpus.partition")]
    Partition,
    /// `cpuset.mems`: the NUMA nodes that memory comes from.
    #[serde(rename = "cpuset.mems")]
    Mems,
}

impl CpusetFile {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Cpus, Self::Exclusive, Self::Partition, Self::Mems];

    /// The file's name in the cgroup's directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpus => "cpuset.cpus",
            Self::Exclusive => "cpuset.cpus.exclusive",
            Self::Partition => "cpuset.cpus.partition",
            Self::Mems => "cpuset.mems",
        }
    }

    /// The file of this name, if it is one of ours.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }
}

impl fmt::Display for CpusetFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The files of a cgroup by which others change where its tasks may run, or which tasks it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CgroupFile {
    /// One that truepin writes too.
    Cpuset(CpusetFile),
    /// `cgroup.procs`: takes processes.
    Procs,
    /// `cgroup.threads`: takes threads.
    Threads,
    /// `cgroup.subtree_control`: gives the children their cpuset files and takes them away.
    SubtreeControl,
}

impl CgroupFile {
    /// The file's name in the cgroup's directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpuset(file) => file.name(),
            Self::Procs => "cgroup.procs",
            Self::Threads => "cgroup.threads",
            Self::SubtreeControl => "cgroup.subtree_control",
        }
    }

    /// The file of this name, if it is one of these.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let others = [Self::Procs, Self::Threads, Self::SubtreeControl];
        let cpuset = || CpusetFile::of_name(name).map(Self::Cpuset);
        others.into_iter().find(|f| f.name() == name).or_else(cpuset)
    }
}

impl From<CpusetFile> for CgroupFile {
    fn from(file: CpusetFile) -> Self {
        Self::Cpuset(file)
    }
}

impl fmt::Display for CgroupFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(text: &str) -> CgroupPath {
        text.parse().unwrap()
    }

    #[test]
    fn paths() {
        let leaf = p("/truepin.slice/run-db/");
        assert_eq!((leaf.as_str(), leaf.name(), leaf.level()), ("truepin.slice/run-db", "run-db", 2));
        assert_eq!(leaf.ancestors(), [p(""), p("truepin.slice")]);
        assert_eq!(leaf.to_string(), "/truepin.slice/run-db");
        assert_eq!((p("/").parent(), p("/").ancestors(), p("/").level()), (None, vec![], 0));
        assert_eq!(CgroupPath::root().child("a").unwrap().child("b").unwrap(), p("a/b"));
        assert!(p("a/b").is_within(&p("a")) && p("a").is_within(&p("a")) && p("a").is_within(&p("")));
        assert!(!p("ab").is_within(&p("a")) && !p("a").is_within(&p("a/b")));
    }

    #[test]
    fn files_have_the_names_that_they_are_found_by() {
        for name in [
            "cpuset.cpus",
            "cpuset.cpus.exclusive",
            "cpuset.cpus.partition",
            "cpuset.mems",
            "cgroup.procs",
            "cgroup.threads",
            "cgroup.subtree_control",
        ] {
            assert_eq!(CgroupFile::of_name(name).map(CgroupFile::name), Some(name));
        }
        assert_eq!(CgroupFile::of_name("cpuset.cpus.effective"), None);
        assert_eq!(CgroupFile::of_name("memory.max"), None);
    }

    #[test]
    fn refusals() {
        for bad in ["a/../b", "a//b", "./a", "a\nb", "a\0"] {
            assert!(bad.parse::<CgroupPath>().is_err(), "{bad:?}");
        }
        assert!(p("a").child("b/c").is_err() && p("a").child("..").is_err());
    }
}
