//! The change gate: changes pass together, unless somebody holds it to see a store that stands
//! still.
//!
//! Changes only count themselves in one word; who finds the gate held waits on a condition
//! variable. Several may hold it at once. Until there are versions of pages, this is what a
//! snapshot is made of.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Holders are counted above the changes under way.
const HOLDER: u64 = 1 << 32;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Changes under way in the low half, holders in the high half.
    word: AtomicU64,
    sleepers: Mutex<()>,
    changed: Condvar,
}

/// A change under way.
#[derive(Debug)]
pub(crate) struct Passage<'a>(&'a Gate);

/// While this lives no change is under way.
#[derive(Debug)]
pub(crate) struct Hold<'a>(&'a Gate);

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

    fn lock(&self) -> std::sync::MutexGuard<'_, ()> {
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
        self.0.word.fetch_sub(HOLDER, Ordering::Release);
        drop(self.0.lock());
        self.0.changed.notify_all();
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
