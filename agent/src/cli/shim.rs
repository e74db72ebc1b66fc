//! The process that `truepin run` starts: it waits until it has its CPUs, then becomes the command.
//!
//! So the command's pid is known and in its cgroup before its first instruction, and nothing runs between fork and exec
//! that is not this file. `std`'s `exec` puts SIGPIPE back to its default.

use clap::Args;
use nix::sys::signal::SigSet;
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::process::CommandExt,
    process::Command,
};

#[derive(Debug, Args)]
pub(super) struct ExecArgs {
    /// The pipe on which one byte means go, and its end means never
    #[arg(long)]
    fd: i32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

pub(super) fn exec(args: &ExecArgs) -> u8 {
    match wait(args.fd) {
        Ok(true) => {}
        // `truepin run` has said why.
        Ok(false) => return 125,
        Err(error) => {
            eprintln!("error: waiting for CPUs: {error}");
            return 125;
        }
    }
    let Some((program, rest)) = args.command.split_first() else { return 125 };
    let error = Command::new(program).args(rest).exec();
    eprintln!("error: {}: {error}", program.display());
    if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
}

fn wait(fd: i32) -> io::Result<bool> {
    let mut pipe = File::open(format!("/proc/self/fd/{fd}"))?;
    // The command must not inherit it.
    nix::unistd::close(fd)?;
    // Blocked by `truepin run`, which reads its signals from a descriptor.
    SigSet::empty().thread_set_mask()?;
    let mut byte = [0];
    Ok(pipe.read(&mut byte)? == 1)
}
