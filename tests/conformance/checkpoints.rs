//! Recorded checkpoints: what the kubelet made of each, against `truepin.import/1` of the same bytes.
//!
//! Compared are both steps of its start, the state that it restored, the text that it hashed, and the file that it wrote
//! next, which is what an export writes.

use crate::{Mismatch, Tally, machines::online_of, records};
use serde_json::{Value, json};
use std::path::Path;
use truepin::{
    CpuSet,
    kubelet::{self, Exported, Input, Setup, State},
};

/// Compares every record of `checkpoints.jsonl`.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let topologies = records(&folder.join("topologies.jsonl"))?;
    let mut tally = Tally::default();
    for record in records(&folder.join("checkpoints.jsonl"))? {
        let id =
            format!("{} {}", record["id"].as_str().unwrap_or("?"), record["name"].as_str().unwrap_or(""));
        let compared = match record["kind"].as_str() {
            Some("memory") => memory(&record),
            _ => cpu(&record, &topologies),
        };
        let differences = compared.unwrap_or_else(|why| vec![("record".into(), "readable".into(), why)]);
        if differences.is_empty() {
            tally.passed += 1;
            continue;
        }
        tally.failed += 1;
        tally.mismatches.extend(differences.into_iter().map(|(what, expected, got)| Mismatch {
            id: format!("{id}: {what}"),
            expected,
            got,
        }));
    }
    Ok(tally)
}

/// What, expected, got.
type Differences = Vec<(String, String, String)>;

fn differ(list: &mut Differences, what: &str, expected: &Value, got: &Value) {
    if expected != got {
        list.push((what.into(), expected.to_string(), got.to_string()));
    }
}

fn answer(ok: &Value) -> Value {
    if ok == true { "ok".into() } else { "err".into() }
}

fn containers(record: &Value) -> Result<kubelet::Containers, String> {
    match &record["containers"] {
        Value::Null => Ok(kubelet::Containers::new()),
        list => kubelet::parse_containers(&list.to_string()).map_err(|e| e.to_string()),
    }
}

fn set(value: &Value) -> Result<CpuSet, String> {
    value.as_str().unwrap_or_default().parse().map_err(|e| format!("{value}: {e}"))
}

fn memory(record: &Value) -> Result<Differences, String> {
    let containers = containers(record)?;
    let input = Input {
        memory: record["file"].as_str().map(str::as_bytes),
        memory_policy: record["policy"].as_str(),
        ..input(record, &containers)
    };
    let document = serde_json::to_value(kubelet::judge(&input).document).map_err(|e| e.to_string())?;
    let mut list = Differences::new();
    differ(&mut list, "load", &answer(&record["ok"]), &document["kubelet"]["load"]);
    preimage(record, &mut list);
    Ok(list)
}

fn input<'a>(record: &'a Value, containers: &'a kubelet::Containers) -> Input<'a> {
    Input {
        dir: "/var/lib/kubelet",
        cpu: None,
        memory: None,
        policy: None,
        memory_policy: None,
        pod_level: record["pod_level_gate"] == true,
        containers,
        online: None,
        nodes: None,
        reserved: None,
        strict: false,
    }
}

fn cpu(record: &Value, topologies: &[Value]) -> Result<Differences, String> {
    let containers = containers(record)?;
    let file = record["file"].as_str().map(str::as_bytes);
    let mut input = Input { cpu: file, policy: record["policy"].as_str(), ..input(record, &containers) };
    let recorded = &record["start"];
    let (online, reserved);
    if recorded.is_object() {
        online = online_of(topologies, &recorded["t"])?;
        reserved = set(&recorded["reserved"])?;
        (input.online, input.reserved) = (Some(&online), Some(&reserved));
        let mut options = recorded["opt"].as_array().into_iter().flatten();
        input.strict = options.any(|o| o == "strict-cpu-reservation");
    }
    let judgement = kubelet::judge(&input);
    let document = serde_json::to_value(&judgement.document).map_err(|e| e.to_string())?;
    let verdict = &document["kubelet"];
    let mut list = Differences::new();
    differ(&mut list, "load", &answer(&record["ok"]), &verdict["load"]);
    if record["ok"] == true {
        differ(&mut list, "def", &record["def"], &verdict["def"]);
        differ(&mut list, "as", &record["as"], &verdict["as"]);
        let pods = if record["pods"].is_null() { json!({}) } else { record["pods"].clone() };
        differ(&mut list, "pods", &pods, &verdict["pods"]);
    }
    if recorded.is_object() {
        differ(&mut list, "start", &answer(&recorded["ok"]), &verdict["start"]);
        if recorded["ok"] == true {
            differ(&mut list, "start def", &recorded["def"], &verdict["def_started"]);
        }
    }
    preimage(record, &mut list);
    if let Some(next) = record["file_after_next_store"].as_str() {
        let got = stored(&input).map_err(|e| format!("no state to store: {e}"))?;
        differ(&mut list, "file after the next store", &next.into(), &got.into());
    }
    Ok(list)
}

/// The file that the kubelet writes next: the state it started with.
fn stored(input: &Input<'_>) -> Result<String, String> {
    let policy = input.policy.unwrap_or_default();
    let setup = Setup { policy, pod_level: input.pod_level, containers: input.containers };
    let mut state: State = kubelet::load(input.cpu, setup).map_err(|e| e.to_string())?;
    if let (Some(online), Some(reserved)) = (input.online, input.reserved) {
        let machine =
            kubelet::Machine { online: online.into(), reserved: reserved.into(), strict: input.strict };
        state = kubelet::start(&state, setup, &machine).map_err(|e| e.to_string())?;
    }
    Ok(kubelet::export(&state, policy, if input.pod_level { Exported::V3 } else { Exported::V2 }))
}

/// The hashed text is that of some version; 1.37's second text is that of `data`.
fn preimage(record: &Value, list: &mut Differences) {
    let (Some(file), Some(text)) = (record["file"].as_str(), record["checksum_preimage"].as_str()) else {
        return;
    };
    let outer = text.split_once("\n(string)").map_or(text, |(outer, _)| outer);
    let ours = kubelet::preimages(file.as_bytes());
    if !ours.iter().any(|(_, dump)| dump == outer) {
        list.push(("hashed text".into(), outer.into(), format!("{ours:?}")));
    }
}
