//! Bitmaps of CPUs: those of groups, which never change, and those of one choice, which do.

use crate::cpuset::CpuSet;
use smallvec::SmallVec;

/// CPUs of a choice; 1024 of them without an allocation. Always as long as the machine needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pool(SmallVec<[u64; 16]>);

/// CPUs of a group. Only the words from its first to its last CPU, because most groups are small parts of a machine.
#[derive(Debug, Clone)]
pub(super) struct Mask {
    start: usize,
    words: Box<[u64]>,
    /// How many CPUs; at least 1.
    pub(super) len: usize,
}

impl Mask {
    pub(super) fn of(cpus: &CpuSet) -> Self {
        let words = cpus.words();
        let start = words.iter().position(|w| *w != 0).unwrap_or(0);
        Self { start, words: words[start..].into(), len: cpus.len() }
    }
}

impl Pool {
    /// Of a machine whose CPUs are `all`: those that are in `cpus` too.
    pub(super) fn new(all: &CpuSet, cpus: &CpuSet) -> Self {
        let (all, cpus) = (all.words(), cpus.words());
        Self(all.iter().enumerate().map(|(i, w)| w & cpus.get(i).copied().unwrap_or(0)).collect())
    }

    /// None, of the same machine.
    pub(super) fn none(&self) -> Self {
        Self(SmallVec::from_elem(0, self.0.len()))
    }

    pub(super) fn set(&self) -> CpuSet {
        CpuSet::from_words(&self.0)
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }

    pub(super) fn contains(&self, cpu: u32) -> bool {
        self.0[cpu as usize / 64] >> (cpu % 64) & 1 == 1
    }

    pub(super) fn insert(&mut self, cpu: u32) {
        self.0[cpu as usize / 64] |= 1 << (cpu % 64);
    }

    pub(super) fn add(&mut self, mask: &Mask) {
        for (word, m) in self.0[mask.start..].iter_mut().zip(&mask.words) {
            *word |= m;
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        for (word, o) in self.0.iter_mut().zip(&other.0) {
            *word |= o;
        }
    }

    pub(super) fn remove_all(&mut self, other: &Self) {
        for (word, o) in self.0.iter_mut().zip(&other.0) {
            *word &= !o;
        }
    }

    pub(super) fn is_subset(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & !b == 0)
    }

    /// How many of a group are in this.
    pub(super) fn count(&self, mask: &Mask) -> usize {
        let words = self.0[mask.start..].iter().zip(&mask.words);
        words.map(|(word, m)| (word & m).count_ones() as usize).sum()
    }

    /// Whether one of a group is in this.
    pub(super) fn touches(&self, mask: &Mask) -> bool {
        self.0[mask.start..].iter().zip(&mask.words).any(|(word, m)| word & m != 0)
    }

    /// Those of a group that are in this.
    pub(super) fn within(&self, mask: &Mask) -> Self {
        let mut part = self.none();
        for (i, m) in mask.words.iter().enumerate() {
            part.0[mask.start + i] = self.0[mask.start + i] & m;
        }
        part
    }

    /// Ascending.
    pub(super) fn iter(&self, mask: &Mask) -> impl Iterator<Item = u32> {
        let words = self.0[mask.start..].iter().zip(&mask.words).map(|(word, m)| word & m);
        let numbered = (0_u32..).zip(words).map(move |(i, word)| (i, word, mask.start));
        numbered.flat_map(|(i, mut word, start)| {
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros())?;
                word &= word - 1;
                let base = u32::try_from(start).unwrap_or(0) * 64 + i * 64;
                Some(base + bit)
            })
        })
    }
}
