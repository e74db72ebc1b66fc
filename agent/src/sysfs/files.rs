//! What single files of sysfs hold: a value, or an error that names file and value.

use super::{SysfsError, tree::is_absent};
use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};
use truepin::{
    CpuSet,
    idset::{IdSet, MAX_ID},
};

/// No file of sysfs is longer than this; what is, is no sysfs.
pub(super) const LONGEST: usize = 1 << 20;
/// Linux before 5.16 cuts a list at one page; from this length on the mask, which fits always, is read instead.
pub(super) const LIST_MAY_BE_CUT: usize = 4095;

/// A set comes in two forms. They differ only in trees that were edited after they were recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetFile {
    List,
    Mask,
}

/// A file's bytes; `None` if what it speaks of has gone away.
pub(super) fn read(mut file: File, path: impl Fn() -> PathBuf) -> Result<Option<Vec<u8>>, SysfsError> {
    // By hand, since `read_to_end` first asks for the size, which sysfs does not know. A page is nearly always enough.
    let mut page = [0; 4096];
    let mut bytes = Vec::new();
    loop {
        match file.read(&mut page) {
            Ok(0) => break,
            Ok(n) => {
                bytes.extend_from_slice(&page[..n]);
                // A part of a page that ends a line is the end: no second read, which nearly all files would need.
                if n < page.len() && page[n - 1] == b'\n' {
                    break;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if is_absent(&e) => return Ok(None),
            Err(source) => return Err(SysfsError::Read { path: path(), source }),
        }
        if bytes.len() > LONGEST {
            let source = io::Error::new(io::ErrorKind::FileTooLarge, "longer than any file of sysfs");
            return Err(SysfsError::Read { path: path(), source });
        }
    }
    Ok(Some(bytes))
}

/// A list file at a path; `None` if there is none.
pub(super) fn list<T>(path: &Path) -> Result<Option<IdSet<T>>, SysfsError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if is_absent(&e) => return Ok(None),
        Err(source) => return Err(SysfsError::Read { path: path.into(), source }),
    };
    let bytes = read(file, || path.into())?;
    bytes.map(|bytes| parse_list(trimmed(&bytes), || path.into())).transpose()
}

/// Text without surrounding white space.
pub(super) fn trimmed(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned()
}

/// `(null)` is how the kernel prints a mask that it never allocated (`nohz_full`): no member.
pub(super) fn parse_list<T>(text: String, path: impl Fn() -> PathBuf) -> Result<IdSet<T>, SysfsError> {
    if text == "(null)" {
        return Ok(IdSet::default());
    }
    text.parse().map_err(|source| SysfsError::List { path: path(), value: text, source })
}

/// A mask: hexadecimal words of 32 bits, the highest first, separated by commas.
pub(super) fn parse_mask(text: &str, path: impl Fn() -> PathBuf) -> Result<CpuSet, SysfsError> {
    let refuse =
        || SysfsError::Value { path: path(), value: text.into(), expected: "a mask of hexadecimal words" };
    if text.is_empty() {
        return Ok(CpuSet::new());
    }
    let mut words = Vec::new();
    for word in text.rsplit(',') {
        // `from_str_radix` takes a sign.
        if word.is_empty() || word.len() > 8 || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(refuse());
        }
        words.push(u32::from_str_radix(word, 16).map_err(|_| refuse())?);
    }
    CpuSet::from_mask(words).ok_or_else(refuse)
}

/// A decimal number, negative ones included.
pub(super) fn parse_number(text: String, path: impl Fn() -> PathBuf) -> Result<i64, SysfsError> {
    text.parse().map_err(|_| SysfsError::Value { path: path(), value: text, expected: "a number" })
}

/// The number N if a name is `<prefix>N`.
pub(super) fn digits_of(
    name: &str,
    prefix: &str,
    path: impl Fn() -> PathBuf,
) -> Result<Option<u32>, SysfsError> {
    let Some(digits) = name.strip_prefix(prefix) else { return Ok(None) };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    match digits.parse() {
        Ok(id) if id <= MAX_ID => Ok(Some(id)),
        _ => {
            let expected = "a number that a CPU or node can have";
            Err(SysfsError::Value { path: path(), value: name.into(), expected })
        }
    }
}
