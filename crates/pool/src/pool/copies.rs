//! Copies of dirty pages, so that a checkpoint writes them as of one moment while the pages change.
//!
//! A checkpoint copies the dirty pages while changes stand still, lets changes go on, writes the
//! copies, and then tells the pool. The pool makes those pages clean that still equal their copy.
//! Until then the pages stay dirty. The caller keeps the evictor from writing them in the meantime
//! ([`PageFormat::write_ahead`](crate::PageFormat::write_ahead)); otherwise an older copy could
//! overwrite a newer page in the file.

use vellum_vm::PAGE_SIZE;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::device::Write;
use crate::error::PoolError;
use crate::eviction::write_back::write_to;
use crate::page::PageRef;
use crate::page::state::{SHARED_HOLDERS_MAX, State};
use crate::pool::Pool;
use crate::pool::fix::SharedGuard;
use crate::statistics::counters::Event;

/// Devices take memory that is aligned to 4 KiB.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct Block([u8; PAGE_SIZE]);

/// A copy of a page outside of the pool, in the form that goes to the file.
pub struct PageCopy {
    page: PageRef,
    blocks: Box<[Block]>,
}

impl std::fmt::Debug for PageCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageCopy").field("page", &self.page).finish_non_exhaustive()
    }
}

impl PageCopy {
    /// A page of zeros, for the caller to fill.
    pub fn zeroed(page: PageRef) -> PageCopy {
        let blocks = vec![Block([0; PAGE_SIZE]); page.frames as usize];
        PageCopy { page, blocks: blocks.into() }
    }

    /// The page, whose place in the file the copy goes to.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.blocks.as_bytes()
    }

    /// Its bytes, for the caller to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.blocks.as_mut_bytes()
    }

    /// The first 4 KiB and the rest, for the caller to fill and seal.
    pub fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let (head, body) = self.blocks.split_at_mut(1);
        (head.as_mut_bytes(), body.as_mut_bytes())
    }
}

impl Pool {
    /// Copies all dirty pages, sealed, in the order of the file. None if there are more than
    /// `pages` of them or they have more than `frames` frames.
    ///
    /// Covers all changes whose exclusive guards were dropped before the call. To copy all pages as
    /// of one moment, the caller keeps changes out. Waits for pages that are held exclusively: a
    /// thread that holds one must not call this.
    ///
    /// # Errors
    /// On a read-only or poisoned pool.
    pub fn copy_dirty(
        &self,
        pages: usize,
        frames: u64,
    ) -> Result<Option<Vec<PageCopy>>, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        if self.core.dirty.count() > pages {
            return Ok(None);
        }
        let dirty = self.core.dirty.collect();
        let (mut copies, mut copied) = (Vec::with_capacity(dirty.len()), 0);
        for id in dirty {
            let Some((page, was_marked)) = self.wait_to_hold_dirty(id) else { continue };
            let guard = SharedGuard::new(&self.core, self.core.held(page), page)?;
            copied += u64::from(page.frames);
            if copied > frames {
                guard.unlock_as_found(was_marked);
                return Ok(None);
            }
            copies.push(self.copy(&guard));
            guard.unlock_as_found(was_marked);
        }
        Ok(Some(copies))
    }

    /// How many pages are dirty, approximately: the number changes while the pool counts.
    pub fn dirty_pages(&self) -> usize {
        self.core.dirty.count()
    }

    fn copy(&self, guard: &SharedGuard<'_>) -> PageCopy {
        let mut copy = PageCopy::zeroed(guard.page());
        let (head, body) = copy.parts_mut();
        head.copy_from_slice(&guard[..PAGE_SIZE]);
        body.copy_from_slice(&guard[PAGE_SIZE..]);
        self.core.format.seal(guard.page(), head, body);
        copy
    }

    /// Writes copies to their places. Does not make them durable. The caller keeps the pool from
    /// writing the same pages.
    ///
    /// # Errors
    /// A failed write poisons the pool, unless the disk is full. Some copies may be written.
    pub fn write_copies(&self, copies: &[PageCopy]) -> Result<(), PoolError> {
        self.check_writable()?;
        for copies in copies.chunks(self.eviction.writer.batch()) {
            let mut writes = Vec::with_capacity(copies.len());
            for copy in copies {
                let (head, body) = copy.bytes().split_at(PAGE_SIZE);
                writes.push(Write::new(copy.page.id.0, [head, body]));
            }
            write_to(&*self.device, &self.core, &mut writes);
            for (written, copy) in writes.into_iter().zip(copies) {
                let page = copy.page;
                written.result.map_err(|source| {
                    let error = PoolError::Write { page, source };
                    self.core.poison(&error);
                    error
                })?;
                self.core.counters.count(Event::WriteBack);
            }
        }
        Ok(())
    }

    /// Makes pages clean that still equal their copies from [`copy_dirty`](Pool::copy_dirty), which
    /// the caller has written. Never waits: a page that a thread is changing stays dirty.
    pub fn clear_dirty_if_unchanged(&self, copies: &[PageCopy]) {
        let mut scratch = PageCopy::zeroed(PageRef::new(0, 1));
        let (head, _) = scratch.parts_mut();
        for copy in copies {
            let Some((guard, was_marked)) = self.try_hold_written(copy.page) else { continue };
            let (written, body) = copy.bytes().split_at(PAGE_SIZE);
            head.copy_from_slice(&guard[..PAGE_SIZE]);
            if guard[PAGE_SIZE..] == *body {
                self.core.format.seal(copy.page, head, body);
                if *head == *written {
                    self.core.clear_dirty(copy.page);
                }
            }
            guard.unlock_as_found(was_marked);
        }
    }

    /// Waits for the writes of pages that are under way. An evictor that began before
    /// [`write_dirty`](Pool::write_dirty) may be writing the same page once more. Does not wait for
    /// writes that begin after this call.
    pub fn wait_for_writes(&self) {
        self.eviction.writer.wait();
    }

    /// Holds a page shared if it is dirty, has the same length, and no thread is changing it. Says
    /// whether it had the clock's mark.
    fn try_hold_written(&self, page: PageRef) -> Option<(SharedGuard<'_>, bool)> {
        loop {
            let (state, seen) = self.core.states.look(page.id)?;
            match seen.state() {
                State::Shared(SHARED_HOLDERS_MAX) => return None,
                found @ (State::Unlocked | State::Marked | State::Shared(_)) if seen.is_dirty() => {
                    if state.try_join(seen) {
                        let whole = self.core.whole(page.id);
                        let guard = SharedGuard::new(&self.core, state, whole).ok()?;
                        let was_marked = found == State::Marked;
                        if guard.page() != page {
                            guard.unlock_as_found(was_marked);
                            return None;
                        }
                        return Some((guard, was_marked));
                    }
                }
                _ => return None,
            }
        }
    }
}
