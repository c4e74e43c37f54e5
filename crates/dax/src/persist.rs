//! Making stores durable without a system call: writing back the CPU's caches, and stores past
//! them.
//!
//! Bytes are durable once their cache lines are written back to persistent memory and a fence has
//! followed. That holds for memory whose place in its file is durable
//! ([`Durability::Flushed`](crate::Durability::Flushed)).
#![allow(unsafe_code)]

/// How this CPU writes cache lines back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// `clwb`: the line stays in the cache.
    Clwb,
    /// `clflushopt`: the line leaves the cache; several lines at a time.
    Clflushopt,
    /// `clflush`: the line leaves the cache; one line after the other.
    Clflush,
    /// This architecture has no such instruction here; a mapping uses `msync` instead.
    None,
}

impl Flush {
    /// Its name, which commands print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
            Self::None => "none",
        }
    }

    /// The way of this CPU.
    pub fn of_this_cpu() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::sync::OnceLock;
            static FOUND: OnceLock<Flush> = OnceLock::new();
            *FOUND.get_or_init(|| {
                // Bits of leaf 7.
                let found = std::arch::x86_64::__cpuid_count(7, 0).ebx;
                match found {
                    found if found & (1 << 24) != 0 => Self::Clwb,
                    found if found & (1 << 23) != 0 => Self::Clflushopt,
                    _ => Self::Clflush,
                }
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::None
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Writes back the cache lines of a range, and waits until that is ordered before what follows.
///
/// # Safety
/// The range is mapped.
pub unsafe fn flush(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let how = Flush::of_this_cpu();
        let mut at = start.addr() & !(LINE - 1);
        while at < start.addr() + bytes {
            let line = start.with_addr(at);
            // SAFETY: the instructions change no memory; the line is in a page that is mapped.
            unsafe {
                match how {
                    Flush::Clwb => std::arch::asm!("clwb [{}]", in(reg) line, options(nostack)),
                    Flush::Clflushopt => {
                        std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack));
                    }
                    _ => std::arch::asm!("clflush [{}]", in(reg) line, options(nostack)),
                }
            }
            at += LINE;
        }
        fence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes, LINE);
}

/// Copies bytes by stores that go past the caches, where they are whole words, and makes all of
/// them durable. Of large copies that is the fastest way (DaxVM, section V.B).
///
/// # Safety
/// `to` may be written for as many bytes as `from` has, and they do not overlap. A reference to
/// them does not exist in this process.
pub unsafe fn copy_past_caches(from: &[u8], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; each function is called on a CPU that has its instructions.
    unsafe {
        if is_x86_feature_detected!("avx512f") {
            by_lines(from, to, |from, to| stream_line_512(from, to));
        } else {
            by_lines(from, to, |from, to| stream_line_64(from, to));
        }
        fence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        crate::sys::copy(from.as_ptr(), to, from.len());
    }
}

/// Copies whole cache lines by `stream`, and what lies before and after them through the cache.
///
/// # Safety
/// As [`copy_past_caches`]; `stream` copies a line.
#[cfg(target_arch = "x86_64")]
unsafe fn by_lines(from: &[u8], to: *mut u8, stream: impl Fn(*const u8, *mut u8)) {
    let head = (to.addr().next_multiple_of(LINE) - to.addr()).min(from.len());
    let tail = (from.len() - head) % LINE;
    let middle = from.len() - head - tail;
    for at in (head..head + middle).step_by(LINE) {
        stream(from[at..].as_ptr(), to.wrapping_add(at));
    }
    for (at, length) in [(0, head), (head + middle, tail)] {
        if length > 0 {
            // SAFETY: the caller's promise.
            unsafe {
                crate::sys::copy(from[at..].as_ptr(), to.add(at), length);
                flush(to.add(at), length);
            }
        }
    }
}

/// # Safety
/// A line may be read and written there; `to` is aligned; the CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_line_512(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    // SAFETY: the caller's promise.
    unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast())) };
}

/// # Safety
/// A line may be read and written there, and `to` is aligned.
#[cfg(target_arch = "x86_64")]
unsafe fn stream_line_64(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::_mm_stream_si64;
    for word in 0..LINE / 8 {
        // SAFETY: the caller's promise.
        unsafe {
            let value = from.cast::<i64>().add(word).read_unaligned();
            _mm_stream_si64(to.cast::<i64>().add(word), value);
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: the instruction only orders stores.
    unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_all_lengths_and_alignments_are_whole() {
        let from: Vec<u8> = (0..400_u32).map(|at| at as u8).collect();
        for start in 0..70 {
            for length in (0..5).chain(60..70).chain([127, 128, 200, 256]) {
                let mut to = vec![255_u8; 400];
                // SAFETY: the range is within the vector.
                unsafe { copy_past_caches(&from[3..3 + length], to[start..].as_mut_ptr()) };
                assert_eq!(to[start..start + length], from[3..3 + length]);
                assert!(to[..start].iter().chain(&to[start + length..]).all(|byte| *byte == 255));
            }
        }
    }

    #[test]
    fn flushing_changes_nothing() {
        let bytes = vec![7_u8; 1_000];
        // SAFETY: the range is within the vector.
        unsafe { flush(bytes[13..].as_ptr(), 500) };
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
}
