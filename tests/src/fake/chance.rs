//! Scripts by chance: what nobody thought of writing down.
//!
//! A seed always gives the same script, so a difference found in a guest can be run again anywhere.

use super::{
    Behaviour,
    script::{Op, SELF, Script},
};
use truepin::{CpuId, CpuSet};

const TREE: [&str; 7] = ["a", "b", "a/x", "a/y", "a/x/l", "b/z", "c"];
const PROCESSES: [&str; 4] = ["p0", "p1", "p2", "p3"];

/// The generator of `SplitMix64`, <https://prng.di.unimi.it/splitmix64.c> (public domain).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        let n = self.below(of.len() as u64);
        usize::try_from(n).ok().and_then(|n| of.get(n)).copied().unwrap_or_default()
    }

    /// Mostly a range, sometimes two, of CPUs 0 to 7; half of the time without CPU 0.
    fn cpus(&mut self) -> CpuSet {
        let ranges = 1 + self.below(5) / 4;
        let lowest = self.below(2);
        let mut set = CpuSet::new();
        for _ in 0..ranges {
            let from = lowest + self.below(8 - lowest);
            let to = (from + self.below(4)).min(7);
            set |= &(from..=to).filter_map(|c| u32::try_from(c).ok()).map(CpuId).collect();
        }
        set
    }
}

/// What a script by chance may do beside writing cpuset files and moving tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Range {
    /// CPUs go offline and online.
    pub hotplug: bool,
    /// Controllers and directories go and come back, threads move on their own.
    pub tree: bool,
    /// Which files are written.
    pub files: Files,
}

/// The cpuset files that a script by chance writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Files {
    /// All.
    #[default]
    All,
    /// No exclusive lists: partitions as Linux 6.1 has them.
    Local,
    /// No partitions either.
    Members,
}

impl Files {
    fn have(self, line: &str) -> bool {
        match self {
            Self::All => true,
            Self::Local => !line.contains("exclusive"),
            Self::Members => !line.contains("exclusive") && !line.contains("partition"),
        }
    }
}

/// Operations of a script that is known by its name alone.
pub const LENGTH: usize = 40;

/// The script of this name with [`LENGTH`] operations: `chance`, then any of `hotplug`, `tree`, `members` and
/// `local`, then the seed.
#[must_use]
pub fn named(name: &str) -> Option<Script> {
    let (kinds, seed) = name.strip_prefix("chance")?.rsplit_once(' ')?;
    let mut range = Range::default();
    for kind in kinds.split_whitespace() {
        match kind {
            "hotplug" => range.hotplug = true,
            "tree" => range.tree = true,
            "members" => range.files = Files::Members,
            "local" => range.files = Files::Local,
            _ => return None,
        }
    }
    Some(script(seed.parse().ok()?, LENGTH, range))
}

/// The scripts by chance whose answers a kernel of this behaviour has given in `truth/`, beside the shipped ones.
#[must_use]
pub fn recorded(behaviour: Behaviour) -> Vec<Script> {
    let kinds = [(false, false), (true, false), (false, true), (true, true)];
    let of = |files| kinds.map(|(hotplug, tree)| Range { hotplug, tree, files });
    let ranges = if behaviour.exclusive_file {
        of(Files::All).to_vec()
    } else {
        [of(Files::Members), of(Files::Local)].concat()
    };
    ranges.iter().flat_map(|range| (1..=40).map(|seed| script(seed, LENGTH, *range))).collect()
}

/// A script of `length` operations after a start that makes the directories, enables cpuset in them and puts two
/// processes into leaves.
#[must_use]
pub fn script(seed: u64, length: usize, range: Range) -> Script {
    let mut chance = Chance(seed);
    let mut ops = Vec::new();
    for name in TREE {
        ops.push(format!("mkdir {name}"));
        if ["a", "b", "a/x"].contains(&name) {
            ops.push(format!("{name}/cgroup.subtree_control = +cpuset"));
        }
    }
    let leaves = ["a/y", "a/x/l", "b/z", "c"];
    ops.push(format!("spawn p0 {}", chance.one(&leaves)));
    ops.push(format!("spawn p1 {} 3", chance.one(&leaves)));
    let start = ops.len();
    let mut ops: Vec<(String, Op)> =
        ops.iter().flat_map(|line| super::script::operation(line).map(|op| (line.clone(), op))).collect();
    while ops.len() < start + length {
        let line = line(&mut chance, range);
        if let Ok(op) = super::script::operation(&line)
            && range.files.have(&line)
        {
            ops.push((line, op));
        }
    }
    let kinds = [
        (range.hotplug, " hotplug"),
        (range.tree, " tree"),
        (range.files == Files::Members, " members"),
        (range.files == Files::Local, " local"),
    ];
    let kinds: String = kinds.iter().filter(|(on, _)| *on).map(|(_, kind)| *kind).collect();
    Script { name: format!("chance{kinds} {seed}"), ops }
}

fn line(chance: &mut Chance, range: Range) -> String {
    let path = chance.one(&TREE);
    let process = chance.one(&PROCESSES);
    match chance.below(100) {
        0..20 => format!("{path}/cpuset.cpus = {}", chance.cpus()),
        20..24 => format!("{path}/cpuset.cpus ="),
        24..28 => format!("{path}/cpuset.cpus.exclusive ="),
        28..36 => format!("{path}/cpuset.cpus.partition = isolated"),
        36..46 => format!("{path}/cpuset.cpus.partition = root"),
        46..50 => format!("{path}/cpuset.cpus.partition = member"),
        50..52 => format!("{path}/cpuset.mems = {}", chance.one(&["0", "1", "0-1", ""])),
        52..57 => format!("spawn {process} {path}"),
        57..59 => format!("exit {process}"),
        59..66 if range.tree && chance.below(2) == 0 => match chance.below(3) {
            0 => format!("{path}/cgroup.type = threaded"),
            1 => format!("spawn {process} {path} {}", 2 + chance.below(2)),
            _ => format!("thread {process}:{} {path}", chance.below(3)),
        },
        59..63 => format!("move {process} {path}"),
        63..66 => format!("pin {process} {}", chance.cpus()),
        66..68 => format!("pin {SELF} {}", chance.cpus()),
        68..73 if range.hotplug => {
            format!("cpu {} {}", 4 + chance.below(4), chance.one(&["on", "on", "off", "off", "off"]))
        }
        73..76 if range.tree => {
            let control = chance.one(&["a/", "b/", "a/x/", ""]);
            format!("{control}cgroup.subtree_control = {}", chance.one(&["+cpuset", "-cpuset"]))
        }
        76..78 if range.tree => format!("{} {path}", chance.one(&["mkdir", "rmdir", "rmdir"])),
        _ => format!("{path}/cpuset.cpus.exclusive = {}", chance.cpus()),
    }
}
