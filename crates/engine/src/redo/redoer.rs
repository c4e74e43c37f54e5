//! Redo by several threads, each of which has its own pages.
//!
//! The thread that reads the log hands each redoer the changes of that one's own pages, many at a
//! time, in the order of the log. So no two threads share a page, and the result does not depend on
//! which of them is faster.
//!
//! A redoer begins a page at an image. It has memory for some pages only: while the log is read for
//! the first time, it takes pages as they come. Of the other pages it notes where their records are
//! (`pending.rs`). Or they have their turn when the log is read again; then it is known which image
//! of a page is the newest.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher as _};
use std::num::NonZero;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use vellum_log::Lsn;
use vellum_pool::device::{Device, Write};
use vellum_pool::{PAGE_SIZE, PageCopy, PageRef, PoolError};

use super::by_page::{ByPage, PageHasher};
use super::page::redo;
use super::record::{BadRecord, PageRecord, Redo};
use super::record_places::PlaceIndex;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page;
use crate::planted::{StoreBug, is_planted};
use crate::sync::prefetch_value;

/// More threads than these would wait for the one that reads the log.
const REDOERS_MAX: usize = 8;
/// The changes of a job have about so many bytes.
const JOB_BYTES: usize = 512 << 10;
/// So many jobs wait for a redoer.
const JOBS_AHEAD: usize = 4;
/// So many bytes of pages are written at once.
const WRITE_BYTES: usize = 4 << 20;
/// A redoer has so many frames in a row, so that pages next to each other are written by one write.
const FRAMES_TOGETHER: u64 = 16;
/// Memory for pages is taken in pieces of so many bytes.
const SLAB_BYTES: usize = 2 << 20;
/// The pages lie anywhere in memory. While a redoer makes a change, the CPU fetches what it needs
/// for the change that comes so many later.
const PREFETCH_AHEAD: usize = 8;

/// What a redoer is told.
enum Job {
    Redo(ChangesToRedo),
    /// The log was read to its end, and these pages have changed. The redoer reports how many of
    /// its own it has not redone.
    End(Arc<ChangedPages>),
    /// The redoer writes the pages that it has redone, forgets them, and reports how many are left.
    Write(Arc<dyn Device>),
    /// The redoer hands over the pages that it has redone, and ends.
    HandOver(Sender<RedonePages>),
}

/// Changes of a redoer's pages.
#[derive(Default)]
struct ChangesToRedo {
    list: Vec<Change>,
    /// The parts of records that say what changes, one after the other.
    bytes: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Change {
    page: u64,
    lsn: Lsn,
    /// The place in `bytes`.
    at: usize,
}

impl ChangesToRedo {
    fn push(&mut self, lsn: Lsn, change: &PageRecord<'_>) {
        self.list.push(Change { page: change.page.id.0, lsn, at: self.bytes.len() });
        self.bytes.extend_from_slice(change.bytes);
    }

    fn read(&self, change: &Change) -> Result<PageRecord<'_>> {
        PageRecord::read(&self.bytes[change.at..]).map_err(bad(change.lsn))
    }
}

/// What redo may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RedoLimits {
    /// The most threads.
    pub threads: usize,
    /// The most bytes of pages that were redone and not written yet, or a page for each thread.
    pub bytes: usize,
    /// The lists of where the records of the other pages are take about so many bytes; none if the
    /// log will be read again for them.
    pub list_bytes: Option<usize>,
}

/// All redoers, and the changes that are collected for them.
pub(super) struct Redoers {
    threads: Vec<Thread>,
}

/// The thread of a redoer.
struct Thread {
    /// The changes of its next job.
    collected: ChangesToRedo,
    jobs: SyncSender<Job>,
    /// Changes that were redone, for their memory.
    used: Receiver<ChangesToRedo>,
    /// How many of the redoer's pages are left at the end of the log, or after it has written.
    left: Receiver<Result<usize>>,
    handle: JoinHandle<()>,
}

impl Redoers {
    /// Starts the redoers. A record of the log is `begin` before its number in the store.
    ///
    /// # Errors
    /// If the system starts no more threads.
    pub(super) fn start(begin: u64, page_frames: u32, limits: RedoLimits) -> Result<Redoers> {
        let count = thread::available_parallelism().map_or(1, NonZero::get).min(REDOERS_MAX);
        let count = count.min(limits.threads);
        let mut redoers = Redoers { threads: Vec::new() };
        for number in 0..count {
            let (jobs, received) = sync_channel(JOBS_AHEAD);
            let (sender, left) = sync_channel(1);
            let (used_by_redoer, used) = channel();
            let redoer = Redoer {
                number,
                count,
                begin,
                pages: HashMap::default(),
                memory: Slabs::new(page_frames, limits.bytes / count),
                others: limits.list_bytes.map(|bytes| PlaceIndex::new(bytes / count)),
                written: HashSet::default(),
                newest: None,
                used: used_by_redoer,
            };
            let started = thread::Builder::new().name("vellum-redo".into());
            let handle = started.spawn(move || redoer.run(&received, &sender));
            let handle = handle.map_err(PoolError::Thread)?;
            redoers.threads.push(Thread {
                collected: ChangesToRedo::default(),
                jobs,
                used,
                left,
                handle,
            });
        }
        Ok(redoers)
    }

    /// Has the changes of a record redone. The records come in the order of the log.
    pub(super) fn redo(&mut self, lsn: Lsn, changes: &[PageRecord<'_>]) {
        let count = self.threads.len();
        for change in changes {
            let thread = &mut self.threads[redoer_of(change.page.id.0, count)];
            thread.collected.push(lsn, change);
            if thread.collected.bytes.len() >= JOB_BYTES {
                thread.send_collected();
            }
        }
    }

    /// The log was read to its end, and these pages have changed. Returns the number of pages for
    /// which there was no memory. If there are any, the caller reads the log again after each
    /// [`write`](Self::write).
    ///
    /// # Errors
    /// A record that does not fit its page.
    pub(super) fn end(&mut self, pages: &Arc<ChangedPages>) -> Result<usize> {
        self.ask(|| Job::End(pages.clone()))
    }

    /// Writes what was redone. Returns the number of pages that are left.
    ///
    /// # Errors
    /// A record that does not fit its page; a failed write.
    pub(super) fn write(&mut self, device: &Arc<dyn Device>) -> Result<usize> {
        self.ask(|| Job::Write(device.clone()))
    }

    /// Hands over what was redone until the [end](Self::end), and the places of the records of the
    /// other pages.
    pub(super) fn into_pages(self) -> Vec<RedonePages> {
        let (sender, pages) = channel();
        for thread in &self.threads {
            thread.send(Job::HandOver(sender.clone()));
        }
        drop(sender);
        let pages: Vec<_> = pages.into_iter().collect();
        assert_eq!(pages.len(), self.threads.len(), "a redoer has ended before it was asked to");
        pages
    }

    /// Gives each redoer a job, and returns the number of pages that they leave.
    fn ask(&mut self, job: impl Fn() -> Job) -> Result<usize> {
        for thread in &mut self.threads {
            thread.send_collected();
            thread.send(job());
        }
        let mut all = Ok(0);
        for at in 0..self.threads.len() {
            let Ok(left) = self.threads[at].left.recv() else {
                match self.threads.swap_remove(at).handle.join() {
                    Err(panic) => resume_unwind(panic),
                    Ok(()) => unreachable!("a redoer ends when it has no more jobs"),
                }
            };
            all = all.and_then(|sum| Ok(sum + left?));
        }
        all
    }
}

impl Thread {
    fn send_collected(&mut self) {
        let next = self.used.try_recv().unwrap_or_default();
        let mut changes = std::mem::replace(&mut self.collected, next);
        if is_planted(StoreBug::WrongOrder) {
            changes.list.reverse();
        }
        self.send(Job::Redo(changes));
    }

    fn send(&self, job: Job) {
        // A thread that has panicked takes nothing. `ask` passes the panic on.
        let _ = self.jobs.send(job);
    }
}

impl Drop for Redoers {
    /// Ends the threads.
    fn drop(&mut self) {
        for Thread { jobs, handle, .. } in std::mem::take(&mut self.threads) {
            drop(jobs);
            // `ask` passes a panic on.
            let _ = handle.join();
        }
    }
}

/// The nodes that have changed since the cut. All nodes have the same length.
#[derive(Debug)]
pub(super) struct ChangedPages {
    frames: u64,
    /// The record with the newest image of each page, by the page's first frame.
    images: ByPage<Lsn>,
}

impl ChangedPages {
    /// No pages, which have so many frames.
    pub(super) fn new(frames: u32) -> ChangedPages {
        ChangedPages { frames: frames.into(), images: ByPage::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.images.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.images.keys().copied()
    }

    /// The record with the newest image of a page.
    pub(super) fn image(&self, id: u64) -> Option<Lsn> {
        self.images.get(&id).copied()
    }

    /// Whether there is a page that is just this range of frames.
    pub(super) fn has(&self, start: u64, count: u64) -> bool {
        count == self.frames && self.images.contains_key(&start)
    }

    pub(super) fn insert(&mut self, id: u64, image: Lsn) {
        self.images.insert(id, image);
    }

    /// Removes the pages that share frames with a range.
    pub(super) fn remove(&mut self, start: u64, count: u64) {
        let (first, end) = ((start + 1).saturating_sub(self.frames), start + count);
        if end - first > self.images.len() as u64 {
            self.images.retain(|id, _| !(first..end).contains(id));
        } else {
            for id in first..end {
                self.images.remove(&id);
            }
        }
    }
}

/// The number of the redoer that has this page, of `count` redoers.
fn redoer_of(page: u64, count: usize) -> usize {
    let mut hasher = PageHasher::default();
    hasher.write_u64(page / FRAMES_TOGETHER);
    // Other bits than those that a map uses first.
    ((hasher.finish() >> 8) % count as u64) as usize
}

/// Memory for pages of one length.
struct Slabs {
    page_frames: u32,
    /// The most pages, at least one.
    most: usize,
    pages_per_slab: usize,
    slabs: Vec<PageCopy>,
    /// Pages that were taken.
    used: usize,
}

impl Slabs {
    /// Memory of so many bytes at most, or for one page.
    fn new(page_frames: u32, bytes: usize) -> Slabs {
        let page_bytes = page_frames as usize * PAGE_SIZE;
        let most = (bytes / page_bytes).max(1);
        let pages_per_slab = (SLAB_BYTES / page_bytes).clamp(1, most);
        Slabs { page_frames, most, pages_per_slab, slabs: Vec::new(), used: 0 }
    }

    /// The number of another page; none if that is too much memory.
    fn take(&mut self) -> Option<usize> {
        if self.used == self.most {
            return None;
        }
        if self.used == self.slabs.len() * self.pages_per_slab {
            let frames = self.pages_per_slab as u32 * self.page_frames;
            // It stands for no page of the file.
            self.slabs.push(PageCopy::zeroed(PageRef::new(0, frames)));
        }
        self.used += 1;
        Some(self.used - 1)
    }

    fn place(&self, number: usize) -> (usize, Range<usize>) {
        let page_bytes = self.page_frames as usize * PAGE_SIZE;
        let start = number % self.pages_per_slab * page_bytes;
        (number / self.pages_per_slab, start..start + page_bytes)
    }

    fn bytes(&self, number: usize) -> &[u8] {
        let (slab, range) = self.place(number);
        &self.slabs[slab].bytes()[range]
    }

    fn bytes_mut(&mut self, number: usize) -> &mut [u8] {
        let (slab, range) = self.place(number);
        &mut self.slabs[slab].bytes_mut()[range]
    }
}

/// Pages of one redoer as they are at the end of the log, but for their checksums.
pub(crate) struct RedonePages {
    /// The number in `memory` of each page, in the order of the file.
    pages: Vec<(u64, usize)>,
    memory: Slabs,
    /// The pages that were not redone.
    pub(super) others: Option<PlaceIndex>,
}

impl RedonePages {
    /// Each page with its bytes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PageRef, &[u8])> {
        let frames = self.memory.page_frames;
        let page = move |id| PageRef::new(id, frames);
        self.pages.iter().map(move |(id, number)| (page(*id), self.memory.bytes(*number)))
    }
}

/// What one thread knows.
struct Redoer {
    number: usize,
    count: usize,
    begin: u64,
    /// The number in `memory` of each page that is being redone.
    pages: ByPage<usize>,
    memory: Slabs,
    /// The pages for which there was no memory.
    others: Option<PlaceIndex>,
    /// The pages that were written as they are at the end of the log.
    written: HashSet<u64, BuildHasherDefault<PageHasher>>,
    /// The pages that have changed, once the log was read.
    newest: Option<Arc<ChangedPages>>,
    used: Sender<ChangesToRedo>,
}

impl Redoer {
    fn run(mut self, jobs: &Receiver<Job>, left: &SyncSender<Result<usize>>) {
        let mut failed = None;
        for job in jobs {
            match job {
                Job::Redo(mut changes) if failed.is_none() => {
                    failed = self.redo_all(&changes).err();
                    changes.list.clear();
                    changes.bytes.clear();
                    // The other end may be gone.
                    let _ = self.used.send(changes);
                }
                Job::Redo(_) => {}
                // The other end waits for these, unless it has failed.
                Job::End(pages) => {
                    let result = failed.take().map_or_else(|| Ok(self.end(pages)), Err);
                    let _ = left.send(result);
                }
                Job::Write(device) => {
                    let result = failed.take().map_or_else(|| self.write(&device), Err);
                    let _ = left.send(result);
                }
                Job::HandOver(to) => {
                    let _ = to.send(self.into_pages());
                    return;
                }
            }
        }
    }

    fn is_mine(&self, page: u64) -> bool {
        redoer_of(page, self.count) == self.number
    }

    fn redo_all(&mut self, changes: &ChangesToRedo) -> Result<()> {
        for (at, change) in changes.list.iter().enumerate() {
            // The page's header, and the slot.
            self.prefetch(changes, at + 2 * PREFETCH_AHEAD, |node, slot| {
                [Some(0), Some(node.slot_place(slot))]
            });
            // The slot is in the cache by now, and says where the payload is.
            self.prefetch(changes, at + PREFETCH_AHEAD, |node, slot| {
                let cell = node.payload_place(slot).ok();
                [cell.map(|cell| cell.offset), cell.map(|cell| cell.offset + cell.len)]
            });
            self.redo(change.lsn, &changes.read(change)?)?;
        }
        Ok(())
    }

    /// Has the CPU fetch bytes of a page, of which one slot will change.
    fn prefetch(
        &self,
        changes: &ChangesToRedo,
        at: usize,
        places: impl Fn(Node<&[u8]>, usize) -> [Option<usize>; 2],
    ) {
        let Some(change) = changes.list.get(at) else { return };
        let Some(number) = self.pages.get(&change.page) else { return };
        let bytes = self.memory.bytes(*number);
        let slot = changes.read(change).ok().and_then(|change| change.first_slot());
        for place in slot.into_iter().flat_map(|slot| places(Node::new(bytes), slot)).flatten() {
            bytes.get(place).into_iter().for_each(prefetch_value);
        }
    }

    fn redo(&mut self, lsn: Lsn, change: &PageRecord<'_>) -> Result<()> {
        let id = change.page.id.0;
        if let Redo::Image { .. } = change.redo
            && !self.pages.contains_key(&id)
        {
            let is_wanted = match &self.newest {
                None => true,
                Some(newest) => newest.image(id) == Some(lsn) && !self.written.contains(&id),
            };
            let Some(number) = is_wanted.then(|| self.memory.take()).flatten() else {
                self.others.iter_mut().for_each(|others| others.begin(id, lsn));
                return Ok(());
            };
            self.pages.insert(id, number);
        }
        // A page for which there is no memory is not redone now.
        match (self.pages.get(&id), &mut self.others) {
            (Some(number), _) => {
                redo(change, lsn.0.wrapping_add(self.begin), self.memory.bytes_mut(*number))?;
            }
            (None, Some(others)) => others.add(id, lsn),
            (None, None) => {}
        }
        Ok(())
    }

    /// The log was read to its end. Returns the number of pages that were not redone.
    fn end(&mut self, newest: Arc<ChangedPages>) -> usize {
        // The others were freed later.
        self.pages.retain(|id, _| newest.image(*id).is_some());
        self.others.iter_mut().for_each(|others| others.retain(|id| newest.image(id).is_some()));
        let mine = newest.ids().filter(|id| self.is_mine(*id));
        let left = mine.filter(|id| !self.pages.contains_key(id)).count();
        self.newest = Some(newest);
        left
    }

    /// Writes the pages that were redone, and forgets them. Returns the number of pages that are
    /// left.
    fn write(&mut self, device: &Arc<dyn Device>) -> Result<usize> {
        let mut redone: Vec<_> = self.pages.drain().collect();
        redone.sort_unstable();
        for (_, number) in &redone {
            page::seal(self.memory.bytes_mut(*number), &[]);
        }
        let pages = redone.iter().map(|(id, number)| (*id, self.memory.bytes(*number)));
        write_all(device, &pages.collect::<Vec<_>>())?;
        self.memory.used = 0;
        self.written.extend(redone.into_iter().map(|(id, _)| id));
        let changed = self.newest.iter().flat_map(|newest| newest.ids());
        Ok(changed.filter(|id| self.is_mine(*id) && !self.written.contains(id)).count())
    }

    fn into_pages(self) -> RedonePages {
        let mut pages: Vec<_> = self.pages.into_iter().collect();
        pages.sort_unstable();
        RedonePages { pages, memory: self.memory, others: self.others }
    }
}

/// The error of a record that no version of this program wrote.
pub(super) fn bad(lsn: Lsn) -> impl Fn(BadRecord) -> Error {
    move |BadRecord(what)| Error::BadRecord { lsn: lsn.0, what: what.into() }
}

/// Writes pages to their places.
pub(super) fn write_pages(device: &Arc<dyn Device>, pages: &[PageCopy]) -> Result<()> {
    let pages = pages.iter().map(|copy| (copy.page().id.0, copy.bytes()));
    write_all(device, &pages.collect::<Vec<_>>())
}

/// Writes pages of one length, each with its first frame.
fn write_all(device: &Arc<dyn Device>, pages: &[(u64, &[u8])]) -> Result<()> {
    let bytes = pages.first().map_or(PAGE_SIZE, |(_, bytes)| bytes.len());
    for pages in pages.chunks((WRITE_BYTES / bytes).max(1)) {
        let writes = pages.iter().map(|&(id, bytes)| Write::new(id, [bytes, &[]]));
        let mut writes: Vec<_> = writes.collect();
        device.write(&mut writes);
        for write in writes {
            let page = PageRef::new(write.page, (bytes / PAGE_SIZE) as u32);
            write.result.map_err(|source| PoolError::Write { page, source })?;
        }
    }
    Ok(())
}
