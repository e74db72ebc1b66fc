//! HTTP over the Unix socket.
//!
//! Peer credentials decide (`SO_PEERCRED`): root writes; whoever the socket's mode lets connect (group `truepin`)
//! reads. Bodies are bounded to 1 MiB, the sets of some thousand containers. The runtime here never touches the kernel or the disk: it hands calls to the
//! engine's thread and waits.

use super::{
    calls::{Call, Outcome, problem},
    documents::ProblemDoc,
};
use crate::run::{Command, Mailbox};
use axum::{
    Router,
    body::Bytes,
    extract::{ConnectInfo, DefaultBodyLimit, Path as UrlPath, Query, State, connect_info::Connected},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
    serve::IncomingStream,
};
use nix::unistd::{Gid, chown};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::oneshot,
};

const BODY_LIMIT: usize = 1024 * 1024;
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

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
struct Peer {
    uid: Option<u32>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self { uid: stream.io().peer_cred().ok().map(|c| c.uid()) }
    }
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
    let listener = UnixListener::bind(path).map_err(io("bind"))?;
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

/// Serves until the process ends.
pub async fn serve(listener: UnixListener, mailbox: Mailbox) -> io::Result<()> {
    let owners =
        get(|peer, state| call(peer, state, Call::Owners)).post(|p, s, b| posted(p, s, b, Call::Admit));
    let router = Router::new()
        .route("/v1/status", get(|peer, state| call(peer, state, Call::Status)))
        .route("/v1/topology", get(|peer, state| call(peer, state, Call::Topology)))
        .route("/v1/owners", owners.merge(delete(|peer, state| call(peer, state, Call::Release(None)))))
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
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(mailbox);
    axum::serve(listener, router.into_make_service_with_connect_info::<Peer>()).await
}

type From = ConnectInfo<Peer>;

async fn call(ConnectInfo(peer): From, State(mailbox): State<Mailbox>, call: Call) -> Response {
    if call.writes() && peer.uid != Some(0) {
        let hint = Some("run it as root");
        return respond(Err(problem(403, "forbidden", "only root changes assignments".into(), hint)));
    }
    let (reply, answer) = oneshot::channel();
    let gone = || problem(503, "unavailable", "the agent is stopping".into(), None);
    if mailbox.send(Command::Call(call, reply)).is_err() {
        return respond(Err(gone()));
    }
    respond(answer.await.unwrap_or_else(|_| Err(gone())))
}

fn respond(outcome: Outcome) -> Response {
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
    state: State<Mailbox>,
    body: Bytes,
    make: fn(Box<T>) -> Call,
) -> Response {
    match serde_json::from_slice::<T>(&body) {
        Ok(document) => call(peer, state, make(Box::new(document))).await,
        Err(error) => usage(error),
    }
}

async fn owner(peer: From, state: State<Mailbox>, UrlPath(owner): UrlPath<String>) -> Response {
    match owner.parse() {
        Ok(owner) => call(peer, state, Call::Owner(owner)).await,
        Err(error) => usage(error),
    }
}

async fn release(peer: From, state: State<Mailbox>, UrlPath(owner): UrlPath<String>) -> Response {
    match owner.parse() {
        Ok(owner) => call(peer, state, Call::Release(Some(owner))).await,
        Err(error) => usage(error),
    }
}

async fn finding(peer: From, state: State<Mailbox>, UrlPath(id): UrlPath<String>) -> Response {
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

async fn verdicts(
    peer: From,
    state: State<Mailbox>,
    query: Result<Query<VerdictQuery>, axum::extract::rejection::QueryRejection>,
) -> Response {
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
