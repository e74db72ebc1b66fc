//! The attributes of elements, and what they hold.

use super::{File, HwlocError, name_of};
use crate::idset::IdSet;
use quick_xml::{XmlVersion, events::BytesStart};

/// The attributes that matter, whatever the element.
#[derive(Default)]
pub(super) struct Attributes<'t> {
    found: Vec<(&'static str, std::borrow::Cow<'t, str>)>,
}

const ATTRIBUTES: [&str; 20] = [
    "type",
    "os_index",
    "cpuset",
    "complete_cpuset",
    "online_cpuset",
    "local_memory",
    "depth",
    "cache_type",
    "subtype",
    "pci_busid",
    "pci_type",
    "name",
    "osdev_type",
    "version",
    "kind",
    "indexing",
    "nbobjs",
    "latency_base",
    "value",
    "bridge_type",
];

impl<'t> Attributes<'t> {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.found.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_ref())
    }

    pub(super) fn of(tag: &'t BytesStart<'_>, file: &File<'_>) -> Result<Self, HwlocError> {
        let mut found: Vec<(&'static str, std::borrow::Cow<'t, str>)> = Vec::new();
        // Without the reader's check for a name that comes twice: it takes the square of their number.
        for attribute in tag.attributes().with_checks(false) {
            let xml = |source: quick_xml::Error| HwlocError::Xml {
                source_name: file.source_name.into(),
                position: 0,
                source,
            };
            let attribute = attribute.map_err(|e| xml(e.into()))?;
            let Some(name) = ATTRIBUTES.iter().find(|n| **n == attribute.key.as_ref()) else {
                continue;
            };
            let value = attribute.normalized_value(XmlVersion::Implicit1_0).map_err(xml)?;
            if found.iter().any(|(n, _)| n == name) {
                return Err(file.value(name_of(tag), name, &value, "given once"));
            }
            found.push((name, value));
        }
        Ok(Self { found })
    }
}

impl File<'_> {
    /// The set that an attribute holds: words of 32 bits in hexadecimal, the highest first, an empty one is 0.
    pub(super) fn set<T: From<u32> + Into<u32>>(
        &self,
        attributes: &Attributes<'_>,
        name: &'static str,
    ) -> Result<Option<IdSet<T>>, HwlocError> {
        let Some(text) = attributes.get(name) else { return Ok(None) };
        let refuse = || {
            let element = attributes.get("type").unwrap_or("object").into();
            self.value(element, name, text, "a finite mask of numbers up to 65535")
        };
        let mut words = Vec::new();
        for word in text.rsplit(',') {
            let digits = word.strip_prefix("0x").unwrap_or(word);
            let value = match digits {
                "" if word.is_empty() => 0,
                // `u32::from_str_radix` takes a sign.
                _ if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) => {
                    return Err(refuse());
                }
                _ => u32::from_str_radix(digits, 16).map_err(|_| refuse())?,
            };
            words.push(value);
        }
        IdSet::from_mask(words).ok_or_else(refuse).map(Some)
    }

    pub(super) fn number<N: std::str::FromStr>(
        &self,
        attributes: &Attributes<'_>,
        name: &'static str,
        expected: &'static str,
    ) -> Result<Option<N>, HwlocError> {
        let Some(text) = attributes.get(name) else { return Ok(None) };
        let element = attributes.get("type").unwrap_or("element");
        text.parse().map(Some).map_err(|_| self.value(element.into(), name, text, expected))
    }
}
