//! Recorded hints of the kubelet's CPU manager, in list form.

use crate::{Mismatch, Tally, machines::machines, records};
use serde_json::{Value, json};
use std::path::Path;
use truepin::{
    CpuSet, NodeSet,
    hints::{TopologyHint, cpu_hints},
    placement::kubelet::StaticOptions,
};

/// Compares every record `hints` of `hints.jsonl`.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let machines = machines(&records(&folder.join("topologies.jsonl"))?)?;
    let mut tally = Tally::default();
    for record in records(&folder.join("hints.jsonl"))?.iter().filter(|r| r["op"] == "hints") {
        let id = record["id"].as_str().unwrap_or("?").to_owned();
        let hints = || {
            let name = record["t"].as_str().unwrap_or_default();
            let machine = machines.get(name).ok_or_else(|| format!("no machine {name:?}"))?;
            let names: Vec<&str> =
                record["opt"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let options = StaticOptions::parse(names).map_err(|e| e.to_string())?;
            let n = record["n"].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or("no n")?;
            let (available, reusable) = (cpus(&record["avail"])?, cpus(&record["reusable"])?);
            let list = cpu_hints(&machine.kubelet, options.align_by_socket, &available, &reusable, n);
            Ok::<Value, String>(list.iter().map(pair).collect())
        };
        tally.compare(id, &record["exp"], hints());
    }
    Ok(tally)
}

impl Tally {
    /// Counts a record whose answer is one value.
    pub(crate) fn compare(&mut self, id: String, expected: &Value, got: Result<Value, String>) {
        let got = got.unwrap_or_else(|why| Value::String(format!("error: {why}")));
        if got == *expected {
            self.passed += 1;
        } else {
            self.failed += 1;
            self.mismatches.push(Mismatch { id, expected: expected.to_string(), got: got.to_string() });
        }
    }
}

fn cpus(value: &Value) -> Result<CpuSet, String> {
    value.as_str().unwrap_or_default().parse().map_err(|e| format!("{value}: {e}"))
}

fn pair(hint: &TopologyHint) -> Value {
    json!([hint.affinity.as_ref().map(mask), u8::from(hint.preferred)])
}

/// Bit k is node k.
pub(crate) fn mask(nodes: &NodeSet) -> u64 {
    nodes.iter().fold(0, |bits, node| bits | 1 << node.0)
}
