//! One writer on a host (I7): exclusive flock(2) locks, and who holds them.

use nix::fcntl::{Flock, FlockArg};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// A system call failed.
    #[error("{operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process holds it.
    #[error("another truepin (pid {holder}) holds {}", path.display())]
    Held {
        /// The file or directory.
        path: PathBuf,
        /// Its process, `unknown` when `/proc/locks` does not say.
        holder: String,
    },
}

/// Locks `file`, which is `path`, until it is dropped.
pub fn exclusive(file: File, path: &Path) -> Result<Flock<File>, LockError> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
            let holder =
                file.metadata().ok().and_then(|m| holder(m.ino())).unwrap_or_else(|| "unknown".into());
            Err(LockError::Held { path: path.into(), holder })
        }
        Err((_, errno)) => Err(LockError::Io { operation: "lock", path: path.into(), source: errno.into() }),
    }
}

/// The process with an flock on this inode: `1: FLOCK ADVISORY WRITE 710 00:1a:32 0 EOF` (proc(5)). It only helps a
/// person, so a file that cannot be read is no failure.
fn holder(inode: u64) -> Option<String> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, _, pid, place, ..] = fields.as_slice() else { return None };
        (place.rsplit(':').next()? == inode.to_string()).then(|| (*pid).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let open = || File::open(dir.path()).unwrap();
        let first = exclusive(open(), dir.path()).unwrap();
        let error = exclusive(open(), dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        exclusive(open(), dir.path()).unwrap();
    }
}
