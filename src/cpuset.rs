//! CPU numbers and sets of them.

use crate::idset::IdSet;
use serde::{Deserialize, Serialize};

/// A logical CPU, by the kernel's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuId(pub u32);

/// A set of CPUs.
pub type CpuSet = IdSet<CpuId>;

impl From<u32> for CpuId {
    fn from(id: u32) -> Self {
        Self(id)
    }
}

impl From<CpuId> for u32 {
    fn from(id: CpuId) -> Self {
        id.0
    }
}

impl std::fmt::Display for CpuId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
