//! The status document: what is in force, what is wrong, and what it costs.

use super::{
    calls::About,
    documents::{CostDoc, FenceDoc, FindingDoc, KernelDoc, PoolsDoc, RecordDoc, StatusDoc},
};
use crate::{
    engine::Engine,
    hotplug::Hotplug,
    procfs,
    writers::{Means, Writers},
};
use std::collections::BTreeMap;
use truepin::{CgroupPath, CpusetFile, Owner, assignments::Assignment, reconcile::State};

pub(super) fn status(engine: &Engine, about: &About) -> StatusDoc {
    let state = &engine.state;
    let table = &state.assignments;
    let clock = procfs::clock_state(std::path::Path::new("/")).unwrap_or_default();
    let mut owners = BTreeMap::new();
    for a in table.owners.values() {
        *owners.entry(state.in_force(a).name().to_owned()).or_insert(0) += 1;
    }
    let unmet = about.unmet.iter().map(|u| format!("{} is declared and not assigned: {}", u.owner, u.why));
    let broken = state.broken_partitions().into_iter().map(|(owner, at, why)| {
        format!("{owner}: its partition reads {:?}: {why}; remedy: {}", at.to_string(), why.remedy())
    });
    let warning = |(owner, a): (&Owner, &Assignment)| Some(format!("{owner}: {}", a.warning()?));
    let warnings = table.owners.iter().filter_map(warning).collect();
    let findings: Vec<FindingDoc> = state.findings().map(FindingDoc::from).collect();
    StatusDoc {
        schema: "truepin.status/1".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        mode: if state.settings.audit { "audit".into() } else { "enforce".into() },
        settled: state.is_settled(),
        kernel: KernelDoc {
            release: nix::sys::utsname::uname()
                .map(|u| u.release().to_string_lossy().into_owned())
                .unwrap_or_default(),
            cgroup_root: engine.kernel.mount().root.display().to_string(),
            cpuset: state.facts.cpuset,
            partitions: state.facts.exclusive,
            local_partitions: state.facts.local_partitions(),
            empty_write_refused: state.facts.empty_refused,
            bpf: state.facts.bpf,
            notify: engine.watch.is_some(),
            writers: engine.writers.means().is_some(),
            writers_means: means(&engine.writers),
            writers_refused: engine.writers.refused(),
            writers_lost: engine.writers.lost(),
            hotplug: engine.hotplug.as_ref().and_then(Hotplug::means).unwrap_or_default().into(),
            clock_stable: clock.is_stable(),
            clocksource: clock.source,
        },
        pools: PoolsDoc {
            online: state.online.clone(),
            reserved: table.reserved.clone(),
            exclusive: table.exclusive(),
            shared: table.shared_pool(&state.online),
            free: state.free(),
        },
        record: engine.store.as_ref().map(|s| RecordDoc {
            path: s.path().display().to_string(),
            epoch: s.epoch(),
            quarantined: s.quarantined(),
        }),
        owners,
        problems: state.problems().map(ToString::to_string).chain(broken).chain(unmet).collect(),
        warnings,
        fences: fences(state),
        findings: findings.into_iter().rev().take(20).rev().collect(),
        cost: cost(about),
    }
}

fn fences(state: &State) -> Vec<FenceDoc> {
    let one = |path: CgroupPath| {
        let first = state.first.get(&path)?;
        Some(FenceDoc {
            cpus: state.observed.cpuset(&path).map(|f| f.cpus.clone()).unwrap_or_default(),
            first: first.files.get(&CpusetFile::Cpus).cloned().unwrap_or_default(),
            owners: first.fenced_for.iter().cloned().collect(),
            cgroup: path.to_string(),
        })
    };
    state.fenced().into_iter().filter_map(one).collect()
}

/// How writers are named, or why they are not.
fn means(writers: &Writers) -> String {
    match writers.means() {
        Some(Means::Hook(hook)) => format!("{} cgroup_file_write", hook.name()),
        Some(means @ Means::Fanotify) => means.name().into(),
        None => format!("none: {}", writers.refused().join("; ")),
    }
}

fn cost(about: &About) -> CostDoc {
    let (rss_bytes, cpu_ns) = procfs::own_cost().unwrap_or((0, 0));
    let uptime_ns = procfs::now().map_or(0, |n| n.mono_ns.saturating_sub(about.started_ns));
    CostDoc { rss_bytes, cpu_ns, uptime_ns }
}
