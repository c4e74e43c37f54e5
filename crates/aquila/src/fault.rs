//! Which cache a fault at an address belongs to.
#![allow(unsafe_code)]

use std::ptr;

use crate::mapped_places::{self, MappedPlace};
use crate::shared::Shared;

/// Calls a function with the cache, the place and the page of a file that an address belongs to.
/// The mapping stays meanwhile. Returns `None` if no open mapping has the address.
pub(crate) fn at<T>(address: usize, f: impl FnOnce(&Shared, &MappedPlace, u64) -> T) -> Option<T> {
    let (used, page) = mapped_places::at(address)?;
    let owner: *const Shared = ptr::with_exposed_provenance(used.place().mapped().owner);
    // SAFETY: a mapping keeps its cache alive, and closes its place before it lets go of it.
    Some(f(unsafe { &*owner }, used.place(), page))
}
