//! How results and failures reach a person.

use crate::{
    api::{client::ClientError, documents::ProblemDoc},
    config::ConfigError,
    start::StartError,
    store::chain,
};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use tracing_subscriber::filter::LevelFilter;

/// A failed command: what to print and how to exit.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) code: u8,
    pub(super) text: String,
    pub(super) hint: Option<String>,
    /// An auditing agent was asked to change something.
    pub(super) is_audit: bool,
}

impl Failure {
    pub(super) fn new(code: u8, error: &(dyn std::error::Error + 'static), hint: Option<&str>) -> Self {
        Self { code, text: chain(error), hint: hint.map(Into::into), is_audit: false }
    }

    /// Prints the chain once, and what to do.
    pub(super) fn print(&self) -> u8 {
        let mut err = anstream::stderr().lock();
        let bold = anstyle::Style::new().bold();
        let red = anstyle::AnsiColor::Red.on_default().bold();
        let _ = writeln!(err, "{red}error{red:#}: {}", self.text);
        if let Some(hint) = &self.hint {
            let _ = writeln!(err, "{bold}hint{bold:#}: {hint}");
        }
        self.code
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let hint = match &error {
            ClientError::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "run it as root, or as a member of the group truepin, which may read"
            }
            _ => "start it with `truepin agent` (as root), or name its socket with --socket",
        };
        Self::new(3, &error, Some(hint))
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(2, &error, None)
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let root = nix::unistd::geteuid().is_root();
        let code =
            if matches!(error, StartError::Reserved { .. } | StartError::Strategy(_) | StartError::Choose(_))
            {
                2
            } else {
                3
            };
        Self::new(code, &error, error.hint().or((!root).then_some("run it as root")))
    }
}

impl From<Box<ProblemDoc>> for Failure {
    fn from(p: Box<ProblemDoc>) -> Self {
        let code = match (p.title.as_str(), p.status) {
            ("usage" | "audit" | "forbidden", _) => 2,
            (_, 404 | 409) => 1,
            _ => 3,
        };
        Self { code, text: p.detail, hint: p.hint, is_audit: p.title == "audit" }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(3, &error, None)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::new(3, &error, Some("the agent and this command may be of different versions"))
    }
}

/// Prints a document as indented JSON.
pub(super) fn json(document: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(document)?;
    text.push('\n');
    print(&text)
}

/// Prints text to stdout; a reader that has gone away is no failure.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    match anstream::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure { text: format!("writing to standard output: {e}"), ..Failure::from(e) }),
        Ok(()) => Ok(()),
    }
}

/// Warnings and errors, for the daemon information too; more with `-v`.
pub(super) fn log_to_stderr(verbose: u8, daemon: bool) {
    let level = match (verbose, daemon) {
        (0, false) => LevelFilter::WARN,
        (0, true) | (1, false) => LevelFilter::INFO,
        (1, true) | (2, _) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let log = tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).with_ansi(colour);
    // A line that cannot be written is lost. Saying so on the same stderr would end the agent with a panic.
    let log = log.log_internal_errors(false);
    // The journal and a terminal show times of their own.
    let started = log.without_time().with_target(false).try_init();
    drop(started); // only fails when one is there already, as in tests
}
