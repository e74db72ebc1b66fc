//! The `truepin` command.

fn main() {}
