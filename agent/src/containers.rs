//! The pods and containers that the cgroup tree has, with names from where the runtimes keep their bundles.
//!
//! Steps: walk down the directories that lead to pods (two levels), list each pod's children; a container that is not
//! known yet gets its name from a file that the operator gives, from the annotations of its OCI bundle, or from the runtime
//! where one may be asked ([`Scanner::look`]). What cannot be found out stays without a name: a finding, never an error.
//! Cost: one directory read for each pod; bundles are read once for each container.

use crate::cri::{Cri, Said};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use truepin::{
    CgroupId, CgroupPath, Owner,
    containers::{ContainerId, ContainerMap},
    kubepods::{self, Place},
    reconcile::Sighting,
};

/// Where bundles are, below the root: containerd, CRI-O (running, and at rest).
const BUNDLES: [&str; 3] = [
    "run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}/config.json",
    "run/containers/storage/overlay-containers/{id}/userdata/config.json",
    "var/lib/containers/storage/overlay-containers/{id}/userdata/config.json",
];
/// A bundle's configuration is some 20 KiB; anything far beyond is something else.
const MAX_BUNDLE: u64 = 4 << 20;

/// The tree could not be read.
#[derive(Debug, thiserror::Error)]
#[error("reading {}", path.display())]
pub struct TreeError {
    /// The directory.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// `--containers FILE` could not be used.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    /// It cannot be read.
    #[error("reading {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is something else.
    #[error("{}: expected a JSON array of [container id, pod uid, name]", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// Names by container id, as an operator gives them.
pub type Names = BTreeMap<String, (String, String)>;

/// Reads a JSON array of `[container id, pod uid, name]`.
pub fn names(path: &Path) -> Result<Names, NamesError> {
    let text = fs::read(path).map_err(|source| NamesError::Read { path: path.into(), source })?;
    let rows: Vec<(String, String, String)> =
        serde_json::from_slice(&text).map_err(|source| NamesError::Json { path: path.into(), source })?;
    Ok(rows.into_iter().map(|(id, uid, name)| (id, (uid, name))).collect())
}

/// What a look at the tree gave.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tree {
    /// Uids of pods.
    pub pods: BTreeSet<String>,
    /// Their containers, sandboxes left out.
    pub containers: Vec<Sighting>,
}

/// Where to look.
#[derive(Debug)]
pub struct Scanner {
    /// The root cgroup's directory.
    pub cgroups: PathBuf,
    /// Where the runtimes' directories are; `/` but for tests.
    pub root: PathBuf,
    /// Given by the operator.
    pub names: Names,
    /// The runtime, if it may be asked.
    pub cri: Option<Cri>,
    /// Sandboxes, which are nobody's containers.
    sandboxes: BTreeSet<ContainerId>,
}

#[derive(Deserialize)]
struct Bundle {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// What an annotation says.
enum Named {
    Container(String),
    Sandbox,
    Unknown,
}

impl Scanner {
    /// Nothing is read yet.
    #[must_use]
    pub fn new(cgroups: &Path, root: &Path, names: Names) -> Self {
        Self { cgroups: cgroups.into(), root: root.into(), names, cri: None, sandboxes: BTreeSet::new() }
    }

    /// The containers that the tree has now, as far as their names can be found out: id to pod uid and name.
    pub fn running(&mut self, known: &ContainerMap) -> Result<Names, TreeError> {
        let named = self.scan(known)?.containers.into_iter().filter_map(|c| {
            let name = c.name.or_else(|| match &known.get(&c.id)?.owner {
                Owner::Pod { container, .. } => Some(container.clone()),
                _ => None,
            })?;
            Some((c.id.into(), (c.uid, name)))
        });
        Ok(named.collect())
    }

    /// Looks. `known` containers keep their names.
    pub fn scan(&mut self, known: &ContainerMap) -> Result<Tree, TreeError> {
        let mut tree = Tree::default();
        let mut found: Vec<(ContainerId, String, CgroupPath, CgroupId)> = Vec::new();
        let mut queue = vec![CgroupPath::root()];
        while let Some(dir) = queue.pop() {
            for (name, id) in self.children(&dir)? {
                let Ok(path) = dir.child(&name) else { continue };
                match kubepods::place(&path) {
                    Some(Place::Pod { uid }) => {
                        tree.pods.insert(uid);
                        queue.push(path);
                    }
                    Some(Place::Container { uid, id: container }) => found.push((container, uid, path, id)),
                    None if kubepods::leads_to_pods(&name) => queue.push(path),
                    None => {}
                }
            }
        }
        let there: BTreeSet<&str> = found.iter().map(|(id, ..)| id.as_str()).collect();
        self.sandboxes.retain(|s| there.contains(s.as_str()));
        if let Some(cri) = &mut self.cri {
            cri.retain(&there);
        }
        for (id, uid, path, cgroup) in found {
            let name = if known.contains_key(&id) {
                None
            } else {
                match self.name(&id, &uid) {
                    Named::Container(name) => Some(name),
                    Named::Sandbox => continue,
                    Named::Unknown => None,
                }
            };
            tree.containers.push(Sighting { id, uid, name, path, cgroup });
        }
        tree.containers.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    /// Looks, and has the runtime asked about containers that have no name yet; those that it was not yet heard about are
    /// left out. `now_ns` is `CLOCK_MONOTONIC`.
    pub fn look(&mut self, known: &ContainerMap, now_ns: u64) -> Result<Tree, TreeError> {
        let scanned = self.scan(known);
        let Some(cri) = &mut self.cri else { return scanned };
        match scanned {
            Ok(mut tree) => {
                let nameless = |c: &Sighting| c.name.is_none() && !known.contains_key(&c.id);
                let of = tree.containers.iter().filter(|c| nameless(c));
                cri.want(of.map(|c| (c.id.clone(), c.uid.clone())), now_ns);
                tree.containers.retain(|c| !(nameless(c) && cri.is_pending(&c.id)));
                Ok(tree)
            }
            Err(error) => {
                cri.want_nothing();
                Err(error)
            }
        }
    }

    /// The cgroup of one container, and its pod, wherever it is.
    pub fn find(&mut self, id: &ContainerId, known: &ContainerMap) -> Result<Option<Sighting>, TreeError> {
        Ok(self.scan(known)?.containers.into_iter().find(|c| c.id == *id))
    }

    fn children(&self, dir: &CgroupPath) -> Result<Vec<(String, CgroupId)>, TreeError> {
        let path = self.cgroups.join(dir.as_str());
        let gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound && !dir.is_root();
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(e) if gone(&e) => return Ok(Vec::new()),
            Err(source) => return Err(TreeError { path, source }),
        };
        let mut children = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| TreeError { path: path.clone(), source })?;
            // One that is removed meanwhile is not there.
            let Ok(meta) = entry.metadata() else { continue };
            if let Some(name) = entry.file_name().to_str().filter(|_| meta.is_dir()) {
                children.push((name.to_owned(), CgroupId(meta.ino())));
            }
        }
        children.sort();
        Ok(children)
    }

    fn name(&mut self, id: &ContainerId, uid: &str) -> Named {
        if let Some((_, name)) = self.names.get(id.as_str()).filter(|(u, _)| u == uid) {
            return Named::Container(name.clone());
        }
        if self.sandboxes.contains(id) {
            return Named::Sandbox;
        }
        let bundle = BUNDLES.iter().find_map(|b| self.bundle(&b.replace("{id}", id.as_str())));
        let asked = || match self.cri.as_ref()?.said(id)? {
            Said::Container { uid: of, name } => (of == uid).then(|| Named::Container(name.clone())),
            Said::Sandbox => Some(Named::Sandbox),
        };
        let named = bundle.or_else(asked);
        if matches!(named, Some(Named::Sandbox)) {
            self.sandboxes.insert(id.clone());
        }
        named.unwrap_or(Named::Unknown)
    }

    fn bundle(&self, path: &str) -> Option<Named> {
        let path = self.root.join(path);
        let size = fs::metadata(&path).ok()?.len();
        if size > MAX_BUNDLE {
            tracing::warn!("{}: {size} bytes are too many for a bundle's configuration", path.display());
            return None;
        }
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!("{}: {error}", path.display());
                return None;
            }
        };
        let bundle: Bundle = match serde_json::from_slice(&text) {
            Ok(bundle) => bundle,
            Err(error) => {
                tracing::warn!("{}: {error}", path.display());
                return None;
            }
        };
        let of = |keys: &[&str]| keys.iter().find_map(|k| bundle.annotations.get(*k)).cloned();
        let kind = of(&["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]);
        if kind.as_deref() == Some("sandbox") {
            return Some(Named::Sandbox);
        }
        of(&["io.kubernetes.cri.container-name", "io.kubernetes.container.name"]).map(Named::Container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_bundles_files_and_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let id = |n: u32| format!("{n:064x}");
        let put = |path: String, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let pod = "cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu_1.slice";
        for n in 0..6 {
            fs::create_dir_all(dir.path().join(format!("{pod}/cri-containerd-{}.scope", id(n)))).unwrap();
        }
        fs::create_dir_all(dir.path().join("cgroup/system.slice/podx/deep")).unwrap();
        let bundle = |n: u32, text: &str| {
            put(format!("run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json", id(n)), text);
        };
        bundle(0, r#"{"ociVersion":"1","annotations":{"io.kubernetes.cri.container-type":"sandbox"}}"#);
        bundle(
            1,
            r#"{"annotations":{"io.kubernetes.cri.container-type":"container","io.kubernetes.cri.container-name":"db"}}"#,
        );
        put(
            format!("run/containers/storage/overlay-containers/{}/userdata/config.json", id(2)),
            r#"{"annotations":{"io.kubernetes.container.name":"web"}}"#,
        );
        bundle(3, "not json");
        put("names".into(), &format!(r#"[["{}","u-1","given"],["{}","other","not ours"]]"#, id(4), id(5)));
        let names = names(&dir.path().join("names")).unwrap();
        let mut scanner = Scanner::new(&dir.path().join("cgroup"), dir.path(), names);
        let tree = scanner.scan(&ContainerMap::new()).unwrap();
        assert_eq!(tree.pods, BTreeSet::from(["u-1".to_owned()]));
        let seen: Vec<(String, Option<&str>)> =
            tree.containers.iter().map(|c| (c.id.to_string(), c.name.as_deref())).collect();
        assert_eq!(
            seen,
            [(id(1), Some("db")), (id(2), Some("web")), (id(3), None), (id(4), Some("given")), (id(5), None)]
        );
        assert_eq!(scanner.scan(&ContainerMap::new()).unwrap(), tree);
        let found = scanner.find(&id(2).parse().unwrap(), &ContainerMap::new()).unwrap().unwrap();
        assert!(found.path.as_str().ends_with(&format!("cri-containerd-{}.scope", id(2))));
        assert!(scanner.find(&id(9).parse().unwrap(), &ContainerMap::new()).unwrap().is_none());
        put("bad".into(), r#"{"a":1}"#);
        assert!(super::names(&dir.path().join("bad")).unwrap_err().to_string().contains("array of"));
        assert!(super::names(&dir.path().join("none")).is_err());
        let mut gone = Scanner::new(&dir.path().join("gone"), dir.path(), Names::new());
        assert!(gone.scan(&ContainerMap::new()).is_err());
    }
}
