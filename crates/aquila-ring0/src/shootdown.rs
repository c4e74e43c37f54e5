//! Shootdowns: virtual processors forget the translations of entries that were changed.
//!
//! Each begins a *generation*. A thread in ring 0 forgets its own translations at once. Others that
//! run are kicked, and the thread waits until each has left the guest: each forgets before it runs
//! again, and so do processors that were not running. `running.rs` has the protocol of one.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::entry::is_in_ring_0;
use crate::running::{Running, is_same};
use crate::sys::{BlockedSignals, raw_system_call};
use crate::{current, native};

/// Virtual processors that a machine can have.
pub(crate) const MOST: usize = 1024;

/// What all virtual processors of a machine have forgotten.
#[derive(Debug)]
pub(crate) struct Shootdown {
    /// How often entries have changed in such a way that processors must forget translations.
    generation: AtomicU64,
    /// The processors, in the order in which they were made. They live as long as the machine.
    processors: Box<[AtomicPtr<Running>]>,
    count: AtomicUsize,
}

impl Shootdown {
    pub(crate) fn new() -> Self {
        let processors = (0..MOST).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self { generation: AtomicU64::new(0), processors, count: AtomicUsize::new(0) }
    }

    /// Enters a processor, which runs for the first time afterwards. One thread at a time calls it,
    /// at most [`MOST`] times.
    pub(crate) fn add(&self, running: *mut Running) {
        let number = self.count.load(Ordering::Relaxed);
        self.processors[number].store(running, Ordering::Relaxed);
        self.count.store(number + 1, Ordering::SeqCst);
    }

    /// The number of the last generation.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Has all processors forget what they know of entries that were changed before the call. When
    /// it returns, no thread of the machine reaches memory by these translations.
    pub(crate) fn shoot_down(&self) {
        let generation = self.generation.fetch_add(1, Ordering::SeqCst) + 1;
        let own = current::running(self).filter(|_| is_in_ring_0());
        if let Some(own) = own {
            // SAFETY: the thread is in ring 0, and the value is the one that the register has.
            unsafe { std::arch::asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _) };
            own.see(generation);
        }
        let is_behind = |other: &&Running| {
            !own.is_some_and(|own| is_same(own, other)) && other.is_behind(generation)
        };
        if !self.processors().any(|other| is_behind(&other)) {
            return;
        }
        // The program may have installed a handler of its own meanwhile. And while one of its
        // others ran on this thread, those that were kicked would wait.
        let _ = native::install();
        let _blocked = BlockedSignals::new();
        self.processors().filter(is_behind).for_each(|other| other.kick(generation));
        for other in self.processors().filter(is_behind) {
            while other.is_behind(generation) {
                // One that had been kicked before, and has entered again, may be behind.
                other.kick(generation);
                // SAFETY: the call has no arguments.
                unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) };
            }
        }
    }

    fn processors(&self) -> impl Iterator<Item = &Running> {
        let count = self.count.load(Ordering::SeqCst);
        self.processors[..count].iter().map(|running| {
            // SAFETY: processors live as long as the machine, and this part of them is atomic.
            unsafe { &*running.load(Ordering::Relaxed) }
        })
    }
}
