//! JSON as Go's `encoding/json` (version 1 of it) reads it into a struct.
//!
//! Problem: whether the kubelet takes a file depends on that reader's habits: keys match without regard to case, the
//! last of two equal keys wins but two equal maps are merged, `null` changes nothing, a value of the wrong type is
//! remembered as an error while reading goes on, and bytes that are no UTF-8 become U+FFFD.
//! Steps: [`check`] walks the whole text first (Go does so too: nothing is read from a text that is not JSON);
//! [`decode`] then fills a value by its layout and notes on the way what a writer of checkpoints would
//! never write ([`Oddity`]).
//! Invariants: no panic and no deep recursion on any bytes; recursion only as deep as the layout.
//!
//! Left out: the value that a third duplicate of one list inside a struct may inherit from the first (Go re-uses the
//! backing array past its length).

use super::layout::{Field, Key, Keys, Layout, POD_ENTRY, Type, Value};
use super::ranges::CpuRanges;
use super::syntax::{JsonError, check, check_scalar, check_string, skip_space, unquote};
use std::collections::{BTreeMap, BTreeSet};

/// Something that the kubelet reads and never writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Oddity {
    /// Where, dotted, as spelled in the file.
    pub(super) key: String,
    pub(super) kind: OddityKind,
}

/// What is odd about a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OddityKind {
    /// Differs in case from the field's key.
    Case(&'static str),
    /// Was there before.
    Duplicate,
    /// No field has it.
    Unknown,
    /// Holds `null`.
    Null,
}

/// What came of reading.
#[derive(Debug)]
pub(super) struct Decoded {
    /// The first error, or the one that ended the reading. The value may be filled all the same: so it is in Go.
    pub(super) result: Result<(), JsonError>,
    pub(super) oddities: Vec<Oddity>,
    /// Keys of the outermost struct that were there, as its fields spell them.
    pub(super) present: BTreeSet<&'static str>,
}

/// Reads bytes into a value of this layout, as `json.Unmarshal` does.
pub(super) fn decode(bytes: &[u8], layout: &'static Layout, value: &mut Value) -> Decoded {
    let mut reader = Reader {
        bytes,
        at: 0,
        path: Vec::new(),
        saved: None,
        oddities: Vec::new(),
        present: BTreeSet::new(),
    };
    let result = check(bytes).and_then(|()| reader.value(&Type::Struct(layout), value));
    let result = result.and_then(|()| reader.saved.take().map_or(Ok(()), Err));
    Decoded { result, oddities: reader.oddities, present: reader.present }
}

/// Walks a text that [`check`] has passed, so every `get` finds what grammar promises.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: Vec<String>,
    saved: Option<JsonError>,
    oddities: Vec<Oddity>,
    present: BTreeSet<&'static str>,
}

/// The name of a type in a message.
fn type_name(ty: &Type) -> &'static str {
    match ty {
        Type::Text(name) | Type::Uint(name) | Type::Int(name) | Type::List(name, _) | Type::Map(name, ..) => {
            name
        }
        Type::Pointer(inner) => type_name(inner),
        Type::Struct(layout) => layout.name,
        Type::PodCpus => "state.PodEntry",
    }
}

impl<'a> Reader<'a> {
    fn peek(&self) -> u8 {
        self.bytes.get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        self.at = skip_space(self.bytes, self.at);
    }

    /// Takes the byte if it is next.
    fn take(&mut self, byte: u8) -> bool {
        self.space();
        let there = self.peek() == byte && self.at < self.bytes.len();
        if there {
            self.at += 1;
        }
        there
    }

    fn key(&self) -> String {
        self.path.join(".")
    }

    fn odd(&mut self, kind: OddityKind) {
        let key = self.key();
        self.oddities.push(Oddity { key, kind });
    }

    /// `saveError`: the first one counts, reading goes on.
    fn mistyped(&mut self, found: String, ty: &Type) {
        if self.saved.is_none() {
            self.saved = Some(JsonError::Type { key: self.key(), found, expected: type_name(ty) });
        }
    }

    /// The bytes of the value that starts here, which is passed over.
    fn skip(&mut self) -> &'a [u8] {
        self.space();
        let start = self.at;
        let mut depth = 0_usize;
        loop {
            match self.peek() {
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    self.at += 1;
                }
                b',' | b':' => self.at += 1,
                _ => match check_scalar(self.bytes, self.at) {
                    Ok(end) => self.at = end,
                    Err(_) => self.at = self.bytes.len(),
                },
            }
            if depth == 0 || self.at >= self.bytes.len() {
                return self.bytes.get(start..self.at).unwrap_or_default();
            }
            self.space();
        }
    }

    fn value(&mut self, ty: &Type, value: &mut Value) -> Result<(), JsonError> {
        self.space();
        if self.peek() == b'n' {
            self.odd(OddityKind::Null);
        }
        if let Type::PodCpus = ty {
            return self.pod_cpus(value);
        }
        if let (Type::Pointer(inner), Value::Pointer(target)) = (ty, &mut *value) {
            if self.peek() == b'n' {
                self.skip();
                *target = None;
                return Ok(());
            }
            // Made before the value is looked at: one of the wrong type leaves a zero behind.
            return self.value(inner, target.get_or_insert_with(|| Box::new(Value::zero(inner))));
        }
        match self.peek() {
            b'{' => self.object(ty, value),
            b'[' => self.list(ty, value),
            b'"' => {
                let text = self.string();
                match value {
                    Value::Text(target) => *target = text,
                    _ => self.mistyped("a string".into(), ty),
                }
                Ok(())
            }
            b'n' => {
                self.skip();
                match value {
                    Value::Map(target) => *target = None,
                    Value::List(target) => *target = None,
                    _ => {}
                }
                Ok(())
            }
            b't' | b'f' => {
                self.skip();
                self.mistyped("a boolean".into(), ty);
                Ok(())
            }
            _ => {
                let text = String::from_utf8_lossy(self.skip()).into_owned();
                // `strconv.ParseUint` takes no sign, `ParseInt` does; neither takes a point or an exponent.
                match value {
                    Value::Uint(target) => match text.parse() {
                        Ok(n) => *target = n,
                        Err(_) => self.mistyped(format!("the number {text}"), ty),
                    },
                    Value::Int(target) => match text.parse() {
                        Ok(n) => *target = n,
                        Err(_) => self.mistyped(format!("the number {text}"), ty),
                    },
                    _ => self.mistyped(format!("the number {text}"), ty),
                }
                Ok(())
            }
        }
    }

    /// `PodEntry.UnmarshalJSON`: a reading of its own, whose errors end the reading of the whole.
    fn pod_cpus(&mut self, value: &mut Value) -> Result<(), JsonError> {
        let raw = self.skip();
        let mut entry = Value::fresh(&POD_ENTRY);
        let decoded = decode(raw, &POD_ENTRY, &mut entry);
        let prefix = self.key();
        let under = |key: &str| if key.is_empty() { prefix.clone() } else { format!("{prefix}.{key}") };
        // `null` was noted by the caller.
        let inner = decoded.oddities.into_iter().filter(|o| !o.key.is_empty());
        self.oddities.extend(inner.map(|o| Oddity { key: under(&o.key), kind: o.kind }));
        decoded.result.map_err(|error| match error {
            JsonError::Type { key, found, expected } => JsonError::Type { key: under(&key), found, expected },
            other => other,
        })?;
        let text = entry.text(&POD_ENTRY, "CPUSet");
        let refuse = |source| JsonError::PodCpus { key: under("cpuSet"), value: text.into(), source };
        *value = Value::Cpus(CpuRanges::parse(text).map_err(refuse)?);
        Ok(())
    }

    fn list(&mut self, ty: &Type, value: &mut Value) -> Result<(), JsonError> {
        let (Type::List(_, inner), Value::List(target)) = (ty, &mut *value) else {
            self.skip();
            self.mistyped("an array".into(), ty);
            return Ok(());
        };
        // A duplicate reads over the elements of the first.
        let mut items = target.take().unwrap_or_default();
        self.at += 1;
        let mut count = 0;
        while !self.take(b']') {
            if count > 0 {
                self.take(b',');
            }
            if count >= items.len() {
                items.push(Value::zero(inner));
            }
            let Some(item) = items.get_mut(count) else { break };
            self.path.push(count.to_string());
            let result = self.value(inner, item);
            self.path.pop();
            count += 1;
            if let Err(error) = result {
                *target = Some(items);
                return Err(error);
            }
        }
        items.truncate(count);
        *target = Some(items);
        Ok(())
    }

    fn object(&mut self, ty: &Type, value: &mut Value) -> Result<(), JsonError> {
        let outermost = self.at == skip_space(self.bytes, 0);
        match (ty, &mut *value) {
            (Type::Map(_, keys, inner), Value::Map(map)) => {
                let map = map.get_or_insert_with(BTreeMap::new);
                self.members(str::to_owned, |reader, key| {
                    let mut element = Value::zero(inner);
                    reader.value(inner, &mut element)?;
                    let key = match keys {
                        Keys::Text => Some(Key::Text(key)),
                        Keys::Int => key.parse().ok().map(Key::Int),
                    };
                    match key {
                        Some(key) => {
                            map.insert(key, element);
                        }
                        None => reader.mistyped("a key that is no number".into(), ty),
                    }
                    Ok(())
                })
            }
            (Type::Struct(layout), Value::Struct(values)) => self.members(fold, |reader, key| {
                let exact = layout.fields.iter().position(|f| f.key == key);
                let found = exact.or_else(|| layout.fields.iter().position(|f| fold(f.key) == fold(&key)));
                let known = found.and_then(|i| layout.fields.get(i).zip(values.get_mut(i)));
                let Some((Field { key: spelled, ty, .. }, target)) = known else {
                    reader.odd(OddityKind::Unknown);
                    reader.skip();
                    return Ok(());
                };
                if exact.is_none() {
                    reader.odd(OddityKind::Case(spelled));
                }
                if outermost {
                    reader.present.insert(spelled);
                }
                reader.value(ty, target)
            }),
            _ => {
                self.skip();
                self.mistyped("an object".into(), ty);
                Ok(())
            }
        }
    }

    /// Each member of an object: its key in the path, its value where the reader stands. Keys of one `identity` are
    /// the same key.
    fn members(
        &mut self,
        identity: fn(&str) -> String,
        mut member: impl FnMut(&mut Self, String) -> Result<(), JsonError>,
    ) -> Result<(), JsonError> {
        self.at += 1;
        let mut seen = BTreeSet::new();
        let mut first = true;
        while !self.take(b'}') && self.at < self.bytes.len() {
            if !first {
                self.take(b',');
            }
            first = false;
            self.space();
            let key = self.string();
            self.take(b':');
            self.path.push(key.clone());
            if !seen.insert(identity(&key)) {
                self.odd(OddityKind::Duplicate);
            }
            let result = member(self, key);
            self.path.pop();
            result?;
        }
        Ok(())
    }

    /// `unquote`: escapes resolved, lone surrogates and bytes that are no UTF-8 replaced one by one.
    fn string(&mut self) -> String {
        let end = check_string(self.bytes, self.at).unwrap_or(self.bytes.len());
        let raw = self.bytes.get(self.at + 1..end.saturating_sub(1)).unwrap_or_default();
        self.at = end;
        unquote(raw)
    }
}

/// `foldName`: keys that differ in case alone are equal. Beside ASCII two letters fold into it: the long s and the
/// Kelvin sign.
fn fold(key: &str) -> String {
    let folded = |c| match c {
        '\u{17f}' => 'S',
        '\u{212a}' => 'K',
        c => c.to_ascii_uppercase(),
    };
    key.chars().map(folded).collect()
}

#[cfg(test)]
mod tests {
    use super::super::layout::{CPU_V1, CPU_V2, CPU_V3};
    use super::*;

    fn read(text: &[u8], layout: &'static Layout) -> (Value, Decoded) {
        let mut value = Value::fresh(layout);
        let decoded = decode(text, layout, &mut value);
        (value, decoded)
    }

    fn kinds(decoded: &Decoded) -> Vec<(&str, OddityKind)> {
        decoded.oddities.iter().map(|o| (o.key.as_str(), o.kind)).collect()
    }

    #[test]
    fn keys_match_without_case_and_the_last_wins() {
        let text =
            b"{\"POLICYNAME\":\"a\",\"policyName\":\"b\",\"chec\xe2\x84\xaasum\":7,\"x\":{\"checksum\":1}}";
        let (value, decoded) = read(text, &CPU_V2);
        assert_eq!(decoded.result, Ok(()));
        assert_eq!((value.text(&CPU_V2, "PolicyName"), value.uint(&CPU_V2, "Checksum")), ("b", 7));
        assert_eq!(
            kinds(&decoded),
            [
                ("POLICYNAME", OddityKind::Case("policyName")),
                ("policyName", OddityKind::Duplicate),
                ("chec\u{212a}sum", OddityKind::Case("checksum")),
                ("x", OddityKind::Unknown)
            ]
        );
        assert_eq!(decoded.present, BTreeSet::from(["checksum", "policyName"]));
    }

    #[test]
    fn two_maps_are_merged_and_inner_ones_replaced() {
        let text = br#"{"entries":{"p":{"a":"1"},"q":{"a":"2"}},"entries":{"p":{"b":"3"}}}"#;
        let (value, _) = read(text, &CPU_V2);
        let pods = value.map(&CPU_V2, "Entries");
        let names: Vec<_> = pods.iter().map(|(p, c)| (*p, c.members()[0].0)).collect();
        assert_eq!(names, [("p", "b"), ("q", "a")]);
    }

    #[test]
    fn a_wrong_type_is_an_error_and_reading_goes_on() {
        let text = br#"{"entries":{"c":"1-2"},"policyName":7,"defaultCpuSet":"0","checksum":1.0}"#;
        let (value, decoded) = read(text, &CPU_V2);
        assert!(
            matches!(&decoded.result, Err(JsonError::Type { key, .. }) if key == "entries.c"),
            "{decoded:?}"
        );
        assert_eq!(value.text(&CPU_V2, "DefaultCPUSet"), "0");
        assert_eq!(value.map(&CPU_V2, "Entries").len(), 1);
        let (_, decoded) = read(text, &CPU_V1);
        assert!(matches!(&decoded.result, Err(JsonError::Type { key, .. }) if key == "policyName"));
        for number in ["-1", "1e3", "18446744073709551616", "1.0", "true", "\"1\"", "[]", "{}"] {
            let (_, decoded) = read(format!("{{\"checksum\":{number}}}").as_bytes(), &CPU_V2);
            assert!(decoded.result.is_err(), "{number}");
        }
    }

    #[test]
    fn null_changes_nothing_but_maps() {
        let (value, decoded) =
            read(br#"{"policyName":"a","policyName":null,"entries":null,"checksum":null}"#, &CPU_V2);
        assert_eq!(decoded.result, Ok(()));
        assert_eq!(value.text(&CPU_V2, "PolicyName"), "a");
        assert_eq!(value.field(&CPU_V2, "Entries"), Some(&Value::Map(None)));
        let (_, decoded) = read(b"null", &CPU_V2);
        assert_eq!((decoded.result.is_ok(), kinds(&decoded)), (true, vec![("", OddityKind::Null)]));
        assert!(read(b"[]", &CPU_V2).1.result.is_err());
    }

    #[test]
    fn a_pod_that_does_not_parse_ends_the_reading() {
        let text = br#"{"podEntries":{"p":{"cpuset":"1-2"},"q":{"cpuSet":"x"},"r":null},"checksum":5}"#;
        let (value, decoded) = read(text, &CPU_V3);
        assert!(
            matches!(&decoded.result, Err(JsonError::PodCpus { key, .. }) if key == "podEntries.q.cpuSet")
        );
        assert_eq!(kinds(&decoded), [("podEntries.p.cpuset", OddityKind::Case("cpuSet"))]);
        assert_eq!((value.map(&CPU_V3, "PodEntries").len(), value.uint(&CPU_V3, "Checksum")), (1, 0));
        let (value, decoded) = read(br#"{"podEntries":{"r":null},"checksum":5}"#, &CPU_V3);
        assert!(decoded.result.is_ok());
        assert_eq!(value.map(&CPU_V3, "PodEntries"), [("r", &Value::Cpus(CpuRanges::default()))]);
    }

    #[test]
    fn an_unknown_member_of_any_depth_is_passed_over_without_recursion() {
        let deep = format!("{{\"x\":{}{}}}", "[".repeat(9000), "]".repeat(9000));
        assert_eq!(read(deep.as_bytes(), &CPU_V2).1.result, Ok(()));
    }
}
