//! From a cgroup's id to its path, without a search.
//!
//! The id is the number by which kernfs finds a directory for a file handle (`kernfs_fh_to_dentry`,
//! `fs/kernfs/mount.c`, since 5.5), so `open_by_handle_at(2)` opens it and the descriptor's link in `/proc` is its path.
//! Needs `CAP_DAC_READ_SEARCH`. A cgroup that was removed has no path any more.

use nix::libc;
use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};
use truepin::{CgroupId, CgroupPath};

/// `FILEID_KERNFS` of `include/linux/exportfs.h`.
const FILEID_KERNFS: libc::c_int = 0xfe;

/// A `struct file_handle` that holds an id.
#[repr(C)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    id: [u8; 8],
}

/// The cgroup2 mount, in which ids are looked up.
#[derive(Debug)]
pub struct Ids {
    root: PathBuf,
    dir: File,
}

impl Ids {
    /// `root` is the root cgroup's directory.
    pub fn new(root: &Path) -> io::Result<Self> {
        // The kernel compares whole paths, and so do we.
        Ok(Self { root: fs::canonicalize(root)?, dir: File::open(root)? })
    }

    /// The path of the cgroup with this id; `None` if there is none (any more).
    pub fn path(&self, id: CgroupId) -> io::Result<Option<CgroupPath>> {
        let opened = match self.open(id) {
            Ok(opened) => opened,
            Err(e) if matches!(e.raw_os_error(), Some(libc::ESTALE | libc::ENOENT)) => return Ok(None),
            Err(e) => return Err(e),
        };
        let path = fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))?;
        // One that is removed at this moment reads "… (deleted)": such a name could also be real, but there is no such
        // directory then.
        let below = path.strip_prefix(&self.root).ok().filter(|_| path.is_dir());
        Ok(below.and_then(|p| p.to_str()?.parse().ok()))
    }

    #[allow(unsafe_code, reason = "open_by_handle_at(2) has no safe wrapper")]
    fn open(&self, id: CgroupId) -> io::Result<OwnedFd> {
        let mut handle = Handle { bytes: 8, kind: FILEID_KERNFS, id: id.0.to_ne_bytes() };
        // SAFETY: the handle lives through the call and is as long as it says; a descriptor that comes back is ours.
        unsafe {
            let fd = libc::open_by_handle_at(
                self.dir.as_raw_fd(),
                (&raw mut handle).cast(),
                libc::O_PATH | libc::O_CLOEXEC,
            );
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
        }
    }
}
