//! What truepin itself does to a kernel, as scripts: a history is played on the fake, everything that anybody did to
//! it is written down, and a real kernel of the same behaviour must then answer every one of these steps as the fake
//! did. So the executor's own sequences are compared as they are made, not as somebody wrote them down once.
//!
//! A history here: a machine as the guest `eight` is one, four to six things that happen (admissions, releases,
//! foreign writes, ambushes), CPUs that go and come between them, and an agent that dies now and then in the middle of
//! a plan and is started again.

use super::{
    Sim,
    history::{Rng, next_op, world_of},
};
use crate::fake::{
    Behaviour, FakeKernel, Fault,
    script::{Script, ScriptError, operation},
};
use truepin::{CpuId, topology::synthetic::Numbering};

/// Past the minute in which fights are counted.
const MINUTE: u64 = 60_000_000_001;
/// A plan has some ten steps.
const STEPS: usize = 12;

/// The script of this seed for a kernel of this behaviour. The scripts of two releases differ, since what truepin does
/// depends on what it reads; and they change with the planner, so their answers are compared and never recorded.
pub fn script(seed: u64, behaviour: Behaviour) -> Result<Script, ScriptError> {
    let mut rng = Rng::new(seed);
    let boot = |online, nodes| FakeKernel::new(behaviour, online, nodes).with_journal();
    let (setup, kernel) = world_of(&mut rng, 2, Numbering::ThreadsAdjacent, boot);
    let mut sim = Sim::new(setup, kernel);
    for _ in 0..4 + rng.below(3) {
        sim.wait(MINUTE);
        if rng.chance(30) {
            switch(&mut rng, &mut sim);
        }
        let op = next_op(&mut rng, &sim);
        if rng.chance(35) {
            let fault = if rng.chance(50) { Fault::CrashBefore } else { Fault::CrashAfter };
            let nth = rng.below(STEPS) as u64;
            sim.eyes.others(|k| k.fault(nth, fault));
        }
        // A plan that is shorter than that ends undisturbed, and a fault that is still on order hits a later one.
        if op.happen(&mut sim).is_err() {
            let _ = sim.restart();
        }
    }
    let _ = sim.release(None);
    // A script finds cpuset enabled below the root, and a journal begins before that.
    let first = "cgroup.subtree_control = -cpuset".to_owned();
    let lines = std::iter::once(&first).chain(sim.eyes.kernel().journal());
    let ops = lines.map(|line| match operation(line) {
        Ok(op) => Ok((line.clone(), op)),
        Err(reason) => Err(ScriptError { line: line.clone(), reason }),
    });
    Ok(Script { name: format!("played {seed}"), ops: ops.collect::<Result<_, _>>()? })
}

/// One of the upper CPUs goes or comes, or all that are away come back.
fn switch(rng: &mut Rng, sim: &mut Sim) {
    let online = sim.eyes.kernel().online().clone();
    let cpu = CpuId(u32::try_from(4 + rng.below(4)).unwrap_or(7));
    sim.eyes.others(|k| {
        if rng.chance(30) {
            // Refused where it is there already.
            for cpu in (4..8).map(CpuId) {
                let _ = k.set_online(cpu, true);
            }
        } else {
            // A refusal is an answer too.
            let _ = k.set_online(cpu, !online.contains(cpu));
        }
    });
    let _ = sim.tick();
}
