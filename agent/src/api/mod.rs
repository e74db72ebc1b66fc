//! What can be asked of an agent, by the socket and by an embedded one alike.
//!
//! `calls`: questions and answers as data. `documents`: the JSON that is promised. `server`: HTTP over the Unix socket.
//! `client`: the other end.

pub mod calls;
pub mod client;
pub mod documents;
pub mod server;
