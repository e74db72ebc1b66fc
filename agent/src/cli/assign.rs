//! `truepin assign` and `truepin release`

use super::{
    Format, Output, Wanted,
    ask::ask,
    list,
    output::{Failure, json, print},
    verify,
};
use crate::{
    api::{
        calls::{Admission, Call},
        documents::{OwnerDoc, ReleasedDoc},
        plan::PlanDoc,
    },
    paths::Paths,
};
use clap::Args;
use std::io::Write;
use truepin::{CgroupPath, Owner};

#[derive(Debug, Args)]
pub(super) struct AssignArgs {
    /// pod/UID/CONTAINER, unit/NAME, cgroup/PATH or run/NAME
    owner: Owner,
    /// The cgroup, relative to the cgroup2 mount
    #[arg(long, value_name = "PATH")]
    cgroup: CgroupPath,
    #[command(flatten)]
    wanted: Wanted,
    /// Print the writes as lines for a shell and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub(super) struct ReleaseArgs {
    /// Whose CPUs
    #[arg(required_unless_present = "all")]
    owner: Option<Owner>,
    /// Everybody's, and every file back as it was found
    #[arg(long, conflicts_with = "owner")]
    all: bool,
    /// Print the writes as lines for a shell and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

pub(super) fn admission(owner: Owner, wanted: &Wanted) -> Admission {
    Admission {
        owner,
        cpus: wanted.cpus,
        numa: wanted.numa.map(Into::into),
        whole_cores: wanted.whole_cores,
        near: wanted.near.clone(),
        memory: wanted.memory.unwrap_or(0),
        isolation: wanted.isolation(),
        cgroup: None,
        pid: None,
        caller: None,
    }
}

pub(super) fn assign(args: &AssignArgs, paths: &Paths) -> Result<u8, Failure> {
    let mut admission = admission(args.owner.clone(), &args.wanted);
    admission.cgroup = Some(args.cgroup.clone());
    let call = Call::Admit(Box::new(admission));
    if args.dry_run {
        return plan(paths, call, args.format);
    }
    let owner: OwnerDoc = ask(paths, &call)?;
    warn(&owner);
    match args.format.output {
        Output::Json => json(&owner)?,
        Output::Table => print(&list::owners(std::slice::from_ref(&owner)))?,
    }
    Ok(0)
}

/// What the user should know, on stderr.
pub(super) fn warn(owner: &OwnerDoc) {
    let mut err = anstream::stderr().lock();
    for warning in &owner.warnings {
        let _ = writeln!(err, "truepin: warning: {}: {warning}", owner.owner);
    }
}

pub(super) fn release(args: &ReleaseArgs, paths: &Paths) -> Result<u8, Failure> {
    let call = Call::Release(args.owner.clone());
    if args.dry_run {
        return plan(paths, call, args.format);
    }
    let document: ReleasedDoc = ask(paths, &call)?;
    released(&document, args.format)?;
    Ok(0)
}

/// What a call would do.
fn plan(paths: &Paths, call: Call, format: Format) -> Result<u8, Failure> {
    let document: PlanDoc = ask(paths, &Call::Plan(Box::new(call)))?;
    match format.output {
        Output::Json => json(&document)?,
        Output::Table => print(&document.script())?,
    }
    Ok(0)
}

/// Who gave CPUs back, with the last verdicts.
pub(super) fn released(released: &ReleasedDoc, format: Format) -> Result<(), Failure> {
    match format.output {
        Output::Json => json(released)?,
        Output::Table if released.owners.is_empty() => print("nothing was held\n")?,
        Output::Table => {
            for owner in &released.owners {
                print(&format!("released {owner}\n"))?;
            }
            print(&verify::verdicts(&released.verdicts))?;
        }
    }
    Ok(())
}
