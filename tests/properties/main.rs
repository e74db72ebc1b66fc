//! Properties of the core on random input.

mod kubelet;
mod hints;
mod machines;
mod placement;
mod topology;
