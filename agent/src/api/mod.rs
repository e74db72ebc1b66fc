//! What can be asked of an agent, by the socket and by an embedded one alike.
//!
//! `calls`: questions and answers as data. `documents`: the JSON that is promised. `status`: one of the answers. `server`: HTTP over the Unix socket.
//! `plan`: what a call would do. `connections`: who gets one, for how long, for how much.
//! `client`: the other end.

pub mod calls;
pub mod client;
mod connections;
pub mod documents;
pub mod plan;
pub mod server;
mod status;
