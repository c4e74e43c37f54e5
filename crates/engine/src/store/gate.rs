//! The change gate: changes pass together, unless somebody holds it to see a store that stands
//! still.
//!
//! Changes only count themselves in one word; who finds the gate held waits on a condition
//! variable. Several may hold it at once, and one may ask to be alone: neither changes nor other
//! holders. Until there are versions of pages, this is what a snapshot is made of.
//!
//! A change that has waited for about a millisecond is overdue, and so is one that waits to be
//! alone: who then comes to hold the gate lets them go first. That is a courtesy with an end: a
//! holder may be waiting for the one who comes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Holders are counted above the changes under way.
const HOLDER: u64 = 1 << 32;

/// After so long in vain a change is overdue.
const OVERDUE: Duration = Duration::from_millis(1);

/// For so many times as long those who come to hold the gate let changes that are overdue go first.
const COURTESY: u32 = 100;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Changes under way in the low half, holders in the high half.
    word: AtomicU64,
    sleepers: Mutex<Sleepers>,
    changed: Condvar,
    /// Held by the one that is, or wants to be, alone: two would wait for each other.
    solitude: Mutex<()>,
}

/// Who waits.
#[derive(Debug, Default)]
struct Sleepers {
    /// Changes, and one who waits to be alone, that are overdue.
    overdue: u64,
    /// How many of those have gone on since the beginning.
    served: u64,
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

    /// Begins a change unless the gate is held.
    pub(crate) fn try_pass(&self) -> Option<Passage<'_>> {
        self.enter(1).then(|| Passage(self))
    }

    #[cold]
    fn pass_slow(&self) {
        self.leave();
        self.wait_until(|| self.enter(1));
    }

    /// Counts a change or a holder in, unless there is a holder.
    fn enter(&self, count: u64) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while word < HOLDER {
            let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.word.compare_exchange(word, word + count, ok, relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Waits until `done`, and is overdue after a while.
    fn wait_until(&self, mut done: impl FnMut() -> bool) {
        let mut sleepers = self.lock();
        let mut is_overdue = false;
        while !done() {
            let waited = self.changed.wait_timeout(sleepers, OVERDUE);
            sleepers = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !is_overdue {
                sleepers.overdue += 1;
                is_overdue = true;
            }
        }
        if is_overdue {
            sleepers.overdue -= 1;
            sleepers.served += 1;
            drop(sleepers);
            self.changed.notify_all();
        }
    }

    /// Lets those go first who are overdue now, for a while.
    fn give_way(&self) {
        let mut sleepers = self.lock();
        let enough = sleepers.served + sleepers.overdue;
        for _ in 0..COURTESY {
            if sleepers.overdue == 0 || sleepers.served >= enough {
                return;
            }
            let waited = self.changed.wait_timeout(sleepers, OVERDUE);
            sleepers = waited.unwrap_or_else(PoisonError::into_inner).0;
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
        self.give_way();
        self.word.fetch_add(HOLDER, Ordering::Acquire);
        let mut sleeping = self.lock();
        while !self.word.load(Ordering::Acquire).is_multiple_of(HOLDER) {
            sleeping = self.changed.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
        Hold(self)
    }

    /// As [`hold`](Self::hold), unless a change that is under way does not end in time.
    pub(crate) fn hold_within(&self, patience: Duration) -> Option<Hold<'_>> {
        let until = Instant::now() + patience;
        self.word.fetch_add(HOLDER, Ordering::Acquire);
        let hold = Hold(self);
        let mut sleeping = self.lock();
        while !self.word.load(Ordering::Acquire).is_multiple_of(HOLDER) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(sleeping);
                return None;
            }
            let waited = self.changed.wait_timeout(sleeping, left);
            sleeping = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(sleeping);
        Some(hold)
    }

    /// Keeps changes and other holders out and waits for those that are there. Changes go on while
    /// it waits for holders.
    pub(crate) fn alone(&self) -> Alone<'_> {
        let solitude = self.solitude.lock().unwrap_or_else(PoisonError::into_inner);
        let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        // As a holder it keeps changes out, as a change other holders.
        self.wait_until(|| self.enter(HOLDER));
        self.wait_until(|| self.word.compare_exchange(HOLDER, HOLDER + 1, ok, relaxed).is_ok());
        Alone { gate: self, _solitude: solitude }
    }

    fn lock(&self) -> MutexGuard<'_, Sleepers> {
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

    /// Two hold the gate in turn, and neither lets go before the other one has it, or has waited
    /// for two rounds in vain: without turns no change would ever pass.
    #[test]
    fn changes_pass_though_there_is_always_a_holder() {
        let gate = Gate::default();
        let (holds, passed) = (AtomicU64::new(0), AtomicBool::new(false));
        let rounds = 2000;
        for alone in [false, true] {
            holds.store(0, Ordering::Relaxed);
            passed.store(false, Ordering::Relaxed);
            let first = gate.hold();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while holds.load(Ordering::Relaxed) < rounds {
                            let hold = gate.hold();
                            let mine = holds.fetch_add(1, Ordering::Relaxed) + 1;
                            std::thread::sleep(OVERDUE / 3);
                            let patience = Instant::now() + 3 * OVERDUE;
                            while holds.load(Ordering::Relaxed) == mine && Instant::now() < patience
                            {
                                std::thread::yield_now();
                            }
                            drop(hold);
                            if passed.load(Ordering::Relaxed) {
                                return;
                            }
                        }
                    });
                }
                scope.spawn(|| {
                    if alone {
                        drop(gate.alone());
                    } else {
                        drop(gate.pass());
                    }
                    passed.store(true, Ordering::Relaxed);
                    assert!(holds.load(Ordering::Relaxed) < rounds, "it passed only at the end");
                });
                while holds.load(Ordering::Relaxed) < 4 {
                    std::thread::yield_now();
                }
                drop(first);
            });
        }
    }

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
