//! Archives: what is recorded comes back, and nothing else; what is hostile is refused.

use super::*;
use crate::sysfs::{
    archive::{self, ArchiveError},
    capture::{Packing, capture},
};
use std::io::Write as _;
use truepin::topology::devices::place;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// An archive of these entries: a path that ends with `/` is a folder, a text `-> x` a link.
fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        // By hand, since the crate refuses to write what we must refuse to read.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        let (kind, size) = match text.strip_prefix("-> ") {
            Some(to) => {
                header.set_link_name(to).unwrap();
                (tar::EntryType::Symlink, 0)
            }
            None if path.ends_with('/') => (tar::EntryType::Directory, 0),
            None => (tar::EntryType::Regular, text.len()),
        };
        header.set_entry_type(kind);
        header.set_size(size as u64);
        header.set_cksum();
        builder.append(&header, &text.as_bytes()[..size]).unwrap();
    }
    builder.into_inner().unwrap()
}

const CPU: &str = "sys/devices/system/cpu";

fn read(bytes: &[u8]) -> Result<CpuTopology, String> {
    let archive = archive::read(bytes).map_err(|e| crate::store::chain(&e))?;
    let tree = crate::sysfs::Tree::archive(Path::new("a.tar"), archive);
    CpuTopology::assemble(&read_topology(&tree).map_err(|e| e.to_string())?).map_err(|e| e.to_string())
}

#[test]
fn a_machine_is_found_wherever_it_lies() {
    for above in ["", "./", "name/", "a/b/c/"] {
        let (online, cpu) = (format!("{above}{CPU}/online"), format!("{above}{CPU}/cpu3/"));
        let plain = tar(&[(&online, "3\n"), (&cpu, ""), ("other/file", "x"), ("name/proc/cpuinfo", "x")]);
        for bytes in
            [plain.clone(), gzip(&plain), zstd(&plain), [zstd(&plain[..600]), zstd(&plain[600..])].concat()]
        {
            assert!(archive::is_archive(&bytes));
            assert_eq!(read(&bytes).unwrap().online().to_string(), "3", "{above:?}");
        }
    }
}

#[test]
fn links_stay_inside() {
    let online = format!("{CPU}/online");
    for (to, found) in [
        ("real", true),
        ("../cpu/./real", true),
        ("/sys/devices/system/cpu/real", true),
        ("../../../../../../../sys/devices/system/cpu/real", true),
        ("online", false),
        ("/etc/passwd", false),
        ("real/", true),
    ] {
        let bytes = tar(&[
            (&online, &format!("-> {to}")),
            (&format!("{CPU}/real"), "1\n"),
            (&format!("{CPU}/cpu2/"), ""),
        ]);
        assert_eq!(read(&bytes).unwrap().online().to_string(), if found { "1" } else { "2" }, "{to}");
    }
}

#[test]
fn hostile_archives() {
    let online = format!("{CPU}/online");
    let deep = "a/".repeat(40) + "sys/";
    let long = "1".repeat(files::LONGEST + 1);
    for (entries, part) in [
        (vec![], "no folder `sys`"),
        (vec![("sys", "a file")], "no folder `sys`"),
        (vec![("/sys/devices/system/cpu/online", "0")], "an absolute path"),
        (vec![("a/../../sys/devices/system/cpu/online", "0")], "leads out of the archive"),
        (vec![(deep.as_str(), ""), (deep.as_str(), "")], "holds"),
        (vec![("a/sys/", ""), ("b/sys/", "")], "several machines: a/sys and b/sys"),
        (vec![(online.as_str(), "0"), (online.as_str(), "1")], "comes twice"),
        (vec![("sys/devices", "x"), (online.as_str(), "1")], "lies below something that is no folder"),
        (vec![(online.as_str(), long.as_str())], "more than 1048576 bytes in a file"),
    ] {
        if part == "holds" {
            assert!(archive::read(&tar(&entries)).is_ok(), "a folder may come twice, and deep");
            continue;
        }
        let error = archive::read(&tar(&entries)).map_err(|e| crate::store::chain(&e)).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    // A hard link, where a file is wanted.
    let mut bytes = tar(&[(online.as_str(), "")]);
    let mut header = tar::Header::from_byte_slice(&bytes[..512]).clone();
    header.set_entry_type(tar::EntryType::Link);
    header.set_cksum();
    bytes[..512].copy_from_slice(header.as_bytes());
    assert!(
        matches!(archive::read(&bytes), Err(ArchiveError::Path { why, .. }) if why.starts_with("neither"))
    );
}

#[test]
fn what_is_cut_off_or_damaged_is_no_machine() {
    let plain = tar(&[(&format!("{CPU}/online"), "0-3\n"), (&format!("{CPU}/present"), "0-3\n")]);
    for whole in [plain.clone(), gzip(&plain), zstd(&plain)] {
        for cut in 1..whole.len() {
            assert!(archive::read(&whole[..cut]).is_err(), "{cut} of {}", whole.len());
        }
    }
    // Checksums at the end of the stream, which no entry needs to be read for.
    for whole in [gzip(&plain), zstd(&plain)] {
        let (at, mut bytes) = (whole.len() - 6, whole.clone());
        let at = if bytes.starts_with(&[0x1f]) { at } else { bytes.len() - 1 };
        bytes[at] ^= 1;
        assert!(archive::read(&bytes).is_err());
    }
}

#[test]
fn a_bomb_is_defused() {
    // 600 MiB of zeros behind one entry, in 600 kB.
    let mut header = tar::Header::new_gnu();
    header.set_path("x").unwrap();
    header.set_size(600 << 20);
    header.set_cksum();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(header.as_bytes()).unwrap();
    let zeros = vec![0; 1 << 20];
    for _ in 0..600 {
        encoder.write_all(&zeros).unwrap();
    }
    let bytes = encoder.finish().unwrap();
    assert!(bytes.len() < 4 << 20);
    let error = crate::store::chain(&archive::read(&bytes).unwrap_err());
    assert!(error.contains("more than 536870912 decompressed bytes"), "{error}");
}

/// The sound tree with devices of every sort, and with what must not be recorded.
fn with_devices() -> Tree {
    let tree = Tree::new();
    let root = tree.0.path();
    add_device(
        root,
        "bus/pci/devices",
        "0000:17:00.0",
        &[("numa_node", "2\n"), ("serial_number", "SECRET-1\n")],
    );
    // `child` is what the link leads to: the class is asked there, the place above.
    fs::write(root.join("sys/devices/pci0000:00/0000:17:00.0/child/class"), "0x020000\n").unwrap();
    let add = |path: &str, class: &str, name: &str, files: &[(&str, &str)]| {
        let dir = root.join("sys/devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in files {
            fs::write(dir.join(file), text).unwrap();
        }
        fs::create_dir_all(root.join("sys").join(class)).unwrap();
        symlink(&dir, root.join("sys").join(class).join(name)).unwrap();
    };
    add(
        "pci0000:3a/0000:3a:00.0",
        "bus/pci/devices",
        "0000:3a:00.0",
        &[("numa_node", "-1\n"), ("class", "0x060400\n")],
    );
    add(
        "pci0000:3a/0000:3a:00.0/0000:3b:00.0",
        "bus/pci/devices",
        "0000:3b:00.0",
        &[("local_cpulist", "0-3,8-11\n"), ("class", "0x010802\n")],
    );
    add(
        "pci0000:3a/0000:3a:00.0/0000:3b:00.0/nvme/nvme0/nvme0n1",
        "class/block",
        "nvme0n1",
        &[("wwid", "SECRET-2\n"), ("serial", "SECRET-3\n")],
    );
    add("pci0000:3a/0000:3a:00.0/0000:3b:00.0/nvme/nvme0/nvme0n1/nvme0n1p1", "class/block", "nvme0n1p1", &[]);
    add("pci0000:3a/0000:3a:00.0/net/ens1", "class/net", "ens1", &[("address", "02:00:5e:10:00:01\n")]);
    add("pci0000:3a/0000:3a:00.0/net/enx02005e100001", "class/net", "enx02005e100001", &[]);
    add("LNXSYSTM:00/6f1c3f0e-5ec4-4e7a-8000-0000deadbeef/net/eth0", "class/net", "eth0", &[]);
    fs::write(root.join("sys/devices/LNXSYSTM:00/6f1c3f0e-5ec4-4e7a-8000-0000deadbeef/numa_node"), "3\n")
        .unwrap();
    add("virtual/net/lo", "class/net", "lo", &[]);
    symlink("../../devices/pci0000:99/0000:99:00.0/net/gone", root.join("sys/class/net/gone")).unwrap();
    fs::write(root.join("sys/class/net/bonding_masters"), "\n").unwrap();
    tree.write("node/node0/meminfo", "Node 0 MemTotal:  1024 kB\nNode 0 MemFree: 77 kB\n");
    tree.write("cpu/cpu0/topology/ppin", "0xSECRET4\n");
    tree.write("../../../proc/sys/kernel/hostname", "SECRET-5\n");
    tree
}

#[test]
fn devices_of_a_tree() {
    let tree = with_devices();
    let t = tree.read();
    let source = crate::sysfs::Tree::directory(tree.0.path());
    let (devices, oddities) = place(&t, &crate::sysfs::devices(&source, &t).unwrap());
    let shown: Vec<String> = devices
        .iter()
        .map(|d| {
            let cpus = d.local_cpus.as_ref().map_or("-".into(), ToString::to_string);
            format!(
                "{} {} {} {} {} {cpus}",
                d.kind,
                d.name,
                d.pci.as_deref().unwrap_or("-"),
                d.class.as_deref().unwrap_or("-"),
                d.nodes
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            "pci 0000:17:00.0 0000:17:00.0 0x020000 2 4-5,12-13",
            "pci 0000:3a:00.0 0000:3a:00.0 0x060400  -",
            "pci 0000:3b:00.0 0000:3b:00.0 0x010802 0-1 0-3,8-11",
            "net ens1 0000:3a:00.0 -  -",
            "net enx02005e100001 0000:3a:00.0 -  -",
            "net eth0 - - 3 6-7,14-15",
            "net gone 0000:99:00.0 -  -",
            "block nvme0n1 0000:3b:00.0 - 0-1 0-3,8-11",
        ]
    );
    assert_eq!(oddities, [""; 0]);
}

#[test]
fn what_is_recorded_comes_back_and_nothing_else() {
    let tree = with_devices();
    let source = crate::sysfs::Tree::directory(tree.0.path());
    let mut all = Vec::new();
    for packing in [Packing::Zstd, Packing::Gzip] {
        let record = capture(&source, packing).unwrap();
        assert_eq!((record.devices, record.left_out), (7, 1));
        assert_eq!(record.bytes, capture(&source, packing).unwrap().bytes, "same tree, same bytes");
        // `capture` compares too; here it is done by hand.
        let back = crate::sysfs::Tree::archive(Path::new("a"), archive::read(&record.bytes).unwrap());
        let t = CpuTopology::assemble(&read_topology(&back).unwrap()).unwrap();
        assert_eq!(t, tree.read());
        let placed = |tree| place(&t, &crate::sysfs::devices(tree, &t).unwrap()).0;
        let mut expected = placed(&source);
        expected.retain(|d| !d.name.starts_with("enx"));
        assert_eq!(placed(&back), expected);
        // A record of the record is the record.
        assert_eq!(capture(&back, packing).unwrap().bytes, record.bytes);
        all.push(record.bytes);
    }
    let mut plain = Vec::new();
    io::Read::read_to_end(&mut flate2::read::GzDecoder::new(all[1].as_slice()), &mut plain).unwrap();
    let text = String::from_utf8_lossy(&plain);
    assert!(text.contains("physical_package_id") && text.contains("MemTotal"));
    for secret in [
        "SECRET",
        "5e:10",
        "5e1000",
        "deadbeef",
        "MemFree",
        "ppin",
        "LNXSYSTM",
        "nvme0/",
        tree.0.path().to_str().unwrap(),
    ] {
        assert!(!text.contains(secret), "{secret}");
    }
}

#[test]
fn a_machine_that_cannot_be_read_is_not_recorded() {
    let tree = Tree::new();
    tree.write("cpu/cpu5/topology/physical_package_id", "much\n");
    tree.write("cpu/cpu4/topology/physical_package_id", "much\n");
    let source = crate::sysfs::Tree::directory(tree.0.path());
    assert!(capture(&source, Packing::Zstd).unwrap_err().to_string().contains("\"much\" is not a number"));
}
