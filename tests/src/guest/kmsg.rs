//! The kernel's own log: a defect that it reports fails the scenario in which it appeared.

use anyhow::Context;
use std::{
    fs::File,
    io::{ErrorKind, Read},
    os::unix::fs::OpenOptionsExt,
};

/// What a kernel says when something is wrong with it (`lib/bug.c`, `kernel/panic.c`, `kernel/hung_task.c`,
/// `kernel/rcu/tree_stall.h`, `arch/x86/kernel/traps.c`).
const DEFECTS: [&str; 9] = [
    "BUG:",
    "WARNING:",
    "Oops:",
    "kernel BUG at",
    "general protection fault",
    "blocked for more than",
    "detected stalls on",
    "self-detected stall",
    "scheduling while atomic",
];

/// `/dev/kmsg`, read from its beginning.
pub struct KernelLog(File);

impl KernelLog {
    /// Opens the log; the first [`Self::defects`] covers the boot.
    pub fn open() -> anyhow::Result<Self> {
        let file = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open("/dev/kmsg");
        Ok(Self(file.context("opening /dev/kmsg")?))
    }

    /// The lines since the last call that speak of a defect.
    pub fn defects(&mut self) -> anyhow::Result<Vec<String>> {
        Ok(self.lines()?.into_iter().filter(|l| is_defect(l)).collect())
    }

    /// All lines since the last call. Lines that were overwritten before they were read are one line saying so.
    pub fn lines(&mut self) -> anyhow::Result<Vec<String>> {
        let mut lines = Vec::new();
        // One read is one record; longer ones give EINVAL, and the kernel's limit is 8 KiB (`PRINTKRB_RECORD_MAX`
        // and the prefix).
        let mut record = [0u8; 16_384];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => return Ok(lines),
                Ok(n) => lines.push(text_of(&String::from_utf8_lossy(&record[..n]))),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(lines),
                Err(e) if e.raw_os_error() == Some(nix::libc::EPIPE) => {
                    lines.push("BUG: the test lost lines of the kernel log".into());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("reading /dev/kmsg"),
            }
        }
    }
}

/// The message of a record `priority,sequence,time,flags;message`, its continuation lines left out.
fn text_of(record: &str) -> String {
    let message = record.split_once(';').map_or(record, |(_, m)| m);
    message.lines().next().unwrap_or_default().to_owned()
}

fn is_defect(line: &str) -> bool {
    DEFECTS.iter().any(|d| line.contains(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_defects() {
        let record = "4,371,1234567,-;WARNING: CPU: 3 PID: 1 at kernel/cgroup/cpuset.c:927\n SUBSYSTEM=x\n";
        let line = text_of(record);
        assert_eq!(line, "WARNING: CPU: 3 PID: 1 at kernel/cgroup/cpuset.c:927");
        assert!(is_defect(&line));
        assert!(is_defect("INFO: task x:1 blocked for more than 120 seconds."));
        assert!(is_defect("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"));
        assert!(!is_defect("cpuset: new partition") && !is_defect("Spectre V2 : WARN: nothing"));
    }
}
