//! hwloc's XML (`lstopo --of xml`), versions 1.x and 2.x.
//!
//! Problem: the machines of bug reports and of clusters that nobody may log into come as this file.
//! Steps: one pass over the elements with a stack of open ones; objects become statements about groups, `PU`s the
//! online CPUs, `NUMANode`s the nodes, `distances2` (2.x) or `distances` (1.x) the kernel's latencies, devices get the CPUs of
//! the object that holds their bridge.
//! Source: hwloc's manual, "Importing and exporting topologies from/to XML files", and its DTDs `hwloc.dtd`, `hwloc2.dtd`.
//!
//! What the format does not say stays unknown: `present`, `possible`, `isolated` and `nohz_full` always; offline CPUs in 2.x,
//! where they look like CPUs that the writing process was not allowed to use. What hwloc adds is believed: a node 0 on
//! machines whose kernel shows none, memory-only nodes near some CPUs (of nodes with the same CPUs, the lowest has them).
//!
//! Invariants: no entity is expanded but the five of XML, nothing is fetched; depth, size and numbers are bounded.

mod attributes;
mod matrix;
mod objects;

use super::{RawDevice, RawTopology};
use crate::cpuset::CpuSet;
use attributes::Attributes;
use matrix::Matrix;
use quick_xml::{
    events::{BytesStart, Event},
    reader::Reader,
};

/// Bytes of a file at most. 2048 CPUs are 4 MB.
pub const LONGEST: usize = 64 << 20;
/// Open elements at most. A real file has 20.
const DEEPEST: usize = 200;
/// NUMA nodes at most: the kernel's `MAX_NUMNODES`.
const MOST_NODES: usize = 1024;
/// Devices at most: each takes a set of CPUs, however short its text.
const MOST_DEVICES: usize = 16_384;

/// Why a text is no machine.
#[derive(Debug, thiserror::Error)]
pub enum HwlocError {
    /// Not well-formed.
    #[error("{source_name}: byte {position}: not well-formed XML")]
    Xml {
        /// Where the text was read.
        source_name: String,
        /// Place in the text.
        position: u64,
        /// What is wrong.
        source: quick_xml::Error,
    },
    /// XML of something else, or of a version that is not known.
    #[error("{source_name}: no hwloc topology of version 1 or 2: {found}")]
    Other {
        /// Where the text was read.
        source_name: String,
        /// What it is instead.
        found: String,
    },
    /// Ends before its last element does, or nests deeper or is longer than any machine.
    #[error("{source_name}: {what}")]
    Bounds {
        /// Where the text was read.
        source_name: String,
        /// What is too much or too little.
        what: String,
    },
    /// A value that is not what it should be.
    #[error("{source_name}: {element}: {attribute} {value:?} is not {expected}")]
    Value {
        /// Where the text was read.
        source_name: String,
        /// The element and its `type`.
        element: String,
        /// The attribute or text.
        attribute: &'static str,
        /// What it holds (shortened).
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
}

/// Reads a file's text; `source_name` is for messages.
pub fn parse(text: &str, source_name: &str) -> Result<(RawTopology, Vec<RawDevice>), HwlocError> {
    let mut file = File::new(source_name);
    if text.len() > LONGEST {
        return Err(file.bounds(format!("longer than {LONGEST} bytes")));
    }
    let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
    let broken = |source, position| HwlocError::Xml { source_name: source_name.into(), position, source };
    loop {
        let event = reader.read_event().map_err(|e| broken(e, reader.error_position()))?;
        match event {
            Event::Start(tag) => file.open(&tag)?,
            Event::Empty(tag) => {
                file.open(&tag)?;
                file.close();
            }
            Event::End(_) => file.close(),
            Event::Text(text) => file.text(&text)?,
            Event::Eof => break,
            // Nothing that is read here needs either, and half a number must not pass for one.
            Event::GeneralRef(_) | Event::CData(_) => file.text("&")?,
            // The document type is named, and never fetched.
            Event::DocType(_) | Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
        }
    }
    file.finish()
}

/// An element that is open.
#[derive(Default)]
struct Open {
    /// `object`, or another name that matters here.
    kind: Kind,
    /// The CPUs of the object itself, or of the nearest one around that has some.
    cpus: Option<CpuSet>,
    /// The PCI function of the object itself, or around it.
    pci: Option<String>,
    /// The kernel's number of a [`Kind::Group`].
    id: Option<i64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    #[default]
    Other,
    Object,
    /// An object that is a group and has not said of what: in 1.x an `info` in it does.
    Group,
    /// `distances2` over NUMA nodes by the kernel's numbers.
    Matrix,
    /// `indexes` in it.
    Indexes,
    /// `u64values` in it.
    Values,
    /// `distances` (1.x).
    OldMatrix,
}

struct File<'a> {
    source_name: &'a str,
    raw: RawTopology,
    devices: Vec<RawDevice>,
    open: Vec<Open>,
    /// A root element came.
    begun: bool,
    cpus: CpuSet,
    complete: CpuSet,
    /// 1.x: online CPUs, those that are not allowed included.
    online: Option<CpuSet>,
    matrix: Matrix,
}

fn name_of(tag: &BytesStart<'_>) -> String {
    shortened(tag.name().as_ref())
}

fn shortened(text: &str) -> String {
    if text.chars().nth(80).is_none() { text.into() } else { text.chars().take(80).chain(['…']).collect() }
}

impl<'a> File<'a> {
    fn new(source_name: &'a str) -> Self {
        Self {
            source_name,
            raw: RawTopology { source: source_name.into(), ..RawTopology::default() },
            devices: Vec::new(),
            open: Vec::new(),
            begun: false,
            cpus: CpuSet::new(),
            complete: CpuSet::new(),
            online: None,
            matrix: Matrix::default(),
        }
    }

    fn bounds(&self, what: String) -> HwlocError {
        HwlocError::Bounds { source_name: self.source_name.into(), what }
    }

    fn value(
        &self,
        element: String,
        attribute: &'static str,
        value: &str,
        expected: &'static str,
    ) -> HwlocError {
        let (source_name, value) = (self.source_name.into(), shortened(value));
        HwlocError::Value { source_name, element, attribute, value, expected }
    }

    fn open(&mut self, tag: &BytesStart<'_>) -> Result<(), HwlocError> {
        if self.open.len() >= DEEPEST {
            return Err(self.bounds(format!("elements nest deeper than {DEEPEST}")));
        }
        let name = tag.name();
        if self.open.is_empty() {
            self.root(tag)?;
            self.open.push(Open::default());
            return Ok(());
        }
        let around = self.open.last().map(|o| o.kind).unwrap_or_default();
        let open = match (name.as_ref(), around) {
            ("object", _) => {
                let attributes = Attributes::of(tag, self)?;
                self.object(&attributes)?
            }
            ("info", Kind::Group) => {
                let attributes = Attributes::of(tag, self)?;
                self.group_type(&attributes);
                Open::default()
            }
            ("distances2", _) => {
                let attributes = Attributes::of(tag, self)?;
                self.matrix_of(&attributes)
            }
            ("indexes", Kind::Matrix) => Open { kind: Kind::Indexes, ..Open::default() },
            ("u64values", Kind::Matrix) => Open { kind: Kind::Values, ..Open::default() },
            ("distances", _) => {
                let attributes = Attributes::of(tag, self)?;
                self.old_matrix(&attributes)?
            }
            ("latency", Kind::OldMatrix) => {
                let attributes = Attributes::of(tag, self)?;
                self.old_distance(&attributes)?;
                Open::default()
            }
            _ => Open::default(),
        };
        self.open.push(open);
        Ok(())
    }

    fn close(&mut self) {
        self.open.pop();
    }

    /// `topology`; 2.x has a version, 1.x has none.
    fn root(&mut self, tag: &BytesStart<'_>) -> Result<(), HwlocError> {
        let other = |found: String| HwlocError::Other { source_name: self.source_name.into(), found };
        if self.begun {
            return Err(other("a second root element".into()));
        }
        if tag.name().as_ref() != "topology" {
            return Err(other(format!("its root element is {:?}", name_of(tag))));
        }
        let attributes = Attributes::of(tag, self)?;
        match attributes.get("version") {
            None => {}
            Some(version) if version.starts_with("1.") || version.starts_with("2.") => {}
            Some(version) => return Err(other(format!("its version is {:?}", shortened(version)))),
        }
        self.begun = true;
        Ok(())
    }

    fn finish(mut self) -> Result<(RawTopology, Vec<RawDevice>), HwlocError> {
        if !self.begun {
            let found = "it has no element".into();
            return Err(HwlocError::Other { source_name: self.source_name.into(), found });
        }
        if !self.open.is_empty() {
            return Err(self.bounds(format!("ends inside of {} open elements", self.open.len())));
        }
        self.distances();
        let raw = &mut self.raw;
        raw.listed = self.cpus.clone();
        if let Some(online) = &self.online {
            raw.listed_offline = self.complete.difference(online).difference(&self.cpus);
            raw.listed |= &raw.listed_offline;
        }
        let silent = self.complete.difference(&raw.listed);
        if !silent.is_empty() {
            raw.notes.push(format!(
                "CPUs {silent} are named and not described: offline, or not allowed to whoever wrote the file"
            ));
        }
        raw.online = Some(self.cpus);
        Ok((self.raw, self.devices))
    }
}
