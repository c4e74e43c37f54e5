//! Another size for a pool that is in use: [`Pool::resize`].
//!
//! A pool grows at once: there are more frames in the budget, and memory comes with the pages that
//! use them. A pool shrinks in three steps. The thread makes the budget smaller, bit by bit, and
//! evicts pages until no more frames are in use. Then it returns memory to the kernel. On the
//! surface each page's memory went with the page. Slots keep theirs, so the thread vacates chunks
//! of slots: it moves the pages that are left in them to free slots of other chunks, and returns
//! the memory (`slots.rs`).
//!
//! A page moves as it is, without I/O (`residence/mod.rs`).

use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::pool::Pool;
use crate::pool::options::{CountedBytes, PoolOptions, PoolSize};
use crate::slots::Slots;
use crate::sync::lock;

/// After so many rounds, of about a millisecond each, in which no page could move, chunks with
/// pages that are held stay.
const MOVE_ROUNDS: u32 = 100;

/// After so many rounds without success, the pool concludes that the kernel does not take the
/// memory of free slots.
const TRIM_ROUNDS: u32 = 100;

impl Pool {
    /// Changes the size of the pool, in bytes, while other threads use it. Returns when the pages
    /// fit into that memory, and the rest is back with the kernel.
    ///
    /// A pool that shrinks evicts pages, and writes those that have changed. It waits for guards,
    /// and for pages that cannot be written at this moment, as a fix in a full pool does: the
    /// caller must not hold more guards than the smaller pool has room for. Misses of other threads
    /// share the frames that leave, and may wait for a few batches of writes. Resizes take turns.
    ///
    /// # Errors
    /// [`PoolTooSmall`](PoolError::PoolTooSmall) below [`PoolOptions::MIN_FRAMES`],
    /// [`PoolTooLarge`](PoolError::PoolTooLarge) beyond the memory of the process, and
    /// [`BeyondMaximum`](PoolError::BeyondMaximum) beyond [`PoolOptions::max_bytes`];
    /// [`CannotShrink`](PoolError::CannotShrink) and [`MemoryKept`](PoolError::MemoryKept). On
    /// exmap also the module's errors. After an error the pool keeps its old size.
    pub fn resize(&self, bytes: u64) -> Result<(), PoolError> {
        let frames = PoolSize::Bytes(bytes).frames()?;
        if frames < PoolOptions::MIN_FRAMES {
            return Err(PoolError::PoolTooSmall { frames, min: PoolOptions::MIN_FRAMES });
        }
        if frames > self.max_frames {
            return Err(PoolError::BeyondMaximum { max: self.max_frames });
        }
        // One thread at a time.
        let mut counted = lock(&self.counted);
        let before = self.capacity();
        let resized = if frames < before { self.shrink(frames) } else { self.enlarge(frames) };
        match resized {
            Ok(()) => *counted = CountedBytes::of_frames(frames),
            Err(_) => {
                self.set_size(before);
                // It has as many as it could get, or as few as its pages need.
                let again = self.core.surface.resize_frames(self.frames_with_batch(before));
                if let Err(error) = again {
                    tracing::warn!("the pool has fewer frames than its size says: {error}");
                }
            }
        }
        resized
    }

    fn enlarge(&self, frames: u64) -> Result<(), PoolError> {
        self.core.surface.resize_frames(self.frames_with_batch(frames))?;
        self.set_size(frames);
        Ok(())
    }

    fn shrink(&self, frames: u64) -> Result<(), PoolError> {
        self.eviction.evict_down_to(frames)?;
        if let Some(slots) = &self.core.slots {
            // Before pages on the surface ask for the memory, which would split more huge pages.
            self.core.vacate_chunks(slots, frames);
            slots.set_capacity(frames);
            self.core.trim_slots(slots, frames)?;
        }
        self.core.surface.resize_frames(self.frames_with_batch(frames))?;
        self.set_size(frames);
        Ok(())
    }

    /// Tells the budget, the slots and the evictor the size.
    fn set_size(&self, frames: u64) {
        // First, so that a thread that takes frames out of the budget finds slots.
        if let Some(slots) = &self.core.slots {
            slots.set_capacity(frames);
        }
        self.core.budget.set_size(frames);
        self.eviction.note_capacity();
        // Last: the evictor has forgotten what tasks asked it for, and they ask again.
        self.core.budget.wake();
        // The length of the file does not change meanwhile.
        let _growing = lock(&self.growing);
        self.core.note_file_pages(self.file_pages());
    }
}

impl Core {
    /// Vacates chunks, as far as no guard holds their pages, so that `frames` frames have memory.
    fn vacate_chunks(&self, slots: &Slots, frames: u64) {
        let mut vacating = slots.begin_vacating(frames);
        let mut rounds = 0;
        while !vacating.is_empty() && !slots.keep_apart(&mut vacating) && rounds < MOVE_ROUNDS {
            let mut pages = Vec::new();
            self.for_each_resident(&mut |page| {
                // A page whose word is damaged, or one that leaves or comes at this moment.
                let slot = self.slot_of(page.id);
                if !slots.is_of(slot, page.id) {
                    self.repair_word(page);
                }
                if slots.is_vacating(self.slot_of(page.id)) {
                    pages.push(page);
                }
            });
            // Some have left meanwhile.
            let is_there = |page: &PageRef| slots.is_vacating(self.slot_of(page.id));
            let moved =
                pages.into_iter().filter(|page| is_there(page) && self.move_page(slots, *page));
            if moved.count() == 0 {
                rounds += 1;
                self.budget.wait_briefly();
            }
        }
        slots.end_vacating(vacating);
    }

    /// Takes the memory of free slots as long as more than `frames` frames have some.
    fn trim_slots(&self, slots: &Slots, frames: u64) -> Result<(), PoolError> {
        let mut rounds = 0;
        while slots.excess(frames) > 0 {
            match slots.trim(slots.excess(frames)) {
                true => rounds = 0,
                false if rounds == TRIM_ROUNDS => return Err(PoolError::MemoryKept),
                false => {
                    rounds += 1;
                    self.budget.wait_briefly();
                }
            }
        }
        Ok(())
    }
}

/// For the model check.
#[cfg(feature = "model")]
impl Pool {
    /// Moves a page that lies in a slot to another slot. False if a thread holds it, or if no slot
    /// is free.
    pub fn move_to_another_slot(&self, page: PageRef) -> bool {
        self.core.slots.as_ref().is_some_and(|slots| self.core.move_page(slots, page))
    }
}
