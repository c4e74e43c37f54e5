//! The memory contract: resident memory never exceeds the pool's size, and contents survive.
//!
//! `VELLUM_SOAK_EVICTIONS=10000000 cargo test -p vellum-pool --release --test
//! pool_memory_contract -- --ignored` is the long version.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::churn::Churn;
use common::{Random, Storage, options_on, scratch_dir};
use vellum_pool::{BackendChoice, Pool, PoolOptions, Translation};

const CAPACITY: u64 = 256;
const BATCH: u64 = 32;
const THREADS: u64 = 2;

fn resident(pool: &Pool) -> u64 {
    pool.kernel_resident_pages().unwrap()
}

/// Counts resident pages in the page tables while other threads work. The count may have both a
/// page that leaves during it and one that comes. So it may be larger by the pages evicted
/// meanwhile, and by the batches that are released but not counted yet.
fn watch(pool: &Pool, stop: &AtomicBool) {
    loop {
        let before = pool.stats().evictions;
        let resident = resident(pool);
        let meanwhile = pool.stats().evictions - before + (THREADS + 1) * BATCH;
        assert!(resident <= CAPACITY + meanwhile, "{resident} resident, {meanwhile} evicted");
        if stop.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Anonymous memory of the process, in KiB.
fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns by how many KiB the process grew after the warm-up.
fn keeps_the_contract(storage: Storage, evictions: u64, backend: BackendChoice) -> u64 {
    let dir = scratch_dir();
    let options = PoolOptions { eviction_batch: BATCH as usize, ..options_on(backend, CAPACITY) };
    let pool = common::open(storage.create(&dir), options);
    let churn = Churn::new(&pool, 4_500, &[1]);
    let rounds = 10;
    let mut memory_after_first_round = 0;
    for round in 1..=rounds {
        let stop = AtomicBool::new(false);
        let running = AtomicBool::new(true);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let (pool, churn, running) = (&pool, &churn, &running);
                    scope.spawn(move || {
                        let mut random = Random(thread << 32 | round);
                        while running.load(Ordering::Relaxed) {
                            (0..64).for_each(|_| churn.step(pool, &mut random));
                            if pool.stats().evictions >= evictions * round / rounds {
                                running.store(false, Ordering::Relaxed);
                            }
                        }
                    })
                })
                .collect();
            let watcher = scope.spawn(|| watch(&pool, &stop));
            let done = workers.into_iter().map(|worker| worker.join()).collect::<Vec<_>>();
            stop.store(true, Ordering::Relaxed);
            watcher.join().unwrap();
            done.into_iter().for_each(|worker| worker.unwrap());
        });
        if round == 1 {
            memory_after_first_round = memory_kib();
        }
    }
    common::eventually("background eviction rests", || {
        let stats = pool.stats();
        // A free slot keeps its memory.
        let most = match pool.translation() {
            Translation::Table => CAPACITY,
            _ => stats.resident_frames,
        };
        resident(&pool) <= most && stats.resident_frames <= CAPACITY
    });
    let stats = pool.stats();
    assert!(stats.resident_frames_peak <= CAPACITY, "{stats:?}");
    assert!(stats.evictions >= evictions, "{stats:?}");
    assert!(stats.write_backs > evictions / 20, "{stats:?}");
    let grown = memory_kib().saturating_sub(memory_after_first_round);
    churn.check(&pool);
    grown
}

#[test]
fn resident_pages_never_exceed_the_pool_in_memory() {
    let backends = common::backends();
    for backend in &backends {
        keeps_the_contract(Storage::Memory, 220_000 / backends.len() as u64, *backend);
    }
}

#[test]
fn resident_pages_never_exceed_the_pool_on_files() {
    for storage in Storage::all() {
        if matches!(storage, Storage::File(..)) {
            keeps_the_contract(storage, 6_000, BackendChoice::Auto);
        }
    }
}

#[test]
#[ignore = "a soak test: minutes to hours"]
fn soak() {
    let evictions = std::env::var("VELLUM_SOAK_EVICTIONS").ok();
    let evictions = evictions.and_then(|text| text.parse().ok()).unwrap_or(10_000_000);
    let before = memory_kib();
    let grown = keeps_the_contract(Storage::Memory, evictions, BackendChoice::Auto);
    assert!(grown < 4 << 10, "the process grew by {grown} KiB in a steady state");
    // The pool's 1 MiB, the device's 4,500 pages (with some copies, made while it grew), and the
    // rest. All pages of the file in memory would be far more.
    let grown = memory_kib().saturating_sub(before);
    assert!(grown < 64 << 10, "the process grew by {grown} KiB in all");
    let file = Storage::all().into_iter().rfind(|storage| matches!(storage, Storage::File(..)));
    if let Some(file) = file {
        let grown = keeps_the_contract(file, evictions / 20, BackendChoice::Auto);
        assert!(grown < 4 << 10, "the process grew by {grown} KiB on {file:?}");
    }
}
