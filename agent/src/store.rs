//! The durable record on disk, and the lock that makes its writer the only one.
//!
//! Problem: a record counts only once it survives a power cut, and a damaged one must neither stop the agent nor be
//! lost. Steps: write a temporary file beside it, fsync, rename, fsync the directory. On reading, what does not decode
//! is moved to `quarantine/` with the reason beside it; a record of a newer version is left untouched and refused.
//! Invariant: at every instant the name holds a whole record or none (rename(2) is atomic).

use crate::lock::{self, LockError};
use nix::fcntl::Flock;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};
use truepin::checkpoint::{self, Checkpoint, DecodeError};

/// What goes wrong with the record.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
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
    /// A newer truepin wrote it.
    #[error("{} is from a newer truepin", path.display())]
    Newer {
        /// The record.
        path: PathBuf,
        /// How it differs.
        source: DecodeError,
    },
    /// Encoding failed.
    #[error("encoding the record")]
    Encode(#[source] serde_json::Error),
    /// Another agent holds the record.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// The record's file. One process at a time has a `Store` for it.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    _lock: Flock<File>,
}

/// What was found at start.
#[derive(Debug)]
pub enum Loaded {
    /// No file.
    Nothing,
    /// A good record.
    Record(Box<Checkpoint>),
    /// A damaged one, now in quarantine.
    Quarantined {
        /// Where it is now.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { operation, path, source }
}

impl Store {
    /// Makes the directory if needed and takes the lock, `lock` beside the record.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let dir = parent(path);
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let lock_path = dir.join("lock");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&lock_path);
        let file = file.map_err(io_error("open", &lock_path))?;
        let mut lock = lock::exclusive(file, &lock_path)?;
        let text = format!("{}\n", std::process::id());
        lock.set_len(0)
            .and_then(|()| lock.write_all(text.as_bytes()))
            .map_err(io_error("write", &lock_path))?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Reads the record. `stamp` names a quarantined file and is to be unique, e.g. the wall clock.
    pub fn load(&self, stamp: u64) -> Result<Loaded, StoreError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Nothing),
            Err(e) => return Err(io_error("read", &self.path)(e)),
        };
        match checkpoint::decode(&bytes) {
            Ok(record) => Ok(Loaded::Record(Box::new(record))),
            Err(source @ (DecodeError::Newer { .. } | DecodeError::Version { .. })) => {
                Err(StoreError::Newer { path: self.path.clone(), source })
            }
            Err(damage) => self.quarantine(stamp, &chain(&damage)),
        }
    }

    fn quarantine(&self, stamp: u64, reason: &str) -> Result<Loaded, StoreError> {
        let dir = parent(&self.path).join("quarantine");
        fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
        let to = dir.join(format!("checkpoint-{stamp}.json"));
        fs::rename(&self.path, &to).map_err(io_error("move to quarantine", &self.path))?;
        let note = to.with_extension("reason");
        fs::write(&note, format!("{reason}\n")).map_err(io_error("write", &note))?;
        sync_dir(&dir)?;
        sync_dir(parent(&self.path))?;
        Ok(Loaded::Quarantined { path: to, reason: reason.into() })
    }

    /// Makes the record durable.
    pub fn save(&self, record: &Checkpoint) -> Result<(), StoreError> {
        let bytes = checkpoint::encode(record).map_err(StoreError::Encode)?;
        let temporary = self.path.with_extension("tmp");
        let mut file = File::create(&temporary).map_err(io_error("create", &temporary))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(io_error("write", &temporary))?;
        drop(file);
        fs::rename(&temporary, &self.path).map_err(io_error("rename to", &self.path))?;
        sync_dir(parent(&self.path))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A rename is durable only once its directory is.
fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(io_error("sync", dir))
}

/// An error with its sources, on one line.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        text.push_str(": ");
        text.push_str(&e.to_string());
        source = e.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use truepin::assignments::{Assignments, FirstValues};

    fn record(epoch: u64) -> Checkpoint {
        Checkpoint {
            version: checkpoint::VERSION,
            epoch,
            boot_id: "b".into(),
            topology: "t".into(),
            assignments: Assignments::default(),
            first: FirstValues::default(),
        }
    }

    #[test]
    fn round_trip_and_nothing_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/checkpoint.json");
        let store = Store::open(&path).unwrap();
        assert!(matches!(store.load(1).unwrap(), Loaded::Nothing));
        for epoch in 1..4 {
            store.save(&record(epoch)).unwrap();
        }
        let Loaded::Record(found) = store.load(1).unwrap() else { panic!("no record") };
        assert_eq!(*found, record(3));
        assert!(!path.with_extension("tmp").exists());
    }

    #[test]
    fn the_second_is_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let first = Store::open(&path).unwrap();
        let error = Store::open(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        Store::open(&path).unwrap();
    }

    #[test]
    fn damage_is_quarantined_with_its_reason_and_newer_records_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let store = Store::open(&path).unwrap();
        store.save(&record(1)).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[80] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let Loaded::Quarantined { path: at, reason } = store.load(77).unwrap() else { panic!("accepted") };
        assert!(reason.contains("CRC32"), "{reason}");
        assert_eq!(fs::read(&at).unwrap(), bytes);
        assert_eq!(fs::read_to_string(at.with_extension("reason")).unwrap().trim(), reason);
        assert!(matches!(store.load(78).unwrap(), Loaded::Nothing));

        let newer = r#"{"schema":"truepin.checkpoint/2","crc32":"00000000","payload":{"version":2}}"#;
        fs::write(&path, newer).unwrap();
        assert!(matches!(store.load(79), Err(StoreError::Newer { .. })));
        assert!(path.exists());
    }
}
