//! truepin never fights (I8).
//!
//! A fight is the same file changed by the same writer (process or program; if unknown, by anyone) more than a given number
//! of times in a minute, or [`EVERYBODY`] times as often by whomever. The file is then left as it is until it has been
//! quiet for a minute.
//!
//! A process is not enough to tell a writer by: `runc update` and a script's `echo` are another one each time. So whoever
//! has the same name is the same, which errs towards leaving a file alone; and because names can be chosen, all of them
//! together have a limit too.

use super::Writer;
use crate::cgroup::{CgroupPath, CpusetFile};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The window and the quiet time.
pub(super) const MINUTE_NS: u64 = 60_000_000_000;

/// Nobody repairs a file thirty times a minute and calls it peace, whoever the writers are.
const EVERYBODY: usize = 10;

type Key = (CgroupPath, CpusetFile);

/// A writer, as far as it matters whether two are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Who {
    pid: u32,
    comm: String,
}

impl From<&Writer> for Who {
    fn from(writer: &Writer) -> Self {
        Self { pid: writer.pid, comm: writer.comm.clone() }
    }
}

impl Who {
    fn may_be(&self, other: &Self) -> bool {
        self.pid == other.pid || self.comm == other.comm
    }
}

#[derive(Debug, Clone, Default)]
struct File {
    /// Who changed it and when, oldest first; only the last minute.
    changes: VecDeque<(Option<Who>, u64)>,
    /// The last change, also one that was left alone.
    last_ns: u64,
    frozen: bool,
}

/// Changes by others, by file.
#[derive(Debug, Clone)]
pub(super) struct Fights {
    limit: u32,
    files: BTreeMap<Key, File>,
}

impl Fights {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit, files: BTreeMap::new() }
    }

    /// Counts a change; true when this one makes it a fight.
    pub(super) fn changed(&mut self, key: &Key, writer: Option<&Who>, now_ns: u64) -> bool {
        let file = self.files.entry(key.clone()).or_default();
        while file.changes.front().is_some_and(|(_, at)| now_ns.saturating_sub(*at) >= MINUTE_NS) {
            file.changes.pop_front();
        }
        file.changes.push_back((writer.cloned(), now_ns));
        file.last_ns = now_ns;
        let fight = !file.frozen && is_fight(&file.changes, writer, self.limit);
        file.frozen |= fight;
        fight
    }

    /// How often the file was repaired within a minute before its newest change.
    pub(super) fn repairs(&self, key: &Key) -> u32 {
        let changes = self.files.get(key).map_or(0, |f| f.changes.len());
        u32::try_from(changes.saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// The writer of the newest change is known after all; true when that ends what had looked like a fight.
    pub(super) fn named(&mut self, key: &Key, writer: &Who) -> bool {
        let Some(file) = self.files.get_mut(key) else { return false };
        if let Some((unknown @ None, _)) = file.changes.back_mut() {
            *unknown = Some(writer.clone());
        }
        let over = file.frozen && !is_fight(&file.changes, Some(writer), self.limit);
        file.frozen &= !over;
        over
    }

    /// The newest change was nobody's, but the kernel's own; true when that ends what had looked like a fight.
    pub(super) fn pardoned(&mut self, key: &Key) -> bool {
        let Some(file) = self.files.get_mut(key) else { return false };
        file.changes.pop_back_if(|(writer, _)| writer.is_none());
        let over = file.frozen && !is_fight(&file.changes, None, self.limit);
        file.frozen &= !over;
        over
    }

    /// As [`Fights::pardoned`], if the newest change is not older than that.
    pub(super) fn pardoned_since(&mut self, key: &Key, ns: u64) -> bool {
        let young = |file: &File| file.changes.back().is_some_and(|(_, at)| *at >= ns);
        self.files.get(key).is_some_and(young) && self.pardoned(key)
    }

    /// A change of a file that is left alone already: the quiet minute starts anew.
    pub(super) fn touched(&mut self, key: &Key, now_ns: u64) {
        if let Some(file) = self.files.get_mut(key).filter(|f| f.frozen) {
            file.last_ns = now_ns;
        }
    }

    /// The cgroup has another purpose from now on: what was fought over is past.
    pub(super) fn forget(&mut self, path: &CgroupPath) {
        self.files.retain(|(p, _), _| p != path);
    }

    /// Files that are left alone.
    pub(super) fn frozen(&self) -> BTreeSet<Key> {
        self.files.iter().filter(|(_, f)| f.frozen).map(|(k, _)| k.clone()).collect()
    }

    /// Lets go of files that have been quiet for a minute; returns those.
    pub(super) fn thaw(&mut self, now_ns: u64) -> Vec<Key> {
        let quiet = |f: &File| now_ns.saturating_sub(f.last_ns) >= MINUTE_NS;
        let thawed: Vec<Key> =
            self.files.iter().filter(|(_, f)| f.frozen && quiet(f)).map(|(k, _)| k.clone()).collect();
        self.files.retain(|_, f| !quiet(f));
        thawed
    }

    /// When the next frozen file will have been quiet long enough.
    pub(super) fn next_thaw(&self) -> Option<u64> {
        let frozen = self.files.values().filter(|f| f.frozen);
        frozen.map(|f| f.last_ns.saturating_add(MINUTE_NS)).min()
    }
}

/// Whether these are too many, by all that `writer` can have made: its own and those of unknown writers; an unknown one, all.
fn is_fight(changes: &VecDeque<(Option<Who>, u64)>, writer: Option<&Who>, limit: u32) -> bool {
    let its = |w: &Option<Who>| match (w, writer) {
        (Some(w), Some(writer)) => w.may_be(writer),
        _ => true,
    };
    let limit = limit as usize;
    let by_one = changes.iter().filter(|(w, _)| its(w)).count();
    by_one > limit || changes.len() > limit.saturating_mul(EVERYBODY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    /// A program of its own.
    fn who(pid: u64) -> Who {
        Who { pid: u32::try_from(pid).unwrap(), comm: format!("w{pid}") }
    }

    fn key() -> Key {
        ("a".parse().unwrap(), CpusetFile::Cpus)
    }

    #[test]
    fn the_fourth_change_by_one_writer_is_a_fight() {
        let mut f = Fights::new(3);
        assert!(!(0..3).any(|i| f.changed(&key(), Some(&who(7)), i * S)));
        assert!(f.frozen().is_empty());
        assert!(f.changed(&key(), Some(&who(7)), 3 * S));
        assert_eq!(f.frozen().into_iter().collect::<Vec<_>>(), [key()]);
        assert!(!f.changed(&key(), Some(&who(7)), 4 * S), "said once");
    }

    #[test]
    fn different_writers_do_not_fight_and_unknown_ones_count_for_all() {
        let mut f = Fights::new(3);
        assert!(!(0..20).any(|i| f.changed(&key(), Some(&who(i)), i * S / 10)));
        let mut f = Fights::new(3);
        assert!(
            !f.changed(&key(), Some(&who(1)), 0)
                && !f.changed(&key(), None, S)
                && !f.changed(&key(), Some(&who(2)), 2 * S)
        );
        assert!(f.changed(&key(), None, 3 * S));
    }

    /// `runc update` and the like: another process each time.
    #[test]
    fn a_program_that_is_started_anew_for_every_write_is_one_writer() {
        let mut f = Fights::new(3);
        let runc = |pid| Who { pid, comm: "runc".into() };
        assert!(!(0..3).any(|i| f.changed(&key(), Some(&runc(i)), 0)));
        assert!(!f.changed(&key(), Some(&who(9)), S), "somebody else");
        assert!(f.changed(&key(), Some(&runc(100)), 2 * S));
    }

    #[test]
    fn whoever_they_are_there_is_an_end() {
        let mut f = Fights::new(3);
        assert!(!(0..30).any(|i| f.changed(&key(), Some(&who(i)), i * S)));
        assert!(f.changed(&key(), Some(&who(30)), 30 * S));
        // Slower than that it goes on for ever.
        let mut f = Fights::new(3);
        assert!(!(0..1000).any(|i| f.changed(&key(), Some(&who(i)), i * 2 * S)));
    }

    #[test]
    fn a_late_name_counts_for_its_bearer_alone() {
        let mut f = Fights::new(3);
        for pid in 0..10 {
            let fight = f.changed(&key(), None, pid * S);
            assert_eq!(f.named(&key(), &who(pid)), fight, "what looked like a fight is none: change {pid}");
            assert!(f.frozen().is_empty());
        }
        for i in 0..3 {
            f.changed(&key(), None, (10 + i) * S);
            assert_eq!(
                (f.named(&key(), &who(0)), f.frozen().is_empty()),
                (i < 2, i < 2),
                "the fourth of one is one: {i}"
            );
        }
    }

    #[test]
    fn what_the_kernel_does_is_no_fight() {
        let mut f = Fights::new(3);
        for i in 0..10 {
            let fight = f.changed(&key(), None, i * S);
            assert!(!f.pardoned(&key()) && !fight && f.frozen().is_empty(), "{i}");
        }
        for i in 0..3 {
            assert!(!f.changed(&key(), Some(&who(7)), (10 + i) * S));
        }
        assert!(f.changed(&key(), None, 13 * S), "it may have been 7 again");
        assert!(f.pardoned(&key()) && f.frozen().is_empty(), "it was not");
        assert!(!f.pardoned(&key()), "a known writer stays one");
        assert!(f.changed(&key(), Some(&who(7)), 14 * S));
    }

    #[test]
    fn slow_changes_are_no_fight_and_a_quiet_minute_ends_one() {
        let mut f = Fights::new(3);
        assert!(!(0..50).any(|i| f.changed(&key(), None, i * 21 * S)));
        let mut f = Fights::new(3);
        for i in 0..4 {
            f.changed(&key(), None, i * S);
        }
        f.touched(&key(), 30 * S);
        assert_eq!(f.next_thaw(), Some(90 * S));
        assert!(f.thaw(89 * S).is_empty() && !f.frozen().is_empty());
        assert_eq!(f.thaw(90 * S), [key()]);
        assert!(f.frozen().is_empty() && f.next_thaw().is_none());
    }
}
