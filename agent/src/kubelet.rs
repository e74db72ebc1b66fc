//! A kubelet on this host that gives out CPUs itself.
//!
//! Problem: two managers of one node's CPUs undo each other. Whether a kubelet is one of them is said by its command line,
//! by its configuration, or by the state file that it keeps; a file that a kubelet of the past left behind says nothing.
//! Steps: find a process named `kubelet`; then its flags, the file that `--config` names, and its state. One that starts
//! later is noticed at the tick by what a kubelet makes anew when it starts: three calls of stat(2), and processes are
//! looked through only when one of these files has changed.
//! Source: kubelet 1.36 `cmd/kubelet/app/options`, `pkg/kubelet/apis/config/types.go`.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Where a kubelet keeps its state, unless `--root-dir` says otherwise.
pub const DIR: &str = "/var/lib/kubelet";

/// A kubelet whose CPU manager has the static policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Static {
    /// Its process.
    pub pid: u32,
    /// Its directory.
    pub dir: PathBuf,
    /// By which one knows.
    pub says: String,
}

/// Programs that have a kubelet inside. Its flags are theirs to pass on, its state is where it always is.
const EMBEDDED: [&str; 4] = ["k3s-server", "rke2", "kubelite", "microshift"];

/// The value of a flag, as `--flag=value` or `--flag value`; of a flag that is repeated the last one counts (pflag).
fn flag<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    args.iter().enumerate().rev().find_map(|(i, arg)| {
        let rest = arg.strip_prefix("--")?.strip_prefix(name)?;
        if rest.is_empty() { args.get(i + 1).map(String::as_str) } else { rest.strip_prefix('=') }
    })
}

/// The policy that a configuration names: YAML or JSON, of which one line is of interest.
fn configured(text: &str) -> Option<&str> {
    text.lines().flat_map(|l| l.split([',', '{', '}'])).find_map(|part| {
        let (key, value) = part.split_once(':')?;
        let key = key.trim().trim_matches(['"', '\'']);
        (key == "cpuManagerPolicy")
            .then(|| value.split('#').next().unwrap_or_default().trim().trim_matches(['"', '\'']))
    })
}

/// The live kubelet with the static policy. `proc` is where processes are (`/proc`), `root` what their paths are below
/// (`/`). What cannot be read says nothing.
#[must_use]
pub fn static_policy(proc: &Path, root: &Path) -> Option<Static> {
    let pids = fs::read_dir(proc).ok()?.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_kubelet =
        |pid: &u32| comm(proc, *pid).is_some_and(|c| c == "kubelet" || EMBEDDED.contains(&c.as_str()));
    pids.filter(is_kubelet).find_map(|pid| {
        let line = fs::read(proc.join(pid.to_string()).join("cmdline")).ok()?;
        let args: Vec<String> =
            line.split(|b| *b == 0).map(|a| String::from_utf8_lossy(a).into_owned()).collect();
        // In a container its paths are those of its own root.
        let own = proc.join(pid.to_string()).join("root");
        let inode = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        // readlink says "/" of any root; what it is shows by its inode.
        let root = if inode(&own).is_some_and(|i| inode(root) != Some(i)) { own.as_path() } else { root };
        let below = |path: &str| root.join(path.trim_start_matches('/'));
        let dir = below(flag(&args, "root-dir").unwrap_or(DIR));
        let says = says(&args, &dir, below)?;
        Some(Static { pid, dir, says })
    })
}

/// Below the kubelet's directory: sockets that it binds anew at every start (`cm/devicemanager`, `apis/podresources`), and
/// the state that one with the static policy keeps.
const SIGNS: [&str; 3] =
    ["pod-resources/kubelet.sock", "device-plugins/kubelet.sock", truepin::kubelet::CPU_FILE];

/// Notices a kubelet that begins to give out CPUs while truepin does. One with another `--root-dir` than [`DIR`] is not
/// noticed.
#[derive(Debug)]
pub struct Lookout {
    proc: PathBuf,
    root: PathBuf,
    /// Inode and time of change of each of [`SIGNS`].
    signs: [Option<(u64, i64, i64)>; SIGNS.len()],
    told: Option<u32>,
}

impl Lookout {
    /// `known` is a kubelet that was found before. `proc` and `root` as for [`static_policy`].
    #[must_use]
    pub fn new(proc: &Path, root: &Path, known: Option<&Static>) -> Self {
        let signs = signs(root);
        Self { proc: proc.into(), root: root.into(), signs, told: known.map(|k| k.pid) }
    }

    /// A kubelet with the static policy that was not there before.
    pub fn look(&mut self) -> Option<Static> {
        let signs = signs(&self.root);
        if signs == self.signs {
            return None;
        }
        self.signs = signs;
        let found = static_policy(&self.proc, &self.root);
        let pid = found.as_ref().map(|f| f.pid);
        let new = pid != self.told;
        self.told = pid;
        found.filter(|_| new)
    }
}

fn signs(root: &Path) -> [Option<(u64, i64, i64)>; SIGNS.len()] {
    let dir = root.join(DIR.trim_start_matches('/'));
    SIGNS.map(|sign| {
        let meta = fs::metadata(dir.join(sign)).ok()?;
        Some((meta.ino(), meta.ctime(), meta.ctime_nsec()))
    })
}

fn comm(proc: &Path, pid: u32) -> Option<String> {
    Some(fs::read_to_string(proc.join(pid.to_string()).join("comm")).ok()?.trim().to_owned())
}

fn says(args: &[String], dir: &Path, below: impl Fn(&str) -> PathBuf) -> Option<String> {
    if let Some(arg) =
        args.iter().find(|a| a.contains("kubelet-arg") && a.contains("cpu-manager-policy=static"))
    {
        return Some(format!("its command line: {arg}"));
    }
    // A flag outweighs the file.
    if let Some(policy) = flag(args, "cpu-manager-policy") {
        return (policy == "static").then(|| "its command line: --cpu-manager-policy=static".into());
    }
    if let Some(path) = flag(args, "config").map(below)
        && let Ok(text) = fs::read_to_string(&path)
        && let Some(policy) = configured(&text)
    {
        return (policy == "static").then(|| format!("{}: cpuManagerPolicy: static", path.display()));
    }
    // Drop-in folders and defaults of distributions: what it keeps is what it does.
    let state = dir.join(truepin::kubelet::CPU_FILE);
    let text = fs::read_to_string(&state).ok()?;
    let document: serde_json::Value = serde_json::from_str(&text).ok()?;
    (document.get("policyName")? == "static").then(|| format!("{}: policyName static", state.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_flag_configuration_and_state() {
        let yaml = "kind: KubeletConfiguration\ncpuManagerPolicy: static # here\n";
        let json = r#"{"kind":"KubeletConfiguration","cpuManagerPolicy":"static","maxPods":110}"#;
        let none = "cpuManagerPolicy: none\n";
        let state = r#"{"policyName":"static","defaultCpuSet":"0-1","checksum":1}"#;
        for (comm, args, config, kept, found) in [
            ("kubelet", vec!["kubelet", "--cpu-manager-policy=static"], "", "", Some("command line")),
            ("kubelet", vec!["kubelet", "--cpu-manager-policy", "static"], "", "", Some("command line")),
            ("kubelet", vec!["kubelet", "--config=/etc/k.yaml"], yaml, "", Some("cpuManagerPolicy")),
            ("kubelet", vec!["kubelet", "--config", "/etc/k.yaml"], json, "", Some("cpuManagerPolicy")),
            ("kubelet", vec!["kubelet"], "", state, Some("policyName")),
            ("kubelet", vec!["kubelet", "--config=/etc/k.yaml"], "maxPods: 1\n", state, Some("policyName")),
            ("kubelet", vec!["kubelet", "--config=/etc/k.yaml"], none, state, None),
            (
                "kubelet",
                vec!["kubelet", "--cpu-manager-policy=none", "--config=/etc/k.yaml"],
                yaml,
                state,
                None,
            ),
            ("kubelet", vec!["kubelet"], yaml, "", None),
            ("kubelet", vec!["kubelet"], "", "{", None),
            (
                "kubelet",
                vec!["kubelet", "--cpu-manager-policy=none", "--cpu-manager-policy=static"],
                "",
                "",
                Some("command line"),
            ),
            (
                "kubelet",
                vec!["kubelet", "--cpu-manager-policy=static", "--cpu-manager-policy=none"],
                "",
                "",
                None,
            ),
            (
                "k3s-server",
                vec!["k3s", "server", "--kubelet-arg=cpu-manager-policy=static"],
                "",
                "",
                Some("kubelet-arg"),
            ),
            ("kubelite", vec!["kubelite"], "", state, Some("policyName")),
            ("kubelite", vec!["kubelite"], "", "", None),
            ("other", vec!["kubelet", "--cpu-manager-policy=static"], yaml, state, None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let put = |path: &str, text: &str| {
                let path = dir.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            };
            put("proc/12/comm", &format!("{comm}\n"));
            std::os::unix::fs::symlink(dir.path(), dir.path().join("proc/12/root")).unwrap();
            put("proc/12/cmdline", &(args.join("\0") + "\0"));
            put("proc/self/comm", "x");
            put("etc/k.yaml", config);
            if !kept.is_empty() {
                put("var/lib/kubelet/cpu_manager_state", kept);
            }
            let owner = static_policy(&dir.path().join("proc"), dir.path());
            let says = owner.as_ref().map(|s| s.says.as_str());
            assert_eq!(says.is_some(), found.is_some(), "{args:?} {says:?}");
            if let (Some(says), Some(needle)) = (says, found) {
                assert!(says.contains(needle), "{says}");
                assert_eq!(owner.map(|s| s.pid), Some(12));
            }
        }
    }

    #[test]
    fn one_in_a_container_and_one_that_comes_later() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let state = "var/lib/kubelet/cpu_manager_state";
        put("proc/9/comm", "other\n");
        put(state, r#"{"policyName":"static"}"#);
        let mut lookout = Lookout::new(&dir.path().join("proc"), dir.path(), None);
        assert_eq!(lookout.look(), None, "left behind");
        put("proc/12/comm", "kubelet\n");
        put("proc/12/cmdline", "kubelet\0");
        assert_eq!(lookout.look(), None, "no sign has changed, so no process was looked at");
        put("var/lib/kubelet/pod-resources/kubelet.sock", "");
        assert_eq!(lookout.look().map(|s| s.pid), Some(12));
        put("var/lib/kubelet/device-plugins/kubelet.sock", "");
        assert_eq!(lookout.look(), None, "told once");
        // Another, in a container whose state says none, on a host where the one that is left behind says static.
        fs::remove_dir_all(dir.path().join("proc/12")).unwrap();
        put("proc/13/comm", "kubelet\n");
        put("proc/13/cmdline", "kubelet\0");
        put("inside/var/lib/kubelet/cpu_manager_state", r#"{"policyName":"none"}"#);
        std::os::unix::fs::symlink(dir.path().join("inside"), dir.path().join("proc/13/root")).unwrap();
        fs::remove_file(dir.path().join("var/lib/kubelet/device-plugins/kubelet.sock")).unwrap();
        assert_eq!(lookout.look(), None);
        put("inside/var/lib/kubelet/cpu_manager_state", r#"{"policyName":"static"}"#);
        put("var/lib/kubelet/device-plugins/kubelet.sock", "");
        assert_eq!(lookout.look().map(|s| s.pid), Some(13));
    }
}
