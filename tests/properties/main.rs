//! Properties of the core on random input.

mod kubelet;
mod machines;
mod placement;
mod topology;
