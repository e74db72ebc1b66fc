mod archives;
mod fuzz;

use super::*;
use std::{fs, os::unix::fs::symlink, path::Path};
use truepin::topology::Level;

/// A tree of two packages with two nodes each; in each node one L3 over two cores of two threads, siblings 8 apart.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for name in ["online", "present", "possible"] {
            tree.write(&format!("cpu/{name}"), "0-15\n");
        }
        tree.write("cpu/isolated", "\n");
        tree.write("cpu/nohz_full", "(null)\n");
        for cpu in 0..16 {
            let (core, node) = (cpu % 8, cpu % 8 / 2);
            let package = node / 2 * 4;
            let t = format!("cpu/cpu{cpu}/topology");
            tree.write(&format!("{t}/core_cpus_list"), &format!("{core},{}\n", core + 8));
            tree.write(&format!("{t}/package_cpus_list"), &span(package, 4));
            tree.write(&format!("{t}/physical_package_id"), &format!("{}\n", node / 2));
            tree.cache(cpu, 0, 1, "Data", &format!("{core},{}", core + 8));
            tree.cache(cpu, 1, 1, "Instruction", &format!("{core},{}", core + 8));
            tree.cache(cpu, 2, 2, "Unified", &format!("{core},{}", core + 8));
            tree.cache(cpu, 3, 3, "Unified", &span(node * 2, 2));
        }
        for node in 0..4 {
            tree.write(&format!("node/node{node}/cpulist"), &span(node * 2, 2));
            tree.write(&format!("node/node{node}/distance"), "10 12 32 32\n");
            tree.write(&format!("node/node{node}/meminfo"), &format!("Node {node} MemTotal:  1024 kB\nx"));
        }
        tree
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join("sys/devices/system").join(file)
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn cache(&self, cpu: u32, index: u32, level: u32, kind: &str, list: &str) {
        let dir = format!("cpu/cpu{cpu}/cache/index{index}");
        self.write(&format!("{dir}/level"), &format!("{level}\n"));
        self.write(&format!("{dir}/type"), &format!("{kind}\n"));
        self.write(&format!("{dir}/shared_cpu_list"), &format!("{list}\n"));
    }

    fn read(&self) -> CpuTopology {
        topology(self.0.path()).unwrap()
    }

    fn refusal(&self) -> String {
        let error = topology(self.0.path()).unwrap_err();
        std::iter::successors(std::error::Error::source(&error), |e| e.source())
            .fold(error.to_string(), |text, e| format!("{text}: {e}"))
    }
}

/// Both threads of `count` cores.
fn span(first: u32, count: u32) -> String {
    format!("{first}-{},{}-{}\n", first + count - 1, first + 8, first + count + 7)
}

fn groups(topology: &CpuTopology, level: Level) -> Vec<String> {
    topology.groups(level).iter().map(|g| g.cpus.to_string()).collect()
}

#[test]
fn a_sound_tree() {
    let t = Tree::new().read();
    assert_eq!(groups(&t, Level::Package), ["0-3,8-11", "4-7,12-15"]);
    assert_eq!(groups(&t, Level::L3), ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]);
    assert_eq!((groups(&t, Level::Core).len(), groups(&t, Level::L2).len(), t.llcs().len()), (8, 8, 4));
    assert_eq!(t.nodes()[3].memory_bytes, Some(1 << 20));
    assert_eq!(t.distance(NodeId(0), NodeId(1)), 12);
    assert_eq!((t.nohz_full(), t.isolated()), (Some(&CpuSet::new()), Some(&CpuSet::new())));
    assert_eq!(t.oddities(), [""; 0]);
}

#[test]
fn a_thread_is_not_opened_when_its_core_was() {
    let tree = Tree::new();
    for cpu in 8..16 {
        fs::remove_dir_all(tree.path(&format!("cpu/cpu{cpu}"))).unwrap();
    }
    assert_eq!(tree.read(), Tree::new().read());
}

#[test]
fn files_that_are_not_on_every_cpu() {
    // A later CPU of the package has its core under the older name alone.
    let tree = Tree::new();
    fs::remove_file(tree.path("cpu/cpu2/topology/core_cpus_list")).unwrap();
    tree.write("cpu/cpu2/topology/thread_siblings_list", "2,10\n");
    assert_eq!(tree.read(), Tree::new().read());
    // Caches at other indexes than on the CPU before: no L1 instruction cache, no L2.
    let tree = Tree::new();
    for cpu in [1, 9] {
        fs::remove_dir_all(tree.path(&format!("cpu/cpu{cpu}/cache"))).unwrap();
        tree.cache(cpu, 0, 1, "Data", "1,9");
        tree.cache(cpu, 1, 2, "Unified", "1,9");
        tree.cache(cpu, 2, 3, "Unified", &span(0, 2));
    }
    assert_eq!(tree.read(), Tree::new().read());
    for cpu in [2, 10] {
        fs::remove_dir_all(tree.path(&format!("cpu/cpu{cpu}/cache/index2"))).unwrap();
    }
    let t = tree.read();
    assert_eq!((t.groups(Level::L2).len(), t.group_of(Level::L2, CpuId(2))), (7, None));
    assert_eq!(groups(&t, Level::L3), groups(&Tree::new().read(), Level::L3));
    // An L3 that the CPU before did not have, which ends at another index.
    let tree = Tree::new();
    for cpu in [0, 1, 8, 9] {
        fs::remove_dir_all(tree.path(&format!("cpu/cpu{cpu}/cache/index3"))).unwrap();
    }
    assert_eq!(groups(&tree.read(), Level::L3), ["2-3,10-11", "4-5,12-13", "6-7,14-15"]);
}

#[test]
fn no_die_level_is_asked_for_once() {
    let tree = Tree::new();
    for cpu in 0..16 {
        tree.write(&format!("cpu/cpu{cpu}/topology/die_id"), "-1\n");
        tree.write(&format!("cpu/cpu{cpu}/topology/die_cpus_list"), &format!("{cpu}\n"));
    }
    assert_eq!(groups(&tree.read(), Level::Die), ["0-3,8-11", "4-7,12-15"]);
    // Were it asked of the second CPU, this would be an error.
    tree.write("cpu/cpu1/topology/die_id", "x\n");
    assert_eq!(groups(&tree.read(), Level::Die), ["0-3,8-11", "4-7,12-15"]);
}

#[test]
fn threads_of_one_core_with_caches_of_their_own() {
    let tree = Tree::new();
    for cpu in 0..16 {
        tree.cache(cpu, 2, 2, "Unified", &cpu.to_string());
    }
    assert_eq!(tree.read().groups(Level::L2).len(), 16);
}

#[test]
fn sets_that_contradict_each_other() {
    // Every list says the same wrong thing, the masks are right.
    let tree = Tree::new();
    for cpu in 0..16 {
        let dir = format!("cpu/cpu{cpu}/cache/index3");
        tree.write(&format!("{dir}/shared_cpu_list"), "0-1,8-9\n");
        tree.write(&format!("{dir}/shared_cpu_map"), &format!("0000,{:08x}\n", 0x0303 << (cpu % 8 / 2 * 2)));
    }
    let t = tree.read();
    assert_eq!(groups(&t, Level::L3), ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]);
    assert_eq!(t.oddities(), ["sets read from list files contradict each other"]);

    // The first CPU of a package is wrong in the only form there is: the others overrule it.
    let tree = Tree::new();
    tree.write("cpu/cpu4/topology/package_cpus_list", "0-15\n");
    let t = tree.read();
    assert_eq!(groups(&t, Level::Package), ["0-3,8-11", "4-7,12-15"]);
    assert!(t.oddities().iter().any(|o| o.contains("0-15")), "{:?}", t.oddities());
}

#[test]
fn what_may_be_missing() {
    let tree = Tree::new();
    for file in ["cpu/online", "cpu/present", "cpu/possible", "cpu/isolated", "cpu/nohz_full"] {
        fs::remove_file(tree.path(file)).unwrap();
    }
    for cpu in 0..16 {
        fs::remove_dir_all(tree.path(&format!("cpu/cpu{cpu}/cache"))).unwrap();
    }
    fs::remove_dir_all(tree.path("node")).unwrap();
    tree.write("cpu/cpu3/online", "0\n");
    tree.write("cpu/cpu4/online", "\n");
    let t = tree.read();
    assert_eq!((t.online().to_string(), t.offline().to_string()), ("0-2,4-15".into(), "3".into()));
    assert_eq!((t.present(), t.isolated(), t.nodes().len(), t.llcs().len()), (None, None, 0, 0));
    assert_eq!(t.cpus_without_node(), *t.online());

    let tree = Tree::new();
    fs::remove_file(tree.path("node/node1/cpulist")).unwrap();
    tree.write("node/node1/cpumap", "0000,00000c0c\n");
    fs::remove_file(tree.path("node/node2/cpulist")).unwrap();
    for cpu in [4, 5, 12, 13] {
        symlink("nowhere", tree.path(&format!("node/node2/cpu{cpu}"))).unwrap();
    }
    assert_eq!(tree.read(), Tree::new().read());
}

#[test]
fn a_list_as_long_as_a_page_is_not_trusted() {
    let tree = Tree::new();
    let cut = "0-1,8-9".to_owned() + &",0".repeat(2048);
    tree.write("node/node0/cpulist", &cut);
    tree.write("node/node0/cpumap", "00000303\n");
    assert_eq!(tree.read().nodes()[0].listed.to_string(), "0-1,8-9");
    tree.write("node/node0/cpumap", "00000003\n");
    assert_eq!(tree.read().nodes()[0].listed.to_string(), "0-1");
}

#[test]
fn refusals_name_file_and_value() {
    for (file, text, part) in [
        ("cpu/online", "0-x\n", "cpu/online: \"0-x\" is no list: \"0-x\" is not a number or a range"),
        ("cpu/cpu0/topology/core_cpus_list", "8-0\n", "topology/core_cpus_list: \"8-0\" is no list"),
        ("cpu/cpu0/topology/physical_package_id", "zero\n", "\"zero\" is not a number"),
        ("node/node1/distance", "10 far\n", "node1/distance: \"10 far\" is not a row of distances"),
        ("node/node1/meminfo", "Node 1 MemTotal: much kB\n", "\"much kB\" is not a size in kB"),
        ("cpu/cpu99999/online", "1\n", "\"cpu99999\" is not a number that a CPU or node can have"),
        ("cpu/online", "\n", "no CPU is online"),
    ] {
        let tree = Tree::new();
        tree.write(file, text);
        assert!(tree.refusal().contains(part), "{}", tree.refusal());
    }
    let tree = Tree::new();
    fs::remove_file(tree.path("node/node0/cpulist")).unwrap();
    tree.write("node/node0/cpumap", "0000g,1\n");
    assert!(tree.refusal().contains("node0/cpumap: \"0000g,1\" is not a mask"), "{}", tree.refusal());

    let nothing = tempfile::tempdir().unwrap();
    let error = topology(nothing.path()).unwrap_err();
    assert!(
        matches!(&error, SysfsError::Read { path, .. } if path.ends_with("sys/devices/system/cpu")),
        "{error}"
    );
}

/// A device folder with these files below `devices/pci0000:00/NAME`, linked from `class`.
fn add_device(root: &Path, class: &str, name: &str, files: &[(&str, &str)]) {
    let dir = root.join("sys/devices/pci0000:00").join(name);
    fs::create_dir_all(dir.join("child")).unwrap();
    for (file, text) in files {
        fs::write(dir.join(file), text).unwrap();
    }
    let link = root.join("sys").join(class);
    fs::create_dir_all(&link).unwrap();
    symlink(dir.join("child"), link.join(name)).unwrap();
}

#[test]
fn devices() {
    let tree = Tree::new();
    let (root, t) = (tree.0.path(), tree.read());
    add_device(root, "bus/pci/devices", "0000:17:00.0", &[("numa_node", "2\n")]);
    add_device(root, "class/net", "eth0", &[("numa_node", "-1\n"), ("local_cpulist", "0-3,8-11\n")]);
    add_device(root, "class/net", "eth1", &[("local_cpus", "0000ffff\n")]);
    add_device(root, "class/block", "sda", &[("numa_node", "7\n")]);

    let place = |name: &str| device(root, &t, name);
    assert_eq!(place("17:00.0").unwrap().nodes.to_string(), "2");
    assert_eq!(place("0000:17:00.0").unwrap().nodes.to_string(), "2");
    assert_eq!(place("eth0").unwrap().nodes.to_string(), "0-1");
    let nowhere = place("eth1").unwrap();
    assert_eq!((nowhere.nodes.is_empty(), nowhere.evidence), (true, Evidence::Nothing));
    assert!(matches!(place("/dev/sda"), Err(DeviceError::Node { node: 7, .. })));
    for name in ["", ".", ".."] {
        assert!(matches!(place(name), Err(DeviceError::Name { .. })), "{name:?}");
    }
    // A plain folder in the list, as some recorded trees have.
    fs::create_dir_all(root.join("sys/bus/pci/devices/0001:00:00.0")).unwrap();
    fs::write(root.join("sys/bus/pci/devices/0001:00:00.0/local_cpus"), "00000404\n").unwrap();
    assert_eq!(place("0001:00:00.0").unwrap().nodes.to_string(), "1");
    let unknown = place("eth9/../eth0").unwrap_err().to_string();
    assert!(unknown.starts_with("no device \"eth9/../eth0\": looked for "), "{unknown}");
}
