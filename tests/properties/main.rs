//! Properties of the core on random input.

mod machines;
mod placement;
mod topology;
