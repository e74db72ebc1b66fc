//! Recorded merges of the kubelet's topology manager.

use crate::{Tally, hints::mask, records};
use serde_json::{Value, json};
use std::path::Path;
use truepin::{
    NodeId, NodeSet,
    hints::{Distances, Opinion, TopologyHint, merge},
    request::AlignmentPolicy,
};

/// Compares every record `merge` of `hints.jsonl`.
pub(crate) fn compare(folder: &Path) -> Result<Tally, String> {
    let mut tally = Tally::default();
    for record in records(&folder.join("hints.jsonl"))?.iter().filter(|r| r["op"] == "merge") {
        tally.compare(record["id"].as_str().unwrap_or("?").to_owned(), &record["exp"], merged(record));
    }
    Ok(tally)
}

fn merged(record: &Value) -> Result<Value, String> {
    let policy =
        serde_json::from_value::<AlignmentPolicy>(record["policy"].clone()).map_err(|e| e.to_string())?;
    let ids = record["nodes"].as_array().ok_or("no nodes")?.iter().map(number);
    let nodes: NodeSet = ids.map(|id| id.map(NodeId)).collect::<Result<_, _>>()?;
    let distances = (record["closest"] == true).then(|| distances(&record["dist"])).transpose()?;
    let mut opinions = Vec::new();
    for provider in record["prov"].as_array().ok_or("no providers")? {
        match provider.as_object().filter(|resources| !resources.is_empty()) {
            None => opinions.push(Opinion::Any),
            Some(resources) => {
                for hints in resources.values() {
                    opinions.push(opinion(hints)?);
                }
            }
        }
    }
    let got = merge(policy, &nodes, &opinions, distances.as_ref());
    Ok(json!([got.affinity.as_ref().map(mask), u8::from(got.preferred), got.admit]))
}

fn number(value: &Value) -> Result<u32, String> {
    value.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| format!("{value} is no number"))
}

fn opinion(hints: &Value) -> Result<Opinion, String> {
    let Some(list) = hints.as_array() else { return Ok(Opinion::Any) };
    if list.is_empty() {
        return Ok(Opinion::Impossible);
    }
    let hint = |pair: &Value| {
        let affinity = match &pair[0] {
            Value::Null => None,
            mask => {
                let mask = mask.as_u64().ok_or_else(|| format!("{mask} is no mask"))?;
                Some((0..64).filter(|bit| mask >> bit & 1 == 1).map(NodeId).collect())
            }
        };
        Ok(TopologyHint { affinity, preferred: pair[1] == 1 })
    };
    list.iter().map(hint).collect::<Result<_, String>>().map(Opinion::Hints)
}

fn distances(dist: &Value) -> Result<Distances, String> {
    let rows = dist.as_object().ok_or("no distances")?.iter().map(|(node, row)| {
        let node = node.parse().map_err(|e| format!("node {node}: {e}"))?;
        let row = row.as_array().ok_or("a row of distances is no list")?;
        Ok((NodeId(node), row.iter().map(number).collect::<Result<Vec<_>, _>>()?))
    });
    Ok(Distances::new(rows.collect::<Result<Vec<_>, String>>()?))
}
