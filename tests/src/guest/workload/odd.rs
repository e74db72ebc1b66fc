//! Odd ways to be a task: born in another cgroup, under a number of choice, outlived by its threads, dead and not buried,
//! short-lived by the hundred.

use crate::guest::{
    cgroup::{Cgroup, errno},
    wait::millis,
};
use anyhow::Context;
use nix::{
    errno::Errno,
    libc,
    sys::{
        prctl,
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork},
};
use std::{
    fs::File,
    os::fd::AsRawFd,
    process::{Command, Stdio},
    time::Duration,
};

/// `CLONE_INTO_CGROUP` of `include/uapi/linux/sched.h`.
const INTO_CGROUP: u64 = 0x2_0000_0000;
/// Short-lived tasks of one process that are alive at a time.
const BOMBS: usize = 8;

/// Goes on as a child that was born in the cgroup `into`, and as task `tid` if that is given (clone3(2)). The parent
/// stays behind, waits for the child and ends with it. To be called while there is one thread.
pub(super) fn born(into: Option<&str>, tid: Option<i32>) -> anyhow::Result<()> {
    if into.is_none() && tid.is_none() {
        return Ok(());
    }
    let dir =
        into.map(|path| File::open(Cgroup::at(path).dir()).with_context(|| format!("opening cgroup {path}")));
    let dir = dir.transpose()?;
    let wanted = tid.unwrap_or_default();
    let (cgroup, flags) = match &dir {
        Some(dir) => (u64::try_from(dir.as_raw_fd())?, INTO_CGROUP),
        None => (0, 0),
    };
    let (set_tid, set_tid_size) = match tid {
        Some(_) => (std::ptr::from_ref(&wanted) as u64, 1),
        None => (0, 0),
    };
    let args = libc::clone_args {
        flags,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: u64::try_from(libc::SIGCHLD)?,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid,
        set_tid_size,
        cgroup,
    };
    #[allow(unsafe_code, reason = "no safe wrapper; without CLONE_VM it is a fork, and there is one thread")]
    // SAFETY: `args` and what it points to live through the call, and the child gets copies of both.
    let child = unsafe { libc::syscall(libc::SYS_clone3, std::ptr::from_ref(&args), size_of_val(&args)) };
    match Errno::result(child).with_context(|| format!("clone3 into {into:?} as {tid:?}"))? {
        0 => Ok(prctl::set_pdeathsig(Signal::SIGKILL).context("a child that ends with its parent")?),
        child => {
            let ended =
                waitpid(Pid::from_raw(i32::try_from(child)?), None).context("waiting for the child")?;
            std::process::exit(if let WaitStatus::Exited(_, code) = ended { code } else { 1 })
        }
    }
}

/// Children that have ended and are not waited for.
pub(super) fn zombies(count: u32) -> anyhow::Result<()> {
    for _ in 0..count {
        // Dropped: the child is left alone.
        Command::new("true").stdout(Stdio::null()).spawn().context("starting a zombie")?;
    }
    Ok(())
}

/// The main thread ends; the process and its other threads do not.
pub(super) fn leave_to_threads() -> ! {
    #[allow(unsafe_code, reason = "no safe wrapper ends one thread without its destructors")]
    // SAFETY: no precondition; nothing of this stack is used by others, which were given what they need by value.
    unsafe {
        libc::syscall(libc::SYS_exit, 0);
    }
    unreachable!("a thread that has ended")
}

/// Children without end: each is busy for `on`, sleeps for `off`, is busy again and ends. They stay in the cgroup they are
/// born in, or are moved to `into` by the parent, at whatever point of their life that is.
pub(super) fn bomb(
    into: Option<&str>,
    on: Duration,
    off: Duration,
    busy: fn(Duration),
) -> anyhow::Result<()> {
    let into = into.map(Cgroup::at);
    let mut alive = 0;
    loop {
        #[allow(unsafe_code, reason = "a system call")]
        // SAFETY: there is one thread, and the child calls nothing that allocates or locks.
        let forked = unsafe { fork() }.context("fork")?;
        match forked {
            ForkResult::Child => {
                busy(on);
                std::thread::sleep(off);
                busy(on);
                // No destructors and no buffers of the parent's in a forked child.
                #[allow(unsafe_code, reason = "a system call")]
                // SAFETY: no precondition.
                unsafe {
                    libc::_exit(0)
                }
            }
            ForkResult::Parent { child } => {
                alive += 1;
                match into.as_ref().map_or(Ok(()), |cgroup| cgroup.add(child.as_raw())) {
                    // It has ended by now.
                    Err(e) if errno(&e) == Some(libc::ESRCH) => {}
                    moved => moved?,
                }
            }
        }
        while alive >= BOMBS {
            waitpid(None, None).context("waiting for a child")?;
            alive -= 1;
        }
        std::thread::sleep(millis(2));
    }
}
