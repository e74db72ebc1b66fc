//! PID 1 of the virtual machines; and, under other names of sub-commands, the workloads in them.

use std::process::ExitCode;
use truepin_tests::guest::{host, init, workload::worker};

fn main() -> ExitCode {
    // The processes of the fake kernel's scripts are this binary as well.
    truepin_tests::fake::child_entry();
    if std::process::id() == 1 {
        let failed = init::main();
        eprintln!("truepin-guest: {failed:#}");
        return ExitCode::FAILURE;
    }
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let done = match host::main(&args) {
        Ok(None) => worker::main(args),
        done => done,
    };
    match done {
        Ok(Some(code)) => code,
        Ok(None) => {
            eprintln!(
                "usage: truepin-guest burn|blink|bomb|pin|write [--OPTION VALUE]... (tests/src/guest/workload.rs)\n       \
                 truepin-guest scenarios SUITE | host SUITE NUMBER SCENARIO (tests/src/guest/host.rs)"
            );
            ExitCode::from(2)
        }
        Err(e) => {
            eprintln!("truepin-guest: {e:#}");
            ExitCode::from(2)
        }
    }
}
