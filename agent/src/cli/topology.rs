//! `truepin topology`: the machine, and `truepin topology capture`: a record of it.

use super::{
    Format, Output,
    output::{Failure, json, print},
    table::{Cell, table},
};
use crate::{
    machine::{self, Machine, MachineError},
    paths::Paths,
    sysfs::capture::{CaptureError, Packing, capture},
};
use clap::{Args, Subcommand};
use std::{
    fs,
    path::{Path, PathBuf},
};
use truepin::{
    CpuTopology,
    topology::{Device, DeviceKind, render},
};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct TopologyArgs {
    #[command(subcommand)]
    action: Option<Action>,
    /// Another machine: a directory or an archive (.tar.zst, .tar.gz) that holds its `sys`, hwloc's XML, or cAdvisor's
    /// machine-info JSON [default: this machine]
    #[arg(long, value_name = "DIR|FILE")]
    root: Option<PathBuf>,
    /// Show where PCI devices, network interfaces and disks are
    #[arg(long)]
    devices: bool,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Records the machine in a file that `--root` reads back: no serial numbers, host names or MAC addresses
    #[command(
        after_help = "Example:\n  truepin topology capture node7.tar.zst\n  truepin topology --root node7.tar.zst --devices"
    )]
    Capture(CaptureArgs),
}

#[derive(Debug, Args)]
struct CaptureArgs {
    /// The file to write, named .tar.zst or .tar.gz; one that is there is replaced
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Another machine: a directory or an archive that holds its `sys` [default: this machine]
    #[arg(long, value_name = "DIR|FILE")]
    root: Option<PathBuf>,
}

/// What `--root` expects, for whoever gave something else.
const ROOT: &str = "--root expects the directory that holds sys/devices/system/cpu, an archive of it (.tar.zst, .tar.gz), hwloc's \
                    XML or cAdvisor's machine-info JSON";

/// The machine that `--root` names, or this one.
pub(super) fn machine(root: Option<&PathBuf>, paths: &Paths) -> Result<CpuTopology, Failure> {
    machine::topology(root.unwrap_or(&paths.sysfs)).map_err(unreadable)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: MachineError) -> Failure {
    Failure::new(3, &error, Some(ROOT))
}

pub(super) fn topology(args: &TopologyArgs, paths: &Paths) -> Result<u8, Failure> {
    if let Some(Action::Capture(args)) = &args.action {
        return record(args, paths);
    }
    let machine = machine::open(args.root.as_ref().unwrap_or(&paths.sysfs)).map_err(unreadable)?;
    let topology = machine.topology().map_err(unreadable)?;
    let mut document = render::document(&topology);
    let devices = if args.devices { Some(machine.devices(&topology).map_err(unreadable)?) } else { None };
    match args.format.output {
        Output::Json => {
            if let Some((devices, oddities)) = devices {
                document.devices = Some(devices);
                document.oddities.extend(oddities);
            }
            json(&document)?;
        }
        Output::Table => {
            print(&render::tree(&topology))?;
            if let Some((devices, oddities)) = devices {
                print(&device_table(&devices))?;
                for oddity in oddities {
                    print(&format!("note: {oddity}\n"))?;
                }
            }
        }
    }
    Ok(0)
}

/// Devices with their places. Bridges are in the JSON; here they would only be in the way.
fn device_table(devices: &[Device]) -> String {
    let is_bridge = |d: &Device| d.class.as_ref().is_some_and(|class| class.starts_with("0x06"));
    let shown = devices.iter().filter(|d| !is_bridge(d));
    let dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let rows: Vec<Vec<Cell>> = shown
        .map(|d| {
            let pci = d.pci.clone().filter(|_| d.kind != DeviceKind::Pci);
            let row = [
                format!("{} {}", d.kind, d.name),
                dash(pci.unwrap_or_default()),
                dash(d.class.clone().unwrap_or_default()),
                dash(d.nodes.to_string()),
                dash(d.local_cpus.as_ref().map(ToString::to_string).unwrap_or_default()),
            ];
            row.map(Cell::from).into()
        })
        .collect();
    if rows.is_empty() {
        return "no devices are described\n".into();
    }
    table(&["DEVICE", "PCI", "CLASS", "NODES", "LOCAL CPUS"], &rows)
}

fn record(args: &CaptureArgs, paths: &Paths) -> Result<u8, Failure> {
    let usage =
        |text: String, hint: &str| Failure { code: 2, text, hint: Some(hint.into()), is_audit: false };
    let name = args.file.to_string_lossy();
    let packing = match () {
        () if name.ends_with(".tar.zst") => Packing::Zstd,
        () if name.ends_with(".tar.gz") || name.ends_with(".tgz") => Packing::Gzip,
        () => {
            let text = format!("{name}: the name does not say how to pack");
            return Err(usage(text, "name it .tar.zst or .tar.gz"));
        }
    };
    let root = args.root.as_ref().unwrap_or(&paths.sysfs);
    let tree = match machine::open(root).map_err(unreadable)? {
        Machine::Tree(tree) => tree,
        Machine::Stated(..) => {
            let text = format!("{} is a description and has no files to record", root.display());
            return Err(usage(text, "give a directory or an archive that holds sys, or this machine"));
        }
    };
    let capture = capture(&tree, packing).map_err(|e: CaptureError| Failure::new(3, &e, None))?;
    write(&args.file, &capture.bytes)?;
    let left_out = match capture.left_out {
        0 => String::new(),
        n => format!(", {n} left out because their names are MAC addresses"),
    };
    let (files, devices, bytes) = (capture.files, capture.devices, capture.bytes.len());
    print(&format!("{name}: {files} files, {devices} devices{left_out}, {bytes} bytes\n"))?;
    Ok(0)
}

/// Under another name first, so that there is never half a file under this one.
fn write(file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, file));
    written.map_err(|e| {
        // It may not be there at all.
        drop(fs::remove_file(&beside));
        Failure { text: format!("cannot write {}: {e}", file.display()), ..Failure::from(e) }
    })
}
