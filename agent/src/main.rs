//! The `truepin` command.

mod names;

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(truepin_agent::cli::main())
}
