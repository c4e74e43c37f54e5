//! RocksDB's memory beyond its cache, in its own process like a worker. The memory does not grow
//! when threads start and end.
//!
//! With one heap for each thread, the cache took 1.4 to 2 times its size after the second of these
//! runs. Each run has new threads.

#![allow(clippy::unwrap_used)]

use vellum_bench::engine::Setting;
use vellum_bench::worker::Usage;
use vellum_bench::workload::{Lookup, Plan, Work};
use vellum_bench_peers::ROCKSDB;

const CACHE: u64 = 32 << 20;

/// Stacks, tables of the cache, mapped code.
const BESIDE: u64 = 12 << 20;

fn main() {
    let directory = tempfile::tempdir().unwrap();
    let lookup = Lookup { entries: 4 * CACHE / 128, batch: 1 };
    let before = Usage::of("self").resident;
    let engine = (ROCKSDB.open)(&Setting::new(directory.path(), CACHE)).unwrap();
    lookup.load(&*engine).unwrap();
    engine.settle().unwrap();
    for (seed, threads) in [2, 1, 2, 1].into_iter().enumerate() {
        lookup.run(&*engine, &Plan { threads, seconds: 1.5, seed: seed as u64 }).unwrap();
        let held = Usage::of("self").resident - before;
        println!("run {seed}: {} KiB", held >> 10);
        assert!(held > CACHE * 3 / 4, "the cache is not full: {} KiB", held >> 10);
        assert!(held < CACHE + BESIDE, "{} KiB, the cache is {} KiB", held >> 10, CACHE >> 10);
    }
}
