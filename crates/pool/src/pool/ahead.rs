//! Looking ahead: pages that are wanted soon, in the processor's caches or from the device.
//!
//! [`Pool::glance`] and [`Pool::touch`] are for code that works on many pages at a time and turns
//! to another one where it would wait (group prefetching, Chen, Ailamaki, Gibbons and Mowry,
//! ICDE'04; asynchronous memory access chaining, Kocberber, Falsafi and Grot, VLDB'15).
//! [`Pool::bring_in`] starts reads, for which it makes room.

#![allow(unsafe_code)]

use vellum_vm::PAGE_SIZE;

use crate::core::Core;
use crate::page::PageRef;
use crate::page::state::{PageState, State, Word};
use crate::pool::Pool;
use crate::pool::guard::OptimisticGuard;
use crate::statistics::counters::Event;

/// Bytes of a line of the processor's caches.
const LINE: usize = 64;

impl Pool {
    /// As [`optimistic`](Pool::optimistic), but never waits and never reads: none if the page is
    /// not in memory, or held exclusively, or on its way ([`is_resident`](Pool::is_resident) tells
    /// the two apart), or no page at all (`optimistic` says why not).
    #[inline(always)]
    pub fn glance(&self, page: PageRef) -> Option<OptimisticGuard<'_>> {
        let core = &*self.core;
        let (mut state, mut seen) = core.look(page).ok()?;
        if !(seen.is_readable_unmarked() && core.is_whole(page)) {
            (state, seen) = glance_again(core, page)?;
        }
        Some(OptimisticGuard::new(core, state, page, seen))
    }

    /// Asks the processor for the page's state word, or for what leads to it.
    #[inline(always)]
    pub fn touch_state(&self, page: PageRef) {
        if let Some(line) = self.core.states.line(page.id) {
            touch_line(line);
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

    /// As [`prefetch`](Pool::prefetch), but evicts to make room, which may wait for writes.
    pub fn bring_in(&self, pages: &[PageRef]) {
        self.evict_for(pages.iter().map(|page| u64::from(page.frames)).sum());
        self.prefetch(pages);
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
}

/// The word of a page that was not readable at first sight, if it is readable after all.
#[cold]
#[inline(never)]
fn glance_again(core: &Core, page: PageRef) -> Option<(&PageState, Word)> {
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
