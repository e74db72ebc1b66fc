//! The flush: run on a chosen CPU by user space (`BPF_PROG_TEST_RUN` with a CPU), it closes the open slice there and
//! publishes the slot.
//!
//! Problem: a pinned busy thread may not switch for minutes, and a copy of a slot that its CPU is writing may be torn.
//! Steps: (1) read what user space wants of this CPU; (2) if the entry changed, close the open slice as straddle into
//! the epoch that ends, publish it, start the new epoch; else close the open slice and publish.
//! Invariants: preemption is off for the whole run (and interrupts too, when another CPU asked), so the switch
//! program cannot run in between; `COPY` is written here alone, so user space that reads after the run needs no
//! sequence word.
//!
//! A busy task can change sides without a switch (its cgroup is changed while it runs, or a kernel thread is bound).
//! The flush sees that and books the slice to straddle: it belongs to neither side for certain.

use crate::{
    ledger::{begin_slice, book, classify, end_slice},
    maps::{CPUS, SLOTS},
    read::{Addr, Probed, Task},
};
use aya_ebpf::{
    helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns, generated::bpf_get_current_task},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use truepin_abi::{COPY, CpuConfig, LIVE, Slot, VERSION, class};

/// Loaded, never attached; the tracepoint named here is of no account.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn flush(_: RawTracePointContext) -> i32 {
    // SAFETY: no precondition.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let (Some(slot), Some(copy), Some(want)) =
        (SLOTS.get_ptr_mut(LIVE), SLOTS.get_ptr_mut(COPY), CPUS.get(cpu))
    else {
        return 0;
    };
    // SAFETY: values of this CPU's own, and nothing else that writes them runs on it now.
    unsafe {
        let slot = &mut *slot;
        let task = Task(bpf_get_current_task() as Addr);
        let pid = task.pid::<Probed>();
        let now = bpf_ktime_get_ns();
        let ends = slot.serial != want.serial;
        let anew = if slot.cgroup == 0 {
            ends
        } else if ends {
            book(slot, class::STRADDLE, now);
            true
        } else {
            close(slot, task, pid, now)
        };
        // An epoch that ends is published as it is now; one that goes on, with the slice that begins now.
        if ends {
            *copy = *slot;
            *slot = started(want, now);
        }
        if anew && slot.cgroup != 0 {
            begin_slice::<Probed>(slot, task, pid);
        }
        if !ends {
            *copy = *slot;
        }
    }
    0
}

/// Closes the open slice. True if the next one is of another task, or of another class, than was believed.
#[inline(always)]
unsafe fn close(slot: &mut Slot, task: Task, pid: u32, now: u64) -> bool {
    if pid != slot.pid {
        slot.breaks += 1;
        book(slot, class::UNKNOWN, now);
        return true;
    }
    // SAFETY: the current task.
    if unsafe { classify::<Probed>(slot, task, pid) } != slot.class {
        book(slot, class::STRADDLE, now);
        return true;
    }
    end_slice(slot, now);
    false
}

/// The slot at the start of the epoch that `want` asks for.
#[inline(always)]
fn started(want: &CpuConfig, now: u64) -> Slot {
    Slot {
        cgroup: want.cgroup,
        level: want.level,
        generation: want.generation,
        serial: want.serial,
        version: VERSION,
        from_ns: now,
        last_ns: now,
        ..Slot::default()
    }
}
