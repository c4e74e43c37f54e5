//! The change gate: changes pass together, unless a thread holds it to see a store that stands
//! still.
//!
//! Changes only count themselves in one word; who finds the gate held waits on a condition
//! variable. Several may hold it at once, and one may ask to be alone: neither changes nor other
//! holders. Until there are versions of pages, this is what a snapshot is made of.
//!
//! A change that has waited for about a millisecond is overdue, and so is one that waits to be
//! alone: who then comes to hold the gate lets them go first. That is a courtesy with an end: a
//! holder may be waiting for the one who comes.
//!
//! `tests/gate_model.rs` checks this file on a scheduler that explores interleavings.

use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait, wait_briefly};

/// Holders are counted above the changes under way.
const HOLDER: u64 = 1 << 32;

/// For so many brief waits, of a millisecond each, those who come to hold the gate let changes that
/// are overdue go first.
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
            sleepers = wait_briefly(&self.changed, &self.sleepers, sleepers);
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
            sleepers = wait_briefly(&self.changed, &self.sleepers, sleepers);
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
            sleeping = wait(&self.changed, sleeping);
        }
        Hold(self)
    }

    /// As [`hold`](Self::hold), unless the changes under way do not end within so many waits of a
    /// millisecond.
    pub(crate) fn hold_within(&self, waits: u32) -> Option<Hold<'_>> {
        self.word.fetch_add(HOLDER, Ordering::Acquire);
        let hold = Hold(self);
        let is_alone = || self.word.load(Ordering::Acquire).is_multiple_of(HOLDER);
        let mut sleeping = self.lock();
        for _ in 0..waits {
            if is_alone() {
                break;
            }
            sleeping = wait_briefly(&self.changed, &self.sleepers, sleeping);
        }
        drop(sleeping);
        is_alone().then_some(hold)
    }

    /// Keeps changes and other holders out and waits for those that are there. Changes go on while
    /// it waits for holders.
    pub(crate) fn alone(&self) -> Alone<'_> {
        let solitude = lock(&self.solitude);
        let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        // As a holder it keeps changes out, as a change other holders.
        self.wait_until(|| self.enter(HOLDER));
        self.wait_until(|| self.word.compare_exchange(HOLDER, HOLDER + 1, ok, relaxed).is_ok());
        Alone { gate: self, _solitude: solitude }
    }

    fn lock(&self) -> MutexGuard<'_, Sleepers> {
        lock(&self.sleepers)
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
