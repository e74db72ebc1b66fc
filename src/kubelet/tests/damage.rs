//! Every flipped bit, every truncation, and a while of blind mutation.
//!
//! The counts are printed: `cargo test -p truepin damage -- --nocapture`. `TRUEPIN_FUZZ` sets how many mutations.

use super::*;

/// What the kubelet makes of damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Theirs {
    Refused,
    Same,
    Other,
}

/// What truepin makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ours {
    NotImportable,
    Findings,
    Silent,
    SilentAndOther,
}

type Counts = BTreeMap<(Theirs, Ours), usize>;

fn theirs(sound: &State, file: &[u8], pod_level: bool, containers: &Containers) -> Theirs {
    let setup = Setup { policy: "static", pod_level, containers };
    match load(Some(file), setup) {
        Ok(state) if start(&state, setup, &machine()).is_err() => Theirs::Refused,
        Ok(state) if state == *sound => Theirs::Same,
        Ok(_) => Theirs::Other,
        Err(_) => Theirs::Refused,
    }
}

fn ours(sound: &Inspection, file: &[u8], containers: &Containers) -> Ours {
    let machine = machine();
    let context = Context { policy: Some("static"), containers, machine: Some(&machine) };
    let found = inspect(Some(file), context);
    let same = (&found.entries, &found.pods, &found.default) == (&sound.entries, &sound.pods, &sound.default);
    match (found.importable, found.findings.is_empty(), same) {
        (false, ..) => Ours::NotImportable,
        (_, false, _) => Ours::Findings,
        (_, true, true) => Ours::Silent,
        (_, true, false) => Ours::SilentAndOther,
    }
}

fn count(file: &str, pod_level: bool, damaged: impl Iterator<Item = Vec<u8>>) -> Counts {
    let containers = running();
    let setup = Setup { policy: "static", pod_level, containers: &containers };
    let state = load(Some(file.as_bytes()), setup).unwrap();
    let sound = inspected(file);
    assert!(sound.findings.is_empty());
    let mut counts = Counts::new();
    for bytes in damaged {
        let key = (theirs(&state, &bytes, pod_level, &containers), ours(&sound, &bytes, &containers));
        *counts.entry(key).or_default() += 1;
    }
    counts
}

fn flips(file: &str) -> impl Iterator<Item = Vec<u8>> {
    let bytes = file.as_bytes().to_vec();
    (0..bytes.len() * 8).map(move |i| {
        let mut damaged = bytes.clone();
        damaged[i / 8] ^= 1 << (i % 8);
        damaged
    })
}

/// Every version, and the gate under which its kubelet reads it.
fn files() -> Vec<(&'static str, String, bool)> {
    let mut two = state();
    two.pods.clear();
    let zeroed = |file: String| format!("{}\"checksum\":0}}", file.rsplit_once("\"checksum\"").unwrap().0);
    vec![
        ("v1", v1_of_state(), false),
        ("v2", export(&two, "static", Exported::V2), false),
        ("v2, gate on", export(&two, "static", Exported::V2), true),
        ("v3, gate on", export(&state(), "static", Exported::V3), true),
        ("v4", export(&state(), "static", Exported::V4), false),
        ("v2, checksum 0", zeroed(export(&two, "static", Exported::V2)), false),
    ]
}

fn print(what: &str, name: &str, counts: &Counts) {
    let sum = |of: &dyn Fn(&(Theirs, Ours)) -> bool| -> usize {
        counts.iter().filter(|(key, _)| of(key)).map(|(_, n)| n).sum()
    };
    println!(
        "{what} of {name}: {} | kubelet: {} refused, {} started with the same state, {} with another | truepin: {} not \
         importable, {} findings, {} silent with the same content, {} with another",
        sum(&|_| true),
        sum(&|k| k.0 == Theirs::Refused),
        sum(&|k| k.0 == Theirs::Same),
        sum(&|k| k.0 == Theirs::Other),
        sum(&|k| k.1 == Ours::NotImportable),
        sum(&|k| k.1 == Ours::Findings),
        sum(&|k| k.1 == Ours::Silent),
        sum(&|k| k.1 == Ours::SilentAndOther),
    );
}

#[test]
fn every_flipped_bit_is_found_wherever_a_checksum_can() {
    for (name, file, pod_level) in files() {
        let counts = count(&file, pod_level, flips(&file));
        print("bit flips", name, &counts);
        assert_eq!(counts.values().sum::<usize>(), file.len() * 8);
        let passed: usize = counts.iter().filter(|(k, _)| k.1 >= Ours::Silent).map(|(_, n)| n).sum();
        if name.contains("checksum 0") {
            // Nothing vouches for such a file: a digit of a list may become another that fits the machine as well.
            continue;
        }
        assert_eq!(passed, 0, "{name}: every flip leaves a finding");
    }
}

#[test]
fn every_truncation_is_found_by_both() {
    for (name, file, pod_level) in files() {
        let counts = count(&file, pod_level, (0..file.len()).map(|n| file.as_bytes()[..n].to_vec()));
        print("truncations", name, &counts);
        assert_eq!(counts, Counts::from([((Theirs::Refused, Ours::NotImportable), file.len())]), "{name}");
    }
}

#[test]
fn every_flipped_bit_of_a_memory_file() {
    for pod_level in [false, true] {
        let file = memory(pod_level);
        let (mut refused, mut found) = (0, 0);
        for bytes in flips(&file) {
            refused += usize::from(load_memory(Some(&bytes), "Static", pod_level).is_err());
            found += usize::from(!inspect_memory(Some(&bytes), Some("Static"), None).findings.is_empty());
        }
        let all = file.len() * 8;
        let gate = if pod_level { ", gate on" } else { "" };
        println!("bit flips of memory{gate}: {all} | kubelet: {refused} refused | truepin: {found} findings");
        assert_eq!(found, all);
        assert!(refused < all, "the kubelet reads keys without regard to case");
    }
}

/// xorshift64*: the same mutations everywhere.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(high).unwrap() % n.max(1)
    }
}

/// Pieces that mean something to a reader.
const PIECES: [&str; 30] = [
    "null",
    "{}",
    "[]",
    "\"\"",
    "0",
    "-1",
    "1e3",
    "18446744073709551616",
    "true",
    "{\"cpuSet\":\"1\"}",
    "[null]",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    "\\u",
    "\\ud800",
    ",",
    ":",
    "0-99999999999",
    "9223372036854775807",
    "1-9223372036854775807",
    "\"entries\":",
    "\"podEntries\":",
    "\"data\":\"{}\"",
    "\"checksum\":0",
    "\u{212a}",
    "\u{fffd}",
];

fn mutate(bytes: &mut Vec<u8>, other: &[u8], chance: &mut Chance) {
    for _ in 0..=chance.below(4) {
        let at = chance.below(bytes.len() + 1);
        match chance.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
            1 if at < bytes.len() => bytes[at] = u8::try_from(chance.below(256)).unwrap(),
            2 => {
                let end = (at + chance.below(40)).min(bytes.len());
                drop(bytes.drain(at..end));
            }
            3 => {
                let piece = PIECES[chance.below(PIECES.len())].bytes();
                drop(bytes.splice(at..at, piece));
            }
            4 => {
                let from = chance.below(other.len() + 1);
                let to = (from + chance.below(80)).min(other.len());
                drop(bytes.splice(at..at, other[from..to].iter().copied()));
            }
            _ => {
                // The checksum out of the way, so that what lies behind it is reached.
                if let Some(n) = bytes.windows(11).position(|w| w == b"\"checksum\":") {
                    let digits = bytes[n + 11..].iter().take_while(|b| b.is_ascii_digit()).count();
                    drop(bytes.splice(n + 11..n + 11 + digits, *b"0"));
                }
            }
        }
    }
}

#[test]
fn no_bytes_make_a_reader_panic() {
    let wanted = std::env::var("TRUEPIN_FUZZ").ok().and_then(|v| v.parse().ok()).unwrap_or(5_000_usize);
    let mut seeds: Vec<Vec<u8>> = files().into_iter().map(|(_, file, _)| file.into_bytes()).collect();
    seeds.extend([memory(false).into_bytes(), memory(true).into_bytes()]);
    let mut chance = Chance(0x7275_6570_696e);
    let (containers, nodes) = (running(), "0-1".parse().unwrap());
    let (online, reserved) = ("0-15".parse().unwrap(), "0-1".parse().unwrap());
    let (mut loaded, mut started, mut importable) = (0, 0, 0);
    for i in 0..wanted {
        let mut bytes = seeds[i % seeds.len()].clone();
        let other = chance.below(seeds.len());
        mutate(&mut bytes, &seeds[other], &mut chance);
        let input = Input {
            dir: "d",
            cpu: Some(&bytes),
            memory: Some(&bytes),
            policy: None,
            memory_policy: None,
            pod_level: i % 2 == 0,
            containers: &containers,
            online: Some(&online),
            nodes: Some(&nodes),
            reserved: Some(&reserved),
            strict: i % 3 == 0,
        };
        let judgement = judge(&input);
        loaded += usize::from(judgement.document.files[0].load == Answer::Ok);
        importable += usize::from(judgement.cpu.importable);
        let setup = Setup { policy: "static", pod_level: input.pod_level, containers: &containers };
        started += usize::from(load(Some(&bytes), setup).is_ok_and(|s| start(&s, setup, &machine()).is_ok()));
        // Sets to adopt are disjoint and on the machine, whatever the file says (I1).
        let mut all = CpuSet::new();
        for (owner, cpus) in &judgement.adoption.owners {
            assert!(
                cpus.is_subset(&online) && cpus.is_disjoint(&all) && cpus.is_disjoint(&reserved),
                "{owner}"
            );
            assert!(!cpus.is_empty(), "{owner}");
            all |= cpus;
        }
        // The other readers of the same bytes.
        let text = String::from_utf8_lossy(&bytes);
        let _ = (CpuRanges::parse(&text), parse_containers(&text), preimages(&bytes));
    }
    println!(
        "mutations: {wanted} | kubelet: {loaded} loaded, {started} started | truepin: {importable} importable"
    );
    assert!(
        loaded > 0 && importable > 0,
        "the mutations are too wild to reach what lies behind the checksum"
    );
}
