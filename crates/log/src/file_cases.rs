//! Single cases of the files of a log, in a simulated folder: heads that are lost, room that is
//! missing.
#![allow(clippy::unwrap_used)]

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::block::{BLOCK_BYTES, Lsn};
use crate::device::{FileLog, FileLogOptions, LogDevice as _, SimulatedDisk, SyncMethod};
use crate::error::LogError;
use crate::log::{Log, LogOptions};

/// Blocks of a segment.
const BLOCKS: u64 = 3;

/// Sectors of a block.
const SECTORS: usize = 8;

/// A log; its records, each by its first byte, and where it ends.
type Opened = (Log, Arc<FileLog>, Vec<u8>, Lsn);

/// Opens a log.
fn open(disk: &SimulatedDisk) -> Result<Opened, LogError> {
    open_by(disk, SyncMethod::BufferedSync)
}

fn open_by(disk: &SimulatedDisk, sync_method: SyncMethod) -> Result<Opened, LogError> {
    open_with(disk, sync_method, BLOCKS)
}

/// Opens a log with so many blocks in a segment.
fn open_with(
    disk: &SimulatedDisk,
    sync_method: SyncMethod,
    blocks: u64,
) -> Result<Opened, LogError> {
    let segment_bytes = (blocks + 1) * BLOCK_BYTES as u64;
    let files = FileLogOptions {
        segment_bytes,
        most_bytes: 8 * segment_bytes,
        sync_method: Some(sync_method),
    };
    let device = Arc::new(FileLog::open_in(Path::new("log"), &files, || disk.folder())?);
    let mut found = Vec::new();
    let options = LogOptions { ring_bytes: 4 * BLOCK_BYTES, in_flight: Some(2) };
    let (log, end) = Log::recover(device.clone(), &options, None, false, |record| {
        found.push(record.bytes[0]);
        Ok::<_, LogError>(())
    })?;
    Ok((log, device, found, end.lsn))
}

/// Appends a record that fills a block.
fn append(log: &Log, number: u8) -> Result<Lsn, LogError> {
    let lsn = log.append(&[number; 4000])?;
    log.wait_durable(lsn)?;
    Ok(lsn)
}

/// A log of so many records, a block each.
fn log_of(records: u8) -> SimulatedDisk {
    let disk = SimulatedDisk::quiet(1);
    let (log, ..) = open(&disk).unwrap();
    for number in 0..records {
        append(&log, number).unwrap();
    }
    drop(log);
    disk
}

fn name(segment: usize) -> String {
    format!("segment-{segment:04}")
}

#[test]
fn a_head_that_cannot_be_read_is_known_by_the_blocks_and_written_anew() {
    // Three segments: full, full, begun.
    for segment in 0..3 {
        // What else of the file cannot be read is of no interest to the search.
        for unreadable in [0..SECTORS, 0..1, 3..4] {
            let disk = log_of(7);
            unreadable.for_each(|sector| disk.damage(&name(segment), sector, None));
            let before = disk.contents();
            for _ in 0..2 {
                let (_, _, found, end) = open(&disk).unwrap();
                assert_eq!((found.len(), end), (7, Lsn::of_block(7)), "segment {segment}");
            }
            assert!(disk.contents() == before, "segment {segment}");
        }
    }
}

#[test]
fn a_head_and_blocks_that_cannot_be_read_are_known_by_the_rest() {
    let disk = log_of(7);
    // The head and the first block of the full segment in the midst: that block is damage.
    [0, SECTORS].into_iter().for_each(|sector| disk.damage(&name(1), sector, None));
    let error = open(&disk).unwrap_err();
    let LogError::Damaged { lsn, .. } = &error else { panic!("{error}") };
    assert_eq!(*lsn, Lsn::of_block(3), "{error}");
    // All of its blocks: it is not known to be the log's.
    (0..4 * SECTORS).for_each(|sector| disk.damage(&name(1), sector, None));
    let before = disk.contents();
    let error = open(&disk).unwrap_err();
    assert!(matches!(error, LogError::Unfit { .. }), "{error}");
    assert!(error.to_string().contains("segment-0001"), "{error}");
    assert!(disk.contents() == before);
}

#[test]
fn a_lost_head_of_a_file_without_blocks_is_refused_and_harms_nothing() {
    let disk = log_of(6);
    let (log, device, ..) = open(&disk).unwrap();
    device.extend().unwrap();
    drop((log, device));
    let before = disk.contents();
    disk.damage(&name(2), 0, None);
    let error = open(&disk).unwrap_err();
    assert!(matches!(error, LogError::Unfit { .. }), "{error}");
    assert!(error.to_string().contains("segment-0002"), "{error}");
    assert!(disk.contents() == before, "something was changed");
    // Without it the log is as before.
    disk.remove(&name(2));
    assert_eq!(open(&disk).unwrap().2.len(), 6);
}

#[test]
fn a_head_that_was_lost_may_be_lost_again() {
    let disk = log_of(7);
    for round in 0..4 {
        disk.damage(&name(0), 0, [None, Some([9; 512])][round % 2]);
        // The power fails within the opening, too.
        disk.end_after(round as u64 * 4);
        drop(open(&disk));
        disk.restart(true);
        assert_eq!(open(&disk).unwrap().2.len(), 7);
    }
}

/// A segment took the file of one that was given up, a crash tore its first block, and its head
/// goes: by its other blocks it is the one that was given up, whose first block is missing.
#[test]
fn a_torn_file_without_a_head_is_not_taken_for_the_end() {
    let disk = log_of(0);
    let (log, device, ..) = open(&disk).unwrap();
    // The last two of three segments are of one flush: none of their blocks was written when
    // another of them was durable.
    for number in 0..3 {
        append(&log, number).unwrap();
    }
    let flush: Vec<_> = (3..7).map(|number| log.append(&[number; 4000]).unwrap()).collect();
    log.wait_durable(flush[3]).unwrap();
    device.extend().unwrap();
    drop((log, device));
    let (log, device, found, _) = open(&disk).unwrap();
    assert_eq!(found.len(), 7);
    log.trim(Lsn::of_block(6)).unwrap();
    device.extend().unwrap();
    drop((log, device));
    // The file of the segment that began with block 3.
    let is_newest = |bytes: &Vec<u8>| bytes[24..32] == 4_u64.to_le_bytes();
    let files = disk.contents();
    let (newest, _) = files.iter().find(|(_, bytes)| is_newest(bytes)).unwrap();
    disk.damage(newest, SECTORS + 3, Some([7; 512]));
    disk.damage(newest, 0, None);
    let error = open(&disk).unwrap_err();
    let LogError::Damaged { lsn, .. } = &error else { panic!("{error}") };
    assert_eq!(*lsn, Lsn::of_block(3), "{error}");
    assert!(error.to_string().contains("lost its head"), "{error}");
}

/// A flush was torn, and so is the next one, in the same place: together they are not the first.
#[test]
fn a_torn_flush_does_not_complete_an_earlier_one() {
    for seed in 0..300 {
        let disk = SimulatedDisk::quiet(seed);
        let (log, ..) = open(&disk).unwrap();
        append(&log, 0).unwrap();
        drop(log);
        // Two flushes of a block each: the first one has its beginning, the second one is whole.
        let (log, ..) = open(&disk).unwrap();
        let flights = [1, 2].map(|number| {
            log.append(&[number; 100]).unwrap();
            let flight = log.take_flight().unwrap();
            flight.write().unwrap();
            flight
        });
        drop(flights);
        drop(log);
        disk.restart(false);
        disk.damage(&name(0), 2 * SECTORS + 3, Some([5; 512]));
        // The log goes on in its place, and the power fails.
        let (log, _, found, _) = open(&disk).unwrap();
        assert_eq!(found, [0]);
        disk.end_after(seed % 5);
        let lsn = log.append(&[3; 100]).unwrap();
        drop(log.wait_durable(lsn));
        drop(log);
        disk.restart(true);
        let found = open(&disk).unwrap().2;
        assert!([&[0][..], &[0, 3]].contains(&&*found), "{seed}: {found:?}");
    }
}

/// The file system has room for a file, and none for its name.
#[test]
fn a_name_without_room_fails_nothing() {
    for seed in 0..20 {
        let disk = SimulatedDisk::quiet(seed);
        let (log, ..) = open(&disk).unwrap();
        for number in 0..3 {
            append(&log, number).unwrap();
        }
        disk.set_room((BLOCKS + 1) * BLOCK_BYTES as u64);
        for _ in 0..10 {
            match append(&log, 3) {
                Ok(_) | Err(LogError::Full { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        disk.set_room(1 << 20);
        append(&log, 4).unwrap();
        drop(log);
        assert_eq!(*open(&disk).unwrap().2.last().unwrap(), 4);
    }
}

/// A log that needs a new file next: two segments, full, of which the last record is number 5.
fn before_a_new_file(seed: u64, sync_method: SyncMethod) -> (SimulatedDisk, Log, Arc<FileLog>) {
    let disk = SimulatedDisk::quiet(seed);
    let (log, device, ..) = open_by(&disk, sync_method).unwrap();
    for number in 0..6 {
        append(&log, number).unwrap();
    }
    assert_eq!(device.scan(), 0..2 * BLOCKS);
    (disk, log, device)
}

/// The log has its six records and goes on, with all segments whole.
fn goes_on(disk: &SimulatedDisk, sync_method: SyncMethod) {
    let (log, _, found, _) = open_by(disk, sync_method).unwrap();
    assert_eq!(found, [0, 1, 2, 3, 4, 5]);
    for number in 6..16 {
        append(&log, number).unwrap();
    }
    drop(log);
    assert_eq!(open_by(disk, sync_method).unwrap().2.len(), 16);
    for (name, bytes) in disk.contents() {
        assert_eq!(bytes.len() as u64, (BLOCKS + 1) * BLOCK_BYTES as u64, "{name}");
    }
}

/// Makes room: in one call, or in steps before it.
fn make_room(device: &FileLog, in_steps: bool) -> io::Result<u64> {
    while in_steps && device.prepare()? {}
    device.extend()
}

/// The process is killed, or the power fails, in each call that makes a new file.
#[test]
fn a_crash_while_a_file_is_made_leaves_the_log() {
    for sync_method in SyncMethod::ALL {
        for (power_fails, in_steps) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let mut calls = 0;
            loop {
                let (disk, log, device) = before_a_new_file(calls, sync_method);
                disk.end_after(calls);
                let made = make_room(&device, in_steps);
                drop((log, device));
                disk.restart(power_fails);
                goes_on(&disk, sync_method);
                if made.is_ok() {
                    break;
                }
                calls += 1;
            }
            // Two writes of zeros, a head, a name, and their syncs.
            assert!(calls >= 9, "{sync_method}: only {calls} calls make a file");
        }
    }
}

/// Each call that makes a new file fails: the device takes nothing more, and the folder has the
/// log.
#[test]
fn a_failure_while_a_file_is_made_ends_the_device() {
    for sync_method in SyncMethod::ALL {
        let mut calls = 0;
        loop {
            let (disk, log, device) = before_a_new_file(calls, sync_method);
            disk.fail_after(calls);
            let made = make_room(&device, calls.is_multiple_of(2));
            let room = device.scan().end;
            if made.is_err() && calls > 1 {
                let error = device.extend().unwrap_err();
                assert!(error.to_string().contains("open its folder again"), "{calls}: {error}");
                assert_eq!(room, 2 * BLOCKS);
            }
            drop((log, device));
            disk.restart(false);
            goes_on(&disk, sync_method);
            if made.is_ok() {
                break;
            }
            calls += 1;
        }
        assert!(calls >= 9, "{sync_method}: only {calls} calls make a file");
    }
}

/// The disk has no room for the file that is made ahead, or for a part of it alone: the log goes on
/// in the room that it has, and says that it is full when a record does not fit.
#[test]
fn a_file_ahead_without_room_fails_no_commit() {
    let file_bytes = (BLOCKS + 1) * BLOCK_BYTES as u64;
    for sync_method in SyncMethod::ALL {
        for room in [0, 1, file_bytes / 2, file_bytes - 1] {
            for allocates in [false, true] {
                let disk = SimulatedDisk::quiet(room);
                disk.set_allocates(allocates);
                let (log, device, ..) = open_by(&disk, sync_method).unwrap();
                append(&log, 0).unwrap();
                let segment_bytes = BLOCKS * 4000;
                log.make_room(segment_bytes).unwrap();
                assert_eq!(device.scan(), 0..2 * BLOCKS);
                disk.set_room(room);
                // As the thread of the log does ahead.
                let full = log.make_room(2 * segment_bytes).unwrap_err();
                assert!(matches!(full, LogError::Full { .. }), "{full}");
                let names: Vec<_> = disk.contents().into_keys().collect();
                assert_eq!(names, [name(0), name(1)], "the file that did not fit is there");
                for number in 1..6 {
                    append(&log, number).unwrap();
                }
                let full = append(&log, 6).unwrap_err();
                assert!(matches!(full, LogError::Full { .. }), "{full}");
                disk.set_room(1 << 20);
                append(&log, 6).unwrap();
                drop((log, device));
                assert_eq!(open_by(&disk, sync_method).unwrap().2, [0, 1, 2, 3, 4, 5, 6]);
            }
        }
    }
}

/// The log writes to its first segment while more of it is zeroed. A sync of the zeros that reports
/// a lack of room may be the only one that is told of a block that was not written.
#[test]
fn a_sync_of_the_first_segment_that_wants_room_ends_the_log() {
    let (sync_method, blocks) = (SyncMethod::BufferedSync, 9);
    let disk = SimulatedDisk::quiet(1);
    let (log, device, ..) = open_with(&disk, sync_method, blocks).unwrap();
    append(&log, 0).unwrap();
    let begun = device.scan().end;
    assert!(begun < blocks, "all of the segment is zeroed");
    // The next call writes zeros.
    disk.run_full_after(1);
    let failed = log.make_room(blocks * 4000).unwrap_err();
    assert!(matches!(failed, LogError::Io { .. }), "{failed:?}");
    assert!(failed.to_string().contains("open the folder again"), "{failed}");
    assert_eq!(device.scan().end, begun);
    // No room would help.
    let failed = (1..=begun as u8).find_map(|number| append(&log, number).err()).unwrap();
    assert!(!matches!(failed, LogError::Full { .. }), "{failed:?}");
    drop((log, device));
    disk.restart(true);
    let (log, _, found, _) = open_with(&disk, sync_method, blocks).unwrap();
    assert_eq!(found, [0]);
    for number in 1..12 {
        append(&log, number).unwrap();
    }
    drop(log);
    let found = open_with(&disk, sync_method, blocks).unwrap().2;
    assert!(found.into_iter().eq(0..12));
}

/// A file that is made ahead outlives a trim, whose file comes first.
#[test]
fn a_file_that_is_begun_waits_for_its_turn() {
    for steps in 1..5 {
        let sync_method = SyncMethod::DirectDsync;
        let (disk, log, device) = before_a_new_file(steps, sync_method);
        let is_left: Vec<_> = (0..steps).map(|_| device.prepare().unwrap()).collect();
        assert_eq!(is_left, [true, true, false, false][..steps as usize]);
        log.trim(Lsn::of_block(BLOCKS)).unwrap();
        assert!(!device.prepare().unwrap());
        append(&log, 6).unwrap();
        assert_eq!(disk.contents().len(), 3, "two segments, and the file that is begun");
        for number in 7..12 {
            append(&log, number).unwrap();
        }
        let names: Vec<_> = disk.contents().into_keys().collect();
        assert_eq!(names, [name(0), name(1), name(2)]);
        drop((log, device));
        assert_eq!(open_by(&disk, sync_method).unwrap().2.last(), Some(&11));
    }
}
