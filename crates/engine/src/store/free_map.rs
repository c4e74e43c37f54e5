//! The free map in the file: a chain of pages that lists the unused ranges.
//!
//! A checkpoint writes it to places that are allocated for it and that the pool does not use.
//! Opening the store reads it.
//!
//! A free map page consists of the page header, the number of the next page (0: none), the number
//! of bytes that follow, and these bytes. Joined in order, the bytes of all pages are the output of
//! [`Space::encode`](vellum_pool::Space::encode). In a store that has a backup, what was written
//! since then follows (`changes.rs`).

use vellum_pool::{PAGE_SIZE, PageCopy, PageRef, Pool, Space, SpaceSnapshot};

use super::changes::{self, ChangesSince};
use crate::error::{Error, Result};
use crate::page::bytes::{get_u64, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};
use crate::planted::{StoreBug, is_planted};

const NEXT: usize = PAGE_HEADER;
const LEN: usize = PAGE_HEADER + 8;
const DATA: usize = PAGE_HEADER + 16;

/// The free map of one moment.
#[derive(Clone, Debug)]
pub(crate) struct FreeMap {
    pub space: SpaceSnapshot,
    /// Ranges that are free in the file, but not yet in memory.
    pub given_back: Vec<(u64, u64)>,
    /// The most bytes of the set of what was written since a backup, if that follows the map.
    pub changes_len: Option<usize>,
}

/// The free map that a file has.
pub(crate) struct FileMap {
    /// Its pages.
    pub places: Vec<PageRef>,
    /// The space that it describes.
    pub space: Space,
    /// What was written since a backup.
    pub changes: Option<ChangesSince>,
}

impl FileMap {
    /// A map of this space, without its pages and without a set.
    pub(crate) fn of_space(space: Space) -> FileMap {
        FileMap { places: Vec::new(), space, changes: None }
    }

    /// The process before has written these pages, or recovery will.
    pub(crate) fn note_written(&mut self, pages: PageRef) {
        if let Some(changes) = &mut self.changes
            && !is_planted(StoreBug::UnnotedRecord)
        {
            changes.written.insert(pages.id.0, pages.frames.into());
        }
    }
}

impl FreeMap {
    /// The number of pages that it takes.
    pub(crate) fn pages(&self, page_frames: u32) -> usize {
        let map = self.space.encoded_len_max(self.given_back.len());
        pages_for(map + self.changes_len.unwrap_or(0), page_frames)
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        self.space.encode(self.given_back)
    }
}

fn capacity(page_frames: u32) -> usize {
    page_frames as usize * PAGE_SIZE - DATA
}

fn pages_for(bytes: usize, page_frames: u32) -> usize {
    bytes.div_ceil(capacity(page_frames))
}

/// The sealed pages of an encoded map. The chain includes all places.
pub(crate) fn pages(map: &[u8], places: &[PageRef]) -> Vec<PageCopy> {
    let next = places.iter().skip(1).map(|next| next.id.0).chain([0]);
    let mut rest = map;
    let pages = places.iter().zip(next).map(|(place, next)| {
        let mut copy = PageCopy::zeroed(*place);
        let (piece, after) = rest.split_at(rest.len().min(capacity(place.frames)));
        rest = after;
        let (head, body) = copy.parts_mut();
        page::init(head, *place, PageKind::FreeMap, 0, 0);
        put_u64(head, NEXT, next);
        put_u64(head, LEN, piece.len() as u64);
        let (first, more) = piece.split_at(piece.len().min(PAGE_SIZE - DATA));
        head[DATA..DATA + first.len()].copy_from_slice(first);
        body[..more.len()].copy_from_slice(more);
        page::seal(head, body);
        copy
    });
    let pages = pages.collect();
    assert!(rest.is_empty(), "the map does not fit its places");
    pages
}

/// Reads the chain that begins at page `first`. Returns its pages and the encoded map.
pub(crate) fn read(pool: &Pool, first: u64, page_frames: u32) -> Result<(Vec<PageRef>, Vec<u8>)> {
    let (mut pages, mut bytes, mut next) = (Vec::new(), Vec::new(), first);
    while next != 0 {
        let place = PageRef::new(next, page_frames);
        let page = pool.fix_shared(place)?;
        let len = get_u64(&page, LEN);
        let kind = page::kind_number(&page);
        if kind != PageKind::FreeMap as u8 || len > capacity(page_frames) as u64 {
            return Err(Error::damaged(place, "it is not a page of the free map"));
        }
        // The longest map, with every other page free, takes 8 bytes for each page.
        let len_max = 32 + 8 * pool.file_pages() + changes::ENCODED_MAX as u64;
        if pages.len() as u64 > pool.file_pages() || bytes.len() as u64 > len_max {
            return Err(Error::damaged(place, "the pages of the free map form a cycle"));
        }
        bytes.extend_from_slice(&page[DATA..DATA + len as usize]);
        pages.push(place);
        next = get_u64(&page, NEXT);
    }
    Ok((pages, bytes))
}
