//! The ledger: every switch on a watched CPU closes a slice and opens the next.
//!
//! Problem: all time of a CPU must be in exactly one class, and a switch that was not seen must show.
//! Steps at a switch: (1) not watched: return; (2) the slice that ends goes to the class of the task that came in,
//! to `unknown` if another task leaves than came, or to `straddle` if it was moved to the other side of the owner's
//! border while it ran (a busy task need not switch for that, and its time is neither's for certain); (3) if an intruder leaves, the slice goes to its name too;
//! (4) the next task is classified and, if it is an intruder, remembered.
//! Invariant: the sum over the classes plus the open slice is the time since the epoch began.
//!
//! A false alarm that is accepted: a thread that is not its process's leader and calls exec takes over the leader's pid
//! while it runs, so that slice is a broken chain. Comparing addresses of tasks instead would miss a broken chain when
//! an address is used again.
//!
//! Cost: the owner's own cgroup costs one comparison, any other cgroup that was the last one seen on its side of the
//! owner's border one or two more. That memory needs no invalidation but a new owner: an id is never used again for
//! another cgroup, and cgroup v2 cannot move a cgroup to another parent.

use crate::{
    maps::{INTRUDERS, LOSSES, SLOTS},
    read::{Direct, Reader, Task},
};
use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns},
    macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use truepin_abi::{IntruderKey, IntruderValue, LIVE, Slot, Who, class};

/// `(bool preempt, task_struct *prev, task_struct *next, unsigned int prev_state)`, with interrupts off.
#[btf_tracepoint(function = "sched_switch")]
pub fn sched_switch(ctx: BtfTracePointContext) -> i32 {
    let Some(slot) = SLOTS.get_ptr_mut(LIVE) else { return 0 };
    // SAFETY: a value of this CPU's own, and nothing else runs on it now.
    let slot = unsafe { &mut *slot };
    if slot.cgroup != 0 {
        // SAFETY: trusted pointers, by the tracepoint's type.
        unsafe { switched(slot, Task(ctx.arg(1)), Task(ctx.arg(2))) }
    }
    0
}

/// Not inlined: its stack frame is set up only where it is needed. With it in the caller an unwatched CPU paid 9 ns more
/// (over an empty program +20 instead of +11).
#[inline(never)]
unsafe fn switched(slot: &mut Slot, prev: Task, next: Task) {
    unsafe {
        let now = bpf_ktime_get_ns();
        if prev.pid::<Direct>() == slot.pid {
            // User tasks only: a kernel worker binds itself at the start of its life, as a matter of course.
            let user = slot.class == class::OWNER || slot.class == class::FOREIGN;
            if user && side::<Direct>(slot, prev) != slot.class {
                book(slot, class::STRADDLE, now);
            } else {
                end_slice(slot, now);
            }
        } else {
            slot.breaks += 1;
            book(slot, class::UNKNOWN, now);
        }
        slot.switches += 1;
        let pid = next.pid::<Direct>();
        begin_slice::<Direct>(slot, next, pid);
    }
}

/// Opens a slice of `task`, at the time when the last was closed.
#[inline(always)]
pub unsafe fn begin_slice<R: Reader>(slot: &mut Slot, task: Task, pid: u32) {
    unsafe {
        slot.pid = pid;
        slot.class = classify::<R>(slot, task, pid);
        if is_intruder(slot.class) {
            slot.who = Who {
                start_ns: task.start_ns::<R>(),
                cgroup: task.cgroup::<R>().id::<R>(),
                comm: task.comm(),
                tgid: task.tgid::<R>(),
                pad: 0,
            };
        }
    }
}

/// The class of `task` for this slot's owner.
#[inline(always)]
pub unsafe fn classify<R: Reader>(slot: &mut Slot, task: Task, pid: u32) -> u32 {
    unsafe {
        if pid == 0 {
            return class::IDLE;
        }
        if task.is_kthread::<R>() {
            return if task.is_bound::<R>() { class::KTHREAD_BOUND } else { class::KTHREAD_UNBOUND };
        }
        side::<R>(slot, task)
    }
}

/// On which side of the owner's border a user task is.
#[inline(always)]
unsafe fn side<R: Reader>(slot: &mut Slot, task: Task) -> u32 {
    unsafe {
        let cgroup = task.cgroup::<R>();
        let id = cgroup.id::<R>();
        if id == slot.cgroup || id == slot.inside {
            return class::OWNER;
        }
        if id == slot.outside {
            return class::FOREIGN;
        }
        if cgroup.level::<R>() > slot.level && cgroup.ancestor_id(slot.level) == slot.cgroup {
            slot.inside = id;
            class::OWNER
        } else {
            slot.outside = id;
            class::FOREIGN
        }
    }
}

/// Closes the slice of the task that was believed to run, and did.
#[inline(always)]
pub fn end_slice(slot: &mut Slot, now: u64) {
    let (class, began) = (slot.class, slot.last_ns);
    book(slot, class, now);
    if is_intruder(class) {
        account(slot, began, now);
    }
}

/// Books the open slice to `class`.
#[inline(always)]
pub fn book(slot: &mut Slot, class: u32, now: u64) {
    // The clock may step back by its resolution between CPUs; a slice never runs backwards.
    if now > slot.last_ns {
        // Masked, not checked: the verifier refuses an index that only the compiler knows to be small.
        slot.ns[(class & 7) as usize] += now - slot.last_ns;
        slot.last_ns = now;
    }
}

#[inline(always)]
fn is_intruder(class: u32) -> bool {
    class == class::FOREIGN || class == class::KTHREAD_UNBOUND
}

/// Adds a slice to the intruder's entry.
#[inline(always)]
fn account(slot: &Slot, began: u64, now: u64) {
    // SAFETY: no precondition.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let key = IntruderKey { pid: slot.pid, cpu, start_ns: slot.who.start_ns, serial: slot.serial };
    if let Some(known) = INTRUDERS.get_ptr_mut(key) {
        // SAFETY: a live entry; the key names this CPU, so nothing else writes it, and user space removes only
        // entries of tasks that are gone and of epochs that ended.
        let known = unsafe { &mut *known };
        known.ns += now.saturating_sub(began);
        known.last_ns = now;
        known.cgroup = slot.who.cgroup;
        known.comm = slot.who.comm;
        return;
    }
    let first = IntruderValue {
        ns: now.saturating_sub(began),
        first_ns: began,
        last_ns: now,
        cgroup: slot.who.cgroup,
        comm: slot.who.comm,
        tgid: slot.who.tgid,
        class: slot.class,
    };
    if INTRUDERS.insert(key, first, u64::from(BPF_NOEXIST)).is_err()
        && let Some(losses) = LOSSES.get_ptr_mut(0)
    {
        // SAFETY: a value of this CPU's own.
        unsafe { (*losses).intruders_lost += 1 };
    }
}
