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
    cpuset::CpuSet,
    idset::IdSet,
    owner::Owner,
};
use std::{fmt, str::FromStr};

/// With this the names of the scopes begin that truepin has systemd make.
pub const OWN: &str = "truepin-";

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

    /// Whether it is a scope that truepin had made: nobody set it before, and it goes with its processes.
    #[must_use]
    pub fn is_own_scope(&self) -> bool {
        self.split().1 == "scope" && self.0.starts_with(OWN)
    }

    /// Whether it starts processes itself, so that it has a `CPUAffinity`.
    #[must_use]
    pub fn has_processes(&self) -> bool {
        !matches!(self.split().1, "scope" | "slice")
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

    /// The cgroup that systemd makes for the unit, which is in `slice`; `None` where `slice` names none.
    #[must_use]
    pub fn path_in(&self, slice: &str) -> Option<CgroupPath> {
        let slice = if self.is_slice() { &self.0 } else { slice };
        let stem = slice.strip_suffix(".slice")?;
        let mut path = CgroupPath::root();
        // `-.slice` is the root (slice_build_parent_slice, src/basic/unit-name.c).
        for (end, _) in stem.match_indices('-').chain([(stem.len(), "")]).filter(|_| stem != "-") {
            path = path.child(&format!("{}.slice", &stem[..end])).ok()?;
        }
        if self.is_slice() { Some(path) } else { path.child(&self.escaped()).ok() }
    }

    /// Its name as a directory of cgroup2 (`cg_escape`, src/basic/cgroup-util.c).
    fn escaped(&self) -> String {
        const CONTROLLERS: [&str; 12] = [
            "cgroup", "cpu", "cpuacct", "cpuset", "io", "blkio", "memory", "devices", "pids", "hugetlb",
            "rdma", "misc",
        ];
        let first = self.0.split('.').next().unwrap_or_default();
        let clashes = self.0.starts_with(['_', '.']) || CONTROLLERS.contains(&first);
        if clashes { format!("_{}", self.0) } else { self.0.clone() }
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

/// A list of CPUs that a unit names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// Which unit.
    pub unit: UnitName,
    /// `AllowedCPUs` or `CPUAffinity`.
    pub property: &'static str,
    /// Its value.
    pub cpus: CpuSet,
}

/// A unit that names CPUs which cannot be had: what the kernel does not take of it systemd drops, and starts the unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Misnamed {
    /// What is named.
    pub named: Named,
    /// CPUs that this machine does not have.
    pub absent: CpuSet,
    /// CPUs that are offline.
    pub offline: CpuSet,
}

impl Named {
    /// What is wrong with it on a machine with the CPUs `present`, of which `online` are online.
    #[must_use]
    pub fn judge(&self, present: &CpuSet, online: &CpuSet) -> Option<Misnamed> {
        let absent = self.cpus.difference(&present.union(online));
        let offline = self.cpus.difference(online).difference(&absent);
        let wrong = !absent.is_empty() || !offline.is_empty();
        wrong.then(|| Misnamed { named: self.clone(), absent, offline })
    }
}

impl fmt::Display for Misnamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Named { unit, property, cpus } = &self.named;
        write!(f, "{property}={cpus} of {unit} names CPUs ")?;
        match (self.absent.is_empty(), self.offline.is_empty()) {
            (false, true) => write!(f, "{}, which this machine does not have", self.absent)?,
            (true, _) => write!(f, "{}, which are offline", self.offline)?,
            (false, false) => {
                write!(
                    f,
                    "{}, which this machine does not have, and {}, which are offline",
                    self.absent, self.offline
                )?;
            }
        }
        // `update_cpumask` (kernel/cgroup/cpuset.c) takes a list as a whole or not at all; one without a CPU that is online
        // is as none. `sched_setaffinity` takes what there is of one, and fails with EINVAL where nothing is.
        let what = match *property {
            "AllowedCPUs" if !self.absent.is_empty() => {
                "the kernel does not take such a list, and systemd starts the unit without any"
            }
            "AllowedCPUs" => "while they are, it runs on what is left of them, or on all that its slice has",
            _ => "it runs on what is left of them, and does not start where nothing is",
        };
        write!(f, "; {what}: `systemctl edit {unit}` and name CPUs that are online")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("truepin.slice/truepin-run-db.scope", Some("truepin-run-db.scope")),
            // No name of a unit: a template's.
            ("truepin.slice/truepin-run-db@.scope", None),
            ("kubepods/pod1/abc", None),
            ("", None),
        ] {
            assert_eq!(at(path).as_deref(), name, "{path}");
        }
    }

    #[test]
    fn where_a_unit_will_be() {
        for (unit, slice, path) in [
            ("db.service", "system.slice", Some("system.slice/db.service")),
            (
                "getty@tty1.service",
                "system-getty.slice",
                Some("system.slice/system-getty.slice/getty@tty1.service"),
            ),
            ("init.scope", "-.slice", Some("init.scope")),
            ("a-b.slice", "whatever", Some("a.slice/a-b.slice")),
            ("cpuset.service", "system.slice", Some("system.slice/_cpuset.service")),
            ("db.service", "", None),
            ("db.service", "x.service", None),
        ] {
            let unit: UnitName = unit.parse().unwrap();
            let found = unit.path_in(slice);
            assert_eq!(found.as_ref().map(CgroupPath::as_str), path, "{unit} in {slice}");
            // And back.
            assert_eq!(found.and_then(|p| UnitName::at(&p)), path.map(|_| unit));
        }
    }

    #[test]
    fn cpus_that_cannot_be_had() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        for (property, cpus, parts) in [
            ("AllowedCPUs", "2-3", None),
            (
                "AllowedCPUs",
                "2,8-9",
                Some(["names CPUs 8-9, which this machine does not have;", "without any"]),
            ),
            ("AllowedCPUs", "2,7", Some(["names CPUs 7, which are offline;", "what is left of them"])),
            (
                "CPUAffinity",
                "7-8",
                Some([
                    "names CPUs 8, which this machine does not have, and 7, which are offline;",
                    "does not start",
                ]),
            ),
        ] {
            let unit: UnitName = "db.service".parse().unwrap();
            let named = Named { unit, property, cpus: set(cpus) };
            let told = named.judge(&set("0-7"), &set("0-6")).map(|m| m.to_string());
            assert_eq!(told.is_some(), parts.is_some(), "{told:?}");
            for part in parts.into_iter().flatten().chain([property, cpus, "db.service"]) {
                assert!(told.as_ref().is_none_or(|t| t.contains(part)), "{part}: {told:?}");
            }
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
