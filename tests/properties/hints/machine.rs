//! Machines and requests by chance.

use super::plain::{self, List};
use truepin::{
    CpuId, CpuSet, CpuTopology, NodeId, NodeSet,
    hints::{Demand, Device, Distances, NodeMemory},
    placement::kubelet::KubeletMachine,
    topology::{Level, RawGroup, RawNode, RawTopology},
};

/// The generator of `SplitMix64`, <https://prng.di.unimi.it/splitmix64.c> (public domain).
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap_or(0)
    }

    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A CPU: its node (place) and socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cpu {
    pub(super) node: usize,
    pub(super) socket: usize,
}

/// A machine. CPUs are numbered from 0.
#[derive(Debug)]
pub(super) struct World {
    /// Numbers, ascending.
    pub(super) nodes: Vec<u32>,
    pub(super) cpus: Vec<Cpu>,
    pub(super) rows: Vec<Vec<u32>>,
    machine: KubeletMachine,
}

impl World {
    pub(super) fn random(chance: &mut Chance, most_nodes: usize) -> Self {
        let n = 1 + chance.below(most_nodes);
        let mut number = u32::from(chance.one_in(4));
        let stride = [1, 1, 2, 5, 40][chance.below(5)];
        let nodes: Vec<u32> = (0..n)
            .map(|_| {
                let this = number;
                number += 1 + u32::try_from(chance.below(stride)).unwrap_or(0);
                this
            })
            .collect();
        let cpu_less = chance.one_in(3);
        let (even, shape) = (chance.one_in(2), chance.below(4));
        let usual = 1 + chance.below(4);
        let mut cpus = Vec::new();
        for node in 0..n {
            if node > 0 && cpu_less && chance.one_in(2) {
                continue;
            }
            let here = if even { usual } else { 1 + chance.below(4) };
            for at in 0..here {
                let socket = match shape {
                    0 => node,
                    1 => node / 2,
                    2 => 2 * node + at % 2,
                    _ => chance.below(3),
                };
                cpus.push(Cpu { node, socket });
            }
        }
        // Numbers of a node's CPUs are not in a row.
        for at in (1..cpus.len()).rev() {
            cpus.swap(at, chance.below(at + 1));
        }
        let kind = chance.below(3);
        let rows: Vec<Vec<u32>> =
            (0..n).map(|a| (0..n).map(|b| distance(chance, kind, a, b)).collect()).collect();
        let machine = kubelet_machine(&nodes, &cpus, &rows);
        Self { nodes, cpus, rows, machine }
    }

    pub(super) fn all(&self) -> NodeSet {
        self.nodes.iter().copied().map(NodeId).collect()
    }

    pub(super) fn every(&self) -> u32 {
        (1 << self.nodes.len()) - 1
    }

    /// Bit k is the place k.
    pub(super) fn mask(&self, set: &NodeSet) -> u32 {
        let known = set.iter().map(|n| self.nodes.iter().position(|id| *id == n.0));
        known.fold(0, |mask, at| mask | at.map_or(1 << 31, |at| 1 << at))
    }

    pub(super) fn set(&self, mask: u32) -> NodeSet {
        (0..self.nodes.len()).filter(|at| mask >> at & 1 == 1).map(|at| NodeId(self.nodes[at])).collect()
    }

    pub(super) fn distances(&self) -> Distances {
        Distances::new(self.nodes.iter().map(|n| NodeId(*n)).zip(self.rows.iter().cloned()))
    }

    pub(super) fn sockets_of(&self, mask: u32) -> usize {
        let mut sockets: Vec<usize> =
            self.cpus.iter().filter(|c| mask >> c.node & 1 == 1).map(|c| c.socket).collect();
        sockets.sort_unstable();
        sockets.dedup();
        sockets.len()
    }

    pub(super) fn nodes_with_cpus(&self) -> u32 {
        self.cpus.iter().fold(0, |mask, c| mask | 1 << c.node)
    }

    pub(super) fn most_sockets_of_a_node(&self) -> usize {
        (0..self.nodes.len()).map(|at| self.sockets_of(1 << at)).max().unwrap_or(0)
    }

    pub(super) fn most_nodes_of_a_socket(&self) -> usize {
        let nodes = |socket: usize| {
            let here = self.cpus.iter().filter(|c| c.socket == socket);
            here.fold(0_u32, |mask, c| mask | 1 << c.node).count_ones() as usize
        };
        self.cpus.iter().map(|c| nodes(c.socket)).max().unwrap_or(0)
    }

    pub(super) fn has_node_without_cpus(&self) -> bool {
        self.nodes_with_cpus() != self.every()
    }

    pub(super) fn is_sparse(&self) -> bool {
        self.nodes.iter().zip(0..).any(|(id, at)| *id != at)
    }

    pub(super) fn is_asymmetric(&self) -> bool {
        (0..self.nodes.len()).any(|a| (0..a).any(|b| self.rows[a][b] != self.rows[b][a]))
    }

    fn some_cpus(&self, chance: &mut Chance, one_in: usize) -> CpuSet {
        let cpus = (0..self.cpus.len()).filter(|_| chance.one_in(one_in));
        cpus.filter_map(|c| u32::try_from(c).ok()).map(CpuId).collect()
    }
}

fn distance(chance: &mut Chance, kind: usize, a: usize, b: usize) -> u32 {
    match kind {
        _ if a == b => 10,
        0 => 20,
        1 => [12, 32][usize::from(a / 2 != b / 2)],
        _ => [11, 12, 16, 21, 32][chance.below(5)],
    }
}

#[allow(clippy::panic, reason = "a machine by chance that is none is a defect of the test")]
fn kubelet_machine(nodes: &[u32], cpus: &[Cpu], rows: &[Vec<u32>]) -> KubeletMachine {
    let of = |want: &dyn Fn(&Cpu) -> bool| -> CpuSet {
        (0..).zip(cpus).filter(|(_, cpu)| want(cpu)).map(|(id, _)| CpuId(id)).collect()
    };
    let mut raw =
        RawTopology { source: "chance".into(), online: Some(of(&|_| true)), ..RawTopology::default() };
    for socket in 0..=cpus.iter().map(|c| c.socket).max().unwrap_or(0) {
        let cpus = of(&|c| c.socket == socket);
        if !cpus.is_empty() {
            raw.groups.push(RawGroup { level: Level::Package, id: None, told_by: None, cpus });
        }
    }
    for (at, id) in nodes.iter().enumerate() {
        let cpus = of(&|c| c.node == at);
        let distance = Some(rows[at].clone());
        raw.nodes.push(RawNode { id: NodeId(*id), cpus, memory_bytes: None, distance });
    }
    match CpuTopology::assemble(&raw) {
        Ok(topology) => KubeletMachine::new(&topology),
        Err(e) => panic!("{e}"),
    }
}

/// What is asked of one resource.
#[derive(Debug)]
pub(super) enum Wish {
    Cpus {
        n: usize,
        align: bool,
        available: CpuSet,
        reusable: CpuSet,
    },
    /// Per kind: bytes, and by place what is free and what there is.
    Memory(Vec<(u64, Vec<(u64, u64)>)>),
    /// How many, and per device: places, free, reusable.
    Devices(usize, Vec<(u32, bool, bool)>),
}

impl Wish {
    pub(super) fn random(chance: &mut Chance, world: &World) -> Self {
        match chance.below(5) {
            0..3 => {
                let reusable = if chance.one_in(4) { world.some_cpus(chance, 6) } else { CpuSet::new() };
                let rarely = [2, 3, 100][chance.below(3)];
                let gone = world.some_cpus(chance, rarely);
                let all: CpuSet = (0..).zip(&world.cpus).map(|(id, _)| CpuId(id)).collect();
                let available = all.difference(&gone).difference(&reusable);
                let most = (available.len() + reusable.len()).max(1);
                let n = match chance.below(4) {
                    0 => most,
                    1 => world.cpus.len() + chance.below(2),
                    _ => 1 + chance.below(most),
                };
                Self::Cpus { n, align: chance.one_in(3), available, reusable }
            }
            3 => {
                let kind = |chance: &mut Chance| {
                    let nodes: Vec<(u64, u64)> = (0..world.nodes.len())
                        .map(|_| {
                            let total = 10 + chance.below(10) as u64;
                            (total - chance.below(11) as u64, total)
                        })
                        .collect();
                    let free: u64 = nodes.iter().map(|(free, _)| free).sum();
                    let need = 1 + chance.below(usize::try_from(free).unwrap_or(0) + 2) as u64;
                    (need, nodes)
                };
                let kinds = 1 + usize::from(chance.one_in(3));
                Self::Memory((0..kinds).map(|_| kind(chance)).collect())
            }
            _ => {
                let device = |chance: &mut Chance| {
                    let mut near = 1 << chance.below(world.nodes.len());
                    if chance.one_in(3) {
                        near |= 1 << chance.below(world.nodes.len());
                    }
                    let near = if chance.one_in(8) { 0 } else { near };
                    (near, !chance.one_in(4), chance.one_in(10))
                };
                let devices: Vec<_> = (0..=chance.below(6)).map(|_| device(chance)).collect();
                Self::Devices(1 + chance.below(devices.len()), devices)
            }
        }
    }

    /// As the library takes it.
    pub(super) fn demand(&self, world: &World) -> Option<Demand> {
        match self {
            Self::Cpus { n, align, available, reusable } => {
                Some(Demand::cpus(&world.machine, *align, available, reusable, *n))
            }
            Self::Memory(kinds) => {
                let memory = |(at, (free, total)): (usize, &(u64, u64))| NodeMemory {
                    node: NodeId(world.nodes[at]),
                    free: *free,
                    total: *total,
                };
                let lists: Vec<(u64, Vec<NodeMemory>)> = kinds
                    .iter()
                    .map(|(need, nodes)| (*need, nodes.iter().enumerate().map(memory).collect()))
                    .collect();
                let lists: Vec<(u64, &[NodeMemory])> =
                    lists.iter().map(|(n, l)| (*n, l.as_slice())).collect();
                Demand::memory(&lists)
            }
            Self::Devices(n, devices) => {
                let device = |(near, free, reusable): &(u32, bool, bool)| Device {
                    nodes: world.set(*near),
                    free: *free,
                    reusable: *reusable,
                };
                let devices: Vec<Device> = devices.iter().map(device).collect();
                Demand::devices(&world.all(), &devices, *n)
            }
        }
    }

    /// What enumeration gives.
    pub(super) fn plain(&self, world: &World) -> List {
        match self {
            Self::Cpus { n, align, available, reusable } => {
                plain::cpus(world, *align, available, reusable, *n)
            }
            Self::Memory(kinds) => plain::memory(world, kinds),
            Self::Devices(n, devices) => plain::devices(world, *n, devices),
        }
    }
}

/// A list as it might come from anywhere: any sets, any preference; `None` for no opinion.
pub(super) fn any_list(chance: &mut Chance, world: &World, longest: usize) -> Option<List> {
    if chance.one_in(8) {
        return None;
    }
    if chance.one_in(12) {
        return Some(Vec::new());
    }
    let hints = 1 + chance.below(longest);
    let narrow = chance.one_in(2);
    let hint = |chance: &mut Chance| {
        if chance.one_in(25) {
            return (None, chance.one_in(2));
        }
        let mut mask = 0_u32;
        while mask == 0 {
            mask = (0..world.nodes.len()).filter(|_| chance.one_in(2)).fold(0, |mask, at| mask | 1 << at);
        }
        (Some(mask), if narrow { mask.is_power_of_two() } else { chance.one_in(3) })
    };
    Some((0..hints).map(|_| hint(chance)).collect())
}
