//! Name services of the C library, which nobody here asks.
//!
//! A library that could connect over TCP (zbus) links `getaddrinfo`, and the standard library's `home_dir` links
//! `getpwuid_r`. Neither is ever called: all that is talked to are Unix sockets with paths. But glibc's crash in static
//! binaries (see `clippy.toml`), so a call that came about by a mistake shall find nothing instead. Defined in the program
//! itself, these come before the C library's.

#![allow(unsafe_code, reason = "names that the C library's callers know, with its calling convention")]

use nix::libc::{EAI_FAIL, addrinfo, c_char, c_int, passwd, size_t};

/// `EAI_FAIL`; nothing is written.
#[unsafe(no_mangle)]
extern "C" fn getaddrinfo(
    _node: *const c_char,
    _service: *const c_char,
    _hints: *const addrinfo,
    _found: *mut *mut addrinfo,
) -> c_int {
    EAI_FAIL
}

/// Nothing that [`getaddrinfo`] gave.
#[unsafe(no_mangle)]
extern "C" fn freeaddrinfo(_found: *mut addrinfo) {}

/// Not found: 0, and a null pointer in `found`.
#[unsafe(no_mangle)]
unsafe extern "C" fn getpwuid_r(
    _id: u32,
    _entry: *mut passwd,
    _buffer: *mut c_char,
    _size: size_t,
    found: *mut *mut passwd,
) -> c_int {
    // SAFETY: the caller passes where the answer goes, as getpwuid_r(3) has it.
    unsafe { found.write(std::ptr::null_mut()) };
    0
}
