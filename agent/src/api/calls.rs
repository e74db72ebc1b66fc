//! Questions and answers as data, and how an engine answers them.

use super::{
    documents::{
        AdoptedDoc, BrokenDoc, FindingDoc, FindingsDoc, NotedDoc, OwnerDoc, OwnersDoc, PodDoc, ProblemDoc,
        ReleasedDoc, SetDoc, VerdictDoc, VerdictsDoc,
    },
    plan,
    status::status,
};
use crate::{engine::Engine, procfs, store::chain, sysfs};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, sync::Arc};
use truepin::{
    CgroupPath, CpuSet, NodeSet, Owner,
    assignments::Assignment,
    containers::ContainerId,
    pod::Pod,
    reconcile::{AdmitError, Answer, Event, Home},
    request::{AlignmentPolicy, Isolation, Request},
    stale::SourceReport,
    topology::render,
    verdict::{Evidence, Judgement, Verdict},
};

/// A request for CPUs, as in `POST /v1/owners`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// Who.
    pub owner: Owner,
    /// How many CPUs.
    pub cpus: u32,
    /// How near; the configured policy by default.
    #[serde(default)]
    pub numa: Option<AlignmentPolicy>,
    /// Only whole cores.
    #[serde(default)]
    pub whole_cores: bool,
    /// A device to be near: PCI address, network interface or block device.
    #[serde(default)]
    pub near: Option<String>,
    /// Bytes of memory that are to be on the nodes of the CPUs.
    #[serde(default)]
    pub memory: u64,
    /// How exclusivity is to be had; the configured way by default.
    #[serde(default)]
    pub isolation: Isolation,
    /// An existing cgroup; else truepin makes one.
    #[serde(default)]
    pub cgroup: Option<CgroupPath>,
    /// A process to put there: the caller, or one that descends from it.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Who asks, by the kernel's word and in the agent's pid namespace; `None` for the agent's own process.
    #[serde(skip)]
    pub caller: Option<u32>,
}

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// `GET /v1/status`
    Status,
    /// `GET /v1/topology`
    Topology,
    /// `GET /v1/owners`
    Owners,
    /// `GET /v1/owners/{owner}`
    Owner(Owner),
    /// `GET /v1/verdicts[?owner=…][&for_ms=…]`
    Verdicts {
        /// Of one only.
        owner: Option<Owner>,
        /// Over the next so many milliseconds, instead of since the assignment.
        for_ms: Option<u64>,
    },
    /// `GET /v1/findings`
    Findings,
    /// `GET /v1/findings/{id}`
    Finding(u64),
    /// `POST /v1/owners`
    Admit(Box<Admission>),
    /// `DELETE /v1/owners[/{owner}]`
    Release(Option<Owner>),
    /// `POST /v1/pods`
    AdmitPod(Box<Pod>),
    /// `DELETE /v1/pods/{uid}`
    RemovePod(String),
    /// `POST /v1/containers`
    ContainerCreated(Box<ContainerCreated>),
    /// `POST /v1/sources`
    Source(Box<SourceReport>),
    /// `POST /v1/adoptions`
    Adopt(Box<Adoption>),
    /// Only what an [`Call::Admit`] or a [`Call::Release`] would do: `?dry_run=true`
    Plan(Box<Call>),
}

/// Sets that another manager has given out, as in `POST /v1/adoptions`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adoption {
    /// By owner; disjoint.
    pub owners: Vec<SetDoc>,
}

/// A container that a runtime made, as in `POST /v1/containers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerCreated {
    /// Its id.
    pub id: ContainerId,
    /// Its pod.
    pub pod_uid: String,
    /// Its name.
    pub name: String,
}

impl Call {
    /// Whether it may change anything, or shows what of that would be done: root's alone.
    #[must_use]
    pub fn writes(&self) -> bool {
        matches!(
            self,
            Self::Admit(_)
                | Self::Release(_)
                | Self::AdmitPod(_)
                | Self::RemovePod(_)
                | Self::ContainerCreated(_)
                | Self::Source(_)
                | Self::Adopt(_)
                | Self::Plan(_)
        )
    }
}

/// A document, or a problem.
pub type Outcome = Result<Value, Box<ProblemDoc>>;

/// A problem document.
#[must_use]
pub fn problem(status: u16, title: &str, detail: String, hint: Option<&str>) -> Box<ProblemDoc> {
    Box::new(ProblemDoc {
        kind: "about:blank".into(),
        title: title.into(),
        status,
        detail,
        hint: hint.map(Into::into),
        refusal: None,
    })
}

pub(super) fn json(document: &impl Serialize) -> Outcome {
    serde_json::to_value(document)
        .map_err(|e| problem(500, "internal", format!("encoding the answer: {e}"), None))
}

/// What the agent knows beside the engine.
#[derive(Debug)]
pub struct About {
    /// Numa policy for requests that do not say.
    pub numa: AlignmentPolicy,
    /// Where sysfs is.
    pub sysfs: std::path::PathBuf,
    /// When the agent started, `CLOCK_MONOTONIC`.
    pub started_ns: u64,
    /// Declared owners that hold no CPUs.
    pub unmet: Vec<Unmet>,
}

/// A declared owner that holds no CPUs.
#[derive(Debug, Clone)]
pub struct Unmet {
    /// Who.
    pub owner: Owner,
    /// Its cgroup, where that is known.
    pub path: Option<CgroupPath>,
    /// The CPUs that configuration names, if it does.
    pub cpus: CpuSet,
    /// Why.
    pub why: String,
}

/// Answers everything but a verdict over a future window, which takes two looks: see [`base`] and [`verdicts`].
pub fn answer(engine: &mut Engine, about: &About, call: Call) -> Outcome {
    match call {
        Call::Status => json(&status(engine, about)),
        Call::Topology => json(&render::document(&engine.state.topology)),
        Call::Owners => json(&owners(engine, about)?),
        Call::Owner(owner) => {
            let found = owners(engine, about)?.owners.into_iter().find(|o| o.owner == owner);
            found.map_or_else(|| Err(unknown(&owner)), |o| json(&o))
        }
        Call::Verdicts { owner, .. } => verdicts(engine, about, owner.as_ref(), None),
        Call::Findings => {
            let findings = engine.state.findings().map(FindingDoc::from).collect();
            json(&FindingsDoc { schema: "truepin.findings/1".into(), findings })
        }
        Call::Finding(id) => match engine.state.findings().find(|f| f.id == id) {
            Some(f) => json(&FindingDoc::from(f)),
            None => Err(problem(
                404,
                "unknown",
                format!("there is no finding {id} (the newest 256 are kept)"),
                None,
            )),
        },
        Call::Admit(admission) => admit(engine, about, &admission),
        Call::Release(owner) => release(engine, owner),
        Call::AdmitPod(pod) => {
            let mut outcomes = admit_pods(engine, about, vec![*pod]);
            let lost = || Err(problem(500, "internal", "the pod got no answer".into(), None));
            outcomes.pop().unwrap_or_else(lost)
        }
        Call::RemovePod(uid) => removed(engine, uid),
        Call::ContainerCreated(c) => container_created(engine, *c),
        Call::Adopt(adoption) => {
            let owners = adoption.owners.into_iter().map(|o| (o.owner, o.cpus)).collect();
            match engine.ask(|ticket| Event::Adopt { ticket, owners }) {
                Answer::Pod(sets) => {
                    let owners = sets.into_iter().map(|(owner, cpus)| SetDoc { owner, cpus }).collect();
                    json(&AdoptedDoc { schema: "truepin.adopted/1".into(), owners })
                }
                Answer::Refused(error) => Err(refused(&error)),
                other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
            }
        }
        Call::Plan(call) => plan::plan(engine, about, *call),
        Call::Source(report) => {
            let what = format!("source {}", report.source);
            match engine.ask(|ticket| Event::Source { ticket, report: *report }) {
                Answer::Noted => json(&NotedDoc {
                    schema: "truepin.noted/1".into(),
                    what,
                    cpus: None,
                    position: engine.state.position(),
                }),
                Answer::Failed(what) => Err(problem(422, "usage", what, None)),
                other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
            }
        }
    }
}

/// Pods that came together: one save for all of them. The outcomes are in their order.
pub fn admit_pods(engine: &mut Engine, about: &About, pods: Vec<Pod>) -> Vec<Outcome> {
    let isolation = engine.state.settings.isolation;
    let mut outcomes: Vec<Option<Outcome>> = Vec::new();
    let mut asked = Vec::new();
    for pod in pods {
        let checked = pod.checked().and_then(|pod| Ok((pod.requests(about.numa, isolation)?, pod.uid)));
        match checked {
            Ok((requests, uid)) => {
                asked.push((outcomes.len(), uid, requests));
                outcomes.push(None);
            }
            Err(error) => outcomes.push(Some(Err(problem(422, "usage", chain(&error), None)))),
        }
    }
    let questions = asked.iter().map(|(_, uid, requests)| (uid.clone(), requests.clone())).collect();
    for ((at, uid, _), answer) in asked.into_iter().zip(engine.ask_pods(questions)) {
        outcomes[at] = Some(match answer {
            Answer::Pod(sets) => {
                let owners = sets.into_iter().map(|(owner, cpus)| SetDoc { owner, cpus }).collect();
                json(&PodDoc {
                    schema: "truepin.pod/1".into(),
                    uid,
                    owners,
                    position: engine.state.position(),
                })
            }
            Answer::Refused(error) => Err(refused(&error)),
            other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
        });
    }
    outcomes.into_iter().flatten().collect()
}

fn container_created(engine: &mut Engine, c: ContainerCreated) -> Outcome {
    let owner: Owner = format!("pod/{}/{}", c.pod_uid, c.name)
        .parse()
        .map_err(|e: truepin::owner::OwnerError| problem(422, "usage", e.to_string(), None))?;
    let home = engine.home_of(&c.id).map_err(|e| problem(503, "failed", e, None))?;
    let asked = owner.clone();
    match engine.ask(|ticket| Event::Container { ticket, id: c.id, owner, home }) {
        Answer::Noted | Answer::Assigned(..) => {
            let cpus = engine.state.assignments.cpus_of(&asked).cloned();
            json(&NotedDoc {
                schema: "truepin.noted/1".into(),
                what: asked.to_string(),
                cpus,
                position: engine.state.position(),
            })
        }
        Answer::Refused(error) => Err(refused(&error)),
        Answer::Failed(what) => Err(problem(503, "failed", what, None)),
        other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
}

fn removed(engine: &mut Engine, uid: String) -> Outcome {
    match engine.ask(|ticket| Event::RemovePod { ticket, uid }) {
        Answer::Released(released) => {
            let verdicts =
                released.iter().filter_map(|(_, v)| v.as_ref()).map(|v| verdict_doc(engine, v)).collect();
            let owners = released.into_iter().map(|(o, _)| o).collect();
            json(&ReleasedDoc { schema: "truepin.released/1".into(), owners, verdicts })
        }
        Answer::Failed(what) => Err(problem(503, "failed", what, None)),
        Answer::Refused(error) => Err(refused(&error)),
        other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
}

fn unknown(owner: &Owner) -> Box<ProblemDoc> {
    problem(404, "unknown", format!("{owner} holds no CPUs"), Some("`truepin list` shows who does"))
}

/// A look at everything now: the start of a window.
pub fn base(engine: &mut Engine) -> Result<Arc<Evidence>, Box<ProblemDoc>> {
    match engine.ask(|ticket| Event::Inspect { ticket }) {
        Answer::Inspected(evidence) => Ok(evidence),
        Answer::Failed(what) => Err(problem(503, "no-evidence", what, None)),
        other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
}

/// Verdicts since `from`, or since each assignment.
pub fn verdicts(
    engine: &mut Engine,
    about: &About,
    owner: Option<&Owner>,
    from: Option<&Evidence>,
) -> Outcome {
    let now = base(engine)?;
    let unmet = || about.unmet.iter();
    let owners: Vec<Owner> = match owner {
        Some(o) => vec![o.clone()],
        None => engine.state.assignments.owners.keys().chain(unmet().map(|u| &u.owner)).cloned().collect(),
    };
    let mut documents = Vec::new();
    for owner in &owners {
        let held = engine.state.assignments.owners.contains_key(owner);
        // One that is declared and not there is no success.
        let missing = unmet().find(|u| u.owner == *owner && !held).map(|u| {
            let why = format!("declared in the configuration and not assigned: {}", u.why);
            Verdict::untold(owner, &u.cpus, engine.state.settings.mode(), now.at, why)
        });
        match missing.or_else(|| engine.state.verdict(owner, from, &now)) {
            Some(v) => documents.push(verdict_doc(engine, &v)),
            None => return Err(unknown(owner)),
        }
    }
    json(&VerdictsDoc { schema: "truepin.verdicts/1".into(), verdicts: documents })
}

fn verdict_doc(engine: &Engine, v: &Verdict) -> VerdictDoc {
    VerdictDoc::new(v, |id| {
        if let Some(path) = engine.state.path_of(id) {
            return Some(path.to_string());
        }
        // Outside what is watched: as a rule the intruder still lives, and its process tells.
        let intruder = v.intruders.iter().find(|i| i.cgroup == id)?;
        procfs::who(intruder.tgid).1.map(|p| p.to_string())
    })
}

fn owners(engine: &mut Engine, about: &About) -> Result<OwnersDoc, Box<ProblemDoc>> {
    let now = base(engine)?;
    let state = &engine.state;
    let broken = state.broken_partitions();
    let one = |(owner, a): (&Owner, &Assignment)| {
        let verdict = state.verdict(owner, None, &now);
        let document = OwnerDoc::new(owner, a, state.nodes_of(&a.cpus), verdict.as_ref());
        let broken = broken.iter().find(|(o, _, _)| o == owner);
        let broken = broken.map(|(_, s, e)| BrokenDoc { state: s.to_string(), explanation: e.into() });
        OwnerDoc { broken, ..document }
    };
    let mut owners: Vec<OwnerDoc> = state.assignments.owners.iter().map(one).collect();
    let promised = state.assignments.promised.iter();
    owners.extend(promised.map(|(o, p)| OwnerDoc::promised(o, p, state.nodes_of(&p.cpus))));
    for o in &mut owners {
        let held = state.assignments.owners.get(&o.owner);
        let mode = held.map_or(o.mode, |a| state.in_force(a));
        if mode != o.mode {
            o.mode = mode;
            o.warnings.push(
                "no partition at present: an owner beside it has no CPU left, and would run on this one's"
                    .into(),
            );
        }
        o.degraded = state.degraded(&o.owner).map(ToString::to_string);
    }
    owners.extend(about.unmet.iter().map(|u| OwnerDoc {
        schema: "truepin.owner/1".into(),
        owner: u.owner.clone(),
        cpus: CpuSet::new(),
        nodes: NodeSet::new(),
        cgroup: u.path.as_ref().map(ToString::to_string).unwrap_or_default(),
        mode: state.settings.mode(),
        isolation: state.settings.isolation,
        created: false,
        reason: "declared in the configuration".into(),
        memory: BTreeMap::new(),
        verdict: Some(Judgement::Inconclusive),
        verdict_reason: Some(format!("declared, not assigned: {}", u.why)),
        broken: None,
        warnings: Vec::new(),
        degraded: None,
    }));
    owners.sort_by(|a, b| a.owner.cmp(&b.owner));
    Ok(OwnersDoc { schema: "truepin.owners/1".into(), owners })
}

/// What an admission asks of the table, and where.
pub(super) fn request(
    engine: &Engine,
    about: &About,
    a: &Admission,
) -> Result<(Request, Home), Box<ProblemDoc>> {
    let near = match &a.near {
        Some(device) => {
            let found = sysfs::device(&about.sysfs, &engine.state.topology, device);
            found.map_err(|e| problem(422, "usage", chain(&e), None))?.nodes
        }
        None => NodeSet::new(),
    };
    let request = Request {
        owner: a.owner.clone(),
        cpus: a.cpus,
        numa: a.numa.unwrap_or(about.numa),
        whole_cores: a.whole_cores,
        near,
        isolation: a.isolation,
        memory: a.memory,
    };
    let home = match (a.cgroup.clone(), a.pid) {
        (Some(path), _) => Home::Existing(path),
        // A scope cannot be without a process.
        (None, Some(_)) if engine.kernel.systemd.is_some() => Home::Scope,
        (None, _) => Home::New,
    };
    Ok((request, home))
}

fn admit(engine: &mut Engine, about: &About, a: &Admission) -> Outcome {
    let (request, home) = request(engine, about, a)?;
    let pid = a.pid;
    if let Some(pid) = pid {
        // In another pid namespace the same number is another process, which nobody asked to move.
        // Who starts an agent has it among its descendants, and an agent is nobody's to pin.
        let mine = a.caller.is_none_or(|c| procfs::descends(pid, c) && pid != std::process::id());
        let Some(started) = procfs::started(pid).filter(|_| mine) else {
            let caller = a.caller.unwrap_or_default();
            let what = format!("pid {pid} is no process of the caller's, which is pid {caller}");
            let hint = Some("only the caller itself or what it started can be put into a cgroup");
            return Err(problem(422, "usage", what, hint));
        };
        engine.kernel.means(pid, started);
    }
    let event = |ticket| Event::Admit { ticket, request, exactly: None, home, pid };
    let answer = engine.ask(event);
    if let Some(pid) = pid {
        engine.kernel.meant(pid);
    }
    match answer {
        Answer::Assigned(owner, assignment) => {
            let nodes = engine.state.nodes_of(&assignment.cpus);
            json(&OwnerDoc::new(&owner, &assignment, nodes, None))
        }
        Answer::Refused(error) => Err(refused(&error)),
        Answer::Failed(what) => Err(problem(503, "failed", what, None)),
        other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
}

pub(super) fn refused(error: &AdmitError) -> Box<ProblemDoc> {
    let (status, title, hint) = match error {
        AdmitError::Audit => (409, "audit", Some("start the agent with --mode enforce to assign CPUs")),
        AdmitError::Placement(_) | AdmitError::Problem(_) => (409, "refused", None),
        AdmitError::InUse { .. } => {
            (409, "refused", Some("`truepin list` shows who holds what; `run --name` names a command"))
        }
        AdmitError::Reserve(_) => (409, "refused", Some("`truepin list` shows who holds what")),
        AdmitError::Path(_)
        | AdmitError::TooDeep { .. }
        | AdmitError::OwnSlice { .. }
        | AdmitError::NoSuchCpus { .. } => (422, "usage", None),
        AdmitError::NoPartitions | AdmitError::OnlyOwn { .. } | AdmitError::PartitionRefused { .. } => {
            (409, "refused", Some("use --isolation member or auto"))
        }
        AdmitError::NotDurable(_) | AdmitError::Kernel(_) | AdmitError::Stuck(_) => (503, "failed", None),
    };
    let mut p = problem(status, title, chain(error), hint);
    if let Some(why) = error.explanation() {
        p.hint = Some(format!("{}; or use --isolation member or auto", why.remedy()));
    }
    if let AdmitError::Placement(refusal) = error {
        p.refusal = serde_json::to_value(refusal).ok();
    }
    p
}

fn release(engine: &mut Engine, owner: Option<Owner>) -> Outcome {
    let asked = owner.clone();
    match engine.ask(|ticket| Event::Release { ticket, owner }) {
        Answer::Released(released) => {
            let mut verdicts: Vec<VerdictDoc> =
                released.iter().filter_map(|(_, v)| v.as_ref()).map(|v| verdict_doc(engine, v)).collect();
            // It may have ended by itself: its last verdict is kept.
            if let (true, Some(owner)) = (released.is_empty(), asked) {
                let nothing = Evidence::default();
                verdicts
                    .extend(engine.state.verdict(&owner, None, &nothing).map(|v| verdict_doc(engine, &v)));
            }
            let owners = released.into_iter().map(|(o, _)| o).collect();
            json(&ReleasedDoc { schema: "truepin.released/1".into(), owners, verdicts })
        }
        Answer::Failed(what) => Err(problem(503, "failed", what, None)),
        Answer::Refused(error) => Err(refused(&error)),
        other => Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
}
