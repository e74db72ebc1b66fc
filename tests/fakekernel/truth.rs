//! The fake is held to the word of real kernels, without one at hand.

use crate::cpus;
use std::collections::BTreeSet;
use truepin_tests::fake::{Behaviour, FakeKernel, chance, script};

/// What real kernels answered in a guest (8 CPUs, 2 nodes) to every shipped script and to scripts by chance, as
/// `fake::Report::recording` has it. A kernel that is no longer booted did not do the newer scripts: it has told so
/// many answers, and none of them may go.
const TRUTH: [(&str, &str, Option<usize>); 4] = [
    ("6.1.176", include_str!("../src/fake/truth/6.1.176.txt"), None),
    ("6.12.95", include_str!("../src/fake/truth/6.12.95.txt"), Some(230)),
    ("6.12.117", include_str!("../src/fake/truth/6.12.117.txt"), None),
    ("7.3.4", include_str!("../src/fake/truth/7.3.4.txt"), None),
];

#[test]
fn the_recorded_answers_of_real_kernels() {
    let shipped = script::all().unwrap();
    for (release, recording, all) in TRUTH {
        let behaviour = Behaviour::of(release).unwrap();
        let kernel = FakeKernel::new(behaviour, cpus("0-7"), "0-1".parse().unwrap());
        let mut told = BTreeSet::new();
        for line in recording.lines() {
            let (digits, name) = line.split_once(' ').unwrap();
            let script = match shipped.iter().find(|s| s.name == name) {
                Some(script) => script.clone(),
                None => chance::named(name).unwrap(),
            };
            let real = u32::from_str_radix(digits, 16).unwrap();
            let fake = script::answer(&script, kernel.clone()).unwrap();
            assert_eq!(fake, real, "{release}: {name}: other than the kernel, see `lockstep`");
            told.insert(name);
        }
        if let Some(all) = all {
            assert_eq!(told.len(), all, "{release}: answers of a kernel that is no longer booted are gone");
            continue;
        }
        let chances = chance::recorded(behaviour);
        let due = shipped.iter().chain(&chances);
        let untold: Vec<_> = due.filter(|s| !told.contains(s.name.as_str())).map(|s| &s.name).collect();
        assert!(untold.is_empty(), "{release}: not recorded: {untold:?}");
    }
}
