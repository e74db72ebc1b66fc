//! Which pod and container a cgroup is of, by its path.
//!
//! Problem: after a restart the containers that already run have to be tied to their owners, and the one thing that is
//! always there is the cgroup tree. Two drivers name it in two ways, runtimes add prefixes of their own.
//!
//! | driver | pod | container |
//! | --- | --- | --- |
//! | cgroupfs | `kubepods[/burstable\|/besteffort]/pod<uid>` | `<id>`; CRI-O: `crio-<id>` |
//! | systemd | `kubepods.slice[/…]/kubepods[-burstable\|-besteffort]-pod<uid with _>.slice` | `cri-containerd-<id>.scope`, `crio-<id>.scope`, `docker-<id>.scope` |
//!
//! A kubelet with a `--cgroup-root` (as in nested clusters) has `kubepods` one level down: `kubelet/kubepods/…`, or
//! `kubelet.slice/kubelet-kubepods.slice/…` with the names of all slices below beginning so.
//!
//! Source: kubelet 1.36 `cm/pod_container_manager_linux.go` and `cm/cgroup_manager_linux.go`; containerd
//! `getCgroupsPath`; CRI-O `cgmgr`.
//! Steps: find the pod's directory among the path's parts, below one named `kubepods`; what lies directly below it is
//! a container. Invariant: a path that fits no form is nobody's: nothing is guessed.

use crate::{cgroup::CgroupPath, containers::ContainerId};

/// What a path says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A pod's cgroup.
    Pod {
        /// The pod's uid.
        uid: String,
    },
    /// A container's (or a pod sandbox's).
    Container {
        /// The pod's uid.
        uid: String,
        /// The container's id.
        id: ContainerId,
    },
}

/// Reads a path below the cgroup2 mount. `None` for what is no pod's, and for what lies inside a container.
#[must_use]
pub fn place(path: &CgroupPath) -> Option<Place> {
    let parts: Vec<&str> = path.as_str().split('/').collect();
    let root = parts.iter().position(|p| *p == "kubepods" || after_root(p) == Some("kubepods.slice"))?;
    let at = (root + 1..parts.len()).find(|i| pod_uid(parts[*i]).is_some())?;
    let uid = pod_uid(parts[at])?;
    match &parts[at + 1..] {
        [] => Some(Place::Pod { uid }),
        [one] => Some(Place::Container { uid, id: container_id(one)? }),
        _ => None,
    }
}

/// Whether pods may lie below: the directories to walk through.
#[must_use]
pub fn leads_to_pods(name: &str) -> bool {
    matches!(name, "kubelet" | "kubelet.slice" | "kubepods" | "burstable" | "besteffort")
        || matches!(
            after_root(name),
            Some("kubepods.slice" | "kubepods-burstable.slice" | "kubepods-besteffort.slice")
        )
}

/// A slice's name without the one of the cgroup root of a kubelet: `kubelet-kubepods.slice` is `kubepods.slice` there.
fn after_root(name: &str) -> Option<&str> {
    name.strip_suffix(".slice")?;
    Some(name.strip_prefix("kubelet-").unwrap_or(name))
}

fn pod_uid(name: &str) -> Option<String> {
    let uid = match after_root(name).and_then(|n| n.strip_suffix(".slice")) {
        Some(slice) => {
            let slice = slice.strip_prefix("kubepods-")?;
            let pod =
                ["burstable-pod", "besteffort-pod", "pod"].iter().find_map(|p| slice.strip_prefix(p))?;
            // systemd has dashes for its own hierarchy.
            pod.replace('_', "-")
        }
        None => name.strip_prefix("pod")?.to_owned(),
    };
    let fits = !uid.is_empty() && uid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
    fits.then_some(uid)
}

fn container_id(name: &str) -> Option<ContainerId> {
    let scope = name.strip_suffix(".scope");
    let bare = scope.unwrap_or(name);
    let known = ["cri-containerd-", "crio-", "docker-", "libpod-"];
    let id = known.iter().find_map(|p| bare.strip_prefix(p)).unwrap_or(bare);
    // CRI-O's monitor process has a scope beside its container's.
    if id.starts_with("conmon") || scope.is_some() && id == bare {
        return None;
    }
    let hex = id.len() >= 12 && id.chars().all(|c| c.is_ascii_hexdigit());
    hex.then(|| id.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "5f1c3f0e-0000-4000-8000-0000deadbeef";

    fn read(text: &str) -> Option<Place> {
        place(&text.parse().unwrap())
    }

    #[test]
    fn both_drivers() {
        let under = UID.replace('-', "_");
        let pods = [
            format!("kubepods/pod{UID}"),
            format!("kubepods/burstable/pod{UID}"),
            format!("kubepods/besteffort/pod{UID}"),
            format!("kubepods.slice/kubepods-pod{under}.slice"),
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice"),
            format!("kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice"),
            // kind and other nested kubelets.
            format!("kubelet/kubepods/pod{UID}"),
            format!("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice"),
            format!(
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{under}.slice"
            ),
        ];
        for pod in &pods {
            let mut way = pod.split('/').rev().skip(1);
            assert!(way.all(leads_to_pods), "{pod}");
            assert_eq!(read(pod), Some(Place::Pod { uid: UID.into() }), "{pod}");
            for name in [
                ID.to_owned(),
                format!("cri-containerd-{ID}.scope"),
                format!("crio-{ID}.scope"),
                format!("docker-{ID}.scope"),
                format!("crio-{ID}"),
            ] {
                let path = format!("{pod}/{name}");
                let id: ContainerId = ID.parse().unwrap();
                assert_eq!(read(&path), Some(Place::Container { uid: UID.into(), id }), "{path}");
                assert_eq!(read(&format!("{path}/inner")), None);
            }
            for name in [
                format!("crio-conmon-{ID}.scope"),
                format!("unknown-{ID}.scope"),
                format!("{ID}.scope"),
                "container".into(),
                "init.scope".into(),
            ] {
                assert_eq!(read(&format!("{pod}/{name}")), None, "{pod}/{name}");
            }
        }
        for other in [
            "system.slice/podman.service".to_owned(),
            "kubepods".into(),
            "kubepods/burstable".into(),
            format!("pod{UID}/{ID}"),
            "kubepods.slice/kubepods-burstable.slice".into(),
            "kubepods/pod".into(),
        ] {
            assert_eq!(read(&other), None, "{other}");
        }
    }
}
