//! Children of a fork: they have the log's memory and files, but not its threads.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tempfile::tempdir;
use vellum_log::{FileLog, FileLogOptions, Log, LogDevice as _, LogError, LogOptions, Lsn};
use vellum_testing::own_process;
use vellum_testing::patience::{PATIENCE, SetWhenDropped};

/// Runs `act` in a child, which must end, and returns whether it was content.
fn child(act: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child calls what is under test, and ends without returning.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            libc::alarm(PATIENCE.as_secs() as u32);
            libc::_exit(if act() { 42 } else { 1 });
        }
        pid
    }
}

fn ended(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: the status is written to a local.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child hung or crashed: {status}");
    libc::WEXITSTATUS(status)
}

fn is_forked<T>(result: Result<T, LogError>) -> bool {
    matches!(result, Err(LogError::Forked))
}

#[test]
fn a_child_gets_errors_and_harms_nothing() {
    if !own_process::entered("a_child_gets_errors_and_harms_nothing") {
        return;
    }
    let folder = tempdir().unwrap();
    let open = || {
        let device = Arc::new(FileLog::open(folder.path(), &FileLogOptions::default())?);
        let (log, _) =
            Log::open(device.clone(), &LogOptions::default(), None, |_| Ok::<_, LogError>(()))?;
        Ok::<_, LogError>((device, log))
    };
    let (device, log) = open().unwrap();
    let log = Arc::new(log);
    let first = log.append(b"first").unwrap();
    log.wait_durable(first).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stops = SetWhenDropped(&stop);
        // Their locks are held at some of the forks.
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let lsn = log.append(&[1; 100]).unwrap();
                    log.on_durable(lsn, Box::new(drop));
                    log.wait_durable(lsn).unwrap();
                    log.trim(lsn).unwrap();
                }
            });
        }
        for _ in 0..50 {
            let pid = child(|| {
                let told = Arc::new(AtomicBool::new(false));
                let tells = told.clone();
                let on_durable = move |result| tells.store(is_forked(result), Ordering::SeqCst);
                log.on_durable(first, Box::new(on_durable));
                log.request_flush(Lsn(1 << 40));
                log.wait_callers();
                let calls = [
                    told.load(Ordering::SeqCst),
                    is_forked(log.append(b"child")),
                    is_forked(log.try_append(&[b"child"])),
                    is_forked(log.wait_durable(first)),
                    is_forked(log.scan(None)),
                    is_forked(log.read(first)),
                    is_forked(log.trim(first)),
                    log.begin() == Lsn(0),
                    device.sync().is_err() && device.extend().is_err(),
                ];
                // SAFETY: the child leaves by `_exit`, so it drops the handle here alone.
                let handle = unsafe { std::ptr::read(&raw const log) };
                let closed = Arc::into_inner(handle).is_some_and(|log| is_forked(log.close()));
                calls.iter().all(|call| *call) && closed
            });
            assert_eq!(ended(pid), 42);
        }
    });
    // The children have unlocked nothing.
    assert!(matches!(open(), Err(LogError::InUse { .. })));
    let last = log.append(b"last").unwrap();
    log.wait_durable(last).unwrap();
    // One that lives on does not keep the folder from being opened again.
    let pid = child(|| {
        // SAFETY: waits to be killed.
        unsafe { libc::pause() };
        false
    });
    drop((Arc::into_inner(log).unwrap(), device));
    let (_, log) = open().unwrap();
    assert_eq!(log.read(last).unwrap(), b"last");
    // SAFETY: the child that was made above, and is not waited for yet.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: as in `ended`.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
}
