//! Two generations of the record on a disk, as data: what to do for a save, and which of the two counts.
//!
//! Problem: rename(2) is atomic in memory, but after a power cut each rename that was not followed by an fsync of its
//! directory may or may not be there, whatever their order; and a file can be damaged later. Steps of a save: the new
//! record into a temporary file, fsync; current → previous; temporary → current; fsync of the directory. Only then is
//! it acknowledged. These steps are values, carried out by the agent on a disk and by the tests on one that loses
//! power at any of them.
//!
//! ```text
//! lost of the two renames        current   previous     a start finds
//! nothing                        N+1       N            N+1
//! current → previous             N+1       N-1          N+1
//! temporary → current            -         N            N, which is the last acknowledged one
//! both                           N         N-1          N
//! ```
//!
//! Invariants: whatever is lost, one of the two is the last acknowledged record or a later one; a file that does not
//! decode is moved aside and kept, with the reason; one of a newer version stays where it is, and stops the start.

use super::{Checkpoint, DecodeError, decode};

/// One of the two files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Generation {
    /// `checkpoint.json`
    Current,
    /// `checkpoint.json.prev`
    Previous,
}

impl Generation {
    /// As status and findings say it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Previous => "previous",
        }
    }
}

/// A file of the state directory, by its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A generation.
    Of(Generation),
    /// What is being written.
    Temporary,
    /// A generation that was damaged; the stamp makes names unique.
    Quarantined(Generation, u64),
    /// What was wrong with it.
    Reason(Generation, u64),
}

impl Place {
    /// The path relative to the state directory, when the record's name there is `record`.
    #[must_use]
    pub fn name(self, record: &str) -> String {
        let aside = |generation, stamp, suffix| {
            let stem = record.strip_suffix(".json").unwrap_or(record);
            let which = if generation == Generation::Previous { "-prev" } else { "" };
            format!("{QUARANTINE}/{stem}-{stamp}{which}.{suffix}")
        };
        match self {
            Self::Of(Generation::Current) => record.into(),
            Self::Of(Generation::Previous) => format!("{record}.prev"),
            Self::Temporary => format!("{record}.tmp"),
            Self::Quarantined(g, stamp) => aside(g, stamp, "json"),
            Self::Reason(g, stamp) => aside(g, stamp, "reason"),
        }
    }
}

/// The name of the folder for damaged files, in the state directory.
pub const QUARANTINE: &str = "quarantine";

/// A directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dir {
    /// Where the record is.
    State,
    /// [`QUARANTINE`] in it.
    Quarantine,
}

/// One thing to do to a disk. They are carried out in order, and the first that fails ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskOp {
    /// Make the folder for damaged files, if it is not there.
    MakeQuarantine,
    /// Make the file anew, with this content; nothing of it is durable yet.
    Write(Place, Vec<u8>),
    /// fsync(2) of the file just written.
    Sync(Place),
    /// rename(2).
    Rename(Place, Place),
    /// fsync(2) of a directory: renames in it, and names of new files, are durable after it.
    SyncDir(Dir),
}

/// Makes `bytes` the current generation, durable when the last operation has ended well. `current_exists` is a fact of
/// now: after a save that failed half-way there is none, and the previous generation must stay.
#[must_use]
pub fn save(bytes: Vec<u8>, current_exists: bool) -> Vec<DiskOp> {
    use Generation::{Current, Previous};
    let mut ops = vec![DiskOp::Write(Place::Temporary, bytes), DiskOp::Sync(Place::Temporary)];
    if current_exists {
        ops.push(DiskOp::Rename(Place::Of(Current), Place::Of(Previous)));
    }
    ops.push(DiskOp::Rename(Place::Temporary, Place::Of(Current)));
    ops.push(DiskOp::SyncDir(Dir::State));
    ops
}

/// Moves a damaged generation aside. The reason comes second: a disk that is full takes a rename all the same.
#[must_use]
pub fn quarantine(generation: Generation, stamp: u64, reason: &str) -> Vec<DiskOp> {
    let note = Place::Reason(generation, stamp);
    vec![
        DiskOp::MakeQuarantine,
        DiskOp::Rename(Place::Of(generation), Place::Quarantined(generation, stamp)),
        DiskOp::Write(note, format!("{reason}\n").into_bytes()),
        DiskOp::Sync(note),
        DiskOp::SyncDir(Dir::Quarantine),
        DiskOp::SyncDir(Dir::State),
    ]
}

/// Before a record that was just read is acted on: it may be there by renames that are not durable yet, made by an
/// agent that died before its last operation.
#[must_use]
pub fn adopt() -> Vec<DiskOp> {
    vec![DiskOp::SyncDir(Dir::State)]
}

/// A file as read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found<'a> {
    /// There is none.
    Missing,
    /// Its content.
    Bytes(&'a [u8]),
    /// The disk could not give its content back, with the reason.
    Unreadable(&'a str),
}

/// What is wrong with a generation.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// It does not decode.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
}

/// A generation of a newer truepin: nothing is touched.
#[derive(Debug, thiserror::Error)]
#[error("the {} generation is from a newer truepin", generation.name())]
pub struct NewerFound {
    /// Which.
    pub generation: Generation,
    /// How it differs.
    #[source]
    pub source: DecodeError,
}

/// What two files come to.
#[derive(Debug, Default)]
pub struct Choice {
    /// The newest valid record, and where it is.
    pub record: Option<(Generation, Box<Checkpoint>)>,
    /// Files for the quarantine.
    pub damaged: Vec<(Generation, Damage)>,
    /// The epoch of the valid one that was not chosen.
    pub other: Option<u64>,
}

/// The newest valid one wins, by epoch; of equals the current one.
pub fn choose(current: Found<'_>, previous: Found<'_>) -> Result<Choice, NewerFound> {
    let mut choice = Choice::default();
    for (generation, found) in [(Generation::Current, current), (Generation::Previous, previous)] {
        let decoded = match found {
            Found::Missing => continue,
            Found::Bytes(bytes) => decode(bytes).map_err(Damage::Decode),
            Found::Unreadable(why) => Err(Damage::Unreadable(why.into())),
        };
        match decoded {
            Ok(record) => match &choice.record {
                Some((_, held)) if held.epoch >= record.epoch => choice.other = Some(record.epoch),
                held => {
                    choice.other = held.as_ref().map(|(_, h)| h.epoch);
                    choice.record = Some((generation, Box::new(record)));
                }
            },
            Err(Damage::Decode(source)) if source.is_newer() => {
                return Err(NewerFound { generation, source });
            }
            Err(damage) => choice.damaged.push((generation, damage)),
        }
    }
    Ok(choice)
}
