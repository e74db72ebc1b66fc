//! The independent observer of I1 to I4 on a real kernel.
//!
//! Problem: truepin must not be the judge of its own promises. So this reads the kernel's files and every thread's
//! mask itself, shares no code with what plans, sweeps or observes, and knows only what was promised to whom.
//! Steps: [`Seen::now`] reads cgroups and threads; [`Seen::breaches`] compares them with the promises; [`observe`]
//! does both until a breach is certain.
//!
//! What counts, by [`When`]:
//!
//! | | at any instant, also between two writes of a plan | when the agent has settled, or is dead |
//! | --- | --- | --- |
//! | I1 | promises are disjoint; no CPU is in the effective sets of two owners that have theirs for themselves | each owner's effective set is its promise as far as it is online; nobody outside may use any of it |
//! | I2 | every populated cgroup with cpuset files has an effective CPU | the same |
//! | I3 | the root cgroup has CPUs beyond the owners', the reserved ones that are online among them | the same |
//! | I4 | every thread that may be moved has an online CPU in its mask | no thread of an owner is allowed outside its set |
//!
//! Reading takes time, and what is read is not of one instant. A breach counts when it is there, word for word, in each
//! of [`LOOKS`] readings in a row: a set that moves on between two reads is no breach. With the agent dead or stopped
//! nothing moves, and every breach is one.

use super::{Cgroup, agent::http, machine, wait::millis};
use anyhow::Context;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs, thread,
};
use truepin::CpuSet;

/// Readings in which a breach must be found.
pub const LOOKS: u32 = 3;

/// How others are kept off an owner's CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// By the kernel: a partition.
    Partition,
    /// By everybody's lists.
    Member,
}

/// What was promised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promise {
    /// To whom.
    pub owner: String,
    /// Its cgroup below the mount, without leading slash.
    pub cgroup: String,
    /// The exclusive set.
    pub cpus: CpuSet,
    /// How.
    pub kept: Kept,
}

impl Promise {
    /// From a document of the schema `truepin.owner/1`, which is what `assign` and `GET /v1/owners/…` answer.
    pub fn of(document: &Value) -> anyhow::Result<Self> {
        let text = |key: &str| document[key].as_str().with_context(|| format!("no {key} in {document}"));
        let kept = match text("mode")? {
            "partition" => Kept::Partition,
            "member" => Kept::Member,
            other => anyhow::bail!("mode {other:?} promises nothing: {document}"),
        };
        Ok(Self {
            owner: text("owner")?.to_owned(),
            cgroup: text("cgroup")?.trim_matches('/').to_owned(),
            cpus: text("cpus")?.parse()?,
            kept,
        })
    }

    /// What the running agent says it has promised.
    pub fn all() -> anyhow::Result<Vec<Self>> {
        let (status, answer) = http("GET", "/v1/owners", None)?;
        anyhow::ensure!(status == 200, "GET /v1/owners: {status} {answer}");
        let owners = answer["owners"].as_array().context("owners are a list")?;
        owners.iter().filter(|o| o["cgroup"].as_str() != Some("")).map(Self::of).collect()
    }
}

/// When it is looked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Whatever the agent is doing.
    Anytime,
    /// Nothing is left to do.
    Settled,
}

/// One cgroup's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Files {
    listed: CpuSet,
    effective: CpuSet,
    /// `cpuset.cpus.partition`; the root has none.
    partition: String,
    populated: bool,
}

impl Files {
    fn is_partition(&self) -> bool {
        self.partition == "root" || self.partition == "isolated"
    }
}

/// One thread.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Thread {
    tid: i32,
    comm: String,
    cgroup: String,
    allowed: CpuSet,
    kernel: bool,
    /// The kernel lets nobody change its mask (`PF_NO_SETAFFINITY`).
    bound: bool,
}

/// The machine as it was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    online: CpuSet,
    /// Those with cpuset files, the root (`""`) among them.
    cgroups: BTreeMap<String, Files>,
    threads: Vec<Thread>,
}

impl Seen {
    /// Reads it. What goes away meanwhile is left out.
    pub fn now() -> anyhow::Result<Self> {
        let mut seen = Self { online: machine::online()?, ..Self::default() };
        let mut todo = vec![Cgroup::root()];
        while let Some(cgroup) = todo.pop() {
            let Ok(children) = cgroup.children() else { continue };
            todo.extend(children);
            let Ok(effective) = cgroup.cpus("cpuset.cpus.effective") else { continue };
            let root = cgroup.path().is_empty();
            let files = Files {
                effective,
                listed: if root { CpuSet::new() } else { cgroup.cpus("cpuset.cpus").unwrap_or_default() },
                partition: cgroup.read("cpuset.cpus.partition").unwrap_or_default(),
                populated: root
                    || cgroup.read("cgroup.events").is_ok_and(|e| e.lines().any(|l| l == "populated 1")),
            };
            // Removed while it was read.
            if root || cgroup.exists() {
                seen.cgroups.insert(cgroup.path().to_owned(), files);
            }
        }
        for process in fs::read_dir("/proc").context("listing /proc")? {
            let process = process.context("listing /proc")?.file_name();
            if process.to_string_lossy().parse::<i32>().is_err() {
                continue;
            }
            let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", process.to_string_lossy())) else {
                continue;
            };
            seen.threads.extend(tasks.filter_map(|t| thread_at(&t.ok()?.path())));
        }
        Ok(seen)
    }

    /// How many cgroups and threads were read.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.cgroups.len(), self.threads.len())
    }

    /// The CPUs that were online.
    #[must_use]
    pub fn online(&self) -> &CpuSet {
        &self.online
    }

    /// Every breach, in words; none when all holds. A promise whose cgroup is not there breaks nothing but I1 among the
    /// promises, which hold without a cgroup.
    #[must_use]
    pub fn breaches(&self, promises: &[Promise], reserved: &CpuSet, when: When) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        self.exclusive(promises, when, &mut found);
        for (path, files) in &self.cgroups {
            if files.populated && files.effective.is_empty() && !self.has_handed_down(path, files) {
                found.insert(format!("I2: /{path} is populated and has no effective CPU"));
            }
        }
        self.pool(promises, reserved, &mut found);
        for t in self.threads.iter().filter(|t| !t.bound) {
            // A kernel thread of a node (kswapd) keeps that node's CPUs when the last one goes: the kernel's own affair.
            let of_a_node = t.kernel && t.cgroup.is_empty() && t.comm.starts_with("kswapd");
            if !of_a_node && t.allowed.is_disjoint(&self.online) {
                found.insert(format!("I4: {} has no online CPU in its mask {}", t.name(), t.allowed));
            }
        }
        found
    }

    /// A partition without processes of its own may give all its CPUs to partitions below it: nobody depends on it then.
    fn has_handed_down(&self, path: &str, files: &Files) -> bool {
        let below = self.cgroups.iter().filter(|(p, _)| p.rsplit_once('/').is_some_and(|(up, _)| up == path));
        let mut populated = below.filter(|(_, f)| f.populated).peekable();
        files.is_partition()
            && populated.peek().is_some()
            && populated
                .all(|(p, f)| f.is_partition() && (!f.effective.is_empty() || self.has_handed_down(p, f)))
            && !self.threads.iter().any(|t| t.cgroup == path)
    }

    /// Whether tasks have their CPUs from this cgroup, or could: one below which others have files holds none itself.
    fn is_home(&self, path: &str) -> bool {
        let nearest = |at: &str| {
            let mut up = Some(at);
            std::iter::from_fn(|| {
                let at = up?;
                up = (!at.is_empty()).then(|| at.rsplit_once('/').map_or("", |(up, _)| up));
                Some(at)
            })
            .find(|at| self.cgroups.contains_key(*at))
            .map(str::to_owned)
        };
        let has_below = self.cgroups.keys().any(|p| is_below(p, path));
        !has_below || self.threads.iter().any(|t| nearest(&t.cgroup).as_deref() == Some(path))
    }

    /// What the owner has for itself at this moment. Who has no CPU left runs in the pool, and keeps nobody out of it.
    fn has(&self, p: &Promise) -> CpuSet {
        if p.cpus.is_disjoint(&self.online) {
            return CpuSet::new();
        }
        match (self.cgroups.get(&p.cgroup), p.kept) {
            (Some(f), Kept::Partition) if f.is_partition() => f.effective.clone(),
            (Some(f), Kept::Member) => f.effective.intersection(&f.listed),
            _ => CpuSet::new(),
        }
    }

    fn exclusive(&self, promises: &[Promise], when: When, found: &mut BTreeSet<String>) {
        for (n, p) in promises.iter().enumerate() {
            for other in &promises[..n] {
                for (what, both) in [
                    ("were promised", p.cpus.intersection(&other.cpus)),
                    ("have", self.has(p).intersection(&self.has(other))),
                ] {
                    if !both.is_empty() {
                        found.insert(format!("I1: {} and {} both {what} {both}", p.owner, other.owner));
                    }
                }
            }
            if when == When::Settled
                && let Some(files) = self.cgroups.get(&p.cgroup)
            {
                self.settled(p, files, found);
            }
        }
    }

    fn settled(&self, p: &Promise, files: &Files, found: &mut BTreeSet<String>) {
        let mine = p.cpus.intersection(&self.online);
        if mine.is_empty() {
            return; // nothing of it can be anybody's, and it runs in the shared pool until a CPU returns
        }
        if p.kept == Kept::Partition && !files.is_partition() {
            found.insert(format!("I1: the partition of {} reads {:?}", p.owner, files.partition));
        }
        // What the owner makes of its own set below is its own business.
        let below = self.cgroups.iter().filter(|(path, f)| is_below(path, &p.cgroup) && f.is_partition());
        let whole = below.fold(files.effective.clone(), |all, (_, f)| all.union(&f.effective));
        if whole != mine {
            found.insert(format!("I1: {} has {whole}, promised and online are {mine}", p.owner));
        }
        for (path, other) in self.cgroups.iter().filter(|(path, _)| !is_within(path, &p.cgroup)) {
            // In member mode whoever is above reaches over it, the root first of all, and so may what holds no tasks but
            // those of cgroups below it, which have sets of their own.
            let above = is_below(&p.cgroup, path) || path.is_empty() || !self.is_home(path);
            let both = other.effective.intersection(&mine);
            let reaches_over = p.kept == Kept::Member && above;
            if !both.is_empty() && !reaches_over {
                found.insert(format!("I1: /{path} may use {both} of {}", p.owner));
            }
        }
        for t in self.threads.iter().filter(|t| !t.bound) {
            let (inside, both) = (is_within(&t.cgroup, &p.cgroup), t.allowed.intersection(&mine));
            if inside && !t.allowed.is_subset(&p.cpus) {
                found.insert(format!("I4: {} of {} is allowed on {}", t.name(), p.owner, t.allowed));
            }
            // Kernel threads have a budget and no promise: since 7.0 a `root` partition leaves them where they are.
            let kept_off = p.kept == Kept::Partition || !t.cgroup.is_empty();
            if !inside && !t.kernel && kept_off && !both.is_empty() {
                found.insert(format!(
                    "I1: {} in /{} is allowed on {both} of {}",
                    t.name(),
                    t.cgroup,
                    p.owner
                ));
            }
        }
    }

    fn pool(&self, promises: &[Promise], reserved: &CpuSet, found: &mut BTreeSet<String>) {
        let Some(root) = self.cgroups.get("") else { return };
        let held = promises.iter().fold(CpuSet::new(), |all, p| all.union(&self.has(p)));
        let pool = root.effective.difference(&held);
        if pool.is_empty() {
            found.insert(format!("I3: nothing of the root's {} is left to share", root.effective));
        }
        let missing = reserved.intersection(&self.online).difference(&pool);
        if !missing.is_empty() {
            found.insert(format!("I3: the reserved {missing} are not in the shared pool {pool}"));
        }
    }
}

impl Thread {
    fn name(&self) -> String {
        format!("thread {} ({})", self.tid, self.comm)
    }
}

/// `path` is `of` or lies below it.
fn is_within(path: &str, of: &str) -> bool {
    path == of || is_below(path, of)
}

fn is_below(path: &str, of: &str) -> bool {
    of.is_empty() && !path.is_empty() || path.strip_prefix(of).is_some_and(|rest| rest.starts_with('/'))
}

/// `None` for a thread that is gone or a zombie, which has no say in anything any more.
fn thread_at(dir: &std::path::Path) -> Option<Thread> {
    const KTHREAD: u64 = 0x0020_0000;
    const NO_SETAFFINITY: u64 = 0x0400_0000;
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let stat = read("stat")?;
    let (head, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    let flags: u64 = fields.get(6)?.parse().ok()?;
    let status = read("status")?;
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?.trim().parse().ok()?;
    let cgroup = read("cgroup")?.lines().find_map(|l| l.strip_prefix("0::/"))?.to_owned();
    Some(Thread {
        tid: dir.file_name()?.to_str()?.parse().ok()?,
        comm: head.split_once('(')?.1.to_owned(),
        cgroup,
        allowed,
        kernel: flags & KTHREAD != 0,
        bound: flags & NO_SETAFFINITY != 0,
    })
}

/// Looks, and looks again while anything is wrong; an error names what was wrong in [`LOOKS`] readings in a row.
/// `ask` gives the promises, anew for each reading.
pub fn observe(
    mut ask: impl FnMut() -> anyhow::Result<Vec<Promise>>,
    reserved: &CpuSet,
    when: When,
) -> anyhow::Result<Seen> {
    let mut certain: Option<BTreeSet<String>> = None;
    let mut look = 0;
    loop {
        look += 1;
        let promised = ask()?;
        let seen = Seen::now()?;
        let breaches = seen.breaches(&promised, reserved, when);
        let both = match certain {
            None => breaches,
            Some(before) => before.intersection(&breaches).cloned().collect(),
        };
        if both.is_empty() {
            return Ok(seen);
        }
        if look >= LOOKS {
            let mut text = format!("the observer found, in {look} readings:");
            for b in &both {
                let _ = write!(text, "\n  {b}");
            }
            anyhow::bail!("{text}\n  promised: {promised:?}");
        }
        certain = Some(both);
        thread::sleep(millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn files(listed: &str, effective: &str, partition: &str) -> Files {
        let (listed, effective) = (set(listed), set(effective));
        Files { listed, effective, partition: partition.into(), populated: true }
    }

    fn thread(tid: i32, cgroup: &str, allowed: &str) -> Thread {
        let allowed = set(allowed);
        Thread { tid, comm: "t".into(), cgroup: cgroup.into(), allowed, kernel: false, bound: false }
    }

    /// A partition `s/p` on 4-5, a member `s/m` on 6, the rest shared, CPU 0 reserved.
    fn machine() -> (Seen, Vec<Promise>) {
        let seen = Seen {
            online: set("0-7"),
            cgroups: [
                ("", files("", "0-3,6-7", "")),
                ("s", files("", "0-3,6-7", "member")),
                ("s/p", files("4-5", "4-5", "root")),
                ("s/m", files("6", "6", "member")),
                ("pool", files("0-3,7", "0-3,7", "member")),
            ]
            .map(|(p, f)| (p.to_owned(), f))
            .into(),
            threads: vec![thread(1, "", "0-3,6-7"), thread(2, "s/p", "5"), thread(3, "s/m", "6")],
        };
        let promise = |name: &str, cgroup: &str, cpus: &str, kept| Promise {
            owner: name.into(),
            cgroup: cgroup.into(),
            cpus: set(cpus),
            kept,
        };
        (seen, vec![promise("p", "s/p", "4-5", Kept::Partition), promise("m", "s/m", "6", Kept::Member)])
    }

    fn broken(seen: &Seen, promises: &[Promise], when: When) -> String {
        seen.breaches(promises, &set("0"), when).into_iter().collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_machine_in_order() {
        let (seen, promises) = machine();
        for when in [When::Anytime, When::Settled] {
            assert_eq!(broken(&seen, &promises, when), "");
        }
    }

    #[test]
    fn each_breach_is_found() {
        type Damage = fn(&mut Seen, &mut Vec<Promise>);
        let cases: [(&str, Damage, When); 11] = [
            ("both were promised 5", |_, p| p[1].cpus = "5-6".parse().unwrap(), When::Anytime),
            (
                "I1: m and p both have 5",
                |s, _| {
                    *s.cgroups.get_mut("s/m").unwrap() = files("5-6", "5-6", "member");
                },
                When::Anytime,
            ),
            ("I2: /pool", |s, _| s.cgroups.get_mut("pool").unwrap().effective = CpuSet::new(), When::Anytime),
            (
                "I3: nothing",
                |s, _| s.cgroups.get_mut("").unwrap().effective = "6".parse().unwrap(),
                When::Anytime,
            ),
            (
                "I3: the reserved 0",
                |s, _| {
                    s.cgroups.get_mut("").unwrap().effective = "1-3".parse().unwrap();
                },
                When::Anytime,
            ),
            ("I4: thread 1", |s, _| s.threads[0].allowed = "9".parse().unwrap(), When::Anytime),
            (
                "reads \"root invalid\"",
                |s, _| {
                    s.cgroups.get_mut("s/p").unwrap().partition = "root invalid".into();
                },
                When::Settled,
            ),
            (
                "p has 4, promised",
                |s, _| s.cgroups.get_mut("s/p").unwrap().effective = "4".parse().unwrap(),
                When::Settled,
            ),
            // The leak after hotplug: every file of the partition is perfect.
            (
                "I1: / may use 5 of p",
                |s, _| {
                    s.cgroups.get_mut("").unwrap().effective = "0-3,5-7".parse().unwrap();
                },
                When::Settled,
            ),
            ("I4: thread 2 (t) of p", |s, _| s.threads[1].allowed = "0-7".parse().unwrap(), When::Settled),
            (
                "thread 1 (t) in / is allowed on 5 of p",
                |s, _| {
                    s.threads[0].allowed = "0-3,5".parse().unwrap();
                },
                When::Settled,
            ),
        ];
        for (want, damage, when) in cases {
            let (mut seen, mut promises) = machine();
            damage(&mut seen, &mut promises);
            let found = broken(&seen, &promises, when);
            assert!(found.contains(want), "{want}: {found}");
        }
    }

    #[test]
    fn what_is_allowed() {
        let (mut seen, promises) = machine();
        // Offline CPUs of a promise, bound and unbound kernel threads, a member's ancestors, a partition below.
        seen.online = set("0-4,6-7");
        *seen.cgroups.get_mut("s/p").unwrap() = files("4-5", "", "root");
        seen.cgroups.insert("s/p/inner".into(), files("4", "4", "root"));
        seen.threads[1] = thread(2, "s/p/inner", "4-5");
        seen.threads.push(Thread { bound: true, kernel: true, ..thread(9, "", "5") });
        seen.threads.push(Thread { kernel: true, ..thread(10, "", "0-7") });
        assert_eq!(broken(&seen, &promises, When::Settled), "");
        // All handed down: who has processes has CPUs.
        *seen.cgroups.get_mut("s").unwrap() = files("4-6", "", "root");
        *seen.cgroups.get_mut("s/m").unwrap() = files("6", "6", "root");
        assert_eq!(broken(&seen, &promises, When::Settled), "");
        seen.cgroups.insert("s/left".into(), files("6", "6", "member"));
        assert!(broken(&seen, &promises, When::Anytime).contains("I2: /s is populated"));
        seen.cgroups.remove("s/left");
        // Its cgroup is not there yet.
        seen.cgroups.remove("s/m");
        seen.threads.retain(|t| t.cgroup != "s/m");
        assert_eq!(broken(&seen, &promises, When::Settled), "");
    }

    #[test]
    fn this_machine_is_read() {
        let me = std::process::id().cast_signed();
        let dir = std::path::PathBuf::from(format!("/proc/{me}/task/{me}"));
        // Only where the host has a cgroup2 line; the test harness's threads have this process's name.
        let Some(seen) = thread_at(&dir) else { return };
        assert!(!seen.kernel && !seen.bound && !seen.allowed.is_empty());
        let kthreadd = thread_at(std::path::Path::new("/proc/2/task/2"));
        assert!(kthreadd.is_none_or(|t| t.kernel));
    }

    #[test]
    fn promises_are_read_from_answers() {
        let document = serde_json::json!(
            {"owner": "run/a", "cgroup": "/truepin.slice/run-a", "cpus": "2-3", "mode": "member"});
        let promise = Promise::of(&document).unwrap();
        assert_eq!((promise.cgroup.as_str(), promise.kept), ("truepin.slice/run-a", Kept::Member));
        for key in ["owner", "cgroup", "cpus", "mode"] {
            let mut less = document.clone();
            less.as_object_mut().unwrap().remove(key);
            assert!(Promise::of(&less).unwrap_err().to_string().contains(key));
        }
    }
}
