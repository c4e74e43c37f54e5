//! Redo by several threads, each of which has its own pages.
//!
//! The thread that reads the log hands batches of records to all redoers. A redoer takes the
//! changes of its own pages, in the order of the log. So no two threads share a page, and the
//! result does not depend on which of them is faster.
//!
//! A redoer begins a page at an image. It has memory for some pages only: while the log is read for
//! the first time, it takes pages as they come. Pages for which there was no memory have their turn
//! when the log is read again; then it is known which image of a page is the newest.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use vellum_log::{Lsn, Record};
use vellum_pool::device::{Device, Write};
use vellum_pool::{PAGE_SIZE, PageCopy, PoolError};

use super::page::redo;
use super::record::{BadRecord, GroupRecord, PageRecord, Redo};
use crate::error::{Error, Result};
use crate::page;
use crate::planted::{StoreBug, is_planted};

/// More threads than these would wait for the one that reads the log.
const REDOERS_MAX: usize = 8;
/// The records of a batch have about so many bytes.
const BATCH_BYTES: usize = 1 << 20;
/// So many batches wait for a redoer.
const BATCHES_AHEAD: usize = 4;
/// So many bytes of pages are written at once.
const WRITE_BYTES: usize = 4 << 20;

/// A page that has changed since the cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangedPage {
    pub frames: u32,
    /// The record with its newest image.
    pub image: Lsn,
}

/// The pages that have changed since the cut, by their first frame.
pub(super) type ChangedPages = BTreeMap<u64, ChangedPage>;

/// What a redoer is told.
enum Job {
    Redo(Arc<Vec<Record>>),
    /// The log was read to its end, and these pages have changed. The redoer writes those that it
    /// has redone, and reports how many of its pages are left.
    Write(Arc<ChangedPages>, Arc<dyn Device>),
}

/// What redo may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RedoLimits {
    /// The most threads.
    pub threads: usize,
    /// The most bytes of pages that were redone and not written yet, or a page for each thread.
    pub bytes: usize,
}

/// All redoers, and the batch that is collected for them.
pub(super) struct Redoers {
    threads: Vec<Thread>,
    batch: Vec<Record>,
    batch_bytes: usize,
}

/// The thread of a redoer.
struct Thread {
    jobs: SyncSender<Job>,
    /// How many of the redoer's pages are left after it has written.
    left: Receiver<Result<usize>>,
    handle: JoinHandle<()>,
}

impl Redoers {
    /// Starts the redoers. A record of the log is `begin` before its number in the store.
    ///
    /// # Errors
    /// If the system starts no more threads.
    pub(super) fn start(begin: u64, limits: RedoLimits) -> Result<Redoers> {
        let count = thread::available_parallelism().map_or(1, NonZero::get).min(REDOERS_MAX);
        let count = count.min(limits.threads);
        let mut redoers = Redoers { threads: Vec::new(), batch: Vec::new(), batch_bytes: 0 };
        for number in 0..count as u64 {
            let (jobs, received) = sync_channel(BATCHES_AHEAD);
            let (sender, left) = sync_channel(1);
            let redoer = Redoer {
                number,
                count: count as u64,
                begin,
                room: limits.bytes / count,
                pages: HashMap::default(),
                written: HashSet::default(),
                newest: None,
            };
            let started = thread::Builder::new().name("vellum-redo".into());
            let handle = started.spawn(move || redoer.run(&received, &sender));
            let handle = handle.map_err(PoolError::Thread)?;
            redoers.threads.push(Thread { jobs, left, handle });
        }
        Ok(redoers)
    }

    /// Has the changes of a record redone. The records come in the order of the log.
    pub(super) fn redo(&mut self, record: Record) {
        self.batch_bytes += record.bytes.len();
        self.batch.push(record);
        if self.batch_bytes >= BATCH_BYTES {
            self.send_batch();
        }
    }

    fn send_batch(&mut self) {
        self.batch_bytes = 0;
        if is_planted(StoreBug::WrongOrder) {
            self.batch.reverse();
        }
        let batch = Arc::new(std::mem::take(&mut self.batch));
        self.tell_all(|| Job::Redo(batch.clone()));
    }

    fn tell_all(&self, job: impl Fn() -> Job) {
        for thread in &self.threads {
            // A thread that has panicked takes nothing. `write` passes the panic on.
            let _ = thread.jobs.send(job());
        }
    }

    /// The log was read to its end: writes what was redone. Returns the number of pages for which
    /// there was no memory. If there are any, the caller reads the log again.
    ///
    /// # Errors
    /// A record that does not fit its page; a failed write.
    pub(super) fn write(
        &mut self,
        pages: &Arc<ChangedPages>,
        device: &Arc<dyn Device>,
    ) -> Result<usize> {
        self.send_batch();
        self.tell_all(|| Job::Write(pages.clone(), device.clone()));
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

impl Drop for Redoers {
    /// Ends the threads.
    fn drop(&mut self) {
        for Thread { jobs, handle, .. } in std::mem::take(&mut self.threads) {
            drop(jobs);
            // `write` passes a panic on.
            let _ = handle.join();
        }
    }
}

/// Numbers of pages are spread well enough without the work of a hash function for strangers' keys.
#[derive(Clone, Copy, Debug, Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

type ByPage<T> = HashMap<u64, T, BuildHasherDefault<PageHasher>>;

/// What one thread knows.
struct Redoer {
    number: u64,
    count: u64,
    begin: u64,
    /// Bytes for more pages.
    room: usize,
    pages: ByPage<PageCopy>,
    /// The pages that were written as they are at the end of the log.
    written: HashSet<u64, BuildHasherDefault<PageHasher>>,
    /// The pages that have changed, once the log was read.
    newest: Option<Arc<ChangedPages>>,
}

impl Redoer {
    fn run(mut self, jobs: &Receiver<Job>, left: &SyncSender<Result<usize>>) {
        let mut failed = None;
        for job in jobs {
            match job {
                Job::Redo(records) if failed.is_none() => {
                    failed = self.redo_all(&records).err();
                }
                Job::Redo(_) => {}
                Job::Write(pages, device) => {
                    let result = match failed.take() {
                        None => self.write(pages, &device),
                        Some(error) => Err(error),
                    };
                    // The other end waits for this, unless it has failed.
                    let _ = left.send(result);
                }
            }
        }
    }

    fn is_mine(&self, page: u64) -> bool {
        let mut hasher = PageHasher::default();
        hasher.write_u64(page);
        // Other bits than those that a map uses first.
        (hasher.finish() >> 8) % self.count == self.number
    }

    fn redo_all(&mut self, records: &[Record]) -> Result<()> {
        for record in records {
            let group = GroupRecord::read(&record.bytes).map_err(bad(record.lsn))?;
            for change in &group.pages {
                if self.is_mine(change.page.id.0) {
                    self.redo(record.lsn, change)?;
                }
            }
        }
        Ok(())
    }

    fn redo(&mut self, lsn: Lsn, change: &PageRecord<'_>) -> Result<()> {
        let (id, page) = (change.page.id.0, change.page);
        if let Redo::Image { .. } = change.redo
            && self.pages.get(&id).is_none_or(|copy| copy.page() != page)
        {
            if let Some(other) = self.pages.remove(&id) {
                self.room += other.page().bytes();
            }
            let is_wanted = match &self.newest {
                None => true,
                Some(newest) => {
                    newest.get(&id).is_some_and(|page| page.image == lsn)
                        && !self.written.contains(&id)
                }
            };
            if !is_wanted || self.room < page.bytes() && !self.pages.is_empty() {
                return Ok(());
            }
            self.room = self.room.saturating_sub(page.bytes());
            self.pages.insert(id, PageCopy::zeroed(page));
        }
        // A page for which there is no memory has no copy.
        if let Some(copy) = self.pages.get_mut(&id) {
            redo(change, lsn.0.wrapping_add(self.begin), copy.bytes_mut())?;
        }
        Ok(())
    }

    /// Writes the pages that were redone, and forgets them. Returns the number of pages that are
    /// left.
    fn write(&mut self, newest: Arc<ChangedPages>, device: &Arc<dyn Device>) -> Result<usize> {
        let mut copies: Vec<_> = self.pages.drain().map(|(_, copy)| copy).collect();
        self.room += copies.iter().map(|copy| copy.page().bytes()).sum::<usize>();
        // The others were freed later.
        copies.retain(|copy| {
            let page = newest.get(&copy.page().id.0);
            page.is_some_and(|page| page.frames == copy.page().frames)
        });
        copies.sort_unstable_by_key(|copy| copy.page().id.0);
        for copy in &mut copies {
            let (head, body) = copy.parts_mut();
            page::seal(head, body);
        }
        write_pages(device, &copies)?;
        self.written.extend(copies.iter().map(|copy| copy.page().id.0));
        let mine = newest.keys().filter(|id| self.is_mine(**id));
        let left = mine.filter(|id| !self.written.contains(id)).count();
        self.newest = Some(newest);
        Ok(left)
    }
}

/// The error of a record that no version of this program wrote.
pub(super) fn bad(lsn: Lsn) -> impl Fn(BadRecord) -> Error {
    move |BadRecord(what)| Error::BadRecord { lsn: lsn.0, what: what.into() }
}

/// Writes pages to their places.
pub(super) fn write_pages(device: &Arc<dyn Device>, pages: &[PageCopy]) -> Result<()> {
    let frames = pages.first().map_or(1, |copy| copy.page().frames as usize);
    let batches = pages.chunks((WRITE_BYTES / (frames * PAGE_SIZE)).max(1));
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
