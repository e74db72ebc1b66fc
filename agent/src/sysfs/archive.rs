//! A recorded tree as an archive: `.tar`, `.tar.gz`, `.tar.zst`, read into memory.
//!
//! Problem: an archive comes from somebody else. It may unpack to more than the disk holds, name files outside of its
//! folder, or be cut off.
//! Steps: decompress as a stream; of each entry keep it only if the reader of topologies could ask for it; find the folder
//! that holds `sys`.
//! Invariants: nothing is written to disk and no link is followed outside of the archive; what is decompressed,
//! kept and nested is bounded; what ends early or has a wrong checksum is an error, never half a machine.

use super::files::LONGEST;
use ruzstd::decoding::StreamingDecoder;
use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, Read},
};

/// Decompressed bytes at most. A machine of 2048 CPUs takes 80 MB.
const MOST_BYTES: u64 = 512 << 20;
/// Bytes of files that are kept, at most.
const MOST_KEPT: usize = 128 << 20;
/// Parts of a path at most.
const DEEPEST: usize = 64;
/// Links that lead to links, at most: the kernel's `MAXSYMLINKS`.
const MOST_LINKS: usize = 40;
/// What a decoder of zstd may remember: what `zstd --long` uses.
const WINDOW: u64 = 128 << 20;

/// Why an archive could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// Not an archive, cut off, or damaged.
    #[error("no readable archive")]
    Read(#[from] io::Error),
    /// More than a recorded machine has.
    #[error("more than {most} {what}")]
    Bounds {
        /// Of what.
        what: &'static str,
        /// How many may be.
        most: u64,
    },
    /// A path that leads out of the archive, or through something that is no folder.
    #[error("entry {path:?}: {why}")]
    Path {
        /// The entry's path.
        path: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No folder `sys`, or more than one machine.
    #[error("{0}")]
    Machine(String),
}

/// A folder, a file or a link.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Folder(BTreeMap<String, Entry>),
    File(Vec<u8>),
    Link(String),
}

/// The part of an archive that describes a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The folder that holds `sys`.
    root: BTreeMap<String, Entry>,
}

/// A stream that fails when it goes on for too long.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| {
            let bounds = ArchiveError::Bounds { what: "decompressed bytes", most: MOST_BYTES };
            io::Error::new(io::ErrorKind::FileTooLarge, bounds.to_string())
        })?;
        Ok(n)
    }
}

/// All frames of a zstd file, one after the other, with their checksums.
struct Frames<'a> {
    rest: &'a [u8],
    frame: Option<StreamingDecoder<&'a [u8], ruzstd::decoding::FrameDecoder>>,
}

impl Read for Frames<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(frame) = &mut self.frame else {
                if self.rest.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                let decoder = StreamingDecoder::new_with_max_window_size(self.rest, WINDOW);
                self.frame = Some(decoder.map_err(io::Error::other)?);
                continue;
            };
            let n = frame.read(buffer)?;
            if n > 0 || buffer.is_empty() {
                return Ok(n);
            }
            if let Some(stated) = frame.decoder.get_checksum_from_data()
                && frame.decoder.get_calculated_checksum() != Some(stated)
            {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the checksum of the content is wrong",
                ));
            }
            self.rest = frame.get_ref();
            self.frame = None;
        }
    }
}

/// Whether bytes begin like an archive that [`read`] knows.
#[must_use]
pub fn is_archive(bytes: &[u8]) -> bool {
    bytes.starts_with(&GZIP) || bytes.starts_with(&ZSTD) || bytes.get(257..262) == Some(b"ustar")
}

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Reads an archive, compressed or not.
pub fn read(bytes: &[u8]) -> Result<Archive, ArchiveError> {
    if bytes.starts_with(&GZIP) {
        unpack(flate2::read::MultiGzDecoder::new(bytes))
    } else if bytes.starts_with(&ZSTD) {
        unpack(Frames { rest: bytes, frame: None })
    } else if bytes.ends_with(&[0; 1024]) && bytes.len().is_multiple_of(512) {
        unpack(bytes)
    } else {
        // Compressed ones say so themselves.
        Err(ArchiveError::Read(io::Error::new(io::ErrorKind::UnexpectedEof, "its end is missing")))
    }
}

fn unpack(stream: impl Read) -> Result<Archive, ArchiveError> {
    let mut archive = tar::Archive::new(Bounded { inner: stream, left: MOST_BYTES });
    let mut top = BTreeMap::new();
    let mut kept = 0;
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let parts = parts(&path)?;
        let Some(below_sys) = parts.iter().position(|p| *p == "sys") else { continue };
        if !is_wanted(&parts[below_sys..]) {
            continue;
        }
        let kind = entry.header().entry_type();
        let made = if kind.is_dir() {
            Entry::Folder(BTreeMap::new())
        } else if kind.is_symlink() {
            let to = entry.link_name_bytes();
            Entry::Link(String::from_utf8_lossy(&to.unwrap_or_default()).into_owned())
        } else if kind.is_file() {
            let mut bytes = Vec::new();
            (&mut entry).take(LONGEST as u64 + 1).read_to_end(&mut bytes)?;
            if bytes.len() > LONGEST {
                return Err(ArchiveError::Bounds { what: "bytes in a file", most: LONGEST as u64 });
            }
            Entry::File(bytes)
        } else {
            // Hard links and devices: no recording of sysfs has them.
            let why = "neither a file nor a folder nor a symbolic link";
            return Err(ArchiveError::Path { path, why });
        };
        if let Entry::File(bytes) = &made {
            kept += bytes.len();
        }
        if kept > MOST_KEPT {
            return Err(ArchiveError::Bounds { what: "bytes of files", most: MOST_KEPT as u64 });
        }
        insert(&mut top, &parts, made).map_err(|why| ArchiveError::Path { path: path.clone(), why })?;
    }
    // The stream goes on to its end, where checksums are.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(Archive { root: machine(top)? })
}

fn parts(path: &str) -> Result<Vec<&str>, ArchiveError> {
    let refuse = |why| ArchiveError::Path { path: path.into(), why };
    if path.starts_with('/') {
        return Err(refuse("an absolute path"));
    }
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    if parts.contains(&"..") {
        return Err(refuse("leads out of the archive"));
    }
    if parts.len() > DEEPEST {
        return Err(refuse("nests too deep"));
    }
    Ok(parts)
}

/// Whether the reader of topologies and devices could ask for `sys/…`.
fn is_wanted(parts: &[&str]) -> bool {
    match parts {
        [_, "devices", "system", rest @ ..] => rest.first().is_none_or(|p| *p == "cpu" || *p == "node"),
        [_] | [_, "devices", ..] => true,
        [_, "bus", rest @ ..] => rest.first().is_none_or(|p| *p == "pci"),
        [_, "class", rest @ ..] => rest.first().is_none_or(|p| *p == "net" || *p == "block"),
        _ => false,
    }
}

fn insert(top: &mut BTreeMap<String, Entry>, parts: &[&str], made: Entry) -> Result<(), &'static str> {
    let Some((name, above)) = parts.split_last() else { return Ok(()) };
    let mut at = top;
    for part in above {
        let next = at.entry((*part).to_owned()).or_insert_with(|| Entry::Folder(BTreeMap::new()));
        let Entry::Folder(inner) = next else { return Err("lies below something that is no folder") };
        at = inner;
    }
    match (at.get(*name), &made) {
        // A folder may be named after what is in it.
        (Some(Entry::Folder(_)), Entry::Folder(_)) => Ok(()),
        (Some(_), _) => Err("comes twice"),
        (None, _) => {
            at.insert((*name).to_owned(), made);
            Ok(())
        }
    }
}

/// The one folder that holds `sys`.
fn machine(top: BTreeMap<String, Entry>) -> Result<BTreeMap<String, Entry>, ArchiveError> {
    let mut found = Vec::new();
    find_machines(top, String::new(), &mut found);
    let names = found.iter().map(|(path, _)| format!("{path}sys")).collect::<Vec<_>>().join(" and ");
    match (found.pop(), found.is_empty()) {
        (Some((_, machine)), true) => Ok(machine),
        (None, _) => Err(ArchiveError::Machine("no folder `sys` with a machine in it".into())),
        (Some(_), false) => Err(ArchiveError::Machine(format!("several machines: {names}"))),
    }
}

/// Folders that hold `sys`, with their paths; three are enough to complain about.
fn find_machines(
    folder: BTreeMap<String, Entry>,
    path: String,
    found: &mut Vec<(String, BTreeMap<String, Entry>)>,
) {
    if found.len() > 2 {
    } else if matches!(folder.get("sys"), Some(Entry::Folder(_))) {
        found.push((path, folder));
    } else {
        for (name, entry) in folder {
            if let Entry::Folder(inner) = entry {
                find_machines(inner, format!("{path}{name}/"), found);
            }
        }
    }
}

impl Archive {
    /// A machine of these files.
    #[cfg(test)]
    pub(super) fn of(files: &BTreeMap<String, Vec<u8>>) -> Self {
        let mut root = BTreeMap::new();
        for (path, bytes) in files {
            let parts: Vec<&str> = path.split('/').collect();
            assert_eq!(insert(&mut root, &parts, Entry::File(bytes.clone())), Ok(()), "{path}");
        }
        Self { root }
    }

    /// Where a path leads when all links are followed; `None` if nowhere.
    pub(super) fn resolve(&self, path: &str) -> Option<String> {
        let mut links = 0;
        let mut done: Vec<String> = Vec::new();
        let mut todo: Vec<String> = path.split('/').rev().map(Into::into).collect();
        while let Some(part) = todo.pop() {
            match part.as_str() {
                "" | "." => continue,
                // Above the root is the root, as in the kernel.
                ".." => {
                    done.pop();
                    continue;
                }
                _ => done.push(part),
            }
            if let Entry::Link(to) = self.plain(&done)? {
                links += 1;
                if links > MOST_LINKS || to.len() > 4096 {
                    return None;
                }
                if to.starts_with('/') {
                    done.clear();
                } else {
                    done.pop();
                }
                todo.extend(to.split('/').rev().map(Into::into));
            }
        }
        Some(done.join("/"))
    }

    /// The entry at a path without links, or at a link.
    fn plain(&self, parts: &[String]) -> Option<&Entry> {
        let (last, above) = parts.split_last()?;
        let mut at = &self.root;
        for part in above {
            let Entry::Folder(inner) = at.get(part)? else { return None };
            at = inner;
        }
        at.get(last)
    }

    fn entry(&self, path: &str) -> Option<&Entry> {
        // Most paths have no links; following them takes the square of the path's length.
        let parts: Vec<String> = path.split('/').map(Into::into).collect();
        match self.plain(&parts) {
            Some(Entry::Link(_)) | None => {
                let parts: Vec<String> = self.resolve(path)?.split('/').map(Into::into).collect();
                self.plain(&parts)
            }
            found => found,
        }
    }

    /// Names in a folder; `None` if there is no such folder.
    pub(super) fn names(&self, path: &str) -> Option<Vec<String>> {
        match self.entry(path)? {
            Entry::Folder(inner) => Some(inner.keys().cloned().collect()),
            _ => None,
        }
    }

    /// The bytes of a file.
    pub(super) fn file(&self, path: &str) -> Option<&[u8]> {
        match self.entry(path)? {
            Entry::File(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Where a link points, as written.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        let parts: Vec<String> = path.split('/').map(Into::into).collect();
        match self.plain(&parts)? {
            Entry::Link(to) => Some(to.clone()),
            _ => None,
        }
    }
}
