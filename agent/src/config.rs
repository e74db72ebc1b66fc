//! `/etc/truepin/config.toml`.
//!
//! Unknown keys are refused with the nearest known one: a typo in the name of a safety setting must not silently give
//! the default. Values that this version does not serve are refused by name, never ignored.

mod units;

pub use units::UnitRule;

use serde::Deserialize;
use std::collections::BTreeSet;
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};
use truepin::{
    CgroupPath, CpuSet, Owner,
    placement::{self, Scope, Strategy, kubelet::StaticOptions},
    plan::{OnIntrusion, Role},
    request::{AlignmentPolicy, Isolation},
};

/// Everything that can be configured, with its defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Enforce or audit.
    pub mode: RunMode,
    /// CPUs that nobody gets.
    pub reserved: Reserve,
    /// Keep the shared pool off them too.
    pub strict_reserved: bool,
    /// How CPUs are chosen.
    pub strategy: Strategy,
    /// What is decided on together.
    pub scope: Scope,
    /// For requests that do not say.
    pub numa: AlignmentPolicy,
    /// For requests that do not say.
    pub isolation: Isolation,
    /// What is done about intruders.
    pub on_intrusion: OnIntrusion,
    /// The safety net.
    pub tick: Duration,
    /// I8.
    pub repairs_per_minute: u32,
    /// Where evidence comes from.
    pub sources: Sources,
    /// Time for unbound kernel threads, nanoseconds a second and CPU.
    pub kthread_budget_ns_per_s: u64,
    /// Roles of cgroups and declared owners.
    pub cgroups: Vec<CgroupRule>,
    /// systemd units with CPUs of their own.
    pub units: Vec<UnitRule>,
}

/// What the agent does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunMode {
    /// Assign, write, repair, judge.
    #[default]
    Enforce,
    /// Judge only.
    Audit,
    /// Enforce, after taking over what a kubelet has assigned.
    Migrate,
}

/// The reserved CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Value")]
pub enum Reserve {
    /// That many, whole cores from the lowest on.
    Count(u32),
    /// These.
    Cpus(CpuSet),
}

impl TryFrom<toml::Value> for Reserve {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        match &value {
            toml::Value::Integer(n) => u32::try_from(*n).map(Self::Count).map_err(|e| format!("{n}: {e}")),
            toml::Value::String(list) => {
                list.parse().map(Self::Cpus).map_err(|e| format!("{list:?}: {}", crate::store::chain(&e)))
            }
            other => Err(format!("{other}: expected a count such as 2, or a list such as \"0-1,16-17\"")),
        }
    }
}

/// Sources of wake-ups and names.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Sources {
    /// The eBPF programs.
    pub bpf: bool,
    /// inotify: that a file changed.
    pub notify: bool,
    /// fanotify: who changed it.
    pub writers: bool,
    /// Who says which pods are active (`POST /v1/sources`); none: the cgroup tree does.
    pub pods: BTreeSet<String>,
    /// The socket of the runtime that is asked for names of containers (CRI v1); none: nobody is asked.
    pub cri: Option<PathBuf>,
}

impl Default for Sources {
    fn default() -> Self {
        Self { bpf: true, notify: true, writers: true, pods: BTreeSet::new(), cri: None }
    }
}

/// A `[[cgroup]]` entry.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CgroupRule {
    /// Which.
    pub path: CgroupPath,
    /// What it is.
    pub role: Role,
    /// For the role owner; by default `cgroup/<path>`.
    pub owner: Option<Owner>,
    /// For the role owner: how many CPUs, or which.
    pub cpus: Option<Reserve>,
    /// For the role owner: what is done about intruders there. For the role ignore: whether it may be fenced.
    pub on_intrusion: Option<OnIntrusion>,
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not TOML, or a value of the wrong kind.
    #[error("{}: {what}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// Where and what.
        what: String,
    },
    /// A key that does not exist.
    #[error("{}: unknown key `{key}`{}", path.display(), nearest.as_ref().map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
    UnknownKey {
        /// Which.
        path: PathBuf,
        /// With its table.
        key: String,
        /// The nearest known one.
        nearest: Option<String>,
    },
    /// A key or value that a later version serves.
    #[error("{}: `{key}` is not served by this version", path.display())]
    NotServed {
        /// Which.
        path: PathBuf,
        /// The key, with its value where that is what is not served.
        key: String,
    },
}

/// Keys by table; a trailing `.` on a table that is not served yet.
const KNOWN: [(&str, &[&str]); 6] = [
    (
        "",
        &[
            "mode",
            "reserved",
            "strict-reserved",
            "strategy",
            "options",
            "numa",
            "scope",
            "isolation",
            "on-intrusion",
            "tick",
            "limits",
            "sources",
            "budgets",
            "cgroup",
            "unit",
            "api",
            "journal",
        ],
    ),
    ("limits", &["repairs-per-minute"]),
    ("sources", &["bpf", "notify", "writers", "pods", "cri"]),
    ("budgets", &["unbound-kthread"]),
    ("cgroup", &["path", "role", "owner", "cpus", "on-intrusion"]),
    ("unit", &["name", "cpus"]),
];

const NOT_SERVED: [&str; 2] = ["api", "journal"];

#[derive(Default, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum StrategyWord {
    #[default]
    Best,
    Kubelet,
}

#[derive(Default, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ScopeWord {
    #[default]
    Container,
    Pod,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct File {
    mode: RunMode,
    reserved: Option<Reserve>,
    strict_reserved: bool,
    strategy: StrategyWord,
    options: Vec<String>,
    numa: AlignmentPolicy,
    scope: ScopeWord,
    isolation: Isolation,
    on_intrusion: OnIntrusion,
    tick: Option<String>,
    limits: Limits,
    sources: Sources,
    budgets: Budgets,
    cgroup: Vec<CgroupRule>,
    unit: Vec<UnitRule>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Limits {
    repairs_per_minute: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Budgets {
    unbound_kthread: Option<String>,
}

impl File {
    /// The strategy with its options; those are the kubelet's.
    fn strategy(&self) -> Result<Strategy, String> {
        if self.strategy == StrategyWord::Best {
            return match self.options.as_slice() {
                [] => Ok(Strategy::Best),
                [first, ..] => Err(format!("options = [{first:?}]: options go with strategy = \"kubelet\"")),
            };
        }
        let (closest, others): (Vec<&str>, Vec<&str>) =
            self.options.iter().map(String::as_str).partition(|name| *name == placement::CLOSEST);
        let options = StaticOptions::parse(others).map_err(|e| format!("options: {e}"))?;
        Ok(Strategy::Kubelet { options, closest: !closest.is_empty() })
    }
}

/// Whether the kubelet's own option asks for what `strict-reserved` does.
fn strict(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::Kubelet { options, .. } if options.strict_reservation)
}

impl Config {
    /// Reads `path`; the defaults where there is no file, unless it was `named` by the user.
    pub fn read(path: &Path, named: bool) -> Result<Self, ConfigError> {
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !named => Self::parse("", path),
            Err(source) => Err(ConfigError::Read { path: path.into(), source }),
        }
    }

    /// Whether everything fits the mode, also after the command line has changed it.
    pub fn check_mode(&self, path: &Path) -> Result<(), ConfigError> {
        if let (RunMode::Audit, Some(unit)) = (self.mode, self.units.first()) {
            let what = format!(
                "[[unit]] {}: mode audit tells systemd nothing; declare its cgroup ([[cgroup]] with role = \"owner\") and its CPUs",
                unit.name
            );
            return Err(ConfigError::Content { path: path.into(), what });
        }
        let counted = self.cgroups.iter().find(|c| matches!(c.cpus, Some(Reserve::Count(_))));
        match (self.mode, counted) {
            (RunMode::Audit, Some(rule)) => {
                let what =
                    format!("[[cgroup]] {}: mode audit needs the list of its CPUs, not a count", rule.path);
                Err(ConfigError::Content { path: path.into(), what })
            }
            _ => Ok(()),
        }
    }

    /// Parses TOML; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let content = |what: String| ConfigError::Content { path: path.into(), what };
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| content(e.to_string()))?;
        check_keys(&table, path)?;
        let file: File = toml::from_str(text).map_err(|e| content(e.to_string()))?;
        let strategy = file.strategy().map_err(&content)?;
        let tick = file.tick.as_deref().unwrap_or("30s");
        let tick = humantime::parse_duration(tick).map_err(|e| content(format!("tick = {tick:?}: {e}")))?;
        if !(Duration::from_millis(100)..=Duration::from_hours(24)).contains(&tick) {
            return Err(content(format!("tick = {tick:?}: shorter than 100 ms or longer than a day")));
        }
        let budget = file.budgets.unbound_kthread.as_deref().unwrap_or("10ms/s");
        let kthread_budget_ns_per_s = rate(budget).ok_or_else(|| {
            content(format!("budgets.unbound-kthread = {budget:?}: expected e.g. \"10ms/s\""))
        })?;
        if let Some(cri) = file.sources.cri.as_ref().filter(|p| !p.is_absolute()) {
            return Err(content(format!(
                "sources.cri = {}: expected the path of a socket, such as \"/run/containerd/containerd.sock\"",
                cri.display()
            )));
        }
        check_owners(&file, &content)?;
        units::check(&file, &content)?;
        for rule in &file.cgroup {
            let named = |what: &str| content(format!("[[cgroup]] {}: {what}", rule.path));
            match rule.role {
                Role::Owner if rule.cpus.is_none() => return Err(named("an owner needs `cpus`")),
                Role::Owner if rule.path.is_root() => return Err(named("the root cgroup cannot own CPUs")),
                Role::Pool | Role::Ignore if rule.cpus.is_some() || rule.owner.is_some() => {
                    return Err(named("`owner` and `cpus` go with role = \"owner\""));
                }
                // What is written anyhow is in nobody's way; what may not be is not written for this either.
                Role::Pool if rule.on_intrusion.is_some() => {
                    return Err(named("`on-intrusion` goes with role = \"owner\" or \"ignore\""));
                }
                _ => {}
            }
        }
        let config = Self {
            mode: file.mode,
            reserved: file.reserved.unwrap_or(Reserve::Count(1)),
            strict_reserved: file.strict_reserved || strict(strategy),
            numa: file.numa,
            scope: match file.scope {
                ScopeWord::Container => Scope::Container,
                ScopeWord::Pod => Scope::Pod,
            },
            strategy,
            isolation: file.isolation,
            on_intrusion: file.on_intrusion,
            tick,
            repairs_per_minute: file.limits.repairs_per_minute.unwrap_or(3),
            sources: file.sources,
            kthread_budget_ns_per_s,
            cgroups: file.cgroup,
            units: file.unit,
        };
        config.check_mode(path)?;
        Ok(config)
    }
}

/// What the programs could not watch is refused here: one owner that cannot be watched would leave all unwatched.
fn check_owners(file: &File, content: &impl Fn(String) -> ConfigError) -> Result<(), ConfigError> {
    let owners: Vec<&CgroupRule> = file.cgroup.iter().filter(|c| c.role == Role::Owner).collect();
    for (i, rule) in owners.iter().enumerate() {
        let named = |what: String| Err(content(format!("[[cgroup]] {}: {what}", rule.path)));
        if let Some(other) =
            owners[..i].iter().find(|o| o.path.is_within(&rule.path) || rule.path.is_within(&o.path))
        {
            return named(format!("is, contains or lies inside {}, another owner", other.path));
        }
        if let Some(other) = owners[..i].iter().find(|o| rule.owner.is_some() && o.owner == rule.owner) {
            return named(format!("has the same owner as {}", other.path));
        }
        if let Some(Reserve::Cpus(mine)) = &rule.cpus {
            let shares = |o: &&&CgroupRule| matches!(&o.cpus, Some(Reserve::Cpus(c)) if !c.is_disjoint(mine));
            if let Some(other) = owners[..i].iter().find(shares) {
                return named(format!("shares CPUs with {}", other.path));
            }
            if mine.is_empty() {
                return named("`cpus` is empty".into());
            }
        }
    }
    Ok(())
}

/// `10ms/s`, or `0`.
fn rate(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let per_second = humantime::parse_duration(text.strip_suffix("/s")?.trim()).ok()?;
    u64::try_from(per_second.as_nanos()).ok().filter(|ns| *ns <= 1_000_000_000)
}

fn check_keys(table: &toml::Table, path: &Path) -> Result<(), ConfigError> {
    let known = |name: &str| KNOWN.iter().find(|(t, _)| *t == name).map(|(_, keys)| *keys);
    let check = |inside: &str, table: &toml::Table| {
        let keys = known(inside).unwrap_or_default();
        match table.keys().find(|k| !keys.contains(&k.as_str())) {
            None => Ok(()),
            Some(key) => {
                let prefix = if inside.is_empty() { String::new() } else { format!("{inside}.") };
                let near =
                    keys.iter().map(|k| (strsim::jaro_winkler(k, key), k)).max_by(|a, b| a.0.total_cmp(&b.0));
                let nearest = near.filter(|(score, _)| *score > 0.7).map(|(_, k)| format!("{prefix}{k}"));
                Err(ConfigError::UnknownKey { path: path.into(), key: format!("{prefix}{key}"), nearest })
            }
        }
    };
    check("", table)?;
    for (key, value) in table {
        if NOT_SERVED.contains(&key.as_str()) {
            return Err(ConfigError::NotServed { path: path.into(), key: key.clone() });
        }
        match value {
            toml::Value::Table(inner) => check(key, inner)?,
            toml::Value::Array(items) => {
                for inner in items.iter().filter_map(toml::Value::as_table) {
                    check(key, inner)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("c.toml"))
    }

    #[test]
    fn defaults() {
        let c = parse("").unwrap();
        assert_eq!((c.mode, c.tick, c.repairs_per_minute), (RunMode::Enforce, Duration::from_secs(30), 3));
        assert_eq!((c.reserved, c.kthread_budget_ns_per_s), (Reserve::Count(1), 10_000_000));
        assert!(c.sources.bpf && c.sources.notify && c.sources.writers && c.cgroups.is_empty());
        assert_eq!(c.on_intrusion, OnIntrusion::Report);
    }

    #[test]
    fn every_key() {
        let c = parse(
            r#"
            mode = "audit"
            reserved = "0-1,8"
            strict-reserved = true
            strategy = "best"
            numa = "single-numa-node"
            scope = "container"
            isolation = "member"
            on-intrusion = "fence"
            tick = "10min"
            [limits]
            repairs-per-minute = 1000
            [sources]
            bpf = false
            cri = "/run/crio/crio.sock"
            [budgets]
            unbound-kthread = "500us/s"
            [[cgroup]]
            path = "/db"
            role = "owner"
            owner = "unit/db.service"
            cpus = "4-5"
            on-intrusion = "report"
            [[cgroup]]
            path = "noise"
            role = "ignore"
            on-intrusion = "fence"
            "#,
        )
        .unwrap();
        assert_eq!(c.tick, Duration::from_mins(10));
        assert_eq!((c.strategy, c.scope), (Strategy::Best, Scope::Container));
        let kubelet = parse(
            r#"
            strategy = "kubelet"
            options = ["prefer-closest-numa-nodes", "strict-cpu-reservation", "align-by-socket"]
            scope = "pod"
            "#,
        )
        .unwrap();
        let name = "kubelet:align-by-socket,strict-cpu-reservation,prefer-closest-numa-nodes";
        assert_eq!((kubelet.strategy.to_string().as_str(), kubelet.scope), (name, Scope::Pod));
        assert!(kubelet.strict_reserved);
        assert_eq!((c.sources.bpf, c.sources.notify), (false, true));
        assert_eq!(c.sources.cri.as_deref(), Some(Path::new("/run/crio/crio.sock")));
        assert_eq!(c.kthread_budget_ns_per_s, 500_000);
        assert_eq!(c.cgroups[0].cpus, Some(Reserve::Cpus("4-5".parse().unwrap())));
        assert_eq!(c.cgroups[1].role, Role::Ignore);
        let fences = (c.on_intrusion, c.cgroups[0].on_intrusion, c.cgroups[1].on_intrusion);
        assert_eq!(fences, (OnIntrusion::Fence, Some(OnIntrusion::Report), Some(OnIntrusion::Fence)));
    }

    fn owners(a: &str, of_a: &str, b: &str, of_b: &str) -> String {
        let one = |path, cpus| format!("[[cgroup]]\npath = {path:?}\nrole = \"owner\"\ncpus = {cpus:?}\n");
        one(a, of_a) + &one(b, of_b)
    }

    fn unit(name: &str, cpus: &str) -> String {
        format!("[[unit]]\nname = {name:?}\ncpus = {cpus}\n")
    }

    #[test]
    fn units() {
        let c = parse(&(unit("postgresql@15-main.service", "4") + &unit("x.slice", "\"2-3\""))).unwrap();
        assert_eq!(c.units[0].owner().to_string(), "unit/postgresql@15-main.service");
        assert_eq!((&c.units[0].cpus, c.units[1].name.as_str()), (&Reserve::Count(4), "x.slice"));
    }

    #[test]
    fn refusals_name_key_and_value() {
        for (text, needle) in [
            ("resrved = 2", "unknown key `resrved`; did you mean `reserved`?"),
            (
                "[limits]\nrepair-per-minute = 3",
                "unknown key `limits.repair-per-minute`; did you mean `limits.repairs-per-minute`?",
            ),
            ("[[cgroup]]\npath = \"a\"\nrole = \"pool\"\ncpu = 2", "did you mean `cgroup.cpus`?"),
            ("zzz = 1", "unknown key `zzz`"),
            ("strategy = \"worst\"", "worst"),
            ("options = [\"full-pcpus-only\"]", "options go with strategy = \"kubelet\""),
            ("strategy = \"kubelet\"\noptions = [\"x\"]", "unknown option \"x\""),
            (
                "strategy = \"kubelet\"\noptions = [\"full-pcpus-only\", \"distribute-cpus-across-cores\"]",
                "exclude each other",
            ),
            ("[journal]\nx = 1", "`journal` is not served"),
            (
                "[sources]\ncri = \"unix:///run/c.sock\"",
                "sources.cri = unix:///run/c.sock: expected the path",
            ),
            ("tick = \"1\"", "tick = \"1\""),
            ("on-intrusion = \"kill\"", "on-intrusion"),
            (
                "[[cgroup]]\npath = \"a\"\nrole = \"pool\"\non-intrusion = \"fence\"",
                "`on-intrusion` goes with",
            ),
            ("tick = \"1ms\"", "shorter than 100 ms"),
            ("mode = \"enforced\"", "enforced"),
            ("reserved = \"3-1\"", "reserved"),
            ("[budgets]\nunbound-kthread = \"10ms\"", "expected e.g."),
            ("[[cgroup]]\npath = \"a\"\nrole = \"owner\"", "an owner needs `cpus`"),
            ("[[cgroup]]\npath = \"a\"\nrole = \"pool\"\ncpus = 2", "go with role"),
            ("[[cgroup]]\npath = \"a/../b\"\nrole = \"pool\"", ".."),
            ("a = ", "c.toml"),
            ("mode = \"audit\"\n[[cgroup]]\npath = \"a\"\nrole = \"owner\"\ncpus = 2", "not a count"),
            (&owners("a", "1-2", "a/b", "3"), "lies inside /a"),
            (&owners("a", "1-2", "b", "2-3"), "shares CPUs with /a"),
            (&unit("db@.service", "2"), "a template has none: name an instance"),
            (&unit("db", "2"), "no type such as .service"),
            (&unit("db.timer", "2"), "only services, scopes"),
            (&unit("db.service", "0"), "`cpus` is empty"),
            (&unit("db.service", "\"\""), "`cpus` is empty"),
            ("[[unit]]\nname = \"db.service\"", "missing field `cpus`"),
            ("[[unit]]\nname = \"db.service\"\ncpu = 2", "did you mean `unit.cpus`?"),
            (&unit("db.service", "2").repeat(2), "is declared twice"),
            (&(unit("a.service", "\"1-2\"") + &unit("b.service", "\"2\"")), "shares CPUs with a.service"),
            (&(unit("a.service", "\"1-2\"") + &owners("a", "2", "b", "3")), "shares CPUs with /a"),
            (&format!("mode = \"audit\"\n{}", unit("a.service", "\"1\"")), "declare its cgroup"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(needle), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_missing_file_is_an_error_only_when_named() {
        let path = Path::new("/nonexistent/config.toml");
        assert!(Config::read(path, false).is_ok());
        assert!(matches!(Config::read(path, true), Err(ConfigError::Read { .. })));
    }
}
