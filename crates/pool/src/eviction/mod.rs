//! Eviction: it finds frames for the pages that threads fault in or allocate.
//!
//! A batch goes through the paper's five steps (SIGMOD'23, section 3.4): take candidates and hold
//! the dirty ones shared; write those; lock all exclusively, and skip pages that are in use;
//! release their memory with one call; call them evicted.
//!
//! Some frames stay free. If fewer are, a miss evicts a few clean pages in slots itself, whose
//! memory the kernel need not release. If there are too few of these, the miss wakes a background
//! thread. A thread that finds no free frame evicts a batch itself.

pub(crate) mod frame_budget;
mod rest;
pub(crate) mod write_back;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Setting;
use std::time::{Duration, Instant};

use crate::core::{Core, ReservedPage, Unreserved};
use crate::device::Device;
use crate::error::PoolError;
use crate::eviction::rest::Rests;
use crate::eviction::write_back::{HeldPages, Writer};
use crate::page::PageRef;
use crate::page::state::{Leave, State};
use crate::residence::PlacedPage;
use crate::slots::Slots;
use crate::statistics::counters::Event;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering, lock, wait, wait_for};

/// While the pool shrinks, it has so many batches of free frames at most beyond its new size.
const SPARE_BATCHES: u64 = 4;

/// So many pages at most leave in a miss while frames run short. Each miss needs the frames of one
/// page. After four pages have left, the next three misses need not look at any, and this one takes
/// hardly longer than those.
const FEW: usize = 4;

/// How often a background thread that rests looks whether it still should.
const LOOK_IN_REST: Duration = Duration::from_millis(200);

/// Evicts pages of one pool.
#[derive(Debug)]
pub(crate) struct Eviction {
    core: Arc<Core>,
    device: Arc<dyn Device>,
    pub(crate) writer: Writer,
    /// Background eviction begins when fewer frames than this are free, and ends when twice as many
    /// are.
    low: Setting,
    /// After so many consecutive rounds, of about a millisecond each, without a frame that is put
    /// back, the pool counts as exhausted.
    patience: u32,
    background: Background,
    /// Why the last write-back failed, until one succeeds.
    failure: Mutex<Option<String>>,
    /// Candidates that misses have passed over: dirty ones, and those on the surface. The next
    /// batch begins with them, and comes when they are as many as it has.
    passed_over: Mutex<Vec<PageRef>>,
    /// How many batches the format has put off. While it rises, the pool is not exhausted.
    put_off: AtomicU64,
}

#[derive(Debug, Default)]
struct Background {
    threads: u64,
    /// One of the threads sleeps, and no other thread has woken it yet.
    asleep: AtomicBool,
    /// One of the threads rests.
    rests: AtomicBool,
    state: Mutex<BackgroundState>,
    /// Threads that sleep wait here.
    wake_up: Condvar,
    /// Threads that rest wait here.
    rest_ends: Condvar,
}

#[derive(Debug, Default)]
struct BackgroundState {
    /// A miss asks for more free frames.
    is_wanted: bool,
    /// How many frames tasks wait for, at most; 0 for no request.
    for_tasks: u64,
    /// How often a rest had to end. A thread that rests waits for a change.
    calls: u64,
    /// Threads that sleep, or that were woken and do not run yet.
    sleeping: u64,
    /// Threads that rest.
    resting: u64,
    ended: bool,
}

impl Eviction {
    pub(crate) fn new(
        core: Arc<Core>,
        device: Arc<dyn Device>,
        writer: Writer,
        threads: u64,
        patience: u32,
    ) -> Eviction {
        let eviction = Eviction {
            core,
            device,
            writer,
            low: Setting::new(0),
            patience,
            background: Background { threads, ..Background::default() },
            failure: Mutex::new(None),
            passed_over: Mutex::default(),
            put_off: AtomicU64::new(0),
        };
        eviction.note_capacity();
        eviction
    }

    /// Adapts to the size of the pool.
    pub(crate) fn note_capacity(&self) {
        let capacity = self.core.budget.capacity();
        self.writer.note_capacity(capacity);
        let low = (capacity / 64).max(self.writer.batch() as u64).min(capacity / 8).max(1);
        self.low.store(low, Ordering::Relaxed);
        // Requests were for another size. The caller wakes the tasks, which ask again.
        let mut state = lock(&self.background.state);
        (state.is_wanted, state.for_tasks) = (false, 0);
    }

    fn low(&self) -> u64 {
        self.low.load(Ordering::Relaxed)
    }

    /// Takes the frames for a page out of the budget. Evicts other pages if there are too few.
    pub(crate) fn reserve(&self, page: PageRef) -> Result<ReservedPage<'_>, PoolError> {
        match self.core.try_reserve(page, false) {
            Ok(reserved) => {
                self.evict_ahead(page, true);
                Ok(reserved)
            }
            Err(why) => self.reserve_by_evicting(page, why),
        }
    }

    /// As [`reserve`](Eviction::reserve), but never evicts to get the frames. `may_break` as for
    /// [`Core::try_reserve`]: false for a page that is only read ahead.
    pub(crate) fn try_reserve(
        &self,
        page: PageRef,
        may_break: bool,
    ) -> Result<ReservedPage<'_>, Unreserved> {
        let reserved = self.core.try_reserve(page, may_break);
        self.evict_ahead(page, may_break && reserved.is_ok());
        reserved
    }

    #[cold]
    fn reserve_by_evicting(
        &self,
        page: PageRef,
        mut why: Unreserved,
    ) -> Result<ReservedPage<'_>, PoolError> {
        let (mut rounds, mut may_break) = (0, false);
        while rounds < self.patience {
            // The pool may have shrunk since the caller looked.
            let capacity = self.core.budget.size();
            if u64::from(page.frames) > capacity {
                return Err(PoolError::PageTooLarge { page, capacity });
            }
            let progress = self.progress();
            let evicted = match why {
                Unreserved::NoFrames => {
                    self.evict_batch(u64::from(page.frames).max(self.writer.batch() as u64))
                }
                // It would not help.
                Unreserved::NoMemory => Evicted::default(),
            };
            self.core.counters.add(Event::EvictInline, evicted.pages);
            if evicted.has_written && self.background.rests.load(Ordering::Relaxed) {
                // This thread has waited for writes.
                self.end_rests(&mut lock(&self.background.state));
            }
            may_break |= evicted.frames == 0;
            why = match self.core.try_reserve(page, may_break) {
                Ok(reserved) => return Ok(reserved),
                Err(why) => why,
            };
            if evicted.frames == 0 {
                self.core.counters.count(Event::FrameWait);
                self.core.budget.wait_briefly();
                // The pool is not exhausted if other threads got the frames, or if the format puts
                // writes off.
                let others_go_on = why == Unreserved::NoFrames && self.progress() != progress;
                rounds = if others_go_on { 0 } else { rounds + 1 };
            }
        }
        Err(self.exhausted(page))
    }

    /// Makes the budget smaller, to `frames` frames, and evicts pages until no more are in use.
    /// Of the frames that leave, half go out of the budget, and misses of other threads may take
    /// the others, so that these do not wait until the pool is as small as it is to be.
    ///
    /// # Errors
    /// [`PoolError::CannotShrink`] if guards hold the frames, or pages cannot be written.
    pub(crate) fn evict_down_to(&self, frames: u64) -> Result<(), PoolError> {
        let budget = &self.core.budget;
        let batch = self.writer.batch() as u64;
        // So many free frames are enough for the misses that happen during a batch.
        let spare = SPARE_BATCHES * batch;
        let mut rounds = 0;
        while rounds < self.patience {
            let used = budget.used();
            budget.lower_capacity(if used <= frames { frames } else { used + spare });
            let excess = budget.excess();
            if budget.capacity() == frames && excess == 0 {
                return Ok(());
            }
            let progress = self.progress();
            let evicted = self.evict_batch(excess.max(batch));
            let lower = budget.capacity().saturating_sub(evicted.frames.div_ceil(2));
            budget.lower_capacity(lower.max(frames));
            rounds += 1;
            if evicted.frames == 0 {
                budget.wait_briefly();
            }
            if evicted.frames > 0 || self.progress() != progress {
                rounds = 0;
            }
        }
        Err(PoolError::CannotShrink {
            capacity: frames,
            used: budget.used(),
            because: lock(&self.failure).clone(),
        })
    }

    /// The error for a page that found no frames.
    pub(crate) fn exhausted(&self, page: PageRef) -> PoolError {
        PoolError::Exhausted {
            capacity: self.core.budget.capacity(),
            wanted: page.frames,
            used: self.core.budget.used(),
            because: lock(&self.failure).clone(),
        }
    }

    /// A number that rises when frames come back while a thread waits for some, and when the format
    /// puts a write off. While it rises, a thread that waits may yet get frames.
    pub(crate) fn progress(&self) -> u64 {
        self.core.budget.progress() + self.put_off.load(Ordering::Relaxed)
    }

    /// How long a task may wait for frames before the pool counts as exhausted.
    pub(crate) fn patience(&self) -> u32 {
        self.patience
    }

    /// Whether threads evict in the background.
    pub(crate) fn has_background(&self) -> bool {
        self.background.threads > 0
    }

    /// Evicts one batch: up to `frames` frames, and up to the batch size in pages.
    pub(crate) fn evict_batch(&self, frames: u64) -> Evicted {
        let candidates = self.candidates(frames);

        let (clean, dirty) = self.hold_dirty(&candidates);
        let written = self.write(&dirty);
        let locked = self.lock_exclusively(&clean, dirty, &written);
        Evicted { has_written: !written.is_empty(), ..self.release(&locked) }
    }

    /// The candidates of a batch: those that misses have passed over, and others.
    fn candidates(&self, frames: u64) -> Vec<PageRef> {
        let batch = self.writer.batch();
        let (mut candidates, mut found) = (Vec::with_capacity(batch), 0);
        let mut passed_over = lock(&self.passed_over);
        while candidates.len() < batch && found < frames {
            let Some(page) = passed_over.pop() else { break };
            found += u64::from(page.frames);
            candidates.push(page);
        }
        drop(passed_over);
        if candidates.len() < batch && found < frames {
            let mut others = Vec::with_capacity(batch - candidates.len());
            let missing = (frames - found, batch - candidates.len());
            self.core.policy.candidates(&*self.core, missing.0, missing.1, &mut others);
            candidates.append(&mut others);
        }
        candidates
    }

    /// Looks at a few candidates, and evicts those that are clean and in slots. Leaves the others
    /// to the next batch. None if there are enough for one.
    fn evict_few(&self) -> Option<Evicted> {
        let core = &*self.core;
        let mut few = Vec::with_capacity(FEW);
        core.policy.few_candidates(core, FEW, &mut few);
        let costs_little = |page: &PageRef| {
            let (_, seen) = core.look_at_known(*page);
            seen.slot(core.slot_mask) > 0 && !seen.is_dirty()
        };
        let (few, mut others): (Vec<_>, Vec<_>) = few.into_iter().partition(costs_little);
        let mut are_enough = false;
        if !others.is_empty() {
            let mut passed_over = lock(&self.passed_over);
            passed_over.append(&mut others);
            are_enough = passed_over.len() + FEW > self.writer.batch();
        }
        let evicted = self.release(&self.lock_exclusively(&few, HeldPages::none(core), &[]));
        core.counters.add(Event::EvictInline, evicted.pages);
        (!are_enough).then_some(evicted)
    }

    /// Step 1: sorts the candidates that are still marked into clean ones and dirty ones. Holds the
    /// dirty ones shared, in the order of the file.
    fn hold_dirty(&self, candidates: &[PageRef]) -> (Vec<PageRef>, HeldPages<'_>) {
        let (mut clean, mut dirty) = (Vec::new(), HeldPages::none(&self.core));
        for &page in candidates {
            let (state, seen) = self.core.look_at_known(page);
            if seen.state() == State::Marked {
                if !seen.is_dirty() {
                    clean.push(page);
                } else if state.try_lock_shared(seen) {
                    if self.core.is_of_this_length(page) {
                        dirty.push(page, false);
                    } else {
                        self.core.unlock_shared(page);
                    }
                }
            }
        }
        // Devices write neighbours in the file with one operation.
        dirty.sort();
        (clean, dirty)
    }

    /// Step 2: writes the dirty pages. True for each page that is clean now.
    fn write(&self, dirty: &HeldPages<'_>) -> Vec<bool> {
        let results = self.writer.write(&*self.device, dirty);
        if matches!(results.first(), Some(Err(error)) if error.is_put_off()) {
            self.put_off.fetch_add(1, Ordering::Relaxed);
        } else if let Some(Err(error)) = results.iter().find(|result| result.is_err()) {
            *lock(&self.failure) = Some(error.to_string());
        } else if !results.is_empty() {
            *lock(&self.failure) = None;
        }
        results.into_iter().map(|result| result.is_ok()).collect()
    }

    /// Step 3: locks the pages exclusively that no thread has used meanwhile. The others stay.
    fn lock_exclusively(
        &self,
        clean: &[PageRef],
        dirty: HeldPages<'_>,
        written: &[bool],
    ) -> Vec<PlacedPage> {
        let mut locked = Vec::with_capacity(clean.len() + written.len());
        for &page in clean {
            let (state, seen) = self.core.look_at_known(page);
            if seen.state() == State::Marked && !seen.is_dirty() && state.try_lock(seen) {
                // The page may have been freed since, and another page may have its place.
                if !self.core.is_of_this_length(page) {
                    self.core.unlock(page, Leave::Unlocked, false);
                } else {
                    locked.extend(self.placed(page));
                }
            }
        }
        for (page, &written) in dirty.take().into_iter().zip(written) {
            if written && self.core.held(page).try_upgrade() {
                locked.extend(self.placed(page));
            } else {
                // Without its mark a page that could not be written is not proposed again at once.
                self.core.unlock_shared(page);
                if !written {
                    self.core.repair_word(page);
                }
            }
        }
        locked
    }

    /// Steps 4 and 5: releases the memory of pages that this thread holds exclusively, and calls
    /// them evicted.
    fn release(&self, locked: &[PlacedPage]) -> Evicted {
        let core = &*self.core;
        let results = core.evict(locked);
        let mut evicted = Evicted::default();
        for (placed, _) in locked.iter().zip(results).filter(|(_, result)| result.is_ok()) {
            evicted.pages += 1;
            evicted.frames += u64::from(placed.page.frames);
        }
        core.counters.add(Event::Evict, evicted.pages);
        core.budget.put_back(evicted.frames);
        core.note_evicted(evicted.pages);
        evicted
    }

    /// Where a page is that this thread holds exclusively. If its word is damaged, the page stays,
    /// and is unlocked.
    fn placed(&self, page: PageRef) -> Option<PlacedPage> {
        let placed = self.core.placed(page);
        if placed.is_none() {
            let error = self.core.refuse_exclusive(page, false);
            *lock(&self.failure) = Some(error.to_string());
        }
        placed
    }

    /// If frames run short for others after those of this page, evicts a few clean pages, or wakes
    /// a background thread. `may_evict` is false if this thread does not wait for the page.
    #[inline]
    fn evict_ahead(&self, page: PageRef, may_evict: bool) {
        if self.core.budget.available() < self.low()
            && self.background.asleep.load(Ordering::Relaxed)
        {
            self.evict_few_or_wake_background(page, may_evict);
        }
    }

    /// If the threads that miss use all processors, the background thread takes one of them from a
    /// thread in the midst of a miss, for as long as it evicts. So threads that miss evict what
    /// costs less than waking that thread: a page in a slot takes no release, and a clean page no
    /// write.
    #[cold]
    fn evict_few_or_wake_background(&self, page: PageRef, may_evict: bool) {
        let low = self.low();
        if may_evict && self.slots_are_used() && self.core.budget.available() > low / 2 {
            // If fewer leave than come, that is the background thread's part.
            let enough = |evicted: Evicted| evicted.frames >= u64::from(page.frames);
            if self.evict_few().is_some_and(enough) {
                return;
            }
        }
        self.wake_background(0);
    }

    fn slots_are_used(&self) -> bool {
        self.core.slots.as_ref().is_some_and(Slots::are_used)
    }

    /// As if a background thread slept: misses evict a few pages before they wake it.
    #[cfg(all(test, not(feature = "model")))]
    pub(crate) fn pretend_a_thread_sleeps(&self) {
        self.background.asleep.store(true, Ordering::Relaxed);
    }

    /// Wakes a background thread, so that at least `frames` frames become free for a task that
    /// waits for them. No thread rests then: the task evicts nothing itself.
    pub(crate) fn evict_for_task(&self, frames: u64) {
        self.wake_background(frames);
    }

    #[cold]
    fn wake_background(&self, for_tasks: u64) {
        let mut state = lock(&self.background.state);
        state.is_wanted = true;
        state.for_tasks = state.for_tasks.max(for_tasks);
        // Until the woken thread runs, no other thread need spend a system call on waking it.
        self.background.asleep.store(false, Ordering::Relaxed);
        if for_tasks > 0 {
            self.end_rests(&mut state);
        }
        drop(state);
        self.background.wake_up.notify_one();
    }

    /// Has background threads work that rest, or that are about to.
    fn end_rests(&self, state: &mut BackgroundState) {
        state.calls += 1;
        if state.resting > 0 {
            self.background.rest_ends.notify_all();
        }
    }

    /// Tells the background threads to end; they return soon after.
    pub(crate) fn end_background(&self) {
        lock(&self.background.state).ended = true;
        self.background.wake_up.notify_all();
        self.background.rest_ends.notify_all();
    }

    /// The loop of a background thread, until [`end_background`](Self::end_background).
    pub(crate) fn run_background(&self) {
        let mut rests = Rests::of_this_thread();
        loop {
            let mut state = lock(&self.background.state);
            while !state.is_wanted && !state.ended {
                state.sleeping += 1;
                self.background.asleep.store(true, Ordering::Relaxed);
                state = wait(&self.background.wake_up, state);
                state.sleeping -= 1;
            }
            if state.ended {
                return;
            }
            let for_tasks = std::mem::take(&mut state.for_tasks);
            state.is_wanted = false;
            let calls = state.calls;
            // If this thread does not keep up, a fix wakes the next one.
            self.background.asleep.store(state.sleeping > 0, Ordering::Relaxed);
            drop(state);
            if let Some(rest) = self.evict_until_free_or_panic(for_tasks, &mut rests) {
                self.rest(rest, calls);
            }
        }
    }

    /// Keeps a background thread from work for so long, or until it is called, if there were
    /// `calls` of these before. A task calls it, and a thread that has waited for writes. Other
    /// misses do not: they find no thread asleep.
    fn rest(&self, time: Duration, calls: u64) {
        let until = Instant::now() + time;
        let mut state = lock(&self.background.state);
        state.resting += 1;
        self.background.rests.store(true, Ordering::Relaxed);
        while state.calls == calls && !state.ended && !self.slots_are_used() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // No event tells that the pool has begun to use slots.
            state = wait_for(&self.background.rest_ends, state, left.min(LOOK_IN_REST));
        }
        state.resting -= 1;
        self.background.rests.store(state.resting > 0, Ordering::Relaxed);
    }

    /// As [`evict_until_free`](Self::evict_until_free). A panic of the device or the format ends
    /// this attempt, but not the thread. Threads that wait for frames then retry.
    fn evict_until_free_or_panic(&self, for_tasks: u64, rests: &mut Rests) -> Option<Duration> {
        // In the model a panic is a failure of the test.
        if cfg!(feature = "model") {
            return self.evict_until_free(for_tasks, rests);
        }
        let evicting = AssertUnwindSafe(|| self.evict_until_free(for_tasks, rests));
        catch_unwind(evicting).unwrap_or_else(|_| {
            tracing::error!("the device or the page format panicked during an eviction");
            *lock(&self.failure) = Some("a panic ended an eviction".to_owned());
            self.core.budget.wake();
            None
        })
    }

    /// Evicts until twice as many frames are free as eviction begins at, and `for_tasks`. Returns
    /// how long the thread should rest, if it should.
    fn evict_until_free(&self, for_tasks: u64, rests: &mut Rests) -> Option<Duration> {
        let budget = &self.core.budget;
        let size = budget.size();
        // Until the size of the pool changes.
        while budget.size() == size && !lock(&self.background.state).ended {
            // While the pool shrinks, it has fewer frames than its size says.
            let wanted = (2 * self.low()).min(budget.capacity() / 4).max(for_tasks);
            let missing = wanted.saturating_sub(budget.available());
            if missing == 0 {
                break;
            }
            let evicted = self.evict_batch(missing.max(self.writer.batch() as u64));
            if evicted.frames == 0 {
                // No page can leave now. Threads that wait for frames retry.
                budget.wait_briefly();
                budget.wake();
                break;
            }
            // Misses evict clean pages as well as this thread does, but they would have to wait for
            // writes. So it goes on where pages are dirty, and where slots are in use: there it has
            // those that misses leave to it.
            let may_rest = !evicted.has_written && !self.slots_are_used();
            if let Some(rest) = rests.due(may_rest) {
                return Some(rest);
            }
        }
        None
    }
}

/// The result of a batch of evictions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evicted {
    pub(crate) pages: u64,
    pub(crate) frames: u64,
    /// Some were dirty.
    pub(crate) has_written: bool,
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use vellum_testing::patience::{PATIENCE, eventually};

    use super::*;
    use crate::device::{Call, HookedDevice, MemoryDevice};
    use crate::{Pool, PoolOptions, PoolSize, RawPages, Space, Translation};
    use vellum_vm::{BackendChoice, BackendKind};

    /// The pages of each call that writes.
    type WrittenPages = Arc<Mutex<Vec<Vec<u64>>>>;

    /// A device that notes the pages of each call that writes.
    fn noting() -> (Arc<HookedDevice<MemoryDevice>>, WrittenPages) {
        let written = WrittenPages::default();
        let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
        let noted = written.clone();
        device.set_hook(move |call| {
            if let Call::AfterWrite(pages) = call {
                lock(&noted).push(pages.to_vec());
            }
        });
        (device, written)
    }

    /// A batch of one clean and one dirty page; while the dirty one is written, a thread writes to
    /// the clean one, and another clock's hand marks it again.
    #[test]
    fn a_page_that_was_dirtied_while_its_batch_was_written_stays() {
        let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
        let options =
            PoolOptions { size: PoolSize::Bytes(32 * 4096), evictors: 0, ..PoolOptions::default() };
        let pool = Pool::open(device.clone(), Arc::new(RawPages), Space::new(0), options);
        let pool = Arc::new(pool.unwrap());
        let clean = pool.allocate(1).unwrap().page();
        let dirty = pool.allocate(1).unwrap().page();
        pool.sync().unwrap();
        pool.fix_exclusive(dirty).unwrap()[0] = 1;

        let meanwhile = Arc::downgrade(&pool);
        device.set_hook(move |call| {
            let (Call::AfterWrite(_), Some(pool)) = (call, meanwhile.upgrade()) else { return };
            pool.fix_exclusive(clean).unwrap()[0] = 2;
            let state = pool.core.held(clean);
            assert!(state.try_mark(state.load()));
        });
        let evicted = pool.eviction.evict_batch(2);
        assert_eq!(evicted.pages, 1, "the dirty page is written now and goes");
        assert!(pool.is_resident(clean) && !pool.is_resident(dirty));
        assert_eq!(pool.fix_shared(clean).unwrap()[0], 2);
        assert_eq!(pool.fix_shared(dirty).unwrap()[0], 1);
    }

    /// A checkpoint is no access, whether it writes the pages or copies of them.
    #[test]
    fn pages_that_a_checkpoint_writes_keep_their_marks() {
        let options =
            PoolOptions { size: PoolSize::Bytes(64 * 4096), evictors: 0, ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        let pages = [(); 4].map(|()| pool.allocate(1).unwrap().page());
        let look = |page: PageRef| pool.core.held(page).load();
        let change = || {
            for page in pages {
                pool.fix_exclusive(page).unwrap()[0] += 1;
                // Every other page.
                assert!(page.id.0 % 2 == 0 || pool.core.held(page).try_mark(look(page)));
                assert!(look(page).is_dirty());
            }
        };
        let check = |is_dirty| {
            for page in pages {
                assert_eq!(look(page).state() == State::Marked, page.id.0 % 2 == 1, "{page}");
                assert_eq!(look(page).is_dirty(), is_dirty, "{page}");
            }
        };
        change();
        pool.sync().unwrap();
        check(false);
        change();
        pool.write_wanted_pages(&pages.map(|page| page.id), &|_| false).unwrap();
        check(true);
        for too_few in 0..2 {
            assert!(pool.copy_dirty(8, too_few).unwrap().is_none());
            check(true);
        }
        let copies = pool.copy_dirty(8, 8).unwrap().unwrap();
        check(true);
        pool.write_copies(&copies).unwrap();
        pool.clear_dirty_if_unchanged(&copies);
        check(false);
    }

    /// The evictor holds a page that was dirty when it looked. A checkpoint writes the page before
    /// the evictor does: the evictor must not write it again.
    #[test]
    fn pages_that_were_written_meanwhile_are_not_written_again() {
        let (device, written) = noting();
        let options =
            PoolOptions { size: PoolSize::Bytes(32 * 4096), evictors: 0, ..PoolOptions::default() };
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        let page = pool.allocate(1).unwrap().page();
        pool.sync().unwrap();
        let held = pool.fix_shared(page).unwrap();
        let calls = lock(&written).len();
        let mut late = HeldPages::none(&pool.core);
        std::mem::forget(pool.fix_shared(page).unwrap());
        late.push(page, false);
        let results = pool.eviction.writer.write(&*pool.eviction.device, &late);
        assert!(matches!(&results[..], [Ok(())]));
        assert_eq!(lock(&written).len(), calls);
        drop(held);
    }

    #[test]
    fn a_batch_is_written_in_the_order_of_the_file() {
        let (device, written) = noting();
        let options =
            PoolOptions { size: PoolSize::Bytes(64 * 4096), evictors: 0, ..PoolOptions::default() };
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        (0..60).for_each(|_| drop(pool.allocate(1).unwrap()));
        let evicted: u64 = (0..20).map(|_| pool.eviction.evict_batch(8).pages).sum();
        assert_eq!(evicted, 60);
        let written = lock(&written);
        assert!(written.iter().all(|pages| pages.is_sorted()), "{written:?}");
        assert_eq!(written.iter().map(Vec::len).sum::<usize>(), 60);
        assert!(written.iter().any(|pages| pages.len() > 1));
    }

    /// Threads pass one frame around while another thread waits for two.
    #[test]
    fn frames_that_come_and_go_are_no_exhaustion() {
        let options = PoolOptions {
            size: PoolSize::Bytes(16 * 4096),
            evictors: 0,
            patience: 2000,
            ..PoolOptions::default()
        };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        let budget = &pool.core.budget;
        let others = budget.try_reserve(15).unwrap();
        let mut one = budget.try_reserve(1).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.eviction.reserve(PageRef::new(0, 2)).map(drop));
            // Most rounds of a millisecond see no frame, but never as many in a row as the
            // patience.
            for _ in 0..800 {
                std::thread::sleep(Duration::from_millis(3));
                drop(one);
                one = budget.try_reserve(1).unwrap();
            }
            assert!(!waiting.is_finished());
            drop(others);
            assert!(waiting.join().unwrap().is_ok());
        });
    }

    #[test]
    fn a_request_for_frames_ends_when_the_size_changes() {
        let size = PoolSize::Bytes(1_000 * 4096);
        let options = PoolOptions { size, evictors: 0, ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        pool.eviction.wake_background(500);
        pool.resize(100 * 4096).unwrap();
        let state = lock(&pool.eviction.background.state);
        assert_eq!((state.is_wanted, state.for_tasks), (false, 0));
        drop(state);
        assert_eq!(pool.eviction.low(), 6);
        assert_eq!(pool.eviction.writer.batch(), 6);
    }

    /// A task that asks for frames as soon as it is woken.
    struct AskingTask {
        pool: Arc<Pool>,
        wakes: AtomicUsize,
    }

    impl Wake for AskingTask {
        fn wake(self: Arc<AskingTask>) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            self.pool.eviction.evict_for_task(3);
        }
    }

    #[test]
    fn a_resize_forgets_no_request_of_a_task() {
        let options = PoolOptions { evictors: 0, ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        let pool = Arc::new(pool);
        let task = Arc::new(AskingTask { pool: pool.clone(), wakes: AtomicUsize::new(0) });
        let all = u32::try_from(pool.capacity()).unwrap();
        let held = pool.core.budget.try_reserve(all).unwrap();
        assert!(pool.core.budget.await_release(3, &task.clone().into()));
        pool.core.budget.set_size(u64::from(all) / 2);
        pool.eviction.wake_background(500);
        pool.resize(u64::from(all) * 4096).unwrap();
        assert_eq!(task.wakes.load(Ordering::Relaxed), 1);
        let state = lock(&pool.eviction.background.state);
        assert_eq!((state.is_wanted, state.for_tasks), (true, 3));
        drop(state);
        drop(held);
    }

    /// A pool by MMU, which evicts nothing by itself.
    fn pool_by_mmu(frames: u64) -> Pool {
        let options = PoolOptions {
            size: PoolSize::Bytes(frames * 4096),
            translation: Translation::Mmu,
            evictors: 0,
            ..PoolOptions::default()
        };
        let device = Arc::new(MemoryDevice::new());
        Pool::open(device, Arc::new(RawPages), Space::new(0), options).expect("a pool")
    }

    /// Has a miss find no free frame, so that it evicts a batch itself.
    fn miss_in_full_pool(pool: &Pool) {
        while pool.core.budget.available() > 0 {
            drop(pool.allocate(1).expect("it evicts"));
        }
        drop(pool.allocate(1).expect("it evicts"));
    }

    #[test]
    fn what_ends_a_rest_and_what_does_not() {
        let rests_of = |ends: fn(&Pool), goes_on: fn(&Pool)| {
            let pool = pool_by_mmu(1024);
            // The policy has seen all pages, so that a batch finds some.
            miss_in_full_pool(&pool);
            pool.sync().unwrap();
            std::thread::scope(|scope| {
                let resting = scope.spawn(|| pool.eviction.rest(2 * PATIENCE, 0));
                let rests = || pool.eviction.background.rests.load(Ordering::Relaxed);
                eventually("the thread rests", rests);
                goes_on(&pool);
                std::thread::sleep(Duration::from_millis(5));
                assert!(!resting.is_finished());
                ends(&pool);
                eventually("the rest ends", || resting.is_finished());
            });
            assert!(!pool.eviction.background.rests.load(Ordering::Relaxed));
        };
        let asks: fn(&Pool) = |pool| pool.eviction.wake_background(0);
        rests_of(|pool| pool.eviction.evict_for_task(1), asks);
        rests_of(|pool| pool.eviction.end_background(), asks);
        rests_of(miss_in_full_pool, |pool| {
            // Clean pages leave.
            let page = pool.eviction.evict_batch(64);
            assert!(page.frames > 0 && !page.has_written);
        });
        let pool = pool_by_mmu(1024);
        let begin = Instant::now();
        pool.eviction.rest(Duration::from_millis(5), 0);
        assert!(begin.elapsed() >= Duration::from_millis(5));
        // One that a task has called since it looked does not rest.
        pool.eviction.evict_for_task(1);
        pool.eviction.rest(Duration::from_secs(100_000), 0);
    }

    /// While a pool shrinks, it may have fewer frames than a background thread is to make free.
    #[test]
    fn a_pool_that_shrinks_does_not_evict_all_pages() {
        let pool = pool_by_mmu(1024);
        (0..1024).for_each(|_| drop(pool.allocate(1).unwrap()));
        pool.sync().unwrap();
        pool.eviction.evict_down_to(100).unwrap();
        assert!(2 * pool.eviction.low() > 100);
        pool.eviction.evict_until_free(0, &mut Rests::of_this_thread());
        assert!(pool.core.budget.used() > 10, "{}", pool.core.budget.used());
    }

    #[test]
    fn a_thread_rests_between_batches_of_clean_pages_alone() {
        for is_dirty in [false, true] {
            let pool = pool_by_mmu(1024);
            (0..1024).for_each(|_| drop(pool.allocate(1).unwrap()));
            if !is_dirty {
                pool.sync().unwrap();
            }
            let waited = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(&waited, "0 1000000000 1").unwrap();
            let mut rests = Rests::of_file(waited.reopen().unwrap());
            let rest = pool.eviction.evict_until_free(900, &mut rests);
            assert_eq!(rest.is_some(), !is_dirty);
            assert_eq!(pool.core.budget.available() >= 900, is_dirty);
            assert!(pool.core.budget.available() > 0);
        }
    }

    /// A pool by table whose frames are all in use, and whose background thread seems to sleep.
    fn full_pool_by_table(frames: u64, page_frames: u32) -> Pool {
        let options = PoolOptions {
            size: PoolSize::Bytes(frames * 4096),
            translation: Translation::Table,
            backend: BackendChoice::Only(BackendKind::Madvise),
            evictors: 0,
            ..PoolOptions::default()
        };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).expect("a pool");
        for _ in 0..frames / u64::from(page_frames) {
            drop(pool.allocate(page_frames).expect("the pool evicts"));
        }
        pool.eviction.pretend_a_thread_sleeps();
        pool
    }

    /// Evicts until a few frames less are free than background eviction begins at. Returns how many
    /// are free.
    fn evict_almost_to_the_mark(pool: &Pool) -> u64 {
        // The policy has seen each page twice, and proposes those that it comes to.
        pool.core.policy.candidates(&*pool.core, u64::MAX, usize::MAX, &mut Vec::new());
        let mark = pool.eviction.low();
        while pool.core.budget.available() + 8 < mark {
            pool.eviction.evict_batch(mark - 8 - pool.core.budget.available());
        }
        assert!((mark / 2 + 1..mark).contains(&pool.core.budget.available()));
        pool.core.budget.available()
    }

    fn background_sleeps(pool: &Pool) -> bool {
        pool.eviction.background.asleep.load(Ordering::Relaxed)
    }

    #[test]
    fn misses_evict_clean_pages_in_slots_themselves() {
        let pool = full_pool_by_table(2048, 1);
        pool.sync().unwrap();
        let free = evict_almost_to_the_mark(&pool);
        // All pages are marked; new ones are not, and the search for a few candidates is short.
        for _ in 0..1000 {
            drop(pool.allocate(1).unwrap());
            pool.sync().unwrap();
            assert!(pool.core.budget.available() >= free, "misses keep frames free");
        }
        assert!(background_sleeps(&pool), "no miss needed the background thread");
        assert!(pool.stats().evictions_inline >= 990);
    }

    #[test]
    fn misses_leave_dirty_pages_to_the_background_thread() {
        let pool = full_pool_by_table(2048, 1);
        let free = evict_almost_to_the_mark(&pool);
        drop(pool.allocate(1).unwrap());
        assert!(!background_sleeps(&pool), "it is to write and evict dirty pages");
        assert_eq!(pool.core.budget.available(), free - 1);
    }

    /// A policy proposes each page once. The pages that a miss leaves are the first of the next
    /// batch.
    #[test]
    fn candidates_that_a_miss_passes_over_are_not_forgotten() {
        let pool = full_pool_by_table(2048, 1);
        evict_almost_to_the_mark(&pool);
        let dirty = pool.core.dirty.count();
        drop(pool.allocate(1).unwrap());
        let passed_over = lock(&pool.eviction.passed_over).clone();
        let count = passed_over.len();
        assert!((1..=FEW).contains(&count));
        let mut first = pool.eviction.candidates(1);
        assert_eq!(first, passed_over[count - 1..]);
        lock(&pool.eviction.passed_over).append(&mut first);
        assert_eq!(pool.eviction.evict_batch(count as u64).pages, count as u64);
        assert!(passed_over.iter().all(|page| !pool.is_resident(*page)));
        assert!(lock(&pool.eviction.passed_over).is_empty() && pool.core.dirty.count() < dirty);
    }

    #[test]
    fn a_page_that_is_read_ahead_makes_no_other_page_leave() {
        let pool = full_pool_by_table(2048, 1);
        pool.sync().unwrap();
        evict_almost_to_the_mark(&pool);
        let evictions = pool.stats().evictions;
        let evicted = (0..2048).map(|id| PageRef::new(id, 1)).find(|page| !pool.is_resident(*page));
        pool.prefetch(&[evicted.unwrap()]);
        assert_eq!(pool.stats().evictions, evictions);
        assert!(!background_sleeps(&pool));
    }

    #[test]
    fn misses_leave_pages_on_the_surface_to_the_background_thread() {
        let pool = full_pool_by_table(2048, 4);
        pool.sync().unwrap();
        let free = evict_almost_to_the_mark(&pool);
        drop(pool.allocate(1).unwrap());
        assert!(!background_sleeps(&pool), "it is to release many pages by one call");
        assert_eq!(pool.core.budget.available(), free - 1);
    }

    #[test]
    fn a_thread_that_was_woken_is_not_woken_again_before_it_runs() {
        let options =
            PoolOptions { size: PoolSize::Bytes(16 * 4096), evictors: 0, ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
        let background = &pool.eviction.background;
        background.asleep.store(true, Ordering::Relaxed);
        let pages: Vec<_> = (0..16).map(|_| pool.allocate(1).unwrap()).collect();
        assert!(!background.asleep.load(Ordering::Relaxed), "frames ran short");
        assert!(lock(&background.state).is_wanted);
        lock(&background.state).is_wanted = false;
        pool.eviction.evict_ahead(PageRef::new(0, 1), true);
        assert!(!lock(&background.state).is_wanted, "it is awake already");
        drop(pages);
    }
}
