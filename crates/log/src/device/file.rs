//! A log in a folder: files of one size, which are allocated and zeroed ahead and recycled.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::discovery::{NEW, find, name, number};
use super::folder::{Folder, KernelFolder};
use super::owner;
use super::segment::{NewSegment, Pace, Segment, SegmentHead};
use super::sync_method::{Choice, PROBE, SyncMethod, probe};
use super::{LogDevice, Written, is_full};
use crate::block::{BLOCK_BYTES, Block};
use crate::error::LogError;
use crate::opening_process::OpeningProcess;

/// How a [`FileLog`] is opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileLogOptions {
    /// Bytes of each file, a multiple of 4096 and at least 16384; for a log that is created.
    pub segment_bytes: u64,
    /// Bytes of all files; a log has two files at least.
    pub most_bytes: u64,
    /// How blocks become durable; `None` for the method that a probe finds fastest.
    pub sync_method: Option<SyncMethod>,
}

impl Default for FileLogOptions {
    fn default() -> Self {
        Self { segment_bytes: 16 << 20, most_bytes: 1 << 30, sync_method: None }
    }
}

/// A log in a folder.
#[derive(Debug)]
pub struct FileLog {
    /// The folder, locked.
    folder: Box<dyn Folder>,
    log: u64,
    /// Blocks of a segment.
    blocks: u64,
    most: usize,
    choice: Choice,
    segments: RwLock<Segments>,
    /// The file that is made for the next segment, if there is one.
    next_file: Mutex<Option<NewSegment>>,
    /// The file of the log's first segment, until all of it is zeroed.
    first_file: Mutex<Option<NewSegment>>,
    /// Whether a write or a sync has failed, of blocks or of heads: nothing is written after that.
    failed: AtomicBool,
    /// Held while a write or sync is under way whose failure the kernel may tell to another: it
    /// tells each only once.
    alone: Mutex<()>,
    taken: AtomicBool,
    process: OpeningProcess,
}

impl Drop for FileLog {
    /// Gives the folder back though children of this process share the lock; a child does not.
    fn drop(&mut self) {
        if self.process.is_here() {
            self.folder.unlock();
        }
    }
}

#[derive(Debug)]
struct Segments {
    /// The number of the first one.
    first: u64,
    live: VecDeque<Arc<Segment>>,
    spare: Vec<Arc<Segment>>,
    /// Files that there are.
    files: usize,
    /// The number in the name of the next one.
    name: u64,
    /// Blocks of the newest one for which there is no room yet.
    unready: u64,
}

impl Segments {
    /// The blocks that there is room for.
    fn range(&self, blocks: u64) -> Range<u64> {
        let end = self.first + self.live.len() as u64;
        self.first * blocks..end * blocks - self.unready
    }
}

impl FileLog {
    /// Opens the log in a folder, or creates it there; the folder, too, if its own is there.
    ///
    /// # Errors
    /// `InUse` if another handle has it; `Unfit` if the files do not belong together; what the
    /// system said.
    pub fn open(folder: impl AsRef<Path>, options: &FileLogOptions) -> Result<FileLog, LogError> {
        let folder = folder.as_ref();
        FileLog::open_in(folder, options, || Ok(Box::new(KernelFolder::lock(folder)?)))
    }

    /// Makes a new log in a folder, with one file. What a log of the same owner left there goes, if
    /// `is_over` says that the owner needs it no more; it may look at the folder, which is locked
    /// meanwhile ([`LogView`](crate::LogView)). An owner is a number that is not 0. The log has no
    /// owner until [`own`](FileLog::own) says so: a log without an owner goes when the next one is
    /// made.
    ///
    /// # Errors
    /// As [`open`](FileLog::open); `Unfit` if the folder has the log of another owner, one that its
    /// owner still needs, or one that was not made by this function; what `is_over` returns.
    pub fn create(
        folder: impl AsRef<Path>,
        owner: u128,
        options: &FileLogOptions,
        is_over: impl FnOnce() -> Result<bool, LogError>,
    ) -> Result<FileLog, LogError> {
        let folder = folder.as_ref();
        let doing = || format!("making a log in {}", folder.display());
        let log = FileLog::open_in(folder, options, || {
            let locked = KernelFolder::lock(folder)?;
            owner::take_over(folder, &locked, owner, is_over)?;
            remove_segments(&locked).map_err(LogError::io(doing()))?;
            Ok(Box::new(locked))
        })?;
        log.extend().map_err(|source| {
            // No program needs what is there. What stays goes with the next log.
            let _ = log.remove();
            match is_full(&source) {
                true => LogError::Full { bytes: options.segment_bytes, source },
                false => LogError::io(doing())(source),
            }
        })?;
        Ok(log)
    }

    /// Removes the folder of a log if it is empty and no handle has it.
    ///
    /// # Errors
    /// What the system said, if the folder stays though no handle has it.
    pub fn remove_empty_folder(folder: impl AsRef<Path>) -> io::Result<()> {
        KernelFolder::remove_empty(folder.as_ref())
    }

    /// Whether there is a log of this owner, or without an owner, in a folder, or a part of one.
    pub fn is_left(folder: impl AsRef<Path>, owner: u128) -> bool {
        owner::is_left(folder.as_ref(), owner)
    }

    /// Notes durably that the log has this owner, for which [`create`](FileLog::create) made it.
    ///
    /// # Errors
    /// What the system said.
    pub fn own(&self, owner: u128) -> Result<(), LogError> {
        owner::own(&*self.folder, owner).map_err(LogError::io("giving the log its owner"))
    }

    /// Removes the files of the log, and gives the folder to the next handle. This one takes
    /// nothing more.
    ///
    /// # Errors
    /// What the system said. Then the log may be there in part, and [`create`](FileLog::create)
    /// removes the rest.
    pub fn remove(&self) -> Result<(), LogError> {
        if !self.process.is_here() {
            return Err(LogError::Forked);
        }
        self.failed.store(true, Ordering::Release);
        let mut segments = self.write_segments();
        segments.live.clear();
        segments.spare.clear();
        drop(segments);
        (*self.next_file(), *self.first_file()) = (None, None);
        let folder = &*self.folder;
        // First, so that no owner needs what a crash leaves.
        let disowned = owner::disown(folder);
        let removed = disowned.and_then(|()| remove_segments(folder));
        let removed = removed.and_then(|()| owner::remove(folder));
        folder.unlock();
        removed.map_err(LogError::io("removing the log"))
    }

    /// Gives the folder to the next handle, before this one is dropped. This one takes nothing
    /// more.
    pub fn unlock(&self) {
        if self.process.is_here() {
            self.failed.store(true, Ordering::Release);
            self.folder.unlock();
        }
    }

    /// The same, in the folder that `lock` gives.
    pub(crate) fn open_in(
        folder: &Path,
        options: &FileLogOptions,
        lock: impl FnOnce() -> Result<Box<dyn Folder>, LogError>,
    ) -> Result<FileLog, LogError> {
        let unfit = |what: &str| LogError::Unfit { path: folder.into(), what: what.into() };
        let blocks = options.segment_bytes / BLOCK_BYTES as u64;
        let fits = options.segment_bytes.is_multiple_of(BLOCK_BYTES as u64) && blocks >= 4;
        if !fits || options.most_bytes / options.segment_bytes < 2 {
            return Err(unfit(
                "a segment has a multiple of 4096 bytes, at least 16384, and a log two segments",
            ));
        }
        let locked = lock()?;
        let doing = || format!("opening the log in {}", folder.display());
        // Also of a folder that is there: its process may have been killed before it did so.
        locked.sync().and_then(|()| locked.sync_above()).map_err(LogError::io(doing()))?;
        let choice = match options.sync_method {
            Some(sync_method) => Choice { sync_method, in_flight: 1 },
            None => probe(&*locked).map_err(LogError::io(doing()))?,
        };
        let found = find(folder, &*locked, choice.sync_method, blocks - 1)?;
        let most = options.most_bytes / ((found.blocks + 1) * BLOCK_BYTES as u64);
        let files = found.live.len() + found.spare.len();
        let (first, live, spare) = (found.first, found.live, found.spare);
        let segments = Segments { first, live, spare, files, name: found.name, unready: 0 };
        Ok(FileLog {
            folder: locked,
            log: found.log,
            blocks: found.blocks,
            most: most.max(2) as usize,
            choice,
            segments: RwLock::new(segments),
            next_file: Mutex::new(None),
            first_file: Mutex::new(None),
            failed: AtomicBool::new(false),
            alone: Mutex::new(()),
            taken: AtomicBool::new(false),
            process: OpeningProcess::new(),
        })
    }

    /// How blocks become durable.
    pub fn sync_method(&self) -> SyncMethod {
        self.choice.sync_method
    }

    /// A file that gets a new number: a spare one, or a new one, which has no name yet.
    fn take_spare(&self) -> io::Result<(Arc<Segment>, Option<NewSegment>)> {
        let mut segments = self.write_segments();
        let is_first = segments.live.is_empty();
        if let Some(spare) = segments.spare.pop() {
            return Ok((spare, None));
        }
        drop(segments);
        let mut next = self.next_file();
        let pace = if is_first { Pace::First } else { Pace::Now };
        let begins = |next: &NewSegment| is_first && next.can_begin();
        while !next.as_ref().is_some_and(begins) && self.make_part(&mut next, pace)? {}
        let made = next.take().ok_or(io::ErrorKind::NotFound)?;
        Ok((made.segment.clone(), Some(made)))
    }

    /// Makes more of the log's first segment ready, if not all of it is. Returns the new end.
    fn extend_first(&self) -> io::Result<Option<u64>> {
        let mut first = self.first_file();
        let Some(new) = &mut *first else { return Ok(None) };
        let known = self.blocks - self.write_segments().unready;
        if new.ready() <= known {
            self.zero(new, Pace::Now)?;
        }
        let mut segments = self.write_segments();
        segments.unready = self.blocks - new.ready();
        if new.is_whole() {
            *first = None;
        }
        Ok(Some(segments.range(self.blocks).end))
    }

    /// Zeroes more of the first segment, to which the log writes meanwhile. Returns whether more is
    /// left.
    fn zero(&self, first: &mut NewSegment, pace: Pace) -> io::Result<bool> {
        let _alone = self.alone();
        self.unless_failed_but_for_room(|| first.zero(pace))??;
        // The kernel may tell this sync, and no other, that a block of the log was not written.
        self.unless_failed(|| first.settle(true)).map_err(for_good)?;
        Ok(!first.is_whole())
    }

    fn first_file(&self) -> MutexGuard<'_, Option<NewSegment>> {
        self.first_file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the next step of making a new file. Returns whether there are more.
    fn make_part(&self, next: &mut Option<NewSegment>, pace: Pace) -> io::Result<bool> {
        let Some(new) = next else {
            self.check_most()?;
            self.folder.remove(NEW)?;
            *next =
                Some(NewSegment::create(&*self.folder, NEW, self.choice.sync_method, self.blocks)?);
            return Ok(true);
        };
        let made = self.unless_failed_or_full(|| new.step(pace));
        if made.is_err() {
            *next = None;
        }
        made
    }

    /// Fails if the log has as many files as it may have.
    fn check_most(&self) -> io::Result<()> {
        if self.write_segments().files < self.most {
            return Ok(());
        }
        let bytes = self.most as u64 * (self.blocks + 1) * BLOCK_BYTES as u64;
        let what = format!(
            "the log has all of its {bytes} bytes in use: trim it, or open it with a larger bound"
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, what))
    }

    fn next_file(&self) -> MutexGuard<'_, Option<NewSegment>> {
        self.next_file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a new file a name of the log's that no file has.
    fn name(&self) -> io::Result<()> {
        loop {
            let mut segments = self.write_segments();
            let name = name(segments.name);
            segments.name += 1;
            drop(segments);
            match self.folder.rename(NEW, &name) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                renamed => return renamed,
            }
        }
    }

    /// Calls `each` for the part of some blocks that lies in each segment: the segment, the first
    /// block in it, and which of the blocks.
    fn by_segment(
        &self,
        first: u64,
        count: usize,
        mut each: impl FnMut(&Segment, u64, Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < count {
            let number = first + done as u64;
            let inside = number % self.blocks;
            let part = ((self.blocks - inside) as usize).min(count - done);
            each(&*self.segment(number)?, inside, done..done + part)?;
            done += part;
        }
        Ok(())
    }

    fn segment(&self, block: u64) -> io::Result<Arc<Segment>> {
        self.check_process()?;
        let segments = self.segments.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let index = (block / self.blocks).checked_sub(segments.first);
        let segment = index.and_then(|index| segments.live.get(index as usize));
        let outside = || io::Error::other(format!("block {block} is outside the log"));
        segment.cloned().ok_or_else(outside)
    }

    fn write_segments(&self) -> std::sync::RwLockWriteGuard<'_, Segments> {
        self.segments.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Fails in the child of a fork: it shares the files with its parent, and its locks may be held
    /// by threads that it does not have.
    fn check_process(&self) -> io::Result<()> {
        if self.process.is_here() { Ok(()) } else { Err(io::Error::other(LogError::Forked)) }
    }

    /// Waits for others that write or sync.
    fn alone(&self) -> MutexGuard<'_, ()> {
        self.alone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes or syncs, unless that has failed before: what the page cache holds since then may
    /// differ from the disk, and no later sync would say so. Only a new opening of the folder asks
    /// the disk.
    fn unless_failed<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.failed.load(Ordering::Acquire) {
            let what = "an earlier write or sync of the log has failed: open its folder again";
            return Err(io::Error::other(what));
        }
        act().inspect_err(|_| self.failed.store(true, Ordering::Release))
    }

    /// The same. If room is missing, nothing has failed.
    fn unless_failed_but_for_room<T>(
        &self,
        act: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<io::Result<T>> {
        self.unless_failed(|| match act() {
            Err(error) if is_full(&error) => Ok(Err(error)),
            done => done.map(Ok),
        })
    }

    /// The same for a step of a new file, which goes if room is missing.
    fn unless_failed_or_full<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let full = self.unless_failed_but_for_room(act)?;
        if full.is_err() {
            self.folder.remove(NEW)?;
        }
        full
    }
}

impl LogDevice for FileLog {
    fn identity(&self) -> u64 {
        self.log
    }

    fn scan(&self) -> Range<u64> {
        if !self.process.is_here() {
            return 0..0;
        }
        let segments = self.segments.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        segments.range(self.blocks)
    }

    fn prepare(&self) -> io::Result<bool> {
        self.check_process()?;
        if let Some(first) = &mut *self.first_file() {
            return self.zero(first, Pace::Ahead);
        }
        let has_spare = !self.write_segments().spare.is_empty();
        if has_spare { Ok(false) } else { self.make_part(&mut self.next_file(), Pace::Ahead) }
    }

    fn extend(&self) -> io::Result<u64> {
        self.check_process()?;
        if let Some(end) = self.extend_first()? {
            return Ok(end);
        }
        let (segment, new) = self.take_spare()?;
        // Seen after the file was taken: the segment that it was comes before the oldest one.
        let live = self.scan();
        let [oldest, number] = [live.start, live.end].map(|block| block / self.blocks);
        let head = SegmentHead { log: self.log, number, blocks: self.blocks, oldest };
        // If this fails, the file may have the number on the disk or not: no other file must get
        // it. Not even for want of room, which a file system may need that writes elsewhere.
        self.unless_failed(|| segment.write_head(head)).map_err(for_good)?;
        if new.is_some() {
            self.unless_failed_or_full(|| self.name())?;
            // It is there after a crash once its folder is durable.
            self.unless_failed(|| self.folder.sync()).map_err(for_good)?;
        }
        let mut first = self.first_file();
        let mut segments = self.write_segments();
        segments.files += usize::from(new.is_some());
        segments.live.push_back(segment);
        *first = new.filter(|new| !new.is_whole());
        segments.unready = first.as_ref().map_or(0, |first| self.blocks - first.ready());
        Ok(segments.range(self.blocks).end)
    }

    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written> {
        self.check_process()?;
        let sync_method = self.choice.sync_method;
        let _alone = (sync_method == SyncMethod::BufferedDsync).then(|| self.alone());
        let count = parts[0].len() + parts[1].len();
        let write = |segment: &Segment, inside, part: Range<usize>| {
            let middle = parts[0].len();
            let (from, to) = (part.start, part.end);
            let head = &parts[0][from.min(middle)..to.min(middle)];
            let tail = &parts[1][from.max(middle) - middle..to.max(middle) - middle];
            segment.write(inside, [head, tail])
        };
        self.unless_failed(|| self.by_segment(first, count, write))?;
        Ok(if sync_method.is_durable() { Written::Durable } else { Written::Cached })
    }

    fn sync(&self) -> io::Result<()> {
        self.check_process()?;
        let _alone = self.alone();
        let segments = self.segments.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let live: Vec<_> = segments.live.iter().cloned().collect();
        drop(segments);
        self.unless_failed(|| live.iter().try_for_each(|segment| segment.sync()))
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        self.by_segment(first, blocks.len(), |segment, inside, part| {
            segment.read(inside, &mut blocks[part])
        })
    }

    fn trim(&self, before: u64) -> io::Result<()> {
        self.check_process()?;
        let mut segments = self.write_segments();
        while segments.live.len() > 1 && (segments.first + 1) * self.blocks <= before {
            let oldest = segments.live.pop_front();
            segments.spare.extend(oldest);
            segments.first += 1;
        }
        Ok(())
    }

    fn taken(&self) -> &AtomicBool {
        &self.taken
    }

    fn in_flight(&self) -> usize {
        self.choice.in_flight
    }
}

/// Removes the files of a log, so that none of them comes back after a loss of power.
fn remove_segments(folder: &dyn Folder) -> io::Result<()> {
    let names = folder.names()?;
    let ours: Vec<_> = names.iter().filter(|name| number(name).is_some()).collect();
    for name in &ours {
        folder.remove(name)?;
    }
    folder.remove(NEW)?;
    folder.remove(PROBE)?;
    if ours.is_empty() { Ok(()) } else { folder.sync() }
}

/// An error after which the log takes nothing more, so that no caller waits for room.
fn for_good(error: io::Error) -> io::Error {
    if !is_full(&error) {
        return error;
    }
    io::Error::other(format!("{error}, though the place was written before: open the folder again"))
}
