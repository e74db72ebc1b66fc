//! Random machines: nodes in sockets, sockets in nodes, both; cores of several sizes, CPUs offline, any numbering; and
//! counters that are not true.

use proptest::{collection::vec, prelude::*, sample::select};
use truepin::{
    CpuId, NodeId,
    placement::kubelet::{KubeletCounts, Label, Labels},
};

#[derive(Debug, Clone)]
pub(crate) struct Drawn {
    pub(crate) labels: Labels,
    pub(crate) counts: KubeletCounts,
}

#[derive(Debug, Clone, Copy)]
enum Numbering {
    /// Siblings side by side.
    Adjacent,
    /// First threads of all cores, then second ones.
    Linear,
    /// By chance.
    Any,
}

#[derive(Debug, Clone, Copy)]
enum Uncore {
    Socket,
    Node,
    /// Pairs of cores.
    Pair,
    /// One for all.
    One,
}

/// Which sockets and nodes there are, as the (socket, node) that cores can be in.
fn cells() -> impl Strategy<Value = Vec<(u32, u32)>> {
    prop_oneof![
        3 => (1..=3_u32, 1..=3_u32).prop_map(|(sockets, nodes)| {
            (0..sockets * nodes).take(6).map(|node| (node / nodes, node)).collect()
        }),
        2 => (1..=3_u32, 1..=2_u32).prop_map(|(nodes, sockets)| {
            (0..nodes * sockets).map(|socket| (socket, socket / sockets)).collect()
        }),
        1 => vec((0..3_u32, 0..4_u32), 1..=4),
    ]
}

/// Sound ones, with 5 or 6 nodes in one socket.
pub(crate) fn many_nodes() -> impl Strategy<Value = Drawn> {
    (5..=6_u32, 2..=4_u32, 2..=3_u32).prop_map(|(nodes, cores, threads)| {
        let label = |cpu: u32| {
            let core = cpu / threads;
            let node = core / cores;
            Label {
                cpu: CpuId(cpu),
                core: i64::from(core),
                socket: 0,
                node: NodeId(node),
                uncore: i64::from(node),
            }
        };
        let labels = Labels::new((0..nodes * cores * threads).map(label).collect());
        let counts = labels.counts();
        Drawn { labels, counts }
    })
}

pub(crate) fn drawn() -> impl Strategy<Value = Drawn> {
    let threads = prop_oneof![
        4 => select(vec![vec![1_u32], vec![2], vec![4]]),
        3 => vec(1..=3_u32, 2..=5),
    ];
    let numbering = select(vec![Numbering::Adjacent, Numbering::Linear, Numbering::Any]);
    let uncore = select(vec![Uncore::Socket, Uncore::Node, Uncore::Pair, Uncore::One]);
    let offline = prop_oneof![2 => Just(Vec::new()), 1 => vec(0..48_usize, 1..=3)];
    let declared = prop_oneof![
        6 => Just(None),
        1 => (0..=5_usize, select(vec![0_usize, 1, 2, 3, 7])).prop_map(Some),
    ];
    let gap = select(vec![1_u32, 1, 1, 3, 9]);
    (cells(), 1..=4_usize, threads, numbering, uncore, offline, declared, gap, any::<bool>(), any::<u64>())
        .prop_map(|(cells, cores, threads, numbering, uncore, offline, declared, gap, odd_ids, seed)| {
            // (core, thread, socket, node)
            let mut cpus: Vec<(u32, u32, u32, u32)> = Vec::new();
            let mut core = 0;
            for (socket, node) in cells {
                for _ in 0..cores {
                    let size = threads[core as usize % threads.len()];
                    cpus.extend((0..size).map(|thread| (core, thread, socket, node)));
                    core += 1;
                }
            }
            match numbering {
                Numbering::Adjacent => {}
                Numbering::Linear => cpus.sort_by_key(|(core, thread, ..)| (*thread, *core)),
                Numbering::Any => cpus.sort_by_key(|(core, thread, ..)| {
                    (u64::from(core * 8 + thread) + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                }),
            }
            let kept = |at: &usize| cpus.len() == 1 || !offline.contains(at);
            let label = |(at, (core, _, socket, node)): (usize, &(u32, u32, u32, u32))| {
                let core = i64::from(*core);
                Label {
                    cpu: CpuId(u32::try_from(at).unwrap() * gap),
                    core: if odd_ids { (core * 37 + 11) % 101 } else { core },
                    socket: i64::from(*socket),
                    node: NodeId(*node),
                    uncore: match uncore {
                        Uncore::Socket => i64::from(*socket),
                        Uncore::Node => i64::from(*node),
                        Uncore::Pair => core / 2,
                        Uncore::One => 0,
                    },
                }
            };
            let mut labels: Vec<Label> =
                cpus.iter().enumerate().filter(|(at, _)| kept(at)).map(label).collect();
            if labels.is_empty() {
                labels.push(label((0, &cpus[0])));
            }
            let labels = Labels::new(labels);
            let mut counts = labels.counts();
            if let Some((which, value)) = declared {
                match which {
                    0 => counts.nodes = value,
                    1 => counts.sockets = value,
                    2 => counts.cores = value,
                    3 => counts.uncores = value,
                    4 => (counts.nodes, counts.uncores) = (0, 0),
                    _ => counts.cpus = counts.cpus.saturating_sub(value),
                }
            }
            Drawn { labels, counts }
        })
}
