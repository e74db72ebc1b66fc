//! Properties of the core on random input.

mod hints;
mod kubelet;
mod machines;
mod placement;
mod topology;
