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
use crate::store::core::StoreCore;
use crate::tree::page_runs::PageRuns;
use crate::tree::streams::{free_pages_of, pages_of};

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

    /// Someone reads the value that begins with this page. If its key is gone and nobody does,
    /// nobody will.
    fn is_read(&self, first: PageId) -> bool {
        self.lock().read.contains_key(&first)
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

/// A value that is being read: its pages stay, whatever becomes of its key.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    core: &'a StoreCore,
    first: PageId,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let mut sets = self.core.aside.lock();
        let Some(readers) = sets.read.get_mut(&self.first) else { return };
        readers.count -= 1;
        if readers.count > 0 {
            return;
        }
        let removed = sets.read.remove(&self.first).and_then(|readers| readers.removed);
        sets.ended.extend(removed);
        drop(sets);
        self.core.try_free_ended();
    }
}

impl StoreCore {
    /// Keeps the pages of the value that begins with this page. The leaf that refers to it is held.
    pub(crate) fn pin(&self, first: PageId) -> Pin<'_> {
        self.aside.lock().read.entry(first).or_default().count += 1;
        Pin { core: self, first }
    }

    /// The writer of a value ends without it.
    pub(crate) fn abandon(&self, number: u64) {
        let mut sets = self.aside.lock();
        let pages = sets.written.remove(&number).filter(|pages| !pages.is_empty());
        sets.ended.extend(pages);
        drop(sets);
        self.try_free_ended();
    }

    /// Frees what was set aside and has no owner any more, unless changes have to wait now: who
    /// calls this may be the one whom they wait for.
    pub(crate) fn try_free_ended(&self) {
        if let Some(_passage) = self.gate.try_pass() {
            self.free_ended();
        }
    }

    /// Frees what was set aside and has no owner any more. The caller changes the store, or holds
    /// the gate.
    pub(crate) fn free_ended(&self) {
        let mut sets = self.aside.lock();
        let (ended, unfound) = (take(&mut sets.ended), take(&mut sets.unfound));
        drop(sets);
        ended.iter().for_each(|pages| self.free_pages(pages));
        unfound.into_iter().for_each(|(tree, blob)| self.free_value(tree, blob));
    }

    /// Frees the pages of a value that was removed, once it has no readers. What cannot be found
    /// now is tried again.
    pub(crate) fn free_value(&self, tree: u32, blob: BlobRef) {
        let freed = match self.aside.is_read(blob.page.id) {
            false => free_pages_of(self, tree, blob),
            true => pages_of(self, tree, blob).map(|pages| {
                if let Some(pages) = self.aside.removed(blob.page.id, pages) {
                    self.free_pages(&pages);
                }
            }),
        };
        match freed {
            Ok(()) => {}
            Err(error) => {
                tracing::warn!("the pages of a value cannot be freed yet: {error}");
                self.aside.lock().unfound.push((tree, blob));
            }
        }
    }

    /// Frees pages that nothing refers to any more; readers that still hold one keep it.
    pub(crate) fn free_pages(&self, pages: &PageRuns) {
        pages.iter().for_each(|page| self.free_or_warn(page));
    }

    /// Frees a page that nothing refers to any more.
    pub(crate) fn free_or_warn(&self, page: PageRef) {
        if let Err(error) = self.pool.free_page(page) {
            tracing::warn!("{page} could not be freed and stays unused: {error}");
        }
    }
}
