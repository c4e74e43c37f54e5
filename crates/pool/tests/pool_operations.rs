//! Random sequences of operations on a pool of eight frames, against a model.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;

use common::tasks::block_on;
use common::{options, stamp, stamped};
use proptest::prelude::*;
use vellum_pool::device::{Device, MemoryDevice};
use vellum_pool::{PageRef, Pool, PoolError, PoolOptions, RawPages, Restart, Space};

#[derive(Clone, Debug)]
enum Step {
    Allocate(u32),
    /// Writes a page, given by its index among the allocated ones.
    Write(usize),
    Upgrade(usize),
    Shared(usize),
    Optimistic(usize),
    Async(usize),
    /// Frees a page that is not held ...
    Free(usize),
    /// ... or through a guard.
    FreeHeld(usize),
    /// Frees a page that has a guard, and drops the guard later.
    FreeWhileHeld(usize),
    Prefetch(usize, usize),
    Sync,
    Trim,
    /// Syncs the pool, and opens it again from storage.
    Reopen,
    /// Drops the pool without writing, and opens the state of the last sync.
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1u32..=5).prop_map(Step::Allocate),
        1 => Just(Step::Allocate(8)),
        6 => any::<usize>().prop_map(Step::Write),
        2 => any::<usize>().prop_map(Step::Upgrade),
        4 => any::<usize>().prop_map(Step::Shared),
        4 => any::<usize>().prop_map(Step::Optimistic),
        2 => any::<usize>().prop_map(Step::Async),
        3 => any::<usize>().prop_map(Step::Free),
        1 => any::<usize>().prop_map(Step::FreeHeld),
        1 => any::<usize>().prop_map(Step::FreeWhileHeld),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(one, two)| Step::Prefetch(one, two)),
        2 => Just(Step::Sync),
        1 => Just(Step::Trim),
        1 => Just(Step::Reopen),
        1 => Just(Step::Crash),
    ]
}

struct World {
    device: Arc<MemoryDevice>,
    pool: Pool,
    evictors: u64,
    live: Vec<(PageRef, u64)>,
    /// The state after a crash.
    synced: (Vec<u8>, Vec<u8>, Vec<(PageRef, u64)>),
    generation: u64,
}

fn open(device: Arc<MemoryDevice>, space: &[u8], evictors: u64) -> Pool {
    let options = PoolOptions { evictors, eviction_batch: 2, ..options(8) };
    let space = Space::decode(space).unwrap();
    Pool::open(device, Arc::new(RawPages), space, options).unwrap()
}

impl World {
    fn new(evictors: u64) -> World {
        let device = Arc::new(MemoryDevice::new());
        let space = Space::new(0).encode();
        let pool = open(device.clone(), &space, evictors);
        let synced = (device.snapshot(), space, Vec::new());
        World { device, pool, evictors, live: Vec::new(), synced, generation: 0 }
    }

    fn pick(&self, index: usize) -> Option<(usize, PageRef, u64)> {
        let index = index.checked_rem(self.live.len())?;
        let (page, generation) = self.live[index];
        Some((index, page, generation))
    }

    fn next(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    fn write(&mut self, index: usize, upgrade: bool) {
        let Some((index, page, expected)) = self.pick(index) else { return };
        let next = self.next();
        let mut guard = if upgrade {
            // A background thread may hold the page shared, too, to write it back.
            loop {
                if let Ok(guard) = self.pool.fix_shared(page).unwrap().try_upgrade() {
                    break guard;
                }
            }
        } else {
            self.pool.fix_exclusive(page).unwrap()
        };
        assert_eq!(stamped(&*guard, page), Some(expected));
        stamp(&mut guard, page, next);
        drop(guard);
        self.live[index].1 = next;
    }

    fn freed(&mut self, index: usize) {
        let (page, _) = self.live.swap_remove(index);
        // A background thread may be writing the page back. Then a later call frees it.
        common::eventually("it is free", || {
            self.pool.trim().unwrap();
            matches!(self.pool.fix_shared(page), Err(PoolError::PageFree(_)))
        });
        assert!(matches!(self.pool.free_page(page), Err(PoolError::PageFree(_))));
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Allocate(frames) => {
                let next = self.next();
                let mut guard = self.pool.allocate(frames).unwrap();
                assert!(guard.iter().all(|byte| *byte == 0));
                let page = guard.page();
                stamp(&mut guard, page, next);
                drop(guard);
                self.live.push((page, next));
            }
            Step::Write(index) => self.write(index, false),
            Step::Upgrade(index) => self.write(index, true),
            Step::Shared(index) => {
                let Some((_, page, expected)) = self.pick(index) else { return };
                assert_eq!(common::generation(&self.pool, page), Some(expected));
            }
            Step::Optimistic(index) => {
                let Some((_, page, expected)) = self.pick(index) else { return };
                let seen = self.pool.read(page, |bytes| stamped(bytes, page).ok_or(Restart));
                assert_eq!(seen.unwrap(), Ok(expected));
            }
            Step::Async(index) => {
                let Some((_, page, expected)) = self.pick(index) else { return };
                let guard = block_on(self.pool.fix_shared_async(page)).unwrap();
                assert_eq!(stamped(&*guard, page), Some(expected));
            }
            Step::Free(index) => {
                let Some((index, page, _)) = self.pick(index) else { return };
                self.pool.free_page(page).unwrap();
                self.freed(index);
            }
            Step::FreeHeld(index) => {
                let Some((index, page, _)) = self.pick(index) else { return };
                self.pool.free(self.pool.fix_exclusive(page).unwrap()).unwrap();
                self.freed(index);
            }
            Step::FreeWhileHeld(index) => {
                let Some((index, page, expected)) = self.pick(index) else { return };
                let guard = self.pool.fix_shared(page).unwrap();
                self.pool.free_page(page).unwrap();
                assert_eq!(stamped(&*guard, page), Some(expected));
                drop(guard);
                self.freed(index);
            }
            Step::Prefetch(one, two) => {
                let pages: Vec<_> = [one, two].iter().filter_map(|n| self.pick(*n)).collect();
                self.pool.prefetch(&pages.iter().map(|(_, page, _)| *page).collect::<Vec<_>>());
            }
            Step::Sync => self.sync(),
            Step::Trim => assert!(self.pool.trim().unwrap() >= self.pool.end()),
            Step::Reopen => {
                self.sync();
                self.pool = open(self.device.clone(), &self.synced.1, self.evictors);
            }
            Step::Crash => {
                self.device = Arc::new(MemoryDevice::from_snapshot(self.synced.0.clone()));
                self.pool = open(self.device.clone(), &self.synced.1, self.evictors);
                self.live = self.synced.2.clone();
            }
        }
    }

    fn sync(&mut self) {
        self.pool.sync().unwrap();
        self.synced = (self.device.snapshot(), self.pool.encode_space(), self.live.clone());
    }

    fn check(&self) {
        let taken: u64 = self.live.iter().map(|(page, _)| u64::from(page.frames)).sum();
        assert_eq!(self.pool.with_space(Space::allocated_pages), taken);
        assert_eq!(self.device.pages().unwrap(), self.pool.file_pages());
        let stats = self.pool.stats();
        assert!(stats.resident_frames_peak <= 8, "{stats:?}");
        assert!(self.pool.kernel_resident_pages().unwrap() <= 8);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_pool_of_eight_frames_behaves_like_its_model(
        steps in prop::collection::vec(step(), 1..120),
        evictors in 0u64..2,
    ) {
        let mut world = World::new(evictors);
        for step in steps {
            world.run(step);
        }
        world.check();
        for (page, expected) in world.live.clone() {
            prop_assert_eq!(common::generation(&world.pool, page), Some(expected));
        }
    }
}
