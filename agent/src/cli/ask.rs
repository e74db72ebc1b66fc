//! One question to the agent behind the socket.

use super::output::Failure;
use crate::{
    api::{calls::Call, client},
    paths::Paths,
};
use serde::de::DeserializeOwned;

/// A runtime for one thread: enough for one conversation.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Asks and decodes.
pub(super) fn ask<T: DeserializeOwned>(paths: &Paths, call: &Call) -> Result<T, Failure> {
    let document = runtime()?.block_on(client::ask(&paths.socket, call))??;
    Ok(serde_json::from_value(document)?)
}
