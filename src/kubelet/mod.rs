//! What the kubelet left behind: its CPU and memory managers' checkpoints, read, judged and written.
//!
//! Problem: a node that changes hands has a state file of one of four versions, with checksums over the dumps of Go
//! values, and pods that run on what it says. Whoever takes over must know two things apart: what the kubelet makes of
//! the file, faults included, and what of it is true.
//! Steps: `layout` (the Go types, as data), `syntax` and `json` (Go's reader), `dump` (checksums and Go's writer), `ranges` (Go's
//! CPU lists) are the means; [`load`](fn@load) and [`start`] are the kubelet's verdict, [`inspect`] is truepin's with its
//! [`Finding`]s, [`adoptions`] what there is to take over, [`judge`] all of it as a document,
//! [`export`](fn@export) the way back, [`replay`] what a node of the kubelet would have done.
//! Invariants: no name of this program reaches a checksum; no bytes make any of it panic; nothing is repaired silently.

mod adopt;
mod document;
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
pub mod replay;
mod syntax;
#[cfg(test)]
mod tests;
mod weigh;

pub use adopt::{Adoption, adoptions};
pub use document::{
    Answer, CPU_FILE, ContainersError, FileDoc, ImportDoc, ImportedDoc, Input, Judgement, KubeletDoc,
    MEMORY_FILE, SharingDoc, TruepinDoc, judge, parse_containers,
};
pub use envelope::Format;
pub use export::{Exported, export};
pub use finding::{Finding, FindingDoc, Problem};
pub use inspect::{Context, Entry, Inspection, inspect};
pub use load::{Containers, Entries, LoadError, Machine, Setup, StartError, State, load, start};
pub use memory::{Block, MemoryInspection, inspect_memory, load_memory};
pub use ranges::{CpuRanges, MAX_CPUS, RangeError};
pub use syntax::JsonError;

/// Texts whose checksums are a checkpoint's, for those who compare with the kubelet: by version, the dump that is hashed.
#[must_use]
pub fn preimages(file: &[u8]) -> Vec<(&'static str, String)> {
    use layout::{CPU_NAME, CPU_V1, CPU_V2, CPU_V3, MEMORY_NAME, MEMORY_V1, MEMORY_V2};
    let layouts = [
        ("v1", &CPU_V1, CPU_NAME),
        ("v2", &CPU_V2, CPU_NAME),
        ("v3", &CPU_V3, CPU_NAME),
        ("memory v1", &MEMORY_V1, MEMORY_NAME),
        ("memory v2", &MEMORY_V2, MEMORY_NAME),
    ];
    let dump = |(version, layout, name): (&'static str, &'static layout::Layout, &str)| {
        let mut value = layout::Value::fresh(layout);
        let readable = json::decode(file, layout, &mut value).result.is_ok();
        readable.then(|| (version, dump::preimage(layout, name, &value)))
    };
    layouts.into_iter().filter_map(dump).collect()
}
