//! Reads return what was written, whatever was evicted in between: every kind of access, mixed page
//! sizes, every backend of this kernel, every kind of storage.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::collections::HashSet;
use std::thread;

use common::churn::Churn;
use common::{Random, Storage, new_page, open, options, options_on, scratch_dir};
use vellum_pool::{PageReader, PageRef, Pool, PoolOptions, Restart};

fn survives(storage: Storage, options: PoolOptions, steps: usize) {
    let dir = scratch_dir();
    let capacity = options.size.frames().unwrap();
    let device = storage.create(&dir);
    let pool = open(device.clone(), options);
    let churn = Churn::new(&pool, 150, &[1, 2, 1, 16, 3, 1, 8, 1, 5]);
    thread::scope(|scope| {
        for thread in 0..3 {
            let (pool, churn) = (&pool, &churn);
            scope.spawn(move || {
                let mut random = Random(thread);
                (0..steps).for_each(|_| churn.step(pool, &mut random));
            });
        }
        scope.spawn(|| (0..5).for_each(|_| pool.sync().unwrap()));
    });
    churn.check(&pool);
    let stats = pool.stats();
    assert!(stats.resident_frames_peak <= capacity, "{stats:?}");
    assert!(stats.evictions > 100 && stats.misses > 100 && stats.hits > 100, "{stats:?}");

    // And after a reopening, from storage alone.
    pool.sync().unwrap();
    let space = pool.encode_space();
    drop(pool);
    let again = vellum_pool::Space::decode(&space).unwrap();
    let format = std::sync::Arc::new(vellum_pool::RawPages);
    let pool = Pool::open(device, format, again, common::options(64)).unwrap();
    churn.check(&pool);
}

#[test]
fn on_every_backend() {
    for backend in common::backends() {
        survives(Storage::Memory, options_on(backend, 96), 4_000);
    }
}

#[test]
fn on_every_kind_of_storage() {
    for storage in Storage::all() {
        survives(storage, options(96), 1_000);
    }
}

#[test]
fn with_and_without_background_threads_and_in_tiny_batches() {
    for (evictors, eviction_batch) in [(0, 64), (0, 1), (3, 1), (2, 8)] {
        let options = PoolOptions { evictors, eviction_batch, ..options(64) };
        survives(Storage::Memory, options, 2_000);
    }
}

/// Pages refer to each other at random, in cycles and to themselves. References are places, so the
/// order of evictions does not affect them.
#[test]
fn a_graph_with_cycles_can_be_walked_while_its_pages_come_and_go() {
    const NODES: usize = 600;
    const EDGES: usize = 8;
    let dir = scratch_dir();
    let storage = *Storage::all().last().unwrap();
    let pool = open(storage.create(&dir), options(64));
    let nodes: Vec<_> = (0..NODES).map(|_| new_page(&pool, 1, 0)).collect();
    let edge = |from: usize, n: usize| nodes[Random((from * EDGES + n) as u64).index(NODES)];
    for (from, node) in nodes.iter().enumerate() {
        let mut guard = pool.fix_exclusive(*node).unwrap();
        for n in 0..EDGES {
            let place = 64 + n * 8;
            guard[place..place + 8].copy_from_slice(&edge(from, n).id.0.to_le_bytes());
        }
    }
    thread::scope(|scope| {
        for thread in 0..2 {
            let (pool, nodes) = (&pool, &nodes);
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut visited = HashSet::new();
                let mut at = nodes[0];
                for _ in 0..4_000 {
                    visited.insert(at);
                    let n = random.index(EDGES);
                    let next = pool
                        .read(at, |bytes| bytes.u64(64 + n * 8).ok_or(Restart))
                        .unwrap()
                        .unwrap();
                    let next = PageRef::new(next, 1);
                    let from = nodes.iter().position(|node| *node == at).unwrap();
                    assert_eq!(next, edge(from, n), "{at}, edge {n}");
                    at = if random.index(50) == 0 { random.pick(nodes) } else { next };
                }
                assert!(visited.len() > NODES / 2);
            });
        }
    });
    assert!(pool.stats().evictions > 1_000);
}
