//! What an orchestrator says: `truepin admit`, `truepin remove`, `truepin container-created`

use super::{
    Format, Output,
    ask::ask,
    assign,
    output::{Failure, json, print},
};
use crate::{
    api::{
        calls::{Call, ContainerCreated},
        documents::{NotedDoc, PodDoc, ReleasedDoc},
    },
    paths::Paths,
};
use clap::Args;
use std::{
    fs,
    io::{self, Read as _},
    path::PathBuf,
};
use truepin::{containers::ContainerId, pod::Pod};

#[derive(Debug, Args)]
pub(super) struct AdmitArgs {
    /// The pod as JSON; `-` reads it from standard input
    #[arg(value_name = "POD.json")]
    pod: PathBuf,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub(super) struct RemoveArgs {
    /// The pod's uid
    #[arg(value_name = "POD_UID")]
    uid: String,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
pub(super) struct CreatedArgs {
    /// The container's id
    id: ContainerId,
    /// Its pod's uid
    #[arg(value_name = "POD_UID")]
    uid: String,
    /// Its name
    name: String,
    #[command(flatten)]
    format: Format,
}

pub(super) fn admit(args: &AdmitArgs, paths: &Paths) -> Result<u8, Failure> {
    let read = if args.pod.as_os_str() == "-" {
        let mut text = Vec::new();
        io::stdin().read_to_end(&mut text).map(|_| text)
    } else {
        fs::read(&args.pod)
    };
    let shown = args.pod.display();
    let text = read.map_err(|e| Failure {
        code: 3,
        text: format!("reading {shown}: {e}"),
        hint: None,
        is_audit: false,
    })?;
    let pod = Pod::parse(&text).map_err(|e| Failure {
        code: 2,
        text: format!("{shown}: {}", crate::store::chain(&e)),
        hint: None,
        is_audit: false,
    })?;
    let document: PodDoc = ask(paths, &Call::AdmitPod(Box::new(pod)))?;
    match args.format.output {
        Output::Json => json(&document)?,
        Output::Table if document.owners.is_empty() => {
            print(&format!("pod {} runs in the shared pool\n", document.uid))?;
        }
        Output::Table => {
            for o in &document.owners {
                print(&format!("{}: CPUs {}\n", o.owner, o.cpus))?;
            }
        }
    }
    Ok(0)
}

pub(super) fn remove(args: &RemoveArgs, paths: &Paths) -> Result<u8, Failure> {
    let released: ReleasedDoc = ask(paths, &Call::RemovePod(args.uid.clone()))?;
    assign::released(&released, args.format)?;
    Ok(0)
}

pub(super) fn created(args: &CreatedArgs, paths: &Paths) -> Result<u8, Failure> {
    let call = ContainerCreated { id: args.id.clone(), pod_uid: args.uid.clone(), name: args.name.clone() };
    let noted: NotedDoc = ask(paths, &Call::ContainerCreated(Box::new(call)))?;
    match args.format.output {
        Output::Json => json(&noted)?,
        Output::Table => match &noted.cpus {
            Some(cpus) => print(&format!("{}: CPUs {cpus}\n", noted.what))?,
            None => print(&format!("{}: noted\n", noted.what))?,
        },
    }
    Ok(0)
}
