//! What kubelet 1.36 makes of a CPU manager checkpoint: its verdict, not ours.
//!
//! Problem: going back to the kubelet, or leaving it, needs the answer to "does it start from this file, and with
//! which state?", faults included: a checksum of 0 is never checked, pods' sets survive a failed reading, two pods
//! may share a CPU.
//! Steps: [`load`] tries the versions from the newest down (version 3 only with the gate), checks policy and lists;
//! [`start`] is the static policy's check of that state against the machine.
//! Invariant: nothing here is better than the kubelet. What should be said about a file is in [`super::inspect`].
//!
//! Source: `cpumanager/state/state_checkpoint.go` (`restoreState`), `cpumanager/policy_static.go` (`validateState`)
//! of 1.36.

use super::dump::checksum;
use super::json::decode;
use super::layout::{CPU_NAME, CPU_NAME_V2, CPU_V1, CPU_V2, CPU_V3, Layout, Value};
use super::ranges::{CpuRanges, RangeError};
use super::syntax::JsonError;
use std::collections::BTreeMap;

/// Container id to pod UID and container name: the containers that ran when the file was read.
pub type Containers = BTreeMap<String, (String, String)>;

/// Sets by pod UID and container name.
pub type Entries = BTreeMap<String, BTreeMap<String, CpuRanges>>;

/// How the kubelet is configured, as far as reading depends on it.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// `cpuManagerPolicy`.
    pub policy: &'a str,
    /// The gate `PodLevelResourceManagers`.
    pub pod_level: bool,
    /// From the runtime.
    pub containers: &'a Containers,
}

/// What the static policy checks a state against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// CPUs of the topology, which are those online.
    pub online: CpuRanges,
    /// The reserved set.
    pub reserved: CpuRanges,
    /// The option `strict-cpu-reservation`.
    pub strict: bool,
}

/// The kubelet's state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    /// The shared pool.
    pub default: CpuRanges,
    /// Containers.
    pub entries: Entries,
    /// Pods; only with the gate.
    pub pods: BTreeMap<String, CpuRanges>,
}

/// Why the kubelet does not load a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It cannot be read as the last version tried (1).
    #[error("not readable")]
    Json(#[from] JsonError),
    /// Nor is its checksum right.
    #[error("the checksum is {stored}, the content has {computed}")]
    Checksum {
        /// In the file.
        stored: u64,
        /// Of the content as the last version tried.
        computed: u32,
    },
    /// Version 1 names a container that does not run.
    #[error("container {id:?} is not among the running ones")]
    Container {
        /// The container id.
        id: String,
    },
    /// Written under another policy.
    #[error("the file is of policy {found:?}, configured is {configured:?}")]
    Policy {
        /// In the file.
        found: String,
        /// Configured.
        configured: String,
    },
    /// A CPU list that is none.
    #[error("{key}: {value:?} is no list")]
    List {
        /// Where, dotted.
        key: String,
        /// As found.
        value: String,
        /// What is wrong.
        source: RangeError,
    },
    /// The kubelet takes the file and panics.
    #[error("{key} holds null, which the kubelet follows and panics")]
    Panic {
        /// Where, dotted.
        key: String,
    },
}

/// Why the static policy does not start from a state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// Configuration: the policy needs reserved CPUs.
    #[error("no CPU is reserved")]
    NothingReserved,
    /// Entries and no pool.
    #[error("the shared pool is empty though there are entries")]
    PoolEmpty,
    /// Strict reservation, and the pool holds reserved CPUs.
    #[error("the strictly reserved CPUs {cpus} are in the shared pool")]
    ReservedInPool {
        /// Those.
        cpus: CpuRanges,
    },
    /// The pool must hold the reserved CPUs.
    #[error("the reserved CPUs {cpus} are not in the shared pool")]
    ReservedNotInPool {
        /// Those that are missing.
        cpus: CpuRanges,
    },
    /// An entry's CPUs are in the pool too.
    #[error("{pod}/{container} holds {cpus}, which are in the shared pool too")]
    Overlap {
        /// Pod UID.
        pod: String,
        /// Container name.
        container: String,
        /// Those.
        cpus: CpuRanges,
    },
    /// Pool and entries are not the machine's CPUs.
    #[error("the file accounts for CPUs {known}, the machine has {online}")]
    Machine {
        /// Pool and entries.
        known: CpuRanges,
        /// Online, less the reserved ones if strict.
        online: CpuRanges,
    },
}

/// Reads and checks a checkpoint as one version. The value comes back filled whatever the outcome, as in Go.
pub(super) fn get(bytes: &[u8], layout: &'static Layout, names: &[&str]) -> (Value, Result<(), LoadError>) {
    let mut value = Value::fresh(layout);
    if let Err(error) = decode(bytes, layout, &mut value).result {
        return (value, Err(error.into()));
    }
    let stored = value.uint(layout, "Checksum");
    let mut computed = 0;
    for name in names {
        computed = checksum(layout, name, &value);
        if stored == u64::from(computed) {
            return (value, Ok(()));
        }
    }
    (value, Err(LoadError::Checksum { stored, computed }))
}

/// "Accept empty checksum for compatibility with old file backend": a checksum of 0 is not checked.
pub(super) fn or_zero((value, result): (Value, Result<(), LoadError>)) -> (Value, Result<(), LoadError>) {
    let unchecked = matches!(result, Err(LoadError::Checksum { stored: 0, .. }));
    (value, if unchecked { Ok(()) } else { result })
}

/// The kubelet's state from a file's bytes; `None` for a file that is not there, which is made anew.
pub fn load(file: Option<&[u8]>, setup: Setup<'_>) -> Result<State, LoadError> {
    let Some(bytes) = file else { return Ok(State::default()) };
    let value = if setup.pod_level {
        load_v3(bytes, setup)?
    } else {
        let (policy, default, entries) = load_v2(bytes, setup)?;
        Raw { policy, default, entries, pods: BTreeMap::new() }
    };
    if value.policy != setup.policy {
        return Err(LoadError::Policy { found: value.policy, configured: setup.policy.into() });
    }
    let list = |key: String, text: &str| {
        CpuRanges::parse(text).map_err(|source| LoadError::List { key, value: text.into(), source })
    };
    let default = list("defaultCpuSet".into(), &value.default)?;
    let mut entries = Entries::new();
    for (pod, containers) in &value.entries {
        let known = entries.entry(pod.clone()).or_default();
        for (name, text) in containers {
            known.insert(name.clone(), list(format!("entries.{pod}.{name}"), text)?);
        }
    }
    Ok(State { default, entries, pods: value.pods })
}

type Texts = BTreeMap<String, BTreeMap<String, String>>;

/// A checkpoint whose lists are still text.
struct Raw {
    policy: String,
    default: String,
    entries: Texts,
    pods: BTreeMap<String, CpuRanges>,
}

fn text(value: &Value) -> String {
    if let Value::Text(text) = value { text.clone() } else { String::new() }
}

fn texts(value: &Value, layout: &Layout) -> Texts {
    let containers = |v: &Value| v.members().into_iter().map(|(k, v)| (k.to_owned(), text(v))).collect();
    value.map(layout, "Entries").into_iter().map(|(k, v)| (k.to_owned(), containers(v))).collect()
}

fn load_v3(bytes: &[u8], setup: Setup<'_>) -> Result<Raw, LoadError> {
    let (v3, result) = get(bytes, &CPU_V3, &[CPU_NAME]);
    let pods = v3.map(&CPU_V3, "PodEntries").into_iter().filter_map(|(pod, value)| match value {
        Value::Cpus(cpus) => Some((pod.to_owned(), cpus.clone())),
        _ => None,
    });
    let raw = Raw {
        policy: v3.text(&CPU_V3, "PolicyName").into(),
        default: v3.text(&CPU_V3, "DefaultCPUSet").into(),
        entries: texts(&v3, &CPU_V3),
        pods: pods.collect(),
    };
    if result.is_ok() {
        return Ok(raw);
    }
    // The older version is copied over what the failed reading left behind: pods' sets stay, unchecked.
    let (policy, default, entries) = load_v2(bytes, setup)?;
    Ok(Raw {
        policy: if policy.is_empty() { raw.policy } else { policy },
        default: if default.is_empty() { raw.default } else { default },
        entries: if entries.is_empty() { raw.entries } else { entries },
        pods: raw.pods,
    })
}

fn load_v2(bytes: &[u8], setup: Setup<'_>) -> Result<(String, String, Texts), LoadError> {
    let names: &[&str] = if setup.pod_level { &[CPU_NAME] } else { &[CPU_NAME_V2, CPU_NAME] };
    let (v2, result) = or_zero(get(bytes, &CPU_V2, names));
    if result.is_ok() {
        let field = |name| v2.text(&CPU_V2, name).to_owned();
        return Ok((field("PolicyName"), field("DefaultCPUSet"), texts(&v2, &CPU_V2)));
    }
    let (v1, result) = or_zero(get(bytes, &CPU_V1, &[CPU_NAME]));
    result?;
    let mut entries = Texts::new();
    for (id, value) in v1.map(&CPU_V1, "Entries") {
        let Some((pod, name)) = setup.containers.get(id) else {
            return Err(LoadError::Container { id: id.into() });
        };
        entries.entry(pod.clone()).or_default().insert(name.clone(), text(value));
    }
    let field = |name| v1.text(&CPU_V1, name).to_owned();
    Ok((field("PolicyName"), field("DefaultCPUSet"), entries))
}

/// The static policy's start: the state it goes on with. Any other policy starts from anything.
pub fn start(state: &State, setup: Setup<'_>, machine: &Machine) -> Result<State, StartError> {
    let mut state = state.clone();
    if setup.policy != "static" {
        return Ok(state);
    }
    if machine.reserved.is_empty() {
        return Err(StartError::NothingReserved);
    }
    let all =
        if machine.strict { machine.online.difference(&machine.reserved) } else { machine.online.clone() };
    if state.default.is_empty() {
        if !state.entries.is_empty() {
            return Err(StartError::PoolEmpty);
        }
        state.default = all;
        return Ok(state);
    }
    let in_pool = machine.reserved.intersection(&state.default);
    if machine.strict && !in_pool.is_empty() {
        return Err(StartError::ReservedInPool { cpus: in_pool });
    }
    if !machine.strict && in_pool != machine.reserved {
        return Err(StartError::ReservedNotInPool { cpus: machine.reserved.difference(&in_pool) });
    }
    let mut known = state.default.clone();
    for (pod, containers) in &state.entries {
        for (container, cpus) in containers {
            let both = state.default.intersection(cpus);
            if !both.is_empty() {
                let (pod, container) = (pod.clone(), container.clone());
                return Err(StartError::Overlap { pod, container, cpus: both });
            }
            known = known.union(cpus);
        }
    }
    // The pods' sets count, and are not compared with the pool.
    for cpus in state.pods.values() {
        known = known.union(cpus);
    }
    if known != all {
        return Err(StartError::Machine { known, online: all });
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V3_IN_V2: &str =
        r#"{"policyName":"static","defaultCpuSet":"0-1","podEntries":{"p":{"cpuSet":"2-3"}},"checksum":"#;

    fn setup(pod_level: bool, containers: &Containers) -> Setup<'_> {
        Setup { policy: "static", pod_level, containers }
    }

    /// `{PolicyName:static DefaultCPUSet:0-1 Entries:map[]}` under both names.
    #[test]
    fn early_1_36_hashed_its_own_name_and_reads_it_only_with_the_gate_off() {
        let none = Containers::new();
        let mut value = Value::fresh(&CPU_V2);
        for (field, text) in [("PolicyName", "static"), ("DefaultCPUSet", "0-1")] {
            *value.field_mut(&CPU_V2, field).unwrap() = Value::Text(text.into());
        }
        for (name, on) in [(CPU_NAME, true), (CPU_NAME_V2, false)] {
            let sum = checksum(&CPU_V2, name, &value);
            let file = format!(r#"{{"policyName":"static","defaultCpuSet":"0-1","checksum":{sum}}}"#);
            assert!(load(Some(file.as_bytes()), setup(false, &none)).is_ok(), "{name}");
            assert_eq!(load(Some(file.as_bytes()), setup(true, &none)).is_ok(), on, "{name}");
        }
    }

    #[test]
    fn pods_of_a_reading_that_failed_stay() {
        let none = Containers::new();
        let file = format!("{V3_IN_V2}0}}");
        let on = load(Some(file.as_bytes()), setup(true, &none)).unwrap();
        assert_eq!(on.pods["p"].to_string(), "2-3");
        let off = load(Some(file.as_bytes()), setup(false, &none)).unwrap();
        assert!(off.pods.is_empty());
        let wrong = format!("{V3_IN_V2}1}}");
        assert!(matches!(
            load(Some(wrong.as_bytes()), setup(true, &none)),
            Err(LoadError::Checksum { stored: 1, .. })
        ));
    }

    #[test]
    fn pods_count_for_the_machine_and_not_for_the_overlap() {
        let none = Containers::new();
        let list = |text| CpuRanges::parse(text).unwrap();
        let machine = Machine { online: list("0-3"), reserved: list("0"), strict: false };
        let mut state = State {
            default: list("0-1"),
            pods: BTreeMap::from([("p".into(), list("1-3"))]),
            ..State::default()
        };
        assert!(start(&state, setup(true, &none), &machine).is_ok());
        state.pods.clear();
        assert!(matches!(start(&state, setup(true, &none), &machine), Err(StartError::Machine { .. })));
        let nothing = Machine { reserved: list(""), ..machine };
        assert_eq!(start(&state, setup(true, &none), &nothing), Err(StartError::NothingReserved));
        let policy = Setup { policy: "none", ..setup(true, &none) };
        assert!(start(&state, policy, &nothing).is_ok());
    }
}
