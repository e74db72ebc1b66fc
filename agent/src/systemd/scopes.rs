//! Scopes: cgroups that systemd makes for processes of ours, in truepin's slice.
//!
//! Problem: a cgroup that is made beside systemd is one that it knows nothing of: its processes are in no unit, so they are
//! not ended in order at shutdown, `systemctl status` has them nowhere, and what systemd does to controllers above takes no
//! account of them. Steps: the command is put into a transient scope in `truepin.slice`, which thereby is a unit, too
//! (slices need no file), with cpuset delegated: what the command makes below is its own, and the slice's controller stays
//! on. The lists of the scope's own cgroup are written as those of any unit.
//! A scope ends with its last process. One that is empty is stopped rather than removed by hand: systemd reads in its
//! `cgroup.events` that it is empty, and would take it for running where that is gone.

use super::{ANSWER, Cause, Session, Systemd, SystemdError};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use truepin::{CgroupPath, units::UnitName};

/// Between two looks at a job: it is done within milliseconds (`manager_dispatch_run_queue`, src/core/manager.c).
const LOOK: Duration = Duration::from_millis(2);

impl Systemd {
    /// Has a scope made with the process `pid`, at `path`.
    pub fn start_scope(&mut self, unit: &UnitName, path: &CgroupPath, pid: u32) -> Result<(), SystemdError> {
        let what = || format!("starting {unit} with pid {pid}");
        self.talk(what, ANSWER, async |session, _, _| {
            let up = path.parent().unwrap_or_default();
            let slice = UnitName::at(&up).ok_or_else(|| Cause::Place(up.to_string()))?;
            session.start_scope(unit, &slice, pid).await?;
            let until = Instant::now() + ANSWER;
            while Instant::now() < until {
                let Some(object) = session.loaded(unit).await? else {
                    return Err(Cause::Ended("gone".into()));
                };
                match session.state(&object).await? {
                    (true, _) => tokio::time::sleep(LOOK).await,
                    (false, state) if state == "active" => {
                        let lives = session.control_group(&object, unit).await?;
                        return if lives == path.to_string() { Ok(()) } else { Err(Cause::Place(lives)) };
                    }
                    (false, state) => return Err(Cause::Ended(state)),
                }
            }
            Err(Cause::Silent(ANSWER))
        })
    }

    /// Stops the unit that lives at `path`, which is empty, and waits until its directory is gone; false if there is none.
    pub fn stop(&mut self, unit: &UnitName, path: &CgroupPath, dir: &Path) -> Result<bool, SystemdError> {
        let what = || format!("stopping {unit}");
        self.talk(what, ANSWER, async |session: Session, _, _| {
            let Some(object) = session.loaded(unit).await? else { return Ok(false) };
            if session.control_group(&object, unit).await? != path.to_string() {
                return Ok(false);
            }
            session.stop(unit).await?;
            let until = Instant::now() + ANSWER;
            while dir.exists() {
                if Instant::now() > until {
                    return Err(Cause::Silent(ANSWER));
                }
                if session.loaded(unit).await?.is_none() {
                    return Err(Cause::Ended("gone, and its cgroup is still there".into()));
                }
                tokio::time::sleep(LOOK).await;
            }
            Ok(true)
        })
    }
}
