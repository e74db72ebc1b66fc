//! *That* CPUs go and come: the kernel's uevents, and inotify on the files by which they are told to.
//!
//! Problem: cpuset files give no event when a partition loses or regains a CPU without changing its state, and an offline
//! that the kernel *refuses* gives no event at all, though up to 6.12 it leaves tasks of an owner outside its CPUs.
//! Steps: uevents of the subsystem `cpu` (netlink, `NETLINK_KOBJECT_UEVENT`) tell what went and came; the close of a
//! writer of `cpuN/online` or `smt/control` tells of every attempt, refused ones too: both files are written by one
//! `write(2)`, and the close comes when the kernel is done with it (`vfs_close`, whatever the write returned). Both are
//! read-only, so audit mode has them too. Reports that the kernel had to drop (`ENOBUFS`, `IN_Q_OVERFLOW`) are reported as
//! lost: anything may have happened. So are those that were not read because reading failed.
//! Invariants: only what the kernel itself sent counts (port id 0); what was taken from the kernel is reported, whatever
//! fails after that.

use nix::sys::{
    inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor},
    socket::{
        AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, setsockopt, socket,
        sockopt::RcvBuf,
    },
};
use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};
use truepin::{CpuId, reconcile::HotplugReport};

/// The multicast group of the kernel's own messages (2 is udev's).
const KERNEL: u32 = 1;
/// A uevent's text is at most 2 KiB (`UEVENT_BUFFER_SIZE`, include/linux/kobject.h) behind its header line.
const LONGEST: usize = 8192;
/// Every device of the machine is told of in the same group; a cold start of a driver sends some hundred.
const BUFFER: usize = 1 << 20;
const CPUS: &str = "sys/devices/system/cpu";

/// One of the two means could not be had.
#[derive(Debug, thiserror::Error)]
pub enum HotplugError {
    /// The socket.
    #[error("uevents: {operation}")]
    Netlink {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: nix::Error,
    },
    /// The watches.
    #[error("inotify: {operation} {target}")]
    Inotify {
        /// What was tried.
        operation: &'static str,
        /// On what.
        target: String,
        /// Why not.
        source: nix::Error,
    },
    /// The CPUs' files cannot be listed.
    #[error("listing {}", path.display())]
    List {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Both means, as far as they could be had.
#[derive(Debug)]
pub struct Hotplug {
    uevents: Option<Uevents>,
    attempts: Option<Attempts>,
}

impl Hotplug {
    /// Of the running kernel, with what could not be had.
    #[must_use]
    pub fn new() -> (Self, Vec<HotplugError>) {
        let mut missing = Vec::new();
        let mut keep = |error| missing.push(error);
        let uevents = Uevents::new().map_err(&mut keep).ok();
        let attempts = Attempts::new(Path::new("/")).map_err(&mut keep).ok();
        (Self { uevents, attempts }, missing)
    }

    /// The means in force, in words.
    #[must_use]
    pub fn means(&self) -> Option<&'static str> {
        match (&self.uevents, &self.attempts) {
            (Some(_), Some(_)) => Some("uevent+inotify"),
            (Some(_), None) => Some("uevent"),
            (None, Some(_)) => Some("inotify"),
            (None, None) => None,
        }
    }

    /// What becomes readable when there is something to drain.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let uevents = self.uevents.as_ref().map(|u| u.socket.as_fd());
        uevents.into_iter().chain(self.attempts.as_ref().map(|a| a.inotify.as_fd()))
    }

    /// Whether uevents are heard, and attempts.
    #[must_use]
    pub fn hears(&self) -> (bool, bool) {
        (self.uevents.is_some(), self.attempts.is_some())
    }

    /// What happened since the last call, `None` for nothing; and what failed, which is reported as a loss as well.
    pub fn drain(&mut self) -> (Option<HotplugReport>, Vec<HotplugError>) {
        let mut report = HotplugReport::default();
        let mut any = false;
        let mut failed = Vec::new();
        let uevents = self.uevents.as_mut().map(|u| u.drain(&mut report));
        let attempts = self.attempts.as_mut().map(|a| a.drain(&mut report));
        for drained in [uevents, attempts].into_iter().flatten() {
            any |= drained.unwrap_or_else(|error| {
                failed.push(error);
                report.lost = true;
                true
            });
        }
        if let Some(attempts) = &mut self.attempts {
            // Its file is not watched yet; nor may be those of which the report was lost.
            let plugged = self.uevents.as_ref().is_some_and(|u| u.plugged);
            if plugged || report.lost {
                match attempts.watch() {
                    Ok(()) => self.uevents.iter_mut().for_each(|u| u.plugged = false),
                    // Tried again with the next report.
                    Err(error) => {
                        failed.push(error);
                        (report.lost, any) = (true, true);
                    }
                }
            }
        }
        (any.then_some(report), failed)
    }
}

#[derive(Debug)]
struct Uevents {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// A CPU was plugged in.
    plugged: bool,
}

impl Uevents {
    fn new() -> Result<Self, HotplugError> {
        let failed = |operation| move |source| HotplugError::Netlink { operation, source };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)
            .map_err(failed("opening a netlink socket"))?;
        // Cut to the system's limit, not refused.
        setsockopt(&socket, RcvBuf, &BUFFER).map_err(failed("the size of its buffer"))?;
        // Port id 0: the kernel chooses one.
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL)).map_err(failed("subscribing"))?;
        Ok(Self { socket, buffer: vec![0; LONGEST], plugged: false })
    }

    fn drain(&mut self, report: &mut HotplugReport) -> Result<bool, HotplugError> {
        let mut any = false;
        loop {
            match recvfrom::<NetlinkAddr>(self.socket.as_raw_fd(), &mut self.buffer) {
                Ok((length, from)) => {
                    let kernel = from.is_some_and(|f| f.pid() == 0 && f.groups() & KERNEL != 0);
                    let text = self.buffer.get(..length).unwrap_or_default();
                    let Some((cpu, action)) = change(text).filter(|_| kernel) else { continue };
                    self.plugged |= action == Action::Plugged;
                    any = true;
                    match action {
                        Action::Went => report.went.insert(cpu),
                        Action::Came | Action::Plugged => report.came.insert(cpu),
                    };
                }
                Err(nix::Error::EAGAIN) => return Ok(any),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::ENOBUFS) => {
                    report.lost = true;
                    any = true;
                }
                Err(source) => return Err(HotplugError::Netlink { operation: "reading", source }),
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Went,
    Came,
    /// A CPU that was not there before; it is still offline.
    Plugged,
}

/// What a uevent says of a CPU; nothing where it is about something else.
fn change(text: &[u8]) -> Option<(CpuId, Action)> {
    let fields = text.split(|b| *b == 0).filter_map(|f| str::from_utf8(f).ok()?.split_once('='));
    let (mut action, mut path, mut subsystem) = ("", "", "");
    for (key, value) in fields {
        match key {
            "ACTION" => action = value,
            "DEVPATH" => path = value,
            "SUBSYSTEM" => subsystem = value,
            _ => {}
        }
    }
    let cpu = number(path.rsplit('/').next()?).filter(|_| subsystem == "cpu")?;
    let action = match action {
        "offline" | "remove" => Action::Went,
        "online" => Action::Came,
        "add" => Action::Plugged,
        _ => return None,
    };
    Some((cpu, action))
}

/// `cpu12`
fn number(name: &str) -> Option<CpuId> {
    name.strip_prefix("cpu")?.parse().ok().map(CpuId)
}

#[derive(Debug)]
struct Attempts {
    inotify: Inotify,
    dir: PathBuf,
    /// `None` for `smt/control`.
    files: HashMap<WatchDescriptor, Option<CpuId>>,
}

impl Attempts {
    fn new(root: &Path) -> Result<Self, HotplugError> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(|source| HotplugError::Inotify { operation: "init", target: String::new(), source })?;
        let mut attempts = Self { inotify, dir: root.join(CPUS), files: HashMap::new() };
        attempts.watch()?;
        Ok(attempts)
    }

    /// Watches the files that are there. The boot CPU often has none.
    fn watch(&mut self) -> Result<(), HotplugError> {
        let failed = |source| HotplugError::List { path: self.dir.clone(), source };
        let mut wanted = vec![(self.dir.join("smt/control"), None)];
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(cpu) = name.to_str().and_then(number) {
                wanted.push((self.dir.join(&name).join("online"), Some(cpu)));
            }
        }
        for (path, cpu) in wanted {
            match self.inotify.add_watch(&path, AddWatchFlags::IN_CLOSE_WRITE) {
                Ok(wd) => drop(self.files.insert(wd, cpu)),
                Err(nix::Error::ENOENT | nix::Error::ENOTDIR) => {}
                Err(source) => {
                    let target = path.display().to_string();
                    return Err(HotplugError::Inotify { operation: "watch", target, source });
                }
            }
        }
        Ok(())
    }

    fn drain(&mut self, report: &mut HotplugReport) -> Result<bool, HotplugError> {
        let mut any = false;
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => return Ok(any),
                Err(source) => {
                    return Err(HotplugError::Inotify { operation: "read", target: String::new(), source });
                }
            };
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    report.lost = true;
                    any = true;
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.files.remove(&event.wd);
                } else if let Some(cpu) = self.files.get(&event.wd) {
                    if let Some(cpu) = cpu {
                        report.tried.insert(*cpu);
                    }
                    any = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{MsgFlags, sendto};
    use truepin::CpuSet;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn uevents_of_cpus_and_no_others() {
        let of = |action: &str, path: &str, subsystem: &str| {
            let text = format!(
                "{action}@{path}\0ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0MODALIAS=x\0SEQNUM=1\0"
            );
            change(text.as_bytes())
        };
        let cpu = "/devices/system/cpu/cpu12";
        assert_eq!(of("offline", cpu, "cpu"), Some((CpuId(12), Action::Went)));
        assert_eq!(of("online", cpu, "cpu"), Some((CpuId(12), Action::Came)));
        assert_eq!(of("remove", cpu, "cpu"), Some((CpuId(12), Action::Went)));
        assert_eq!(of("add", cpu, "cpu"), Some((CpuId(12), Action::Plugged)));
        for (action, path, subsystem) in [
            ("change", cpu, "cpu"),
            ("offline", "/devices/system/memory/memory12", "memory"),
            ("offline", cpu, "memory"),
            ("offline", "/devices/system/cpu/cpufreq", "cpu"),
            ("offline", "/devices/system/cpu/cpux", "cpu"),
        ] {
            assert_eq!(of(action, path, subsystem), None, "{action} {path} {subsystem}");
        }
        assert_eq!((change(b""), change(b"\0\0=\xff\0ACTION")), (None, None));
    }

    #[test]
    fn attempts_are_seen_whatever_came_of_them() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(CPUS);
        for file in ["cpu0/topology", "cpu1/online", "cpu12/online", "cpufreq/online", "smt/control"] {
            let path = dir.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "1").unwrap();
        }
        let mut attempts = Attempts::new(root.path()).unwrap();
        let mut report = HotplugReport::default();
        assert!(!attempts.drain(&mut report).unwrap());
        // Nothing is written, as by a write that the kernel refuses.
        drop(fs::OpenOptions::new().write(true).open(dir.join("cpu12/online")).unwrap());
        drop(fs::File::open(dir.join("cpu1/online")).unwrap());
        fs::write(dir.join("cpufreq/online"), "0").unwrap();
        assert!(attempts.drain(&mut report).unwrap());
        assert_eq!((report.tried.clone(), report.lost), (set("12"), false));
        fs::write(dir.join("smt/control"), "off").unwrap();
        let mut report = HotplugReport::default();
        assert!(attempts.drain(&mut report).unwrap() && report.tried.is_empty());
        // Plugged in later.
        fs::write(dir.join("cpu0/online"), "1").unwrap();
        attempts.watch().unwrap();
        fs::write(dir.join("cpu0/online"), "0").unwrap();
        assert!(attempts.drain(&mut report).unwrap());
        assert_eq!(report.tried, set("0"));
    }

    /// The kernel's messages alone: one of our own, to the same group, is none.
    #[test]
    fn a_message_of_anybody_else_is_not_believed() {
        let (mut uevents, witness) = (Uevents::new().unwrap(), Uevents::new().unwrap());
        let forger = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkKObjectUEvent,
        )
        .unwrap();
        let text = b"offline@/devices/system/cpu/cpu1\0ACTION=offline\0DEVPATH=/devices/system/cpu/cpu1\0SUBSYSTEM=cpu\0";
        let to = NetlinkAddr::new(0, KERNEL);
        let sent = sendto(forger.as_raw_fd(), text, &to, MsgFlags::empty());
        // Only root may send there (`netlink_sendmsg`, net/netlink/af_netlink.c).
        if sent == Err(nix::Error::EPERM) && !nix::unistd::geteuid().is_root() {
            // The tally counts this line.
            let line = b"skipped: hotplug::a_message_of_anybody_else_is_not_believed: not root\n";
            return drop(io::Write::write_all(&mut io::stderr(), line));
        }
        assert_eq!(sent, Ok(text.len()));
        // It was delivered, and would count if the kernel had sent it.
        let mut got = vec![0; LONGEST];
        let (length, from) = loop {
            let (length, from) = recvfrom::<NetlinkAddr>(witness.socket.as_raw_fd(), &mut got).unwrap();
            if got.get(..length) == Some(&text[..]) {
                break (length, from.unwrap());
            }
        };
        assert_eq!((from.groups(), change(&got[..length])), (KERNEL, Some((CpuId(1), Action::Went))));
        let mut report = HotplugReport::default();
        assert!(!uevents.drain(&mut report).unwrap(), "{report:?}");
    }
}
