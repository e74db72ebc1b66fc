//! What is seen, held against what was promised.

use super::{
    Cpus, Kept, Promise, When,
    seen::{Files, Seen},
};
use std::collections::BTreeSet;

/// Where truepin makes cgroups.
const SLICE: &str = "truepin.slice";

impl Seen {
    /// Every breach, in words; none when all holds. A promise whose cgroup is not there breaks nothing but I1 among the
    /// promises, which hold without a cgroup.
    #[must_use]
    pub fn breaches(&self, promises: &[Promise], reserved: &Cpus, when: When) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let at_present = |p: &Promise| Promise { kept: self.kept(p, promises), ..p.clone() };
        let promises = &promises.iter().map(at_present).collect::<Vec<_>>()[..];
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
            if !of_a_node && t.allowed.and(&self.online).is_empty() {
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

    /// How others are kept off its CPUs at this moment. Without `cpuset.cpus.exclusive` partitions lie in one slice that is a
    /// partition too. An owner there whose CPUs are all offline needs one of somebody's: as long as there is such an owner
    /// they may all be members.
    fn kept(&self, p: &Promise, promises: &[Promise]) -> Kept {
        let populated = |path: &str| self.cgroups.get(path).is_some_and(|f| f.populated);
        let stranded = |o: &Promise| {
            is_below(&o.cgroup, SLICE) && populated(&o.cgroup) && o.cpus.and(&self.online).is_empty()
        };
        let member = self.cgroups.get(&p.cgroup).is_some_and(|f| f.partition == "member");
        let excused = member && !self.exclusive_file && is_below(&p.cgroup, SLICE);
        if excused && promises.iter().any(stranded) { Kept::Member } else { p.kept }
    }

    /// What the owner has for itself at this moment. Who has no CPU left runs in the pool, and keeps nobody out of it.
    fn has(&self, p: &Promise) -> Cpus {
        if p.cpus.and(&self.online).is_empty() {
            return Cpus::default();
        }
        match (self.cgroups.get(&p.cgroup), p.kept) {
            (Some(f), Kept::Partition) if f.is_partition() => f.effective.clone(),
            (Some(f), Kept::Member) => f.effective.and(&f.listed),
            _ => Cpus::default(),
        }
    }

    fn exclusive(&self, promises: &[Promise], when: When, found: &mut BTreeSet<String>) {
        for (n, p) in promises.iter().enumerate() {
            for other in &promises[..n] {
                for (what, both) in
                    [("were promised", p.cpus.and(&other.cpus)), ("have", self.has(p).and(&self.has(other)))]
                {
                    if !both.is_empty() {
                        found.insert(format!("I1: {} and {} both {what} {both}", p.owner, other.owner));
                    }
                }
            }
            if when == When::Settled {
                if self.bare.contains(&p.cgroup) {
                    found.insert(format!("I1: the cgroup of {} has no cpuset files", p.owner));
                }
                if let Some(files) = self.cgroups.get(&p.cgroup) {
                    self.settled(p, files, found);
                }
            }
        }
    }

    fn settled(&self, p: &Promise, files: &Files, found: &mut BTreeSet<String>) {
        let mine = p.cpus.and(&self.online);
        if mine.is_empty() {
            return; // nothing of it can be anybody's, and it runs in the shared pool until a CPU returns
        }
        if p.kept == Kept::Partition && !files.is_partition() {
            found.insert(format!("I1: the partition of {} reads {:?}", p.owner, files.partition));
        }
        // What the owner makes of its own set below is its own business.
        let below = self.cgroups.iter().filter(|(path, f)| is_below(path, &p.cgroup) && f.is_partition());
        let whole = below.fold(files.effective.clone(), |all, (_, f)| all.or(&f.effective));
        if whole != mine {
            found.insert(format!("I1: {} has {whole}, promised and online are {mine}", p.owner));
        }
        for (path, other) in self.cgroups.iter().filter(|(path, _)| !is_within(path, &p.cgroup)) {
            // In member mode whoever is above reaches over it, the root first of all, and so may what holds no tasks but
            // those of cgroups below it, which have sets of their own.
            let above = is_below(&p.cgroup, path) || path.is_empty() || !self.is_home(path);
            let both = other.effective.and(&mine);
            let reaches_over = p.kept == Kept::Member && above;
            if !both.is_empty() && !reaches_over {
                found.insert(format!("I1: /{path} may use {both} of {}", p.owner));
            }
        }
        for t in self.threads.iter().filter(|t| !t.bound) {
            let (inside, both) = (is_within(&t.cgroup, &p.cgroup), t.allowed.and(&mine));
            if inside && !t.allowed.within(&p.cpus) {
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

    fn pool(&self, promises: &[Promise], reserved: &Cpus, found: &mut BTreeSet<String>) {
        let root = self.cgroups.get("").cloned().unwrap_or_default(); // without it nothing is left to share
        let held = promises.iter().fold(Cpus::default(), |all, p| all.or(&self.has(p)));
        let pool = root.effective.without(&held);
        if pool.is_empty() {
            found.insert(format!("I3: nothing of the root's {} is left to share", root.effective));
        }
        let missing = reserved.and(&self.online).without(&pool);
        if !missing.is_empty() {
            found.insert(format!("I3: the reserved {missing} are not in the shared pool {pool}"));
        }
    }
}

/// `path` is `of` or lies below it.
fn is_within(path: &str, of: &str) -> bool {
    path == of || is_below(path, of)
}

fn is_below(path: &str, of: &str) -> bool {
    of.is_empty() && !path.is_empty() || path.strip_prefix(of).is_some_and(|rest| rest.starts_with('/'))
}
