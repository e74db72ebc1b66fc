//! Writers of files in real cgroups of this machine, by the means that it has; and cgroups by their ids.
//!
//! Needs root and a cgroup2 mount; cpusets are not needed. A host may take no hook on the kernel's function: which means
//! are in force is said. What each of them does on kernels with cpusets is tested in guests.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

mod support;

use std::{collections::BTreeMap, fs, io::Write as _, process::Command};
use support::{Cgroup, cgroup2, skip, wait_for};
use truepin::{
    CgroupFile, CgroupId, CgroupPath,
    reconcile::{ForeignWrite, Interest, Sight},
};
use truepin_agent::{
    bpf::{BpfProbe, Hook},
    cgroup_id::Ids,
    procfs,
    writers::{Means, Writers},
};

fn missing() -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("not root".into());
    }
    cgroup2().is_none().then(|| "no cgroup2 file system is mounted".into())
}

/// Its path below the mount.
fn path(cgroup: &Cgroup) -> CgroupPath {
    cgroup.path.strip_prefix(cgroup2().unwrap()).unwrap().to_str().unwrap().parse().unwrap()
}

fn now_ns() -> u64 {
    procfs::now().unwrap().mono_ns
}

#[test]
fn a_cgroup_by_its_id() {
    if let Some(why) = missing() {
        return skip("writers_host::a_cgroup_by_its_id", &why);
    }
    let root = cgroup2().unwrap();
    let ids = Ids::new(&root).unwrap();
    let outer = Cgroup::new("ids");
    let inner = outer.child("a (deleted)");
    for cgroup in [&outer, &inner] {
        assert_eq!(ids.path(cgroup.id()).unwrap(), Some(path(cgroup)));
    }
    let of_root = CgroupId(std::os::unix::fs::MetadataExt::ino(&fs::metadata(&root).unwrap()));
    assert_eq!(ids.path(of_root).unwrap(), Some(CgroupPath::root()));
    let gone = inner.id();
    drop(inner);
    assert_eq!(ids.path(gone).unwrap(), None, "removed");
    assert_eq!(ids.path(CgroupId(u64::MAX)).unwrap(), None, "never there");
}

/// Which means this kernel leaves, and why not the better ones.
#[test]
fn the_best_means_that_this_kernel_takes() {
    if let Some(why) = support::missing() {
        return skip("writers_host::the_best_means_that_this_kernel_takes", &why);
    }
    let (_probe, hook, refused) = BpfProbe::load_with(&Hook::ALL).unwrap();
    let writers = Writers::new(&cgroup2().unwrap(), hook, true, refused);
    let mut err = std::io::stderr();
    writeln!(err, "writers are named by {:?}; not taken: {:?}", writers.means(), writers.refused()).unwrap();
    match writers.means().unwrap() {
        Means::Hook(Hook::Fexit) => assert!(writers.refused().is_empty()),
        Means::Hook(Hook::Kprobe) => assert!(writers.refused()[0].starts_with("fexit: ")),
        Means::Fanotify => {
            let [fexit, kprobe] = &writers.refused()[..] else { panic!("{:?}", writers.refused()) };
            assert!(fexit.starts_with("fexit: ") && kprobe.starts_with("kprobe: "), "{fexit} {kprobe}");
            assert!(fexit.len() < 120 && kprobe.len() < 120, "no verifier's log: {fexit} {kprobe}");
        }
    }
}

/// Says by which means it was not tried here.
fn not_by(means: Means, why: &str) {
    // Unlike `eprintln!`, this is shown of a test that passes.
    let mut err = std::io::stderr();
    writeln!(err, "writers_host::who_writes: not by {}: {why}", means.name()).unwrap();
}

fn told_of(means: Means, watched: &[(&Cgroup, Interest)]) -> Option<(Option<BpfProbe>, Writers)> {
    let root = cgroup2().unwrap();
    let (probe, hook) = match means {
        Means::Hook(hook) => {
            let (probe, hook, refused) = BpfProbe::load_with(&[hook]).unwrap();
            if hook.is_none() {
                not_by(means, &refused.join("; "));
                return None;
            }
            (Some(probe), hook)
        }
        Means::Fanotify => (None, None),
    };
    let mut writers = Writers::new(&root, hook, means == Means::Fanotify, Vec::new());
    assert_eq!(writers.means(), Some(means), "{:?}", writers.refused());
    let cgroups: BTreeMap<CgroupPath, (CgroupId, Interest)> =
        watched.iter().map(|(c, interest)| (path(c), (c.id(), *interest))).collect();
    assert!(writers.watch(cgroups.clone()) && !writers.watch(cgroups));
    Some((probe, writers))
}

/// `sh` that writes and is gone; its pid and whether that was taken.
fn shell(file: &std::path::Path, text: &str) -> (u32, bool) {
    let mut child =
        Command::new("sh").args(["-c", "echo \"$1\" > \"$2\"", "sh", text]).arg(file).spawn().unwrap();
    (child.id(), child.wait().unwrap().success())
}

/// While one of the cgroups cannot be watched, nothing is concluded from what is not told.
#[test]
fn a_cgroup_that_is_not_watched_makes_blind() {
    if let Some(why) = missing() {
        return skip("writers_host::a_cgroup_that_is_not_watched_makes_blind", &why);
    }
    let own = Cgroup::new("blind");
    let (_, mut writers) = told_of(Means::Fanotify, &[(&own, Interest::default())]).unwrap();
    let sight = |w: &mut Writers| (w.look(now_ns(), &mut Vec::new()), w.refused().len());
    assert_eq!(sight(&mut writers), (Sight::Trailing, 0));
    let good = BTreeMap::from([(path(&own), (own.id(), Interest::default()))]);
    let mut bad = good.clone();
    // No directory, and so nothing that can be marked.
    bad.insert("cgroup.procs".parse().unwrap(), (CgroupId(1), Interest::default()));
    for _ in 0..2 {
        writers.watch(bad.clone());
        assert_eq!(sight(&mut writers), (Sight::Blind, 1), "{:?}", writers.refused());
    }
    assert!(writers.watch(good));
    assert_eq!(sight(&mut writers), (Sight::Trailing, 0));
}

#[test]
fn who_writes() {
    if let Some(why) = missing() {
        return skip("writers_host::who_writes", &why);
    }
    for means in Means::ALL {
        let (own, tasks) = (Cgroup::new("own"), Cgroup::new("tasks"));
        let interest = |tasks| Interest { tasks, children: false };
        let watched = [(&own, interest(false)), (&tasks, interest(true))];
        if let Means::Hook(_) = means
            && let Some(why) = support::missing()
        {
            not_by(means, &why);
            continue;
        }
        let Some((_probe, mut writers)) = told_of(means, &watched) else { continue };
        let mut seen: Vec<ForeignWrite> = Vec::new();
        let before = now_ns();
        let sight = writers.look(before, &mut seen);
        assert_eq!(sight, if means == Means::Fanotify { Sight::Trailing } else { Sight::Whole });
        assert!(seen.is_empty());
        let control = |c: &Cgroup| c.path.join("cgroup.subtree_control");
        // Ours; refused; of no interest; tasks where they are of none.
        fs::write(control(&own), "\n").unwrap();
        assert!(!shell(&control(&own), "+nonsense").1);
        assert!(shell(&own.path.join("cgroup.max.depth"), "9").1);
        let mut victim = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = victim.id().to_string();
        assert!(shell(&own.path.join("cgroup.procs"), &pid).1);
        let (mover, taken) = shell(&tasks.path.join("cgroup.procs"), &pid);
        assert!(taken);
        victim.kill().unwrap();
        victim.wait().unwrap();
        wait_for("the write that is of interest", || {
            assert_ne!(writers.look(now_ns(), &mut seen), Sight::Blind);
            !seen.is_empty()
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        writers.look(now_ns(), &mut seen);
        let [write] = &seen[..] else { panic!("{means:?}: {seen:#?}") };
        assert_eq!((&write.path, write.file), (&path(&tasks), Some(CgroupFile::Procs)));
        let writer = write.writer.as_ref().unwrap();
        assert_eq!((writer.pid, writer.certain), (mover, means != Means::Fanotify));
        assert!(writer.ended_ns > before && writer.begun_ns <= writer.ended_ns, "{writer:?}");
        if writer.certain {
            assert_eq!((writer.comm.as_str(), writer.wrote.as_deref()), ("sh", Some(pid.as_str())));
        }
        assert_eq!(writers.lost(), 0);
    }
}
