//! PID 1 of the virtual machines; and, under other names of sub-commands, the workloads in them.

use std::process::ExitCode;
use truepin_tests::guest::{init, workload::worker};

fn main() -> ExitCode {
    // The processes of the fake kernel's scripts are this binary as well.
    truepin_tests::fake::child_entry();
    if std::process::id() == 1 {
        let failed = init::main();
        eprintln!("truepin-guest: {failed:#}");
        return ExitCode::FAILURE;
    }
    match worker::main(std::env::args_os().skip(1).collect()) {
        Ok(Some(code)) => code,
        Ok(None) => {
            eprintln!(
                "usage: truepin-guest burn|blink|bomb|pin|write [--OPTION VALUE]... (tests/src/guest/workload.rs)"
            );
            ExitCode::from(2)
        }
        Err(e) => {
            eprintln!("truepin-guest: {e:#}");
            ExitCode::from(2)
        }
    }
}
