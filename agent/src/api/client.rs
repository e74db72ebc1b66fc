//! The other end of the socket.

use super::{
    calls::{Call, Outcome, problem},
    documents::ProblemDoc,
};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::{
    io,
    path::{Path, PathBuf},
};
use tokio::net::UnixStream;

/// The agent could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("no agent answers on {}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The conversation broke off.
    #[error("asking the agent on {}", path.display())]
    Http {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn target(call: &Call) -> (Method, String) {
    let escape = |text: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~/".contains(&b);
        let one = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
        text.bytes().map(one).collect::<String>()
    };
    match call {
        Call::Status => (Method::GET, "/v1/status".into()),
        Call::Topology => (Method::GET, "/v1/topology".into()),
        Call::Owners => (Method::GET, "/v1/owners".into()),
        Call::Owner(owner) => (Method::GET, format!("/v1/owners/{}", escape(&owner.to_string()))),
        Call::Verdicts { owner, for_ms } => {
            let owner = owner.as_ref().map(|o| format!("owner={}", escape(&o.to_string())));
            let for_ms = for_ms.map(|ms| format!("for_ms={ms}"));
            let query: Vec<String> = owner.into_iter().chain(for_ms).collect();
            (Method::GET, format!("/v1/verdicts?{}", query.join("&")))
        }
        Call::Findings => (Method::GET, "/v1/findings".into()),
        Call::Finding(id) => (Method::GET, format!("/v1/findings/{id}")),
        Call::Admit(_) => (Method::POST, "/v1/owners".into()),
        Call::AdmitPod(_) => (Method::POST, "/v1/pods".into()),
        Call::RemovePod(uid) => (Method::DELETE, format!("/v1/pods/{}", escape(uid))),
        Call::ContainerCreated(_) => (Method::POST, "/v1/containers".into()),
        Call::Adopt(_) => (Method::POST, "/v1/adoptions".into()),
        Call::Source(_) => (Method::POST, "/v1/sources".into()),
        Call::Plan(call) => {
            let (method, path) = target(call);
            (method, format!("{path}?dry_run=true"))
        }
        Call::Release(None) => (Method::DELETE, "/v1/owners".into()),
        Call::Release(Some(owner)) => (Method::DELETE, format!("/v1/owners/{}", escape(&owner.to_string()))),
    }
}

/// Asks the agent on `socket`.
pub async fn ask(socket: &Path, call: &Call) -> Result<Outcome, ClientError> {
    let unreachable = |source| ClientError::Unreachable { path: socket.into(), source };
    let stream = UnixStream::connect(socket).await.map_err(unreachable)?;
    let broken =
        |source: Box<dyn std::error::Error + Send + Sync>| ClientError::Http { path: socket.into(), source };
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(e.into()))?;
    let driver = tokio::spawn(connection);
    let (method, uri) = target(call);
    let asked = if let Call::Plan(planned) = call { planned } else { call };
    let body = match asked {
        Call::Admit(admission) => serde_json::to_vec(admission),
        Call::AdmitPod(pod) => serde_json::to_vec(pod),
        Call::ContainerCreated(container) => serde_json::to_vec(container),
        Call::Source(report) => serde_json::to_vec(report),
        Call::Adopt(adoption) => serde_json::to_vec(adoption),
        _ => Ok(Vec::new()),
    };
    let body = body.map_err(|e| broken(e.into()))?;
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header("host", "truepin")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| broken(e.into()))?;
    let response = sender.send_request(request).await.map_err(|e| broken(e.into()))?;
    let status = response.status();
    let bytes = response.into_body().collect().await.map_err(|e| broken(e.into()))?.to_bytes();
    driver.abort();
    if status.is_success() {
        return Ok(Ok(serde_json::from_slice(&bytes).map_err(|e| broken(e.into()))?));
    }
    Ok(Err(serde_json::from_slice::<Box<ProblemDoc>>(&bytes).unwrap_or_else(|_| {
        problem(status.as_u16(), "unexpected", String::from_utf8_lossy(&bytes).into_owned(), None)
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_escaped() {
        let call = Call::Owner("unit/dev-disk-by\\x2did.device".parse().unwrap());
        assert_eq!(target(&call).1, "/v1/owners/unit/dev-disk-by%5Cx2did.device");
        let call = Call::Verdicts { owner: Some("cgroup/a b/c".parse().unwrap()), for_ms: Some(5) };
        assert_eq!(target(&call).1, "/v1/verdicts?owner=cgroup/a%20b/c&for_ms=5");
    }
}
