//! What the committed object was built from: one implementation for the agent's build script, which refuses a stale
//! object, and for `ebpf/build.sh`, which compiles this file alone and records the answer.
//!
//! Problem: user-space builds embed a committed object, so a change of the kernel half could be forgotten.
//! Steps: hash the sources, manifests and scripts below `ebpf/`, and the versions and checksums that `Cargo.lock` gives
//! to the crates that the kernel half is made of; hash the object too, so that the two files cannot drift apart.
//! Invariant: the same tree gives the same text on every machine: names are sorted, paths are relative.
//!
//! FNV-1a finds forgetting, not forging; it needs no crate, so a build needs none for this.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// The object, below the repository's root.
pub(crate) const OBJECT: &str = "ebpf/prebuilt/truepin.bpf.o";
/// The text of [`describe`] from when it was built.
#[allow(dead_code, reason = "read by the build script, written by the shell")]
pub(crate) const RECORD: &str = "ebpf/prebuilt/truepin.bpf.hash";
/// The package that is built.
const ROOT_PACKAGE: &str = "truepin-ebpf";
/// Its one optional dependency is for user space, and never part of the object.
const WITHOUT_DEPENDENCIES: &str = "truepin-abi";

/// 128-bit FNV-1a.
struct Fnv(u128);

impl Fnv {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 ^ u128::from(*b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    /// Length first: two lists of parts never look alike.
    fn part(&mut self, bytes: &[u8]) {
        self.add(&(bytes.len() as u64).to_le_bytes());
        self.add(bytes);
    }
}

/// Two lines, `sources HASH` and `object HASH`, for the tree at `root`.
pub(crate) fn describe(root: &Path) -> Result<String, String> {
    let mut sources = Fnv::new();
    for path in files(root)? {
        sources.part(path.as_bytes());
        sources.part(&read(&root.join(&path))?);
    }
    let lock = root.join("Cargo.lock");
    let text = String::from_utf8(read(&lock)?).map_err(|e| format!("{}: {e}", lock.display()))?;
    for line in locked(&text)? {
        sources.part(line.as_bytes());
    }
    let mut object = Fnv::new();
    object.part(&read(&root.join(OBJECT))?);
    Ok(format!("sources {:032x}\nobject {:032x}\n", sources.0, object.0))
}

/// Relative paths of what the object is made from: `.rs`, `.toml` and `.sh` below `ebpf/`.
pub(crate) fn files(root: &Path) -> Result<BTreeSet<String>, String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![PathBuf::from("ebpf")];
    while let Some(folder) = folders.pop() {
        let at = root.join(&folder);
        for entry in fs::read_dir(&at).map_err(|e| format!("{}: {e}", at.display()))? {
            let entry = entry.map_err(|e| format!("{}: {e}", at.display()))?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().map_err(|e| format!("{}: {e}", path.display()))?;
            if kind.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "toml" || e == "sh") {
                found.insert(path.to_str().ok_or(format!("{}: not UTF-8", path.display()))?.to_owned());
            }
        }
    }
    Ok(found)
}

/// `name version checksum` of every package that the kernel half depends on, itself included.
fn locked(lock: &str) -> Result<BTreeSet<String>, String> {
    let mut packages: BTreeMap<&str, Vec<Package>> = BTreeMap::new();
    for text in lock.split("[[package]]").skip(1) {
        let package = Package::parse(text)?;
        packages.entry(package.name).or_default().push(package);
    }
    let mut lines = BTreeSet::new();
    let mut open = vec![ROOT_PACKAGE.to_owned()];
    while let Some(wanted) = open.pop() {
        // `name`, or `name version` where the lock file has several.
        let mut words = wanted.split(' ');
        let (name, version) = (words.next().unwrap_or_default(), words.next());
        let package = packages
            .get(name)
            .and_then(|all| all.iter().find(|p| version.is_none_or(|v| v == p.version)))
            .ok_or(format!("Cargo.lock: no package {wanted}"))?;
        let mut line = String::new();
        let _ = write!(line, "{name} {} {}", package.version, package.checksum);
        if lines.insert(line) && name != WITHOUT_DEPENDENCIES {
            open.extend(package.dependencies.iter().map(|d| (*d).to_owned()));
        }
    }
    Ok(lines)
}

/// One entry of `Cargo.lock`.
struct Package<'a> {
    name: &'a str,
    version: &'a str,
    checksum: &'a str,
    dependencies: Vec<&'a str>,
}

impl<'a> Package<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let value = |key: &str| {
            text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'))
        };
        let name = value("name").ok_or("Cargo.lock: a package without a name")?;
        let version = value("version").ok_or(format!("Cargo.lock: {name} has no version"))?;
        let list = text.split_once("dependencies = [").and_then(|(_, l)| l.split_once(']'));
        let dependencies = list.map_or(Vec::new(), |(l, _)| l.split('"').skip(1).step_by(2).collect());
        Ok(Self { name, version, checksum: value("checksum").unwrap_or("local"), dependencies })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Prints the description of the tree at the first argument.
#[allow(dead_code, reason = "the entry point when compiled alone; a build script uses the functions")]
fn main() -> Result<(), String> {
    let root = std::env::args_os().nth(1).ok_or("usage: hash ROOT")?;
    print!("{}", describe(Path::new(&root))?);
    Ok(())
}
