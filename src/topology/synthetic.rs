//! Regular machines, for tests, examples and simulations on hardware that is not at hand.

use super::{Level, RawGroup, RawNode, RawTopology};
use crate::{
    cpuset::{CpuId, CpuSet},
    nodeset::NodeId,
};

/// How the hardware threads of a core are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numbering {
    /// All first threads, then all second threads: 0 and 8 (most firmware).
    #[default]
    ThreadsLast,
    /// The threads of a core one after the other: 0 and 1 (QEMU, POWER, arm64).
    ThreadsAdjacent,
}

/// A machine in which every package, node and cache is like the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regular {
    /// Packages.
    pub packages: u32,
    /// NUMA nodes in each package; 0 for a machine that shows no nodes.
    pub nodes: u32,
    /// L3 caches in each node (in each package if there are no nodes); 0 for none.
    pub l3: u32,
    /// Cores under each L3 (in each node if there is none).
    pub cores: u32,
    /// Hardware threads of each core.
    pub threads: u32,
    /// Order of the numbers.
    pub numbering: Numbering,
}

impl Regular {
    /// What a kernel would say: distances 10 within a node, 12 within a package, 32 beyond; 8 GiB per node.
    #[must_use]
    pub fn raw(&self) -> RawTopology {
        let (nodes, l3) = (self.nodes.max(1), self.l3.max(1));
        let cores = self.packages * nodes * l3 * self.cores;
        let threads = |core: u32| -> Vec<CpuId> {
            (0..self.threads)
                .map(|t| match self.numbering {
                    Numbering::ThreadsLast => core + t * cores,
                    Numbering::ThreadsAdjacent => core * self.threads + t,
                })
                .map(CpuId)
                .collect()
        };
        let span = |first: u32, count: u32| -> CpuSet { (first..first + count).flat_map(threads).collect() };
        let mut raw = RawTopology { source: "synthetic".into(), ..RawTopology::default() };
        let mut group = |level, id: u32, cpus: CpuSet| {
            raw.groups.push(RawGroup { level, id: Some(i64::from(id)), told_by: None, cpus });
        };
        let per_node = l3 * self.cores;
        let per_package = nodes * per_node;
        for p in 0..self.packages {
            group(Level::Package, p, span(p * per_package, per_package));
        }
        if self.l3 > 0 {
            for l in 0..self.packages * nodes * l3 {
                group(Level::L3, l, span(l * self.cores, self.cores));
            }
        }
        for core in 0..cores {
            group(Level::Core, core, span(core, 1));
        }
        for n in 0..if self.nodes > 0 { self.packages * nodes } else { 0 } {
            let distance = (0..self.packages * nodes).map(|m| match m {
                m if m == n => 10,
                m if m / nodes == n / nodes => 12,
                _ => 32,
            });
            raw.nodes.push(RawNode {
                id: NodeId(n),
                cpus: span(n * per_node, per_node),
                memory_bytes: Some(8 << 30),
                distance: Some(distance.collect()),
            });
        }
        let all = span(0, cores);
        raw.listed = all.clone();
        raw.online = Some(all.clone());
        raw.present = Some(all.clone());
        raw.possible = Some(all);
        raw.isolated = Some(CpuSet::new());
        raw
    }
}
