//! Sets of small numbers, as the kernel's bitmaps are.
//!
//! Problem: every decision here is set algebra on CPU or node numbers, on machines from 2 to 8192 CPUs with
//! holes in the numbering, and the kernel prints and takes such sets in one grammar.
//! Steps: 64-bit words, 256 numbers without an allocation, no trailing zero word (so that equality is equality
//! of words), one parser and one printer for the list grammar of `lib/bitmap-str.c` (`bitmap_parselist`).
//! Invariant: `words.last() != Some(&0)`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;
use std::{fmt, marker::PhantomData, str::FromStr};

/// The largest number that a list may name. Linux allows 8192 CPUs and 1024 nodes; the bound keeps a hostile
/// `0-4000000000` from taking memory.
pub const MAX_ID: u32 = 65_535;

/// A set of ids of one kind. [`crate::CpuSet`] and [`crate::NodeSet`] are the two in use.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdSet<T> {
    words: SmallVec<[u64; 4]>,
    kind: PhantomData<fn() -> T>,
}

/// Why a list was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// A token that is neither a number nor a range nor a stride.
    #[error("{token:?} is not a number or a range")]
    Token {
        /// The token as read.
        token: String,
    },
    /// A range whose end lies before its start.
    #[error("range {token:?} runs backwards")]
    Backwards {
        /// The token as read.
        token: String,
    },
    /// A stride `a-b:used/group` whose group is 0 or smaller than the used part.
    #[error("stride {token:?} needs 0 <= used <= group and a group of at least 1")]
    Stride {
        /// The token as read.
        token: String,
    },
    /// A number above [`MAX_ID`].
    #[error("{token:?} is beyond {MAX_ID}")]
    TooLarge {
        /// The token as read.
        token: String,
    },
}

impl<T> Default for IdSet<T> {
    fn default() -> Self {
        Self { words: SmallVec::new(), kind: PhantomData }
    }
}

impl<T> IdSet<T> {
    fn trim(mut self) -> Self {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        self
    }

    fn zip(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        let len = self.words.len().max(other.words.len());
        let word = |w: &[u64], i: usize| w.get(i).copied().unwrap_or(0);
        let words = (0..len).map(|i| op(word(&self.words, i), word(&other.words, i))).collect();
        Self { words, kind: PhantomData }.trim()
    }

    /// Members of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a | b)
    }

    /// Members of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    /// Members of this set that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    /// Number of members.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Whether there is no member.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Number of members of both sets, without building their intersection.
    #[must_use]
    pub fn common(&self, other: &Self) -> usize {
        self.words.iter().zip(&other.words).map(|(a, b)| (a & b).count_ones() as usize).sum()
    }

    /// Order by the value of the bitmap read as a number: the set with the highest member that the other lacks is the
    /// greater one.
    pub(crate) fn cmp_value(&self, other: &Self) -> std::cmp::Ordering {
        let by_length = self.words.len().cmp(&other.words.len());
        by_length.then_with(|| self.words.iter().rev().cmp(other.words.iter().rev()))
    }

    /// Whether every member is in `other`.
    #[must_use]
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words.iter().enumerate().all(|(i, w)| w & !other.words.get(i).copied().unwrap_or(0) == 0)
    }

    /// Whether no member is in `other`.
    #[must_use]
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).all(|(a, b)| a & b == 0)
    }

    /// The bitmap, lowest numbers first; the last word is not zero.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// From a bitmap, lowest numbers first. Bits above [`MAX_ID`] do not fit.
    pub(crate) fn from_words(words: &[u64]) -> Self {
        let fits = words.len().min(MAX_ID as usize / 64 + 1);
        Self { words: SmallVec::from_slice(&words[..fits]), kind: PhantomData }.trim()
    }

    fn raw(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(i, w)| {
            let w = *w;
            (0..64u32).filter(move |b| w >> b & 1 == 1).map(move |b| word_base(i) + b)
        })
    }

    fn set_range(&mut self, from: u32, to: u32) {
        let need = to as usize / 64 + 1;
        if self.words.len() < need {
            self.words.resize(need, 0);
        }
        for id in from..=to {
            self.words[id as usize / 64] |= 1 << (id % 64);
        }
    }
}

/// `MAX_ID` keeps the word index below 1024, so the product fits.
#[allow(clippy::cast_possible_truncation, reason = "i < 1024 by MAX_ID")]
fn word_base(i: usize) -> u32 {
    i as u32 * 64
}

impl<T: From<u32> + Into<u32>> IdSet<T> {
    /// The set without members.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The set with one member.
    #[must_use]
    pub fn single(id: T) -> Self {
        let mut s = Self::default();
        s.insert(id);
        s
    }

    /// Whether `id` is a member.
    #[must_use]
    pub fn contains(&self, id: T) -> bool {
        let id: u32 = id.into();
        self.words.get(id as usize / 64).is_some_and(|w| w >> (id % 64) & 1 == 1)
    }

    /// Adds `id`; true if it was not there. Ids above [`MAX_ID`] are not added (no kernel has them).
    pub fn insert(&mut self, id: T) -> bool {
        let id: u32 = id.into();
        if id > MAX_ID {
            return false;
        }
        let is_new = self.words.get(id as usize / 64).is_none_or(|w| w >> (id % 64) & 1 == 0);
        self.set_range(id, id);
        is_new
    }

    /// Removes `id`; true if it was there.
    pub fn remove(&mut self, id: T) -> bool {
        let id: u32 = id.into();
        let Some(w) = self.words.get_mut(id as usize / 64) else { return false };
        let had = *w >> (id % 64) & 1 == 1;
        *w &= !(1 << (id % 64));
        *self = std::mem::take(self).trim();
        had
    }

    /// The set of a mask given in words of 32 bits, the lowest first; `None` for a member above [`MAX_ID`].
    pub fn from_mask(words: impl IntoIterator<Item = u32>) -> Option<Self> {
        let mut set = Self::default();
        for (i, word) in words.into_iter().enumerate() {
            // Zero words ahead of a hostile one take no memory.
            if word == 0 {
                continue;
            }
            if i > MAX_ID as usize / 32 {
                return None;
            }
            set.words.resize(i / 2 + 1, 0);
            set.words[i / 2] |= u64::from(word) << (i % 2 * 32);
        }
        Some(set)
    }

    /// Members in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = T> + '_ {
        self.raw().map(T::from)
    }

    /// The lowest member.
    #[must_use]
    pub fn first(&self) -> Option<T> {
        let (i, w) = self.words.iter().enumerate().find(|(_, w)| **w != 0)?;
        Some(T::from(word_base(i) + w.trailing_zeros()))
    }

    /// The highest member.
    #[must_use]
    pub fn last(&self) -> Option<T> {
        let w = self.words.last()?;
        Some(T::from(word_base(self.words.len() - 1) + 63 - w.leading_zeros()))
    }
}

impl<T: From<u32> + Into<u32>> FromIterator<T> for IdSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(iter: I) -> Self {
        let mut s = Self::default();
        for id in iter {
            s.insert(id);
        }
        s
    }
}

impl<T> std::ops::BitOrAssign<&IdSet<T>> for IdSet<T> {
    fn bitor_assign(&mut self, other: &Self) {
        *self = self.union(other);
    }
}

impl<T> std::ops::SubAssign<&IdSet<T>> for IdSet<T> {
    fn sub_assign(&mut self, other: &Self) {
        *self = self.difference(other);
    }
}

/// The kernel's list form: ascending, ranges joined, `0-3,8`; nothing for the empty set.
impl<T> fmt::Display for IdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids = self.raw().peekable();
        let mut first = true;
        while let Some(start) = ids.next() {
            let mut end = start;
            while ids.next_if_eq(&(end + 1)).is_some() {
                end += 1;
            }
            let comma = if first { "" } else { "," };
            first = false;
            if start == end {
                write!(f, "{comma}{start}")?;
            } else {
                write!(f, "{comma}{start}-{end}")?;
            }
        }
        Ok(())
    }
}

impl<T> fmt::Debug for IdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// The kernel's list grammar: numbers, ranges `a-b` and strides `a-b:used/group`, separated by commas or white
/// space; an empty text is the empty set.
impl<T> FromStr for IdSet<T> {
    type Err = ListError;

    fn from_str(text: &str) -> Result<Self, ListError> {
        let mut set = Self::default();
        let tokens = text.split(|c: char| c == ',' || c.is_ascii_whitespace() || c == '\0');
        for token in tokens.filter(|t| !t.is_empty()) {
            let (range, stride) = match token.split_once(':') {
                Some((r, s)) => (r, Some(s)),
                None => (token, None),
            };
            let (from, to) = match range.split_once('-') {
                Some((a, b)) => (number(a, token)?, number(b, token)?),
                None if stride.is_some() => return Err(ListError::Token { token: token.into() }),
                None => number(range, token).map(|n| (n, n))?,
            };
            if from > to {
                return Err(ListError::Backwards { token: token.into() });
            }
            let Some(stride) = stride else {
                set.set_range(from, to);
                continue;
            };
            let (used, group) =
                stride.split_once('/').ok_or_else(|| ListError::Token { token: token.into() })?;
            let (used, group) = (number(used, token)?, number(group, token)?);
            if group == 0 || used > group {
                return Err(ListError::Stride { token: token.into() });
            }
            let mut start = from;
            while used > 0 && start <= to {
                set.set_range(start, to.min(start + used - 1));
                start += group;
            }
        }
        Ok(set)
    }
}

fn number(text: &str, token: &str) -> Result<u32, ListError> {
    // `u32::from_str` takes a leading plus, the kernel does not.
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ListError::Token { token: token.into() });
    }
    match text.parse::<u32>() {
        Ok(n) if n <= MAX_ID => Ok(n),
        _ => Err(ListError::TooLarge { token: token.into() }),
    }
}

impl<T> Serialize for IdSet<T> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de, T> Deserialize<'de> for IdSet<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuId, CpuSet};

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn the_grammar_of_the_kernel() {
        for (text, canonical) in [
            ("", ""),
            ("\n", ""),
            (" 3 \n", "3"),
            ("0-3,8\n", "0-3,8"),
            ("8,0,1,2,3", "0-3,8"),
            ("4-7:1/2", "4,6"),
            ("0-9:2/4", "0-1,4-5,8-9"),
            ("0-9:0/4", ""),
            ("5,5,5-6", "5-6"),
            ("1 2", "1-2"),
            ("63-64,127-128", "63-64,127-128"),
            ("8191", "8191"),
        ] {
            assert_eq!(set(text).to_string(), canonical, "{text:?}");
        }
    }

    #[test]
    fn masks() {
        let mask = |words: &[u32]| CpuSet::from_mask(words.iter().copied()).map(|s| s.to_string());
        assert_eq!(mask(&[]), Some(String::new()));
        assert_eq!(mask(&[0, 0, 0]), Some(String::new()));
        assert_eq!(mask(&[0b11, 1 << 31, 0, 1]), Some("0-1,63,96".into()));
        assert_eq!(CpuSet::from_mask([1, 0, 0]), Some(set("0")), "no trailing words");
        let at = |word: usize| mask(&[vec![0; word], vec![1 << 31]].concat());
        assert_eq!((at(2047), at(2048)), (Some("65535".into()), None));
    }

    #[test]
    fn refusals_name_the_token() {
        for (text, error) in [
            ("3-1", ListError::Backwards { token: "3-1".into() }),
            ("0-7:3/2", ListError::Stride { token: "0-7:3/2".into() }),
            ("0-7:1/0", ListError::Stride { token: "0-7:1/0".into() }),
            ("1,x", ListError::Token { token: "x".into() }),
            ("+1", ListError::Token { token: "+1".into() }),
            ("-1", ListError::Token { token: "-1".into() }),
            ("4:1/2", ListError::Token { token: "4:1/2".into() }),
            ("0-65536", ListError::TooLarge { token: "0-65536".into() }),
            ("99999999999", ListError::TooLarge { token: "99999999999".into() }),
        ] {
            assert_eq!(text.parse::<CpuSet>(), Err(error), "{text:?}");
        }
    }

    #[test]
    fn algebra() {
        let (a, b) = (set("0-3,100"), set("2-5,300"));
        assert_eq!(a.union(&b), set("0-5,100,300"));
        assert_eq!(a.intersection(&b), set("2-3"));
        assert_eq!(a.difference(&b), set("0-1,100"));
        assert!(set("2").is_subset(&a) && !b.is_subset(&a) && set("").is_subset(&set("")));
        assert_eq!((a.common(&b), b.common(&a), a.common(&set(""))), (2, 2, 0));
        assert!(set("1").is_disjoint(&b) && !a.is_disjoint(&b));
        assert_eq!((a.first(), a.last(), a.len()), (Some(CpuId(0)), Some(CpuId(100)), 5));
        assert_eq!(set("").first(), None);
    }

    #[test]
    fn no_trailing_words_so_equal_sets_are_equal() {
        let mut a = set("1,300");
        assert!(a.remove(CpuId(300)) && !a.remove(CpuId(300)) && !a.remove(CpuId(9000)));
        assert_eq!(a, set("1"));
        assert!(!a.insert(CpuId(1)) && a.insert(CpuId(2)) && !a.insert(CpuId(MAX_ID + 1)));
        assert_eq!(a, set("1-2"));
        assert_eq!(a.iter().rev().collect::<Vec<_>>(), [CpuId(2), CpuId(1)]);
    }

    #[test]
    fn order_by_value() {
        use std::cmp::Ordering::{Equal, Greater, Less};
        for (a, b, order) in [
            ("", "", Equal),
            ("", "0", Less),
            ("3", "0-2", Greater),
            ("0,70", "1,70", Less),
            ("0-63", "64", Less),
            ("5,300", "6-255", Greater),
        ] {
            assert_eq!((set(a).cmp_value(&set(b)), set(b).cmp_value(&set(a))), (order, order.reverse()));
        }
    }

    #[test]
    fn json_is_the_list() {
        assert_eq!(serde_json::to_string(&set("0-3,8")).unwrap(), "\"0-3,8\"");
        assert_eq!(serde_json::from_str::<CpuSet>("\"0-3,8\"").unwrap(), set("0-3,8"));
        assert!(serde_json::from_str::<CpuSet>("\"3-0\"").is_err());
    }
}
