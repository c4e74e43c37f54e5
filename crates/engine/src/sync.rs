//! The synchronisation primitives of the gate, of group commits and of versions.
//! `tests/gate_model.rs` and `tests/versions_model.rs` compile these with other primitives of the
//! same names, whose scheduler explores interleavings.

use std::sync::PoisonError;
use std::sync::atomic::AtomicUsize;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

pub(crate) use vellum_pool::prefetch_value;

/// Numbers of threads, from 0 on.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
}

/// The number of this thread.
pub(crate) fn thread_number() -> usize {
    NUMBER.with(|number| *number)
}

/// Locks the mutex, even if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So often a thread tries a lock that others hold for less than a microsecond, before it sleeps.
const TRIES: u32 = 1000;

/// Tries a lock again and again, for a while. A thread that sleeps takes longer to wake up than to
/// wait.
fn try_soon<G>(attempt: impl Fn() -> Option<G>) -> Option<G> {
    (0..TRIES).find_map(|_| {
        attempt().or_else(|| {
            std::hint::spin_loop();
            None
        })
    })
}

/// As [`lock`], for a mutex that no thread holds for long.
pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    try_soon(|| mutex.try_lock().ok()).unwrap_or_else(|| lock(mutex))
}

/// As [`read`], for a lock that no thread holds for long.
pub(crate) fn read_soon<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    try_soon(|| lock.try_read().ok()).unwrap_or_else(|| read(lock))
}

/// As [`write`], for a lock that no thread holds for long.
pub(crate) fn write_soon<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    try_soon(|| lock.try_write().ok()).unwrap_or_else(|| write(lock))
}

/// Locks the lock with other readers, even if a thread panicked while it held the lock.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the lock alone, even if a thread panicked while it held the lock.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification. It may return without one.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// As [`wait`], for a millisecond at most.
pub(crate) fn wait_briefly<'a, T>(
    condvar: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    let waited = condvar.wait_timeout(guard, Duration::from_millis(1));
    waited.unwrap_or_else(PoisonError::into_inner).0
}
