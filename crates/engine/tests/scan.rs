//! Scans of trees that are not in memory: how much they read ahead, in which reads, and that the
//! results are the same.
#![allow(clippy::unwrap_used)]

mod common;

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Random, assert_sound, cold, memory_store, options};
use rustix::io::Errno;
use vellum::{Cursor, Error, Store};
use vellum_pool::device::{Fault, MemoryDevice, Operation};
use vellum_testing::patience::SetWhenDropped;

const ENTRIES: u64 = 30_000;

/// The keys that a cursor visits in one direction from its position.
fn keys(cursor: &mut Cursor<'_>, forward: bool) -> Vec<u64> {
    let mut keys = Vec::new();
    while if forward { cursor.forward() } else { cursor.backward() }.unwrap() {
        let key = u64::from_be_bytes(cursor.key().try_into().unwrap());
        assert_eq!(&*cursor.value().unwrap().unwrap(), &[key as u8; 120]);
        keys.push(key);
    }
    keys
}

#[test]
fn a_scan_reads_ahead_in_large_reads() {
    let up: Vec<u64> = (0..ENTRIES).collect();
    let down: Vec<u64> = (0..ENTRIES).rev().collect();
    for (forward, expected) in [(true, &up), (false, &down)] {
        let (device, store, tree) = cold(ENTRIES, 700);
        let before = device.plan().counts().read_runs;
        assert_eq!(&keys(&mut tree.cursor(), forward), expected);
        let stats = store.pool_stats();
        let reads = device.plan().counts().read_runs - before;
        assert!(stats.prefetches > 900, "{stats:?}");
        assert!(stats.misses < 30, "only the first leaves are waited for: {stats:?}");
        assert!(reads < 150, "{reads} reads for some 1100 leaves");
        let (device, store, tree) = cold(ENTRIES, 700);
        assert_eq!(&keys(&mut tree.cursor().read_ahead(0), forward), expected);
        assert_eq!(store.pool_stats().prefetches, 0);
        assert!(device.plan().counts().read_runs > 1000);
    }
}

#[test]
fn a_walk_over_a_whole_tree_reads_ahead() {
    for is_check in [false, true] {
        let (device, store, tree) = cold(ENTRIES, 700);
        let before = device.plan().counts().read_runs;
        let stat = if is_check { tree.check() } else { tree.stat() }.unwrap();
        assert_eq!(stat.entries, ENTRIES);
        let stats = store.pool_stats();
        let reads = device.plan().counts().read_runs - before;
        assert!(stats.prefetches > 900, "{stats:?}");
        assert!(stats.misses < 100, "a few for each node with children: {stats:?}");
        assert!(reads < 400, "{reads} reads for some 1100 leaves");
    }
}

#[test]
fn a_check_reads_blobs_ahead() {
    let (memory, store) = memory_store(4000, 1);
    let tree = store.create_tree("t").unwrap();
    for key in 0..300_u32 {
        tree.upsert(&key.to_be_bytes(), &[key as u8; 20_000]).unwrap();
    }
    store.close().unwrap();
    let memory = MemoryDevice::from_snapshot(memory.snapshot());
    let store = Store::open_on(Arc::new(memory), &options(700, 1)).unwrap();
    let stat = store.tree("t").unwrap().check().unwrap();
    assert_eq!(stat.blobs, 300);
    let stats = store.pool_stats();
    assert!(stats.prefetches > 250, "{stats:?}");
    assert_sound(&store);
}

#[test]
fn a_short_range_reads_little_ahead() {
    let (_, store, tree) = cold(ENTRIES, 700);
    for start in (0..ENTRIES).step_by(4000) {
        let from = start.to_be_bytes();
        let range = tree.range((Bound::Included(&from), Bound::Unbounded));
        assert_eq!(range.take(20).map(|entry| entry.unwrap().1.len()).sum::<usize>(), 20 * 120);
    }
    let stats = store.pool_stats();
    assert!(stats.prefetches < 30, "{stats:?}");
}

/// A short range reads at most half as many pages in vain as it uses on storage that answers at
/// once. Elsewhere, as a long one does, it reads at most as many as it uses, by fewer reads.
#[test]
fn what_is_read_ahead_is_mostly_used() {
    let each = ENTRIES / cold(ENTRIES, 1500).2.stat().unwrap().leaf_pages;
    for (leaves, reads_at_once, reads_else) in
        [(4, 7, 7), (10, 9, 8), (30, 13, 10), (100, 19, 16), (300, 33, 31)]
    {
        for (at_once, most) in [(true, reads_at_once), (false, reads_else)] {
            let (device, store, tree) = cold(ENTRIES, 1500);
            if !at_once {
                device.plan().delay_reads(Duration::from_nanos(1));
            }
            let before = device.plan().counts().read_runs;
            assert_eq!(tree.entries().take((leaves * each) as usize).count() as u64, leaves * each);
            let stats = store.pool_stats();
            let reads = device.plan().counts().read_runs - before;
            assert!(reads <= most, "{reads} reads for {leaves} leaves, at once: {at_once}");
            let pages = stats.misses + stats.prefetches;
            let in_vain = if leaves < 32 && at_once { leaves / 2 } else { leaves };
            assert!(pages <= leaves + in_vain + 4, "{pages} pages for {leaves}: {stats:?}");
        }
    }
}

#[test]
fn a_pool_of_a_few_pages_is_enough() {
    for pool_pages in [8, 12, 20, 60] {
        let (_, store, tree) = cold(6000, pool_pages);
        let mut cursor = tree.cursor();
        assert_eq!(keys(&mut cursor, true), (0..6000).collect::<Vec<_>>());
        assert_eq!(keys(&mut cursor, false), (0..6000).rev().collect::<Vec<_>>());
        // Change direction, so that the pages that were read ahead are of no use.
        let mut random = Random(3);
        for _ in 0..40 {
            let from = random.below(6000);
            assert!(cursor.seek(&from.to_be_bytes()).unwrap());
            for step in 1..random.below(200).min(6000 - from) {
                assert!(cursor.forward().unwrap());
                assert_eq!(cursor.key(), (from + step).to_be_bytes());
            }
            for _ in 0..random.below(30) {
                cursor.backward().unwrap();
            }
        }
        let stats = store.pool_stats();
        assert!(stats.resident_frames_peak <= stats.capacity_frames, "{stats:?}");
    }
}

#[test]
fn a_leaf_that_cannot_be_read_ends_the_scan_with_its_error() {
    let (device, store, tree) = cold(ENTRIES, 300);
    let plan = device.plan();
    let scan = || -> Result<u64, Error> {
        let (mut cursor, mut count) = (tree.cursor(), 0);
        while cursor.forward()? {
            assert_eq!(cursor.key(), u64::to_be_bytes(count));
            count += 1;
        }
        Ok(count)
    };
    let mut failed = 0;
    // A scan fails where two reads of a leaf fail. The order of reads depends on the evictor, too,
    // and not only on the seed. With any order, some scans fail.
    for round in 0..10 {
        plan.fail_randomly(Operation::Read, 0.008 * f64::from(round), Fault::Error(Errno::IO));
        match scan() {
            Ok(count) => assert_eq!(count, ENTRIES),
            Err(Error::Io(_)) => failed += 1,
            Err(error) => panic!("{error}"),
        }
        plan.clear();
    }
    assert!(failed > 0, "a failed read ahead is tried again, but not for ever");
    assert_eq!(scan().unwrap(), ENTRIES);
    assert_sound(&store);
}

/// Every scan sees all entries that stay, in order, while other threads insert and remove entries
/// between them.
#[test]
fn scans_see_all_that_stays_while_others_write() {
    let (_, store) = memory_store(80, 1);
    let tree = store.create_tree("t").unwrap();
    for number in 0..4000u64 {
        tree.upsert(&(number * 2).to_be_bytes(), &[1; 100]).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        scope.spawn(|| {
            let mut random = Random(9);
            while !stop.load(Ordering::Relaxed) {
                let first = random.below(4000);
                let inserts = random.below(2) == 0;
                for number in first..first + 150 {
                    let key = (number * 2 + 1).to_be_bytes();
                    match inserts {
                        true => _ = tree.upsert(&key, &[2; 150]).unwrap(),
                        false => _ = tree.remove(&key).unwrap(),
                    }
                }
            }
        });
        for round in 0..12 {
            let (mut cursor, mut seen) = (tree.cursor(), Vec::new());
            while if round % 2 == 0 { cursor.forward() } else { cursor.backward() }.unwrap() {
                seen.push(u64::from_be_bytes(cursor.key().try_into().unwrap()));
            }
            if round % 2 == 1 {
                seen.reverse();
            }
            assert!(seen.is_sorted_by(|one, two| one < two));
            seen.retain(|number| number % 2 == 0);
            assert_eq!(seen, (0..4000).map(|number| number * 2).collect::<Vec<_>>());
        }
    });
    assert_sound(&store);
}
