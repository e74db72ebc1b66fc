//! What the unit lets the agent do: each capability is there for a reason that shows when it alone is missing, and what
//! the agent may not do it cannot.
//!
//! Steps, for each way to run the agent: with its capabilities everything that they are for works ([`Work`]); without
//! one of them exactly what that one is for does not, and all else does.

use super::{DB, db, main_process, make, property, systemctl, truepin};
use crate::guest::{Cgroup, Guest, Outcome, Workload, agent::http, equal, run, secs, truepin_json, wait_for};
use anyhow::Context;
use std::{
    collections::BTreeMap,
    fmt, fs,
    os::unix::fs::{MetadataExt, chown},
    path::Path,
};
use truepin::CpuSet;

/// Works of the agent that a capability is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// It starts where there is a group `truepin`, and gives it the socket.
    Start,
    /// A cgroup below one that is no partition becomes a partition.
    Partition,
    /// The programs are loaded and attached.
    Evidence,
    /// Who changed a file is known.
    Writer,
    /// The path of a cgroup is known that the agent has no reason to look at.
    Path,
    /// `truepin run`: its cgroup is made below the root cgroup, a directory that is read-only even for root, and a process
    /// that may more than the agent is moved there.
    Enter,
    /// A cgroup is written whose files are another user's.
    Files,
}
use Work::{Enter, Evidence, Files, Partition, Path as PathOf, Start, Writer};

/// One way to run the agent.
struct Way {
    name: &'static str,
    config: &'static str,
    /// What is looked at.
    works: &'static [Work],
    /// What it needs, and what is lost without; all is lost without [`Start`].
    needs: &'static [(&'static str, &'static [Work])],
}

const WAYS: [Way; 4] = [
    Way {
        name: "enforce, partitions",
        config: "isolation = \"partition\"\n",
        works: &[Start, Partition, Evidence, Writer, PathOf, Enter, Files],
        needs: &[
            // It stands for CAP_BPF and CAP_PERFMON too. (Directly below the root, where `Files` is, a partition needs none.)
            ("CAP_SYS_ADMIN", &[Partition, Evidence, Writer, PathOf, Enter]),
            ("CAP_SYS_NICE", &[Enter]),
            ("CAP_DAC_OVERRIDE", &[Enter, Files]),
            ("CAP_DAC_READ_SEARCH", &[PathOf]),
            ("CAP_CHOWN", &[Start]),
        ],
    },
    Way {
        name: "enforce, members",
        config: "isolation = \"member\"\n",
        works: &[Start, Evidence, Writer, PathOf, Enter, Files],
        needs: &[
            ("CAP_BPF", &[Evidence, Writer, PathOf]),
            ("CAP_PERFMON", &[Evidence, Writer, PathOf]),
            ("CAP_SYS_NICE", &[Enter]),
            ("CAP_DAC_OVERRIDE", &[Enter, Files]),
            ("CAP_DAC_READ_SEARCH", &[PathOf]),
            ("CAP_CHOWN", &[Start]),
        ],
    },
    Way {
        name: "enforce, members, no eBPF",
        config: "isolation = \"member\"\n[sources]\nbpf = false\n",
        works: &[Start, Writer, Enter, Files],
        needs: &[
            ("CAP_SYS_ADMIN", &[Writer]),
            ("CAP_SYS_NICE", &[Enter]),
            ("CAP_DAC_OVERRIDE", &[Enter, Files]),
            ("CAP_CHOWN", &[Start]),
        ],
    },
    Way {
        name: "audit",
        config: "mode = \"audit\"\n[[cgroup]]\npath = \"/system.slice/db.service\"\nrole = \"owner\"\n\
                 owner = \"unit/db.service\"\ncpus = \"4-5\"\n",
        works: &[Start, Evidence, PathOf],
        needs: &[("CAP_BPF", &[Start]), ("CAP_PERFMON", &[Start]), ("CAP_CHOWN", &[Start])],
    },
];

/// Another user's cgroup.
const THEIRS: &str = "/theirs";
/// Deeper than anything that the agent has to look at.
const FAR: &str = "/far/away/there";
/// `nobody` of Debian.
const NOBODY: u32 = 65534;

pub(super) fn capabilities(guest: &mut Guest) -> Outcome {
    make("install")?;
    run("sh", &["-c", "echo truepin:x:997: >>/etc/group"])?.ok()?;
    let partitions = Cgroup::create("probe", "+cpuset")?;
    let has_partitions = partitions.dir().join("cpuset.cpus.exclusive").exists();
    partitions.remove()?;
    db()?;
    Cgroup::create(THEIRS, "+cpuset")?;
    Cgroup::create(FAR, "")?;
    let unit = systemctl(&["cat", "truepin.service"])?;
    for way in WAYS.iter().filter(|w| has_partitions || !w.works.contains(&Partition)) {
        let all: Vec<&str> = way.needs.iter().map(|(c, _)| *c).collect();
        for cap in &all {
            anyhow::ensure!(unit.contains(cap), "the unit does not speak of {cap}");
        }
        let seen = with(way, &all)?;
        equal(&format!("what {} lacks with {}", way.name, all.join(" ")), lost(&seen), vec![])?;
        for (without, loses) in way.needs {
            let rest: Vec<&str> = all.iter().copied().filter(|c| c != without).collect();
            let seen = with(way, &rest)?;
            for (work, said) in seen.iter().filter(|(_, s)| s.is_err()) {
                guest.say(format!(
                    "{} without {without}: {work:?}: {}",
                    way.name,
                    said.as_ref().err().map_or("", |s| s.trim())
                ));
            }
            let loses = if loses.contains(&Start) { way.works } else { loses };
            equal(&format!("what {} loses without {without}", way.name), lost(&seen), loses.to_vec())
                .with_context(|| format!("{seen:#?}"))?;
        }
    }
    Ok(())
}

/// What came of each work; an error is what was to be seen of its failure.
type Seen = BTreeMap<Work, Result<(), String>>;

fn lost(seen: &Seen) -> Vec<Work> {
    seen.iter().filter(|(_, s)| s.is_err()).map(|(w, _)| *w).collect()
}

/// Starts the agent in this way with these capabilities and no others, and looks at its works.
fn with(way: &Way, capabilities: &[&str]) -> anyhow::Result<Seen> {
    let dir = Path::new("/etc/systemd/system/truepin.service.d");
    fs::create_dir_all(dir)?;
    let set = format!(
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=no\nCapabilityBoundingSet=\nCapabilityBoundingSet={}\n",
        capabilities.join(" ")
    );
    fs::write(dir.join("capabilities.conf"), set)?;
    fs::write("/etc/truepin/config.toml", way.config)?;
    systemctl(&["daemon-reload"])?;
    let started = run("systemctl", &["restart", "truepin.service"])?;
    let mut seen = Seen::new();
    if started.code() != 0 {
        let log = run("journalctl", &["-q", "--no-pager", "-o", "cat", "-n", "30", "-u", "truepin.service"])?;
        let why = log.stdout.lines().rev().find(|l| l.contains("error: "));
        let why = why.with_context(|| format!("the agent did not start and did not say why: {log}"))?;
        return Ok(way.works.iter().map(|w| (*w, Err(why.to_owned()))).collect());
    }
    for work in way.works {
        let said = work.look(way).with_context(|| format!("{work:?} of {}", way.name))?;
        seen.insert(*work, said);
    }
    if !way.config.contains("audit") {
        truepin(&["release", "--all"])?.ok()?;
    }
    Ok(seen)
}

fn no(what: impl fmt::Display) -> Result<(), String> {
    Err(what.to_string())
}

impl Work {
    fn look(self, way: &Way) -> anyhow::Result<Result<(), String>> {
        let assign = |owner: &str, path: &str| truepin(&["assign", owner, "--cgroup", path, "--cpus", "1"]);
        match self {
            Start => {
                let gid = fs::metadata("/run/truepin/truepin.sock")?.gid();
                Ok((gid == 997).then_some(()).ok_or(format!("the socket's group is {gid}")))
            }
            Evidence => {
                let status = truepin_json(&["status"])?.1;
                if status["kernel"]["bpf"] == true {
                    return Ok(Ok(()));
                }
                Ok(no(journal("no kernel evidence")?))
            }
            Partition => {
                let ran = assign("unit/db.service", DB)?;
                let state = Cgroup::at(DB).read("cpuset.cpus.partition")?;
                truepin(&["release", "unit/db.service"])?;
                if state == "root" { Ok(Ok(())) } else { Ok(no(format!("{state}; {}", ran.stderr))) }
            }
            Enter => {
                let ran = truepin(&["run", "--cpus", "1", "--", "true"])?;
                if ran.code() == 0 { Ok(Ok(())) } else { Ok(no(ran.stderr)) }
            }
            Files => {
                // Each time: files are made anew, as root's, when systemd ends the controller and enables it again.
                for entry in fs::read_dir(Cgroup::at(THEIRS).dir())? {
                    chown(entry?.path(), Some(NOBODY), None)?;
                }
                let ran = assign("cgroup/theirs", THEIRS)?;
                truepin(&["release", "cgroup/theirs"])?;
                if ran.code() == 0 { Ok(Ok(())) } else { Ok(no(ran.stderr)) }
            }
            Writer => {
                let means = &truepin_json(&["status"])?.1["kernel"]["writers_means"];
                let means = means.as_str().context("no writers_means")?;
                if means.starts_with("none") { Ok(no(means)) } else { Ok(Ok(())) }
            }
            PathOf if way.config.contains("audit") => intruder(),
            PathOf => writer(way),
        }
    }
}

fn journal(what: &str) -> anyhow::Result<String> {
    let log = run("journalctl", &["-q", "--no-pager", "-o", "cat", "-u", "truepin.service", "-g", what])?;
    Ok(log.stdout.lines().last().unwrap_or_default().to_owned())
}

/// Somebody in a cgroup far away changes a file of an owner.
fn writer(way: &Way) -> anyhow::Result<Result<(), String>> {
    // Of a partition `cpuset.cpus` is not looked at: it changes nothing.
    let (file, value) = if way.works.contains(&Partition) {
        ("cpuset.cpus.partition", "member")
    } else {
        ("cpuset.cpus", "0-7")
    };
    let ran = truepin(&["assign", "unit/db.service", "--cgroup", DB, "--cpus", "1"])?;
    if ran.code() != 0 {
        return Ok(no(ran.stderr));
    }
    let write = Workload::writing(&Cgroup::at(DB).dir().join(file), value).cgroup(FAR);
    write.answer()?.with_context(|| format!("writing {value} to {file}"))?;
    let finding = wait_for("a finding on the write", secs(20), || {
        let (_, findings) = http("GET", "/v1/findings", None)?;
        let all = findings["findings"].as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().rfind(|f| f["kind"] == "drift"))
    })?;
    truepin(&["release", "unit/db.service"])?.ok()?;
    let text = finding["text"].as_str().unwrap_or_default();
    if text.contains(FAR) { Ok(Ok(())) } else { Ok(no(text)) }
}

/// Somebody in a cgroup far away runs on an owner's CPU.
fn intruder() -> anyhow::Result<Result<(), String>> {
    let cpus: CpuSet = "4".parse()?;
    let _there = Workload::blink(1, secs(1), secs(0)).comm("far").cgroup(FAR).pin(&cpus).spawn()?;
    let (_, answer) = truepin_json(&["verify", "--for", "1s"])?;
    let intruders = answer["verdicts"][0]["intruders"].as_array().cloned().unwrap_or_default();
    let far =
        intruders.iter().find(|i| i["comm"] == "far").with_context(|| format!("not seen: {answer:#}"))?;
    if far["cgroup"] == FAR {
        Ok(Ok(()))
    } else {
        Ok(no(format!("the intruder's cgroup is {}", far["cgroup"])))
    }
}

/// The best that `systemd-analyze security` may say is 0.0; what it says of a unit without any of this is 9.6.
const EXPOSURE_AT_MOST: &str = "40";

pub(super) fn hardened(guest: &mut Guest) -> Outcome {
    super::installed_agent()?;
    let verified = run("systemd-analyze", &["verify", "truepin.service"])?.ok()?;
    equal("complaints of systemd-analyze verify", verified.stderr.trim(), "")?;
    let threshold = format!("--threshold={EXPOSURE_AT_MOST}");
    let security = run("systemd-analyze", &["security", "--no-pager", &threshold, "truepin.service"])?;
    guest.say(security.stdout.lines().filter(|l| !l.starts_with('✓')).collect::<Vec<_>>().join("\n"));
    let security = security.ok()?;
    let overall =
        security.stdout.lines().find(|l| l.contains("Overall exposure level")).context("no score")?;
    guest.say(overall);

    let agent = main_process("truepin.service")?;
    let status = fs::read_to_string(format!("/proc/{}/status", agent.0))?;
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        anyhow::ensure!(status.lines().any(|l| l == line), "no {line:?} in {status}");
    }
    // As the agent sees the file system.
    let pid = agent.0.to_string();
    let touch = |path: &str| run("nsenter", &["-t", &pid, "-m", "touch", path]);
    for path in ["/usr/x", "/etc/truepin/x", "/run/x", "/var/lib/x", "/root/x", "/run/systemd/x"] {
        let ran = touch(path)?;
        anyhow::ensure!(ran.code() != 0, "the agent may make {path}");
    }
    let kernel = run("nsenter", &["-t", &pid, "-m", "sh", "-c", "echo 1 >/proc/sys/kernel/panic"])?;
    anyhow::ensure!(kernel.code() != 0, "the agent may write to /proc/sys");
    for path in ["/var/lib/truepin/x", "/run/truepin/x", "/run/systemd/system.control/x"] {
        touch(path)?.ok()?;
        fs::remove_file(path).with_context(|| format!("removing {path}"))?;
    }
    equal("the service", property("truepin.service", "SubState")?, "running".to_owned())
}
