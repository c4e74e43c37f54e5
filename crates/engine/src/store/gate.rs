//! The change gate. Changes pass the gate together, unless a thread has frozen it to see a store
//! that does not change.
//!
//! A change only counts itself in one word. A change that finds the gate frozen waits on a
//! condition variable. Several threads may freeze the gate at once. One thread may take it
//! exclusively: then there are neither changes nor freezes.
//!
//! A change that has waited for about a millisecond is overdue, and so is a thread that has waited
//! as long for exclusive use. A thread that wants to freeze the gate lets the overdue threads go
//! first. It does so for a limited time, because a thread that has frozen the gate may be waiting
//! for it.
//!
//! `tests/gate_model.rs` checks this file on a scheduler that explores interleavings.

use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait, wait_briefly};

/// One freeze in the gate's word. The changes under way are counted in the bits below.
const FREEZE: u64 = 1 << 32;

/// A thread that wants to freeze the gate waits for overdue threads at most this many times, a
/// millisecond each.
const OVERDUE_WAITS: u32 = 100;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The number of changes under way in the low half, the number of freezes in the high half.
    word: AtomicU64,
    waiters: Mutex<Waiters>,
    state_changed: Condvar,
    /// The thread that has, or wants, exclusive use holds this lock. Without it, two such threads
    /// would wait for each other.
    exclusive_turn: Mutex<()>,
}

/// The threads that wait.
#[derive(Debug, Default)]
struct Waiters {
    /// The number of overdue threads: changes, and a thread that wants exclusive use.
    overdue: u64,
    /// The number of overdue threads that have passed since the gate was created.
    served: u64,
}

/// The right to change the store. While this lives, no thread has frozen the gate.
#[derive(Debug)]
pub(crate) struct ChangePermit<'a>(&'a Gate);

/// While this lives, no change is under way.
#[derive(Debug)]
pub(crate) struct Freeze<'a>(&'a Gate);

/// While this lives, no change is under way and no thread has frozen the gate.
#[derive(Debug)]
pub(crate) struct Exclusive<'a> {
    gate: &'a Gate,
    _turn: MutexGuard<'a, ()>,
}

impl Gate {
    /// Begins a change. Waits while the gate is frozen.
    #[inline]
    pub(crate) fn begin_change(&self) -> ChangePermit<'_> {
        let before = self.word.fetch_add(1, Ordering::Acquire);
        if before >= FREEZE {
            self.begin_change_slow();
        }
        ChangePermit(self)
    }

    /// Begins a change, unless the gate is frozen.
    pub(crate) fn try_begin_change(&self) -> Option<ChangePermit<'_>> {
        self.enter(1).then(|| ChangePermit(self))
    }

    #[cold]
    fn begin_change_slow(&self) {
        self.leave();
        self.wait_until(|| self.enter(1));
    }

    /// Adds `count`, a change or a freeze, to the word, unless the gate is frozen.
    fn enter(&self, count: u64) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while word < FREEZE {
            let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.word.compare_exchange(word, word + count, ok, relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Waits until `done`. The thread is overdue after the first wait.
    fn wait_until(&self, mut done: impl FnMut() -> bool) {
        let mut waiters = self.lock();
        let mut is_overdue = false;
        while !done() {
            waiters = wait_briefly(&self.state_changed, &self.waiters, waiters);
            if !is_overdue {
                waiters.overdue += 1;
                is_overdue = true;
            }
        }
        if is_overdue {
            waiters.overdue -= 1;
            waiters.served += 1;
            drop(waiters);
            self.state_changed.notify_all();
        }
    }

    /// Lets the threads that are overdue now go first, for a limited time.
    fn let_overdue_go_first(&self) {
        let mut waiters = self.lock();
        let target = waiters.served + waiters.overdue;
        for _ in 0..OVERDUE_WAITS {
            if waiters.overdue == 0 || waiters.served >= target {
                return;
            }
            waiters = wait_briefly(&self.state_changed, &self.waiters, waiters);
        }
    }

    fn release(&self, count: u64) {
        self.word.fetch_sub(count, Ordering::Release);
        drop(self.lock());
        self.state_changed.notify_all();
    }

    fn leave(&self) {
        let before = self.word.fetch_sub(1, Ordering::Release);
        if before >= FREEZE && before % FREEZE == 1 {
            // The lock orders the notification after the freezing thread's look at the count.
            drop(self.lock());
            self.state_changed.notify_all();
        }
    }

    /// Keeps new changes out and waits for the changes under way.
    pub(crate) fn freeze(&self) -> Freeze<'_> {
        self.let_overdue_go_first();
        self.word.fetch_add(FREEZE, Ordering::Acquire);
        let mut waiters = self.lock();
        while !self.word.load(Ordering::Acquire).is_multiple_of(FREEZE) {
            waiters = wait(&self.state_changed, waiters);
        }
        Freeze(self)
    }

    /// As [`freeze`](Self::freeze), but gives up if the changes under way do not end within `waits`
    /// waits of a millisecond each.
    pub(crate) fn freeze_within(&self, waits: u32) -> Option<Freeze<'_>> {
        self.word.fetch_add(FREEZE, Ordering::Acquire);
        let freeze = Freeze(self);
        let is_quiet = || self.word.load(Ordering::Acquire).is_multiple_of(FREEZE);
        let mut waiters = self.lock();
        for _ in 0..waits {
            if is_quiet() {
                break;
            }
            waiters = wait_briefly(&self.state_changed, &self.waiters, waiters);
        }
        drop(waiters);
        is_quiet().then_some(freeze)
    }

    /// Keeps changes and freezes out, and waits for those that exist. Changes go on while it waits
    /// for a freeze to end.
    pub(crate) fn exclusive(&self) -> Exclusive<'_> {
        let exclusive_turn = lock(&self.exclusive_turn);
        let (ok, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        // The freeze keeps changes out, and the change keeps freezes out.
        self.wait_until(|| self.enter(FREEZE));
        self.wait_until(|| self.word.compare_exchange(FREEZE, FREEZE + 1, ok, relaxed).is_ok());
        Exclusive { gate: self, _turn: exclusive_turn }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        lock(&self.waiters)
    }
}

impl Drop for ChangePermit<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        self.0.release(FREEZE);
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.gate.release(FREEZE + 1);
    }
}
