//! `truepin topology`

use super::{
    Format, Output,
    output::{Failure, json, print},
};
use crate::{paths::Paths, sysfs};
use clap::Args;
use std::fmt::Write;
use std::path::PathBuf;
use truepin::{
    CpuSet, CpuTopology,
    topology::{Core, render},
};

#[derive(Debug, Args)]
pub(super) struct TopologyArgs {
    /// A recorded machine: the directory that holds its `sys` [default: this machine]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

pub(super) fn topology(args: &TopologyArgs, paths: &Paths) -> Result<u8, Failure> {
    let root = args.root.as_ref().unwrap_or(&paths.sysfs);
    let hint = "--root expects the directory that holds sys/devices/system/cpu";
    let topology = sysfs::topology(root).map_err(|e| Failure::new(3, &e, Some(hint)))?;
    match args.format.output {
        Output::Json => json(&render::document(&topology))?,
        Output::Table => print(&tree(&topology))?,
    }
    Ok(0)
}

/// Package, node, last-level cache, cores: a level is left out where it tells nothing.
fn tree(t: &CpuTopology) -> String {
    let (online, cores) = (t.online(), t.cores());
    let mut text = format!("CPUs {online} online, {} cores, {} NUMA nodes", cores.len(), t.nodes().len());
    if !t.offline().is_empty() {
        let _ = write!(text, ", offline {}", t.offline());
    }
    text.push('\n');
    let whole = [online.clone()];
    let packages: Vec<CpuSet> = t.packages().iter().map(|p| p.cpus.clone()).collect();
    let packages = if packages.is_empty() { whole.to_vec() } else { packages };
    for (i, package) in packages.iter().enumerate() {
        let _ = writeln!(text, "package {i}: CPUs {package}");
        for node in t.nodes().iter().filter(|n| !n.cpus.is_disjoint(package)) {
            let cpus = node.cpus.intersection(package).intersection(online);
            let memory = node.memory_bytes.map(|b| format!(", {} MiB", b >> 20)).unwrap_or_default();
            let _ = writeln!(text, "  node {}: CPUs {cpus}{memory}", node.id);
            caches(t, &cpus, &mut text);
        }
        let homeless = package.intersection(&t.cpus_without_node());
        if !homeless.is_empty() {
            let _ = writeln!(text, "  no node: CPUs {homeless}");
            caches(t, &homeless, &mut text);
        }
    }
    for node in t.nodes().iter().filter(|n| n.cpus.is_disjoint(online)) {
        let memory = node.memory_bytes.map(|b| format!("{} MiB", b >> 20)).unwrap_or_default();
        let _ = writeln!(text, "node {}: no CPUs, {memory}", node.id);
    }
    if t.nodes().len() > 1 {
        text.push_str("distances\n");
        for a in t.nodes() {
            let row: Vec<String> =
                t.nodes().iter().map(|b| format!("{:>3}", t.distance(a.id, b.id))).collect();
            let _ = writeln!(text, "  node {:<3} {}", a.id, row.join(" "));
        }
    }
    text
}

fn caches(t: &CpuTopology, within: &CpuSet, text: &mut String) {
    for llc in t.llcs().iter().filter(|l| !l.cpus.is_disjoint(within)) {
        let cpus = llc.cpus.intersection(within);
        let _ = writeln!(text, "    cache: CPUs {cpus}, {}", cores(t, &cpus));
    }
}

/// `8 cores of 2 CPUs: 0-1 2-3 …`; the first four stand for the rest.
fn cores(t: &CpuTopology, within: &CpuSet) -> String {
    let inside: Vec<&Core> = t.cores().iter().filter(|c| c.cpus.is_subset(within)).collect();
    let mut sizes: Vec<usize> = inside.iter().map(|c| c.cpus.len()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let size = match sizes.as_slice() {
        [1] => return format!("{} cores", inside.len()),
        [n] => n.to_string(),
        many => many.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or "),
    };
    let shown: Vec<String> = inside.iter().take(4).map(|c| c.cpus.to_string()).collect();
    let more = if inside.len() > 4 { " ..." } else { "" };
    format!("{} cores of {size} CPUs: {}{more}", inside.len(), shown.join(" "))
}
