//! Recorded histories of a kubelet's node, against the replay of the same events.
//!
//! Compared after every step: the sets, the answer and its reason, the noted affinities, what was created and written;
//! at the end the bytes of the checkpoint. Where the recorded kubelet gave one CPU to two owners (`unsafe`), the replay
//! goes its own way from there on: it is accepted if it is equal until then, and never does so itself.

use crate::{
    Mismatch, Tally,
    machines::{Machine, machines},
    records,
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};
use truepin::{
    CpuSet, NodeId,
    hints::{Distances, TopologyHint},
    kubelet::replay::{Admission, Config, KubeletNode, Named, Reservation, Scope},
    placement::kubelet::StaticOptions,
    pod::Pod,
    request::AlignmentPolicy,
};

/// Compares every record of `traces.jsonl`.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let recorded = records(&folder.join("topologies.jsonl"))?;
    let machines = machines(&recorded)?;
    let distances: BTreeMap<&str, Distances> =
        recorded.iter().filter_map(|t| Some((t["t"].as_str()?, distances(t)))).collect();
    let mut tally = Tally::default();
    for record in records(&folder.join("traces.jsonl"))? {
        let id = record["id"].as_str().unwrap_or("?").to_owned();
        let name = record["t"].as_str().unwrap_or("?");
        let accepted = record["unsafe"] == true;
        let outcome = match (machines.get(name), distances.get(name)) {
            (Some(machine), Some(distances)) if accepted => safe(&record, machine, distances),
            (Some(machine), Some(distances)) => equal(&record, machine, distances),
            _ => Err(Difference::new("machine", &"one that is recorded", &name)),
        };
        match outcome {
            Ok(()) if accepted => tally.accepted += 1,
            Ok(()) => tally.passed += 1,
            Err(Difference { at, expected, got }) => {
                tally.failed += 1;
                tally.mismatches.push(Mismatch { id: format!("{id} ({name}): {at}"), expected, got });
            }
        }
    }
    Ok(tally)
}

/// The first one of a trace; what follows from it says nothing.
struct Difference {
    at: String,
    expected: String,
    got: String,
}

impl Difference {
    fn new(at: impl Into<String>, expected: &impl ToString, got: &impl ToString) -> Self {
        Self { at: at.into(), expected: expected.to_string(), got: got.to_string() }
    }

    fn unreadable(what: &str, why: &impl ToString) -> Self {
        Self::new(what, &"readable", why)
    }
}

fn distances(machine: &Value) -> Distances {
    let row = |(node, row): (&String, &Value)| {
        let row =
            row.as_array()?.iter().map(|d| d.as_u64()?.try_into().ok()).collect::<Option<Vec<u32>>>()?;
        Some((NodeId(node.parse().ok()?), row))
    };
    Distances::new(machine["dist"].as_object().into_iter().flatten().filter_map(row))
}

fn options(list: &Value) -> Result<StaticOptions, Difference> {
    let names = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    StaticOptions::parse(names).map_err(|e| Difference::unreadable("opt", &e))
}

fn reservation(value: &Value) -> Result<Reservation, Difference> {
    match (value.as_u64().map(usize::try_from), value.as_str()) {
        (Some(Ok(count)), _) => Ok(Reservation::Count(count)),
        (None, Some(list)) => list
            .parse()
            .map(Reservation::Cpus)
            .map_err(|e| Difference::unreadable("reserved", &format!("{list:?}: {e}"))),
        _ => Err(Difference::unreadable("reserved", value)),
    }
}

fn config(record: &Value) -> Result<Config, Difference> {
    let policy = match record["tm"].as_str() {
        Some("none") => AlignmentPolicy::None,
        Some("best-effort") => AlignmentPolicy::BestEffort,
        Some("restricted") => AlignmentPolicy::Restricted,
        Some("single-numa-node") => AlignmentPolicy::SingleNumaNode,
        _ => return Err(Difference::unreadable("tm", &record["tm"])),
    };
    let scope = match record["scope"].as_str() {
        Some("container") => Scope::Container,
        Some("pod") => Scope::Pod,
        _ => return Err(Difference::unreadable("scope", &record["scope"])),
    };
    let mut config = Config {
        options: options(&record["opt"])?,
        policy,
        scope,
        prefer_closest: record["tm_opt"]["prefer-closest-numa-nodes"] == "true",
        pod_level: record["pod_level"] == true,
        ..Config::new(reservation(&record["reserved"])?)
    };
    if let Some(max) = record["tm_opt"]["max-allowable-numa-nodes"].as_str() {
        config.max_nodes = max.parse().map_err(|e| Difference::unreadable("max-allowable-numa-nodes", &e))?;
    }
    Ok(config)
}

/// What a step changes of a configuration.
fn changed(config: &Config, step: &Value) -> Result<Config, Difference> {
    let mut config = config.clone();
    if !step["opt"].is_null() {
        config.options = options(&step["opt"])?;
    }
    if !step["reserved"].is_null() {
        config.reserved = reservation(&step["reserved"])?;
    }
    Ok(config)
}

fn pod(step: &Value) -> Result<Pod, Difference> {
    serde_json::from_value(step["pod"].clone()).map_err(|e| Difference::unreadable("pod", &e))
}

fn uid(step: &Value) -> &str {
    step["uid"].as_str().unwrap_or_default()
}

fn steps(record: &Value) -> impl Iterator<Item = (usize, &Value)> {
    record["steps"].as_array().into_iter().flatten().enumerate()
}

/// Whether every step comes to the same.
fn equal(record: &Value, machine: &Machine, distances: &Distances) -> Result<(), Difference> {
    let mut node: Option<KubeletNode<'_>> = None;
    let mut config = config(record)?;
    let mut ids = 0;
    for (at, step) in steps(record) {
        let op = step["op"].as_str().unwrap_or_default();
        let got = match (op, &mut node) {
            ("boot", None) => match KubeletNode::boot(&machine.kubelet, distances, config.clone(), None) {
                Ok(started) => {
                    let reserved = started.reserved().to_string();
                    node = Some(started);
                    json!({ "ok": true, "reserved": reserved })
                }
                Err(_) => json!({ "ok": false }),
            },
            ("restart", Some(running)) => {
                config = changed(&config, step)?;
                match running.restart(config.clone()) {
                    Ok(()) => json!({ "ok": true }),
                    Err(_) => json!({ "ok": false }),
                }
            }
            (_, Some(running)) => self::step(running, op, step, &mut ids)?,
            (_, None) => {
                return Err(Difference::new(format!("step {at}"), &"a node that has booted", &"none"));
            }
        };
        let name = |field: &str| format!("step {at}, {op} {}: {field}", uid(step));
        for (field, got) in got.as_object().into_iter().flatten() {
            differ(&name(field), &step[field], got)?;
        }
        // After a start that failed there is nothing but the file.
        if let (Some(node), true) = (&node, step["def"].is_string()) {
            for (field, got) in sets(node) {
                differ(&name(&field), &step[&field], &got)?;
            }
        }
    }
    let checkpoint = node.map_or(Value::Null, |node| node.checkpoint().into());
    match &record["checkpoint"] {
        Value::Null => Ok(()),
        expected => differ("checkpoint", expected, &checkpoint),
    }
}

/// A field that a record leaves out is empty: `null`, `{}` or `[]`.
fn differ(at: &str, expected: &Value, got: &Value) -> Result<(), Difference> {
    let none = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    if expected == got || none(expected) && none(got) {
        Ok(())
    } else {
        Err(Difference::new(at, expected, got))
    }
}

/// One event, and what came of it in the record's words.
fn step(node: &mut KubeletNode<'_>, op: &str, step: &Value, ids: &mut usize) -> Result<Value, Difference> {
    let missing = |e: truepin::kubelet::replay::NotActive| Difference::new(op, &"an active pod", &e);
    Ok(match op {
        "admit" => admitted(&node.admit(pod(step)?), true),
        "readmit" => admitted(&node.readmit(uid(step)).map_err(missing)?, false),
        "remove" => {
            node.remove(uid(step)).map_err(missing)?;
            json!({})
        }
        "run" => {
            let created = node.run(uid(step), || next(ids)).map_err(missing)?;
            let created: Vec<_> = created.iter().map(|c| json!([c.name, c.id, c.cpus])).collect();
            json!({ "created": created })
        }
        "reconcile" => {
            let done = node.reconcile();
            let named = |list: &[Named]| -> Vec<_> {
                list.iter().map(|n| json!([n.pod, n.container, n.id])).collect()
            };
            let updates: Vec<_> =
                done.updates.iter().map(|(id, cpus)| json!({ "id": id, "cpus": cpus })).collect();
            json!({ "updates": updates, "ok": named(&done.ok), "failed": named(&done.failed) })
        }
        _ => return Err(Difference::unreadable("op", &op)),
    })
}

/// Container ids are counted through a whole trace.
fn next(ids: &mut usize) -> String {
    *ids += 1;
    format!("k{ids}")
}

fn admitted(admission: &Admission, hints: bool) -> Value {
    let reason = admission.outcome.as_ref().err().map(truepin::kubelet::replay::Rejection::reason);
    let mut value = json!({ "ok": admission.outcome.is_ok(), "reason": reason });
    if hints {
        let noted = admission.hints.iter().map(|(name, hint)| (name.clone(), noted(hint)));
        value["hint"] = Value::Object(noted.collect());
    }
    value
}

fn noted(hint: &TopologyHint) -> Value {
    let nodes = hint.affinity.as_ref().map(|nodes| nodes.iter().map(|n| n.0).collect::<Vec<_>>());
    json!([nodes, u8::from(hint.preferred)])
}

fn sets(node: &KubeletNode<'_>) -> Map<String, Value> {
    let sets = node.sets();
    let fields = [("def", json!(sets.default)), ("as", json!(sets.entries)), ("pods", json!(sets.pods))];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Whether the replay of the same events never gives one CPU to two owners, and is equal as long as the recorded one does
/// not. What is let in may differ then, so an event for a pod that is not there is left out, and after a restart every
/// pod is readmitted.
fn safe(record: &Value, machine: &Machine, distances: &Distances) -> Result<(), Difference> {
    let mut config = config(record)?;
    let booted = KubeletNode::boot(&machine.kubelet, distances, config.clone(), None);
    let mut node = booted.map_err(|e| Difference::new("boot", &"a start", &e))?;
    let (mut same, mut ids) = (true, 0);
    for (at, step) in steps(record) {
        let op = step["op"].as_str().unwrap_or_default();
        match op {
            "boot" => {}
            "readmit" if !same => {}
            "restart" => {
                config = changed(&config, step)?;
                if node.restart(config.clone()).is_err() {
                    break;
                }
                let uids: Vec<String> = node.active().iter().map(|p| p.uid.clone()).collect();
                for uid in uids.iter().filter(|_| !same) {
                    node.readmit(uid)
                        .map_err(|e| Difference::new(format!("step {at}"), &"readmitted", &e))?;
                    alone(&node, &format!("step {at}"))?;
                }
            }
            _ if ["admit", "reconcile"].contains(&op) || node.active().iter().any(|p| p.uid == uid(step)) => {
                self::step(&mut node, op, step, &mut ids)?;
            }
            _ => {}
        }
        alone(&node, &format!("step {at}, {op}"))?;
        let equal = sets(&node)
            .iter()
            .try_for_each(|(field, got)| differ(&format!("step {at}, {op}: {field}"), &step[field], got));
        if let (true, Err(difference)) = (same, equal) {
            if shared_by_pods(&step["as"]).map_err(|why| Difference::unreadable("as", &why))?.is_empty() {
                return Err(difference);
            }
            same = false;
        }
    }
    Ok(())
}

/// CPUs that are in the sets of two pods of a record.
fn shared_by_pods(entries: &Value) -> Result<CpuSet, String> {
    let (mut all, mut twice) = (CpuSet::new(), CpuSet::new());
    for containers in entries.as_object().into_iter().flatten().map(|(_, containers)| containers) {
        let mut pod = CpuSet::new();
        for list in containers.as_object().into_iter().flatten().filter_map(|(_, list)| list.as_str()) {
            pod |= &list.parse().map_err(|e| format!("{list:?}: {e}"))?;
        }
        twice |= &all.intersection(&pod);
        all |= &pod;
    }
    Ok(twice)
}

/// No CPU of one pod is another's or in the shared pool, none of a container that lasts is another's that lasts.
fn alone(node: &KubeletNode<'_>, at: &str) -> Result<(), Difference> {
    let free = |taken: &CpuSet, cpus: &CpuSet, who: &str| {
        let both = taken.intersection(cpus);
        let got = format!("{who} has {both}, which another has");
        if both.is_empty() { Ok(()) } else { Err(Difference::new(at, &"no CPU with two owners", &got)) }
    };
    let sets = node.sets();
    let mut taken = sets.default.clone();
    for (uid, containers) in &sets.entries {
        let (mut all, mut lasting) = (CpuSet::new(), CpuSet::new());
        let pod = node.active().iter().find(|p| p.uid == *uid);
        for (name, cpus) in containers {
            let init = pod.is_none_or(|p| p.init.iter().any(|c| c.name == *name && !c.sidecar));
            if !init && !sets.pods.contains_key(uid) {
                free(&lasting, cpus, &format!("{uid}/{name}"))?;
                lasting |= cpus;
            }
            all |= cpus;
        }
        free(&taken, &all, uid)?;
        taken |= &all;
    }
    Ok(())
}
