//! Mappings of the process' own cache, by the number that the table of mounts has of each.
//!
//! An owner ends in two steps. With its lock held, the table has the cache let go of the addresses,
//! unmaps them or puts the file there, and retires the owner. For that it waits for threads of the
//! cache at most, which never take the lock. Then a thread ends the owner, which frees memory.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use vellum_aquila::{Advice, Mapping};

use crate::system;

/// A mapping of the cache.
struct Owner {
    mapping: Mapping,
    /// The one that was retired before it.
    next: AtomicPtr<Owner>,
}

/// The last that was retired.
static RETIRED: AtomicPtr<Owner> = AtomicPtr::new(ptr::null_mut());

/// Gives a number to a mapping, which lives until it is retired.
pub(crate) fn number_of(mapping: Mapping) -> usize {
    let next = AtomicPtr::new(ptr::null_mut());
    Box::into_raw(Box::new(Owner { mapping, next })).expose_provenance()
}

fn pointer(number: usize) -> *mut Owner {
    ptr::with_exposed_provenance_mut(number)
}

/// Gives the advice of a `madvise` call on.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn advise(number: usize, advice: c_int) {
    let advice = match advice {
        libc::MADV_NORMAL => Advice::Normal,
        libc::MADV_RANDOM => Advice::Random,
        libc::MADV_SEQUENTIAL => Advice::Sequential,
        _ => return,
    };
    // SAFETY: the caller's promise.
    let owner = unsafe { &*pointer(number) };
    let _ = owner.mapping.advise(advice);
}

/// Has the cache let go of an owner's addresses. Returns whether it did.
///
/// # Safety
/// The owner is not retired, and no other thread uses it: the table's lock is held, or the table
/// does not have it.
pub(crate) unsafe fn detach(number: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { &mut *pointer(number) }.mapping.detach().is_ok()
}

/// Has the cache take the addresses back.
///
/// # Safety
/// As [`detach`].
pub(crate) unsafe fn reattach(number: usize) {
    // SAFETY: the caller's promise.
    unsafe { &mut *pointer(number) }.mapping.reattach();
}

/// Has an owner end soon, which no table has any more, and whose addresses are no longer its own.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn retire(number: usize) {
    let pointer = pointer(number);
    // SAFETY: the caller's promise.
    let owner = unsafe { &*pointer };
    let mut last = RETIRED.load(Ordering::Relaxed);
    loop {
        owner.next.store(last, Ordering::Relaxed);
        match RETIRED.compare_exchange_weak(last, pointer, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(newer) => last = newer,
        }
    }
}

/// Ends all owners that are retired.
pub(crate) fn end_retired() {
    if RETIRED.load(Ordering::Relaxed).is_null() {
        return;
    }
    // A handler of a signal could need what this thread has meanwhile.
    let signals = system::block_signals();
    let mut pointer = RETIRED.swap(ptr::null_mut(), Ordering::Acquire);
    while !pointer.is_null() {
        // SAFETY: a retired owner is in the list once, and this thread has taken the list.
        let owner = unsafe { Box::from_raw(pointer) };
        pointer = owner.next.load(Ordering::Relaxed);
    }
    system::set_signals(signals);
}
