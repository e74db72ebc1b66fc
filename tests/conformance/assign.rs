//! Recorded choices of CPUs by the kubelet's static policy, against the strategy `kubelet`.
//!
//! Where the record says that the kubelet was wrong (CPUs that were not available, another number, no return), no answer
//! is right but a set of that size, all available, of whole cores where those were asked for; or a refusal. That counts
//! as accepted. Where it kept a slice that was overwritten later, `noalias` is the answer.

use crate::{Mismatch, Tally, machines, machines::Machine, records};
use serde_json::Value;
use std::path::Path;
use truepin::{
    CpuSet, NodeId, NodeSet,
    placement::kubelet::{StaticOptions, TakeError, allocate, take},
};

/// Compares every record of `assign.jsonl`.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let machines = machines::machines(&records(&folder.join("topologies.jsonl"))?)?;
    let mut tally = Tally::default();
    for record in records(&folder.join("assign.jsonl"))? {
        let name = record["t"].as_str().unwrap_or_default();
        let machine = machines.get(name).ok_or_else(|| format!("no machine {name}"));
        let verdict = machine.and_then(|machine| judge(&record, machine));
        match verdict {
            Ok(Verdict::Equal) => tally.passed += 1,
            Ok(Verdict::Accepted) => tally.accepted += 1,
            Ok(Verdict::Differs { expected, got }) => {
                tally.failed += 1;
                let id =
                    format!("{} {name} {} n={} {}", record["id"], record["op"], record["n"], record["opt"]);
                tally.mismatches.push(Mismatch { id, expected, got });
            }
            Err(got) => {
                tally.failed += 1;
                let id = record["id"].to_string();
                tally.mismatches.push(Mismatch { id, expected: "a record".into(), got });
            }
        }
    }
    Ok(tally)
}

enum Verdict {
    Equal,
    Accepted,
    Differs { expected: String, got: String },
}

fn judge(record: &Value, machine: &Machine) -> Result<Verdict, String> {
    let n = record["n"].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or("n is no number")?;
    let names = record["opt"].as_array().ok_or("opt is no list")?;
    let options = StaticOptions::parse(names.iter().filter_map(Value::as_str)).map_err(|e| e.to_string())?;
    let (available, result, shared) = match record["op"].as_str() {
        Some("take") => {
            let available = set(&record["avail"])?;
            let result = take(&machine.kubelet, options, &available, n);
            (available, result, None)
        }
        Some("alloc") => {
            let reserved = set(&record["reserved"])?;
            let shared = set(&record["default"])?;
            let reusable = set(&record["reusable"])?;
            let affinity = nodes(&record["mask"])?;
            let affinity = affinity.as_ref();
            let result = allocate(&machine.kubelet, options, &reserved, &shared, &reusable, affinity, n);
            (shared.difference(&reserved).union(&reusable), result, Some(shared))
        }
        _ => return Err(format!("op {} is not known", record["op"])),
    };
    let got = match &result {
        Ok(cpus) => cpus.to_string(),
        Err(error) => format!("ERR:{error}"),
    };

    if !record["unsafe"].is_null() || !record["size"].is_null() || record["err"] == "HANG" {
        let right = result.as_ref().map_or(true, |cpus| {
            let whole = || {
                let touched = machine.topology.cores().iter().filter(|core| !core.cpus.is_disjoint(cpus));
                touched.into_iter().all(|core| core.cpus.is_subset(cpus))
            };
            cpus.len() == n && cpus.is_subset(&available) && (!options.full_pcpus_only || whole())
        });
        let expected = format!("{n} of {available}, or a refusal");
        return Ok(if right { Verdict::Accepted } else { Verdict::Differs { expected, got } });
    }

    let expected = match (&record["noalias"], &record["err"], &record["exp"]) {
        (Value::String(answer), ..) | (Value::Null, Value::Null, Value::String(answer)) => answer.clone(),
        (Value::Null, Value::String(error), _) => format!("ERR:{error}"),
        _ => return Err("none of exp, err and noalias is a text".into()),
    };
    let equal = match (expected.strip_prefix("ERR:"), &result) {
        (Some(error), Err(ours)) => kind(error) == Some(kind_of(ours)),
        (None, Ok(cpus)) => {
            // Of an answer that the kubelet did not give, the pool afterwards was not recorded.
            let pool = match &shared {
                Some(shared) if record["noalias"].is_null() => {
                    shared.difference(cpus) == set(&record["default_after"])?
                }
                _ => true,
            };
            set(&expected.as_str().into())? == *cpus && pool
        }
        _ => false,
    };
    Ok(if equal { Verdict::Equal } else { Verdict::Differs { expected, got } })
}

fn set(value: &Value) -> Result<CpuSet, String> {
    value.as_str().ok_or("a set is no text")?.parse().map_err(|e| format!("{value}: {e}"))
}

/// `null` for any node.
fn nodes(mask: &Value) -> Result<Option<NodeSet>, String> {
    let Some(list) = mask.as_array() else {
        return if mask.is_null() { Ok(None) } else { Err(format!("mask {mask} is no list")) };
    };
    let ids: Option<NodeSet> = list
        .iter()
        .map(|id| id.as_u64().and_then(|id| id.try_into().ok()).map(NodeId))
        .collect::<Option<_>>();
    ids.map(Some).ok_or_else(|| format!("mask {mask} names no nodes"))
}

/// What the kubelet's text means, and its numbers in the order of the text; `None` for a text that is not known.
pub(crate) fn kind(text: &str) -> Option<(&'static str, Vec<i64>)> {
    let (kind, _) = [
        ("not enough", "not enough cpus available to satisfy request"),
        ("smt", "SMT Alignment Error: requested"),
        ("smt physical", "SMT Alignment Error: not enough free physical CPUs"),
        ("accounting", "accounting error"),
        ("failed", "failed to allocate cpus"),
    ]
    .into_iter()
    .find(|(_, start)| text.starts_with(start))?;
    let numbers = text.split(|c: char| !c.is_ascii_digit() && c != '-').filter_map(|word| word.parse().ok());
    Some((kind, numbers.collect()))
}

/// The same of our refusals.
pub(crate) fn kind_of(error: &TakeError) -> (&'static str, Vec<i64>) {
    let numbers = |list: &[usize]| list.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX)).collect();
    match error {
        TakeError::NotEnough { requested, available } => ("not enough", numbers(&[*requested, *available])),
        TakeError::SmtAlignment { requested, cpus_per_core } => {
            ("smt", numbers(&[*requested, *cpus_per_core]))
        }
        TakeError::NotEnoughPhysical { requested, available, cpus_per_core } => {
            ("smt physical", numbers(&[*available, *requested, *cpus_per_core]))
        }
        TakeError::Accounting { missing } => ("accounting", vec![*missing]),
        TakeError::Unaccounted { .. } => ("failed", Vec::new()),
    }
}
