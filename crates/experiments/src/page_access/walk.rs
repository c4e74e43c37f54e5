//! The loop around one access: follow the chain, or read at random, many times.

use std::hint::black_box;

use super::clock::thread_time;

/// The next word within a page: any but the first of each 16 bytes, all cache lines in turn.
#[inline(always)]
fn advance(offset: usize) -> usize {
    ((offset + 0x248) & 0xff8) | 8
}

/// The state of a walk.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    page: u64,
    offset: usize,
}

impl Walk {
    /// A walk that begins at a page of the chain.
    pub fn new(page: u64) -> Walk {
        Walk { page, offset: 8 }
    }

    /// Makes `reads` accesses and returns the nanoseconds of one. `read` returns the word of a page
    /// at an offset: the next page.
    ///
    /// # Errors
    /// The first of `read`.
    #[inline(always)]
    pub fn follow<E>(
        &mut self,
        reads: u64,
        mut read: impl FnMut(u64, usize) -> Result<u64, E>,
    ) -> Result<f64, E> {
        let Walk { mut page, mut offset } = *self;
        let start = thread_time();
        for _ in 0..reads {
            page = read(page, offset)?;
            offset = advance(offset);
        }
        let nanoseconds = (thread_time() - start).as_nanos() as f64;
        *self = Walk { page, offset };
        Ok(nanoseconds / reads as f64)
    }

    /// Makes `reads` accesses that do not wait for one another, to the pages from 0 to `2^bits - 1`
    /// at random, and returns the nanoseconds of one.
    ///
    /// # Errors
    /// The first of `read`.
    #[inline(always)]
    pub fn scatter<E>(
        &mut self,
        reads: u64,
        bits: u32,
        mut read: impl FnMut(u64, usize) -> Result<u64, E>,
    ) -> Result<f64, E> {
        let Walk { page: mut random, mut offset } = *self;
        let mut sum = 0u64;
        let start = thread_time();
        for _ in 0..reads {
            // The upper bits of a linear congruential generator: one multiplication.
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            sum = sum.wrapping_add(read(random >> (64 - bits), offset)?);
            offset = advance(offset);
        }
        let nanoseconds = (thread_time() - start).as_nanos() as f64;
        black_box(sum);
        *self = Walk { page: random, offset };
        Ok(nanoseconds / reads as f64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn offsets_reach_every_cache_line_and_spare_the_first_word() {
        let mut offset = 8;
        let mut lines = HashSet::new();
        for _ in 0..4096 {
            offset = advance(offset);
            assert!(offset % 8 == 0 && (8..4096).contains(&offset));
            lines.insert(offset / 64);
        }
        assert_eq!(lines.len(), 64);
    }

    #[test]
    fn a_walk_reads_what_the_last_read_said() {
        let mut seen = Vec::new();
        let mut walk = Walk::new(0);
        let read = |page, _| {
            seen.push(page);
            Ok::<_, ()>((page + 3) % 8)
        };
        walk.follow(4, read).unwrap();
        assert_eq!(seen, [0, 3, 6, 1]);
        assert_eq!(walk.page, 4);
    }
}
