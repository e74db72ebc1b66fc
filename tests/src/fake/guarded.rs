//! A fake kernel that is looked at after every single change.

use super::{CgroupPath, Enforced, FakeKernel, Pool, invariants};
use truepin::observed::{Kernel, KernelError, Observed, Scope, Step};

/// The fake kernel with the observer between any two writes: where an executor drives the trait itself, a test
/// has no other place to look from.
#[derive(Debug, Clone)]
pub struct Guarded {
    /// The kernel.
    pub kernel: FakeKernel,
    /// Whose sets must not meet.
    pub owners: Vec<(CgroupPath, Enforced)>,
    /// What is left to the others.
    pub pool: Pool,
    /// Every breach, with the number of the `apply` after which it stood and the step.
    pub breaches: Vec<String>,
}

impl Guarded {
    /// Watches `kernel` from here on.
    #[must_use]
    pub fn new(kernel: FakeKernel, owners: Vec<(CgroupPath, Enforced)>, pool: Pool) -> Self {
        Self { kernel, owners, pool, breaches: Vec::new() }
    }
}

impl Kernel for Guarded {
    fn observe(&mut self, scope: &Scope) -> Result<Observed, KernelError> {
        self.kernel.observe(scope)
    }

    fn apply(&mut self, step: &Step) -> Result<(), KernelError> {
        let result = self.kernel.apply(step);
        let nth = self.kernel.applies();
        for breach in invariants(&self.kernel, &self.owners, &self.pool) {
            self.breaches.push(format!("after step {nth}, {}: {breach}", step.shell("")));
        }
        result
    }
}
