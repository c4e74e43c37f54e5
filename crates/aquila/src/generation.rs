//! Generations: which process made a cache or a mapping.
//!
//! A forked child has copies of all structures, and none of the mappings. The number of a process
//! does not tell the two apart: each may be the first process of a namespace. So the current
//! generation is a word that the kernel makes zero in a child (`MADV_WIPEONFORK`). What belongs to
//! another generation than the current one belongs to an ancestor. A child that makes a cache or a
//! mapping begins a generation of its own.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;

use crate::sys;

/// The number of a generation. Zero is none.
pub(crate) type Generation = u32;

/// Numbers that were given, in this process and in its ancestors.
static GIVEN: AtomicU32 = AtomicU32::new(0);

/// The word that is zero in a child.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// The current generation; zero if this process has made nothing yet.
pub(crate) fn current() -> Generation {
    let word = sys::shared_word(WORD.load(Ordering::Acquire));
    word.map_or(0, |word| word.load(Ordering::Acquire) as Generation)
}

/// The current generation, which begins now if there is none.
///
/// # Errors
/// There is no memory for the word.
pub(crate) fn begin() -> Result<Generation, Errno> {
    if WORD.load(Ordering::Acquire).is_null() {
        let word = sys::word_wiped_on_fork()?;
        // If another thread was first, a page stays unused.
        let none = std::ptr::null_mut();
        let _ = WORD.compare_exchange(none, word, Ordering::AcqRel, Ordering::Acquire);
    }
    if let Some(word) = sys::shared_word(WORD.load(Ordering::Acquire))
        && word.load(Ordering::Acquire) == 0
    {
        let next = u64::from(GIVEN.fetch_add(1, Ordering::AcqRel)) + 1;
        let _ = word.compare_exchange(0, next, Ordering::AcqRel, Ordering::Acquire);
    }
    Ok(current())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_generation() {
        let first = begin().unwrap();
        assert_ne!(first, 0);
        assert_eq!((begin().unwrap(), current()), (first, first));
    }
}
