//! Properties of the core on random input.

mod hints;
mod machines;
mod placement;
mod topology;
