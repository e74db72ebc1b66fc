//! Decisions, scenario by scenario: what is refused leaves nothing behind, what others change is repaired and named,
//! what cannot be had ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails panics")]

mod fence;
mod fights;
mod foreign;
mod hotplug;
mod life;
mod local;
mod memory;
mod mending;
mod owners;
mod refused;
mod rehearsal;
mod world;
mod writers;
