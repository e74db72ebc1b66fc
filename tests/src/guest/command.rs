//! Running a command to its end: captured, with a limit.

use super::wait::secs;
use anyhow::Context;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    fmt,
    fs::File,
    io::{Read, Seek},
    os::unix::process::ExitStatusExt,
    process::{Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// A command that has ended.
#[derive(Debug, Clone)]
pub struct Ran {
    /// The command line, for messages.
    pub line: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
}

impl Ran {
    /// The exit status as a shell gives it: 128 + signal for a killed command.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// Itself when the exit status is `code`, else an error that shows all of it.
    pub fn expect(self, code: i32) -> anyhow::Result<Self> {
        anyhow::ensure!(self.code() == code, "expected exit status {code} of {self}");
        Ok(self)
    }

    /// Itself when the exit status is 0.
    pub fn ok(self) -> anyhow::Result<Self> {
        self.expect(0)
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (exit status {})", self.line, self.code())?;
        for (name, text) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !text.trim().is_empty() {
                write!(f, "\n{name}: {}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

/// Runs a command with a limit of 30 s.
pub fn run(program: &str, args: &[&str]) -> anyhow::Result<Ran> {
    run_for(secs(30), Command::new(program).args(args))
}

/// Runs a command to its end; one that is not done after `limit` is killed, and that is an error with what it said.
///
/// The output goes through files, not pipes: a child of the command that lives on cannot hold the reader up.
pub fn run_for(limit: Duration, command: &mut Command) -> anyhow::Result<Ran> {
    let line = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|a| a.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ");
    let [mut out, mut err] = [memory_file()?, memory_file()?];
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone().context("the output file")?)
        .stderr(err.try_clone().context("the error file")?)
        .spawn()
        .with_context(|| format!("starting `{line}`"))?;
    let start = Instant::now();
    let ended = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("waiting for `{line}`"))? {
            break Some(status);
        }
        if start.elapsed() > limit {
            break None;
        }
        sleep(Duration::from_millis(5));
    };
    let status = if let Some(status) = ended {
        status
    } else {
        child.kill().with_context(|| format!("killing `{line}`"))?;
        child.wait().with_context(|| format!("waiting for the killed `{line}`"))?
    };
    let ran = Ran { line, status, stdout: read(&mut out)?, stderr: read(&mut err)? };
    anyhow::ensure!(ended.is_some(), "not done after {} s: {ran}", limit.as_secs());
    Ok(ran)
}

/// A file without a name, gone with its last descriptor.
fn memory_file() -> anyhow::Result<File> {
    let fd = memfd_create(c"output", MFdFlags::MFD_CLOEXEC).context("a file for the output")?;
    Ok(File::from(fd))
}

fn read(file: &mut File) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).context("reading captured output")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::wait::millis;

    #[test]
    fn captures_and_judges() {
        let ran = run("sh", &["-c", "echo out; echo err >&2; exit 3"]).unwrap();
        assert_eq!((ran.code(), &*ran.stdout, &*ran.stderr), (3, "out\n", "err\n"));
        let error = ran.clone().ok().unwrap_err().to_string();
        assert!(error.contains("exit status 3") && error.contains("stderr: err"), "{error}");
        assert!(ran.expect(3).is_ok());
        assert_eq!(run("sh", &["-c", "kill -9 $$"]).unwrap().code(), 137);
        assert!(run("no-such-program", &[]).is_err());
    }

    #[test]
    fn a_limit_holds_though_a_grandchild_keeps_the_output_open() {
        let start = Instant::now();
        let error = run_for(millis(200), Command::new("sh").args(["-c", "echo begun; sleep 7 & sleep 7"]));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("not done") && error.contains("begun"), "{error}");
        assert!(start.elapsed() < secs(5));
    }
}
