//! What of the state is made durable, and whether it is.

use super::State;
use crate::checkpoint::{self, Checkpoint};

impl State {
    /// The record of the present table.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            version: checkpoint::VERSION,
            minor: self.kept.0,
            epoch: self.epoch,
            boot_id: self.boot_id.clone(),
            topology: self.fingerprint.clone(),
            strategy: self.strategy.clone(),
            assignments: self.assignments.clone(),
            containers: self.containers.clone(),
            first: self.first.clone(),
            extra: self.kept.1.clone(),
        }
    }

    /// Whether the record lags behind the table.
    pub(super) fn is_unsaved(&self) -> bool {
        match &self.durable {
            Some(d) => {
                d.assignments != self.assignments
                    || d.first != self.first
                    || d.containers != self.containers
                    || d.boot_id != self.boot_id
                    || d.strategy != self.strategy
                    || d.topology != self.fingerprint
            }
            None => {
                self.assignments.sets().next().is_some()
                    || !self.first.is_empty()
                    || !self.containers.is_empty()
            }
        }
    }

    /// Whether the record has all that a step rests on: the owners, and first values of what is written. First values
    /// that are not needed any more may still be in it.
    pub(super) fn is_covered(&self) -> bool {
        match &self.durable {
            Some(d) => {
                d.assignments.owners == self.assignments.owners
                    && d.assignments.promised == self.assignments.promised
                    && self.first.iter().all(|(path, f)| d.first.get(path) == Some(f))
            }
            None => self.assignments.sets().next().is_none() && self.first.is_empty(),
        }
    }
}
