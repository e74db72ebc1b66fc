//! Clients of the socket that mean harm, against the real agent on a copied cgroup tree.
//!
//! What they must not get: anything that the caller may not have, an answer that a legitimate client waits for in vain, a
//! table or a record that is another than before, memory or descriptors without bound. Each attack prints what it sent and
//! what came of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::{Agent, Machine, is_root};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// What may be added to the agent's memory by all that happens here: 16 MiB of bodies and a head and an answer for each of
/// 192 seats are less.
const GROWTH_KIB: u64 = 48 * 1024;
/// Two for each of 192 seats, and what the agent has open itself.
const DESCRIPTORS: usize = 2 * 192 + 64;
/// In which `truepin status` is answered, load of the machine included.
const DEADLINE: Duration = Duration::from_secs(10);

struct Siege {
    machine: Machine,
    agent: Agent,
    rss_before: u64,
}

impl Siege {
    fn new() -> Self {
        let machine = Machine::new();
        let agent = machine.agent("reserved = \"0-1\"");
        let (code, owner) =
            machine.json(&["assign", "unit/db.service", "--cgroup", "system.slice/db", "--cpus", "2"]);
        assert_eq!(code, 0, "{owner}");
        // As an operator would who gave more than was meant: the peer's credentials are what is left.
        for dir in [machine.path(""), machine.path("run")] {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let siege = Self { machine, agent, rss_before: 0 };
        fs::set_permissions(siege.socket(), fs::Permissions::from_mode(0o666)).unwrap();
        Self { rss_before: siege.rss(), ..siege }
    }

    fn socket(&self) -> PathBuf {
        self.machine.path("run/truepin.sock")
    }

    fn rss(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.agent.0.id())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.agent.0.id())).unwrap().count()
    }

    /// A legitimate client of root's is served, and the agent's memory and descriptors are within their bounds.
    fn stands(&self, attack: &str) {
        let start = Instant::now();
        let out = self.machine.run(&["status"]);
        let took = start.elapsed();
        assert!(out.status.success(), "{attack}: {}", String::from_utf8_lossy(&out.stderr));
        let (rss, open) = (self.rss(), self.descriptors());
        let grown = rss.saturating_sub(self.rss_before);
        println!(
            "{attack}: status in {} ms, memory {} -> {rss} KiB, {open} descriptors",
            took.as_millis(),
            self.rss_before
        );
        assert!(took < DEADLINE, "{attack}: {took:?}");
        assert!(grown < GROWTH_KIB, "{attack}: {grown} KiB");
        assert!(open < DESCRIPTORS, "{attack}: {open} descriptors");
    }

    /// Everything that a refused request must leave as it was: the tree's files and the owners' sets.
    fn facts(&self) -> (BTreeMap<PathBuf, String>, Vec<String>) {
        let (code, list) = self.machine.json(&["list"]);
        assert!(code == 0 || code == 3, "{list}");
        let owners = list["owners"].as_array().unwrap();
        let sets = owners.iter().map(|o| format!("{} {} {}", o["owner"], o["cpus"], o["cgroup"])).collect();
        (files(&self.machine.path("cgroup")), sets)
    }

    fn unharmed(&self, before: &(BTreeMap<PathBuf, String>, Vec<String>)) {
        assert_eq!(&self.facts(), before);
        let out = self.machine.run(&["checkpoint", "verify"]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
}

fn files(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files(&entry.path()));
        } else if kind.is_file() {
            found.insert(entry.path(), fs::read_to_string(entry.path()).unwrap());
        }
    }
    found
}

/// This thread alone is that user from now on.
#[allow(unsafe_code, reason = "setresuid(2) of one thread has no wrapper: that of libc changes all threads")]
fn become_user(uid: u32) {
    let none = std::ptr::null::<u32>();
    // SAFETY: a list of no groups is not read, and the other calls take numbers.
    let done = unsafe {
        [
            nix::libc::syscall(nix::libc::SYS_setgroups, 0, none),
            nix::libc::syscall(nix::libc::SYS_setresgid, uid, uid, uid),
            nix::libc::syscall(nix::libc::SYS_setresuid, uid, uid, uid),
        ]
    };
    assert_eq!(done, [0; 3], "becoming user {uid}: {}", std::io::Error::last_os_error());
}

/// Runs as another user.
fn stranger<T: Send + 'static>(uid: u32, run: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = thread::spawn(move || {
        become_user(uid);
        run()
    });
    thread.join().unwrap()
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

/// Sends it, and reads the status of the answer; 0 when the agent hung up without one.
fn raw(socket: &Path, bytes: &[u8]) -> u16 {
    raw_answer(socket, bytes).0
}

fn raw_answer(socket: &Path, bytes: &[u8]) -> (u16, String) {
    let mut stream = connect(socket);
    drop(stream.write_all(bytes)); // it may hang up before all is sent
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer));
    let text = String::from_utf8_lossy(&answer).into_owned();
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|t| t.get(..3)?.parse().ok()).unwrap_or(0);
    (status, text)
}

fn request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("{method} {path} HTTP/1.1\r\nhost: truepin\r\ncontent-length: {}\r\n\r\n", body.len())
            .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn count(statuses: impl IntoIterator<Item = u16>) -> BTreeMap<u16, usize> {
    let mut counts = BTreeMap::new();
    for status in statuses {
        *counts.entry(status).or_default() += 1;
    }
    counts
}

#[test]
fn who_has_no_rights_reads_at_most() {
    if !is_root("who_has_no_rights_reads_at_most") {
        return;
    }
    let siege = Siege::new();
    let before = siege.facts();
    let socket = siege.socket();
    let admission = json!({"owner": "run/evil", "cpus": 1}).to_string();
    let mut requests = Vec::new();
    for (method, path) in [
        ("POST", "/v1/owners"),
        ("DELETE", "/v1/owners"),
        ("DELETE", "/v1/owners/unit/db.service"),
        ("POST", "/v1/pods"),
        ("DELETE", "/v1/pods/x"),
        ("POST", "/v1/containers"),
        ("POST", "/v1/sources"),
        ("POST", "/v1/adoptions"),
        ("PUT", "/v1/owners"),
        ("PATCH", "/v1/status"),
    ] {
        for body in [admission.as_bytes(), b"", b"{"] {
            requests.push(request(method, path, body));
        }
    }
    let (refused, read) = stranger(65534, move || {
        let refused = count(requests.iter().map(|r| raw(&socket, r)));
        (refused, count(["/v1/status", "/v1/owners"].map(|p| raw(&socket, &request("GET", p, b"")))))
    });
    println!("writes of a stranger: {refused:?}; reads: {read:?}");
    assert_eq!(refused, BTreeMap::from([(403, 30)]));
    assert_eq!(read, BTreeMap::from([(200, 2)]));
    siege.unharmed(&before);
    // As the agent makes it, nobody but root and the group connects at all.
    fs::set_permissions(siege.socket(), fs::Permissions::from_mode(0o660)).unwrap();
    let socket = siege.socket();
    let error = stranger(65534, move || UnixStream::connect(socket).unwrap_err().kind());
    assert_eq!(error, std::io::ErrorKind::PermissionDenied);
    siege.stands("strangers' writes");
}

#[test]
fn malformed_and_huge() {
    if !is_root("malformed_and_huge") {
        return;
    }
    let siege = Siege::new();
    let before = siege.facts();
    let socket = siege.socket();
    let long = "a".repeat(1 << 20);
    let mut bad: Vec<Vec<u8>> = [
        "\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET /v1/status HTTP/1.1\nhost truepin\n\n",
        "\0\0\0\0\0\0\0\0\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "POST /v1/owners HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/owners HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        "POST /v1/owners HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        "POST /v1/owners HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "POST /v1/owners HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        "GET /v1/owners/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /v1/owners/run/%ff%fe HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /v1/findings/99999999999999999999999999 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /v1/verdicts?for_ms=18446744073709551615 HTTP/1.1\r\nhost: x\r\n\r\n",
    ]
    .into_iter()
    .map(|t| t.as_bytes().to_vec())
    .collect();
    bad.push(format!("GET /{long} HTTP/1.1\r\nhost: x\r\n\r\n").into_bytes());
    bad.push(format!("GET / HTTP/1.1\r\nx: {long}\r\n\r\n").into_bytes());
    bad.push(format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(200)).into_bytes());
    bad.push(request("POST", "/v1/owners", &vec![b'['; 200_000]));
    bad.push(request("POST", "/v1/owners", format!("{{\"owner\":\"run/{long}\",\"cpus\":1}}").as_bytes()));
    bad.push(request("POST", "/v1/owners", b"{\"owner\":\"run/x\",\"cpus\":4294967296}"));
    bad.push(request("POST", "/v1/owners", b"{\"owner\":\"run/\xff\",\"cpus\":1}"));
    bad.push(
        [&b"POST /v1/owners HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"[..]]
            .into_iter()
            .chain((0..40).map(|_| &b"10000\r\n"[..]))
            .flat_map(|part| {
                let mut part = part.to_vec();
                if part.starts_with(b"10000") {
                    part.extend(vec![b' '; 0x10000]);
                    part.extend(b"\r\n");
                }
                part
            })
            .collect(),
    );
    // Random bytes with a request's beginning, from a fixed seed.
    let mut seed = 0x9e37_79b9_u32;
    for _ in 0..200 {
        let mut bytes = b"POST /v1/owners HTTP/1.1\r\n".to_vec();
        for _ in 0..200 {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
            bytes.push(seed.to_le_bytes()[0]);
        }
        bytes.extend(b"\r\n\r\n");
        bad.push(bytes);
    }
    let got = count(bad.iter().map(|b| raw(&socket, b)));
    println!("{} malformed requests of root's: {got:?} (0: hung up)", bad.len());
    assert!(got.keys().all(|status| *status == 0 || (400..600).contains(status)), "{got:?}");
    siege.stands("malformed");
    siege.unharmed(&before);
}

#[test]
fn slow_senders_floods_and_readers_that_do_not_read() {
    if !is_root("slow_senders_floods_and_readers_that_do_not_read") {
        return;
    }
    let siege = Siege::new();
    let before = siege.facts();
    let socket = siege.socket();
    let descriptors = siege.descriptors();
    let over = Arc::new(AtomicBool::new(false));
    // Four users with a byte a second, half a head for ever, and questions whose answers nobody reads; root with heads and
    // bodies that do not come.
    let attackers: Vec<_> = [(60001, 40), (60002, 40), (60003, 40), (60004, 40), (0, 60)]
        .into_iter()
        .map(|(uid, connections)| {
            let (socket, over) = (socket.clone(), over.clone());
            thread::spawn(move || {
                if uid != 0 {
                    become_user(uid);
                }
                let (mut opened, mut sent) = (0, 0);
                let mut held: Vec<UnixStream> = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    held.truncate(connections);
                    while held.len() < connections {
                        let mut stream = connect(&socket);
                        let first: &[u8] = match opened % 4 {
                            0 => b"G",
                            1 => b"GET /v1/topology HTTP/1.1\r\nhost: x\r\n\r\n",
                            2 => b"POST /v1/owners HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
                            _ => b"GET /v1/verdicts?for_ms=3600000 HTTP/1.1\r\nhost: x\r\n\r\n",
                        };
                        drop(stream.write_all(first));
                        opened += 1;
                        held.push(stream);
                    }
                    thread::sleep(Duration::from_secs(1));
                    held.retain_mut(|s| s.write_all(b"E").is_ok());
                    sent += held.len();
                }
                (uid, opened, sent)
            })
        })
        .collect();
    for n in 0..8 {
        siege.stands(&format!("slow and mute, look {n}"));
        thread::sleep(Duration::from_secs(1));
    }
    // 4,000 connections that say nothing, 400 at a time, by users of all sorts.
    let mut turned_away = 0;
    for wave in 0..10 {
        let flood: Vec<_> = (0..10)
            .map(|n| {
                let socket = socket.clone();
                thread::spawn(move || {
                    become_user(61000 + wave * 10 + n);
                    let held: Vec<UnixStream> = (0..40).map(|_| connect(&socket)).collect();
                    thread::sleep(Duration::from_millis(300));
                    let closed = |s: &UnixStream| {
                        s.set_nonblocking(true).unwrap();
                        let mut answer = [0; 12];
                        (&mut &*s).read(&mut answer).is_ok_and(|n| answer[..n] == *b"HTTP/1.1 429")
                    };
                    held.iter().filter(|s| closed(s)).count()
                })
            })
            .collect();
        siege.stands(&format!("flood, wave {wave}"));
        turned_away += flood.into_iter().map(|t| t.join().unwrap()).sum::<usize>();
    }
    println!("4000 connections of 100 users: {turned_away} turned away with 429");
    assert!(turned_away >= 4000 - 10 * 64, "{turned_away}");
    over.store(true, Ordering::Relaxed);
    for attacker in attackers {
        let (uid, opened, sent) = attacker.join().unwrap();
        println!("user {uid}: {opened} connections, {sent} bytes one at a time");
    }
    siege.stands("afterwards");
    siege.unharmed(&before);
    machine::wait("every seat to be free again", || siege.descriptors() <= descriptors);
}

#[test]
fn forged_pids() {
    if !is_root("forged_pids") {
        return;
    }
    let siege = Siege::new();
    let before = siege.facts();
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
    // In a cgroup that is there: on a copied tree a new one gets no files.
    let admit = |pid: u32| {
        let body = json!({"owner": "run/x", "cpus": 1, "cgroup": "system.slice/web", "pid": pid}).to_string();
        raw_answer(&siege.socket(), &request("POST", "/v1/owners", body.as_bytes()))
    };
    let gone = {
        let mut gone = Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        gone.id()
    };
    let forged = [1, 2, siege.agent.0.id(), gone, 0, u32::MAX];
    for pid in forged {
        let (status, text) = admit(pid);
        assert_eq!(status, 422, "{pid}: {text}");
    }
    println!("{} forged pids: all 422", forged.len());
    siege.unharmed(&before);
    let (status, text) = admit(child.id());
    assert_eq!(status, 200, "a child of the caller: {text}");
    assert_eq!(siege.machine.file("system.slice/web", "cgroup.procs"), child.id().to_string());
    child.kill().unwrap();
    child.wait().unwrap();
    siege.stands("forged pids");
}

#[test]
fn forged_paths() {
    if !is_root("forged_paths") {
        return;
    }
    let siege = Siege::new();
    let outside = siege.machine.path("outside");
    let db = siege.machine.path("cgroup/system.slice/db");
    fs::create_dir(&outside).unwrap();
    for file in fs::read_dir(&db).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), outside.join(file.file_name())).unwrap();
    }
    std::os::unix::fs::symlink(&outside, siege.machine.path("cgroup/system.slice/link")).unwrap();
    std::os::unix::fs::symlink(siege.machine.path(""), siege.machine.path("cgroup/up")).unwrap();
    let before = (siege.facts(), files(&outside));
    let paths: Vec<Value> = [
        "../outside",
        "/..",
        "system.slice/../../outside",
        "system.slice/./db",
        "system.slice//db",
        "system.slice/db\nx",
        "system.slice/db\0",
        "/",
        "",
        "truepin.slice",
        "truepin.slice/run-y",
        "system.slice",
        "system.slice/db/below",
        "system.slice/db",
        "system.slice/link",
        "up/outside",
        "nowhere",
    ]
    .into_iter()
    .map(Value::from)
    .chain([json!("a/".repeat(40)), json!("x".repeat(300)), json!(7), json!(["a"])])
    .collect();
    let mut got = Vec::new();
    for path in &paths {
        let body = json!({"owner": "run/y", "cpus": 1, "cgroup": path}).to_string();
        let (status, text) = raw_answer(&siege.socket(), &request("POST", "/v1/owners", body.as_bytes()));
        assert!((400..500).contains(&status), "{path}: {text}");
        got.push(status);
    }
    println!("{} forged paths: {:?}", paths.len(), count(got));
    assert_eq!((siege.facts(), files(&outside)), before);
    siege.unharmed(&before.0);
    siege.stands("forged paths");
}

#[test]
fn a_hundred_at_once() {
    if !is_root("a_hundred_at_once") {
        return;
    }
    let siege = Siege::new();
    let before = siege.facts();
    let clients: Vec<_> = (0..100)
        .map(|n| {
            let socket = siege.socket();
            thread::spawn(move || {
                let body = json!({"owner": "run/z", "cpus": 2, "cgroup": "system.slice/web"}).to_string();
                let assign = request("POST", "/v1/owners", body.as_bytes());
                let release = request("DELETE", "/v1/owners/run/z", b"");
                let turns: Vec<u16> = (0..10)
                    .map(|i| raw(&socket, if (n + i) % 2 == 0 { &assign } else { &release }))
                    .collect();
                turns
            })
        })
        .collect();
    let got = count(clients.into_iter().flat_map(|c| c.join().unwrap()));
    println!("1000 assignments and releases of one owner by 100 clients: {got:?}");
    assert_eq!(got.get(&200), Some(&1000), "{got:?}");
    // The cgroup goes and comes between the look and the write.
    let web = siege.machine.path("cgroup/system.slice/web");
    let copy = siege.machine.path("copy");
    let over = Arc::new(AtomicBool::new(false));
    raw(&siege.socket(), &request("DELETE", "/v1/owners/run/z", b""));
    let swapper = {
        let (over, web, copy) = (over.clone(), web.clone(), copy.clone());
        thread::spawn(move || {
            let mut swaps = 0;
            while !over.load(Ordering::Relaxed) {
                fs::create_dir(&copy).unwrap();
                for file in fs::read_dir(&web).unwrap().map(Result::unwrap) {
                    fs::copy(file.path(), copy.join(file.file_name())).unwrap();
                }
                let old = web.with_extension("old");
                fs::rename(&web, &old).unwrap();
                fs::rename(&copy, &web).unwrap();
                fs::remove_dir_all(&old).unwrap();
                swaps += 1;
                thread::sleep(Duration::from_millis(5));
            }
            swaps
        })
    };
    let body = json!({"owner": "run/z", "cpus": 2, "cgroup": "system.slice/web"}).to_string();
    let mut got = Vec::new();
    for _ in 0..50 {
        got.push(raw(&siege.socket(), &request("POST", "/v1/owners", body.as_bytes())));
        got.push(raw(&siege.socket(), &request("DELETE", "/v1/owners/run/z", b"")));
    }
    over.store(true, Ordering::Relaxed);
    let swaps = swapper.join().unwrap();
    println!("100 calls while the cgroup was made anew {swaps} times: {:?}", count(got.iter().copied()));
    assert!(got.iter().all(|s| *s != 0), "an answer to each");
    let release = request("DELETE", "/v1/owners/run/z", b"");
    machine::wait("the release", || raw(&siege.socket(), &release) == 200);
    machine::wait("the table of before", || siege.facts().1 == before.1);
    siege.stands("a hundred at once");
    let out = siege.machine.run(&["checkpoint", "verify"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
