//! The synchronisation primitives of this crate, in one place.
//!
//! With the feature `model` they are shuttle's, whose scheduler explores interleavings (see
//! `tests/model.rs`); otherwise they are the standard library's. Counters and other statistics use
//! `std` directly: they take no part in the protocol.

use std::time::Duration;

#[cfg(feature = "model")]
pub(crate) use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread,
};

#[cfg(not(feature = "model"))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread,
};

/// Locks, whether or not a thread panicked while it held the lock: everything guarded by the
/// mutexes of this crate is valid between any two statements that change it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits on `condvar`; may return without a notification, so callers check their condition again.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// As [`wait`], but for `time` at most.
#[cfg(not(feature = "model"))]
pub(crate) fn wait_for<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, time).unwrap_or_else(|poisoned| poisoned.into_inner()).0
}

/// The model has no clock, so no time passes.
#[cfg(feature = "model")]
pub(crate) fn wait_for<'a, T>(
    _condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    _time: Duration,
) -> MutexGuard<'a, T> {
    guard
}

/// Waits on `condvar` for about a millisecond at most.
#[cfg(not(feature = "model"))]
pub(crate) fn wait_briefly<T>(condvar: &Condvar, guard: MutexGuard<'_, T>) {
    drop(wait_for(condvar, guard, Duration::from_millis(1)));
}

/// The model has no clock: a brief wait lets any other thread run.
#[cfg(feature = "model")]
pub(crate) fn wait_briefly<T>(_condvar: &Condvar, guard: MutexGuard<'_, T>) {
    drop(guard);
    thread::yield_now();
}

/// Looks again and again whether `done` holds, for some fifty microseconds. Returns whether it did.
#[cfg(not(feature = "model"))]
pub(crate) fn spin_until(mut done: impl FnMut() -> bool) -> bool {
    const LOOKS: u32 = 2000;
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        done()
    })
}

/// The model explores the sleep.
#[cfg(feature = "model")]
pub(crate) fn spin_until(_done: impl FnMut() -> bool) -> bool {
    false
}

/// A point at which the model may run another thread; nothing otherwise. Placed between the words
/// of a racy copy, so that the model sees torn reads. `yield_now` would make the thread the last in
/// the order of some schedules, which then never let it run on here.
#[inline(always)]
pub(crate) fn interleave() {
    #[cfg(feature = "model")]
    AtomicBool::new(false).load(Ordering::SeqCst);
}
