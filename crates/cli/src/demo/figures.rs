//! The figures of one phase of the demonstration, from the pool's counters.

use std::time::{Duration, Instant};

use vellum::Store;
use vellum_pool::PoolStats;

/// One finished phase.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    pub name: &'static str,
    pub operations: u64,
    /// Bytes of content that the operations read or wrote.
    pub bytes: u64,
    pub time: Duration,
    pub hits: u64,
    pub misses: u64,
    /// Reads of the device, prefetches included.
    pub reads: u64,
    pub evictions: u64,
    pub write_backs: u64,
}

impl Phase {
    /// Per second.
    pub fn rate(&self, count: u64) -> f64 {
        count as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Share of accesses that found their page in memory; `None` without accesses.
    pub fn hit_rate(&self) -> Option<f64> {
        let accesses = self.hits + self.misses;
        (accesses > 0).then(|| self.hits as f64 / accesses as f64)
    }

    /// This phase and another one of the same name as one.
    pub fn and(&self, other: &Self) -> Self {
        Self {
            name: self.name,
            operations: self.operations + other.operations,
            bytes: self.bytes + other.bytes,
            time: self.time + other.time,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            reads: self.reads + other.reads,
            evictions: self.evictions + other.evictions,
            write_backs: self.write_backs + other.write_backs,
        }
    }
}

/// A phase that is going on.
pub struct RunningPhase {
    name: &'static str,
    start: Instant,
    before: PoolStats,
}

impl RunningPhase {
    /// Starts a phase.
    pub fn start(name: &'static str, store: &Store) -> Self {
        Self { name, before: store.pool_stats(), start: Instant::now() }
    }

    /// Ends it.
    pub fn end(self, store: &Store, operations: u64, bytes: u64) -> Phase {
        let time = self.start.elapsed();
        let (before, after) = (self.before, store.pool_stats());
        Phase {
            name: self.name,
            operations,
            bytes,
            time,
            hits: after.hits - before.hits,
            misses: after.misses - before.misses,
            reads: after.read_latency.count - before.read_latency.count,
            evictions: after.evictions - before.evictions,
            write_backs: after.write_backs - before.write_backs,
        }
    }
}
