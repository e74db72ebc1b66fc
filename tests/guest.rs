//! The guests' workloads, run on the host: what a scenario believes about them must be true.

use std::{fs, path::Path, time::Duration};
use truepin_tests::guest::{Program, Task, Workload, millis, secs, wait_until};

fn here(program: Program) -> Program {
    program.binary(Path::new(env!("CARGO_BIN_EXE_truepin-guest")))
}

#[test]
fn burn_ends_after_its_cpu_time() {
    let cpus = Task::me().allowed().unwrap();
    let cpu = cpus.iter().next_back().unwrap();
    let load = here(Workload::burn(2).comm("a long name that is cut").pin(&[cpu].into_iter().collect()))
        .cpu_time(millis(300))
        .spawn()
        .unwrap();
    let task = load.task();
    assert_eq!(task.comm().unwrap(), "a long name tha");
    for thread in task.threads().unwrap() {
        assert_eq!(thread.allowed().unwrap(), [cpu].into_iter().collect());
    }
    assert_eq!(task.threads().unwrap().len(), 2);
    let done = load.wait().unwrap();
    let used = done.cpu.unwrap();
    assert!(done.status.success() && used >= millis(300) && used < secs(2), "{done:?}");
    assert!(!task.is_alive());
}

#[test]
fn blink_sleeps() {
    let load = here(Workload::blink(3, millis(2), millis(98))).spawn().unwrap();
    wait_until("some CPU time", secs(10), || Ok(load.task().cpu_time()? > millis(20))).unwrap();
    let (before, start) = (load.task().cpu_time().unwrap(), std::time::Instant::now());
    std::thread::sleep(secs(1));
    let share =
        load.task().cpu_time().unwrap().saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64();
    // 3 x 2 % asked for; three threads that never slept would show 100 % of a CPU at the least.
    assert!(share > 0.0 && share < 0.5, "{share}");
    let task = load.task();
    drop(load);
    assert!(!task.is_alive());
}

#[test]
fn deeds_say_what_the_kernel_said() {
    use nix::errno::Errno;
    let mine = Task::me().allowed().unwrap();
    assert_eq!(here(Workload::pinning(&mine)).answer().unwrap(), Ok(()));
    // No CPU of the set exists.
    assert_eq!(here(Workload::pinning(&"1023".parse().unwrap())).answer().unwrap(), Err(Errno::EINVAL));

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f");
    fs::write(&file, "").unwrap();
    assert_eq!(here(Workload::writing(&file, "4-5")).linger(Duration::ZERO).answer().unwrap(), Ok(()));
    assert_eq!(fs::read_to_string(&file).unwrap(), "4-5\n");
    let none = here(Workload::writing(&dir.path().join("none"), "x"));
    assert_eq!(none.answer().unwrap(), Err(Errno::ENOENT));
    assert_eq!(none.run().unwrap().code(), 1);
}

#[test]
fn a_wrong_command_line_is_refused() {
    for line in [&["burn", "--theads", "2"][..], &["pin"], &["write", "--file", "x"], &["dance"], &[]] {
        let out =
            std::process::Command::new(env!("CARGO_BIN_EXE_truepin-guest")).args(line).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{line:?}");
        assert!(!out.stderr.is_empty());
    }
}
