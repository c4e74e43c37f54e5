//! The number of pages that the experiments use, and of their reads.

use anyhow::{Context as _, Result};
use vellum_pool::PAGE_SIZE;
use vellum_vm::memory_limit;

/// Pages that fit the first-level cache, `2^3`: 32 KiB.
pub const CACHED_BITS: u32 = 3;
/// Pages far beyond every cache, `2^21`: 8 GiB.
pub const LARGE_BITS: u32 = 21;

/// The most pages, `2^bits` up to `wanted`, of which there is memory for `copies`, with some to
/// spare.
///
/// # Errors
/// If the system does not tell how much there is.
pub fn affordable(wanted: u32, copies: u64) -> Result<u32> {
    let limit = memory_limit::effective()?.bytes.min(available_memory()?);
    let mut bits = wanted;
    while bits > CACHED_BITS && (copies * PAGE_SIZE as u64) << bits > limit / 10 * 8 {
        bits -= 1;
    }
    Ok(bits)
}

/// How much `2^bits` pages are.
pub fn show_pages(bits: u32) -> String {
    match bits + PAGE_SIZE.trailing_zeros() {
        bytes @ 30.. => format!("{} GiB", 1u64 << (bytes - 30)),
        bytes @ 20..30 => format!("{} MiB", 1u64 << (bytes - 20)),
        bytes => format!("{} KiB", 1u64 << (bytes - 10)),
    }
}

/// Bytes that can be used without swapping, by the kernel's estimate.
fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo has no MemAvailable in kB")? * 1024)
}

/// How many accesses to `2^bits` pages a sample has: about a tenth of a second of them.
pub fn accesses(bits: u32, quick: bool) -> u64 {
    match (bits <= CACHED_BITS, quick) {
        (true, true) => 8 << 20,
        (true, false) => 32 << 20,
        (false, true) => 1 << 18,
        (false, false) => 1 << 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_their_unit() {
        assert_eq!([3, 17, 21].map(show_pages), ["32 KiB", "512 MiB", "8 GiB"]);
    }
}
