//! `truepin topology`

use super::{
    Format, Output,
    output::{Failure, json, print},
};
use crate::{paths::Paths, sysfs};
use clap::Args;
use std::path::PathBuf;
use truepin::topology::render;

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
        Output::Table => print(&render::tree(&topology))?,
    }
    Ok(0)
}
