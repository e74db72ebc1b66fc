//! Departures: a task of an owner that comes to a CPU which is not the owner's.
//!
//! Problem: every way to a CPU must be seen, but a legal migration must wake nobody.
//! Steps: a task reaches a CPU by `sched_migrate_task` or, after a fork, by `sched_wakeup_new`. (1) no owners: return;
//! (2) find the owner by the id of the task's cgroup, else by its ancestors, at depths where an owner lives, from the
//! deepest up; (3) count; (4) if the CPU is not the owner's, count that and send a record, at most one for each owner
//! and CPU in a millisecond.
//! Invariant: counts are exact; records are samples, and one that found no room is counted.
//!
//! Both tracepoints run with interrupts off, so the per-CPU counters need no atomics.

use crate::{
    maps::{CONFIG, COUNTERS, CPUS, DEPARTURES, LOSSES, OWNERS},
    read::{Direct, Reader, Task},
};
use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_ns},
    macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use truepin_abi::{Counters, DEPARTURE_PERIOD_NS, Departure, MAX_LEVEL, arrival};

/// `(task_struct *p, int dest_cpu)`, before the task's CPU changes.
#[btf_tracepoint(function = "sched_migrate_task")]
pub fn sched_migrate_task(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: a trusted pointer, by the tracepoint's type.
    unsafe {
        let task = Task(ctx.arg(0));
        let to: i32 = ctx.arg(1);
        arrived(task, to.cast_unsigned(), arrival::MIGRATED);
    }
    0
}

/// `(task_struct *p)`, with its CPU chosen.
#[btf_tracepoint(function = "sched_wakeup_new")]
pub fn sched_wakeup_new(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: as above.
    unsafe {
        let task = Task(ctx.arg(0));
        arrived(task, task.cpu::<Direct>(), arrival::FORKED);
    }
    0
}

#[inline(always)]
unsafe fn arrived(task: Task, to: u32, kind: u32) {
    unsafe {
        let Some(config) = CONFIG.get(0) else { return };
        let levels = config.levels;
        if levels == 0 {
            return;
        }
        let Some((cgroup, owner)) = owner_of::<Direct>(task, levels) else { return };
        let Some(counters) = COUNTERS.get_ptr_mut(owner) else { return };
        let counters = &mut *counters;
        let from = task.cpu::<Direct>();
        if kind == arrival::MIGRATED {
            // The tracepoint may fire without a move.
            if from == to {
                return;
            }
            counters.migrations += 1;
        }
        if CPUS.get(to).is_some_and(|cpu| cpu.owner == owner + 1) {
            return;
        }
        counters.departures += 1;
        let now = bpf_ktime_get_ns();
        if now.wrapping_sub(counters.sent_ns) < DEPARTURE_PERIOD_NS {
            counters.suppressed += 1;
            return;
        }
        send(
            counters,
            Departure {
                cgroup,
                at_ns: now,
                pid: task.pid::<Direct>(),
                tgid: task.tgid::<Direct>(),
                from,
                to,
                by: current_pid(),
                kind,
                comm: task.comm(),
            },
        );
    }
}

/// Thread id of the current task.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the upper half is the process id")]
fn current_pid() -> u32 {
    bpf_get_current_pid_tgid() as u32
}

/// Cgroup and index of the owner that the task belongs to.
#[inline(always)]
pub unsafe fn owner_of<R: Reader>(task: Task, levels: u32) -> Option<(u64, u32)> {
    unsafe {
        let cgroup = task.cgroup::<R>();
        let id = cgroup.id::<R>();
        if let Some(owner) = OWNERS.get(id) {
            return Some((id, *owner));
        }
        // Strict ancestors only; the root (level 0) is nobody's.
        let own = cgroup.level::<R>();
        let mut level = MAX_LEVEL;
        while level > 0 {
            if level < own && levels >> level & 1 == 1 {
                let id = cgroup.ancestor_id(level);
                if let Some(owner) = OWNERS.get(id) {
                    return Some((id, *owner));
                }
            }
            level -= 1;
        }
        None
    }
}

#[inline(always)]
fn send(counters: &mut Counters, departure: Departure) {
    match DEPARTURES.reserve::<Departure>(0) {
        Some(mut record) => {
            counters.sent_ns = departure.at_ns;
            record.write(departure);
            record.submit(0);
        }
        None => {
            if let Some(losses) = LOSSES.get_ptr_mut(0) {
                // SAFETY: a value of this CPU's own, written with interrupts off.
                unsafe { (*losses).ring_drops += 1 };
            }
        }
    }
}
