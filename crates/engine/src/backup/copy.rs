//! Copies the pages of a store to another file, while the store runs, and makes that file a store.
//!
//! In a store with a log, a backup begins with a checkpoint. After its cut, the file has each page
//! in the state of the cut or in a newer one. A page of a tree that changes later has its image in
//! a record. So these three are one state of the store:
//!
//! 1. All pages that are in use in the cut, whatever state the file has them in, torn ones too.
//! 2. The records from the cut to an end that comes after that. Recovery writes the pages that they
//!    change.
//! 3. The pages of values and of bulk loads that the records take: records have no images of them,
//!    but they are in the file before their record is.
//!
//! Values never change. The nodes of a bulk load do, and then have their image in a later record,
//! which may come after the end. So they are copied before the end. If loads end all the time,
//! changes wait while the last of them are copied.
//!
//! The end is between two changes: a short freeze of the gate finds it. From there on until all
//! pages of values were read, places that are freed are not used again.
//!
//! Why no place needs to be held before the end: a page that is in use at the end, and that no
//! record since the cut takes or changes, was in use all the time. What else is in the file at the
//! time of the copy does not matter.
//!
//! In a store without a log, the file is the state of a checkpoint as long as the pool writes
//! nothing. So the pool's writes are paused while the pages are copied. A store that is open
//! read-only does not change.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;

use vellum_log::{Lsn, RecordRef};
use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageRef, RawPages, Space};

use super::files::Target;
use super::progress::BackupPace;
use crate::error::{Error, Result};
use crate::page::format::scratch_pool;
use crate::redo::backup_records::CopiedRecords;
use crate::redo::log::{Held, RedoLog};
use crate::redo::progress::RecoveryListener;
use crate::redo::record::GroupRecord;
use crate::redo::records::Records;
use crate::redo::recover::{Recovered, Recovery};
use crate::redo::redoer::RedoLimits;
use crate::store::callback::CallbackScope;
use crate::store::changes::{BackupState, BackupUnderWay, WrittenFrames};
use crate::store::core::StoreCore;
use crate::store::cut::BackupCut;
use crate::store::free_map::FileMap;
use crate::store::header::{Header, LogPoint};

/// So many frames are read at once.
const CHUNK: u64 = 64;
/// The most frames whose reads are under way. When half of them were visited, more reads begin.
const AHEAD_FRAMES: u64 = 4 * CHUNK;
/// The most reads that are under way. What was written since a backup may be single frames.
const AHEAD_READS: usize = 64;
/// Frames of the pool through which the file is read.
const POOL: u64 = 16 * CHUNK;
/// In so many rounds what was added meanwhile is copied while changes go on.
const ROUNDS: u32 = 4;
/// What redo may use, beside a store that is in use.
const REDO_LIMITS: RedoLimits = RedoLimits { threads: 1, bytes: 32 << 20, list_bytes: None };

/// A store to copy, and the file that becomes the copy.
pub(super) struct Copying<'a, 'f> {
    core: &'a StoreCore,
    to: Target<'a>,
    pace: &'a mut BackupPace<'f>,
    /// The file has this state already.
    base: Option<(BackupState, Vec<(u64, u64)>)>,
    read_bytes: u64,
    /// What the store writes meanwhile.
    under_way: Option<BackupUnderWay>,
}

impl<'a, 'f> Copying<'a, 'f> {
    pub(super) fn new(core: &'a StoreCore, to: Target<'a>, pace: &'a mut BackupPace<'f>) -> Self {
        Copying { core, to, pace, base: None, read_bytes: 0, under_way: None }
    }

    /// The file has a state already, with these ranges (start, count) of frames: what the store has
    /// not written since then is not read.
    pub(super) fn read_since(&mut self, state: BackupState, ranges: Vec<(u64, u64)>) {
        self.base = Some((state, ranges));
    }

    /// The bytes of the store's file that were read, and what the store has written meanwhile.
    pub(super) fn finish(self) -> (u64, Option<BackupUnderWay>) {
        (self.read_bytes, self.under_way)
    }

    /// The ranges (start, count) that the file does not have as the store has them in a cut. The
    /// pages of the cut are written.
    fn ranges_to_read(&self, space: &Space) -> Vec<(u64, u64)> {
        let base = self.base.as_ref();
        let known = base
            .and_then(|(state, ranges)| Some((self.core.pages.file.changes.since(state)?, ranges)));
        match known {
            Some((written, ranges)) => changed(&used(space), ranges, &written),
            None => used(space),
        }
    }

    /// Makes the file a clean store with the state of the store now. `records` is an empty file for
    /// the records of the log.
    pub(super) fn run(&mut self, records: File) -> Result<Recovered> {
        let core = self.core;
        if let Some(log) = &core.pages.redo_log {
            return self.run_with_log(log, records);
        }
        if matches!(core.pages.check_writable(), Err(Error::ReadOnly)) {
            let places = core.checkpoint_lock().places().to_vec();
            let space = core.pages.pool.with_space(Space::clone);
            let header = core.pages.header();
            let map = FileMap { places, ..FileMap::of_space(space) };
            return self.run_still(BackupCut { header, map, held: None, under_way: None });
        }
        let mut checkpoints = core.checkpoint_lock();
        let (cut, paused) = core.cut_to_copy(&mut checkpoints)?;
        // The caller's function must not wait for the lock.
        let _scope = CallbackScope::of(&core.pages.gate);
        let copied = self.run_still(cut);
        drop(paused);
        copied
    }

    /// Copies a file that does not change.
    fn run_still(&mut self, cut: BackupCut) -> Result<Recovered> {
        self.copy_all(&self.ranges_to_read(&cut.map.space), None)?;
        let log = cut.header.log.without_log();
        let header = Header { listed: 0, changes: false, log, ..cut.header };
        let (none, end) = (RecoveryListener::default(), Lsn(log.lsn));
        let mut recovery = Recovery::new(header, cut.map, end, REDO_LIMITS, &none)?;
        recovery.end_at(end)?;
        let written = recovery.write(&header.encode(&[]), self.to.device, &NoRecords);
        written.map_err(|error| self.to.failed(error))
    }

    fn run_with_log(&mut self, log: &Arc<RedoLog>, records: File) -> Result<Recovered> {
        let pages = &self.core.pages;
        let BackupCut { header, map, held, under_way } = pages.cut_for_backup(log, records)?;
        self.under_way = under_way;
        let held = held.unwrap_or_else(|| unreachable!("a cut of a log holds it"));
        // The copy has no log, whatever becomes of the store's. Recovery needs the numbers.
        let header =
            Header { log: LogPoint { identity: 0, ..header.log }, changes: false, ..header };
        self.copy_all(&self.ranges_to_read(&map.space), Some(&held))?;

        let none = RecoveryListener::default();
        let mut recovery = Recovery::new(header, map, Lsn(0), REDO_LIMITS, &none)?;
        let (mut read, mut rounds) = (0, 0);
        let (loads, maps, freeze) = loop {
            let loads = pages.loads();
            pages.sync_log(log)?;
            held.copy(log.durable())?;
            let (next, values) = add_records(&held, read, &mut recovery)?;
            read = next;
            self.copy(&values, true, Some(&held))?;
            rounds += 1;
            // In this order, changes go on while this thread waits for a checkpoint.
            let (maps, freeze) = (log.lock_maps(), pages.freeze()?);
            if pages.loads() == loads || rounds == ROUNDS {
                break (loads, maps, freeze);
            }
        };
        let end = held.end_at_now(&freeze, &maps);
        let unlinked = pages.unlinked.ranges();
        // If loads have ended again, changes wait until their nodes are copied.
        let frozen = (pages.loads() != loads).then_some((freeze, maps));
        pages.sync_log(log)?;
        held.copy(end)?;
        let (_, values) = add_records(&held, read, &mut recovery)?;
        let mut untold = 0;
        match &frozen {
            Some(_) => untold = self.copy_quietly(&values)?,
            // Not slower than it has to be, because places are held.
            None => self.copy(&values, false, Some(&held))?,
        }
        drop(frozen);
        self.read_bytes += untold;
        self.pace.advance(untold)?;
        pages.check_open()?;
        held.release_places();

        for (start, count) in unlinked {
            recovery.give_back(start, count)?;
        }
        recovery.end_at(held.number_in_log(end))?;
        let written = recovery.write(&header.encode(&[]), self.to.device, held.records());
        written.map_err(|error| self.to.failed(error))
    }

    /// Copies ranges (start, count) of the file while changes wait: calls no function of the
    /// caller, which might change the store. Returns the number of bytes.
    fn copy_quietly(&mut self, ranges: &[(u64, u64)]) -> Result<u64> {
        self.to.grow(ranges.iter().map(|(start, count)| start + count).max().unwrap_or(0))?;
        let mut copied = 0;
        read_frames(&self.core.pages.device, ranges, &mut |first, bytes| {
            copied += bytes.len() as u64;
            self.to.write(first, bytes)
        })?;
        Ok(copied)
    }

    /// Copies the ranges (start, count) that the copy begins with.
    fn copy_all(&mut self, ranges: &[(u64, u64)], held: Option<&Held>) -> Result<()> {
        self.pace.expect(ranges.iter().map(|(_, count)| count * PAGE_SIZE as u64).sum());
        self.copy(ranges, true, held)
    }

    /// Copies ranges (start, count) of the file.
    fn copy(&mut self, ranges: &[(u64, u64)], limited: bool, held: Option<&Held>) -> Result<()> {
        let core = self.core;
        let end = ranges.iter().map(|(start, count)| start + count).max().unwrap_or(0);
        self.to.grow(end)?;
        let (to, pace, read_bytes) = (self.to, &mut *self.pace, &mut self.read_bytes);
        let mut meanwhile = || {
            core.pages.check_open()?;
            match (held, &core.pages.redo_log) {
                (Some(held), Some(log)) => held.copy(log.durable()),
                _ => Ok(()),
            }
        };
        read_frames(&core.pages.device, ranges, &mut |first, bytes| {
            // After the read: another process may have what is read after the store was closed.
            core.pages.check_open()?;
            to.write(first, bytes)?;
            let bytes = bytes.len() as u64;
            *read_bytes += bytes;
            match limited {
                true => pace.advance_within_limit(bytes, &mut meanwhile),
                false => pace.advance(bytes),
            }
        })
        .map_err(|error| core.pages.check_open().err().unwrap_or(error))
    }
}

/// Recovery of a file that needs none.
struct NoRecords;

impl Records for NoRecords {
    fn each(&self, _from: Lsn, _visit: &mut dyn FnMut(RecordRef<'_>) -> Result<()>) -> Result<()> {
        Ok(())
    }
}

/// The ranges (start, count) of a file that are in use.
pub(super) fn used(space: &Space) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    let mut next = space.first();
    for (start, count) in space.free_extents().chain([(space.end(), 0)]) {
        if start > next {
            ranges.push((next, start - next));
        }
        next = start + count;
    }
    ranges
}

/// The parts of ranges (start, count) in use that a base does not have as they are: what was
/// written since, and what is in none of the base's ranges. All ranges are in order.
fn changed(used: &[(u64, u64)], base: &[(u64, u64)], written: &WrittenFrames) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut base = base.iter().peekable();
    for (start, count) in used {
        let mut last: Option<(u64, u64)> = None;
        for frame in *start..start + count {
            while base.next_if(|(start, count)| start + count <= frame).is_some() {}
            if base.peek().is_some_and(|(start, _)| *start <= frame) && !written.has(frame) {
                continue;
            }
            match &mut last {
                Some((first, count)) if *first + *count == frame => *count += 1,
                last => ranges.extend(last.replace((frame, 1))),
            }
        }
        ranges.extend(last);
    }
    ranges
}

/// Calls `visit` with the frames of ranges (start, count) of a file, in order: the number of the
/// first one, and the bytes of it and the ones after it.
///
/// # Errors
/// A failed read, the error of `visit`.
pub(super) fn read_frames(
    device: &Arc<dyn Device>,
    ranges: &[(u64, u64)],
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    if ranges.is_empty() {
        return Ok(());
    }
    // A new one each time: the file may have changed since the last time.
    let pool = scratch_pool(device, Arc::new(RawPages), POOL)?;
    let mut chunks = ranges.iter().flat_map(|(start, count)| {
        let chunks = (*start..start + count).step_by(CHUNK as usize);
        chunks.map(move |first| PageRef::new(first, CHUNK.min(start + count - first) as u32))
    });
    let mut ahead: VecDeque<PageRef> = VecDeque::new();
    let mut frames = 0;
    loop {
        if frames <= AHEAD_FRAMES / 2 && ahead.len() <= AHEAD_READS / 2 {
            let mut more = Vec::new();
            while frames < AHEAD_FRAMES
                && ahead.len() + more.len() < AHEAD_READS
                && let Some(chunk) = chunks.next()
            {
                frames += u64::from(chunk.frames);
                more.push(chunk);
            }
            pool.evict_and_prefetch(&more);
            ahead.extend(more);
        }
        let Some(chunk) = ahead.pop_front() else { return Ok(()) };
        frames -= u64::from(chunk.frames);
        let bytes = pool.fix_shared(chunk)?;
        visit(chunk.id.0, &bytes)?;
    }
}

/// Adds the records from the byte `from` of their copy on. Returns the byte after them, and the
/// ranges of pages that they take, in order, without the pages of which they have images. A range
/// of several pages may have some of these: recovery writes them later.
fn add_records(
    held: &Held,
    from: u64,
    recovery: &mut Recovery<'_>,
) -> Result<(u64, Vec<(u64, u64)>)> {
    let mut taken = Vec::new();
    let records: &CopiedRecords = held.records();
    let end = records.read(from, &mut |record| {
        if let Ok(group) = GroupRecord::read(record.bytes) {
            taken.extend(group.taken.iter().map(|range| (range.id.0, u64::from(range.frames))));
        }
        recovery.add(record)
    })?;
    taken.retain(|range| !recovery.has_image(*range));
    taken.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (start, count) in taken {
        match ranges.last_mut() {
            Some((first, len)) if *first + *len >= start => {
                *len = (*len).max(start + count - *first);
            }
            _ => ranges.push((start, count)),
        }
    }
    Ok((end, ranges))
}
