//! One suite for all devices: the properties that a pool relies on.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)]

mod device_support;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device_support::{
    Buffer, PATIENCE, Reads, assert_holds, bytes, on_all_files, range, release, surface, write_all,
};
use vellum_pool::device::{Completion, Device, FaultyDevice, MemoryDevice, ReadDone, Write};
use vellum_vm::{PAGE_SIZE, PageRange};

/// Runs a test on every kind of device.
fn on_all_devices(test: impl Fn(Arc<dyn Device>)) {
    on_all_files(|device| test(Arc::new(device)));
    println!("memory");
    test(Arc::new(MemoryDevice::new()));
    test(Arc::new(MemoryDevice::new().completing(Completion::Thread).unwrap()));
    println!("faulty");
    let threaded = MemoryDevice::new().completing(Completion::Thread).unwrap();
    let faulty = FaultyDevice::new(threaded, 1).unwrap();
    faulty.plan().delay_reads(Duration::from_micros(50));
    test(Arc::new(faulty));
}

/// Ranges of 1 to `longest` pages, one after the other, and the end of the last one.
fn ranges(count: usize, longest: u64) -> (Vec<PageRange>, u64) {
    let mut start = 0;
    let ranges = (0..count as u64)
        .map(|number| {
            let count = 1 + number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % longest;
            start += count;
            range(start - count, count)
        })
        .collect();
    (ranges, start)
}

#[test]
fn what_is_written_is_read_by_calls_for_any_number_of_pages() {
    on_all_devices(|device| {
        for (generation, &(count, longest)) in
            [(1, 1), (2, 64), (63, 3), (64, 1), (65, 5), (100, 64), (1000, 2)].iter().enumerate()
        {
            let (ranges, end) = ranges(count, longest);
            device.resize(end).unwrap();
            assert_eq!(device.pages().unwrap(), end);
            write_all(&*device, &ranges, generation as u64);
            device.sync().unwrap();
            let surface = surface(end);
            for &range in ranges.iter().step_by(7) {
                device.read(&surface, range.into()).unwrap();
                assert_holds(&surface, range, generation as u64);
            }
            release(&surface, range(0, end));
            let mut reads = Reads::new();
            reads.start(&*device, &surface, &ranges);
            for result in reads.wait() {
                result.unwrap();
            }
            for &range in &ranges {
                assert_holds(&surface, range, generation as u64);
            }
        }
    });
}

#[test]
fn new_pages_are_zero_even_in_the_place_of_former_ones() {
    on_all_devices(|device| {
        device.resize(8).unwrap();
        write_all(&*device, &[range(0, 8)], 3);
        device.resize(2).unwrap();
        device.resize(8).unwrap();
        let surface = surface(8);
        device.read(&surface, range(0, 8).into()).unwrap();
        assert_holds(&surface, range(0, 2), 3);
        assert!(bytes(&surface, range(2, 6)).iter().all(|&byte| byte == 0));
    });
}

#[test]
fn reading_past_the_end_is_an_error_and_the_others_are_read() {
    on_all_devices(|device| {
        device.resize(10).unwrap();
        write_all(&*device, &[range(0, 10)], 9);
        let surface = surface(20);
        for past in [range(10, 1), range(9, 2), range(5, 15), range(19, 1)] {
            let error = device.read(&surface, past.into()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{past:?}: {error}");
        }
        let mut reads = Reads::new();
        let ranges = [range(10, 1), range(0, 2), range(9, 2), range(2, 3), range(19, 1)];
        reads.start(&*device, &surface, &ranges);
        for (result, asked) in reads.wait().into_iter().zip(ranges) {
            match asked.end() {
                Some(end) if end <= 10 => {
                    result.unwrap();
                    assert_holds(&surface, asked, 9);
                }
                _ => assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
            }
        }
    });
}

#[test]
fn ranges_outside_of_the_device_are_errors() {
    on_all_devices(|device| {
        device.resize(4).unwrap();
        let surface = surface(4);
        let nowhere = [range(4, 1), range(3, 2), range(1 << 60, 1), range(u64::MAX, 2)];
        for nowhere in nowhere {
            device.read(&surface, nowhere.into()).unwrap_err();
        }
        let mut reads = Reads::new();
        reads.start(&*device, &surface, &nowhere);
        assert!(reads.wait().iter().all(Result::is_err));
    });
}

#[test]
fn each_write_has_its_own_result() {
    on_all_devices(|device| {
        device.resize(64).unwrap();
        let buffers: Vec<_> = (0..64).map(|page| Buffer::of(range(page, 1), 5)).collect();
        let mut writes: Vec<_> = (0_u64..)
            .zip(&buffers)
            .map(|(page, buffer)| {
                let page = if page % 3 == 0 { page } else { u64::MAX / PAGE_SIZE as u64 - page };
                Write::new(page, [buffer.bytes(), &[]])
            })
            .collect();
        device.write(&mut writes);
        for (page, write) in (0_u64..).zip(&writes) {
            assert_eq!(write.result.is_ok(), page % 3 == 0, "page {page}: {:?}", write.result);
        }
        device.write(&mut []);
        let mut nothing = [Write::new(0, [&[], &[]])];
        device.write(&mut nothing);
        nothing[0].result.as_ref().unwrap();
        let surface = surface(64);
        device.read(&surface, range(63, 1).into()).unwrap();
        assert_holds(&surface, range(63, 1), 5);
    });
}

#[test]
fn many_threads_use_one_device() {
    on_all_devices(|device| {
        const SHARE: u64 = 256;
        device.resize(4 * SHARE).unwrap();
        let surface = surface(4 * SHARE);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (device, surface) = (&*device, &surface);
                scope.spawn(move || {
                    let start = thread * SHARE;
                    let mine: Vec<_> = (0..SHARE / 4).map(|n| range(start + 4 * n, 4)).collect();
                    for generation in 0..6 {
                        write_all(device, &mine, generation);
                        release(surface, range(start, SHARE));
                        let mut reads = Reads::new();
                        for part in mine.chunks(10) {
                            reads.start(device, surface, part);
                        }
                        assert!(reads.wait().iter().all(Result::is_ok));
                        assert_holds(surface, range(start, SHARE), generation);
                        device.read(surface, mine[1].into()).unwrap();
                        assert_holds(surface, mine[1], generation);
                    }
                });
            }
        });
    });
}

#[test]
fn more_reads_than_the_kernel_takes_at_once() {
    on_all_devices(|device| {
        device.resize(3000).unwrap();
        write_all(&*device, &[range(0, 3000)], 2);
        let surface = surface(3000);
        let ranges: Vec<_> = (0..3000).map(|page| range(page, 1)).collect();
        let mut reads = Reads::new();
        reads.start(&*device, &surface, &ranges);
        reads.start(&*device, &surface, &[]);
        assert!(reads.wait().iter().all(Result::is_ok));
        assert_holds(&surface, range(0, 3000), 2);
    });
}

#[test]
fn dropping_a_device_completes_the_reads_in_flight() {
    on_all_devices(|device| {
        device.resize(2000).unwrap();
        write_all(&*device, &[range(0, 2000)], 4);
        let surface = surface(2000);
        let ranges: Vec<_> = (0..2000).map(|page| range(page, 1)).collect();
        let mut reads = Reads::new();
        reads.start(&*device, &surface, &ranges);
        drop(device);
        assert_eq!(reads.done(), 2000);
        assert_holds(&surface, range(0, 2000), 4);
    });
}

#[test]
fn reads_complete_even_if_their_thread_has_ended() {
    on_all_devices(|device| {
        device.resize(1024).unwrap();
        write_all(&*device, &[range(0, 1024)], 6);
        let surface = surface(1024);
        let reads = Mutex::new(Reads::new());
        for part in 0..64 {
            let ranges: Vec<_> = (0..16).map(|page| range(part * 16 + page, 1)).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| reads.lock().unwrap().start(&*device, &surface, &ranges));
            });
        }
        for result in reads.into_inner().unwrap().wait() {
            result.unwrap();
        }
        assert_holds(&surface, range(0, 1024), 6);
    });
}

/// Reads page after page. The `ReadDone` of each read starts the next one.
fn read_on(
    device: &Arc<dyn Device>,
    surface: &Arc<vellum_vm::Surface>,
    page: u64,
    last: Box<dyn FnOnce() + Send>,
) {
    let (for_done, surface_for_done) = (Arc::clone(device), Arc::clone(surface));
    let done = ReadDone::new(move |result| {
        result.unwrap();
        if page == 0 {
            drop(for_done);
            last();
        } else {
            read_on(&for_done, &surface_for_done, page - 1, last);
        }
    });
    device.start_reads(surface, vec![(range(page, 1).into(), done)]);
}

#[test]
fn a_callback_may_start_reads_and_be_the_last_user() {
    on_all_devices(|device| {
        device.resize(200).unwrap();
        write_all(&*device, &[range(0, 200)], 8);
        let surface = Arc::new(surface(200));
        let (sender, receiver) = std::sync::mpsc::channel();
        let last = Box::new(move || sender.send(()).unwrap());
        read_on(&device, &surface, 199, last);
        drop(device);
        receiver.recv_timeout(PATIENCE).unwrap();
        assert_holds(&surface, range(0, 200), 8);
    });
}

#[test]
fn a_panicking_callback_affects_no_other_read() {
    on_all_devices(|device| {
        device.resize(4).unwrap();
        let surface = surface(4);
        let before = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let done = ReadDone::new(|_| panic!("expected by the test"));
            device.start_reads(&surface, vec![(range(0, 1).into(), done)]);
        }));
        drop(before);
        let mut reads = Reads::new();
        reads.start(&*device, &surface, &[range(1, 2)]);
        assert!(reads.wait()[0].is_ok());
    });
}

#[test]
fn an_abandoned_read_is_an_error() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    drop(ReadDone::new(move |result| {
        assert_eq!(result.unwrap_err().to_string(), "the device dropped the read without a result");
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let counter = Arc::clone(&calls);
    ReadDone::new(move |result| {
        result.unwrap();
        counter.fetch_add(1, Ordering::Relaxed);
    })
    .call(Ok(()));
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}
