//! Recovery: from the file of a crashed store and its log to the state at the end of the log.
//!
//! The header describes the store as of a cut. Recovery reads the records from there on, in order,
//! and learns which pages are there at the end of the log, and which record has the newest image of
//! each. What it knows of a page goes when a later record frees the page's place or takes it for
//! something else. Several threads redo the pages meanwhile (`redoer.rs`).
//!
//! The store goes on with the pages and with the log, as if it had not crashed: the pages are dirty
//! pages of its pool, the header and the log stay as they are, and the next checkpoint writes the
//! pages. Those that do not fit in memory are pending (`pending.rs`). So the opening ends when the
//! log was read, and writes nothing but the header, once more.
//!
//! For a store that does not go on with the log, recovery makes a clean file. The redoers write the
//! pages, and recovery reads the log again for those that are left. It writes a new free map last,
//! to a place that is free before and after, and then a clean header.
//!
//! Until a new header is durable, the old one and the log stay as they are. So a crash of a
//! recovery, or soon after it, is followed by another recovery, which does the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use vellum_log::{Lsn, RecordRef};
use vellum_pool::device::{Device, Write};
use vellum_pool::{PageRef, PoolError, Space};

use super::pending::PendingPages;
use super::progress::{Progress, RecoveryListener, RecoveryReport};
use super::record::{BadRecord, GroupRecord, Redo, RemovedValue};
use super::records::Records;
use super::redoer::{ChangedPages, RedoLimits, Redoers, RedonePages, bad, write_pages};
use crate::error::{Error, Result};
use crate::planted::{StoreBug, is_planted};
use crate::store::file::StoreFile;
use crate::store::free_map::{self, FileMap, FreeMap};
use crate::store::header::{AlignedPage, Header, LogPoint, NEXT_TREE_MAX};

/// A recovered file.
pub(crate) struct Recovered {
    /// Its clean header.
    pub header: Header,
    /// The space that its free map describes.
    pub space: Space,
    /// Values in pieces that nothing refers to, and whose pages are in use in that space.
    pub removed: Vec<RemovedValue>,
    pub report: RecoveryReport,
}

/// A recovered store whose pages are in memory, or pending. The file and the log are as they were.
pub(crate) struct InMemory {
    /// The header of the file, with the number for the next tree.
    pub header: Header,
    /// The free map that the header names, with the space at the end of the log, and what was
    /// written since a backup until then.
    pub map: FileMap,
    /// The pages that have changed since the cut, each once.
    pub pages: Vec<RedonePages>,
    /// Those of them that are not in memory.
    pub pending: Box<PendingPages>,
    /// Values in pieces that nothing refers to, and whose pages are in use.
    pub removed: Vec<RemovedValue>,
    pub report: RecoveryReport,
}

/// What recovery knows from the records.
pub(crate) struct Recovery<'a> {
    header: Header,
    /// A build before version 8 wrote the log.
    skips_outside: bool,
    records: u64,
    /// The pages that have changed, until the end of the log is known.
    pages: ChangedPages,
    /// Their number at the end of the log.
    changed: usize,
    redoers: Redoers,
    /// The free map of the header, and what it becomes.
    map: FileMap,
    next_tree: u32,
    /// The values in pieces that records have removed, and whose pages no record has freed, by the
    /// first frames of the roots of their indexes.
    removed: BTreeMap<u64, RemovedValue>,
    /// The number in the log after the newest record.
    end: Lsn,
    progress: Progress<'a>,
    began: Instant,
}

impl<'a> Recovery<'a> {
    /// For a header in use that names a log, and its free map. The log has records up to `end` at
    /// most.
    ///
    /// # Errors
    /// If the system starts no threads for it.
    pub(crate) fn new(
        header: Header,
        map: FileMap,
        end: Lsn,
        limits: RedoLimits,
        listener: &'a RecoveryListener,
    ) -> Result<Recovery<'a>> {
        let from = Lsn(header.log.lsn.wrapping_sub(header.log.begin));
        let total = end.0.saturating_sub(from.0);
        Ok(Recovery {
            header,
            skips_outside: false,
            records: 0,
            pages: ChangedPages::new(header.page_frames),
            changed: 0,
            redoers: Redoers::start(header.log.begin, header.page_frames, limits)?,
            map,
            next_tree: header.next_tree,
            removed: BTreeMap::new(),
            end: from,
            progress: Progress::new(listener, from, total),
            began: Instant::now(),
        })
    }

    /// Has it skip what records free or remove outside of the file. Before version 8 a merge that
    /// removed an inner node's separator might log that it freed what the separator's bytes said.
    pub(crate) fn skip_outside(&mut self) {
        self.skips_outside = true;
    }

    /// The number, in the log, of the first record that recovery needs.
    pub(crate) fn from(&self) -> Lsn {
        self.progress.from()
    }

    /// Takes in the next record.
    ///
    /// # Errors
    /// If no version of this program wrote the record.
    pub(crate) fn add(&mut self, record: RecordRef<'_>) -> Result<()> {
        let lsn = record.lsn;
        let out = |_| bad(lsn)(BadRecord("it has pages that no file can have"));
        let mut group = GroupRecord::read(record.bytes).map_err(bad(lsn))?;
        for range in &group.taken {
            self.pages.remove(range.id.0, range.frames.into());
            self.map.space.set_allocated(range.id.0, range.frames.into()).map_err(out)?;
            self.map.note_written(*range);
            self.forget_removed(*range);
        }
        if self.skips_outside {
            group.values.retain(|(_, value)| self.check_place(value.page).is_ok());
            group.freed.retain(|range| self.check_place(*range).is_ok());
        }
        for (tree, value) in group.values {
            self.check_place(value.page).map_err(bad(lsn))?;
            self.removed.insert(value.page.id.0, (tree, value));
        }
        for change in &group.pages {
            let id = change.page.id.0;
            self.check_node(change.page).map_err(bad(lsn))?;
            self.map.note_written(change.page);
            if let Redo::Image { .. } = change.redo {
                let tree = change.image_tree().map_err(bad(lsn))?;
                if tree >= NEXT_TREE_MAX {
                    return Err(bad(lsn)(BadRecord("its tree's number is too large")));
                }
                self.next_tree = self.next_tree.max(tree + 1);
                self.pages.insert(id, lsn);
            } else if self.pages.image(id).is_none() {
                return Err(bad(lsn)(BadRecord("it changes a page that has no image")));
            }
        }
        for range in &group.freed {
            self.pages.remove(range.id.0, range.frames.into());
            self.map.space.set_free(range.id.0, range.frames.into()).map_err(out)?;
            self.forget_removed(*range);
        }
        self.records += 1;
        self.progress.is_at(lsn);
        self.redoers.redo(lsn, &group.pages);
        Ok(())
    }

    /// Checks that a page can be a node. Otherwise a record could change a header, or have recovery
    /// take memory for a page that is longer than the record.
    fn check_node(&self, page: PageRef) -> std::result::Result<(), BadRecord> {
        if page.frames != self.header.page_frames {
            return Err(BadRecord("its page does not have the length of a tree's pages"));
        }
        self.check_place(page)
    }

    /// These pages are free now, or something else.
    fn forget_removed(&mut self, range: PageRef) {
        let frames = range.id.0..range.id.0 + u64::from(range.frames);
        while let Some((first, _)) = self.removed.range(frames.clone()).next() {
            let first = *first;
            self.removed.remove(&first);
        }
    }

    /// Checks that the file can have this page.
    fn check_place(&self, page: PageRef) -> std::result::Result<(), BadRecord> {
        let end = page.id.0.saturating_add(page.frames.into());
        match page.id.0 >= self.map.space.first() && end <= self.map.space.end() {
            true => Ok(()),
            false => Err(BadRecord("it has pages that no file can have")),
        }
    }

    /// Nothing refers to this range of pages at the end of the log, although no record frees it.
    ///
    /// # Errors
    /// If no file can have such pages.
    pub(crate) fn give_back(&mut self, start: u64, count: u64) -> Result<()> {
        self.pages.remove(start, count);
        let freed = self.map.space.set_free(start, count);
        freed.map_err(|error| Error::damaged(PageRef::new(start, 1), error.to_string()))
    }

    /// Whether the records have an image of a page that is just this range (start, count).
    pub(crate) fn has_image(&self, (start, count): (u64, u64)) -> bool {
        self.pages.has(start, count)
    }

    /// The log ends here. Returns the number of changed pages that did not fit in memory.
    ///
    /// # Errors
    /// A record that does not fit its page.
    pub(crate) fn end_at(&mut self, end: Lsn) -> Result<usize> {
        self.end = end.max(self.from());
        let none = ChangedPages::new(self.header.page_frames);
        let pages = Arc::new(std::mem::replace(&mut self.pages, none));
        self.changed = pages.len();
        self.redoers.end(&pages)
    }

    /// Hands over the store as it is at the [end](Self::end_at) of the log. Makes the file as long
    /// as the store. Pages that are pending will be made with so much memory.
    ///
    /// # Errors
    /// If the file cannot be longer.
    pub(crate) fn into_memory(
        mut self,
        device: &Arc<dyn Device>,
        bytes: usize,
    ) -> Result<InMemory> {
        self.lengthen(device)?;
        self.progress.ends_at(self.end, 0);
        let report = self.report();
        let header = Header { next_tree: self.next_tree, ..self.header };
        let (end, frames) = (self.end, header.page_frames);
        let mut pages = self.redoers.into_pages();
        let others = pages.iter_mut().filter_map(|pages| pages.others.take());
        let pending = Box::new(PendingPages::new(frames, end, bytes, others));
        let removed = self.removed.into_values().collect();
        Ok(InMemory { header, map: self.map, pages, pending, removed, report })
    }

    /// Makes the file as long as the store, and returns its number of pages.
    fn lengthen(&self, device: &Arc<dyn Device>) -> Result<u64> {
        let file_pages = device.pages().map_err(PoolError::Resize)?.max(self.map.space.end());
        device.resize(file_pages).map_err(PoolError::Resize)?;
        Ok(file_pages)
    }

    fn report(&self) -> RecoveryReport {
        RecoveryReport {
            records: self.records,
            pages: self.changed as u64,
            log_bytes: self.end.0 - self.from().0,
            duration: self.began.elapsed(),
        }
    }

    /// Writes what the records say, and makes the file clean. `page` is that of the header.
    ///
    /// # Errors
    /// Damage, a failed write or sync: then the file is as it was, for the next recovery.
    pub(crate) fn write(
        mut self,
        page: &AlignedPage,
        device: &Arc<dyn Device>,
        log: &dyn Records,
    ) -> Result<Recovered> {
        let page_frames = self.header.page_frames;
        // The last process may have been killed before this header was durable. The new map may lie
        // where the map of the header before it lies. This build would write another version, which
        // the one that wrote the file may not know: then only this one could recover it.
        if !is_planted(StoreBug::TrustedHeader) {
            let place = self.header.page();
            let mut writes = [Write::new(place.id.0, [&page.0, &[]])];
            device.write(&mut writes);
            let [write] = writes;
            write.result.map_err(|source| PoolError::Write { page: place, source })?;
            device.sync().map_err(PoolError::Sync)?;
        }

        let mut places = Vec::new();
        let old = self.map.places.iter().map(|page| (page.id.0, u64::from(page.frames)));
        let given_back: Vec<_> = old.collect();
        let map = loop {
            let (space, given_back) = (self.map.space.snapshot(), given_back.clone());
            let map = FreeMap { space, given_back, changes_len: None };
            if map.pages(page_frames) <= places.len() {
                break map;
            }
            let start = self.map.space.allocate(page_frames.into());
            places.push(PageRef::new(start, page_frames));
        };
        let file_pages = self.lengthen(device)?;

        let header = Header {
            free_map: places.first().map_or(0, |place| place.id.0),
            changes: false,
            file_pages,
            next_tree: self.next_tree,
            log: LogPoint { lsn: self.store_lsn(self.end), ..self.header.log },
            ..self.header
        };
        let older = self.header.encoded_version();
        let file = StoreFile::new(device, Arc::default(), self.header, older);
        if is_planted(StoreBug::EarlyRecoveryHeader) {
            file.write_clean(&file.pause_writes(), header, &[])?;
        }
        self.write_changed(device, log)?;
        let map = free_map::pages(&map.encode(), &places);
        write_pages(device, &map)?;
        device.sync().map_err(PoolError::Sync)?;

        file.write_clean(&file.pause_writes(), header, &[])?;
        let report = self.report();
        let header = Header { next_tree: self.next_tree, ..file.header() };
        for (start, count) in given_back {
            self.map.space.set_free(start, count).map_err(|error| {
                Error::damaged(PageRef::new(start, 1), format!("of the old free map: {error}"))
            })?;
        }
        let removed = self.removed.into_values().collect();
        Ok(Recovered { header, space: self.map.space, removed, report })
    }

    /// The store's number of a record.
    fn store_lsn(&self, lsn: Lsn) -> u64 {
        lsn.0.wrapping_add(self.header.log.begin)
    }

    /// Writes the pages that have changed, as they are at the end of the log.
    fn write_changed(&mut self, device: &Arc<dyn Device>, log: &dyn Records) -> Result<()> {
        let mut left = self.redoers.write(device)?;
        while left > 0 {
            // As many as were redone until now have their turn.
            let more = left.div_ceil((self.changed - left).max(1));
            self.progress.ends_at(self.end, more as u64);
            log.each(self.from(), &mut |record| {
                self.progress.is_at(record.lsn);
                let group = GroupRecord::read(record.bytes).map_err(bad(record.lsn))?;
                self.redoers.redo(record.lsn, &group.pages);
                Ok(())
            })?;
            left = self.redoers.write(device)?;
        }
        self.progress.ends_at(self.end, 0);
        Ok(())
    }
}
