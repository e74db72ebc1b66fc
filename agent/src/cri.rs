//! Names of containers, asked of the runtime itself (CRI), where neither the operator's file nor a bundle gives them.
//!
//! Problem: the runtime knows whose each container is, and it may be absent, slow, hung or wrong, while the loop that asks
//! must not wait.
//! Steps: whoever looks at the cgroup tree says which containers have no name ([`Cri::want`]); if there are any and it is
//! time, a thread asks once, for at most [`ASK`], sends what it was told and ends; [`Cri::hear`] takes the answer, and the
//! file descriptor is readable when there is one. Only at start is an answer waited for ([`Cri::wait`]).
//! Invariants: while all containers have names nothing is asked and nothing is open; one question at a time; a failure, or
//! an id that the runtime does not know, is asked about again after a pause that doubles from 1 s to 5 min; what the
//! runtime says counts only if the cgroup is of the same pod.

mod wire;

use crate::{start::give_memory_back, store::chain};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, TryRecvError},
    },
    thread,
    time::Duration,
};
use truepin::{containers::ContainerId, reconcile::FindingKind};

/// A runtime that has not answered by then is taken for hung; a busy one with thousands of containers needs a second or two.
pub const ASK: Duration = Duration::from_secs(10);
/// The agent's start waits so long, so that the containers that run already are known before anything is decided.
pub const AT_START: Duration = Duration::from_secs(2);
const FIRST_PAUSE_NS: u64 = 1_000_000_000;
const LONGEST_PAUSE_NS: u64 = 300_000_000_000;

/// Why a runtime gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// Nobody listens there.
    #[error("connecting to {}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not speak HTTP/2.
    #[error("{}: HTTP/2 could not be begun", socket.display())]
    Http {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: hyper::Error,
    },
    /// It answered with an error, or with what is no answer.
    #[error("{}: {call}: {code}: {words}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// What was asked.
        call: &'static str,
        /// gRPC's name for it.
        code: String,
        /// As the runtime says, cut.
        words: String,
    },
    /// It did not answer.
    #[error("{}: no answer within {after:?}", socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// So long was waited.
        after: Duration,
    },
    /// It could not be asked.
    #[error("asking {}", socket.display())]
    Unasked {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Container ids, each with the uid of the pod that its cgroup is of.
type Wanted = BTreeMap<String, String>;

/// What a runtime says of one id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It is a container.
    Container {
        /// Of this pod.
        uid: String,
        /// With this name.
        name: String,
    },
    /// It is a pod's sandbox.
    Sandbox,
}

/// What a question gave.
#[derive(Debug)]
struct Found {
    said: BTreeMap<String, Said>,
    /// A part of the question got no answer.
    trouble: Option<CriError>,
}

#[derive(Debug)]
struct Reply {
    wanted: Wanted,
    found: Result<Found, CriError>,
}

/// A runtime that can be asked.
#[derive(Debug)]
pub struct Cri {
    socket: PathBuf,
    ready: Arc<EventFd>,
    /// The answer to come, while a question is under way.
    inbox: Option<mpsc::Receiver<Reply>>,
    /// Containers of the last look that have no name.
    nameless: Wanted,
    /// Those of them that a question was about, and whether it has come to its end.
    asked: BTreeMap<String, bool>,
    /// What was said of containers that are there.
    said: BTreeMap<String, Said>,
    pause_ns: u64,
    /// `CLOCK_MONOTONIC`.
    next_ns: u64,
    /// The last answer was none.
    failing: bool,
    /// As last reported: said again only when it changes.
    trouble: Option<String>,
    reports: Vec<FindingKind>,
}

impl Cri {
    /// Nothing is asked yet.
    pub fn new(socket: &Path) -> Result<Self, nix::Error> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            socket: socket.into(),
            ready: Arc::new(EventFd::from_value_and_flags(0, flags)?),
            inbox: None,
            nameless: Wanted::new(),
            asked: BTreeMap::new(),
            said: BTreeMap::new(),
            pause_ns: 0,
            next_ns: 0,
            failing: false,
            trouble: None,
            reports: Vec::new(),
        })
    }

    /// What the runtime has said of a container or sandbox.
    #[must_use]
    pub fn said(&self, id: &ContainerId) -> Option<&Said> {
        self.said.get(id.as_str())
    }

    /// Forgets what is not there any more.
    pub fn retain(&mut self, there: &BTreeSet<&str>) {
        self.said.retain(|id, _| there.contains(id.as_str()));
    }

    /// These containers have no name: asks for them when it is time.
    pub fn want(&mut self, nameless: impl Iterator<Item = (ContainerId, String)>, now_ns: u64) {
        self.nameless = nameless.map(|(id, uid)| (id.into(), uid)).collect();
        self.asked.retain(|id, _| self.nameless.contains_key(id));
        // A runtime that answers is asked about a new one at once; one that does not is left its pause.
        if !self.failing && self.nameless.keys().any(|id| !self.asked.contains_key(id)) {
            self.pause_ns = 0;
            self.next_ns = 0;
        }
        if self.due_ns().is_some_and(|at| now_ns >= at) {
            self.ask(now_ns);
        }
    }

    /// The look at the tree failed: nothing is asked before the next one.
    pub fn want_nothing(&mut self) {
        self.nameless.clear();
    }

    /// When the containers without a name should be looked at again: `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        (self.inbox.is_none() && !self.nameless.is_empty()).then_some(self.next_ns)
    }

    /// The first answer about it is still to come: whether it has a name is not decided.
    #[must_use]
    pub fn is_pending(&self, id: &ContainerId) -> bool {
        let answered = self.asked.get(id.as_str()) == Some(&true);
        !answered && (self.inbox.is_some() || !self.failing)
    }

    /// What the operator should know, since the last call.
    pub fn reports(&mut self) -> Vec<FindingKind> {
        std::mem::take(&mut self.reports)
    }

    /// Takes an answer that has arrived; false when there is none.
    pub fn hear(&mut self, now_ns: u64) -> bool {
        let Some(inbox) = &self.inbox else { return false };
        let reply = match inbox.try_recv() {
            Ok(reply) => Some(reply),
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => None,
        };
        self.take(reply, now_ns);
        true
    }

    /// Waits for the answer to the question that is under way, if one is.
    pub fn wait(&mut self, at_most: Duration, now_ns: impl FnOnce() -> u64) {
        let Some(inbox) = &self.inbox else { return };
        match inbox.recv_timeout(at_most) {
            Ok(reply) => self.take(Some(reply), now_ns()),
            Err(RecvTimeoutError::Disconnected) => self.take(None, now_ns()),
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    "{}: no names of containers within {at_most:?}; starting without, they are taken when they come",
                    self.socket.display()
                );
            }
        }
    }

    fn ask(&mut self, now_ns: u64) {
        let (sender, inbox) = mpsc::sync_channel(1);
        let (socket, ready, wanted) = (self.socket.clone(), self.ready.clone(), self.nameless.clone());
        for id in wanted.keys() {
            self.asked.entry(id.clone()).or_insert(false);
        }
        self.inbox = Some(inbox);
        let ask = move || {
            let found = ask(&socket, &wanted);
            give_memory_back();
            // An agent that has ended needs no answer.
            let _ = sender.send(Reply { wanted, found });
            let _ = ready.write(1);
        };
        if let Err(source) = thread::Builder::new().name("truepin-cri".into()).spawn(ask) {
            let found = Err(CriError::Unasked { socket: self.socket.clone(), source });
            self.take(Some(Reply { wanted: self.nameless.clone(), found }), now_ns);
        }
    }

    fn take(&mut self, reply: Option<Reply>, now_ns: u64) {
        self.inbox = None;
        // Only emptied: whether there is an answer is what the channel says.
        let _ = self.ready.read();
        let ended = || {
            let source = io::Error::other("the thread that asked has ended without an answer");
            Reply {
                wanted: Wanted::new(),
                found: Err(CriError::Unasked { socket: self.socket.clone(), source }),
            }
        };
        let Reply { wanted, found } = reply.unwrap_or_else(ended);
        self.asked.values_mut().for_each(|done| *done = true);
        let mut open = wanted.len();
        self.failing = found.is_err();
        let trouble = match found {
            Ok(found) => {
                let mut trouble = found.trouble.map(|e| chain(&e));
                for (id, said) in found.said {
                    match (&said, wanted.get(&id)) {
                        (Said::Container { uid, name }, Some(ours)) if uid != ours => {
                            trouble = Some(format!(
                                "{}: container {id} is {name:?} of pod {uid:?}, but its cgroup is of pod {ours:?}: left without a name",
                                self.socket.display()
                            ));
                            continue;
                        }
                        _ => open -= 1,
                    }
                    self.said.insert(id, said);
                }
                trouble
            }
            Err(error) => Some(chain(&error)),
        };
        let all = open == 0 && !self.failing;
        self.pause_ns = if all { 0 } else { (self.pause_ns * 2).clamp(FIRST_PAUSE_NS, LONGEST_PAUSE_NS) };
        self.next_ns = now_ns.saturating_add(self.pause_ns.max(FIRST_PAUSE_NS));
        self.report(trouble);
    }

    fn report(&mut self, trouble: Option<String>) {
        if trouble == self.trouble {
            return;
        }
        self.reports.push(match &trouble {
            Some(trouble) => FindingKind::Runtime(format!("names of containers: {trouble}")),
            None => FindingKind::Note(format!("{} answers, and names containers", self.socket.display())),
        });
        self.trouble = trouble;
    }
}

impl AsFd for Cri {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// Asks, on the thread that calls.
fn ask(socket: &Path, wanted: &Wanted) -> Result<Found, CriError> {
    let unasked = |source| CriError::Unasked { socket: socket.into(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(unasked)?;
    let silent = |_| CriError::Silent { socket: socket.into(), after: ASK };
    runtime.block_on(async { tokio::time::timeout(ASK, wire::ask(socket, wanted)).await.map_err(silent)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn nameless(ids: &[&str]) -> Vec<(ContainerId, String)> {
        ids.iter().map(|id| (id.parse().unwrap(), "u-1".to_owned())).collect()
    }

    #[test]
    fn pauses_double_to_five_minutes_and_end_with_the_need() {
        let dir = tempfile::tempdir().unwrap();
        let mut cri = Cri::new(&dir.path().join("none.sock")).unwrap();
        cri.want(std::iter::empty(), 0);
        assert!(cri.due_ns().is_none() && cri.inbox.is_none(), "nobody is without a name");
        let mut now = 7 * S;
        let mut pauses = Vec::new();
        for _ in 0..11 {
            cri.want(nameless(&["a"]).into_iter(), now);
            assert!(cri.inbox.is_some() && cri.due_ns().is_none(), "one question at a time");
            cri.wait(Duration::from_secs(20), || now);
            let due = cri.due_ns().unwrap();
            pauses.push((due - now) / S);
            // Neither early nor for a container that comes meanwhile: it is the runtime that does not answer.
            cri.want(nameless(&["a", "b"]).into_iter(), due - 1);
            assert!(cri.inbox.is_none() && !cri.is_pending(&"b".parse().unwrap()));
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        let said = cri.reports();
        assert!(matches!(&said[..], [FindingKind::Runtime(t)] if t.contains("none.sock")), "{said:?}");
        cri.want_nothing();
        assert_eq!(cri.due_ns(), None);
    }
}
