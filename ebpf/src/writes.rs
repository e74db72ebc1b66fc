//! Who writes which file of a watched cgroup: programs at the start and at the end of `cgroup_file_write`
//! (`kernel/cgroup/cgroup.c`), through which every write to a cgroup file goes, in the writer's own context.
//!
//! Problem: a writer that exits at once has no name left when an event about it is read, a refused write changes
//! nothing, and the kernel tells of what came of a write before the write has ended.
//! Steps: (1) at the start: not ours, to a watched cgroup, to a file that matters, on cgroup v2: remember who, what and
//! when; (2) at the end: if it succeeded, send that; forget it.
//! Invariants: between start and end a write stands in `WRITING`, and its record is sent before it leaves there: what
//! user space finds in neither of the two, first looked for under way and then in the ring, has not begun or was
//! refused. What found no room is counted, and so is a write whose end the kernel did not let us see: the next one of
//! its thread, to whatever cgroup file, takes it out of `WRITING`, or it would be told as that one's.
//!
//! The same two bodies serve fentry and fexit, and kprobe and kretprobe where the kernel loads no trampolines. All
//! fields are probe reads: a write of a cgroup file takes microseconds.

use crate::{
    maps::{OWN_TGID, WATCHED, WRITES, WRITES_LOST, WRITING},
    read::{Addr, Node, text},
};
use aya_ebpf::{
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_ktime_get_ns,
        generated::bpf_get_current_cgroup_id,
    },
    macros::{fentry, fexit, kprobe, kretprobe, raw_tracepoint},
    programs::{FEntryContext, FExitContext, ProbeContext, RawTracePointContext, RetProbeContext},
};
use truepin_abi::{Write, watch};

/// `(struct kernfs_open_file *of, char *buf, size_t nbytes, loff_t off)`; `buf` is the kernel's own copy, NUL-terminated
/// (`kernfs_fop_write_iter`).
#[fentry(function = "cgroup_file_write")]
pub fn write_begins(ctx: FEntryContext) -> i32 {
    // SAFETY: every access is a probe read.
    unsafe { begins(ctx.arg(0), ctx.arg(1)) }
    0
}

/// The same and, fifth, what it returned.
#[fexit(function = "cgroup_file_write")]
pub fn write_ends(ctx: FExitContext) -> i32 {
    ends(ctx.arg(4));
    0
}

#[kprobe]
pub fn write_begins_kprobe(ctx: ProbeContext) -> u32 {
    if let (Some(of), Some(buf)) = (ctx.arg(0), ctx.arg(1)) {
        // SAFETY: as above.
        unsafe { begins(of, buf) }
    }
    0
}

#[kretprobe]
pub fn write_ends_kprobe(ctx: RetProbeContext) -> u32 {
    ends(ctx.ret());
    0
}

/// Run on request, in the context of user space: tells the others whose writes are ours. The kernel's own number of the
/// process, which inside a pid namespace no system call gives.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn introduce(_: RawTracePointContext) -> i32 {
    if let Some(own) = OWN_TGID.get_ptr_mut(0) {
        // SAFETY: written here alone, and by one caller.
        unsafe { *own = tgid(bpf_get_current_pid_tgid()) };
    }
    0
}

#[inline(always)]
unsafe fn begins(of: Addr, buf: Addr) {
    unsafe {
        let who = bpf_get_current_pid_tgid();
        if OWN_TGID.get(0).is_none_or(|own| *own == tgid(who)) {
            return;
        }
        // A thread is in one write at a time. Nearly always nothing is there: a lookup, which takes no lock, as removing
        // does.
        if WRITING.get_ptr(who).is_some() {
            let _ = WRITING.remove(who);
            lost(0);
        }
        let node = Node::of_open_file(of);
        let dir = node.parent();
        let cgroup = dir.id();
        let told = match WATCHED.get(cgroup) {
            Some(told) => *told & (watch::OWN | watch::TASKS),
            None if WATCHED.get(dir.parent().id()).is_some_and(|up| *up & watch::CHILDREN != 0) => watch::OWN,
            None => return,
        };
        let mut write = Write { cgroup, ..core::mem::zeroed() };
        node.name(&mut write.file);
        if told & kind(&write.file) == 0 || !dir.is_v2() {
            return;
        }
        write.begun_ns = bpf_ktime_get_ns();
        write.by = bpf_get_current_cgroup_id();
        (write.pid, write.tgid) = (pid(who), tgid(who));
        write.comm = bpf_get_current_comm().unwrap_or_default();
        text(buf, &mut write.text);
        if WRITING.insert(who, write, 0).is_err() {
            lost(0);
        }
    }
}

#[inline(always)]
fn ends(result: i64) {
    let who = bpf_get_current_pid_tgid();
    let Some(write) = WRITING.get_ptr_mut(who) else { return };
    if result >= 0 {
        // SAFETY: an entry of this very thread's, removed by it alone while it lives.
        let write = unsafe { &mut *write };
        // SAFETY: no precondition.
        write.ended_ns = unsafe { bpf_ktime_get_ns() };
        match WRITES.reserve::<Write>(0) {
            Some(mut record) => {
                record.write(*write);
                record.submit(0);
            }
            None => lost(1),
        }
    }
    // It is there: nobody else takes it away while its thread lives.
    let _ = WRITING.remove(who);
}

/// Which of `watch` a file of this name is; 0 for one of no interest. Its first eight bytes tell: what else begins so is
/// read-only, or rarely written (`cgroup.pressure`, `cgroup.type`), and user space leaves it out.
#[inline(always)]
fn kind(name: &[u8; 24]) -> u32 {
    match name.first_chunk::<8>() {
        Some(b"cpuset.c" | b"cpuset.m" | b"cgroup.s") => watch::OWN,
        Some(b"cgroup.p" | b"cgroup.t") => watch::TASKS,
        _ => 0,
    }
}

/// `at`: which program counts.
#[inline(always)]
fn lost(at: u32) {
    if let Some(count) = WRITES_LOST.get_ptr_mut(at) {
        // SAFETY: a value of this CPU's own, and of one program's.
        unsafe { *count += 1 };
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the lower half is the thread id")]
fn pid(who: u64) -> u32 {
    who as u32
}

#[inline(always)]
pub fn tgid(who: u64) -> u32 {
    (who >> 32) as u32
}
