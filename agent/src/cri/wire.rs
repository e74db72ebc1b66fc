//! The two calls of CRI v1 that say which container is whose: gRPC on the runtime's socket.
//!
//! Of each message only the fields that are read are declared, so that annotations, images and the like are skipped and
//! never kept. Source: cri-api v1 `api.proto`, package `runtime.v1`, which containerd and CRI-O both serve.
//! Steps: connect; `ListContainers`; `ListPodSandbox` only where the first answer left something open. Nothing stays
//! open afterwards.

use super::{CriError, Found, Said, Wanted};
use hyper::{Uri, client::conn::http2, http::uri::PathAndQuery};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{collections::BTreeMap, error::Error, path::Path};
use tokio::net::UnixStream;
use tonic::{Request, Status, body::Body, client::Grpc};
use tonic_prost::ProstCodec;

/// As much as the kubelet lets a runtime answer. A container of a kubelet takes some 2 KiB, mostly annotations, so this
/// is room for thousands; an answer that is longer is refused by the length that it announces.
const MAX_ANSWER: usize = 16 << 20;
/// Of what a runtime says about a failure, so much is passed on, in characters.
const MAX_WORDS: usize = 300;
/// Labels that the kubelet sets on every container; the uid on sandboxes too.
const UID: &str = "io.kubernetes.pod.uid";
const NAME: &str = "io.kubernetes.container.name";

/// `ListContainersRequest` or `ListPodSandboxRequest` without a filter: asked for is what has a cgroup, whatever its state.
#[derive(Clone, PartialEq, prost::Message)]
struct ListRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Container {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<ContainerMetadata>,
    #[prost(btree_map = "string, string", tag = "8")]
    labels: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodSandbox {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<PodSandboxMetadata>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodSandboxMetadata {
    #[prost(string, tag = "2")]
    uid: String,
}

/// A container that the runtime has, as far as its own entry says.
struct Entry {
    sandbox: String,
    uid: Option<String>,
    name: Option<String>,
}

/// Asks on a connection of its own. Takes as long as the runtime does: the caller bounds it.
pub(super) async fn ask(socket: &Path, wanted: &Wanted) -> Result<Found, CriError> {
    let connect = |source| CriError::Connect { socket: socket.into(), source };
    let http = |source| CriError::Http { socket: socket.into(), source };
    let stream = UnixStream::connect(socket).await.map_err(connect)?;
    let (sender, connection) =
        http2::handshake::<_, _, Body>(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(http)?;
    // Its end is told to the sender as well; it goes with the runtime of this question.
    tokio::spawn(async move { drop(connection.await) });
    let send = tower::service_fn(move |request| sender.clone().send_request(request));
    let origin = Uri::from_static("http://localhost"); // what gRPC says of a socket that has no host
    let mut client = Grpc::with_origin(send, origin).max_decoding_message_size(MAX_ANSWER);
    let failed = |call, status: &Status| CriError::Refused {
        socket: socket.into(),
        call,
        code: format!("{:?}", status.code()),
        words: words(status),
    };

    let call = "ListContainers";
    let path = PathAndQuery::from_static("/runtime.v1.RuntimeService/ListContainers");
    let codec = ProstCodec::<ListRequest, ListContainersResponse>::default();
    let listed = client.unary(Request::new(ListRequest {}), path, codec).await;
    let listed = listed.map_err(|status| failed(call, &status))?.into_inner();
    let entries = entries(listed, wanted);

    let mut sandboxes = BTreeMap::new();
    let mut trouble = None;
    // What is no container may be a sandbox; one without a label has its pod's uid from its sandbox.
    if !wanted.keys().all(|id| entries.get(id).is_some_and(|e| e.uid.is_some())) {
        let call = "ListPodSandbox";
        let path = PathAndQuery::from_static("/runtime.v1.RuntimeService/ListPodSandbox");
        let codec = ProstCodec::<ListRequest, ListPodSandboxResponse>::default();
        match client.unary(Request::new(ListRequest {}), path, codec).await {
            Ok(listed) => {
                let uid = |s: PodSandbox| (s.id, s.metadata.map(|m| m.uid).unwrap_or_default());
                sandboxes = listed.into_inner().items.into_iter().map(uid).collect();
            }
            // The names that the first call gave are good all the same.
            Err(status) => trouble = Some(failed(call, &status)),
        }
    }
    Ok(Found { said: said(wanted, entries, &sandboxes), trouble })
}

/// Of a runtime's whole list, what was asked for.
fn entries(listed: ListContainersResponse, wanted: &Wanted) -> BTreeMap<String, Entry> {
    let filled = |text: Option<String>| text.filter(|t| !t.is_empty());
    let entry = |mut c: Container| {
        let name = filled(c.labels.remove(NAME)).or_else(|| filled(c.metadata.map(|m| m.name)));
        (c.id, Entry { sandbox: c.pod_sandbox_id, uid: filled(c.labels.remove(UID)), name })
    };
    listed.containers.into_iter().filter(|c| wanted.contains_key(&c.id)).map(entry).collect()
}

/// What the answers say of each id: a container's pod and name, or that it is a sandbox.
fn said(
    wanted: &Wanted,
    mut entries: BTreeMap<String, Entry>,
    sandboxes: &BTreeMap<String, String>,
) -> BTreeMap<String, Said> {
    let mut of = |id: &String| match entries.remove(id) {
        Some(Entry { sandbox, uid, name }) => {
            let uid = uid.or_else(|| sandboxes.get(&sandbox).filter(|u| !u.is_empty()).cloned());
            Some(Said::Container { uid: uid?, name: name? })
        }
        None => sandboxes.contains_key(id).then_some(Said::Sandbox),
    };
    wanted.keys().filter_map(|id| Some((id.clone(), of(id)?))).collect()
}

/// A status with its causes, in a line of bounded length.
fn words(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    let blank = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_WORDS).map(blank).collect()
}
