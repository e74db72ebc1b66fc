//! Cgroups by hand, as a scenario sets them up and looks at them: own reads and writes, so that truepin is judged by
//! something that is not truepin.

use anyhow::Context;
use std::{
    fs,
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use truepin::{CpuSet, NodeSet};

/// Where the guest has cgroup2.
pub const MOUNT: &str = "/sys/fs/cgroup";

/// A cgroup that may or may not exist, by its path below the mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    path: String,
    dir: PathBuf,
}

impl Cgroup {
    /// The root cgroup.
    #[must_use]
    pub fn root() -> Self {
        Self::at("")
    }

    /// The cgroup of this path (`"a/b"`; a leading slash is allowed); nothing is created.
    #[must_use]
    pub fn at(path: &str) -> Self {
        let path = path.trim_matches('/').to_owned();
        let dir = Path::new(MOUNT).join(&path);
        Self { path, dir }
    }

    /// The path below the mount, without leading slash; empty for the root.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The child of this name.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        Self::at(&format!("{}/{name}", self.path))
    }

    /// Whether the directory exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    /// `mkdir -p`, with `controllers` (such as `"+cpuset +cpu"`; may be empty) enabled in every cgroup above.
    pub fn create(path: &str, controllers: &str) -> anyhow::Result<Self> {
        let made = Self::at(path);
        let mut above = Self::root();
        for name in made.path.split('/') {
            if !controllers.is_empty() {
                above.write("cgroup.subtree_control", controllers)?;
            }
            above = above.child(name);
            if !above.exists() {
                fs::create_dir(&above.dir).with_context(|| format!("mkdir {}", above.dir.display()))?;
            }
        }
        Ok(made)
    }

    /// A file's content without the newline at its end.
    pub fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = self.dir.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(text.trim_end().to_owned())
    }

    /// Writes `value` in one `write(2)`. The kernel's refusal is in the error chain as [`std::io::Error`]:
    /// [`errno`] finds it.
    pub fn write(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.dir.join(file);
        let wrote = fs::OpenOptions::new().write(true).open(&path).and_then(|mut f| {
            // An empty write(2) is no write at all; the kernel strips the newline.
            f.write_all(format!("{value}\n").as_bytes())
        });
        wrote.with_context(|| format!("writing {value:?} to {}", path.display()))
    }

    /// A CPU list file as a set, such as `cpuset.cpus.effective`.
    pub fn cpus(&self, file: &str) -> anyhow::Result<CpuSet> {
        let text = self.read(file)?;
        text.parse().with_context(|| format!("{}/{file}: {text:?}", self.dir.display()))
    }

    /// A node list file as a set, such as `cpuset.mems.effective`.
    pub fn nodes(&self, file: &str) -> anyhow::Result<NodeSet> {
        let text = self.read(file)?;
        text.parse().with_context(|| format!("{}/{file}: {text:?}", self.dir.display()))
    }

    /// The directory's inode number: the cgroup id.
    pub fn id(&self) -> anyhow::Result<u64> {
        let meta = fs::metadata(&self.dir).with_context(|| format!("stat {}", self.dir.display()))?;
        Ok(meta.ino())
    }

    /// Moves a process, all its threads, here.
    pub fn add(&self, pid: i32) -> anyhow::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// The processes in this very cgroup.
    pub fn procs(&self) -> anyhow::Result<Vec<i32>> {
        let text = self.read("cgroup.procs")?;
        text.lines()
            .map(|l| l.parse().with_context(|| format!("{}: pid {l:?}", self.dir.display())))
            .collect()
    }

    /// The cgroups directly below, by name.
    pub fn children(&self) -> anyhow::Result<Vec<Self>> {
        let entries = fs::read_dir(&self.dir).with_context(|| format!("listing {}", self.dir.display()))?;
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.with_context(|| format!("listing {}", self.dir.display()))?;
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                found.push(self.child(&entry.file_name().to_string_lossy()));
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// `rmdir`, the cgroups below first. A populated one is an error (EBUSY).
    pub fn remove(&self) -> anyhow::Result<()> {
        for child in self.children()? {
            child.remove()?;
        }
        fs::remove_dir(&self.dir).with_context(|| format!("rmdir {}", self.dir.display()))
    }
}

/// The error number in an error's chain, if the kernel gave one.
#[must_use]
pub fn errno(error: &anyhow::Error) -> Option<i32> {
    error.chain().find_map(|e| {
        let io = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        io.or_else(|| e.downcast_ref::<nix::errno::Errno>().map(|n| *n as i32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        let leaf = Cgroup::at("/a/b/");
        assert_eq!((leaf.path(), leaf.dir()), ("a/b", Path::new("/sys/fs/cgroup/a/b")));
        assert_eq!(Cgroup::root().child("a").child("b"), leaf);
        assert_eq!(Cgroup::root().dir(), Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn the_error_number_is_found() {
        let error = Cgroup::at("no/such/cgroup").read("cgroup.procs").unwrap_err();
        assert_eq!(errno(&error), Some(nix::libc::ENOENT));
        assert_eq!(errno(&anyhow::Error::from(nix::errno::Errno::EINVAL).context("x")), Some(22));
        assert_eq!(errno(&anyhow::anyhow!("x")), None);
    }
}
