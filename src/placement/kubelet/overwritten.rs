//! What becomes of combinations of nodes that the kubelet keeps while it goes on walking.
//!
//! Problem: its walk over combinations appends to a slice and hands the same backing array out again wherever the array has
//! room left. The best combination is kept as that slice, so what comes later writes over its end (noted as `noalias` in
//! records; 0, 1, 2, 7 instead of 0 to 3 on a free machine of 8 nodes).
//! Steps: a Go slice of integers that grows one by one gets new arrays of 1, 2, 4, 8, … places, so of a combination of k
//! nodes the array is new at the last such step and shared by all combinations that begin alike up to there. The walk over
//! nodes stops one combination after one that leaves all nodes equal; the walk over those that give the remainder goes to
//! its end.
//! Invariant: a combination keeps its length; what it holds ascends.

use super::balance::Balanced;

/// The combination as it is read afterwards. `frees` are the free CPUs of all nodes, in the order of the walk.
pub(super) fn overwrite(balanced: &mut Balanced, frees: &[usize], group: usize) {
    // Places among those that can give a group more, before the nodes themselves are written over.
    let able = |at: &usize| frees.get(*at).is_some_and(|free| free.saturating_sub(balanced.share) >= group);
    let givers: Vec<usize> = balanced.nodes.iter().copied().filter(able).collect();
    let place = |at: &usize| givers.binary_search(at).unwrap_or(givers.len());
    let mut extra: Vec<usize> = balanced.extra.iter().map(place).collect();
    to_the_end(&mut extra, givers.len());
    balanced.extra = extra.into_iter().filter_map(|at| givers.get(at).copied()).collect();
    if balanced.even {
        one_further(&mut balanced.nodes, frees.len());
    } else {
        to_the_end(&mut balanced.nodes, frees.len());
    }
}

/// How many places of a combination of `k` are its own: the array is new when the last of them is appended.
fn own(k: usize) -> usize {
    k.next_power_of_two() / 2 + 1
}

/// Every later combination out of `n` that begins alike was written into the same array.
fn to_the_end(combination: &mut [usize], n: usize) {
    let k = combination.len();
    for (at, place) in combination.iter_mut().enumerate().skip(own(k)) {
        *place = n - k + at;
    }
}

/// One later combination was, if it begins alike.
fn one_further(combination: &mut [usize], n: usize) {
    let k = combination.len();
    let Some(turn) = (own(k)..k).rev().find(|at| combination[*at] < n - k + at) else { return };
    let next = combination[turn] + 1;
    for (at, place) in combination.iter_mut().enumerate().skip(turn) {
        *place = next + at - turn;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The walk itself, with an array that grows as Go's does.
    fn walk(n: usize, k: usize, mut visit: impl FnMut(&Shared) -> bool) {
        fn step(
            n: usize,
            k: usize,
            from: usize,
            so_far: &Shared,
            visit: &mut impl FnMut(&Shared) -> bool,
        ) -> bool {
            if k == 0 {
                return visit(so_far);
            }
            (from..=n - k).all(|at| step(n, k - 1, at + 1, &so_far.append(at), visit))
        }
        step(n, k, 0, &Shared::default(), &mut visit);
    }

    /// A slice: an array that others may share, and a length.
    #[derive(Clone, Default)]
    struct Shared {
        array: std::rc::Rc<std::cell::RefCell<Vec<usize>>>,
        len: usize,
    }

    impl Shared {
        fn append(&self, value: usize) -> Self {
            let room = self.array.borrow().len();
            if self.len == room {
                let mut array = self.array.borrow()[..self.len].to_vec();
                array.resize((room * 2).max(1), 0);
                array[self.len] = value;
                return Self { array: std::rc::Rc::new(array.into()), len: self.len + 1 };
            }
            self.array.borrow_mut()[self.len] = value;
            Self { array: self.array.clone(), len: self.len + 1 }
        }

        fn read(&self) -> Vec<usize> {
            self.array.borrow()[..self.len].to_vec()
        }
    }

    #[test]
    fn every_combination_of_up_to_ten_is_read_as_the_walk_leaves_it() {
        let (mut compared, mut changed) = (0, 0);
        for n in 1..=10 {
            for k in 1..=n {
                let mut all = Vec::new();
                walk(n, k, |kept| {
                    all.push(kept.read());
                    true
                });
                for (at, chosen) in all.iter().enumerate() {
                    for stops in [false, true] {
                        let (mut kept, mut seen) = (None, 0);
                        walk(n, k, |slice| {
                            seen += 1;
                            if seen == at + 1 {
                                kept = Some(slice.clone());
                            }
                            !(stops && seen > at + 1)
                        });
                        let mut ours = chosen.clone();
                        if stops {
                            one_further(&mut ours, n);
                        } else {
                            to_the_end(&mut ours, n);
                        }
                        assert_eq!(
                            Some(&ours),
                            kept.map(|k| k.read()).as_ref(),
                            "{chosen:?} of {n}, {stops}"
                        );
                        compared += 1;
                        changed += usize::from(ours != *chosen);
                    }
                }
            }
        }
        assert!(compared > 4000 && changed > 900, "{compared} {changed}");
    }
}
