//! Pages that are redone after the opening: when they are first read, or by a thread of the store.
//!
//! Recovery reads the log once. For a page for which it has no memory, it notes where the page's
//! records are. Such a page is *pending*. When the pool first reads it, the page is made from these
//! records, and becomes a dirty page, as those that recovery has redone. The file's contents do not
//! matter: the first of the records has the page's image.
//!
//! The pages that are pending only become fewer. The log is not trimmed before none is left
//! (`store/late_redo.rs`), so their records stay. A crash before that is followed by a recovery
//! from the same place in the log.

use std::collections::BTreeMap;
use std::iter;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_log::{Log, Lsn};
use vellum_pool::{PAGE_SIZE, PageRef};

use super::by_page::ByPage;
use super::page::redo;
use super::record::GroupRecord;
use super::record_places::{PlaceIndex, Places};
use super::redoer::bad;
use crate::error::Result;
use crate::page;
use crate::sync::lock;

/// A scan goes on over so many bytes that no page needs, rather than that another one begins.
const GAP: u64 = 64 << 10;

/// A page that is made.
struct Making<'a> {
    places: Arc<Places>,
    bytes: &'a mut [u8],
    has_image: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct PendingPages {
    page_frames: u32,
    /// Recovery has read the records before this. No later one has changes of a pending page.
    end: Lsn,
    /// So many pages are made together.
    together: usize,
    /// The number of pending pages.
    left: AtomicUsize,
    known: Mutex<Known>,
    /// Held by the thread that makes pages that no reader has asked for.
    making: Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    pages: BTreeMap<u64, Arc<Places>>,
    /// Pages that are made, and that are not in the pool yet.
    made: ByPage<Box<[u8]>>,
}

impl PendingPages {
    /// No pages.
    pub(super) fn none() -> PendingPages {
        PendingPages::new(1, Lsn(0), 0, iter::empty())
    }

    /// The pages of these lists, of which the log has no record from `end` on. Those that are made
    /// together have so many bytes.
    pub(super) fn new(
        page_frames: u32,
        end: Lsn,
        bytes: usize,
        lists: impl Iterator<Item = PlaceIndex>,
    ) -> PendingPages {
        let pages: BTreeMap<_, _> = lists.flat_map(PlaceIndex::into_places).collect();
        PendingPages {
            page_frames,
            end,
            together: (bytes / (page_frames as usize * PAGE_SIZE)).max(1),
            left: AtomicUsize::new(pages.len()),
            known: Mutex::new(Known { pages, made: ByPage::default() }),
            making: Mutex::default(),
        }
    }

    /// The number of pages that are pending.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    /// Whether a page is pending.
    pub(crate) fn has(&self, page: PageRef) -> bool {
        let may_be = self.left() > 0 && page.frames == self.page_frames;
        may_be && lock(&self.known).pages.contains_key(&page.id.0)
    }

    /// A page, or a range of pages, was freed or is in the pool.
    pub(crate) fn forget(&self, range: PageRef) {
        if self.left() == 0 {
            return;
        }
        let mut known = lock(&self.known);
        let first = (range.id.0 + 1).saturating_sub(self.page_frames.into());
        let gone = known.pages.range(first..range.id.0 + u64::from(range.frames));
        let gone: Vec<u64> = gone.map(|(page, _)| *page).collect();
        for page in &gone {
            known.pages.remove(page);
            known.made.remove(page);
        }
        self.left.fetch_sub(gone.len(), Ordering::Release);
    }

    /// Waits until no other thread makes pages that no reader has asked for, and keeps others from
    /// it until the result is dropped.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.making)
    }

    /// Makes a page that is pending. Returns false if it is not.
    ///
    /// # Errors
    /// What the log said; a record that does not fit its page.
    pub(super) fn make(
        &self,
        log: &Log,
        begin: u64,
        page: PageRef,
        bytes: &mut [u8],
    ) -> Result<bool> {
        let mut known = lock(&self.known);
        if let Some(made) = known.made.remove(&page.id.0) {
            bytes.copy_from_slice(&made);
            return Ok(true);
        }
        let Some(places) = known.pages.get(&page.id.0).cloned() else { return Ok(false) };
        drop(known);
        let mut making = ByPage::default();
        making.insert(page.id.0, Making { places, bytes, has_image: false });
        self.redo(log, begin, &mut making)?;
        Ok(making.values().all(|made| made.has_image))
    }

    /// Makes the next pages, for which the pool will ask next. Returns them.
    ///
    /// # Errors
    /// As [`make`](Self::make).
    pub(super) fn make_some(
        &self,
        _turn: &MutexGuard<'_, ()>,
        log: &Log,
        begin: u64,
    ) -> Result<Vec<PageRef>> {
        let next: Vec<_> = {
            let known = lock(&self.known);
            let next = known.pages.iter().take(self.together);
            next.map(|(page, places)| (*page, places.clone())).collect()
        };
        let page_bytes = self.page_frames as usize * PAGE_SIZE;
        let mut memory: Vec<Box<[u8]>> = Vec::new();
        memory.resize_with(next.len(), || vec![0; page_bytes].into());
        let mut making = ByPage::default();
        for ((page, places), bytes) in next.iter().zip(&mut memory) {
            let places = places.clone();
            making.insert(*page, Making { places, bytes, has_image: false });
        }
        self.redo(log, begin, &mut making)?;
        let has_image = |page: &u64| making.get(page).is_some_and(|made| made.has_image);
        let whole: Vec<bool> = next.iter().map(|(page, _)| has_image(page)).collect();
        let mut known = lock(&self.known);
        for (((page, _), bytes), is_whole) in next.iter().zip(memory).zip(whole) {
            // Another thread may have read it, or freed it.
            if is_whole && known.pages.contains_key(page) {
                known.made.insert(*page, bytes);
            }
        }
        Ok(next.iter().map(|(page, _)| PageRef::new(*page, self.page_frames)).collect())
    }

    /// Makes pages from their records.
    fn redo(&self, log: &Log, begin: u64, making: &mut ByPage<Making<'_>>) -> Result<()> {
        let mut parts: Vec<_> = making.values().flat_map(|made| made.places.parts()).collect();
        parts.sort_unstable();
        let mut scans: Vec<(u64, u64)> = Vec::new();
        for (start, end) in parts {
            match scans.last_mut() {
                Some(last) if start <= last.1 + GAP => last.1 = last.1.max(end),
                _ => scans.push((start, end)),
            }
        }
        for (start, end) in scans {
            let end = end.min(self.end.0);
            let mut scan = log.scan(Some(Lsn(start)))?;
            while let Some(record) = scan.next_ref()?.filter(|record| record.lsn.0 < end) {
                for change in GroupRecord::pages_of(record.bytes).map_err(bad(record.lsn))? {
                    let change = change.map_err(bad(record.lsn))?;
                    let Some(made) = making.get_mut(&change.page.id.0) else { continue };
                    if record.lsn >= made.places.image() {
                        redo(&change, record.lsn.0.wrapping_add(begin), made.bytes)?;
                        made.has_image = true;
                    }
                }
            }
        }
        making.values_mut().for_each(|made| _ = page::seal(made.bytes, &[]));
        Ok(())
    }
}
