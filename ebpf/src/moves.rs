//! Moves: a process or thread that is taken out of its owner's cgroup.
//!
//! Problem: whose task it is is decided by its cgroup, so one that is moved to another is nobody's departure: by the time
//! that it arrives on another CPU it is not the owner's any more.
//! Steps: (1) where `cgroup_attach_task` (`kernel/cgroup/cgroup.c`) begins: remember whose the task is; (2) at the
//! tracepoint of the same name, which the kernel passes when a move has succeeded: whose is it now? If not the same
//! owner's any more, count that, and a departure if the move has put it on another CPU already, and send a record.
//! Every move by a write of `cgroup.procs` or `cgroup.threads` goes through that function, and no fork, exit or removal of
//! a cgroup does; truepin's own moves are left out.
//! Invariants: `cgroup_mutex` is held from the begin to the tracepoint, so one entry is enough and no count needs an atomic;
//! a move whose begin was not seen is counted, because it may have been anybody's.
//!
//! The begin is an fentry, or a kprobe where the kernel loads no trampolines: its fields are probe reads. Moves are rare.

use crate::{
    departures::owner_of,
    maps::{CONFIG, COUNTERS, CPUS, DEPARTURES, LOSSES, MOVING, OWN_TGID},
    read::{Addr, Direct, Probed, Task},
    writes::tgid,
};
use aya_ebpf::{
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_ktime_get_ns,
        generated::bpf_get_current_cgroup_id,
    },
    macros::{btf_tracepoint, fentry, kprobe},
    programs::{BtfTracePointContext, FEntryContext, ProbeContext},
};
use truepin_abi::{MovedOut, Moving};

/// `(struct cgroup *dst_cgrp, struct task_struct *leader, bool threadgroup)`
#[fentry(function = "cgroup_attach_task")]
pub fn move_begins(ctx: FEntryContext) -> i32 {
    // SAFETY: every access is a probe read.
    unsafe { begins(ctx.arg(1)) }
    0
}

#[kprobe]
pub fn move_begins_kprobe(ctx: ProbeContext) -> u32 {
    if let Some(leader) = ctx.arg(1) {
        // SAFETY: as above.
        unsafe { begins(leader) }
    }
    0
}

/// `(struct cgroup *dst_cgrp, const char *path, struct task_struct *task, bool threadgroup)`
#[btf_tracepoint(function = "cgroup_attach_task")]
pub fn cgroup_attach_task(ctx: BtfTracePointContext) -> i32 {
    // SAFETY: a trusted pointer, by the tracepoint's type.
    unsafe {
        let whole: u64 = ctx.arg(3);
        moved(Task(ctx.arg(2)), whole & 1 == 1);
    }
    0
}

#[inline(always)]
unsafe fn begins(leader: Addr) {
    unsafe {
        let (Some(moving), Some(config)) = (MOVING.get_ptr_mut(0), CONFIG.get(0)) else { return };
        let who = bpf_get_current_pid_tgid();
        let mut now = Moving { who, ..Moving::default() };
        let task = Task(leader);
        if config.levels != 0
            && OWN_TGID.get(0).is_some_and(|own| *own != tgid(who))
            && let Some((cgroup, owner)) = owner_of::<Probed>(task, config.levels)
        {
            (now.cgroup, now.owner, now.cpu) = (cgroup, owner + 1, task.cpu::<Probed>());
            now.by = bpf_get_current_cgroup_id();
        }
        *moving = now;
    }
}

#[inline(always)]
unsafe fn moved(task: Task, whole: bool) {
    unsafe {
        let (Some(moving), Some(config)) = (MOVING.get_ptr_mut(0), CONFIG.get(0)) else { return };
        let was = *moving;
        (*moving).who = 0;
        let who = bpf_get_current_pid_tgid();
        if was.who != who {
            if let Some(losses) = LOSSES.get_ptr_mut(0) {
                (*losses).moves_unseen += 1;
            }
            return;
        }
        if was.owner == 0
            || owner_of::<Direct>(task, config.levels).is_some_and(|(_, owner)| owner + 1 == was.owner)
        {
            return;
        }
        let Some(counters) = COUNTERS.get_ptr_mut(was.owner - 1) else { return };
        (*counters).moved_out += 1;
        let to = task.cpu::<Direct>();
        let its = |cpu| CPUS.get(cpu).is_some_and(|c| c.owner == was.owner);
        if its(was.cpu) && !its(to) {
            (*counters).departures += 1;
        }
        match DEPARTURES.reserve::<MovedOut>(0) {
            Some(mut record) => {
                record.write(MovedOut {
                    cgroup: was.cgroup,
                    at_ns: bpf_ktime_get_ns(),
                    into: task.cgroup::<Direct>().id::<Direct>(),
                    by_cgroup: was.by,
                    pid: task.pid::<Direct>(),
                    tgid: task.tgid::<Direct>(),
                    from: was.cpu,
                    to,
                    by: tgid(who),
                    whole: u32::from(whole),
                    comm: task.comm(),
                    by_comm: bpf_get_current_comm().unwrap_or_default(),
                });
                record.submit(0);
            }
            None => {
                if let Some(losses) = LOSSES.get_ptr_mut(0) {
                    (*losses).ring_drops += 1;
                }
            }
        }
    }
}
