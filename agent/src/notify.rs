//! What the service manager is told (`sd_notify(3)`): datagrams to the socket that `NOTIFY_SOCKET` names.
//!
//! `READY=1` when the loop runs and has converged once, `STATUS=`, `STOPPING=1`, and `WATCHDOG=1` from the loop alone: a
//! loop that hangs falls silent though the socket's threads live, and the manager starts the agent anew. Own code, since
//! it is one datagram; a static binary must not bring libsystemd.

use std::{
    env,
    ffi::OsString,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// The way to the manager; does nothing where there is none.
#[derive(Debug, Default)]
pub struct Notify {
    to: Option<(UnixDatagram, SocketAddr)>,
    /// Half of what the manager waits for.
    period_ns: Option<u64>,
    next_ns: u64,
}

/// The environment is wrong, or there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// A value that is none.
    #[error("{variable}={value:?} is not understood")]
    Variable {
        /// Which.
        variable: &'static str,
        /// Its value.
        value: OsString,
    },
    /// A system call failed.
    #[error("telling the service manager")]
    Io(#[from] io::Error),
}

impl Notify {
    /// As the manager has set it up: `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID`.
    pub fn from_env() -> Result<Self, NotifyError> {
        let Some(socket) = env::var_os("NOTIFY_SOCKET") else { return Ok(Self::default()) };
        let address = address(&socket)?;
        let number = |variable| match env::var_os(variable) {
            None => Ok(None),
            Some(value) => match value.to_str().and_then(|v| v.parse::<u64>().ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(NotifyError::Variable { variable, value }),
            },
        };
        let ours = number("WATCHDOG_PID")?.is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC")?.filter(|usec| ours && *usec > 0);
        let period_ns = watchdog.map(|usec| usec.saturating_mul(1000) / 2);
        Ok(Self { to: Some((UnixDatagram::unbound()?, address)), period_ns, next_ns: 0 })
    }

    /// Says it; lines `NAME=VALUE`. A manager that cannot be reached acts by itself: it is logged.
    pub fn say(&self, lines: &str) {
        if let Some((socket, address)) = &self.to
            && let Err(error) = socket.send_to_addr(lines.as_bytes(), address)
        {
            tracing::error!("telling the service manager {lines:?}: {error}");
        }
    }

    /// When the next sign of life is due.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        self.period_ns.map(|_| self.next_ns)
    }

    /// A sign of life, when one is due.
    pub fn alive(&mut self, now_ns: u64) {
        if let Some(period) = self.period_ns
            && now_ns >= self.next_ns
        {
            self.next_ns = now_ns.saturating_add(period);
            self.say("WATCHDOG=1");
        }
    }
}

/// A path, or behind `@` a name in the abstract namespace.
fn address(socket: &OsString) -> Result<SocketAddr, NotifyError> {
    let wrong = || NotifyError::Variable { variable: "NOTIFY_SOCKET", value: socket.clone() };
    match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name).map_err(|_| wrong()),
        [b'/', ..] => SocketAddr::from_pathname(socket).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> Option<String> {
        let mut bytes = [0; 100];
        let read = socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..read]).into_owned())
    }

    #[test]
    fn signs_of_life_come_when_they_are_due() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        let to = Some((UnixDatagram::unbound().unwrap(), address(&path.into_os_string()).unwrap()));
        let mut notify = Notify { to, period_ns: Some(10), next_ns: 0 };
        notify.say("READY=1");
        assert_eq!(heard(&socket).as_deref(), Some("READY=1"));
        notify.alive(5);
        assert_eq!((heard(&socket).as_deref(), notify.due_ns()), (Some("WATCHDOG=1"), Some(15)));
        notify.alive(14);
        assert_eq!(heard(&socket), None);
        notify.alive(15);
        assert_eq!(heard(&socket).as_deref(), Some("WATCHDOG=1"));
        // Without a watchdog nothing is due, and without a manager nothing is said.
        let mut none = Notify::default();
        none.alive(u64::MAX);
        none.say("READY=1");
        assert_eq!((none.due_ns(), heard(&socket)), (None, None));
    }

    #[test]
    fn addresses() {
        assert!(address(&"@name".into()).unwrap().as_abstract_name().is_some());
        assert!(address(&"/run/n".into()).unwrap().as_pathname().is_some());
        for bad in ["", "run/n", "vsock:2:1"] {
            let error = address(&bad.into()).unwrap_err().to_string();
            assert!(error.contains("NOTIFY_SOCKET") && error.contains(bad), "{error}");
        }
    }
}
