//! Mappings of the process' own cache, by the number that the table of mounts has of each.
//!
//! An owner ends in two steps. With its lock held, the table has the cache let go of the addresses,
//! unmaps them or puts the file there, and retires the owner. For that it waits for threads of the
//! cache at most, which never take the lock. Then the cache thread ends the owner.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum_aquila::{Advice, Mapping};

use crate::cache_thread;
use crate::lease::{self, Lease};
use crate::list::{List, Node};

/// A mapping of the cache. What it has ends in this order.
struct Owner {
    mapping: Mapping,
    /// The cache thread's descriptor of the file, and its lease.
    file: File,
    lease: Lease,
    /// The file's device and inode; `None` if the kernel does not say them.
    inode: Option<(u64, u64)>,
}

/// Those that no table has any more.
static RETIRED: List<Owner> = List::new();

/// All that have not ended. Only the cache thread uses it.
static ALL: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Gives a number to a mapping of a file with a lease, which lives until it is retired.
pub(crate) fn number_of(mapping: Mapping, (file, lease): (File, Lease)) -> usize {
    let inode = inode(&file);
    let node = Box::new(Node::new(Owner { mapping, file, lease, inode }));
    let number = Box::into_raw(node).expose_provenance();
    all().push(number);
    number
}

fn inode(file: &File) -> Option<(u64, u64)> {
    file.metadata().map(|data| (data.dev(), data.ino())).ok()
}

fn all() -> MutexGuard<'static, Vec<usize>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an owner has a lease of this file that is to end, or has ended: it may have pages from
/// before. The caller is the cache thread.
pub(crate) fn has_broken(file: &File) -> bool {
    let this = inode(file);
    // SAFETY: the cache thread has not ended them.
    let broken = |number: &usize| unsafe { owner(*number).inode == this && is_broken(*number) };
    this.is_none() || all().iter().any(broken)
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

/// Whether the lease of an owner's file is to end. The caller is a thread that the cache thread has
/// started.
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

/// Has the cache thread end an owner, which no table has any more, and whose addresses are no
/// longer its own.
///
/// # Safety
/// The owner is not retired.
pub(crate) unsafe fn retire(number: usize) {
    // SAFETY: the caller's promise.
    unsafe { RETIRED.add(pointer(number)) };
    cache_thread::wake();
}

/// Ends all owners that are retired. The caller is the cache thread.
pub(crate) fn end_retired() {
    for pointer in RETIRED.take() {
        all().retain(|number| *number != pointer.expose_provenance());
        // SAFETY: it was given away when it got its number, and is in no list any more.
        drop(unsafe { Box::from_raw(pointer) });
    }
}
