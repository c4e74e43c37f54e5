//! Cuts: checkpoints of a store with a log (`PageStore::change`, `Store::close`).
//!
//! The checkpoint freezes changes for the *cut* alone. There it notes the end of the log, the free
//! map and the rest of the header. Then changes go on, and the pool writes pages as it likes. The
//! checkpoint writes the pages that are dirty now, in any newer state, the free map of the cut, and
//! last a header in use with what it noted. The log may then reuse the room of the records before
//! the cut: all that they say is in the file.
//!
//! Most checkpoints are written by a thread (`store/cutter.rs`), while half of the log is empty and
//! no change waits. They are paced: the part of its pages that such a checkpoint has written
//! follows the part of that half that changes have used, so that commits do not find the device
//! busy with all these pages at once. It goes on at full pace when a thread waits for it, and at a
//! slow one when there are no changes.
//!
//! Such a checkpoint writes no node that has changed again since the cut: the log has its image
//! then. It waits until these images are durable, and the node stays dirty. Each fourth one writes
//! them too, so that the file without the log does not fall back without a bound.
//!
//! The pages are written in the order of the file, and not the oldest first: the log gives back the
//! records before the cut, all at once, and not before all these pages are written.
//!
//! After a crash, the header's free map and the records from its cut on describe the store. So the
//! free map of a header must stay as it is until the next header is durable. There are two sets of
//! places for free maps, which take turns. In the map of a cut, the places of the other set count
//! as free, and so do unlinked pages and pages that wait to be freed.

use std::fs::File;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vellum_log::LogError;
use vellum_pool::{PageRef, Space};

use crate::error::{Error, Result};
use crate::page;
use crate::planted::{StoreBug, is_planted};
use crate::redo::log::{Held, MapPlaces, RedoLog, RoomPromise};
use crate::store::changes::BackupUnderWay;
use crate::store::free_map::{self, FileMap, FreeMap};
use crate::store::gate::Freeze;
use crate::store::header::Header;
use crate::store::pages::PageStore;

/// The frames that a paced checkpoint writes at once: 256 KiB. A commit that comes meanwhile waits
/// for them.
const PACED_FRAMES: u32 = 64;

/// How long a paced checkpoint waits for changes before it writes its next pages all the same. With
/// [`PAUSES`] of these, it writes some 12 MiB/s where there are none.
const PAUSE: Duration = Duration::from_millis(1);
pub(crate) const PAUSES: u32 = 20;

/// How often a change asks for room in a full log while other changes have some.
const ROOM_TRIES: u32 = 1000;
const ROOM_PAUSE: Duration = Duration::from_millis(1);

/// How fast a checkpoint writes its pages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CheckpointPace {
    /// As fast as it can.
    Full,
    /// As fast as changes use the room that they have in the log.
    Changes,
}

/// What a cut has noted.
struct Cut {
    lsn: u64,
    header: Header,
    map: FreeMap,
}

/// What a backup begins with.
pub(crate) struct BackupCut {
    /// The header of the cut, as the file has it.
    pub header: Header,
    /// The free map of the cut.
    pub map: FileMap,
    /// The records from the cut on, in a store with a log.
    pub held: Option<Held>,
    /// What was written since the cut, in a store with a log.
    pub under_way: Option<BackupUnderWay>,
}

/// The space that a free map describes.
///
/// # Errors
/// If the map is not consistent.
pub(crate) fn decode_space(map: FreeMap) -> Result<Space> {
    Space::decode(&map.encode()).map_err(|error| {
        Error::damaged(PageRef::new(0, 1), format!("the free map in memory: {error}"))
    })
}

/// The end of the last of some places; 0 if there are none.
pub(crate) fn end_of(places: &[PageRef]) -> u64 {
    places.iter().map(|place| place.id.0 + u64::from(place.frames)).max().unwrap_or(0)
}

impl PageStore {
    /// Makes all changes durable that ended before this.
    pub(crate) fn sync_log(&self, log: &RedoLog) -> Result<()> {
        log.wait_durable(log.newest())?;
        if is_planted(StoreBug::EarlyTrim) {
            log.trim(log.durable())?;
        }
        Ok(())
    }

    /// If the log is so long that a checkpoint is due, this thread writes one, or waits for the
    /// thread that does. The caller has not begun a change.
    #[cold]
    pub(crate) fn cut_log(&self, log: &RedoLog) -> Result<()> {
        self.cut_log_if(log, RedoLog::is_cut_due)
    }

    /// The same, by a thread of the store for which no change waits.
    pub(crate) fn cut_log_in_background(&self, log: &RedoLog) -> Result<()> {
        let mut maps = log.lock_maps();
        match log.is_cut_due() {
            true => self.write_cut(log, &mut maps, CheckpointPace::Changes),
            false => Ok(()),
        }
    }

    /// The same, if the log is as long as `is_long` asks.
    pub(crate) fn cut_log_if(&self, log: &RedoLog, is_long: fn(&RedoLog) -> bool) -> Result<()> {
        let mut maps = log.lock_maps();
        match is_long(log) {
            true => self.write_cut(log, &mut maps, CheckpointPace::Full),
            false => Ok(()),
        }
    }

    /// Waits for a checkpoint that is under way, or writes one, because the log has no room for a
    /// change. The caller has not begun a change.
    ///
    /// # Errors
    /// If the log has no room after that.
    #[cold]
    pub(crate) fn wait_for_room<'a>(
        &self,
        log: &'a RedoLog,
        record: u64,
    ) -> Result<RoomPromise<'a>> {
        for _ in 0..ROOM_TRIES {
            // While this thread holds the lock, no checkpoint has noted a cut and not trimmed yet.
            let mut maps = log.lock_maps();
            let mut promised = log.promise_room(record);
            if promised.is_err() && log.can_trim() {
                self.write_cut(log, &mut maps, CheckpointPace::Full)?;
                promised = log.promise_room(record);
            }
            let can_trim = log.can_trim();
            drop(maps);
            match promised {
                // Other changes have room that they may not need, or have used what came free.
                Err(LogError::Full { bytes, .. }) if can_trim || log.is_shared(bytes, record) => {
                    thread::sleep(ROOM_PAUSE);
                }
                promised => return Ok(promised?),
            }
        }
        Ok(log.promise_room(record)?)
    }

    fn write_cut(&self, log: &RedoLog, maps: &mut MapPlaces, pace: CheckpointPace) -> Result<()> {
        let cut = self.begin_cut(log, maps)?;
        let header = Header { clean: false, log: log.point(cut.lsn), ..cut.header };
        self.write_log_cut(log, cut, header, maps, pace)?;
        // The pages for which the log had no room before.
        self.try_reclaim_unlinked();
        Ok(())
    }

    /// Writes a checkpoint, for a caller that has frozen the gate.
    pub(crate) fn write_cut_frozen(
        &self,
        log: &RedoLog,
        freeze: &Freeze<'_>,
        maps: &mut MapPlaces,
    ) -> Result<()> {
        self.check_writable()?;
        self.reclaim_unlinked();
        let cut = self.note_cut(log, freeze, maps)?;
        let header = Header { clean: false, log: log.point(cut.lsn), ..cut.header };
        self.write_log_cut(log, cut, header, maps, CheckpointPace::Full)
    }

    fn begin_cut(&self, log: &RedoLog, maps: &mut MapPlaces) -> Result<Cut> {
        self.check_writable()?;
        // While changes go on.
        self.redo_pending(log)?;
        let freeze = self.freeze_to_save()?;
        self.reclaim_unlinked();
        self.note_cut(log, &freeze, maps)
    }

    /// Writes a checkpoint, from which a backup begins: all pages are in the file, in the state of
    /// the cut or a newer one. From the cut on, records are copied to `records`, an empty file.
    pub(crate) fn cut_for_backup(&self, log: &Arc<RedoLog>, records: File) -> Result<BackupCut> {
        let mut maps = log.lock_maps();
        let cut = self.begin_cut(log, &mut maps)?;
        let held = log.begin_hold(cut.lsn, records)?;
        let header = Header { clean: false, log: log.point(cut.lsn), ..cut.header };
        let space = decode_space(cut.map.clone())?;
        self.write_log_cut(log, cut, header, &mut maps, CheckpointPace::Full)?;
        let header = Header { sequence: self.file.header().sequence, ..header };
        // All pages of the cut are in the file.
        let under_way = Some(self.file.changes.begin(&space));
        let map = FileMap { places: maps.newest.clone(), ..FileMap::of_space(space) };
        Ok(BackupCut { header, map, held: Some(held), under_way })
    }

    /// Writes a checkpoint after a backup, so that a crash does not have the store forget what was
    /// written since. The backup is complete, also if this fails.
    pub(crate) fn save_changes(&self) {
        if let Some(log) = &self.redo_log
            && let Err(error) = self.cut_log_if(log, |_| true)
        {
            tracing::warn!("the next increment will read all pages after a crash: {error}");
        }
    }

    /// Writes a checkpoint after which the store needs no log, and truncates the file's unused
    /// tail.
    pub(crate) fn end_log(
        &self,
        log: &RedoLog,
        freeze: &Freeze<'_>,
        maps: &mut MapPlaces,
    ) -> Result<()> {
        self.check_writable()?;
        self.reclaim_unlinked();
        // After this, the places that wait for the log are free.
        self.sync_log(log)?;
        self.pool.write_dirty()?;
        // The map goes where the file is used.
        while let Some(place) = maps.next.pop() {
            self.pool.free_place(place)?;
        }
        self.pool.trim_space()?;
        let cut = self.note_cut(log, freeze, maps)?;
        let header = Header {
            clean: true,
            file_pages: self.pool.end(),
            log: log.point(cut.lsn),
            ..cut.header
        };
        self.write_log_cut(log, cut, header, maps, CheckpointPace::Full)?;
        // Only now: the header before this one needs the file's whole length. No error: the header
        // is clean, so no later change may rely on the log.
        if let Err(error) = self.pool.trim_to(header.file_pages) {
            tracing::warn!("the file stays longer than its pages: {error}");
        }
        Ok(())
    }

    /// Writes a checkpoint after which the file may be as short as its used part, and cuts the rest
    /// off, while changes go on. Returns false, and does nothing, while a backup is under way: it
    /// reads the file as long as it was.
    pub(crate) fn shorten_with_log(&self, log: &RedoLog) -> Result<bool> {
        self.check_writable()?;
        self.redo_pending(log)?;
        // After this, the places that wait for the log are free.
        self.try_reclaim_unlinked();
        self.sync_log(log)?;
        let mut maps = log.lock_maps();
        if log.is_held(&maps) {
            return Ok(false);
        }
        // The newest header needs its map where it is. So the second set of places moves in the
        // checkpoint after the one in which the first set moves.
        for _ in 0..2 {
            let freeze = self.freeze_to_save()?;
            self.reclaim_unlinked();
            while let Some(place) = maps.next.pop() {
                self.pool.free_place(place)?;
            }
            self.allocate_low_places(&mut maps)?;
            self.pool.trim_space()?;
            let cut = self.note_cut(log, &freeze, &mut maps)?;
            // The file gets shorter only when this header is durable. Until then, and if it gets
            // longer meanwhile, it has at least so many pages.
            let file_pages = self.pool.end();
            drop(freeze);
            let point = log.point(cut.lsn);
            let header = Header { clean: false, log: point, file_pages, ..cut.header };
            if is_planted(StoreBug::EarlyEnd) {
                self.pool.trim_to(file_pages)?;
            }
            self.write_log_cut(log, cut, header, &mut maps, CheckpointPace::Full)?;
            // While this thread holds the lock, no checkpoint notes the length of the file.
            self.pool.trim_to(file_pages)?;
            if self.goal() >= end_of(&maps.next) {
                break;
            }
        }
        Ok(true)
    }

    /// Allocates the next places for a free map, as low as possible.
    fn allocate_low_places(&self, maps: &mut MapPlaces) -> Result<()> {
        loop {
            let pages = self.free_map(&maps.newest).pages(self.page_frames);
            if pages <= maps.next.len() {
                return Ok(());
            }
            while maps.next.len() < pages {
                maps.next.push(self.allocate_low_place()?);
            }
        }
    }

    /// Allocates the lowest place for a page of the free map.
    pub(crate) fn allocate_low_place(&self) -> Result<PageRef> {
        let frames = self.page_frames;
        match self.pool.allocate_place_below(frames, self.pool.end())? {
            Some(place) => Ok(place),
            None => Ok(self.pool.allocate_place(frames)?),
        }
    }

    /// The end that the file would have without free pages.
    pub(crate) fn goal(&self) -> u64 {
        let to_free = self.pool.frames_to_free();
        let allocated = self.pool.with_space(|space| space.first() + space.allocated_pages());
        allocated.saturating_sub(to_free)
    }

    /// Notes the end of the log and the state of the store there.
    fn note_cut(&self, log: &RedoLog, _freeze: &Freeze<'_>, maps: &mut MapPlaces) -> Result<Cut> {
        let mut has_room_for_changes = true;
        let map = loop {
            // An allocation takes pages from the free ranges, so the map does not grow.
            let mut map = self.free_map(&maps.newest);
            map.changes_len = map.changes_len.filter(|_| has_room_for_changes);
            let pages = map.pages(self.page_frames);
            if pages <= maps.next.len() {
                break map;
            }
            while maps.next.len() < pages {
                match self.pool.allocate_place(self.page_frames) {
                    Ok(place) => maps.next.push(place),
                    // A full disk is no reason for this checkpoint to fail.
                    Err(_) if map.changes_len.is_some() => {
                        has_room_for_changes = false;
                        break;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        let header = Header {
            free_map: maps.next.first().map_or(0, |page| page.id.0),
            changes: map.changes_len.is_some(),
            file_pages: self.pool.file_pages(),
            ..self.header()
        };
        Ok(Cut { lsn: log.cut_at_end(), header, map })
    }

    /// Writes what a cut has noted, while changes go on.
    fn write_log_cut(
        &self,
        log: &RedoLog,
        cut: Cut,
        header: Header,
        maps: &mut MapPlaces,
        pace: CheckpointPace,
    ) -> Result<()> {
        // The log gives up the records before the cut, and repairs do without them.
        self.redo_pending(log)?;
        self.sync_log(log)?;
        if is_planted(StoreBug::EarlyHeader) {
            self.file.write_cut(header)?;
        }
        log.note_repairs();
        self.write_pages_of_cut(log, pace)?;
        self.pool.write_pages(&log.repair_from(cut.lsn))?;
        // The memory of a page that was freed since the cut is gone, and the page was perhaps never
        // written. Nor was a node that has changed since, by this checkpoint. Recovery needs the
        // records of these changes, since those before the cut go.
        self.sync_log(log)?;
        let changes_len = cut.map.changes_len;
        let mut map = cut.map.encode();
        if let Some(len) = changes_len {
            // Not before: it has all pages that the cut has written.
            self.file.changes.encode(len, &mut map);
        }
        self.pool.write_copies(&free_map::pages(&map, &maps.next))?;
        self.pool.sync_device()?;
        self.file.write_cut(header)?;
        if !is_planted(StoreBug::MapInPlace) {
            std::mem::swap(&mut maps.newest, &mut maps.next);
        }
        match log.trim(cut.lsn) {
            // No later change may rely on the log of a clean file.
            Err(error) if header.clean => tracing::warn!("the log stays as long as it is: {error}"),
            trimmed => trimmed?,
        }
        Ok(())
    }

    /// Writes the pages that are dirty now.
    fn write_pages_of_cut(&self, log: &RedoLog, pace: CheckpointPace) -> Result<()> {
        let pages = self.pool.pages_to_write()?;
        if pace == CheckpointPace::Full {
            return Ok(self.pool.write_pages(&pages)?);
        }
        let room = u128::from(log.room_of_paced_cut());
        // Whether changes have used as large a part of their room as this is of the pages.
        let have_used = |share: usize| {
            u128::from(log.bytes_since_cut()) * pages.len() as u128 >= room * share as u128
        };
        // The log has the image of a node that has changed since the cut, so recovery does not need
        // it in the file. A later checkpoint writes it, or the pool when it leaves memory. That
        // holds because a change has its permit from before it asks for the image until after its
        // record, so no cut comes between; because only a record gives a page a number, and a new
        // page has none; and because every free has its record before the memory goes.
        let leaves_out = log.leaves_nodes_out();
        let is_needed =
            |bytes: &[u8]| !(leaves_out && page::is_node(bytes) && log.has_image(bytes));
        let at_once = (PACED_FRAMES / self.page_frames).max(1) as usize;
        let mut written = 0;
        while written < pages.len() {
            for _ in 0..log.pauses {
                if have_used(written) || log.is_awaited() || !log.cut_signal.pause(PAUSE) {
                    break;
                }
            }
            let next = if log.is_awaited() { pages.len() } else { written + at_once };
            let next = next.min(pages.len());
            if !leaves_out {
                // So that no write waits for newer records while it holds its pages.
                self.sync_log(log)?;
            }
            self.pool.write_wanted_pages(&pages[written..next], &is_needed)?;
            written = next;
        }
        Ok(())
    }

    /// The current free map, in which `places` are free as well, for a checkpoint.
    pub(crate) fn free_map(&self, places: &[PageRef]) -> FreeMap {
        let (space, mut given_back) = self.pool.snapshot_space();
        given_back.extend(self.unlinked.ranges());
        given_back.extend(places.iter().map(|page| (page.id.0, u64::from(page.frames))));
        let changes_len = self.redo_log.as_ref().and_then(|_| self.file.changes.encoded_len());
        FreeMap { space, given_back, changes_len }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use rustix::io::Errno;
    use vellum_log::{SimulatedDevice, SimulatedOptions};
    use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};
    use vellum_testing::patience::eventually;

    use super::PACED_FRAMES;
    use crate::redo::log::RedoLog;
    use crate::{BackupOptions, Options, Store};

    fn options() -> Options {
        let segments = SimulatedOptions { segments: 64, segment_blocks: 16, ..Default::default() };
        Options {
            log: Some(Arc::new(SimulatedDevice::new(segments))),
            log_bytes: 16 << 10,
            evictors: 0,
            cut_in_background: false,
            ..Options::new().pool_bytes(1 << 20)
        }
    }

    /// The pages that a checkpoint writes at once.
    const AT_ONCE: usize = PACED_FRAMES as usize;

    /// A paced checkpoint of some thousand pages, which waits for changes without end.
    struct Paced {
        log_device: Arc<SimulatedDevice>,
        memory: Arc<MemoryDevice>,
        device: Arc<FaultyDevice<Arc<MemoryDevice>>>,
        store: Store,
        /// The keys are the numbers below this.
        keys: u64,
        /// The room that changes have before the checkpoint ends, or a little less.
        room: u64,
    }

    fn paced_options(log: &Arc<SimulatedDevice>) -> Options {
        Options {
            log: Some(log.clone()),
            log_bytes: 32 << 20,
            evictors: 0,
            cut_pauses: Some(u32::MAX),
            ..Options::new().pool_bytes(32 << 20)
        }
    }

    impl Paced {
        fn begin() -> Paced {
            Paced::begin_after(0)
        }

        /// As if there had been so many before.
        fn begin_after(checkpoints: usize) -> Paced {
            let segments =
                SimulatedOptions { segments: 64, segment_blocks: 256, ..Default::default() };
            let log_device = Arc::new(SimulatedDevice::new(segments));
            let memory = Arc::new(MemoryDevice::new());
            let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
            let store = Store::create_on(device.clone(), &paced_options(&log_device)).unwrap();
            store.create_tree("tree").unwrap();
            let mut paced = Paced { log_device, memory, device, store, keys: 0, room: 0 };
            for _ in 0..checkpoints {
                paced.log().leaves_nodes_out();
            }
            let before = paced.log().newest_cut();
            let mut is_due = false;
            while !is_due {
                is_due = paced.log().is_cut_due();
                paced.put(paced.keys);
                paced.keys += 1;
            }
            eventually("the checkpoint begins", || paced.log().newest_cut() > before);
            paced.room = paced.log().room_of_paced_cut();
            paced
        }

        /// The store after a loss of power.
        fn crash(&self) -> Store {
            let log = Arc::new(self.log_device.crash());
            let memory = Arc::new(MemoryDevice::from_snapshot(self.memory.snapshot()));
            Store::open_on(memory, &paced_options(&log)).unwrap()
        }

        fn log(&self) -> &RedoLog {
            self.store.core.pages.redo_log.as_ref().unwrap()
        }

        /// Returns the value, which no other entry has.
        fn put(&self, number: u64) -> Vec<u8> {
            let tree = self.store.tree("tree").unwrap();
            let value = self.log().end().to_be_bytes().repeat(100);
            tree.upsert(&number.to_be_bytes(), &value).unwrap();
            value
        }

        fn file_has(&self, value: &[u8]) -> bool {
            let bytes = self.memory.snapshot();
            bytes.windows(value.len()).any(|part| part == value)
        }

        /// Changes one entry until changes have used so many percent of their room.
        fn use_room(&self, percent: u64) {
            while self.log().bytes_since_cut() < self.room * percent / 100 {
                self.put(0);
            }
        }

        fn writes(&self) -> usize {
            self.device.plan().counts().writes as usize
        }

        fn dirty(&self) -> usize {
            self.store.core.pages.pool.dirty_pages()
        }
    }

    #[test]
    fn a_checkpoint_in_the_background_goes_on_as_changes_do() {
        let paced = Paced::begin();
        eventually("the first pages are written", || paced.writes() >= AT_ONCE);
        // The pages of a batch that ends just now count twice: the device has written them, and the
        // pool has not called them clean.
        let begin = paced.writes();
        let all = begin + paced.dirty();
        assert!(all > 8 * AT_ONCE, "{all}");
        for percent in [10, 30, 60] {
            paced.use_room(percent);
            let share = all * percent as usize / 100;
            eventually("pages follow changes", || paced.writes() + AT_ONCE >= share);
            thread::sleep(Duration::from_millis(50));
            let writes = paced.writes();
            assert!(writes <= share + 2 * AT_ONCE, "{writes} of {all} for {percent} %");
        }
        assert!(paced.log().is_cut_under_way());
        paced.use_room(100);
        eventually("the checkpoint ends", || !paced.log().is_cut_under_way());
    }

    /// The checkpoint does not write a leaf that has changed since its cut, and gives up the
    /// records before the cut. The file does not have the leaf then, and the log must have its
    /// image.
    #[test]
    fn a_leaf_that_changed_since_the_cut_is_in_the_log() {
        for (checkpoints, is_written) in [(0, false), (3, true), (4, false)] {
            let paced = Paced::begin_after(checkpoints);
            eventually("the first pages are written", || paced.writes() >= AT_ONCE);
            // Its leaf is one of those that are written last. The very last ones may be new.
            let value = paced.put(paced.keys - 100);
            let cut = paced.log().newest_cut();
            drop(paced.log().lock_maps());
            assert!(!paced.log().is_cut_under_way() && paced.log().newest_cut() == cut);
            assert_eq!(paced.file_has(&value), is_written, "{checkpoints}");
            let store = paced.crash();
            let tree = store.tree("tree").unwrap();
            let missing = (0..paced.keys).find(|key| !tree.contains(&key.to_be_bytes()).unwrap());
            assert_eq!(missing, None, "of {}", paced.keys);
        }
    }

    /// The memory of a page that is freed goes at once. So the checkpoint does not write the page,
    /// and it gives up the records that have it. The tree needs the page after a crash, unless the
    /// record that frees it is durable.
    #[test]
    fn a_leaf_that_was_freed_since_the_cut_is_not_missed() {
        let paced = Paced::begin();
        eventually("the first pages are written", || paced.writes() >= AT_ONCE);
        // Their leaves are at the file's end, which the checkpoint has not written.
        let removed: Vec<u64> = (paced.keys - 40..paced.keys - 10).collect();
        let tree = paced.store.tree("tree").unwrap();
        for key in &removed {
            assert!(tree.remove(&key.to_be_bytes()).unwrap());
        }
        assert!(paced.store.core.pages.pool.frames_to_free() > 0);
        drop(paced.log().lock_maps());
        assert!(!paced.log().is_cut_under_way());
        let store = paced.crash();
        let tree = store.tree("tree").unwrap();
        let has = |key: &u64| tree.contains(&key.to_be_bytes()).unwrap();
        let gone = removed.iter().take_while(|key| !has(key)).count();
        assert!(removed[gone..].iter().all(has), "{gone} of {}", removed.len());
        let mut others = (0..paced.keys).filter(|key| !removed.contains(key));
        assert_eq!(others.find(|key| !has(key)), None, "of {}", paced.keys);
    }

    /// Those who wait for a checkpoint would wait for changes without end.
    #[test]
    fn a_checkpoint_that_is_awaited_goes_on_at_full_pace() {
        let folder = tempfile::tempdir().unwrap();
        let paced = Paced::begin();
        let to = folder.path().join("backup");
        let mut goes_on = |_| ControlFlow::Continue(());
        paced.store.backup(&to, &BackupOptions::new(), &mut goes_on).unwrap();
        let paced = Paced::begin();
        paced.store.check(&mut |_| ()).unwrap();
        let paced = Paced::begin();
        let tree = paced.store.tree("tree").unwrap();
        let bytes = paced.log().end() + (40 << 20);
        // The log has no room for so much.
        (0..).take_while(|_| paced.log().end() < bytes).for_each(|number| {
            tree.upsert(&u64::to_be_bytes(number), &[8; 800]).unwrap();
        });
        let paced = Paced::begin();
        paced.store.close().unwrap();
        // The last handle.
        let paced = Paced::begin();
        drop(paced.store);
    }

    /// The header that comes last replaces one that only later builds read. If it cannot be
    /// written, the file is closed all the same.
    #[test]
    fn a_close_that_cannot_write_its_last_header_has_closed_the_file() {
        let mut writes = None;
        for fails in [false, true] {
            let memory = Arc::new(MemoryDevice::new());
            let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
            let store = Store::create_on(device.clone(), &options()).unwrap();
            let tree = store.create_tree("tree").unwrap();
            for number in 0..100_u16 {
                tree.insert(&number.to_be_bytes(), &[7; 300]).unwrap();
            }
            if let Some(writes) = writes {
                device.plan().fail_nth(Operation::Write, writes, Fault::Error(Errno::IO));
            }
            let before = device.plan().counts().writes;
            assert_eq!(store.close().is_err(), fails);
            writes = Some(device.plan().counts().writes - before);
            let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
            let bytes = copy.snapshot();
            let version = |page: usize| bytes[page * 4096 + 48];
            let versions = [version(0), version(1)];
            assert_eq!(versions.iter().max(), Some(if fails { &8 } else { &5 }), "{versions:?}");
            let plain = Options::new().pool_bytes(1 << 20);
            let store = Store::open_on(copy, &plain).unwrap();
            assert_eq!(store.tree("tree").unwrap().entries().count(), 100);
        }
    }

    /// A checkpoint that noted its cut amid the frees would have a free map without pages that its
    /// records do not free, either.
    #[test]
    fn a_close_frees_nothing_while_a_checkpoint_is_under_way() {
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options()).unwrap();
        store.create_tree("tree").unwrap().insert(b"key", b"value").unwrap();
        let view = store.snapshot().unwrap();
        store.drop_tree("tree").unwrap();
        let (core, log) = (&store.core, store.core.pages.redo_log.as_ref().unwrap());
        thread::scope(|scope| {
            let checkpoint = log.lock_maps();
            let closing = scope.spawn(|| core.close());
            eventually("the close stops changes", || core.pages.gate.try_begin_change().is_none());
            thread::sleep(Duration::from_millis(100));
            assert!(core.has_dropped_trees());
            drop(checkpoint);
            closing.join().unwrap().unwrap();
        });
        assert!(!core.has_dropped_trees());
        drop(view);
    }

    /// A crash may come when the map of a cut is written and its header is not.
    #[test]
    fn the_map_of_a_cut_lies_elsewhere_than_that_of_the_cut_before() {
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options()).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let mut maps = vec![store.core.pages.header().free_map];
        for number in 0..400_u16 {
            tree.insert(&number.to_be_bytes(), &[7; 300]).unwrap();
            let header = store.core.pages.header();
            assert!(!header.clean && header.log.identity != 0);
            if maps.last() != Some(&header.free_map) {
                maps.push(header.free_map);
            }
        }
        assert!(maps.len() > 5, "{maps:?}");
        assert!(maps.windows(3).skip(1).all(|maps| maps[0] == maps[2]), "{maps:?}");
        assert!(store.core.pages.redo_log.as_ref().unwrap().end() > 5 * (16 << 10));
    }
}
