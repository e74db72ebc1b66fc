//! Who gets a connection, and for how long.
//!
//! Problem: whoever may open the socket may also hold it open, send a byte a second, ask for much and read nothing. None of
//! that may cost others their answers, nor the agent its memory. Steps: a connection gets one of a fixed number of seats by
//! its peer's user, and carries one request; its head, its body and the taking of the answer each have a deadline; heads
//! and bodies are bounded, and bodies come out of one budget.
//! Invariants: seats of root are root's alone, so a flood of others locks nobody out who writes; one user of many has at
//! most a quarter of the readers' seats; a body of somebody who may not write is not read at all; what all connections hold
//! is bounded by [`BODIES`], by [`HEAD_BYTES`] a seat and by an answer a seat.

use super::{calls::problem, server::respond};
use axum::{Router, body::Body, extract::ConnectInfo, http::Request, response::Response};
use http_body_util::BodyExt;
use hyper::{
    Method,
    body::{Body as _, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    convert::Infallible,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tower::ServiceExt;

/// A head is some hundred bytes, sent at once.
const HEAD_TIME: Duration = Duration::from_secs(5);
const HEAD_BYTES: usize = 16 * 1024;
const HEADERS: usize = 64;
/// The sets of some thousand containers.
const BODY_BYTES: usize = 1024 * 1024;
const BODY_TIME: Duration = Duration::from_secs(10);
/// All bodies together, in bytes.
const BODIES: usize = 16 * 1024 * 1024;
/// An answer waits in memory for its reader.
const TAKING: Duration = Duration::from_secs(30);
/// Commands and orchestrators of root's.
const ROOT_SEATS: usize = 128;
/// The group that reads.
const READER_SEATS: usize = 64;
const SEATS_OF_ONE: usize = 16;
/// How often it is looked whether a client that waits is still there.
const LOOK: Duration = Duration::from_secs(1);
/// Without descriptors nothing can be accepted; the next try after this.
const BREATH: Duration = Duration::from_millis(100);

/// Who is at the other end, as the kernel knew it at connect(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Peer {
    /// In the agent's user namespace: root of another one is not 0 here.
    pub(super) uid: Option<u32>,
    /// In the agent's pid namespace; `None` where the process cannot be seen from there.
    pub(super) pid: Option<u32>,
}

impl Peer {
    fn of(stream: &UnixStream) -> Self {
        let known = stream.peer_cred().ok();
        let pid = known.and_then(|c| c.pid()).and_then(|p| u32::try_from(p).ok()).filter(|p| *p > 0);
        Self { uid: known.map(|c| c.uid()), pid }
    }

    pub(super) fn is_root(self) -> bool {
        self.uid == Some(0)
    }
}

/// The seats that are taken, by user.
#[derive(Debug, Default)]
struct Seats(BTreeMap<Option<u32>, usize>);

impl Seats {
    fn take(&mut self, uid: Option<u32>) -> bool {
        let of = |u: &Option<u32>| self.0.get(u).copied().unwrap_or(0);
        let full = if uid == Some(0) {
            of(&uid) >= ROOT_SEATS
        } else {
            let readers: usize = self.0.iter().filter(|(u, _)| **u != Some(0)).map(|(_, n)| n).sum();
            readers >= READER_SEATS || of(&uid) >= SEATS_OF_ONE
        };
        if !full {
            *self.0.entry(uid).or_default() += 1;
        }
        !full
    }

    fn leave(&mut self, uid: Option<u32>) {
        if let Some(n) = self.0.get_mut(&uid) {
            *n -= 1;
            if *n == 0 {
                self.0.remove(&uid);
            }
        }
    }
}

/// A seat, free again when dropped.
struct Seat {
    seats: Rc<RefCell<Seats>>,
    uid: Option<u32>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.borrow_mut().leave(self.uid);
    }
}

/// Serves until the process ends. Runs in a [`tokio::task::LocalSet`].
pub(super) async fn serve(listener: UnixListener, router: Router) -> io::Result<()> {
    let seats = Rc::new(RefCell::new(Seats::default()));
    let bodies = Arc::new(Semaphore::new(BODIES));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("accepting a connection: {error}");
                sleep(BREATH).await;
                continue;
            }
        };
        let peer = Peer::of(&stream);
        if seats.borrow_mut().take(peer.uid) {
            let seat = Seat { seats: seats.clone(), uid: peer.uid };
            tokio::task::spawn_local(converse(stream, peer, router.clone(), bodies.clone(), seat));
        } else {
            turn_away(&stream);
        }
    }
}

/// Says why in one write, which a fresh socket always has room for, and hangs up.
fn turn_away(stream: &UnixStream) {
    const FULL: &str = "{\"type\":\"about:blank\",\"title\":\"too-much\",\"status\":429,\"detail\":\"too many connections \
                        of this user at a time\"}";
    let text = format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\nconnection: \
         close\r\n\r\n{FULL}",
        FULL.len()
    );
    // Who is gone already needs no answer.
    drop(stream.try_write(text.as_bytes()));
}

/// One request and its answer.
async fn converse(stream: UnixStream, peer: Peer, router: Router, bodies: Arc<Semaphore>, seat: Seat) {
    let watched = match stream.as_fd().try_clone_to_owned() {
        Ok(watched) => watched,
        Err(error) => return tracing::warn!("watching a connection: {error}"),
    };
    let answered = Rc::new(Notify::new());
    let service = {
        let answered = answered.clone();
        service_fn(move |request: Request<Incoming>| {
            let (router, bodies, answered) = (router.clone(), bodies.clone(), answered.clone());
            async move {
                let response = answer(request, peer, router, bodies).await;
                answered.notify_one();
                Ok::<_, Infallible>(response)
            }
        })
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_headers(HEADERS)
        .max_buf_size(HEAD_BYTES)
        // Who has said all may wait for the answer all the same.
        .half_close(true)
        .keep_alive(false);
    let late = async {
        answered.notified().await;
        sleep(TAKING).await;
    };
    tokio::select! {
        // What a client breaks off or gets wrong is its own affair.
        ended = http.serve_connection(TokioIo::new(stream), service) => {
            if let Err(error) = ended {
                tracing::debug!("a connection of user {:?}: {error}", peer.uid);
            }
        }
        // A window may last an hour, and bytes behind the request keep hyper from seeing that nobody waits for it.
        () = hung_up(watched) => tracing::debug!("user {:?} went away", peer.uid),
        () = late => tracing::debug!("user {:?} did not take its answer in {TAKING:?}", peer.uid),
    }
    drop(seat);
}

/// Until the other end is closed altogether.
async fn hung_up(connection: OwnedFd) {
    loop {
        sleep(LOOK).await;
        // Asked for nothing, poll(2) tells of a hang-up alone.
        let mut fds = [PollFd::new(connection.as_fd(), PollFlags::empty())];
        if poll(&mut fds, PollTimeout::ZERO).is_ok_and(|n| n > 0) {
            return;
        }
    }
}

async fn answer(request: Request<Incoming>, peer: Peer, router: Router, bodies: Arc<Semaphore>) -> Response {
    let (mut head, body) = request.into_parts();
    let reads = matches!(head.method, Method::GET | Method::HEAD);
    let mut budgeted = None;
    let body = if reads {
        Body::empty()
    } else if peer.is_root() {
        match timeout(BODY_TIME, collect(body, &bodies)).await {
            Ok(Ok((bytes, budget))) => {
                budgeted = budget;
                Body::from(bytes)
            }
            Ok(Err(response)) => return response,
            Err(_) => {
                let what = format!("the body did not come within {} s", BODY_TIME.as_secs());
                return respond(Err(problem(408, "usage", what, None)));
            }
        }
    } else {
        let hint = Some("run it as root");
        return respond(Err(problem(403, "forbidden", "only root changes assignments".into(), hint)));
    };
    head.extensions.insert(ConnectInfo(peer));
    let answer = router.oneshot(Request::from_parts(head, body)).await;
    drop(budgeted);
    match answer {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

type Collected = (Vec<u8>, Option<OwnedSemaphorePermit>);

/// The body, and its part of the budget until that is dropped.
async fn collect(mut body: Incoming, bodies: &Arc<Semaphore>) -> Result<Collected, Response> {
    let too_big = || {
        let what = format!("a body has at most {BODY_BYTES} bytes");
        respond(Err(problem(413, "usage", what, None)))
    };
    if body.size_hint().lower() > BODY_BYTES as u64 {
        return Err(too_big());
    }
    let mut bytes = Vec::new();
    let mut budget: Option<OwnedSemaphorePermit> = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| respond(Err(problem(400, "usage", e.to_string(), None))))?;
        let Ok(data) = frame.into_data() else { continue }; // trailers say nothing to us
        if bytes.len() + data.len() > BODY_BYTES {
            return Err(too_big());
        }
        let some = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let Ok(permit) = bodies.clone().try_acquire_many_owned(some) else {
            let what = format!("more than {BODIES} bytes are being sent at a time");
            return Err(respond(Err(problem(503, "too-much", what, Some("ask again")))));
        };
        match &mut budget {
            Some(budget) => budget.merge(permit),
            none => *none = Some(permit),
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, budget))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_of_root_are_roots_alone_and_no_reader_has_all() {
        let mut seats = Seats::default();
        let taken = (0..1000).filter(|_| seats.take(Some(7))).count();
        assert_eq!(taken, SEATS_OF_ONE);
        let others = (0..1000).filter(|n| seats.take((*n % 10 != 0).then_some(100 + n))).count();
        assert_eq!(others, READER_SEATS - SEATS_OF_ONE);
        assert!(!seats.take(None) && !seats.take(Some(8)));
        assert_eq!((0..1000).filter(|_| seats.take(Some(0))).count(), ROOT_SEATS);
        seats.leave(Some(7));
        assert!(seats.take(Some(8)) && !seats.take(Some(8)) && !seats.take(Some(0)));
        seats.leave(Some(0));
        assert!(!seats.take(Some(9)) && seats.take(Some(0)));
    }
}
