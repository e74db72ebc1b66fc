//! systemd as the owner of units' cgroups: its manager is played by a D-Bus server on a private socket, on a copied tree,
//! with the faults that the real one has. What the real one does with it is the guests' to show.
#![allow(clippy::unwrap_used, clippy::panic, reason = "test code: a panic is a failure")]

#[path = "support/machine.rs"]
mod machine;

use machine::{Machine, is_root, wait};
use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
    thread,
};
use truepin::{
    CpuSet,
    units::{from_bytes, to_bytes},
};
use zbus::{
    connection::Builder,
    interface,
    zvariant::{ObjectPath, OwnedObjectPath, OwnedValue},
};

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    None,
    /// `SetUnitProperties` is answered with an error.
    Refuses,
    /// The property has the value, the file does not get it.
    DoesNotWrite,
    /// `SetUnitProperties` is never answered.
    Hangs,
}

#[derive(Debug)]
struct World {
    /// By unit: its cgroup.
    units: BTreeMap<&'static str, &'static str>,
    /// `AllowedCPUs=`
    allowed: BTreeMap<String, CpuSet>,
    /// Calls that change something, in order.
    calls: Vec<String>,
    fault: Fault,
    cgroups: PathBuf,
    controls: PathBuf,
}

#[derive(Clone)]
struct Manager(Arc<Mutex<World>>);

fn object(unit: &str) -> String {
    let name: String = unit.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    format!("/org/freedesktop/systemd1/unit/{name}")
}

#[derive(zbus::DBusError, Debug)]
#[zbus(prefix = "org.freedesktop.systemd1")]
enum Refusal {
    #[zbus(error)]
    ZBus(zbus::Error),
    NoSuchUnit(String),
    PropertyReadOnly(String),
}

#[interface(name = "org.freedesktop.systemd1.Manager")]
impl Manager {
    fn get_unit(&self, name: &str) -> Result<OwnedObjectPath, Refusal> {
        let known = self.0.lock().unwrap().units.contains_key(name);
        let none = || Refusal::NoSuchUnit(format!("Unit {name} not loaded."));
        if known { Ok(ObjectPath::try_from(object(name)).unwrap().into()) } else { Err(none()) }
    }

    async fn set_unit_properties(
        &self,
        name: &str,
        runtime: bool,
        properties: Vec<(String, OwnedValue)>,
    ) -> Result<(), Refusal> {
        let fault = self.0.lock().unwrap().fault;
        match fault {
            Fault::Hangs => std::future::pending().await,
            Fault::Refuses => return Err(Refusal::PropertyReadOnly("not today".into())),
            Fault::None | Fault::DoesNotWrite => {}
        }
        let mut world = self.0.lock().unwrap();
        for (property, value) in properties {
            assert!(runtime && property == "AllowedCPUs");
            let set: CpuSet = from_bytes(&Vec::<u8>::try_from(value).unwrap()).unwrap();
            let dir = world.controls.join(format!("{name}.d"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("50-AllowedCPUs.conf"), format!("[Service]\nAllowedCPUs={set}\n")).unwrap();
            // An empty one leaves the file as it is.
            if fault == Fault::None && !set.is_empty() {
                let file = world.cgroups.join(world.units[name]).join("cpuset.cpus");
                fs::write(file, format!("{set}\n")).unwrap();
            }
            world.calls.push(format!("{name} AllowedCPUs={set}"));
            world.allowed.insert(name.into(), set);
        }
        Ok(())
    }

    fn reload(&self) {
        self.0.lock().unwrap().calls.push("reload".into());
    }
}

/// A unit's object, of whatever type: only its properties are read.
struct Unit(Arc<Mutex<World>>, &'static str);

#[interface(name = "org.freedesktop.systemd1.Service")]
impl Unit {
    #[zbus(property)]
    fn control_group(&self) -> String {
        format!("/{}", self.0.lock().unwrap().units[self.1])
    }

    #[zbus(property, name = "AllowedCPUs")]
    fn allowed_cpus(&self) -> Vec<u8> {
        self.0.lock().unwrap().allowed.get(self.1).map(to_bytes).unwrap_or_default()
    }
}

/// systemd with these units (services), at `TRUEPIN_SYSTEMD`.
struct Played {
    world: Arc<Mutex<World>>,
}

impl Played {
    fn new(m: &Machine, units: &[(&'static str, &'static str)]) -> Self {
        let run = m.path("systemd");
        fs::create_dir_all(&run).unwrap();
        let world = Arc::new(Mutex::new(World {
            units: units.iter().copied().collect(),
            allowed: BTreeMap::new(),
            calls: Vec::new(),
            fault: Fault::None,
            cgroups: m.path("cgroup"),
            controls: run.join("system.control"),
        }));
        let (ready, listens) = mpsc::channel();
        let served = world.clone();
        // It ends with the test's process.
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::bind(run.join("private")).unwrap();
                ready.send(()).unwrap();
                let mut open = Vec::new();
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let names: Vec<&'static str> = served.lock().unwrap().units.keys().copied().collect();
                    let mut builder =
                        Builder::unix_stream(stream).server(zbus::Guid::generate()).unwrap().p2p();
                    builder = builder.serve_at("/org/freedesktop/systemd1", Manager(served.clone())).unwrap();
                    for name in names {
                        builder = builder.serve_at(object(name), Unit(served.clone(), name)).unwrap();
                    }
                    open.extend(builder.build().await);
                }
            });
        });
        listens.recv().unwrap();
        Self { world }
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.world.lock().unwrap().calls)
    }

    fn allowed(&self, unit: &str) -> String {
        self.world.lock().unwrap().allowed.get(unit).map(ToString::to_string).unwrap_or_default()
    }
}

const MEMBER: &[&str] = &[
    "assign",
    "unit/db.service",
    "--cgroup",
    "system.slice/db.service",
    "--cpus",
    "2",
    "--isolation",
    "member",
];

/// A machine whose `system.slice/db.service` is a unit, and `system.slice/web` none.
fn machine() -> Machine {
    let m = Machine::new();
    fs::rename(m.path("cgroup/system.slice/db"), m.path("cgroup/system.slice/db.service")).unwrap();
    m
}

fn dry_run(m: &Machine, args: &[&str]) -> String {
    let out = m.run(&[args, &["--dry-run"]].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn db(m: &Machine) -> String {
    m.file("system.slice/db.service", "cpuset.cpus")
}

#[test]
fn a_units_list_is_written_by_systemd_and_put_back_with_its_drop_in() {
    if !is_root("a_units_list_is_written_by_systemd_and_put_back_with_its_drop_in") {
        return;
    }
    for earlier in [None, Some("[Service]\nAllowedCPUs=0-6\n")] {
        let m = machine();
        let systemd = Played::new(&m, &[("db.service", "system.slice/db.service")]);
        let drop_in = m.path("systemd/system.control/db.service.d/50-AllowedCPUs.conf");
        if let Some(text) = earlier {
            fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
            fs::write(&drop_in, text).unwrap();
            systemd.world.lock().unwrap().allowed.insert("db.service".into(), "0-6".parse().unwrap());
            fs::write(m.path("cgroup/system.slice/db.service/cpuset.cpus"), "0-6\n").unwrap();
        }
        let first = db(&m);
        let agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let foreseen = dry_run(&m, MEMBER);
        assert!(systemd.calls().is_empty() && db(&m) == first);
        let (code, owner) = m.json(MEMBER);
        assert_eq!((code, owner["mode"].as_str()), (0, Some("member")), "{owner}");
        let line = format!("systemctl set-property --runtime db.service AllowedCPUs={}\n", db(&m));
        assert!(foreseen.contains(&line), "{foreseen}");
        let cpus = owner["cpus"].as_str().unwrap().to_owned();
        assert_eq!((db(&m), systemd.allowed("db.service")), (cpus.clone(), cpus.clone()));
        assert_eq!(systemd.calls(), [format!("db.service AllowedCPUs={cpus}")]);
        assert!(drop_in.exists());
        let line = format!("/system.slice/db.service: {cpus:?} through systemd (AllowedCPUs of db.service)");
        assert!(m.log().contains(&line), "{}", m.log());

        // What was is known to the next agent, too.
        drop(agent);
        let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let foreseen = dry_run(&m, &["release", "--all"]);
        assert!(foreseen.contains("properties and drop-ins of db.service as they were"), "{foreseen}");
        assert!(systemd.calls().is_empty() && systemd.allowed("db.service") == cpus);
        let (code, released) = m.json(&["release", "--all"]);
        assert_eq!(code, 0, "{released}");
        wait("the drop-in", || fs::read_to_string(&drop_in).ok().as_deref() == earlier);
        assert_eq!((db(&m), systemd.allowed("db.service")), (first.clone(), first.clone()));
        let calls = systemd.calls();
        assert_eq!(calls.first(), Some(&format!("db.service AllowedCPUs={first}")), "{calls:?}");
        // Only where the drop-ins on disk are others than systemd knows.
        assert_eq!(calls.iter().any(|c| c == "reload"), earlier.is_none(), "{calls:?}");
        assert!(fs::read_to_string(m.path("state/systemd.json")).unwrap().contains("\"units\": {}"));
    }
}

#[test]
fn what_systemd_does_not_write_is_written_directly_and_told() {
    if !is_root("what_systemd_does_not_write_is_written_directly_and_told") {
        return;
    }
    for (fault, words) in [
        (Fault::Refuses, "not today"),
        (Fault::DoesNotWrite, "still reads"),
        (Fault::Hangs, "no answer within 2s"),
    ] {
        let m = machine();
        let systemd = Played::new(&m, &[("db.service", "system.slice/db.service")]);
        systemd.world.lock().unwrap().fault = fault;
        let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
        let (code, owner) = m.json(MEMBER);
        assert_eq!((code, owner["cpus"].as_str()), (0, Some(db(&m).as_str())), "{fault:?} {owner}");
        let (_, status) = m.json(&["status"]);
        let told: Vec<&str> = status["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|f| f["kind"] == "systemd")
            .map(|f| f["text"].as_str().unwrap())
            .collect();
        assert_eq!(told.len(), 1, "{fault:?} {status}");
        let list = db(&m);
        for part in [words, "db.service", &format!("AllowedCPUs={list}"), "was written directly instead"] {
            assert!(told[0].contains(part), "{fault:?} {part} {told:?}");
        }
        // A cgroup that is no unit's is nobody's concern.
        assert!(!told[0].contains("web"), "{told:?}");
    }
}

#[test]
fn nobody_there_is_told_and_the_file_written() {
    if !is_root("nobody_there_is_told_and_the_file_written") {
        return;
    }
    let m = machine();
    let _agent = m.agent_with("reserved = \"0-1\"", &[("TRUEPIN_SYSTEMD", "systemd")]);
    let (code, owner) = m.json(MEMBER);
    assert_eq!((code, owner["cpus"].as_str()), (0, Some(db(&m).as_str())), "{owner}");
    let (_, status) = m.json(&["status"]);
    assert!(status["findings"].to_string().contains("connecting to"), "{status}");
}
