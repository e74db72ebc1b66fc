//! From the embedded object to programs that run: offsets, maps, verifier, links.

use super::{error::BpfError, maps::Maps};
use crate::btf::{self, BtfError};
use aya::{
    Btf, Ebpf, EbpfLoader, include_bytes_aligned,
    programs::{
        BtfTracePoint, Program, ProgramError, ProgramFd, RawTracePoint, RawTracePointRunOptions,
        TestRun as _, links::FdLink,
    },
};
use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
};
use truepin::cpuset::{CpuId, CpuSet};

/// The kernel half: `ebpf/`, as `make bpf` built it. `build.rs` refuses one that is not of this tree.
pub static OBJECT: &[u8] =
    include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/../ebpf/prebuilt/truepin.bpf.o"));

const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";
/// The program that is run on request.
const FLUSH: &str = "flush";
/// `errno` of a test run on a CPU that is not online (`bpf_prog_test_run_raw_tp` of `net/bpf/test_run.c`).
const ENXIO: i32 = 6;
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// The words of `ebpf/src/read.rs`, and the struct and member whose byte offset each gets.
const OFFSETS: [(&str, &str, &str); 13] = [
    ("TASK_PID", "task_struct", "pid"),
    ("TASK_TGID", "task_struct", "tgid"),
    ("TASK_COMM", "task_struct", "comm"),
    ("TASK_FLAGS", "task_struct", "flags"),
    ("TASK_CPU", "task_struct", "thread_info.cpu"),
    ("TASK_CGROUPS", "task_struct", "cgroups"),
    ("TASK_NR_CPUS", "task_struct", "nr_cpus_allowed"),
    ("TASK_START", "task_struct", "start_boottime"),
    ("CSS_SET_DFL_CGRP", "css_set", "dfl_cgrp"),
    ("CGROUP_KN", "cgroup", "kn"),
    ("CGROUP_LEVEL", "cgroup", "level"),
    ("CGROUP_ANCESTORS", "cgroup", "ancestors"),
    ("KERNFS_NODE_ID", "kernfs_node", "id"),
];

/// The words that only the hook on writes reads, with the names that the member has had; `kernfs_node.parent` became
/// `__parent` in 6.15.
const WRITE_OFFSETS: [(&str, &str, &[&str]); 6] = [
    ("KERNFS_OPEN_FILE_KN", "kernfs_open_file", &["kn"]),
    ("KERNFS_NODE_NAME", "kernfs_node", &["name"]),
    ("KERNFS_NODE_PARENT", "kernfs_node", &["parent", "__parent"]),
    ("KERNFS_NODE_PRIV", "kernfs_node", &["priv"]),
    ("CGROUP_ROOT", "cgroup", &["root"]),
    ("CGROUP_ROOT_HIERARCHY", "cgroup_root", &["hierarchy_id"]),
];

/// Words of the kernel half's read-only map with their byte offsets in the running kernel's structs.
type Offsets = Vec<(&'static str, u32)>;

/// What every program needs.
pub fn offsets() -> Result<Offsets, BpfError> {
    Ok(offsets_in(Path::new(KERNEL_BTF))?.0)
}

/// What every program needs, and what the hook on writes needs as well.
fn offsets_in(path: &Path) -> Result<(Offsets, Result<Offsets, BtfError>), BpfError> {
    let blob = fs::read(path).map_err(|source| BpfError::NoBtf { path: path.into(), source })?;
    let refuse = |source| BpfError::Btf { path: path.into(), source };
    let btf = btf::Btf::parse(&blob).map_err(refuse)?;
    let one = |word: &'static str, name: &str, member: &str| Ok((word, btf.offset(name, member)?));
    let needed = OFFSETS.iter().map(|(word, name, member)| one(word, name, member));
    let of_writes = WRITE_OFFSETS.iter().map(|(word, name, members)| {
        let mut tried = members.iter().map(|member| one(word, name, member));
        let first = tried.next();
        tried.find(Result::is_ok).or(first).unwrap_or_else(|| one(word, name, ""))
    });
    Ok((needed.collect::<Result<_, _>>().map_err(refuse)?, of_writes.collect()))
}

/// The CPUs that can ever be there, ascending: the order of the values of a per-CPU map.
pub(super) fn possible_cpus() -> Result<Vec<CpuId>, BpfError> {
    let path = Path::new(POSSIBLE);
    let text = fs::read_to_string(path).map_err(|source| BpfError::Read { path: path.into(), source })?;
    let set: CpuSet = text.parse().map_err(|source| BpfError::Cpus { path: path.into(), source })?;
    Ok(set.iter().collect())
}

/// Makes the maps, with the running kernel's offsets in the read-only one. `writes`: with room for the hook on writes;
/// the third is why it cannot be had.
pub(super) fn object(possible: &[CpuId], writes: bool) -> Result<(Ebpf, Maps, Option<BtfError>), BpfError> {
    let (needed, of_writes) = offsets_in(Path::new(KERNEL_BTF))?;
    let mut loader = EbpfLoader::new();
    for (word, offset) in needed.iter().chain(of_writes.iter().flatten()) {
        loader.override_global(word, offset, true);
    }
    loader.map_max_entries("CPUS", possible.last().map_or(1, |cpu| cpu.0 + 1));
    if !writes {
        loader.map_max_entries("WATCHED", 1).map_max_entries("WRITING", 1);
    }
    let mut bpf = loader.load(OBJECT).map_err(|e| BpfError::Object(Box::new(e)))?;
    let maps = Maps::take(&mut bpf)?;
    Ok((bpf, maps, of_writes.err()))
}

/// The kernel's types in aya's form, to find tracepoints by name. Large: drop it after loading.
pub(super) fn kernel_types() -> Result<Btf, BpfError> {
    Btf::from_sys_fs()
        .map_err(|e| BpfError::NoBtf { path: KERNEL_BTF.into(), source: io::Error::other(e.to_string()) })
}

/// Gives freed memory back. Reading the kernel's types takes 20 MB for a moment, which glibc would keep for good: an
/// agent has 24 MB resident without this and 4 MB with it.
pub(super) fn release_memory() {
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code, reason = "no safe wrapper; it has no precondition and touches free memory only")]
    // SAFETY: as the reason says.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// Hands a `tp_btf` program to the verifier.
pub(super) fn load(
    bpf: &mut Ebpf,
    types: &Btf,
    program: &'static str,
    tracepoint: &str,
) -> Result<(), BpfError> {
    tracing(bpf, program)?.load(tracepoint, types).map_err(BpfError::program(program, "load"))
}

/// Attaches a loaded program; dropping the link detaches it.
pub(super) fn attach(bpf: &mut Ebpf, program: &'static str) -> Result<FdLink, BpfError> {
    let p = tracing(bpf, program)?;
    let id = p.attach().map_err(BpfError::program(program, "attach"))?;
    p.take_link(id).map(FdLink::from).map_err(BpfError::program(program, "attach"))
}

/// A `tp_btf` program of the object.
pub(super) fn tracing<'a>(bpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut BtfTracePoint, BpfError> {
    find(bpf, name)
}

/// Hands the flush to the verifier. It is run on request, never attached.
pub(super) fn load_flush(bpf: &mut Ebpf) -> Result<(), BpfError> {
    on_request(bpf, FLUSH).map(drop)
}

/// Tells the programs which process is ours.
pub(super) fn introduce(bpf: &mut Ebpf) -> Result<(), BpfError> {
    const NAME: &str = "introduce";
    let program = on_request(bpf, NAME)?;
    // Without a CPU it runs here, as this thread.
    program.test_run(RawTracePointRunOptions::new()).map_err(BpfError::program(NAME, "run"))?;
    Ok(())
}

/// Loads a program that is run on request.
pub(super) fn on_request<'a>(
    bpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut RawTracePoint, BpfError> {
    let program: &mut RawTracePoint = find(bpf, name)?;
    program.load().map_err(BpfError::program(name, "load"))?;
    Ok(program)
}

/// A program of the object.
pub(super) fn find<'a, P>(bpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, BpfError>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let program = bpf.program_mut(name).ok_or(BpfError::Missing { what: "program", name })?;
    program.try_into().map_err(BpfError::program(name, "find"))
}

/// Closes the open slice of a CPU and publishes its slot. False if the CPU is not online.
pub(super) fn flush(bpf: &Ebpf, cpu: CpuId) -> Result<bool, BpfError> {
    let Some(Program::RawTracePoint(program)) = bpf.program(FLUSH) else {
        return Err(BpfError::Missing { what: "program", name: FLUSH });
    };
    let mut options = RawTracePointRunOptions::new();
    options.cpu = Some(cpu.0);
    match program.test_run(options) {
        Ok(_) => Ok(true),
        Err(ProgramError::SyscallError(e)) if e.io_error.raw_os_error() == Some(ENXIO) => Ok(false),
        Err(source) => Err(BpfError::Flush { cpu, source: Box::new(source) }),
    }
}

/// Runs of a loaded program that the kernel skipped, of a tracing program because it was already running on that CPU.
pub(super) fn misses(bpf: &Ebpf, name: &'static str, text: &mut String) -> Result<u64, BpfError> {
    let Some(Program::BtfTracePoint(program)) = bpf.program(name) else {
        return Err(BpfError::Missing { what: "program", name });
    };
    misses_of(program.fd().map_err(BpfError::program(name, "find"))?, text)
}

/// Not in aya 0.14, so from the file descriptor's page in /proc (`bpf_prog_show_fdinfo` of `kernel/bpf/syscall.c`).
pub(super) fn misses_of(program: &ProgramFd, text: &mut String) -> Result<u64, BpfError> {
    let path = format!("/proc/self/fdinfo/{}", program.as_fd().as_raw_fd());
    text.clear();
    fs::File::open(&path)
        .and_then(|mut f| io::Read::read_to_string(&mut f, text))
        .map_err(|source| BpfError::Read { path: path.clone().into(), source })?;
    text.lines().find_map(|line| line.strip_prefix("recursion_misses:")?.trim().parse().ok()).ok_or_else(
        || BpfError::Content { path: path.into(), found: text.clone(), expected: "a line recursion_misses" },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use truepin::ledger::ProbeError;

    #[test]
    fn a_kernel_without_types_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmlinux");
        let e = ProbeError::from(offsets_in(&path).unwrap_err());
        assert_eq!(e.operation, format!("read the kernel's type information {}", path.display()));
        assert!(e.cause.contains("No such file"), "{e}");

        fs::write(&path, b"\x7fELF").unwrap();
        let e = ProbeError::from(offsets_in(&path).unwrap_err());
        assert_eq!(e.operation, format!("find the kernel's structs in {}", path.display()));
        assert_eq!(e.cause, "BTF magic is 0x457f, expected 0xeb9f");

        // A blob with no types at all.
        let mut blob = vec![0x9f, 0xeb, 1, 0];
        for word in [24u32, 0, 0, 0, 1] {
            blob.extend(word.to_le_bytes());
        }
        blob.push(0);
        fs::write(&path, &blob).unwrap();
        let e = ProbeError::from(offsets_in(&path).unwrap_err());
        assert_eq!(e.cause, "the kernel's BTF has no struct task_struct");
    }

    #[test]
    fn possible_cpus_are_ascending() {
        let cpus = possible_cpus().unwrap();
        assert!(!cpus.is_empty() && cpus.windows(2).all(|w| w[0] < w[1]));
    }
}
