//! Prefetching: into the CPU's caches, and from the device.
//!
//! [`Pool::glance`] and [`Pool::touch`] are for code that works on many pages in turn and switches
//! to another page where it would wait (group prefetching, Chen, Ailamaki, Gibbons and Mowry,
//! ICDE'04; asynchronous memory access chaining, Kocberber, Falsafi and Grot, VLDB'15).
//! [`Pool::bring_in`] evicts pages to make room, and starts reads.

#![allow(unsafe_code)]

use vellum_vm::PAGE_SIZE;

use crate::core::Core;
use crate::page::PageRef;
use crate::page::state::{PageState, State, Word};
use crate::pool::Pool;
use crate::pool::guard::OptimisticGuard;
use crate::statistics::counters::Event;

/// Bytes of a cache line.
const LINE: usize = 64;

impl Pool {
    /// As [`optimistic`](Pool::optimistic), but never waits and never reads. None if the page is
    /// not in memory, or if a thread holds it exclusively or is reading it
    /// ([`is_resident`](Pool::is_resident) tells the two apart), or if the reference is bad
    /// (`optimistic` says why).
    #[inline(always)]
    pub fn glance(&self, page: PageRef) -> Option<OptimisticGuard<'_>> {
        let core = &*self.core;
        let (mut state, mut seen) = core.look(page).ok()?;
        if !(seen.is_readable_unmarked() && core.is_whole(page)) {
            (state, seen) = glance_slow(core, page)?;
        }
        Some(OptimisticGuard::new(core, state, page, seen))
    }

    /// Prefetches the cache line of the page's state word, or of the entry that leads to it.
    #[inline(always)]
    pub fn touch_state(&self, page: PageRef) {
        if let Some(line) = self.core.states.line(page.id) {
            touch_line(line);
        }
    }

    /// Prefetches the cache lines of `len` bytes at `offset` of a page. Does nothing if the page is
    /// not in memory or the reference is bad.
    #[inline(always)]
    pub fn touch(&self, page: PageRef, offset: usize, len: usize) {
        // An optimistic reader may have read any number.
        let place = (page.id.0 as usize).wrapping_mul(PAGE_SIZE);
        let base: *const u8 = self.core.surface.base().as_ptr().wrapping_add(place);
        let first = offset / LINE;
        for line in first..(offset + len).div_ceil(LINE) {
            touch_line(base.wrapping_add(line * LINE));
        }
    }

    /// As [`prefetch`](Pool::prefetch), but evicts to make room, which may wait for writes.
    pub fn bring_in(&self, pages: &[PageRef]) {
        self.evict_for(pages.iter().map(|page| u64::from(page.frames)).sum());
        self.prefetch(pages);
    }

    /// Evicts until `frames` frames are free, or half of the pool, or a batch evicts nothing.
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
}

/// The slow path of [`Pool::glance`]: unmarks a marked page.
#[cold]
#[inline(never)]
fn glance_slow(core: &Core, page: PageRef) -> Option<(&PageState, Word)> {
    loop {
        let (state, seen) = core.look(page).ok()?;
        match seen.state() {
            State::Unlocked | State::Shared(_) => {
                return core.is_whole(page).then_some((state, seen));
            }
            State::Marked => _ = state.try_unmark(seen),
            State::Locked | State::Evicted | State::Free | State::Inner => return None,
        }
    }
}

/// Prefetches a cache line. Any address will do: the CPU ignores addresses without memory.
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
