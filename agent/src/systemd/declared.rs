//! Units that are promised CPUs before they run.
//!
//! Problem: a unit's main process runs within a millisecond of its cgroup, so what the cgroup is to hold must be systemd's
//! before. Steps: [`Systemd::place`] has the unit loaded and says where its cgroup is or will be; [`Systemd::promise`] sets
//! its property while it does not run, which systemd writes into the cgroup before it starts a process there
//! (`unit_realize_cgroup_now`, src/core/cgroup.c). A unit that nobody needs is forgotten by systemd; its drop-in stays.
//! Invariant: a property that reads as it should is not set again.

use super::{ANSWER, Cause, SILENCE, Systemd, SystemdError, list_of, set, told};
use std::{mem, time::Instant};
use truepin::{CgroupPath, CpuSet, units::UnitName};

const PROPERTY: &str = "AllowedCPUs";

/// What systemd was told of a unit.
#[derive(Debug)]
pub(super) struct Told {
    list: String,
    /// When that failed, and with which words.
    failed: Option<(Instant, String)>,
}

/// What to do about a unit whose `LoadState` is not `loaded`.
pub(super) fn remedy(state: &str, unit: &UnitName) -> String {
    match state {
        "not-found" => format!(
            "there is no unit of that name: write its file and `systemctl daemon-reload`, or take [[unit]] {unit} out of \
             the configuration"
        ),
        "masked" => format!("`systemctl unmask {unit}`"),
        _ => format!("`systemctl status {unit}` says what is wrong with its file"),
    }
}

impl Systemd {
    /// The cgroup in which the unit lives, or will when it is started. Not loaded is an error, with its remedy.
    pub fn place(&mut self, unit: &UnitName) -> Result<CgroupPath, SystemdError> {
        let what = || format!("looking for the unit {unit}");
        let found = self.talk(what, ANSWER, async |session, _, _| {
            let object = session.load(unit).await?;
            let state = session.load_state(&object).await?;
            if state != "loaded" {
                return Err(Cause::NotLoaded { unit: unit.clone(), state });
            }
            let now = list_of(&session.bytes(&object, unit, PROPERTY).await?);
            let lives = session.control_group(&object, unit).await?;
            if !lives.is_empty() {
                return lives.parse().map(|path| (path, now)).map_err(|_| Cause::Place(lives));
            }
            let slice = session.slice(&object, unit).await?;
            unit.path_in(&slice).map(|path| (path, now)).ok_or(Cause::Place(slice))
        });
        let (path, now) = found?;
        // Somebody has set it otherwise meanwhile.
        if self.promised.get(unit).is_some_and(|told| told.failed.is_none() && told.list != now) {
            self.promised.remove(unit);
        }
        Ok(path)
    }

    /// Has systemd know what the units that are promised CPUs are to be born with; who is not named is promised nothing any
    /// more. What could not be set is tried again after [`SILENCE`]; returned is what was not told of that before.
    pub fn promise<'a>(
        &mut self,
        units: impl Iterator<Item = (UnitName, &'a CgroupPath, &'a CpuSet)>,
    ) -> Vec<String> {
        let mut before = mem::take(&mut self.promised);
        let mut new = Vec::new();
        for (unit, path, cpus) in units {
            let list = cpus.to_string();
            let known = before.remove(&unit).filter(|told| told.list == list);
            let stands = |failed: &Option<(Instant, String)>| {
                failed.as_ref().is_none_or(|(at, _)| at.elapsed() < SILENCE)
            };
            let told = match known {
                Some(told) if stands(&told.failed) => told,
                known => {
                    let outcome = self.promise_one(&unit, path, &list);
                    let failed = outcome.err().map(|error| (Instant::now(), told(&error)));
                    let before = known.and_then(|told| told.failed).map(|(_, words)| words);
                    new.extend(
                        failed
                            .as_ref()
                            .map(|(_, words)| words.clone())
                            .filter(|w| Some(w) != before.as_ref()),
                    );
                    Told { list, failed }
                }
            };
            self.promised.insert(unit, told);
        }
        new
    }

    fn promise_one(&mut self, unit: &UnitName, path: &CgroupPath, list: &str) -> Result<(), SystemdError> {
        let what = || format!("setting {PROPERTY}={list} of {unit}, before it runs,");
        self.talk(what, ANSWER, async |session, journal, places| {
            let object = session.load(unit).await?;
            if list_of(&session.bytes(&object, unit, PROPERTY).await?) == list {
                return Ok(());
            }
            set(&session, journal, places, (unit, path), &object, PROPERTY, list).await?;
            tracing::info!("{unit} is to be born with CPUs {list} ({PROPERTY}, through systemd)");
            Ok(())
        })
    }
}
