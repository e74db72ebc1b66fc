//! The independent observer of I1 to I4 on a real kernel.
//!
//! Problem: truepin must not be the judge of its own promises. So this reads the kernel's files and every thread's
//! mask itself, shares no code with what plans, sweeps or observes (CPU lists and their algebra are its own too), and
//! knows only what was promised to whom. Nor may it help: a question makes the agent look at everything, and mend what
//! nothing else would have told it of. So the promises are read from the agent's record, behind its back.
//! Steps: [`Promise::recorded`] reads the promises; [`Seen::now`] reads cgroups and threads; [`Seen::breaches`] compares
//! them; [`observe`] does it all until a breach is certain.
//!
//! What counts, by [`When`]:
//!
//! | | at any instant, also between two writes of a plan | when the agent has settled, or is dead |
//! | --- | --- | --- |
//! | I1 | promises are disjoint; no CPU is in the effective sets of two owners that have theirs for themselves | each owner's cgroup, where there is one, has cpuset files; its effective set is its promise as far as it is online; nobody outside may use any of it |
//! | I2 | every populated cgroup with cpuset files has an effective CPU | the same |
//! | I3 | the root cgroup has CPUs beyond the owners', the reserved ones that are online among them | the same |
//! | I4 | every thread that may be moved has an online CPU in its mask | no thread of an owner is allowed outside its set |
//!
//! Reading takes time, and what is read is not of one instant. A reading counts when the promises were the same before and
//! after it, and a breach when it is there, word for word, in each of [`LOOKS`] readings in a row: a set that moves on
//! between two reads is no breach. With the agent dead or stopped nothing moves, and every breach is one.

mod cpus;
mod judge;
mod promise;
mod seen;
#[cfg(test)]
mod tests;

pub use cpus::Cpus;
pub use promise::{Kept, Promise};
pub use seen::Seen;

use super::wait::millis;
use std::{collections::BTreeSet, fmt::Write as _, thread};
use truepin::CpuSet;

/// Readings in which a breach must be found.
pub const LOOKS: u32 = 3;
/// Readings during which the promises may change. Each takes some ten milliseconds under emulation, and an agent that has
/// work changes them a few times a second.
const TORN: u32 = 20;

/// When it is looked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Whatever the agent is doing.
    Anytime,
    /// Nothing is left to do.
    Settled,
}

/// Looks, and looks again while anything is wrong; an error names what was wrong in [`LOOKS`] readings in a row.
/// `read` gives the promises, before and after each reading.
pub fn observe(
    mut read: impl FnMut() -> anyhow::Result<Vec<Promise>>,
    reserved: &CpuSet,
    when: When,
) -> anyhow::Result<Seen> {
    let reserved: Cpus = reserved.to_string().parse()?;
    let mut certain: Option<BTreeSet<String>> = None;
    let (mut looks, mut torn) = (0, 0);
    let mut promised = read()?;
    loop {
        let seen = Seen::now()?;
        let after = read()?;
        if after != promised {
            torn += 1;
            anyhow::ensure!(
                torn < TORN,
                "{torn} times the promises changed in a reading: {promised:?}, {after:?}"
            );
            promised = after;
            continue;
        }
        looks += 1;
        let breaches = seen.breaches(&promised, &reserved, when);
        let both = match certain {
            None => breaches,
            Some(before) => before.intersection(&breaches).cloned().collect(),
        };
        if both.is_empty() {
            return Ok(seen);
        }
        if looks >= LOOKS {
            let mut text = format!("the observer found, in {looks} readings:");
            for b in &both {
                let _ = write!(text, "\n  {b}");
            }
            anyhow::bail!("{text}\n  promised: {promised:?}");
        }
        certain = Some(both);
        thread::sleep(millis(50));
    }
}
