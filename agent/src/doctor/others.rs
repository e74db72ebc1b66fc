//! Who else on this host decides where tasks run.

use super::{
    Evidence, Facts, Finding, Severity,
    facts::{Process, Said, Saying},
};
use truepin::CpuSet;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    match &facts.processes {
        Ok(processes) if processes.is_empty() => {
            found.push(Finding::new(
                "processes",
                Severity::CannotTell,
                "which daemons run: no process is shown",
            ));
        }
        Ok(_) => {}
        Err(why) => {
            found.push(Finding::new("processes", Severity::CannotTell, format!("which daemons run: {why}")));
        }
    }
    found.push(kubelet(facts));
    let known = [irqbalance(facts), tuned(facts), nomad(facts), incus(facts), libvirt(facts)];
    found.extend(known.into_iter().flatten());
    found.extend(units(facts));
    found
}

fn running(finding: Finding, processes: &[&Process]) -> Finding {
    let shown = processes.iter().take(4);
    shown.fold(finding, |f, p| f.on(Evidence::new(&p.path, "", format!("{} (pid {})", p.comm, p.pid))))
}

/// The values of a setting in a file of lines `key=value` or `key = value`; comments are no lines.
fn value<'a>(file: &'a Saying, key: &str) -> Option<&'a str> {
    let lines = file.text()?.lines().map(str::trim).filter(|l| !l.starts_with(['#', ';', '/']));
    let values = lines.filter_map(|l| l.split_once('=')).filter(|(k, _)| k.trim() == key);
    // The last one counts.
    values.map(|(_, v)| v.trim().trim_matches('"')).next_back()
}

/// A list in brackets, which may take several lines; comments have their sign before the key.
fn list(file: &Saying, key: &str) -> Option<String> {
    let mut lines = file.text()?.lines().map(str::trim).filter(|l| !l.starts_with('#'));
    let begins = |l: &str| Some(l.strip_prefix(key)?.trim_start().strip_prefix('=')?.trim().to_owned());
    let mut text = lines.find_map(begins)?;
    while !text.contains(']') {
        text = format!("{text} {}", lines.next()?);
    }
    Some(text)
}

fn kubelet(facts: &Facts) -> Finding {
    const NAMES: [&str; 5] = ["kubelet", "k3s-server", "rke2", "kubelite", "microshift"];
    let check = "kubelet";
    if let Some(found) = &facts.kubelet {
        let what = format!(
            "a kubelet with the static policy (pid {}) gives out this node's CPUs: {}",
            found.pid, found.says
        );
        return Finding::new(check, Severity::Problem, what)
            .on(Evidence::new(&found.dir, "", &found.says))
            .remedy(
                "`truepin agent --mode migrate` takes its assignments over and says what to change; \
                 `--mode audit` watches beside it",
            );
    }
    let running_now = facts.running(&NAMES);
    if !running_now.is_empty() {
        let finding = Finding::new(check, Severity::Ok, "a kubelet runs and gives out no CPUs of its own");
        return running(finding, &running_now);
    }
    let state = &facts.kubelet_state;
    let key = "policyName";
    let policy = state.text().and_then(|t| serde_json::from_str::<serde_json::Value>(t).ok());
    let policy = policy.and_then(|d| Some(d.get(key)?.as_str()?.to_owned()));
    match (&state.said, policy.as_deref()) {
        (Said::Text(_), Some("static")) => Finding::new(
            check,
            Severity::Note,
            "no kubelet runs, and one with the static policy has run \
                 here: what it left says nothing about now",
        )
        .on(Evidence::new(&state.path, key, "static"))
        .remedy("`truepin import kubelet --dry-run` says what it is worth"),
        (Said::Unreadable(why), _) => Finding::new(check, Severity::CannotTell, "what a kubelet left behind")
            .on(Evidence::new(&state.path, "", why)),
        _ => Finding::new(check, Severity::Ok, "no kubelet gives out CPUs"),
    }
}

/// It writes no cpusets, but moves interrupts onto the CPUs that are idle: exclusive ones often are.
fn irqbalance(facts: &Facts) -> Option<Finding> {
    const KEYS: [&str; 2] = ["IRQBALANCE_BANNED_CPULIST", "IRQBALANCE_BANNED_CPUS"];
    let now = facts.running(&["irqbalance"]);
    if now.is_empty() {
        return None;
    }
    let check = "irqbalance";
    for file in &facts.irqbalance {
        for key in KEYS {
            if let Some(banned) = value(file, key).filter(|v| !v.is_empty()) {
                let what =
                    format!("irqbalance keeps interrupts off CPUs {banned}, and may put them on any other");
                let finding =
                    Finding::new(check, Severity::Note, what).on(Evidence::new(&file.path, key, banned));
                return Some(running(finding, &now));
            }
        }
    }
    let finding = Finding::new(
        check,
        Severity::Warning,
        "irqbalance moves interrupts to any CPU, exclusive ones too: kernel work there, which verdicts show",
    );
    let finding = match facts.irqbalance.first() {
        Some(file) => finding.on(Evidence::new(&file.path, KEYS[0], "not set")),
        None => finding,
    };
    Some(running(finding, &now).remedy(
        "set IRQBALANCE_BANNED_CPULIST to the CPUs that truepin gives out \
         (all but `reserved`), and restart it",
    ))
}

fn tuned(facts: &Facts) -> Option<Finding> {
    const BINDING: [&str; 3] = ["cpu-partitioning", "realtime", "openshift-node-performance"];
    let now = facts.running(&["tuned"]);
    if now.is_empty() {
        return None;
    }
    let profile = facts.tuned.text().unwrap_or_default().trim();
    let on = Evidence::new(&facts.tuned.path, "", if profile.is_empty() { "none" } else { profile });
    let binds = profile.split_whitespace().any(|p| BINDING.iter().any(|b| p.starts_with(b)));
    let finding = if binds {
        Finding::new(
            "tuned",
            Severity::Warning,
            format!(
                "tuned's profile {profile} moves tasks and \
             interrupts by its own list of CPUs, at start and when processes come"
            ),
        )
        .remedy(
            "a profile without isolated_cores and without the cgroup plugin, e.g. `tuned-adm \
                 profile throughput-performance`",
        )
    } else {
        Finding::new("tuned", Severity::Ok, "tuned's profile leaves it to others where tasks run")
    };
    Some(running(finding.on(on), &now))
}

fn nomad(facts: &Facts) -> Option<Finding> {
    let now = facts.running(&["nomad"]);
    if now.is_empty() {
        return None;
    }
    let check = "nomad";
    let reserved = facts.nomad.iter().find_map(|f| Some((f, value(f, "reservable_cores")?)));
    let tree = facts.cgroups.iter().flatten().find(|c| c.name.starts_with("nomad.slice/"));
    let what = "a Nomad client writes cpuset.cpus below nomad.slice for tasks with `cores`";
    let finding = Finding::new(check, Severity::Warning, what);
    let finding = match tree {
        Some(c) => finding.on(Evidence::new(&c.path.join("cpuset.cpus"), "", &c.cpus)),
        None => finding,
    };
    let finding = match reserved {
        Some((file, cores)) => finding.on(Evidence::new(&file.path, "reservable_cores", cores)),
        None => finding,
    };
    Some(running(finding, &now).remedy(
        "give it CPUs that truepin does not give out: `reservable_cores` in its client block, the same list \
             in truepin's `reserved`, and `role = \"ignore\"` for nomad.slice",
    ))
}

fn incus(facts: &Facts) -> Option<Finding> {
    let now = facts.running(&["incusd", "lxd"]);
    let check = if now.first()?.comm == "lxd" { "lxd" } else { "incus" };
    let is_payload = |name: &str| name.starts_with("lxc.payload");
    let payloads: Vec<_> = facts.cgroups.iter().flatten().filter(|c| is_payload(&c.name)).collect();
    let listed: Vec<_> = payloads.iter().filter(|c| !c.cpus.is_empty()).collect();
    let what = if listed.is_empty() {
        "it writes cpuset.cpus of its containers, of which none has a list now".to_owned()
    } else {
        format!(
            "it writes cpuset.cpus of its containers ({} of them have lists) and spreads them anew when \
                 CPUs or containers come and go",
            listed.len()
        )
    };
    let severity = if listed.is_empty() { Severity::Note } else { Severity::Warning };
    let finding = Finding::new(check, severity, what);
    let finding = listed
        .iter()
        .take(4)
        .fold(finding, |f, c| f.on(Evidence::new(&c.path.join("cpuset.cpus"), "", &c.cpus)));
    let finding = running(finding, &now);
    Some(if listed.is_empty() {
        finding
    } else {
        finding.remedy(
            "pin its instances to CPUs that truepin does not give out (`limits.cpu` as a list, such as 0-1)",
        )
    })
}

fn libvirt(facts: &Facts) -> Option<Finding> {
    let now = facts.running(&["libvirtd", "virtqemud"]);
    if now.is_empty() {
        return None;
    }
    let (check, key) = ("libvirt", "cgroup_controllers");
    let controllers = list(&facts.qemu, key);
    let finding = match &controllers {
        Some(list) if !list.contains("\"cpuset\"") => Finding::new(
            check,
            Severity::Ok,
            "libvirt leaves cpusets alone",
        )
        .on(Evidence::new(&facts.qemu.path, key, list)),
        _ => Finding::new(
            check,
            Severity::Warning,
            "libvirt writes cpuset.cpus of its machines' cgroups, \
             for vcpupin, emulatorpin and when CPUs come",
        )
        .on(Evidence::new(
            &facts.qemu.path,
            key,
            controllers.as_deref().unwrap_or("not set: cpuset among them"),
        ))
        .remedy(
            "cgroup_controllers without \"cpuset\" in qemu.conf, or machines whose <vcpu cpuset=…> \
                 keeps to CPUs that truepin does not give out",
        ),
    };
    Some(running(finding, &now))
}

fn units(facts: &Facts) -> Vec<Finding> {
    let present: Option<CpuSet> = facts.present.text().and_then(|t| t.trim().parse().ok());
    let judged = |s: &super::facts::Setting| {
        let on = Evidence::new(&s.path, &s.key, &s.value);
        let cpus: Option<CpuSet> = s.value.replace(' ', ",").parse().ok();
        let missing = match (&cpus, &present) {
            (Some(cpus), Some(present)) if s.key != "AllowedMemoryNodes" => cpus.difference(present),
            _ => CpuSet::new(),
        };
        if s.value.contains('%') {
            return Finding::new("units", Severity::Note, "a unit's CPUs are given by a specifier").on(on);
        }
        if !missing.is_empty() {
            let what = format!(
                "{} names CPUs {missing}, which this machine does not have: systemd drops them without a word",
                s.key
            );
            return Finding::new("units", Severity::Problem, what).on(on).remedy("name CPUs that are there");
        }
        if s.key == "CPUAffinity" {
            let what = "tasks' masks are set by CPUAffinity: it survives changes of cpusets, and CPUs \
                 outside of it stay unused";
            return Finding::new("units", Severity::Note, what).on(on);
        }
        Finding::new(
            "units",
            Severity::Note,
            "systemd writes a unit's cpuset from its settings; truepin \
             sets the same property for an owner, and puts it back",
        )
        .on(on)
    };
    facts.units.iter().map(judged).collect()
}
