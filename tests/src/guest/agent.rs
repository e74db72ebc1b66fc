//! truepin as its users see it: the command, the agent's life, the socket.

use super::{
    command::{Ran, run, run_for},
    task::Task,
    wait::{millis, secs, wait_until},
};
use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

/// The command, in the guest's `PATH`.
pub const TRUEPIN: &str = "truepin";
/// The configuration that [`Agent::start`] writes.
pub const CONFIG: &str = "/etc/truepin/config.toml";
/// The agent's socket.
pub const SOCKET: &str = "/run/truepin/truepin.sock";
/// The durable state.
pub const CHECKPOINT: &str = "/var/lib/truepin/checkpoint.json";
/// What the agent prints, of all its lives in one scenario.
const LOG: &str = "/run/truepin-agent.log";
/// Long enough for start-up with BPF programs under TCG (seconds), short enough to end a scenario that hangs.
const STARTS_WITHIN: Duration = secs(30);

/// Runs `truepin ARGS…` with a limit of 30 s.
pub fn truepin(args: &[&str]) -> anyhow::Result<Ran> {
    run(TRUEPIN, args)
}

/// Runs `truepin COMMAND -o json ARGS…`; the exit status and the document on its standard output. No JSON there is an
/// error that shows everything.
pub fn truepin_json(args: &[&str]) -> anyhow::Result<(i32, Value)> {
    let (command, rest) = args.split_first().context("a command for truepin")?;
    let ran = run_for(secs(30), Command::new(TRUEPIN).args([command, "-o", "json"]).args(rest))?;
    let answer = serde_json::from_str(&ran.stdout).with_context(|| format!("no JSON from {ran}"))?;
    Ok((ran.code(), answer))
}

/// A running agent; killed (SIGKILL) when dropped.
pub struct Agent {
    child: Child,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Agent {
    /// Writes `config` (TOML; may be empty) to [`CONFIG`], starts `truepin agent`, and waits until it answers.
    pub fn start(config: &str) -> anyhow::Result<Self> {
        Self::start_with(config, &[])
    }

    /// As [`Self::start`], with more arguments, such as `["--mode", "audit"]`.
    pub fn start_with(config: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::start_env(config, arguments, &[])
    }

    /// As [`Self::start_with`], with environment variables.
    pub fn start_env(config: &str, arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let dir = Path::new(CONFIG).parent().context("a folder for the configuration")?;
        fs::create_dir_all(dir).with_context(|| format!("mkdir {}", dir.display()))?;
        fs::write(CONFIG, config).with_context(|| format!("writing {CONFIG}"))?;
        fs::write(LOG, "").with_context(|| format!("writing {LOG}"))?;
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        let environment: Vec<(String, String)> =
            environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut agent = Self { child: spawn(&arguments, &environment)?, arguments, environment };
        agent.answers()?;
        Ok(agent)
    }

    /// Its process.
    #[must_use]
    pub fn task(&self) -> Task {
        Task(self.child.id().cast_signed())
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.task().is_alive()
    }

    /// Everything it has printed so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(LOG).unwrap_or_else(|e| format!("({LOG}: {e})"))
    }

    /// SIGTERM, and waits up to 20 s for its end.
    pub fn stop(mut self) -> anyhow::Result<ExitStatus> {
        self.task().signal(Signal::SIGTERM)?;
        let mut status = None;
        wait_until("the agent's end after SIGTERM", secs(20), || {
            status = self.child.try_wait().context("waiting for the agent")?;
            Ok(status.is_some())
        })
        .with_context(|| format!("its log:\n{}", self.log()))?;
        status.context("an ended agent without status")
    }

    /// `kill -9`, and waits for its end.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill().context("kill -9 of the agent")?;
        self.child.wait().context("waiting for the killed agent")?;
        Ok(())
    }

    /// Starts it again after [`Self::kill`] (or its own death) with the configuration as it is on disk now.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        self.spawn_again()?;
        self.answers()
    }

    /// As [`Self::start_again`], without waiting for its answer.
    pub fn spawn_again(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_running(), "the agent still runs");
        self.child = spawn(&self.arguments, &self.environment)?;
        Ok(())
    }

    fn answers(&mut self) -> anyhow::Result<()> {
        let (child, mut last) = (&mut self.child, String::new());
        let waited = wait_until("the agent's answer", STARTS_WITHIN, || {
            if let Some(status) = child.try_wait().context("waiting for the agent")? {
                anyhow::bail!("the agent ended at its start: {status}");
            }
            match http("GET", "/v1/status", None) {
                Ok((200, _)) => return Ok(true),
                Ok((status, body)) => last = format!("HTTP status {status}: {body}"),
                Err(e) => last = format!("{e:#}"),
            }
            Ok(false)
        });
        waited.with_context(|| format!("last answer: {last}; its log:\n{}", self.log()))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Already ended, or the machine is cleaned up right after anyhow.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(arguments: &[String], environment: &[(String, String)]) -> anyhow::Result<Child> {
    let log =
        File::options().append(true).create(true).open(LOG).with_context(|| format!("opening {LOG}"))?;
    let errors = log.try_clone().with_context(|| format!("opening {LOG}"))?;
    Command::new(TRUEPIN)
        .arg("agent")
        .args(arguments)
        .envs(environment.iter().map(|(k, v)| (k, v)))
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .context("starting the agent")
}

/// One request over the agent's socket: status and body (JSON null where there is none).
pub fn http(method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<(u16, Value)> {
    http_at(Path::new(SOCKET), method, path, body)
}

fn http_at(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<(u16, Value)> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(secs(10))).context("a limit for the answer")?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: truepin\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).with_context(|| format!("{method} {path}"))?;
    answer(BufReader::new(stream)).with_context(|| format!("{method} {path}"))
}

/// One HTTP/1.1 answer. Its body ends where `Content-Length` says, or else with the connection.
fn answer(mut from: impl BufRead) -> anyhow::Result<(u16, Value)> {
    let mut line = String::new();
    from.read_line(&mut line).context("reading the status line")?;
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
    let status = status.with_context(|| format!("no status in {line:?}"))?;
    let mut length = None;
    loop {
        line.clear();
        let read = from.read_line(&mut line).context("reading the header")?;
        anyhow::ensure!(read > 0, "the header does not end");
        let Some((key, value)) = line.trim_end().split_once(':') else { break };
        match key.to_ascii_lowercase().as_str() {
            "content-length" => length = Some(value.trim().parse::<u64>().context("Content-Length")?),
            "transfer-encoding" => anyhow::bail!("Transfer-Encoding {value} is not understood here"),
            _ => {}
        }
    }
    let mut body = String::new();
    let read = from.take(length.unwrap_or(u64::MAX)).read_to_string(&mut body).context("reading the body")?;
    anyhow::ensure!(length.is_none_or(|l| l == read as u64), "the body ends after {read} bytes");
    if body.trim().is_empty() {
        return Ok((status, Value::Null));
    }
    Ok((status, serde_json::from_str(&body).with_context(|| format!("body {body:?}"))?))
}

/// Waits until the agent's `path` answers with something for which `good` holds; the answer.
pub fn wait_for_answer(
    path: &str,
    limit: Duration,
    mut good: impl FnMut(&Value) -> bool,
) -> anyhow::Result<Value> {
    let mut last = Value::Null;
    let waited = wait_until("the answer", limit, || {
        let (status, answer) = http("GET", path, None)?;
        anyhow::ensure!(status == 200, "GET {path}: HTTP status {status}: {answer}");
        last = answer;
        if !good(&last) {
            std::thread::sleep(millis(100));
            return Ok(false);
        }
        Ok(true)
    });
    waited.with_context(|| format!("last answer of {path}: {last}"))?;
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_request_and_its_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(peer.try_clone().unwrap());
            let mut first = String::new();
            reader.read_line(&mut first).unwrap();
            let mut body = Vec::new();
            let mut line = String::new();
            let mut length = 0;
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(n) = line.strip_prefix("Content-Length: ") {
                    length = n.trim().parse().unwrap();
                }
                line.clear();
            }
            body.resize(length, 0);
            reader.read_exact(&mut body).unwrap();
            peer.write_all(b"HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\n\r\n{\"a\":1}")
                .unwrap();
            (first, String::from_utf8(body).unwrap())
        });
        let body = serde_json::json!({"cpus": 2});
        let (status, answer) = http_at(&path, "POST", "/v1/owners", Some(&body)).unwrap();
        assert_eq!((status, answer["a"].as_i64()), (409, Some(1)));
        assert_eq!(server.join().unwrap(), ("POST /v1/owners HTTP/1.1\r\n".into(), "{\"cpus\":2}".into()));
    }

    #[test]
    fn answers_that_are_none() {
        let of = |text: &str| answer(text.as_bytes());
        for bad in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\n\r\n{",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        ] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
        assert_eq!(of("HTTP/1.1 204 No Content\r\n\r\n").unwrap(), (204, Value::Null));
        let kept_open = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]the next answer";
        assert_eq!(of(kept_open).unwrap(), (200, serde_json::json!([])));
    }
}
