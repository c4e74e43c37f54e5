//! Looking ahead: pages that are wanted soon, in the processor's caches or from the device.
//!
//! [`Pool::glance`] and [`Pool::touch`] are for code that works on many pages at a time and turns
//! to another one where it would wait (group prefetching, Chen, Ailamaki, Gibbons and Mowry,
//! ICDE'04; asynchronous memory access chaining, Kocberber, Falsafi and Grot, VLDB'15).
//! [`Pool::bring_in`] starts reads, and makes one of those of neighbours.

#![allow(unsafe_code)]

use std::io;
use std::time::Instant;

use vellum_vm::PAGE_SIZE;

use crate::core::Core;
use crate::device::{PageRange, ReadDone};
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State, Word};
use crate::pool::Pool;
use crate::pool::guard::OptimisticGuard;
use crate::statistics::counters::Event;

/// Bytes of a line of the processor's caches.
const LINE: usize = 64;

/// The most frames of neighbouring pages that one read brings in: 256 KiB.
const MERGED_FRAMES: u64 = 64;

impl Pool {
    /// As [`optimistic`](Pool::optimistic), but never waits and never reads: none if the page is
    /// not in memory, or held exclusively, or on its way ([`is_resident`](Pool::is_resident) tells
    /// the two apart), or no page at all (`optimistic` says why not).
    #[inline(always)]
    pub fn glance(&self, page: PageRef) -> Option<OptimisticGuard<'_>> {
        let core = &*self.core;
        let state = core.state(page).ok()?;
        let mut seen = state.load();
        if !(seen.is_readable_unmarked() && core.is_whole(page)) {
            seen = glance_again(core, state, page)?;
        }
        Some(OptimisticGuard::new(core, state, page, seen))
    }

    /// Asks the processor for the page's state word.
    #[inline(always)]
    pub fn touch_state(&self, page: PageRef) {
        if let Some(state) = self.core.states.get(page.id) {
            touch_line(std::ptr::from_ref(state).cast());
        }
    }

    /// Asks the processor for `len` bytes at `offset` of a page, resident or not. Where the page
    /// is not in memory, or is none, nothing happens.
    #[inline(always)]
    pub fn touch(&self, page: PageRef, offset: usize, len: usize) {
        // What an optimistic reader takes for a number may be rubbish.
        let place = (page.id.0 as usize).wrapping_mul(PAGE_SIZE);
        let base: *const u8 = self.core.surface.base().as_ptr().wrapping_add(place);
        let first = offset / LINE;
        for line in first..(offset + len).div_ceil(LINE) {
            touch_line(base.wrapping_add(line * LINE));
        }
    }

    /// Starts reading pages that will be needed soon, all at once, and returns without waiting for
    /// them. Pages that follow one another in the file are read together.
    ///
    /// Unlike [`prefetch`](Pool::prefetch) it evicts to make room, which may wait for writes. It
    /// is a hint all the same: a failed read is silent, and whoever fixes the page meets the error.
    /// Sorts the pages. Returns the number of those that are on their way now.
    pub fn bring_in(&self, pages: &mut [PageRef]) -> usize {
        pages.sort_unstable();
        self.evict_for(pages.iter().map(|page| u64::from(page.frames)).sum());
        let (mut reads, mut run, mut started) = (Vec::new(), Run::default(), 0);
        for page in pages {
            let Some(coming) = self.claim(*page) else { continue };
            started += 1;
            if !run.takes(&coming) {
                self.end_run(&mut run, &mut reads);
            }
            run.pages.push(coming);
        }
        self.end_run(&mut run, &mut reads);
        if !reads.is_empty() {
            self.device.start_reads(&self.core.surface, reads);
        }
        started
    }

    /// Evicts until there are `frames` frames, as far as that is easy.
    fn evict_for(&self, frames: u64) {
        let wanted = frames.min(self.capacity() / 2);
        while self.core.budget.available() < wanted {
            let missing = wanted - self.core.budget.available().min(wanted);
            let evicted = self.eviction.evict_batch(missing);
            self.core.counters.add(Event::EvictInline, evicted.pages);
            if evicted.frames == 0 {
                return;
            }
        }
    }

    /// Locks a page that is not in memory and takes frames for it; none if that is not possible.
    fn claim(&self, page: PageRef) -> Option<Coming> {
        let state = self.core.state(page).ok()?;
        let seen = state.load();
        if seen.state() != State::Evicted {
            return None;
        }
        let reserved = self.eviction.try_reserve(page)?;
        if !state.try_lock(seen) {
            return None;
        }
        match self.core.enclose(page) {
            Ok(enclosed) => {
                reserved.keep();
                Some(Coming { page, enclosed })
            }
            Err(_) => {
                self.core.unlock(page, Leave::Evicted, false);
                None
            }
        }
    }

    /// Makes the collected neighbours one read.
    fn end_run(&self, run: &mut Run, reads: &mut Vec<(PageRange, ReadDone)>) {
        let pages = std::mem::take(&mut run.pages);
        let Some(first) = pages.first() else { return };
        let frames = pages.iter().map(|coming| u64::from(coming.page.frames)).sum();
        let range = PageRange::new(first.page.id.0, frames);
        let (core, started) = (self.core.clone(), Instant::now());
        let done = ReadDone::new(move |result| {
            core.read_latency.record(started.elapsed(), pages.len() as u64);
            for coming in pages {
                coming.arrive(&core, again(&result));
            }
        });
        reads.push((range, done));
    }
}

/// A page that is locked until its read is done; its frames are taken.
struct Coming {
    page: PageRef,
    enclosed: Vec<Leave>,
}

impl Coming {
    fn arrive(self, core: &Core, result: io::Result<()>) {
        if core.finish_read(self.page, result).is_ok() {
            core.counters.count(Event::Prefetch);
            core.unlock(self.page, Leave::Unlocked, false);
        } else {
            core.budget.put_back(u64::from(self.page.frames));
            core.unlock_unread(self.page, self.enclosed);
        }
    }
}

/// Pages that follow one another.
#[derive(Default)]
struct Run {
    pages: Vec<Coming>,
}

impl Run {
    fn takes(&self, next: &Coming) -> bool {
        let Some((first, last)) = self.pages.first().zip(self.pages.last()) else { return true };
        let end = last.page.range().end();
        let frames = next.page.id.0 - first.page.id.0 + u64::from(next.page.frames);
        end == Some(next.page.id.0) && frames <= MERGED_FRAMES
    }
}

/// The result of a read, for one of its pages.
fn again(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => Err(match error.raw_os_error() {
            Some(number) => io::Error::from_raw_os_error(number),
            None => error.kind().into(),
        }),
    }
}

/// The word of a page that was not readable at first sight, if it is readable after all.
#[cold]
#[inline(never)]
fn glance_again(core: &Core, state: &PageState, page: PageRef) -> Option<Word> {
    loop {
        let seen = state.load();
        match seen.state() {
            State::Unlocked | State::Shared(_) => return core.is_whole(page).then_some(seen),
            State::Marked => _ = state.try_unmark(seen),
            State::Locked | State::Evicted | State::Free | State::Inner => return None,
        }
    }
}

/// Asks the processor for a cache line. Any address will do: nothing is read that counts.
#[inline(always)]
fn touch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it does not fault, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
