//! The kernel and the cgroup tree: what truepin can have here.

use super::{Evidence, Facts, Finding, Severity, facts::Said};
use truepin::verdict::ClockState;

/// The mount point of the hierarchy of version 2, `/sys/fs/cgroup` if there are several (proc(5)).
pub(super) fn cgroup2(mountinfo: &str) -> Option<String> {
    let mut points: Vec<&str> = mountinfo.lines().filter_map(|l| mounted(l, "cgroup2", None)).collect();
    points.sort_by_key(|p| (*p != "/sys/fs/cgroup", *p));
    points.first().map(|p| (*p).to_owned())
}

/// The mount point of a line of this type that shows the root, with this among its options.
fn mounted<'a>(line: &'a str, kind: &str, option: Option<&str>) -> Option<&'a str> {
    let (left, right) = line.split_once(" - ")?;
    let mut fields = left.split(' ').skip(3);
    let (shown, point) = (fields.next()?, fields.next()?);
    let mut right = right.split(' ');
    let fits = right.next() == Some(kind) && shown == "/";
    let options = right.nth(1).unwrap_or_default();
    (fits && option.is_none_or(|o| options.split(',').any(|have| have == o))).then_some(point)
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut found = vec![btf(facts), cpuset(facts)];
    found.extend(partitions(facts));
    found.push(writers(facts));
    found.extend(foreign(facts));
    found.push(clock(facts));
    found
}

fn btf(facts: &Facts) -> Finding {
    let (path, said) = &facts.btf;
    match said {
        Ok(Some(_)) => {
            Finding::new("btf", Severity::Ok, "the kernel describes its types: eBPF evidence can be had")
                .on(Evidence::new(path, "", "there"))
        }
        Ok(None) => Finding::new(
            "btf",
            Severity::Problem,
            "the kernel has no BTF: no evidence, every verdict INCONCLUSIVE, no audit",
        )
        .on(Evidence::new(path, "", "absent"))
        .remedy("boot a kernel that was built with CONFIG_DEBUG_INFO_BTF=y"),
        Err(why) => Finding::new("btf", Severity::CannotTell, "whether the kernel describes its types")
            .on(Evidence::new(path, "", why))
            .remedy("run it as root"),
    }
}

/// Whether the cpuset controller is on cgroup v2.
pub(super) fn has_cpuset(facts: &Facts) -> bool {
    let text = facts.controllers.as_ref().and_then(|c| c.text()).unwrap_or_default();
    text.split_whitespace().any(|c| c == "cpuset")
}

fn cpuset(facts: &Facts) -> Finding {
    let check = "cgroup-v2";
    let v1 =
        facts.mountinfo.text().unwrap_or_default().lines().find_map(|l| mounted(l, "cgroup", Some("cpuset")));
    let mounts = |value: &str| Evidence::new(&facts.mountinfo.path, "cgroup2", value);
    let Some(controllers) = &facts.controllers else {
        return match &facts.mountinfo.said {
            Said::Unreadable(why) => {
                Finding::new(check, Severity::CannotTell, "where cgroup v2 is mounted").on(mounts(why))
            }
            Said::Text(_) | Said::Absent => Finding::new(
                check,
                Severity::Problem,
                "no cgroup v2 hierarchy is mounted",
            )
            .on(mounts("no such mount"))
            .remedy("boot with systemd.unified_cgroup_hierarchy=1, or mount -t cgroup2 none /sys/fs/cgroup"),
        };
    };
    match &controllers.said {
        Said::Text(text) if has_cpuset(facts) => Finding::new(
            check,
            Severity::Ok,
            "the cpuset controller is on cgroup v2",
        )
        .on(Evidence::new(&controllers.path, "", text.trim())),
        Said::Text(text) => {
            let found = Finding::new(
                check,
                Severity::Problem,
                "the cpuset controller is not on cgroup v2: nothing can be enforced, only audited",
            )
            .on(Evidence::new(&controllers.path, "", text.trim()));
            let found = match v1 {
                Some(point) => found.on(Evidence::new(&facts.mountinfo.path, "cgroup (v1), cpuset", point)),
                None => found,
            };
            found.remedy(
                "boot with systemd.unified_cgroup_hierarchy=1 (or cgroup_no_v1=cpuset), and \
                 without cgroup_disable=cpuset",
            )
        }
        Said::Absent => Finding::new(check, Severity::Problem, "this is no cgroup v2 hierarchy")
            .on(Evidence::new(&controllers.path, "", "absent"))
            .remedy("name the cgroup2 mount in TRUEPIN_CGROUP_ROOT, or leave that unset"),
        Said::Unreadable(why) => Finding::new(check, Severity::CannotTell, "which controllers cgroup v2 has")
            .on(Evidence::new(&controllers.path, "", why)),
    }
}

/// By the files of a cgroup, where one has some; else by the kernel's types.
fn partitions(facts: &Facts) -> Option<Finding> {
    let check = "partitions";
    let has = "partitions can be had: the kernel keeps others out";
    let older = "no cpuset.cpus.exclusive (before Linux 6.7): partitions for what `truepin run` starts \
         alone, members elsewhere";
    let none = "no cpuset.cpus.partition: members only, so others are seen and not kept out";
    let remedy = "a kernel of 6.7 or newer keeps others out of every owner's CPUs";
    let cgroups = match &facts.cgroups {
        Ok(cgroups) => cgroups,
        Err(why) => {
            let at = facts.cgroups_at.clone().unwrap_or_default();
            return Some(
                Finding::new(check, Severity::CannotTell, "the cgroup tree").on(Evidence::new(&at, "", why)),
            );
        }
    };
    if let Some(c) = cgroups.first() {
        let at = |file: &str, value: &str| Evidence::new(&c.path.join(file), "", value);
        let finding = match (&c.exclusive, &c.partition) {
            (Some(_), Some(_)) => {
                Finding::new(check, Severity::Ok, has).on(at("cpuset.cpus.exclusive", "there"))
            }
            (None, Some(_)) => Finding::new(check, Severity::Note, older)
                .on(at("cpuset.cpus.exclusive", "absent"))
                .remedy(remedy),
            (_, None) => Finding::new(check, Severity::Warning, none)
                .on(at("cpuset.cpus.partition", "absent"))
                .remedy(remedy),
        };
        return Some(finding);
    }
    let (path, said) = &facts.btf;
    let key = "struct cpuset, exclusive_cpus";
    match said {
        Ok(Some(true)) => Some(Finding::new(check, Severity::Ok, has).on(Evidence::new(path, key, "there"))),
        Ok(Some(false)) => Some(
            Finding::new(check, Severity::Note, older).on(Evidence::new(path, key, "absent")).remedy(remedy),
        ),
        // That is said already.
        Ok(None) | Err(_) => None,
    }
}

/// Who writes a cgroup's file is told by the best of three means.
fn writers(facts: &Facts) -> Finding {
    let check = "writers";
    let (path, symbols) = &facts.symbols;
    let has = |name: &str| symbols.as_ref().is_ok_and(|s| s.contains(name));
    let btf = matches!(facts.btf.1, Ok(Some(_)));
    if btf && has("register_ftrace_direct") && has("cgroup_file_write") {
        return Finding::new(
            check,
            Severity::Ok,
            "the kernel has what fexit needs to tell who writes a \
             cgroup's file; whether it lets a program attach shows in `truepin status`",
        )
        .on(Evidence::new(path, "register_ftrace_direct, cgroup_file_write", "there"));
    }
    if facts.kprobe.text().is_some() && has("cgroup_file_write") {
        return Finding::new(check, Severity::Ok, "who writes a cgroup's file can be told by a kprobe")
            .on(Evidence::new(&facts.kprobe.path, "", "there"));
    }
    if let Err(why) = symbols {
        return Finding::new(check, Severity::CannotTell, "by what means writers can be told")
            .on(Evidence::new(path, "", why));
    }
    if facts.fanotify.text().is_some() || has("fanotify_handle_event") {
        return Finding::new(
            check,
            Severity::Note,
            "who writes a cgroup's file is told by fanotify alone: a \
             writer that ends at once stays without a name",
        )
        .on(Evidence::new(&facts.fanotify.path, "", "there"))
        .on(Evidence::new(path, "register_ftrace_direct, cgroup_file_write", "not both"))
        .remedy(
            "a kernel with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS or CONFIG_KPROBES names every writer",
        );
    }
    Finding::new(
        check,
        Severity::Warning,
        "who writes a cgroup's file cannot be told: drift is repaired and stays without a cause",
    )
    .on(Evidence::new(path, "register_ftrace_direct, cgroup_file_write", "not both"))
    .on(Evidence::new(&facts.kprobe.path, "", "absent"))
    .on(Evidence::new(&facts.fanotify.path, "", "absent"))
    .remedy("a kernel with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS, CONFIG_KPROBES or CONFIG_FANOTIFY")
}

/// Partitions and lists that are not truepin's.
fn foreign(facts: &Facts) -> Vec<Finding> {
    let Ok(cgroups) = &facts.cgroups else { return Vec::new() };
    let theirs =
        || cgroups.iter().filter(|c| !(c.name == "truepin.slice" || c.name.starts_with("truepin.slice/")));
    let mut found = Vec::new();
    for c in theirs() {
        let state = c.partition.as_deref().unwrap_or("member");
        if state == "member" {
            continue;
        }
        let file = c.path.join("cpuset.cpus.partition");
        found.push(if state.contains("invalid") {
            Finding::new("layout", Severity::Warning, format!("{} is to be a partition and is none", c.name))
                .on(Evidence::new(&file, "", state))
                .remedy(
                    "if it is an owner of truepin's, `truepin status` says why; else write `member` \
                     there, or mend what it reads",
                )
        } else {
            Finding::new(
                "layout",
                Severity::Note,
                format!(
                    "{} is a partition: its CPUs are handed out to \
                 nobody else",
                    c.name
                ),
            )
            .on(Evidence::new(&file, "", state))
        });
    }
    let listed: Vec<_> = theirs().filter(|c| !c.cpus.is_empty()).collect();
    if let Some(first) = listed.first() {
        let what = format!(
            "{} cgroups have CPU lists of their own; in member mode, and beside a partition, truepin \
                 narrows such lists and puts them back on release",
            listed.len()
        );
        let shown = listed.iter().take(8).map(|c| Evidence::new(&c.path.join("cpuset.cpus"), "", &c.cpus));
        let finding = Finding::new("layout", Severity::Note, what);
        let finding = shown.fold(finding, Finding::on);
        found.push(finding.remedy(format!(
            "whoever writes them will write them again: `role = \"ignore\"` for a cgroup such as {} leaves \
                 it alone",
            first.name
        )));
    }
    found
}

pub(super) fn clock(facts: &Facts) -> Finding {
    let check = "clock";
    let Some(source) = facts.clocksource.text() else {
        let why = match &facts.clocksource.said {
            Said::Unreadable(why) => why.clone(),
            Said::Text(_) | Said::Absent => "absent".into(),
        };
        return Finding::new(check, Severity::CannotTell, "which clock the kernel keeps time with")
            .on(Evidence::new(&facts.clocksource.path, "", why));
    };
    let source = source.trim();
    let on = Evidence::new(&facts.clocksource.path, "", source);
    if (ClockState { source: source.into(), ..ClockState::default() }).is_stable() {
        return Finding::new(check, Severity::Ok, format!("the clock {source} is the same on every CPU"))
            .on(on);
    }
    let others = facts.clocksources.text().unwrap_or_default().trim().to_owned();
    let dropped = others.split_whitespace().all(|c| c != "tsc");
    let remedy = if dropped {
        "the kernel has dropped the TSC (`dmesg | grep -i tsc` says why); `tsc=reliable` at boot keeps it \
             where the machine's is sound"
    } else {
        "echo tsc > current_clocksource, and boot without clocksource= and tsc=unstable"
    };
    Finding::new(
        check,
        Severity::Problem,
        format!(
            "times of different CPUs cannot be compared by the clock {source}: every verdict is INCONCLUSIVE"
        ),
    )
    .on(on)
    .on(Evidence::new(&facts.clocksources.path, "", others))
    .remedy(remedy)
}
