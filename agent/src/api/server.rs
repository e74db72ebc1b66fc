//! HTTP over the Unix socket.
//!
//! Peer credentials decide (`SO_PEERCRED`): root writes; whoever the socket's mode lets connect (group `truepin`)
//! reads. What a connection may cost is bounded in [`super::connections`]. Of readers' questions a few at a time are
//! handed on, so that root's never wait behind more than these. The runtime here never touches the kernel or the disk: it
//! hands calls to the engine's thread and waits.

use super::{
    calls::{Admission, Call, Outcome, problem},
    connections::{self, Peer},
    documents::ProblemDoc,
};
use crate::run::{Command, Mailbox};
use axum::{
    Router,
    body::Bytes,
    extract::{ConnectInfo, Path as UrlPath, Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use nix::{
    sys::stat::{Mode, umask},
    unistd::{Gid, chown},
};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Semaphore, oneshot},
};

/// Questions of readers that the engine has at a time; one that looks at everything takes it milliseconds.
const READERS_CALLS: usize = 4;
/// Of the windows that may be open at a time, those of readers.
const READERS_WINDOWS: usize = crate::run::MAX_WAITING / 2;
/// The group that may read.
const GROUP: &str = "truepin";
/// Where groups are.
const GROUPS: &str = "/etc/group";

/// The socket could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A system call failed.
    #[error("{operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody answers there.
    #[error("another agent answers on {}", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// It is something else than a socket.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

/// Binds the socket, for root and the group `truepin` where there is one. A left-over socket is replaced; a live one
/// is refused.
pub fn bind(path: &Path) -> Result<UnixListener, ServerError> {
    let io = |operation| move |source| ServerError::Io { operation, path: path.into(), source };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(io("create the directory of"))?;
    }
    match fs::symlink_metadata(path) {
        Ok(m) if !m.file_type().is_socket() => return Err(ServerError::NotASocket { path: path.into() }),
        Ok(_) => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(ServerError::InUse { path: path.into() });
            }
            fs::remove_file(path).map_err(io("remove the left-over"))?;
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(io("look at")(e)),
    }
    // Nobody else connects in the moment before the mode is set; no other thread makes files yet.
    let mask = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    umask(mask);
    let listener = bound.map_err(io("bind"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(io("set the mode of"))?;
    // Without the group, root alone can connect.
    let groups = match fs::read_to_string(GROUPS) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.map_err(|source| ServerError::Io { operation: "read", path: GROUPS.into(), source })?,
    };
    if let Some(id) = group_id(&groups, GROUP) {
        chown(path, None, Some(Gid::from_raw(id))).map_err(|e| io("set the group of")(e.into()))?;
    }
    Ok(listener)
}

/// The id of a group in the text of `/etc/group` (`name:password:id:members`, group(5)). Not by `getgrnam(3)`: a static
/// binary crashes in the modules that `/etc/nsswitch.conf` may name, and a system group is in the file.
fn group_id(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

/// What handlers share.
#[derive(Debug, Clone)]
struct Desk {
    mailbox: Mailbox,
    calls: Arc<Semaphore>,
    windows: Arc<Semaphore>,
}

/// Serves until the process ends. Runs in a [`tokio::task::LocalSet`].
pub async fn serve(listener: UnixListener, mailbox: Mailbox) -> io::Result<()> {
    let desk = Desk {
        mailbox,
        calls: Arc::new(Semaphore::new(READERS_CALLS)),
        windows: Arc::new(Semaphore::new(READERS_WINDOWS)),
    };
    let owners = get(|peer, state| call(peer, state, Call::Owners)).post(admit);
    let router = Router::new()
        .route("/v1/status", get(|peer, state| call(peer, state, Call::Status)))
        .route("/v1/topology", get(|peer, state| call(peer, state, Call::Topology)))
        .route("/v1/owners", owners.merge(delete(release_all)))
        .route("/v1/owners/{*owner}", get(owner).delete(release))
        .route("/v1/pods", post(|p, s, b| posted(p, s, b, Call::AdmitPod)))
        .route("/v1/pods/{uid}", delete(|p, s, UrlPath(uid)| call(p, s, Call::RemovePod(uid))))
        .route("/v1/containers", post(|p, s, b| posted(p, s, b, Call::ContainerCreated)))
        .route("/v1/sources", post(|p, s, b| posted(p, s, b, Call::Source)))
        .route("/v1/adoptions", post(|p, s, b| posted(p, s, b, Call::Adopt)))
        .route("/v1/verdicts", get(verdicts))
        .route("/v1/findings", get(|peer, state| call(peer, state, Call::Findings)))
        .route("/v1/findings/{id}", get(finding))
        .fallback(|| async { respond(Err(problem(404, "unknown", "no such resource".into(), None))) })
        .with_state(desk);
    connections::serve(listener, router).await
}

type From = ConnectInfo<Peer>;

async fn call(ConnectInfo(peer): From, State(desk): State<Desk>, call: Call) -> Response {
    if call.writes() && !peer.is_root() {
        let hint = Some("run it as root");
        return respond(Err(problem(403, "forbidden", "only root changes assignments".into(), hint)));
    }
    let (reply, answer) = oneshot::channel();
    let gone = || problem(503, "unavailable", "the agent is stopping".into(), None);
    // Held until the answer is there, or the client is gone.
    let _turn = if peer.is_root() {
        None
    } else if matches!(call, Call::Verdicts { for_ms: Some(_), .. }) {
        let Ok(window) = desk.windows.try_acquire() else {
            let what = format!("at most {READERS_WINDOWS} windows at a time for all who only read");
            return respond(Err(problem(429, "too-much", what, None)));
        };
        Some(window)
    } else {
        desk.calls.acquire().await.ok()
    };
    if desk.mailbox.send(Command::Call(call, reply)).is_err() {
        return respond(Err(gone()));
    }
    respond(answer.await.unwrap_or_else(|_| Err(gone())))
}

pub(super) fn respond(outcome: Outcome) -> Response {
    let (status, kind, body) = match outcome {
        Ok(document) => (200, "application/json", serde_json::to_vec(&document)),
        Err(problem) => {
            (problem.status, "application/problem+json", serde_json::to_vec::<ProblemDoc>(&problem))
        }
    };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match body {
        Ok(body) => (status, [(header::CONTENT_TYPE, kind)], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn usage(what: impl std::fmt::Display) -> Response {
    respond(Err(problem(422, "usage", what.to_string(), None)))
}

/// A call with a JSON body.
async fn posted<T: DeserializeOwned>(
    peer: From,
    state: State<Desk>,
    body: Bytes,
    make: fn(Box<T>) -> Call,
) -> Response {
    match serde_json::from_slice::<T>(&body) {
        Ok(document) => call(peer, state, make(Box::new(document))).await,
        Err(error) => usage(error),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DryRun {
    #[serde(default)]
    dry_run: bool,
}

type Asked<T> = Result<Query<T>, axum::extract::rejection::QueryRejection>;

/// A change, or what it would be.
async fn change(peer: From, state: State<Desk>, query: Asked<DryRun>, change: Call) -> Response {
    match query {
        Ok(Query(q)) if q.dry_run => call(peer, state, Call::Plan(Box::new(change))).await,
        Ok(_) => call(peer, state, change).await,
        Err(error) => usage(error.body_text()),
    }
}

/// Whose process is named is for the kernel to say, not for the document.
async fn admit(peer: From, state: State<Desk>, query: Asked<DryRun>, body: Bytes) -> Response {
    match serde_json::from_slice::<Admission>(&body) {
        Ok(admission) if admission.pid.is_some() && peer.0.pid.is_none() => {
            usage("the caller is in a pid namespace that cannot be seen from here, so its pids say nothing")
        }
        Ok(admission) => {
            let admission = Admission { caller: peer.0.pid, ..admission };
            change(peer, state, query, Call::Admit(Box::new(admission))).await
        }
        Err(error) => usage(error),
    }
}

async fn owner(peer: From, state: State<Desk>, UrlPath(owner): UrlPath<String>) -> Response {
    match owner.parse() {
        Ok(owner) => call(peer, state, Call::Owner(owner)).await,
        Err(error) => usage(error),
    }
}

async fn release_all(peer: From, state: State<Desk>, query: Asked<DryRun>) -> Response {
    change(peer, state, query, Call::Release(None)).await
}

async fn release(
    peer: From,
    state: State<Desk>,
    UrlPath(owner): UrlPath<String>,
    query: Asked<DryRun>,
) -> Response {
    match owner.parse() {
        Ok(owner) => change(peer, state, query, Call::Release(Some(owner))).await,
        Err(error) => usage(error),
    }
}

async fn finding(peer: From, state: State<Desk>, UrlPath(id): UrlPath<String>) -> Response {
    match id.parse() {
        Ok(id) => call(peer, state, Call::Finding(id)).await,
        Err(error) => usage(format!("{id:?} is not a finding's id: {error}")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VerdictQuery {
    owner: Option<truepin::Owner>,
    for_ms: Option<u64>,
}

async fn verdicts(peer: From, state: State<Desk>, query: Asked<VerdictQuery>) -> Response {
    match query {
        Ok(Query(q)) => call(peer, state, Call::Verdicts { owner: q.owner, for_ms: q.for_ms }).await,
        Err(error) => usage(error.body_text()),
    }
}

/// Whether somebody answers on a socket.
pub async fn answers(path: &Path) -> bool {
    UnixStream::connect(path).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_by_name() {
        let text = "root:x:0:\ntruepin-x:x:7:\nbroken\ntruepin:x:998:ada,alan\n";
        assert_eq!(group_id(text, "truepin"), Some(998));
        assert_eq!(group_id(text, "broken"), None);
        assert_eq!(group_id("truepin:x:many:\n", "truepin"), None);
    }
}
