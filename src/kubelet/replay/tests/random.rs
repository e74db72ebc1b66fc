//! Random histories keep the books.

use super::*;

/// A small generator of numbers (splitmix64), so that histories are random and the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}

/// Cores of one to three threads on two nodes, where averages come to CPUs that are not free.
fn uneven(random: &mut Numbers) -> KubeletMachine {
    let mut labels = Vec::new();
    for core in 0..8_u32 {
        for _ in 0..=random.below(3) {
            let cpu = u32::try_from(labels.len()).unwrap();
            let node = core / 4;
            labels.push(Label {
                cpu: CpuId(cpu),
                core: core.into(),
                socket: node.into(),
                node: NodeId(node),
                uncore: node.into(),
            });
        }
    }
    let labels = Labels::new(labels);
    KubeletMachine::labelled(&labels, labels.counts())
}

/// Whatever happens: nobody's CPU is another pod's or in the pool, on even machines reserved CPUs are nobody's and a pod's
/// parts are in its set, and a kubelet that starts from the file knows the same.
#[test]
fn random_histories_keep_the_books() {
    let distances = far();
    let (mut let_in, mut refused, mut restarts) = (0, 0, 0);
    for seed in 0..600 {
        let mut random = Numbers(seed);
        let even = seed % 2 == 0;
        let machine = if even {
            machine(random.pick(&[1, 2, 3, 4]), random.pick(&[2, 3, 5]), random.pick(&[1, 2]))
        } else {
            uneven(&mut random)
        };
        let config = random_config(&mut random);
        let Ok(mut node) = KubeletNode::boot(&machine, &distances, config.clone(), None) else {
            // By averages another number of CPUs would be reserved.
            assert!(!even, "seed {seed}");
            continue;
        };
        for step in 0..40 {
            match random.below(10) {
                0..=5 => match node.admit(random_pod(&mut random, step)).outcome {
                    Ok(()) => let_in += 1,
                    Err(_) => refused += 1,
                },
                6 | 7 if !node.active().is_empty() => {
                    let at = random.below(node.active().len() as u64);
                    let uid = node.active()[usize::try_from(at).unwrap()].uid.clone();
                    node.run(&uid, ids(step)).unwrap();
                    if random.below(3) > 0 {
                        node.remove(&uid).unwrap();
                    }
                }
                8 => {
                    node.reconcile();
                }
                _ => {
                    // A pod that lost its set, or a pool that is empty, keeps the kubelet down.
                    let file = node.checkpoint();
                    let before = node.sets().clone();
                    if node.restart(config.clone()).is_err() {
                        break;
                    }
                    restarts += 1;
                    assert_eq!((node.sets(), node.checkpoint()), (&before, file));
                    let uids: Vec<String> = node.active().iter().map(|p| p.uid.clone()).collect();
                    for uid in uids {
                        node.readmit(&uid).unwrap();
                    }
                }
            }
            books(&node, &machine, even, seed);
        }
    }
    assert!(let_in > 4000 && refused > 1500 && restarts > 500, "{let_in} {refused} {restarts}");
}

fn random_config(random: &mut Numbers) -> Config {
    let policies = [
        AlignmentPolicy::None,
        AlignmentPolicy::BestEffort,
        AlignmentPolicy::Restricted,
        AlignmentPolicy::SingleNumaNode,
    ];
    let sets: [&[&str]; 6] = [
        &[],
        &["full-pcpus-only"],
        &["distribute-cpus-across-numa", "full-pcpus-only"],
        &["distribute-cpus-across-cores", "strict-cpu-reservation"],
        &["prefer-align-cpus-by-uncorecache"],
        &["distribute-cpus-across-numa"],
    ];
    Config {
        options: options(random.pick(&sets)),
        reserved: Reservation::Count(random.pick(&[1, 2])),
        policy: random.pick(&policies),
        scope: random.pick(&[Scope::Container, Scope::Pod]),
        prefer_closest: random.below(2) == 0,
        pod_level: random.below(3) == 0,
        ..config()
    }
}

fn random_pod(random: &mut Numbers, at: usize) -> Pod {
    let mut words = String::new();
    for _ in 0..=random.below(3) {
        words += random.pick(&["", "", "i:", "s:"]);
        words += random.pick(&["1", "2", "3", "4", "5", "6", "-", "~2"]);
        words += " ";
    }
    words += random.pick(&["2", "4", "1", "-"]);
    if random.below(3) == 0 {
        words += random.pick(&[" /2", " /4", " /5", " /8", " /10"]);
    }
    pod(&format!("p{at}"), &words)
}

fn books(node: &KubeletNode<'_>, machine: &KubeletMachine, even: bool, seed: u64) {
    let sets = node.sets();
    let mut taken = sets.default.clone();
    for (uid, containers) in &sets.entries {
        let mut all = CpuSet::new();
        for cpus in containers.values() {
            all |= cpus;
        }
        assert!(all.is_disjoint(&taken), "seed {seed}: {uid}");
        if even {
            assert!(all.is_disjoint(node.reserved()), "seed {seed}: {uid}");
            assert!(sets.pods.get(uid).is_none_or(|own| all.is_subset(own)), "seed {seed}: {uid}");
        }
        taken |= &all;
    }
    assert!(taken.is_subset(machine.cpus()), "seed {seed}");
}
