//! What a context switch pays for the ledger: ns a run by the kernel's own statistics, over an empty program.
//!
//!     cargo run --release -p truepin-agent --example switch_cost [ROUNDS [MILLISECONDS]] [--check]
//!
//! Two processes pass a byte to and fro on CPU 0, some 10^5 switches a second. The statistics' own clock reads are in
//! each figure (that is what `empty` costs), and machines are noisy: only medians of interleaved rounds, over `empty`
//! of the same process, are comparable. `--check` fails when a median is over its goal.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark: a panic is a failure")]

#[path = "../tests/support/mod.rs"]
mod support;

use aya::{Btf, Ebpf, programs::BtfTracePoint};
use std::{
    env,
    io::{Read as _, Write as _},
    process::{Command, ExitCode, Stdio},
    thread::sleep,
    time::Duration,
};
use support::{Cgroup, Process, missing, skip};
use truepin::ledger::{Probe as _, Watched};
use truepin_agent::bpf::{BpfProbe, OBJECT};

/// Name and goal, ns over `empty`.
const MODES: [(&str, Option<f64>); 7] = [
    ("empty", None),
    ("unwatched", Some(15.0)),
    ("owner, exact cgroup", Some(200.0)),
    ("owner, by ancestor", Some(350.0)),
    ("owner, by two in turn", Some(350.0)),
    ("foreign", None),
    ("foreign, two in turn", None),
];

/// Passes a byte to a second process and takes it back, until killed; the second one ends then. `other`: the second one's cgroup.
#[allow(clippy::zombie_processes, reason = "it ends by being killed, and init takes the child")]
fn ping(other: &str) {
    let mut pong = Command::new("sh")
        .args(["-c", "echo $$ > \"$1\"/cgroup.procs && exec \"$2\" pong", "sh", other])
        .arg(env::current_exe().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, mut from) = (pong.stdin.take().unwrap(), pong.stdout.take().unwrap());
    let mut byte = [0];
    loop {
        to.write_all(&byte).unwrap();
        from.read_exact(&mut byte).unwrap();
    }
}

/// Ends when the first process does.
fn pong() {
    let (mut byte, mut from, mut to) = ([0], std::io::stdin(), std::io::stdout());
    while from.read_exact(&mut byte).is_ok() && to.write_all(&byte).is_ok() && to.flush().is_ok() {}
}

fn start(first: &Cgroup, second: &Cgroup) -> Process {
    let mut me = Command::new(env::current_exe().unwrap());
    me.arg("ping").arg(&second.path);
    let pair = support::start(&mut me, Some(first), "0");
    sleep(Duration::from_millis(150));
    pair
}

/// Both programs, loaded anew for each round: where the JIT puts a program is worth some 10 ns.
struct Bench {
    probe: BpfProbe,
    empty: Ebpf,
}

impl Bench {
    fn load() -> Self {
        let mut probe = BpfProbe::load().unwrap();
        probe.detach_switch();
        let mut bench = Self { probe, empty: Ebpf::load(OBJECT).unwrap() };
        bench.empty().load("sched_switch", &Btf::from_sys_fs().unwrap()).unwrap();
        bench
    }

    fn empty(&mut self) -> &mut BtfTracePoint {
        self.empty.program_mut("empty").unwrap().try_into().unwrap()
    }

    /// ns a run of the program that `name` says, over `time`.
    fn measure(&mut self, name: &str, watched: &[Watched], time: Duration) -> f64 {
        let (runs, spent) = if name == "empty" {
            let link = self.empty().attach().unwrap();
            let before = self.empty().info().unwrap();
            sleep(time);
            let after = self.empty().info().unwrap();
            self.empty().detach(link).unwrap();
            (after.run_count() - before.run_count(), after.run_time().saturating_sub(before.run_time()))
        } else {
            self.probe.configure(watched).unwrap();
            self.probe.attach_switch().unwrap();
            let [before, ..] = self.probe.cost().unwrap();
            sleep(time);
            let [after, ..] = self.probe.cost().unwrap();
            self.probe.detach_switch();
            (after.runs - before.runs, after.time.saturating_sub(before.time))
        };
        assert!(runs > 1000, "the pair does not play: {runs} runs");
        #[allow(clippy::cast_precision_loss, reason = "counts of seconds fit into 52 bits")]
        let ns = spent.as_nanos() as f64 / runs as f64;
        ns
    }
}

fn bench(rounds: usize, time: Duration) -> Vec<Vec<f64>> {
    let _statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime).unwrap();
    let owner = Cgroup::new("owner");
    let (a, b) = (owner.child("a"), owner.child("b"));
    let (x, y) = (Cgroup::new("x"), Cgroup::new("y"));
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let all = [owner.watched(online.trim(), 1)];
    let mut results = vec![Vec::new(); MODES.len()];
    for round in 0..rounds {
        let mut bench = Bench::load();
        for ((name, _), into) in MODES.iter().zip(&mut results) {
            let (watched, first, second): (&[Watched], _, _) = match *name {
                "empty" | "unwatched" => (&[], &owner, &owner),
                "owner, exact cgroup" => (&all, &owner, &owner),
                "owner, by ancestor" => (&all, &a, &a),
                "owner, by two in turn" => (&all, &a, &b),
                "foreign" => (&all, &x, &x),
                _ => (&all, &x, &y),
            };
            let _pair = start(first, second);
            into.push(bench.measure(name, watched, time));
        }
        eprint!("\rround {} of {rounds}", round + 1);
    }
    eprintln!();
    results
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("ping") => ping(&args[1]),
        Some("pong") => {
            pong();
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    if let Some(why) = missing() {
        skip("switch_cost", &why);
        return ExitCode::SUCCESS;
    }
    let numbers: Vec<u64> = args.iter().filter_map(|a| a.parse().ok()).collect();
    let rounds = numbers.first().map_or(9, |n| usize::try_from(*n).unwrap());
    let results = bench(rounds, Duration::from_millis(numbers.get(1).copied().unwrap_or(1000)));
    report(results, args.iter().any(|a| a == "--check"))
}

fn report(mut results: Vec<Vec<f64>>, check: bool) -> ExitCode {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    println!("kernel {}, {} rounds, ns a run", kernel.trim(), results[0].len());
    println!(
        "{:<24} {:>7} {:>7} {:>7}  {:>10} {:>6}",
        "program", "min", "median", "max", "over empty", "goal"
    );
    let mut empty = 0.0;
    let mut ok = true;
    for ((name, goal), ns) in MODES.iter().zip(&mut results) {
        ns.sort_by(f64::total_cmp);
        let median = ns[ns.len() / 2];
        if *name == "empty" {
            empty = median;
        }
        let over = median - empty;
        ok &= goal.is_none_or(|g| over <= g);
        let goal = goal.map_or(String::new(), |g| format!("{g:.0}"));
        println!(
            "{name:<24} {:>7.1} {median:>7.1} {:>7.1}  {over:>+10.1} {goal:>6}",
            ns[0],
            ns[ns.len() - 1]
        );
    }
    if check && !ok {
        println!("over a goal");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
