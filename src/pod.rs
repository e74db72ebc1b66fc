//! A pod as its orchestrator describes it, and which of its containers get CPUs of their own.
//!
//! Problem: CPUs are decided when a pod is admitted, before any container exists; all that is known then is the pod's
//! specification. Steps: quality of service from requests and limits, then one [`Request`] for each container that
//! asks for whole CPUs.
//! Source: kubelet 1.36, `pkg/apis/core/v1/helper/qos` and `cm/cpumanager/policy_static.go` (`guaranteedCPUs`).
//! Invariant: a pod that is not Guaranteed, or a fraction of a CPU, never gets exclusive CPUs; ordinary init
//! containers run in the shared pool, because they end before the CPUs of the others are used.

use crate::{
    owner::{Owner, OwnerError},
    request::{AlignmentPolicy, Isolation, Request},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A container's resources. Absent: not set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Container {
    /// Its name.
    #[serde(rename = "n")]
    pub name: String,
    /// CPU request, thousandths of a CPU.
    #[serde(rename = "req", default)]
    pub cpu_request: Option<u64>,
    /// CPU limit, thousandths of a CPU.
    #[serde(rename = "lim", default)]
    pub cpu_limit: Option<u64>,
    /// Memory request, MiB.
    #[serde(rename = "mreq", default)]
    pub memory_request: Option<u64>,
    /// Memory limit, MiB.
    #[serde(rename = "mlim", default)]
    pub memory_limit: Option<u64>,
    /// An init container that is restarted and stays (`restartPolicy: Always`).
    #[serde(default)]
    pub sidecar: bool,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// Its uid.
    pub uid: String,
    /// Init containers and sidecars, in order.
    #[serde(default)]
    pub init: Vec<Container>,
    /// Containers, in order.
    #[serde(default)]
    pub app: Vec<Container>,
    /// CPU request and limit of the whole pod, thousandths of a CPU.
    #[serde(default)]
    pub pod_cpu: Option<u64>,
}

/// Why a description is not a pod.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// Not the JSON of a pod.
    #[error("not a pod")]
    Json(#[from] serde_json::Error),
    /// A name that cannot be an owner's.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// Two containers of one name.
    #[error("pod {uid} has two containers named {name:?}")]
    Twice {
        /// The pod.
        uid: String,
        /// The name.
        name: String,
    },
    /// Nothing to run.
    #[error("pod {uid} has no containers")]
    Empty {
        /// The pod.
        uid: String,
    },
    /// More CPUs than a number can say.
    #[error(
        "container {name:?} of pod {uid} asks for {milli} thousandths of a CPU, which is no number of CPUs"
    )]
    TooMany {
        /// The pod.
        uid: String,
        /// The container.
        name: String,
        /// As given.
        milli: u64,
    },
}

/// A resource whose request, where it is set, equals its limit, which is set. The API server sets a request that is
/// absent to the limit.
fn fixed(request: Option<u64>, limit: Option<u64>) -> bool {
    limit.is_some_and(|l| l > 0 && request.is_none_or(|r| r == l))
}

impl Container {
    fn is_fixed(&self) -> bool {
        fixed(self.cpu_request, self.cpu_limit) && fixed(self.memory_request, self.memory_limit)
    }
}

impl Pod {
    /// Reads `{"uid", "init": […], "app": […]}`.
    pub fn parse(text: &[u8]) -> Result<Self, PodError> {
        let pod: Self = serde_json::from_slice(text)?;
        pod.checked()
    }

    /// The pod, if its names are distinct and can be owners'.
    pub fn checked(self) -> Result<Self, PodError> {
        let mut names = BTreeSet::new();
        for c in self.init.iter().chain(&self.app) {
            self.owner(&c.name)?;
            if !names.insert(&c.name) {
                return Err(PodError::Twice { uid: self.uid.clone(), name: c.name.clone() });
            }
        }
        if self.app.is_empty() {
            return Err(PodError::Empty { uid: self.uid });
        }
        Ok(self)
    }

    /// The owner that a container of this pod is.
    pub fn owner(&self, container: &str) -> Result<Owner, OwnerError> {
        format!("pod/{}/{container}", self.uid).parse()
    }

    /// Whether every container's CPUs and memory are fixed (quality of service Guaranteed). Pods with resources of
    /// their own are judged as the kubelet does with the gate `PodLevelResourceManagers` off: no exclusive CPUs.
    #[must_use]
    pub fn is_guaranteed(&self) -> bool {
        self.pod_cpu.is_none() && self.init.iter().chain(&self.app).all(Container::is_fixed)
    }

    /// One request for each container that gets exclusive CPUs, in the order in which they start; empty when all of
    /// the pod runs in the shared pool.
    pub fn requests(&self, numa: AlignmentPolicy, isolation: Isolation) -> Result<Vec<Request>, PodError> {
        let mut requests = Vec::new();
        if !self.is_guaranteed() {
            return Ok(requests);
        }
        for c in self.init.iter().filter(|c| c.sidecar).chain(&self.app) {
            let Some(milli) = c.cpu_limit.filter(|m| m % 1000 == 0) else { continue };
            let cpus = u32::try_from(milli / 1000).map_err(|_| PodError::TooMany {
                uid: self.uid.clone(),
                name: c.name.clone(),
                milli,
            })?;
            requests.push(Request {
                owner: self.owner(&c.name)?,
                cpus,
                numa,
                whole_cores: false,
                near: crate::nodeset::NodeSet::new(),
                isolation,
                memory: 0,
            });
        }
        Ok(requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(json: &str) -> Vec<(String, u32)> {
        let pod = Pod::parse(json.as_bytes()).unwrap();
        let all = pod.requests(AlignmentPolicy::BestEffort, Isolation::Auto).unwrap();
        all.into_iter().map(|r| (r.owner.to_string(), r.cpus)).collect()
    }

    #[test]
    fn whole_cpus_of_guaranteed_pods() {
        let c = |name: &str, req: &str, lim: &str, more: &str| {
            format!(r#"{{"n":"{name}","req":{req},"lim":{lim},"mreq":64,"mlim":64{more}}}"#)
        };
        let pod = |init: &str, app: &str| format!(r#"{{"uid":"u","init":[{init}],"app":[{app}]}}"#);
        let one = c("a", "2000", "2000", "");
        assert_eq!(requests(&pod("", &one)), [("pod/u/a".into(), 2)]);
        // An absent request is the limit.
        assert_eq!(requests(&pod("", &c("a", "null", "2000", ""))), [("pod/u/a".into(), 2)]);
        // Fractions share, and keep nobody else from exclusive CPUs.
        let two = format!("{},{one}", c("f", "1500", "1500", ""));
        assert_eq!(requests(&pod("", &two)), [("pod/u/a".into(), 2)]);
        // Sidecars come first; ordinary init containers share.
        let init = format!("{},{}", c("i", "4000", "4000", ""), c("s", "1000", "1000", ",\"sidecar\":true"));
        assert_eq!(requests(&pod(&init, &one)), [("pod/u/s".into(), 1), ("pod/u/a".into(), 2)]);
        for burstable in [
            c("a", "1000", "2000", ""),
            c("a", "null", "null", ""),
            c("a", "0", "0", ""),
            r#"{"n":"a","req":1000,"lim":1000}"#.into(),
            r#"{"n":"a","req":1000,"lim":1000,"mlim":64,"mreq":32}"#.into(),
            format!("{one},{}", c("b", "1000", "2000", "")),
        ] {
            assert_eq!(requests(&pod("", &burstable)), [], "{burstable}");
        }
        assert_eq!(
            requests(&pod(&c("i", "1", "2", ""), &one)),
            [],
            "init containers count for quality of service"
        );
        assert_eq!(requests(&format!(r#"{{"uid":"u","pod_cpu":4000,"app":[{one}]}}"#)), []);
    }

    #[test]
    fn what_is_no_pod() {
        for (json, needle) in [
            ("", "not a pod"),
            ("[]", "not a pod"),
            (r#"{"uid":"u","app":[],"more":1}"#, "not a pod"),
            (r#"{"uid":"u","app":[]}"#, "no containers"),
            (r#"{"uid":"u/v","app":[{"n":"a"}]}"#, "not an owner"),
            (r#"{"uid":"","app":[{"n":"a"}]}"#, "not an owner"),
            (r#"{"uid":"u","app":[{"n":"a"},{"n":"a"}]}"#, "two containers named \"a\""),
        ] {
            let error = Pod::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(needle), "{json}: {error}");
        }
        let many = format!(
            r#"{{"uid":"u","app":[{{"n":"a","lim":{0},"req":{0},"mlim":1,"mreq":1}}]}}"#,
            u64::MAX / 1000 * 1000
        );
        let pod = Pod::parse(many.as_bytes()).unwrap();
        assert!(matches!(
            pod.requests(AlignmentPolicy::None, Isolation::Auto),
            Err(PodError::TooMany { .. })
        ));
    }
}
