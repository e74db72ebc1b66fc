//! Owners that configuration declares, admitted at the start and at every tick until they hold CPUs.
//!
//! A cgroup's owner waits until that is there. A unit's has its CPUs from the start on, whether it runs or not: systemd
//! says where its cgroup will be, and is told them (`engine`).

use crate::{
    api::calls::{About, Unmet},
    config::Reserve,
    engine::Engine,
    start::Declared,
    store::chain,
};
use truepin::{
    CgroupPath, CpuSet,
    reconcile::{Answer, Event, Home},
    units::UnitName,
};

/// Admits declared owners that are not there yet; who has no CPUs then stands in `about`. True when systemd did not say where a
/// unit lives, so that it is to be asked again soon.
pub(crate) fn declare(declared: &mut [Declared], engine: &mut Engine, about: &mut About) -> bool {
    let mut again = false;
    for d in declared.iter_mut() {
        if d.released {
            d.refused = None;
            continue;
        }
        let why = match d.path.clone() {
            Some(path) => cgroup(d, path, engine, about),
            None => unit(d, engine, about).unwrap_or_else(|Unplaced(why)| {
                again = true;
                // What it holds it keeps meanwhile.
                Some(why).filter(|_| engine.state.assignments.cpus_of(&d.owner).is_none())
            }),
        };
        // Tried at every tick, said when it changes.
        if let Some(why) = &why
            && d.refused.as_ref() != Some(why)
        {
            tracing::warn!("{} has no CPUs yet: {why}", d.owner);
        }
        d.refused = why;
    }
    let unmet = |d: &Declared| {
        let cpus = match &d.cpus {
            Reserve::Cpus(cpus) => cpus.clone(),
            Reserve::Count(_) => CpuSet::new(),
        };
        Some(Unmet { owner: d.owner.clone(), path: d.path.clone(), cpus, why: d.refused.clone()? })
    };
    about.unmet = declared.iter().filter_map(unmet).collect();
    again
}

/// Where a unit lives is not known, and why.
struct Unplaced(String);

fn cgroup(d: &Declared, path: CgroupPath, engine: &mut Engine, about: &About) -> Option<String> {
    if engine.state.assignments.owners.contains_key(&d.owner) {
        return None;
    }
    let dir = engine.kernel.dir(&path);
    if !dir.exists() {
        return Some(format!("{} does not exist", dir.display()));
    }
    let (request, exactly) = d.request(about.numa);
    let home = Home::Existing(path);
    match engine.ask(|ticket| Event::Admit { ticket, request, exactly, home, pid: None }) {
        Answer::Assigned(..) => None,
        Answer::Refused(error) => Some(chain(&error)),
        other => Some(format!("{other:?}")),
    }
}

/// Asked again at every tick, too: its place may be another one by then, and its property be changed by somebody.
fn unit(d: &Declared, engine: &mut Engine, about: &About) -> Result<Option<String>, Unplaced> {
    let Some(name) = UnitName::of(&d.owner) else { return Ok(None) };
    let Some(systemd) = &mut engine.kernel.systemd else {
        let what = "no systemd that could be told is the init here; declare its cgroup ([[cgroup]] with role = \"owner\")";
        return Ok(Some(what.into()));
    };
    let home = systemd.place(&name).map_err(|error| Unplaced(chain(&error)))?;
    let (request, exactly) = d.request(about.numa);
    Ok(match engine.ask(|ticket| Event::Expect { ticket, request, exactly, home }) {
        Answer::Pod(_) => None,
        Answer::Refused(error) => Some(chain(&error)),
        other => Some(format!("{other:?}")),
    })
}
