//! A workload under `truepin run`, in the background.

use super::{
    agent::{TRUEPIN, http, truepin_json},
    cgroup::Cgroup,
    task::Task,
    wait::{secs, wait_for, wait_until},
    workload::Program,
};
use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    io::Read,
    process::{Child, Command, Stdio},
};
use truepin::CpuSet;

/// `truepin run`, and with it an owner; killed when dropped.
pub struct RunOwner {
    child: Child,
    name: String,
    cpus: CpuSet,
}

/// How `truepin run` ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code.
    pub code: i32,
    /// What it said.
    pub stderr: String,
}

impl RunOwner {
    /// Starts `truepin run --name NAME ARGS… -- PROGRAM` and waits until the agent shows the owner with a process.
    pub fn start(name: &str, args: &[&str], program: &Program) -> anyhow::Result<Self> {
        let mut child = Command::new(TRUEPIN)
            .args(["run", "--name", name])
            .args(args)
            .arg("--")
            .args(program.line()?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting truepin run")?;
        let cgroup = Cgroup::at(&format!("truepin.slice/run-{name}"));
        let shown = wait_for(&format!("run/{name} with a process"), secs(30), || {
            if let Some(status) = child.try_wait().context("waiting for truepin run")? {
                let mut text = String::new();
                if let Some(mut err) = child.stderr.take() {
                    err.read_to_string(&mut text)?;
                }
                anyhow::bail!("truepin run ended: {status}: {text}");
            }
            let (status, answer) = http("GET", &format!("/v1/owners/run/{name}"), None)?;
            Ok((status == 200 && cgroup.exists() && !cgroup.procs()?.is_empty()).then_some(answer))
        })?;
        let cpus = shown["cpus"].as_str().context("an owner without CPUs")?.parse()?;
        Ok(Self { child, name: name.into(), cpus })
    }

    /// Its exclusive set.
    #[must_use]
    pub fn cpus(&self) -> &CpuSet {
        &self.cpus
    }

    /// As in `run/NAME`.
    #[must_use]
    pub fn owner(&self) -> String {
        format!("run/{}", self.name)
    }

    /// Its cgroup.
    #[must_use]
    pub fn cgroup(&self) -> Cgroup {
        Cgroup::at(&format!("truepin.slice/run-{}", self.name))
    }

    /// The workload's process.
    pub fn task(&self) -> anyhow::Result<Task> {
        self.cgroup().procs()?.first().copied().map(Task).context("an owner without processes")
    }

    /// `truepin verify OWNER ARGS… -o json`: exit code and document.
    pub fn verify(&self, args: &[&str]) -> anyhow::Result<(i32, Value)> {
        let owner = self.owner();
        let all: Vec<&str> = ["verify", &owner].into_iter().chain(args.iter().copied()).collect();
        truepin_json(&all)
    }

    /// SIGTERM to `truepin run`, which passes it on; waits for its end.
    pub fn end(mut self) -> anyhow::Result<Ended> {
        Task(self.child.id().cast_signed()).signal(Signal::SIGTERM)?;
        self.wait()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> anyhow::Result<Ended> {
        let mut status = None;
        wait_until("the end of truepin run", secs(30), || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })?;
        let code = status.and_then(|s| s.code()).context("truepin run was killed")?;
        let mut stderr = String::new();
        if let Some(mut err) = self.child.stderr.take() {
            err.read_to_string(&mut stderr)?;
        }
        Ok(Ended { code, stderr })
    }
}

impl Drop for RunOwner {
    fn drop(&mut self) {
        // It may have ended; the machine is cleaned up afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
