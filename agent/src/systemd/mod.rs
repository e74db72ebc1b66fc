//! systemd's manager over D-Bus: it writes the cgroups that it owns.
//!
//! Problem: systemd writes `cpuset.cpus` and `cpuset.mems` of a unit's own cgroup from `AllowedCPUs=` and
//! `AllowedMemoryNodes=`, whenever it likes; a value beside those is lost at the next `daemon-reload` (see `truepin::units`).
//! Steps: [`Systemd::set`] asks whether the unit is loaded and lives at that path, notes durably what the property and its
//! drop-in were ([`Journal`]), sets it at runtime (`SetUnitProperties`) and reads it back; [`Systemd::undo`] puts back
//! what nobody needs any more, drop-ins in `/run/systemd/system.control` included.
//! The reply to `SetUnitProperties` comes before the file is written: the manager puts the unit into a queue, which it
//! empties before it takes its next message (`manager_loop`, src/core/manager.c). So the answer to the read that follows
//! says that the file has been written, if the kernel took it.
//!
//! Each conversation is a connection of its own ([`wire`]): systemd sends every signal to whoever is connected to its private
//! socket, and drops those connections when it executes itself anew. The private socket is there before dbus-daemon is; the system
//! bus is asked where it is not.
//! Invariants: nothing is set whose first value is not on disk; nobody is waited for longer than [`ANSWER`], and after
//! that not asked again for [`SILENCE`].

mod declared;
mod journal;
mod scopes;
mod session;
mod survey;
mod wire;

pub use journal::{Journal, JournalError};

use crate::store::chain;
use journal::{Entry, First};
use session::Session;
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use survey::Survey;
use truepin::{
    CgroupPath, CpuSet, CpusetFile,
    idset::IdSet,
    observed::Before,
    units::{self, UnitName},
};

/// The manager answers within milliseconds; under a `daemon-reload` of a large host within a second or so. For one answer:
/// what is made durable between two questions takes the disk's time, not the manager's.
const ANSWER: Duration = Duration::from_secs(5);
/// `Reload` is answered when it is done.
const RELOAD: Duration = Duration::from_secs(10);
/// One that did not answer is left alone so long: each write would wait in vain.
const SILENCE: Duration = Duration::from_secs(10);

/// Where systemd is.
#[derive(Debug, Clone)]
pub struct Places {
    /// Its private socket, root's alone.
    pub private: PathBuf,
    /// The system bus.
    pub bus: PathBuf,
    /// Drop-ins of `set-property --runtime`.
    pub controls: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            private: "/run/systemd/private".into(),
            bus: "/run/dbus/system_bus_socket".into(),
            controls: "/run/systemd/system.control".into(),
        }
    }
}

/// What systemd was asked and did not do.
#[derive(Debug, thiserror::Error)]
#[error("{what} through systemd")]
pub struct SystemdError {
    /// With unit, property and value.
    what: String,
    source: Cause,
}

/// Why.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// Nobody listens.
    #[error("connecting to {}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It did not answer.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// It did not answer a moment ago.
    #[error("it did not answer {0:?} ago, and is not asked again before {SILENCE:?} have passed")]
    LeftAlone(Duration),
    /// It said no.
    #[error("{name}: {words}")]
    Refused {
        /// The error's name.
        name: String,
        /// What it is about.
        words: String,
    },
    /// It said what is no answer.
    #[error(transparent)]
    Bus(#[from] Box<zbus::Error>),
    /// The connection broke, or what came is no message.
    #[error("the connection")]
    Wire(#[source] io::Error),
    /// The property reads otherwise than it was set.
    #[error("the property reads {0:?} afterwards")]
    Otherwise(String),
    /// What was before could not be made durable, so nothing was set.
    #[error("what it was before could not be noted")]
    Journal(#[from] JournalError),
    /// There is no such unit to be set.
    #[error("its LoadState is {state:?}; {}", declared::remedy(state, unit))]
    NotLoaded {
        /// Which.
        unit: UnitName,
        /// As systemd has it.
        state: String,
    },
    /// A job came to another end.
    #[error("it is {0} afterwards")]
    Ended(String),
    /// A cgroup that cannot be one.
    #[error("it is said to live in {0:?}")]
    Place(String),
    /// A drop-in could not be read, or not be put back.
    #[error("{operation} {}", path.display())]
    DropIn {
        /// What was tried.
        operation: &'static str,
        /// The drop-in.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl From<zbus::Error> for Cause {
    fn from(error: zbus::Error) -> Self {
        Self::Bus(Box::new(error))
    }
}

/// What became of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The property has it.
    Set,
    /// The cgroup is no loaded unit's.
    NotIts,
}

/// The manager of this host.
#[derive(Debug)]
pub struct Systemd {
    places: Places,
    journal: Journal,
    silent: Option<Instant>,
    /// When putting something back failed for the last time, and with which words.
    owed: Option<(Instant, Vec<String>)>,
    /// Units that are promised CPUs: what their next cgroups are born with, as it was last read or set, and why it could
    /// not be.
    promised: BTreeMap<UnitName, declared::Told>,
    survey: Survey,
}

/// A list in the kernel's grammar as the property has it; both kinds of lists are the same there.
fn bytes_of(list: &str) -> Vec<u8> {
    list.parse::<CpuSet>().map(|set| units::to_bytes(&set)).unwrap_or_default()
}

fn list_of(bytes: &[u8]) -> String {
    let set: Option<IdSet<truepin::CpuId>> = units::from_bytes(bytes);
    set.unwrap_or_default().to_string()
}

impl Systemd {
    /// The manager of this host, if systemd is its init (`sd_booted`).
    #[must_use]
    pub fn is_init() -> bool {
        Path::new("/run/systemd/system").is_dir()
    }

    /// A manager at `places`; first values go to `journal`.
    #[must_use]
    pub fn new(places: Places, journal: Journal) -> Self {
        Self {
            places,
            journal,
            silent: None,
            owed: None,
            promised: BTreeMap::new(),
            survey: Survey::default(),
        }
    }

    /// Runs one conversation.
    fn talk<T>(
        &mut self,
        what: impl Fn() -> String,
        limit: Duration,
        conversation: impl AsyncFnOnce(Session, &mut Journal, &Places) -> Result<T, Cause>,
    ) -> Result<T, SystemdError> {
        let outcome = self.try_talk(limit, conversation);
        match &outcome {
            Err(Cause::Silent(_)) => self.silent = Some(Instant::now()),
            Err(Cause::LeftAlone(_)) => {}
            _ => self.silent = None,
        }
        outcome.map_err(|source| SystemdError { what: what(), source })
    }

    fn try_talk<T>(
        &mut self,
        limit: Duration,
        conversation: impl AsyncFnOnce(Session, &mut Journal, &Places) -> Result<T, Cause>,
    ) -> Result<T, Cause> {
        if let Some(ago) = self.silent.map(|at| at.elapsed()).filter(|ago| *ago < SILENCE) {
            return Err(Cause::LeftAlone(ago));
        }
        let (places, journal) = (&self.places, &mut self.journal);
        // Whatever is left of the connection ends with its runtime.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| zbus::Error::InputOutput(e.into()))?;
        runtime.block_on(async { conversation(Session::open(places, limit).await?, journal, places).await })
    }

    /// Whether the unit is loaded and lives at `path`: then [`Systemd::set`] would set its properties.
    pub fn owns(&mut self, unit: &UnitName, path: &CgroupPath) -> Result<bool, SystemdError> {
        let what = || format!("looking for {unit}");
        self.talk(what, ANSWER, async |session, _, _| {
            lives_at(&session, unit, path).await.map(|o| o.is_some())
        })
    }

    /// Sets the property behind `file` of the unit whose cgroup `path` is, to `list`. Only a unit that is loaded and lives
    /// there has it set.
    pub fn set(
        &mut self,
        unit: &UnitName,
        path: &CgroupPath,
        file: CpusetFile,
        list: &str,
    ) -> Result<Taken, SystemdError> {
        let Some(property) = units::property_of(file) else { return Ok(Taken::NotIts) };
        let what = || format!("setting {property}={list} of {unit}");
        self.talk(what, ANSWER, async |session, journal, places| {
            let Some(object) = lives_at(&session, unit, path).await? else { return Ok(Taken::NotIts) };
            set(&session, journal, places, (unit, path), &object, property, list).await?;
            Ok(Taken::Set)
        })
    }

    /// What `file` of the cgroup held before truepin set the unit's property: a cgroup that is made anew is born with what
    /// truepin set.
    #[must_use]
    pub fn before(&self) -> Arc<Before> {
        self.journal.before()
    }

    /// The units that [`Systemd::undo`] would put back.
    #[must_use]
    pub fn over(&self, keeps: impl Fn(&UnitName, &CgroupPath) -> bool) -> Vec<UnitName> {
        self.entries_over(keeps).into_iter().map(|(unit, _)| unit).collect()
    }

    fn entries_over(&self, keeps: impl Fn(&UnitName, &CgroupPath) -> bool) -> Vec<(UnitName, Entry)> {
        let units = self.journal.units().iter();
        units
            .filter_map(|(name, entry)| Some((name.parse().ok()?, entry.clone())))
            .filter(|(unit, entry): &(UnitName, Entry)| !keeps(unit, &entry.path))
            .collect()
    }

    /// Puts back the properties and drop-ins of units of which `keeps` says that nobody needs them so any more. What could
    /// not be put back stays noted and is tried again after [`SILENCE`]; returned is what was not told of that before.
    pub fn undo(&mut self, keeps: impl Fn(&UnitName, &CgroupPath) -> bool) -> Vec<String> {
        if self.owed.as_ref().is_some_and(|(at, _)| at.elapsed() < SILENCE) {
            return Vec::new();
        }
        let over = self.entries_over(keeps);
        if over.is_empty() {
            return Vec::new();
        }
        let (mut failed, mut reload) = (Vec::new(), false);
        for (unit, entry) in over {
            let put_back = self.talk(
                || format!("putting back the properties of {unit}"),
                ANSWER,
                async |session, journal, places| {
                    let changed = put_back(&session, places, &unit, &entry).await?;
                    journal.forget(unit.as_str())?;
                    tracing::info!("{unit}: its properties are as they were, through systemd");
                    Ok(changed)
                },
            );
            match put_back {
                Ok(changed) => reload |= changed,
                Err(error) => failed.push(error),
            }
        }
        // As `systemctl revert` does: what is loaded is what is on disk again.
        if reload {
            let told =
                self.talk(|| "a daemon-reload".into(), RELOAD, async |session, _, _| session.reload().await);
            failed.extend(told.err());
        }
        let failed: Vec<String> = failed.iter().map(told).collect();
        let before = self.owed.take().map(|(_, words)| words).unwrap_or_default();
        let new = failed.iter().filter(|words| !before.contains(words)).cloned().collect();
        self.owed = (!failed.is_empty()).then(|| (Instant::now(), failed));
        new
    }
}

/// The object of a unit that is loaded and whose cgroup is at `path`.
async fn lives_at(session: &Session, unit: &UnitName, path: &CgroupPath) -> Result<Option<String>, Cause> {
    let Some(object) = session.loaded(unit).await? else { return Ok(None) };
    Ok((session.control_group(&object, unit).await? == path.to_string()).then_some(object))
}

async fn set(
    session: &Session,
    journal: &mut Journal,
    places: &Places,
    (unit, path): (&UnitName, &CgroupPath),
    object: &str,
    property: &'static str,
    list: &str,
) -> Result<(), Cause> {
    if !unit.is_own_scope() && !journal.knows(unit.as_str(), property) {
        let value = list_of(&session.bytes(object, unit, property).await?);
        let drop_in = read_drop_in(&drop_in(places, unit, property))?;
        journal.note(unit.as_str(), path, property, First { value, drop_in })?;
    }
    session.set(unit, property, bytes_of(list)).await?;
    let now = list_of(&session.bytes(object, unit, property).await?);
    if now == list { Ok(()) } else { Err(Cause::Otherwise(now)) }
}

/// True when a drop-in was changed.
async fn put_back(session: &Session, places: &Places, unit: &UnitName, entry: &Entry) -> Result<bool, Cause> {
    let mut changed = false;
    let object = session.loaded(unit).await?;
    for (property, first) in &entry.properties {
        // One that is not loaded has what its files say.
        if let Some(object) = &object
            && list_of(&session.bytes(object, unit, property).await?) != first.value
        {
            session.set(unit, property, bytes_of(&first.value)).await?;
        }
        changed |= write_drop_in(&drop_in(places, unit, property), first.drop_in.as_deref())?;
    }
    Ok(changed)
}

/// Named as systemd names it (`unit_write_setting`, src/core/unit.c). A transient unit's are elsewhere, and go with it.
fn drop_in(places: &Places, unit: &UnitName, property: &str) -> PathBuf {
    places.controls.join(format!("{unit}.d")).join(format!("50-{property}.conf"))
}

fn read_drop_in(path: &Path) -> Result<Option<String>, Cause> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Cause::DropIn { operation: "reading", path: path.into(), source }),
    }
}

/// True when the file was changed.
fn write_drop_in(path: &Path, text: Option<&str>) -> Result<bool, Cause> {
    let failed = |operation| move |source| Cause::DropIn { operation, path: path.into(), source };
    let now = read_drop_in(path)?;
    if now.as_deref() == text {
        return Ok(false);
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    if let Some(text) = text {
        fs::create_dir_all(dir).map_err(failed("making the directory of"))?;
        fs::write(path, text).map_err(failed("writing"))?;
    } else {
        fs::remove_file(path).map_err(failed("removing"))?;
        // Others' drop-ins may be in there, and then it stays.
        drop(fs::remove_dir(dir));
    }
    Ok(true)
}

/// The text of an error and what is behind it, for a finding.
#[must_use]
pub fn told(error: &SystemdError) -> String {
    chain(error)
}
