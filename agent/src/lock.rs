//! One writer on a host (I7): exclusive flock(2) locks, and who holds them.

use nix::fcntl::{Flock, FlockArg};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
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

/// A process that was killed holds its locks until the kernel has taken its programs off: seconds on a slow machine.
const DYING: Duration = Duration::from_secs(10);

/// Locks `file`, which is `path`, until it is dropped. Waits for a holder that is dying, not for one that lives.
pub fn exclusive(mut file: File, path: &Path) -> Result<Flock<File>, LockError> {
    let until = Instant::now() + DYING;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) => {
                let holder = back.metadata().ok().and_then(|m| holder(m.ino()));
                if holder.as_deref().is_some_and(lives) || Instant::now() >= until {
                    let holder = holder.unwrap_or_else(|| "unknown".into());
                    return Err(LockError::Held { path: path.into(), holder });
                }
                file = back;
                thread::sleep(Duration::from_millis(50));
            }
            Err((_, errno)) => {
                return Err(LockError::Io { operation: "lock", path: path.into(), source: errno.into() });
            }
        }
    }
}

/// Whether a process is more than a zombie: `stat` has its state after the name in parentheses (proc(5)).
fn lives(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
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
