//! The change gate. Changes pass the gate together, unless a thread has frozen it to see a store
//! that does not change.
//!
//! A change only counts itself, in the stripe of its thread, and looks whether the gate is frozen.
//! A thread that freezes the gate says so first, and then looks at all stripes: either it sees the
//! change, or the change sees the freeze. A change that finds the gate frozen waits on a condition
//! variable. Several threads may freeze the gate at once. One thread may take it exclusively: then
//! there are neither changes nor freezes.
//!
//! A change that has waited for about a millisecond is overdue, and so is a thread that has waited
//! as long for exclusive use. A thread that wants to freeze the gate lets the overdue threads go
//! first. It does so for a limited time, because a thread that has frozen the gate may be waiting
//! for it.
//!
//! `tests/gate_model.rs` checks this file on a scheduler that explores interleavings.

use crate::sync::{
    AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, thread_number, wait, wait_briefly,
};

/// The number of stripes in which changes count themselves. Further threads share them.
const STRIPES: usize = if cfg!(test) { 2 } else { 16 };

/// Exclusive use, besides the number of freezes.
const EXCLUSIVE: u64 = 1 << 32;

/// A thread that wants to freeze the gate waits for overdue threads at most this many times, a
/// millisecond each.
const OVERDUE_WAITS: u32 = 100;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The number of freezes, and [`EXCLUSIVE`].
    frozen: AtomicU64,
    changes: [Stripe; STRIPES],
    waiters: Mutex<Waiters>,
    state_changed: Condvar,
    /// The thread that has, or wants, exclusive use holds this lock. Without it, two such threads
    /// would wait for each other.
    exclusive_turn: Mutex<()>,
}

/// The number of changes under way of some threads, in memory that threads of other stripes do not
/// use.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe(AtomicU64);

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
pub(crate) struct ChangePermit<'a> {
    gate: &'a Gate,
    stripe: &'a Stripe,
}

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
        let stripe = &self.changes[thread_number() % STRIPES];
        if !self.enter(stripe) {
            self.begin_change_slow(stripe);
        }
        ChangePermit { gate: self, stripe }
    }

    /// Begins a change, unless the gate is frozen.
    pub(crate) fn try_begin_change(&self) -> Option<ChangePermit<'_>> {
        let stripe = &self.changes[thread_number() % STRIPES];
        if self.enter(stripe) {
            return Some(ChangePermit { gate: self, stripe });
        }
        self.notify();
        None
    }

    #[cold]
    fn begin_change_slow(&self, stripe: &Stripe) {
        self.notify();
        // With the lock, so no thread waits because of a count that this takes back.
        self.wait_until(|| self.frozen.load(Ordering::SeqCst) == 0 && self.enter(stripe));
    }

    /// Counts a change, unless the gate is frozen. A thread that has frozen the gate may have seen
    /// the count meanwhile: then it has to be notified.
    #[inline]
    fn enter(&self, stripe: &Stripe) -> bool {
        stripe.0.fetch_add(1, Ordering::SeqCst);
        if self.frozen.load(Ordering::SeqCst) == 0 {
            return true;
        }
        stripe.0.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// Whether no change is under way, and no thread has exclusive use. The caller has frozen the
    /// gate, so no change begins after this has seen its stripe.
    fn is_quiet(&self) -> bool {
        self.frozen.load(Ordering::SeqCst) < EXCLUSIVE
            && self.changes.iter().all(|stripe| stripe.0.load(Ordering::SeqCst) == 0)
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
        self.frozen.fetch_sub(count, Ordering::SeqCst);
        self.notify();
    }

    #[inline]
    fn leave(&self, stripe: &Stripe) {
        stripe.0.fetch_sub(1, Ordering::SeqCst);
        if self.frozen.load(Ordering::SeqCst) != 0 {
            self.notify();
        }
    }

    /// Has waiting threads look again.
    #[cold]
    fn notify(&self) {
        // The lock orders the notification after the other thread's look.
        drop(self.lock());
        self.state_changed.notify_all();
    }

    /// Keeps new changes out and waits for the changes under way.
    pub(crate) fn freeze(&self) -> Freeze<'_> {
        self.let_overdue_go_first();
        self.frozen.fetch_add(1, Ordering::SeqCst);
        let mut waiters = self.lock();
        while !self.is_quiet() {
            waiters = wait(&self.state_changed, waiters);
        }
        Freeze(self)
    }

    /// As [`freeze`](Self::freeze), but gives up if the changes under way do not end within `waits`
    /// waits of a millisecond each.
    pub(crate) fn freeze_within(&self, waits: u32) -> Option<Freeze<'_>> {
        self.frozen.fetch_add(1, Ordering::SeqCst);
        let freeze = Freeze(self);
        let mut waiters = self.lock();
        let mut is_quiet = self.is_quiet();
        for _ in 0..waits {
            if is_quiet {
                break;
            }
            waiters = wait_briefly(&self.state_changed, &self.waiters, waiters);
            is_quiet = self.is_quiet();
        }
        drop(waiters);
        is_quiet.then_some(freeze)
    }

    /// Keeps changes and freezes out, and waits for those that exist. Changes go on while it waits
    /// for a freeze to end.
    pub(crate) fn exclusive(&self) -> Exclusive<'_> {
        let exclusive_turn = lock(&self.exclusive_turn);
        let replace = |old, new| {
            self.frozen.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        // The freeze keeps changes out, and `EXCLUSIVE` keeps freezes out.
        self.wait_until(|| replace(0, 1));
        self.wait_until(|| self.is_quiet() && replace(1, 1 + EXCLUSIVE));
        Exclusive { gate: self, _turn: exclusive_turn }
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        lock(&self.waiters)
    }

    /// The number of threads that are overdue now.
    #[cfg(test)]
    pub(crate) fn overdue(&self) -> u64 {
        self.lock().overdue
    }
}

impl Drop for ChangePermit<'_> {
    #[inline]
    fn drop(&mut self) {
        self.gate.leave(self.stripe);
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        self.0.release(1);
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.gate.release(1 + EXCLUSIVE);
    }
}
