//! The cache: a fault from top to bottom, eviction, write-back, and the rest of its life.
//!
//! A fault looks the page up. If it is there, the faulting thread pins it, maps it and unpins it.
//! If not, the thread takes a free frame, enters it in the index in the state *filling*, so that
//! other faults of the page wait, reads the page, and publishes it.
//!
//! If no frame is free, the faulting thread evicts a batch: it takes the frames that the policy
//! proposes, unmaps all pages with one shootdown, writes the dirty ones in the order of their
//! places, releases the frames, removes the pages from the index, and only then frees the frames.
//! So:
//!
//! - no frame is used for another page before every processor has forgotten its old one;
//! - a fault of a page that is leaving waits until it is in its file, and then reads it from there;
//! - a page that cannot be written stays in the cache, dirty, and the error reaches the caller.
//!
//! The cache asks an environment whose page tables have dirty bits for stores where that matters:
//! when a page is proposed, after it is unmapped, when no more store can come, and before a
//! write-back.
//!
//! A thread that waits holds no lock on a frame, and a thread that evicts waits for nothing but its
//! own I/O. A faulting thread holds at most pins while it waits for a lock. So no circle of threads
//! waits.
//!
//! Some environments make circles of their own: storage that waits for a fault. Their machines have
//! threads that write, and no fault does (`separate_writers.rs`).

mod separate_writers;

use core::ops::RangeInclusive;

use crate::dirty::DirtySet;
use crate::environment::{Environment, Page};
use crate::frame::{Frame, Frames, Key, Pin, State};
use crate::free_lists::FreeLists;
use crate::index::Index;
use crate::policy::{Evictor, Policy};
use crate::read_ahead::MOST_PAGES;
use crate::statistics::{Count, Counters, Statistics};
use crate::sync::{AtomicU64, Ordering};

pub use separate_writers::{Taken, Tried};

/// The most pages that are evicted or written together, with one shootdown (paper, section 4.1).
const BATCH_PAGES: usize = 512;

/// How often a thread that finds no frame waits before it reports that the cache is full. The
/// threads that have the last frames for a moment only give them back long before.
const PATIENCE: u32 = 1 << 20;

/// How often a thread asks a policy that finds nothing before it takes any page.
const TRUST: u32 = 64;

/// Fills the unused places of arrays.
const NO_PAGE: Page =
    Page { key: Key::new(0, 0).expect("the first key"), frame: Frame::MAX, dirty: false };

/// How a program accesses a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// It loads.
    Read,
    /// It stores.
    Write,
}

/// Why a page cannot be had, or cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error<E> {
    /// Every frame has a page that a caller has pinned.
    Full,
    /// The page is pinned too often already.
    TooManyPins,
    /// The environment could not read, write or map.
    Environment(E),
}

impl<E> From<E> for Error<E> {
    fn from(error: E) -> Self {
        Self::Environment(error)
    }
}

/// A page fault.
#[derive(Debug)]
pub struct Fault<'p, P: ?Sized> {
    /// The page.
    pub key: Key,
    /// What the program was about to do.
    pub access: Access,
    /// Pages after it that should be read and mapped too ([`Plan::ahead`](crate::Plan::ahead)).
    pub ahead: u32,
    /// Pages read ahead earlier that were used ([`Plan::used`](crate::Plan::used)).
    pub used: u32,
    /// Where it happened.
    pub place: &'p P,
}

/// What became of pages that should leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Pages that have left.
    pub pages: u64,
    /// Pages that stay, because they are pinned or could not be written.
    pub stay: u64,
}

/// The memory that a cache needs for its structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    frames: u32,
    processors: usize,
    nodes: usize,
}

impl Layout {
    /// Frames that a cache can have: 4 TiB of pages.
    pub const MOST_FRAMES: u32 = 1 << 30;

    /// For so many frames at most, and so many processors and NUMA nodes. `None` if one of the
    /// numbers is zero or too large.
    pub fn new(frames: u32, processors: usize, nodes: usize) -> Option<Self> {
        let is_sound = (1..=Self::MOST_FRAMES).contains(&frames)
            && (1..=1 << 16).contains(&processors)
            && (1..=1 << 10).contains(&nodes);
        is_sound.then_some(Self { frames, processors, nodes })
    }

    /// Words of memory: about six for each frame.
    pub fn words(&self) -> usize {
        let frames = self.frames as usize;
        5 * frames
            + Index::buckets(self.frames)
            + DirtySet::bit_words(self.frames)
            + FreeLists::processor_words(self.processors)
            + FreeLists::node_words(self.nodes)
            + 2
    }
}

/// A run of pages that the thread has pinned.
struct Run {
    pages: [Page; MOST_PAGES as usize],
    count: usize,
    /// Whether reading has mapped all of them at the place, for reading.
    is_mapped: bool,
}

impl Run {
    fn new() -> Self {
        Self { pages: [NO_PAGE; MOST_PAGES as usize], count: 0, is_mapped: false }
    }

    fn push(&mut self, key: Key, frame: Frame) {
        self.pages[self.count] = Page { key, frame, dirty: false };
        self.count += 1;
    }

    fn pages(&self) -> &[Page] {
        &self.pages[..self.count]
    }
}

/// A cache of file pages.
#[derive(Debug)]
pub struct Cache<'a, E, P> {
    frames: Frames<'a>,
    index: Index<'a>,
    free: FreeLists<'a>,
    dirty: DirtySet<'a>,
    /// Frames that may be used.
    size: &'a AtomicU64,
    counters: &'a [Counters],
    policy: P,
    environment: E,
}

impl<'a, E: Environment, P: Policy> Cache<'a, E, P> {
    /// A cache in the given memory, of which at first `size` frames are used: at least one, and at
    /// most those of the layout.
    ///
    /// # Panics
    /// If there are fewer words than the layout needs, a word is not zero, or there is no counter.
    pub fn new(
        layout: Layout,
        words: &'a [AtomicU64],
        counters: &'a [Counters],
        policy: P,
        environment: E,
        size: u32,
    ) -> Self {
        let words = &words[..layout.words()];
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0), "memory that was used");
        assert!(!counters.is_empty(), "no counters");
        let frames = layout.frames as usize;
        let (states, rest) = words.split_at(frames);
        let (keys, rest) = rest.split_at(frames);
        let (index_links, rest) = rest.split_at(frames);
        let (free_links, rest) = rest.split_at(frames);
        let (sorted, rest) = rest.split_at(frames);
        let (buckets, rest) = rest.split_at(Index::buckets(layout.frames));
        let (bits, rest) = rest.split_at(DirtySet::bit_words(layout.frames));
        let (processors, rest) = rest.split_at(FreeLists::processor_words(layout.processors));
        let (nodes, rest) = rest.split_at(FreeLists::node_words(layout.nodes));
        let frames = Frames::new(states, keys);
        let cache = Self {
            index: Index::new(buckets, index_links, frames.keys()),
            free: FreeLists::new(processors, nodes, free_links),
            dirty: DirtySet::new(bits, sorted, &rest[0], frames.keys()),
            frames,
            size: &rest[1],
            counters,
            policy,
            environment,
        };
        let size = size.clamp(1, layout.frames);
        (size..layout.frames).for_each(|frame| cache.free.retire(frame));
        (0..size).rev().for_each(|frame| cache.free.put(frame, 0, 0));
        cache.size.store(size.into(), Ordering::Release);
        cache
    }

    /// The environment.
    pub fn environment(&self) -> &E {
        &self.environment
    }

    /// The policy.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// Frames that the cache may use now.
    pub fn size(&self) -> u32 {
        self.size.load(Ordering::Acquire) as u32
    }

    /// Frames that it can ever use.
    pub fn capacity(&self) -> u32 {
        self.frames.count()
    }

    /// What it has done.
    pub fn statistics(&self) -> Statistics {
        Statistics::of(self.counters, self.dirty.count(), self.size())
    }

    fn count(&self, count: Count, events: u64) {
        self.own_counters().add(count, events);
    }

    /// The counters of the thread's processor.
    #[inline]
    fn own_counters(&self) -> &Counters {
        &self.counters[self.environment.processor() % self.counters.len()]
    }

    // A fault.

    /// Makes a page accessible. Returns how many pages it mapped, which is at least that one.
    ///
    /// # Errors
    /// [`Error::Full`]; what the environment said.
    pub fn fault(&self, fault: &Fault<'_, E::Mapping>) -> Result<u32, Error<E::Error>> {
        let counters = self.own_counters();
        counters.add(Count::Faults, 1);
        if fault.used > 0 {
            counters.add(Count::ReadAheadHits, fault.used.into());
        }
        let present = if fault.ahead == 0 { self.pin_present(fault.key, counters) } else { None };
        let Some(page) = present else { return self.fault_run(fault) };
        let mapped = match fault.access {
            Access::Read => self.environment.map(&[page], fault.place, false),
            Access::Write => self.map_for_writing(page, fault.place),
        };
        self.frames.unpin(page.frame);
        mapped.map(|()| 1).map_err(Error::Environment)
    }

    /// A fault of a page that has to be read, or that others follow. Apart from the above, because
    /// making a run takes longer than a fault of one page that is there.
    #[inline(never)]
    fn fault_run(&self, fault: &Fault<'_, E::Mapping>) -> Result<u32, Error<E::Error>> {
        let mut run = Run::new();
        // A page that will be written is mapped once, for writing.
        let place = (fault.access == Access::Read).then_some(fault.place);
        self.pin_run(fault.key, fault.ahead, place, &mut run)?;
        let mapped = match fault.access {
            Access::Read => self.map_for_reading(&run, fault.place),
            Access::Write => {
                let (first, rest) = run.pages().split_at(1);
                self.map_for_writing(first[0], fault.place).inspect(|()| {
                    if !rest.is_empty() {
                        // The access needs none of these: they are mapped by their own faults.
                        let _ = self.environment.map(rest, fault.place, false);
                    }
                })
            }
        };
        self.unpin_run(&run);
        mapped.map(|()| run.count as u32).map_err(Error::Environment)
    }

    fn map_for_reading(&self, run: &Run, place: &E::Mapping) -> Result<(), E::Error> {
        if run.is_mapped { Ok(()) } else { self.environment.map(run.pages(), place, false) }
    }

    /// Marks a pinned page dirty, and maps it for writing. The lock keeps write-back from taking
    /// the write access away between the two.
    fn map_for_writing(&self, page: Page, place: &E::Mapping) -> Result<(), E::Error> {
        self.lock(page.frame);
        self.mark_dirty(page.frame);
        let mapped = self.environment.map(&[page], place, true);
        self.frames.unlock(page.frame);
        mapped
    }

    /// Locks a frame that the thread has pinned.
    fn lock(&self, frame: Frame) {
        let mut attempt = 0;
        while self.frames.try_lock(frame).is_err() {
            self.environment.wait(attempt);
            attempt += 1;
        }
    }

    fn mark_dirty(&self, frame: Frame) {
        if self.frames.set_dirty(frame) {
            self.dirty.insert(frame);
        }
    }

    /// Pins a page, and as many as possible of the `ahead` pages after it. Reads them if the first
    /// one is not in the cache, and may map them at a place then; otherwise takes those that are.
    fn pin_run(
        &self,
        key: Key,
        ahead: u32,
        place: Option<&E::Mapping>,
        run: &mut Run,
    ) -> Result<(), Error<E::Error>> {
        let ahead = ahead.min(MOST_PAGES - 1);
        let mut attempt = 0;
        loop {
            match self.index.find(key) {
                None => {
                    let frame = self.take_frame()?;
                    if self.fill(frame, key, ahead, place, run)? {
                        return Ok(());
                    }
                }
                Some(frame) => match self.frames.pin(frame, key) {
                    Pin::Pinned => {
                        self.note_hit(frame, self.own_counters());
                        run.push(key, frame);
                        self.pin_neighbours(key, ahead, run);
                        return Ok(());
                    }
                    Pin::Gone => {}
                    Pin::Busy => {
                        self.environment.wait(attempt);
                        attempt += 1;
                    }
                },
            }
        }
    }

    /// Pins a page, if it is in the cache and nothing has to be waited for.
    fn pin_present(&self, key: Key, counters: &Counters) -> Option<Page> {
        let frame = self.index.find(key)?;
        let is_pinned = self.frames.pin(frame, key) == Pin::Pinned;
        is_pinned.then(|| {
            self.note_hit(frame, counters);
            Page { key, frame, dirty: false }
        })
    }

    fn note_hit(&self, frame: Frame, counters: &Counters) {
        counters.add(Count::Hits, 1);
        self.frames.reference(frame);
        self.policy.touch(frame);
    }

    /// Pins the pages after the first one, as long as they are in the cache.
    fn pin_neighbours(&self, key: Key, ahead: u32, run: &mut Run) {
        for step in 1..=u64::from(ahead) {
            let Some(key) = key.after(step) else { return };
            let Some(frame) = self.index.find(key) else { return };
            if self.frames.pin(frame, key) != Pin::Pinned {
                return;
            }
            run.push(key, frame);
        }
    }

    fn unpin_run(&self, run: &Run) {
        run.pages().iter().for_each(|page| self.frames.unpin(page.frame));
    }

    /// Reads a page that is not in the cache into a free frame, and pages after it, as far as
    /// frames are free for them. Returns false if another thread was first.
    fn fill(
        &self,
        frame: Frame,
        key: Key,
        ahead: u32,
        place: Option<&E::Mapping>,
        run: &mut Run,
    ) -> Result<bool, Error<E::Error>> {
        if !self.enter(key, frame) {
            return Ok(false);
        }
        run.push(key, frame);
        for step in 1..=u64::from(ahead) {
            let Some(key) = key.after(step).filter(|key| self.index.find(*key).is_none()) else {
                break;
            };
            let Some(frame) = self.free.take(self.environment.processor(), self.environment.node())
            else {
                break;
            };
            if !self.enter(key, frame) {
                break;
            }
            run.push(key, frame);
        }
        let mut result = self.environment.read(run.pages(), place);
        if result.is_err() && run.count > 1 {
            // The page that was asked for may be readable although another one is not.
            run.pages()[1..].iter().for_each(|page| self.abandon(*page));
            run.count = 1;
            result = self.environment.read(run.pages(), place);
        }
        match result {
            Ok(is_mapped) => run.is_mapped = is_mapped,
            Err(error) => {
                self.abandon(run.pages()[0]);
                run.count = 0;
                return Err(Error::Environment(error));
            }
        }
        for page in run.pages() {
            self.frames.publish(page.frame);
            self.policy.admit(page.frame, page.key);
        }
        self.count(Count::Misses, 1);
        self.count(Count::ReadAhead, run.count as u64 - 1);
        Ok(true)
    }

    /// Enters a free frame in the index, to be filled by this thread; or gives it back, if another
    /// thread was first.
    fn enter(&self, key: Key, frame: Frame) -> bool {
        self.frames.claim(frame, key);
        let is_first = self.index.insert(key, frame).is_ok();
        if !is_first {
            self.give_back(frame);
        }
        is_first
    }

    /// Gives up a page that could not be read.
    fn abandon(&self, page: Page) {
        self.environment.release(&[page]);
        self.index.remove(page.key, page.frame);
        self.give_back(page.frame);
    }

    fn give_back(&self, frame: Frame) {
        self.frames.free(frame);
        self.free.put(frame, self.environment.processor(), self.environment.node());
    }

    // Eviction.

    /// Takes a frame that is free, or evicts pages until one is.
    fn take_frame(&self) -> Result<Frame, Error<E::Error>> {
        let writes_apart = self.environment.writes_apart();
        let mut refused = if writes_apart { Refused::Dirty } else { Refused::None };
        let (mut failed, mut asked) = (None, 0);
        for attempt in 0..PATIENCE {
            if let Some(frame) =
                self.free.take(self.environment.processor(), self.environment.node())
            {
                return Ok(frame);
            }
            // After a failed write the file's dirty pages are left alone; after another one all.
            let any = attempt % TRUST == TRUST - 1;
            match self.evict_batch(refused, any) {
                (0, None) if writes_apart => {
                    failed = self.environment.ask_to_write(&mut asked).err();
                }
                (0, None) => {}
                (0, Some((error, file))) => {
                    failed = Some(error);
                    refused = match refused {
                        Refused::None => Refused::DirtyOf(file),
                        _ => Refused::Dirty,
                    };
                    continue;
                }
                _ => continue,
            }
            match failed {
                // The error is the caller's if only waiting for that storage is left.
                Some(error) if !self.may_become_free(|frame| self.may_leave(frame, refused)) => {
                    return Err(Error::Environment(error));
                }
                None if !self.may_become_free(|frame| !self.frames.word(frame).is_held()) => break,
                _ => {}
            }
            self.environment.wait(attempt);
        }
        Err(Error::Full)
    }

    /// Whether there are frames among those that may be used that a thread may get if it waits. The
    /// pins of threads in the middle of a fault do not count: they end.
    fn may_become_free(&self, may: impl Fn(Frame) -> bool) -> bool {
        let stays = |frame: &Frame| !may(*frame);
        (0..self.frames.count()).filter(stays).count() < self.size() as usize
    }

    /// Whether a frame may be had although some dirty pages are refused, now or soon.
    fn may_leave(&self, frame: Frame, refused: Refused) -> bool {
        let word = self.frames.word(frame);
        let is_writable = !word.is_dirty() || !self.is_refused(frame, refused);
        word.state() != State::Resident || (!word.is_held() && (word.is_locked() || is_writable))
    }

    /// Whether the page of a frame may not leave if it is dirty.
    fn is_refused(&self, frame: Frame, refused: Refused) -> bool {
        match refused {
            Refused::None => false,
            Refused::DirtyOf(file) => self.frames.key(frame).is_some_and(|key| key.file() == file),
            Refused::Dirty => true,
        }
    }

    /// Evicts pages that the policy proposes, or `any` pages. Returns how many have left, and the
    /// first error with its file.
    fn evict_batch(&self, refused: Refused, any: bool) -> (u64, Option<(E::Error, u32)>) {
        let most = (self.size() as usize / 8).clamp(1, BATCH_PAGES);
        let mut batch =
            EvictionBatch { cache: self, refused, pages: [NO_PAGE; BATCH_PAGES], count: 0, most };
        if any {
            (0..self.frames.count()).for_each(|frame| _ = batch.take(frame));
        } else {
            self.policy.propose(&mut batch);
        }
        let count = core::mem::take(&mut batch.count);
        self.evict(&mut batch.pages[..count], false)
    }

    /// Evicts pages whose frames are in the state evicting. Returns how many have left, and the
    /// first error with its file; pages that could not be written stay. With `discard` none is
    /// written.
    fn evict(&self, pages: &mut [Page], discard: bool) -> (u64, Option<(E::Error, u32)>) {
        if pages.is_empty() {
            return (0, None);
        }
        pages.sort_unstable_by_key(|page| page.key);
        self.environment.unmap(pages);
        self.count(Count::Shootdowns, 1);
        pages.iter_mut().for_each(|page| self.learn_stores(page));
        let mut first_error = None;
        for run in pages.chunk_by_mut(|one, next| one.dirty == next.dirty && follows(one, next)) {
            if !run[0].dirty {
                continue;
            }
            if discard {
                self.mark_clean(run);
            }
            match if discard { Ok(()) } else { self.write(run) } {
                Ok(()) => run.iter_mut().for_each(|page| page.dirty = false),
                Err(error) => first_error = first_error.or(Some((error, run[0].key.file()))),
            }
        }
        let mut gone = 0;
        for at in 0..pages.len() {
            if pages[at].dirty {
                self.frames.keep(pages[at].frame);
            } else {
                pages.swap(gone, at);
                gone += 1;
            }
        }
        let gone = &pages[..gone];
        self.environment.release(gone);
        for page in gone {
            self.index.remove(page.key, page.frame);
            self.policy.remove(page.frame, page.key);
            self.give_back(page.frame);
        }
        self.count(Count::Evictions, gone.len() as u64);
        (gone.len() as u64, first_error)
    }

    /// Writes a run whose frames this thread has locked or evicts. Afterwards the pages are clean,
    /// or as dirty as before.
    fn write(&self, run: &[Page]) -> Result<(), E::Error> {
        self.count(Count::Writes, 1);
        if let Err(error) = self.environment.write(run) {
            self.count(Count::WriteErrors, 1);
            return Err(error);
        }
        self.mark_clean(run);
        self.count(Count::WrittenBack, run.len() as u64);
        Ok(())
    }

    /// The caller has locked the frames, or evicts them.
    fn mark_clean(&self, pages: &[Page]) {
        for page in pages {
            self.dirty.remove(page.frame);
            self.frames.clear_dirty(page.frame);
        }
    }

    /// Asks the environment for stores to a page that no fault has told of. The caller has locked
    /// the frame, or evicts it.
    fn learn_stores(&self, page: &mut Page) {
        if !page.dirty && self.environment.was_stored_to(*page) {
            self.mark_dirty(page.frame);
            page.dirty = true;
        }
    }

    /// The same for all pages of a range. Covers every store that happened before the call.
    fn learn_all_stores(&self, range: &RangeInclusive<Key>) {
        if !self.environment.tells_stores() {
            return;
        }
        self.for_each_in(range, |key, frame| {
            let mut attempt = 0;
            let dirty = loop {
                match self.frames.try_lock(frame) {
                    Ok(word) => break word.is_dirty(),
                    // No thread has stored to a page that is not there yet.
                    Err(word) if matches!(word.state(), State::Free | State::Filling) => return,
                    // A page that leaves may stay, if it cannot be written.
                    Err(_) => self.environment.wait(attempt),
                }
                attempt += 1;
            };
            if self.frames.key(frame) == Some(key) {
                self.learn_stores(&mut Page { key, frame, dirty });
            }
            self.frames.unlock(frame);
        });
    }

    /// Evicts the pages of a range that no caller has pinned. With `discard`, changes that are not
    /// yet written are lost.
    ///
    /// # Errors
    /// The first error of a write. All pages were tried; those that failed stay.
    pub fn evict_range(
        &self,
        range: RangeInclusive<Key>,
        discard: bool,
    ) -> (Evicted, Result<(), E::Error>) {
        if !discard && self.environment.writes_apart() {
            return self.write_and_evict(range);
        }
        let (evicted, _, result) = self.evict_once(&range, discard, false);
        (evicted, result)
    }

    /// Evicts the pages of a range that no caller has pinned, or the `clean` ones of them. Returns
    /// also how many pages stay because they are dirty.
    fn evict_once(
        &self,
        range: &RangeInclusive<Key>,
        discard: bool,
        clean: bool,
    ) -> (Evicted, u64, Result<(), E::Error>) {
        let mut pages = [NO_PAGE; BATCH_PAGES];
        let (mut count, mut evicted, mut dirty, mut result) = (0, Evicted::default(), 0, Ok(()));
        let mut flush = |pages: &mut [Page], evicted: &mut Evicted| {
            let (gone, error) = self.evict(pages, discard);
            evicted.pages += gone;
            evicted.stay += pages.len() as u64 - gone;
            if let (Some((error, _)), Ok(())) = (error, result) {
                result = Err(error);
            }
        };
        self.for_each_in(range, |key, frame| {
            let mut attempt = 0;
            loop {
                match self.begin_eviction(key, frame, clean) {
                    Departure::Gone => return,
                    Departure::Stays => return evicted.stay += 1,
                    Departure::Dirty => return dirty += 1,
                    Departure::Leaves(page) => {
                        pages[count] = page;
                        count += 1;
                    }
                    // A thread that waits has no frames: so those that it has leave first.
                    Departure::Busy => {
                        flush(&mut pages[..count], &mut evicted);
                        count = 0;
                        self.environment.wait(attempt);
                        attempt += 1;
                        continue;
                    }
                }
                if count == BATCH_PAGES {
                    flush(&mut pages, &mut evicted);
                    count = 0;
                }
                return;
            }
        });
        flush(&mut pages[..count], &mut evicted);
        (evicted, dirty, result)
    }

    /// Calls a function for each page of a range in the cache, and its frame; perhaps for pages
    /// that have just left, too.
    fn for_each_in(&self, range: &RangeInclusive<Key>, mut f: impl FnMut(Key, Frame)) {
        let span = range.end().word().saturating_sub(range.start().word());
        if span < self.frames.count().into() {
            for step in 0..=span {
                let key = Key::of_word(range.start().word() + step);
                if let Some((key, frame)) = key.and_then(|key| Some((key, self.index.find(key)?))) {
                    f(key, frame);
                }
            }
            return;
        }
        for frame in 0..self.frames.count() {
            if let Some(key) = self.frames.key(frame).filter(|key| range.contains(key)) {
                f(key, frame);
            }
        }
    }

    /// Takes a page's frame for eviction, if nothing is in the way; a `clean` page's only, if that
    /// is asked for.
    fn begin_eviction(&self, key: Key, frame: Frame, clean: bool) -> Departure {
        if let Err(word) = self.frames.try_evict(frame, clean) {
            if word.state() == State::Free || self.frames.key(frame) != Some(key) {
                return Departure::Gone;
            }
            let is_dirty = clean && word.state() == State::Resident && word.is_dirty();
            return match word.is_held() {
                true => Departure::Stays,
                false if is_dirty => Departure::Dirty,
                false => Departure::Busy,
            };
        }
        if self.frames.key(frame) != Some(key) {
            self.frames.keep(frame);
            return Departure::Gone;
        }
        let dirty = self.frames.word(frame).is_dirty();
        Departure::Leaves(Page { key, frame, dirty })
    }

    // Write-back.

    /// Writes the dirty pages of a range back, in the order of their places. Covers every store
    /// that happened before the call.
    ///
    /// # Errors
    /// The first error of a write. All pages were tried; those that failed are still dirty.
    pub fn write_back(&self, range: RangeInclusive<Key>) -> Result<u64, E::Error> {
        self.learn_all_stores(&range);
        let mut attempt = 0;
        let sorted = loop {
            match self.dirty.try_sort(&range) {
                Some(sorted) => break sorted,
                None => self.environment.wait(attempt),
            }
            attempt += 1;
        };
        let (mut position, mut written, mut result) = (0, 0, Ok(()));
        let mut pages = [NO_PAGE; BATCH_PAGES];
        while sorted.get(position).is_some() {
            let (mut count, mut attempt) = (0, 0);
            while let Some(key) = sorted.get(position).filter(|_| count < BATCH_PAGES) {
                match self.try_lock_dirty(key) {
                    Lock::Clean => {}
                    Lock::Locked(page) => {
                        pages[count] = page;
                        count += 1;
                    }
                    // A thread that waits holds no locks: so the ones it has are written first.
                    Lock::Busy if count > 0 => break,
                    Lock::Busy => {
                        self.environment.wait(attempt);
                        attempt += 1;
                        continue;
                    }
                }
                position += 1;
            }
            let (done, error) = self.write_locked(&mut pages[..count]);
            written += done;
            if let (Some(error), Ok(())) = (error, result) {
                result = Err(error);
            }
        }
        result.map(|()| written)
    }

    /// Locks a page, if it is dirty.
    fn try_lock_dirty(&self, key: Key) -> Lock {
        // A page that is being evicted is in the index until it is written.
        let Some(frame) = self.index.find(key) else {
            return Lock::Clean;
        };
        match self.frames.try_lock(frame) {
            Err(word) if matches!(word.state(), State::Free | State::Filling) => Lock::Clean,
            Err(_) => Lock::Busy,
            Ok(word) if self.frames.key(frame) == Some(key) && word.is_dirty() => {
                // Pages with pins for writing may change at any time, and are never clean.
                Lock::Locked(Page { key, frame, dirty: !word.is_held_for_writing() })
            }
            Ok(word) => {
                let is_another = self.frames.key(frame) != Some(key);
                self.frames.unlock(frame);
                debug_assert!(is_another || !word.is_dirty());
                if is_another { Lock::Busy } else { Lock::Clean }
            }
        }
    }

    /// Writes locked pages, and unlocks them. Of those with `dirty` the write access ends first,
    /// and they are clean afterwards; the others have pins for writing. Returns how many were
    /// written, and the first error.
    fn write_locked(&self, pages: &mut [Page]) -> (u64, Option<E::Error>) {
        if pages.is_empty() {
            return (0, None);
        }
        pages.sort_unstable_by_key(|page| (!page.dirty, page.key));
        let (ordinary, pinned) = pages.split_at(pages.partition_point(|page| page.dirty));
        if !ordinary.is_empty() {
            self.environment.protect(ordinary);
            self.count(Count::Shootdowns, 1);
        }
        let (mut written, mut first_error) = (0, None);
        let unlock = |run: &[Page]| run.iter().for_each(|page| self.frames.unlock(page.frame));
        for run in ordinary.chunk_by(follows) {
            match self.write(run) {
                Ok(()) => written += run.len() as u64,
                Err(error) => first_error = first_error.or(Some(error)),
            }
            // The next write may take long: these pages may be stored to, or leave, before it ends.
            unlock(run);
        }
        for run in pinned.chunk_by(follows) {
            self.count(Count::Writes, 1);
            match self.environment.write(run) {
                Ok(()) => written += run.len() as u64,
                Err(error) => first_error = first_error.or(Some(error)),
            }
            unlock(run);
        }
        (written, first_error)
    }

    // Pins, copies, sizes.

    /// Keeps a page in the cache until [`unpin`](Self::unpin), and maps it. With [`Access::Write`]
    /// the page stays mapped for writing, and counts as dirty all the time.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::TooManyPins`]; what the environment said.
    pub fn pin(
        &self,
        key: Key,
        access: Access,
        place: &E::Mapping,
    ) -> Result<Frame, Error<E::Error>> {
        let mut run = Run::new();
        self.pin_run(key, 0, None, &mut run)?;
        let page = run.pages()[0];
        let for_writing = access == Access::Write;
        if for_writing {
            // Write-back looks at the holds while it has the lock.
            self.lock(page.frame);
            self.mark_dirty(page.frame);
        }
        let result = match self.frames.hold(page.frame, for_writing) {
            false => Err(Error::TooManyPins),
            true => self.environment.map(&[page], place, for_writing).map_err(|error| {
                self.frames.end_hold(page.frame, for_writing);
                Error::Environment(error)
            }),
        };
        if for_writing {
            self.frames.unlock(page.frame);
        }
        match result {
            Ok(()) => Ok(page.frame),
            Err(error) => {
                self.frames.unpin(page.frame);
                Err(error)
            }
        }
    }

    /// Ends a pin, with the same access.
    pub fn unpin(&self, frame: Frame, access: Access) {
        self.frames.end_hold(frame, access == Access::Write);
        self.frames.unpin(frame);
    }

    /// Ends all pins of the pages of a range. The caller knows that no thread uses or ends
    /// them any more: they were forgotten.
    pub fn end_pins(&self, range: RangeInclusive<Key>) {
        self.for_each_in(&range, |key, frame| self.frames.end_holds(frame, key));
    }

    /// Calls a function with a page in the cache. With [`Access::Write`] the function may change
    /// the frame: the page is dirty, and no thread writes it back meanwhile.
    ///
    /// # Errors
    /// [`Error::Full`]; what the environment said.
    pub fn with_page<T>(
        &self,
        key: Key,
        ahead: u32,
        access: Access,
        f: impl FnOnce(Page) -> T,
    ) -> Result<T, Error<E::Error>> {
        let mut run = Run::new();
        self.pin_run(key, ahead, None, &mut run)?;
        let page = run.pages()[0];
        let result = match access {
            Access::Read => f(page),
            Access::Write => {
                self.lock(page.frame);
                self.mark_dirty(page.frame);
                let result = f(page);
                self.frames.unlock(page.frame);
                result
            }
        };
        self.unpin_run(&run);
        Ok(result)
    }

    /// Whether a page is in the cache, or comes or goes. A thread that brings one in makes it so
    /// before it has the environment read it.
    pub fn has(&self, key: Key) -> bool {
        self.index.find(key).is_some()
    }

    /// Reads and maps a page and as many as possible of the `ahead` pages after it, for reading.
    /// Returns how many it mapped, which is at least one.
    ///
    /// # Errors
    /// [`Error::Full`]; what the environment said.
    pub fn populate(
        &self,
        key: Key,
        ahead: u32,
        place: &E::Mapping,
    ) -> Result<u32, Error<E::Error>> {
        let mut run = Run::new();
        self.pin_run(key, ahead, Some(place), &mut run)?;
        let mapped = self.map_for_reading(&run, place);
        self.unpin_run(&run);
        mapped.map(|()| run.count as u32).map_err(Error::Environment)
    }

    /// Changes how many frames the cache may use, between one and its capacity. Evicts pages to
    /// become smaller.
    ///
    /// # Errors
    /// [`Error::Full`] if too many pages are pinned, what the environment said of a write: then the
    /// cache is as small as it could be made.
    pub fn resize(&self, frames: u32) -> Result<(), Error<E::Error>> {
        let target = u64::from(frames.clamp(1, self.capacity()));
        loop {
            let size = self.size.load(Ordering::Acquire);
            if size < target {
                // Another thread may be about to retire the frame that is counted already.
                let Some(frame) = self.free.take_retired() else {
                    self.environment.wait(0);
                    continue;
                };
                self.size.fetch_add(1, Ordering::AcqRel);
                self.free.put(frame, self.environment.processor(), self.environment.node());
            } else if size > target {
                let frame = self.take_frame()?;
                if self.shrink_from(size) {
                    self.free.retire(frame);
                } else {
                    self.free.put(frame, self.environment.processor(), self.environment.node());
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Counts one frame less, if the size is still the same.
    fn shrink_from(&self, size: u64) -> bool {
        self.size.compare_exchange(size, size - 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Whether a page follows another one in its file.
fn follows(one: &Page, next: &Page) -> bool {
    one.key.after(1) == Some(next.key)
}

/// The result of an attempt to take a page's frame for eviction.
enum Departure {
    /// The frame is the thread's.
    Leaves(Page),
    /// A caller has pinned the page.
    Stays,
    /// The page would have to be clean, and is dirty.
    Dirty,
    /// Another thread has the frame for a moment.
    Busy,
    /// The frame has another page by now, or none.
    Gone,
}

/// The result of an attempt to lock a dirty page.
enum Lock {
    /// The frame is locked.
    Locked(Page),
    /// There is nothing to write.
    Clean,
    /// Another thread has the frame for a moment.
    Busy,
}

/// Pages that a thread leaves alone after a write that failed.
#[derive(Clone, Copy)]
enum Refused {
    None,
    /// Dirty pages of a file.
    DirtyOf(u32),
    /// All dirty pages.
    Dirty,
}

/// A batch of pages that leave, as the policy proposes them.
struct EvictionBatch<'c, 'a, E, P> {
    cache: &'c Cache<'a, E, P>,
    /// Pages that may not leave.
    refused: Refused,
    pages: [Page; BATCH_PAGES],
    count: usize,
    most: usize,
}

/// A policy that panics leaves pages in the batch: they stay in the cache.
impl<E, P> Drop for EvictionBatch<'_, '_, E, P> {
    fn drop(&mut self) {
        self.pages[..self.count].iter().for_each(|page| self.cache.frames.keep(page.frame));
    }
}

impl<E: Environment, P: Policy> Evictor for EvictionBatch<'_, '_, E, P> {
    fn wants_more(&self) -> bool {
        self.count < self.most
    }

    fn was_referenced(&mut self, frame: Frame) -> bool {
        let frames = &self.cache.frames;
        if frame >= frames.count() {
            return false;
        }
        let by_fault = frames.take_reference(frame);
        let key = frames.key(frame).filter(|_| frames.word(frame).state() == State::Resident);
        let by_machine = key.is_some_and(|key| {
            self.cache.environment.was_accessed(Page { key, frame, dirty: false })
        });
        by_fault || by_machine
    }

    fn take(&mut self, frame: Frame) -> bool {
        if self.count == self.most || frame >= self.cache.frames.count() {
            return false;
        }
        let Ok(key) =
            self.cache.frames.try_evict(frame, self.cache.is_refused(frame, self.refused))
        else {
            return false;
        };
        let dirty = self.cache.frames.word(frame).is_dirty();
        let mut page = Page { key, frame, dirty };
        self.cache.learn_stores(&mut page);
        if page.dirty && self.cache.is_refused(frame, self.refused) {
            self.cache.frames.keep(frame);
            return false;
        }
        self.pages[self.count] = page;
        self.count += 1;
        true
    }
}
