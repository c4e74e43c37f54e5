//! The devices for tests have the faults that their plans ask for.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)]

mod device_support;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use device_support::{Buffer, PATIENCE, Reads, assert_holds, bytes, range, surface, write_all};
use vellum_pool::device::{
    Completion, Device, Fault, FaultyDevice, FileDevice, FileOptions, MemoryDevice, Operation,
    Write,
};
use vellum_vm::{Errno, PAGE_SIZE, PageRange, Surface};

/// A device of 16 pages of generation 1.
fn faulty(seed: u64) -> FaultyDevice<MemoryDevice> {
    let device = FaultyDevice::new(MemoryDevice::new(), seed).unwrap();
    device.resize(16).unwrap();
    write_all(&device, &[range(0, 16)], 1);
    device
}

fn write(device: &dyn Device, range: PageRange, generation: u64) -> io::Result<()> {
    let buffer = Buffer::of(range, generation);
    let mut writes = [Write::new(range.start, [buffer.bytes(), &[]])];
    device.write(&mut writes);
    let [write] = writes;
    write.result
}

/// Reads synchronously and asynchronously. Both must have the same kind of result.
fn read_both_ways(
    device: &dyn Device,
    surface: &Surface,
    range: PageRange,
    again: impl Fn(),
) -> io::Result<()> {
    again();
    let mut reads = Reads::new();
    reads.start(device, surface, &[range]);
    let asynchronous = reads.wait().remove(0);
    again();
    let blocking = device.read(surface, range.into());
    assert_eq!(asynchronous.is_ok(), blocking.is_ok());
    blocking
}

#[test]
fn the_nth_operation_fails_once() {
    let device = faulty(1);
    let plan = device.plan();
    plan.fail_nth(Operation::Write, 2, Fault::Error(Errno::NOSPC));
    plan.fail_nth(Operation::Sync, 1, Fault::Error(Errno::IO));
    plan.fail_nth(Operation::Resize, 1, Fault::Error(Errno::NOSPC));
    write(&device, range(0, 1), 2).unwrap();
    let error = write(&device, range(1, 1), 2).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    write(&device, range(2, 1), 2).unwrap();
    assert_eq!(device.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
    device.sync().unwrap();
    assert_eq!(device.resize(20).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(device.pages().unwrap(), 16);
    device.resize(20).unwrap();
    let surface = surface(16);
    device.read(&surface, range(0, 16).into()).unwrap();
    for (page, generation) in [(0, 2), (1, 1), (2, 2)] {
        assert_holds(&surface, range(page, 1), generation);
    }
    let counts = plan.counts();
    assert_eq!((counts.reads, counts.writes, counts.syncs, counts.resizes), (1, 4, 2, 3));
    assert_eq!((counts.faults, counts.write_calls), (3, 4));
}

#[test]
fn reads_fail_return_wrong_bytes_and_the_next_page() {
    let device = faulty(2);
    let plan = device.plan();
    let surface = surface(16);
    let asked = range(4, 2);
    let with = |fault| {
        read_both_ways(&device, &surface, asked, || plan.fail_nth(Operation::Read, 1, fault))
    };
    with(Fault::Error(Errno::IO)).unwrap_err();
    with(Fault::Torn { bytes: 5000 }).unwrap_err();
    let (got, wanted) = (bytes(&surface, asked), Buffer::of(asked, 1));
    assert_eq!(got[..5000], wanted.bytes()[..5000]);
    assert_ne!(got[5000..], wanted.bytes()[5000..]);
    with(Fault::FlippedBit).unwrap();
    let got = bytes(&surface, asked);
    let flipped: u32 =
        got.iter().zip(wanted.bytes()).map(|(got, wanted)| (got ^ wanted).count_ones()).sum();
    assert_eq!(flipped, 1);
    with(Fault::Misdirected).unwrap();
    assert_eq!(bytes(&surface, asked), Buffer::of(range(2, 2), 1).bytes());
    with(Fault::Lost).unwrap();
    assert!(bytes(&surface, asked).iter().all(|&byte| byte == 0));
    device.read(&surface, asked.into()).unwrap();
    assert_holds(&surface, asked, 1);
    assert_eq!(plan.counts().faults, 10);
}

#[test]
fn writes_are_torn_misdirected_and_lost() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = FileDevice::create(directory.path().join("pages"), FileOptions::default()).unwrap();
    let device = FaultyDevice::new(file, 3).unwrap();
    device.resize(16).unwrap();
    write_all(&device, &[range(0, 16)], 1);
    let plan = device.plan();
    let surface = surface(32);
    let asked = range(4, 2);
    let with = |fault| {
        write_all(&device, &[range(0, 16)], 1);
        plan.fail_nth(Operation::Write, 1, fault);
        let result = write(&device, asked, 2);
        device.read(&surface, range(0, 16).into()).unwrap();
        result
    };
    with(Fault::Torn { bytes: 512 }).unwrap_err();
    let got = bytes(&surface, asked);
    assert_eq!(got[..512], Buffer::of(asked, 2).bytes()[..512]);
    assert_eq!(got[512..], Buffer::of(asked, 1).bytes()[512..]);
    with(Fault::Torn { bytes: PAGE_SIZE }).unwrap_err();
    assert_holds(&surface, range(4, 1), 2);
    assert_holds(&surface, range(5, 1), 1);
    with(Fault::Misdirected).unwrap();
    assert_holds(&surface, range(4, 12), 1);
    assert_eq!(bytes(&surface, range(2, 2)), Buffer::of(asked, 2).bytes());
    with(Fault::Lost).unwrap();
    assert_holds(&surface, range(0, 16), 1);
    with(Fault::Error(Errno::NOSPC)).unwrap_err();
    assert_holds(&surface, range(0, 16), 1);
    with(Fault::FlippedBit).unwrap();
    let (got, wanted) = (bytes(&surface, asked), Buffer::of(asked, 2));
    let flipped: u32 =
        got.iter().zip(wanted.bytes()).map(|(got, wanted)| (got ^ wanted).count_ones()).sum();
    assert_eq!(flipped, 1);
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let fate = |seed| -> Vec<bool> {
        let device = faulty(seed);
        device.plan().fail_randomly(Operation::Write, 0.3, Fault::Error(Errno::IO));
        (0..200).map(|_| write(&device, range(0, 1), 1).is_ok()).collect()
    };
    assert_eq!(fate(7), fate(7));
    assert_ne!(fate(7), fate(8));
    let failed = fate(7).iter().filter(|ok| !**ok).count();
    assert!((30..90).contains(&failed), "{failed} of 200 failed");
}

#[test]
fn plans_are_changed_while_the_device_is_in_use() {
    let device = faulty(1);
    let plan = device.plan();
    plan.fail_always(Operation::Write, Fault::Error(Errno::IO));
    assert!(write(&device, range(0, 1), 1).is_err() && write(&device, range(0, 1), 1).is_err());
    plan.clear();
    write(&device, range(0, 1), 1).unwrap();
}

#[test]
fn gates_hold_operations_until_they_are_opened() {
    let device = Arc::new(faulty(1));
    let plan = device.plan();
    let surface = surface(16);
    plan.hold(Operation::Read);
    let mut reads = Reads::new();
    reads.start(&*device, &surface, &[range(0, 4), range(4, 4)]);
    assert!(plan.wait_until_held(Operation::Read, 2, PATIENCE));
    std::thread::scope(|scope| {
        scope.spawn(|| device.read(&surface, range(8, 8).into()).unwrap());
        assert!(plan.wait_until_held(Operation::Read, 3, PATIENCE));
        plan.hold(Operation::Write);
        scope.spawn(|| write(&*device, range(0, 1), 1).unwrap());
        assert!(plan.wait_until_held(Operation::Write, 1, PATIENCE));
        assert!(!plan.wait_until_held(Operation::Write, 2, Duration::from_millis(10)));
        assert_eq!((reads.done(), plan.held(Operation::Read)), (0, 3));
        plan.release(Operation::Read);
        plan.release(Operation::Write);
    });
    assert_eq!(plan.held(Operation::Read), 0);
    assert!(reads.wait().iter().all(Result::is_ok));
    assert_holds(&surface, range(0, 16), 1);
}

#[test]
fn dropping_the_device_opens_its_gates() {
    let device = faulty(1);
    let plan = device.plan();
    let surface = surface(16);
    plan.hold(Operation::Read);
    let mut reads = Reads::new();
    reads.start(&device, &surface, &[range(0, 4), range(4, 4)]);
    drop(device);
    assert_eq!(reads.done(), 2);
    plan.release(Operation::Read);
}

#[test]
fn delayed_reads_are_done_out_of_order() {
    let device = faulty(5);
    device.plan().delay_reads(Duration::from_millis(3));
    let surface = surface(16);
    let order = || {
        let (sender, receiver) = std::sync::mpsc::channel();
        let reads = (0..16).map(|page| {
            let sender = sender.clone();
            let done = vellum_pool::device::ReadDone::new(move |result| {
                result.unwrap();
                sender.send(page).unwrap();
            });
            (range(page, 1).into(), done)
        });
        device.start_reads(&surface, reads.collect());
        (0..16).map(|_| receiver.recv_timeout(PATIENCE).unwrap()).collect::<Vec<u64>>()
    };
    // If the threads of the device get a processor late, all delays may be over by then.
    assert!((0..1_000).any(|_| !order().is_sorted()));
    assert_holds(&surface, range(0, 16), 1);
}

#[test]
fn memory_is_limited_aligned_and_survives_a_crash() {
    let device = MemoryDevice::new().limited_to(10).completing(Completion::Thread).unwrap();
    device.resize(8).unwrap();
    assert_eq!(device.resize(11).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(device.pages().unwrap(), 8);
    write(&device, range(8, 2), 3).unwrap();
    assert_eq!(device.pages().unwrap(), 10);
    let error = write(&device, range(10, 1), 3).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let buffer = Buffer::zeroed(2);
    for part in [&buffer.bytes()[..100], &buffer.bytes()[100..PAGE_SIZE + 100]] {
        let mut writes = [Write::new(0, [part, &[]])];
        device.write(&mut writes);
        assert_eq!(writes[0].result.as_ref().unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    let after_crash = MemoryDevice::from_snapshot(device.snapshot());
    drop(device);
    let surface = surface(10);
    after_crash.read(&surface, range(0, 10).into()).unwrap();
    assert_holds(&surface, range(8, 2), 3);
    assert_eq!((after_crash.info().engine, after_crash.info().path), ("memory", None));
}
