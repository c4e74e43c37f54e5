//! The sizes of the pool, the chunks and the store, from the sizes of the files.

use crate::files::file_store::chunk_bytes;
use crate::files::listing::Listing;

/// The smallest pool, unless the user asks for a smaller one.
const POOL_MIN: u64 = 512 << 10;

/// A page of the file.
const PAGE: u64 = 4096;

/// Sizes for one demonstration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Memory of the pool.
    pub pool_bytes: u64,
    /// Content of a chunk.
    pub chunk_bytes: u32,
    /// Free space that the store needs on its disk.
    pub disk_bytes: u64,
}

impl Plan {
    /// Sizes for a pool of `pool` bytes, or else of an eighth of the data.
    pub fn new(listing: &Listing, pool: Option<u64>) -> Self {
        let eighth = (listing.bytes / 8).next_multiple_of(PAGE);
        let pool_bytes = pool.unwrap_or(eighth.max(POOL_MIN));
        let chunk = chunk_bytes(pool_bytes);
        // Values of every size, each rounded up to pages; records; and a fifth more for pages that
        // are not full and for updates, which write a new value before they free the old one.
        let content: u64 =
            listing.files.iter().map(|found| found.stamp.size.next_multiple_of(PAGE)).sum();
        let records = listing.files.len() as u64 * 256;
        let disk_bytes = (content + records) / 5 * 6 + (16 << 20);
        Self { pool_bytes, chunk_bytes: chunk, disk_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_an_eighth_unless_it_is_given() {
        let listing = |bytes| Listing { bytes, ..Listing::default() };
        assert_eq!(Plan::new(&listing(1 << 30), None).pool_bytes, 1 << 27);
        assert_eq!(Plan::new(&listing(1000), None).pool_bytes, POOL_MIN);
        assert_eq!(Plan::new(&listing(1 << 30), Some(1 << 20)).pool_bytes, 1 << 20);
        let plan = Plan::new(&listing(1 << 30), Some(1 << 20));
        assert!(u64::from(plan.chunk_bytes) * 16 <= plan.pool_bytes);
    }
}
