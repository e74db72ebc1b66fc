//! The kernel half of truepin: where the time of every watched CPU goes, and which tasks of an owner go elsewhere.
//!
//! `ledger` closes a slice at every switch, `flush` closes the open one on request and publishes the slot,
//! `departures` watches migrations and first placements, `moves` who is taken out of an owner's cgroup, `writes` sees who writes files of cgroups, `read` reads the
//! kernel's structs. Maps are in `maps`.
//!
//! Invariants: on a CPU that is not watched `sched_switch` does one test; a slot is written only on its own CPU with
//! preemption off; user space writes `CPUS`, `OWNERS`, `CONFIG` and `WATCHED` and reads the rest.
#![no_std]
#![no_main]
#![allow(
    unsafe_code,
    reason = "every access to a map value or to the kernel's memory is; the verifier checks each"
)]

mod departures;
mod flush;
mod ledger;
mod maps;
mod moves;
mod read;
mod writes;

use aya_ebpf::{macros::btf_tracepoint, programs::BtfTracePointContext};

/// Does nothing: what the kernel's own statistics and the call cost. For the benchmark, never attached otherwise.
#[btf_tracepoint(function = "sched_switch")]
pub fn empty(_: BtfTracePointContext) -> i32 {
    0
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // Unreachable: a program that could get here does not pass the verifier.
    loop {}
}

/// The kernel gives `bpf_probe_read_kernel` and `bpf_ktime_get_ns` only to programs that declare a GPL-compatible
/// licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
