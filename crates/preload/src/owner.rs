//! Mappings of the process' own cache, by the number that the table of mounts has of each.
//!
//! An owner ends in two steps. With its lock held, the table has the cache let go of the addresses,
//! unmaps them or puts the file there, and retires the owner. For that it waits for threads of the
//! cache at most, which never take the lock. Then the keeper ends the owner.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs::File;
use std::ptr;

use vellum_aquila::{Advice, Mapping};

use crate::keeper;
use crate::lease::{self, Lease};
use crate::list::{List, Node};

/// A mapping of the cache. What it has ends in this order.
struct Owner {
    mapping: Mapping,
    /// The keeper's descriptor of the file, and its lease.
    file: File,
    lease: Lease,
}

/// Those that no table has any more.
static RETIRED: List<Owner> = List::new();

/// Gives a number to a mapping of a file with a lease, which lives until it is retired.
pub(crate) fn number_of(mapping: Mapping, (file, lease): (File, Lease)) -> usize {
    Box::into_raw(Box::new(Node::new(Owner { mapping, file, lease }))).expose_provenance()
}

fn pointer(number: usize) -> *mut Node<Owner> {
    ptr::with_exposed_provenance_mut(number)
}

/// An owner, as long as no table loses it.
///
/// # Safety
/// The owner is not retired.
unsafe fn owner<'a>(number: usize) -> &'a Owner {
    // SAFETY: the caller's promise.
    unsafe { &(*pointer(number)).value }
}

/// The address of an owner's mapping.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn address(number: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { owner(number) }.mapping.as_ptr().addr()
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
    let _ = unsafe { owner(number) }.mapping.advise(advice);
}

/// Whether the lease of an owner's file is to end. The caller is a thread of the keeper's.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn is_broken(number: usize) -> bool {
    // SAFETY: the caller's promise.
    let owner = unsafe { owner(number) };
    owner.lease == Lease::Taken && lease::is_broken(&owner.file)
}

/// Has the cache let go of an owner's addresses. Returns whether it did.
///
/// # Safety
/// The owner is not retired, and no other thread uses it: the table's lock is held, or the table
/// does not have it.
pub(crate) unsafe fn detach(number: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { &mut (*pointer(number)).value }.mapping.detach().is_ok()
}

/// Has the cache take the addresses back.
///
/// # Safety
/// As [`detach`].
pub(crate) unsafe fn reattach(number: usize) {
    // SAFETY: the caller's promise.
    unsafe { &mut (*pointer(number)).value }.mapping.reattach();
}

/// Has the keeper end an owner, which no table has any more, and whose addresses are no longer its
/// own.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn retire(number: usize) {
    // SAFETY: the caller's promise.
    unsafe { RETIRED.add(pointer(number)) };
    keeper::ring();
}

/// Ends all owners that are retired. The caller is the keeper.
pub(crate) fn end_retired() {
    for pointer in RETIRED.take() {
        // SAFETY: it was given away when it got its number, and is in no list any more.
        drop(unsafe { Box::from_raw(pointer) });
    }
}
