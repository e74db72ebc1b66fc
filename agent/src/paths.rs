//! Where things are: defaults, environment, command line, in rising order of weight.

use std::path::{Path, PathBuf};

/// The paths in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// `/run/truepin/truepin.sock`, `TRUEPIN_SOCKET`, `--socket`
    pub socket: PathBuf,
    /// `/etc/truepin/config.toml`, `TRUEPIN_CONFIG`, `--config`
    pub config: PathBuf,
    /// Whether somebody named the configuration: then it must exist.
    pub config_named: bool,
    /// `/var/lib/truepin/checkpoint.json`, `TRUEPIN_STATE`
    pub state: PathBuf,
    /// `TRUEPIN_CGROUP_ROOT`: a cgroup2 mount or a copied tree; by default the mount is looked for.
    pub cgroup_root: Option<PathBuf>,
    /// `/run/systemd`, `TRUEPIN_SYSTEMD`: set, it is asked whatever the cgroup root is.
    pub systemd: Option<PathBuf>,
    /// `/`, `TRUEPIN_SYSFS_ROOT`: the directory that holds `sys/devices/system`.
    pub sysfs: PathBuf,
}

impl Paths {
    /// `socket` and `config` are from the command line.
    #[must_use]
    pub fn new(socket: Option<&Path>, config: Option<&Path>) -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let config = config.map(Path::to_owned).or_else(|| set("TRUEPIN_CONFIG"));
        Self {
            socket: socket
                .map(Path::to_owned)
                .or_else(|| set("TRUEPIN_SOCKET"))
                .unwrap_or_else(|| "/run/truepin/truepin.sock".into()),
            config_named: config.is_some(),
            config: config.unwrap_or_else(|| "/etc/truepin/config.toml".into()),
            state: set("TRUEPIN_STATE").unwrap_or_else(|| "/var/lib/truepin/checkpoint.json".into()),
            cgroup_root: set("TRUEPIN_CGROUP_ROOT"),
            systemd: set("TRUEPIN_SYSTEMD"),
            sysfs: set("TRUEPIN_SYSFS_ROOT").unwrap_or_else(|| "/".into()),
        }
    }
}
