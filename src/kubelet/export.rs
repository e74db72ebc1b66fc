//! The way back: a checkpoint that the kubelet accepts.
//!
//! Problem: a node that leaves truepin must not be drained either. The kubelet starts only from a file in which pool and
//! entries are together exactly the machine's CPUs, with a checksum by its own dump.
//! Steps: [`State::of`] derives the pool from what pods hold (CPUs of any other owner are the pool's again: the kubelet
//! knows only pods); [`export`](fn@export) writes the state as one of the versions.
//! Invariants: the bytes are those that the kubelet itself would write for this state; a state of `State::of` starts.
//!
//! Which version: [`Exported::V2`] is read by 1.18 to 1.37 whatever their gates. [`Exported::V4`] is 1.37's with a valid
//! checksum of version 2 on its outer part, so that everything since 1.18 reads it too (without pods' sets).
//! [`Exported::V3`] is for 1.36 with the gate alone.

use super::dump::{checksum, data_checksum, encode};
use super::layout::{CPU_DATA, CPU_NAME, CPU_V2, CPU_V3, CPU_V4, Key, Layout, Type, Value};
use super::load::{Machine, State};
use super::ranges::CpuRanges;
use crate::{cpuset::CpuSet, owner::Owner};
use std::collections::BTreeMap;

/// A version to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exported {
    /// 1.18 and later.
    V2,
    /// 1.36 with the gate.
    V3,
    /// 1.37; readable for 1.18 and later.
    V4,
}

impl State {
    /// The state in which these owners hold these CPUs, and what returns to the pool because its owner is no
    /// container.
    #[must_use]
    pub fn of<'a>(
        owners: impl IntoIterator<Item = (&'a Owner, &'a CpuSet)>,
        machine: &Machine,
    ) -> (Self, CpuSet) {
        let mut state = Self::default();
        let (mut held, mut others) = (CpuRanges::default(), CpuSet::new());
        for (owner, cpus) in owners {
            let Owner::Pod { uid, container } = owner else {
                others |= cpus;
                continue;
            };
            let cpus = CpuRanges::from(cpus);
            held = held.union(&cpus);
            state.entries.entry(uid.clone()).or_default().insert(container.clone(), cpus);
        }
        let pool = machine.online.difference(&held);
        state.default = if machine.strict { pool.difference(&machine.reserved) } else { pool };
        (state, others)
    }
}

/// The file's bytes.
#[must_use]
pub fn export(state: &State, policy: &str, version: Exported) -> String {
    match version {
        Exported::V2 => encode(&Type::Struct(&CPU_V2), &summed(&CPU_V2, state, policy)),
        Exported::V3 => encode(&Type::Struct(&CPU_V3), &summed(&CPU_V3, state, policy)),
        Exported::V4 => {
            let data = encode(&Type::Struct(&CPU_DATA), &fill(&CPU_DATA, state, policy));
            let mut value = fill(&CPU_V4, state, policy);
            let sum = checksum(&CPU_V2, CPU_NAME, &fill(&CPU_V2, state, policy));
            set(&mut value, &CPU_V4, "Checksum", Value::Uint(sum.into()));
            set(&mut value, &CPU_V4, "DataChecksum", Value::Uint(data_checksum(&data).into()));
            set(&mut value, &CPU_V4, "Data", Value::Text(data));
            encode(&Type::Struct(&CPU_V4), &value)
        }
    }
}

fn set(value: &mut Value, layout: &'static Layout, field: &str, to: Value) {
    if let Some(target) = value.field_mut(layout, field) {
        *target = to;
    }
}

fn summed(layout: &'static Layout, state: &State, policy: &str) -> Value {
    let mut value = fill(layout, state, policy);
    let sum = checksum(layout, CPU_NAME, &value);
    set(&mut value, layout, "Checksum", Value::Uint(sum.into()));
    value
}

/// The state in a layout; fields that it does not have are left out.
fn fill(layout: &'static Layout, state: &State, policy: &str) -> Value {
    let mut value = Value::fresh(layout);
    let text = |cpus: &CpuRanges| Value::Text(cpus.to_string());
    let containers = |c: &BTreeMap<String, CpuRanges>| {
        Value::Map(Some(c.iter().map(|(name, cpus)| (Key::Text(name.clone()), text(cpus))).collect()))
    };
    let entries = state.entries.iter().map(|(pod, c)| (Key::Text(pod.clone()), containers(c))).collect();
    let pods = state.pods.iter().map(|(pod, cpus)| (Key::Text(pod.clone()), Value::Cpus(cpus.clone())));
    set(&mut value, layout, "PolicyName", Value::Text(policy.into()));
    set(&mut value, layout, "DefaultCPUSet", text(&state.default));
    set(&mut value, layout, "Entries", Value::Map(Some(entries)));
    set(&mut value, layout, "PodEntries", Value::Map(Some(pods.collect())));
    value
}
