//! The durable record in memory, and failures of it on order.

use std::{collections::BTreeMap, sync::Arc};
use truepin::checkpoint::{self, Checkpoint};

/// What happens at a chosen save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    /// The agent dies before anything is durable.
    CrashBefore,
    /// The agent dies when all is durable and it does not know yet.
    CrashAfter,
    /// Refused; nothing is durable.
    Full,
    /// Reported as failed, and durable all the same: the rename went through, the fsync of the directory did not.
    Doubtful,
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

/// One file that is replaced as a whole.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    /// What a restart reads: decoded from the bytes that were stored, once.
    record: Option<Arc<Checkpoint>>,
    saves: u64,
    faults: BTreeMap<u64, DiskFault>,
    /// Every save fails until this is taken back.
    pub full: bool,
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

    /// A new agent starts on the same disk.
    pub(super) fn restart(&mut self) {
        self.faults.clear();
    }

    /// The record that a restart would read.
    #[must_use]
    pub fn record(&self) -> Option<&Checkpoint> {
        self.record.as_deref()
    }

    pub(super) fn save(&mut self, record: &Checkpoint) -> Saved {
        let fault = self.faults.remove(&self.saves);
        self.saves += 1;
        let Ok(bytes) = checkpoint::encode(record) else {
            return Saved::Failed("the record does not encode");
        };
        if self.full {
            return Saved::Failed("no space left on device");
        }
        let durable = match fault {
            None | Some(DiskFault::CrashAfter | DiskFault::Doubtful) => match checkpoint::decode(&bytes) {
                Ok(record) => Some(Arc::new(record)),
                Err(_) => return Saved::Failed("the record does not decode"),
            },
            Some(DiskFault::CrashBefore | DiskFault::Full) => None,
        };
        if durable.is_some() {
            self.record = durable;
        }
        match fault {
            None => Saved::Durable,
            Some(DiskFault::CrashBefore | DiskFault::CrashAfter) => Saved::Dead,
            Some(DiskFault::Full) => Saved::Failed("no space left on device"),
            Some(DiskFault::Doubtful) => Saved::Failed("the directory could not be synced"),
        }
    }
}
