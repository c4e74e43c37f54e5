//! Copies of dirty pages: what is to be written as it was at one moment, while the pages change.
//!
//! A checkpoint copies the dirty pages while nothing changes, lets changes go on, writes the copies
//! and at last tells the pool, which then calls those pages clean that are still what was written.
//! Until then the pages stay dirty. The caller keeps the evictor from writing them in the
//! meantime ([`PageFormat::write_ahead`](crate::PageFormat::write_ahead)), or an older copy could
//! follow a newer page.

use vellum_vm::PAGE_SIZE;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::device::Write;
use crate::error::PoolError;
use crate::eviction::write_back::write_to;
use crate::page::PageRef;
use crate::page::state::{SHARED_HOLDERS_MAX, State};
use crate::pool::Pool;
use crate::pool::guard::SharedGuard;
use crate::statistics::counters::Event;

/// Devices want memory that is aligned to 4 KiB.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct Block([u8; PAGE_SIZE]);

/// A page's bytes outside of the pool, as the file is to have them.
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
    /// A page of zeros, to be filled.
    pub fn zeroed(page: PageRef) -> PageCopy {
        let blocks = vec![Block([0; PAGE_SIZE]); page.frames as usize];
        PageCopy { page, blocks: blocks.into() }
    }

    /// Where it is to be written.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.blocks.as_bytes()
    }

    /// The first 4 KiB and the rest, to be filled and sealed.
    pub fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let (head, body) = self.blocks.split_at_mut(1);
        (head.as_mut_bytes(), body.as_mut_bytes())
    }
}

impl Pool {
    /// Copies all dirty pages, sealed, in the order of the file. None if they are more than `pages`
    /// pages or `frames` frames.
    ///
    /// Covers all changes whose exclusive guards were dropped before the call; for pages that are
    /// copied as of one moment, the caller keeps changes out. Waits for pages that are held
    /// exclusively: a thread that holds one must not call this.
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
            let Some(page) = self.wait_to_hold_dirty(id) else { continue };
            let guard = SharedGuard::new(&self.core, self.core.held(page), page);
            copied += u64::from(page.frames);
            if copied > frames {
                return Ok(None);
            }
            copies.push(self.copy(&guard));
        }
        Ok(Some(copies))
    }

    /// How many pages are dirty, more or less: they come and go meanwhile.
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

    /// Writes copies to their places, durable or not. The caller keeps the pool from writing the
    /// same pages.
    ///
    /// # Errors
    /// A failed write poisons the pool (except for a full disk). Some may be written then.
    pub fn write_copies(&self, copies: &[PageCopy]) -> Result<(), PoolError> {
        self.check_writable()?;
        for batch in copies.chunks(self.eviction.writer.batch()) {
            let mut writes = Vec::with_capacity(batch.len());
            for copy in batch {
                let (head, body) = copy.bytes().split_at(PAGE_SIZE);
                writes.push(Write::new(copy.page.id.0, [head, body]));
            }
            write_to(&*self.device, &self.core, &mut writes);
            for (written, copy) in writes.into_iter().zip(batch) {
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

    /// Pages from [`copy_dirty`](Pool::copy_dirty) were written: those that have not changed since
    /// are clean. Waits for nothing; a page that a thread changes now stays dirty.
    pub fn settle_copies(&self, copies: &[PageCopy]) {
        let mut scratch = PageCopy::zeroed(PageRef::new(0, 1));
        let (head, _) = scratch.parts_mut();
        for copy in copies {
            let Some(guard) = self.try_hold_written(copy.page) else { continue };
            let (written, body) = copy.bytes().split_at(PAGE_SIZE);
            head.copy_from_slice(&guard[..PAGE_SIZE]);
            if guard[PAGE_SIZE..] == *body {
                self.core.format.seal(copy.page, head, body);
                if *head == *written {
                    self.core.written(copy.page);
                }
            }
        }
    }

    /// Waits until the pool writes no page: one that [`write_dirty`](Pool::write_dirty) has written
    /// may be on its way to the file once more, by a thread that began before. While pages become
    /// dirty others may be written right after this.
    pub fn wait_for_writes(&self) {
        self.eviction.writer.wait();
    }

    /// Holds a page shared if it is dirty, as long as it was, and no thread writes to it.
    fn try_hold_written(&self, page: PageRef) -> Option<SharedGuard<'_>> {
        loop {
            let (state, seen) = self.core.states.look(page.id)?;
            match seen.state() {
                State::Shared(SHARED_HOLDERS_MAX) => return None,
                State::Unlocked | State::Marked | State::Shared(_) if seen.is_dirty() => {
                    if state.try_join(seen) {
                        let guard = SharedGuard::new(&self.core, state, self.core.whole(page.id));
                        return (guard.page() == page).then_some(guard);
                    }
                }
                _ => return None,
            }
        }
    }
}
