//! CPU lists as the kubelet reads them (`cpuset.Parse` of k8s.io/utils, used by 1.36).
//!
//! Problem: the kubelet's grammar is not the kernel's. It takes `3,1,2` and `+4`, refuses white space, `1,,2` and
//! `3-1`, knows no strides, and has no largest CPU: `5000` on a machine of 64 loads and fails only at start.
//! Steps: split at commas, each part at its first dash, numbers as `strconv.Atoi` does; kept as ascending ranges.
//! Invariants: ranges are disjoint, ascending and never touch; at most [`MAX_CPUS`] numbers, so that no text of a
//! file can take the memory or the time that it would take the kubelet.

use crate::cpuset::{CpuId, CpuSet};
use crate::idset::MAX_ID;
use std::fmt;

/// More CPUs than this are refused. The kubelet has no bound: it makes a map entry (about 50 bytes) for each number
/// of a range, so `0-9999999999` ends in its being killed and never in a started kubelet. Linux stops at 8192.
pub const MAX_CPUS: u64 = 1 << 20;

/// CPUs by number, with no largest one.
#[derive(Debug, Clone, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct CpuRanges(Vec<(u64, u64)>);

/// Why a text is no CPU list to the kubelet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// `strconv.Atoi` fails.
    #[error("{part:?} is not a number")]
    Number {
        /// The part, between commas and dash.
        part: String,
    },
    /// The end lies before the start.
    #[error("range {part:?} runs backwards")]
    Backwards {
        /// The part between commas.
        part: String,
    },
    /// The kubelet would run out of memory or never return.
    #[error("{part:?} brings the list to more than {MAX_CPUS} CPUs")]
    TooMany {
        /// The part between commas.
        part: String,
    },
}

/// `strconv.Atoi` on 64 bits. A minus cannot arrive here before a digit of the first number (the dash splits), and in
/// the second it makes a number smaller than any start.
fn atoi(part: &str) -> Result<i64, RangeError> {
    let digits = part.strip_prefix(['+', '-']).unwrap_or(part);
    let refuse = || RangeError::Number { part: part.into() };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(refuse());
    }
    part.parse::<i64>().map_err(|_| refuse())
}

impl CpuRanges {
    /// As `cpuset.Parse`: the empty text is the empty set.
    pub fn parse(text: &str) -> Result<Self, RangeError> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let mut ranges = Vec::new();
        let mut total = 0;
        for part in text.split(',') {
            let (from, to) = match part.split_once('-') {
                None => atoi(part).map(|n| (n, n))?,
                Some((a, b)) => (atoi(a)?, atoi(b)?),
            };
            if from > to {
                return Err(RangeError::Backwards { part: part.into() });
            }
            let (Ok(from), Ok(to)) = (u64::try_from(from), u64::try_from(to)) else {
                return Err(RangeError::Number { part: part.into() });
            };
            total += to - from + 1;
            if total > MAX_CPUS || (part.contains('-') && i64::try_from(to) == Ok(i64::MAX)) {
                // A range that ends at the largest integer: its counter wraps and the loop never ends.
                return Err(RangeError::TooMany { part: part.into() });
            }
            ranges.push((from, to));
        }
        Ok(Self::joined(ranges))
    }

    fn joined(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match joined.last_mut() {
                Some(last) if from <= last.1.saturating_add(1) => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        Self(joined)
    }

    /// Whether there is no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().flat_map(|(from, to)| *from..=*to)
    }

    /// CPUs in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::joined(self.0.iter().chain(&other.0).copied().collect())
    }

    /// CPUs in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            let (from, to) = (x.0.max(y.0), x.1.min(y.1));
            if from <= to {
                both.push((from, to));
            }
            // Whichever ends first has nothing more to meet.
            if x.1 < y.1 {
                a.next();
            } else {
                b.next();
            }
        }
        Self(both)
    }

    /// CPUs that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        let mut cuts = other.0.iter().peekable();
        for &(from, to) in &self.0 {
            let mut start = from;
            while let Some(&&(a, b)) = cuts.peek() {
                if a > to {
                    break;
                }
                if a > start {
                    left.push((start, a - 1));
                }
                start = start.max(b.saturating_add(1));
                if b > to {
                    break; // the next range may meet it too
                }
                cuts.next();
            }
            if start <= to {
                left.push((start, to));
            }
        }
        Self(left)
    }

    /// As a set of CPUs that Linux can have; `None` if a number is beyond [`MAX_ID`].
    #[must_use]
    pub fn to_cpus(&self) -> Option<CpuSet> {
        if self.0.last().is_some_and(|r| r.1 > u64::from(MAX_ID)) {
            return None;
        }
        self.iter().map(|n| u32::try_from(n).ok().map(CpuId)).collect()
    }
}

impl From<&CpuSet> for CpuRanges {
    fn from(cpus: &CpuSet) -> Self {
        Self::joined(cpus.iter().map(|c| (u64::from(c.0), u64::from(c.0))).collect())
    }
}

/// `CPUSet.String()`: ascending, ranges joined; what the kubelet writes.
impl fmt::Display for CpuRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (from, to)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if from == to {
                write!(f, "{comma}{from}")?;
            } else {
                write!(f, "{comma}{from}-{to}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(text: &str) -> CpuRanges {
        CpuRanges::parse(text).unwrap()
    }

    #[test]
    fn the_grammar_of_the_kubelet() {
        for (text, written) in [
            ("", ""),
            ("3,1,2,0,4-63", "0-63"),
            ("0-63,5000", "0-63,5000"),
            ("+1-+3", "1-3"),
            ("007", "7"),
            ("1-1", "1"),
            ("1,1,1-2", "1-2"),
            ("9223372036854775807", "9223372036854775807"),
        ] {
            assert_eq!(ranges(text).to_string(), written, "{text:?}");
        }
        for text in [
            "3-1", " 1", "1 ", "1,", ",1", "1,,2", "-", "1-", "-1", "1--3", "0-7:1/2", "0-99999x", "1_0", "x",
        ] {
            assert!(CpuRanges::parse(text).is_err(), "{text:?}");
        }
        for text in ["9223372036854775808", "0-9999999999", "9223372036854775806-9223372036854775807"] {
            assert!(CpuRanges::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn algebra() {
        let (a, b) = (ranges("0-3,8,10-20"), ranges("2-9,15,21"));
        assert_eq!(a.union(&b), ranges("0-21"));
        assert_eq!(a.intersection(&b), ranges("2-3,8,15"));
        assert_eq!(a.difference(&b), ranges("0-1,10-14,16-20"));
        assert_eq!(b.difference(&a), ranges("4-7,9,21"));
        assert_eq!(ranges("0-9,20-29,40").difference(&ranges("5-24,28-50")), ranges("0-4,25-27"));
        assert_eq!(ranges("5").difference(&ranges("0-2,7")), ranges("5"));
        assert!(ranges("").union(&ranges("")).is_empty());
        assert_eq!(ranges("0-3,8").to_cpus(), Some("0-3,8".parse().unwrap()));
        assert_eq!(ranges("65536").to_cpus(), None);
        assert_eq!(CpuRanges::from(&"0-3,8".parse::<CpuSet>().unwrap()), ranges("0-3,8"));
    }
}
