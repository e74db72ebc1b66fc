//! The durable record on disk, and the lock that makes its writer the only one.
//!
//! Problem: a record counts only once it survives a power cut, and a damaged one must neither stop the agent nor be
//! lost. Steps: [`truepin::checkpoint::generations`] says what to do, as a list of operations; here they are carried out.
//! On reading, what does not decode is moved to `quarantine/` with the reason beside it, and the other generation is
//! used; a record of a newer version is left untouched and refused.
//! Invariant: whatever is lost at a power cut, the last acknowledged record or a later one is found.

use crate::lock::{self, LockError};
use nix::{
    errno::Errno,
    fcntl::{Flock, OFlag},
};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};
use truepin::checkpoint::{
    self, Checkpoint,
    generations::{self, Dir, DiskOp, Found, Generation, NewerFound, Place, QUARANTINE},
};

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
    #[error("{} is left as it is", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// How it differs.
        source: NewerFound,
    },
    /// Encoding failed.
    #[error("encoding the record")]
    Encode(#[source] serde_json::Error),
    /// Another agent holds the record.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// The record's files. One process at a time has a `Store` for them.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    epoch: Option<u64>,
    quarantined: usize,
    _lock: Flock<File>,
}

/// What was found at start.
#[derive(Debug)]
pub struct Loaded {
    /// The newest valid record, and where it was.
    pub record: Option<(Generation, Box<Checkpoint>)>,
    /// Damaged files, now in quarantine.
    pub damaged: Vec<Damaged>,
    /// What else the operator should know about the files.
    pub notes: Vec<String>,
}

/// What a start would find.
#[derive(Debug)]
pub struct Peeked {
    /// The newest valid record.
    pub record: Option<Box<Checkpoint>>,
    /// Files that would go to quarantine, and why.
    pub damaged: Vec<(PathBuf, String)>,
}

/// A file that did not decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// Which it was.
    pub generation: Generation,
    /// Where it is now.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { operation, path, source }
}

impl Store {
    /// Makes the directory if needed and takes the lock, `lock` beside the record.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let dir = parent(path);
        make_dir(dir)?;
        let lock_path = dir.join("lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(OFlag::O_NOFOLLOW.bits());
        let file = options.open(&lock_path).map_err(io_error("open", &lock_path))?;
        let mut lock = lock::exclusive(file, &lock_path)?;
        let text = format!("{}\n", std::process::id());
        lock.set_len(0)
            .and_then(|()| lock.write_all(text.as_bytes()))
            .map_err(io_error("write", &lock_path))?;
        let mut store = Self { path: path.to_owned(), epoch: None, quarantined: 0, _lock: lock };
        store.quarantined = store.count_quarantined()?;
        Ok(store)
    }

    /// Where the current generation is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The epoch of the record that was last loaded or made durable.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    /// How many damaged files are in quarantine.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.quarantined
    }

    /// Reads the record. `stamp` names quarantined files and is to be unique, e.g. the wall clock.
    pub fn load(&mut self, stamp: u64) -> Result<Loaded, StoreError> {
        let current = read(&self.path, Generation::Current)?;
        let previous = read(&self.path, Generation::Previous)?;
        let choice = generations::choose(current.found(), previous.found())
            .map_err(|source| StoreError::Newer { path: self.file(Place::Of(source.generation)), source })?;
        let mut damaged = Vec::new();
        for (generation, damage) in &choice.damaged {
            let reason = chain(damage);
            self.carry_out(generations::quarantine(*generation, stamp, &reason))?;
            let path = self.file(Place::Quarantined(*generation, stamp));
            damaged.push(Damaged { generation: *generation, path, reason });
        }
        self.quarantined = self.count_quarantined()?;
        let mut notes = Vec::new();
        if let Some((from, record)) = &choice.record {
            self.carry_out(generations::adopt())?;
            self.epoch = Some(record.epoch);
            notes.extend(self.note(*from, record.epoch, &current, choice.other));
        }
        Ok(Loaded { record: choice.record, damaged, notes })
    }

    /// What a start would find at `path`; nothing is locked, moved or made.
    pub fn peek(path: &Path) -> Result<Peeked, StoreError> {
        let current = read(path, Generation::Current)?;
        let previous = read(path, Generation::Previous)?;
        let choice = generations::choose(current.found(), previous.found())
            .map_err(|source| StoreError::Newer { path: file(path, Place::Of(source.generation)), source })?;
        let damaged = choice.damaged.iter().map(|(g, damage)| (file(path, Place::Of(*g)), chain(damage)));
        Ok(Peeked { record: choice.record.map(|(_, record)| record), damaged: damaged.collect() })
    }

    /// Why the previous generation was used, if it was.
    fn note(&self, from: Generation, epoch: u64, current: &Read, other: Option<u64>) -> Option<String> {
        if from == Generation::Current {
            return None;
        }
        let path = self.file(Place::Of(from));
        let path = path.display();
        Some(match (current, other) {
            (Read::Missing, _) => format!(
                "{} was not there, as after a power cut while it was replaced; its previous generation {path} is used, epoch {epoch}",
                self.path.display()
            ),
            (_, Some(other)) => format!(
                "{} holds epoch {other} and its previous generation {path} the newer {epoch}, which is used",
                self.path.display()
            ),
            (_, None) => format!("the previous generation {path} is used, epoch {epoch}"),
        })
    }

    /// Makes the record durable.
    pub fn save(&mut self, record: &Checkpoint) -> Result<(), StoreError> {
        let bytes = checkpoint::encode(record).map_err(StoreError::Encode)?;
        let current = self.path.try_exists().map_err(io_error("look for", &self.path))?;
        self.carry_out(generations::save(bytes, current))?;
        self.epoch = Some(record.epoch);
        Ok(())
    }

    fn carry_out(&self, ops: Vec<DiskOp>) -> Result<(), StoreError> {
        // fsync on the descriptor that wrote: it reports every failure since.
        let mut written: Option<(Place, File)> = None;
        for op in ops {
            match op {
                DiskOp::MakeQuarantine => make_dir(&self.dir(Dir::Quarantine))?,
                DiskOp::Write(place, bytes) => {
                    let path = self.file(place);
                    // Never through a link that somebody left at the name of the new file.
                    let mut options = OpenOptions::new();
                    options.write(true).create(true).truncate(true).custom_flags(OFlag::O_NOFOLLOW.bits());
                    let mut file = options.open(&path).map_err(io_error("create", &path))?;
                    file.write_all(&bytes).map_err(io_error("write", &path))?;
                    written = Some((place, file));
                }
                DiskOp::Sync(place) => {
                    let path = self.file(place);
                    let file = match written.take() {
                        Some((p, file)) if p == place => Ok(file),
                        _ => File::open(&path),
                    };
                    file.and_then(|f| f.sync_all()).map_err(io_error("sync", &path))?;
                }
                DiskOp::Rename(from, to) => {
                    let to = self.file(to);
                    fs::rename(self.file(from), &to).map_err(io_error("rename to", &to))?;
                }
                DiskOp::SyncDir(dir) => sync_dir(&self.dir(dir))?,
            }
        }
        Ok(())
    }

    fn file(&self, place: Place) -> PathBuf {
        file(&self.path, place)
    }

    fn dir(&self, dir: Dir) -> PathBuf {
        let state = parent(&self.path);
        match dir {
            Dir::State => state.to_owned(),
            Dir::Quarantine => state.join(QUARANTINE),
        }
    }

    fn count_quarantined(&self) -> Result<usize, StoreError> {
        let dir = self.dir(Dir::Quarantine);
        match fs::read_dir(&dir) {
            Ok(entries) => {
                let file = |e: io::Result<fs::DirEntry>| {
                    e.is_ok_and(|e| e.path().extension().is_none_or(|x| x != "reason"))
                };
                Ok(entries.filter_map(|e| file(e).then_some(())).count())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(io_error("list", &dir)(e)),
        }
    }
}

/// A file beside the record at `record`.
fn file(record: &Path, place: Place) -> PathBuf {
    let name = record.file_name().unwrap_or_default().to_string_lossy();
    parent(record).join(place.name(&name))
}

fn read(record: &Path, generation: Generation) -> Result<Read, StoreError> {
    let path = file(record, Place::Of(generation));
    match fs::read(&path) {
        Ok(bytes) => Ok(Read::Bytes(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Read::Missing),
        Err(e) if is_damage(&e) => Ok(Read::Unreadable(e.to_string())),
        Err(e) => Err(io_error("read", &path)(e)),
    }
}

/// A file's content, or why there is none.
#[derive(Debug)]
enum Read {
    Missing,
    Bytes(Vec<u8>),
    Unreadable(String),
}

impl Read {
    fn found(&self) -> Found<'_> {
        match self {
            Self::Missing => Found::Missing,
            Self::Bytes(bytes) => Found::Bytes(bytes),
            Self::Unreadable(why) => Found::Unreadable(why),
        }
    }
}

/// What a disk says that has lost a file's content: bad sectors, and structures or checksums of the file system that do
/// not fit. It is what two generations are for; anything else (permissions, a directory in its place) is somebody's
/// mistake, to be mended before the start.
fn is_damage(error: &io::Error) -> bool {
    let damage = [Errno::EIO, Errno::EUCLEAN, Errno::EBADMSG, Errno::ENODATA];
    damage.iter().any(|e| error.raw_os_error() == Some(*e as i32))
}

/// The directory that `path` is in.
#[must_use]
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes a directory and what is missing above it, durably: a record in a directory whose own name was lost is lost.
fn make_dir(dir: &Path) -> Result<(), StoreError> {
    if dir.is_dir() {
        return Ok(());
    }
    make_dir(parent(dir))?;
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(io_error("create", dir)(e)),
        _ => sync_dir(parent(dir)),
    }
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
    use truepin::{
        assignments::{Assignments, FirstValues},
        checkpoint::Extra,
        containers::ContainerMap,
    };

    fn record(epoch: u64) -> Checkpoint {
        Checkpoint {
            version: checkpoint::VERSION,
            minor: checkpoint::MINOR,
            epoch,
            boot_id: "b".into(),
            topology: "t".into(),
            strategy: "best".into(),
            assignments: Assignments::default(),
            containers: ContainerMap::new(),
            first: FirstValues::default(),
            extra: Extra::new(),
        }
    }

    fn found(loaded: &Loaded) -> Option<(Generation, u64)> {
        loaded.record.as_ref().map(|(from, r)| (*from, r.epoch))
    }

    #[test]
    fn round_trip_and_two_generations_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/state/checkpoint.json");
        let mut store = Store::open(&path).unwrap();
        assert!(store.load(1).unwrap().record.is_none());
        for epoch in 1..4 {
            store.save(&record(epoch)).unwrap();
        }
        let loaded = store.load(1).unwrap();
        assert_eq!(found(&loaded), Some((Generation::Current, 3)));
        assert!(loaded.damaged.is_empty() && loaded.notes.is_empty());
        let mut names: Vec<String> = fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["checkpoint.json", "checkpoint.json.prev", "lock"]);
        let old = fs::read(path.with_extension("json.prev")).unwrap();
        assert_eq!(checkpoint::decode(&old).unwrap(), record(2));
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
    fn damage_is_quarantined_with_its_reason_and_the_other_generation_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let mut store = Store::open(&path).unwrap();
        store.save(&record(1)).unwrap();
        store.save(&record(2)).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[80] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let loaded = store.load(77).unwrap();
        assert_eq!(found(&loaded), Some((Generation::Previous, 1)));
        assert!(loaded.notes[0].contains("checkpoint.json.prev is used"), "{:?}", loaded.notes);
        let [Damaged { generation: Generation::Current, path: at, reason }] = loaded.damaged.as_slice()
        else {
            panic!("{:?}", loaded.damaged)
        };
        assert!(reason.contains("CRC32"), "{reason}");
        assert_eq!(fs::read(at).unwrap(), bytes);
        assert_eq!(fs::read_to_string(at.with_extension("reason")).unwrap().trim(), reason);
        assert!(!path.exists() && store.quarantined() == 1);

        // The good one must not give way to the next.
        store.save(&record(3)).unwrap();
        assert_eq!(found(&store.load(78).unwrap()), Some((Generation::Current, 3)));
        assert!(checkpoint::decode(&fs::read(path.with_extension("json.prev")).unwrap()).is_ok());
        fs::write(&path, "").unwrap();
        fs::write(path.with_extension("json.prev"), "").unwrap();
        let loaded = store.load(79).unwrap();
        assert!(loaded.record.is_none() && loaded.damaged.len() == 2 && store.quarantined() == 3);
        drop(store);
        assert_eq!(Store::open(&path).unwrap().quarantined(), 3);
    }

    #[test]
    fn a_newer_record_in_either_place_stops_and_nothing_is_touched() {
        let newer = r#"{"schema":"truepin.checkpoint/3","crc32":"00000000","payload":{"version":3}}"#;
        for (current, previous) in [(newer, "damaged"), ("damaged", newer)] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("checkpoint.json");
            let mut store = Store::open(&path).unwrap();
            fs::write(&path, current).unwrap();
            fs::write(path.with_extension("json.prev"), previous).unwrap();
            let error = chain(&store.load(79).unwrap_err());
            assert!(error.contains("use the truepin that wrote it, or move the file away"), "{error}");
            assert_eq!(error.contains("checkpoint.json.prev"), previous == newer, "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), current);
            assert_eq!(fs::read_to_string(path.with_extension("json.prev")).unwrap(), previous);
            assert!(!dir.path().join("quarantine").exists());
        }
    }

    #[test]
    fn the_newest_valid_one_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let mut store = Store::open(&path).unwrap();
        let write =
            |name: &Path, epoch| fs::write(name, checkpoint::encode(&record(epoch)).unwrap()).unwrap();
        write(&path.with_extension("json.prev"), 9);
        let loaded = store.load(1).unwrap();
        assert_eq!(found(&loaded), Some((Generation::Previous, 9)));
        assert!(loaded.notes[0].contains("was not there"), "{:?}", loaded.notes);
        write(&path, 5);
        let loaded = store.load(1).unwrap();
        assert_eq!(found(&loaded), Some((Generation::Previous, 9)));
        assert!(loaded.notes[0].contains("holds epoch 5"), "{:?}", loaded.notes);
        write(&path, 9);
        assert_eq!(found(&store.load(1).unwrap()), Some((Generation::Current, 9)));
    }

    #[test]
    fn a_save_that_failed_half_way_leaves_the_previous_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let mut store = Store::open(&path).unwrap();
        store.save(&record(1)).unwrap();
        fs::rename(&path, path.with_extension("json.prev")).unwrap();
        store.save(&record(2)).unwrap();
        assert_eq!(
            checkpoint::decode(&fs::read(path.with_extension("json.prev")).unwrap()).unwrap(),
            record(1)
        );
        // What is no file can be neither read nor moved away: nothing is guessed.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(store.load(1).is_err() && is_damage(&io::Error::from_raw_os_error(Errno::EIO as i32)));
    }
}
