//! What the record costs: bytes, and milliseconds to save and to load it. `record_cost [DIRECTORY]` (default: a new one
//! here, because a temporary folder may be in memory).
//!
//! 2,000 owners on 1,024 CPUs are more than can be exclusive at the same time, so the sets overlap; neither the encoder
//! nor the disk cares.
#![allow(clippy::print_stdout, reason = "it prints")]

use std::{
    error::Error,
    fs::File,
    io::Write as _,
    path::PathBuf,
    time::{Duration, Instant},
};
use truepin::{
    CgroupId, CpuSet, CpusetFile, Owner,
    assignments::{Assignment, Assignments, FirstValue, FirstValues, Mode},
    checkpoint::{self, Checkpoint, Extra},
    containers::{ContainerEntry, ContainerMap},
    cpuset::CpuId,
    request::Isolation,
};
use truepin_agent::store::Store;

const OWNERS: u32 = 2000;
const CPUS: u32 = 1024;
const RUNS: usize = 21;

fn record() -> Result<Checkpoint, Box<dyn Error>> {
    let mut assignments = Assignments { reserved: "0-3".parse()?, ..Assignments::default() };
    let (mut containers, mut first) = (ContainerMap::new(), FirstValues::new());
    for n in 0..OWNERS {
        let uid = format!("{n:08x}-2fa1-11d2-883f-0016d3cca427");
        let owner: Owner = format!("pod/{uid}/app").parse()?;
        let slice = format!("kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"));
        let id = format!("{n:064x}");
        let cpus: CpuSet = (0..=n % 8).map(|k| CpuId((4 + n * 5 + k * (1 + n % 3)) % CPUS)).collect();
        let assignment = Assignment {
            reason: format!("{} CPUs on node {}, LLC of CPU {}, 2 whole cores", cpus.len(), n % 8, n % CPUS),
            memory: std::collections::BTreeMap::new(),
            cpus,
            original: None,
            cgroup: format!("{slice}/cri-containerd-{id}.scope").parse()?,
            created: false,
            mode: Mode::Partition,
            isolation: Isolation::Auto,
            generation: u64::from(n),
            extra: Extra::new(),
        };
        assignments.owners.insert(owner.clone(), assignment);
        let cgroup = Some(CgroupId(10_000 + u64::from(n)));
        containers.insert(id.parse()?, ContainerEntry { owner, cgroup, extra: Extra::new() });
        let files = [(CpusetFile::Cpus, String::new()), (CpusetFile::Exclusive, String::new())].into();
        first.insert(
            slice.parse()?,
            FirstValue { id: CgroupId(u64::from(n)), files, ..FirstValue::default() },
        );
    }
    Ok(Checkpoint {
        version: checkpoint::VERSION,
        minor: checkpoint::MINOR,
        epoch: 1,
        boot_id: "5f1c3f0e-0000-4000-8000-000000000000".into(),
        topology: "1-1024c-512k-8n-00000000".into(),
        strategy: "best".into(),
        assignments,
        containers,
        first,
        extra: Extra::new(),
    })
}

fn median(mut act: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let start = Instant::now();
        act()?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times.get(RUNS / 2).map_or(0.0, Duration::as_secs_f64) * 1000.0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let given = std::env::args().nth(1).map(PathBuf::from);
    let own = tempfile::tempdir_in(".")?;
    let dir = given.unwrap_or_else(|| own.path().to_owned());
    let path = dir.join("checkpoint.json");
    let mut record = record()?;
    let bytes = checkpoint::encode(&record)?;
    println!(
        "{OWNERS} owners with a container and first values each, on {CPUS} CPUs: {} bytes, {} per owner",
        bytes.len(),
        bytes.len() / OWNERS as usize
    );
    let encode = median(|| checkpoint::encode(&record).map(drop).map_err(Into::into))?;
    let decode = median(|| checkpoint::decode(&bytes).map(drop).map_err(Into::into))?;
    println!("encode {encode:.2} ms, decode (checksum, parse, encode again, compare) {decode:.2} ms");
    let probe = dir.join("probe");
    let sync = median(|| {
        let mut file = File::create(&probe)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        Ok(File::open(&dir)?.sync_all()?)
    })?;
    std::fs::remove_file(&probe)?;
    let mut store = Store::open(&path)?;
    let save = median(|| {
        record.epoch += 1;
        Ok(store.save(&record)?)
    })?;
    let load = median(|| Ok(store.load(1).map(drop)?))?;
    println!(
        "save {save:.2} ms (one write, two fsyncs and two renames; writing and syncing such a file alone: {sync:.2} ms), \
         load of both generations {load:.2} ms; {}",
        dir.display()
    );
    Ok(())
}
