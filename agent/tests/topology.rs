//! `truepin topology` from the command line: every kind of `--root`, a record and its way back, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

use serde_json::Value;
use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output},
};

fn truepin(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_truepin"));
    command.args(args).env("NO_COLOR", "1").env_remove("TRUEPIN_SYSFS_ROOT").output().unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = truepin(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["-o", "json"]].concat())).unwrap()
}

/// Exit code and stderr of what must fail.
fn refused(args: &[&str]) -> (i32, String) {
    let output = truepin(args);
    assert!(output.stdout.is_empty());
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// Two packages of two CPUs, a node over both; a network card near node 0.
fn tree(root: &Path) {
    let write = |file: &str, text: &str| {
        let path = root.join("sys").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("devices/system/cpu/online", "0-3\n");
    for cpu in 0..4 {
        let package = cpu / 2;
        let dir = format!("devices/system/cpu/cpu{cpu}/topology");
        write(&format!("{dir}/core_cpus_list"), &format!("{cpu}\n"));
        write(&format!("{dir}/package_cpus_list"), &format!("{}-{}\n", package * 2, package * 2 + 1));
        write(&format!("{dir}/physical_package_id"), &format!("{package}\n"));
    }
    write("devices/system/node/node0/cpulist", "0-2\n");
    write("devices/system/node/node1/cpulist", "3\n");
    write("devices/pci0000:17/0000:17:00.0/numa_node", "0\n");
    write("devices/pci0000:17/0000:17:00.0/class", "0x020000\n");
    fs::create_dir_all(root.join("sys/devices/pci0000:17/0000:17:00.0/net/eth0")).unwrap();
    for (class, to) in [("bus/pci/devices", "../../../"), ("class/net", "../../")] {
        let (name, path) = if class == "class/net" { ("eth0", "/net/eth0") } else { ("0000:17:00.0", "") };
        fs::create_dir_all(root.join("sys").join(class)).unwrap();
        let to = format!("{to}devices/pci0000:17/0000:17:00.0{path}");
        symlink(to, root.join("sys").join(class).join(name)).unwrap();
    }
}

#[test]
fn a_record_is_read_back_equal() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("machine");
    tree(&root);
    let root = root.to_str().unwrap();
    let expected = json(&["topology", "--devices", "--root", root]);
    assert_eq!((&expected["online"], &expected["cpus"][2]["node"]), (&"0-3".into(), &0.into()));
    assert_eq!(
        expected["devices"][1],
        serde_json::json!({"kind": "net", "name": "eth0", "pci": "0000:17:00.0", "class": null, "nodes": "0", "local_cpus": "0-2"})
    );
    for name in ["m.tar.zst", "m.tar.gz"] {
        let file = dir.path().join(name);
        let file = file.to_str().unwrap();
        let said = ok(&["topology", "capture", file, "--root", root]);
        assert!(said.starts_with(&format!("{file}: 17 files, 2 devices, ")), "{said}");
        assert_eq!(json(&["topology", "--devices", "--root", file]), expected);
        assert_eq!(ok(&["topology", "--root", file]), ok(&["topology", "--root", root]));
        // From a record as from the machine, and over a file that is there.
        let first = fs::read(file).unwrap();
        ok(&["topology", "capture", file, "--root", file]);
        assert_eq!(fs::read(file).unwrap(), first);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is left beside them");
    let table = ok(&["topology", "--devices", "--root", root]);
    assert!(table.contains("\nnet eth0          0000:17:00.0  -         0      0-2\n"), "{table}");
    assert!(json(&["topology", "--root", root]).get("devices").is_none(), "not asked for, not read");
}

#[test]
fn this_host_is_recorded_without_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("here.tar.gz");
    let file = file.to_str().unwrap();
    ok(&["topology", "capture", file]);
    let here = json(&["topology", "--devices"]);
    let mut there = json(&["topology", "--devices", "--root", file]);
    // Interfaces that are named by their MAC address are left out, and only they.
    let named = |d: &Value| !d["name"].as_str().unwrap().starts_with("enx");
    let kept: Vec<Value> = here["devices"].as_array().unwrap().iter().filter(|d| named(d)).cloned().collect();
    assert_eq!(there["devices"].as_array().unwrap(), &kept);
    there["devices"] = here["devices"].clone();
    assert_eq!(there, here);
    let unpacked = Command::new("tar").args(["-xOzf", file]).output().unwrap();
    let listed = Command::new("tar").args(["-tzf", file]).output().unwrap();
    let text = String::from_utf8_lossy(&[unpacked.stdout, listed.stdout].concat()).into_owned();
    assert!(text.contains("sys/devices/system/cpu/online"));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert!(host.trim().len() < 4 || !text.contains(host.trim()));
    for interface in fs::read_dir("/sys/class/net").unwrap() {
        let mac = fs::read_to_string(interface.unwrap().path().join("address")).unwrap_or_default();
        assert!(mac.trim().is_empty() || !text.contains(mac.trim()), "{mac}");
    }
}

const XML: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0"><object type="Machine" cpuset="0xf">
<object type="Package" os_index="0" cpuset="0xf"><object type="NUMANode" os_index="0" cpuset="0x3"/><object type="NUMANode" os_index="1" cpuset="0xc"/>
<object type="Core" os_index="0" cpuset="0x3"><object type="PU" os_index="0"/><object type="PU" os_index="1"/></object>
<object type="Core" os_index="1" cpuset="0xc"><object type="PU" os_index="2"/><object type="PU" os_index="3"/></object></object></object></topology>"#;
const JSON: &str = r#"{"num_cores":4,"topology":[
{"node_id":0,"memory":1024,"cores":[{"core_id":0,"thread_ids":[0,1],"socket_id":0}]},
{"node_id":1,"memory":1024,"cores":[{"core_id":1,"thread_ids":[2,3],"socket_id":0}]}]}"#;

#[test]
fn xml_and_json_are_roots_too() {
    let dir = tempfile::tempdir().unwrap();
    // Known by what is in them.
    for (name, text) in [("a.xml", XML), ("b.json", JSON), ("c", XML)] {
        let file = dir.path().join(name);
        fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let t = json(&["topology", "--root", file]);
        let nodes: Vec<&str> =
            t["nodes"].as_array().unwrap().iter().map(|n| n["cpus"].as_str().unwrap()).collect();
        assert_eq!(
            (nodes, &t["cpus"][3]["core"], &t["present"]),
            (vec!["0-1", "2-3"], &2.into(), &Value::Null),
            "{name}"
        );
        // Other commands that judge a machine take it as well.
        let kubelet = dir.path().join("kubelet");
        fs::create_dir_all(&kubelet).unwrap();
        let output =
            truepin(&["import", "kubelet", "--dir", kubelet.to_str().unwrap(), "--root", file, "--dry-run"]);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let (code, error) = refused(&["topology", "capture", "x.tar.zst", "--root", file]);
        assert!(code == 2 && error.contains("has no files to record"), "{error}");
    }
    assert!(
        ok(&["topology", "--devices", "--root", dir.path().join("b.json").to_str().unwrap()])
            .contains("no devices are described")
    );
}

#[test]
fn refusals() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for (name, bytes, part) in [
        (
            "x.xml",
            &b"<topology><object type=\"PU\" os_index=\"x\"/></topology>"[..],
            "PU: os_index \"x\" is not the number of a CPU",
        ),
        ("x.json", b"{\"topology\":[]}", "the key \"topology\" is missing or holds no nodes"),
        ("x.tar.zst", &[0x28, 0xb5, 0x2f, 0xfd, 0, 0], "x.tar.zst: no readable archive: "),
        ("x.tar.gz", &[0x1f, 0x8b, 8, 0], "x.tar.gz: no readable archive: "),
        ("x.txt", b"hello", "x.txt is neither a tar archive nor hwloc XML nor cAdvisor's JSON"),
        ("empty", b"", "empty is neither"),
        ("x.bin", &[0xff, 0xfe], "x.bin is neither"),
    ] {
        fs::write(path(name), bytes).unwrap();
        let (code, error) = refused(&["topology", "--root", &path(name)]);
        assert!(code == 3 && error.starts_with("error: ") && error.contains(part), "{name}: {error}");
        assert!(
            error.contains(
                "\nhint: --root expects the directory that holds sys/devices/system/cpu, an archive"
            ),
            "{error}"
        );
    }
    let (code, error) = refused(&["topology", "--root", &path("nowhere")]);
    assert!(code == 3 && error.contains("nowhere: No such file"), "{error}");
    let (code, error) = refused(&["topology", "capture", &path("m.zip")]);
    assert!(code == 2 && error.contains("hint: name it .tar.zst or .tar.gz"), "{error}");
    let (code, error) = refused(&["topology", "capture", &path("no/such/dir/m.tar.gz")]);
    assert!(code == 3 && error.contains("cannot write"), "{error}");
    assert_eq!(refused(&["topology", "--devices", "capture", &path("m.tar.gz")]).0, 2);
}
