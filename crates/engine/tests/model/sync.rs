//! The primitives of `src/sync.rs` on shuttle's scheduler, for the model checks of this folder.
#![allow(dead_code, unused_imports)]

use std::hash::{Hash as _, Hasher as _};

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub(crate) use shuttle::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

/// A number for this thread. Some threads have the same one.
pub(crate) fn thread_number() -> usize {
    let mut hasher = std::hash::DefaultHasher::new();
    shuttle::thread::current().id().hash(&mut hasher);
    hasher.finish() as usize
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap()
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap()
}

/// No schedule depends on it.
pub(crate) fn prefetch_value<T>(_: &T) {}

pub(crate) fn lock_soon<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    lock(mutex)
}

pub(crate) fn read_soon<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    read(lock)
}

pub(crate) fn write_soon<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    write(lock)
}

pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap()
}

/// The model has no clock. A brief wait lets any other thread run.
pub(crate) fn wait_briefly<'a, T>(
    _condvar: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    drop(guard);
    shuttle::thread::yield_now();
    lock(mutex)
}
