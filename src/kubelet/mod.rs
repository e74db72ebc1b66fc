//! What the kubelet left behind: its CPU and memory managers' checkpoints, read, judged and written.
//!
//! Problem: a node that changes hands has a state file of one of four versions, with checksums over the dumps of Go
//! values, and pods that run on what it says. Whoever takes over must know two things apart: what the kubelet makes of
//! the file, faults included, and what of it is true.
//! Steps: `layout` (the Go types, as data), `json` (Go's reader), `dump` (checksums and Go's writer), `ranges` (Go's
//! CPU lists) are the means; [`load`](fn@load) and [`start`] are the kubelet's verdict, [`inspect`] is truepin's with its
//! [`Finding`]s, [`adoptions`] what there is to take over, [`export`](fn@export) the way back.
//! Invariants: no name of this program reaches a checksum; no bytes make any of it panic; nothing is repaired silently.

mod adopt;
mod dump;
mod envelope;
mod export;
mod finding;
mod inspect;
mod json;
mod layout;
mod load;
mod memory;
mod ranges;
mod weigh;

pub use adopt::{Adoption, adoptions};
pub use envelope::Format;
pub use export::{Exported, export};
pub use finding::{Finding, FindingDoc, Problem};
pub use inspect::{Context, Entry, Inspection, inspect};
pub use json::JsonError;
pub use load::{Containers, Entries, LoadError, Machine, Setup, StartError, State, load, start};
pub use memory::{Block, MemoryInspection, inspect_memory, load_memory};
pub use ranges::{CpuRanges, MAX_CPUS, RangeError};
