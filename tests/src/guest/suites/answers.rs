//! What this kernel answers to scripts, written down for the fake kernel to be held to.
//!
//! No test: a recording, booted by hand. The scripts are those of `/scripts` where the initramfs has such a file (one
//! more cpio archive behind the first does it), else every shipped one and those by chance. The lines of the
//! transcript (`fake::transcript`) come behind `# `; `cargo run --example answers` compares and digests them.

use super::lockstep::{behaviour, with_the_tree};
use crate::{
    fake::{self, chance, script},
    guest::{Guest, Outcome, Scenario, Style, Suite},
};
use anyhow::Context;
use std::fs;

/// The suite.
pub const SUITE: Suite = Suite {
    name: "answers",
    about: "this kernel's answers to scripts, to be kept",
    style: Style::Tap,
    scenarios: &[Scenario::new("all are told", all_are_told).limit(7200).allow(&["WARNING", "BUG"])],
};

fn all_are_told(guest: &mut Guest) -> Outcome {
    let behaviour = behaviour()?;
    let scripts = match fs::read_to_string("/scripts") {
        Ok(text) => script::parse(&text)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            script::all()?.into_iter().chain(chance::recorded(behaviour)).collect()
        }
        Err(e) => return Err(e).context("/scripts"),
    };
    with_the_tree(|mount| Ok(fake::tell(mount, behaviour, &scripts, &mut |line| guest.say(line))?))
}
