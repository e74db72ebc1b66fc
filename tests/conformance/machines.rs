//! Machines of `topologies.jsonl`, by name.

use serde_json::Value;
use truepin::CpuSet;

/// The online CPUs of the machine that a record names.
pub(crate) fn online_of(topologies: &[Value], name: &Value) -> Result<CpuSet, String> {
    let machine = topologies.iter().find(|t| t["t"] == *name).ok_or_else(|| format!("no machine {name}"))?;
    let cpus = machine["cpu"].as_str().ok_or_else(|| format!("machine {name} has no field cpu"))?;
    cpus.parse().map_err(|e| format!("machine {name}: {e}"))
}
