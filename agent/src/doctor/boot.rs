//! The kernel's command line.

use super::{Evidence, Facts, Finding, Severity, facts::Said, kernel};

/// What a parameter means here.
struct Meaning {
    key: &'static str,
    check: &'static str,
    severity: Severity,
    what: &'static str,
    remedy: Option<&'static str>,
}

/// Those that concern truepin whatever their value is.
const MEANINGS: [Meaning; 4] = [
    Meaning {
        key: "nohz_full",
        check: "nohz-full",
        severity: Severity::Note,
        what: "these CPUs run without a tick while one task is on them: good for owners, and fixed until \
             the next boot",
        remedy: None,
    },
    Meaning {
        key: "rcu_nocbs",
        check: "rcu-nocbs",
        severity: Severity::Note,
        what: "callbacks of RCU are kept off these CPUs: less kernel work on them",
        remedy: None,
    },
    Meaning {
        key: "nosmt",
        check: "nosmt",
        severity: Severity::Note,
        what: "one thread a core: whole cores are single CPUs",
        remedy: None,
    },
    Meaning {
        key: "cgroup_no_v1",
        check: "cgroup-no-v1",
        severity: Severity::Ok,
        what: "these controllers are kept from cgroup v1",
        remedy: None,
    },
];

/// The list of `isolcpus=[flag,…,]list` and whether it takes the CPUs out of the scheduler's domains, which is what it does
/// without flags (Documentation/admin-guide/kernel-parameters.txt).
fn isolcpus(value: &str) -> (bool, String) {
    let is_flag = |part: &&str| part.starts_with(|c: char| c.is_ascii_alphabetic());
    let (flags, list): (Vec<&str>, Vec<&str>) = value.split(',').partition(is_flag);
    (flags.is_empty() || flags.contains(&"domain"), list.join(","))
}

/// `systemd.unified_cgroup_hierarchy` as systemd reads it; without a value it is true.
fn is_false(value: &str) -> bool {
    ["0", "no", "n", "false", "f", "off"].contains(&value.to_ascii_lowercase().as_str())
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let path = &facts.cmdline.path;
    let text = match &facts.cmdline.said {
        Said::Text(text) => text,
        Said::Absent => return vec![cannot(facts, "absent")],
        Said::Unreadable(why) => return vec![cannot(facts, why)],
    };
    let mut found = Vec::new();
    // What follows `--` is for the init.
    for word in text.split_whitespace().take_while(|w| *w != "--") {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let on = || Evidence::new(path, key, value);
        let meaning = MEANINGS.iter().find(|m| m.key == key);
        found.extend(meaning.map(|m| Finding {
            remedy: m.remedy.map(Into::into),
            ..Finding::new(m.check, m.severity, m.what).on(on())
        }));
        match key {
            "isolcpus" => found.push(match isolcpus(value) {
                (true, list) => Finding::new(
                    "isolcpus",
                    Severity::Warning,
                    format!(
                        "CPUs {list} are \
                     outside of every scheduler domain: threads there are not balanced, no partition can \
                     have them, and truepin hands them out only where a list names them"
                    ),
                )
                .on(on())
                .remedy(
                    "boot without isolcpus=: a partition (`--isolation isolated` for the same \
                         effect) keeps others out at run time",
                ),
                (false, list) => Finding::new(
                    "isolcpus",
                    Severity::Note,
                    format!(
                        "interrupts that the \
                     kernel manages keep off CPUs {list} where they can"
                    ),
                )
                .on(on()),
            }),
            "systemd.unified_cgroup_hierarchy" => found.push(hierarchy(facts, value).on(on())),
            "cgroup_disable" if value.split(',').any(|c| c == "cpuset") => {
                let what = "the cpuset controller is switched off";
                let finding = Finding::new("cgroup-disable", Severity::Problem, what).on(on());
                found.push(finding.remedy("boot without cgroup_disable=cpuset"));
            }
            "tsc" if value == "unstable" => {
                let what = "the TSC is declared unstable: the kernel keeps time with another clock";
                let stable = kernel::clock(facts).severity == Severity::Ok;
                let severity = if stable { Severity::Note } else { Severity::Problem };
                let finding = Finding::new("tsc", severity, what).on(on());
                found.push(if stable { finding } else { finding.remedy("boot without tsc=unstable") });
            }
            _ => {}
        }
    }
    found
}

/// What counts is what came of it.
fn hierarchy(facts: &Facts, value: &str) -> Finding {
    let check = "unified-hierarchy";
    match (is_false(value), kernel::has_cpuset(facts)) {
        (false, _) => Finding::new(check, Severity::Ok, "systemd is told to use cgroup v2 alone"),
        (true, true) => Finding::new(
            check,
            Severity::Note,
            "systemd is told to use cgroup v1, and does not: cpuset is on v2",
        ),
        (true, false) => {
            let what = "systemd is told to use cgroup v1: the cpuset controller goes there";
            Finding::new(check, Severity::Problem, what)
                .remedy("boot with systemd.unified_cgroup_hierarchy=1")
        }
    }
}

fn cannot(facts: &Facts, why: &str) -> Finding {
    Finding::new("boot", Severity::CannotTell, "with what parameters the kernel was booted")
        .on(Evidence::new(&facts.cmdline.path, "", why))
}
