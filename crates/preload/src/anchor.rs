//! Anchors: for each mount a page of its file, mapped with the program's own arguments. It can
//! become a mapping of the file in the mount's place.
//!
//! Anchors lie in memory that the library reserves when it is loaded, before the program has any.
//! If the kernel chose their addresses, an anchor could lie in a hole that the program has made in
//! a mapping of its own, and the program may unmap all of that mapping.
//!
//! Invariants: all functions are called with the table's lock held. A place that is in `FREE` is
//! reserved. One that is not, and has no anchor, may be another's memory, because it was not
//! reserved for a moment: the library leaves it alone for good.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use vellum_interpose::Request;

use crate::system::{self, PAGE};

/// The most anchors.
pub(crate) const MOST: usize = 512;

/// Where the first place is; 0 if there are no places.
static START: AtomicUsize = AtomicUsize::new(0);

/// A bit for each place that is reserved, and has no anchor.
static FREE: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Reserves the places.
pub(crate) fn reserve_places() {
    // SAFETY: nothing is replaced, and only this module knows the addresses.
    if let Some(start) = unsafe { system::reserve_any(MOST * PAGE) } {
        START.store(start, Ordering::Relaxed);
        FREE.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }
}

/// Maps the anchor of a mount, which a request is for. `None` if there is no place, or if the
/// kernel refuses.
pub(crate) fn map(request: &Request) -> Option<usize> {
    let (at, word) = FREE.iter().enumerate().find(|(_, word)| word.load(Ordering::Relaxed) != 0)?;
    let bit = word.load(Ordering::Relaxed).trailing_zeros() as usize;
    word.fetch_and(!(1 << bit), Ordering::Relaxed);
    let place = START.load(Ordering::Relaxed) + (at * 64 + bit) * PAGE;
    // It is needed only for its rights, its kind and its file, not for its contents.
    let flags = request.flags & !libc::MAP_POPULATE | libc::MAP_FIXED;
    let page = Request { length: PAGE, flags, ..*request };
    // SAFETY: the place is reserved, and has no anchor.
    if unsafe { system::map(place, &page) }.is_some() {
        return Some(place);
    }
    // The kernel may have taken the reservation away. If it has not, the place is not used again.
    reserve_again(place);
    None
}

/// Unmaps an anchor.
///
/// # Safety
/// It must be one.
pub(crate) unsafe fn unmap(anchor: usize) {
    // SAFETY: the caller's promise: it is not another's memory.
    if unsafe { system::reserve_over(&(anchor..anchor + PAGE)) } {
        set_free(anchor);
    }
}

/// Reserves a place whose anchor has moved away. Returns false if something is there: the anchor,
/// or another's memory.
pub(crate) fn reserve_again(place: usize) -> bool {
    // SAFETY: nothing is replaced, and only this module knows the address.
    let is_reserved = unsafe { system::reserve(&(place..place + PAGE)) };
    if is_reserved {
        set_free(place);
    }
    is_reserved
}

fn set_free(place: usize) {
    let number = (place - START.load(Ordering::Relaxed)) / PAGE;
    FREE[number / 64].fetch_or(1 << (number % 64), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use vellum_testing::own_process;

    use super::*;

    #[test]
    fn places_are_used_again_unless_another_has_them() {
        if !own_process::entered("anchor::tests::places_are_used_again_unless_another_has_them") {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (rights, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let request = Request { length: 9, rights, flags, file: file.as_raw_fd(), offset: 0 };
        assert_eq!(map(&request), None, "nothing is reserved");
        reserve_places();
        let all: Vec<usize> = std::iter::from_fn(|| map(&request)).collect();
        assert_eq!(all.len(), MOST);
        // SAFETY: they are anchors, and no code uses them.
        unsafe {
            unmap(all[70]);
            unmap(all[511]);
            assert_eq!((map(&request), map(&request)), (Some(all[70]), Some(all[511])));
            // The anchor has moved away, and another's memory is in its place.
            let place = all[70]..all[70] + PAGE;
            assert_eq!(system::unmap(&place), 0);
            assert!(system::reserve(&place));
            assert!(!reserve_again(place.start));
            assert_eq!(map(&request), None);
            assert_eq!(system::unmap(&place), 0);
            assert!(reserve_again(place.start) && !reserve_again(all[71]));
        }
        assert_eq!(map(&request), Some(all[70]));
    }
}
