//! The hook on `cgroup_file_write`: who writes the files of watched cgroups, told by the kernel at the time of the write.
//!
//! Steps: load and attach two programs, at the end of the function first, so that no write begins that is not seen to
//! end (which process is ours they were told before); tell them which cgroups are watched. On each look: first whether a write is under
//! way, then every record, then what was lost: in this order a write that is in neither has not begun or was refused.
//! Invariant: a hook that is half attached is taken back, and the next one is tried.
//!
//! fexit needs BPF trampolines, kprobes a kernel built with them: neither is there on every kernel. Both see the same;
//! kernels before 6.7 do not count the runs of a kprobe that they skip (another BPF program was at work on that CPU).

use super::{error::BpfError, events::comm, load, maps};
use aya::{
    Btf, Ebpf,
    maps::{HashMap, MapData, MapError, PerCpuArray, RingBuf},
    programs::{FEntry, FExit, KProbe, ProgramError, ProgramFd, kprobe::KProbeError, links::FdLink},
};
use std::{
    collections::BTreeMap,
    fmt, io, mem,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};
use truepin::{CgroupFile, CgroupId, reconcile::Interest};
use truepin_abi::{MAX_WATCHED, Write, watch};

/// The function.
const FUNCTION: &str = "cgroup_file_write";
/// A write that is under way for so long was not seen to end: a return probe can be missed. A write takes milliseconds, and
/// no finding waits for its writer for more than a second. Where one does take so long (the pages of a big task, moved upon
/// `cpuset.mems`) it is told when it has ended all the same.
const STUCK_NS: u64 = 10_000_000_000;

/// How the programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// fentry and fexit.
    Fexit,
    /// kprobe and kretprobe.
    Kprobe,
}

impl Hook {
    /// The best first.
    pub const ALL: [Self; 2] = [Self::Fexit, Self::Kprobe];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fexit => "fexit",
            Self::Kprobe => "kprobe",
        }
    }
}

/// A write of another process that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The file's cgroup.
    pub cgroup: CgroupId,
    /// The file.
    pub file: CgroupFile,
    /// What was written, without blanks around it; `None` when it was too long to be kept.
    pub text: Option<String>,
    /// Process id.
    pub pid: u32,
    /// Name of the thread.
    pub comm: String,
    /// Its cgroup before the write.
    pub by: CgroupId,
    /// `CLOCK_MONOTONIC`
    pub begun_ns: u64,
    /// `CLOCK_MONOTONIC`
    pub ended_ns: u64,
}

/// The hook at work. Dropping it detaches it.
pub struct WriteHook {
    hook: Hook,
    ring: RingBuf<MapData>,
    watched: HashMap<MapData, u64, u32>,
    writing: HashMap<MapData, u64, Write>,
    lost: PerCpuArray<MapData, u64>,
    stuck: Stuck,
    /// How many `watched` can hold.
    room: usize,
    attached: Attached,
    /// What `watched` holds.
    told: BTreeMap<u64, u32>,
    text: String,
}

/// The programs at the begin and at the end of a write.
struct Attached {
    programs: [ProgramFd; 2],
    /// Only held: dropping them detaches the programs.
    _links: [Box<dyn Send>; 2],
}

impl fmt::Debug for WriteHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteHook").field("hook", &self.hook).finish_non_exhaustive()
    }
}

impl WriteHook {
    /// The first of `hooks` that this kernel takes; why it did not take the ones before goes to `refused`.
    pub(super) fn first(
        bpf: &mut Ebpf,
        types: &Btf,
        hooks: &[Hook],
        refused: &mut Vec<String>,
    ) -> Option<Self> {
        if hooks.is_empty() {
            return None;
        }
        let attached = hooks.iter().find_map(|hook| match attach(bpf, types, *hook) {
            Ok(attached) => Some((*hook, attached)),
            Err(error) => {
                refused.push(format!("{}: {}", hook.name(), short(&error)));
                None
            }
        });
        let (hook, attached) = attached?;
        let made = Self::with(bpf, hook, attached);
        made.map_err(|error| refused.push(format!("{}: {}", hook.name(), short(&error)))).ok()
    }

    fn with(bpf: &mut Ebpf, hook: Hook, attached: Attached) -> Result<Self, BpfError> {
        Ok(Self {
            hook,
            ring: maps::take(bpf, "WRITES")?,
            watched: maps::take(bpf, "WATCHED")?,
            writing: maps::take(bpf, "WRITING")?,
            lost: maps::take(bpf, "WRITES_LOST")?,
            stuck: Stuck::default(),
            room: MAX_WATCHED as usize,
            attached,
            told: BTreeMap::new(),
            text: String::new(),
        })
    }

    /// How it is attached.
    #[must_use]
    pub fn hook(&self) -> Hook {
        self.hook
    }

    /// Watches no more cgroups than this.
    pub fn limit(&mut self, room: usize) {
        self.room = self.room.min(room);
    }

    /// Makes these the watched cgroups; where not all have room, the first ones. How many have none.
    pub fn watch(&mut self, cgroups: &[(CgroupId, Interest)]) -> Result<usize, BpfError> {
        let (kept, rest) = cgroups.split_at(cgroups.len().min(self.room));
        let wanted: BTreeMap<u64, u32> = kept.iter().map(|(id, interest)| (id.0, bits(*interest))).collect();
        let gone: Vec<u64> = self.told.keys().filter(|id| !wanted.contains_key(id)).copied().collect();
        for id in gone {
            maps::gone_is_fine(self.watched.remove(&id)).map_err(BpfError::map("WATCHED", "remove from"))?;
            self.told.remove(&id);
        }
        for (CgroupId(id), interest) in kept {
            let bits = bits(*interest);
            if self.told.get(id) != Some(&bits) {
                self.watched.insert(id, bits, 0).map_err(BpfError::map("WATCHED", "write"))?;
                self.told.insert(*id, bits);
            }
        }
        Ok(rest.len())
    }

    /// Whether a write of another is under way. To be asked before [`Self::drain`].
    pub fn is_writing(&mut self, now_ns: u64) -> Result<bool, BpfError> {
        let entries: Vec<(u64, Write)> =
            self.writing.iter().collect::<Result<_, MapError>>().map_err(BpfError::map("WRITING", "read"))?;
        let lives = |w: &Write| Path::new(&format!("/proc/{}/task/{}", w.tgid, w.pid)).exists();
        let (any, dead) = self.stuck.sort(&entries, now_ns, lives);
        for who in dead {
            maps::gone_is_fine(self.writing.remove(&who)).map_err(BpfError::map("WRITING", "remove from"))?;
        }
        Ok(any)
    }

    /// The writes that have ended since the last call.
    pub fn drain(&mut self, mut each: impl FnMut(Written)) -> Result<(), BpfError> {
        while let Some(item) = self.ring.next() {
            if let Some(written) = decode(&item)? {
                each(written);
            }
        }
        Ok(())
    }

    /// Writes that went untold, since the start. One whose end was missed may count up to three times: when the kernel
    /// counts the run that it skipped, when it has been under way for too long, when its thread writes again.
    pub fn lost(&mut self) -> Result<u64, BpfError> {
        let mut lost = self.stuck.count;
        for at in 0..2 {
            lost += maps::of_cpus(&self.lost, "WRITES_LOST", at)?.iter().sum::<u64>();
        }
        for program in &self.attached.programs {
            lost += load::misses_of(program, &mut self.text)?;
        }
        Ok(lost)
    }
}

/// Writes that were not seen to end.
#[derive(Debug, Default)]
struct Stuck {
    /// Those that are still in the map: thread and begin.
    known: BTreeMap<u64, u64>,
    /// Since the start.
    count: u64,
}

impl Stuck {
    /// Whether any of `entries` is a write under way, and whose can be removed from the map. That of a thread that lives
    /// cannot: the kernel half may be at work on it at this moment. It takes it out itself when the thread writes again.
    fn sort(
        &mut self,
        entries: &[(u64, Write)],
        now_ns: u64,
        lives: impl Fn(&Write) -> bool,
    ) -> (bool, Vec<u64>) {
        let before = mem::take(&mut self.known);
        let mut any = false;
        let mut dead = Vec::new();
        for (who, write) in entries {
            if now_ns.saturating_sub(write.begun_ns) <= STUCK_NS {
                any = true;
                continue;
            }
            self.count += u64::from(before.get(who) != Some(&write.begun_ns));
            self.known.insert(*who, write.begun_ns);
            if !lives(write) {
                dead.push(*who);
            }
        }
        (any, dead)
    }
}

/// Readable when there are records.
impl AsFd for WriteHook {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

fn bits(interest: Interest) -> u32 {
    let mut bits = watch::OWN;
    if interest.tasks {
        bits |= watch::TASKS;
    }
    if interest.children {
        bits |= watch::CHILDREN;
    }
    bits
}

/// One record; `None` for a file that only begins like one of ours.
fn decode(bytes: &[u8]) -> Result<Option<Written>, BpfError> {
    let expected = size_of::<Write>();
    if bytes.len() != expected {
        return Err(BpfError::Record { ring: "write", len: bytes.len(), expected });
    }
    #[allow(unsafe_code, reason = "the length is checked, and every bit pattern is a valid record")]
    // SAFETY: as the reason says; unaligned, since a slice promises 1.
    let r: Write = unsafe { bytes.as_ptr().cast::<Write>().read_unaligned() };
    let name = str::from_utf8(until_nul(&r.file)).ok();
    let Some(file) = name.and_then(CgroupFile::of_name) else { return Ok(None) };
    let text = until_nul(&r.text);
    // One that fills the field was cut.
    let whole = text.len() < r.text.len() - 1;
    Ok(Some(Written {
        cgroup: CgroupId(r.cgroup),
        file,
        text: whole.then(|| String::from_utf8_lossy(text).trim().to_owned()),
        pid: r.tgid,
        comm: comm(&r.comm).into_owned(),
        by: CgroupId(r.by),
        begun_ns: r.begun_ns,
        ended_ns: r.ended_ns,
    }))
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|b| *b == 0).next().unwrap_or_default()
}

/// Loads and attaches both programs of a hook, the one at the end first.
fn attach(bpf: &mut Ebpf, types: &Btf, hook: Hook) -> Result<Attached, BpfError> {
    const ENDS: [&str; 2] = ["write_ends", "write_ends_kprobe"];
    const BEGINS: [&str; 2] = ["write_begins", "write_begins_kprobe"];
    match hook {
        Hook::Fexit => {
            let [name, _] = ENDS;
            let ends: &mut FExit = load::find(bpf, name)?;
            ends.load(FUNCTION, types).map_err(BpfError::program(name, "load"))?;
            let id = ends.attach().map_err(BpfError::program(name, "attach"))?;
            let ends_link =
                ends.take_link(id).map(FdLink::from).map_err(BpfError::program(name, "attach"))?;
            let ends = clone(ends.fd(), name)?;
            let [name, _] = BEGINS;
            let begins: &mut FEntry = load::find(bpf, name)?;
            begins.load(FUNCTION, types).map_err(BpfError::program(name, "load"))?;
            let id = begins.attach().map_err(BpfError::program(name, "attach"))?;
            let link = begins.take_link(id).map(FdLink::from).map_err(BpfError::program(name, "attach"))?;
            Ok(Attached {
                programs: [clone(begins.fd(), name)?, ends],
                _links: [Box::new(link), Box::new(ends_link)],
            })
        }
        Hook::Kprobe => {
            let mut one = |name: &'static str| {
                let program: &mut KProbe = load::find(bpf, name)?;
                program.load().map_err(BpfError::program(name, "load"))?;
                let id = program.attach(FUNCTION, 0).map_err(BpfError::program(name, "attach"))?;
                let link = program.take_link(id).map_err(BpfError::program(name, "attach"))?;
                let link: Box<dyn Send> = Box::new(link);
                Ok((link, clone(program.fd(), name)?))
            };
            let ([_, ends], [_, begins]) = (ENDS, BEGINS);
            let (ends_link, ends) = one(ends)?;
            let (link, begins) = one(begins)?;
            Ok(Attached { programs: [begins, ends], _links: [link, ends_link] })
        }
    }
}

pub(super) fn clone(
    fd: Result<&ProgramFd, ProgramError>,
    program: &'static str,
) -> Result<ProgramFd, BpfError> {
    fd.and_then(|fd| Ok(fd.try_clone()?)).map_err(BpfError::program(program, "find"))
}

/// Operation and error number, without the verifier's log.
pub(super) fn short(error: &BpfError) -> String {
    match error {
        BpfError::Program { action, source, .. } => match errno(source) {
            Some(e) => format!("{action}: {e}"),
            None => format!("{action}: {source}"),
        },
        other => other.to_string(),
    }
}

/// The system call's own error, where there was one.
fn errno(error: &ProgramError) -> Option<&io::Error> {
    match error {
        ProgramError::LoadError { io_error, .. }
        | ProgramError::IOError(io_error)
        | ProgramError::KProbeError(KProbeError::FileError { io_error, .. }) => Some(io_error),
        ProgramError::SyscallError(e) => Some(&e.io_error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(file: &str, text: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [77u64, 1_000, 1_500, 5] {
            bytes.extend(word.to_ne_bytes());
        }
        for word in [43u32, 42] {
            bytes.extend(word.to_ne_bytes());
        }
        for (part, len) in [(&b"meddler"[..], 16), (file.as_bytes(), 24), (text, 128)] {
            bytes.extend(part);
            bytes.resize(bytes.len() + len - part.len(), 0);
        }
        bytes
    }

    #[test]
    fn a_record_is_208_bytes() {
        let bytes = record("cpuset.cpus.partition", b" member\n");
        let expected = Written {
            cgroup: CgroupId(77),
            file: CgroupFile::Cpuset(truepin::CpusetFile::Partition),
            text: Some("member".into()),
            pid: 42,
            comm: "meddler".into(),
            by: CgroupId(5),
            begun_ns: 1_000,
            ended_ns: 1_500,
        };
        assert_eq!(decode(&bytes).unwrap(), Some(expected));
        assert!(matches!(decode(&bytes[1..]), Err(BpfError::Record { len: 207, expected: 208, .. })));
    }

    #[test]
    fn files_of_no_interest_and_texts_that_were_cut() {
        for name in ["cgroup.pressure", "cgroup.type", "cpuset.cpus.effective", "", "\u{fffd}"] {
            assert_eq!(decode(&record(name, b"1")).unwrap(), None, "{name:?}");
        }
        for (name, file) in [("cgroup.procs", CgroupFile::Procs), ("cgroup.threads", CgroupFile::Threads)] {
            let written = decode(&record(name, b"0\n")).unwrap().unwrap();
            assert_eq!((written.file, written.text.as_deref()), (file, Some("0")));
        }
        let long = [b'1'; 127];
        assert_eq!(decode(&record("cpuset.cpus", &long)).unwrap().unwrap().text, None);
        let text = decode(&record("cpuset.cpus", &long[..126])).unwrap().unwrap().text;
        assert_eq!(text.map(|t| t.len()), Some(126));
        // Nothing, or a newline: inherit.
        assert_eq!(decode(&record("cpuset.cpus", b"\n")).unwrap().unwrap().text.as_deref(), Some(""));
    }

    /// A write whose end was missed, of a thread that lives on: after a while it is no longer waited for, and counted once.
    #[test]
    fn a_write_that_was_not_seen_to_end_is_not_under_way_for_ever() {
        const S: u64 = 1_000_000_000;
        let entry = |who: u64, begun_ns: u64| {
            let write = Write {
                cgroup: 77,
                begun_ns,
                ended_ns: 0,
                by: 5,
                pid: 43,
                tgid: 42,
                comm: [0; 16],
                file: [0; 24],
                text: [0; 128],
            };
            (who, write)
        };
        let mut stuck = Stuck::default();
        let (old, lives) = ([entry(7, S)], |_: &Write| true);
        assert_eq!((stuck.sort(&old, 11 * S, lives), stuck.count), ((true, vec![]), 0));
        for _ in 0..2 {
            assert_eq!((stuck.sort(&old, 11 * S + 1, lives), stuck.count), ((false, vec![]), 1));
        }
        // Another thread's is waited for; and the same thread's next one.
        assert_eq!((stuck.sort(&[old[0], entry(8, 9 * S)], 12 * S, lives), stuck.count), ((true, vec![]), 1));
        assert_eq!((stuck.sort(&[entry(7, 12 * S)], 12 * S, lives), stuck.count), ((true, vec![]), 1));
        assert_eq!((stuck.sort(&[entry(7, 12 * S)], 23 * S, lives), stuck.count), ((false, vec![]), 2));
        // Of a thread that is gone nothing stays.
        assert_eq!((stuck.sort(&[entry(7, 12 * S)], 24 * S, |_| false), stuck.count), ((false, vec![7]), 2));
        assert_eq!((stuck.sort(&[], 24 * S, lives), stuck.known.len()), ((false, vec![]), 0));
    }

    #[test]
    fn what_is_told_of_a_cgroup() {
        let of = |tasks, children| bits(Interest { tasks, children });
        assert_eq!([of(false, false), of(true, false), of(false, true)], [1, 3, 5]);
    }
}
