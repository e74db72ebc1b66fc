//! The `truepin` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(truepin_agent::cli::main())
}
