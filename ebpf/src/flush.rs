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
        if slot.serial == want.serial {
            if slot.cgroup != 0 {
                close(slot, task, pid, now);
            }
            *copy = *slot;
        } else {
            if slot.cgroup != 0 {
                book(slot, class::STRADDLE, now);
            }
            *copy = *slot;
            restart(slot, want, task, pid, now);
        }
    }
    0
}

/// Closes the open slice; a new one of the same task begins at once.
#[inline(always)]
unsafe fn close(slot: &mut Slot, task: Task, pid: u32, now: u64) {
    unsafe {
        if pid != slot.pid {
            slot.breaks += 1;
            book(slot, class::UNKNOWN, now);
            begin_slice::<Probed>(slot, task, pid);
        } else if classify::<Probed>(slot, task, pid) != slot.class {
            book(slot, class::STRADDLE, now);
            begin_slice::<Probed>(slot, task, pid);
        } else {
            end_slice(slot, now);
        }
    }
}

/// Starts the epoch that `want` asks for.
#[inline(always)]
unsafe fn restart(slot: &mut Slot, want: &CpuConfig, task: Task, pid: u32, now: u64) {
    *slot = Slot {
        cgroup: want.cgroup,
        level: want.level,
        generation: want.generation,
        serial: want.serial,
        version: VERSION,
        from_ns: now,
        last_ns: now,
        ..Slot::default()
    };
    if want.cgroup != 0 {
        // SAFETY: the current task.
        unsafe { begin_slice::<Probed>(slot, task, pid) };
    }
}
