//! Recovery: from the file of a crashed store and its log to a file without a log.
//!
//! The header describes the store as of a cut. Recovery reads the records from there on, in order,
//! and learns which pages are there at the end of the log, and which record has the newest image of
//! each. What it knows of a page goes when a later record frees the page's place or takes it for
//! something else. Then it reads the log again, redoes each page from its image on, and writes it.
//! If the pages do not fit in memory, it reads the log once for each part of them. It writes a new
//! free map last, to a place that is free before and after, and then a clean header.
//!
//! Until that header is durable, the old one and the log stay as they are. So a crash of a recovery
//! is followed by another recovery, which does the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use vellum_log::{Log, Lsn, Record};
use vellum_pool::device::{Device, Write};
use vellum_pool::{PAGE_SIZE, PageCopy, PageRef, PoolError, Space};

use super::page::redo;
use super::progress::{Progress, RecoveryListener, RecoveryReport};
use super::record::{BadRecord, GroupRecord, Redo};
use crate::error::{Error, Result};
use crate::page;
use crate::store::file::StoreFile;
use crate::store::free_map::{self, FreeMap};
use crate::store::header::{Header, LogPoint};

/// So many bytes of pages are in memory until they are written. The simulation has several parts.
const PART_BYTES: usize = if cfg!(test) { 64 << 10 } else { 64 << 20 };
/// So many bytes of pages are written at once.
const BATCH_BYTES: usize = 4 << 20;

/// What recovery knows from the records.
pub(crate) struct Recovery<'a> {
    header: Header,
    records: u64,
    /// The pages that have changed, by their first frame.
    pages: BTreeMap<u64, ChangedPage>,
    space: Space,
    old_map: Vec<PageRef>,
    next_tree: u32,
    /// The number in the log after the newest record.
    end: Lsn,
    progress: Progress<'a>,
    began: Instant,
}

/// A page that has changed since the cut.
#[derive(Clone, Copy, Debug)]
struct ChangedPage {
    frames: u32,
    /// The record with its newest image.
    image: Lsn,
}

impl<'a> Recovery<'a> {
    /// For a header in use that names a log, with the pages of its free map and the space that the
    /// map describes. The log has records up to `end` at most.
    pub(crate) fn new(
        header: Header,
        old_map: Vec<PageRef>,
        space: Space,
        end: Lsn,
        listener: &'a RecoveryListener,
    ) -> Recovery<'a> {
        let from = Lsn(header.log.lsn.wrapping_sub(header.log.begin));
        let total = 2 * end.0.saturating_sub(from.0);
        Recovery {
            header,
            records: 0,
            pages: BTreeMap::new(),
            space,
            old_map,
            next_tree: header.next_tree,
            end: from,
            progress: Progress::new(listener, from, total),
            began: Instant::now(),
        }
    }

    /// The number, in the log, of the first record that recovery needs.
    pub(crate) fn from(&self) -> Lsn {
        self.progress.from()
    }

    /// Takes in the next record.
    ///
    /// # Errors
    /// If no version of this program wrote the record.
    pub(crate) fn add(&mut self, record: &Record) -> Result<()> {
        let lsn = record.lsn;
        let out = |_| bad(lsn)(BadRecord("it has pages that no file can have"));
        let group = GroupRecord::read(&record.bytes).map_err(bad(lsn))?;
        for range in group.taken {
            self.forget(range);
            self.space.set_allocated(range.id.0, range.frames.into()).map_err(out)?;
        }
        for change in &group.pages {
            let PageRef { id, frames } = change.page;
            if let Redo::Image { .. } = change.redo {
                let tree = change.image_tree().map_err(bad(lsn))?;
                self.next_tree = self.next_tree.max(tree.saturating_add(1));
                self.pages.insert(id.0, ChangedPage { frames, image: lsn });
            } else if self.pages.get(&id.0).is_none_or(|known| known.frames != frames) {
                return Err(bad(lsn)(BadRecord("it changes a page that has no image")));
            }
        }
        for range in group.freed {
            self.forget(range);
            self.space.set_free(range.id.0, range.frames.into()).map_err(out)?;
        }
        self.records += 1;
        self.progress.is_at(lsn);
        Ok(())
    }

    /// Drops what is known of pages in a range.
    fn forget(&mut self, range: PageRef) {
        let (first, end) = (range.id.0, range.id.0 + u64::from(range.frames));
        let before = self.pages.range(..first).next_back();
        let overlaps = before.filter(|(id, page)| *id + u64::from(page.frames) > first);
        let stale = overlaps.into_iter().chain(self.pages.range(first..end)).map(|(id, _)| *id);
        for id in stale.collect::<Vec<_>>() {
            self.pages.remove(&id);
        }
    }

    /// The log ends here.
    pub(crate) fn end_at(&mut self, end: Lsn) {
        self.end = end.max(self.from());
        let parts = self.parts().len() as u64;
        self.progress.ends_at(self.end, parts);
    }

    /// Ranges of the numbers of changed pages, each of which fits in memory.
    fn parts(&self) -> Vec<(u64, u64)> {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        let mut bytes = 0;
        for (id, page) in &self.pages {
            let more = page.frames as usize * PAGE_SIZE;
            bytes += more;
            match parts.last_mut() {
                Some((_, last)) if bytes <= PART_BYTES => *last = *id,
                _ => {
                    parts.push((*id, *id));
                    bytes = more;
                }
            }
        }
        parts
    }

    /// Writes what the records say. Returns the header of the clean file.
    ///
    /// # Errors
    /// Damage, a failed write or sync: then the file is as it was, for the next recovery.
    pub(crate) fn write(
        mut self,
        device: &Arc<dyn Device>,
        log: &Log,
    ) -> Result<(Header, RecoveryReport)> {
        let page_frames = self.header.page_frames;
        // The last process may have been killed before this header was durable. The new map may lie
        // where the map of the header before it lies.
        let page = self.header.page();
        let written = self.header.write(&**device, &[]);
        written.map_err(|source| PoolError::Write { page, source })?;
        device.sync().map_err(PoolError::Sync)?;

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

        let parts = self.parts();
        for (number, (first, last)) in parts.iter().enumerate() {
            write_pages(device, &self.redone(log, *first, *last)?)?;
            let more = parts.len() - 1 - number;
            self.progress.ends_at(self.end, more as u64);
        }
        let map = free_map::pages(&map.encode(), &places);
        write_pages(device, &map)?;
        device.sync().map_err(PoolError::Sync)?;

        let header = Header {
            free_map: places.first().map_or(0, |place| place.id.0),
            file_pages,
            next_tree: self.next_tree,
            log: LogPoint { identity: 0, begin: 0, lsn: self.store_lsn(self.end) },
            ..self.header
        };
        let file = StoreFile::new(device, self.header);
        file.write_clean(&file.pause_writes(), header, &[])?;
        let report = RecoveryReport {
            records: self.records,
            pages: self.pages.len() as u64,
            log_bytes: self.end.0 - self.from().0,
            duration: self.began.elapsed(),
        };
        Ok((Header { next_tree: self.next_tree, ..file.header() }, report))
    }

    /// The store's number of a record.
    fn store_lsn(&self, lsn: Lsn) -> u64 {
        lsn.0.wrapping_add(self.header.log.begin)
    }

    /// The pages with these numbers, after their last records.
    fn redone(&mut self, log: &Log, first: u64, last: u64) -> Result<Vec<PageCopy>> {
        let mut copies: BTreeMap<u64, PageCopy> = BTreeMap::new();
        let mut scan = log.scan(Some(self.from()))?;
        while let Some(record) = scan.next_record()? {
            let lsn = record.lsn;
            let group = GroupRecord::read(&record.bytes).map_err(bad(lsn))?;
            for change in &group.pages {
                let (id, page) = (change.page.id.0, change.page);
                let known = self.pages.get(&id).filter(|_| (first..=last).contains(&id));
                let Some(ChangedPage { image, .. }) = known else { continue };
                if lsn < *image {
                    continue;
                }
                let copy = copies.entry(id).or_insert_with(|| PageCopy::zeroed(page));
                redo(change, self.store_lsn(lsn), copy.bytes_mut())?;
            }
            self.progress.is_at(lsn);
        }
        let mut copies: Vec<_> = copies.into_values().collect();
        for copy in &mut copies {
            let (head, body) = copy.parts_mut();
            page::seal(head, body);
        }
        Ok(copies)
    }
}

fn bad(lsn: Lsn) -> impl Fn(BadRecord) -> Error {
    move |BadRecord(what)| Error::BadRecord { lsn: lsn.0, what: what.into() }
}

/// Writes pages to their places.
fn write_pages(device: &Arc<dyn Device>, pages: &[PageCopy]) -> Result<()> {
    let frames = pages.first().map_or(1, |copy| copy.page().frames as usize);
    let batches = pages.chunks((BATCH_BYTES / (frames * PAGE_SIZE)).max(1));
    batches.into_iter().try_for_each(|batch| write_batch(device, batch))
}

fn write_batch(device: &Arc<dyn Device>, pages: &[PageCopy]) -> Result<()> {
    let halves = pages.iter().map(|copy| copy.bytes().split_at(PAGE_SIZE));
    let mut writes: Vec<_> = halves
        .zip(pages)
        .map(|((head, body), copy)| Write::new(copy.page().id.0, [head, body]))
        .collect();
    device.write(&mut writes);
    for (write, copy) in writes.into_iter().zip(pages) {
        write.result.map_err(|source| PoolError::Write { page: copy.page(), source })?;
    }
    Ok(())
}
