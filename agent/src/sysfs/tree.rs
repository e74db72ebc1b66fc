//! The files of sysfs below a root: of this host, of a recorded directory, or of an archive held in memory.
//!
//! Problem: one reader has to serve all three, and on the first two the cost is the number of opens and the length of
//! the paths that are walked.
//! Steps: a [`Folder`] is opened once, its names are listed and its files are opened relative to it.
//! Invariant: a file or folder that is not there is `None`; everything else that goes wrong names its path.

use super::{
    SysfsError,
    archive::Archive,
    files::{LIST_MAY_BE_CUT, SetFile, digits_of, parse_list, parse_mask, parse_number, read, trimmed},
};
use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};
use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};
use truepin::{CpuSet, idset::IdSet};

/// Everything below one root; paths are relative to it, without a slash at the beginning.
#[derive(Debug)]
pub struct Tree {
    /// The directory, or the archive's file.
    root: PathBuf,
    archive: Option<Archive>,
}

/// An open folder.
pub(super) struct Folder<'t> {
    tree: &'t Tree,
    /// From the root.
    path: String,
    /// `None` in an archive.
    fd: Option<OwnedFd>,
}

impl Tree {
    /// The tree below a directory (`/` for this host).
    #[must_use]
    pub fn directory(root: &Path) -> Self {
        Self { root: root.into(), archive: None }
    }

    /// The tree in an archive; `file` is for messages.
    #[must_use]
    pub fn archive(file: &Path, archive: Archive) -> Self {
        Self { root: file.into(), archive: Some(archive) }
    }

    /// A path for messages.
    pub(super) fn shown(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Opens a folder.
    pub(super) fn folder(&self, path: &str) -> Result<Option<Folder<'_>>, SysfsError> {
        let fd = match &self.archive {
            Some(archive) if archive.names(path).is_none() => return Ok(None),
            Some(_) => None,
            None => match absent(File::open(self.shown(path)), || self.shown(path))? {
                // Names are listed and files opened below it: a file in its place says so then.
                Some(file) => Some(OwnedFd::from(file)),
                None => return Ok(None),
            },
        };
        Ok(Some(Folder { tree: self, path: path.into(), fd }))
    }

    /// Where a path leads when all links are followed; `None` if nowhere, or out of the tree.
    pub(super) fn resolve(&self, path: &str) -> Result<Option<String>, SysfsError> {
        if let Some(archive) = &self.archive {
            return Ok(archive.resolve(path));
        }
        let shown = self.shown(path);
        let Some(to) = absent(fs::canonicalize(&shown), || shown.clone())? else { return Ok(None) };
        let root = fs::canonicalize(&self.root)
            .map_err(|source| SysfsError::Read { path: self.root.clone(), source })?;
        Ok(to.strip_prefix(&root).ok().map(|p| p.to_string_lossy().into_owned()))
    }
}

/// "Not there" apart from failures. A CPU that goes away while it is read gives ENODEV or ENXIO: not there either.
fn absent<T>(result: io::Result<T>, path: impl Fn() -> PathBuf) -> Result<Option<T>, SysfsError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(e) if is_absent(&e) => Ok(None),
        Err(source) => Err(SysfsError::Read { path: path(), source }),
    }
}

pub(super) fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENODEV | Errno::ENXIO))
}

fn open_at(folder: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    openat(folder.as_fd(), name, flags, Mode::empty()).map_err(io::Error::from)
}

impl Folder<'_> {
    /// The path of a name in it, for messages.
    pub(super) fn shown(&self, name: &str) -> PathBuf {
        self.tree.shown(&self.path).join(name)
    }

    fn inner(&self, name: &str) -> String {
        format!("{}/{name}", self.path)
    }

    /// Opens a folder in it; the name may have several parts.
    pub(super) fn folder(&self, name: &str) -> Result<Option<Folder<'_>>, SysfsError> {
        let Some(fd) = &self.fd else { return self.tree.folder(&self.inner(name)) };
        let fd = absent(open_at(fd, name), || self.shown(name))?;
        Ok(fd.map(|fd| Folder { tree: self.tree, path: self.inner(name), fd: Some(fd) }))
    }

    /// Names in it, in no order.
    pub(super) fn names(&self) -> Result<Vec<String>, SysfsError> {
        let failed = |e: Errno| SysfsError::Read { path: self.tree.shown(&self.path), source: e.into() };
        let Some(fd) = &self.fd else {
            let names = self.tree.archive.as_ref().and_then(|a| a.names(&self.path));
            return Ok(names.unwrap_or_default());
        };
        // A copy of the descriptor, since reading names closes it.
        let copy = fd
            .try_clone()
            .map_err(|source| SysfsError::Read { path: self.tree.shown(&self.path), source })?;
        let mut dir = Dir::from_fd(copy).map_err(failed)?;
        let mut names = Vec::new();
        for entry in dir.iter() {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// The numbers N of `<prefix>N` in it, ascending.
    pub(super) fn numbered(&self, prefix: &str) -> Result<Vec<u32>, SysfsError> {
        let mut ids = Vec::new();
        for name in self.names()? {
            ids.extend(digits_of(&name, prefix, || self.shown(&name))?);
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// The bytes of a file in it.
    pub(super) fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>, SysfsError> {
        let Some(fd) = &self.fd else {
            return Ok(self
                .tree
                .archive
                .as_ref()
                .and_then(|a| a.file(&self.inner(name)))
                .map(<[u8]>::to_vec));
        };
        match absent(open_at(fd, name), || self.shown(name))? {
            Some(fd) => read(File::from(fd), || self.shown(name)),
            None => Ok(None),
        }
    }

    /// The text of a file in it without surrounding white space; the name may have several parts.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, SysfsError> {
        Ok(self.bytes(name)?.map(|bytes| trimmed(&bytes)))
    }

    /// A list file.
    pub(super) fn list<T>(&self, name: &str) -> Result<Option<IdSet<T>>, SysfsError> {
        self.text(name)?.map(|text| parse_list(text, || self.shown(name))).transpose()
    }

    /// A mask file.
    pub(super) fn mask(&self, name: &str) -> Result<Option<CpuSet>, SysfsError> {
        self.text(name)?.map(|text| parse_mask(&text, || self.shown(name))).transpose()
    }

    /// The set in the form that is wanted first, else in the other, and which form it was. A list of which perhaps only
    /// the beginning is there counts for less than the mask.
    pub(super) fn set(
        &self,
        list_name: &str,
        mask_name: &str,
        first: SetFile,
    ) -> Result<Option<(CpuSet, SetFile)>, SysfsError> {
        if first == SetFile::Mask
            && let Some(mask) = self.mask(mask_name)?
        {
            return Ok(Some((mask, SetFile::Mask)));
        }
        let list = |text| parse_list(text, || self.shown(list_name)).map(|set| Some((set, SetFile::List)));
        let listed = match self.text(list_name)? {
            Some(text) if text.len() < LIST_MAY_BE_CUT => return list(text),
            other => other,
        };
        match (self.mask(mask_name)?, listed) {
            (Some(mask), _) => Ok(Some((mask, SetFile::Mask))),
            (None, Some(text)) => list(text),
            (None, None) => Ok(None),
        }
    }

    /// The set in `list_name`, or where there is none, or perhaps only its beginning, in `mask_name`.
    pub(super) fn list_or_mask(
        &self,
        list_name: &str,
        mask_name: &str,
    ) -> Result<Option<CpuSet>, SysfsError> {
        Ok(self.set(list_name, mask_name, SetFile::List)?.map(|(set, _)| set))
    }

    /// A decimal number; an empty file (a recording of one that could not be read) says nothing.
    pub(super) fn number(&self, name: &str) -> Result<Option<i64>, SysfsError> {
        let Some(text) = self.text(name)?.filter(|t| !t.is_empty()) else { return Ok(None) };
        parse_number(text, || self.shown(name)).map(Some)
    }

    /// Where a link in it points, as written; `None` if it is none.
    pub(super) fn link(&self, name: &str) -> Option<String> {
        match &self.fd {
            None => self.tree.archive.as_ref().and_then(|a| a.link(&self.inner(name))),
            Some(_) => fs::read_link(self.shown(name)).ok().map(|p| p.to_string_lossy().into_owned()),
        }
    }
}
