//! Who holds CPUs: the key of all state.
//!
//! A container id, a cgroup id and a pid are evidence about an owner and change while the owner stays; none of
//! them is ever a key. One grammar, used in state, command line, JSON and logs:
//! `pod/<uid>/<container>`, `unit/<systemd unit>`, `cgroup/<path>`, `run/<name>`.

use crate::cgroup::CgroupPath;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The holder of an exclusive assignment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Owner {
    /// A container of a pod, by pod UID and container name (the kubelet's key since 1.18).
    Pod {
        /// Pod UID.
        uid: String,
        /// Container name.
        container: String,
    },
    /// A systemd unit.
    Unit(String),
    /// A cgroup that somebody else made.
    Cgroup(CgroupPath),
    /// A command started by `truepin run`.
    Run(String),
}

/// Why a text is not an owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an owner: {reason}")]
pub struct OwnerError {
    /// The text as given.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

/// A name goes into a directory name and into a line of text.
fn name(text: &str, what: &str, whole: &str) -> Result<String, OwnerError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.@:\\".contains(c);
    let refuse = |reason: String| Err(OwnerError { text: whole.into(), reason });
    if text.is_empty() || text.len() > 200 {
        return refuse(format!("{what} must have 1 to 200 characters"));
    }
    if let Some(c) = text.chars().find(|c| !allowed(*c)) {
        return refuse(format!("{what} contains {c:?}"));
    }
    if text.starts_with('.') {
        return refuse(format!("{what} starts with a dot"));
    }
    Ok(text.into())
}

impl FromStr for Owner {
    type Err = OwnerError;

    fn from_str(text: &str) -> Result<Self, OwnerError> {
        let refuse = |reason: String| OwnerError { text: text.into(), reason };
        let (kind, rest) = text.split_once('/').ok_or_else(|| {
            refuse("expected pod/<uid>/<container>, unit/<name>, cgroup/<path> or run/<name>".into())
        })?;
        match kind {
            "pod" => {
                let (uid, container) =
                    rest.split_once('/').ok_or_else(|| refuse("expected pod/<uid>/<container>".into()))?;
                Ok(Self::Pod {
                    uid: name(uid, "the pod uid", text)?,
                    container: name(container, "the container name", text)?,
                })
            }
            "unit" => Ok(Self::Unit(name(rest, "the unit name", text)?)),
            "run" => Ok(Self::Run(name(rest, "the name", text)?)),
            "cgroup" => {
                let path: CgroupPath =
                    rest.parse().map_err(|e: crate::cgroup::PathError| refuse(e.reason.into()))?;
                if path.is_root() {
                    Err(refuse("the root cgroup cannot own CPUs".into()))
                } else {
                    Ok(Self::Cgroup(path))
                }
            }
            _ => Err(refuse(format!("{kind:?} is none of pod, unit, cgroup, run"))),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod { uid, container } => write!(f, "pod/{uid}/{container}"),
            Self::Unit(name) => write!(f, "unit/{name}"),
            Self::Cgroup(path) => write!(f, "cgroup/{}", path.as_str()),
            Self::Run(name) => write!(f, "run/{name}"),
        }
    }
}

impl TryFrom<String> for Owner {
    type Error = OwnerError;

    fn try_from(text: String) -> Result<Self, OwnerError> {
        text.parse()
    }
}

impl From<Owner> for String {
    fn from(owner: Owner) -> Self {
        owner.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_grammar_both_ways() {
        for text in [
            "pod/1b4e28ba-2fa1-11d2-883f-0016d3cca427/app",
            "unit/postgresql@15-main.service",
            "unit/dev-disk-by\\x2did.device",
            "cgroup/machine.slice/vm-1.scope",
            "run/db",
        ] {
            assert_eq!(text.parse::<Owner>().unwrap().to_string(), text);
        }
        assert_eq!("cgroup//a/b/".parse::<Owner>().unwrap().to_string(), "cgroup/a/b");
    }

    #[test]
    fn refusals() {
        for text in [
            "",
            "db",
            "run/",
            "run/a b",
            "run/../x",
            "run/a/b",
            "pod/u",
            "pod//c",
            "cgroup/",
            "cgroup/a/../b",
            "vm/x",
        ] {
            assert!(text.parse::<Owner>().is_err(), "{text:?}");
        }
    }
}
