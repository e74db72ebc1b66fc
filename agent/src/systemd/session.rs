//! One conversation with systemd's manager, in the words of org.freedesktop.systemd1(5).

use super::{
    Cause, Places,
    wire::{Reply, Wire},
};
use std::time::Duration;
use truepin::units::UnitName;
use zbus::{
    export::serde::Serialize,
    zvariant::{DynamicType, OwnedObjectPath, OwnedValue, Value},
};

const NAME: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const UNIT: &str = "org.freedesktop.systemd1.Unit";

/// An open connection.
#[derive(Debug)]
pub(super) struct Session {
    wire: Wire,
    /// For each answer.
    limit: Duration,
}

async fn within<T>(limit: Duration, what: impl Future<Output = Result<T, Cause>>) -> Result<T, Cause> {
    tokio::time::timeout(limit, what).await.unwrap_or(Err(Cause::Silent(limit)))
}

impl Session {
    /// Over the private socket, or over the bus where that is not there.
    pub(super) async fn open(places: &Places, limit: Duration) -> Result<Self, Cause> {
        let wire = match within(limit, Wire::open(&places.private)).await {
            Ok(wire) => wire,
            // Who does not answer there does not answer on the bus.
            Err(Cause::Silent(limit)) => return Err(Cause::Silent(limit)),
            Err(private) => match within(limit, Wire::open(&places.bus)).await {
                Ok(wire) => {
                    const BUS: &str = "org.freedesktop.DBus";
                    within(limit, wire.call(BUS, "/org/freedesktop/DBus", BUS, "Hello", &())).await?;
                    wire
                }
                // The private one is what root has always.
                Err(_) => return Err(private),
            },
        };
        Ok(Self { wire, limit })
    }

    async fn call<B>(&self, object: &str, interface: &str, method: &str, body: &B) -> Result<Reply, Cause>
    where
        B: Serialize + DynamicType,
    {
        within(self.limit, self.wire.call(NAME, object, interface, method, body)).await
    }

    async fn property(&self, object: &str, interface: &str, name: &str) -> Result<OwnedValue, Cause> {
        let reply = self.call(object, "org.freedesktop.DBus.Properties", "Get", &(interface, name)).await?;
        reply.value()
    }

    async fn text(&self, object: &str, interface: &str, name: &str) -> Result<String, Cause> {
        let value = self.property(object, interface, name).await?;
        Ok(String::try_from(value).map_err(zbus::Error::from)?)
    }

    /// The unit's object; `None` where systemd has no such unit loaded.
    pub(super) async fn loaded(&self, unit: &UnitName) -> Result<Option<String>, Cause> {
        match self.call(OBJECT, MANAGER, "GetUnit", &(unit.as_str(),)).await {
            Ok(reply) => Ok(Some(reply.value::<OwnedObjectPath>()?.to_string())),
            Err(Cause::Refused { name, .. }) if name == format!("{NAME}.NoSuchUnit") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The unit's object, loaded from its files if it was not, and whatever came of that.
    pub(super) async fn load(&self, unit: &UnitName) -> Result<String, Cause> {
        let reply = self.call(OBJECT, MANAGER, "LoadUnit", &(unit.as_str(),)).await?;
        Ok(reply.value::<OwnedObjectPath>()?.to_string())
    }

    /// `loaded`, or why it is not: `not-found`, `masked`, `bad-setting`, `error`.
    pub(super) async fn load_state(&self, object: &str) -> Result<String, Cause> {
        self.text(object, UNIT, "LoadState").await
    }

    /// The slice that it is in, by name.
    pub(super) async fn slice(&self, object: &str, unit: &UnitName) -> Result<String, Cause> {
        self.text(object, unit.interface(), "Slice").await
    }

    /// With a leading slash; empty while it does not run.
    pub(super) async fn control_group(&self, object: &str, unit: &UnitName) -> Result<String, Cause> {
        self.text(object, unit.interface(), "ControlGroup").await
    }

    /// `AllowedCPUs` or `AllowedMemoryNodes`.
    pub(super) async fn bytes(
        &self,
        object: &str,
        unit: &UnitName,
        property: &str,
    ) -> Result<Vec<u8>, Cause> {
        let value = self.property(object, unit.interface(), property).await?;
        Ok(Vec::<u8>::try_from(value).map_err(zbus::Error::from)?)
    }

    /// Sets one property until the next boot.
    pub(super) async fn set(&self, unit: &UnitName, property: &str, bytes: Vec<u8>) -> Result<(), Cause> {
        let properties = vec![(property, Value::from(bytes))];
        self.call(OBJECT, MANAGER, "SetUnitProperties", &(unit.as_str(), true, properties)).await?;
        Ok(())
    }

    /// The names of all units that are loaded.
    pub(super) async fn units(&self) -> Result<Vec<String>, Cause> {
        // Name, description, states of load and activity, sub-state, who is followed, object, job's number, type and object.
        type Unit =
            (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);
        let reply = self.call(OBJECT, MANAGER, "ListUnits", &()).await?;
        Ok(reply.value::<Vec<Unit>>()?.into_iter().map(|unit| unit.0).collect())
    }

    /// Asks for a scope in `slice` with one process, which may make cgroups with cpusets below it.
    pub(super) async fn start_scope(&self, unit: &UnitName, slice: &UnitName, pid: u32) -> Result<(), Cause> {
        let properties = vec![
            ("Description", Value::from(format!("truepin run ({unit})"))),
            ("Slice", Value::from(slice.as_str())),
            ("PIDs", Value::from(vec![pid])),
            // The others stay switched off below the slice; systemd leaves alone what is made below the scope.
            ("DelegateControllers", Value::from(vec!["cpuset"])),
            // One that failed would hold its name.
            ("CollectMode", Value::from("inactive-or-failed")),
        ];
        let others: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        self.call(OBJECT, MANAGER, "StartTransientUnit", &(unit.as_str(), "fail", properties, others))
            .await?;
        Ok(())
    }

    pub(super) async fn stop(&self, unit: &UnitName) -> Result<(), Cause> {
        self.call(OBJECT, MANAGER, "StopUnit", &(unit.as_str(), "replace")).await?;
        Ok(())
    }

    /// Whether a job of the unit's is still to be done, and its `ActiveState`.
    pub(super) async fn state(&self, object: &str) -> Result<(bool, String), Cause> {
        let job = self.property(object, UNIT, "Job").await?;
        let (job, _) = <(u32, OwnedObjectPath)>::try_from(job).map_err(zbus::Error::from)?;
        Ok((job != 0, self.text(object, UNIT, "ActiveState").await?))
    }

    pub(super) async fn reload(&self) -> Result<(), Cause> {
        self.call(OBJECT, MANAGER, "Reload", &()).await?;
        Ok(())
    }
}
