//! The synchronisation primitives of this crate, in one place.
//!
//! With the feature `model` they are shuttle's, whose scheduler explores interleavings (see
//! `tests/model.rs`); otherwise they are the standard library's.

use std::time::Instant;

#[cfg(feature = "model")]
pub(crate) use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

#[cfg(not(feature = "model"))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
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

/// As [`wait`], but not for longer than until then. Models, which have no time, do not call this.
pub(crate) fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    then: Instant,
) -> MutexGuard<'a, T> {
    let left = then.saturating_duration_since(Instant::now());
    condvar.wait_timeout(guard, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
}

/// Lets other threads run while this one waits for a word that one of them is about to change.
/// `tries` is how often the caller has looked already.
pub(crate) fn give_way(tries: u32) {
    if cfg!(not(feature = "model")) && tries < 64 {
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

/// A point at which the model may run another thread; nothing otherwise. `yield_now` would make the
/// thread the last in the order of some schedules, which then never let it run on here.
#[inline(always)]
pub(crate) fn interleave() {
    #[cfg(feature = "model")]
    AtomicBool::new(false).load(Ordering::SeqCst);
}
