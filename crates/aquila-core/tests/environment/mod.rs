//! An environment for tests: storage, frames and a page table in one state. It panics when the
//! cache breaks a rule.
#![allow(dead_code)] // not every test uses all of it

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

use vellum_aquila_core::{
    Access, AtomicU64, Cache, Counters, Environment, Fault, Frame, Key, Layout, Page, Policy, Tried,
};

/// A failure that a test has planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Read,
    Write,
}

#[derive(Debug, Default)]
pub struct State {
    /// What the files have.
    pub storage: HashMap<Key, u64>,
    /// What the frames have.
    memory: HashMap<Frame, u64>,
    /// Which frame is mapped at a page, and whether for writing.
    mapped: HashMap<Key, (Frame, bool)>,
    /// Pages whose dirty bits are set.
    stored: HashSet<Key>,
    /// The page that each frame in use has.
    owners: HashMap<Frame, Key>,
    reading: HashSet<Key>,
    /// Pages that a caller has pinned for writing.
    pub held: HashSet<Key>,
    pub reads: u64,
    pub fail_reads: bool,
    pub fail_writes: bool,
    /// Frames that may be in use.
    pub limit: usize,
    pub most_in_use: usize,
}

/// The environment.
#[derive(Debug, Default)]
pub struct TestEnvironment {
    state: Mutex<State>,
    /// Whether the page table has dirty bits, and every page is mapped for writing.
    has_dirty_bits: bool,
    /// Whether a thread of the test writes dirty pages, and no fault does.
    writes_apart: bool,
    /// Whether a write waits until a test says that it may go on: a file whose lock is taken.
    pub is_locked: std::sync::atomic::AtomicBool,
}

/// A point at which another thread may run, as at each access to a shared word.
pub fn interleave() {
    #[cfg(feature = "model")]
    shuttle::sync::atomic::AtomicBool::new(false).load(std::sync::atomic::Ordering::SeqCst);
}

impl TestEnvironment {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What a load of the page gives, if it is mapped.
    fn load(&self, key: Key) -> Option<u64> {
        let state = self.state();
        let (frame, _) = state.mapped.get(&key)?;
        assert_eq!(state.owners.get(frame), Some(&key), "a load reached another page's frame");
        Some(state.memory[frame])
    }

    /// Stores, if the page is mapped for writing.
    fn store(&self, key: Key, value: u64) -> bool {
        let mut state = self.state();
        let Some((frame, true)) = state.mapped.get(&key).copied() else {
            return false;
        };
        assert_eq!(state.owners.get(&frame), Some(&key), "a store reached another page's frame");
        state.memory.insert(frame, value);
        if self.has_dirty_bits {
            state.stored.insert(key);
        }
        true
    }
}

impl Environment for TestEnvironment {
    type Mapping = ();
    type Error = Failure;

    fn processor(&self) -> usize {
        #[cfg(feature = "model")]
        return usize::from(shuttle::thread::current().id()) % 2;
        #[cfg(not(feature = "model"))]
        0
    }

    fn read(&self, run: &[Page], place: Option<&()>) -> Result<bool, Failure> {
        for page in run {
            let mut state = self.state();
            assert!(state.reading.insert(page.key), "a page is read twice at once");
            assert!(!state.mapped.contains_key(&page.key), "a mapped page is read");
            let is_used = state.owners.insert(page.frame, page.key);
            assert_eq!(is_used, None, "a frame is used before it was released");
            assert!(!state.mapped.values().any(|(frame, _)| *frame == page.frame), "still mapped");
            state.most_in_use = state.most_in_use.max(state.owners.len());
            assert!(state.owners.len() <= state.limit, "more frames in use than the budget");
        }
        interleave();
        let mut state = self.state();
        for page in run {
            let value = state.storage.get(&page.key).copied().unwrap_or_default();
            state.memory.insert(page.frame, value);
            state.reading.remove(&page.key);
        }
        state.reads += run.len() as u64;
        if state.fail_reads {
            // The frames of pages that the cache gives up are released, and the first one is read
            // once more.
            run.iter().for_each(|page| _ = state.owners.remove(&page.frame));
            return Err(Failure::Read);
        }
        drop(state);
        // Every second run is mapped at once.
        let maps = place.is_some() && !self.has_dirty_bits && run[0].key.page().is_multiple_of(2);
        if maps {
            self.map(run, &(), false)?;
            interleave();
        }
        Ok(maps)
    }

    fn write(&self, run: &[Page]) -> Result<(), Failure> {
        while self.is_locked.load(std::sync::atomic::Ordering::SeqCst) {
            self.wait(0);
        }
        let mut values = Vec::new();
        for page in run {
            let state = self.state();
            assert_eq!(state.owners.get(&page.frame), Some(&page.key), "another page is written");
            let writable = state.mapped.get(&page.key).is_some_and(|(_, writable)| *writable);
            let may_store = self.has_dirty_bits || state.held.contains(&page.key);
            assert!(!writable || may_store, "stores come between");
            values.push(state.memory[&page.frame]);
        }
        interleave();
        let mut state = self.state();
        if state.fail_writes {
            return Err(Failure::Write);
        }
        state.storage.extend(run.iter().map(|page| page.key).zip(values));
        Ok(())
    }

    fn map(&self, run: &[Page], _: &(), writable: bool) -> Result<(), Failure> {
        interleave();
        let mut state = self.state();
        for page in run {
            assert_eq!(
                state.owners.get(&page.frame),
                Some(&page.key),
                "a mapped frame is another's"
            );
            let entry = state.mapped.entry(page.key).or_insert((page.frame, false));
            assert_eq!(entry.0, page.frame, "a page is in two frames");
            entry.1 |= writable || self.has_dirty_bits;
        }
        Ok(())
    }

    fn protect(&self, pages: &[Page]) {
        for page in pages {
            let mut state = self.state();
            state.stored.remove(&page.key);
            if let Some(entry) = state.mapped.get_mut(&page.key) {
                entry.1 = self.has_dirty_bits;
            }
            drop(state);
            interleave();
        }
    }

    fn unmap(&self, pages: &[Page]) {
        assert!(pages.is_sorted_by_key(|page| page.key), "pages are in order");
        for page in pages {
            interleave();
            let mut state = self.state();
            let is_writable = state.mapped.get(&page.key).is_some_and(|(_, writable)| *writable);
            let may_be_clean = self.has_dirty_bits || !is_writable;
            assert!(page.dirty || may_be_clean, "a clean page is mapped for writing");
            // Clean pages stay mapped for reading until they are released.
            if page.dirty || self.has_dirty_bits {
                state.mapped.remove(&page.key);
            }
        }
        interleave();
    }

    fn release(&self, pages: &[Page]) {
        for page in pages {
            let mut state = self.state();
            state.mapped.remove(&page.key);
            state.stored.remove(&page.key);
            state.owners.remove(&page.frame);
            drop(state);
            interleave();
        }
    }

    fn writes_apart(&self) -> bool {
        self.writes_apart
    }

    fn tells_stores(&self) -> bool {
        self.has_dirty_bits
    }

    fn was_stored_to(&self, page: Page) -> bool {
        interleave();
        self.state().stored.contains(&page.key)
    }

    fn wait(&self, _: u32) {
        #[cfg(feature = "model")]
        shuttle::thread::yield_now();
        #[cfg(not(feature = "model"))]
        std::thread::yield_now();
    }
}

/// The memory of a cache.
pub struct Memory {
    pub layout: Layout,
    words: Vec<AtomicU64>,
    counters: [Counters; 2],
}

pub fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl Memory {
    pub fn new(frames: u32) -> Self {
        let layout = Layout::new(frames, 2, 1).unwrap();
        Self { layout, words: words(layout.words()), counters: Default::default() }
    }

    /// A cache that uses `size` of the frames.
    pub fn cache<P: Policy>(&self, policy: P, size: u32) -> Cache<'_, TestEnvironment, P> {
        self.cache_on(TestEnvironment::default(), policy, size)
    }

    /// One whose page table has dirty bits, so that no fault tells of stores.
    pub fn cache_with_bits<P: Policy>(
        &self,
        policy: P,
        size: u32,
    ) -> Cache<'_, TestEnvironment, P> {
        let environment = TestEnvironment { has_dirty_bits: true, ..TestEnvironment::default() };
        self.cache_on(environment, policy, size)
    }

    /// One that writes no page in a fault.
    pub fn cache_apart<P: Policy>(&self, policy: P, size: u32) -> Cache<'_, TestEnvironment, P> {
        let environment = TestEnvironment { writes_apart: true, ..TestEnvironment::default() };
        self.cache_on(environment, policy, size)
    }

    fn cache_on<P: Policy>(
        &self,
        environment: TestEnvironment,
        policy: P,
        size: u32,
    ) -> Cache<'_, TestEnvironment, P> {
        environment.state().limit = size as usize;
        Cache::new(self.layout, &self.words, &self.counters, policy, environment, size)
    }
}

pub type TestResult<T> = Result<T, vellum_aquila_core::Error<Failure>>;

pub fn key(page: u64) -> Key {
    Key::new((page % 2) as u32, page / 2).unwrap()
}

/// Every page of every file.
pub fn all() -> std::ops::RangeInclusive<Key> {
    Key::new(0, 0).unwrap()..=Key::new(Key::FILES - 1, Key::PAGES - 1).unwrap()
}

fn fault<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    key: Key,
    access: Access,
    ahead: u32,
) -> TestResult<()> {
    cache.fault(&Fault { key, access, ahead, used: 0, place: &() }).map(drop)
}

/// What a program's load does: it faults until the page is mapped.
pub fn load<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    key: Key,
    ahead: u32,
) -> TestResult<u64> {
    loop {
        interleave();
        if let Some(value) = cache.environment().load(key) {
            return Ok(value);
        }
        fault(cache, key, Access::Read, ahead)?;
    }
}

/// What a program's store does.
pub fn store<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    key: Key,
    value: u64,
) -> TestResult<()> {
    loop {
        interleave();
        if cache.environment().store(key, value) {
            return Ok(());
        }
        fault(cache, key, Access::Write, 0)?;
    }
}

/// Accesses a page as a thread does whose faults a handler serves. The handler waits for no thread.
/// Stores if there is a value. Gives up if a dirty page would have to be written.
pub fn try_access<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    key: Key,
    value: Option<u64>,
) -> TestResult<Option<u64>> {
    let access = if value.is_some() { Access::Write } else { Access::Read };
    loop {
        interleave();
        match value {
            Some(value) if cache.environment().store(key, value) => return Ok(Some(value)),
            Some(_) => {}
            None => {
                if let Some(found) = cache.environment().load(key) {
                    return Ok(Some(found));
                }
            }
        }
        match cache.try_fault(&Fault { key, access, ahead: 0, used: 0, place: &() })? {
            Tried::Mapped(_) => {}
            Tried::Busy | Tried::FramesBusy => cache.environment().wait(0),
            Tried::NoFrame => return Ok(None),
        }
    }
}
