//! Names of containers asked of a runtime over CRI, on a copied cgroup tree: a runtime of the test's own that answers, or does
//! whatever else runtimes do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Bytes, body::Incoming, header::HeaderMap, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use machine::{Agent, Machine, is_root, wait};
use prost::Message;
use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    future::pending,
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
};

// Messages as a runtime fills them, with fields that nobody asked for. Field numbers: cri-api v1 `api.proto`.
#[derive(Clone, PartialEq, Message)]
struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<ContainerMetadata>,
    #[prost(string, tag = "5")]
    image_ref: String,
    #[prost(int32, tag = "6")]
    state: i32,
    #[prost(int64, tag = "7")]
    created_at: i64,
    #[prost(map = "string, string", tag = "8")]
    labels: std::collections::HashMap<String, String>,
    #[prost(map = "string, string", tag = "9")]
    annotations: std::collections::HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandbox {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(int32, tag = "3")]
    state: i32,
    #[prost(int64, tag = "4")]
    created_at: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(uint32, tag = "4")]
    attempt: u32,
}

fn container(id: &str, name: &str, uid: Option<&str>) -> Container {
    let text = |k: &str, v: &str| (k.to_owned(), v.to_owned());
    let labels = uid.map(|uid| {
        [
            text("io.kubernetes.container.name", name),
            text("io.kubernetes.pod.uid", uid),
            text("io.kubernetes.pod.name", "p"),
        ]
    });
    Container {
        id: id.into(),
        pod_sandbox_id: SANDBOX.into(),
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 3 }),
        image_ref: "sha256:0".into(),
        state: 1,
        created_at: 1,
        labels: labels.into_iter().flatten().collect(),
        annotations: [text("io.kubernetes.container.hash", "deadbeef")].into(),
    }
}

const SANDBOX: &str = "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a";
const DB: &str = "dbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdbdb";
const WEB: &str = "eebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeebeeb0";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Answer,
    /// Takes the call and never answers.
    Hang,
    /// As a runtime that has only an older CRI.
    Unimplemented,
    /// Says that its answer has 64 MiB.
    Huge,
    /// An answer that is no message.
    Rubbish,
    /// Speaks another protocol.
    Http1,
    /// Ends the connection after the first bytes.
    Close,
}

struct Runtime {
    does: Mutex<Does>,
    containers: Mutex<Vec<Container>>,
    /// Calls, by name.
    calls: Mutex<BTreeMap<String, u32>>,
}

impl Runtime {
    fn new(containers: Vec<Container>) -> Arc<Self> {
        let (does, calls) = (Mutex::new(Does::Answer), Mutex::default());
        Arc::new(Self { does, containers: Mutex::new(containers), calls })
    }

    fn set(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    fn calls(&self, of: &str) -> u32 {
        self.calls.lock().unwrap().get(of).copied().unwrap_or(0)
    }

    /// Serves until the test's process ends.
    fn serve(self: &Arc<Self>, socket: &Path) {
        let (me, socket) = (self.clone(), socket.to_owned());
        let (sender, listening) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = UnixListener::bind(socket).unwrap();
                sender.send(()).unwrap();
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    let me = me.clone();
                    let does = *me.does.lock().unwrap();
                    tokio::spawn(async move {
                        match does {
                            Does::Http1 => {
                                assert!(stream.read(&mut [0; 24]).await.unwrap() > 0);
                                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
                                // It waits for a request that it understands.
                                drop(stream.read_to_end(&mut Vec::new()).await);
                            }
                            Does::Close => {}
                            _ => {
                                let service = service_fn(move |request| me.clone().answer(request));
                                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                                drop(builder.serve_connection(TokioIo::new(stream), service).await);
                            }
                        }
                    });
                }
            });
        });
        listening.recv().unwrap();
    }

    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<http_body_util::combinators::BoxBody<Bytes, Infallible>>, Infallible> {
        let call = request.uri().path().trim_start_matches("/runtime.v1.RuntimeService/").to_owned();
        assert_eq!(request.headers()["content-type"], "application/grpc");
        assert_eq!(request.headers()["te"], "trailers");
        *self.calls.lock().unwrap().entry(call.clone()).or_default() += 1;
        let does = *self.does.lock().unwrap();
        let mut message = match call.as_str() {
            "ListContainers" => {
                ListContainersResponse { containers: self.containers.lock().unwrap().clone() }.encode_to_vec()
            }
            "ListPodSandbox" => {
                let metadata = PodSandboxMetadata {
                    name: "p".into(),
                    uid: "u-1".into(),
                    namespace: "default".into(),
                    attempt: 1,
                };
                let sandbox =
                    PodSandbox { id: SANDBOX.into(), metadata: Some(metadata), state: 0, created_at: 1 };
                ListPodSandboxResponse { items: vec![sandbox] }.encode_to_vec()
            }
            other => panic!("{other} was called"),
        };
        let mut length = message.len();
        match does {
            Does::Hang => pending().await,
            Does::Huge => length = 64 << 20,
            Does::Rubbish => message.fill(0xff),
            Does::Unimplemented => {
                let response = Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", "12")
                    .header("grpc-message", "unknown service runtime.v1.RuntimeService");
                return Ok(response.body(Full::default().boxed()).unwrap());
            }
            _ => {}
        }
        let mut body = vec![0];
        body.extend(u32::try_from(length).unwrap().to_be_bytes());
        body.extend(message);
        let trailers = async {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            Some(Ok(trailers))
        };
        let body = Full::new(Bytes::from(body)).with_trailers(trailers).boxed();
        Ok(Response::builder().header("content-type", "application/grpc").body(body).unwrap())
    }
}

/// A machine where the pod u-1 with db and web was admitted, and whose agent has ended.
fn admitted() -> Machine {
    let m = Machine::new();
    let _agent = m.agent("reserved = \"0-1\"");
    let c = |name: &str| format!(r#"{{"n":"{name}","req":2000,"lim":2000,"mreq":64,"mlim":64}}"#);
    fs::write(m.path("pod.json"), format!(r#"{{"uid":"u-1","app":[{},{}]}}"#, c("db"), c("web"))).unwrap();
    assert_eq!(m.run(&["admit", m.path("pod.json").to_str().unwrap()]).status.code(), Some(0));
    m
}

fn agent(m: &Machine, tick: &str) -> Agent {
    let socket = m.path("cri.sock");
    m.agent(&format!("reserved = \"0-1\"\ntick = {tick:?}\n[sources]\ncri = \"{}\"", socket.display()))
}

fn partition(m: &Machine, id: &str) -> String {
    m.file(&format!("kubepods/podu-1/{id}"), "cpuset.cpus.partition")
}

/// Texts of the findings of a kind.
fn findings(m: &Machine, kind: &str) -> Vec<String> {
    let status = m.json(&["status"]).1;
    let of = status["findings"].as_array().unwrap().iter().filter(|f| f["kind"] == kind);
    of.map(|f| f["text"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn initial_containers_get_their_names_from_the_runtime() {
    if !is_root("initial_containers_get_their_names_from_the_runtime") {
        return;
    }
    let m = admitted();
    for id in [SANDBOX, DB, WEB] {
        m.container("u-1", id);
    }
    // The second was made without the kubelet's labels: its name is in its metadata, its pod's uid in its sandbox's.
    let exited = container(&"0".repeat(64), "db", Some("u-1"));
    let runtime = Runtime::new(vec![exited, container(DB, "db", Some("u-1")), container(WEB, "web", None)]);
    runtime.serve(&m.path("cri.sock"));
    let _agent = agent(&m, "100ms");
    // Not waited for: what already runs is known before the agent answers anybody.
    assert_eq!((partition(&m, DB), partition(&m, WEB)), ("root".into(), "root".into()));
    assert_eq!(findings(&m, "unresolved-container"), [""; 0], "a sandbox is nobody's container");
    assert_eq!((runtime.calls("ListContainers"), runtime.calls("ListPodSandbox")), (1, 1));
    // All have names: nothing is asked at ticks.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!((runtime.calls("ListContainers"), runtime.calls("ListPodSandbox")), (1, 1));
    // One that comes later is asked about when it is seen, and is no finding before the answer; labels suffice.
    let later = "1".repeat(64);
    runtime.containers.lock().unwrap().push(container(&later, "db", Some("u-1")));
    m.container("u-1", &later);
    wait("the newer container's partition", || partition(&m, &later) == "root");
    assert_eq!((runtime.calls("ListContainers"), runtime.calls("ListPodSandbox")), (2, 1));
    // One that the runtime does not know, and one of which it tells another pod, stay nobody's; asked about again, not fast.
    let (stray, other) = ("2".repeat(64), "3".repeat(64));
    runtime.containers.lock().unwrap().push(container(&other, "db", Some("u-2")));
    m.container("u-1", &stray);
    m.container("u-1", &other);
    wait("both findings", || findings(&m, "unresolved-container").len() == 2);
    let said = findings(&m, "runtime").concat();
    assert!(said.contains(&format!("container {other} is \"db\" of pod \"u-2\"")), "{said}");
    thread::sleep(Duration::from_secs(4));
    let calls = runtime.calls("ListContainers");
    assert!((4..=6).contains(&calls), "asked {calls} times");
    assert_eq!(findings(&m, "runtime").len(), 1, "said once");
    assert_eq!(partition(&m, &other), "member");
}

#[test]
fn a_runtime_that_hangs_costs_nothing_but_names() {
    if !is_root("a_runtime_that_hangs_costs_nothing_but_names") {
        return;
    }
    let m = admitted();
    m.container("u-1", DB);
    let runtime = Runtime::new(vec![container(DB, "db", Some("u-1"))]);
    runtime.set(Does::Hang);
    runtime.serve(&m.path("cri.sock"));
    let started = Instant::now();
    let _agent = agent(&m, "100ms");
    let took = started.elapsed();
    assert!(took > Duration::from_secs(2) && took < Duration::from_secs(9), "{took:?}");
    // The question is still open: calls are answered, ticks pass, and nothing is said of the container yet.
    let asked = Instant::now();
    for _ in 0..5 {
        assert_eq!(findings(&m, "unresolved-container"), [""; 0]);
    }
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    wait("the finding", || !findings(&m, "runtime").is_empty());
    let said = findings(&m, "runtime").concat();
    assert!(said.contains("cri.sock: no answer within 10s"), "{said}");
    wait("the container's finding", || findings(&m, "unresolved-container").concat().contains(DB));
    assert_eq!(runtime.calls("ListContainers"), 1);
    runtime.set(Does::Answer);
    wait("the partition", || partition(&m, DB) == "root");
}

#[test]
fn a_runtime_that_answers_something_else_is_a_finding() {
    if !is_root("a_runtime_that_answers_something_else_is_a_finding") {
        return;
    }
    for (does, needle) in [
        (Does::Unimplemented, "ListContainers: Unimplemented: unknown service runtime.v1.RuntimeService"),
        (Does::Huge, "ListContainers: OutOfRange: "),
        (Does::Rubbish, "ListContainers: Internal: "),
        (Does::Http1, "ListContainers: Unknown: http2 error"),
        (Does::Close, "cri.sock: "),
    ] {
        let m = admitted();
        m.container("u-1", DB);
        let runtime = Runtime::new(vec![container(DB, "db", Some("u-1"))]);
        runtime.set(does);
        runtime.serve(&m.path("cri.sock"));
        let _agent = agent(&m, "100ms");
        let said = findings(&m, "runtime");
        assert!(
            said.len() == 1 && said[0].contains(needle) && said[0].contains("cri.sock"),
            "{does:?}: {said:?}"
        );
        assert!(findings(&m, "unresolved-container").concat().contains(DB), "{does:?}");
        wait("a second question, or its pause", || {
            !matches!(does, Does::Unimplemented) || runtime.calls("ListContainers") > 1
        });
        assert_eq!(findings(&m, "runtime").len(), 1, "{does:?}: said once");
        runtime.set(Does::Answer);
        wait("the partition", || partition(&m, DB) == "root");
        assert!(findings(&m, "note").concat().contains("answers"), "{does:?}");
    }
}

#[test]
fn a_runtime_that_comes_later_is_found_without_a_tick() {
    if !is_root("a_runtime_that_comes_later_is_found_without_a_tick") {
        return;
    }
    let m = admitted();
    m.container("u-1", DB);
    let _agent = agent(&m, "1h");
    let said = findings(&m, "runtime").concat();
    assert!(said.contains("cri.sock: No such file or directory"), "{said}");
    let runtime = Runtime::new(vec![container(DB, "db", Some("u-1"))]);
    runtime.serve(&m.path("cri.sock"));
    wait("the partition", || partition(&m, DB) == "root");
    assert_eq!(runtime.calls("ListContainers"), 1);
}
