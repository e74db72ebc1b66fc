//! What a call would do, in the words of a shell.
//!
//! The reconciler plays the call through on a copy of the state ([`truepin::rehearse`]); here its steps are written down.
//! Nothing is applied, saved or told to anybody.

use super::{
    calls::{self, About, Call, Outcome, problem},
    documents::{FindingDoc, OwnerDoc},
};
use crate::{cgroupfs::CgroupFs, engine::Engine};
use serde::{Deserialize, Serialize};
use truepin::{
    Owner,
    observed::Step,
    plan::{Phase, Planned},
    reconcile::{Answer, Event, Finding, FindingKind},
    rehearse::Rehearsal,
    units::UnitName,
};

/// `truepin.plan/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanDoc {
    /// `truepin.plan/1`
    pub schema: String,
    /// What would be written, in order.
    pub steps: Vec<StepDoc>,
    /// The owner as it would be, where one is assigned.
    pub owner: Option<OwnerDoc>,
    /// Who would give its CPUs back.
    pub released: Vec<Owner>,
    /// What there is to know beside.
    pub notes: Vec<String>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDoc {
    /// Phases are carried out one after the other, each planned anew from what is then there.
    pub phase: Phase,
    /// The file or directory.
    pub path: String,
    /// What the file holds before; none for what is no value.
    pub old: Option<String>,
    /// What it would hold; none for a directory.
    pub new: Option<String>,
    /// The same as lines for a shell.
    pub shell: Vec<String>,
}

impl StepDoc {
    /// Of one step at `kernel`, which is asked who owns the file.
    fn new(kernel: &mut CgroupFs, planned: &Planned) -> Self {
        let step = &planned.step;
        let dir = kernel.dir(step.path());
        let (path, old, new) = match step {
            Step::Create(_) | Step::Remove(_) => (dir, None, None),
            Step::Enable(_) => (dir.join("cgroup.subtree_control"), None, Some("+cpuset".into())),
            Step::Write { file, old, new, .. } => {
                (dir.join(file.name()), Some(old.clone()), Some(new.to_string()))
            }
            Step::Enter { pid, .. } => (dir.join("cgroup.procs"), None, Some(pid.to_string())),
        };
        Self { phase: planned.phase, path: path.display().to_string(), old, new, shell: kernel.shell(step) }
    }
}

impl PlanDoc {
    /// Of what was rehearsed at `kernel`.
    #[must_use]
    pub fn new(kernel: &mut CgroupFs, rehearsal: &Rehearsal) -> Self {
        let mut notes: Vec<String> = rehearsal.findings.iter().filter_map(told).collect();
        let state = &rehearsal.state;
        let over = kernel.systemd.as_ref().map(|s| s.over(|unit, path| state.needs(unit, path)));
        notes.extend(over.into_iter().flatten().map(|unit: UnitName| {
            format!("then, through systemd: properties and drop-ins of {unit} as they were")
        }));
        Self {
            schema: "truepin.plan/1".into(),
            steps: rehearsal.steps.iter().map(|p| StepDoc::new(kernel, p)).collect(),
            owner: None,
            released: Vec::new(),
            notes,
        }
    }

    /// As a script: notes are comments.
    #[must_use]
    pub fn script(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        if let Some(o) = &self.owner {
            lines.push(format!(
                "# {} gets CPUs {} in {} ({}): {}",
                o.owner,
                o.cpus,
                o.cgroup,
                o.mode.name(),
                o.reason
            ));
            lines.extend(o.warnings.iter().map(|w| format!("# warning: {w}")));
        }
        lines.extend(self.released.iter().map(|owner| format!("# {owner} gives its CPUs back")));
        lines.extend(self.steps.iter().flat_map(|s| s.shell.iter().cloned()));
        if self.steps.is_empty() {
            lines.push("# no file is written".into());
        }
        lines.extend(self.notes.iter().map(|n| format!("# {n}")));
        // A comment is one line.
        lines.iter().map(|l| l.replace('\n', " ") + "\n").collect()
    }
}

/// What a finding of a rehearsal has to say to whoever only asks.
fn told(finding: &Finding) -> Option<String> {
    match &finding.kind {
        FindingKind::Gone { .. } => None,
        _ => Some(FindingDoc::from(finding).text),
    }
}

/// Plays the call through.
pub fn plan(engine: &mut Engine, about: &About, call: Call) -> Outcome {
    const TICKET: u64 = 0;
    let event = match call {
        Call::Admit(admission) => {
            let (request, home) = calls::request(engine, about, &admission)?;
            let pid = admission.pid;
            Event::Admit { ticket: TICKET, request, exactly: None, home, pid }
        }
        Call::Release(owner) => Event::Release { ticket: TICKET, owner },
        other => {
            return Err(problem(422, "usage", format!("{other:?} has no dry run"), None));
        }
    };
    let mut rehearsal = engine.rehearse(event);
    let mut document = PlanDoc::new(&mut engine.kernel, &rehearsal);
    match rehearsal.answer(TICKET) {
        Some(Answer::Assigned(owner, assignment)) => {
            let nodes = rehearsal.state.nodes_of(&assignment.cpus);
            document.owner = Some(OwnerDoc::new(&owner, &assignment, nodes, None));
        }
        Some(Answer::Released(released)) => {
            document.released = released.into_iter().map(|(owner, _)| owner).collect();
        }
        Some(Answer::Refused(error)) => return Err(calls::refused(&error)),
        Some(Answer::Failed(what)) => return Err(problem(503, "failed", what, None)),
        other => return Err(problem(500, "internal", format!("unexpected answer {other:?}"), None)),
    }
    calls::json(&document)
}
