//! What a rehearsal foretells is what is then done, step by step; and it changes nothing.

use crate::world::{client, existing, host, log, logged, owner, run};
use truepin::observed::{Kernel, KernelError, Observed, Scope, Step};
use truepin::reconcile::{Answer, Event};
use truepin::rehearse::{Rehearsal, Scenery};
use truepin::request::Isolation;
use truepin::{CpuTopology, Owner};
use truepin_tests::fake::{Behaviour, FakeKernel, Model};
use truepin_tests::sim::{Sim, Wish};

/// A copy of the kernel: whatever a rehearsal did to it would be lost, and would be seen.
struct Stage {
    kernel: FakeKernel,
    machine: CpuTopology,
}

impl Scenery for Stage {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        self.kernel.observe(scope)
    }

    fn machine(&mut self) -> Result<Box<CpuTopology>, String> {
        Ok(Box::new(self.machine.clone()))
    }
}

enum Deed {
    Admit(Wish),
    Release(Option<Owner>),
}

impl Deed {
    fn event(&self, ticket: u64) -> Event {
        match self {
            Self::Admit(wish) => Event::Admit {
                ticket,
                request: wish.request.clone(),
                exactly: wish.exactly.clone(),
                home: wish.home.clone(),
                pid: wish.pid,
            },
            Self::Release(owner) => Event::Release { ticket, owner: owner.clone() },
        }
    }
}

/// Rehearses, then does it. How many steps that were.
#[track_caller]
fn foretold(sim: &mut Sim, deed: &Deed) -> usize {
    let mut stage = Stage { kernel: sim.eyes.kernel().clone(), machine: sim.setup.topology.clone() };
    let mut rehearsal = Rehearsal::new(sim.state.clone());
    rehearsal.drive(&mut stage, deed.event(7), sim.now);
    let foreseen: Vec<Step> = rehearsal.steps.iter().map(|p| p.step.clone()).collect();
    let answer = rehearsal.answer(7).unwrap();
    let before = sim.eyes.steps.len();
    let real = sim.ask(|ticket| deed.event(ticket)).unwrap();
    assert_eq!(foreseen, sim.eyes.steps[before..], "{}", log(sim));
    match (&answer, &real) {
        (Answer::Assigned(o, a), Answer::Assigned(p, b)) => {
            assert_eq!((o, &a.cpus, a.mode), (p, &b.cpus, b.mode));
        }
        (Answer::Released(a), Answer::Released(b)) => {
            assert!(a.iter().map(|(o, _)| o).eq(b.iter().map(|(o, _)| o)), "{a:?} {b:?}");
        }
        _ => assert_eq!(answer, real),
    }
    foreseen.len()
}

#[test]
fn what_is_foretold_is_done() {
    let behaviours = [
        ("strict", Behaviour::strict()),
        ("amended", Behaviour::amended()),
        ("lax", Behaviour::lax()),
        ("local", Behaviour::local_only()),
    ];
    for (name, behaviour) in behaviours {
        let mut sim = logged(host(behaviour));
        // What an agent learns from its first refusal. Before that it foretells what it would try.
        sim.state.facts.empty_refused = behaviour.model != Model::Lax;
        let pid = client(&mut sim);
        let any = |name: &str, n, isolation| Wish::new(owner(name), n, isolation);
        let deeds = [
            Deed::Admit(run("a", "2-3", Isolation::Auto).with(pid)),
            Deed::Admit(any("run/b", 1, Isolation::Auto)),
            Deed::Admit(existing("system.slice/a", "5", Isolation::Auto)),
            Deed::Admit(existing("machine.slice/vm", "6", Isolation::Member)),
            // Nothing is left for it.
            Deed::Admit(any("run/c", 4, Isolation::Auto)),
            Deed::Release(Some(owner("cgroup/system.slice/a"))),
            Deed::Admit(any("run/c", 1, Isolation::Member)),
            Deed::Release(Some(owner("run/b"))),
            Deed::Release(None),
        ];
        let steps: usize = deeds.iter().map(|deed| foretold(&mut sim, deed)).sum();
        println!("{name}: {} calls, {steps} steps foretold, as many done", deeds.len());
        assert!(steps > 30, "{steps}");
    }
}
