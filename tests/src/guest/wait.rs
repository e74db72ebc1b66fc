//! Waiting with a limit, and durations in words.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

/// How often a condition is looked at. Short against every limit used, long against what one look costs in an
/// emulated machine (well below 1 ms for a file).
const STEP: Duration = Duration::from_millis(20);

/// `n` seconds.
#[must_use]
pub const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// `n` milliseconds.
#[must_use]
pub const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Waits until `look` says true; after `limit` an error "waited N s for `what`". An error of `look` ends the wait.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    wait_for(what, limit, || Ok(look()?.then_some(())))
}

/// Waits until `look` has an answer, and returns it; otherwise as [`wait_until`].
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        // Looked at once more after the limit: a machine that stood still must not turn a yes into a no.
        let late = start.elapsed() >= limit;
        if let Some(answer) = look()? {
            return Ok(answer);
        }
        anyhow::ensure!(!late, "waited {:.1} s for {what}", start.elapsed().as_secs_f64());
        sleep(STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_and_gives_up() {
        let mut n = 0;
        let third = wait_for("three", secs(5), || {
            n += 1;
            Ok((n == 3).then_some(n))
        });
        assert_eq!(third.unwrap(), 3);
        let error = wait_until("rain", millis(50), || Ok(false)).unwrap_err().to_string();
        assert!(error.starts_with("waited 0.") && error.ends_with("s for rain"), "{error}");
        assert_eq!(wait_until("x", secs(5), || anyhow::bail!("broken")).unwrap_err().to_string(), "broken");
    }
}
