//! The grammar of JSON as Go's scanner has it, and its strings.
//!
//! Problem: a file may be cut, patched or random, and what is not JSON to the kubelet must not be JSON here, nor the
//! other way round. Steps: [`check`] walks a text with a stack of its own; [`unquote`] reads a string.
//! Invariants: no recursion; no byte is read twice; offsets in errors are those of the byte that cannot stand there.

use super::ranges::RangeError;

/// Deeper nesting is refused (`maxNestingDepth` of `encoding/json`).
const MAX_DEPTH: usize = 10_000;

/// Why a text was not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// The text ends too early.
    #[error("the text ends inside the document, at byte {at}")]
    Short {
        /// Offset in bytes.
        at: usize,
    },
    /// A byte that cannot stand there.
    #[error("unexpected {byte:?} at byte {at}")]
    Byte {
        /// Offset in bytes.
        at: usize,
        /// The byte, as the character of that number.
        byte: char,
    },
    /// Nested too deeply.
    #[error("nested deeper than {MAX_DEPTH}, at byte {at}")]
    Deep {
        /// Offset in bytes.
        at: usize,
    },
    /// A value that does not fit its field.
    #[error("{key:?} holds {found}, not {expected}")]
    Type {
        /// Where, dotted.
        key: String,
        /// What is there.
        found: String,
        /// The Go type of the field.
        expected: &'static str,
    },
    /// A pod's CPU set does not parse.
    #[error("{key:?} is {value:?}")]
    PodCpus {
        /// Where, dotted.
        key: String,
        /// As found.
        value: String,
        /// What is wrong.
        source: RangeError,
    },
}

/// Whether the bytes are one JSON document.
pub(super) fn check(bytes: &[u8]) -> Result<(), JsonError> {
    /// What may come next.
    enum Want {
        Value,
        ValueOrEnd,
        Key,
        KeyOrEnd,
        After,
    }
    let mut at = 0;
    let mut open: Vec<u8> = Vec::new();
    let mut want = Want::Value;
    loop {
        at = skip_space(bytes, at);
        let Some(&byte) = bytes.get(at) else {
            return if open.is_empty() && matches!(want, Want::After) {
                Ok(())
            } else {
                Err(JsonError::Short { at })
            };
        };
        let unexpected = Err(JsonError::Byte { at, byte: char::from(byte) });
        want = match (want, byte) {
            (Want::Value | Want::ValueOrEnd, b'{' | b'[') => {
                open.push(byte);
                if open.len() > MAX_DEPTH {
                    return Err(JsonError::Deep { at });
                }
                at += 1;
                if byte == b'{' { Want::KeyOrEnd } else { Want::ValueOrEnd }
            }
            (Want::ValueOrEnd, b']') | (Want::KeyOrEnd, b'}') => {
                open.pop();
                at += 1;
                Want::After
            }
            (Want::Value | Want::ValueOrEnd, _) => {
                at = check_scalar(bytes, at)?;
                Want::After
            }
            (Want::Key | Want::KeyOrEnd, b'"') => {
                at = skip_space(bytes, check_string(bytes, at)?);
                match bytes.get(at) {
                    Some(b':') => at += 1,
                    Some(&byte) => return Err(JsonError::Byte { at, byte: char::from(byte) }),
                    None => return Err(JsonError::Short { at }),
                }
                Want::Value
            }
            (Want::After, b',') if !open.is_empty() => {
                at += 1;
                if open.last() == Some(&b'{') { Want::Key } else { Want::Value }
            }
            (Want::After, b'}' | b']') if open.last().is_some_and(|o| o + 2 == byte) => {
                // `{` and `}`, `[` and `]` are two apart.
                open.pop();
                at += 1;
                Want::After
            }
            _ => return unexpected,
        };
    }
}

pub(super) fn skip_space(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
        at += 1;
    }
    at
}

/// The end of a string, number or word.
pub(super) fn check_scalar(bytes: &[u8], at: usize) -> Result<usize, JsonError> {
    let word = |word: &[u8]| {
        for (i, expected) in word.iter().enumerate() {
            match bytes.get(at + i) {
                Some(byte) if byte == expected => {}
                Some(&byte) => return Err(JsonError::Byte { at: at + i, byte: char::from(byte) }),
                None => return Err(JsonError::Short { at: at + i }),
            }
        }
        Ok(at + word.len())
    };
    match bytes.get(at) {
        Some(b'"') => check_string(bytes, at),
        Some(b'n') => word(b"null"),
        Some(b't') => word(b"true"),
        Some(b'f') => word(b"false"),
        Some(b'-' | b'0'..=b'9') => check_number(bytes, at),
        Some(&byte) => Err(JsonError::Byte { at, byte: char::from(byte) }),
        None => Err(JsonError::Short { at }),
    }
}

fn check_number(bytes: &[u8], mut at: usize) -> Result<usize, JsonError> {
    let digits = |mut at: usize| match bytes.get(at) {
        Some(b'0'..=b'9') => {
            while matches!(bytes.get(at), Some(b'0'..=b'9')) {
                at += 1;
            }
            Ok(at)
        }
        Some(&byte) => Err(JsonError::Byte { at, byte: char::from(byte) }),
        None => Err(JsonError::Short { at }),
    };
    if bytes.get(at) == Some(&b'-') {
        at += 1;
    }
    // A leading zero stands alone; what follows it is refused by the caller.
    at = if bytes.get(at) == Some(&b'0') { at + 1 } else { digits(at)? };
    if bytes.get(at) == Some(&b'.') {
        at = digits(at + 1)?;
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        at += 1;
        if matches!(bytes.get(at), Some(b'+' | b'-')) {
            at += 1;
        }
        at = digits(at)?;
    }
    Ok(at)
}

pub(super) fn check_string(bytes: &[u8], at: usize) -> Result<usize, JsonError> {
    let mut at = at + 1;
    loop {
        match bytes.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(b'\\') => match bytes.get(at + 1) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => at += 2,
                Some(b'u') => {
                    for i in at + 2..at + 6 {
                        match bytes.get(i) {
                            Some(byte) if byte.is_ascii_hexdigit() => {}
                            Some(&byte) => return Err(JsonError::Byte { at: i, byte: char::from(byte) }),
                            None => return Err(JsonError::Short { at: i }),
                        }
                    }
                    at += 6;
                }
                Some(&byte) => return Err(JsonError::Byte { at: at + 1, byte: char::from(byte) }),
                None => return Err(JsonError::Short { at: at + 1 }),
            },
            Some(&byte) if byte < 0x20 => return Err(JsonError::Byte { at, byte: char::from(byte) }),
            Some(_) => at += 1,
            None => return Err(JsonError::Short { at }),
        }
    }
}

/// A string's content: escapes resolved, lone surrogates and bytes that are no UTF-8 replaced one by one.
pub(super) fn unquote(raw: &[u8]) -> String {
    let mut text = String::with_capacity(raw.len());
    let mut at = 0;
    while let Some(&byte) = raw.get(at) {
        if byte != b'\\' {
            let end = raw.iter().skip(at).position(|b| *b == b'\\').map_or(raw.len(), |n| at + n);
            for chunk in raw.get(at..end).unwrap_or_default().utf8_chunks() {
                text.push_str(chunk.valid());
                text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
            }
            at = end;
            continue;
        }
        let escaped = raw.get(at + 1).copied().unwrap_or(b'\\');
        at += 2;
        text.push(match escaped {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = hex4(raw, at);
                at += 4;
                let low = if raw.get(at..at + 2) == Some(b"\\u") { hex4(raw, at + 2) } else { 0 };
                let pair = (0xd800..0xdc00).contains(&unit) && (0xdc00..0xe000).contains(&low);
                if pair {
                    at += 6;
                    let code = 0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
                } else {
                    char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
            }
            other => char::from(other),
        });
    }
    text
}

fn hex4(raw: &[u8], at: usize) -> u32 {
    let digits = raw.get(at..at + 4).and_then(|d| std::str::from_utf8(d).ok());
    digits.and_then(|d| u32::from_str_radix(d, 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar() {
        for good in [
            "{}",
            " [ ] ",
            "null",
            "-0.5e+10",
            "0",
            r#""\u12aFx\/""#,
            "[1,{\"a\":[]},\"\"]",
            "\t\n\r true",
            "\"\u{7f}\"",
        ] {
            assert_eq!(check(good.as_bytes()), Ok(()), "{good:?}");
        }
        for bad in [
            "",
            " ",
            "{",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":1,}",
            "{,}",
            "{1:2}",
            "[}",
            "{]",
            "nul",
            "nulL",
            "01",
            "1.",
            ".5",
            "1e",
            "-",
            "+1",
            "\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\t\"",
            "{} x",
            "1 2",
            "\u{feff}{}",
            "{\"a\" 1}",
            "tru",
        ] {
            assert!(check(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert_eq!(check(&b"[".repeat(MAX_DEPTH)), Err(JsonError::Short { at: MAX_DEPTH }));
        assert_eq!(check(&b"[".repeat(MAX_DEPTH + 1)), Err(JsonError::Deep { at: MAX_DEPTH }));
    }

    #[test]
    fn strings_as_go_reads_them() {
        for (raw, text) in [
            (&b"a\\u00e9\\n\\/"[..], "aé\n/"),
            (br"\ud83d\ude00", "\u{1f600}"),
            (br"\ud83dx", "\u{fffd}x"),
            (br"\ude00\ud83d", "\u{fffd}\u{fffd}"),
            (br"\ud83d\u0041", "\u{fffd}A"),
            (b"\xe2\x82x", "\u{fffd}\u{fffd}x"),
            (b"\xff\xc3\xa9", "\u{fffd}é"),
        ] {
            assert_eq!(unquote(raw), text, "{raw:?}");
        }
    }
}
