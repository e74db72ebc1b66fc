//! A machine and a cgroup tree in a temporary directory, and the agent on it.
#![allow(dead_code, reason = "each user takes the part that it needs")]
#![allow(clippy::unwrap_used, reason = "test code: a panic is a failure")]

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

pub(crate) const TRUEPIN: &str = env!("CARGO_BIN_EXE_truepin");

/// A machine of 8 CPUs in 2 nodes, and a cgroup tree with two services.
pub(crate) struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let machine = Self { dir: tempfile::tempdir().unwrap() };
        let put = |path: String, text: &str| {
            let path = machine.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        let cpu = "sys/devices/system/cpu";
        for list in ["online", "present", "possible"] {
            put(format!("{cpu}/{list}"), "0-7");
        }
        for n in 0..8 {
            let node = n / 4;
            let (core, package) =
                (format!("{}-{}", n / 2 * 2, n / 2 * 2 + 1), format!("{}-{}", node * 4, node * 4 + 3));
            for (file, text) in [
                ("topology/physical_package_id", node.to_string()),
                ("topology/core_id", (n / 2 % 2).to_string()),
                ("topology/thread_siblings_list", core.clone()),
                ("topology/core_cpus_list", core),
                ("topology/package_cpus_list", package.clone()),
                ("topology/core_siblings_list", package.clone()),
                ("cache/index3/level", "3".into()),
                ("cache/index3/type", "Unified".into()),
                ("cache/index3/shared_cpu_list", package),
            ] {
                put(format!("{cpu}/cpu{n}/{file}"), &text);
            }
        }
        for node in 0..2 {
            let dir = format!("sys/devices/system/node/node{node}");
            put(format!("{dir}/cpulist"), if node == 0 { "0-3" } else { "4-7" });
            put(format!("{dir}/distance"), if node == 0 { "10 21" } else { "21 10" });
        }
        put("sys/devices/system/node/online".into(), "0-1");
        for (cgroup, enabled, cpus) in [
            ("", "cpuset", ""),
            ("system.slice", "cpuset", ""),
            ("system.slice/db", "", ""),
            ("system.slice/web", "", "2-7"),
        ] {
            let file = |name: &str| format!("cgroup/{cgroup}/{name}");
            put(file("cgroup.controllers"), "cpuset cpu");
            put(file("cgroup.subtree_control"), enabled);
            put(file("cgroup.procs"), "");
            fs::write(machine.dir.path().join(file("cgroup.procs")), "").unwrap();
            put(file("cpuset.cpus.effective"), "0-7");
            put(file("cpuset.mems.effective"), "0-1");
            if cgroup.is_empty() {
                continue;
            }
            put(file("cgroup.type"), "domain");
            put(file("cgroup.events"), "populated 1\nfrozen 0");
            put(file("cpuset.cpus"), cpus);
            put(file("cpuset.mems"), "");
            put(file("cpuset.cpus.exclusive"), "");
            put(file("cpuset.cpus.exclusive.effective"), "");
            put(file("cpuset.cpus.partition"), "member");
        }
        machine
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(TRUEPIN);
        command.args(args).env_clear();
        for (name, path) in [
            ("TRUEPIN_CGROUP_ROOT", "cgroup"),
            ("TRUEPIN_SYSFS_ROOT", ""),
            ("TRUEPIN_STATE", "state/checkpoint.json"),
            ("TRUEPIN_SOCKET", "run/truepin.sock"),
            ("TRUEPIN_CONFIG", "config.toml"),
        ] {
            command.env(name, self.path(path));
        }
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> (i32, Value) {
        let out = self.run(&[args, &["-o", "json"]].concat());
        let document = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&out.stderr).into_owned()));
        (out.status.code().unwrap(), document)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    pub(crate) fn agent(&self, config: &str) -> Agent {
        self.agent_with(config, &[])
    }

    /// With more of its places than usual; paths are relative to the machine.
    pub(crate) fn agent_with(&self, config: &str, places: &[(&str, &str)]) -> Agent {
        fs::write(self.path("config.toml"), config).unwrap();
        let log = fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let mut command = self.command(&["agent"]);
        command.envs(places.iter().map(|(name, path)| (name, self.path(path))));
        let mut child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        wait("the agent's answer", || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", fs::read_to_string(self.path("log")).unwrap());
            self.run(&["status"]).status.success()
        });
        Agent(child)
    }

    /// The cgroups of a container, with all above it.
    pub(crate) fn container(&self, uid: &str, id: &str) {
        for dir in ["kubepods".to_owned(), format!("kubepods/pod{uid}"), format!("kubepods/pod{uid}/{id}")] {
            if !self.path(&format!("cgroup/{dir}")).exists() {
                self.cgroup(&dir, "");
            }
        }
    }

    /// A cgroup of somebody else's.
    pub(crate) fn cgroup(&self, path: &str, cpus: &str) {
        make_cgroup(&self.path("made"), &self.path(&format!("cgroup/{path}")), cpus);
    }

    pub(crate) fn file(&self, cgroup: &str, name: &str) -> String {
        fs::read_to_string(self.path(&format!("cgroup/{cgroup}/{name}"))).unwrap().trim().to_owned()
    }
}

/// All files at once, as the kernel does (`kernfs_activate` at the end of `cgroup_mkdir`): an agent that comes between would
/// find a cgroup without a cpuset, and what it writes would be lost. `made` is a path beside the tree.
pub(crate) fn make_cgroup(made: &Path, at: &Path, cpus: &str) {
    fs::create_dir(made).unwrap();
    for (file, text) in [
        ("cgroup.controllers", "cpuset cpu"),
        ("cgroup.subtree_control", "cpuset"),
        ("cgroup.type", "domain"),
        ("cgroup.events", "populated 1\nfrozen 0"),
        ("cpuset.cpus", cpus),
        ("cpuset.mems", ""),
        ("cpuset.cpus.effective", "0-7"),
        ("cpuset.mems.effective", "0-1"),
        ("cpuset.cpus.exclusive", ""),
        ("cpuset.cpus.exclusive.effective", ""),
        ("cpuset.cpus.partition", "member"),
    ] {
        fs::write(made.join(file), format!("{text}\n")).unwrap();
    }
    fs::write(made.join("cgroup.procs"), "").unwrap();
    fs::rename(made, at).unwrap();
}

pub(crate) struct Agent(pub(crate) Child);

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

pub(crate) fn wait(what: &str, mut look: impl FnMut() -> bool) {
    let start = Instant::now();
    while !look() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The socket lets root alone write.
pub(crate) fn is_root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: {test}: needs root");
    }
    root
}
