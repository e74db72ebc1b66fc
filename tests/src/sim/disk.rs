//! The state directory in memory, and failures of it on order.
//!
//! It carries out the operations that the agent's store carries out ([`DiskOp`]), and knows what of them is durable: the
//! content of a file from its fsync on, a name or a rename from the fsync of its directory on. When power is lost,
//! every rename and name that was not synced is there or not, independently of all others, and content that was not
//! synced is whole, cut off, zeroes or empty.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use truepin::checkpoint::{
    self, Checkpoint,
    generations::{self, Choice, Dir, DiskOp, Found, Generation, Place},
};

/// What happens at a chosen save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    /// The agent dies around one of its operations.
    Dies(Death),
    /// Refused; nothing is durable.
    Full,
    /// Reported as failed, and durable all the same: the renames went through, the fsync of the directory did not.
    Doubtful,
    /// The operation of this number fails and does nothing.
    Fails(usize),
}

/// The end of an agent, within a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    /// Which operation of the save, from 0.
    pub op: usize,
    /// After it, or before.
    pub after: bool,
    /// What goes with it.
    pub loss: Loss,
}

/// What is lost beside the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Nothing: the kernel lives and keeps what it was given.
    Nothing,
    /// Power: the bits choose what of the unsynced was written by then.
    Power(u64),
}

/// What became of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// It is durable.
    Durable,
    /// It failed, with the reason.
    Failed(&'static str),
    /// Nobody is left to hear of it.
    Dead,
}

/// A file's content, whatever its names are.
#[derive(Debug, Clone)]
struct Content {
    bytes: Arc<[u8]>,
    synced: bool,
}

type File = usize;

/// A change of names that may still be lost.
#[derive(Debug, Clone, Copy)]
enum Unsynced {
    Made(Place, File),
    Renamed(Place, Place, File),
}

impl Unsynced {
    fn target(self) -> Place {
        match self {
            Self::Made(place, _) | Self::Renamed(_, place, _) => place,
        }
    }
}

/// How much was tried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskTally {
    /// Losses of power with something unsynced.
    pub losses: u64,
    /// Renames and names that were lost in them.
    pub names_lost: u64,
    /// Files with content that was not what was written.
    pub torn: u64,
    /// Starts that found nothing but the previous generation.
    pub previous_used: u64,
}

/// The state directory.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    /// Never removed: a save makes one.
    contents: Vec<Content>,
    /// As processes see it.
    names: BTreeMap<Place, File>,
    /// As it would be without what is unsynced.
    durable: BTreeMap<Place, File>,
    unsynced: Vec<Unsynced>,
    /// What a restart reads, chosen anew whenever names have changed.
    record: Option<(Generation, Arc<Checkpoint>)>,
    saves: u64,
    /// Of every save, how many operations it came to.
    ops: Vec<usize>,
    acknowledged: Option<u64>,
    faults: BTreeMap<u64, DiskFault>,
    /// Every save fails until this is taken back.
    pub full: bool,
    /// How much was tried.
    pub tally: DiskTally,
}

/// The directory that a name is in.
fn dir(place: Place) -> Dir {
    match place {
        Place::Of(_) | Place::Temporary => Dir::State,
        Place::Quarantined(..) | Place::Reason(..) => Dir::Quarantine,
    }
}

fn part(bytes: &[u8], bits: u64) -> Vec<u8> {
    let kept = usize::try_from(bits >> 2).unwrap_or(usize::MAX) % bytes.len().max(1);
    match bits % 4 {
        0 => bytes.to_vec(),
        1 => bytes.get(..kept).unwrap_or_default().to_vec(),
        // The length is there, the blocks are not.
        2 => bytes.iter().enumerate().map(|(i, b)| if i < kept { *b } else { 0 }).collect(),
        _ => Vec::new(),
    }
}

impl Disk {
    /// Puts a fault on the `nth` save from now, counted from 0.
    pub fn fault(&mut self, nth: u64, fault: DiskFault) {
        self.faults.insert(self.saves + nth, fault);
    }

    /// How often something was saved, failures included.
    #[must_use]
    pub fn saves(&self) -> u64 {
        self.saves
    }

    /// The record that a restart would read.
    #[must_use]
    pub fn record(&self) -> Option<&Checkpoint> {
        self.record.as_ref().map(|(_, r)| &**r)
    }

    /// Whether that record stays whatever is lost.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        let read = |p: &Place| *p != Place::Temporary;
        self.unsynced.iter().all(|u| !read(&u.target()))
            && self.names.iter().all(|(p, f)| !read(p) || self.contents[*f].synced)
    }

    /// Of every save from the `first` on, how many operations it came to.
    #[must_use]
    pub fn ops(&self, first: u64) -> &[usize] {
        usize::try_from(first).ok().and_then(|n| self.ops.get(n..)).unwrap_or_default()
    }

    /// The epoch of the last record that was reported as durable.
    #[must_use]
    pub fn acknowledged(&self) -> Option<u64> {
        self.acknowledged
    }

    /// What a new agent that starts on this disk works with. `Err` when it would refuse to start.
    pub(super) fn restart(&mut self, stamp: u64) -> Result<Option<Checkpoint>, String> {
        self.faults.clear();
        let Choice { record, damaged, .. } = self.choose().map_err(|e| e.to_string())?;
        for (generation, damage) in damaged {
            for op in generations::quarantine(generation, stamp, &damage.to_string()) {
                self.apply(&op);
            }
        }
        if record.is_some() {
            for op in &generations::adopt() {
                self.apply(op);
            }
        }
        self.tally.previous_used += u64::from(matches!(record, Some((Generation::Previous, _))));
        Ok(record.map(|(_, r)| *r))
    }

    fn choose(&self) -> Result<Choice, generations::NewerFound> {
        let found = |g| match self.names.get(&Place::Of(g)) {
            Some(file) => Found::Bytes(&self.contents[*file].bytes),
            None => Found::Missing,
        };
        generations::choose(found(Generation::Current), found(Generation::Previous))
    }

    fn reread(&mut self) {
        let chosen = self.choose().ok().and_then(|c| c.record);
        self.record = chosen.map(|(from, record)| (from, Arc::from(record)));
    }

    /// A file of this content, in place of what was there.
    pub fn put(&mut self, place: Place, bytes: Vec<u8>) {
        for op in [DiskOp::Write(place, bytes), DiskOp::Sync(place), DiskOp::SyncDir(dir(place))] {
            self.apply(&op);
        }
        self.reread();
    }

    /// What is in a file.
    #[must_use]
    pub fn get(&self, place: Place) -> Option<&[u8]> {
        self.names.get(&place).map(|f| &*self.contents[*f].bytes)
    }

    fn apply(&mut self, op: &DiskOp) {
        match op {
            DiskOp::MakeQuarantine => {}
            DiskOp::Write(place, bytes) => {
                let file = self.contents.len();
                self.contents.push(Content { bytes: bytes.as_slice().into(), synced: false });
                self.names.insert(*place, file);
                self.unsynced.push(Unsynced::Made(*place, file));
            }
            DiskOp::Sync(place) => {
                if let Some(file) = self.names.get(place) {
                    self.contents[*file].synced = true;
                }
            }
            DiskOp::Rename(from, to) => {
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(*to, file);
                    self.unsynced.push(Unsynced::Renamed(*from, *to, file));
                }
            }
            DiskOp::SyncDir(synced) => {
                let all = std::mem::take(&mut self.unsynced);
                let (now, later) = all.into_iter().partition(|u| dir(u.target()) == *synced);
                self.unsynced = later;
                let now: Vec<Unsynced> = now;
                for u in now {
                    self.harden(u);
                }
            }
        }
    }

    fn harden(&mut self, change: Unsynced) {
        match change {
            Unsynced::Made(place, file) => drop(self.durable.insert(place, file)),
            Unsynced::Renamed(from, to, file) => {
                if self.durable.get(&from) == Some(&file) {
                    self.durable.remove(&from);
                }
                self.durable.insert(to, file);
            }
        }
    }

    /// Power is lost.
    pub fn lose(&mut self, bits: u64) {
        let mut bits = bits;
        let mut draw = |n: u32| {
            let drawn = bits & ((1 << n) - 1);
            bits = bits.rotate_right(n);
            drawn
        };
        self.tally.losses += u64::from(!self.is_durable());
        for change in std::mem::take(&mut self.unsynced) {
            if draw(1) == 0 {
                self.harden(change);
            } else {
                self.tally.names_lost += 1;
            }
        }
        self.names = self.durable.clone();
        for file in self.names.values().collect::<BTreeSet<_>>() {
            let content = &mut self.contents[*file];
            if !content.synced {
                let torn = part(&content.bytes, draw(16));
                self.tally.torn += u64::from(*torn != *content.bytes);
                *content = Content { bytes: torn.into(), synced: true };
            }
        }
        self.reread();
    }

    pub(super) fn save(&mut self, record: &Checkpoint) -> Saved {
        let fault = self.faults.remove(&self.saves);
        self.saves += 1;
        let Ok(bytes) = checkpoint::encode(record) else {
            self.ops.push(0);
            return Saved::Failed("the record does not encode");
        };
        let current = self.names.contains_key(&Place::Of(Generation::Current));
        let ops = generations::save(bytes, current);
        self.ops.push(ops.len());
        let saved = self.carry_out(ops, fault);
        if saved == Saved::Durable {
            self.acknowledged = Some(record.epoch);
        }
        self.reread();
        saved
    }

    fn carry_out(&mut self, ops: Vec<DiskOp>, fault: Option<DiskFault>) -> Saved {
        for (n, op) in ops.into_iter().enumerate() {
            match (fault, &op) {
                (Some(DiskFault::Full), DiskOp::Write(place, bytes)) => {
                    let half = bytes.iter().take(bytes.len() / 2).copied().collect();
                    self.apply(&DiskOp::Write(*place, half));
                    return Saved::Failed("no space left on device");
                }
                (_, DiskOp::Write(..)) if self.full => return Saved::Failed("no space left on device"),
                (Some(DiskFault::Doubtful), DiskOp::SyncDir(_)) => {
                    return Saved::Failed("the directory could not be synced");
                }
                (Some(DiskFault::Fails(at)), _) if at == n => return Saved::Failed("input/output error"),
                (Some(DiskFault::Dies(death)), _) if death.op == n => {
                    if death.after {
                        self.apply(&op);
                    }
                    if let Loss::Power(bits) = death.loss {
                        self.lose(bits);
                    }
                    return Saved::Dead;
                }
                _ => self.apply(&op),
            }
        }
        Saved::Durable
    }
}
