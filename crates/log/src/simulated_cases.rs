//! Single cases on the simulated device: where a log ends, what is damage, what failures do.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_testing::patience::eventually;

use crate::block::{Block, Head, INCARNATIONS, LENGTH, Lsn, PAYLOAD_U64, STARTS, Unsound};
use crate::device::{LogDevice as _, SimulatedDevice, SimulatedFault, SimulatedOptions, Written};
use crate::error::LogError;
use crate::log::{Log, LogOptions};
use crate::scan::{EndReason, Record, RecordRef};

/// A log of so many small records, each durable by itself, in blocks of their own.
fn small_log(records: u64) -> Arc<SimulatedDevice> {
    let options = SimulatedOptions { segment_blocks: 16, ..SimulatedOptions::default() };
    let device = Arc::new(SimulatedDevice::new(options));
    let log = recover(&device).unwrap().0;
    for number in 0..records {
        let lsn = log.append(&number.to_le_bytes()).unwrap();
        assert_eq!(lsn, Lsn::of_position(number * PAYLOAD_U64));
        log.wait_durable(lsn).unwrap();
    }
    device
}

type Recovered = Result<(Log, Vec<Record>, EndReason), LogError>;

fn recover(device: &Arc<SimulatedDevice>) -> Recovered {
    recover_by(device, false)
}

fn recover_by(device: &Arc<SimulatedDevice>, reads_ahead: bool) -> Recovered {
    let (mut found, options) = (Vec::new(), LogOptions::default());
    let (log, end) = Log::recover(device.clone(), &options, None, reads_ahead, |record| {
        found.push(record.to_record());
        Ok::<_, LogError>(())
    })?;
    Ok((log, found, end.why))
}

/// A thread reads chunks of 256 blocks after the first 64 blocks.
#[test]
fn reading_ahead_changes_nothing() {
    let options = SimulatedOptions { segment_blocks: 64, segments: 64, ..Default::default() };
    let device = Arc::new(SimulatedDevice::new(options));
    let log = recover(&device).unwrap().0;
    for number in 0..600_usize {
        let lsn = log.append(&vec![number as u8; number * 997 % 20_000]).unwrap();
        log.wait_durable(lsn).unwrap();
    }
    drop(log);
    let told = |reads_ahead| match recover_by(&device, reads_ahead) {
        Ok((_, found, why)) => Ok((found, why)),
        Err(error) => Err(error.to_string()),
    };
    let blocks = device.scan().end;
    assert!(blocks > 1500, "{blocks}");
    for bad in [0, 1, 63, 64, 65, 319, 320, 1000, blocks - 1] {
        device.set_unreadable(bad..bad + 1);
        assert_eq!(told(true), told(false), "block {bad}");
    }
    device.set_unreadable(0..0);
    assert_eq!(told(true), told(false));
    assert_eq!(told(true).unwrap().0.len(), 600);
    // The caller refuses a record while the thread is at work.
    let (refuses, options) = (|_: RecordRef<'_>| Err(LogError::Closed), LogOptions::default());
    let refused = Log::recover(device.clone(), &options, None, true, refuses);
    assert!(matches!(refused, Err(LogError::Closed)));
    assert_eq!(Arc::strong_count(&device), 1, "the thread has ended");
}

#[test]
fn damage_is_told_from_the_end_where_a_later_block_knows() {
    for damaged in 0..9 {
        let device = small_log(10);
        device.damage(damaged, |block| block[1000] ^= 1);
        let error = recover(&device).unwrap_err();
        let LogError::Damaged { lsn, .. } = error else { panic!("{error}") };
        assert_eq!(lsn, Lsn::of_block(damaged));
    }
    // The last block of a log that was not closed: no later block says that it was durable.
    let device = small_log(10);
    device.damage(9, |block| block[1000] ^= 1);
    assert_eq!(recover(&device).unwrap().1.len(), 9);
    // One that was closed, or opened again and written to, knows.
    let device = small_log(10);
    recover(&device).unwrap().0.close().unwrap();
    assert_eq!(recover(&device).unwrap().2, EndReason::Closed);
    device.damage(9, |block| block.fill(0));
    assert!(matches!(recover(&device), Err(LogError::Damaged { .. })));
}

/// What an opening acknowledges, the next one finds, or the opening is refused.
#[test]
fn a_log_with_the_last_number_of_an_opening_is_refused() {
    for (back, opens) in [(2, true), (1, false)] {
        let device = small_log(3);
        device.damage(2, |bytes| {
            let mut block = Block(*bytes);
            let head = Head::read(&block).unwrap();
            let head = Head { incarnation: INCARNATIONS.end - back, flags: STARTS, ..head };
            head.seal(&mut block);
            *bytes = block.0;
        });
        match recover(&device) {
            Ok((log, ..)) => {
                assert!(opens);
                let lsn = log.append(b"acknowledged").unwrap();
                log.wait_durable(lsn).unwrap();
                drop(log);
                let error = recover(&Arc::new(device.crash())).unwrap_err();
                assert!(matches!(error, LogError::Damaged { .. }), "{error}");
            }
            Err(error) => assert!(!opens && matches!(error, LogError::Damaged { .. }), "{error}"),
        }
    }
}

#[test]
fn a_running_log_knows_what_was_durable() {
    let device = small_log(3);
    let (log, _, _) = recover(&device).unwrap();
    device.damage(2, |block| block[8] ^= 1);
    let read: Result<Vec<_>, _> = log.scan(None).unwrap().collect();
    assert!(matches!(read, Err(LogError::Damaged { .. })));
}

#[test]
fn a_failed_write_or_sync_poisons_and_is_never_tried_again() {
    for fault in [SimulatedFault::Append, SimulatedFault::Sync] {
        let device = small_log(2);
        let (log, _, _) = recover(&device).unwrap();
        let lsn = log.append(b"lost").unwrap();
        device.fail(fault, 1);
        assert!(matches!(log.wait_durable(lsn), Err(LogError::Poisoned { .. })));
        let syncs = device.syncs();
        assert!(matches!(log.wait_durable(lsn), Err(LogError::Poisoned { .. })));
        assert!(matches!(log.append(b"more"), Err(LogError::Poisoned { .. })));
        assert!(matches!(log.close(), Err(LogError::Poisoned { .. })));
        assert_eq!(device.syncs(), syncs);
    }
}

#[test]
fn a_full_log_refuses_records_and_goes_on_after_a_trim() {
    let device = small_log(1);
    let (log, _, _) = recover(&device).unwrap();
    let mut last = Lsn(0);
    let error = loop {
        match log.append(&[1; 4000]) {
            Ok(lsn) => last = lsn,
            Err(error) => break error,
        }
        log.wait_durable(last).unwrap();
    };
    assert!(matches!(error, LogError::Full { bytes: 4004, .. }), "{error}");
    assert_eq!(last.block(), 63, "all of the four segments");
    log.trim(last).unwrap();
    let lsn = log.append(&[2; 4000]).unwrap();
    log.wait_durable(lsn).unwrap();
    assert_eq!(log.read(lsn).unwrap(), [2; 4000]);
    drop(log);
    assert_eq!(recover(&device).unwrap().1.last().unwrap().bytes, [2; 4000]);
}

#[test]
fn bad_numbers_and_long_records_are_refused() {
    let device = small_log(2);
    let (log, _, _) = recover(&device).unwrap();
    assert!(matches!(log.wait_durable(Lsn(1 << 40)), Err(LogError::NotAppended { .. })));
    for lsn in [0, 49, 60, 4096, 2 * 4096 + 48, 1 << 40] {
        let read = log.read(Lsn(lsn));
        assert!(matches!(read, Err(LogError::NotAppended { .. })), "{lsn}: {read:?}");
    }
    assert!(log.scan(Some(Lsn(1 << 40))).is_err());
    let longest = log.longest_record();
    assert!(matches!(log.append(&vec![0; longest + 1]), Err(LogError::TooLong { .. })));
    log.append(&[]).unwrap();
}

/// A log with these blocks: durable ones, one that a crash lost, and two that the same crash left.
fn log_with_a_hole(durable: u8) -> Arc<SimulatedDevice> {
    let options = SimulatedOptions {
        segment_blocks: 4,
        segments: 2,
        durable_appends: true,
        in_flight: 4,
        ..SimulatedOptions::default()
    };
    let device = Arc::new(SimulatedDevice::new(options));
    let log = recover(&device).unwrap().0;
    for number in 0..durable {
        let lsn = log.append(&[number; 100]).unwrap();
        log.wait_durable(lsn).unwrap();
    }
    let fly = |record: &[u8]| {
        log.append(record).unwrap();
        log.take_flight().unwrap()
    };
    let flights = [&b"lost"[..], b"stale", b"stale, too"].map(fly);
    flights[1..].iter().for_each(|flight| assert_eq!(flight.write(), Ok(Written::Durable)));
    Arc::new(device.crash())
}

fn blocks(device: &SimulatedDevice) -> Vec<[u8; 4096]> {
    let room = device.scan();
    let mut blocks = vec![Block::ZERO; (room.end - room.start) as usize];
    device.read(room.start, &mut blocks).unwrap();
    blocks.into_iter().map(|block| block.0).collect()
}

#[test]
fn an_opening_leaves_blocks_after_the_end_and_never_takes_them() {
    let mut device = log_with_a_hole(2);
    let before = blocks(&device);
    for _ in 0..2 {
        let (log, found, why) = recover(&device).unwrap();
        assert_eq!(found.len(), 2);
        assert!(matches!(why, EndReason::Unsound(_)), "{why}");
        drop(log);
        assert!(blocks(&device) == before, "an opening has changed blocks");
        device = Arc::new(device.crash());
    }
    // The next block fills the hole: what follows is of an earlier opening.
    for filled in 1..4 {
        let log = recover(&device).unwrap().0;
        let lsn = log.append(b"filled").unwrap();
        log.wait_durable(lsn).unwrap();
        device = Arc::new(device.crash());
        let (_, found, why) = recover(&device).unwrap();
        assert_eq!(found.len(), 2 + filled, "{why}");
        assert_eq!(found.last().unwrap().bytes, b"filled");
        let is_stale = why == EndReason::Unsound(Unsound::Incarnation(1));
        assert_eq!(is_stale, filled < 3, "{why}");
    }
}

/// The log goes on to the end of a segment, and the next one holds what an earlier flush left: an
/// opening that saw that segment alone would take it for the log.
#[test]
fn a_trim_leaves_the_block_that_tells_what_follows_it() {
    let device = log_with_a_hole(3);
    let log = recover(&device).unwrap().0;
    let lsn = log.append(b"filled").unwrap();
    log.wait_durable(lsn).unwrap();
    assert_eq!(log.end().block(), 4);
    log.trim(log.end()).unwrap();
    // What was trimmed is reused, if there is any.
    drop(device.extend());
    let (_, found, _) = recover(&Arc::new(device.crash())).unwrap();
    assert_eq!(found.last().unwrap().bytes, b"filled");
}

#[test]
fn a_lost_block_at_the_front_of_a_trimmed_log_is_damage() {
    let device = small_log(40);
    let log = recover(&device).unwrap().0;
    log.trim(log.end()).unwrap();
    drop(log);
    while device.extend().is_ok() {}
    let begin = device.scan().start;
    assert_eq!(begin, 32);
    (begin..40).for_each(|number| device.damage(number, |block| block[100] ^= 1));
    let error = recover(&device).unwrap_err();
    assert!(matches!(error, LogError::Damaged { lsn: Lsn(131072), .. }), "{error}");
}

#[test]
fn a_device_has_one_log() {
    let device = small_log(2);
    let (log, _, _) = recover(&device).unwrap();
    assert!(matches!(recover(&device), Err(LogError::Taken)));
    log.append(b"on it goes").unwrap();
    drop(log);
    let refuses = |_: RecordRef<'_>| Err(LogError::Closed);
    Log::recover(device.clone(), &LogOptions::default(), None, false, refuses).unwrap_err();
    recover(&device).unwrap();
}

#[test]
fn an_unreadable_block_is_damage_within_and_nothing_after_the_end() {
    for bad in 0..9 {
        let device = small_log(10);
        device.set_unreadable(bad..bad + 1);
        let error = recover(&device).unwrap_err();
        let LogError::Damaged { lsn, .. } = error else { panic!("{error}") };
        assert_eq!(lsn, Lsn::of_block(bad));
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
    for bad in [10, 11, 15] {
        let device = small_log(10);
        device.set_unreadable(bad..bad + 1);
        let (log, found, _) = recover(&device).unwrap();
        assert_eq!(found.len(), 10, "block {bad}");
        let lsn = log.append(b"more").unwrap();
        log.wait_durable(lsn).unwrap();
    }
    // A storage that does not answer at all has not shown that the log is empty, or where it ends.
    for bad in [0..16, 5..16, 9..16] {
        let device = small_log(10);
        device.set_unreadable(bad.clone());
        assert!(matches!(recover(&device), Err(LogError::Io { .. })), "{bad:?}");
    }
}

#[test]
fn a_ring_larger_than_lengths_can_say_is_refused() {
    for bytes in [(4 << 30) + 1, 16 << 30, usize::MAX] {
        let options = LogOptions { ring_bytes: bytes, in_flight: None };
        let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
        let refused = Log::recover(small_log(1), &options, None, false, visit).unwrap_err();
        assert!(matches!(refused, LogError::RingTooLarge { .. }), "{refused}");
    }
}

/// Commits that do not wait would otherwise wake the thread of the log one by one, and take a block
/// each.
#[test]
fn records_gather_for_a_requested_flush() {
    let sizes = SimulatedOptions { segment_blocks: 1024, ..SimulatedOptions::default() };
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let device = Arc::new(SimulatedDevice::new(sizes));
    let (log, _) = Log::open(device, &LogOptions::default(), None, visit).unwrap();
    let started = Instant::now();
    for number in 0..1_000_u64 {
        let lsn = log.append(&number.to_le_bytes()).unwrap();
        log.request_flush(lsn);
        // Long enough for a flush that begins at once.
        let appended = Instant::now();
        while appended.elapsed() < Duration::from_micros(50) {
            std::hint::spin_loop();
        }
    }
    let newest = log.append(b"newest").unwrap();
    log.request_flush(newest);
    eventually("the newest record is durable", || log.durable() > newest);
    // A flush pads its last block, and begins a millisecond after a request.
    let flushes = u64::try_from(started.elapsed().as_millis()).unwrap() + 2;
    let full = 1_000 * (8 + LENGTH as u64) / PAYLOAD_U64 + 1;
    let blocks = log.end().block();
    assert!(blocks <= full + flushes, "{blocks} blocks, of which {full} are full");
}

/// The log is trimmed, and its room reused, between two steps of a scan.
#[test]
fn a_scan_that_a_trim_overtakes_says_so() {
    let device = small_log(10);
    let (log, _, _) = recover(&device).unwrap();
    for overtaken in [false, true] {
        let mut scan = log.scan(None).unwrap();
        if overtaken {
            while let Ok(lsn) = log.append(&[1; 4000]) {
                log.wait_durable(lsn).unwrap();
            }
            log.trim(log.end()).unwrap();
            while let Ok(lsn) = log.append(&[1; 4000]) {
                log.wait_durable(lsn).unwrap();
            }
        }
        let error = scan.find_map(Result::err);
        let is_trimmed = matches!(error, Some(LogError::Trimmed { .. }));
        assert_eq!(is_trimmed, overtaken, "{error:?}");
    }
}
