//! The record on disks that damage it: every flipped bit and every cut of real files, damage at random in random
//! histories, and a decoder that is given whatever comes.
//!
//! `TRUEPIN_FUZZ` (default 200 000) sets the executions of the decoder, `TRUEPIN_FUZZ_SEED` (default 1) where they begin.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

use std::{fs, path::Path};
use truepin::{
    CgroupId, Owner,
    checkpoint::{
        self, Checkpoint, Extra,
        generations::{Generation, Place},
    },
    containers::ContainerEntry,
};
use truepin_agent::store::Store;
use truepin_tests::sim::{
    Sim,
    history::{Rng, next_op, world},
};

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{name}={text:?}: {e}")),
        Err(_) => default,
    }
}

/// The record of a random history that has come to `owners` owners and first values, with some more in it that only
/// an orchestrator brings.
fn real(owners: usize) -> Checkpoint {
    for seed in 1.. {
        let mut rng = Rng::new(seed);
        let (setup, kernel) = world(&mut rng);
        let mut sim = Sim::new(setup, kernel);
        for _ in 0..12 {
            sim.wait(60_000_000_001);
            let op = next_op(&mut rng, &sim);
            op.happen(&mut sim).unwrap();
            let Some(record) = sim.disk.record() else { continue };
            if record.assignments.owners.len() >= owners && !record.first.is_empty() {
                return with_containers(record.clone());
            }
        }
    }
    unreachable!("some history has as many")
}

fn with_containers(mut record: Checkpoint) -> Checkpoint {
    let names: Vec<Owner> = record.assignments.owners.keys().cloned().collect();
    for (n, owner) in names.into_iter().enumerate() {
        let entry = ContainerEntry {
            owner,
            cgroup: (n % 2 == 0).then_some(CgroupId(100 + n as u64)),
            extra: Extra::new(),
        };
        record.containers.insert(format!("{n:064x}").parse().unwrap(), entry);
    }
    if let Some(first) = record.assignments.owners.values_mut().next() {
        first.original = Some(first.cpus.clone());
    }
    record
}

/// In memory where that is possible: there are tens of thousands of files to write, and their fsyncs are not the point.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn every_flipped_bit_and_every_cut_of_either_generation() {
    let newer = real(4);
    let mut older = newer.clone();
    older.epoch -= 1;
    older.assignments.owners.pop_last();
    let dir = scratch();
    let path = dir.path().join("checkpoint.json");
    let mut store = Store::open(&path).unwrap();
    store.save(&older).unwrap();
    store.save(&newer).unwrap();
    let file = |g| dir.path().join(Place::Of(g).name("checkpoint.json"));
    let (current, previous) = (file(Generation::Current), file(Generation::Previous));
    let whole = [fs::read(&current).unwrap(), fs::read(&previous).unwrap()];
    assert!(whole[0].len() > 1000 && whole[0] != whole[1]);

    let (mut flips, mut cuts) = ([0, 0], [0, 0]);
    for (which, damaged, survivor, expected) in [
        (0, Generation::Current, Generation::Previous, &older),
        (1, Generation::Previous, Generation::Current, &newer),
    ] {
        let mut check = |bytes: &[u8], what: &str| {
            fs::write(file(damaged), bytes).unwrap();
            let loaded = store.load(1).unwrap_or_else(|e| panic!("{what}: no start: {e}"));
            let [found] = loaded.damaged.as_slice() else { panic!("{what}: {:?}", loaded.damaged) };
            assert_eq!(found.generation, damaged, "{what}");
            let (from, record) = loaded.record.unwrap_or_else(|| panic!("{what}: no record"));
            assert_eq!((from, &*record), (survivor, expected), "{what}");
            assert_eq!(fs::read(&found.path).unwrap(), bytes, "{what}: what was damaged is kept");
            assert!(!file(damaged).exists() && !found.reason.is_empty(), "{what}");
            fs::remove_dir_all(dir.path().join("quarantine")).unwrap();
        };
        let good = &whole[which];
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                check(&bad, &format!("{}: byte {at} bit {bit}", damaged.name()));
                flips[which] += 1;
            }
            check(&good[..at], &format!("{}: cut at {at}", damaged.name()));
            cuts[which] += 1;
        }
        fs::write(file(damaged), good).unwrap();
        assert_eq!(store.load(1).unwrap().damaged, [], "whole again");
    }
    println!(
        "current generation of {} bytes: {} of {} flipped bits and {} of {} cuts found, the previous one used; \
         previous generation of {} bytes: {} of {} and {} of {} found, the current one used",
        whole[0].len(),
        flips[0],
        whole[0].len() * 8,
        cuts[0],
        whole[0].len(),
        whole[1].len(),
        flips[1],
        whole[1].len() * 8,
        cuts[1],
        whole[1].len(),
    );
    assert_eq!((flips, cuts), (whole.each_ref().map(|w| w.len() * 8), whole.each_ref().map(Vec::len)));
}

/// A disk that damages one file or both, in the middle of life: the start always succeeds, no invariant breaks, and one
/// generation is enough for a table that the kernel can be brought to.
#[test]
fn damage_in_random_histories() {
    let (mut starts, mut previous, mut nothing, mut passing) = (0, 0, 0, 0);
    for seed in 1..=150 {
        let mut rng = Rng::new(seed);
        let mut chance = Rng::new(!seed);
        let (setup, kernel) = world(&mut rng);
        let mut sim = Sim::new(setup, kernel);
        for _ in 0..6 {
            sim.wait(60_000_000_001);
            let op = next_op(&mut rng, &sim);
            op.happen(&mut sim).unwrap();
            sim.unsettled();
            for victims in [
                &[Generation::Current][..],
                &[Generation::Previous],
                &[Generation::Current, Generation::Previous],
            ] {
                let mut sim = sim.clone();
                let mut hit = 0;
                for victim in victims {
                    let place = Place::Of(*victim);
                    let Some(mut bytes) = sim.disk.get(place).map(<[u8]>::to_vec) else { continue };
                    let at = chance.below(bytes.len());
                    if chance.chance(30) {
                        bytes.truncate(at);
                    } else {
                        bytes[at] ^= 1 << chance.below(8);
                    }
                    sim.disk.put(place, bytes);
                    hit += 1;
                }
                if hit == 0 {
                    continue;
                }
                let record = sim.disk.record().cloned();
                sim.eyes.log = Some(Vec::new());
                let what = format!("seed {seed}, {op:?}, damaged {victims:?}");
                sim.restart().unwrap();
                starts += 1;
                previous += u64::from(record.is_some() && victims == [Generation::Current]);
                nothing += u64::from(record.is_none());
                let owners = record.map(|r| r.assignments.owners).unwrap_or_default();
                let strangers =
                    sim.state.assignments.owners.keys().filter(|o| !owners.contains_key(o)).count();
                assert_eq!(strangers, 0, "{what}");
                // What a lost record had made a partition is somebody else's now, and a list of the pool that names its
                // CPUs alone falls back to all that its parent has: M1 cannot be kept without that record.
                let (member, broken): (Vec<_>, Vec<_>) =
                    std::mem::take(&mut sim.eyes.breaches).into_iter().partition(|b| b.contains(": M1: "));
                passing += u64::from(!member.is_empty());
                let log = sim.eyes.log.iter().flatten().cloned().collect::<Vec<_>>().join("\n");
                assert_eq!((sim.faults.as_slice(), broken.as_slice()), (&[][..], &[][..]), "{what}\n{log}");
            }
        }
    }
    println!(
        "{starts} starts on damaged disks, {previous} from the previous generation, {nothing} from nothing; in {passing} \
         a cgroup of the pool could reach a member-mode owner's CPUs for a while"
    );
    assert!(starts > 1000 && previous > 200 && nothing > 200);
}

/// One change of a text or of its meaning.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    const TOKENS: [&str; 24] = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "null",
        "true",
        "-1",
        "0",
        "18446744073709551615",
        "18446744073709551616",
        "1e400",
        "0.1",
        "\\u0000",
        "\\ud800",
        "\"\":{}",
        "\"minor\":1,",
        "\"version\":1",
        "0-4294967295",
        "0-",
        "\u{e9}",
        "\"cpus\":\"0-999999999\"",
    ];
    let at = rng.below(bytes.len() + 1);
    match rng.below(7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
        1 => bytes.truncate(at),
        2 => {
            let token = TOKENS[rng.below(TOKENS.len())];
            bytes.splice(at..at, token.bytes());
        }
        3 => {
            let end = (at + rng.below(12)).min(bytes.len());
            bytes.drain(at..end);
        }
        4 => {
            let from = rng.below(other.len());
            let piece = other[from..(from + rng.below(40)).min(other.len())].to_vec();
            bytes.splice(at..at, piece);
        }
        5 => {
            let end = (at + rng.below(40)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        _ => {
            let digits: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
            if let Some(i) = rng.pick(&digits) {
                bytes[*i] = b'0' + u8::try_from(rng.below(10)).unwrap();
            }
        }
    }
}

/// The envelope around a payload, as a writer with our checksum and strange ideas would make it.
fn sealed(version: u32, payload: &[u8]) -> Vec<u8> {
    let crc = crc32fast::hash(payload);
    let head = format!("{{\"schema\":\"truepin.checkpoint/{version}\",\"crc32\":\"{crc:08x}\",\"payload\":");
    [head.as_bytes(), payload, b"}\n"].concat()
}

fn payload(bytes: &[u8]) -> Vec<u8> {
    let at = bytes.windows(11).position(|w| w == b"\"payload\":{").unwrap() + 10;
    bytes[at..bytes.len() - 2].to_vec()
}

#[test]
fn the_decoder_survives_everything() {
    let (count, seed) = (number("TRUEPIN_FUZZ", 200_000), number("TRUEPIN_FUZZ_SEED", 1));
    let present = checkpoint::encode(&real(3)).unwrap();
    // As version 1 wrote it: in the order of its fields.
    let first = br#"{"version":1,"epoch":9,"boot_id":"b","topology":"t","assignments":{"reserved":"","strict_reserved":true,"owners":{"unit/x.service":{"cpus":"6","cgroup":"x","created":false,"mode":"audit","isolation":"partition","generation":1,"reason":"r"}}},"first":{"a.slice":{"id":5,"files":{"cpuset.cpus":"0-7"}}}}"#;
    let seeds = [(2, payload(&present)), (1, first.to_vec())];
    for (version, payload) in &seeds {
        assert!(checkpoint::decode(&sealed(*version, payload)).is_ok(), "{version}");
    }
    let mut rng = Rng::new(seed);
    let (mut good, mut newer, mut refused, mut sealed_ones) = (0_u64, 0_u64, 0_u64, 0_u64);
    for n in 0..count {
        let (version, base) = &seeds[rng.below(2)];
        let other = &seeds[rng.below(2)].1;
        // Half of them behind a checksum that fits, or hardly any would get past it.
        let behind = rng.chance(50);
        let mut bytes = if behind { base.clone() } else { sealed(*version, base) };
        for _ in 0..=rng.below(4) {
            mutate(&mut rng, &mut bytes, other);
        }
        if behind {
            sealed_ones += 1;
            bytes =
                sealed(if rng.chance(90) { *version } else { u32::try_from(rng.below(4)).unwrap() }, &bytes);
        }
        match checkpoint::read(&bytes) {
            Ok(stored) => {
                good += 1;
                let again = checkpoint::encode(&stored.record).unwrap();
                // What is accepted is what would have been written.
                assert!(
                    stored.version < checkpoint::VERSION || again == bytes,
                    "{n}: {}",
                    String::from_utf8_lossy(&bytes)
                );
                assert_eq!(checkpoint::decode(&again).unwrap(), stored.record, "{n}");
            }
            Err(error) if error.is_newer() => newer += 1,
            Err(_) => refused += 1,
        }
    }
    println!(
        "{count} executions from seed {seed} ({sealed_ones} with a checksum that fits): {good} accepted, each of which \
         encodes to itself, {newer} taken for a newer version, {refused} refused"
    );
    assert!(count < 10_000 || good > count / 200 && newer > 0 && refused > count / 2);
}

#[test]
fn the_name_of_a_state_file_is_free() {
    let dir = scratch();
    let path = dir.path().join("host-a.state");
    let mut store = Store::open(&path).unwrap();
    let record = real(2);
    store.save(&record).unwrap();
    store.save(&Checkpoint { epoch: record.epoch + 1, ..record.clone() }).unwrap();
    fs::write(&path, "x").unwrap();
    let loaded = store.load(5).unwrap();
    assert_eq!(loaded.record.unwrap().1.epoch, record.epoch);
    assert!(Path::new(&loaded.damaged[0].path).ends_with("quarantine/host-a.state-5.json"));
}
