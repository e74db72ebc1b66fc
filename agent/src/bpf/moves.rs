//! The programs that see a task leave its owner's cgroup: `ebpf/src/moves.rs`.
//!
//! The tracepoint is there on every kernel that the rest needs; the program at the begin of the function is an fentry, else a
//! kprobe, and neither may be there. Without both nothing is seen, and every verdict says so.

use super::{
    error::BpfError,
    load,
    writes::{Hook, clone, short},
};
use aya::{
    Btf, Ebpf,
    programs::{FEntry, KProbe, ProgramFd, links::FdLink},
};
use truepin::ledger::ProgramHealth;

/// The function, and the tracepoint at its end.
const FUNCTION: &str = "cgroup_attach_task";
/// The programs, as their health is told.
pub(super) const PROGRAMS: [&str; 2] = [FUNCTION, "move_begins"];

/// The programs at work. Dropping them detaches them.
#[derive(Debug)]
pub(super) struct Moves {
    /// In the order of `PROGRAMS`.
    attached: [(ProgramFd, FdLink); 2],
}

impl Moves {
    /// Attaches both; `None` where the kernel takes neither kind of the second, and why in `refused`.
    pub(super) fn first(bpf: &mut Ebpf, types: &Btf, refused: &mut Vec<String>) -> Option<Self> {
        let mut told = |error: BpfError, what: &str| refused.push(format!("{what}: {}", short(&error)));
        let ends = ends(bpf, types).map_err(|e| told(e, "tracepoint")).ok()?;
        let begins = Hook::ALL
            .iter()
            .find_map(|hook| begins(bpf, types, *hook).map_err(|e| told(e, hook.name())).ok())?;
        Some(Self { attached: [ends, begins] })
    }

    /// `into` has an entry for each of `PROGRAMS`.
    pub(super) fn health_into(&self, into: &mut [ProgramHealth], text: &mut String) -> Result<(), BpfError> {
        for ((health, name), (program, link)) in into.iter_mut().zip(PROGRAMS).zip(&self.attached) {
            let of_link = link.info().map_err(|e| BpfError::Link { program: name, source: Box::new(e) })?;
            health.link = Some(of_link.id());
            health.misses = load::misses_of(program, text)?;
        }
        Ok(())
    }
}

fn ends(bpf: &mut Ebpf, types: &Btf) -> Result<(ProgramFd, FdLink), BpfError> {
    load::load(bpf, types, FUNCTION, FUNCTION)?;
    let link = load::attach(bpf, FUNCTION)?;
    Ok((clone(load::tracing(bpf, FUNCTION)?.fd(), FUNCTION)?, link))
}

fn begins(bpf: &mut Ebpf, types: &Btf, hook: Hook) -> Result<(ProgramFd, FdLink), BpfError> {
    match hook {
        Hook::Fexit => {
            let name = PROGRAMS[1];
            let program: &mut FEntry = load::find(bpf, name)?;
            program.load(FUNCTION, types).map_err(BpfError::program(name, "load"))?;
            let id = program.attach().map_err(BpfError::program(name, "attach"))?;
            let link = program.take_link(id).map_err(BpfError::program(name, "attach"))?;
            Ok((clone(program.fd(), name)?, link.into()))
        }
        Hook::Kprobe => {
            let name = "move_begins_kprobe";
            let program: &mut KProbe = load::find(bpf, name)?;
            program.load().map_err(BpfError::program(name, "load"))?;
            let id = program.attach(FUNCTION, 0).map_err(BpfError::program(name, "attach"))?;
            let link = program.take_link(id).map_err(BpfError::program(name, "attach"))?;
            // Since 5.15 it is a link of the kernel's; before, nothing would tell whether it is still there.
            let link =
                FdLink::try_from(link).map_err(|e| BpfError::Link { program: name, source: Box::new(e) })?;
            Ok((clone(program.fd(), name)?, link))
        }
    }
}
