//! Files in sandboxes that forbid io_uring, from the start or from some moment on.

#![cfg(not(feature = "model"))]
#![allow(unsafe_code, clippy::unwrap_used)]

mod device_support;

use std::process::Command;

use device_support::{Reads, assert_holds, range, release, surface, write_all};
use vellum_pool::device::{Device, DeviceError, EngineChoice, FileDevice, FileOptions};

/// Set for the child processes that the tests start.
const ROLE: &str = "VELLUM_TEST_CHILD";

/// Runs a test in a process of its own, because a sandbox cannot be left. True within it.
fn in_child(test: &str) -> bool {
    if std::env::var_os(ROLE).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args([test, "--exact", "--nocapture"]).env(ROLE, "1").output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// Makes a system call fail with `EPERM`, for all threads of the process.
fn forbid(syscall: libc::c_long) -> bool {
    // SAFETY: these only fill in structs, and the filter lives through the calls.
    unsafe {
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let give = (libc::BPF_RET | libc::BPF_K) as u16;
        let mut filter = [
            libc::BPF_STMT(load, 0),
            libc::BPF_JUMP(equal, syscall as u32, 0, 1),
            libc::BPF_STMT(give, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            libc::BPF_STMT(give, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        let forbidden = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_TSYNC,
                &raw const program,
            ) == 0;
        if !forbidden {
            println!("skipped: no seccomp here: {}", std::io::Error::last_os_error());
        }
        forbidden
    }
}

fn options(engine: EngineChoice) -> FileOptions {
    FileOptions { engine, ..FileOptions::default() }
}

#[test]
fn where_io_uring_is_forbidden_threads_do_the_work() {
    if !in_child("where_io_uring_is_forbidden_threads_do_the_work") {
        return;
    }
    // What is used last is forbidden first, so that each is found missing once.
    for call in [libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_io_uring_setup] {
        if !forbid(call) {
            return;
        }
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("pages");
        let device = FileDevice::create(&path, options(EngineChoice::Auto)).unwrap();
        assert_eq!(device.info().engine, "threads");
        device.resize(8).unwrap();
        write_all(&device, &[range(0, 8)], 1);
        drop(device);
        let error = FileDevice::open(&path, options(EngineChoice::Uring)).unwrap_err();
        assert!(matches!(error, DeviceError::Engine { engine: "io_uring", .. }), "{error}");
    }
}

#[test]
fn a_sandbox_that_closes_later_fails_reads_but_nothing_hangs_or_is_lost() {
    if !in_child("a_sandbox_that_closes_later_fails_reads_but_nothing_hangs_or_is_lost") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("pages");
    let Ok(device) = FileDevice::create(&path, options(EngineChoice::Uring)) else {
        println!("skipped: no io_uring here");
        return;
    };
    device.resize(600).unwrap();
    let ranges: Vec<_> = (0..600).map(|page| range(page, 1)).collect();
    write_all(&device, &ranges, 1);
    let surface = surface(600);
    let mut before = Reads::new();
    before.start(&device, &surface, &ranges);
    if !forbid(libc::SYS_io_uring_enter) {
        return;
    }
    // These may wait behind the others; what the kernel has is read, and the rest fails.
    before.start(&device, &surface, &ranges[..10]);
    assert_eq!(before.wait().len(), 610);
    for _ in 0..2 {
        let mut after = Reads::new();
        after.start(&device, &surface, &ranges);
        let failed: Vec<_> = after.wait().into_iter().filter_map(Result::err).collect();
        // One may be read on the spot, to see how long that takes.
        assert!(failed.len() + 1 >= ranges.len());
        for error in failed {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
    }
    for generation in 2..5 {
        write_all(&device, &ranges, generation);
        release(&surface, range(0, 600));
        device.read(&surface, range(0, 600)).unwrap();
        assert_holds(&surface, range(0, 600), generation);
    }
    let mut reads = Reads::new();
    reads.start(&device, &surface, &ranges);
    drop(device);
    assert_eq!(reads.done(), 600);
}
