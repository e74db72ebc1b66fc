//! A host in a directory, sound but for what a test changes.

use super::*;
use std::{fs, os::unix::fs::symlink};

struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        for (path, text) in [
            ("proc/cmdline", "root=/dev/vda quiet -- isolcpus=1"),
            (
                "proc/kallsyms",
                "0 T register_ftrace_direct\n0 t cgroup_file_write\n0 t fanotify_handle_event\n",
            ),
            ("proc/sys/fs/fanotify/max_user_groups", "128"),
            ("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
            ("proc/1/comm", "systemd"),
            ("sys/devices/system/cpu/present", "0-7"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
            ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet"),
            ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu"),
            ("sys/fs/cgroup/system.slice/cpuset.cpus", ""),
            ("sys/fs/cgroup/system.slice/cpuset.cpus.exclusive", ""),
            ("sys/fs/cgroup/system.slice/cpuset.cpus.partition", "member"),
        ] {
            host.put(path, text);
        }
        host
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn process(&self, pid: u32, comm: &str) {
        self.put(&format!("proc/{pid}/comm"), comm);
        fs::write(self.0.path().join(format!("proc/{pid}/cmdline")), format!("{comm}\0")).unwrap();
        symlink(self.0.path(), self.0.path().join(format!("proc/{pid}/root"))).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.0.path().join(path)).unwrap();
    }

    /// Read, with the kernel's types as said: no test has a kernel's BTF at hand.
    fn facts(&self, exclusive: Result<Option<bool>, String>) -> Facts {
        let mut facts = Facts::read(self.0.path(), None);
        facts.btf.1 = exclusive;
        facts
    }

    fn report(&self) -> Report {
        judge(&self.facts(Ok(Some(true))))
    }
}

fn of<'a>(report: &'a Report, check: &str) -> Vec<&'a Finding> {
    report.findings.iter().filter(|f| f.check == check).collect()
}

/// Of a sound host with this done to it: how bad `check` is, and that the evidence holds `value`.
#[track_caller]
fn with(change: impl FnOnce(&Host), check: &str, severity: Severity, value: &str) -> Report {
    let host = Host::new();
    change(&host);
    let report = host.report();
    let found = of(&report, check);
    let fits = |f: &&Finding| f.severity == severity && f.evidence.iter().any(|e| e.value.contains(value));
    assert!(found.iter().any(fits), "{check}: {found:#?}");
    for f in found.iter().filter(|f| f.severity >= Severity::Warning) {
        assert!(f.remedy.is_some() || f.severity == Severity::CannotTell, "{f:#?}");
    }
    report
}

#[test]
fn a_sound_host_has_nothing_wrong() {
    let report = Host::new().report();
    assert!(report.findings.iter().all(|f| f.severity == Severity::Ok), "{report:#?}");
    assert_eq!((report.severity, report.exit_code()), (Severity::Ok, 0));
    let checks: Vec<_> = report.findings.iter().map(|f| f.check).collect();
    assert_eq!(checks, ["btf", "cgroup-v2", "partitions", "writers", "clock", "kubelet"]);
}

#[test]
fn the_kernel() {
    use Severity::{CannotTell, Note, Ok as Fine, Problem, Warning};
    let exclusive = "sys/fs/cgroup/system.slice/cpuset.cpus.exclusive";
    let partition = "sys/fs/cgroup/system.slice/cpuset.cpus.partition";
    let none = |_: &Host| {};
    with(none, "partitions", Fine, "there");
    with(|h| h.remove(exclusive), "partitions", Note, "absent");
    with(|h| [exclusive, partition].into_iter().for_each(|f| h.remove(f)), "partitions", Warning, "absent");
    let report =
        with(|h| h.put("sys/fs/cgroup/cgroup.controllers", "cpu memory"), "cgroup-v2", Problem, "cpu memory");
    assert_eq!(report.exit_code(), 1);
    let hybrid = "36 25 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                  35 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
    let v1 = |h: &Host| {
        h.put("proc/self/mountinfo", hybrid);
        h.put("sys/fs/cgroup/unified/cgroup.controllers", "");
    };
    with(v1, "cgroup-v2", Problem, "/sys/fs/cgroup/cpuset");
    with(
        |h| h.put("proc/self/mountinfo", "1 2 0:3 / / rw - ext4 x rw"),
        "cgroup-v2",
        Problem,
        "no such mount",
    );
    with(|h| h.put("proc/kallsyms", "0 t fanotify_handle_event"), "writers", Note, "not both");
    let kprobe = |h: &Host| {
        h.put("proc/kallsyms", "0 t cgroup_file_write");
        h.put("sys/bus/event_source/devices/kprobe/type", "8");
    };
    with(kprobe, "writers", Fine, "there");
    let nothing = |h: &Host| {
        h.put("proc/kallsyms", "0 t other");
        h.remove("proc/sys/fs/fanotify/max_user_groups");
    };
    with(nothing, "writers", Warning, "absent");
    let report = with(|h| h.remove("proc/kallsyms"), "writers", CannotTell, "No such file");
    assert_eq!(report.exit_code(), 3);
    // Without BTF; and on a host where no cgroup has cpuset files the kernel's types say what it can.
    let bare = Host::new();
    for file in ["cpuset.cpus", "cpuset.cpus.exclusive", "cpuset.cpus.partition"] {
        bare.remove(&format!("sys/fs/cgroup/system.slice/{file}"));
    }
    for (btf, severity, partitions) in [
        (Ok(Some(true)), Fine, Some(Fine)),
        (Ok(Some(false)), Fine, Some(Note)),
        (Ok(None), Problem, None),
        (Err("no".to_owned()), CannotTell, None),
    ] {
        let report = judge(&bare.facts(btf));
        assert_eq!(of(&report, "btf")[0].severity, severity);
        assert_eq!(of(&report, "partitions").first().map(|f| f.severity), partitions);
    }
}

#[test]
fn clocks() {
    use Severity::{CannotTell, Problem};
    let dir = "sys/devices/system/clocksource/clocksource0";
    let [current, available] = ["current", "available"].map(|n| format!("{dir}/{n}_clocksource"));
    let report = with(|h| h.put(&current, "hpet"), "clock", Problem, "hpet");
    assert!(of(&report, "clock")[0].remedy.as_ref().unwrap().contains("echo tsc"), "{report:#?}");
    let dropped = |h: &Host| {
        h.put(&current, "acpi_pm");
        h.put(&available, "hpet acpi_pm");
    };
    let report = with(dropped, "clock", Problem, "acpi_pm");
    assert!(of(&report, "clock")[0].remedy.as_ref().unwrap().contains("dropped"), "{report:#?}");
    with(|h| h.remove(&current), "clock", CannotTell, "absent");
    let declared = |h: &Host| {
        h.put("proc/cmdline", "tsc=unstable");
        h.put(&current, "hpet");
    };
    with(declared, "tsc", Problem, "unstable");
    with(|h| h.put(&current, "arch_sys_counter"), "clock", Severity::Ok, "arch_sys_counter");
}

#[test]
fn boot_parameters() {
    use Severity::{CannotTell, Note, Ok as Fine, Problem, Warning};
    for (word, check, severity, value) in [
        ("isolcpus=2-5", "isolcpus", Warning, "2-5"),
        ("isolcpus=managed_irq,domain,2-5", "isolcpus", Warning, "2-5"),
        ("isolcpus=managed_irq,2-5", "isolcpus", Note, "2-5"),
        ("nohz_full=2-5", "nohz-full", Note, "2-5"),
        ("rcu_nocbs=2-5", "rcu-nocbs", Note, "2-5"),
        ("nosmt=force", "nosmt", Note, "force"),
        ("nosmt", "nosmt", Note, ""),
        ("cgroup_no_v1=all", "cgroup-no-v1", Fine, "all"),
        ("cgroup_disable=memory,cpuset", "cgroup-disable", Problem, "cpuset"),
        ("systemd.unified_cgroup_hierarchy=0", "unified-hierarchy", Note, "0"),
        ("tsc=unstable", "tsc", Note, "unstable"),
        ("systemd.unified_cgroup_hierarchy=1", "unified-hierarchy", Fine, "1"),
        ("systemd.unified_cgroup_hierarchy", "unified-hierarchy", Fine, ""),
    ] {
        let report = with(|h| h.put("proc/cmdline", &format!("quiet {word}")), check, severity, value);
        assert_eq!(of(&report, check).len(), 1, "{word}");
        assert_eq!(report.exit_code(), u8::from(severity == Problem), "{word}");
        // And without it, or behind what is for the init, it is not found.
        let host = Host::new();
        host.put("proc/cmdline", &format!("quiet -- {word}"));
        assert!(of(&host.report(), check).is_empty(), "{word}");
    }
    let v1 = |h: &Host| {
        h.put("proc/cmdline", "systemd.unified_cgroup_hierarchy=false");
        h.put("sys/fs/cgroup/cgroup.controllers", "cpu");
    };
    with(v1, "unified-hierarchy", Problem, "false");
    with(|h| h.remove("proc/cmdline"), "boot", CannotTell, "absent");
}

#[test]
fn other_writers() {
    use Severity::{CannotTell, Note, Ok as Fine, Problem, Warning};
    let state = ("var/lib/kubelet/cpu_manager_state", r#"{"policyName":"static","defaultCpuSet":"0-1"}"#);
    let kubelet = |h: &Host| h.process(12, "kubelet");
    let static_policy = |h: &Host| {
        kubelet(h);
        h.put(state.0, state.1);
    };
    with(static_policy, "kubelet", Problem, "policyName static");
    with(kubelet, "kubelet", Fine, "pid 12");
    with(|h| h.put(state.0, state.1), "kubelet", Note, "static");

    let irqbalance = |h: &Host| h.process(13, "irqbalance");
    with(irqbalance, "irqbalance", Warning, "pid 13");
    let banned = |h: &Host| {
        irqbalance(h);
        h.put("etc/default/irqbalance", "# IRQBALANCE_BANNED_CPULIST=1\nIRQBALANCE_BANNED_CPULIST=\"2-7\"");
    };
    with(banned, "irqbalance", Note, "2-7");

    let tuned = |profile: &'static str| {
        move |h: &Host| {
            h.process(14, "tuned");
            h.put("etc/tuned/active_profile", profile);
        }
    };
    with(tuned("throughput-performance"), "tuned", Fine, "throughput-performance");
    with(tuned("cpu-partitioning-powersave"), "tuned", Warning, "cpu-partitioning-powersave");

    let nomad = |h: &Host| {
        h.process(15, "nomad");
        h.put("etc/nomad.d/nomad.hcl", "client {\n  reservable_cores = \"0-3\"\n}");
        h.put("sys/fs/cgroup/nomad.slice/reserve.slice/cpuset.cpus", "0-1");
    };
    let report = with(nomad, "nomad", Warning, "0-3");
    assert!(of(&report, "nomad")[0].evidence.iter().any(|e| e.value == "0-1"), "{report:#?}");

    for (daemon, check) in [("incusd", "incus"), ("lxd", "lxd")] {
        let containers = |cpus: &'static str| {
            move |h: &Host| {
                h.process(16, daemon);
                h.put("sys/fs/cgroup/lxc.payload.web/cpuset.cpus", cpus);
            }
        };
        with(containers(""), check, Note, "pid 16");
        with(containers("2-3"), check, Warning, "2-3");
    }
    let libvirt = |h: &Host| h.process(17, "virtqemud");
    with(libvirt, "libvirt", Warning, "not set");
    let without = |h: &Host| {
        libvirt(h);
        h.put(
            "etc/libvirt/qemu.conf",
            "#cgroup_controllers = [ \"cpuset\" ]\ncgroup_controllers = [\n  \"cpu\",\n  \"memory\" ]",
        );
    };
    with(without, "libvirt", Fine, "memory");

    // What does not run writes nothing, whatever its files say.
    let host = Host::new();
    host.put("etc/tuned/active_profile", "realtime");
    host.put("etc/nomad.d/nomad.hcl", "reservable_cores = \"0-3\"");
    assert_eq!(host.report().exit_code(), 0);
    assert!(host.report().findings.iter().all(|f| f.severity == Fine), "{:#?}", host.report());
    let mut facts = host.facts(Ok(Some(true)));
    facts.processes = Err("hidden".into());
    let report = judge(&facts);
    assert_eq!((of(&report, "processes")[0].severity, report.exit_code()), (CannotTell, 3));
}

#[test]
fn units_and_layout() {
    use Severity::{Note, Problem, Warning};
    let unit = |line: &'static str| move |h: &Host| h.put("etc/systemd/system/db.service.d/cpus.conf", line);
    with(unit("[Service]\nAllowedCPUs=2-3 5"), "units", Note, "2-3 5");
    with(unit("AllowedCPUs=2-11"), "units", Problem, "2-11");
    with(unit("CPUAffinity=0-1"), "units", Note, "0-1");
    let host = Host::new();
    host.put("etc/systemd/system/db.service", "#AllowedCPUs=2-11\nAllowedCPUs=\nCPUWeight=20");
    assert!(of(&host.report(), "units").is_empty());

    let state =
        |text: &'static str| move |h: &Host| h.put("sys/fs/cgroup/vm.slice/cpuset.cpus.partition", text);
    let files = |h: &Host| h.put("sys/fs/cgroup/vm.slice/cpuset.cpus", "");
    for (text, severity) in [("root", Note), ("isolated", Note), ("root invalid (Cpu list)", Warning)] {
        with(
            |h| {
                files(h);
                state(text)(h);
            },
            "layout",
            severity,
            text,
        );
    }
    with(|h| h.put("sys/fs/cgroup/vm.slice/cpuset.cpus", "2-3"), "layout", Note, "2-3");
    // What is truepin's own is no finding.
    let host = Host::new();
    for (file, text) in [("cpus", "2-3"), ("cpus.exclusive", "2-3"), ("cpus.partition", "root")] {
        host.put(&format!("sys/fs/cgroup/truepin.slice/run-a/cpuset.{file}"), text);
    }
    assert!(of(&host.report(), "layout").is_empty());
}
