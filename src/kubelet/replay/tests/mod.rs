//! Histories on small machines: the means to write them down.

mod pod_level;
mod random;
mod rules;

use super::*;
use crate::{
    CpuId, CpuSet, NodeId,
    kubelet::StartError,
    placement::kubelet::{KubeletCounts, Label, Labels, StaticOptions},
    request::AlignmentPolicy,
};

/// Nodes of cores of two threads each, numbered as Linux does: all first threads, then all second ones; `per_socket`
/// nodes to a socket.
fn machine(nodes: u32, cores: u32, per_socket: u32) -> KubeletMachine {
    let all = nodes * cores;
    let label = |cpu: u32| {
        let core = cpu % all;
        let node = core / cores;
        Label {
            cpu: CpuId(cpu),
            core: core.into(),
            socket: (node / per_socket).into(),
            node: NodeId(node),
            uncore: node.into(),
        }
    };
    let labels = Labels::new((0..2 * all).map(label).collect());
    let counts: KubeletCounts = labels.counts();
    KubeletMachine::labelled(&labels, counts)
}

fn far() -> Distances {
    Distances::new([])
}

fn options(names: &[&str]) -> StaticOptions {
    StaticOptions::parse(names.iter().copied()).unwrap()
}

fn config() -> Config {
    Config::new(Reservation::Cpus(cpus("0")))
}

fn under(policy: AlignmentPolicy, scope: Scope) -> Config {
    Config { policy, scope, ..config() }
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// `i:` an init container, `s:` a sidecar, else an app; then its CPUs, where `-` is none and `~N` a request below its limit.
/// `/N` is the pod's own number of CPUs.
fn pod(uid: &str, words: &str) -> Pod {
    let mut pod = Pod { uid: uid.into(), init: Vec::new(), app: Vec::new(), pod_cpu: None };
    for word in words.split_whitespace() {
        if let Some(n) = word.strip_prefix('/') {
            pod.pod_cpu = Some(n.parse::<u64>().unwrap() * 1000);
            continue;
        }
        let (init, rest) = word.split_at(if word.contains(':') { 2 } else { 0 });
        let list = if init.is_empty() { &mut pod.app } else { &mut pod.init };
        let name = format!("{}{}", if init.is_empty() { 'c' } else { 'i' }, list.len());
        let (request, limit) = match rest.strip_prefix('~') {
            Some(n) => (n.parse().ok(), n.parse::<u64>().ok().map(|n| n * 1000 + 500)),
            None => (rest.parse::<u64>().ok(), rest.parse::<u64>().ok().map(|n| n * 1000)),
        };
        let memory = request.map(|_| 64);
        list.push(crate::pod::Container {
            name,
            cpu_request: request.map(|n: u64| n * 1000),
            cpu_limit: limit,
            memory_request: memory,
            memory_limit: memory,
            sidecar: init == "s:",
        });
    }
    pod
}

fn boot<'m>(machine: &'m KubeletMachine, distances: &'m Distances, config: Config) -> KubeletNode<'m> {
    KubeletNode::boot(machine, distances, config, None).unwrap()
}

/// `uid/name=list` of every entry, then `uid=list` of every pod's set.
fn held(node: &KubeletNode<'_>) -> String {
    let sets = node.sets();
    let entries = sets.entries.iter();
    let entries = entries.flat_map(|(pod, all)| all.iter().map(move |(name, c)| format!("{pod}/{name}={c}")));
    let pods = sets.pods.iter().map(|(pod, c)| format!("{pod}={c}"));
    entries.chain(pods).collect::<Vec<_>>().join(" ")
}

fn reason(admission: &Admission) -> &'static str {
    admission.outcome.as_ref().err().map_or("admitted", Rejection::reason)
}

fn let_in(node: &mut KubeletNode<'_>, uid: &str, words: &str) {
    let admission = node.admit(pod(uid, words));
    assert_eq!(admission.outcome, Ok(()), "{uid}: {words}");
}

fn ids(from: usize) -> impl FnMut() -> String {
    let mut n = from;
    move || {
        n += 1;
        format!("k{n}")
    }
}

fn names(list: &[Named]) -> Vec<String> {
    list.iter().map(|n| format!("{}/{}/{}", n.pod, n.container, n.id)).collect()
}

fn noted(admission: &Admission) -> String {
    let one = |(name, hint): &(String, TopologyHint)| {
        let nodes = hint.affinity.as_ref().map_or("any".into(), ToString::to_string);
        format!("{name}={nodes}{}", if hint.preferred { '+' } else { '-' })
    };
    admission.hints.iter().map(one).collect::<Vec<_>>().join(" ")
}
