//! Single files of sysfs: absent, or a value, or an error that names file and value.

use super::SysfsError;
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
};
use truepin::{
    CpuId, CpuSet,
    idset::{IdSet, MAX_ID},
};

/// No file of sysfs is longer than this; what is, is no sysfs.
const LONGEST: usize = 1 << 20;
/// Linux before 5.16 cuts a list at one page; from this length on the mask, which fits always, is read instead.
const LIST_MAY_BE_CUT: usize = 4095;

/// The text of a file without surrounding white space; `None` if there is none. A CPU that goes away while it is
/// read gives ENODEV or ENXIO: not there either.
pub(super) fn text(path: &Path) -> Result<Option<String>, SysfsError> {
    let failed = |source: io::Error| match (source.kind(), source.raw_os_error()) {
        (io::ErrorKind::NotFound, _) | (_, Some(6 | 19)) => Ok(None),
        _ => Err(SysfsError::Read { path: path.into(), source }),
    };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) => return failed(e),
    };
    // By hand, since `read_to_end` first asks for the size, which sysfs does not know. A page is nearly always enough.
    let mut page = [0; 4096];
    let mut bytes = Vec::new();
    loop {
        match file.read(&mut page) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&page[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return failed(e),
        }
        if bytes.len() > LONGEST {
            let source = io::Error::new(io::ErrorKind::FileTooLarge, "longer than any file of sysfs");
            return Err(SysfsError::Read { path: path.into(), source });
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned()))
}

/// A list file.
pub(super) fn list<T>(path: &Path) -> Result<Option<IdSet<T>>, SysfsError> {
    match text(path)? {
        None => Ok(None),
        Some(text) => parse_list(path, text).map(Some),
    }
}

/// `(null)` is how the kernel prints a mask that it never allocated (`nohz_full`): no member.
fn parse_list<T>(path: &Path, text: String) -> Result<IdSet<T>, SysfsError> {
    if text == "(null)" {
        return Ok(IdSet::default());
    }
    text.parse().map_err(|source| SysfsError::List { path: path.into(), value: text, source })
}

/// A mask file: hexadecimal words of 32 bits, the highest first, separated by commas.
pub(super) fn parse_mask(path: &Path, text: &str) -> Result<CpuSet, SysfsError> {
    let refuse = || SysfsError::Value {
        path: path.into(),
        value: text.into(),
        expected: "a mask of hexadecimal words",
    };
    let mut set = CpuSet::new();
    if text.is_empty() {
        return Ok(set);
    }
    for (word, base) in text.rsplit(',').zip((0..).step_by(32)) {
        if word.is_empty() || word.len() > 8 || base > MAX_ID {
            return Err(refuse());
        }
        let bits = u32::from_str_radix(word, 16).map_err(|_| refuse())?;
        for bit in (0..32).filter(|b| bits >> b & 1 == 1) {
            set.insert(CpuId(base + bit));
        }
    }
    Ok(set)
}

/// The set in `dir/list_name`, or where there is none, or perhaps only its beginning, in `dir/mask_name`.
pub(super) fn list_or_mask(
    dir: &Path,
    list_name: &str,
    mask_name: &str,
) -> Result<Option<CpuSet>, SysfsError> {
    let path = dir.join(list_name);
    let listed = text(&path)?;
    if let Some(text) = &listed
        && text.len() < LIST_MAY_BE_CUT
    {
        return parse_list(&path, text.clone()).map(Some);
    }
    let mask = dir.join(mask_name);
    match (text(&mask)?, listed) {
        (Some(text), _) => parse_mask(&mask, &text).map(Some),
        (None, Some(list)) => parse_list(&path, list).map(Some),
        (None, None) => Ok(None),
    }
}

/// A decimal number, negative ones included. An empty file (a recording of one that could not be read) says nothing.
pub(super) fn number(path: &Path) -> Result<Option<i64>, SysfsError> {
    let Some(text) = text(path)?.filter(|t| !t.is_empty()) else { return Ok(None) };
    let value =
        text.parse().map_err(|_| SysfsError::Value { path: path.into(), value: text, expected: "a number" });
    value.map(Some)
}

/// Names in a folder; empty if there is no such folder.
pub(super) fn names(dir: &Path) -> Result<Vec<String>, SysfsError> {
    let failed = |source| SysfsError::Read { path: dir.into(), source };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// The numbers N of `<prefix>N` in a folder, ascending.
pub(super) fn numbered(dir: &Path, prefix: &str) -> Result<Vec<u32>, SysfsError> {
    let mut ids = Vec::new();
    for name in names(dir)? {
        let Some(digits) = name.strip_prefix(prefix) else { continue };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        match digits.parse() {
            Ok(id) if id <= MAX_ID => ids.push(id),
            _ => {
                let expected = "a number that a CPU or node can have";
                return Err(SysfsError::Value { path: dir.join(&name), value: name, expected });
            }
        }
    }
    ids.sort_unstable();
    Ok(ids)
}
