//! The kernel's structs, read at offsets that user space found in the running kernel's BTF.
//!
//! Problem: struct layouts differ between kernels, and no Rust compiler emits CO-RE relocations.
//! Steps: the loader puts each offset into a read-only word before the programs are verified. The verifier knows the
//! value of such a word, so in `tp_btf` programs a plain load at it is accepted, checked against the kernel's types,
//! and costs one instruction. Elsewhere (`Probed`) each field is a `bpf_probe_read_kernel`, about 40 ns.
//! Invariant: a field that cannot be read is zero: pid 0 is idle, cgroup 0 is nobody's, both visible in the ledger.

use aya_ebpf::{
    Global,
    helpers::{bpf_probe_read_kernel, generated::bpf_probe_read_kernel_str},
};

macro_rules! offsets {
    ($($name:ident)*) => { $( #[unsafe(no_mangle)] static $name: Global<u32> = Global::new(0); )* };
}
// The loader overrides each by name and refuses an object that lacks one.
offsets!(TASK_PID TASK_TGID TASK_COMM TASK_FLAGS TASK_CPU TASK_CGROUPS TASK_NR_CPUS TASK_START);
offsets!(CSS_SET_DFL_CGRP CGROUP_KN CGROUP_LEVEL CGROUP_ANCESTORS KERNFS_NODE_ID);
// Read by the hook on writes alone, which is not loaded where one of them cannot be found.
offsets!(KERNFS_OPEN_FILE_KN KERNFS_NODE_NAME KERNFS_NODE_PARENT KERNFS_NODE_PRIV CGROUP_ROOT CGROUP_ROOT_HIERARCHY);

/// `PF_KTHREAD` of `include/linux/sched.h`.
const PF_KTHREAD: u32 = 0x0020_0000;

/// A kernel address.
pub type Addr = *const u8;

/// How fields are read: what differs between program types.
pub trait Reader {
    /// The field of type `T` at `base + offset`.
    unsafe fn field<T: Copy>(base: Addr, offset: u32) -> T;
}

/// Plain loads from trusted pointers: `tp_btf` arguments and what is reached from them.
pub struct Direct;

/// Probe reads: any pointer in any program.
pub struct Probed;

impl Reader for Direct {
    #[inline(always)]
    unsafe fn field<T: Copy>(base: Addr, offset: u32) -> T {
        // Volatile: the verifier must see one load of the field's own size.
        unsafe { base.add(offset as usize).cast::<T>().read_volatile() }
    }
}

impl Reader for Probed {
    #[inline(always)]
    unsafe fn field<T: Copy>(base: Addr, offset: u32) -> T {
        // A failed read gives zeroes (the helper clears the destination).
        unsafe { bpf_probe_read_kernel(base.add(offset as usize).cast::<T>()).unwrap_or(core::mem::zeroed()) }
    }
}

/// A `task_struct`.
#[derive(Clone, Copy)]
pub struct Task(pub Addr);

/// A `cgroup`; may be null.
#[derive(Clone, Copy)]
pub struct Cgroup(Addr);

impl Task {
    #[inline(always)]
    pub unsafe fn pid<R: Reader>(self) -> u32 {
        unsafe { R::field(self.0, TASK_PID.load()) }
    }

    #[inline(always)]
    pub unsafe fn tgid<R: Reader>(self) -> u32 {
        unsafe { R::field(self.0, TASK_TGID.load()) }
    }

    /// The CPU that it is on, or was on last: `thread_info.cpu`.
    #[inline(always)]
    pub unsafe fn cpu<R: Reader>(self) -> u32 {
        unsafe { R::field(self.0, TASK_CPU.load()) }
    }

    #[inline(always)]
    pub unsafe fn start_ns<R: Reader>(self) -> u64 {
        unsafe { R::field(self.0, TASK_START.load()) }
    }

    /// An array, so always a probe read.
    #[inline(always)]
    pub unsafe fn comm(self) -> [u8; 16] {
        unsafe { Probed::field(self.0, TASK_COMM.load()) }
    }

    #[inline(always)]
    pub unsafe fn is_kthread<R: Reader>(self) -> bool {
        unsafe { R::field::<u32>(self.0, TASK_FLAGS.load()) & PF_KTHREAD != 0 }
    }

    /// `PF_NO_SETAFFINITY` would not do: unbound kworkers carry it too.
    #[inline(always)]
    pub unsafe fn is_bound<R: Reader>(self) -> bool {
        unsafe { R::field::<u32>(self.0, TASK_NR_CPUS.load()) == 1 }
    }

    /// Its cgroup on the default hierarchy.
    #[inline(always)]
    pub unsafe fn cgroup<R: Reader>(self) -> Cgroup {
        unsafe {
            let css: Addr = R::field(self.0, TASK_CGROUPS.load());
            Cgroup(if css.is_null() { css } else { R::field(css, CSS_SET_DFL_CGRP.load()) })
        }
    }
}

impl Cgroup {
    /// The id; 0 if there is none.
    #[inline(always)]
    pub unsafe fn id<R: Reader>(self) -> u64 {
        unsafe {
            if self.0.is_null() {
                return 0;
            }
            let kn: Addr = R::field(self.0, CGROUP_KN.load());
            if kn.is_null() { 0 } else { R::field(kn, KERNFS_NODE_ID.load()) }
        }
    }

    /// Depth below the root, which has 0.
    #[inline(always)]
    pub unsafe fn level<R: Reader>(self) -> u32 {
        unsafe { if self.0.is_null() { 0 } else { R::field(self.0, CGROUP_LEVEL.load()) } }
    }

    /// Id of the ancestor at `level`, which must not be below this cgroup's own. The array element has a variable
    /// offset, which the verifier takes in no plain load: three probe reads.
    #[inline(always)]
    pub unsafe fn ancestor_id(self, level: u32) -> u64 {
        unsafe {
            // Masked: the verifier wants a bound.
            let element = self.0.wrapping_add(8 * (level & 0xff) as usize);
            Cgroup(Probed::field(element, CGROUP_ANCESTORS.load())).id::<Probed>()
        }
    }
}

/// A `kernfs_node`: a file or a directory of cgroupfs. May be null.
#[derive(Clone, Copy)]
pub struct Node(Addr);

impl Node {
    /// The node of an open file (`kernfs_open_file`).
    #[inline(always)]
    pub unsafe fn of_open_file(file: Addr) -> Self {
        unsafe { Self(Probed::field(file, KERNFS_OPEN_FILE_KN.load())) }
    }

    /// The directory that it is in.
    #[inline(always)]
    pub unsafe fn parent(self) -> Self {
        unsafe { Self(Probed::field(self.0, KERNFS_NODE_PARENT.load())) }
    }

    /// Of a cgroup's directory: the cgroup's id.
    #[inline(always)]
    pub unsafe fn id(self) -> u64 {
        unsafe { Probed::field(self.0, KERNFS_NODE_ID.load()) }
    }

    /// Puts its name into `into`, cut where that ends, NUL behind it. The rest of `into` stays as it is.
    #[inline(always)]
    pub unsafe fn name<const N: usize>(self, into: &mut [u8; N]) {
        unsafe { text(Probed::field(self.0, KERNFS_NODE_NAME.load()), into) }
    }

    /// Of a cgroup's directory: whether that is on the default hierarchy, which has number 0. Ids of cgroups are only
    /// unique within their hierarchy.
    #[inline(always)]
    pub unsafe fn is_v2(self) -> bool {
        unsafe {
            let cgroup: Addr = Probed::field(self.0, KERNFS_NODE_PRIV.load());
            let root: Addr = Probed::field(cgroup, CGROUP_ROOT.load());
            !root.is_null() && Probed::field::<u32>(root, CGROUP_ROOT_HIERARCHY.load()) == 0
        }
    }
}

/// Copies a string of the kernel's into `into`, cut where that ends.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "arrays of tens of bytes")]
pub unsafe fn text<const N: usize>(from: Addr, into: &mut [u8; N]) {
    // What cannot be read stays empty.
    unsafe { bpf_probe_read_kernel_str(into.as_mut_ptr().cast(), N as u32, from.cast()) };
}
