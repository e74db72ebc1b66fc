//! `object` elements: groups, CPUs, nodes, devices.

use super::{File, HwlocError, Kind, MOST_DEVICES, MOST_NODES, Open, attributes::Attributes};
use crate::{
    cpuset::{CpuId, CpuSet},
    idset::MAX_ID,
    nodeset::NodeId,
    topology::{DeviceKind, Level, RawDevice, RawGroup, RawNode, devices::is_pci_address},
};

fn group_level(name: &str) -> Option<Level> {
    match name {
        "Cluster" => Some(Level::Cluster),
        "Book" => Some(Level::Book),
        "Drawer" => Some(Level::Drawer),
        _ => None,
    }
}

impl File<'_> {
    pub(super) fn object(&mut self, attributes: &Attributes<'_>) -> Result<Open, HwlocError> {
        let kind = attributes.get("type").unwrap_or_default();
        let own: Option<CpuSet> = self.set(attributes, "cpuset")?;
        let around = self.open.last().map(|o| (o.cpus.clone(), o.pci.clone())).unwrap_or_default();
        let level = match kind {
            "PU" | "Proc" => {
                let id = self.id(attributes, "PU", "the number of a CPU")?;
                self.cpus.insert(CpuId(id));
                None
            }
            "NUMANode" | "Node" => {
                self.node(attributes, own.clone().or_else(|| around.0.clone()))?;
                None
            }
            "Machine" | "System" => {
                self.complete |= &self.set(attributes, "complete_cpuset")?.unwrap_or_default();
                if let Some(online) = self.set(attributes, "online_cpuset")? {
                    self.online = Some(online);
                }
                None
            }
            "PCIDev" => {
                let pci = self.pci(attributes, around.0.as_ref())?;
                return Ok(Open { kind: Kind::Object, cpus: around.0, pci, id: None });
            }
            "OSDev" => {
                self.os_device(attributes, around.0.as_ref(), around.1.as_ref())?;
                None
            }
            "Package" | "Socket" => Some(Level::Package),
            "Die" => Some(Level::Die),
            "Core" => Some(Level::Core),
            "L2Cache" => Some(Level::L2),
            "L3Cache" => Some(Level::L3),
            // 1.x; type 2 is an instruction cache.
            "Cache" if attributes.get("cache_type") != Some("2") => match attributes.get("depth") {
                Some("2") => Some(Level::L2),
                Some("3") => Some(Level::L3),
                _ => None,
            },
            "Group" => attributes.get("subtype").and_then(group_level),
            _ => None,
        };
        let mut open = Open { kind: Kind::Object, cpus: None, pci: around.1, id: None };
        if own.is_some() && (level.is_some() || kind == "Group") {
            // Caches have a number in sysfs too, which the reader of sysfs has no use for.
            let is_cache = matches!(level, Some(Level::L2 | Level::L3));
            let id = if is_cache { None } else { self.number::<i64>(attributes, "os_index", "a number")? };
            // -1, printed without a sign: "no number".
            let id = id.filter(|id| *id != i64::from(u32::MAX));
            if let (Some(level), Some(cpus)) = (level, &own) {
                self.raw.groups.push(RawGroup { level, id, told_by: None, cpus: cpus.clone() });
            } else {
                (open.kind, open.id) = (Kind::Group, id);
            }
        }
        open.cpus = own.or(around.0);
        Ok(open)
    }

    /// `info` with the name `Type` in a group of 1.x.
    pub(super) fn group_type(&mut self, attributes: &Attributes<'_>) {
        let Some(open) = self.open.last_mut() else { return };
        let Some(cpus) = open.cpus.clone() else { return };
        let value = attributes.get("value").filter(|_| attributes.get("name") == Some("Type"));
        if let Some(level) = value.and_then(group_level) {
            open.kind = Kind::Object;
            let id = open.id;
            self.raw.groups.push(RawGroup { level, id, told_by: None, cpus });
        }
    }

    /// The kernel's number of a CPU or node.
    fn id(
        &self,
        attributes: &Attributes<'_>,
        element: &str,
        expected: &'static str,
    ) -> Result<u32, HwlocError> {
        let id = self.number::<u32>(attributes, "os_index", expected)?.filter(|id| *id <= MAX_ID);
        let value = attributes.get("os_index").unwrap_or_default();
        id.ok_or_else(|| self.value(element.into(), "os_index", value, expected))
    }

    fn node(&mut self, attributes: &Attributes<'_>, cpus: Option<CpuSet>) -> Result<(), HwlocError> {
        let id = self.id(attributes, "NUMANode", "the number of a NUMA node")?;
        if self.raw.nodes.len() >= MOST_NODES {
            return Err(self.bounds(format!("more than {MOST_NODES} NUMA nodes")));
        }
        let complete = self.set(attributes, "complete_cpuset")?;
        self.raw.nodes.push(RawNode {
            id: NodeId(id),
            cpus: complete.or(cpus).unwrap_or_default(),
            memory_bytes: self.number(attributes, "local_memory", "a size in bytes")?,
            distance: None,
        });
        Ok(())
    }

    /// A PCI function; its class is the beginning of `pci_type`: `0200 [8086:1521] …`, 16 of the 24 bits.
    fn pci(
        &mut self,
        attributes: &Attributes<'_>,
        cpus: Option<&CpuSet>,
    ) -> Result<Option<String>, HwlocError> {
        let Some(address) = attributes.get("pci_busid").filter(|a| is_pci_address(a)) else {
            return Ok(None);
        };
        let class = attributes.get("pci_type").and_then(|t| t.split(' ').next());
        let class = class.filter(|c| c.len() == 4).and_then(|c| u32::from_str_radix(c, 16).ok());
        let (pci, class) = (Some(address.to_owned()), class.map(|class| class << 8));
        self.device(DeviceKind::Pci, address, class, pci.as_ref(), cpus)?;
        Ok(pci)
    }

    /// A device of the operating system: 0 block, 2 network; others are not asked for by name.
    fn os_device(
        &mut self,
        attributes: &Attributes<'_>,
        cpus: Option<&CpuSet>,
        pci: Option<&String>,
    ) -> Result<(), HwlocError> {
        let kind = match attributes.get("osdev_type") {
            Some("0") => DeviceKind::Block,
            Some("2") => DeviceKind::Net,
            _ => return Ok(()),
        };
        let Some(name) = attributes.get("name").filter(|n| !n.is_empty()) else { return Ok(()) };
        self.device(kind, name, None, pci, cpus)
    }

    fn device(
        &mut self,
        kind: DeviceKind,
        name: &str,
        class: Option<u32>,
        pci: Option<&String>,
        cpus: Option<&CpuSet>,
    ) -> Result<(), HwlocError> {
        if self.devices.len() >= MOST_DEVICES {
            return Err(self.bounds(format!("more than {MOST_DEVICES} devices")));
        }
        let (name, pci, local_cpus) = (name.into(), pci.cloned(), cpus.cloned());
        self.devices.push(RawDevice { kind, name, pci, class, node: None, local_cpus });
        Ok(())
    }
}
