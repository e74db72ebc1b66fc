//! The list grammar with the kernel's error numbers.
//!
//! [`truepin::idset`] parses what kernels print and operators type; a kernel that is written to also tells apart
//! a wrong form (EINVAL), a number beyond its limit (ERANGE) and one beyond 32 bits (EOVERFLOW), and knows `N`
//! for its last number and `all`. It judges region by region, from the left (`lib/bitmap-str.c`).

use super::Errno;
use truepin::idset::IdSet;

/// Parses `text` (stripped, not empty) for a kernel whose numbers run from 0 to `limit - 1`.
pub(super) fn parse<T: From<u32> + Into<u32>>(text: &str, limit: u32) -> Result<IdSet<T>, Errno> {
    let mut set = IdSet::new();
    for region in text.split(|c: char| c == ',' || c.is_ascii_whitespace()).filter(|r| !r.is_empty()) {
        let (range, pattern) = match region.split_once(':') {
            Some((range, pattern)) => (range, Some(pattern)),
            None => (region, None),
        };
        let (from, to) = match range.split_once('-') {
            _ if range.eq_ignore_ascii_case("all") => (0, limit - 1),
            Some((from, to)) => (number(from, limit)?, number(to, limit)?),
            None if pattern.is_some() => return Err(Errno::EINVAL),
            None => number(range, limit).map(|n| (n, n))?,
        };
        let (used, group) = match pattern.map(|p| p.split_once('/')) {
            Some(Some((used, group))) => (number(used, limit)?, number(group, limit)?),
            Some(None) => return Err(Errno::EINVAL),
            None => (1, 1),
        };
        if from > to || group == 0 || used > group {
            return Err(Errno::EINVAL);
        }
        if to >= limit {
            return Err(Errno::ERANGE);
        }
        for id in (from..=to).filter(|id| (id - from) % group < used) {
            set.insert(T::from(id));
        }
    }
    Ok(set)
}

fn number(text: &str, limit: u32) -> Result<u32, Errno> {
    if text == "N" {
        return Ok(limit - 1);
    }
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Errno::EINVAL);
    }
    text.parse().map_err(|_| Errno::EOVERFLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use truepin::CpuSet;

    #[test]
    fn each_kind_of_refusal() {
        for (text, result) in [
            ("0-3,7", Ok("0-3,7")),
            ("4-7:1/2", Ok("4,6")),
            ("1 2", Ok("1-2")),
            ("N", Ok("7")),
            ("all", Ok("0-7")),
            ("2-1", Err(Errno::EINVAL)),
            ("x", Err(Errno::EINVAL)),
            ("1x", Err(Errno::EINVAL)),
            ("0-7:1/0", Err(Errno::EINVAL)),
            ("8", Err(Errno::ERANGE)),
            ("0-8", Err(Errno::ERANGE)),
            ("4294967296", Err(Errno::EOVERFLOW)),
            ("8,x", Err(Errno::ERANGE)),
        ] {
            let got: Result<CpuSet, Errno> = parse(text, 8);
            assert_eq!(got, result.map(|s| s.parse().unwrap()), "{text:?}");
        }
    }
}
