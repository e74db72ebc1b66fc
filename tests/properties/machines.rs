//! Random small machines, sound and broken.

use proptest::{collection::vec, option, prelude::*};
use truepin::{
    CpuId, CpuSet, NodeId,
    topology::{Level, RawGroup, RawNode, RawTopology},
};

/// Most CPUs of a machine: all subsets of them can be walked.
pub(crate) const CPUS: u32 = 12;
const NODES: u32 = 4;

/// Where a CPU is, by arbitrary labels; `None` where nothing is said.
#[derive(Debug, Clone)]
struct Place {
    core: Option<u32>,
    llc: Option<u32>,
    node: Option<u32>,
}

/// A machine in which cores lie within caches and caches within nodes, as hardware does it; a node may have no CPUs,
/// a core may have lost threads, CPUs may be in no node.
pub(crate) fn sound() -> impl Strategy<Value = RawTopology> {
    let core = (1..=4_u32, option::weighted(0.9, 0..2_u32), option::weighted(0.9, 0..NODES));
    let places = vec(core, 1..=6).prop_map(|cores| {
        let places = cores.into_iter().enumerate().flat_map(|(core, (threads, llc, node))| {
            let llc = llc.map(|l| l + 2 * node.unwrap_or(NODES));
            std::iter::repeat_n(Place { core: u32::try_from(core).ok(), llc, node }, threads as usize)
        });
        places.take(CPUS as usize).collect()
    });
    machine(places)
}

/// A machine whose tables are nonsense: every CPU says what it likes.
pub(crate) fn broken() -> impl Strategy<Value = RawTopology> {
    let place = (option::of(0..4_u32), option::of(0..3_u32), option::of(0..NODES))
        .prop_map(|(core, llc, node)| Place { core, llc, node });
    machine(vec(place, 1..=CPUS as usize))
}

fn machine(places: impl Strategy<Value = Vec<Place>>) -> impl Strategy<Value = RawTopology> {
    let numbers = Just((0..CPUS).collect::<Vec<_>>()).prop_shuffle();
    let distances = vec(vec(10..40_u32, NODES as usize), NODES as usize);
    (places, numbers, distances, any::<bool>()).prop_map(|(places, numbers, distances, nodes)| {
        let cpu = |at: usize| CpuId(numbers[at]);
        let group = |level, label: fn(&Place) -> Option<u32>| {
            let labels: std::collections::BTreeSet<u32> = places.iter().filter_map(label).collect();
            let places = &places;
            labels.into_iter().map(move |l| RawGroup {
                level,
                id: None,
                told_by: None,
                cpus: (0..places.len()).filter(|at| label(&places[*at]) == Some(l)).map(cpu).collect(),
            })
        };
        let groups = group(Level::Core, |p| p.core).chain(group(Level::L3, |p| p.llc)).collect();
        let node = |id: u32| RawNode {
            id: NodeId(id),
            cpus: (0..places.len()).filter(|at| places[*at].node == Some(id)).map(cpu).collect(),
            memory_bytes: None,
            distance: Some(distances[id as usize].clone()),
        };
        RawTopology {
            source: "random".into(),
            online: Some((0..places.len()).map(cpu).collect()),
            groups,
            nodes: if nodes { (0..NODES).map(node).collect() } else { Vec::new() },
            ..RawTopology::default()
        }
    })
}

/// Any subset of the numbers that a machine's CPUs may have, most of them.
pub(crate) fn most_cpus() -> impl Strategy<Value = CpuSet> {
    vec(prop::bool::weighted(0.75), CPUS as usize)
        .prop_map(|bits| (0..CPUS).filter(|c| bits[*c as usize]).map(CpuId).collect())
}
