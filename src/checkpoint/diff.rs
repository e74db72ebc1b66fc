//! What differs between two records, value by value.

use super::Checkpoint;
use serde::Serialize;
use serde_json::Value;

/// One difference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Keys from the outside in.
    pub path: Vec<String>,
    /// The value in the first record, if it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    /// The value in the second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
}

/// From `a` to `b`, in the order of the keys. A key that only one of them has is one change, with all below it.
pub fn diff(a: &Checkpoint, b: &Checkpoint) -> Result<Vec<Change>, serde_json::Error> {
    let (a, b) = (serde_json::to_value(a)?, serde_json::to_value(b)?);
    let mut changes = Vec::new();
    walk(&mut Vec::new(), Some(&a), Some(&b), &mut changes);
    Ok(changes)
}

fn walk(path: &mut Vec<String>, a: Option<&Value>, b: Option<&Value>, out: &mut Vec<Change>) {
    if a == b {
        return;
    }
    if let (Some(Value::Object(x)), Some(Value::Object(y))) = (a, b) {
        let keys: std::collections::BTreeSet<&String> = x.keys().chain(y.keys()).collect();
        for key in keys {
            path.push(key.clone());
            walk(path, x.get(key), y.get(key), out);
            path.pop();
        }
        return;
    }
    out.push(Change { path: path.clone(), from: a.cloned(), to: b.cloned() });
}
