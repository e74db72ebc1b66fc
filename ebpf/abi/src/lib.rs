//! Layouts shared by the kernel half and user space.
//!
//! Problem: both halves read the same bytes, and only the compiler can see that they agree.
//! Steps: `#[repr(C)]`, fixed-width fields, padding spelled out, size and offsets asserted when either half is
//! compiled. The kernel half writes [`VERSION`] into each slot that it starts, user space refuses any other.
//! Invariant: no layout here has a byte that is not a field, so a copy never shows uninitialised memory.
#![no_std]

/// Changes with any layout or meaning below.
pub const VERSION: u32 = 3;

/// Owners that can be configured at once (`owners`, `counters`).
pub const MAX_OWNERS: u32 = 1024;
/// Pairs of task and CPU in the table of intruders.
pub const MAX_INTRUDERS: u32 = 4096;
/// Bytes of the departure ring: about 3,600 records.
pub const RING_BYTES: u32 = 256 * 1024;
/// Cgroups whose files can be watched at once (`watched`).
pub const MAX_WATCHED: u32 = 4096;
/// Writes under way at once; one holds a lock that the others wait for.
pub const MAX_WRITING: u32 = 256;
/// Bytes of the ring of writes: about 300 records.
pub const WRITE_RING_BYTES: u32 = 64 * 1024;
/// The deepest owner: one bit of [`Config::levels`] for each level. Hierarchies seen in the field end at 8 or so.
pub const MAX_LEVEL: u32 = 31;
/// At most one departure record for each owner and CPU in this time, ns.
pub const DEPARTURE_PERIOD_NS: u64 = 1_000_000;

/// The entry of the slot map that the programs work on.
pub const LIVE: u32 = 0;
/// The entry of the slot map that only the flush writes.
pub const COPY: u32 = 1;

/// Classes of running tasks: indices of [`Slot::ns`].
pub mod class {
    /// Tasks of the owner's cgroup or below it.
    pub const OWNER: u32 = 0;
    /// Any other user task.
    pub const FOREIGN: u32 = 1;
    /// A kernel thread with one allowed CPU.
    pub const KTHREAD_BOUND: u32 = 2;
    /// A kernel thread with more.
    pub const KTHREAD_UNBOUND: u32 = 3;
    /// The idle task.
    pub const IDLE: u32 = 4;
    /// The assignment, or the class of the running task, changed during the slice.
    pub const STRADDLE: u32 = 5;
    /// The task that left was not the one that had come.
    pub const UNKNOWN: u32 = 6;
}

/// How a task came to a CPU: [`Departure::kind`].
pub mod arrival {
    /// `sched_migrate_task`
    pub const MIGRATED: u32 = 0;
    /// `sched_wakeup_new`
    pub const FORKED: u32 = 1;
}

/// Which writes to a cgroup's files are told: the value of a watched cgroup.
pub mod watch {
    /// To its cpuset files and `cgroup.subtree_control`.
    pub const OWN: u32 = 1;
    /// To `cgroup.procs` and `cgroup.threads`.
    pub const TASKS: u32 = 2;
    /// To the cpuset files and `cgroup.subtree_control` of cgroups directly below.
    pub const CHILDREN: u32 = 4;
}

/// Who runs, remembered when it is switched in and is an intruder.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// `task_struct.start_boottime`, ns.
    pub start_ns: u64,
    /// Id of its cgroup on the default hierarchy.
    pub cgroup: u64,
    /// Thread name, NUL-padded.
    pub comm: [u8; 16],
    /// Process id.
    pub tgid: u32,
    /// Zero.
    pub pad: u32,
}

/// The ledger of one CPU. Times are `CLOCK_MONOTONIC` ns. What every switch touches comes first: two cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Id of the owner's cgroup; 0: this CPU is not watched.
    pub cgroup: u64,
    /// Start of the open slice.
    pub last_ns: u64,
    /// The cgroup below the owner's that was seen last; a cgroup never gets other ancestors. 0: none yet.
    pub inside: u64,
    /// The cgroup outside the owner's that was seen last. 0: none yet.
    pub outside: u64,
    /// Thread id believed to run.
    pub pid: u32,
    /// Its class.
    pub class: u32,
    /// Depth of the owner's cgroup; children of the root have 1.
    pub level: u32,
    /// [`VERSION`] of the kernel half.
    pub version: u32,
    /// Switches seen in this epoch.
    pub switches: u64,
    /// Broken chains in this epoch.
    pub breaks: u64,
    /// Closed time by class; the eighth is never used: the index is masked with 7 for the verifier.
    pub ns: [u64; 8],
    /// Start of the epoch.
    pub from_ns: u64,
    /// The assignment's generation.
    pub generation: u64,
    /// [`CpuConfig::serial`] that started the epoch.
    pub serial: u64,
    /// Who runs, if an intruder does.
    pub who: Who,
}

/// What user space wants of one CPU; read by the flush and by the departure programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Id of the owner's cgroup; 0: not watched.
    pub cgroup: u64,
    /// The assignment's generation, passed through.
    pub generation: u64,
    /// Changes with every change of this entry: a flush that sees another one starts a new epoch.
    pub serial: u64,
    /// Depth of the owner's cgroup.
    pub level: u32,
    /// Index of the owner plus one; 0: no owner.
    pub owner: u32,
}

/// Read by the departure programs alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Bit n: some owner's cgroup is at depth n. 0: no owners.
    pub levels: u32,
    /// Zero.
    pub pad: u32,
}

/// Counters of one owner on one CPU. Only the kernel half writes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Moves from one CPU to another.
    pub migrations: u64,
    /// Moves and first placements onto a CPU that is not the owner's.
    pub departures: u64,
    /// Departures without a record because the last one was less than [`DEPARTURE_PERIOD_NS`] ago.
    pub suppressed: u64,
    /// When the last record was sent.
    pub sent_ns: u64,
    /// Processes and threads that others moved out of the owner's cgroup, or that left it.
    pub moved_out: u64,
}

/// What was lost, by CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Records that found no room in the ring.
    pub ring_drops: u64,
    /// Slices of intruders that found no room in the table.
    pub intruders_lost: u64,
    /// Moves to another cgroup whose begin was not seen: who they took is not known.
    pub moves_unseen: u64,
}

/// A move to another cgroup that is under way; the kernel makes one at a time (`cgroup_mutex`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moving {
    /// Process and thread id of whoever moves; 0: none is under way.
    pub who: u64,
    /// Id of the cgroup of the owner that the task has; 0: of none.
    pub cgroup: u64,
    /// Id of the mover's cgroup.
    pub by: u64,
    /// Index of the owner plus one; 0: no owner.
    pub owner: u32,
    /// Where the task ran last.
    pub cpu: u32,
}

/// A record of the ring: a process or thread that was moved out of its owner's cgroup. Told from [`Departure`] by its length.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedOut {
    /// Id of the owner's cgroup.
    pub cgroup: u64,
    /// When.
    pub at_ns: u64,
    /// Id of the cgroup that it is in now.
    pub into: u64,
    /// Id of the mover's cgroup before that.
    pub by_cgroup: u64,
    /// Thread id.
    pub pid: u32,
    /// Process id.
    pub tgid: u32,
    /// Where it ran last before.
    pub from: u32,
    /// And after: another CPU if it ran at that moment.
    pub to: u32,
    /// Process id of the mover.
    pub by: u32,
    /// 1: with all its threads.
    pub whole: u32,
    /// Thread name, NUL-padded.
    pub comm: [u8; 16],
    /// Name of the mover's thread.
    pub by_comm: [u8; 16],
}

/// One task on one CPU in one epoch. With the epoch in the key an entry of an epoch that ended is never written again,
/// so user space can remove it without a race.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IntruderKey {
    /// Thread id.
    pub pid: u32,
    /// Where.
    pub cpu: u32,
    /// `task_struct.start_boottime`, ns.
    pub start_ns: u64,
    /// [`Slot::serial`]
    pub serial: u64,
}

/// What it took.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntruderValue {
    /// Time of its closed slices.
    pub ns: u64,
    /// Start of the first.
    pub first_ns: u64,
    /// End of the last.
    pub last_ns: u64,
    /// Its cgroup when it was last switched in.
    pub cgroup: u64,
    /// Its name then.
    pub comm: [u8; 16],
    /// Process id.
    pub tgid: u32,
    /// [`class::FOREIGN`] or [`class::KTHREAD_UNBOUND`].
    pub class: u32,
}

/// A record of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    /// Id of the owner's cgroup.
    pub cgroup: u64,
    /// When.
    pub at_ns: u64,
    /// Thread id.
    pub pid: u32,
    /// Process id.
    pub tgid: u32,
    /// CPU before.
    pub from: u32,
    /// CPU after.
    pub to: u32,
    /// Thread id of the task that was current.
    pub by: u32,
    /// See [`arrival`].
    pub kind: u32,
    /// Thread name, NUL-padded.
    pub comm: [u8; 16],
}

/// A write to a file of a watched cgroup. While it is under way its end is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Id of the file's cgroup.
    pub cgroup: u64,
    /// When the kernel began to carry it out.
    pub begun_ns: u64,
    /// When it had.
    pub ended_ns: u64,
    /// Id of the writer's cgroup when it began.
    pub by: u64,
    /// Thread id of the writer.
    pub pid: u32,
    /// Process id.
    pub tgid: u32,
    /// Thread name, NUL-padded.
    pub comm: [u8; 16],
    /// The file's name, NUL-padded; the longest of ours has 22 bytes.
    pub file: [u8; 24],
    /// What is written, up to 127 bytes, NUL-padded.
    pub text: [u8; 128],
}

/// `size, {field offset}…`: a layout that moved does not compile.
macro_rules! layout {
    ($t:ty, $size:literal $(, $field:ident $offset:literal)*) => {
        const _: () = {
            assert!(size_of::<$t>() == $size && align_of::<$t>() == 8);
            $( assert!(core::mem::offset_of!($t, $field) == $offset); )*
        };
    };
}
layout!(Who, 40, start_ns 0, cgroup 8, comm 16, tgid 32, pad 36);
layout!(Slot, 192, cgroup 0, last_ns 8, inside 16, outside 24, pid 32, class 36, level 40, version 44, switches 48,
    breaks 56, ns 64, from_ns 128, generation 136, serial 144, who 152);
layout!(CpuConfig, 32, cgroup 0, generation 8, serial 16, level 24, owner 28);
layout!(Counters, 40, migrations 0, departures 8, suppressed 16, sent_ns 24, moved_out 32);
layout!(Losses, 24, ring_drops 0, intruders_lost 8, moves_unseen 16);
layout!(Moving, 32, who 0, cgroup 8, by 16, owner 24, cpu 28);
layout!(MovedOut, 88, cgroup 0, at_ns 8, into 16, by_cgroup 24, pid 32, tgid 36, from 40, to 44, by 48, whole 52,
    comm 56, by_comm 72);
layout!(IntruderKey, 24, pid 0, cpu 4, start_ns 8, serial 16);
layout!(IntruderValue, 56, ns 0, first_ns 8, last_ns 16, cgroup 24, comm 32, tgid 48, class 52);
layout!(Departure, 56, cgroup 0, at_ns 8, pid 16, tgid 20, from 24, to 28, by 32, kind 36, comm 40);
layout!(Write, 208, cgroup 0, begun_ns 8, ended_ns 16, by 24, pid 32, tgid 36, comm 40, file 56, text 80);
const _: () = assert!(size_of::<Config>() == 8 && align_of::<Config>() == 4);

#[cfg(feature = "user")]
mod user {
    //! What lets the loader copy these types to and from maps.

    macro_rules! pod {
        ($($t:ident)*) => { $(
            #[allow(unsafe_code, reason = "repr(C), Copy, no padding, every bit pattern valid: asserted above")]
            // SAFETY: as the reason says.
            unsafe impl aya::Pod for super::$t {}
        )* };
    }
    pod!(Who Slot CpuConfig Config Counters Losses IntruderKey IntruderValue Departure Moving MovedOut Write);
}
