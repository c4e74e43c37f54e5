//! The latch of a frame: one word with a version, so that readers need not write to it.
//!
//! A word of zero is a latch that no thread holds.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A thread has the frame for itself.
const EXCLUSIVE: u64 = 1 << 63;
/// The hand of the clock was here, and no access since.
const MARKED: u64 = 1 << 62;
/// The page differs from the one in storage.
const DIRTY: u64 = 1 << 61;
/// One of the threads that have pinned the frame to read it.
const PIN: u64 = 1 << 48;
/// All of these.
const PINS: u64 = 0x1fff << 48;
/// Grows at the end of each exclusive hold.
const VERSION: u64 = (1 << 48) - 1;

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub struct Latch<'a>(pub &'a AtomicU64);

/// A latch's word as a reader saw it.
#[derive(Clone, Copy, Debug)]
pub struct Seen(u64);

impl Seen {
    /// A reader without a pin may read at once: the frame is in use, and no thread changes it.
    #[inline(always)]
    pub fn is_readable(self) -> bool {
        self.0 & (EXCLUSIVE | MARKED) == 0
    }

    /// A thread has the frame for itself.
    pub fn is_exclusive(self) -> bool {
        self.0 & EXCLUSIVE != 0
    }

    /// The page differs from the one in storage.
    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }
}

/// What the hand of the clock finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swept {
    /// A thread holds the frame, or another hand was faster.
    Held,
    /// It was in use; it is marked now.
    Marked,
    /// No thread used it since the last time. The caller now has it for itself.
    Claimed,
}

impl Latch<'_> {
    /// Takes the frame while no other thread knows it.
    pub fn take_new(self) {
        self.0.store(EXCLUSIVE, Ordering::Release);
    }

    /// What a reader sees now.
    #[inline(always)]
    pub fn seen(self) -> Seen {
        Seen(self.0.load(Ordering::Acquire))
    }

    /// Whether all that was read since is of one version of one page.
    #[inline(always)]
    pub fn validate(self, seen: Seen) -> bool {
        fence(Ordering::Acquire);
        (self.0.load(Ordering::Relaxed) ^ seen.0) & (EXCLUSIVE | VERSION) == 0
    }

    /// Notes that the frame is in use.
    pub fn unmark(self) {
        self.0.fetch_and(!MARKED, Ordering::Relaxed);
    }

    /// Pins the frame for a reader, unless a thread has it for itself.
    #[inline(always)]
    pub fn try_pin(self) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while word & EXCLUSIVE == 0 && word & PINS != PINS {
            let pinned = (word & !MARKED) + PIN;
            match self.0.compare_exchange_weak(word, pinned, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// The end of a pin.
    #[inline(always)]
    pub fn unpin(self) {
        self.0.fetch_sub(PIN, Ordering::Release);
    }

    /// Takes the frame for this thread alone, unless another one holds it.
    pub fn try_exclusive(self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        word & (EXCLUSIVE | PINS) == 0 && self.claim(word)
    }

    fn claim(self, word: u64) -> bool {
        let claimed = (word & !MARKED) | EXCLUSIVE;
        let result =
            self.0.compare_exchange(word, claimed, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // A reader that sees what this thread changes also sees that the latch was taken.
        fence(Ordering::Release);
        result
    }

    /// The page is now the one in storage. This thread has the frame for itself.
    pub fn clean(self) {
        self.0.fetch_and(!DIRTY, Ordering::Relaxed);
    }

    /// The end of an exclusive hold.
    pub fn release(self, dirty: bool) {
        let version = (self.0.load(Ordering::Relaxed) + 1) & VERSION;
        self.0.store(version | if dirty { DIRTY } else { 0 }, Ordering::Release);
    }

    /// The hand of the clock passes.
    pub fn sweep(self) -> Swept {
        let word = self.0.load(Ordering::Relaxed);
        if word & (EXCLUSIVE | PINS) != 0 {
            return Swept::Held;
        }
        if word & MARKED != 0 {
            return if self.claim(word) { Swept::Claimed } else { Swept::Held };
        }
        let marked = word | MARKED;
        let swap = self.0.compare_exchange(word, marked, Ordering::Relaxed, Ordering::Relaxed);
        if swap.is_ok() { Swept::Marked } else { Swept::Held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_each_exclusive_hold() {
        let word = AtomicU64::new(0);
        let latch = Latch(&word);
        let before = latch.seen();
        assert!(before.is_readable() && latch.validate(before));
        assert!(latch.try_exclusive() && !latch.validate(before));
        assert!(!latch.seen().is_readable() && latch.seen().is_exclusive());
        latch.release(true);
        assert!(!latch.validate(before) && latch.seen().is_dirty());
    }

    #[test]
    fn pins_and_marks_disturb_no_reader() {
        let word = AtomicU64::new(0);
        let latch = Latch(&word);
        let before = latch.seen();
        assert!(latch.try_pin() && latch.try_pin() && latch.validate(before));
        assert!(!latch.try_exclusive() && latch.sweep() == Swept::Held);
        latch.unpin();
        latch.unpin();
        assert_eq!(latch.sweep(), Swept::Marked);
        assert!(latch.validate(before) && !latch.seen().is_readable());
    }

    #[test]
    fn the_clock_claims_what_was_not_used_for_a_round() {
        let word = AtomicU64::new(0);
        let latch = Latch(&word);
        assert_eq!(latch.sweep(), Swept::Marked);
        latch.unmark();
        assert_eq!(latch.sweep(), Swept::Marked);
        assert!(latch.try_pin());
        latch.unpin();
        assert_eq!(latch.sweep(), Swept::Marked);
        assert_eq!(latch.sweep(), Swept::Claimed);
        assert!(!latch.try_pin() && latch.sweep() == Swept::Held);
    }
}
