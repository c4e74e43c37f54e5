//! Reading a page's bytes: under a lock as a plain slice, optimistically as [`RacyBytes`].
//!
//! An optimistic reader races with writers by design, and discards what it has read if the version
//! changed. Rust's memory model has no such race. So all optimistic reads go through one type with
//! volatile loads, which the compiler neither invents, nor repeats, nor tears beyond a word, and no
//! reference to the contested bytes ever exists. Code that reads pages is generic over
//! [`PageReader`].

#![allow(unsafe_code)]

use std::cmp::Ordering;
use std::marker::PhantomData;

use crate::sync::interleave;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Prefetches a cache line. The address may be any: the CPU ignores addresses without memory.
#[inline(always)]
pub(crate) fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it does not fault, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Read-only access to the bytes of a page. Integers are little endian. Nothing panics: an access
/// outside the page is `None`, because an optimistic reader may have read any number as an offset.
pub trait PageReader: Copy {
    /// The page's length in bytes.
    fn len(&self) -> usize;
    /// Whether the page is empty, which it never is; clippy asks for the method.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The byte at `offset`.
    fn u8(&self, offset: usize) -> Option<u8>;
    /// Two bytes at `offset`, at any alignment.
    fn u16(&self, offset: usize) -> Option<u16>;
    /// Four bytes at `offset`, at any alignment.
    fn u32(&self, offset: usize) -> Option<u32>;
    /// Eight bytes at `offset`, at any alignment.
    fn u64(&self, offset: usize) -> Option<u64>;
    /// Copies `target.len()` bytes from `offset` on.
    fn copy_to(&self, offset: usize, target: &mut [u8]) -> Option<()>;
    /// Compares `len` bytes at `offset` with `key`, as slices of bytes compare.
    fn compare(&self, offset: usize, len: usize, key: &[u8]) -> Option<Ordering>;
    /// Prefetches `len` bytes at `offset` into the CPU's cache, for a caller that is about to read
    /// some of them. By default this does nothing.
    #[inline(always)]
    fn prefetch(&self, offset: usize, len: usize) {
        let _ = (offset, len);
    }
}

impl PageReader for &[u8] {
    #[inline(always)]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    #[inline(always)]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.get(offset).copied()
    }

    #[inline(always)]
    fn u16(&self, offset: usize) -> Option<u16> {
        Some(u16::from_le_bytes(*self.get(offset..)?.first_chunk()?))
    }

    #[inline(always)]
    fn u32(&self, offset: usize) -> Option<u32> {
        Some(u32::from_le_bytes(*self.get(offset..)?.first_chunk()?))
    }

    #[inline(always)]
    fn u64(&self, offset: usize) -> Option<u64> {
        Some(u64::from_le_bytes(*self.get(offset..)?.first_chunk()?))
    }

    #[inline(always)]
    fn copy_to(&self, offset: usize, target: &mut [u8]) -> Option<()> {
        target.copy_from_slice(self.get(offset..)?.get(..target.len())?);
        Some(())
    }

    #[inline(always)]
    fn compare(&self, offset: usize, len: usize, key: &[u8]) -> Option<Ordering> {
        Some(self.get(offset..)?.get(..len)?.cmp(key))
    }
}

/// The bytes of a page that other threads may be changing at this moment.
///
/// The reader trusts nothing that it has read before
/// [`OptimisticGuard::validate`](crate::OptimisticGuard::validate) has succeeded. The memory itself
/// always exists: a page that was evicted meanwhile reads as zeros, or as another page.
#[derive(Clone, Copy, Debug)]
pub struct RacyBytes<'a> {
    base: *const u8,
    len: usize,
    page: PhantomData<&'a ()>,
}

// SAFETY: it only reads, through volatile loads that are valid from any thread.
unsafe impl Send for RacyBytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for RacyBytes<'_> {}

/// An integer at any alignment: the volatile load of a packed struct is one instruction.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned<T>(T);

impl<'a> RacyBytes<'a> {
    /// # Safety
    /// `base..base + len` is mapped and readable for `'a`, whatever it contains.
    pub(crate) unsafe fn new(base: *const u8, len: usize) -> RacyBytes<'a> {
        RacyBytes { base, len, page: PhantomData }
    }

    #[inline(always)]
    fn load<T: Copy>(&self, offset: usize) -> Option<T> {
        let end = offset.checked_add(size_of::<T>())?;
        if end > self.len {
            return None;
        }
        // SAFETY: in bounds by the check above.
        Some(unsafe { self.load_within(offset) })
    }

    /// # Safety
    /// `offset + size_of::<T>()` is at most the length.
    #[inline(always)]
    unsafe fn load_within<T: Copy>(&self, offset: usize) -> T {
        interleave();
        // SAFETY: in bounds by this function's contract, mapped by that of `new`; `Unaligned` has
        // alignment 1, and T is an integer (this function is private), so any bits are a value.
        unsafe { self.base.add(offset).cast::<Unaligned<T>>().read_volatile() }.0
    }
}

impl PageReader for RacyBytes<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.load(offset)
    }

    #[inline(always)]
    fn u16(&self, offset: usize) -> Option<u16> {
        self.load(offset).map(u16::from_le)
    }

    #[inline(always)]
    fn u32(&self, offset: usize) -> Option<u32> {
        self.load(offset).map(u32::from_le)
    }

    #[inline(always)]
    fn u64(&self, offset: usize) -> Option<u64> {
        self.load(offset).map(u64::from_le)
    }

    #[inline]
    fn copy_to(&self, offset: usize, target: &mut [u8]) -> Option<()> {
        if offset.checked_add(target.len())? > self.len {
            return None;
        }
        let mut at = offset;
        let (lines, rest) = target.as_chunks_mut::<64>();
        for line in lines {
            // Eight words, with one check of the length.
            for (index, word) in line.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                // SAFETY: the target's length from `offset` on is in bounds, see above.
                let loaded: u64 = unsafe { self.load_within(at + 8 * index) };
                *word = u64::from_le(loaded).to_le_bytes();
            }
            at += 64;
        }
        let (words, rest) = rest.as_chunks_mut::<8>();
        for word in words {
            // SAFETY: as above.
            let loaded: u64 = unsafe { self.load_within(at) };
            *word = u64::from_le(loaded).to_le_bytes();
            at += 8;
        }
        for byte in rest {
            *byte = self.u8(at)?;
            at += 1;
        }
        Some(())
    }

    #[inline]
    fn compare(&self, offset: usize, len: usize, key: &[u8]) -> Option<Ordering> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let common = len.min(key.len());
        let (words, rest) = key[..common].as_chunks::<8>();
        let mut at = offset;
        for word in words {
            let ours = self.u64(at)?.swap_bytes();
            match ours.cmp(&u64::from_be_bytes(*word)) {
                Ordering::Equal => at += 8,
                differ => return Some(differ),
            }
        }
        for byte in rest {
            match self.u8(at)?.cmp(byte) {
                Ordering::Equal => at += 1,
                differ => return Some(differ),
            }
        }
        Some(len.cmp(&key.len()))
    }

    #[inline(always)]
    fn prefetch(&self, offset: usize, len: usize) {
        let lines = offset / LINE..offset.saturating_add(len).min(self.len).div_ceil(LINE);
        lines.for_each(|line| prefetch_line(self.base.wrapping_add(line * LINE)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn racy(bytes: &[u8]) -> RacyBytes<'_> {
        // SAFETY: a slice is mapped and readable for its lifetime.
        unsafe { RacyBytes::new(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn both_readers_agree_on_everything() {
        let page: Vec<u8> = (0..100u32).map(|n| (n * 37 % 251) as u8).collect();
        let (slice, racy) = (page.as_slice(), racy(&page));
        for offset in (0..110).chain([usize::MAX, usize::MAX - 7]) {
            assert_eq!(slice.u8(offset), PageReader::u8(&racy, offset));
            assert_eq!(slice.u16(offset), racy.u16(offset));
            assert_eq!(slice.u32(offset), racy.u32(offset));
            assert_eq!(slice.u64(offset), racy.u64(offset));
            for len in [0, 1, 7, 8, 9, 33] {
                let (mut one, mut two) = (vec![0; len], vec![0; len]);
                assert_eq!(slice.copy_to(offset, &mut one), racy.copy_to(offset, &mut two));
                assert_eq!(one, two);
            }
        }
    }

    #[test]
    fn comparing_is_comparing_slices() {
        let page = b"abcdefgh\0ijklmnop";
        for key in [&b""[..], b"a", b"abcdefgh", b"abcdefgh\0", b"abcdefgi", b"abcdefg\xff", b"b"] {
            for len in 0..=page.len() {
                let expected = page[..len].cmp(key);
                assert_eq!(page.as_slice().compare(0, len, key), Some(expected));
                assert_eq!(racy(page).compare(0, len, key), Some(expected), "{len} {key:?}");
            }
        }
        assert_eq!(racy(page).compare(1, page.len(), b"x"), None);
        assert_eq!(racy(page).compare(usize::MAX, 2, b"x"), None);
    }
}
