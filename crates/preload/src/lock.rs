//! The lock of the table of mounts.
//!
//! What holds: while a thread has it, no signal comes to that thread, so no handler waits for what
//! its own thread holds; and it is held for a few system calls, never while the daemon is asked.
//! `fork` waits for it, so a child finds it free and the table whole. What is done under it neither
//! allocates nor panics.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::system;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Signals that were kept from a thread before it forked. The lock's holder uses it.
static BEFORE_FORK: AtomicU64 = AtomicU64::new(0);

/// Does something while nobody else does.
pub(crate) fn locked<T>(work: impl FnOnce() -> T) -> T {
    let signals = take();
    let result = work();
    give(signals);
    result
}

/// Has `fork` wait for the lock, from the first call on.
pub(crate) fn guard_forks() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the functions are there as long as the library is, which is never unloaded. If
        // there is no memory for it, a child may find the lock taken for good.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

extern "C" fn before_fork() {
    let signals = take();
    BEFORE_FORK.store(signals, Ordering::Relaxed);
}

extern "C" fn after_fork() {
    give(BEFORE_FORK.load(Ordering::Relaxed));
}

/// Takes it; returns the signals to be let through again.
fn take() -> u64 {
    let signals = system::block_signals();
    while TAKEN.swap(true, Ordering::Acquire) {
        system::give_way();
    }
    signals
}

fn give(signals: u64) {
    TAKEN.store(false, Ordering::Release);
    system::set_signals(signals);
}
