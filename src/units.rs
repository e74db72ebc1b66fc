//! Which cgroups systemd owns, and how it is told their CPUs.
//!
//! Problem: systemd writes a unit's `cpuset.cpus` and `cpuset.mems` anew from `AllowedCPUs=` and `AllowedMemoryNodes=`
//! whenever it realises the unit (`daemon-reload`, `set-property`, starts), and keeps the controller enabled for units that
//! ask for it only. What is written beside it does not last, so its own cgroups are written by it.
//! Steps: a path is a unit's if slices lead to it, nested as systemd nests them (`a.slice/a-b.slice/c.service`); what lies
//! below a service or a scope is delegated and not systemd's. Whether such a unit is loaded, and lives there, systemd has to
//! say. Lists cross D-Bus as arrays of bytes, the lowest CPU in the lowest bit (org.freedesktop.systemd1(5)).

use crate::{
    cgroup::{CgroupPath, CpusetFile},
    idset::IdSet,
    owner::Owner,
};
use std::{fmt, str::FromStr};

/// The name of a unit that has a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitName(String);

/// Why a text names no such unit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} names no unit with a cgroup: {reason}")]
pub struct UnitNameError {
    /// The text as given.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// The types with a cgroup, and the D-Bus interface of each.
const KINDS: [(&str, &str); 6] = [
    ("service", "org.freedesktop.systemd1.Service"),
    ("scope", "org.freedesktop.systemd1.Scope"),
    ("slice", "org.freedesktop.systemd1.Slice"),
    ("socket", "org.freedesktop.systemd1.Socket"),
    ("mount", "org.freedesktop.systemd1.Mount"),
    ("swap", "org.freedesktop.systemd1.Swap"),
];

impl UnitName {
    /// The name as systemd prints it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn split(&self) -> (&str, &str) {
        self.0.rsplit_once('.').unwrap_or((&self.0, ""))
    }

    /// The D-Bus interface that has its `ControlGroup` and `AllowedCPUs`.
    #[must_use]
    pub fn interface(&self) -> &'static str {
        let kind = self.split().1;
        KINDS.iter().find(|(k, _)| *k == kind).map_or("org.freedesktop.systemd1.Unit", |(_, i)| i)
    }

    /// Whether it is a slice.
    #[must_use]
    pub fn is_slice(&self) -> bool {
        self.split().1 == "slice"
    }

    /// The unit whose own cgroup `path` is, by its name alone.
    #[must_use]
    pub fn at(path: &CgroupPath) -> Option<Self> {
        let mut above: Option<String> = None;
        let mut parts = path.as_str().split('/').peekable();
        while let Some(part) = parts.next() {
            // Names that could be mistaken for a kernel file have a `_` in front (cg_escape).
            let unit: Self = part.strip_prefix('_').unwrap_or(part).parse().ok()?;
            if !unit.is_slice() {
                return parts.peek().is_none().then_some(unit);
            }
            let stem = unit.split().0;
            let nested = match &above {
                None => !stem.contains('-'),
                Some(up) => stem
                    .strip_prefix(up.as_str())
                    .and_then(|rest| rest.strip_prefix('-'))
                    .is_some_and(|own| !own.is_empty() && !own.contains('-')),
            };
            if !nested {
                return None;
            }
            if parts.peek().is_none() {
                return Some(unit);
            }
            above = Some(stem.into());
        }
        None
    }

    /// The unit that an owner is by its name.
    #[must_use]
    pub fn of(owner: &Owner) -> Option<Self> {
        match owner {
            Owner::Unit(name) => name.parse().ok(),
            _ => None,
        }
    }
}

impl FromStr for UnitName {
    type Err = UnitNameError;

    fn from_str(text: &str) -> Result<Self, UnitNameError> {
        let refuse = |reason| Err(UnitNameError { text: text.into(), reason });
        // unit_name_is_valid, src/basic/unit-name.c
        if text.len() > 255 {
            return refuse("longer than 255 characters");
        }
        if !text.chars().all(|c| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c)) {
            return refuse("only letters, digits and : - _ . \\ @ are allowed");
        }
        let Some((stem, kind)) = text.rsplit_once('.') else {
            return refuse("it has no type such as .service");
        };
        if !KINDS.iter().any(|(k, _)| *k == kind) {
            return refuse("only services, scopes, slices, sockets, mounts and swaps have one");
        }
        if stem.is_empty() || stem.starts_with('@') {
            return refuse("the name is missing");
        }
        if stem.ends_with('@') {
            return refuse("a template has none: name an instance");
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for UnitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The property that is written into `file`; `None` for files of which systemd knows nothing.
#[must_use]
pub fn property_of(file: CpusetFile) -> Option<&'static str> {
    match file {
        CpusetFile::Cpus => Some("AllowedCPUs"),
        CpusetFile::Mems => Some("AllowedMemoryNodes"),
        CpusetFile::Exclusive | CpusetFile::Partition => None,
    }
}

/// A list as the property has it.
#[must_use]
pub fn to_bytes<T: Copy + Ord + From<u32> + Into<u32>>(set: &IdSet<T>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for id in set.iter().map(Into::<u32>::into) {
        let at = id as usize / 8;
        if bytes.len() <= at {
            bytes.resize(at + 1, 0);
        }
        bytes[at] |= 1 << (id % 8);
    }
    bytes
}

/// A list from the property; `None` where it has numbers that no list can have.
#[must_use]
pub fn from_bytes<T: Copy + Ord + From<u32> + Into<u32>>(bytes: &[u8]) -> Option<IdSet<T>> {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0_u32, |all, byte| all << 8 | u32::from(*byte));
    IdSet::from_mask(bytes.chunks(4).map(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuSet;

    fn at(path: &str) -> Option<String> {
        UnitName::at(&path.parse().unwrap()).map(|u| u.to_string())
    }

    #[test]
    fn a_units_own_cgroup_and_nothing_below_it() {
        for (path, name) in [
            ("init.scope", Some("init.scope")),
            ("system.slice", Some("system.slice")),
            ("system.slice/db.service", Some("db.service")),
            ("system.slice/system-getty.slice/getty@tty1.service", Some("getty@tty1.service")),
            ("kubepods.slice/kubepods-podu_1.slice/cri-containerd-9.scope", Some("cri-containerd-9.scope")),
            ("system.slice/_cpuset.service", Some("cpuset.service")),
            // Of the manager of the user's own session.
            ("user.slice/user-0.slice/user@0.service/app.slice/x.service", None),
            ("user.slice/user-0.slice/user@0.service", Some("user@0.service")),
            ("system.slice/db.service/worker", None),
            // Nested as systemd would not.
            ("system-x.slice", None),
            ("system.slice/other-x.slice/a.service", None),
            ("truepin.slice/run-db", None),
            ("kubepods/pod1/abc", None),
            ("", None),
        ] {
            assert_eq!(at(path).as_deref(), name, "{path}");
        }
    }

    #[test]
    fn names_that_are_none() {
        for name in ["db", ".service", "db@.service", "a b.service", "x.timer", "dev-sda.device"] {
            assert!(name.parse::<UnitName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn lists_cross_both_ways() {
        for (text, bytes) in
            [("", vec![]), ("0", vec![1]), ("1-2,8", vec![6, 1]), ("35", vec![0, 0, 0, 0, 8])]
        {
            let set: CpuSet = text.parse().unwrap();
            assert_eq!(to_bytes(&set), bytes);
            assert_eq!(from_bytes::<crate::CpuId>(&bytes), Some(set));
        }
        assert_eq!(from_bytes::<crate::CpuId>(&[0, 0, 0, 0, 0]), Some(CpuSet::new()));
    }
}
