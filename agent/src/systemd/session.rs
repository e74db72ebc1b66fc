//! One conversation with systemd's manager, in the words of org.freedesktop.systemd1(5).

use super::{Cause, Places};
use std::path::Path;
use tokio::net::UnixStream;
use truepin::units::UnitName;
use zbus::{
    Connection, Message,
    connection::Builder,
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
    connection: Connection,
}

impl Session {
    /// Over the private socket, or over the bus where that is not there.
    pub(super) async fn open(places: &Places) -> Result<Self, Cause> {
        let connect = async |socket: &Path| {
            let failed = |source| Cause::Connect { socket: socket.into(), source };
            UnixStream::connect(socket).await.map(Builder::unix_stream).map_err(failed)
        };
        let connection = match connect(&places.private).await {
            Ok(builder) => builder.p2p().build().await?,
            Err(private) => match connect(&places.bus).await {
                Ok(builder) => builder.build().await?,
                // The private one is what root has always.
                Err(_) => return Err(private),
            },
        };
        Ok(Self { connection })
    }

    async fn call<B>(
        &self,
        object: &str,
        interface: &str,
        method: &str,
        body: &B,
    ) -> Result<Message, zbus::Error>
    where
        B: Serialize + DynamicType,
    {
        self.connection.call_method(Some(NAME), object, Some(interface), method, body).await
    }

    async fn property(&self, object: &str, interface: &str, name: &str) -> Result<OwnedValue, Cause> {
        let reply = self.call(object, "org.freedesktop.DBus.Properties", "Get", &(interface, name)).await?;
        Ok(reply.body().deserialize()?)
    }

    async fn text(&self, object: &str, interface: &str, name: &str) -> Result<String, Cause> {
        let value = self.property(object, interface, name).await?;
        Ok(String::try_from(value).map_err(zbus::Error::from)?)
    }

    /// The unit's object; `None` where systemd has no such unit loaded.
    pub(super) async fn loaded(&self, unit: &UnitName) -> Result<Option<String>, Cause> {
        match self.call(OBJECT, MANAGER, "GetUnit", &(unit.as_str(),)).await {
            Ok(reply) => Ok(Some(reply.body().deserialize::<OwnedObjectPath>()?.to_string())),
            Err(zbus::Error::MethodError(name, ..)) if name.as_str() == format!("{NAME}.NoSuchUnit") => {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The unit's object, loaded from its files if it was not, and whatever came of that.
    pub(super) async fn load(&self, unit: &UnitName) -> Result<String, Cause> {
        let reply = self.call(OBJECT, MANAGER, "LoadUnit", &(unit.as_str(),)).await?;
        Ok(reply.body().deserialize::<OwnedObjectPath>()?.to_string())
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
        Ok(reply.body().deserialize::<Vec<Unit>>()?.into_iter().map(|unit| unit.0).collect())
    }

    pub(super) async fn reload(&self) -> Result<(), Cause> {
        self.call(OBJECT, MANAGER, "Reload", &()).await?;
        Ok(())
    }
}
