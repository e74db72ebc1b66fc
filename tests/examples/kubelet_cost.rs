//! What the kubelet's decisions cost here, row by row beside what they cost in the kubelet: `kubelet_cost [PART]` runs the
//! rows of `$TRUEPIN_SHARED/vectors/bench.jsonl` whose id contains PART (default: all).
//!
//! Compared is CPU time per call: of the thread, least of several batches; recorded was the same for the kubelet (on
//! another machine, to a factor of about 1.5). Allocations are counted, those of one call. Building the index of a
//! machine is not part of a call: it happens once per start of the agent; its cost is printed below.
#![allow(clippy::print_stdout, reason = "it prints")]
// A global allocator cannot be had otherwise.
#![allow(unsafe_code, reason = "counts allocations, and passes every call on as it came")]

#[path = "kubelet_cost/hints.rs"]
mod hints;
#[path = "../conformance/machines.rs"]
#[allow(dead_code, reason = "the other kinds use the rest")]
mod machines;

use machines::Machine;
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::BTreeMap,
    env,
    error::Error,
    fs,
    hint::black_box,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use truepin::{
    CpuId, CpuSet, NodeId,
    placement::kubelet::{KubeletMachine, Label, Labels, StaticOptions, take},
};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a row calls.
type Call<'a> = Box<dyn Fn() + 'a>;

/// The call of a row; `None` for an operation that is not measured here.
fn call<'a>(row: &Value, machine: &'a Machine) -> Result<Option<Call<'a>>, Box<dyn Error>> {
    Ok(match row["op"].as_str() {
        Some("take") => Some(take_call(row, machine)?),
        Some("hints") => Some(hints::list(row, machine)?),
        Some("merge") => Some(hints::merge_of_lists(row, machine)?),
        _ => None,
    })
}

fn take_call<'a>(row: &Value, machine: &'a Machine) -> Result<Call<'a>, Box<dyn Error>> {
    let available: CpuSet = row["avail"].as_str().ok_or("no avail")?.parse()?;
    let n = usize::try_from(row["n"].as_u64().ok_or("no n")?)?;
    let names = row["opt"].as_array().ok_or("no opt")?;
    let options = StaticOptions::parse(names.iter().filter_map(Value::as_str))?;
    Ok(Box::new(move || {
        let result = take(black_box(&machine.kubelet), options, black_box(&available), n);
        drop(black_box(result));
    }))
}

const BATCHES: usize = 5;
const BATCH: Duration = Duration::from_millis(2);

fn now() -> Result<Duration, Box<dyn Error>> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}

/// Nanoseconds and allocations per call.
fn cost(call: &dyn Fn()) -> Result<(f64, u64), Box<dyn Error>> {
    call();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    call();
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    let mut least = f64::INFINITY;
    for _ in 0..BATCHES {
        let (start, mut calls) = (now()?, 0_u32);
        let mut spent = Duration::ZERO;
        while spent < BATCH {
            for _ in 0..16 {
                call();
                calls += 1;
                if calls == 1 {
                    spent = now()?.saturating_sub(start);
                    if spent > BATCH {
                        break;
                    }
                }
            }
            spent = now()?.saturating_sub(start);
        }
        least = least.min(spent.as_secs_f64() * 1e9 / f64::from(calls));
    }
    Ok((least, allocations))
}

fn records(path: &Path) -> Result<Vec<Value>, Box<dyn Error>> {
    if !path.exists() {
        println!("skipped, no file {}", path.display());
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// `1.2 us`.
fn time(ns: f64) -> String {
    let (scale, unit) = match ns {
        ns if ns < 1e3 => (1.0, "ns"),
        ns if ns < 1e6 => (1e3, "us"),
        ns if ns < 1e9 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{:.1} {unit}", ns / scale)
}

/// Two sockets; cores of two threads side by side.
fn many_nodes(nodes: u32) -> KubeletMachine {
    let label = |cpu: u32| Label {
        cpu: CpuId(cpu),
        core: i64::from(cpu / 2),
        socket: i64::from(cpu / 16 / (nodes / 2)),
        node: NodeId(cpu / 16),
        uncore: i64::from(cpu / 8),
    };
    let labels = Labels::new((0..nodes * 16).map(label).collect());
    let counts = labels.counts();
    KubeletMachine::labelled(&labels, counts)
}

/// Every recorded row, as a table; returns the least ratio of each kind, and whose it is.
fn recorded_rows(
    rows: &[Value],
    machines: &BTreeMap<String, Machine>,
    part: &str,
) -> Result<BTreeMap<String, (f64, String)>, Box<dyn Error>> {
    println!(
        "{:<40} {:>10} {:>10} {:>10} {:>12} {:>8}",
        "row", "recorded", "ours", "ratio", "allocations", "ours"
    );
    let mut worst: BTreeMap<String, (f64, String)> = BTreeMap::new();
    for row in rows {
        let id = row["id"].as_str().ok_or("a row without id")?;
        if !id.contains(part) {
            continue;
        }
        let name = row["t"].as_str().ok_or("a row without machine")?;
        let machine = machines.get(name).ok_or_else(|| format!("{id}: no machine {name}"))?;
        let Some(call) = call(row, machine).map_err(|e| format!("{id}: {e}"))? else { continue };
        let (ours, allocations) = cost(&call)?;
        // What did not end in time took at least so long.
        let (recorded, least) = match (row["cpu_ns_op"].as_f64(), row["timeout_s"].as_f64()) {
            (Some(ns), _) => (ns, ""),
            (None, Some(seconds)) => (seconds * 1e9, ">"),
            (None, None) => return Err(format!("{id}: neither cpu_ns_op nor timeout_s").into()),
        };
        let ratio = recorded / ours;
        let recorded_allocations = row["allocs_op"].as_u64().map_or("-".into(), |n| n.to_string());
        println!(
            "{id:<40} {:>10} {:>10} {:>10} {recorded_allocations:>12} {allocations:>8}",
            format!("{least}{}", time(recorded)),
            time(ours),
            format!("{least}{ratio:.0}x"),
        );
        // take/B128/full/packed/2: by operation, options and number.
        let parts: Vec<&str> = id.split('/').collect();
        let kind = [parts.first(), parts.get(3), parts.get(4)].into_iter().flatten().copied();
        let worst = worst.entry(kind.collect::<Vec<_>>().join("/")).or_insert((f64::INFINITY, String::new()));
        if ratio < worst.0 {
            *worst = (ratio, id.to_owned());
        }
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn Error>> {
    let part = env::args().nth(1).unwrap_or_default();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let shared = workspace.join(env::var_os("TRUEPIN_SHARED").map_or("../shared".into(), PathBuf::from));
    let vectors = shared.join("vectors");
    let topologies = records(&vectors.join("bench_topologies.jsonl"))?;
    let machines: BTreeMap<String, Machine> = machines::machines(&topologies)?;

    let rows = records(&vectors.join("bench.jsonl"))?;
    let worst = recorded_rows(&rows, &machines, &part)?;
    println!("\nrequest to winning hint: the kubelet's two steps recorded, here one");
    for (id, recorded, call) in hints::winners_of_rows(&rows, &machines, &part)? {
        let (ours, allocations) = cost(&call)?;
        let (recorded, ratio) = match recorded {
            Some(ns) => (time(ns), format!("{:.0}x", ns / ours)),
            None => ("-".into(), "-".into()),
        };
        println!("{id:<56} {recorded:>10} {:>10} {ratio:>10} {allocations:>8}", time(ours));
    }
    println!("\nwhat the kubelet has no answer for: merges of full lists, winning hints on large machines");
    for (id, call) in hints::full_lists(&part).into_iter().chain(hints::large(&part)?) {
        let (ours, allocations) = cost(&call)?;
        println!("{id:<76} {:>10} {allocations:>8}", time(ours));
    }

    println!("\nleast ratio of each kind");
    for (kind, (ratio, id)) in worst {
        println!("{kind:<30} {ratio:>10.0}x  {id}");
    }

    println!("\nmore nodes, each with another number of its 16 CPUs taken; half of what is free");
    for nodes in [8, 16, 32, 48, 64] {
        let machine = many_nodes(nodes);
        let available: CpuSet =
            machine.cpus().iter().filter(|cpu| cpu.0 % 16 >= cpu.0 / 16 * 7 % 13).collect();
        for names in [
            vec![],
            vec!["distribute-cpus-across-numa"],
            vec!["distribute-cpus-across-numa", "full-pcpus-only"],
        ] {
            let options = StaticOptions::parse(names)?;
            let n = available.len() / 2 / 2 * 2;
            let (ns, allocations) =
                cost(&|| drop(black_box(take(&machine, options, black_box(&available), n))))?;
            println!(
                "{nodes:>3} nodes, {n:>3} of {:>3}: {:>10} {allocations:>8} allocations  {options}",
                available.len(),
                time(ns)
            );
        }
    }

    println!("\nthe dearest of all numbers, distributed");
    let distributed = StaticOptions::parse(["distribute-cpus-across-numa"])?;
    for (name, machine) in
        machines.iter().map(|(name, m)| (name.as_str(), &m.kubelet)).chain([("64 nodes", &many_nodes(64))])
    {
        let available: CpuSet =
            machine.cpus().iter().filter(|cpu| cpu.0 % 16 >= cpu.0 / 16 * 7 % 13).collect();
        let mut dearest = (0.0, 0);
        for n in 1..=available.len() {
            let start = now()?;
            drop(black_box(take(machine, distributed, black_box(&available), n)));
            let spent = now()?.saturating_sub(start).as_secs_f64() * 1e9;
            dearest = if spent > dearest.0 { (spent, n) } else { dearest };
        }
        println!("{name:<10} {:>4} of {:>4}: {:>10}", dearest.1, available.len(), time(dearest.0));
    }

    println!("\nindex of a machine, once per start");
    for (name, machine) in &machines {
        let (ns, allocations) = cost(&|| drop(black_box(KubeletMachine::new(black_box(&machine.topology)))))?;
        println!("{name:<40} {:>10} {allocations:>12} allocations", time(ns));
    }
    Ok(())
}
