//! Room that is made ahead, in steps: flushes go between them.
#![allow(clippy::unwrap_used)]

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_log::{
    Block, Log, LogDevice, LogError, LogOptions, RecordRef, SimulatedDevice, SimulatedOptions,
    Written,
};
use vellum_testing::patience::eventually;

/// A device whose steps end only after a block was written.
#[derive(Debug)]
struct Stepwise {
    device: SimulatedDevice,
    /// The steps end once this block was written.
    until: u64,
    written: AtomicU64,
    steps: AtomicU64,
}

impl LogDevice for Stepwise {
    fn identity(&self) -> u64 {
        self.device.identity()
    }

    fn scan(&self) -> Range<u64> {
        self.device.scan()
    }

    fn prepare(&self) -> io::Result<bool> {
        self.steps.fetch_add(1, Ordering::SeqCst);
        Ok(self.written.load(Ordering::SeqCst) <= self.until)
    }

    fn extend(&self) -> io::Result<u64> {
        self.device.extend()
    }

    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written> {
        let count = parts[0].len() + parts[1].len();
        self.written.fetch_max(first + count as u64, Ordering::SeqCst);
        self.device.append(first, parts)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        self.device.read(first, blocks)
    }

    fn trim(&self, before: u64) -> io::Result<()> {
        self.device.trim(before)
    }

    fn taken(&self) -> &AtomicBool {
        self.device.taken()
    }
}

fn open(until: u64) -> (Log, Arc<Stepwise>) {
    let mut options = SimulatedOptions::default();
    (options.segment_blocks, options.segments) = (8, 8);
    let device = SimulatedDevice::new(options);
    let (written, steps) = (AtomicU64::new(0), AtomicU64::new(0));
    let device = Arc::new(Stepwise { device, until, written, steps });
    let mut options = LogOptions::default();
    options.ring_bytes = 4 * 4096;
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    (Log::open(device.clone(), &options, None, visit).unwrap().0, device)
}

/// Appends a record that fills a block, and waits until it is durable.
fn commit(log: &Log) {
    let lsn = log.append(&[7; 4000]).unwrap();
    log.wait_durable(lsn).unwrap();
}

#[test]
fn a_flush_that_no_thread_waits_for_goes_between_two_steps() {
    let (log, device) = open(5);
    (0..5).for_each(|_| commit(&log));
    eventually("the steps begin", || device.steps.load(Ordering::SeqCst) > 100);
    assert_eq!(device.scan(), 0..8, "the steps have not ended");
    // Only the thread of the log carries this record.
    let lsn = log.append(b"wanted").unwrap();
    log.request_flush(lsn);
    eventually("the flush", || log.durable() > lsn);
    eventually("the room", || device.scan() == (0..16));
}

#[test]
fn a_record_that_needs_the_room_does_not_wait_for_the_steps() {
    let (log, device) = open(40);
    (0..5).for_each(|_| commit(&log));
    eventually("the steps begin", || device.steps.load(Ordering::SeqCst) > 100);
    assert_eq!(device.scan(), 0..8, "the steps have not ended");
    (0..15).for_each(|_| commit(&log));
    assert_eq!(device.scan().end, 24);
    // Nor does the end of the log.
    drop(log);
}
