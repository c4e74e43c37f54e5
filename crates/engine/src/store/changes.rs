//! What was written to the file since a backup, so that an increment of that backup need not read
//! the rest.
//!
//! A store with a log knows of every frame of its file whether it was written since the newest
//! backup. It notes each write of its device, before the write and after it ([`TrackedDevice`]): a
//! write that is under way when a backup begins is noted, too. Frames that a write did not touch
//! have the same bytes as when the backup began to copy, and the backup has these.
//!
//! A crash loses nothing of that:
//!
//! - A checkpoint writes the set behind its free map, after all pages of its cut, and last its
//!   header. So the file's set has what was written before the cut.
//! - What is written later belongs to records after the cut, since a page leaves memory after its
//!   record, and recovery notes all pages of these records. Or it is a page of a value or of a load
//!   that no record takes. Then nothing refers to it.
//!
//! While a backup copies the store, the set of the one before is kept, and a second one has what is
//! written meanwhile. That one counts as soon as the backup is complete and durable. The next
//! backup may begin before that, while this one is checked. It has a set of its own.
//!
//! Frames that were free at the cut of a backup count as written. A load may write them before the
//! backup begins to copy, and its record may come after the end of the backup, which has its own
//! free map there.
//!
//! A program that changes the store without a log writes a header that names no set. Then the next
//! increment reads everything, and notes what changes from there on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::{fmt, io};

use vellum_pool::device::{
    Device, DeviceInfo, ReadDone, ReadRange, RegisteredMemory, Surface, Write,
};
use vellum_pool::{PAGE_SIZE, PageRef, Space};

use crate::error::Result;
use crate::page::bytes::get_u64;
use crate::planted::{StoreBug, is_planted};
use crate::store::header::Header;
use crate::sync::lock;

/// A state of a store that a backup or an increment leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackupState {
    pub store: u128,
    /// The sequence number of the newest header.
    pub sequence: u64,
    /// The header describes the store before the record with this number.
    pub lsn: u64,
    /// The checksum of the index of all frames.
    pub digest: u64,
}

impl BackupState {
    pub(crate) fn of(header: &Header, digest: u64) -> BackupState {
        let Header { store_id, sequence, log, .. } = *header;
        BackupState { store: store_id, sequence, lsn: log.lsn, digest }
    }
}

/// The frames of a file that were written. Those that the file did not have at first count as
/// written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrittenFrames {
    /// The frames that the file has had all the time.
    old: u64,
    /// So many frames have a bit together, as a power of two.
    order: u32,
    /// The bits of the old frames.
    words: Vec<u64>,
}

/// The most bits of a set. They take 1 MiB, which is written with every checkpoint.
const BITS_MAX: u64 = 1 << 23;

impl WrittenFrames {
    /// None of these frames of a file.
    fn none_of(frames: u64) -> WrittenFrames {
        WrittenFrames::with_bits(frames, BITS_MAX)
    }

    /// As few frames as possible share a bit, so that there are at most so many bits.
    fn with_bits(frames: u64, most: u64) -> WrittenFrames {
        let order = frames.div_ceil(most).next_power_of_two().trailing_zeros();
        let mut written = WrittenFrames { old: frames, order, words: Vec::new() };
        written.words = vec![0; written.words_of(frames)];
        written
    }

    /// The number of words for so many old frames.
    fn words_of(&self, old: u64) -> usize {
        old.div_ceil(1 << self.order).div_ceil(64) as usize
    }

    pub(crate) fn insert(&mut self, first: u64, count: u64) {
        let end = first.saturating_add(count).min(self.old);
        if first >= end {
            return;
        }
        let (mut bit, end) = (first >> self.order, ((end - 1) >> self.order) + 1);
        while bit < end {
            let (word, at) = (bit / 64, bit % 64);
            let bits = (end - bit).min(64 - at);
            self.words[word as usize] |= (u64::MAX >> (64 - bits)) << at;
            bit += bits;
        }
    }

    /// The file is not longer than this, or was not for a moment.
    fn cut_off(&mut self, frames: u64) {
        self.old = self.old.min(frames);
        self.words.truncate(self.words_of(self.old));
    }

    pub(crate) fn has(&self, frame: u64) -> bool {
        let bit = frame >> self.order;
        frame >= self.old || self.words[(bit / 64) as usize] & 1 << (bit % 64) != 0
    }
}

/// The most bytes that a set takes in a file.
pub(crate) const ENCODED_MAX: usize = HEAD + (BITS_MAX / 8) as usize;

const MAGIC: u64 = u64::from_le_bytes(*b"CHANGED\0");
const AT_SEQUENCE: usize = 8;
const AT_LSN: usize = 16;
const AT_DIGEST: usize = 24;
const AT_OLD: usize = 32;
const AT_ORDER: usize = 40;
const HEAD: usize = 48;

/// What was written to the file since a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangesSince {
    pub base: BackupState,
    pub written: WrittenFrames,
}

impl ChangesSince {
    fn encoded_len(&self) -> usize {
        HEAD + 8 * self.written.words.len()
    }

    /// Appends the bytes for the file to others: at most so many. Frames that find no room count as
    /// written.
    fn encode(&self, len_max: usize, bytes: &mut Vec<u8>) {
        let WrittenFrames { old, order, words } = &self.written;
        let words = &words[..words.len().min((len_max - HEAD) / 8)];
        let old = (*old).min((64 * words.len() as u64) << order);
        let BackupState { sequence, lsn, digest, .. } = self.base;
        for number in [MAGIC, sequence, lsn, digest, old, (*order).into()] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    /// What the file of a store has, which is not longer than `file_pages`.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn decode(
        bytes: &[u8],
        store: u128,
        file_pages: u64,
    ) -> std::result::Result<ChangesSince, &'static str> {
        let wrong = "what it says of changes since a backup is damaged";
        let (head, words) = bytes.split_at_checked(HEAD).ok_or(wrong)?;
        let (old, order) = (get_u64(head, AT_OLD), get_u64(head, AT_ORDER));
        let (words, rest) = words.as_chunks();
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let mut written = WrittenFrames { old, order: order as u32, words };
        let is_sound = get_u64(head, 0) == MAGIC
            && rest.is_empty()
            && order < u64::BITS.into()
            && written.words.len() == written.words_of(old);
        if !is_sound {
            return Err(wrong);
        }
        let base = BackupState {
            store,
            sequence: get_u64(head, AT_SEQUENCE),
            lsn: get_u64(head, AT_LSN),
            digest: get_u64(head, AT_DIGEST),
        };
        written.cut_off(file_pages);
        Ok(ChangesSince { base, written })
    }
}

/// Notes what is written to the file of a store.
#[derive(Debug, Default)]
pub(crate) struct ChangeTracker {
    /// There is a set to note it in.
    notes: AtomicBool,
    sets: Mutex<Sets>,
}

#[derive(Debug, Default)]
struct Sets {
    since: Option<ChangesSince>,
    /// The number of that backup.
    base: u64,
    /// Since each backup began that is under way, by its number.
    under_way: Vec<(u64, WrittenFrames)>,
    /// The number of the backup that began last.
    newest: u64,
    /// The newest backup itself, if pages are repaired from it.
    backup: Option<Arc<dyn BackupPages>>,
}

impl Sets {
    fn written(&mut self) -> impl Iterator<Item = &mut WrittenFrames> {
        let since = self.since.as_mut().map(|changes| &mut changes.written);
        since.into_iter().chain(self.under_way.iter_mut().map(|(_, written)| written))
    }

    fn is_used(&self) -> bool {
        self.since.is_some() || !self.under_way.is_empty()
    }
}

/// The pages of a backup.
pub(crate) trait BackupPages: fmt::Debug + Send + Sync {
    /// Reads a page as the backup has it. Returns false if it has none.
    ///
    /// # Errors
    /// What the system said; a backup that is damaged.
    fn read(&self, page: PageRef, bytes: &mut [u8]) -> Result<bool>;
}

impl ChangeTracker {
    /// Goes on with what the file has. Nothing is written to it yet.
    pub(crate) fn go_on(&self, changes: ChangesSince) {
        lock(&self.sets).since = Some(changes);
        self.notes.store(true, Ordering::Release);
    }

    /// Begins to note what is written from the beginning of a backup on. The file has all frames of
    /// this space, which is the one of the backup's cut.
    pub(crate) fn begin(self: &Arc<Self>, space: &Space) -> BackupUnderWay {
        let mut written = WrittenFrames::none_of(space.end());
        space.free_extents().for_each(|(first, count)| written.insert(first, count));
        let mut sets = lock(&self.sets);
        sets.newest += 1;
        let number = sets.newest;
        sets.under_way.push((number, written));
        self.notes.store(true, Ordering::Release);
        BackupUnderWay { tracker: self.clone(), number }
    }

    /// Takes the set of a backup that has ended. It leads to this state, if it is complete and
    /// durable.
    fn end(&self, number: u64, state: Option<BackupState>) {
        let mut sets = lock(&self.sets);
        let Some(at) = sets.under_way.iter().position(|(other, _)| *other == number) else {
            return;
        };
        let (_, written) = sets.under_way.swap_remove(at);
        let mut older = None;
        // A backup that began later may have ended before.
        if let Some(base) = state.filter(|_| number > sets.base) {
            sets.since = Some(ChangesSince { base, written });
            sets.base = number;
            older = sets.backup.take();
        }
        self.notes.store(sets.is_used(), Ordering::Release);
        // Without the lock, for which writes of pages wait.
        drop(sets);
        drop(older);
    }

    /// The state that the newest backup leads to.
    pub(crate) fn base(&self) -> Option<BackupState> {
        lock(&self.sets).since.as_ref().map(|changes| changes.base)
    }

    /// Has pages repaired from the newest backup, which leads to this state, until there is another
    /// one. Returns false if it is not the newest one.
    pub(crate) fn repair_from(&self, state: &BackupState, backup: Arc<dyn BackupPages>) -> bool {
        let mut sets = lock(&self.sets);
        let is_newest = sets.since.as_ref().is_some_and(|changes| changes.base == *state);
        let older = if is_newest { sets.backup.replace(backup) } else { Some(backup) };
        drop(sets);
        drop(older);
        is_newest
    }

    /// Reads a page from the newest backup that is not in memory, and that the file does not have
    /// as it was written. Returns false if the backup does not have the page, or has an older one.
    ///
    /// # Errors
    /// What the backup said.
    pub(crate) fn repair(&self, page: PageRef, bytes: &mut [u8]) -> Result<bool> {
        let mut frames = page.id.0..page.id.0 + u64::from(page.frames);
        let backup = {
            let sets = lock(&self.sets);
            let Some(changes) = &sets.since else { return Ok(false) };
            let is_written = frames.any(|frame| changes.written.has(frame));
            if is_written && !is_planted(StoreBug::StaleRepair) {
                return Ok(false);
            }
            sets.backup.clone()
        };
        backup.map_or(Ok(false), |backup| backup.read(page, bytes))
    }

    /// What was written since a state, if it is the one of the newest backup.
    pub(crate) fn since(&self, base: &BackupState) -> Option<WrittenFrames> {
        let sets = lock(&self.sets);
        let changes = sets.since.as_ref().filter(|changes| changes.base == *base);
        changes.map(|changes| changes.written.clone())
    }

    /// The bytes that the set takes in the file, if there is one.
    pub(crate) fn encoded_len(&self) -> Option<usize> {
        lock(&self.sets).since.as_ref().map(ChangesSince::encoded_len)
    }

    /// Appends the set for the file to the bytes of a free map: at most so many bytes.
    pub(crate) fn encode(&self, len_max: usize, bytes: &mut Vec<u8>) {
        if let Some(changes) = &lock(&self.sets).since {
            changes.encode(len_max, bytes);
        }
    }

    fn note(&self, writes: &[Write<'_>]) {
        if !self.notes.load(Ordering::Acquire) || is_planted(StoreBug::UnnotedWrite) {
            return;
        }
        let mut sets = lock(&self.sets);
        for written in sets.written() {
            for write in writes {
                let bytes: usize = write.parts.iter().map(|part| part.len()).sum();
                written.insert(write.page, (bytes / PAGE_SIZE) as u64);
            }
        }
    }

    fn note_length(&self, frames: u64) {
        lock(&self.sets).written().for_each(|written| written.cut_off(frames));
    }
}

/// A backup that has begun. Dropped, it is forgotten.
#[derive(Debug)]
pub(crate) struct BackupUnderWay {
    tracker: Arc<ChangeTracker>,
    number: u64,
}

impl BackupUnderWay {
    /// The backup is complete and durable, and leads to this state.
    pub(crate) fn complete(self, state: BackupState) {
        self.tracker.end(self.number, Some(state));
    }
}

impl Drop for BackupUnderWay {
    fn drop(&mut self) {
        self.tracker.end(self.number, None);
    }
}

/// The device of a store's file, whose writes are noted.
#[derive(Debug)]
pub(crate) struct TrackedDevice {
    inner: Arc<dyn Device>,
    tracker: Arc<ChangeTracker>,
}

impl TrackedDevice {
    pub(crate) fn new(inner: Arc<dyn Device>, tracker: &Arc<ChangeTracker>) -> TrackedDevice {
        TrackedDevice { inner, tracker: tracker.clone() }
    }
}

impl Device for TrackedDevice {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.inner.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.inner.start_reads(surface, reads);
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        self.inner.registered_memory(surface)
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.tracker.note(writes);
        self.inner.write(writes);
        self.tracker.note(writes);
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn pages(&self) -> io::Result<u64> {
        self.inner.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.tracker.note_length(pages);
        self.inner.resize(pages)
    }

    fn unlock(&self) {
        self.inner.unlock();
    }

    fn answers_at_once(&self) -> bool {
        self.inner.answers_at_once()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

#[cfg(test)]
mod tests {
    use vellum_pool::PageCopy;
    use vellum_pool::device::{HookedDevice, MemoryDevice};

    use super::*;

    const BASE: BackupState = BackupState { store: 1, sequence: 2, lsn: 3, digest: 4 };

    fn found(written: &WrittenFrames, frames: u64) -> Vec<u64> {
        (0..frames).filter(|frame| written.has(*frame)).collect()
    }

    fn write(device: &dyn Device, page: u64, frames: u32) {
        let copy = PageCopy::zeroed(PageRef::new(page, frames));
        let mut writes = [Write::new(page, [copy.bytes(), &[]])];
        device.write(&mut writes);
        let [write] = writes;
        write.result.unwrap();
    }

    fn tracked(frames: u64) -> (Arc<ChangeTracker>, TrackedDevice) {
        let (memory, tracker) = (Arc::new(MemoryDevice::new()), Arc::default());
        memory.resize(frames).unwrap();
        let device = TrackedDevice::new(memory, &tracker);
        (tracker, device)
    }

    /// 50 frames, all but the first 2 in use.
    fn space() -> Space {
        let mut space = Space::new(2);
        space.allocate(48);
        space
    }

    #[test]
    fn ranges_are_inserted_over_the_ends_of_words() {
        let mut written = WrittenFrames::none_of(200);
        for (first, count) in [(0, 1), (63, 2), (100, 0), (127, 66), (199, 9), (u64::MAX, 2)] {
            written.insert(first, count);
        }
        let expected: Vec<u64> = [0, 63, 64].into_iter().chain(127..193).chain([199]).collect();
        assert_eq!(found(&written, 200), expected);
        assert!(written.has(200) && written.has(u64::MAX), "the file did not have them");
        written.cut_off(130);
        assert_eq!(found(&written, 133), [0, 63, 64, 127, 128, 129, 130, 131, 132]);
    }

    #[test]
    fn frames_of_a_long_file_share_bits() {
        for (frames, order) in [(256, 0), (257, 1), (512, 1), (513, 2), (1 << 20, 12), (0, 0)] {
            assert_eq!(WrittenFrames::with_bits(frames, 256).order, order, "{frames}");
        }
        let mut written = WrittenFrames::with_bits(1000, 256);
        written.insert(7, 2);
        written.insert(999, 1);
        let expected: Vec<u64> = (4..12).chain(996..1003).collect();
        assert_eq!(found(&written, 1003), expected);
        written.cut_off(6);
        assert_eq!(found(&written, 9), [4, 5, 6, 7, 8]);
        let long = WrittenFrames::none_of(1 << 51);
        assert_eq!(HEAD + 8 * long.words.len(), ENCODED_MAX);
        assert!(!long.has((1 << 51) - 1));
    }

    #[test]
    fn a_set_comes_back_from_its_bytes_and_no_damage_does() {
        let mut written = WrittenFrames::none_of(130);
        written.insert(60, 10);
        let changes = ChangesSince { base: BASE, written };
        let mut bytes = vec![9];
        changes.encode(usize::MAX, &mut bytes);
        bytes.remove(0);
        assert_eq!(bytes.len(), changes.encoded_len());
        assert_eq!(ChangesSince::decode(&bytes, 1, 1000), Ok(changes.clone()));
        let shorter = ChangesSince::decode(&bytes, 1, 65).unwrap();
        assert_eq!(found(&shorter.written, 67), [60, 61, 62, 63, 64, 65, 66]);
        let mut fewer = Vec::new();
        changes.encode(HEAD + 23, &mut fewer);
        assert_eq!(fewer.len(), HEAD + 16);
        let fewer = ChangesSince::decode(&fewer, 1, 1000).unwrap();
        let expected: Vec<u64> = (60..70).chain(128..131).collect();
        assert_eq!(found(&fewer.written, 131), expected);
        for len in (0..bytes.len()).chain([bytes.len() + 8]) {
            let mut other = bytes.clone();
            other.resize(len, 0);
            assert!(ChangesSince::decode(&other, 1, 1000).is_err(), "{len}");
        }
        for at in [0, AT_OLD, AT_OLD + 7, AT_ORDER, AT_ORDER + 7] {
            let mut other = bytes.clone();
            other[at] = 0xff;
            assert!(ChangesSince::decode(&other, 1, 1000).is_err(), "{at}");
        }
        let mut written = WrittenFrames::with_bits(5000, 256);
        written.insert(3000, 9);
        let changes = ChangesSince { base: BASE, written };
        let mut bytes = Vec::new();
        changes.encode(usize::MAX, &mut bytes);
        assert_eq!(ChangesSince::decode(&bytes, 1, 5000), Ok(changes));
    }

    #[test]
    fn what_is_written_counts_since_the_newest_complete_backup() {
        let (tracker, device) = tracked(50);
        write(&device, 3, 1);
        assert_eq!(tracker.encoded_len(), None);
        let backup = tracker.begin(&space());
        write(&device, 4, 2);
        backup.complete(BASE);
        write(&device, 9, 1);
        let since = |base| tracker.since(base).map(|written| found(&written, 50));
        assert_eq!(since(&BASE), Some(vec![4, 5, 9]));
        let other = BackupState { digest: 5, ..BASE };
        assert_eq!(since(&other), None);
        // The next backup fails.
        let backup = tracker.begin(&space());
        write(&device, 20, 1);
        drop(backup);
        assert_eq!(since(&BASE), Some(vec![4, 5, 9, 20]));
        let backup = tracker.begin(&space());
        write(&device, 21, 1);
        assert_eq!(since(&BASE), Some(vec![4, 5, 9, 20, 21]));
        backup.complete(other);
        assert_eq!((since(&BASE), since(&other)), (None, Some(vec![21])));
        device.resize(30).unwrap();
        device.resize(50).unwrap();
        assert_eq!(since(&other), Some([21].into_iter().chain(30..50).collect()));
    }

    #[test]
    fn each_backup_that_is_under_way_has_its_own_set() {
        let (tracker, device) = tracked(50);
        let since = |base| tracker.since(base).map(|written| found(&written, 50));
        let one = tracker.begin(&space());
        write(&device, 1, 1);
        let two = tracker.begin(&space());
        write(&device, 2, 1);
        let three = tracker.begin(&space());
        write(&device, 3, 1);
        one.complete(BASE);
        assert_eq!(since(&BASE), Some(vec![1, 2, 3]));
        let other = BackupState { digest: 5, ..BASE };
        three.complete(other);
        assert_eq!(since(&other), Some(vec![3]));
        // It began earlier.
        two.complete(BackupState { digest: 6, ..BASE });
        assert_eq!(since(&other), Some(vec![3]));
    }

    #[test]
    fn what_was_free_at_a_cut_counts_as_written() {
        let (tracker, _device) = tracked(50);
        let mut space = space();
        space.free(10, 3).unwrap();
        space.free(40, 10).unwrap();
        tracker.begin(&space).complete(BASE);
        let expected: Vec<u64> = (10..13).chain(40..50).collect();
        assert_eq!(tracker.since(&BASE).map(|written| found(&written, 50)), Some(expected));
    }

    /// An increment that begins now reads the frame, and may get the bytes of before or after.
    #[test]
    fn a_write_is_noted_before_it_reaches_the_file() {
        let tracker = Arc::<ChangeTracker>::default();
        let hooked = Arc::new(HookedDevice::new(MemoryDevice::new()));
        hooked.resize(50).unwrap();
        tracker.begin(&space()).complete(BASE);
        let (of_hook, noted) = (tracker.clone(), Arc::new(Mutex::new(Vec::new())));
        let place = noted.clone();
        hooked.set_hook(move |_| *lock(&place) = found(&of_hook.since(&BASE).unwrap(), 50));
        write(&TrackedDevice::new(hooked.clone(), &tracker), 7, 2);
        hooked.clear_hook();
        assert_eq!(*lock(&noted), [7, 8]);
    }

    #[derive(Debug)]
    struct Sevens;

    impl BackupPages for Sevens {
        fn read(&self, _: PageRef, bytes: &mut [u8]) -> Result<bool> {
            bytes.fill(7);
            Ok(true)
        }
    }

    #[test]
    fn a_page_is_repaired_if_none_of_its_frames_was_written_since_the_newest_backup() {
        let (tracker, device) = tracked(50);
        tracker.begin(&space()).complete(BASE);
        let other = BackupState { digest: 5, ..BASE };
        assert!(!tracker.repair_from(&other, Arc::new(Sevens)));
        assert!(tracker.repair_from(&BASE, Arc::new(Sevens)));
        write(&device, 9, 1);
        let repairs = |first, frames| {
            let mut bytes = [0; 3];
            let repaired = tracker.repair(PageRef::new(first, frames), &mut bytes).unwrap();
            assert_eq!(bytes, [if repaired { 7 } else { 0 }; 3]);
            repaired
        };
        let found = [(8, 1), (8, 2), (9, 1), (10, 2), (48, 2), (49, 2), (50, 1)]
            .map(|(first, frames)| repairs(first, frames));
        assert_eq!(found, [true, false, false, true, true, false, false]);
        // Another backup has begun, and is complete.
        let backup = tracker.begin(&space());
        assert!(repairs(8, 1));
        backup.complete(other);
        assert!(!repairs(8, 1));
    }

    /// The backup may read the frame before the write has reached it.
    #[test]
    fn a_write_that_is_under_way_when_a_backup_begins_is_noted() {
        let tracker = Arc::<ChangeTracker>::default();
        let hooked = Arc::new(HookedDevice::new(MemoryDevice::new()));
        hooked.resize(50).unwrap();
        let begun = tracker.clone();
        let backup = Arc::new(Mutex::new(None));
        let place = backup.clone();
        hooked.set_hook(move |_| *lock(&place) = Some(begun.begin(&space())));
        let device = TrackedDevice::new(hooked.clone(), &tracker);
        write(&device, 7, 1);
        hooked.clear_hook();
        lock(&backup).take().unwrap().complete(BASE);
        assert_eq!(found(&tracker.since(&BASE).unwrap(), 50), [7]);
    }
}
