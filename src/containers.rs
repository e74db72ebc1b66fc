//! Which container is whose: evidence that ties a runtime's container ids to owners and cgroups.
//!
//! A container id changes whenever its container is made anew, the owner does not; so the id is never a key of an
//! assignment, and a map that is lost costs nobody any CPUs.

use crate::{cgroup::CgroupId, checkpoint::Extra, owner::Owner};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};

/// A container's id as its runtime gives it, without a scheme such as `containerd://`; as a rule 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

/// Why a text is not a container id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a container id: {reason}")]
pub struct ContainerIdError {
    /// The text as given.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl ContainerId {
    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ContainerId {
    type Err = ContainerIdError;

    fn from_str(text: &str) -> Result<Self, ContainerIdError> {
        let refuse = |reason| Err(ContainerIdError { text: text.into(), reason });
        if text.is_empty() || text.len() > 255 {
            return refuse("it must have 1 to 255 bytes");
        }
        if text.chars().any(|c| c.is_control() || c.is_whitespace() || c == '/') {
            return refuse("it contains a blank, a control character or a slash");
        }
        Ok(Self(text.into()))
    }
}

impl TryFrom<String> for ContainerId {
    type Error = ContainerIdError;

    fn try_from(text: String) -> Result<Self, ContainerIdError> {
        text.parse()
    }
}

impl From<ContainerId> for String {
    fn from(id: ContainerId) -> Self {
        id.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What is known of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEntry {
    /// Whose it is.
    pub owner: Owner,
    /// Its cgroup, once it was seen in this boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<CgroupId>,
    /// Fields of newer minor versions of the record.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Containers by id.
pub type ContainerMap = BTreeMap<ContainerId, ContainerEntry>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        for good in ["c1", &"0123456789abcdef".repeat(4)] {
            assert_eq!(good.parse::<ContainerId>().unwrap().as_str(), good);
        }
        for bad in ["", "a b", "a/b", "a\n", &"x".repeat(256)] {
            assert!(bad.parse::<ContainerId>().is_err(), "{bad:?}");
        }
    }
}
