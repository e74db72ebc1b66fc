//! What units' properties and drop-ins were before truepin set them.
//!
//! Problem: `SetUnitProperties` writes a drop-in and changes what systemd holds in memory; neither tells what was before,
//! and a cgroup that is made anew is born with what truepin set. Steps: before the first set of a property its value and
//! its drop-in go to a file beside the record; they leave it when they are back. Runtime properties end with the boot, so
//! a file of another boot counts for nothing.
//! Invariant: what is on disk is at least what was set.

use crate::store::parent;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};
use truepin::{CgroupPath, CpusetFile, observed::Before, units::property_of};

const SCHEMA: &str = "truepin.systemd/1";

/// The journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file operation failed.
    #[error("{operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what truepin writes.
    #[error("{}: {why}", path.display())]
    Content {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// Of one unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Its cgroup.
    pub(super) path: CgroupPath,
    /// By name.
    pub(super) properties: BTreeMap<String, First>,
}

/// Of one property.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct First {
    /// A list in the kernel's grammar.
    pub(super) value: String,
    /// The text of its runtime drop-in; none: there was none.
    pub(super) drop_in: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    schema: String,
    boot_id: String,
    units: BTreeMap<String, Entry>,
}

/// First values by unit, durable.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    boot_id: String,
    units: BTreeMap<String, Entry>,
    /// The same by cgroup and file, for every reading.
    before: Arc<Before>,
}

fn before(units: &BTreeMap<String, Entry>) -> Arc<Before> {
    let file = |name: &str| CpusetFile::ALL.into_iter().find(|f| property_of(*f) == Some(name));
    let of = |entry: &Entry| {
        let files = entry.properties.iter().filter_map(|(p, first)| Some((file(p)?, first.value.clone())));
        (entry.path.clone(), files.collect())
    };
    Arc::new(units.values().map(of).collect())
}

impl Journal {
    /// What `path` has of this boot. One that cannot be understood is an error: what it says cannot be known otherwise.
    pub fn open(path: &Path, boot_id: &str) -> Result<Self, JournalError> {
        let empty = Self {
            path: path.into(),
            boot_id: boot_id.into(),
            units: BTreeMap::new(),
            before: Arc::default(),
        };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(empty),
            Err(source) => return Err(JournalError::Io { operation: "reading", path: path.into(), source }),
        };
        let content = |why: String| JournalError::Content { path: path.into(), why };
        let document: Document = serde_json::from_str(&text).map_err(|e| content(e.to_string()))?;
        if document.schema != SCHEMA {
            return Err(content(format!("its schema is {:?} and not {SCHEMA:?}", document.schema)));
        }
        let units = if document.boot_id == boot_id { document.units } else { BTreeMap::new() };
        Ok(Self { before: before(&units), units, ..empty })
    }

    pub(super) fn units(&self) -> &BTreeMap<String, Entry> {
        &self.units
    }

    pub(super) fn before(&self) -> Arc<Before> {
        self.before.clone()
    }

    pub(super) fn knows(&self, unit: &str, property: &str) -> bool {
        self.units.get(unit).is_some_and(|e| e.properties.contains_key(property))
    }

    pub(super) fn note(
        &mut self,
        unit: &str,
        path: &CgroupPath,
        property: &str,
        first: First,
    ) -> Result<(), JournalError> {
        let fresh = || Entry { path: path.clone(), properties: BTreeMap::new() };
        let mut units = self.units.clone();
        units.entry(unit.into()).or_insert_with(fresh).properties.insert(property.into(), first);
        self.save(units)
    }

    pub(super) fn forget(&mut self, unit: &str) -> Result<(), JournalError> {
        let mut units = self.units.clone();
        units.remove(unit);
        self.save(units)
    }

    /// Only what is on disk is known.
    fn save(&mut self, units: BTreeMap<String, Entry>) -> Result<(), JournalError> {
        let path = &self.path;
        let failed = |operation| move |source| JournalError::Io { operation, path: path.clone(), source };
        let document = Document { schema: SCHEMA.into(), boot_id: self.boot_id.clone(), units };
        let mut text = serde_json::to_string_pretty(&document)
            .map_err(|e| JournalError::Content { path: self.path.clone(), why: e.to_string() })?;
        text.push('\n');
        let new = self.path.with_extension("json.new");
        let mut file = File::create(&new).map_err(failed("creating the successor of"))?;
        file.write_all(text.as_bytes()).map_err(failed("writing the successor of"))?;
        file.sync_all().map_err(failed("syncing the successor of"))?;
        fs::rename(&new, &self.path).map_err(failed("replacing"))?;
        // A rename is durable only once its directory is.
        File::open(parent(&self.path))
            .and_then(|d| d.sync_all())
            .map_err(failed("syncing the directory of"))?;
        (self.before, self.units) = (before(&document.units), document.units);
        Ok(())
    }
}
