//! The balance against a plain walk over all subsets, as the kubelet does it; and choices that can be checked by hand.

use super::{
    KubeletCounts, KubeletMachine, Label, Labels, OptionsError, StaticOptions, TakeError, allocate,
    balance::{Balanced, Outcome, balanced},
    check_smt, reserved, take,
};
use crate::{CpuId, CpuSet, NodeId, NodeSet};

/// Rounded to thousandths on the way and at the end, in binary fractions.
fn deviation(free: &[i64]) -> f64 {
    let thousandths = |x: f64| (x * 1000.0).round() / 1000.0;
    let as_float = |n: usize| f64::from(u32::try_from(n).unwrap());
    let values: Vec<f64> = free.iter().map(|f| f64::from(i32::try_from(*f).unwrap())).collect();
    let mean = thousandths(values.iter().sum::<f64>() / as_float(values.len()));
    thousandths((values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / as_float(values.len())).sqrt())
}

/// All `k` of `list`, in order.
fn subsets(list: &[usize], k: usize) -> Vec<Vec<usize>> {
    if k == 0 {
        return vec![Vec::new()];
    }
    let Some((first, rest)) = list.split_first() else { return Vec::new() };
    let with = subsets(rest, k - 1).into_iter().map(|tail| [vec![*first], tail].concat());
    with.chain(subsets(rest, k)).collect()
}

/// What the kubelet does for one number of nodes.
fn walked(free: &[usize], k: usize, n: usize, group: usize) -> Outcome {
    let all: Vec<usize> = (0..free.len()).collect();
    let share = n / k / group * group;
    let mut best: Option<(f64, Balanced)> = None;
    for nodes in subsets(&all, k) {
        if best.as_ref().is_some_and(|(deviation, _)| *deviation == 0.0) {
            break;
        }
        let groups: usize = nodes.iter().map(|at| free[*at] / group).sum();
        if groups * group < n || nodes.iter().any(|at| free[*at] < share) {
            continue;
        }
        let mut left: Vec<i64> = free.iter().map(|f| i64::try_from(*f).unwrap()).collect();
        for at in &nodes {
            left[*at] -= i64::try_from(share).unwrap();
        }
        let group_size = i64::try_from(group).unwrap();
        let remainder = i64::try_from(n - share * k).unwrap();
        let mut local: Option<(f64, Vec<usize>)> = (remainder == 0).then(|| (deviation(&left), Vec::new()));
        let may: Vec<usize> = nodes.iter().copied().filter(|at| left[*at] >= group_size).collect();
        for size in (1..=may.len()).rev().filter(|_| remainder > 0) {
            for subset in subsets(&may, size) {
                if subset.iter().map(|at| left[*at]).sum::<i64>() < remainder {
                    continue;
                }
                let (mut left, mut remainder) = (left.clone(), remainder);
                while remainder > 0 {
                    let before = remainder;
                    for at in &subset {
                        if remainder > 0 && left[*at] >= group_size {
                            left[*at] -= group_size;
                            remainder -= group_size;
                        }
                    }
                    if remainder == before {
                        return Outcome::Endless;
                    }
                }
                let deviation = deviation(&left);
                if local.as_ref().is_none_or(|(best, _)| deviation < *best) {
                    local = Some((deviation, subset));
                }
            }
        }
        if let Some((deviation, extra)) = local
            && best.as_ref().is_none_or(|(best, _)| deviation < *best)
        {
            best = Some((deviation, Balanced { nodes, share, extra }));
        }
    }
    best.map_or(Outcome::None, |(_, balanced)| Outcome::Found(balanced))
}

/// Sebastiano Vigna's splitmix64: the same cases in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(limit).unwrap()).unwrap()
    }
}

#[test]
fn as_balanced_as_by_walking_all_subsets() {
    let mut random = Random(1);
    let (mut found, mut none, mut endless, mut several_rounds) = (0, 0, 0, 0);
    for case in 0..60_000 {
        // A third of the cases in groups, and with nodes enough for remainders that can be missed.
        let ragged = random.below(3) == 0;
        let nodes = if ragged { 4 + random.below(5) } else { 1 + random.below(8) };
        let group = if ragged { 2 + random.below(3) } else { [1, 1, 2, 3][random.below(4)] };
        // Small ranges for ties; large ones with a few nodes nearly alike for deviations that differ by less than what
        // they are rounded to.
        let most = [4, 12, 40, 400, 40_000][random.below(5)];
        let alike = if most > 400 { 1 + random.below(most) } else { 0 };
        let even = !ragged && random.below(3) == 0;
        let free: Vec<usize> = (0..nodes)
            .map(|_| match alike {
                1.. if random.below(2) == 0 => alike + random.below(4),
                _ => 1 + random.below(most),
            })
            .map(|free| if even { free.next_multiple_of(group) } else { free })
            .collect();
        let groups = free.iter().sum::<usize>() / group;
        if groups == 0 {
            continue;
        }
        let n = (1 + random.below(groups)) * group;
        let k = 1 + random.below(nodes.min(n / group));
        let expected = walked(&free, k, n, group);
        let got = balanced(&free, k, n, group);
        assert_eq!(got, expected, "case {case}: {n} in groups of {group} from {k} of {free:?}");
        match got {
            Outcome::None => none += 1,
            Outcome::Endless => endless += 1,
            Outcome::Found(balanced) => {
                found += 1;
                let remainder = (n - balanced.share * k) / group;
                several_rounds += usize::from(remainder > balanced.extra.len());
            }
        }
    }
    println!("{found} found ({several_rounds} of them with several rounds), {none} none, {endless} endless");
    assert!(found > 25_000 && none > 10_000 && endless > 50 && several_rounds > 2_000);
}

/// CPUs from 0 on; of each (core, socket, node, cache).
fn labels(cpus: u32, of: impl Fn(u32) -> (u32, u32, u32, u32)) -> Labels {
    let label = |cpu| {
        let (core, socket, node, uncore) = of(cpu);
        let id = i64::from;
        Label { cpu: CpuId(cpu), core: id(core), socket: id(socket), node: NodeId(node), uncore: id(uncore) }
    };
    Labels::new((0..cpus).map(label).collect())
}

fn machine(cpus: u32, of: impl Fn(u32) -> (u32, u32, u32, u32)) -> KubeletMachine {
    let labels = labels(cpus, of);
    let counts = labels.counts();
    KubeletMachine::labelled(&labels, counts)
}

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn nodes(text: &str) -> NodeSet {
    text.parse().unwrap()
}

fn options(names: &str) -> StaticOptions {
    StaticOptions::parse(names.split(',').filter(|n| !n.is_empty())).unwrap()
}

fn taken(machine: &KubeletMachine, names: &str, available: &str, n: usize) -> String {
    take(machine, options(names), &set(available), n).map_or_else(|e| e.to_string(), |cpus| cpus.to_string())
}

fn near(machine: &KubeletMachine, names: &str, affinity: &str, n: usize) -> String {
    let (none, all) = (CpuSet::new(), machine.cpus().clone());
    let affinity = nodes(affinity);
    let result = allocate(machine, options(names), &none, &all, &none, Some(&affinity), n);
    result.map_or_else(|e| e.to_string(), |cpus| cpus.to_string())
}

/// One socket with four nodes of 4 CPUs.
fn nodes_in_a_socket() -> KubeletMachine {
    machine(16, |cpu| (cpu / 2 * 2, 0, cpu / 4, cpu / 4))
}

/// Two nodes with two sockets of 4 CPUs each.
fn sockets_in_a_node() -> KubeletMachine {
    machine(16, |cpu| (cpu / 2 * 2, cpu / 4, cpu / 8, cpu / 4))
}

#[test]
fn by_node_where_a_socket_has_several() {
    let machine = nodes_in_a_socket();
    // By socket, the affinity would hold every CPU, and the lowest would be taken.
    assert_eq!(near(&machine, "", "2", 4), "8-11");
    assert_eq!(near(&machine, "", "2", 6), "0-1,8-11");
    assert_eq!(near(&machine, "align-by-socket", "2", 4), "0-3");
    // Evenly over sockets would be all from the one there is: 0-5.
    assert_eq!(taken(&machine, "distribute-cpus-across-numa", "0-15", 6), "0-2,4-6");
    assert_eq!(taken(&machine, "distribute-cpus-across-numa,full-pcpus-only", "0-15", 6), "0-5");
    // A whole node fits, a whole socket does not: node 1 is the least free that holds it.
    assert_eq!(taken(&machine, "", "0-2,4-15", 4), "4-7");
    // A node with fewer free comes first, though the socket's lowest CPUs are elsewhere.
    assert_eq!(taken(&machine, "", "0-7,10-15", 2), "10-11");
}

#[test]
fn by_node_where_a_node_has_several_sockets() {
    let machine = sockets_in_a_node();
    // By socket, node 1 would be socket 1: 4-7.
    assert_eq!(near(&machine, "", "1", 4), "8-11");
    assert_eq!(near(&machine, "", "1", 8), "8-15");
    assert_eq!(near(&machine, "align-by-socket", "0", 6), "0-5");
    // Evenly over two sockets would be 0-2,4-6; one node holds all 6.
    assert_eq!(taken(&machine, "distribute-cpus-across-numa", "0-15", 6), "0-5");
    assert_eq!(taken(&machine, "distribute-cpus-across-numa", "0-15", 10), "0-4,8-12");
    // The whole node 1 before two whole sockets of two nodes.
    assert_eq!(taken(&machine, "", "0-3,8-15", 8), "8-15");
}

#[test]
fn what_is_overwritten_in_the_kubelet_is_not_here() {
    // Two sockets, 8 nodes, 384 CPUs: it takes nodes 0-2 and 7.
    let machine = machine(384, |cpu| (cpu % 192, cpu % 192 / 96, cpu % 192 / 24, cpu % 192 / 8));
    assert_eq!(taken(&machine, "distribute-cpus-across-numa", "0-383", 192), "0-95,192-287");
}

#[test]
fn uneven_cores_by_what_is_true() {
    // Two cores with two threads, eight with one: 12 / 10 = 1 on average.
    let hybrid = machine(12, |cpu| (if cpu < 4 { cpu / 2 * 2 } else { cpu }, 0, 0, 0));
    // The kubelet takes CPU 0 for a free core, and with it CPU 1, which is not available.
    assert_eq!(taken(&hybrid, "", "0,4-6", 2), "4-5");
    assert_eq!(taken(&hybrid, "full-pcpus-only", "0,3,4-6", 3), "4-6");
    assert_eq!(
        take(&hybrid, options("full-pcpus-only"), &set("0,3,4"), 3),
        Err(TakeError::Unaccounted { requested: 3, available: 3 })
    );
    // 4 from cores of 2 and 1 available threads that are whole.
    assert_eq!(taken(&hybrid, "full-pcpus-only", "0-2,4", 3), "0-1,4");
}

#[test]
fn one_sibling_offline_ends() {
    // Four nodes of three cores; one thread of one core in each of three nodes is taken: leftovers of single CPUs.
    let machine = machine(24, |cpu| (cpu / 2 * 2, 0, cpu / 6, 0));
    let names = "distribute-cpus-across-numa,full-pcpus-only";
    for n in (2..=20).step_by(2) {
        let available = set("0-4,6-10,12-16,18-23");
        match take(&machine, options(names), &available, n) {
            Ok(cpus) => assert!(cpus.len() == n && cpus.is_subset(&available), "{n}: {cpus}"),
            Err(error) => assert!(n > 18, "{n}: {error}"),
        }
    }
}

#[test]
fn what_smt_refuses() {
    let machine = nodes_in_a_socket();
    let check = |names, reserved, n| check_smt(&machine, options(names), &set(reserved), &set("0-15"), n);
    assert_eq!(check("full-pcpus-only", "0", 14), Ok(()));
    assert_eq!(check("", "0", 15), Ok(()));
    let odd = TakeError::SmtAlignment { requested: 3, cpus_per_core: 2 };
    assert_eq!(check("full-pcpus-only", "0", 3), Err(odd));
    // The sibling of the reserved CPU does not count either.
    let few = TakeError::NotEnoughPhysical { requested: 16, available: 14, cpus_per_core: 2 };
    assert_eq!(check("full-pcpus-only", "0", 16), Err(few));
}

#[test]
fn reserved_by_count() {
    let machine = sockets_in_a_node();
    let by_count = |names, n| reserved(&machine, options(names), n).map(|cpus| cpus.to_string());
    assert_eq!(by_count("", 3), Ok("0-2".into()));
    assert_eq!(by_count("distribute-cpus-across-numa", 9), Ok("0-4,8-11".into()));
    assert_eq!(by_count("", 0), Ok(String::new()));
    assert_eq!(by_count("", 17), Err(TakeError::NotEnough { requested: 17, available: 16 }));
}

#[test]
fn options_that_exclude_each_other() {
    let excluded = [
        ["full-pcpus-only", "distribute-cpus-across-cores"],
        ["distribute-cpus-across-numa", "distribute-cpus-across-cores"],
        ["prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"],
        ["prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"],
    ];
    for a in StaticOptions::NAMES {
        for b in StaticOptions::NAMES.into_iter().filter(|b| *b != a) {
            let refused = excluded.contains(&[a, b]) || excluded.contains(&[b, a]);
            let parsed = StaticOptions::parse([a, b]);
            assert_eq!(parsed.is_err(), refused, "{a} {b}");
            if let Ok(options) = parsed {
                assert_eq!(options.names().count(), 2);
            }
        }
    }
    let unknown = StaticOptions::parse(["full-pcpus"]);
    assert_eq!(unknown, Err(OptionsError::Unknown { name: "full-pcpus".into() }));
}

#[test]
fn declared_counters_that_are_0() {
    let labels = labels(16, |cpu| (cpu / 2 * 2, cpu / 8, cpu / 8, cpu / 4));
    let counts = KubeletCounts { cpus: 0, cores: 0, sockets: 0, nodes: 0, uncores: 0 };
    let machine = KubeletMachine::labelled(&labels, counts);
    for names in [
        "",
        "full-pcpus-only,prefer-align-cpus-by-uncorecache",
        "distribute-cpus-across-numa,full-pcpus-only",
    ] {
        for n in 0..=16 {
            let cpus = take(&machine, options(names), &set("0-15"), n).unwrap();
            assert_eq!(cpus.len(), n);
        }
    }
}

#[test]
fn numbers_of_the_kernel_where_they_tell_groups_apart() {
    use crate::topology::{Level, RawGroup, RawTopology};
    let group = |level, id, cpus: &str| RawGroup { level, id, told_by: None, cpus: set(cpus) };
    let mut raw = RawTopology { online: Some(set("0-3")), ..RawTopology::default() };
    raw.groups.push(group(Level::Package, Some(1), "0-1"));
    raw.groups.push(group(Level::Package, Some(0), "2-3"));
    let machine = KubeletMachine::new(&crate::CpuTopology::assemble(&raw).unwrap());
    assert_eq!(
        machine.sockets().map(|(id, cpus)| (id, cpus.to_string())).collect::<Vec<_>>(),
        [(0, "2-3".into()), (1, "0-1".into())]
    );
    // Socket 0 comes first, though its CPUs are the higher ones.
    assert_eq!(taken(&machine, "", "0-3", 2), "2-3");
    // Without nodes, all is node 0.
    assert_eq!(machine.nodes().map(|(id, cpus)| (id, cpus.len())).collect::<Vec<_>>(), [(NodeId(0), 4)]);

    raw.groups.iter_mut().for_each(|g| g.id = Some(7));
    let machine = KubeletMachine::new(&crate::CpuTopology::assemble(&raw).unwrap());
    assert_eq!(taken(&machine, "", "0-3", 2), "0-1");
}

#[test]
fn a_request_is_placed_or_refused() {
    use super::place;
    use crate::{
        Owner,
        placement::RefusalKind,
        request::{AlignmentPolicy, Isolation, Request},
        topology::synthetic::{Numbering, Regular},
    };
    // Cores are (0,8), (1,9), ...; node 0 has the first four.
    let numbering = Numbering::ThreadsLast;
    let regular = Regular { packages: 1, nodes: 2, l3: 1, cores: 4, threads: 2, numbering };
    let topology = crate::CpuTopology::assemble(&regular.raw()).unwrap();
    let machine = KubeletMachine::new(&topology);
    let placed = |cpus, whole_cores, near: &str, affinity: Option<&str>, free: &str| {
        let request = Request {
            owner: Owner::Run("x".into()),
            cpus,
            numa: AlignmentPolicy::BestEffort,
            whole_cores,
            near: nodes(near),
            isolation: Isolation::Auto,
            memory: 0,
        };
        let (allocatable, free) = (set("1-15"), set(free));
        let affinity = affinity.map(nodes);
        let sets = (&allocatable, &free);
        place(&topology, &machine, StaticOptions::default(), sets, &request, affinity.as_ref())
            .map(|placed| placed.cpus.to_string())
            .map_err(|refusal| refusal.kind)
    };
    assert_eq!(placed(4, false, "", None, "1-15"), Ok("1-2,9-10".into()));
    assert_eq!(placed(4, false, "", Some("1"), "1-15"), Ok("4-5,12-13".into()));
    assert_eq!(placed(1, false, "", None, "0-15"), Ok("8".into()));
    assert_eq!(placed(1, false, "", None, "0"), Err(RefusalKind::NotEnough));
    assert_eq!(placed(0, false, "", None, "1-15"), Err(RefusalKind::Nothing));
    let unknown = RefusalKind::UnknownNodes { nodes: nodes("5") };
    assert_eq!(placed(1, false, "5", None, "1-15"), Err(unknown));
    let odd = RefusalKind::NotWholeCores { below: Some(2), above: Some(4) };
    assert_eq!(placed(3, true, "", None, "1-15"), Err(odd));
    // 15 are free, but one is the sibling of what is not allocatable.
    assert_eq!(placed(14, true, "", None, "1-15"), Ok("1-7,9-15".into()));
    assert_eq!(placed(14, true, "", None, "1-14"), Err(RefusalKind::NotEnoughWholeCores));
}
