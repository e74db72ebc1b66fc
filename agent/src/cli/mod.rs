//! The command line: one file per subcommand.

mod agent;
mod ask;
mod assign;
mod checkpoint;
mod doctor;
mod import;
mod list;
mod output;
mod pods;
mod run;
mod shim;
mod status;
mod table;
mod topology;
mod verify;

use crate::paths::Paths;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use output::Failure;
use std::{ffi::OsString, path::PathBuf};
use truepin::request::{AlignmentPolicy, Isolation};

/// Exclusive, NUMA-aligned CPUs that the kernel enforces and eBPF proves.
#[derive(Debug, Parser)]
#[command(
    name = "truepin",
    version,
    max_term_width = 100,
    after_help = "Example:\n  truepin run --cpus 4 -- ./server\n  truepin verify"
)]
struct Cli {
    /// The agent's socket [default: /run/truepin/truepin.sock]
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The configuration [default: /etc/truepin/config.toml]
    #[arg(long, global = true, value_name = "PATH")]
    config: Option<PathBuf>,
    /// Say more on stderr; twice for every write to the kernel
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The daemon: assigns, enforces, repairs, judges
    #[command(
        after_help = "Example:\n  truepin agent --dry-run\n  truepin agent --mode audit --config ./audit.toml"
    )]
    Agent(agent::AgentArgs),
    /// Exclusive CPUs for one command
    #[command(
        after_help = "Example:\n  truepin run --cpus 4 --numa single-numa-node -- ./server --port 80\n\nThe command's exit status is passed on; 125 when truepin failed before it ran, 126 and 127 as env(1)."
    )]
    Run(run::RunArgs),
    /// Exclusive CPUs for an existing cgroup
    #[command(
        after_help = "Example:\n  truepin assign unit/db.service --cgroup /system.slice/db.service --cpus 4\n  truepin assign unit/db.service --cgroup /system.slice/db.service --cpus 4 --dry-run"
    )]
    Assign(assign::AssignArgs),
    /// Gives an owner's CPUs back
    #[command(after_help = "Example:\n  truepin release unit/db.service\n  truepin release --all --dry-run")]
    Release(assign::ReleaseArgs),
    /// CPUs for a pod, before it has containers
    #[command(
        after_help = "Example:\n  truepin admit pod.json\n\nThe pod: {\"uid\":\"…\",\"init\":[…],\"app\":[{\"n\":\"db\",\"req\":4000,\"lim\":4000,\"mreq\":1024,\"mlim\":1024}]}, CPUs in\nthousandths, memory in MiB. Containers of a Guaranteed pod that ask for whole CPUs get their own, all others share."
    )]
    Admit(pods::AdmitArgs),
    /// A pod is gone: its CPUs come free
    #[command(after_help = "Example:\n  truepin remove 5f1c3f0e-0000-4000-8000-0000deadbeef")]
    Remove(pods::RemoveArgs),
    /// A container was made for a pod: it gets the CPUs of its name
    #[command(
        after_help = "Example:\n  truepin container-created 0123456789abcdef… 5f1c3f0e-0000-4000-8000-0000deadbeef db"
    )]
    ContainerCreated(pods::CreatedArgs),
    /// Owners with their sets, modes and verdicts
    #[command(after_help = "Example:\n  truepin list\n  truepin list -o json")]
    List(Format),
    /// The agent: what is in force on this kernel, pools, findings, cost
    #[command(after_help = "Example:\n  truepin status")]
    Status(Format),
    /// The machine
    #[command(
        after_help = "Example:\n  truepin topology --devices\n  truepin topology capture node7.tar.zst\n  truepin topology --root node7.tar.zst -o json"
    )]
    Topology(topology::TopologyArgs),
    /// The durable record: show, verify, compare, export
    #[command(
        after_help = "Example:\n  truepin checkpoint show\n  truepin checkpoint verify\n  truepin checkpoint diff"
    )]
    Checkpoint(checkpoint::CheckpointArgs),
    /// Did the pinning hold? 0 held, 1 violated, 3 inconclusive
    #[command(after_help = "Example:\n  truepin verify run/db\n  truepin verify --for 10s -o json")]
    Verify(verify::VerifyArgs),
    /// What on this host helps or hinders, and what to do: 0 nothing is wrong, 1 problems, 3 cannot tell
    #[command(after_help = "Example:\n  truepin doctor\n  truepin doctor -o json")]
    Doctor(Format),
    /// What another manager left behind
    #[command(after_help = "Example:\n  truepin import kubelet --dry-run")]
    Import(import::ImportArgs),
    /// What another manager needs to go on
    #[command(after_help = "Example:\n  truepin export kubelet --to ./cpu_manager_state")]
    Export(import::ExportArgs),
    /// Waits for its CPUs, then becomes the command of `run`
    #[command(name = "__exec", hide = true)]
    Exec(shim::ExecArgs),
}

#[derive(Debug, Clone, Copy, Args)]
struct Format {
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Numa {
    None,
    BestEffort,
    Restricted,
    SingleNumaNode,
}

impl From<Numa> for AlignmentPolicy {
    fn from(numa: Numa) -> Self {
        match numa {
            Numa::None => Self::None,
            Numa::BestEffort => Self::BestEffort,
            Numa::Restricted => Self::Restricted,
            Numa::SingleNumaNode => Self::SingleNumaNode,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Isolate {
    /// A cpuset partition: the kernel keeps others out
    Partition,
    /// A partition without load balancing inside: threads stack on one CPU unless each pins itself
    Isolated,
    /// Disjoint cpuset.cpus everywhere: others are seen, not kept out
    Member,
}

/// What an owner may ask for, alike in `run` and `assign`.
#[derive(Debug, Args)]
struct Wanted {
    /// How many CPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cpus: u32,
    /// How near they must be to each other [default: as configured, else best-effort]
    #[arg(long, value_enum)]
    numa: Option<Numa>,
    /// Only whole cores: nobody else on a sibling thread
    #[arg(long)]
    whole_cores: bool,
    /// Near this device: PCI address, network interface or block device
    #[arg(long, value_name = "DEV")]
    near: Option<String>,
    /// Memory that must be free on the chosen nodes: bytes, or with K, M, G, T (powers of 1024). The cgroup takes memory
    /// from those nodes alone; under best-effort they may be more than the CPUs need
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// How exclusivity is to be had [default: as configured, else partition where the kernel can]
    #[arg(long, value_enum)]
    isolation: Option<Isolate>,
}

/// `4096`, `512M`, `1.5G`, `8GiB`.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size; expected bytes or e.g. 512M or 1.5G");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let power = match unit.strip_suffix("iB").unwrap_or(unit) {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    // Thousandths are enough, and exact.
    let mut part: String = part.chars().take(3).collect();
    while part.len() < 3 {
        part.push('0');
    }
    let part: u64 = part.parse().map_err(|_| wrong())?;
    let unit = 1_u64 << power;
    let bytes =
        whole.checked_mul(unit).and_then(|b| b.checked_add(unit / 1000 * part + unit % 1000 * part / 1000));
    bytes.filter(|b| *b > 0).ok_or_else(wrong)
}

impl Wanted {
    fn isolation(&self) -> Isolation {
        match self.isolation {
            None => Isolation::Auto,
            Some(Isolate::Partition) => Isolation::Partition,
            Some(Isolate::Isolated) => Isolation::Isolated,
            Some(Isolate::Member) => Isolation::Member,
        }
    }
}

/// Runs the command line; the exit code is the contract's.
#[must_use]
pub fn main() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to stdout with 0; everything else is usage.
            let code = if error.use_stderr() { 2 } else { 0 };
            let _ = error.print();
            // `run` promises 125 for failures of its own.
            let commands = Cli::command();
            let is_command = |a: &OsString| commands.get_subcommands().any(|c| c.get_name() == a.as_os_str());
            let is_run = std::env::args_os().skip(1).find(is_command).is_some_and(|a| a == "run");
            return if code == 2 && is_run { 125 } else { code };
        }
    };
    if let Command::Exec(args) = &cli.command {
        return shim::exec(args);
    }
    let daemon = matches!(cli.command, Command::Agent(_));
    output::log_to_stderr(cli.verbose, daemon);
    let paths = Paths::new(cli.socket.as_deref(), cli.config.as_deref());
    let result = match cli.command {
        Command::Agent(args) => agent::agent(&args, &paths),
        Command::Run(args) => return run::run(&args, &paths),
        Command::Assign(args) => assign::assign(&args, &paths),
        Command::Release(args) => assign::release(&args, &paths),
        Command::Admit(args) => pods::admit(&args, &paths),
        Command::Remove(args) => pods::remove(&args, &paths),
        Command::ContainerCreated(args) => pods::created(&args, &paths),
        Command::List(format) => list::list(format, &paths),
        Command::Status(format) => status::status(format, &paths),
        Command::Topology(args) => topology::topology(&args, &paths),
        Command::Checkpoint(args) => checkpoint::checkpoint(args, &paths),
        Command::Verify(args) => verify::verify(&args, &paths),
        Command::Doctor(format) => doctor::doctor(format, &paths),
        Command::Import(args) => import::import(&args, &paths),
        Command::Export(args) => import::export(&args, &paths),
        Command::Exec(_) => Ok(0),
    };
    result.unwrap_or_else(|failure: Failure| failure.print())
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("1", Ok(1)),
            ("4096", Ok(4096)),
            ("512M", Ok(512 << 20)),
            ("1.5G", Ok(3 << 29)),
            ("8GiB", Ok(8 << 30)),
            ("0.25K", Ok(256)),
            ("16777215T", Ok(16_777_215 << 40)),
        ] {
            assert_eq!(size(text), bytes, "{text}");
        }
        for text in
            ["", "0", "G", "-1", "1X", "1 G", "1.2.3G", "99999999T", "18446744073709551616", "1GB", ".5G"]
        {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
