//! Sets of CPUs, the observer's own: one that parsed or compared them as truepin does would share its mistakes.

use anyhow::Context;
use std::{collections::BTreeSet, fmt, str::FromStr};

/// More than any kernel has (`CONFIG_NR_CPUS` is 8192 at most); a number above it is no CPU's.
const MOST: u32 = 8192;

/// A set of CPUs; as text a list as in the kernel's files (`0-3,7`).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// It has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// Those that both have.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Those that `other` has not.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// Every one of them is in `other`.
    #[must_use]
    pub fn within(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromStr for Cpus {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let number = |digits: &str| {
            let plain = digits.bytes().all(|b| b.is_ascii_digit());
            let n = digits.parse().ok().filter(|n| plain && *n < MOST);
            n.with_context(|| format!("CPU list {text:?}: {digits:?} is no CPU's number"))
        };
        let mut set = BTreeSet::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (number(first)?, number(last)?);
            anyhow::ensure!(first <= last, "CPU list {text:?}: {part:?} runs backwards");
            set.extend(first..=last);
        }
        Ok(Self(set))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let starts = self.0.iter().filter(|n| n.checked_sub(1).is_none_or(|below| !self.0.contains(&below)));
        for first in starts {
            let last = (*first..MOST).take_while(|n| self.0.contains(n)).last().unwrap_or(*first);
            write!(f, "{comma}{first}")?;
            if last > *first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        for text in ["", "0", "0-3", "0-3,7", "1,3,5-6,8191"] {
            assert_eq!(text.parse::<Cpus>().unwrap().to_string(), text);
        }
        assert_eq!("3,0-1,2".parse::<Cpus>().unwrap().to_string(), "0-3");
        for text in [" ", "a", "1,", ",1", "3-1", "1-", "-1", "+1", "1-2-3", "0x1", "8192", "0\n"] {
            assert!(text.parse::<Cpus>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn algebra() {
        let set = |text: &str| text.parse::<Cpus>().unwrap();
        let (a, b) = (set("0-3"), set("2-5"));
        assert_eq!((a.or(&b), a.and(&b), a.without(&b)), (set("0-5"), set("2-3"), set("0-1")));
        assert!(set("1-2").within(&a) && set("").within(&a) && !b.within(&a));
        assert!(set("").is_empty() && !a.is_empty());
    }
}
