//! Scenarios on a real kernel, and what they are written with.
//!
//! Problem: cpusets, partitions, NUMA and BPF must be tested on kernels of distributions, on a machine with packages
//! and nodes, without a container or a remote host. So a virtual machine boots one static binary, `truepin-guest`, as
//! PID 1. It mounts what is needed ([`init`]), runs the suite that the kernel command line names ([`suites`]), reports
//! on the second serial port ([`report`]) and powers off.
//!
//! # Writing a scenario
//!
//! A scenario is a function from [`Guest`] to [`Outcome`], listed in a suite:
//!
//! ```
//! use truepin_tests::guest::*;
//!
//! fn intruder_is_turned_away(guest: &mut Guest) -> Outcome {
//!     let agent = Agent::start("isolation = \"partition\"\nreserved = \"0\"")?;
//!     let owner = Workload::burn(2).comm("db").spawn()?;
//!     let (code, answer) = truepin_json(&["assign", "run/db", "--cpus", "2"])?;
//!     equal("exit code", code, 0)?;
//!     let cpus = owner.task().allowed()?;
//!     guest.say(format!("db has {cpus}: {answer}"));
//!     wait_until("db runs there", secs(5), || Ok(cpus.contains(owner.task().last_cpu()?)))?;
//!     anyhow::ensure!(agent.is_running(), "the agent died: {}", agent.log());
//!     Ok(())
//! }
//!
//! const SUITE: Suite = Suite {
//!     name: "example",
//!     about: "what it shows",
//!     style: Style::Tap,
//!     scenarios: &[Scenario::new("an intruder is turned away", intruder_is_turned_away).limit(60)],
//! };
//! ```
//!
//! - `?` takes any error; add words with [`anyhow::Context`]. [`skip`] leaves a scenario out and says what is missing.
//! - Every scenario starts on a clean machine ([`clean`]): no process but PID 1, no cgroup but `/driver` (where PID 1
//!   lives, so that the root cgroup is free of processes), every CPU online, no state or configuration of truepin.
//!   [`Workload`]s and [`Agent`]s die when dropped.
//! - A line of the kernel log that speaks of a defect (`WARNING:`, `BUG:`, …) fails the scenario in which it appeared,
//!   unless the scenario names it with [`Scenario::allow`].
//! - A panic fails its scenario alone. A scenario over its limit (default 60 s) fails, and so do all after it.
//! - TCG emulates all CPUs on one host core and rotates busy ones in long slices: count and order events, never time
//!   them, and keep at most two CPUs busy at once.

pub mod agent;
pub mod cgroup;
pub mod clean;
pub mod command;
pub mod facts;
pub mod host;
pub mod init;
pub mod kmsg;
pub mod machine;
pub mod observer;
pub mod owner;
pub mod report;
pub mod scenario;
pub mod suites;
pub mod task;
pub mod wait;
pub mod workload;

pub use agent::{Agent, http, truepin, truepin_json};
pub use cgroup::Cgroup;
pub use command::{Ran, run, run_for};
pub use observer::{Promise, When, observe};
pub use owner::RunOwner;
pub use report::Style;
pub use scenario::{Guest, Outcome, Scenario, Suite, equal, skip};
pub use task::Task;
pub use wait::{millis, secs, wait_for, wait_until};
pub use workload::{Program, Workload};
