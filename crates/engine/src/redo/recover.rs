//! Recovery: from the file of a crashed store and its log to a file without a log.
//!
//! The header describes the store as of a cut. Recovery reads the records from there on, in order,
//! and learns which pages are there at the end of the log, and which record has the newest image of
//! each. What it knows of a page goes when a later record frees the page's place or takes it for
//! something else. Several threads redo the pages meanwhile (`redoer.rs`), and write them once the
//! end of the log is known. If the pages do not fit in memory, recovery reads the log again for
//! those that are left. It writes a new free map last, to a place that is free before and after,
//! and then a clean header.
//!
//! Until that header is durable, the old one and the log stay as they are. So a crash of a recovery
//! is followed by another recovery, which does the same.

use std::sync::Arc;
use std::time::Instant;

use vellum_log::{Lsn, RecordRef};
use vellum_pool::device::{Device, Write};
use vellum_pool::{PageRef, PoolError, Space};

use super::progress::{Progress, RecoveryListener, RecoveryReport};
use super::record::{BadRecord, GroupRecord, Redo};
use super::records::Records;
use super::redoer::{ChangedPages, RedoLimits, Redoers, bad, write_pages};
use crate::error::{Error, Result};
use crate::planted::{StoreBug, is_planted};
use crate::store::file::StoreFile;
use crate::store::free_map::{self, FreeMap};
use crate::store::header::{AlignedPage, Header, LogPoint, NEXT_TREE_MAX};

/// A recovered file.
pub(crate) struct Recovered {
    /// Its clean header.
    pub header: Header,
    /// The space that its free map describes.
    pub space: Space,
    pub report: RecoveryReport,
}

/// What recovery knows from the records.
pub(crate) struct Recovery<'a> {
    header: Header,
    records: u64,
    pages: ChangedPages,
    redoers: Redoers,
    space: Space,
    old_map: Vec<PageRef>,
    next_tree: u32,
    /// The number in the log after the newest record.
    end: Lsn,
    progress: Progress<'a>,
    began: Instant,
}

impl<'a> Recovery<'a> {
    /// For a header in use that names a log, with the pages of its free map and the space that the
    /// map describes. The log has records up to `end` at most.
    ///
    /// # Errors
    /// If the system starts no threads for it.
    pub(crate) fn new(
        header: Header,
        old_map: Vec<PageRef>,
        space: Space,
        end: Lsn,
        limits: RedoLimits,
        listener: &'a RecoveryListener,
    ) -> Result<Recovery<'a>> {
        let from = Lsn(header.log.lsn.wrapping_sub(header.log.begin));
        let total = end.0.saturating_sub(from.0);
        Ok(Recovery {
            header,
            records: 0,
            pages: ChangedPages::new(header.page_frames),
            redoers: Redoers::start(header.log.begin, header.page_frames, limits)?,
            space,
            old_map,
            next_tree: header.next_tree,
            end: from,
            progress: Progress::new(listener, from, total),
            began: Instant::now(),
        })
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
        let group = GroupRecord::read(record.bytes).map_err(bad(lsn))?;
        for range in &group.taken {
            self.pages.remove(range.id.0, range.frames.into());
            self.space.set_allocated(range.id.0, range.frames.into()).map_err(out)?;
        }
        for change in &group.pages {
            let id = change.page.id.0;
            self.check_node(change.page).map_err(bad(lsn))?;
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
            self.space.set_free(range.id.0, range.frames.into()).map_err(out)?;
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
        let end = page.id.0 + u64::from(page.frames);
        match page.id.0 >= self.space.first() && end <= self.space.end() {
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
        let freed = self.space.set_free(start, count);
        freed.map_err(|error| Error::damaged(PageRef::new(start, 1), error.to_string()))
    }

    /// Whether the records have an image of a page that is just this range (start, count).
    pub(crate) fn has_image(&self, (start, count): (u64, u64)) -> bool {
        self.pages.has(start, count)
    }

    /// The log ends here.
    pub(crate) fn end_at(&mut self, end: Lsn) {
        self.end = end.max(self.from());
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
        let old = self.old_map.iter().map(|page| (page.id.0, u64::from(page.frames)));
        let given_back: Vec<_> = old.collect();
        let map = loop {
            let map = FreeMap { space: self.space.snapshot(), given_back: given_back.clone() };
            if map.pages(page_frames) <= places.len() {
                break map;
            }
            let start = self.space.allocate(page_frames.into());
            places.push(PageRef::new(start, page_frames));
        };
        let file_pages = device.pages().map_err(PoolError::Resize)?.max(self.space.end());
        device.resize(file_pages).map_err(PoolError::Resize)?;

        let header = Header {
            free_map: places.first().map_or(0, |place| place.id.0),
            file_pages,
            next_tree: self.next_tree,
            log: LogPoint { lsn: self.store_lsn(self.end), ..self.header.log },
            ..self.header
        };
        let file = StoreFile::new(device, self.header, self.header.encoded_version());
        if is_planted(StoreBug::EarlyRecoveryHeader) {
            file.write_clean(&file.pause_writes(), header, &[])?;
        }
        let changed = self.write_changed(device, log)?;
        let map = free_map::pages(&map.encode(), &places);
        write_pages(device, &map)?;
        device.sync().map_err(PoolError::Sync)?;

        file.write_clean(&file.pause_writes(), header, &[])?;
        let report = RecoveryReport {
            records: self.records,
            pages: changed as u64,
            log_bytes: self.end.0 - self.from().0,
            duration: self.began.elapsed(),
        };
        let header = Header { next_tree: self.next_tree, ..file.header() };
        for (start, count) in given_back {
            self.space.set_free(start, count).map_err(|error| {
                Error::damaged(PageRef::new(start, 1), format!("of the old free map: {error}"))
            })?;
        }
        Ok(Recovered { header, space: self.space, report })
    }

    /// The store's number of a record.
    fn store_lsn(&self, lsn: Lsn) -> u64 {
        lsn.0.wrapping_add(self.header.log.begin)
    }

    /// Writes the pages that have changed, as they are at the end of the log. Returns their number.
    fn write_changed(&mut self, device: &Arc<dyn Device>, log: &dyn Records) -> Result<usize> {
        let none = ChangedPages::new(self.header.page_frames);
        let pages = Arc::new(std::mem::replace(&mut self.pages, none));
        let mut left = self.redoers.write(&pages, device)?;
        while left > 0 {
            // As many as were redone until now have their turn.
            let more = left.div_ceil((pages.len() - left).max(1));
            self.progress.ends_at(self.end, more as u64);
            log.each(self.from(), &mut |record| {
                self.progress.is_at(record.lsn);
                let group = GroupRecord::read(record.bytes).map_err(bad(record.lsn))?;
                self.redoers.redo(record.lsn, &group.pages);
                Ok(())
            })?;
            left = self.redoers.write(&pages, device)?;
        }
        self.progress.ends_at(self.end, 0);
        Ok(pages.len())
    }
}
