//! What a partition and its parent exchange.

use crate::fake::{FakeKernel, Ix, Reason, State};
use truepin::CpuSet;

/// What a partition asks its parent for.
pub(super) enum Ask<'a> {
    /// All CPUs of its list, to become one.
    Start,
    /// To take back what it has, to be a member.
    End,
    /// The same, because its list overlaps a sibling's.
    Break,
    /// This list instead of the one it has.
    List(&'a CpuSet),
    /// A new verdict with the sets as they are.
    Verdict,
}

/// CPUs that change hands.
#[derive(Default)]
struct Exchange {
    taken: CpuSet,
    returned: CpuSet,
}

impl FakeKernel {
    /// Settles `ask` with the parent. A refusal that makes the partition invalid stands in its state and reason; an
    /// error means that nothing changed at all.
    pub(super) fn ask(&mut self, i: Ix, ask: &Ask) -> Result<(), Reason> {
        let parent = self.parent(i);
        match self.cs(parent).state {
            State::Valid(_) => {}
            State::Invalid(_) => return Err(Reason::ParentInvalid),
            State::Member => return Err(Reason::ParentMember),
        }
        let list = if let Ask::List(new) = ask { new } else { &self.cs(i).cpus };
        if list.is_empty() {
            return Err(Reason::ListEmpty);
        }
        let old = self.cs(i).state;
        if matches!(ask, Ask::Break) && old.is_invalid() {
            return Ok(());
        }
        let (exchange, problem) = self.exchange_for(i, ask)?;
        if problem.is_some() {
            self.cs_mut(i).reason = problem;
        }
        let new = match (ask, old, problem) {
            (Ask::Break | Ask::List(_) | Ask::Verdict, State::Valid(kind), Some(_)) => State::Invalid(kind),
            (Ask::List(_) | Ask::Verdict, State::Invalid(kind), None) => State::Valid(kind),
            _ => old,
        };
        if exchange.taken.is_empty() && exchange.returned.is_empty() && new == old {
            return Ok(());
        }
        if new != old {
            if new.is_valid() && !self.cs(i).guarded {
                self.guard_local(i)?;
            } else if new.is_invalid() {
                self.cs_mut(i).guarded = false;
            }
        }
        self.settle_with_parent(i, new, &exchange);
        Ok(())
    }

    fn exchange_for(&self, i: Ix, ask: &Ask) -> Result<(Exchange, Option<Reason>), Reason> {
        let parent = self.parent(i);
        let (cs, above, given) = (self.cs(i), self.cs(parent), self.given(parent));
        let held = cs.cpus.intersection(given);
        // Nothing would be left to the parent's own tasks.
        let starves = |taken: &CpuSet| above.effective.is_subset(taken) && self.depended_on(parent, Some(i));
        let nothing = CpuSet::new;
        let mut problem = None;
        let exchange = match ask {
            Ask::Start => {
                if cs.cpus.is_disjoint(&above.cpus) {
                    return Err(Reason::ListInvalid);
                }
                if starves(&cs.cpus) {
                    return Err(Reason::ParentStarves);
                }
                Exchange { taken: cs.cpus.clone(), returned: nothing() }
            }
            Ask::End => {
                Exchange { taken: nothing(), returned: if cs.state.is_invalid() { nothing() } else { held } }
            }
            Ask::Break => {
                problem = cs.state.is_valid().then_some(Reason::NotExclusive);
                Exchange { taken: nothing(), returned: held }
            }
            Ask::List(new) => {
                let returned = held.difference(new);
                let taken = new.intersection(&above.cpus).difference(given);
                if !taken.is_empty() && returned.is_disjoint(&self.active) && starves(&taken) {
                    problem = Some(Reason::ParentStarves);
                    Exchange { taken: nothing(), returned: held }
                } else {
                    Exchange { taken, returned }
                }
            }
            Ask::Verdict => {
                let taken = cs.cpus.intersection(&above.cpus).difference(given);
                let revoked = cs.state.is_valid() && given.is_empty();
                if revoked || !taken.is_empty() && starves(&taken) {
                    problem = Some(Reason::ParentStarves);
                    let returned = if cs.state.is_valid() && !given.is_empty() { held } else { nothing() };
                    Exchange { taken: nothing(), returned }
                } else {
                    Exchange { taken, returned: nothing() }
                }
            }
        };
        Ok((exchange, problem))
    }

    fn settle_with_parent(&mut self, i: Ix, new: State, exchange: &Exchange) {
        let parent = self.parent(i);
        let Exchange { taken, returned } = exchange;
        let given = self.given(parent).union(taken).difference(returned);
        self.set_given(parent, given);
        let usable = returned.intersection(&self.active);
        let above = &mut self.cs_mut(parent).effective;
        *above -= taken;
        *above |= &usable;
        let old = std::mem::replace(&mut self.cs_mut(i).state, new);
        if !taken.is_empty() || !returned.is_empty() {
            self.refresh_tasks(parent);
        }
        self.state_changed(i, old);
    }
}
