//! CPUs that units name and that cannot be had.
//!
//! Problem: where a list is not one of this machine, systemd drops it with a line in its log and starts the unit anywhere.
//! Steps: what every loaded unit names is read over D-Bus, which takes some hundred questions, on a thread that nothing
//! waits for: at the start and every [`AGAIN`]. It is held against the CPUs that there are at every tick, so that one that
//! went offline since is found as well.
//! A unit that is not loaded names nothing yet; a list that truepin has set is truepin's own to judge.

use super::{Places, Session, Systemd, list_of};
use crate::store::chain;
use std::{
    collections::BTreeSet,
    mem,
    sync::mpsc::{self, Receiver, TryRecvError},
    thread,
    time::{Duration, Instant},
};
use truepin::{
    CpuSet,
    units::{Misnamed, Named, UnitName},
};

const AGAIN: Duration = Duration::from_mins(5);
/// Some hundred units, each asked twice.
const LIMIT: Duration = Duration::from_secs(30);

/// What was read, and what was told of it.
#[derive(Debug, Default)]
pub(super) struct Survey {
    under_way: Option<Receiver<Result<Vec<Named>, String>>>,
    begun: Option<Instant>,
    named: Vec<Named>,
    told: BTreeSet<Misnamed>,
}

/// What every loaded unit names.
fn read(places: &Places) -> Result<Vec<Named>, String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| chain(&e))?;
    let all = async {
        let session = Session::open(places, LIMIT).await?;
        let mut named = Vec::new();
        for name in session.units().await? {
            let Ok(unit) = name.parse::<UnitName>() else { continue };
            // One that has gone since they were listed.
            let Some(object) = session.loaded(&unit).await? else { continue };
            let affinity = unit.has_processes().then_some("CPUAffinity");
            for property in ["AllowedCPUs"].into_iter().chain(affinity) {
                let list = list_of(&session.bytes(&object, &unit, property).await?);
                let cpus: CpuSet = list.parse().unwrap_or_default();
                if !cpus.is_empty() {
                    named.push(Named { unit: unit.clone(), property, cpus });
                }
            }
        }
        Ok(named)
    };
    let read = runtime.block_on(async { tokio::time::timeout(LIMIT, all).await });
    read.map_err(|_| format!("no end within {LIMIT:?}"))?.map_err(|e: super::Cause| chain(&e))
}

impl Systemd {
    /// Begins to read what units name, if it is time to; `done` is called on another thread, when [`Systemd::misnamed`] has
    /// something to say.
    pub fn survey(&mut self, done: impl FnOnce() + Send + 'static) {
        let survey = &mut self.survey;
        if survey.under_way.is_some() || survey.begun.is_some_and(|at| at.elapsed() < AGAIN) {
            return;
        }
        survey.begun = Some(Instant::now());
        let (sender, receiver) = mpsc::channel();
        let places = self.places.clone();
        let thread = thread::Builder::new().name("truepin-units".into()).spawn(move || {
            // Who asked may be gone.
            drop(sender.send(read(&places)));
            done();
        });
        match thread {
            Ok(_) => survey.under_way = Some(receiver),
            Err(error) => tracing::warn!("what units name is not known: {}", chain(&error)),
        }
    }

    /// What units name that is not among the CPUs that there are, as far as that was not told before.
    pub fn misnamed(&mut self, present: &CpuSet, online: &CpuSet) -> Vec<Misnamed> {
        match self.survey.under_way.as_ref().map(Receiver::try_recv) {
            Some(Ok(Ok(named))) => (self.survey.named, self.survey.under_way) = (named, None),
            Some(Ok(Err(why))) => {
                tracing::warn!("what units name is not known: {why}");
                self.survey.under_way = None;
            }
            Some(Err(TryRecvError::Disconnected)) => self.survey.under_way = None,
            Some(Err(TryRecvError::Empty)) | None => {}
        }
        let others = self.survey.named.iter().filter(|n| !self.journal.knows(n.unit.as_str(), n.property));
        let wrong: BTreeSet<Misnamed> = others.filter_map(|n| n.judge(present, online)).collect();
        let before = mem::replace(&mut self.survey.told, wrong);
        self.survey.told.difference(&before).cloned().collect()
    }
}
