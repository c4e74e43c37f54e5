//! The pages of a chain in a textbook's buffer manager, all of them in memory, and the ways of
//! reading them. Each way is a function that is not inlined, as in [`ways`](super::ways).

use std::io;

use anyhow::{Result, ensure};
use vellum_pool::PageReader as _;

use super::Chain;
use super::pattern_device::HEADER;
use super::textbook::{Error, Storage, Textbook};
use super::walk::Walk;

/// As [`PatternDevice`](super::pattern_device::PatternDevice): each page is full of the number of
/// the page to read next, except for its first word.
#[derive(Debug)]
pub struct PatternStorage(Chain);

impl Storage for PatternStorage {
    fn read(&self, page: u64, bytes: &mut [u8]) -> io::Result<()> {
        if page >= self.0.range() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let next = self.0.next(page).to_le_bytes();
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&next));
        bytes[..8].copy_from_slice(&HEADER.to_le_bytes());
        Ok(())
    }

    fn write(&self, _page: u64, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// See the module's documentation.
pub type TextbookPages = Textbook<PatternStorage>;

/// Brings in the pages of a chain, in another order than in the file, as in a manager that has
/// evicted many.
///
/// # Errors
/// No memory.
pub fn in_textbook(chain: Chain) -> Result<TextbookPages> {
    // As many frames as `Resident` has.
    let frames = chain.pages() + chain.pages() / 8 + 1024;
    let manager = Textbook::new(PatternStorage(chain), frames)?;
    for page in chain.starts().take(chain.pages() as usize) {
        manager.word(page, 0)?;
    }
    ensure!(manager.pages_read() == chain.pages(), "{} pages were read", manager.pages_read());
    Ok(manager)
}

/// Without a pin: the frame by the table, eight bytes, the frame's version.
///
/// # Errors
/// Those of the manager.
#[inline(never)]
pub fn optimistic_read(walk: &mut Walk, reads: u64, pages: &TextbookPages) -> Result<f64, Error> {
    walk.follow(reads, |page, offset| pages.word(page, offset))
}

/// With a pin for each access.
///
/// # Errors
/// Those of the manager.
#[inline(never)]
pub fn pinned_read(walk: &mut Walk, reads: u64, pages: &TextbookPages) -> Result<f64, Error> {
    walk.follow(reads, |page, offset| {
        let pinned = pages.pin(page)?;
        Ok((&pinned[..]).u64(offset).unwrap_or_default())
    })
}

/// As [`optimistic_read`], the reads independent. Needs a chain without a spread.
///
/// # Errors
/// Those of the manager.
#[inline(never)]
pub fn scattered_read(walk: &mut Walk, reads: u64, pages: &TextbookPages) -> Result<f64, Error> {
    let bits = pages.storage().0.pages().trailing_zeros();
    walk.scatter(reads, bits, |page, offset| pages.word(page, offset))
}

#[cfg(test)]
mod tests {
    use super::super::Resident;
    use super::super::ways::{self, Ways};
    use super::*;

    #[test]
    fn reads_what_the_pool_reads() {
        let chain = Chain::new(7, 0);
        let pages = Resident::new(chain).unwrap();
        let mut expected = Walk::new(chain.place(5));
        ways::read(&mut expected, 1000, &Ways { pages: &pages, table: None }).unwrap();
        let manager = in_textbook(chain).unwrap();
        for way in [optimistic_read, pinned_read] {
            let mut walk = Walk::new(chain.place(5));
            way(&mut walk, 1000, &manager).unwrap();
            assert_eq!(format!("{walk:?}"), format!("{expected:?}"));
        }
        assert_eq!(manager.word(3, 0).unwrap(), HEADER);
        assert!(manager.word(chain.range(), 0).is_err());
    }
}
