//! systemd's manager, played by a D-Bus server on a private socket, on a copied tree, with the faults that the real one has.
#![allow(dead_code, reason = "each user takes the part that it needs")]
#![allow(clippy::unwrap_used, reason = "test code: a panic is a failure")]

use crate::machine::{Machine, make_cgroup};
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
pub(crate) enum Fault {
    None,
    /// `SetUnitProperties` is answered with an error.
    Refuses,
    /// The property has the value, the file does not get it.
    DoesNotWrite,
    /// `SetUnitProperties` is never answered.
    Hangs,
}

#[derive(Debug)]
pub(crate) struct World {
    /// By unit: its cgroup, that it is to have when it runs.
    units: BTreeMap<&'static str, &'static str>,
    /// `LoadState` of units that are not `loaded`.
    pub(crate) states: BTreeMap<&'static str, &'static str>,
    /// `AllowedCPUs=`
    pub(crate) allowed: BTreeMap<String, CpuSet>,
    /// `CPUAffinity=`
    pub(crate) affinity: BTreeMap<String, CpuSet>,
    /// Calls that change something, in order.
    calls: Vec<String>,
    pub(crate) fault: Fault,
    cgroups: PathBuf,
    controls: PathBuf,
}

impl World {
    /// Where the unit's cgroup is, if it runs.
    fn lives(&self, unit: &str) -> Option<PathBuf> {
        Some(self.cgroups.join(self.units.get(unit)?)).filter(|dir| dir.exists())
    }
}

/// A row of `ListUnits`.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

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

    fn list_units(&self) -> Vec<Listed> {
        let nothing = || OwnedObjectPath::from(ObjectPath::try_from("/").unwrap());
        let text = String::new;
        let one = |name: &&str| {
            (name.to_string(), text(), text(), text(), text(), text(), nothing(), 0, text(), nothing())
        };
        self.0.lock().unwrap().units.keys().map(one).collect()
    }

    /// A scope: its cgroup is there, with the process, when its job is done.
    async fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: Vec<(String, OwnedValue)>,
        others: Vec<(String, Vec<(String, OwnedValue)>)>,
        #[zbus(object_server)] server: &zbus::ObjectServer,
    ) -> Result<OwnedObjectPath, Refusal> {
        if self.0.lock().unwrap().fault == Fault::Refuses {
            return Err(Refusal::PropertyReadOnly("not today".into()));
        }
        assert!(others.is_empty(), "{others:?}");
        let of = |wanted: &str| properties.iter().find(|(n, _)| n == wanted).unwrap().1.try_clone().unwrap();
        let slice = String::try_from(of("Slice")).unwrap();
        let pids = Vec::<u32>::try_from(of("PIDs")).unwrap();
        let delegated = Vec::<String>::try_from(of("DelegateControllers")).unwrap();
        let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
        {
            let mut world = self.0.lock().unwrap();
            let path: &'static str = Box::leak(format!("{slice}/{name}").into_boxed_str());
            let dir = world.cgroups.join(path);
            for up in [dir.parent().unwrap(), &dir] {
                if !up.exists() {
                    make_cgroup(&world.cgroups.with_file_name("made"), up, "");
                }
            }
            fs::write(dir.join("cgroup.procs"), format!("{}\n", pids[0])).unwrap();
            world.units.insert(name, path);
            world.calls.push(format!("{mode} {name} of {} with {delegated:?}", pids.len()));
        }
        server.at(object(name), Scope(self.0.clone(), name)).await?;
        server.at(object(name), Load(self.0.clone(), name)).await?;
        Ok(ObjectPath::try_from("/org/freedesktop/systemd1/job/1").unwrap().into())
    }

    fn stop_unit(&self, name: &str, mode: &str) -> OwnedObjectPath {
        let mut world = self.0.lock().unwrap();
        fs::remove_dir_all(world.lives(name).unwrap()).unwrap();
        world.units.remove(name);
        world.calls.push(format!("{mode} {name} by nothing"));
        ObjectPath::try_from("/org/freedesktop/systemd1/job/2").unwrap().into()
    }

    /// Whatever comes of it: that is for `LoadState` to say.
    #[allow(clippy::unused_self, reason = "a method of the interface")]
    fn load_unit(&self, name: &str) -> OwnedObjectPath {
        ObjectPath::try_from(object(name)).unwrap().into()
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
            if fault == Fault::None
                && !set.is_empty()
                && let Some(dir) = world.lives(name)
            {
                fs::write(dir.join("cpuset.cpus"), format!("{set}\n")).unwrap();
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
        let world = self.0.lock().unwrap();
        world.lives(self.1).map(|_| format!("/{}", world.units[self.1])).unwrap_or_default()
    }

    #[zbus(property)]
    fn slice(&self) -> String {
        let path = self.0.lock().unwrap().units[self.1];
        path.rsplit('/').nth(1).unwrap_or("-.slice").to_owned()
    }

    #[zbus(property, name = "AllowedCPUs")]
    fn allowed_cpus(&self) -> Vec<u8> {
        self.0.lock().unwrap().allowed.get(self.1).map(to_bytes).unwrap_or_default()
    }

    #[zbus(property, name = "CPUAffinity")]
    fn cpu_affinity(&self) -> Vec<u8> {
        self.0.lock().unwrap().affinity.get(self.1).map(to_bytes).unwrap_or_default()
    }
}

struct Scope(Arc<Mutex<World>>, &'static str);

#[interface(name = "org.freedesktop.systemd1.Scope")]
impl Scope {
    #[zbus(property)]
    fn control_group(&self) -> String {
        self.0.lock().unwrap().units.get(self.1).map(|path| format!("/{path}")).unwrap_or_default()
    }

    #[zbus(property, name = "AllowedCPUs")]
    fn allowed_cpus(&self) -> Vec<u8> {
        self.0.lock().unwrap().allowed.get(self.1).map(to_bytes).unwrap_or_default()
    }
}

struct Load(Arc<Mutex<World>>, &'static str);

#[interface(name = "org.freedesktop.systemd1.Unit")]
impl Load {
    #[zbus(property)]
    fn load_state(&self) -> String {
        self.0.lock().unwrap().states.get(self.1).copied().unwrap_or("loaded").to_owned()
    }

    #[zbus(property)]
    fn active_state(&self) -> String {
        let lives = self.0.lock().unwrap().lives(self.1).is_some();
        if lives { "active" } else { "inactive" }.to_owned()
    }

    #[zbus(property)]
    #[allow(clippy::unused_self, reason = "a property of the interface")]
    fn job(&self) -> (u32, OwnedObjectPath) {
        (0, ObjectPath::try_from("/").unwrap().into())
    }
}

/// systemd with these units (services), at `TRUEPIN_SYSTEMD`.
pub(crate) struct Played {
    pub(crate) world: Arc<Mutex<World>>,
}

impl Played {
    pub(crate) fn new(m: &Machine, units: &[(&'static str, &'static str)]) -> Self {
        let run = m.path("systemd");
        fs::create_dir_all(&run).unwrap();
        let world = Arc::new(Mutex::new(World {
            units: units.iter().copied().collect(),
            states: BTreeMap::new(),
            allowed: BTreeMap::new(),
            affinity: BTreeMap::new(),
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
                        builder = if name.rsplit_once('.').is_some_and(|(_, kind)| kind == "scope") {
                            builder.serve_at(object(name), Scope(served.clone(), name)).unwrap()
                        } else {
                            builder.serve_at(object(name), Unit(served.clone(), name)).unwrap()
                        };
                        builder = builder.serve_at(object(name), Load(served.clone(), name)).unwrap();
                    }
                    open.extend(builder.build().await);
                }
            });
        });
        listens.recv().unwrap();
        Self { world }
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.world.lock().unwrap().calls)
    }

    pub(crate) fn allowed(&self, unit: &str) -> String {
        self.world.lock().unwrap().allowed.get(unit).map(ToString::to_string).unwrap_or_default()
    }

    /// Starts the unit: its cgroup is there at once, with the list of its property.
    pub(crate) fn start(&self, m: &Machine, unit: &str) {
        let world = self.world.lock().unwrap();
        let list = world.allowed.get(unit).map(ToString::to_string).unwrap_or_default();
        m.cgroup(world.units[unit], &list);
        stir(&world, unit);
    }

    pub(crate) fn stop(&self, m: &Machine, unit: &str) {
        let world = self.world.lock().unwrap();
        fs::rename(world.lives(unit).unwrap(), m.path("gone")).unwrap();
        fs::remove_dir_all(m.path("gone")).unwrap();
        stir(&world, unit);
    }
}

/// cgroup2 tells of a directory that is made or removed; of one that is moved to its place whole nothing is told.
fn stir(world: &World, unit: &str) {
    let beside = world.cgroups.join(world.units[unit]).with_file_name("stir");
    fs::create_dir(&beside).unwrap();
    fs::remove_dir(&beside).unwrap();
}
