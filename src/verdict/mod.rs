//! Did the pinning hold?
//!
//! Problem: the claim "from t0 to t1 only the owner and unavoidable kernel work ran on its CPUs, and the owner ran
//! nowhere else" is worth something only if every way in which the evidence could be incomplete is looked for.
//! Steps: subtract two samples; first collect what breaks completeness (epoch, links, missed runs, broken chains,
//! residual, clock, hotplug, disagreement with the owner's own CPU clock), then what contradicts the claim (foreign
//! time, departures, kernel threads over budget, faults of the sets).
//! Invariants: a contradiction needs positive evidence and stands however incomplete the rest is; absence of evidence
//! is never `Held` (I6).

use crate::{
    assignments::Mode,
    cgroup::CgroupId,
    cpuset::{CpuId, CpuSet},
    ledger::{ClassTimes, CpuLedger, Intruder, IntruderKind, LedgerSample, OwnerCounters},
    owner::Owner,
    sweep::SetFinding,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Judgement {
    /// The claim is true.
    Held,
    /// It cannot be told.
    Inconclusive,
    /// The claim is false.
    Violated,
}

impl Judgement {
    /// As in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Inconclusive => "inconclusive",
            Self::Violated => "violated",
        }
    }
}

/// Time that tasks' own clocks may leave out on one CPU (`/proc/stat`), cumulative nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuNoise {
    /// Hard interrupts.
    pub irq_ns: u64,
    /// Soft interrupts.
    pub softirq_ns: u64,
    /// Taken by the hypervisor.
    pub steal_ns: u64,
}

impl CpuNoise {
    fn total(self) -> u64 {
        self.irq_ns.saturating_add(self.softirq_ns).saturating_add(self.steal_ns)
    }
}

/// The clock that all times come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClockState {
    /// `current_clocksource`
    pub source: String,
    /// `CLOCK_BOOTTIME` less `CLOCK_MONOTONIC`: grows by the time spent suspended.
    pub suspended_ns: u64,
}

impl ClockState {
    /// Sources that are the same on every CPU and do not stop.
    const STABLE: [&'static str; 6] =
        ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter", "riscv_clocksource"];

    /// Whether times of different CPUs may be compared.
    #[must_use]
    pub fn is_stable(&self) -> bool {
        Self::STABLE.contains(&self.source.as_str()) || self.source == "timebase" || self.source == "tod"
    }
}

/// An instant on two clocks, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Instant {
    /// `CLOCK_MONOTONIC`
    pub mono_ns: u64,
    /// `CLOCK_REALTIME`, since 1970.
    pub wall_ns: u64,
}

/// Everything known at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    /// When.
    pub at: Instant,
    /// What the kernel half knows; `None` when it is off.
    pub ledger: Option<LedgerSample>,
    /// `usage_usec` of each owner's `cpu.stat`, as nanoseconds.
    pub usage: BTreeMap<CgroupId, u64>,
    /// By CPU.
    pub noise: BTreeMap<CpuId, CpuNoise>,
    /// The clock.
    pub clock: ClockState,
    /// CPUs online.
    pub online: CpuSet,
}

/// Allowances of the comparison with the owner's CPU clock. Measured: the difference is within a tick for each CPU,
/// and grows by 2 to 8 µs a switch on hardware-backed machines and 20 to 285 µs under software emulation, because
/// scheduler code on either side of the tracepoint is booked to the other task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tolerance {
    /// Length of a scheduler tick: how stale the clock of a running task may be.
    pub tick_ns: u64,
    /// For each context switch.
    pub per_switch_ns: u64,
}

/// Whose claim is judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The owner.
    pub owner: Owner,
    /// The exclusive set.
    pub cpus: CpuSet,
    /// How it is enforced.
    pub mode: Mode,
    /// The owner's cgroup.
    pub cgroup: CgroupId,
    /// Whether sets of cpuset files could be swept at all.
    pub sets_swept: bool,
    /// What is known to be missing or wrong beside the two samples: sweeps that failed, epochs that ended within.
    pub beside: Beside,
    /// Time that unbound kernel threads may take on each CPU, nanoseconds a second.
    pub kthread_budget_ns_per_s: u64,
}

/// What is known of an interval beside its two samples.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Beside {
    /// Contradictions of epochs that ended within the interval.
    pub faults: Vec<String>,
    /// Evidence that is missing.
    pub gaps: Vec<String>,
}

/// One CPU's account over the interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuAccount {
    /// The CPU.
    pub cpu: CpuId,
    /// Where its time went.
    pub times: ClassTimes,
    /// Context switches.
    pub switches: u64,
}

/// The verdict on one owner over one interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whose.
    pub owner: Owner,
    /// Its CPUs.
    pub cpus: CpuSet,
    /// Mode in force.
    pub mode: Mode,
    /// The evidence that was used.
    pub means: Vec<String>,
    /// Start of the interval.
    pub from: Instant,
    /// End of the interval.
    pub to: Instant,
    /// The answer.
    pub judgement: Judgement,
    /// Why, contradictions first.
    pub reasons: Vec<String>,
    /// By CPU.
    pub accounts: Vec<CpuAccount>,
    /// Moves of its tasks onto other CPUs.
    pub departures: u64,
    /// All moves of its tasks.
    pub migrations: u64,
    /// Processes and threads that left its cgroup for another.
    pub moved_out: u64,
    /// Records lost: names, never amounts.
    pub lost: u64,
    /// Who was there, longest first.
    pub intruders: Vec<Intruder>,
    /// What this kind of evidence cannot see.
    pub blind_spots: Vec<&'static str>,
}

impl Verdict {
    /// Nothing is known of the owner at `at`: it holds no CPUs, though it should.
    #[must_use]
    pub fn untold(owner: &Owner, cpus: &CpuSet, mode: Mode, at: Instant, why: String) -> Self {
        Self { reasons: vec![why], ..Self::blank(owner, cpus, mode, at, at) }
    }

    /// A verdict for which nothing was looked at yet.
    fn blank(owner: &Owner, cpus: &CpuSet, mode: Mode, from: Instant, to: Instant) -> Self {
        Self {
            owner: owner.clone(),
            cpus: cpus.clone(),
            mode,
            means: Vec::new(),
            from,
            to,
            judgement: Judgement::Inconclusive,
            reasons: Vec::new(),
            accounts: Vec::new(),
            departures: 0,
            migrations: 0,
            moved_out: 0,
            lost: 0,
            intruders: Vec::new(),
            blind_spots: BLIND.to_vec(),
        }
    }
}

/// What `sched_switch` does not show, in every verdict.
const BLIND: [&str; 5] = [
    "interrupts and softirqs on these CPUs are charged to the task they interrupt",
    "NMIs, SMIs, firmware and hypervisor steal",
    "SMT siblings, shared caches, memory bandwidth and frequency",
    "work done for the owner by kernel workers and interrupts on other CPUs",
    "time before the program was attached and after the last sample",
];
const BLIND_MOVES: &str = "a task that is moved to another cgroup is the owner's no more: neither the move nor where it runs then is seen";
const BLIND_MEMBER: &str =
    "member mode: nothing keeps new cgroups and the root cgroup's tasks out; they are seen, not stopped";

/// Judges `subject` over the interval between two samples. `findings` are the faults of the sets seen in it.
#[must_use]
pub fn judge(
    subject: &Subject,
    from: &Evidence,
    to: &Evidence,
    findings: &[SetFinding],
    tolerance: Tolerance,
) -> Verdict {
    let mut v = Verdict::blank(&subject.owner, &subject.cpus, subject.mode, from.at, to.at);
    v.means.push(if subject.sets_swept { "set sweep".into() } else { "set sweep: not applicable".into() });
    if subject.mode == Mode::Member {
        v.blind_spots.push(BLIND_MEMBER);
    }
    let mut gaps = subject.beside.gaps.clone();
    let mut faults = subject.beside.faults.clone();
    if let (Some(a), Some(b)) = (&from.ledger, &to.ledger) {
        v.means.insert(0, "ledger (eBPF sched_switch)".into());
        v.means.insert(1, "departures (eBPF sched_migrate_task, sched_wakeup_new)".into());
        if a.health.sees_moves && b.health.sees_moves {
            v.means.insert(2, "moves to other cgroups (eBPF cgroup_attach_task)".into());
        } else {
            v.blind_spots.push(BLIND_MOVES);
        }
        accounts(subject, a, b, &mut v, &mut gaps);
        health(a, b, &mut v, &mut gaps);
        counters(subject, a, b, &mut v, &mut gaps);
        intruders(subject, a, b, &mut v);
        cross_check(subject, from, to, tolerance, &mut v, &mut gaps);
        execution(subject, &v, to.at.mono_ns.saturating_sub(from.at.mono_ns), &mut faults);
    } else {
        gaps.push("no execution evidence: the eBPF programs are off".into());
    }
    environment(subject, from, to, &mut gaps);
    faults.extend(findings.iter().filter(|f| f.owner == subject.owner).map(|f| f.fault.to_string()));
    faults.dedup();
    v.judgement = match (faults.is_empty(), gaps.is_empty()) {
        (false, _) => Judgement::Violated,
        (true, false) => Judgement::Inconclusive,
        (true, true) => Judgement::Held,
    };
    v.reasons = faults;
    v.reasons.extend(gaps);
    v
}

fn find(sample: &LedgerSample, cpu: CpuId) -> Option<&CpuLedger> {
    sample.cpus.iter().find(|c| c.cpu == cpu)
}

fn accounts(
    subject: &Subject,
    first: &LedgerSample,
    last: &LedgerSample,
    v: &mut Verdict,
    gaps: &mut Vec<String>,
) {
    for cpu in subject.cpus.iter() {
        let (Some(before), Some(after)) = (find(first, cpu), find(last, cpu)) else {
            gaps.push(format!("CPU {cpu} was not watched over the whole interval"));
            continue;
        };
        if before.owner != subject.cgroup || after.owner != subject.cgroup {
            gaps.push(format!("CPU {cpu} was watched for another cgroup"));
            continue;
        }
        if before.generation != after.generation || before.from_ns != after.from_ns {
            gaps.push(format!("CPU {cpu}: the assignment changed within the interval"));
            continue;
        }
        let (Some(times), Some(elapsed)) =
            (after.times.since(&before.times), after.to_ns.checked_sub(before.to_ns))
        else {
            gaps.push(format!("CPU {cpu}: the ledger went backwards"));
            continue;
        };
        if elapsed == 0 {
            gaps.push(format!("CPU {cpu}: the interval is empty"));
        }
        let total = times.total();
        if total != elapsed {
            gaps.push(format!("CPU {cpu}: the classes sum to {total} ns of {elapsed} ns elapsed"));
        }
        let breaks = after.breaks.saturating_sub(before.breaks);
        if breaks > 0 {
            gaps.push(format!(
                "CPU {cpu}: {breaks} switches were not seen; {} are of unknown class",
                millis(times.unknown_ns)
            ));
        }
        if times.straddle_ns > 0 {
            gaps.push(format!(
                "CPU {cpu}: {} straddle a change of the assignment",
                millis(times.straddle_ns)
            ));
        }
        v.accounts.push(CpuAccount { cpu, times, switches: after.switches.saturating_sub(before.switches) });
    }
}

fn health(first: &LedgerSample, last: &LedgerSample, v: &mut Verdict, gaps: &mut Vec<String>) {
    for after in &last.health.programs {
        let Some(before) = first.health.programs.iter().find(|p| p.name == after.name) else {
            gaps.push(format!("program {} was not there at the start", after.name));
            continue;
        };
        match (before.link, after.link) {
            (Some(x), Some(y)) if x == y => {}
            (_, None) => gaps.push(format!("program {} is not attached", after.name)),
            _ => gaps.push(format!("program {} was detached and attached again", after.name)),
        }
        let missed = after.misses.saturating_sub(before.misses);
        if missed > 0 {
            gaps.push(format!("the kernel skipped {missed} runs of program {}", after.name));
        }
    }
    if last.health.programs.is_empty() {
        gaps.push("no program reports its health".into());
    }
    let unseen = last.health.moves_unseen.saturating_sub(first.health.moves_unseen);
    if unseen > 0 {
        gaps.push(format!("of {unseen} moves to another cgroup it was not seen whose tasks they took"));
    }
    // Counters and amounts are exact; what is lost is a name or an example.
    v.lost = last.health.ring_drops.saturating_sub(first.health.ring_drops)
        + last.health.intruders_lost.saturating_sub(first.health.intruders_lost);
}

fn counters(
    subject: &Subject,
    first: &LedgerSample,
    last: &LedgerSample,
    v: &mut Verdict,
    gaps: &mut Vec<String>,
) {
    let of = |s: &LedgerSample| -> Option<OwnerCounters> {
        s.owners.iter().find(|o| o.owner == subject.cgroup).copied()
    };
    match (of(first), of(last)) {
        (Some(before), Some(after)) if before.generation == after.generation => {
            v.departures = after.departures.saturating_sub(before.departures);
            v.migrations = after.migrations.saturating_sub(before.migrations);
            v.moved_out = after.moved_out.saturating_sub(before.moved_out);
            // No contradiction: it ran nowhere else while it was the owner's. Where the move itself put it on another CPU, that
            // is a departure and counted among them.
            if v.moved_out > 0 {
                gaps.push(format!(
                    "{} of its processes or threads left its cgroup for another; what they did then is not judged",
                    v.moved_out
                ));
            }
        }
        _ => gaps.push("departures were not counted over the whole interval".into()),
    }
}

fn intruders(subject: &Subject, a: &LedgerSample, b: &LedgerSample, v: &mut Verdict) {
    let key = |i: &Intruder| (i.cpu, i.pid, i.start_ns);
    let before: BTreeMap<_, u64> = a.intruders.iter().map(|i| (key(i), i.ns)).collect();
    for i in b.intruders.iter().filter(|i| subject.cpus.contains(i.cpu)) {
        let ns = i.ns.saturating_sub(before.get(&key(i)).copied().unwrap_or(0));
        if ns > 0 {
            v.intruders.push(Intruder { ns, ..i.clone() });
        }
    }
    v.intruders.sort_by(|x, y| y.ns.cmp(&x.ns).then_with(|| key(x).cmp(&key(y))));
}

/// The owner's own CPU clock is kept by the scheduler's accounting, not by our program: where they part, switches
/// were lost.
fn cross_check(
    subject: &Subject,
    from: &Evidence,
    to: &Evidence,
    tolerance: Tolerance,
    v: &mut Verdict,
    gaps: &mut Vec<String>,
) {
    let (Some(a), Some(b)) = (from.usage.get(&subject.cgroup), to.usage.get(&subject.cgroup)) else {
        gaps.push("the owner's CPU clock (cpu.stat) could not be read".into());
        return;
    };
    v.means.push("owner's CPU clock (cpu.stat)".into());
    let Some(used) = b.checked_sub(*a) else {
        gaps.push("the owner's CPU clock went backwards".into());
        return;
    };
    let ledger: u64 = v.accounts.iter().map(|c| c.times.owner_ns).sum();
    let switches: u64 = v.accounts.iter().map(|c| c.switches).sum();
    let cpus = subject.cpus.len() as u64;
    let noise: u64 = subject
        .cpus
        .iter()
        .map(|c| {
            let of = |e: &Evidence| e.noise.get(&c).copied().unwrap_or_default().total();
            of(to).saturating_sub(of(from))
        })
        .sum();
    let bracket = |e: &Evidence| e.ledger.as_ref().map_or(0, |l| l.ended_ns.saturating_sub(l.begun_ns));
    let allowed =
        cpus * (tolerance.tick_ns + bracket(from) + bracket(to)) + noise + switches * tolerance.per_switch_ns;
    let off = ledger.abs_diff(used);
    // With departures the owner ran elsewhere too; that is a contradiction of its own, and no gap.
    if off > allowed && v.departures == 0 {
        gaps.push(format!(
            "ledger ({}) and the owner's CPU clock ({}) differ by {}, more than {} can be explained",
            millis(ledger),
            millis(used),
            millis(off),
            millis(allowed)
        ));
    }
}

fn environment(subject: &Subject, from: &Evidence, to: &Evidence, gaps: &mut Vec<String>) {
    if to.at.mono_ns <= from.at.mono_ns {
        gaps.push("the interval is empty".into());
    }
    for clock in [&from.clock, &to.clock] {
        if !clock.is_stable() {
            let said = format!("clocksource {:?} is not stable across CPUs", clock.source);
            if !gaps.contains(&said) {
                gaps.push(said);
            }
        }
    }
    if from.clock.source != to.clock.source {
        gaps.push(format!("the clocksource changed from {:?} to {:?}", from.clock.source, to.clock.source));
    }
    // Reading two clocks one after the other differs by microseconds; a suspend is far longer.
    if to.clock.suspended_ns.abs_diff(from.clock.suspended_ns) > 10_000_000 {
        gaps.push("the machine was suspended".into());
    }
    for evidence in [from, to] {
        let off = subject.cpus.difference(&evidence.online);
        if !off.is_empty() {
            gaps.push(format!("CPUs {off} were offline"));
            break;
        }
    }
}

fn execution(subject: &Subject, v: &Verdict, elapsed_ns: u64, faults: &mut Vec<String>) {
    for account in &v.accounts {
        let t = &account.times;
        if t.foreign_ns > 0 {
            let who = v
                .intruders
                .iter()
                .find(|i| i.cpu == account.cpu && i.kind == IntruderKind::Foreign)
                .map(|i| format!(", longest {} (pid {})", i.comm, i.tgid))
                .unwrap_or_default();
            faults.push(format!("CPU {}: foreign tasks ran for {}{who}", account.cpu, millis(t.foreign_ns)));
        }
        // A rate needs a second: less is judged as one. u128: nanoseconds times nanoseconds a second.
        let span = u128::from(elapsed_ns.max(1_000_000_000));
        let budget = u128::from(subject.kthread_budget_ns_per_s) * span / 1_000_000_000;
        if u128::from(t.kthread_unbound_ns) > budget {
            faults.push(format!(
                "CPU {}: kernel threads that could run elsewhere took {} (budget {})",
                account.cpu,
                millis(t.kthread_unbound_ns),
                millis(u64::try_from(budget).unwrap_or(u64::MAX))
            ));
        }
    }
    if v.departures > 0 {
        faults.push(format!("its tasks went to other CPUs {} times", v.departures));
    }
}

/// Nanoseconds as milliseconds with three decimals, without floating point.
#[must_use]
pub fn millis(ns: u64) -> String {
    let us = ns.saturating_add(500) / 1000;
    format!("{}.{:03} ms", us / 1000, us % 1000)
}

#[cfg(test)]
mod tests;
