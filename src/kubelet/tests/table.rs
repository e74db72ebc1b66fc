//! Version and condition against both verdicts: `cargo test -p truepin both_verdicts -- --nocapture` prints the table.

use super::*;
use std::fmt::Write;

/// A state, turned into a file of each version and then damaged.
struct Condition {
    name: &'static str,
    state: State,
    policy: &'static str,
    edit: fn(String) -> String,
    strict: bool,
    containers: Containers,
}

fn sound(name: &'static str) -> Condition {
    let edit = |file| file;
    Condition { name, state: state(), policy: "static", edit, strict: false, containers: running() }
}

fn edited(name: &'static str, edit: fn(String) -> String) -> Condition {
    Condition { edit, ..sound(name) }
}

/// The outer checksum's digits, which are followed by a comma in version 4.
fn with_checksum(file: &str, to: &str) -> String {
    let (head, tail) = file.split_once("\"checksum\":").unwrap();
    let rest = tail.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{head}\"checksum\":{to}{rest}")
}

fn conditions() -> Vec<Condition> {
    let with = |name, change: fn(&mut State)| {
        let mut condition = sound(name);
        change(&mut condition.state);
        condition
    };
    vec![
        sound("sound"),
        with("no entries", |s| *s = State { default: list("0-15"), ..State::default() }),
        edited("checksum wrong", |f| with_checksum(&f, "1234")),
        edited("checksum 0", |f| with_checksum(&f, "0")),
        edited("checksum's key gone", |f| f.replacen("\"checksum\":", "\"sum\":", 1)),
        edited("a key in another case", |f| f.replacen("\"defaultCpuSet\"", "\"defaultCPUSet\"", 1)),
        edited("a key more", |f| f.replacen('{', "{\"future\":{},", 1)),
        edited("white space", |f| f.replacen("\":\"static", "\": \"static", 1)),
        edited("cut in half", |f| f[..f.len() / 2].into()),
        edited("empty", |_| String::new()),
        edited("{}", |_| "{}".into()),
        Condition { policy: "none", ..sound("policy none configured") },
        Condition { containers: Containers::new(), ..sound("no container known") },
        with("two pods on a CPU", |s| {
            drop(s.entries.get_mut(WEB).unwrap().insert("web".into(), list("6-8")));
            drop(s.pods.insert(WEB.into(), list("6-8")));
        }),
        with("entry in the pool", |s| s.default = list("0-1,8-15")),
        with("a CPU of nobody", |s| s.default = list("0-1,10-15")),
        with("a CPU that is gone", |s| s.default = list("0-1,9-16")),
        with("an entry's CPU that is gone", |s| {
            drop(s.entries.get_mut(DB).unwrap().insert("log".into(), list("6,16")));
        }),
        with("an entry on a reserved CPU", |s| {
            s.default = list("0,9-15");
            drop(s.entries.get_mut(DB).unwrap().insert("log".into(), list("1,6")));
        }),
        with("empty pool", |s| s.default = list("")),
        Condition { strict: true, ..sound("strict, reserved in pool") },
        edited("a list that is none", |f| with_checksum(&f, "0").replace("\"6\"", "\"6-4\"")),
    ]
}

/// Sums of an edited file are made anew by version, where the edit is of the content.
fn cell(condition: &Condition, version: &str, pod_level: bool) -> String {
    let mut state = condition.state.clone();
    let file = match version {
        "v1" => {
            let containers = running();
            let id = |pod: &str, name: &str| {
                containers
                    .iter()
                    .find(|(_, c)| (c.0.as_str(), c.1.as_str()) == (pod, name))
                    .unwrap()
                    .0
                    .clone()
            };
            let mut entries = Vec::new();
            for (pod, of) in &state.entries {
                entries.extend(of.iter().map(|(name, cpus)| (id(pod, name), cpus.to_string())));
            }
            let entries: Vec<(&str, &str)> = entries.iter().map(|(i, c)| (i.as_str(), c.as_str())).collect();
            v1("static", &state.default.to_string(), &entries)
        }
        "v2" => {
            state.pods.clear();
            export(&state, "static", Exported::V2)
        }
        "v3" => export(&state, "static", Exported::V3),
        _ => export(&state, "static", Exported::V4),
    };
    let file = (condition.edit)(file);
    let online = "0-15".parse().unwrap();
    let reserved = "0-1".parse().unwrap();
    let judgement = judge(&Input {
        dir: "d",
        cpu: Some(file.as_bytes()),
        memory: None,
        policy: Some(condition.policy),
        memory_policy: None,
        pod_level,
        containers: &condition.containers,
        online: Some(&online),
        nodes: None,
        reserved: Some(&reserved),
        strict: condition.strict,
    });
    let word = |answer| match answer {
        Some(Answer::Ok) => "ok",
        Some(Answer::Err) => "err",
        None => "-",
    };
    let kubelet = &judgement.document.kubelet;
    let mut text = format!("{}/{}", word(Some(kubelet.load)), word(kubelet.start));
    let truepin = &judgement.document.truepin;
    text.push_str(if truepin.importable { " yes" } else { " no" });
    let count = |list: &[FindingDoc]| {
        let mut by_code: BTreeMap<&str, usize> = BTreeMap::new();
        for finding in list {
            *by_code.entry(finding.code).or_default() += 1;
        }
        let times = |(code, n): (&str, usize)| if n == 1 { code.to_owned() } else { format!("{code}*{n}") };
        by_code.into_iter().map(times).collect::<Vec<_>>().join(" ")
    };
    let _ = write!(text, " [{}]", count(&truepin.findings));
    if !truepin.notes.is_empty() {
        let _ = write!(text, " ({})", count(&truepin.notes));
    }
    text
}

#[test]
fn both_verdicts_for_every_version_and_condition() {
    let mut table = String::from("kubelet load/start, truepin importable [findings] (notes)\n");
    for condition in conditions() {
        let _ = writeln!(table, "{}", condition.name);
        for (version, pod_level) in [
            ("v1", false),
            ("v2", false),
            ("v2", true),
            ("v3", false),
            ("v3", true),
            ("v4", false),
            ("v4", true),
        ] {
            let gate = if pod_level { "on " } else { "off" };
            let _ = writeln!(table, "  {version} gate {gate} {}", cell(&condition, version, pod_level));
        }
    }
    println!("{table}");
    assert_eq!(table, include_str!("table.txt"), "a verdict has changed");
}
