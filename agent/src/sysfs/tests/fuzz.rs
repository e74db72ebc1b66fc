//! Blind mutations of whole trees and of archives. `TRUEPIN_FUZZ` sets the executions (default 1 500 and 3 000; each
//! reads a machine), `TRUEPIN_FUZZ_SEED` (default 1) where they begin.

use super::*;
use crate::{
    machine::described,
    sysfs::{
        Tree as Source, archive,
        archive::Archive,
        capture::{Packing, capture},
    },
};
use std::{collections::BTreeMap, time::Instant};

/// xorshift64*: the same mutations everywhere.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % n.max(1)
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn mutate(bytes: &mut Vec<u8>, chance: &mut Chance) {
    const PIECES: [&str; 22] = [
        "",
        "\n",
        "0",
        "-1",
        "0-15",
        "0-15:1/2",
        "3-1",
        "65535",
        "65536",
        "4294967296",
        "99999999999999999999",
        "x",
        ",",
        "ffffffff",
        "0000ffff,00000000",
        ",,,",
        "(null)",
        "Instruction",
        "3",
        "10 20",
        "Node 0 MemTotal: 1 kB",
        "\u{0}",
    ];
    let at = chance.below(bytes.len() + 1);
    match chance.below(6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
        1 => *bytes = PIECES[chance.below(PIECES.len())].into(),
        2 => drop(bytes.splice(at..at, PIECES[chance.below(PIECES.len())].bytes())),
        3 => bytes.truncate(at),
        4 => {
            let end = (at + chance.below(600)).min(bytes.len());
            drop(bytes.drain(at..end));
        }
        _ => {
            let digits: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
            if let Some(i) = digits.get(chance.below(digits.len())) {
                bytes[*i] = b'0' + u8::try_from(chance.below(10)).unwrap();
            }
        }
    }
}

/// Groups of a machine are disjoint and online, whatever was read.
fn holds(t: &CpuTopology) {
    for groups in Level::ALL.map(|l| t.groups(l)).into_iter().chain([t.llcs(), t.cores()]) {
        let mut seen = CpuSet::new();
        for group in groups {
            assert!(
                group.cpus.is_disjoint(&seen) && group.cpus.is_subset(t.online()) && !group.cpus.is_empty()
            );
            seen |= &group.cpus;
        }
    }
    assert_eq!(t.cores().iter().map(|c| c.cpus.len()).sum::<usize>(), t.online().len());
}

/// The sound tree's files, with a device.
fn sound() -> BTreeMap<String, Vec<u8>> {
    fn walk(dir: &Path, path: &str, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{path}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                walk(&entry.path(), &format!("{path}/"), files);
            } else {
                files.insert(path, fs::read(entry.path()).unwrap());
            }
        }
    }
    let tree = Tree::new();
    let mut files = BTreeMap::new();
    walk(tree.0.path(), "", &mut files);
    for (file, text) in [("numa_node", "-1\n"), ("local_cpulist", "0-3,8-11\n"), ("class", "0x020000\n")] {
        files.insert(format!("sys/bus/pci/devices/0000:17:00.0/{file}"), text.into());
    }
    files
}

#[test]
fn trees() {
    let (count, seed) = (setting("TRUEPIN_FUZZ", 1_500), setting("TRUEPIN_FUZZ_SEED", 1));
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let sound = sound();
    let names: Vec<&String> = sound.keys().collect();
    let (mut read, mut recorded, started) = (0_u64, 0_u64, Instant::now());
    for n in 0..count {
        let mut files = sound.clone();
        for _ in 0..=chance.below(5) {
            let name = names[chance.below(names.len())];
            match (chance.below(5), files.get_mut(name)) {
                (0, _) => drop(files.remove(name)),
                (1, _) => {
                    let to = names[chance.below(names.len())];
                    files.insert(name.clone(), sound[to].clone());
                }
                (_, Some(bytes)) => mutate(bytes, &mut chance),
                (_, None) => {}
            }
        }
        let tree = Source::archive(Path::new("f"), Archive::of(&files));
        match read_topology(&tree).map(|raw| CpuTopology::assemble(&raw)) {
            Ok(Ok(t)) => {
                read += 1;
                holds(&t);
                drop(crate::sysfs::devices(&tree, &t));
                // What can be read can be recorded, unless a file that nobody needed to read is none.
                if n % 50 == 0 {
                    match capture(&tree, Packing::Zstd) {
                        Ok(_) => recorded += 1,
                        Err(e) => assert!(
                            !matches!(e, crate::sysfs::capture::CaptureError::Differs),
                            "{n}: {files:?}"
                        ),
                    }
                }
            }
            Ok(Err(e)) => assert!(!e.to_string().is_empty()),
            Err(e) => assert!(e.to_string().contains('f')),
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "fuzz trees: {count} executions from seed {seed}, {read} read, {recorded} of them recorded, {seconds:.1} s"
    );
    assert!(count < 1000 || read > count / 5 && read < count && recorded > 0);
}

#[test]
fn archives() {
    let (count, seed) = (setting("TRUEPIN_FUZZ", 3_000), setting("TRUEPIN_FUZZ_SEED", 1));
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // A small machine: the less there is, the more of it is changed.
    let mut small = sound();
    small.retain(|path, _| !path.contains("/cpu/cpu") || path.contains("/cpu/cpu3/topology"));
    let source = Source::archive(Path::new("f"), Archive::of(&small));
    let packed = [Packing::Gzip, Packing::Zstd].map(|p| capture(&source, p).unwrap().bytes);
    let mut plain = Vec::new();
    io::Read::read_to_end(&mut flate2::read::GzDecoder::new(packed[0].as_slice()), &mut plain).unwrap();
    let [gzip, zstd] = packed;
    let seeds = [plain, gzip, zstd];
    let (mut taken, started) = ([0_u64; 3], Instant::now());
    for _ in 0..count {
        let which = chance.below(3);
        let mut bytes = seeds[which].clone();
        for _ in 0..=chance.below(3) {
            mutate(&mut bytes, &mut chance);
        }
        // The plain one's headers have checksums: half of the changed ones get the right one.
        if which == 0 && chance.below(2) == 0 {
            for block in bytes.chunks_exact_mut(512).filter(|b| b[257..262] == *b"ustar") {
                let mut header = tar::Header::from_byte_slice(block).clone();
                header.set_cksum();
                block.copy_from_slice(header.as_bytes());
            }
        }
        if which == 0 && chance.below(4) > 0 {
            bytes.extend([0; 1024]);
        }
        match described(Path::new("f"), &bytes) {
            Ok(machine) => {
                taken[which] += 1;
                if let Ok(t) = machine.topology() {
                    holds(&t);
                    drop(machine.devices(&t));
                }
            }
            Err(e) => assert!(e.to_string().contains('f'), "{e}"),
        }
        drop(archive::read(&bytes));
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "fuzz archives: {count} executions from seed {seed}, taken: {} plain, {} gzip, {} zstd, {seconds:.1} s",
        taken[0], taken[1], taken[2]
    );
    assert!(count < 1000 || taken[0] > count / 100);
}
