//! Faults on order: `TRUEPIN_FAULT=detach-switch=500ms,writers=kprobe`. The suites show with them what happens when
//! evidence is lost, and each means that another kernel would leave.

use crate::writers::Means;
use std::time::Duration;

/// The variable.
const VARIABLE: &str = "TRUEPIN_FAULT";

/// What was ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// On SIGUSR2 the switch program is detached for that long.
    pub detach_switch: Option<Duration>,
    /// The only means by which writers may be named; of the inner `None`, none.
    pub writers: Option<Option<Means>>,
    /// How many cgroups the hook on writes may watch.
    pub watched: Option<usize>,
}

/// An order that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE}: {order:?} is not understood; expected detach-switch=TIME, writers=fexit|kprobe|fanotify|none or watched=NUMBER, several with commas between"
)]
pub struct FaultError {
    order: String,
}

impl Faults {
    /// From the environment.
    pub fn ordered() -> Result<Self, FaultError> {
        match std::env::var(VARIABLE) {
            Ok(text) => Self::parse(&text),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(text)) => {
                Err(FaultError { order: text.to_string_lossy().into_owned() })
            }
        }
    }

    fn parse(text: &str) -> Result<Self, FaultError> {
        let mut faults = Self::default();
        for order in text.split(',').map(str::trim).filter(|o| !o.is_empty()) {
            let refuse = || FaultError { order: order.into() };
            match order.split_once('=').ok_or_else(refuse)? {
                ("detach-switch", time) => {
                    faults.detach_switch = Some(humantime::parse_duration(time).map_err(|_| refuse())?);
                }
                ("writers", "none") => faults.writers = Some(None),
                ("writers", name) => {
                    let means = Means::ALL.into_iter().find(|m| m.name() == name);
                    faults.writers = Some(Some(means.ok_or_else(refuse)?));
                }
                ("watched", room) => faults.watched = Some(room.parse().map_err(|_| refuse())?),
                _ => return Err(refuse()),
            }
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::Hook;

    #[test]
    fn orders() {
        let both = Faults::parse("detach-switch=500ms, writers=kprobe").unwrap();
        assert_eq!(both.detach_switch, Some(Duration::from_millis(500)));
        assert_eq!(both.writers, Some(Some(Means::Hook(Hook::Kprobe))));
        assert_eq!(Faults::parse("writers=none").unwrap().writers, Some(None));
        assert_eq!(Faults::parse("writers=fanotify").unwrap().writers, Some(Some(Means::Fanotify)));
        assert_eq!(Faults::parse("watched=16").unwrap().watched, Some(16));
        assert_eq!(Faults::parse(""), Ok(Faults::default()));
        for bad in ["writers=inotify", "watched=few", "writers", "detach-switch=soon", "detach=1s"] {
            let e = Faults::parse(bad).unwrap_err().to_string();
            assert!(e.contains(bad), "{e}");
        }
    }
}
