//! The machine as the kernel's own files describe it, and CPUs going away and coming back.

use anyhow::Context;
use std::fs;
use truepin::{CpuId, CpuSet};

/// A file's content without white space at its ends.
pub fn read(path: &str) -> anyhow::Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    Ok(text.trim().to_owned())
}

/// A file that holds a CPU list.
pub fn cpus(path: &str) -> anyhow::Result<CpuSet> {
    let text = read(path)?;
    text.parse().with_context(|| format!("{path}: {text:?}"))
}

/// The CPUs in use now.
pub fn online() -> anyhow::Result<CpuSet> {
    cpus("/sys/devices/system/cpu/online")
}

/// The CPUs that exist.
pub fn present() -> anyhow::Result<CpuSet> {
    cpus("/sys/devices/system/cpu/present")
}

/// Takes a CPU away or brings it back. The kernel may refuse (EBUSY for the last CPU of a partition on 6.12).
pub fn set_online(cpu: CpuId, online: bool) -> anyhow::Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    let value = if online { "1" } else { "0" };
    fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))
}

/// The clock that timestamps come from.
pub fn clocksource() -> anyhow::Result<String> {
    read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
}

/// The kernel's release, such as `6.12.95+deb13-cloud-amd64`.
pub fn release() -> anyhow::Result<String> {
    read("/proc/sys/kernel/osrelease")
}

/// Seconds since boot, as the guest sees them.
pub fn uptime() -> anyhow::Result<String> {
    Ok(read("/proc/uptime")?.split(' ').next().unwrap_or_default().to_owned())
}

/// The value of `key=value` on the kernel command line.
pub fn argument(key: &str) -> anyhow::Result<Option<String>> {
    Ok(argument_in(&read("/proc/cmdline")?, key))
}

fn argument_in(line: &str, key: &str) -> Option<String> {
    line.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line() {
        let line = "quiet truepin.suite=smoke truepin.suites=x truepin.only= panic=-1";
        assert_eq!(argument_in(line, "truepin.suite").as_deref(), Some("smoke"));
        assert_eq!(argument_in(line, "truepin.only").as_deref(), Some(""));
        assert_eq!(argument_in(line, "truepin"), None);
    }

    #[test]
    fn this_machine() {
        assert!(online().unwrap().is_subset(&present().unwrap()));
        assert!(!release().unwrap().is_empty() && !uptime().unwrap().is_empty());
    }
}
