//! `[[unit]]`

use super::{CgroupRule, ConfigError, File, Reserve};
use serde::Deserialize;
use truepin::{CpuSet, Owner, units::UnitName};

/// A `[[unit]]` entry: the owner `unit/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct UnitRule {
    /// Which.
    #[serde(deserialize_with = "unit_name")]
    pub name: UnitName,
    /// How many CPUs, or which.
    pub cpus: Reserve,
}

impl UnitRule {
    /// The owner of that name.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::Unit(self.name.to_string())
    }
}

fn unit_name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<UnitName, D::Error> {
    let text = String::deserialize(from)?;
    let named = |why: String| serde::de::Error::custom(why);
    // The name is an owner's, too, whose grammar is a little narrower.
    format!("unit/{text}").parse::<Owner>().map_err(|e| named(e.to_string()))?;
    text.parse().map_err(|e: truepin::units::UnitNameError| named(e.to_string()))
}

/// As with owners' cgroups, whose places are not known here.
pub(super) fn check(file: &File, content: &impl Fn(String) -> ConfigError) -> Result<(), ConfigError> {
    let lists = |cpus: &Reserve| match cpus {
        Reserve::Cpus(list) => list.clone(),
        Reserve::Count(_) => CpuSet::new(),
    };
    for (i, rule) in file.unit.iter().enumerate() {
        let named = |what: String| Err(content(format!("[[unit]] {}: {what}", rule.name)));
        if matches!(&rule.cpus, Reserve::Cpus(list) if list.is_empty()) || rule.cpus == Reserve::Count(0) {
            return named("`cpus` is empty".into());
        }
        if file.unit[..i].iter().any(|other| other.name == rule.name) {
            return named("is declared twice".into());
        }
        if let Some(other) = file.cgroup.iter().find(|c| c.owner.as_ref() == Some(&rule.owner())) {
            return named(format!("[[cgroup]] {} has the same owner", other.path));
        }
        let mine = lists(&rule.cpus);
        if let Some(other) = file.unit[..i].iter().find(|o| !lists(&o.cpus).is_disjoint(&mine)) {
            return named(format!("shares CPUs with {}", other.name));
        }
        let shares = |c: &&CgroupRule| c.cpus.as_ref().is_some_and(|cpus| !lists(cpus).is_disjoint(&mine));
        if let Some(other) = file.cgroup.iter().find(shares) {
            return named(format!("shares CPUs with {}", other.path));
        }
    }
    Ok(())
}
