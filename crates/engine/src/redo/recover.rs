//! Recovery: from the file of a crashed store and its log to a file without a log.
//!
//! The header describes the store as of a cut. Recovery reads the records from there on, in order,
//! and sorts them by page. What it has for a page goes when a later record frees the page's place
//! or takes it for something else. Then it redoes each page, from the image in the page's first
//! record, and writes it. It writes a new free map last, to a place that is free before and after,
//! and then a clean header.
//!
//! Until that header is durable, the old one and the log stay as they are. So a crash of a recovery
//! is followed by another recovery, which does the same.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum_log::{Lsn, Record};
use vellum_pool::device::{Device, Write};
use vellum_pool::{PAGE_SIZE, PageCopy, PageRef, PoolError, Space};

use super::page::redo;
use super::record::{BadRecord, GroupRecord, Redo};
use crate::error::{Error, Result};
use crate::page;
use crate::store::file::StoreFile;
use crate::store::free_map::{self, FreeMap};
use crate::store::header::{Header, LogPoint};

/// So many bytes of pages are in memory until they are written.
const BATCH_BYTES: usize = 16 << 20;

/// What recovery knows from the records.
#[derive(Debug)]
pub(crate) struct Recovery {
    header: Header,
    records: Vec<Record>,
    /// For each page that has changed, by its first frame: its length, and its records.
    pages: BTreeMap<u64, (u32, Vec<PlaceInRecord>)>,
    space: Space,
    old_map: Vec<PageRef>,
    next_tree: u32,
    /// The store's number after the newest record.
    end: u64,
}

/// The number of a record, and of a page in it.
#[derive(Clone, Copy, Debug)]
struct PlaceInRecord {
    record: usize,
    page: usize,
}

/// What a recovery did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recovered {
    pub records: u64,
    pub pages: u64,
}

impl Recovery {
    /// For a header in use that names a log, with the pages of its free map and the space that the
    /// map describes.
    pub(crate) fn new(header: Header, old_map: Vec<PageRef>, space: Space) -> Recovery {
        let end = header.log.lsn;
        Recovery {
            header,
            records: Vec::new(),
            pages: BTreeMap::new(),
            space,
            old_map,
            next_tree: header.next_tree,
            end,
        }
    }

    /// The number, in the log, of the first record that recovery needs.
    pub(crate) fn from(&self) -> Lsn {
        Lsn(self.header.log.lsn.wrapping_sub(self.header.log.begin))
    }

    /// Takes in the next record.
    ///
    /// # Errors
    /// If no version of this program wrote the record.
    pub(crate) fn add(&mut self, record: Record) -> Result<()> {
        let lsn = record.lsn;
        let bad = |BadRecord(what)| Error::BadRecord { lsn: lsn.0, what: what.into() };
        let out = |_| bad(BadRecord("it has pages that no file can have"));
        let group = GroupRecord::read(&record.bytes).map_err(bad)?;
        for range in group.taken {
            self.forget(range);
            self.space.set_allocated(range.id.0, range.frames.into()).map_err(out)?;
        }
        for (number, change) in group.pages.iter().enumerate() {
            let page = change.page;
            let place = PlaceInRecord { record: self.records.len(), page: number };
            if let Redo::Image { .. } = change.redo {
                let tree = change.image_tree().map_err(bad)?;
                self.next_tree = self.next_tree.max(tree.saturating_add(1));
                self.pages.insert(page.id.0, (page.frames, vec![place]));
            } else {
                match self.pages.get_mut(&page.id.0) {
                    Some((frames, places)) if *frames == page.frames => places.push(place),
                    _ => return Err(bad(BadRecord("it changes a page that has no image"))),
                }
            }
        }
        for range in group.freed {
            self.forget(range);
            self.space.set_free(range.id.0, range.frames.into()).map_err(out)?;
        }
        self.records.push(record);
        Ok(())
    }

    /// Drops what is known of pages in a range.
    fn forget(&mut self, range: PageRef) {
        let (first, end) = (range.id.0, range.id.0 + u64::from(range.frames));
        let before = self.pages.range(..first).next_back();
        let overlaps = before.filter(|(id, (frames, _))| *id + u64::from(*frames) > first);
        let stale = overlaps.into_iter().chain(self.pages.range(first..end)).map(|(id, _)| *id);
        for id in stale.collect::<Vec<_>>() {
            self.pages.remove(&id);
        }
    }

    /// The log ends here.
    pub(crate) fn end_at(&mut self, end: Lsn) {
        self.end = end.0.wrapping_add(self.header.log.begin).max(self.header.log.lsn);
    }

    /// Writes what the records say. Returns the header of the clean file.
    ///
    /// # Errors
    /// Damage, a failed write or sync: then the file is as it was, for the next recovery.
    pub(crate) fn write(mut self, device: &Arc<dyn Device>) -> Result<(Header, Recovered)> {
        let page_frames = self.header.page_frames;
        let done = Recovered { records: self.records.len() as u64, pages: self.pages.len() as u64 };
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

        let mut batch = Vec::new();
        for (first, (frames, places)) in &self.pages {
            batch.push(self.redone(PageRef::new(*first, *frames), places)?);
            if batch.len() * page_frames as usize * PAGE_SIZE >= BATCH_BYTES {
                write_pages(device, &batch)?;
                batch.clear();
            }
        }
        write_pages(device, &batch)?;
        let map = free_map::pages(&map.encode(), &places);
        write_pages(device, &map)?;
        device.sync().map_err(PoolError::Sync)?;

        let header = Header {
            free_map: places.first().map_or(0, |place| place.id.0),
            file_pages,
            next_tree: self.next_tree,
            log: LogPoint { identity: 0, begin: 0, lsn: self.end },
            ..self.header
        };
        let file = StoreFile::new(device, self.header);
        file.write_clean(&file.pause_writes(), header, &[])?;
        Ok((Header { next_tree: self.next_tree, ..file.header() }, done))
    }

    /// The page after its last record.
    fn redone(&self, page: PageRef, places: &[PlaceInRecord]) -> Result<PageCopy> {
        let mut copy = PageCopy::zeroed(page);
        for place in places {
            let Record { lsn, bytes } = &self.records[place.record];
            let bad = |BadRecord(what)| Error::BadRecord { lsn: lsn.0, what: what.into() };
            let group = GroupRecord::read(bytes).map_err(bad)?;
            let lsn = lsn.0.wrapping_add(self.header.log.begin);
            redo(&group.pages[place.page], lsn, copy.bytes_mut())?;
        }
        let (head, body) = copy.parts_mut();
        page::seal(head, body);
        Ok(copy)
    }
}

/// Writes pages to their places.
fn write_pages(device: &Arc<dyn Device>, pages: &[PageCopy]) -> Result<()> {
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
