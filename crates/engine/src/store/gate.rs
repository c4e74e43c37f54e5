//! The change gate: changes pass together, unless somebody holds it to see a store that stands
//! still.
//!
//! Changes only count themselves in one word; who finds the gate held waits on a condition
//! variable. Several may hold it at once, and one may ask to be alone: neither changes nor other
//! holders. Until there are versions of pages, this is what a snapshot is made of.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Holders are counted above the changes under way.
const HOLDER: u64 = 1 << 32;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Changes under way in the low half, holders in the high half.
    word: AtomicU64,
    sleepers: Mutex<()>,
    changed: Condvar,
    /// Held by the one that is, or wants to be, alone: two would wait for each other.
    solitude: Mutex<()>,
}

/// A change under way.
#[derive(Debug)]
pub(crate) struct Passage<'a>(&'a Gate);

/// While this lives no change is under way.
#[derive(Debug)]
pub(crate) struct Hold<'a>(&'a Gate);

/// While this lives there is neither a change under way nor another holder.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    gate: &'a Gate,
    _solitude: MutexGuard<'a, ()>,
}

impl Gate {
    /// Begins a change; waits while the gate is held.
    #[inline]
    pub(crate) fn pass(&self) -> Passage<'_> {
        let before = self.word.fetch_add(1, Ordering::Acquire);
        if before >= HOLDER {
            self.pass_slow();
        }
        Passage(self)
    }

    #[cold]
    fn pass_slow(&self) {
        self.leave();
        let mut sleeping = self.lock();
        loop {
            let word = self.word.load(Ordering::Relaxed);
            if word < HOLDER {
                let next = word + 1;
                let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
                if self.word.compare_exchange(word, next, ok, relaxed).is_ok() {
                    return;
                }
                continue;
            }
            sleeping = self.changed.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn release(&self, held: u64) {
        self.word.fetch_sub(held, Ordering::Release);
        drop(self.lock());
        self.changed.notify_all();
    }

    fn leave(&self) {
        let before = self.word.fetch_sub(1, Ordering::Release);
        if before >= HOLDER && before % HOLDER == 1 {
            // The lock orders this after the holder's look at the count.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Keeps new changes out and waits for those under way.
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.word.fetch_add(HOLDER, Ordering::Acquire);
        let mut sleeping = self.lock();
        while !self.word.load(Ordering::Acquire).is_multiple_of(HOLDER) {
            sleeping = self.changed.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
        Hold(self)
    }

    /// Keeps changes and other holders out and waits for those that are there.
    pub(crate) fn alone(&self) -> Alone<'_> {
        let solitude = self.solitude.lock().unwrap_or_else(PoisonError::into_inner);
        self.word.fetch_add(HOLDER, Ordering::Acquire);
        let mut sleeping = self.lock();
        // As a holder it keeps changes out, as a change other holders.
        let (mine, ok, relaxed) = (HOLDER + 1, Ordering::Acquire, Ordering::Relaxed);
        while self.word.compare_exchange(HOLDER, mine, ok, relaxed).is_err() {
            sleeping = self.changed.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
        Alone { gate: self, _solitude: solitude }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Passage<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.release(HOLDER);
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.gate.release(HOLDER + 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn nothing_changes_while_the_gate_is_held() {
        let gate = Gate::default();
        let (value, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _passage = gate.pass();
                        value.fetch_add(1, Ordering::Relaxed);
                        std::hint::spin_loop();
                        value.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _alone = gate.alone();
                        value.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        value.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..200 {
                let _one = gate.hold();
                let _two = gate.hold();
                let seen = value.load(Ordering::Relaxed);
                assert_eq!(seen % 2, 0);
                std::thread::yield_now();
                assert_eq!(value.load(Ordering::Relaxed), seen);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
