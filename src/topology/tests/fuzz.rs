//! Blind mutations of every text that makes a machine: no text makes a reader panic, run away, or accept what is no machine.
//!
//! `TRUEPIN_FUZZ` sets the executions of each reader (default 20 000), `TRUEPIN_FUZZ_SEED` (default 1) where they begin.

use super::{
    sources::{json, machines, xml},
    *,
};
use crate::{
    pod::Pod,
    request::Request,
    topology::{hwloc, machine_info},
};
use std::time::Instant;

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

fn mutate(bytes: &mut Vec<u8>, other: &[u8], pieces: &[&str], chance: &mut Chance) {
    for _ in 0..=chance.below(4) {
        let at = chance.below(bytes.len() + 1);
        match chance.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
            1 if at < bytes.len() => bytes[at] = u8::try_from(chance.below(256)).unwrap(),
            2 => {
                let end = (at + chance.below(30)).min(bytes.len());
                drop(bytes.drain(at..end));
            }
            3 => drop(bytes.splice(at..at, pieces[chance.below(pieces.len())].bytes())),
            4 => {
                let from = chance.below(other.len() + 1);
                let to = (from + chance.below(60)).min(other.len());
                drop(bytes.splice(at..at, other[from..to].iter().copied()));
            }
            5 => {
                // A number becomes another.
                let digits: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
                if let Some(i) = digits.get(chance.below(digits.len())) {
                    bytes[*i] = b'0' + u8::try_from(chance.below(10)).unwrap();
                }
            }
            _ => bytes.truncate(at.max(bytes.len() / 2)),
        }
    }
}

/// Runs a reader on mutations of `seeds`; `accepts` says whether it took one. Seeds themselves must be taken.
fn fuzz(name: &str, seeds: &[String], pieces: &[&str], accepts: impl Fn(&str) -> bool) {
    for seed in seeds {
        assert!(accepts(seed), "{name}: {seed}");
    }
    let (count, seed) = (setting("TRUEPIN_FUZZ", 20_000), setting("TRUEPIN_FUZZ_SEED", 1));
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut accepted, started) = (0_u64, Instant::now());
    for _ in 0..count {
        let mut bytes = seeds[chance.below(seeds.len())].clone().into_bytes();
        let other = chance.below(seeds.len());
        mutate(&mut bytes, seeds[other].as_bytes(), pieces, &mut chance);
        accepted += u64::from(accepts(&String::from_utf8_lossy(&bytes)));
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("fuzz {name}: {count} executions from seed {seed}, {accepted} accepted, {seconds:.1} s");
    assert!(count < 10_000 || accepted > count / 200 && accepted < count, "{name}: {accepted} of {count}");
}

/// What every machine promises, whoever described it.
fn holds(raw: &RawTopology) -> bool {
    let Ok(t) = CpuTopology::assemble(raw) else { return false };
    let mut all = CpuSet::new();
    for core in t.cores() {
        assert!(core.cpus.is_disjoint(&all) && core.cpus.first() == Some(core.leader));
        all |= &core.cpus;
    }
    assert_eq!(all, *t.online());
    for groups in Level::ALL.map(|l| t.groups(l)).into_iter().chain([t.llcs()]) {
        let mut seen = CpuSet::new();
        for group in groups {
            assert!(
                group.cpus.is_disjoint(&seen) && group.cpus.is_subset(t.online()) && !group.cpus.is_empty()
            );
            seen |= &group.cpus;
        }
    }
    let mut seen = CpuSet::new();
    for node in t.nodes() {
        assert!(node.cpus.is_disjoint(&seen) && node.cpus.is_subset(t.online()));
        seen |= &node.cpus;
        assert!(
            t.nodes().iter().all(|other| t.distance(node.id, other.id) < u32::MAX || !raw.nodes.is_empty())
        );
    }
    assert!(!render::tree(&t).is_empty() && serde_json::to_string(&render::document(&t)).is_ok());
    true
}

#[test]
fn lists() {
    let seeds = ["0-3,8", "0-1023", "4-7:1/2,9", "", "0,2,4,6\n", "65535"].map(String::from);
    let pieces = [
        "-",
        ",",
        ":",
        "/",
        "0",
        "65535",
        "65536",
        "4294967295",
        "99999999999999999999",
        " ",
        "\n",
        "+1",
        "0-9:0/0",
    ];
    fuzz("lists", &seeds, &pieces, |text| match text.parse::<CpuSet>() {
        Ok(cpus) => {
            assert_eq!(cpus.to_string().parse::<CpuSet>().as_ref(), Ok(&cpus), "{text:?}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    });
}

#[test]
fn hwloc_xml() {
    let mut seeds: Vec<String> = machines().iter().take(4).map(|m| xml(&m.raw())).collect();
    seeds.push(super::sources::AWKWARD.into());
    let pieces = [
        "<object type=\"PU\" os_index=\"65535\"/>",
        "<object type=\"NUMANode\" os_index=\"1023\"/>",
        "</object>",
        "<object>",
        "\"",
        "'",
        ">",
        "<",
        "&",
        "&amp;",
        "&x;",
        "<!--",
        "-->",
        "<![CDATA[",
        "]]>",
        "0xf...f",
        ",,,,",
        "4294967295",
        "-1",
        "99999999999999999999",
        "<u64values>",
        "<indexes>1 1",
        "<latency value=\"1e300\"/>",
        "<distances nbobjs=\"2\" latency_base=\"nan\">",
        "cpuset=\"0x1\"",
        "type=\"Die\"",
        "version=\"1.9\"",
        "<?xml",
        "\u{0}",
        "\u{feff}",
    ];
    fuzz("hwloc XML", &seeds, &pieces, |text| match hwloc::parse(text, "f") {
        Ok((raw, devices)) => {
            let machine = CpuTopology::assemble(&raw);
            if let Ok(t) = &machine {
                assert!(super::super::devices::place(t, &devices).0.len() <= devices.len());
            }
            holds(&raw)
        }
        Err(error) => {
            assert!(error.to_string().starts_with("f: ") && error.to_string().len() < 4096, "{error}");
            false
        }
    });
}

#[test]
fn machine_infos() {
    let seeds: Vec<String> = machines().iter().map(|m| json(&m.raw())).collect();
    let pieces = [
        "null",
        "{}",
        "[]",
        "[[",
        "\"\"",
        "-1",
        "1e400",
        "18446744073709551616",
        "65535",
        "65536",
        "{\"node_id\":0}",
        "\"cores\":null",
        "\"thread_ids\":[0,0]",
        "\"level\":2",
        "\"id\":-1",
        ",",
        ":",
        "}",
        "]",
        "\"socket_id\":-1",
        "\"distances\":[]",
        "\\ud800",
        "\"topology\":[",
        "\"book_id\":\"9\"",
    ];
    fuzz("machine-info", &seeds, &pieces, |text| match machine_info::parse(text, "f") {
        Ok(raw) => holds(&raw),
        Err(error) => {
            assert!(error.to_string().starts_with("f: "), "{error}");
            false
        }
    });
}

#[test]
fn pods_and_requests() {
    let pods = [
        r#"{"uid":"5f1c3f0e-0000-4000-8000-0000deadbeef","init":[{"n":"i","req":1000,"lim":1000,"mreq":1,"mlim":1,"sidecar":true}],"app":[{"n":"db","req":4000,"lim":4000,"mreq":1024,"mlim":1024}],"pod_cpu":5000}"#,
        r#"{"uid":"p","app":[{"n":"c"},{"n":"d","req":500,"lim":500}]}"#,
    ]
    .map(String::from);
    let pieces = [
        "null",
        "{}",
        "[]",
        "-1",
        "0",
        "18446744073709551615",
        "1e3",
        "\"n\":\"c\"",
        "\"sidecar\":1",
        "\"uid\":\"a/b\"",
        ",",
        "\"",
        "\\u0000",
        "{\"n\":\"..\"}",
    ];
    fuzz("pods", &pods, &pieces, |text| match Pod::parse(text.as_bytes()) {
        Ok(pod) => {
            let again = serde_json::to_vec(&pod).unwrap();
            assert_eq!(Pod::parse(&again).unwrap(), pod, "{text}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    });
    let requests = [r#"{"owner":"run/db","cpus":4,"numa":"restricted","whole_cores":true,"near":"0-1","isolation":"auto"}"#].map(String::from);
    fuzz("requests", &requests, &pieces, |text| match serde_json::from_str::<Request>(text) {
        Ok(request) => {
            serde_json::from_str::<Request>(&serde_json::to_string(&request).unwrap()).unwrap() == request
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    });
}
