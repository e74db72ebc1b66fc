//! Checksums and bytes as the kubelet makes them.
//!
//! Problem: the checksum is FNV-1a (32 bits) over `dump.ForHash` of the checkpoint: go-spew's `%#v` on one line with
//! sorted keys and no addresses. It must come out equal to the byte for files of every age, nil and empty apart, and
//! with spew's one slip (see [`Dump::value`], pointers).
//! Steps: [`preimage`] prints a value by its frozen layout, [`checksum`] hashes it; [`encode`] writes the JSON that
//! `encoding/json` would.
//! Invariant: only names in [`super::layout`] reach a checksum.

use super::layout::{Key, Layout, Type, Value};
use std::collections::BTreeMap;
use std::fmt::Write;

/// FNV-1a, 32 bits (`hash/fnv.New32a`).
pub(super) fn fnv1a(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// What is hashed for a checkpoint: its dump under `name`, with the checksum itself as 0.
pub(super) fn preimage(layout: &'static Layout, name: &str, value: &Value) -> String {
    let mut value = value.clone();
    if let Some(checksum) = value.field_mut(layout, "Checksum") {
        *checksum = Value::Uint(0);
    }
    let mut dump = Dump { out: format!("(*{name})"), hide_type: true };
    dump.value(&Type::Struct(layout), &value);
    dump.out
}

/// The checksum of a checkpoint under `name`.
pub(super) fn checksum(layout: &'static Layout, name: &str, value: &Value) -> u32 {
    fnv1a(&preimage(layout, name, value))
}

/// The checksum that 1.37 keeps over the text `data`: that of a Go string.
pub(super) fn data_checksum(data: &str) -> u32 {
    fnv1a(&format!("(string){data}"))
}

/// spew's state while it prints.
struct Dump {
    out: String,
    /// `ignoreNextType`: set before elements of maps and lists, whose type is in that of the whole.
    hide_type: bool,
}

impl Dump {
    /// A type in brackets, unless it was to be hidden.
    fn typed(&mut self, name: &str) {
        if !std::mem::take(&mut self.hide_type) {
            self.put(format_args!("({name})"));
        }
    }

    fn put(&mut self, args: std::fmt::Arguments<'_>) {
        let written = self.out.write_fmt(args);
        debug_assert!(written.is_ok(), "writing to a String");
    }

    fn value(&mut self, ty: &Type, value: &Value) {
        match (ty, value) {
            (Type::Pointer(inner), Value::Pointer(value)) => self.pointer(inner, value.as_deref()),
            (Type::Text(name), Value::Text(text)) => {
                self.typed(name);
                self.out.push_str(text);
            }
            (Type::Uint(name), Value::Uint(n)) => {
                self.typed(name);
                self.put(format_args!("{n}"));
            }
            (Type::Int(name), Value::Int(n)) => {
                self.typed(name);
                self.put(format_args!("{n}"));
            }
            (Type::List(name, inner), Value::List(items)) => {
                self.typed(name);
                let Some(items) = items else { return self.out.push_str("<nil>") };
                self.out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i);
                    self.hide_type = true;
                    self.value(inner, item);
                }
                self.out.push(']');
            }
            (Type::Map(name, _, inner), Value::Map(map)) => {
                self.typed(name);
                self.map(inner, map.as_ref());
            }
            (Type::Struct(layout), Value::Struct(values)) => {
                self.typed(layout.name);
                self.out.push('{');
                for (i, (field, value)) in layout.fields.iter().zip(values).enumerate() {
                    self.separate(i);
                    self.put(format_args!("{}:", field.name));
                    self.value(&field.ty, value);
                }
                self.out.push('}');
            }
            (Type::PodCpus, Value::Cpus(cpus)) => {
                self.typed("state.PodEntry");
                self.out.push_str("{CPUSet:(cpuset.CPUSet){elems:(map[int]struct {})map[");
                for (i, cpu) in cpus.iter().enumerate() {
                    self.separate(i);
                    self.put(format_args!("{cpu}:{{}}"));
                }
                self.out.push_str("]}}");
            }
            _ => debug_assert!(false, "values are made by their type"),
        }
    }

    fn map(&mut self, inner: &Type, map: Option<&BTreeMap<Key, Value>>) {
        let Some(map) = map else { return self.out.push_str("<nil>") };
        self.out.push_str("map[");
        for (i, (key, value)) in map.iter().enumerate() {
            self.separate(i);
            match key {
                Key::Text(text) => self.out.push_str(text),
                Key::Int(n) => self.put(format_args!("{n}")),
            }
            self.out.push(':');
            self.hide_type = true;
            self.value(inner, value);
        }
        self.out.push(']');
    }

    /// All pointers here are members of maps, so their type is hidden: `<*>` and the value. The slip: for nil, spew
    /// returns before it resets the flag, and if it was the last member, the next field loses its type.
    fn pointer(&mut self, inner: &Type, value: Option<&Value>) {
        let Some(value) = value else { return self.out.push_str("<nil>") };
        self.out.push_str("<*>");
        self.hide_type = true;
        self.value(inner, value);
    }

    fn separate(&mut self, i: usize) {
        if i > 0 {
            self.out.push(' ');
        }
    }
}

/// The JSON that Go's `json.Marshal` writes.
pub(super) fn encode(ty: &Type, value: &Value) -> String {
    let mut out = String::new();
    write_json(&mut out, ty, value);
    out
}

fn write_json(out: &mut String, ty: &Type, value: &Value) {
    match (ty, value) {
        (Type::Pointer(inner), Value::Pointer(Some(value))) => write_json(out, inner, value),
        (_, Value::Text(text)) => write_string(out, text),
        (_, Value::Uint(n)) => out.push_str(&n.to_string()),
        (_, Value::Int(n)) => out.push_str(&n.to_string()),
        (Type::List(_, inner), Value::List(Some(items))) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                comma(out, i);
                write_json(out, inner, item);
            }
            out.push(']');
        }
        (Type::Map(_, _, inner), Value::Map(Some(map))) => {
            // By the keys' text: node 10 before node 2.
            let text = |key: &Key| match key {
                Key::Text(text) => text.clone(),
                Key::Int(n) => n.to_string(),
            };
            let by_text: BTreeMap<String, &Value> = map.iter().map(|(k, v)| (text(k), v)).collect();
            out.push('{');
            for (i, (key, value)) in by_text.into_iter().enumerate() {
                comma(out, i);
                write_string(out, &key);
                out.push(':');
                write_json(out, inner, value);
            }
            out.push('}');
        }
        (Type::Struct(layout), Value::Struct(values)) => {
            let written = layout.fields.iter().zip(values).filter(|(f, v)| !(f.omit_empty && is_empty(v)));
            out.push('{');
            for (i, (field, value)) in written.enumerate() {
                comma(out, i);
                write_string(out, field.key);
                out.push(':');
                write_json(out, &field.ty, value);
            }
            out.push('}');
        }
        (_, Value::Cpus(cpus)) if cpus.is_empty() => out.push_str("{}"),
        (_, Value::Cpus(cpus)) => {
            let _ = write!(out, "{{\"cpuSet\":\"{cpus}\"}}");
        }
        // Nil lists, maps and pointers.
        _ => out.push_str("null"),
    }
}

/// What `omitempty` leaves out; of the types here only texts, lists and maps have it.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Text(text) => text.is_empty(),
        Value::List(items) => items.as_ref().is_none_or(Vec::is_empty),
        Value::Map(map) => map.as_ref().is_none_or(BTreeMap::is_empty),
        _ => false,
    }
}

fn comma(out: &mut String, i: usize) {
    if i > 0 {
        out.push(',');
    }
}

/// As `encoding/json` with its default escaping for HTML.
fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::super::layout::{CPU_NAME, CPU_V2, MEMORY_NAME, MEMORY_V1};
    use super::*;

    #[test]
    fn nil_and_empty_have_different_checksums() {
        let empty = Value::fresh(&CPU_V2);
        let dump = preimage(&CPU_V2, CPU_NAME, &empty);
        assert!(
            dump.ends_with(" Entries:(map[string]map[string]string)map[] Checksum:(checksum.Checksum)0}")
        );
        let mut nil = empty.clone();
        *nil.field_mut(&CPU_V2, "Entries").unwrap() = Value::Map(None);
        let dump = preimage(&CPU_V2, CPU_NAME, &nil);
        assert!(
            dump.ends_with(" Entries:(map[string]map[string]string)<nil> Checksum:(checksum.Checksum)0}"),
            "{dump}"
        );
    }

    #[test]
    fn a_nil_pointer_takes_the_type_of_the_next_field() {
        let mut value = Value::fresh(&MEMORY_V1);
        let nil = BTreeMap::from([(Key::Int(0), Value::Pointer(None))]);
        *value.field_mut(&MEMORY_V1, "MachineState").unwrap() = Value::Map(Some(nil));
        let dump = preimage(&MEMORY_V1, MEMORY_NAME, &value);
        assert!(dump.contains("(state.NUMANodeMap)map[0:<nil>] Entries:map[] Checksum:"), "{dump}");
    }

    #[test]
    fn strings_as_go_writes_them() {
        let mut out = String::new();
        write_string(&mut out, "a<b>&\"\\\n\u{1}\u{2028}é");
        assert_eq!(out, r#""a\u003cb\u003e\u0026\"\\\n\u0001\u2028é""#);
    }
}
