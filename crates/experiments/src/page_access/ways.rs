//! The ways of reading eight bytes of a cached page. Each is a function that is not inlined, so
//! that its loop can be found in a profile.

#![allow(unsafe_code)]

use std::convert::Infallible;

use vellum_pool::{PageReader, PageRef, Pool, PoolError};

use super::forms::{FullWords, TwoBits, read_in_page};
use super::walk::Walk;
use super::{HashTable, Resident};

/// The pages to read.
#[derive(Clone, Copy, Debug)]
pub struct Ways<'a> {
    /// The pages, and the pool that has them.
    pub pages: &'a Resident,
    /// A table of them, for the ways that need one.
    pub table: Option<&'a HashTable>,
}

impl Ways<'_> {
    fn pool(&self) -> &Pool {
        self.pages.pool()
    }

    fn bits(&self) -> u32 {
        self.pages.chain().pages().trailing_zeros()
    }
}

/// Through a pointer, without any check: the reference.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn read(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    // SAFETY: a chain leads to pages of the chain; a walk's offsets are aligned and in the page.
    let read = |page, offset| Ok::<_, Infallible>(unsafe { ways.pages.plain(page, offset) });
    walk.follow(reads, read).map_err(|never| match never {})
}

/// After a look at the page's state, without validation.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn page_state(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    walk.follow(reads, |page, offset| {
        let guard = ways.pool().optimistic(PageRef::new(page, 1))?;
        Ok(guard.bytes().u64(offset).unwrap_or_default())
    })
}

/// The whole optimistic read: state, eight bytes, validation, and again if that fails.
#[inline(always)]
fn optimistic(pool: &Pool, page: u64, offset: usize) -> Result<u64, PoolError> {
    loop {
        let guard = pool.optimistic(PageRef::new(page, 1))?;
        let word = guard.bytes().u64(offset).unwrap_or_default();
        if guard.validate().is_ok() {
            return Ok(word);
        }
    }
}

/// The whole optimistic read.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn version_check(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    walk.follow(reads, |page, offset| optimistic(ways.pool(), page, offset))
}

/// Under a shared lock.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn shared_fix(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    walk.follow(reads, |page, offset| {
        let guard = ways.pool().fix_shared(PageRef::new(page, 1))?;
        Ok((&guard[..]).u64(offset).unwrap_or_default())
    })
}

/// Under an exclusive lock.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn exclusive_fix(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    walk.follow(reads, |page, offset| {
        let guard = ways.pool().fix_exclusive(PageRef::new(page, 1))?;
        Ok((&guard[..]).u64(offset).unwrap_or_default())
    })
}

#[inline(always)]
fn by_table(ways: &Ways<'_>, table: &HashTable, page: u64, offset: usize) -> u64 {
    // SAFETY: the table's frames are pages of the chain; the offset is a walk's.
    table.frame(page).map_or(page, |frame| unsafe { ways.pages.plain(frame, offset) })
}

/// Through the hash table; not a number without one.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn hash_table_read(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    let Some(table) = ways.table else { return Ok(f64::NAN) };
    let read = |page, offset| Ok::<_, Infallible>(by_table(ways, table, page, offset));
    walk.follow(reads, read).map_err(|never| match never {})
}

/// As [`read`], the reads independent. Needs a chain without a spread.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn scattered_read(walk: &mut Walk, reads: u64, ways: &Ways<'_>) -> Result<f64, PoolError> {
    // SAFETY: without a spread all pages from 0 to 2^bits - 1 are the chain's.
    let read = |page, offset| Ok::<_, Infallible>(unsafe { ways.pages.plain(page, offset) });
    walk.scatter(reads, ways.bits(), read).map_err(|never| match never {})
}

/// As [`version_check`], the reads independent. Needs a chain without a spread.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn scattered_version_check(
    walk: &mut Walk,
    reads: u64,
    ways: &Ways<'_>,
) -> Result<f64, PoolError> {
    walk.scatter(reads, ways.bits(), |page, offset| optimistic(ways.pool(), page, offset))
}

/// As [`hash_table_read`], the reads independent. Needs a chain without a spread.
///
/// # Errors
/// Those of the pool.
#[inline(never)]
pub fn scattered_hash_table(
    walk: &mut Walk,
    reads: u64,
    ways: &Ways<'_>,
) -> Result<f64, PoolError> {
    let Some(table) = ways.table else { return Ok(f64::NAN) };
    let read = |page, offset| Ok::<_, Infallible>(by_table(ways, table, page, offset));
    walk.scatter(reads, ways.bits(), read).map_err(|never| match never {})
}

/// A form of page states.
#[derive(Clone, Copy, Debug)]
pub enum Form<'a> {
    /// A word a page.
    Words(&'a FullWords),
    /// Two bits a page, the version in the page.
    TwoBits(&'a TwoBits),
    /// State and version in the page.
    InPage,
}

/// The whole optimistic read by a form of states; a loop of its own for each.
pub fn read_by(form: Form<'_>, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    match form {
        Form::Words(words) => words_read(words, walk, reads, pages),
        Form::TwoBits(bits) => two_bits_read(bits, walk, reads, pages),
        Form::InPage => in_page_read(walk, reads, pages),
    }
}

/// As [`read_by`], the reads independent. Needs a chain without a spread.
pub fn scattered_read_by(form: Form<'_>, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    match form {
        Form::Words(words) => scattered_words_read(words, walk, reads, pages),
        Form::TwoBits(bits) => scattered_two_bits_read(bits, walk, reads, pages),
        Form::InPage => scattered_in_page_read(walk, reads, pages),
    }
}

#[inline(never)]
fn words_read(words: &FullWords, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    // SAFETY: a chain leads to pages of the chain; a walk's offsets are aligned and in the page.
    let read = |page, offset| again(|| unsafe { words.read(pages, page, offset) });
    walk.follow(reads, read).unwrap_or_else(|never| match never {})
}

#[inline(never)]
fn two_bits_read(bits: &TwoBits, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    // SAFETY: as above.
    let read = |page, offset| again(|| unsafe { bits.read(pages, page, offset) });
    walk.follow(reads, read).unwrap_or_else(|never| match never {})
}

#[inline(never)]
fn in_page_read(walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    // SAFETY: as above.
    let read = |page, offset| again(|| unsafe { read_in_page(pages, page, offset) });
    walk.follow(reads, read).unwrap_or_else(|never| match never {})
}

#[inline(never)]
fn scattered_words_read(words: &FullWords, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    let bits = pages.chain().pages().trailing_zeros();
    // SAFETY: without a spread all pages from 0 to 2^bits - 1 are the chain's.
    let read = |page, offset| again(|| unsafe { words.read(pages, page, offset) });
    walk.scatter(reads, bits, read).unwrap_or_else(|never| match never {})
}

#[inline(never)]
fn scattered_two_bits_read(two: &TwoBits, walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    let bits = pages.chain().pages().trailing_zeros();
    // SAFETY: as above.
    let read = |page, offset| again(|| unsafe { two.read(pages, page, offset) });
    walk.scatter(reads, bits, read).unwrap_or_else(|never| match never {})
}

#[inline(never)]
fn scattered_in_page_read(walk: &mut Walk, reads: u64, pages: &Resident) -> f64 {
    let bits = pages.chain().pages().trailing_zeros();
    // SAFETY: as above.
    let read = |page, offset| again(|| unsafe { read_in_page(pages, page, offset) });
    walk.scatter(reads, bits, read).unwrap_or_else(|never| match never {})
}

/// Reads until a read was valid.
#[inline(always)]
fn again(read: impl Fn() -> Option<u64>) -> Result<u64, Infallible> {
    loop {
        if let Some(word) = read() {
            return Ok(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Chain;
    use super::*;

    #[test]
    fn all_ways_read_the_same() {
        let chain = Chain::new(7, 0);
        let pages = Resident::new(chain).unwrap();
        let table = HashTable::of(chain);
        let ways = Ways { pages: &pages, table: Some(&table) };
        let steps = 1000;
        let mut expected = Walk::new(chain.place(5));
        read(&mut expected, steps, &ways).unwrap();
        for way in [page_state, version_check, shared_fix, exclusive_fix, hash_table_read] {
            let mut walk = Walk::new(chain.place(5));
            way(&mut walk, steps, &ways).unwrap();
            assert_eq!(format!("{walk:?}"), format!("{expected:?}"));
        }
        let words = FullWords::new(chain.range(), false).unwrap();
        let bits = TwoBits::new(chain.range()).unwrap();
        for form in [Form::Words(&words), Form::TwoBits(&bits), Form::InPage] {
            let mut walk = Walk::new(chain.place(5));
            read_by(form, &mut walk, steps, &pages);
            assert_eq!(format!("{walk:?}"), format!("{expected:?}"), "{form:?}");
        }
    }
}
