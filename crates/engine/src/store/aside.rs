//! Pages that are allocated though no tree has them: of values that are being written, and of
//! values that were removed while someone reads them.
//!
//! For a checkpoint they are free: the map of free ranges in the file has them, so whatever becomes
//! of this process, nothing is lost. In memory they stay allocated until their owner has ended, so
//! nothing else gets their place. They are freed without a mark in the header, because no byte of
//! the file changes by that.

use std::collections::HashMap;
use std::mem::take;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum_pool::{PageId, PageRef};

use crate::page::blob::BlobRef;
use crate::page::runs::PageRuns;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Aside(Mutex<Sets>);

#[derive(Debug, Default)]
struct Sets {
    /// Of values that are being written, by a number that is not used again.
    written: HashMap<u64, PageRuns>,
    next: u64,
    /// Values that are being read, by their first page.
    read: HashMap<PageId, Readers>,
    /// Their owners have ended while changes had to wait.
    ended: Vec<PageRuns>,
    /// Values that were removed, with the numbers of their trees, whose pages could not be found.
    /// For a checkpoint they are in use.
    unfound: Vec<(u32, BlobRef)>,
}

#[derive(Debug, Default)]
struct Readers {
    count: u64,
    /// The value's pages, once it was removed.
    removed: Option<PageRuns>,
}

impl Sets {
    fn all(&self) -> impl Iterator<Item = &PageRuns> {
        let removed = self.read.values().filter_map(|readers| readers.removed.as_ref());
        self.written.values().chain(removed).chain(&self.ended)
    }
}

impl Aside {
    fn lock(&self) -> MutexGuard<'_, Sets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a value that is written; returns its number.
    pub(crate) fn begin(&self) -> u64 {
        let mut sets = self.lock();
        sets.next += 1;
        let number = sets.next;
        sets.written.insert(number, PageRuns::default());
        number
    }

    /// A page was allocated for a value that is written.
    pub(crate) fn push(&self, number: u64, page: PageRef) {
        if let Some(pages) = self.lock().written.get_mut(&number) {
            pages.push(page);
        }
    }

    /// A value that was written is in the tree now.
    pub(crate) fn keep(&self, number: u64) {
        self.lock().written.remove(&number);
    }

    /// A value was removed. Its pages are given back to be freed unless it has readers.
    pub(crate) fn removed(&self, first: PageId, pages: PageRuns) -> Option<PageRuns> {
        match self.lock().read.get_mut(&first) {
            Some(readers) => {
                readers.removed = Some(pages);
                None
            }
            None => Some(pages),
        }
    }

    /// The value that begins with this page has readers. A value without readers gets none once
    /// its key is gone.
    pub(crate) fn is_read(&self, first: PageId) -> bool {
        self.lock().read.contains_key(&first)
    }

    /// The value that begins with this page has one reader more.
    pub(crate) fn pin(&self, first: PageId) {
        self.lock().read.entry(first).or_default().count += 1;
    }

    /// It has one reader less. True if it has none any more: its pages wait to be freed now, if it
    /// was removed.
    pub(crate) fn unpin(&self, first: PageId) -> bool {
        let mut sets = self.lock();
        let Some(readers) = sets.read.get_mut(&first) else { return false };
        readers.count -= 1;
        if readers.count > 0 {
            return false;
        }
        let removed = sets.read.remove(&first).and_then(|readers| readers.removed);
        sets.ended.extend(removed);
        true
    }

    /// The writer of a value ends without it: its pages wait to be freed.
    pub(crate) fn abandon(&self, number: u64) {
        let mut sets = self.lock();
        let pages = sets.written.remove(&number).filter(|pages| !pages.is_empty());
        sets.ended.extend(pages);
    }

    /// What waits to be freed: pages, and values whose pages could not be found.
    pub(crate) fn take_ended(&self) -> (Vec<PageRuns>, Vec<(u32, BlobRef)>) {
        let mut sets = self.lock();
        (take(&mut sets.ended), take(&mut sets.unfound))
    }

    /// The pages of a value that was removed could not be found.
    pub(crate) fn push_unfound(&self, tree: u32, blob: BlobRef) {
        self.lock().unfound.push((tree, blob));
    }

    /// Frames of all pages that are set aside.
    pub(crate) fn frames(&self) -> u64 {
        let sets = self.lock();
        let known: u64 = sets.all().flat_map(PageRuns::ranges).map(|(_, count)| count).sum();
        known + sets.unfound.iter().map(|(_, blob)| blob.frames()).sum::<u64>()
    }

    /// The ranges (start, count) of all pages that are set aside. While changes stand still they do
    /// not change, and are allocated in the space.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        self.lock().all().flat_map(PageRuns::ranges).collect()
    }
}
