//! The part of a memory limit that an engine's own cache gets.

use crate::engine::Factory;

/// The memory of a process without its cache: program, stacks, buffers for I/O.
const FIXED: u64 = 8 << 20;

/// An engine needs one byte of memory for this many bytes of data, whatever its cache; see
/// [`limit_for_data`].
const GROWS: u64 = 128;

/// The smallest cache.
const LEAST: u64 = 1 << 20;

/// Bytes for the cache of an engine that runs within `limit` bytes.
///
/// Engines that bypass the page cache get four fifths of it, less 8 MiB. The remaining fifth is for
/// the memory that grows with the data: Vellum needs 1/256 of the stored bytes (a state word of 8
/// bytes and a page table entry of 8 bytes for each page of 4 KiB), so a fifth is enough for data
/// of more than thirty times the limit. Engines that rely on the page cache get an eighth: the
/// kernel counts the pages that it caches for them towards the same limit, and needs the rest.
pub fn cache_bytes(engine: &Factory, limit: u64) -> u64 {
    let share = if engine.direct { (limit / 5 * 4).saturating_sub(FIXED) } else { limit / 8 };
    share.max(LEAST)
}

/// The limit under which an engine that bypasses the page cache gets a cache of `bytes`.
pub fn limit_for(bytes: u64) -> u64 {
    ((bytes + FIXED) / 4 + 1) * 5
}

/// The limit for a cache of `bytes` and `data` bytes of keys and values, for which the fifth of
/// [`limit_for`] may be too little. Then the limit has a 128th of the data in addition to the
/// cache, because files are up to twice as large.
pub fn limit_for_data(bytes: u64, data: u64) -> u64 {
    limit_for(bytes).max(bytes + FIXED + data / GROWS)
}

/// The largest pool for Vellum within `limit` bytes, with `data` bytes of keys and values. Pages
/// never exceed the pool, so it needs no fifth for memory that an allocator keeps. The pool is the
/// limit less a 128th of the data and 16 MiB, because the kernel's memory for the process counts as
/// well (with 8 MiB the kernel killed a process that wrote much).
pub fn pool_for(limit: u64, data: u64) -> u64 {
    limit.saturating_sub(2 * FIXED + data / GROWS).max(LEAST)
}

/// The largest pool for Vellum with transactions where there is room for a pool of `pool` bytes.
/// The old values that transactions keep for each other may take an eighth of the pool, and at
/// least 16 MiB.
pub fn pool_with_old_values(pool: u64) -> u64 {
    pool.saturating_sub((pool / 9).max(16 << 20)).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::VELLUM;

    #[test]
    fn the_limit_gives_the_cache_that_it_was_made_for() {
        for bytes in [LEAST, 100 << 20, 4 << 30] {
            let cache = cache_bytes(&VELLUM, limit_for(bytes));
            assert!((bytes..bytes + 64).contains(&cache), "{cache}, not {bytes}");
        }
        assert_eq!(cache_bytes(&Factory { direct: false, ..VELLUM }, 256 << 20), 32 << 20);
        assert_eq!(cache_bytes(&VELLUM, 4 << 20), LEAST);
    }

    #[test]
    fn a_pool_and_what_comes_with_it_take_the_limit() {
        let (limit, data) = (128 << 20, 1280 << 20);
        let pool = pool_for(limit, data);
        assert_eq!(pool + 2 * FIXED + 2 * data / 4096 * 16, limit);
        assert_eq!(pool_for(4 << 20, data), LEAST);
        let smaller = pool_with_old_values(900 << 20);
        assert_eq!((smaller, smaller + smaller / 8), (800 << 20, 900 << 20));
        assert_eq!(pool_with_old_values(90 << 20), 74 << 20);
        assert_eq!(pool_with_old_values(LEAST), LEAST);
    }

    #[test]
    fn much_data_raises_the_limit() {
        let pool = 64 << 20;
        assert_eq!(limit_for_data(pool, 30 * pool), limit_for(pool));
        for data in [40 * pool, 64 * pool, 1 << 40] {
            // A state word and a page table entry for each page of files that are twice as large.
            let needed = pool + FIXED + 2 * data / 4096 * 16;
            assert_eq!(limit_for_data(pool, data), needed);
            assert!(needed > limit_for(pool));
        }
    }
}
