//! The free map in the file: which page ranges are unused, as a chain of pages.
//!
//! It is written at a checkpoint, to pages that are allocated for it, and read when the store is
//! opened. The first change afterwards makes it worthless, and frees its pages.
//!
//! A free map page is the page header, the next page's number (0: none), the number of bytes that
//! follow, and these bytes, a piece of what [`Space::encode`](vellum_pool::Space::encode) gives.

use vellum_pool::{PAGE_SIZE, PageRef, Pool, Space};

use crate::error::{Error, Result};
use crate::page::bytes::{get_u64, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};
use crate::store::core::{Change, StoreCore};
use crate::tree::init;

const NEXT: usize = PAGE_HEADER;
const LEN: usize = PAGE_HEADER + 8;
const DATA: usize = PAGE_HEADER + 16;

fn capacity(page_frames: u32) -> usize {
    page_frames as usize * PAGE_SIZE - DATA
}

/// Allocates pages beside those that there are, for the map of free ranges as it will be then.
pub(crate) fn allocate(
    core: &StoreCore,
    change: &Change<'_>,
    pages: &mut Vec<PageRef>,
) -> Result<()> {
    loop {
        // Allocating takes from the ranges, so the map hardly grows by it.
        let len = core.pool.with_space(Space::encoded_len) + core.aside.encoded_len_max();
        let needed = len.div_ceil(capacity(core.page_frames));
        if needed <= pages.len() {
            return Ok(());
        }
        let mut page = core.pool.allocate(core.page_frames)?;
        pages.push(init(change, &mut page, PageKind::FreeMap, 0, 0));
    }
}

/// Writes the map of free ranges to pages from [`allocate`].
pub(crate) fn write(core: &StoreCore, _change: &Change<'_>, pages: &[PageRef]) -> Result<()> {
    let bytes = core.pool.with_space(|space| match core.aside.is_empty() {
        true => space.encode(),
        false => core.aside.give_back(space.clone()).encode(),
    });
    let mut pieces = bytes.chunks(capacity(core.page_frames));
    for (index, page) in pages.iter().enumerate() {
        let piece = pieces.next().unwrap_or_default();
        let mut guard = core.pool.fix_exclusive(*page)?;
        put_u64(&mut guard, NEXT, pages.get(index + 1).map_or(0, |next| next.id.0));
        put_u64(&mut guard, LEN, piece.len() as u64);
        guard[DATA..DATA + piece.len()].copy_from_slice(piece);
    }
    debug_assert!(pieces.next().is_none());
    Ok(())
}

/// Reads the chain that begins at page `first`: its pages, and the bytes of the map.
pub(crate) fn read(pool: &Pool, first: u64, page_frames: u32) -> Result<(Vec<PageRef>, Vec<u8>)> {
    let (mut pages, mut bytes, mut next) = (Vec::new(), Vec::new(), first);
    while next != 0 {
        let place = PageRef::new(next, page_frames);
        let page = pool.fix_shared(place)?;
        let len = get_u64(&page, LEN);
        let kind = page::kind_number(&page);
        if kind != PageKind::FreeMap as u8 || len > capacity(page_frames) as u64 {
            return Err(Error::damaged(place, "it is no page of the free map"));
        }
        // A map of the longest kind, every other page free, takes 8 bytes for a page.
        let most = 32 + 8 * pool.file_pages();
        if pages.len() as u64 > pool.file_pages() || bytes.len() as u64 > most {
            return Err(Error::damaged(place, "the free map runs in a circle"));
        }
        bytes.extend_from_slice(&page[DATA..DATA + len as usize]);
        pages.push(place);
        next = get_u64(&page, NEXT);
    }
    Ok((pages, bytes))
}
