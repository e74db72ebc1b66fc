//! `truepin list`

use super::{
    Format, Output,
    ask::ask,
    output::{Failure, json, print},
    table::{Cell, judgement, table},
};
use crate::{
    api::{
        calls::Call,
        documents::{OwnerDoc, OwnersDoc},
    },
    paths::Paths,
};
use truepin::{assignments::Mode, request::Isolation};

pub(super) fn list(format: Format, paths: &Paths) -> Result<u8, Failure> {
    let document: OwnersDoc = ask(paths, &Call::Owners)?;
    match format.output {
        Output::Json => json(&document)?,
        Output::Table if document.owners.is_empty() => print("no owner holds CPUs\n")?,
        Output::Table => print(&owners(&document.owners))?,
    }
    Ok(0)
}

/// The mode in force, and what kind of partition where that is not the usual one.
fn mode(o: &OwnerDoc) -> String {
    match (o.mode, o.isolation) {
        (Mode::Partition, Isolation::Isolated) => "partition, isolated".into(),
        (mode, _) => mode.name().into(),
    }
}

/// A row for each owner.
pub(super) fn owners(owners: &[OwnerDoc]) -> String {
    let row = |o: &OwnerDoc| {
        vec![
            Cell::from(&o.owner),
            Cell::from(&o.cpus),
            Cell::from(&o.nodes),
            Cell::from(mode(o)),
            judgement(o.verdict),
            Cell::from(o.degraded.as_ref().or(o.verdict_reason.as_ref()).unwrap_or(&o.reason)),
        ]
    };
    table(&["OWNER", "CPUS", "NODES", "MODE", "VERDICT", "WHY"], &owners.iter().map(row).collect::<Vec<_>>())
}
