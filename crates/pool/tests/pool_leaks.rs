//! A dropped pool leaves no descriptor, no thread and no address space. This is one test in its own
//! program, because it counts the resources of the whole process.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use common::{Random, Storage, filled, open, options, scratch_dir, stamp};
use vellum_pool::PoolOptions;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Threads of the process, without those that the kernel has created for io_uring. The kernel
/// creates one when a write first has to wait, and it stays as long as the thread that it works
/// for.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-wrk")).count()
}

fn address_space_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmSize:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_use_and_drop(storage: Storage, rounds: u64) {
    for round in 0..rounds {
        let dir = scratch_dir();
        let pool = open(storage.create(&dir), PoolOptions { evictors: 2, ..options(16) });
        let pages = filled(&pool, 40);
        let mut random = Random(round);
        for _ in 0..20 {
            let page = random.pick(&pages);
            stamp(&mut pool.fix_exclusive(page).unwrap(), page, 2);
            pool.prefetch(&[random.pick(&pages)]);
        }
    }
}

#[test]
fn a_pool_leaves_nothing_behind() {
    for storage in Storage::all() {
        open_use_and_drop(storage, 3);
        let before = (descriptors(), threads(), address_space_kib());
        open_use_and_drop(storage, 20);
        // Joined threads leave /proc a moment later.
        common::eventually("all threads are gone", || threads() <= before.1);
        assert!(descriptors() <= before.0, "{storage:?}");
        let grown = address_space_kib().saturating_sub(before.2);
        assert!(grown < 256 << 10, "{storage:?}: {grown} KiB of address space are gone");
    }
}
