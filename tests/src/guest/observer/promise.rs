//! What was promised to whom: by answers, and by the record.

use super::Cpus;
use crate::guest::{
    agent::{CHECKPOINT, http},
    wait::{millis, secs},
};
use anyhow::Context;
use serde_json::Value;
use std::{
    fs, io,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

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
    pub cpus: Cpus,
    /// How.
    pub kept: Kept,
}

impl Promise {
    /// From a document of the schema `truepin.owner/1`, which is what `assign` and `GET /v1/owners/…` answer.
    pub fn of(document: &Value) -> anyhow::Result<Self> {
        Self::to(text(document, "owner")?, document)
    }

    fn to(owner: &str, document: &Value) -> anyhow::Result<Self> {
        let kept = match text(document, "mode")? {
            "partition" => Kept::Partition,
            "member" => Kept::Member,
            other => anyhow::bail!("mode {other:?} promises nothing: {document}"),
        };
        Ok(Self {
            owner: owner.to_owned(),
            cgroup: text(document, "cgroup")?.trim_matches('/').to_owned(),
            cpus: text(document, "cpus")?.parse()?,
            kept,
        })
    }

    /// What the running agent has promised to cgroups, by owner: its record, which is durable before anybody has an answer
    /// and before a file is written. Only the file is read: the agent learns nothing of it.
    pub fn recorded() -> anyhow::Result<Vec<Self>> {
        let record = newest(Path::new(CHECKPOINT), secs(2))?;
        let Some(record) = record else { return Ok(Vec::new()) };
        Self::in_record(&record).with_context(|| format!("{CHECKPOINT}: {record}"))
    }

    fn in_record(record: &str) -> anyhow::Result<Vec<Self>> {
        let record: Value = serde_json::from_str(record)?;
        let schema = text(&record, "schema")?;
        anyhow::ensure!(schema == "truepin.checkpoint/2", "schema {schema:?}");
        let owners = record["payload"]["assignments"]["owners"].as_object().context("no owners")?;
        sorted(owners.iter().map(|(owner, document)| Self::to(owner, document)))
    }

    /// What the running agent answers. To answer it looks at everything and mends what it finds: whoever asks this before
    /// he looks at the kernel sees what was found only because he asked.
    pub fn asked() -> anyhow::Result<Vec<Self>> {
        let (status, answer) = http("GET", "/v1/owners", None)?;
        anyhow::ensure!(status == 200, "GET /v1/owners: {status} {answer}");
        let owners = answer["owners"].as_array().context("owners are a list")?;
        sorted(owners.iter().filter(|o| o["cgroup"].as_str() != Some("")).map(Self::of))
    }
}

/// The record at `path`. It is replaced by two renames, and between them there is none: for a moment, or from a kill at that
/// moment to the next save, and then, after `patience`, the one before counts. Who has never promised anything has neither.
fn newest(path: &Path, patience: Duration) -> anyhow::Result<Option<String>> {
    let previous = path.with_extension("json.prev");
    let start = Instant::now();
    loop {
        let late = start.elapsed() >= patience;
        if let Some(text) = read(path)? {
            return Ok(Some(text));
        }
        let before = read(&previous)?;
        if late || before.is_none() {
            return Ok(before);
        }
        sleep(millis(20));
    }
}

fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
    }
}

fn sorted(all: impl Iterator<Item = anyhow::Result<Promise>>) -> anyhow::Result<Vec<Promise>> {
    let mut all: Vec<_> = all.collect::<anyhow::Result<_>>()?;
    all.sort_by(|a, b| a.owner.cmp(&b.owner));
    Ok(all)
}

fn text<'a>(document: &'a Value, key: &str) -> anyhow::Result<&'a str> {
    document[key].as_str().with_context(|| format!("no {key} in {document}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_one_before_counts_when_a_kill_left_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.json");
        let found = || newest(&path, millis(100)).unwrap();
        assert_eq!(found(), None);
        fs::write(dir.path().join("checkpoint.json.prev"), "n").unwrap();
        let start = Instant::now();
        assert_eq!(found().as_deref(), Some("n"));
        assert!(start.elapsed() >= millis(100), "a save under way was not waited for");
        fs::write(&path, "n+1").unwrap();
        assert_eq!(found().as_deref(), Some("n+1"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(newest(&path, millis(100)).unwrap_err().to_string().contains("checkpoint.json"));
    }

    #[test]
    fn in_answers() {
        let document =
            json!({"owner": "run/a", "cgroup": "/truepin.slice/run-a", "cpus": "2-3", "mode": "member"});
        let promise = Promise::of(&document).unwrap();
        assert_eq!((promise.cgroup.as_str(), promise.kept), ("truepin.slice/run-a", Kept::Member));
        for key in ["owner", "cgroup", "cpus", "mode"] {
            let mut less = document.clone();
            less.as_object_mut().unwrap().remove(key);
            assert!(Promise::of(&less).unwrap_err().to_string().contains(key));
        }
        let audited = json!({"owner": "run/a", "cgroup": "/a", "cpus": "2", "mode": "audit"});
        assert!(Promise::of(&audited).unwrap_err().to_string().contains("promises nothing"));
    }

    /// A record that truepin itself encodes: whoever renames a field of it must see this observer fail.
    #[test]
    fn in_a_record() {
        use truepin::{
            assignments::{Assignment, Assignments, Mode},
            checkpoint::{self, Checkpoint},
            request::Isolation,
        };
        let assignment = |cgroup: &str, cpus: &str, mode| Assignment {
            cpus: cpus.parse().unwrap(),
            original: None,
            cgroup: cgroup.parse().unwrap(),
            created: true,
            mode,
            isolation: Isolation::Auto,
            generation: 1,
            reason: String::new(),
            memory: [].into(),
            extra: checkpoint::Extra::new(),
        };
        let mut record = Checkpoint {
            version: checkpoint::VERSION,
            minor: checkpoint::MINOR,
            epoch: 1,
            boot_id: "b".into(),
            topology: "t".into(),
            strategy: "s".into(),
            assignments: Assignments::default(),
            containers: [].into(),
            first: [].into(),
            extra: checkpoint::Extra::new(),
        };
        let text = |record: &Checkpoint| String::from_utf8(checkpoint::encode(record).unwrap()).unwrap();
        assert_eq!(Promise::in_record(&text(&record)).unwrap(), []);
        for (owner, a) in [
            ("unit/m", assignment("a/m", "6", Mode::Member)),
            ("run/p", assignment("truepin.slice/run-p", "2-3,8", Mode::Partition)),
        ] {
            record.assignments.owners.insert(owner.parse().unwrap(), a);
        }
        let promise = |owner: &str, cgroup: &str, cpus: &str, kept| Promise {
            owner: owner.into(),
            cgroup: cgroup.into(),
            cpus: cpus.parse().unwrap(),
            kept,
        };
        let expected = [
            promise("run/p", "truepin.slice/run-p", "2-3,8", Kept::Partition),
            promise("unit/m", "a/m", "6", Kept::Member),
        ];
        assert_eq!(Promise::in_record(&text(&record)).unwrap(), expected);
        let other = text(&record).replace("checkpoint/2", "checkpoint/3");
        assert!(Promise::in_record(&other).unwrap_err().to_string().contains("checkpoint/3"));
        assert!(Promise::in_record(r#"{"schema":"truepin.checkpoint/2","payload":{}}"#).is_err());
    }
}
