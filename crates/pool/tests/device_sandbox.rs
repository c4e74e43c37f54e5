//! Files in sandboxes that forbid io_uring, from the start or from a later moment on.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)]

mod device_support;

use device_support::{Reads, assert_holds, range, release, surface, write_all};
use vellum_pool::device::{Device, DeviceError, FileDevice, FileOptions, IoEngineChoice};
use vellum_testing::own_process::entered;
use vellum_testing::system_calls::forbid;

fn options(engine: IoEngineChoice) -> FileOptions {
    FileOptions { engine, ..FileOptions::default() }
}

#[test]
fn where_io_uring_is_forbidden_threads_do_the_io() {
    if !entered("where_io_uring_is_forbidden_threads_do_the_io") {
        return;
    }
    // Forbids the calls in the reverse order of their use, so that the device finds each of them
    // missing once.
    for call in [libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_io_uring_setup] {
        if !forbid(call) {
            return;
        }
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("pages");
        let device = FileDevice::create(&path, options(IoEngineChoice::Auto)).unwrap();
        assert_eq!(device.info().engine, "threads");
        device.resize(8).unwrap();
        write_all(&device, &[range(0, 8)], 1);
        drop(device);
        let error = FileDevice::open(&path, options(IoEngineChoice::Uring)).unwrap_err();
        assert!(matches!(error, DeviceError::Engine { engine: "io_uring", .. }), "{error}");
    }
}

#[test]
fn a_ban_of_io_uring_in_use_fails_reads_but_none_hangs_or_is_lost() {
    if !entered("a_ban_of_io_uring_in_use_fails_reads_but_none_hangs_or_is_lost") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("pages");
    let Ok(device) = FileDevice::create(&path, options(IoEngineChoice::Uring)) else {
        println!("skipped: no io_uring here");
        return;
    };
    device.resize(1200).unwrap();
    // No page is another's neighbour, so each is its own request.
    let ranges: Vec<_> = (0..600).map(|page| range(2 * page, 1)).collect();
    write_all(&device, &ranges, 1);
    let surface = surface(1200);
    let mut before = Reads::new();
    before.start(&device, &surface, &ranges);
    if !forbid(libc::SYS_io_uring_enter) {
        return;
    }
    // These may wait for the reads before them. The kernel completes the reads that it has; the
    // rest fails.
    before.start(&device, &surface, &ranges[..10]);
    assert_eq!(before.wait().len(), 610);
    for _ in 0..2 {
        let mut after = Reads::new();
        after.start(&device, &surface, &ranges);
        let failed: Vec<_> = after.wait().into_iter().filter_map(Result::err).collect();
        // The device may do one read at once, to measure how long that takes.
        assert!(failed.len() + 1 >= ranges.len());
        for error in failed {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
    }
    for generation in 2..5 {
        write_all(&device, &ranges, generation);
        release(&surface, range(0, 1200));
        for &page in &ranges {
            device.read(&surface, page.into()).unwrap();
            assert_holds(&surface, page, generation);
        }
    }
    let mut reads = Reads::new();
    reads.start(&device, &surface, &ranges);
    drop(device);
    assert_eq!(reads.done(), 600);
}
