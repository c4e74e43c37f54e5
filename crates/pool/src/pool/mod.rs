//! The buffer manager: [`Pool`].

mod allocation;
pub mod copies;
pub mod fix;
pub mod fix_async;
pub(crate) mod load;
pub mod options;
mod resize;
mod waiting_places;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use vellum_vm::{BackendChoice, BackendKind, PageRange, Residency, Surface, SurfaceError};

use crate::core::{Core, Wanted};
use crate::device::{Device, DeviceInfo};
use crate::error::PoolError;
use crate::eviction::Eviction;
use crate::eviction::write_back::{HeldPages, Writer, batch_of};
use crate::huge::{HugeChunks, HugePages, collapser};
use crate::page::dirty_pages::DirtyPages;
use crate::page::format::PageFormat;
use crate::page::state::{PageState, SHARED_HOLDERS_MAX, State, Word};
use crate::page::states::{StatePlace, States};
use crate::page::{PageId, PageRef};
use crate::pool::options::{CountedBytes, PoolOptions, PoolSize, Translation};
use crate::pool::waiting_places::WaitingPlaces;
use crate::slots::{Slots, UseSlots};
use crate::space::Space;
use crate::sync::{Mutex, lock, thread};

/// A buffer manager that lets the MMU translate page identifiers (vmcache; SIGMOD'23, section 3),
/// and a table of state words once the file has outgrown the pool ([`Translation`]).
///
/// Every page of the file has its place on a surface of virtual memory. The pool decides which
/// pages are in memory. Any thread may call any method.
#[derive(Debug)]
pub struct Pool {
    pub(crate) eviction: Arc<Eviction>,
    background: Vec<thread::JoinHandle<()>>,
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) space: Mutex<Space>,
    pub(crate) deferred: Mutex<Vec<PageRef>>,
    /// Freed places that may be allocated again when the log is durable up to the number. Locked
    /// after `deferred` and before `space`.
    pub(crate) waiting: Mutex<WaitingPlaces>,
    pub(crate) file_pages: AtomicU64,
    pub(crate) growing: Mutex<()>,
    /// Allocations prefer places below this page; 0 for no preference.
    pub(crate) preferred_end: AtomicU64,
    read_only: bool,
    /// The most frames that the pool can have.
    max_frames: u64,
    /// The pages that are written and evicted together, at most, whatever the size of the pool.
    batch_max: usize,
    /// Locked while the size of the pool changes.
    counted: Mutex<CountedBytes>,
}

impl Pool {
    /// Opens a pool over a device. `format` seals and checks the pages, `space` says which pages
    /// are allocated.
    ///
    /// # Errors
    /// A pool below [`PoolOptions::MIN_FRAMES`] or beyond the memory of the process, a device that
    /// does not tell its length, or no address space.
    pub fn open(
        device: Arc<dyn Device>,
        format: Arc<dyn PageFormat>,
        space: Space,
        options: PoolOptions,
    ) -> Result<Pool, PoolError> {
        let frames = options.size.frames()?;
        if frames < PoolOptions::MIN_FRAMES {
            return Err(PoolError::PoolTooSmall { frames, min: PoolOptions::MIN_FRAMES });
        }
        let max_frames = options.max_frames(frames);
        let file_pages = device.pages().map_err(PoolError::Resize)?;
        let pages = file_pages.max(space.end()).max(1);
        let policy = options.policy.unwrap_or_else(|| options.replacement.policy(max_frames));
        let batch_max = options.eviction_batch;
        let with_batch = frames + batch_of(batch_max, frames) as u64;
        let use_slots = options.translation.use_slots(options.backend, options.states)?;
        let surface = match (options.size, options.backend) {
            // The caller has not asked for a backend that takes its memory at once.
            (PoolSize::Auto, BackendChoice::Auto) => Surface::reserve(pages, options.backend)?,
            // Most pages are in slots.
            (_, BackendChoice::Auto) if use_slots == Some(UseSlots::Always) => {
                Surface::reserve(pages, options.backend)?
            }
            // One batch more, as the contract allows, because releases return frames late.
            _ => Surface::reserve_with_frames(pages, with_batch, options.backend)?,
        };
        let use_slots = use_slots.filter(|_| surface.backend() != BackendKind::Exmap);
        let huge = options.huge_pages == HugePages::Auto && max_frames >= HugeChunks::MIN_FRAMES;
        let sizes = (frames, max_frames);
        let new_slots = |when| {
            let slots = Slots::new(options.slot_frames, sizes, when, huge, &*device)?;
            slots.grow_record(pages)?;
            Ok::<_, PoolError>(slots)
        };
        let slots = match use_slots.map(new_slots).transpose() {
            Err(error) if use_slots == Some(UseSlots::WhenOutgrown) => {
                tracing::warn!("the pool finds pages by the MMU alone: {error}");
                None
            }
            slots => slots?,
        };
        let states = States::new(options.states, &surface, with_batch, pages)?;
        let dirty = DirtyPages::new(pages)?;
        let core = Core::new(surface, states, dirty, frames, policy, format)
            .with_slots(slots)
            .with_huge_pages(options.huge_pages, max_frames, options.evictors);
        core.note_file_pages(pages);
        let core = Arc::new(core);
        let eviction = Arc::new(Eviction::new(
            core.clone(),
            device.clone(),
            Writer::new(batch_of(batch_max, max_frames), frames),
            options.evictors,
            options.patience.max(1),
        ));
        let mut pool = Pool {
            eviction,
            background: Vec::new(),
            core,
            device,
            space: Mutex::new(space),
            deferred: Mutex::new(Vec::new()),
            waiting: Mutex::default(),
            file_pages: AtomicU64::new(file_pages),
            growing: Mutex::new(()),
            preferred_end: AtomicU64::new(0),
            read_only: options.read_only,
            max_frames,
            batch_max,
            counted: Mutex::new(CountedBytes::of_frames(frames)),
        };
        for _ in 0..options.evictors {
            // If a thread does not start, dropping the pool ends the earlier ones.
            pool.background.push(spawn_evictor(&pool.eviction).map_err(PoolError::Thread)?);
        }
        pool.background.extend(collapser::spawn(&pool.core).map_err(PoolError::Thread)?);
        Ok(pool)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Refuses changes on a read-only or poisoned pool.
    pub fn check_writable(&self) -> Result<(), PoolError> {
        if self.read_only {
            return Err(PoolError::ReadOnly);
        }
        self.core.check_poison()
    }

    /// Writes every dirty page and makes the file durable.
    ///
    /// # Errors
    /// As [`write_dirty`](Pool::write_dirty); and a failed sync poisons the pool.
    pub fn sync(&self) -> Result<(), PoolError> {
        self.write_dirty()?;
        self.sync_device()
    }

    /// Makes durable what the pool has written. Writes no page, but waits for writes under way: an
    /// evictor may be writing a page a second time, and a failure spoils what the first write put
    /// into the file.
    ///
    /// # Errors
    /// A failed sync, which poisons the pool, or an earlier failure that did.
    pub fn sync_device(&self) -> Result<(), PoolError> {
        self.wait_for_writes();
        self.core.check_poison()?;
        self.device.sync().map_err(|error| {
            let error = PoolError::Sync(error);
            self.core.poison(&error);
            error
        })
    }

    /// Writes every dirty page, in the order of the file. Does not make them durable. Looks at no
    /// clean page.
    ///
    /// Covers all changes whose exclusive guards were dropped before the call. Waits for pages
    /// that are held exclusively: a thread that holds one must not call this.
    ///
    /// # Errors
    /// A failed write poisons the pool, unless the disk is full. A page that was not written is
    /// still in memory and still dirty.
    pub fn write_dirty(&self) -> Result<(), PoolError> {
        self.write_pages(&self.pages_to_write()?)
    }

    /// The pages that [`write_dirty`](Pool::write_dirty) would write now, in the order of the file,
    /// for a caller that writes them at its own pace.
    ///
    /// # Errors
    /// If the pool is poisoned or read-only.
    pub fn pages_to_write(&self) -> Result<Vec<PageId>, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        Ok(self.core.dirty.collect())
    }

    /// Writes those of some pages that are dirty. Does not make them durable.
    ///
    /// # Errors
    /// As [`write_dirty`](Pool::write_dirty).
    pub fn write_pages(&self, pages: &[PageId]) -> Result<(), PoolError> {
        self.write_wanted_pages(pages, &|_| true)
    }

    /// Writes those of some pages that are dirty, and whose bytes the caller wants to be written as
    /// they are then. Does not make them durable.
    ///
    /// # Errors
    /// As [`write_dirty`](Pool::write_dirty).
    pub fn write_wanted_pages(
        &self,
        pages: &[PageId],
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), PoolError> {
        self.check_writable()?;
        for pages in pages.chunks(self.eviction.writer.batch()) {
            let (mut held, mut busy) = (HeldPages::none(&self.core), Vec::new());
            for &id in pages {
                match self.try_hold_dirty(id) {
                    Hold::Held(page, was_marked) => held.push(page, was_marked),
                    Hold::Clean => {}
                    Hold::Busy(..) => busy.push(id),
                }
            }
            self.write_held(held, is_wanted)?;
            for id in busy {
                if let Some((page, was_marked)) = self.wait_to_hold_dirty(id) {
                    let mut held = HeldPages::none(&self.core);
                    held.push(page, was_marked);
                    self.write_held(held, is_wanted)?;
                }
            }
        }
        Ok(())
    }

    /// Writes the pages that are wanted, and unlocks all.
    fn write_held(
        &self,
        mut held: HeldPages<'_>,
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), PoolError> {
        held.keep(is_wanted);
        let written = self.eviction.writer.write(&*self.device, &held);
        let written: Result<(), PoolError> = written.into_iter().collect();
        drop(held);
        if let Err(PoolError::DamagedWord { page, .. }) = written {
            self.core.repair_word(page);
        }
        written
    }

    /// Holds the page that begins at `id` shared, if it is dirty and no thread writes to it.
    fn try_hold_dirty(&self, id: PageId) -> Hold<'_> {
        loop {
            let (state, seen) = self.core.look_at_known(PageRef { id, frames: 1 });
            match seen.state() {
                State::Locked => return Hold::Busy(state, seen),
                _ if !seen.is_dirty() => return Hold::Clean,
                State::Shared(SHARED_HOLDERS_MAX) => return Hold::Busy(state, seen),
                // Even before an urgent writer: this is one more holder, for one write.
                found if state.try_join(seen) => {
                    return Hold::Held(self.core.whole(id), found == State::Marked);
                }
                _ => {}
            }
        }
    }

    /// As `try_hold_dirty`, but waits for writers. The caller holds no other page. Returns the page
    /// and whether it had the clock's mark, or None if it is clean.
    fn wait_to_hold_dirty(&self, id: PageId) -> Option<(PageRef, bool)> {
        loop {
            match self.try_hold_dirty(id) {
                Hold::Held(page, was_marked) => return Some((page, was_marked)),
                Hold::Clean => return None,
                Hold::Busy(state, seen) => {
                    let page = PageRef { id, frames: 1 };
                    self.core.wait(page, state, seen, Wanted::SharedPlace);
                }
            }
        }
    }

    /// The frames of a backend that has frames of its own: one batch more than the pool's, as the
    /// contract allows, because releases return frames late.
    fn frames_with_batch(&self, frames: u64) -> u64 {
        frames + batch_of(self.batch_max, frames) as u64
    }

    /// The pool's size in frames of 4 KiB.
    pub fn capacity(&self) -> u64 {
        self.core.budget.size()
    }

    /// The backend that populates and releases pages.
    pub fn backend(&self) -> BackendKind {
        self.core.surface.backend()
    }

    /// Where the state words of the pages are.
    pub fn state_place(&self) -> StatePlace {
        self.core.states.place()
    }

    /// Bytes of memory that the state words take, according to the kernel's page tables. Slow: it
    /// reads `/proc/self/pagemap`.
    pub fn state_bytes(&self) -> Result<u64, PoolError> {
        let bytes = self.core.states.resident_bytes();
        bytes.map_err(|errno| PoolError::Surface(SurfaceError::Pagemap { errno }))
    }

    /// Which of these pages of 4 KiB have memory, according to the kernel's page tables. It checks
    /// [`PoolStats::resident_frames`](crate::PoolStats::resident_frames) and shares no code with
    /// it. Slow: it reads `/proc/self/pagemap`.
    pub fn kernel_residency(&self, range: PageRange) -> Result<Residency, PoolError> {
        let on_surface = self.core.surface.residency(range)?;
        let Some(slots) = &self.core.slots else { return Ok(on_surface) };
        let mut pages: Vec<u64> = on_surface.iter().collect();
        let before = slots.frames() - 1;
        for page in range.start.saturating_sub(before)..range.start + range.count {
            let slot = self.core.slot_of(PageId(page));
            if slot > 0 {
                let places = PageRange { start: slots.place(slot), count: slots.frames() };
                let resident = slots.surface().residency(places)?;
                pages.extend(resident.iter().map(|place| page + place - places.start));
            }
        }
        Ok(Residency::of_pages(range, pages))
    }

    /// How many pages of 4 KiB have memory, according to the kernel's page tables. Memory of slots
    /// counts whether a page is in it or not.
    pub fn kernel_resident_pages(&self) -> Result<u64, PoolError> {
        let count = |surface: &Surface| {
            surface.resident_pages(PageRange { start: 0, count: surface.pages() })
        };
        let in_slots = self.core.slots.as_ref().map_or(Ok(0), |slots| count(slots.surface()))?;
        Ok(count(&self.core.surface)? + in_slots)
    }

    /// How the pool finds the memory of a page that becomes resident now. Pages that are resident
    /// may still be found the other way.
    pub fn translation(&self) -> Translation {
        match &self.core.slots {
            Some(slots) if slots.are_used() => Translation::Table,
            _ => Translation::Mmu,
        }
    }

    /// Whether the device answers reads without making a thread sleep
    /// ([`Device::answers_at_once`]).
    pub fn device_answers_at_once(&self) -> bool {
        self.device.answers_at_once()
    }

    /// The device's report about itself.
    pub fn device_info(&self) -> DeviceInfo {
        self.device.info()
    }

    /// The file's length in pages of 4 KiB.
    pub fn file_pages(&self) -> u64 {
        self.file_pages.load(std::sync::atomic::Ordering::Acquire)
    }

    /// The end of the last allocated page, in pages of 4 KiB.
    pub fn end(&self) -> u64 {
        lock(&self.space).end()
    }
}

/// For the model check.
#[cfg(feature = "model")]
impl Pool {
    /// Gives the memory of the words of a group of four pages back. False if they are in use.
    pub fn give_words_back(&self, group: u64) -> bool {
        self.core.give_words_back(group)
    }
}

#[derive(Clone, Copy, Debug)]
enum Hold<'a> {
    /// And whether the page had the clock's mark.
    Held(PageRef, bool),
    Clean,
    Busy(&'a PageState, Word),
}

fn spawn_evictor(eviction: &Arc<Eviction>) -> io::Result<thread::JoinHandle<()>> {
    let eviction = eviction.clone();
    let builder = thread::Builder::new().name("vellum-evict".into());
    builder.spawn(move || eviction.run_background())
}

impl Drop for Pool {
    /// Ends the background threads. Writes no dirty page: call [`Pool::sync`] before.
    fn drop(&mut self) {
        self.eviction.end_background();
        self.core.end_huge_pages();
        for thread in self.background.drain(..) {
            // A background thread that panicked has printed the reason.
            let _ = thread.join();
        }
    }
}
