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
    let mut alive = 0;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) => {
                let holder = back.metadata().ok().and_then(|m| holder(m.ino()));
                // Twice, because between the signal and its effect there is an instant in which nothing shows it.
                alive = if holder.as_deref().is_some_and(lives) { alive + 1 } else { 0 };
                if alive > 1 || Instant::now() >= until {
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

/// Whether a process is neither a zombie nor about to be one: `stat` has its state after the name in parentheses, and its
/// flags as field 9 (proc(5)); a SIGKILL may be on its way.
fn lives(pid: &str) -> bool {
    const PF_EXITING: u32 = 4; // include/linux/sched.h
    const SIGKILL: u64 = 1 << 8;
    let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let exits =
        rest.split(' ').nth(6).and_then(|f| f.parse::<u32>().ok()).is_some_and(|f| f & PF_EXITING != 0);
    let pending = ["SigPnd:", "ShdPnd:"].into_iter().filter_map(|key| {
        u64::from_str_radix(status.lines().find_map(|l| l.strip_prefix(key))?.trim(), 16).ok()
    });
    let killed = pending.fold(0, |all, set| all | set) & SIGKILL != 0;
    !rest.starts_with(['Z', 'X']) && !exits && !killed
}

/// Who holds a lock on `path`, if somebody does and `/proc/locks` says it.
#[must_use]
pub fn held_by(path: &Path) -> Option<String> {
    holder(fs::metadata(path).ok()?.ino())
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
        assert_eq!(held_by(dir.path()), Some(std::process::id().to_string()));
        drop(first);
        assert_eq!(held_by(dir.path()), None);
        exclusive(open(), dir.path()).unwrap();
    }
}
