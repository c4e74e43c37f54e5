//! Unlinked pages: pages that are allocated although no tree refers to them. A writer has them for
//! a value that it has not finished, a bulk load until it ends, or a reader for a value that was
//! removed meanwhile. Pages that a full log keeps from being freed are unlinked, too.
//!
//! A checkpoint treats them as free: the free map in the file includes them, so no space is lost if
//! the process is killed. In memory they stay allocated until their reader or writer has ended, so
//! no other page gets their place. Freeing them needs no mark in the header, because it changes no
//! byte of the file.

use std::collections::HashMap;
use std::mem::take;
use std::sync::{Mutex, MutexGuard};

use vellum_pool::{PageId, PageRef};

use crate::page::blob::BlobRef;
use crate::page::runs::PageRuns;
use crate::sync::lock;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct UnlinkedPages(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// The pages of values that are being written, and of bulk loads, by a number that is not used
    /// again.
    written: HashMap<u64, PageRuns>,
    next: u64,
    /// The values that are being read, by their first page.
    read: HashMap<PageId, Readers>,
    /// Pages whose reader or writer has ended, or for which the log had no room. The next change or
    /// checkpoint frees them.
    reclaimable: Vec<PageRuns>,
    /// Lost pages for which the log had no room, as ranges of frames: which pages lie in them is
    /// not known.
    lost: Vec<PageRuns>,
    /// Removed values, with the numbers of their trees, whose index could not be read to find their
    /// pages. A checkpoint treats these pages as in use.
    unreadable: Vec<(u32, BlobRef)>,
}

#[derive(Debug, Default)]
struct Readers {
    count: u64,
    /// The value's pages, if it was removed.
    removed: Option<PageRuns>,
}

impl Lists {
    fn all(&self) -> impl Iterator<Item = &PageRuns> {
        let removed = self.read.values().filter_map(|readers| readers.removed.as_ref());
        self.written.values().chain(removed).chain(&self.reclaimable).chain(&self.lost)
    }
}

impl UnlinkedPages {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        lock(&self.0)
    }

    /// A writer begins a value, or a bulk load begins. Returns its number.
    pub(crate) fn begin(&self) -> u64 {
        let mut lists = self.lock();
        lists.next += 1;
        let number = lists.next;
        lists.written.insert(number, PageRuns::default());
        number
    }

    /// The writer or the load has allocated a page.
    pub(crate) fn add_page(&self, number: u64, page: PageRef) {
        if let Some(pages) = self.lock().written.get_mut(&number) {
            pages.push(page);
        }
    }

    /// The pages of a value that is being written, or of a load.
    pub(crate) fn pages(&self, number: u64) -> PageRuns {
        self.lock().written.get(&number).cloned().unwrap_or_default()
    }

    /// A tree refers to the pages from now on.
    pub(crate) fn link(&self, number: u64) {
        self.lock().written.remove(&number);
    }

    /// A value was removed from its tree. Returns the pages for the caller to free, unless the
    /// value has readers.
    pub(crate) fn unlink(&self, first: PageId, pages: PageRuns) -> Option<PageRuns> {
        match self.lock().read.get_mut(&first) {
            Some(readers) => {
                readers.removed = Some(pages);
                None
            }
            None => Some(pages),
        }
    }

    /// Whether the value that begins with this page has readers. A value without readers gets none
    /// after its key was removed.
    pub(crate) fn has_readers(&self, first: PageId) -> bool {
        self.lock().read.contains_key(&first)
    }

    /// Adds a reader to the value that begins with this page.
    pub(crate) fn pin(&self, first: PageId) {
        self.lock().read.entry(first).or_default().count += 1;
    }

    /// Takes a reader from the value. Returns true if that was the last one. If the value was
    /// removed, its pages can be freed then.
    pub(crate) fn unpin(&self, first: PageId) -> bool {
        let mut lists = self.lock();
        let Some(readers) = lists.read.get_mut(&first) else { return false };
        readers.count -= 1;
        if readers.count > 0 {
            return false;
        }
        let removed = lists.read.remove(&first).and_then(|readers| readers.removed);
        lists.reclaimable.extend(removed);
        true
    }

    /// The writer or the load has ended without finishing: its pages can be freed.
    pub(crate) fn abandon(&self, number: u64) {
        let mut lists = self.lock();
        let pages = lists.written.remove(&number).filter(|pages| !pages.is_empty());
        lists.reclaimable.extend(pages);
    }

    /// Takes the pages that can be freed, and the values whose pages could not be found.
    pub(crate) fn take_reclaimable(&self) -> (Vec<PageRuns>, Vec<(u32, BlobRef)>) {
        let mut lists = self.lock();
        (take(&mut lists.reclaimable), take(&mut lists.unreadable))
    }

    /// Takes the lost pages that can be freed.
    pub(crate) fn take_lost(&self) -> Vec<PageRuns> {
        take(&mut self.lock().lost)
    }

    /// Lost pages could not be freed yet.
    pub(crate) fn add_lost(&self, frames: PageRuns) {
        self.lock().lost.push(frames);
    }

    /// Whether there are readers of a value of which neither the pages are known nor the first one
    /// `is_seen`.
    pub(crate) fn has_unknown_readers(&self, is_seen: impl Fn(PageId) -> bool) -> bool {
        let lists = self.lock();
        lists.read.iter().any(|(first, readers)| readers.removed.is_none() && !is_seen(*first))
    }

    /// Nothing refers to these pages any more, and they could not be freed yet.
    pub(crate) fn add_reclaimable(&self, pages: PageRuns) {
        self.lock().reclaimable.push(pages);
    }

    /// The pages of removed values could not be found, or were not looked for.
    pub(crate) fn add_unreadable(&self, values: impl IntoIterator<Item = (u32, BlobRef)>) {
        self.lock().unreadable.extend(values);
    }

    /// Whether there are removed values whose pages could not be found.
    pub(crate) fn has_unreadable(&self) -> bool {
        !self.lock().unreadable.is_empty()
    }

    /// The caller finds the pages of these values in another way. Returns the roots of their
    /// indexes; `None`, and the values stay, if one of them has readers.
    pub(crate) fn forget_unreadable(&self) -> Option<Vec<PageRef>> {
        let mut lists = self.lock();
        let has_readers = |(_, blob): &(u32, BlobRef)| lists.read.contains_key(&blob.page.id);
        if lists.unreadable.iter().any(has_readers) {
            return None;
        }
        Some(take(&mut lists.unreadable).into_iter().map(|(_, blob)| blob.page).collect())
    }

    /// The number of frames of all unlinked pages.
    pub(crate) fn frames(&self) -> u64 {
        let lists = self.lock();
        let known: u64 = lists.all().flat_map(PageRuns::ranges).map(|(_, count)| count).sum();
        known + lists.unreadable.iter().map(|(_, blob)| blob.frames()).sum::<u64>()
    }

    /// The ranges (start, count) of all unlinked pages. They do not change while the gate is
    /// frozen, and they are allocated in the space.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        self.lock().all().flat_map(PageRuns::ranges).collect()
    }
}
