//! The JSON documents. Each has a `schema`; fields are added, never re-used; maps and lists are ordered, so that equal
//! content has equal bytes. CPU sets are list strings, times integer nanoseconds, instants RFC 3339 with nanoseconds,
//! ids strings.

mod findings;

pub use findings::{CauseDoc, FindingDoc, FindingsDoc, WriterDoc};

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    time::{Duration, UNIX_EPOCH},
};
use truepin::{
    CgroupId, CpuSet, NodeId, NodeSet, Owner,
    assignments::{Assignment, Mode, Promise},
    explain::Explanation,
    ledger::{ClassTimes, Intruder, IntruderKind},
    request::Isolation,
    verdict::{CpuAccount, Instant, Judgement, Verdict},
};

/// RFC 3339 in UTC with nanoseconds.
#[must_use]
pub fn rfc3339(wall_ns: u64) -> String {
    humantime::format_rfc3339_nanos(UNIX_EPOCH + Duration::from_nanos(wall_ns)).to_string()
}

/// A monotonic time as an instant, by the difference that `at` shows between the clocks.
fn wall(at: Instant, mono_ns: u64) -> String {
    rfc3339(at.wall_ns.saturating_sub(at.mono_ns).saturating_add(mono_ns))
}

/// Why a partition is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplanationDoc {
    /// A short word for the kernel's reason.
    pub cause: String,
    /// In plain words, with the cgroups that are seen to be the reason.
    pub text: String,
    /// What to do where truepin's own repair does not help, or it happens again.
    pub remedy: String,
    /// Those cgroups.
    pub cgroups: Vec<String>,
}

impl From<&Explanation> for ExplanationDoc {
    fn from(e: &Explanation) -> Self {
        Self {
            cause: e.cause.name().into(),
            text: e.to_string(),
            remedy: e.remedy(),
            cgroups: e.culprits.iter().filter_map(|c| c.path()).map(ToString::to_string).collect(),
        }
    }
}

/// A partition that the kernel does not honour at present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokenDoc {
    /// `cpuset.cpus.partition` as read.
    pub state: String,
    /// Why.
    pub explanation: ExplanationDoc,
}

/// `truepin.owner/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnerDoc {
    /// `truepin.owner/1`
    pub schema: String,
    /// The owner.
    pub owner: Owner,
    /// Its exclusive set.
    pub cpus: CpuSet,
    /// The NUMA nodes of that set.
    pub nodes: NodeSet,
    /// Its cgroup; empty while it has none.
    pub cgroup: String,
    /// partition, member or audit: what is in force.
    pub mode: Mode,
    /// What was asked for.
    pub isolation: Isolation,
    /// Whether truepin made the cgroup.
    pub created: bool,
    /// Why this set.
    pub reason: String,
    /// Memory that it asked for, bytes by NUMA node; its `cpuset.mems` are these nodes.
    #[serde(default)]
    pub memory: BTreeMap<NodeId, u64>,
    /// The verdict since the assignment, or since the agent started.
    pub verdict: Option<Judgement>,
    /// The verdict's first reason.
    pub verdict_reason: Option<String>,
    /// Its partition, where it should have one and the kernel does not honour it.
    #[serde(default)]
    pub broken: Option<BrokenDoc>,
    /// What its user should know.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Why it has fewer CPUs than are its own; none when it has all of them.
    #[serde(default)]
    pub degraded: Option<String>,
}

impl OwnerDoc {
    /// From the table.
    #[must_use]
    pub fn new(owner: &Owner, a: &Assignment, nodes: NodeSet, verdict: Option<&Verdict>) -> Self {
        Self {
            schema: "truepin.owner/1".into(),
            owner: owner.clone(),
            cpus: a.cpus.clone(),
            nodes,
            cgroup: a.cgroup.to_string(),
            mode: a.mode,
            isolation: a.isolation,
            created: a.created,
            reason: a.reason.clone(),
            memory: a.memory.clone(),
            verdict: verdict.map(|v| v.judgement),
            verdict_reason: verdict.and_then(|v| v.reasons.first().cloned()),
            broken: None,
            warnings: a.warning().map(Into::into).into_iter().collect(),
            degraded: None,
        }
    }

    /// One that has no cgroup.
    #[must_use]
    pub fn promised(owner: &Owner, p: &Promise, nodes: NodeSet) -> Self {
        let waits = match (owner, p.made) {
            (Owner::Unit(_), false) => "waits for the unit to start",
            (Owner::Unit(_), true) => "waits for the unit to start again",
            (_, false) => "waits for its container",
            (_, true) => "waits for its container to come again",
        };
        Self {
            schema: "truepin.owner/1".into(),
            owner: owner.clone(),
            cpus: p.cpus.clone(),
            nodes,
            cgroup: String::new(),
            mode: p.mode,
            isolation: p.isolation,
            created: false,
            reason: p.reason.clone(),
            memory: BTreeMap::new(),
            verdict: None,
            verdict_reason: Some(format!("{waits}; {}", p.reason)),
            broken: None,
            warnings: Vec::new(),
            degraded: None,
        }
    }
}

/// `truepin.owners/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnersDoc {
    /// `truepin.owners/1`
    pub schema: String,
    /// By owner.
    pub owners: Vec<OwnerDoc>,
}

/// One CPU of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuDoc {
    /// The CPU.
    pub cpu: u32,
    /// By class.
    #[serde(flatten)]
    pub times: ClassTimes,
    /// Context switches.
    pub switches: u64,
}

/// Who was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntruderDoc {
    /// Process id.
    pub pid: u32,
    /// Thread id.
    pub tid: u32,
    /// Thread name.
    pub comm: String,
    /// Its cgroup; `#id` when the path is not known any more.
    pub cgroup: String,
    /// `foreign` or `kthread`.
    pub kind: String,
    /// Where.
    pub cpu: u32,
    /// How long in the interval.
    pub ns: u64,
    /// Start of its first slice there.
    pub first: String,
    /// End of its last.
    pub last: String,
}

/// `truepin.verdict/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerdictDoc {
    /// `truepin.verdict/1`
    pub schema: String,
    /// Whose.
    pub owner: Owner,
    /// Its CPUs.
    pub cpus: CpuSet,
    /// partition, member or audit.
    pub mode: Mode,
    /// The evidence used.
    pub means: Vec<String>,
    /// Start of the interval.
    pub from: String,
    /// End of the interval.
    pub to: String,
    /// Its length.
    pub elapsed_ns: u64,
    /// The answer.
    pub verdict: Judgement,
    /// Why.
    pub reasons: Vec<String>,
    /// By CPU.
    pub cpu: Vec<CpuDoc>,
    /// Moves of its tasks to other CPUs.
    pub departures: u64,
    /// All moves of its tasks.
    pub migrations: u64,
    /// Processes and threads that left its cgroup for another.
    #[serde(default)]
    pub moved_out: u64,
    /// Records lost: names, never amounts.
    pub lost: u64,
    /// Who was there, longest first.
    pub intruders: Vec<IntruderDoc>,
    /// What cannot be seen.
    pub blind_spots: Vec<String>,
}

impl VerdictDoc {
    /// `path_of` finds the path of a cgroup id.
    pub fn new(v: &Verdict, path_of: impl Fn(CgroupId) -> Option<String>) -> Self {
        let intruder = |i: &Intruder| IntruderDoc {
            pid: i.tgid,
            tid: i.pid,
            comm: i.comm.clone(),
            cgroup: path_of(i.cgroup).unwrap_or_else(|| format!("#{}", i.cgroup)),
            kind: if i.kind == IntruderKind::Foreign { "foreign".into() } else { "kthread".into() },
            cpu: i.cpu.0,
            ns: i.ns,
            first: wall(v.to, i.first_ns),
            last: wall(v.to, i.last_ns),
        };
        let cpu = |c: &CpuAccount| CpuDoc { cpu: c.cpu.0, times: c.times, switches: c.switches };
        Self {
            schema: "truepin.verdict/1".into(),
            owner: v.owner.clone(),
            cpus: v.cpus.clone(),
            mode: v.mode,
            means: v.means.clone(),
            from: rfc3339(v.from.wall_ns),
            to: rfc3339(v.to.wall_ns),
            elapsed_ns: v.to.mono_ns.saturating_sub(v.from.mono_ns),
            verdict: v.judgement,
            reasons: v.reasons.clone(),
            cpu: v.accounts.iter().map(cpu).collect(),
            departures: v.departures,
            migrations: v.migrations,
            moved_out: v.moved_out,
            lost: v.lost,
            intruders: v.intruders.iter().map(intruder).collect(),
            blind_spots: v.blind_spots.iter().map(|s| (*s).to_owned()).collect(),
        }
    }
}

/// `truepin.verdicts/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerdictsDoc {
    /// `truepin.verdicts/1`
    pub schema: String,
    /// By owner.
    pub verdicts: Vec<VerdictDoc>,
}

/// `truepin.released/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReleasedDoc {
    /// `truepin.released/1`
    pub schema: String,
    /// Who gave CPUs back; empty when nobody held any.
    pub owners: Vec<Owner>,
    /// Their last verdicts; also of one that had ended before.
    pub verdicts: Vec<VerdictDoc>,
}

/// One owner's set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetDoc {
    /// The owner.
    pub owner: Owner,
    /// Its CPUs.
    pub cpus: CpuSet,
}

/// `truepin.pod/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodDoc {
    /// `truepin.pod/1`
    pub schema: String,
    /// The pod.
    pub uid: String,
    /// Containers with CPUs of their own, in the order in which they start; all others share.
    pub owners: Vec<SetDoc>,
    /// What a source's report is dated by: a source that lists its pods after this answer sends it with the list.
    #[serde(default)]
    pub position: u64,
}

/// `truepin.adopted/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedDoc {
    /// `truepin.adopted/1`
    pub schema: String,
    /// Everything that was taken over, or was before.
    pub owners: Vec<SetDoc>,
}

/// `truepin.noted/1`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedDoc {
    /// `truepin.noted/1`
    pub schema: String,
    /// Of what notice was taken.
    pub what: String,
    /// The CPUs that a container has for itself.
    pub cpus: Option<CpuSet>,
    /// As in `truepin.pod/1`.
    #[serde(default)]
    pub position: u64,
}

/// What is in force on this kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "a list of features for JSON, each present or not")]
pub struct KernelDoc {
    /// `uname -r`
    pub release: String,
    /// Where cgroup2 is mounted.
    pub cgroup_root: String,
    /// cpuset is on cgroup v2.
    pub cpuset: bool,
    /// Remote partitions: `cpuset.cpus.exclusive` exists.
    pub partitions: bool,
    /// Partitions exist without that file: for what truepin starts alone.
    #[serde(default)]
    pub local_partitions: bool,
    /// An empty `cpuset.cpus` on a populated cgroup was refused; false when that was not met.
    pub empty_write_refused: bool,
    /// The eBPF programs are attached.
    pub bpf: bool,
    /// inotify tells that files change.
    pub notify: bool,
    /// Something tells who changes them.
    pub writers: bool,
    /// What: `fexit cgroup_file_write`, `kprobe cgroup_file_write`, `fanotify`, or `none: ` and why.
    #[serde(default)]
    pub writers_means: String,
    /// Why no better means are in force, and why the one that is does not see everything.
    #[serde(default)]
    pub writers_refused: Vec<String>,
    /// Writes that it could not tell, since the start.
    #[serde(default)]
    pub writers_lost: u64,
    /// What tells of CPUs that go and come (`uevent+inotify`, or one of them); without `uevent` nobody is held,
    /// without `inotify` what a refused offline leaves is found at the tick. Empty: neither.
    #[serde(default)]
    pub hotplug: String,
    /// The clock source, and whether times of different CPUs may be compared.
    pub clocksource: String,
    /// As above.
    pub clock_stable: bool,
}

/// Where CPUs are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolsDoc {
    /// Online.
    pub online: CpuSet,
    /// Never handed out.
    pub reserved: CpuSet,
    /// Held by owners.
    pub exclusive: CpuSet,
    /// Everybody else's.
    pub shared: CpuSet,
    /// Could be handed out now.
    pub free: CpuSet,
}

/// What the agent costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostDoc {
    /// Resident memory.
    pub rss_bytes: u64,
    /// CPU time of the process.
    pub cpu_ns: u64,
    /// Since it started.
    pub uptime_ns: u64,
}

/// `truepin.status/1`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusDoc {
    /// `truepin.status/1`
    pub schema: String,
    /// Of truepin.
    pub version: String,
    /// Of the agent.
    pub pid: u32,
    /// enforce or audit.
    pub mode: String,
    /// Whether kernel and table agreed when last looked.
    pub settled: bool,
    /// The kernel.
    pub kernel: KernelDoc,
    /// CPUs.
    pub pools: PoolsDoc,
    /// The durable record; `None` in audit mode, which has none.
    #[serde(default)]
    pub record: Option<RecordDoc>,
    /// How many owners by mode in force.
    pub owners: BTreeMap<String, u32>,
    /// Problems in force.
    pub problems: Vec<String>,
    /// What users of owners should know.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Intruders' cgroups that are fenced.
    #[serde(default)]
    pub fences: Vec<FenceDoc>,
    /// The newest findings, newest last.
    pub findings: Vec<FindingDoc>,
    /// What it costs.
    pub cost: CostDoc,
}

/// A cgroup that is kept off exclusive CPUs because its tasks were there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceDoc {
    /// Which.
    pub cgroup: String,
    /// Its `cpuset.cpus` as last read.
    pub cpus: CpuSet,
    /// What it held before, to be put back.
    pub first: String,
    /// Owners whom that protects.
    pub owners: Vec<Owner>,
}

/// The durable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordDoc {
    /// Its current generation; the previous one is beside it.
    pub path: String,
    /// Of what is durable; none before the first save.
    pub epoch: Option<u64>,
    /// Damaged files in quarantine.
    pub quarantined: usize,
}

/// `application/problem+json` (RFC 9457), with what to do next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProblemDoc {
    /// `about:blank`
    #[serde(rename = "type")]
    pub kind: String,
    /// A short word: `refused`, `usage`, `unavailable`, …
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// A sentence.
    pub detail: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hint: Option<String>,
    /// What was free where, for a refused placement.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refusal: Option<serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_have_nanoseconds() {
        assert_eq!(rfc3339(1_700_000_000_000_000_001), "2023-11-14T22:13:20.000000001Z");
        let at = Instant { mono_ns: 5_000, wall_ns: 1_700_000_000_000_005_000 };
        assert_eq!(wall(at, 4_000), "2023-11-14T22:13:20.000004000Z");
    }
}
