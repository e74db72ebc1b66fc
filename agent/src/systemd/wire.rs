//! A connection on which one asks and waits for the answer: the D-Bus wire protocol over a Unix socket.
//!
//! Problem: on its private socket systemd gives `org.freedesktop.systemd1` as the sender of its messages
//! (`bus_on_connection`, src/core/dbus.c), which the specification allows to buses alone for names without a colon, and over
//! which zbus' own connection (5.19, `Message::header`) panics. So its messages and types are used and its connection is not:
//! there is one question at a time, and signals are of no interest.
//! Steps: authentication by the socket's credentials (`EXTERNAL`), then a message out, and messages in until the one that
//! answers it. On the bus the first question is `Hello`.

use super::Cause;
use std::{io, path::Path};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::Mutex,
};
use zbus::{
    Message,
    export::serde::{Serialize, de::DeserializeOwned},
    message::Type as MessageType,
    zvariant::{
        DynamicType, Endian, Type, Value,
        serialized::{Context, Data},
    },
};

/// What the specification allows.
const LONGEST: usize = 128 << 20;
/// Up to the length of the fields, inclusive.
const FIXED: usize = 16;

/// Codes of header fields.
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const SIGNATURE: u8 = 8;

/// Beginning, length of the body, serial number, and the fields by code.
type Header<'a> = (u8, u8, u8, u8, u32, u32, Vec<(u8, Value<'a>)>);

/// An open connection.
#[derive(Debug)]
pub(super) struct Wire {
    stream: Mutex<UnixStream>,
}

/// Bytes that are no message.
fn nonsense(what: impl Into<String>) -> Cause {
    Cause::Wire(io::Error::new(io::ErrorKind::InvalidData, what.into()))
}

fn undecoded(error: zbus::zvariant::Error) -> Cause {
    Cause::Bus(Box::new(zbus::Error::Variant(error)))
}

/// An answer.
#[derive(Debug)]
pub(super) struct Reply {
    data: Data<'static, 'static>,
    body: usize,
    signature: String,
}

impl Reply {
    /// Its one value.
    pub(super) fn value<T: DeserializeOwned + Type>(&self) -> Result<T, Cause> {
        let wanted = T::SIGNATURE.to_string();
        if self.signature != wanted {
            return Err(nonsense(format!("the answer is of type {:?} and not {wanted:?}", self.signature)));
        }
        Ok(self.data.slice(self.body..).deserialize::<T>().map_err(undecoded)?.0)
    }
}

impl Wire {
    pub(super) async fn open(socket: &Path) -> Result<Self, Cause> {
        let failed = |source| Cause::Connect { socket: socket.into(), source };
        let mut stream = UnixStream::connect(socket).await.map_err(failed)?;
        let uid: Vec<String> =
            nix::unistd::geteuid().to_string().bytes().map(|b| format!("{b:02x}")).collect();
        let uid = uid.concat();
        let begin = format!("\0AUTH EXTERNAL {uid}\r\n");
        stream.write_all(begin.as_bytes()).await.map_err(failed)?;
        let mut answer = Vec::new();
        // Nothing follows the line before we say BEGIN.
        while !answer.ends_with(b"\r\n") && answer.len() < 1024 {
            answer.push(stream.read_u8().await.map_err(failed)?);
        }
        if !answer.starts_with(b"OK ") {
            let said = String::from_utf8_lossy(&answer).trim().to_owned();
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, said)));
        }
        stream.write_all(b"BEGIN\r\n").await.map_err(failed)?;
        Ok(Self { stream: Mutex::new(stream) })
    }

    /// Calls a method and waits for what it answers.
    pub(super) async fn call<B>(
        &self,
        name: &str,
        object: &str,
        interface: &str,
        method: &str,
        body: &B,
    ) -> Result<Reply, Cause>
    where
        B: Serialize + DynamicType,
    {
        let message =
            Message::method_call(object, method)?.destination(name)?.interface(interface)?.build(body)?;
        let serial = message.primary_header().serial_num().get();
        let mut stream = self.stream.lock().await;
        stream.write_all(message.data().bytes()).await.map_err(Cause::Wire)?;
        loop {
            if let Some(outcome) = answer(receive(&mut stream).await?, serial)? {
                return outcome;
            }
        }
    }
}

/// One whole message.
async fn receive(stream: &mut UnixStream) -> Result<Data<'static, 'static>, Cause> {
    let mut bytes = vec![0; FIXED];
    stream.read_exact(&mut bytes).await.map_err(Cause::Wire)?;
    let endian = match bytes[0] {
        b'l' => Endian::Little,
        b'B' => Endian::Big,
        other => return Err(nonsense(format!("a message begins with {other:#x}"))),
    };
    let word = |at: usize| {
        let word = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let value =
            if endian == Endian::Little { u32::from_le_bytes(word) } else { u32::from_be_bytes(word) };
        usize::try_from(value).unwrap_or(usize::MAX)
    };
    let (body, fields) = (word(4), word(12));
    let length = fields.checked_next_multiple_of(8).and_then(|f| f.checked_add(body)?.checked_add(FIXED));
    let Some(length) = length.filter(|l| *l <= LONGEST) else {
        return Err(nonsense(format!("a message has {fields} bytes of fields and {body} of body")));
    };
    bytes.resize(length, 0);
    stream.read_exact(&mut bytes[FIXED..]).await.map_err(Cause::Wire)?;
    Ok(Data::new(bytes, Context::new_dbus(endian, 0)))
}

/// What the message answers to the call of this serial number; `None` for a signal, or another's answer.
fn answer(data: Data<'static, 'static>, serial: u32) -> Result<Option<Result<Reply, Cause>>, Cause> {
    let (header, size) = data.deserialize::<Header<'_>>().map_err(undecoded)?;
    let (_, kind, _, _, _, _, fields) = header;
    let field = |code: u8| fields.iter().find(|(c, _)| *c == code).map(|(_, value)| value);
    let answers = matches!(field(REPLY_SERIAL), Some(Value::U32(s)) if *s == serial);
    let kind = [MessageType::MethodReturn, MessageType::Error].into_iter().find(|k| *k as u8 == kind);
    let Some(kind) = kind.filter(|_| answers) else { return Ok(None) };
    let signature = match field(SIGNATURE) {
        Some(Value::Signature(signature)) => signature.to_string(),
        _ => String::new(),
    };
    let name = match field(ERROR_NAME) {
        Some(Value::Str(name)) => name.to_string(),
        _ => String::new(),
    };
    drop(fields);
    let body = size.next_multiple_of(8);
    let reply = Reply { data, body, signature };
    Ok(Some(match kind {
        MessageType::MethodReturn => Ok(reply),
        // Errors say what they are about in their first value, which is a text.
        _ => Err(Cause::Refused { name, words: reply.value().unwrap_or_default() }),
    }))
}
