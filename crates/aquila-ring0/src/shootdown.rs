//! Shootdowns: virtual processors forget the translations of entries that were changed.
//!
//! Each begins a *generation*. A thread in ring 0 forgets its own translations at once. Others that
//! run are kicked, and the thread waits until each has left the guest: each forgets before it runs
//! again, and so do processors that were not running. `running.rs` has the protocol of one.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::entry::{Block, LOST};
use crate::sys::{BlockedSignals, is_in_ring_0, rest};
use crate::{current_processor, native};

/// Virtual processors that a machine can have.
pub(crate) const MOST: usize = 1024;

/// How often a thread looks for one that it has kicked before it kicks it once more.
const AGAIN: u32 = 2000;

/// What all virtual processors of a machine have forgotten.
#[derive(Debug)]
pub(crate) struct Shootdown {
    /// How often entries have changed in such a way that processors must forget translations.
    generation: AtomicU64,
    /// The blocks of the processors, in the order in which they were made. They live as long as the
    /// machine.
    blocks: Box<[AtomicPtr<Block>]>,
    count: AtomicUsize,
}

impl Shootdown {
    pub(crate) fn new() -> Self {
        let blocks = (0..MOST).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self { generation: AtomicU64::new(0), blocks, count: AtomicUsize::new(0) }
    }

    /// Enters a processor, which runs for the first time afterwards. One thread at a time calls it,
    /// at most [`MOST`] times.
    pub(crate) fn add(&self, block: *mut Block) {
        let number = self.count.load(Ordering::Relaxed);
        self.blocks[number].store(block, Ordering::Relaxed);
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
        let own = current_processor::running(self);
        match own {
            Some(own) if is_in_ring_0() => {
                // SAFETY: the thread is in ring 0, and the value is the one that the register has.
                unsafe { std::arch::asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _) };
                own.see(generation);
            }
            Some(own) => own.stay_out(),
            None => {}
        }
        // SAFETY: blocks live as long as the machine, and this part of them is atomic.
        let running = |block: *mut Block| unsafe { &(*block).running };
        let is_behind = |block: &*mut Block| {
            let other = running(*block);
            !own.is_some_and(|own| ptr::eq(own, other)) && other.is_behind(generation)
        };
        if !self.blocks().any(|block| is_behind(&block)) {
            return;
        }
        let kick = |block: *mut Block, again| {
            if running(block).kick(generation, again) {
                // SAFETY: as above. No thread has the processor.
                unsafe { (*block).is_idle.store(LOST, Ordering::Release) };
            }
        };
        // The program may have installed a handler of its own meanwhile. And while one of its
        // others ran on this thread, those that were kicked would wait.
        let _ = native::install();
        let _blocked = BlockedSignals::new();
        self.blocks().filter(is_behind).for_each(|block| kick(block, false));
        for block in self.blocks().filter(is_behind) {
            let mut attempt = 0_u32;
            while running(block).is_behind(generation) {
                attempt += 1;
                rest(attempt);
                let again = attempt.is_multiple_of(AGAIN);
                if again {
                    // The program may have ignored the signal for a moment.
                    let _ = native::install();
                }
                // One that had been kicked before, and has entered again, may be behind.
                kick(block, again);
            }
        }
    }

    /// The blocks of all processors.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = *mut Block> {
        let count = self.count.load(Ordering::SeqCst);
        self.blocks[..count].iter().map(|block| block.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::{Layout, alloc_zeroed};
    use std::sync::atomic::{AtomicBool, AtomicU8};
    use std::thread;

    use super::*;
    use crate::running::Running;

    const REUSED: u64 = u64::MAX;

    /// A page: whether it is mapped, and what is in its frame.
    #[derive(Default)]
    struct Page {
        is_mapped: AtomicBool,
        frame: AtomicU64,
    }

    /// A virtual processor whose guest is a loop of this function. It knows the page's entry from
    /// its first access on, and forgets it where a real one would.
    fn use_page(shootdown: &Shootdown, block: *mut Block, page: &Page, may_end: &AtomicBool) {
        // SAFETY: the block is there as long as the test, and this part of it was written.
        let (running, flag) = unsafe { (&(*block).running, &*(*block).scratch_flag()) };
        current_processor::set_block(block);
        running.take();
        let mut is_known = false;
        while !may_end.load(Ordering::Relaxed) {
            running.enter();
            let generation = shootdown.generation();
            if running.is_before(generation) {
                is_known = false;
                running.see(generation);
            }
            // The guest exits for itself now and then.
            for _ in 0..1000 {
                if flag.load(Ordering::SeqCst) != 0 {
                    break;
                }
                is_known = is_known || page.is_mapped.load(Ordering::Acquire);
                if is_known {
                    assert_ne!(page.frame.load(Ordering::Relaxed), REUSED, "an old translation");
                }
            }
            running.leave();
        }
        current_processor::set_block(ptr::null_mut());
    }

    /// The address of the block of a new processor.
    fn new_block(shootdown: &Shootdown) -> usize {
        // SAFETY: the layout has a size; only parts that were written are used.
        unsafe {
            let block = alloc_zeroed(Layout::new::<Block>()).cast::<Block>();
            let flag = (*block).scratch_flag().cast_mut().cast::<u8>();
            (&raw mut (*block).running).write(Running::new(flag));
            shootdown.add(block);
            block.expose_provenance()
        }
    }

    /// A thread that has left ring 0 without a word has ended; or another one has its number, and
    /// gets the kick.
    #[test]
    fn no_thread_waits_for_one_that_has_ended() {
        for is_number_used_again in [false, true] {
            let shootdown = Shootdown::new();
            let block = ptr::with_exposed_provenance_mut::<Block>(new_block(&shootdown));
            // SAFETY: the block is there as long as the test, and these parts of it were written.
            let (running, is_idle) = unsafe { (&(*block).running, &(*block).is_idle) };
            let (has_entered, may_end) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    running.take();
                    running.enter();
                    has_entered.store(true, Ordering::Release);
                    while is_number_used_again && !may_end.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                });
                while !has_entered.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                shootdown.shoot_down();
                assert_eq!(is_idle.load(Ordering::Relaxed), LOST);
                assert!(!running.is_behind(u64::MAX));
                may_end.store(true, Ordering::Relaxed);
            });
        }
    }

    /// Threads unmap a page, have all forget it, and use its frame for something else, while others
    /// are in the guest. Signals are real.
    #[test]
    fn no_processor_keeps_a_translation_and_no_kick_is_lost() {
        const PROCESSORS: usize = 3;
        const ROUNDS: usize = 100;
        let (shootdown, page, may_end) =
            (Shootdown::new(), Page::default(), AtomicBool::new(false));
        let blocks: Vec<usize> = (0..PROCESSORS).map(|_| new_block(&shootdown)).collect();
        let unmap = |lock: &AtomicBool| {
            for _ in 0..ROUNDS {
                while lock.swap(true, Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                page.is_mapped.store(false, Ordering::SeqCst);
                shootdown.shoot_down();
                page.frame.store(REUSED, Ordering::SeqCst);
                page.frame.store(1, Ordering::SeqCst);
                page.is_mapped.store(true, Ordering::SeqCst);
                lock.store(false, Ordering::Release);
                // Others at the same time, for pages of their own.
                shootdown.shoot_down();
            }
        };
        thread::scope(|scope| {
            for block in &blocks {
                let (shootdown, page, may_end) = (&shootdown, &page, &may_end);
                scope.spawn(move || {
                    let block = ptr::with_exposed_provenance_mut(*block);
                    use_page(shootdown, block, page, may_end);
                });
            }
            let lock = AtomicBool::new(false);
            thread::scope(|inner| (0..2).for_each(|_| drop(inner.spawn(|| unmap(&lock)))));
            may_end.store(true, Ordering::Relaxed);
        });
    }

    impl Block {
        /// A word of the block that stands for KVM's flag.
        fn scratch_flag(&self) -> *const AtomicU8 {
            (&raw const self.scratch).cast()
        }
    }
}
