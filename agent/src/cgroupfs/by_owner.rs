//! What the owner of a cgroup is to do: systemd for its units, truepin for the rest.
//!
//! Steps: where systemd owns the cgroup, it is asked; what it took is read back. Where it refuses, does not answer, or its
//! write does not arrive, the same is done directly.
//! Invariant: what systemd was to do and did not is told (`CgroupFs::untold`), once for each file.

use super::{CgroupFs, failed, write};
use crate::systemd::{self, Taken};
use std::fs;
use truepin::{
    CgroupPath, CpuSet, CpusetFile,
    observed::{KernelError, Step, quote},
    units::{self, UnitName},
};

impl CgroupFs {
    /// One value into one cpuset file, by whoever owns it.
    pub(super) fn write_value(
        &mut self,
        path: &CgroupPath,
        file: CpusetFile,
        value: &str,
    ) -> Result<(), KernelError> {
        let target = self.dir(path).join(file.name());
        // With a newline, because a write of nothing does not reach the kernel at all.
        let directly = || write(&target, &format!("{value}\n"));
        let property = units::property_of(file);
        let (Some(systemd), Some(unit), Some(property)) =
            (self.systemd.as_mut(), UnitName::at(path).filter(|_| property.is_some()), property)
        else {
            return directly();
        };
        let why = match systemd.set(&unit, path, file, value) {
            Ok(Taken::NotIts) => {
                tracing::info!("{file} of {path}: {value:?} directly; no unit of systemd's lives there");
                return directly();
            }
            // An empty property leaves the file as it is.
            Ok(Taken::Set) if value.is_empty() => {
                tracing::info!(
                    "{file} of {path}: {value:?} through systemd ({property} of {unit}) and directly"
                );
                return directly();
            }
            Ok(Taken::Set) => match fs::read_to_string(&target) {
                Ok(text) if same_list(&text, value) => {
                    self.told.remove(&(path.clone(), file));
                    tracing::info!("{file} of {path}: {value:?} through systemd ({property} of {unit})");
                    return Ok(());
                }
                Ok(text) => format!(
                    "systemd took {property}={value} of {unit}, and {file} of {path} still reads {:?}",
                    text.trim()
                ),
                Err(error) => return Err(failed("read", &target, None, &error)),
            },
            Err(error) => systemd::told(&error),
        };
        tracing::warn!("{why}; {file} of {path}: {value:?} directly");
        let written = directly();
        if self.told.insert((path.clone(), file)) {
            let instead = match &written {
                Ok(()) => "the file was written directly instead, which lasts until systemd writes it".into(),
                Err(error) => format!("and written directly it was refused: {}", error.cause),
            };
            self.untold.push(format!("{why}; {instead}"));
        }
        written
    }

    /// The shell lines that do what applying the step would do.
    pub fn shell(&mut self, step: &Step) -> Vec<String> {
        let directly = step.shell(&self.mount.root.display().to_string());
        let Step::Write { path, file, new, .. } = step else { return vec![directly] };
        let (Some(systemd), Some(unit), Some(property)) =
            (self.systemd.as_mut(), UnitName::at(path), units::property_of(*file))
        else {
            return vec![directly];
        };
        match systemd.owns(&unit, path) {
            Ok(false) => vec![directly],
            Ok(true) => {
                let list = new.to_string();
                let set =
                    format!("systemctl set-property --runtime {} {property}={list}", quote(unit.as_str()));
                // An empty property leaves the file as it is.
                if list.is_empty() { vec![set, directly] } else { vec![set] }
            }
            Err(error) => vec![format!("# {}; so directly:", systemd::told(&error)), directly],
        }
    }

    /// A scope with its process, by systemd. Also one that is to be made by hand then, since systemd did not.
    pub(super) fn make_scope(&mut self, path: &CgroupPath) -> Result<bool, KernelError> {
        let unit = UnitName::at(path).filter(UnitName::is_own_scope);
        let (Some(unit), Some(pid)) = (unit, self.entrants.get(path).copied()) else { return Ok(false) };
        self.is_meant(path, pid)?;
        let Some(systemd) = &mut self.systemd else { return Ok(false) };
        match systemd.start_scope(&unit, path, pid) {
            Ok(()) => {
                tracing::info!("{path}: made by systemd, with pid {pid}");
                Ok(true)
            }
            Err(error) => {
                let why = systemd::told(&error);
                tracing::warn!("{why}; {path} is made directly");
                self.untold.push(format!(
                    "{why}; its cgroup was made directly instead, and systemd does not know of it"
                ));
                Ok(false)
            }
        }
    }

    /// Has systemd end what it has there; what is left then is for us to remove.
    pub(super) fn stop_unit(&mut self, path: &CgroupPath) {
        let dir = self.dir(path);
        let (Some(unit), Some(systemd)) = (UnitName::at(path), &mut self.systemd) else { return };
        match systemd.stop(&unit, path, &dir) {
            Ok(true) => tracing::info!("{path}: removed by systemd"),
            Ok(false) => {}
            Err(error) => tracing::warn!("{}; {path} is removed directly", systemd::told(&error)),
        }
    }
}

/// Lists in the kernel's grammar are compared as sets.
fn same_list(a: &str, b: &str) -> bool {
    let set = |text: &str| text.trim().parse::<CpuSet>();
    matches!((set(a), set(b)), (Ok(a), Ok(b)) if a == b)
}
