//! The process's allocator, for engines that cache in allocated memory.
//!
//! glibc gives each thread its own heap. A block that a thread caches comes from its heap and
//! returns there, whichever thread evicts it, and only the end of a heap returns to the kernel. So
//! after some threads have started and ended, a full cache is in heaps that are half empty. If
//! memory is limited, such a cache needs one heap for all threads. The heap's lock is held for
//! nanoseconds; reading a block takes microseconds.

#![allow(unsafe_code)]

use std::ffi::c_int;

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    fn mallopt(parameter: c_int, value: c_int) -> c_int;
}

/// Other allocators have other heaps, and this module does not change them.
#[cfg(not(target_env = "gnu"))]
unsafe fn mallopt(_: c_int, _: c_int) -> c_int {
    1
}

/// From this size on, each allocation is a mapping, which returns to the kernel. This is glibc's
/// threshold; without this setting glibc raises it each time such an allocation is freed.
const MAPPED_FROM: c_int = 128 << 10;

/// Names of `malloc.h`.
const M_MMAP_THRESHOLD: c_int = -3;
const M_ARENA_MAX: c_int = -8;

/// Lets the threads that begin from now on share one heap, and large allocations go back to the
/// kernel. True if the allocator agrees.
pub fn share_one() -> bool {
    let set = |parameter, value| {
        // SAFETY: the function takes two numbers, and has a lock of its own against allocations
        // that go on meanwhile.
        unsafe { mallopt(parameter, value) == 1 }
    };
    set(M_ARENA_MAX, 1) & set(M_MMAP_THRESHOLD, MAPPED_FROM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allocator_knows_what_is_set() {
        assert!(share_one());
    }
}
