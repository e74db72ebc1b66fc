//! The packed choice: the largest groups that fit whole, then smaller ones, each level in the order of what is least free.
//!
//! Steps: whole sockets and NUMA nodes (those first that contain the others); with the option, last-level caches; whole
//! cores; threads. A step lists its groups as they are when it begins (fewest free first, then by number, inner groups
//! within outer ones) and takes each that is free and not larger than what is still needed.
//!
//! [`Rule::Averages`] is what the kubelet does: a core or socket counts as free when as many of its CPUs are free as
//! cores or sockets have on average, and is then taken with *all* its CPUs; a group that lies in two outer ones is
//! listed, and counted, twice. On uneven machines that takes CPUs which are not free, or another number than asked
//! for. [`Rule::True`] differs in just that: a group is free when all its CPUs are, and nothing is taken twice.
//!
//! Cost: a step looks at each group once, at the words of its own bitmap; cores are listed lazily and not sorted, since
//! those with equally many free threads are in the order of their numbers already.

use super::{
    KubeletMachine, StaticOptions, TakeError,
    mask::{Mask, Pool},
};
use crate::placement::inventory::{self, Sizes};
use smallvec::SmallVec;
use std::ops::ControlFlow;

/// When a group counts as free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// By average sizes.
    Averages,
    /// By its own size.
    True {
        /// Only whole cores are given, or none.
        whole: bool,
    },
}

/// What shapes the choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner {
    pub(super) rule: Rule,
    /// Threads by number instead of whole cores.
    pub(super) spread: bool,
    /// Last-level caches before cores.
    pub(super) uncore: bool,
}

impl Manner {
    pub(super) fn new(rule: Rule, options: StaticOptions) -> Self {
        Self {
            rule,
            spread: options.distribute_across_cores,
            uncore: options.prefer_align_by_uncorecache && !options.distribute_across_numa,
        }
    }
}

/// Places of groups in the order of a step.
pub(super) type Order = SmallVec<[usize; 64]>;

/// `n` of the CPUs in `free`; [`Rule::Averages`] may take others, and more or fewer.
pub(super) fn packed(
    machine: &KubeletMachine,
    manner: Manner,
    free: &Pool,
    n: usize,
) -> Result<Pool, TakeError> {
    let whole = manner.rule == Rule::True { whole: true };
    let available = free.len();
    let needed = isize::try_from(n).unwrap_or(isize::MAX);
    if n > available {
        return Err(TakeError::NotEnough { requested: n, available });
    }
    let free = if whole { whole_cores(machine, free) } else { free.clone() };
    let mut choice = Choice { machine, manner, taken: free.none(), free, needed, mixed: false };
    if whole {
        let sizes = choice.core_sizes(None);
        choice.mixed = sizes.len() > 1;
        if inventory::fill_cores(&sizes, n).0 != n {
            return Err(TakeError::Unaccounted { requested: n, available });
        }
    }
    if choice.run().is_break() {
        Ok(choice.taken)
    } else {
        Err(TakeError::Unaccounted { requested: n, available })
    }
}

/// The CPUs of those cores that are wholly in `free`.
pub(super) fn whole_cores(machine: &KubeletMachine, free: &Pool) -> Pool {
    let mut whole = free.none();
    for core in machine.cores.masks.iter().filter(|core| free.count(core) == core.len) {
        whole.add(core);
    }
    whole
}

/// Groups of which a CPU is free, as [`packed`] orders them.
pub(super) struct Levels<'m, 'f> {
    machine: &'m KubeletMachine,
    free: &'f Pool,
}

impl<'m, 'f> Levels<'m, 'f> {
    pub(super) fn new(machine: &'m KubeletMachine, free: &'f Pool) -> Self {
        Self { machine, free }
    }

    /// Whether NUMA nodes contain sockets, by the counters.
    fn nodes_outside(&self) -> bool {
        let counts = self.machine.counts();
        counts.sockets >= counts.nodes
    }

    fn sorted(&self, masks: &[Mask], places: impl Iterator<Item = usize>, order: &mut Order) {
        let mut keyed: SmallVec<[(usize, usize); 64]> =
            places.map(|at| (self.free.count(&masks[at]), at)).filter(|(count, _)| *count > 0).collect();
        keyed.sort_unstable();
        order.extend(keyed.into_iter().map(|(_, at)| at));
    }

    /// NUMA nodes.
    pub(super) fn nodes(&self) -> Order {
        let (machine, mut order) = (self.machine, Order::new());
        let masks = &machine.nodes.masks;
        if self.nodes_outside() {
            self.sorted(masks, 0..masks.len(), &mut order);
            return order;
        }
        for socket in self.sockets() {
            let parts = machine.inside.nodes_of_socket[socket].iter();
            self.sorted(masks, parts.filter(|p| self.free.touches(&p.shared)).map(|p| p.at), &mut order);
        }
        order
    }

    /// Sockets.
    fn sockets(&self) -> Order {
        let (machine, mut order) = (self.machine, Order::new());
        let masks = &machine.sockets.masks;
        if !self.nodes_outside() {
            self.sorted(masks, 0..masks.len(), &mut order);
            return order;
        }
        for node in self.nodes() {
            let parts = machine.inside.sockets_of_node[node].iter();
            self.sorted(masks, parts.filter(|p| self.free.touches(&p.shared)).map(|p| p.at), &mut order);
        }
        order
    }

    /// Last-level caches, within nodes.
    fn uncores(&self) -> Order {
        let (machine, mut order) = (self.machine, Order::new());
        for node in self.nodes() {
            let parts = machine.inside.uncores_of_node[node].iter();
            let places = parts.filter(|p| self.free.touches(&p.shared)).map(|p| p.at);
            self.sorted(&machine.uncores.masks, places, &mut order);
        }
        order
    }

    /// For each inner group in order, its cores (ascending; also those without a free CPU), and whether a CPU is in it.
    fn core_lists(&self) -> impl Iterator<Item = (&'m [u32], InGroup)> + use<'m> {
        let (inside, socket) = (&self.machine.inside, self.nodes_outside());
        let order = if socket { self.sockets() } else { self.nodes() };
        order.into_iter().map(move |at| {
            let cores = if socket { &inside.cores_of_socket[at] } else { &inside.cores_of_node[at] };
            (cores.as_slice(), InGroup { socket, at })
        })
    }
}

/// A group in which a core is listed.
#[derive(Clone, Copy)]
struct InGroup {
    socket: bool,
    at: usize,
}

/// A choice under way.
struct Choice<'a> {
    machine: &'a KubeletMachine,
    manner: Manner,
    free: Pool,
    taken: Pool,
    /// Below 0 when more was taken than asked for.
    needed: isize,
    /// Under [`Rule::True`] with whole cores: these are of several sizes, so that not every group may be taken.
    mixed: bool,
}

/// Broken off when nothing more is needed.
type Done = ControlFlow<()>;

impl<'a> Choice<'a> {
    fn run(&mut self) -> Done {
        self.done()?;
        if Levels::new(self.machine, &self.free).nodes_outside() {
            self.full_nodes()?;
            self.full_sockets()?;
        } else {
            self.full_sockets()?;
            self.full_nodes()?;
        }
        if self.manner.uncore {
            self.caches()?;
        }
        if !self.manner.spread || self.whole() {
            self.full_cores()?;
        }
        if self.whole() {
            return ControlFlow::Continue(());
        }
        if self.manner.spread { self.threads_of_sockets() } else { self.threads_of_cores() }
    }

    fn done(&self) -> Done {
        if self.needed < 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn whole(&self) -> bool {
        self.manner.rule == Rule::True { whole: true }
    }

    /// The end of a step: what was taken is free no more.
    fn settle(&mut self) -> Done {
        self.free.remove_all(&self.taken);
        self.done()
    }

    fn levels(&self) -> Levels<'a, '_> {
        Levels::new(self.machine, &self.free)
    }

    fn needs(&self, size: usize) -> bool {
        isize::try_from(size).is_ok_and(|size| self.needed >= size)
    }

    /// A size as what it takes off the need; groups are never larger than the machine.
    fn take(&mut self, mask: &Mask) {
        self.taken.add(mask);
        self.needed -= isize::try_from(mask.len).unwrap_or(isize::MAX);
    }

    /// Takes a group if so much is needed, and if whole cores can still make up the rest.
    fn take_if_needed(&mut self, mask: &Mask) {
        if !self.needs(mask.len) {
            return;
        }
        if self.manner.rule != Rule::Averages {
            if self.taken.touches(mask) {
                return;
            }
            if self.mixed {
                let rest = self.needed.unsigned_abs() - mask.len;
                if inventory::fill_cores(&self.core_sizes(Some(mask)), rest).0 != rest {
                    return;
                }
            }
        }
        self.take(mask);
    }

    /// Sizes of the cores that are whole and free, without those of `but`.
    fn core_sizes(&self, but: Option<&Mask>) -> Sizes {
        let mut left = self.free.clone();
        left.remove_all(&self.taken);
        if let Some(but) = but {
            let part = left.within(but);
            left.remove_all(&part);
        }
        let mut sizes = Sizes::new();
        for core in self.machine.cores.masks.iter().filter(|core| left.count(core) == core.len) {
            inventory::add(&mut sizes, core.len, 1);
        }
        sizes
    }

    fn full_nodes(&mut self) -> Done {
        for at in self.levels().nodes() {
            let mask = &self.machine.nodes.masks[at];
            if self.free.count(mask) == mask.len {
                self.take_if_needed(mask);
            }
        }
        self.settle()
    }

    fn full_sockets(&mut self) -> Done {
        let average = self.machine.counts().cpus_per_socket();
        for at in self.levels().sockets() {
            let mask = &self.machine.sockets.masks[at];
            let size = if self.manner.rule == Rule::Averages { average } else { mask.len };
            if self.free.count(mask) == size {
                self.take_if_needed(mask);
            }
        }
        self.settle()
    }

    /// Whole caches as long as so much is needed as they have on average; of each cache in turn also the first cores, if
    /// they are exactly what is missing.
    fn caches(&mut self) -> Done {
        let machine = self.machine;
        let order = self.levels().uncores();
        // The kubelet tries whole caches again before each part; the need only falls, so there is nothing left to take.
        if self.needs(machine.counts().cpus_per_uncore()) {
            for &at in &order {
                let mask = &machine.uncores.masks[at];
                if self.free.count(mask) == mask.len {
                    self.take_if_needed(mask);
                }
            }
            self.settle()?;
        }
        for at in order {
            self.part_of_cache(at)?;
        }
        ControlFlow::Continue(())
    }

    fn part_of_cache(&mut self, at: usize) -> Done {
        let machine = self.machine;
        let per_core = machine.counts().cpus_per_core().max(1);
        let needed = self.needed.unsigned_abs();
        let mut part: SmallVec<[u32; 64]> = SmallVec::new();
        let cores = machine.inside.cores_of_uncore[at].iter().map(|core| machine.threads(*core));
        let here =
            |cpu: &u32| self.free.contains(*cpu) && machine.places[*cpu as usize].uncore as usize == at;
        for core in cores.filter(|core| core.iter().any(here)).take(needed.div_ceil(per_core)) {
            part.extend(core.iter().copied().filter(|cpu| self.free.contains(*cpu)));
        }
        // One thread of the highest number is dropped for an odd request on SMT.
        if !needed.is_multiple_of(2) && per_core > 1 && part.len() > needed && !self.whole() {
            let highest = part.iter().copied().max();
            part.retain(|cpu| Some(*cpu) != highest);
        }
        if part.len() == needed {
            for cpu in part {
                self.take_cpu(cpu);
            }
        }
        self.settle()
    }

    fn take_cpu(&mut self, cpu: u32) {
        self.taken.insert(cpu);
        self.needed -= 1;
    }

    /// Free CPUs of a core, if one of them is in the group.
    fn free_threads(&self, core: u32, group: InGroup) -> Option<usize> {
        let (mut count, mut here) = (0, false);
        for cpu in self.machine.threads(core).iter().copied().filter(|cpu| self.free.contains(*cpu)) {
            count += 1;
            let place = self.machine.places[cpu as usize];
            here |= (if group.socket { place.socket } else { place.node }) as usize == group.at;
        }
        here.then_some(count)
    }

    /// All of them have equally many free CPUs, so they come by number.
    fn full_cores(&mut self) -> Done {
        let machine = self.machine;
        let average = machine.counts().cpus_per_core();
        let by_average = self.manner.rule == Rule::Averages;
        // Under `Rule::True` cores differ in size, and those with fewer CPUs come first.
        let rounds = if by_average { average..=average } else { 1..=machine.most_threads };
        for (cores, group) in self.levels().core_lists() {
            for count in rounds.clone() {
                for &core in cores {
                    if self.free_threads(core, group) != Some(count) {
                        continue;
                    }
                    let mask = &machine.cores.masks[core as usize];
                    if by_average || mask.len == count {
                        self.take_if_needed(mask);
                        if !self.needs(machine.least_threads) {
                            return self.settle();
                        }
                    }
                }
            }
        }
        self.settle()
    }

    fn threads_of_cores(&mut self) -> Done {
        let machine = self.machine;
        for (cores, group) in self.levels().core_lists() {
            for count in 1..=machine.most_threads {
                for &core in cores {
                    if self.free_threads(core, group) == Some(count) {
                        for &cpu in machine.threads(core) {
                            if self.free.contains(cpu) {
                                self.take_thread(cpu)?;
                            }
                        }
                    }
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn threads_of_sockets(&mut self) -> Done {
        let machine = self.machine;
        for at in self.levels().sockets() {
            let cpus: SmallVec<[u32; 64]> = self.free.iter(&machine.sockets.masks[at]).collect();
            for cpu in cpus {
                self.take_thread(cpu)?;
            }
        }
        ControlFlow::Continue(())
    }

    fn take_thread(&mut self, cpu: u32) -> Done {
        if self.manner.rule == Rule::Averages || !self.taken.contains(cpu) {
            self.take_cpu(cpu);
        }
        self.done()
    }
}
